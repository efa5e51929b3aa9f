"""Each chapter's notebook is checked with the modules that its readers know by then."""

import os
import sys
from functools import cache
from pathlib import Path

import pytest

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Before torch is imported: beside one another, they share the cores.
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers)))
    )

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "chapters"))

import book  # noqa: E402

_environment = pytest.MonkeyPatch()
_for_chapter = cache(book.kernel_environment)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """nbval starts a kernel in the setup of a notebook's first cell, or restarts it
    later; a kernel inherits the environment of that moment."""
    if item.path.suffix != ".ipynb" or item.path.parent != ROOT / "chapters":
        return
    try:
        variables = _for_chapter(ROOT, int(item.path.name[:2]))
    except book.BookError as error:
        pytest.fail(str(error), pytrace=False)
    for name, value in variables.items():
        _environment.setenv(name, value)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _environment.undo()
