"""Chapters in, modules out: what `book.py export` writes, made in memory.

read_cells  a chapter's cells            Draft      a module while its cells come in
check_order who may import what          finish     ruff's layout, and lines traced back
"""

import ast
import difflib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PACKAGE = "minivllm"
HEADER = "# Exported from chapters/"
LAZY = "from __future__ import annotations"
RUFF_OPTIONS = [
    *("--quiet", "--isolated", "--no-cache"),
    *("--line-length=88", "--target-version=py311"),
    *("--config=src=[]", f'--config=lint.isort.known-first-party=["{PACKAGE}"]'),
]


class BookError(Exception):
    """One line for the author: where, what is wrong, what to do."""


# ---- Chapters and their cells --------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    path: Path
    line: int  # of the first source line in the chapter, from 1
    kind: str  # "code" | "markdown"
    source: str
    meta: dict[str, Any]

    @property
    def chapter(self) -> int:
        return int(self.path.name[:2])

    def at(self, row: int = 1) -> str:
        return place(self.path, self.line + row - 1)


def place(path: Path, line: int) -> str:
    return f"{path.parent.name}/{path.name}:{line}"


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # CRLF becomes LF
    except UnicodeDecodeError as error:
        raise BookError(f"{place(path, 1)}: {error}: save it as UTF-8") from None


def read_cells(path: Path) -> list[Cell]:
    """Jupytext's percent format: cells begin with `# %%`, lines of prose with `# `."""
    rows = read_text(path).split("\n")
    marks = [i for i, row in enumerate(rows) if row.startswith("# %%")]
    ends = [*marks[1:], len(rows)]
    return [_cell(path, rows, i, end) for i, end in zip(marks, ends, strict=False)]


def _cell(path: Path, rows: list[str], mark: int, end: int) -> Cell:
    form = re.fullmatch(r"# %%( \[markdown\])?(| .*)", rows[mark].rstrip())
    try:  # export="radix.py" tags=["hide"]: names with JSON values
        pairs = re.sub(r" ([\w-]+)=", r',"\1":', form[2] if form else "?")
        meta = json.loads("{" + pairs.removeprefix(",") + "}")
    except ValueError:
        where = place(path, mark + 1)
        raise BookError(
            f'{where}: a cell begins `# %%` or `# %% key="value"`'
        ) from None
    first = mark + 1
    while first < end - 1 and not rows[first].strip():
        first += 1
    body, kind = rows[first:end], "code"
    if form and form[1]:
        body, kind = [re.sub("^# ?", "", row) for row in body], "markdown"
    return Cell(path, first + 1, kind, "\n".join(body).rstrip(), meta)


def parse(cell: Cell) -> ast.Module:
    try:
        return ast.parse(cell.source)
    except SyntaxError as error:
        if "export" not in cell.meta:
            return ast.Module([], [])  # perhaps on purpose: running it will show it
        where = cell.at(error.lineno or 1)
        raise BookError(f"{where}: {error.msg}: export plain Python only") from None


# ---- Cells gathered into modules -----------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of the package and the chapter line it came from (None: generated)."""

    text: str
    path: Path | None = None
    line: int = 0


BLANK = Line("")


@dataclass(frozen=True)
class Module:
    name: str  # "radix.py"
    chapter: int
    lines: list[Line]

    @property
    def text(self) -> str:
        return "".join(line.text + "\n" for line in self.lines)


@dataclass
class Draft:
    """A module while its cells come in."""

    first: Cell
    names: dict[str, tuple[str, str]]  # of the whole chapter: name -> module, place
    doc: list[Line] = field(default_factory=list)
    imports: list[Line] = field(default_factory=list)
    blocks: list[list[Line]] = field(default_factory=list)
    classes: dict[str, list[Line]] = field(default_factory=dict)  # some of the blocks

    def lines(self) -> list[Line]:
        head = f"{HEADER}{self.first.path.name}. Edit the chapter, not this file."
        body = [line for block in self.blocks for line in block]
        return [Line(head), *self.doc, BLANK, *self.imports, BLANK, *body]

    def add(self, cell: Cell) -> None:
        tree = parse(cell)
        documented = cell is self.first and ast.get_docstring(tree) is not None
        for node, lines in _statements(cell, tree):
            if documented and node is tree.body[0]:
                self.doc += lines
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports += lines
            elif isinstance(node, ast.ClassDef) and _reopens(node):
                self.reopen(cell, node, lines)
            else:
                self.define(cell, node, lines)
        self.blocks.append([BLANK])

    def define(self, cell: Cell, node: ast.stmt | None, lines: list[Line]) -> None:
        self.blocks.append(lines)
        self.claim(cell, [node] if node else [])
        if isinstance(node, ast.ClassDef):
            self.classes[node.name] = lines
            self.claim(cell, node.body, f"{node.name}.")

    def reopen(self, cell: Cell, node: ast.ClassDef, lines: list[Line]) -> None:
        """Merge the body of `class X(X):` into the class X."""
        head = 0
        while not lines[head].text.startswith(("class ", "@")):
            head += 1  # a comment above
        if fault := self.objection(node, lines[head].text):
            raise BookError(f"{cell.at(node.lineno)}: {fault}")
        self.claim(cell, node.body, f"{node.name}.")
        indent = " " * node.body[0].col_offset
        above = [Line(indent + x.text, x.path, x.line) for x in lines[:head] if x.text]
        self.classes[node.name] += [BLANK, *above, *lines[head + 1 :]]

    def objection(self, node: ast.ClassDef, head: str) -> str:
        """Why this body cannot be merged as it stands; "" when it can."""
        name, first = node.name, self.classes.get(node.name, [])
        if not first:
            return f"{name} is reopened, but not defined before in this module"
        plain = re.fullmatch(rf"class {name}\({name}\):\s*(#.*)?", head)
        if not plain or ast.get_docstring(node):
            return f"reopen with `class {name}({name}):` only, and no docstring"
        decorated = any(x.text.startswith("@") for x in first)
        if decorated and any(isinstance(x, ast.AnnAssign) for x in node.body):
            return f"a decorator sees the first body of {name} only: put fields there"
        return ""

    def claim(self, cell: Cell, body: Iterable[ast.stmt], owner: str = "") -> None:
        """Refuse a second definition: in a notebook it would replace the first."""
        for node in body:
            here = cell.meta["export"], cell.at(node.lineno)
            for name in _defined(node):
                first = self.names.setdefault(owner + name, here)
                if first != here:
                    fault = f"{owner}{name} is defined already at {first[1]}"
                    raise BookError(f"{here[1]}: {fault}: remove or rename one of them")


def _statements(
    cell: Cell, tree: ast.Module
) -> Iterator[tuple[ast.stmt | None, list[Line]]]:
    """Each top-level statement, with comments above it and indented ones below it."""
    texts = cell.source.split("\n")
    rows = [Line(text, cell.path, cell.line + i) for i, text in enumerate(texts)]
    end = 0
    for node in tree.body:
        start, end = end, node.end_lineno or 0
        while end < len(rows) and (not rows[end].text or rows[end].text[0].isspace()):
            end += 1
        yield node, rows[start:end]
    if end < len(rows):
        yield None, rows[end:]


def _reopens(node: ast.ClassDef) -> bool:
    return node.name in [ast.unparse(base) for base in node.bases]


def _defined(node: ast.stmt) -> list[str]:
    """Names bound by a definition or an assignment; overloads and setters add none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
        again = re.search(r"\b(overload|setter|getter|deleter|register)\b", marks)
        return [] if again else [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    names = [x for y in targets for x in ast.walk(y) if isinstance(x, ast.Name)]
    return [x.id for x in names if isinstance(x.ctx, ast.Store)]


def gather(cells: Iterable[Cell]) -> dict[str, Draft]:
    """The modules in the order in which the book begins them."""
    drafts: dict[str, Draft] = {}
    names: dict[int, dict[str, tuple[str, str]]] = defaultdict(dict)
    for cell in (c for c in cells if "export" in c.meta):
        module = cell.meta["export"]
        if not re.fullmatch(r"(\w+/)*\w+\.py", str(module)) or not cell.chapter:
            raise BookError(f'{cell.at()}: export="name.py", and not from chapter 0')
        draft = drafts.setdefault(module, Draft(cell, names[cell.chapter]))
        if draft.first.path != cell.path:
            fault = f"{module} belongs to the chapter of {draft.first.at()}"
            raise BookError(f"{cell.at()}: {fault}: export to a module of this chapter")
        draft.add(cell)
    return drafts


# ---- Who may import what -------------------------------------------------------------


def imported(tree: ast.AST, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Each import of the package, at any depth: its line and the module it needs."""
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"{PACKAGE if node.level else ''}.{node.module or ''}".strip(".")
            inner = [f"{base}.{alias.name}" for alias in node.names]
            targets = [x if _file(x) in names else base for x in inner]
        for target in (x for x in targets if x.split(".")[0] == PACKAGE):
            yield getattr(node, "lineno", 1), _file(target)


def _file(dotted: str) -> str:
    """`minivllm.radix` is radix.py; `minivllm` is __init__.py."""
    return ("/".join(dotted.split(".")[1:]) or "__init__") + ".py"


def check_order(cells: Iterable[Cell], drafts: dict[str, Draft]) -> None:
    """A module imports modules that began before it; a chapter, its own and earlier."""
    rank = {name: i for i, name in enumerate(drafts)}
    for cell in (c for c in cells if c.kind == "code" and c.chapter):
        own = cell.meta.get("export")
        for row, name in imported(parse(cell), drafts):
            if name not in drafts:
                raise BookError(f"{cell.at(row)}: no chapter exports {PACKAGE}/{name}")
            home = drafts[name].first
            if rank[name] >= rank[own] if own else home.chapter > cell.chapter:
                fault = f"{name} begins later, at {home.at()}"
                raise BookError(f"{cell.at(row)}: {fault}: import what exists by then")


def complete(drafts: dict[str, Draft]) -> bool:
    """Add imports for undefined names; False when there is nothing left to add.

    A notebook is one namespace: a name may be defined in another module of its
    chapter. And a class that is reopened may name, in an annotation, a class that
    comes after its first body; Python is then told to leave annotations alone.
    """
    rank = {name: i for i, name in enumerate(drafts)}
    undefined = _undefined(drafts)
    known = {name: {x.text for x in draft.imports} for name, draft in drafts.items()}
    for user, line, word in undefined:
        where, draft = place(drafts[user].first.path, line.line), drafts[user]
        home, _ = draft.names.get(word, ("", ""))
        if not home:
            raise BookError(f"{where}: {word}: define or import it in an export cell")
        dotted = f"{PACKAGE}/{home}".removesuffix(".py").replace("/", ".")
        more = LAZY if home == user else f"from {dotted} import {word}"
        if rank[home] > rank[user] or more in known[user]:
            raise BookError(f"{where}: {word} is defined only later, in {home}")
        draft.imports.append(Line(more, line.path, line.line))
    return bool(undefined)


def _undefined(drafts: dict[str, Draft]) -> list[tuple[str, Line, str]]:
    """The names that ruff finds undefined: module, line, name (or a syntax error)."""
    lines = {name: draft.lines() for name, draft in drafts.items()}
    _, report = _ruff(lines, "check --exit-zero --select=F821 --output-format=json")
    found: list[tuple[str, Line, str]] = []
    for fault in json.loads(report):
        user = Path(fault["filename"]).as_posix().rsplit(f"/{PACKAGE}/")[-1]
        line = lines[user][fault["location"]["row"] - 1]
        name = re.fullmatch("Undefined name `(.*)`", fault["message"])
        found.append((user, line, name[1] if name else fault["message"]))
    return found


# ---- Layout, and the way back to the chapter -----------------------------------------


@lru_cache(maxsize=8)
def build(chapters: tuple[tuple[Path, str], ...]) -> dict[str, Module]:
    """The modules of these chapters; their texts are given to know when they change."""
    cells = [cell for path, _ in chapters for cell in read_cells(path)]
    drafts = gather(cells)
    check_order(cells, drafts)
    while complete(drafts):
        pass
    lines = {name: draft.lines() for name, draft in drafts.items()}
    texts, _ = _ruff(lines, "check --fix --exit-zero --select=I,F401,UP037", "format")
    return {
        name: Module(name, draft.first.chapter, trace(lines[name], texts[name]))
        for name, draft in drafts.items()
    }


def _ruff(modules: dict[str, list[Line]], *commands: str) -> tuple[dict[str, str], str]:
    """Run ruff over the modules; their new texts, and what the last command printed."""
    if not modules:
        return {}, "[]"
    files = [f"{PACKAGE}/{name}" for name in modules]
    with TemporaryDirectory() as folder:
        for file, lines in zip(files, modules.values(), strict=True):
            path = Path(folder, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(Module(file, 0, lines).text.encode())
        for command in commands:
            call = [sys.executable, "-m", "ruff", *command.split(), *RUFF_OPTIONS]
            call += files
            done = subprocess.run(
                call, cwd=folder, capture_output=True, encoding="utf-8"
            )
            if done.returncode:
                raise BookError(f"ruff {command} failed: {done.stderr.strip()}")
        texts = [read_text(Path(folder, file)) for file in files]
    return dict(zip(modules, texts, strict=True)), done.stdout


def trace(lines: list[Line], text: str) -> list[Line]:
    """Give each line that ruff wrote the chapter line it came from."""
    new = text.split("\n")[:-1]
    pair = [x.text.strip() for x in lines], [x.strip() for x in new]
    found: list[Line] = []
    for tag, *span in difflib.SequenceMatcher(None, *pair, False).get_opcodes():
        old = lines[span[0] : span[1]]
        if tag != "equal":  # one line became several, or several one
            old = [x for x in old if x.text] or [BLANK]
        for i, text in enumerate(new[span[2] : span[3]]):
            source = old[min(i, len(old) - 1)]
            found.append(Line(text, source.path, source.line))
    return found
