# Exported from chapters/03_radix.py (50ecc7f4): edit the chapter.
"""A compressed tree of token prefixes and the slots that hold their K/V.

Every path from a root is a prefix that was computed. Edges are whole pages; a run of
pages without a fork is one node. After SGLang's radix cache, with exact tail-first
eviction, a match that never splits, and eviction that never walks the tree.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from operator import index
from typing import NamedTuple, overload

from minivllm.request import ExtraKey, TokenIds, check_extra_key, encode_ids


class Slots(Sequence[int]):
    """The slots of some pages, one for each token, expanded when asked for.

    `places` has one int for each page; its first slot is place * unit.
    """

    __slots__ = ("page_size", "places", "unit")

    def __init__(self, places: array[int], page_size: int, unit: int = 1) -> None:
        self.places = places
        self.page_size = page_size
        self.unit = unit

    def __len__(self) -> int:
        return len(self.places) * self.page_size

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
        return self.places[page] * self.unit + offset

    def __iter__(self) -> Iterator[int]:
        size, firsts = self.page_size, (place * self.unit for place in self.places)
        return chain.from_iterable(range(s, s + size) for s in firsts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Slots({list(self)})"


@dataclass(eq=False, slots=True)
class Node:
    """A run of pages without a fork.

    `key` holds 4 bytes for each token, `places` one int for each page. `locks`
    counts the handles that end here and the children that are locked. A use is noted
    where it ends: a leaf's `last_access` and `num_hits` go to its parent when it goes.
    """

    key: bytes
    places: array[int]
    parent: Node | None = None
    last_access: int = 0
    created: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    num_hits: int = 0
    queued: bool = False  # has an entry in the eviction queue

    @property
    def evictable(self) -> bool:
        """A leaf that nobody uses, still in the tree."""
        return not self.children and not self.locks and self.parent is not None


@dataclass(eq=False, slots=True)
class Root(Node):
    """The empty prefix under an extra key; it has no parent."""

    extra_key: ExtraKey = None


End = tuple[Node, int]  # a place in the tree: so many bytes into this node's key


class Match(NamedTuple):
    """What was found: `matched_len` tokens, in whole pages, and their slots."""

    matched_len: int
    kv_indices: Slots
    token_ids: array[int]
    extra_key: ExtraKey = None
    end: End | None = None
    num_changes: int = -1  # how often the tree had changed when this was found

    def __repr__(self) -> str:
        return f"Match({self.matched_len}, {self.kv_indices})"


EVICTION: dict[str, Callable[[Node], int]] = {  # the smallest goes first
    "lru": lambda node: node.last_access,
    "lfu": lambda node: node.num_hits << 64 | node.last_access,
    "fifo": lambda node: node.created,
}


class RadixCache:
    """Prefixes of token ids -> the slots that hold their K/V, shared and evictable.

    Sizes are in tokens. The tree owns no memory: `insert` tells it which slots hold
    what, `evict` tells the caller which slots it no longer needs. `unit`: in what the
    owner of the slots counts places, single slots (1) or whole pages (`page_size`).
    """

    def __init__(self, page_size: int, eviction: str = "lru", unit: int = 1) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if eviction not in EVICTION:
            raise ValueError(
                f"eviction must be one of {sorted(EVICTION)}, not {eviction!r}"
            )
        self.page_size = page_size
        self.total_size = 0
        self.protected_size = 0
        self._unit = unit
        self._step = 4 * page_size  # bytes in a page of the key
        self._roots: dict[ExtraKey, Root] = {}
        self._clock = 0
        self._num_changes = 0
        self._priority = EVICTION[eviction]
        self._leaves = EvictionQueue(self._priority)

    @property
    def evictable_size(self) -> int:
        """Tokens that nobody has locked. All of them can be evicted, tails first."""
        return self.total_size - self.protected_size

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find the longest cached prefix, in whole pages. Changes nothing."""
        ids, root = encode_ids(token_ids), self._roots.get(extra_key)
        end, places = (None, array("i")) if root is None else self._walk(root, ids)
        slots = Slots(places, self.page_size, self._unit)
        return Match(len(slots), slots, ids, extra_key, end, self._num_changes)

    def _walk(self, node: Node, ids: array[int]) -> tuple[End, array[int]]:
        """Follow tokens down from the end of a node, to where they leave the tree.

        Returns that point, and the places of the pages on the way.
        """
        start, size, within = 0, self.page_size, len(node.key)
        view = memoryview(ids)  # a slice of it is not a copy yet
        runs: list[array[int]] = []
        while child := node.children.get(ids[start : start + size].tobytes()):
            node, within = child, len(child.key)
            end = start + within // 4
            key = view[start:end].tobytes()
            if key != node.key:
                num_pages = shared_pages(node.key, key, self._step)
                runs.append(node.places[:num_pages])
                within = num_pages * self._step
                break
            runs.append(node.places)
            start = end
        return (node, within), array("i", b"".join(runs))

    def insert(
        self, token_ids: TokenIds, kv_indices: Sequence[int], extra_key: ExtraKey = None
    ) -> int:
        """Enter a computed prefix; return how many of its tokens were there already.

        `kv_indices` has a slot for each token; the slots of one page are consecutive.
        Only whole pages are entered. For tokens that were there already the tree keeps
        its own slots: the caller still owns the ones that it passed for them.
        """
        num_pages = len(token_ids) // self.page_size
        places = places_of(kv_indices, num_pages, self.page_size, self._unit)
        if not num_pages:
            return 0
        ids = encode_ids(token_ids)
        self._clock += 1
        end, known = self._enter(self._root(extra_key), ids, places)
        end.num_hits += 1
        self._settle(end)
        return len(known) * self.page_size

    def _enter(
        self,
        node: Node,
        ids: array[int],
        places: array[int],
        num_own_locks: int = 0,
    ) -> tuple[Node, array[int]]:
        """Add what is missing of some pages below a node, and refresh the path.

        Returns the end, and the places of the pages that were known.
        """
        reached, known = self._walk(node, ids)
        end, size = self._node_at(reached), self.page_size
        end.last_access = self._clock
        if len(known) < len(places):
            own = num_own_locks if end is node else 0
            rest = memoryview(ids)[len(known) * size : len(places) * size].tobytes()
            end = self._add(end, rest, places[len(known) :], own)
        return end, known

    def _node_at(self, end: End) -> Node:
        """The node that ends at a place; cuts the node that goes on there."""
        node, num_bytes = end
        return node if num_bytes == len(node.key) else self._split(node, num_bytes)

    def _root(self, extra_key: ExtraKey) -> Root:
        root = self._roots.get(extra_key)
        if root is None:
            check_extra_key(extra_key)
            root = self._roots[extra_key] = Root(b"", array("i"), extra_key=extra_key)
        return root

    def _settle(self, node: Node) -> None:
        """A node is new, or lost a child or a lock: is it free to go, or empty, now?"""
        if isinstance(node, Root) and not node.children and not node.locks:
            self._num_changes += 1
            self._roots.pop(node.extra_key, None)
        self._leaves.push(node)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None:
                yield node

    def places(self) -> list[int]:
        """The places of all cached pages."""
        return list(chain.from_iterable(node.places for node in self.nodes()))

    def _split(self, node: Node, num_bytes: int) -> Node:
        """Cut a node after `num_bytes`; return the new upper half.

        parent                parent
          |                     |
        node [A B C D]        upper [A B]     new; locked if the node is
                                |
                              node [C D]      the same object as before
        """
        parent, cut = node.parent, num_bytes // self._step
        assert parent is not None
        self._num_changes += 1
        upper = Node(node.key[:num_bytes], node.places[:cut], parent)
        upper.locks, upper.created = int(node.locks > 0), node.created
        parent.children[upper.key[: self._step]] = upper
        node.key, node.places = node.key[num_bytes:], node.places[cut:]
        node.parent = upper
        upper.children[node.key[: self._step]] = node
        return upper

    def _add(
        self, parent: Node, key: bytes, places: array[int], num_own_locks: int
    ) -> Node:
        """Hang pages on a node as a new leaf, or let a leaf grow; returns the end."""
        now = self._clock
        leaf = Node(key, places, parent, now, now)
        self._num_changes += 1
        self.total_size += len(key) // 4
        alone = not parent.children and parent.locks == num_own_locks and parent.key
        if alone and self._priority(parent) == self._priority(leaf):
            parent.key += key
            parent.places += places
            self.protected_size += len(key) // 4 * num_own_locks
            return parent
        parent.children[key[: self._step]] = leaf
        return leaf

    def evict(self, num_tokens: int) -> list[int]:
        """Forget at least `num_tokens` tokens (an int), in whole pages; their slots.

        Tail first from the next victim, as few pages as suffice, or all that nobody
        has locked. The caller gets the slots back and may reuse them at once.
        """
        num_pages = -(-index(num_tokens) // self.page_size)
        places = array("i", self.evict_pages(num_pages))
        return list(Slots(places, self.page_size, self._unit))

    def evict_pages(self, num_pages: int) -> list[int]:
        """`evict` counted in pages; returns the place of each page."""
        freed: list[int] = []
        while len(freed) < num_pages and (leaf := self._leaves.pop()):
            keep = max(0, len(leaf.places) - (num_pages - len(freed)))
            freed += leaf.places[keep:][::-1]
            self._trim(leaf, keep)
        self.total_size -= len(freed) * self.page_size
        return freed

    def _trim(self, leaf: Node, num_pages: int) -> None:
        """Shorten a leaf to its first pages; 0 removes it, and may free its parent."""
        self._num_changes += 1
        if num_pages:
            leaf.key = leaf.key[: num_pages * self._step]
            leaf.places = leaf.places[:num_pages]
            self._leaves.push(leaf)
            return
        parent, leaf.parent = leaf.parent, None
        assert parent is not None
        del parent.children[leaf.key[: self._step]]
        parent.last_access = max(parent.last_access, leaf.last_access)
        parent.num_hits += leaf.num_hits
        self._settle(parent)

    def lock(self, match: Match) -> Handle:
        """Protect exactly the matched tokens from eviction, and refresh their path.

        Looks the prefix up again if the tree has changed since; raises `StaleMatch` if
        it is shorter by now, or lies elsewhere.
        """
        node = self._node_at(self._end_of(match))
        self._clock += 1
        node.last_access = self._clock
        node.num_hits += 1
        self._pin(node)
        return Handle(node)

    def _end_of(self, match: Match) -> End:
        if match.end and match.num_changes == self._num_changes:
            return match.end
        ids = match.token_ids[: match.matched_len]
        root = self._roots.get(match.extra_key) if ids else self._root(match.extra_key)
        if root is not None:
            end, places = self._walk(root, ids)
            if places == match.kv_indices.places:
                return end
        n = match.matched_len
        raise StaleMatch(f"the {n} tokens of the match were evicted or moved")

    def unlock(self, handle: Handle) -> None:
        """Give a lock back. Raises `ValueError` the second time."""
        node = self._locked(handle)
        handle.node = None
        self._unpin(node)
        self._settle(node)

    def _locked(self, handle: Handle) -> Node:
        if handle.node is None:
            raise ValueError("this handle was unlocked before")
        return handle.node

    def _pin(self, node: Node | None) -> None:
        """Count a lock here, and on the parent of each node that had none before."""
        while node is not None:
            node.locks += 1
            if node.locks > 1:
                return
            self.protected_size += len(node.key) // 4
            node = node.parent

    def _unpin(self, node: Node | None) -> None:
        while node is not None:
            node.locks -= 1
            if node.locks > 0:
                return
            self.protected_size -= len(node.key) // 4
            node = node.parent

    def extend(
        self, handle: Handle, token_ids: TokenIds, places: array[int]
    ) -> tuple[int, array[int]]:
        """Enter whole pages below a locked prefix; the lock moves to their end.

        `token_ids` are those after the prefix, `places` one int a page. Returns how
        many of the tokens were known, and the places of their pages now.
        """
        node = self._locked(handle)
        num_tokens = len(places) * self.page_size
        ids = encode_ids(token_ids)[:num_tokens]
        if len(ids) < num_tokens:
            raise ValueError(f"{len(places)} pages for {len(token_ids)} tokens")
        self._clock += 1
        size = self.total_size
        end, known = self._enter(node, ids, places, num_own_locks=1)
        if end is not node:
            self._pin(end)
            self._unpin(node)
            handle.node = end
        num_pages = len(known) + (self.total_size - size) // self.page_size
        now = known + places[len(known) : num_pages]
        return len(known) * self.page_size, now

    def evictable_len(self, match: Match) -> int:
        """How many tokens of a match nobody has locked: a lock would pin them."""
        if not match.matched_len:
            return 0
        node: Node | None
        node, num_bytes = self._end_of(match)
        num_tokens = 0
        while node is not None and not node.locks:
            num_tokens += num_bytes // 4
            node = node.parent
            num_bytes = len(node.key) if node else 0
        return num_tokens

    def check(self) -> None:
        """Assert every invariant of the tree. For tests: walks all of it."""
        total = protected = 0
        for node in self.nodes():
            assert node.parent is not None and node.key
            assert len(node.key) == len(node.places) * self._step
            assert node.parent.children[node.key[: self._step]] is node
            locked = sum(child.locks > 0 for child in node.children.values())
            assert node.locks >= locked, "a path is locked from its end up"
            assert node.queued or not node.evictable, (
                "an unused leaf that eviction misses"
            )
            total += len(node.key) // 4
            protected += (len(node.key) // 4) * (node.locks > 0)
        assert (total, protected) == (self.total_size, self.protected_size)


def shared_pages(one: bytes, other: bytes, step: int) -> int:
    """How many pages, of `step` bytes each, two runs have in common."""
    low, high = 0, min(len(one), len(other)) // step
    while low < high:  # the first `low` pages agree, `high` and what follows may not
        middle = (low + high + 1) // 2
        part = slice(low * step, middle * step)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low


def places_of(
    slots: Sequence[int], num_pages: int, page_size: int, unit: int
) -> array[int]:
    """The place of each page; `ValueError` if its slots are not consecutive."""
    size, end = page_size, num_pages * page_size
    if len(slots) < end:
        raise ValueError(f"{len(slots)} slots for {end} tokens")
    if type(slots) is Slots and slots.page_size == size and slots.unit == unit:
        places = slots.places
        return places if len(places) == num_pages else places[:num_pages]
    try:
        places = array("i", [first // unit for first in slots[0:end:size]])
    except OverflowError:
        raise ValueError("a slot must be a 32-bit integer") from None
    if list(slots[:end]) != list(Slots(places, size, unit)):
        start = f", and begin at a multiple of {unit}" if unit > 1 else ""
        raise ValueError(f"the slots of one page must be consecutive{start}")
    return places


Entry = tuple[int, int, Node]  # priority, serial number, leaf


class EvictionQueue:
    """Unused leaves, the next victim first: O(log n) a push and a pop, over a run.

    Entries may be stale. Priorities only grow, so an entry's priority is never above
    its node's real one, and `pop` puts right what it finds: one pop may find many.
    """

    def __init__(self, priority: Callable[[Node], int]) -> None:
        self._priority = priority
        self._line: deque[Entry] = deque()
        self._heap: list[Entry] = []
        self._serial = 0  # breaks ties: nodes themselves are not comparable

    def push(self, node: Node) -> None:
        """Enter a node, if it is an unused leaf and not in the queue yet."""
        if node.queued or not node.evictable:
            return
        node.queued = True
        self._serial += 1
        entry = (self._priority(node), self._serial, node)
        if not self._line or entry > self._line[-1]:
            self._line.append(entry)
        else:
            heappush(self._heap, entry)

    def pop(self) -> Node | None:
        """Take out the next victim, or None if every leaf is in use."""
        while self._line or self._heap:
            priority, _, node = self._take_first()
            node.queued = False
            if node.evictable and priority == self._priority(node):
                return node
            self.push(node)
        return None

    def _take_first(self) -> Entry:
        if not self._heap or (self._line and self._line[0] < self._heap[0]):
            return self._line.popleft()
        return heappop(self._heap)


class StaleMatch(LookupError):
    """The tokens of a match were evicted before they were locked."""


@dataclass(eq=False)
class Handle:
    """A lock on a path: the node where it ends, until `unlock` takes it back."""

    node: Node | None
