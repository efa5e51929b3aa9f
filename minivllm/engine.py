# Exported from chapters/07_engine.py (829cedb0): edit the chapter.
"""The loop: schedule, run, commit, publish."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from minivllm.batch import Chunk
from minivllm.events import Observer, ignore
from minivllm.request import (
    CompletionOutput,
    ExtraKey,
    Logprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenIds,
    check_extra_key,
    encode_ids,
)
from minivllm.scheduler import RequestState, Scheduler

logger = logging.getLogger("minivllm")


class Runner(Protocol):
    """Executes a batch; a token for each chunk that samples, None for the others."""

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """One forward pass. If it raises, no chunk of the batch is committed.

        Logprobs that a chunk's params ask for are left on the chunk.
        """


class Clock(Protocol):
    """Gives the time in seconds, from any starting point."""

    def now(self) -> float:
        """The present time."""


class WallClock:
    """The clock of the machine."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()


class Writer(Protocol):
    """The text of one request."""

    def push(self, token_id: int) -> str | None:
        """Take an output token; the stop string, if the text now holds one."""

    def piece(self, token_id: int) -> str | None:
        """What one token says by itself."""

    def text(self, finished: bool) -> str:
        """The text so far."""


class NoText:
    """The writer of an engine without a tokenizer."""

    def push(self, token_id: int) -> str | None:
        """Never stop."""
        return None

    piece = push  # nothing

    def text(self, finished: bool) -> str:
        """Nothing."""
        return ""


def no_writer(prompt_ids: TokenIds, params: SamplingParams) -> Writer:
    """A writer of nothing, whatever is asked."""
    return NoText()


class Publisher(Protocol):
    """When pages become visible to other requests."""

    def num_visible(self, state: RequestState) -> int:
        """How many of a running request's committed tokens others may find now."""


class PublishAtFinish:
    """Nothing is visible before its owner has ended, or was preempted."""

    def num_visible(self, state: RequestState) -> int:
        """None."""
        return 0


class PublishEachStep:
    """Every full page is visible as soon as a forward pass has completed it."""

    def num_visible(self, state: RequestState) -> int:
        """All that are committed."""
        return state.num_committed


class Coordinator(Protocol):
    """Who waits for whom. Returned ids are followers that may be scheduled now.

    Told of an id that it does not know, it raises a `LookupError`.
    """

    def admit(
        self, request_id: str, token_ids: TokenIds, extra_key: ExtraKey = None
    ) -> str:
        """Take a new request in: "leader" runs, "follower" is held."""

    def prefilled(self, request_id: str) -> list[str]:
        """The request's prompt is computed and published."""

    def finished(self, request_id: str) -> list[str]:
        """The request ended well."""

    def aborted(self, request_id: str) -> tuple[str | None, list[str]]:
        """The request ended otherwise; who leads now, and who is released."""

    def leader_of(self, request_id: str) -> str | None:
        """Whom a held request waits for."""

    def waiting_for(self, request_id: str) -> Sequence[str]:
        """Who waits for a request."""

    def stats(self) -> dict[str, int]:
        """Flights opened and requests that waited, so far."""

    def start_over(self) -> None:
        """Forget all live requests, whatever state they are in."""


class Independent:
    """Nobody waits for anybody."""

    def admit(
        self, request_id: str, token_ids: TokenIds, extra_key: ExtraKey = None
    ) -> str:
        """Everyone leads."""
        return "leader"

    def prefilled(self, request_id: str) -> list[str]:
        """Nobody waited."""
        return []

    finished = prefilled

    def aborted(self, request_id: str) -> tuple[str | None, list[str]]:
        """Nobody follows."""
        return None, []

    def leader_of(self, request_id: str) -> str | None:
        """Nobody waits."""
        return None

    def waiting_for(self, request_id: str) -> Sequence[str]:
        """Nobody waits."""
        return ()

    def stats(self) -> dict[str, int]:
        """Nothing happens here."""
        return {"flights": 0, "followers": 0}

    def start_over(self) -> None:
        """Nobody is remembered."""


@dataclass(frozen=True)
class Limits:
    """What the model accepts, and where it ends by itself."""

    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Progress:
    """What the engine remembers of one continuation, beside the scheduler's state.

    `name` is the id of the request that it belongs to; the metrics of a request are
    those of its first continuation.
    """

    name: str
    state: RequestState
    writer: Writer
    metrics: RequestMetrics
    held: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_ids: list[int] | None = None  # made once, at the first output
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    cumulative_logprob: float = 0.0


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: Limits,
        *,
        publisher: Publisher | None = None,
        coordinator: Coordinator | None = None,
        clock: Clock | None = None,
        writers: Callable[[TokenIds, SamplingParams], Writer] | None = None,
        observer: Observer = ignore,
        streams: bool = True,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.publisher = publisher or PublishEachStep()
        self.coordinator = coordinator or Independent()
        self.clock = clock or WallClock()
        self.writers = writers or no_writer
        self.observer = observer
        self.explain: Callable[[RequestState], Any] = lambda state: None
        self.streams = streams  # else a request is reported once, when it has ended
        self._live: dict[str, Progress] = {}  # continuations that have not ended
        self._requests: dict[str, list[Progress]] = {}  # those with one that is live
        self._untold: dict[str, list[Progress]] = {}  # with an end not reported yet
        self._cut_short = False
        self._num_submitted = 0

    def check(self, token_ids: TokenIds, params: SamplingParams) -> int:
        """How many output tokens a request may have; `ValueError` if it cannot run."""
        size, context = len(token_ids), self.limits.max_context
        if size == 0:
            raise ValueError("the prompt is empty")
        self._check_ids("the prompt", token_ids)
        self._check_params(params)
        if size >= context:
            raise ValueError(
                f"the prompt has {size} tokens and the model's context {context}: "
                "no room for an output token"
            )
        pool = self.scheduler.cache.pool
        room = max(1, pool.num_pages * pool.page_size - size + 1)
        max_output = min(params.max_tokens or room, context - size)
        self._check_footprint(size + max_output - 1)
        return max_output

    def _check_ids(self, where: str, token_ids: TokenIds) -> None:
        last_id = self.limits.vocab_size - 1
        if token_ids and (min(token_ids) < 0 or max(token_ids) > last_id):
            wrong = next(i for i in token_ids if not 0 <= i <= last_id)
            raise ValueError(
                f"{where}: token id {wrong} is not in 0 to {last_id}, the vocabulary"
            )

    def _check_params(self, params: SamplingParams) -> None:
        most = self.limits.vocab_size
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        bias = params.logit_bias or {}
        self._check_ids("logit_bias", [*bias])
        if len(bias) == most and max(bias.values()) == -math.inf:
            raise ValueError(f"logit_bias: it forbids all {most} tokens there are")
        if params.stop and self.writers is no_writer:
            raise ValueError(
                "stop: without a tokenizer there is no text to find it in: "
                "give stop_token_ids"
            )
        if max(params.logprobs or 0, params.prompt_logprobs or 0) > most:
            raise ValueError(
                f"logprobs and prompt_logprobs must be at most {most}, the vocabulary"
            )

    def _check_footprint(self, num_tokens: int) -> None:
        cache = self.scheduler.cache
        needed, there = cache.pages_for(num_tokens), cache.pool.num_pages
        if needed > there:
            raise ValueError(
                f"the request may need {needed} pages and the pool has {there}: "
                "lower max_tokens or raise num_pages"
            )

    def submit(
        self,
        token_ids: TokenIds,
        params: SamplingParams | None = None,
        extra_key: ExtraKey = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt; return its request id. `ValueError` names a fault."""
        ids = encode_ids(token_ids)[:]  # our own copy
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {params!r}")
        max_output = self.check(ids, params)
        check_extra_key(extra_key)
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, not {priority!r}")
        name, now, family = str(self._num_submitted), self.clock.now(), []
        for i in range(params.n):
            number, own = self._num_submitted + i, params.of_continuation(i)
            request = Request(str(number), ids, own, extra_key, priority, number, now)
            state = RequestState(request, ids[:], max_output, priority)
            writer = self.writers(ids, own)
            family.append(Progress(name, state, writer, RequestMetrics(now)))
        self._enter(family)
        return name

    def _enter(self, family: list[Progress]) -> None:
        with self._change():
            self._num_submitted += len(family)
            self._requests[family[0].name] = family
            for progress in family:
                self._admit(progress)

    def _admit(self, progress: Progress) -> None:
        state, request = progress.state, progress.state.request
        request_id, ids = request.request_id, request.prompt_token_ids
        self._live[request_id] = progress
        coordinator, leader = self._coordinator(progress), None
        role = coordinator.admit(request_id, ids, request.extra_key)
        progress.held = role == "follower"
        if not progress.held:
            self.scheduler.add(state)
        elif leader := coordinator.leader_of(request_id):
            leading = self._live[leader].state  # all of _hasten would be quadratic
            self.scheduler.set_priority(leading, min(leading.priority, state.priority))
        if self.observer is not ignore:
            told = {"held": progress.held, "leader": leader, "num_prompt": len(ids)}
            self.observer("submit", request_id=request_id, **told)

    def _coordinator(self, progress: Progress) -> Coordinator:
        """Who looks nothing up waits for nobody, and nobody waits for it."""
        return self.coordinator if progress.state.sought else Independent()

    def _hasten(self, leader: str) -> None:
        """A leader is as urgent as the most urgent of those who wait for it."""
        coordinator = self._coordinator(self._live[leader])
        names = [leader, *coordinator.waiting_for(leader)]
        priority = min(self._live[name].state.request.priority for name in names)
        self.scheduler.set_priority(self._live[leader].state, priority)

    def has_unfinished(self) -> bool:
        """Whether any request is still to be worked on, or to be reported."""
        return bool(self._requests or self._untold)

    def unfinished(self) -> list[str]:
        """The ids of these requests, also of one whose `submit` was cut short."""
        self._mend()
        return [*(self._requests | self._untold)]

    def step(self) -> list[RequestOutput]:
        """One forward pass for those scheduled; the outputs of those that advanced."""
        with self._change():
            batch = self.scheduler.schedule()
        try:
            tokens = self.runner.run(batch) if batch else []
        except Exception:
            logger.exception("the forward pass failed; its %d requests end", len(batch))
            return self._report([self._end(c.request_id, "error") for c in batch])
        with self._change():
            advanced = self._commit(batch, tokens)
            self._publish(batch, advanced)
        return self._report(advanced)

    def _report(self, advanced: Sequence[Progress]) -> list[RequestOutput]:
        """Their outputs, and those of all that ended untold; then these are told."""
        if self.observer is not ignore:
            self.observer("step", **self.scheduler.cache.stats())
        streamed = advanced if self.streams else ()
        names = [p.name for p in streamed if p.name in self._requests]
        told = self._untold | {name: self._requests[name] for name in names}
        outputs = [self._output(family) for family in told.values()]
        self._untold = {}
        return outputs

    def _commit(
        self, batch: Sequence[Chunk], tokens: Sequence[int | None]
    ) -> list[Progress]:
        """Enter what the forward pass did; return the requests with a new token."""
        advanced = []
        for chunk, token in zip(batch, tokens, strict=True):
            progress = self._live[chunk.request_id]
            self.scheduler.commit(progress.state, chunk)
            self._note(progress, chunk, token)
            if token is not None:
                self._append(progress, token)
                advanced.append(progress)
        return advanced

    def _append(self, progress: Progress, token: int) -> None:
        progress.state.tokens.append(token)
        metrics = self._requests[progress.name][0].metrics
        if metrics.first_token_s is None:
            metrics.first_token_s = self.clock.now()
        progress.finish_reason = self._why_last(progress, token)

    def _why_last(self, progress: Progress, token: int) -> str | None:
        """Why this output token is the last one; None if it is not."""
        state, params = progress.state, progress.state.request.params
        if token in self.limits.eos_token_ids and not params.ignore_eos:
            return "stop"
        if token in (params.stop_token_ids or ()):
            progress.stop_reason = token
            return "stop"
        try:
            progress.stop_reason = progress.writer.push(token)
        except Exception:  # it ends its own request and no other
            logger.exception("the text of a request cannot be written; it ends")
            return "error"
        if progress.stop_reason:
            return "stop"
        return "length" if state.num_output >= state.max_output else None

    def _note(self, progress: Progress, chunk: Chunk, token: int | None) -> None:
        """Keep the logprobs that a chunk brought, of each position once."""
        prompt = progress.prompt_logprobs
        for table in chunk.prompt_logprobs[len(prompt) - 1 - chunk.start :]:
            prompt.append(self._spell(progress, table))
        if token is not None and chunk.logprobs is not None:
            progress.logprobs.append(self._spell(progress, chunk.logprobs))
            progress.cumulative_logprob += chunk.logprobs[token].logprob

    def _spell(self, progress: Progress, table: Logprobs) -> Logprobs:
        try:
            for token, entry in table.items():
                entry.decoded_token = progress.writer.piece(token)
        except Exception:  # it loses its own text and no other's
            logger.exception("a token of a request cannot be written")
        return table

    def _publish(self, batch: Sequence[Chunk], advanced: Sequence[Progress]) -> None:
        """First everything becomes visible, then those who waited for it are told."""
        for chunk in batch:
            self._show(self._live[chunk.request_id])
        for progress in advanced:
            self._tell(progress)
        for progress in advanced:
            if progress.finish_reason:
                self._retire(progress)

    def _retire(self, progress: Progress) -> None:
        """What has ended waits in `_untold` until its output has been written."""
        family = self._requests[progress.name]
        self._untold[progress.name] = family
        del self._live[progress.state.request.request_id]
        if not any(p.state.request.request_id in self._live for p in family):
            del self._requests[progress.name]

    def _show(self, progress: Progress) -> None:
        state, reason = progress.state, progress.finish_reason
        num_visible = (
            state.num_committed if reason else self.publisher.num_visible(state)
        )
        assert state.lease is not None
        self.scheduler.cache.publish(state.lease, state.tokens, num_visible)
        if reason:
            self.scheduler.finish(state, reason)

    def _tell(self, progress: Progress) -> None:
        request_id = progress.state.request.request_id
        coordinator = self._coordinator(progress)
        if progress.state.num_output == 1:
            self._release(coordinator.prefilled(request_id), request_id)
            self._hasten(request_id)
        if progress.finish_reason:
            self._release(coordinator.finished(request_id), request_id)

    def _release(self, request_ids: Sequence[str], leader: str) -> None:
        """Let followers of a leader run: they queue at their place of arrival."""
        for request_id in request_ids:
            self._live[request_id].held = False
            self.scheduler.add(self._live[request_id].state)
        if request_ids:
            self.observer("release", request_ids=request_ids, leader=leader)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it is; None if it is unknown or has ended."""
        self._mend()
        for progress in reversed(self._requests.get(request_id, ())):
            if progress.finish_reason is None:  # followers first
                self._end(progress.state.request.request_id, "abort")
        if request_id not in self._untold:
            return None
        output = self._output(self._untold[request_id])
        del self._untold[request_id]
        return output

    def _end(self, request_id: str, reason: str) -> Progress:
        """End a request before its time, and give back everything that it holds."""
        progress = self._live[request_id]
        coordinator = self._coordinator(progress)
        with self._change():
            progress.finish_reason = reason
            if progress.held:
                self.observer("finish", request_id=request_id, reason=reason)
            else:
                self.scheduler.finish(progress.state, reason)
            leader = coordinator.leader_of(request_id)
            heir, released = coordinator.aborted(request_id)
            if leads := heir or leader:  # by whom it is waited for has changed
                self._hasten(leads)
            self._release([*([heir] if heir else []), *released], request_id)
            self._retire(progress)
        return progress

    def _text(self, progress: Progress) -> str:
        try:
            return progress.writer.text(progress.finish_reason is not None)
        except Exception:  # it loses its own text and no other's
            logger.exception("the text of a request cannot be written")
            return ""

    def _completion(self, index: int, progress: Progress) -> CompletionOutput:
        state, reason = progress.state, progress.finish_reason
        output_ids = state.tokens[len(state.request.prompt_token_ids) :].tolist()
        done = CompletionOutput(index, self._text(progress), output_ids, reason)
        done.stop_reason = progress.stop_reason
        if state.request.params.logprobs is not None:
            done.logprobs = [*progress.logprobs]
            done.cumulative_logprob = progress.cumulative_logprob
        return done

    def _output(self, family: Sequence[Progress]) -> RequestOutput:
        head, finished = family[0], all(p.finish_reason for p in family)
        if head.prompt_ids is None:
            head.prompt_ids = list(head.state.request.prompt_token_ids)
        prompt_ids = head.prompt_ids  # the same list in every output
        came, first = head.metrics.arrival_s, head.metrics.first_token_s
        metrics = RequestMetrics(came, first, self.clock.now() if finished else None)
        done = [self._completion(i, progress) for i, progress in enumerate(family)]
        cached = head.state.num_cached_tokens or 0
        told = RequestOutput(head.name, prompt_ids, cached, done, finished, metrics)
        told.reuse = self.explain(head.state)
        if head.state.request.params.prompt_logprobs is not None:
            told.prompt_logprobs = [*head.prompt_logprobs]
        return told

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Around each change of state: one that is cut short leaves its mark."""
        self._mend()
        self._cut_short = True
        yield
        self._cut_short = False

    def _mend(self) -> None:
        """After a change that was cut short every request ends, no page is trusted."""
        if not self._cut_short:
            return
        self.scheduler.start_over()
        self.coordinator.start_over()
        for progress in chain.from_iterable(self._requests.values()):
            progress.finish_reason = progress.finish_reason or "error"
        for request_id in self._live:
            self.observer("finish", request_id=request_id, reason="error")
        self._untold |= self._requests
        self._requests, self._live = {}, {}
        self._cut_short = False

    def stats(self) -> dict[str, int]:
        """Pages, queues and counters, by name."""
        held = sum(progress.held for progress in self._live.values())
        queues = self.scheduler.stats() | {"held": held}
        return self.scheduler.cache.stats() | queues | self.coordinator.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all published pages. False, and no change, while a request runs."""
        self._mend()
        return self.scheduler.cache.reset()
