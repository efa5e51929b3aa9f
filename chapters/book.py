"""The chapters are the source: export them to `minivllm/`, run them, check both.

    python chapters/book.py export           write minivllm/ from the chapters
    python chapters/book.py run [03 ...]     run stale chapters, store their outputs
    python chapters/book.py check            does everything agree with the chapters?
    python chapters/book.py stage 03         write the package as chapter 3 sees it

A chapter is a file of cells. The cells `# %% export="radix.py"` of one chapter, in
order, make `minivllm/radix.py`. A class that grows over several cells is reopened in
plain Python, `class RadixCache(RadixCache):`; its bodies are merged into one class.
`exporter.py` does that; here the result meets the disk and the kernels.
"""

import argparse
import ast
import difflib
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import exporter
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


# ---- The package on disk -------------------------------------------------------------


def chapter_paths(root: Path) -> list[Path]:
    return sorted((root / "chapters").glob("[0-9][0-9]_*.py"), key=lambda p: p.name)


def build_package(root: Path, chapter: int = 0) -> dict[str, Module]:
    """The modules that a chapter may import, in the order of the book; 0: all."""
    texts = ((path, exporter.read_text(path)) for path in chapter_paths(root))
    modules = exporter.build(tuple(texts)).items()
    seen = {n: m for n, m in modules if not chapter or m.chapter <= chapter}
    seen.setdefault("__init__.py", Module("__init__.py", 0, []))  # until one exports it
    return seen


def export(root: Path) -> list[str]:
    """Write minivllm/ from the chapters; the names of the files that changed."""
    return _sync(root / PACKAGE, build_package(root))


def stage(root: Path, chapter: int) -> Path:
    """Write the package as this chapter sees it; the folder belongs on PYTHONPATH."""
    folder = root / "build" / "stage" / f"{chapter:02d}"
    _sync(folder / PACKAGE, build_package(root, chapter))
    return folder


def _sync(folder: Path, modules: dict[str, Module]) -> list[str]:
    """Write the modules, remove those exported before; the names that changed."""
    changed = [n for n, module in modules.items() if _write(folder / n, module.text)]
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name not in modules and exporter.read_text(path).startswith(HEADER):
            path.unlink()
            changed.append(name)
    return changed


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


def differences(root: Path) -> str:
    """A unified diff from the package on disk to what the chapters say."""
    folder = root / PACKAGE
    have = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*.py")}
    want = {name: module.text for name, module in build_package(root).items()}
    diff: list[str] = []
    for name in sorted({*have, *want}):
        old = have[name].read_bytes().decode() if name in have else "(no such file)\n"
        new = want.get(name, "(no chapter exports this file)\n")
        rows = old.splitlines(keepends=True), new.splitlines(keepends=True)
        diff += difflib.unified_diff(*rows, f"{PACKAGE}/{name}", "chapters")
    return "".join(diff)


# ---- Stored notebooks ----------------------------------------------------------------


def notebook(root: Path, path: Path) -> tuple[Any, bool]:
    """The chapter as a notebook, with its stored outputs when they are fresh."""
    nb, old, key = _blank(path), _stored(path), _key(root, path)
    fresh = old is not None and old.metadata.book.key == key
    if fresh:
        for cell, twin in zip(_code(nb), _code(old), strict=True):
            cell.outputs, cell.execution_count = twin.outputs, twin.execution_count
    return _sealed(nb, key), fresh


def _blank(path: Path) -> Any:
    from nbformat import v4  # slow to import, and `export` needs none of it

    nb = v4.new_notebook()
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nb.metadata.language_info = {"name": "python"}
    for i, cell in enumerate(read_cells(path)):
        new = v4.new_code_cell if cell.kind == "code" else v4.new_markdown_cell
        pinned = f"{path.name[:2]}-{i:03d}"  # nbformat's own ids are random
        nb.cells.append(new(cell.source, id=pinned, metadata=dict(cell.meta)))
    return nb


def _stored(path: Path) -> Any:
    """The notebook beside the chapter, None if there is none; refused if edited."""
    import nbformat

    stored = path.with_suffix(".ipynb")
    if not stored.exists():
        return None
    try:
        nb = nbformat.reads(exporter.read_text(stored), as_version=4)
        if nb.metadata.book.seal == _digest(nb.cells):
            return nb
    except (ValueError, AttributeError):
        pass  # a merge left its marks in it, or Jupyter wrote it
    remedy = f"carry edits to {path.name}, then {_command(path)} --force"
    raise BookError(f"chapters/{stored.name}: it was edited after its run: {remedy}")


def _command(path: Path) -> str:
    return f"python chapters/book.py run {path.name[:2]}"


def _sealed(nb: Any, key: str) -> Any:
    """The key tells stale outputs; the seal, whether anybody edited the notebook."""
    nb.metadata.book = {"key": key, "seal": _digest(nb.cells)}
    return nb


def _dump(nb: Any) -> str:
    import nbformat

    return str(nbformat.writes(nb)) + "\n"


def _code(nb: Any) -> list[Any]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _key(root: Path, path: Path) -> str:
    """A digest of what outputs depend on: the code and the modules that it imports."""
    code = [cell for cell in read_cells(path) if cell.kind == "code"]
    modules = build_package(root, int(path.name[:2]))
    used: set[str] = set()
    todo: list[ast.AST] = [exporter.parse(cell) for cell in code]
    while todo:
        names = {name for _, name in exporter.imported(todo.pop(), modules)}
        todo += [ast.parse(modules[name].text) for name in names & {*modules} - used]
        used |= names & {*modules}
    if "__init__.py" in used:  # it knows all names
        used = set(modules)
    parts = [[c.source, "raises-exception" in c.meta.get("tags", [])] for c in code]
    return _digest([parts, [[name, modules[name].text] for name in sorted(used)]])


def stale(root: Path) -> list[str]:
    """One line for each stored notebook that does not say what its chapter says."""
    faults: list[str] = []
    for path in chapter_paths(root):
        name = f"chapters/{path.stem}.ipynb"
        try:
            nb, fresh = notebook(root, path)
        except BookError as error:
            faults.append(str(error))
            continue
        if not fresh or any(c.source and not c.execution_count for c in _code(nb)):
            faults.append(f"{name}: missing, stale or stripped: {_command(path)}")
        elif (root / name).read_bytes() != _dump(nb).encode():
            faults.append(f"{name}: its text is not the chapter's: {_command(path)}")
        else:
            files = ((root / "figures" / name, svg) for name, svg in pictures(nb))
            wrong = [file for file, svg in files if not _says(file, svg)]
            faults += [
                f"figures/{f.name}: not its chapter's: {_command(path)}" for f in wrong
            ]
    return faults


def pictures(nb: Any) -> Iterator[tuple[str, str]]:
    """What cells with `figure="name.svg"` draw, as files that stand alone."""
    for cell in (c for c in _code(nb) if "figure" in c.metadata):
        shown = "".join(
            out.get("data", {}).get("text/html", "") for out in cell.outputs
        )
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
    """Run the chapters whose outputs are stale; write each notebook beside its .py."""
    for path in _chosen(root, only):
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
        raise BookError(_failure(read_cells(path)[begun[-1]], str(error))) from None
    nb.metadata.language_info = {"name": "python"}  # the kernel added its version
    for cell in _code(nb):
        cell.outputs = _settle(cell.outputs)
    return _sealed(nb, key)


def _failure(cell: Cell, trace: str) -> str:
    """Where a cell failed, and the last line of its traceback."""
    rows = re.sub(r"\x1b\[[\d;]*m", "", trace).strip().splitlines()
    found = re.search(r"Cell In\[\d+\], line (\d+)", "\n".join(rows))
    return (
        f"{cell.at(int(found[1]))}: {rows[-1]}" if found else f"{cell.at()}: {rows[0]}"
    )


def _settle(outputs: Iterable[Any]) -> list[Any]:
    """Join the pieces of a stream; drop metadata and paths of this machine."""
    settled: list[Any] = []
    for out in outputs:
        if out.output_type == "error":
            out.traceback = [f"{out.ename}: {out.evalue}"]
        elif out.output_type != "stream":
            out.metadata = {}
        elif settled and settled[-1].get("name") == out.name:
            settled[-1].text += out.text
            continue
        settled.append(out)
    return settled


# ---- Command line --------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("command", choices=["export", "run", "check", "stage"])
    parser.add_argument("chapters", nargs="*", metavar="NN")
    parser.add_argument("--force", action="store_true", help="run fresh chapters too")
    options = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # diffs anywhere, progress in pipes
        sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)
    try:
        return _obey(Path(__file__).resolve().parent.parent, options)
    except (BookError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _obey(root: Path, options: argparse.Namespace) -> int:
    if options.command == "export":
        for name in export(root):
            print(f"{PACKAGE}/{name}: changed")
    elif options.command == "run":
        run(root, options.chapters, options.force)
    elif options.command == "stage":
        for path in _chosen(root, options.chapters):
            print(stage(root, int(path.name[:2])))
    else:
        faults = [fault for fault in [differences(root), *stale(root)] if fault]
        print("\n".join([*faults, ""]), end="")
        return int(bool(faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())
