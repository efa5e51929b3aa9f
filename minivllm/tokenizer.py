# Exported from chapters/06_weights_and_words.py (34889674): edit the chapter.
"""Text to token ids and back."""

from collections.abc import Sequence
from typing import cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from minivllm.loader import Checkpoint, GGUFFile, LoadError
from minivllm.request import SamplingParams

GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS = {  # how GGUF's `tokenizer.ggml.pre` cuts text before merging
    "gpt-2": GPT2_SPLIT,
    "default": GPT2_SPLIT,
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), GPT2_SPLIT]
    ),
}


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer of a model folder or GGUF file; None for a folder that has none."""
    if isinstance(checkpoint, GGUFFile):
        return gguf_tokenizer(checkpoint)
    if (checkpoint / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    older = ("tokenizer.model", "vocab.json")
    if any((checkpoint / name).is_file() for name in older):
        from transformers import AutoTokenizer  # knows how to convert the older formats

        converted = AutoTokenizer.from_pretrained(str(checkpoint)).backend_tokenizer
        return cast(Tokenizer, converted)
    return None


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build a byte-pair tokenizer from the tables of a GGUF file."""
    model, pre = (
        file.get("tokenizer.ggml.model"),
        file.get("tokenizer.ggml.pre", "default"),
    )
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise LoadError(
            f"{file.path}: tokenizer {model!r} with {pre!r} is not supported yet"
        )
    words = file.strings("tokenizer.ggml.tokens")
    pairs = (merge.partition(" ") for merge in file.strings("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.get("tokenizer.ggml.token_type")
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False) for word in control]
    )
    return tokenizer


class TextWriter:
    """The text of one request, token by token, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stops: Sequence[str] = tuple(params.stop or ())
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._text = ""
        self._stopped = False

    def push(self, token_id: int) -> bool:
        """Take a token; True if the text now holds a stop string, which is cut off."""
        if self._stopped:
            return True
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id) or ""
        seen = len(self._text)
        self._text += piece
        for stop in self._stops:
            at = self._text.find(stop, max(0, seen - len(stop) + 1))
            if at >= 0:
                self._text, self._stopped = self._text[:at], True
        return self._stopped

    def text(self, finished: bool) -> str:
        """The text so far; when finished, with what an incomplete end decodes to."""
        if self._stopped or not finished:
            return self._text
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)
