# Exported from chapters/15_measuring.py (2d844da4): edit the chapter.
"""Measuring: several contestants, in turn, in one process, with their spread."""

import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, TypeVar


def nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Trial:
    """A piece of work to be timed, and what is done before it, outside the clock.

    `work` does `num_ops` operations and returns a count, of tokens found for example.
    Times are given for one operation.
    """

    work: Callable[[], float]
    prepare: Callable[[], object] = nothing
    num_ops: int = 1


def time_once(
    trial: Trial, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Seconds for one operation, and the count that the work returned."""
    gc.collect()
    trial.prepare()
    was_on = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        count = trial.work()
        return (clock() - start) / trial.num_ops, count
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Spread:
    """Readings, one for each repeat: their median, and how far they lie apart."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The value in the middle."""
        return median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)


@dataclass(frozen=True)
class Measurement(Spread):
    """Seconds (or bytes) for one operation; `count` is what the last work returned."""

    count: float = 0


@dataclass(frozen=True)
class Comparison(Spread):
    """How many times as much one took as another, repeat by repeat."""


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)]


def compare(one: Measurement, other: Measurement) -> Comparison:
    """Divide the readings that were taken side by side. `ValueError` for a 0."""
    if not all(other.values):
        raise ValueError("a reading of 0: too little work for this clock")
    pairs = zip(one.values, other.values, strict=True)
    return Comparison(tuple(a / b for a, b in pairs))


def measure(
    trials: Mapping[str, Trial],
    repeats: int = 7,
    warmups: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Measurement]:
    """Time all trials in turn, `repeats` times; every other round in reverse order."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    if warmups < 0:
        raise ValueError(f"warmups must be at least 0, not {warmups}")
    readings: dict[str, list[float]] = {name: [] for name in trials}
    counts = dict.fromkeys(trials, 0.0)
    gc.freeze()  # what is there stays: a collection looks at nothing older
    try:
        for number in range(warmups + repeats):
            for name in list(trials)[:: -1 if number % 2 else 1]:
                reading, counts[name] = time_once(trials[name], clock)
                readings[name].append(reading)
    finally:
        gc.unfreeze()
    return {
        name: Measurement(tuple(values[warmups:]), counts[name])
        for name, values in readings.items()
    }


@dataclass(frozen=True)
class Row:
    """One line of a record. `unit` is "s" or "B"; `ratio` is to `against`."""

    load: str
    operation: str
    page_size: int
    engine: str
    tokens: float
    unit: str
    median: float
    low: float
    high: float
    against: str
    ratio: float
    ratio_low: float
    ratio_high: float


def make_row(
    what: tuple[str, str, int],
    engine: str,
    found: Measurement,
    against: tuple[str, Measurement],
    unit: str = "s",
) -> Row:
    """A row about (load, operation, page size), compared with a named measurement."""
    name, other = against
    ratio = compare(found, other)
    return Row(
        *what,
        engine=engine,
        tokens=found.count,
        unit=unit,
        median=found.median,
        low=found.low,
        high=found.high,
        against=name,
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
    )


def make_rows(
    what: tuple[str, str, int], found: Mapping[str, Measurement], unit: str = "s"
) -> list[Row]:
    """A row for each contestant, all compared with the first."""
    first = next(iter(found.items()))
    return [make_row(what, name, each, first, unit) for name, each in found.items()]


def make_record(command: str, rows: Iterable[Any], **facts: Any) -> dict[str, Any]:
    """Measured rows (dataclasses) and what they depend on, to be written as JSON."""
    return {
        "command": command,
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        **facts,
        "rows": [asdict(row) for row in rows],
    }


def cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text("utf-8").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0].strip()


def commit() -> str:
    """The commit that was measured, with `+` if files differ from it; or ""."""
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    folder = Path(__file__).parent
    try:
        told = subprocess.run(describe, cwd=folder, capture_output=True, text=True)
    except OSError:
        return ""
    return told.stdout.strip()


T = TypeVar("T")


def read_lines(path: Path, read: Callable[[dict[str, Any]], T]) -> dict[int, T]:
    """What `read` makes of the objects of a JSONL file, by the number of their line.

    Raises `ValueError` naming the file, the line and what is wrong with it.
    """
    found, number = dict[int, T](), 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found[number] = read(_read_line(line))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not text in UTF-8") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: there is no request in it")
    return found


def _read_line(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise ValueError(f"a request is a JSON object, not {text.strip()[:40]}")
    return line
