# %% [markdown]
# # 5. A model that reads pages
#
# Take a model that transformers runs well. Tear its key-value cache out, scatter the keys
# and values over memory in pages of 16 tokens, in no order, some of them written by
# another request. Does it still compute the same numbers?
#
# It must, to the last digit that float32 can promise. So the chapter ends with that
# comparison. Until then we build the smallest decoder that can read pages: one that does
# Llama, Qwen2 and Qwen3, because these differ in a few lines.
#
# ## What a forward pass must be told
#
# A training-style forward takes a rectangle: batch × length, padded. A serving engine
# has nothing rectangular. In one step, request A is in the middle of its prompt with 512
# tokens, B has 7 left, and C to H each put in one. So the tokens of all of them are laid
# end to end in one flat row, and for each request there is a *chunk* that says: these
# are my new tokens, they start at this position, and my keys and values lie in these
# pages.
#
# This description is all that the scheduler and the model know of each other. It holds
# no tensors, so the scheduler can be tested without torch.

# %% export="batch.py"
"""What one forward pass computes: some new tokens of several requests."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.request import SamplingParams


@dataclass(frozen=True, eq=False)
class Chunk:
    """New tokens of one request: positions `start` to `start + len(token_ids) - 1`.

    `pages` is the request's page table. Its first `num_shared` pages are published:
    they are read and never written. `samples` says that the chunk ends with the last
    known token, so that the next one is to be chosen from its logits.
    """

    request_id: str
    token_ids: "array[int]"
    start: int
    pages: Sequence[int]
    num_shared: int
    samples: bool
    params: SamplingParams = SamplingParams()

    @property
    def end(self) -> int:
        """The number of tokens whose K/V exist after the forward pass."""
        return self.start + len(self.token_ids)


# %% [markdown]
# ## Attention through a page table
#
# K/V memory is one tensor for keys and one for values in each layer, `[slots, kv_heads,
# head_dim]`. Token i of a request lies in slot `pages[i // 16] * 16 + i % 16`. To attend,
# gather the slots of the request's context, in order, and go on as always.
#
# The plan of a batch (which slots to write, which to read, which mask) is the same for
# all layers, so it is made once a step, and used by every layer.

# %% export="attention.py"
"""Attention that reads keys and values through page tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.batch import Chunk


@dataclass(frozen=True)
class ChunkPlan:
    """Where one chunk finds its rows and its context.

    `rows` are its rows in the flat batch, `context` the slots of all its tokens so far
    [context], `mask` [new, context] is None if causality asks for none.
    """

    rows: slice
    context: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Plan:
    """What every layer of a forward pass needs to know about the batch.

    `positions` and `write_slots` have one entry for each new token.
    """

    positions: Tensor
    write_slots: Tensor
    chunks: Sequence[ChunkPlan]


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
        row, new = len(positions), range(chunk.start, chunk.end)
        positions += new
        for i in new:
            page, offset = divmod(i, page_size)
            owned = page >= chunk.num_shared
            write_slots.append(
                (chunk.pages[page] if owned else scratch_page) * page_size + offset
            )
        rows = slice(row, row + len(new))
        context = _context_slots(chunk, page_size, device)
        plans.append(ChunkPlan(rows, context, _causal_mask(chunk, device)))
    return Plan(_longs(positions, device), _longs(write_slots, device), plans)


# %% [markdown]
# Three small helpers make the tensors: numbers as indices, the slots of a context, and the
# mask that lets each new token look at everything up to itself.


# %% export="attention.py"
def _longs(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long).to(device)


def _context_slots(chunk: Chunk, page_size: int, device: torch.device) -> Tensor:
    firsts = torch.tensor(chunk.pages, dtype=torch.long)[:, None] * page_size
    slots = (firsts + torch.arange(page_size)).flatten()
    return slots[: chunk.end].to(device)


def _causal_mask(chunk: Chunk, device: torch.device) -> Tensor | None:
    """True where a new token may look: at everything up to itself."""
    if len(chunk.token_ids) == 1:
        return None
    queries = torch.arange(chunk.start, chunk.end)[:, None]
    return (torch.arange(chunk.end)[None, :] <= queries).to(device)


# %% [markdown]
# Now a layer's turn. The order inside `forward` is a promise that chapter 9 will lean
# on: *first* all new keys and values of the whole batch are written, *then*
# anybody attends. A request may therefore read, in the same step, what another request
# of the same batch has just written.


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
        return torch.cat(
            [self._attend(query[chunk.rows], chunk) for chunk in plan.chunks]
        )

    def _attend(self, query: Tensor, chunk: ChunkPlan) -> Tensor:
        keys = self.keys.index_select(0, chunk.context).transpose(0, 1)
        values = self.values.index_select(0, chunk.context).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=chunk.mask,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


# %% [markdown]
# Try it on one request of 20 tokens whose two pages lie at 5 and 2, and compare with
# attention over contiguous tensors.

# %% name="scattered"
from minivllm.request import encode_ids

torch.manual_seed(0)
heads, kv_heads, head_dim = 4, 2, 8
q, k, v = (torch.randn(20, n, head_dim) for n in (heads, kv_heads, kv_heads))
memory = PagedAttention(*(torch.zeros(8 * 16, kv_heads, head_dim) for _ in range(2)))

paged = []
for start, end in [
    (0, 13),
    (13, 19),
    (19, 20),
]:  # a chunk, another chunk, a decode step
    chunk = Chunk("0", encode_ids(range(start, end)), start, [5, 2], 0, end == 20)
    plan = plan_batch([chunk], 16, scratch_page=7, device=torch.device("cpu"))
    paged.append(memory.forward(q[start:end], k[start:end], v[start:end], plan))

dense = F.scaled_dot_product_attention(
    *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
)[0].transpose(0, 1)
print("equal:", torch.allclose(torch.cat(paged), dense, atol=1e-6))
print(
    "slots written:", sorted(memory.keys.abs().sum((1, 2)).nonzero().flatten().tolist())
)

# %% [markdown]
# Slots [80 to 95](#scattered) are page 5, slots [32 to 35](#scattered) the beginning of page 2. Memory order is not
# token order, and nothing depends on it.
#
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention import PagedAttention, Plan


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
        if isinstance(value, bool) or not isinstance(value, int | kind) or value <= 0:
            raise ValueError(
                f"{name} must be a positive {kind.__name__}, not {value!r}"
            )

    def kv_bytes_per_token(self, bytes_each: int) -> int:
        """A key and a value for each K/V head in each layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_each


# %% [markdown]
# Position enters through rotation: pairs of numbers in each query and key head are turned
# by an angle that grows with the position, slowly for some pairs and fast for others.
# Keys are turned before they are stored. A cached key therefore carries its position with
# it, one more reason why only *prefixes* can be shared: the same words at another place
# have other keys.
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x [tokens, heads, dim]; cos and sin are [tokens, 1, dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


# %% [markdown]
# The one normalisation that all three families use, in 32 bit whatever the weights are:
# squaring 16-bit numbers loses too much.


# %% export="model.py"
class RMSNorm(nn.Module):
    """Scale to unit mean square, in float32, and multiply by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


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
        self.q_norm, self.k_norm = _head_norm(config), _head_norm(config)

    def forward(
        self, x: Tensor, memory: PagedAttention, plan: Plan, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Attend from the new tokens to all tokens of their requests."""
        query, key, value = (
            proj(x).view(len(x), -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = rotate(self.q_norm(query), cos, sin)
        key = rotate(self.k_norm(key), cos, sin)
        out = memory.forward(query, key, value, plan)
        return cast(Tensor, self.o_proj(out.reshape(len(x), -1)))


def _head_norm(config: ModelConfig) -> nn.Module:
    return (
        RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
    )


# %% [markdown]
# The other half of a layer treats every token by itself, and a layer is the two halves, each
# added to what came in.


# %% export="model.py"
class MLP(nn.Module):
    """The gated feed-forward network of a layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Treat every token by itself."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, memory: PagedAttention, plan: Plan, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """One layer for all new tokens."""
        x = x + self.self_attn(self.input_layernorm(x), memory, plan, cos, sin)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


# %% [markdown]
# At the end, logits. A prefill chunk of 512 tokens needs the logits of its last token
# only, and with a vocabulary of 49,152 the head is a large part of the model: it would be
# multiplied 511 times for nothing. So the caller names the rows it wants.


# %% export="model.py"
class Decoder(nn.Module):
    """Token ids in, logits of the wanted rows out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.frequencies = rope_frequencies(config)  # never a parameter, never 16 bit

    def forward(
        self,
        token_ids: Tensor,
        memory: Sequence[PagedAttention],
        plan: Plan,
        rows: Tensor,
    ) -> Tensor:
        """Logits [rows, vocab], float32, of the given rows of the batch [tokens]."""
        x = self.embed_tokens(token_ids)
        angles = plan.positions[:, None] * self.frequencies.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer, layer_memory in zip(self.layers, memory, strict=True):
            x = layer(x, layer_memory, plan, cos, sin)
        return cast(Tensor, self.lm_head(self.norm(x[rows])).float())


# %% [markdown]
# ## The runner
#
# Who owns K/V memory? Not the model, which is weights; not the prefix cache, which deals
# in page numbers. The runner: it holds the model and the tensors, turns a batch of chunks
# into one forward pass, and gives back a token for each chunk that reached its end. *How*
# a token is chosen is a function handed in. Here it is the largest logit; chapter 6
# brings the rest.

# %% export="runner.py"
"""Runs batches on a real model: owns the weights and the K/V memory."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from minivllm.attention import PagedAttention, plan_batch
from minivllm.batch import Chunk
from minivllm.model import Decoder

Sampler = Callable[[Tensor, Sequence[Chunk]], list[int]]  # [chunks, vocab] -> ids


def greedy(logits: Tensor, chunks: Sequence[Chunk]) -> list[int]:
    """Choose the token with the largest logit; -1 where the logits are not numbers."""
    best = logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1)
    return cast(list[int], best.tolist())


class ModelRunner:
    """A model, its K/V memory of `num_pages` pages, and one scratch page on top."""

    def __init__(
        self, model: Decoder, num_pages: int, page_size: int, sampler: Sampler = greedy
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.scratch_page = num_pages
        self.sampler = sampler
        weight = model.embed_tokens.weight
        self.device = weight.device
        config = model.config
        shape = ((num_pages + 1) * page_size, config.num_kv_heads, config.head_dim)
        self.memory = [
            PagedAttention(
                *(
                    torch.empty(shape, dtype=weight.dtype, device=self.device)
                    for _ in range(2)
                )
            )
            for _ in range(config.num_layers)
        ]


# %% [markdown]
# A run is one forward pass, whether or not anybody wants a token from it: a chunk in the
# middle of a prompt asks for no logits, but its keys and values must be written.


# %% export="runner.py"
class ModelRunner(ModelRunner):
    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """One forward pass: write the chunks' K/V; a token for each that samples."""
        logits = self.logits(chunks)  # also if nobody samples: the K/V must be written
        wanted = [chunk for chunk in chunks if chunk.samples]
        tokens = self.sampler(logits, wanted) if wanted else []
        if min(tokens, default=0) < 0:
            raise FloatingPointError("the model's logits are not numbers")
        left = iter(tokens)
        return [next(left) if chunk.samples else None for chunk in chunks]

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits after each sampling chunk's last token [samples, vocab]."""
        plan = plan_batch(chunks, self.page_size, self.scratch_page, self.device)
        ids = torch.tensor(
            [t for chunk in chunks for t in chunk.token_ids], dtype=torch.long
        )
        ends = [
            placed.rows.stop - 1
            for chunk, placed in zip(chunks, plan.chunks, strict=True)
            if chunk.samples
        ]
        rows = torch.tensor(ends, dtype=torch.long).to(self.device)
        return cast(Tensor, self.model(ids.to(self.device), self.memory, plan, rows))


# %% [markdown]
# ## The same numbers?
#
# transformers is the judge. It makes a small Llama with random weights (4 query heads
# sharing 2 K/V heads); we copy the weights by name, and run 40 tokens three ways: in one
# go, in chunks, and with the first 32 tokens' pages taken from *another* request.

# %% tags=["hide-output"]
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
reference = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
).eval()
config = ModelConfig(99, 32, 64, 3, 4, 2, head_dim=8, max_context=256)
model = Decoder(config)
weights = {name.removeprefix("model."): w for name, w in reference.state_dict().items()}
model.load_state_dict(weights)

# %%
from itertools import pairwise

tokens = encode_ids([(7 * i) % 99 for i in range(40)])
with torch.no_grad():
    expected = reference(torch.tensor([list(tokens)])).logits[0, -1]


def last_logits(
    runner: ModelRunner, pages: list[int], cuts: list[int], num_shared: int = 0
):
    for start, end in pairwise(cuts):
        chunk = Chunk("0", tokens[start:end], start, pages, num_shared, samples=True)
        logits = runner.logits([chunk])[0]
    return logits


runner = ModelRunner(model, num_pages=8, page_size=16)
results = {
    "in one go": last_logits(runner, [6, 1, 3], [0, 40]),
    "in chunks": last_logits(runner, [0, 7, 2], [0, 9, 25, 26, 40]),
    "cached + rest": last_logits(runner, [6, 1, 4], [32, 40], num_shared=2),
}
for way, logits in results.items():
    print(
        f"{way:14}", "equal" if (logits - expected).abs().max() < 1e-5 else "DIFFERENT"
    )

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows

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
    caption="The three page tables of the comparison, and whose page each is. C reads two pages "
    "of A (blue) and writes only its own third page; its logits are the same.",
)

# %% [markdown]
# The last case is what a prefix cache does. Request C computed 8 tokens of 40, read the
# other 32 from pages 6 and 1, and its logits are those of a model that computed
# everything.
#
# The tests do the same for Qwen2, Qwen3, Llama 3's rotation and the real SmolLM2.
#
# *Equal* means: within 1e-5. Adding the same floats in another order rounds differently,
# and a chunk of 9 tokens is multiplied by other kernels than one of 40. Nobody promises
# equal bits, and the tests of this book do not ask for them.
#
# ## Written, then read, in one step
#
# What about the promise that all keys and values are written before anybody attends? Put
# both requests in *one* batch: A computes its 32 tokens, and C, in the same forward pass,
# reads pages that A has not written when the pass begins.

# %%
fresh = ModelRunner(model, num_pages=8, page_size=16)
owner = Chunk("A", tokens[:32], 0, [6, 1], 0, samples=False)
reader = Chunk("C", tokens[32:], 32, [6, 1, 4], 2, samples=True)
together = fresh.logits([owner, reader])[0]
print("equal" if (together - expected).abs().max() < 1e-5 else "DIFFERENT")

# %% [markdown]
# In every layer C's queries meet keys that were written a moment before. This is safe for
# attention. A layer that carries a state from token to token, as recurrent layers do, has
# no such moment between writing and reading.
#
# ## A test that can fail
#
# A comparison that always says "equal" is worth nothing. So break it: leave the key of
# token 0 out of the memory, as if it had never been stored.

# %%
with torch.inference_mode():
    for layer_memory in runner.memory:
        layer_memory.keys[6 * 16] = 0
broken = last_logits(runner, [6, 1, 4], [32, 40], num_shared=2)
print("equal" if (broken - expected).abs().max() < 1e-5 else "DIFFERENT")

# %% [markdown]
# ## What still goes wrong
#
# The weights were random. Real ones come in files, with several conventions for the same
# tensor, and somebody must turn text into ids and back. Chapter 6.
#
# ## Exercise
#
# A prompt of 32 tokens is cached entirely, in pages 6 and 1. One token must be computed
# again to get logits: the last, at position 31. Build its chunk for a runner of 8 pages,
# whose scratch page is therefore number 8. Which slot does it write, and are its logits
# those of the reference?

# %% tags=["solution"]
fresh = ModelRunner(model, num_pages=8, page_size=16)
fresh.logits([Chunk("0", tokens[:32], 0, [6, 1], 0, samples=True)])
again = Chunk("1", tokens[31:32], 31, [6, 1], num_shared=2, samples=True)
slot = plan_batch(
    [again], 16, fresh.scratch_page, torch.device("cpu")
).write_slots.item()
full_hit = fresh.logits([again])[0]
print("writes slot", slot, "in page", slot // 16)

# %%
with torch.no_grad():
    answer = reference(torch.tensor([list(tokens[:32])])).logits[0, -1]
assert slot == 8 * 16 + 15 and (full_hit - answer).abs().max() < 1e-5
