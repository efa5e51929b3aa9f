# Exported from chapters/17_log.py (a283a817): edit the chapter.
"""`minivllm explain`: where two prompts part, and what breaks reuse in a log."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minivllm.cli import SCHEMA_VERSION, AsJson
from minivllm.command_simulate import size_name, sizes_of
from minivllm.lint import (
    Asked,
    CacheName,
    CacheOnly,
    Encoder,
    Finding,
    Linter,
    Missing,
    rewrite,
)
from minivllm.options import CHOICES, EngineOptions, check_choice
from minivllm.progress import progress_bar
from minivllm.radix import shared_pages
from minivllm.request_log import Body, Line, bodies_of, read_log
from minivllm.timeline import check_place
from minivllm.workloads import LineReader


def add_to(root: typer.Typer) -> None:
    """Add this module's command to the command line."""
    root.command()(explain)


def explain(
    prompts: Annotated[
        list[str],
        typer.Argument(help="A log; or two prompts or chat requests, files or texts."),
    ],
    model: Annotated[
        str, typer.Option(help="Whose tokenizer: smollm2, a folder, .gguf, hub id.")
    ] = "smollm2",
    page_size: Annotated[
        str, typer.Option(help="Tokens in a page, a list.")
    ] = "1,16,32,64,128,256",
    index: Annotated[
        str, typer.Option(help="How a prefix is found, a list: radix, hash.")
    ] = "radix,hash",
    capacity: Annotated[
        str, typer.Option(help="Tokens that a cache has room for; 0: no bound.")
    ] = "1M",
    to: Annotated[
        Path | None,
        typer.Option("--rewrite", help="Write the log anew, with the breaks moved."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What breaks reuse? Compares two prompts, or the requests of a log.

    A log has a request on each line: OpenAI chat bodies (or batch files), ShareGPT
    conversations, prompts as text or in JSON, or a trace of token ids. It is played
    through the engine's own cache, one request at a time. The ranking is for the first
    index and pages of 16, or else the first size.
    """
    check_place(to, "--rewrite")
    (capacity_, *more), names = sizes_of(capacity), cache_names(index, page_size)
    if len(prompts) > 2 or more or (to and len(prompts) == 2):
        raise ValueError("one log, or two prompts and no --rewrite; and one --capacity")
    report, encoder = Report(names, capacity_), Encoder(lambda: load_parts(model))
    if len(prompts) == 2:
        pair = [read_prompt(each, encoder, i) for i, each in enumerate(prompts, 1)]
        report.add(pair)
        report.common = common_part(*pair)
    else:
        study(Path(prompts[0]), encoder, report, to)
    if as_json:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION} | report.as_json()))
    else:
        show(report, Console(highlight=False, force_jupyter=False))


def cache_names(index: str, page_size: str) -> list[CacheName]:
    """The caches that two lists ask for. Raises `ValueError`."""
    indexes, sizes = index.split(","), sizes_of(page_size)
    for each in indexes:
        check_choice("index", each, CHOICES["index"])
    if min(sizes) < 1:
        raise ValueError("--page-size must be at least 1")
    return list(dict.fromkeys(product(indexes, sizes)))


def load_parts(model: str) -> tuple[Any, Any]:
    """A model's tokenizer and chat template, without its weights."""
    from minivllm.chat import load_template
    from minivllm.loader import open_checkpoint  # torch begins here
    from minivllm.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(model)
    return load_tokenizer(checkpoint), load_template(checkpoint)


def read_prompt(given: str, encoder: Encoder, number: int) -> Asked:
    """One of two prompts: a file or a text, perhaps a chat request in JSON."""
    text, path, bodies = given, Path(given), []
    with suppress(OSError):  # a text may be too long for a name
        if path.is_file():
            text = read_text(path)
        elif path.is_dir() or (path.suffix in FILES and " " not in given):
            raise ValueError(f"{given} is not a file, and looks like one")
    if text.lstrip()[:1] in ("{", "["):
        with suppress(json.JSONDecodeError, RecursionError):
            bodies = bodies_of(json.loads(text), LineReader())
    if "\0" in text or len(bodies) > 1:
        raise ValueError(f"{given[:80]}: one prompt or request is wanted, as text")
    return encoder(number, bodies[0] if bodies else {"prompt": text})


def read_text(path: Path) -> str:
    """A file's text; what is no UTF-8 reads as a zero byte."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return "\0"


FILES = (".json", ".jsonl", ".txt", ".md")


def common_part(one: Asked, other: Asked) -> dict[str, Any]:
    """How much two prompts have in common, and what stands where they part."""
    common = shared_pages(one.ids.tobytes(), other.ids.tobytes(), 4)
    characters = other.char(common) if other.text else None
    sides = [
        {
            "ids": each.ids[common : common + 1].tolist(),
            "text": list(pieces(each, common)),
        }
        for each in (one, other)
    ]
    return {"tokens": common, "characters": characters, "sides": sides}


def pieces(asked: Asked, at: int) -> Iterator[str]:
    """Some tokens before a place, the one there, and some after, as text."""
    for start, end in ((max(0, at - 6), at), (at, at + 1), (at + 1, at + 7)):
        start, end = (min(each, len(asked.ids)) for each in (start, end))
        ids = " ".join(map(str, asked.ids[start:end]))
        yield asked.text[asked.char(start) : asked.char(end)] if asked.text else ids


@dataclass
class Report:
    """What was found, and in which caches."""

    names: list[CacheName]
    capacity: int
    faults: list[tuple[int, str]] = field(default_factory=list)  # line, what is wrong
    common: dict[str, Any] | None = None  # of two prompts
    tokens_after: int = 0

    def __post_init__(self) -> None:
        self.linter, self.after = Linter(self.caches()), self.caches()
        usual = (each for each in self.names if each[1] == EngineOptions.page_size)
        self.main = next(usual, self.names[0])

    def caches(self) -> dict[CacheName, CacheOnly]:
        """New ones."""
        return {name: CacheOnly(*name, self.capacity) for name in self.names}

    def add(self, prompts: Iterable[Asked]) -> None:
        """Play some prompts."""
        for asked in prompts:
            self.linter.add(asked)

    @property
    def findings(self) -> list[Finding]:
        """What costs most, first; of two prompts all."""
        return self.linter.findings(self.main, everything=self.common is not None)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        linter, found = self.linter, {"reused": self.linter.caches}
        found |= {"reused_after": self.after} if self.tokens_after else {}
        rows = [
            {"index": name[0], "page_size": name[1], "refused": linter.refused[name]}
            | {key: caches[name].reused for key, caches in found.items()}
            for name in self.names
        ]
        return {
            "requests": linter.requests,
            "prompt_tokens": linter.tokens,
            "prompt_tokens_after": self.tokens_after or None,
            "capacity": self.capacity,
            "common": self.common,
            "bad_lines": [{"line": n, "fault": fault} for n, fault in self.faults],
            "findings": [finding.as_json() for finding in self.findings],
            "caches": rows,
        }


def study(path: Path, encoder: Encoder, report: Report, to: Path | None) -> None:
    """Read a log to find what breaks reuse, and once more to try it without."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: a log is read twice")
    if to and to.exists() and to.samefile(path):
        raise ValueError(f"{path} is the file that --rewrite would write")
    with progress_bar("log", 2 * path.stat().st_size) as advance:
        for line, asked in prompts_in(path, encoder, advance):
            report.add(asked)
            report.faults += [(line.number, line.fault)] if line.fault else []
        if not report.linter.requests:
            first = "; line {}: {}".format(*report.faults[0]) if report.faults else ""
            raise ValueError(f"{path}: there is no request in it{first}")
        if to or any(each.movable for each in report.findings):
            change = partial(rewrite, findings=report.findings)
            lines = prompts_in(path, encoder, advance, change)
            with to.open("wb") if to else nullcontext() as file:
                for data in try_again(lines, report):
                    if file:
                        file.write(data + b"\n")
            for finding in report.findings:
                finding.tried = True


def keep(body: Body) -> None:
    """Change nothing."""


def prompts_in(
    path: Path,
    encoder: Encoder,
    advance: Callable[[int], object],
    change: Callable[[Body], object] = keep,
) -> Iterator[tuple[Line, list[Asked]]]:
    """The lines of a log with their prompts; a line that cannot be read has a fault."""
    for line in read_log(path):
        asked: list[Asked] = []
        try:
            for body in line.bodies:
                change(body)
                asked.append(encoder(line.number, body))
        except Missing:
            raise
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            line.fault, asked = str(error), []
        yield line, asked
        advance(len(line.raw))


def try_again(
    lines: Iterable[tuple[Line, list[Asked]]], report: Report
) -> Iterator[bytes]:
    """Play the changed log through new caches; its lines, bad ones as they were."""
    for line, asked in lines:
        report.tokens_after += sum(len(each.ids) for each in asked)
        for each, cache in product(asked, report.after.values()):
            with suppress(ValueError):  # it never fits
                cache.play(each.ids, each.key)
        if line.fault:
            yield line.raw.rstrip(b"\r\n")
        else:  # half a character stays an escape of JSON
            for text in line.written():
                yield text.encode("utf-8", "backslashreplace")


SHOWN = 48  # characters of a value, or bad lines


def counted(number: int, noun: str) -> str:
    """'1 request', '2 requests'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def show(report: Report, out: Console) -> None:
    """A report for people."""
    linter, size = report.linter, size_name(report.capacity)
    counts = counted(linter.requests, "request"), counted(linter.tokens, "prompt token")
    room = f"of {size} tokens" if report.capacity else "without bound"
    out.print(f"{', '.join(counts)}; caches {room}")
    if common := report.common:
        told = f"{counted(common['tokens'], 'token')} in common"
        if common["characters"] is not None:
            told += f", {counted(common['characters'], 'character')}"
        out.print(f"{told}; then")
        for side in common["sides"]:
            before, here, after = (repr(text)[1:-1] for text in side["text"])
            line = (
                Text("  ").append(before, "dim").append(here or "(the end)", "reverse")
            )
            out.print(line.append(after, "dim"))
    for number, finding in enumerate(report.findings, 1):
        out.print(in_words(number, finding))
    if not report.findings:
        out.print("no field breaks reuse", style="green")
    out.print(costs(report))
    for number, fault in report.faults[:SHOWN]:
        out.print(Text(f"line {number}: {fault}", "red"))
    if report.faults:
        out.print(f"lines that could not be read: {len(report.faults)}", style="red")


def in_words(number: int, finding: Finding) -> Text:
    """One row of the ranking."""
    told = finding.as_json()
    half = SHOWN // 2
    one, other = (
        repr(text if len(text) <= SHOWN else f"{text[:half]}…{text[-half:]}")
        for text in (told["here"], told["there"])
    )
    words = (
        Text(f"{number}. ")
        .append(finding.path, "cyan")
        .append(f", character {told['offset']}: ")
    )
    words.append(finding.cause, "bold yellow").append(
        f", in {counted(finding.requests, 'request')}\n   "
    )
    words.append(
        f"line {told['line']} has {one}, line {told['nearest_line']} {other}\n   "
    )
    done = f": done in {counted(finding.moved, 'request')}" if finding.moved else ""
    left = finding.remedy.startswith("left")
    return words.append(finding.remedy + done, "red" if left else "green")


def costs(report: Report) -> Table:
    """What each finding costs, and what was reused: a column for each page size."""
    sizes = list(dict.fromkeys(size for _, size in report.names))
    table = Table("tokens, with pages of", *map(str, sizes))
    rows: dict[tuple[str, ...], str] = {}  # -> the indexes of which it is true
    for index in dict.fromkeys(index for index, _ in report.names):
        for row in cost_rows(report, [(index, size) for size in sizes]):
            rows[row] = f"{rows[row]}, {index}" if row in rows else index
    for (words, *cells), indexes in rows.items():
        table.add_row(f"{words} ({indexes})", *cells)
    return table


def cost_rows(report: Report, names: list[CacheName]) -> Iterator[tuple[str, ...]]:
    """The rows of one index."""
    for number, finding in enumerate(report.findings, 1):
        yield f"lost to {number}", *(f"{finding.lost[name]:,}" for name in names)
    linter, total = report.linter, report.tokens_after
    yield "reused", *(f"{linter.caches[n].reused / linter.tokens:.1%}" for n in names)
    if total and any(finding.moved for finding in report.findings):
        yield "if moved", *(f"{report.after[n].reused / total:.1%}" for n in names)
