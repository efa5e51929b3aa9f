"""n > 1: several continuations of one prompt are one request to whoever asked."""

import pytest
from test_flights import PROMPT, both_releases, make_engine, run
from test_policies import check_idle
from tiny_models import tiny

from minivllm import LLM, SamplingParams
from minivllm.engine import NoText


def ask(engine, n, max_tokens=4, **options):
    return engine.submit(PROMPT, SamplingParams(max_tokens=max_tokens, n=n), **options)


def reasons(output):
    return [completion.finish_reason for completion in output.outputs]


def start(engine, num_steps):
    for _ in range(num_steps):
        engine.step()


class EndsAfter(NoText):
    """The text of a continuation is complete after so many tokens."""

    def __init__(self, num_tokens):
        self.left = num_tokens

    def push(self, token_id):
        self.left -= 1
        return "the end" if self.left == 0 else None


def ends_after(engine, *numbers):
    lengths = iter(numbers)
    engine.writers = lambda prompt_ids, params: EndsAfter(next(lengths))


@both_releases
def test_one_prefill_and_one_output(release):
    """The first computes 16 tokens, three others one each; one request is told."""
    engine = make_engine(release)
    name = ask(engine, 4)
    outputs = run(engine)
    assert list(outputs) == [name] and outputs[name].finished
    assert [c.index for c in outputs[name].outputs] == [0, 1, 2, 3]
    assert reasons(outputs[name]) == ["length"] * 4
    assert outputs[name].num_cached_tokens == 0
    stats = engine.stats()
    assert stats["prefill_tokens"] == 16 + 3 and stats["cached_tokens"] == 3 * 15
    assert (stats["flights"], stats["followers"]) == (1, 3)


def test_ids_go_on_behind_them():
    """n continuations take n numbers; the request has the first, the others no name."""
    engine = make_engine()
    names = [ask(engine, 3), ask(engine, 1), ask(engine, 2)]
    assert names == ["0", "3", "4"]
    assert [engine.abort(inner) for inner in ("1", "2", "5")] == [None] * 3
    assert sorted(run(engine)) == names


def test_some_end_before_the_others():
    """Each step tells the whole request once; it has ended when all have."""
    engine = make_engine("none")
    ends_after(engine, 2, 1, 4)
    name, seen = ask(engine, 3, max_tokens=9), []
    while engine.has_unfinished():
        [output] = engine.step()
        assert output.request_id == name
        seen.append((reasons(output), output.finished))
        times = output.metrics.ttft_s, output.metrics.e2e_s
        assert times[0] is not None and (times[1] is not None) == output.finished
    assert seen == [
        ([None, "stop", None], False),
        (["stop", "stop", None], False),
        (["stop", "stop", None], False),
        (["stop", "stop", "stop"], True),
    ]
    assert [len(c.token_ids) for c in output.outputs] == [2, 1, 4]
    check_idle(engine)


@both_releases
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_aborted_as_a_whole(release, num_steps):
    """In the queue, in a prefill of chunks, while the others wait, while they run."""
    engine = make_engine(release, max_batch_tokens=8)
    name = ask(engine, 3, max_tokens=9)
    start(engine, num_steps)
    output = engine.abort(name)
    assert output.finished and reasons(output) == ["abort"] * 3
    assert engine.abort(name) is None and not engine.has_unfinished()
    check_idle(engine)


def test_aborted_after_one_has_ended():
    """What that one had said stays said."""
    engine = make_engine("none")
    ends_after(engine, 1, 9)
    name = ask(engine, 2, max_tokens=9)
    start(engine, 2)
    output = engine.abort(name)
    assert reasons(output) == ["stop", "abort"]
    assert [len(c.token_ids) for c in output.outputs] == [1, 2]
    check_idle(engine)


@both_releases
def test_the_first_fails_and_the_next_leads(release):
    """Its forward raises: it alone ends with an error, and the prompt is computed."""
    engine = make_engine(release, fail={1})
    name = ask(engine, 3)
    outputs = run(engine)
    assert reasons(outputs[name]) == ["error", "length", "length"]


@both_releases
def test_others_wait_beside_them(release):
    """A stranger with the same prompt is one more follower, and outlives an abort."""
    engine = make_engine(release)
    name = ask(engine, 2)
    other = ask(engine, 1)
    engine.abort(name)
    assert reasons(run(engine)[other]) == ["length"]
    assert engine.stats()["followers"] == 2


# ---- With a model --------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny("qwen2, biases").folder, num_pages=64)


def drawn(llm, **params):
    chosen = SamplingParams(max_tokens=8, temperature=1.2, ignore_eos=True, **params)
    [output] = llm.generate([5, 9, 2, 7], chosen)
    return [completion.token_ids for completion in output.outputs]


def test_a_seed_gives_the_same_continuations(llm):
    """f8: not all equal, repeatable; the i-th is what seed + i gives alone."""
    eight = drawn(llm, n=8, seed=3)
    assert len({tuple(ids) for ids in eight}) > 1
    assert drawn(llm, n=8, seed=3) == eight
    assert [drawn(llm, seed=3 + i)[0] for i in range(8)] == eight


def test_without_a_seed_they_differ(llm):
    """Each has its own noise, and the next request another one."""
    one, other = drawn(llm, n=4), drawn(llm, n=4)
    assert len({tuple(ids) for ids in one + other}) > 4


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2", None])
def test_not_a_number_of_continuations(n):
    """One line, which names it."""
    with pytest.raises(ValueError, match="n must be a whole number >= 1"):
        SamplingParams(n=n)


def test_greedy_continuations_would_be_equal():
    """vLLM refuses them too."""
    with pytest.raises(ValueError, match="n must be 1 at temperature 0, not 2"):
        SamplingParams(n=2, temperature=0)


def test_more_continuations_than_anybody_reads():
    """vLLM's bound: all of them are made before the first step."""
    with pytest.raises(ValueError, match="n must be at most 16384, not 16385"):
        SamplingParams(n=16_385)


def test_each_has_a_seed_within_the_bounds():
    """Refused at the door, and not when the second is made; the largest still goes."""
    assert SamplingParams(seed=2**64).of_continuation(0).seed == 2**64
    last = SamplingParams(seed=2**64 - 1, n=2).of_continuation(1)
    assert last.seed == 2**64
    with pytest.raises(ValueError, match="seed must leave room for 2 up to 2"):
        SamplingParams(seed=2**64, n=2)
    with pytest.raises(ValueError, match="seed must be a whole number, not 'x'"):
        SamplingParams(seed="x")
