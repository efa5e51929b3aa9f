"""The ways back to a chapter: from the package, from Jupyter, from a traceback.

where   a line of either -> of the other    carry_package  what was edited in minivllm/
frames  the calls of a traceback            carry_cells    what was edited in Jupyter

Nothing is written here: the callers get the chapters' new texts, or a BookError.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from exporter import (
    BLANK,
    KEYS,
    PACKAGE,
    BookError,
    Cell,
    Line,
    Module,
    build,
    digest,
    read_cells,
)

FRAME = re.compile(r"Cell In\[(\d+)\], line (\d+)|minivllm[/\\][\w/\\]+\.py:\d+")
Modules = Mapping[str, Module]
Texts = Mapping[Path, str]
Edit = tuple[int, int, list[str]]  # the rows start:end of a chapter become these


# ---- Lines ---------------------------------------------------------------------------


def places(modules: Modules) -> dict[str, str]:
    """Each line of the package -> its chapter line."""
    return {
        f"{PACKAGE}/{name}:{i}": line.at
        for name, module in modules.items()
        for i, line in enumerate(module.lines, 1)
        if line.path
    }


def where(modules: Modules, spot: str) -> str:
    there = places(modules)
    back = {chapter: line for line, chapter in reversed(there.items())}
    if spot not in there | back:
        remedy = f"name a line like {PACKAGE}/radix.py:120 or chapters/03_radix.py:245"
        raise BookError(f"{spot}: blank, generated or not exported: {remedy}")
    return (there | back)[spot]


def frames(
    trace: str, cells: Iterable[Cell], modules: Modules
) -> list[tuple[str, str]]:
    """The calls of a traceback, outermost first: chapter line, and IPython's words."""
    ran = [cell for cell in cells if cell.kind == "code" and cell.source]
    there, found = places(modules), []
    for call in FRAME.finditer(re.sub(r"\x1b\[[\d;]*m", "", trace)):
        spot = call[0].replace("\\", "/")
        if call[1]:
            found.append((ran[int(call[1]) - 1].at(int(call[2])), spot))
        else:
            found.append((there.get(spot, spot), spot))
    return found


# ---- Edits in the package ------------------------------------------------------------


def carry_package(
    modules: Modules, edited: Mapping[str, str], texts: Texts
) -> dict[Path, str]:
    """The chapters that export these modules just as they were edited."""
    rows = {path: text.split("\n") for path, text in texts.items()}
    for path, chapter in rows.items():
        mine = [m for n, m in modules.items() if n in edited and m.path == path]
        edits = [x for m in mine for x in _edits(m, edited[m.name], chapter)]
        for start, end, new in sorted(edits, reverse=True):  # from the last line up
            chapter[start:end] = new
    carried = {path: "\n".join(chapter) for path, chapter in rows.items()}
    again = build(tuple(carried.items()))
    for name, module in modules.items():
        _compare(name, edited.get(name, module.text), again.get(name))
    return carried


def _compare(name: str, want: str, module: Module | None) -> None:
    """Refuse unless the chapters give the edited text; its header knows the old one."""
    rows = want.split("\n"), (module.text if module else "").split("\n")
    for i, (a, b) in enumerate(zip_longest(*rows), 1):
        if i > 1 and a != b:
            raise _refusal(f"{PACKAGE}/{name}:{i}", f"export would write `{b}`")


def _refusal(spot: str, why: str) -> BookError:
    remedy = "edit the chapter, then `python chapters/book.py export --force`"
    return BookError(f"{spot}: cannot be carried back: {why}: {remedy}")


def _edits(module: Module, text: str, rows: Sequence[str]) -> Iterator[Edit]:
    """Compare line by line, each with the blank lines above it."""
    spot, was, new = f"{PACKAGE}/{module.name}", _chunks(module.text), _chunks(text)
    if new[:1] != was[:1]:
        raise _refusal(f"{spot}:1", "the first line, or the chapter, was edited too")
    old = [BLANK, *(line for line in module.lines if line.text), BLANK]
    for tag, i, k, j, m in SequenceMatcher(None, was, new, False).get_opcodes():
        if tag != "equal":
            row = "".join(new[: j + 1]).rstrip("\n").count("\n") + 1
            yield _edit(f"{spot}:{row}", old[i : k + 2], new[j:m], rows)


def _chunks(text: str) -> list[str]:
    return re.findall(r"\n*[^\n]+\n", text + "\n")


def _edit(
    spot: str, lines: Sequence[Line], new: Sequence[str], rows: Sequence[str]
) -> Edit:
    """All lines but the first and the last become the new ones."""
    before, *touched, after = lines
    text, joined = "".join(new), _adjoin(before, lines[1], rows)
    loose = text.startswith("\n") and after.path and not joined  # belongs to neither
    _check(spot, touched or [before, after][: 1 + bool(loose)], rows)
    if not touched:
        start = end = before.line
    else:
        start, end = before.line if joined else touched[0].line - 1, touched[-1].line
        text = text if joined else text.lstrip("\n")
    above = touched[0] if touched else before  # a comment above `class X(X):` moved in
    shift = _indent(above.text) - _indent(rows[above.line - 1])
    text = re.sub(rf"^ {{{max(shift, 0)}}}", "", text, flags=re.M)
    return start, end, text.split("\n")[:-1]


def _check(spot: str, lines: Sequence[Line], rows: Sequence[str]) -> None:
    """Lines can be replaced if the chapter has them so, and next to each other."""
    for line in lines:
        if not line.path or line.text.strip() != rows[line.line - 1].strip():
            raise _refusal(spot, f"{line.at} is not written so, or generated")
    for one, other in pairwise(lines):
        if not _adjoin(one, other, rows):
            raise _refusal(spot, f"{one.at} and {other.at} are in two cells")


def _adjoin(one: Line, other: Line, rows: Sequence[str]) -> bool:
    """Whether two lines of the package follow each other in a cell."""
    between = "".join(rows[one.line : other.line - 1])
    return bool(one.path and one.line < other.line and not between.strip())


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


# ---- Edits in a notebook -------------------------------------------------------------


def marked(kind: str, source: str, meta: Mapping[str, Any]) -> str:
    """A cell as its chapter writes it."""
    head = "# %%" if kind == "code" else f"# %% [{kind}]"
    for key in (key for key in KEYS if meta.get(key)):
        head += f" {key}={json.dumps(meta[key], ensure_ascii=False)}"
    rows = source.strip("\n").rstrip().split("\n")
    if kind == "markdown":
        rows = [f"# {row}" if row else "#" for row in rows]
    return "\n".join([head, *rows])


def mark_all(path: Path, text: str) -> list[str]:
    return [
        marked(cell.kind, cell.source, cell.meta) for cell in read_cells(path, text)
    ]


def cell_ids(path: Path, number: int) -> list[str]:
    """nbformat's own ids are random."""
    return [f"{path.name[:2]}-{i:03d}" for i in range(number)]


def carry_cells(path: Path, text: str, nb: Any) -> str:
    """The chapter with what somebody edited in its notebook since the run."""
    ours, base = mark_all(path, text), nb.metadata.get("book", {}).get("cells", [])
    theirs = [marked(c.cell_type, c.source, c.metadata) for c in nb.cells]
    moved = [cell.id for cell in nb.cells] != cell_ids(path, len(base))
    if ours == theirs:
        return text
    if moved or any(cell.get("attachments") for cell in nb.cells):
        raise _lost(path, "has cells added, removed or moved, or pasted pictures")
    parts = re.split(r"^(?=# %%)", text, flags=re.M)
    for i, new in enumerate(theirs):
        mine = digest(ours[i]) if len(ours) == len(base) else "another"
        if digest(new) not in (base[i], mine):
            if mine != base[i]:
                raise _lost(
                    path, f"has cell {nb.cells[i].id} edited, and so has the .py"
                )
            parts[i + 1] = new + ("\n\n" if i + 1 < len(base) else "\n")
    carried = "".join(parts)
    if len(read_cells(path, carried)) != len(parts) - 1:
        raise _lost(path, "has a line `# %%` inside a cell")
    return carried


def _lost(path: Path, why: str) -> BookError:
    remedy = f"edit chapters/{path.name}, then python chapters/book.py run"
    told = f"chapters/{path.stem}.ipynb: it {why}: {remedy} {path.name[:2]} --force"
    return BookError(told)
