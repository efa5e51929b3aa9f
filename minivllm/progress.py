# Exported from chapters/06_weights_and_words.py (90a6abf5): edit the chapter.
"""A bar on a terminal, for what takes long. Needs no torch."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0  # what is done by then needs no bar


@contextmanager
def progress_bar(
    title: str, total: int, wanted: bool = True
) -> Iterator[Callable[[int], None]]:
    """A function that is told how much more is done; it draws on a terminal only."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(file=sys.stderr), transient=True)
    task, began = bar.add_task(title, total=total), time.monotonic()

    def advance(amount: int) -> None:
        bar.advance(task, amount)
        if not bar.live.is_started and time.monotonic() - began > PATIENCE_S:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
