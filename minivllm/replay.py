# Exported from chapters/16_traffic.py (436d57fe): edit the chapter.
"""What a cache of each size would have found, and what an engine would have done."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import inf
from typing import Any, cast

from minivllm.batch import Chunk
from minivllm.bench import percentile
from minivllm.drawing import Picture
from minivllm.engine import Limits
from minivllm.events import Observer, ignore
from minivllm.options import EngineOptions, assemble
from minivllm.request import RequestOutput, SamplingParams
from minivllm.simulation import Arrival, Arrivals, CostModel, VirtualClock, simulate
from minivllm.workloads import TraceRequest


class Recency:
    """How recently each name was touched: 1 is the last, 2 the one before it.

    A Fenwick tree over the moments of the last touches: O(log n) for each question.
    """

    def __init__(self, num_touches: int) -> None:
        self._sums = [0] * (num_touches + 1)
        self._last: dict[Hashable, int] = {}
        self._now = 0

    def rank(self, name: Hashable) -> int | None:
        """One more than the names that were touched since; None for a new name."""
        at = self._last.get(name)
        if at is None:
            return None
        older = 0
        while at:
            older += self._sums[at]
            at &= at - 1
        return len(self._last) - older + 1

    def touch(self, name: Hashable) -> None:
        """It is the most recent one now."""
        if (before := self._last.get(name)) is not None:
            self._add(before, -1)
        self._now += 1
        self._last[name] = self._now
        self._add(self._now, 1)

    def _add(self, at: int, amount: int) -> None:
        while at < len(self._sums):
            self._sums[at] += amount
            at += at & -at


def leading_ranks(recency: Recency, blocks: Sequence[Hashable]) -> list[int]:
    """For each leading known block, the largest rank up to it: it never falls."""
    ranks: list[int] = []
    for name in blocks:
        rank = recency.rank(name)
        if rank is None:
            break
        ranks.append(max(rank, ranks[-1] if ranks else 0))
    return ranks


def reuse_curve(
    requests: Sequence[TraceRequest], capacities: Sequence[int], page_size: int
) -> list[float]:
    """The share of prompt tokens that an LRU cache finds, for each capacity in tokens.

    One pass for all capacities (Mattson et al., 1970: under LRU a larger cache holds
    what a smaller one holds); 0 is unbounded. A request finds its leading blocks that
    are there, at most all tokens but one, before its own are touched, the tail as older
    than the head. Counted over the second half of the requests.
    """
    rooms = [tokens // page_size if tokens else inf for tokens in capacities]
    recency = Recency(sum(-(-r.num_tokens // page_size) for r in requests))
    found, total = [0] * len(rooms), 0
    for i, request in enumerate(requests):
        blocks = request.blocks(page_size)
        if i >= len(requests) // 2:
            ranks, most = leading_ranks(recency, blocks), request.num_tokens - 1
            for j, room in enumerate(rooms):
                found[j] += min(bisect_right(ranks, room) * page_size, most)
            total += request.num_tokens
        for name in reversed(blocks):
            recency.touch(name)
    return [tokens / total for tokens in found]


STATES = ("pinned", "private", "published", "lost", "announced", "computed", "free")
Curve = tuple[str, Sequence[float]]  # a label, and a value for each place on the axis


def draw_curves(
    axis: Sequence[str],
    panels: Sequence[tuple[str, Sequence[Curve]]],
    caption: str = "",
) -> Picture:
    """Panels side by side over one axis; each is scaled to its largest value."""
    picture, left = Picture(caption), 60.0
    for title, curves in panels:
        width, height = max(220.0, 48.0 * len(axis)), 200.0
        most = max((v for _, values in curves for v in values), default=0.0) or 1.0
        picture.text(left, 14, title, "start")
        _draw_frame(picture, left, width, height, axis, most)
        for i, (label, values) in enumerate(curves):
            state = STATES[i % len(STATES)]
            step = width / max(1, len(axis) - 1)
            points = [
                (left + j * step, 30 + height * (1 - v / most))
                for j, v in enumerate(values)
            ]
            for (x1, y1), (x2, y2) in pairwise(points):
                picture.line(x1, y1, x2, y2)
            for x, y in points:
                picture.box(x - 4, y - 4, 8, 8, state)
            picture.box(left, height + 62 + 20 * i, 10, 10, state)
            picture.text(left + 16, height + 71 + 20 * i, label, "start")
        left += width + 110
    return picture


def _draw_frame(
    picture: Picture,
    left: float,
    width: float,
    height: float,
    axis: Sequence[str],
    most: float,
) -> None:
    picture.line(left, 30 + height, left + width, 30 + height)
    picture.line(left, 30, left, 30 + height)
    for share in (0.0, 0.5, 1.0):
        y = 30 + height * (1 - share)
        picture.text(left - 6, y + 4, f"{share * most:.3g}", "end")
    for j, name in enumerate(axis):
        x = left + j * width / max(1, len(axis) - 1)
        picture.text(x, 48 + height, name)


def answers_in(requests: Sequence[TraceRequest]) -> "dict[str, array[int]]":
    """What a request was answered, where a later prompt goes on with it."""
    by_name = {request.name: request for request in requests}
    answers: dict[str, array[int]] = {}
    for request in requests:
        before = by_name.get(request.after or "")
        if before and before.block == 1 and before.name not in answers:
            start = before.num_tokens
            if request.ids[:start] == before.ids:
                answer = request.ids[start : start + before.output_length]
                answers[before.name] = answer
    return answers


NOTHING = array("i")


class TraceRunner:
    """Takes as long as a cost model says; says what the trace says, or else 0.

    `told` has an answer for each request that came, in the order of coming: the engine
    numbers them so.
    """

    def __init__(self, cost: CostModel, clock: VirtualClock) -> None:
        self.cost = cost
        self.clock = clock
        self.told: list[array[int]] = []

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Let the batch's time pass."""
        self.clock.advance(self.cost.step_s(chunks))
        return [self._token(c) if c.samples else None for c in chunks]

    def _token(self, chunk: Chunk) -> int:
        answer = self.told[int(chunk.request_id)]
        at = len(chunk.known) - chunk.num_prompt
        return answer[at] if at < len(answer) else 0


@dataclass(frozen=True)
class Coming(Arrival):
    """A request of a trace on its way; its tokens are made when it comes."""

    request: TraceRequest | None = None


def request_of(arrival: Arrival) -> TraceRequest:
    """What has come."""
    return cast(TraceRequest, cast(Coming, arrival).request)


LARGE = 2**31  # a vocabulary and a context without bounds
MAKE_PARAMS = lru_cache(maxsize=None)(partial(SamplingParams, temperature=0))


@dataclass(slots=True)
class Served:
    """What became of a request. Refused ones ended in an error, at no time."""

    id: str
    cached_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
    output_tokens: int = 0
    finish_reason: str | None = "error"


def what_became(name: str, output: RequestOutput) -> Served:
    """The end of a request, in the trace's own names."""
    done, times = output.outputs[0], output.metrics
    counts = len(done.token_ids), done.finish_reason
    return Served(name, output.num_cached_tokens, times.ttft_s, times.e2e_s, *counts)


class TraceArrivals(Arrivals):
    """Requests of a trace on their way; tokens are made, and told, when they come."""

    def __init__(
        self, runner: TraceRunner, answers: "Mapping[str, array[int]]"
    ) -> None:
        super().__init__()
        self.runner = runner
        self.answers = answers

    def enter(self, request: TraceRequest, time_s: float) -> None:
        """It will come then."""
        params, key = MAKE_PARAMS(request.output_length), request.extra_key
        self.add(Coming(time_s, request.ids, params, key, request.priority, request))

    def take(self, now_s: float) -> Iterator[Arrival]:
        """Remove those that have come by now."""
        for arrival in super().take(now_s):
            request = request_of(arrival)
            self.runner.told.append(self.answers.get(request.name, NOTHING))
            yield replace(arrival, token_ids=request.token_ids())


class Replay:
    """A trace and an engine on a virtual clock.

    `capacity` is the K/V memory in tokens, 0: as much as there is need for. Requests
    that can never fit are refused. Who comes after a request comes when that has ended,
    or at its own time if that is later.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        options: EngineOptions,
        capacity: int,
        cost: CostModel,
        clock: VirtualClock | None = None,
        observer: Observer = ignore,
    ) -> None:
        self.requests = requests
        self.clock = clock or VirtualClock()
        self.size = size = options.page_size
        self.num_pages = (
            capacity // size if capacity else sum(map(self._pages, requests))
        )
        if not self.num_pages:
            raise ValueError(f"a capacity of {capacity} tokens is less than a page")
        runner, limits = TraceRunner(cost, self.clock), Limits(LARGE, LARGE)
        self.arrivals = TraceArrivals(runner, answers_in(requests))
        quiet = replace(options, explain=False)  # nobody reads why
        parts = (quiet, self.num_pages, runner, limits, observer)
        self.engine = assemble(*parts, clock=self.clock, streams=False)
        self._followers: dict[str | None, list[TraceRequest]] = {}
        names = {request.name for request in requests}
        for request in requests:
            after = request.after if request.after in names else None
            self._followers.setdefault(after, []).append(request)
        self._served: dict[str, Served] = {}

    def _pages(self, request: TraceRequest) -> int:
        return -(-(request.num_tokens + request.output_length - 1) // self.size)

    def run(
        self, advance: Callable[[int], object] = lambda number: None
    ) -> list[Served]:
        """Serve all requests; in the order of the trace, what became of them."""
        self._let_come(None, 0.0)
        for arrival, output in simulate(self.engine, self.clock, self.arrivals):
            name = request_of(arrival).name
            self._served[name] = what_became(name, output)
            self._let_come(name, self.clock.now())
            advance(1)
        return [self._served[request.name] for request in self.requests]

    def _let_come(self, name: str | None, now_s: float) -> None:
        """Who waits for `name` may come from now on; a refused one ends at once."""
        ended = [(name, now_s)]
        while ended:
            name, now_s = ended.pop()
            for request in self._followers.pop(name, ()):
                time_s = max(request.time_ms / 1000, now_s)
                if self._pages(request) <= self.num_pages:
                    self.arrivals.enter(request, time_s)
                else:
                    self._served[request.name] = Served(request.name)
                    ended.append((request.name, time_s))


def summary(served: Sequence[Served], stats: Mapping[str, int]) -> dict[str, Any]:
    """A replay in a few numbers; times in seconds, hit rates as shares."""
    ended = [s for s in served if s.ttft_s is not None and s.e2e_s is not None]
    told: dict[str, Any] = {
        "requests": len(served),
        "refused": len(served) - len(ended),
        "hit_rate": stats["cached_tokens"] / max(1, stats["queried_tokens"]),
        "request_hit_rate": stats["hits"] / max(1, stats["lookups"]),
    }
    for name in ("ttft_s", "e2e_s"):
        values = [getattr(s, name) for s in ended]
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        told[name] = {p: percentile(values, q) for p, q in shares.items() if values}
    return told
