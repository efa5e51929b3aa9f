"""Models for the tests: the real default one, loaded once, and tiny ones on disk."""

from pathlib import Path

import pytest
import torch

import minivllm.llm as llm_module
from minivllm.llm import LLM
from minivllm.loader import LoadError, find_model, load_model, open_checkpoint
from minivllm.model import Decoder, ModelConfig


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


@pytest.fixture(scope="session")
def random_decoder():
    """Small decoders with random weights that say many things: `(vocab, context)`."""

    def make(vocab_size: int, max_context: int = 256) -> Decoder:
        torch.manual_seed(1)
        sizes = ModelConfig(vocab_size, 32, 48, 2, 4, 2, 8, max_context, tied_head=True)
        model = Decoder(sizes).eval()
        for tensor in model.parameters():
            tensor.data += 0.2 * torch.randn_like(tensor)
        return model

    return make


@pytest.fixture
def make_llm(smollm2, monkeypatch):
    """`LLM(...)` on the real weights, without reading them again."""
    checkpoint, decoder = smollm2
    monkeypatch.setattr(llm_module, "open_checkpoint", lambda name: checkpoint)
    monkeypatch.setattr(llm_module, "load_model", lambda *args: decoder)
    return lambda **options: LLM("smollm2", **({"num_pages": 512} | options))
