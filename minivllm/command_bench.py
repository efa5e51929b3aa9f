# Exported from chapters/15_measuring.py (500ce9f7): edit the chapter.
"""The command `minivllm bench`: what is measured, each under its own name."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm.bench import Row, make_record
from minivllm.bench_cache import OWN_MANAGERS, OWN_TREES, CacheBench
from minivllm.bench_engine import QUICK, EngineBench, EngineRow, Sizes
from minivllm.bench_reuse import (
    ARRIVALS,
    Case,
    Outcome,
    ReuseRow,
    load_reuse,
    make_cases,
    record_reuse,
)
from minivllm.bench_serve import (
    LoadPlan,
    Mix,
    Reply,
    Rounds,
    Server,
    ServeRow,
    check_server,
    count_faults,
    draw_serve_rows,
    find_server,
    load_server,
    make_serve_rows,
    read_calls,
    read_url,
    run_rounds,
)
from minivllm.cli import SCHEMA_VERSION
from minivllm.options import read_options
from minivllm.peers import invite
from minivllm.timeline import check_place

app = typer.Typer(help="Measure, in one process, in turn, with the spread.")


def add_to(root: typer.Typer) -> None:
    """Add this module's commands to the command line."""
    root.add_typer(app, name="bench")


@app.callback()
def bench() -> None:
    """Measure, in one process, in turn, with the spread."""


@app.command()
def cache(
    peer: Annotated[
        list[str] | None, typer.Option(help="sglang, vllm; repeat for both.")
    ] = None,
    peer_path: Annotated[
        list[str] | None, typer.Option(help="A wheel or folder that has a peer.")
    ] = None,
    page_size: Annotated[
        list[int] | None, typer.Option(help="Tokens in a page; default 1 and 16.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Readings of each row.")] = 7,
    scale: Annotated[
        float, typer.Option(help="Share of the full loads, up to 1.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the loads.")] = 0,
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON.")
    ] = False,
) -> None:
    """Prefix trees and caches: match, insert, evict, memory, whole requests."""
    check_place(record, "--record")
    if any(size < 1 or 16 % size for size in page_size or ()):
        raise ValueError("--page-size must be 1, 2, 4, 8 or 16: the loads fork there")
    guests = invite(peer or [], peer_path or [])
    work = CacheBench(
        OWN_TREES | guests.trees,
        OWN_MANAGERS | guests.managers,
        tuple(page_size or (1, 16)),
        repeats,
        scale,
        seed,
    )
    rows = list(tell(work.rows(), guests.absent, sys.stderr if as_json else sys.stdout))
    facts: dict[str, Any] = {"repeats": repeats, "scale": scale, "seed": seed}
    sizes = {"page_size": list(work.page_sizes), "peer": peer or []}
    command = spell("cache", facts | sizes)
    facts |= {"peers": guests.versions, "absent": guests.absent}
    keep(make_record(command, rows, **facts), record, as_json)


def quantity(value: float, unit: str) -> str:
    """A time in the unit that suits it, or bytes."""
    if unit == "B":
        return f"{value:.1f} B"
    for factor, name in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        if value * factor < 1000:
            return f"{value * factor:.3g} {name}"
    return f"{value:.3g} s"


def in_words(row: Row) -> str:
    """One line of the table."""
    low, high = quantity(row.low, row.unit), quantity(row.high, row.unit)
    ratio = f"{row.ratio:6.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})"
    return (
        f"{row.load:<18} {row.operation:<20} {row.page_size:>4}  {row.engine:<8}"
        f"{row.tokens:>10,.0f} {quantity(row.median, row.unit):>10}"
        f"  {f'{low} to {high}':<22} {ratio} × {row.against}"
    )


def tell(rows: Iterable[Row], absent: dict[str, str], to: Any) -> Iterable[Row]:
    """Print rows as they come, and pass them on."""
    for name, reason in absent.items():
        typer.echo(f"{name}: not measured: {reason}", file=to)
    typer.echo(
        f"{'load':<18} {'operation':<20} {'page':>4}  {'engine':<8}{'tokens':>10}"
        f" {'median':>10}  {'spread':<22}  ratio (spread)",
        file=to,
    )
    for row in rows:
        typer.echo(in_words(row), file=to)
        yield row


def keep(record: dict[str, Any], path: Path | None, as_json: bool) -> None:
    """Write a record to a file, print it, or both."""
    whole = {"schema_version": SCHEMA_VERSION} | record
    if as_json:
        typer.echo(json.dumps(whole))
    if path is not None:  # last: if it fails, nothing is lost
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


@app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="The server, http://localhost:8000.")],
    compare_url: Annotated[
        str | None, typer.Option(help="Another one, loaded in turn with the first.")
    ] = None,
    model: Annotated[str, typer.Option(help="Its name; default: the first.")] = "",
    compare_model: Annotated[str, typer.Option(help="At the other server.")] = "",
    requests: Annotated[int, typer.Option(help="Calls in a round.")] = 50,
    arrivals: Annotated[
        str, typer.Option(help="poisson, burst (all at once), trace (timestamps).")
    ] = "poisson",
    rate: Annotated[float, typer.Option(help="poisson: calls a second.")] = 2.0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL: prompt or messages, max_tokens, timestamp (ms)."),
    ] = None,
    shared_words: Annotated[int, typer.Option(help="That begin all prompts.")] = 200,
    own_words: Annotated[int, typer.Option(help="Of each call, new each round.")] = 20,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a chat.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of a call.")] = 32,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for all (vLLM's extension).")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Rounds that are measured.")] = 3,
    warmups: Annotated[int, typer.Option(help="Rounds before them.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="For one call.")] = 120.0,
    same_prompts: Annotated[
        bool, typer.Option("--same-prompts", help="A file's, as they are, each round.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(help="Of moments and words. A server may know the last one's."),
    ] = 0,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="For the first server.")
    ] = "",
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the times here.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON.")
    ] = False,
) -> None:
    """An open-loop load on an OpenAI-compatible server, or on two in turn."""
    check_place(record, "--record")
    check_place(svg, "--svg")
    if repeats < 1 or warmups < 0 or not timeout_s > 0:
        raise ValueError("--repeats and --timeout-s must be above 0")
    mix = Mix(shared_words, own_words, chat)
    fixed = read_calls(prompts) if prompts else ()
    plan = LoadPlan(arrivals, rate, requests, mix, fixed, seed, same_prompts)
    asked = {"base": (base_url, model, api_key)}
    asked |= {"compare": (compare_url, compare_model, "")} if compare_url else {}
    options: dict[str, Any]
    facts: dict[str, Any]
    extra: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
    extra |= {"ignore_eos": True} if ignore_eos else {}
    servers = find_servers(asked, plan, **extra)
    loads = {n: partial(load_round, s, plan, timeout_s) for n, s in servers.items()}
    rounds, warm = run_rounds(loads, repeats, warmups)
    rows = make_serve_rows(rounds)
    for line in serve_table(servers, rows, rounds, warm):
        typer.echo(line, err=as_json)
    if fixed:
        typer.echo(f"{prompts}: {SAME if same_prompts else SALTED}", err=as_json)
    options = {
        "base_url": base_url,
        "compare_url": [compare_url] if compare_url else [],
    }
    options |= {"arrivals": arrivals, "rate": rate, "requests": requests}
    options |= {"prompts": [str(prompts)] if prompts else [], "max_tokens": max_tokens}
    options |= {"shared_words": shared_words, "own_words": own_words}
    options |= {"repeats": repeats, "warmups": warmups, "seed": seed}
    facts = {"chat": chat, "ignore_eos": ignore_eos, "same_prompts": same_prompts}
    flags = (f" --{name.replace('_', '-')}" for name, given in facts.items() if given)
    command = spell("serve", options) + "".join(flags)
    facts |= options | serve_facts(servers, rounds, warm)
    keep(make_record(command, rows, **facts), record, as_json)
    if svg is not None:
        svg.write_text(draw_serve_rows(rows).svg(), encoding="utf-8")
    if any(facts["faults"].values()):
        raise typer.Exit(1)


SALTED = "each round puts a word of its own before its prompts"
SAME = "the same prompts in each round: from the second on they may be known"


def find_servers(
    asked: Mapping[str, tuple[str, str, str]], plan: LoadPlan, **extra: Any
) -> dict[str, Server]:
    """The servers, each of which has answered. `ValueError` for one that does not."""
    for url, *_ in asked.values():
        read_url(url)
    servers = {name: find_server(*given, **extra) for name, given in asked.items()}
    for server in servers.values():
        check_server(server, plan.calls(0)[0])
    return servers


def serve_facts(
    servers: Mapping[str, Server], rounds: Rounds, warm: Rounds
) -> dict[str, Any]:
    """Who was asked, how often, and what failed."""
    return {
        "servers": {n: {"url": s.url, "model": s.model} for n, s in servers.items()},
        "calls": {name: sum(map(len, each)) for name, each in rounds.items()},
        "faults": {name: count_faults(each) for name, each in rounds.items()},
        "faults_in_warmups": {name: count_faults(each) for name, each in warm.items()},
    }


def load_round(
    server: Server, plan: LoadPlan, timeout_s: float, number: int
) -> list[Reply]:
    """One round of one server."""
    return load_server(server, plan.calls(number), timeout_s)


def serve_table(
    servers: Mapping[str, Server],
    rows: Sequence[ServeRow],
    rounds: Rounds,
    warm: Rounds,
) -> Iterable[str]:
    """For people: who was asked, each figure with its spread, and what failed."""
    for name, server in servers.items():
        yield f"{name}: {server.url}, model {server.model}"
    yield f"{'figure':<16} {'server':<8}{'median':>10}  {'spread':<24}ratio (spread)"
    for row in rows:
        unit = "s" if "_s " in row.figure else ""
        middle, low, high = (in_unit(x, unit) for x in (row.median, row.low, row.high))
        line = f"{row.figure:<16} {row.server:<8}{middle:>10}  {f'{low} to {high}':<24}"
        if row.server != rows[0].server and row.ratio is not None:
            line += f"{row.ratio:.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})"
        yield line.rstrip()
    for name, each in rounds.items():
        for kind, number in count_faults(each).items():
            yield f"{name}: {number} of {sum(map(len, each))} calls failed: {kind}"
        if count_faults(each):
            yield f"{name}: its times are those of the others, so there is no ratio"
        for kind, number in count_faults(warm[name]).items():
            size = sum(map(len, warm[name]))
            yield f"{name}: {number} of {size} calls of the warm-up failed: {kind}"
        if any(not reply.streamed for part in each for reply in part):
            yield f"{name}: answered without streaming, so it has no TTFT"
        if any(
            r.server == name and r.figure == "lag_s p99" and r.high > 0.01 for r in rows
        ):
            yield f"{name}: the generator was late: its machine is too slow"


def in_unit(value: float, unit: str) -> str:
    """A time as `quantity` has it, or a plain number."""
    return quantity(value, unit) if unit else f"{value:,.4g}"


@app.command()
def reuse(
    model: Annotated[
        str, typer.Option(help="smollm2, a folder, a .gguf file or a hub id.")
    ] = "smollm2",
    num_requests: Annotated[
        list[int] | None, typer.Option(help="Identical requests; default 1 2 4 8.")
    ] = None,
    publish: Annotated[
        list[str] | None,
        typer.Option(help="off (no cache), finish, prompt, step, schedule."),
    ] = None,
    single_flight: Annotated[
        list[str] | None, typer.Option(help="none, completion, prefill.")
    ] = None,
    arrival: Annotated[
        list[str] | None,
        typer.Option(help="together; token, decode: the second of two comes then."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="transformers: one static batch.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 493,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output tokens of each; default 128.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    max_batch_tokens: Annotated[
        int, typer.Option(help="New tokens in a step, at most.")
    ] = 512,
    repeats: Annotated[
        int | None, typer.Option(help="Runs of each case; default 3.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Other defaults: 1 2 8, 16 tokens, one run.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON.")
    ] = False,
) -> None:
    """Identical requests on a model: when pages are visible, who waits, how long."""
    check_place(record, "--record")
    numbers, usual = ([1, 2, 8], (16, 1)) if quick else ([1, 2, 4, 8], (128, 3))
    max_tokens = usual[0] if max_tokens is None else max_tokens
    repeats = usual[1] if repeats is None else repeats
    sizes = {"max_tokens": max_tokens, "page_size": page_size}
    sizes |= {"max_batch_tokens": max_batch_tokens}
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    one_by_one: dict[str, list[Any]] = {
        "num-requests": num_requests or numbers,
        "publish": publish or ["off", "finish", "step", "schedule"],
        "single-flight": single_flight or ["none", "completion", "prefill"],
        "arrival": arrival or list(ARRIVALS),
        "peer": peer or [],
    }
    cases = make_cases(*one_by_one.values())
    check_sizes(prompt_tokens, repeats, sizes | place)
    from minivllm.llm import LLM  # torch begins here

    llm = LLM(model, num_pages=1, **place)
    like = load_reuse(llm, prompt_tokens, **sizes)
    facts = {"model": model, "prompt_tokens": prompt_tokens, **sizes, **place}
    facts |= {"repeats": repeats}
    rows, found = record_reuse(llm, like, cases, model, repeats, tell_run)
    for line in reuse_table(rows, found["absent"]):
        typer.echo(line, err=as_json)
    command = spell("reuse", facts | one_by_one)
    keep(make_record(command, rows, **facts | found), record, as_json)


def check_sizes(prompt_tokens: int, repeats: int, options: dict[str, Any]) -> None:
    """Raise `ValueError` for what cannot be run, before a model is loaded."""
    max_tokens = options.pop("max_tokens")
    for name, value, least in (
        ("prompt-tokens", prompt_tokens, 1),
        ("max-tokens", max_tokens, 2),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise ValueError(f"--{name} must be at least {least}, not {value}")
    read_options(options)


def spell(command: str, options: dict[str, Any]) -> str:
    """The command line that asks for this; a list is an option given repeatedly."""
    words = ["minivllm bench", command]
    for name, given in options.items():
        for value in given if isinstance(given, list) else [given]:
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


def tell_run(case: Case, outcome: Outcome) -> None:
    """A sign of life for each run."""
    typer.echo(f"{name_case(case)}  {outcome.makespan_s:.1f} s", err=True)


def name_case(case: Case) -> str:
    """The first columns of a line."""
    ours = case.engine == "minivllm"
    who, waits = (case.publish, case.single_flight) if ours else (case.engine, "")
    return f"{case.num_requests} {case.arrival:<9} {waits:<11}{who:<24}"


def reuse_table(rows: list[ReuseRow], absent: dict[str, str]) -> Iterable[str]:
    """The rows for people: medians, and what was counted."""
    for name, reason in absent.items():
        yield f"{name}: not measured: {reason}"
    head = f"{'N arrival   waits for  publish':<47}{'TTFT':>8} {'longest':>8}"
    yield f"{head} {'makespan':>8} {'cached':>7} {'computed':>9}  same tokens"
    for row in rows:
        times = [each["median"] for each in (row.ttft_s, row.longest_s, row.makespan_s)]
        publish, waits = " ".join(row.publish), row.single_flight
        case = Case(row.num_requests, publish, waits, row.arrival, row.engine)
        seconds = "".join(f"{value:8.2f} " for value in times)
        counts = f"{sum(row.cached_tokens):7} {row.prefill_tokens:9}"
        same = "yes" if row.same_tokens else "NO"
        yield f"{name_case(case)}{seconds}{counts}  {same}"


VLLM = {  # of the project's own notes, on two EPYC cores: not measured here
    "prefill of 512": "0.68 s",
    "decode, 1 request": "22 tokens/s",
    "decode, 8 requests": "151 tokens/s",
}


@app.command()
def engine(
    model: Annotated[
        str, typer.Option(help="smollm2, a folder, a .gguf file or a hub id.")
    ] = "smollm2",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Default: float32 and bfloat16.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Readings of each row.")] = 7,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small steps, one reading.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON.")
    ] = False,
) -> None:
    """Steps beside transformers' steps, in turn, and where a step's time goes."""
    check_place(record, "--record")
    dtypes, sizes = dtype or ["float32", "bfloat16"], Sizes(repeats=max(1, repeats))
    check_sizes(sizes.prefill, repeats, {"max_tokens": 2, "device": device})
    for each in dtypes:
        read_options({"dtype": each})
    rows, found = measure_engine(
        model, dtypes, device, QUICK if quick else sizes, as_json
    )
    facts = {"model": model, "dtype": dtypes, "device": device, "repeats": repeats}
    command = spell("engine", facts) + " --quick" * quick
    keep(make_record(command, rows, **facts | found), record, as_json)


def measure_engine(
    model: str, dtypes: list[str], device: str, sizes: Sizes, as_json: bool
) -> tuple[list[EngineRow], dict[str, Any]]:
    """Measure, telling each row; the rows and the facts beside them."""
    import torch
    import transformers

    from minivllm.llm import LLM

    rows: list[EngineRow] = []
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "breakdowns": []}
    for dtype in dtypes:
        given: Any = {"num_pages": 1, "dtype": dtype, "device": device}
        bench = EngineBench(LLM(model, **given), model, sizes)
        for row in bench.rows():
            typer.echo(engine_line(row), err=as_json)
            rows.append(row)
        plain = EngineBench(LLM(model, **given, kernels="torch"), model, sizes)
        for each in chain(plain.breakdowns(), bench.breakdowns()):
            typer.echo(breakdown_line(each), err=as_json)
            found["breakdowns"].append(each)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return rows, found | {"versions": versions, "to_attempt": {"vllm": VLLM}}


def engine_line(row: EngineRow) -> str:
    """One line of the table: medians, and the ratios of the pairs."""
    own, other = (quantity(s["median"], "s") for s in (row.own_s, row.other_s))
    ratio, low, high = (row.ratio[name] for name in ("median", "low", "high"))
    return (
        f"{row.dtype:<9} {row.load:<14} {row.num_requests:>3}  {own:>8}, {row.against} "
        f"{other:>8}: {ratio:5.2f} ({low:.2f} to {high:.2f}) ×"
    )


def breakdown_line(found: dict[str, Any]) -> str:
    """Where a step goes, in percent."""
    whole = sum(found["parts"].values())
    shares = (f"{name} {100 * s / whole:.1f} %" for name, s in found["parts"].items())
    kind = (
        f"{found['dtype']:<9} {found['kernels']:<5} {found['num_requests']} in a step"
    )
    return f"{kind}, {quantity(whole, 's')}: {', '.join(shares)}"
