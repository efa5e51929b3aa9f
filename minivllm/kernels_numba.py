# Exported from chapters/19_kernels.py (90b8eed6): edit the chapter.
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


def backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels, if they know the device and the format. Raises `ValueError`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("these kernels are for float32 and bfloat16 on a CPU")
    numba.set_num_threads(min(torch.get_num_threads(), config.NUMBA_NUM_THREADS))
    return Backend(NumbaOps(), PagedReads, arrange, blocked_product)
