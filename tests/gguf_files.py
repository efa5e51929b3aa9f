"""GGUF files for the tests, written by the `gguf` package from a decoder's weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from minivllm.loader import GGUF_NAMES
from minivllm.model import ModelConfig

F32 = GGMLQuantizationType.F32
OURS = {ours: theirs for theirs, ours in GGUF_NAMES.items()}


def gguf_name(name: str) -> str:
    """layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight"""
    stem, _, kind = name.rpartition(".")
    prefix = ""
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"blk.{layer}."
    return f"{prefix}{OURS[stem]}.{kind}"


def permuted(name: str, rows: Any, config: ModelConfig) -> Any:
    """The rows of a Llama's q and k as llama.cpp's converter leaves them."""
    if "q_proj" not in name and "k_proj" not in name:
        return rows
    heads = config.num_heads if "q_proj" in name else config.num_kv_heads
    pairs = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    kind: GGMLQuantizationType = F32,
    family: str = "llama",
    vocabulary: Sequence[str] | None = None,
    facts: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write weights (transformers' order of rows), matrices in a quantisation."""
    writer = GGUFWriter(str(path), family)
    numbers = {
        "block_count": config.num_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_context,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"{family}.{key}", number)
    writer.add_float32(f"{family}.rope.freq_base", config.rope_theta)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", config.norm_eps)
    add_vocabulary(writer, vocabulary or [f"t{i}" for i in range(config.vocab_size)])
    for key, value in (facts or {}).items():
        add_fact(writer, key, value)
    for name, tensor in weights.items():
        rows = tensor.detach().float().numpy()
        if family == "llama":
            rows = permuted(name, rows, config)
        used = kind if rows.ndim == 2 else F32
        writer.add_tensor(gguf_name(name), quantize(rows, used), raw_dtype=used)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    return finish(writer)


def add_vocabulary(writer: GGUFWriter, words: Sequence[str]) -> None:
    writer.add_token_list(list(words))
    writer.add_token_types([kind_of(word) for word in words])


def kind_of(word: str) -> int:
    """llama.cpp's number for what a word is."""
    if word.startswith("<|") or word in ("<s>", "</s>"):
        return 3  # control
    return 6 if word.startswith("<0x") else 2 if word == "<unk>" else 1


def add_fact(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def finish(writer: GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)
