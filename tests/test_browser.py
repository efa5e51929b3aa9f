"""The site as readers meet it: in a browser, light and dark, on screens of all widths.

The browser is the machine's own Chromium. In CI there must be one; elsewhere these
tests are skipped, with the reason.
"""

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urldefrag

import pytest
from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "build" / "npm" / "node_modules"
BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "chrome"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTHS = (400, 800, 1400)
CHECKS = (SCRIPTS / "axe-core" / "axe.min.js", ROOT / "tests" / "browser_checks.js")
FETCH = "`python run.py test` fetches it, with a network"


# ---- a browser, and a site to look at ------------------------------------------------
def need(found: object, reason: str) -> None:
    """Skip, or fail in CI, where everything must be there."""
    if not found:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    found = [path for path in map(shutil.which, BROWSERS) if path]
    need(found, "no Chromium here: install chromium or google-chrome")
    need(CHECKS[0].is_file(), f"no axe-core here: {FETCH}")
    with sync_playwright() as playwright:
        chromium = playwright.chromium
        browser = chromium.launch(executable_path=found[0], args=list(OPTIONS))
        context = browser.new_context(reduced_motion="reduce")
        for script in CHECKS:
            context.add_init_script(path=script)
        yield context
        browser.close()


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """No line for each file."""


@dataclass
class Site:
    """A folder, served on this machine, and what its pages were seen to do."""

    folder: Path
    address: str
    at: str = ""  # the page that is open
    faults: list[str] = field(default_factory=list)

    def tell(self, element: str, fault: str) -> None:
        self.faults.append(f"{self.at}: {element}: {fault}")

    def names(self) -> list[str]:
        found = self.folder.rglob("*.html")
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def open(self, browser: BrowserContext, name: str) -> Page:
        """A window that shows a page; what goes wrong in it is written down."""
        page = browser.new_page()
        page.on("response", self.answered)
        page.on("request", self.asked)
        page.on("console", self.said)
        page.on("pageerror", lambda error: self.tell("script", str(error)))
        self.turn(page, name)
        return page

    def turn(self, page: Page, name: str) -> None:
        self.at = name
        page.goto(self.address + name)

    def answered(self, answer: Response) -> None:
        if answer.status >= 400:
            self.tell(answer.url, f"answer {answer.status}: mend the address")

    def asked(self, request: Request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.tell(request.url, "is not of this site: host it with it")

    def said(self, message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load" not in message.text:
            self.tell("console", message.text)


Serve = Callable[[Path], Site]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(folder: Path) -> Site:
        handler = functools.partial(Handler, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return Site(folder, f"http://127.0.0.1:{server.server_port}/")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Site:
    """The real site, built from the chapters as they are."""
    folder = tmp_path_factory.mktemp("site")
    command = [*("-m", "mkdocs", "build", "--strict", "--quiet"), "-d", str(folder)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        pytest.fail(done.stderr, pytrace=False)
    return serve(folder)


# ---- what is looked at ---------------------------------------------------------------
def inspect(site: Site, browser: BrowserContext) -> None:
    """Look at each page in all widths and both colour schemes, and follow all links."""
    links: dict[str, list[str]] = {}
    anchors: dict[str, list[str]] = {}
    page = site.open(browser, "")  # with its search, which each page would load anew
    page.route("**/search_index.json", lambda route: route.fulfill(json=short(site)))
    for name in site.names():
        site.turn(page, name)
        links[name], anchors[name] = page.evaluate("checks.links()")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            tell(site, page, "tooWide", "wraps", "cut")
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            tell(site, page, "contrast")
        tell(site, page, "headings", "rules")
    follow(site, links, anchors)


def short(site: Site) -> dict[str, object]:
    """The words to search, of one place only."""
    file = site.folder / "search" / "search_index.json"
    index: dict[str, list[object]] = json.loads(file.read_text("utf-8"))
    return index | {"docs": index["docs"][:1]}


def tell(site: Site, page: Page, *names: str) -> None:
    for name in names:
        for element, fault in page.evaluate(f"checks.{name}()"):
            site.tell(element, fault)


def follow(
    site: Site, links: dict[str, list[str]], anchors: dict[str, list[str]]
) -> None:
    """Each link within the site leads to a file and, where it says so, to a place."""
    for site.at, address in ((name, x) for name in links for x in links[name]):
        url, anchor = urldefrag(address)
        if not url.startswith(site.address) or site.at == "404.html":
            continue  # to others; or from a page that is shown at any address
        target = unquote(url.removeprefix(site.address)) or "index.html"
        lost = anchor and unquote(anchor) not in anchors.get(target, [""])
        if lost or not (site.folder / target).is_file():
            link = address.removeprefix(site.address)
            site.tell(f"link to {link}", "nothing is there: mend the address")


def assert_whole(site: Site) -> None:
    assert not site.faults, "\n".join(dict.fromkeys(site.faults))


# ---- the site ------------------------------------------------------------------------
def test_every_page_is_whole_in_every_light_and_width(
    book: Site, browser: BrowserContext
) -> None:
    """No error, nothing from outside, no dead link, nothing too wide, all legible."""
    inspect(book, browser)
    assert_whole(book)


def test_every_live_cell_runs(book: Site, browser: BrowserContext) -> None:
    """On the very package; what it loads is of this site.

    Each page offers to run its cells; one page does it, which loads Python once.
    """
    need_python(book)
    book.faults.clear()
    page, sources = book.open(browser, ""), []
    for name in book.names():
        if 'class="live"' in (book.folder / name).read_text(encoding="utf-8"):
            book.turn(page, name)
            for cell in page.locator(".live").all():
                expect(cell.get_by_role("button", name="Run")).to_be_enabled()
                sources.append(cell.get_by_role("textbox").inner_text())
    for source in sources:
        cell.get_by_role("textbox").fill(source)
        cell.get_by_role("button", name="Run").click()
        ran(cell)
    assert_whole(book)


def need_python(site: Site) -> None:
    found = (site.folder / "assets" / "pyodide" / "pyodide.mjs").is_file()
    need(found, f"no Pyodide here: {FETCH}")


def ran(cell: Locator) -> str:
    """Wait for a live cell's end; what it printed."""
    expect(cell.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)
    assert cell.locator("pre.error").all_inner_texts() == []
    return cell.locator("> .output").last.inner_text()


# ---- its parts, on toy pages ---------------------------------------------------------
@pytest.fixture
def toy(book: Site, serve: Serve, tmp_path: Path) -> Callable[..., Site]:
    """A site of small pages, with the real assets."""
    (tmp_path / "assets").symlink_to(book.folder / "assets", target_is_directory=True)

    def make(**pages: str) -> Site:
        for name, body in pages.items():
            text = HEAD.format(name) + body + TAIL
            (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        return serve(tmp_path)

    return make


HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{0}</title>
<main><h1>{0}</h1>
"""
TAIL = '\n<script src="assets/book.js"></script></main>'
BOX = '<rect width="90" height="30" style="fill:#888"/>'
WORD = '<text x="9" y="20" style="fill:#999">page</text>'
LONG = f'<code style="white-space:pre-wrap">{"word " * 99}</code>'
LIES = {  # a page's name -> what is on it, what is said of it
    "picture": ('<img src="assets/images/favicon.png">', "img: Images must have alt"),
    "drawing": ('<svg role="img"><rect/></svg>', "svg: <svg> elements with an img"),
    "link": ('<a href="no.html">there</a>', "link to no.html: nothing is there"),
    "anchor": ('<a href="#no">there</a>', "link to anchor.html#no: nothing is there"),
    "outside": ('<img alt="a" src="http://a.invalid/a">', "http://a.invalid/a: is not"),
    "wide": ('<b style="display:block;width:999px">!</b>', "b: wider than a screen of"),
    "pale": ('<p style="color:#999">grey</p>', "p: contrast 2.8:1 of rgb(153, 153,"),
    "box": (
        f'<svg role="img" aria-label="a">{BOX}{WORD}</svg>',
        "text: contrast 1.2:1",
    ),
    "table": (
        f'<div class="output"><pre>{LONG}</pre></div>',
        "div.output: breaks its lines on a screen of 400 px",
    ),
    "menu": (
        '<nav class="md-nav"><b class="md-ellipsis" style="display:block;width:9px;'
        'overflow:hidden">menu</b></nav>',
        "menu: is cut in the menu: say it shorter",
    ),
    "titles": ("<h1>Again</h1>", "h1: 2 of them: a page has one title"),
    "levels": ("<h3>Deep</h3>", "h3: Heading levels should only increase by one"),
    "script": ("<script>no()</script>", "script: no is not defined"),
}


def test_each_lie_is_told_with_page_place_and_remedy(
    toy: Callable[..., Site], browser: BrowserContext
) -> None:
    """Protects the checks themselves: each must be able to fail, and only there."""
    pages = {name: body for name, (body, _) in LIES.items()}
    site = toy(index='<p style="color:#333">Well.</p>', **pages)
    inspect(site, browser)
    for name, (_, said) in LIES.items():
        told = [fault for fault in site.faults if fault.startswith(f"{name}.html: ")]
        assert told and said in told[0], site.faults
    assert {fault.split(".html")[0] for fault in site.faults} == {*LIES}


def test_a_picture_steps_by_button_and_by_keyboard(
    toy: Callable[..., Site], browser: BrowserContext
) -> None:
    """The first frame shows without a script; the others come one by one."""
    frames = "<div>one</div><div hidden>two</div><div hidden>three</div>"
    page = toy(steps=f'<div class="steps">{frames}</div>').open(browser, "steps.html")
    steps = page.get_by_role("group")
    expect(steps).to_contain_text("1/3")
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("two", exact=True)).to_be_visible()
    expect(page.get_by_text("one", exact=True)).to_be_hidden()
    for key, place in (("ArrowRight", "3/3"), ("ArrowRight", "3/3"), ("Home", "1/3")):
        steps.press(key)
        expect(steps).to_contain_text(place)
    page.get_by_role("button", name="Back").click()
    expect(steps).to_contain_text("1/3")


LIVE = """<div class="live" data-megabytes="{}"><div class="highlight"><pre><code>{}
</code></pre></div><div class="output">stored</div></div>"""
HASHES = "from minivllm.hashing import page_hashes\n"


def test_a_live_cell_is_edited_run_stopped_and_reset_by_keyboard(
    toy: Callable[..., Site], browser: BrowserContext
) -> None:
    """It runs the very package, shows values and errors, and lets the reader out."""
    need_python(toy())
    source = HASHES + "print(2)\nlen(page_hashes(range(40), 16))"
    page = toy(live=LIVE.format(12, source)).open(browser, "live.html")
    cell, code = page.locator(".live"), page.get_by_role("textbox")
    expect(cell).to_contain_text("the first run loads Python, 12 MB")
    code.press("Control+Enter")
    assert ran(cell).split() == ["2", "2"]
    code.press("Control+End")
    page.keyboard.type("\nif 1:\n\tnone")
    code.press("Control+Enter")
    expect(cell.locator("pre.error")).to_contain_text("line 5")
    expect(cell.locator("pre.error")).to_contain_text("NameError: name 'none' is not")
    code.press("Escape")
    code.press("Tab")
    expect(cell.get_by_role("button", name="Run")).to_be_focused()
    cell.get_by_role("button", name="Reset").press("Enter")
    expect(code).to_have_text(source)
    expect(cell.get_by_text("stored")).to_be_visible()


def test_an_endless_live_cell_can_be_stopped(
    toy: Callable[..., Site], browser: BrowserContext
) -> None:
    """Python runs beside the page, so the page stays alive."""
    need_python(toy())
    page = toy(live=LIVE.format(12, "while True: pass")).open(browser, "live.html")
    cell = page.locator(".live")
    cell.get_by_role("button", name="Run").click()
    expect(cell).to_contain_text("runs …", timeout=60_000)
    cell.get_by_role("button", name="Stop").click()
    expect(cell).to_contain_text("stopped")


def test_a_live_cell_without_python_says_what_is_missing(
    toy: Callable[..., Site], browser: BrowserContext
) -> None:
    """A site built without a network is whole all the same."""
    page = toy(live=LIVE.format(0, "1")).open(browser, "live.html")
    expect(page.get_by_role("button", name="Run")).to_be_disabled()
    expect(page.locator(".live")).to_contain_text("`python run.py run` fetches it")
