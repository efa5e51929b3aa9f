# Exported from chapters/05_model.py (88f522b7): edit the chapter.
"""Runs batches on a real model: owns the weights and the K/V memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
