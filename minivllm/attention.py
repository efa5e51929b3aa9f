# Exported from chapters/05_model.py (44f30085): edit the chapter.
"""Attention that reads keys and values through page tables."""

from __future__ import annotations

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
