# Exported from chapters/19_kernels.py (01a5e94d): edit the chapter.
"""Kernels for a CPU, compiled by Numba: a step, layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary as Kept  # as long as the owner lives

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention import ChunkPlan, PagedAttention, Plan, shared_runs
from minivllm.linear import Multiply, packed_product
from minivllm.model import Layer, RMSNorm, run_layers
from minivllm.runner import Backend
from minivllm.vectors import (
    Float,
    as_array,
    average,
    compiled,
    config,
    dots,
    exp,
    larger,
    load,
    put,
    score,
    shared,
    store,
    tile,
    widened,
)

WIDE, ROWS = (16, 16) if "+avx512f" in config.CPU_FEATURES else (8, 8)  # registers
MOST = 32  # tokens: with more of them a product is work, and no longer reading
SPAN = 128  # lanes that a core takes, where there are more


def by_lanes(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel for all lanes of its first array; it gets those of one core's part."""
    part = shared(kernel)

    def run(*given: Any) -> None:
        lanes = given[0].shape[1]
        span = lanes if lanes <= MOST else SPAN
        part(-(-lanes // span), span, *given)

    return compiled(run)


@by_lanes
def add_norm(
    part: Any, span: Any, x: Any, delta: Any, weight: Any, eps: Any, out: Any
) -> None:
    """x += delta; out = x, normalised. All [hidden, lanes]; weight [hidden, 1]."""
    first = part * span
    sums = np.zeros(min(span, x.shape[1] - first), np.float32)
    for i in range(len(x)):
        stream, added = x[i, first : first + span], delta[i, first : first + span]
        for lane in range(len(sums)):
            stream[lane] += added[lane]
            sums[lane] += stream[lane] ** 2
    scales = Float(1) / np.sqrt(sums / Float(len(x)) + eps)
    for i in range(len(x)):
        stream, normal = x[i, first : first + span], out[i, first : first + span]
        for lane in range(len(scales)):
            normal[lane] = stream[lane] * scales[lane] * weight[i, 0]


@by_lanes
def gate(part: Any, span: Any, both: Any, out: Any) -> None:
    """out = silu(first half) * second half, [2 * wide, lanes] -> [wide, lanes]."""
    first, last = part * span, (part + 1) * span
    for i in range(len(out)):
        gates, ups = both[i, first:last], both[len(out) + i, first:last]
        told = out[i, first:last]
        for lane in range(len(told)):
            told[lane] = gates[lane] / (Float(1) + exp(-gates[lane])) * ups[lane]


@by_lanes
def norm_heads(
    part: Any, span: Any, heads: Any, weight: Any, eps: Any, head_dim: int
) -> None:
    """Normalise each head of rows [heads * head_dim, lanes], as many as weights."""
    first, last = part * span, min((part + 1) * span, heads.shape[1])
    for start in range(0, len(weight), head_dim):
        sums = np.zeros(last - first, np.float32)
        for i in range(start, start + head_dim):
            row = heads[i, first:last]
            for lane in range(len(sums)):
                sums[lane] += row[lane] ** 2
        scales = Float(1) / np.sqrt(sums / Float(head_dim) + eps)
        for i in range(start, start + head_dim):
            row = heads[i, first:last]
            for lane in range(len(scales)):
                row[lane] *= scales[lane] * weight[i, 0]


@by_lanes
def rotate(part: Any, span: Any, heads: Any, num_rows: int, cos: Any, sin: Any) -> None:
    """Turn the first rows of [heads * head_dim, lanes]; cos, sin [half, lanes]."""
    first, last, half = part * span, (part + 1) * span, len(cos)
    for start in range(0, num_rows, 2 * half):
        for i in range(half):
            left = heads[start + i, first:last]
            right = heads[start + half + i, first:last]
            c, s = cos[i, first:last], sin[i, first:last]
            for lane in range(len(left)):
                a, b = left[lane], right[lane]
                left[lane] = a * c[lane] - b * s[lane]
                right[lane] = b * c[lane] + a * s[lane]


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


def shape_of_reads(head_dim: int, group: int) -> tuple[int, int, int, int]:
    """Heads and slots at a time, as many sums as registers hold; head_dim; lanes."""
    lanes, most = math.gcd(head_dim, WIDE), WIDE + WIDE // 2
    fits = (n for n in range(group, 1, -1) if group % n == 0)
    heads = next((n for n in fits if n * head_dim <= most * lanes), 1)
    slots = next(n for n in (8, 4, 2, 1) if n <= lanes and n * heads <= most)
    return heads, slots, head_dim, lanes


@cache
def make_attend(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for one shape of heads: loops of known length become registers."""
    shape, scale = shape_of_reads(head_dim, group), Float(1 / math.sqrt(head_dim))
    heads_at_once, slots_at_once, *_ = shape

    def attend(
        piece: Any,
        heads: Any,
        keys: Any,
        values: Any,
        tables: Any,
        pieces: Any,
        found: Any,
        sums: Any,
    ) -> None:
        """What a query finds in a piece; the logarithms of the sums of weights.

        `heads` [any, lanes] begin with the queries; keys and values are [slots,
        kv_heads * head_dim]; tables and pieces are a `StepPlan`'s. The results go to
        `found` [pieces, heads, head_dim] and `sums` [pieces, heads].
        """
        num_heads = found.shape[1]
        lane, table, start, end = pieces[piece]
        slots = tables[table, start:end]
        asked = np.empty((num_heads, head_dim), np.float32)
        for head in range(num_heads):
            for j in range(head_dim):
                asked[head, j] = heads[head * head_dim + j, lane] * scale
        scores = np.empty((num_heads, len(slots) + slots_at_once), np.float32)
        for head in range(0, num_heads, heads_at_once):
            column = head // group * head_dim
            score(asked, head, keys, column, slots, scores, shape)
            for h in range(head, head + heads_at_once):
                sums[piece, h] = weigh(scores[h, : len(slots)])
            average(scores, head, values, column, slots, found[piece], shape)

    return shared(attend)


PIECE = 128  # tokens of context: enough of them to share among cores, few to merge
LONGER = 512  # the same, for the new tokens of a prompt
READERS = 16  # new tokens of a prompt that read it together


@dataclass(frozen=True, kw_only=True)
class StepPlan(Plan):
    """A plan whose tokens read their contexts piece by piece. A lane is a token.

    `slots` [tokens] are those to write to; `tables` [chunks, longest] those of each
    context. `pieces` [pieces, 4] are for a single token: (lane, table, start, end).
    `runs` [runs, 5] are for several: (table, start, end), and where their `readers`
    begin and end. A reader (lane, end) sees the context up to its own end, and what it
    finds counts as a further piece. Those of lane i are `order[ends[i - 1] : ends[i]]`,
    and are merged, unless all that it reads is one run.
    """

    slots: Any
    tables: Any
    pieces: Any
    runs: Any
    readers: Any
    order: Any
    ends: Any
    merged: Any


def arrange(plan: Plan, page_size: int, memory: Tensor) -> Plan:
    """Cut the contexts of a step into pieces; those that are shared, once."""
    tables = slot_tables(plan.chunks, page_size)
    singles = [(i, c) for i, c in enumerate(plan.chunks) if c.num_new == 1]
    runs, readers, starts = find_runs(singles, page_size)
    pieces = [
        (chunk.rows.start, table, *piece)
        for (table, chunk), start in zip(singles, starts, strict=True)
        for piece in cut(start, chunk.length, PIECE)
    ]
    for table, chunk in enumerate(plan.chunks):
        if chunk.num_new > 1:
            add_chunk(chunk, table, runs, readers)
    owners = np.array([lane for lane, *_ in [*pieces, *readers]])
    counts = np.bincount(owners)
    counts[[lane for lane, *_ in pieces]] += 1  # these are never alone
    return StepPlan(
        *(plan.positions, plan.write_slots, plan.chunks),
        slots=plan.write_slots.numpy(),
        tables=tables,
        pieces=np.array(pieces, np.int64).reshape(-1, 4),
        runs=np.array(runs, np.int64).reshape(-1, 5),
        readers=np.array(readers, np.int64).reshape(-1, 2),
        order=np.argsort(owners, kind="stable"),
        ends=np.bincount(owners).cumsum(),
        merged=np.flatnonzero(counts > 1),
    )


def slot_tables(chunks: Sequence[ChunkPlan], page_size: int) -> Any:
    """The slots of each context, [chunks, longest]; what lies behind one is page 0."""
    num_pages = [-(-chunk.length // page_size) for chunk in chunks]
    pages = np.zeros((len(chunks), max(num_pages)), np.int64)
    for row, number, chunk in zip(pages, num_pages, chunks, strict=True):
        row[:number] = chunk.pages[:number]
    slots = pages[:, :, None] * page_size + np.arange(page_size)
    return slots.reshape(len(chunks), -1)


Numbers = list[tuple[int, ...]]


def find_runs(
    singles: Sequence[tuple[int, ChunkPlan]], page_size: int
) -> tuple[Numbers, Numbers, list[int]]:
    """Shared runs and their readers; where each own context starts."""
    tables = [chunk.shareable for _, chunk in singles]
    runs, readers, starts = Numbers(), Numbers(), [0] * len(singles)
    for members, first, last in shared_runs(tables, page_size):
        table = singles[members[0]][0]
        for piece in cut(first * page_size, last * page_size, PIECE):
            runs.append((table, *piece, len(readers), len(readers) + len(members)))
            some = [singles[i][1] for i in members]
            readers += [(chunk.rows.start, chunk.length) for chunk in some]
        for i in members:
            starts[i] = last * page_size
    return runs, readers, starts


def add_chunk(chunk: ChunkPlan, table: int, runs: Numbers, readers: Numbers) -> None:
    """Runs for the new tokens of a prompt, some at a time: all up to their last."""
    behind = chunk.length - chunk.rows.stop  # of a lane's position
    for lane in range(chunk.rows.start, chunk.rows.stop, READERS):
        lanes = range(lane, min(lane + READERS, chunk.rows.stop))
        for piece in cut(0, lanes[-1] + behind + 1, LONGER):
            runs.append((table, *piece, len(readers), len(readers) + len(lanes)))
            readers += [(i, i + behind + 1) for i in lanes]


def cut(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """The pieces of a context from `start`; the last of several is not very short."""
    cuts = [start, *range(start + size, end - size // 2, size), end]
    return list(pairwise(cuts))


FEW = 8  # tokens
BLOCK = 96  # outputs that a core takes


def product_of_few(lanes: int) -> Callable[..., None]:
    """A block of a product for few tokens, x [tokens, inputs]."""
    rows = 4 if lanes == 1 else max(1, WIDE // 5)  # as many sums as registers hold
    shape = (rows, lanes, WIDE)

    def multiply(block: Any, x: Any, weight: Any, out: Any) -> None:
        last = min(len(weight), (block + 1) * BLOCK)
        for at in range(block * BLOCK, last, rows):
            dots(weight, min(at, last - rows), x, out, shape)

    return multiply


def product_of_many(lanes: int) -> Callable[..., None]:
    """A block of a product for more, x [inputs, lanes]."""
    shape = (ROWS, WIDE, 0)

    def multiply(block: Any, x: Any, weight: Any, out: Any) -> None:
        num_outputs, num_inputs = weight.shape
        room = np.empty((ROWS, num_inputs), np.float32)
        for at in range(block * BLOCK, min(num_outputs, (block + 1) * BLOCK), ROWS):
            first = min(at, num_outputs - ROWS)  # the last: some of them again
            rows, start = widened(weight, first, room)
            for lane in range(0, lanes, WIDE):
                tile(rows, start, x, lane, out, first, weight, first + ROWS, shape)

    return multiply


@cache
def make_multiply(lanes: int) -> Callable[..., None]:
    """The product's kernel for so many tokens."""
    few = lanes <= FEW
    blocks = shared(product_of_few(lanes) if few else product_of_many(lanes))

    def multiply(x: Any, weight: Any, bias: Any, out: Any) -> None:
        """out = weight times x, plus bias: [inputs, lanes] -> [outputs, lanes]."""
        given = x.T.copy() if few else x
        blocks(-(-len(weight) // BLOCK), given, weight, out)
        for i in range(len(bias)):
            for lane in range(lanes):
                out[i, lane] += bias[i, 0]

    return compiled(multiply)


@compiled
def weigh_lanes(scores: Any, seen: Any) -> Any:
    """`weigh` for each column of scores [tokens, lanes], as far as it has `seen`."""
    largest = np.full(scores.shape[1], Float(-3.4e38), np.float32)
    total = np.zeros(scores.shape[1], np.float32)
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            score = scores[i, lane] if i < seen[lane] else Float(-3.4e38)
            largest[lane] = larger(largest[lane], score)
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            weight = exp(scores[i, lane] - largest[lane])
            scores[i, lane] = weight if i < seen[lane] else Float(0)
            total[lane] += scores[i, lane]
    for lane in range(scores.shape[1]):
        largest[lane] += np.log(max(total[lane], Float(1e-30)))
        total[lane] = Float(1) / max(total[lane], Float(1e-30))
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            scores[i, lane] *= total[lane]
    return largest


@cache
def make_attend_together(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for what several tokens read: a run, one K/V head of it at a time."""
    multiply_tiles, scale = make_tiles(0), Float(1 / math.sqrt(head_dim))
    average_tiles, gather = make_tiles(1), make_gather(head_dim)
    deep = -(-head_dim // ROWS) * ROWS

    def attend_together(
        job: Any,
        heads: Any,
        keys: Any,
        values: Any,
        tables: Any,
        runs: Any,
        readers: Any,
        found: Any,
        sums: Any,
        ends: Any,
        out: Any,
    ) -> None:
        """As `attend`, for the readers of a run; into `out` if they read no more."""
        num_kv_heads = keys.shape[1] // head_dim
        kv = job % num_kv_heads
        table, start, end, first, last = runs[job // num_kv_heads]
        slots, some = tables[table, start:end], readers[first:last]
        rows = -(-len(slots) // ROWS) * ROWS
        lanes = -(-len(some) * group // WIDE) * WIDE
        asked, seen = np.zeros((deep, lanes), np.float32), np.zeros(lanes, np.int32)
        for g in range(group):
            for j in range(head_dim):
                row = (kv * group + g) * head_dim + j
                for i in range(len(some)):
                    asked[j, g * len(some) + i] = heads[row, some[i, 0]] * scale
            for i in range(len(some)):
                seen[g * len(some) + i] = min(some[i, 1], end) - start
        known = np.zeros((rows, deep), np.float32)
        gather(keys, slots, kv * head_dim, known)
        scores = np.empty((rows, lanes), np.float32)
        multiply_tiles(known, asked, scores)
        logs = weigh_lanes(scores, seen)
        gather(values, slots, kv * head_dim, known)
        average_tiles(known, scores, asked)
        token = some[0, 0]
        alone = ends[token] - (ends[token - 1] if token else 0) == 1
        for g in range(group):
            head, lane = kv * group + g, g * len(some)
            if alone:
                for j in range(head_dim):
                    for i in range(len(some)):
                        out[head * head_dim + j, some[i, 0]] = asked[j, lane + i]
            else:
                for i in range(len(some)):
                    sums[first + i, head] = logs[lane + i]
                    for j in range(head_dim):
                        found[first + i, head, j] = asked[j, lane + i]

    return shared(attend_together)


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
def make_tiles(turned: int) -> Callable[..., None]:
    """A product of small arrays, on one core: weight, or weight turned, times x."""
    shape = (ROWS, WIDE, turned)

    def multiply_tiles(weight: Any, x: Any, out: Any) -> None:
        for row in range(0, len(out), ROWS):
            for lane in range(0, x.shape[1], WIDE):
                tile(weight, row, x, lane, out, row, weight, row, shape)

    return compiled(multiply_tiles)


@shared
def merge(
    head: Any, found: Any, sums: Any, merged: Any, order: Any, ends: Any, out: Any
) -> None:
    """out [heads * head_dim, lanes]: averages of a head's pieces, by their sums."""
    head_dim = found.shape[2]
    for lane in merged:
        pieces = order[ends[lane - 1] if lane else 0 : ends[lane]]
        weights = sums[pieces, head]
        weigh(weights)
        total = np.zeros(head_dim, np.float32)
        for k in range(len(pieces)):
            part = found[pieces[k], head]
            for j in range(head_dim):
                total[j] += weights[k] * part[j]
        for j in range(head_dim):
            out[head * head_dim + j, lane] = total[j]


NO_BIAS = np.empty((0, 1), np.float32)


class ReadProduct:
    """x -> x times weight, plus bias: read once for few tokens, PyTorch's for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.rows = weight, as_array(weight)
        self.bias = NO_BIAS if bias is None else bias.float()[:, None].numpy()
        self._room: dict[int, Any] = {}  # new memory is slow at first touch

    def into(self, x: Any, out: Any, num_tokens: int) -> None:
        """Arrays [inputs, lanes] -> [outputs, lanes]."""
        if num_tokens > MOST:
            given, told = (torch.from_numpy(each)[:, :num_tokens] for each in (x, out))
            torch.mm(self.weight.float(), given, out=told)
            if len(self.bias):
                told += torch.from_numpy(self.bias)
        else:
            make_multiply(x.shape[1])(x, self.rows, self.bias, out)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        if not len(x):
            return x.new_empty(0, len(self.weight))
        if len(x) > MOST:
            bias = torch.from_numpy(self.bias[:, 0]) if len(self.bias) else None
            return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)
        lanes = lanes_for(len(x))
        if lanes not in self._room:
            self._room[lanes] = np.empty((len(self.weight), lanes), np.float32)
        out = self._room[lanes]
        self.into(as_lanes(x), out, len(x))
        return as_rows(out, x.new_empty(len(x), len(self.weight)))


def as_rows(columns: Any, out: Tensor) -> Tensor:
    """The first lanes of [features, lanes] -> [tokens, features]."""
    turn(-(-len(columns) // BLOCK), columns, as_array(out))
    return out


@shared
def turn(block: Any, columns: Any, out: Any) -> None:
    """[outputs, lanes] -> [tokens, outputs], in the format of the result."""
    for i in range(block * BLOCK, min(len(columns), (block + 1) * BLOCK)):
        for lane in range(len(out)):
            put(out, lane, i, columns[i, lane])


def lanes_for(num_tokens: int) -> int:
    """How many lanes so many tokens take.

    Many take an odd number of vectors: columns whose numbers lie a power of two apart
    would all want the same few places of a cache.
    """
    if num_tokens > MOST:
        return (-(-num_tokens // 16) | 1) * 16
    return 1 if num_tokens == 1 else next(n for n in (8, 16, 32) if n >= num_tokens)


def as_lanes(x: Tensor) -> Any:
    """[tokens, features] -> float32 [features, lanes]; lanes left over are 0."""
    out = torch.zeros(x.shape[1], lanes_for(len(x)))
    out[:, : len(x)] = x.t()
    return out.numpy()


def read_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The product of a weight that the kernels can read, or else packed."""
    num_outputs, num_inputs = weight.shape
    if num_outputs < ROWS or num_inputs % 16:
        return packed_product(weight, bias)
    return ReadProduct(weight, bias)


@by_lanes
def write(
    part: Any, span: Any, heads: Any, first: Any, slots: Any, keys: Any, values: Any
) -> None:
    """Store each lane's key and value, rows of `heads` from `first` on, in its slot."""
    width = keys.shape[1]
    for lane in range(part * span, min((part + 1) * span, len(slots))):
        for j in range(width):
            put(keys, slots[lane], j, heads[first + j, lane])
            put(values, slots[lane], j, heads[first + width + j, lane])


@dataclass
class Room:
    """Arrays [features, lanes] of a step; each layer writes over the one before."""

    num_tokens: int
    stream: Any
    delta: Any  # not yet added to the stream
    normal: Any
    heads: Any
    seen: Any
    both: Any
    inner: Any


class CompiledLayers:
    """Runs layers by kernels if their weights are for them, or as chapter 5 does."""

    def __init__(self) -> None:
        # of all layers, kept by the first of them
        self._weights: Kept[Layer, list[tuple[Any, ...] | None]] = Kept()
        self._memory: Kept[PagedAttention, list[tuple[Any, ...]]] = Kept()
        # attributes, so that chapter 15 can time them
        self.add_norm: Any = add_norm
        self.rotate: Any = rotate
        self.gate: Any = gate

    def multiply(self, product: ReadProduct, x: Any, out: Any, num_tokens: int) -> None:
        """out = a weight times x, plus its bias."""
        product.into(x, out, num_tokens)

    def attend(
        self, heads: Any, memory: Any, plan: StepPlan, found: Any, out: Any
    ) -> None:
        """Store each lane's key and value; out: what it finds in its context."""
        write(heads, len(out), plan.slots, *memory)
        averages, sums = found
        (_, num_heads, head_dim), own = averages.shape, len(plan.pieces)
        num_kv_heads = memory[0].shape[1] // head_dim
        shape, given = (head_dim, num_heads // num_kv_heads), (*memory, plan.tables)
        make_attend(*shape)(own, heads, *given, plan.pieces, averages, sums)
        if number := num_kv_heads * len(plan.runs):
            runs = (plan.runs, plan.readers, averages[own:], sums[own:], plan.ends, out)
            make_attend_together(*shape)(number, heads, *given, *runs)
        if len(plan.merged):
            merged = (plan.merged, plan.order, plan.ends)
            merge(num_heads, averages, sums, *merged, out)

    def __call__(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        memory: Sequence[PagedAttention],
        plan: Plan,
        angles: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """What `run_layers` gives; `rows` are in order."""
        weights = self._weights_of(layers)
        if not isinstance(plan, StepPlan) or None in weights:
            return run_layers(layers, x, memory, plan, angles, rows)
        room, found = make_room(layers[0], x), make_found(layers[0], plan)
        turns = as_lanes(angles.cos()), as_lanes(angles.sin())
        for own, kept in zip(weights, self._memory_of(memory), strict=True):
            self._attention(room, own, kept, plan, turns, found)
            if own is weights[-1] and len(rows) < len(x):
                if not len(rows):
                    return x[rows]
                room = narrowed(room, layers[-1], rows)
            self._mlp(room, own)
        room.stream += room.delta
        return as_rows(room.stream, x.new_empty(len(rows), x.shape[1]))

    def _attention(
        self,
        room: Room,
        weights: Any,
        memory: Any,
        plan: StepPlan,
        turns: Any,
        found: Any,
    ) -> None:
        """seen = what attention finds."""
        norm, qkv, head_norm, *_ = weights
        self.add_norm(room.stream, room.delta, *norm, room.normal)
        self.multiply(qkv, room.normal, room.heads, room.num_tokens)
        if head_norm is not None:
            norm_heads(room.heads, *head_norm, found[0].shape[2])
        self.rotate(room.heads, len(room.seen) + memory[0].shape[1], *turns)
        self.attend(room.heads, memory, plan, found, room.seen)

    def _mlp(self, room: Room, weights: Any) -> None:
        """Add what attention found to the stream; delta = what the MLP makes of it."""
        *_, output, norm, gate_and_up, down = weights
        self.multiply(output, room.seen, room.delta, room.num_tokens)
        self.add_norm(room.stream, room.delta, *norm, room.normal)
        self.multiply(gate_and_up, room.normal, room.both, room.num_tokens)
        self.gate(room.both, room.inner)
        self.multiply(down, room.inner, room.delta, room.num_tokens)

    def _weights_of(self, layers: Sequence[Layer]) -> list[tuple[Any, ...] | None]:
        if layers[0] not in self._weights:
            self._weights[layers[0]] = [weights_of(layer) for layer in layers]
        return self._weights[layers[0]]

    def _memory_of(self, memory: Sequence[PagedAttention]) -> list[tuple[Any, ...]]:
        if memory[0] not in self._memory:
            pairs = [(each.keys, each.values) for each in memory]
            arrays = [tuple(as_array(x.flatten(1)) for x in pair) for pair in pairs]
            self._memory[memory[0]] = arrays
        return self._memory[memory[0]]


def weights_of(layer: Layer) -> tuple[Any, ...] | None:
    """A layer's weights for the kernels, or None if some are not for them."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.qkv, attention.output, mlp.gate_and_up, mlp.down)
    products = [part.multiply for part in parts]
    if not all(isinstance(product, ReadProduct) for product in products):
        return None
    qkv, output, gate_and_up, down = products
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


def make_room(layer: Layer, x: Tensor) -> Room:
    """Room for a stream x [tokens, hidden].

    All 0: what lies in lanes without a token may be too small for normal floats, and a
    processor takes a hundred times as long for those.
    """
    attention, lanes = layer.self_attn, lanes_for(len(x))
    seen = attention.heads[0] * attention.head_dim
    heads, both = (
        len(cast(Any, each.multiply).weight)
        for each in (attention.qkv, layer.mlp.gate_and_up)
    )
    rows = (x.shape[1], x.shape[1], heads, seen, both, both // 2)
    return Room(len(x), as_lanes(x), *(np.zeros((n, lanes), np.float32) for n in rows))


def narrowed(room: Room, layer: Layer, rows: Tensor) -> Room:
    """Room for some tokens only, with their part of the stream and of what was seen."""
    stream, seen = (
        torch.from_numpy(each).t()[rows] for each in (room.stream, room.seen)
    )
    less = make_room(layer, stream)
    less.seen = as_lanes(seen)
    return less


def make_found(layer: Layer, plan: StepPlan) -> tuple[Any, Any]:
    """Averages [pieces, heads, head_dim], and sums [pieces, heads]."""
    num_heads = layer.self_attn.heads[0]
    averages = (len(plan.order), num_heads, layer.self_attn.head_dim)
    return np.empty(averages, np.float32), np.empty(averages[:2], np.float32)


def backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels, if they know the device and the format. Raises `ValueError`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("these kernels are for float32 and bfloat16 on a CPU")
    return Backend(CompiledLayers(), arrange, read_product)
