# Exported from chapters/06_weights_and_words.py (f5aefc32): edit the chapter.
"""From logits to token ids, for a batch at once: each row as if it were alone."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import pad

from minivllm.batch import Chunk
from minivllm.request import GREEDY_BELOW, Logprob, Logprobs, SamplingParams
from minivllm.runner import find_largest, greedy

Head = Callable[[Tensor], Tensor]  # what makes logits of rows


def column(values: Iterable[float], like: Tensor) -> Tensor:
    """One number for each row [rows, 1], where the logits are."""
    return torch.tensor([*values], dtype=like.dtype, device=like.device)[:, None]


def num_points(vocab: int) -> int:
    """How many random numbers a draw takes: one for each halving of the vocabulary."""
    return (vocab - 1).bit_length()


def draw(weights: Tensor, points: Tensor) -> Tensor:
    """A token of each row [rows, vocab] with the odds of its weight.

    Points [rows, num_points(vocab)] are in [0, 1). Where weights differ by a rounding,
    so do the odds of each halving, and the token is almost always the same.
    """
    if weights.device.type == "mps":  # it has no 64-bit floats
        weights = weights.cpu()
    width = 2 ** points.shape[-1]
    folds = [pad(weights.double(), (0, width - weights.shape[-1]))]
    while (half := folds[-1].shape[-1] // 2) > 0:
        folds.append(folds[-1][:, :half] + folds[-1][:, half:])
    at = torch.zeros(len(weights), 1, dtype=torch.long, device=weights.device)
    columns = points.to(folds[0]).T[..., None]
    for pairs, point in zip(folds[-2::-1], columns, strict=True):
        half = pairs.shape[-1] // 2
        near, far = pairs.gather(-1, at), pairs.gather(-1, at + half)
        at = at + half * (point * (near + far) >= near)
    return at


class Sampler:
    """Chooses the next token of each request; reproducible whoever shares the batch."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, chunks: Sequence[Chunk], head: Head | None = None
    ) -> list[int]:
        """The rows that the chunks want [rows, vocab] -> a token for each that samples.

        It is -1 where the logits are not numbers. Logprobs are left on the chunks. If
        any scores its prompt, the rows are what the head makes logits of.
        """
        if head and any(chunk.num_scored for chunk in chunks):
            logits, chunks = score_prompts(logits, chunks, head)
        tokens = greedy(logits, chunks)
        rows = [i for i, chunk in enumerate(chunks) if not is_plain(chunk.params)]
        if rows:
            chosen = self._choose(logits[rows], [chunks[i] for i in rows])
            for i, token in zip(rows, chosen, strict=True):
                tokens[i] = token if tokens[i] >= 0 else -1
        if any(chunk.params.logprobs is not None for chunk in chunks):
            score_tokens(logits, chunks, tokens)
        return tokens

    def _choose(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[int]:
        logits = bend(logits, chunks)
        tokens = find_largest(logits)[:, 0]
        rows = [i for i, c in enumerate(chunks) if c.params.temperature >= GREEDY_BELOW]
        if rows:
            likely = keep_likely(logits[rows], [chunks[i].params for i in rows])
            size = num_points(likely.shape[-1])
            points = torch.stack([self._points(chunks[i], size) for i in rows])
            drawn = draw(torch.softmax(likely, dim=-1), points)
            tokens[rows] = drawn[:, 0].to(tokens.device)
        return [int(token) for token in tokens.tolist()]

    def _points(self, chunk: Chunk, num: int) -> Tensor:
        """Numbers in [0, 1) [num] that a seed and a position have, and nothing else."""
        own = chunk.params.seed
        name = (
            f"seed {own}"
            if own is not None
            else f"request {self.seed} {chunk.request_id}"
        )
        digest = blake2b(f"{name} at {chunk.end}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.rand(num, generator=generator, dtype=torch.float64)


def is_plain(params: SamplingParams) -> bool:
    """Whether the largest logit is the answer."""
    cold = params.temperature < GREEDY_BELOW
    return cold and not (params.logit_bias or penalties(params))


LARGEST_LOGIT = 1e30  # no penalty makes a logit infinite


def penalties(params: SamplingParams) -> tuple[float, float, float] | None:
    """Repetition, frequency and presence penalty, if any of them does anything."""
    found = (
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    return None if found == (1, 0, 0) else found


def bend(logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """A copy of logits [rows, vocab] with biases, then penalties.

    They stay finite, but for -inf, which forbids a token at every temperature.
    """
    bent = logits.float().clone()
    biases = [
        (row, token, bias)
        for row, chunk in enumerate(chunks)
        for token, bias in (chunk.params.logit_bias or {}).items()
    ]
    if biases:
        rows, ids, sums = zip(*biases, strict=True)
        bent[[*rows], [*ids]] += column(sums, bent)[:, 0]
    forbidden = bent == -torch.inf
    penalised = [row for row, c in enumerate(chunks) if penalties(c.params)]
    if penalised:
        chosen = [chunks[row] for row in penalised]
        bent[penalised] = penalise(bent[penalised], chosen)
    bent.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
    return bent.masked_fill_(forbidden, -torch.inf)


def penalise(logits: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Logits [rows, vocab] with the penalties of what is known in each row."""
    size, flat = logits.shape[-1], logits.flatten()
    places, counts = (found.to(flat.device) for found in count_tokens(chunks, size))
    kinds = torch.tensor([penalties(c.params) for c in chunks]).to(flat)
    repetition, frequency, presence = kinds[places // size].unbind(-1)
    old = flat[places]
    fallen = torch.where(old > 0, old / repetition, old * repetition)
    flat[places] = fallen - frequency * counts - presence * (counts > 0)
    return flat.view(logits.shape)


def count_tokens(chunks: Sequence[Chunk], vocab: int) -> tuple[Tensor, Tensor]:
    """Where each known token lies in flat logits, and how often it is in the output."""
    known = [torch.frombuffer(c.known[: c.end], dtype=torch.int32) for c in chunks]
    places = torch.cat([ids.long() + row * vocab for row, ids in enumerate(known)])
    said = torch.cat([torch.arange(c.end) >= c.num_prompt for c in chunks])
    found, where = torch.unique(places, return_inverse=True)
    return found, torch.zeros(len(found)).index_add(0, where, said.float())


def keep_likely(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [rows, vocab] over temperature, -inf for what a row's request cuts off."""
    scaled = logits / column((p.temperature for p in params), logits)
    size = logits.shape[-1]
    cuts = (
        (cut_min_p, [p.min_p for p in params], 0),
        (cut_top_k, [max(p.top_k, 0) if p.top_k < size else 0 for p in params], 0),
        (cut_top_p, [p.top_p for p in params], 1),
    )
    for cut, values, unset in cuts:
        rows = [i for i, value in enumerate(values) if value != unset]
        if rows:
            wanted = column((values[i] for i in rows), scaled)
            scaled[rows] = cut(scaled[rows], wanted)
    return scaled


def cut_min_p(logits: Tensor, share: Tensor) -> Tensor:
    """Keep what has at least this share of the likeliest token's probability."""
    return drop_below(logits, logits.amax(-1, keepdim=True) + share.log())


def cut_top_k(logits: Tensor, counts: Tensor) -> Tensor:
    """Keep the likeliest tokens, as many as the row says."""
    best = logits.topk(int(counts.max())).values
    return drop_below(logits, best.gather(-1, counts.long() - 1))


def cut_top_p(logits: Tensor, mass: Tensor, at_first: int = 1024) -> Tensor:
    """Keep the likeliest tokens until their probabilities reach the mass."""
    probs, size = torch.softmax(logits, dim=-1), at_first
    while True:
        best, order = probs.topk(min(size, logits.shape[-1]))
        late = best.cumsum(-1) - best >= mass  # enough mass came before
        if late[:, -1].all() or size >= logits.shape[-1]:
            break
        size *= 8
    last = ((~late).sum(-1, keepdim=True) - 1).clamp(min=0)  # the likeliest at least
    return drop_below(logits, logits.gather(-1, order.gather(-1, last)))


def drop_below(logits: Tensor, bounds: Tensor) -> Tensor:
    """-inf for what lies below its row's bound."""
    return logits.masked_fill(logits < bounds, -torch.inf)


def logprobs_of(
    logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]
) -> list[Logprobs]:
    """The model's log-probabilities in each row [rows, vocab], by token id.

    Of the row's `nums` likeliest tokens (-1: all), then of its own, with their ranks.
    Raises `FloatingPointError` for a row that has none.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    if not scores.amax(-1).isfinite().all():
        raise FloatingPointError("the model's logits are not numbers")
    ids = torch.tensor([*token_ids], device=scores.device)[:, None]
    own = scores.gather(-1, ids)
    ranks = (scores > own).sum(-1) + 1
    counts = [scores.shape[-1] if num < 0 else num for num in nums]
    best, order = scores.topk(max(counts))
    rows = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), strict=True)
    likely = zip(counts, best.tolist(), order.tolist(), strict=True)
    return [_table(*row, *liked) for row, liked in zip(rows, likely, strict=True)]


def _table(
    token: int, own: float, rank: int, num: int, best: list[float], order: list[int]
) -> Logprobs:
    pairs = enumerate(zip(order[:num], best, strict=False), 1)
    likely = {i: Logprob(score, place) for place, (i, score) in pairs}
    return likely | {token: Logprob(own, rank)}


def score_tokens(
    logits: Tensor, chunks: Sequence[Chunk], tokens: Sequence[int]
) -> None:
    """Leave the logprobs of the chosen tokens on the chunks that ask for them."""
    rows = [row for row, token in enumerate(tokens) if token >= 0]
    rows = [row for row in rows if chunks[row].params.logprobs is not None]
    if rows:
        nums = [chunks[row].params.logprobs or 0 for row in rows]
        found = logprobs_of(logits[rows], [tokens[row] for row in rows], nums)
        for row, table in zip(rows, found, strict=True):
            chunks[row].logprobs = table


ROWS_AT_ONCE = 128  # bounds what a prompt's logits take in memory


def score_prompts(
    rows: Tensor, chunks: Sequence[Chunk], head: Head
) -> tuple[Tensor, list[Chunk]]:
    """Leave the prompts' logprobs on the chunks; the logits and chunks that sample.

    A chunk's rows [rows, hidden], of which the head makes logits, are those of the
    tokens that it scores, then its last if it samples.
    """
    sampling: list[int] = []
    first = 0
    for chunk in chunks:
        end = first + chunk.num_scored
        chunk.prompt_logprobs = _score(rows[first:end], chunk, head)
        sampling += [end] * chunk.samples
        first = end + chunk.samples
    return head(rows[sampling]).float(), [chunk for chunk in chunks if chunk.samples]


def _score(rows: Tensor, chunk: Chunk, head: Head) -> list[Logprobs]:
    """The logprobs of the tokens after a chunk's rows, a few rows at a time."""
    after = chunk.known[chunk.start + 1 : chunk.start + 1 + len(rows)]
    num, tables = chunk.params.prompt_logprobs or 0, []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        ids = after[first : first + ROWS_AT_ONCE]
        tables += logprobs_of(head(some), ids, [num] * len(ids))
    return tables
