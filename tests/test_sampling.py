"""Choosing tokens, and turning them into text."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minivllm.batch import Chunk
from minivllm.request import SamplingParams, encode_ids
from minivllm.sampling import Sampler, keep_likely
from minivllm.tokenizer import TextWriter


def chunk(params, end=1, name="0"):
    return Chunk(name, encode_ids([0]), end - 1, [0], 0, True, params)


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_cold_is_argmax_and_never_nan(temperature):
    """f10: temperature 0 and 1e-6 with top_p 0.1."""
    logits = torch.randn(4, 50) * 30
    params = SamplingParams(temperature=temperature, top_p=0.1)
    assert Sampler()(logits, [chunk(params)] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 4),
        ({"top_k": 2}, 2),
        ({"top_k": -1}, 4),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.61}, 2),
        ({"min_p": 0.4}, 2),
        ({"top_p": 1e-9}, 1),
        ({"top_k": 99}, 4),
        ({"top_k": 2, "top_p": 0.65}, 1),  # after top_k, 0.6 of 0.9 is two thirds
    ],
)
def test_what_is_kept(options, kept):
    logits = torch.tensor([0.3, 0.05, 0.6, 0.05]).log()
    likely = keep_likely(logits, SamplingParams(**options))
    assert int(likely.isfinite().sum()) == kept and likely[2].isfinite()


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.6, 0.3, 0.1])
    sampler, params = Sampler(), SamplingParams()
    draws = [
        sampler(probs.log()[None], [chunk(params, end)])[0] for end in range(1, 4001)
    ]
    shares = torch.bincount(torch.tensor(draws), minlength=3) / 4000
    assert (shares - probs).abs().max() < 0.03


def test_a_draw_depends_on_seed_and_position_only():
    logits, sampler = torch.randn(1, 500), Sampler()
    seeded = SamplingParams(seed=42)
    draws = [sampler(logits, [chunk(seeded, 7, name)])[0] for name in "ab"]
    assert draws[0] == draws[1]
    many = {sampler(logits, [chunk(seeded, end)])[0] for end in range(1, 30)}
    assert len(many) > 5


def test_nothing_is_cut_off_unasked():
    """top_p 1 keeps all of a large vocabulary, whatever a float sum says."""
    logits = torch.randn(50_000) * 3
    assert keep_likely(logits, SamplingParams()).isfinite().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": "9"},
        {"temperature": "a"},
        {"temperature": None},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"seed": 10**50},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -2},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"seed": "x"},
        {"stop": [""]},
        {"stop": [3]},
        {"stop_token_ids": [-1]},
    ],
)
def test_bad_parameters_are_named(wrong):
    with pytest.raises(ValueError, match="SamplingParams: "):
        SamplingParams(**wrong)


def byte_tokenizer() -> Tokenizer:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["Ï", "😀", "a😀b", "日本語", "é", "plain"])
def test_text_is_never_half_a_character(text):
    """f2: bytes one by one: the stream is a prefix of the whole, at last the whole."""
    tokenizer = byte_tokenizer()
    writer = TextWriter(tokenizer, [], SamplingParams())
    for token in tokenizer.encode(text).ids:
        assert not writer.push(token)
        assert text.startswith(writer.text(False)) and "\ufffd" not in writer.text(
            False
        )
    assert writer.text(False) == writer.text(True) == text


def test_a_words_space_is_kept():
    """Some tokenizers write a space only between words: the prompt's end is context."""
    words = ["<unk>", "▁The", "▁capital", "▁Paris", "▁is"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    writer = TextWriter(tokenizer, [1, 2], SamplingParams(stop=[" is"]))
    assert not writer.push(3) and writer.text(False) == " Paris"
    assert writer.push(4) and writer.text(True) == " Paris"


def test_byte_tokens_never_raise():
    """Bytes that make no character, between words: text comes, and no exception."""
    pieces = ["<unk>", "<0x41>", "<0xC4>", "<0xF0>", "▁Paris"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for ids in itertools.product(range(1, 5), repeat=5):
        writer = TextWriter(tokenizer, [4], SamplingParams())
        for token in ids:
            writer.push(token)
        whole = tokenizer.decode([4, *ids])
        if "\ufffd" not in whole:
            assert writer.text(True) == whole[len(tokenizer.decode([4])) :]


def test_stop_strings_across_tokens():
    tokenizer = byte_tokenizer()
    writer = TextWriter(tokenizer, [], SamplingParams(stop=["END", "\n\n"]))
    stopped = [
        writer.push(token) for token in tokenizer.encode("an ENtry, the END, more").ids
    ]
    assert stopped.index(True) == len("an ENtry, the END") - 1
    assert writer.text(True) == "an ENtry, the "
