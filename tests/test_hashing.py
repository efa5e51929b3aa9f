"""Page names: chained, salted, stable everywhere, extended without starting over."""

import os
import struct
import subprocess
import sys
from array import array
from hashlib import blake2b
from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import hashing
from minivllm.hashing import (
    DIGEST_BYTES,
    extend_hashes,
    page_hashes,
    page_name,
    root_hash,
    token_bytes,
)
from minivllm.request import encode_ids

few_ids = st.lists(st.integers(0, 1), max_size=40)  # few: so that pasts often agree
any_ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70)
page_sizes = st.sampled_from([1, 2, 3, 16])
keys = st.recursive(
    st.none()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.integers(-(2**64) + 1, 2**64 - 1),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=4,
)


def digest(data):
    return blake2b(data, digest_size=16).digest()


def naive_hashes(ids, page_size, extra_key=None):
    """The same chain, written as it is explained, and sharing no code with it."""
    names = [digest(b"" if extra_key is None else ascii(extra_key).encode("ascii"))]
    for page in range(len(ids) // page_size):
        tokens = [int(i) for i in ids[page * page_size : (page + 1) * page_size]]
        names.append(digest(names[-1] + struct.pack(f"<{page_size}i", *tokens)))
    return names[1:]


@given(any_ids, page_sizes, keys)
def test_the_chain_is_what_the_chapter_says(ids, page_size, extra_key):
    """Protects the scheme: other programs must find the same names."""
    expected = naive_hashes(ids, page_size, extra_key)
    assert page_hashes(ids, page_size, extra_key) == expected


def test_known_answers():
    """The first is of nothing; `b2sum -l 128` says the same of all three."""
    assert root_hash().hex() == "cae66941d9efbd404e4d88758ea67670"
    assert [name.hex() for name in page_hashes(range(40), 16, ("salt", 7))] == [
        "6ded4d57c7b4b0578efd531ea51cd843",
        "c49f45e5d897bddbcdcc52bff16a9c2b",
    ]


@given(few_ids, few_ids, page_sizes)
def test_equal_names_mean_equal_pasts(a, b, page_size):
    """V04: a name covers everything before it, and nothing after it."""
    names = page_hashes(a, page_size), page_hashes(b, page_size)
    for i, (x, y) in enumerate(zip(*names, strict=False)):
        end = (i + 1) * page_size
        assert (x == y) == (a[:end] == b[:end])


def test_a_changed_token_ends_the_shared_names():
    """Token 100 of 493 changes: pages 0 to 5 keep their names, 6 to 29 do not."""
    changed = list(range(493))
    changed[100] = 7
    pairs = zip(page_hashes(range(493), 16), page_hashes(changed, 16), strict=True)
    assert [a == b for a, b in pairs] == [True] * 6 + [False] * 24


def test_equal_pages_of_one_prompt_have_different_names():
    """The same 16 tokens again and again: each has more of them before it."""
    assert len(set(page_hashes([5] * 160, 16))) == 10


@given(st.integers(0, 100), page_sizes)
def test_only_full_pages_have_names(num_tokens, page_size):
    names = page_hashes(range(num_tokens), page_size)
    assert len(names) == num_tokens // page_size
    assert {len(name) for name in names} <= {DIGEST_BYTES}


@given(any_ids, st.lists(st.integers(0, 70), max_size=4), page_sizes, keys)
def test_extending_is_hashing(ids, cuts, page_size, extra_key):
    """A request that grows in any steps ends with the names of one that came whole."""
    names = []
    for cut in [*sorted(cuts), len(ids)]:
        before = list(names)
        longer = extend_hashes(names, ids[:cut], page_size, extra_key)
        assert names == before, "the caller's list is not touched"
        names = longer
    assert names == page_hashes(ids, page_size, extra_key)


def test_extending_hashes_only_what_is_new(monkeypatch):
    """30 pages are named; while 128 tokens are decoded 8 more fill, one hash each."""
    counting = Mock(wraps=blake2b(digest_size=DIGEST_BYTES))
    monkeypatch.setattr(hashing, "_EMPTY", counting)
    names = page_hashes(range(493), 16)
    assert counting.copy.call_count == 30
    for length in range(494, 622):
        names = extend_hashes(names, range(length), 16)
    assert counting.copy.call_count == len(names) == 38


def test_the_chain_is_made_of_page_names():
    """An index walks with `page_name` and must meet what `page_hashes` made."""
    chain = [root_hash("salt"), *page_hashes(range(64), 16, "salt")]
    pages = [token_bytes(range(i, i + 16)) for i in range(0, 64, 16)]
    for page, (past, name) in zip(pages, pairwise(chain), strict=True):
        assert page_name(past, page) == name


@given(keys, keys)
def test_extra_keys_separate_whole_chains(one, other):
    """a9, a10: the same ids under another adapter, salt or image share nothing."""
    names = [page_hashes(range(64), 16, key) for key in (one, other)]
    if one == other:
        assert names[0] == names[1]
    else:
        assert set(names[0]).isdisjoint(names[1])


@pytest.mark.parametrize("other", ["b", b"a", 1, "1", ("a",), ("a", "b"), "", None])
def test_the_type_and_the_bounds_of_a_key_count(other):
    """a10: text and bytes, 1 and "1", one part and two are different keys."""
    for key in ("a", ("ab",), ("1",), -1):
        mine, theirs = (
            page_hashes(range(64), 16, key),
            page_hashes(range(64), 16, other),
        )
        assert set(mine).isdisjoint(theirs)


def test_a_key_is_written_in_ascii():
    """Which letters `repr` escapes depends on the Python; the name must not."""
    assert root_hash("é\U0001fae8") == digest(b"'\\xe9\\U0001fae8'")


@pytest.mark.parametrize("key", [True, 1.0, ["a"], ("a", ["b"]), ("a", 1.5), {"a"}])
def test_other_kinds_of_keys_are_refused(key):
    with pytest.raises(ValueError, match="extra_key must be"):
        page_hashes(range(16), 16, key)


PROGRAM = """if True:
    from minivllm.hashing import page_hashes
    print([name.hex() for name in page_hashes(range(64), 16, ("a", b"b", 1))])"""


def test_names_are_the_same_in_every_process():
    """a14: names must not depend on PYTHONHASHSEED."""
    mine = [name.hex() for name in page_hashes(range(64), 16, ("a", b"b", 1))]
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(mine)


@given(any_ids)
def test_any_sequence_of_ids_will_do(ids):
    expected = page_hashes(ids, 3)
    for same in (tuple(ids), array("i", ids), array("q", ids)):
        assert page_hashes(same, 3) == expected


def test_bytes_are_little_endian_on_every_machine(monkeypatch):
    ids = array("i", [1, -2, 2**31 - 1])
    assert token_bytes(ids) == struct.pack("<3i", *ids)
    other = "big" if sys.byteorder == "little" else "little"
    monkeypatch.setattr(sys, "byteorder", other)
    assert token_bytes(ids) == struct.pack(">3i", *ids), "turned around there"
    assert list(ids) == [1, -2, 2**31 - 1], "the request's own array is left alone"


def test_ids_are_encoded_once_and_checked():
    encoded = encode_ids([1, 2])
    assert encode_ids(encoded) is encoded
    for wrong in ([1.5], ["a"], [2**40], "12", b"12"):
        with pytest.raises(ValueError, match="token ids must be"):
            page_hashes(wrong, 1)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"page_size must be .*not {size}"):
            page_hashes([1], size)
