"""The explainer against a log of everything, naive and unbounded.

The log keeps each sequence that ever ran and each change of each page, and finds the
reason by looking through all of it. Where the explainer's memory sufficed the two must
agree in every field; where it did not, the explainer must say that it has forgotten.
"""

import gc
import json
import random
from array import array
from dataclasses import asdict, dataclass

import pytest
from checking_runner import CheckingRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_policies import AXES, make_engine

from minivllm.engine import Limits
from minivllm.events import EventLog, ignore
from minivllm.explain import (
    LATE,
    LOOK,
    MAX_KEYS,
    STEPS,
    UNSURE,
    Fate,
    Pages,
    Reuse,
    explain,
)
from minivllm.lint import Asked, CacheOnly, Linter
from minivllm.options import EngineOptions, assemble
from minivllm.request import SamplingParams
from minivllm.simulation import VirtualClock

WORDS = ("parting", "saved_s", "remembers_s")  # fields that the log does not have


@dataclass
class Known:
    tokens: list[int]
    key: object
    number: int
    last_s: float


class Log:
    """Everything, in lists. Set as a second observer beside the explainer."""

    def __init__(self, engine, publish):
        self.engine, self.publish, self.cache = engine, publish, engine.scheduler.cache
        self.size = self.cache.page_size
        self.known: list[Known] = []
        self.where: dict[int, tuple] = {}  # page -> what was published in it
        self.fates: dict[tuple, tuple] = {}  # (key, tokens) -> the last thing that was
        self.states, self.running, self.shown = {}, {}, {}
        self.verdicts: dict[str, dict] = {}
        self.queued: dict[str, dict] = {}
        self.refused = ""
        self.used_after: dict[str, list[Known]] = {}
        self.keys, self.admitted = {}, {}

    def now(self):
        return self.engine.clock.now()

    def __call__(self, kind, /, **details):
        getattr(self, "on_" + kind.replace(" ", "_"), lambda **_: None)(**details)

    # Who waits, and why

    def on_submit(self, request_id, held, **_):
        self.queued[request_id] = {
            "came": self.now(),
            "free": None if held else self.now(),
            "leader": None,
            "refused": [],
            "waits": 0,
        }

    def on_release(self, request_ids, leader):
        for request_id in request_ids:
            self.queued[request_id] |= {"free": self.now(), "leader": leader}

    def on_wait(self, request_id):
        self.queued[request_id]["waits"] += 1

    def on_refuse(self, why):
        self.refused = why

    def on_schedule(self, chunks):
        scheduler = self.engine.scheduler
        total = sum(size for _, _, size in chunks)
        why = self.refused
        if not why and total >= scheduler.max_batch_tokens:
            why = "budget"
        elif not why and len(scheduler.running) >= scheduler.max_running:
            why = "seats"
        for state in scheduler.waiting:
            name = state.request.request_id
            self.queued[name]["refused"].append(why or "grouping")
        self.refused = ""

    # What is known

    def prefix(self, state, page):
        return (state.request.extra_key, tuple(state.tokens[: (page + 1) * self.size]))

    def num_pages(self, state):
        return len(state.tokens) // self.size

    def learn(self, state):
        request = state.request
        tokens, number = list(state.tokens), request.arrival
        self.known.append(Known(tokens, request.extra_key, number, self.now()))

    def learn_pages(self, state):
        """What a running request says is known page by page."""
        if self.num_pages(state) > len(self.last_of(state).tokens) // self.size:
            self.learn(state)

    def on_publish(self, pages, owner):
        state = self.running[owner]
        self.learn_pages(state)
        for page, place in enumerate(state.lease.pages[: state.lease.num_shared]):
            self.where[place] = self.prefix(state, page)
            self.fates[self.prefix(state, page)] = ("there",)
            self.shown[owner].add(self.prefix(state, page))

    def on_evict(self, pages, owner):
        for place in pages:
            why = "evicted" if owner else "reset"
            self.fates[self.where.pop(place)] = (why, owner, "", self.now())

    def on_preempt(self, request_id):
        self.on_finish(request_id, "it was preempted")

    def on_finish(self, request_id, reason):
        state = self.running.pop(request_id, None)
        if state is None:
            return
        self.learn(state)
        for page in range(self.num_pages(state)):
            prefix = self.prefix(state, page)
            if prefix not in self.shown[request_id]:
                fate = ("unfinished", request_id, reason, self.now())
                self.fates[prefix] = fate

    def on_start_over(self):
        lost = set(self.where.values())
        for state in self.running.values():
            self.learn(state)
            lost |= {self.prefix(state, i) for i in range(self.num_pages(state))}
        for prefix in lost:
            self.fates[prefix] = ("lost", "", "", self.now())
        self.where, self.running = {}, {}

    def on_admit(self, request_id, cached):
        (state,) = (
            s
            for s in self.engine.scheduler.running
            if s.request.request_id == request_id
        )
        for other in self.running.values():
            self.learn_pages(other)
        if request_id not in self.verdicts:
            self.used_after[request_id] = list(self.known)
            self.keys[request_id] = state.request.extra_key
            self.admitted[request_id] = self.now()
            self.verdicts[request_id] = self.explain(state, cached)
        found = cached // self.size if cached < len(state.tokens) - 1 else None
        lease = state.lease
        assert found in (None, lease.num_shared + lease.num_borrowed)
        self.shown[request_id] = {
            self.prefix(state, i) for i in range(lease.num_shared)
        }
        self.running[request_id] = state
        self.learn(state)

    def last_of(self, state):
        return next(
            k for k in reversed(self.known) if k.number == state.request.arrival
        )

    # The reason

    def explain(self, state, cached):
        ids, size, key = list(state.tokens), self.size, state.request.extra_key
        most, page = len(ids) - 1, cached // size
        known = max(
            [cached, *(common(ids, k.tokens) for k in self.known if k.key == key)]
        )
        why, who, detail, at_s = self.reason(state, cached, known)
        if why == "other key":
            others = (k for k in self.known if k.key != key)
            known = max(common(ids, k.tokens) for k in others)
        if why in ("lost", "unpublished", "evicted", "reset", "unfinished"):
            known = max(known, (page + 1) * size)
        if why == "scored":
            known = cached
        whole = max(cached, min(known // size * size, most))
        known = max(whole, min(known, most))
        return {
            "prompt_tokens": len(ids),
            "cached_tokens": cached,
            "why": why,
            "missed_tokens": whole - cached,
            "unaligned_tokens": known - whole,
            "new_tokens": most - known,
            "who": who,
            "detail": detail,
            "ago_s": None if at_s is None else self.now() - at_s,
        } | self.waited(state)

    def reason(self, state, cached, known):
        ids, key, size = list(state.tokens), state.request.extra_key, self.size
        page = cached // size
        if cached == len(ids) - 1:
            return "all", "", "", None
        if state.request.params.prompt_logprobs is not None:
            return "scored", "", "", None
        if page == len(ids) // size:
            return "no whole page", "", "", None
        wanted = self.prefix(state, page)
        for name, other in self.running.items():
            if page < self.num_pages(other) and self.prefix(other, page) == wanted:
                prompt = len(other.request.prompt_token_ids)
                stage = "prefill" if other.num_committed < prompt else "decode"
                return "unpublished", name, f"in {stage}, publish={self.publish}", None
        if fate := self.fates.get(wanted):
            assert fate != ("there",), "the index did not find what is published"
            return fate
        elsewhere = (common(ids, k.tokens) for k in self.known if k.key != key)
        if max(elsewhere, default=0) >= (page + 1) * size:
            return "other key", "", "", None
        return "new", "", "", None

    def waited(self, state):
        queued, now_s = self.queued[state.request.request_id], self.now()
        reasons, late = queued["refused"], None
        if reasons:
            late = max(LATE, key=reasons.count)
            if 2 * state.num_passed >= len(reasons):
                late = "grouping"
            if 2 * queued["waits"] >= len(reasons):
                late = "wait"
        held = queued["leader"] is not None
        return {
            "leader": queued["leader"],
            "held_s": queued["free"] - queued["came"] if held else 0.0,
            "queued_s": now_s - queued["free"],
            "late": late,
        }


def common(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    differ = (i for i, (a, b) in pairs if a != b)
    return next(differ, min(len(one), len(other)))


def watched(num_tokens=1_000_000, **chosen):
    """An engine, its explainer and its log; the log is told first."""
    engine = make_engine(**chosen)
    publish = chosen.get("publish", "finish")
    log = Log(engine, publish)
    for owner in (engine, engine.scheduler, engine.scheduler.cache):
        owner.observer = log
    return engine, explain(engine, publish, num_tokens=num_tokens), log


CHOICES = {name: st.sampled_from(values) for name, values in AXES.items()}
CHOICES["index"] = st.sampled_from(["radix", "hash"])
CHOICES["pool"] = st.just("tight")
ACTS = ["submit"] * 12 + ["step"] * 18 + ["abort"] * 3 + ["reset", "fail", "interrupt"]


def act(engine, what, rng, prompts):
    if what == "submit":
        engine.submit(*a_request(rng, prompts))
    elif what == "abort" and engine.has_unfinished():
        output = engine.abort(rng.choice(engine.unfinished()))
        return [] if output is None else [output]
    elif what == "reset":
        engine.reset_prefix_cache()
    elif what == "fail":
        engine.runner.fail.add(engine.runner.num_runs + 1)
    elif what == "interrupt" and engine.has_unfinished():
        engine._cut_short = True
    elif what == "step":
        return engine.step()
    return []


def a_request(rng, prompts):
    """Often a beginning of an earlier prompt or answer, with one token changed."""
    base = list(rng.choice(prompts))[: rng.randint(1, 30)]
    if rng.random() < 0.4:
        base[rng.randrange(len(base))] = rng.randrange(3)
    if rng.random() < 0.5:
        base += [rng.randrange(3) for _ in range(rng.randint(0, 30 - len(base)))]
    prompts.append(base)
    scores = 0 if rng.random() < 0.05 else None
    params = SamplingParams(
        temperature=1.0, max_tokens=rng.randint(1, 20), prompt_logprobs=scores
    )
    key = rng.choice([None, None, None, "salt", ("t", 1)])
    return base, params, key, rng.choice([0, 0, 0, 1])


def live(chosen, seed, acts, num_tokens=1_000_000):
    """Run a random history; each output of it, with the log that it is held against."""
    engine, _, log = watched(num_tokens, **chosen)
    engine.runner.run = forgiving(engine.runner)
    rng, prompts, outputs = random.Random(seed), [[0, 1, 2] * 10], []
    for what in acts:
        for output in act(engine, what, rng, prompts):
            outputs.append(output)
            answer = output.outputs[0].token_ids
            prompts.append([*output.prompt_token_ids, *answer])
    while engine.has_unfinished():
        outputs += engine.step()
    assert not engine.runner.faults
    return engine, outputs, log


def forgiving(runner):
    """Scores of prompts are asked for, and the simulated runner has none."""
    run = runner.run

    def scored(chunks):
        tokens = run(chunks)
        for chunk in chunks:
            if chunk.params.prompt_logprobs is not None:
                chunk.prompt_logprobs = []
        return tokens

    return scored


def as_log(reuse):
    """The fields that the log has. Whether a difference is a fault is another check."""
    told = {k: v for k, v in vars(reuse).items() if k not in WORDS}
    return told | {"why": "new"} if reuse.why == "different" else told


def settled(value):
    """Times are sums of the same numbers, in another order."""
    return round(value, 9) if isinstance(value, float) else value


def check_sum(reuse):
    parts = (reuse.cached_tokens, reuse.missed_tokens, reuse.unaligned_tokens)
    assert min(*parts, reuse.new_tokens) >= 0
    assert sum(parts) + reuse.new_tokens + 1 == reuse.prompt_tokens


HISTORIES = st.lists(st.sampled_from(ACTS), min_size=20, max_size=70)
SLOWLY = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOWLY)
@given(st.fixed_dictionaries(CHOICES), st.integers(0, 2**32), HISTORIES)
def test_it_says_what_the_whole_log_says(chosen, seed, acts):
    """With memory enough every field agrees, under every choice of the engine."""
    _, outputs, log = live(chosen, seed, acts)
    for output in outputs:
        compare(output, log)


def compare(output, log):
    expected = log.verdicts.get(output.request_id)
    if expected is None:
        assert output.reuse.why == "not admitted"
        return
    told = as_log(output.reuse)
    assert {k: settled(v) for k, v in told.items()} == {
        k: settled(v) for k, v in expected.items()
    }
    assert output.reuse.remembers_s is None
    check_sum(output.reuse)
    assert output.num_cached_tokens == output.reuse.cached_tokens
    if parting := output.reuse.parting:
        check_parting(output, parting, log)
    elif output.reuse.why in ("different", "new"):
        check_nothing_in_common(output, log)


def check_parting(output, parting, log):
    """What is said of the nearest prompt is so, of one that was known by then."""
    ids, i = output.prompt_token_ids, parting.position
    assert tuple(ids[i : i + LOOK]) == parting.here
    assert parting.here[0] != parting.there[0]
    path = [*ids[:i], *parting.there]
    known = log.used_after[output.request_id]
    nearest = [k.tokens for k in known if k.tokens[: len(path)] == path]
    assert any(str(k.number) == parting.request_id for k in known)
    cached = output.num_cached_tokens
    found = {naive_fault(ids, old, i, cached, log.size) for old in nearest}
    assert (output.reuse.why == "different") in found
    if output.reuse.verdict != "hit without benefit":
        assert output.reuse.step == (output.reuse.why == "different")


def check_nothing_in_common(output, log):
    """If it leaves no known prompt, none goes on after what they have in common."""
    ids, key = output.prompt_token_ids, log.keys[output.request_id]
    known = [k.tokens for k in log.used_after[output.request_id] if k.key == key]
    longest = max((common(ids, tokens) for tokens in known), default=0)
    ends = [len(t) == longest for t in known if common(ids, t) == longest]
    assert output.reuse.why == "new" and (not longest or all(ends))


def naive_fault(ids, old, start, cached, page):
    """Whether without the first difference of two prompts a page more would be there.

    They go on alike from the nearest pair of places from which eight tokens agree.
    """
    here, there = ids[start:], old[start:]
    meetings = [
        (i + j, i, j)
        for i in range(len(here) - 7)
        for j in range(len(there) - 7)
        if here[i : i + 8] == there[j : j + 8]
    ]
    if not meetings:
        return False
    _, i, j = min(meetings)
    without = start + common(here[i:], there[j:])
    return min(without // page * page, len(ids) - 1) > max(cached, start // page * page)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOWLY)
@given(
    st.fixed_dictionaries(CHOICES),
    st.integers(0, 2**32),
    HISTORIES,
    st.sampled_from([1, 10, 40, 100, 200]),
)
def test_it_says_so_when_it_has_forgotten(chosen, seed, acts, num_tokens):
    """Too little memory: it agrees, or owns up; and of what it remembers it is sure."""
    _, outputs, log = live(chosen, seed, acts, num_tokens)
    for output in outputs:
        if expected := log.verdicts.get(output.request_id):
            agree_or_own_up(output, expected, log)


def agree_or_own_up(output, expected, log):
    reuse = output.reuse
    check_sum(reuse)
    told = as_log(reuse)
    same = all(told[n] == expected[n] for n in ("why", "who", "detail"))
    unsure = reuse.why == "forgotten" or "forgotten" in str(reuse)
    assert same or unsure, (str(reuse), expected)
    if reuse.why in ("different", "new") and reuse.remembers_s is not None:
        check_memory(output, log)


def check_memory(output, log):
    """Whatever was used after the moment that it names, it has compared with."""
    reuse, ids = output.reuse, output.prompt_token_ids
    key, admitted_s = log.keys[output.request_id], log.admitted[output.request_id]
    since_s = admitted_s - reuse.remembers_s + 1e-6  # its clock counts microseconds
    recent = (
        common(ids, k.tokens)
        for k in log.used_after[output.request_id]
        if k.key == key and k.last_s > since_s
    )
    known = reuse.cached_tokens + reuse.missed_tokens + reuse.unaligned_tokens
    assert min(max(recent, default=0), len(ids) - 1) <= known


def some_histories():
    """The same comparison without a search, for faults that are planted."""
    axes = AXES | {"index": ["radix", "hash"], "pool": ["tight"]}
    for seed in range(12):
        rng = random.Random(seed)
        chosen = {name: rng.choice(values) for name, values in axes.items()}
        acts = rng.choices(ACTS, k=70)
        for num_tokens in (1_000_000, rng.choice([10, 40, 100])):
            _, outputs, log = live(chosen, seed, acts, num_tokens)
            for output in outputs:
                if num_tokens == 1_000_000:
                    compare(output, log)
                elif expected := log.verdicts.get(output.request_id):
                    agree_or_own_up(output, expected, log)


# ---- One at a time -------------------------------------------------------------------


class Answers:
    """A runner that takes no time and answers 0."""

    def run(self, chunks):
        return [0 if chunk.samples else None for chunk in chunks]


def small(num_pages=256, page_size=16, **options):
    """An engine of the composition root, with a text of bytes."""
    chosen = {"page_size": page_size, "single_flight": "none"} | options
    return assemble(
        EngineOptions(**chosen),
        num_pages,
        Answers(),
        Limits(256, 100_000),
        decode=lambda ids: bytes(ids).decode(errors="replace"),
        clock=VirtualClock(),
    )


def ask(engine, *texts, **params):
    for text in texts:
        engine.submit(list(text.encode()), SamplingParams(**{"max_tokens": 2} | params))
    ended = []
    while engine.has_unfinished():
        ended += [output for output in engine.step() if output.finished]
    return [o.reuse for o in sorted(ended, key=lambda o: int(o.request_id))]


PROMPT = "You are the guide of a small museum. It is 09:41 now. Answer visitors."


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("other", "position", "cause"),
    [
        (PROMPT.replace("41", "42"), 47, "number"),
        (PROMPT.replace("41", "1107"), 46, "number"),
        (PROMPT.replace("small ", "small  "), 29, "white space"),
        (PROMPT.replace("small", "large"), 23, "value that changes"),
        (PROMPT.replace("small", "small, old"), 28, "put in"),
        ("<" + PROMPT, 0, "too many"),
        (PROMPT[1:], 0, "too few"),
        (PROMPT[0] + PROMPT, 1, "too many"),
        (PROMPT.replace("09:41", "4f9d2a0e-77c1-4e0b-9d6e-5b1f0c2a8e31"), 43, "number"),
        (PROMPT[:40] + "Speak like a pirate, whatever they ask.", 40, "other text"),
    ],
)
def test_where_two_prompts_part(index, page_size, other, position, cause):
    engine = small(index=index, page_size=page_size)
    ask(engine, PROMPT)
    (reuse,) = ask(engine, other)
    faulty = cause != "other text"
    assert (reuse.why, reuse.step) == (("different", 1) if faulty else ("new", 0))
    assert reuse.parting.position == position and cause in reuse.parting.cause
    assert reuse.cached_tokens == position // page_size * page_size
    token, text = reuse.parting.here[0], reuse.parting.here_text
    assert token == other.encode()[position] and str(token) in str(reuse)
    assert repr(text) in str(reuse) or not text
    json.dumps(asdict(reuse))


PAGES = st.sampled_from([1, 4, 16, 32])


@settings(max_examples=150, deadline=None)
@given(PAGES, st.integers(0, 40), st.integers(0, 40), st.integers(0, 5), st.data())
def test_a_fault_is_a_difference_that_costs_a_page(page, first, alike, here, data):
    """`first` tokens in common, a hole, `alike` more; the linter says the same."""
    there = data.draw(st.integers(0 if here else 1, 5))
    stable = [*range(1, first + alike + 1)]
    one, other = (
        [*stable[:first], *[100 + who] * hole, *stable[first:], *[200 + who] * 9]
        for who, hole in ((0, there), (1, here))
    )
    engine = small(page_size=page)
    for ids in (one, other):
        engine.submit(ids, SamplingParams(max_tokens=1))
        reuse = engine.step()[0].reuse
    costs = (first + (alike if alike >= 8 else 0)) // page > first // page
    assert reuse.step == (1 if costs else 0)
    if not reuse.cached_tokens:
        assert reuse.verdict == ("missed" if costs else "nothing to find")
    linter = Linter({("radix", page): CacheOnly("radix", page, 0)})
    for number, ids in enumerate((one, other)):
        linter.add(Asked(number, array("i", ids)))
    found = linter.findings(("radix", page), everything=True)
    assert any(f.lost["radix", page] for f in found) == costs


@pytest.mark.parametrize("opening", ["", "<", "<|im_start|>system\n"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_what_every_prompt_begins_with_is_no_reason(opening, page_size):
    """Two unrelated prompts, a BOS or a template around them: nothing was missed."""
    engine = small(page_size=page_size)
    closing = "<|end|>\n" if opening else ""
    texts = ("Write a poem on the sea and its ships.", "Is 391 a prime? Say why.")
    ask(engine, f"{opening}{texts[0] * 3}{closing}")
    (reuse,) = ask(engine, f"{opening}{texts[1] * 3}{closing}")
    told = (reuse.step, reuse.why, reuse.missed_tokens)
    if not reuse.cached_tokens:
        assert reuse.verdict == "nothing to find"
    assert told == (0, "new", 0)
    assert ("other text" in str(reuse)) == bool(opening)
    assert (reuse.parting is None) == (not opening), "they have nothing in common"


def test_a_moved_token_is_found_among_many_branches():
    """The branch to compare with is the one that goes on like us, not the last."""
    engine = small()
    ask(engine, PROMPT, *(f"{letter}: something else" for letter in "abcdefgh"))
    (reuse,) = ask(engine, "<" + PROMPT)
    assert "too many" in reuse.parting.cause and reuse.parting.request_id == "0"


def test_the_oldest_ghost_is_forgotten_first():
    pages, names = Pages(num_fates=2), [b"a", b"b", b"c"]
    for name in (*names[:2], b"a", b"c"):
        pages.bury([name], Fate("evicted"))
    assert [*pages.fates] == [b"a", b"c"]
    pages.show([7], [b"a"])
    assert [*pages.fates] == [b"c"], "a page that is there has no fate"
    pages.lose([7, 8], Fate("reset"))
    assert pages.fates[b"a"] == Fate("reset")


def test_what_is_off():
    engine = small(explain=False)
    assert ask(engine, PROMPT) == [None]
    parts = (engine, engine.scheduler, engine.scheduler.cache)
    assert all(part.observer is ignore for part in parts), "off must cost nothing"
    (reuse,) = ask(small(index="none"), PROMPT)
    assert reuse.why == "no index" and "there is no index" in str(reuse)


def test_a_scored_prompt_is_not_looked_up():
    engine = small()
    engine.runner.run = forgiving(engine.runner)
    ask(engine, PROMPT)
    (reuse,) = ask(engine, PROMPT, prompt_logprobs=0)
    assert reuse.why == "scored" and reuse.cached_tokens == 0 and reuse.step == 0


def test_the_other_observer_hears_everything():
    log, plain_log = EventLog(), EventLog()
    for observer, explains in ((log, True), (plain_log, False)):
        options = EngineOptions(explain=explains)
        clock = VirtualClock()
        engine = assemble(
            options, 64, Answers(), Limits(256, 999), observer, clock=clock
        )
        ask(engine, PROMPT, PROMPT, "x")
    assert list(log.events) == list(plain_log.events)


def test_several_continuations_and_a_preemption_have_one_report():
    engine = small(num_pages=8, max_running=4, page_size=4)
    texts = [PROMPT[:12], PROMPT[:12] + "x"]
    for text in texts:
        ids = list(text.encode())
        engine.submit(ids, SamplingParams(max_tokens=12, n=2, temperature=1))
    reports = {}
    while engine.has_unfinished():
        for output in engine.step():
            told = reports.setdefault(output.request_id, output.reuse)
            assert output.reuse is told, "a report that changes"
            assert output.num_cached_tokens == told.cached_tokens
    assert engine.stats()["preemptions"] > 0


def test_an_abort_in_every_place():
    engine = small(single_flight="completion", max_running=1)
    params, ids = SamplingParams(max_tokens=9), list(PROMPT.encode())
    leader, follower, waiting = (
        engine.submit(prompt, params) for prompt in (ids, ids, ids[1:])
    )
    engine.step()
    for name in (follower, waiting):
        assert engine.abort(name).reuse.why == "not admitted"
    assert engine.abort(leader).reuse.why == "new"
    (reuse,) = ask(engine, PROMPT)
    assert reuse.cached_tokens == 64 and reuse.verdict == "hit"


def test_a_follower_says_whom_it_waited_for():
    clock = VirtualClock()
    runner = CheckingRunner(16, 256, clock=clock)
    options = EngineOptions(single_flight="prefill")
    engine = assemble(options, 64, runner, Limits(256, 999), clock=clock)
    leader, follower = ask(engine, PROMPT, PROMPT)
    assert leader.leader is None and leader.held_s == 0
    assert follower.leader == "0" and follower.held_s > 0 and follower.late is None
    assert follower.verdict == "hit" and "for request 0" in str(follower)


def test_every_reason_has_words_and_a_step():
    for why, (step, words) in STEPS.items():
        reuse = Reuse(9, 0, why, 4, 0, 4, who="3", ago_s=1.0, remembers_s=2.0)
        assert words.split("{")[0] in str(reuse) and reuse.step == step
        assert ("forgotten" in str(reuse)) == (why in (*UNSURE, "forgotten"))
    for late, words in LATE.items():
        reuse = Reuse(9, 8, "all", late=late, queued_s=2.0, saved_s=1.0)
        assert words in str(reuse) and reuse.step == 4
        assert reuse.verdict == "hit without benefit"
        gained = Reuse(9, 8, "all", late=late, queued_s=1.0, saved_s=2.0)
        assert gained.verdict == "hit" and gained.step == 0


# ---- Long runs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_requests", [10_000, pytest.param(100_000, marks=pytest.mark.slow)]
)
def test_memory_stays_bounded(num_requests):
    """Requests of new text: no structure grows, and the process does not."""
    engine, rng = small(num_pages=128, explain_tokens=4_096), random.Random(1)
    explainer = engine.explain.__self__
    params, sizes = SamplingParams(max_tokens=1), []
    for turn in range(10):
        for i in range(num_requests // 10):
            key = rng.choice([None, rng.randrange(50)])
            engine.submit(rng.choices(range(256), k=20), params, key)
            while i % 40 == 39 and engine.has_unfinished():
                engine.step()
        if turn in (1, 9):
            gc.collect()
            sizes.append(len(gc.get_objects()))
        history, pages = explainer.history, explainer.pages
        assert history.total_size <= 4_096 and len(pages.fates) <= 256
        assert len(pages._names) <= 128 and len(explainer._keys) <= MAX_KEYS
        assert not explainer._queued and not explainer._running
        assert not len(explainer._reports), "reports outlive their requests"
    assert sizes[1] < sizes[0] + num_requests // 50, "objects pile up"
