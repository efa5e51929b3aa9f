# Exported from chapters/05_model.py (a19f424b): edit the chapter.
"""What one forward pass computes: some new tokens of several requests."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.request import SamplingParams


@dataclass(slots=True, eq=False)
class Chunk:
    """New tokens of one request: positions `start` to `start + len(token_ids) - 1`.

    `pages` is the request's page table. Its first `num_shared` pages are published:
    they are read and never written. `samples` says that the chunk ends with the last
    known token, so that the next one is to be chosen from its logits.
    """

    request_id: str
    token_ids: "array[int]"
    start: int
    pages: Sequence[int]
    num_shared: int
    samples: bool
    params: SamplingParams = SamplingParams()

    @property
    def end(self) -> int:
        """The number of tokens whose K/V exist after the forward pass."""
        return self.start + len(self.token_ids)
