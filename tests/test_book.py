"""The literate machinery on toy books: the package does what the chapters say."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import book
import nbformat
import pytest

ROOT = Path(book.__file__).resolve().parent.parent
COUNTER = """
    # %% [markdown]
    # # 1. Counting

    # %% export="count.py"
    \"\"\"Counters.\"\"\"

    from dataclasses import dataclass

    STEP = 2  # by how much
    # Where to begin.
    START = 1


    class Counter:
        \"\"\"Counts.\"\"\"

        def __init__(self) -> None:
            self.value = START

    # %%
    counter = Counter()
    counter.value

    # %% export="count.py"
    import heapq


    # Up comes first.
    class Counter(Counter):
        # up by one step
        def up(self) -> "Counter":
            self.value += STEP
            return self

    # %% export="count.py"
    class Counter(Counter):
        @property
        def size(self) -> int:
            return self.value

        @size.setter
        def size(self, value: int) -> None:
            self.value = heapq.nlargest(1, [value, START])[0]

        # the end of the class

    # The end of the module.
"""


def write(root: Path, chapters: dict[str, str]) -> Path:
    """A book with these chapters."""
    for name, text in chapters.items():
        path = root / "chapters" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip(), encoding="utf-8", newline="\n")
    return root


def texts(root: Path) -> dict[str, str]:
    return {name: module.text for name, module in book.build_package(root).items()}


def fault(root: Path) -> str:
    """The message of the one-line error that this book gives."""
    with pytest.raises(book.BookError) as caught:
        book.build_package(root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def forbid(*_: object) -> None:
    raise AssertionError("a kernel was started")


# ---- Export --------------------------------------------------------------------------


def test_a_class_reopened_twice_becomes_one_class(tmp_path: Path) -> None:
    """Protects the merge: the module's class does what the notebook's class does."""
    text = texts(write(tmp_path, {"01_count.py": COUNTER}))["count.py"]
    from_module: dict[str, Any] = {}
    from_notebook: dict[str, Any] = {}
    exec(text, from_module)
    for cell in book.read_cells(tmp_path / "chapters" / "01_count.py"):
        exec(cell.source if cell.kind == "code" else "", from_notebook)
    for names in (from_module, from_notebook):
        counter = names["Counter"]().up()
        assert counter.size == 3
        counter.size = 9
        assert counter.value == 9
    assert text.count("class Counter") == 1
    assert from_module["Counter"].__mro__[1:] == (object,)


def test_an_exported_module_reads_like_code_written_by_hand(tmp_path: Path) -> None:
    """Protects the layout: header, docstring, used imports on top, comments kept."""
    text = texts(write(tmp_path, {"01_count.py": COUNTER}))["count.py"]
    head, _, text = text.partition("\n")
    assert re.fullmatch(r"# Exported from chapters/01_count.py \(\w{8}\): edit.*", head)
    assert text == dedent(
        '''\
        """Counters."""

        from __future__ import annotations

        import heapq

        STEP = 2  # by how much
        # Where to begin.
        START = 1


        class Counter:
            """Counts."""

            def __init__(self) -> None:
                self.value = START

            # Up comes first.
            # up by one step
            def up(self) -> Counter:
                self.value += STEP
                return self

            @property
            def size(self) -> int:
                return self.value

            @size.setter
            def size(self, value: int) -> None:
                self.value = heapq.nlargest(1, [value, START])[0]

            # the end of the class


        # The end of the module.
        '''
    )


def test_every_package_line_knows_its_chapter_line(tmp_path: Path) -> None:
    """Protects the map: links and error messages point to the right line."""
    chapter = write(tmp_path, {"01_count.py": COUNTER}) / "chapters" / "01_count.py"
    rows = chapter.read_text(encoding="utf-8").splitlines()
    lines = book.build_package(tmp_path)["count.py"].lines
    assert lines[0].path is None
    for line in lines[1:]:
        there = rows[line.line - 1].strip().replace('"Counter"', "Counter")
        assert line.path is None or there == line.text.strip()
    future = "from __future__ import annotations"
    made = [x.text for x in lines if x.text and x.path is None]
    assert made == [lines[0].text, future]


def test_the_map_survives_a_reflow(tmp_path: Path) -> None:
    """Protects the map where ruff breaks a line that the chapter has in one piece."""
    long = "f(" + ", ".join(f"argument_{i}={i}" for i in range(9)) + ")"
    cell = (
        f'# %% export="a.py"\ndef f(**_: int) -> int:\n    return 1\n\n\nX = {long}\n'
    )
    lines = book.build_package(write(tmp_path, {"01_a.py": cell}))["a.py"].lines
    assert len(lines) > 12
    assert {x.line for x in lines if "argument_" in x.text} == {6}


def test_the_order_of_the_folder_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects "same bytes everywhere": some file systems list backwards."""
    other = '# %% export="{0}.py"\nfrom minivllm.count import STEP\n\nB = STEP\n'
    chapters = {"01_count.py": COUNTER, "02_b.py": other.format("b")}
    write(tmp_path, {**chapters, "03_a.py": other.format("a")})
    first, glob = texts(tmp_path), Path.glob

    def backwards(*arguments: Any) -> list[Path]:
        return sorted(glob(*arguments), reverse=True)

    monkeypatch.setattr(Path, "glob", backwards)
    book.exporter.build.cache_clear()
    assert list(texts(tmp_path).items()) == list(first.items())
    assert list(first) == ["count.py", "b.py", "a.py", "__init__.py"]


def test_exporting_twice_changes_nothing(tmp_path: Path) -> None:
    """Protects rebuilds: the second export touches no file, and check is content."""
    write(tmp_path, {"01_count.py": COUNTER})
    assert book.export(tmp_path) == ["count.py", "__init__.py"]
    assert book.differences(tmp_path) == []
    before = (tmp_path / "minivllm" / "count.py").stat().st_mtime_ns
    assert book.export(tmp_path) == []
    assert (tmp_path / "minivllm" / "count.py").stat().st_mtime_ns == before


def test_crlf_and_non_ascii_chapters(tmp_path: Path) -> None:
    """Protects Windows authors: same bytes from CRLF, and é is é in any locale."""
    write(tmp_path, {"01_a.py": '# %% export="a.py"\nÉTÉ = "né ☃"  # ≤ 3 × π\n'})
    book.export(tmp_path)
    exported = tmp_path / "minivllm" / "a.py"
    plain = exported.read_bytes()
    assert 'ÉTÉ = "né ☃"  # ≤ 3 × π\n'.encode() in plain
    chapter = tmp_path / "chapters" / "01_a.py"
    chapter.write_bytes(b"\xef\xbb\xbf" + chapter.read_bytes().replace(b"\n", b"\r\n"))
    exported.unlink()
    book.export(tmp_path)
    assert exported.read_bytes() == plain


def test_removing_an_export_cell_removes_the_module(tmp_path: Path) -> None:
    """Protects against leftovers; a file that no chapter wrote is shown, and kept."""
    write(tmp_path, {"01_a.py": '# %% export="a.py"\nA = 1\n'})
    book.export(tmp_path)
    (tmp_path / "minivllm" / "mine.py").write_text("M = 1\n", encoding="utf-8")
    write(tmp_path, {"01_a.py": "# %%\nA = 1\n"})
    assert book.export(tmp_path) == ["a.py"]
    left = sorted(path.name for path in (tmp_path / "minivllm").iterdir())
    assert left == ["__init__.py", "mine.py"]
    (told,) = book.differences(tmp_path)
    assert told.startswith("minivllm/mine.py: no chapter exports it")


def test_an_edit_in_the_package_is_told_from_one_in_the_chapter(tmp_path: Path) -> None:
    """Protects both: either side names the other's line, and the right remedy."""
    write(tmp_path, {"01_a.py": '# %% export="a.py"\nA = 1\n'})
    book.export(tmp_path)
    module = tmp_path / "minivllm" / "a.py"
    exported = module.read_text(encoding="utf-8")
    module.write_text(exported.replace("A = 1", "A = 2"), encoding="utf-8")
    (told,) = book.differences(tmp_path)
    edited = "minivllm/a.py:4: edited, chapters/01_a.py:2 says otherwise: "
    assert told == f"{edited}python chapters/book.py untangle"
    with pytest.raises(book.BookError, match=r"or give it up: .* export --force"):
        book.export(tmp_path)
    assert "A = 2" in module.read_text(encoding="utf-8")
    assert book.export(tmp_path, force=True) == ["a.py"]
    write(tmp_path, {"01_a.py": '# %% export="a.py"\nA = 3\n'})
    (told,) = book.differences(tmp_path)
    other = "minivllm/a.py:4: not as chapters/01_a.py:2 says: "
    assert told == f"{other}python chapters/book.py export"
    (tmp_path / "minivllm" / "__init__.py").unlink()
    assert "minivllm/__init__.py: missing" in book.differences(tmp_path)[0]


def test_a_name_of_a_sibling_module_is_imported(tmp_path: Path) -> None:
    """Protects chapters with two modules: one namespace in the notebook, two outside.

    A local variable of the same name (`Full` in `shadow`) is no reason for an import.
    """
    cells = """
        # %% export="pages.py"
        class Full(Exception):
            pass


        LIMIT = 3

        # %% export="pool.py"
        def shadow(Full: int) -> int:
            LIMIT = Full
            return LIMIT

        # %% export="user.py"
        def take(n: int) -> int:
            if n > LIMIT:
                raise Full
            return n
    """
    modules = texts(write(tmp_path, {"01_a.py": cells}))
    assert "from minivllm.pages import LIMIT, Full\n" in modules["user.py"]
    assert "import" not in modules["pool.py"]


def test_an_annotation_may_name_a_class_that_comes_later(tmp_path: Path) -> None:
    """Protects the merge: it moves a body up, above the classes that it names."""
    cells = """
        # %% export="a.py"
        class Tree:
            def size(self) -> "int":
                return 1

        # %% export="a.py"
        class Lock:
            pass


        class Tree(Tree):
            def lock(self) -> Lock:
                return Lock()
    """
    text = texts(write(tmp_path, {"01_a.py": cells}))["a.py"]
    assert "\nfrom __future__ import annotations\n" in text
    names: dict[str, Any] = {}
    exec(text, names)
    assert isinstance(names["Tree"]().lock(), names["Lock"])
    late = cells.replace("(self) -> Lock", "(self, kind: type = Lock) -> Lock")
    where = "chapters/01_a.py:12: Undefined name `Lock`: define, import or rename it"
    assert fault(write(tmp_path, {"01_a.py": late})) == where


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("class A(A):\n    def f(self): ...", "7: Redefinition of unused `f` from"),
        ("class A:\n    pass", "6: Redefinition of unused `A` from line "),
        ("@final\nclass A(A):\n    x = 1", "7: reopen a class of this module by "),
        ("class A(A, B):\n    x = 1", "6: reopen a class of this module"),
        ("class A(A, metaclass=M):\n    x = 1", "6: reopen a class of this module"),
        ("class A(A): x = 1", "6: reopen a class of this module"),
        ('class A(A):\n    """Twice."""', "6: reopen a class of this module"),
        ("class B(B):\n    x = 1", "6: reopen a class of this module"),
        ("def g(:\n    pass", "6: invalid syntax: export plain Python only"),
        ("%timeit 1", "6: invalid syntax: export plain Python only"),
        ("x = 1\ny = missing", "7: Undefined name `missing`: define"),
        ("from minivllm.nothing import x", "6: no chapter exports minivllm/nothing.py"),
        ("import minivllm", "6: no chapter exports minivllm/__init__.py"),
    ],
)
def test_what_an_export_cell_may_not_do(
    tmp_path: Path, second: str, message: str
) -> None:
    """Protects from modules that differ from their notebook: one line says where."""
    first = '# %% export="a.py"\nclass A:\n    def f(self): ...\n\n# %% export="a.py"\n'
    told = fault(write(tmp_path, {"01_a.py": first + second}))
    assert told.startswith(f"chapters/01_a.py:{message}")


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("export=a.py", 'a cell begins `# %%` or `# %% key="value"`'),
        ('exprot="a.py"', "with the keys export, name, figure, claims, tags"),
        ("a title", "a cell begins"),
        ('export="../a.py"', 'export="name.py", and not from chapter 0'),
    ],
)
def test_a_mistyped_cell_mark_is_refused(
    tmp_path: Path, mark: str, message: str
) -> None:
    """Protects from cells that are silently not exported, or exported elsewhere."""
    told = fault(write(tmp_path, {"01_a.py": f"# %% {mark}\nA = 1\n"}))
    assert told.startswith("chapters/01_a.py:") and message in told


def test_a_dataclass_is_not_reopened_for_fields(tmp_path: Path) -> None:
    """Protects the notebook: there `A(1, 2)` would not know the second field."""
    cells = """
        # %% export="a.py"
        from dataclasses import dataclass

        @dataclass
        class A:
            x: int

        # %% export="a.py"
        class A(A):
            y: int
    """
    told = fault(write(tmp_path, {"01_a.py": cells}))
    assert told.startswith("chapters/01_a.py:9: reopen a class of this module by")
    assert told.endswith("no decorator, docstring or fields of a dataclass")


def test_two_modules_of_a_chapter_do_not_define_the_same_name(tmp_path: Path) -> None:
    """Protects from the wrong import: a third module could mean either."""
    cells = '# %% export="a.py"\nX = 1\n\n# %% export="b.py"\nX = 2\n'
    told = fault(write(tmp_path, {"01_a.py": cells}))
    assert told == "chapters/01_a.py:5: X is in a.py too: rename one of them"


def test_overloads_and_setters_are_not_second_definitions(tmp_path: Path) -> None:
    """Protects from refusing what Python writes in several pieces."""
    cell = """
        # %% export="a.py"
        import typing

        @typing.overload
        def f(x: int) -> int: ...
        @typing.overload
        def f(x: str) -> str: ...
        def f(x: int | str) -> int | str:
            return x


        TABLE: dict[str, int] = {}
        TABLE["a"] = 1
        TABLE["b"] = 2
    """
    assert "def f(x: int | str)" in texts(write(tmp_path, {"01_a.py": cell}))["a.py"]


# ---- The order rule ------------------------------------------------------------------


def test_a_module_of_another_chapter_is_refused(tmp_path: Path) -> None:
    """Protects "one module, one chapter": both places are named."""
    cell = '# %% export="a.py"\n{} = 1\n'
    write(tmp_path, {"01_a.py": cell.format("A"), "02_b.py": "\n" + cell.format("B")})
    assert fault(tmp_path) == (
        "chapters/02_b.py:2: a.py belongs to the chapter of chapters/01_a.py:2: "
        "export to a module of this chapter"
    )


@pytest.mark.parametrize("export", ["", ' export="a.py"'])
@pytest.mark.parametrize(
    "statement",
    [
        "from minivllm.b import B",
        "import minivllm.b",
        "from minivllm import b",
        "def f():\n    from minivllm.b import B",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import minivllm.b",
    ],
)
def test_an_import_of_a_later_chapter_is_refused(
    tmp_path: Path, export: str, statement: str
) -> None:
    """Protects the book's order at any depth, in export cells and in the others."""
    write(tmp_path, {"01_a.py": f"# %%{export}\n{statement}\n"})
    write(tmp_path, {"02_b.py": '# %% export="b.py"\nB = 1\n'})
    row = 2 + statement.count("\n")
    later = f"chapters/01_a.py:{row}: b.py begins later, at chapters/02_b.py:2"
    assert fault(tmp_path).startswith(later)


def test_modules_of_one_chapter_do_not_import_in_circles(tmp_path: Path) -> None:
    """Protects from a package that cannot be imported: written out or inferred."""
    later = '# %% export="b.py"\ndef g() -> int:\n    return 1\n'
    inferred = '# %% export="a.py"\ndef f() -> int:\n    return g()\n\n' + later
    told = fault(write(tmp_path, {"01_a.py": inferred}))
    assert told.startswith("chapters/01_a.py:3: Undefined name `g`")
    written = '# %% export="a.py"\nfrom minivllm.b import g\n\nF = g()\n\n' + later
    told = fault(write(tmp_path, {"01_a.py": written}))
    assert told.startswith("chapters/01_a.py:2: b.py begins later")


def test_the_prologue_sees_everything_and_exports_nothing(tmp_path: Path) -> None:
    """Protects chapter 0, which runs the finished engine before it is built."""
    write(tmp_path, {"00_p.py": "# %%\nfrom minivllm.b import B\n"})
    write(tmp_path, {"02_b.py": '# %% export="b.py"\nB = 1\n'})
    assert sorted(p.name for p in (book.stage(tmp_path, 0) / "minivllm").iterdir()) == [
        "__init__.py",
        "b.py",
    ]
    write(tmp_path, {"00_p.py": '# %% export="p.py"\nP = 1\n'})
    assert "not from chapter 0" in fault(tmp_path)


def test_a_stage_holds_own_and_earlier_modules_only(tmp_path: Path) -> None:
    """Protects "only its own and earlier modules visible"; leftovers disappear."""
    cell = '# %% export="{}.py"\nX = 1\n'
    write(tmp_path, {f"0{i}_x.py": cell.format(f"m{i}") for i in (1, 2, 3)})
    write(tmp_path, {"04_x.py": cell.format("__init__")})
    package = book.stage(tmp_path, 2) / "minivllm"
    assert package == tmp_path / "build" / "stage" / "02" / "minivllm"
    names = ["__init__.py", "m1.py", "m2.py"]
    assert sorted(p.name for p in package.iterdir()) == names
    assert (package / "__init__.py").read_bytes() == b""
    write(tmp_path, {"02_x.py": "# %%\nX = 1\n"})
    book.stage(tmp_path, 2)
    assert sorted(p.name for p in package.iterdir()) == names[:2]


# ---- Command line --------------------------------------------------------------------


def command(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for path in (ROOT / "chapters").glob("[a-z]*.py"):
        shutil.copy(path, root / "chapters")
    call = [sys.executable, str(root / "chapters" / "book.py"), *arguments]
    return subprocess.run(call, capture_output=True, encoding="utf-8", check=False)


def test_an_unwritable_package_folder_gives_one_line(tmp_path: Path) -> None:
    """Protects the user from a traceback: cause, remedy, exit code 2."""
    write(tmp_path, {"01_a.py": '# %% export="a.py"\nA = 1\n'})
    (tmp_path / "minivllm").write_text("a file where the folder should be")
    done = command(tmp_path, "export")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "make its folder writable" in done.stderr


def test_check_says_what_to_do(tmp_path: Path) -> None:
    """Protects the author: check fails, names each file and what mends it."""
    write(tmp_path, {"01_a.py": '# %% export="a.py"\nA = 1\n'})
    done = command(tmp_path, "check")
    assert done.returncode == 1
    assert "minivllm/a.py: missing: python chapters/book.py export" in done.stdout
    assert "01_a.ipynb: missing, stale or stripped: python chapters/" in done.stdout
    assert command(tmp_path, "run", "7").stderr.startswith("no chapter 07: ")


# ---- Running -------------------------------------------------------------------------

FIRST = """
    # %% [markdown]
    # # 1. Prose

    # %% export="a.py"
    A = 1

    # %%
    import importlib.util
    from IPython.display import SVG, display

    print("one", flush=True)
    print("two", flush=True)
    display(SVG('<svg xmlns="http://www.w3.org/2000/svg" width="7"/>'))
    print(importlib.util.find_spec("minivllm.b"))

    # %% tags=["raises-exception"]
    1 / 0

    # %%
    print(hash("the same everywhere") % 1000, A)
"""
SECOND = """
    # %% export="b.py"
    from minivllm.a import A

    B = A + 1

    # %%
    import importlib.util, os, sys
    from minivllm.a import A as again

    print("é", again, os.path.basename(os.getcwd()))
    print(importlib.util.find_spec("minivllm.c"))
    print("to stderr", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy book that has run, to be copied. Starts two kernels."""
    root = write(tmp_path_factory.mktemp("run"), {"01_a.py": FIRST, "02_b.py": SECOND})
    book.export(root)
    with pytest.MonkeyPatch.context() as patch:  # as if the package were installed
        patch.setenv("PYTHONPATH", str(root))
        told: list[str] = []
        book.run(root, report=told.append)
    assert [x.split(" in ")[0] for x in told] == [
        "chapters/01_a.py: run",
        "chapters/02_b.py: run",
    ]
    return root


@pytest.fixture
def ran(shelf: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shelf, tmp_path / "book"))


def stored(root: Path, name: str = "01_a") -> Any:
    text = (root / "chapters" / f"{name}.ipynb").read_text(encoding="utf-8")
    return json.loads(text)


def outputs(root: Path, name: str, cell: int) -> list[Any]:
    return list(stored(root, name)["cells"][cell]["outputs"])


def test_a_stored_notebook_holds_nothing_that_changes(ran: Path) -> None:
    """Protects clean diffs: pinned ids, no times, versions or paths, whole streams."""
    first = stored(ran)
    assert [c["id"] for c in first["cells"]] == [f"01-00{i}" for i in range(5)]
    assert set(first["metadata"]["book"]) == {"key", "seal", "cells"}
    assert set(first["metadata"]) == {"book", "kernelspec", "language_info"}
    assert first["metadata"]["language_info"] == {"name": "python"}
    assert all(set(c["metadata"]) <= {"export", "tags"} for c in first["cells"])
    printed, picture, _ = outputs(ran, "01_a", 2)
    assert printed["text"] == ["one\n", "two\n"]
    assert "image/svg+xml" in picture["data"] and picture["metadata"] == {}
    error = outputs(ran, "01_a", 3)[0]
    called = "chapters/01_a.py:17 (Cell In[3], line 1)"
    assert error["traceback"] == [called, "ZeroDivisionError: division by zero"]
    for path in (ran / "chapters").glob("*.ipynb"):
        assert "\\u" not in (text := path.read_text(encoding="utf-8"))
        assert "/build/" not in text and b"\r" not in path.read_bytes()
    assert outputs(ran, "02_b", 1)[0]["text"] == ["é 1 chapters\n", "None\n"]


def test_later_modules_are_invisible_while_a_chapter_runs(ran: Path) -> None:
    """Protects the order rule at run time, although the whole package is installed."""
    assert outputs(ran, "01_a", 2)[-1]["text"] == ["None\n"]
    assert (ran / "minivllm" / "b.py").exists()


def test_a_second_run_starts_no_kernel_and_a_forced_one_gives_the_same_bytes(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects the seconds of `make run`, and "same code, same notebook"."""
    path = ran / "chapters" / "01_a.ipynb"
    before, told = path.read_bytes(), list[str]()
    book.run(ran, ["1"], force=True, report=told.append)
    assert path.read_bytes() == before and "run in" in told[0]
    monkeypatch.setattr(book, "_execute", forbid)
    book.run(ran, report=told.append)
    assert [x.split(": ")[1] for x in told[1:]] == ["unchanged", "unchanged"]
    assert book.stale(ran) == []


def test_a_prose_edit_runs_nothing(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects writing: new prose reaches the notebook, outputs stay as they are."""
    monkeypatch.setattr(book, "_execute", forbid)
    old = outputs(ran, "01_a", 2)
    chapter = ran / "chapters" / "01_a.py"
    text = chapter.read_text(encoding="utf-8")
    text = text.replace("# # 1. Prose", "# # 1. Better\n#\n# Two lines more.")
    chapter.write_text(text, encoding="utf-8")
    assert "its text is not the chapter's" in book.stale(ran)[0]
    told: list[str] = []
    book.run(ran, ["01"], report=told.append)
    assert told == ["chapters/01_a.py: new text, same outputs"]
    assert stored(ran)["cells"][0]["source"][0] == "# 1. Better\n"
    row = outputs(ran, "01_a", 3)[0]["traceback"][0]
    assert row == "chapters/01_a.py:19 (Cell In[3], line 1)"  # two lines further down
    assert outputs(ran, "01_a", 2) == old and book.stale(ran) == []


def test_outputs_are_stale_when_code_or_an_imported_module_changes(ran: Path) -> None:
    """Protects the key: transitive through imports, and no wider than them."""
    chapters = sorted((ran / "chapters").glob("*.py"))

    def fresh(old: str, new: str) -> list[bool]:
        """Which chapters are fresh after an edit, which is then undone."""
        before = [path.read_text(encoding="utf-8") for path in chapters]
        for path, text in zip(chapters, before, strict=True):
            path.write_text(text.replace(old, new), encoding="utf-8")
        found = [book.notebook(ran, path)[1] for path in chapters]
        for path, text in zip(chapters, before, strict=True):
            path.write_text(text, encoding="utf-8")
        return found

    assert fresh("A = 1", "A = 2") == [False, False]
    assert fresh("B = A + 1", "B = A + 2") == [True, False]
    assert fresh("raises-exception", "hide") == [False, True]
    assert fresh("nothing", "at all") == [True, True]


def test_outputs_are_stale_when_a_record_changes(ran: Path) -> None:
    """Protects from numbers of an older measurement; no other chapter is concerned."""
    first, second = sorted((ran / "chapters").glob("*.py"))
    more = '\n# %%\nrecord = Path("../figures/measured/x.json").read_text()\n'
    first.write_text(first.read_text(encoding="utf-8") + more, encoding="utf-8")
    record, keys = ran / "figures" / "measured" / "x.json", []
    record.parent.mkdir(parents=True, exist_ok=True)
    for text in ("1", "2", "2\r\n", "2\n"):
        record.write_bytes(text.encode())
        keys.append((book._key(ran, first), book._key(ran, second)))
    assert len({of_first for of_first, _ in keys[:3]}) == 3
    assert keys[2] == keys[3], "line ends are the machine's"
    assert len({of_second for _, of_second in keys}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda nb: nb["cells"][2].update(outputs=[], execution_count=None), "stale"),
        (lambda nb: nb["cells"][2]["outputs"][0].update(text="three\n"), "stale"),
        (lambda nb: nb["metadata"].pop("book"), "stale"),
        (lambda nb: nb["cells"][4].update(source="print(2)"), "edited after its run"),
        (lambda nb: nb["metadata"].update(more=1), "text"),
    ],
)
def test_an_altered_notebook_fails(
    ran: Path, change: Callable[[Any], object], message: str
) -> None:
    """Protects from outputs that no run has given."""
    alter(ran, change)
    told = book.stale(ran)
    assert len(told) == 1 and told[0].startswith("chapters/01_a.ipynb: ")
    assert message in told[0] and "python chapters/book.py run 01" in told[0]


def alter(root: Path, change: Callable[[Any], object]) -> None:
    """Change the first notebook as somebody in Jupyter would."""
    nb = stored(root)
    change(nb)
    path = root / "chapters" / "01_a.ipynb"
    path.write_text(json.dumps(nb), encoding="utf-8")


def test_a_merge_conflict_in_a_notebook_gives_one_line(ran: Path) -> None:
    """Protects from a JSON traceback: either side of the merge does, or none."""
    path = ran / "chapters" / "01_a.ipynb"
    path.write_text("<<<<<<< HEAD\n" + path.read_text(encoding="utf-8"))
    (told,) = book.stale(ran)
    assert "not a notebook: remove it (after a merge: take either side)" in told


def test_a_stripped_notebook_fails_even_with_a_good_seal(ran: Path) -> None:
    """Protects from what nbval lets pass: a cell without execution_count."""
    path = ran / "chapters" / "02_b.ipynb"
    nb = nbformat.read(path, as_version=4)
    nb.cells[1].update(outputs=[], execution_count=None)
    nb.metadata.book.seal = book._digest(nb.cells)
    path.write_text(book._dump(nb), encoding="utf-8", newline="\n")
    assert "stripped" in book.stale(ran)[0]


def test_a_failing_cell_names_its_line(ran: Path) -> None:
    """Protects the author's time: chapter line and error; no notebook is written."""
    cells = "# %%\ndef f():\n    return {}['k']\n\n# %%\nx = 1\n\ny = f()\n"
    write(ran, {"03_c.py": cells})
    with pytest.raises(book.BookError) as caught:
        book.run(ran, ["03"])
    told = "chapters/03_c.py:3: KeyError: 'k' (called at chapters/03_c.py:8)"
    assert str(caught.value) == told
    assert not (ran / "chapters" / "03_c.ipynb").exists()


def test_an_error_in_the_package_names_its_chapter(ran: Path) -> None:
    """Protects the author's time, and the reader's: no line of a generated file."""
    fails = '\n# %% export="a.py"\ndef fail() -> None:\n    raise KeyError("k")\n'
    first = ran / "chapters" / "01_a.py"
    first.write_text(first.read_text(encoding="utf-8") + fails, encoding="utf-8")
    call = "from minivllm.a import fail\n\nfail()\n"
    write(ran, {"03_c.py": "# %%\n" + call})
    with pytest.raises(book.BookError) as caught:
        book.run(ran, ["03"])
    spot = book.untangle.where(book.build_package(ran), "minivllm/a.py:8")
    assert spot == "chapters/01_a.py:24"
    assert str(caught.value) == f"{spot}: KeyError: 'k' (called at chapters/03_c.py:4)"
    write(ran, {"03_c.py": '# %% tags=["raises-exception"]\n' + call})
    book.run(ran, ["03"])
    assert outputs(ran, "03_c", 0)[0]["traceback"] == [
        "chapters/03_c.py:4 (Cell In[1], line 3)",
        f"{spot} (minivllm/a.py:8)",
        "KeyError: 'k'",
    ]


# ---- Both ways -----------------------------------------------------------------------

SPLIT = """
    # %% export="tree.py"
    \"\"\"A tree.\"\"\"

    import heapq
    from collections.abc import Iterator


    class Tree:
        def add(self) -> int:
            one = 1
            return one

    # %% [markdown]
    # Prose.

    # %% export="tree.py"
    from collections.abc import Sequence


    # About `size`.
    class Tree(Tree):
        def size(self, of: Sequence[int]) -> int:
            return len(of)

        def walk(self) -> Iterator[int]:
            yield heapq.nlargest(1, [1, 2])[0]

    # %% export="tree.py"
    def last() -> int:
        return 7
"""


def edit(root: Path, *changes: tuple[str, str]) -> None:
    """Change the exported module by hand."""
    module = root / "minivllm" / "tree.py"
    text = module.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    module.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "changes",
    [
        [("one = 1", "one = 2")],
        [
            (
                "return one",
                "return one + 0\n\n    def two(self) -> int:\n        return 2",
            )
        ],
        [("            one = 1\n".lstrip(), "pass\n        one = 1\n".lstrip())],
        [("        return len(of)\n", "        n = len(of)\n        return n\n")],
        [("        return len(of)\n\n", "        return len(of)\n\n    x = 1\n\n")],
        [("        one = 1\n", ""), ("return one", "return 1")],
        [("# About `size`.", "# About size,\n    # and more.")],
        [('"""A tree."""', '"""A tree,\n\nand its size.\n"""')],
        [
            ("import heapq\n", "import bisect\nimport heapq\n"),
            ("= 1", "= bisect.bisect([], 1)"),
        ],
        [("    return 7\n", "    return 7\n\n\ndef end() -> int:\n    return 8\n")],
        [("def last() -> int:\n    return 7\n", "LAST = 7\n")],
        [("def walk", "def steps"), ("one = 1", "one = 3"), ("return 7", "return 9")],
    ],
)
def test_an_edit_in_the_package_returns_to_its_chapter(
    tmp_path: Path, changes: list[tuple[str, str]]
) -> None:
    """Protects edits made where the debugger stands; export gives the same again."""
    write(tmp_path, {"01_t.py": SPLIT})
    book.export(tmp_path)
    edit(tmp_path, *changes)
    module = tmp_path / "minivllm" / "tree.py"
    want = module.read_text(encoding="utf-8").split("\n")[1:]
    assert book.carry_back(tmp_path) == ["chapters/01_t.py: changed"]
    assert module.read_text(encoding="utf-8").split("\n")[1:] == want
    assert book.differences(tmp_path) == []
    assert book.carry_back(tmp_path) == []
    chapter = (tmp_path / "chapters" / "01_t.py").read_text(encoding="utf-8")
    assert chapter.count("# %%") == 4 and "class Tree(Tree):" in chapter


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        [[("Iterator, Sequence", "Sequence, Iterator")], "is not written so, or"],
        [
            [
                (
                    "return one\n",
                    "return one\n\n    def two(self) -> int:\n        return 2\n",
                )
            ],
            ":15: cannot be carried back: chapters/01_t.py:11 and chapters/01_t.py:20",
        ],
        [[("return one", "return  one")], ":13: cannot be carried back: export would"],
        [[("return one", "return (one")], "chapters/01_t.py:11: '(' was never closed"],
        [[("return one", "return ein")], "chapters/01_t.py:11: Undefined name `ein`"],
        [[("import annotations", "import division")], "a generated line is not"],
    ],
)
def test_an_edit_that_has_no_one_place_is_refused(
    tmp_path: Path, changes: list[tuple[str, str]], why: str
) -> None:
    """Protects from a guess: place and reason are told, and nothing is written."""
    write(tmp_path, {"01_t.py": SPLIT})
    book.export(tmp_path)
    edit(tmp_path, *changes)
    paths = [tmp_path / "minivllm" / "tree.py", tmp_path / "chapters" / "01_t.py"]
    before = [path.read_bytes() for path in paths]
    with pytest.raises(book.BookError) as caught:
        book.carry_back(tmp_path)
    assert why in str(caught.value), str(caught.value)
    assert [path.read_bytes() for path in paths] == before


def test_an_edit_in_the_package_of_a_chapter_that_changed_too(tmp_path: Path) -> None:
    """Protects the chapter's newer text from the older one that the package has."""
    write(tmp_path, {"01_t.py": SPLIT})
    book.export(tmp_path)
    edit(tmp_path, ("one = 1", "one = 2"))
    write(tmp_path, {"01_t.py": SPLIT.replace("return 7", "return 8")})
    with pytest.raises(book.BookError, match=r"tree\.py:1: .*chapter, was edited too"):
        book.carry_back(tmp_path)


def test_where_goes_both_ways(tmp_path: Path) -> None:
    """Protects the way from a traceback to the source; generated lines have none."""
    write(tmp_path, {"01_t.py": SPLIT})
    done = command(tmp_path, "where", "minivllm/tree.py:17", "chapters/01_t.py:11")
    assert done.stdout.split() == ["chapters/01_t.py:23", "minivllm/tree.py:13"]
    done = command(tmp_path, "where", "minivllm/tree.py:1")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "minivllm/tree.py:1: blank, generated or not exported"
    )


def test_an_edit_in_jupyter_returns_to_its_chapter(ran: Path) -> None:
    """Protects what somebody wrote in Jupyter: code, prose and tags; then it runs."""
    alter(ran, lambda nb: nb["cells"][0].update(source="# 1. Better\n\nMore."))
    alter(ran, lambda nb: nb["cells"][4].update(source=["print(2)\n", "\n", "A\n"]))
    alter(ran, lambda nb: nb["cells"][4]["metadata"].update(tags=["hide"]))
    assert "run 01 carries that to 01_a.py" in book.stale(ran)[0]
    chapter, told = ran / "chapters" / "01_a.py", list[str]()
    book.run(ran, ["01"], report=told.append)
    assert told[0] == "chapters/01_a.py: got what was edited in its .ipynb"
    assert book.stale(ran) == [] and outputs(ran, "01_a", 4)[0]["text"] == ["2\n"]
    text = chapter.read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n# # 1. Better\n#\n# More.\n\n# %% export")
    assert text.endswith('\n\n# %% tags=["hide"]\nprint(2)\n\nA\n')


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda nb: nb["cells"].pop(1), "it has cells added, removed or moved"),
        (lambda nb: nb["cells"].reverse(), "it has cells added, removed or moved"),
        (lambda nb: nb["cells"][4].update(source="1\n# %%\n2"), "`# %%` inside a cell"),
        (
            lambda nb: nb["cells"][2].update(source="print(3)"),
            "it has cell 01-002 edited, and so",
        ),
    ],
)
def test_an_edit_in_jupyter_that_has_no_place_is_refused(
    ran: Path, change: Callable[[Any], object], why: str
) -> None:
    """Protects both texts: nothing is written, nothing is run."""
    chapter = ran / "chapters" / "01_a.py"
    text = chapter.read_text(encoding="utf-8").replace('print("one"', 'print("eins"')
    chapter.write_text(text, encoding="utf-8")
    alter(ran, change)
    for act in (book.run, book.carry_back):
        with pytest.raises(book.BookError, match=re.escape(why)) as caught:
            act(ran)
        assert "run 01 --force" in str(caught.value)
    assert chapter.read_text(encoding="utf-8") == text


# ---- nbval ---------------------------------------------------------------------------

PLUGIN = """
def pytest_runtest_call(item):
    if item.path.name == "02_b.ipynb" and item.name == "Cell 1":
        kernel = item.parent.kernel
        kernel.restart()
        kernel.kc.wait_for_ready(timeout=60)


def pytest_sessionfinish():
    import os

    assert "stage" not in os.environ.get("PYTHONPATH", "")
"""
LIES = """
    # %% export="c.py"
    C = 1

    # %%
    print("true, ≈ 1.5 s")

    # %%
    print("text")

    # %%
    from IPython.display import HTML, SVG, display

    display(SVG('<svg xmlns="http://www.w3.org/2000/svg" width="7"/>'))

    # %%
    display(HTML("<b>bold</b>"))

    # %%
    import sys

    print("simulated: 1.5 s", file=sys.stderr)

    # %%
    print("importlib" in dir())
"""


def test_nbval_runs_each_notebook_on_its_own_stage(ran: Path) -> None:
    """Protects the checked outputs: own modules only; lies fail.

    Three notebooks in one pytest run: two that are true, of which the second ends on a
    restarted kernel, and one in which a text, a picture, a table and a simulated time
    were altered. The measured time is altered too: that is no lie.
    """
    write(ran, {"03_c.py": LIES})
    book.export(ran)
    book.run(ran, ["03"])
    path = ran / "chapters" / "03_c.ipynb"
    nb = nbformat.read(path, as_version=4)
    nb.cells[1].outputs[0].text = "true, ≈ 2.5 s\n"
    nb.cells[2].outputs[0].text = "lie\n"
    nb.cells[3].outputs[0].data["image/svg+xml"] += " "
    nb.cells[4].outputs[0].data["text/html"] = "<b>bald</b>"
    nb.cells[5].outputs[0].text = "simulated: 2.5 s\n"
    path.write_text(book._dump(nb), encoding="utf-8")
    shutil.copy(ROOT / "conftest.py", ran)
    for path in (ROOT / "chapters").glob("[a-z]*.py"):
        shutil.copy(path, ran / "chapters")
    (ran / "restart.py").write_text(PLUGIN, encoding="utf-8")
    options = f"--nbval --nbval-current-env -p restart -rA -q -c {os.devnull}".split()
    options += [f"--nbval-sanitize-with={ROOT / 'tests' / 'sanitize.cfg'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir=.", "chapters"],
        cwd=ran,
        env={**os.environ, "PYTHONPATH": str(ran)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    told = sorted(re.findall(r"^(PASSED|FAILED) chapters/(\S+ \d+)", done.stdout, re.M))
    lies = [("FAILED", f"03_c.ipynb::Cell {i}") for i in (2, 3, 4, 5)]
    assert told[:4] == lies, done.stdout + done.stderr
    assert len(told[4:]) == 4 + 2 + 3 and {x for x, _ in told[4:]} == {"PASSED"}


def test_a_python_without_the_packages_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy that `run.py` prints works outside the environment too."""
    assert book.other_python(tmp_path) == ""
    monkeypatch.setattr(book, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"run\.py run installs them"):
        book.other_python(tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert book.other_python(tmp_path) == str(python)
