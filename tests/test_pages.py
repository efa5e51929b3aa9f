"""The pool and the prefix cache: every page has one state, whatever happens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.hashing import page_hashes
from minivllm.pages import OutOfPages, PagePool
from minivllm.prefix_cache import PrefixCache

INDEXES = ["radix", "hash", "none"]


def test_allocation_is_all_or_nothing():
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    with pytest.raises(OutOfPages):
        pool.allocate(2)
    assert pool.num_free == 1 and len(set(pages)) == 3
    assert sorted(pages + pool.allocate(1)) == [0, 1, 2, 3], "all pages are usable"


@pytest.mark.parametrize("wrong", [[0, 0], [0, 3], [0, 4], [0, -1]])
def test_a_bad_free_frees_nothing(wrong):
    """c9: the same page twice, a free page, a page that does not exist."""
    pool = PagePool(4, 16)
    pool.allocate(3)
    with pytest.raises(ValueError):
        pool.free(wrong)
    assert pool.num_free == 1


def computed(cache, tokens, extra=None):
    return cache.acquire(cache.find(tokens, extra), len(tokens))


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_duplicate_is_freed_and_its_owner_remapped(index):
    cache = PrefixCache(8, 4, index)
    tokens = list(range(10))
    one, two = computed(cache, tokens), computed(cache, tokens)
    assert two.pages == [3, 4, 5]
    cache.publish(one, tokens, 10)
    cache.publish(two, tokens, 10)
    assert two.pages == [0, 1, 5] and cache.pool.num_free == 4
    cache.check()
    cache.release(one, tokens, 10)
    assert cache.stats()["pages_pinned"] == 2, "the second still reads them"
    cache.release(two, tokens, 10)
    assert cache.stats()["pages_evictable"] == 2
    cache.check()


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_aborted_at_token_20_leaves_16(index):
    """S09: a page counts when it is full and committed."""
    cache = PrefixCache(8, 16, index)
    lease = computed(cache, list(range(40)))
    cache.release(lease, list(range(40)), num_committed=20)
    assert cache.find(list(range(40))).matched_len == 16


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_match_pins_before_anything_can_evict(index):
    """a8, b13: two idle pages are matched; a tight pool must not give them away."""
    cache = PrefixCache(3, 4, index)
    tokens = list(range(8))
    cache.release(computed(cache, tokens), tokens, 8)
    lease = cache.acquire(cache.find([*tokens, 9]), 8)
    with pytest.raises(OutOfPages):
        cache.grow(lease, 20)
    cache.grow(lease, 12)
    with pytest.raises(OutOfPages):
        cache.acquire(cache.find([50]), 1)
    cache.check()


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_reset_refuses_while_a_lease_is_held(index):
    """a11: no silent success; a later reset forgets everything."""
    cache = PrefixCache(4, 4, index)
    lease = computed(cache, list(range(8)))
    assert cache.reset() is False
    cache.release(lease, list(range(8)), 8)
    assert cache.reset() is True
    assert cache.stats()["pages_free"] == 4
    assert cache.find(list(range(8))).matched_len == 0


class Leases(RuleBasedStateMachine):
    """Random leases over a tight pool; both indexes must do the same throughout."""

    @initialize(page_size=st.sampled_from([1, 3, 16]), num_pages=st.integers(2, 14))
    def start(self, page_size, num_pages):
        self.page_size = page_size
        self.caches = [PrefixCache(num_pages, page_size, index) for index in INDEXES]
        self.live = []

    @rule(
        pages=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        rest=st.integers(0, 15),
    )
    def acquire(self, pages, rest):
        tokens = [page for page in pages for _ in range(self.page_size)]
        tokens += [9] * (rest % self.page_size)
        leases = []
        for cache in self.caches:
            match = cache.find(tokens)
            leases.append(cache.acquire(match, match.matched_len))
        assert leases[0].num_shared == leases[1].num_shared
        shared = min(leases[0].num_shared * self.page_size, len(tokens) - 1)
        self.live.append([tokens, shared, leases])

    @rule(which=st.integers(0, 50), more=st.integers(1, 20))
    def compute(self, which, more):
        if not self.live:
            return
        entry = self.live[which % len(self.live)]
        tokens, committed, leases = entry
        target = min(len(tokens), committed + more)
        fits = []
        for cache, lease in zip(self.caches[:2], leases, strict=False):
            try:
                cache.grow(lease, target)
                fits.append(True)
            except OutOfPages:
                fits.append(False)
        assert fits[0] == fits[1]
        if fits[0]:
            entry[1] = target

    @rule(which=st.integers(0, 50), end=st.booleans())
    def publish_or_release(self, which, end):
        if not self.live:
            return
        tokens, committed, leases = self.live[which % len(self.live)]
        for cache, lease in zip(self.caches, leases, strict=True):
            done = 0 if cache is self.caches[2] else committed
            if end:
                cache.release(lease, tokens, done)
            else:
                cache.publish(lease, tokens, done)
        assert leases[0].num_shared == leases[1].num_shared
        if end:
            del self.live[which % len(self.live)]

    @invariant()
    def every_page_has_one_state(self):
        for cache in getattr(self, "caches", []):
            cache.check()
        if hasattr(self, "caches"):
            assert self.caches[0].stats() == self.caches[1].stats()


Leases.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestLeases = Leases.TestCase


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_an_acquire_that_fails_changes_nothing(index):
    """No page moves, no lock is left, and the prefix has not been used."""
    cache = PrefixCache(4, 4, index)
    old, new = list(range(8)), list(range(50, 58))
    for tokens in (old, new):
        cache.release(computed(cache, tokens), tokens, 8)
    for _ in range(3):
        with pytest.raises(OutOfPages):
            cache.acquire(cache.find(old), 20)
    assert cache.stats()["pages_evictable"] == 4 and not cache.leases
    cache.acquire(cache.find([99]), 1)
    assert cache.find(old).matched_len == 4, "the older prefix still goes first"
    cache.check()


def test_a_match_is_no_room_for_its_own_request():
    """b13: two evictable pages are the match itself; they cannot be evicted for it."""
    cache = PrefixCache(2, 4)
    tokens = list(range(8))
    cache.release(computed(cache, tokens), tokens, 8)
    with pytest.raises(OutOfPages):
        cache.acquire(cache.find(tokens), 12)
    assert not cache.leases and cache.stats()["pages_pinned"] == 0


def test_no_page_is_published_without_its_past():
    """Once the index has refused a page, the pages after it are not offered."""
    cache = PrefixCache(8, 4, "hash")
    tokens = [1] * 4 + [2] * 4 + [3] * 4
    lease = computed(cache, tokens)
    cache.publish(lease, tokens, 4)
    taken = page_hashes(tokens, 4)[1]
    cache.index._table[taken] = next(cache.index.nodes())  # the name is another's
    cache.publish(lease, tokens, 8)
    del cache.index._table[taken]
    cache.publish(lease, tokens, 12)
    assert lease.num_shared == 1
    assert cache.find([1] * 4 + [3] * 4).matched_len == 4, "page 3 is not page 2"
