# Exported from chapters/02_hashing.py (a1e4a6e7): edit the chapter.
"""Names for pages of tokens: each names its page and everything before it."""

import sys
from hashlib import blake2b
from struct import iter_unpack

from minivllm.request import ExtraKey, TokenIds, check_extra_key, encode_ids

DIGEST_BYTES = 16


def token_bytes(token_ids: TokenIds) -> bytes:
    """The ids as little-endian 32-bit integers, 4 bytes each, on every machine."""
    ids = encode_ids(token_ids)
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


_EMPTY = blake2b(digest_size=DIGEST_BYTES)  # copied for each name, never updated


def page_name(past: bytes, page: bytes) -> bytes:
    """The name of a page, from the name of its past and the bytes of its tokens."""
    name = _EMPTY.copy()
    name.update(past)
    name.update(page)
    return name.digest()


def root_hash(extra_key: ExtraKey = None) -> bytes:
    """The name of the empty past under `extra_key` (cache salt, adapter, image)."""
    check_extra_key(extra_key)
    salt = b"" if extra_key is None else ascii(extra_key).encode()
    return blake2b(salt, digest_size=DIGEST_BYTES).digest()


def page_hashes(
    token_ids: TokenIds, page_size: int, extra_key: ExtraKey = None
) -> list[bytes]:
    """Name every full page of a sequence; a partial last page gets no name.

    Each name is BLAKE2b(name of the page before + the page's tokens), 16 bytes, so two
    sequences have equal names up to page i if they, and their extra keys, are equal up
    to there. Stable across processes and machines. (The scheme is vLLM's.)
    """
    return extend_hashes([], token_ids, page_size, extra_key)


def extend_hashes(
    known: list[bytes], token_ids: TokenIds, page_size: int, extra_key: ExtraKey = None
) -> list[bytes]:
    """`page_hashes` of a sequence whose first pages are named already, in `known`."""
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    data, step = token_bytes(token_ids), 4 * page_size
    past = known[-1] if known else root_hash(extra_key)
    return known + names_after(past, data[len(known) * step :], step)


def names_after(past: bytes, data: bytes, num_bytes: int) -> list[bytes]:
    """Names of the whole pages in `data`, of `num_bytes` each, that follow `past`."""
    whole = len(data) // num_bytes * num_bytes
    pages = iter_unpack(f"{num_bytes}s", data[:whole])
    return [past := page_name(past, page) for (page,) in pages]
