"""What comes back beside the text: logprobs, reasons, penalties; with a real model.

Whatever happens in between: chunks, preemption, a warm cache, company, followers.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from test_policies import PLAIN, check_idle
from test_policies import make_engine as make_simulated
from test_sampling import some_params
from tiny_models import VOCAB, tiny

from minivllm import LLM, SamplingParams

MODEL = tiny("qwen2, biases")
PROMPT = [5, 9, 2, 7, 11, 3, 8, 1, 6, 4, 10, 12, 50, 60, 70, 80, 90, 21, 22, 23]


def make_llm(**options):
    options = {"num_pages": 200, "page_size": 4, "dtype": "float32"} | options
    return LLM(MODEL.folder, **options)


@pytest.fixture(scope="module")
def llm():
    return make_llm()


def run(llm, requests):
    """Several prompts with params of their own, at once."""
    prompts, params = zip(*requests, strict=True)
    return llm.generate([list(p) for p in prompts], list(params))


def cold(**options):
    chosen = {"temperature": 0, "max_tokens": 8, "ignore_eos": True} | options
    return SamplingParams(**chosen)


def true_scores(token_ids):
    """What transformers gives each token after the first: [tokens - 1, vocab]."""
    return MODEL.logits(token_ids)[:-1].log_softmax(-1)


def same_table(table, scores, token, num):
    """A table holds the likeliest and the token, with their scores and ranks."""
    order = scores.sort(descending=True).indices.tolist()
    assert set(table) == {*order[:num], token}
    for each, entry in table.items():
        assert entry.logprob == pytest.approx(float(scores[each]), abs=2e-4)
        assert entry.rank == order.index(each) + 1


def check_logprobs(output, num, num_prompt=None):
    """All tables of an output against transformers, whatever the policy was."""
    prompt, [answer] = output.prompt_token_ids, output.outputs
    known = prompt + answer.token_ids
    scores = true_scores(known)
    chosen = range(len(prompt) - 1, len(known) - 1)
    if num is not None:
        assert len(answer.logprobs) == len(answer.token_ids)
        for row, table in zip(chosen, answer.logprobs, strict=True):
            same_table(table, scores[row], known[row + 1], num)
        total = sum(float(scores[row, known[row + 1]]) for row in chosen)
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)
    if num_prompt is not None:
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for row, table in enumerate(output.prompt_logprobs[1:]):
            same_table(table, scores[row], known[row + 1], num_prompt)


# ---- Logprobs ------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 1, 5, -1])
def test_logprobs_of_the_answer(llm, num):
    """The chosen token is always there; temperature and cuts change no number."""
    for params in (cold(logprobs=num), cold(logprobs=num, temperature=1.5, top_k=9)):
        [output] = run(llm, [(PROMPT, params)])
        check_logprobs(output, num if num >= 0 else VOCAB)
        assert output.prompt_logprobs is None


def test_who_does_not_ask_gets_none(llm):
    [output] = run(llm, [(PROMPT, cold())])
    [answer] = output.outputs
    assert (answer.logprobs, answer.cumulative_logprob) == (None, None)
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 7, 2048])
def test_logprobs_of_the_prompt(max_batch_tokens):
    """f3: as many entries as tokens, the first None; whatever the chunks are."""
    llm = make_llm(max_batch_tokens=max_batch_tokens)
    requests = [
        (PROMPT, cold(prompt_logprobs=2, logprobs=1)),
        (PROMPT[:7], cold(prompt_logprobs=1, max_tokens=1)),
        (PROMPT[3:], cold(logprobs=0)),
        ([4], cold(prompt_logprobs=0)),
    ]
    outputs = run(llm, requests)
    for output, (_, params) in zip(outputs, requests, strict=True):
        check_logprobs(output, params.logprobs, params.prompt_logprobs)
    assert len(outputs[1].prompt_logprobs) == 7 and outputs[3].prompt_logprobs == [None]


def test_a_long_prompts_logits_are_never_there_at_once(monkeypatch):
    """Whoever scores how much in a step: the head makes logits of a few rows."""
    monkeypatch.setattr("minivllm.sampling.ROWS_AT_ONCE", 16)
    llm, sizes = make_llm(num_pages=400), []
    model = llm.engine.runner.model
    head = model.head
    model.head = lambda rows: sizes.append(len(rows)) or head(rows)
    scored = [(PROMPT * n, cold(prompt_logprobs=1, logprobs=0)) for n in (12, 5)]
    outputs = run(llm, [*scored, (PROMPT, cold())])
    assert llm.stats()["prefill_tokens"] == 18 * 20 and max(sizes) == 16
    for output in outputs[:2]:
        check_logprobs(output, 0, 1)


@pytest.mark.parametrize("index", ["radix", "hash", "none"])
@pytest.mark.parametrize("publish", ["schedule", "step", "prompt", "finish"])
@pytest.mark.parametrize("single_flight", ["none", "completion", "prefill"])
def test_a_scored_prompt_reads_no_cache_and_fills_it(index, publish, single_flight):
    """It matches nothing, waits for nobody, is not waited for, and still publishes."""
    llm = make_llm(index=index, publish=publish, single_flight=single_flight)
    plain, scored = cold(max_tokens=4), cold(max_tokens=4, prompt_logprobs=0)
    first = run(llm, [(PROMPT, scored), (PROMPT, scored)])
    assert llm.stats()["flights"] == llm.stats()["followers"] == 0
    [warm] = run(llm, [(PROMPT, plain)])
    again = run(llm, [(PROMPT, scored), (PROMPT, plain)])
    assert warm.num_cached_tokens == (0 if index == "none" else 19)
    for output in (*first, again[0]):
        assert output.num_cached_tokens == 0
        check_logprobs(output, None, 0)
    answers = {tuple(o.outputs[0].token_ids) for o in (*first, warm, *again)}
    assert len(answers) == 1
    check_idle(llm.engine)


def test_nobody_waits_long_for_a_scored_prompt():
    """Nor does it wait for a prefix that another one computes: it would not use it."""
    llm = make_llm(wait_for_prefix=1, single_flight="none", publish="step")
    outputs = run(llm, [(PROMPT, cold()), (PROMPT, cold(prompt_logprobs=0))])
    events = llm.stats()
    assert outputs[1].num_cached_tokens == 0 and events["prefill_tokens"] == 40
    check_logprobs(outputs[1], None, 0)


@pytest.mark.parametrize("steps", range(6))
def test_a_scored_prompt_is_aborted(steps):
    """In any chunk: what was scored so far comes back, and no page is lost."""
    llm = make_llm(max_batch_tokens=6, single_flight="completion")
    engine = llm.engine
    name = engine.submit(PROMPT, cold(prompt_logprobs=1))
    other = engine.submit(PROMPT, cold())
    for _ in range(steps):
        engine.step()
    output = engine.abort(name)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == min(20, 1 + 6 * steps)
    while engine.has_unfinished():
        finished = engine.step()
    assert [o.request_id for o in finished] == [other]
    check_idle(engine)


def tight(**options):
    """Three long answers in a pool that holds two of them: somebody must give way."""
    llm = make_llm(num_pages=16, **options)
    requests = [
        (PROMPT, cold(max_tokens=24, logprobs=2, prompt_logprobs=1)),
        (PROMPT[2:], cold(max_tokens=24, logprobs=1, seed=3, temperature=0.9)),
        (PROMPT[4:], cold(max_tokens=24, logprobs=0, prompt_logprobs=0, **PENALTIES)),
    ]
    return llm, requests


PENALTIES = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "logit_bias": {3: 1.5},
}


@pytest.mark.parametrize("max_batch_tokens", [5, 16, 2048])
@pytest.mark.parametrize("publish", ["step", "finish"])
def test_nothing_is_reported_twice_after_a_preemption(max_batch_tokens, publish):
    """Each position once, penalties counted once, the tokens of a roomy pool."""
    llm, requests = tight(max_batch_tokens=max_batch_tokens, publish=publish)
    outputs, roomy = run(llm, requests), run(make_llm(), requests)
    assert llm.stats()["preemptions"] > 0
    for output, wanted, (_, params) in zip(outputs, roomy, requests, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        check_logprobs(output, params.logprobs, params.prompt_logprobs)


def test_each_continuation_has_its_own(llm):
    """n = 3: logprobs of each; the prompt's once, for the request."""
    params = cold(n=3, temperature=1.3, seed=5, logprobs=1, prompt_logprobs=1)
    [output] = run(llm, [(PROMPT, params)])
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    for answer in output.outputs:
        output.outputs, whole = [answer], output.outputs
        check_logprobs(output, 1, 1)
        output.outputs = whole


def test_a_stream_grows(llm):
    """f4: what was given does not change; each step brings one more table.

    At the end they are those of an answer that was not streamed.
    """
    engine = llm.engine
    engine.submit(PROMPT, cold(logprobs=1, prompt_logprobs=0, max_tokens=4))
    seen = []
    while engine.has_unfinished():
        seen += engine.step()
    assert [len(o.outputs[0].logprobs) for o in seen] == [1, 2, 3, 4]
    sums = [o.outputs[0].cumulative_logprob for o in seen]
    assert sums == sorted(sums, reverse=True) and len(set(sums)) == 4
    assert all(len(o.prompt_logprobs) == 20 for o in seen)
    [whole] = run(llm, [(PROMPT, cold(logprobs=1, prompt_logprobs=0, max_tokens=4))])
    assert seen[-1].outputs[0].logprobs == whole.outputs[0].logprobs
    assert seen[-1].prompt_logprobs == whole.prompt_logprobs
    seen[0].prompt_logprobs.clear()
    assert len(seen[1].prompt_logprobs) == 20


def test_an_engine_without_a_model_has_no_logprobs():
    """The simulated runner fills none in: nothing breaks."""
    engine = make_simulated(**PLAIN)
    engine.submit([1, 2, 3], SamplingParams(logprobs=2, prompt_logprobs=1))
    while engine.has_unfinished():
        outputs = engine.step()
    assert outputs[0].outputs[0].logprobs == []
    assert outputs[0].prompt_logprobs == [None]


# ---- Penalties -----------------------------------------------------------------------


def greedy_by_hand(prompt, num_tokens, repetition=1.0, presence=0.0, frequency=0.0):
    """From transformers' logits, one token after the other."""
    known, said = list(prompt), Counter()
    for _ in range(num_tokens):
        row = MODEL.logits(known)[-1].clone()
        for token in set(known):
            value = (
                row[token] / repetition if row[token] > 0 else row[token] * repetition
            )
            row[token] = value - frequency * said[token] - presence * (said[token] > 0)
        known.append(int(row.argmax()))
        said[known[-1]] += 1
    return known[len(prompt) :]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition": 1.4},
        {"presence": 1.5},
        {"frequency": 0.7},
        {"repetition": 1.2, "presence": -0.5, "frequency": 0.9},
    ],
)
def test_greedy_with_penalties(llm, options):
    """Each alone and all, cold and warm, beside a neighbour that has none."""
    params = cold(**{f"{name}_penalty": value for name, value in options.items()})
    wanted = greedy_by_hand(PROMPT, 8, **options)
    for _ in range(2):
        outputs = run(llm, [(PROMPT, params), (PROMPT, cold())])
        assert outputs[0].outputs[0].token_ids == wanted
        assert outputs[1].outputs[0].token_ids == greedy_by_hand(PROMPT, 8)


def test_repetition_penalty_as_transformers_generates(llm):
    ids = torch.tensor([PROMPT])
    wanted = MODEL.reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        repetition_penalty=1.3,
        pad_token_id=0,
        eos_token_id=None,
    )[0, len(PROMPT) :].tolist()
    params = cold(max_tokens=12, repetition_penalty=1.3)
    assert run(llm, [(PROMPT, params)])[0].outputs[0].token_ids == wanted


# ---- Seeds, company, caps ------------------------------------------------------------


def test_a_seed_means_the_same_in_company(llm):
    """f7: seed 42 alone, then among greedy, unseeded and other seeded neighbours."""
    seeded = SamplingParams(seed=42, temperature=1.1, top_p=0.9, max_tokens=12)
    alone = run(llm, [(PROMPT, seeded)])[0].outputs[0].token_ids
    others = [cold(), SamplingParams(), SamplingParams(seed=1, min_p=0.1, top_k=5)]
    mixed = [(PROMPT[i:], params) for i, params in enumerate(others)]
    outputs = run(llm, [*mixed, (PROMPT, seeded), *mixed])
    assert outputs[3].outputs[0].token_ids == alone


@pytest.mark.parametrize("seed", range(6))
def test_whatever_was_asked_is_what_it_gets_alone(llm, seed):
    """f7: random requests in a tight pool, in chunks; each as alone in a roomy one."""
    random = Random(seed)
    requests = []
    for number in range(8):
        params = some_params(random, VOCAB)
        prompt = PROMPT[: random.randrange(1, 20)] + [number] * random.randrange(3)
        num_tokens = random.randrange(8, 25)
        params = replace(params, max_tokens=num_tokens, ignore_eos=True)
        requests.append((prompt, params))
    crowded = make_llm(num_pages=12, max_batch_tokens=random.choice([3, 9, 64]))
    outputs = run(crowded, requests)
    assert crowded.stats()["preemptions"] > 0
    for output, request in zip(outputs, requests, strict=True):
        if request[1].seed is None and request[1].temperature >= 1e-5:
            continue  # its seed is its id
        [alone] = run(llm, [request])
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        check_logprobs(output, request[1].logprobs, request[1].prompt_logprobs)


def test_each_has_its_own_cap(llm):
    """f15: a long and a short prompt, with caps of their own."""
    outputs = run(llm, [(PROMPT, cold(max_tokens=3)), ([5], cold(max_tokens=30))])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 30]


# ---- Reasons -------------------------------------------------------------------------


def test_why_it_stopped(llm):
    """The named token that ended it stays in the ids; an end token names no reason."""
    [free] = run(llm, [(PROMPT, cold())])
    ids = free.outputs[0].token_ids
    last = next(i for i, token in enumerate(ids) if token not in ids[:i] and i > 1)
    params = cold(stop_token_ids=[99, ids[last]])
    [output] = run(llm, [(PROMPT, params)])
    [answer] = output.outputs
    assert answer.token_ids == ids[: last + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ids[last])
    assert (free.outputs[0].finish_reason, free.outputs[0].stop_reason) == (
        "length",
        None,
    )


def test_an_end_token_ends_unless_ignored(llm):
    """g8: all sources together; ignore_eos leaves stop_token_ids in force."""
    limits = llm.engine.limits
    [end] = limits.eos_token_ids
    forced = {"logit_bias": {end: 100.0}, "max_tokens": 4}
    cases = [
        (cold(ignore_eos=False, **forced), ([end], "stop", None)),
        (cold(**forced), ([end] * 4, "length", None)),
        (cold(stop_token_ids=[end], **forced), ([end], "stop", end)),
    ]
    for params, wanted in cases:
        [answer] = run(llm, [(PROMPT, params)])[0].outputs
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == wanted


# ---- At the door ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([1, VOCAB], {}, f"the prompt: token id {VOCAB} is not in 0 to 100"),
        ([-1], {}, "the prompt: token id -1 is not in 0 to 100"),
        ([1], {"stop_token_ids": [VOCAB]}, f"stop_token_ids: token id {VOCAB} is"),
        ([1], {"logit_bias": {VOCAB: 1}}, f"logit_bias: token id {VOCAB} is not"),
        (
            [1],
            {"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)},
            f"logit_bias: it forbids all {VOCAB} tokens",
        ),
        ([1], {"logprobs": VOCAB + 1}, "logprobs and prompt_logprobs must be at most"),
        ([1], {"prompt_logprobs": 999}, "logprobs and prompt_logprobs must be at most"),
        ([1], {"stop": ["x"]}, "stop: without a tokenizer there is no text"),
        ([1] * 256, {}, "the prompt has 256 tokens and the model's context 256"),
        ([1] * 257, {}, "the prompt has 257 tokens and the model's context 256"),
    ],
)
def test_refused_and_nobody_else_is_hurt(llm, prompt, options, words):
    """f5, f6, f13: one line that names the field; a neighbour goes on as if alone."""
    engine = llm.engine
    [wanted] = run(llm, [(PROMPT, cold())])
    engine.submit(PROMPT, cold())
    engine.step()
    with pytest.raises(ValueError, match=words):
        engine.submit(prompt, cold(**options))
    while engine.has_unfinished():
        [output] = engine.step()
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_the_last_place_of_the_context(llm):
    """f13: a prompt one short of the context gets one token."""
    [output] = run(llm, [([7] * 255, cold(max_tokens=None))])
    [answer] = output.outputs
    assert len(answer.token_ids) == 1 and answer.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_broken_logits_end_with_an_error(temperature):
    """NaN or infinity anywhere: an error, and not a token that nobody chose."""
    for value, place in itertools.product([math.nan, math.inf], ["row", "prompt"]):
        llm = make_llm()
        model = llm.engine.runner.model
        clean = model.head.multiply

        def broken(rows, clean=clean, value=value, place=place):
            logits = clean(rows)
            if (len(rows) == 1) == (place == "row"):
                logits[0, 3] = value
            return logits

        model.head.multiply = broken
        params = cold(temperature=temperature, prompt_logprobs=1, logprobs=1)
        [answer] = run(llm, [(PROMPT, params)])[0].outputs
        assert answer.finish_reason == "error" and answer.token_ids == []
