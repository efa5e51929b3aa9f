# Exported from chapters/15_measuring.py (aae0defc): edit the chapter.
"""The loads of `minivllm bench cache`, and what is done with them."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import Any, Protocol

from minivllm.bench import Measurement, Row, Trial, make_row, make_rows, measure
from minivllm.prefix_cache import HashIndex, PrefixCache
from minivllm.radix import RadixCache, Slots


def draw_tokens(rng: Random, num_tokens: int) -> array[int]:
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
    sequences: tuple[array[int], ...]
    tail: int
    step: int = 0
    fork: bool = False

    def entries(self) -> Iterator[array[int]]:
        """What is entered, in its order. Copies, so that no cache can keep ours."""
        length = len(self.sequences[0])
        for end in range(self.step or length, length + 1, self.step or length):
            for sequence in self.sequences:
                yield sequence[:end]
                if self.fork:
                    yield sequence[:end] + ELSE

    def renewed(self, seed: object, limit: int = 100) -> list[array[int]]:
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


class Tree(Protocol):
    """A prefix tree under test."""

    def encode(self, token_ids: array[int]) -> Any:
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

    def encode(self, token_ids: array[int]) -> tuple[array[int], Slots]:
        """The ids as they are; one slot a page."""
        size = self.cache.page_size
        firsts = range(0, len(token_ids) // size * size, size)
        return token_ids, Slots(array("i", firsts), size)

    def match(self, key: tuple[array[int], Slots]) -> int:
        """Look up; the tokens found."""
        return self.cache.match_prefix(key[0]).matched_len

    def insert(self, key: tuple[array[int], Slots]) -> int:
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


def fill(tree: Tree, load: Load) -> int:
    """Enter a load; the tokens that were new to the tree."""
    return sum(len(ids) - tree.insert(tree.encode(ids)) for ids in load.entries())


def match_trial(tree: Tree, sequences: list[array[int]]) -> Trial:
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


def evict_trial(
    tree: Tree,
    supply: Iterator[array[int]],
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


def single_pages(page_size: int) -> Iterator[array[int]]:
    """Sequences of one page, no two alike, without end."""
    for start in count(0, page_size):
        yield array("i", range(start, start + page_size))


def random_sequences(seed: object, num_tokens: int) -> Iterator[array[int]]:
    """Sequences that share nothing, without end."""
    rng = Random(f"{seed}")
    while True:
        yield draw_tokens(rng, num_tokens)


def bytes_per_token(make: MakeTree, page_size: int, load: Load) -> Measurement:
    """What a filled tree holds, keys included, for each token in it."""
    tracemalloc.start()
    tree = make(page_size)
    num_tokens = fill(tree, load)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] + tree.untraced_bytes()
    tracemalloc.stop()
    return Measurement((held / num_tokens,), num_tokens)


class Manager(Protocol):
    """A cache with its pages under test."""

    def request(self, token_ids: array[int]) -> Any:
        """A request, as it is before the cache has seen it."""

    def serve(self, request: Any) -> int:
        """Its whole way through the cache; the tokens found."""


class OwnManager:
    """Our prefix cache, under one of its indexes."""

    def __init__(self, index: str, num_pages: int, page_size: int) -> None:
        self.cache = PrefixCache(num_pages, page_size, index)

    def request(self, token_ids: array[int]) -> array[int]:
        """The encoded ids: a request has them."""
        return token_ids

    def serve(self, request: array[int]) -> int:
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
