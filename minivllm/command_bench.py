# Exported from chapters/15_measuring.py (c452fcf1): edit the chapter.
"""The command `minivllm bench`: what is measured, each under its own name."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm.bench import Row, make_record
from minivllm.bench_cache import OWN_MANAGERS, OWN_TREES, CacheBench
from minivllm.cli import SCHEMA_VERSION
from minivllm.peers import invite

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
    if record is not None and (record.is_dir() or not record.parent.is_dir()):
        raise ValueError(f"--record: {record} is a folder, or in none that is there")
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
    given = [f"--{name} {value}" for name, value in facts.items()]
    given += [f"--page-size {size}" for size in work.page_sizes]
    given += [f"--peer {name}" for name in peer or []]
    facts |= {"peers": guests.versions, "absent": guests.absent}
    command = " ".join(["minivllm bench cache", *given])
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
    if path is not None:
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(whole))
