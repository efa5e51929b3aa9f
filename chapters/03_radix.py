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

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from operator import index, sub
from typing import NamedTuple, overload

from minivllm.hashing import token_bytes
from minivllm.request import ExtraKey, TokenIds, check_extra_key


class Slots(Sequence[int]):
    """The slots of some pages, one for each token, expanded when asked for."""

    __slots__ = ("first_slots", "page_size")

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
        size = self.page_size
        return chain.from_iterable(range(s, s + size) for s in self.first_slots)

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
    counts the handles that end here and the children that are locked. A use is noted
    where it ends: a leaf's `last_access` and `num_hits` go to its parent when it goes.
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
# Three of these fields are bookkeeping that later sections need; skip them for now.
#
# A lookup returns a small object that cannot be changed. Later, only such an object can be
# locked: nobody can lock, or unlock, what was never matched. It remembers the place in the
# tree where the match ended, and how often the tree had changed until then. Whoever locks
# it at once need not walk again.


# %% export="radix.py"
End = tuple[Node, int]  # a place in the tree: so many bytes into this node's key


class Match(NamedTuple):
    """What was found: `matched_len` tokens, in whole pages, and their slots."""

    matched_len: int
    kv_indices: Slots
    key: bytes
    extra_key: ExtraKey = None
    end: End | None = None
    num_changes: int = -1  # how often the tree had changed when this was found

    def __repr__(self) -> str:
        return f"Match({self.matched_len}, {self.kv_indices})"


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
EVICTION: dict[str, Callable[[Node], int]] = {  # the smallest goes first
    "lru": lambda node: node.last_access,
    "lfu": lambda node: node.num_hits << 64 | node.last_access,
    "fifo": lambda node: node.created,
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
        self._num_changes = 0
        self._priority = EVICTION[eviction]
        self._leaves = EvictionQueue(self._priority)

    @property
    def evictable_size(self) -> int:
        """Tokens that nobody has locked. All of them can be evicted, tails first."""
        return self.total_size - self.protected_size


# %% [markdown]
# The class will grow through the chapter. `class RadixCache(RadixCache):` reopens it: in
# the notebook the new class inherits from the old one and takes its name, and the exporter
# joins the parts to one class in `radix.py`.
#
# The walk collects the slots of the pages that it passes, and says where it left the tree.


# %% export="radix.py"
class RadixCache(RadixCache):
    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find the longest cached prefix, in whole pages. Changes nothing."""
        key, firsts = token_bytes(token_ids), array("i")
        root = self._roots.get(extra_key)
        end = None if root is None else self._walk(root, key, firsts)
        slots = Slots(firsts, self.page_size)
        return Match(len(slots), slots, key, extra_key, end, self._num_changes)

    def _walk(self, node: Node, key: bytes, firsts: "array[int]") -> End:
        """Follow `key` down from the end of a node, to where it leaves the tree.

        Adds the first slots of the pages on the way to `firsts`.
        """
        at, step = 0, self._step
        while child := node.children.get(key[at : at + step]):
            if not key.startswith(child.key, at):
                agree = self._agreement(child.key, key[at:])
                firsts += child.first_slots[: agree // step]
                return child, agree
            firsts += child.first_slots
            node, at = child, at + len(child.key)
        return node, len(node.key)


# %% [markdown]
# Nearly always `key` repeats a node to its end, and one comparison in C tells. Otherwise the
# last page that agrees is found by halving, with whole slices compared each time: for a node
# of 128 pages, seven comparisons.


# %% export="radix.py"
class RadixCache(RadixCache):
    def _agreement(self, edge: bytes, key: bytes) -> int:
        """How many bytes, in whole pages, two runs with equal first pages share."""
        low, high = 1, min(len(edge), len(key)) // self._step
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * self._step
            same = edge[:end] == key[:end]
            low, high = (middle, high) if same else (low, middle - 1)
        return low * self._step


# %% [markdown]
# ## Insert, and the split
#
# Inserting begins with the same walk. What is left over becomes a new leaf. If the walk
# ended inside a node, that node is first cut in two where the sequences part: the upper half
# is shared, the lower half and the new leaf become its children.
#
# The public method checks what it is given. Pages are the unit of memory, so the slots of
# one page must follow each other.


# %% export="radix.py"
def first_slots_of(
    slots: Sequence[int], num_pages: int, page_size: int
) -> "array[int]":
    """The first slot of each page; `ValueError` if a page's are not consecutive."""
    size, end = page_size, num_pages * page_size
    if len(slots) < end:
        raise ValueError(f"{len(slots)} slots for {end} tokens")
    if type(slots) is Slots and slots.page_size == size:
        return array("i", slots.first_slots[:num_pages])
    firsts, lasts = slots[0:end:size], slots[size - 1 : end : size]
    if size > 1 and list(map(sub, lasts, firsts)).count(size - 1) < num_pages:
        raise ValueError("the slots of one page must be consecutive")
    return array("i", list(firsts))


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
        firsts = first_slots_of(kv_indices, num_pages, self.page_size)
        if not num_pages:
            return 0
        key = token_bytes(token_ids)[: num_pages * self._step]
        self._clock += 1
        end, known, _ = self._enter(self._root(extra_key), key, firsts)
        end.num_hits += 1
        self._settle(end)
        return known * self.page_size


# %% [markdown]
# The work is one level below, because the engine will come by another door: it wants to go
# on below a prefix that it holds already, and to know *where the pages lie now*. Chapter 4
# needs the answer to free duplicates.


# %% export="radix.py"
class RadixCache(RadixCache):
    def _enter(
        self, node: Node, key: bytes, first_slots: "array[int]", num_own_locks: int = 0
    ) -> "tuple[Node, int, array[int]]":
        """Add what is missing below a node, and refresh the path.

        Returns the end, how many pages were known, and where all of them lie now.
        """
        slots = array("i")
        end = self._node_at(self._walk(node, key, slots))
        end.last_access = self._clock
        known, size = len(slots), self.total_size
        if known < len(first_slots):
            more, own = first_slots[known:], num_own_locks if end is node else 0
            end = self._add(end, key[known * self._step :], more, own)
            slots += more[: (self.total_size - size) // self.page_size]
        return end, known, slots

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


# %% [markdown]
# What is missing usually becomes a new leaf. There is one case where it should not. A
# request that decodes 128 tokens at page size 16 adds eight pages, one at a time. As eight
# nodes in a row they would be a chain that every later lookup has to walk, link by link. If
# the node above is a leaf, nobody else reads it, and eviction could not tell the two apart,
# the leaf grows instead.


# %% export="radix.py"
class RadixCache(RadixCache):
    def _add(
        self, parent: Node, key: bytes, first_slots: "array[int]", num_own_locks: int
    ) -> Node:
        """Hang pages on a node as a new leaf, or let a leaf grow; returns the end."""
        now = self._clock
        leaf = Node(key, first_slots, parent, last_access=now, created=now)
        self._num_changes += 1
        self.total_size += len(key) // 4
        alone = not parent.children and parent.locks == num_own_locks and parent.key
        if alone and self._priority(parent) == self._priority(leaf):
            parent.key += key
            parent.first_slots += first_slots
            self.protected_size += len(key) // 4 * num_own_locks
            return parent
        parent.children[key[: self._step]] = leaf
        return leaf


# %% [markdown]
# And the split. One detail of the cut decides bugs later. Somebody may hold the old node,
# because a running request has locked it. So the old object stays where its *end* is, as the
# lower half, and the new object goes in above it, locked as well: whoever uses the lower
# half uses everything above it.


# %% export="radix.py"
class RadixCache(RadixCache):
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
        upper = Node(node.key[:num_bytes], node.first_slots[:cut], parent)
        upper.locks, upper.created = int(node.locks > 0), node.created
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
# Using a prefix uses all nodes on its path, so all of them should get the present time.
# Writing it down costs a walk to the root for every use, and nobody looks at the time of an
# inner node before it has become a leaf. So a use is noted at its end only, and a leaf that
# goes leaves its time, if it is the later one, to its parent. The parent has then the time of
# the latest use of anything that ever hung below it, which is what the walk would have
# written.
#
# Two more decisions, both about exactness. A leaf may be a run of a hundred pages while
# one page is asked for: then only its last page goes, for the pages before it make
# sense without it and not the other way round. And when a leaf is gone its parent may
# be a leaf now, and takes its place in the queue.
#
# The queue must not search the tree. It holds one entry for each leaf. Most leaves come in
# the order in which they will go, the newest last, so they stand in a line; one that comes
# with an older time (a parent, a leaf just unlocked) goes to a heap beside it. Times change
# while an entry waits, but they only grow. So an entry that comes out too early is put back
# with its present time, and an entry for a node that is no longer an unlocked leaf is
# dropped: it will be pushed again when it becomes one.


# %% export="radix.py"
Entry = tuple[int, int, Node]  # priority, serial number, leaf


class EvictionQueue:
    """Unused leaves, the next victim first: at most O(log n) for a push or a pop.

    Entries may be stale. Priorities only grow, so an entry's priority is never above
    its node's real one, and `pop` puts right what it finds.
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
            freed += leaf.first_slots[keep:][::-1]
            self._trim(leaf, keep)
        self.total_size -= len(freed) * self.page_size
        return freed

    def _trim(self, leaf: Node, num_pages: int) -> None:
        """Shorten a leaf to its first pages; 0 removes it, and may free its parent."""
        self._num_changes += 1
        if num_pages:
            leaf.key = leaf.key[: num_pages * self._step]
            leaf.first_slots = leaf.first_slots[:num_pages]
            self._leaves.push(leaf)
            return
        parent, leaf.parent = leaf.parent, None
        assert parent is not None
        del parent.children[leaf.key[: self._step]]
        parent.last_access = max(parent.last_access, leaf.last_access)
        parent.num_hits += leaf.num_hits
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """A node is new, or lost a child or a lock: is it free to go, or empty, now?"""
        if isinstance(node, Root) and not node.children and not node.locks:
            self._num_changes += 1
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
# The counting stops early. A node's count is the number of handles that end at it, plus
# the number of its children that are locked. A node that was locked before already counts
# on its parent, so the way up ends there.
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
        key, firsts = match.key[: 4 * match.matched_len], array("i")
        end = self._walk(self._root(match.extra_key), key, firsts)
        if firsts != match.kv_indices.first_slots:
            n = match.matched_len
            raise StaleMatch(f"the {n} tokens of the match were evicted or moved")
        return end

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


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# A running request holds a lock and goes on computing. Each time one of its pages is
# complete it could insert its whole sequence again, from the root. It has a better place to
# begin: the end of its lock. `extend` enters pages below it and moves the lock down. For a
# request of 32,000 tokens that is one page of work instead of 2,000.


# %% export="radix.py"
class RadixCache(RadixCache):
    def extend(
        self, handle: Handle, token_ids: TokenIds, first_slots: "array[int]"
    ) -> "tuple[int, array[int]]":
        """Enter whole pages below a locked prefix; the lock moves to their end.

        `token_ids` are those after the prefix, `first_slots` one slot a page. Returns
        how many of the tokens were known, and the first slots of their pages now.
        """
        node = self._locked(handle)
        self._clock += 1
        key = token_bytes(token_ids)[: len(first_slots) * self._step]
        end, known, slots = self._enter(node, key, first_slots, num_own_locks=1)
        if end is not node:
            self._pin(end)
            self._unpin(node)
            handle.node = end
        return known * self.page_size, slots

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


# %% [markdown]
# The second method answers a question that comes up when memory is short: evictable tokens
# that a request is about to lock are none that can be evicted for it.
#
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
            locked = sum(child.locks > 0 for child in node.children.values())
            assert node.locks >= locked, "a path is locked from its end up"
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
