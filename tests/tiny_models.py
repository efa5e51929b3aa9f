"""Small random checkpoints that transformers itself writes, and their true logits."""

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from minivllm.loader import load_model, open_checkpoint
from minivllm.model import Decoder

VOCAB = 101
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA = (LlamaForCausalLM, LlamaConfig)
QWEN2 = (Qwen2ForCausalLM, Qwen2Config)
QWEN3 = (Qwen3ForCausalLM, Qwen3Config)
MODELS = {
    "llama, one K/V head for each head": (*LLAMA, {"num_key_value_heads": 12}),
    "llama, three heads a group": (*LLAMA, {"num_key_value_heads": 4}),
    "llama, four heads a group, wide heads, tied": (
        *LLAMA,
        {"num_key_value_heads": 3, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "llama 3 rope": (*LLAMA, {"num_key_value_heads": 4, "rope_parameters": LLAMA3}),
    "qwen2, biases": (*QWEN2, {"num_key_value_heads": 4}),
    "qwen2, one K/V head, tied": (
        *QWEN2,
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3, head norms": (*QWEN3, {"num_key_value_heads": 4, "head_dim": 16}),
}


def write_checkpoint(folder: Path, name: str, **save: object) -> PreTrainedModel:
    """Let transformers write a model with random weights; return it."""
    make_model, make_config, extra = MODELS[name]
    torch.manual_seed(0)
    model = make_model(make_config(**SIZES | extra)).eval()
    for tensor in model.parameters():  # biases and norms start as constants: stir them
        tensor.data += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder, **save)
    return model


def load(folder: Path) -> Decoder:
    return load_model(open_checkpoint(str(folder)), torch.device("cpu"), torch.float32)


@dataclass(frozen=True, eq=False)
class Tiny:
    """A checkpoint, transformers' reading of it, and ours."""

    folder: Path
    reference: PreTrainedModel
    decoder: Decoder

    def logits(self, token_ids: object) -> Tensor:
        """What transformers says after each token: [tokens, vocab]."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(token_ids)])).logits[0]


@cache
def _folder(name: str) -> tuple[tempfile.TemporaryDirectory[str], PreTrainedModel]:
    kept = tempfile.TemporaryDirectory(prefix="tiny-model-")
    return kept, write_checkpoint(Path(kept.name), name)


def tiny(name: str) -> Tiny:
    """A model by its name in `MODELS`; read from disk anew each time."""
    kept, reference = _folder(name)
    return Tiny(Path(kept.name), reference, load(Path(kept.name)))
