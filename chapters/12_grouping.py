# %% [markdown]
# # 12. Who rides together
#
# (to be written)

# %% export="grouping.py"
"""Who rides together: whom a step tries to admit, and in which order."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minivllm.radix import Match
from minivllm.request import ExtraKey, TokenIds
from minivllm.scheduler import ArrivalOrder, RequestState

Find = Callable[[TokenIds, ExtraKey], Match]  # `PrefixCache.find`


class LongestPrefix(ArrivalOrder):
    """Most cached tokens first, ties by arrival (after SGLang's longest prefix match).

    Looks at the first `window` requests that wait. Nobody is passed over in more than
    `max_passes` steps: then a request comes first among those of its priority.
    """

    def __init__(self, find: Find, max_passes: int = 64, window: int = 128) -> None:
        if max_passes < 0 or window < 1:
            raise ValueError("max_passes must be at least 0, window at least 1")
        self.find = find
        self.max_passes = max_passes
        self.window = window

    def plan(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """Those with the longest cached prefix first, in each priority."""
        seen = waiting[: self.window]
        due = [state for state in seen if self.is_due(state)]
        rest = [state for state in seen if not self.is_due(state)]
        rest.sort(key=lambda state: -self.num_cached(state))
        return sorted(due + rest, key=lambda state: state.priority)

    def num_cached(self, state: RequestState) -> int:
        """Tokens of a request that the index holds now."""
        return self.find(state.tokens, state.request.extra_key).matched_len

    def is_due(self, state: RequestState) -> bool:
        """Whether a request has been passed over often enough."""
        return state.num_passed >= self.max_passes


# %% export="grouping.py"
TIERS = (1_000, 8_000)  # blocks: with 16 tokens in each, 16K and 128K tokens


class Estimate(NamedTuple):
    """How many blocks a waiting request may share, and the tier that makes of it."""

    state: RequestState
    num_blocks: int
    tier: int


# %% export="grouping.py"
from itertools import pairwise

from minivllm.events import Observer, ignore
from minivllm.hashing import token_bytes
from minivllm.radix import shared_pages


class SharedPrefix(LongestPrefix):
    """One tier of shared prefix lengths a step, the one with most to share first.

    `tiers` are limits in blocks of `page_size` tokens, rising. A request's blocks are
    those of its longest prefix that is cached, or common with another one that waits:
    an estimate, for what is cached may go, and the first of a group finds nothing. Made
    anew for every step; nothing is kept, and nobody waits for company.
    """

    def __init__(
        self,
        find: Find,
        page_size: int,
        tiers: Sequence[int] = TIERS,
        max_passes: int = 64,
        window: int = 128,
        observer: Observer = ignore,
    ) -> None:
        super().__init__(find, max_passes, window)
        self.page_size = page_size
        self.tiers = check_tiers(tiers)
        self.observer = observer

    def plan(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """Who is due, then one tier of the most urgent, most blocks first."""
        estimates = self.estimate(waiting[: self.window])
        self.observer("plan", estimates=estimates)
        urgent = [e for e in estimates if e.state.priority == waiting[0].priority]
        due = [e for e in urgent if self.is_due(e.state)]
        tier = max((e.tier for e in due[:1] or urgent), default=0)
        group = [e for e in urgent if e.tier == tier and e not in due]
        group.sort(key=lambda e: -e.num_blocks)
        return [e.state for e in due + group]


def check_tiers(tiers: Sequence[int]) -> tuple[int, ...]:
    """The limits as a tuple. `ValueError` unless they are ints >= 1 that rise."""
    limits = tuple(tiers)
    whole = all(type(n) is int and n > 0 for n in limits)
    if not whole or any(one >= other for one, other in pairwise(limits)):
        raise ValueError(f"tiers must be rising whole numbers >= 1, not {tiers!r}")
    return limits


# %% export="grouping.py"
class SharedPrefix(SharedPrefix):
    def estimate(self, waiting: Sequence[RequestState]) -> list[Estimate]:
        """How many blocks each of these may share, in the order given."""
        common = self._common(waiting)
        cached = {state: self.num_cached(state) // self.page_size for state in waiting}
        blocks = [(state, max(cached[state], common[state])) for state in waiting]
        return [
            Estimate(state, n, sum(n >= limit for limit in self.tiers))
            for state, n in blocks
        ]

    def _common(self, waiting: Sequence[RequestState]) -> dict[RequestState, int]:
        """Blocks that each has in common with the one most like it.

        In sorted order that is a neighbour.
        """
        key = {s: (ascii(s.request.extra_key), token_bytes(s.tokens)) for s in waiting}
        common = dict.fromkeys(waiting, 0)
        for one, other in pairwise(sorted(waiting, key=lambda state: key[state])):
            if key[one][0] == key[other][0]:
                n = shared_pages(key[one][1], key[other][1], 4 * self.page_size)
                common[one], common[other] = max(common[one], n), n
        return common


# %% export="grouping.py"
from collections import Counter


class SharedPrefix(SharedPrefix):
    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """The last member of the smallest chain, so that no chain goes in pieces.

        A chain is the running requests that pin the same first page. Only the least
        important are asked; who needs the pages goes only if nobody else can, so the
        oldest of a priority always goes on.
        """
        last = unserved[-1]
        others = [s for s in unserved[1:] if s.priority == last.priority] or [last]
        sizes = Counter(self._chain(state) for state in unserved)
        return min(reversed(others), key=lambda state: sizes[self._chain(state)])

    def _chain(self, state: RequestState) -> object:
        lease = state.lease
        return lease.pages[0] if lease and lease.num_shared else state


# %% export="grouping.py"
from dataclasses import dataclass

from minivllm.engine import Clock


@dataclass
class TierLine:
    """Sums over the requests admitted from one tier, and the steps that took them."""

    num_requests: int = 0
    estimated_blocks: int = 0
    cached_blocks: int = 0
    queued_s: float = 0.0  # from submission to admission
    num_steps: int = 0
    step_tokens: int = 0  # computed in these steps, for anybody


class Ledger:
    """An observer that holds the estimates against what came of them.

    `lines` by tier. `mixed` counts steps by the number of tiers that ride in them.
    """

    def __init__(self, clock: Clock, page_size: int) -> None:
        self.clock = clock
        self.page_size = page_size
        self.lines: dict[int, TierLine] = {}
        self.mixed: Counter[int] = Counter()
        self._planned: dict[str, Estimate] = {}
        self._running: dict[str, int] = {}  # the tier of each

    def __call__(self, kind: str, /, **details: object) -> None:
        """Take note of an event."""
        if kind in ("plan", "admit", "schedule", "finish"):
            getattr(self, f"_{kind}")(**details)


# %% export="grouping.py"
class Ledger(Ledger):
    def _plan(self, estimates: Sequence[Estimate]) -> None:
        self._planned = {e.state.request.request_id: e for e in estimates}

    def _admit(self, request_id: str, cached: int) -> None:
        estimate = self._planned.get(request_id)
        if estimate is None:
            return
        self._running[request_id] = estimate.tier
        if estimate.state.num_cached_tokens is not None:
            return  # it comes back from a preemption, and finds itself
        line = self.lines.setdefault(estimate.tier, TierLine())
        line.num_requests += 1
        line.estimated_blocks += estimate.num_blocks
        line.cached_blocks += cached // self.page_size
        line.queued_s += self.clock.now() - estimate.state.request.arrival_s

    def _schedule(self, chunks: Sequence[tuple[str, int, int]]) -> None:
        names = [name for name, _, _ in chunks if name in self._running]
        self.mixed[len({self._running[name] for name in names})] += bool(names)
        for tier in {self._running[name] for name in names if name in self._planned}:
            line = self.lines[tier]
            line.num_steps += 1
            line.step_tokens += sum(size for _, _, size in chunks)
        self._planned = {}

    def _finish(self, request_id: str, reason: str) -> None:
        self._running.pop(request_id, None)
