# Exported from chapters/06_weights_and_words.py (5fca1bcf): edit the chapter.
"""Text to token ids and back."""

from __future__ import annotations

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

from minivllm.loader import Checkpoint, GGUFFile, LoadError, read_json, reading
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
