# Exported from chapters/19_kernels.py (ad86adee): edit the chapter.
"""Kernels for a CPU, compiled by Numba: a decode step, layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary as Kept  # as long as the owner lives

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import prange
from torch import Tensor

from minivllm.attention import (
    ChunkPlan,
    PagedAttention,
    Plan,
    read_together,
    shared_runs,
)
from minivllm.linear import Multiply, packed_product
from minivllm.model import Layer, RMSNorm, run_layers
from minivllm.runner import Backend
from minivllm.vectors import (
    Float,
    as_array,
    compiled,
    config,
    exp,
    fma,
    has_threads,
    larger,
    load,
    prefetch,
    put,
    put_sum,
    spread,
    store,
    tile,
    widened,
    zero,
)


@compiled
def add_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """x += delta; out = x, normalised. All [hidden, lanes]; weight [hidden, 1]."""
    sums = np.zeros(x.shape[1], np.float32)
    for i in range(len(x)):
        for lane in range(x.shape[1]):
            x[i, lane] += delta[i, lane]
            sums[lane] += x[i, lane] ** 2
    scales = Float(1) / np.sqrt(sums / Float(len(x)) + eps)
    for i in range(len(x)):
        for lane in range(x.shape[1]):
            out[i, lane] = x[i, lane] * scales[lane] * weight[i, 0]


@compiled
def gate(both: Any, out: Any) -> None:
    """out = silu(first half) * second half, [2 * wide, lanes] -> [wide, lanes]."""
    for i in range(len(out)):
        for lane in range(out.shape[1]):
            x = both[i, lane]
            share = x / (Float(1) + exp(-x))
            out[i, lane] = share * both[len(out) + i, lane]


@compiled
def norm_heads(heads: Any, weight: Any, eps: Any, head_dim: int) -> None:
    """Normalise each head of rows [heads * head_dim, lanes], as many as weights."""
    for start in range(0, len(weight), head_dim):
        sums = np.zeros(heads.shape[1], np.float32)
        for i in range(start, start + head_dim):
            for lane in range(heads.shape[1]):
                sums[lane] += heads[i, lane] ** 2
        scales = Float(1) / np.sqrt(sums / Float(head_dim) + eps)
        for i in range(start, start + head_dim):
            for lane in range(heads.shape[1]):
                heads[i, lane] *= scales[lane] * weight[i, 0]


@compiled
def rotate(heads: Any, num_rows: int, cos: Any, sin: Any) -> None:
    """Turn the first rows of [heads * head_dim, lanes]; cos, sin [half, lanes]."""
    half = len(cos)
    for start in range(0, num_rows, 2 * half):
        for i in range(half):
            for lane in range(cos.shape[1]):
                a, b = heads[start + i, lane], heads[start + half + i, lane]
                c, s = cos[i, lane], sin[i, lane]
                heads[start + i, lane] = a * c - b * s
                heads[start + half + i, lane] = b * c + a * s


AHEAD = 8  # slots: far enough to arrive in time, near enough to be there still


@compiled
def ask_for(memory: Any, slot: Any) -> None:
    """Let memory bring a slot's heads."""
    for j in range(0, memory.shape[1], 64 // memory.itemsize):
        prefetch(memory, slot, j)


@compiled
def weigh(scores: Any) -> Any:
    """Softmax, in place; the logarithm of the sum of the exponentials."""
    largest, total = Float(-3.4e38), Float(0)
    for i in range(len(scores)):
        largest = larger(largest, scores[i])
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - largest)
        total += scores[i]
    share = Float(1) / total
    for i in range(len(scores)):
        scores[i] *= share
    return largest + np.log(total)


@cache
def make_reads(head_dim: int, group: int) -> tuple[Callable[..., None], ...]:
    """Kernels that ask keys and add values up; `group` heads share one of each."""
    lanes = math.gcd(head_dim, 16)

    def score(asked: Any, keys: Any, slots: Any, scores: Any) -> None:
        """scores[head, i] = asked[head] * the key in slots[i]."""
        last = len(slots) - 1
        for i in range(len(slots)):
            ask_for(keys, slots[min(i + AHEAD, last)])
            for head in range(len(scores)):
                start, found = head // group * head_dim, zero(lanes)
                for j in range(0, head_dim, lanes):
                    key = load(keys, slots[i], start + j, lanes)
                    found = fma(load(asked, head, j, lanes), key, found)
                put_sum(scores, head, i, found)

    def average(scores: Any, values: Any, slots: Any, out: Any) -> None:
        """Add to out[head] the sum of scores[head, i] * the value in slots[i]."""
        last = len(slots) - 1
        for i in range(len(slots)):
            ask_for(values, slots[min(i + AHEAD, last)])
            for first in range(0, len(out), group):
                start = first // group * head_dim
                for j in range(0, head_dim, lanes):
                    value = load(values, slots[i], start + j, lanes)
                    for head in range(first, first + group):
                        weight = spread(scores, head, i, lanes)
                        sums = fma(weight, value, load(out, head, j, lanes))
                        store(out, head, j, sums)

    return compiled(score), compiled(average)


@cache
def make_attend(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for one shape of heads: loops of known length become registers."""
    score, average = make_reads(head_dim, group)
    scale = Float(1 / math.sqrt(head_dim))

    def attend(
        heads: Any,
        keys: Any,
        values: Any,
        tables: Any,
        pieces: Any,
        found: Any,
        sums: Any,
    ) -> None:
        """What the queries find in their pieces; the logarithms of the sums of weights.

        `heads` [any, lanes] begin with the queries; keys and values are [slots,
        kv_heads * head_dim]; tables and pieces are a `DecodePlan`'s. The results go to
        `found` [pieces, heads, head_dim] and `sums` [pieces, heads].
        """
        num_heads = found.shape[1]
        for piece in prange(len(pieces)):
            row, start, end = pieces[piece]
            slots = tables[row, start:end]
            asked = np.empty((num_heads, head_dim), np.float32)
            for head in range(num_heads):
                for j in range(head_dim):
                    asked[head, j] = heads[head * head_dim + j, row] * scale
            scores = np.empty((num_heads, end - start), np.float32)
            score(asked, keys, slots, scores)
            for head in range(num_heads):
                sums[piece, head] = weigh(scores[head])
            found[piece] = Float(0)
            average(scores, values, slots, found[piece])

    return compiled(attend, parallel=has_threads())


PIECE = 128  # tokens of context: enough of them to share among cores, few to merge
MOST = 32  # tokens: with more of them a product is work, and no longer reading


@dataclass(frozen=True)
class DecodePlan(Plan):
    """A plan of single tokens, which read their contexts piece by piece.

    `slots` are those to write to; `tables` [rows, longest] those of each context.
    `pieces` [pieces, 3] are (row, start, end). `runs` [runs, 4] are pieces that several
    rows have in common: start, end, and where their `readers` begin and end; what each
    finds counts as a further piece. Those of row i are `order[ends[i - 1] : ends[i]]`.
    """

    slots: Any = None
    tables: Any = None
    pieces: Any = None
    runs: Any = None
    readers: Any = None
    order: Any = None
    ends: Any = None


def arrange(plan: Plan, page_size: int, memory: Tensor) -> Plan:
    """Cut the contexts of a decode step into pieces; those that are shared, once."""
    chunks = plan.chunks
    if len(chunks) > MOST or len(chunks) < len(plan.positions):
        return read_together(plan, page_size, memory)
    tables = np.zeros((len(chunks), max(len(c.context) for c in chunks)), np.int64)
    for table, chunk in zip(tables, chunks, strict=True):
        table[: len(chunk.context)] = chunk.context.numpy()
    runs, readers, starts = find_runs(chunks, page_size)
    parts = zip(starts, chunks, strict=True)
    pieces = [
        (i, *piece)
        for i, (s, c) in enumerate(parts)
        for piece in cut(s, len(c.context))
    ]
    owners = np.array([row for row, *_ in pieces] + readers)
    order = np.argsort(owners, kind="stable")
    whole = (plan.positions, plan.write_slots, chunks, (), plan.write_slots.numpy())
    shared = np.array(runs).reshape(-1, 4), np.array(readers, np.int64)
    ends = np.bincount(owners).cumsum()
    return DecodePlan(*whole, tables, np.array(pieces), *shared, order, ends)


def find_runs(
    chunks: Sequence[ChunkPlan], page_size: int
) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Runs and readers, as in a `DecodePlan`, and where each own context starts."""
    tables = [tuple(c.pages[: (len(c.context) - 1) // page_size]) for c in chunks]
    readers, starts = list[int](), [0] * len(chunks)
    runs: list[tuple[int, ...]] = []
    for members, first, last in shared_runs(tables, page_size):
        for start, end in cut(first * page_size, last * page_size):
            runs.append((start, end, len(readers), len(readers) + len(members)))
            readers += members
        for row in members:
            starts[row] = last * page_size
    return runs, readers, starts


def cut(start: int, end: int) -> list[tuple[int, int]]:
    """The pieces of a context from `start`; the last of several is not very short."""
    cuts = [start, *range(start + PIECE, end - PIECE // 2, PIECE), end]
    return list(pairwise(cuts))


WIDE, ROWS = (16, 16) if "+avx512f" in config.CPU_FEATURES else (8, 8)  # registers
BLOCK = 96  # outputs that a core takes


@cache
def make_multiply(lanes: int) -> Callable[..., None]:
    """The product's kernel for so many tokens."""
    if lanes == 1:
        return multiply_one
    wide = min(lanes, WIDE)
    shape = (ROWS, wide)

    def multiply(x: Any, weight: Any, bias: Any, out: Any) -> None:
        """out = weight times x, plus bias: [inputs, lanes] -> [outputs, lanes]."""
        num_outputs, num_inputs = weight.shape
        for block in prange(-(-num_outputs // BLOCK)):
            room = np.empty((ROWS, num_inputs), np.float32)
            for at in range(block * BLOCK, min(num_outputs, (block + 1) * BLOCK), ROWS):
                first = min(at, num_outputs - ROWS)  # the last: some of them again
                rows, start = widened(weight, first, room)
                for lane in range(0, lanes, wide):
                    coming = first + ROWS
                    tile(rows, start, x, lane, out, first, weight, coming, shape)
        for i in range(len(bias)):
            for lane in range(lanes):
                out[i, lane] += bias[i, 0]

    return compiled(multiply, parallel=has_threads())


@partial(compiled, parallel=has_threads())
def multiply_one(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """The same for one token: sums along the inputs, a multiple of 16."""
    num_outputs, num_inputs = weight.shape
    given = x.reshape((1, num_inputs))
    for block in prange(-(-num_outputs // BLOCK)):
        for at in range(block * BLOCK, min(num_outputs, (block + 1) * BLOCK), 4):
            first = min(at, num_outputs - 4)
            a = b = c = d = zero(16)
            for i in range(0, num_inputs, 16):
                part = load(given, 0, i, 16)
                a = fma(load(weight, first, i, 16), part, a)
                b = fma(load(weight, first + 1, i, 16), part, b)
                c = fma(load(weight, first + 2, i, 16), part, c)
                d = fma(load(weight, first + 3, i, 16), part, d)
                for k in range(0, 64, 64 // weight.itemsize):
                    prefetch(weight, first + 4, 4 * i + k)
            put_sum(out, first, 0, a)
            put_sum(out, first + 1, 0, b)
            put_sum(out, first + 2, 0, c)
            put_sum(out, first + 3, 0, d)
    for i in range(len(bias)):
        out[i, 0] += bias[i, 0]


@compiled
def weigh_lanes(scores: Any, sums: Any) -> None:
    """`weigh` for each column of scores [tokens, lanes]."""
    largest = np.full(scores.shape[1], Float(-3.4e38), np.float32)
    total = np.zeros(scores.shape[1], np.float32)
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            largest[lane] = larger(largest[lane], scores[i, lane])
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            scores[i, lane] = exp(scores[i, lane] - largest[lane])
            total[lane] += scores[i, lane]
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            scores[i, lane] /= total[lane]
    for lane in range(scores.shape[1]):
        sums[lane] = largest[lane] + np.log(total[lane])


@cache
def make_attend_together(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for runs of pages that several rows read."""
    multiply_tiles, scale = make_tiles(WIDE), Float(1 / math.sqrt(head_dim))
    gather, deep = make_gather(head_dim), -(-head_dim // ROWS) * ROWS

    def attend_together(
        heads: Any,
        keys: Any,
        values: Any,
        tables: Any,
        runs: Any,
        readers: Any,
        found: Any,
        sums: Any,
    ) -> None:
        """As `attend`, with a result for each reader of a run."""
        num_kv_heads = keys.shape[1] // head_dim
        for job in prange(len(runs) * num_kv_heads):
            kv = job % num_kv_heads
            start, end, first, last = runs[job // num_kv_heads]
            slots = tables[readers[first], start:end]
            rows = -(-len(slots) // ROWS) * ROWS
            lanes = -(-(last - first) * group // WIDE) * WIDE
            asked = np.zeros((deep, lanes), np.float32)
            for reader in range(first, last):
                for g in range(group):
                    lane, head = (reader - first) * group + g, kv * group + g
                    for j in range(head_dim):
                        query = heads[head * head_dim + j, readers[reader]]
                        asked[j, lane] = query * scale
            known = np.zeros((rows, deep), np.float32)
            gather(keys, slots, kv * head_dim, known)
            scores = np.empty((rows, lanes), np.float32)
            multiply_tiles(known, asked, scores)
            logs = np.empty(lanes, np.float32)
            weigh_lanes(scores[: len(slots)], logs)
            scores[len(slots) :] = Float(0)
            gather(values, slots, kv * head_dim, known)
            average = np.empty((deep, lanes), np.float32)
            multiply_tiles(known.T.copy(), scores, average)
            for reader in range(first, last):
                for g in range(group):
                    lane, head = (reader - first) * group + g, kv * group + g
                    sums[reader, head] = logs[lane]
                    for j in range(head_dim):
                        found[reader, head, j] = average[j, lane]

    return compiled(attend_together, parallel=has_threads())


@cache
def make_gather(head_dim: int) -> Callable[..., None]:
    """Copies a head of some slots."""
    wide = math.gcd(head_dim, 16)

    def gather(memory: Any, slots: Any, start: Any, out: Any) -> None:
        """out[i] = the head that begins at `start` in slots[i], as float32."""
        for i in range(len(slots)):
            for j in range(0, head_dim, wide):
                store(out, i, j, load(memory, slots[i], start + j, wide))

    return compiled(gather)


@cache
def make_tiles(wide: int) -> Callable[..., None]:
    """A product of small arrays, on one core."""
    shape = (ROWS, wide)

    def multiply_tiles(weight: Any, x: Any, out: Any) -> None:
        for row in range(0, len(weight), ROWS):
            for lane in range(0, x.shape[1], wide):
                tile(weight, row, x, lane, out, row, weight, row + ROWS, shape)

    return compiled(multiply_tiles)


@partial(compiled, parallel=has_threads())
def merge(found: Any, sums: Any, order: Any, ends: Any, out: Any) -> None:
    """out [heads * head_dim, lanes]: averages of each row's pieces, by their sums."""
    head_dim = found.shape[2]
    for row in prange(len(ends)):
        pieces = order[ends[row - 1] if row else 0 : ends[row]]
        for head in range(found.shape[1]):
            weights = sums[pieces, head]
            weigh(weights)
            for j in range(head_dim):
                total = Float(0)
                for k in range(len(pieces)):
                    total += weights[k] * found[pieces[k], head, j]
                out[head * head_dim + j, row] = total


NO_BIAS = np.empty((0, 1), np.float32)


class ReadProduct:
    """x -> x times weight, plus bias: read once for few tokens, PyTorch's for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        added = NO_BIAS if bias is None else bias.float()[:, None].numpy()
        self.arrays = as_array(weight), added
        self._room: dict[int, Tensor] = {}  # new memory is slow at first touch

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        if len(x) > MOST:
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)
        lanes = lanes_for(len(x))
        if lanes not in self._room:
            self._room[lanes] = torch.empty(len(self.weight), lanes)
        out = self._room[lanes].numpy()
        make_multiply(lanes)(as_lanes(x, lanes).numpy(), *self.arrays, out)
        told = x.new_empty(len(x), len(self.weight))
        turn(out, as_array(told))
        return told


@partial(compiled, parallel=has_threads())
def turn(columns: Any, out: Any) -> None:
    """[outputs, lanes] -> [tokens, outputs], in the format of the result."""
    for block in prange(-(-len(columns) // BLOCK)):
        first = max(0, block * BLOCK)
        for i in range(first, min(len(columns), first + BLOCK)):
            for lane in range(len(out)):
                put(out, lane, i, columns[i, lane])


def lanes_for(num_tokens: int) -> int:
    """How many lanes so many tokens take."""
    return 1 if num_tokens == 1 else next(n for n in (8, 16, 32) if n >= num_tokens)


def as_lanes(x: Tensor, lanes: int) -> Tensor:
    """[tokens, features] -> float32 [features, lanes]; lanes left over are 0."""
    out = torch.zeros(x.shape[1], lanes)
    out[:, : len(x)] = x.t()
    return out


def read_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The product of a weight that the kernels can read, or else packed."""
    num_outputs, num_inputs = weight.shape
    if num_outputs < ROWS or num_inputs % 16:
        return packed_product(weight, bias)
    return ReadProduct(weight, bias)


@compiled
def write(heads: Any, first: int, slots: Any, keys: Any, values: Any) -> None:
    """Store each lane's key and value, rows of `heads` from `first` on, in its slot."""
    width = keys.shape[1]
    for lane in range(len(slots)):
        for j in range(width):
            put(keys, slots[lane], j, heads[first + j, lane])
            put(values, slots[lane], j, heads[first + width + j, lane])


class CompiledLayers:
    """Runs the layers of a decode step by kernels, others as chapter 5 does."""

    def __init__(self) -> None:
        self._weights: Kept[Layer, tuple[Any, ...] | None] = Kept()
        self._memory: Kept[PagedAttention, tuple[Any, Any]] = Kept()
        # attributes, so that chapter 15 can time them
        self.add_norm: Any = add_norm
        self.rotate: Any = rotate
        self.gate: Any = gate

    def multiply(self, x: Any, arrays: tuple[Any, Any], out: Any) -> None:
        """out = the weight in `arrays` times x, plus its bias."""
        make_multiply(x.shape[1])(x, *arrays, out)

    def attend(
        self, heads: Any, memory: Any, plan: DecodePlan, room: Any, out: Any
    ) -> None:
        """Store each lane's key and value; out: what it finds in its context."""
        write(heads, len(out), plan.slots, *memory)
        found, sums = room
        head_dim, own = found.shape[2], len(plan.pieces)
        shape = (head_dim, found.shape[1] * head_dim // memory[0].shape[1])
        given = (heads, *memory, plan.tables)
        make_attend(*shape)(*given, plan.pieces, found, sums)
        if len(plan.runs):
            together = make_attend_together(*shape)
            together(*given, plan.runs, plan.readers, found[own:], sums[own:])
        merge(found, sums, plan.order, plan.ends, out)

    def __call__(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        memory: Sequence[PagedAttention],
        plan: Plan,
        angles: Tensor,
    ) -> Tensor:
        """What `run_layers` gives."""
        weights = [self._weights_of(layer) for layer in layers]
        if not isinstance(plan, DecodePlan) or None in weights:
            return run_layers(layers, x, memory, plan, angles)
        lanes = lanes_for(len(x))
        stream = as_lanes(x, lanes).numpy()
        delta, room = np.zeros_like(stream), make_room(layers[0], plan, lanes)
        turns = [as_lanes(turn, lanes).numpy() for turn in (angles.cos(), angles.sin())]
        for own, layer_memory in zip(weights, memory, strict=True):
            kept = self._memory_of(layer_memory)
            self._layer(stream, delta, own, kept, plan, turns, room)
        return torch.from_numpy(stream + delta)[:, : len(x)].t().to(x.dtype)

    def _layer(
        self,
        x: Any,
        delta: Any,
        weights: Any,
        memory: Any,
        plan: DecodePlan,
        turns: Any,
        room: Any,
    ) -> None:
        """Add delta to the stream x [hidden, lanes]; delta = what the layer leaves."""
        norm, qkv, head_norm, output, second_norm, gate_and_up, down = weights
        normal, heads, seen, both, inner, found = room
        self.add_norm(x, delta, *norm, normal)
        self.multiply(normal, qkv, heads)
        if head_norm is not None:
            norm_heads(heads, head_norm[0], head_norm[1], found[0].shape[2])
        self.rotate(heads, len(seen) + memory[0].shape[1], *turns)
        self.attend(heads, memory, plan, found, seen)
        self.multiply(seen, output, delta)
        self.add_norm(x, delta, *second_norm, normal)
        self.multiply(normal, gate_and_up, both)
        self.gate(both, inner)
        self.multiply(inner, down, delta)

    def _weights_of(self, layer: Layer) -> tuple[Any, ...] | None:
        if layer not in self._weights:
            self._weights[layer] = weights_of(layer)
        return self._weights[layer]

    def _memory_of(self, memory: PagedAttention) -> tuple[Any, Any]:
        if memory not in self._memory:
            arrays = [as_array(x.flatten(1)) for x in (memory.keys, memory.values)]
            self._memory[memory] = (arrays[0], arrays[1])
        return self._memory[memory]


def weights_of(layer: Layer) -> tuple[Any, ...] | None:
    """A layer's weights for the kernels, or None if some are not for them."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.qkv, attention.output, mlp.gate_and_up, mlp.down)
    products = [part.multiply for part in parts]
    if not all(isinstance(product, ReadProduct) for product in products):
        return None
    qkv, output, gate_and_up, down = (cast(Any, each).arrays for each in products)
    norm = norm_of((layer.input_layernorm, 1))
    second = norm_of((layer.post_attention_layernorm, 1))
    head_norm, (num_heads, num_kv_heads) = None, attention.heads
    if attention.q_norm is not None and attention.k_norm is not None:
        head_norm = norm_of(
            (attention.q_norm, num_heads), (attention.k_norm, num_kv_heads)
        )
    return norm, qkv, head_norm, output, second, gate_and_up, down


def norm_of(*norms: tuple[RMSNorm, int]) -> tuple[Any, Any]:
    """Weights of norms, each so often, [all, 1]; what keeps them from dividing by 0."""
    weights = [norm.weight.detach().float().repeat(often) for norm, often in norms]
    return torch.cat(weights)[:, None].numpy(), Float(norms[0][0].eps)


def make_room(layer: Layer, plan: DecodePlan, lanes: int) -> tuple[Any, ...]:
    """Arrays for what a layer computes on its way; the next one writes over them.

    All 0: what lies in lanes without a token may be too small for normal floats, and a
    processor takes a hundred times as long for those.
    """
    attention, mlp = layer.self_attn, layer.mlp
    num_heads, num_pieces = attention.heads[0], len(plan.order)
    hidden = layer.input_layernorm.weight.numel()
    products = (attention.qkv, mlp.gate_and_up)
    heads, both = (len(cast(Any, each.multiply).weight) for each in products)
    seen = num_heads * attention.head_dim
    found = np.empty((num_pieces, num_heads, attention.head_dim), np.float32)
    pieces = (found, np.empty((num_pieces, num_heads), np.float32))
    rows = (hidden, heads, seen, both, both // 2)
    return (*(np.zeros((n, lanes), np.float32) for n in rows), pieces)


def backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels, if they know the device and the format. Raises `ValueError`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("these kernels are for float32 and bfloat16 on a CPU")
    numba.set_num_threads(min(torch.get_num_threads(), config.NUMBA_NUM_THREADS))
    return Backend(CompiledLayers(), arrange, read_product)
