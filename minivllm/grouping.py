# Exported from chapters/12_grouping.py (6cd31f60): edit the chapter.
"""Who rides together: whom a step tries to admit, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from minivllm.engine import Clock
from minivllm.events import Observer, ignore
from minivllm.hashing import token_bytes
from minivllm.radix import Match, shared_pages
from minivllm.request import ExtraKey, TokenIds
from minivllm.scheduler import MAX_PASSES, ArrivalOrder, RequestState

Find = Callable[[TokenIds, ExtraKey], Match]  # `PrefixCache.find`


class LongestPrefix(ArrivalOrder):
    """Most cached tokens first, ties by arrival (after SGLang's longest prefix match).

    Looks at the first `window` requests that wait. Nobody is passed over in more than
    `max_passes` steps: then a request comes first among those of its priority.
    """

    def __init__(
        self, find: Find, max_passes: int = MAX_PASSES, window: int = 128
    ) -> None:
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
        return self.find(state.sought, state.request.extra_key).matched_len

    def is_due(self, state: RequestState) -> bool:
        """Whether a request has been passed over often enough."""
        return state.num_passed >= self.max_passes


TIERS = (1_000, 8_000)  # blocks: with 16 tokens in each, 16K and 128K tokens


class Estimate(NamedTuple):
    """What a waiting request may share, in blocks, and the tier that it is in."""

    state: RequestState
    cached: int  # found in the index
    common: int  # with the waiting request that is most like it
    tier: int

    @property
    def num_blocks(self) -> int:
        """The longer of the two prefixes."""
        return max(self.cached, self.common)


class SharedPrefix(LongestPrefix):
    """One tier of shared prefix lengths a step, the one that finds most in the cache.

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
        max_passes: int = MAX_PASSES,
        window: int = 128,
        observer: Observer = ignore,
    ) -> None:
        super().__init__(find, max_passes, window)
        self.page_size = page_size
        self.tiers = check_tiers(tiers)
        self.observer = observer

    def estimate(self, waiting: Sequence[RequestState]) -> list[Estimate]:
        """What each of these may share, in the order given."""
        common, estimates = self._common(waiting), []
        for state in waiting:
            cached = self.num_cached(state) // self.page_size
            blocks = max(cached, common[state])
            tier = sum(blocks >= limit for limit in self.tiers)
            estimates.append(Estimate(state, cached, common[state], tier))
        return estimates

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

    def plan(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """Who is due, then one tier of the most urgent, most cached blocks first."""
        estimates = self.estimate(waiting[: self.window])
        self.observer("plan", estimates=estimates)
        urgent = [e for e in estimates if e.state.priority == waiting[0].priority]
        due = [e for e in urgent if self.is_due(e.state)]
        tier = due[0].tier if due else self._warmest(urgent)
        group = [e for e in urgent if e.tier == tier and e not in due]
        group.sort(key=lambda e: (-e.cached, -e.common))
        return [e.state for e in due] + self._side_by_side(group)

    def _warmest(self, estimates: Sequence[Estimate]) -> int:
        """The tier with most cached blocks; of equals that of the first to come."""
        cached: Counter[int] = Counter()
        for estimate in estimates:
            cached[estimate.tier] += estimate.cached
        return max(cached, key=lambda tier: cached[tier], default=0)

    def _side_by_side(self, group: Sequence[Estimate]) -> list[RequestState]:
        """Those who can share one prefix together, where the first of them stands."""
        families: dict[tuple[ExtraKey, bytes], list[RequestState]] = {}
        for e in group:
            prefix = e.state.tokens[: e.num_blocks * self.page_size].tobytes()
            key = (e.state.request.extra_key, prefix)
            families.setdefault(key, []).append(e.state)
        return [state for family in families.values() for state in family]

    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """Who shares fewest pages with the others of these: lone requests first.

        Of equals the last to have come, and only among the least important, whose
        oldest stays if anybody else can go.
        """
        least = [s for s in unserved if s.priority == unserved[-1].priority]
        others = least[1:] or least
        pages = {s: s.lease.pages if s.lease else [] for s in unserved}
        users = Counter(chain.from_iterable(pages.values()))
        return min(reversed(others), key=lambda s: sum(users[p] > 1 for p in pages[s]))


def check_tiers(tiers: Sequence[int]) -> tuple[int, ...]:
    """The limits as a tuple. `ValueError` unless they are ints >= 1 that rise."""
    limits = tuple(tiers) if isinstance(tiers, Sequence) else (0,)
    whole = all(type(n) is int and n > 0 for n in limits)
    if not whole or any(one >= other for one, other in pairwise(limits)):
        raise ValueError(f"tiers must be rising whole numbers >= 1, not {tiers!r}")
    return limits


@dataclass
class TierLine:
    """Sums over the requests admitted from one tier, and the steps that took them."""

    num_requests: int = 0
    num_hits: int = 0
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

    def _plan(self, estimates: Sequence[Estimate]) -> None:
        self._planned = {e.state.request.request_id: e for e in estimates}

    def _finish(self, request_id: str, reason: str) -> None:
        self._running.pop(request_id, None)

    def _admit(self, request_id: str, cached: int) -> None:
        estimate = self._planned.get(request_id)
        if estimate is None:
            return  # admitted by a grouping that makes no estimates
        self._running[request_id] = estimate.tier
        line = self.lines.setdefault(estimate.tier, TierLine())
        if estimate.state.num_cached_tokens is not None:
            return  # it comes back from a preemption, and finds itself
        line.num_requests += 1
        line.num_hits += cached > 0
        line.estimated_blocks += estimate.num_blocks
        line.cached_blocks += cached // self.page_size
        line.queued_s += self.clock.now() - estimate.state.request.arrival_s

    def _schedule(self, chunks: Sequence[tuple[str, int, int]]) -> None:
        tiers = {n: self._running[n] for n, _, _ in chunks if n in self._running}
        if tiers:
            self.mixed[len(set(tiers.values()))] += 1
        for tier in {tiers[name] for name in tiers.keys() & self._planned.keys()}:
            self.lines[tier].num_steps += 1
            self.lines[tier].step_tokens += sum(size for _, _, size in chunks)
        self._planned = {}
