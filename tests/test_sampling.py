"""Choosing tokens: a batch gives what each row alone, written naively, gives."""

import math
from array import array
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minivllm import sampling
from minivllm.batch import Chunk
from minivllm.request import SamplingParams
from minivllm.sampling import Sampler, bend, keep_likely

VOCAB = 40


def chunk(params, end=1, name="0"):
    return Chunk(name, array("i", [0]), end - 1, [0], 0, True, params)


def told(params, known, num_prompt):
    """A chunk of a request that knows these tokens, the first of them its prompt."""
    known, start = array("i", known), len(known) - 1
    return Chunk("0", known[start:], start, [0], 0, True, params, known, num_prompt)


# ---- The naive twin ------------------------------------------------------------------


def naive_bend(logits, chunk):
    """One row, one token after the other, as the parameters are explained."""
    params, row = chunk.params, logits.tolist()
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    said = Counter(chunk.known[chunk.num_prompt : chunk.end])
    for token in set(chunk.known[: chunk.end]):
        up = row[token] > 0
        row[token] *= 1 / params.repetition_penalty if up else params.repetition_penalty
        row[token] -= said[token] * params.frequency_penalty
        row[token] -= params.presence_penalty if said[token] else 0
    return torch.tensor(row)


def naive_likely(logits, params):
    """One row, sorted; what is cut off is -inf."""
    row = logits / params.temperature
    row[row < row.max() + math.log(params.min_p or 1e-45)] = -math.inf
    if 0 < params.top_k < len(row):
        row[row < row.sort(descending=True).values[params.top_k - 1]] = -math.inf
    if params.top_p < 1:
        ordered, order = row.sort(descending=True)
        probs, mass = ordered.softmax(-1), 0.0
        for prob, token in zip(probs.tolist(), order.tolist(), strict=True):
            if mass >= params.top_p:
                row[token] = -math.inf
            mass += prob
    return row


def naive_draw(probs, points):
    """The bits of an id, the lowest first: each at the odds of what is left."""
    at, step = 0, 1
    for point in points:
        near, far = (sum(probs[at + i * step :: 2 * step]) for i in (0, 1))
        at, step = at + step * (point * (near + far) >= near), 2 * step
    return at


def naive_token(logits, chunk, sampler):
    bent = naive_bend(logits, chunk)
    if chunk.params.temperature < 1e-5:
        return int(bent.argmax())
    probs = naive_likely(bent, chunk.params).softmax(-1).tolist()
    points = sampler._points(chunk, sampling.num_points(len(probs)))
    return naive_draw(probs, points.tolist())


def some_params(random, vocab=VOCAB):
    """Every parameter is unset in half of the rows."""
    chosen = {
        "temperature": random.choice([0, 1e-6, 0.3, 1.0, 2.5]),
        "top_k": random.choice([1, 2, 7, VOCAB, 99, -1]),
        "top_p": random.choice([1e-9, 0.2, 0.7, 0.999]),
        "min_p": random.choice([0.01, 0.3, 1.0]),
        "repetition_penalty": random.choice([0.5, 1.1, 3.0]),
        "presence_penalty": random.choice([-2, 0.5, 2]),
        "frequency_penalty": random.choice([-1, 0.1, 1.5]),
        "logit_bias": {random.randrange(vocab): random.uniform(-9, 9)},
        "seed": random.randrange(9),
        "logprobs": random.randrange(3),
        "prompt_logprobs": random.randrange(3),
    }
    kept = {name: value for name, value in chosen.items() if random.random() < 0.5}
    return SamplingParams(**kept)


def some_batch(random, num_rows):
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    logits = torch.randn(num_rows, VOCAB, generator=generator) * 4
    chunks = []
    for name in range(num_rows):
        known = [random.randrange(VOCAB) for _ in range(random.randint(1, 30))]
        one = told(some_params(random), known, random.randint(1, len(known)))
        one.request_id = str(name)
        chunks.append(one)
    return logits, chunks


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 9))
def test_a_batch_is_its_rows(random, num_rows):
    """Each row gets the token of the naive twin, whoever is in the batch with it."""
    logits, chunks = some_batch(random, num_rows)
    sampler, before = Sampler(5), logits.clone()
    tokens = sampler(logits, chunks)
    naive = [naive_token(*pair, sampler) for pair in zip(logits, chunks, strict=True)]
    assert tokens == naive
    alone = [sampler(logits[i : i + 1], [c])[0] for i, c in enumerate(chunks)]
    assert tokens == alone and torch.equal(logits, before)


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_what_is_known_bends_the_logits(random):
    logits, chunks = some_batch(random, 5)
    found = bend(logits, chunks)
    for row, one in enumerate(chunks):
        torch.testing.assert_close(found[row], naive_bend(logits[row], one))


# ---- The judge: transformers' processors ---------------------------------------------


def test_repetition_penalty_is_that_of_transformers():
    logits, known = torch.randn(3, VOCAB) * 5, torch.randint(VOCAB, (3, 12))
    params = SamplingParams(temperature=0, repetition_penalty=1.7)
    chunks = [told(params, row, 5) for row in known.tolist()]
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(known, logits.clone())
    torch.testing.assert_close(bend(logits, chunks), wanted)


@pytest.mark.parametrize(
    ("option", "warper"),
    [
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
    ],
)
def test_cuts_are_those_of_transformers(option, warper):
    logits = torch.randn(64, 500) * 3
    found = keep_likely(logits, [SamplingParams(**option)] * 64)
    assert torch.equal(found, warper(None, logits.clone()))


# ---- Penalties and biases ------------------------------------------------------------


def test_the_prompt_counts_for_repetition_only():
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]])
    everything = SamplingParams(
        temperature=0, repetition_penalty=2, presence_penalty=1, frequency_penalty=0.25
    )
    found = bend(logits, [told(everything, [0, 2, 1, 1], 2)])
    assert found.tolist() == [[1.0, -0.5, -4.0, 2.0]]


def test_a_chunk_looks_no_further_than_its_end():
    """The owner's array grows after the step: what comes later was not known."""
    params = SamplingParams(temperature=0, presence_penalty=1)
    one = told(params, [3, 1], 1)
    one.known.append(2)
    assert bend(torch.zeros(1, 4), [one]).tolist() == [[0, -1, 0, 0]]


def test_a_bias_decides_and_forbids():
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    cases = [({2: 3.0}, 2), ({0: -100.0}, 1), ({0: -math.inf, 1: -math.inf}, 2)]
    for bias, answer in cases:
        for temperature in (0, 0.01):
            params = SamplingParams(temperature=temperature, logit_bias=bias)
            assert Sampler()(logits, [chunk(params)]) == [answer]


def test_what_is_forbidden_is_so_at_every_temperature():
    """Where the others' logits are next to equal too."""
    bias = dict.fromkeys(range(1, 50), -math.inf)
    for options in ({}, {"top_k": 30}, {"min_p": 1e-9}, {"frequency_penalty": -2}):
        params = SamplingParams(temperature=1e30, logit_bias=bias, **options)
        known = [told(params, [0, 1, 2][:num], 1) for num in (1, 2, 3)] * 20
        tokens = Sampler()(torch.randn(60, 51), known)
        assert set(tokens) <= {0, 50}


@pytest.mark.parametrize("temperature", [0, 1e-5, 1.0])
@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 3e38},
        {"logit_bias": {1: 3e38, 2: -3e38}},
        {"logit_bias": dict.fromkeys(range(4), -math.inf)},
    ],
)
def test_nonsense_hurts_nobody_else(option, temperature):
    """An answer comes, and the neighbour's is its own."""
    logits = torch.tensor([[3.0, -1.0, 0.0, 1.0]] * 2)
    odd = told(SamplingParams(temperature=temperature, **option), [0, 1, 2], 2)
    rows = [odd, chunk(SamplingParams(temperature=0))]
    tokens, bent = Sampler()(logits, rows), sampling.bend(logits, rows)
    assert tokens[0] in range(4) and tokens[1] == 0
    forbidden = -math.inf in (odd.params.logit_bias or {}).values()
    assert forbidden or bent.isfinite().all()


# ---- Which token ---------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-40])
def test_cold_is_argmax_and_never_nan(temperature):
    """f10: temperature 0 and 1e-6 with top_p 0.1."""
    logits = torch.randn(4, 50) * 30
    params = SamplingParams(temperature=temperature, top_p=0.1)
    assert Sampler()(logits, [chunk(params)] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"logit_bias": {1: 2.0}}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_no_token(bad, params):
    """Rows with NaN or infinity are -1, rows of -inf alone too; a -inf is allowed."""
    logits = torch.tensor([[1.0, 2.0, 0.0]] * 4)
    logits[0, 1], logits[1], logits[2, 0] = bad, -math.inf, -math.inf
    tokens = Sampler()(logits, [chunk(SamplingParams(**params))] * 4)
    assert tokens[:2] == [-1, -1] and tokens[2] in (1, 2) and tokens[3] >= 0


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
        ({"top_k": 4}, 4),
        ({"top_k": 2, "top_p": 0.65}, 1),  # after top_k, 0.6 of 0.9 is two thirds
        ({"min_p": 0.4, "top_p": 0.65}, 1),  # and after min_p
        ({"top_k": 3}, 4),  # two are equally likely
    ],
)
def test_what_is_kept(options, kept):
    logits = torch.tensor([[0.3, 0.05, 0.6, 0.05]]).log()
    [likely] = keep_likely(logits, [SamplingParams(**options)])
    assert int(likely.isfinite().sum()) == kept and likely[2].isfinite()


def test_nothing_is_cut_off_unasked():
    """top_p 1 keeps all of a large vocabulary, beside one who asks for less."""
    logits = torch.randn(1, 50_000).expand(2, -1) * 3
    params = [SamplingParams(), SamplingParams(top_p=0.5, top_k=9, min_p=0.1)]
    found = keep_likely(logits, params)
    assert found[0].isfinite().all() and int(found[1].isfinite().sum()) < 10


@pytest.mark.parametrize("mass", [1e-50, 5e-324, 1e-45])
def test_a_mass_of_nothing_keeps_the_likeliest(mass):
    """It is 0 in 32 bits, and hurts nobody."""
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 2)
    rows = [chunk(SamplingParams(top_p=mass)), chunk(SamplingParams(temperature=0))]
    assert Sampler()(logits, rows) == [1, 1]


def test_the_first_thousand_are_not_enough():
    """A flat distribution reaches its mass late: more are taken, to the last one."""
    logits = torch.randn(2, 20_000) / 100
    mass = torch.tensor([[0.5], [1 - 1e-7]])
    assert torch.equal(
        sampling.cut_top_p(logits, mass), sampling.cut_top_p(logits, mass, 20_000)
    )
    assert 9_000 < int(sampling.cut_top_p(logits, mass)[0].isfinite().sum()) < 11_000


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.6, 0.3, 0.1])
    chunks = [chunk(SamplingParams(), end) for end in range(1, 4001)]
    draws = Sampler()(probs.log().expand(4000, -1), chunks)
    shares = torch.bincount(torch.tensor(draws), minlength=3) / 4000
    assert (shares - probs).abs().max() < 0.03


def points_at(point, rows, vocab):
    size = (rows, sampling.num_points(vocab))
    return torch.full(size, point, dtype=torch.float64)


@pytest.mark.parametrize("point", [0.0, 0.2499, 0.25, 0.5, 1 - 2**-52])
def test_a_share_of_nothing_is_never_drawn(point):
    """Borders belong to what begins there, in every fold."""
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    token = int(sampling.draw(weights, points_at(point, 1, 5)))
    assert token == (1 if point < 0.25 else 3)
    for vocab in (1, 2, 3, 997, 1024, 1025):
        many = torch.rand(2000, vocab) * torch.randint(2, (2000, vocab))
        many[:, -1] += 1e-30
        drawn = sampling.draw(many, points_at(point, 2000, vocab))
        assert many.gather(-1, drawn).min() > 0


def test_a_rounding_changes_hardly_a_draw():
    """A seed gives the same text beside others, whose batch rounds otherwise.

    Of 20,000 draws a single point in the cumulative sum changes more than a hundred.
    """
    torch.manual_seed(5)
    logits = torch.randn(49_152) * 3
    beside = logits + torch.randn(49_152) * 1e-5
    changed, places = 0, []
    for _ in range(50):
        points = torch.rand(400, sampling.num_points(49_152), dtype=torch.float64)
        one, other = (
            sampling.draw(row.softmax(-1).expand(400, -1), points)
            for row in (logits, beside)
        )
        changed += int((one != other).sum())
        places += one.flatten().tolist()
    assert changed < 10
    assert len(set(places)) > 500


def test_a_draw_depends_on_seed_and_position_only():
    logits, sampler = torch.randn(1, 500), Sampler()
    seeded = SamplingParams(seed=42)
    draws = [sampler(logits, [chunk(seeded, 7, name)])[0] for name in "ab"]
    assert draws[0] == draws[1]
    many = {sampler(logits, [chunk(seeded, end)])[0] for end in range(1, 30)}
    assert len(many) > 5


def test_points_are_spread():
    """Of 20,000 the mean is a half, and no two are equal, whatever differs."""
    sampler, ends = Sampler(1), range(1, 5001)
    kinds = [
        (chunk(SamplingParams(seed=seed), end, name), name)
        for end in ends
        for seed, name in ((None, "0"), (None, "1"), (0, "0"), (1, "0"))
    ]
    points = torch.stack([sampler._points(one, 3) for one, _ in kinds])
    assert points.min() >= 0 and points.max() < 1
    for each in points.T:
        assert len(each.unique()) == len(kinds)
        assert abs(each.mean() - 0.5) < 0.01
    assert torch.corrcoef(points.T).triu(1).abs().max() < 0.03


def test_greedy_rows_take_the_short_way(monkeypatch):
    """Nothing is bent, cut, sorted or scored for who asks for nothing."""
    for name in ("bend", "keep_likely", "score_tokens", "score_prompts"):
        monkeypatch.setattr(sampling, name, None)
    logits = torch.randn(3, 50)
    params = SamplingParams(temperature=0, top_p=0.5, seed=1)
    assert Sampler()(logits, [chunk(params)] * 3) == logits.argmax(-1).tolist()


# ---- Logprobs ------------------------------------------------------------------------


def test_logprobs_are_the_models_own():
    """Whatever bends and cuts the choice; the chosen one is there, with its rank."""
    logits = torch.randn(2, VOCAB) * 3
    params = SamplingParams(
        temperature=0.1, top_k=1, repetition_penalty=2, logit_bias={7: 99}, logprobs=3
    )
    chunks = [told(params, [7], 1) for _ in range(2)]
    tokens = Sampler()(logits, chunks)
    assert tokens == [7, 7]
    scores = logits.log_softmax(-1)
    for row, one in enumerate(chunks):
        likely = scores[row].topk(3).indices.tolist()
        assert list(one.logprobs) == [*likely, *({7} - {*likely})]
        ranks = scores[row].sort(descending=True).indices.tolist()
        for token, entry in one.logprobs.items():
            assert entry.logprob == pytest.approx(float(scores[row, token]), abs=1e-6)
            assert entry.rank == ranks.index(token) + 1


@pytest.mark.parametrize(("num", "size"), [(0, 1), (1, 1), (5, 5), (-1, VOCAB)])
def test_so_many_were_asked_for(num, size):
    """Beside somebody who asks for another number, and somebody who asks for none."""
    params = [SamplingParams(temperature=0, logprobs=n) for n in (num, 4, None)]
    chunks = [chunk(each) for each in params]
    Sampler()(torch.randn(3, VOCAB), chunks)
    assert len(chunks[0].logprobs) == size and len(chunks[1].logprobs) == 4
    assert chunks[2].logprobs is None


def test_many_rows_are_scored_in_parts():
    """Nothing is lost between two parts or chunks; the head sees a few rows at once."""
    logits, params = torch.randn(452, VOCAB), SamplingParams(prompt_logprobs=1)
    known, seen = array("i", [i % VOCAB for i in range(302)]), []
    chunks = [
        Chunk("a", known[:150], 0, [0], 0, False, params, known, 302),
        Chunk("b", known, 0, [0], 0, True, params, known, 302),
    ]
    [token] = Sampler()(logits, chunks, lambda rows: seen.append(len(rows)) or rows)
    assert 0 <= token < VOCAB and sum(seen) == 452 and max(seen) == 128
    assert [len(each.prompt_logprobs) for each in chunks] == [150, 301]
    tables, scores = (
        [t for c in chunks for t in c.prompt_logprobs],
        logits.log_softmax(1),
    )
    for row, table in enumerate(tables):
        token = known[(row if row < 150 else row - 150) + 1]
        assert table[token].logprob == pytest.approx(float(scores[row, token]))
    logits[200, 3] = math.nan
    with pytest.raises(FloatingPointError, match="not numbers"):
        Sampler()(logits, chunks, lambda rows: rows)


# ---- The parameters ------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": "9"},
        {"temperature": "a"},
        {"temperature": None},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"seed": 10**50},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -2},
        {"top_k": 1.0},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": "1"},
        {"min_p": -0.1},
        {"seed": "x"},
        {"stop": [""]},
        {"stop": [3]},
        {"stop_token_ids": [-1]},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": None},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": "0"},
        {"logprobs": -2},
        {"logprobs": True},
        {"logprobs": 1.0},
        {"prompt_logprobs": -2},
        {"prompt_logprobs": "1"},
        {"logit_bias": [1]},
        {"logit_bias": {"1": 2.0}},
        {"logit_bias": {-1: 2.0}},
        {"logit_bias": {1: "2"}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: float("inf")}},
        {"top_p": True},
        {"ignore_eos": 5},
        {"ignore_eos": "no"},
    ],
)
def test_bad_parameters_are_named(wrong):
    with pytest.raises(ValueError, match=f"SamplingParams: {next(iter(wrong))} "):
        SamplingParams(**wrong)


def test_a_bias_is_copied():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
