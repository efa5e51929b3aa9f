# %% [markdown]
# # 3. A tree of prefixes: match, insert, evict
#
# Two requests share their first 25 tokens. The cache gives back [16](#found). Nine tokens are
# computed again although their keys and values lie in memory. Before you call that a
# bug, look at what the cache can hand out: pages of 16 tokens, and the second page
# holds nine shared tokens and seven that are not.
#
# To use the nine, the second request would have to write its own tokens, from the tenth on,
# into a page that others read. So whole pages are shared or nothing.
#
# This chapter builds the structure that finds those 16: a tree in which every path from
# the root is a prefix that somebody has computed. SGLang calls it a radix cache. It has
# three operations, *match*, *insert* and *evict*, and two without which these go wrong:
# *lock* and *unlock*.
#
# ## The version that cannot be wrong
#
# Before the clever structure, a plain one. A *slot* is the place of one token in K/V
# memory, a number. Keep for every computed prefix, page by page, where its last page
# lies:

# %% name="naive"
PAGE = 16


class NaiveCache:
    """Every known prefix, in whole pages -> the first slot of its last page."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, ...], int] = {}

    def insert(self, tokens: list[int], slots: list[int]) -> None:
        for end in range(PAGE, len(tokens) + 1, PAGE):
            self.slots.setdefault(tuple(tokens[:end]), slots[end - PAGE])

    def match(self, tokens: list[int]) -> int:
        end = 0
        while end + PAGE <= len(tokens) and tuple(tokens[: end + PAGE]) in self.slots:
            end += PAGE
        return end


naive = NaiveCache()
shared = list(range(25))
naive.insert(shared + [70] * 15, list(range(40)))
naive.match(shared + [80] * 15)

# %% [markdown]
# It answers [16](#naive). It also stores a copy of all earlier tokens with every page: for one
# request of 32,000 tokens that is 32 million integers. Sharing is the whole point, so
# store shared tokens once: that is a tree. And most pages have exactly one successor,
# so put long runs of pages without a fork into one node: that makes it a *radix* tree.
#
# ## A node
#
# Slots are given out in pages, `slot = page * page_size + offset`, so a node remembers
# only the first slot of each page and expands the rest when asked: a match of 32,000
# tokens is 2,000 numbers, not 32,000.

# %% export="radix.py"
"""A compressed tree of token prefixes and the slots that hold their K/V.

Every path from a root is a prefix that was computed. Edges are whole pages; a run of
pages without a fork is one node. After SGLang's radix cache, with exact tail-first
eviction, a match that never splits, and eviction that never walks the tree.
"""

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


# %% [markdown]
# The key of a node is the bytes of its tokens, four for each. Comparing two runs of
# 2,048 tokens is then one `memcmp` and not 2,048 comparisons of Python objects. Children
# are found by their first page: two children of one node always differ there, otherwise
# they would share a page and it would have been a node of its own.


# %% export="radix.py"
@dataclass(eq=False, slots=True)
class Node:
    """A run of pages without a fork.

    `key` holds 4 bytes for each token, `first_slots` one int for each page. `locks`
    counts the active users of this node or of anything below it.
    """

    key: bytes
    first_slots: "array[int]"
    parent: "Node | None" = None
    children: dict[bytes, "Node"] = field(default_factory=dict)
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


# %% [markdown]
# What a lookup returns is a small frozen object. Later, only such an object can be locked:
# nobody can lock, or unlock, what was never matched.


# %% export="radix.py"
@dataclass(frozen=True)
class Match:
    """What was found: `matched_len` tokens, in whole pages, and their slots."""

    matched_len: int
    kv_indices: Slots
    key: bytes = field(repr=False)
    extra_key: ExtraKey = None


# %% [markdown]
# ## Match
#
# Matching walks down as long as whole pages agree. It may stop in the middle of a node,
# and then it does just that: it stops. One could split the node there, as an insert
# must. But a lookup is a question, and a scheduler asks it for requests that it will not
# admit this step, nor the next. A question should leave the tree as it was.
#
# The constructor also names the eviction policy. What each of the three keeps of a node,
# and why the smallest goes first, is the subject of the section on eviction.

# %% export="radix.py"
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


# %% [markdown]
# The class will grow through the chapter. `class RadixCache(RadixCache):` reopens it: in
# the notebook the new class inherits from the old one and takes its name, and the exporter
# joins the parts to one class in `radix.py`.
#
# A lookup collects the slots along the path that it walked.


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# How far do two runs of bytes agree? Nearly always to the end, and one comparison in C tells.
# Otherwise the last page that agrees is found by halving, with whole slices compared each
# time: for a node of 128 pages, seven comparisons.


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# ## Insert, and the split
#
# Inserting begins with a match. What is left over becomes a new leaf. If the match ended
# inside a node, that node is first cut in two where the sequences part: the upper half
# is shared, the lower half and the new leaf become its children.
#
# One detail of the cut decides bugs later. Somebody may hold the old node, because a
# running request has locked it. So the old object stays where its *end* is, as the lower
# half, and the new object goes in above it, with the same locks: whoever uses the lower
# half uses everything above it as well.


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# The public `insert` above only checks its arguments. The engine will hand over pages, not
# slots, and it wants to know more than how much was there already: *where the prefix lies
# now*. Chapter 4 frees the duplicates and points their owner to the slots that the tree
# kept. So the work is done one level below, and ends with a walk back up, which refreshes
# the access times and collects the slots on its way.


# %% export="radix.py"
class RadixCache(RadixCache):
    def insert_pages(
        self, token_ids: TokenIds, first_slots: "array[int]", extra_key: ExtraKey = None
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

    def _refresh(self, end: Node) -> "array[int]":
        """Give a node and all above it the present tick; the slots of the path."""
        parts: list[array[int]] = []
        node: Node | None = end
        while node is not None:
            node.last_access = self._clock
            node.num_hits += 1
            parts.append(node.first_slots)
            node = node.parent
        return array("i", chain.from_iterable(reversed(parts)))


# %% [markdown]
# Where does the new leaf hang? At the end of the match. If that end lies between two nodes,
# fine; if it lies inside one, a split makes an end of it.


# %% export="radix.py"
class RadixCache(RadixCache):
    def _end_of(self, path: list[tuple[Node, int]], extra_key: ExtraKey) -> Node:
        """The node whose end is the end of the match; splits if it lies inside one."""
        if not path:
            check_extra_key(extra_key)
            root = Root(b"", array("i"), extra_key=extra_key)
            return self._roots.setdefault(extra_key, root)
        node, num_bytes = path[-1]
        return node if num_bytes == len(node.key) else self._split(node, num_bytes)

    def _add_leaf(self, parent: Node, key: bytes, first_slots: "array[int]") -> Node:
        leaf = Node(key, first_slots, parent, created=self._clock)
        parent.children[key[: self._step]] = leaf
        self.total_size += len(key) // 4
        self._leaves.push(leaf)
        return leaf


# %% [markdown]
# And the split. The picture in its docstring is the whole idea; the rest is keeping both
# halves consistent.


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# Note what the split does with the access time: the lower half keeps its own. Somebody
# asked for the first half of the node just now; that says nothing about the second.
#
# ## Evict
#
# Memory is full, and some tokens must go. Which ones may? Not the root's children just
# because they are old: everything below them would be unreachable, K/V that nobody can
# find and nobody frees. Only a *leaf* can go, and only one that no running request
# reads. Among those, by default, the least recently used (`lru`); the least often used
# (`lfu`) and the oldest (`fifo`) are the alternatives, each one line of the table above.
#
# Two more decisions, both about exactness. A leaf may be a run of a hundred pages while
# one page is asked for: then only its last page goes, for the pages before it make
# sense without it and not the other way round. And when a leaf is gone its parent may
# be a leaf now, and takes its place in the queue.
#
# The queue must not search the tree. It is a heap with one entry for each leaf, ordered
# by access time. Times change while an entry waits in the heap, but they only grow. So
# an entry that comes out too early is put back with its present time, and an entry for
# a node that is no longer an unlocked leaf is dropped: it will be pushed again when it
# becomes one.


# %% export="radix.py"
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


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# ## Lock
#
# Between the moment when a request is told "16 tokens match" and the moment when its
# forward pass reads them, another request may need memory, and evict exactly those 16.
# So the reader *locks* what it matched, before anything else can happen, and unlocks it
# when it ends.
#
# A lock counts on the whole path up to the root, because a leaf's K/V are worth nothing
# without those before it. And it protects the matched tokens, no more: if the match
# ended inside a node, the lock is what splits it. Locking the whole node "to be on the
# safe side" would pin pages that nobody reads, and a pool full of those looks like a
# memory leak.
#
# The handle that comes back is the only way to unlock, and it works once.


# %% export="radix.py"
class StaleMatch(LookupError):
    """The tokens of a match were evicted before they were locked."""


@dataclass(eq=False)
class Handle:
    """A lock on a path: the node where it ends, until `unlock` takes it back."""

    node: Node | None


class RadixCache(RadixCache):
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


# %% [markdown]
# A root's key is empty, so it adds nothing to the sizes, and it has no parent, so it is
# never evictable.
#
# Last, what must always hold. Tests call this after every operation:


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# ## What it does
#
# The two prompts from the beginning, 25 shared tokens, page size 16. And after the lookup, how
# many nodes does the tree have?

# %% name="found" claims="S07"
cache = RadixCache(page_size=16)
cache.insert(shared + [70] * 15, range(40))
found = cache.match_prefix(shared + [80] * 15)
slots = found.kv_indices
print(found.matched_len, "of 25 shared tokens, in slots", slots[0], "to", slots[-1])
print(len(list(cache.nodes())), "node: a match does not split")

# %% [markdown]
# How bad is the loss at the end? It is less than a page, whatever the length:

# %% name="loss" claims="S10"
for num_shared in (20, 25, 1_024, 1_039):
    cache = RadixCache(page_size=16)
    cache.insert(list(range(num_shared)) + [-1] * 16, range(num_shared + 16))
    reused = cache.match_prefix(list(range(num_shared)) + [-2] * 16).matched_len
    lost = num_shared - reused
    print(
        f"{num_shared} shared: {reused} reused, {lost} lost ({lost / num_shared:.1%})"
    )

# %% [markdown]
# Now a tree small enough to draw, with pages of one token. `A B C D` is there; then
# `A B E` comes.

# %% tags=["hide-input"]
from minivllm.drawing import Branch, draw_tree


def branch(node: Node, names: str = "ABCDEFGHIJ") -> Branch:
    tokens = [
        int.from_bytes(node.key[i : i + 4], "little")
        for i in range(0, len(node.key), 4)
    ]
    words = " ".join(names[t] for t in tokens) + f" · used {node.last_access}"
    state = "pinned" if node.locks else "published"
    return Branch(words, state, [branch(child) for child in node.children.values()])


def picture(cache: RadixCache, caption: str):
    roots = [branch(c) for r in cache._roots.values() for c in r.children.values()]
    return draw_tree(Branch("root", "free", roots), caption=caption)


# %%
A, B, C, D, E = range(5)
small = RadixCache(page_size=1)
small.insert([A, B, C, D], [0, 1, 2, 3])
held = small.lock(small.match_prefix([A, B, C, D]))
picture(
    small,
    "Before: one run, one node, locked by a reader (blue). 'used' is the tick of the last access.",
)

# %% name="split" claims="S08"
small.insert([A, B, E], [10, 11, 12])
small.check()
picture(
    small,
    "After: the node was cut where the sequences part. Both halves of the old run are "
    "still locked; the new leaf is not. The lower half kept its old tick.",
)

# %% [markdown]
# The second request passed slots 10 and 11 for `A B`, and the tree kept 0 and 1. The
# caller has two slots too many now, and has to find out and give them back. How it does
# that without pointing at freed memory is one of the subjects of the next chapter.
#
# Eviction takes the free leaf `E`, and then nothing, until the reader lets go:

# %% name="evicted" claims="S11"
print("evict 4:", small.evict(4), "· still protected:", small.protected_size)
small.unlock(held)
print(
    "evict 1:",
    small.evict(1),
    "· evict 9:",
    small.evict(9),
    "· left:",
    small.total_size,
)
small.check()

# %% [markdown]
# Slot [3](#evicted) first (token `D`, the tail), then the rest from the end to the front:
# [2, 1, 0](#evicted).
# Never a page before the pages that need it.
#
# The run once more, a step at a time:

# %% tags=["hide-input"]
from minivllm.drawing import Steps

replay, frames = RadixCache(page_size=1), []
replay.insert([A, B, C, D], range(4))
reader = replay.lock(replay.match_prefix([A, B, C, D]))
frames.append(
    picture(replay, "One prompt, A B C D, is one node. A reader has locked it (blue).")
)
replay.insert([A, B, E], range(10, 13))
frames.append(
    picture(
        replay, "A B E parts after A B: the node is cut there. Both halves stay locked."
    )
)
replay.evict(4)
frames.append(
    picture(replay, "Four tokens are to go. Only E is an unlocked leaf: one goes.")
)
replay.unlock(reader)
frames.append(picture(replay, "The reader has ended: everything is evictable (green)."))
replay.evict(1)
frames.append(
    picture(
        replay, "One token is to go: D, the tail. C needs it as little as A and B do."
    )
)
replay.evict(1)
frames.append(picture(replay, "Then C. Now A B is a leaf."))
Steps(frames)

# %% [markdown]
# And which of two leaves? Three prompts come one after the other; then the first comes again.

# %% name="lru" claims="S12"
cache = RadixCache(page_size=1)
for slot, tokens in enumerate([[A], [B], [C], [A]]):
    cache.insert(tokens, [slot])
print("evicted, one after the other: slots", [cache.evict(1)[0] for _ in range(3)])

# %% [markdown]
# Slot [1](#lru) (`B`) and slot [2](#lru) (`C`) go before slot [0](#lru), which holds `A`: it is
# the oldest, and was used last.
#
# ## Right by comparison
#
# The naive cache from the beginning is the judge. [2,000](#compared) random operations on prompts of up
# to eight pages, which begin alike now and then; the tree must give the same slots as the
# dictionary after each one. (The tests of this book do the same with locks and evictions
# in the mix.)

# %% name="compared"
import random

rng = random.Random(3)
naive, tree = NaiveCache(), RadixCache(PAGE)
for i in range(2_000):
    pages = [rng.choice([0, 0, 0, rng.randrange(9)]) for _ in range(rng.randrange(9))]
    tokens = [page for page in pages for _ in range(PAGE)] + [99] * rng.randrange(PAGE)
    found = tree.match_prefix(tokens)
    assert found.matched_len == naive.match(tokens)
    ends = range(PAGE, found.matched_len + 1, PAGE)
    assert [naive.slots[tuple(tokens[:end])] for end in ends] == list(
        found.kv_indices.first_slots
    )
    if i % 2:
        slots = range(1000 * i, 1000 * i + len(tokens))
        naive.insert(tokens, list(slots))
        tree.insert(tokens, slots)
tree.check()
num_nodes = len(list(tree.nodes()))
print(f"2,000 answers equal; {len(tree.pages())} pages in {num_nodes} nodes")

# %% [markdown]
# Your turn: what must the second prompt be, so that the tree has a single node?

# %% tags=["live"]
from minivllm.radix import RadixCache

tree = RadixCache(page_size=1)
tree.insert([1, 2, 3, 4], range(4))
tree.insert([1, 2, 9], range(10, 13))  # change me
for node in tree.nodes():
    print(len(node.first_slots), "tokens in slots", list(node.first_slots))

# %% [markdown]
# ## What still goes wrong
#
# The tree knows which slots hold which prefix. It does not know which slots are *free*,
# it cannot say whose the others are, and it believes whoever inserts that the K/V are
# really there. Chapter 4 gives pages an owner and a life.
#
# ## Exercise
#
# At page size 1, insert `A B C D`, then `A B E`. How many nodes does the tree have, roots
# not counted? A leaf is evicted whole when enough tokens are asked for: call `evict` with
# the length of the next victim, again and again. How many calls does it take, counting the
# one that takes `A B` itself?

# %% tags=["solution"]
tree = RadixCache(page_size=1)
tree.insert([A, B, C, D], range(4))
tree.insert([A, B, E], range(10, 13))
num_nodes = len(list(tree.nodes()))
calls = 0
while tree.total_size:
    victim = min((n for n in tree.nodes() if n.evictable), key=lambda n: n.last_access)
    tree.evict(len(victim.first_slots))
    calls += 1
print(num_nodes, "nodes,", calls, "calls")

# %%
assert (num_nodes, calls) == (3, 3)

# %% [markdown]
# `C D` is the leaf used longest ago, then `E`; with both gone `A B` is a leaf, and the third
# call takes it.
