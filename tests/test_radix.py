"""Both indexes against a twin that is obviously right, and cases that others missed."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.hashing import page_hashes
from minivllm.prefix_cache import HashIndex
from minivllm.radix import RadixCache, Slots, StaleMatch

A, B, C, D, E = range(5)


class Twin:
    """Every prefix in whole pages -> its page. Slow and right."""

    def __init__(self, page_size, eviction):
        self.page_size, self.eviction, self.tick = page_size, eviction, 0
        self.pages = {}  # (extra key, tokens) -> [slot, access, hits, created, locks]

    def prefixes(self, tokens, extra):
        step = self.page_size
        return [
            (extra, tuple(tokens[:end])) for end in range(step, len(tokens) + 1, step)
        ]

    def match(self, tokens, extra):
        found = []
        for key in self.prefixes(tokens, extra):
            if key not in self.pages:
                break
            found.append(self.pages[key][0])
        return found

    def touch(self, tokens, extra, hits):
        self.tick += 1
        for key in self.prefixes(tokens, extra):
            self.pages[key][1] = self.tick
            self.pages[key][2] += hits

    def insert(self, tokens, slots, extra, hits=1):
        """Slots are one a page, for all pages; `hits` 0 is what `extend` does."""
        known = len(self.match(tokens, extra))
        for key, slot in list(zip(self.prefixes(tokens, extra), slots, strict=True))[
            known:
        ]:
            self.pages[key] = [slot, 0, 0, self.tick + 1, 0]
        self.touch(tokens, extra, hits)
        return known * self.page_size

    def lock(self, tokens, extra, change):
        for key in self.prefixes(tokens, extra):
            self.pages[key][4] += change

    def evict(self, num_pages):
        freed = []
        while len(freed) < num_pages:
            parents = {
                (extra, tokens[: -self.page_size]) for extra, tokens in self.pages
            }
            free = [
                k for k, page in self.pages.items() if not page[4] and k not in parents
            ]
            if not free:
                break
            order = {
                "lru": lambda p: p[1],
                "lfu": lambda p: (p[2], p[1]),
                "fifo": lambda p: p[3],
            }
            victim = min(free, key=lambda k: order[self.eviction](self.pages[k]))
            freed.append(self.pages.pop(victim)[0])
        return freed


class Comparison(RuleBasedStateMachine):
    """Radix tree, hash table and twin get the same operations and must agree."""

    @initialize(
        page_size=st.sampled_from([1, 3, 16]),
        eviction=st.sampled_from(["lru", "lfu", "fifo"]),
    )
    def start(self, page_size, eviction):
        self.page_size = page_size
        self.twin = Twin(page_size, eviction)
        self.indexes = [RadixCache(page_size, eviction), HashIndex(page_size, eviction)]
        self.locks = []
        self.next_slot = 0

    def tokens(self, pages, rest):
        """Pages of equal tokens, so that prefixes collide; and a rest."""
        whole = [page for page in pages for _ in range(self.page_size)]
        return whole + [9] * (rest % self.page_size)

    sequences = st.lists(st.integers(0, 1), max_size=6)
    extras = st.sampled_from([None, None, "salt"])

    @rule(pages=sequences, rest=st.integers(0, 15), extra=extras)
    def insert(self, pages, rest, extra):
        tokens = self.tokens(pages, rest)
        firsts = [self.next_slot + i * self.page_size for i in range(len(pages))]
        self.next_slot += len(pages) * self.page_size
        if pages:
            known = self.twin.insert(tokens, firsts, extra)
        for index in self.indexes:
            was_known = index.insert(tokens, self.slots(firsts), extra)
            assert was_known == (known if pages else 0)

    def slots(self, firsts):
        return Slots(array("i", firsts), self.page_size)

    @rule(pages=sequences, rest=st.integers(0, 15), extra=extras)
    def match(self, pages, rest, extra):
        tokens = self.tokens(pages, rest)
        expected = self.twin.match(tokens, extra)
        for index in self.indexes:
            match = index.match_prefix(tokens, extra)
            assert list(match.kv_indices.places) == expected
            assert (
                match.matched_len
                == len(expected) * self.page_size
                == len(match.kv_indices)
            )

    @rule(pages=sequences, extra=extras)
    def lock(self, pages, extra):
        tokens = self.tokens(pages, 0)
        tokens = tokens[: len(self.twin.match(tokens, extra)) * self.page_size]
        handles = [
            index.lock(index.match_prefix(tokens, extra)) for index in self.indexes
        ]
        self.twin.touch(tokens, extra, 1)
        self.twin.lock(tokens, extra, +1)
        self.locks.append((tokens, extra, handles))

    @rule(which=st.integers(0, 100), pages=sequences, rest=st.integers(0, 15))
    def extend(self, which, pages, rest):
        """A lock grows by whole pages: as if all of it were inserted from the root."""
        if not self.locks:
            return
        place = which % len(self.locks)
        tokens, extra, handles = self.locks[place]
        more = self.tokens(pages, rest)
        firsts = [self.next_slot + i * self.page_size for i in range(len(pages))]
        self.next_slot += len(pages) * self.page_size
        whole = tokens + more[: len(pages) * self.page_size]
        held = len(tokens) // self.page_size
        known = self.twin.insert(whole, [None] * held + firsts, extra, hits=0)
        for index, handle in zip(self.indexes, handles, strict=True):
            was_known, slots = index.extend(handle, more, array("i", firsts))
            assert was_known == known - len(tokens)
            assert list(slots) == self.twin.match(whole, extra)[held:]
        self.twin.lock(tokens, extra, -1)
        self.twin.lock(whole, extra, +1)
        self.locks[place] = (whole, extra, handles)

    @rule(which=st.integers(0, 100))
    def unlock(self, which):
        if self.locks:
            tokens, extra, handles = self.locks.pop(which % len(self.locks))
            self.twin.lock(tokens, extra, -1)
            for index, handle in zip(self.indexes, handles, strict=True):
                index.unlock(handle)
                with pytest.raises(ValueError):
                    index.unlock(handle)

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages):
        expected = self.twin.evict(num_pages)
        for index in self.indexes:
            assert list(index.evict_pages(num_pages)) == expected

    @invariant()
    def sizes(self):
        if not hasattr(self, "twin"):
            return
        total = len(self.twin.pages) * self.page_size
        protected = (
            sum(page[4] > 0 for page in self.twin.pages.values()) * self.page_size
        )
        for index in self.indexes:
            assert (index.total_size, index.protected_size) == (total, protected)
            index.check()


Comparison.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None
)
TestBothIndexesAgreeWithTheTwin = Comparison.TestCase


def test_25_shared_tokens_reuse_16():
    cache = RadixCache(page_size=16)
    cache.insert(list(range(25)) + [70] * 15, range(1000, 1040))
    match = cache.match_prefix(list(range(25)) + [80] * 15)
    assert match.matched_len == 16
    assert match.kv_indices == list(range(1000, 1016))
    assert match.kv_indices[-1] == 1015 and match.kv_indices[2:4] == [1002, 1003]
    with pytest.raises(IndexError):
        match.kv_indices[16]


def test_match_changes_nothing():
    """b5: a lookup that ends inside a node must not split it."""
    cache = RadixCache(page_size=4)
    cache.insert(range(8), range(8))
    before = [(node.key, node.last_access) for node in cache.nodes()]
    cache.match_prefix([0, 1, 2, 3, 9])
    assert [(node.key, node.last_access) for node in cache.nodes()] == before


def test_lock_protects_exactly_the_match():
    """b5: lock [1..4] of [1..8], insert a fork: protected 4; after unlock 0 and 12."""
    cache = RadixCache(page_size=4)
    cache.insert(range(1, 9), range(8))
    handle = cache.lock(cache.match_prefix([1, 2, 3, 4, 9]))
    cache.insert([1, 2, 3, 4, 9, 10, 11, 12], range(100, 108))
    assert (cache.protected_size, cache.evictable_size) == (4, 8)
    cache.unlock(handle)
    assert (cache.protected_size, cache.evictable_size) == (0, 12)
    cache.check()


def test_lock_survives_a_split_below_and_above():
    """A split copies the locks of an edge that is locked below; both halves stay."""
    cache = RadixCache(page_size=1)
    cache.insert([A, B, C, D], range(4))
    handle = cache.lock(cache.match_prefix([A, B, C, D]))
    cache.insert([A, B, E], range(10, 13))
    assert cache.evict(10) == [12] and cache.protected_size == 4
    cache.check()
    cache.unlock(handle)
    assert cache.evict(10) == [3, 2, 1, 0]


def test_split_refreshes_only_the_matched_half():
    cache = RadixCache(page_size=1)
    cache.insert([A, B, C, D], range(4))
    cache.insert([E], [9])
    cache.insert([A, B], [0, 1])
    assert cache.evict(2) == [3, 2], "C and D were not asked for: they are older than E"
    assert cache.evict(1) == [9]


def test_eviction_frees_exactly_what_is_asked():
    """b11: three leaves of 4, evict 4 frees 4; a long leaf is trimmed from its tail."""
    cache = RadixCache(page_size=4)
    for i in range(3):
        cache.insert([i] * 4, range(4 * i, 4 * i + 4))
    assert cache.evict(4) == [0, 1, 2, 3] and cache.total_size == 8
    cache.insert([7] * 16, range(100, 116))
    assert cache.evict(9) == [4, 5, 6, 7, 8, 9, 10, 11, 112, 113, 114, 115]


def test_five_thousand_nested_prefixes():
    """b10: nothing recurses."""
    cache = RadixCache(page_size=1)
    ids = array("i", range(5000))
    for n in range(1, 5001):
        cache.insert(ids[:n], Slots(ids[:n], 1))
    match = cache.match_prefix(range(5000))
    assert match.matched_len == cache.total_size == 5000
    handle = cache.lock(match)
    cache.check()
    cache.unlock(handle)
    assert len(cache.evict(10_000)) == 5000 and cache.total_size == 0


def test_five_thousand_nodes_in_a_row():
    """b10, where no leaf grows: under FIFO each prefix stays a node of its own."""
    cache = RadixCache(1, "fifo")
    handle = cache.lock(cache.match_prefix([]))
    for n in range(5000):
        cache.extend(handle, [n], array("i", [n]))
    assert len(list(cache.nodes())) == 5000
    assert cache.match_prefix(range(5000)).matched_len == cache.protected_size == 5000
    cache.check()
    cache.unlock(handle)
    assert len(cache.evict(10_000)) == 5000 and cache.total_size == 0


def test_unaligned_keys():
    """b8: keys of 3 and 7 ids at page size 4 match 0 and 4; no node is empty."""
    cache = RadixCache(page_size=4)
    assert cache.insert([1, 2, 3], [0, 1, 2]) == 0 and cache.total_size == 0
    cache.insert([1, 2, 3, 4, 5, 6, 7], range(7))
    assert cache.match_prefix([1, 2, 3]).matched_len == 0
    assert cache.match_prefix([1, 2, 3, 4, 5, 6, 7]).matched_len == 4
    cache.check()


def test_a_match_that_was_evicted_cannot_be_locked():
    for cache in (RadixCache(4), HashIndex(4)):
        cache.insert(range(8), range(8))
        match = cache.match_prefix(range(8))
        cache.evict_pages(1)
        with pytest.raises(StaleMatch):
            cache.lock(match)
        assert cache.protected_size == 0


def test_bad_arguments():
    with pytest.raises(ValueError, match="page_size"):
        RadixCache(0)
    with pytest.raises(ValueError, match="eviction"):
        RadixCache(16, "random")
    cache = RadixCache(4)
    with pytest.raises(ValueError, match="slots"):
        cache.insert(range(8), range(7))
    for slots in ([0, 2, 4, 6], [0, 2, 1, 3]):
        with pytest.raises(ValueError, match="consecutive"):
            cache.insert(range(4), slots)
    with pytest.raises(ValueError, match="32-bit"):
        cache.insert(range(4), range(2**31, 2**31 + 4))
    with pytest.raises(ValueError, match="multiple of 4"):
        RadixCache(4, unit=4).insert(range(4), range(2, 6))
    assert cache.total_size == 0


def test_hash_hit_is_confirmed_by_tokens_and_parent(monkeypatch):
    """Two pasts with one name must not share: the tokens are compared as well."""
    import minivllm.prefix_cache as module

    monkeypatch.setattr(module, "page_name", lambda past, page: b"x")
    monkeypatch.setattr(
        module, "names_after", lambda past, data, size: [b"x"] * (len(data) // size)
    )
    index = HashIndex(4)
    index.insert([1] * 4, range(4))
    assert index.match_prefix([2] * 4).matched_len == 0
    assert index.match_prefix([1] * 4).matched_len == 4
    assert index.insert([2] * 4, range(4, 8)) == 0 and index.total_size == 4, (
        "the name is taken: not entered"
    )
    index.check()


def two_runs(name_of_the_page, astray=b"\3"):
    """A table with [1 x 4, 2 x 4] and [3 x 4], and one name made to point astray."""
    index = HashIndex(4)
    index.insert([1] * 4 + [2] * 4, range(8))
    index.insert([3] * 4, range(8, 12))
    stranger = next(n for n in index.nodes() if n.key.startswith(astray))
    index._table[page_hashes(name_of_the_page, 4)[-1]] = stranger
    return index


def test_a_stolen_name_gives_no_page():
    """A name that collides under the same parent: the tokens are compared."""
    index = two_runs([9] * 4)
    match = index.match_prefix([9] * 4)
    assert match.matched_len == 0
    assert index.lock(match).node.parent is None, "the way ends at the root"


def test_a_stolen_name_within_a_run_gives_no_page():
    """A name that collides with that of a page of the same run."""
    index = two_runs([1] * 4 + [9] * 4, astray=b"\1")
    match = index.match_prefix([1] * 4 + [9] * 4)
    assert (match.matched_len, list(match.kv_indices)) == (4, [0, 1, 2, 3])


def test_a_name_under_another_parent_gives_no_page():
    """A name that collides after another past, with the same tokens."""
    index = two_runs([1] * 4 + [2] * 4 + [3] * 4)
    assert index.match_prefix([1] * 4 + [2] * 4 + [3] * 4).matched_len == 8


@given(
    uses=st.lists(st.tuples(st.sampled_from("ilx"), st.integers(0, 5)), max_size=30),
    index=st.sampled_from([RadixCache, HashIndex]),
)
def test_leaves_go_in_the_order_of_their_last_use(uses, index):
    """Six leaves; a use is an insert, or a lock that ends at once or much later."""
    cache, held, order = index(1), [], []
    for kind, leaf in [("i", leaf) for leaf in range(6)] + uses:
        order = [other for other in order if other != leaf] + [leaf]
        if kind == "i":
            cache.insert([leaf], [leaf])
            continue
        held.append(cache.lock(cache.match_prefix([leaf])))
        if kind == "l":
            cache.unlock(held.pop())
    for handle in held:
        cache.unlock(handle)
    assert [cache.evict(1) for _ in range(6)] == [[leaf] for leaf in order]


def long_history(page_size, eviction, num_steps, seed=0):
    """The rules of the comparison, in a long random order that keeps the tree full."""
    rng, machine = random.Random(seed), Comparison()
    machine.start(page_size=page_size, eviction=eviction)
    for _ in range(num_steps):
        pages = [rng.randrange(2) for _ in range(rng.randrange(7))]
        extra, rest = rng.choice([None, None, "salt"]), rng.randrange(16)
        which = rng.randrange(100)
        rule = rng.choice(["insert", "match", "lock", "extend", "unlock", "evict"])
        if rule in ("insert", "match"):
            getattr(machine, rule)(pages=pages, rest=rest, extra=extra)
        elif rule == "lock" and len(machine.locks) < 4:
            machine.lock(pages=pages, extra=extra)
        elif rule == "extend":
            machine.extend(which=which, pages=pages[:2], rest=rest)
        elif rule == "unlock":
            machine.unlock(which=which)
        elif rule == "evict":
            machine.evict(num_pages=rng.randrange(6))
        machine.sizes()


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo"])
def test_thousands_of_steps(page_size, eviction):
    long_history(page_size, eviction, num_steps=2_000)


@pytest.mark.parametrize("index", [RadixCache, HashIndex])
def test_a_lock_covers_the_node_that_it_ends_at(index):
    """b3, b4: the matched node itself is protected, and the root is no match."""
    cache = index(4)
    cache.insert(range(4), range(4))
    cache.insert(range(8), range(8))
    handle = cache.lock(cache.match_prefix(range(8)))
    assert (cache.protected_size, cache.evict(8)) == (8, [])
    cache.unlock(handle)
    assert cache.protected_size == 0 and len(cache.evict(8)) == 8


@pytest.mark.parametrize("index", [RadixCache, HashIndex])
def test_sizes_never_go_below_zero(index):
    """b6: nested inserts, a lock across a split, and an unlock too many."""
    cache = index(4)
    cache.insert([1, 2, 3, 4], range(4))
    cache.insert(range(1, 9), range(8))
    handle = cache.lock(cache.match_prefix(range(1, 9)))
    cache.insert([1, 2, 3, 4, 9, 9, 9, 9], range(20, 28))
    assert (cache.protected_size, cache.evictable_size, cache.total_size) == (8, 4, 12)
    cache.unlock(handle)
    with pytest.raises(ValueError, match="unlocked before"):
        cache.unlock(handle)
    assert (cache.protected_size, cache.evictable_size, cache.total_size) == (0, 12, 12)
    cache.check()


@pytest.mark.parametrize("index", [RadixCache, HashIndex])
def test_a_stale_lock_leaves_no_root(index):
    cache = index(4)
    for salt in "abc":
        cache.insert(range(4), range(4), salt)
        match = cache.match_prefix(range(4), salt)
        cache.evict(4)
        with pytest.raises(StaleMatch):
            cache.lock(match)
    assert not cache._roots
    handle = cache.lock(cache.match_prefix([1]))
    with pytest.raises(ValueError, match="2 pages for 4 tokens"):
        cache.extend(handle, range(4), array("i", [0, 4]))
