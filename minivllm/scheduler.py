# Exported from chapters/07_engine.py (0524830c): edit the chapter.
"""Who runs in the next step, with how many tokens, and in which pages.

Requests join and leave at every step (Orca, 2022), prompts are cut to a budget of
tokens (Sarathi, 2023), and who must give way computes again later (vLLM, 2023).
"""

from __future__ import annotations

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
    tokens: array[int]
    max_output: int
    priority: int
    lease: Lease | None = None
    num_committed: int = 0
    num_cached_tokens: int | None = None
    high_water: int = 0
    num_passed: int = 0  # steps in which somebody behind it was admitted first

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
    def sought(self) -> array[int]:
        """The tokens to look up; none if the whole prompt's logits are wanted."""
        scored = self.request.params.prompt_logprobs is not None
        return array("i") if scored else self.tokens

    @property
    def order(self) -> tuple[int, int]:
        """The place in every queue: priority, then arrival."""
        return (self.priority, self.request.arrival)


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

    def _reservable(self, state: RequestState) -> bool:
        return self._num_charged + self._charge(state) <= self.cache.pool.num_pages

    def _charge(self, state: RequestState) -> int:
        """Pages that `reserve` keeps for a request, from its first step to its last."""
        return self.cache.pages_for(state.footprint_tokens)

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
