# %% [markdown]
# # 12. Who rides together
#
# (draft)

# %% export="grouping.py"
"""Who rides together: whom a step tries to admit, and in which order."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from minivllm.engine import Clock
from minivllm.hashing import token_bytes
from minivllm.radix import Match, shared_pages
from minivllm.request import ExtraKey, TokenIds
from minivllm.scheduler import ArrivalOrder, RequestState

Find = Callable[[TokenIds, ExtraKey], Match]  # `PrefixCache.find`


# %% export="grouping.py"
class LongestPrefix(ArrivalOrder):
    """Most cached tokens first, ties by arrival (SGLang's longest prefix match).

    Looks at the first `window` that wait. Nobody is passed over in more than
    `max_passes` steps: after that a request comes first in its priority.
    """

    def __init__(self, find: Find, max_passes: int = 16, window: int = 128) -> None:
        self.find = find
        self.max_passes = max_passes
        self.window = window

    def plan(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """The waiting requests, those with the longest cached prefix first."""
        seen = waiting[: self.window]
        keys = {state: self._cached(state) for state in seen if not self._is_due(state)}
        due = [state for state in seen if state not in keys]
        rest = sorted(keys, key=lambda state: (-keys[state], state.order))
        return sorted(due + rest, key=lambda state: state.priority)

    def _cached(self, state: RequestState) -> int:
        return self.find(state.tokens, state.request.extra_key).matched_len

    def _is_due(self, state: RequestState) -> bool:
        return state.num_passed >= self.max_passes


# %% export="grouping.py"
TIERS = (1_000, 8_000)  # blocks; with 16 tokens a block, 16K and 128K tokens


@dataclass(frozen=True)
class Estimate:
    """What a waiting request may share: blocks found in the index, and in the queue."""

    state: RequestState
    num_blocks: int
    tier: int


class SharedPrefix(LongestPrefix):
    """One tier of shared prefix lengths a step, the one with most to share first.

    The tier of a request is the number of blocks that it may share: found in the index,
    or common with another one that waits. An estimate: what is found may be evicted, and
    the first of a group computes what the others find. Made anew for every step; nothing
    waits for companions.
    """

    def __init__(
        self,
        find: Find,
        page_size: int,
        tiers: Sequence[int] = TIERS,
        max_passes: int = 16,
        window: int = 128,
    ) -> None:
        super().__init__(find, max_passes, window)
        self.page_size = page_size
        self.tiers = sorted(tiers)
        self.estimates: dict[str, Estimate] = {}  # of those seen in the last plan

    def plan(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """The members of one tier, those with most to share first."""
        seen = waiting[: self.window]
        estimates = self.estimate(seen)
        self.estimates = {e.state.request.request_id: e for e in estimates}
        urgent = [e for e in estimates if e.state.priority == seen[0].priority]
        due = [e for e in urgent if self._is_due(e.state)]
        tier = due[0].tier if due else self._best_tier(urgent)
        group = [e for e in urgent if e.tier == tier and e not in due]
        group.sort(key=lambda e: (-e.num_blocks, e.state.order))
        return [e.state for e in due + group]

    def _best_tier(self, estimates: Iterable[Estimate]) -> int:
        """The tier with most blocks to share; of equals the one that came first."""
        totals: Counter[int] = Counter()
        for estimate in estimates:
            totals[estimate.tier] += estimate.num_blocks
        return max(totals, key=lambda tier: totals[tier])


# %% export="grouping.py"
class SharedPrefix(SharedPrefix):
    def estimate(self, waiting: Sequence[RequestState]) -> list[Estimate]:
        """How many blocks each of these may share, in the order given."""
        shared = self._shared_among(waiting)
        blocks = [
            max(self._cached(state) // self.page_size, shared[state])
            for state in waiting
        ]
        return [
            Estimate(state, n, sum(n >= limit for limit in self.tiers))
            for state, n in zip(waiting, blocks, strict=True)
        ]

    def _shared_among(self, waiting: Sequence[RequestState]) -> Counter[RequestState]:
        """Blocks that each has in common with its best companion.

        In sorted order the best companion is a neighbour.
        """
        key = {s: (ascii(s.request.extra_key), token_bytes(s.tokens)) for s in waiting}
        shared: Counter[RequestState] = Counter()
        for one, other in pairwise(sorted(waiting, key=lambda state: key[state])):
            if key[one][0] == key[other][0]:
                n = shared_pages(key[one][1], key[other][1], 4 * self.page_size)
                shared[one], shared[other] = max(shared[one], n), max(shared[other], n)
        return shared


# %% export="grouping.py"
class SharedPrefix(SharedPrefix):
    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """The last member of the smallest chain, so that no chain goes in pieces.

        A chain is the running requests that share their first page. Only the least
        important are asked, and the oldest of those not served yet only if it is alone.
        """
        candidates = [s for s in unserved[1:] if s.priority == unserved[-1].priority]
        if not candidates:
            return unserved[-1]
        sizes = Counter(self._chain(state) for state in unserved)
        smallest = min(sizes[self._chain(state)] for state in candidates)
        return [s for s in candidates if sizes[self._chain(s)] == smallest][-1]

    def _chain(self, state: RequestState) -> object:
        lease = state.lease
        return lease.pages[0] if lease and lease.num_shared else state


# %% export="grouping.py"
@dataclass
class TierLine:
    """One line of the ledger: sums over the requests admitted from a tier."""

    num_requests: int = 0
    estimated_blocks: int = 0
    cached_blocks: int = 0
    waited_s: float = 0.0


@dataclass
class Ledger:
    """An observer that holds each estimate against what came of it.

    `lines` by tier; `tiers_mixed` and `tokens` hold one number for each step: how many
    tiers its new requests came from, and how many tokens it computed.
    """

    grouping: SharedPrefix
    clock: Clock
    lines: dict[int, TierLine] = field(default_factory=dict)
    tiers_mixed: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _arrivals: dict[str, float] = field(default_factory=dict)
    _admitted: set[int] = field(default_factory=set)

    def __call__(self, kind: str, /, **details: object) -> None:
        """Take note of an event."""
        note = {"submit": self._submit, "admit": self._admit, "schedule": self._step}
        if kind in note:
            note[kind](**details)

    def _submit(self, request_id: str, **_: object) -> None:
        self._arrivals[request_id] = self.clock.now()

    def _admit(self, request_id: str, cached: int, **_: object) -> None:
        arrival = self._arrivals.pop(request_id, None)
        estimate = self.grouping.estimates.get(request_id)
        if estimate is None or arrival is None:
            return  # a preempted request comes again: it was entered before
        line = self.lines.setdefault(estimate.tier, TierLine())
        line.num_requests += 1
        line.estimated_blocks += estimate.num_blocks
        line.cached_blocks += cached // self.grouping.page_size
        line.waited_s += self.clock.now() - arrival
        self._admitted.add(estimate.tier)

    def _step(self, chunks: Sequence[tuple[str, int, int]], **_: object) -> None:
        self.tiers_mixed.append(len(self._admitted))
        self.tokens.append(sum(size for _, _, size in chunks))
        self._admitted.clear()
