"""Prose, claims and exercises against what cells printed: each lie is found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import book
import claims
import nbformat
import pytest
import weave
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files

ROOT = Path(book.__file__).resolve().parent.parent
CHAPTER = '''
    # %% [markdown]
    # # 1. Counting
    #
    # A prompt of [1,234 tokens](#count) costs
    # [0.5 s, 50 %](#count); [two](#count) of them, twice. See [below](#answer).

    # %% name="count" claims="R01"
    print("1234 tokens", 0.5, "s 50% 2")

    # %% name="raises" tags=["raises-exception"]
    raise ValueError("at 77")

    # %% [markdown]
    # ## Exercise
    #
    # How many?

    # %% tags=["solution"]
    def double(x: int) -> int:
        """Twice."""
        return 2 * x


    answer, spare = double(3), 1
    print(answer)

    # %% name="answer"
    assert answer + double(1) == 8
'''
CLAIMS = """
    [R01]
    kind = "N"
    fact = "Counting costs."
    verdict = "confirmed"
    measured = "1,234 tokens"

    [V01]
    kind = "A"
    fact = "Count."
"""
PRINTED = ["1234 tokens 0.5 s 50% 2\n", "", "6\n", ""]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A book of one chapter, in which all is as it says."""
    tell(tmp_path, CHAPTER, CLAIMS)
    return tmp_path


def tell(root: Path, chapter: str, table: str) -> None:
    """Write a chapter, the outputs of its run, and claims.toml."""
    folder = root / "chapters"
    folder.mkdir(exist_ok=True)
    path = folder / "01_count.py"
    path.write_text(dedent(chapter).lstrip(), encoding="utf-8")
    (folder / "claims.toml").write_text(dedent(table), encoding="utf-8")
    path.with_suffix(".ipynb").unlink(missing_ok=True)
    nb, _ = book.notebook(root, path)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for cell, text in zip(code, PRINTED, strict=False):
        cell.outputs = [nbformat.v4.new_output("stream", text=text)] if text else []
    path.with_suffix(".ipynb").write_text(nbformat.writes(nb), encoding="utf-8")


def run(root: Path) -> Path:
    """Run the chapter for real."""
    path = root / "chapters" / "01_count.py"
    path.with_suffix(".ipynb").unlink()
    book.run(root, report=lambda line: None)
    return path


LIES = {
    "another number": (
        ("[1,234 tokens]", "[1,235 tokens]"),
        "chapters/01_count.py:4: prose says 1,235 tokens, cell `count` printed: "
        "1234 tokens 0.5 s 50% 2: mend the prose or the cell",
    ),
    "a part of a number": (("[1,234 ", "[234 "), ":4: prose says 234"),
    "a number in words": (("[two]", "[three]"), ":5: prose says three"),
    "a number from no cell": (
        ("(#count); [two]", "(#cuont); [two]"),
        ":5: 0.5 s, 50 % is said to come from `cuont`, and no cell has that name",
    ),
    "a name given twice": (
        ('name="raises"', 'name="count"'),
        "01_count.py:11: the name count is taken at chapters/01_count.py:8",
    ),
    "a claim that nobody made": (
        ('claims="R01"', 'claims="R01 R99"'),
        "01_count.py:8: no claim R99: mend the id, or enter it in chapters/claims.toml",
    ),
    "a claim on a cell without a name": (
        ('name="raises"', 'claims="R01"'),
        '01_count.py:11: it carries claims: give it name="..."',
    ),
    "a claim whose cell is gone": (
        (' claims="R01"', ""),
        'claims.toml: R01: no cell carries claims="R01"',
    ),
    "a cell without a verdict": (
        ('claims="R01"', 'claims="R01 V01"'),
        "01_count.py:8: V01 has no verdict",
    ),
    "another measurement": (
        ('"1,234 tokens"', '"1,235 tokens"'),
        "claims.toml: R01: 1235 was not printed at chapters/01_count.py:8: mend it",
    ),
    "no measurement of a number": (
        ('measured = "1,234 tokens"', ""),
        "claims.toml: R01: say in `measured` which number came out",
    ),
    "a verdict of its own": (
        ('"confirmed"', '"true"'),
        "R01: the verdict is one of: confirmed, sign only, contradicted",
    ),
    "a kind of its own": (('kind = "A"', 'kind = "Z"'), "claims.toml: V01: begin"),
    "a check that checks nothing": (
        ("assert answer", "answer"),
        "01_count.py:19: no cell checks this solution",
    ),
    "an exercise without a solution": (
        (' tags=["solution"]', ""),
        "01_count.py:14: exercises here: 1, cells tagged solution: 0",
    ),
    "a table that is no TOML": (("[V01]", "[V01"), "chapters/claims.toml: "),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(tree: Path, lie: str) -> None:
    """Protects the reader: one line that says where, what, and what to do."""
    (old, new), expected = LIES[lie]
    assert (CHAPTER + CLAIMS).count(old) >= 1
    assert claims.faults(tree) == []
    tell(tree, CHAPTER.replace(old, new, 1), CLAIMS.replace(old, new, 1))
    found = claims.faults(tree)
    assert len(found) == 1 and expected in found[0] and "\n" not in found[0], found


def test_a_cell_that_prints_another_number_is_found(tree: Path) -> None:
    """The cell may change as well as the prose; a cell not run yet says nothing."""
    path = tree / "chapters" / "01_count.ipynb"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("1234 tokens 0.5", "1230 tokens 0.5"), "utf-8")
    assert [x.split(": ")[0] for x in claims.faults(tree)] == [
        "chapters/01_count.py:4",
        "chapters/claims.toml",
    ]
    path.unlink()
    assert claims.faults(tree) == []


def test_numbers_are_compared_whole() -> None:
    """Protects the comparison from accidents: 23 is not in 230, nor 5 in 0.5."""
    text = "230 of 1_000,000 (0.5 s, .25, 50%) v2 [928, 929] 8K x3"
    assert claims.numbers(text) == {
        *("230", "1000000", "0.5", ".25", "50", "928", "929", "8")
    }


def test_pictures_count_and_their_captions_do_not() -> None:
    """A picture is drawn by the run; its caption was typed."""
    caption = "<figcaption>493</figcaption>"
    drawn = '<figure><svg width="640"><text>480</text></svg>' + caption
    output = nbformat.v4.new_output("display_data", {"text/html": drawn + "</figure>"})
    assert claims.numbers(claims.printed({"outputs": [output]})) == {"480"}


def test_the_page_tells_claim_cell_verdict_and_measurement(tree: Path) -> None:
    text = claims.page(tree)
    assert "2 claims" in text and "1 confirmed" in text and "1 not yet shown" in text
    shown = "| [1 count](01_count.md#count) | **confirmed**: 1,234 tokens |"
    assert f"| R01 | Counting costs. {shown}" in text
    assert "| V01 | Count. |  | not yet shown |" in text
    assert claims.not_shown(tree) == ["V01: Count."]


# ---- The student's notebook ----------------------------------------------------------


def cells_of(nb: Any) -> list[str]:
    return [cell.source for cell in nb.cells if cell.cell_type == "code"]


def test_a_student_gets_signatures_and_open_names(tree: Path) -> None:
    """The answer is not in the download; what the check needs to fail well is."""
    nb, _ = book.notebook(tree, run(tree))
    *_, solution, check = cells_of(claims.student(nb))
    assert solution == dedent('''\
        # Your turn.
        def double(x: int) -> int:
            """Twice."""
            raise NotImplementedError('your turn')
        answer = ...''')
    assert check.startswith("assert not any(x is ... for x in [answer]), ")
    assert "2 * x" in cells_of(nb)[-2], "the original is left alone"


@pytest.mark.parametrize("chapter", ["02_hashing", "03_radix", "04_pages"])
def test_a_students_notebook_runs_up_to_its_check(chapter: str, tmp_path: Path) -> None:
    """Every stub runs; the first check then fails, and says what is to do."""
    nb, _ = book.notebook(ROOT, ROOT / "chapters" / f"{chapter}.py")
    sources = cells_of(claims.student(nb))
    program = tmp_path / "student.py"
    program.write_text("\n\n".join(sources), encoding="utf-8")
    paths = {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | paths,
        capture_output=True,
        encoding="utf-8",
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(("AssertionError: the cell above", "NotImplementedError"))
    stored = json.loads(nbformat.writes(claims.student(nb)))
    assert "book" not in stored["metadata"]


# ---- The site ------------------------------------------------------------------------


def test_the_site_folds_answers_and_gives_stubs(tree: Path) -> None:
    """Protects the exercise: no answer in the download, none unfolded on the page."""
    page, download = weave.weave(tree, run(tree), {})
    assert '<div id="count"></div>' in page
    assert page.index("Solution</summary>") < page.index("return 2 * x")
    assert page.index("Its check</summary>") < page.index("== 8")
    assert "return 2 * x" not in download and "Your turn" in download


def test_check_tells_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Protects authors from waiting for the site: one command tells all."""
    monkeypatch.setattr(claims, "faults", lambda root: ["chapters/01_a.py:1: a lie"])
    assert book.main(["check"]) == 1
    assert "chapters/01_a.py:1: a lie" in capsys.readouterr().out


def test_a_lie_stops_the_site(tree: Path) -> None:
    """The site is built through the same check."""
    tell(tree, CHAPTER.replace("[two]", "[three]"), CLAIMS)
    config = MkDocsConfig(str(tree / "mkdocs.yml"))
    with pytest.raises(PluginError, match=r"01_count.py:5: prose says three"):
        weave.on_files(Files([]), config)


# ---- This book -----------------------------------------------------------------------


def test_the_book_says_what_its_cells_printed() -> None:
    """Protects every number with a link, every verdict and every exercise."""
    found = claims.faults(ROOT)
    assert not found, "\n".join(found)


def test_claims_that_no_chapter_shows_yet_are_listed() -> None:
    """Never fails: it tells authors what is left (pytest -rP)."""
    print("\n".join(["not yet shown:", *claims.not_shown(ROOT)]))
