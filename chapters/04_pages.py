# %% [markdown]
# # 4. Pages
#
# Memory for keys and values is one big array, and it is bought before the first request
# comes. Say we can afford 128 MiB for the model of chapter 1, at 32 bit. How many
# requests with a 493-token prompt and 128 output tokens can be in it at once?

# %% name="fits"
budget_bytes = 128 * 2**20
bytes_per_token = (
    24_576  # 24 layers, 2 K/V heads of 64 numbers, a key and a value, 32 bit
)
context = 8_192  # what such a model may allow

print("tokens that fit:", budget_bytes // bytes_per_token)
print(
    "requests, each given its maximal context:",
    budget_bytes // bytes_per_token // context,
)
print(
    "requests, each given what it uses:",
    budget_bytes // bytes_per_token // (493 + 128 - 1),
)

# %% [markdown]
# Nobody knows how long an answer will be, so the simple allocator reserves the longest
# one, and fits *no* request. If it knew, [eight](#fits) would fit. This is the observation that
# vLLM started from: K/V memory should be handed out like an operating system hands out
# RAM, in small equal pages, when they are needed, wherever they are free. A request then
# holds a *page table*: which page holds tokens 0 to 15, which holds 16 to 31, and so on.

# %%
PAGE = 16
num_pages = budget_bytes // (PAGE * bytes_per_token)
print(
    num_pages,
    "pages,",
    f"{num_pages * PAGE:,} tokens;",
    -(-493 // PAGE),
    "pages for a prompt",
)

# %% [markdown]
# ## A pool
#
# The pool knows one thing: which pages are free. It hands out all pages that are asked
# for, or none: a caller that got half of them would have to remember that it has to give
# them back, and one day it would not. And it refuses to take back a page that is
# not out. A double free does no harm when it happens. It does harm much later, when one
# page has two owners and both write.

# %% export="pages.py"
"""K/V memory in pages: who may write where."""

from collections.abc import Sequence


class OutOfPages(MemoryError):
    """Fewer pages are free than were asked for."""


class PagePool:
    """`num_pages` pages of `page_size` tokens; all of them can be handed out.

    A page is a number. Its slots, one for each token, are `page * page_size + offset`.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens")
        self.num_pages = num_pages
        self.page_size = page_size
        self._returned: list[int] = []  # the last to come back goes out first
        self._num_touched = 0  # pages from here on were never handed out
        self._out: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._returned) + self.num_pages - self._num_touched

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out pages, all or none. Raises `OutOfPages`."""
        if num_pages < 0:
            raise ValueError(f"{num_pages} pages asked for")
        if num_pages > self.num_free:
            raise OutOfPages(f"{num_pages} pages asked for, {self.num_free} free")
        reused = self._returned[max(0, len(self._returned) - num_pages) :][::-1]
        del self._returned[len(self._returned) - len(reused) :]
        fresh = self._num_touched + num_pages - len(reused)
        pages = [*reused, *range(self._num_touched, fresh)]
        self._num_touched = fresh
        self._out.update(pages)
        return pages


# %% [markdown]
# Taking back looks at all pages before it takes the first, so a bad list changes nothing.


# %% export="pages.py"
class PagePool(PagePool):
    def free(self, pages: Sequence[int]) -> None:
        """Take pages back. Raises `ValueError`, and takes none, if one is not out."""
        going = set(pages)
        if not going <= self._out:
            raise ValueError(f"page {min(going - self._out)} is not allocated")
        if len(going) < len(pages):
            raise ValueError(f"a page appears twice in {list(pages)}")
        self._out -= going
        self._returned.extend(reversed(pages))


# %%
pool = PagePool(num_pages=4, page_size=PAGE)
mine = pool.allocate(3)
for attempt in (lambda: pool.allocate(2), lambda: pool.free([mine[0], mine[0]])):
    try:
        attempt()
    except (OutOfPages, ValueError) as error:
        print(f"{type(error).__name__}: {error} (free: {pool.num_free})")

# %% [markdown]
# ## The life of a page
#
# Chapter 3's tree says which prefix lies in which slots. The pool says which pages are
# free. Every other page is in use by somebody, and it must always be possible to say by
# whom and for what. So, the states:
#
# | state | who may read it | who may write it |
# |---|---|---|
# | free | nobody | nobody |
# | private | its one request | its one request |
# | published, pinned | everyone who finds it; someone does | nobody |
# | published, evictable | everyone who finds it; nobody does now | nobody |
#
# A page starts free, becomes *private* when it is allocated, and is written. When a
# forward pass has succeeded, the tokens it wrote are *committed*. A page that is full
# and committed may be *published*: entered in the index, where others find it. From then
# on it never changes. While somebody uses it, it is *pinned*; when the last user has
# gone it is evictable, and stays until its memory is needed.
#
# Full and committed, both. A full page whose forward pass has not run yet holds whatever
# the last owner left there. A page that is not full will be continued: by its owner, and by
# everybody who found it, each with its own next token in the same slot.

# %% [markdown]
# ## Something to watch it with
#
# We want to see these transitions, in tests and in pictures, without printing in the
# middle of an engine. Whatever changes the state of a page calls an *observer* with what
# happened; later the scheduler will do the same for requests. By default the observer does
# nothing.

# %% export="events.py"
"""What happened, in order: the one way to look into a running engine."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Observer(Protocol):
    """Told about every transition: a kind such as "evict", and its details."""

    def __call__(self, kind: str, /, **details: object) -> None: ...


def ignore(kind: str, /, **details: object) -> None:
    """The observer that does nothing."""


@dataclass(frozen=True)
class Event:
    """One transition."""

    kind: str
    details: dict[str, object]


class EventLog:
    """An observer that keeps the last `capacity` events."""

    def __init__(self, capacity: int = 100_000) -> None:
        self.events: deque[Event] = deque(maxlen=capacity)

    def __call__(self, kind: str, /, **details: object) -> None:
        """Write an event down."""
        self.events.append(Event(kind, details))

    def of(self, *kinds: str) -> Iterator[Event]:
        """The events of some kinds, oldest first."""
        return (event for event in self.events if event.kind in kinds)


# %% [markdown]
# ## Two indexes, one set of questions
#
# vLLM finds prefixes by the chained hashes of chapter 2, in one flat table. SGLang finds
# them in the tree of chapter 3. For whole pages they answer the same questions, so we
# write the questions down and let either answer:

# %% export="prefix_cache.py"
"""The prefix cache: pages with owners, and an index that finds the published ones."""

from array import array
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from minivllm.hashing import names_after, page_name, root_hash
from minivllm.radix import End, Handle, Match, Node, RadixCache, Root, Slots
from minivllm.request import ExtraKey, TokenIds


class PageIndex(Protocol):
    """How a published prefix is found. Sizes are in tokens; see `RadixCache`."""

    total_size: int
    protected_size: int

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find the longest published prefix, in whole pages. Changes nothing."""

    def lock(self, match: Match) -> Handle:
        """Protect a match from eviction."""

    def unlock(self, handle: Handle) -> None:
        """End the protection."""

    def extend(
        self, handle: Handle, token_ids: TokenIds, first_slots: "array[int]"
    ) -> "tuple[int, array[int]]":
        """Enter pages below a lock; how many tokens were known, and where all lie."""

    def evictable_len(self, match: Match) -> int:
        """How many tokens of a match nobody has locked."""

    def evict_pages(self, num_pages: int) -> list[int]:
        """Forget pages, next victims and tails first; their first slots."""

    def pages(self) -> list[int]:
        """All published pages."""


# %% [markdown]
# The tree of chapter 3 already answers them. The flat table is closer to it than it looks:
# to let tails go first, it must know for each page the one before it and those after it.
# That is a tree again. What differs is how a page is found: by its name, in one step, and
# not by walking through the children. So the table is the same class with another walk.
#
# The table says for each name in which run of pages it lies. The name is not trusted. A page
# counts only if its tokens are the tokens, and the page before it is the page before it.


# %% export="prefix_cache.py"
class HashIndex(RadixCache):
    """A table from chained page hashes to pages (vLLM's index), with the tree's API."""

    def __init__(self, page_size: int, eviction: str = "lru") -> None:
        super().__init__(page_size, eviction)
        self._table: dict[bytes, Node] = {}  # a page's name -> the run that holds it
        self._names: dict[Node, list[bytes]] = {}  # the names of a run's pages

    def _walk(self, node: Node, key: bytes, firsts: "array[int]") -> End:
        """Look the pages of `key` up by name; confirm each by its tokens and parent."""
        name, within = self._last_name(node), len(node.key)
        for at in range(0, len(key) - self._step + 1, self._step):
            page = key[at : at + self._step]
            name = page_name(name, page)
            found = self._table.get(name)
            if found is None:
                break
            follows = found is node or (
                found.parent is node and within == len(node.key)
            )
            offset = within if found is node else 0
            if not (follows and found.key.startswith(page, offset)):
                break
            firsts.append(found.first_slots[offset // self._step])
            node, within = found, offset + self._step
        return node, within

    def _last_name(self, node: Node) -> bytes:
        """The name of a node's last page: the past of whatever hangs below it."""
        if isinstance(node, Root):
            return root_hash(node.extra_key)
        return self._names[node][-1]


# %% [markdown]
# New pages get their names from the node that they hang on, each hashed once. The impossible
# case is handled too: if another past owns the very name that a page would get, the page is
# not entered, nor is anything after it.


# %% export="prefix_cache.py"
class HashIndex(HashIndex):
    def _add(
        self, parent: Node, key: bytes, first_slots: "array[int]", num_own_locks: int
    ) -> Node:
        names = self._free_names(parent, key)
        if not names:
            return parent
        key, first_slots = key[: len(names) * self._step], first_slots[: len(names)]
        node = super()._add(parent, key, first_slots, num_own_locks)
        self._names.setdefault(node, []).extend(names)
        self._table.update(dict.fromkeys(names, node))
        return node

    def _free_names(self, parent: Node, key: bytes) -> list[bytes]:
        """Names for the pages of `key`, up to the first that is taken."""
        names = names_after(self._last_name(parent), key, self._step)
        if len(set(names)) == len(names) and self._table.keys().isdisjoint(names):
            return names
        taken = (i for i, n in enumerate(names) if n in self._table or n in names[:i])
        return names[: next(taken)]


# %% [markdown]
# A split and an eviction keep the table true: names follow their pages.


# %% export="prefix_cache.py"
class HashIndex(HashIndex):
    def _split(self, node: Node, num_bytes: int) -> Node:
        upper, cut = super()._split(node, num_bytes), num_bytes // self._step
        names = self._names[node]
        self._names[upper], self._names[node] = names[:cut], names[cut:]
        self._table.update(dict.fromkeys(names[:cut], upper))
        return upper

    def _trim(self, leaf: Node, num_pages: int) -> None:
        super()._trim(leaf, num_pages)
        names = self._names[leaf]
        for name in names[num_pages:]:
            del self._table[name]
        del names[num_pages:]
        if not names:
            del self._names[leaf]


# %% [markdown]
# Because the rest is shared, both keep time in the same ticks and use the same queue, so
# they should evict the same pages in the same order. See it once (a property test tries
# to refute it with random operations):

# %%
for index in (RadixCache(PAGE), HashIndex(PAGE)):
    for slot, tokens in [(0, range(48)), (100, range(500, 532)), (200, range(16))]:
        index.insert(tokens, range(slot, slot + len(tokens)))
    pages_gone = [index.evict_pages(1)[0] for _ in range(5)]
    print(f"{type(index).__name__:10}", pages_gone)

# %% [markdown]
# And the third choice, no sharing at all. It is the judge of the other two: whatever the
# cache does, the answers must be the ones that come out without it.


# %% export="prefix_cache.py"
class NoIndex:
    """Finds nothing and keeps nothing: every request computes its own prompt."""

    total_size = 0
    protected_size = 0

    def __init__(self, page_size: int, eviction: str = "lru") -> None:
        self.page_size = page_size

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find nothing."""
        return Match(0, Slots(array("i"), self.page_size), b"", extra_key)

    def lock(self, match: Match) -> Handle:
        """Protect nothing."""
        return Handle(None)

    def unlock(self, handle: Handle) -> None:
        """Nothing was protected."""

    def extend(
        self, handle: Handle, token_ids: TokenIds, first_slots: "array[int]"
    ) -> "tuple[int, array[int]]":
        """Take nothing."""
        return 0, array("i")

    def evictable_len(self, match: Match) -> int:
        """Nothing was found."""
        return 0

    def evict_pages(self, num_pages: int) -> list[int]:
        """Nothing can go."""
        return []

    def pages(self) -> list[int]:
        """Nothing is published."""
        return []


# %% [markdown]
# ## Who holds what
#
# SGLang keeps two levels of pools: one maps a request to its token positions, the other
# hands out the places for K/V. Here the first level is a *lease*: the pages that one
# request holds, in the order of its tokens. The leading ones are published and pinned
# for it; the rest are private.


# %% export="prefix_cache.py"
@dataclass(eq=False)
class Lease:
    """The pages that one request holds, in the order of its tokens.

    The first `num_shared` are published and pinned; the others are private to it.
    """

    pages: list[int]
    num_shared: int
    handle: Handle
    num_offered: int  # pages that the index was shown, whether it took them or not


INDEXES: dict[str, type[RadixCache] | type[HashIndex] | type[NoIndex]] = {
    "radix": RadixCache,
    "hash": HashIndex,
    "none": NoIndex,
}


# %% [markdown]
# `PrefixCache` owns the pool, the index and every lease. A request meets it five times.
#
# **Find**: how long is the longest published prefix? Only a question, asked for requests that
# may have to wait.
#
# **Acquire**: pin what was found, and get private pages for the tokens that the next forward
# pass will write. All in one move: nothing can come between the two, so nobody can evict what
# was just promised. If the pages cannot be had, the caller is told, and nothing has changed,
# not even an access time: a request that waits at the door for a hundred steps has not used
# its prefix a hundred times.
#
# **Grow**: get more private pages. If too few are free, evict as many as are missing.


# %% export="prefix_cache.py"
class PrefixCache:
    """Pages and who holds them: free + private + published = total, always."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        index: str = "radix",
        eviction: str = "lru",
        observer: Observer = ignore,
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.page_size = page_size
        self._new_index = partial(INDEXES[index], page_size, eviction)
        self.index: PageIndex = self._new_index()
        self.observer = observer
        self.leases: set[Lease] = set()
        self.published_tokens = 0
        self.evicted_tokens = 0


# %% export="prefix_cache.py"
class PrefixCache(PrefixCache):
    def find(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find the longest published prefix. Changes nothing."""
        return self.index.match_prefix(token_ids, extra_key)

    def acquire(self, match: Match, num_tokens: int) -> Lease:
        """Pin a match, and get pages for the rest of the first `num_tokens` tokens.

        Raises `OutOfPages` if they cannot be had; then nothing has changed.
        """
        pages = match.kv_indices.pages
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.pool.num_free:
            self._check_room(missing, self.index.evictable_len(match))
        handle = self.index.lock(match)
        lease = Lease(pages, len(pages), handle, num_offered=len(pages))
        self.leases.add(lease)
        self.grow(lease, num_tokens)
        return lease

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-num_tokens // self.page_size)


# %% [markdown]
# Getting pages takes the free ones first and evicts only what is missing. Evicting everything
# and then failing all the same would throw other people's prefixes away for nothing, so it
# looks first whether eviction can help. Pages that the request itself is about to pin cannot.


# %% export="prefix_cache.py"
class PrefixCache(PrefixCache):
    def _check_room(self, num_pages: int, num_reserved_tokens: int = 0) -> None:
        """Raise `OutOfPages` unless eviction can make room for so many pages."""
        kept = self.index.protected_size + num_reserved_tokens
        room = self.pool.num_free + (self.index.total_size - kept) // self.page_size
        if num_pages > room:
            raise OutOfPages(f"{num_pages} pages needed, {room} to be had")

    def grow(self, lease: Lease, num_tokens: int) -> None:
        """Make room for the first `num_tokens` tokens, or raise `OutOfPages`."""
        missing = self.pages_for(num_tokens) - len(lease.pages)
        if missing <= 0:
            return
        if missing > self.pool.num_free:
            self._check_room(missing)
            self._evict(missing - self.pool.num_free)
        lease.pages += self.pool.allocate(missing)
        self.observer("allocate", pages=lease.pages[-missing:])

    def _evict(self, num_pages: int) -> None:
        pages = [slot // self.page_size for slot in self.index.evict_pages(num_pages)]
        self.pool.free(pages)
        self.evicted_tokens += len(pages) * self.page_size
        self.observer("evict", pages=pages)


# %% [markdown]
# **Publish**: enter the full pages among the committed tokens. Now the subtle case.
# Two requests computed the same prefix at the same time. The first to publish wins; the
# second finds its own pages to be *duplicates*. They are freed, so the memory is not held twice,
# and, in the same breath, the second request's page table is pointed to the published
# ones. Free without remapping, and the request goes on reading pages that somebody else
# is about to write. Its answers go wrong at some later time, somewhere else.
#
# The index tells where the prefix lies now, so the remap needs no second search.
#
# **Release**: publish what is complete, even if nothing was published while the request
# ran, and give everything else back.


# %% export="prefix_cache.py"
class PrefixCache(PrefixCache):
    def publish(self, lease: Lease, token_ids: TokenIds, num_committed: int) -> None:
        """Let others find the full pages among the first `num_committed` tokens.

        Pages that turn out to be published already are freed, and the lease points to
        the published ones instead. The lease then pins all that it published.
        """
        start, end = lease.num_offered, num_committed // self.page_size
        if end <= start or lease.num_shared < start:
            return  # nothing new, or a page was refused: no page without its past
        own, size = lease.pages[start:end], self.page_size
        given = array("i", [page * size for page in own])
        ids = token_ids[start * size : end * size]
        num_known, slots = self.index.extend(lease.handle, ids, given)
        published = own if slots == given else [slot // size for slot in slots]
        lease.num_offered, lease.num_shared = end, start + len(published)
        lease.pages[start : lease.num_shared] = published
        self._free([a for a, b in zip(own, published, strict=False) if a != b])
        self.published_tokens += len(slots) * size - num_known
        self.observer("publish", pages=published[num_known // size :])

    def _free(self, pages: list[int]) -> None:
        if pages:
            self.pool.free(pages)
            self.observer("free", pages=pages)


# %% [markdown]
# Release goes through the same door: publish what is complete, free the rest, unpin. A reset,
# for when the weights change under the cache, refuses while anybody holds a lease; to forget
# pages that are being read is not a reset but an accident.


# %% export="prefix_cache.py"
class PrefixCache(PrefixCache):
    def release(self, lease: Lease, token_ids: TokenIds, num_committed: int) -> None:
        """End a lease: publish its complete pages, give the others back, unpin."""
        self.publish(lease, token_ids, num_committed)
        self._free(lease.pages[lease.num_shared :])
        self.index.unlock(lease.handle)
        self.leases.remove(lease)
        lease.pages, lease.num_shared = [], 0

    def start_over(self) -> None:
        """Forget every page and every lease, whatever state they are in."""
        self.pool = PagePool(self.pool.num_pages, self.page_size)
        self.index, self.leases = self._new_index(), set()

    def reset(self) -> bool:
        """Forget everything published. False, and no change, while a lease is held."""
        if self.leases:
            return False
        self._evict(self.index.total_size // self.page_size)
        return True


# %% [markdown]
# What must always hold is one method. It does not trust the counters: it takes every
# page by its number and asks who has it. Each page has exactly one answer.


# %% export="prefix_cache.py"
class PrefixCache(PrefixCache):
    def stats(self) -> dict[str, int]:
        """Pages by state, and tokens published and evicted so far."""
        published = self.index.total_size // self.page_size
        pinned = self.index.protected_size // self.page_size
        return {
            "pages_total": self.pool.num_pages,
            "pages_free": self.pool.num_free,
            "pages_private": self.pool.num_pages - self.pool.num_free - published,
            "pages_evictable": published - pinned,
            "pages_pinned": pinned,
            "published_tokens": self.published_tokens,
            "evicted_tokens": self.evicted_tokens,
        }

    def check(self) -> None:
        """Assert that every page is in exactly one state and every user is known."""
        stats, published = self.stats(), set(self.index.pages())
        private = [
            page for lease in self.leases for page in lease.pages[lease.num_shared :]
        ]
        pinned = {
            page for lease in self.leases for page in lease.pages[: lease.num_shared]
        }
        free = {p for p in range(self.pool.num_pages) if not self.pool.is_out(p)}
        assert len(set(private)) == len(private), "a private page with two owners"
        assert not published & set(private), "a page both private and published"
        assert not free & (published | set(private)), "a page that is free and in use"
        assert free | published | set(private) == set(range(self.pool.num_pages))
        assert pinned <= published, "a lease points to a page that is not published"
        assert len(free) == stats["pages_free"]
        assert len(private) == stats["pages_private"]
        assert len(pinned) == stats["pages_pinned"], "a pin without a user"


# %% [markdown]
# That needs one more word from the pool:


# %% export="pages.py"
class PagePool(PagePool):
    def is_out(self, page: int) -> bool:
        """Whether somebody holds this page."""
        return page in self._out


# %% [markdown]
# ## Three requests, one prefix
#
# First, what a page that is not full costs: a request of 40 tokens is aborted when 20 of them
# are committed, and another comes with the same 40.

# %% name="aborted" claims="S09 S10"
cache = PrefixCache(num_pages=8, page_size=PAGE)
tokens = list(range(40))
aborted = cache.acquire(cache.find(tokens), num_tokens=40)
cache.release(aborted, tokens, num_committed=20)
print("reusable:", cache.find(tokens).matched_len, "of 20 committed tokens")

# %% [markdown]
# Tokens 16 to 19 were computed and are lost with their page.
#
# Now A runs first and ends. Then B and C come with A's first 32 tokens and different rests,
# at page size 16, in a pool of 8 pages.

# %% name="three" claims="S06"
cache = PrefixCache(num_pages=8, page_size=PAGE)
log = cache.observer = EventLog()
common = list(range(32))


def compute(tokens: list[int]) -> Lease:
    """Stands for a forward pass: acquire, grow, and everything is committed."""
    return cache.acquire(cache.find(tokens), len(tokens))


a_tokens = common + [50] * 8
a = compute(a_tokens)
a_pages = a.pages.copy()
cache.release(a, a_tokens, num_committed=40)

b_tokens, c_tokens = common + [60] * 20, common + [70] * 20
b, c = compute(b_tokens), compute(c_tokens)
print("A had", a_pages, "· B has", b.pages, "· C has", c.pages)
print(cache.stats())
cache.check()

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows


def table(lease: Lease) -> list[tuple[float, float, str, str]]:
    return [
        (i, 1, "pinned" if i < lease.num_shared else "private", f"page {page}")
        for i, page in enumerate(lease.pages)
    ]


holders = {page: lease for lease in (b, c) for page in lease.pages[lease.num_shared :]}
shared = set(b.pages[: b.num_shared])
memory = [
    (p, 1, "pinned" if p in shared else "private" if p in holders else "free", f"{p}")
    for p in range(8)
]
draw_rows(
    [("B's page table", table(b)), ("C's page table", table(c)), ("memory", memory)],
    unit=72,
    caption="Two page tables over one memory. The blue pages are written once and read by both; "
    "the orange ones belong to one request each. A's third page, number 2, was not full: it "
    "went back to the pool and is B's now.",
)

# %% [markdown]
# Pages [0 and 1](#three) are in both tables. When B ends they stay pinned for C; when C ends they
# stay published, for whoever comes. The log has the transitions in their order:

# %%
for event in log.events:
    print(event.kind, event.details)

# %% tags=["hide-input"]
from minivllm.drawing import page_states

told = [(event.kind, event.details["pages"]) for event in log.events]
draw_rows(
    page_states(8, [(kind, pages) for kind, pages in told if pages]),
    unit=40,
    caption="The eight pages of memory after each event of the log above. A takes three pages "
    "(orange) and, at its end, publishes two (green) and frees the third, which B gets next.",
)

# %% [markdown]
# Now the duplicate. Two requests start *before* anything is published, so each computes
# the same 32 tokens in two pages of its own:

# %% name="twins"
cache = PrefixCache(num_pages=8, page_size=PAGE)
twins = [compute(common), compute(common)]
print("before:", [twin.pages for twin in twins], "free:", cache.pool.num_free)
for twin in twins:
    cache.publish(twin, common, num_committed=32)
print("after: ", [twin.pages for twin in twins], "free:", cache.pool.num_free)
cache.check()

# %% [markdown]
# The second twin's pages [2 and 3](#twins) are free, and its table says [0 and 1](#twins). They computed the
# prompt twice, though: publication came too late to save the work, only the memory. This
# is the puzzle of the prologue, seen from below.
#
# What if the duplicates are freed and the table is *not* remapped? We break it on purpose:


# %%
class Forgetful(PrefixCache):
    def publish(self, lease, token_ids, num_committed):
        before = list(lease.pages)
        super().publish(lease, token_ids, num_committed)
        lease.pages = before


cache = Forgetful(num_pages=8, page_size=PAGE)
twins = [compute(common), compute(common)]
for twin in twins:
    cache.publish(twin, common, num_committed=32)
stranger = compute(list(range(900, 932)))
print("the second twin reads", twins[1].pages, "and a stranger writes", stranger.pages)
try:
    cache.check()
except AssertionError as error:
    print("check:", error)

# %% [markdown]
# The stranger is about to write over what the second twin reads. No exception would tell;
# the twin's answer would turn to nonsense some steps later. Only the invariant notices.
#
# ## What still goes wrong
#
# So far "compute" was a stand-in. Chapter 5 replaces it by a model that really writes
# keys and values into these pages, and reads them through the page table.
#
# ## Exercise
#
# Three requests share the three pages of a 48-token prompt. One ends. How many users does page
# 0 have, and how many pages are pinned? The other two end: in which state are the pages then?
# Find out by running it.

# %% tags=["solution"]
cache = PrefixCache(num_pages=8, page_size=PAGE)
prompt = list(range(48))
first = compute(prompt)
cache.publish(first, prompt, num_committed=48)
three = [first, compute(prompt), compute(prompt)]

cache.release(three[0], prompt, num_committed=48)
users = sum(0 in lease.pages for lease in cache.leases)
pinned_then = cache.stats()["pages_pinned"]
for lease in three[1:]:
    cache.release(lease, prompt, num_committed=48)
evictable_at_last = cache.stats()["pages_evictable"]
print(
    users,
    "users,",
    pinned_then,
    "pages pinned; at last",
    evictable_at_last,
    "evictable",
)

# %%
cache.check()
assert (users, pinned_then, evictable_at_last) == (2, 3, 3)

# %% [markdown]
# Published pages survive all their users. Here a request matched its whole prompt; that one
# token must be computed all the same is the scheduler's rule, in chapter 7.
