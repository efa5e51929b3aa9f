"""A runner without a model that notices every mistake in a page table.

K/V memory holds, for each slot, the digest of the whole past up to that token. A chunk
may only run if its context slots hold exactly the digests of its own past, so a stale
page, a swapped table or a commit before its forward pass is found where it happens. The
next token is a function of the digest: identical prompts continue identically.
"""

from collections.abc import Sequence
from hashlib import blake2b

from minivllm.batch import Chunk


def digest(past: bytes, token: int) -> bytes:
    return blake2b(past + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(past: bytes, vocab_size: int) -> int:
    return int.from_bytes(past[:4], "little") % vocab_size


def cold_continuation(
    prompt: Sequence[int], num_tokens: int, vocab_size: int
) -> list[int]:
    """What the runner answers to a prompt: no engine, no cache."""
    past = b""
    for token in prompt:
        past = digest(past, token)
    answer = []
    for _ in range(num_tokens):
        answer.append(next_token(past, vocab_size))
        past = digest(past, answer[-1])
    return answer


class CheckingRunner:
    def __init__(
        self, page_size: int, vocab_size: int, fail: Sequence[int] = ()
    ) -> None:
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.memory: dict[int, tuple[int, bytes]] = {}  # slot -> position, digest
        self.fail = set(fail)  # the numbers of the forward passes that raise
        self.num_runs = 0
        self.computed = 0

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        self.num_runs += 1
        writes: dict[int, tuple[int, bytes]] = {}
        tokens = [self._one(chunk, writes) for chunk in chunks]
        if self.num_runs in self.fail:
            raise RuntimeError("planned failure")
        self.memory |= writes
        self.computed += sum(len(chunk.token_ids) for chunk in chunks)
        return tokens

    def _slot(self, chunk: Chunk, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return chunk.pages[page] * self.page_size + offset

    def _one(self, chunk: Chunk, writes: dict[int, tuple[int, bytes]]) -> int | None:
        assert len(chunk.token_ids) > 0, "an empty chunk"
        assert len(chunk.pages) * self.page_size >= chunk.end, "tokens without a page"
        past = b""
        for position in range(chunk.start):
            where, past = self.memory[self._slot(chunk, position)]
            assert where == position, f"slot holds position {where}, not {position}"
        for position, token in enumerate(chunk.token_ids, chunk.start):
            past, slot = digest(past, token), self._slot(chunk, position)
            if position // self.page_size < chunk.num_shared:
                assert self.memory[slot] == (position, past), (
                    "a shared page of another past"
                )
            else:
                assert slot not in writes, "two requests write one slot"
                writes[slot] = (position, past)
        return next_token(past, self.vocab_size) if chunk.samples else None
