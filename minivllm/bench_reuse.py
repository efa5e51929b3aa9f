# Exported from chapters/15_measuring.py (2fdcbc01): edit the chapter.
"""`minivllm bench reuse`: one prompt several times, under every answer to who waits.

When does a page become visible, who waits for it, and for how long? The same prompt is
sent at once, or while the first request decodes, to engines that answer differently.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from io import StringIO
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

from minivllm.batch import Chunk
from minivllm.bench import Spread, Trial, measure, nothing
from minivllm.engine import Clock, Engine, Limits, Runner, WallClock
from minivllm.events import Observer, ignore
from minivllm.options import CHOICES, assemble, check_choice, read_options
from minivllm.request import RequestOutput, SamplingParams, TokenIds, encode_ids
from minivllm.simulation import (
    SerialPrefill,
    SimulatedRunner,
    VirtualClock,
    Work,
    work_of,
)

PUBLISH = ("off", *CHOICES["publish"])  # off: no prefix cache
ARRIVALS = ("together", "token", "decode")


@dataclass(frozen=True)
class Case:
    """How many requests there are, when they come, and who shares what with whom.

    `arrival`: all "together"; or the first alone, and the others when its caller has
    its first output "token", or when its "decode" begins, which is the moment in which
    the forward pass over its prompt has ended and nothing has come of it yet.
    """

    num_requests: int = 1
    publish: str = "off"
    single_flight: str = "none"
    arrival: str = "together"
    engine: str = "minivllm"


Plan = tuple[tuple[tuple[str, int, int], ...], ...]  # steps, chunks: who, start, size


@dataclass(frozen=True)
class Outcome:
    """One run of a case, times in seconds; requests in order of arrival."""

    ttfts_s: tuple[float, ...]  # from a request's submission to its first token
    e2es_s: tuple[float, ...]  # and to its end
    makespan_s: float  # from the first submission to the last end
    cached_tokens: tuple[int, ...]
    prefill_tokens: int  # computed
    flights: int
    token_ids: tuple[tuple[int, ...], ...]
    plan: Plan = ()


class Watched:
    """Notes what each step takes, and tells when a runner gives its first token."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self.runner = runner
        self.clock = clock
        self.steps: list[tuple[Work, float]] = []
        self.plan: Plan = ()
        self.at_first_token: Callable[[], object] = nothing

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Run the batch; nothing is committed yet when `at_first_token` is called."""
        start_s = self.clock.now()
        tokens = self.runner.run(chunks)
        self.steps.append((work_of(chunks), self.clock.now() - start_s))
        self.plan += (tuple((c.request_id, c.start, len(c.token_ids)) for c in chunks),)
        if any(chunk.samples for chunk in chunks):
            tell, self.at_first_token = self.at_first_token, nothing
            tell()
        return tokens


@dataclass(frozen=True)
class Reuse:
    """The experiment: what all of its runs have in common.

    `make_runner` makes a runner with memory for so many pages, on the clock of the run:
    a model's, or chapter 8's simulated one. `steps` collects what steps took.
    """

    make_runner: Callable[[int, Any], Runner]
    limits: Limits
    prompt_ids: TokenIds
    max_tokens: int = 128
    page_size: int = 16
    max_batch_tokens: int = 512
    make_clock: Callable[[], Clock] = WallClock
    observer: Observer = ignore
    steps: list[tuple[Work, float]] = field(default_factory=list)

    def make_engine(self, case: Case) -> Engine:
        """A cold engine with room for all requests of a case."""
        size = self.page_size
        options: dict[str, Any] = {"page_size": size, "index": "none"}
        if case.publish != "off":
            options |= {"publish": case.publish, "index": "radix"}
        options |= {"single_flight": case.single_flight}
        options |= {"max_batch_tokens": self.max_batch_tokens}
        footprint = len(self.prompt_ids) + self.max_tokens - 1
        num_pages, clock = case.num_requests * -(-footprint // size), self.make_clock()
        runner = Watched(self.make_runner(num_pages, clock), clock)
        chosen = read_options(options)
        parts = (chosen, num_pages, runner, self.limits, self.observer)
        return assemble(*parts, clock=clock)

    def run(self, case: Case) -> Outcome:
        """Send the requests when they are due, and step to the end."""
        engine = self.make_engine(case)
        watched, due = cast(Watched, engine.runner), self._submit(engine, case)
        next(due)
        if case.arrival == "together":
            list(due)
        elif case.arrival == "decode":
            watched.at_first_token = lambda: list(due)
        ended: list[RequestOutput] = []
        while engine.has_unfinished():
            outputs = engine.step()
            ended += [output for output in outputs if output.finished]
            if outputs:
                list(due)
        self.steps.extend(watched.steps)
        return replace(outcome_of(ended, engine.stats()), plan=watched.plan)

    def rehearse(self, case: Case) -> Plan:
        """The steps that a case will take, found out without the model (chapter 8)."""

        def simulated(num_pages: int, clock: VirtualClock) -> Runner:
            cost, vocab_size = SerialPrefill(1, 1, 1, 0), self.limits.vocab_size
            return SimulatedRunner(cost, clock, vocab_size, num_pages, self.page_size)

        parts: dict[str, Any] = {
            "make_runner": simulated,
            "make_clock": VirtualClock,
            "steps": [],
        }
        return replace(self, **parts).run(case).plan

    def _submit(self, engine: Engine, case: Case) -> Iterator[str]:
        """Submit one more whenever the next id is asked for."""
        wanted = self.max_tokens
        params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
        for _ in range(case.num_requests):
            yield engine.submit(self.prompt_ids, params)


def outcome_of(ended: Sequence[RequestOutput], stats: Mapping[str, int]) -> Outcome:
    """The figures of a run. Raises `RuntimeError` if a request ended otherwise."""
    outputs = sorted(ended, key=lambda output: int(output.request_id))
    if any(output.outputs[0].finish_reason != "length" for output in outputs):
        raise RuntimeError("a request ended before its time: nothing was measured")
    metrics = [output.metrics for output in outputs]
    return Outcome(
        tuple(each.ttft_s or 0.0 for each in metrics),
        tuple(each.e2e_s or 0.0 for each in metrics),
        max(each.finished_s or 0.0 for each in metrics) - metrics[0].arrival_s,
        tuple(output.num_cached_tokens for output in outputs),
        stats["prefill_tokens"],
        stats["flights"],
        tuple(tuple(output.outputs[0].token_ids) for output in outputs),
    )


def make_cases(
    numbers: Sequence[int],
    publish: Sequence[str],
    single_flight: Sequence[str],
    arrivals: Sequence[str] = ("together",),
    engines: Sequence[str] = (),
) -> list[Case]:
    """Every combination that can differ. `ValueError` for a value that does not exist.

    Without a cache, or alone, nobody waits for anybody. Who comes later is the second
    of two. Other engines take the requests as one batch.
    """
    for name, given, choices in (
        ("publish", publish, PUBLISH),
        ("single_flight", single_flight, CHOICES["single_flight"]),
        ("arrival", arrivals, ARRIVALS),
        ("peer", engines, PEERS),
    ):
        for value in given:
            check_choice(name, value, choices)
    if min(numbers, default=0) < 1:
        raise ValueError(f"num_requests must be at least 1, not {list(numbers)}")
    cases = [
        Case(number, shown, waits if shown != "off" and number > 1 else "none", arrival)
        for arrival in arrivals
        for number in (numbers if arrival == "together" else (2,))
        for shown in publish
        for waits in single_flight
    ]
    cases += [Case(number, engine=name) for name in engines for number in numbers]
    return list(dict.fromkeys(cases))


def group_cases(like: Reuse, cases: Sequence[Case]) -> list[list[Case]]:
    """Put cases together that differ in publication only, and not in any step."""
    groups: dict[tuple[Case, Plan], list[Case]] = {}
    for case in cases:
        plan = like.rehearse(case) if case.engine == "minivllm" else ()
        groups.setdefault((replace(case, publish=""), plan), []).append(case)
    return list(groups.values())


@dataclass(frozen=True)
class ReuseRow:
    """A group of cases with the same steps; times in seconds.

    `ran` names the publication of each repeat. `same_tokens`: each output is the one
    that a request gets alone, without a cache.
    """

    engine: str
    arrival: str
    num_requests: int
    publish: Sequence[str]
    single_flight: str
    ran: Sequence[str]
    ttft_s: Mapping[str, Any]  # the mean of the requests
    longest_s: Mapping[str, Any]  # the longest time from a submission to its end
    makespan_s: Mapping[str, Any]
    ttfts_s: Sequence[float]  # of each request, medians
    e2es_s: Sequence[float]
    cached_tokens: Sequence[int]
    prefill_tokens: int
    flights: int
    same_tokens: bool


def spread_of(values: Sequence[float]) -> dict[str, Any]:
    """Readings with their median and bounds, for a record."""
    spread = Spread(tuple(values))
    bounds = {"median": spread.median, "low": spread.low, "high": spread.high}
    return bounds | {"values": list(values)}


def medians(repeats: Sequence[Sequence[float]]) -> list[float]:
    """The median of each request over the repeats."""
    return [median(values) for values in zip(*repeats, strict=True)]


def make_reuse_row(
    group: Sequence[Case], runs: Sequence[tuple[Case, Outcome]], alone: Sequence[int]
) -> ReuseRow:
    """A row of the record. `RuntimeError` if two repeats counted differently."""
    case, outcomes = group[0], [outcome for _, outcome in runs]
    counts = {(o.cached_tokens, o.prefill_tokens, o.flights, o.plan) for o in outcomes}
    if len(counts) != 1:
        raise RuntimeError(f"the repeats of {case} took different steps")
    ((cached, prefill, flights, _),) = counts
    return ReuseRow(
        case.engine,
        case.arrival,
        case.num_requests,
        [each.publish for each in group],
        case.single_flight,
        ran=[each.publish for each, _ in runs],
        ttft_s=spread_of([fmean(each.ttfts_s) for each in outcomes]),
        longest_s=spread_of([max(each.e2es_s) for each in outcomes]),
        makespan_s=spread_of([each.makespan_s for each in outcomes]),
        ttfts_s=medians([each.ttfts_s for each in outcomes]),
        e2es_s=medians([each.e2es_s for each in outcomes]),
        cached_tokens=list(cached),
        prefill_tokens=prefill,
        flights=flights,
        same_tokens=all(ids == alone for o in outcomes for ids in o.token_ids),
    )


def measure_reuse(
    contestants: Mapping[str, Callable[[Case], Outcome]],
    groups: Sequence[Sequence[Case]],
    repeats: int = 3,
    told: Callable[[Case, Outcome], object] = lambda case, outcome: None,
) -> list[ReuseRow]:
    """Run all groups in turn, `repeats` times, every other round in reverse order.

    The cases of a group take turns: a repeat runs one of them.
    """
    first = {name: run(Case()) for name, run in contestants.items()}  # all are warm now
    runs: list[list[tuple[Case, Outcome]]] = [[] for _ in groups]

    def work(number: int) -> float:
        group, before = groups[number], runs[number]
        case = group[len(before) % len(group)]
        before.append((case, contestants[case.engine](case)))
        told(*before[-1])
        return sum(before[-1][1].cached_tokens)

    trials = {str(n): Trial(partial(work, n)) for n in range(len(groups))}
    measure(trials, repeats, warmups=0)
    alone, pairs = first["minivllm"].token_ids[0], zip(groups, runs, strict=True)
    return [make_reuse_row(group, ran, alone) for group, ran in pairs]


def step_facts(steps: Sequence[tuple[Work, float]]) -> list[dict[str, Any]]:
    """What each kind of step took: the fit of chapter 8's cost model needs them."""
    kinds: dict[Work, list[float]] = {}
    for work, seconds in steps:
        kinds.setdefault(work, []).append(seconds)
    return [
        asdict(work) | {"median_s": median(times), "number": len(times)}
        for work, times in kinds.items()
    ]


if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.model import Decoder
    from minivllm.runner import Backend


def make_prompt(llm: "LLM", num_tokens: int) -> TokenIds:
    """The first tokens of a timetable; without a tokenizer, the first token ids."""
    vocab_size = llm.config.vocab_size
    if llm.tokenizer is None:
        return [i % vocab_size for i in range(num_tokens)]
    days = "Monday", "Tuesday", "Wednesday", "Thursday", "Friday"
    text = "".join(
        f"On {day} of week {week} room {week * 7 % 19 + i} is open from {8 + i}. "
        for week in range(num_tokens // 60 + 1)
        for i, day in enumerate(days)
    )
    ids: list[int] = llm.tokenizer.encode(text).ids
    return ids[:num_tokens]


def decoder_of(llm: "LLM") -> "Decoder":
    """The model that an engine runs."""
    runner: Any = llm.engine.runner
    return cast("Decoder", runner.model)


def backend_of(llm: "LLM") -> "Backend":
    """Who computes for it."""
    runner: Any = llm.engine.runner
    return cast("Backend", runner.backend)


def load_reuse(llm: "LLM", num_prompt_tokens: int = 493, **sizes: Any) -> Reuse:
    """The experiment on a loaded model; `sizes` are fields of `Reuse`."""
    from minivllm.runner import ModelRunner  # torch begins here

    decoder, context = decoder_of(llm), llm.engine.limits.max_context
    page_size = sizes.get("page_size", Reuse.page_size)
    num_tokens = num_prompt_tokens + sizes.get("max_tokens", Reuse.max_tokens)
    if num_tokens > context:
        raise ValueError(f"{num_tokens} tokens, and the model's context is {context}")
    return Reuse(
        lambda num_pages, clock: ModelRunner(
            decoder, num_pages, page_size, backend=backend_of(llm)
        ),
        llm.engine.limits,
        encode_ids(make_prompt(llm, num_prompt_tokens)),
        **sizes,
    )


def load_transformers(model: str, llm: "LLM") -> Any:
    """The same file, format of numbers and device; an answer never ends by itself."""
    from transformers import AutoModelForCausalLM

    from minivllm.loader import find_model

    path = find_model(model)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        place["pretrained_model_name_or_path"] = str(path.parent)
        place["gguf_file"] = path.name
        with suppress(ImportError):  # older ones dequantise anyway
            from transformers import GgufConfig

            place["quantization_config"] = GgufConfig(dequantize=True)
    weight = decoder_of(llm).embed_tokens.weight
    with redirect_stderr(StringIO()):  # a progress bar that cannot be turned off
        loaded: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=weight.dtype)
    loaded = loaded.to(weight.device).eval()
    loaded.generation_config.eos_token_id = None
    return loaded


class TransformersBatch:
    """transformers' `generate` on one static batch: all begin and end together."""

    def __init__(self, model: str, llm: "LLM", like: Reuse) -> None:
        self.model = load_transformers(model, llm)
        self.prompt_ids, self.max_tokens = list(like.prompt_ids), like.max_tokens

    def run(self, case: Case) -> Outcome:
        """Generate; the clock is read when each token is there."""
        import torch

        batch = torch.tensor([self.prompt_ids] * case.num_requests)
        times = [time.perf_counter()]

        def note(token_ids: Any, scores: Any, **named: Any) -> Any:
            done = token_ids[:, -1].tolist()  # waits for a GPU
            times.append(time.perf_counter())
            return torch.zeros(len(done), dtype=torch.bool, device=token_ids.device)

        out = self.model.generate(
            batch.to(self.model.device),
            attention_mask=torch.ones_like(batch).to(self.model.device),
            do_sample=False,
            max_new_tokens=self.max_tokens,
            pad_token_id=0,
            stopping_criteria=[note],
        )
        return self._outcome(times, out[:, batch.shape[1] :].tolist(), batch.numel())

    def _outcome(
        self, times: Sequence[float], answers: list[list[int]], num_tokens: int
    ) -> Outcome:
        number, token_ids = len(answers), tuple(map(tuple, answers))
        first_s, whole_s = times[1] - times[0], times[-1] - times[0]
        ttfts_s, e2es_s = (first_s,) * number, (whole_s,) * number
        cached = (0,) * number
        return Outcome(ttfts_s, e2es_s, whole_s, cached, num_tokens, 0, token_ids)


PEERS = {"transformers": TransformersBatch}


def record_reuse(
    llm: "LLM",
    like: Reuse,
    cases: Sequence[Case],
    model: str,
    repeats: int,
    told: Callable[[Case, Outcome], object],
) -> tuple[list[ReuseRow], dict[str, Any]]:
    """Measure all cases; the rows, and the facts that belong beside them."""
    import torch
    import transformers

    contestants, absent = {"minivllm": like.run}, {}
    for name in {case.engine: None for case in cases if case.engine in PEERS}:
        try:
            contestants[name] = PEERS[name](model, llm, like).run
        except ImportError as reason:  # transformers reads GGUF files with accelerate
            absent[name] = " ".join(str(reason).split())
    here = [case for case in cases if case.engine in contestants]
    rows = measure_reuse(contestants, group_cases(like, here), repeats, told)
    weight = decoder_of(llm).embed_tokens.weight
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return rows, {
        "versions": versions,
        "absent": absent,
        "device": str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "steps": step_facts(like.steps),
    }
