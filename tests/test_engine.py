"""Scheduler and engine on a runner that notices every wrong page."""

import itertools
import sys
from functools import partial
from pathlib import Path

import pytest
from checking_runner import CheckingRunner, cold_continuation
from hypothesis import given, settings
from hypothesis import strategies as st

import minivllm
from minivllm.engine import (
    Engine,
    Independent,
    Limits,
    NoText,
    PublishAtFinish,
    PublishEachStep,
)
from minivllm.events import EventLog, ignore
from minivllm.prefix_cache import PrefixCache
from minivllm.request import SamplingParams, encode_ids
from minivllm.scheduler import ArrivalOrder, Scheduler

VOCAB = 50
PACKAGE = str(Path(minivllm.__file__).parent)
PUBLISHERS = {"finish": PublishAtFinish, "step": PublishEachStep}


def make_engine(
    num_pages=64,
    page_size=4,
    index="radix",
    eviction="lru",
    publish="step",
    fail=(),
    eos=(),
    log=None,
    **options,
):
    log = log or EventLog()
    cache = PrefixCache(num_pages, page_size, index, eviction, log)
    scheduler = Scheduler(cache, observer=log, **options)
    runner = CheckingRunner(page_size, VOCAB, fail)
    limits = Limits(VOCAB, 200, frozenset(eos))
    return Engine(
        runner, scheduler, limits, publisher=PUBLISHERS[publish](), observer=log
    )


def run(engine, max_steps=10_000):
    """Step to the end, with every invariant checked after each step."""
    finished = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
        check(engine)
    assert not engine.has_unfinished(), "a request that never ends"
    stats = engine.stats()
    assert stats["pages_private"] == stats["pages_pinned"] == 0, (
        "idle, and pages are held"
    )
    return finished


def check(engine):
    scheduler = engine.scheduler
    assert not engine.runner.faults
    scheduler.cache.check()
    assert all(state.lease is None for state in scheduler.waiting), "waiting with pages"
    assert all(state.lease is not None for state in scheduler.running)
    for queue in (scheduler.waiting, scheduler.running):
        assert [s.order for s in queue] == sorted(s.order for s in queue)
    queued = [s.request.request_id for s in [*scheduler.waiting, *scheduler.running]]
    live = [name for name, progress in engine._live.items() if not progress.held]
    assert sorted(queued) == sorted(live), "each live request is in exactly one queue"


def ask(engine, prompt, max_tokens=4, **options):
    """Submit one request and run it alone; its final output."""
    name = engine.submit(prompt, SamplingParams(max_tokens=max_tokens), **options)
    return run(engine)[name]


def same_as_cold(output, max_tokens):
    expected = cold_continuation(output.prompt_token_ids, max_tokens, VOCAB)
    return output.outputs[0].token_ids == expected


MATRIX = list(
    itertools.product(
        ["radix", "hash", "none"],
        ["step", "finish"],
        ["optimistic", "reserve"],
        ["lru", "lfu", "fifo"],
    )
)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_combination_gives_the_cold_answer(data):
    """The policy matrix under random arrivals, aborts, failures and tight pools."""
    index, publish, admission, eviction = data.draw(st.sampled_from(MATRIX))
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    engine = make_engine(
        num_pages=data.draw(st.integers(64 // page_size + 1, 200 // page_size)),
        page_size=page_size,
        index=index,
        publish=publish,
        admission=admission,
        eviction=eviction,
        max_running=data.draw(st.integers(1, 6)),
        max_batch_tokens=data.draw(st.sampled_from([1, 5, 16, 100])),
        fail=data.draw(st.sets(st.integers(1, 30), max_size=2)),
    )
    wanted, ended, live = {}, {}, []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(
            st.sampled_from(["submit", "submit", "step", "step", "abort"])
        )
        if action == "submit":
            pages = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
            prompt = [page for page in pages for _ in range(4)][
                : data.draw(st.integers(1, 32))
            ]
            max_tokens = data.draw(st.integers(1, 20))
            priority = data.draw(st.integers(0, 1))
            name = engine.submit(
                prompt, SamplingParams(max_tokens=max_tokens), priority=priority
            )
            wanted[name] = max_tokens
            live.append(name)
        elif action == "step":
            ended |= {o.request_id: o for o in engine.step() if o.finished}
        elif live:
            name = live.pop(data.draw(st.integers(0, len(live) - 1)))
            if output := engine.abort(name):
                assert output.outputs[0].finish_reason == "abort"
                ended[name] = output
            assert engine.abort(name) is None
        check(engine)
    ended |= run(engine)
    assert ended.keys() == wanted.keys(), "every request ends exactly once"
    for name, output in ended.items():
        reason = output.outputs[0].finish_reason
        if reason == "length":
            assert same_as_cold(output, wanted[name])
        else:
            assert reason in ("abort", "error")
            sofar = output.outputs[0].token_ids
            assert sofar == cold_continuation(
                output.prompt_token_ids, len(sofar), VOCAB
            )
    assert index != "none" or engine.stats()["cached_tokens"] == 0


def test_full_hits_compute_one_token_each():
    """Eight identical 16-token prompts at page 4, one after the other: 16 + 7 × 1."""
    engine = make_engine()
    for _ in range(8):
        assert same_as_cold(ask(engine, range(16), max_tokens=1), 1)
    assert engine.runner.computed == 16 + 7
    assert engine.stats()["prefill_tokens"] == 23


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_the_same_ids_twice(index):
    """a4, b9: 8 ids twice at page 4 and at page 1: cached 7, the same answer."""
    for page_size in (4, 1):
        engine = make_engine(index=index, page_size=page_size)
        first, second = ask(engine, range(8)), ask(engine, range(8))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 7)
        assert same_as_cold(second, 4)


def test_a_shorter_prompt_than_the_cached_one():
    """a13: [1..12], then [1..6]: cached 4."""
    engine = make_engine()
    ask(engine, range(1, 13))
    output = ask(engine, range(1, 7))
    assert output.num_cached_tokens == 4 and same_as_cold(output, 4)


@pytest.mark.parametrize("publish", ["step", "finish"])
def test_cold_twins_in_one_step_share_nothing(publish):
    """a6, R01: published after the step is too late for the same step."""
    engine = make_engine(publish=publish)
    names = [engine.submit(range(12), SamplingParams(max_tokens=4)) for _ in range(2)]
    outputs = run(engine)
    assert [outputs[name].num_cached_tokens for name in names] == [0, 0]
    assert all(same_as_cold(outputs[name], 4) for name in names)


@pytest.mark.parametrize(("publish", "cached"), [("step", 480), ("finish", 0)])
def test_a_follower_after_the_first_output_token(publish, cached):
    """R07: it restores 480 of 493 if pages are published while their owner decodes."""
    engine = make_engine(num_pages=128, page_size=16, publish=publish)
    engine.limits = Limits(VOCAB, 1000)
    prompt = [i % VOCAB for i in range(493)]
    engine.submit(prompt, SamplingParams(max_tokens=128))
    engine.step()
    follower = engine.submit(prompt, SamplingParams(max_tokens=4))
    assert run(engine)[follower].num_cached_tokens == cached


def test_extra_keys_share_only_with_themselves():
    """a10: salt s twice, salt t, none."""
    engine = make_engine()
    keys = ["s", "s", "t", None]
    cached = [ask(engine, range(10), extra_key=key).num_cached_tokens for key in keys]
    assert cached == [0, 8, 0, 0]


def test_a_suffix_shorter_than_a_chunk_is_one_chunk():
    """a5: chunk 8, prompt 16, 12 cached: one prefill step of 4 tokens."""
    log = EventLog()
    engine = make_engine(max_batch_tokens=8, log=log)
    ask(engine, list(range(12)), max_tokens=1)
    log.events.clear()
    ask(engine, list(range(16)), max_tokens=1)
    assert [e.details["chunks"] for e in log.of("schedule")] == [[("1", 12, 4)]]


def test_a_prompt_above_the_budget_is_cut():
    """d7: prompt 20, budget 8: steps of 8, 8, 4."""
    log = EventLog()
    engine = make_engine(max_batch_tokens=8, log=log)
    ask(engine, list(range(20)), max_tokens=1)
    assert [e.details["chunks"][0][2] for e in log.of("schedule")] == [8, 8, 4]


def test_pages_are_exactly_enough():
    """c6: prompt 4, five output tokens, page 4: two pages and no third."""
    engine = make_engine(num_pages=2)
    assert same_as_cold(ask(engine, range(4), max_tokens=5), 5)
    with pytest.raises(ValueError, match="3 pages and the pool has 2"):
        engine.submit(range(4), SamplingParams(max_tokens=6))


def test_impossible_requests_are_refused_at_once():
    """c3, f5, f6, f13: named, and the next request runs."""
    engine = make_engine(num_pages=8)
    for prompt, params, fault in [
        (range(33), {}, "8"),
        ([], {}, "empty"),
        ([1, VOCAB], {}, f"token id {VOCAB}"),
        ([1, -1], {}, "token id -1"),
        ([1], {"stop_token_ids": [VOCAB]}, f"token id {VOCAB}"),
        ([1] * 200, {}, "context"),
        ([1.5], {}, "integers"),
    ]:
        with pytest.raises(ValueError, match=fault):
            engine.submit(list(prompt), SamplingParams(**params))
    assert not engine.has_unfinished()
    assert same_as_cold(ask(engine, range(4)), 4)


def test_the_context_ends_a_request():
    """f13: context 200, prompt 199: one token, "length"."""
    engine = make_engine()
    output = ask(engine, [1] * 199, max_tokens=10)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_end_tokens():
    """An end token stops and stays; ignore_eos goes on; stop_token_ids stop as well."""
    prompt = list(range(7))
    answer = cold_continuation(prompt, 6, VOCAB)
    at = answer.index(answer[3]) + 1
    engine = make_engine(eos=[answer[3]])
    assert ask(engine, prompt, max_tokens=6).outputs[0].token_ids == answer[:at]
    name = engine.submit(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    assert run(engine)[name].outputs[0].token_ids == answer
    engine = make_engine()
    name = engine.submit(
        prompt, SamplingParams(max_tokens=6, stop_token_ids=[answer[3]])
    )
    output = run(engine)[name].outputs[0]
    assert (output.token_ids, output.finish_reason) == (answer[:at], "stop")


def test_eight_hit_five_admitted():
    """341 pages, 66 reserved each: a hit does not shrink the reservation."""
    prompt = [i % VOCAB for i in range(929)]
    for admission, expected in [("reserve", 5), ("optimistic", 8)]:
        engine = make_engine(num_pages=341, page_size=16, admission=admission)
        engine.limits = Limits(VOCAB, 4000)
        ask(engine, prompt, max_tokens=1)
        for _ in range(8):
            engine.submit(prompt, SamplingParams(max_tokens=128))
        engine.step()
        assert len(engine.scheduler.running) == expected
        outputs = run(engine)
        assert {o.num_cached_tokens for o in outputs.values()} == {928}
        assert engine.stats()["preemptions"] == 0 or admission == "optimistic"


def test_preemption_is_not_a_hit():
    """d2, d5, c4: random prompts, a tight pool: recompute is counted apart."""
    log = EventLog()
    engine = make_engine(num_pages=14, log=log)
    names = [
        engine.submit(
            [(7 * i + j) % VOCAB for j in range(16)], SamplingParams(max_tokens=20)
        )
        for i in range(4)
    ]
    outputs = run(engine)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["recomputed_tokens"] > 0
    assert stats["hits"] == stats["cached_tokens"] == 0 and stats["lookups"] == 4
    assert stats["prefill_tokens"] == 64
    assert all(same_as_cold(outputs[name], 20) for name in names)
    assert "0" not in {e.details["request_id"] for e in log.of("preempt")}, (
        "the first is safe"
    )


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_anywhere(steps):
    """c8: waiting, between chunks, decoding; twice; nothing is left behind."""
    engine = make_engine(max_batch_tokens=4)
    name = engine.submit(range(12), SamplingParams(max_tokens=8))
    for _ in range(steps):
        engine.step()
    output = engine.abort(name)
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert engine.abort(name) is None and engine.abort("no such id") is None
    assert not engine.has_unfinished() and engine.step() == []
    run(engine)
    cached = ask(engine, range(12)).num_cached_tokens
    assert cached == min(4 * steps, 11) // 4 * 4 if steps < 3 else cached == 11


def test_a_failed_forward_ends_its_requests_and_no_others():
    """Nothing of a failed pass is committed or findable; the engine goes on."""
    engine = make_engine(fail=[1], max_running=1)
    first = engine.submit(range(12), SamplingParams(max_tokens=4))
    second = engine.submit(range(12), SamplingParams(max_tokens=4))
    outputs = run(engine)
    assert outputs[first].outputs[0].finish_reason == "error"
    assert outputs[second].num_cached_tokens == 0 and same_as_cold(outputs[second], 4)


def test_priorities_go_first():
    engine = make_engine(max_running=1)
    low = engine.submit(range(8), SamplingParams(max_tokens=2), priority=1)
    high = engine.submit(range(9), SamplingParams(max_tokens=2), priority=0)
    assert list(run(engine)) == [high, low]


def test_reset_prefix_cache():
    engine = make_engine()
    ask(engine, range(12))
    engine.submit(range(12), SamplingParams(max_tokens=8))
    engine.step()
    assert engine.reset_prefix_cache() is False
    run(engine)
    assert engine.reset_prefix_cache() is True
    assert ask(engine, range(12)).num_cached_tokens == 0


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_never_a_tail_without_its_head(index):
    """b12: pool 3 pages; A = 12 ids, B = 4 others, A again: cached 8."""
    engine = make_engine(num_pages=3, index=index)
    ask(engine, range(12), max_tokens=1)
    ask(engine, range(20, 24), max_tokens=1)
    assert ask(engine, range(12), max_tokens=1).num_cached_tokens == 8


def plan(engine, log):
    """Run to the end; the chunks of each step as {request id: (start, tokens)}."""
    run(engine)
    return [
        {name: (start, size) for name, start, size in event.details["chunks"]}
        for event in log.of("schedule")
        if event.details["chunks"]
    ]


def steps_of(name, steps):
    return [i for i, chunks in enumerate(steps, 1) if name in chunks]


def test_aborted_between_schedule_and_forward():
    """a7: scheduled, the pass is interrupted, aborted: nothing of it can be found."""
    engine = make_engine()
    engine.runner.run, real_run = stop, engine.runner.run
    name = engine.submit(range(12), SamplingParams(max_tokens=4))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.stats()["pages_private"] == 3
    assert engine.abort(name).outputs[0].finish_reason == "abort"
    engine.runner.run = real_run
    again = ask(engine, range(12))
    assert again.num_cached_tokens == 0 and same_as_cold(again, 4)


def stop(chunks):
    raise KeyboardInterrupt


def test_an_interrupted_forward_can_be_stepped_again():
    """Nothing was committed: the same chunks are planned once more."""
    engine = make_engine()
    engine.runner.run, real_run = stop, engine.runner.run
    name = engine.submit(range(12), SamplingParams(max_tokens=4))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.run = real_run
    assert same_as_cold(run(engine)[name], 4)
    assert engine.stats()["recomputed_tokens"] == 0


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_match_is_pinned_before_a_neighbour_allocates(index):
    """a8: A matches two idle pages, B allocates in the same step, the pool is tight."""
    engine = make_engine(num_pages=5, index=index)
    ask(engine, range(8), max_tokens=1)
    a = engine.submit([*range(8), 20], SamplingParams(max_tokens=3))
    b = engine.submit(range(30, 42), SamplingParams(max_tokens=2))
    engine.step()
    assert len(engine.scheduler.running) == 1, "B has no room beside A's match"
    outputs = run(engine)
    assert outputs[a].num_cached_tokens == 8
    assert same_as_cold(outputs[a], 3) and same_as_cold(outputs[b], 2)


def test_hit_and_cold_in_one_batch():
    """a16: eight tokens cached beside twelve cold ones, and one that decodes."""
    log = EventLog()
    engine = make_engine(log=log)
    ask(engine, range(8), max_tokens=1)
    decoding = engine.submit([40] * 5, SamplingParams(max_tokens=6))
    engine.step()
    hit = engine.submit([*range(8), 20, 21], SamplingParams(max_tokens=4))
    cold = engine.submit(range(30, 42), SamplingParams(max_tokens=4))
    log.events.clear()
    outputs = run(engine)
    steps = [event.details["chunks"] for event in log.of("schedule")]
    assert steps[0] == [(decoding, 5, 1), (hit, 8, 2), (cold, 0, 12)]
    assert same_as_cold(outputs[decoding], 6)
    assert same_as_cold(outputs[hit], 4) and same_as_cold(outputs[cold], 4)


def test_a_resumed_request_computes_what_it_does_not_find():
    """c4, c7: its chunks are the tokens that it has, less those that it finds now."""
    log = EventLog()
    engine = make_engine(num_pages=9, log=log)
    for i in range(2):
        engine.submit([i] * 12, SamplingParams(max_tokens=10))
    steps = plan(engine, log)  # `check` wants each in exactly one queue
    (preempted,) = [e.details["request_id"] for e in log.of("preempt")]
    assert preempted == "1"
    first, cached = [
        e.details["cached"] for e in log.of("admit") if e.details["request_id"] == "1"
    ]
    at = next(i for i in steps_of("1", steps)[1:] if i - 1 not in steps_of("1", steps))
    before = max(sum(s["1"]) for s in steps[: at - 1] if "1" in s)
    assert first == 0 and cached > 0
    assert steps[at - 1]["1"] == (cached, before + 1 - cached)
    assert engine.stats()["recomputed_tokens"] == before - cached


def test_strict_order():
    """d4: two pages are free; six are needed, then one: nobody is overtaken."""
    log = EventLog()
    engine = make_engine(num_pages=8, log=log)
    engine.submit([1] * 20, SamplingParams(max_tokens=5))  # six pages
    large = engine.submit([2] * 21, SamplingParams(max_tokens=2))
    small = engine.submit([3] * 3, SamplingParams(max_tokens=1))
    steps = plan(engine, log)
    assert steps_of(large, steps)[0] == steps_of(small, steps)[0] == 6


def test_a_preempted_request_resumes_before_those_behind_it():
    """d5: it keeps its place."""
    log = EventLog()
    engine = make_engine(num_pages=9, max_running=2, log=log)
    for i in range(3):
        engine.submit([i] * 12, SamplingParams(max_tokens=10))
    plan(engine, log)
    order = [
        (e.kind, e.details["request_id"]) for e in log.of("admit", "preempt", "finish")
    ]
    assert order.index(("preempt", "1")) < order.index(("admit", "2"))
    resumed = [i for i, what in enumerate(order) if what == ("admit", "1")][-1]
    assert order.index(("preempt", "1")) < resumed < order.index(("admit", "2"))


def test_an_important_request_does_not_push_a_running_one_out():
    """d6: priority is a place in the queue: documented, and so it is."""
    log = EventLog()
    engine = make_engine(max_running=1, log=log)
    low = engine.submit(range(8), SamplingParams(max_tokens=4), priority=5)
    engine.step()
    high = engine.submit(range(20, 28), SamplingParams(max_tokens=2), priority=0)
    steps = plan(engine, log)
    assert (steps_of(low, steps), steps_of(high, steps)) == ([1, 2, 3, 4], [5, 6])


def test_a_short_prompt_behind_a_long_one():
    """d8: budget 8: it starts at step 11, beside the first decode."""
    log = EventLog()
    engine = make_engine(max_batch_tokens=8, log=log)
    engine.submit([1] * 80, SamplingParams(max_tokens=4))
    short = engine.submit([2] * 4, SamplingParams(max_tokens=4))
    steps = plan(engine, log)
    assert steps_of(short, steps)[0] == 11
    assert steps[10] == {"0": (80, 1), short: (0, 4)}


@pytest.mark.parametrize(("shared", "cached"), [(15, 0), (16, 16)])
def test_less_than_a_page_is_no_hit(shared, cached):
    """d9: pages of 16; 15 tokens shared, or 16, and a tail."""
    engine = make_engine(page_size=16)
    ask(engine, [*range(shared), 40, 41])
    output = ask(engine, [*range(shared), 30, 31])
    assert output.num_cached_tokens == cached and same_as_cold(output, 4)


def test_whoever_decodes_is_not_held_up_by_a_long_prompt():
    """Chunks and decodes share a step; no step exceeds the budget."""
    log = EventLog()
    engine = make_engine(max_batch_tokens=10, log=log)
    first = engine.submit([1] * 4, SamplingParams(max_tokens=12))
    engine.step()
    long = engine.submit([2] * 60, SamplingParams(max_tokens=2))
    steps = plan(engine, log)
    assert steps_of(first, steps) == list(range(1, 13))
    assert [steps[i - 1][long][1] for i in steps_of(long, steps)] == [9] * 6 + [6, 1]
    assert max(sum(n for _, n in step.values()) for step in steps) == 10


def test_one_victim_is_not_another():
    """A grouping that names the request itself: the others behind it go on."""

    class First(ArrivalOrder):
        def victim(self, unserved):
            return unserved[0]

    log = EventLog()
    engine = make_engine(num_pages=9, grouping=First(), log=log)
    names = [engine.submit([i] * 8, SamplingParams(max_tokens=12)) for i in range(3)]
    outputs = run(engine)
    assert all(same_as_cold(outputs[name], 12) for name in names)
    kinds = [event.kind for event in log.of("preempt", "schedule")]
    first = kinds.index("preempt")
    (preempted,) = [e.details["request_id"] for e in log.of("preempt")][:1]
    chunks = list(log.of("schedule"))[first].details["chunks"]
    served = [name for name, _, _ in chunks]
    assert served == [name for name in names if name != preempted]


def test_nobody_is_let_in_when_somebody_was_sent_away():
    """A long prompt loses its pages between two chunks, and is not back at once."""
    log = EventLog()
    engine = make_engine(num_pages=5, max_batch_tokens=3, log=log)
    engine.submit([1] * 5, SamplingParams(max_tokens=5))
    engine.step()
    engine.submit([2] * 9, SamplingParams(max_tokens=1))
    run(engine)
    kinds = [event.kind for event in log.of("preempt", "schedule", "admit")]
    assert kinds.count("preempt") == 1
    assert kinds[kinds.index("preempt") + 1] == "schedule"


def test_nothing_is_observed_unless_asked_for():
    """Events are off by default; a log keeps the last ones only."""
    cache = PrefixCache(16, 4)
    engine = Engine(CheckingRunner(4, VOCAB), Scheduler(cache), Limits(VOCAB, 200))
    assert engine.observer is engine.scheduler.observer is cache.observer is ignore
    log = EventLog(capacity=5)
    ask(make_engine(log=log), range(12), max_tokens=9)
    assert len(log.events) == 5 and log.events[-1].kind == "step"


# ---- The coordinator's seam ----------------------------------------------------------


class Twins(Independent):
    """The first of equal prompts leads; it releases the others when it is prefilled."""

    def __init__(self):
        self.start_over()

    def start_over(self):
        self.flights, self.keys = {}, {}

    def admit(self, request_id, token_ids, extra_key=None):
        key = self.keys[request_id] = tuple(token_ids)
        self.flights.setdefault(key, []).append(request_id)
        return "leader" if self.flights[key] == [request_id] else "follower"

    def prefilled(self, request_id):
        names = self.flights.pop(self.keys[request_id], [request_id])
        return names[1:]

    def finished(self, request_id):
        del self.keys[request_id]
        return []

    def aborted(self, request_id):
        key = self.keys.pop(request_id)
        names = self.flights.pop(key, [])
        left = [name for name in names if name != request_id]
        if left:
            self.flights[key] = left
        return (left[0] if left[:1] != names[:1] and left else None), []


def coordinated(**options):
    engine = make_engine(**options)
    engine.coordinator = Twins()
    return engine


def test_all_is_published_before_a_follower_is_told():
    """e12: eight identical prompts at once: 16 + 7 × 1; followers own nothing."""
    engine = coordinated()
    for _ in range(8):
        engine.submit(range(16), SamplingParams(max_tokens=1))
    assert engine.stats()["held"] == 7 and engine.stats()["waiting"] == 1
    outputs = run(engine)
    assert [o.num_cached_tokens for o in outputs.values()] == [0] + [15] * 7
    assert engine.runner.computed == 23 and not engine.coordinator.keys


def test_whoever_is_told_can_find_what_it_waited_for():
    """All that a step completed is published before the coordinator hears of it."""
    found = []

    class Looking(Twins):
        def prefilled(self, request_id):
            found.append(engine.scheduler.cache.find(range(16)).matched_len)
            return super().prefilled(request_id)

        def finished(self, request_id):
            found.append(engine.scheduler.cache.find(range(16)).matched_len)
            return super().finished(request_id)

    engine = make_engine()
    engine.coordinator = Looking()
    engine.submit([9] * 5, SamplingParams(max_tokens=1))
    engine.submit(range(16), SamplingParams(max_tokens=2))
    run(engine)
    assert found == [16] * 4


def test_a_failed_leader_is_followed():
    """e7, e9: it ends with the error, the next leads, and nobody hangs."""
    engine = coordinated(fail=[1])
    names = [engine.submit(range(12), SamplingParams(max_tokens=3)) for _ in range(3)]
    outputs = run(engine)
    reasons = [outputs[name].outputs[0].finish_reason for name in names]
    assert reasons == ["error", "length", "length"]
    assert all(same_as_cold(outputs[name], 3) for name in names[1:])
    assert not engine.coordinator.keys


def test_held_requests_can_be_aborted():
    """e5, e6: the follower, then the leader; the last one leads and ends."""
    engine = coordinated()
    names = [engine.submit(range(12), SamplingParams(max_tokens=3)) for _ in range(3)]
    assert engine.abort(names[1]).num_cached_tokens == 0
    assert engine.abort(names[0]).outputs[0].token_ids == []
    assert same_as_cold(run(engine)[names[2]], 3)
    assert engine.stats()["lookups"] == 1, "those never admitted do not count"


def test_waiting_requests_own_nothing():
    """c5: two prompts, the budget fits one: the other waits without pages."""
    engine = make_engine(max_batch_tokens=8)
    for i in range(2):
        engine.submit([i] * 8, SamplingParams(max_tokens=2))
    engine.step()
    assert [len(q) for q in (engine.scheduler.running, engine.scheduler.waiting)] == [
        1,
        1,
    ]
    assert engine.stats()["pages_private"] + engine.stats()["pages_pinned"] == 2


def test_bad_arguments_change_nothing():
    """A list as extra_key, a word as priority: refused, and neighbours run."""
    engine = make_engine()
    name = engine.submit(range(8), SamplingParams(max_tokens=3))
    for options in ({"extra_key": ["a"]}, {"extra_key": 1.5}, {"extra_key": ("a", {})}):
        with pytest.raises(ValueError, match="extra_key"):
            engine.submit(range(8), **options)
    for priority in ("high", None, True, 1.5):
        with pytest.raises(ValueError, match="priority"):
            engine.submit(range(8), priority=priority)
    assert list(run(engine)) == [name]


def test_requests_and_outputs_are_the_callers_to_change():
    """The prompt is copied in, outputs are copied out."""
    engine = make_engine()
    prompt = encode_ids(range(8))
    name = engine.submit(prompt, SamplingParams(max_tokens=4))
    prompt.append(9)
    while engine.has_unfinished():
        (output,) = engine.step()
        output.prompt_token_ids.extend(output.outputs[0].token_ids)
    assert output.request_id == name
    assert output.outputs[0].token_ids == cold_continuation(range(8), 4, VOCAB)


def test_a_writer_that_breaks_ends_its_own_request_only():
    class Broken:
        def push(self, token_id):
            raise RuntimeError("no such text")

        def text(self, finished):
            return ""

    engine = make_engine()
    engine.writers = lambda ids, params: Broken() if ids[0] == 9 else NoText()
    names = [engine.submit([i] * 8, SamplingParams(max_tokens=2)) for i in (1, 9, 2)]
    outputs = run(engine)
    reasons = [outputs[name].outputs[0].finish_reason for name in names]
    assert reasons == ["length", "error", "length"]
    assert same_as_cold(outputs[names[0]], 2) and same_as_cold(outputs[names[2]], 2)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_salts_are_forgotten_with_their_pages(index):
    """A cache salt per user must not leave something behind for each."""
    engine = make_engine(num_pages=8, index=index)
    for user in range(100):
        ask(engine, range(8), extra_key=f"user {user}")
    assert len(engine.scheduler.cache.index._roots) <= 8
    engine.reset_prefix_cache()
    assert not engine.scheduler.cache.index._roots


def test_max_tokens_none_reaches_as_far_as_the_pool():
    engine = make_engine(num_pages=4)
    output = ask(engine, range(8), max_tokens=None)
    assert len(output.outputs[0].token_ids) == 9 and same_as_cold(output, 9)


# ---- Ctrl-C --------------------------------------------------------------------------


def interrupted_at(number, action):
    """Whether `action` came so far in the package's lines as to be interrupted."""
    left = number

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def under_pressure():
    """Four requests: one is about to be preempted, one waits; pages are published."""
    engine = coordinated(num_pages=9, max_running=3, max_batch_tokens=16)
    for i in [0, 1, 2, 3, 1]:
        prompt = [1] * 4 + [i] * 6
        engine.submit(prompt, SamplingParams(max_tokens=6 + i))
    for _ in range(3):
        assert all(not output.finished for output in engine.step())
    return engine


ACTIONS = {
    "submit": lambda engine: engine.submit([1] * 9, SamplingParams(max_tokens=4)),
    "submit two": lambda engine: engine.submit([1] * 9, SamplingParams(4, n=2)),
    "step": lambda engine: [engine.step() for _ in range(4)],
    "abort": lambda engine: engine.abort("1"),
}


@pytest.mark.parametrize("then", ["abort", "step"])
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_an_interrupt_at_any_line(action, then):
    """Whatever Ctrl-C cuts short: what lives ends once, and no page stays held."""
    for number in itertools.count():
        engine = under_pressure()
        if not interrupted_at(number, partial(action, engine)):
            break
        live = {**engine._requests, **engine._untold}
        if then == "abort":
            ended = {name: engine.abort(name) for name in live}
            assert not engine.has_unfinished() and engine.step() == []
        else:
            ended = run(engine)
        assert ended.keys() == set(live)
        assert all(output.finished for output in ended.values())
        run(engine)
        assert not engine.coordinator.keys and not engine.coordinator.flights
        assert same_as_cold(ask(engine, [1] * 4 + [0] * 6), 4)
    assert number > 20


def test_a_text_that_cannot_be_written_takes_no_other_output_along():
    """A decoder that breaks at the end: three requests end, and three are reported."""

    class Broken(NoText):
        def text(self, finished):
            raise RuntimeError("no text")

    engine = make_engine()
    engine.writers = lambda ids, params: Broken() if ids[0] == 1 else NoText()
    names = {engine.submit([i] * 7, SamplingParams(max_tokens=1)) for i in range(3)}
    assert {output.request_id for output in engine.step()} == names
    assert not engine.has_unfinished()


def nested(depth):
    return 1 if depth == 0 else (nested(depth - 1),)


@pytest.mark.parametrize(
    "key", [10**5000, -(2**64), nested(10)], ids=["i", "j", "deep"]
)
def test_a_key_that_would_break_a_step_is_refused_at_the_door(key):
    engine = make_engine()
    with pytest.raises(ValueError, match="extra_key"):
        engine.submit([1] * 8, extra_key=key)
    assert not engine.has_unfinished()


def test_params_of_another_kind_are_refused():
    engine = make_engine()
    for params in (5, {}, SamplingParams):
        with pytest.raises(ValueError, match="SamplingParams"):
            engine.submit([1], params)
