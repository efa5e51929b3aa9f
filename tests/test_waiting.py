"""Who waits for a part of a prompt: how long, for whom, and at what it costs nobody."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from test_flights import Recording, answer_is_its_own, reasons, run, submit
from test_policies import AXES, VOCAB, Life, check, check_idle
from test_policies import make_engine as make_any_engine

from minivllm.engine import Engine, Limits
from minivllm.events import EventLog
from minivllm.options import assemble, read_options
from minivllm.single_flight import MAX_HELD, WaitForPrefix

HEAD = [i % VOCAB for i in range(60)]
both_indexes = pytest.mark.parametrize("index", ["radix", "hash"])


def make_engine(min_pages=1, fail=(), **chosen) -> Engine:
    chosen = {"index": "radix", "publish": "step", "page_size": 4} | chosen
    engine = make_any_engine(wait_for_prefix=min_pages, **chosen)
    engine.runner = Recording(chosen["page_size"], VOCAB, fail, engine.clock)
    engine.scheduler.observer = EventLog()
    return engine


def prompt(num_shared: int, own: int, num_own: int = 6) -> list[int]:
    return HEAD[:num_shared] + [own] * num_own


def waits(engine) -> list[str]:
    """Who waited, once for each step."""
    return [e.details["request_id"] for e in engine.scheduler.observer.of("wait")]


def batches(engine, num_steps: int) -> list[list[tuple[str, int]]]:
    return engine.runner.batches[:num_steps]


# ---- How long ------------------------------------------------------------------------


@both_indexes
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_two_cold_prompts_in_one_step(index, page_size):
    """The second waits one step, and finds all the full pages that they share."""
    for min_pages, num_waits, cached in ((None, 0, 0), (1, 1, 24), (99, 0, 0)):
        engine = make_engine(min_pages, index=index, page_size=page_size)
        first, second = submit(engine, prompt(24, 7)), submit(engine, prompt(24, 8))
        ended = run(engine)
        assert waits(engine) == [second] * num_waits
        found = cached - cached % page_size
        assert ended[second].num_cached_tokens == found
        assert ended[first].num_cached_tokens == 0
        assert engine.stats()["prefill_tokens"] == 2 * 30 - found


@both_indexes
def test_it_waits_for_the_pages_and_not_for_their_owner(index):
    """24 shared tokens are there after one step of 32: it rides beside the last one."""
    engine = make_engine(index=index, max_batch_tokens=32)
    long, short = submit(engine, HEAD + [7] * 20), submit(engine, prompt(24, 8, 8))
    run(engine)
    assert waits(engine) == [short], "in the first step, for which it has no room"
    assert batches(engine, 3) == [[(long, 32)], [(long, 32)], [(long, 16), (short, 8)]]


@pytest.mark.parametrize("min_pages", [1, 2, 3])
def test_it_waits_if_enough_is_still_to_come(min_pages):
    """At its turn 48 of 56 shared tokens are cached: two pages are missing."""
    engine = make_engine(min_pages, max_batch_tokens=24)
    long, short = submit(engine, prompt(56, 7)), submit(engine, prompt(56, 8))
    ended = run(engine)
    later = min_pages <= 2
    assert waits(engine) == [short] * (1 + later), (
        "once without room, and perhaps again"
    )
    assert ended[short].num_cached_tokens == (56 if later else 48)
    beside = [] if later else [(short, 10)]
    assert batches(engine, 3) == [[(long, 24)], [(long, 24)], [(long, 14), *beside]]


def test_it_waits_again_when_somebody_else_goes_on():
    """Two pages with the first, three more with the second: one step for each."""
    engine = make_engine()
    names = [submit(engine, prompt(n, own)) for n, own in ((8, 7), (20, 8), (20, 9))]
    ended = run(engine)
    assert waits(engine) == [names[1], names[2], names[2]]
    assert [ended[name].num_cached_tokens for name in names] == [0, 8, 20]


@pytest.mark.parametrize("publish", AXES["publish"])
def test_under_each_publication(publish):
    """As long as prompts are shown at the latest when they are computed."""
    engine = make_engine(publish=publish, single_flight="prefill")
    names = [submit(engine, prompt(24, own)) for own in (7, 8, 9)]
    ended = run(engine)
    assert [ended[name].num_cached_tokens for name in names] == [0, 24, 24]


# ---- For whom ------------------------------------------------------------------------


def test_only_under_the_same_key():
    """Another tenant's pages will not be found: it starts at once."""
    engine = make_engine()
    names = [submit(engine, prompt(24, own), extra_key=own) for own in (7, 8)]
    names += [submit(engine, prompt(24, 9), extra_key=7)]
    run(engine)
    assert waits(engine) == [names[2]]
    assert batches(engine, 1) == [[(names[0], 30), (names[1], 30)]]


def test_not_for_pages_that_are_cached():
    """Warm, they start together."""
    engine = make_engine()
    submit(engine, prompt(24, 6))
    run(engine)
    names = [submit(engine, prompt(24, own)) for own in (7, 8)]
    run(engine)
    assert waits(engine) == [] and len(engine.runner.batches[4]) == len(names)


def test_not_for_who_decodes():
    """Its prompt is done: what it does not show now it will not show in time."""
    engine = make_engine(publish="finish")
    submit(engine, prompt(24, 7), max_tokens=20)
    engine.step()
    late = submit(engine, prompt(24, 8))
    engine.step()
    assert waits(engine) == [] and engine.runner.batches[-1][-1] == (late, 30)
    run(engine)


@pytest.mark.parametrize("release", ["completion", "prefill"])
def test_beside_flights(release):
    """Twins of one that waits for a part wait for it, and are not in the queue."""
    engine = make_engine(single_flight=release)
    names = [submit(engine, prompt(24, own), max_tokens=2) for own in (7, 8, 8, 7)]
    assert engine.stats()["held"] == 2
    ended = run(engine)
    assert waits(engine) == [names[1]]
    cached = [ended[name].num_cached_tokens for name in names]
    assert cached == [0, 24, 28, 28]


# ---- At what it costs nobody ---------------------------------------------------------


def test_a_long_stranger_does_not_take_its_place():
    """Nor do those behind the stranger: the queue keeps its order, but for one step."""
    engine = make_engine(max_batch_tokens=32)
    first, second = submit(engine, prompt(24, 7)), submit(engine, prompt(24, 8))
    stranger, small = submit(engine, [3] * 40), submit(engine, [4])
    run(engine)
    steps = [[name for name, _ in batch] for batch in batches(engine, 2)]
    assert steps == [[first], [first, second, stranger]] and waits(engine) == [second]
    assert small not in steps[0], "nobody passes one who does not wait"


def test_a_stranger_who_is_through_in_this_step_may_go_first():
    engine = make_engine(max_batch_tokens=38)
    names = [submit(engine, prompt(24, own)) for own in (7, 8)]
    strangers = [submit(engine, [own] * 4) for own in (1, 2, 3)]
    run(engine)
    started = [(names[0], 30), (strangers[0], 4), (strangers[1], 4)]
    assert batches(engine, 1) == [started]
    assert waits(engine) == [names[1]]


def test_who_was_passed_too_often_waits_no_more():
    engine = make_engine()
    names = [submit(engine, prompt(24, own)) for own in (7, 8)]
    engine.scheduler.waiting[1].num_passed = 64
    run(engine)
    assert waits(engine) == [] and len(engine.runner.batches[0]) == len(names)


def test_a_long_queue_is_not_walked_to_its_end():
    engine = make_engine(max_running=2)
    for i in range(MAX_HELD + 40):
        submit(engine, prompt(24, i % VOCAB, 1 + i // VOCAB), max_tokens=1)
    engine.step()
    assert len(waits(engine)) == MAX_HELD + 1, "one of two seats is taken"
    run(engine)


# ---- Accidents of the one who computes -----------------------------------------------


def test_it_is_aborted():
    """In its prompt: the next one goes on with what was computed."""
    engine = make_engine(max_batch_tokens=16)
    names = [submit(engine, prompt(24, own)) for own in (7, 8, 9)]
    engine.step()
    engine.abort(names[0])
    ended = run(engine)
    assert [ended[name].num_cached_tokens for name in names[1:]] == [16, 24]
    assert all(map(answer_is_its_own, ended.values()))


def test_its_pass_fails():
    """Who waited was not in it, and computes for itself."""
    engine = make_engine(fail=[1])
    names = [submit(engine, prompt(24, own)) for own in (7, 8, 9)]
    ended = run(engine)
    assert reasons(ended) == dict(
        zip(names, ["error", "length", "length"], strict=True)
    )
    assert [ended[name].num_cached_tokens for name in names] == [0, 0, 24]
    assert waits(engine) == [names[1], names[2], names[2]]


def test_it_is_preempted():
    """It goes back to the queue, before the one who waits, and both come to an end."""
    engine = make_engine(pool="tight", max_batch_tokens=8)
    elder = submit(engine, [1] * 30, max_tokens=40)
    for _ in range(8):
        engine.step()
    names = [submit(engine, HEAD[:52] + [own] * 4, max_tokens=8) for own in (7, 8)]
    ended = run(engine)
    kinds = [e.details for e in engine.scheduler.observer.of("preempt")]
    assert {"request_id": names[0]} in kinds, "it was not preempted"
    assert waits(engine).count(names[1]) >= 1, "nobody waited"
    assert reasons(ended) == dict.fromkeys([elder, *names], "length")
    assert all(answer_is_its_own(ended[name], 8) for name in names)


# ---- The option ----------------------------------------------------------------------


def from_options(**options) -> Engine:
    chosen = read_options({"page_size": 4} | options)
    return assemble(chosen, 64, Recording(4, VOCAB), Limits(VOCAB, 256))


def test_the_option():
    """Off unless it is asked for; without an index there is nothing to wait for."""
    for options, expected in (
        ({}, [[30, 30], 0]),
        ({"wait_for_prefix": 2}, [[30], 24]),
        ({"wait_for_prefix": 7}, [[30, 30], 0]),
        ({"wait_for_prefix": 2, "index": "none"}, [[30, 30], 0]),
        ({"wait_for_prefix": 2, "publish": "finish"}, [[30], 24]),
    ):
        engine = from_options(**options)
        names = [submit(engine, prompt(24, own)) for own in (7, 8)]
        ended = run(engine)
        sizes = [size for _, size in engine.runner.batches[0]]
        assert [sizes, ended[names[1]].num_cached_tokens] == expected


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4"])
def test_a_wrong_number_of_pages_is_refused(value):
    with pytest.raises(ValueError, match="wait_for_prefix must be a whole number"):
        read_options({"wait_for_prefix": value})


@pytest.mark.parametrize("release", ["none", "completion"])
def test_pages_that_are_shown_too_late_are_refused(release):
    """One line that names both options, before anything is built."""
    options = {"publish": "finish", "single_flight": release, "wait_for_prefix": 1}
    with pytest.raises(ValueError, match=r"wait_for_prefix.*publish='finish'"):
        read_options(options)


# ---- Against a naive twin, at any moment, and with an end ----------------------------


def num_common_pages(one, other, size: int) -> int:
    n = 0
    while (n + 1) * size <= min(len(one), len(other)) and list(
        one[n * size : (n + 1) * size]
    ) == list(other[n * size : (n + 1) * size]):
        n += 1
    return n


def naive_plan(wait: WaitForPrefix, waiting) -> list:
    """Compares each with all before it, page by page."""
    scheduler, planned, held = wait.scheduler, [], []
    seats = scheduler.max_running - len(scheduler.running)
    size = scheduler.cache.page_size
    room = scheduler.max_batch_tokens - sum(s.num_pending for s in scheduler.running)
    before = [
        s
        for s in scheduler.running
        if s.num_committed < len(s.request.prompt_token_ids)
    ]
    for state in waiting:
        key = state.request.extra_key
        found = scheduler.cache.find(state.tokens, key).matched_len // size
        common = [
            num_common_pages(state.tokens, other.tokens, size)
            for other in before
            if other.request.extra_key == key
        ]
        missing = max(1, len(state.tokens) - found * size)
        if max(common, default=0) - found >= wait.min_pages:
            held.append(state)
        elif len(planned) + len(held) >= seats:
            break  # each who waits keeps a seat
        elif held and (missing > room or state.priority > held[0].priority):
            break
        else:
            planned.append(state)
            before.append(state)
            room -= missing
    return planned


def names_of(states) -> list[str]:
    return [state.request.request_id for state in states]


class Compared(WaitForPrefix):
    def plan(self, waiting):
        planned, expected = super().plan(waiting), naive_plan(self, waiting)
        assert names_of(planned) == names_of(expected)
        return planned


class Waits(Life):
    """Prompts with long common beginnings, in a pool with room for all of them."""

    @initialize(
        index=st.sampled_from(["radix", "hash"]),
        publish=st.sampled_from(["schedule", "step", "prompt"]),
        single_flight=st.sampled_from(AXES["single_flight"]),
        max_batch_tokens=st.sampled_from([5, 16, 40]),
        page_size=st.sampled_from([1, 3]),
        max_running=st.integers(1, 8),
        min_pages=st.integers(1, 4),
    )
    def begin(self, min_pages, **chosen):
        self.engine = make_any_engine(**chosen, pool="roomy")
        scheduler = self.engine.scheduler
        scheduler.grouping = Compared(scheduler, min_pages, max_passes=1_000)
        self.wanted: dict[str, tuple[list[int], int, int]] = {}
        self.ended: dict[str, list[str]] = {}

    @rule(
        branches=st.lists(st.integers(1, 2), min_size=1, max_size=3),
        lengths=st.lists(st.integers(1, 12), min_size=3, max_size=3),
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 1),
        extra_key=st.sampled_from([None, None, "salt"]),
    )
    def submit(self, branches, lengths, max_tokens, **options):
        pairs = zip(branches, lengths, strict=False)
        ids = [branch for branch, length in pairs for _ in range(length)]
        name = submit(self.engine, ids, max_tokens, **options)
        self.wanted[name] = (ids, max_tokens, 1)

    def teardown(self):
        """The first of those who run gets the whole budget, and none is preempted: no
        more steps than if each had run alone, one after the other."""
        live = [p.state for p in self.engine._live.values()]
        budget = self.engine.scheduler.max_batch_tokens
        enough = sum(
            -(-s.num_pending // budget) + s.max_output - s.num_output for s in live
        )
        for _ in range(enough):
            if self.engine.has_unfinished():
                self.step(1)
                check(self.engine)
        check_idle(self.engine)
        assert self.ended.keys() == self.wanted.keys(), "a request that never ends"


Waits.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestWaits = Waits.TestCase


# ---- Broken on purpose ---------------------------------------------------------------


def change_what_is_compared(patch, change):
    waits = WaitForPrefix._waits

    def fault(self, state, num_cached, computing):
        return waits(self, state, *change(state, num_cached, computing))

    patch.setattr(WaitForPrefix, "_waits", fault)


def forget_the_key(patch):
    def under_one_key(state, num_cached, computing):
        request = state.request
        return num_cached, [
            replace(s, request=replace(s.request, extra_key=request.extra_key))
            for s in computing
        ]

    change_what_is_compared(patch, under_one_key)


def forget_those_before(patch):
    """Only who runs is waited for: two cold ones start together."""
    change_what_is_compared(
        patch, lambda state, n, them: (n, [s for s in them if s.lease])
    )


def wait_for_what_is_there(patch):
    change_what_is_compared(patch, lambda state, num_cached, them: (0, them))


def wait_for_an_answer(patch):
    patch.setattr("minivllm.single_flight.in_prompt", lambda state: True)


def give_up_the_place(patch):
    def fault(self, waiting):
        room, self.scheduler.max_batch_tokens = self.scheduler.max_batch_tokens, 10**9
        planned = plan(self, waiting)
        self.scheduler.max_batch_tokens = room
        return planned

    plan = WaitForPrefix.plan
    patch.setattr(WaitForPrefix, "plan", fault)


def wait_for_each_other(patch):
    def fault(self, waiting):
        return [
            state
            for state in waiting
            if not self._waits(state, 0, [s for s in waiting if s is not state])
        ]

    patch.setattr(WaitForPrefix, "plan", fault)


def live():
    """The same lives each time, with room for several to start in one step."""
    few = settings(
        max_examples=200,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Waits, settings=few)


FAULTS = [
    (forget_the_key, test_only_under_the_same_key),
    (forget_those_before, test_it_waits_again_when_somebody_else_goes_on),
    (wait_for_what_is_there, test_not_for_pages_that_are_cached),
    (wait_for_an_answer, test_not_for_who_decodes),
    (give_up_the_place, test_a_long_stranger_does_not_take_its_place),
    (wait_for_each_other, test_its_pass_fails),
    *((fault, live) for fault in (forget_the_key, forget_those_before)),
    *((fault, live) for fault in (wait_for_what_is_there, give_up_the_place)),
    (wait_for_each_other, live),
]


@pytest.mark.parametrize(("fault", "found_by"), FAULTS)
def test_a_planted_fault_is_found(fault, found_by, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        found_by()


def test_who_waits_keeps_its_seat():
    """A short prompt with a long answer would have it for hundreds of steps."""
    engine = make_engine(1, max_running=2, max_batch_tokens=100)
    shared = [7] * 40
    first = submit(engine, [*shared, 1], 40)
    second = submit(engine, [*shared, 2], 2)
    stranger = submit(engine, [3], 90, priority=9)
    engine.step()
    assert names_of(engine.scheduler.running) == [first]
    engine.step()
    assert names_of(engine.scheduler.running) == [first, second]
    ended = run(engine)
    assert len(ended[stranger].outputs[0].token_ids) == 90
