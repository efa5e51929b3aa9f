# %% [markdown]
# # 7. Continuous batching
#
# Eight requests arrive at an idle engine. Each brings the same 929 tokens, of which the prefix
# cache holds the 58 full pages, all but the last token, and each may write 128 tokens of its
# own. Memory has 341 pages of 16 tokens: the 128 MiB of chapter 4. All eight will hit. When
# does each of them see its first token?
#
# No model is needed to find out. In the toy below every next token is 0, and a forward pass
# is one tick of the engine's clock, so that time is counted in steps. Scheduler, cache
# and engine are the real ones. We borrow them from the package now, and build them below.
# They know two rules of admission; both are in use elsewhere.

# %%
from minivllm.engine import Engine as ReadyEngine
from minivllm.engine import Limits, Publisher
from minivllm.events import EventLog, Observer, ignore
from minivllm.prefix_cache import PrefixCache
from minivllm.request import RequestOutput, SamplingParams
from minivllm.scheduler import Scheduler as ReadyScheduler


class Toy:
    """Every next token is 0, and every forward pass takes one step."""

    passes = 0

    def now(self) -> int:
        return self.passes

    def run(self, chunks):
        self.passes += 1
        return [0 if chunk.samples else None for chunk in chunks]


# %%
def make_engine(
    num_pages: int,
    log: Observer = ignore,
    publisher: Publisher | None = None,
    **options,
) -> ReadyEngine:
    toy, cache = Toy(), PrefixCache(num_pages, page_size=16, observer=log)
    scheduler = ReadyScheduler(cache, observer=log, **options)
    parts = {"publisher": publisher, "clock": toy, "observer": log}
    return ReadyEngine(toy, scheduler, Limits(50_000, 8_192), **parts)


def run_all(engine: ReadyEngine) -> list[RequestOutput]:
    """Step to the end; the final outputs in the order of arrival."""
    ended = []
    while engine.has_unfinished():
        ended += [output for output in engine.step() if output.finished]
        engine.scheduler.cache.check()
    return sorted(ended, key=lambda output: int(output.request_id))


# %% name="eight" claims="S01 R09"
prompt = list(range(929))
for admission in ("optimistic", "reserve"):
    engine = make_engine(341, admission=admission)
    engine.submit(prompt, SamplingParams(max_tokens=1))
    run_all(engine)  # the cache is warm now
    for _ in range(8):
        engine.submit(prompt, SamplingParams(max_tokens=128))
    engine.step()
    stats = engine.stats()
    print(f"{admission}: {stats['running']} run at once,", end=" ")
    print(f"{stats['pages_free']} of 341 pages are free")
    outputs = run_all(engine)
    print("  cached tokens:   ", [o.num_cached_tokens for o in outputs])
    print("  first token after", [o.metrics.ttft_s for o in outputs], "steps")

# %% [markdown]
# All eight reuse [928](#eight) of 929 tokens under either rule. Under `reserve` only [five](#eight) run.
# The other three hit just as well, have one token each to compute, and see their first token
# after [129](#eight) steps instead of [1](#eight).
#
# That number is the *time to first token*, TTFT: from the submission of a request to its
# first output token, the wait in the queue included. It is what a caller feels. And it is
# where a common belief fails: *a hit means that I run now*. A hit says how much need not be
# computed. It does not say that you are let in. Under `reserve` [278](#eight) of 341 pages are free
# while three requests wait: this rule counts what everybody may come to need, and gives no
# credit for what is shared. Somebody has to decide who runs in the next step, with how many
# tokens, in which pages. That is the scheduler.
#
# ## A batch need not wait for its slowest
#
# Why do requests run together at all? A decode step reads every weight of the model from
# memory to make one token for one request. The same read serves eight requests as well as
# one. So an engine has *seats*, and wants them full. (Many engines say slots. Ours are places
# for one token in K/V memory.)
#
# *Static batching* fills the seats, runs until everybody is done, and fills them again.
# *Continuous batching* lets a waiting request take a seat as soon as one is free, after any step.
# One condition is the whole difference:


# %%
def fill_slots(lengths: list[int], num_slots: int, continuous: bool):
    """Who sits in each seat at each step; `lengths` are the tokens each will write."""
    queue, slots, steps = list(enumerate(lengths)), [None] * num_slots, []
    while queue or any(slots):
        if continuous or not any(slots):
            for i, slot in enumerate(slots):
                if slot is None and queue:
                    slots[i] = queue.pop(0)
        steps.append([slot and slot[0] for slot in slots])
        left = [(slot[0], slot[1] - 1) if slot else (0, 0) for slot in slots]
        slots = [(name, size) if size > 0 else None for name, size in left]
    return steps


# %% name="slots"
lengths = [3, 14, 5, 9, 4, 12, 6, 3]
static, continuous = (fill_slots(lengths, 4, rule) for rule in (False, True))
for name, steps in (("static", static), ("continuous", continuous)):
    empty = sum(slot is None for step in steps for slot in step)
    print(f"{name:10} {len(steps)} steps, {empty} of {4 * len(steps)} slots empty")

# %% tags=["hide-input"]
from itertools import groupby

from minivllm.drawing import draw_rows


def slot_rows(name: str, steps):
    for i in range(4):
        cells, now = [], 0
        for who, run in groupby(step[i] for step in steps):
            size = len(list(run))
            state = "free" if who is None else "decoded"
            cells.append((now, size, state, "" if who is None else str(who)))
            now += size
        yield f"{name}, slot {i}", cells


draw_rows(
    [*slot_rows("static", static), *slot_rows("continuous", continuous)],
    caption="Eight requests of different length in four slots, a column for each step. Above, "
    "a slot whose request has ended (grey) waits for the longest of its batch. Below, the next "
    "request takes it.",
)

# %% [markdown]
# [26](#slots) steps against [17](#slots), for the same 56 tokens. The unit of scheduling is not the
# request any more. It is the step, and each step is planned afresh. Orca proposed this in 2022;
# vLLM and SGLang work that way.
#
# ## What a request is while it runs
#
# A request waits, or it runs. What changes while it does so is its state, and the scheduler
# owns it. The tokens are known up to some point, and the first `num_committed` of them
# have keys and values.

# %% export="scheduler.py"
"""Who runs in the next step, with how many tokens, and in which pages.

Requests join and leave at every step (Orca, 2022), prompts are cut to a budget of
tokens (Sarathi, 2023), and who must give way computes again later (vLLM, 2023).
"""

from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Protocol

from minivllm.batch import Chunk
from minivllm.events import Observer, ignore
from minivllm.pages import OutOfPages
from minivllm.prefix_cache import Lease, PrefixCache
from minivllm.radix import Match
from minivllm.request import Request


@dataclass(eq=False)
class RequestState:
    """What changes about a request. Owned by the scheduler.

    `tokens` are the prompt and the output so far; the first `num_committed` have K/V.
    `high_water` is the largest `num_committed` there ever was: what lies below it and
    is computed again is recomputation, and no cache hit.
    """

    request: Request
    tokens: "array[int]"
    max_output: int
    priority: int
    lease: Lease | None = None
    num_committed: int = 0
    num_cached_tokens: int | None = None
    high_water: int = 0
    num_passed: int = 0  # steps in which somebody behind it was admitted first


# %% [markdown]
# From these follow four numbers that everybody asks for. `num_pending` hides a useful fact: a
# request in the middle of its prompt has many pending tokens, a decoding one has exactly one,
# and one that lost its pages has many again. The scheduler need not tell them apart. And there is
# one request that must not find what others computed: a cache keeps keys and values, no logits,
# and who asks for `prompt_logprobs` wants the logits of the whole prompt.


# %% export="scheduler.py"
class RequestState(RequestState):
    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens that have no K/V yet. 1 while decoding."""
        return len(self.tokens) - self.num_committed

    @property
    def footprint_tokens(self) -> int:
        """K/V entries at the end: the last output token never gets one."""
        return len(self.request.prompt_token_ids) + self.max_output - 1

    @property
    def sought(self) -> "array[int]":
        """The tokens to look up; none if the whole prompt's logits are wanted."""
        scored = self.request.params.prompt_logprobs is not None
        return array("i") if scored else self.tokens

    @property
    def order(self) -> tuple[int, int]:
        """The place in every queue: priority, then arrival."""
        return (self.priority, self.request.arrival)


# %% [markdown]
# Two questions have more than one good answer: who is admitted next, and who must go when
# memory runs out. Chapter 12 will group requests that share a prefix. Until then, first come,
# first served; and the last to come is the first to go. Whoever answers otherwise lets somebody
# be passed over, and the number of steps in which that may happen to a request is one for all.


# %% export="scheduler.py"
MAX_PASSES = 64  # steps in which a request may be passed over, unless told otherwise


class Grouping(Protocol):
    """Who is admitted next, and who is preempted first. Both lists are in order."""

    def plan(self, waiting: Sequence[RequestState]) -> Sequence[RequestState]:
        """Whom to try to admit in this step; the first that does not fit ends it."""

    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """Choose the request to preempt, among those not served yet in this step."""


class ArrivalOrder:
    """First come, first served; last come, first preempted."""

    def plan(self, waiting: Sequence[RequestState]) -> Sequence[RequestState]:
        """The queue as it is."""
        return waiting

    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """The last to have come among the least important."""
        return unserved[-1]


# %% [markdown]
# A third question comes up between two requests of one step: may the second one read what the
# first is only about to compute? Chapter 9 will say when. Until then nobody is told.


# %% tags=["hide-input"] export="scheduler.py"
class Announcer(Protocol):
    """What the present step will have computed, for requests scheduled later in it."""

    def clear(self) -> None:
        """A new step is planned."""

    def announce(self, state: RequestState, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a request will have K/V after this step."""

    def find(self, state: RequestState, match: Match) -> list[int]:
        """The announced pages that go on where a match ends."""


class Silence:
    """Nobody reads what was not published."""

    def clear(self) -> None:
        """Nothing was announced."""

    def announce(self, state: RequestState, num_tokens: int) -> None:
        """Nobody is told."""

    def find(self, state: RequestState, match: Match) -> list[int]:
        """Nothing is found."""
        return []


# %% [markdown]
# ## A step has a budget
#
# The scheduler keeps two queues, both in the order of service (priority, then arrival), and
# three limits: how many requests may run, how many tokens a step may compute, and what must
# fit into memory. It tells an *observer* about every transition (chapter 4). By default that is
# `ignore`, which does nothing. The pictures of this chapter are drawn from an `EventLog`, which
# keeps the last 100,000.

# %% export="scheduler.py"
ADMISSIONS = ("optimistic", "reserve")


@dataclass
class Counters:
    """Sums over the engine's life. A request is looked up once, at first admission."""

    lookups: int = 0
    hits: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


# %% export="scheduler.py"
class Scheduler:
    """Two queues, in the order of service, and the budget of a step."""

    def __init__(
        self,
        cache: PrefixCache,
        max_running: int = 64,
        max_batch_tokens: int = 2048,
        admission: str = "optimistic",
        grouping: Grouping | None = None,
        announcer: Announcer | None = None,
        observer: Observer = ignore,
    ) -> None:
        if not all(type(n) is int and n > 0 for n in (max_running, max_batch_tokens)):
            raise ValueError("max_running and max_batch_tokens must be ints >= 1")
        if admission not in ADMISSIONS:
            raise ValueError(
                f"admission must be one of {ADMISSIONS}, not {admission!r}"
            )
        self.cache = cache
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.admission = admission
        self.grouping = grouping or ArrivalOrder()
        self.announcer = announcer or Silence()
        self.observer = observer
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.counters = Counters()
        self._num_charged = 0  # pages that `reserve` has promised, in this step


# %% [markdown]
# Planning has two halves: those who run go on, and then those who wait are let in. If
# somebody had to be sent away for want of pages, nobody is let in.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def add(self, state: RequestState) -> None:
        """Queue a request at its place."""
        insort(self.waiting, state, key=lambda s: s.order)

    def set_priority(self, state: RequestState, priority: int) -> None:
        """Give a request another place in its queue."""
        if priority != state.priority:
            state.priority = priority
            for queue in (self.waiting, self.running):
                queue.sort(key=lambda s: s.order)

    def schedule(self) -> list[Chunk]:
        """Plan one step, pages included: continue what runs, then admit what fits."""
        for state in [s for s in self.running if s.lease and s.lease.num_borrowed]:
            self.preempt(state)  # a borrowed page is good for one step (chapter 9)
        preemptions = self.counters.preemptions
        self.announcer.clear()
        batch = self._continue_running()
        if self.counters.preemptions == preemptions:
            num_tokens = sum(len(chunk.token_ids) for chunk in batch)
            batch += self._admit(self.max_batch_tokens - num_tokens)
        else:  # pages are short: let nobody in
            self.observer("refuse", why="preemption")
        if self.observer is not ignore:
            sizes = [(c.request_id, c.start, len(c.token_ids)) for c in batch]
            self.observer("schedule", chunks=sizes)
        return batch


# %% [markdown]
# Each running request gets as many of its pending tokens as the budget still allows. A prompt
# that is longer is cut: this is *chunked prefill* (Sarathi, 2023), and it needs no code of its
# own. Requests that decode, requests in the middle of a prompt and requests that have just
# come ride in the same batch.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _continue_running(self) -> list[Chunk]:
        batch: list[Chunk] = []
        budget = self.max_batch_tokens
        while budget and len(batch) < len(self.running):
            state = self.running[len(batch)]  # the first that is not served yet
            num_tokens = min(state.num_pending, budget)
            if self._make_room(state, num_tokens, len(batch)):
                batch.append(self._chunk(state, num_tokens))
                budget -= num_tokens
        return batch

    def _chunk(self, state: RequestState, num_tokens: int) -> Chunk:
        lease, start = state.lease, state.num_committed
        assert lease is not None
        ids = state.tokens[start : start + num_tokens]
        self.announcer.announce(state, start + num_tokens)
        pages, shared = tuple(lease.pages), lease.num_shared + lease.num_borrowed
        samples = num_tokens == state.num_pending
        name, params = state.request.request_id, state.request.params
        num_prompt = len(state.request.prompt_token_ids)
        placed = (name, ids, start, pages, shared, samples)
        return Chunk(*placed, params, state.tokens, num_prompt)


# %% [markdown]
# `Chunk` is chapter 5's description of work. It *samples* if it reaches the last token that is
# known: then the forward pass says what comes next.
#
# What is a small budget good for? Three requests decode. After four steps a fourth one comes,
# with a prompt of 300 tokens.


# %% name="budget"
def newcomer(max_batch_tokens: int) -> tuple[list, list[RequestOutput]]:
    log = EventLog()
    engine = make_engine(200, log, max_batch_tokens=max_batch_tokens)
    for i in range(3):
        engine.submit([i] * 16, SamplingParams(max_tokens=20))
    for _ in range(4):
        engine.step()
    engine.submit([9] * 300, SamplingParams(max_tokens=6))
    outputs = run_all(engine)
    return [event.details["chunks"] for event in log.of("schedule")], outputs


plans = {budget: newcomer(budget) for budget in (2048, 64)}
for budget, (steps, outputs) in plans.items():
    largest = max(sum(size for _, _, size in step) for step in steps)
    ttft = outputs[-1].metrics.ttft_s
    print(f"budget {budget:4}: largest step {largest} tokens, newcomer's TTFT {ttft}")


# %% tags=["hide-input"]
def step_by_step(steps):
    """A cell for each chunk; a step is 1 wide, and 1 more for every 32 tokens in it."""
    rows, now = {}, 0.0
    for step in steps:
        width = 1 + sum(size for _, _, size in step) / 32
        for name, _, size in step:
            state, words = ("decoded", "") if size == 1 else ("computed", str(size))
            rows.setdefault(name, []).append((now, width, state, words))
        now += width
    return rows


draw_rows(
    [
        (f"budget {budget}, request {name}", row)
        for budget, (steps, _) in plans.items()
        for name, row in step_by_step(steps).items()
    ],
    caption="Numbers are prompt tokens; a cell without one is an output token; a step is as wide "
    "as its work. Above, requests 0 to 2 wait for one very long step. Below, the same prompt "
    "comes in five pieces, and they get a token with each.",
)

# %% [markdown]
# With a large budget the newcomer's whole prompt goes into one step of [303](#budget) tokens, and
# three others wait that long for their next word. With a budget of 64 no step exceeds [64](#budget)
# tokens. The newcomer pays: its first token comes in the [5](#budget)th step, not the [1](#budget)st. The budget
# trades one request's TTFT for everybody else's rhythm.
#
# Those who run are served first, in order, and the rest of the budget goes to whoever comes
# next. So a short request *behind* a long prompt waits for it; exercise 1 asks how long. A
# larger budget would help, or another `Grouping`.
#
# ## Reuse is decided at admission
#
# Waiting requests are let in one by one, in order, as long as budget, seats and pages last. A
# refusal is an event like any other, with its reason.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _admit(self, budget: int) -> list[Chunk]:
        batch: list[Chunk] = []
        last: tuple[int, ...] = ()
        seats = self.max_running - len(self.running)
        if not (self.waiting and budget and seats > 0):
            return batch
        if self.admission == "reserve":
            self._num_charged = sum(map(self._charge, self.running))
        for state in list(islice(self.grouping.plan(self.waiting), seats)):
            num_tokens = self._try_admit(state, budget) if budget else 0
            if num_tokens == 0:
                break
            batch.append(self._chunk(state, num_tokens))
            last = max(last, state.order)
            budget -= num_tokens
        self._count_passed(last)
        return batch


# %% [markdown]
# This is where a prefix is found: here, and nowhere else. The match is pinned in the same move
# in which the pages for the rest are taken (chapter 4's `acquire`), so nothing of it can be
# evicted in between. One token is always computed, for its logits: that is the `- 1`.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _count_passed(self, last: tuple[int, ...]) -> None:
        """Who waits, and stood before the last of those admitted, was passed over."""
        for state in self.waiting:
            if state.order > last:
                return
            state.num_passed += 1

    def _try_admit(self, state: RequestState, budget: int) -> int:
        """Start a lease if the request fits; the size of its first chunk, or 0."""
        if self.admission == "reserve" and not self._reservable(state):
            self.observer("refuse", why="reserve")
            return 0
        match = self.cache.find(state.sought, state.request.extra_key)
        borrowed = self.announcer.find(state, match) if state.sought else []
        found = match.matched_len + len(borrowed) * self.cache.page_size
        cached = min(found, len(state.tokens) - 1)
        num_tokens = min(len(state.tokens) - cached, budget)
        try:
            owner = state.request.request_id
            lease = self.cache.acquire(match, cached + num_tokens, borrowed, owner)
        except OutOfPages:
            self.observer("refuse", why="pages")
            return 0
        self.waiting.remove(state)
        insort(self.running, state, key=lambda s: s.order)
        state.lease, state.num_committed = lease, cached
        self._num_charged += self._charge(state)
        self._count_admission(state, cached)
        return num_tokens


# %% [markdown]
# Two identical requests, submitted together to an empty cache. The first time there are two
# slots, the second time there is one:


# %% name="moment" claims="S02"
def twins(max_running: int) -> list[RequestOutput]:
    engine = make_engine(64, max_running=max_running)
    for _ in range(2):
        engine.submit(list(range(493)), SamplingParams(max_tokens=4))
    return run_all(engine)


for max_running in (2, 1):
    pair = [(o.num_cached_tokens, o.metrics.ttft_s) for o in twins(max_running)]
    print(f"{max_running} slots: (cached, TTFT) {pair}")

# %% [markdown]
# With two seats both are admitted in the same step, and neither finds anything. With one seat the
# second is admitted later, and finds [480](#moment) of 493 tokens. It arrived at the same moment. But it
# was looked up when the scheduler formed a batch with it, and by then the pages were there.
#
# Look at the TTFT as well. The twin that found nothing had its first token after [1](#moment) step, the one
# that hit after [5](#moment). It had to wait in order to find something. Chapter 10 is about that bargain.
#
# ### What must fit
#
# Here two schools part. *Optimistic* admission (vLLM, SGLang) wants pages for the first chunk
# only, and sends somebody away if it hoped too much. *Reserve* admission (mini-sglang,
# mini-vllm-rs) adds up everybody's largest possible footprint and lets nobody in who could
# make it overflow.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _reservable(self, state: RequestState) -> bool:
        return self._num_charged + self._charge(state) <= self.cache.pool.num_pages

    def _charge(self, state: RequestState) -> int:
        """Pages that `reserve` keeps for a request, from its first step to its last."""
        return self.cache.pages_for(state.footprint_tokens)


# %% [markdown]
# A hit gives no credit here. Suppose B were credited for the pages that it shares with A. When A
# ends, its reservation ends with it, and these pages are still held by B, reserved by nobody.
# So each of our eight is charged (929 + 128 − 1) / 16 = 66 pages, and 341 // 66 = [5](#eight).
#
# ### Strict order, and its price
#
# If the head of the queue does not fit, nobody overtakes it. Otherwise a stream of small
# requests could keep a large one waiting for ever. What does that cost? Below, request 0 runs in
# a pool of 8 pages. Request 1 needs six pages, request 2 needs one:

# %% name="strict"
engine = make_engine(8)
sizes = {0: (64, 33), 1: (96, 1), 2: (16, 1)}
for i, (num_prompt, num_output) in sizes.items():
    engine.submit([i] * num_prompt, SamplingParams(max_tokens=num_output))
engine.step()
print(
    engine.stats()["pages_free"], "pages free, and", engine.stats()["waiting"], "wait"
)
print("TTFT in steps:", [o.metrics.ttft_s for o in run_all(engine)])

# %% [markdown]
# Request 2 would fit from the first step on. It starts in the [34](#strict)th, together with request 1, when
# request 0 has ended. The large one is safe, for those who run end some day. The small one
# pays, and so does the memory that lies idle. Chapter 12 has other orders, and their price.
#
# `priority` is a place in the queue, smaller first, and no more than that: a running request
# is never sent away for a more important one that waits.
#
# ## Too few pages
#
# A decoding request needs another page every 16 tokens. When none is free, and the cache has
# none to evict, somebody is *preempted*: it gives up its pages and goes back to the queue, to
# its old place, before all who came later.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _make_room(self, state: RequestState, num_tokens: int, num_served: int) -> bool:
        """Get pages for a running request; False if it was itself the victim."""
        assert state.lease is not None
        while True:
            try:
                self.cache.grow(state.lease, state.num_committed + num_tokens)
                return True
            except OutOfPages:
                victim = self.grouping.victim(self.running[num_served:])
                self.preempt(victim)
                if victim is state:
                    return False


# %% [markdown]
# The victim comes from those who were not served yet, so it is never in this step's batch. By
# default it is the last of the order. The first of the order therefore goes only when it is
# alone, and alone it fits: somebody always gets to the end, and then pages come back.
#
# Giving up pages means releasing the lease, and that *publishes* its complete pages (chapter 4).
# They stay findable until somebody needs the memory.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def preempt(self, state: RequestState) -> None:
        """Back to the queue, at its old place; complete pages stay findable."""
        self._leave(state)
        state.num_committed = 0
        self.counters.preemptions += 1
        self.observer("preempt", request_id=state.request.request_id)
        self.add(state)

    def _leave(self, state: RequestState) -> None:
        """Take a request out of whichever queue holds it, and end its lease."""
        (self.running if state.lease else self.waiting).remove(state)
        if state.lease:
            self.cache.release(state.lease, state.tokens, state.num_committed)
            state.lease = None

    def finish(self, state: RequestState, reason: str) -> None:
        """End a request, running or waiting, for whatever reason."""
        self._leave(state)
        self.observer("finish", request_id=state.request.request_id, reason=reason)


# %% [markdown]
# ### Counting what is computed again
#
# A request that comes back may find its own pages. Is that a hit? It reuses nobody's work, and
# an engine that counts it reports a hit rate that goes *up* when memory is short. So a request
# is looked up once in its life, as far as the counters go:


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _count_admission(self, state: RequestState, cached: int) -> None:
        """Count a request's lookup the first time only: a resumed one finds itself."""
        state.high_water = max(state.high_water, cached)
        self.observer("admit", request_id=state.request.request_id, cached=cached)
        if state.num_cached_tokens is not None:
            return
        state.num_cached_tokens = cached
        self.counters.lookups += 1
        self.counters.hits += cached > 0
        self.counters.queried_tokens += len(state.request.prompt_token_ids)
        self.counters.cached_tokens += cached


# %% [markdown]
# Tokens are counted when they are *committed*, after the forward pass that wrote their K/V. What
# lies below the request's own high-water mark was computed before, and is counted apart.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def commit(self, state: RequestState, chunk: Chunk) -> None:
        """The forward pass wrote this chunk's K/V: count it and move on."""
        end, prompt_end = chunk.end, len(state.request.prompt_token_ids)
        fresh = max(chunk.start, min(state.high_water, end))
        self.counters.recomputed_tokens += fresh - chunk.start
        if fresh < prompt_end:
            self.counters.prefill_tokens += min(end, prompt_end) - fresh
        state.num_committed = end
        state.high_water = max(state.high_water, end)

    def stats(self) -> dict[str, int]:
        """Queue lengths and counters."""
        queues = {"running": len(self.running), "waiting": len(self.waiting)}
        return queues | asdict(self.counters)

    def start_over(self) -> None:
        """Empty both queues and the cache, whatever state they are in."""
        self.waiting, self.running = [], []
        self.cache.start_over()


# %% [markdown]
# ### A preemption, seen
#
# The scheduler is complete, and from here on the runs use it instead of the borrowed one. Three
# requests with 96 prompt tokens and 40 output tokens; each will need 9 pages, and there are 22.

# %% name="short"
ReadyScheduler = Scheduler

log = EventLog()
engine = make_engine(22, log)
for i in range(3):
    engine.submit([i] * 96, SamplingParams(max_tokens=40))
ended = run_all(engine)
for name in ("preemptions", "prefill_tokens", "recomputed_tokens", "hits"):
    print(f"{name:17} {engine.stats()[name]}")
admits = [
    e.details["cached"] for e in log.of("admit") if e.details["request_id"] == "2"
]
print("request 2 was admitted with", admits, "cached tokens")

# %% tags=["hide-input"]
from itertools import pairwise

from minivllm.drawing import rows_of_steps

rows = rows_of_steps(event.details["chunks"] for event in log.of("schedule"))
first, *others = rows["2"]
again = [(x, w, "lost" if s == "computed" else s, words) for x, w, s, words in others]
rows["2"] = [first, *again]
waits = [(a[0] + a[1], b[0] - a[0] - a[1]) for a, b in pairwise(rows["2"])]
rows["2"] += [(x, width, "free", "waits") for x, width in waits if width > 0.01]
draw_rows(
    [(f"request {name}", row) for name, row in rows.items()],
    caption="Request 2 came last. When pages run out it goes, and waits until the others have ended. "
    "Then it finds a part of its own past. Red: 48 tokens computed again, and the newest one.",
)

# %% [markdown]
# Request 2 was sent away with seven complete pages, 112 tokens. When it came back, [64](#short) of them
# were still there: three pages had been evicted for those who ran on. So it computed [48](#short)
# tokens again. `hits` is [0](#short), and must be: nobody used anybody else's
# work.
#
# Is it worth it? Two hundred requests of many lengths, all waiting from the start, in 200
# pages:


# %% name="rules"
import random


class CountingCache(PrefixCache):
    num_finds = 0

    def find(self, token_ids, extra_key=None):
        self.num_finds += 1
        return super().find(token_ids, extra_key)


for admission in ADMISSIONS:
    engine, rng = make_engine(200, admission=admission), random.Random(1)
    engine.scheduler.cache = cache = CountingCache(200, page_size=16)
    for i in range(200):
        own = [1000 + i] * rng.randrange(400)
        params = SamplingParams(max_tokens=rng.randrange(1, 200))
        engine.submit([rng.randrange(5)] * 64 + own, params)
    ended = run_all(engine)
    stats, steps = engine.stats(), engine.runner.passes
    print(f"{admission}: {steps} steps, {stats['preemptions']} preempted,", end=" ")
    again = stats["recomputed_tokens"]
    once = stats["prefill_tokens"] + sum(len(o.outputs[0].token_ids) - 1 for o in ended)
    print(f"{again} tokens again ({again / once:.0%}), {cache.num_finds} lookups")

# %% [markdown]
# Counted in steps, optimism pays: [1,973](#rules) against [2,691](#rules), although [82](#rules) requests were
# preempted and [6,101](#rules) tokens computed twice, [10](#rules) % on top of all that had to be computed.
# With `reserve` the pages of output tokens that are not written yet lie idle. The optimistic
# steps are fuller, though, and a fuller step takes longer; chapter 8 can price that.
#
# The last number is of another kind. A head of the queue that cannot get in is looked up again in
# each step: [2,000](#rules) lookups, where 282 admissions would have needed 282. We leave it so. What
# is cached and what is free changes with every step, and a lookup compares a few hundred tokens,
# while the step that it belongs to computes them.
#
# ## An engine around it
#
# The scheduler plans. Somebody must run the plan, append tokens, notice the end, and talk to
# the caller. The engine does, and it leaves open what later chapters want to replace: each of
# the following is a question with a plain default.

# %% export="engine.py"
"""The loop: schedule, run, commit, publish."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from minivllm.batch import Chunk
from minivllm.events import Observer, ignore
from minivllm.request import (
    CompletionOutput,
    ExtraKey,
    Logprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenIds,
    check_extra_key,
    encode_ids,
)

logger = logging.getLogger("minivllm")


class Runner(Protocol):
    """Executes a batch; a token for each chunk that samples, None for the others."""

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """One forward pass. If it raises, no chunk of the batch is committed.

        Logprobs that a chunk's params ask for are left on the chunk.
        """


# %% [markdown]
# What time is it? Chapter 8 brings a clock that ticks only when somebody says so, as our
# toy does.


# %% export="engine.py"
class Clock(Protocol):
    """Gives the time in seconds, from any starting point."""

    def now(self) -> float:
        """The present time."""


class WallClock:
    """The clock of the machine."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()


# %% [markdown]
# What do the tokens say? The engine speaks token ids. A *writer* makes text of them and
# notices stop strings; chapter 6 built one.


# %% export="engine.py"
class Writer(Protocol):
    """The text of one request."""

    def push(self, token_id: int) -> str | None:
        """Take an output token; the stop string, if the text now holds one."""

    def piece(self, token_id: int) -> str | None:
        """What one token says by itself."""

    def text(self, finished: bool) -> str:
        """The text so far."""


class NoText:
    """The writer of an engine without a tokenizer."""

    def push(self, token_id: int) -> str | None:
        """Never stop."""
        return None

    piece = push  # nothing

    def text(self, finished: bool) -> str:
        """Nothing."""
        return ""


def no_writer(prompt_ids: TokenIds, params: SamplingParams) -> Writer:
    """A writer of nothing, whatever is asked."""
    return NoText()


# %% [markdown]
# When may others find a page? None before its owner ends, or each as soon as it is committed.
# Chapter 9 has more.


# %% export="engine.py"
class Publisher(Protocol):
    """When pages become visible to other requests."""

    def num_visible(self, state: RequestState) -> int:
        """How many of a running request's committed tokens others may find now."""


class PublishAtFinish:
    """Nothing is visible before its owner has ended, or was preempted."""

    def num_visible(self, state: RequestState) -> int:
        """None."""
        return 0


class PublishEachStep:
    """Every full page is visible as soon as a forward pass has completed it."""

    def num_visible(self, state: RequestState) -> int:
        """All that are committed."""
        return state.num_committed


# %% [markdown]
# Who waits for whom? A request is admitted as a *leader*, which runs, or as a *follower*,
# which is held until the leader's work is there. Whoever decides that must hear of everything
# that could end a wait. Chapter 10 fills this seam.


# %% export="engine.py"
class Coordinator(Protocol):
    """Who waits for whom. Returned ids are followers that may be scheduled now.

    Told of an id that it does not know, it raises a `LookupError`.
    """

    def admit(
        self, request_id: str, token_ids: TokenIds, extra_key: ExtraKey = None
    ) -> str:
        """Take a new request in: "leader" runs, "follower" is held."""

    def prefilled(self, request_id: str) -> list[str]:
        """The request's prompt is computed and published."""

    def finished(self, request_id: str) -> list[str]:
        """The request ended well."""

    def aborted(self, request_id: str) -> tuple[str | None, list[str]]:
        """The request ended otherwise; who leads now, and who is released."""

    def leader_of(self, request_id: str) -> str | None:
        """Whom a held request waits for."""

    def waiting_for(self, request_id: str) -> Sequence[str]:
        """Who waits for a request."""

    def stats(self) -> dict[str, int]:
        """Flights opened and requests that waited, so far."""

    def start_over(self) -> None:
        """Forget all live requests, whatever state they are in."""


# %% tags=["hide-input"] export="engine.py"
class Independent:
    """Nobody waits for anybody."""

    def admit(
        self, request_id: str, token_ids: TokenIds, extra_key: ExtraKey = None
    ) -> str:
        """Everyone leads."""
        return "leader"

    def prefilled(self, request_id: str) -> list[str]:
        """Nobody waited."""
        return []

    finished = prefilled

    def aborted(self, request_id: str) -> tuple[str | None, list[str]]:
        """Nobody follows."""
        return None, []

    def leader_of(self, request_id: str) -> str | None:
        """Nobody waits."""
        return None

    def waiting_for(self, request_id: str) -> Sequence[str]:
        """Nobody waits."""
        return ()

    def stats(self) -> dict[str, int]:
        """Nothing happens here."""
        return {"flights": 0, "followers": 0}

    def start_over(self) -> None:
        """Nobody is remembered."""


# %% [markdown]
# The engine remembers of each live request what nobody else does: its text, its times, why it
# ended. If a request has several continuations, of each of them.


# %% export="engine.py"
@dataclass(frozen=True)
class Limits:
    """What the model accepts, and where it ends by itself."""

    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Progress:
    """What the engine remembers of one continuation, beside the scheduler's state.

    `name` is the id of the request that it belongs to; the metrics of a request are
    those of its first continuation.
    """

    name: str
    state: RequestState
    writer: Writer
    metrics: RequestMetrics
    held: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_ids: list[int] | None = None  # made once, at the first output
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    cumulative_logprob: float = 0.0


# %% export="engine.py"
class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: Limits,
        *,
        publisher: Publisher | None = None,
        coordinator: Coordinator | None = None,
        clock: Clock | None = None,
        writers: Callable[[TokenIds, SamplingParams], Writer] | None = None,
        observer: Observer = ignore,
        streams: bool = True,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.publisher = publisher or PublishEachStep()
        self.coordinator = coordinator or Independent()
        self.clock = clock or WallClock()
        self.writers = writers or no_writer
        self.observer = observer
        self.explain: Callable[[RequestState], Any] = lambda state: None
        self.streams = streams  # else a request is reported once, when it has ended
        self._live: dict[str, Progress] = {}  # continuations that have not ended
        self._requests: dict[str, list[Progress]] = {}  # those with one that is live
        self._untold: dict[str, list[Progress]] = {}  # with an end not reported yet
        self._cut_short = False
        self._num_submitted = 0


# %% [markdown]
# ### At the door
#
# What can be refused is refused at once. A prompt that fills the context leaves no room for an
# answer. A token id that the model does not have would crash a GPU kernel, and everybody's
# requests with it. A request that needs more pages than there are would wait for ever, and,
# the order being strict, so would everybody behind it.


# %% export="engine.py"
class Engine(Engine):
    def check(self, token_ids: TokenIds, params: SamplingParams) -> int:
        """How many output tokens a request may have; `ValueError` if it cannot run."""
        size, context = len(token_ids), self.limits.max_context
        if size == 0:
            raise ValueError("the prompt is empty")
        self._check_ids("the prompt", token_ids)
        self._check_params(params)
        if size >= context:
            raise ValueError(
                f"the prompt has {size} tokens and the model's context {context}: "
                "no room for an output token"
            )
        pool = self.scheduler.cache.pool
        room = max(1, pool.num_pages * pool.page_size - size + 1)
        max_output = min(params.max_tokens or room, context - size)
        self._check_footprint(size + max_output - 1)
        return max_output


# %% tags=["hide-input"] export="engine.py"
class Engine(Engine):
    def _check_ids(self, where: str, token_ids: TokenIds) -> None:
        last_id = self.limits.vocab_size - 1
        if token_ids and (min(token_ids) < 0 or max(token_ids) > last_id):
            wrong = next(i for i in token_ids if not 0 <= i <= last_id)
            raise ValueError(
                f"{where}: token id {wrong} is not in 0 to {last_id}, the vocabulary"
            )

    def _check_params(self, params: SamplingParams) -> None:
        most = self.limits.vocab_size
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        bias = params.logit_bias or {}
        self._check_ids("logit_bias", [*bias])
        if len(bias) == most and max(bias.values()) == -math.inf:
            raise ValueError(f"logit_bias: it forbids all {most} tokens there are")
        if params.stop and self.writers is no_writer:
            raise ValueError(
                "stop: without a tokenizer there is no text to find it in: "
                "give stop_token_ids"
            )
        if max(params.logprobs or 0, params.prompt_logprobs or 0) > most:
            raise ValueError(
                f"logprobs and prompt_logprobs must be at most {most}, the vocabulary"
            )

    def _check_footprint(self, num_tokens: int) -> None:
        cache = self.scheduler.cache
        needed, there = cache.pages_for(num_tokens), cache.pool.num_pages
        if needed > there:
            raise ValueError(
                f"the request may need {needed} pages and the pool has {there}: "
                "lower max_tokens or raise num_pages"
            )


# %% [markdown]
# A request that passes gets an id, which is its number of arrival, and its place in the queue.
# One that wants `n` continuations of its prompt is n requests to everybody but its caller: each
# with a number, a seed and a page table of its own, so the scheduler and the cache need to know
# nothing about it. The caller knows them all by the first one's id. That they share a prompt is
# nothing special: they are identical requests that arrive together, and chapters 9 and 10 are
# about these.


# %% export="engine.py"
class Engine(Engine):
    def submit(
        self,
        token_ids: TokenIds,
        params: SamplingParams | None = None,
        extra_key: ExtraKey = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt; return its request id. `ValueError` names a fault."""
        ids = encode_ids(token_ids)[:]  # our own copy
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {params!r}")
        max_output = self.check(ids, params)
        check_extra_key(extra_key)
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, not {priority!r}")
        name, now, family = str(self._num_submitted), self.clock.now(), []
        for i in range(params.n):
            number, own = self._num_submitted + i, params.of_continuation(i)
            request = Request(str(number), ids, own, extra_key, priority, number, now)
            state = RequestState(request, ids[:], max_output, priority)
            writer = self.writers(ids, own)
            family.append(Progress(name, state, writer, RequestMetrics(now)))
        self._enter(family)
        return name


# %% export="engine.py"
class Engine(Engine):
    def _enter(self, family: list[Progress]) -> None:
        with self._change():
            self._num_submitted += len(family)
            self._requests[family[0].name] = family
            for progress in family:
                self._admit(progress)

    def _admit(self, progress: Progress) -> None:
        state, request = progress.state, progress.state.request
        request_id, ids = request.request_id, request.prompt_token_ids
        self._live[request_id] = progress
        coordinator, leader = self._coordinator(progress), None
        role = coordinator.admit(request_id, ids, request.extra_key)
        progress.held = role == "follower"
        if not progress.held:
            self.scheduler.add(state)
        elif leader := coordinator.leader_of(request_id):
            leading = self._live[leader].state  # all of _hasten would be quadratic
            self.scheduler.set_priority(leading, min(leading.priority, state.priority))
        if self.observer is not ignore:
            told = {"held": progress.held, "leader": leader, "num_prompt": len(ids)}
            self.observer("submit", request_id=request_id, **told)

    def _coordinator(self, progress: Progress) -> Coordinator:
        """Who looks nothing up waits for nobody, and nobody waits for it."""
        return self.coordinator if progress.state.sought else Independent()

    def _hasten(self, leader: str) -> None:
        """A leader is as urgent as the most urgent of those who wait for it."""
        coordinator = self._coordinator(self._live[leader])
        names = [leader, *coordinator.waiting_for(leader)]
        priority = min(self._live[name].state.request.priority for name in names)
        self.scheduler.set_priority(self._live[leader].state, priority)

    def has_unfinished(self) -> bool:
        """Whether any request is still to be worked on, or to be reported."""
        return bool(self._requests or self._untold)

    def unfinished(self) -> list[str]:
        """The ids of these requests, also of one whose `submit` was cut short."""
        self._mend()
        return [*(self._requests | self._untold)]


# %% [markdown]
# Three that do not pass, in a pool of 8 pages and with the toy's vocabulary:

# %% name="door"
engine = make_engine(8)
for ids, max_tokens in (([], 1), ([1, 50_000], 1), ([1] * 96, 34)):
    try:
        engine.submit(ids, SamplingParams(max_tokens=max_tokens))
    except ValueError as error:
        print(error)

# %% [markdown]
# ### The loop
#
# Schedule, run, commit, publish. Everything else in this book hangs on one of these four
# calls. (`_change` is a mark around whatever changes state; we come to it. The observer is told of
# the end of a step, with the pages in each state.)
#
# An output has all tokens so far, so one for each token costs the square of an answer's length. Who
# reads along wants that. Who does not (the simulations of [chapter 16](16_traffic.md)) says
# `streams=False`, and is told of a request once, at its end.


# %% export="engine.py"
class Engine(Engine):
    def step(self) -> list[RequestOutput]:
        """One forward pass for those scheduled; the outputs of those that advanced."""
        with self._change():
            batch = self.scheduler.schedule()
        try:
            tokens = self.runner.run(batch) if batch else []
        except Exception:
            logger.exception("the forward pass failed; its %d requests end", len(batch))
            return self._report([self._end(c.request_id, "error") for c in batch])
        with self._change():
            advanced = self._commit(batch, tokens)
            self._publish(batch, advanced)
        return self._report(advanced)

    def _report(self, advanced: Sequence[Progress]) -> list[RequestOutput]:
        """Their outputs, and those of all that ended untold; then these are told."""
        if self.observer is not ignore:
            self.observer("step", **self.scheduler.cache.stats())
        streamed = advanced if self.streams else ()
        names = [p.name for p in streamed if p.name in self._requests]
        told = self._untold | {name: self._requests[name] for name in names}
        outputs = [self._output(family) for family in told.values()]
        self._untold = {}
        return outputs


# %% [markdown]
# **Commit**: the K/V are there; a chunk that sampled has a new token. Perhaps it was the last.


# %% export="engine.py"
class Engine(Engine):
    def _commit(
        self, batch: Sequence[Chunk], tokens: Sequence[int | None]
    ) -> list[Progress]:
        """Enter what the forward pass did; return the requests with a new token."""
        advanced = []
        for chunk, token in zip(batch, tokens, strict=True):
            progress = self._live[chunk.request_id]
            self.scheduler.commit(progress.state, chunk)
            self._note(progress, chunk, token)
            if token is not None:
                self._append(progress, token)
                advanced.append(progress)
        return advanced

    def _append(self, progress: Progress, token: int) -> None:
        progress.state.tokens.append(token)
        metrics = self._requests[progress.name][0].metrics
        if metrics.first_token_s is None:
            metrics.first_token_s = self.clock.now()
        progress.finish_reason = self._why_last(progress, token)


# %% [markdown]
# An end token is no part of the text, so the writer never sees it. Whoever named it or a stop
# string in the request is told which one it was; the model's own end tokens go without saying.


# %% export="engine.py"
class Engine(Engine):
    def _why_last(self, progress: Progress, token: int) -> str | None:
        """Why this output token is the last one; None if it is not."""
        state, params = progress.state, progress.state.request.params
        if token in self.limits.eos_token_ids and not params.ignore_eos:
            return "stop"
        if token in (params.stop_token_ids or ()):
            progress.stop_reason = token
            return "stop"
        try:
            progress.stop_reason = progress.writer.push(token)
        except Exception:  # it ends its own request and no other
            logger.exception("the text of a request cannot be written; it ends")
            return "error"
        if progress.stop_reason:
            return "stop"
        return "length" if state.num_output >= state.max_output else None


# %% [markdown]
# Logprobs, if they were asked for, lie on the chunk. After a preemption a prompt is computed
# again, perhaps in other chunks; each position is kept the first time.


# %% export="engine.py"
class Engine(Engine):
    def _note(self, progress: Progress, chunk: Chunk, token: int | None) -> None:
        """Keep the logprobs that a chunk brought, of each position once."""
        prompt = progress.prompt_logprobs
        for table in chunk.prompt_logprobs[len(prompt) - 1 - chunk.start :]:
            prompt.append(self._spell(progress, table))
        if token is not None and chunk.logprobs is not None:
            progress.logprobs.append(self._spell(progress, chunk.logprobs))
            progress.cumulative_logprob += chunk.logprobs[token].logprob

    def _spell(self, progress: Progress, table: Logprobs) -> Logprobs:
        try:
            for token, entry in table.items():
                entry.decoded_token = progress.writer.piece(token)
        except Exception:  # it loses its own text and no other's
            logger.exception("a token of a request cannot be written")
        return table


# %% [markdown]
# **Publish**, in an order that matters. All that this step completed becomes visible first, and
# only then those are told who waited for it. Whoever is told can rely on finding it.


# %% export="engine.py"
class Engine(Engine):
    def _publish(self, batch: Sequence[Chunk], advanced: Sequence[Progress]) -> None:
        """First everything becomes visible, then those who waited for it are told."""
        for chunk in batch:
            self._show(self._live[chunk.request_id])
        for progress in advanced:
            self._tell(progress)
        for progress in advanced:
            if progress.finish_reason:
                self._retire(progress)

    def _retire(self, progress: Progress) -> None:
        """What has ended waits in `_untold` until its output has been written."""
        family = self._requests[progress.name]
        self._untold[progress.name] = family
        del self._live[progress.state.request.request_id]
        if not any(p.state.request.request_id in self._live for p in family):
            del self._requests[progress.name]

    def _show(self, progress: Progress) -> None:
        state, reason = progress.state, progress.finish_reason
        num_visible = (
            state.num_committed if reason else self.publisher.num_visible(state)
        )
        assert state.lease is not None
        self.scheduler.cache.publish(state.lease, state.tokens, num_visible)
        if reason:
            self.scheduler.finish(state, reason)


# %% export="engine.py"
class Engine(Engine):
    def _tell(self, progress: Progress) -> None:
        request_id = progress.state.request.request_id
        coordinator = self._coordinator(progress)
        if progress.state.num_output == 1:
            self._release(coordinator.prefilled(request_id), request_id)
            self._hasten(request_id)
        if progress.finish_reason:
            self._release(coordinator.finished(request_id), request_id)

    def _release(self, request_ids: Sequence[str], leader: str) -> None:
        """Let followers of a leader run: they queue at their place of arrival."""
        for request_id in request_ids:
            self._live[request_id].held = False
            self.scheduler.add(self._live[request_id].state)
        if request_ids:
            self.observer("release", request_ids=request_ids, leader=leader)


# %% [markdown]
# ### Ends before the end
#
# A caller hangs up: waiting, between two chunks, while decoding, or twice. A forward pass fails.
# Both are one method. Complete pages stay findable, the rest goes back; what a failed pass wrote
# was never committed, so nobody will find it.


# %% export="engine.py"
class Engine(Engine):
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it is; None if it is unknown or has ended."""
        self._mend()
        for progress in reversed(self._requests.get(request_id, ())):
            if progress.finish_reason is None:  # followers first
                self._end(progress.state.request.request_id, "abort")
        if request_id not in self._untold:
            return None
        output = self._output(self._untold[request_id])
        del self._untold[request_id]
        return output

    def _end(self, request_id: str, reason: str) -> Progress:
        """End a request before its time, and give back everything that it holds."""
        progress = self._live[request_id]
        coordinator = self._coordinator(progress)
        with self._change():
            progress.finish_reason = reason
            if progress.held:
                self.observer("finish", request_id=request_id, reason=reason)
            else:
                self.scheduler.finish(progress.state, reason)
            leader = coordinator.leader_of(request_id)
            heir, released = coordinator.aborted(request_id)
            if leads := heir or leader:  # by whom it is waited for has changed
                self._hasten(leads)
            self._release([*([heir] if heir else []), *released], request_id)
            self._retire(progress)
        return progress


# %% [markdown]
# What the caller gets is a copy: it may do with it what it likes. `explain` is a seam: chapter 13
# hangs somebody there who can tell why so much of the prompt was reused and no more.


# %% tags=["hide-input"] export="engine.py"
class Engine(Engine):
    def _text(self, progress: Progress) -> str:
        try:
            return progress.writer.text(progress.finish_reason is not None)
        except Exception:  # it loses its own text and no other's
            logger.exception("the text of a request cannot be written")
            return ""

    def _completion(self, index: int, progress: Progress) -> CompletionOutput:
        state, reason = progress.state, progress.finish_reason
        output_ids = state.tokens[len(state.request.prompt_token_ids) :].tolist()
        done = CompletionOutput(index, self._text(progress), output_ids, reason)
        done.stop_reason = progress.stop_reason
        if state.request.params.logprobs is not None:
            done.logprobs = [*progress.logprobs]
            done.cumulative_logprob = progress.cumulative_logprob
        return done

    def _output(self, family: Sequence[Progress]) -> RequestOutput:
        head, finished = family[0], all(p.finish_reason for p in family)
        if head.prompt_ids is None:
            head.prompt_ids = list(head.state.request.prompt_token_ids)
        prompt_ids = head.prompt_ids  # the same list in every output
        came, first = head.metrics.arrival_s, head.metrics.first_token_s
        metrics = RequestMetrics(came, first, self.clock.now() if finished else None)
        done = [self._completion(i, progress) for i, progress in enumerate(family)]
        cached = head.state.num_cached_tokens or 0
        told = RequestOutput(head.name, prompt_ids, cached, done, finished, metrics)
        told.reuse = self.explain(head.state)
        if head.state.request.params.prompt_logprobs is not None:
            told.prompt_logprobs = [*head.prompt_logprobs]
        return told


# %% [markdown]
# Below, a caller hangs up after two of three chunks, and then once more, to be sure:

# %% name="hangup"
engine = make_engine(22, max_batch_tokens=16)
name = engine.submit([1] * 40, SamplingParams(max_tokens=8))
for _ in range(2):
    engine.step()
print(engine.abort(name).outputs[0].finish_reason, "· again:", engine.abort(name))
print({key: size for key, size in engine.stats().items() if "pages" in key and size})

# %% [markdown]
# The two pages that were complete stay findable, and nothing is private any more.
#
# ### A change that is cut short
#
# There is a third way to end too early: somebody presses Ctrl-C. During the forward pass that is
# harmless, for nothing has changed yet. But it may strike *between* two lines of a change: the
# pages are taken and the request does not know it, or a node of the tree is half split. No
# order of the lines makes every such moment whole. So each change carries a mark, and a mark
# that is still there when the next change begins means: trust nothing. All requests end,
# and the cache starts over. A policy of your own that raises in the middle of a change is
# treated in the same way.


# %% export="engine.py"
class Engine(Engine):
    @contextmanager
    def _change(self) -> Iterator[None]:
        """Around each change of state: one that is cut short leaves its mark."""
        self._mend()
        self._cut_short = True
        yield
        self._cut_short = False

    def _mend(self) -> None:
        """After a change that was cut short every request ends, no page is trusted."""
        if not self._cut_short:
            return
        self.scheduler.start_over()
        self.coordinator.start_over()
        for progress in chain.from_iterable(self._requests.values()):
            progress.finish_reason = progress.finish_reason or "error"
        for request_id in self._live:
            self.observer("finish", request_id=request_id, reason="error")
        self._untold |= self._requests
        self._requests, self._live = {}, {}
        self._cut_short = False


# %% export="engine.py"
class Engine(Engine):
    def stats(self) -> dict[str, int]:
        """Pages, queues and counters, by name."""
        held = sum(progress.held for progress in self._live.values())
        queues = self.scheduler.stats() | {"held": held}
        return self.scheduler.cache.stats() | queues | self.coordinator.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all published pages. False, and no change, while a request runs."""
        self._mend()
        return self.scheduler.cache.reset()


# %% [markdown]
# Two bad moments, on purpose. In the first engine the second pass raises, with request 0 running
# and request 1 waiting for its slot. In the second one Ctrl-C strikes while pages are being
# published.


# %% name="bad"
from contextlib import suppress


class Failing(Toy):
    def run(self, chunks):
        tokens = super().run(chunks)
        if self.passes == 2:
            raise RuntimeError("a kernel failed")
        return tokens


def ctrl_c(kind, /, **details):
    if kind == "publish":
        engine.scheduler.cache.observer = ignore  # once is enough
        raise KeyboardInterrupt


ReadyEngine = Engine  # the cells above, from here on
logger.disabled = True  # it would log a traceback, with paths
for fault in ("a pass fails", "Ctrl-C"):
    engine = make_engine(22, ctrl_c if fault == "Ctrl-C" else ignore, max_running=1)
    engine.runner = Failing() if fault == "a pass fails" else engine.runner
    for i in range(2):
        engine.submit([i] * 32, SamplingParams(max_tokens=3))
    with suppress(KeyboardInterrupt):
        ended = run_all(engine)
    ended = run_all(engine) or ended
    print(f"{fault}:", [(o.request_id, o.outputs[0].finish_reason) for o in ended])
    print("  pages held:", engine.stats()["pages_private"], "private,", end=" ")
    print(engine.stats()["pages_pinned"], "pinned")

# %% [markdown]
# After the failed pass request 0 ends with an error, and request 1, which was not in that batch,
# ends as it should. After Ctrl-C nothing is trusted, so everybody ends with an error. In both
# cases nobody holds a page afterwards. (A test raises at *every* line of a submission, of four
# steps and of an abort, and asks for that each time.)
#
# ## Reuse depends on company
#
# The engine is complete. Back to reuse, with a sharper question: is it a property of the
# requests? Two identical prompts of 493 tokens again. The second comes later and later,
# and in the end strangers come in between.


# %% name="later" claims="V07"
def second_twin(steps_later: int, num_strangers: int = 0) -> RequestOutput:
    """The later one of two equal requests in 64 pages, with strangers in between."""
    engine = make_engine(64)
    engine.submit(list(range(493)), SamplingParams(max_tokens=40))
    for _ in range(steps_later):
        engine.step()
    for i in range(num_strangers):
        engine.submit([1000 + i] * 200, SamplingParams(max_tokens=8))
        run_all(engine)
    engine.submit(list(range(493)), SamplingParams(max_tokens=40))
    return run_all(engine)[-1]


for label, *moment in (
    ("in the same step", 0),
    ("one step later", 1),
    ("after its end", 40),
    ("after 4 strangers", 40, 4),
    ("after 8 strangers", 40, 8),
):
    print(f"{label:18} {second_twin(*moment).num_cached_tokens:3} tokens found")

# %% [markdown]
# In the same step the twin finds [0](#later) tokens, for nothing is published before a pass has
# succeeded. From the next step on it finds [480](#later), as long as nobody needs the memory. Then
# evictions eat the prefix from its tail: [240](#later) tokens are left after four strangers, [0](#later) after
# eight. A preempted request risks the same with its own prefix: request 2 in the 22 pages found
# [64](#short) of its 112 tokens.
#
# So it depends on *when* a batch is formed. It also depends on *who* is in it. Eight requests in
# four seats: four share a document of 512 tokens (L), four are short and alone (S). We
# change their order, and in the last line the budget, and nothing else.


# %% name="company" claims="V08 S15"
def serve(order: str, warm: bool, budget: int = 4096):
    """Tokens reused, hits among each batch let in, and lengths that a step attends to."""
    log, document = EventLog(), list(range(512))
    engine = make_engine(400, log, max_running=4, max_batch_tokens=budget)
    if warm:
        engine.submit(document, SamplingParams(max_tokens=1))
        run_all(engine)
        log.events.clear()
    for i, kind in enumerate(order):
        own = [1000 + i] * 32
        tokens = document + own if kind == "L" else own
        engine.submit(tokens, SamplingParams(max_tokens=32))
    reused = sum(output.num_cached_tokens for output in run_all(engine))
    hits = [event.details["cached"] > 0 for event in log.of("admit")]
    steps = [event.details["chunks"] for event in log.of("schedule")]
    lengths = [start + size for _, start, size in steps[20]]
    return reused, sum(hits[:4]), sum(hits[4:]), lengths


for warm in (False, True):
    for order in ("LSLSLSLS", "LLLLSSSS"):
        reused, first, then, lengths = serve(order, warm)
        print(
            f"{order} {'warm' if warm else 'cold'}: {reused:4} tokens reused,", end=" "
        )
        print(f"hits {first} of 4 and {then} of 4, a step attends to {lengths}")
print("LLLLSSSS cold, budget 256:", serve("LLLLSSSS", False, budget=256)[0], "reused")


# %% tags=["hide-input"]
def length_rows(order: str):
    for i, length in enumerate(serve(order, warm=True)[-1]):
        shared = 512 if length > 512 else 0
        cells = [(0, shared, "pinned", "the document")] if shared else []
        yield f"{order}, slot {i}", [*cells, (shared, length - shared, "private", "")]


draw_rows(
    [*length_rows("LSLSLSLS"), *length_rows("LLLLSSSS")],
    caption="What one decode step reads, a bar for each slot. In order of arrival (above) long and "
    "short ones share a step. Sorted by kind (below) the bars of a step are equally long.",
)

# %% [markdown]
# Look at the lengths first. In order of arrival one decode step attends to [564](#company) tokens in one
# seat and to [52](#company) in the next. The step ends when its longest seat has ended.
#
# Now the hits. With a warm cache each batch in order of arrival has [2](#company) hits, and a sorted one has
# [4](#company) or [0](#company). The hits of a batch thin out, and their sum stays: [2,048](#company) tokens both ways. With
# a cold cache the sum changes too, and not as one would guess. Sorting puts four L into one
# step, where none can find another: [0](#company) tokens reused, and [1,024](#company) in mixed order. Sorted and
# cut to a budget of 256, it is [1,536](#company), since the first L is computed before the others are let
# in. The requests, the cache and the pool are the same; the shape of the batches decides what is
# reused.
#
# ## Three reasons why a shared prefix brings nothing
#
# We can now say why a good hit rate may leave the TTFT where it was, and why shared prompts may
# leave no trace in the hit rate. In each line below a request shares its beginning with another.


# %% name="reasons" claims="S05"
def newcomer_sharing(num_shared: int, num_rivals: int = 0) -> RequestOutput:
    """It shares tokens with a prompt that is cached; rivals with that prompt run."""
    engine = make_engine(341, admission="reserve")
    engine.submit(prompt, SamplingParams(max_tokens=1))
    run_all(engine)
    for _ in range(num_rivals):
        engine.submit(prompt, SamplingParams(max_tokens=128))
    own = [7] * (929 - num_shared)
    engine.submit(prompt[:num_shared] + own, SamplingParams(max_tokens=128))
    return run_all(engine)[-1]


for label, output in {
    "nothing in the way": newcomer_sharing(929),
    "moment: in one step with its twin": twins(max_running=2)[-1],
    "admission: reserve does not let it in": newcomer_sharing(929, num_rivals=7),
    "policy: 15 tokens shared, pages of 16": newcomer_sharing(15),
    "policy: evicted": second_twin(40, num_strangers=8),
}.items():
    cached, ttft = output.num_cached_tokens, output.metrics.ttft_s
    print(f"{label:37} cached {cached:3}, TTFT {ttft:3} steps")

# %% [markdown]
# The *moment*: it was scheduled before the pages were there. *Admission*: it hits [928](#reasons) tokens, and
# the rule lets it in only after [129](#reasons) steps. *Policy*: the match is cut to whole pages,
# or what it would have matched is gone. A counter of hits calls the first and the last a miss
# and the second a success. A better lookup would change none of them.
#
# ## Does company change an answer?
#
# It may change when a token is computed. It must not change which one: each chunk reads its own
# past and nobody else's. (Sums in another batch are rounded in another order, so logits may
# differ in their last digits, and two tokens that are equally likely to so many digits could
# change places.) With the real model of chapter 6, three prompts one after the other, and then
# together in so few pages that one of them is preempted:

# %% name="answers"
import torch

from minivllm.loader import load_model, open_checkpoint
from minivllm.runner import ModelRunner
from minivllm.tokenizer import load_tokenizer

checkpoint = open_checkpoint("smollm2")
decoder = load_model(checkpoint, torch.device("cpu"), torch.float32)
tokenizer = load_tokenizer(checkpoint)
beginnings = ["The capital of France is", "Water boils at", "Birds can fly because"]


def answers(num_pages: int, max_running: int) -> list[str]:
    cache = PrefixCache(num_pages, page_size=4)
    scheduler = Scheduler(cache, max_running=max_running)
    runner = ModelRunner(decoder, num_pages, page_size=4)
    engine = Engine(runner, scheduler, Limits(decoder.config.vocab_size, 256))
    for text in beginnings:
        engine.submit(tokenizer.encode(text).ids, SamplingParams(max_tokens=6))
    outputs = run_all(engine)
    print(f"{max_running} at a time: {engine.stats()['preemptions']} preempted")
    return [tokenizer.decode(o.outputs[0].token_ids) for o in outputs]


# %% name="same"
alone, together = answers(64, max_running=1), answers(7, max_running=3)
print("same answers:", alone == together, "·", together)

# %% [markdown]
# ## What still goes wrong
#
# This chapter's clock counts steps, and a step of [303](#budget) tokens counts like a step of four. Nobody
# who waits would agree. Chapter 8 gives a step a length, without sleeping and without a GPU.
#
# And the twins of the prologue still meet in one step and find nothing. Publishing after a
# pass is too late for them. Chapter 9 asks what can be published earlier, chapter 10 whether one of
# them should wait, and chapter 12 who should ride together.
#
# ## Exercises
#
# ### Exercise 1
#
# The budget is 8 tokens a step. A prompt of 80 tokens arrives, and right behind it one of 4. In
# which step (counting from 1) is the first token of the short one computed, and how many of its
# tokens go into that step?

# %% tags=["solution"]
log = EventLog()
engine = make_engine(64, log, max_batch_tokens=8)
engine.submit([1] * 80, SamplingParams(max_tokens=4))
engine.submit([2] * 4, SamplingParams(max_tokens=4))
run_all(engine)
steps = [event.details["chunks"] for event in log.of("schedule")]
first_step = next(i for i, step in enumerate(steps, 1) if len(step) == 2)
num_tokens = steps[first_step - 1][1][2]
print("step", first_step, "computes", steps[first_step - 1])

# %%
assert (first_step, num_tokens) == (11, 4)

# %% [markdown]
# Ten steps go to the long prompt, which runs and is served first. In step 11 it decodes one token, and
# seven places of the budget are left.
#
# ### Exercise 2
#
# The cache holds a prompt of 121 tokens. With a budget of 127 two requests arrive: a cold one of
# 1,068 tokens, and behind it that prompt once more. Write a `Grouping` that lets in first who
# has the fewest tokens left to compute. What is the TTFT of both, in steps, in order of
# arrival and in yours? Who loses?


# %% tags=["solution"]
class FewestToCompute(ArrivalOrder):
    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache

    def plan(self, waiting):
        return sorted(waiting, key=self.num_to_compute)

    def num_to_compute(self, state):
        return len(state.tokens) - self.cache.find(state.tokens).matched_len


def ttfts(make_grouping) -> list[int]:
    engine = make_engine(341, max_batch_tokens=127)
    engine.submit([5] * 121, SamplingParams(max_tokens=1))
    run_all(engine)
    engine.scheduler.grouping = make_grouping(engine.scheduler.cache)
    engine.submit([6] * 1068, SamplingParams(max_tokens=4))
    engine.submit([5] * 121, SamplingParams(max_tokens=4))
    return [output.metrics.ttft_s for output in run_all(engine)]


in_order, fewest = ttfts(lambda cache: ArrivalOrder()), ttfts(FewestToCompute)
print("in order of arrival:", in_order, "· fewest first:", fewest)

# %%
assert (in_order, fewest) == ([9, 9], [9, 1])

# %% [markdown]
# Nobody loses a step: the nine uncached tokens of the short one fit into what the long one's last
# step leaves over. But with an endless stream of warm requests the cold one would never
# begin. Chapter 12 needs a bound.
#
# ### Exercise 3
#
# A preempted request publishes its complete pages. An engine that frees them instead would be
# a line shorter. In the run of the three requests in 22 pages, under `PublishAtFinish`, how many
# tokens are computed again with the chapter's `preempt`, and how many with the short one?


# %% tags=["solution"]
class Discarding(Scheduler):
    def preempt(self, state: RequestState) -> None:
        state.num_committed = 0  # so that nothing counts as complete
        super().preempt(state)


def recomputed_with(kind: type[Scheduler]) -> int:
    engine = make_engine(22, publisher=PublishAtFinish())
    engine.scheduler = kind(engine.scheduler.cache)
    for i in range(3):
        engine.submit([i] * 96, SamplingParams(max_tokens=40))
    run_all(engine)
    return engine.stats()["recomputed_tokens"]


published, discarded = recomputed_with(Scheduler), recomputed_with(Discarding)
print(published, "and", discarded)

# %%
assert (published, discarded) == (48, 112)
