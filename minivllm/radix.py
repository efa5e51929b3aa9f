# Exported from chapters/03_radix.py (2e913dc7): edit the chapter.
"""A compressed tree of token prefixes and the slots that hold their K/V.

Every path from a root is a prefix that was computed. Edges are whole pages; a run of
pages without a fork is one node. After SGLang's radix cache, with exact tail-first
eviction, a match that never splits, and eviction that never walks the tree.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import index
from typing import overload

from minivllm.hashing import token_bytes
from minivllm.request import ExtraKey, TokenIds, check_extra_key


class Slots(Sequence[int]):
    """The slots of some pages, one for each token, expanded when asked for."""

    def __init__(self, first_slots: Sequence[int], page_size: int) -> None:
        self.first_slots = first_slots
        self.page_size = page_size

    @property
    def pages(self) -> list[int]:
        """The page numbers, for slots that were given out in whole pages."""
        return [slot // self.page_size for slot in self.first_slots]

    def __len__(self) -> int:
        return len(self.first_slots) * self.page_size

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"slot {index} of {len(self)}")
        page, offset = divmod(index % len(self), self.page_size)
        return self.first_slots[page] + offset

    def __iter__(self) -> Iterator[int]:
        for first in self.first_slots:
            yield from range(first, first + self.page_size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Slots({list(self)})"


@dataclass(eq=False, slots=True)
class Node:
    """A run of pages without a fork.

    `key` holds 4 bytes for each token, `first_slots` one int for each page. `locks`
    counts the active users of this node or of anything below it.
    """

    key: bytes
    first_slots: array[int]
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    last_access: int = 0
    num_hits: int = 0
    created: int = 0
    queued: bool = False  # has an entry in the eviction queue

    @property
    def evictable(self) -> bool:
        """A leaf that nobody uses, still in the tree."""
        return not self.children and not self.locks and self.parent is not None


@dataclass(eq=False, slots=True)
class Root(Node):
    """The empty prefix under an extra key; it has no parent."""

    extra_key: ExtraKey = None


@dataclass(frozen=True)
class Match:
    """What was found: `matched_len` tokens, in whole pages, and their slots."""

    matched_len: int
    kv_indices: Slots
    key: bytes = field(repr=False)
    extra_key: ExtraKey = None


EVICTION: dict[str, Callable[[Node], tuple[int, ...]]] = {  # the smallest goes first
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.num_hits, node.last_access),
    "fifo": lambda node: (node.created,),
}


class RadixCache:
    """Prefixes of token ids -> the slots that hold their K/V, shared and evictable.

    Sizes are in tokens. The tree owns no memory: `insert` tells it which slots hold
    what, `evict` tells the caller which slots it no longer needs.
    """

    def __init__(self, page_size: int, eviction: str = "lru") -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if eviction not in EVICTION:
            raise ValueError(
                f"eviction must be one of {sorted(EVICTION)}, not {eviction!r}"
            )
        self.page_size = page_size
        self.total_size = 0
        self.protected_size = 0
        self._step = 4 * page_size  # bytes in a page of the key
        self._roots: dict[ExtraKey, Root] = {}
        self._clock = 0
        self._leaves = EvictionQueue(EVICTION[eviction])

    @property
    def evictable_size(self) -> int:
        """Tokens that nobody has locked. All of them can be evicted, tails first."""
        return self.total_size - self.protected_size

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find the longest cached prefix, in whole pages. Changes nothing."""
        key = token_bytes(token_ids)
        firsts = array("i")
        for node, num_bytes in self._walk(key, extra_key):
            firsts += node.first_slots[: num_bytes // self._step]
        length = len(firsts) * self.page_size
        return Match(
            length, Slots(firsts, self.page_size), key[: 4 * length], extra_key
        )

    def _walk(self, key: bytes, extra_key: ExtraKey) -> list[tuple[Node, int]]:
        """The nodes along `key`, each with the number of its bytes that agree."""
        path: list[tuple[Node, int]] = []
        node: Node | None = self._roots.get(extra_key)
        at = 0
        while node and (child := node.children.get(key[at : at + self._step])):
            agree = self._agreement(child.key, key, at)
            path.append((child, agree))
            node, at = (child if agree == len(child.key) else None), at + agree
        return path

    def _agreement(self, edge: bytes, key: bytes, at: int) -> int:
        """How many bytes of `edge`, in whole pages, `key` repeats from `at` on."""
        if key.startswith(edge, at):
            return len(edge)
        low = 1  # the first page agrees: the child was found by it
        high = min(len(edge), len(key) - at) // self._step
        while low < high:  # the last page that agrees, by halving
            middle = (low + high + 1) // 2
            end = middle * self._step
            same = edge[:end] == key[at : at + end]
            low, high = (middle, high) if same else (low, middle - 1)
        return low * self._step

    def insert(
        self, token_ids: TokenIds, kv_indices: Sequence[int], extra_key: ExtraKey = None
    ) -> int:
        """Enter a computed prefix; return how many of its tokens were there already.

        `kv_indices` has a slot for each token; the slots of one page are consecutive.
        Only whole pages are entered. For tokens that were there already the tree keeps
        its own slots: the caller still owns the ones that it passed for them.
        """
        num_pages = len(token_ids) // self.page_size
        if len(kv_indices) < num_pages * self.page_size:
            raise ValueError(f"{len(kv_indices)} slots for {len(token_ids)} tokens")
        firsts = array("i", kv_indices[: num_pages * self.page_size : self.page_size])
        lasts = kv_indices[
            self.page_size - 1 : num_pages * self.page_size : self.page_size
        ]
        if any(b - a != self.page_size - 1 for a, b in zip(firsts, lasts, strict=True)):
            raise ValueError("the slots of one page must be consecutive")
        return self.insert_pages(token_ids, firsts, extra_key)[0]

    def insert_pages(
        self, token_ids: TokenIds, first_slots: array[int], extra_key: ExtraKey = None
    ) -> tuple[int, Match]:
        """`insert`, with one slot a page; also returns where the prefix lies now."""
        key = token_bytes(token_ids)[: len(first_slots) * self._step]
        path = self._walk(key, extra_key)
        known = sum(num_bytes for _, num_bytes in path)
        self._clock += 1
        end = self._end_of(path, extra_key)
        if known < len(key):
            end = self._add_leaf(end, key[known:], first_slots[known // self._step :])
        slots = Slots(self._refresh(end), self.page_size)
        return known // 4, Match(len(slots), slots, key[: 4 * len(slots)], extra_key)

    def _refresh(self, end: Node) -> array[int]:
        """Give a node and all above it the present tick; the slots of the path."""
        parts: list[array[int]] = []
        node: Node | None = end
        while node is not None:
            node.last_access = self._clock
            node.num_hits += 1
            parts.append(node.first_slots)
            node = node.parent
        return array("i", chain.from_iterable(reversed(parts)))

    def _end_of(self, path: list[tuple[Node, int]], extra_key: ExtraKey) -> Node:
        """The node whose end is the end of the match; splits if it lies inside one."""
        if not path:
            check_extra_key(extra_key)
            root = Root(b"", array("i"), extra_key=extra_key)
            return self._roots.setdefault(extra_key, root)
        node, num_bytes = path[-1]
        return node if num_bytes == len(node.key) else self._split(node, num_bytes)

    def _add_leaf(self, parent: Node, key: bytes, first_slots: array[int]) -> Node:
        leaf = Node(key, first_slots, parent, created=self._clock)
        parent.children[key[: self._step]] = leaf
        self.total_size += len(key) // 4
        self._leaves.push(leaf)
        return leaf

    def _split(self, node: Node, num_bytes: int) -> Node:
        """Cut a node after `num_bytes`; return the new upper half.

        parent                parent
          |                     |
        node [A B C D]        upper [A B]     new, with the same locks
                                |
                              node [C D]      the same object as before
        """
        parent, cut = node.parent, num_bytes // self._step
        assert parent is not None
        upper = Node(node.key[:num_bytes], node.first_slots[:cut], parent)
        upper.locks, upper.created = node.locks, node.created
        upper.last_access, upper.num_hits = node.last_access, node.num_hits
        parent.children[upper.key[: self._step]] = upper
        node.key, node.first_slots = node.key[num_bytes:], node.first_slots[cut:]
        node.parent = upper
        upper.children[node.key[: self._step]] = node
        return upper

    def evict(self, num_tokens: int) -> list[int]:
        """Forget at least `num_tokens` tokens (an int), in whole pages; their slots.

        Tail first from the next victim, as few pages as suffice, or all that nobody
        has locked. The caller gets the slots back and may reuse them at once.
        """
        num_pages = -(-index(num_tokens) // self.page_size)
        return list(Slots(self.evict_pages(num_pages), self.page_size))

    def evict_pages(self, num_pages: int) -> list[int]:
        """`evict` counted in pages; returns the first slot of each page."""
        freed: list[int] = []
        while len(freed) < num_pages and (leaf := self._leaves.pop()):
            keep = max(0, len(leaf.first_slots) - (num_pages - len(freed)))
            freed += reversed(leaf.first_slots[keep:])
            self._trim(leaf, keep)
        self.total_size -= len(freed) * self.page_size
        return freed

    def _trim(self, leaf: Node, num_pages: int) -> None:
        """Shorten a leaf to its first pages; 0 removes it, and may free its parent."""
        if num_pages:
            leaf.key = leaf.key[: num_pages * self._step]
            leaf.first_slots = leaf.first_slots[:num_pages]
            self._leaves.push(leaf)
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._step]]
        leaf.parent = None
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """A node lost a child or a lock: perhaps it can go now, perhaps it is empty."""
        if isinstance(node, Root) and not node.children and not node.locks:
            self._roots.pop(node.extra_key, None)
        self._leaves.push(node)

    def lock(self, match: Match) -> Handle:
        """Protect exactly the matched tokens from eviction, and refresh their path.

        Looks the prefix up again; raises `StaleMatch` if it is shorter by now, or lies
        elsewhere.
        """
        path = self._walk(match.key, match.extra_key)
        if sum(num_bytes for _, num_bytes in path) < len(match.key):
            raise StaleMatch(
                f"the {match.matched_len} tokens of the match were evicted"
            )
        self._clock += 1
        end = self._end_of(path, match.extra_key)
        if self._refresh(end) != match.kv_indices.first_slots:
            raise StaleMatch("the tokens of the match lie elsewhere now")
        self._count(end, +1)
        return Handle(end)

    def unlock(self, handle: Handle) -> None:
        """Give a lock back. Raises `ValueError` the second time."""
        if handle.node is None:
            raise ValueError("this handle was unlocked before")
        self._count(handle.node, -1)
        self._settle(handle.node)
        handle.node = None

    def _count(self, end: Node, change: int) -> None:
        """Add to the locks of a path; its tokens change sides when it was or gets 0."""
        node: Node | None = end
        while node is not None:
            if node.locks + change == 0 or node.locks == 0:
                self.protected_size += change * (len(node.key) // 4)
            node.locks += change
            node = node.parent

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None:
                yield node

    def pages(self) -> list[int]:
        """The pages of all cached tokens, for slots given out in whole pages."""
        firsts = chain.from_iterable(node.first_slots for node in self.nodes())
        return [slot // self.page_size for slot in firsts]

    def check(self) -> None:
        """Assert every invariant of the tree. For tests: walks all of it."""
        total = protected = 0
        for node in self.nodes():
            assert node.parent is not None and node.key
            assert len(node.key) == len(node.first_slots) * self._step
            assert node.parent.children[node.key[: self._step]] is node
            assert 0 <= node.locks <= node.parent.locks, (
                "a path is locked from its end up"
            )
            assert node.last_access <= node.parent.last_access
            assert node.queued or not node.evictable, (
                "an unused leaf that eviction misses"
            )
            total += len(node.key) // 4
            protected += (len(node.key) // 4) * (node.locks > 0)
        assert (total, protected) == (self.total_size, self.protected_size)


class EvictionQueue:
    """Unused leaves, the next victim first: O(log n) for each push and pop.

    Entries may be stale. Priorities only grow, so an entry's priority is never above
    its node's real one, and `pop` puts right what it finds.
    """

    def __init__(self, priority: Callable[[Node], tuple[int, ...]]) -> None:
        self._priority = priority
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._serial = 0  # breaks ties: nodes themselves are not comparable

    def push(self, node: Node) -> None:
        """Enter a node, if it is an unused leaf and not in the queue yet."""
        if node.evictable and not node.queued:
            node.queued = True
            self._serial += 1
            heapq.heappush(self._heap, (self._priority(node), self._serial, node))

    def pop(self) -> Node | None:
        """Take out the next victim, or None if every leaf is in use."""
        while self._heap:
            priority, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.evictable and priority == self._priority(node):
                return node
            self.push(node)
        return None


class StaleMatch(LookupError):
    """The tokens of a match were evicted before they were locked."""


@dataclass(eq=False)
class Handle:
    """A lock on a path: the node where it ends, until `unlock` takes it back."""

    node: Node | None
