# Exported from chapters/14_llm.py (50970c24): edit the chapter.
"""What an engine did and when: for Perfetto, and as the rows of a picture."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.drawing import CHAR, Cell
from minivllm.engine import Clock, WallClock
from minivllm.events import Observer, ignore

STEPS, FLIGHTS = "steps", "flights"  # tracks beside those of the requests


@dataclass(slots=True)
class Mark:
    """A span, an instant (it ends when it starts) or an arrow on a track, in seconds.

    A track is `STEPS`, `FLIGHTS`, or a request's id.
    """

    track: str
    name: str
    start_s: float
    end_s: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Row:
    """A live request: the phase it is in, what it computes, how far it has come."""

    phase: Mark  # held, queued or running
    num_prompt: int
    work: Mark | None = None  # its chunk of this step, or all its decodes in a row
    step: int = -1  # the last step in which it had one
    high_water: int = 0


class Timeline:
    """An observer that keeps the last `capacity` marks of an engine. See `write`.

    The clock must be the engine's own. Of kinds that it does not know it takes no note.
    """

    def __init__(self, clock: Clock | None = None, capacity: int = 100_000) -> None:
        self.clock = clock or WallClock()
        self.marks: deque[Mark] = deque(maxlen=capacity)
        self.num_dropped = 0
        self._rows: dict[str, Row] = {}  # live requests
        self._flights: dict[str, Mark] = {}  # with followers, by leader
        self._step: Mark | None = None
        self._batch: list[Row] = []  # who computes in it
        self._num_steps = 0
        self._num_in = {"running": 0, "queued": 0, "held": 0}
        self._last_s = 0.0
        self._takers: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "release": self._release,
            "admit": self._admit,
            "schedule": self._schedule,
            "step": self._end_step,
            "preempt": self._preempt,
            "finish": self._finish,
            "evict": self._evict,
        }

    def __call__(self, kind: str, /, **details: Any) -> None:
        """Take note of a transition."""
        if taker := self._takers.get(kind):
            self._last_s = now = self.clock.now()
            taker(now, **details)

    def _keep(self, mark: Mark) -> None:
        self.num_dropped += len(self.marks) == self.marks.maxlen
        self.marks.append(mark)

    def _submit(
        self,
        now: float,
        request_id: str,
        held: bool,
        leader: str | None,
        num_prompt: int,
    ) -> None:
        phase = Mark(request_id, "held" if held else "queued", now, now)
        self._rows[request_id] = Row(phase, num_prompt)
        self._num_in[phase.name] += 1
        if leader:
            new = Mark(FLIGHTS, f"led by {leader}", now, now, {"waiting": []})
            flight = self._flights.setdefault(leader, new)
            flight.details["waiting"].append(request_id)

    def _enter(self, now: float, row: Row, phase: str, **details: Any) -> None:
        """End a request's phase and begin the next."""
        self._end_phase(now, row)
        row.phase = Mark(row.phase.track, phase, now, now, details)
        self._num_in[phase] += 1

    def _end_phase(self, now: float, row: Row, **details: str) -> None:
        self._num_in[row.phase.name] -= 1
        row.phase.end_s = now
        row.phase.details |= details
        if row.phase.start_s < now or details:  # else it was none
            self._keep(row.phase)

    def _admit(self, now: float, request_id: str, cached: int) -> None:
        if row := self._rows.get(request_id):
            self._enter(now, row, "running", cached=cached)

    def _schedule(self, now: float, chunks: list[tuple[str, int, int]]) -> None:
        self._close_step(now)  # one that was cut short
        self._num_steps += 1
        sizes = {"prefill": 0, "recompute": 0, "decode": 0}
        self._step = Mark(STEPS, f"step {self._num_steps}", now, now, sizes)
        for request_id, start, size in chunks:
            if row := self._rows.get(request_id):
                kind = self._compute(now, row, start, size)
                sizes[kind] += size
                self._batch.append(row)

    def _compute(self, now: float, row: Row, start: int, size: int) -> str:
        again = max(0, min(start + size, row.high_water) - start)
        kind = "recompute" if again else "prefill"
        if start >= row.num_prompt and not again:
            kind = "decode"
        row.high_water = max(row.high_water, start + size)
        last, work = row.step, row.work
        row.step = self._num_steps
        if work and work.name == kind == "decode" and last == row.step - 1:
            work.details["tokens"] += size
            return kind
        if work:
            self._keep(work)
        details = {"start": start, "tokens": size, "again": again}
        row.work = Mark(row.phase.track, kind, now, now, details)
        return kind

    def _end_step(self, now: float, **pages: int) -> None:
        if self._step:
            self._step.details |= pages | self._num_in
        self._close_step(now)

    def _close_step(self, now: float) -> None:
        for row in self._batch:
            if row.work:
                row.work.end_s = now
        self._batch.clear()
        if self._step:
            self._step.end_s = now
            self._keep(self._step)
            self._step = None

    def _release(self, now: float, request_ids: Sequence[str], leader: str) -> None:
        for request_id in request_ids:
            if row := self._rows.get(request_id):
                self._enter(now, row, "queued")
                if self._step:  # from the step that did something for the follower
                    begin_s, to = self._step.start_s, {"to": request_id}
                    self._keep(Mark(leader, "arrow", begin_s, now, to))
        if flight := self._flights.pop(leader, None):
            stay = [w for w in flight.details["waiting"] if w not in request_ids]
            flight.end_s = now
            self._keep(flight)
            if stay:
                new = Mark(FLIGHTS, f"led by {request_ids[0]}", now, now)
                new.details["waiting"] = stay
                self._flights[request_ids[0]] = new

    def _forget(self, now: float, request_id: str) -> None:
        """A follower ends while it waits; without any its flight is none."""
        for leader, flight in list(self._flights.items()):
            if request_id in flight.details["waiting"]:
                flight.details["waiting"].remove(request_id)
                if not flight.details["waiting"]:
                    del self._flights[leader]

    def _leave(self, now: float, request_id: str) -> Row | None:
        """A request that runs no more: close what it was doing."""
        row = self._rows.get(request_id)
        if row and row.work:
            if self._step and row.step == self._num_steps:
                row.work.end_s = now
            self._keep(row.work)
            row.work = None
        return row

    def _preempt(self, now: float, request_id: str) -> None:
        if row := self._leave(now, request_id):
            self._enter(now, row, "queued")
            self._keep(Mark(request_id, "preempt", now, now))

    def _finish(self, now: float, request_id: str, reason: str) -> None:
        if row := self._leave(now, request_id):
            if row.phase.name == "held":
                self._forget(now, request_id)
            self._end_phase(now, row, ended=reason)
            del self._rows[request_id]

    def _evict(self, now: float, pages: list[int], **_: object) -> None:
        self._keep(Mark(STEPS, "evict", now, now, {"pages": len(pages)}))

    def all_marks(self) -> list[Mark]:
        """What is over, and what goes on at the last moment that was told."""
        going = [row.phase for row in self._rows.values()]
        going += [row.work for row in self._batch if row.work]
        going += [*self._flights.values(), *([self._step] if self._step else [])]
        known = [replace(mark, end_s=self._last_s) for mark in going]
        rest = [r.work for r in self._rows.values() if r.work and r not in self._batch]
        return sorted([*self.marks, *known, *rest], key=_order)

    def rows(self, length_s: float = 0.0) -> list[tuple[str, list[Cell]]]:
        """The requests for `draw_rows`, in seconds since the first of their marks.

        Words are left out where there is no room for them, in a picture that shows at
        least `length_s`.
        """
        shown = [mark for mark in self.all_marks() if mark.name in SHOWN]
        begin_s = min((mark.start_s for mark in shown), default=0.0)
        end_s = max((mark.end_s for mark in shown), default=0.0)
        unit = 620 / max(length_s, end_s - begin_s, 1e-9)  # pixels per second
        rows: dict[str, list[Cell]] = {}
        for mark in shown:
            length, (state, words) = mark.end_s - mark.start_s, SHOWN[mark.name]
            words = words or str(mark.details["tokens"])
            words = words if CHAR * len(words) < length * unit else ""
            cells = rows.setdefault(mark.track, [])
            cells.append((mark.start_s - begin_s, length, state, words))
        return list(rows.items())

    def events(self) -> Iterator[Event]:
        """The marks in the Trace Event Format, in order of time."""
        tids = {STEPS: (ENGINE, 1), FLIGHTS: (ENGINE, 2)}
        made: list[Event] = []
        for number, mark in enumerate(self.all_marks()):
            for track in (mark.track, mark.details.get("to", STEPS)):
                tids.setdefault(track, (REQUESTS, len(tids)))
            made += _events_of(mark, number, tids)
        yield from _names_of(tids)
        if self.num_dropped and made:
            lost = f"{self.num_dropped} earlier marks were dropped"
            first_us = min(event["ts"] for event in made)
            yield {
                "ph": "i",
                "s": "g",
                "name": lost,
                "ts": first_us,
                "pid": 1,
                "tid": 1,
            }
        yield from sorted(made, key=lambda e: (e["ts"], -e.get("dur", 0)))

    def write(self, path: Path) -> None:
        """Replace a file by this timeline, as a whole or not at all.

        A link or a device, as /dev/stdout, is not replaced: it is written to.
        """
        told = {"program": "minivllm", "dropped": self.num_dropped}
        told["clock"] = "microseconds of the engine's clock"
        whole = {"displayTimeUnit": "ms", "otherData": told}
        part = path.with_name(f".{path.name}.part")
        try:
            text = json.dumps(whole | {"traceEvents": list(self.events())})
            in_place = path.is_symlink() or (path.exists() and not path.is_file())
            (path if in_place else part).write_text(text + "\n", encoding="utf-8")
            if not in_place:
                os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _order(mark: Mark) -> tuple[float, int, str, float]:
    """By start, then by request (ids count up), and what lies in a span after it."""
    return mark.start_s, len(mark.track), mark.track, -mark.end_s


SHOWN = {  # spans in a picture: their colour; words, or none for a number of tokens
    "held": ("plain", "held"),
    "queued": ("free", "queued"),
    "prefill": ("computed", ""),
    "recompute": ("lost", ""),
    "decode": ("decoded", "decodes"),
}

Event = dict[str, Any]
PAGES = ("pages_free", "pages_private", "pages_pinned", "pages_evictable")
COUNTERS = {  # in the file's counter tracks, from the details of a step
    "pages": PAGES,
    "requests": ("running", "queued", "held"),
}
ENGINE, REQUESTS = 1, 2  # the two groups of rows, "processes" in the format


def _names_of(tids: dict[str, tuple[int, int]]) -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for track, (pid, tid) in tids.items():
        name = track if pid == ENGINE else f"request {track}"
        place = {"ph": "M", "pid": pid, "tid": tid}
        yield place | {"name": "thread_name", "args": {"name": name}}
        yield place | {"name": "thread_sort_index", "args": {"sort_index": tid}}


def _events_of(
    mark: Mark, number: int, tids: dict[str, tuple[int, int]]
) -> list[Event]:
    start_us, end_us = (round(s * 1e6, 3) for s in (mark.start_s, mark.end_s))
    pid, tid = tids[mark.track]
    here = {"name": mark.name, "pid": pid, "tid": tid, "ts": start_us}
    if mark.name in ("preempt", "evict"):
        return [here | {"ph": "i", "s": "t", "args": mark.details}]
    if mark.name == "arrow":
        there = dict(zip(("pid", "tid"), tids[mark.details["to"]], strict=True))
        pair = here | {"cat": "flight", "id": number, "name": "released"}
        return [pair | {"ph": "s"}, pair | there | {"ph": "f", "bp": "e", "ts": end_us}]
    if mark.track == FLIGHTS:
        pair = here | {"cat": "flight", "id": number, "args": mark.details}
        return [pair | {"ph": "b"}, pair | {"ph": "e", "ts": end_us}]
    span = here | {"ph": "X", "dur": round(end_us - start_us, 3), "args": mark.details}
    return [span, *(_counts_of(mark, start_us, end_us) if mark.track == STEPS else ())]


def _counts_of(step: Mark, start_us: float, end_us: float) -> Iterator[Event]:
    """What a step computes, while it does; what there is when it has ended."""
    sizes = {name: step.details[name] for name in ("prefill", "recompute", "decode")}
    here = {"ph": "C", "pid": ENGINE, "tid": 1}
    yield here | {"name": "batch tokens", "ts": start_us, "args": sizes}
    yield here | {"name": "batch tokens", "ts": end_us, "args": dict.fromkeys(sizes, 0)}
    for name, parts in COUNTERS.items():
        if parts[0] in step.details:
            args = {part.removeprefix("pages_"): step.details[part] for part in parts}
            yield here | {"name": name, "ts": end_us, "args": args}


def check_place(path: Path | None, option: str) -> None:
    """Raise `ValueError` if the file that an option names cannot be written."""
    if path is None:
        return
    there = path.exists() and not path.is_dir()
    place = path if there else path.parent
    if path.is_dir() or not (there or place.is_dir()) or not os.access(place, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written there")


@contextmanager
def tracing(path: Path | None, clock: Clock | None = None) -> Iterator[Observer]:
    """An observer for a block, and its file when the block ends. No path: `ignore`."""
    if path is None:
        yield ignore
        return
    check_place(path, "trace")
    timeline = Timeline(clock)
    try:
        yield timeline
    finally:
        timeline.write(path)
