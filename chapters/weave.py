"""MkDocs hook: chapters and their stored outputs -> pages; the package -> source pages.

A chapter that changed since its outputs were stored stops the build.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import book

Package = dict[str, book.Module]
COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")


# ---- what MkDocs calls ---------------------------------------------------------------
def on_config(config: MkDocsConfig) -> None:
    """The navigation is made of what there is."""
    root = root_of(config)
    chapters = [{title(p): f"{p.stem}.md"} for p in book.chapter_paths(root)]
    nav: list[Any] = [{"Home": "index.md"}]
    nav += [{"Chapters": chapters}] if chapters else []
    pages = [{f"minivllm/{name}": page_of(name)} for name in package_of(config)]
    config.nav = nav + ([{"Package": pages}] if pages else [])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    package = package_of(config)
    for path in book.chapter_paths(root_of(config)):
        page = weave(root_of(config), path, package)
        files.append(File.generated(config, f"{path.stem}.md", content=page))
    for module in package.values():
        page = source_page(module)
        files.append(File.generated(config, page_of(module.name), content=page))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: object) -> str:
    """`{{ puzzle.svg }}` shows a picture of figures/ that follows the theme."""
    folder = root_of(config) / "figures"
    return re.sub(
        r"^\{\{ ([\w-]+\.svg) \}\}$",
        lambda found: (
            f'<div class="output">{(folder / found[1]).read_text("utf-8")}</div>'
        ),
        markdown,
        flags=re.M,
    )


def on_page_content(html: str, **_: object) -> str:
    """A table wider than the screen scrolls in a box of its own."""
    html = html.replace("<table>", '<div class="table" tabindex="0"><table>')
    return re.sub(r"(<div class=\"table\".*?</table>)", r"\1</div>", html, flags=re.S)


# ---- chapters ------------------------------------------------------------------------
def root_of(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).resolve().parent


def package_of(config: MkDocsConfig) -> Package:
    try:
        package = book.build_package(root_of(config))
    except book.BookError as error:
        raise PluginError(str(error)) from None
    return {n: m for n, m in package.items() if any(line.path for line in m.lines)}


def title(path: Path) -> str:
    cell = book.read_cells(path)[0]
    if cell.kind != "markdown" or not cell.source.startswith("# "):
        raise PluginError(f"chapters/{path.name}: begin with a cell `# # Title`")
    return cell.source.partition("\n")[0].removeprefix("# ").strip()


def weave(root: Path, path: Path, package: Package) -> str:
    """The Markdown of a chapter."""
    try:
        notebook, fresh = book.notebook(root, path)
    except book.BookError as error:
        raise PluginError(str(error)) from None
    if not fresh:
        raise PluginError(
            f"chapters/{path.name}: changed since its outputs were stored: "
            "run `python chapters/book.py run`"
        )
    cells = zip(notebook.cells, book.read_cells(path), strict=True)
    parts = ["\n".join(cell_parts(cell, source, package)) for cell, source in cells]
    download = f"[Download as a notebook]({path.stem}.ipynb){{ .download download }}"
    heading, _, rest = parts[0].partition("\n")
    return "\n\n".join([heading, download, rest, *parts[1:]])


def cell_parts(cell: Any, source: book.Cell, package: Package) -> Iterator[str]:
    tags = source.meta.get("tags", [])
    if "hide" in tags:
        return
    if source.kind == "markdown":
        shown, results = [cell.source], []
    else:
        shown, results = code(source, package), list(outputs(cell))
    if "solution" in tags:
        yield fold("Solution", [*shown, *results])
    elif "hide-input" in tags:
        yield from [*results, fold("The code of this picture", shown)]
    else:
        yield from [*shown, *results]


def code(source: book.Cell, package: Package) -> list[str]:
    """A cell's code; an exported one names its file and links to its place there."""
    name = source.meta.get("export")
    if not name:
        return [fence(source.source, ".python")]
    parts = [fence(source.source, f'.python title="minivllm/{name}"')]
    rows = range(source.line, source.line + source.source.count("\n") + 1)
    for number, line in enumerate(package[name].lines, 1):
        if line.path and line.path.name == source.path.name and line.line in rows:
            href = page_of(name).replace(".md", f".html#L-0-{number}")
            parts.append(f'<a class="whole" href="{href}">in the whole file</a>\n')
            break
    return parts


def outputs(cell: Any) -> Iterator[str]:
    """What the cell printed, drew or raised."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        picture = data.get("image/svg+xml") or data.get("text/html")
        if output.output_type == "error":
            yield fence(f"{output.ename}: {output.evalue}", ".text .output .error")
        elif picture:
            yield f'<div class="output">{picture.strip()}</div>\n'
        else:
            text = output.get("text") or data.get("text/plain", "")
            yield fence(COLOUR_CODES.sub("", text).rstrip("\n"), ".text .output")


def fence(text: str, attributes: str) -> str:
    """A fenced block, whatever backticks the text has."""
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text) or [""]))
    return f"{ticks} {{ {attributes} }}\n{text}\n{ticks}\n"


def fold(summary: str, parts: list[str]) -> str:
    head = f'<details class="fold" markdown="1">\n<summary>{summary}</summary>\n'
    return "\n".join([head, *parts, "</details>\n"])


# ---- the package ---------------------------------------------------------------------
def page_of(name: str) -> str:
    return f"package/{name.removesuffix('.py')}.md"


def source_page(module: book.Module) -> str:
    chapter = next(line.path for line in module.lines if line.path)
    return (
        f"# minivllm/{module.name}\n\n"
        f"Built in [{title(chapter)}](../{chapter.stem}.md).\n\n"
        + fence(module.text.rstrip(), '.python linenums="1"')
    )
