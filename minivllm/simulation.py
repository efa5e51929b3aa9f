# Exported from chapters/08_simulation.py (b04b0a96): edit the chapter.
"""A clock to pass in, and in place of the model: its cost, and a memory of pasts."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from typing import Protocol

from minivllm.batch import Chunk
from minivllm.engine import Engine, Runner
from minivllm.request import ExtraKey, RequestOutput, SamplingParams, TokenIds


class VirtualClock:
    """Seconds that pass when somebody says so. Never sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """The present time, in seconds since the start."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises `ValueError` unless `seconds` is above 0."""
        if not 0 < seconds < float("inf"):
            raise ValueError(f"a step takes time, and an end: not {seconds} s")
        self._now_s += seconds

    def advance_to(self, time_s: float) -> None:
        """Jump to a moment; nothing happens if it is past."""
        self._now_s = max(self._now_s, time_s)


@dataclass(frozen=True)
class Work:
    """What a step carries. A chunk of one token that samples counts as a decode."""

    num_prefills: int
    prefill_tokens: int
    num_decodes: int


def work_of(chunks: Sequence[Chunk]) -> Work:
    """Count what a batch carries."""
    num_tokens = num_decodes = 0
    for chunk in chunks:
        num_tokens += len(chunk.token_ids)
        num_decodes += chunk.samples and len(chunk.token_ids) == 1
    return Work(len(chunks) - num_decodes, num_tokens - num_decodes, num_decodes)


class CostModel(Protocol):
    """How long a step takes."""

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds for one forward pass over these chunks, above 0."""


@dataclass(frozen=True)
class SerialPrefill:
    """Prefills one after the other, then one decode step for all who decode.

    A chunk of n prompt tokens takes `chunk_s + n * token_s`, a decode step of b
    requests `decode_s * (1 + k * (b - 1))`. k is 0 if company is free, 1 if it saves
    nothing.
    """

    chunk_s: float
    token_s: float
    decode_s: float
    k: float

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds for one forward pass."""
        work = work_of(chunks)
        batch = 1 + self.k * (work.num_decodes - 1) if work.num_decodes else 0.0
        prefill = work.num_prefills * self.chunk_s + work.prefill_tokens * self.token_s
        return prefill + batch * self.decode_s


PRIME = 2**61 - 1
FACTOR = 1_181_783_497_276_652_981  # any large number: it spreads what goes in


def next_state(state: int, token_id: int) -> int:
    """The number that stands for a token's K/V: of its past (0: none) and itself."""
    return (state * FACTOR + token_id + 1) % PRIME


def token_after(state: int, vocab_size: int) -> int:
    """The token that follows a past."""
    return state * FACTOR % PRIME % vocab_size


class SimulatedRunner:
    """Takes as long as a model would, and keeps one number where it keeps K/V."""

    def __init__(
        self,
        cost_model: CostModel,
        clock: VirtualClock,
        vocab_size: int,
        num_pages: int,
        page_size: int,
    ) -> None:
        self.cost_model = cost_model
        self.clock = clock
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.states = array("Q", bytes(8 * num_pages * page_size))

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Let the batch's time pass; a token for each chunk that samples."""
        self.clock.advance(self.cost_model.step_s(chunks))
        return [self._compute(chunk) for chunk in chunks]

    def _compute(self, chunk: Chunk) -> int | None:
        past = self.states[self._slot(chunk, chunk.start - 1)] if chunk.start else 0
        made = array("Q", accumulate(chunk.token_ids, next_state, initial=past))[1:]
        self._write(chunk, made)
        return token_after(made[-1], self.vocab_size) if chunk.samples else None

    def _slot(self, chunk: Chunk, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return chunk.pages[page] * self.page_size + offset

    def _write(self, chunk: Chunk, made: array[int]) -> None:
        """Store a chunk's states, page by page; published pages stay as they are."""
        start, end, size = chunk.start, chunk.end, self.page_size
        position = max(start, chunk.num_shared * size)
        while position < end:
            slot = self._slot(chunk, position)
            stop = min(end, position + size - slot % size)
            self.states[slot : slot + stop - position] = made[
                position - start : stop - start
            ]
            position = stop


@dataclass(frozen=True)
class Arrival:
    """A request that will come at `time_s` of the clock."""

    time_s: float
    token_ids: TokenIds
    params: SamplingParams = SamplingParams()
    extra_key: ExtraKey = None
    priority: int = 0


class Arrivals:
    """Requests to come, the earliest first; at one moment, in the order of entry."""

    def __init__(self, arrivals: Iterable[Arrival] = ()) -> None:
        self._heap: list[tuple[float, int, Arrival]] = []
        self._num_entered = 0
        for arrival in arrivals:
            self.add(arrival)

    def add(self, arrival: Arrival) -> None:
        """Enter one more, at any time. `ValueError` unless its moment is a number."""
        if not math.isfinite(arrival.time_s):
            raise ValueError(f"a request cannot come at {arrival.time_s} s")
        heappush(self._heap, (arrival.time_s, self._num_entered, arrival))
        self._num_entered += 1

    def next_s(self) -> float | None:
        """When the next one comes; None if nobody does."""
        return self._heap[0][0] if self._heap else None

    def take(self, now_s: float) -> Iterator[Arrival]:
        """Remove those that have come by now."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heappop(self._heap)[-1]


def simulate(
    engine: Engine, clock: VirtualClock, arrivals: Arrivals
) -> Iterator[tuple[Arrival, RequestOutput]]:
    """Submit requests at their times and step; yield each with its final output.

    The engine's runner must let its time pass on `clock`. Raises `ValueError` if the
    engine refuses a request, and `RuntimeError` if requests are left, nothing can run
    and nobody will come.
    """
    came: dict[str, Arrival] = {}
    ran = False
    while arrivals.next_s() is not None or engine.has_unfinished():
        if not ran:
            _jump(clock, arrivals)
        for a in arrivals.take(clock.now()):
            came[engine.submit(a.token_ids, a.params, a.extra_key, a.priority)] = a
        before_s, outputs = clock.now(), engine.step()
        ran = bool(outputs) or clock.now() > before_s
        for output in outputs:
            if output.finished:
                arrival = came.pop(output.request_id)
                output.metrics.arrival_s = arrival.time_s
                yield arrival, output


def _jump(clock: VirtualClock, arrivals: Arrivals) -> None:
    next_s = arrivals.next_s()
    if next_s is None:
        raise RuntimeError("requests are left, and none of them can ever run")
    clock.advance_to(next_s)


class TimedRunner:
    """Lets the real time of another runner's steps pass on a virtual clock."""

    def __init__(
        self,
        runner: Runner,
        clock: VirtualClock,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.clock = clock
        self.timer = timer
        self.steps: list[tuple[Work, float]] = []

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Run the batch; keep what it was and how many seconds it took."""
        start_s = self.timer()
        tokens = self.runner.run(chunks)
        seconds = self.timer() - start_s
        self.steps.append((work_of(chunks), seconds))
        self.clock.advance(seconds)
        return tokens


class ReplayedTimes:
    """The cost model that was there: each step takes as long as the recorded one."""

    def __init__(self, steps: Iterable[tuple[Work, float]]) -> None:
        self._steps = iter(steps)

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """The next recorded time. Raises `ValueError` if that step was another one."""
        (work, seconds), here = next(self._steps, (None, 0.0)), work_of(chunks)
        if work != here:
            raise ValueError(f"the recorded step was {work}, this one is {here}")
        return seconds


def least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float]
) -> list[float]:
    """The x that makes the sum of (row · x - target)² least, by the normal equations.

    Gauss-Jordan elimination. Raises `ValueError` if the rows do not determine x.
    """
    if not rows:
        raise ValueError("there are no measurements")
    columns = list(zip(*rows, strict=True))
    table = [
        [sum(map(mul, column, other)) for other in (*columns, targets)]
        for column in columns
    ]
    for i, scale in enumerate([line[j] for j, line in enumerate(table)]):
        if not table[i][i] > 1e-9 * scale:
            raise ValueError(f"the measurements say nothing about unknown {i}")
        pivot = table[i] = [x / table[i][i] for x in table[i]]
        for j, line in enumerate(table):
            if j != i:
                table[j] = [x - line[i] * y for x, y in zip(line, pivot, strict=True)]
    return [line[-1] for line in table]


def fit_serial_prefill(steps: Iterable[tuple[Work, float]]) -> SerialPrefill:
    """The parameters that make the relative errors of measured steps smallest.

    Raises `ValueError` if the steps do not tell the four parameters apart.
    """
    rows = []
    for work, seconds in steps:
        first, others = min(1, work.num_decodes), max(0, work.num_decodes - 1)
        row = (work.num_prefills, work.prefill_tokens, first, others)
        rows.append([x / seconds for x in row])
    chunk_s, token_s, decode_s, other_s = least_squares(rows, [1.0] * len(rows))
    return SerialPrefill(chunk_s, token_s, decode_s, k=other_s / decode_s)
