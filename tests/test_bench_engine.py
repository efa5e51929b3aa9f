"""`minivllm bench engine` on tiny weights: its rows, its record, and clocks that go."""

import json

import pytest
import torch
from tiny_models import tiny

from minivllm.bench_engine import (
    QUICK,
    EngineBench,
    Sizes,
    decoding,
    mixed_jobs,
    parts_of_steps,
)
from minivllm.bench_reuse import decoder_of
from minivllm.cli import main
from minivllm.llm import LLM

MODEL = "llama, three heads a group"
LOADS = ["decode", "decode", "prefill", "shared prefix", "mixed lengths"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny(MODEL).folder), num_pages=1, device="cpu", dtype="float32")


def test_the_engine_is_in_the_middle_of_its_answers(llm):
    for index, shared in (("none", 0), ("radix", QUICK.shared)):
        engine = decoding(llm, QUICK, 3, index)
        assert engine.stats()["cached_tokens"] == 2 * shared
        chunks = engine.scheduler.schedule()
        assert [len(chunk.token_ids) for chunk in chunks] == [1, 1, 1]
        assert len({tuple(chunk.pages[:2]) for chunk in chunks}) == (1 if shared else 3)


def test_both_run_the_same_weights(llm):
    """Their step behind a prompt gives the token that the true logits name."""
    bench = EngineBench(llm, str(tiny(MODEL).folder), QUICK)
    engine = decoding(llm, QUICK, 1)
    (state,) = engine.scheduler.running
    prompt = bench.peer.prompt[: QUICK.context]
    assert list(state.tokens[: QUICK.shared]) == prompt[: QUICK.shared]
    assert bench.peer.decoding(2)() == 2
    best = bench.peer.forward(torch.tensor([prompt]), bench.peer.new_cache())
    assert int(best) == int(tiny(MODEL).logits(prompt)[-1].argmax())


def test_the_parts_add_up_and_the_clocks_go(llm):
    model = decoder_of(llm)
    engine = decoding(llm, QUICK, 2)
    plain = [vars(m).copy() for m in model.modules()]
    parts = parts_of_steps(engine, 3)
    assert set(parts) == {
        "products",
        "head",
        "attention",
        "norms",
        "rotation",
        "gates",
        "sampling",
        "scheduling and cache",
        "Python",
    }
    assert all(seconds > 0 for seconds in parts.values())
    assert [vars(m) for m in model.modules()] == plain
    assert all("forward" not in vars(layer) for layer in engine.runner.memory)
    assert "timed" not in repr([p.multiply for p in model.products()])


def test_the_jobs_are_spread_evenly():
    prompts, answers = zip(*mixed_jobs(Sizes()), strict=True)
    assert sorted(prompts) == list(prompts) and max(prompts) == 494
    assert sorted(answers) == [1 + 4 * (i + 1) for i in range(16)]
    assert sorted(answers) != list(answers)


def run_main(*arguments: str) -> object:
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    return end.value.code


def test_the_command(capsys, tmp_path):
    path = tmp_path / "engine.json"
    given = ["--model", str(tiny(MODEL).folder), "--device", "cpu", "--quick"]
    code = run_main("bench", "engine", *given, "--json", "--record", str(path))
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert code == 0 and json.loads(path.read_text("utf-8")) == record
    rows = record["rows"]
    assert [row["load"] for row in rows] == LOADS * 2
    assert [row["dtype"] for row in rows] == ["float32"] * 5 + ["bfloat16"] * 5
    for row in rows:
        own, other = row["own_s"]["values"], row["other_s"]["values"]
        pairs = [b / a for a, b in zip(own, other, strict=True)]
        assert row["ratio"]["values"] == pytest.approx(pairs)
    assert [each["num_requests"] for each in record["breakdowns"]] == [1, 2] * 4
    kernels = [each["kernels"] for each in record["breakdowns"]]
    assert kernels == ["torch", "torch", "auto", "auto"] * 2
    assert {"command", "commit", "cpu", "threads", "versions"} < record.keys()
    assert err.count("×") == len(rows) and err.count("%") > 20


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--dtype", "int4"], "dtype"),
        (["--record", "/nowhere/at/all.json"], "--record"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(capsys, arguments, named):
    assert run_main("bench", "engine", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and named in err and len(err.strip().splitlines()) == 1
