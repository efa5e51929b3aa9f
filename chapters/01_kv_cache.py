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
# What would we have to keep, so that a step only costs the one new token?
#
# ## What the next token asks of the old ones
#
# In a transformer, tokens meet in one place only: attention. The new token makes a
# *query*, and compares it with a *key* of every token so far. The comparison gives
# weights, and with these the token takes an average of their *values*. Everything
# else (norms, projections, the MLP) treats a token by itself.
#
# One attention head, small enough to read:

# %%
import torch

torch.manual_seed(0)
width = 8
w_query, w_key, w_value = (torch.randn(width, width) / width**0.5 for _ in range(3))


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
    """One query [width] over keys and values [tokens, width]."""
    weights = torch.softmax(keys @ query / width**0.5, dim=0)
    return weights @ values


# %% [markdown]
# The query belongs to the new token and is used once. Keys and values belong to the
# *old* tokens, and every later token asks for them again. So these two are what we
# keep, and this is why it is called a KV cache and not a QKV cache.
#
# Below, the same sequence is processed twice: once with all keys and values made
# afresh at each step, once with a list that grows by one entry a step.

# %%
tokens = torch.randn(6, width)  # what six tokens look like when they enter this layer

afresh = [
    attend(tokens[i] @ w_query, tokens[: i + 1] @ w_key, tokens[: i + 1] @ w_value)
    for i in range(len(tokens))
]

keys, values, cached = [], [], []
for token in tokens:
    keys.append(token @ w_key)  # made once, kept
    values.append(token @ w_value)
    cached.append(attend(token @ w_query, torch.stack(keys), torch.stack(values)))

same = torch.allclose(torch.stack(afresh), torch.stack(cached), atol=1e-6)
print("same attention outputs:", same, "· keys made:", sum(range(1, 7)), "against", 6)

# %% [markdown]
# The causal mask makes this legal: token 3 never looks at token 4, so nothing that
# comes later changes what token 3 computed, in any layer. Its key and value are final
# the moment they are made.
#
# That sentence has a second half, which the rest of the book lives on. Token 3's key
# in layer 2 is made from token 3's *output of layer 1*, and that output is an average
# over tokens 0 to 3. What if one of those changes? Below, token 3 is changed, and we ask
# for each token whether its key in layer 2 is another one now.


# %%
def second_layer_keys(layer_input: torch.Tensor) -> torch.Tensor:
    mixed = [
        attend(
            t @ w_query, layer_input[: i + 1] @ w_key, layer_input[: i + 1] @ w_value
        )
        for i, t in enumerate(layer_input)
    ]
    return (layer_input + torch.stack(mixed)) @ w_key


changed = tokens.clone()
changed[3] += 1.0
moved = (second_layer_keys(tokens) - second_layer_keys(changed)).abs().amax(dim=1)
print("keys of layer 2 that changed:", [bool(m > 1e-4) for m in moved])

# %% [markdown]
# Tokens 0 to 2 did not notice, and tokens 4 and 5, which are the same tokens as before,
# have other keys. So a token's K/V are not a property of the token. They are a property of
# the token *and everything before it*. "The word *France* is already cached" means nothing;
# "these 37 tokens, in this order, from the very start, are cached" does. Only whole
# prefixes can be reused.
#
# ## What is saved
#
# With the cache, the prompt goes through the model once (the *prefill*), which yields
# the first output token. Each further output token costs one token-forward (a
# *decode* step). The last one is never put in: nobody asks for what follows it.

# %%
with_cache = prompt_tokens + (output_tokens - 1)
print(f"{without_cache:,} against {with_cache}: {without_cache / with_cache:.0f} times")

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows

steps = [[(0, 6, "computed", "6 new")]]
steps += [
    [(0, 6 + i, "plain", f"{6 + i} kept"), (6 + i, 1, "computed", "1")]
    for i in range(4)
]
draw_rows(
    [(f"step {i + 1}", cells) for i, cells in enumerate(steps)],
    caption="Six prompt tokens, five output tokens. Only the cells with a new token are "
    "computed; the rest are keys and values read from memory. Without a cache every "
    "cell would be computed in every step.",
)

# %% [markdown]
# ## What it costs
#
# Compute was traded for memory. How much? Each token keeps one key and one value in
# every layer, for every K/V head. For a model with 24 layers and 2 K/V heads of 64
# numbers each:


# %%
def kv_bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, bytes_each: int
) -> int:
    return 2 * layers * kv_heads * head_dim * bytes_each  # 2: a key and a value


for name, bytes_each in [("16 bit", 2), ("32 bit", 4)]:
    print(name, f"{kv_bytes_per_token(24, 2, 64, bytes_each):,} bytes per token")

# %% [markdown]
# At 32 bit a 493-token prompt holds 12 MB for as long as its request lives, and the
# memory set aside for all of them together is fixed. Keeping is not free, so *who may
# keep what, for how long* becomes a question with an owner. The engine of this book
# is the answer to it.
#
# ## What the cache does not keep
#
# It keeps no answer. It holds numbers that say how the prompt's tokens look to later
# tokens; the choice of the next token happens after that, from the logits, with
# whatever temperature the caller asked for. Two requests with one prompt, one at
# temperature 0 and one at temperature 1, need the same keys and values. They may
# share all of them, and still answer differently.
#
# We want to say this in code from the start: what was *asked* is fixed, what *happens*
# lives elsewhere. A request is frozen.

# %% export="request.py"
"""What was asked, and what comes back.

Everything here is frozen or plain data. What changes while a request runs lives with
its owner: pages with the prefix cache, queues with the scheduler.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

TokenIds = Sequence[int]  # any sequence of ints, or an encoded array("i")
ExtraKey = str | bytes | int | tuple[object, ...] | None


def encode_ids(token_ids: TokenIds) -> "array[int]":
    """Return the ids as an array of 32-bit ints; an `array("i")` comes back as it is.

    Converting a list costs more than looking its prefix up, so a request does it once.
    Raises `ValueError` for anything that is not a 32-bit integer.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    if isinstance(token_ids, str | bytes | bytearray):
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

    `max_tokens` None means: up to the end of the model's context. `temperature` 0 is
    greedy. `top_k` 0 or -1 keeps all tokens. `stop` strings end the text and are not
    part of it; `stop_token_ids` and the model's own end tokens (unless `ignore_eos`)
    end the output and stay in `token_ids`. Raises `ValueError` for bad values.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, given in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if given is not None and not isinstance(given, Iterable):
                raise ValueError(
                    f"SamplingParams: {name} must be a list, not {given!r}"
                )
            object.__setattr__(self, name, () if given is None else tuple(given))
        try:
            broken = [rule for holds, rule in self._rules() if not holds]
        except TypeError as error:
            broken = [str(error)]
        if broken:
            raise ValueError(f"SamplingParams: {broken[0]}")

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                self.max_tokens is None or _is_int(self.max_tokens, 1),
                f"max_tokens must be a whole number >= 1, not {self.max_tokens}",
            ),
            (
                0 <= self.temperature < float("inf"),
                f"temperature must be 0 or more, not {self.temperature}",
            ),
            (
                _is_int(self.top_k, -1),
                f"top_k must be 0 or -1 (all tokens) or at least 1, not {self.top_k}",
            ),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}"),
            (
                self.seed is None or _is_int(self.seed, -SEEDS, SEEDS),
                f"seed must be a whole number, not {self.seed!r}",
            ),
            (
                all(isinstance(s, str) and s for s in self.stop or ()),
                f"stop strings must be non-empty text, not {self.stop!r}",
            ),
            (
                all(_is_int(t, 0) for t in self.stop_token_ids or ()),
                f"stop_token_ids must be token ids, not {self.stop_token_ids!r}",
            ),
        ]


SEEDS = 2**64  # seeds lie between minus and plus this


def _is_int(value: object, least: int, most: int = SEEDS) -> bool:
    """A whole number of any kind (NumPy's too), within bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return least <= int(value) <= most


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
def check_extra_key(key: ExtraKey) -> None:
    """Raise `ValueError` unless a key is text, bytes, an int or a tuple of these."""
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, tuple):
            check_extra_key(part)
        elif part is not None and type(part) not in (str, bytes, int):
            kind = type(part).__name__
            raise ValueError(
                f"extra_key must be text, bytes, ints or a tuple, not {kind}"
            )


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

    @property
    def order(self) -> tuple[int, int]:
        """The order of service: priority first (smaller wins), then arrival."""
        return (self.priority, self.arrival)


# %% [markdown]
# And what comes back. `num_cached_tokens` is the number this book is about: how many of
# the prompt's tokens were *not* computed for this request. `ttft_s`, the time to the
# first token, is what the caller feels of it.


# %% export="request.py"
@dataclass(frozen=True)
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


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation; `finish_reason` is stop, length, abort, error, or None."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request after a step; final when `finished`.

    `num_cached_tokens` are the prompt tokens whose K/V were there already when the
    request was first admitted. It never changes afterwards.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt: str | None = field(default=None, repr=False)


# %%
prompt = encode_ids([504, 3575, 282, 4649, 314])
greedy = Request("0", prompt, SamplingParams(temperature=0))
creative = Request("1", prompt, SamplingParams(temperature=1.0, seed=7), arrival=1)
print(
    greedy.prompt_token_ids is creative.prompt_token_ids, greedy.order < creative.order
)

# %% [markdown]
# ## What still goes wrong
#
# Each request now keeps its own keys and values, and drops them when it ends. The
# second user who sends the same 493 tokens pays for all 493 again. To give them the
# first user's keys and values, the engine has to notice that the two prompts begin
# alike, and it cannot compare every new prompt with every old one. It needs a short
# name for a long past. That is chapter 2.
#
# ## Exercise
#
# A request with a prompt of 1,000 tokens and 50 output tokens runs with a KV cache, in
# the model above, at 16 bit. How many token-forwards does it cost, and how many bytes
# of K/V does it hold just before it ends? (Mind the last token.)

# %% tags=["solution"]
forwards = 1000 + (50 - 1)
held_bytes = forwards * kv_bytes_per_token(24, 2, 64, 2)
print(f"{forwards:,} token-forwards, {held_bytes:,} bytes")

# %%
assert (forwards, held_bytes) == (1049, 1049 * 12_288)

# %% [markdown]
# Every token that went through the model left one entry; the last output token never
# went in, so it has none. Remember that: *after g output tokens of a p-token prompt,
# p + g − 1 tokens have keys and values.* It decides which pages are complete in
# chapter 4.
#
# ## The pen
#
# The pictures of this book are drawn by the chapters' own code, from the runs that you
# see. Two shapes are enough: rows of cells (page tables, hash chains, schedules over
# time) and trees. A cell's colour says which state a page is in, and it is the same
# colour in every chapter (chapter 4 explains the states). Two more colours show work: prompt
# tokens being computed, and output tokens being decoded. Skip this section freely.

# %% export="drawing.py"
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

# %% export="drawing.py"
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


# %% export="drawing.py"
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

# %% export="drawing.py"
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


# %% export="drawing.py"
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


# %%
draw_rows(
    [
        ("page states", [(i, 1, each, each) for i, each in enumerate(PAGE_STATES)]),
        ("work", [(0, 1, "computed", "computed"), (1, 1, "decoded", "decoded")]),
    ],
    unit=84,
    caption="The colours of the page states, and of the two kinds of work, in every picture "
    "of the book. 'lost' marks what could have been reused and was not.",
)
