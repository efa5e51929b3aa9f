# Exported from chapters/01_kv_cache.py (461de009): edit the chapter.
"""What was asked, and what comes back.

Everything here is frozen or plain data. What changes while a request runs lives with
its owner: pages with the prefix cache, queues with the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

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

    `max_tokens` None means: up to the end of the model's context, or of all the pages
    if these end before it. `temperature` 0 is greedy. `top_k` 0 or -1 keeps all tokens.
    `repetition_penalty` divides the logits of what prompt or output contain already;
    the other two are subtracted, for the output alone. `logit_bias`, token id to
    number, is added before that. `n` continuations of one prompt are drawn with the
    seeds `seed`, `seed` + 1 and so on. `stop` strings, `stop_token_ids` and the model's
    own end tokens (unless `ignore_eos`) end the output; they are no part of the text,
    the tokens stay in `token_ids`. `logprobs` asks for so many of the likeliest tokens
    beside each chosen one, `prompt_logprobs`
    for the same of the prompt; -1 means all. Raises `ValueError` for bad values.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, given in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if given is not None and not isinstance(given, Iterable):
                raise ValueError(
                    f"SamplingParams: {name} must be a list, not {given!r}"
                )
            object.__setattr__(self, name, () if given is None else tuple(given))
        if isinstance(self.logit_bias, Mapping):  # our own copy
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name, holds, words in RULES:
            if not holds(value := getattr(self, name)):
                raise ValueError(
                    f"SamplingParams: {name} must be {words}, not {value!r}"
                )
        self._check_continuations()

    def _check_continuations(self) -> None:
        broken = ""
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            broken = f"n must be 1 at temperature 0, not {self.n}: all would be equal"
        if self.seed is not None and self.seed + self.n - 1 > SEEDS:
            broken = f"seed must leave room for {self.n} up to 2**64, not {self.seed}"
        if broken:
            raise ValueError(f"SamplingParams: {broken}")

    def of_continuation(self, index: int) -> SamplingParams:
        """What holds for one of the `n`. The first scores the prompt for all."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else self.seed + index
        prompt_logprobs = None if index else self.prompt_logprobs
        return replace(self, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


GREEDY_BELOW = 1e-5  # down here a draw is the argmax anyway; vLLM's bound
MOST_CONTINUATIONS = 16_384  # vLLM's bound
SEEDS = 2**64  # seeds lie between minus and plus this
LARGEST = 3.4e38  # that a float32 holds


def _is_int(value: object, least: int, most: int = SEEDS) -> bool:
    """A whole number of any kind (NumPy's too), within bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return least <= int(value) <= most


def _is_real(value: Any, least: float, most: float = LARGEST) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return bool(least <= value <= most)  # type: ignore[operator]


def _is_bias(value: object) -> bool:
    """A table of token ids and what to add; minus infinity forbids a token."""
    return isinstance(value, Mapping) and all(
        _is_int(token, 0) and _is_real(bias, float("-inf"))
        for token, bias in value.items()
    )


RULES: list[tuple[str, Callable[[Any], bool], str]] = [
    ("max_tokens", lambda v: v is None or _is_int(v, 1), "a whole number >= 1"),
    ("temperature", lambda v: _is_real(v, 0), "from 0 to 3.4e38"),
    ("top_k", lambda v: _is_int(v, -1), "0 or -1 (all tokens), or 1 to 2**64"),
    ("top_p", lambda v: _is_real(v, 0, 1) and v > 0, "in (0, 1]"),
    ("min_p", lambda v: _is_real(v, 0, 1), "in [0, 1]"),
    ("repetition_penalty", lambda v: _is_real(v, 0) and v > 0, "a number above 0"),
    ("presence_penalty", lambda v: _is_real(v, -2, 2), "in [-2, 2]"),
    ("frequency_penalty", lambda v: _is_real(v, -2, 2), "in [-2, 2]"),
    ("n", lambda v: _is_int(v, 1), "a whole number >= 1"),
    ("n", lambda v: v <= MOST_CONTINUATIONS, f"at most {MOST_CONTINUATIONS}"),
    ("seed", lambda v: v is None or _is_int(v, -SEEDS), "a whole number"),
    ("logprobs", lambda v: v is None or _is_int(v, -1), "0 or more, or -1 (all)"),
    (
        "prompt_logprobs",
        lambda v: v is None or _is_int(v, -1),
        "0 or more, or -1 (all)",
    ),
    ("stop", lambda v: all(isinstance(s, str) and s for s in v), "non-empty text"),
    ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
    ("stop_token_ids", lambda v: all(_is_int(t, 0) for t in v), "token ids"),
    ("logit_bias", lambda v: v is None or _is_bias(v), "token ids and their numbers"),
]


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
class Logprob:
    """The log-probability that the model gave a token; the likeliest has rank 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # one position: what was asked about it, by token id


@dataclass(slots=True)
class CompletionOutput:
    """One continuation; `finish_reason` is stop, length, abort, error, or None.

    `stop_reason` is the stop string, or the one of `stop_token_ids`, that ended it.
    `logprobs`, if asked for, has one table for each token, the token itself in it, and
    `cumulative_logprob` is the sum over these tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step; final when `finished`.

    `num_cached_tokens` are the prompt tokens whose K/V were there already when the
    request was first admitted. It never changes afterwards. `prompt_logprobs`, if asked
    for, has a table for each prompt token, and None for the first: nothing precedes it.
    `reuse` says why so many tokens were cached and no more, if somebody keeps track.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt: str | None = field(default=None, repr=False)
    prompt_logprobs: list[Logprobs | None] | None = field(default=None, repr=False)
    reuse: Any = field(default=None, repr=False)  # a `Reuse` of chapter 13
