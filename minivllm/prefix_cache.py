# Exported from chapters/04_pages.py (b2242f42): edit the chapter.
"""The prefix cache: pages with owners, and an index that finds the published ones."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from minivllm.events import Observer, ignore
from minivllm.hashing import page_name, root_hash
from minivllm.pages import PagePool
from minivllm.radix import Handle, Match, Node, RadixCache, Root, Slots
from minivllm.request import ExtraKey, TokenIds


class PageIndex(Protocol):
    """How a published prefix is found. Sizes are in tokens; see `RadixCache`."""

    total_size: int
    protected_size: int

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find the longest published prefix, in whole pages. Changes nothing."""

    def insert_pages(
        self, token_ids: TokenIds, first_slots: array[int], extra_key: ExtraKey = None
    ) -> tuple[int, Match]:
        """Enter full pages; say how many tokens were known, and where all lie now."""

    def lock(self, match: Match) -> Handle:
        """Protect a match from eviction."""

    def unlock(self, handle: Handle) -> None:
        """End the protection."""

    def evict_pages(self, num_pages: int) -> list[int]:
        """Forget pages, next victims and tails first; their first slots."""

    def pages(self) -> list[int]:
        """All published pages."""


@dataclass(eq=False, slots=True)
class Entry(Node):
    """A node of one page that knows its name."""

    name: bytes = b""


class HashIndex(RadixCache):
    """A table from chained page hashes to pages (vLLM's index), with the tree's API."""

    def __init__(self, page_size: int, eviction: str = "lru") -> None:
        super().__init__(page_size, eviction)
        self._entries: dict[bytes, Entry] = {}

    def _walk(self, key: bytes, extra_key: ExtraKey) -> list[tuple[Node, int]]:
        """The entries along `key`, found by name and confirmed by tokens and parent."""
        parent: Node | None = self._roots.get(extra_key)
        name, path = root_hash(extra_key), list[tuple[Node, int]]()
        for start in range(0, len(key) - self._step + 1, self._step):
            page = key[start : start + self._step]
            name = page_name(name, page)
            entry = self._entries.get(name)
            if entry is None or entry.parent is not parent or entry.key != page:
                break
            path.append((entry, self._step))
            parent = entry
        return path

    def _add_leaf(self, parent: Node, key: bytes, first_slots: array[int]) -> Node:
        name = parent.name if isinstance(parent, Entry) else b""
        if isinstance(parent, Root):
            name = root_hash(parent.extra_key)
        for i, slot in enumerate(first_slots):
            page = key[i * self._step : (i + 1) * self._step]
            name = page_name(name, page)
            if name in self._entries:
                break
            entry = Entry(
                page, array("i", [slot]), parent, created=self._clock, name=name
            )
            parent.children[page] = self._entries[name] = entry
            self.total_size += self.page_size
            parent = entry
        self._leaves.push(parent)
        return parent

    def _trim(self, leaf: Node, num_pages: int) -> None:
        super()._trim(leaf, num_pages)
        assert isinstance(leaf, Entry)
        del self._entries[leaf.name]


class NoIndex:
    """Finds nothing and keeps nothing: every request computes its own prompt."""

    total_size = 0
    protected_size = 0

    def __init__(self, page_size: int, eviction: str = "lru") -> None:
        self.page_size = page_size

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find nothing."""
        return Match(0, Slots(array("i"), self.page_size), b"", extra_key)

    def insert_pages(
        self, token_ids: TokenIds, first_slots: array[int], extra_key: ExtraKey = None
    ) -> tuple[int, Match]:
        """Take nothing."""
        return 0, self.match_prefix(token_ids, extra_key)

    def lock(self, match: Match) -> Handle:
        """Protect nothing."""
        return Handle(None)

    def unlock(self, handle: Handle) -> None:
        """Nothing was protected."""

    def evict_pages(self, num_pages: int) -> list[int]:
        """Nothing can go."""
        return []

    def pages(self) -> list[int]:
        """Nothing is published."""
        return []


@dataclass(eq=False)
class Lease:
    """The pages that one request holds, in the order of its tokens.

    The first `num_shared` are published and pinned; the others are private to it.
    """

    extra_key: ExtraKey = None
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    handle: Handle | None = None


INDEXES: dict[str, type[RadixCache] | type[HashIndex] | type[NoIndex]] = {
    "radix": RadixCache,
    "hash": HashIndex,
    "none": NoIndex,
}


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
        self.index: PageIndex = INDEXES[index](page_size, eviction)
        self.observer = observer
        self.leases: set[Lease] = set()
        self.published_tokens = 0
        self.evicted_tokens = 0

    def acquire(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Lease:
        """Start a lease with the longest published prefix, pinned at once."""
        match = self.index.match_prefix(token_ids, extra_key)
        lease = Lease(extra_key, match.kv_indices.pages, handle=self.index.lock(match))
        lease.num_shared = len(lease.pages)
        self.leases.add(lease)
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> None:
        """Make room for the first `num_tokens` tokens, or raise `OutOfPages`."""
        missing = self.pages_for(num_tokens) - len(lease.pages)
        if missing <= 0:
            return
        self._evict(missing - self.pool.num_free)
        lease.pages += self.pool.allocate(missing)
        self.observer("allocate", pages=lease.pages[-missing:])

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def _evict(self, num_pages: int) -> None:
        evictable = (
            self.index.total_size - self.index.protected_size
        ) // self.page_size
        if num_pages <= 0 or num_pages > evictable:
            return  # enough is free, or eviction cannot help: keep what is there
        pages = [slot // self.page_size for slot in self.index.evict_pages(num_pages)]
        self.pool.free(pages)
        self.evicted_tokens += len(pages) * self.page_size
        self.observer("evict", pages=pages)

    def publish(self, lease: Lease, token_ids: TokenIds, num_committed: int) -> None:
        """Let others find the full pages among the first `num_committed` tokens.

        Pages that turn out to be published already are freed, and the lease points to
        the published ones instead. The lease then pins all that it published.
        """
        count = num_committed // self.page_size
        if count <= lease.num_shared:
            return
        slots = array("i", (page * self.page_size for page in lease.pages[:count]))
        ids = token_ids[: count * self.page_size]
        num_known, match = self.index.insert_pages(ids, slots, lease.extra_key)
        published = match.kv_indices.pages
        self._hand_over(lease, self.index.lock(match))
        spare = [a for a, b in zip(lease.pages, published, strict=False) if a != b]
        self.pool.free(spare)
        self.observer("free", pages=spare)
        lease.pages[: len(published)] = published
        lease.num_shared = len(published)
        self.published_tokens += match.matched_len - num_known
        self.observer("publish", pages=published[num_known // self.page_size :])

    def _hand_over(self, lease: Lease, handle: Handle | None) -> None:
        """Replace the lock of a lease: the new one is held before the old one goes."""
        old, lease.handle = lease.handle, handle
        if old is not None:
            self.index.unlock(old)

    def release(self, lease: Lease, token_ids: TokenIds, num_committed: int) -> None:
        """End a lease: publish its complete pages, give the others back, unpin."""
        self.publish(lease, token_ids, num_committed)
        self.pool.free(lease.pages[lease.num_shared :])
        self.observer("free", pages=lease.pages[lease.num_shared :])
        self._hand_over(lease, None)
        self.leases.remove(lease)
        lease.pages, lease.num_shared = [], 0

    def reset(self) -> bool:
        """Forget everything published. False, and no change, while a lease is held."""
        if self.leases:
            return False
        self._evict(self.index.total_size // self.page_size)
        return True

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
