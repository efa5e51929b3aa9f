"""Page names: chained, salted, stable everywhere, extended without starting over."""

import os
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.hashing import extend_hashes, page_hashes, root_hash
from minivllm.request import encode_ids

ids = st.lists(st.integers(0, 3), max_size=40)


@given(ids, ids, st.sampled_from([1, 3, 16]))
def test_equal_names_mean_equal_pasts(a, b, page_size):
    for i, (x, y) in enumerate(
        zip(page_hashes(a, page_size), page_hashes(b, page_size), strict=False)
    ):
        end = (i + 1) * page_size
        assert (x == y) == (a[:end] == b[:end])


@given(ids, st.integers(0, 40), st.sampled_from([1, 3, 16]))
def test_extending_is_hashing(tokens, cut, page_size):
    known = page_hashes(tokens[:cut], page_size, "salt")
    assert extend_hashes(known, tokens, page_size, "salt") == page_hashes(
        tokens, page_size, "salt"
    )


def test_partial_pages_have_no_name():
    assert len(page_hashes(range(493), 16)) == 30
    assert page_hashes(range(15), 16) == []


def test_a_changed_token_ends_the_shared_names():
    """Token 100 of 493 changes: pages 0 to 5 keep their names, 6 to 29 do not."""
    changed = list(range(493))
    changed[100] = 7
    pairs = zip(page_hashes(range(493), 16), page_hashes(changed, 16), strict=True)
    assert [a == b for a, b in pairs] == [True] * 6 + [False] * 24


@pytest.mark.parametrize("other", ["b", b"a", 1, ("a",), "", None])
def test_extra_keys_separate(other):
    """a9: the same ids under another adapter, salt or image share nothing."""
    assert set(page_hashes(range(64), 16, "a")).isdisjoint(
        page_hashes(range(64), 16, other)
    )


def test_names_are_the_same_in_every_process():
    """a14: names must not depend on PYTHONHASHSEED."""
    program = """if True:
        from minivllm.hashing import page_hashes
        print([name.hex() for name in page_hashes(range(64), 16, ("a", 1))])"""
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1 and root_hash() != root_hash("")


def test_ids_are_encoded_once_and_checked():
    encoded = encode_ids([1, 2])
    assert encode_ids(encoded) is encoded
    assert page_hashes(array("i", range(32)), 16) == page_hashes(range(32), 16)
    for wrong in ([1.5], ["a"], [2**40]):
        with pytest.raises(ValueError, match="32-bit"):
            encode_ids(wrong)
