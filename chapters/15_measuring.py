# %% [markdown]
# # 15. Measuring honestly
#
# How long does it take to find a cached prefix of 4,096 tokens? Chapter 3 built the tree, so
# let us ask it. Two hundred prompts are in it. We look up one of them, and read the clock in
# five ways that one meets in reports.

# %% name="five"
import gc
import time
from array import array
from random import Random
from statistics import fmean, median

from minivllm.radix import RadixCache, Slots

rng = Random("five answers")
system_prompt = [rng.randrange(32_000) for _ in range(2048)]
prompts = [
    system_prompt + [rng.randrange(32_000) for _ in range(2048)] for _ in range(200)
]
cache = RadixCache(page_size=16)
for ids in prompts:
    cache.insert(ids, Slots(array("i", range(0, len(ids), 16)), 16))
encoded = array("i", prompts[7])


def seconds(token_ids):
    start = time.perf_counter()
    cache.match_prefix(token_ids)
    return time.perf_counter() - start


def seconds_with_a_pause(number):
    start = time.perf_counter()
    cache.match_prefix(encoded)
    if number == 50:  # the collector comes along, as it does, once in a while
        gc.collect()
    return time.perf_counter() - start


answers = {
    "the first look-up": seconds(encoded),
    "the best of 200": min(seconds(encoded) for _ in range(200)),
    "their median": median(seconds(encoded) for _ in range(200)),
    "a median, given a list": median(seconds(prompts[7]) for _ in range(200)),
    "a mean, one pause in it": fmean(map(seconds_with_a_pause, range(200))),
}
for how, answer in answers.items():
    print(f"{how:24} ≈ {answer * 1e6:.1f} µs")
best, *others = sorted(answers.values())
print("largest more than twice the smallest:", others[-1] > 2 * best)

# %% [markdown]
# One function, one argument, one machine, five answers, none of them wrong. The first look-up
# runs cold code on cold memory. The best of many says what is possible, the median what is usual.
# The fourth includes what a request does once, on arrival: a list becomes an array. The fifth
# includes a pause of the whole process.
#
# The misconception is that code *has* a time. A time belongs to a procedure: what was warm, what
# was encoded before the clock started, what else ran, which reading was kept. This chapter makes
# the procedure a program.
#
# ## Two equal things, one of them slower
#
# Measure ours, then theirs? Here is a machine whose clock is a variable, and which gets 2 %
# slower with each run, as a laptop does that becomes warm. It does the same work under two names.


# %% name="drift"
class WarmingMachine:
    """A clock, and work that takes 2 % longer each time."""

    def __init__(self):
        self.now, self.cost = 0.0, 1.0

    def clock(self):
        return self.now

    def work(self):
        self.now += self.cost
        self.cost *= 1.02
        return 1


def times(machine, number):
    readings = []
    for _ in range(number):
        start = machine.clock()
        machine.work()
        readings.append(machine.clock() - start)
    return readings


machine = WarmingMachine()
before, after = times(machine, 7), times(machine, 7)
print(f"after / before, one then the other: {median(after) / median(before):.2f}")

# %% [markdown]
# The second contestant is [1.15](#drift) times as slow as the first, and it is the first. More
# repeats make it worse, and each series has a small spread. What helps is to take turns. One run
# of each makes a pair, between whose halves the machine has hardly changed: the quotient is about
# the code. Since someone must go first, the order is reversed in every other pair.
#
# ## The procedure
#
# What is measured is a *trial*: the work, and what must be done before it that is not to be timed.
# `work` returns a count, tokens found for example. Of two contestants who disagree about that, one
# measures something else.

# %% export="bench.py"
"""Measuring: several contestants, in turn, in one process, with their spread."""

import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any


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


# %% [markdown]
# One reading. The collector runs before it and not during it: its pause would be charged to
# somebody by chance. (That flatters whoever makes much garbage.)


# %% export="bench.py"
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


# %% [markdown]
# Many readings make a spread: the median, and the smallest and largest, which say how far to
# trust it. A comparison is a spread too, of the quotients within the pairs.


# %% export="bench.py"
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


# %% [markdown]
# And the turns. Warm-up rounds are left out.


# %% export="bench.py"
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


# %% [markdown]
# The warming machine again, with the same two contestants:

# %% name="turns"
machine = WarmingMachine()
twins = {name: Trial(machine.work) for name in ("before", "after")}
found = measure(twins, repeats=7, clock=machine.clock)
ratio = compare(found["after"], found["before"])
print(
    f"after / before, in turn: {ratio.median:.2f}, from {ratio.low:.2f} to {ratio.high:.2f}"
)
for number in (7, 3):
    print(f"all {number} pairs agree by chance in 2 of {2**number} measurements")

# %% [markdown]
# The machine still warms up, by a third over the run. But the comparison says [0.98](#turns), and
# its spread, [0.98](#turns) to [1.02](#turns), contains 1. One may write: no difference was
# shown. Where a spread leaves 1 out, all seven pairs agree on who is slower, as equals do in [2
# of 128](#turns) measurements. (Seven is odd: so the median is a reading that there was, and not
# the middle of two.) Three pairs, all that a slow experiment can afford, agree by
# chance in [2 of 8](#turns): their sign is a hint, until other cases or a reason agree with it.

# %% tags=["hide-input"]
from itertools import chain

from minivllm.drawing import Picture, draw_rows


def draw_readings(rounds, caption):
    """Runs in the order in which they happened; the height is the time of each."""
    picture = Picture(caption)
    for row, (label, runs) in enumerate(rounds):
        base = 90 + row * 120
        picture.text(0, base + 20, label, "start")
        for i, (name, value) in enumerate(runs):
            height = 55 * value
            state = "pinned" if name == "before" else "private"
            picture.box(i * 34, base - height, 28, height, state)
    for i, (state, name) in enumerate((("pinned", "before"), ("private", "after"))):
        picture.box(500, 30 + 30 * i, 18, 18, state)
        picture.text(526, 44 + 30 * i, name, "start")
    return picture


costs = [1.02**i for i in range(14)]
names = [["before", "after"][:: -1 if i % 2 else 1] for i in range(7)]
draw_readings(
    [
        ("seven, then seven", zip(["before"] * 7 + ["after"] * 7, costs, strict=True)),
        ("in turn", zip(chain(*names), costs, strict=True)),
    ],
    "Fourteen runs of the same work on a machine that gets slower. One after the other, the "
    "drift is charged to whoever came second. In turn, both pay for it.",
)

# %% [markdown]
# ## What to write beside a number
#
# A record names its command, the commit, the processor, the Python, the repeats. A row says what
# was done, by whom, with which spread, compared with what.


# %% export="bench.py" tags=["hide-input"]
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


# %% export="bench.py" tags=["hide-input"]
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


# %% [markdown]
# ## Four kinds of traffic
#
# What a match costs depends on what is in the tree. Three loads cover what caches meet: many
# prompts behind one system prompt; conversations, whose turns repeat all turns before them;
# prompts that have nothing in common. Our tree keeps a conversation in one node while nothing
# branches off: its best case. So in a fourth load every turn was answered twice, and the path to
# the last one runs through 64 nodes, in anybody's tree. All are drawn from a seed.

# %% export="bench_cache.py"
"""The loads of `minivllm bench cache`, and what is done with them."""

import gc
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import Any, Protocol

from minivllm.prefix_cache import HashIndex, PrefixCache
from minivllm.radix import RadixCache, Slots


def draw_tokens(rng: Random, num_tokens: int) -> "array[int]":
    """Random token ids below 65,536."""
    return array("i", array("H", rng.randbytes(2 * num_tokens)))


ELSE = array("i", range(65_536, 65_552))  # a page of ids that are never drawn


@dataclass(frozen=True)
class Load:
    """Sequences to enter, `step` tokens at a time (0: at once), all of them in turn.

    With `fork` something else branches off after each step. `renewed` gives sequences
    that are not entered: each with `tail` new last tokens.
    """

    name: str
    sequences: tuple["array[int]", ...]
    tail: int
    step: int = 0
    fork: bool = False

    def entries(self) -> Iterator["array[int]"]:
        """What is entered, in its order. Copies, so that no cache can keep ours."""
        length = len(self.sequences[0])
        for end in range(self.step or length, length + 1, self.step or length):
            for sequence in self.sequences:
                yield sequence[:end]
                if self.fork:
                    yield sequence[:end] + ELSE

    def renewed(self, seed: object, limit: int = 100) -> list["array[int]"]:
        """The first sequences, with new last tokens for each seed."""
        rng = Random(f"{self.name} {seed}")
        chosen = self.sequences[:limit]
        return [ids[: -self.tail] + draw_tokens(rng, self.tail) for ids in chosen]


def make_loads(seed: int = 0, scale: float = 1.0) -> list[Load]:
    """The four loads; `scale` multiplies how many sequences, and turns, they have."""
    rng = Random(f"loads {seed}")
    many, few, turns = (max(2, round(n * scale)) for n in (1000, 20, 64))
    head = draw_tokens(rng, 2048)
    shared = tuple(head + draw_tokens(rng, 2048) for _ in range(many))
    talks = tuple(draw_tokens(rng, 512 * turns) for _ in range(few))
    unshared = tuple(draw_tokens(rng, 2048) for _ in range(many))
    return [
        Load("shared", shared, tail=2048),
        Load("conversations", talks, tail=512, step=512),
        Load("answered twice", talks, tail=512, step=512, fork=True),
        Load("unshared", unshared, tail=2048),
    ]


# %% [markdown]
# Whatever encodes a sequence (outside the clock), matches, inserts and evicts can be measured.


# %% export="bench_cache.py"
class Tree(Protocol):
    """A prefix tree under test."""

    def encode(self, token_ids: "array[int]") -> Any:
        """A key, and the slots of its tokens, as this tree wants them."""

    def match(self, key: Any) -> int:
        """Look up; the tokens found."""

    def insert(self, key: Any) -> int:
        """Enter; the tokens that were there."""

    def evict(self, num_tokens: int) -> int:
        """Make room; the tokens that went."""

    def untraced_bytes(self) -> int:
        """Memory that Python's allocator does not see: tensors."""


class OwnTree:
    """Our radix tree or hash index."""

    def __init__(self, index: type[RadixCache], page_size: int) -> None:
        self.cache = index(page_size)

    def encode(self, token_ids: "array[int]") -> tuple["array[int]", Slots]:
        """The ids as they are; one slot a page."""
        size = self.cache.page_size
        firsts = range(0, len(token_ids) // size * size, size)
        return token_ids, Slots(array("i", firsts), size)

    def match(self, key: tuple["array[int]", Slots]) -> int:
        """Look up; the tokens found."""
        return self.cache.match_prefix(key[0]).matched_len

    def insert(self, key: tuple["array[int]", Slots]) -> int:
        """Enter; the tokens that were there."""
        return self.cache.insert(*key)

    def evict(self, num_tokens: int) -> int:
        """Make room, as the engine does, in pages; the tokens that went."""
        size = self.cache.page_size
        return size * len(self.cache.evict_pages(-(-num_tokens // size)))

    def untraced_bytes(self) -> int:
        """None: it holds bytes and arrays."""
        return 0


MakeTree = Callable[[int], Tree]  # from a page size
OWN_TREES: dict[str, MakeTree] = {
    "radix": lambda page_size: OwnTree(RadixCache, page_size),
    "hash": lambda page_size: OwnTree(HashIndex, page_size),
}

# %% [markdown]
# A look-up finds the beginning of a new prompt, or the whole of an old one. An insertion enters a
# new tail behind what is known: for the conversations a 64th turn, at 32,768 tokens. Tails are
# new in each repeat.


# %% export="bench_cache.py"
def fill(tree: Tree, load: Load) -> int:
    """Enter a load; the tokens that were new to the tree."""
    return sum(len(ids) - tree.insert(tree.encode(ids)) for ids in load.entries())


def match_trial(tree: Tree, sequences: list["array[int]"]) -> Trial:
    """Look all of them up."""
    keys = [tree.encode(ids) for ids in sequences]
    size = len(keys)
    return Trial(lambda: sum(map(tree.match, keys)) / size, num_ops=size)


def insert_trial(tree: Tree, load: Load) -> Trial:
    """Enter sequences with new tails, other ones in each repeat."""
    keys: list[Any] = []
    numbers = count()

    def prepare() -> None:
        renewed = load.renewed(("insert", next(numbers)))
        keys[:] = [tree.encode(ids) for ids in renewed]

    size = len(load.renewed(0))
    return Trial(lambda: sum(map(tree.insert, keys)) / size, prepare, size)


# %% [markdown]
# Evicting shrinks the tree, so it is filled up again before each repeat.


# %% export="bench_cache.py"
def evict_trial(
    tree: Tree,
    supply: Iterator["array[int]"],
    num_leaves: int,
    num_tokens: int,
    ops: int,
) -> Trial:
    """Evict `num_tokens` at a time, `ops` times, from a tree of so many leaves."""
    missing = num_leaves

    def prepare() -> None:
        nonlocal missing
        for ids in islice(supply, missing):
            tree.insert(tree.encode(ids))
        missing = ops

    def work() -> float:
        return sum(tree.evict(num_tokens) for _ in range(ops)) / ops

    return Trial(work, prepare, ops)


def single_pages(page_size: int) -> Iterator["array[int]"]:
    """Sequences of one page, no two alike, without end."""
    for start in count(0, page_size):
        yield array("i", range(start, start + page_size))


def random_sequences(seed: object, num_tokens: int) -> Iterator["array[int]"]:
    """Sequences that share nothing, without end."""
    rng = Random(f"{seed}")
    while True:
        yield draw_tokens(rng, num_tokens)


# %% [markdown]
# Memory is not timed. Python's allocator says what a tree has kept when all its inputs are gone; a
# tree of tensors adds what they hold.


# %% export="bench_cache.py"
def bytes_per_token(make: MakeTree, page_size: int, load: Load) -> Measurement:
    """What a filled tree holds, keys included, for each token in it."""
    tracemalloc.start()
    tree = make(page_size)
    num_tokens = fill(tree, load)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] + tree.untraced_bytes()
    tracemalloc.stop()
    return Measurement((held / num_tokens,), num_tokens)


# %% [markdown]
# And what does the cache cost *a request*: hash or walk, look up, take pages, publish them, give
# all back? The pool has room (`cold`); or each new page is taken from an older prompt (`full`); or
# the request came before (`warm`).


# %% export="bench_cache.py"
class Manager(Protocol):
    """A cache with its pages under test."""

    def request(self, token_ids: "array[int]") -> Any:
        """A request, as it is before the cache has seen it."""

    def serve(self, request: Any) -> int:
        """Its whole way through the cache; the tokens found."""


class OwnManager:
    """Our prefix cache, under one of its indexes."""

    def __init__(self, index: str, num_pages: int, page_size: int) -> None:
        self.cache = PrefixCache(num_pages, page_size, index)

    def request(self, token_ids: "array[int]") -> "array[int]":
        """The encoded ids: a request has them."""
        return token_ids

    def serve(self, request: "array[int]") -> int:
        """Find, acquire, publish, release."""
        match = self.cache.find(request)
        lease = self.cache.acquire(match, len(request))
        self.cache.release(lease, request, len(request))
        return match.matched_len


MakeManager = Callable[[int, int], Manager]  # from a number of pages, and their size
OWN_MANAGERS: dict[str, MakeManager] = {
    "hash": lambda num_pages, page_size: OwnManager("hash", num_pages, page_size),
    "radix": lambda num_pages, page_size: OwnManager("radix", num_pages, page_size),
}


def request_trial(
    make: MakeManager, state: str, num_tokens: int, ops: int, page_size: int = 16
) -> Trial:
    """Serve `ops` requests by a cache that is `cold`, `full` or `warm`."""
    room = ops * (num_tokens // page_size + (state != "full"))
    manager, numbers, requests = make(room, page_size), count(), list[Any]()

    def prepare() -> None:
        nonlocal manager
        rng = Random(f"{num_tokens} {0 if state == 'warm' else next(numbers)}")
        ids = [draw_tokens(rng, num_tokens) for _ in range(ops)]
        if state == "cold":
            manager = make(room, page_size)
        requests[:] = map(manager.request, ids)

    return Trial(lambda: sum(map(manager.serve, requests)) / ops, prepare, ops)


# %% [markdown]
# The first round of a warm or a full cache finds it empty: for that there is the warm-up. The hash
# index sits out at page size 1, which nobody runs.


# %% export="bench_cache.py"
@dataclass(frozen=True)
class CacheBench:
    """What `minivllm bench cache` measures; iterate over `rows()`."""

    trees: Mapping[str, MakeTree]
    managers: Mapping[str, MakeManager]
    page_sizes: tuple[int, ...] = (1, 16)
    repeats: int = 7
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.page_sizes, default=0) < 1:
            raise ValueError(f"page sizes must be at least 1: {self.page_sizes}")
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale must be above 0 and at most 1, not {self.scale}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, not {self.repeats}")

    def rows(self) -> Iterator[Row]:
        """Measure everything, row by row."""
        loads = make_loads(self.seed, self.scale)
        for size in self.page_sizes:
            for load in loads:
                yield from self._tree_rows(load, size)
            yield from self._eviction_rows(size)
            yield from self._leaf_rows(size)
            for load in loads:
                yield from self._memory_rows(load, size)
        yield from self._request_rows()

    def _rows(self, what: tuple[str, str, int], trials: dict[str, Trial]) -> list[Row]:
        return make_rows(what, measure(trials, self.repeats)) if trials else []

    def _makers(self, page_size: int) -> dict[str, MakeTree]:
        hidden = {"hash"} if page_size == 1 else set()
        return {name: m for name, m in self.trees.items() if name not in hidden}


# %% export="bench_cache.py" tags=["hide-input"]
class CacheBench(CacheBench):
    def _tree_rows(self, load: Load, size: int) -> Iterator[Row]:
        trees = {name: make(size) for name, make in self._makers(size).items()}
        for tree in trees.values():
            fill(tree, load)
        new, again = load.renewed("match"), list(load.sequences[:100])
        trials = {name: match_trial(tree, new) for name, tree in trees.items()}
        yield from self._rows((load.name, "match, new tail", size), trials)
        trials = {name: match_trial(tree, again) for name, tree in trees.items()}
        yield from self._rows((load.name, "match, again", size), trials)
        trials = {name: insert_trial(tree, load) for name, tree in trees.items()}
        yield from self._rows((load.name, "insert", size), trials)

    def _eviction_rows(self, size: int) -> Iterator[Row]:
        """2,048 tokens at a time, while 1,000 leaves become 900."""
        leaves, ops = (max(2, round(n * self.scale)) for n in (1000, 100))
        trials = {
            name: evict_trial(
                make(size), random_sequences(self.seed, 2048), leaves, 2048, ops
            )
            for name, make in self._makers(size).items()
        }
        yield from self._rows(("unshared", "evict 2,048 tokens", size), trials)

    def _leaf_rows(self, size: int) -> Iterator[Row]:
        """One page at a time, from few leaves and from a hundred times as many."""
        few = max(2, round(1000 * self.scale))
        ops = max(1, few // 20)
        trials = {
            (name, leaves): evict_trial(
                make(size), single_pages(size), leaves, size, ops
            )
            for name, make in self._makers(size).items()
            for leaves in (few, 100 * few)
        }
        found = measure({f"{n} {k}": t for (n, k), t in trials.items()}, self.repeats)
        for name, leaves in trials:
            what = (f"{leaves:,} leaves", "evict a page", size)
            base = f"{name} {few}"
            against = (f"{name}, {few:,} leaves", found[base])
            yield make_row(what, name, found[f"{name} {leaves}"], against)


# %% export="bench_cache.py" tags=["hide-input"]
class CacheBench(CacheBench):
    def _memory_rows(self, load: Load, size: int) -> Iterator[Row]:
        found = {
            name: bytes_per_token(make, size, load)
            for name, make in self._makers(size).items()
        }
        yield from make_rows((load.name, "memory of a token", size), found, "B")

    def _request_rows(self) -> Iterator[Row]:
        for num_tokens, most in ((4096, 20), (32_768, 4)):
            ops = max(2, round(most * self.scale))
            for state in ("cold", "full", "warm"):
                trials = {
                    name: request_trial(make, state, num_tokens, ops)
                    for name, make in self.managers.items()
                }
                what = (f"request of {num_tokens:,}", state, 16)
                yield from self._rows(what, trials)


# %% [markdown]
# ## Guests
#
# Ours against ours says little. SGLang has a radix tree and vLLM a block table, both in Python
# and in wheels that anyone can download. Installed, they bring kernels and servers that want a
# GPU. But their caches are plain data structures, a handful of files each. We run these, with
# *stand-ins* for what they import and a cache does not need. A stand-in has every name, can be
# called, and can be inherited from.

# %% export="peers.py"
"""Prefix caches of other engines, to be measured in the process that measures ours.

Taken from what is installed, or from a wheel or folder that need not be installed. Only
the modules of the cache are run. What else these import (kernels, configuration,
servers) is replaced by stand-ins.
"""

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from types import ModuleType, SimpleNamespace
from typing import Any

from minivllm.options import check_choice


class AnyName(type):
    """The type of stand-ins: a name that is asked for is there, a stand-in itself."""

    def __getattr__(cls, name: str) -> Any:
        return stand_in(name)


class Blank(metaclass=AnyName):
    """What a stand-in and its instances do: take anything, do nothing."""

    def __init__(self, *args: object, **named: object) -> None: ...

    def __init_subclass__(cls, **named: object) -> None: ...

    def __class_getitem__(cls, item: object) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        return stand_in(name)

    def __call__(self, *args: object, **named: object) -> Any:
        return self


def stand_in(name: str) -> Any:
    """A class to call, to inherit from, to take names from; no special methods."""
    if name.startswith("__"):
        raise AttributeError(name)
    return AnyName(name, (Blank,), {})


# %% [markdown]
# An import hook decides which module is real.


# %% export="peers.py"
class StandIns(MetaPathFinder, Loader):
    """An import hook: chosen modules are real, what they import may not be."""

    def __init__(self, package: str, place: str, real: Sequence[str]) -> None:
        self.package, self.place = package, place
        self.real = {f"{package}.{name}" for name in real}
        self.others = list(sys.meta_path)
        self.made: list[str] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """None where the ordinary finders shall go on; else a stand-in."""
        inside = fullname.partition(".")[0] == self.package
        if fullname in self.real or (not inside and self._leave(fullname, path)):
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        folders = [self.place, *fullname.split(".")]
        spec.submodule_search_locations = ["/".join(folders)]
        return spec

    def _leave(self, name: str, path: Sequence[str] | None) -> bool:
        """Whether another package is no concern of ours: it exists, or we are done."""
        return not self.others or any(f.find_spec(name, path) for f in self.others)

    def exec_module(self, module: ModuleType) -> None:
        """Give a stand-in module every name; real submodules are themselves."""
        self.made.append(module.__name__)

        def find(name: str) -> Any:
            full = f"{module.__name__}.{name}"
            return import_module(full) if full in self.real else stand_in(name)

        module.__dict__["__getattr__"] = find


@contextmanager
def standing_in(hook: StandIns) -> Iterator[None]:
    """Import with stand-ins; afterwards they answer for the one package only."""
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        hook.others.clear()
        for name in hook.made:
            if name.partition(".")[0] != hook.package:
                del sys.modules[name]


# %% [markdown]
# A guest that is not here, or does not load, is `PeerAbsent`, with the reason, and the record
# says so.

# %% export="peers.py"
REAL = {  # the modules that are run; all others of the package are stand-ins
    "sglang": [
        f"srt.mem_cache.{name}"
        for name in (
            *("radix_cache", "base_prefix_cache", "cache_init_params"),
            *("events", "utils", "evict_policy"),
        )
    ],
    "vllm": [
        *("utils", "utils.hashing", "utils.math_utils", "v1.utils", "v1.request"),
        *("v1.kv_cache_interface", "v1.kv_cache_layout", "v1.kv_cache_spec_registry"),
        *("v1.structured_output.request", "v1.core.block_pool"),
        *("v1.core.kv_cache_coordinator", "v1.core.kv_cache_manager"),
        *("v1.core.kv_cache_metrics", "v1.core.kv_cache_utils"),
        "v1.core.single_type_kv_cache_manager",
    ],
}


class PeerAbsent(Exception):
    """A peer cannot be measured here; the message says why."""


@cache
def load_peer(name: str, places: tuple[str, ...] = ()) -> str:
    """Import a peer's cache from `places` (wheels, folders) or what is installed.

    Returns its version. Raises `PeerAbsent` where it cannot be had.
    """
    found = next(iter(distributions(name=name, path=[*places, *sys.path])), None)
    if found is None:
        where = f"not in {', '.join(places)}" if places else "no --peer-path"
        raise PeerAbsent(f"not installed, {where}")
    place = str(found.locate_file("")).rstrip("/")
    try:
        import torch  # both keep or describe tensors

        torch.set_num_threads(1)
        with standing_in(StandIns(name, place, REAL[name])):
            for module in REAL[name]:
                import_module(f"{name}.{module}")
    except Exception as error:  # another version may fail in any way
        told = f"{type(error).__name__}: {error}"
        raise PeerAbsent(f"{found.version} does not load: {told}") from error
    return found.version


# %% [markdown]
# SGLang's tree is called as its scheduler calls it: ids in an `array("q")`, slots in a tensor. A
# match returns a length and a node.


# %% export="peers.py" tags=["hide-input"]
class SglangTree:
    """SGLang's `RadixCache`, through its public methods (0.5.23)."""

    def __init__(self, page_size: int) -> None:
        import torch

        self.torch = torch
        self.api = import_module("sglang.srt.mem_cache.base_prefix_cache")
        module = import_module("sglang.srt.mem_cache.radix_cache")
        allocator = SimpleNamespace(
            device=torch.device("cpu"), free_segment=lambda *args, **named: None
        )
        self.new_key = module.RadixKey
        self.tree = module.RadixCache.create_simulated(
            mock_allocator=allocator, page_size=page_size
        )

    def encode(self, token_ids: Sequence[int]) -> tuple[Any, Any]:
        """The ids in 64 bits; a slot for each token, in a tensor."""
        return array("q", token_ids), self.torch.arange(len(token_ids))

    def match(self, key: tuple[Any, Any]) -> int:
        """Look up; the tokens found."""
        asked = self.api.MatchPrefixParams(key=self.new_key(key[0]))
        return int(self.tree.match_prefix(asked).device_prefix_len)

    def insert(self, key: tuple[Any, Any]) -> int:
        """Enter; the tokens that were there."""
        given = self.api.InsertParams(key=self.new_key(key[0]), value=key[1])
        return int(self.tree.insert(given).prefix_len)

    def evict(self, num_tokens: int) -> int:
        """Make room; the tokens that went."""
        asked = self.api.EvictParams(num_tokens=num_tokens)
        return int(self.tree.evict(asked).num_tokens_evicted)

    def untraced_bytes(self) -> int:
        """What its tensors hold."""
        nodes, total = list(self.tree.root_node.children.values()), 0
        while nodes:
            node = nodes.pop()
            total += node.value.untyped_storage().nbytes()
            nodes += node.children.values()
        return total


# %% [markdown]
# vLLM's unit is a request: hash its blocks (by default SHA-256 of a pickle), look up, allocate,
# which also enters the blocks in its table, free.


# %% export="peers.py" tags=["hide-input"]
class VllmManager:
    """vLLM's `KVCacheManager` for one group of attention layers (0.32)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        import torch

        spec = import_module("vllm.v1.kv_cache_interface")
        utils = import_module("vllm.v1.core.kv_cache_utils")
        sha256 = import_module("vllm.utils.hashing").sha256
        utils.init_none_hash(sha256)
        layers = spec.FullAttentionSpec(
            block_size=page_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = spec.KVCacheConfig(
            num_blocks=num_pages + 1,  # it keeps one for itself
            kv_cache_tensors=[],
            kv_cache_groups=[spec.KVCacheGroupSpec(["layer"], layers)],
        )
        manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        self.manager = manager(config, 2**20, page_size, page_size)
        self.hash_blocks = utils.get_request_block_hasher(page_size, sha256)
        self.new_request = import_module("vllm.v1.request").Request
        self.num_requests = 0

    def request(self, token_ids: Sequence[int]) -> Any:
        """A request whose blocks have no hashes yet."""
        params = SimpleNamespace(
            max_tokens=1,
            extra_args=None,
            structured_outputs=None,
            skip_reading_prefix_cache=False,
        )
        self.num_requests += 1
        return self.new_request(str(self.num_requests), list(token_ids), params, None)

    def serve(self, request: Any) -> int:
        """Hash, look up, allocate, free; the tokens found."""
        request.block_hashes = self.hash_blocks(request)
        blocks, found, _ = self.manager.get_computed_blocks(request)
        missing = request.num_tokens - found
        given = self.manager.allocate_slots(request, missing, found, blocks)
        assert given is not None, "out of blocks"
        self.manager.free(request)
        return int(found)


# %% export="peers.py" tags=["hide-input"]
@dataclass
class Guests:
    """The peers that are here, as contestants, and what is to be said of each."""

    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    trees: dict[str, Callable[[int], SglangTree]] = field(default_factory=dict)
    managers: dict[str, Callable[[int, int], VllmManager]] = field(default_factory=dict)


def invite(names: Sequence[str], places: Sequence[str] = ()) -> Guests:
    """Load peers by name; `ValueError` for a name that nobody has an adapter for."""
    guests = Guests()
    for name in names:
        check_choice("peer", name, REAL)
        try:
            guests.versions[name] = load_peer(name, tuple(places))
        except PeerAbsent as reason:
            guests.absent[name] = str(reason)
    guests.trees = {"sglang": SglangTree} if "sglang" in guests.versions else {}
    guests.managers = {"vllm": VllmManager} if "vllm" in guests.versions else {}
    return guests


# %% [markdown]
# ## The same prompt, eight times
#
# The second experiment takes the whole engine, with weights, and asks what chapters 9 and 10
# could only compute: the same prompt comes several times, pages become visible at one moment or
# another, somebody waits or nobody does. Who gets a first word sooner, and who ends later? Most
# of a *case*'s *outcome* is no time: what was found, what was computed, which tokens came out.
#
# The authors of mini-vllm-rs, the engine of [the prologue](00_puzzle.md)'s puzzle, have written an
# article with such runs, on a Metal GPU, with 2, 4 and 8 requests of 493 tokens. It is *the article*
# below.

# %% export="bench_reuse.py"
"""`minivllm bench reuse`: one prompt several times, under every answer to who waits.

When does a page become visible, who waits for it, and for how long? The same prompt is
sent at once, or while the first request decodes, to engines that answer differently.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any, cast

from minivllm.batch import Chunk
from minivllm.bench import Spread, Trial, measure, nothing
from minivllm.engine import Clock, Engine, Limits, Runner, WallClock
from minivllm.events import Observer, ignore
from minivllm.options import CHOICES, assemble, check_choice, read_options
from minivllm.request import RequestOutput, SamplingParams, TokenIds, encode_ids
from minivllm.simulation import (
    SerialPrefill,
    SimulatedRunner,
    VirtualClock,
    Work,
    work_of,
)

PUBLISH = ("off", *CHOICES["publish"])  # off: no prefix cache
ARRIVALS = ("together", "token", "decode")


@dataclass(frozen=True)
class Case:
    """How many requests there are, when they come, and who shares what with whom.

    `arrival`: all "together"; or the first alone, and the others when its caller has
    its first output "token", or when its "decode" begins, which is the moment in which
    the forward pass over its prompt has ended and nothing has come of it yet.
    """

    num_requests: int = 1
    publish: str = "off"
    single_flight: str = "none"
    arrival: str = "together"
    engine: str = "minivllm"


Plan = tuple[tuple[tuple[str, int, int], ...], ...]  # steps, chunks: who, start, size


@dataclass(frozen=True)
class Outcome:
    """One run of a case, times in seconds; requests in order of arrival."""

    ttfts_s: tuple[float, ...]  # from a request's submission to its first token
    e2es_s: tuple[float, ...]  # and to its end
    makespan_s: float  # from the first submission to the last end
    cached_tokens: tuple[int, ...]
    prefill_tokens: int  # computed
    flights: int
    token_ids: tuple[tuple[int, ...], ...]
    plan: Plan = ()


# %% [markdown]
# All requests come at once, or the second comes "when the first has its first token", or "as it
# enters decode". In this engine the step that completes a prompt also samples the first token, so
# these are two sides of one moment. Outside, `step` has returned: the caller has the token, the
# prompt is published, the flight is closed. Inside, the forward pass has ended and nobody has
# been told; another thread can submit a request then. This runner stands inside.


# %% export="bench_reuse.py"
class Watched:
    """Notes what each step takes, and tells when a runner gives its first token."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self.runner = runner
        self.clock = clock
        self.steps: list[tuple[Work, float]] = []
        self.plan: Plan = ()
        self.at_first_token: Callable[[], object] = nothing

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Run the batch; nothing is committed yet when `at_first_token` is called."""
        start_s = self.clock.now()
        tokens = self.runner.run(chunks)
        self.steps.append((work_of(chunks), self.clock.now() - start_s))
        self.plan += (tuple((c.request_id, c.start, len(c.token_ids)) for c in chunks),)
        if any(chunk.samples for chunk in chunks):
            tell, self.at_first_token = self.at_first_token, nothing
            tell()
        return tokens


# %% [markdown]
# The engine is made anew for each run; the weights stay. The experiment also runs on chapter 8's
# simulated runner.


# %% export="bench_reuse.py"
@dataclass(frozen=True)
class Reuse:
    """The experiment: what all of its runs have in common.

    `make_runner` makes a runner with memory for so many pages, on the clock of the run:
    a model's, or chapter 8's simulated one. `steps` collects what steps took.
    """

    make_runner: Callable[[int, Any], Runner]
    limits: Limits
    prompt_ids: TokenIds
    max_tokens: int = 128
    page_size: int = 16
    max_batch_tokens: int = 512
    make_clock: Callable[[], Clock] = WallClock
    observer: Observer = ignore
    steps: list[tuple[Work, float]] = field(default_factory=list)

    def make_engine(self, case: Case) -> Engine:
        """A cold engine with room for all requests of a case."""
        size = self.page_size
        options: dict[str, Any] = {"page_size": size, "index": "none"}
        if case.publish != "off":
            options |= {"publish": case.publish, "index": "radix"}
        options |= {"single_flight": case.single_flight}
        options |= {"max_batch_tokens": self.max_batch_tokens}
        footprint = len(self.prompt_ids) + self.max_tokens - 1
        num_pages, clock = case.num_requests * -(-footprint // size), self.make_clock()
        runner = Watched(self.make_runner(num_pages, clock), clock)
        chosen = read_options(options)
        parts = (chosen, num_pages, runner, self.limits, self.observer)
        return assemble(*parts, clock=clock)

    def run(self, case: Case) -> Outcome:
        """Send the requests when they are due, and step to the end."""
        engine = self.make_engine(case)
        watched, due = cast(Watched, engine.runner), self._submit(engine, case)
        next(due)
        if case.arrival == "together":
            list(due)
        elif case.arrival == "decode":
            watched.at_first_token = lambda: list(due)
        ended: list[RequestOutput] = []
        while engine.has_unfinished():
            outputs = engine.step()
            ended += [output for output in outputs if output.finished]
            if outputs:
                list(due)
        self.steps.extend(watched.steps)
        return replace(outcome_of(ended, engine.stats()), plan=watched.plan)

    def rehearse(self, case: Case) -> Plan:
        """The steps that a case will take, found out without the model (chapter 8)."""

        def simulated(num_pages: int, clock: VirtualClock) -> Runner:
            cost, vocab_size = SerialPrefill(1, 1, 1, 0), self.limits.vocab_size
            return SimulatedRunner(cost, clock, vocab_size, num_pages, self.page_size)

        parts: dict[str, Any] = {
            "make_runner": simulated,
            "make_clock": VirtualClock,
            "steps": [],
        }
        return replace(self, **parts).run(case).plan

    def _submit(self, engine: Engine, case: Case) -> Iterator[str]:
        """Submit one more whenever the next id is asked for."""
        wanted = self.max_tokens
        params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
        for _ in range(case.num_requests):
            yield engine.submit(self.prompt_ids, params)


# %% [markdown]
# A request that failed would look quick, so a run with one is refused.


# %% export="bench_reuse.py"
def outcome_of(ended: Sequence[RequestOutput], stats: Mapping[str, int]) -> Outcome:
    """The figures of a run. Raises `RuntimeError` if a request ended otherwise."""
    outputs = sorted(ended, key=lambda output: int(output.request_id))
    if any(output.outputs[0].finish_reason != "length" for output in outputs):
        raise RuntimeError("a request ended before its time: nothing was measured")
    metrics = [output.metrics for output in outputs]
    return Outcome(
        tuple(each.ttft_s or 0.0 for each in metrics),
        tuple(each.e2e_s or 0.0 for each in metrics),
        max(each.finished_s or 0.0 for each in metrics) - metrics[0].arrival_s,
        tuple(output.num_cached_tokens for output in outputs),
        stats["prefill_tokens"],
        stats["flights"],
        tuple(tuple(output.outputs[0].token_ids) for output in outputs),
    )


# %% [markdown]
# The cases: four publications, or no cache, times three ways to wait, times the arrivals, at ten
# to twenty seconds each. Three repeats would take more than half an hour.


# %% export="bench_reuse.py" tags=["hide-input"]
def make_cases(
    numbers: Sequence[int],
    publish: Sequence[str],
    single_flight: Sequence[str],
    arrivals: Sequence[str] = ("together",),
    engines: Sequence[str] = (),
) -> list[Case]:
    """Every combination that can differ. `ValueError` for a value that does not exist.

    Without a cache, or alone, nobody waits for anybody. Who comes later is the second
    of two. Other engines take the requests as one batch.
    """
    for name, given, choices in (
        ("publish", publish, PUBLISH),
        ("single_flight", single_flight, CHOICES["single_flight"]),
        ("arrival", arrivals, ARRIVALS),
        ("peer", engines, PEERS),
    ):
        for value in given:
            check_choice(name, value, choices)
    if min(numbers, default=0) < 1:
        raise ValueError(f"num_requests must be at least 1, not {list(numbers)}")
    cases = [
        Case(number, shown, waits if shown != "off" and number > 1 else "none", arrival)
        for arrival in arrivals
        for number in (numbers if arrival == "together" else (2,))
        for shown in publish
        for waits in single_flight
    ]
    cases += [Case(number, engine=name) for name in engines for number in numbers]
    return list(dict.fromkeys(cases))


# %% [markdown]
# But many of them are the same run. Under release at completion it cannot matter whether the
# leader publishes early: whoever could notice is held. A rehearsal on a virtual clock gives a
# case's exact steps in milliseconds. Cases with equal steps become one contestant and take turns
# in it, and their counts and tokens are compared.


# %% export="bench_reuse.py"
def group_cases(like: Reuse, cases: Sequence[Case]) -> list[list[Case]]:
    """Put cases together that differ in publication only, and not in any step."""
    groups: dict[tuple[Case, Plan], list[Case]] = {}
    for case in cases:
        plan = like.rehearse(case) if case.engine == "minivllm" else ()
        groups.setdefault((replace(case, publish=""), plan), []).append(case)
    return list(groups.values())


# %% export="bench_reuse.py" tags=["hide-input"]
@dataclass(frozen=True)
class ReuseRow:
    """A group of cases with the same steps; times in seconds.

    `ran` names the publication of each repeat. `same_tokens`: each output is the one
    that a request gets alone, without a cache.
    """

    engine: str
    arrival: str
    num_requests: int
    publish: Sequence[str]
    single_flight: str
    ran: Sequence[str]
    ttft_s: Mapping[str, Any]  # the mean of the requests
    longest_s: Mapping[str, Any]  # the longest time from a submission to its end
    makespan_s: Mapping[str, Any]
    ttfts_s: Sequence[float]  # of each request, medians
    e2es_s: Sequence[float]
    cached_tokens: Sequence[int]
    prefill_tokens: int
    flights: int
    same_tokens: bool


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """Readings with their median and bounds, for a record."""
    spread = Spread(tuple(values))
    bounds = {"median": spread.median, "low": spread.low, "high": spread.high}
    return bounds | {"values": list(values)}


def medians(repeats: Sequence[Sequence[float]]) -> list[float]:
    """The median of each request over the repeats."""
    return [median(values) for values in zip(*repeats, strict=True)]


def make_reuse_row(
    group: Sequence[Case], runs: Sequence[tuple[Case, Outcome]], alone: Sequence[int]
) -> ReuseRow:
    """A row of the record. `RuntimeError` if two repeats counted differently."""
    case, outcomes = group[0], [outcome for _, outcome in runs]
    counts = {(o.cached_tokens, o.prefill_tokens, o.flights, o.plan) for o in outcomes}
    if len(counts) != 1:
        raise RuntimeError(f"the repeats of {case} took different steps")
    ((cached, prefill, flights, _),) = counts
    return ReuseRow(
        case.engine,
        case.arrival,
        case.num_requests,
        [each.publish for each in group],
        case.single_flight,
        ran=[each.publish for each, _ in runs],
        ttft_s=spread_of([fmean(each.ttfts_s) for each in outcomes]),
        longest_s=spread_of([max(each.e2es_s) for each in outcomes]),
        makespan_s=spread_of([each.makespan_s for each in outcomes]),
        ttfts_s=medians([each.ttfts_s for each in outcomes]),
        e2es_s=medians([each.e2es_s for each in outcomes]),
        cached_tokens=list(cached),
        prefill_tokens=prefill,
        flights=flights,
        same_tokens=all(ids == alone for o in outcomes for ids in o.token_ids),
    )


# %% [markdown]
# Everybody runs once to be warm; ours gives the tokens with which all others are compared.


# %% export="bench_reuse.py"
def measure_reuse(
    contestants: Mapping[str, Callable[[Case], Outcome]],
    groups: Sequence[Sequence[Case]],
    repeats: int = 3,
    told: Callable[[Case, Outcome], object] = lambda case, outcome: None,
) -> list[ReuseRow]:
    """Run all groups in turn, `repeats` times, every other round in reverse order.

    The cases of a group take turns: a repeat runs one of them.
    """
    first = {name: run(Case()) for name, run in contestants.items()}  # all are warm now
    runs: list[list[tuple[Case, Outcome]]] = [[] for _ in groups]

    def work(number: int) -> float:
        group, before = groups[number], runs[number]
        case = group[len(before) % len(group)]
        before.append((case, contestants[case.engine](case)))
        told(*before[-1])
        return sum(before[-1][1].cached_tokens)

    trials = {str(n): Trial(partial(work, n)) for n in range(len(groups))}
    measure(trials, repeats, warmups=0)
    alone, pairs = first["minivllm"].token_ids[0], zip(groups, runs, strict=True)
    return [make_reuse_row(group, ran, alone) for group, ran in pairs]


def step_facts(steps: Sequence[tuple[Work, float]]) -> list[dict[str, Any]]:
    """What each kind of step took: the fit of chapter 8's cost model needs them."""
    kinds: dict[Work, list[float]] = {}
    for work, seconds in steps:
        kinds.setdefault(work, []).append(seconds)
    return [
        asdict(work) | {"median_s": median(times), "number": len(times)}
        for work, times in kinds.items()
    ]


# %% [markdown]
# The prompt is text, cut to the wanted number of tokens.


# %% export="bench_reuse.py" tags=["hide-input"]
import time
from contextlib import redirect_stderr, suppress
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.model import Decoder
    from minivllm.runner import Backend


def make_prompt(llm: "LLM", num_tokens: int) -> TokenIds:
    """The first tokens of a timetable; without a tokenizer, the first token ids."""
    vocab_size = llm.config.vocab_size
    if llm.tokenizer is None:
        return [i % vocab_size for i in range(num_tokens)]
    days = "Monday", "Tuesday", "Wednesday", "Thursday", "Friday"
    text = "".join(
        f"On {day} of week {week} room {week * 7 % 19 + i} is open from {8 + i}. "
        for week in range(num_tokens // 60 + 1)
        for i, day in enumerate(days)
    )
    ids: list[int] = llm.tokenizer.encode(text).ids
    return ids[:num_tokens]


def decoder_of(llm: "LLM") -> "Decoder":
    """The model that an engine runs."""
    runner: Any = llm.engine.runner
    return cast("Decoder", runner.model)


def backend_of(llm: "LLM") -> "Backend":
    """Who computes for it."""
    runner: Any = llm.engine.runner
    return cast("Backend", runner.backend)


def load_reuse(llm: "LLM", num_prompt_tokens: int = 493, **sizes: Any) -> Reuse:
    """The experiment on a loaded model; `sizes` are fields of `Reuse`."""
    from minivllm.runner import ModelRunner  # torch begins here

    decoder, context = decoder_of(llm), llm.engine.limits.max_context
    page_size = sizes.get("page_size", Reuse.page_size)
    num_tokens = num_prompt_tokens + sizes.get("max_tokens", Reuse.max_tokens)
    if num_tokens > context:
        raise ValueError(f"{num_tokens} tokens, and the model's context is {context}")
    return Reuse(
        lambda num_pages, clock: ModelRunner(
            decoder, num_pages, page_size, backend=backend_of(llm)
        ),
        llm.engine.limits,
        encode_ids(make_prompt(llm, num_prompt_tokens)),
        **sizes,
    )


# %% [markdown]
# And a guest: transformers, with the same weights, on one batch of identical prompts, without a
# cache between them. A static batch gives all first tokens together; a stopping rule that never
# stops reads the clock at each token.


# %% export="bench_reuse.py" tags=["hide-input"]
def load_transformers(model: str, llm: "LLM") -> Any:
    """The same file, format of numbers and device; an answer never ends by itself."""
    from transformers import AutoModelForCausalLM

    from minivllm.loader import find_model

    path = find_model(model)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        place["pretrained_model_name_or_path"] = str(path.parent)
        place["gguf_file"] = path.name
        with suppress(ImportError):  # older ones dequantise anyway
            from transformers import GgufConfig

            place["quantization_config"] = GgufConfig(dequantize=True)
    weight = decoder_of(llm).embed_tokens.weight
    with redirect_stderr(StringIO()):  # a progress bar that cannot be turned off
        loaded: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=weight.dtype)
    loaded = loaded.to(weight.device).eval()
    loaded.generation_config.eos_token_id = None
    return loaded


class TransformersBatch:
    """transformers' `generate` on one static batch: all begin and end together."""

    def __init__(self, model: str, llm: "LLM", like: Reuse) -> None:
        self.model = load_transformers(model, llm)
        self.prompt_ids, self.max_tokens = list(like.prompt_ids), like.max_tokens

    def run(self, case: Case) -> Outcome:
        """Generate; the clock is read when each token is there."""
        import torch

        batch = torch.tensor([self.prompt_ids] * case.num_requests)
        times = [time.perf_counter()]

        def note(token_ids: Any, scores: Any, **named: Any) -> Any:
            done = token_ids[:, -1].tolist()  # waits for a GPU
            times.append(time.perf_counter())
            return torch.zeros(len(done), dtype=torch.bool, device=token_ids.device)

        out = self.model.generate(
            batch.to(self.model.device),
            attention_mask=torch.ones_like(batch).to(self.model.device),
            do_sample=False,
            max_new_tokens=self.max_tokens,
            pad_token_id=0,
            stopping_criteria=[note],
        )
        return self._outcome(times, out[:, batch.shape[1] :].tolist(), batch.numel())

    def _outcome(
        self, times: Sequence[float], answers: list[list[int]], num_tokens: int
    ) -> Outcome:
        number, token_ids = len(answers), tuple(map(tuple, answers))
        first_s, whole_s = times[1] - times[0], times[-1] - times[0]
        ttfts_s, e2es_s = (first_s,) * number, (whole_s,) * number
        cached = (0,) * number
        return Outcome(ttfts_s, e2es_s, whole_s, cached, num_tokens, 0, token_ids)


PEERS = {"transformers": TransformersBatch}


# %% export="bench_reuse.py" tags=["hide-input"]
def record_reuse(
    llm: "LLM",
    like: Reuse,
    cases: Sequence[Case],
    model: str,
    repeats: int,
    told: Callable[[Case, Outcome], object],
) -> tuple[list[ReuseRow], dict[str, Any]]:
    """Measure all cases; the rows, and the facts that belong beside them."""
    import torch
    import transformers

    contestants, absent = {"minivllm": like.run}, {}
    for name in {case.engine: None for case in cases if case.engine in PEERS}:
        try:
            contestants[name] = PEERS[name](model, llm, like).run
        except ImportError as reason:  # transformers reads GGUF files with accelerate
            absent[name] = " ".join(str(reason).split())
    here = [case for case in cases if case.engine in contestants]
    rows = measure_reuse(contestants, group_cases(like, here), repeats, told)
    weight = decoder_of(llm).embed_tokens.weight
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return rows, {
        "versions": versions,
        "absent": absent,
        "device": str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "steps": step_facts(like.steps),
    }


# %% [markdown]
# ## A load that does not wait
#
# Traffic does not wait for the end of the last piece of work. If a server stands still for five
# seconds, those who come in these five seconds wait too, and a client that sends its next request
# when it has the last answer never notices them. Such a load is *closed*, and what it leaves out
# is *coordinated omission*: measuring stops exactly while the thing measured is slow.
#
# In an *open* load each call has a moment when it is due, and a task of its own, which sleeps
# until then. Its times count from that moment, whenever it was sent. How a call is made (`ask`)
# is left open: the first run needs no network.

# %% export="bench_serve.py"
"""`minivllm bench serve`: an open-loop load on any server that speaks OpenAI's API."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from minivllm.bench import Measurement, Trial, compare, measure
from minivllm.drawing import Picture, draw_rows
from minivllm.options import check_choice

if TYPE_CHECKING:
    import httpx2


class ServerFault(Exception):
    """The server answered, and not with what was asked."""


@dataclass(frozen=True)
class Call:
    """What is asked, and when it is due, in seconds since the load began."""

    due_s: float
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Reply:
    """What became of a call: times in seconds since the load began, and counts.

    `pieces_s`: when each piece of text came. Counts are the server's; None if it gives
    none. `fault` says what went wrong, or nothing.
    """

    due_s: float
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    streamed: bool = True
    finished: bool = False
    fault: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From the moment when the call was due, whenever it was sent."""
        if self.fault or not self.streamed or not self.pieces_s:
            return None
        return self.pieces_s[0] - self.due_s


Now = Callable[[], float]
Ask = Callable[[Call, Reply, Now], Awaitable[None]]  # fills in the reply


# %% export="bench_serve.py"
async def send_all(
    calls: Sequence[Call], ask: Ask, timeout_s: float = 600.0
) -> list[Reply]:
    """Send every call when it is due, whatever has become of the others."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    def now() -> float:
        return loop.time() - start_s

    async def send(call: Call) -> Reply:
        await asyncio.sleep(max(0.0, call.due_s - now()))
        reply = Reply(call.due_s, sent_s=now())
        try:
            async with asyncio.timeout(timeout_s):
                await ask(call, reply, now)
        except TimeoutError:
            reply.fault = f"no end after {timeout_s:g} s"
        except Exception as error:
            reply.fault = name_fault(error)
        reply.done_s = reply.done_s or now()
        return reply

    return await asyncio.gather(*map(send, calls))


def name_fault(error: Exception) -> str:
    """What to count a failure as: one line without what differs from call to call."""
    if isinstance(error, ServerFault):
        return str(error)
    if isinstance(error, ValueError | KeyError | TypeError | AttributeError):
        return "malformed answer"
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if "ConnectError" in kinds:
        return "cannot connect"
    if "RemoteProtocolError" in kinds or "ReadError" in kinds:
        return "connection dropped"
    return f"{kinds[0]}: {error}"


# %% [markdown]
# The moments are random with a mean rate, or all at once.

# %% export="bench_serve.py"
ARRIVAL_TIMES = ("poisson", "burst", "trace")


def due_times(kind: str, number: int, rate: float, rng: Random) -> list[float]:
    """When so many calls are due: at random, `rate` a second on average, or at once."""
    gaps = [rng.expovariate(rate) if kind == "poisson" else 0.0 for _ in range(number)]
    return list(accumulate(gaps))


# %% [markdown]
# Here is a server that takes a tenth of a second for a request, one after the other, and once
# five seconds. Its event loop has a clock that jumps to the next timer: chapter 8's trick, for
# `asyncio`.

# %% name="open-loop"
import selectors
from concurrent.futures import ThreadPoolExecutor


class Jumps(selectors.SelectSelector):
    """Waits for nothing: the time that it should wait has passed."""

    time_s = 0.0

    def select(self, timeout=None):
        self.time_s += timeout or 0.0
        return super().select(0)


def in_virtual_time(make_work):
    """Run a coroutine on a virtual clock (in a thread: a notebook has its own loop)."""

    def run():
        selector = Jumps()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.time_s
        try:
            return loop.run_until_complete(make_work())
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def make_stub():
    """A server with one worker, which stands still once."""
    turn, numbers = asyncio.Lock(), iter(range(10**6))

    async def ask(call, reply, now):
        async with turn:
            await asyncio.sleep(5.0 if next(numbers) == 40 else 0.1)
        reply.pieces_s.append(now())

    return ask


calls = [Call(due_s) for due_s in due_times("poisson", 200, 4.0, Random("open loop"))]


async def closed_loop():
    """The same calls by one client, who waits for each answer before the next."""
    ask, replies = make_stub(), []
    for _ in calls:
        replies += await send_all([Call(0.0)], ask)
    return replies


async def open_loop():
    return await send_all(calls, make_stub())


loops = {"closed": closed_loop, "open": open_loop}
ttfts = {
    name: [r.ttft_s for r in in_virtual_time(loop)] for name, loop in loops.items()
}
for name, values in ttfts.items():
    shares = [f"p{100 * q:g} {percentile(values, q):.2f} s" for q in (0.5, 0.9, 0.99)]
    print(f"{name:6}", ", ".join(shares), f"· above 1 s: {sum(v > 1 for v in values)}")

# %% tags=["hide-input"]
draw_rows(
    [
        (
            f"{name} loop, p{round(100 * share)}",
            [(0, percentile(values, share), state, "")],
        )
        for (name, values), state in zip(ttfts.items(), ("plain", "lost"), strict=True)
        for share in (0.5, 0.8, 0.9, 0.95, 0.99)
    ],
    caption="Seconds until the first token of 200 requests to one server that stands still for five "
    "seconds. A client that waits for its answers meets the pause once, outside of all percentiles. "
    "Sent when they are due, one request in six waits longer than a second.",
)

# %% [markdown]
# The closed loop gets one late answer in two hundred, and a P99 of [0.10](#open-loop) s. The open
# loop gets [34](#open-loop), and a P99 of [4.58](#open-loop) s. It is the same server and the same
# pause.
#
# ### Whoever it is that answers
#
# A real server needs prompts, and somebody who speaks the protocol. Prompts begin with words that
# all share; the rest is each call's own, and new in each round. Or they come from a file. A file
# has the same prompts in each round, and a server with a prefix cache would know all of them after
# the first. So each round puts a word of its own before them: what they share among themselves they
# still share, and with an earlier round they share nothing. `--same-prompts` leaves them as they
# are, and the record says which it was.


# %% export="bench.py" tags=["hide-input"]
import json
from typing import TypeVar

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


# %% export="bench_serve.py"
@dataclass(frozen=True)
class Mix:
    """Prompts of random words: the first part is shared, the rest is a call's own."""

    shared_words: int = 200
    own_words: int = 20
    chat: bool = False

    def body(self, seed: int, number: int, index: int) -> dict[str, Any]:
        """The call with this index in the round with this number."""
        words = _words(Random(f"{seed}"), self.shared_words)
        words += _words(Random(f"{seed} {number} {index}"), self.own_words)
        text = " ".join(words)
        if self.chat:
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}


def _words(rng: Random, number: int) -> list[str]:
    syllables = ("ba", "do", "ki", "lu", "me", "no", "ra", "si", "te", "vu")
    return ["".join(rng.choices(syllables, k=2)) for _ in range(number)]


def salted(body: Mapping[str, Any], number: int, seed: int) -> dict[str, Any]:
    """What a call of a file says, beginning in another way in each round.

    A word is put before a text. Of token ids the first goes to the end, one more in
    each round: any other might not be in the vocabulary.
    """
    word, prompt = f"{number}.{seed}:", body.get("prompt")
    if isinstance(prompt, str):
        return {**body, "prompt": f"{word} {prompt}"}
    if prompt:
        turn = number % len(prompt)
        return {**body, "prompt": [*prompt[turn:], *prompt[:turn]]}
    first, *others = body["messages"]
    said = first.get("content") or ""
    parts = isinstance(said, list)
    said = [{"type": "text", "text": word}, *said] if parts else f"{word} {said}"
    return {**body, "messages": [{**first, "content": said}, *others]}


def read_calls(path: Path) -> list[Call]:
    """A call for each line of a JSONL file. `ValueError` names the file and the line.

    A line has `prompt`, `prompt_token_ids` or `messages`, and perhaps `max_tokens` (or
    `output_length`) and `timestamp`, in milliseconds.
    """
    calls = read_lines(path, _read_call).values()
    return sorted(calls, key=lambda call: call.due_s)


def _read_call(line: Mapping[str, Any]) -> Call:
    prompt = line.get("prompt", line.get("prompt_token_ids"))
    given = {"messages": line.get("messages"), "prompt": prompt}
    body = {name: value for name, value in given.items() if value}
    if len(body) != 1:
        raise ValueError("a call has either a prompt or messages")
    ((name, said),) = body.items()
    each = dict if name == "messages" else int
    listed = isinstance(said, list) and all(type(x) is each for x in said)
    if not listed and not (name == "prompt" and isinstance(said, str)):
        raise ValueError(
            "a prompt is text or token ids, messages are a list of objects"
        )
    if (length := line.get("max_tokens", line.get("output_length"))) is not None:
        if type(length) is not int or length < 1:
            raise ValueError(f"max_tokens must be a whole number >= 1, not {length!r}")
        body["max_tokens"] = length
    moment = line.get("timestamp", 0)
    if type(moment) not in (int, float) or not 0 <= moment < 1e15:
        raise ValueError(f"timestamp must be milliseconds >= 0, not {moment!r}")
    return Call(moment / 1000, body)


# %% export="bench_serve.py" tags=["hide-input"]
@dataclass(frozen=True)
class LoadPlan:
    """What each round sends. `ValueError` for what cannot be sent."""

    arrivals: str = "poisson"
    rate: float = 2.0
    num_calls: int = 50
    mix: Mix = Mix()
    fixed: Sequence[Call] = ()  # of a file
    seed: int = 0
    same: bool = False  # send what is fixed as it is, in every round

    def __post_init__(self) -> None:
        check_choice("arrivals", self.arrivals, ARRIVAL_TIMES)
        if self.arrivals == "trace" and not self.fixed:
            raise ValueError("--arrivals trace takes its moments from --prompts FILE")
        if self.num_calls < 1 or not self.rate > 0:
            raise ValueError("--requests and --rate must be above 0")

    def calls(self, number: int) -> list[Call]:
        """The calls of the round with this number, the same for all servers."""
        size = len(self.fixed) or self.num_calls
        bodies = [call.body for call in self.fixed]
        if not self.same:
            bodies = [salted(body, number, self.seed) for body in bodies]
        bodies = bodies or [self.mix.body(self.seed, number, i) for i in range(size)]
        if self.arrivals == "trace":
            moments = [call.due_s for call in self.fixed]
        else:
            rng = Random(f"{self.seed} {number}")
            moments = due_times(self.arrivals, size, self.rate, rng)
        return [Call(*pair) for pair in zip(moments, bodies, strict=True)]


# %% [markdown]
# An answer comes as *server-sent events*: lines `data: {...}`, each followed by an empty one,
# comments that keep the connection alive, and at last `data: [DONE]`. Bytes arrive cut anywhere,
# in the middle of a letter too. So lines are cut from bytes, and whole lines become text. (Not
# the other way round: for `splitlines` U+2028 ends a line, for JSON it does not.)


# %% export="bench_serve.py"
class EventReader:
    """The data of server-sent events, from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, some: bytes) -> Iterator[str]:
        """Take bytes; the data of each event that they complete."""
        *lines, self._rest = LINE_END.split(self._rest + some)
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf-8"))
            elif not line and self._data:  # comments and other fields are nothing
                yield "\n".join(self._data)
                self._data.clear()


LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")  # the last \r may be half of a \r\n


def take_chunk(data: str, reply: Reply, now: Now) -> None:
    """Enter one chunk of a stream. Raises `ServerFault` for an error event."""
    chunk = json.loads(data)
    _raise_error(chunk)
    for choice in chunk.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        if part.get("text") or part.get("content") or part.get("reasoning_content"):
            reply.pieces_s.append(now())
        reply.finished |= bool(choice.get("finish_reason"))
    if usage := chunk.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        reply.prompt_tokens = usage.get("prompt_tokens")
        reply.cached_tokens = details.get("cached_tokens")
        reply.output_tokens = usage.get("completion_tokens")


def _raise_error(answer: Mapping[str, Any], status: str = "error event") -> None:
    if error := answer.get("error"):
        message = error.get("message") if isinstance(error, Mapping) else error
        raise ServerFault(f"{status}: {message}")


# %% [markdown]
# Whatever goes wrong has a name under which it is counted. With failures left out, a server looks
# the faster the more fail.


# %% export="bench_serve.py"
@dataclass(frozen=True)
class Server:
    """An address that ends in /v1, a model's name there, and what every call adds."""

    url: str
    model: str = ""
    api_key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> "httpx2.AsyncClient":
        """A client without limits: who is due is sent."""
        http = import_httpx()
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = http.Limits(max_connections=None, max_keepalive_connections=None)
        client: httpx2.AsyncClient = http.AsyncClient(
            headers=headers, limits=limits, timeout=None
        )
        return client

    async def ask(
        self, client: "httpx2.AsyncClient", call: Call, reply: Reply, now: Now
    ) -> None:
        """Send one call and take its answer, as a stream or as a whole."""
        path = "/chat/completions" if "messages" in call.body else "/completions"
        body = {"model": self.model, "stream": True, **self.extra, **call.body}
        body["stream_options"] = {"include_usage": True}
        async with client.stream("POST", self.url + path, json=body) as answer:
            if answer.status_code != 200:
                raise ServerFault(_refusal(answer.status_code, await answer.aread()))
            kind = answer.headers.get("content-type", "")
            reply.streamed = kind.startswith("text/event-stream")
            if not reply.streamed:
                take_chunk((await answer.aread()).decode("utf-8"), reply, now)
                return
            reader = EventReader()
            async for some in answer.aiter_bytes():
                for data in reader.feed(some):
                    if data != "[DONE]":
                        take_chunk(data, reply, now)
                    elif not reply.done_s:  # read on: the connection is used again
                        reply.done_s, reply.finished = now(), True
        if not reply.finished:
            raise ServerFault("the stream ended without its end")


def _refusal(status: int, content: bytes) -> str:
    try:
        _raise_error(json.loads(content), f"HTTP {status}")
    except (ValueError, AttributeError):  # no JSON, or not an object
        pass
    except ServerFault as fault:
        return str(fault)
    return f"HTTP {status}"


def import_httpx() -> Any:
    """The HTTP client, an extra. `ValueError` says how to get it."""
    try:
        import httpx2
    except ImportError:
        raise ValueError(
            "bench serve needs httpx2: pip install 'minivllm[bench]'"
        ) from None
    return httpx2


# %% export="bench_serve.py" tags=["hide-input"]
def read_url(given: str) -> str:
    """An address as a server's API has it. `ValueError` for what is none."""
    url = given.rstrip("/")
    if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", url):
        raise ValueError(f"{given!r} is not an address such as http://localhost:8000")
    return url if url.endswith("/v1") else f"{url}/v1"


def find_server(url: str, model: str = "", api_key: str = "", **extra: Any) -> Server:
    """A server that answers; without a name its first model. Else `ValueError`."""
    server = Server(read_url(url), model, api_key, extra)
    return asyncio.run(_find_server(server))


async def _find_server(server: Server) -> Server:
    async with server.open() as client:
        try:
            async with asyncio.timeout(10):
                answer = await client.get(f"{server.url}/models")
            listed = answer.json()["data"] if answer.status_code == 200 else []
            names = [each["id"] for each in listed]
        except (TimeoutError, import_httpx().TransportError):
            raise ValueError(f"nobody answers at {server.url}") from None
        except (ValueError, LookupError, TypeError):
            names = []
    model = server.model or next(iter(names), "")
    if not model:
        raise ValueError(f"{server.url} does not list its models: give --model")
    return Server(server.url, model, server.api_key, server.extra)


def check_server(server: Server, call: Call) -> None:
    """Send a call of the same kind and wait for it. Raises `ValueError` if it fails.

    It says next to nothing, so that no call of the load finds its prompt known.
    """
    prompt = call.body.get("prompt", "")
    body: dict[str, Any] = {"prompt": prompt[-1:], "max_tokens": 1}
    if "messages" in call.body:
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    (reply,) = load_server(server, [Call(0.0, body)], 60.0)
    if reply.fault:
        raise ValueError(f"{server.url}, model {server.model}: {reply.fault}")


def load_server(server: Server, calls: Sequence[Call], timeout_s: float) -> list[Reply]:
    """Send calls over HTTP, each when it is due."""

    async def run() -> list[Reply]:
        async with server.open() as client:

            async def ask(call: Call, reply: Reply, now: Now) -> None:
                await server.ask(client, call, reply, now)

            return await send_all(calls, ask, timeout_s)

    return asyncio.run(run())


# %% [markdown]
# If `lag_s` is far from zero, the generator's own machine was the bottleneck. A server that ignores
# `stream` has no TTFT. Calls that failed have no times, so how many there were is a figure of its
# own, and the first.


# %% export="bench_serve.py"
def figures(replies: Sequence[Reply]) -> dict[str, float]:
    """What one round says, by name; what nobody told is left out."""
    good = [reply for reply in replies if not reply.fault]
    told = {"failed": float(len(replies) - len(good))}
    times: dict[str, list[float]] = {
        "ttft_s": [r.ttft_s for r in good if r.ttft_s is not None],
        "itl_s": [b - a for r in good for a, b in pairwise(r.pieces_s)],
        "e2e_s": [r.done_s - r.due_s for r in good],
        "lag_s": [r.sent_s - r.due_s for r in replies],
    }
    told |= {
        f"{name} p{round(100 * share)}": percentile(values, share)
        for name, values in times.items()
        for share in (0.5, 0.9, 0.99)
        if values
    }
    if good:
        makespan_s = max(r.done_s for r in good) - min(r.due_s for r in good)
        told["requests/s"] = len(good) / makespan_s
        told |= _token_figures(good, makespan_s)
    return told


def _token_figures(good: Sequence[Reply], makespan_s: float) -> Iterator[Any]:
    for name, rate in (("prompt", ""), ("cached", ""), ("output", "output tokens/s")):
        counts = [getattr(reply, f"{name}_tokens") for reply in good]
        if None not in counts:
            yield f"{name} tokens", float(sum(counts))
            if rate:
                yield rate, sum(counts) / makespan_s


# %% [markdown]
# The rounds are trials like those above: two servers take turns, warm-ups are kept apart, ratios
# are made round by round. Where calls failed there is no ratio: the times are of those that did not,
# and a server that refuses the long prompts would win with the short ones.


# %% export="bench_serve.py"
@dataclass(frozen=True)
class ServeRow:
    """One figure of one server over the rounds; its ratio is to the first server's.

    None if a call of either failed: the figures are of those that did not.
    """

    server: str
    figure: str
    median: float
    low: float
    high: float
    values: Sequence[float]
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


Rounds = dict[str, list[list[Reply]]]  # of each server


def run_rounds(
    loads: Mapping[str, Callable[[int], list[Reply]]], repeats: int, warmups: int
) -> tuple[Rounds, Rounds]:
    """Load all servers in turn, every other round in reverse; warm-ups by themselves.

    A load is called with the number of the round.
    """
    rounds: Rounds = {name: [] for name in loads}

    def work(name: str) -> float:
        rounds[name].append(loads[name](len(rounds[name])))
        return sum(not reply.fault for reply in rounds[name][-1])

    trials = {name: Trial(partial(work, name)) for name in loads}
    measure(trials, repeats, warmups)
    first = {name: each[:warmups] for name, each in rounds.items()}
    return {name: each[warmups:] for name, each in rounds.items()}, first


def count_faults(rounds: Sequence[Sequence[Reply]]) -> dict[str, int]:
    """How many calls failed, by what went wrong."""
    every = [reply.fault for each in rounds for reply in each if reply.fault]
    return dict(Counter(every).most_common())


def make_serve_rows(rounds: Rounds) -> list[ServeRow]:
    """A row for each figure that every round of a server has."""
    told = {name: [figures(each) for each in rounds[name]] for name in rounds}
    first, rows = next(iter(rounds)), []
    whole = {name: not count_faults(each) for name, each in rounds.items()}
    for figure in dict.fromkeys(f for each in told.values() for t in each for f in t):
        for name, each in told.items():
            if all(figure in t for t in each):
                own = Measurement(tuple(t[figure] for t in each))
                fair = whole[name] and whole[first]
                base = [t.get(figure, 0.0) if fair else 0.0 for t in told[first]]
                rows.append(_serve_row(name, figure, own, base))
    return rows


def _serve_row(
    name: str, figure: str, own: Measurement, base: Sequence[float]
) -> ServeRow:
    plain = ServeRow(name, figure, own.median, own.low, own.high, own.values)
    if not all(base):  # 0, not told in every round, or not comparable
        return plain
    pairs = compare(own, Measurement(tuple(base)))
    return ServeRow(
        *(name, figure, own.median, own.low, own.high, own.values),
        *(pairs.median, pairs.low, pairs.high),
    )


# %% export="bench_serve.py" tags=["hide-input"]
def draw_serve_rows(rows: Sequence[ServeRow]) -> Picture:
    """Times until the first token and the end; the coloured part is the spread."""
    colours = dict(zip(dict.fromkeys(r.server for r in rows), STATES, strict=False))
    shown = [r for r in rows if r.figure.startswith(("ttft_s", "e2e_s"))]
    return draw_rows(
        [
            (
                f"{row.figure}, {row.server}: {row.median:.3g} s",
                [
                    (0.0, row.low, "plain", ""),
                    (row.low, row.high - row.low, colours[row.server], ""),
                ],
            )
            for row in shown
        ],
        caption="Seconds since a call was due: up to the best round, and the spread.",
    )


STATES = ("published", "pinned")

# %% [markdown]
# ## One step beside transformers
#
# The last experiment compares single steps, in turns, on the same weights and contexts. `decode`
# is a step of 1, 8 or 16 requests, `prefill` a prompt of 512 tokens, `shared prefix` the same
# step with and without a common beginning, and `mixed lengths` a whole job, on our side in one
# engine, on the other in one padded batch.

# %% export="bench_engine.py" tags=["hide-input"]
"""`minivllm bench engine`: steps beside transformers, and where their time goes."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from minivllm.batch import Chunk
from minivllm.bench import Trial, compare, measure
from minivllm.bench_reuse import (
    backend_of,
    decoder_of,
    load_transformers,
    make_prompt,
    spread_of,
)
from minivllm.engine import Engine
from minivllm.options import assemble, read_options
from minivllm.request import SamplingParams

if TYPE_CHECKING:  # not otherwise: a command that asks for help needs no torch
    from minivllm.llm import LLM
    from minivllm.runner import ModelRunner

PAGE = 16
STEPS = 3  # of a reading: a single one still feels what was done before it


@dataclass(frozen=True)
class Sizes:
    """How much is measured: requests in a step, tokens, readings of each."""

    batches: tuple[int, ...] = (1, 8, 16)
    context: int = 494
    shared: int = 480
    prefill: int = 512
    repeats: int = 7

    @property
    def num_steps(self) -> int:
        """Output tokens that leave room for all readings."""
        return STEPS * (self.repeats + 3) + max(self.batches) + 2


QUICK = Sizes((1, 2), context=40, shared=32, prefill=48, repeats=1)


@dataclass(frozen=True)
class EngineRow:
    """Our step and another, in seconds; `ratio`: how many times as long that takes."""

    dtype: str
    load: str
    num_requests: int
    own_s: dict[str, Any]
    against: str
    other_s: dict[str, Any]
    ratio: dict[str, Any]


# %% export="bench_engine.py" tags=["hide-input"]
def make_engine(llm: "LLM", num_requests: int, num_tokens: int, index: str) -> Engine:
    """A cold engine with room for so many requests of so many tokens."""
    from minivllm.runner import ModelRunner

    options = read_options({"index": index, "page_size": PAGE, "single_flight": "none"})
    num_pages = num_requests * -(-num_tokens // PAGE)
    runner = ModelRunner(decoder_of(llm), num_pages, PAGE, backend=backend_of(llm))
    return assemble(options, num_pages, runner, llm.engine.limits)


def submit(engine: Engine, prompt: Sequence[int], max_tokens: int) -> None:
    """A request that ends by its length."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(list(prompt), params)


class NoModel:
    """Computes nothing: contexts are drawn, for time does not depend on the numbers."""

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Token 0 for each chunk that samples."""
        return [0 if chunk.samples else None for chunk in chunks]


def decoding(
    llm: "LLM", sizes: Sizes, num_requests: int, index: str = "none"
) -> Engine:
    """An engine in the middle: all prompts are done, each step is one token of each.

    They begin alike and end differently; with an index they share what is alike.
    """
    num_tokens = sizes.context + sizes.num_steps
    engine = make_engine(llm, num_requests, num_tokens, index)
    runner, engine.runner = engine.runner, NoModel()
    prompt = list(make_prompt(llm, sizes.context))
    for i in range(num_requests):
        own = [(token + i) % llm.config.vocab_size for token in prompt[sizes.shared :]]
        submit(engine, [*prompt[: sizes.shared], *own], sizes.num_steps)
        engine.step()
    for layer in cast("ModelRunner", runner).memory:
        layer.keys.normal_()
        layer.values.normal_()
    engine.runner = runner
    return engine


class Peer:
    """transformers, step by step, with its own cache."""

    def __init__(self, llm: "LLM", model: str, sizes: Sizes) -> None:
        self.model, self.sizes = load_transformers(model, llm), sizes
        self.prompt = list(make_prompt(llm, max(sizes.context, sizes.prefill)))
        warnings.filterwarnings("ignore", "`past_key_values`", FutureWarning)

    def forward(self, ids: Any, cache: Any) -> Any:
        """One pass; the ids of the largest logits, as a tensor [requests, 1]."""
        import torch

        with torch.inference_mode():
            out = self.model(ids, past_key_values=cache, logits_to_keep=1)
            best = out.logits[:, -1].argmax(-1, keepdim=True)
            best.tolist()  # waits for a GPU
            return best

    def new_cache(self) -> Any:
        """The cache that `generate` uses."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def decoding(self, num_requests: int) -> Callable[[], float]:
        """A step of so many requests, all with the same context."""
        import torch

        cache, device = self.new_cache(), self.model.device
        prompt = torch.tensor([self.prompt[: self.sizes.context]], device=device)
        ids = [self.forward(prompt, cache).expand(num_requests, 1)]
        cache.batch_repeat_interleave(num_requests)

        def step() -> float:
            ids[0] = self.forward(ids[0], cache)
            return num_requests

        return step

    def prefill(self) -> float:
        """One prompt, in one pass."""
        import torch

        prompt = torch.tensor(
            [self.prompt[: self.sizes.prefill]], device=self.model.device
        )
        self.forward(prompt, self.new_cache())
        return self.sizes.prefill

    def mixed(self, jobs: Sequence[tuple[int, int]]) -> float:
        """A static batch, filled up on the left, until the longest answer ends."""
        import torch

        longest, steps = (max(column) for column in zip(*jobs, strict=True))
        ids = torch.zeros((len(jobs), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (length, _) in enumerate(jobs):
            ids[i, longest - length :] = torch.tensor(self.prompt[:length])
            mask[i, longest - length :] = 1
        self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            do_sample=False,
            max_new_tokens=steps,
            pad_token_id=0,
        )
        return sum(answer for _, answer in jobs)


# %% export="bench_engine.py" tags=["hide-input"]
def mixed_jobs(sizes: Sizes) -> list[tuple[int, int]]:
    """Prompt and answer lengths, evenly spread; the long answers are not the last."""
    number = max(sizes.batches)
    answers = sorted(range(number), key=lambda i: i * 7 % number)
    return [
        (max(2, sizes.context * (i + 1) // number), 1 + 64 * (j + 1) // number)
        for i, j in enumerate(answers)
    ]


def mixing(llm: "LLM", sizes: Sizes, prompt: Sequence[int]) -> Callable[[], float]:
    """The same jobs in our engine, without a cache between them."""
    jobs = mixed_jobs(sizes)
    num_tokens = max(length + answer for length, answer in jobs)
    engine = make_engine(llm, len(jobs), num_tokens, "none")

    def run() -> float:
        for length, answer in jobs:
            submit(engine, prompt[:length], answer)
        while engine.has_unfinished():
            engine.step()
        return sum(answer for _, answer in jobs)

    return run


def prefilling(llm: "LLM", prompt: Sequence[int]) -> Callable[[], float]:
    """One prompt, until its first token; nothing is known from the last time."""
    engine = make_engine(llm, 1, len(prompt) + 1, "none")

    def run() -> float:
        submit(engine, prompt, 1)
        engine.step()
        return len(prompt)

    return run


class EngineBench:
    """All measurements on one loaded model; rows come as they are measured."""

    def __init__(self, llm: "LLM", model: str, sizes: Sizes) -> None:
        self.llm, self.sizes = llm, sizes
        self.peer = Peer(llm, model, sizes)
        self.dtype = str(decoder_of(llm).embed_tokens.weight.dtype)[6:]

    def rows(self) -> Iterator[EngineRow]:
        """Steps of each size, a prompt, a shared prefix, a job of mixed lengths."""
        llm, sizes, peer = self.llm, self.sizes, self.peer
        for number in sizes.batches:
            other = peer.decoding(number)
            yield self._row("decode", number, decoding(llm, sizes, number).step, other)
        prompt = peer.prompt[: sizes.prefill]
        yield self._row("prefill", 1, prefilling(llm, prompt), peer.prefill)
        most = max(sizes.batches)
        shared, apart = (decoding(llm, sizes, most, i).step for i in ("radix", "none"))
        yield self._row("shared prefix", most, shared, apart, "unshared")
        own = mixing(llm, sizes, peer.prompt)
        other = partial(peer.mixed, mixed_jobs(sizes))
        repeats = 1 + sizes.repeats // 4
        yield self._row("mixed lengths", most, own, other, repeats=repeats, warmups=0)

    def _row(
        self,
        load: str,
        number: int,
        own: Callable[[], Any],
        other: Callable[[], Any],
        against: str = "transformers",
        repeats: int = 0,
        warmups: int = 2,
    ) -> EngineRow:
        steps = 1 if load in ("prefill", "mixed lengths") else STEPS
        trials = {"own": _trial(own, steps), "other": _trial(other, steps)}
        found = measure(trials, repeats or self.sizes.repeats, warmups)
        ratio = compare(found["other"], found["own"])
        mine, theirs = (spread_of(found[name].values) for name in ("own", "other"))
        shown = spread_of(ratio.values)
        return EngineRow(self.dtype, load, number, mine, against, theirs, shown)

    def breakdowns(self) -> list[dict[str, Any]]:
        """Where the steps of each size go, in seconds, medians of several steps."""
        found = []
        for number in self.sizes.batches:
            engine = decoding(self.llm, self.sizes, number)
            parts = parts_of_steps(engine, self.sizes.repeats + 2)
            facts = {"dtype": self.dtype, "kernels": self.llm.options.kernels}
            found.append({**facts, "num_requests": number, "parts": parts})
        return found


def _trial(work: Callable[[], Any], num_ops: int) -> Trial:
    def run() -> float:
        for _ in range(num_ops):
            work()
        return 0.0

    return Trial(run, num_ops=num_ops)


# %% [markdown]
# For the breakdown clocks are put around the parts of a step (chapter 19's kernels have their own). What is
# left of the forward pass is Python; what is left of the step is scheduling and the cache.


# %% export="bench_engine.py" tags=["hide-input"]
class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, timed."""

        def timed(*given: Any) -> Any:
            start_s = time.perf_counter()
            result = work(*given)
            self.seconds[name] += time.perf_counter() - start_s  # type: ignore[assignment]
            return result

        return timed


@contextmanager
def watched(runner: "ModelRunner", watch: Stopwatch) -> Iterator[None]:
    """While it lasts, the parts of a runner's steps tell what they take."""
    places: list[tuple[Any, str, str]] = _places(runner)
    places += [(runner, "sampler", "sampling"), (runner, "run", "pass")]
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    for owner, name, part in places:
        setattr(owner, name, watch.wrap(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, old in kept:
            delattr(owner, name) if old is None else setattr(owner, name, old)


def _places(runner: "ModelRunner") -> list[tuple[Any, str, str]]:
    """Where the work of layers is done: owner, attribute, part of a step."""
    from minivllm import model

    head = runner.model.head
    places: list[tuple[Any, str, str]] = [(head, "multiply", "head")]
    if runner.backend.run is not model.run_layers:
        return places  # kernels have a clock of their own
    products = (part for part in runner.model.products() if part is not head)
    modules = list(runner.model.layers.modules())
    norms = [module for module in modules if isinstance(module, model.RMSNorm)]
    places += [(part, "multiply", "products") for part in products]
    places += [(layer, "forward", "attention") for layer in runner.memory]
    places += [(norm, "forward", "norms") for norm in norms]
    return [*places, (model, "rotate", "rotation"), (model, "gated", "gates")]


def parts_of_steps(engine: Engine, num_steps: int) -> dict[str, float]:
    """Seconds of each part of a step: medians; the first step is left out."""
    runner, steps = cast("ModelRunner", engine.runner), []
    watch = Stopwatch()
    taken = getattr(runner.backend.run, "take_seconds", dict)
    with watched(runner, watch):
        for _ in range(num_steps):
            watch.seconds.clear()
            taken()
            watch.wrap("step", engine.step)()
            steps.append({**watch.seconds, **taken()})
    for step in steps:
        step["scheduling and cache"] = step.pop("step") - step["pass"]
        rest = step.pop("pass") - sum(
            step[name] for name in step.keys() - {"pass", "scheduling and cache"}
        )
        step["Python"] = rest
    return {name: median(step[name] for step in steps[1:]) for name in steps[0]}


# %% [markdown]
# ## The command
#
# Each experiment has its command under `minivllm bench`, which tells a fault before it measures.

# %% export="command_bench.py"
"""The command `minivllm bench`: what is measured, each under its own name."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm.cli import SCHEMA_VERSION
from minivllm.timeline import check_place

app = typer.Typer(help="Measure, in one process, in turn, with the spread.")


def add_to(root: typer.Typer) -> None:
    """Add this module's commands to the command line."""
    root.add_typer(app, name="bench")


@app.callback()
def bench() -> None:
    """Measure, in one process, in turn, with the spread."""


@app.command()
def cache(
    peer: Annotated[
        list[str] | None, typer.Option(help="sglang, vllm; repeat for both.")
    ] = None,
    peer_path: Annotated[
        list[str] | None, typer.Option(help="A wheel or folder that has a peer.")
    ] = None,
    page_size: Annotated[
        list[int] | None, typer.Option(help="Tokens in a page; default 1 and 16.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Readings of each row.")] = 7,
    scale: Annotated[
        float, typer.Option(help="Share of the full loads, up to 1.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the loads.")] = 0,
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON.")
    ] = False,
) -> None:
    """Prefix trees and caches: match, insert, evict, memory, whole requests."""
    check_place(record, "--record")
    if any(size < 1 or 16 % size for size in page_size or ()):
        raise ValueError("--page-size must be 1, 2, 4, 8 or 16: the loads fork there")
    guests = invite(peer or [], peer_path or [])
    work = CacheBench(
        OWN_TREES | guests.trees,
        OWN_MANAGERS | guests.managers,
        tuple(page_size or (1, 16)),
        repeats,
        scale,
        seed,
    )
    rows = list(tell(work.rows(), guests.absent, sys.stderr if as_json else sys.stdout))
    facts: dict[str, Any] = {"repeats": repeats, "scale": scale, "seed": seed}
    sizes = {"page_size": list(work.page_sizes), "peer": peer or []}
    command = spell("cache", facts | sizes)
    facts |= {"peers": guests.versions, "absent": guests.absent}
    keep(make_record(command, rows, **facts), record, as_json)


# %% [markdown]
# A row for people:


# %% export="command_bench.py" tags=["hide-input"]
def quantity(value: float, unit: str) -> str:
    """A time in the unit that suits it, or bytes."""
    if unit == "B":
        return f"{value:.1f} B"
    for factor, name in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        if value * factor < 1000:
            return f"{value * factor:.3g} {name}"
    return f"{value:.3g} s"


def in_words(row: Row) -> str:
    """One line of the table."""
    low, high = quantity(row.low, row.unit), quantity(row.high, row.unit)
    ratio = f"{row.ratio:6.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})"
    return (
        f"{row.load:<18} {row.operation:<20} {row.page_size:>4}  {row.engine:<8}"
        f"{row.tokens:>10,.0f} {quantity(row.median, row.unit):>10}"
        f"  {f'{low} to {high}':<22} {ratio} × {row.against}"
    )


def tell(rows: Iterable[Row], absent: dict[str, str], to: Any) -> Iterable[Row]:
    """Print rows as they come, and pass them on."""
    for name, reason in absent.items():
        typer.echo(f"{name}: not measured: {reason}", file=to)
    typer.echo(
        f"{'load':<18} {'operation':<20} {'page':>4}  {'engine':<8}{'tokens':>10}"
        f" {'median':>10}  {'spread':<22}  ratio (spread)",
        file=to,
    )
    for row in rows:
        typer.echo(in_words(row), file=to)
        yield row


def keep(record: dict[str, Any], path: Path | None, as_json: bool) -> None:
    """Write a record to a file, print it, or both."""
    whole = {"schema_version": SCHEMA_VERSION} | record
    if as_json:
        typer.echo(json.dumps(whole))
    if path is not None:  # last: if it fails, nothing is lost
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


# %% [markdown]
# `bench serve` takes an address, or two. A server that does not answer one short question is one
# line and exit code 2; calls that fail later are counted, and the code is 1.

# %% export="command_bench.py" tags=["hide-input"]
from collections.abc import Mapping, Sequence
from functools import partial


@app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="The server, http://localhost:8000.")],
    compare_url: Annotated[
        str | None, typer.Option(help="Another one, loaded in turn with the first.")
    ] = None,
    model: Annotated[str, typer.Option(help="Its name; default: the first.")] = "",
    compare_model: Annotated[str, typer.Option(help="At the other server.")] = "",
    requests: Annotated[int, typer.Option(help="Calls in a round.")] = 50,
    arrivals: Annotated[
        str, typer.Option(help="poisson, burst (all at once), trace (timestamps).")
    ] = "poisson",
    rate: Annotated[float, typer.Option(help="poisson: calls a second.")] = 2.0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL: prompt or messages, max_tokens, timestamp (ms)."),
    ] = None,
    shared_words: Annotated[int, typer.Option(help="That begin all prompts.")] = 200,
    own_words: Annotated[int, typer.Option(help="Of each call, new each round.")] = 20,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a chat.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of a call.")] = 32,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for all (vLLM's extension).")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Rounds that are measured.")] = 3,
    warmups: Annotated[int, typer.Option(help="Rounds before them.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="For one call.")] = 120.0,
    same_prompts: Annotated[
        bool, typer.Option("--same-prompts", help="A file's, as they are, each round.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(help="Of moments and words. A server may know the last one's."),
    ] = 0,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="For the first server.")
    ] = "",
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the times here.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON.")
    ] = False,
) -> None:
    """An open-loop load on an OpenAI-compatible server, or on two in turn."""
    check_place(record, "--record")
    check_place(svg, "--svg")
    if repeats < 1 or warmups < 0 or not timeout_s > 0:
        raise ValueError("--repeats and --timeout-s must be above 0")
    mix = Mix(shared_words, own_words, chat)
    fixed = read_calls(prompts) if prompts else ()
    plan = LoadPlan(arrivals, rate, requests, mix, fixed, seed, same_prompts)
    asked = {"base": (base_url, model, api_key)}
    asked |= {"compare": (compare_url, compare_model, "")} if compare_url else {}
    options: dict[str, Any]
    facts: dict[str, Any]
    extra: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
    extra |= {"ignore_eos": True} if ignore_eos else {}
    servers = find_servers(asked, plan, **extra)
    loads = {n: partial(load_round, s, plan, timeout_s) for n, s in servers.items()}
    rounds, warm = run_rounds(loads, repeats, warmups)
    rows = make_serve_rows(rounds)
    for line in serve_table(servers, rows, rounds, warm):
        typer.echo(line, err=as_json)
    if fixed:
        typer.echo(f"{prompts}: {SAME if same_prompts else SALTED}", err=as_json)
    options = {
        "base_url": base_url,
        "compare_url": [compare_url] if compare_url else [],
    }
    options |= {"arrivals": arrivals, "rate": rate, "requests": requests}
    options |= {"prompts": [str(prompts)] if prompts else [], "max_tokens": max_tokens}
    options |= {"shared_words": shared_words, "own_words": own_words}
    options |= {"repeats": repeats, "warmups": warmups, "seed": seed}
    facts = {"chat": chat, "ignore_eos": ignore_eos, "same_prompts": same_prompts}
    flags = (f" --{name.replace('_', '-')}" for name, given in facts.items() if given)
    command = spell("serve", options) + "".join(flags)
    facts |= options | serve_facts(servers, rounds, warm)
    keep(make_record(command, rows, **facts), record, as_json)
    if svg is not None:
        svg.write_text(draw_serve_rows(rows).svg(), encoding="utf-8")
    if any(facts["faults"].values()):
        raise typer.Exit(1)


SALTED = "each round puts a word of its own before its prompts"
SAME = "the same prompts in each round: from the second on they may be known"


def find_servers(
    asked: Mapping[str, tuple[str, str, str]], plan: LoadPlan, **extra: Any
) -> dict[str, Server]:
    """The servers, each of which has answered. `ValueError` for one that does not."""
    for url, *_ in asked.values():
        read_url(url)
    servers = {name: find_server(*given, **extra) for name, given in asked.items()}
    for server in servers.values():
        check_server(server, plan.calls(0)[0])
    return servers


def serve_facts(
    servers: Mapping[str, Server], rounds: Rounds, warm: Rounds
) -> dict[str, Any]:
    """Who was asked, how often, and what failed."""
    return {
        "servers": {n: {"url": s.url, "model": s.model} for n, s in servers.items()},
        "calls": {name: sum(map(len, each)) for name, each in rounds.items()},
        "faults": {name: count_faults(each) for name, each in rounds.items()},
        "faults_in_warmups": {name: count_faults(each) for name, each in warm.items()},
    }


def load_round(
    server: Server, plan: LoadPlan, timeout_s: float, number: int
) -> list[Reply]:
    """One round of one server."""
    return load_server(server, plan.calls(number), timeout_s)


def serve_table(
    servers: Mapping[str, Server],
    rows: Sequence[ServeRow],
    rounds: Rounds,
    warm: Rounds,
) -> Iterable[str]:
    """For people: who was asked, each figure with its spread, and what failed."""
    for name, server in servers.items():
        yield f"{name}: {server.url}, model {server.model}"
    yield f"{'figure':<16} {'server':<8}{'median':>10}  {'spread':<24}ratio (spread)"
    for row in rows:
        unit = "s" if "_s " in row.figure else ""
        middle, low, high = (in_unit(x, unit) for x in (row.median, row.low, row.high))
        line = f"{row.figure:<16} {row.server:<8}{middle:>10}  {f'{low} to {high}':<24}"
        if row.server != rows[0].server and row.ratio is not None:
            line += f"{row.ratio:.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})"
        yield line.rstrip()
    for name, each in rounds.items():
        for kind, number in count_faults(each).items():
            yield f"{name}: {number} of {sum(map(len, each))} calls failed: {kind}"
        if count_faults(each):
            yield f"{name}: its times are those of the others, so there is no ratio"
        for kind, number in count_faults(warm[name]).items():
            size = sum(map(len, warm[name]))
            yield f"{name}: {number} of {size} calls of the warm-up failed: {kind}"
        if any(not reply.streamed for part in each for reply in part):
            yield f"{name}: answered without streaming, so it has no TTFT"
        if any(
            r.server == name and r.figure == "lag_s p99" and r.high > 0.01 for r in rows
        ):
            yield f"{name}: the generator was late: its machine is too slow"


def in_unit(value: float, unit: str) -> str:
    """A time as `quantity` has it, or a plain number."""
    return quantity(value, unit) if unit else f"{value:,.4g}"


# %% [markdown]
# There is no server in this book yet, so here are two stubs that speak HTTP on this machine. A word
# is a token, a page has ten, and a token takes a millisecond unless its page is known. The first
# stub forgets every prompt, the second remembers all. Ten calls a round, at random moments, 50 a
# second on average:

# %% tags=["hide-input"]
from contextlib import suppress
from queue import Queue
from threading import Thread

EVENTS = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {}\r\n\r\n"
)
REFUSED = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"


def same_words(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class HttpStub:
    """Answers "ok" when it has read the words that it does not know; or refuses."""

    def __init__(self, remembers, refuses=lambda number: False):
        self.remembers, self.refuses = remembers, refuses
        self.known, self.number = [], 0

    async def serve(self, reader, writer):
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = re.search(rb"content-length: (\d+)", head.lower())
                await self.answer(
                    json.loads(await reader.readexactly(int(size[1]))), writer
                )
        writer.close()

    async def answer(self, body, writer):
        self.number += 1
        if self.refuses(self.number):
            writer.write(REFUSED)
            return
        words = body["prompt"].split()
        known = max((same_words(words, old) for old in self.known), default=0)
        cached = known // 10 * 10
        self.known += [words] * self.remembers
        await asyncio.sleep((len(words) - cached) / 1000)
        usage = {"prompt_tokens": len(words), "completion_tokens": 1}
        usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
        said = {"choices": [{"text": "ok", "finish_reason": "stop"}], "usage": usage}
        events = f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode()
        writer.write(EVENTS.format(len(events)).encode() + events)


def listen(stub):
    """Its address; it listens in a thread as long as this program lasts."""
    ports = Queue()

    async def main():
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    return f"http://127.0.0.1:{ports.get()}/v1"


def load_stubs(plan, **stubs):
    """Three rounds of each and a warm-up; what `serve_table` and the prose need."""
    servers = {name: Server(listen(stub), "stub") for name, stub in stubs.items()}
    loads = {n: partial(load_round, s, plan, 30.0) for n, s in servers.items()}
    with ThreadPoolExecutor(1) as thread:  # a notebook has a loop of its own
        rounds, warm = thread.submit(run_rounds, loads, 3, 1).result()
    return servers, make_serve_rows(rounds), rounds, warm


# %% name="serve-table" tags=["nbval-ignore-output"]
plan = LoadPlan(rate=50.0, num_calls=10)
served = load_stubs(plan, base=HttpStub(False), compare=HttpStub(True))
for line in serve_table(*served):
    print(re.sub(r"127.0.0.1:\d+", "127.0.0.1", line))

# %% name="served"
for row in served[1]:
    if row.figure in ("failed", "prompt tokens", "cached tokens"):
        print(f"{row.server:8} {row.figure:14}", *(f"{n:,.0f}" for n in row.values))
refusing = HttpStub(True, refuses=lambda number: number % 7 == 0)
lines = list(serve_table(*load_stubs(plan, base=HttpStub(False), compare=refusing)))
print(*(line for line in lines if "failed:" in line or "no ratio" in line), sep="\n")
assert not any("(" in line for line in lines[3:]), "a ratio beside failures"

# %% [markdown]
# The counts are the same on your machine: [2,000](#served) of the [2,200](#served) tokens of a round
# are known to the second stub. The times are not, but the ratio is one of pairs, and the spread
# says how far to trust it. The last lines are of a stub that refuses every seventh call. Its table
# has the times of the others, and no ratio.
#
# ## Counts first
#
# Do all contestants do the same work? A hundredth of the loads, one repeat, and the tokens that
# each operation found, entered or evicted:

# %% name="counts"
small = CacheBench(OWN_TREES, OWN_MANAGERS, (16,), repeats=1, scale=0.01)
tokens = {}
for row in small.rows():
    if row.unit == "s":
        tokens.setdefault((row.load, row.operation), []).append(f"{row.tokens:,.0f}")
for (load, operation), each in tokens.items():
    print(f"{load:<18} {operation:<20} {' '.join(f'{n:>7}' for n in each)}")

# %% [markdown]
# The columns, the radix tree and the hash index (in the last six rows the other way round),
# agree. A "conversation" has two turns here, so a new last turn finds [512](#counts) tokens.
#
# ## The record
#
# The whole takes minutes of an idle machine, so what follows is read from
# `figures/measured/cache.json`:

# %% name="record"
import json
from pathlib import Path

record = json.loads(Path("../figures/measured/cache.json").read_text("utf-8"))
for fact in ("command", "commit", "cpu", "cores", "python", "peers", "absent"):
    print(f"{fact:<8} {record[fact]}")

# %% tags=["hide-input"]
from math import log10

STATES = {
    "radix": "published",
    "hash": "pinned",
    "sglang": "private",
    "vllm": "private",
}


def draw_record(rows, engines, caption, left=270, decade=90):
    """A line for each operation, a mark for each engine: its spread, and its median."""
    picture = Picture(caption)
    chosen = [row for row in rows if row["engine"] in engines]
    labels = list(dict.fromkeys((row["load"], row["operation"]) for row in chosen))
    bottom = 50 + 24 * len(labels)
    units = ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"]
    for i, unit in enumerate(units):
        picture.line(left + i * decade, 46, left + i * decade, bottom)
        picture.text(left + i * decade, 38, unit)
    for i, engine in enumerate(engines):
        picture.box(left + 90 * i, 0, 14, 14, STATES[engine])
        picture.text(left + 90 * i + 20, 12, engine, "start")
    for load, operation in labels:
        y = 60 + 24 * labels.index((load, operation))
        picture.text(left - 14, y + 8, f"{load}: {operation}", "end")
    for row in chosen:
        y = 60 + 24 * labels.index((row["load"], row["operation"]))
        low, middle, high = (
            left + decade * (log10(row[name]) + 6) for name in ("low", "median", "high")
        )
        picture.box(low, y + 2, high - low, 4, STATES[row["engine"]])
        picture.box(middle - 5, y - 1, 10, 10, STATES[row["engine"]])
    return picture


timed = [r for r in record["rows"] if r["unit"] == "s" and r["page_size"] == 16]
draw_record(
    [r for r in timed if "request" not in r["load"]],
    ("hash", "sglang", "radix"),
    "Seconds for one operation at page size 16, each step of the scale ten times the one "
    "before; the thin bar is the spread of the repeats, the square their median.",
)

# %% tags=["hide-input"]
draw_record(
    [r for r in timed if "request" in r["load"]],
    ("vllm", "hash", "radix"),
    "The whole way of one request through the cache: find, allocate, publish, free.",
)

# %% [markdown]
# A picture tempts to read medians. Row by row, what the guests take more or less of: SGLang's
# tree than ours, vLLM's requests than our hash index, and eviction from many leaves than from
# few.

# %% name="verdicts"


def verdict(row):
    if row["ratio_low"] > 1:
        return "more"
    return "less" if row["ratio_high"] < 1 else "not shown"


for row in record["rows"]:
    itself = row["ratio_low"] == row["ratio_high"] == 1
    if row["page_size"] == 16 and row["engine"] not in OWN_TREES and not itself:
        span = f"{row['ratio_low']:.1f} to {row['ratio_high']:.1f}"
        print(
            f"{row['load']:<17} {row['operation']:<18} {row['engine']:<6}"
            f"{quantity(row['median'], row['unit']):>8}"
            f"{row['ratio']:6.1f} × {span:>14}  {verdict(row)}"
        )

# %% [markdown]
# SGLang's eviction depends on the number of leaves, since it makes a heap of them for each call;
# chapter 3's queue is kept. And the hash index is far slower than the tree at looking up: it must
# hash every page, where the tree compares bytes. See for yourself, with a twentieth of the
# load:

# %% tags=["live"]
from minivllm.bench import compare, measure
from minivllm.bench_cache import OWN_TREES, fill, make_loads, match_trial

load = make_loads(scale=0.05)[0]
trials = {}
for name in ("radix", "hash"):
    tree = OWN_TREES[name](16)
    fill(tree, load)
    trials[name] = match_trial(tree, list(load.sequences))
found = measure(trials, repeats=5)
print("tokens found:", [each.count for each in found.values()])
print("the hash takes longer in each pair:", compare(*reversed(found.values())).low > 1)

# %% export="command_bench.py" tags=["hide-input"]
from minivllm.bench_reuse import (
    ARRIVALS,
    Case,
    Outcome,
    ReuseRow,
    load_reuse,
    make_cases,
    record_reuse,
)
from minivllm.options import read_options


@app.command()
def reuse(
    model: Annotated[
        str, typer.Option(help="smollm2, a folder, a .gguf file or a hub id.")
    ] = "smollm2",
    num_requests: Annotated[
        list[int] | None, typer.Option(help="Identical requests; default 1 2 4 8.")
    ] = None,
    publish: Annotated[
        list[str] | None,
        typer.Option(help="off (no cache), finish, prompt, step, schedule."),
    ] = None,
    single_flight: Annotated[
        list[str] | None, typer.Option(help="none, completion, prefill.")
    ] = None,
    arrival: Annotated[
        list[str] | None,
        typer.Option(help="together; token, decode: the second of two comes then."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="transformers: one static batch.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 493,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output tokens of each; default 128.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    max_batch_tokens: Annotated[
        int, typer.Option(help="New tokens in a step, at most.")
    ] = 512,
    repeats: Annotated[
        int | None, typer.Option(help="Runs of each case; default 3.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Other defaults: 1 2 8, 16 tokens, one run.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON.")
    ] = False,
) -> None:
    """Identical requests on a model: when pages are visible, who waits, how long."""
    check_place(record, "--record")
    numbers, usual = ([1, 2, 8], (16, 1)) if quick else ([1, 2, 4, 8], (128, 3))
    max_tokens = usual[0] if max_tokens is None else max_tokens
    repeats = usual[1] if repeats is None else repeats
    sizes = {"max_tokens": max_tokens, "page_size": page_size}
    sizes |= {"max_batch_tokens": max_batch_tokens}
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    one_by_one: dict[str, list[Any]] = {
        "num-requests": num_requests or numbers,
        "publish": publish or ["off", "finish", "step", "schedule"],
        "single-flight": single_flight or ["none", "completion", "prefill"],
        "arrival": arrival or list(ARRIVALS),
        "peer": peer or [],
    }
    cases = make_cases(*one_by_one.values())
    check_sizes(prompt_tokens, repeats, sizes | place)
    from minivllm.llm import LLM  # torch begins here

    llm = LLM(model, num_pages=1, **place)
    like = load_reuse(llm, prompt_tokens, **sizes)
    facts = {"model": model, "prompt_tokens": prompt_tokens, **sizes, **place}
    facts |= {"repeats": repeats}
    rows, found = record_reuse(llm, like, cases, model, repeats, tell_run)
    for line in reuse_table(rows, found["absent"]):
        typer.echo(line, err=as_json)
    command = spell("reuse", facts | one_by_one)
    keep(make_record(command, rows, **facts | found), record, as_json)


# %% export="command_bench.py" tags=["hide-input"]
def check_sizes(prompt_tokens: int, repeats: int, options: dict[str, Any]) -> None:
    """Raise `ValueError` for what cannot be run, before a model is loaded."""
    max_tokens = options.pop("max_tokens")
    for name, value, least in (
        ("prompt-tokens", prompt_tokens, 1),
        ("max-tokens", max_tokens, 2),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise ValueError(f"--{name} must be at least {least}, not {value}")
    read_options(options)


def spell(command: str, options: dict[str, Any]) -> str:
    """The command line that asks for this; a list is an option given repeatedly."""
    words = ["minivllm bench", command]
    for name, given in options.items():
        for value in given if isinstance(given, list) else [given]:
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


def tell_run(case: Case, outcome: Outcome) -> None:
    """A sign of life for each run."""
    typer.echo(f"{name_case(case)}  {outcome.makespan_s:.1f} s", err=True)


def name_case(case: Case) -> str:
    """The first columns of a line."""
    ours = case.engine == "minivllm"
    who, waits = (case.publish, case.single_flight) if ours else (case.engine, "")
    return f"{case.num_requests} {case.arrival:<9} {waits:<11}{who:<24}"


def reuse_table(rows: list[ReuseRow], absent: dict[str, str]) -> Iterable[str]:
    """The rows for people: medians, and what was counted."""
    for name, reason in absent.items():
        yield f"{name}: not measured: {reason}"
    head = f"{'N arrival   waits for  publish':<47}{'TTFT':>8} {'longest':>8}"
    yield f"{head} {'makespan':>8} {'cached':>7} {'computed':>9}  same tokens"
    for row in rows:
        times = [each["median"] for each in (row.ttft_s, row.longest_s, row.makespan_s)]
        publish, waits = " ".join(row.publish), row.single_flight
        case = Case(row.num_requests, publish, waits, row.arrival, row.engine)
        seconds = "".join(f"{value:8.2f} " for value in times)
        counts = f"{sum(row.cached_tokens):7} {row.prefill_tokens:9}"
        same = "yes" if row.same_tokens else "NO"
        yield f"{name_case(case)}{seconds}{counts}  {same}"


# %% export="command_bench.py" tags=["hide-input"]
from itertools import chain

from minivllm.bench_engine import QUICK, EngineBench, EngineRow, Sizes

VLLM = {  # of the project's own notes, on two EPYC cores: not measured here
    "prefill of 512": "0.68 s",
    "decode, 1 request": "22 tokens/s",
    "decode, 8 requests": "151 tokens/s",
}


@app.command()
def engine(
    model: Annotated[
        str, typer.Option(help="smollm2, a folder, a .gguf file or a hub id.")
    ] = "smollm2",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Default: float32 and bfloat16.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Readings of each row.")] = 7,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small steps, one reading.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON.")
    ] = False,
) -> None:
    """Steps beside transformers' steps, in turn, and where a step's time goes."""
    check_place(record, "--record")
    dtypes, sizes = dtype or ["float32", "bfloat16"], Sizes(repeats=max(1, repeats))
    check_sizes(sizes.prefill, repeats, {"max_tokens": 2, "device": device})
    for each in dtypes:
        read_options({"dtype": each})
    rows, found = measure_engine(
        model, dtypes, device, QUICK if quick else sizes, as_json
    )
    facts = {"model": model, "dtype": dtypes, "device": device, "repeats": repeats}
    command = spell("engine", facts) + " --quick" * quick
    keep(make_record(command, rows, **facts | found), record, as_json)


def measure_engine(
    model: str, dtypes: list[str], device: str, sizes: Sizes, as_json: bool
) -> tuple[list[EngineRow], dict[str, Any]]:
    """Measure, telling each row; the rows and the facts beside them."""
    import torch
    import transformers

    from minivllm.llm import LLM

    rows: list[EngineRow] = []
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "breakdowns": []}
    for dtype in dtypes:
        given: Any = {"num_pages": 1, "dtype": dtype, "device": device}
        bench = EngineBench(LLM(model, **given), model, sizes)
        for row in bench.rows():
            typer.echo(engine_line(row), err=as_json)
            rows.append(row)
        plain = EngineBench(LLM(model, **given, kernels="torch"), model, sizes)
        for each in chain(plain.breakdowns(), bench.breakdowns()):
            typer.echo(breakdown_line(each), err=as_json)
            found["breakdowns"].append(each)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return rows, found | {"versions": versions, "to_attempt": {"vllm": VLLM}}


def engine_line(row: EngineRow) -> str:
    """One line of the table: medians, and the ratios of the pairs."""
    own, other = (quantity(s["median"], "s") for s in (row.own_s, row.other_s))
    ratio, low, high = (row.ratio[name] for name in ("median", "low", "high"))
    return (
        f"{row.dtype:<9} {row.load:<14} {row.num_requests:>3}  {own:>8}, {row.against} "
        f"{other:>8}: {ratio:5.2f} ({low:.2f} to {high:.2f}) ×"
    )


def breakdown_line(found: dict[str, Any]) -> str:
    """Where a step goes, in percent."""
    whole = sum(found["parts"].values())
    shares = (f"{name} {100 * s / whole:.1f} %" for name, s in found["parts"].items())
    kind = (
        f"{found['dtype']:<9} {found['kernels']:<5} {found['num_requests']} in a step"
    )
    return f"{kind}, {quantity(whole, 's')}: {', '.join(shares)}"


# %% [markdown]
# ## What these numbers do not say
#
# In a server other code runs between two matches, and the first of our five answers may be nearer
# to the truth than the median. SGLang's match leaves putting slots together for later, vLLM's
# hash is one in which nobody can forge a collision (so is ours), and each carries options that we
# do not have. And it is one machine: what travels are, if anything, the ratios.
#
# ## Eight identical requests, measured
#
# A short form of the second experiment, on the real weights, with 8 output tokens, asks what is
# the same on every machine: what was found and computed, and whether the tokens are those of a
# request alone without a cache. Of the times it asks whether the last request has its first word
# before the first one has ended.

# %% name="reuse-live" claims="R07 R13 R17"
from minivllm import LLM

like = load_reuse(LLM("smollm2", num_pages=1, device="cpu"), max_tokens=8)
for each in (replace(like, prompt_ids=like.prompt_ids[::-1]), like):
    alone = each.run(Case())
    print(f"alone: cached {alone.cached_tokens[0]}, ttft ≈ {alone.ttfts_s[0]:.2f} s")
for case in (
    Case(2, "step"),
    Case(2, "step", arrival="token"),
    Case(2, "finish", "completion"),
    Case(2, "finish", "prefill"),
    Case(8, "schedule"),
    Case(8, "finish", "prefill"),
):
    run = like.run(case)
    assert run.token_ids == alone.token_ids * case.num_requests
    found = {tokens: run.cached_tokens.count(tokens) for tokens in run.cached_tokens}
    before = "before" if run.ttfts_s[-1] < run.e2es_s[0] else "after"
    print(
        f"{name_case(case)[:32]} computed {run.prefill_tokens:3}, last first word "
        f"{before:6} the first end, found {found}"
    )

# %% [markdown]
# Eight requests compute [584](#reuse-live) tokens: one prompt of 493, and 13 tokens for each of
# the seven others, who find [480](#reuse-live). Two ways lead there, `schedule`, where nobody
# waits, and release after prefill, whatever the publication. The times come from a record:

# %% name="reuse-record"
reuse_record = json.loads(Path("../figures/measured/reuse.json").read_text("utf-8"))
for fact in ("commit", "cpu", "threads", "dtype", "versions", "repeats"):
    print(f"{fact:<8} {reuse_record[fact]}")
print(reuse_record["command"])

# %% tags=["hide-input"] name="reuse-table" claims="R20"
reuse_rows = reuse_record["rows"]
for line in reuse_table([ReuseRow(**row) for row in reuse_rows], {}):
    print(line)
apart = max(reuse_rows, key=lambda r: r["makespan_s"]["high"] - r["makespan_s"]["low"])
low, high = (apart["makespan_s"][bound] for bound in ("low", "high"))
print(f"the repeats that lie farthest apart: {low:.0f} and {high:.0f} s")
assert all(row["same_tokens"] for row in reuse_rows)
assert all(
    set(row["publish"]) == {"finish", "step", "schedule"}
    for row in reuse_rows
    if row["single_flight"] != "none"
)

# %% [markdown]
# Seconds, medians of three; `cached` and `computed` are sums over the requests. A row is a group
# of cases with the same steps, and the groups alone say something. Where somebody waits, all
# publications take the same steps: early publication adds nothing to either release. Where nobody
# waits, `finish` takes the steps of an engine without a cache. Every output is the one that a
# request gets alone.
#
# It was not a quiet machine: one row has repeats of [53](#reuse-table) and [11](#reuse-table) seconds. The picture shows all
# readings:

# %% tags=["hide-input"]
SHADES = {"none": "lost", "completion": "private", "prefill": "published"}


def find_row(number, publish="off", waits="none", arrival="together", who="minivllm"):
    """The row of a case."""
    for row in reuse_rows:
        key = (row["num_requests"], row["single_flight"], row["arrival"], row["engine"])
        if key == (number, waits, arrival, who) and publish in row["publish"]:
            return row
    raise LookupError((number, publish, waits, arrival, who))


def draw_bars(panels, rows, caption, left=140, width=240):
    """A panel for each measure; a bar is a median, the line in it the spread."""
    picture, shift = Picture(caption), {2: 0, 4: 14, 8: 28}
    for column, (title, measured) in enumerate(panels):
        x = left + column * (width + 90)
        scale = width / max(row[measured]["high"] for _, row in rows)
        picture.text(x, 12, title, "start")
        for i, (label, row) in enumerate(rows):
            y, times = 26 + 20 * i + shift[row["num_requests"]], row[measured]
            if not column:
                picture.text(left - 8, y + 13, label, "end")
            picture.box(x, y, times["median"] * scale, 16, SHADES[row["single_flight"]])
            low, high = x + times["low"] * scale, x + times["high"] * scale
            picture.line(low, y + 8, high, y + 8)
            words, end = f"{times['median']:.1f} s", x + times["median"] * scale
            picture.text(max(end, high) + 6, y + 13, words, "start")
    return picture


cases_shown = [("off", "none"), ("step", "none"), ("schedule", "none")]
cases_shown += [("finish", "completion"), ("finish", "prefill")]
bars = [
    (f"{n}, {publish if waits == 'none' else waits}", find_row(n, publish, waits))
    for n in (2, 4, 8)
    for publish, waits in cases_shown
    if (n, publish) != (2, "step")  # with two requests it is the row of off
]
draw_bars(
    [("mean TTFT", "ttft_s"), ("longest completion", "longest_s")],
    bars,
    "N identical requests at once: nobody waits (red) under three publications, or the followers "
    "wait for completion (orange) or for the prefill (green). The line is the spread of three "
    "repeats. Left: waiting for completion is the worst choice at each N, waiting for the prefill "
    "as good as the promise of schedule. Right: where everybody decodes together, the end is earlier.",
)

# %% [markdown]
# Against an engine without a cache the mean TTFT of eight requests falls from
# [3.69](#reuse-table) to [1.26](#reuse-table) s if followers wait for the prefill, and to
# [1.23](#reuse-table) under `schedule`. Publication after each step comes to
# [1.81](#reuse-table), and only because a step of 512 tokens lets the requests start one after
# the other. So far chapters 9 and 10. But with two requests the article saw a worse TTFT and a
# *better* completion; here both are worse. With eight it saw both better; here the TTFT has
# doubled.
#
# ## Two machines
#
# Chapter 10's machine of time was fitted to the article's GPU. Chapter 8's fit makes this machine
# of the same four numbers, from single steps:

# %% name="reuse-fit" claims="R14 R15 R18"
from dataclasses import fields

from minivllm.simulation import fit_serial_prefill

names = [each.name for each in fields(Work)]  # what a step has computed
measured_s = {
    Work(**{name: step[name] for name in names}): step["median_s"]
    for step in reuse_record["steps"]
}
pure = {w: t for w, t in measured_s.items() if not (w.num_prefills and w.num_decodes)}
fitted = fit_serial_prefill(pure.items())
prefill_s, decode_s = fitted.chunk_s + 493 * fitted.token_s, 127 * fitted.decode_s
s, D, k = (prefill_s - 480 * fitted.token_s) / prefill_s, decode_s / prefill_s, fitted.k
print(f"a prefill takes {prefill_s:.2f} s, a decode of 127 steps {decode_s:.2f} s")
print(f"in prefills: s = {s:.2f}, D = {D:.2f}; k = {k:.2f}")
print("theirs:      s = 0.035, D = 2.66; k = 0.91")

# %% [markdown]
# A decode takes [7.33](#reuse-fit) prefills and not [2.66](#reuse-fit), and company costs
# [0.28](#reuse-fit) of a step and not [0.91](#reuse-fit). Two requests under three policies on both machines, each in its own
# prefills:

# %% tags=["hide-input"]
from minivllm.timeline import Timeline


def machine(s, D, k):
    """A prefill of 493 tokens takes 1, of 13 tokens s, a decode D."""
    token_s = (1 - s) / 480
    return SerialPrefill(1 - 493 * token_s, token_s, D / 127, k)


def on_clock(cost, make_clock=VirtualClock, observer=ignore):
    """The experiment, with time from a cost model."""

    def make_runner(num_pages, clock):
        return SimulatedRunner(cost, clock, 50_000, num_pages, 16)

    limits, ids = Limits(50_000, 8_192), range(493)
    return Reuse(make_runner, limits, ids, make_clock=make_clock, observer=observer)


def gantt(cost, case, label):
    """A row for each request: it is held, computes its prompt, decodes."""
    clock = VirtualClock()
    timeline = Timeline(clock)
    on_clock(cost, lambda: clock, timeline).run(case)
    return [(f"{label}, {who}", cells) for who, cells in timeline.rows(16)]


THEIRS, OURS = machine(0.035, 2.66, 0.91), machine(s, D, k)
EARLY, LATE = ("finish", "prefill"), ("finish", "completion")
draw_rows(
    [
        row
        for name, cost in (("theirs", THEIRS), ("here", OURS))
        for label, case in (("none", Case(2)), ("completion", Case(2, *LATE)))
        for row in gantt(cost, case, f"{name}, {label}")
    ]
    + gantt(OURS, Case(2, *EARLY), "here, prefill"),
    caption="Two identical requests, time in prefills of the machine. Waiting for completion, "
    "request 1 sits through a decode and has its first word late, on either machine. Theirs: two "
    "decodes side by side are as long as one after the other, and a prefill is saved, so the last "
    "end is earlier. Here: side by side costs little, one after the other costs two decodes.",
)

# %% [markdown]
# The sign turns. Waiting saves a prefill, or 1 − s of it, at the price of company: two decodes
# one after the other take 2D, side by side (1 + k)D. So the last end is earlier if (1 − k)D < 1 −
# s. For them that is [0.24](#reuse-conditions) < [0.96](#reuse-conditions), and here
# [5.27](#reuse-conditions) against [0.95](#reuse-conditions). The early release of a late request
# makes the slowest completion longer if k > 1 − 1 / D (chapter 10): [0.91](#reuse-conditions) >
# [0.62](#reuse-conditions) for them, here [0.28](#reuse-fit) against [0.86](#reuse-conditions). And waiting for completion beats the mean TTFT of eight lonely
# prefills, 4.5, if 1 + 7(D + 7s) / 8 is less: [3.54](#reuse-conditions) for them,
# [7.73](#reuse-conditions) here. Which number is to blame? Change one at a time:


# %% name="reuse-conditions"
def change(cost, one, other, name):
    """By how many percent one case differs from another, by a model."""
    runs = [on_clock(cost).run(case) for case in (one, other)]
    mean = name == "ttft_s"
    a, b = (fmean(run.ttfts_s) if mean else max(run.e2es_s) for run in runs)
    return 100 * (a / b - 1)


QUESTIONS = {
    "R14 ttft_s": (Case(8, *LATE), Case(8)),
    "R14 longest_s": (Case(8, *LATE), Case(8)),
    "R15 ttft_s": (Case(2, *LATE), Case(2)),
    "R15 longest_s": (Case(2, *LATE), Case(2)),
    "R17 ttft_s": (Case(8, *EARLY), Case(8, *LATE)),
    "R18 ttft_s": (Case(2, *EARLY, "decode"), Case(2, *LATE, "decode")),
    "R18 longest_s": (Case(2, *EARLY, "decode"), Case(2, *LATE, "decode")),
}
for whose, a, b, c in (("theirs", 0.035, 2.66, 0.91), ("here", s, D, k)):
    print(f"{whose:6}: (1 - k)D = {(1 - c) * b:.2f}, 1 - s = {1 - a:.2f},", end=" ")
    print(f"k = {c:.2f}, 1 - 1 / D = {1 - 1 / b:.2f},", end=" ")
    print(f"1 + 7(D + 7s) / 8 = {1 + 7 * (b + 7 * a) / 8:.2f}")
models = {"theirs": THEIRS, "only our D": machine(0.035, D, 0.91)}
models |= {"only our k": machine(0.035, 2.66, k), "here": OURS}
for question in ("R14 ttft_s", "R15 longest_s", "R18 longest_s"):
    name = question.split()[1]
    found = [
        f"{w} {change(m, *QUESTIONS[question], name):+.0f} %" for w, m in models.items()
    ]
    print(f"{question:13}", ", ".join(found))

# %% [markdown]
# With our D their eight requests have the worse TTFT ([+46](#reuse-conditions) %), with our k
# they keep the better one. With our k the completion of two gets worse and that of the late
# request better; with our D neither turns. So D decides whether a decode is worth waiting for,
# and k whether company is worth avoiding. A decode step of SmolLM2 in float32 reads half a
# gigabyte of weights, for one request or for eight: it takes long beside a prefill, which reads
# them once for 493 tokens, and a companion costs little more. On the article's GPU, whose weights
# have 4 bits, a step must spend its time on something else; on what, these measurements do not
# say.
#
# Its predictions against the runs:


# %% name="reuse-signs" claims="R08 R14 R15 R17 R18"
def seen(one, other, name):
    """The same change, measured, pair by pair: the median and the spread, in percent."""
    rows = [
        find_row(c.num_requests, c.publish, c.single_flight, c.arrival)
        for c in (one, other)
    ]
    pairs = compare(*(Measurement(tuple(row[name]["values"])) for row in rows))
    return [100 * (value - 1) for value in (pairs.median, pairs.low, pairs.high)]


late_twin = Case(2, "step", arrival="token"), Case(2, "finish", arrival="token")
said = ("-48 %", "less", "less", "more", "less", "less", "-72 %", "+14 %")
asked = {"R08 ttft_s": late_twin} | QUESTIONS
for (question, pair), words in zip(asked.items(), said, strict=True):
    name = question.split()[1]
    middle, low, high = seen(*pair, name)
    print(
        f"{question:13} said {words:>5}, model {change(OURS, *pair, name):+4.0f} %, "
        f"measured {middle:+4.0f} % ({low:+.0f} to {high:+.0f})"
    )

# %% [markdown]
# Where a sign was shown, the fitted model has it. For the slowest of eight it says
# [-6](#reuse-signs) %, and the pairs range from [-7 to +22](#reuse-signs). It is off in size
# where waiting competes with lonely prefills: it charges decodes and a prefill in one step in
# full (chapter 8).
#
# Early release survives the change of machine: the same tokens, a lower TTFT, and here for free:
# the slowest completion gets shorter, by [35](#reuse-signs) % and not longer by 14.
#
# ## The moment before the first token
#
# The late request came in two moments, outside and inside of the prefill's step. What differs?

# %% name="reuse-late" claims="R18 R19"
for publish, waits in (LATE, EARLY):
    for arrival in ("token", "decode"):
        row = find_row(2, publish, waits, arrival)
        words, ends = ([f"{x:.2f}" for x in row[n]] for n in ("ttfts_s", "e2es_s"))
        print(f"{waits:10} at {arrival:6} flights {row['flights']}", end=" · ")
        print("first words", *words, "· ends", *ends)
for waits in ("completion", "prefill"):
    plans = {on_clock(OURS).run(Case(2, "finish", waits, a)).plan for a in ARRIVALS[1:]}
    print(f"{waits}: {len(plans)} plan")

# %% [markdown]
# Outside, under early release, the second request opens a flight of its own: [2](#reuse-late)
# flights. Inside it follows in the open one, and is let go in the same step: [1](#reuse-late)
# flight, and the same steps, to the token. So the article's explanation (the first flight was
# closed, the second opened another) describes what happens, and is not needed for it. The two
# decode together because the second was *released*, from whichever flight.
#
# ## Beside transformers
#
# A second record has the first words by themselves: 16 output tokens, seven repeats, one and
# eight requests.

# %% name="reuse-first-words"
first_words = json.loads(
    Path("../figures/measured/reuse_first_words.json").read_text("utf-8")
)
print(first_words["commit"], first_words["command"].partition(" --dtype")[0])


def rows_for(number):
    return [r for r in first_words["rows"] if r["num_requests"] == number]


def in_pairs(row, other):
    pairs = compare(*(Measurement(tuple(r["ttft_s"]["values"])) for r in (row, other)))
    return f"{pairs.median:.2f} ({pairs.low:.2f} to {pairs.high:.2f})"


own, their_one = rows_for(1)
*ours, theirs = rows_for(8)
for row in ours:
    who = f"{row['single_flight']}, {' '.join(row['publish'])}"
    print(
        f"{who:33} {row['ttft_s']['median']:5.2f} s, {in_pairs(row, own):>20} × our "
        f"N = 1, {in_pairs(row, theirs):>20} × theirs"
    )
for who, one, eight in (("transformers", their_one, theirs), ("we, off", own, ours[0])):
    times = [each["ttft_s"]["median"] for each in (one, eight)]
    print(f"{who}: alone {times[0]:.2f} s, the mean of eight {times[1]:.2f} s")
best = min(ours, key=lambda row: row["ttft_s"]["median"])
print(f"if time went by tokens: {best['prefill_tokens'] / 493:.2f}")
assert (
    best["cached_tokens"] == [0] + [480] * 7 and best["prefill_tokens"] == 493 + 7 * 13
)

# %% tags=["hide-input"]
pairs_shown = [(n, who) for n in (1, 2, 4, 8) for who in ("transformers", "ours")]
rows = []
for n, who in pairs_shown:
    row = find_row(n, who=who) if who != "ours" else find_row(n, "schedule")
    state = "lost" if who != "ours" else "published"
    times = row["ttft_s"]["median"], row["makespan_s"]["median"]
    label = f"N = {n}, {who}: {times[0]:.1f} and {times[1]:.1f} s"
    rows.append(
        (
            label,
            [(0, times[0], state, ""), (times[0], times[1] - times[0], "plain", "")],
        )
    )
draw_rows(
    rows,
    caption="Until the mean first token (coloured), and until the last end, in seconds: "
    "transformers on a static batch, and this engine with announcements.",
)

# %% [markdown]
# The first of eight words comes on average after [1.17](#reuse-first-words) s under `schedule`,
# and [1.23](#reuse-first-words) s with release after prefill: [1.30](#reuse-first-words) and
# [1.33](#reuse-first-words) times what one request waits alone, and [0.16](#reuse-first-words)
# times what transformers takes for the batch. That is no race between equals: a static batch must
# compute eight prompts. Without a cache we take [4.30](#reuse-first-words) s: the gain is the
# work that is not done, and little else.
#
# If time went by tokens, it would be [1.18](#reuse-first-words). We pay more: each of seven short chunks gathers
# the keys and values of the same 480 tokens for itself, in every layer. Our attention asks the
# page tables who shares only for requests that decode ([chapter 5](05_model.md)).
#
# On your machine three timings tell the signs: a decode step and a prefill give D, two requests
# in a step give k.

# %% [markdown]
# ## What is a hit?
#
# First 46 prompts of 320 tokens in pairs that share one page. Then 25, of which two share a page,
# in pools that get smaller; those who are preempted find their own pages when they return.

# %% name="hits"
from minivllm.events import EventLog


def serve_prompts(prompts, num_pages):
    """A step after every other prompt; counts, and what admissions found."""
    clock, log = VirtualClock(), EventLog()
    runner = SimulatedRunner(THEIRS, clock, 50_000, num_pages, 16)
    options, limits = read_options({}), Limits(50_000, 8_192)
    engine = assemble(options, num_pages, runner, limits, log, clock=clock)
    for i, ids in enumerate(prompts):
        engine.submit(ids, SamplingParams(max_tokens=100))
        if i % 2 == 0:
            engine.step()
    while engine.has_unfinished():
        engine.step()
    return engine.stats(), [event.details["cached"] for event in log.of("admit")]


def make_prompts(number, num_pairs):
    rng = Random("hits")
    prompts = [[rng.randrange(50_000) for _ in range(320)] for _ in range(number)]
    for i in range(num_pairs):
        prompts[2 * i + 1][:16] = prompts[2 * i][:16]
    return prompts


told, _ = serve_prompts(make_prompts(46, 23), 2_000)
print(f"{told['lookups']} lookups, {told['hits']} hits:", end=" ")
print(f"{told['hits'] / told['lookups']:.0%} of the requests,", end=" ")
print(f"{told['cached_tokens'] / told['queried_tokens']:.1%} of the tokens")
for num_pages in (700, 130, 100, 70):
    told, found = serve_prompts(make_prompts(25, 1), num_pages)
    rate = told["cached_tokens"] / told["queried_tokens"]
    print(
        f"{num_pages:3} pages: {told['preemptions']:2} preemptions, "
        f"{told['recomputed_tokens']:4} tokens recomputed, hit rate {rate:.1%}, "
        f"if returns counted as well {sum(found) / (320 * len(found)):.1%}"
    )

# %% [markdown]
# Half of the requests hit, and [2.5](#hits) % of the tokens do: the second number is the work.
# And if returns are counted, [0.2](#hits) % becomes [43.8](#hits), the higher the smaller the
# memory. A page that is found again by the request that computed it has saved nobody anything. So
# `cached_tokens` counts first admissions, and `recomputed_tokens` the loss. vLLM's hit counters
# and SGLang's rate leave returns out as well.
#
# A better hit rate is not a better P99 either: in [chapter 16](16_traffic.md), for
# agents, both rise by more than a third.
#
# The reverse exists too: fast, and zero cached tokens. The first two prompts on our model, above,
# found nothing; if the second was faster, another cache was warm: code, memory, a file. A quick
# answer proves no reuse. The count does, and `bench serve` asks for it.
#
# Here is what the counts are called in vLLM 0.32.0 (Prometheus adds `_total` to its counters) and
# SGLang 0.5.23:
#
# | here | vLLM | SGLang |
# |---|---|---|
# | `running`, `waiting` | `vllm:num_requests_running`, `…_waiting` | `sglang:num_running_reqs`, `num_queue_reqs` |
# | `queried_tokens` | `vllm:prefix_cache_queries` | – |
# | `cached_tokens` | `vllm:prefix_cache_hits` | `sglang:cached_tokens_total`; `cache_hit_rate` is of the last report |
# | `preemptions` | `vllm:num_preemptions` | `sglang:num_retracted_requests_total` |
# | `evicted_tokens` | – | `sglang:evicted_tokens_total` |
# | pages private or pinned, share | `vllm:kv_cache_usage_perc` | `sglang:token_usage` |
# | `ttft_s` | `vllm:time_to_first_token_seconds` | `sglang:time_to_first_token_seconds` |
# | `itl_s` | `vllm:inter_token_latency_seconds` | `sglang:inter_token_latency_seconds` |
# | `e2e_s` | `vllm:e2e_request_latency_seconds` | `sglang:e2e_request_latency_seconds` |

# %% [markdown]
# ## Exercises
#
# ### Exercise 1
#
# Five pairs of readings, in milliseconds. Is `after` faster than `before`? Answer three times:
# by the ratio of the means, by the ratio of the medians, by the median of the pairs' ratios.
# Then write the sentence that may be published: "faster", "slower" or "not shown".

# %%
before = Measurement((10.0, 12.0, 14.0, 16.0, 18.0))
after = Measurement((9.0, 11.0, 13.0, 15.0, 60.0))

# %% tags=["solution"]
by_means = fmean(after.values) / fmean(before.values)
by_medians = after.median / before.median
pairs = compare(after, before)
sentence = "not shown" if pairs.low <= 1 <= pairs.high else "shown"
print(f"{by_means:.2f}, {by_medians:.2f}, {pairs.median:.2f}: {sentence}")

# %%
assert by_means > 1 > by_medians and by_medians == 13 / 14
assert pairs.median < 1 < pairs.high and sentence == "not shown"

# %% [markdown]
# ### Exercise 2
#
# Somebody times insertions with `Trial(lambda: tree.insert(key))` and reports that our tree
# inserts faster than it matches. What did the trial measure from its second reading on? Its count
# tells. Write `mended`, a trial that enters a new tail behind the 2,048 known tokens in each
# reading.

# %%
tree = OWN_TREES["radix"](16)
shared = make_loads(scale=0.005)[0]
fill(tree, shared)
key = tree.encode(shared.renewed("mine")[0])
hasty = Trial(lambda: tree.insert(key))
print(f"tokens that were there: {measure({'hasty': hasty}, 3)['hasty'].count:,}")

# %% tags=["solution"]
from itertools import count

keys, numbers = [], count()


def renew():
    keys[:] = [tree.encode(shared.renewed(next(numbers))[0])]


mended = Trial(lambda: tree.insert(keys[0]), prepare=renew)

# %%
grown = tree.cache.total_size
assert measure({"mended": mended}, repeats=3, warmups=1)["mended"].count == 2048
assert tree.cache.total_size == grown + 4 * 2048

# %% [markdown]
# ### Exercise 3
#
# What a follower waits for hardly grows with their number; alone, everyone waits for all prefills
# before its own. From how many requests on does release at completion have the better mean TTFT
# here? On paper, with a prefill as the unit: alone the mean is (N + 1) / 2, waiting it is 1 + (N
# − 1)(D + (N − 1)s) / N. Then let `on_clock(OURS)` look for it.

# %% tags=["solution"] name="reuse-turn"
numbers = range(2, 40)
on_paper = next(n for n in numbers if 1 + (n - 1) * (D + (n - 1) * s) / n < (n + 1) / 2)
simulated = next(
    n for n in numbers if change(OURS, Case(n, *LATE), Case(n), "ttft_s") < 0
)
print(f"on paper from {on_paper} requests on, simulated from {simulated}")

# %%
assert (on_paper, simulated) == (17, 14)

# %% [markdown]
# The run turns sooner: those who do not wait decode in the steps in which others still compute
# their prompts, and each such step is longer for it.
