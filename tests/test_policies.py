"""Every combination of policies gives the tokens of a run without a cache.

The whole matrix is walked on the simulated runner, a pairwise covering set on a real
model with random weights. Then what breaks in long runs: arrivals, aborts and failures
at any moment, and leaks. At last the tests are tested: faults are planted, and each
must be found by the check that is there for it.
"""

import gc
import itertools
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace

import pytest
from checking_runner import CheckingRunner, cold_continuation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from minivllm.engine import Engine, Limits, PublishEachStep
from minivllm.grouping import LongestPrefix, SharedPrefix
from minivllm.model import Decoder
from minivllm.options import PUBLISHERS
from minivllm.prefix_cache import PrefixCache
from minivllm.publication import Announcements
from minivllm.request import SamplingParams
from minivllm.runner import ModelRunner
from minivllm.scheduler import ArrivalOrder, Scheduler
from minivllm.simulation import (
    Arrival,
    Arrivals,
    TimedRunner,
    VirtualClock,
    simulate,
)
from minivllm.single_flight import PromptAtLeast, SingleFlight, WaitForPrefix

VOCAB = 50
AXES = {
    "index": ["radix", "hash", "none"],
    "publish": ["schedule", "step", "prompt", "finish"],
    "single_flight": ["none", "completion", "prefill"],
    "wait_for_prefix": [None, 1, 3],
    "grouping": ["arrival", "longest-prefix", "shared-prefix"],
    "admission": ["optimistic", "reserve"],
    "eviction": ["lru", "lfu", "fifo"],
    "max_batch_tokens": [5, 16, 200],
    "page_size": [1, 3, 16],
    "pool": ["tight", "roomy"],
}
POOL_TOKENS = {"tight": 96, "roomy": 2_000}  # the largest footprint is 30 + 20 tokens
PLAIN = {
    "index": "none",
    "publish": "finish",
    "single_flight": "none",
    "wait_for_prefix": None,
    "grouping": "arrival",
    "admission": "optimistic",
    "eviction": "lru",
    "max_batch_tokens": 200,
    "page_size": 16,
    "pool": "roomy",
}


TIGHT = {"index": "radix", "publish": "step", "pool": "tight", "page_size": 3}


class CheckedEngine(Engine):
    """Checks after each step whatever must always hold."""

    def step(self):
        outputs = super().step()
        check(self)
        return outputs


def check(engine: Engine) -> None:
    scheduler, faults = engine.scheduler, getattr(engine.runner, "faults", [])
    assert not faults, faults
    scheduler.cache.check()
    assert all(state.lease is None for state in scheduler.waiting), "waiting with pages"
    assert all(state.lease is not None for state in scheduler.running)
    for queue in (scheduler.waiting, scheduler.running):
        assert [s.order for s in queue] == sorted(s.order for s in queue), (
            "out of order"
        )
    held = [progress.state for progress in engine._live.values() if progress.held]
    assert all(state.lease is None for state in held), "held with pages"
    assert not set(held) & {*scheduler.waiting, *scheduler.running}, "held and queued"
    if isinstance(engine.coordinator, SingleFlight):
        engine.coordinator.check()


def check_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert not engine.has_unfinished()
    assert stats["running"] == stats["waiting"] == stats["held"] == 0
    assert stats["pages_private"] == stats["pages_pinned"] == 0, "held by nobody"
    assert stats["pages_free"] + stats["pages_evictable"] == stats["pages_total"]
    if isinstance(flights := engine.coordinator, SingleFlight):
        assert not flights._flights and not flights._members and not flights._released


def make_engine(runner=None, clock=None, **chosen) -> CheckedEngine:
    """An engine of the given policies, on a runner that checks each past."""
    chosen = PLAIN | {"max_running": 5} | chosen
    size = chosen["page_size"]
    clock = clock or VirtualClock()
    num_pages = POOL_TOKENS[chosen["pool"]] // size
    cache = PrefixCache(num_pages, size, chosen["index"], chosen["eviction"])
    announces = chosen["publish"] == "schedule" and chosen["index"] != "none"
    rules = {
        "arrival": ArrivalOrder(),
        "longest-prefix": LongestPrefix(cache.find, max_passes=6),
        "shared-prefix": SharedPrefix(cache.find, size, (2, 5), max_passes=6),
    }
    scheduler = Scheduler(
        cache,
        chosen["max_running"],
        chosen["max_batch_tokens"],
        chosen["admission"],
        rules[chosen["grouping"]],
        announcer=Announcements(size) if announces else None,
    )
    if chosen["wait_for_prefix"] and chosen["index"] != "none":
        scheduler.grouping = WaitForPrefix(scheduler, chosen["wait_for_prefix"])
    publisher, release = PUBLISHERS[chosen["publish"]](), chosen["single_flight"]
    return CheckedEngine(
        runner or CheckingRunner(size, VOCAB, clock=clock),
        scheduler,
        Limits(VOCAB, 256),
        clock=clock,
        publisher=PromptAtLeast(publisher) if release == "prefill" else publisher,
        coordinator=None if release == "none" else SingleFlight(release),
    )


def workload(num_requests: int = 14, seed: int = 1, spread_s: float = 0.4):
    """Shared beginnings, twins (each third asks what one before it asked), keys."""
    rng = random.Random(seed)
    heads = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
    prompts = []
    for i in range(num_requests):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 10))]
        fresh = rng.choice(heads)[: rng.randint(1, 20)] + tail
        prompts.append(rng.choice(prompts) if i % 3 == 2 else fresh)
    return [
        Arrival(
            spread_s * rng.random(),
            prompt,
            SamplingParams(temperature=0, max_tokens=rng.randint(1, 20)),
            extra_key=rng.choice([None, None, None, "salt"]),
            priority=rng.choice([0, 0, 0, 1]),
        )
        for prompt in prompts
    ]


def answers(engine: Engine, arrivals: Iterable[Arrival]) -> dict[int, list[int]]:
    """The output tokens of each arrival, by its place; all counters are checked."""
    given = list(arrivals)
    places = {id(arrival): i for i, arrival in enumerate(given)}
    done = list(simulate(engine, engine.clock, Arrivals(given)))
    check_idle(engine)
    check_counters(engine, [output for _, output in done])
    assert len(done) == len(given), "every request ends exactly once"
    return {places[id(a)]: output.outputs[0].token_ids for a, output in done}


def check_counters(engine: Engine, outputs) -> None:
    stats, computed = engine.stats(), getattr(engine.runner, "computed", None)
    prompts = sum(len(o.prompt_token_ids) for o in outputs)
    assert stats["lookups"] == len(outputs), "a lookup counted twice"
    assert stats["queried_tokens"] == prompts
    assert stats["cached_tokens"] == sum(o.num_cached_tokens for o in outputs)
    assert stats["hits"] == sum(o.num_cached_tokens > 0 for o in outputs)
    if engine.scheduler.admission == "reserve":
        assert stats["preemptions"] == 0, "a reservation that does not hold"
    if stats["preemptions"] == 0:
        assert stats["recomputed_tokens"] == 0
        assert stats["prefill_tokens"] + stats["cached_tokens"] == prompts
        decoded = sum(len(o.outputs[0].token_ids) - 1 for o in outputs)
        assert computed in (None, stats["prefill_tokens"] + decoded)
    else:
        assert stats["prefill_tokens"] + stats["cached_tokens"] <= prompts


def cold(arrivals: Iterable[Arrival]) -> dict[int, list[int]]:
    """What each request must answer: computed alone, without engine and cache."""
    return {
        i: cold_continuation(a.token_ids, a.params.max_tokens, VOCAB)
        for i, a in enumerate(arrivals)
    }


# ---- The whole matrix, on the simulated runner ---------------------------------------

POLICIES = ("index", "publish", "single_flight", "grouping", "admission", "eviction")
SIZES = ("max_batch_tokens", "page_size", "pool")
EVERY_SIZE = [*itertools.product(*(AXES[a] for a in SIZES))]


@pytest.mark.parametrize("policies", [*itertools.product(*(AXES[a] for a in POLICIES))])
def test_the_whole_matrix(policies):
    """648 choices, each with sizes of steps, pages and pools: 5,616 checked runs.

    In order of arrival all 18 sizes, in another order four that have every value.
    """
    chosen = dict(zip(POLICIES, policies, strict=True))
    arrivals, evicted, preempted, cached, waited = workload(), 0, 0, 0, 0
    waits = itertools.cycle([None, 1, 3, 1, None])  # each beside each of the sizes
    step = 1 if chosen["grouping"] == "arrival" else 5
    for sizes in EVERY_SIZE[::step]:
        chosen["wait_for_prefix"] = next(waits)
        engine = make_engine(**chosen, **dict(zip(SIZES, sizes, strict=True)))
        assert answers(engine, arrivals) == cold(arrivals)
        stats = engine.stats()
        evicted += stats["evicted_tokens"]
        preempted += stats["preemptions"]
        cached += stats["cached_tokens"]
        waited += stats["followers"]
    shares = chosen["index"] != "none"
    assert (cached > 0) == (evicted > 0) == shares, "the runs exercise the cache"
    assert (preempted > 0) == (chosen["admission"] == "optimistic")
    assert (waited > 0) == (chosen["single_flight"] != "none")


def test_the_plain_choice_is_the_cold_answer():
    """The twin without cache and pressure, which the matrix is held against."""
    arrivals = workload()
    engine = make_engine(**PLAIN)
    assert answers(engine, arrivals) == cold(arrivals)
    assert engine.stats()["cached_tokens"] == engine.stats()["preemptions"] == 0


# ---- A pairwise covering set, on a real model ----------------------------------------


def pairs(row: dict[str, object]) -> set[tuple[tuple[str, object], ...]]:
    return set(itertools.combinations(row.items(), 2))


def covering_rows(axes: dict[str, list]) -> list[dict[str, object]]:
    """Few rows in which any two values of two axes meet: greedily, most new pairs."""
    every = [
        dict(zip(axes, values, strict=True))
        for values in itertools.product(*axes.values())
    ]
    missing = set().union(*map(pairs, every))
    rows = []
    while missing:
        rows.append(max(every, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


ROWS = covering_rows(AXES)


def test_the_set_covers_all_pairs():
    found = set().union(*map(pairs, ROWS))
    for (one, values), (other, others) in itertools.combinations(AXES.items(), 2):
        for pair in itertools.product(values, others):
            assert tuple(zip((one, other), pair, strict=True)) in found
    assert len(ROWS) < 20


@pytest.fixture(scope="module")
def tiny(random_decoder):
    return random_decoder(VOCAB)


def real_answers(model: Decoder, **chosen) -> dict[int, list[int]]:
    size = chosen["page_size"]
    runner = ModelRunner(model, POOL_TOKENS[chosen["pool"]] // size, size)
    for memory in runner.memory:  # what was never written must never be used
        memory.keys.fill_(float("nan"))
    clock = VirtualClock()
    engine = make_engine(TimedRunner(runner, clock), clock, **chosen)
    return answers(engine, [replace(a, time_s=0.0) for a in workload()])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_a_real_model_gives_the_same_tokens(tiny, row):
    expected = real_answers(tiny, **PLAIN)
    assert len({tuple(tokens) for tokens in expected.values()}) > 8, (
        "a model that talks"
    )
    assert real_answers(tiny, **row) == expected


# ---- Anything at any moment ----------------------------------------------------------


def enough_steps(engine: Engine) -> int:
    """In so many steps all requests end.

    The first of those who run gets a token in each step, until it ends or one that is
    more urgent takes its place: n times at most between two ends.
    """
    live = [progress.state for progress in engine._live.values()]
    longest = max((state.footprint_tokens + 1 for state in live), default=0)
    return len(live) * (len(live) + 1) * longest


class Life(RuleBasedStateMachine):
    """Requests come, are aborted, meet a failing forward pass. All of them end."""

    @initialize(
        index=st.sampled_from(AXES["index"]),
        publish=st.sampled_from(AXES["publish"]),
        single_flight=st.sampled_from(AXES["single_flight"]),
        wait_for_prefix=st.sampled_from(AXES["wait_for_prefix"]),
        grouping=st.sampled_from(AXES["grouping"]),
        admission=st.sampled_from(AXES["admission"]),
        eviction=st.sampled_from(AXES["eviction"]),
        max_batch_tokens=st.sampled_from([1, 5, 200]),
        page_size=st.sampled_from([1, 3, 16]),
        max_running=st.integers(1, 5),
    )
    def begin(self, **chosen):
        self.engine = make_engine(**chosen, pool="tight")
        self.wanted: dict[str, tuple[list[int], int, int]] = {}
        self.ended: dict[str, list[str]] = {}

    @rule(
        blocks=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        size=st.integers(1, 32),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 1),
        extra_key=st.sampled_from([None, None, "salt"]),
        n=st.sampled_from([1, 1, 1, 3]),
    )
    def submit(self, blocks, size, max_tokens, n, **options):
        prompt = [block for block in blocks for _ in range(4)][:size]
        params = SamplingParams(max_tokens=max_tokens, n=n)
        name = self.engine.submit(prompt, params, **options)
        self.wanted[name] = (prompt, max_tokens, n)

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            for output in self.engine.step():
                if output.finished:
                    self.end(output)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        output = self.engine.abort(name)
        assert (output is None) == (name in self.ended)
        if output is not None:
            assert any(c.finish_reason == "abort" for c in output.outputs)
            self.end(output)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        running = self.engine.scheduler.running
        self.engine.scheduler.preempt(data.draw(st.sampled_from(running)))

    @rule(after=st.integers(1, 3))
    def let_a_pass_fail(self, after):
        self.engine.runner.fail.add(self.engine.runner.num_runs + after)

    def end(self, output):
        name, answers = output.request_id, output.outputs
        assert name not in self.ended, "a request that ends twice"
        self.ended[name] = [answer.finish_reason for answer in answers]
        prompt, max_tokens, n = self.wanted[name]
        assert len(answers) == n
        for answer in answers:
            if answer.finish_reason == "length":
                assert len(answer.token_ids) == max_tokens
            expected = cold_continuation(prompt, len(answer.token_ids), VOCAB)
            assert answer.token_ids == expected

    @invariant()
    def all_is_well(self):
        check(self.engine)

    def teardown(self):
        for _ in range(enough_steps(self.engine)):
            if self.engine.has_unfinished():
                self.step(1)
        check_idle(self.engine)
        assert self.ended.keys() == self.wanted.keys(), "a request that never ends"


Life.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLife = Life.TestCase


# ---- A long run ----------------------------------------------------------------------


def live_through(engine: CheckedEngine, rng: random.Random, num_requests: int) -> None:
    """Submit mixed requests, abort one in ten at some moment, and run to the end."""
    heads = [[rng.randrange(VOCAB) for _ in range(16)] for _ in range(6)]
    live: list[str] = []
    left = num_requests
    while left or engine.has_unfinished():
        if left and len(live) < 12:
            prompt = rng.choice(heads) + [rng.randrange(VOCAB)] * rng.randint(0, 14)
            params = SamplingParams(max_tokens=rng.randint(1, 20))
            user = f"user {left}" if rng.random() < 0.2 else None
            live.append(engine.submit(prompt, params, extra_key=user))
            left -= 1
        if live and rng.random() < 0.05:
            engine.abort(live.pop(rng.randrange(len(live))))
        ended = {o.request_id for o in engine.step() if o.finished}
        live = [name for name in live if name not in ended]
    check_idle(engine)


@pytest.mark.parametrize(("index", "num_requests"), [("radix", 2_000), ("hash", 500)])
def test_a_long_run_leaves_nothing_behind(index, num_requests):
    """Aborts, evictions, preemptions; memory after all is memory after half of them."""
    engine, rng = make_engine(**TIGHT | {"index": index}), random.Random(2)
    live_through(engine, rng, 100)  # tables have grown to their size
    tracemalloc.start()
    sizes = []
    for _ in range(2):
        live_through(engine, rng, num_requests // 2)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    stats = engine.stats()
    assert stats["preemptions"] > num_requests / 20
    assert stats["evicted_tokens"] > num_requests
    assert sizes[1] - sizes[0] < 20_000, f"memory grows: {sizes}"


# ---- Broken on purpose ---------------------------------------------------------------


def walk(**chosen) -> None:
    arrivals = workload()
    assert answers(make_engine(**(TIGHT | chosen)), arrivals) == cold(arrivals)


def walk_with_a_failure() -> None:
    """The forward pass of a prompt fails; the same prompt comes again."""
    engine = make_engine(**TIGHT)
    engine.runner.fail = {1}
    for _ in range(2):
        engine.submit(range(12), SamplingParams(max_tokens=2))
        while engine.has_unfinished():
            outputs = engine.step()
    assert outputs[0].num_cached_tokens == 0, "found what no pass has written"


def follow_an_owner() -> None:
    """R07: who comes after the owner's first token finds the prompt's full pages."""
    engine = make_engine(index="radix", publish="step", page_size=16)
    prompt = [i % VOCAB for i in range(100)]
    engine.submit(prompt, SamplingParams(max_tokens=50))
    engine.step()
    name = engine.submit(prompt, SamplingParams(max_tokens=1))
    cached = {o.request_id: o.num_cached_tokens for o in engine.step()}
    assert cached[name] == 96, "published too late"


def count_the_admitted() -> None:
    """341 pages of 16, 66 reserved each: eight hit, five are admitted."""
    engine = make_engine(admission="reserve", index="radix", max_running=8)
    engine.scheduler.cache = PrefixCache(341, 16)
    engine.limits = Limits(VOCAB, 4_096)
    engine.scheduler.max_batch_tokens = 2_048
    prompt = [i % VOCAB for i in range(929)]
    engine.submit(prompt, SamplingParams(max_tokens=1))
    engine.step()
    for _ in range(8):
        engine.submit(prompt, SamplingParams(max_tokens=128))
    engine.step()
    assert len(engine.scheduler.running) == 5, "a hit shrank the reservation"


def forget_the_first(patch):
    write = CheckingRunner._write

    def fault(self, chunk, made):
        write(self, chunk, made)
        if chunk.start == 0 and chunk.num_shared == 0:
            self.states[self._slot(chunk, 0)] = 0

    patch.setattr(CheckingRunner, "_write", fault)


def swap_tables(patch):
    run = CheckingRunner.run

    def fault(self, chunks):
        if self.num_runs % 5 == 4 and len(chunks) > 1:
            one, two, *others = chunks
            if len(one.pages) == len(two.pages):
                one, two = replace(one, pages=two.pages), replace(two, pages=one.pages)
            chunks = [one, two, *others]
        return run(self, chunks)

    patch.setattr(CheckingRunner, "run", fault)


def commit_before_the_forward(patch):
    def fault(self):
        batch = self.scheduler.schedule()
        if not batch:
            return []
        for chunk in batch:
            self.scheduler.commit(self._live[chunk.request_id].state, chunk)
        self._publish(batch, [])
        try:
            tokens = self.runner.run(batch)
        except RuntimeError:
            return self._report([self._end(c.request_id, "error") for c in batch])
        advanced = []
        for chunk, token in zip(batch, tokens, strict=True):
            if token is not None:
                self._append(self._live[chunk.request_id], token)
                advanced.append(self._live[chunk.request_id])
        self._publish(batch, advanced)
        return self._report(advanced)

    patch.setattr(Engine, "step", fault)


def count_again(patch):
    count = Scheduler._count_admission

    def fault(self, state, cached):
        state.num_cached_tokens = None
        count(self, state, cached)

    patch.setattr(Scheduler, "_count_admission", fault)


def behave_like_finish(patch):
    patch.setattr(PublishEachStep, "num_visible", lambda self, state: 0)


def give_credit_for_hits(patch):
    def fault(self, state):
        def charge(s):
            shared = s.lease.num_shared if s.lease else 0
            if s is state:
                match = self.cache.find(s.tokens, s.request.extra_key)
                shared = match.matched_len // self.cache.page_size
            return self.cache.pages_for(s.footprint_tokens) - shared

        charges = sum(map(charge, [*self.running, state]))
        return charges <= self.cache.pool.num_pages

    patch.setattr(Scheduler, "_reservable", fault)


FAULTS = [
    (forget_the_first, walk, "position 0 of another past"),
    (swap_tables, walk, "of another past|two requests write"),
    (commit_before_the_forward, walk_with_a_failure, "of another past"),
    (count_again, walk, "a lookup counted twice"),
    (behave_like_finish, follow_an_owner, "published too late"),
    (give_credit_for_hits, count_the_admitted, "a hit shrank the reservation"),
]


@pytest.mark.parametrize(("fault", "found_by", "words"), FAULTS)
def test_a_planted_fault_is_found(fault, found_by, words, monkeypatch):
    """The check passes, the fault is planted, and the check fails, in these words."""
    found_by()
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        found_by()
