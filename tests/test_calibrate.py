"""`minivllm bench calibrate` on tiny weights: its shapes, its record, its use."""

import json

import pytest
from tiny_models import tiny

from minivllm.cli import main
from minivllm.roofline import (
    Load,
    chunks_of,
    load_of,
    read_cost,
    shapes_held_out,
    shapes_to_fit,
)


def run_main(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_shapes() -> None:
    """A batch carries what its shape says; nothing is both fitted to and held out."""
    assert not set(shapes_to_fit()) & set(shapes_held_out())
    for shape in shapes_to_fit() + shapes_held_out():
        chunks = chunks_of(shape, 16)
        assert [(len(c.token_ids), c.start) for c in chunks] == list(shape)
        pages = [page for chunk in chunks for page in chunk.pages]
        assert pages == list(range(len(pages)))
        assert all(len(c.pages) == -(-c.end // 16) for c in chunks)
    assert load_of(chunks_of(((1, 64),) * 4, 16)) == Load(4, 260, 260)


def test_a_calibration_is_recorded_and_used(tmp_path, capsys) -> None:
    path = tmp_path / "cost.json"
    model = str(tiny("llama, three heads a group").folder)
    place = ["--model", model, "--device", "cpu", "--record", str(path)]
    code, out, _ = run_main(capsys, "bench", "calibrate", *place, "--repeats", "2")
    assert code == 0 and "held out" in out
    record = json.loads(path.read_text("utf-8"))
    assert record["schema_version"] == 1 and record["repeats"] == 2
    assert {row["fitted"] for row in record["rows"]} == {True, False}
    cost = read_cost(str(path))
    for row in record["rows"]:
        assert row["model_s"] == pytest.approx(cost.load_s(Load(*row["load"])))
        seen = row["step_s"]["median"]
        assert row["error"] == pytest.approx(row["model_s"] / seen - 1)
    arguments = ["gen:mixed-1", "--requests", "5", "--cost", str(path), "--json"]
    code, out, _ = run_main(capsys, "simulate", *arguments)
    assert code == 0 and len(json.loads(out)["requests"]) == 5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--repeats", "0"], "repeats"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--device", "tpu"], "tpu"),
        (["--record", "/nowhere/x.json"], "x.json"),
    ],
)
def test_bad_arguments(capsys, arguments, named) -> None:
    code, _, err = run_main(capsys, "bench", "calibrate", *arguments)
    assert code == 2 and err.count("\n") == 1 and named in err
