"""What the book says about its runs, held against what the runs printed.

numbers    `[71,232](#forwards)`: the cell named forwards must have printed 71,232
claims     claims.toml against the cells that carry claims="R07 R08"
exercises  each has a solution, and behind it a cell that checks it

`faults` has one line for each place that says something else than its cells, `page` is
the site's table of claims, `student` the notebook that readers download.
"""

import ast
import copy
import html
import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from exporter import BookError, Cell, read_cells, read_text

TABLE = "chapters/claims.toml"
Claim = dict[str, str]  # kind, fact and, once shown, verdict and measured
KINDS = ("N", "B", "D", "A")  # number, behaviour, idea, advice
VERDICTS = ("confirmed", "sign only", "contradicted")
GROUPS = {
    "R": "Two identical requests",
    "V": "Requests in one batch",
    "S": "A radix cache",
}
LINK = re.compile(r"\[([^\[\]]+)\]\((?:(\d\d_\w+)\.md)?#([\w-]+)\)")
SPELLED = ["zero", "", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


# ---- Cells and what they printed -----------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A cell, and what its stored run printed (None: it was not run as it stands)."""

    cell: Cell
    printed: str | None = None

    @property
    def name(self) -> str:
        return str(self.cell.meta.get("name", ""))

    @property
    def claims(self) -> list[str]:
        return str(self.cell.meta.get("claims", "")).split()

    @property
    def asserts(self) -> str:
        """The conditions that the cell asserts: they held, or it would not have run."""
        found = [x for x in ast.walk(parse(self.cell)) if isinstance(x, ast.Assert)]
        return " ".join(ast.unparse(x.test) for x in found)


def shown(root: Path) -> Iterator[Shown]:
    """All cells of the book, and the home page as one cell."""
    for path in sorted((root / "chapters").glob("[0-9][0-9]_*.py")):
        runs = iter(stored(path.with_suffix(".ipynb")))
        for cell in read_cells(path):
            run = next(runs, None) if cell.kind == "code" else None
            same = run and "".join(run["source"]) == cell.source
            yield Shown(cell, printed(run) if same else None)
    home = root / "chapters" / "index.md"
    if home.exists():
        yield Shown(Cell(home, 1, "markdown", read_text(home), {}))


def stored(path: Path) -> list[Any]:
    """The code cells of a stored notebook; none if there is nothing to read."""
    try:
        cells = json.loads(read_text(path))["cells"]
    except (OSError, ValueError, KeyError):
        return []  # `book.py check` says so
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(run: Any) -> str:
    """What a cell printed, drew or raised; not captions, which somebody typed."""
    parts: list[str] = []
    for out in run["outputs"]:
        data = out.get("data", {})
        drawn = "".join(data.get("text/html") or data.get("image/svg+xml") or "")
        plain = out.get("text") or data.get("text/plain") or out.get("evalue", "")
        words = re.sub(r"<figcaption.*?</figcaption>|<[^>]*>", " ", drawn, flags=re.S)
        parts.append(html.unescape(words) if drawn else "".join(plain))
    return "\n".join(parts)


def parse(cell: Any) -> ast.Module:
    try:
        return ast.parse(str(cell.source))
    except SyntaxError:
        return ast.Module([], [])  # wrong on purpose: its traceback is the point


def numbers(text: str) -> set[str]:
    """The numbers in a text, without signs and thousands separators."""
    joined = re.sub(r"(?<=\d)[,_](?=\d{3}(?!\d))", "", text)
    return set(re.findall(r"(?<![\w.])(?:\d+(?:\.\d+)?|\.\d+)", joined))


# ---- Names, numbers in prose, exercises ----------------------------------------------


def faults(root: Path) -> list[str]:
    """One line for each place that says something else than its cells: where, what."""
    try:
        cells, claims = list(shown(root)), read_claims(root)
    except BookError as error:
        return [str(error)]
    found = [*name_faults(cells), *number_faults(cells)]
    for _, part in groupby(cells, key=lambda x: x.cell.path):
        found += exercise_faults(list(part))
    return [*found, *claim_faults(cells, claims), *verdict_faults(cells, claims)]


def name_faults(cells: Iterable[Shown]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for one in (x for x in cells if x.name):
        where = one.cell.at()
        first = seen.setdefault(f"{one.cell.path} {one.name}", where)
        if first != where:
            yield f"{where}: the name {one.name} is taken at {first}: choose another"


def number_faults(cells: Sequence[Shown]) -> Iterator[str]:
    """Numbers in prose that link to a cell which did not print them."""
    named = {(x.cell.path.stem, x.name): x for x in reversed(cells) if x.name}
    for cell in (x.cell for x in cells if x.cell.kind == "markdown"):
        for link in LINK.finditer(cell.source):
            where = cell.at(1 + cell.source.count("\n", 0, link.start()))
            words, name = " ".join(link[1].split()), link[3]
            target = named.get((link[2] or cell.path.stem, name))
            if target is None and re.match(r"[\d.−+-]+\b", words):
                fault = f"{words} is said to come from `{name}`, and no cell has"
                remedy = f'mend the link, or give the cell name="{name}"'
                yield f"{where}: {fault} that name: {remedy}"
            elif target and not says(target, words):
                output = textwrap.shorten(target.printed or "", 70)
                fault = f"prose says {words}, cell `{name}` printed: {output}"
                yield f"{where}: {fault}: mend the prose or the cell"


def says(target: Shown, words: str) -> bool:
    """Whether a cell printed these numbers; "one" is not taken for a number."""
    named = [word for word in re.findall("[a-z]+", words.lower()) if word in SPELLED]
    needed = numbers(words) | {str(SPELLED.index(word)) for word in named}
    return target.printed is None or needed <= numbers(target.printed)


def exercise_faults(cells: Sequence[Shown]) -> Iterator[str]:
    """An exercise without a solution, a solution without a check behind it."""
    code = [x for x in cells if x.cell.kind == "code"]
    solutions = [i for i, x in enumerate(code) if tagged(x.cell.meta)]
    for i in solutions:
        if not any(x.asserts for x in code[i + 1 : i + 2]):
            remedy = "let the next code cell assert its answer"
            yield f"{code[i].cell.at()}: no cell checks this solution: {remedy}"
    asked = headings(cells, "Exercise") or headings(cells, "Exercises")
    if asked and len(asked) != len(solutions):
        fault = f"exercises here: {len(asked)}, cells tagged solution: {len(solutions)}"
        remedy = "give each a heading, such as `### Exercise 2`, and one solution"
        yield f"{asked[0]}: {fault}: {remedy}"


def headings(cells: Sequence[Shown], word: str) -> list[str]:
    """Where the headings lie that begin with a word."""
    return [
        cell.at(row)
        for cell in (x.cell for x in cells if x.cell.kind == "markdown")
        for row, line in enumerate(cell.source.split("\n"), 1)
        if re.match(rf"#+ {word}\b", line)
    ]


# ---- Claims --------------------------------------------------------------------------


def read_claims(root: Path) -> dict[str, Claim]:
    path = root / TABLE
    try:
        return tomllib.loads(read_text(path)) if path.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise BookError(f"{TABLE}: {error}: mend it") from None


def claim_faults(cells: Iterable[Shown], claims: dict[str, Claim]) -> Iterator[str]:
    """Cells that carry claims which nobody made, or which have no verdict."""
    for one in (x for x in cells if x.claims):
        where = one.cell.at()
        if not one.name:
            yield f'{where}: it carries claims: give it name="...", for links to it'
        for key in one.claims:
            if key not in claims:
                yield f"{where}: no claim {key}: mend the id, or enter it in {TABLE}"
            elif "verdict" not in claims[key]:
                yield f"{where}: {key} has no verdict: enter one in {TABLE}"


def verdict_faults(cells: Sequence[Shown], claims: dict[str, Claim]) -> Iterator[str]:
    """Entries of claims.toml that are no claims, or that no cell bears out."""
    for key, claim in claims.items():
        if fault := objection(claim, [x for x in cells if key in x.claims], key):
            yield f"{TABLE}: {key}: {fault}"


def objection(claim: Claim, carriers: Sequence[Shown], key: str) -> str:
    """What is wrong with an entry; "" if nothing is."""
    verdict, measured = claim.get("verdict"), claim.get("measured", "")
    if key[0] not in GROUPS or claim.get("kind") not in KINDS or not claim.get("fact"):
        return f"begin its id with one of {', '.join(GROUPS)}, give kind and fact"
    if verdict is None:
        return "remove `measured`, or enter a verdict" if measured else ""
    if verdict not in VERDICTS:
        return f"the verdict is one of: {', '.join(VERDICTS)}"
    if not carriers:
        return f'no cell carries claims="{key}": mark the cell, or remove the verdict'
    if claim["kind"] == "N" and not numbers(measured):
        return "say in `measured` which number came out"
    known = " ".join(f"{x.printed} {x.asserts}" for x in carriers)
    wrong = numbers(measured) - numbers(known)
    if wrong and all(x.printed is not None for x in carriers):
        places = ", ".join(x.cell.at() for x in carriers)
        return f"{', '.join(sorted(wrong))} was not printed at {places}: mend it"
    return ""


def not_shown(root: Path) -> list[str]:
    """The claims without a verdict, a line each."""
    claims = read_claims(root).items()
    return [f"{k}: {c['fact']}" for k, c in claims if "verdict" not in c]


def page(root: Path) -> str:
    """The site's table: claim, cell, verdict, what was measured."""
    cells, claims = list(shown(root)), read_claims(root)
    found = [claim.get("verdict", "not yet shown") for claim in claims.values()]
    counts = [f"{found.count(v)} {v}" for v in (*VERDICTS, "not yet shown")]
    lines = ["# Claims and what we measured", "", f"{len(claims)} claims of three"]
    lines[-1] += f" articles on prefix reuse: {', '.join(counts)}."
    for letter, title in GROUPS.items():
        lines += ["", f"## {title}", ""]
        lines += ["| id | claim | shown in | what we found |", "|---|---|---|---|"]
        rows = [(k, c) for k, c in claims.items() if k.startswith(letter)]
        lines += [row(k, c, [x for x in cells if k in x.claims]) for k, c in rows]
    return "\n".join(lines) + "\n"


def row(key: str, claim: Claim, carriers: Iterable[Shown]) -> str:
    links = (
        f"[{x.cell.chapter} {x.name}]({x.cell.path.stem}.md#{x.name})" for x in carriers
    )
    found = f"**{claim['verdict']}**" if "verdict" in claim else "not yet shown"
    if "measured" in claim:
        found += f": {claim['measured']}"
    return f"| {key} | {claim['fact']} | {', '.join(links)} | {found} |"


# ---- The student's notebook ----------------------------------------------------------

KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)  # of a solution


def student(nb: Any) -> Any:
    """A copy of a notebook with stubs for solutions, whose checks then fail."""
    nb = copy.deepcopy(nb)
    nb.metadata.pop("book", None)  # `book.py` does not watch over this one
    nb.cells = [c for c in nb.cells if c.cell_type == "code" or not tagged(c.metadata)]
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for i, cell in enumerate(code):
        if tagged(cell.metadata):
            later = [parse(c) for c in code[i + 1 :] if not tagged(c.metadata)]
            cell.source, names = stub(parse(cell), {x for c in later for x in used(c)})
            for one in code[i : i + 2]:
                one.outputs, one.execution_count = [], None
            code[i + 1].source = guard(names) + code[i + 1].source
    return nb


def tagged(meta: Any) -> bool:
    return "solution" in meta.get("tags", [])


def used(tree: ast.AST) -> Iterator[str]:
    names = (x for x in ast.walk(tree) if isinstance(x, ast.Name))
    return (x.id for x in names if isinstance(x.ctx, ast.Load))


def guard(names: Sequence[str]) -> str:
    """Whatever a check does with `...`, it shall fail with clear words."""
    values = ", ".join(names)
    what = f"the cell above does not say yet: {values}"
    return f'assert not any(x is ... for x in [{values}]), "{what}"\n' if names else ""


def stub(tree: ast.Module, wanted: set[str]) -> tuple[str, list[str]]:
    """A solution without its answers, and the names that it leaves open."""
    kept = [hollow(node) for node in tree.body if isinstance(node, KEPT)]
    rest = [x for y in tree.body if not isinstance(y, KEPT) for x in ast.walk(y)]
    names = [x for x in rest if isinstance(x, ast.Name) and x.id in wanted]
    left = list(dict.fromkeys(x.id for x in names if isinstance(x.ctx, ast.Store)))
    parts = ["# Your turn.", *map(ast.unparse, kept), *(f"{x} = ..." for x in left)]
    return "\n".join(parts), left


def hollow(node: ast.stmt) -> ast.stmt:
    """A function keeps signature and docstring; a class, its fields and methods."""
    if isinstance(node, ast.ClassDef):
        kept = [x for x in node.body if isinstance(x, (*KEPT, ast.AnnAssign))]
        node.body = [hollow(x) for x in kept] or [ast.Pass()]
    elif isinstance(node, ast.FunctionDef):
        doc = node.body[:1] if ast.get_docstring(node) else []
        node.body = [*doc, *ast.parse("raise NotImplementedError('your turn')").body]
    return node
