# %% [markdown]
# # 19. Where a step's time goes
#
# Sixteen requests decode, each with some 500 tokens of context. One step computes sixteen tokens.
# The work is known to the last multiplication, and so is what must be read: every weight once, every
# key and value of every context once. How long should that take, and where does the rest go?

# %% tags=["hide-output"]
import json
from pathlib import Path

from minivllm.model import ModelConfig

smollm2 = ModelConfig(49_152, 576, 1_536, 30, 9, 3, head_dim=64, max_context=8_192)

# %% name="bytes"
attention = (
    smollm2.hidden_size
    * smollm2.head_dim
    * 2
    * (smollm2.num_heads + smollm2.num_kv_heads)
)
mlp = 3 * smollm2.hidden_size * smollm2.intermediate_size
layers, head = (
    smollm2.num_layers * (attention + mlp),
    smollm2.vocab_size * smollm2.hidden_size,
)
for requests in (1, 8, 16):
    contexts = requests * 494 * smollm2.kv_bytes_per_token(4)
    parts = {"layers": 4 * layers, "head": 4 * head, "contexts": contexts}
    print(f"{requests:2} requests, MB:", {n: round(b / 1e6) for n, b in parts.items()})

# %% [markdown]
# In float32 a step reads [425](#bytes) MB of layers, [113](#bytes) MB of head, and at sixteen
# requests [364](#bytes) MB of keys and values. Two cores of the machine of this book's records read
# about 20 GB a second. That makes 27 milliseconds for one request, and 45 for sixteen.
#
# A record of `minivllm bench engine` on that machine says what a step takes if PyTorch does all of
# it, with the layers of chapter 5:

# %% name="record"
record = json.loads(Path("../figures/measured/engine.json").read_text("utf-8"))
breakdowns = {
    (each["dtype"], each["kernels"], each["num_requests"]): each["parts"]
    for each in record["breakdowns"]
}
for requests in (1, 8, 16):
    parts = breakdowns["float32", "torch", requests]
    shown = {name: f"{1e3 * s:.0f}" for name, s in parts.items()}
    print(f"{requests:2} requests, {1e3 * sum(parts.values()):.0f} ms:", shown)

# %% [markdown]
# The products are the reading of the weights. The rest reads no weights, and yet it
# is as long. One would suspect Python, which calls everything, and it is the smallest part. Take the
# norms, two a layer and one at the end, and attention, and hold them against what they read:

# %% name="slow"
NORMS = 2 * smollm2.num_layers + 1
CONTEXTS = 16 * 494 * smollm2.kv_bytes_per_token(4)


def pace(kernels: str) -> str:
    one, many = (breakdowns["float32", kernels, n] for n in (1, 16))
    speed = CONTEXTS / many["attention"] / 1e9
    return f"{1e6 * one['norms'] / NORMS:.0f} µs a norm, contexts at {speed:.1f} GB/s"


print(f"a norm of one token reads {smollm2.hidden_size * 4 / 1e3:.1f} kB")
print("PyTorch:", pace("torch"))

# %% [markdown]
# [97](#slow) microseconds for [2.3](#slow) kB, and contexts at a third of the speed of memory. A norm is
# several calls inside PyTorch. Each reads its input, writes an output for the next one, and costs some
# microseconds before it begins. Attention gathers keys into a copy, and then reads the copy.
#
# What helps is known from every GPU: do in one call, in one pass over the numbers, what belongs
# together. Such a function is called a *kernel*, and
# this chapter writes those of a CPU in Python. [Numba](https://numba.pydata.org) compiles a
# function of loops to machine code when it is first called, and keeps the code on disk.

# %% export="kernels_numba.py"
"""Kernels for a CPU, compiled by Numba: what is between products, in few passes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import binding as llvm
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload
from torch import Tensor

from minivllm.attention import (
    ChunkPlan,
    PagedAttention,
    Plan,
    by_row,
    shared_reads,
)
from minivllm.linear import Multiply, packed_product
from minivllm.model import Ops, RMSNorm
from minivllm.runner import Backend

Float = np.float32
config: Any = numba.config


# All 512 bits of a vector, where there are so many: by itself LLVM takes 256.
config.CPU_NAME = llvm.get_host_cpu_name()
config.CPU_FEATURES = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"


def has_threads() -> bool:
    """Whether Numba can use PyTorch's own threads (those of OpenMP)."""
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    config.THREADING_LAYER = "omp"
    return True


Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel, parallel: bool = False) -> Kernel:
    """The function as machine code, made at its first call and kept on disk."""
    rules: Any = {"fastmath": True, "error_model": "numpy", "cache": True}
    return cast(Kernel, njit(parallel=parallel, **rules)(function))


# %% [markdown]
# `fastmath` allows sums in another order, which is what vectors of 16 numbers need; `numpy` as error
# model divides by 0 as NumPy does, without a test in each turn of the loop. And the threads:
# PyTorch's library of threads, OpenMP, keeps a second core waiting for work. A second pool of threads
# would have to fight with it for the core. So the kernels take the same pool, or one core.
#
# ## Adding, normalising, gating, turning
#
# The residual stream x gets a layer's output added, is normalised, and goes into the next
# product. For PyTorch these are two calls and several inside. As a loop over rows:


# %% export="kernels_numba.py"
@intrinsic
def _float_of(context: Any, bits: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of(context: Any, number: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


float_of, bits_of = cast(Any, _float_of), cast(Any, _bits_of)  # 32 bits, and back


def get(number: Any) -> Any:
    """A number of an array as float32; 16 bits are the upper half of one."""


@overload(get, inline="always")
def _get(number: Any) -> Any:
    def whole(number: Any) -> Any:
        return number

    def half(number: Any) -> Any:
        return float_of(np.uint32(np.uint32(number) << np.uint32(16)))

    return whole if isinstance(number, types.Float) else half


def put(array: Any, i: int, j: int, number: Any) -> None:
    """Store a float32, rounded to the nearest where only 16 bits are kept."""


@overload(put, inline="always")
def _put(array: Any, i: int, j: int, number: Any) -> Any:
    def whole(array: Any, i: int, j: int, number: Any) -> None:
        array[i, j] = number

    def half(array: Any, i: int, j: int, number: Any) -> None:
        bits = bits_of(number)
        to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        array[i, j] = np.uint16((bits + to_even) >> np.uint32(16))

    return whole if isinstance(array.dtype, types.Float) else half


# %% export="kernels_numba.py"
@compiled
def add_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """x += delta; out = x, normalised. All [tokens, hidden]."""
    size = x.shape[1]
    for row in range(len(x)):
        total = Float(0)
        for i in range(size):
            put(x, row, i, get(x[row, i]) + get(delta[row, i]))
            total += get(x[row, i]) ** 2
        scale = Float(1) / np.sqrt(total / Float(size) + eps)
        for i in range(size):
            put(out, row, i, get(x[row, i]) * scale * get(weight[i]))


# %% [markdown]
# `get` and `put` stand for the format. A bfloat16 is the upper half of a float32: sixteen bits, and
# sixteen zeros behind them. Numba knows no bfloat16, and needs none. The bits are shifted up, the sum
# is computed in float32, and on the way back rounded to the nearest: half of what is
# cut off is added before the cut, and a tie goes to the even neighbour. Compare with PyTorch's rounding:

# %% name="rounding"
import numpy as np

from minivllm.kernels_numba import as_array, compiled, get, put


@compiled
def copy(given, out):
    for i in range(given.shape[1]):
        put(out, 0, i, get(given[0, i]))


numbers = torch.randn(1, 100_000) * 10.0 ** torch.randint(-20, 20, (1, 100_000))
rounded = torch.empty(1, 100_000, dtype=torch.bfloat16)
copy(as_array(numbers), as_array(rounded))
print("like PyTorch:", bool((rounded == numbers.bfloat16()).all()))

# %% [markdown]
# The gate needs an exponential. A function call in a loop ends all vectors, so this one is made of what
# vectors can do: a power of two is written into the exponent bits of a float, and the rest, an
# exponent between −½ and ½, is a polynomial. (The coefficients are those of the Cephes library.)


# %% export="kernels_numba.py"
@compiled
def exp(x: Any) -> Any:
    """e**x for x below 88: a power of 2 by its bits, the rest by a polynomial."""
    y = max(x, Float(-87.0)) * Float(1.44269504)
    whole = np.floor(y + Float(0.5))
    part = y - whole
    p = Float(1.535336e-4)
    p = p * part + Float(1.339887e-3)
    p = p * part + Float(9.618437e-3)
    p = p * part + Float(5.550332e-2)
    p = p * part + Float(2.402265e-1)
    p = p * part + Float(6.931472e-1)
    p = p * part + Float(1.0)
    return p * float_of(np.uint32((whole + Float(127.0)) * Float(2**23)))


@compiled
def gate(both: Any, out: Any) -> None:
    """out = silu(left half) * right half, [tokens, 2 * wide] -> [tokens, wide]."""
    wide = out.shape[1]
    for row in range(len(out)):
        for i in range(wide):
            x = get(both[row, i])
            put(out, row, i, x / (Float(1) + exp(-x)) * get(both[row, wide + i]))


@compiled
def rotate(heads: Any, width: int, cos: Any, sin: Any) -> None:
    """Turn the first `width` numbers of each row [tokens, heads * head_dim]."""
    half = cos.shape[1]
    for row in range(len(heads)):
        for i in range(0, width, 2 * half):
            for j in range(half):
                a, b = get(heads[row, i + j]), get(heads[row, i + half + j])
                put(heads, row, i + j, a * cos[row, j] - b * sin[row, j])
                put(heads, row, i + half + j, b * cos[row, j] + a * sin[row, j])


# %% name="exp"
from minivllm.kernels_numba import exp


@compiled
def exp_all(given, out):
    for i in range(len(given)):
        out[i] = exp(given[i])


x = np.linspace(-87, 80, 100_001, dtype=np.float32)
found = np.empty_like(x)
exp_all(x, found)
error = np.abs(found / np.exp(x.astype(np.float64)) - 1).max()
print("largest relative error:", f"{error:.0e}")

# %% [markdown]
# Rotation writes over the product's own output. It may: nobody else reads it. These are the methods
# of chapter 5's `Ops`, under the same names. A layer does not know who they are.


# %% export="kernels_numba.py"
def as_array(x: Tensor) -> Any:
    """The same memory for Numba; 16-bit floats as their bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


class NumbaOps(Ops):
    """Each in one pass over memory, on one core: there is little to do."""

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """Add to the stream x [tokens, hidden], in place; the sum, normalised."""
        if delta is None:
            return super().add_norm(x, delta, norm)
        out = torch.empty_like(x)
        weight = as_array(norm.weight.detach())
        add_norm(as_array(x), as_array(delta), weight, Float(norm.eps), as_array(out))
        return out

    def turns(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [tokens, head_dim / 2]."""
        return angles.cos(), angles.sin()

    def rotate(
        self, by_head: Tensor, num_heads: int, turns: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The first heads of [tokens, heads, head_dim], turned in place."""
        rows, width = as_array(by_head.flatten(1)), num_heads * by_head.shape[2]
        rotate(rows, width, *(turn.numpy() for turn in turns))
        return by_head[:, :num_heads]

    def gate(self, both: Tensor) -> Tensor:
        """[tokens, 2 * wide], gate and up side by side -> [tokens, wide]."""
        out = both.new_empty(len(both), both.shape[1] // 2)
        gate(as_array(both), as_array(out))
        return out


# %% [markdown]
# ## Attention where the pages lie
#
# PyTorch's attention wants keys side by side. So chapter 5 gathers: it reads each key from its page,
# writes it into a row of its own, and then attention reads it again. A decode step does this with
# all contexts, and they are the larger part of what it reads. A kernel can follow the page table:
# a slot is a page's number times its size, plus an offset.
#
# What is one core's share? A request is too much: with one request the other core would wait. A head is
# awkward: the heads of a token lie side by side, and three passes would each take a third of a line of
# memory. So contexts are cut into *pieces* of about {128} tokens. A piece reads its keys once for all heads,
# gives its weights a sum of 1, reads its values, and leaves an average and the logarithm of the
# sum, as chapter 5's `attend` does.


# %% export="kernels_numba.py"
@compiled
def weigh(scores: Any) -> Any:
    """Softmax, in place; the logarithm of the sum of the exponentials."""
    largest, total = Float(-3.4e38), Float(0)
    for i in range(len(scores)):
        largest = max(largest, scores[i])
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - largest)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total
    return largest + np.log(total)


@cache
def make_read(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for one shape of heads: loops of known length become registers."""

    def read(
        asked: Any,
        keys: Any,
        values: Any,
        pieces: Any,
        tables: Any,
        page_size: int,
        found: Any,
        sums: Any,
    ) -> None:
        """Averages [pieces, heads * head_dim] and sums of weights [pieces, heads].

        `asked` [tokens, heads * head_dim] are queries; a piece (row, table, start, end)
        is a part of that row's context; `keys` and `values` are [slots, kv_heads *
        head_dim].
        """
        num_kv_heads = keys.shape[1] // head_dim
        num_heads = num_kv_heads * group
        scale = Float(1 / math.sqrt(head_dim))
        for piece in prange(len(pieces)):
            row, table, start, end = pieces[piece]
            query = asked[row].copy()
            scores = np.empty((num_heads, end - start), np.float32)
            for i in range(end - start):
                at = start + i
                page = tables[table, at // page_size]
                slot = page * page_size + at % page_size
                for kv in range(num_kv_heads):
                    for g in range(group):
                        head = kv * group + g
                        score = Float(0)
                        for j in range(head_dim):
                            key = get(keys[slot, kv * head_dim + j])
                            score += query[head * head_dim + j] * key
                        scores[head, i] = score * scale
            for head in range(num_heads):
                sums[piece, head] = weigh(scores[head])
            average = np.zeros(num_heads * head_dim, np.float32)
            for i in range(end - start):
                at = start + i
                page = tables[table, at // page_size]
                slot = page * page_size + at % page_size
                for kv in range(num_kv_heads):
                    for g in range(group):
                        head = kv * group + g
                        weight = scores[head, i]
                        for j in range(head_dim):
                            value = get(values[slot, kv * head_dim + j])
                            average[head * head_dim + j] += weight * value
            found[piece] = average

    return compiled(read, parallel=has_threads())


# %% [markdown]
# Then the pieces of a row are put together, each by its share of the whole sum. A run of pages
# that several requests share is still *one* product for all of them, as in chapter 5: there is
# enough work in it for PyTorch. Its results are further pieces.


# %% export="kernels_numba.py"
@compiled
def merge(found: Any, sums: Any, order: Any, ends: Any, rows: Any, out: Any) -> None:
    """Put the pieces of each row together: order[ends[i - 1] : ends[i]] are rows[i]'s.

    A piece counts by its share of the whole sum.
    """
    head_dim = found.shape[1] // sums.shape[1]
    start = 0
    for i in range(len(rows)):
        pieces = order[start : ends[i]]
        for head in range(sums.shape[1]):
            weights = sums[pieces, head]
            weigh(weights)
            for j in range(head * head_dim, (head + 1) * head_dim):
                total = Float(0)
                for k in range(len(pieces)):
                    total += weights[k] * found[pieces[k], j]
                put(out, rows[i], j, total)
        start = ends[i]


# %% export="kernels_numba.py"
PIECE = 128  # tokens of context: enough of them to share among cores, few to merge


@dataclass(frozen=True)
class PiecePlan(Plan):
    """A plan whose single tokens read their contexts piece by piece.

    `pieces` [pieces, 4] are (row, table, start, end) for `read`; those of `reads` are
    counted behind them. Row `rows[i]` has the pieces `order[ends[i - 1] : ends[i]]`.
    """

    page_size: int = 0
    pieces: Any = None
    tables: Any = None
    order: Any = None
    ends: Any = None
    rows: Any = None
    scratch: list[Any] = field(default_factory=list)  # the first layer makes it


def arrange(plan: Plan, page_size: int, memory: Tensor) -> Plan:
    """Cut the contexts of single tokens into pieces; shared runs stay products."""
    singles = [c for c in plan.chunks if c.rows.stop - c.rows.start == 1]
    if not singles:
        return plan
    others = [c for c in plan.chunks if c.rows.stop - c.rows.start > 1]
    shared, starts = shared_reads(singles, page_size, memory)
    pieces = [piece for i, c in enumerate(singles) for piece in cut(i, c, starts[i])]
    readers = [piece[0] for piece in pieces]
    readers += [row for read in shared for row in read.rows.tolist()]
    owners = np.array(readers)
    rows, counts = np.unique(owners, return_counts=True)
    whole = (plan.positions, plan.write_slots, others, shared, page_size)
    order = np.argsort(owners, kind="stable")
    tables = table_of([chunk.pages for chunk in singles])
    return PiecePlan(*whole, np.array(pieces), tables, order, counts.cumsum(), rows)


def cut(table: int, chunk: ChunkPlan, start: int) -> list[tuple[int, int, int, int]]:
    """The pieces of one token's context from `start`; none is very short."""
    row, end = chunk.rows.start, len(chunk.context)
    cuts = [start, *range(start + PIECE, end - PIECE // 2, PIECE), end]
    return [(row, table, first, last) for first, last in pairwise(cuts)]


def table_of(rows: Sequence[Sequence[int]]) -> Any:
    """Page tables of different lengths as one array, filled up with 0."""
    tables = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for table, pages in zip(tables, rows, strict=True):
        table[: len(pages)] = pages
    return tables


# %% tags=["hide-input"]
from minivllm.attention import plan_batch
from minivllm.batch import Chunk
from minivllm.drawing import draw_rows
from minivllm.kernels_numba import arrange
from minivllm.request import encode_ids

prefix = range(30)
batch = [
    Chunk("A", encode_ids([0]), 493, [*prefix, 30], 30, samples=True),
    Chunk("B", encode_ids([0]), 517, [*prefix, 31, 32, 33], 30, samples=True),
    Chunk("C", encode_ids([0]), 399, range(40, 65), 0, samples=True),
]
memory = torch.zeros(70 * 16, 2, 8)
plan = arrange(plan_batch(batch, 16, 69, torch.device("cpu")), 16, memory)
rows = [(chunk.request_id, []) for chunk in batch]
for row, _, start, end in plan.pieces.tolist():
    rows[row][1].append((start, end - start, "private", f"{end - start}"))
for read in plan.reads:
    for row in read.rows.tolist():
        rows[row][1].append(
            (0, len(read.slots), "pinned", f"{len(read.slots)}, together")
        )
draw_rows(
    rows,
    unit=1.4,
    caption="Three contexts, cut up. A and B share 480 tokens (blue), one product for both; "
    "the light pieces are what a core reads in one go.",
)

# %% [markdown]
# A layer's memory then attends with kernels where a plan has pieces, and else as before.


# %% export="kernels_numba.py"
class PagedReads(PagedAttention):
    """Reads single tokens' contexts where they lie: nothing is gathered."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys, values)
        self._arrays = as_array(keys.flatten(1)), as_array(values.flatten(1))

    def attend(self, query: Tensor, plan: Plan) -> Tensor:
        """What the new tokens find in this layer's memory [tokens, heads, head_dim]."""
        if not isinstance(plan, PiecePlan):
            return super().attend(query, plan)
        out = query.new_empty(query.shape)
        for chunk in plan.chunks:
            out[chunk.rows] = self._attend(query[chunk.rows], chunk)
        found, sums = self._read_shared(query, plan)
        num_heads, head_dim = query.shape[1:]
        read = make_read(head_dim, num_heads // self.keys.shape[1])
        asked, cuts = query.float().flatten(1).numpy(), (plan.pieces, plan.tables)
        read(asked, *self._arrays, *cuts, plan.page_size, found, sums)
        rows = as_array(out.flatten(1))
        merge(found, sums, plan.order, plan.ends, plan.rows, rows)
        return out

    def _read_shared(self, query: Tensor, plan: PiecePlan) -> Any:
        """Room for all pieces [pieces, heads * head_dim], those of shared runs done."""
        num_heads, head_dim = query.shape[1:]
        if not plan.scratch:
            size, kind = len(plan.order), np.float32
            plan.scratch.append(np.empty((size, num_heads * head_dim), kind))
            plan.scratch.append(np.empty((size, num_heads), kind))
        found, sums = plan.scratch
        first = len(plan.pieces)
        for shared in plan.reads:
            number = len(shared.rows)
            both = self._read(query[shared.rows], shared)
            part, part_sums = (by_row(x, number, num_heads, head_dim) for x in both)
            found[first : first + number] = part.flatten(1).float().numpy()
            sums[first : first + number] = part_sums[..., 0].numpy()
            first += number
        return found, sums


# %% [markdown]
# ## Products that read
#
# With few tokens a product is reading: each weight is used once for each token and never again.
# In float32 oneDNN's packed weights come near the speed of memory. In bfloat16 half the bytes are
# read, and hardly less time passes: the arithmetic of 16-bit numbers has become the bound. A kernel
# can read 16 bits and compute in float32. It takes a block of {96} outputs, so that a row of
# its weights is a few vectors, side by side in memory, and uses each for up to eight tokens.


# %% export="kernels_numba.py"
WIDTH = 96  # outputs in a block of weights
TOGETHER = 8  # tokens for which a block is read once


@partial(compiled, parallel=has_threads())
def multiply(x: Any, blocks: Any, bias: Any, out: Any) -> None:
    """out = x times weight, plus bias: [tokens, inputs] -> [tokens, outputs].

    `blocks` [number, inputs, WIDTH] are the weight; inputs are a multiple of 4.
    """
    num_tokens, num_inputs = x.shape
    for block in prange(len(blocks)):
        first = max(0, block * WIDTH)  # so that it is known not to be negative
        width = min(WIDTH, out.shape[1] - first)
        sums = np.empty((TOGETHER, WIDTH), np.float32)
        for start in range(0, num_tokens, TOGETHER):
            rows = min(TOGETHER, num_tokens - start)
            sums[:] = Float(0)
            for i in range(0, num_inputs, 4):
                for row in range(rows):
                    a, b = get(x[start + row, i]), get(x[start + row, i + 1])
                    c, d = get(x[start + row, i + 2]), get(x[start + row, i + 3])
                    for j in range(WIDTH):
                        sums[row, j] += (
                            a * get(blocks[block, i, j])
                            + b * get(blocks[block, i + 1, j])
                            + c * get(blocks[block, i + 2, j])
                            + d * get(blocks[block, i + 3, j])
                        )
            for row in range(rows):
                for j in range(width):
                    total = sums[row, j] + get(bias[first + j])
                    put(out, start + row, first + j, total)


# %% [markdown]
# A prompt of 512 tokens is the other case: each weight is used 512 times, and what counts is
# arithmetic. PyTorch's float32 product is the fastest here, for either format. So the blocks are
# widened and turned back, layer by layer, which costs less than it saves. In float32 it would cost
# more, for there is twice as much to move: there oneDNN's packed weights stay.


# %% export="kernels_numba.py"
@partial(compiled, parallel=has_threads())
def unblock(blocks: Any, out: Any) -> None:
    """The weight as PyTorch's product wants it, float32 [outputs, inputs]."""
    num_inputs = blocks.shape[1]
    for block in prange(len(blocks)):
        first = max(0, block * WIDTH)
        for start in range(0, num_inputs, 16):  # squares that stay in the cache
            for j in range(min(WIDTH, len(out) - first)):
                for i in range(start, min(start + 16, num_inputs)):
                    out[first + j, i] = get(blocks[block, i, j])


MOST = 32  # tokens: with more of them a product is work, and no longer reading


def blocked_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """x -> x times weight, plus bias: 16-bit weights in blocks, others packed."""
    num_outputs, num_inputs = weight.shape
    if weight.dtype != torch.bfloat16 or num_inputs % 4:
        return packed_product(weight, bias)
    padded = F.pad(weight, (0, 0, 0, -num_outputs % WIDTH))
    blocks = as_array(padded.view(-1, WIDTH, num_inputs).transpose(1, 2).contiguous())
    added = weight.new_zeros(num_outputs) if bias is None else bias

    def product(x: Tensor) -> Tensor:
        out = x.new_empty(len(x), num_outputs)
        if len(x) <= MOST:
            multiply(as_array(x), blocks, as_array(added), as_array(out))
            return out
        plain = torch.empty(num_outputs, num_inputs)
        unblock(blocks, plain.numpy())
        return out.copy_(F.linear(x.float(), plain, added.float()))

    return product


# %% [markdown]
# All four together are a `Backend`, which chapter 14's `LLM` takes by itself where it can be used
# (`kernels="auto"`), and `kernels="torch"` leaves out.


# %% export="kernels_numba.py"
def backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels, if they know the device and the format. Raises `ValueError`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("these kernels are for float32 and bfloat16 on a CPU")
    numba.set_num_threads(min(torch.get_num_threads(), config.NUMBA_NUM_THREADS))
    return Backend(NumbaOps(), PagedReads, arrange, blocked_product)


# %% [markdown]
# ## The same numbers?
#
# Both ways compute a batch of prompts in pieces, single tokens and shared pages. In float32 the logits
# must agree as well as any two orders of adding do, in bfloat16 within its own coarseness.

# %% name="same"
import torch

from minivllm.batch import Chunk
from minivllm.kernels_numba import backend
from minivllm.model import Decoder
from minivllm.runner import ModelRunner


def small(dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(99, 48, 64, 3, 6, 2, 8, max_context=512)).to(dtype)


kernels = {
    dtype: backend(torch.device("cpu"), dtype)
    for dtype in (torch.float32, torch.bfloat16)
}
prompts = [
    Chunk("A", encode_ids(range(40)), 0, [3, 1, 2], 0, samples=True),
    Chunk("B", encode_ids(range(50, 80)), 0, [7, 4], 0, samples=True),
]
tokens = [
    Chunk("A", encode_ids([41]), 40, [3, 1, 2], 0, samples=True),
    Chunk("B", encode_ids([81]), 30, [7, 4], 0, samples=True),
    Chunk("C", encode_ids([9, 9]), 32, [3, 1, 9], 2, samples=True),
]
for dtype, chosen in kernels.items():
    plain, fast = (
        ModelRunner(small(dtype), 16, 16, backend=each) for each in (None, chosen)
    )
    for batch in (prompts, tokens):
        wanted, found = plain.logits(batch), fast.logits(batch)
        close = (wanted - found).abs().max() / wanted.abs().max()
        limit = 1e-5 if dtype == torch.float32 else 0.05
        print(str(dtype)[6:], "equal" if close < limit else "DIFFERENT")

# %% [markdown]
# ## The record
#
# The same step, in parts, with PyTorch alone and with kernels:

# %% tags=["hide-input"]
colours = {"products": "published", "head": "pinned", "attention": "private"}
rows = []
for (dtype, who, requests), parts in breakdowns.items():
    start, cells = 0.0, []
    for part, colour in colours.items():
        cells.append((start, 1e3 * parts[part], colour, part))
        start += 1e3 * parts[part]
    whole = 1e3 * sum(parts.values())
    cells.append((start, whole - start, "plain", "rest"))
    rows.append(
        (f"{dtype}, {requests}, {'PyTorch' if who == 'torch' else 'kernels'}", cells)
    )
draw_rows(
    rows,
    unit=4,
    caption="Milliseconds of a decode step of 1, 8 and 16 requests. Dark and blue: weights are read. "
    "Light: contexts are read. The rest is what lies between, Python and the scheduler.",
)

# %% name="won"
print("PyTorch:", pace("torch"))
print("kernels:", pace("auto"))
for dtype in ("float32", "bfloat16"):
    before, after = (
        1e3 * breakdowns[dtype, who, 8]["products"] for who in ("torch", "auto")
    )
    print(f"{dtype}, 8 requests: products {before:.0f} ms, {after:.0f} ms")

# %% [markdown]
# A norm takes [54](#won) microseconds instead of [97](#won), though its work is one. The rest of it is the way
# there: Python, and arrays made of tensors. Contexts are read at [9.6](#won) GB a second instead of
# [7.4](#won), and memory could give twice that. The 16-bit products gain most, a third of their time.
#
# What does that make, beside transformers with the same weights?

# %% name="ratios"
for row in record["rows"]:
    name = f"{row['dtype']:8} {row['load']:13} {row['num_requests']:2}"
    print(f"{name}: {row['ratio']['median']:.2f} × {row['against']}")
for (dtype, who, requests), parts in breakdowns.items():
    if who != "torch" and requests == 8:
        share = parts["scheduling and cache"] / sum(parts.values())
        print(f"{dtype}, 8 requests: scheduling and cache {share:.1%} of a step")

# %% [markdown]
# The ratios are medians of steps taken in turn, in one process: above 1 the other side takes longer.
# Least is won where one request decodes in float32. There the products are three fifths of the step, and
# oneDNN's layout, which is good for eight tokens, is slower for one than the plain weights that
# transformers reads. Scheduling and cache are the Python of chapters 3 to 7: a small share, for all
# they decide.
#
# The shared prefix deserves a look. Sixteen requests that begin with the same 480 tokens read them once,
# and the step is faster than the same step with sixteen copies. Prefix reuse is said to save prefill. Here
# it saves decode time, and nobody arranged it.
#
# ## What still goes wrong
#
# A step still takes about twice what its bytes need, and the record says where to look: at the
# products of one request, and at attention. And fewer bytes would help everywhere: weights of 8 or 4
# bits stay in the file, and are widened when they are loaded. The kernels are for float32 and bfloat16 on a CPU; on a GPU the page table is followed by nobody
# yet, and contexts are gathered. And the first step after an installation waits some seconds for the
# compiler, once for each format.
#
# ## Exercises
#
# ### Exercise 1
#
# From how many requests on, each with 494 tokens of context, does a float32 step of SmolLM2 read
# more keys and values than weights?

# %% tags=["solution"]
answer_1 = -(-4 * (layers + head) // (494 * smollm2.kv_bytes_per_token(4)))

# %%
assert answer_1 == 24

# %% [markdown]
# ### Exercise 2
#
# A context of 192 tokens is one piece. How long must it be to become two, and how long are these?

# %% tags=["solution"]
from minivllm.kernels_numba import cut


def sizes_of(length: int) -> list[int]:
    chunk = Chunk("0", encode_ids([0]), length - 1, range(20), 0, samples=True)
    placed = plan_batch([chunk], 16, 20, torch.device("cpu")).chunks[0]
    return [end - start for *_, start, end in cut(0, placed, 0)]


answer_2 = sizes_of(193)

# %%
assert sizes_of(192) == [192] and answer_2 == [128, 65]

# %% [markdown]
# ### Exercise 3
#
# Between 1 and the next bfloat16 lie 2⁻⁷. What do 1 + 2⁻⁸ and 1 + 3 · 2⁻⁸ become, each a tie?

# %% tags=["solution"]
answer_3 = [1.0, 1 + 2**-6]  # to the even neighbour: down here, up there

# %%
ties = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8]])
rounded = torch.empty(1, 2, dtype=torch.bfloat16)
copy(as_array(ties), as_array(rounded))
assert rounded[0].tolist() == answer_3
