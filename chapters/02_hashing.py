# %% [markdown]
# # 2. A hash names a whole past
#
# Two requests carry a prompt of 493 tokens. They are equal but for one token, number 100,
# a digit in a timestamp. How much of the first request's K/V can the second one use?
# [492 of 493](#equal) tokens are the same, so 99.8 percent would be a natural guess.

# %% name="equal"
import random

rng = random.Random(7)
first = [rng.randrange(49_152) for _ in range(493)]
second = first.copy()
second[100] += 1
same = sum(a == b for a, b in zip(first, second, strict=True))
print(same, "of", len(first), "are equal")

# %% [markdown]
# Chapter 1 gave the reason why this guess is wrong: a token's keys and values depend on
# everything before it. Tokens 101 to 492 are equal as tokens, and different as K/V. What
# we may reuse ends at token 99. That is about a fifth.
#
# How does an engine find that out? It holds the K/V of thousands of old prompts, and
# cannot lay a new prompt beside each of them, token by token. It wants to look the answer
# up in a table. So it needs a *name*: short, computed from the tokens alone, and equal
# for two pieces of K/V exactly when one may stand in for the other.
#
# This chapter builds such names. The misconception that it is out to remove sits in the
# word "hash" itself: that a hash says what is *in* a piece of a prompt.
#
# ## A page is what gets a name
#
# First, a decision about units. A name for every token would make as many names as
# tokens. Engines cut a sequence into *pages* of 16 tokens (vLLM says *block*) and name
# each page. Memory will be handed out in the same pages in chapter 4, so one unit serves
# both.

# %% name="full-pages"
PAGE = 16


def pages_of(tokens: list[int], size: int = PAGE) -> list[list[int]]:
    """Cut a sequence into full pages; what is left over is dropped."""
    return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]


print(len(pages_of(first)), "full pages and", len(first) % PAGE, "tokens over")

# %% [markdown]
# The [13](#full-pages) tokens at the end get no name. Their page is not full, so the next
# token will land in it, and a name for something that still changes would be wrong a
# moment later. They cannot be shared, and the next request computes them again.
#
# That is a price, and the page size sets it. Small pages lose little and need many names;
# large pages the other way round. For our prompt, and beside it one of 1,039 tokens:

# %% name="over"
print("page size: names + tokens over")
for size in (1, 4, 16, 64, 256):
    short_one, long_one = divmod(493, size), divmod(1_039, size)
    print(f"{size:4}: {short_one[0]:5} + {short_one[1]:3}", end=" ")
    print(f"· {long_one[0]:5,} + {long_one[1]:2}")
print(f"{PAGE - 1} of 1,039: {(PAGE - 1) / 1_039:.1%}")

# %% [markdown]
# At page size 16 at most [15](#over) tokens of any prompt are left over. For 1,039 tokens
# it is exactly 15, the worst case, and still [1.4](#over) percent. At 256 a short prompt
# can lose nearly half of itself: [237](#over) of 493. Sixteen is vLLM's usual choice, and
# the book's.
#
# ## Its content alone is the wrong name
#
# The obvious name of a page is a hash of its 16 tokens. Two equal pages get one name,
# wherever they stand:

# %% name="by-content"
import hashlib
from array import array


def content_hash(page: list[int]) -> bytes:
    return hashlib.blake2b(array("i", page).tobytes(), digest_size=16).digest()


def surviving_pages(name_pages) -> list[bool]:
    """Which page names of `second` are also names of `first`, at the same place?"""
    return [a == b for a, b in zip(name_pages(first), name_pages(second), strict=True)]


def by_content(tokens: list[int]) -> list[bytes]:
    return [content_hash(page) for page in pages_of(tokens)]


looks_reusable = surviving_pages(by_content)
wrong = sum(ok for i, ok in enumerate(looks_reusable) if i > 100 // PAGE)
print(sum(looks_reusable), "of 30 pages look reusable;", wrong, "of them are not")

# %% [markdown]
# [29](#by-content) pages look reusable, and [23](#by-content) of those lie behind the
# changed token. Their K/V were made under another past.
#
# What happens if an engine uses them all the same? The smallest case is one page of 16
# tokens, a question, behind two different beginnings: the one asks for an answer in
# French, the other in German. We need no model to see it, only a stand-in for what
# chapter 1 measured: that a token's K/V carry what came before. Here they carry one
# thing, the language that was asked for.

# %% name="merci"
LANGUAGE = {1: "French", 2: "German"}
THANKS = {"French": "merci", "German": "danke"}


def kv(tokens: list[int], cached: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What each token's K/V carry; those in `cached` are taken as they are."""
    carried = list(cached)
    for token in tokens[len(carried) :]:
        carried.append(LANGUAGE.get(token, carried[-1] if carried else ""))
    return tuple(carried)


question = list(range(100, 116))
french, german = [1] * 16 + question, [2] * 16 + question
ask = [*german, 9]  # one more token, at which the model answers

assert content_hash(french[16:]) == content_hash(german[16:])
mixed = kv(german)[:16] + kv(french)[16:]  # its own page 0, and page 1 by content
print("computed alone:         ", THANKS[kv(ask)[-1]])
print("page 1 found by content:", THANKS[kv(ask, mixed)[-1]])

# %% tags=["hide-input"]
from minivllm.drawing import Steps, draw_rows


def row(label, says, middle, answer):
    beginning = (0, 1, "plain", f"in {says}")
    return label, [beginning, (1, 1, *middle), (2, 0.5, "plain", answer)]


draw_rows(
    [
        row("first", "French", ("plain", "question"), "merci"),
        row("second, alone", "German", ("plain", "question"), "danke"),
        row("by content", "German", ("lost", "first's K/V"), "merci"),
    ],
    unit=96,
    caption="The same page of tokens behind two beginnings. In the last row the page was found "
    "by its content (red): its K/V were computed behind the French beginning, and the answer "
    "follows them.",
)

# %% [markdown]
# The German request says [merci](#merci). Nothing crashed, no number is out of range, and
# the answer is fluent. A person who reads the log sees a prompt in order and a cache with
# a splendid hit rate. This is why a name that is *nearly* right is worse than none: its
# faults look like the model's.
#
# ## The name of the past goes in
#
# The repair takes one more input: the name of the page before. Page 3's name is made from
# page 2's name and page 3's tokens; page 2's name from page 1's, and so on. A name then
# stands for everything from the first token on. It is 16 bytes long and costs one hash of
# 80 bytes (16 of name, 64 of tokens), however long the past is. A chain of hashes like
# this one ties each commit of a Git repository to its history.
#
# ### Bytes, so that nothing can be read in two ways
#
# Before a token can be hashed it must become bytes. The quick way is to print the list
# and hash the text. Two things can go wrong, in opposite directions:

# %% name="as-text"
joined = ["".join(map(str, ids)) for ids in ([1, 23], [12, 3])]
print("joined, no separator:", joined)
same, texts = [1, 23] == [True, 23], [str([1, 23]), str([True, 23])]
print("equal lists:", same, "· their texts:", *texts)
text, raw = str(first).encode(), array("i", first).tobytes()
print(f"one prompt: {len(text):,} bytes of text, {len(raw):,} raw")

# %% [markdown]
# Joined without a separator, two different lists are one text: a collision that no hash
# function can undo, because it happens before the hash. With separators the reverse can
# happen: equal lists that print differently, so a page that is there is not found. And
# the text is longer than the raw form, [1,972](#as-text) bytes: 32-bit integers, four
# bytes a token, at fixed places. There is one way to read those. An `array("i")` holds
# them in that form already, so nothing is converted at all.
#
# What does the detour over text cost in time? (Times depend on the machine. What is
# marked ≈ was measured when this page was made.)

# %% name="text-time"
from timeit import repeat


def best_us(way, number: int = 500) -> str:
    """The best of seven, per call."""
    return f"≈ {min(repeat(way, number=number, repeat=7)) / number * 1e6:.2f} µs"


ids = array("i", first)
print("as text:     ", best_us(lambda: hashlib.blake2b(str(first).encode()).digest()))
print("as raw bytes:", best_us(lambda: hashlib.blake2b(ids.tobytes()).digest()))

# %% [markdown]
# So the module begins with the bytes. On the rare machine that stores integers with the
# high byte first they are turned around: a name must be the same on every machine, or two
# servers could never speak of the same page.

# %% export="hashing.py"
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


# %% [markdown]
# ### A link of the chain
#
# The hash function is BLAKE2b, asked for 16 bytes. It is in Python's standard library,
# and nobody knows a way to make two inputs with one output; below we shall see what that
# is worth. A hash object can be made for each name, or made once and copied while it is
# empty:


# %% name="copied"
data, empty = bytes(80), blake2b(digest_size=16)


def copied() -> bytes:
    fresh = empty.copy()
    fresh.update(data)
    return fresh.digest()


print("made each time:", best_us(lambda: blake2b(data, digest_size=16).digest()))
print("copied:        ", best_us(copied))

# %% [markdown]
# Making the object, with its parameters to be read and checked, is a good part of the
# cost. So one empty hash is made, and copied for each name.

# %% export="hashing.py"
_EMPTY = blake2b(digest_size=DIGEST_BYTES)  # copied for each name, never updated


def page_name(past: bytes, page: bytes) -> bytes:
    """The name of a page, from the name of its past and the bytes of its tokens."""
    name = _EMPTY.copy()
    name.update(past)
    name.update(page)
    return name.digest()


# %% [markdown]
# Before the first page there is no name to chain to. There is one thing to put there,
# though: the request's `extra_key`, which says that equal tokens are *not* enough. It
# gets a section of its own below.


# %% export="hashing.py"
def root_hash(extra_key: ExtraKey = None) -> bytes:
    """The name of the empty past under `extra_key` (cache salt, adapter, image)."""
    check_extra_key(extra_key)
    salt = b"" if extra_key is None else ascii(extra_key).encode()
    return blake2b(salt, digest_size=DIGEST_BYTES).digest()


# %% [markdown]
# Naming a prompt is a walk along its pages, each name made from the one before. The loop
# can start in the middle, behind pages that have names already. Naming from the start is
# then the case in which there are none.


# %% export="hashing.py"
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


# %% [markdown]
# Back to the two prompts. Which pages of the second have a name that the first one has,
# too?


# %% name="by-chain" claims="V04"
def by_chain(tokens: list[int]) -> list[bytes]:
    return page_hashes(tokens, PAGE)


alive = surviving_pages(by_chain)
print(sum(alive), "of", len(alive), "pages survive:", sum(alive) * PAGE, "tokens")

# %% tags=["hide-input"]
shown = range(12)
draw_rows(
    [
        (label, [(i, 1, "published" if ok[i] else "lost", str(i)) for i in shown])
        for label, ok in [("by content", looks_reusable), ("by chain", alive)]
    ],
    unit=24,
    caption="Pages 0 to 11 of the second prompt; green: has the same name as in the first. "
    "Token 100 lies in page 6. By content only page 6 differs, though the K/V of every later "
    "page differ too. By chain, page 6 and all after it have new names.",
)

# %% [markdown]
# [Six](#by-chain) pages, [96](#by-chain) tokens. One early change alters every later
# name, and that is exactly what it does to the K/V. Tokens 96 to 99 are equal and lie
# before the change, but share a page with it, so they go too.
#
# The same question under two beginnings has two names now. And the name of the prompt's
# first page, printed here, is part of the book's checked output: should it ever come out
# otherwise, on any machine, a test fails.

# %% name="two-parents"
print("same name under both:", by_chain(french)[1] == by_chain(german)[1])
print("first page of the prompt:", by_chain(first)[0].hex())

# %% [markdown]
# Try it: which token must you change to lose all four pages, and which to lose only the
# last?

# %% tags=["live"]
from minivllm.hashing import page_hashes

one = list(range(64))
other = one.copy()
other[20] = 7  # change me
pairs = zip(page_hashes(one, 16), page_hashes(other, 16), strict=True)
print([a == b for a, b in pairs])

# %% [markdown]
# ### Why not Python's own `hash()`?
#
# It is built in, it takes a tuple, and vLLM began with it. We ask for the same five names
# in two processes, each with its own seed for `hash()`, and compare what they say:

# %% name="two-processes"
import os
import subprocess
import sys

program = """
from minivllm.hashing import page_hashes
page = tuple(range(16))
print(hash("salt"), hash(b"salt"), hash(("salt", page)), hash(page),
      page_hashes(page, 16, "salt")[0].hex())
"""


def run(seed: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()


what = ["hash(text)", "hash(bytes)", "hash((text, page))", "hash(page)", "page_hashes"]
for label, one, two in zip(what, run("1"), run("2"), strict=True):
    print(f"{label:18}", "same in both" if one == two else "differs")
print("hash(-1) == hash(-2):", hash(-1) == hash(-2))

# %% [markdown]
# Text and bytes are salted anew in each process, and so is everything that contains them.
# A table of such names cannot be shared between two workers, or be found again after a
# restart. A tuple of integers is not salted, which is no better: its hash can be computed
# by anyone, it has as many bits as the machine's word (64 here, 32 in the Python that
# runs in your browser), and it was made to spread keys over a dictionary, not to resist
# people who look for collisions. One comes free: [-1 and -2](#two-processes).
#
# That is no worry on paper only. vLLM chained `hash()` of (parent, tokens, extra keys),
# with `None` as the first parent. Since Python 3.12 the hash of `None` is a constant, so
# every name could be computed outside, and a prompt could be searched for whose names
# collide with somebody else's. It became a security advisory (GHSA-rm76-4mrf-v9r8). The
# repair began the chain with a random value; since version 0.10.2 the default is SHA-256.
#
# ## One key at the root separates whole chains
#
# Equal tokens under an equal past have equal K/V, if the model is the same. With a LoRA
# adapter, a set of small extra weights, it is not. Where an image goes in, its
# placeholder tokens are the same for every image. And two customers of one server
# (*tenants*) may want not to share: whoever gets an answer sooner than it could be
# computed learns that somebody else has sent that prompt. So a request may carry an `extra_key`,
# and pages are shared only among requests with the same one. Its usual names are
# *adapter*, *image hash*, and for tenants *cache salt*, a text of their choice.
#
# To see it we need a cache, and a set of names will do for a moment. A prompt of 8 tokens
# and one more is sent four times, in pages of 4: with salt *s* twice, with salt *t*, and
# with none. Then one with two versions of an adapter.

# %% name="salts"
from itertools import takewhile

published: set[bytes] = set()


def send(tokens: list[int], key: str | None) -> int:
    """How many tokens are found; afterwards all full pages are known."""
    names = page_hashes(tokens, 4, key)
    found = len(list(takewhile(published.__contains__, names)))
    published.update(names)
    return found * 4


prompt, another = list(range(9)), list(range(50, 59))
print("salts s, s, t, none:", [send(prompt, key) for key in ("s", "s", "t", None)])
print("adapters v1, v2, v1:", [send(another, key) for key in ("v1", "v2", "v1")])

# %% [markdown]
# Found: [0, 8, 0, 0](#salts) and [0, 0, 8](#salts). The key went into the root and
# nowhere else. It need not: page 0's name is made from the root, page 1's from page 0's,
# so the key is in all of them the way the first token is. Mixing it into each page would
# hash it 30 times for our prompt, and separate nothing more:

# %% name="disjoint"
keys = [None, "a", "b", b"a", 1, "1", (1,), ("a", "b"), ("ab",), ("a", ("b",))]
chains = [page_hashes(first, PAGE, key) for key in keys]
print(len(keys), "keys,", len(chains[0]), "pages:", len(set().union(*chains)), "names")
print("with str(key):", len({str(key) for key in [1, "1"]}), "name for 1 and '1'")

# %% [markdown]
# All [300](#disjoint) names are different. Look at the keys, though. Text `"1"` and the
# number 1 are two keys, and `str` would have made [1](#disjoint) of them; `ascii`, which
# writes the quotes, keeps them apart. (So does `repr`, but which letters it writes as
# escapes depends on the version of Python.) So do `("a", "b")` and `("ab",)`, which glued
# together would read the same. A key is built by programs from parts: an adapter and a
# salt, say. If the parts are put side by side without saying which is which, an adapter
# called *x* and a salt called *x* are one key. In 2026 vLLM and SGLang both had reports
# of that very collision (vLLM issue 44701, SGLang pull request 25214). A tuple such as
# `("adapter", "x")` cannot be mistaken for `("salt", "x")`.
#
# The keys are yours to change. What does `True` do, which is equal to 1?

# %% tags=["live"]
from minivllm.hashing import page_hashes

for key in (None, "", 1, "1", ("1",)):
    print(f"{key!r:6}", page_hashes(range(32), 16, key)[-1].hex()[:16])

# %% [markdown]
# One refinement we leave out. vLLM mixes the salt into the first block only, as here, but
# an image's hash into the blocks that the image covers, so that the text *before* two
# different images can be shared.
#
# ## A request that grows does not start over
#
# While a request decodes, its sequence grows, and every 16 tokens another page is full
# and wants a name. How many hashes does a request cost, from 493 tokens to 621? We count
# the copies of the empty hash: one for each name.

# %% name="growing"
from unittest.mock import Mock, patch

from minivllm import hashing

whole = array("i", first + [7] * 128)


def hashes_made(rename) -> int:
    """The hashes that `rename(names, tokens)` makes while 128 tokens are decoded."""
    counting = Mock(wraps=blake2b(digest_size=DIGEST_BYTES))
    with patch.object(hashing, "_EMPTY", counting):
        names = hashing.page_hashes(first, PAGE)
        for length in range(len(first) + 1, len(whole) + 1):
            names = rename(names, whole[:length])
    assert names == page_hashes(whole, PAGE)
    return counting.copy.call_count


def anew(names, tokens):
    return hashing.page_hashes(tokens, PAGE)


def anew_when_full(names, tokens):
    return names if len(tokens) % PAGE else anew(names, tokens)


def extended(names, tokens):
    return hashing.extend_hashes(names, tokens, PAGE)


for way in (anew, anew_when_full, extended):
    print(f"{way.__name__:15} {hashes_made(way):6,} hashes")

# %% [markdown]
# [38](#growing), one for each page that exists at the end. Naming anew costs
# [306](#growing) if one waits for full pages and [4,430](#growing) if one does not. The
# gap widens with the square of the length: naming anew is the mistake of chapter 1's
# first cell, made with hashes. A chain can be extended because its last name is all that
# it needs to know of its past.

# %% tags=["hide-input"]
grown, frames = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32], []
names_so_far: list[bytes] = []
SAYS = {
    10: "A prompt of 10 tokens, in pages of 4. Two pages are full: two hashes (blue), each "
    "from the name before it. The last two tokens have no name (orange).",
    11: "A token is decoded. No page has become full: nothing is hashed.",
    12: "Another one, and the third page is full. One hash, from the second name and four "
    "tokens; the names before it are kept.",
    13: "The next token opens the fourth page.",
}
for length, caption in SAYS.items():
    tokens = [*grown, 33, 34, 41][:length]
    names = extend_hashes(names_so_far, tokens, 4)
    made = range(len(names_so_far), len(names))
    open_from = 4 * len(names)
    cells = [
        (i, 1, "private" if i >= open_from else "plain", str(token))
        for i, token in enumerate(tokens)
    ]
    chain = [(-2, 1.6, "plain", "root")] + [
        (4 * i, 4, "computed" if i in made else "plain", name.hex()[:6])
        for i, name in enumerate(names)
    ]
    shifted = [[(x + 2, *rest) for x, *rest in each] for each in (cells, chain)]
    labels = ["tokens", "names"]
    frames.append(
        draw_rows(list(zip(labels, shifted, strict=True)), unit=24, caption=caption)
    )
    names_so_far = names
Steps(frames)

# %% [markdown]
# ## A faster name, and how to make two pasts share it
#
# A cryptographic hash looks like too much for a lookup in a table. Textbooks on string
# search have a lighter one: read the tokens as digits of a number in some base, and keep
# the remainder. In C that is a multiplication and an addition for each token. It is
# chained by its nature, since it goes on from the value before.

# %% name="quick"
BASE, MODULUS = 49_157, 2**32  # a prime above the vocabulary's 49,152


def quick_name(past: int, page: list[int]) -> int:
    for token in page:
        past = (past * BASE + token) % MODULUS
    return past


random_pages = [[rng.randrange(49_152) for _ in range(PAGE)] for _ in range(20_000)]
names_made = {quick_name(0, page) for page in random_pages}
print(f"{len(random_pages):,} pages, {len(names_made):,} names")

# %% [markdown]
# [20,000](#quick) random pages, as many names: it spreads well. Every test that we are
# likely to write would pass. But prompts are not random; people choose them. Written out,
# the name of a page of tokens t₀ to t₁₅ is past·B¹⁶ + t₀·B¹⁵ + … + t₁₃·B² + t₁₄·B + t₁₅,
# modulo 2³². Each token moves it by an amount that anyone can work out. The last three
# are three digits in base B, and three such digits count beyond 2³². So whatever comes
# before, they can be chosen such that the sum comes out as any name that one wants. No
# search, two divisions:


# %% name="forge"
def forge(past: int, start: list[int], wanted: int) -> list[int]:
    """`start` and three more tokens, such that the page's name is `wanted`."""
    missing = (wanted - quick_name(past, [*start, 0, 0, 0])) % MODULUS
    high, low = divmod(missing, BASE**2)
    return [*start, high, *divmod(low, BASE)]


rules = [rng.randrange(49_152) for _ in range(5 * PAGE)]  # a shop's system prompt
bad_start = [666] * 13  # what a stranger wants the model to read instead
forged = forge(0, bad_start, wanted=quick_name(0, rules[:PAGE]))
print("it ends in", forged[-3:], "· valid ids:", max(forged) < 49_152)
print(f"the rules' page 0: {quick_name(0, rules[:PAGE]):08x}")
print(f"the forged page:   {quick_name(0, forged):08x}")

# %% [markdown]
# The stranger sends this page, followed by the rules' other four pages as they are. From
# an equal name and equal tokens comes an equal name: the whole chain now bears the names
# of the shop's prompt, over K/V that were computed behind the stranger's beginning. Then
# the shop's customers come.
#
# Our table gives a prompt the pages that it finds, and enters those that it had to
# compute. How carefully it looks before it says *found* is a parameter: it may compare
# the name only, the tokens as well, or name, tokens and the page before, the *parent*. To
# count the damage, each entry remembers under which tokens it was really computed; a real
# table does not know.

# %% name="damage"
from dataclasses import dataclass


@dataclass(eq=False)
class Known:
    page: list[int]
    parent: "Known | None"
    computed_under: list[int]


CHECKS = {
    "name": lambda known, page, parent: True,
    "name, tokens": lambda known, page, parent: known.page == page,
    "all three": lambda known, page, parent: (
        known.page == page and known.parent is parent
    ),
}


def serve(table: dict[int, Known], tokens: list[int], check) -> list[bool]:
    """Take what is found, enter what is not. Which pages hold the right K/V?"""
    name, parent, right = 0, None, []
    for i, page in enumerate(pages_of(tokens)):
        name, under = quick_name(name, page), tokens[: (i + 1) * PAGE]
        known = table.get(name)
        if known is None or not check(known, page, parent):
            known = table[name] = Known(page, parent, under)
        right.append(known.computed_under == under)
        parent = known
    return right


served = {}
for label, check in CHECKS.items():
    table: dict[int, Known] = {}
    serve(table, forged + rules[PAGE:], check)  # the stranger comes first
    served[label] = serve(table, rules, check)  # then a customer of the shop
    print(f"{label:12} compared: {served[label].count(False)} of 5 wrong")

# %% tags=["hide-input"]
spoken: dict[str, list[int]] = {"the rules": [], "the forgery": []}
for whose, tokens in zip(spoken, (rules, forged + rules[PAGE:]), strict=True):
    name = 0
    for page in pages_of(tokens):
        name = quick_name(name, page)
        spoken[whose].append(name)
draw_rows(
    [
        (whose, [(i, 1, "plain", f"{name:08x}"[:4]) for i, name in enumerate(names)])
        for whose, names in spoken.items()
    ]
    + [
        (label, [(i, 1, "published" if ok else "lost", "") for i, ok in enumerate(oks)])
        for label, oks in served.items()
    ],
    unit=48,
    caption="Above, the names of both prompts: the same, though their first pages differ. "
    "Below, what the shop's customer gets when the table compares the name only, also the "
    "tokens, also the parent. Red: K/V computed behind the stranger's beginning.",
)

# %% [markdown]
# Comparing names only, the table hands out the stranger's K/V for [5 of 5](#damage)
# pages. The customer's model reads the stranger's sentence where the shop's first page
# should be.
#
# Comparing the tokens catches the forged page, which is computed anew, and leaves
# [4](#damage) wrong ones: their tokens *are* the rules' tokens. What is wrong with them
# is their past. It is the French question again, and the tokens of a page cannot show it.
# Comparing the parent does: an entry counts only if the page before it is the very entry
# that the walk came from. By induction every page is then right back to the root, and
# [0](#damage) are wrong.
#
# A system prompt of a public service is no secret; people publish them. And such a hash
# is no straw man: NVIDIA's Megatron-LM named its pages by a polynomial until 2026, when a
# change replaced it by SHA-256, with the attack in its description: add 31 to one token,
# take 1 from the next, and the name stays (pull request 4158).
#
# ## Why the engine compares all the same
#
# No such algebra is known for BLAKE2b. What remains is chance: among enough names two
# will be equal, sooner than one thinks, because every new name may meet *any* old one.
# With N possible names the chance reaches p at about √(2N·ln(1/(1−p))) pages.

# %% name="birthday"
import math


def pages_until(bits: int, chance: float) -> float:
    """So many pages, and two of them share a name with this chance."""
    return math.sqrt(2.0 ** (bits + 1) * -math.log1p(-chance))


def short(count: float) -> str:
    return f"{count:,.0f}" if count < 1e6 else f"{count:.3g}"


for bits in (32, 64, 128):
    rare, even = (short(pages_until(bits, chance)) for chance in (1e-6, 0.5))
    print(f"{bits:3} bits: 1 in a million at {rare}, even at {even}")

# %% [markdown]
# A formula in a book about runs should be tried. We cut BLAKE2b to a few bits, name page
# after page, and stop at the first name that was there before. One run proves little, so
# each width gets 51, and the middle one counts:

# %% name="first-collision"
from statistics import median


def pages_before_collision(bits: int, run: int) -> int:
    past, seen = root_hash(run), set[int]()
    while True:
        digest = page_name(past, len(seen).to_bytes(8, "little"))
        name = int.from_bytes(digest, "little") % 2**bits
        if name in seen:
            return len(seen)
        seen.add(name)


for bits in (12, 16, 20, 24):
    found = [pages_before_collision(bits, run) for run in range(51)]
    print(f"{bits} bits: {median(found):5,} · formula: {pages_until(bits, 0.5):5,.0f}")

# %% tags=["hide-input"]


def bar(bits: int):
    rare, even = pages_until(bits, 1e-6), pages_until(bits, 0.5)
    ends = math.log10(rare), math.log10(even)
    return f"{bits} bits", [
        (0, ends[0], "plain", short(rare)),
        (ends[0], ends[1] - ends[0], "lost", short(even)),
    ]


draw_rows(
    [bar(bits) for bits in (32, 64, 128)],
    unit=26,
    caption="How many pages may have a name before two share one; the axis counts digits. Up to "
    "the end of the first bar the chance is below one in a million; at the end of the red "
    "one it is one half. Twice the bits, twice the digits.",
)

# %% [markdown]
# The middle runs lie within a sixth of the formula. With it we can go where no run gets.
#
# With 32 bits one in a million is reached at [93](#birthday) pages, three prompts like
# ours. With 64 bits it is reached at [6.07](#birthday) million pages, some 97 million
# tokens, and an even chance at [5.06](#birthday) billion. That many hashes can be
# computed on purpose, by somebody who looks for a pair. With 128 bits an even chance
# takes [2.17](#birthday)·10¹⁹ pages.
#
# So why compare at all? Because of what each side of the scales weighs. On the one side,
# per page found: 64 bytes against 64 bytes, and one pointer.

# %% name="compare-time"
page, twin = raw[:64], bytes(bytearray(raw[:64]))
long_prompt = array("i", range(4_096))
print("256 pages named:  ", best_us(lambda: page_hashes(long_prompt, PAGE), 50))
print("one page named:   ", best_us(lambda: page_name(bytes(16), page)))
print("one page compared:", best_us(lambda: page == twin))

# %% [markdown]
# The comparison adds little to the naming. On the other side of the scales: one wrong
# answer that shows somebody else's data and looks fluent. And there is a reason that has
# nothing to do with odds. With the comparison, the hash decides only how fast a page is
# found. Whether it is the *right* page is decided by looking at it. "No two pasts share a
# name" can't be tested; "an entry counts only if tokens and parent agree" can: a test of
# chapter 4's table replaces the hash by one that calls every page `x`, and nothing wrong
# may be found. With such a table even `quick_name` would be safe. It would also be easy
# to clog: who takes a name first keeps the other page out. So the engine uses BLAKE2b,
# and compares.
#
# vLLM has decided otherwise: its blocks are found by SHA-256 of the parent's hash, the
# block's tokens and the extra keys, 32 bytes, and these are trusted. SGLang has no hash
# on this path: a tree whose edges are the tokens themselves, where finding *is*
# comparing. Chapter 3 builds that tree; chapter 4 puts both behind one interface.
#
# ## What a name cannot say
#
# A name is about tokens, and there are questions that tokens do not answer. Have the K/V
# behind it been *written* yet, or is the first request still computing them? Are they
# *still there*, or was the memory given to somebody else? Both need an owner for each
# page, and that is chapter 4.
#
# And a table of names knows no neighbours. When memory is full, which page goes first?
# Not page 2 of a prompt while its page 3 stays: page 3 could never be found again, for
# the walk would end before it. To know what hangs on what, pages need an order. Chapter 3
# gives them one.
#
# ### Exercise 1
#
# A system prompt of 1,039 tokens begins with a date of 10 tokens, which changes at
# midnight. How many pages survive midnight, at page size 16? Move the date to the end of
# the prompt, as its last 10 tokens: how many pages survive then, and how many tokens are
# computed again in the first request of the new day?


# %% tags=["solution"] name="midnight"
def survivors(today: list[int], tomorrow: list[int]) -> int:
    pairs = zip(page_hashes(today, PAGE), page_hashes(tomorrow, PAGE), strict=True)
    return sum(a == b for a, b in pairs)


stable = [rng.randrange(49_152) for _ in range(1_029)]
monday, tuesday = [11] * 10, [12] * 10
date_first = survivors(monday + stable, tuesday + stable)
date_last = survivors(stable + monday, stable + tuesday)
recomputed = 1_039 - date_last * PAGE
print(date_first, date_last, recomputed)

# %%
assert (date_first, date_last, recomputed) == (0, 64, 15)

# %% [markdown]
# 1,029 stable tokens fill [64](#midnight) pages and leave 5 over. With the date that makes
# [15](#midnight) tokens, no full page: they are computed again on any day, and midnight costs
# nothing. Moving one line of a template made the difference between
# nothing and nearly all.
#
# ### Exercise 2
#
# Somebody finds it odd that `quick_name` uses a prime, and sets `BASE` to 49,152, the
# size of the vocabulary. Add 1 to each of the 16 tokens of a page in turn: how many of
# the 16 positions change the page's name now? Does the past change it? Which of the
# `CHECKS` is then the only one that keeps `german` from getting the second page of
# `french`?


# %% tags=["solution"] name="even-base"
def even_name(past: int, page: list[int]) -> int:
    for token in page:
        past = (past * 49_152 + token) % MODULUS
    return past


def nudged(i: int) -> list[int]:
    return [*question[:i], question[i] + 1, *question[i + 1 :]]


seen_by = sum(even_name(0, nudged(i)) != even_name(0, question) for i in range(PAGE))
past_counts = even_name(even_name(0, french[:16]), question) != even_name(
    even_name(0, german[:16]), question
)
only_check = "all three"
print(seen_by, "of 16 positions · the past counts:", past_counts)

# %%
entry = Known(question, Known(french[:16], None, french[:16]), french)
parent = Known(german[:16], None, german[:16])  # where the walk of `german` stands
refuse = [
    label for label, check in CHECKS.items() if not check(entry, question, parent)
]
assert (seen_by, past_counts) == (3, False)
assert refuse == [only_check]

# %% [markdown]
# 49,152 is 3·2¹⁴. Its third power is a multiple of 2³², so all but the last
# [3](#even-base) digits fall off the number, and with them the past. A harmless-looking
# constant has turned the chain into a hash of the content's last tokens.
#
# ### Exercise 3
#
# Eight tenants use one system prompt of 1,039 tokens. How many pages does the table hold
# for it if none has an `extra_key`? How many if each has a salt of its own? And how many
# tokens are computed for the first request of all eight, one after the other, in both
# cases? (A request computes what is not found. Leave aside that a real one computes at
# least one token.)


# %% tags=["solution"] name="tenants"
def cost(salts: list[str | None]) -> tuple[int, int]:
    """Pages in the table, and tokens computed."""
    names: set[bytes] = set()
    computed = 0
    for salt in salts:
        chain = page_hashes(range(1_039), PAGE, salt)
        computed += 1_039 - PAGE * sum(name in names for name in chain)
        names.update(chain)
    return len(names), computed


shared_cost = cost([None] * 8)
salted_cost = cost([f"tenant {i}" for i in range(8)])
print("shared:", shared_cost, "· salted:", salted_cost)

# %%
assert (shared_cost, salted_cost) == ((64, 1_144), (512, 8_312))

# %% [markdown]
# Shared, the first tenant computes 1,039 tokens and the others 15 each. Salted, everybody
# pays for everything, in memory and in time. That is what the isolation costs; a salt per
# team instead of per user is often the compromise.
