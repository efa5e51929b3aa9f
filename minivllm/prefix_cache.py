# Exported from chapters/04_pages.py (87d9fce4): edit the chapter.
"""The prefix cache: pages with owners, and an index that finds the published ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from minivllm.events import Observer, ignore
from minivllm.hashing import names_after, page_name, root_hash
from minivllm.pages import OutOfPages, PagePool
from minivllm.radix import (
    End,
    Handle,
    Match,
    Node,
    RadixCache,
    Root,
    Slots,
    shared_pages,
)
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
        self, handle: Handle, token_ids: TokenIds, places: array[int]
    ) -> tuple[int, array[int]]:
        """Enter pages below a lock; how many tokens were known, and where all lie."""

    def evictable_len(self, match: Match) -> int:
        """How many tokens of a match nobody has locked."""

    def evict_pages(self, num_pages: int) -> list[int]:
        """Forget pages, next victims and tails first; their places."""

    def places(self) -> list[int]:
        """All published pages."""


class HashIndex(RadixCache):
    """A table from chained page hashes to pages (vLLM's index), with the tree's API."""

    def __init__(self, page_size: int, eviction: str = "lru", unit: int = 1) -> None:
        super().__init__(page_size, eviction, unit)
        self._table: dict[bytes, Node] = {}  # a page's name -> the run that holds it
        self._names: dict[Node, list[bytes]] = {}  # the names of a run's pages

    def _walk(self, node: Node, ids: array[int]) -> tuple[End, array[int]]:
        """Look pages up by name; confirm a run of them by its tokens and parent."""
        key, name, step = ids.tobytes(), self._last_name(node), self._step
        runs: list[array[int]] = []
        at, start, within = 0, 0, len(node.key)
        while True:
            page = key[at : at + step]
            name = page_name(name, page)
            found = self._table.get(name) if len(page) == step else None
            if found is not node:  # the run ends here: was it the right one?
                first, num_pages = within // step, (at - start) // step
                agree = shared_pages(node.key[within:], key[start:at], step)
                runs.append(node.places[first : first + agree])
                within += agree * step
                if agree < num_pages or within < len(node.key) or found is None:
                    break
                if found.parent is not node or not found.key.startswith(page):
                    break
                node, start, within = found, at, 0
            at += step
        return (node, within), array("i", b"".join(runs))

    def _last_name(self, node: Node) -> bytes:
        """The name of a node's last page: the past of whatever hangs below it."""
        if isinstance(node, Root):
            return root_hash(node.extra_key)
        return self._names[node][-1]

    def _add(
        self, parent: Node, key: bytes, places: array[int], num_own_locks: int
    ) -> Node:
        names = self._free_names(parent, key)
        if not names:
            return parent
        key, places = key[: len(names) * self._step], places[: len(names)]
        node = super()._add(parent, key, places, num_own_locks)
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

    def _split(self, node: Node, num_bytes: int) -> Node:
        upper, cut = super()._split(node, num_bytes), num_bytes // self._step
        names = self._names[node]
        self._names[upper], self._names[node] = names[:cut], names[cut:]
        self._table.update(dict.fromkeys(names[:cut], upper))
        return upper

    def _trim(self, leaf: Node, num_pages: int) -> None:
        super()._trim(leaf, num_pages)
        names = self._names[leaf]
        list(map(self._table.__delitem__, names[num_pages:]))
        del names[num_pages:]
        if not names:
            del self._names[leaf]


class NoIndex:
    """Finds nothing and keeps nothing: every request computes its own prompt."""

    total_size = 0
    protected_size = 0

    def __init__(self, page_size: int, eviction: str = "lru", unit: int = 1) -> None:
        self.page_size = page_size

    def match_prefix(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find nothing."""
        return Match(0, Slots(array("i"), self.page_size), array("i"), extra_key)

    def lock(self, match: Match) -> Handle:
        """Protect nothing."""
        return Handle(None)

    def unlock(self, handle: Handle) -> None:
        """Nothing was protected."""

    def extend(
        self, handle: Handle, token_ids: TokenIds, places: array[int]
    ) -> tuple[int, array[int]]:
        """Take nothing."""
        return 0, array("i")

    def evictable_len(self, match: Match) -> int:
        """Nothing was found."""
        return 0

    def evict_pages(self, num_pages: int) -> list[int]:
        """Nothing can go."""
        return []

    def places(self) -> list[int]:
        """Nothing is published."""
        return []


@dataclass(eq=False)
class Lease:
    """The pages that one request holds, in the order of its tokens.

    The first `num_shared` are published and pinned; the others are private to it.
    """

    pages: list[int]
    num_shared: int
    handle: Handle
    num_offered: int  # pages that the index was shown, whether it took them or not
    num_borrowed: int = 0  # after the shared ones: others own them (chapter 9)
    owner: str = ""  # whose name observers are told

    @property
    def own_pages(self) -> list[int]:
        """The pages that are private to this request."""
        return self.pages[self.num_shared + self.num_borrowed :]


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
        self._new_index = partial(INDEXES[index], page_size, eviction, page_size)
        self.index: PageIndex = self._new_index()
        self.observer = observer
        self.leases: set[Lease] = set()
        self.published_tokens = 0
        self.evicted_tokens = 0

    def find(self, token_ids: TokenIds, extra_key: ExtraKey = None) -> Match:
        """Find the longest published prefix. Changes nothing."""
        return self.index.match_prefix(token_ids, extra_key)

    def acquire(
        self,
        match: Match,
        num_tokens: int,
        borrowed: Sequence[int] = (),
        owner: str = "",
    ) -> Lease:
        """Pin a match, and get pages for the rest of the first `num_tokens` tokens.

        Pages `borrowed` from others (chapter 9) go on where the match ends. Raises
        `OutOfPages` if the rest cannot be had; then nothing has changed. Observers are
        told the `owner`.
        """
        pages = match.kv_indices.places
        missing = self.pages_for(num_tokens) - len(pages) - len(borrowed)
        if missing > self.pool.num_free:
            self._check_room(missing, self.index.evictable_len(match))
        handle = self.index.lock(match)
        lease = Lease([*pages, *borrowed], len(pages), handle, len(pages))
        lease.num_borrowed, lease.owner = len(borrowed), owner
        self.leases.add(lease)
        self.grow(lease, num_tokens)
        return lease

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def _check_room(self, num_pages: int, num_reserved_tokens: int = 0) -> None:
        """Raise `OutOfPages` unless eviction can make room for so many pages."""
        kept = self.index.protected_size + num_reserved_tokens
        room = self.pool.num_free + (self.index.total_size - kept) // self.page_size
        if num_pages > room:
            raise OutOfPages(f"{num_pages} pages needed, {room} to be had")

    def grow(self, lease: Lease, num_tokens: int) -> None:
        """Make room for the first `num_tokens` tokens, or raise `OutOfPages`."""
        if lease not in self.leases:
            raise ValueError("this lease was released")
        missing = self.pages_for(num_tokens) - len(lease.pages)
        if missing <= 0:
            return
        if missing > self.pool.num_free:
            self._check_room(missing)
            self._evict(missing - self.pool.num_free, lease.owner)
        lease.pages += self.pool.allocate(missing)
        self.observer("allocate", pages=lease.pages[-missing:])

    def _evict(self, num_pages: int, owner: str = "") -> None:
        pages = self.index.evict_pages(num_pages)
        self.pool.free(pages)
        self.evicted_tokens += len(pages) * self.page_size
        self.observer("evict", pages=pages, owner=owner)

    def publish(self, lease: Lease, token_ids: TokenIds, num_committed: int) -> None:
        """Let others find the full pages among the first `num_committed` tokens.

        Pages that turn out to be published already are freed, and the lease points to
        the published ones instead. The lease then pins all that it published.
        """
        start, end = lease.num_offered, num_committed // self.page_size
        if num_committed > len(token_ids) or end > len(lease.pages):
            there = f"{len(token_ids)} tokens in {len(lease.pages)} pages"
            raise ValueError(f"{num_committed} tokens committed of {there}")
        if end <= start or lease.num_shared < start:
            return  # nothing new, or a page was refused: no page without its past
        own, size = lease.pages[start:end], self.page_size
        ids = token_ids[start * size : end * size]
        num_known, places = self.index.extend(lease.handle, ids, array("i", own))
        published = places.tolist()
        lease.num_offered, lease.num_shared = end, start + len(published)
        lease.pages[start : lease.num_shared] = published
        if published != own:
            pairs = list(zip(own, published, strict=False))[lease.num_borrowed :]
            self._free([a for a, b in pairs if a != b])
        lease.num_borrowed = max(0, lease.num_borrowed - len(published))
        self.published_tokens += len(published) * size - num_known
        new = published[num_known // size :]
        self.observer("publish", pages=new, owner=lease.owner)

    def _free(self, pages: list[int]) -> None:
        if pages:
            self.pool.free(pages)
            self.observer("free", pages=pages)

    def release(self, lease: Lease, token_ids: TokenIds, num_committed: int) -> None:
        """End a lease: publish its complete pages, give the others back, unpin."""
        if not lease.num_borrowed:  # else the pages below its own do not exist
            self.publish(lease, token_ids, num_committed)
        self._free(lease.own_pages)
        self.index.unlock(lease.handle)
        self.leases.remove(lease)
        lease.pages, lease.num_shared = [], 0

    def start_over(self) -> None:
        """Forget every page and every lease, whatever state they are in."""
        self.pool = PagePool(self.pool.num_pages, self.page_size)
        self.index, self.leases = self._new_index(), set()
        self.observer("start over")

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
        stats, published = self.stats(), set(self.index.places())
        private = [page for lease in self.leases for page in lease.own_pages]
        pinned = {
            page for lease in self.leases for page in lease.pages[: lease.num_shared]
        }
        free = {p for p in range(self.pool.num_pages) if not self.pool.is_out(p)}
        assert len(set(private)) == len(private), "a private page with two owners"
        assert not published & set(private), "a page both private and published"
        assert not free & (published | set(private)), "a page that is free and in use"
        assert free | published | set(private) == set(range(self.pool.num_pages)), (
            "a page that nobody holds"
        )
        assert pinned <= published, "a lease points to a page that is not published"
        assert len(free) == stats["pages_free"]
        assert len(private) == stats["pages_private"]
        assert len(pinned) == stats["pages_pinned"], "a pin without a user"
