# Exported from chapters/07_engine.py (998d944c): edit the chapter.
"""The loop: schedule, run, commit, publish."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from minivllm.batch import Chunk
from minivllm.events import Observer, ignore
from minivllm.request import (
    CompletionOutput,
    ExtraKey,
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
        """One forward pass. If it raises, no chunk of the batch is committed."""


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

    def push(self, token_id: int) -> bool:
        """Take an output token; True if the text is complete (a stop string)."""

    def text(self, finished: bool) -> str:
        """The text so far."""


class NoText:
    """The writer of an engine without a tokenizer."""

    def push(self, token_id: int) -> bool:
        """Never stop."""
        return False

    def text(self, finished: bool) -> str:
        """Nothing."""
        return ""


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
    """Who waits for whom. Returned ids are followers that may be scheduled now."""

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

    def finished(self, request_id: str) -> list[str]:
        """Nobody waited."""
        return []

    def aborted(self, request_id: str) -> tuple[str | None, list[str]]:
        """Nobody follows."""
        return None, []


@dataclass(frozen=True)
class Limits:
    """What the model accepts, and where it ends by itself."""

    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class Progress:
    """What the engine remembers of a live request, beside the scheduler's state."""

    state: RequestState
    writer: Writer
    metrics: RequestMetrics
    held: bool = False
    finish_reason: str | None = None


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
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.publisher = publisher or PublishEachStep()
        self.coordinator = coordinator or Independent()
        self.clock = clock or WallClock()
        self.writers = writers or (lambda prompt_ids, params: NoText())
        self.observer = observer
        self._live: dict[str, Progress] = {}
        self._num_submitted = 0

    def check(self, token_ids: TokenIds, params: SamplingParams) -> int:
        """How many output tokens a request may have; `ValueError` if it cannot run."""
        size, context = len(token_ids), self.limits.max_context
        if size == 0:
            raise ValueError("the prompt is empty")
        for ids in (token_ids, params.stop_token_ids or ()):
            self._check_ids(ids)
        if size >= context:
            raise ValueError(
                f"the prompt has {size} tokens and the model's context {context}: "
                "no room for an output token"
            )
        if params.max_tokens is None:  # as far as context and pool reach
            pool = self.scheduler.cache.pool
            room = max(1, pool.num_pages * pool.page_size - size + 1)
            max_output = min(context - size, room)
        else:
            max_output = min(params.max_tokens, context - size)
        self._check_footprint(size + max_output - 1)
        return max_output

    def _check_ids(self, token_ids: TokenIds) -> None:
        last_id = self.limits.vocab_size - 1
        if token_ids and (min(token_ids) < 0 or max(token_ids) > last_id):
            wrong = next(i for i in token_ids if not 0 <= i <= last_id)
            raise ValueError(
                f"token id {wrong} is not in 0 to {last_id}, the vocabulary"
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
        ids, params = (
            encode_ids(token_ids)[:],
            params or SamplingParams(),
        )  # our own copy
        max_output = self.check(ids, params)
        check_extra_key(extra_key)
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, not {priority!r}")
        request_id, now = str(self._num_submitted), self.clock.now()
        number = self._num_submitted
        request = Request(request_id, ids, params, extra_key, priority, number, now)
        state = RequestState(request, ids[:], max_output)
        progress = Progress(state, self.writers(ids, params), RequestMetrics(now))
        progress.held = self.coordinator.admit(request_id, ids, extra_key) == "follower"
        self._live[request_id] = progress
        self._num_submitted += 1
        if not progress.held:
            self.scheduler.add(state)
        self.observer("submit", request_id=request_id, held=progress.held)
        return request_id

    def has_unfinished(self) -> bool:
        """Whether any request is still to be worked on."""
        return bool(self._live)

    def step(self) -> list[RequestOutput]:
        """One forward pass for those scheduled; the outputs of those that advanced."""
        batch = self.scheduler.schedule()
        if not batch:
            return []
        try:
            tokens = self.runner.run(batch)
        except Exception:
            logger.exception("the forward pass failed; its %d requests end", len(batch))
            return [self._end(self._live[c.request_id], "error") for c in batch]
        advanced = self._commit(batch, tokens)
        self._publish(batch, advanced)
        return [self._output(progress) for progress in advanced]

    def _commit(
        self, batch: Sequence[Chunk], tokens: Sequence[int | None]
    ) -> list[Progress]:
        """Enter what the forward pass did; return the requests with a new token."""
        advanced = []
        for chunk, token in zip(batch, tokens, strict=True):
            progress = self._live[chunk.request_id]
            self.scheduler.commit(progress.state, chunk)
            if token is not None:
                self._append(progress, token)
                advanced.append(progress)
        return advanced

    def _append(self, progress: Progress, token: int) -> None:
        state, now = progress.state, self.clock.now()
        state.tokens.append(token)
        if progress.metrics.first_token_s is None:
            progress.metrics = replace(progress.metrics, first_token_s=now)
        params = state.request.params
        ends = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        if self._push(progress, token):
            pass  # the writer decided
        elif token in ends or token in (params.stop_token_ids or ()):
            progress.finish_reason = "stop"
        elif state.num_output >= state.max_output:
            progress.finish_reason = "length"

    def _push(self, progress: Progress, token: int) -> bool:
        """Feed the writer; one that breaks ends its own request and no other."""
        try:
            if progress.writer.push(token):
                progress.finish_reason = "stop"
        except Exception:
            logger.exception("the text of a request cannot be written; it ends")
            progress.finish_reason = "error"
        return progress.finish_reason is not None

    def _publish(self, batch: Sequence[Chunk], advanced: Sequence[Progress]) -> None:
        """First everything becomes visible, then those who waited for it are told."""
        for chunk in batch:
            progress = self._live[chunk.request_id]
            if progress.finish_reason is None:
                state = progress.state
                assert state.lease is not None
                num_visible = self.publisher.num_visible(state)
                self.scheduler.cache.publish(state.lease, state.tokens, num_visible)
        for progress in advanced:
            if progress.finish_reason:
                self._forget(progress)
        for progress in advanced:
            request_id = progress.state.request.request_id
            if progress.state.num_output == 1:
                self._release(self.coordinator.prefilled(request_id))
            if progress.finish_reason:
                self._release(self.coordinator.finished(request_id))

    def _release(self, request_ids: Sequence[str]) -> None:
        """Let followers run: they queue at their place of arrival."""
        for request_id in request_ids:
            self._live[request_id].held = False
            self.scheduler.add(self._live[request_id].state)

    def _forget(self, progress: Progress) -> None:
        """Give back everything that a request holds. Its end is now."""
        progress.metrics = replace(progress.metrics, finished_s=self.clock.now())
        if not progress.held:
            self.scheduler.finish(progress.state, str(progress.finish_reason))
        del self._live[progress.state.request.request_id]

    def _end(self, progress: Progress, reason: str) -> RequestOutput:
        """End a request before its time."""
        progress.finish_reason = reason
        self._forget(progress)
        leader, released = self.coordinator.aborted(progress.state.request.request_id)
        self._release([*([leader] if leader else []), *released])
        return self._output(progress)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it is; None if it is unknown or has ended."""
        progress = self._live.get(request_id)
        return None if progress is None else self._end(progress, "abort")

    def _output(self, progress: Progress) -> RequestOutput:
        state, finished = progress.state, progress.finish_reason is not None
        completion = CompletionOutput(
            0,
            progress.writer.text(finished),
            list(state.tokens[len(state.request.prompt_token_ids) :]),
            progress.finish_reason,
        )
        return RequestOutput(
            state.request.request_id,
            list(state.request.prompt_token_ids),
            state.num_cached_tokens or 0,
            [completion],
            finished,
            progress.metrics,
        )

    def stats(self) -> dict[str, int]:
        """Pages, queues and counters, by name."""
        held = sum(progress.held for progress in self._live.values())
        return self.scheduler.cache.stats() | self.scheduler.stats() | {"held": held}

    def reset_prefix_cache(self) -> bool:
        """Forget all published pages. False, and no change, while a request runs."""
        return self.scheduler.cache.reset()
