"""The site: built once from toy chapters, then read as a browser would."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

ROOT = Path(__file__).resolve().parent.parent

PUZZLE = """# %% [markdown]
# # 0. A puzzle
#
# Read [chapter 1](01_count.md#what-is-counted).

# %%
print("zero")
"""
COUNT = '''# %% [markdown]
# # 1. Counting
#
# ## What is counted
#
# | page | state |
# |---|---|
# | 1 | free |

# %% export="count.py"
"""Counting."""


def count(items: list[int]) -> int:
    """Say how many."""
    return len(items)


# %% tags=["hide-input"]
from IPython.display import HTML

HTML(
    '<figure><svg role="img" aria-label="A square" width="640" viewBox="0 0 640 9">'
    '<rect width="9" height="9" style="fill:var(--page-free)"/></svg>'
    "<figcaption>One free page.</figcaption></figure>"
)

# %% tags=["raises-exception"]
raise ValueError("counted twice")

# %% tags=["solution"]
print("```", count([1, 2]))

# %%
assert count([1, 2]) == 2

# %% tags=["live"]
from minivllm.count import count

count([7])

# %% tags=["hide"]
print("never shown")
'''


def make_tree(root: Path) -> None:
    """A book of two chapters, with the real machinery."""
    (root / "chapters").mkdir(parents=True)
    (root / "minivllm").mkdir()
    shutil.copy(ROOT / "mkdocs.yml", root)
    for path in (ROOT / "chapters").glob("[a-z]*.py"):
        shutil.copy(path, root / "chapters")
    shutil.copytree(ROOT / "chapters" / "assets", root / "chapters" / "assets")
    (root / "chapters" / "index.md").write_text("# Home\n", encoding="utf-8")
    (root / "chapters" / "00_puzzle.py").write_text(PUZZLE, encoding="utf-8")
    (root / "chapters" / "01_count.py").write_text(COUNT, encoding="utf-8")


def python(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
    )


def build(root: Path) -> subprocess.CompletedProcess[str]:
    return python(root, "-m", "mkdocs", "build", "--strict", "--quiet")


LOADS = ("stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload")


class Page(HTMLParser):
    """What a page loads, links to and names."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.unnamed: list[str] = []  # pictures without a text for those who cannot see
        self.parents: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.ids |= {values[key] for key in ("id", "name") if key in values}
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and set(LOADS) & set(values.get("rel", "").split()):
            self.loads.append(values["href"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "img" and not values.get("alt"):
            self.unnamed.append(values.get("src", "img"))
        named = values.get("role") != "img" or values.get("aria-label")
        if tag == "svg" and not named:
            self.unnamed.append("svg")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tree, run and built once; a folder with a space, as readers have them."""
    root = tmp_path_factory.mktemp("a book")
    make_tree(root)
    for command in (["chapters/book.py", "export"], ["chapters/book.py", "run"]):
        done = python(root, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    done = build(root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture(scope="module")
def pages(tree: Path) -> dict[Path, Page]:
    site = tree / "build" / "site"
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def local(pages: dict[Path, Page]) -> Iterator[tuple[Path, str, Path, str]]:
    """Each local address on each page: page, address, file, anchor."""
    for path, page in pages.items():
        for address in page.links + page.loads:
            link, anchor = urldefrag(address)
            if path.name == "404.html" or urlparse(link).scheme:
                continue
            target = (path.parent / unquote(link)).resolve() if link else path
            yield path, address, target, unquote(anchor)


def test_no_page_loads_anything_from_elsewhere(pages: dict[Path, Page]) -> None:
    """A reader is not watched, and the site works without a network."""
    loads = {address for page in pages.values() for address in page.loads}
    assert not [a for a in loads if urlparse(a).netloc]
    styles = list(next(iter(pages)).parent.rglob("*.css"))
    assert styles
    assert not [s for s in styles if "url(http" in s.read_text(encoding="utf-8")]


def test_every_local_link_and_anchor_leads_somewhere(pages: dict[Path, Page]) -> None:
    """Also those that MkDocs cannot see: downloads, lines of the package."""
    broken = []
    for path, address, target, anchor in local(pages):
        target = target / "index.html" if target.is_dir() else target
        missing = anchor and target in pages and anchor not in pages[target].ids
        if not target.is_file() or missing:
            broken.append(f"{path.name}: {address}")
    assert not broken


def test_every_picture_has_a_text(pages: dict[Path, Page]) -> None:
    """Who cannot see a picture is told what it shows."""
    assert not [f"{p.name}: {x}" for p, page in pages.items() for x in page.unnamed]


def test_chapter_shows_code_outputs_and_figures(tree: Path) -> None:
    """What the author marked is shown, folded or left out as DESIGN says."""
    html = (tree / "build/site/01_count.html").read_text(encoding="utf-8")
    assert 'title="minivllm/count.py"' in html or ">minivllm/count.py<" in html
    assert '<svg role="img" aria-label="A square"' in html
    assert "ValueError: counted twice" in html and "Traceback" not in html
    assert "never shown" not in html
    folded = html.split("<summary>Solution</summary>")[1].split("</details>")[0]
    assert "``` 2" in folded
    assert '<a href="01_count.ipynb"' in html or 'href="01_count.ipynb"' in html
    assert "1. Counting" in (tree / "build/site/index.html").read_text(encoding="utf-8")


def test_a_live_cell_finds_the_package_and_may_lack_python(tree: Path) -> None:
    """The page's script makes it editable; without a network it stays as it is."""
    site = tree / "build" / "site"
    html = (site / "01_count.html").read_text(encoding="utf-8")
    assert '<div class="live" data-megabytes="0">' in html
    with zipfile.ZipFile(site / "assets" / "minivllm.zip") as package:
        served = package.read("minivllm/count.py")
    assert served == (tree / "minivllm" / "count.py").read_bytes()


def test_tables_have_a_box_to_scroll_in(tree: Path) -> None:
    """A wide table must not make the whole page scroll on a phone."""
    html = (tree / "build/site/01_count.html").read_text(encoding="utf-8")
    assert html.count("<table>") == html.count("</table></div>") == 1
    assert '<div class="table" tabindex="0"><table>' in html


def test_a_stale_chapter_fails_the_build(tree: Path) -> None:
    """The site shows no output of code that is no longer there."""
    path = tree / "chapters" / "00_puzzle.py"
    path.write_text(PUZZLE.replace('"zero"', '"one"'), encoding="utf-8")
    done = build(tree)
    path.write_text(PUZZLE, encoding="utf-8")
    assert done.returncode != 0
    assert "chapters/00_puzzle.py" in done.stderr
    assert "python chapters/book.py run" in done.stderr
    assert "Traceback" not in done.stderr
