# Exported from chapters/06_weights_and_words.py (ba1f67b3): edit the chapter.
"""From logits to token ids."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from minivllm.batch import Chunk
from minivllm.request import SamplingParams

GREEDY_BELOW = 1e-5  # down here a draw is the argmax anyway; vLLM's bound


class Sampler:
    """Chooses the next token of each request; reproducible whoever shares the batch."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[int]:
        """Logits [chunks, vocab] -> one token id for each chunk."""
        best: list[int] = logits.argmax(-1).tolist()
        for i, chunk in enumerate(chunks):
            if chunk.params.temperature >= GREEDY_BELOW:
                best[i] = self._draw(logits[i].float().cpu(), chunk)
        return best

    def _draw(self, logits: Tensor, chunk: Chunk) -> int:
        """Draw from the kept tokens: divide by exponential noise, take the largest."""
        weights = torch.softmax(keep_likely(logits, chunk.params), dim=-1)
        noise = torch.empty_like(weights).exponential_(generator=self._generator(chunk))
        return int((weights / noise).argmax())

    def _generator(self, chunk: Chunk) -> torch.Generator:
        own = chunk.params.seed
        name = (
            f"seed {own}"
            if own is not None
            else f"request {self.seed} {chunk.request_id}"
        )
        digest = blake2b(f"{name} at {chunk.end}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def keep_likely(logits: Tensor, params: SamplingParams) -> Tensor:
    """Scaled logits [vocab], with -inf where top_k, top_p or min_p cut a token off."""
    scaled, order = (logits / params.temperature).sort(descending=True)
    probs = torch.softmax(scaled, dim=-1)
    before = probs.cumsum(-1) - probs  # the mass of the tokens that are likelier
    keep = (before < params.top_p) & (probs >= params.min_p * probs[0])
    if params.top_k > 0:
        keep[params.top_k :] = False
    kept = scaled.masked_fill(~keep, float("-inf"))
    return torch.empty_like(kept).scatter_(0, order, kept)
