# %% [markdown]
# # 2. A hash names a whole past
#
# Two requests carry a prompt of 493 tokens. They are equal but for one token, number
# 100, a digit in a timestamp. How much of the first request's K/V can the second one
# use? [492 of 493](#equal) tokens are the same, so 99.8 percent would be a natural guess.

# %% name="equal"
import random

rng = random.Random(7)
first = [rng.randrange(49_152) for _ in range(493)]
second = first.copy()
second[100] += 1
print(
    sum(a == b for a, b in zip(first, second, strict=True)),
    "of",
    len(first),
    "are equal",
)

# %% [markdown]
# Chapter 1 gave the reason why this guess is wrong: a token's keys and values depend on
# everything before it. Tokens 101 to 492 are equal as tokens, and different as K/V.
# What we may reuse ends at token 99.
#
# To find that out, an engine cannot compare a new prompt with every old one, token by
# token. It needs a name that is short, that is computed from the tokens alone, and that
# is equal exactly when the whole past is equal.
#
# ## Pages
#
# First, a decision about units. Names for every token would be many names. Engines cut
# a sequence into *pages* of 16 tokens (vLLM says *block*) and name each page. Memory
# will be handed out in the same pages in chapter 4, so one unit serves both.

# %% name="full-pages"
PAGE = 16
print(len(first) // PAGE, "full pages and", len(first) % PAGE, "tokens over")

# %% [markdown]
# The [13](#full-pages) tokens at the end have no name. A page that is not full may still change (the
# next token lands in it), and a name for something that changes names nothing.
#
# ## Content is not enough
#
# The obvious name of a page is a hash of its 16 tokens:

# %% name="by-content"
import hashlib
from array import array


def content_hash(page: list[int]) -> bytes:
    return hashlib.blake2b(array("i", page).tobytes(), digest_size=16).digest()


def surviving_pages(name_pages) -> list[bool]:
    """Which page names of `second` are also names of `first`, at the same place?"""
    return [a == b for a, b in zip(name_pages(first), name_pages(second), strict=True)]


def by_content(tokens: list[int]) -> list[bytes]:
    return [
        content_hash(tokens[i : i + PAGE])
        for i in range(0, len(tokens) - PAGE + 1, PAGE)
    ]


print(sum(surviving_pages(by_content)), "of 30 pages look reusable")

# %% [markdown]
# [29 of 30](#by-content), and 23 of those 29 are wrong. An engine that trusts these names puts K/V from
# one past under a different past. It does not crash. It answers, fluently, something
# else. The smallest case: the same 16 tokens behind two different beginnings.

# %%
question = list(range(100, 116))
french, german = [1] * 16 + question, [2] * 16 + question
print("content says equal:", content_hash(french[16:]) == content_hash(german[16:]))

# %% [markdown]
# ## A chain
#
# The repair takes one more input: the name of the page before. Page 3's name is made
# from page 2's name and page 3's tokens; page 2's name from page 1's, and so on. A name
# then stands for everything from the first token on, in 16 bytes, and making it costs
# one hash of 80 bytes, however long the past is.
#
# What goes in must be the same on every machine and in every process, or two workers
# could never speak of the same page. So: raw 32-bit little-endian integers, and a hash
# from the standard library. Python's own `hash()` is out. It is salted anew in each
# process for strings and bytes, and it has 64 bits, few enough that somebody can search for
# collisions.

# %% export="hashing.py"
"""Names for pages of tokens: each names its page and everything before it."""

import sys
from hashlib import blake2b

from minivllm.request import ExtraKey, TokenIds, check_extra_key, encode_ids

DIGEST_BYTES = 16


def token_bytes(token_ids: TokenIds) -> bytes:
    """The ids as little-endian 32-bit integers, 4 bytes each, on every machine."""
    ids = encode_ids(token_ids)
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


# %% [markdown]
# Before the first page there is no name to chain to. There is one thing to put there,
# though: the request's `extra_key`. Two tenants with different salts must not share,
# and because every later name is made from this first one, mixing the key in *once* is
# enough to keep their whole chains apart.


# %% export="hashing.py"
def root_hash(extra_key: ExtraKey = None) -> bytes:
    """The name of the empty past under `extra_key` (cache salt, adapter, image)."""
    check_extra_key(extra_key)
    salt = b"" if extra_key is None else repr(extra_key).encode()
    return blake2b(salt).digest()[:DIGEST_BYTES]


def page_name(past: bytes, page: bytes) -> bytes:
    """The name of a page, from the name of its past and the bytes of its tokens."""
    return blake2b(past + page).digest()[:DIGEST_BYTES]


def page_hashes(
    token_ids: TokenIds, page_size: int, extra_key: ExtraKey = None
) -> list[bytes]:
    """Name every full page of a sequence; a partial last page gets no name.

    Each name is BLAKE2b(name of the page before + the page's tokens), 16 bytes, so two
    sequences have equal names up to page i if they, and their extra keys, are equal up
    to there. Stable across processes and machines. (The scheme is vLLM's.)
    """
    return extend_hashes([], token_ids, page_size, extra_key)


# %% [markdown]
# A request grows while it decodes, and a page becomes full every 16 tokens. Hashing the
# 493 tokens of the prompt again each time would be silly, so the loop starts where the
# names that we have end.


# %% export="hashing.py"
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
    return [
        past := page_name(past, data[start : start + num_bytes])
        for start in range(0, len(data) - num_bytes + 1, num_bytes)
    ]


# %% name="by-chain" claims="V04"
def by_chain(tokens: list[int]) -> list[bytes]:
    return page_hashes(tokens, PAGE)


alive = surviving_pages(by_chain)
print(sum(alive), "of", len(alive), "pages survive the changed token")

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows

shown = range(12)
draw_rows(
    [
        (label, [(i, 1, "published" if ok[i] else "lost", str(i)) for i in shown])
        for label, ok in [
            ("by content", surviving_pages(by_content)),
            ("by chain", alive),
        ]
    ],
    caption="Pages 0 to 11 of the second prompt; green: has the same name as in the first. "
    "Token 100 lies in page 6. By content only page 6 differs, though the K/V of every later "
    "page differ too. By chain, page 6 and all after it have new names.",
)

# %% [markdown]
# [Six](#by-chain) pages, 96 tokens. The tokens 96 to 99, which are equal and lie before the change,
# are lost with their page: the page is the unit.
#
# The same 16 tokens under two pasts now have two names, tenants are kept apart, and
# extending gives what hashing from the start gives:

# %%
assert page_hashes(french, PAGE)[1] != page_hashes(german, PAGE)[1]
assert (
    page_hashes(first, PAGE, "tenant-a")[0] != page_hashes(first, PAGE, "tenant-b")[0]
)
assert extend_hashes(page_hashes(first[:200], PAGE), first, PAGE) == page_hashes(
    first, PAGE
)
page_hashes(first, PAGE)[0].hex()

# %% [markdown]
# The last line prints the name of the first page. It is part of this chapter's checked
# output: should it ever come out differently, on any machine or in any process, a test
# fails.
#
# Try it: which token must you change to lose all four pages, and which to lose only the last?

# %% tags=["live"]
from minivllm.hashing import page_hashes

one = list(range(64))
other = one.copy()
other[20] = 7  # change me
pairs = zip(page_hashes(one, 16), page_hashes(other, 16), strict=True)
print([a == b for a, b in pairs])

# %% [markdown]
# ## What a name does not prove
#
# Equal pasts have equal names. The other direction is only very likely: 16 bytes cannot
# be different for all possible pasts. With BLAKE2b nobody knows how to make two pasts
# with one name. Still, the engine will not take a name's word for it. When it finds a
# page by its name, it compares the page's tokens and the page before it. The comparison
# costs little, and turns "very likely right" into "right".
#
# There is also something a name cannot say at all: whether the K/V behind it have been
# *written* yet, and whether they are still there. A name is about tokens; pages have a
# life of their own (chapter 4).
#
# ## Exercise
#
# A system prompt of 1,039 tokens begins with a date, which changes at midnight. How
# many pages survive midnight, at page size 16? Move the date to the end of the prompt,
# as its last 10 tokens: how many pages survive then, and how many tokens are computed
# again in the first request of the new day?


# %% tags=["solution"] name="midnight"
def survivors(today: list[int], tomorrow: list[int]) -> int:
    pairs = zip(page_hashes(today, PAGE), page_hashes(tomorrow, PAGE), strict=True)
    return sum(a == b for a, b in pairs)


rules = [rng.randrange(49_152) for _ in range(1_029)]
monday, tuesday = [11] * 10, [12] * 10
date_first = survivors(monday + rules, tuesday + rules)
date_last = survivors(rules + monday, rules + tuesday)
recomputed = 1_039 - date_last * PAGE
print(date_first, date_last, recomputed)

# %%
assert (date_first, date_last, recomputed) == (0, 64, 15)

# %% [markdown]
# 1,029 stable tokens fill [64](#midnight) pages and leave 5 over; these 5 share a page with the date
# and go with it. At this length at most 15 tokens can be lost that way, 1.4 percent.
# Moving one line of a template made the difference between nothing and nearly all.
#
# A list of names answers "is this page known?". It does not answer "which of the known
# pages goes when memory is full?", nor "what else hangs on it?". For that, pages must
# know their neighbours. Chapter 3 arranges them in a tree.
