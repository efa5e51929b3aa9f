"""The pool and the prefix cache: every page has one state, whatever happens."""

import random
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.hashing import page_hashes
from minivllm.pages import OutOfPages, PagePool
from minivllm.prefix_cache import HashIndex, PrefixCache

INDEXES = ["radix", "hash", "none"]
both_indexes = pytest.mark.parametrize("index", ["radix", "hash"])


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


@both_indexes
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


@both_indexes
def test_aborted_at_token_20_leaves_16(index):
    """S09: a page counts when it is full and committed."""
    cache = PrefixCache(8, 16, index)
    lease = computed(cache, list(range(40)))
    cache.release(lease, list(range(40)), num_committed=20)
    assert cache.find(list(range(40))).matched_len == 16


@both_indexes
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


@both_indexes
def test_reset_refuses_while_a_lease_is_held(index):
    """a11: no silent success; a later reset forgets everything."""
    cache = PrefixCache(4, 4, index)
    lease = computed(cache, list(range(8)))
    assert cache.reset() is False
    cache.release(lease, list(range(8)), 8)
    assert cache.reset() is True
    assert cache.stats()["pages_free"] == 4
    assert cache.find(list(range(8))).matched_len == 0


@both_indexes
def test_what_was_not_computed_is_not_found(index):
    """a7: acquired, then aborted before any forward, or after one that failed."""
    cache = PrefixCache(8, 4, index)
    lease = computed(cache, list(range(8)))
    cache.publish(lease, list(range(8)), 0)
    cache.release(lease, list(range(8)), 0)
    assert cache.find(list(range(8))).matched_len == 0
    assert cache.stats()["pages_free"] == 8


@both_indexes
def test_pages_become_visible_while_their_owner_decodes(index):
    """R06: each page as soon as it is full and committed, and no token sooner."""
    cache = PrefixCache(8, 4, index)
    tokens = list(range(24))
    lease = cache.acquire(cache.find(tokens), 6)
    for committed in range(6, 25):
        cache.grow(lease, committed)
        cache.publish(lease, tokens[:committed], committed)
        assert cache.find(tokens).matched_len == committed // 4 * 4
        assert lease in cache.leases
        cache.check()


@both_indexes
def test_hits_end_where_the_pages_end(index):
    """a12, c10: tails go first; a page that is used again never answers as before."""
    cache = PrefixCache(3, 4, index)
    old = list(range(12))
    cache.release(computed(cache, old), old, 12)
    for left in (8, 4, 0):
        new = [100 + left] * 4
        cache.release(computed(cache, new), new, 4)
        assert cache.find(new).matched_len == 4
        assert cache.find(old).matched_len == left


# ---- Names that collide --------------------------------------------------------------
def first_byte(past, page):
    """The worst name there is: it forgets the past and most of the page."""
    return page[:1]


@contextmanager
def weak_names():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivllm.hashing.page_name", first_byte)
        patch.setattr("minivllm.prefix_cache.page_name", first_byte)
        yield


pages = st.lists(st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]), max_size=5)


@given(prompts=st.lists(pages, max_size=8))
def test_a_collision_loses_pages_and_finds_no_wrong_ones(prompts):
    """A name is trusted only after its tokens and its parent."""
    with weak_names():
        look_up_all(HashIndex(2), prompts)


def look_up_all(index, prompts):
    told = {}
    for number, prompt in enumerate(prompts):
        tokens = [token for page in prompt for token in page]
        slots = range(100 * number, 100 * number + len(tokens))
        index.insert(tokens, slots)
        told |= {slot: tuple(tokens[: i + 2]) for i, slot in enumerate(slots)}
        for prompt in prompts:
            wanted = [token for page in prompt for token in page]
            for i, slot in enumerate(index.match_prefix(wanted).kv_indices.places):
                assert told[slot] == tuple(wanted[: 2 * i + 2])
    index.check()


def test_no_page_without_its_past_when_names_collide():
    """A page is refused because its name is taken: those after it stay private."""
    cache, tokens = PrefixCache(12, 2, "hash"), [0, 0, 1, 1, 2, 2]
    with weak_names():
        cache.release(computed(cache, [0, 0, 1, 0]), [0, 0, 1, 0], 4)
        lease = computed(cache, tokens)
        for committed in (4, 6):
            cache.publish(lease, tokens, committed)
            assert lease.num_shared == 1
            cache.check()
        assert cache.find([0, 0, 2, 2]).matched_len == 2, "nobody computed 0 0 2 2"
        cache.release(lease, tokens, 6)
    assert cache.stats()["pages_free"] == 10


# ---- What the pages hold -------------------------------------------------------------
class Run:
    """Random requests over a memory in which a slot holds its token's whole past.

    That is what keys and values depend on. After each move every request must read,
    through its page table, its own tokens.
    """

    def __init__(self, cache, seed):
        self.cache, self.rng = cache, random.Random(seed)
        self.size = cache.page_size
        self.memory = {}
        self.live = []  # [tokens, committed, lease]

    def start(self):
        length = self.rng.randrange(1, 4 * self.size + 2)
        tokens = [self.rng.randrange(2) for _ in range(length)]
        match = self.cache.find(tokens)
        try:
            lease = self.cache.acquire(
                match, self.rng.randint(match.matched_len, length)
            )
        except OutOfPages:
            return
        self.live.append([tokens, match.matched_len, lease])

    def forward(self):
        request = self.rng.choice(self.live)
        tokens, committed, lease = request
        target = self.rng.randint(committed, len(tokens))
        try:
            self.cache.grow(lease, target)
        except OutOfPages:
            return
        if self.rng.random() < 0.2:
            return  # the forward pass failed
        for i in range(committed, target):
            self.memory[self.slot(lease, i)] = tuple(tokens[: i + 1])
        request[1] = target

    def slot(self, lease, position):
        return lease.pages[position // self.size] * self.size + position % self.size

    def publish(self):
        tokens, committed, lease = self.rng.choice(self.live)
        self.cache.publish(lease, tokens, committed)

    def end(self):
        tokens, committed, lease = self.live.pop(self.rng.randrange(len(self.live)))
        self.cache.release(lease, tokens, committed)

    def check(self):
        self.cache.check()
        for tokens, committed, lease in self.live:
            for i in range(committed):
                held = self.memory.get(self.slot(lease, i))
                assert held == tuple(tokens[: i + 1]), (
                    "a request reads another's tokens"
                )

    def go(self, num_moves):
        for _ in range(num_moves):
            moves = [self.start, self.forward, self.forward, self.publish, self.end]
            (self.rng.choice(moves) if self.live else self.start)()
            self.check()
        while self.live:
            self.end()
            self.check()
        stats = self.cache.stats()
        held = stats["pages_private"] + stats["pages_pinned"]
        assert held == 0, "pages are held when all have ended"
        return stats


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("seed", range(12))
def test_every_request_reads_its_own_tokens(index, seed):
    stats = Run(PrefixCache(10, 1 + seed % 4, index), seed).go(300)
    assert index == "none" or stats["evicted_tokens"] > 0, "the pool was tight"


@pytest.mark.parametrize("seed", range(6))
def test_every_request_reads_its_own_tokens_when_names_collide(seed):
    with weak_names():
        Run(PrefixCache(10, 1 + seed % 4, "hash"), seed).go(300)


# ---- Faults made on purpose: each must be found --------------------------------------
class NotRemapped(PrefixCache):
    def publish(self, lease, token_ids, num_committed):
        before = list(lease.pages)
        super().publish(lease, token_ids, num_committed)
        lease.pages = before


class NotCommitted(PrefixCache):
    def publish(self, lease, token_ids, num_committed):
        room = min(len(token_ids), len(lease.pages) * self.page_size)
        super().publish(lease, token_ids, room)


class NotFull(PrefixCache):
    """Offers the page that has begun, filled up with what may follow."""

    def publish(self, lease, token_ids, num_committed):
        end = min(self.pages_for(num_committed), len(lease.pages)) * self.page_size
        super().publish(lease, [*token_ids, *[0] * self.page_size], end)


class PinsLate(PrefixCache):
    def acquire(self, match, num_tokens):
        missing = self.pages_for(num_tokens) - len(match.kv_indices.places)
        self._evict(max(0, missing - self.pool.num_free))
        return super().acquire(match, num_tokens)


class KeepsPart(PrefixCache):
    """A failed acquire leaves its lease behind."""

    def acquire(self, match, num_tokens):
        lease = super().acquire(match, match.matched_len)
        self.grow(lease, num_tokens)
        return lease


class DoesNotUnpin(PrefixCache):
    def release(self, lease, token_ids, num_committed):
        self.index.unlock = lambda handle: None
        super().release(lease, token_ids, num_committed)


class FreesPublished(PrefixCache):
    def release(self, lease, token_ids, num_committed):
        pages = list(lease.pages)
        super().release(lease, token_ids, num_committed)
        self.pool.free(pages[:1] if self.pool.is_out(pages[0]) else [])


FAULTS = {
    NotRemapped: "a lease points to a page that is not published",
    NotCommitted: "a request reads another's tokens",
    NotFull: "a request reads another's tokens",
    PinsLate: "evicted or moved",
    KeepsPart: "pages are held when all have ended",
    DoesNotUnpin: "a pin without a user",
    FreesPublished: "a page that is free and in use",
}


@both_indexes
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, index):
    with pytest.raises((AssertionError, LookupError), match=FAULTS[fault]):
        for seed in range(30):
            Run(fault(6, 3, index), seed).go(200)


def evict_under_a_lease(cache, lease, _):
    cache.index.unlock(lease.handle)
    cache.pool.free(cache.index.evict_pages(3))


SPOILED = {
    "a page that is free and in use": lambda c, a, b: c.pool.free(a.pages[-1:]),
    "a page that nobody holds": lambda c, a, b: c.leases.remove(a),
    "a private page with two owners": lambda c, a, b: a.pages.append(b.pages[-1]),
    "a page both private and published": lambda c, a, b: a.pages.append(a.pages[0]),
    "a lease points to a page that is not published": evict_under_a_lease,
    "a pin without a user": lambda c, a, b: c.index.lock(c.find([9] * 4)),
}


@pytest.mark.parametrize("message", SPOILED)
def test_check_names_what_broke(message):
    cache = PrefixCache(8, 4)
    cache.release(computed(cache, [9] * 4), [9] * 4, 4)
    a, b = computed(cache, list(range(10))), computed(cache, list(range(20, 30)))
    cache.publish(a, list(range(10)), 8)
    cache.check()
    SPOILED[message](cache, a, b)
    with pytest.raises(AssertionError, match=message):
        cache.check()


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


@both_indexes
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


@pytest.mark.parametrize("index", INDEXES)
def test_when_nobody_runs_every_page_is_free_or_evictable(index):
    """b7: many requests with common prefixes, some cut short; then silence."""
    cache, rng = PrefixCache(12, 4, index), random.Random(7)
    for _ in range(200):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        lease = computed(cache, tokens)
        cache.release(lease, tokens, rng.randrange(len(tokens) + 1))
        stats = cache.stats()
        assert stats["pages_free"] + stats["pages_evictable"] == 12
        assert stats["pages_pinned"] == stats["pages_private"] == 0
        cache.check()


@both_indexes
def test_a_page_that_nobody_can_match_displaces_none(index):
    """d10: a partial page goes back to the pool at once; a full one is not evicted."""
    cache = PrefixCache(2, 4, index)
    cache.release(computed(cache, [1] * 4), [1] * 4, 4)
    cache.release(computed(cache, [2] * 3), [2] * 3, 3)
    cache.acquire(cache.find([3]), 1)
    assert cache.find([1] * 4).matched_len == 4


@both_indexes
def test_what_was_not_computed_cannot_be_published(index):
    """More committed tokens than there are, or than pages; and a lease that is over."""
    cache = PrefixCache(8, 4, index)
    lease = cache.acquire(cache.find([1] * 6), 8)
    with pytest.raises(ValueError, match="committed"):
        cache.publish(lease, [1] * 6, 8)
    with pytest.raises(ValueError, match="committed"):
        cache.publish(lease, [1] * 50, 40)
    cache.release(lease, [1] * 6, 6)
    with pytest.raises(ValueError, match="released"):
        cache.grow(lease, 12)
    cache.check()
