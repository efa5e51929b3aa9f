# Exported from chapters/19_kernels.py (0f62e207): edit the chapter.
"""Kernels for a CPU, compiled by Numba: a step, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary as Kept  # as long as the owner lives

import numpy as np
import torch
from torch import Tensor

from minivllm.attention import ChunkPlan, PagedAttention, Plan, shared_runs
from minivllm.linear import Multiply, packed_product
from minivllm.model import Layer, RMSNorm, run_layers
from minivllm.runner import Backend
from minivllm.vectors import (
    LINE_BITS,
    STRETCH,
    Float,
    as_array,
    average,
    compiled,
    config,
    dots,
    elsewhere,
    exp,
    in_parts,
    larger,
    load,
    now,
    put,
    score,
    store,
    sweep,
    tile,
)

# Numbers in a vector; rows in a tile.
WIDTH, ROWS = (16, 16) if "+avx512f" in config.CPU_FEATURES else (8, 8)
MOST = 32  # tokens: with more of them a product is work, and no longer reading
SPAN = 128  # lanes that a core takes, where there are more


def by_lanes(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel for all lanes of its first array; it gets those of one core's part."""
    part = in_parts(kernel)

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


@in_parts
def gate_some(part: Any, gates: Any, ups: Any, out: Any) -> None:
    """A core's part of `gate`."""
    for i in range(part * SOME, min((part + 1) * SOME, len(out))):
        out[i] = gates[i] / (Float(1) + exp(-gates[i])) * ups[i]


SOME = 16_384  # numbers that a core takes


@compiled
def gate(both: Any, out: Any) -> None:
    """out = silu(first half) * second half, [2 * inner, lanes] -> [inner, lanes]."""
    gates, ups = both[: len(out)].reshape(-1), both[len(out) :].reshape(-1)
    told = out.reshape(-1)
    gate_some(-(-len(told) // SOME), gates, ups, told)


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
    """Rotate the first rows of [heads * head_dim, lanes]; cos, sin [half, lanes]."""
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
    scale = Float(1) / total
    for i in range(len(scores)):
        scores[i] *= scale
    return largest + np.log(total)


def shape_of_reads(head_dim: int, group: int) -> tuple[int, int, int, int]:
    """Heads and slots at a time, as many sums as registers hold; head_dim; width."""
    width, most = math.gcd(head_dim, WIDTH), WIDTH + WIDTH // 2
    fits = (n for n in range(group, 1, -1) if group % n == 0)
    heads = next((n for n in fits if n * head_dim <= most * width), 1)
    slots = next(n for n in (8, 4, 2, 1) if n <= width and n * heads <= most)
    return heads, slots, head_dim, width


STRIP = 16  # slots that are averaged for a head before the next


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
        log_sums: Any,
    ) -> None:
        """What a query finds in a piece; the logarithms of the sums of weights.

        `heads` [any, lanes] begin with the queries; keys and values are [slots,
        kv_heads * head_dim]; tables and pieces are a `StepPlan`'s. The results go to
        `found` [pieces, heads, head_dim] and `log_sums` [pieces, heads].
        """
        num_heads = found.shape[1]
        lane, table, start, end = pieces[piece]
        slots = tables[table, start:end]
        asked = np.empty((num_heads, head_dim), np.float32)
        for head in range(num_heads):
            for j in range(head_dim):
                asked[head, j] = heads[head * head_dim + j, lane] * scale
        scores = np.empty((num_heads, len(slots) + slots_at_once), np.float32)
        for first in range(0, len(slots), slots_at_once):
            for head in range(0, num_heads, heads_at_once):
                column = head // group * head_dim
                score(asked, head, keys, column, slots, first, scores, shape)
        for head in range(num_heads):
            log_sums[piece, head] = weigh(scores[head, : len(slots)])
        told = found[piece]
        told[:] = 0
        for first in range(0, len(slots), STRIP):
            end = min(first + STRIP, len(slots))
            for head in range(0, num_heads, heads_at_once):
                column = head // group * head_dim
                average(scores, head, values, column, slots, first, end, told, shape)

    return in_parts(attend)


PIECE = 128  # tokens of context: enough to divide among cores, few to merge
SHARED = 256  # the same, for a context that several share
LONGER = 512  # for the new tokens of a prompt
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

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the kernels take of it."""
        where = self.slots, self.tables, self.pieces, self.runs, self.readers
        return *where, self.order, self.ends, self.merged


def arrange(plan: Plan, page_size: int, memory: Tensor) -> Plan:
    """Cut the contexts of a step into pieces; those that are shared, once.

    `memory` is for other backends.
    """
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
    own, others = as_table(pieces, 4), as_table(readers, 2)
    owners = np.concatenate((own[:, 0], others[:, 0]))
    counts = np.bincount(owners)
    ends = counts.cumsum()
    counts[own[:, 0]] += 1  # these are never alone
    return StepPlan(
        *(plan.positions, plan.write_slots, plan.chunks),
        slots=plan.write_slots.numpy(),
        tables=tables,
        pieces=own,
        runs=as_table(runs, 5),
        readers=others,
        order=np.argsort(owners, kind="stable"),
        ends=ends,
        merged=np.flatnonzero(counts > 1),
    )


def slot_tables(chunks: Sequence[ChunkPlan], page_size: int) -> Any:
    """The slots of each context, [chunks, longest]; what lies behind one is page 0."""
    num_pages = [-(-chunk.length // page_size) for chunk in chunks]
    longest = max(num_pages)
    known = zip(num_pages, chunks, strict=True)
    rows = ([*chunk.pages[:n], *[0] * (longest - n)] for n, chunk in known)
    slots = as_table(rows, longest)[:, :, None] * page_size + np.arange(page_size)
    return slots.reshape(len(chunks), -1)


def as_table(rows: Iterable[Sequence[int]], size: int) -> Any:
    """Rows of numbers as an array; quicker than `np.array` finds out what they are."""
    return np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, size)


Numbers = list[tuple[int, ...]]


def find_runs(
    singles: Sequence[tuple[int, ChunkPlan]], page_size: int
) -> tuple[Numbers, Numbers, list[int]]:
    """Shared runs and their readers; where each own context starts."""
    tables = [chunk.shareable for _, chunk in singles]
    runs, readers, starts = Numbers(), Numbers(), [0] * len(singles)
    for members, first, last in shared_runs(tables, page_size):
        table = singles[members[0]][0]
        for piece in cut(first * page_size, last * page_size, SHARED):
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


@cache
def make_multiply(lanes: int) -> Callable[..., None]:
    """The product's kernel for so many lanes."""
    if few := lanes <= FEW:
        read, step = dots, lanes
        shape = 4 if lanes == 1 else max(1, WIDTH // 5), lanes, WIDTH
    else:
        vectors = min(2, lanes // WIDTH)
        read, step = sweep, vectors * WIDTH
        shape = ROWS // vectors, vectors, WIDTH
    rows = shape[0]  # as many sums as registers hold

    def multiply_block(block: Any, x: Any, weight: Any, out: Any) -> None:
        last = min(len(weight), (block + 1) * BLOCK)
        for at in range(block * BLOCK, last, rows):
            first = min(at, len(weight) - rows)  # the last: some of them again
            for lane in range(0, lanes, step):
                read(weight, first, x, lane, out, shape)

    blocks = in_parts(multiply_block)

    def multiply(product: Any, x: Any, out: Any, num_tokens: Any) -> None:
        """out = weight times x, plus bias: [inputs, lanes] -> [outputs, lanes]."""
        weight, bias = product
        given = x.T.copy() if few else x
        blocks(-(-len(weight) // BLOCK), given, weight, out)
        for i in range(len(bias)):
            for lane in range(lanes):
                out[i, lane] += bias[i, 0]

    return compiled(multiply)


@cache
def make_gather(head_dim: int) -> Callable[..., None]:
    """Copies a head of some slots."""
    width = math.gcd(head_dim, 16)

    def gather(memory: Any, slots: Any, start: Any, out: Any) -> None:
        """out[i] = the head that begins at `start` in slots[i], as float32."""
        for i in range(len(slots)):
            for j in range(0, head_dim, width):
                store(out, i, j, load(memory, slots[i], start + j, width))

    return compiled(gather)


@cache
def make_tiles(transposed: int) -> Callable[..., None]:
    """A product of small arrays, on one core: weight, or weight transposed, times x."""
    large, small = ((HALF, vectors, WIDTH, transposed) for vectors in (3, 1))

    def multiply_tiles(weight: Any, x: Any, out: Any) -> None:
        columns, step = x.shape[1], 3 * WIDTH
        for row in range(0, len(out), HALF):
            for column in range(0, columns - columns % step, step):
                tile(weight, row, x, column, out, large)
            for column in range(columns - columns % step, columns, WIDTH):
                tile(weight, row, x, column, out, small)

    return compiled(multiply_tiles)


HALF = ROWS // 2  # three vectors of sums for each: the registers are full


@compiled
def weigh_queries(scores: Any, seen: Any) -> Any:
    """Each column of scores [tokens, queries] becomes weights, as far as it has `seen`.

    They are not divided by their sums yet. The largest scores, and the sums.
    """
    largest = np.full(scores.shape[1], Float(-3.4e38), np.float32)
    total = np.zeros(scores.shape[1], np.float32)
    for row in range(len(scores)):
        i = np.int32(row)
        for query in range(scores.shape[1]):
            score = scores[row, query] if i < seen[query] else Float(-3.4e38)
            largest[query] = larger(largest[query], score)
    for row in range(len(scores)):
        i = np.int32(row)
        for query in range(scores.shape[1]):
            weight = exp(scores[row, query] - largest[query])
            scores[row, query] = weight if i < seen[query] else Float(0)
            total[query] += scores[row, query]
    return largest, total


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
        log_sums: Any,
        ends: Any,
        out: Any,
    ) -> None:
        """As `attend`, for the readers of a run; into `out` if they read no more."""
        num_kv_heads = keys.shape[1] // head_dim
        kv = job % num_kv_heads
        table, start, end, first, last = runs[job // num_kv_heads]
        slots, some = tables[table, start:end], readers[first:last]
        rows = -(-len(slots) // ROWS) * ROWS
        queries = -(-len(some) * group // WIDTH) * WIDTH
        asked, seen = np.zeros((deep, queries), np.float32), np.zeros(queries, np.int32)
        for g in range(group):
            for j in range(head_dim):
                row = (kv * group + g) * head_dim + j
                for i in range(len(some)):
                    asked[j, g * len(some) + i] = heads[row, some[i, 0]] * scale
            for i in range(len(some)):
                seen[g * len(some) + i] = min(some[i, 1], end) - start
        known = np.empty((rows, deep), np.float32)
        known[len(slots) :] = 0
        known[:, head_dim:] = 0
        gather(keys, slots, kv * head_dim, known)
        scores = np.empty((rows, queries), np.float32)
        multiply_tiles(known, asked, scores)
        largest, total = weigh_queries(scores, seen)
        gather(values, slots, kv * head_dim, known)
        average_tiles(known, scores, asked)
        for query in range(queries):
            total[query] = max(total[query], Float(1e-30))  # no reader's
            largest[query] += np.log(total[query])
        for j in range(head_dim):
            for query in range(queries):
                asked[j, query] /= total[query]
        token = some[0, 0]
        alone = ends[token] - (ends[token - 1] if token else 0) == 1
        for g in range(group):
            head, query = kv * group + g, g * len(some)
            if alone:
                for j in range(head_dim):
                    for i in range(len(some)):
                        out[head * head_dim + j, some[i, 0]] = asked[j, query + i]
            else:
                for i in range(len(some)):
                    log_sums[first + i, head] = largest[query + i]
                    for j in range(head_dim):
                        found[first + i, head, j] = asked[j, query + i]

    return in_parts(attend_together)


@in_parts
def merge(
    head: Any, found: Any, log_sums: Any, merged: Any, order: Any, ends: Any, out: Any
) -> None:
    """out [heads * head_dim, lanes]: a head's pieces, by their sums of weights."""
    head_dim = found.shape[2]
    average = np.empty(head_dim, np.float32)
    for lane in merged:
        pieces = order[ends[lane - 1] if lane else 0 : ends[lane]]
        largest, total = Float(-3.4e38), Float(0)
        for piece in pieces:
            largest = larger(largest, log_sums[piece, head])
        average[:] = 0
        for piece in pieces:
            weight, part = exp(log_sums[piece, head] - largest), found[piece, head]
            total += weight
            for j in range(head_dim):
                average[j] += weight * part[j]
        for j in range(head_dim):
            out[head * head_dim + j, lane] = average[j] / total


def multiply_many(product: Any, x: Any, out: Any, num_tokens: int) -> None:
    """As `make_multiply`'s, by PyTorch."""
    weight, bias = (torch.from_numpy(each) for each in product)
    weight = weight.view(torch.bfloat16) if weight.dtype == torch.uint16 else weight
    given, told = (torch.as_tensor(each)[:, :num_tokens] for each in (x, out))
    torch.mm(weight.float(), given, out=told)
    if len(bias):
        told += bias


def multiply_for(lanes: int) -> Callable[..., None]:
    """The product for so many lanes: (rows, bias), x, out, number of tokens."""
    return make_multiply(lanes) if lanes <= MOST else multiply_many


NO_BIAS = np.empty((0, 1), np.float32)


class ReadProduct:
    """x -> x times weight, plus bias: read once for few tokens, PyTorch's for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        own = NO_BIAS if bias is None else bias.float()[:, None].numpy()
        self.arrays = as_array(weight), own
        self._room: dict[int, Any] = {}  # new memory is slow at first touch

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        if not len(x):
            return x.new_empty(0, len(self.weight))
        if len(x) > MOST:
            told = torch.empty(len(x), len(self.weight))
            multiply_many(self.arrays, x.float().t(), told.t(), len(x))
            return told.to(x.dtype)
        lanes = lanes_for(len(x))
        if lanes not in self._room:
            self._room[lanes] = np.empty((len(self.weight), lanes), np.float32)
        out = self._room[lanes]
        make_multiply(lanes)(self.arrays, as_lanes(x), out, len(x))
        return as_rows(out, np.arange(len(x)), x.new_empty(len(x), len(self.weight)))


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
    return fill(np.empty((x.shape[1], lanes_for(len(x))), np.float32), x)


def fill(out: Any, x: Tensor) -> Any:
    """Write [tokens, features] into [features, lanes]; lanes left over become 0."""
    torch.from_numpy(out[:, : len(x)]).copy_(x.t())
    out[:, len(x) :] = 0
    return out


def as_rows(columns: Any, chosen: Any, out: Tensor) -> Tensor:
    """Some lanes of [features, lanes] -> [tokens, features]."""
    to_rows(-(-len(columns) // BLOCK), columns, chosen, as_array(out))
    return out


@in_parts
def to_rows(block: Any, columns: Any, chosen: Any, out: Any) -> None:
    """Each chosen lane as a row, in the format of the result."""
    first, last = block * BLOCK, (block + 1) * BLOCK
    some, told = columns[first:last], out[:, first:last]
    for row in range(len(chosen)):
        lane = some[:, chosen[row]]
        for i in range(len(lane)):
            put(told, row, i, lane[i])


def read_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The product of a weight that the kernels can read, or else packed."""
    num_outputs, num_inputs = weight.shape
    if num_outputs < ROWS or num_inputs < STRETCH or num_inputs % 16:
        packed = packed_product(weight, bias)
        return lambda x: packed(x.to(weight.dtype))
    return ReadProduct(weight, bias)


class LargePages:
    """Memory for tensors, side by side in blocks that may lie in pages of 2 MB.

    A block lives as long as one of its tensors.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: object = "cpu"
    ) -> Tensor:
        """As `torch.empty`, on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        lines = -(-size // LINE) * LINE
        if lines > len(self._left):
            block = np.empty(max(lines, BLOCK_SIZE) + LINE, np.uint8)
            self._left = torch.from_numpy(block[-block.ctypes.data % LINE :])
        taken, self._left = self._left[:size], self._left[lines:]
        return taken.view(dtype).view(*shape)


LINE, BLOCK_SIZE = LINE_BITS // 8, 2**25  # bytes

PARTS = ("norms", "products", "rotation", "attention", "gates")
NORMS, PRODUCTS, ROTATION, ATTENTION, GATES = range(len(PARTS))


@compiled
def note(spent: Any, part: int, start_s: float) -> Any:
    """Add the time since the start to a part's seconds; what time it is."""
    end_s = now()
    spent[part] += end_s - start_s
    return end_s


@compiled
def clock() -> Any:
    """What time it is."""
    return now()


@by_lanes
def write(
    part: Any, span: Any, heads: Any, first: Any, slots: Any, keys: Any, values: Any
) -> None:
    """Store each lane's key and value, rows of `heads` from `first` on, in its slot."""
    size = keys.shape[1]
    for lane in range(part * span, min((part + 1) * span, len(slots))):
        for j in range(size):
            put(keys, slots[lane], j, heads[first + j, lane])
            put(values, slots[lane], j, heads[first + size + j, lane])


@cache
def make_find(head_dim: int, group: int) -> Callable[..., None]:
    """All of a layer's attention, for one shape of heads."""
    attend = make_attend(head_dim, group)
    attend_together = make_attend_together(head_dim, group)

    def find(heads: Any, memory: Any, plan: Any, found: Any, out: Any) -> None:
        """Store each lane's key and value; out: what it finds in its context."""
        slots, tables, pieces, runs, readers, order, ends, merged = plan
        keys, values = memory
        averages, log_sums = found
        own, num_jobs = len(pieces), keys.shape[1] // head_dim * len(runs)
        write(heads, len(out), slots, keys, values)
        attend(own, heads, keys, values, tables, pieces, averages, log_sums)
        if num_jobs:
            told = averages[own:], log_sums[own:], ends, out
            attend_together(num_jobs, heads, keys, values, tables, runs, readers, *told)
        if len(merged):
            merge(averages.shape[1], averages, log_sums, merged, order, ends, out)

    return compiled(find)


@cache
def make_layer(lanes: int, head_dim: int, group: int) -> tuple[Any, Any]:
    """A layer in two functions: up to what attention finds, and from there on."""
    multiply, find = multiply_for(lanes), make_find(head_dim, group)

    def look(
        number: int,
        room: Any,
        layer: Any,
        eps: Any,
        plan: Any,
        rotation: Any,
        found: Any,
        spent: Any,
    ) -> None:
        """seen = what attention finds, for so many tokens."""
        stream, delta, normal, heads, seen, _, _ = room
        norm, qkv, bias, head_norm = layer[:4]
        start_s = clock()
        add_norm(stream, delta, norm, eps[0], normal)
        start_s = note(spent, NORMS, start_s)
        multiply((qkv, bias), normal, heads, number)
        start_s = note(spent, PRODUCTS, start_s)
        norm_heads(heads, head_norm, eps[1], head_dim)
        start_s = note(spent, NORMS, start_s)
        rotate(heads, len(seen) + layer[-1].shape[1], rotation[0], rotation[1])
        start_s = note(spent, ROTATION, start_s)
        find(heads, layer[-2:], plan, found, seen)
        note(spent, ATTENTION, start_s)

    def think(number: int, room: Any, layer: Any, eps: Any, spent: Any) -> None:
        """Add what attention found to the stream; delta = what the MLP makes of it."""
        stream, delta, normal, _, seen, both, inner = room
        output, own, norm, gate_and_up, other, down, last = layer[4:-2]
        start_s = clock()
        multiply((output, own), seen, delta, number)
        start_s = note(spent, PRODUCTS, start_s)
        add_norm(stream, delta, norm, eps[0], normal)
        start_s = note(spent, NORMS, start_s)
        multiply((gate_and_up, other), normal, both, number)
        start_s = note(spent, PRODUCTS, start_s)
        gate(both, inner)
        start_s = note(spent, GATES, start_s)
        multiply((down, last), inner, delta, number)
        note(spent, PRODUCTS, start_s)

    return look, think


@compiled
def finish(room: Any, end: Any, spent: Any) -> None:
    """out [chosen, hidden]: the last norm of the lanes that are chosen."""
    chosen, out, weight, eps = end
    start_s = clock()
    add_norm(room[0], room[1], weight, eps, room[2])
    to_rows(-(-len(room[2]) // BLOCK), room[2], chosen, out)
    note(spent, NORMS, start_s)


@cache
def make_layers(lanes: int, head_dim: int, group: int) -> Callable[..., None]:
    """All layers of a step of few tokens."""
    parts = make_layer(lanes, head_dim, group)
    look, think = (compiled(part, inline="always") for part in parts)

    def run_all(
        number: int,
        room: Any,
        first: Any,
        addresses: Any,
        eps: Any,
        plan: Any,
        rotation: Any,
        found: Any,
        spent: Any,
        end: Any,
    ) -> None:
        for i in range(len(addresses)):
            layer = elsewhere(first, addresses[i])
            look(number, room, layer, eps, plan, rotation, found, spent)
            think(number, room, layer, eps, spent)
        finish(room, end, spent)

    return compiled(run_all)


class Room(NamedTuple):
    """Arrays [features, lanes] of a step; each layer writes over the one before."""

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
        self._arrays: Kept[PagedAttention, tuple[Layer, Any, Any]] = Kept()
        self._rooms: Kept[Layer, dict[int, Room]] = Kept()
        self._norms: Kept[RMSNorm, Any] = Kept()
        self._spent = np.zeros(len(PARTS))

    def take_seconds(self) -> dict[str, float]:
        """What the parts of the layers took, by name, since this was last asked."""
        found = dict(zip(PARTS, self._spent.tolist(), strict=True))
        self._spent[:] = 0
        return found

    def __call__(
        self,
        layers: Sequence[Layer],
        norm: RMSNorm,
        x: Tensor,
        memory: Sequence[PagedAttention],
        plan: Plan,
        angles: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """What `run_layers` gives, but always in float32; `rows` are in order."""
        arrays, addresses = self._arrays_of(layers, memory)
        if not isinstance(plan, StepPlan) or arrays is None:
            return run_layers(layers, norm, x, memory, plan, angles, rows)
        layer, lanes = layers[0], lanes_for(len(x))
        room = self._room_for(layer, x)
        rotation = as_lanes(angles.cos()), as_lanes(angles.sin())
        rest = plan.arrays, rotation, make_found(layer, plan), self._spent
        given, chosen = (eps_of(layer), *rest), rows.numpy()
        out, last = torch.empty(len(rows), x.shape[1]), self._norm_of(norm)
        end = out.numpy(), last, Float(norm.eps)
        if lanes <= MOST:
            run_all = make_layers(lanes, *shape_of(layer))
            run_all(len(x), tuple(room), arrays[0], addresses, *given, (chosen, *end))
            return out
        room, chosen = self._one_by_one(layers, room, arrays, given, chosen, len(x))
        finish(tuple(room), (chosen, *end), self._spent)
        return out

    def _one_by_one(
        self,
        layers: Sequence[Layer],
        room: Room,
        arrays: Any,
        given: Any,
        chosen: Any,
        number: int,
    ) -> tuple[Room, Any]:
        """Many tokens; in the end, room for those that are chosen, and their lanes."""
        shape = shape_of(layers[0])
        look, think = make_layer(room.stream.shape[1], *shape)
        for own in arrays:
            look(number, room, own, *given)
            if own is arrays[-1] and len(chosen) < number:
                number = len(chosen)
                room = self._narrowed(room, layers[0], chosen)
                chosen = np.arange(number)
                _, think = make_layer(room.stream.shape[1], *shape)
            think(number, room, own, given[0], self._spent)
        return room, chosen

    def _narrowed(self, room: Room, layer: Layer, chosen: Any) -> Room:
        """Room for some tokens, with their part of the stream and of what was seen."""
        stream, seen = (
            torch.from_numpy(each[:, chosen]).t() for each in (room.stream, room.seen)
        )
        less = self._room_for(layer, stream)
        fill(less.seen, seen)
        return less

    def _norm_of(self, norm: RMSNorm) -> Any:
        if norm not in self._norms:
            self._norms[norm] = norm_of((norm, 1))
        return self._norms[norm]

    def _room_for(self, layer: Layer, x: Tensor) -> Room:
        """Room for a stream [tokens, hidden]: again the same for as many lanes.

        Memory is slow when it is first touched. Of large rooms there is only one.
        """
        rooms, lanes = self._rooms.setdefault(layer, {}), lanes_for(len(x))
        if lanes not in rooms:
            for other in [n for n in rooms if min(n, lanes) > MOST]:
                del rooms[other]
            rooms[lanes] = make_room(layer, lanes)
        fill(rooms[lanes].stream, x)
        rooms[lanes].delta[:] = 0
        return rooms[lanes]

    def _arrays_of(
        self, layers: Sequence[Layer], memory: Sequence[PagedAttention]
    ) -> tuple[Any, Any]:
        """Each layer's arrays, and their addresses [layers, arrays]; or None twice."""
        owner, *kept = self._arrays.get(memory[0], (None,))
        if owner is not layers[0]:
            kept = [None, None]
            pairs = zip(layers, memory, strict=True)
            if all(has_kernels(layer) for layer in layers):
                arrays = [(*weights_of(layer), *arrays_of(own)) for layer, own in pairs]
                places = [[each.ctypes.data for each in layer] for layer in arrays]
                kept = [arrays, np.array(places)]
            self._arrays[memory[0]] = (layers[0], *kept)
        return kept[0], kept[1]


def arrays_of(memory: PagedAttention) -> tuple[Any, Any]:
    """Keys and values, [slots, kv_heads * head_dim]."""
    return as_array(memory.keys.flatten(1)), as_array(memory.values.flatten(1))


def shape_of(layer: Layer) -> tuple[int, int]:
    """Size of a head; how many queries share a key."""
    num_heads, num_kv_heads = layer.self_attn.heads
    return layer.self_attn.head_dim, num_heads // num_kv_heads


def products_of(layer: Layer) -> list[Any]:
    """The products of a layer, in order."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.qkv, attention.output, mlp.gate_and_up, mlp.down)
    return [part.multiply for part in parts]


def has_kernels(layer: Layer) -> bool:
    """Whether all its weights are for the kernels."""
    return all(isinstance(product, ReadProduct) for product in products_of(layer))


def weights_of(layer: Layer) -> tuple[Any, ...]:
    """A layer's weights, in the order in which they are used."""
    qkv, output, gate_and_up, down = (each.arrays for each in products_of(layer))
    attention, heads = layer.self_attn, NO_BIAS
    if attention.q_norm is not None and attention.k_norm is not None:
        number, number_of_keys = attention.heads
        heads = norm_of((attention.q_norm, number), (attention.k_norm, number_of_keys))
    first, second = (
        norm_of((each, 1))
        for each in (layer.input_layernorm, layer.post_attention_layernorm)
    )
    return first, *qkv, heads, *output, second, *gate_and_up, *down


def eps_of(layer: Layer) -> tuple[Any, Any]:
    """What keeps norms from dividing by 0: the layer's, the heads'."""
    own = layer.self_attn.q_norm
    return Float(layer.input_layernorm.eps), Float(0 if own is None else own.eps)


def norm_of(*norms: tuple[RMSNorm, int]) -> Any:
    """Weights of norms, each so often, [all, 1]."""
    weights = [norm.weight.detach().float().repeat(often) for norm, often in norms]
    return torch.cat(weights)[:, None].numpy()


def make_room(layer: Layer, lanes: int) -> Room:
    """Room for so many lanes.

    All 0: what lies in lanes without a token may be too small for normal floats, and a
    processor takes a hundred times as long for those.
    """
    attention = layer.self_attn
    seen = attention.heads[0] * attention.head_dim
    heads, both = (
        len(cast(Any, each.multiply).weight)
        for each in (attention.qkv, layer.mlp.gate_and_up)
    )
    hidden = layer.input_layernorm.weight.shape[0]
    rows = (hidden, hidden, hidden, heads, seen, both, both // 2)
    return Room(*(np.zeros((n, lanes), np.float32) for n in rows))


def make_found(layer: Layer, plan: StepPlan) -> tuple[Any, Any]:
    """Room for averages [pieces, heads, head_dim] and logarithms of sums."""
    num_heads = layer.self_attn.heads[0]
    averages = (len(plan.order), num_heads, layer.self_attn.head_dim)
    return np.empty(averages, np.float32), np.empty(averages[:2], np.float32)


def backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels, if they know the device and the format. Raises `ValueError`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("these kernels are for float32 and bfloat16 on a CPU")
    return Backend(CompiledLayers(), arrange, read_product, LargePages().empty)
