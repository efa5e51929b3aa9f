"""Who rides together: estimates, order, bounds, victims and the ledger.

Estimates and orders are held against twins that compare everything with everything. At
last faults are planted, and each must be found by the check that is there for it.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine import Engine, Limits
from minivllm.events import EventLog
from minivllm.grouping import TIERS, Ledger, LongestPrefix, SharedPrefix
from minivllm.options import EngineOptions, assemble, read_options
from minivllm.prefix_cache import PrefixCache
from minivllm.publication import Announcements
from minivllm.request import SamplingParams
from minivllm.scheduler import ArrivalOrder, Scheduler
from minivllm.simulation import SerialPrefill, SimulatedRunner, VirtualClock

VOCAB, PAGE = 50, 4
COST = SerialPrefill(chunk_s=0.01, token_s=0.001, decode_s=0.02, k=0.25)
INDEXES = ("radix", "hash")
PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=14),
        st.sampled_from([None, None, "salt"]),
        st.integers(0, 1),
    ),
    max_size=12,
)


def make_engine(
    rule="shared-prefix", index="radix", num_pages=200, page=PAGE, **options
):
    """An engine on a virtual clock; `log` and `ledger` hang on it."""
    clock, log = VirtualClock(), EventLog()
    ledger = Ledger(clock, page)

    def observe(kind, /, **details):
        log(kind, **details)
        ledger(kind, **details)

    cache = PrefixCache(num_pages, page, index, observer=observe)
    grouping = {
        k: options.pop(k) for k in ("tiers", "max_passes", "window") if k in options
    }
    if rule == "shared-prefix":
        grouping = {"tiers": (2, 5)} | grouping
        options["grouping"] = SharedPrefix(
            cache.find, page, observer=observe, **grouping
        )
    elif rule == "longest-prefix":
        options["grouping"] = LongestPrefix(cache.find, **grouping)
    if options.pop("announce", False):
        options["announcer"] = Announcements(page)
    runner = SimulatedRunner(COST, clock, VOCAB, num_pages, page)
    scheduler = Scheduler(cache, observer=observe, **options)
    engine = Engine(
        runner, scheduler, Limits(VOCAB, 512), clock=clock, observer=observe
    )
    engine.log, engine.ledger = log, ledger
    return engine


def run_all(engine):
    ended = {}
    for _ in range(3_000):
        if not engine.has_unfinished():
            return ended
        for output in engine.step():
            if output.finished:
                ended[int(output.request_id)] = output
        engine.scheduler.cache.check()
    raise AssertionError("requests that never end")


def warmed(prompts, rule="shared-prefix", **options):
    """An engine whose cache holds these prompts; returns it and a list of them."""
    engine = make_engine(rule, **options)
    for tokens, key, _ in prompts:
        engine.submit(tokens, SamplingParams(max_tokens=1), extra_key=key)
        run_all(engine)
    return engine


# ---- Twins ---------------------------------------------------------------------------


def pages_in_common(one, other, page):
    """Leading full pages that two token lists share, compared one by one."""
    n = 0
    while (n + 1) * page <= min(len(one), len(other)) and (
        one[n * page : (n + 1) * page] == other[n * page : (n + 1) * page]
    ):
        n += 1
    return n


def naive_estimates(held, waiting, page, limits):
    """(cached, common, tier) of each, by comparing with all that is held or waits."""
    rows = []
    for i, (tokens, key, _) in enumerate(waiting):
        cached = max(
            (pages_in_common(tokens, t, page) for t, k, _ in held if k == key),
            default=0,
        )
        others = [t for j, (t, k, _) in enumerate(waiting) if k == key and j != i]
        common = max((pages_in_common(tokens, t, page) for t in others), default=0)
        tier = len([limit for limit in limits if max(cached, common) >= limit])
        rows.append((cached, common, tier))
    return rows


@settings(max_examples=150, deadline=None)
@given(
    held=PROMPTS,
    waiting=PROMPTS,
    page=st.integers(1, 4),
    index=st.sampled_from(INDEXES),
)
def test_an_estimate_is_the_count_by_comparison(held, waiting, page, index):
    """Blocks in the index and among those who wait, with either index (V10, V23)."""
    engine = warmed(held, index=index, page=page)
    check_estimates(engine, held, waiting, page)


def check_estimates(engine, held, waiting, page):
    for tokens, key, _ in waiting:
        engine.submit(tokens, extra_key=key)
    grouping = engine.scheduler.grouping
    got = grouping.estimate(engine.scheduler.waiting)
    expected = naive_estimates(held, waiting, page, grouping.tiers)
    assert [(e.cached, e.common, e.tier) for e in got] == expected, "another estimate"
    assert [e.num_blocks for e in got] == [max(c, w) for c, w, _ in expected]


def naive_order(states, estimates, passes, rule, max_passes):
    """The plan, chosen one by one; `states` are (priority, arrival), in order."""
    names = sorted(range(len(states)), key=lambda i: states[i])
    if rule == "longest-prefix":
        return sorted(
            names,
            key=lambda i: (
                states[i][0],
                passes[i] < max_passes,
                -estimates[i][0] if passes[i] < max_passes else 0,
                states[i],
            ),
        )
    first = [i for i in names if states[i][0] == min(p for p, _ in states)]
    due = [i for i in first if passes[i] >= max_passes]
    totals = Counter()
    for i in first:
        totals[estimates[i][2]] += estimates[i][0]
    tier = estimates[due[0]][2] if due else max(totals, key=totals.get)
    rest = [i for i in first if estimates[i][2] == tier and i not in due]
    rest.sort(key=lambda i: (-estimates[i][0], -estimates[i][1], states[i]))
    return due, rest


@settings(max_examples=150, deadline=None)
@given(
    held=PROMPTS,
    waiting=PROMPTS,
    passes=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    rule=st.sampled_from(["longest-prefix", "shared-prefix"]),
)
def test_a_plan_is_the_naive_order(held, waiting, passes, rule):
    """Due first, then the warmest tier, most cached first; priority wins."""
    engine = warmed(held, rule, page=2, max_passes=3)
    names = [engine.submit(t, extra_key=k, priority=p) for t, k, p in waiting]
    queue = engine.scheduler.waiting
    for state in queue:
        state.num_passed = passes[names.index(state.request.request_id)]
    plan = [
        names.index(s.request.request_id) for s in engine.scheduler.grouping.plan(queue)
    ]
    if not waiting:
        assert plan == []
        return
    states = [(p, i) for i, (_, _, p) in enumerate(waiting)]
    estimates = naive_estimates(held, waiting, 2, (2, 5))
    expected = naive_order(states, estimates, passes, rule, 3)
    if rule == "longest-prefix":
        assert plan == expected
        return
    due, rest = expected
    assert plan[: len(due)] == due
    check_side_by_side(plan[len(due) :], rest, waiting, estimates)


def check_side_by_side(got, rest, waiting, estimates):
    """The same requests, each family in order where its first member would stand."""
    families = {}
    for i in rest:
        size = 2 * max(estimates[i][:2])
        key = (waiting[i][1], tuple(waiting[i][0][:size]))
        families.setdefault(key, []).append(i)
    assert got == [i for family in families.values() for i in family]


def plan_of(waiting):
    engine = make_engine()
    for tokens, key in waiting:
        engine.submit(tokens, extra_key=key)
    plan = engine.scheduler.grouping.plan(engine.scheduler.waiting)
    return [int(state.request.request_id) for state in plan]


def stand_beside_those_who_share():
    """Equal tokens under two keys share nothing: they are two families."""
    one, other = [1] * 8, [2] * 8
    queue = [(one, None), (other, None), (one, "salt"), (other, None), (one, "salt")]
    assert plan_of([*queue, (one, None)]) == [0, 5, 1, 3, 2, 4], "strangers in between"


def test_families_are_those_who_share():
    stand_beside_those_who_share()


# ---- What a plan promises ------------------------------------------------------------


def passed_over(rule, max_passes=5, num_seats=2, priority=0):
    """An endless stream of hits beside a cold request: steps that passed it over."""
    engine = make_engine(rule, max_passes=max_passes, max_running=num_seats)
    warm, one = [1] * 16, SamplingParams(max_tokens=1)
    engine.submit(warm, one)
    run_all(engine)
    cold = engine.submit([2] * 16, one, priority=priority)
    state = engine.scheduler.waiting[0]
    for _ in range(100):
        while len(engine.scheduler.waiting) < 6:
            engine.submit([*warm, 3], one)
        if any(o.request_id == cold for o in engine.step()):
            return state.num_passed
        assert state.num_passed <= max_passes, "passed over too often"
    raise AssertionError("never admitted")


@pytest.mark.parametrize("rule", ["longest-prefix", "shared-prefix"])
@pytest.mark.parametrize("max_passes", [0, 1, 5, 30])
def test_nobody_is_passed_over_more_often_than_promised(rule, max_passes):
    """d3, d4: a cold request among endless hits runs after exactly `max_passes`."""
    assert passed_over(rule, max_passes) == max_passes


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rule=st.sampled_from(["longest-prefix", "shared-prefix"]),
    max_passes=st.integers(0, 4),
    num_pages=st.sampled_from([12, 60]),
)
def test_the_bound_holds_whatever_comes(data, rule, max_passes, num_pages):
    """Any stream, memory tight or not: the count never exceeds the bound."""
    engine = make_engine(
        rule, max_passes=max_passes, max_running=3, num_pages=num_pages, announce=True
    )
    seen = []
    for tokens, key, _ in data.draw(PROMPTS):
        engine.submit(tokens, SamplingParams(max_tokens=8), extra_key=key)
        seen += engine.scheduler.waiting
        engine.step()
        assert all(s.num_passed <= max_passes for s in seen), "passed over too often"
    run_all(engine)
    assert all(s.num_passed <= max_passes for s in seen), "passed over too often"


def test_a_step_counts_once_however_many_it_admits():
    engine = make_engine("longest-prefix", max_running=4)
    engine.submit([1] * 16, SamplingParams(max_tokens=1))
    run_all(engine)
    engine.submit([2] * 16)
    (cold,) = engine.scheduler.waiting
    for _ in range(4):
        engine.submit([1] * 16)
    engine.step()
    assert (len(engine.scheduler.running), cold.num_passed) == (4, 1)


@pytest.mark.parametrize("rule", ["longest-prefix", "shared-prefix"])
def test_priority_is_separate_and_wins(rule):
    """d6 and V18: an urgent cold request goes before any group, and is never passed."""
    assert passed_over(rule, max_passes=1_000, priority=-1) == 0


@pytest.mark.parametrize("rule", ["longest-prefix", "shared-prefix"])
def test_an_unimportant_request_stays_behind_a_cold_one(rule):
    engine = make_engine(rule, max_running=1)
    engine.submit([1] * 16, SamplingParams(max_tokens=1))
    run_all(engine)
    engine.submit([1] * 16, priority=1)
    cold = engine.submit([2] * 16)
    plan = engine.scheduler.grouping.plan(engine.scheduler.waiting)
    assert plan[0].request.request_id == cold


def test_nothing_is_kept_between_assemblies():
    """V21: fields are settings; a plan depends on the present queue and cache only."""
    engine = make_engine(max_running=1)
    grouping, before = engine.scheduler.grouping, dict(vars(engine.scheduler.grouping))
    for tokens in ([1] * 24, [1] * 20 + [2] * 8, [3] * 8, [4] * 8):
        engine.submit(tokens, SamplingParams(max_tokens=2))
    queue = list(engine.scheduler.waiting)
    one, two = grouping.plan(queue), grouping.plan(queue)
    assert one == two
    cold = grouping.estimate(queue[2:3])[0]
    engine.submit([3] * 9, SamplingParams(max_tokens=1), priority=-1)
    engine.step()
    warm = grouping.estimate(queue[2:3])[0]
    assert (cold.tier, cold.cached, warm.tier, warm.cached) == (0, 0, 1, 2)
    run_all(engine)
    assert vars(grouping) == before


def test_one_tier_a_step_and_it_goes_as_it_is():
    """V09, V20: budgets inside the group; a batch that is not full goes out."""
    engine = make_engine(max_batch_tokens=40)
    session = [1] * 24
    for tokens in ([*session, 5], [2] * 8, [*session, 6], [3] * 8, [*session, 7]):
        engine.submit(tokens, SamplingParams(max_tokens=2))
    engine.submit([4] * 4, SamplingParams(max_tokens=1), priority=-1)
    run_all(engine)
    began, seen = [], set()
    for event in engine.log.of("schedule"):
        names = [name for name, _, _ in event.details["chunks"]]
        began.append([name for name in names if name not in seen])
        seen |= set(names)
    assert [names for names in began if names] == [["5"], ["0", "2"], ["4"], ["1", "3"]]


def test_who_waits_holds_no_page():
    engine = make_engine(max_running=1)
    for i in range(4):
        engine.submit([i] * 40, SamplingParams(max_tokens=4))
    engine.step()
    assert engine.stats()["waiting"] == 3
    assert all(state.lease is None for state in engine.scheduler.waiting)
    assert engine.stats()["pages_total"] - engine.stats()["pages_free"] == 10


def test_the_window_bounds_what_is_looked_at():
    """Beyond the window nobody is a candidate yet, and nobody is passed over."""
    engine = make_engine("longest-prefix", window=2)
    engine.submit([1] * 16, SamplingParams(max_tokens=1))
    run_all(engine)
    for tokens in ([2] * 16, [3] * 16, [1] * 16):
        engine.submit(tokens)
    plan = engine.scheduler.grouping.plan(engine.scheduler.waiting)
    assert [s.request.request_id for s in plan] == ["1", "2"]


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("rule", ["arrival", "longest-prefix", "shared-prefix"])
def test_twins_in_one_step_and_a_prompt_and_a_half(rule, index):
    """ABCD and ABCE at pages of one token: 0 and 0, or 0 and 3 (V03, V05)."""
    for announce, found in ((False, [0, 0]), (True, [0, 3])):
        engine = make_engine(rule, index, page=1, announce=announce)
        for tokens in ([1, 2, 3, 4], [1, 2, 3, 5]):
            engine.submit(tokens, SamplingParams(max_tokens=2))
        ended = run_all(engine)
        assert [ended[i].num_cached_tokens for i in (0, 1)] == found


def test_a_short_one_behind_a_long_prompt():
    """d8: with a cached prefix it starts at once, in arrival order at step 11."""
    starts = {}
    for rule in ("arrival", "longest-prefix", "shared-prefix"):
        engine = make_engine(rule, max_batch_tokens=8)
        engine.submit([2] * 4, SamplingParams(max_tokens=1))
        run_all(engine)
        engine.log.events.clear()
        engine.submit([1] * 80, SamplingParams(max_tokens=4))
        short = engine.submit([2] * 5, SamplingParams(max_tokens=4))
        run_all(engine)
        steps = [e.details["chunks"] for e in engine.log.of("schedule")]
        starts[rule] = next(
            i for i, step in enumerate(steps, 1) if short in {n for n, _, _ in step}
        )
    assert starts == {"arrival": 11, "longest-prefix": 1, "shared-prefix": 1}


# ---- Who must go ---------------------------------------------------------------------


def chosen_victim(leading, rule="shared-prefix", priorities=None, shared=8):
    """Whom the grouping would preempt; a letter is a chain, "." shares with nobody."""
    engine = make_engine(rule, announce=True)
    for i, letter in enumerate(leading):
        head = [] if letter == "." else [ord(letter) % VOCAB] * shared
        own = [10 + i] * 9
        priority = priorities[i] if priorities else 0
        engine.submit(head + own, SamplingParams(max_tokens=9), priority=priority)
    engine.step()
    while engine.scheduler.waiting:
        engine.step()
    running = engine.scheduler.running
    return running.index(engine.scheduler.grouping.victim(running))


@pytest.mark.parametrize(
    ("leading", "goes"),
    [
        ("A.AA", 1),  # the lone one before any member
        ("AA.A.", 4),  # of two the last to come
        ("AAA", 2),
        (".AA", 2),  # the oldest goes on, though it shares nothing
        ("AABB.", 4),
        ("AABBB", 4),
        (".", 0),
    ],
)
def test_who_shares_least_goes_first(leading, goes):
    """V19: who shares least goes first; the oldest of all never."""
    assert chosen_victim(leading) == goes


def test_the_least_important_go_first_whatever_they_share():
    assert chosen_victim("A.AA", priorities=[0, 0, 0, 1]) == 3


def test_a_chain_that_has_begun_to_go_goes_on_going():
    """Four pages in common against two: the shorter chain goes, all of it."""
    engine = make_engine(announce=True)
    for i, head in enumerate([[1] * 16, [1] * 16, [2] * 8, [2] * 8, [2] * 8]):
        engine.submit(head + [10 + i] * 5, SamplingParams(max_tokens=9))
    while engine.scheduler.waiting:
        engine.step()
    running, gone = list(engine.scheduler.running), []
    while len(running) > 2:
        gone.append(engine.scheduler.grouping.victim(running))
        running.remove(gone[-1])
    assert [int(s.request.request_id) for s in gone] == [4, 3, 2]


def test_the_oldest_is_never_preempted_and_everybody_ends():
    """Too little memory for lone and grouped ones: no livelock, the first runs on."""
    engine = make_engine(num_pages=24, max_running=6)
    for i in range(24):
        head = [1] * 20 if i % 2 else []
        engine.submit([*head, *[10 + i] * 10], SamplingParams(max_tokens=30))
    assert len(run_all(engine)) == 24
    preempted = [e.details["request_id"] for e in engine.log.of("preempt")]
    assert len(preempted) > 5 and "0" not in preempted


# ---- The ledger ----------------------------------------------------------------------


def test_the_ledger_adds_up():
    """V24, V25: estimates and finds per tier, tiers in a step, time in the queue."""
    engine = make_engine(max_batch_tokens=40, max_running=3)
    session = [1] * 24
    prompts = [[*session, 5], [2] * 8, [*session, 6], [3] * 8, [*session, 7]]
    for tokens in prompts:
        engine.submit(tokens, SamplingParams(max_tokens=2))
    ended, lines = run_all(engine), engine.ledger.lines
    assert {t: line.num_requests for t, line in lines.items()} == {0: 2, 2: 3}
    assert lines[2].estimated_blocks == 18 and lines[0].estimated_blocks == 0
    found = sum(o.num_cached_tokens for o in ended.values())
    assert sum(line.cached_blocks for line in lines.values()) * PAGE == found
    steps = [e.details["chunks"] for e in engine.log.of("schedule")]
    assert engine.ledger.mixed.total() == sum(1 for step in steps if step)
    assert engine.ledger.mixed[2] > 0
    tier = {str(i): 0 if i in (1, 3) else 2 for i in range(5)}
    mixed = Counter(len({tier[name] for name, _, _ in step}) for step in steps if step)
    assert engine.ledger.mixed == mixed
    assert engine.ledger._running == {}, "an ended request is remembered"
    assert all(line.queued_s >= 0 for line in lines.values())
    assert sum(line.queued_s for line in lines.values()) > 0


def test_a_preempted_request_is_entered_once():
    engine = make_engine(num_pages=14, max_running=4)
    for i in range(5):
        engine.submit([10 + i] * 14, SamplingParams(max_tokens=30))
    run_all(engine)
    assert engine.stats()["preemptions"] > 0
    lines = engine.ledger.lines.values()
    assert sum(line.num_requests for line in lines) == 5


def test_a_ledger_beside_order_of_arrival_stays_empty():
    engine = make_engine("arrival")
    engine.submit([1] * 9)
    run_all(engine)
    assert engine.ledger.lines == {} and engine.ledger.mixed == Counter()


# ---- Options -------------------------------------------------------------------------


def assembled(**options):
    clock = VirtualClock()
    runner = SimulatedRunner(COST, clock, VOCAB, 50, 16)
    return assemble(read_options(options), 50, runner, Limits(VOCAB, 512), clock=clock)


def test_the_option_makes_the_rule():
    kinds = {}
    for name in ("arrival", "longest-prefix", "shared-prefix"):
        kinds[name] = type(assembled(grouping=name).scheduler.grouping)
    assert kinds == {
        "arrival": ArrivalOrder,
        "longest-prefix": LongestPrefix,
        "shared-prefix": SharedPrefix,
    }
    assert assembled(grouping="shared-prefix").scheduler.grouping.tiers == TIERS
    few = assembled(grouping="shared-prefix", tiers=(2, 8)).scheduler.grouping
    assert few.tiers == (2, 8)


@pytest.mark.parametrize(
    "tiers", [(0, 5), (5, 5), (8, 2), (1.5, 2), ("a", "b"), 7, (True,)]
)
def test_tiers_are_rising_whole_numbers(tiers):
    with pytest.raises(ValueError, match="tiers must be rising whole numbers"):
        EngineOptions(tiers=tiers)


@pytest.mark.parametrize("wrong", [{"max_passes": -1}, {"window": 0}])
def test_bounds_are_checked(wrong):
    with pytest.raises(ValueError, match="max_passes must be at least 0, window"):
        LongestPrefix(PrefixCache(4, 4).find, **wrong)


def test_answers_come_in_the_order_of_the_prompts(make_llm):
    """d12: mixed lengths, grouping on."""
    llm = make_llm(grouping="shared-prefix", tiers=(1, 2), publish="schedule")
    prompts = [[100 + i] * n for i, n in enumerate((40, 3, 20, 33, 1, 18))]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
    assert [o.prompt_token_ids for o in outputs] == prompts


# ---- Broken on purpose ---------------------------------------------------------------


def estimate_a_few():
    waiting = [
        ([0] * n + [1] * 6, key, 0) for n in (8, 6, 4, 2) for key in (None, "salt")
    ]
    check_estimates(warmed(waiting[:1]), waiting[:1], waiting[1:], PAGE)


def count_no_passes(patch):
    patch.setattr(Scheduler, "_count_passed", lambda self, last: None)


def never_due(patch):
    patch.setattr(LongestPrefix, "is_due", lambda self, state: False)


def mix_tenants(patch):
    honest = SharedPrefix._common

    def fault(self, waiting):
        first = {s: s.tokens[: self.page_size].tobytes() for s in waiting}
        times = Counter(first.values())
        found = honest(self, waiting)
        return {s: max(n, times[first[s]] > 1) for s, n in found.items()}

    patch.setattr(SharedPrefix, "_common", fault)


def look_at_the_next_only(patch):
    honest = SharedPrefix._common

    def fault(self, waiting):
        rows = [honest(self, waiting[i : i + 2]) for i in range(len(waiting))]
        return {s: row[s] for s, row in zip(waiting, rows, strict=True)}

    patch.setattr(SharedPrefix, "_common", fault)


def forget_priority(patch):
    plan = LongestPrefix.plan
    patch.setattr(
        LongestPrefix,
        "plan",
        lambda self, waiting: sorted(
            plan(self, waiting), key=lambda s: -self.num_cached(s)
        ),
    )


def forget_keys(patch):
    def fault(self, group):
        families = {}
        for e in group:
            prefix = e.state.tokens[: e.num_blocks * self.page_size].tobytes()
            families.setdefault(prefix, []).append(e.state)
        return [state for family in families.values() for state in family]

    patch.setattr(SharedPrefix, "_side_by_side", fault)


def take_the_first(patch):
    patch.setattr(SharedPrefix, "victim", lambda self, unserved: unserved[0])


def take_the_last(patch):
    patch.setattr(SharedPrefix, "victim", ArrivalOrder.victim)


def keep_the_group(patch):
    plan = SharedPrefix.plan

    def fault(self, waiting):
        self.group = getattr(self, "group", None) or plan(self, waiting)
        return [s for s in self.group if s in waiting] or plan(self, waiting)

    patch.setattr(SharedPrefix, "plan", fault)


def hold_the_lone(patch):
    plan = SharedPrefix.plan
    patch.setattr(
        SharedPrefix,
        "plan",
        lambda self, waiting: plan(self, waiting) if len(waiting) > 1 else [],
    )


FAULTS = [
    (count_no_passes, lambda: passed_over("longest-prefix"), "never admitted"),
    (never_due, lambda: passed_over("shared-prefix"), "passed over too often"),
    (mix_tenants, estimate_a_few, "another estimate"),
    (look_at_the_next_only, estimate_a_few, "another estimate"),
    (
        forget_priority,
        lambda: test_an_unimportant_request_stays_behind_a_cold_one("longest-prefix"),
        None,
    ),
    (
        take_the_first,
        test_the_oldest_is_never_preempted_and_everybody_ends,
        None,
    ),
    (take_the_last, lambda: test_who_shares_least_goes_first("A.AA", 1), None),
    (forget_keys, stand_beside_those_who_share, "strangers in between"),
    (keep_the_group, test_nothing_is_kept_between_assemblies, None),
    (hold_the_lone, test_the_ledger_adds_up, "requests that never end"),
]


@pytest.mark.parametrize(("fault", "found_by", "words"), FAULTS)
def test_a_planted_fault_is_found(fault, found_by, words, monkeypatch):
    """The check passes, the fault is planted, and the check fails."""
    found_by()
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        found_by()
