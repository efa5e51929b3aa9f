"""Token ids to text, as they come: never half a character, never what is taken back."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minivllm.request import SamplingParams
from minivllm.tokenizer import TextWriter


def byte_tokenizer() -> Tokenizer:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """One token for each byte, the way of SentencePiece; the last is a word."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁Paris"]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


BYTES, FALLBACK = byte_tokenizer(), fallback_tokenizer()


def write(tokenizer, token_ids, stop=(), prompt=()):
    """What is seen after each token until a stop string, and at the end."""
    writer = TextWriter(tokenizer, list(prompt), SamplingParams(stop=stop))
    seen = []
    for token in token_ids:
        found = writer.push(token)
        seen.append(writer.text(False))
        if found:
            break
    return seen, writer.text(True)


@pytest.mark.parametrize("text", ["Ï", "😀", "a😀b", "日本語", "é", "plain"])
def test_text_is_never_half_a_character(text):
    """f2: bytes one by one: the stream is a prefix of the whole, at last the whole."""
    for ids in (BYTES.encode(text).ids, list(text.encode("utf-8"))):
        tokenizer = BYTES if ids == BYTES.encode(text).ids else FALLBACK
        seen, whole = write(tokenizer, ids)
        assert all(text.startswith(part) for part in seen)
        assert seen[-1] == whole == text


def test_an_incomplete_end_and_a_space():
    """f2: the lost bytes are shown at once when something else follows, or at last."""
    [space, *lost] = BYTES.encode(" 😀").ids
    seen, whole = write(BYTES, [*lost[:2], space])
    assert seen == ["", "", "\ufffd "] and whole == "\ufffd "
    assert write(BYTES, lost[:2]) == (["", ""], "\ufffd")


@settings(deadline=None)
@example("\x80\ufffd\x80", FALLBACK)
@given(st.text(max_size=30), st.sampled_from([BYTES, FALLBACK]))
def test_any_text_comes_through(text, tokenizer):
    """Every prefix is a prefix, and nothing of it is lost."""
    ids = BYTES.encode(text).ids if tokenizer is BYTES else list(text.encode("utf-8"))
    seen, whole = write(tokenizer, ids)
    assert all(text.startswith(part) for part in seen) and whole == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_come_through(ids):
    """Rubbish too, character by character as the decoder has it for all at once."""
    seen, whole = write(BYTES, ids)
    assert whole == BYTES.decode(ids)
    assert all(whole.startswith(part) for part in seen)


def test_rubbish_is_not_read_again_and_again(monkeypatch):
    """3,000 bytes that are no character: what is decoded stays a short window."""
    sizes = []

    class Watched(TextWriter):
        def _decode(self):
            sizes.append(len(self._ids))
            return super()._decode()

    writer = Watched(BYTES, [1] * 500, SamplingParams(stop=["x" * 9]))
    [half, *_] = BYTES.encode("é").ids
    for _ in range(3000):
        writer.push(half)
        writer.text(False)
    assert max(sizes) < 30 and len(sizes) < 3500, "read again and again"
    assert writer.text(True) == "\ufffd" * 3000


def test_a_words_space_is_kept():
    """Some tokenizers write a space only between words: the prompt's end is context."""
    words = ["<unk>", "▁The", "▁capital", "▁Paris", "▁is"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    writer = TextWriter(tokenizer, [1, 2], SamplingParams(stop=[" is"]))
    assert not writer.push(3) and writer.text(False) == " Paris"
    assert writer.push(4) == " is" and writer.text(True) == " Paris"
    many, whole = write(tokenizer, [3, 4] * 40, prompt=[1, 2])
    assert whole == many[-1] == " Paris is" * 40


def test_byte_tokens_never_raise():
    """Bytes that make no character, between words: text comes, and no exception."""
    for ids in itertools.product([0x41, 0xC4, 0xF0, 256], repeat=5):
        _, whole = write(FALLBACK, ids, prompt=[256])
        told = FALLBACK.decode([256, *ids])
        if "\ufffd" not in told:
            assert whole == told[len(FALLBACK.decode([256])) :]


# ---- Stop strings --------------------------------------------------------------------


def test_stop_strings_across_tokens():
    text = "an ENtry, the END, more"
    seen, whole = write(BYTES, BYTES.encode(text).ids, ["END", "\n\n"])
    assert whole == "an ENtry, the " and len(seen) == len("an ENtry, the END")


def naive_end(text, stops):
    """The first moment at which the text holds a stop string; the text before it."""
    for size in range(len(text) + 1):
        places = [text[:size].find(stop) for stop in stops]
        if found := [place for place in places if place >= 0]:
            return text[: min(found)]
    return text


@settings(deadline=None, max_examples=300)
@given(
    st.text("ab\nü", max_size=25),
    st.lists(st.text("ab\nü", min_size=1, max_size=5), max_size=3),
)
def test_a_stream_is_never_taken_back(text, stops):
    """Whatever was shown is the beginning of what is returned: cut where it must be."""
    encoded = BYTES.encode(text).ids
    seen, whole = write(BYTES, encoded, stops)
    assert whole == naive_end(text, stops)
    assert all(whole.startswith(part) for part in seen)
    held = len(whole) - len(seen[-1]) if seen else 0
    assert held < max(map(len, stops), default=1), (
        "more is held back than may be needed"
    )


def test_a_stop_string_before_rubbish_in_one_token():
    """The token that ends it brings half a character too: it is found at once."""
    words = {"a": 0, "END\u00c3": 1}  # byte C3 in the alphabet of byte-level tokens
    tokenizer = Tokenizer(models.WordLevel(words, "a"))
    tokenizer.decoder = decoders.ByteLevel()
    assert write(tokenizer, [0, 1, 0], ["END"]) == (["a", "a"], "a")


def test_which_of_two_stop_strings():
    """Both end in one token: the text ends where the first begins, and it is named."""
    tokenizer = Tokenizer(models.WordLevel({"abc": 0}, "abc"))
    tokenizer.decoder = decoders.Fuse()
    writer = TextWriter(tokenizer, [], SamplingParams(stop=["c", "bc"]))
    assert writer.push(0) == "bc" and writer.text(True) == "a"
    assert writer.push(0) == "bc" and writer.text(True) == "a", "it has ended"


def test_a_piece_is_what_one_token_says():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<end>"])
    writer = TextWriter(tokenizer, [], SamplingParams())
    assert writer.piece(256) == "<end>"
    assert writer.piece(tokenizer.encode("a").ids[0]) == "a"
    writer.push(256)
    assert writer.text(True) == ""
