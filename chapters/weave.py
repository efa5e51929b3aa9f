"""MkDocs hook: chapters and their stored outputs -> pages; the package -> source pages.

A chapter that changed since its outputs were stored stops the build.
"""

import io
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import book
import claims

Package = dict[str, book.Module]
PYODIDE = (  # what Python in a browser needs, of the npm package
    "pyodide.mjs",
    "pyodide.asm.js",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")


# ---- what MkDocs calls ---------------------------------------------------------------
def on_config(config: MkDocsConfig) -> None:
    """The navigation is made of what there is."""
    root = root_of(config)
    chapters = [{title(p): f"{p.stem}.md"} for p in book.chapter_paths(root)]
    nav: list[Any] = [{"Home": "index.md"}]
    nav += [{"Chapters": chapters}] if chapters else []
    nav += [{"Claims": "claims.md"}] if (root / claims.TABLE).exists() else []
    pages = [{name: page_of(name)} for name in package_of(config)]  # short: they fit
    config.nav = nav + ([{"Package": pages}] if pages else [])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    package, root = package_of(config), root_of(config)
    if faults := claims.faults(root):
        raise PluginError("\n".join(faults))
    for path in book.chapter_paths(root):
        page, notebook = weave(root, path, package)
        files.append(File.generated(config, f"{path.stem}.md", content=page))
        replace(files, File.generated(config, f"{path.stem}.ipynb", content=notebook))
    if (root / claims.TABLE).exists():
        page = claims.page(root)
        files.append(File.generated(config, "claims.md", content=page))
    for module in package.values():
        page = source_page(module)
        files.append(File.generated(config, page_of(module.name), content=page))
    zipped = archive(package)
    files.append(File.generated(config, "assets/minivllm.zip", content=zipped))
    for path in pyodide(root_of(config)):
        name = f"assets/pyodide/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: object) -> str:
    """`{{ puzzle.svg }}` shows a picture of figures/ that follows the theme."""

    def picture(found: re.Match[str]) -> str:
        svg = (root_of(config) / "figures" / found[1]).read_text("utf-8")
        return f'<div class="output">{svg.replace(book.DARK, "")}</div>'

    return re.sub(r"^\{\{ ([\w-]+\.svg) \}\}$", picture, markdown, flags=re.M)


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


def replace(files: Files, file: File) -> None:
    """Put a generated file in the place of one in chapters/."""
    if there := files.get_file_from_path(file.src_uri):
        files.remove(there)
    files.append(file)


def weave(root: Path, path: Path, package: Package) -> tuple[str, str]:
    """The Markdown of a chapter, and the notebook that its readers download."""
    try:
        notebook, fresh = book.notebook(root, path)
    except book.BookError as error:
        raise PluginError(str(error)) from None
    if not fresh:
        raise PluginError(
            f"chapters/{path.name}: changed since its outputs were stored: "
            "run `python chapters/book.py run`"
        )
    cells = list(zip(notebook.cells, book.read_cells(path), strict=True))
    checks = [False, *(claims.tagged(source.meta) for _, source in cells)]
    parts = [
        "\n".join(cell_parts(cell, source, package, check))
        for (cell, source), check in zip(cells, checks, strict=False)
    ]
    download = f"[Download as a notebook]({path.stem}.ipynb){{ .download download }}"
    heading, _, rest = parts[0].partition("\n")
    page = "\n\n".join([heading, download, rest, *parts[1:]])
    return page, nbformat.writes(claims.student(notebook))


def cell_parts(
    cell: Any, source: book.Cell, package: Package, check: bool
) -> Iterator[str]:
    tags = source.meta.get("tags", [])
    if "hide" in tags:
        return
    if source.kind == "markdown":
        shown, results = [cell.source], []
    else:
        anchor = [f'<div id="{x}"></div>\n'] if (x := source.meta.get("name")) else []
        shown, results = code(source, package), [*anchor, *outputs(cell)]
    if "solution" in tags or (check and source.kind == "code"):
        yield fold("Its check" if check else "Solution", [*shown, *results])
    elif "live" in tags:
        yield live([*shown, *results], source.path.parent.parent)
    elif "hide-input" in tags:
        name = source.meta.get("export")
        words = f"This part of minivllm/{name}" if name else "The code of this picture"
        yield from [*results, fold(words, shown)]
    else:
        yield from [*shown, *results]


def code(source: book.Cell, package: Package) -> list[str]:
    """A cell's code; an exported one names its file and links to its place there."""
    name = source.meta.get("export")
    if not name:
        return [fence(source.source, ".python")]
    parts = [fence(source.source, f'.python title="minivllm/{name}"')]
    if number := first_line(source, package[name]):
        href = page_of(name).replace(".md", f".html#L-0-{number}")
        parts.insert(
            0, f'<div id="{name}-{number}"></div>\n'
        )  # the way back leads here
        parts.append(f'<a class="whole" href="{href}">in the whole file</a>\n')
    return parts


def first_line(cell: book.Cell, module: book.Module) -> int:
    """The first line of a module that came from this cell; 0 if none did."""
    rows = range(cell.line, cell.line + cell.source.count("\n") + 1)
    found = (
        number
        for number, line in enumerate(module.lines, 1)
        if line.path == cell.path and line.line in rows
    )
    return next(found, 0)


def outputs(cell: Any) -> Iterator[str]:
    """What the cell printed, drew or raised."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        picture = data.get("image/svg+xml") or data.get("text/html")
        if output.output_type == "error":
            yield fence("\n".join(output.traceback), ".text .output .error")
        elif picture:
            yield f'<div class="output">{picture.strip()}</div>\n'
        else:
            text = output.get("text") or data.get("text/plain", "")
            yield fence(COLOUR_CODES.sub("", text).rstrip("\n"), ".text .output")


def fence(text: str, attributes: str) -> str:
    """A fenced block, whatever backticks the text has."""
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text) or [""]))
    return f"{ticks} {{ {attributes} }}\n{text}\n{ticks}\n"


def live(parts: list[str], root: Path) -> str:
    """A cell that assets/book.js lets the reader edit and run."""
    size = round(sum(path.stat().st_size for path in pyodide(root)) / 1e6)
    head = f'<div class="live" data-megabytes="{size}" markdown="1">\n'
    return "\n".join([head, *parts, "</div>\n"])


def fold(summary: str, parts: list[str]) -> str:
    head = f'<details class="fold" markdown="1">\n<summary>{summary}</summary>\n'
    return "\n".join([head, *parts, "</details>\n"])


# ---- the package ---------------------------------------------------------------------
def page_of(name: str) -> str:
    return f"package/{name.removesuffix('.py')}.md"


def source_page(module: book.Module) -> str:
    chapter = next(line.path for line in module.lines if line.path)
    return (
        "---\nhide: [toc]\nsearch: {exclude: true}\n---\n"  # searched in its chapter
        f"# minivllm/{module.name}\n\n"
        f"Built in [{title(chapter)}](../{chapter.stem}.md), by the cells that begin "
        f"at line {ways_back(module, chapter)}.\n\n"
        + fence(module.text.rstrip(), '.python linenums="1"')
    )


def ways_back(module: book.Module, chapter: Path) -> str:
    cells = [c for c in book.read_cells(chapter) if c.meta.get("export") == module.name]
    numbers = sorted({first_line(cell, module) for cell in cells} - {0})
    page = f"../{chapter.stem}.md#{module.name}"
    return ", ".join(f"[{number}]({page}-{number})" for number in numbers)


# ---- Python in the page --------------------------------------------------------------
def pyodide(root: Path) -> list[Path]:
    """The files of Pyodide; none when it was not fetched, or not wholly."""
    paths = [root / "build/npm/node_modules/pyodide" / name for name in PYODIDE]
    return paths if all(path.is_file() for path in paths) else []


def archive(package: Package) -> bytes:
    """The package as live cells import it; the same bytes on every run."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, module in sorted(package.items()):
            made.writestr(zipfile.ZipInfo(f"minivllm/{name}"), module.text)
    return file.getvalue()
