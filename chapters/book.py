"""The chapters are the source: export them to `minivllm/`, run them, check both.

    python chapters/book.py run [03 ...]     export, run stale chapters, store outputs
    python chapters/book.py check            does everything agree with the chapters?
    python chapters/book.py export           write minivllm/ from the chapters
    python chapters/book.py untangle         carry edits of minivllm/ and .ipynb back
    python chapters/book.py where FILE:LINE  package line -> chapter line, or back

A chapter is a file of cells. The cells `# %% export="radix.py"` of one chapter, in
order, make `minivllm/radix.py`. A class that grows over several cells is reopened in
plain Python, `class RadixCache(RadixCache):`; its bodies are merged into one class.
`exporter.py` does that, `untangle.py` the way back; here both meet disk and kernels.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import claims
import exporter
import untangle
from exporter import HEADER, PACKAGE, BookError, Cell, Line, Module, read_cells

__all__ = ["BookError", "Cell", "Line", "Module", "read_cells"]  # and all of this file

KERNEL_OPTIONS = {  # the same outputs everywhere, nothing downloaded, no progress bars
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",  # a stage may change twice within a second
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",
}
DARK = "<style>@media (prefers-color-scheme:dark){svg{color:#e6e6e6}}</style>"
COMMAND = "python chapters/book.py"
RECORD = re.compile(r"figures/(?:measured|published)/[\w.-]+\.json")


# ---- The package on disk -------------------------------------------------------------


def chapter_paths(root: Path) -> list[Path]:
    return sorted((root / "chapters").glob("[0-9][0-9]_*.py"), key=lambda p: p.name)


def chapter_texts(root: Path) -> dict[Path, str]:
    return {path: exporter.read_text(path) for path in chapter_paths(root)}


def build_package(root: Path, chapter: int = 0) -> dict[str, Module]:
    """The modules that a chapter may import, in the order of the book; 0: all."""
    modules = exporter.build(tuple(chapter_texts(root).items())).items()
    seen = {n: m for n, m in modules if not chapter or m.chapter <= chapter}
    seen.setdefault("__init__.py", Module("__init__.py", 0, []))  # until one exports it
    return seen


def export(root: Path, force: bool = False) -> list[str]:
    """Write minivllm/ from the chapters; the names of the files that changed."""
    edited = [] if force else [x for x in differences(root) if "edited" in x]
    if edited:
        raise BookError(f"{edited[0]}; or give it up: {COMMAND} export --force")
    return _sync(root / PACKAGE, build_package(root))


def stage(root: Path, chapter: int) -> Path:
    """Write the package as this chapter sees it; the folder belongs on PYTHONPATH."""
    folder = root / "build" / "stage" / f"{chapter:02d}"
    _sync(folder / PACKAGE, build_package(root, chapter))
    return folder


def _sync(folder: Path, modules: dict[str, Module]) -> list[str]:
    """Write the modules, remove those exported before; the names that changed."""
    changed = [n for n, module in modules.items() if _write(folder / n, module.text)]
    for name, path in _files(folder).items():
        if name not in modules and exporter.read_text(path).startswith(HEADER):
            path.unlink()
            changed.append(name)
    return changed


def _files(folder: Path) -> dict[str, Path]:
    return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*.py"))}


def _write(path: Path, text: str) -> bool:
    """Write UTF-8 with LF; False when the file says so already."""
    try:
        if _says(path, text):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    except OSError as error:
        remedy = "make its folder writable and run this again"
        raise BookError(f"{path}: {error.strerror}: {remedy}") from None
    return True


def _says(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() == text.encode()


def differences(root: Path) -> list[str]:
    """One line for each file of the package that is not what the chapters say."""
    have, want = _files(root / PACKAGE), build_package(root)
    faults: list[str] = []
    for name in sorted({*have, *want}):
        spot = f"{PACKAGE}/{name}"
        if name not in have:
            faults.append(f"{spot}: missing: {COMMAND} export")
        elif name not in want:
            faults.append(
                f"{spot}: no chapter exports it: move it to one, or remove it"
            )
        elif not _says(have[name], want[name].text):
            faults.append(
                spot + _difference(want[name], exporter.read_text(have[name]))
            )
    return faults


def _difference(module: Module, text: str) -> str:
    lines = zip_longest(text.split("\n"), [*module.lines, exporter.BLANK])
    rows = [i for i, (a, b) in enumerate(lines, 1) if not b or a != b.text]
    row = rows[1] if rows[1:] and rows[0] == 1 else rows[0]  # the header knows the rest
    spot = module.lines[row - 1].at if row <= len(module.lines) else "its end"
    if exporter.is_sealed(text):
        return f":{row}: not as {spot} says: {COMMAND} export"
    return f":{row}: edited, {spot} says otherwise: {COMMAND} untangle"


def carry_back(root: Path) -> list[str]:
    """Carry what was edited in notebooks and package to the chapters, or nothing."""
    old = chapter_texts(root)
    new = {path: stored(path)[1] for path in old}
    modules, files = exporter.build(tuple(new.items())), _files(root / PACKAGE)
    texts = {n: exporter.read_text(files[n]) for n in modules if n in files}
    edited = {n: text for n, text in texts.items() if not exporter.is_sealed(text)}
    new = untangle.carry_package(modules, edited, new)
    changed = [path for path in old if _write(path, new[path])]
    for name, module in build_package(root).items() if edited else []:
        _write(root / PACKAGE / name, module.text)
    return [f"chapters/{path.name}: changed" for path in changed]


# ---- Stored notebooks ----------------------------------------------------------------


def notebook(root: Path, path: Path) -> tuple[Any, bool]:
    """The chapter as a notebook, with its stored outputs when they are fresh."""
    nb, key, (old, text) = _blank(path), _key(root, path), stored(path)
    if text != exporter.read_text(path):
        remedy = f"{_command(path)} carries that to {path.name}"
        raise BookError(f"chapters/{path.stem}.ipynb: edited after its run: {remedy}")
    fresh = old is not None and old.metadata.book.key == key
    if fresh:
        for cell, twin in zip(_code(nb), _code(old), strict=True):
            cell.outputs, cell.execution_count = twin.outputs, twin.execution_count
    return _sealed(root, path, nb, key), fresh


def _blank(path: Path) -> Any:
    from nbformat import v4  # slow to import, and `export` needs none of it

    nb, cells = v4.new_notebook(), read_cells(path)
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nb.metadata.language_info = {"name": "python"}
    for cell, pinned in zip(cells, untangle.cell_ids(path, len(cells)), strict=True):
        new = v4.new_code_cell if cell.kind == "code" else v4.new_markdown_cell
        nb.cells.append(new(cell.source, id=pinned, metadata=dict(cell.meta)))
    return nb


def stored(path: Path) -> tuple[Any, str]:
    """The notebook as the last run left it, or None; the chapter with edits of it."""
    import nbformat

    beside, text = path.with_suffix(".ipynb"), exporter.read_text(path)
    if not beside.exists():
        return None, text
    try:
        nb = nbformat.reads(exporter.read_text(beside), as_version=4)
    except (ValueError, AttributeError):
        remedy = f"remove it (after a merge: take either side), then {_command(path)}"
        raise BookError(f"chapters/{beside.name}: not a notebook: {remedy}") from None
    if nb.metadata.get("book", {}).get("seal") == _digest(nb.cells):
        return nb, text
    return None, untangle.carry_cells(path, text, nb)


def _command(path: Path) -> str:
    return f"{COMMAND} run {path.name[:2]}"


def _sealed(root: Path, path: Path, nb: Any, key: str) -> Any:
    """The key tells stale outputs; the seal, whether anybody edited the notebook."""
    for out in (out for cell in _code(nb) for out in cell.outputs):
        if out.output_type == "error":
            calls = _frames(root, path, "\n".join(out.traceback[:-1]))
            rows = [f"{spot} ({call})" for spot, call in calls]
            out.traceback = [*rows, f"{out.ename}: {out.evalue}"]
    marks = untangle.mark_all(path, exporter.read_text(path))
    digests = [exporter.digest(mark) for mark in marks]
    nb.metadata.book = {"key": key, "seal": _digest(nb.cells), "cells": digests}
    return nb


def _frames(root: Path, path: Path, trace: str) -> list[tuple[str, str]]:
    return untangle.frames(trace, read_cells(path), build_package(root))


def _dump(nb: Any) -> str:
    import nbformat

    return str(nbformat.writes(nb)) + "\n"


def _code(nb: Any) -> list[Any]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def _digest(data: Any) -> str:
    return exporter.digest(json.dumps(data, sort_keys=True))


def _key(root: Path, path: Path) -> str:
    """A digest of what outputs depend on: code, imported modules, records it names."""
    code = [cell for cell in read_cells(path) if cell.kind == "code"]
    modules = build_package(root, int(path.name[:2]))
    used: set[str] = set()
    todo: list[ast.AST] = [exporter.parse(cell) for cell in code]
    while todo:
        names = {name for _, name in exporter.imported(todo.pop(), modules)}
        todo += [ast.parse(modules[name].text) for name in names & {*modules} - used]
        used |= names & {*modules}
    parts = [[c.source, "raises-exception" in c.meta.get("tags", [])] for c in code]
    named = {name for cell in code for name in RECORD.findall(cell.source)}
    records = [root / name for name in sorted(named) if (root / name).is_file()]
    texts = [modules[name].text for name in sorted(used)]
    texts += [exporter.read_text(path) for path in records]
    return _digest([parts, sorted(used), [path.name for path in records], texts])


def stale(root: Path) -> list[str]:
    """One line for each stored notebook that does not say what its chapter says."""
    faults = [_stale(root, path) for path in chapter_paths(root)]
    return [fault for fault in faults if fault]


def _stale(root: Path, path: Path) -> str:
    name, remedy = f"chapters/{path.stem}.ipynb", _command(path)
    try:
        nb, fresh = notebook(root, path)
    except BookError as error:
        return str(error)
    if not fresh or any(c.source and not c.execution_count for c in _code(nb)):
        return f"{name}: missing, stale or stripped: {remedy}"
    if not _says(root / name, _dump(nb)):
        return f"{name}: its text is not the chapter's: {remedy}"
    for figure, svg in pictures(nb):
        if not _says(root / "figures" / figure, svg):
            return f"figures/{figure}: not its chapter's: {remedy}"
    return ""


def pictures(nb: Any) -> Iterator[tuple[str, str]]:
    """What cells with `figure="name.svg"` draw, as files that stand alone."""
    for cell in (c for c in _code(nb) if "figure" in c.metadata):
        shown = "".join(x.get("data", {}).get("text/html", "") for x in cell.outputs)
        svg = re.search("<svg.*?</svg>", shown, re.DOTALL)
        if not svg:
            raise BookError(f"{cell.id}: figure={cell.metadata.figure}: it drew no SVG")
        yield cell.metadata.figure, svg[0].replace(">", f">{DARK}", 1) + "\n"


# ---- Running chapters ----------------------------------------------------------------


def run(
    root: Path,
    only: Sequence[str] = (),
    force: bool = False,
    report: Callable[[str], Any] = print,
) -> None:
    """Export, run the chapters whose outputs are stale, write each .ipynb beside it."""
    paths = _chosen(root, only)
    for path in [] if force else paths:
        if _write(path, stored(path)[1]):
            report(f"chapters/{path.name}: got what was edited in its .ipynb")
    export(root)
    for path in paths:
        began, done = time.perf_counter(), "unchanged"
        nb, fresh = (None, False) if force else notebook(root, path)
        if not fresh:
            nb = _execute(root, path)
            done = f"run in {time.perf_counter() - began:.1f} s"
        if _write(path.with_suffix(".ipynb"), _dump(nb)) and fresh:
            done = "new text, same outputs"
        for name, svg in pictures(nb):
            _write(root / "figures" / name, svg)
        report(f"chapters/{path.name}: {done}")


def _chosen(root: Path, only: Sequence[str]) -> list[Path]:
    paths, starts = chapter_paths(root), [f"{number:0>2}" for number in only]
    for start in starts:
        if not any(path.name.startswith(start) for path in paths):
            raise BookError(f"no chapter {start}: give the NN of a chapters/NN_*.py")
    return [path for path in paths if path.name.startswith(tuple(starts or [""]))]


def kernel_environment(root: Path, chapter: int) -> dict[str, str]:
    """The chapter's kernel imports its own and earlier modules, and no later ones."""
    paths = [str(stage(root, chapter)), os.environ.get("PYTHONPATH", "")]
    return {
        **KERNEL_OPTIONS,
        "IPYTHONDIR": str(root / "build" / "ipython"),  # nobody's own profile
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def _execute(root: Path, path: Path) -> Any:
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal

    nb, key, begun = _blank(path), _key(root, path), [0]
    client = NotebookClient(
        nb,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=lambda cell, cell_index: begun.append(cell_index),
    )
    try:
        more = kernel_environment(root, int(path.name[:2]))
        client.execute(env={**os.environ, **more})
    except (CellControlSignal, RuntimeError) as error:  # it failed, or its kernel did
        calls = _frames(root, path, getattr(error, "traceback", ""))
        raise _failure(calls, read_cells(path)[begun[-1]].at(), str(error)) from None
    nb.metadata.language_info = {"name": "python"}  # the kernel added its version
    for cell in _code(nb):
        cell.outputs = _settle(cell.outputs)
    return _sealed(root, path, nb, key)


def _failure(calls: list[tuple[str, str]], cell: str, trace: str) -> BookError:
    """Where it failed, the last line of the traceback, and the cell's line."""
    rows = re.sub(r"\x1b\[[\d;]*m", "", trace).strip().splitlines()
    if not calls:
        return BookError(f"{cell}: {rows[0]}")
    called = f" (called at {calls[0][0]})" if len(calls) > 1 else ""
    return BookError(f"{calls[-1][0]}: {rows[-1]}{called}")


def _settle(outputs: Iterable[Any]) -> list[Any]:
    """Join the pieces of a stream; drop metadata of this machine."""
    settled: list[Any] = []
    for out in outputs:
        if out.output_type == "stream" and settled:
            if settled[-1].get("name") == out.name:
                settled[-1].text += out.text
                continue
        elif "metadata" in out:
            out.metadata = {}
        settled.append(out)
    return settled


# ---- Command line --------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = ["run", "check", "export", "untangle", "where"]
    parser.add_argument("command", choices=commands)
    parser.add_argument("words", nargs="*", metavar="NN | FILE:LINE")
    parser.add_argument(
        "--force", action="store_true", help="run fresh chapters; overwrite edits"
    )
    options = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # ≈ anywhere, progress in pipes
        sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)
    try:
        lines = obey(Path(__file__).resolve().parent.parent, options)
        print("\n".join([*lines, ""]), end="")
        return int(options.command == "check" and bool(lines))
    except (BookError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def obey(root: Path, options: argparse.Namespace) -> list[str]:
    """Do what the command line asks; the lines to print at its end."""
    words, force = options.words, options.force
    if options.command == "export":
        return [f"{PACKAGE}/{name}: changed" for name in export(root, force)]
    if options.command == "untangle":
        return carry_back(root)
    if options.command == "where":
        return [untangle.where(build_package(root), spot) for spot in words]
    if options.command == "run":
        run(root, words, force)
        return []
    return [*differences(root), *stale(root), *claims.faults(root)]


def other_python(root: Path) -> str:
    """The environment's Python, when this one lacks what the book needs; else ""."""
    if all(find_spec(name) for name in ("nbformat", "nbclient", "ruff")):
        return ""
    names = ("Scripts/python.exe", "bin/python")
    found = [p for p in (root / ".venv" / name for name in names) if p.exists()]
    if not found or found[0].parent.parent.samefile(sys.prefix):
        sys.exit(
            "the book's packages are not installed: python run.py run installs them"
        )
    return str(found[0])


if __name__ == "__main__":
    if python := other_python(Path(__file__).resolve().parent.parent):
        sys.exit(subprocess.call([python, *sys.argv]))
    sys.exit(main())
