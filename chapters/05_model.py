# %% [markdown]
# # 5. A model that reads pages
#
# Request A has a prompt of 32 tokens. Request C has the same 32 and 8 more. Both start in the same
# forward pass. A computes its 32 tokens and is given pages 6 and 1 to write them to. C is told that
# its first 32 tokens lie in pages 6 and 1, and computes the last 8 only. When the pass begins, both
# pages are empty. What are C's logits worth?
#
# transformers is the judge. It makes a small Llama with random weights, 6 query heads sharing 2 K/V
# heads, and says what C's logits are when nobody shares anything.

# %% tags=["hide-output"]
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm.request import encode_ids

sizes = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,  # weights so large that mistakes show
}
torch.manual_seed(0)
reference = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
tokens = encode_ids([(7 * i) % 99 for i in range(40)])
with torch.no_grad():
    expected = reference(torch.tensor([list(tokens)])).logits[0]

# %% [markdown]
# Our own decoder gets the same weights, copied by name. (The cell uses the modules that this
# chapter is about to build.)

# %%
from minivllm.batch import Chunk
from minivllm.model import Decoder, ModelConfig
from minivllm.runner import ModelRunner


def copy_of(judge) -> Decoder:
    c, family = judge.config, judge.config.model_type
    heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    rope = c.rope_parameters if c.rope_parameters["rope_type"] == "llama3" else None
    config = ModelConfig(
        *(c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers),
        *(*heads, c.max_position_embeddings),
        rope_theta=c.rope_parameters["rope_theta"],
        rope_scaling=rope,
        norm_eps=c.rms_norm_eps,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    model = Decoder(config)
    weights = judge.state_dict().items()
    model.load_state_dict({name.removeprefix("model."): w for name, w in weights})
    return model


# %% name="together"
def verdict(found: torch.Tensor, wanted: torch.Tensor) -> str:
    return "equal" if (found - wanted).abs().max() < 1e-4 else "DIFFERENT"


model = copy_of(reference)
runner = ModelRunner(model, num_pages=8, page_size=16)
c = Chunk("C", tokens[32:], 32, [6, 1, 4], num_shared=2, samples=True)
a = Chunk("A", tokens[:32], 0, [6, 1], num_shared=0, samples=False)
print("C's logits:", verdict(runner.logits([c, a])[0], expected[39]))

# %% [markdown]
# Equal, and C even stands *before* A in the batch. So two things that "cached" seems to promise are
# not needed: the keys and values of a prefix need not have been there when the pass began, and they
# need not lie in one piece or in order. What is needed is smaller. Chapter 4 forbids such a page
# table: a page that is not committed must not be found. That rule stands, for a pass can fail. Here we
# only ask what the *model* needs, and chapter 9 will use the answer. This chapter builds the smallest
# decoder that can read pages, and finds out what it may rely on.
#
# ## What a forward pass must be told
#
# A training-style forward takes a rectangle: batch × length, padded. A serving engine
# has nothing rectangular. In one step, request A is in the middle of its prompt with 512
# tokens, B has 7 left, and C to H each put in one.

# %% name="padding"
new_tokens = [512, 7, 1, 1, 1, 1, 1, 1]
rows = len(new_tokens) * max(new_tokens)
print(f"rectangle: {rows:,} rows, end to end: {sum(new_tokens)}")

# %% [markdown]
# [4,096](#padding) rows, of which all but [525](#padding) are padding. So the tokens are laid
# end to end in one flat row. Norms, projections and the MLP treat a token by itself and need not
# know whose it is. Only attention asks, and for it there is a *chunk* for each request that says:
# these are my new tokens, they start at this position, and my keys and values lie in these pages.
#
# This description is all that the scheduler and the model know of each other. It holds
# no tensors, so the scheduler can be tested without torch.

# %% export="batch.py"
"""What one forward pass computes: some new tokens of several requests."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.request import Logprobs, SamplingParams


@dataclass(slots=True, eq=False)
class Chunk:
    """New tokens of one request: positions `start` to `start + len(token_ids) - 1`.

    `pages` is the request's page table. Its first `num_shared` pages are published:
    they are read and never written. `samples` says that the chunk ends with the last
    known token, so that the next one is to be chosen from its logits. `known` are all
    tokens so far, the chunk's owner's own array, and the first `num_prompt` the prompt.
    Whoever runs the chunk fills in the logprobs that the params ask for.
    """

    request_id: str
    token_ids: "array[int]"
    start: int
    pages: Sequence[int]
    num_shared: int
    samples: bool
    params: SamplingParams = SamplingParams()
    known: "array[int]" = field(default_factory=lambda: array("i"))
    num_prompt: int = 0
    logprobs: Logprobs | None = None  # around the chosen token
    prompt_logprobs: Sequence[Logprobs] = ()  # of the prompt tokens after `start`

    @property
    def num_scored(self) -> int:
        """How many of the new tokens have a prompt token after them, to be scored."""
        scores = self.params.prompt_logprobs is not None
        return max(0, min(self.end, self.num_prompt - 1) - self.start) if scores else 0

    @property
    def end(self) -> int:
        """The number of tokens whose K/V exist after the forward pass."""
        return self.start + len(self.token_ids)


# %% [markdown]
# A prefill chunk and a decode step are the same thing here; a decode step is a chunk of one token.
# And a slot is arithmetic: page `pages[i // 16]`, offset `i % 16`. Move the chunk below to another
# place, and give it other pages.

# %% tags=["live"]
from minivllm.batch import Chunk
from minivllm.request import encode_ids

chunk = Chunk(
    "A", encode_ids([7, 8, 9]), start=14, pages=[5, 2], num_shared=0, samples=True
)
for position in range(chunk.start, chunk.end):  # change me
    page, offset = chunk.pages[position // 16], position % 16
    print("token", position, "-> page", page, "slot", page * 16 + offset)

# %% [markdown]
# ## Attention through a page table
#
# K/V memory is one tensor for keys and one for values in each layer, `[slots, kv_heads,
# head_dim]`. To attend, gather the slots of the request's context, in the order of its tokens, and
# go on as always.
#
# The plan of a batch (which slots to write, which to read, which mask) is the same for
# all layers, so it is made once a step, and used by every layer. A decode step needs no mask, since
# nothing comes after its token. A chunk at the beginning of its prompt needs none either: its mask
# would be a triangle, which PyTorch knows by name, and half of which it need not compute. (`Read` is for later: the
# plain way asks chunk by chunk, and the fast one, at the end of this part, must agree with it.)

# %% export="attention.py"
"""Attention that reads keys and values through page tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.batch import Chunk


@dataclass(frozen=True)
class ChunkPlan:
    """Where one chunk finds its rows and its context.

    `rows` are its rows in the flat batch. All its tokens so far are `length` many, and
    lie in `pages`.
    """

    rows: slice
    pages: Sequence[int]
    page_size: int
    length: int
    device: torch.device

    @property
    def num_new(self) -> int:
        """How many of its tokens are computed now."""
        return int(self.rows.stop - self.rows.start)

    @property
    def shareable(self) -> tuple[int, ...]:
        """The pages that others may read along: all before that of its last token."""
        return tuple(self.pages[: (self.length - 1) // self.page_size])

    @cached_property
    def context(self) -> Tensor:
        """The slots of its tokens so far [length]."""
        firsts = torch.tensor(self.pages, dtype=torch.long)[:, None] * self.page_size
        slots = (firsts + torch.arange(self.page_size)).flatten()
        return slots[: self.length].to(self.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """True where a new token may look, [new, length]: at everything up to itself.

        None for a single token, and for a chunk that begins its prompt: there the first
        sees one, the second two, and so on.
        """
        start = self.length - self.num_new
        if start in (0, self.length - 1):
            return None
        queries = torch.arange(start, self.length)[:, None]
        return (torch.arange(self.length)[None, :] <= queries).to(self.device)


@dataclass(frozen=True)
class Read:
    """Single tokens that attend in one product: equally many to each context.

    `rows` [contexts * readers] are theirs in the batch, `slots` [contexts * length] are
    what they look at, and `bias` [contexts, 1, 1, length] is -inf where a shorter
    context has ended, or None. `keys` and `values` [contexts * length, kv_heads,
    head_dim] are where every layer puts them side by side: memory is asked for once.
    `by_head` is the same memory as `attend` wants it.
    """

    rows: Tensor
    slots: Tensor
    bias: Tensor | None
    keys: Tensor
    values: Tensor
    by_head: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """What every layer of a forward pass needs to know about the batch.

    `positions` and `write_slots` have one entry for each new token. `reads` are for
    those single tokens that are read together, and have no entry in `chunks`.
    """

    positions: Tensor
    write_slots: Tensor
    chunks: Sequence[ChunkPlan]
    reads: Sequence[Read] = ()


# %% [markdown]
# One case needs care. A request whose whole prompt is cached still has to compute one
# token, since the cache keeps keys and values but no logits. That token's K/V lie in a
# published page already. Writing them again would write, under other readers' eyes,
# values that may differ in the last bit. So a token whose page is shared writes to a
# *scratch* page instead, which nobody reads. It reads the shared one like everybody.


# %% export="attention.py"
def plan_batch(
    chunks: Sequence[Chunk], page_size: int, scratch_page: int, device: torch.device
) -> Plan:
    """Lay the chunks end to end and find every slot that they write or read."""
    positions: list[int] = []
    write_slots: list[int] = []
    plans: list[ChunkPlan] = []
    for chunk in chunks:
        first = len(positions)
        positions += range(chunk.start, chunk.end)
        write_slots += _write_slots(chunk, page_size, scratch_page)
        rows = slice(first, len(positions))
        plans.append(ChunkPlan(rows, chunk.pages, page_size, chunk.end, device))
    return Plan(_longs(positions, device), _longs(write_slots, device), plans)


def _write_slots(chunk: Chunk, page_size: int, scratch_page: int) -> list[int]:
    """A slot for each new token: in its own page, or in scratch for a shared one."""
    places = (divmod(i, page_size) for i in range(chunk.start, chunk.end))
    return [
        (scratch_page if i < chunk.num_shared else chunk.pages[i]) * page_size + j
        for i, j in places
    ]


def _longs(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long).to(device)


# %% [markdown]
# Here is the plan of a real batch, with pages of 4 to fit on the screen. B is in the middle of its
# prompt (positions 4 to 7), C decodes position 5, and D has found eight cached tokens, in the very
# pages that B holds, and computes positions 8 and 9.

# %% name="plan"
cpu = torch.device("cpu")
batch = [
    Chunk("B", encode_ids([11, 12, 13, 14]), 4, [6, 1], 0, samples=True),
    Chunk("C", encode_ids([21]), 5, [3, 0], 0, samples=True),
    Chunk("D", encode_ids([31, 32]), 8, [6, 1, 4], 2, samples=True),
]
plan = plan_batch(batch, page_size=4, scratch_page=7, device=cpu)
print("positions: ", plan.positions.tolist())
print("writes to: ", plan.write_slots.tolist())
print("C reads:   ", plan.chunks[1].context.tolist())

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows

names = [*(f"page {page}" for page in range(7)), "scratch"]
rows = [("memory", [(4 * i, 4, "free", name) for i, name in enumerate(names)])]
for chunk, placed in zip(batch, plan.chunks, strict=True):
    for i in range(placed.rows.start, placed.rows.stop):
        seen = placed.context
        if placed.mask is not None:
            seen = seen[placed.mask[i - placed.rows.start]]
        cells = []
        for token, slot in enumerate(seen.tolist()):
            state = "pinned" if token // 4 < chunk.num_shared else "private"
            own = slot == plan.write_slots[i]
            cells.append((slot, 1, "computed" if own else state, str(token)))
        rows.append((f"{chunk.request_id}, token {int(plan.positions[i])}", cells))
draw_rows(
    rows,
    unit=20,
    caption="The seven query rows of the batch, and the slots that each may look at; the number "
    "in a cell is the token that lies there. Indigo: the row's own token. Blue: pages that D "
    "shares with B, four of whose tokens B writes in this very pass.",
)

# %% [markdown]
# Now a layer's turn. The order inside `forward` is a promise: *first* all new keys and values of
# the whole batch are written, *then* anybody attends.


# %% export="attention.py"
class PagedAttention:
    """K/V memory of one layer, and attention over it: PyTorch's SDPA, any device.

    `keys` and `values` are [slots, kv_heads, head_dim]; a group of heads shares one.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def forward(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
        """Write the new K/V, then attend. All are [tokens, heads, head_dim]."""
        self.keys.index_copy_(0, plan.write_slots, key)
        self.values.index_copy_(0, plan.write_slots, value)
        return self.attend(query, plan)

    def attend(self, query: Tensor, plan: Plan) -> Tensor:
        """What the new tokens find in this layer's memory [tokens, heads, head_dim]."""
        if len(plan.reads) == 1 and not plan.chunks:
            return self._read(query, plan.reads[0])[0].reshape(query.shape)
        out = torch.zeros_like(query)
        for chunk in plan.chunks:
            out[chunk.rows] = self._attend(query[chunk.rows], chunk)
        if plan.reads:
            self._read_all(query, plan.reads, out)
        return out


# %% [markdown]
# Attending is PyTorch's own function, on gathered keys and values. There are fewer K/V heads than
# query heads: a group of neighbouring query heads, three in our small Llama, reads one key and one
# value. Chapter 1 said what for: memory. `enable_gqa` does the grouping.


# %% export="attention.py"
class PagedAttention(PagedAttention):
    def _attend(self, query: Tensor, chunk: ChunkPlan) -> Tensor:
        keys = self.keys.index_select(0, chunk.context).transpose(0, 1)
        values = self.values.index_select(0, chunk.context).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None and len(query) > 1,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


# %% [markdown]
# One request of 11 tokens, whose pages lie at 5, 2 and 7, in two chunks and a decode step, against
# attention over contiguous tensors:


# %% name="scattered"
def dense_attention(*qkv: torch.Tensor) -> torch.Tensor:
    heads_first = (x.transpose(0, 1)[None] for x in qkv)
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


torch.manual_seed(0)
heads, kv_heads, head_dim = 4, 2, 8
q, k, v = (torch.randn(11, n, head_dim) for n in (heads, kv_heads, kv_heads))
layer = PagedAttention(*(torch.zeros(9 * 4, kv_heads, head_dim) for _ in range(2)))

moments, paged = [], []
for start, end in [(0, 7), (7, 10), (10, 11)]:
    chunk = Chunk("0", encode_ids(range(start, end)), start, [5, 2, 7], 0, True)
    plan = plan_batch([chunk], 4, scratch_page=8, device=cpu)
    moments.append((start, end, plan))
    paged.append(layer.forward(q[start:end], k[start:end], v[start:end], plan))

print("paged and dense:", verdict(torch.cat(paged), dense_attention(q, k, v)))
written = layer.keys.abs().sum((1, 2)).nonzero().flatten().tolist()
print("slots written:", written)

# %% tags=["hide-input"]
from minivllm.drawing import Steps


def memory_picture(filled: dict[int, int], new: list[int], read: list[int], words: str):
    pages = [(4 * page, 4, "free", f"page {page}") for page in range(8)]
    tokens = [
        (slot, 1, "computed" if slot in new else "private", str(token))
        for slot, token in filled.items()
    ]
    order = [
        (i, 1, "computed" if slot in new else "private", str(filled[slot]))
        for i, slot in enumerate(read)
    ]
    rows = [("memory", pages), ("tokens there", tokens), ("gathered", order)]
    return draw_rows(rows, unit=20, caption=words)


filled: dict[int, int] = {}
frames = []
for start, end, plan in moments:
    new, read = plan.write_slots.tolist(), plan.chunks[0].context.tolist()
    filled |= dict(zip(new, range(start, end), strict=True))
    what = f"token {start}" if end - start == 1 else f"tokens {start} to {end - 1}"
    caption = f"A layer writes {what} (indigo) where the table says, then gathers in token order."
    frames.append(memory_picture(filled, new, read, caption))
Steps(frames)

# %% [markdown]
# The numbers in the cells are tokens. Slots [20 to 23](#scattered) are page 5 and come first,
# slots [8 to 11](#scattered) are page 2. Memory order is not token order, and nothing depends on it.
#
# ## Written, then read, in one step
#
# Now the riddle of the beginning can be taken apart. In every layer, C's queries meet keys that A's
# tokens put there a moment before. What if the order were the other one? And is it enough to have
# the right order, whatever the layer does? Take a layer of another kind, a recurrent one, as in
# Mamba or in linear attention. It keeps no keys. It carries a *state* from token to token, and a
# prefix is cached by storing the state behind it, say at the end of each page.


# %%
def recur(inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """States after each input [tokens, width]: nine tenths of the old, and the new."""
    states = []
    for each in inputs:
        state = 0.9 * state + each
        states.append(state)
    return torch.stack(states)


def paged_recurrence(inputs, chunks, stored):
    """Start each chunk from the state stored behind its prefix; store new ones."""
    starts = [
        stored[c.pages[c.start // 16 - 1]] if c.start else stored[-1] for c in chunks
    ]
    made = [recur(x, start) for x, start in zip(inputs, starts, strict=True)]
    for chunk, states in zip(chunks, made, strict=True):
        for i in range(chunk.start, chunk.end):
            if i % 16 == 15:
                stored[chunk.pages[i // 16]] = states[i - chunk.start]
    return made


# %% [markdown]
# C's 8 rows are compared with those of a run of its own, four times: attention in one pass,
# attention that reads before it writes, and the recurrence in one pass and in two.


# %%
class ReadsFirst(PagedAttention):
    def forward(self, query, key, value, plan):
        out = [self._attend(query[chunk.rows], chunk) for chunk in plan.chunks]
        self.keys.index_copy_(0, plan.write_slots, key)
        self.values.index_copy_(0, plan.write_slots, value)
        return torch.cat(out)


def attention_rows(kind) -> torch.Tensor:
    layer = kind(*(torch.zeros(9 * 16, kv_heads, head_dim) for _ in range(2)))
    plan = plan_batch([a, c], 16, scratch_page=8, device=cpu)
    return layer.forward(q, k, v, plan)[32:]


# %% name="order" claims="V06"
torch.manual_seed(0)
q, k, v = (torch.randn(40, n, head_dim) for n in (heads, kv_heads, kv_heads))
dense = dense_attention(q, k, v)[32:]
x = torch.randn(40, 16)
alone = recur(x, torch.zeros(16))[32:]
one_pass = paged_recurrence([x[:32], x[32:]], [a, c], torch.zeros(9, 16))[1]
stored = torch.zeros(9, 16)
paged_recurrence([x[:32]], [a], stored)
two_passes = paged_recurrence([x[32:]], [c], stored)[0]

for name, rows, wanted in [
    ("attention that writes, then reads", attention_rows(PagedAttention), dense),
    ("attention that reads, then writes", attention_rows(ReadsFirst), dense),
    ("recurrence, one pass", one_pass, alone),
    ("recurrence, two passes", two_passes, alone),
]:
    good = sum(verdict(*pair) == "equal" for pair in zip(rows, wanted, strict=True))
    print(f"{name:34} {good} of {len(wanted)} rows equal")

# %% [markdown]
# The recurrence has a write and a read as well. It reads first, and it cannot do otherwise: what it
# would have to write is not there before A has been walked through. A token's key in a
# layer depends on *that token's* input to the layer. All keys of a batch can be made at once, before
# anybody attends. A state depends on all tokens before: what C should read is the *result* of A's
# walk through 32 tokens. C would have to wait for A inside the layer, and then it is no longer one pass
# over the batch. So the freedom that chapter 9 will use, to promise a page to others before it is
# written, holds for attention layers and for no recurrent one. vLLM, which also runs models that mix
# both kinds, can store states at block boundaries, and then cuts prompts there.

# %% [markdown]
# ## Read together, and once
#
# A chunk at a time is right, and slow. Sixteen requests that decode are sixteen chunks of one
# token: in each layer sixteen small products, one after the other. And if they all begin with
# the same 480 tokens, the same pages are fetched sixteen times.
#
# Single tokens can be asked together. Their queries are stacked, the contexts gathered side by
# side, and one product answers all. A context that is shorter is filled up, with a bias of −∞ over
# the filling. Contexts of nearly the same length go into one product, as long as the filling costs less than a
# product of its own; others are split into several reads.
#
# Shared pages are in the tables: equal page numbers, from the first page on. So the tables of a
# batch form a radix tree, as prompts did in chapter 3, and each of its edges is a run of pages that
# several requests read. It is gathered once, and the queries of all these requests meet it in
# one product. An edge that saves less than a product costs is left to those below it.

# %% export="attention.py"
MIN_SAVED = 256  # tokens: a product of its own costs about as much as reading so many


def shared_runs(
    tables: Sequence[tuple[int, ...]], page_size: int
) -> list[tuple[list[int], int, int]]:
    """Runs of pages that several tables share behind equal beginnings.

    A run is (which tables, first page, end): an edge of the radix tree of the tables.
    An edge that would save too little stays a part of those below it.
    """
    runs, todo = [], [([*range(len(tables))], 0)] if tables else []
    while todo:
        members, start = todo.pop()
        some = [tables[i] for i in members]
        end = _common(min(some), max(some))  # in order: all others lie between
        if (len(members) - 1) * (end - start) * page_size >= MIN_SAVED:
            runs.append((members, start, end))
            start = end
        heirs: dict[int, list[int]] = {}
        for i in members:
            if len(tables[i]) > end:
                heirs.setdefault(tables[i][end], []).append(i)
        todo += [(heir, start) for heir in heirs.values() if len(heir) > 1]
    return runs


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many pages two tables have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


# %% export="attention.py"
def read_together(plan: Plan, page_size: int, memory: Tensor) -> Plan:
    """The same plan, with its single tokens in few products, and shared pages once.

    `memory` is that of any layer's keys, for its shape and its numbers' format.
    """
    singles = [c for c in plan.chunks if c.num_new == 1]
    if not singles:
        return plan
    reads, starts = shared_reads(singles, page_size, memory)
    own = [c.context[start:] for c, start in zip(singles, starts, strict=True)]
    for members in _alike([len(context) for context in own]):
        contexts = [own[i] for i in members]
        reads.append(_read_of([singles[i] for i in members], contexts, memory))
    others = [c for c in plan.chunks if c.num_new > 1]
    return replace(plan, chunks=others, reads=reads)


def shared_reads(
    singles: Sequence[ChunkPlan], page_size: int, memory: Tensor
) -> tuple[list[Read], list[int]]:
    """A read for each shared run, and where each token's own context starts."""
    tables = [chunk.shareable for chunk in singles]
    starts, reads = [0] * len(singles), []
    for members, start, end in shared_runs(tables, page_size):
        run = singles[members[0]].context[start * page_size : end * page_size]
        reads.append(_read_of([singles[i] for i in members], [run], memory))
        for i in members:
            starts[i] = end * page_size
    return reads, starts


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of places with lengths so much alike that padding them costs little."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        last = groups[-1] if groups else []
        if last and (lengths[i] - lengths[last[-1]]) * len(last) <= MIN_SAVED:
            last.append(i)
        else:
            groups.append([i])
    return [sorted(group) for group in groups]


def _read_of(
    readers: Sequence[ChunkPlan], contexts: Sequence[Tensor], memory: Tensor
) -> Read:
    """One product for these contexts; each is filled up with its last slot."""
    lengths = [len(context) for context in contexts]
    rows = _longs([chunk.rows.start for chunk in readers], memory.device)
    longest, bias = max(lengths), None
    if min(lengths) < longest:
        over = torch.arange(longest) >= torch.tensor(lengths)[:, None, None, None]
        bias = torch.zeros(over.shape).masked_fill(over, -math.inf).to(memory.device)
        contexts = [torch.cat((c, c[-1:].expand(longest - len(c)))) for c in contexts]
    keys = memory.new_empty(len(lengths) * longest, *memory.shape[1:])
    values = torch.empty_like(keys)
    shape = (len(lengths), longest, *memory.shape[1:])
    by_head = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
    return Read(rows, torch.cat(list(contexts)), bias, keys, values, by_head)


# %% [markdown]
# A K/V head answers its group of query heads side by side; `by_row` sorts the answers by token again.
# A token now gets several averages, one of the shared run and one of what is its own, and needs a
# single one. Softmax divides by a sum of weights. Who knows both sums can put two averages together:
# each counts by its share of the whole sum. Sums of exponentials overflow, so their
# logarithms are kept. PyTorch's fused kernel for CPUs returns this logarithm beside the average;
# elsewhere it is three lines.


# %% export="attention.py"
def attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weighted averages of the values, and the logarithm of the sums of the weights.

    All are [contexts, kv_heads, tokens, head_dim]; the sums are [..., queries, 1].
    """
    if has_fused_attention(query.device):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum = fused(query, keys, values, attn_mask=bias)
        return out, log_sum[..., None]
    scores = query.float() @ keys.float().transpose(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores if bias is None else scores + bias
    log_sum = scores.logsumexp(-1, keepdim=True)
    out = (scores - log_sum).exp() @ values.float()
    return out.to(query.dtype), log_sum


def has_fused_attention(device: torch.device) -> bool:
    """PyTorch tells these sums for a CPU only: elsewhere `attend` adds them up."""
    return device.type == "cpu"


def by_row(x: Tensor, rows: int, heads: int, head_dim: int) -> Tensor:
    """[contexts, kv_heads, readers * group, any] -> [rows, heads, any]."""
    contexts, kv_heads = x.shape[:2]
    split = x.reshape(contexts, kv_heads, rows // contexts, heads // kv_heads, -1)
    return split.transpose(1, 2).reshape(rows, heads, -1)


# %% [markdown]
# Two halves of one context, put together, against the whole:

# %% name="halves"
torch.manual_seed(0)
asked, keys, values = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, 11, 8)
whole, _ = attend(asked, keys, values, None)
(one, one_sum), (two, two_sum) = (
    attend(asked, keys[:, :, part], values[:, :, part], None)
    for part in (slice(0, 7), slice(7, 11))
)
share = torch.sigmoid(two_sum - one_sum)  # e^two / (e^one + e^two)
print("one average of two:", verdict(torch.lerp(one, two, share), whole))
print("the mean of the two:", verdict((one + two) / 2, whole))


# %% export="attention.py"
class PagedAttention(PagedAttention):
    def _read(self, query: Tensor, read: Read) -> tuple[Tensor, Tensor]:
        """Averages and sums of one product, by context: see `by_row`."""
        torch.index_select(self.keys, 0, read.slots, out=read.keys)
        torch.index_select(self.values, 0, read.slots, out=read.values)
        contexts, kv_heads, _, head_dim = read.by_head[0].shape
        if len(query) == contexts:
            asked = query.view(contexts, kv_heads, -1, head_dim)
        else:
            group = query.shape[1] // kv_heads
            asked = query.view(contexts, -1, kv_heads, group, head_dim)
            asked = asked.transpose(1, 2).flatten(2, 3)
        return attend(asked, *read.by_head, read.bias)

    def _read_all(self, query: Tensor, reads: Sequence[Read], out: Tensor) -> None:
        """Average the averages of a token's reads, each weighed by its sum."""
        sums = query.new_full((*query.shape[:2], 1), -math.inf, dtype=torch.float32)
        for read in reads:
            found, shape = self._read(query[read.rows], read), query.shape[1:]
            part, part_sum = (by_row(x, len(read.rows), *shape) for x in found)
            known, known_sum = out[read.rows].float(), sums[read.rows]
            share = torch.sigmoid(part_sum - known_sum)
            whole = torch.lerp(known, part.float(), share).to(out.dtype)
            out.index_copy_(0, read.rows, whole)
            sums.index_copy_(0, read.rows, torch.logaddexp(known_sum, part_sum))


# %% [markdown]
# Sixteen requests of 494 tokens that share 480, asked both ways:

# %% name="once"
layer = PagedAttention(*(torch.randn(48 * 16, kv_heads, head_dim) for _ in range(2)))
alike = [
    Chunk(str(i), encode_ids([0]), 493, [*range(30), 30 + i], 30, True)
    for i in range(16)
]
plan = plan_batch(alike, 16, scratch_page=47, device=cpu)
together = read_together(plan, 16, layer.keys)
q, k, v = (torch.randn(16, n, head_dim) for n in (heads, kv_heads, kv_heads))
rows = [layer.forward(q, k, v, each) for each in (plan, together)]
print("slots, chunk by chunk:", f"{sum(c.length for c in plan.chunks):,}")
print("slots, together:      ", [len(read.slots) for read in together.reads])
print("the same rows:        ", verdict(*rows))

# %% [markdown]
# [7,904](#once) slots become [480](#once) and [224](#once). A prefix cache is said to save
# prefill. It saves part of every decode step as well, for those who decode at the same time, and
# nobody has to arrange it: the page tables are there.
#
# ## One product for several layers
#
# The decoder's weights are read from memory in every step, and with few tokens in the batch that
# reading is the step's time. Query, key and value are three layers of one input, as are gate
# and up: three passes over small matrices, or one over a larger one. And oneDNN, PyTorch's
# library for CPUs, reads weights faster that lie in an order of its own. So a `Product`
# begins as its layers, one by one, under the names of the checkpoint. `pack` joins their weights.

# %% export="linear.py"
"""Linear layers, joined and laid out for the processor."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Multiply = Callable[[Tensor], Tensor]
Maker = Callable[[Tensor, Tensor | None], Multiply]  # of a weight and a bias


class Product:
    """Linear layers that read the same input; their outputs side by side.

    The layers keep the names of the checkpoint. `pack` takes their weights from them.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.multiply: Multiply = self._one_by_one

    def __call__(self, x: Tensor) -> Tensor:
        """All outputs [tokens, sum of the layers' outputs]."""
        return self.multiply(x)

    def _one_by_one(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


# %% [markdown]
# Joining makes a copy, unless the layers' weights lie side by side already. Whoever loads a model can see to
# that: `place` takes memory for the joined weight, and makes its rows the weights of the layers.
#
# Packed weights can only be multiplied by, and the plain ones would be a second copy. They are given
# up, product by product, so that both are never there at once. Where oneDNN cannot pack, on another
# device or with another format of numbers, the joined weight is multiplied as it is.


# %% export="linear.py"
class Product(Product):
    def place(self, empty: Callable[[Sequence[int]], Tensor]) -> None:
        """Give the layers' weights new memory side by side, to be filled."""
        sizes = [layer.out_features for layer in self.layers]
        weight = empty((sum(sizes), self.layers[0].in_features))
        for layer, rows in zip(self.layers, torch.split(weight, sizes), strict=True):
            layer.weight = nn.Parameter(rows, requires_grad=False)

    def pack(self, make: Maker) -> None:
        """Join the layers' weights, and give up the plain ones; once is enough."""
        if self.layers[0].weight is None:
            return
        weight = _joined([layer.weight.detach() for layer in self.layers])
        biases = [
            layer.bias.detach() for layer in self.layers if layer.bias is not None
        ]
        self.multiply = make(weight, torch.cat(biases) if biases else None)
        for layer in self.layers:
            layer.weight = layer.bias = None  # type: ignore[assignment]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows: as they lie, if side by side, or else a copy."""
    first, storage = parts[0], {part.untyped_storage().data_ptr() for part in parts}
    ends = accumulate((part.nbytes for part in parts), initial=first.data_ptr())
    beside = all(part.data_ptr() == end for part, end in zip(parts, ends, strict=False))
    if beside and len(storage) == 1 and all(part.is_contiguous() for part in parts):
        shape = (sum(map(len, parts)), first.shape[1])
        return first.as_strided(shape, first.stride())
    return torch.cat(list(parts))


def packed_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """x -> x times weight, plus bias: packed by oneDNN where it can do that."""
    if not can_pack(weight):
        return partial(F.linear, weight=weight, bias=bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN is there, and fast with such numbers on this processor."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    ops = torch.ops.mkldnn
    if weight.dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


# %% [markdown]
# ## The decoder
#
# The rest is an ordinary decoder, on flat tokens. Its shape is a small frozen record. The
# three families differ in it by two flags: Qwen2 adds a bias to the
# query, key and value projections; Qwen3 normalises each query and key head.

# %% export="model.py"
"""One decoder for Llama, Qwen2 and Qwen3, on flat batches of tokens.

Parameters carry the names that Hugging Face checkpoints use, so that loading is a
matter of copying.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention import PagedAttention, Plan
from minivllm.linear import Maker, Product, packed_product


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `rope_scaling` is Llama 3's table, or None."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    norm_eps: float = 1e-6
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)


# %% [markdown]
# A shape that cannot be is refused here, before the first weight is read.


# %% export="model.py"
class ModelConfig(ModelConfig):
    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers"):
            self._check(name, int)
        for name in ("num_heads", "num_kv_heads", "head_dim", "max_context"):
            self._check(name, int)
        for name in ("rope_theta", "norm_eps"):
            self._check(name, float)
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            shape = f"{self.num_heads}, {self.num_kv_heads}, {self.head_dim}"
            raise ValueError(f"heads, K/V heads and head_dim do not fit: {shape}")

    def _check(self, name: str, kind: type[int] | type[float]) -> None:
        value = getattr(self, name)
        fits = isinstance(value, int | kind) and not isinstance(value, bool)
        if not fits or not 0 < value < math.inf:
            raise ValueError(
                f"{name} must be a positive {kind.__name__}, not {value!r}"
            )

    def kv_bytes_per_token(self, bytes_each: int) -> int:
        """A key and a value for each K/V head in each layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_each


# %% [markdown]
# ### Where a token stands
#
# Position enters through rotation (RoPE, *rotary position embedding*): pairs of numbers in each query and key head are turned
# by an angle that grows with the position, slowly for some pairs and fast for others.
# Keys are turned before they are stored.
#
# Llama 3 stretches the slow rotations to reach longer contexts. `turns` says how often a
# pair goes round within the original context: pairs with few turns are slowed down, pairs
# with many are left alone, and those between are blended.


# %% export="model.py"
def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angles per position, float32 [head_dim / 2], with Llama 3's scaling if set."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    plain = 1.0 / config.rope_theta ** (steps / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    factor, low, high = (
        float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor")
    )
    turns = int(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (blend + (1 - blend) / factor)


def rotation(angles: Tensor) -> tuple[Tensor, Tensor]:
    """What `rotate` multiplies by: angles [..., dim / 2] -> two of [..., dim]."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of numbers of x [tokens, heads, dim]: each half with the other."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


# %% [markdown]
# Why turn them? Compare a query and a key, first at positions 5 and 3, then at 105 and 103:

# %% name="relative"
config = ModelConfig(99, 48, 64, 3, 6, 2, head_dim=8, max_context=256)
frequencies = rope_frequencies(config)
torch.manual_seed(0)
query, key = torch.randn(2, 1, 1, 8)


def at(x: torch.Tensor, position: int) -> torch.Tensor:
    return rotate(x, *rotation(position * frequencies)).flatten()


scores = [at(query, m) @ at(key, n) for m, n in [(5, 3), (105, 103), (5, 4)]]
print("same distance, same score: ", torch.allclose(scores[0], scores[1], atol=1e-4))
print("other distance, same score:", torch.allclose(scores[0], scores[2], atol=1e-4))
print(
    "same key at 3 and at 103:  ", torch.allclose(at(key, 3), at(key, 103), atol=1e-4)
)

# %% [markdown]
# The score depends on the distance alone. The stored key does not: it carries its absolute position
# with it. The same words 100 tokens later have other keys, in layer 1 already, which is one more
# reason why only *prefixes* are shared.
#
# A model that was trained with stretched rotations and is run without them still talks, and a
# loader that skips one line of `config.json` makes that mistake. So look at the numbers, for the shape
# of Llama 3.1 8B (64 pairs, base 500,000, original context 8,192):

# %% name="scaling"
scaling = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
scaling |= {"original_max_position_embeddings": 8192}
shape = {"head_dim": 128, "max_context": 1, "rope_theta": 5e5}
plain = rope_frequencies(ModelConfig(1, 1, 1, 1, 1, 1, **shape))
scaled = rope_frequencies(ModelConfig(1, 1, 1, 1, 1, 1, rope_scaling=scaling, **shape))
ratio = (scaled / plain).tolist()
print({i: round(ratio[i], 4) for i in (28, 29, 31, 35, 63)})

# %% tags=["hide-input"]
shown = [(i, round(ratio[i], 3)) for i in range(27, 37)]
draw_rows(
    [
        (
            f"pair {i}",
            [(0, wide, "computed", ""), (wide, 0.15, "plain", f"{wide:.3f}")],
        )
        for i, wide in shown
    ],
    unit=420,
    caption="How much slower each pair of numbers turns under Llama 3's scaling. Up to pair 28 "
    "nothing changes, from pair 35 on everything is eight times slower; six pairs lie between.",
)

# %% [markdown]
# ### A layer
#
# The one normalisation that all three families use. PyTorch has it, and computes it in 32 bit
# whatever the weights are: squaring 16-bit numbers loses too much.


# %% export="model.py"
class RMSNorm(nn.Module):
    """Scale to unit mean square, in float32, and multiply by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


# %% [markdown]
# The attention layer makes queries, keys and values for the new tokens and hands them to
# the memory, which knows about pages. The layer does not.


# %% export="model.py"
class Attention(nn.Module):
    """Projections around `PagedAttention`, for flat tokens [tokens, hidden]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        wide, narrow = (
            config.num_heads * self.head_dim,
            config.num_kv_heads * self.head_dim,
        )
        self.q_proj = nn.Linear(hidden, wide, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, narrow, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, narrow, bias=config.qkv_bias)
        self.o_proj = nn.Linear(wide, hidden, bias=False)
        self.qkv = Product(self.q_proj, self.k_proj, self.v_proj)
        self.output = Product(self.o_proj)
        self.q_norm, self.k_norm = _head_norm(config), _head_norm(config)
        self.heads = (config.num_heads, config.num_kv_heads)

    def forward(
        self,
        x: Tensor,
        memory: PagedAttention,
        plan: Plan,
        turns: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend from the new tokens to all tokens of their requests."""
        by_head = self.qkv(x).view(len(x), -1, self.head_dim)
        (num_asking, num_keys), turned = self.heads, sum(self.heads)
        if self.q_norm is not None and self.k_norm is not None:
            parts = [num_asking, num_keys, num_keys]
            query, key, value = torch.split(by_head, parts, dim=1)
            by_head = torch.cat((self.q_norm(query), self.k_norm(key), value), dim=1)
        asks = rotate(by_head[:, :turned], *turns)
        query, key = asks[:, :num_asking], asks[:, num_asking:]
        out = memory.forward(query, key, by_head[:, turned:], plan)
        return self.output(out.view(len(x), -1))


def _head_norm(config: ModelConfig) -> RMSNorm | None:
    return RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None


# %% [markdown]
# The other half of a layer treats every token by itself, and a layer is the two halves, each
# added to what came in. How all layers are run is a function, so that a later chapter can run them
# otherwise.


# %% export="model.py"
class MLP(nn.Module):
    """The gated feed-forward network of a layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)
        self.gate_and_up = Product(self.gate_proj, self.up_proj)
        self.down = Product(self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """Treat every token by itself."""
        return self.down(gated(self.gate_and_up(x)))


def gated(both: Tensor) -> Tensor:
    """[tokens, 2 * wide], gate and up side by side -> [tokens, wide]."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class Layer(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        memory: PagedAttention,
        plan: Plan,
        turns: tuple[Tensor, Tensor],
        rows: Tensor | None = None,
    ) -> Tensor:
        """The stream x [tokens, hidden] behind the layer; of these rows, if given.

        x itself is changed on the way.
        """
        x += self.self_attn(self.input_layernorm(x), memory, plan, turns)
        x = x if rows is None else x[rows]
        x += self.mlp(self.post_attention_layernorm(x))
        return x


def run_layers(
    layers: Sequence[Layer],
    norm: RMSNorm,
    x: Tensor,
    memory: Sequence[PagedAttention],
    plan: Plan,
    angles: Tensor,
    rows: Tensor,
) -> Tensor:
    """All layers, and the last norm: the stream [tokens, hidden] -> [rows, hidden].

    `angles` are [tokens, head_dim / 2].
    """
    cos, sin = (turn.to(x.dtype) for turn in rotation(angles[:, None]))
    for layer, layer_memory in zip(layers, memory, strict=True):
        wanted = rows if layer is layers[-1] else None
        x = layer(x, layer_memory, plan, (cos, sin), wanted)
    normal: Tensor = norm(x)
    return normal


# %% [markdown]
# Follow one token through a layer: C's last, position 39, entering layer 1 of our small Llama.

# %% name="follow"
step = Chunk("C", tokens[39:], 39, [6, 1, 4], num_shared=2, samples=True)
plan = plan_batch([step], 16, scratch_page=8, device=cpu)
layer = model.layers[0]
attention = layer.self_attn
entering = model.embed_tokens(torch.tensor(list(step.token_ids)))
x = layer.input_layernorm(entering)
query, key, _ = attention.qkv(x).view(-1, 8).split((*attention.heads, 2))
print(f"enters with {entering.shape[1]} numbers")
print(f"asks with {len(query)} heads, stores {len(key)} keys and as many values")
print(f"writes slot {int(plan.write_slots)}, reads {plan.chunks[0].length} slots")

# %% tags=["hide-input"]
q_width, k_width = query.numel(), key.numel()
out = attention.o_proj.out_features
ends = [min(16 * (i + 1), step.start) for i in range(len(step.pages))]
known = [
    (
        16 * i,
        end - 16 * i,
        "pinned" if i < step.num_shared else "private",
        f"page {page}",
    )
    for i, (page, end) in enumerate(zip(step.pages, ends, strict=True))
]
draw_rows(
    [
        ("enters", [(0, entering.shape[1], "plain", f"{entering.shape[1]} numbers")]),
        (
            "makes",
            [
                (0, q_width, "computed", "query, 6 heads of 8"),
                (q_width, k_width, "private", "key, 2 of 8"),
                (q_width + k_width, k_width, "private", "value, 2 of 8"),
            ],
        ),
        ("reads 40 tokens", [*known, (39, 1, "computed", "")]),
        ("leaves", [(0, out, "plain", f"{out} numbers")]),
    ],
    unit=7,
    caption="One token in one layer. The query is gone when the layer is done; the key and the "
    "value go to the token's own slot (the indigo end of page 4) and stay for all who come later.",
)

# %% [markdown]
# A layer takes a token as 48 numbers and gives it back as 48 numbers. What it leaves behind is
# the rest of this book's subject: [2](#follow) keys and 2 values in slot [71](#follow), one slot of the
# [40](#follow) that the token has just read.
#
# ### Which rows get logits
#
# At the end, logits. A prefill chunk of 512 tokens needs the logits of its last token
# only, and with a vocabulary of 49,152 the head is a large part of the model: it would be
# multiplied 511 times for nothing. So the caller names the rows it wants. The last layer knows them
# already: all its keys and values are written, and behind its attention nobody asks for the other rows.
# And whoever wants so many that their logits would fill the memory takes the rows as they are before the
# head, and applies it to a few at a time.


# %% export="model.py"
Run = Callable[..., Tensor]  # of what `run_layers` takes


class Decoder(nn.Module):
    """Token ids in, logits of the wanted rows out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        rows = torch.randn(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(len(rows), rows.shape[1], _weight=rows)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head = Product(self.lm_head)
        self.frequencies = rope_frequencies(config)  # never a parameter, never 16 bit

    def hidden(
        self,
        token_ids: Tensor,
        memory: Sequence[PagedAttention],
        plan: Plan,
        rows: Tensor,
        run: Run = run_layers,
    ) -> Tensor:
        """What the head makes logits of: rows of the batch, [rows, hidden]."""
        angles = plan.positions[:, None] * self.frequencies.to(token_ids.device)
        x = self.embed_tokens(token_ids)
        return run(self.layers, self.norm, x, memory, plan, angles, rows)

    def forward(self, *given: Any, **more: Any) -> Tensor:
        """Logits [rows, vocab], float32; takes what `hidden` takes."""
        return self.head(self.hidden(*given, **more)).float()


# %% [markdown]
# A loader builds the decoder without memory, on PyTorch's `meta` device, and then gives every parameter its
# place. Packing is asked for by whoever is going to run the model. A head that is tied to the embedding, once
# packed, costs a copy, for the embedding must stay readable; unless the product keeps a `weight` whose
# rows are as they were. Then the embedding looks tokens up in that one, and there is a single copy again.


# %% export="model.py"
class Decoder(Decoder):
    def products(self) -> Iterator[Product]:
        """All of them, of the layers and the head."""
        parts = (part for module in self.modules() for part in vars(module).values())
        yield from (part for part in parts if isinstance(part, Product))

    def place(self, empty: Callable[[Sequence[int]], Tensor]) -> None:
        """Give every parameter memory, to be filled; a tied head shares one."""
        for product in self.products():
            product.place(empty)
        if self.config.tied_head:
            self.embed_tokens.weight = self.lm_head.weight
        for module in self.modules():
            for name, part in module.named_parameters(recurse=False):
                if part.is_meta:
                    placed = nn.Parameter(empty(part.shape), requires_grad=False)
                    setattr(module, name, placed)

    def pack(self, make: Maker = packed_product) -> None:
        """Lay all weights of products out for speed; the plain ones are given up."""
        for product in self.products():
            product.pack(make)
        rows = getattr(self.head.multiply, "weight", None)
        if self.config.tied_head and rows is not None:
            self.embed_tokens.weight = nn.Parameter(rows, requires_grad=False)


# %% [markdown]
# ## The runner
#
# Who owns K/V memory? Not the model, which is weights; not the prefix cache, which deals
# in page numbers. The runner: it holds the model and the tensors, turns a batch of chunks
# into one forward pass, and gives back a token for each chunk that reached its end. *How*
# a token is chosen is a function handed in. Here it is the largest logit; chapter 6
# brings the rest. And who runs the layers can be exchanged, which chapter 19 does.

# %% export="runner.py"
"""Runs batches on a real model: owns the weights and the K/V memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from minivllm.attention import PagedAttention, Plan, plan_batch, read_together
from minivllm.batch import Chunk
from minivllm.linear import Maker, packed_product
from minivllm.model import Decoder, Run, run_layers

Sampler = Callable[..., list[int]]  # logits [chunks, vocab], chunks, head -> ids


def greedy(logits: Tensor, chunks: Sequence[Chunk], head: object = None) -> list[int]:
    """Choose the token with the largest logit; -1 unless that is a finite number."""
    assert len(logits) == len(chunks), "scoring a prompt takes chapter 6's sampler"
    best = find_largest(logits)
    largest = logits.gather(-1, best)
    broken = (largest - largest).isnan()  # so is infinity minus infinity
    return cast(list[int], best.masked_fill(broken, -1)[:, 0].tolist())


def find_largest(logits: Tensor) -> Tensor:
    """Where each row's largest number is [rows, 1]; a NaN counts as the largest.

    NumPy finds the same, and on a CPU much sooner than PyTorch.
    """
    if has_numpy(logits.device):
        return torch.from_numpy(logits.float().numpy().argmax(-1))[:, None]
    return logits.argmax(-1, keepdim=True)


def has_numpy(device: torch.device) -> bool:
    """NumPy reads a CPU's memory, and no other."""
    return device.type == "cpu"


@dataclass(frozen=True)
class Backend:
    """Who does the work: PyTorch, on any device, or kernels that know theirs.

    `arrange` prepares a plan for the attention: from page size and any layer's keys.
    `empty` gives memory for weights, keys and values, as `torch.empty` does.
    """

    run: Run = run_layers
    arrange: Callable[[Plan, int, Tensor], Plan] = read_together
    product: Maker = packed_product
    empty: Callable[..., Tensor] = torch.empty


class ModelRunner:
    """A model, its K/V memory of `num_pages` pages, and one scratch page on top."""

    def __init__(
        self,
        model: Decoder,
        num_pages: int,
        page_size: int,
        sampler: Sampler = greedy,
        backend: Backend | None = None,
    ) -> None:
        self.backend = backend or Backend()
        model.pack(self.backend.product)
        self.model = model
        self.page_size = page_size
        self.scratch_page = num_pages
        self.sampler = sampler
        weight = model.embed_tokens.weight
        self.device = weight.device
        config = model.config
        shape = ((num_pages + 1) * page_size, config.num_kv_heads, config.head_dim)
        kind = {"dtype": weight.dtype, "device": self.device}
        empty = partial(self.backend.empty, shape, **kind)
        layers = range(config.num_layers)
        self.memory = [PagedAttention(empty(), empty()) for _ in layers]


# %% [markdown]
# A run is one forward pass, whether or not anybody wants a token from it: a chunk in the
# middle of a prompt asks for no logits, but its keys and values must be written.
#
# On a GPU the pass itself is only *queued*, and Python runs ahead. Whoever asks for a number waits
# until the device has caught up. So a step asks once, for the chosen ids of all its requests, and the
# check for logits that are no numbers travels with them, as an id of −1.


# %% export="runner.py"
class ModelRunner(ModelRunner):
    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """One forward pass: write the chunks' K/V; a token for each that samples."""
        logits = self.logits(chunks)  # also if nobody samples: the K/V must be written
        wanted = [chunk for chunk in chunks if chunk.samples or chunk.num_scored]
        tokens = self.sampler(logits, wanted, self.model.head) if wanted else []
        if min(tokens, default=0) < 0:
            raise FloatingPointError("the model's logits are not numbers")
        left = iter(tokens)
        return [next(left) if chunk.samples else None for chunk in chunks]

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits of the chunks that sample; if any scores, rows before the head."""
        plan = plan_batch(chunks, self.page_size, self.scratch_page, self.device)
        ids = torch.tensor(
            [t for chunk in chunks for t in chunk.token_ids], dtype=torch.long
        )
        wanted: list[int] = []
        for chunk, placed in zip(chunks, plan.chunks, strict=True):
            first, end = placed.rows.start, placed.rows.stop
            wanted += range(first, first + chunk.num_scored)
            wanted += [end - 1] * chunk.samples
        rows = torch.tensor(wanted, dtype=torch.long).to(self.device)
        plan = self.backend.arrange(plan, self.page_size, self.memory[0].keys)
        given = (ids.to(self.device), self.memory, plan, rows, self.backend.run)
        scored = any(chunk.num_scored for chunk in chunks)
        return cast(Tensor, (self.model.hidden if scored else self.model)(*given))


# %% [markdown]
# How can one be sure that nothing in the pass waits? PyTorch has a device called *meta*, on which
# tensors have shapes and no numbers. Whatever needs a number to go on cannot run there.

# %% name="meta"
ghost = ModelRunner(copy_of(reference).to("meta"), num_pages=8, page_size=16)
print("the pass, without numbers:", list(ghost.logits([a, c]).shape))
try:
    ghost.run([a, c])
except (NotImplementedError, RuntimeError):
    print("the chosen token: cannot be had")

# %% [markdown]
# The whole forward pass of A and C can be planned and queued without knowing one value of it. The
# first question comes from the sampler. A test does this for every family. It also lists
# every operator that a generation uses, and holds the list against PyTorch's own table of what an
# Apple GPU can run.
#
# ## The same numbers?
#
# Each family is judged by transformers: random weights, every bias and norm stirred so that none
# of them is 0 or 1, the same 40 tokens. They reach their last logits in four ways: in one go, in
# chunks, token by token, and with the first 32 tokens' pages taken from *another* request.

# %% tags=["hide-output"]
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

stretched = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
stretched |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
stretched |= {"original_max_position_embeddings": 32}
judges = {
    "Llama": LlamaForCausalLM(LlamaConfig(**sizes)),
    "Llama 3": LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=stretched)),
    "Qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes)),
    "Qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes)),
}
for judge in judges.values():
    judge.eval().requires_grad_(False)
    for weight in judge.parameters():
        weight += 0.1 * torch.randn_like(weight)

# %% name="families"
from itertools import pairwise


def last_logits(
    runner: ModelRunner, pages: list[int], cuts: list[int], num_shared: int = 0
):
    for start, end in pairwise(cuts):
        chunk = Chunk("0", tokens[start:end], start, pages, num_shared, samples=True)
        logits = runner.logits([chunk])[0]
    return logits


for family, judge in judges.items():
    wanted = judge(torch.tensor([list(tokens)])).logits[0, -1]
    runner = ModelRunner(copy_of(judge), num_pages=8, page_size=16)
    ways = {
        "in one go": last_logits(runner, [6, 1, 3], [0, 40]),
        "in chunks": last_logits(runner, [0, 7, 2], [0, 9, 25, 26, 40]),
        "one by one": last_logits(runner, [0, 7, 2], list(range(41))),
        "cached + rest": last_logits(runner, [6, 1, 4], [32, 40], num_shared=2),
    }
    found = {way: verdict(logits, wanted) for way, logits in ways.items()}
    print(f"{family:8}", ", ".join(f"{way}: {what}" for way, what in found.items()))

# %% tags=["hide-input"]
owner_of = {6: "A", 1: "A", 3: "A", 0: "B", 7: "B", 2: "B", 4: "C"}


def table(pages: list[int], num_shared: int = 0):
    state = ["pinned"] * num_shared + ["private"] * len(pages)
    return [(i, 1, state[i], f"page {page}") for i, page in enumerate(pages)]


memory = [
    (p, 1, "private" if p in owner_of else "free", f"{p}: {owner_of.get(p, 'free')}")
    for p in range(8)
]
draw_rows(
    [
        ("A, in one go", table([6, 1, 3])),
        ("B, in chunks", table([0, 7, 2])),
        ("C, cached + rest", table([6, 1, 4], num_shared=2)),
        ("memory", memory),
    ],
    unit=70,
    caption="Three page tables of the comparison, and whose page each is. C reads two pages "
    "of A (blue) and writes only its own third page; its logits are the same.",
)

# %% [markdown]
# The last way is what a prefix cache does. Request C computed 8 tokens of 40, read the
# other 32 from pages 6 and 1, and its logits are those of a model that computed
# everything. The tests go on from here: other ratios of heads, every chunk size, random schedules in
# which requests share pages in one pass, and the real SmolLM2.
#
# *Equal* means: within 0.0001. Adding the same floats in another order rounds differently,
# and a chunk of 9 tokens is multiplied by other kernels than one of 40. Nobody promises
# equal bits, and the tests of this book do not ask for them.
#
# ## The token that is computed twice
#
# Now the scratch page. Both pages of a 32-token prompt are cached, and the last token, position 31,
# is computed again for its logits. The logits are compared first. Then every slot gets a mark and the
# pass runs again, for equal values written over equal values would not show.

# %% name="scratch"
runner = ModelRunner(model, num_pages=8, page_size=16)
runner.logits([Chunk("A", tokens[:32], 0, [6, 1], 0, samples=True)])
again = Chunk("C", tokens[31:32], 31, [6, 1], num_shared=2, samples=True)
print("logits:", verdict(runner.logits([again])[0], expected[31]))

MARK = 7.0
for layer in runner.memory:
    layer.keys.fill_(MARK)
runner.logits([again])
for number, layer in enumerate(runner.memory, 1):
    changed = (layer.keys != MARK).any(-1).any(-1).nonzero().flatten().tolist()
    print("layer", number, "wrote slots", changed, "of page", changed[0] // 16)

# %% [markdown]
# Slot [143](#scratch) is the last of page [8](#scratch), the scratch page, one more than the pool
# knows of. Page 1, where this token's keys lie for everybody else, was read and not touched. If two
# requests hit fully in one step, both write to slot 143, in either order, and nobody ever looks.
#
# ## A test that can fail
#
# A comparison that always says "equal" is worth nothing. So we break the last way, *cached + rest*,
# in five ways, one at a time. To do so we need to get between plan and pass:

# %%
from dataclasses import replace


def logits_of(chunks, change=lambda plan: plan, damage=lambda memory: None):
    """Run chunks one after the other, with a fault in plan or memory; the last logits."""
    runner = ModelRunner(model, num_pages=8, page_size=16)
    for chunk in chunks:
        plan = change(plan_batch([chunk], 16, runner.scratch_page, cpu))
        ids, last = torch.tensor(list(chunk.token_ids)), torch.tensor([-1])
        with torch.inference_mode():
            logits = model(ids, runner.memory, plan, last)[0]
            damage(runner.memory)
    return logits


def later(plan, by):
    return replace(plan, positions=plan.positions + by)


def forget_first_key(memory):
    for layer in memory:
        layer.keys[6 * 16] = 0


# %% [markdown]
# The five: the key of token 0 is lost; C's table names page 1 before page 6; the 8 positions of C are
# one too high; *all* positions are 100 too high; C is given the table of a stranger. Not all of them
# change the answer. Which do?

# %% name="faults"
swapped, lost = replace(c, pages=[1, 6, 4]), replace(c, pages=[0, 7, 4])
stranger = Chunk("B", tokens[8:], 0, [0, 7], num_shared=0, samples=True)
faults = {
    "none": logits_of([a, c]),
    "token 0's key never stored": logits_of([a, c], damage=forget_first_key),
    "two pages of the table swapped": logits_of([a, swapped]),
    "C's positions off by one": logits_of(
        [a, c], lambda p: later(p, int(len(p.positions) < 9))
    ),
    "every position off by 100": logits_of([a, c], lambda p: later(p, 100)),
    "the table of another request": logits_of([stranger, a, lost]),
}
for name, logits in faults.items():
    print(f"{name:32}", verdict(logits, expected[39]))

# %% [markdown]
# Two of the five are no faults. A shift of *all* positions changes nothing, since scores depend on
# distances: an engine that counts from 100 would be right. And two pages of a cached prefix may
# change places in C's table. Attention takes an average, and an average has no order; each key
# carries its position with it, turned in before it was stored. The order of a table matters where
# something is *written* by it, and for the mask, which counts along it.
#
# The other three are wrong answers. Look at C's positions once more. Positions that are off by one behind a
# cached prefix are a mistake that only requests with a hit can make, so an engine whose tests never
# hit stays green. The tests of this book plant such faults in the package, one at a time, and demand
# that the check which was made for it turns red.
#
# ## What still goes wrong
#
# Every context is still copied before it is read, and prompts are read chunk by chunk, shared or
# not. [Chapter 19](19_kernels.md) writes kernels that read through the table without a copy.
#
# Sooner than that, the weights were random. Real ones come in files, with several conventions for the
# same tensor, and somebody must turn text into ids and back. Chapter 6.
#
# ## Exercises
#
# ### Exercise 1
#
# A request has found all 48 tokens of its prompt in pages 3, 0 and 5 of a runner with 8 pages of 16.
# Which token is computed, in which chunk, which slot does it write, and which does it read last? Give
# `chunk`, `writes` and `reads_last`.

# %% tags=["solution"]
forty_eight = encode_ids([(5 * i) % 99 for i in range(48)])
chunk = Chunk("0", forty_eight[47:], 47, [3, 0, 5], num_shared=3, samples=True)
plan = plan_batch([chunk], 16, scratch_page=8, device=cpu)
writes, reads_last = int(plan.write_slots[0]), int(plan.chunks[0].context[-1])
print("token 47 is written to slot", writes, "and read from slot", reads_last)

# %%
assert (chunk.start, len(chunk.token_ids), chunk.num_shared) == (47, 1, 3)
assert (writes, reads_last) == (8 * 16 + 15, 5 * 16 + 15)

# %% [markdown]
# ### Exercise 2
#
# Two requests with the same prompt, `tokens[:32]`, start together and divide the work. A computes
# tokens 0 to 15 into page 6, C computes 16 to 31 into page 1, and for its logits A adds a second
# chunk: token 31 alone. Build these three chunks and run them in *one* pass. Do both have the right
# logits, and how many token-forwards were paid instead of 64? Give the logits as `both`, the number
# as `paid`.

# %% tags=["solution"]
fresh = ModelRunner(model, num_pages=8, page_size=16)
halves = [
    Chunk("A", tokens[:16], 0, [6], 0, samples=False),
    Chunk("C", tokens[16:32], 16, [6, 1], 1, samples=True),
    Chunk("A", tokens[31:32], 31, [6, 1], 2, samples=True),
]
both = fresh.logits(halves)
paid = sum(len(chunk.token_ids) for chunk in halves)
print(paid, "token-forwards:", [verdict(one, expected[31]) for one in both])

# %%
assert paid == 33 and all(verdict(each, expected[31]) == "equal" for each in both)

# %% [markdown]
# Each reads what the other writes in the same pass. Nothing waits for anything: inside a layer all
# keys are there before the first query looks.
#
# ### Exercise 3
#
# A document of 16 tokens is cached, at positions 0 to 15. A new prompt has 16 other tokens first, and
# then the document. Somebody has an idea: turn the cached keys by 16 positions more, then they are
# right for positions 16 to 31. In which of the three layers are they? Give `right`, a list of bools.

# %% tags=["solution"]
fresh = ModelRunner(model, num_pages=8, page_size=16)
document, other = tokens[:16], tokens[16:32]
fresh.logits([Chunk("0", document, 0, [0], 0, samples=True)])
fresh.logits([Chunk("1", other + document, 0, [1, 2], 0, samples=True)])

right = []
for layer in fresh.memory:
    turned = rotate(layer.keys[0:16], *rotation(16 * model.frequencies))
    right.append(verdict(turned, layer.keys[32:48]) == "equal")
print(right)

# %%
assert right == [True, False, False]

# %% [markdown]
# Rotation can be undone. What the tokens before have said cannot: from layer 2 on, the document's
# keys were made by reading another past.
