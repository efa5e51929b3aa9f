"""Models for the tests: the real default one, loaded once, and tiny ones on disk."""

from pathlib import Path

import pytest
import torch

import minivllm.llm as llm_module
from minivllm.llm import LLM
from minivllm.loader import LoadError, find_model, load_model, open_checkpoint


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return find_model("smollm2")
    except LoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """The default model's checkpoint and its decoder in float32."""
    checkpoint = open_checkpoint("smollm2")
    return checkpoint, load_model(checkpoint, torch.device("cpu"), torch.float32)


@pytest.fixture
def make_llm(smollm2, monkeypatch):
    """`LLM(...)` on the real weights, without reading them again."""
    checkpoint, decoder = smollm2
    monkeypatch.setattr(llm_module, "open_checkpoint", lambda name: checkpoint)
    monkeypatch.setattr(llm_module, "load_model", lambda *args: decoder)
    return lambda **options: LLM("smollm2", **({"num_pages": 512} | options))
