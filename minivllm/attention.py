# Exported from chapters/05_model.py (649fd84d): edit the chapter.
"""Attention that reads keys and values through page tables."""

from __future__ import annotations

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
    [context]. `mask` [new, context] is None for a single token, and for a chunk that
    begins its prompt: there the first token sees one, the second two, and so on.
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
        context = _context_slots(chunk, page_size, device)
        plans.append(ChunkPlan(rows, context, _causal_mask(chunk, device)))
    return Plan(_longs(positions, device), _longs(write_slots, device), plans)


def _write_slots(chunk: Chunk, page_size: int, scratch_page: int) -> list[int]:
    """A slot for each new token: in its own page, or in scratch for a shared one."""
    own = chunk.pages[chunk.num_shared :]
    table = [*([scratch_page] * chunk.num_shared), *own]
    new = range(chunk.start, chunk.end)
    return [table[i // page_size] * page_size + i % page_size for i in new]


def _longs(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long).to(device)


def _context_slots(chunk: Chunk, page_size: int, device: torch.device) -> Tensor:
    firsts = torch.tensor(chunk.pages, dtype=torch.long)[:, None] * page_size
    slots = (firsts + torch.arange(page_size)).flatten()
    return slots[: chunk.end].to(device)


def _causal_mask(chunk: Chunk, device: torch.device) -> Tensor | None:
    """True where a new token may look: at everything up to itself."""
    if len(chunk.token_ids) == 1 or chunk.start == 0:
        return None
    queries = torch.arange(chunk.start, chunk.end)[:, None]
    return (torch.arange(chunk.end)[None, :] <= queries).to(device)


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
            is_causal=chunk.mask is None and len(query) > 1,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
