"""A simulated runner that looks at the whole past, as attention does.

`SimulatedRunner` reads one slot: the one before its chunk. This one also keeps the
token of each slot, and before it computes anything it follows the past from the first
slot to the last: each must hold what its token makes of the slot before it. So a stale
page, a swapped table, a slot that was never written or a commit before its forward pass
is found where it happens. `faults` keeps what was found, because an engine whose runner
raises goes on without the failed requests.
"""

from array import array
from collections.abc import Sequence

from minivllm.batch import Chunk
from minivllm.simulation import (
    SerialPrefill,
    SimulatedRunner,
    VirtualClock,
    next_state,
    token_after,
)

COST = SerialPrefill(chunk_s=0.01, token_s=0.001, decode_s=0.02, k=0.2)
MANY_PAGES = 4096


def cold_continuation(
    prompt: Sequence[int], num_tokens: int, vocab_size: int
) -> list[int]:
    """What the runner answers to a prompt: no engine, no cache."""
    state = 0
    for token in prompt:
        state = next_state(state, token)
    answer = []
    for _ in range(num_tokens):
        answer.append(token_after(state, vocab_size))
        state = next_state(state, answer[-1])
    return answer


class CheckingRunner(SimulatedRunner):
    def __init__(
        self,
        page_size: int,
        vocab_size: int,
        fail: Sequence[int] = (),
        clock: VirtualClock | None = None,
    ) -> None:
        clock = clock or VirtualClock()
        super().__init__(COST, clock, vocab_size, MANY_PAGES, page_size)
        self.tokens = array("i", bytes(4 * len(self.states)))
        self.fail = set(fail)  # the numbers of the forward passes that raise
        self.num_runs = 0
        self.computed = 0
        self.faults: list[str] = []

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        self.num_runs += 1
        if self.num_runs in self.fail:
            self._scribble(chunks)
            raise RuntimeError("planned failure")
        try:
            self._check_pages(chunks)
            tokens = super().run(chunks)
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            raise
        self.computed += sum(len(chunk.token_ids) for chunk in chunks)
        return tokens

    def _scribble(self, chunks: Sequence[Chunk]) -> None:
        """A failed pass may leave rubbish wherever it may write."""
        for chunk in chunks:
            self._write(chunk, array("Q", [1] * len(chunk.token_ids)))

    def _check_pages(self, chunks: Sequence[Chunk]) -> None:
        owned: set[int] = set()
        for chunk in chunks:
            assert len(chunk.token_ids) > 0, "an empty chunk"
            room = len(chunk.pages) * self.page_size
            assert room >= chunk.end, "tokens without a page"
            mine = set(chunk.pages[chunk.num_shared :])
            assert not mine & owned, "two requests write one page"
            owned |= mine

    def _compute(self, chunk: Chunk) -> int | None:
        state = 0
        for position in range(chunk.start):
            slot = self._slot(chunk, position)
            state = next_state(state, self.tokens[slot])
            assert self.states[slot] == state, f"position {position} of another past"
        for position, token in enumerate(chunk.token_ids, chunk.start):
            state, slot = next_state(state, token), self._slot(chunk, position)
            if position < chunk.num_shared * self.page_size:
                assert self.states[slot] == state, "a shared page of another past"
            else:
                self.tokens[slot] = token
        return super()._compute(chunk)
