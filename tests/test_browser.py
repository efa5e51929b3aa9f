"""The site as readers meet it: in a browser, light and dark, on small and large screens.

The browser is the machine's own Chromium. In CI there must be one; elsewhere these tests
are skipped, with the reason.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from playwright.sync_api import Browser, Page, Request, Response, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "build" / "npm" / "node_modules"
BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "chrome"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update"),
)
WIDTHS = (400, 800, 1400)
CHECKS = (SCRIPTS / "axe-core" / "axe.min.js", ROOT / "tests" / "browser_checks.js")
FETCH = "`python run.py test` fetches it, with a network"


# ---- a browser, and a site to look at ------------------------------------------------
def need(found: object, reason: str) -> None:
    """Skip, or fail in CI, where everything must be there."""
    if not found:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = [path for path in map(shutil.which, BROWSERS) if path]
    need(found, "no Chromium here: install chromium or google-chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium
        browser = chromium.launch(executable_path=found[0], args=list(OPTIONS))
        yield browser
        browser.close()


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """No line for each file."""


@dataclass
class Site:
    """A folder, served on this machine, and what its pages were seen to do."""

    folder: Path
    address: str
    faults: list[str] = field(default_factory=list)

    def tell(self, page: str, element: str, fault: str) -> None:
        self.faults.append(f"{page}: {element}: {fault}")

    def tell_all(self, page: str, found: list[list[str]], when: str = "") -> None:
        for element, fault in found:
            self.tell(page + when, element, fault)

    def names(self) -> list[str]:
        found = self.folder.rglob("*.html")
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def open(self, browser: Browser, name: str) -> Page:
        """Open a page; it reaches nothing but this site, and is seen to try."""
        page = browser.new_page(color_scheme="light")

        def request(asked: Request) -> None:
            if not asked.url.startswith((self.address, "data:", "blob:")):
                fault = "asked for from outside: host it with the site"
                self.tell(name, asked.url, fault)

        def response(answer: Response) -> None:
            if answer.status >= 400:
                self.tell(name, answer.url, f"answer {answer.status}: mend the address")

        page.on("request", request)
        page.on("response", response)
        page.on("pageerror", lambda error: self.tell(name, "script", str(error)))
        page.on(
            "console",
            lambda message: message.type == "error"
            and self.tell(name, "console", message.text),
        )
        page.route(
            lambda url: not url.startswith(self.address), lambda route: route.abort()
        )
        for script in CHECKS:
            page.add_init_script(path=script)
        page.goto(f"{self.address}{name}")
        return page


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
    need(CHECKS[0].is_file(), f"no axe-core here: {FETCH}")
    folder = tmp_path_factory.mktemp("site")
    command = [*("-m", "mkdocs", "build", "--strict", "--quiet"), "-d", str(folder)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return serve(folder)


# ---- what is looked at ---------------------------------------------------------------
def inspect(site: Site, browser: Browser) -> list[str]:
    """Each page in both colour schemes and all widths; each fault is told once."""
    links: dict[str, list[str]] = {}
    anchors: dict[str, list[str]] = {}
    for name in site.names():
        page = site.open(browser, name)
        links[name], anchors[name] = page.evaluate("checks.links()")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                site.tell_all(name, page.evaluate("checks.tooWide()"))
            for check in ("headings", "pictures", "rules"):
                found = page.evaluate(f"checks.{check}()")
                site.tell_all(name, found, f" ({scheme})")
        page.close()
    follow(site, links, anchors)
    return list(dict.fromkeys(site.faults))


def follow(
    site: Site, links: dict[str, list[str]], anchors: dict[str, list[str]]
) -> None:
    """Each link within the site leads to a file and, where it says so, to a place."""
    for name, address in ((name, x) for name, found in links.items() for x in found):
        url, anchor = urldefrag(address)
        if not url.startswith(site.address) or name == "404.html":
            continue  # to others; or from a page that is shown at any address
        target = unquote(url.removeprefix(site.address)) or "index.html"
        lost = anchor and unquote(anchor) not in anchors.get(target, [""])
        if lost or not (site.folder / target).is_file():
            link = address.removeprefix(site.address)
            site.tell(name, f"link to {link}", "nothing is there: mend the address")


# ---- the site ------------------------------------------------------------------------
def test_every_page_is_whole_in_every_light_and_width(
    book: Site, browser: Browser
) -> None:
    """No error, nothing from outside, no dead link, nothing too wide, all legible."""
    faults = inspect(book, browser)
    assert not faults, "\n".join(faults)
