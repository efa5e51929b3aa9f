# Exported from chapters/16_traffic.py (d4ab849d): edit the chapter.
"""`minivllm simulate`, what each policy would do for a trace; and `bench calibrate`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from minivllm.bench import make_record
from minivllm.cli import SCHEMA_VERSION, AsJson, Trace, with_options
from minivllm.command_bench import app as bench
from minivllm.command_bench import check_sizes, keep, quantity, spell
from minivllm.options import SAMPLING, EngineOptions
from minivllm.progress import progress_bar
from minivllm.replay import Replay, Served, draw_curves, reuse_curve, summary
from minivllm.roofline import Roofline, StepRow, calibrate_llm, read_cost
from minivllm.simulation import VirtualClock
from minivllm.timeline import check_place, tracing
from minivllm.workloads import TraceRequest, generate, read_trace, to_line

POLICIES = ("index", "publish", "single_flight", "grouping", "admission", "eviction")
UNUSED = {"device", "dtype", "kernels", "seed", "explain", "explain_tokens"}
LEFT_OUT = {"model", *SAMPLING, "num_pages", *UNUSED}
NEEDED, CURVE = "0", "16K,64K,256K,1M,4M,16M,0"  # what --capacity, --capacities are


def add_to(root: typer.Typer) -> None:
    """Add this module's commands to the command line."""
    root.command()(simulate)
    bench.command()(calibrate)


def sizes_of(text: str) -> list[int]:
    """Sizes in tokens: 16384,64K,4M; 0 is unbounded. Raises `ValueError`."""
    found = []
    for word in text.split(","):
        factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(word.strip()[-1:].upper(), 1)
        digits = word.strip()[: -1 if factor > 1 else None]
        if not digits.isdecimal():
            raise ValueError(f"a size is a whole number, as in 16K,4M,0, not {word!r}")
        found.append(int(digits) * factor)
    return found


def size_name(tokens: int) -> str:
    """A size in tokens, as short as it was given."""
    for factor, unit in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if tokens and tokens % factor == 0:
            return f"{tokens // factor}{unit}"
    return str(tokens or "unbounded")


def load_traffic(source: str, num_requests: int | None) -> list[TraceRequest]:
    """The requests of a file, or of a generator named `gen:…`."""
    if num_requests is not None and not 1 <= num_requests < 2**31:
        raise ValueError(f"--requests must be at least 1, not {num_requests}")
    if source.startswith("gen:"):
        return generate(source.removeprefix("gen:"), num_requests or 200)
    return read_trace(Path(source))[:num_requests]


def combinations(options: dict[str, Any]) -> list[EngineOptions]:
    """The engines that lists of policies ask for. Raises `ValueError`."""
    known = {each.name for each in fields(EngineOptions)} - LEFT_OUT
    chosen = {name: options[name] for name in known}
    lists = [dict.fromkeys(str(chosen[name]).split(",")) for name in POLICIES]
    return [
        EngineOptions(**chosen | dict(zip(POLICIES, values, strict=True)))
        for values in product(*lists)
    ]


Panels = tuple[list[str], list[tuple[str, list[tuple[str, list[float]]]]]]


def tell_curve(
    traffic: list[TraceRequest], sizes: list[int], page_size: int, as_json: bool
) -> Panels:
    """Print the reuse curve; returns what a picture of it shows."""
    rates = reuse_curve(traffic, sizes, page_size)
    pairs = list(zip(sizes, rates, strict=True))
    if as_json:
        rows = [{"tokens": size, "hit_rate": rate} for size, rate in pairs]
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "capacities": rows}))
    else:
        for size, rate in pairs:
            typer.echo(f"{size_name(size):>10} tokens  {rate:6.1%}")
    curve = ("an LRU cache", [100 * rate for rate in rates])
    names = [size_name(size) for size in sizes]
    return names, [("reused, % of prompt tokens", [curve])]


@dataclass
class Outcome:
    """One engine, one capacity: what became of the traffic."""

    name: str  # the policies in which the runs differ
    capacity: int
    options: EngineOptions
    told: dict[str, Any]
    totals: dict[str, int]


def run_all(
    traffic: list[TraceRequest],
    engines: list[EngineOptions],
    sizes: list[int],
    cost: Roofline,
    trace: Path | None = None,
) -> Iterator[tuple[Outcome, list[Served]]]:
    """Replay the traffic through every engine at every capacity."""
    with progress_bar("requests", len(traffic) * len(engines) * len(sizes)) as advance:
        for options, size in product(engines, sizes):
            clock = VirtualClock()
            with tracing(trace, clock) as observer:
                replay = Replay(traffic, options, size, cost, clock, observer)
                served, totals = replay.run(advance), replay.engine.stats()
            told, name = summary(served, totals), difference(options, engines)
            if told["refused"]:
                note = f"{told['refused']} of {len(traffic)} requests never fit"
                typer.echo(f"{note} in {size_name(size)} tokens: refused", err=True)
            yield Outcome(name, size, options, told, totals), served


def difference(options: EngineOptions, engines: list[EngineOptions]) -> str:
    """The policies of one engine in which the engines differ."""
    return ", ".join(
        getattr(options, name)
        for name in POLICIES
        if len({getattr(each, name) for each in engines}) > 1
    )


HEAD = f"{'tokens':>10} {'reused':>7}  TTFT {'P50':>9} {'P90':>9} {'P99':>9}"


def in_words(outcome: Outcome) -> str:
    """A line of the table."""
    told, times = outcome.told, outcome.told["ttft_s"]
    shown = (quantity(times[p], "s") if times else "-" for p in ("p50", "p90", "p99"))
    ttft = " ".join(f"{each:>9}" for each in shown)
    counts = f"{outcome.totals['preemptions']:>9}"
    return (
        f"{size_name(outcome.capacity):>10} {told['hit_rate']:>7.1%}       {ttft}"
        f" {counts}  {outcome.name}"
    )


def tell_replays(
    outcomes: Iterator[tuple[Outcome, list[Served]]], single: bool, as_json: bool
) -> list[Outcome]:
    """Print each replay when it is done; JSON of a single one has every request."""
    kept, rows = [], []
    if not as_json:
        typer.echo(f"{HEAD} preempted")
    for outcome, served in outcomes:
        kept.append(outcome)
        if not as_json:
            typer.echo(in_words(outcome))
        elif single:
            write_requests(served, outcome)
        policies = {name: getattr(outcome.options, name) for name in POLICIES}
        row = {"options": policies, "capacity": outcome.capacity}
        rows.append(row | outcome.told | {"totals": outcome.totals})
    if as_json and not single:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "runs": rows}))
    return kept


def write_requests(served: list[Served], outcome: Outcome) -> None:
    """One JSON object, written as it is made: there may be a million requests."""
    out = sys.stdout
    out.write(f'{{"schema_version": {SCHEMA_VERSION}, "requests": [')
    for i, one in enumerate(served):
        out.write((",\n " if i else "\n ") + json.dumps(asdict(one)))
    rest = {"summary": outcome.told, "totals": outcome.totals}
    out.write(f"\n], {json.dumps(rest)[1:]}\n")


def panels_of(outcomes: list[Outcome]) -> Panels:
    """Hit rates and waiting times against memory, a curve for each engine."""
    rates: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    for each in outcomes:
        rates.setdefault(each.name or "reused", []).append(100 * each.told["hit_rate"])
        for p in ("p50", "p99"):
            label = f"{p.upper()} {each.name}"
            waits.setdefault(label, []).append(each.told["ttft_s"].get(p, 0.0))
    sizes = list(dict.fromkeys(each.capacity for each in outcomes))
    titles = "reused, % of prompt tokens", "TTFT, s"
    pairs = zip(titles, (rates, waits), strict=True)
    panels = [(title, list(curves.items())) for title, curves in pairs]
    return [size_name(size) for size in sizes], panels


@with_options(LEFT_OUT, page_size=None)
def simulate(
    source: Annotated[
        str,
        typer.Argument(metavar="TRACE", help="A JSONL file, or gen:NAME-SEED, above."),
    ],
    capacity: Annotated[
        str, typer.Option(help="Tokens of K/V memory, a list; 0: as many as needed.")
    ] = NEEDED,
    cost: Annotated[
        str, typer.Option(help="A file of bench calibrate, 70b-8xh100 or 8b-h100.")
    ] = "70b-8xh100",
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="No clock: the reuse curve of LRU.")
    ] = False,
    capacities: Annotated[
        str, typer.Option(help="Cache sizes of that curve, in tokens; 0: unbounded.")
    ] = CURVE,
    requests: Annotated[
        int | None, typer.Option(help="Only the first so many; generated ones: 200.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the traffic to a trace file as well.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw hit rates and TTFT against memory.")
    ] = None,
    trace: Trace = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """What would each policy do for this traffic? Replays it on a virtual clock.

    Capacities and policies may be lists: --capacity 256K,1M --publish finish,step
    --eviction lru,lfu tries all combinations. A trace has lines of ours or of Mooncake
    (pages are then its blocks of 512 tokens). Generated traffic: gen:bursts-0,
    gen:system-prompt-0, gen:agents-0, gen:tree-of-thought-0, gen:mixed-0, gen:cycle-0,
    gen:short-0; the number is the seed.
    """
    check_place(write, "--write")
    check_place(svg, "--svg")
    check_place(trace, "--trace")
    if capacity != NEEDED if cache_only else capacities != CURVE:
        raise ValueError("--cache-only takes --capacities, a replay takes --capacity")
    sizes, model = sizes_of(capacities if cache_only else capacity), read_cost(cost)
    traffic = load_traffic(source, requests)
    if options["page_size"] is None:
        options["page_size"] = page_of(traffic)
    engines = combinations(options)
    single = len(engines) * len(sizes) == 1 and not cache_only
    if trace and not single:
        raise ValueError("--trace is of one replay: one capacity and one engine")
    page = engines[0].page_size
    if any(0 < size < page for size in sizes):
        raise ValueError(f"a capacity of {min(filter(None, sizes))} tokens is no page")
    if write:
        write.write_text("".join(f"{to_line(r)}\n" for r in traffic), "utf-8")
    if cache_only:
        shown = tell_curve(traffic, sizes, page, as_json)
    else:
        outcomes = run_all(traffic, engines, sizes, model, trace)
        shown = panels_of(tell_replays(outcomes, single, as_json))
    if svg:
        svg.write_text(draw_curves(*shown).svg(), "utf-8")


def page_of(traffic: list[TraceRequest]) -> int:
    """A trace of named blocks has pages of their size."""
    return traffic[0].block if traffic[0].block > 1 else EngineOptions.page_size


def calibrate(
    model: Annotated[
        str, typer.Option(help="smollm2, a folder, a .gguf file or a hub id.")
    ] = "smollm2",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Readings of each step.")] = 5,
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time single steps of the engine, and fit the cost model of simulate to them."""
    check_place(record, "--record")
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    check_sizes(1, repeats, {"max_tokens": 2} | place)
    from minivllm.llm import LLM  # torch begins here

    llm = LLM(model, num_pages=1, progress=not as_json, **place)
    cost, rows = calibrate_llm(llm, repeats)
    for line in calibration_lines(cost, rows):
        typer.echo(line, err=as_json)
    facts = {"model": model, **place, "repeats": repeats}
    command = spell("calibrate", facts)
    facts |= {"roofline": asdict(cost), "threads": num_threads()}
    keep(make_record(command, rows, **facts), record, as_json)


def num_threads() -> int:
    """Threads of the model's products."""
    import torch

    return torch.get_num_threads()


def calibration_lines(cost: Roofline, rows: list[StepRow]) -> Iterator[str]:
    """The fit for people, and how far off it is."""
    for name, value in asdict(cost).items():
        yield f"{name:<10} {value if name == 'overlaps' else quantity(value, 's')}"
    for fitted, words in ((True, "fitted to"), (False, "held out")):
        found = sorted(abs(row.error) for row in rows if row.fitted is fitted)
        yield (
            f"{words} {len(found)} kinds of steps: off by {median(found):.0%} "
            f"(median), {found[-1]:.0%} at most"
        )
