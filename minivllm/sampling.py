# Exported from chapters/06_weights_and_words.py (35fc3ffe): edit the chapter.
"""From logits to token ids."""

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from minivllm.batch import Chunk
from minivllm.request import GREEDY_BELOW, SamplingParams
from minivllm.runner import greedy


class Sampler:
    """Chooses the next token of each request; reproducible whoever shares the batch."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __call__(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[int]:
        """Logits [chunks, vocab] -> one token id for each chunk; -1 for NaN."""
        best = greedy(logits, chunks)
        for i, chunk in enumerate(chunks):
            if best[i] >= 0 and chunk.params.temperature >= GREEDY_BELOW:
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
    """Scaled logits [vocab], with -inf for what min_p, top_k and top_p cut off."""
    scaled = logits / params.temperature
    if params.min_p > 0:
        bound = scaled.max() + math.log(params.min_p)
        scaled = scaled.masked_fill(scaled < bound, -math.inf)
    if 0 < params.top_k < len(scaled):
        bound = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < bound, -math.inf)
    if params.top_p < 1:
        ordered, order = scaled.sort(descending=True)
        probs = torch.softmax(ordered, dim=-1)
        late = probs.cumsum(-1) - probs >= params.top_p  # enough mass came before
        scaled = scaled.index_fill(0, order[late], -math.inf)
    return scaled
