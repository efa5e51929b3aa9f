"""The experiment of `minivllm bench reuse`: counts, moments, the record; no time.

On a virtual clock where a plan is asked for, and on tiny random weights.
"""

import json
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny

from minivllm.bench_reuse import (
    ARRIVALS,
    Case,
    Outcome,
    Reuse,
    group_cases,
    load_reuse,
    make_cases,
    make_reuse_row,
    measure_reuse,
)
from minivllm.cli import main
from minivllm.engine import Limits
from minivllm.llm import LLM
from minivllm.simulation import SerialPrefill, SimulatedRunner, VirtualClock

PUBLISH = ("off", "finish", "prompt", "step", "schedule")
WAITS = ("none", "completion", "prefill")
MODEL = "llama, three heads a group"
PREFILL_S, DECODE_S = 10.0, 1.0  # a prompt of 45 is one chunk


def simulated(num_pages, clock):
    cost = SerialPrefill(PREFILL_S - 0.45, 0.01, DECODE_S, k=0.5)
    return SimulatedRunner(cost, clock, 101, num_pages, 16)


@pytest.fixture
def reuse() -> Reuse:
    """45 prompt tokens (two full pages), 6 output tokens, on a virtual clock."""
    limits = Limits(101, 256)
    return Reuse(
        simulated, limits, range(45), 6, max_batch_tokens=64, make_clock=VirtualClock
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny(MODEL).folder), num_pages=1, device="cpu", dtype="float32")


@pytest.fixture
def real(llm) -> Reuse:
    return load_reuse(llm, 45, max_tokens=6, max_batch_tokens=64)


# ---- cases and plans -----------------------------------------------------------------


def test_cases_are_the_combinations_that_can_differ():
    cases = make_cases((1, 2, 8), PUBLISH, WAITS, ARRIVALS, ["transformers"])
    assert len(cases) == len(set(cases))
    for case in cases:
        alone = case.num_requests == 1 or case.publish == "off"
        assert not alone or case.single_flight == "none"
        assert case.arrival == "together" or case.num_requests == 2
    ours = [case for case in cases if case.engine == "minivllm"]
    num_pairs = 1 + 4 * 3  # off, and four policies with three ways to wait
    assert len(ours) == 5 + 2 * num_pairs + 2 * num_pairs
    assert [c.num_requests for c in cases if c.engine == "transformers"] == [1, 2, 8]


def test_a_group_has_one_plan_and_differs_in_publication_only(reuse):
    cases = make_cases((1, 2, 8), PUBLISH, WAITS, ARRIVALS)
    groups = group_cases(reuse, cases)
    assert sorted(repr(case) for group in groups for case in group) == sorted(
        map(repr, cases)
    )
    for group in groups:
        assert len({replace(case, publish="") for case in group}) == 1
        assert len({reuse.run(case).plan for case in group}) == 1
    eight = [g for g in groups if g[0].num_requests == 8]
    names = {(g[0].single_flight, *(case.publish for case in g)) for g in eight}
    assert names == {
        ("none", "off", "finish"),
        ("none", "prompt", "step"),
        ("none", "schedule"),
        ("completion", "finish", "prompt", "step", "schedule"),
        ("prefill", "finish", "prompt", "step", "schedule"),
    }


def test_a_rehearsal_takes_the_steps_of_the_real_run(real):
    for case in make_cases((2, 3), ("off", "step", "schedule"), WAITS, ARRIVALS):
        plan = real.rehearse(case)
        assert plan == real.run(case).plan and real.rehearse(Case(8)) != plan
    num_steps = len(real.steps)
    real.rehearse(Case(2))
    assert len(real.steps) == num_steps  # what a rehearsal took is no measurement


# ---- what a run counts ---------------------------------------------------------------


@pytest.mark.parametrize("publish", PUBLISH)
@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("arrival", ARRIVALS)
def test_counts_of_two_on_weights(real, publish, waits, arrival):
    if publish == "off" and waits != "none":
        pytest.skip("nothing to wait for")
    run = real.run(Case(2, publish, waits, arrival))
    shares = waits != "none" or publish == "schedule"
    if arrival != "together":
        shares |= publish in ("prompt", "step")
    assert run.cached_tokens == (0, 32 if shares else 0)
    assert run.prefill_tokens == 90 - 32 * shares
    assert run.token_ids == real.run(Case()).token_ids * 2


@pytest.mark.parametrize("number", [1, 4, 8])
def test_the_best_policy_computes_one_prompt(real, number):
    for case in (Case(number, "finish", "prefill"), Case(number, "schedule")):
        run = real.run(case)
        assert run.cached_tokens == (0,) + (32,) * (number - 1)
        assert run.prefill_tokens == 45 + 13 * (number - 1)


def test_times_are_those_of_the_clock(reuse):
    alone = reuse.run(Case())
    whole = PREFILL_S + 5 * DECODE_S
    assert alone.ttfts_s == pytest.approx((PREFILL_S,))
    assert (*alone.e2es_s, alone.makespan_s) == pytest.approx((whole, whole))
    held = reuse.run(Case(2, "step", "completion"))
    second = whole + PREFILL_S - 0.32  # 13 tokens, one chunk
    assert held.ttfts_s == pytest.approx((PREFILL_S, second))
    assert held.e2es_s == pytest.approx((whole, second + 5 * DECODE_S))
    assert held.makespan_s == held.e2es_s[1]


# ---- the second arrival's moment -----------------------------------------------------


@pytest.mark.parametrize("arrival", ["token", "decode"])
def test_the_second_comes_between_prefill_and_first_decode(reuse, arrival):
    """It starts in the first decode step, and its wait began when the prefill ended."""
    run = reuse.run(Case(2, "step", "none", arrival))
    assert run.plan[:2] == ((("0", 0, 45),), (("0", 45, 1), ("1", 32, 13)))
    mixed = DECODE_S + PREFILL_S - 0.32
    assert run.ttfts_s == pytest.approx((PREFILL_S, mixed))
    first_end = PREFILL_S + mixed + 4 * 1.5 * DECODE_S
    assert run.e2es_s == pytest.approx((first_end, first_end - PREFILL_S + DECODE_S))
    assert run.makespan_s == pytest.approx(first_end + DECODE_S)


def test_at_decode_the_flight_is_still_open_and_at_the_token_it_is_not(reuse):
    for publish in PUBLISH[1:]:
        token, decode = (
            reuse.run(Case(2, publish, "prefill", arrival))
            for arrival in ("token", "decode")
        )
        assert (token.flights, decode.flights) == (2, 1)
        assert token.plan == decode.plan  # and nothing else differs
        late = reuse.run(Case(2, publish, "completion", "token"))
        assert late.flights == 1 and late.plan[:2] != token.plan[:2]


def test_a_prompt_in_chunks_has_its_first_token_at_its_end(reuse):
    short = replace(reuse, max_batch_tokens=20)
    for arrival in ("token", "decode"):
        plan = short.run(Case(2, "step", "none", arrival)).plan
        assert plan[:3] == ((("0", 0, 20),), (("0", 20, 20),), (("0", 40, 5),))
        assert plan[3] == (("0", 45, 1), ("1", 32, 13))


# ---- rows ----------------------------------------------------------------------------


def test_members_of_a_group_take_turns_and_groups_too(reuse):
    seen = []

    def run(case):
        seen.append(case)
        return reuse.run(case)

    cases = make_cases((2,), ("finish", "step", "schedule"), ("completion", "prefill"))
    one, two = groups = group_cases(reuse, cases)
    rows = measure_reuse({"minivllm": run}, groups, repeats=3)
    assert seen == [Case(), one[0], two[0], two[1], one[1], one[2], two[2]]
    assert rows[0].ran == rows[0].publish == ["finish", "step", "schedule"]
    assert all(row.same_tokens for row in rows)
    assert all(len(row.ttft_s["values"]) == 3 for row in rows)


def test_a_row_tells_other_tokens_and_refuses_other_counts():
    one = Outcome((3.0,), (5.0,), 6.0, (0,), 45, 1, ((7, 8),))
    two = replace(one, ttfts_s=(1.0,))
    row = make_reuse_row(
        [Case()], [(Case(), one), (Case(), two), (Case(), two)], (7, 8)
    )
    assert row.ttft_s == {"median": 1, "low": 1, "high": 3, "values": [3, 1, 1]}
    assert (row.ttfts_s, row.e2es_s) == ([1], [5])
    assert row.same_tokens and (row.prefill_tokens, row.flights) == (45, 1)
    wrong = replace(two, token_ids=((7, 9),))
    assert not make_reuse_row(
        [Case()], [(Case(), one), (Case(), wrong)], (7, 8)
    ).same_tokens
    other = replace(two, prefill_tokens=46)
    with pytest.raises(RuntimeError, match="took different steps"):
        make_reuse_row([Case()], [(Case(), one), (Case(), other)], (7, 8))


def test_a_request_that_fails_is_no_measurement(reuse):
    class Fails(SimulatedRunner):
        def run(self, chunks):
            if len(chunks) == 2:
                raise RuntimeError("a kernel failed")
            return super().run(chunks)

    def make(num_pages, clock):
        return Fails(SerialPrefill(1, 1, 1, 0), clock, 101, num_pages, 16)

    with pytest.raises(RuntimeError, match="ended before its time"):
        replace(reuse, make_runner=make).run(Case(2, "step", "prefill"))


# ---- the command ---------------------------------------------------------------------


def run_main(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return end.value.code, out, err


@pytest.fixture
def small():
    model = ["--model", str(tiny(MODEL).folder), "--device", "cpu"]
    return [*model, "--prompt-tokens", "45", "--max-batch-tokens", "64"]


def test_bench_reuse_prints_a_record_and_keeps_it(capsys, tmp_path, small):
    path = tmp_path / "reuse.json"
    given = ["--quick", "--max-tokens", "5", "--repeats", "2", "--peer", "transformers"]
    code, out, err = run_main(
        capsys, "bench", "reuse", *small, *given, "--json", "--record", str(path)
    )
    record = json.loads(out)
    assert code == 0 and json.loads(path.read_text("utf-8")) == record
    assert record["schema_version"] == 1 and record["repeats"] == 2
    facts = {"command", "commit", "cpu", "cores", "threads", "device", "dtype", "model"}
    assert facts | {"versions", "absent", "steps", "rows"} < record.keys()
    assert "--max-tokens 5" in record["command"] and "--quick" not in record["command"]
    rows = record["rows"]
    assert all(row["same_tokens"] for row in rows)  # transformers' too
    assert {row["num_requests"] for row in rows} == {1, 2, 8}
    assert {row["arrival"] for row in rows} == set(ARRIVALS)
    for row in rows:
        for times in (row["ttft_s"], row["longest_s"], row["makespan_s"]):
            assert times["low"] <= times["median"] <= times["high"]
            assert len(times["values"]) == 2 == len(row["ran"])
        assert row["ttft_s"]["low"] > 0 and row["cached_tokens"][0] == 0
    theirs = [row for row in rows if row["engine"] == "transformers"]
    assert [row["prefill_tokens"] for row in theirs] == [45, 90, 360]
    works = [tuple(step.values())[:3] for step in record["steps"]]
    assert len(set(works)) == len(works) and {(1, 45, 0), (0, 0, 8)} < set(works)
    assert "8 together  prefill    finish step schedule" in err


def test_bench_reuse_for_people(capsys, small):
    given = ["--num-requests", "2", "--max-tokens", "4", "--repeats", "1"]
    chosen = ["--publish", "step", "--single-flight", "prefill", "--arrival", "token"]
    code, out, err = run_main(capsys, "bench", "reuse", *small, *given, *chosen)
    head, row = out.splitlines()
    assert code == 0 and "computed" in head
    assert row.startswith("2 token     prefill    step") and row.endswith("58  yes")
    assert len(err.splitlines()) == 1  # a sign of life for each run


def test_a_peer_that_cannot_load_is_told(capsys, small, monkeypatch):
    import minivllm.bench_reuse as module

    def refuse(*parts):
        raise ImportError("accelerate is\nmissing")

    monkeypatch.setitem(module.PEERS, "transformers", refuse)
    given = ["--num-requests", "1", "--max-tokens", "2", "--repeats", "1"]
    code, out, _ = run_main(
        capsys, "bench", "reuse", *small, *given, "--peer", "transformers"
    )
    assert code == 0 and "transformers: not measured: accelerate is missing" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--num-requests", "0"], "num_requests"),
        (["--publish", "never"], "off, schedule, step, prompt, finish"),
        (["--single-flight", "always"], "none, completion, prefill"),
        (["--arrival", "late"], "together, token, decode"),
        (["--peer", "vllm"], "peer must be one of transformers"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be at least 1"),
        (["--page-size", "0"], "page_size"),
        (["--max-batch-tokens", "0"], "max_batch_tokens"),
        (["--dtype", "int3"], "dtype"),
        (["--device", "abacus"], "device"),
        (["--record", "/nowhere/reuse.json"], "/nowhere/reuse.json cannot"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--prompt-tokens", "300"], "context"),
        (["--pages", "3"], "pages"),
    ],
)
def test_mistakes_are_one_line(arguments, named, capsys, small):
    code, out, err = run_main(capsys, "bench", "reuse", *small, *arguments)
    assert code == 2 and out == ""
    assert named in err and len(err.strip().splitlines()) == 1
    assert err.startswith("minivllm: ")


def test_a_prompt_has_the_length_asked_for(llm):
    prompt = load_reuse(llm, 130, max_tokens=9).prompt_ids
    assert list(prompt) == [i % 101 for i in range(130)]


def test_smollm2s_prompt_is_text(make_llm):
    like = load_reuse(make_llm(num_pages=1), 493)
    assert len(like.prompt_ids) == 493 and len(set(like.prompt_ids)) > 20
    assert torch.get_num_threads() > 0


def test_more_tokens_than_the_context(llm):
    """They would be cut short, and the record would say they were not."""
    with pytest.raises(ValueError, match="258 tokens, and the model's context is 256"):
        load_reuse(llm, 130, max_tokens=128)
