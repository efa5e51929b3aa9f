# %% [markdown]
# # 3. A tree of prefixes: match, insert, evict
#
# Two requests share their first 25 tokens. The second one asks the cache and gets back
# [16](#naive). Nine tokens are computed again although their keys and values lie in memory.
# Before you call that a bug, look at what the cache can hand out: pages of 16 tokens. The
# second page holds nine shared tokens and seven that are not. To use the nine, the second
# request would have to write the other seven into a page that others read. So a page is shared
# whole or not at all.
#
# "Is this prefix cached?" sounds like a question for yes or no. The answer is a *length*,
# and it changes. Further down, the same 64 tokens are sent five times, and the cache gives
# [0, 64, 0, 48 and 0](#strange) of them. Nothing is broken there. Each number can be read off the
# structure that this chapter builds: a tree in which every path from the root is a prefix that
# somebody has computed. SGLang calls it a radix cache. It has three operations, *match*,
# *insert* and *evict*, and two without which these go wrong, *lock* and *unlock*.
#
# ## The version that cannot be wrong
#
# First a plain one, in a dictionary. A *slot* is the place of one token in K/V memory, a
# number. For every computed prefix, page by page, keep where its last page lies:

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


shared = list(range(25))
first, second = shared + [70] * 15, shared + [80] * 15
naive = NaiveCache()
naive.insert(first, list(range(40)))
print(naive.match(second), "of 25 shared tokens")
print(f"{sum(range(PAGE, 32_001, PAGE)):,} tokens stored for a prompt of 32,000")

# %% [markdown]
# It is right, and it stores all earlier tokens again with every page:
# [32,016,000](#naive) for one long prompt. Shared tokens should be stored once. That is a
# tree. And most pages have exactly one successor, so a run of pages without a fork can be
# *one* node. That makes it a radix tree.
#
# ## A node is a run of pages
#
# The slots of a page follow each other. So a node remembers one number for each page, its
# place, and expands the rest when somebody asks: a match of 32,000 tokens is 2,000 numbers.
# What a place counts is for the owner of the slots to say. Whoever hands out single slots
# counts in slots, and a place is the first slot of the page: `unit` is 1. The engine hands out
# whole pages, `slot = page * page_size + offset`, and counts in pages: a place is then a page
# number, `unit` is the page size, and nothing is ever multiplied or divided on the way.

# %% export="radix.py"
"""A compressed tree of token prefixes and the slots that hold their K/V.

Every path from a root is a prefix that was computed. Edges are whole pages; a run of
pages without a fork is one node. After SGLang's radix cache, with exact tail-first
eviction, a match that never splits, and eviction that never walks the tree.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload


class Slots(Sequence[int]):
    """The slots of some pages, one for each token, expanded when asked for.

    `places` has one int for each page; its first slot is place * unit.
    """

    __slots__ = ("page_size", "places", "unit")

    def __init__(self, places: "array[int]", page_size: int, unit: int = 1) -> None:
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


# %% [markdown]
# The key of a node is the bytes of its tokens, four for each. Comparing two runs of 2,048
# tokens is then one comparison in C, not 2,048 comparisons of Python objects. Children are
# found by their first page, in a dictionary. Two children of one node always differ there; if
# not, that page would be shared, and stand above them.


# %% export="radix.py"
from dataclasses import dataclass, field

from minivllm.request import ExtraKey


@dataclass(eq=False, slots=True)
class Node:
    """A run of pages without a fork.

    `key` holds 4 bytes for each token, `places` one int for each page. `locks`
    counts the handles that end here and the children that are locked. A use is noted
    where it ends: a leaf's `last_access` and `num_hits` go to its parent when it goes.
    """

    key: bytes
    places: "array[int]"
    parent: "Node | None" = None
    last_access: int = 0
    created: int = 0
    children: dict[bytes, "Node"] = field(default_factory=dict)
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


# %% [markdown]
# The fields after `parent`, all but `children`, belong to locks and eviction; skip them for
# now.
#
# ## Match: a question changes nothing
#
# A lookup returns a small object that cannot be changed. Only such an object can be locked
# later, so nobody can lock what was never matched. It remembers where in the tree the match
# ended, and how often the tree had changed by then: whoever locks it at once need not walk
# again.


# %% export="radix.py"
from typing import NamedTuple

from minivllm.request import TokenIds

End = tuple[Node, int]  # a place in the tree: so many bytes into this node's key


class Match(NamedTuple):
    """What was found: `matched_len` tokens, in whole pages, and their slots."""

    matched_len: int
    kv_indices: Slots
    token_ids: "array[int]"
    extra_key: ExtraKey = None
    end: End | None = None
    num_changes: int = -1  # how often the tree had changed when this was found

    def __repr__(self) -> str:
        return f"Match({self.matched_len}, {self.kv_indices})"


# %% [markdown]
# The cache itself is a table of roots, one for each `extra_key`, and some counters.


# %% export="radix.py"
from collections.abc import Callable

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


# %% [markdown]
# The class grows through the chapter, reopened as in chapter 1, and the exporter joins the parts
# into one class in `radix.py`. (An object knows what its class knew when it was
# made, so we make new caches as we go.)
#
# The constructor's last line names a queue of leaves that can be evicted. We build it when we
# know what it has to do. Until then a list serves, searched from end to end:


# %%
class ListQueue:
    """Unused leaves; the next victim is found by looking at every one of them."""

    def __init__(self, priority):
        self.priority, self.nodes = priority, []

    def push(self, node):
        if node.evictable and not node.queued:
            node.queued = True
            self.nodes.append(node)

    def pop(self):
        free = [node for node in self.nodes if node.evictable]
        if not free:
            return None
        victim = min(free, key=self.priority)
        self.nodes.remove(victim)
        victim.queued = False
        return victim


EvictionQueue = ListQueue  # for the time being

# %% [markdown]
# Matching walks down from the root as long as whole pages agree, collects the slots of the
# pages that it passes, and says where it left the tree. That may be in the middle of a node.
# Tokens become bytes one run at a time, just before they are compared: a prompt of 32,768
# tokens would be 128 KiB, copied even where its first page is unknown.


# %% export="radix.py"
from minivllm.request import encode_ids


class RadixCache(RadixCache):
    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find the longest cached prefix, in whole pages. Changes nothing."""
        ids, root = encode_ids(token_ids), self._roots.get(extra_key)
        end, places = (None, array("i")) if root is None else self._walk(root, ids)
        slots = Slots(places, self.page_size, self._unit)
        return Match(len(slots), slots, ids, extra_key, end, self._num_changes)

    def _walk(self, node: Node, ids: "array[int]") -> "tuple[End, array[int]]":
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


# %% [markdown]
# Nearly always the tokens repeat a node to its end, and one comparison tells. Otherwise the last
# page that agrees is found by halving: for a node of 128 pages, seven comparisons.


# %% export="radix.py"
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


# %% [markdown]
# ## Insert: what is missing becomes a leaf
#
# Inserting begins with the same walk. What is left over hangs below its end. The public
# method checks what it is given: the slots of one page must follow each other.


# %% export="radix.py"
from minivllm.request import check_extra_key


def places_of(
    slots: Sequence[int], num_pages: int, page_size: int, unit: int
) -> "array[int]":
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
        places = places_of(kv_indices, num_pages, self.page_size, self._unit)
        if not num_pages:
            return 0
        ids = encode_ids(token_ids)
        self._clock += 1
        end, known = self._enter(self._root(extra_key), ids, places)
        end.num_hits += 1
        self._settle(end)
        return len(known) * self.page_size


# %% [markdown]
# The work is one level below, because the engine will come in by another door: it wants to
# go on below a prefix that it holds already, and to know *where the pages lie now*. Chapter 4
# needs that answer to free duplicates. (`num_own_locks` belongs to a leaf that grows; skip it
# for now.)


# %% export="radix.py"
class RadixCache(RadixCache):
    def _enter(
        self,
        node: Node,
        ids: "array[int]",
        places: "array[int]",
        num_own_locks: int = 0,
    ) -> "tuple[Node, array[int]]":
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


# %% [markdown]
# A new leaf may be the next to be evicted, so the queue hears of it. And we want to visit the
# nodes, without recursion: Python gives up at a depth of a thousand calls, and a conversation
# does not.


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# What is missing becomes a leaf. A first version:


# %%
class RadixCache(RadixCache):
    def _add(self, parent, key, places, num_own_locks):
        now = self._clock
        leaf = Node(key, places, parent, now, now)
        parent.children[key[: self._step]] = leaf
        self._num_changes += 1
        self.total_size += len(key) // 4
        return leaf


# %% [markdown]
# The two prompts from the beginning:

# %% name="found" claims="S07"
cache = RadixCache(page_size=16)
cache.insert(first, range(40))
found, nodes = cache.match_prefix(second), list(cache.nodes())
slots = found.kv_indices
print(found.matched_len, "of 25 shared tokens, in slots", slots[0], "to", slots[-1])
print(cache.total_size, "of the 40 tokens are cached, in", len(nodes), "node")

# %% [markdown]
# The last 8 of the 40 tokens do not fill a page and are not in the tree at all. How bad is
# the loss at the end of a match? Less than a page, whatever the length:

# %% name="loss" claims="S10"
for num_shared in (20, 25, 1_024, 1_039):
    cache = RadixCache(page_size=16)
    cache.insert(list(range(num_shared)) + [-1] * 16, range(num_shared + 16))
    reused = cache.match_prefix(list(range(num_shared)) + [-2] * 16).matched_len
    lost = num_shared - reused
    print(
        f"{num_shared:5} shared: {reused:5} reused, {lost:2} lost ({lost / num_shared:.1%})"
    )

# %% [markdown]
# Of our 25 tokens [36.0%](#loss) are lost, of 20 it is [20.0%](#loss); of 1,039, whose last page also
# lacks one token, [1.4%](#loss). Short prefixes pay for pages, long ones do not notice.
#
# ## A fork cuts a node in two
#
# From here on the trees are small enough to draw: pages of one token, called A, B, C and so on.
# *Used* is the tick of the clock at the last use; it ticks with each insert and each lock, and a
# match only asks. `A B C D`
# is there, and `A B E` is to be inserted.

# %% tags=["hide-input"]
from minivllm.drawing import Branch, Steps, draw_tree


def words(node: Node) -> str:
    """The tokens of a node, as letters."""
    return " ".join(chr(65 + t) for t in array("i", node.key))


def used(node: Node) -> str:
    return f"used {node.last_access}"


def branch(node: Node, note) -> Branch:
    state = "pinned" if node.locks else "published"
    children = [branch(child, note) for child in node.children.values()]
    return Branch(f"{words(node)} · {note(node)}", state, children)


def picture(cache: RadixCache, caption: str, note=used):
    roots = cache._roots.values()
    top = [branch(child, note) for root in roots for child in root.children.values()]
    return draw_tree(Branch("root", "free", top), caption=caption)


# %% tags=["hide-input"]
A, B, C, D, E, F, G = range(7)
small = RadixCache(page_size=1)
small.insert([A, B, C, D], range(4))
picture(small, "Before: four pages without a fork are one node.")

# %% [markdown]
# The walk ends after `A B`, inside the node. The new leaf needs a node that *ends* there, so
# the run is cut: an upper half that both share, and a lower half with the rest.
#
# Which half is the old object? A running request may have locked it, and that request uses all
# of `A B C D`. So the old object stays where its *end* is, and the new one goes in above it,
# locked if the lower one is: whoever uses that uses everything above it. And the lower half
# keeps its old tick: somebody asked for `A B` now, which says nothing about `C D`. Further down
# each of these three decisions is reversed, and something breaks.


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
        upper = Node(node.key[:num_bytes], node.places[:cut], parent)
        upper.locks, upper.created = int(node.locks > 0), node.created
        parent.children[upper.key[: self._step]] = upper
        node.key, node.places = node.key[num_bytes:], node.places[cut:]
        node.parent = upper
        upper.children[node.key[: self._step]] = node
        return upper


# %% name="split" tags=["hide-input"]
small = RadixCache(page_size=1)
small.insert([A, B, C, D], range(4))
small.insert([A, B, E], [10, 11, 12])
picture(
    small,
    "After: the run is cut where the two sequences part. The lower half keeps its old tick; "
    "the upper half was used by the second insert.",
)

# %% [markdown]
# The second prompt came with two slots of its own for `A B`, and the tree kept those it had. The
# caller must give the two back without pointing at freed memory: chapter 4.
#
# An erratum belongs here. A published description of this operation cuts `A B C D` into `A B` and
# `C D`, and hangs a new branch that begins with `C` beside `C D`. Try to make that tree:

# %% name="fork" claims="S08"
for page_size in (1, 2, 4):
    tree = RadixCache(page_size)
    tree.insert([A, B, C, D], range(4))
    tree.insert([A, B, C, E], range(10, 14))
    print("pages of", page_size, "·", " / ".join(words(node) for node in tree.nodes()))

# %% [markdown]
# With pages of one token the cut comes after `A B C`. Two branches that both begin with `C` share
# `C`, so it belongs above them: children of one node differ in their first page. With pages
# of two tokens `C D` and `C E` do stand side by side, since those *pages* differ. With pages of
# four nothing is shared.
#
# Why should a *match* that ends inside a node not cut it, too? A scheduler asks for requests
# that it will not admit in this step, nor in the next. Here are 39 such questions, put to our
# cache and to one that cuts at once, for the lock that may follow:


# %% name="curious" claims="S07"
class CuriousCache(RadixCache):
    """Cuts the node in which a lookup ends."""

    def match_prefix(self, token_ids, extra_key=None):
        match = super().match_prefix(token_ids, extra_key)
        if match.end:
            self._node_at(match.end)
        return match


for kind in (RadixCache, CuriousCache):
    cache = kind(page_size=16)
    cache.insert(range(640), range(640))
    lengths = [cache.match_prefix(range(n)).matched_len for n in range(25, 640, 16)]
    print(
        f"{kind.__name__:12} found {lengths[:3]} ..., nodes: {len(list(cache.nodes()))}"
    )

# %% [markdown]
# The answers are the same. The curious cache now has [40](#curious) nodes where it had one. Every
# later walk goes through them, and nobody has used anything.
#
# Your turn: what must the second prompt be, so that the tree has a single node? And so that it
# has two?

# %% tags=["live"]
from minivllm import radix

tree = radix.RadixCache(page_size=1)
tree.insert([1, 2, 3, 4], range(4))
tree.insert([1, 2, 9], range(10, 13))  # change me
for node in tree.nodes():
    print(len(node.places), "tokens in slots", list(node.places))


# %% [markdown]
# ## A leaf that grows
#
# A request decodes. Each time it has filled a page, the page goes into the tree:

# %% name="chain"
decoding = RadixCache(page_size=1)
for n in range(2, 7):
    decoding.insert(range(n), range(n))
print(len(list(decoding.nodes())), "nodes for", decoding.total_size, "pages")
picture(decoding, "A prompt A B and four pages decoded after it: a chain.")

# %% [markdown]
# Every later walk would go through all of them, link by link, and nothing forks here. So if the
# node above is a leaf, it may grow instead. Two things could speak against it. Another request
# holds a lock that ends there, and that lock must not come to cover more. (The lock of the
# request that is growing does not count, if it ends there too: `num_own_locks`.) Or the
# policy ranks the two differently (`fifo`: by age). Then some other leaf may have to go after the
# new pages and before the old ones, and one node cannot have two ranks.


# %% export="radix.py"
class RadixCache(RadixCache):
    def _add(
        self, parent: Node, key: bytes, places: "array[int]", num_own_locks: int
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


# %% name="grown"
grown = RadixCache(page_size=1)
for n in range(2, 7):
    grown.insert(range(n), range(n))
print(len(list(grown.nodes())), "node for", grown.total_size, "pages")

# %% [markdown]
# ## Evict: leaves first, tails first
#
# Memory is full, and some tokens must go. `A B` is the oldest thing in our small tree. Why not
# take that? By force, then:

# %% name="by-force"
(root,) = small._roots.values()
(parent,) = root.children.values()
root.children.clear()
orphans = {words(child): list(child.places) for child in parent.children.values()}
print("found of A B C D:", small.match_prefix([A, B, C, D]).matched_len, "tokens")
print("still in memory:", orphans)

# %% [markdown]
# The walk begins at the root, so nobody finds `C D` any more, and nobody frees its slots. Nor
# would finding them help: a new token attends to *all* tokens before it ([chapter
# 1](01_kv_cache.md)), and the K/V of `A` and `B` are gone. A page is worth something as long as
# all pages before it are there. So only a *leaf* may go, one that no request has locked. Its
# parent may follow when it is a leaf itself. Within a leaf the same holds: if one page is asked
# for and the leaf has a hundred, the last one goes.
#
# Which leaf? The default policy is `lru`: the least recently used one. `lfu` takes the one
# used least often, `fifo` the oldest; they are the three lines of the table `EVICTION`.
#
# Using a prefix uses every node on its path. Writing that down costs a walk back to the root for
# each use, and nobody looks at an inner node's notes. So a use is noted at its end only. Below, three questions have used a system prompt `A`, and a question `F` was
# asked twice. What does the tree know about `A`?


# %% tags=["hide-input"]
def hits(node: Node) -> str:
    return f"{node.num_hits} hits"


def three_questions(kind, eviction: str = "lfu"):
    cache = kind(page_size=1, eviction=eviction)
    for slot, tokens in enumerate([[A, B], [A, C], [A, D], [F], [F]]):
        cache.insert(tokens, range(10 * slot, 10 * slot + len(tokens)))
    return cache


picture(
    three_questions(RadixCache),
    "Uses are noted where they end. A has none of its own, yet three requests used it.",
    hits,
)

# %% [markdown]
# Nothing yet. It will when it must: a leaf that goes leaves its hits to its parent, and its
# time, if that is the later one. Once `A` is a leaf it has what all those walks would have
# written. See the end of `_trim`:


# %% export="radix.py"
from operator import index


class RadixCache(RadixCache):
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


# %% [markdown]
# Watch the ticks. `A B C D` came first, then `A B E`, then `F`, then `A B E` again:

# %% name="eviction-order" tags=["hide-input"]
cache, frames, gone = RadixCache(page_size=1), [], []
for tokens, slots in [
    ([A, B, C, D], range(4)),
    ([A, B, E], range(10, 13)),
    ([F], [20]),
    ([A, B, E], range(10, 13)),
]:
    cache.insert(tokens, slots)
says = [
    "Six pages, three leaves. C D has the oldest tick.",
    "One page is asked for: D, the tail of that leaf, and no more.",
    "Then C. The parent still has a child, E.",
    "Then F, used at 3. A B says 2, but it is no leaf.",
    "E is gone and has left its tick, 4, to A B, which is a leaf now.",
    "B, the tail of what is left. Then A.",
]
for caption in says:
    frames.append(picture(cache, caption))
    gone += cache.evict(1)
Steps(frames)

# %% name="lru" claims="S12"
print("slots in the order of their eviction:", gone)

# %% [markdown]
# Slots [3, 2](#lru) are `D` and `C`, [20](#lru) is `F`, [12](#lru) is `E`; then the parent goes,
# from its end, [1, 0](#lru). Never a page before the pages that need it.
#
# What if nobody inherits?


# %% name="inherit"
class HeirlessCache(RadixCache):
    """A leaf takes its notes with it."""

    def _trim(self, leaf, num_pages):
        parent, before = leaf.parent, leaf.parent.num_hits
        super()._trim(leaf, num_pages)
        parent.num_hits = before


for kind in (RadixCache, HeirlessCache):
    cache = three_questions(kind)
    print(f"{kind.__name__:13} lfu evicts slots", [cache.evict(1)[0] for _ in range(5)])

# %% [markdown]
# Slot [0](#inherit) is the system prompt that served three requests, slot [30](#inherit) a question
# that was asked twice. Without an inheritance the prompt goes first. (Under `lru` the same
# happens as soon as locks keep an older leaf from going.)
#
# The split took care that the lower half kept its old time. Suppose it does not:


# %% name="refreshed"
class RefreshingCache(RadixCache):
    """The lower half gets the new time as well."""

    def _split(self, node, num_bytes):
        node.last_access = self._clock
        return super()._split(node, num_bytes)


for kind in (RadixCache, RefreshingCache):
    cache = kind(page_size=1)
    cache.insert([A, B, C, D], range(4))
    cache.insert([F], [20])
    cache.insert([A, B, E], range(10, 13))
    print(f"{kind.__name__:16} evicts {cache.evict(1)}")

# %% [markdown]
# Nobody has asked for `C D` since the first prompt. The refreshing cache counts it as used by
# `A B E`, and gives up `F` ([20](#refreshed)), which came later.
#
# ### Three policies, three losers
#
# Which policy is best? A replay tells: match, insert, and evict what exceeds the capacity. The
# prompts are one page, the room is three. Each letter is a prompt.


# %% name="policies"
def replay(prompts, capacity: int, page_size: int = 1, eviction: str = "lru"):
    """Serve prompts one after the other; (reused, in memory) after each, in tokens."""
    cache = RadixCache(page_size, eviction)
    for tokens in prompts:
        reused = cache.match_prefix(tokens).matched_len
        cache.insert(tokens, range(len(tokens)))
        cache.evict(cache.total_size - capacity)
        yield reused, cache.total_size


workloads = {
    "a scan": "AAABCDABCDA",
    "a new subject": "AAAABBBBCDECDECDE",
    "a favourite": "ABACADAEAFAG",
}
print(f"{'hits':14}", *(f"{name:>5}" for name in EVICTION))
for name, letters in workloads.items():
    prompts = [[ord(letter) - 65] for letter in letters]
    counts = [
        sum(reused for reused, _ in replay(prompts, 3, eviction=policy))
        for policy in EVICTION
    ]
    print(f"{name:14}", *(f"{count:5}" for count in counts))

# %% [markdown]
# Each of them loses somewhere. A scan washes `A` out under `lru` and `fifo`. `lfu` keeps it, and
# for the same reason keeps `A` and `B` when nobody asks for them any more: [6](#policies) hits,
# not [12](#policies). `fifo` notes no uses, and throws a favourite out because it is old.
#
# ### A queue that does not search
#
# The list looks at every leaf to find one victim. How often does it compare?


# %%
import random


class Tick(int):
    """A time that counts how often it is compared."""

    comparisons = 0
    __hash__ = int.__hash__

    def __lt__(self, other):
        Tick.comparisons += 1
        return int(self) < int(other)

    def __eq__(self, other):
        Tick.comparisons += 1
        return int(self) == int(other)


def comparisons_per_page(queue, num_leaves: int, used_again: int = 0) -> float:
    """Evict all of `num_leaves` leaves, some of which were used again."""
    cache = RadixCache(page_size=1)
    cache._leaves = queue(lambda node: Tick(node.last_access))
    again = random.Random(3).sample(range(num_leaves), used_again)
    for i in [*range(num_leaves), *again]:
        cache.insert([i], [i])
    Tick.comparisons = 0
    assert len(cache.evict(num_leaves)) == num_leaves
    return Tick.comparisons / num_leaves


# %% name="list-looks"
for num_leaves in (100, 400, 1_600):
    print(
        num_leaves, "leaves:", comparisons_per_page(ListQueue, num_leaves), "per page"
    )

# %% [markdown]
# Four times the leaves, four times the work for each page. And an engine that is short of memory
# evicts in every step.
#
# Most leaves come in the order in which they will go, the newest last. So they stand in a
# *line*, and the victim is its head. A leaf with an older time (a parent that inherited, a
# leaf just unlocked) would have to push in; it goes to a *heap* beside the line, and the smaller
# of the two heads is next. Times change while an entry waits, but they only grow, so an entry
# may stand too early and never too late. One that comes out too early is put back with its
# present time. One whose node is no longer an unused leaf is dropped; the node is entered again
# when it becomes one.


# %% export="radix.py"
from collections import deque
from heapq import heappop, heappush

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


# %% name="queue-looks"
print(f"{'leaves':>6}  in order  all used again")
for num_leaves in (100, 400, 1_600, 6_400):
    rest = (comparisons_per_page(EvictionQueue, num_leaves, n) for n in (0, num_leaves))
    print(f"{num_leaves:6}", *(f"{looks:9.1f}" for looks in rest))

# %% [markdown]
# In order, [one](#queue-looks) comparison finds each victim, however many leaves there are. If all
# leaves are used again, in a shuffled order, every entry comes out of the line too early once,
# and most move to the heap. Then four times the leaves cost about four comparisons more: a
# logarithm. (The first victim alone may cost a walk along the line; these are means.) Does it take the victims that the list would take?

# %% name="same-victims"
orders = []
for queue in (ListQueue, EvictionQueue):
    rng, cache, gone = random.Random(5), RadixCache(page_size=1), []
    cache._leaves = queue(cache._priority)
    for i in range(2_000):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        cache.insert(tokens, range(10 * i, 10 * i + len(tokens)))
        gone += cache.evict(rng.randrange(4))
    orders.append(gone)
print(f"{len(gone):,} evictions, in the same order: {orders[0] == orders[1]}")

# %% [markdown]
# ## Lock: what is promised stays
#
# Between the moment when a request is told "16 tokens match" and the moment when its
# forward pass reads them, another request may need memory.

# %% name="promised"
cache = RadixCache(page_size=16)
cache.insert(first, range(40))
promised = cache.match_prefix(second)
evicted = cache.evict(32)
taken = set(promised.kv_indices) & set(evicted)
print(len(promised.kv_indices), "slots promised,", len(taken), "of them given away")

# %% [markdown]
# Nothing fails here. The reader finds a stranger's keys and values in its slots, and answers
# fluently. So it *locks* what it matched, before anything else can happen, and unlocks it when it
# ends. The lock protects the matched tokens and no more: if the match ended inside a node, it is
# the lock that cuts it. To lock the whole node, "to be on the safe side", would pin pages that
# nobody reads, and a pool full of those looks like a memory leak.
#
# The handle that comes back is the only way to unlock, and it works once. Whoever locks too
# late is told so.


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


# %% [markdown]
# A locked leaf needs everything above it, so a lock must show on the whole path up to the root.
# The path may be long. Here is one of 64 nodes, and eight requests that lock its end:

# %% name="deep-locks"
deep = RadixCache(
    page_size=1, eviction="fifo"
)  # its leaves do not grow: they are told apart
for n in range(1, 65):
    deep.insert(range(n), range(n))
print(8 * len(list(deep.nodes())), "counts to write, and to take back later")

# %% [markdown]
# After the first request the path is safe. The second need only add that it ends here as well.
# So a node counts the handles that end at it, and those of its *children* that are locked. A
# node that was locked before counts on its parent already, and the way up stops there.


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


# %% name="few-counts"
deep = RadixCache(page_size=1, eviction="fifo")
for n in range(1, 65):
    deep.insert(range(n), range(n))
match = deep.match_prefix(range(64))
handles = [deep.lock(match) for _ in range(8)]
print(sum(node.locks for node in deep.nodes()), "counts written for 8 locks")
for handle in handles:
    deep.unlock(handle)
print(deep.protected_size, "tokens protected afterwards")

# %% tags=["hide-input"]
cache = RadixCache(page_size=1)
for tokens in ([A, B, C], [A, B, D], [A, E]):
    cache.insert(tokens, range(len(tokens)))
for tokens in ([A, B, C], [A, B, C], [A, B, D], [A, B]):
    cache.lock(cache.match_prefix(tokens))
picture(
    cache,
    "Four readers: two of A B C, one of A B D, one of A B. B counts the one that ends there "
    "and two locked children; A counts its one locked child.",
    lambda node: f"locks {node.locks}",
)

# %% [markdown]
# Now the promise again, once with a lock in time and once with a lock too late:

# %% name="kept" claims="S11"
cache = RadixCache(page_size=16)
cache.insert(first, range(40))
promised, whole = cache.match_prefix(second), cache.match_prefix(first)
handle = cache.lock(promised)
gone, kept = cache.evict(32), cache.protected_size
print("evicted: slots", gone[0], "to", gone[-1], "· protected:", kept)
try:
    cache.lock(whole)
except StaleMatch as error:
    print("StaleMatch:", error)
cache.unlock(handle)
print("after the unlock:", len(cache.evict(32)), "tokens more")

# %% [markdown]
# ### What a split must not forget
#
# The split made two more decisions: the old object goes below, and the new one is locked with
# it. Here are two caches that decide otherwise. The first does what comes to mind first: shorten
# the node, and hang the rest below it.


# %%
class UpsideDownCache(RadixCache):
    """The old object becomes the upper half."""

    def _split(self, node, num_bytes):
        cut = num_bytes // self._step
        rest = Node(
            node.key[num_bytes:], node.places[cut:], node, children=node.children
        )
        node.key, node.places = node.key[:num_bytes], node.places[:cut]
        node.children = {rest.key[: self._step]: rest}
        self._settle(rest)
        return node


class UnlockedCache(RadixCache):
    """The new upper half is not locked."""

    def _split(self, node, num_bytes):
        upper = super()._split(node, num_bytes)
        upper.locks = 0
        return upper


# %% [markdown]
# A reader holds `A B C D`; then `A B E` comes and cuts the node. Four tokens are to go. The
# reader ends, another one locks `A B`, and everything is to go that can:

# %% name="broken"
for kind in (RadixCache, UpsideDownCache, UnlockedCache):
    cache = kind(page_size=1)
    cache.insert([A, B, C, D], range(4))
    reader = cache.lock(cache.match_prefix([A, B, C, D]))
    cache.insert([A, B, E], range(10, 13))
    during = cache.evict(4)
    cache.unlock(reader)
    cache.lock(cache.match_prefix([A, B]))
    print(f"{kind.__name__:16} evicts {during}, then {cache.evict(9)}")

# %% [markdown]
# While the first reader works, the upside-down cache gives slots [3 and 2](#broken) away: the
# handle stayed with the object, and the object no longer ends where the reader does. The unlocked
# cache looks right for as long as that reader is there. But its unlock takes a count from the
# upper half that nobody had written, the second reader's lock brings it back to zero, and slots
# [1 and 0](#broken) go while they are being read. By then the split that did it is long past.
#
# The right one, a step at a time:

# %% name="evicted" tags=["hide-input"]
replayed, frames = RadixCache(page_size=1), []


def show(caption: str) -> None:
    frames.append(picture(replayed, caption))


replayed.insert([A, B, C, D], range(4))
reader = replayed.lock(replayed.match_prefix([A, B, C, D]))
show("One prompt, A B C D, is one node. A reader has locked it (blue).")
replayed.insert([A, B, E], range(10, 13))
show("A B E parts after A B: the node is cut there. Both halves stay locked.")
replayed.evict(4)
show("Four tokens are to go. Only E is an unlocked leaf: one goes.")
replayed.unlock(reader)
show("The reader has ended: everything is evictable (green).")
replayed.evict(1)
show("One token is to go: D, the tail. C needs it as little as A and B do.")
replayed.evict(1)
show("Then C. Now A B is a leaf.")
Steps(frames)

# %% [markdown]
# ### Going on below a lock
#
# A running request holds a lock and goes on computing. Each time one of its pages is complete
# it could insert its whole sequence again, from the root. For a request that grows to 2,000
# pages:


# %% name="from-the-root"
class CountsWalks:
    """Counts the pages that are handed to the walk."""

    pages_walked = 0

    def _walk(self, node, ids):
        self.pages_walked += len(ids) // self.page_size
        return super()._walk(node, ids)


class FromTheRoot(CountsWalks, RadixCache): ...


cache = FromTheRoot(page_size=1)
for n in range(1, 2_001):
    cache.insert(range(n), range(n))
print(f"{cache.pages_walked:,} pages walked to enter {cache.total_size:,}")

# %% [markdown]
# It has a better place to begin: the end of its lock. `extend` enters pages below it and moves
# the lock down. The second method answers a question that comes up when memory is short:
# evictable tokens that a request is about to lock cannot be evicted to make room for it.


# %% export="radix.py"
class RadixCache(RadixCache):
    def extend(
        self, handle: Handle, token_ids: TokenIds, places: "array[int]"
    ) -> "tuple[int, array[int]]":
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


# %% name="below-the-lock"
class BelowTheLock(CountsWalks, RadixCache): ...


cache = BelowTheLock(page_size=1)
handle = cache.lock(cache.match_prefix([]))
for n in range(2_000):
    cache.extend(handle, [n], array("i", [n]))
print(f"{cache.pages_walked:,} pages walked to enter {cache.total_size:,}")

# %% [markdown]
# One page of work for a page. (The lock of an empty match is a lock on the root, whose key is
# empty: it protects nothing.)
#
# ## Equal tokens that must not share
#
# Two tenants send the same tokens and must not learn from each other's timing. The `extra_key`
# picks the root, and no path leads from one to the other:

# %% name="tenants"
cache = RadixCache(page_size=16)
for tenant in ("red", "blue"):
    cache.insert(first, range(40), extra_key=tenant)
for tenant in ("red", "blue", None):
    print(tenant, cache.match_prefix(second, extra_key=tenant).matched_len)
print(cache.total_size, "tokens held")

# %% [markdown]
# The price: the same two pages are held twice.
#
# ## Right by comparison
#
# What must always hold is one method, which tests call after every operation:


# %% export="radix.py"
class RadixCache(RadixCache):
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


# %% [markdown]
# The naive cache from the beginning is the judge. After each of [2,000](#compared) random
# operations on prompts that begin alike now and then, the tree must give the same slots as the
# dictionary. (The book's tests do the same with locks and evictions in the mix.)

# %% name="compared"
rng = random.Random(3)
naive, tree = NaiveCache(), RadixCache(PAGE)
for i in range(2_000):
    pages = [rng.choice([0, 0, 0, rng.randrange(9)]) for _ in range(rng.randrange(9))]
    tokens = [page for page in pages for _ in range(PAGE)] + [99] * rng.randrange(PAGE)
    found = tree.match_prefix(tokens)
    assert found.matched_len == naive.match(tokens)
    ends = range(PAGE, found.matched_len + 1, PAGE)
    assert [naive.slots[tuple(tokens[:end])] for end in ends] == list(
        found.kv_indices.places
    )
    if i % 2:
        slots = range(1000 * i, 1000 * i + len(tokens))
        naive.insert(tokens, list(slots))
        tree.insert(tokens, slots)
tree.check()
num_nodes = len(list(tree.nodes()))
print(f"2,000 answers equal; {len(tree.places())} pages in {num_nodes} nodes")

# %% [markdown]
# And a path of 5,000 nested prefixes, each a node of its own:

# %% name="nested"
deep = RadixCache(page_size=1, eviction="fifo")
handle = deep.lock(deep.match_prefix([]))
for n in range(5_000):
    deep.extend(handle, [n], array("i", [n]))
depth = len(list(deep.nodes()))
deep.check()
deep.unlock(handle)
num_evicted = len(deep.evict(9_999))
print(f"{depth:,} nodes deep; {num_evicted:,} evicted; {deep.total_size} left")

# %% [markdown]
# ## When memory is full
#
# Now let it be used: 60 conversations of 8 turns, 15 of them going on at a time, one system
# prompt of 128 tokens. Each turn sends everything said so far and some tokens more, drawn from
# a seeded generator.


# %% name="conversations"
def conversations(num: int = 60, turns: int = 8, at_a_time: int = 15):
    """Prompts in the order of their arrival, from conversations that take turns."""
    rng, token = random.Random(13), iter(range(1_000, 10**6))
    system = [*range(128)]
    waiting = [(system, turns)] * num
    going = [waiting.pop() for _ in range(at_a_time)]
    while going:
        history, left = going.pop(rng.randrange(len(going)))
        prompt = history + [next(token) for _ in range(rng.randrange(20, 120))]
        yield prompt
        answer = [next(token) for _ in range(rng.randrange(30, 150))]
        if left > 1:
            going.append((prompt + answer, left - 1))
        elif waiting:
            going.append(waiting.pop())


prompts = list(conversations())
asked = sum(map(len, prompts))
unbounded = list(replay(prompts, 10**9, PAGE))
held, best = unbounded[-1][1], sum(reused for reused, _ in unbounded) / asked
print(f"{len(prompts)} prompts, {asked:,} tokens; kept for ever: {held:,} tokens")
print(f"reused with unbounded memory: {best:.0%}")

# %% [markdown]
# The same prompts again, with less memory:

# %% name="hit-ratio" claims="S13"
ratios = {}
for capacity in (2_048, 4_096, 6_144, 8_192, 12_288, 16_384, 24_576):
    run = list(replay(prompts, capacity, PAGE))
    ratios[capacity] = sum(reused for reused, _ in run) / asked
    usage = run[-1][1] / capacity
    print(f"{capacity:6,} tokens: usage {usage:4.0%}, reused {ratios[capacity]:3.0%}")
for policy in ("fifo", "lfu"):
    run = replay(prompts, 8_192, PAGE, policy)
    print(f"with {policy} and 8,192: {sum(reused for reused, _ in run) / asked:3.0%}")

# %% tags=["hide-input"]
from minivllm.drawing import Picture


def curves(lines, marks, caption: str) -> Picture:
    """Lines of (x, y) from 0 to 1, the n-th dashed by n; marks are words on the x axis."""
    plot, left, wide, low, high = Picture(caption), 40, 500, 210, 200
    for y in (0, 0.5, 1):
        plot.text(left - 6, low - high * y + 4, f"{y:.0%}", "end")
        plot.line(left, low - high * y, left + wide, low - high * y)
    for x, mark in marks:
        plot.text(left + wide * x, low + 20, mark)
    for dash, (label, points) in zip(("0", "7 4", "2 3"), lines.items(), strict=False):
        path = " ".join(
            f"{left + wide * x:.1f},{low - high * y:.1f}" for x, y in points
        )
        plot.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="currentColor" '
            f'stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        plot.text(
            left + wide + 6, low - high * points[-1][1] + 4, f"{label}   ", "start"
        )
    return plot


most = max(ratios)
curves(
    {
        "usage": [(c / most, 1) for c in ratios],
        "reused": [(c / most, ratio) for c, ratio in ratios.items()],
    },
    [(c / most, f"{c:,}") for c in (2_048, 8_192, 16_384, 24_576)],
    "Over the capacity of memory in tokens: usage (solid) is 100% everywhere. The share of prompt "
    "tokens that is reused (dashed) rises until the conversations that go on fit.",
)

# %% [markdown]
# Memory is full in every row, and the share goes from [32%](#hit-ratio) to [79%](#hit-ratio). So
# a usage of 100% by itself says nothing: at 16,384 tokens memory is as full as at 2,048, and
# the share is that of unbounded memory. The conversations that go on all fit, and the rest is
# filled with those that have ended. Below that size the two compete. (`fifo` does as well as
# `lru` here: each turn makes a new leaf, so the oldest leaf *is* the one used longest ago.
# `lfu` adds up the turns of a conversation when its leaves go, and keeps those that are over.)
#
# The same thing over time, with room for 4,096 tokens:

# %% name="over-time" tags=["hide-input"]
small_memory = list(replay(prompts, 4_096, PAGE))


def windows(run, size: int = 40):
    """The share of tokens reused in every `size` prompts."""
    for start in range(0, len(prompts), size):
        end = start + size
        part = sum(reused for reused, _ in run[start:end])
        yield end / len(prompts), part / sum(map(len, prompts[start:end]))


usage = [(i / len(prompts), held / 4_096) for i, (_, held) in enumerate(small_memory)]
curves(
    {
        "usage": usage[::8],
        "unbounded": list(windows(unbounded)),
        "4,096": list(windows(small_memory)),
    },
    [(n / 480, f"{n}") for n in (0, 120, 240, 360, 480)],
    "Prompt by prompt, with a capacity of 4,096 tokens: memory in use (solid), the share "
    "reused with unbounded memory (dashed) and with this one (dotted).",
)

# %% [markdown]
# In the first window of 40 prompts little is lost yet. Then memory is full, and in the next window
# the share is less than half of what unbounded memory gives, though nothing about the requests
# has changed. From now on
# each page that comes in pushes one out, and `lru` picks the conversation that has been silent
# longest. If its user is typing, that is the wrong one.
#
# Would a better policy help? Take the worst case, five prompts in turn and room for four, and
# beside `lru` a judge who knows the future.


# %% name="cycle"
def clairvoyant(prompts, capacity: int) -> int:
    """How many hits if the one that is needed last always goes."""
    held, num_hits = set(), 0
    for now, prompt in enumerate(prompts):
        num_hits += prompt in held
        held.add(prompt)
        if len(held) > capacity:
            later = [*prompts[now + 1 :], *sorted(held)]
            held.remove(max(held, key=later.index))
    return num_hits


cycle = [A, B, C, D, E] * 10
for capacity in (4, 5):
    lru = sum(reused for reused, _ in replay([[t] for t in cycle], capacity))
    best = clairvoyant(cycle, capacity)
    print(f"room for {capacity}: lru {lru} hits, clairvoyant {best}")

# %% [markdown]
# `lru` gets [0](#cycle) hits of 50, the judge [36](#cycle). Whenever `A` comes, it is `A` that has
# just been thrown out, for it was the one not used for longest. One page more, and both get
# [45](#cycle): a cliff, not a slope. `lru` bets that what was used last comes back first. In a
# cycle that bet is always wrong, and no note on a node can tell, for it is a note about the
# past.
#
# ## Look at the tree first
#
# Back to the 64 tokens of the beginning: four pages, which we call `R U L E`, in a memory
# of eight. Five requests carry them:


# %% name="strange" claims="S14"
memory = RadixCache(page_size=16)


def pages(text: str) -> list[int]:
    """A page of 16 equal tokens for each letter."""
    return [ord(letter) for letter in text for _ in range(16)]


def ask(text: str, extra_key: str | None = None) -> int:
    tokens = pages(text)
    reused = memory.match_prefix(tokens, extra_key).matched_len
    memory.insert(tokens, range(len(tokens)), extra_key)
    memory.evict(memory.total_size - 8 * 16)
    return reused


requests = [("RULEa",), ("RULEb",), ("RULEc", "blue"), ("RULEd",), ("8RULEe",)]
print("reused:", [ask(*request) for request in requests])

# %% [markdown]
# They hit now and then. It is tempting to suspect the scheduler, which decides who runs when.
# But it can only use what the tree gives it. So print the tree, after each request:


# %% name="print-the-tree"
def print_tree(cache: RadixCache) -> None:
    for extra_key, root in cache._roots.items():
        nodes = [(child, 1) for child in root.children.values()]
        print(f"  root ({extra_key or 'no key'})")
        while nodes:
            node, depth = nodes.pop()
            letters = "".join(map(chr, array("i", node.key)[::16]))
            print("  " * (depth + 1) + f"{letters} used {node.last_access}")
            nodes += [(child, depth + 1) for child in node.children.values()]


memory = RadixCache(page_size=16)
for request in requests:
    print(*request, "· reused", ask(*request))
    print_tree(memory)

# %% [markdown]
# Every number can be read off one of these trees (each request met the tree printed above it). The
# first request finds nothing, the second all
# of `RULE`. The third says `blue`, whose root does not exist yet. It computes a copy of its
# own, and the memory of eight pages pays for it with `a`, `b` and the tail of `RULE`. So the
# fourth finds `RUL`, [48](#strange) tokens. The fifth has one page, perhaps today's date, in
# front. The root has no child that begins with `8`, and the walk ends before it begins. `RULE`
# lies beside it, whole, and is not asked.
#
# So a hit is not a fact about a prompt. It needs equal ids from the very first token, the same
# key, a path that is still there, and slots that still belong to it. Ask for these, in this
# order, before you ask the scheduler.
#
# ## What still goes wrong
#
# The tree knows which slots hold which prefix. It does not know which slots are *free*,
# it cannot say whose the others are, and it believes whoever inserts that the K/V are
# really there. Chapter 4 gives pages an owner and a life.
#
# ## Exercises
#
# ### Exercise 1
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
    tree.evict(len(victim.places))
    calls += 1
print(num_nodes, "nodes,", calls, "calls")

# %%
assert (num_nodes, calls) == (3, 3)

# %% [markdown]
# `C D` is the leaf used longest ago, then `E`; with both gone `A B` is a leaf, and the third
# call takes it.
#
# ### Exercise 2
#
# At page size 4, the tokens 1 to 8 are cached. A request with the tokens 1, 2, 3, 4, 9 locks
# what it matches; then 1, 2, 3, 4, 9, 10, 11, 12 is inserted. How many tokens are protected, and
# how many can be evicted? How many would be protected if the lock took the whole node that it
# found?

# %% tags=["solution"]
tree = RadixCache(page_size=4)
tree.insert(range(1, 9), range(8))
(node,) = tree.nodes()
whole_node = len(node.places) * 4
tree.lock(tree.match_prefix([1, 2, 3, 4, 9]))
tree.insert([1, 2, 3, 4, 9, 10, 11, 12], range(8, 16))
protected, evictable = tree.protected_size, tree.evictable_size
print(protected, "protected,", evictable, "evictable,", whole_node, "in the whole node")

# %%
assert (protected, evictable, whole_node) == (4, 8, 8)

# %% [markdown]
# The page 5 to 8 and the page 9 to 12 hang side by side below the locked one, and both may go.
#
# ### Exercise 3
#
# On the cycle of five prompts `lru` gets nothing out of room for four. Write a policy, a
# function from a node to a number, the smallest goes first, with which the cycle gets
# as many hits as the clairvoyant. Put it into `ListQueue`: why would `EvictionQueue` not do?


# %% tags=["solution"]
def most_recent_first(node: Node) -> int:
    return -node.last_access


tree, num_hits = RadixCache(page_size=1), 0
tree._leaves = ListQueue(most_recent_first)
for token in cycle:
    num_hits += tree.match_prefix([token]).matched_len
    tree.insert([token], [token])
    tree.evict(tree.total_size - 4)
print(num_hits, "hits")

# %%
assert num_hits == clairvoyant(cycle, 4) > 0

# %% [markdown]
# Four of the five stay for ever, and the fifth goes as soon as it has come. With conversations
# that would be what was said last. And these numbers *shrink* with each use, so an entry in
# `EvictionQueue` could stand too late in the line, where nobody looks.
