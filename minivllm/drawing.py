# Exported from chapters/01_kv_cache.py (26aea9ea): edit the chapter.
"""Small SVG pictures from runs: rows of cells, trees, and steps through them.

One colour per page state and per kind of work, given as CSS variables with a fallback,
so that the site's light and dark themes can set them and a notebook elsewhere still
shows them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

PAGE_STATES = ("free", "private", "announced", "published", "pinned", "lost")
COLOURS = {  # what a cell shows -> its colour where no theme sets the variable
    "free": "#e3e6ea",
    "private": "#f6c667",
    "announced": "#d9b8f0",
    "published": "#9fd8ae",
    "pinned": "#8fc1f0",
    "lost": "#f2a59b",
    "computed": "#8b97c9",  # work, not a page: the tokens of a prompt
    "decoded": "#ccd3ec",  # one output token a step
    "plain": "#eeebe4",
}
CHAR = 6.7  # the width of a character at size 12, in pixels


@dataclass
class Picture:
    """An SVG under construction. Shows itself in a notebook."""

    caption: str = ""
    shapes: list[str] = field(default_factory=list, repr=False)
    width: float = 0.0
    height: float = 0.0

    def _grow(self, right: float, bottom: float) -> None:
        self.width, self.height = max(self.width, right), max(self.height, bottom)

    def text(
        self, x: float, y: float, words: str, anchor: str = "middle", on: str = ""
    ) -> None:
        """Write `words` with baseline y; `on` is the state of the box below them."""
        ink = f"var(--page-{on}-text, #1b1f24)" if on else "currentColor"
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
            f'style="fill:{ink}">{escape(words)}</text>'
        )
        share = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        self._grow(x + share * CHAR * len(words), y + 4)

    def box(
        self, x: float, y: float, w: float, h: float, state: str, words: str = ""
    ) -> None:
        """Draw a cell in one of the `COLOURS`, with words inside."""
        colour = f"var(--page-{state}, {COLOURS[state]})"
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" '
            f'style="fill:{colour};stroke:currentColor;stroke-width:.6"/>'
        )
        self._grow(x + w, y + h)
        if words:
            self.text(x + w / 2, y + h / 2 + 4, words, on=state)

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a thin line."""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
            'stroke="currentColor" stroke-width="1" opacity=".6"/>'
        )
        self._grow(max(x1, x2), max(y1, y2))

    def svg(self) -> str:
        """Return the picture as one SVG element."""
        size = f"{self.width + 8:.0f} {self.height + 8:.0f}"
        label = escape(self.caption)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {size}" '
            f'width="{self.width + 8:.0f}" role="img" aria-label="{label}" '
            'font-family="system-ui, sans-serif" font-size="12" '
            'style="max-width:100%;height:auto">'
            f"{''.join(self.shapes)}</svg>"
        )

    def _repr_html_(self) -> str:
        words = escape(self.caption)
        return f"<figure>{self.svg()}<figcaption>{words}</figcaption></figure>"


Cell = tuple[float, float, str, str]  # start, length, page state, words


def draw_rows(
    rows: Sequence[tuple[str, Iterable[Cell]]], *, unit: float = 0.0, caption: str = ""
) -> Picture:
    """Draw labelled rows of cells on one axis; `unit` is the width of 1 in pixels."""
    picture = Picture(caption)
    cells = [(label, list(row)) for label, row in rows]
    left = CHAR * max(len(label) for label, _ in cells) + 12
    end = max((c[0] + c[1] for _, row in cells for c in row), default=1)
    unit = unit or min(64.0, 620.0 / end)
    for i, (label, row) in enumerate(cells):
        y = i * 30.0
        picture.text(left - 8, y + 16, label, "end")
        for start, length, state, words in row:
            picture.box(left + start * unit, y, length * unit, 24, state, words)
    return picture


Step = Sequence[tuple[str, int, int]]  # chunks: request id, first position, tokens


def rows_of_steps(steps: Iterable[Step]) -> dict[str, list[Cell]]:
    """What each request computed, step by step, as cells for `draw_rows`.

    A step is 1 wide, and 1 more for every 32 tokens computed in it. Prompt
    chunks become cells with their size; decode steps in a row join into one cell.
    """
    rows: dict[str, list[Cell]] = {}
    now = 0.0
    for step in steps:
        width = 1 + sum(size for _, _, size in step) / 32
        for request_id, _, size in step:
            row = rows.setdefault(request_id, [])
            last = row[-1] if row else (0.0, 0.0, "", "")
            if size == 1 and last[2] == "decoded" and last[0] + last[1] == now:
                row[-1] = (last[0], last[1] + width, "decoded", "decodes")
            elif size == 1:
                row.append((now, width, "decoded", ""))
            else:
                row.append((now, width, "computed", str(size)))
        now += width
    return rows


@dataclass(frozen=True)
class Branch:
    """A node of a tree picture: lines of words, a page state, children."""

    words: str
    state: str = "plain"
    children: Sequence[Branch] = ()


def draw_tree(root: Branch, *, caption: str = "") -> Picture:
    """Draw a tree from the top down; each leaf takes a column."""
    picture = Picture(caption)
    _place(picture, root, 0.0, 0.0)
    return picture


def _place(
    picture: Picture, branch: Branch, left: float, top: float
) -> tuple[float, float]:
    """Draw a branch at `left`; return the middle of its box and its right edge."""
    lines = textwrap.wrap(branch.words, 34) or [""]
    width = CHAR * max(map(len, lines)) + 18
    height = 10 + 16.0 * len(lines)
    below = top + height + 34
    middles: list[float] = []
    right = left
    for child in branch.children:
        middle, right = _place(picture, child, right + (14 if middles else 0), below)
        middles.append(middle)
    middle = max((middles[0] + middles[-1]) / 2 if middles else 0.0, left + width / 2)
    picture.box(middle - width / 2, top, width, height, branch.state)
    for i, words in enumerate(lines):
        picture.text(middle, top + 17 + 16 * i, words, on=branch.state)
    for end in middles:
        picture.line(middle, top + height, end, below)
    return middle, max(right, middle + width / 2)


BECOMES = {  # an event of the cache -> the state of its pages from then on
    "allocate": "private",
    "publish": "published",
    "evict": "free",
    "free": "free",
}


def page_states(
    num_pages: int, events: Iterable[tuple[str, Sequence[int]]]
) -> list[tuple[str, list[Cell]]]:
    """Memory after each event (a kind of `BECOMES`, page numbers), for `draw_rows`."""
    states = ["free"] * num_pages
    rows = []
    for kind, pages in [("start", ()), *events]:
        for page in pages:
            states[page] = BECOMES[kind]
        cells = [(i * 1.0, 1.0, state, str(i)) for i, state in enumerate(states)]
        rows.append((kind, cells))
    return rows


@dataclass
class Steps:
    """Pictures of one thing at several moments, drawn to one scale."""

    frames: Sequence[Picture]

    def _repr_html_(self) -> str:
        right = max(frame.width for frame in self.frames)
        bottom = max(frame.height for frame in self.frames)
        shown = []
        for i, frame in enumerate(self.frames):
            frame._grow(right, bottom)
            shown.append(f"<div{' hidden' if i else ''}>{frame._repr_html_()}</div>")
        return f'<div class="steps">{"".join(shown)}</div>'
