"""The book of this repository: package, notebooks and chapters say the same."""

import os
import subprocess
import sys
from pathlib import Path

import book
import pytest

ROOT = Path(book.__file__).resolve().parent.parent
CHAPTERS = book.chapter_paths(ROOT)
CONTROL_PLANE = [
    *("request", "hashing", "radix", "pages", "prefix_cache", "batch", "drawing"),
    *("scheduler", "engine", "events", "simulation", "publication", "single_flight"),
    *("grouping", "explain"),
]

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


def test_the_package_is_what_the_chapters_export() -> None:
    """Protects "the chapters are the source", and with it the book's order rule."""
    found = book.differences(ROOT)
    assert not found, f"{found}\nrun `python chapters/book.py export`"


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


@pytest.mark.parametrize("command", ["format --check", "check"])
def test_the_package_is_clean(command: str) -> None:
    """Protects "reads like code written by hand": ruff has nothing to say."""
    done = run("-m", "ruff", *command.split(), "minivllm")
    assert done.returncode == 0, done.stdout + done.stderr


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
