"""Single-flight in the engine: who waits, what goes wrong in between, and who runs."""

import pytest
from checking_runner import CheckingRunner, cold_continuation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    rule,
)
from test_policies import CheckedEngine, Life, check, check_idle, enough_steps
from test_policies import make_engine as make_any_engine

from minivllm.engine import Engine, Limits
from minivllm.options import assemble, read_options
from minivllm.request import SamplingParams
from minivllm.runner import ModelRunner
from minivllm.sampling import Sampler

VOCAB = 50
RELEASES = ("completion", "prefill")
PROMPT = [i % VOCAB for i in range(16)]
both_releases = pytest.mark.parametrize("release", RELEASES)


class Recording(CheckingRunner):
    """Notes who was in each batch, and whose pass has failed."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.batches, self.failed = [], set()

    def run(self, chunks):
        self.batches.append([(c.request_id, len(c.token_ids)) for c in chunks])
        return super().run(chunks)

    def _scribble(self, chunks):
        self.failed |= {chunk.request_id for chunk in chunks}
        super()._scribble(chunks)


def make_engine(release="prefill", *, fail=(), **chosen) -> CheckedEngine:
    chosen = {"index": "radix", "publish": "step", "page_size": 4} | chosen
    engine = make_any_engine(single_flight=release, **chosen)
    engine.runner = Recording(chosen["page_size"], VOCAB, fail, engine.clock)
    return engine


def submit(engine, prompt=PROMPT, max_tokens=4, **options) -> str:
    return engine.submit(prompt, SamplingParams(max_tokens=max_tokens), **options)


def run(engine) -> dict[str, object]:
    """Step to the end; the final outputs by id. Nothing may be left."""
    ended = {}
    for _ in range(2_000):
        if not engine.has_unfinished():
            break
        ended |= {o.request_id: o for o in engine.step() if o.finished}
    check_idle(engine)
    return ended


def reasons(outputs) -> dict[str, str]:
    return {name: o.outputs[0].finish_reason for name, o in outputs.items()}


def answer_is_its_own(output, num_tokens=4) -> bool:
    expected = cold_continuation(output.prompt_token_ids, num_tokens, VOCAB)
    return output.outputs[0].token_ids == expected


# ---- One computes, the others wait ---------------------------------------------------


def test_eight_prompts_of_sixteen_tokens():
    """e12: alone they compute 128 tokens in one step; together 16 + 7 × 1."""
    for release, expected in (("none", 128), ("completion", 23), ("prefill", 23)):
        engine = make_engine(release)
        names = [submit(engine, max_tokens=1) for _ in range(8)]
        engine.scheduler.max_running = 8
        ended = run(engine)
        assert engine.stats()["prefill_tokens"] == expected
        cached = [ended[name].num_cached_tokens for name in names]
        assert cached == ([0] * 8 if release == "none" else [0] + [15] * 7)
        assert len(engine.runner.batches) == (1 if release == "none" else 2)


@both_releases
def test_followers_hold_no_page_and_no_slot(release):
    """e13: four slots, one leader, seven followers, one stranger who runs at once."""
    engine = make_engine(release, max_running=4)
    names = [submit(engine, max_tokens=3) for _ in range(8)]
    stranger = submit(engine, [7] * 8)
    engine.scheduler.schedule()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["held"]) == (2, 0, 7)
    assert stats["pages_private"] == 4 + 2
    assert [s.request.request_id for s in engine.scheduler.running] == [
        names[0],
        stranger,
    ]


@both_releases
def test_a_follower_with_a_part_in_the_cache_still_waits(release):
    """e14: four of its sixteen tokens are cached, and it waits all the same."""
    engine = make_engine(release)
    submit(engine, [*PROMPT[:4], 9], max_tokens=1)
    run(engine)
    names = [submit(engine) for _ in range(2)]
    engine.step()
    assert engine.stats()["followers"] == 1
    cached = {name: o.num_cached_tokens for name, o in run(engine).items()}
    assert cached == {names[0]: 4, names[1]: 15}


def test_followers_wait_for_the_prefill_or_for_the_end():
    """R13, R16: and the counters say so."""
    for release, held_after in (("completion", [2, 2, 2, 0]), ("prefill", [0] * 4)):
        engine, held = make_engine(release, max_batch_tokens=16), []
        [submit(engine) for _ in range(3)]
        assert engine.stats()["held"] == 2
        for _ in range(4):
            engine.step()
            held.append(engine.stats()["held"])
        assert held == held_after
        run(engine)
        stats = engine.stats()
        assert (stats["flights"], stats["followers"]) == (1, 2)
        assert stats["lookups"] == 3


def test_early_release_publishes_the_prompt_under_every_policy():
    """R20: followers or not, at once, and the output as the policy says."""
    for num_requests in (1, 3):
        engine = make_engine("prefill", publish="finish")
        names = [submit(engine, max_tokens=9) for _ in range(num_requests)]
        engine.step()
        assert engine.scheduler.cache.find(PROMPT).matched_len == 16
        late = submit(engine, max_tokens=9)
        engine.step(), engine.step()
        assert engine.scheduler.cache.index.total_size == 16, "no output is shown"
        cached = [o.num_cached_tokens for _, o in sorted(run(engine).items())]
        assert cached == [0] + [15] * num_requests and late not in names


def test_only_the_same_input_follows():
    """R11: another key, one token more or less: each leads."""
    engine = make_engine()
    submit(engine), submit(engine, extra_key="salt"), submit(engine, PROMPT[:-1])
    assert engine.stats()["held"] == 0 and engine.stats()["flights"] == 3
    run(engine)


def test_without_an_index_nobody_waits():
    """There would be nothing to find."""
    for index, num_held in (("none", 0), ("radix", 2)):
        options = read_options({"index": index, "page_size": 4})
        engine = assemble(options, 64, CheckingRunner(4, VOCAB), Limits(VOCAB, 256))
        [submit(engine) for _ in range(3)]
        assert engine.stats()["held"] == num_held
        run(engine)


# ---- Accidents -----------------------------------------------------------------------


@both_releases
@pytest.mark.parametrize("num_steps", [0, 1], ids=["queued", "in its prompt"])
def test_a_leader_is_aborted_before_its_prompt_is_done(release, num_steps):
    """e5: the next in line leads, and goes on with what was computed."""
    engine = make_engine(release, max_batch_tokens=8)
    names = [submit(engine) for _ in range(3)]
    for _ in range(num_steps):
        engine.step()
    assert engine.abort(names[0]).outputs[0].finish_reason == "abort"
    assert engine.stats()["held"] == 1
    assert engine.coordinator.leader_of(names[2]) == names[1]
    ended = run(engine)
    assert reasons(ended) == dict.fromkeys(names[1:], "length")
    assert ended[names[1]].num_cached_tokens == 8 * num_steps
    assert ended[names[2]].num_cached_tokens == 15
    assert all(map(answer_is_its_own, ended.values()))


def test_a_leader_is_aborted_after_its_prompt_is_done():
    """Under early release nobody cares; under completion the next one leads."""
    for release, num_held in (("prefill", 0), ("completion", 1)):
        engine = make_engine(release)
        names = [submit(engine, max_tokens=6) for _ in range(3)]
        engine.step(), engine.step()
        engine.abort(names[0])
        assert engine.stats()["held"] == num_held
        ended = run(engine)
        assert [o.num_cached_tokens for o in ended.values()] == [15, 15]
        assert all(answer_is_its_own(output, 6) for output in ended.values())


@both_releases
@pytest.mark.parametrize("failing", [1, 2])
def test_a_leader_whose_pass_fails_is_followed(release, failing):
    """e7, e9, e11: it ends with the error and nobody else; nothing is remembered."""
    engine = make_engine(release, fail=[failing], max_batch_tokens=8)
    names = [submit(engine) for _ in range(3)]
    ended = run(engine)
    assert reasons(ended) == dict(
        zip(names, ["error", "length", "length"], strict=True)
    )
    assert all(answer_is_its_own(ended[name]) for name in names[1:])
    again = submit(engine)
    assert engine.stats()["held"] == 0
    assert answer_is_its_own(run(engine)[again])


@both_releases
def test_every_leader_fails(release):
    """As many errors as requests, one after the other, and then nobody is left."""
    engine = make_engine(release, fail=range(1, 4))
    [submit(engine) for _ in range(3)]
    assert set(reasons(run(engine)).values()) == {"error"}
    assert engine.runner.num_runs == 3, "each failure is its own"


@both_releases
def test_a_leader_is_preempted_while_others_wait(release):
    """It comes back, and they have waited for the right one."""
    engine = make_engine(release, pool="tight", max_batch_tokens=8)
    elder = submit(engine, [1] * 30, max_tokens=40)
    for _ in range(8):
        engine.step()
    long = [2] * 60
    names = [submit(engine, long, max_tokens=20) for _ in range(3)]
    preempted_held = []
    preempt = engine.scheduler.preempt

    def watched(state):
        preempted_held.append((state.request.request_id, engine.stats()["held"]))
        preempt(state)

    engine.scheduler.preempt = watched
    ended = run(engine)
    assert (names[0], 2) in preempted_held, "no leader was preempted"
    assert reasons(ended) == dict.fromkeys([elder, *names], "length")
    assert all(answer_is_its_own(ended[name], 20) for name in names)


@both_releases
def test_who_can_never_fit_opens_no_flight(release):
    engine = make_engine(release, pool="tight")
    for _ in range(2):
        with pytest.raises(ValueError, match="pages"):
            submit(engine, [1] * 80, max_tokens=40)
    assert engine.stats()["flights"] == 0 and not engine.has_unfinished()


@both_releases
def test_a_follower_is_aborted(release):
    """e6: the leader goes on, the others are released, the same prompt comes again."""
    engine = make_engine(release, max_batch_tokens=8)
    names = [submit(engine) for _ in range(3)]
    engine.step()
    assert engine.abort(names[1]).num_cached_tokens == 0
    assert engine.abort(names[1]) is None
    names.append(submit(engine))
    assert engine.stats()["held"] == 2
    assert run(engine).keys() == {names[0], names[2], names[3]}
    assert engine.stats()["lookups"] == 3, "who was never admitted does not count"


def test_a_key_is_used_again_while_old_members_run():
    """R19, e8: a new flight after early release, the same one until completion."""
    for release, num_flights, num_held in (("prefill", 2, 1), ("completion", 1, 3)):
        engine = make_engine(release)
        first = [submit(engine, max_tokens=9) for _ in range(2)]
        engine.step()
        more = [submit(engine, max_tokens=9) for _ in range(2)]
        assert engine.stats()["flights"] == num_flights
        assert engine.stats()["held"] == num_held
        engine.abort(first[1])
        ended = run(engine)
        assert [ended[name].num_cached_tokens for name in more] == [15, 15]


@both_releases
def test_a_flight_whose_members_are_gone_is_gone(release):
    """e10: who comes after an abandoned flight leads, and is not told of it."""
    engine = make_engine(release, max_batch_tokens=8)
    for name in [submit(engine) for _ in range(3)]:
        engine.abort(name)
    assert not engine.has_unfinished()
    check_idle(engine)
    assert answer_is_its_own(run_one(engine))


def run_one(engine):
    name = submit(engine)
    assert engine.coordinator.leader_of(name) is None
    return run(engine)[name]


def order(engine) -> list[tuple[str, int]]:
    queues = [*engine.scheduler.running, *engine.scheduler.waiting]
    return [(s.request.request_id, s.priority) for s in queues]


def test_a_leader_is_as_urgent_as_those_who_wait():
    """While they wait, and not longer; an heir has it from the others in line."""
    engine = make_engine("prefill", max_running=1, max_batch_tokens=8)
    stranger, leader = submit(engine, [3] * 16, max_tokens=1), submit(engine)
    assert order(engine) == [(stranger, 0), (leader, 0)]
    urgent, heir = submit(engine, priority=-2), submit(engine, priority=-1)
    assert order(engine) == [(leader, -2), (stranger, 0)]
    engine.abort(urgent)
    assert order(engine) == [(leader, -1), (stranger, 0)], "nobody waits with -2"
    last = submit(engine, priority=-3)
    engine.abort(leader)
    assert order(engine) == [(heir, -3), (stranger, 0)]
    engine.step(), engine.step()
    assert order(engine) == [(heir, -1), (last, -3), (stranger, 0)], "released"
    assert list(run(engine))[-1] == stranger


@both_releases
def test_an_interrupted_step_leaves_no_flight(release):
    """Ctrl-C while pages are published: all end, and the prompt may come again."""
    engine = make_engine(release)
    names = [submit(engine) for _ in range(3)]

    def interrupt(kind, /, **details):
        engine.scheduler.cache.observer = lambda kind, /, **details: None
        raise KeyboardInterrupt

    engine.scheduler.cache.observer = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert reasons(run(engine)) == dict.fromkeys(names, "error")
    assert answer_is_its_own(run_one(engine))


# ---- A real model: the prompt is shared, the answer is not ---------------------------

PARAMS = [
    SamplingParams(max_tokens=6, temperature=0),
    SamplingParams(max_tokens=6, temperature=1.5, seed=1),
    SamplingParams(max_tokens=6, temperature=1.5, seed=2),
    SamplingParams(max_tokens=3, temperature=0),
]


@pytest.fixture(scope="module")
def model(random_decoder):
    return random_decoder(VOCAB)


def real_answers(model, release: str, groups) -> list[list[int]]:
    options = read_options({"single_flight": release, "page_size": 4})
    answers = []
    for group in groups:
        runner = ModelRunner(model, 64, 4, Sampler(0))
        engine = assemble(options, 64, runner, Limits(VOCAB, 256))
        names = [engine.submit(range(15), params) for params in group]
        ended = {}
        while engine.has_unfinished():
            ended |= {o.request_id: o for o in engine.step() if o.finished}
        answers += [ended[name].outputs[0].token_ids for name in names]
        cached = [ended[name].num_cached_tokens for name in names]
        assert cached == [0] + [12] * (len(group) - 1)
    return answers


@both_releases
def test_followers_sample_for_themselves(model, release):
    """R12: each has the answer that it has alone."""
    alone = real_answers(model, release, [[params] for params in PARAMS])
    assert real_answers(model, release, [PARAMS]) == alone
    assert len(set(map(tuple, alone))) == 4


# ---- Anything at any moment, and an end within a bound -------------------------------


class Flights(Life):
    """Few prompts, so that many are equal; each history must come to its end."""

    @initialize(
        release=st.sampled_from(RELEASES),
        publish=st.sampled_from(["finish", "step"]),
        admission=st.sampled_from(["optimistic", "reserve"]),
        max_batch_tokens=st.sampled_from([1, 5, 200]),
        max_running=st.integers(1, 4),
        wait_for_prefix=st.sampled_from([None, 1, 3]),
        pool=st.sampled_from(["tight", "roomy"]),
    )
    def begin(self, **chosen):
        self.engine = make_engine(**chosen)
        self.wanted: dict[str, int] = {}
        self.ended: dict[str, str] = {}

    @rule(
        prompt=st.sampled_from([PROMPT, PROMPT[:7], [2] * 31]),
        max_tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
        extra_key=st.sampled_from([None, None, "salt"]),
    )
    def submit(self, prompt, max_tokens, **options):
        name = submit(self.engine, prompt, max_tokens, **options)
        self.wanted[name] = max_tokens

    def end(self, output):
        name, (answer,) = output.request_id, output.outputs
        assert name not in self.ended, "a request that ends twice"
        self.ended[name] = answer.finish_reason
        assert (answer.finish_reason == "error") == (name in self.engine.runner.failed)
        size = len(answer.token_ids)
        assert answer.finish_reason != "length" or size == self.wanted[name]
        assert answer_is_its_own(output, size)

    @invariant()
    def all_is_well(self):
        if not hasattr(self, "engine"):
            return
        check(self.engine)
        live, flights = self.engine._live, self.engine.coordinator
        for name, progress in live.items():
            leader = flights.leader_of(name)
            assert progress.held == (leader is not None)
            assert leader is None or not live[leader].held, "led by one who waits"
            line = [live[other] for other in (name, *flights.waiting_for(name))]
            most_urgent = min(p.state.request.priority for p in line)
            assert progress.held or progress.state.priority == most_urgent

    def teardown(self):
        if hasattr(self, "engine"):
            super().teardown()


Flights.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFlights = Flights.TestCase


# ---- Broken on purpose ---------------------------------------------------------------


def test_a_planted_fault_is_found(monkeypatch):
    """An engine that forgets to lift, to lower, to inherit or to publish early."""
    test_a_leader_is_as_urgent_as_those_who_wait()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_hasten", lambda self, leader: None)
        with pytest.raises(AssertionError):
            test_a_leader_is_as_urgent_as_those_who_wait()
    with monkeypatch.context() as patch:
        patch.setattr(
            "minivllm.single_flight.PromptAtLeast.num_visible",
            lambda self, state: self.policy.num_visible(state),
        )
        with pytest.raises(AssertionError):
            test_early_release_publishes_the_prompt_under_every_policy()


def test_who_is_never_released_is_missed(monkeypatch):
    """The bound on the steps is no decoration."""
    monkeypatch.setattr(Engine, "_release", lambda self, *_: None)
    engine = make_engine("completion")
    [submit(engine) for _ in range(2)]
    for _ in range(enough_steps(engine)):
        engine.step()
    with pytest.raises(AssertionError):
        check_idle(engine)


# ---- Cut short -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("line", ["_flights", "_members"])
def test_an_interrupt_while_a_flight_is_entered(line, n, monkeypatch):
    """A mend leaves nothing of it: the same prompt runs again, as if never asked."""

    class Struck(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            raise KeyboardInterrupt

    engine = make_engine()
    submit(engine)
    monkeypatch.setattr(engine.coordinator, line, Struck())
    with pytest.raises(KeyboardInterrupt):
        engine.submit(PROMPT[::-1], SamplingParams(max_tokens=4, n=n))
    cut = engine.unfinished()
    assert cut == ["0", "1"]
    assert {engine.abort(name).outputs[0].finish_reason for name in cut} == {"error"}
    assert not engine.has_unfinished()
    again = [submit(engine, PROMPT[::-1]), submit(engine, PROMPT[::-1])]
    assert reasons(run(engine)) == dict.fromkeys(again, "length")
