# Exported from chapters/01_kv_cache.py (3a202417): edit the chapter.
"""What was asked, and what comes back.

Everything here is frozen or plain data. What changes while a request runs lives with
its owner: pages with the prefix cache, queues with the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

TokenIds = Sequence[int]  # any sequence of ints, or an encoded array("i")
ExtraKey = str | bytes | int | tuple[object, ...] | None


def encode_ids(token_ids: TokenIds) -> array[int]:
    """Return the ids as an array of 32-bit ints; an `array("i")` comes back as it is.

    Converting a list costs more than looking its prefix up, so a request does it once.
    Raises `ValueError` for anything that is not a 32-bit integer.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    if isinstance(token_ids, str | bytes | bytearray | set | frozenset | dict):
        raise ValueError(f"token ids must be integers, not {type(token_ids).__name__}")
    try:
        return array("i", token_ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be 32-bit integers: {error}") from None


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the output tokens of one request.

    `max_tokens` None means: up to the end of the model's context. `temperature` 0 is
    greedy. `top_k` 0 or -1 keeps all tokens. `n` continuations of one prompt are drawn
    with the seeds `seed`, `seed` + 1 and so on. `stop` strings end the text and are not
    part of it; `stop_token_ids` and the model's own end tokens (unless `ignore_eos`)
    end the output and stay in `token_ids`. Raises `ValueError` for bad values.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, given in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if given is not None and not isinstance(given, Iterable):
                raise ValueError(
                    f"SamplingParams: {name} must be a list, not {given!r}"
                )
            object.__setattr__(self, name, () if given is None else tuple(given))
        try:
            broken = next((rule for holds, rule in self._rules() if not holds), "")
        except TypeError as error:
            broken = str(error)
        if broken:
            raise ValueError(f"SamplingParams: {broken}")

    def of_continuation(self, index: int) -> SamplingParams:
        """What holds for one of the `n`."""
        seed = None if self.seed is None else self.seed + index
        return self if self.n == 1 else replace(self, n=1, seed=seed)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.max_tokens is None or _is_int(self.max_tokens, 1),
            f"max_tokens must be a whole number >= 1, not {self.max_tokens}",
        )
        yield (
            0 <= self.temperature < float("inf"),
            f"temperature must be 0 or more, not {self.temperature}",
        )
        yield (
            _is_int(self.top_k, -1),
            f"top_k must be 0 or -1 (all tokens) or at least 1, not {self.top_k}",
        )
        yield 0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}"
        yield 0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}"
        yield _is_int(self.n, 1), f"n must be a whole number >= 1, not {self.n!r}"
        yield (
            self.n <= MOST_CONTINUATIONS,
            f"n must be at most {MOST_CONTINUATIONS}, not {self.n}",
        )
        yield (
            self.n == 1 or self.temperature >= GREEDY_BELOW,
            f"n must be 1 at temperature 0, not {self.n}: all would be equal",
        )
        yield (
            self.seed is None or _is_int(self.seed, -SEEDS, SEEDS),
            f"seed must be a whole number, not {self.seed!r}",
        )
        yield (
            self.seed is None or self.seed + self.n - 1 <= SEEDS,
            f"the last of {self.n} seeds must be at most 2**64, so not {self.seed}",
        )
        yield (
            all(isinstance(s, str) and s for s in self.stop or ()),
            f"stop strings must be non-empty text, not {self.stop!r}",
        )
        yield (
            all(_is_int(t, 0) for t in self.stop_token_ids or ()),
            f"stop_token_ids must be token ids, not {self.stop_token_ids!r}",
        )


GREEDY_BELOW = 1e-5  # down here a draw is the argmax anyway; vLLM's bound
MOST_CONTINUATIONS = 16_384  # vLLM's bound
SEEDS = 2**64  # seeds lie between minus and plus this


def _is_int(value: object, least: int, most: int = SEEDS) -> bool:
    """A whole number of any kind (NumPy's too), within bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return least <= int(value) <= most


def check_extra_key(key: ExtraKey, depth: int = 8) -> None:
    """Raise `ValueError` unless a key is text, bytes, a 64-bit int or a tuple of these.

    Tuples may be nested, up to eight deep.
    """
    for part in key if type(key) is tuple else (key,):
        if type(part) is tuple and depth:
            check_extra_key(part, depth - 1)
        elif part is not None and type(part) not in (str, bytes, int):
            kind = type(part).__name__
            raise ValueError(
                f"extra_key must be text, bytes, ints or a tuple, not {kind}"
            )
        elif isinstance(part, int) and part.bit_length() > 64:
            raise ValueError("an int in extra_key must have at most 64 bits")


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue. `arrival` numbers requests in the order they came."""

    request_id: str
    prompt_token_ids: array[int]
    params: SamplingParams
    extra_key: ExtraKey = None
    priority: int = 0
    arrival: int = 0
    arrival_s: float = 0.0


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from submission to first output, waiting included."""
        return (
            None if self.first_token_s is None else self.first_token_s - self.arrival_s
        )

    @property
    def e2e_s(self) -> float | None:
        """From submission to the last output token."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class CompletionOutput:
    """One continuation; `finish_reason` is stop, length, abort, error, or None."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step; final when `finished`.

    `num_cached_tokens` are the prompt tokens whose K/V were there already when the
    request was first admitted. It never changes afterwards.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt: str | None = field(default=None, repr=False)
