# Exported from chapters/05_model.py (ac739f9c): edit the chapter.
"""What one forward pass computes: some new tokens of several requests."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.request import Logprobs, SamplingParams


@dataclass(slots=True, eq=False)
class Chunk:
    """New tokens of one request: positions `start` to `start + len(token_ids) - 1`.

    `pages` is the request's page table. Its first `num_shared` pages are published:
    they are read and never written. `samples` says that the chunk ends with the last
    known token, so that the next one is to be chosen from its logits. `known` are all
    tokens so far, the chunk's owner's own array, and the first `num_prompt` the prompt.
    Whoever runs the chunk fills in the logprobs that the params ask for.
    """

    request_id: str
    token_ids: "array[int]"
    start: int
    pages: Sequence[int]
    num_shared: int
    samples: bool
    params: SamplingParams = SamplingParams()
    known: "array[int]" = field(default_factory=lambda: array("i"))
    num_prompt: int = 0
    logprobs: Logprobs | None = None  # around the chosen token
    prompt_logprobs: Sequence[Logprobs] = ()  # of the prompt tokens after `start`

    @property
    def num_scored(self) -> int:
        """How many of the new tokens have a prompt token after them, to be scored."""
        scores = self.params.prompt_logprobs is not None
        return max(0, min(self.end, self.num_prompt - 1) - self.start) if scores else 0

    @property
    def end(self) -> int:
        """The number of tokens whose K/V exist after the forward pass."""
        return self.start + len(self.token_ids)
