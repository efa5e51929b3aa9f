"""Chapters in, modules out: what `book.py export` writes, made in memory.

read_cells  a chapter's cells            Draft      a module while its cells come in
check_order who may import what          finish     ruff's layout, and lines traced back
"""

import ast
import difflib
import hashlib
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
KEYS = ("export", "name", "figure", "claims", "tags")  # of a cell's mark
LAZY = "from __future__ import annotations"
STEPS = (
    "check --exit-zero --fix --select=F401",  # imports that are used,
    "check --exit-zero --fix --select=I,UP037",  # sorted; annotations without quotes
    "format",
    "check --exit-zero --select=F811,F821 --output-format=json",  # names: none or two
)
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


def read_cells(path: Path, text: str | None = None) -> list[Cell]:
    """Jupytext's percent format: cells begin with `# %%`, lines of prose with `# `."""
    rows = (read_text(path) if text is None else text).split("\n")
    marks = [i for i, row in enumerate(rows) if row.startswith("# %%")]
    ends = [*marks[1:], len(rows)]
    return [_cell(path, rows, i, end) for i, end in zip(marks, ends, strict=True)]


def _cell(path: Path, rows: list[str], mark: int, end: int) -> Cell:
    form = re.fullmatch(r"# %%( \[markdown\])?(| .*)", rows[mark].rstrip())
    try:  # export="radix.py" tags=["hide"]: names with JSON values
        pairs = re.sub(r" ([\w-]+)=", r',"\1":', form[2] if form else "?")
        meta = json.loads("{" + pairs.removeprefix(",") + "}")
        if not {*meta} <= {*KEYS}:
            raise ValueError
    except ValueError:
        known = f'`# %% key="value"`, with the keys {", ".join(KEYS)}'
        where = place(path, mark + 1)
        raise BookError(f"{where}: a cell begins `# %%` or {known}") from None
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

    @property
    def at(self) -> str:
        return place(self.path, self.line) if self.path else "a generated line"


BLANK = Line("")


@dataclass(frozen=True)
class Module:
    name: str  # "radix.py"
    chapter: int
    lines: list[Line]

    @property
    def path(self) -> Path | None:
        return next((line.path for line in self.lines if line.path), None)

    @property
    def text(self) -> str:
        return "".join(line.text + "\n" for line in self.lines)


@dataclass
class Draft:
    """A module while its cells come in."""

    first: Cell
    names: dict[str, str]  # of the whole chapter: name -> module
    doc: list[Line] = field(default_factory=list)
    imports: list[Line] = field(default_factory=list)
    blocks: list[list[Line]] = field(default_factory=list)
    classes: dict[str, list[Line]] = field(default_factory=dict)  # some of the blocks

    def lines(self) -> list[Line]:
        body = [line for block in self.blocks for line in block]
        head = Line(HEADER + self.first.path.name)
        return [head, *self.doc, BLANK, *self.imports, BLANK, *body]

    def add(self, cell: Cell) -> None:
        tree = parse(cell)
        documented = cell is self.first and ast.get_docstring(tree) is not None
        for node, lines in _statements(cell, tree):
            if documented and node is tree.body[0]:
                self.doc += lines
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports += lines
            elif isinstance(node, ast.ClassDef) and node.name in _bases(node):
                self.reopen(cell, node, lines)
            else:
                self.define(cell, node, lines)
        self.blocks.append([BLANK])

    def define(self, cell: Cell, node: ast.stmt | None, lines: list[Line]) -> None:
        """A name has one home in its chapter: a notebook is one namespace."""
        self.blocks.append(lines)
        for name in _defined(node) if node else []:
            home = self.names.setdefault(name, cell.meta["export"])
            if home != cell.meta["export"]:
                where = cell.at(node.lineno if node else 1)
                raise BookError(f"{where}: {name} is in {home} too: rename one of them")
        if isinstance(node, ast.ClassDef):
            self.classes[node.name] = lines

    def reopen(self, cell: Cell, node: ast.ClassDef, lines: list[Line]) -> None:
        """Merge the body of `class X(X):` into the class X."""
        head = 0
        while not lines[head].text.startswith(("class ", "@")):
            head += 1  # a comment above
        name, first = node.name, self.classes.get(node.name, [])
        plain = re.fullmatch(rf"class {name}\({name}\):\s*(#.*)?", lines[head].text)
        fields = any(isinstance(x, ast.AnnAssign) for x in node.body)
        decorated = any(x.text.startswith("@") for x in first)  # sees the first body
        if not (first and plain) or ast.get_docstring(node) or (fields and decorated):
            form = f"reopen a class of this module by `class {name}({name}):` alone"
            rule = "no decorator, docstring or fields of a dataclass"
            raise BookError(f"{cell.at(node.lineno)}: {form}: {rule}")
        indent = " " * node.body[0].col_offset
        above = [Line(indent + x.text, x.path, x.line) for x in lines[:head] if x.text]
        self.classes[name] += [BLANK, *above, *lines[head + 1 :]]
        self.imports.append(Line(LAZY))  # it may name a class that comes after X


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


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def _defined(node: ast.stmt) -> list[str]:
    """The names that a definition or an assignment binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    names = [x for y in targets for x in ast.walk(y) if isinstance(x, ast.Name)]
    return [x.id for x in names if isinstance(x.ctx, ast.Store)]


def gather(cells: Iterable[Cell]) -> dict[str, Draft]:
    """The modules in the order in which the book begins them."""
    drafts: dict[str, Draft] = {}
    names: dict[int, dict[str, str]] = defaultdict(dict)
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
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [x if _file(x) in names else str(node.module) for x in inner]
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


# ---- Layout, and the way back to the chapter -----------------------------------------


@lru_cache(maxsize=8)
def build(chapters: tuple[tuple[Path, str], ...]) -> dict[str, Module]:
    """The modules that these chapters, paths and texts, export."""
    cells = [cell for path, text in chapters for cell in read_cells(path, text)]
    drafts = gather(cells)
    check_order(cells, drafts)
    share_names(drafts)
    if not drafts:
        return {}
    lines = {name: draft.lines() for name, draft in drafts.items()}
    texts, report = _ruff(lines)
    made = {name: trace(lines[name], texts[name]) for name in drafts}
    for fault in json.loads(report):
        name = Path(fault["filename"]).as_posix().rsplit(f"/{PACKAGE}/")[-1]
        at = made[name][fault["location"]["row"] - 1].at
        raise BookError(f"{at}: {fault['message']}: define, import or rename it")
    home = {name: draft.first.chapter for name, draft in drafts.items()}
    return {name: Module(name, home[name], sealed(made[name])) for name in drafts}


def share_names(drafts: dict[str, Draft]) -> None:
    """A notebook is one namespace: let modules import what their chapter defines.

    ruff removes what they do not use (but not from an `__init__.py`)."""
    for i, (user, draft) in enumerate(drafts.items()):
        own = typed_only(draft)
        for home in list(drafts)[:i] if user != "__init__.py" else []:
            dotted = f"{PACKAGE}/{home}".removesuffix(".py").replace("/", ".")
            names = [n for n, module in draft.names.items() if module == home]
            names = [name for name in names if name not in own]
            draft.imports += [Line(f"from {dotted} import {name}") for name in names]


def typed_only(draft: Draft) -> set[str]:
    """Names that a module imports for the type checker alone: a run shall not."""
    tree = ast.parse("\n".join(line.text for line in draft.lines()))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    blocks = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    inside = [node for block in blocks for node in block.body]
    found = [node.names for node in inside if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for names in found for alias in names}


def sealed(lines: list[Line]) -> list[Line]:
    """The header knows the text below it: so an edit made in the package shows."""
    text = "".join(line.text + "\n" for line in lines[1:])
    return [Line(f"{lines[0].text} ({digest(text)}): edit the chapter."), *lines[1:]]


def is_sealed(text: str) -> bool:
    """Whether a module on disk is as some export wrote it."""
    head, _, body = text.partition("\n")
    return not text or f" ({digest(body)}): " in head


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _ruff(modules: dict[str, list[Line]]) -> tuple[dict[str, str], str]:
    """Run ruff over the modules; their new texts, and what is wrong in them."""
    with TemporaryDirectory() as folder:
        files = {name: Path(folder, PACKAGE, name) for name in modules}
        for name, path in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(Module(name, 0, modules[name]).text.encode())
        for step in STEPS:
            call = [sys.executable, "-m", "ruff", *step.split(), *RUFF_OPTIONS, PACKAGE]
            done = subprocess.run(
                call, cwd=folder, capture_output=True, encoding="utf-8"
            )
            if done.returncode:
                raise BookError(f"ruff {step} failed: {done.stderr.strip()}")
        return {name: read_text(path) for name, path in files.items()}, done.stdout


def trace(lines: list[Line], text: str) -> list[Line]:
    """Give each line that ruff wrote the chapter line it came from."""
    new = text.split("\n")[:-1]
    pair = [x.text.strip() for x in lines], [x.strip() for x in new]
    sorted_away = {x.text: x for x in lines if x.text.startswith(("from ", "import "))}
    found: list[Line] = []
    for tag, *span in difflib.SequenceMatcher(None, *pair, False).get_opcodes():
        old = lines[span[0] : span[1]]
        if tag != "equal":  # one line became several, or several one
            old = [x for x in old if x.text] or [BLANK]
        for i, text in enumerate(new[span[2] : span[3]]):
            source = sorted_away.get(text) or old[min(i, len(old) - 1)]
            found.append(Line(text, source.path, source.line))
    return found
