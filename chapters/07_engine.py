# %% [markdown]
# # 7. Continuous batching
#
# Eight requests arrive. Each asks for a prompt of 929 tokens that is cached to the last
# page, and for 128 output tokens. There is a pool of 341 pages. All eight hit. How many
# of them run now?
#
# If "hit" meant "runs now", eight. Two engines that people use answer differently, and
# the difference is not in the cache. Somebody has to decide who runs, and that somebody
# counts pages. This chapter builds it, and the loop around it.
#
# ## One request at a time, or all
#
# A decode step reads every weight of the model from memory to produce one token for one
# request. It could produce one for each of eight requests with the same read. So a step
# should carry as many requests as possible, and they should not have to start and end
# together: whoever has finished leaves after this step, whoever waits gets in at the
# next. That is *continuous batching*, and it means that every step is planned afresh.
#
# A request moves between two lists: *waiting* and *running*. What changes while it does
# so is its state, and the scheduler owns it.

# %% export="scheduler.py"
"""Who runs in the next step, with how many tokens, and in which pages."""

from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from minivllm.batch import Chunk
from minivllm.events import Observer, ignore
from minivllm.pages import OutOfPages
from minivllm.prefix_cache import Lease, PrefixCache
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
    lease: Lease | None = None
    num_committed: int = 0
    num_cached_tokens: int | None = None
    high_water: int = 0

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
    def order(self) -> tuple[int, int]:
        """The place in every queue: priority, then arrival."""
        return self.request.order


# %% [markdown]
# `num_pending` hides a useful fact. A request in the middle of its prompt has many pending
# tokens, a decoding one has exactly one, a preempted one that comes back has many again.
# For the scheduler they are all the same: requests with pending tokens.
#
# ## What may be exchanged
#
# Two questions have more than one good answer: who is admitted next, and who must go when
# memory runs out. Chapter 12 will answer them in other ways. Until then: in order of
# arrival, and the last to come is the first to go.


# %% export="scheduler.py"
class Grouping(Protocol):
    """Who is admitted next, and who is preempted first. Both lists are in order."""

    def pick(self, waiting: Sequence[RequestState]) -> RequestState:
        """Choose the next request to admit; `waiting` is not empty."""

    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """Choose the request to preempt, among those not served yet in this step."""


class ArrivalOrder:
    """First come, first served; last come, first preempted."""

    def pick(self, waiting: Sequence[RequestState]) -> RequestState:
        """The head of the queue."""
        return waiting[0]

    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """The last to have come among the least important."""
        return unserved[-1]


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


# %% [markdown]
# ## A step is planned
#
# The step has a budget: at most `max_batch_tokens` new tokens, so that a long prompt cannot
# hold up those who decode for longer than such a step takes. Running requests are served
# first, in order. A prompt that is longer than the budget is cut: this is *chunked prefill*,
# and it falls out of the rule "serve as many pending tokens as the budget allows". Those who
# come *behind* a long prompt wait for it, though; and a running request is never sent away
# for a more important one that waits.

# %% export="scheduler.py"
ADMISSIONS = ("optimistic", "reserve")


class Scheduler:
    """Two queues, in the order of service, and the budget of a step."""

    def __init__(
        self,
        cache: PrefixCache,
        max_running: int = 64,
        max_batch_tokens: int = 2048,
        admission: str = "optimistic",
        grouping: Grouping | None = None,
        observer: Observer = ignore,
    ) -> None:
        if max_running < 1 or max_batch_tokens < 1:
            raise ValueError("max_running and max_batch_tokens must be at least 1")
        if admission not in ADMISSIONS:
            raise ValueError(
                f"admission must be one of {ADMISSIONS}, not {admission!r}"
            )
        self.cache = cache
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.admission = admission
        self.grouping = grouping or ArrivalOrder()
        self.observer = observer
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.counters = Counters()


# %% [markdown]
# Now the planning itself. First those who run, then, if none of them had to be sent away,
# those who wait.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def add(self, state: RequestState) -> None:
        """Queue a request at its place."""
        insort(self.waiting, state, key=lambda s: s.order)

    def schedule(self) -> list[Chunk]:
        """Plan one step, pages included: continue what runs, then admit what fits."""
        preemptions = self.counters.preemptions
        batch = self._continue_running()
        if self.counters.preemptions == preemptions:  # pages are short: let nobody in
            batch += self._admit(
                self.max_batch_tokens - sum(len(c.token_ids) for c in batch)
            )
        sizes = [(c.request_id, c.start, len(c.token_ids)) for c in batch]
        self.observer("schedule", chunks=sizes)
        return batch

    def _continue_running(self) -> list[Chunk]:
        batch: list[Chunk] = []
        budget = self.max_batch_tokens
        for state in list(self.running):
            num_tokens = min(state.num_pending, budget) if state.lease else 0
            if num_tokens == 0 or not self._make_room(state, num_tokens):
                break  # no budget left, or from here on everyone was preempted
            batch.append(self._chunk(state, num_tokens))
            budget -= num_tokens
        return batch


# %% [markdown]
# A chunk is chapter 5's description of the work. It *samples* if it reaches the last token
# that is known: then the forward pass tells what comes next.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _chunk(self, state: RequestState, num_tokens: int) -> Chunk:
        assert state.lease is not None
        start, end = state.num_committed, state.num_committed + num_tokens
        return Chunk(
            state.request.request_id,
            state.tokens[start:end],
            start,
            tuple(state.lease.pages),
            state.lease.num_shared,
            samples=end == len(state.tokens),
            params=state.request.params,
        )


# %% [markdown]
# ## Too few pages
#
# A decoding request needs a new page every 16 tokens. When none is free and the cache has
# nothing left to evict, somebody is *preempted*: it gives all its pages back and returns
# to the waiting queue, to compute them again later.
#
# That sounds worse than it is. Giving pages back means *publishing* the complete ones, so
# they stay findable until somebody needs the memory. If the request comes back soon it
# finds most of its own past in the prefix cache.
#
# Running requests are served in order, and a victim is chosen among those that have not been
# served yet: the one that needs pages now, and those after it. So whoever is preempted is
# never in this step's batch. By default it is the last of them. If that is the very request
# that we are trying to serve, the step ends there.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _make_room(self, state: RequestState, num_tokens: int) -> bool:
        """Get pages for a running request; False if it was itself the victim."""
        assert state.lease is not None
        while True:
            try:
                self.cache.grow(state.lease, state.num_committed + num_tokens)
                return True
            except OutOfPages:
                unserved = self.running[self.running.index(state) :]
                victim = self.grouping.victim(unserved)
                self._preempt(victim)
                if victim is state:
                    return False

    def _preempt(self, state: RequestState) -> None:
        """Back to the queue, at its old place; complete pages stay findable."""
        self._leave(state)
        state.num_committed = 0
        self.counters.preemptions += 1
        self.observer("preempt", request_id=state.request.request_id)
        self.add(state)


# %% [markdown]
# Leaving a queue is one thing for all: preempted, finished, aborted.


# %% export="scheduler.py"
class Scheduler(Scheduler):
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
# ## Who gets in
#
# Admission is strict: if the next request does not fit, nobody overtakes it. Otherwise a
# stream of small requests could keep a large one waiting for ever.
#
# What must fit? Here the two schools part. *Optimistic* admission (vLLM, SGLang) wants
# pages for the first chunk only, hopes that not everybody will use all output tokens,
# and preempts when it hoped too much. *Reserve* admission (mini-vllm-rs, mini-sglang)
# adds up everybody's largest possible footprint, and lets nobody in who could make it
# overflow. It never preempts, and a cache hit does not help: if B were credited for what it
# shares with A, A's end would take away the reservation for pages that B still holds.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _admit(self, budget: int) -> list[Chunk]:
        batch: list[Chunk] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            state = self.grouping.pick(self.waiting)
            num_tokens = self._try_admit(state, budget)
            if num_tokens == 0:
                break
            batch.append(self._chunk(state, num_tokens))
            budget -= num_tokens
        return batch

    def _try_admit(self, state: RequestState, budget: int) -> int:
        """Start a lease if the request fits; the size of its first chunk, or 0."""
        if self.admission == "reserve" and not self._reservable(state):
            return 0
        match = self.cache.find(state.tokens, state.request.extra_key)
        cached = min(match.matched_len, len(state.tokens) - 1)
        num_tokens = min(len(state.tokens) - cached, budget)
        try:
            lease = self.cache.acquire(match, cached + num_tokens)
        except OutOfPages:
            return 0
        self.waiting.remove(state)
        insort(self.running, state, key=lambda s: s.order)
        state.lease, state.num_committed = lease, cached
        self._count_admission(state, cached)
        return num_tokens


# %% [markdown]
# The reservation counts the worst case of everybody who runs, and of the one who wants in. And
# an admitted request is counted, once in its life: when it comes back after a preemption it
# may find its own pages, and that is no hit.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def _reservable(self, state: RequestState) -> bool:
        pages = (
            self.cache.pages_for(s.footprint_tokens) for s in [*self.running, state]
        )
        return sum(pages) <= self.cache.pool.num_pages

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
# `len(state.tokens) - 1` is the cap of chapter 5: even if everything is cached, one token
# is computed, for its logits.
#
# After the forward pass has succeeded, and only then, its tokens are committed. What is
# counted where decides whether a report tells the truth. A token that is computed again
# after a preemption is no prefill token. If its page was found again, that is no hit.


# %% export="scheduler.py"
class Scheduler(Scheduler):
    def commit(self, state: RequestState, chunk: Chunk) -> None:
        """The forward pass wrote this chunk's K/V: count it and move on."""
        fresh = max(chunk.start, min(state.high_water, chunk.end))
        prompt_end = len(state.request.prompt_token_ids)
        self.counters.recomputed_tokens += fresh - chunk.start
        self.counters.prefill_tokens += max(0, min(chunk.end, prompt_end) - fresh)
        state.num_committed = chunk.end
        state.high_water = max(state.high_water, chunk.end)

    def stats(self) -> dict[str, int]:
        """Queue lengths and counters."""
        queues = {"running": len(self.running), "waiting": len(self.waiting)}
        return queues | asdict(self.counters)


# %% [markdown]
# ## The engine
#
# The engine ties the parts together. Around the scheduler and the runner there are
# seams, places where later chapters put something in without touching this one. Each has
# a plain default:
#
# - a **publisher** says after each step how many of a request's tokens others may find
#   (chapter 9). Here: none before the end, or all that are committed.
# - a **coordinator** may hold a request back because another is computing the same prompt
#   (chapter 10). Here: nobody waits for anybody.
# - a **clock** gives the time (chapter 8 brings one that does not tick by itself).
# - a **writer** turns tokens into text and notices stop strings (chapter 6 built one).
#   The engine itself speaks token ids only.

# %% export="engine.py"
"""The loop: schedule, run, commit, publish."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from minivllm.batch import Chunk
from minivllm.events import Observer, ignore
from minivllm.request import (
    CompletionOutput,
    ExtraKey,
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
        """One forward pass. If it raises, no chunk of the batch is committed."""


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
# Text is somebody else's business. The engine feeds tokens to a writer and asks whether it has
# seen enough.


# %% export="engine.py"
class Writer(Protocol):
    """The text of one request."""

    def push(self, token_id: int) -> bool:
        """Take an output token; True if the text is complete (a stop string)."""

    def text(self, finished: bool) -> str:
        """The text so far."""


class NoText:
    """The writer of an engine without a tokenizer."""

    def push(self, token_id: int) -> bool:
        """Never stop."""
        return False

    def text(self, finished: bool) -> str:
        """Nothing."""
        return ""


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
# The coordinator's seam is the one that chapter 10 will fill. A request is admitted as a
# *leader*, which runs, or as a *follower*, which is held until the leader's work is there;
# and the coordinator hears of everything that could end a wait.


# %% export="engine.py"
class Coordinator(Protocol):
    """Who waits for whom. Returned ids are followers that may be scheduled now."""

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

    def finished(self, request_id: str) -> list[str]:
        """Nobody waited."""
        return []

    def aborted(self, request_id: str) -> tuple[str | None, list[str]]:
        """Nobody follows."""
        return None, []


# %% [markdown]
# What can be refused is refused at the door. A prompt that fills the whole context leaves
# no room for an answer; a token id that the model does not have would crash a GPU kernel
# and everybody's requests with it; a request that needs more pages than the pool has
# would wait for ever, and everybody behind it as well.


# %% export="engine.py"
@dataclass(frozen=True)
class Limits:
    """What the model accepts, and where it ends by itself."""

    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Progress:
    """What the engine remembers of a live request, beside the scheduler's state."""

    state: RequestState
    writer: Writer
    metrics: RequestMetrics
    held: bool = False
    finish_reason: str | None = None


# %% [markdown]
# The engine holds the parts, and remembers of each live request what nobody else does: its
# text so far, its times, why it ended.


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
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.publisher = publisher or PublishEachStep()
        self.coordinator = coordinator or Independent()
        self.clock = clock or WallClock()
        self.writers = writers or (lambda prompt_ids, params: NoText())
        self.observer = observer
        self._live: dict[str, Progress] = {}
        self._num_submitted = 0


# %% [markdown]
# The checks at the door:


# %% export="engine.py"
class Engine(Engine):
    def check(self, token_ids: TokenIds, params: SamplingParams) -> int:
        """How many output tokens a request may have; `ValueError` if it cannot run."""
        size, context = len(token_ids), self.limits.max_context
        if size == 0:
            raise ValueError("the prompt is empty")
        for ids in (token_ids, params.stop_token_ids or ()):
            self._check_ids(ids)
        if size >= context:
            raise ValueError(
                f"the prompt has {size} tokens and the model's context {context}: "
                "no room for an output token"
            )
        if params.max_tokens is None:  # as far as context and pool reach
            pool = self.scheduler.cache.pool
            room = max(1, pool.num_pages * pool.page_size - size + 1)
            max_output = min(context - size, room)
        else:
            max_output = min(params.max_tokens, context - size)
        self._check_footprint(size + max_output - 1)
        return max_output

    def _check_ids(self, token_ids: TokenIds) -> None:
        last_id = self.limits.vocab_size - 1
        if token_ids and (min(token_ids) < 0 or max(token_ids) > last_id):
            wrong = next(i for i in token_ids if not 0 <= i <= last_id)
            raise ValueError(
                f"token id {wrong} is not in 0 to {last_id}, the vocabulary"
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
# Whoever passes them gets an id and a place in the queue, unless the coordinator holds it
# back.


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
        ids, params = (
            encode_ids(token_ids)[:],
            params or SamplingParams(),
        )  # our own copy
        max_output = self.check(ids, params)
        check_extra_key(extra_key)
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, not {priority!r}")
        request_id, now = str(self._num_submitted), self.clock.now()
        number = self._num_submitted
        request = Request(request_id, ids, params, extra_key, priority, number, now)
        state = RequestState(request, ids[:], max_output)
        progress = Progress(state, self.writers(ids, params), RequestMetrics(now))
        progress.held = self.coordinator.admit(request_id, ids, extra_key) == "follower"
        self._live[request_id] = progress
        self._num_submitted += 1
        if not progress.held:
            self.scheduler.add(state)
        self.observer("submit", request_id=request_id, held=progress.held)
        return request_id

    def has_unfinished(self) -> bool:
        """Whether any request is still to be worked on."""
        return bool(self._live)


# %% [markdown]
# ## The loop
#
# Here it is: schedule, run, commit, publish. Everything else in this book hangs on one of
# these four lines.


# %% export="engine.py"
class Engine(Engine):
    def step(self) -> list[RequestOutput]:
        """One forward pass for those scheduled; the outputs of those that advanced."""
        batch = self.scheduler.schedule()
        if not batch:
            return []
        try:
            tokens = self.runner.run(batch)
        except Exception:
            logger.exception("the forward pass failed; its %d requests end", len(batch))
            return [self._end(self._live[c.request_id], "error") for c in batch]
        advanced = self._commit(batch, tokens)
        self._publish(batch, advanced)
        return [self._output(progress) for progress in advanced]


# %% [markdown]
# If the forward pass raises, nothing of it is committed; its requests end with an error,
# and their pages go back. Requests that were not in the batch go on (we will see it).
#
# Committing means: the K/V are there; the new token, if there is one, is known; maybe it
# was the last.


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
            if token is not None:
                self._append(progress, token)
                advanced.append(progress)
        return advanced

    def _append(self, progress: Progress, token: int) -> None:
        state, now = progress.state, self.clock.now()
        state.tokens.append(token)
        if progress.metrics.first_token_s is None:
            progress.metrics = replace(progress.metrics, first_token_s=now)
        params = state.request.params
        ends = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        if self._push(progress, token):
            pass  # the writer decided
        elif token in ends or token in (params.stop_token_ids or ()):
            progress.finish_reason = "stop"
        elif state.num_output >= state.max_output:
            progress.finish_reason = "length"

    def _push(self, progress: Progress, token: int) -> bool:
        """Feed the writer; one that breaks ends its own request and no other."""
        try:
            if progress.writer.push(token):
                progress.finish_reason = "stop"
        except Exception:
            logger.exception("the text of a request cannot be written; it ends")
            progress.finish_reason = "error"
        return progress.finish_reason is not None


# %% [markdown]
# Publishing comes in an order that matters: everything that this step completed becomes
# visible first, and only then are those told who waited for it.


# %% export="engine.py"
class Engine(Engine):
    def _publish(self, batch: Sequence[Chunk], advanced: Sequence[Progress]) -> None:
        """First everything becomes visible, then those who waited for it are told."""
        for chunk in batch:
            progress = self._live[chunk.request_id]
            if progress.finish_reason is None:
                state = progress.state
                assert state.lease is not None
                num_visible = self.publisher.num_visible(state)
                self.scheduler.cache.publish(state.lease, state.tokens, num_visible)
        for progress in advanced:
            if progress.finish_reason:
                self._forget(progress)
        for progress in advanced:
            request_id = progress.state.request.request_id
            if progress.state.num_output == 1:
                self._release(self.coordinator.prefilled(request_id))
            if progress.finish_reason:
                self._release(self.coordinator.finished(request_id))

    def _release(self, request_ids: Sequence[str]) -> None:
        """Let followers run: they queue at their place of arrival."""
        for request_id in request_ids:
            self._live[request_id].held = False
            self.scheduler.add(self._live[request_id].state)


# %% [markdown]
# Ending has more ways than one: done, aborted by the caller at any moment, failed. All of
# them give the pages back through the same door.


# %% export="engine.py"
class Engine(Engine):
    def _forget(self, progress: Progress) -> None:
        """Give back everything that a request holds. Its end is now."""
        progress.metrics = replace(progress.metrics, finished_s=self.clock.now())
        if not progress.held:
            self.scheduler.finish(progress.state, str(progress.finish_reason))
        del self._live[progress.state.request.request_id]

    def _end(self, progress: Progress, reason: str) -> RequestOutput:
        """End a request before its time."""
        progress.finish_reason = reason
        self._forget(progress)
        leader, released = self.coordinator.aborted(progress.state.request.request_id)
        self._release([*([leader] if leader else []), *released])
        return self._output(progress)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it is; None if it is unknown or has ended."""
        progress = self._live.get(request_id)
        return None if progress is None else self._end(progress, "abort")

    def _output(self, progress: Progress) -> RequestOutput:
        state, finished = progress.state, progress.finish_reason is not None
        completion = CompletionOutput(
            0,
            progress.writer.text(finished),
            list(state.tokens[len(state.request.prompt_token_ids) :]),
            progress.finish_reason,
        )
        return RequestOutput(
            state.request.request_id,
            list(state.request.prompt_token_ids),
            state.num_cached_tokens or 0,
            [completion],
            finished,
            progress.metrics,
        )

    def stats(self) -> dict[str, int]:
        """Pages, queues and counters, by name."""
        held = sum(progress.held for progress in self._live.values())
        return self.scheduler.cache.stats() | self.scheduler.stats() | {"held": held}

    def reset_prefix_cache(self) -> bool:
        """Forget all published pages. False, and no change, while a request runs."""
        return self.scheduler.cache.reset()


# %% [markdown]
# ## Eight hits
#
# Back to the question. No model is needed for it: a runner that returns token 0 at once
# makes the same decisions as a real one, because scheduler, cache and engine are the
# real ones.

# %% name="eight" claims="S01"
from minivllm.events import EventLog
from minivllm.prefix_cache import PrefixCache


class ZeroRunner:
    """Every next token is 0."""

    def run(self, chunks):
        return [0 if chunk.samples else None for chunk in chunks]


def make_engine(num_pages: int, log=ignore, publisher=None, **options) -> Engine:
    cache = PrefixCache(num_pages, page_size=16, observer=log)
    scheduler = Scheduler(cache, observer=log, **options)
    return Engine(
        ZeroRunner(),
        scheduler,
        Limits(50_000, 8_192),
        publisher=publisher,
        observer=log,
    )


def run_all(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished():
        outputs += [output for output in engine.step() if output.finished]
        engine.scheduler.cache.check()
    return outputs


prompt = list(range(929))
for admission in ADMISSIONS:
    engine = make_engine(341, admission=admission)
    engine.submit(prompt, SamplingParams(max_tokens=1))
    run_all(engine)  # the cache is warm now
    for _ in range(8):
        engine.submit(prompt, SamplingParams(max_tokens=128))
    engine.step()
    running = len(engine.scheduler.running)
    cached = [output.num_cached_tokens for output in run_all(engine)]
    print(f"{admission:11} {running} run at once, cached: {cached}")

# %% [markdown]
# All [eight](#eight) hit [928](#eight) of 929 tokens under either rule. Under `reserve`, [five](#eight) run: each is
# charged (929 + 128 − 1) / 16 = 66 pages, and 341 // 66 = 5. The other three hit just as
# well, and wait. A hit says how much need not be computed. It does not say that there is
# room.
#
# ## Not enough pages, seen
#
# Three requests, 96 prompt tokens each, 40 output tokens, and a pool of 22 pages. They
# start well. Each will need 9 pages before the end, and 27 is more than 22.

# %% name="short"
log = EventLog()
engine = make_engine(22, log, max_batch_tokens=128)
for i in range(3):
    engine.submit([i] * 96, SamplingParams(max_tokens=40))
outputs = run_all(engine)
print(
    {
        name: engine.stats()[name]
        for name in ("preemptions", "prefill_tokens", "recomputed_tokens", "hits")
    }
)

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows, rows_of_steps

steps = [event.details["chunks"] for event in log.of("schedule")]
rows = rows_of_steps(steps)
draw_rows(
    [(f"request {name}", row) for name, row in sorted(rows.items())],
    caption="Steps from left to right, each as wide as its work. Cells with a number: prompt "
    "tokens are computed, or computed again; the others: one token a step. Request 2 came last "
    "and is preempted in the middle. It comes back, at its old place, when there is room.",
)

# %% [markdown]
# Request 2 was the last to come, so it went. When it came back it found complete pages of
# its own in the cache, as far as they had not been evicted meanwhile, and recomputed the
# rest:

# %%
print(
    [event.details for event in log.of("admit") if event.details["request_id"] == "2"]
)

# %% [markdown]
# The first admission found nothing, the second one some of its own past. And `hits` stayed at [0](#short), and must: no request ever used anybody else's work. Count the
# resumption as a hit, and this run reports a hit rate that it does not have.
#
# With `reserve` the same three requests never meet that trouble. They wait instead:

# %%
for admission in ADMISSIONS:
    log = EventLog()
    engine = make_engine(22, log, max_batch_tokens=128, admission=admission)
    for i in range(3):
        engine.submit([i] * 96, SamplingParams(max_tokens=40))
    run_all(engine)
    steps = sum(1 for _ in log.of("schedule"))
    print(f"{admission:11} {engine.stats()['preemptions']} preempted, {steps} steps")

# %% [markdown]
# ## A forward pass that fails
#
# One more promise. The runner below raises in its second pass, when request 0 is running alone;
# request 1 waits for its slot.


# %%
class FailingRunner(ZeroRunner):
    passes = 0

    def run(self, chunks):
        self.passes += 1
        if self.passes == 2:
            raise RuntimeError("a kernel failed")
        return super().run(chunks)


logger.disabled = True  # the engine logs the traceback; not here
engine = make_engine(22, max_running=1)
engine.runner = FailingRunner()
for i in range(2):
    engine.submit([i] * 32, SamplingParams(max_tokens=3))
for output in run_all(engine):
    print(
        output.request_id, output.outputs[0].finish_reason, output.outputs[0].token_ids
    )
print(engine.stats()["pages_private"], "pages held by nobody who lives")

# %% [markdown]
# ## The puzzle, in the loop
#
# The publisher decides when pages are findable. Two identical prompts, submitted together,
# under both of our rules:

# %% name="publishers"
for publisher in (PublishAtFinish(), PublishEachStep()):
    engine = make_engine(341, publisher=publisher)
    for _ in range(2):
        engine.submit(prompt, SamplingParams(max_tokens=4))
    outputs = run_all(engine)
    print(type(publisher).__name__, [o.num_cached_tokens for o in outputs])

# %% [markdown]
# [Zero and zero](#publishers), both times. They were admitted in the *same* step, and no rule that
# publishes after a step can help the second one. What can is the subject of chapters 9
# to 12.
#
# ## Exercise
#
# A budget of 8 tokens a step. A prompt of 80 tokens arrives, and right behind it one of 4.
# In which step (counting from 1) does the short one start, and why not earlier?

# %% tags=["solution"] name="budget"
log = EventLog()
engine = make_engine(64, log, max_batch_tokens=8)
engine.submit(list(range(80)), SamplingParams(max_tokens=4))
engine.submit(list(range(200, 204)), SamplingParams(max_tokens=4))
run_all(engine)
planned = [event.details["chunks"] for event in log.of("schedule")]
first_step = next(
    i for i, chunks in enumerate(planned, 1) if any(c[0] == "1" for c in chunks)
)
print("step", first_step, "→", planned[first_step - 1])

# %%
assert first_step == 11

# %% [markdown]
# Ten steps go to the long prompt, which is running and served first. In step [11](#budget) it decodes
# one token, and seven places of the budget are left for the short one.
