# %% [markdown]
# # 1. What a KV cache keeps
#
# A model has read a prompt of 493 tokens and is to write 128 more. A language model
# computes the next token from *all* tokens before it. So here is the most direct way
# to generate: put in 493 tokens, take one out, put in 494, take one out, and so on.
# How many tokens go through the model in all? Guess before you run the cell.

# %% name="forwards"
prompt_tokens, output_tokens = 493, 128

without_cache = sum(prompt_tokens + i for i in range(output_tokens))
print(f"{without_cache:,} token-forwards")

# %% [markdown]
# A *token-forward* is one token passing once through every layer. The answer has 128
# tokens, and we paid for [71,232](#forwards). Nearly all of that is work done before: step 2 sends
# the same 493 tokens through the same weights as step 1 did, and throws the results
# away again.
#
# Every engine avoids this, with something called a *KV cache*. Many who use one picture
# a table of answers: this prompt was seen, here is what the model said. No such table
# exists in this book. What is kept is less than an answer, and good for more than one.
# This chapter finds out what it is, on a model small enough to count everything.
#
# ## What the next token asks of the old ones
#
# In a transformer, tokens meet in one place only: attention. The new token makes a
# *query*, and compares it with a *key* of every token so far. The comparison gives
# weights, and with these the token takes an average of their *values*. Everything
# else (norms, projections, the MLP) treats a token by itself.
#
# We write attention so that it takes the queries of the *last* few tokens, one or all,
# and the keys and values of everything up to there. A token may look at itself and at
# what came before it, never at what comes later: this is the *causal mask*.

# %%
import torch

torch.manual_seed(0)
torch.set_num_threads(1)  # on matrices this small, threads wait for one another
width = 16


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
    """Queries [new, width] of the last tokens; keys and values [all, width]."""
    old = len(keys) - len(queries)
    scores = queries @ keys.T / width**0.5
    later = torch.ones_like(scores).triu(old + 1).bool()
    weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    return weights @ values


# %% [markdown]
# Look at who needs what, and when. A query belongs to one token and is used once. Keys
# and values belong to the *old* tokens, and every later token asks for them again. So
# these two are worth keeping, and this is why it is called a KV cache and not a QKV
# cache. But may we keep them? A key that was made in step 1 must still be right in
# step 128. The mask sees to that: token 3 never looks at token 4, so nothing that comes
# later changes what token 3 computed, in any layer. Its key and value are final the
# moment they are made.
#
# ## A model to count with
#
# Now a whole model. It has three layers, one head, a vocabulary of 1,000 tokens, and
# weights that nobody trained. It is a real one in the way that matters here: what enters
# layer 2 is what attention put out in layer 1. It computes in 64 bit, so that rounding never
# decides which token is the likeliest.
#
# Its memory is a tensor `[tokens, 2, width]` for each layer: a key and a value for each
# token that went through.


# %%
def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class ToyModel:
    """Three layers of attention. `forwards` counts the tokens that went through."""

    def __init__(self) -> None:
        self.embedding, self.head = random(1000, width), random(width, 1000)
        self.layers = [2 * random(3, width, width) / width**0.5 for _ in range(3)]
        self.forwards = 0

    def nothing(self) -> list[torch.Tensor]:
        """Memory in which no token has keys and values yet."""
        return [random(0, 2, width) for _ in self.layers]


# %% [markdown]
# A forward pass takes tokens that are *new*, and memory that holds all others. In every
# layer the new tokens first add their keys and values to memory, then attend to all that
# is there. For a start, memory can be empty and the new tokens can be the whole prompt.
#
# `class ToyModel(ToyModel):` looks odd, and the book is full of it. It reopens a class: the new
# one inherits from the old one and takes its name. So a class can grow in small pieces, each
# where the text needs it.


# %%
class ToyModel(ToyModel):
    def forward(self, new_tokens: list[int], memory: list[torch.Tensor]):
        """Logits after each new token; memory grows by their keys and values."""
        self.forwards += len(new_tokens)
        x = self.embedding[new_tokens]
        for i, (w_query, w_key, w_value) in enumerate(self.layers):
            made = torch.stack([x @ w_key, x @ w_value], dim=1)
            memory[i] = torch.cat([memory[i], made])
            keys, values = memory[i].unbind(1)
            x = torch.tanh(x + attend(x @ w_query, keys, values))
        return x @ self.head


# %% [markdown]
# Generation is one loop, and the two ways to do it differ in one line. Without a cache we
# empty the memory before each step, and then every token is new again.


# %%
def generate(model, tokens, num_tokens, memory, keep=True, choose=torch.argmax):
    """The tokens and `num_tokens` more. What memory holds is not put in again."""
    tokens = list(tokens)
    for _ in range(num_tokens):
        if not keep:
            memory[:] = model.nothing()
        new_tokens = tokens[len(memory[0]) :]
        logits = model.forward(new_tokens, memory)[-1]
        tokens.append(int(choose(logits)))
    return tokens


# %% name="measured"
model = ToyModel()
prompt = torch.randint(1000, (prompt_tokens,)).tolist()

answers, paid, memories = {}, {}, {}
for keep in (False, True):
    model.forwards, memories[keep] = 0, model.nothing()
    answers[keep] = generate(model, prompt, output_tokens, memories[keep], keep)
    paid[keep] = model.forwards
print("without:", f"{paid[False]:,}", "· with:", paid[True])
print("same 128 tokens:", answers[False] == answers[True])

# %% [markdown]
# Counted this time, not calculated: [71,232](#measured) against [620](#measured), a factor of 115,
# for the same answer. The prompt goes through the model once, which yields the first output
# token; this is the *prefill*. Each further output token costs one token-forward, a *decode*
# step. The last one is never put in, since nobody asks for what follows it. Hence 493 + 127.

# %% tags=["hide-input"]
from minivllm.drawing import PAGE_STATES, draw_rows

rows = []
for step in (1, 2, 3, 128):
    known = prompt_tokens + step - 1
    rows.append(
        (f"step {step}, without", [(0, known, "computed", f"{known} computed")])
    )
    kept = known - 1 if step > 1 else 0
    new = f"{known} computed" if step == 1 else ""
    words = [(0, kept, "plain", f"{kept} read")] if kept else []
    rows.append(("with", [*words, (kept, known - kept, "computed", new)]))
draw_rows(
    rows,
    caption="What a step computes and what it reads from memory, without and with a cache. "
    "From step 2 on the cached run computes one token: the sliver at the end.",
)

# %% [markdown]
# ## What is in there
#
# Three tensors, and nothing else. No text, no logits, no queries, no attention weights:

# %% name="contents"
memory = memories[True]
print("shapes:", [list(layer.shape) for layer in memory])
print("bytes for each token:", sum(layer.nbytes for layer in memory) // len(memory[0]))

# %% [markdown]
# There are [620](#contents) rows for 621 tokens. Every token that went through the model left
# one, and the last output token never went in. Remember it as a rule, because it decides
# in chapter 4 which pages are complete: *after g output tokens of a p-token prompt, p + g − 1
# tokens have keys and values.*
#
# Why these two, and nothing else? Ask of each quantity who reads it later. A token's query is
# read once, by its own attention. Its layer outputs are read by its own next layer. Its logits
# choose its own successor. Only key and value are read by *others*. One could keep what both are
# made from, the input of the layer, one vector where we keep two. Then every step would have
# to multiply all old inputs with two matrices again, in every layer, and that is most of the work
# that we set out to save.
#
# In general a token keeps one key and one value in every layer, for every K/V head. Take the
# shape of Qwen2.5-0.5B, which the book's examples use: 24 layers and 2 K/V heads of 64 numbers
# each. Its queries have 14 heads; seven of them share a key, and that is done for the sake of
# this very memory.


# %% name="bytes"
def kv_bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, bytes_each: int
) -> int:
    return 2 * layers * kv_heads * head_dim * bytes_each  # 2: a key and a value


for name, bytes_each in [("16 bit", 2), ("32 bit", 4)]:
    print(name, f"{kv_bytes_per_token(24, 2, 64, bytes_each):,} bytes per token")
print("14 K/V heads, 16 bit", f"{kv_bytes_per_token(24, 14, 64, 2):,}")
print("the toy", kv_bytes_per_token(3, 1, width, 8))
print("493 tokens at 32 bit", f"{493 * kv_bytes_per_token(24, 2, 64, 4):,}")

# %% [markdown]
# [12,288](#bytes) bytes for a token of text, which itself is a number of 4 bytes. At 32 bit the
# prompt of 493 tokens holds [12,115,968](#bytes) bytes, 12 MB, for as long as its request lives. Compute
# was traded for memory, and the memory set aside for all requests together is fixed. *Who may
# keep what, for how long* becomes a question with an owner. The engine of this book is the
# answer to it.
#
# Try other shapes. Llama 3.1 8B has 32 layers and 8 K/V heads of 128 numbers. Does a prompt of
# 100,000 tokens fit beside its weights on a 24 GB card?

# %% tags=["live"]
num_prompt, num_output = 493, 128  # change me
num_layers, kv_heads, head_dim, bytes_each = 24, 2, 64, 2

without = sum(num_prompt + i for i in range(num_output))
with_it = num_prompt + num_output - 1
held = with_it * 2 * num_layers * kv_heads * head_dim * bytes_each
print(f"{without:,} against {with_it:,} token-forwards, {without / with_it:.0f} to 1")
print(f"{held:,} bytes just before the end")

# %% [markdown]
# ## What it does not save
#
# A factor of 115 in token-forwards is not a factor of 115 in time. Each decode step still
# compares its one query with *all* keys, so all of memory is read in every step. Count these
# comparisons, for one head in one layer:

# %% name="pairs"
lengths = [prompt_tokens + i for i in range(output_tokens)]
pairs_without = sum(n * (n + 1) // 2 for n in lengths)
pairs_with = lengths[0] * (lengths[0] + 1) // 2 + sum(lengths[1:])
print(f"{pairs_without:,} against {pairs_with:,}")
print("of these in decode steps:", f"{sum(lengths[1:]):,}")

# %% [markdown]
# [192,510](#pairs) is a hundredth of what the run without a cache compares, and more than a third
# of it, [70,739](#pairs), falls to the decode steps. It grows with the length of the past, step by
# step, and no cache removes it.
#
# The prefill is 493 tokens wide, so each weight that is fetched from memory is used 493 times.
# A decode step fetches all the weights, and all the keys and values, for one token. It is
# limited by reading and not by arithmetic. That is why engines put many requests into one step
# (chapter 7), and why the two phases appear apart in every picture of this book.
#
# ## One token, two pasts
#
# A key is made from what enters the layer. In layer 1 that is the token's embedding, the same
# wherever the token stands. What enters layer 2 is the token's *output of layer 1*, and that is
# an average over everything before it. So what is the word *Paris*, as seen by a cache? We ask
# after two pasts that begin alike.

# %% name="pasts"
sentences = ["I fly to Paris", "I am called Paris"]
vocabulary = ["I", "fly", "to", "am", "called", "Paris"]
kept = []
for sentence in sentences:
    memory = model.nothing()
    model.forward([vocabulary.index(word) for word in sentence.split()], memory)
    kept.append(memory)

same = [
    [torch.allclose(one, two) for one, two in zip(*layers, strict=True)]
    for layers in zip(*kept, strict=True)
]
for layer, tokens in enumerate(same, 1):
    print("layer", layer, tokens)

# %% tags=["hide-input"]
pairs = list(zip(*(sentence.split() for sentence in sentences), strict=True))
words = [one if one == two else f"{one} / {two}" for one, two in pairs]
draw_rows(
    [("", [(i, 1, "plain", word) for i, word in enumerate(words)])]
    + [
        (
            f"K/V of layer {layer}",
            [
                (i, 1, "published" if ok else "lost", "same" if ok else "other")
                for i, ok in enumerate(tokens)
            ],
        )
        for layer, tokens in enumerate(same, 1)
    ],
    unit=110,
    caption="The keys and values of two sentences, compared place by place. Paris is the same "
    "token in the same place, and only layer 1 thinks so. What lies before the first "
    "difference is the same in all layers.",
)

# %% [markdown]
# In layer 1 both *Paris* have the same key and value. From layer 2 on they do
# not: one was looked at from *fly to*, the other from *am called*. A model of one layer could
# cache words. From two layers on, keys and values are not a property of the token. They are a
# property of the token *and everything before it*.
#
# "The word Paris is already cached" therefore means nothing; "these 37 tokens, in this order,
# from the very start, are cached" does. Only whole prefixes can be reused: here one token, *I*.
# (In this toy a token does not even know its position. Chapter 5 adds that, and keys then differ
# from place to place in layer 1 as well.)
#
# What happens to somebody who reuses more? We put the first sentence's *Paris* behind the second
# sentence's beginning, and let both go on:

# %% name="stolen"
ids = [vocabulary.index(word) for word in sentences[1].split()]
stolen = [torch.cat([b[:3], a[3:]]) for a, b in zip(*kept, strict=True)]
answers = [generate(model, [*ids, 7], 8, list(memory)) for memory in (kept[1], stolen)]
print("tokens made:", [len(answer) - 5 for answer in answers])
print("the same ones:", answers[0] == answers[1])

# %% [markdown]
# No error, no warning, [8](#stolen) tokens in both cases, and the wrong ones in the second. A cache
# that confuses two pasts does not break. It answers something else, fluently. Hence the care that
# chapter 2 takes with names.
#
# ## One memory, two answers
#
# Now the table of answers. If the cache held one, two users could share it only if they wanted the
# same answer. Let one ask at temperature 0, always the likeliest token, and one at temperature 1,
# where a die is thrown. Both continue from *one* prefill.

# %% name="temperatures"
dice = torch.Generator().manual_seed(7)


def draw(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=dice)


model.forwards, shared = 0, model.nothing()
model.forward(prompt[:-1], shared)
before = [layer.clone() for layer in shared]

at_0 = generate(model, prompt, output_tokens, list(shared))
at_1 = generate(model, prompt, output_tokens, list(shared), choose=draw)
untouched = all(map(torch.equal, before, shared))
print("the same answer:", at_0 == at_1, "· shared memory unchanged:", untouched)
print(model.forwards, "token-forwards, and", 2 * paid[True], "without sharing")

# %% tags=["hide-input"]
from minivllm.drawing import Branch, draw_tree

rest = f"{output_tokens} token-forwards of its own"
draw_tree(
    Branch(
        f"keys and values of {len(shared[0])} prompt tokens, computed once",
        "pinned",
        [
            Branch(f"temperature 0: {rest}", "private"),
            Branch(f"temperature 1: {rest}", "private"),
        ],
    ),
    caption="Two requests with one prompt. They read the same memory (blue), add to it what is "
    "their own (orange), and answer differently.",
)

# %% [markdown]
# Two different answers from one prefill, [748](#temperatures) token-forwards for what would have cost
# [1,240](#temperatures). Memory says how the prompt's tokens look to later tokens. The choice of
# the next token comes after that, from the logits, with whatever temperature the caller asked for.
# So requests may share a prefix whatever their sampling parameters are.
#
# The cell put in 492 tokens, not 493. Logits are not kept either, so somebody who finds a
# whole prompt in memory must still put in its last token, to have something to choose from. This
# one token comes back in chapters 5 and 7.
#
# ## A test that can fail
#
# Suppose the code has a fault: the very first token's key and value are never stored. Such code
# exists, in a lesson on KV caches whose tests were green. How can that be? Here is the fault, and
# four tests that one might write.


# %%
class ForgetfulModel(ToyModel):
    def forward(self, new_tokens, memory):
        logits = super().forward(new_tokens, memory)
        if len(memory[0]) == len(new_tokens):  # memory was empty before
            memory[:] = [layer[1:] for layer in memory]
        return logits


def one_by_one(model, tokens: list[int]) -> torch.Tensor:
    memory = model.nothing()
    return torch.cat([model.forward([token], memory) for token in tokens])


# %% name="vacuous"
forgetful = ForgetfulModel()
vars(forgetful).update(vars(model))  # the same weights
expected = model.forward(prompt[:8], model.nothing())
at_place = {}
for name, each in [("sound", model), ("forgetful", forgetful)]:
    found = one_by_one(each, prompt[:8])
    at_place[name] = [
        torch.allclose(*pair) for pair in zip(found, expected, strict=True)
    ]
    tests = {
        "it runs, and gives numbers": bool(found.isfinite().all()),
        "shapes are right": found.shape == expected.shape,
        "position 0 is equal": at_place[name][0],
        "every position is equal": all(at_place[name]),
    }
    print(f"{name:10}", tests)

# %% tags=["hide-input"]
draw_rows(
    [
        (
            name,
            [(i, 1, "published" if ok else "lost", str(i)) for i, ok in enumerate(oks)],
        )
        for name, oks in at_place.items()
    ],
    caption="Cached against uncached logits, position by position (green: equal). Position 0 has "
    "nothing to read from the cache, so it is right even when nothing was stored.",
)

# %% [markdown]
# Three of the four pass on the broken cache. Even comparing logits is not enough if it is done
# at position 0, where nothing is read yet. The fourth test holds the cached run against the
# uncached one *at every position*, and fails when the storing is taken out. The tests of this
# book plant such faults on purpose and demand that something turns red.
#
# ## What was asked, and what happens
#
# A cache that many requests share needs a clear line between what a request *is* and what happens
# to it. We draw it in code from the start: what was asked is fixed, what happens lives elsewhere.
# A request is frozen.

# %% export="request.py"
"""What was asked, and what comes back.

Everything here is frozen or plain data. What changes while a request runs lives with
its owner: pages with the prefix cache, queues with the scheduler.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

TokenIds = Sequence[int]  # any sequence of ints, or an encoded array("i")
ExtraKey = str | bytes | int | tuple[object, ...] | None


def encode_ids(token_ids: TokenIds) -> "array[int]":
    """Return the ids as an array of 32-bit ints; an `array("i")` comes back as it is.

    Converting a list costs more than looking its prefix up, so a request does it once.
    Raises `ValueError` for anything that is not a 32-bit integer.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    if isinstance(token_ids, str | bytes | bytearray | set | frozenset | dict):
        raise ValueError(f"token ids must be integers, not {type(token_ids).__name__}")
    try:
        return array("i", token_ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be 32-bit integers: {error}") from None


# %% [markdown]
# A list of Python ints takes 8 bytes of pointer for each token and an object behind
# it. The array takes 4 bytes and nothing else, and two arrays can be compared in one
# C call. Chapters 2 and 3 hash and compare tokens by the million; they get arrays.
#
# Next, what the caller may ask of the sampler. The names and meanings are vLLM's, as
# far as this engine has them: a request written for it should mean the same here. What each
# of them does to the choice of a token is the subject of chapter 6; here they are data.


# %% export="request.py"
@dataclass(frozen=True)
class SamplingParams:
    """How to choose the output tokens of one request.

    `max_tokens` None means: up to the end of the model's context, or of all the pages
    if these end before it. `temperature` 0 is greedy. `top_k` 0 or -1 keeps all tokens.
    `repetition_penalty` divides the logits of what prompt or output contain already;
    the other two are subtracted, for the output alone. `logit_bias`, token id to
    number, is added before that. `n` continuations of one prompt are drawn with the
    seeds `seed`, `seed` + 1 and so on. `stop` strings, `stop_token_ids` and the model's
    own end tokens (unless `ignore_eos`) end the output; they are no part of the text,
    the tokens stay in `token_ids`. `logprobs` asks for so many of the likeliest tokens
    beside each chosen one, `prompt_logprobs`
    for the same of the prompt; -1 means all. Raises `ValueError` for bad values.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None


# %% [markdown]
# Values are checked when the object is made, at the caller's desk. A wrong one that gets through
# would surface many steps later, in the middle of a batch that it shares with others.


# %% export="request.py"
class SamplingParams(SamplingParams):
    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, given in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if given is not None and not isinstance(given, Iterable):
                raise ValueError(
                    f"SamplingParams: {name} must be a list, not {given!r}"
                )
            object.__setattr__(self, name, () if given is None else tuple(given))
        if isinstance(self.logit_bias, Mapping):  # our own copy
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name, holds, words in RULES:
            if not holds(value := getattr(self, name)):
                raise ValueError(
                    f"SamplingParams: {name} must be {words}, not {value!r}"
                )
        self._check_continuations()

    def _check_continuations(self) -> None:
        broken = ""
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            broken = f"n must be 1 at temperature 0, not {self.n}: all would be equal"
        if self.seed is not None and self.seed + self.n - 1 > SEEDS:
            broken = f"seed must leave room for {self.n} up to 2**64, not {self.seed}"
        if broken:
            raise ValueError(f"SamplingParams: {broken}")

    def of_continuation(self, index: int) -> "SamplingParams":
        """What holds for one of the `n`. The first scores the prompt for all."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else self.seed + index
        prompt_logprobs = None if index else self.prompt_logprobs
        return replace(self, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


# %% [markdown]
# The rules, each with the words that the caller reads if it is broken:


# %% export="request.py"
GREEDY_BELOW = 1e-5  # down here a draw is the argmax anyway; vLLM's bound
MOST_CONTINUATIONS = 16_384  # vLLM's bound
SEEDS = 2**64  # seeds lie between minus and plus this
LARGEST = 3.4e38  # that a float32 holds


def _is_int(value: object, least: int, most: int = SEEDS) -> bool:
    """A whole number of any kind (NumPy's too), within bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return least <= int(value) <= most


def _is_real(value: Any, least: float, most: float = LARGEST) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return bool(least <= value <= most)  # type: ignore[operator]


def _is_bias(value: object) -> bool:
    """A table of token ids and what to add; minus infinity forbids a token."""
    return isinstance(value, Mapping) and all(
        _is_int(token, 0) and _is_real(bias, float("-inf"))
        for token, bias in value.items()
    )


RULES: list[tuple[str, Callable[[Any], bool], str]] = [
    ("max_tokens", lambda v: v is None or _is_int(v, 1), "a whole number >= 1"),
    ("temperature", lambda v: _is_real(v, 0), "from 0 to 3.4e38"),
    ("top_k", lambda v: _is_int(v, -1), "0 or -1 (all tokens), or 1 to 2**64"),
    ("top_p", lambda v: _is_real(v, 0, 1) and v > 0, "in (0, 1]"),
    ("min_p", lambda v: _is_real(v, 0, 1), "in [0, 1]"),
    ("repetition_penalty", lambda v: _is_real(v, 0) and v > 0, "a number above 0"),
    ("presence_penalty", lambda v: _is_real(v, -2, 2), "in [-2, 2]"),
    ("frequency_penalty", lambda v: _is_real(v, -2, 2), "in [-2, 2]"),
    ("n", lambda v: _is_int(v, 1), "a whole number >= 1"),
    ("n", lambda v: v <= MOST_CONTINUATIONS, f"at most {MOST_CONTINUATIONS}"),
    ("seed", lambda v: v is None or _is_int(v, -SEEDS), "a whole number"),
    ("logprobs", lambda v: v is None or _is_int(v, -1), "0 or more, or -1 (all)"),
    (
        "prompt_logprobs",
        lambda v: v is None or _is_int(v, -1),
        "0 or more, or -1 (all)",
    ),
    ("stop", lambda v: all(isinstance(s, str) and s for s in v), "non-empty text"),
    ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
    ("stop_token_ids", lambda v: all(_is_int(t, 0) for t in v), "token ids"),
    ("logit_bias", lambda v: v is None or _is_bias(v), "token ids and their numbers"),
]


# %%
try:
    SamplingParams(max_tokens=0)
except ValueError as error:
    print(error)

# %% [markdown]
# The request itself. `extra_key` is for the day when equal tokens must *not* share: two
# tenants who should not learn from each other's timing, two adapters of one model, two
# images behind one placeholder token. It may be text, bytes, an int, or a tuple of these:
# values that are equal, and written, in one way only. `priority` and `arrival` together decide the
# order of service: smaller first, and among equals who came first.


# %% export="request.py"
def check_extra_key(key: ExtraKey, depth: int = 8) -> None:
    """Raise `ValueError` unless a key is text, bytes, a 64-bit int or a tuple of these.

    Tuples may be nested, up to eight deep.
    """
    for part in key if type(key) is tuple else (key,):
        if type(part) is tuple and depth:
            check_extra_key(part, depth - 1)
        elif part is not None and type(part) not in (str, bytes, int):
            kind = type(part).__name__
            raise ValueError(
                f"extra_key must be text, bytes, ints or a tuple, not {kind}"
            )
        elif isinstance(part, int) and part.bit_length() > 64:
            raise ValueError("an int in extra_key must have at most 64 bits")


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue. `arrival` numbers requests in the order they came."""

    request_id: str
    prompt_token_ids: "array[int]"
    params: SamplingParams
    extra_key: ExtraKey = None
    priority: int = 0
    arrival: int = 0
    arrival_s: float = 0.0


# %% [markdown]
# And what comes back. `num_cached_tokens` is the number this book is about: how many of
# the prompt's tokens were *not* computed for this request. `ttft_s`, the time to the
# first token, is what the caller feels of it.


# %% export="request.py"
@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from submission to first output, waiting included."""
        return (
            None if self.first_token_s is None else self.first_token_s - self.arrival_s
        )

    @property
    def e2e_s(self) -> float | None:
        """From submission to the last output token."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class Logprob:
    """The log-probability that the model gave a token; the likeliest has rank 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # one position: what was asked about it, by token id


@dataclass(slots=True)
class CompletionOutput:
    """One continuation; `finish_reason` is stop, length, abort, error, or None.

    `stop_reason` is the stop string, or the one of `stop_token_ids`, that ended it.
    `logprobs`, if asked for, has one table for each token, the token itself in it, and
    `cumulative_logprob` is the sum over these tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step; final when `finished`.

    `num_cached_tokens` are the prompt tokens whose K/V were there already when the
    request was first admitted. It never changes afterwards. `prompt_logprobs`, if asked
    for, has a table for each prompt token, and None for the first: nothing precedes it.
    `reuse` says why so many tokens were cached and no more, if somebody keeps track.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt: str | None = field(default=None, repr=False)
    prompt_logprobs: list[Logprobs | None] | None = field(default=None, repr=False)
    reuse: Any = field(default=None, repr=False)  # a `Reuse` of chapter 13


# %% [markdown]
# The two users of one prompt, as the engine sees them. Nothing in a request says who computes
# what; equal prompts are all that sharing needs.

# %%
asked = encode_ids([504, 3575, 282, 4649, 314])
greedy = Request("0", asked, SamplingParams(temperature=0))
creative = Request("1", asked, SamplingParams(temperature=1.0, seed=7), arrival=1)
print("one prompt:", greedy.prompt_token_ids is creative.prompt_token_ids)
try:
    greedy.priority = 5
except AttributeError as error:
    print(error)

# %% [markdown]
# ## What still goes wrong
#
# Each request keeps its own keys and values, and drops them when it ends. The
# second user who sends the same 493 tokens pays for all 493 again. To give them the
# first user's keys and values, the engine has to notice that the two prompts begin
# alike, and it cannot compare every new prompt with every old one. It needs a short
# name for a long past. That is chapter 2.
#
# ## Exercises
#
# ### Exercise 1
#
# A request with a prompt of 1,000 tokens and 50 output tokens runs with a KV cache, in
# the shape above (24 layers, 2 K/V heads of 64), at 16 bit. How many token-forwards does it cost,
# and how many bytes of K/V does it hold just before it ends? Give `forwards` and `held_bytes`, and
# mind the last token.

# %% tags=["solution"]
forwards = 1000 + (50 - 1)
held_bytes = forwards * kv_bytes_per_token(24, 2, 64, 2)
print(f"{forwards:,} token-forwards, {held_bytes:,} bytes")

# %%
assert (forwards, held_bytes) == (1049, 1049 * 12_288)

# %% [markdown]
# ### Exercise 2
#
# Write `reusable(old, new)`: how many tokens of the prompt `new` need not be computed, if
# the K/V of all tokens of `old` are in memory? There must be logits at the end.


# %% tags=["solution"]
def reusable(old: list[int], new: list[int]) -> int:
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    return min(same, len(new) - 1)


# %%
assert reusable([1, 2, 3, 4, 5], [1, 2, 9, 4, 5]) == 2
assert reusable([1, 2, 3], [1, 2, 3, 4]) == 3
assert reusable([1, 2, 3, 4], [1, 2, 3]) == 2 and reusable([1, 2], [1, 2]) == 1

# %% [markdown]
# Tokens 4 and 5 of the first pair are equal and stand in equal places, and are lost all the same.
#
# ### Exercise 3
#
# Somebody edits prompts cheaply: to delete token 2 of a prompt, they delete row 2 of each layer's
# memory, and go on. Compare with the prompt that never had that token, `without_2`. For each of
# the three layers: which of the 7 rows left in memory are what they should be? Give `right`, a list
# of bools for each layer.

# %% tags=["solution"]
edited, clean = model.nothing(), model.nothing()
without_2 = [*prompt[:2], *prompt[3:8]]
model.forward(prompt[:8], edited)
model.forward(without_2, clean)
edited = [torch.cat([layer[:2], layer[3:]]) for layer in edited]
right = [
    [torch.allclose(*both) for both in zip(*layers, strict=True)]
    for layers in zip(edited, clean, strict=True)
]
print(right)

# %%
assert right == [[True] * 7, [True] * 2 + [False] * 5, [True] * 2 + [False] * 5]

# %% [markdown]
# The row is gone, and what the token said to those behind it is not. Deleting from the cache is
# not deleting from the prompt. This is why engines that drop old tokens to save memory change the
# answer, and why ours gives memory back from the *end* of a prefix only.
#
# ## The pen
#
# The pictures of this book are drawn by the chapters' own code, from the runs that you
# see. A cell's colour says which state a page is in, and it is the same colour in every chapter
# (chapter 4 explains the states). Two more colours show work: prompt tokens being computed, and
# output tokens being decoded. The pen itself is 200 lines about rectangles, folded away below.

# %% tags=["hide-input"]
draw_rows(
    [
        ("page states", [(i, 1, each, each) for i, each in enumerate(PAGE_STATES)]),
        ("work", [(0, 1, "computed", "computed"), (1, 1, "decoded", "decoded")]),
    ],
    unit=84,
    caption="The colours of the page states, and of the two kinds of work, in every picture "
    "of the book. 'lost' marks what could have been reused and was not.",
)

# %% export="drawing.py" tags=["hide-input"]
"""Small SVG pictures from runs: rows of cells, trees, and steps through them.

One colour per page state and per kind of work, given as CSS variables with a fallback,
so that the site's light and dark themes can set them and a notebook elsewhere still
shows them.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

PAGE_STATES = ("free", "private", "announced", "published", "pinned", "lost")
COLOURS = {  # what a cell shows -> its colour where no theme sets the variable
    "free": "#e3e6ea",
    "private": "#f6c667",
    "announced": "#d9b8f0",
    "published": "#9fd8ae",
    "pinned": "#8fc1f0",
    "lost": "#f2a59b",
    "computed": "#8b97c9",  # work, not a page: the tokens of a prompt
    "decoded": "#ccd3ec",  # one output token a step
    "plain": "#eeebe4",
}
CHAR = 6.7  # the width of a character at size 12, in pixels


# %% export="drawing.py" tags=["hide-input"]
@dataclass
class Picture:
    """An SVG under construction. Shows itself in a notebook."""

    caption: str = ""
    shapes: list[str] = field(default_factory=list, repr=False)
    width: float = 0.0
    height: float = 0.0

    def _grow(self, right: float, bottom: float) -> None:
        self.width, self.height = max(self.width, right), max(self.height, bottom)

    def text(
        self, x: float, y: float, words: str, anchor: str = "middle", on: str = ""
    ) -> None:
        """Write `words` with baseline y; `on` is the state of the box below them."""
        ink = f"var(--page-{on}-text, #1b1f24)" if on else "currentColor"
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
            f'style="fill:{ink}">{escape(words)}</text>'
        )
        share = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        self._grow(x + share * CHAR * len(words), y + 4)

    def box(
        self, x: float, y: float, w: float, h: float, state: str, words: str = ""
    ) -> None:
        """Draw a cell in one of the `COLOURS`, with words inside."""
        colour = f"var(--page-{state}, {COLOURS[state]})"
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" '
            f'style="fill:{colour};stroke:currentColor;stroke-width:.6"/>'
        )
        self._grow(x + w, y + h)
        if words:
            self.text(x + w / 2, y + h / 2 + 4, words, on=state)

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a thin line."""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
            'stroke="currentColor" stroke-width="1" opacity=".6"/>'
        )
        self._grow(max(x1, x2), max(y1, y2))


# %% export="drawing.py" tags=["hide-input"]
class Picture(Picture):
    def svg(self) -> str:
        """Return the picture as one SVG element."""
        size = f"{self.width + 8:.0f} {self.height + 8:.0f}"
        label = escape(self.caption)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {size}" '
            f'width="{self.width + 8:.0f}" role="img" aria-label="{label}" '
            'font-family="system-ui, sans-serif" font-size="12" '
            'style="max-width:100%;height:auto">'
            f"{''.join(self.shapes)}</svg>"
        )

    def _repr_html_(self) -> str:
        words = escape(self.caption)
        return f"<figure>{self.svg()}<figcaption>{words}</figcaption></figure>"


# %% export="drawing.py" tags=["hide-input"]
Cell = tuple[float, float, str, str]  # start, length, page state, words


def draw_rows(
    rows: Sequence[tuple[str, Iterable[Cell]]], *, unit: float = 0.0, caption: str = ""
) -> Picture:
    """Draw labelled rows of cells on one axis; `unit` is the width of 1 in pixels."""
    picture = Picture(caption)
    cells = [(label, list(row)) for label, row in rows]
    left = CHAR * max(len(label) for label, _ in cells) + 12
    end = max((c[0] + c[1] for _, row in cells for c in row), default=1)
    unit = unit or min(64.0, 620.0 / end)
    for i, (label, row) in enumerate(cells):
        y = i * 30.0
        picture.text(left - 8, y + 16, label, "end")
        for start, length, state, words in row:
            picture.box(left + start * unit, y, length * unit, 24, state, words)
    return picture


# %% [markdown]
# A schedule is rows of cells as well: one row for each request, time to the right. A step
# takes as long as the work in it, so a step with a prompt is drawn wider than one in which
# everybody decodes a token.


# %% export="drawing.py" tags=["hide-input"]
Step = Sequence[tuple[str, int, int]]  # chunks: request id, first position, tokens


def rows_of_steps(steps: Iterable[Step]) -> dict[str, list[Cell]]:
    """What each request computed, step by step, as cells for `draw_rows`.

    A step is 1 wide, and 1 more for every 32 tokens computed in it. Prompt
    chunks become cells with their size; decode steps in a row join into one cell.
    """
    rows: dict[str, list[Cell]] = {}
    now = 0.0
    for step in steps:
        width = 1 + sum(size for _, _, size in step) / 32
        for request_id, _, size in step:
            row = rows.setdefault(request_id, [])
            last = row[-1] if row else (0.0, 0.0, "", "")
            if size == 1 and last[2] == "decoded" and last[0] + last[1] == now:
                row[-1] = (last[0], last[1] + width, "decoded", "decodes")
            elif size == 1:
                row.append((now, width, "decoded", ""))
            else:
                row.append((now, width, "computed", str(size)))
        now += width
    return rows


# %% export="drawing.py" tags=["hide-input"]
@dataclass(frozen=True)
class Branch:
    """A node of a tree picture: lines of words, a page state, children."""

    words: str
    state: str = "plain"
    children: Sequence["Branch"] = ()


def draw_tree(root: Branch, *, caption: str = "") -> Picture:
    """Draw a tree from the top down; each leaf takes a column."""
    picture = Picture(caption)
    _place(picture, root, 0.0, 0.0)
    return picture


def _place(
    picture: Picture, branch: Branch, left: float, top: float
) -> tuple[float, float]:
    """Draw a branch at `left`; return the middle of its box and its right edge."""
    lines = textwrap.wrap(branch.words, 34) or [""]
    width = CHAR * max(map(len, lines)) + 18
    height = 10 + 16.0 * len(lines)
    below = top + height + 34
    middles: list[float] = []
    right = left
    for child in branch.children:
        middle, right = _place(picture, child, right + (14 if middles else 0), below)
        middles.append(middle)
    middle = max((middles[0] + middles[-1]) / 2 if middles else 0.0, left + width / 2)
    picture.box(middle - width / 2, top, width, height, branch.state)
    for i, words in enumerate(lines):
        picture.text(middle, top + 17 + 16 * i, words, on=branch.state)
    for end in middles:
        picture.line(middle, top + height, end, below)
    return middle, max(right, middle + width / 2)


# %% [markdown]
# Memory over time is rows again: a column for each page, a row for each moment. An engine
# tells what happens to which pages; what it tells decides the colour.


# %% export="drawing.py" tags=["hide-input"]
BECOMES = {  # an event of the cache -> the state of its pages from then on
    "allocate": "private",
    "publish": "published",
    "evict": "free",
    "free": "free",
}


def page_states(
    num_pages: int, events: Iterable[tuple[str, Sequence[int]]]
) -> list[tuple[str, list[Cell]]]:
    """Memory after each event (a kind of `BECOMES`, page numbers), for `draw_rows`."""
    states = ["free"] * num_pages
    rows = []
    for kind, pages in [("start", ()), *events]:
        for page in pages:
            states[page] = BECOMES[kind]
        cells = [(i * 1.0, 1.0, state, str(i)) for i, state in enumerate(states)]
        rows.append((kind, cells))
    return rows


# %% [markdown]
# Some pictures are better walked through. Of these the first is shown; on the site, buttons
# and the arrow keys lead to the next one.


# %% export="drawing.py" tags=["hide-input"]
@dataclass
class Steps:
    """Pictures of one thing at several moments, drawn to one scale."""

    frames: Sequence[Picture]

    def _repr_html_(self) -> str:
        right = max(frame.width for frame in self.frames)
        bottom = max(frame.height for frame in self.frames)
        shown = []
        for i, frame in enumerate(self.frames):
            frame._grow(right, bottom)
            shown.append(f"<div{' hidden' if i else ''}>{frame._repr_html_()}</div>")
        return f'<div class="steps">{"".join(shown)}</div>'
