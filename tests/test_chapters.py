"""The book of this repository: package, notebooks and chapters say the same."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import book
import pytest

ROOT = Path(book.__file__).resolve().parent.parent
CHAPTERS = book.chapter_paths(ROOT)
MACHINERY = [*sorted((ROOT / "chapters").glob("[a-z]*.py")), ROOT / "conftest.py"]
CONTROL_PLANE = [
    *("request", "hashing", "radix", "pages", "prefix_cache", "batch", "drawing"),
    *("scheduler", "engine", "events", "simulation", "publication", "single_flight"),
    *("grouping", "explain", "timeline", "bench", "bench_cache", "bench_reuse"),
    *("peers", "bench_serve", "progress", "workloads", "replay", "roofline"),
    *("request_log", "lint"),
]
NOT_CORE = ("server", "metrics", "cluster", "kernels/")  # of the 3,500 lines

pytestmark = pytest.mark.skipif(not CHAPTERS, reason="there are no chapters yet")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


# ---- Chapters, package, notebooks ----------------------------------------------------


def test_the_package_is_what_the_chapters_export() -> None:
    """Protects "the chapters are the source"; each line says what to do."""
    faults = book.differences(ROOT)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_jupyter_reads_the_same_cells(chapter: Path) -> None:
    """Protects `read_cells`: a chapter opened in Jupyter is the chapter we export."""
    jupytext = pytest.importorskip("jupytext")
    nb = jupytext.read(chapter, fmt="py:percent")
    ours = [(c.kind, c.source) for c in book.read_cells(chapter)]
    assert ours == [(c.cell_type, c.source.strip("\n")) for c in nb.cells]


def test_every_stored_notebook_is_of_its_chapter() -> None:
    """Protects the outputs on the site: fresh, complete, untouched since the run."""
    faults = book.stale(ROOT)
    assert not faults, "\n".join(faults)


def test_a_stored_notebook_stays_small_and_free_of_this_machine() -> None:
    """Protects the repository's size, and its bytes from the place where it was run."""
    for path in (ROOT / "chapters").glob("[0-9][0-9]_*.ipynb"):
        text = path.read_text(encoding="utf-8")
        assert len(text.encode()) <= 300_000, f"{path.name}: more than 300 kB"
        assert str(ROOT) not in text, f"{path.name}: an output names {ROOT}"
        assert '"image/png"' not in text, f"{path.name}: nbval compares only SVG"


# ---- Tools that read the code --------------------------------------------------------


@pytest.mark.parametrize("command", ["format --check", "check"])
def test_ruff_has_nothing_to_say(command: str) -> None:
    """Protects "reads like code written by hand": package, chapters, tests, tools."""
    what = ["chapters", "minivllm", "tests", "figures", "conftest.py", "run.py"]
    done = run("-m", "ruff", *command.split(), *what)
    remedy = "python -m ruff format . (for minivllm/: mend the chapter, then export it)"
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{remedy}"


def test_types() -> None:
    """Protects the promise of full type hints: package and machinery, strictly."""
    names = [str(path.relative_to(ROOT)) for path in [*MACHINERY, ROOT / "run.py"]]
    done = run("-m", "mypy", "--strict", "minivllm", *names)
    remedy = "python chapters/book.py where FILE:LINE names the chapter's line"
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{remedy}"


# ---- House rules ---------------------------------------------------------------------


def test_the_control_plane_imports_no_torch_and_no_numpy() -> None:
    """Protects the browser, the quick start and simulations by the million."""
    exist = [name for name in CONTROL_PLANE if (ROOT / f"minivllm/{name}.py").exists()]
    code = f"""
import importlib, sys
for name in {exist}:
    importlib.import_module("minivllm." + name)
    heavy = {{"torch", "numpy", "transformers"}} & set(sys.modules)
    assert not heavy, f"minivllm/{{name}}.py imports {{heavy}}"
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_modules_import_in_the_order_of_the_book() -> None:
    """Protects the order rule, seen from the package: `export` refuses it before."""
    modules = book.build_package(ROOT)
    rank = {name: i for i, name in enumerate(modules)}
    for name, module in modules.items():
        for row, other in book.exporter.imported(ast.parse(module.text), modules):
            spot = f"{module.lines[row - 1].at}: minivllm/{name} imports {other}"
            assert rank[other] < rank[name], f"{spot}, which begins later"


def test_house_rules_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what exceeds the sizes of the house; taste decides, not this test."""
    package = sorted((ROOT / "minivllm").rglob("*.py"))
    texts = {p: p.read_text(encoding="utf-8") for p in [*package, *MACHINERY]}
    sizes = {p.relative_to(ROOT).as_posix(): t.count("\n") for p, t in texts.items()}
    inside = {
        x.removeprefix("minivllm/"): n for x, n in sizes.items() if "minivllm" in x
    }
    core = sum(n for x, n in inside.items() if not x.startswith(NOT_CORE))
    tools = sum(sizes[p.relative_to(ROOT).as_posix()] for p in MACHINERY)
    long = [spot for path, text in texts.items() for spot in long_functions(path, text)]
    rows = [
        f"core {core} lines of 3,500, machinery {tools}; the largest files: "
        + ", ".join(
            f"{x} {sizes[x]}" for x in sorted(sizes, key=sizes.__getitem__)[-5:]
        ),
        f"{len(long)} functions of more than 15 lines:",
        *(f"  {n:3} {spot}" for n, spot in sorted(long, reverse=True)),
    ]
    with capsys.disabled():
        print("\nHouse rules:", *rows, sep="\n")


def long_functions(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Functions of more than 15 lines, without their signature and docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[bool(ast.get_docstring(node)) :] or node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1
            if lines > 15:
                spot = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                yield lines, f"{spot} {node.name}"


@pytest.mark.parametrize("page", ["README.md", "chapters/index.md"])
def test_tables_name_each_chapters_modules(page: str) -> None:
    """What the README and the home page say a chapter builds is what it exports."""
    exported: dict[int, set[str]] = {}
    for module in book.build_package(ROOT).values():
        exported.setdefault(module.chapter, set()).add(module.name)
    text = (ROOT / page).read_text("utf-8")
    for chapter in (int(path.name[:2]) for path in CHAPTERS):
        rows = re.findall(rf"^\| {chapter} \|.*$", text, re.MULTILINE)
        assert len(rows) == 1, f"{page}: one row for chapter {chapter}"
        said = set(re.findall(r"`(\w+\.py)`", rows[0]))
        assert said == exported.get(chapter, set()), f"{page}, chapter {chapter}"
