# %% [markdown]
# # 14. An engine that people know how to use
#
# vLLM's quickstart has three lines: make an `LLM`, make `SamplingParams`, call `generate`.
#
# ```python
# llm = LLM("smollm2")
# params = SamplingParams(temperature=0, max_tokens=8)
# outputs = llm.generate(["The capital of France is"], params)
# ```
#
# Many have typed them; ours should need nothing else. How many decisions does the first line
# make without a word? Thirteen chapters have each left a choice open: how a prefix is found,
# when a page becomes visible, who waits, who rides together, what must fit, what is thrown away.

# %% name="engines"
from math import prod

from minivllm.options import CHOICES

axes = ("index", "publish", "single_flight", "grouping", "admission", "eviction")
print([len(CHOICES[axis]) for axis in axes], prod(len(CHOICES[axis]) for axis in axes))

# %% [markdown]
# [648](#engines) engines, before anyone has named a device or a page size. It would be natural to
# expect a chapter that makes them easy to use to hide them: a default, and a facade in front of
# it. A facade has a price. Whoever wants the 649th engine must take it down, and whoever wants
# to know which engine is running must look behind it. So this chapter adds no capability and
# hides none. It puts the choices in one place, with names, and shows that the three lines
# are what is left when nobody chooses.
#
# ## One place that knows all names
#
# So far no part knows which others it works with. The scheduler takes *a* grouping, the
# engine *a* publisher and *a* runner. That is why chapter 8 could put a model made of time
# where a real one had been, and why chapter 11 could try designs that did not survive. But
# somebody has to choose. If every part chose its own neighbours, an option would have to travel
# through five constructors to the one that reads it, and each would have to know its name.
# So it is done in one place: the *composition root*. It turns names ("radix", "step") into
# objects and plugs them together; nothing else may. If you want to know what an option does,
# you start reading here.
#
# The options come first, each with its choices and a word of help. An option offers only
# what exists; a misspelt one is refused with the list of what could have been meant. They
# live in a module of their own that needs no torch, so that the command line below can
# show them at once.

# %% export="options.py"
"""Every choice that the engine offers, by name, documented once."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from minivllm.engine import (
    Engine,
    Limits,
    PublishAtFinish,
    PublishEachStep,
    Publisher,
    Runner,
)
from minivllm.events import Observer, ignore
from minivllm.explain import Decode, explain, no_text
from minivllm.grouping import TIERS, LongestPrefix, SharedPrefix, check_tiers
from minivllm.prefix_cache import INDEXES, PrefixCache
from minivllm.publication import Announcements, PublishPrompt
from minivllm.radix import EVICTION
from minivllm.request import SamplingParams
from minivllm.scheduler import ADMISSIONS, ArrivalOrder, Grouping, Scheduler
from minivllm.single_flight import (
    RELEASES,
    PromptAtLeast,
    SingleFlight,
    WaitForPrefix,
)

PUBLISHERS: dict[str, type[Publisher]] = {
    "schedule": PublishEachStep,  # and announcements
    "step": PublishEachStep,
    "prompt": PublishPrompt,
    "finish": PublishAtFinish,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "index": tuple(INDEXES),
    "publish": tuple(PUBLISHERS),
    "single_flight": ("none", *RELEASES),
    "grouping": ("arrival", "longest-prefix", "shared-prefix"),
    "admission": ADMISSIONS,
    "eviction": tuple(EVICTION),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kernels": ("auto", "torch", "numba"),
}


DEVICES = ("auto", "cpu", "cuda", "mps")
COUNTS = (
    "page_size",
    "num_pages",
    "max_running",
    "max_batch_tokens",
    "wait_for_prefix",
    "explain_tokens",
)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ValueError` for a value that is not among the choices."""
    if value not in (offered := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(offered)}, not {value!r}")


def option(default: Any, words: str) -> Any:
    """A field with a default and a help text."""
    return field(default=default, metadata={"help": words})


# %% export="options.py"
@dataclass(frozen=True)
class EngineOptions:
    """Every choice of the engine. `ValueError` for a value that does not exist."""

    index: str = option("radix", "How a prefix is found.")
    publish: str = option("step", "When a page becomes visible to others.")
    single_flight: str = option(
        "prefill", "How long identical prompts wait for the first of them."
    )
    wait_for_prefix: int | None = option(
        None, "Pages being computed that are worth a wait; none: nobody waits."
    )
    grouping: str = option(
        "arrival", "Whom a step admits first; shared-prefix wants publish=schedule."
    )
    tiers: tuple[int, int] = option(
        TIERS, "The two limits of shared-prefix's tiers, in pages (blocks)."
    )
    admission: str = option("optimistic", "What must fit before a request runs.")
    eviction: str = option("lru", "Which unused page goes first.")
    page_size: int = option(16, "Tokens in a page.")
    num_pages: int | None = option(None, "Pages of K/V memory; none: what fits.")
    max_running: int = option(64, "Requests in a step, at most.")
    max_batch_tokens: int = option(2048, "New tokens in a step, at most.")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps.")
    dtype: str = option("auto", "Number format of weights and K/V.")
    kernels: str = option("auto", "Who computes a layer; numba is for CPUs.")
    seed: int = option(0, "Seed for requests that give none.")
    explain: bool = option(True, "Say why so much of a prompt was reused, no more.")
    explain_tokens: int | None = option(
        None, "Tokens to remember for that; none: twice the K/V memory."
    )

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")
        shows = self.publish != "finish" or self.single_flight == "prefill"
        if self.wait_for_prefix and not shows:
            raise ValueError(
                "wait_for_prefix waits for pages, and publish='finish' shows them too "
                "late: choose another, or single_flight='prefill'"
            )
        check_tiers(self.tiers)
        if type(self.explain) is not bool:
            raise ValueError(f"explain must be True or False, not {self.explain!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed must be a whole number, not {self.seed!r}")
        if str(self.device).split(":")[0] not in DEVICES:
            offered = ", ".join(DEVICES)
            raise ValueError(f"device must be one of {offered}, not {self.device!r}")


# %% [markdown]
# Some of our names differ from vLLM's where the thing is the same. Both are understood,
# but not both at once.

# %% export="options.py"
VLLM_NAMES = {  # what vLLM's users type -> what it is called here
    "block_size": "page_size",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batch_tokens",
}


def read_options(given: Mapping[str, Any]) -> EngineOptions:
    """Options by our names or vLLM's; `ValueError` for unknown or double ones."""
    options = dict(given)
    if (caching := options.pop("enable_prefix_caching", True)) not in (True, False):
        raise ValueError(
            f"enable_prefix_caching must be True or False, not {caching!r}"
        )
    if not caching and options.setdefault("index", "none") != "none":
        raise ValueError("enable_prefix_caching=False and an index: give one")
    for theirs, ours in VLLM_NAMES.items():
        if theirs in options:
            if ours in options:
                raise ValueError(f"{theirs} and {ours} are the same option: give one")
            options[ours] = options.pop(theirs)
    known = {each.name for each in fields(EngineOptions)}
    if unknown := sorted(set(options) - known):
        offered = ", ".join(sorted(known))
        raise ValueError(f"unknown option {unknown[0]!r} (known: {offered})")
    return EngineOptions(**options)


# %% [markdown]
# The command line has an option for each of these, and for the fields of `SamplingParams`. Both
# lists are read off the classes; only the words of help for sampling stand here.

# %% export="options.py"
# Fields of `SamplingParams` that a command line can give, and their help. `seed` is the
# engine's, and `logit_bias`, a table of token ids, is given from Python.
SAMPLING = {
    "max_tokens": "Output tokens at most.",
    "temperature": "0 is greedy; higher is more varied.",
    "top_k": "Draw from the k likeliest tokens; 0: all.",
    "top_p": "Draw from the likeliest tokens with this much probability.",
    "min_p": "Least probability of a token, as a share of the likeliest.",
    "repetition_penalty": "Above 1: tokens that were there before become unlikelier.",
    "presence_penalty": "Taken from the logit of each token that was generated.",
    "frequency_penalty": "The same, for each time it was generated.",
    "n": "Continuations of each prompt.",
    "stop": "End the text before this; repeat for more (a variable has one a line).",
    "stop_token_ids": "End after this token; repeat for more.",
    "ignore_eos": "Go on after the model's own end tokens.",
    "logprobs": "Report this many likely tokens beside each chosen one.",
    "prompt_logprobs": "The same for the tokens of the prompt.",
}
LISTS = {"stop": list[str] | None, "stop_token_ids": list[int] | None}


def documented() -> Iterator[tuple[str, Any, Any, str]]:
    """Name, type, default and help of each option: sampling first, then the engine."""
    hints = get_type_hints(SamplingParams) | LISTS
    for each in fields(SamplingParams):
        if words := SAMPLING.get(each.name):
            yield each.name, hints[each.name], each.default, words
    hints = get_type_hints(EngineOptions)
    for each in fields(EngineOptions):
        words = each.metadata["help"]
        if each.name in CHOICES:
            words += f" One of {', '.join(CHOICES[each.name])}."
        yield each.name, hints[each.name], each.default, words


# %%
for attempt in (
    {"index": "radics"},
    {"pagesize": 16},
    {"block_size": 16, "page_size": 16},
):
    try:
        read_options(attempt)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## From names to objects
#
# This is the composition root, the one function that knows all policies. It takes any runner,
# so a simulated engine is put together by the same lines. Some choices are more than a name in a
# table:
#
# - A [grouping](12_grouping.md) asks the cache what a request would find, so it is made after it.
# - `publish="schedule"` publishes like `step`, and [announces](09_publication.md) besides.
# - `single_flight="prefill"` promises [followers](10_single_flight.md) the leader's prompt. So the
#   prompt is published when it is computed, whatever the publication policy says.
# - `wait_for_prefix`, a wait for *part* of a prompt, is a matter of the queue: a wrapper around its
#   grouping.
# - Without an index there is nothing to announce, and nothing to wait for.
#
# The explainer of [chapter 13](13_explain.md) is hung on last, when all is there that it watches.


# %% export="options.py"
def assemble(
    options: EngineOptions,
    num_pages: int,
    runner: Runner,
    limits: Limits,
    observer: Observer = ignore,
    decode: Decode = no_text,
    **seams: Any,
) -> Engine:
    """The engine that the options describe; `seams` are passed on to `Engine`.

    `decode` makes text of token ids, for explanations.
    """
    cache = PrefixCache(
        num_pages, options.page_size, options.index, options.eviction, observer
    )
    announces = options.publish == "schedule" and options.index != "none"
    scheduler = Scheduler(
        cache,
        options.max_running,
        options.max_batch_tokens,
        options.admission,
        _grouping(options, cache, observer),
        announcer=Announcements(options.page_size) if announces else None,
        observer=observer,
    )
    if options.wait_for_prefix and options.index != "none":
        scheduler.grouping = WaitForPrefix(scheduler, options.wait_for_prefix)
    publisher = PUBLISHERS[options.publish]()
    release = options.single_flight if options.index != "none" else "none"
    engine = Engine(
        runner,
        scheduler,
        limits,
        publisher=PromptAtLeast(publisher) if release == "prefill" else publisher,
        coordinator=None if release == "none" else SingleFlight(release),
        observer=observer,
        **seams,
    )
    if options.explain:
        explain(engine, options.publish, decode, options.explain_tokens)
    return engine


def _grouping(
    options: EngineOptions, cache: PrefixCache, observer: Observer
) -> Grouping:
    if options.grouping == "longest-prefix":
        return LongestPrefix(cache.find)
    if options.grouping == "shared-prefix":
        size, tiers = options.page_size, options.tiers
        return SharedPrefix(cache.find, size, tiers, observer=observer)
    return ArrivalOrder()


# %% [markdown]
# Does it hold? The promise of the [engine](07_engine.md) was that no choice changes an answer. Now
# all of them can be made in a loop. Each engine gets the simulated model of
# [chapter 8](08_simulation.md) and the prologue's load: a prompt of 493 tokens, twice at once and
# once again when both are done.

# %% name="all"
from collections import Counter
from itertools import product

from minivllm.simulation import SerialPrefill, SimulatedRunner, VirtualClock


def two_then_one(options: EngineOptions, clock=None, observer=ignore):
    """What an engine says to three identical prompts, and the tokens it reused."""
    clock = clock or VirtualClock()
    costs = SerialPrefill(chunk_s=0.01, token_s=0.001, decode_s=0.01, k=0.5)
    runner = SimulatedRunner(costs, clock, 1000, 128, 16)
    engine = assemble(options, 128, runner, Limits(1000, 2048), observer, clock=clock)
    done = []
    for together in (2, 1):
        for _ in range(together):
            engine.submit(range(493), SamplingParams(temperature=0, max_tokens=4))
        while engine.has_unfinished():
            done += [output for output in engine.step() if output.finished]
    done.sort(key=lambda output: int(output.request_id))
    answers = [output.outputs[0].token_ids for output in done]
    return answers, tuple(output.num_cached_tokens for output in done)


engines = [
    EngineOptions(**dict(zip(axes, names, strict=True)))
    for names in product(*(CHOICES[axis] for axis in axes))
]
runs = [two_then_one(options) for options in engines]
print(len(engines), "engines,", len({str(answers) for answers, _ in runs}), "answer")
for cached, times in Counter(cached for _, cached in runs).most_common():
    print(f"{times:4} engines reused {cached}")

# %% [markdown]
# [648](#all) engines, [1](#all) answer, and three ways to spend one's time. A third of them, those
# without an index, reuse nothing. [108](#all) are in the state of the prologue: the twin that
# comes at the same moment finds nothing, the one that comes later finds [480](#all) tokens.
# The other [324](#all) compute the prompt once. A policy that changed an answer would have shown
# here as a second line of text; this is the cheapest test of the whole book, and the tests run
# a larger one.

# %% [markdown]
# ## What did it do, and when?
#
# One answer, three ways to spend one's time. To see them one needs times, and the observer of
# [chapter 4](04_pages.md) is told of every transition in order, without a clock. A *timeline* is an
# observer that has one. It turns what it is told into marks: a *span* has a beginning and an end, an
# instant only one moment, an arrow leads from one request to another.

# %% export="timeline.py"
"""What an engine did and when: for Perfetto, and as the rows of a picture."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.drawing import CHAR, Cell
from minivllm.engine import Clock, WallClock
from minivllm.events import Observer, ignore

STEPS, FLIGHTS = "steps", "flights"  # tracks beside those of the requests


@dataclass(slots=True)
class Mark:
    """A span, an instant (it ends when it starts) or an arrow on a track, in seconds.

    A track is `STEPS`, `FLIGHTS`, or a request's id.
    """

    track: str
    name: str
    start_s: float
    end_s: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Row:
    """A live request: the phase it is in, what it computes, how far it has come."""

    phase: Mark  # held, queued or running
    num_prompt: int
    work: Mark | None = None  # its chunk of this step, or all its decodes in a row
    step: int = -1  # the last step in which it had one
    high_water: int = 0


# %% [markdown]
# A request that has come is *held*, by a flight, or *queued*. Admitted, it is *running*, until it
# is preempted and queues again. These phases follow each other without a gap, from arrival to
# end. Inside of *running* lie the chunks. Decodes of consecutive steps make one span: a thousand
# spans of one token would say no more. And since somebody may leave a timeline on, marks go to a
# ring, which forgets the oldest. The file will say how many it forgot.


# %% export="timeline.py"
class Timeline:
    """An observer that keeps the last `capacity` marks of an engine. See `write`.

    The clock must be the engine's own. Of kinds that it does not know it takes no note.
    """

    def __init__(self, clock: Clock | None = None, capacity: int = 100_000) -> None:
        self.clock = clock or WallClock()
        self.marks: deque[Mark] = deque(maxlen=capacity)
        self.num_dropped = 0
        self._rows: dict[str, Row] = {}  # live requests
        self._flights: dict[str, Mark] = {}  # with followers, by leader
        self._step: Mark | None = None
        self._batch: list[Row] = []  # who computes in it
        self._num_steps = 0
        self._num_in = {"running": 0, "queued": 0, "held": 0}
        self._last_s = 0.0
        self._takers: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "release": self._release,
            "admit": self._admit,
            "schedule": self._schedule,
            "step": self._end_step,
            "preempt": self._preempt,
            "finish": self._finish,
            "evict": self._evict,
        }

    def __call__(self, kind: str, /, **details: Any) -> None:
        """Take note of a transition."""
        if taker := self._takers.get(kind):
            self._last_s = now = self.clock.now()
            taker(now, **details)

    def _keep(self, mark: Mark) -> None:
        self.num_dropped += len(self.marks) == self.marks.maxlen
        self.marks.append(mark)

    def _submit(
        self,
        now: float,
        request_id: str,
        held: bool,
        leader: str | None,
        num_prompt: int,
    ) -> None:
        phase = Mark(request_id, "held" if held else "queued", now, now)
        self._rows[request_id] = Row(phase, num_prompt)
        self._num_in[phase.name] += 1
        if leader:
            new = Mark(FLIGHTS, f"led by {leader}", now, now, {"waiting": []})
            flight = self._flights.setdefault(leader, new)
            flight.details["waiting"].append(request_id)

    def _enter(self, now: float, row: Row, phase: str, **details: Any) -> None:
        """End a request's phase and begin the next."""
        self._end_phase(now, row)
        row.phase = Mark(row.phase.track, phase, now, now, details)
        self._num_in[phase] += 1

    def _end_phase(self, now: float, row: Row, **details: str) -> None:
        self._num_in[row.phase.name] -= 1
        row.phase.end_s = now
        row.phase.details |= details
        if row.phase.start_s < now or details:  # else it was none
            self._keep(row.phase)

    def _admit(self, now: float, request_id: str, cached: int) -> None:
        if row := self._rows.get(request_id):
            self._enter(now, row, "running", cached=cached)


# %% [markdown]
# A step begins when it is scheduled and ends with the event that carries the state of all pages.
# What a chunk is can be told from where it lies: below what the request had computed before it is
# recomputation, behind the prompt a decode.


# %% export="timeline.py"
class Timeline(Timeline):
    def _schedule(self, now: float, chunks: list[tuple[str, int, int]]) -> None:
        self._close_step(now)  # one that was cut short
        self._num_steps += 1
        sizes = {"prefill": 0, "recompute": 0, "decode": 0}
        self._step = Mark(STEPS, f"step {self._num_steps}", now, now, sizes)
        for request_id, start, size in chunks:
            if row := self._rows.get(request_id):
                kind = self._compute(now, row, start, size)
                sizes[kind] += size
                self._batch.append(row)

    def _compute(self, now: float, row: Row, start: int, size: int) -> str:
        again = max(0, min(start + size, row.high_water) - start)
        kind = "recompute" if again else "prefill"
        if start >= row.num_prompt and not again:
            kind = "decode"
        row.high_water = max(row.high_water, start + size)
        last, work = row.step, row.work
        row.step = self._num_steps
        if work and work.name == kind == "decode" and last == row.step - 1:
            work.details["tokens"] += size
            return kind
        if work:
            self._keep(work)
        details = {"start": start, "tokens": size, "again": again}
        row.work = Mark(row.phase.track, kind, now, now, details)
        return kind

    def _end_step(self, now: float, **pages: int) -> None:
        if self._step:
            self._step.details |= pages | self._num_in
        self._close_step(now)

    def _close_step(self, now: float) -> None:
        for row in self._batch:
            if row.work:
                row.work.end_s = now
        self._batch.clear()
        if self._step:
            self._step.end_s = now
            self._keep(self._step)
            self._step = None


# %% [markdown]
# The rest are ends. A flight ends when its followers are released. If its leader died, one of them
# leads on, and those who are left wait in a flight of his.


# %% export="timeline.py"
class Timeline(Timeline):
    def _release(self, now: float, request_ids: Sequence[str], leader: str) -> None:
        for request_id in request_ids:
            if row := self._rows.get(request_id):
                self._enter(now, row, "queued")
                if self._step:  # from the step that did something for the follower
                    begin_s, to = self._step.start_s, {"to": request_id}
                    self._keep(Mark(leader, "arrow", begin_s, now, to))
        if flight := self._flights.pop(leader, None):
            stay = [w for w in flight.details["waiting"] if w not in request_ids]
            flight.end_s = now
            self._keep(flight)
            if stay:
                new = Mark(FLIGHTS, f"led by {request_ids[0]}", now, now)
                new.details["waiting"] = stay
                self._flights[request_ids[0]] = new

    def _forget(self, now: float, request_id: str) -> None:
        """A follower ends while it waits; without any its flight is none."""
        for leader, flight in list(self._flights.items()):
            if request_id in flight.details["waiting"]:
                flight.details["waiting"].remove(request_id)
                if not flight.details["waiting"]:
                    del self._flights[leader]

    def _leave(self, now: float, request_id: str) -> Row | None:
        """A request that runs no more: close what it was doing."""
        row = self._rows.get(request_id)
        if row and row.work:
            if self._step and row.step == self._num_steps:
                row.work.end_s = now
            self._keep(row.work)
            row.work = None
        return row

    def _preempt(self, now: float, request_id: str) -> None:
        if row := self._leave(now, request_id):
            self._enter(now, row, "queued")
            self._keep(Mark(request_id, "preempt", now, now))

    def _finish(self, now: float, request_id: str, reason: str) -> None:
        if row := self._leave(now, request_id):
            if row.phase.name == "held":
                self._forget(now, request_id)
            self._end_phase(now, row, ended=reason)
            del self._rows[request_id]

    def _evict(self, now: float, pages: list[int], **_: object) -> None:
        self._keep(Mark(STEPS, "evict", now, now, {"pages": len(pages)}))


# %% [markdown]
# What goes on at this moment is a mark too, up to the last moment that was told. So a timeline can
# be looked at in the middle of a run, or after a run that ended in an exception.


# %% export="timeline.py"
class Timeline(Timeline):
    def all_marks(self) -> list[Mark]:
        """What is over, and what goes on at the last moment that was told."""
        going = [row.phase for row in self._rows.values()]
        going += [row.work for row in self._batch if row.work]
        going += [*self._flights.values(), *([self._step] if self._step else [])]
        known = [replace(mark, end_s=self._last_s) for mark in going]
        rest = [r.work for r in self._rows.values() if r.work and r not in self._batch]
        return sorted([*self.marks, *known, *rest], key=_order)

    def rows(self, length_s: float = 0.0) -> list[tuple[str, list[Cell]]]:
        """The requests for `draw_rows`, in seconds since the first of their marks.

        Words are left out where there is no room for them, in a picture that shows at
        least `length_s`.
        """
        shown = [mark for mark in self.all_marks() if mark.name in SHOWN]
        begin_s = min((mark.start_s for mark in shown), default=0.0)
        end_s = max((mark.end_s for mark in shown), default=0.0)
        unit = 620 / max(length_s, end_s - begin_s, 1e-9)  # pixels per second
        rows: dict[str, list[Cell]] = {}
        for mark in shown:
            length, (state, words) = mark.end_s - mark.start_s, SHOWN[mark.name]
            words = words or str(mark.details["tokens"])
            words = words if CHAR * len(words) < length * unit else ""
            cells = rows.setdefault(mark.track, [])
            cells.append((mark.start_s - begin_s, length, state, words))
        return list(rows.items())


def _order(mark: Mark) -> tuple[float, int, str, float]:
    """By start, then by request (ids count up), and what lies in a span after it."""
    return mark.start_s, len(mark.track), mark.track, -mark.end_s


SHOWN = {  # spans in a picture: their colour; words, or none for a number of tokens
    "held": ("plain", "held"),
    "queued": ("free", "queued"),
    "prefill": ("computed", ""),
    "recompute": ("lost", ""),
    "decode": ("decoded", "decodes"),
}


# %% [markdown]
# ### A file that viewers know
#
# Chrome has a viewer for such marks, and its *Trace Event Format* has outlived it: one JSON object
# for each event, times in microseconds. [Perfetto](https://ui.perfetto.dev) and `chrome://tracing`
# open it. A span is an event `X` with a duration, and spans of one row must
# lie inside each other or apart. Flights may overlap, so they are pairs `b` and `e` with a number
# of their own. An arrow is a pair `s` and `f`; each end belongs to the span that encloses it. A
# counter is `C`.


# %% export="timeline.py"
Event = dict[str, Any]
PAGES = ("pages_free", "pages_private", "pages_pinned", "pages_evictable")
COUNTERS = {  # in the file's counter tracks, from the details of a step
    "pages": PAGES,
    "requests": ("running", "queued", "held"),
}
ENGINE, REQUESTS = 1, 2  # the two groups of rows, "processes" in the format


class Timeline(Timeline):
    def events(self) -> Iterator[Event]:
        """The marks in the Trace Event Format, in order of time."""
        tids = {STEPS: (ENGINE, 1), FLIGHTS: (ENGINE, 2)}
        made: list[Event] = []
        for number, mark in enumerate(self.all_marks()):
            for track in (mark.track, mark.details.get("to", STEPS)):
                tids.setdefault(track, (REQUESTS, len(tids)))
            made += _events_of(mark, number, tids)
        yield from _names_of(tids)
        if self.num_dropped and made:
            lost = f"{self.num_dropped} earlier marks were dropped"
            first_us = min(event["ts"] for event in made)
            yield {
                "ph": "i",
                "s": "g",
                "name": lost,
                "ts": first_us,
                "pid": 1,
                "tid": 1,
            }
        yield from sorted(made, key=lambda e: (e["ts"], -e.get("dur", 0)))


def _names_of(tids: dict[str, tuple[int, int]]) -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for track, (pid, tid) in tids.items():
        name = track if pid == ENGINE else f"request {track}"
        place = {"ph": "M", "pid": pid, "tid": tid}
        yield place | {"name": "thread_name", "args": {"name": name}}
        yield place | {"name": "thread_sort_index", "args": {"sort_index": tid}}


def _events_of(
    mark: Mark, number: int, tids: dict[str, tuple[int, int]]
) -> list[Event]:
    start_us, end_us = (round(s * 1e6, 3) for s in (mark.start_s, mark.end_s))
    pid, tid = tids[mark.track]
    here = {"name": mark.name, "pid": pid, "tid": tid, "ts": start_us}
    if mark.name in ("preempt", "evict"):
        return [here | {"ph": "i", "s": "t", "args": mark.details}]
    if mark.name == "arrow":
        there = dict(zip(("pid", "tid"), tids[mark.details["to"]], strict=True))
        pair = here | {"cat": "flight", "id": number, "name": "released"}
        return [pair | {"ph": "s"}, pair | there | {"ph": "f", "bp": "e", "ts": end_us}]
    if mark.track == FLIGHTS:
        pair = here | {"cat": "flight", "id": number, "args": mark.details}
        return [pair | {"ph": "b"}, pair | {"ph": "e", "ts": end_us}]
    span = here | {"ph": "X", "dur": round(end_us - start_us, 3), "args": mark.details}
    return [span, *(_counts_of(mark, start_us, end_us) if mark.track == STEPS else ())]


def _counts_of(step: Mark, start_us: float, end_us: float) -> Iterator[Event]:
    """What a step computes, while it does; what there is when it has ended."""
    sizes = {name: step.details[name] for name in ("prefill", "recompute", "decode")}
    here = {"ph": "C", "pid": ENGINE, "tid": 1}
    yield here | {"name": "batch tokens", "ts": start_us, "args": sizes}
    yield here | {"name": "batch tokens", "ts": end_us, "args": dict.fromkeys(sizes, 0)}
    for name, parts in COUNTERS.items():
        if parts[0] in step.details:
            args = {part.removeprefix("pages_"): step.details[part] for part in parts}
            yield here | {"name": name, "ts": end_us, "args": args}


# %% [markdown]
# The file is written when everything is over, however it ended: by Ctrl-C and by an exception too,
# since those are the runs that one wants to look at. It is written beside its place and then moved
# there, so that what has the name is whole. A place where nothing can be written is refused at the
# start and not after an hour.


# %% export="timeline.py"
class Timeline(Timeline):
    def write(self, path: Path) -> None:
        """Replace a file by this timeline, as a whole or not at all.

        A link or a device, as /dev/stdout, is not replaced: it is written to.
        """
        told = {"program": "minivllm", "dropped": self.num_dropped}
        told["clock"] = "microseconds of the engine's clock"
        whole = {"displayTimeUnit": "ms", "otherData": told}
        part = path.with_name(f".{path.name}.part")
        try:
            text = json.dumps(whole | {"traceEvents": list(self.events())})
            in_place = path.is_symlink() or (path.exists() and not path.is_file())
            (path if in_place else part).write_text(text + "\n", encoding="utf-8")
            if not in_place:
                os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def check_place(path: Path | None, option: str) -> None:
    """Raise `ValueError` if the file that an option names cannot be written."""
    if path is None:
        return
    there = path.exists() and not path.is_dir()
    place = path if there else path.parent
    if path.is_dir() or not (there or place.is_dir()) or not os.access(place, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written there")


@contextmanager
def tracing(path: Path | None, clock: Clock | None = None) -> Iterator[Observer]:
    """An observer for a block, and its file when the block ends. No path: `ignore`."""
    if path is None:
        yield ignore
        return
    check_place(path, "trace")
    timeline = Timeline(clock)
    try:
        yield timeline
    finally:
        timeline.write(path)


# %% [markdown]
# The load from above, on the engine as it is by default, through a timeline:

# %% name="timeline"
import json as json_reader
from tempfile import TemporaryDirectory


def watched(**choices) -> Timeline:
    """The three requests once more, with a timeline on the engine's clock."""
    clock = VirtualClock()
    timeline = Timeline(clock)
    two_then_one(EngineOptions(**choices), clock, timeline)
    return timeline


timeline = watched()
with TemporaryDirectory() as folder:
    path = Path(folder) / "trace.json"
    timeline.write(path)
    events = json_reader.loads(path.read_text("utf-8"))["traceEvents"]
print(sorted(Counter(event["ph"] for event in events).items()))
for event in events:
    if event["ph"] in "sf" or event["name"] in ("held", "prefill"):
        where = f"row {event['tid'] - 2}"
        print(f"{event['ph']} {event['ts']:>9,.0f} µs {where} {event['name']}")

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows

draw_rows(
    [
        (f"{name}, {who}", cells)
        for name, choices in (
            ("default", {}),
            ("nobody waits", {"single_flight": "none"}),
        )
        for who, cells in watched(**choices).rows(1.2)
    ],
    unit=500,
    caption="The prologue's load, drawn from the events: two requests at once, and the third when "
    "they are done. By default request 1 is held for as long as request 0 computes its prompt, and "
    "computes 13 tokens then. If nobody waits, both prompts are computed in one step, 986 tokens.",
)

# %% [markdown]
# Request 1 is held until [503,000](#timeline) µs, when an arrow from request 0 reaches it. What the
# picture shows in rows, the file shows in Perfetto, with the pages in each state below. From here on
# `LLM("smollm2", trace="out.json")` writes it, and `minivllm generate --trace out.json`. Without the
# option the observer is `ignore`, and the engine does not even put together what it would say.

# %% [markdown]
# ## A conversation is a text
#
# A chat model has learned to continue one kind of text: turns, each between marks of its own.
# Which marks, and whether a word of welcome comes first, is written in the checkpoint, as a
# small program in the template language Jinja. vLLM and transformers run that program; so do
# we, with transformers' sandbox, for a template comes from strangers. It lies in one of four
# places.

# %% export="chat.py"
"""From a conversation to the text that the model was trained to continue."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.loader import Checkpoint, GGUFFile, LoadError, reading
from minivllm.tokenizer import read_settings, special_tokens

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's Jinja program, and the special tokens that it may write."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)  # by name, as bos_token

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text, by default up to where the answer begins.

        Raises `ValueError` for bad messages and for what the template refuses.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = [read_message(i, each) for i, each in enumerate(messages)]
        try:
            texts, _ = render_jinja_template(
                [conversation],
                tools=tools and [*tools],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise ValueError(f"the model's chat template failed: {error}") from None
        return str(texts[0])


# %% [markdown]
# A message has a role and a content. The content may come in parts, as the OpenAI API has
# them; we take those that are text, and refuse a picture by name.


# %% export="chat.py"
def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or several -> a list. Raises `ValueError` for anything else."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            "a conversation is a list of messages such as "
            "{'role': 'user', 'content': 'Hello'}"
        )
    if isinstance(messages[0], Sequence) and not isinstance(messages[0], str):
        return [one for each in messages for one in as_conversations(each)]
    return [messages]


def read_message(index: int, message: Any) -> dict[str, Any]:
    """A message whose content is one text; `ValueError` names what is wrong."""
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise ValueError(f"message {index} must have a role and a content, not {kind}")
    if (role := message.get("role")) not in ROLES:
        offered = ", ".join(ROLES)
        raise ValueError(f"message {index}: role must be {offered}, not {role!r}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _text_of(index, content)}


def _text_of(index: int, content: Any) -> str:
    texts: list[str] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"message {index}: content must be text, not {part!r}")
        texts.append(text)
    return "\n".join(texts)


# %% [markdown]
# The four places: a file of its own, an older kind of such a file, the tokenizer's settings (there
# it may be a list, with one named "default"), and the metadata of a GGUF file.


# %% export="chat.py"
def load_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The chat template of a folder or GGUF file; None where there is none."""
    if isinstance(checkpoint, GGUFFile):
        source = checkpoint.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise LoadError(f"{checkpoint.path}: tokenizer.chat_template is no text")
    else:
        with reading(f"{checkpoint}: its chat template"):
            source = _folder_template(checkpoint)
    return ChatTemplate(source, special_tokens(checkpoint)) if source else None


def _folder_template(folder: Path) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text("utf-8")
    places = ("chat_template.json", "tokenizer_config.json")
    programs = (read_settings(folder, name).get("chat_template") for name in places)
    found = next(filter(None, programs), None)
    if isinstance(found, list):
        return next((t["template"] for t in found if t["name"] == "default"), None)
    return found


# %% [markdown]
# The default model has such a program. Here is what it makes of one question:

# %% name="template"
from minivllm.loader import open_checkpoint

template = load_template(open_checkpoint("smollm2"))
print(template.render([{"role": "user", "content": "Who are you?"}]))

# %% [markdown]
# Two things are worth a look. The first turn was not ours: this model was trained to be told who
# it is, and the template does it. And the text ends where an answer would begin. Without that
# last line (`add_generation_prompt=False`) the model would be asked to continue a conversation,
# and might well write the user's next question.
#
# A template that forgets the system message, or writes it a second time when the history grows,
# also costs pages: the text of turn two must *begin* with the text of turn one, or nothing of it
# can be reused. A template that puts today's date at the top reuses nothing after midnight.

# %% [markdown]
# ## Where, how exact, how much
#
# Everything so far was the same on every machine. Four values are not.
#
# - The device: CUDA if there is one, else Apple's MPS, else the CPU.
# - The number format: 16 bit where the hardware likes it; on a CPU float32, because many CPUs are
#   slower in 16 bit than in 32.
# - The number of pages: a share of the memory that is free, since K/V memory is taken whole, before
#   the first request. A pool that grew with the load would fail in the middle of somebody's answer;
#   one that is taken at the start fails there, with a line that names `num_pages`.
# - The kernels: on a CPU those of [chapter 19](19_kernels.md), if Numba is installed.
#
# Each has a name to be said instead, and what cannot be done is refused: a device that is not
# there must not become a CPU in silence. An engine that is many times slower than yesterday
# is a worse message than one line.


# %% export="llm.py"
"""The composition root: from names to a running engine, behind vLLM's three lines."""

import gc
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from html import escape
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any, Self, cast

import torch
from tokenizers import Tokenizer

from minivllm.engine import Engine, Limits
from minivllm.events import Observer, both, ignore
from minivllm.loader import DEFAULT_MODEL, load_model, open_checkpoint
from minivllm.model import Decoder, ModelConfig
from minivllm.prefix_cache import PrefixCache
from minivllm.progress import progress_bar
from minivllm.request import RequestOutput, SamplingParams, TokenIds, encode_ids
from minivllm.runner import Backend, ModelRunner
from minivllm.sampling import Sampler
from minivllm.scheduler import Scheduler
from minivllm.tokenizer import TextWriter, load_tokenizer, tokenizer_ends


def choose_device(name: str) -> torch.device:
    """The device of that name, or the best there is for "auto". Raises `ValueError`."""
    if name == "auto":
        mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU, else bfloat16, unless a name asks for something."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels of that name, or for "auto" the fastest that can be used here."""
    if name == "torch":
        return Backend()
    module = f"minivllm.kernels_{'numba' if name == 'auto' else name}"
    try:
        return cast(Backend, import_module(module).backend(device, dtype))
    except (ImportError, ValueError) as error:
        if name == "auto":
            return Backend()
        raise ValueError(f"kernels={name!r} cannot be used here: {error}") from None


def choose_num_pages(
    config: ModelConfig, page_size: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Pages in 4/5 of a GPU's free memory, or 1/4 of main memory up to 1 GiB."""
    if device.type == "cuda":
        budget = int(0.8 * torch.cuda.mem_get_info(device)[0])
    else:
        budget = min(2**30, _main_memory_bytes() // 4)
    return max(1, budget // (page_size * config.kv_bytes_per_token(dtype.itemsize)))


def _main_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 4 * 2**30


# %% [markdown]
# ## Putting it together
#
# Every line of the constructor names a chapter: weights and words (6), pages and the
# index (3, 4), the runner (5), the scheduler and the engine (7).

# %% export="llm.py"
Prompt = str | TokenIds


class LLM:
    """A model and an engine around it, for use from Python.

    `model` is `smollm2`, a folder, a .gguf file or a hub id; options are those of
    `EngineOptions`, and vLLM's names for them. The observer is told of every transition
    (see `EventLog`). `trace` names a file for a `Timeline`, written when the LLM is
    closed, or when Python ends. `progress` False draws no bars. `ValueError` names a
    fault.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        observer: Observer = ignore,
        trace: str | Path | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        self.options = chosen = read_options(options)
        if trace is not None:
            check_place(Path(trace), "trace")
        self.model, self.progress = model, progress
        checkpoint = open_checkpoint(model)
        device = choose_device(chosen.device)
        dtype = choose_dtype(chosen.dtype, device)
        backend = choose_backend(chosen.kernels, device, dtype)
        decoder = load_model(checkpoint, device, dtype, progress, backend.empty)
        self.config = config = decoder.config
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint)
        self.template = load_template(checkpoint)
        ends = config.eos_token_ids | tokenizer_ends(checkpoint, self.tokenizer)
        num_pages = chosen.num_pages or choose_num_pages(
            config, chosen.page_size, device, dtype
        )
        runner = self._runner(decoder, num_pages, backend)
        limits = Limits(config.vocab_size, config.max_context, ends)
        observer = both(observer, self._start_trace(trace))
        parts = (chosen, num_pages, runner, limits, observer, self._decode)
        writers = self.tokenizer and partial(TextWriter, self.tokenizer)
        self._engine: Engine | None = assemble(*parts, writers=writers)

    def _start_trace(self, trace: str | Path | None) -> Observer:
        self._end_trace: Callable[[], object] = lambda: None
        if trace is None:
            return ignore
        timeline = Timeline()
        self._end_trace = weakref.finalize(self, timeline.write, Path(trace))
        return timeline

    def _runner(
        self, decoder: Decoder, num_pages: int, backend: Backend
    ) -> ModelRunner:
        size, sampler = self.options.page_size, Sampler(self.options.seed)
        try:
            return ModelRunner(decoder, num_pages, size, sampler, backend)
        except (
            RuntimeError,
            MemoryError,
            OverflowError,
            ValueError,
            TypeError,
        ) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{num_pages} pages of {size} tokens do not fit in memory, "
                f"lower num_pages or page_size: {reason}"
            ) from None

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode([*token_ids], skip_special_tokens=False))


# %% [markdown]
# A trace is written by a *finalizer*: Python calls it once, when the `LLM` is closed, or forgotten,
# or when the program ends, by an exception for example.
#
# Two questions that one asks of a running engine go straight through. And a model is large: when
# the `with` block of an `LLM` ends, its weights and its pages are given back at once, not when
# Python finds the time. What is used afterwards says so.


# %% export="llm.py"
class LLM(LLM):
    @property
    def engine(self) -> Engine:
        """The engine at work. Raises `ValueError` once the LLM is closed."""
        if self._engine is None:
            raise ValueError("this LLM is closed and its memory freed: make a new one")
        return self._engine

    def close(self) -> None:
        """End whatever runs, free the weights and the K/V memory, write the trace."""
        self._end_all()
        self._engine = None
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no CUDA
        self._end_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, int]:
        """Pages by state, queue lengths and counters."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all published pages. False, and no change, while a request runs."""
        return self.engine.reset_prefix_cache()


# %% [markdown]
# ## Generate
#
# `generate` takes a text, a list of token ids, or a list of these, and answers in the
# order of the prompts, whatever order they finish in. It looks at every prompt before it
# submits the first: half a batch submitted and an exception on the way would leave
# requests running that nobody waits for.


# %% export="llm.py"
Params = SamplingParams | Sequence[SamplingParams] | None
Requests = Sequence[tuple[TokenIds, SamplingParams]]
Stream = Generator[RequestOutput, None, None]


class LLM(LLM):
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> "Outputs":
        """Continue every prompt; outputs come in the order of the prompts.

        One `SamplingParams` for all, or one for each. Raises `ValueError` before
        anything is submitted if any prompt cannot run. `use_tqdm` (vLLM's name): a
        progress bar, on a terminal only, for what takes more than a second.
        """
        batch = as_prompts(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        ids = [self._encode(prompt) for prompt in batch]
        return self._answer(texts, ids, sampling_params, use_tqdm)


# %% [markdown]
# `chat` differs in one step: the template writes the text. It also writes the token that begins
# a text, where the model wants one; the tokenizer must not add another.


# %% export="llm.py"
class LLM(LLM):
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> "Outputs":
        """Answer a conversation, or each of several; else as `generate`."""
        chats = as_conversations(messages)
        texts = [self.chat_text(chat, add_generation_prompt) for chat in chats]
        ids = [self._encode(text, special=False) for text in texts]
        return self._answer(texts, ids, sampling_params, use_tqdm)

    def chat_text(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """What the model's chat template makes of a conversation."""
        if self.template is None:
            raise ValueError(f"{self.model} has no chat template: use generate")
        return self.template.render(messages, add_generation_prompt)


# %% [markdown]
# And `stream` gives what is there after every token. A stream that is closed early, or left by
# an exception, takes its request with it: a request that nobody listens to would hold its pages
# until it had said everything. Two moments are kept apart. The prompt is checked when `stream` is
# called, so that a mistake appears at that line and not in a loop further down. It is submitted
# when the first output is asked for, so that a stream which nobody reads costs nothing.


# %% export="llm.py"
class LLM(LLM):
    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Stream:
        """The output so far, after each step that adds to it; the last is finished.

        The prompt may be a conversation. Closing the iterator aborts the request.
        """
        text = prompt if isinstance(prompt, str) else None
        if text is None and isinstance(next(iter(_plain(prompt)), None), Mapping):
            text = self.chat_text(cast(Sequence[Message], prompt))
            ids = self._encode(text, special=False)
        else:
            ids = self._encode(cast(Prompt, prompt))
        [checked] = _params_for(1, params)
        wanted = [(ids, checked)]
        self._check(wanted)  # now, and not when the first output is asked for
        return (replace(output, prompt=text) for output in self._steps(wanted, []))


# %% [markdown]
# All three share the rest: one `SamplingParams` for all or one each, text to ids, the checks,
# and the loop, which leaves nothing running when somebody presses Ctrl-C. The loop is a
# generator. Whoever closes it, by reading it to the end, by `close`, or by an exception on the
# way, comes through the same `finally`. That is also why `generate` wraps it in `closing`: an
# exception keeps the frames that it passed alive in its traceback, and a generator that only
# waits to be collected would wait as long as somebody looks at that traceback.


# %% export="llm.py"
class LLM(LLM):
    def _answer(
        self,
        texts: Sequence[str | None],
        ids: Sequence[TokenIds],
        given: Params,
        use_tqdm: bool,
    ) -> "Outputs":
        requests = list(zip(ids, _params_for(len(ids), given), strict=True))
        self._check(requests)
        names: list[str] = []
        finished: dict[str, RequestOutput] = {}
        bar = progress_bar("requests", len(ids), use_tqdm and self.progress)
        with bar as advance, closing(self._steps(requests, names)) as steps:
            for output in steps:
                if output.finished:
                    finished[output.request_id] = output
                    advance(1)
        pairs = zip(texts, names, strict=True)
        return Outputs(replace(finished[name], prompt=text) for text, name in pairs)

    def _encode(self, prompt: Prompt, special: bool = True) -> TokenIds:
        if not isinstance(prompt, str):
            return encode_ids(prompt)
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids, not text")
        try:
            ids: list[int] = self.tokenizer.encode(
                prompt, add_special_tokens=special
            ).ids
        except TypeError:  # text that is not Unicode, such as a broken argument
            raise ValueError(f"the prompt is not valid text: {prompt!r}") from None
        return ids

    def _check(self, requests: Requests) -> None:
        if self.engine.has_unfinished():
            raise ValueError(
                "the engine has unfinished requests (submitted to it, a stream, or "
                "another thread's generate): finish, close or abort them first"
            )
        for token_ids, params in requests:
            self.engine.check(token_ids, params)

    def _steps(self, requests: Requests, names: list[str]) -> Stream:
        """Submit, and step until all are done; if it is closed, nothing goes on."""
        try:
            for token_ids, params in requests:
                names.append(self.engine.submit(token_ids, params))
            while self.engine.has_unfinished():
                yield from self.engine.step()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        if (engine := self._engine) is not None:
            for name in engine.unfinished():
                engine.abort(name)


def _params_for(num_prompts: int, given: Params) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * num_prompts
    alone = isinstance(given, str) or not isinstance(given, Sequence)
    several: list[Any] = [given] if alone else list(given)
    for each in several:
        if not isinstance(each, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {each!r}")
    if len(several) != num_prompts:
        raise ValueError(f"{len(several)} SamplingParams for {num_prompts} prompts")
    return several


# %% [markdown]
# What is a prompt? A list of ints is one; a list of anything else is several. Arrays and tensors
# count as lists, because that is what people have in their hands; bytes do not, because
# `b"Hello"` would be taken for five token ids and answered.


# %% export="llm.py"
def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several -> a list. Raises `ValueError` for anything else."""
    prompts = _plain(prompts)
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]
    batch = [_plain(prompt) for prompt in prompts]
    for prompt in batch:
        if not isinstance(prompt, str) and not all(
            isinstance(i, Integral) for i in prompt
        ):
            raise ValueError("a prompt is text or a list of integers, the token ids")
    return batch


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists; `ValueError` for what is neither text nor a list."""
    if hasattr(value, "tolist") and not isinstance(value, Integral):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        kind = type(value).__name__
        raise ValueError(f"a prompt is text or a list of token ids, not {kind}")
    return value


# %% [markdown]
# A notebook shows the value of a cell's last line. A list of outputs would be a wall of token ids.
# Ours is a table there, and an `LLM` says what it is and what it has done. No times: a notebook
# that runs again should look the same.


# %% export="llm.py"
class Outputs(list[RequestOutput]):
    """The outputs of one call; a notebook shows them as a table."""

    def _rows(self) -> list[tuple[object, ...]]:
        head = ("prompt", "answer", "cached", "computed", "why", "new", "ended by")
        return [head, *(row for output in self for row in _rows_of(output))]

    def _repr_html_(self) -> str:
        return _table(self._rows(), "col")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(_lines(self._rows()))  # IPython, where there is no HTML


def _rows_of(output: RequestOutput) -> Iterator[tuple[object, ...]]:
    size, cached = len(output.prompt_token_ids), output.num_cached_tokens
    prompt = output.prompt or f"{size} token ids"
    shown = prompt if len(prompt) <= 80 else f"{prompt[:38]} … {prompt[-38:]}"
    for each in output.outputs:
        why, new = output.reuse and output.reuse.why, len(each.token_ids)
        yield shown, each.text, cached, size - cached, why, new, each.finish_reason


def _table(rows: Sequence[Sequence[object]], headed: str) -> str:
    """HTML whose first "col" or "row" names what the others show."""
    lines = ["<table>"]
    for i, row in enumerate(rows):
        heads = len(row) if headed == "col" and i == 0 else int(headed == "row")
        cells = [escape(str(x)) for x in row]
        names = (f'<th scope="{headed}">{x}</th>' for x in cells[:heads])
        lines += ["<tr>", *names, *(f"<td>{x}</td>" for x in cells[heads:]), "</tr>"]
    return "".join([*lines, "</table>"])


def _lines(rows: Iterable[Iterable[object]]) -> str:
    shown = ([" ".join(str(x).split())[:80] for x in row] for row in rows)
    return "\n".join(map(" | ".join, shown))


class LLM(LLM):
    def __repr__(self) -> str:
        return _lines(self._rows())

    def _repr_html_(self) -> str:
        return _table(self._rows(), "row")

    def _rows(self) -> list[tuple[object, ...]]:
        if self._engine is None:
            return [(self.model, "closed")]
        plain, told = EngineOptions(), self.stats()
        names = (each.name for each in fields(EngineOptions))
        chosen = [(n, getattr(self.options, n)) for n in names]
        unusual = [pair for pair in chosen if pair[1] != getattr(plain, pair[0])]
        counts = [(n.replace("_", " "), f"{told[n]:,}") for n in SUMMARY]
        return [("model", self.model), *unusual, *counts]


SUMMARY = (
    "lookups",
    "queried_tokens",
    "cached_tokens",
    "prefill_tokens",
    "pages_total",
)


# %% [markdown]
# Here is vLLM's quickstart, in its own names. Two values are ours: the model, and a temperature of 0,
# so that you see the words that stand here.

# %% name="quickstart"
prompts = [
    "Hello, my name is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0, top_p=0.95, max_tokens=8)

llm = LLM(model="smollm2")
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")

# %% [markdown]
# And what a notebook makes of the list, where the loop is not wanted:

# %%
outputs

# %% [markdown]
# Nothing was reused, and the table says why: five tokens fill no page of 16. Now what this engine is
# for: a longer prompt, twice, one after the other.

# %%
question = (
    "Here is what the museum's guide says about its opening hours. " * 5 + "It opens"
)
for _ in range(2):
    output = llm.generate(question, SamplingParams(temperature=0, max_tokens=4))[0]
    print(output.num_cached_tokens, "of", len(output.prompt_token_ids), "tokens cached")
print(
    {
        name: n
        for name, n in llm.stats().items()
        if name in ("lookups", "hits", "cached_tokens")
    }
)

# %% [markdown]
# And why not more? Each output carries the report of [chapter 13](13_explain.md), with the text of
# the tokens where two prompts part. Print it, or read its fields. `explain=False` turns it off.

# %% name="why"
from textwrap import fill

changed = question.replace("guide says", "new guide says", 1)
print(output.reuse)
[output] = llm.generate(changed, SamplingParams(temperature=0, max_tokens=4))
print(fill(str(output.reuse), 88))

# %% [markdown]
# This is what the line `LLM(model="smollm2")` has put together:

# %% tags=["hide-input"]
from minivllm.drawing import Branch, draw_tree

parts = Branch(
    "LLM: names to objects (14)",
    "plain",
    [
        Branch("Tokenizer, writer (6)", "plain"),
        Branch(
            "Engine: schedule, run, commit, publish (7)",
            "plain",
            [
                Branch(
                    "Scheduler (7)",
                    "plain",
                    [
                        Branch("PrefixCache (4): pool, index (3)", "plain"),
                        Branch("Announcements (9)", "plain"),
                    ],
                ),
                Branch(
                    "ModelRunner (5)",
                    "computed",
                    [Branch("Decoder (5), K/V memory", "computed")],
                ),
                Branch("Publisher (9)", "plain"),
                Branch("SingleFlight (10)", "plain"),
            ],
        ),
    ],
)
draw_tree(
    parts,
    caption="What the composition root puts together, with the chapters that built it. In colour: "
    "where torch begins; the rest knows token ids and pages only.",
)

# %% [markdown]
# ## A command line
#
# The same engine without Python. Every command that runs a model takes the same options, and
# they are read off the two classes, so that nothing can drift apart. Nothing here imports torch
# before it must: `--help` should not wait for it. And a mistake is answered by one line that
# names it, and exit code 2. A traceback tells the story of our code; the reader of the message
# is interested in theirs.

# %% export="cli.py"
"""The command line: what all commands share, and `minivllm generate`."""

import json
import sys
import tomllib
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, fields
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from minivllm.request import SamplingParams

SCHEMA_VERSION = 1  # of every JSON output

app = typer.Typer(
    name="minivllm",
    help="An LLM inference engine that reuses work.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, no bars.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write what happened, and when, to this file (for Perfetto)."),
]

if TYPE_CHECKING:  # not otherwise: a command that asks for help needs no torch
    from minivllm.llm import LLM


# %% [markdown]
# A service is not started by hand: its settings come from the environment, or from a file that
# lies beside it. So `--page-size 32` can also be said as `MINIVLLM_PAGE_SIZE=32`, or as
# `page_size = 32` in a TOML file. The nearest to the hand wins: the command line, then the
# environment, then the file, then the default. A misspelt key in a file is refused; it would
# otherwise be a setting that somebody believes in.


# %% export="cli.py"
def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Let a TOML file give the defaults. `ValueError` names the file and the key."""
    takers: dict[Any, Any] = {p.name: p for p in context.command.params}
    if "stop" in takers:  # a stop string may hold spaces
        takers["stop"].split_envvar_value = lambda text: text.strip("\n").split("\n")
    if path is None or context.resilient_parsing:
        return path
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    known = {"model", *(name for name, *_ in documented())}
    values = {key.replace("-", "_"): value for key, value in given.items()}
    if len(values) < len(given):
        raise ValueError(f"{path}: one key twice, with - and with _")
    if unknown := [key for key in given if key.replace("-", "_") not in known]:
        offered = ", ".join(sorted(known))
        raise ValueError(f"{path}: unknown key {unknown[0]!r} (known: {offered})")
    context.default_map = {}
    for name in takers.keys() & values.keys():
        value = values[name]  # as text, so that it is read as on the command line
        if takers[name].multiple and not isinstance(value, list):
            value = [value]
        plain = [str(v) for v in value] if isinstance(value, list) else str(value)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, list | dict):
                raise ValueError(f"{path}: {name} cannot be {each!r}")
        try:
            takers[name].process_value(context, plain)
        except typer.TyperException as error:
            raise ValueError(f"{path}: {name}: {error.message}") from None
        context.default_map[name] = plain
    return path


# %% [markdown]
# A command declares what is its own, and `**options`. This decorator puts the rest into its
# signature, where typer finds it: the model, the file, and one option for each field, with its
# variable, and its choices for the shell to complete.


# %% export="cli.py"
CONFIG = typer.Option(
    help="A TOML file of options. They may also be set as MINIVLLM_PAGE_SIZE=32.",
    callback=read_config,
    envvar="MINIVLLM_CONFIG",
    show_envvar=False,
    is_eager=True,
    expose_value=False,
)
MODEL = "smollm2, a folder, a .gguf file or a hub id."
Command = Callable[..., None]


def with_options(
    leave_out: Container[str] = (), **defaults: Any
) -> Callable[[Command], Command]:
    """Let a command's `**options` take model, sampling and engine, and `--config`.

    `defaults` are those of this command where they are not the usual ones.
    """

    def decorate(command: Command) -> Command:
        signed = signature(command)
        own = [p for p in signed.parameters.values() if p.kind != p.VAR_KEYWORD]
        own.append(_parameter("config", Path | None, None, CONFIG))
        rows = [("model", str, "smollm2", MODEL), *documented()]
        for name, kind, usual, words in rows:
            if name not in leave_out:
                default = defaults.get(name, usual)
                own.append(_parameter(name, kind, default, _option(name, words)))
        public = signed.replace(parameters=own)
        command.__signature__ = public  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in own}
        return command

    return decorate


def _option(name: str, words: str) -> Any:
    offered = CHOICES.get(name, ())
    return typer.Option(
        help=words,
        envvar=f"MINIVLLM_{name.upper()}",
        show_envvar=False,
        autocompletion=lambda incomplete: [
            c for c in offered if c.startswith(incomplete)
        ],
    )


def _parameter(name: str, kind: Any, default: Any, option: Any) -> Parameter:
    annotation = Annotated[kind, option]
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


# %% [markdown]
# A decorator that rewrites a signature is a trick, and a trick must be paid for by what it saves. It
# saves thirty parameters in each command, written by hand, with thirty defaults that would be
# right on the day they were copied.
#
# What arrives is taken apart again: what a request wants, and what the engine is. Bad values
# are told before a model is loaded, since that takes longest.


# %% export="cli.py"
def sampling_of(options: dict[str, Any]) -> SamplingParams:
    """The part of a command's options that says how to sample."""
    return SamplingParams(**{n: options[n] for n in SAMPLING if n in options})


def open_llm(
    options: dict[str, Any], as_json: bool, trace: Path | None = None
) -> "LLM":
    """The model and the engine that a command's options describe."""
    chosen = {each.name: options[each.name] for each in fields(EngineOptions)}
    EngineOptions(**chosen)
    from minivllm.llm import LLM  # torch begins here

    return LLM(options["model"], trace=trace, progress=not as_json, **chosen)


@app.callback()
def root() -> None:
    """An LLM inference engine that reuses work."""


@app.command()
@with_options()
def generate(
    prompt: Annotated[
        list[str], typer.Option(help="Text to continue; repeat for more.")
    ],
    as_json: AsJson = False,
    trace: Trace = None,
    **options: Any,
) -> None:
    """Continue one or more prompts."""
    params = sampling_of(options)
    with open_llm(options, as_json, trace) as llm:
        outputs = llm.generate(prompt, params)
        for output in outputs:
            metrics = {"ttft_s": output.metrics.ttft_s, "e2e_s": output.metrics.e2e_s}
            told = {"metrics": metrics, "why": output.reuse and str(output.reuse)}
            show(asdict(output) | told, as_json)
    if any(c.finish_reason == "error" for output in outputs for c in output.outputs):
        raise typer.Exit(1)


# %% [markdown]
# It is typer that reads the command line, and typer knows each option's name, type and choices. So
# `minivllm --install-completion` teaches the shell to complete them, down to `--index radix`.
#
# The result, for a machine or for a person. The person's version keeps the numbers apart from
# the text, on the error stream, so that the text can be piped on.


# %% export="cli.py"
def show(output: dict[str, Any], as_json: bool) -> None:
    """Print one result: for a machine on one line, or for a person."""
    if as_json:
        print(json.dumps({"schema_version": SCHEMA_VERSION} | output))
        return
    size, cached = len(output["prompt_token_ids"]), output["num_cached_tokens"]
    for completion in output["outputs"]:
        print(f"{output['prompt']}{completion['text']}")
    told = output["why"] or f"{size} prompt tokens, {cached} of them cached"
    print(f"  ({told})", file=sys.stderr)


# %% [markdown]
# ## What is installed here
#
# The first question of every bug report. `minivllm env` reads the package's own list of
# requirements, compares it with what is installed, and says which device `auto` would take.

# %% export="cli.py"
import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


@app.command()
def env(as_json: AsJson = False) -> None:
    """What is installed, which device would be used, what is missing."""
    packages, missing = installed()
    device, faults = place()
    report = {
        "minivllm": import_module("minivllm").__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **device,
        "packages": packages,
        "settings": {n: v for n, v in os.environ.items() if n.startswith("MINIVLLM_")},
        "missing": [*missing, *faults, *unknown_settings()],
    }
    if as_json:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION} | report))
        return
    for name, value in report.items():
        pairs = value.items() if isinstance(value, dict) else None
        lines = [f"{n} {v}" for n, v in pairs] if pairs is not None else value
        shown = ", ".join(lines) if isinstance(lines, list) else value
        typer.echo(f"{name}: {shown or 'none'}")


def installed() -> tuple[dict[str, str | None], list[str]]:
    """Required packages with their versions, and a line for each that is not right."""
    found: dict[str, str | None] = {}
    missing = []
    for text in requires("minivllm") or []:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found[wanted.name] = there = version(wanted.name)
        except PackageNotFoundError:
            found[wanted.name] = there = None
        if there is None or not wanted.specifier.contains(there, prereleases=True):
            missing.append(f"{wanted.name}{wanted.specifier}: pip install it")
    return found, missing


def place() -> tuple[dict[str, Any], list[str]]:
    """The device that `auto` takes, how it computes, and faults on the way there."""
    from minivllm.loader import LoadError, find_model

    told: dict[str, Any] = {}
    faults = []
    try:
        import torch

        from minivllm.llm import choose_device, choose_dtype

        device = choose_device("auto")
        told["device"] = device.type
        told["dtype"] = str(choose_dtype("auto", device)).removeprefix("torch.")
        told["threads"] = torch.get_num_threads()
        told["cpu"] = torch.backends.cpu.get_cpu_capability()
    except (ImportError, ValueError) as error:
        faults.append(str(error))
    try:
        told["smollm2"] = find_model("smollm2").name
    except LoadError as error:
        faults.append(str(error))
    return told, faults


def unknown_settings() -> list[str]:
    """Variables that look like ours, and that nothing reads."""
    known = {"MODEL", "CONFIG", *(name.upper() for name, *_ in documented())}
    names = [n for n in os.environ if n.startswith("MINIVLLM_")]
    unread = [n for n in names if n.removeprefix("MINIVLLM_") not in known]
    return [f"{name}: no option has this name" for name in unread]


# %% [markdown]
# Later chapters bring commands of their own, and this module must not know their names. So it
# asks the package's folder: whoever has a command puts it in a module `command_...` and adds
# it there. A chapter that is not written yet is not missed.


# %% export="cli.py"
@cache
def add_commands() -> None:
    """Let each module `command_*` of the package add its commands, once."""
    for found in iter_modules(import_module("minivllm").__path__, "minivllm."):
        if found.name.startswith("minivllm.command_"):
            import_module(found.name).add_to(app)


# %% export="cli.py"
def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a foreseeable fault is one line on stderr and exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    add_commands()
    try:
        code = app(given or ["--help"], prog_name="minivllm", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.TyperException as error:
        name = getattr(getattr(error, "param", None), "envvar", None)
        source = f" ({name} is set)" if os.environ.get(str(name)) else ""
        _fail(error.format_message() + source)
    except (ValueError, OSError) as error:
        _fail(str(error))
    sys.exit(code or 0)


def _fail(message: str) -> NoReturn:
    print("minivllm:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


# %% [markdown]
# A file wants eight tokens and no chance in their choice; a variable wants two tokens:

# %% name="nearest"
import contextlib

asked = ["generate", "--prompt", "The future of AI is"]
with TemporaryDirectory() as folder, contextlib.redirect_stderr(sys.stdout):
    file = Path(folder, "engine.toml")
    file.write_text("max_tokens = 8\ntemperature = 0\nnum_pages = 64\n", "utf-8")
    os.environ["MINIVLLM_MAX_TOKENS"] = "2"
    for more in ([], ["--max-tokens", "4"]):
        with contextlib.suppress(SystemExit):
            main([*asked, "--config", str(file), *more])
    del os.environ["MINIVLLM_MAX_TOKENS"]

# %% [markdown]
# The variable beat the file, and the command line both. And three mistakes:

# %%
for arguments in (
    ["generate", "--prompt", "Hello", "--model", "nowhere.gguf"],
    ["generate", "--prompt", "Hello", "--index", "radics"],
    ["generate", "--prompts", "Hello"],
):
    with contextlib.redirect_stderr(sys.stdout):  # to have both in one place
        try:
            main(arguments)
        except SystemExit as end:
            print("exit code", end.code)

# %% [markdown]
# ## Talking
#
# `minivllm chat` keeps the conversation and sends all of it at each turn; a model remembers
# nothing. What that costs is the question of this book, so each turn ends with a line that says
# how much of the history was there already. Ctrl-C stops an answer, and what had come of it
# stays in the history. Ctrl-D or `/exit` ends, `/clear` forgets.

# %% export="command_chat.py"
"""The command `minivllm chat`: a conversation that streams."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM


def add_to(root: typer.Typer) -> None:
    """Add this module's command to the command line."""
    root.command()(chat)


@with_options(max_tokens=512, temperature=0.3)
def chat(
    system: Annotated[
        str | None, typer.Option(help="What the model is told first.")
    ] = None,
    as_json: AsJson = False,
    trace: Trace = None,
    **options: Any,
) -> None:
    """Talk with the model; or answer the lines of stdin, one turn each."""
    params = sampling_of(options)
    if params.n > 1:
        raise ValueError("a chat has one answer: --n must be 1")
    with open_llm(options, as_json, trace) as llm:
        talk(llm, params, system, as_json)


def talk(llm: "LLM", params: SamplingParams, system: str | None, as_json: bool) -> None:
    """Turn by turn; a turn that cannot run ends a script, not a person's chat."""
    start = [{"role": "system", "content": system}] if system else []
    history = list(start)
    by_hand = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    for line in typed_lines() if by_hand else map(str.strip, sys.stdin):
        if line == "/exit":
            return
        if line == "/clear":
            history = list(start)
        elif line:
            history.append({"role": "user", "content": line})
            try:
                text = answer(llm, history, params, as_json)
                history.append({"role": "assistant", "content": text})
            except ValueError as error:
                if not by_hand:
                    raise
                typer.echo(f"{error} (/clear starts anew)", err=True)
                history.pop()


def typed_lines() -> Iterator[str]:
    """What a person types, up to Ctrl-D; Ctrl-C drops the line."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # arrow keys and history for `input`
    typer.echo("/exit or Ctrl-D ends, /clear forgets, Ctrl-C stops.", err=True)
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            line = ""
            typer.echo()
        except EOFError:
            typer.echo()
            return
        yield line.strip()


# %% [markdown]
# One answer, as it comes. The stream is closed whatever happens, and with it the request ends.


# %% export="command_chat.py"
def answer(
    llm: "LLM", history: list[dict[str, str]], params: SamplingParams, as_json: bool
) -> str:
    """Print an answer as it grows, and what it cost; return its text."""
    output, text, reason = None, "", "abort"
    with closing(llm.stream(history, params)) as stream:
        try:
            for output in stream:
                new = output.outputs[0]
                if not as_json:
                    typer.echo(new.text[len(text) :], nl=False)
                text, reason = new.text, new.finish_reason or reason
        except KeyboardInterrupt:
            pass
    tell_turn(output, text, reason, as_json)
    return text


def tell_turn(
    output: RequestOutput | None, text: str, reason: str, as_json: bool
) -> None:
    """The end of a turn: its counts; for a machine the text as well."""
    size = len(output.prompt_token_ids) if output else 0
    cached = output.num_cached_tokens if output else 0
    new = len(output.outputs[0].token_ids) if output else 0
    if as_json:
        counts = {"prompt_tokens": size, "cached_tokens": cached, "output_tokens": new}
        turn = {"text": text, "finish_reason": reason, **counts}
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION} | turn))
        return
    typer.echo()
    told = f"  ({size} prompt tokens, {cached} of them cached; {new} new; {reason})"
    typer.echo(told, err=True)


# %% [markdown]
# Three turns, typed by a script. The history grows, and with it what must be read at each turn:

# %% name="turns"
import io

sys.stdin, typed = io.StringIO("I am Ada.\nWho am I?\nSpell it.\n"), sys.stdin
heard = io.StringIO()
with contextlib.redirect_stdout(heard), contextlib.suppress(SystemExit):
    main(["chat", "--json", "--temperature", "0", "--max-tokens", "24"])
sys.stdin = typed
turns = [json.loads(line) for line in heard.getvalue().splitlines()]
for turn in turns:
    print(turn["prompt_tokens"], "prompt tokens,", turn["cached_tokens"], "cached")

# %% [markdown]
# Nobody told the cache that this is a conversation. There is no session, no handle that a client
# must send back. The text of a turn begins with the text of the one before, so its tokens do,
# so its pages are found. What is computed anew is the last answer's tail, which did not fill a
# page, and the new question. A person who types slowly and comes back after an hour finds
# the same, if the pages have not been evicted; two people with the same system message share it.
#
# One step in that chain is not a law. The history is kept as text, and text becomes tokens
# again at each turn. A model may have written `Ada` in two tokens where the tokenizer would
# use one. From there on the ids differ, and with them the names of all later pages. The
# answer is still right; the reuse ends there. Clients that keep token ids do not have this
# problem, and clients that speak JSON over HTTP all do.

# %% [markdown]
# ## One import
#
# `from minivllm import LLM` should work, and `import minivllm` should cost nothing, since
# half of the package needs no torch, and a test of the scheduler should not wait for it. So
# the package looks a name up when it is first asked for.

# %% export="__init__.py"
"""minivllm: a small inference engine that reuses work, exported from a book."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.request import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "minivllm.llm",
    "CompletionOutput": "minivllm.request",
    "RequestOutput": "minivllm.request",
    "SamplingParams": "minivllm.request",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, imported yet or not."""
    return sorted({*globals(), *_HOMES})


# %%
import subprocess

program = "import sys, minivllm; print('torch' in sys.modules, minivllm.SamplingParams().max_tokens)"
print(
    subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    ).stdout.strip()
)

# %% [markdown]
# ## What still goes wrong
#
# The engine has a front door now, and everyone who comes through it waits for everyone else:
# `generate` returns when the last prompt is done, and refuses a second caller meanwhile. It also
# cannot say whether it is fast. `ttft_s` stands in each output, but a number of seconds on one
# laptop is not a measurement. What would be? [Chapter 15](15_measuring.md) measures; the server
# that lets many people in at once comes after it.
#
# ## Exercises
#
# ### Exercise 1
#
# [108](#all) engines let the twin find nothing and the third request everything. Which choices of
# `publish` and `single_flight` are theirs? Say first what you expect of `publish="step"`.

# %% tags=["solution"]
late = {
    (options.publish, options.single_flight)
    for options, (_, cached) in zip(engines, runs, strict=True)
    if cached == (0, 0, 480)
}
print(sorted(late))

# %%
assert late == {(publish, "none") for publish in ("step", "prompt", "finish")}

# %% [markdown]
# Twins that are admitted in the same step are both computed before either is published. Only an
# announcement inside the step, or a wait, helps them.
#
# ### Exercise 2
#
# `generate` checks all prompts before it submits any. Show that it does: call it with a good
# prompt and one that contains a token id which the model does not have, and see that
# nothing was submitted.

# %% tags=["solution"]
before = llm.stats()
try:
    llm.generate([[504, 3575], [504, 99_999]])
    message = ""
except ValueError as error:
    message = str(error)
print(message)

# %%
assert "99999" in message and llm.stats() == before and not llm.engine.has_unfinished()

# %% [markdown]
# ### Exercise 3
#
# How many tokens will the second turn of a chat find? Write `predict(first, second_ids)`: what
# the first turn left behind is its prompt and its answer without the last token, which was
# sampled and never computed; the second finds as much of it as it begins with, in whole pages.


# %% tags=["solution"]
def predict(first: RequestOutput, second_ids: list[int], page_size: int = 16) -> int:
    """Tokens that a second prompt reuses from a first request."""
    known = [*first.prompt_token_ids, *first.outputs[0].token_ids[:-1]]
    pairs = enumerate(zip(known, second_ids, strict=False))
    shortest = min(len(known), len(second_ids) - 1)
    same = next((i for i, (a, b) in pairs if a != b), shortest)
    return min(same, shortest) // page_size * page_size


# %%
short = SamplingParams(temperature=0, max_tokens=20)
talk_so_far = [{"role": "user", "content": "Name three rivers of Europe."}]
first = llm.chat(talk_so_far, short)[0]
talk_so_far.append({"role": "assistant", "content": first.outputs[0].text})
talk_so_far.append({"role": "user", "content": "And of Africa?"})
second = llm.chat(talk_so_far, short)[0]
assert predict(first, second.prompt_token_ids) == second.num_cached_tokens > 0
