"""Traces, the reuse curve, replays on a virtual clock, and the public benchmark."""

import json
import os
import subprocess
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.batch import Chunk
from minivllm.cli import main
from minivllm.options import read_options
from minivllm.replay import Replay, percentile, reuse_curve
from minivllm.request import SamplingParams, encode_ids
from minivllm.roofline import (
    COSTS,
    Load,
    Roofline,
    errors,
    fit_roofline,
    load_of,
    read_cost,
)
from minivllm.timeline import REQUESTS
from minivllm.workloads import (
    GENERATORS,
    TraceRequest,
    generate,
    read_trace,
    to_line,
)

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "figures" / "published" / "mini_vllm_rs.json"
COST = Roofline(0.0, 0.03, 5e-6, 1e-3, 3e-7)


def find_trace() -> Path:
    """The public trace, where the README says that it lies."""
    folder = os.environ.get("MINIVLLM_TRACES") or ROOT.parent / "shared" / "data"
    return Path(folder) / "mooncake_conversation_trace.jsonl"


@pytest.fixture(scope="module")
def conversation():
    path = find_trace()
    if not path.is_file():
        pytest.skip(f"{path} is not here: set MINIVLLM_TRACES to the trace's folder")
    return read_trace(path)


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", "utf-8")
    return path


def own(ms: float, ids: list[int], output: int = 4, **more: object) -> dict:
    return {"timestamp": ms, "prompt_token_ids": ids, "output_length": output} | more


def blocks(ms: float, size: int, names: list[int], **more: object) -> dict:
    line = {"timestamp": ms, "input_length": size, "hash_ids": names}
    return line | {"output_length": 4} | more


def run(requests, capacity=0, cost=COST, **options):
    options = {"page_size": 16} | options
    replay = Replay(requests, read_options(options), capacity, cost)
    return replay.run(), replay


# ---- The reuse curve -----------------------------------------------------------------


def naive_curve(lines, capacity: int, size: int) -> float:
    """One cache, one capacity: a list, the most recent block last.

    A line is the names of the blocks and the length in tokens.
    """
    room = capacity // size if capacity else sys.maxsize
    cache: list = []
    found = total = 0
    for i, (names, num_tokens) in enumerate(lines):
        hit = 0
        while hit < len(names) and names[hit] in cache:
            hit += 1
        if i >= len(lines) // 2:
            found += min(hit * size, num_tokens - 1)
            total += num_tokens
        for name in reversed(names):
            if name in cache:
                cache.remove(name)
            cache.append(name)
        del cache[: max(0, len(cache) - room)]
    return found / total


def named(ids: list[int], size: int) -> TraceRequest:
    return TraceRequest("", 0.0, array("i", ids), size, 1, 512)


any_names = st.lists(st.integers(1, 12), min_size=1, max_size=6)
ROOMS = [0, 512, 1024, 1536, 2048, 2560, 4096, 6144, 511, 1]


@given(
    st.lists(st.tuples(any_names, st.integers(1, 512)), min_size=1, max_size=25),
    st.permutations(ROOMS),
)
@settings(max_examples=300, deadline=None)
def test_the_curve_is_that_of_naive_caches(lines, capacities) -> None:
    """Names without order, doubled ones as well; partial last blocks."""
    told = [(names, 512 * (len(names) - 1) + rest) for names, rest in lines]
    requests = [named(names, size) for names, size in told]
    expected = [naive_curve(told, size, 512) for size in capacities]
    assert reuse_curve(requests, capacities, 512) == expected


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1))
@settings(max_examples=200, deadline=None)
def test_the_curve_of_token_ids(prompts) -> None:
    """Pages of 3 tokens, the last one perhaps partial; a name is a prefix."""
    ends = [[*range(3, len(ids), 3), len(ids)] for ids in prompts]
    told = [
        ([tuple(ids[:end]) for end in each], len(ids))
        for ids, each in zip(prompts, ends, strict=True)
    ]
    requests = [TraceRequest("", 0.0, array("i", ids), len(ids), 1) for ids in prompts]
    sizes = [0, 2, 3, 6, 9, 15, 30]
    expected = [naive_curve(told, size, 3) for size in sizes]
    found = reuse_curve(requests, sizes, 3)
    assert found == expected
    assert found[1:] == sorted(found[1:]) and found[0] >= found[-1], "more finds more"


def test_the_curve_keeps_salts_apart() -> None:
    plain = [TraceRequest("", 0.0, array("i", [1] * 8), 8, 1) for _ in range(4)]
    salted = [replace(r, extra_key=f"{i}") for i, r in enumerate(plain)]
    assert reuse_curve(plain, [0], 4) == [7 / 8]
    assert reuse_curve(salted, [0], 4) == [0.0]


PUBLIC = [4.5, 4.5, 4.5, 5.6, 18.8, 35.6, 39.8]  # % found: 16K to 16M tokens, and all


def test_the_public_trace(conversation) -> None:
    """The figures that were counted elsewhere, and the time of one pass."""
    assert len(conversation) == 12_031
    assert sum(r.num_tokens for r in conversation) == 144_793_823
    seen: set[int] = set()
    hit_blocks = hit_tokens = 0
    for request in conversation:
        hit = next((i for i, n in enumerate(request.ids) if n not in seen), None)
        hit = len(request.ids) if hit is None else hit
        hit_blocks += hit
        hit_tokens += min(512 * hit, request.num_tokens - 1)
        seen.update(request.ids)
    assert round(100 * hit_blocks / sum(len(r.ids) for r in conversation), 2) == 36.64
    assert round(100 * hit_tokens / 144_793_823, 2) == 37.36
    sizes = [2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 0]
    start = time.perf_counter()
    rates = reuse_curve(conversation, sizes, 512)
    assert time.perf_counter() - start < 60  # half a second where nothing else runs
    assert [100 * rate for rate in rates] == pytest.approx(PUBLIC, abs=0.1)


# ---- Reading -------------------------------------------------------------------------

BAD = {
    "not JSON": ([own(0, [1]), "{nonsense"], 2, "not JSON"),
    "f14, deep": ([own(0, [1]), "[" * 3_000 + "]" * 3_000], 2, "not JSON"),
    "no object": (["[1, 2]"], 1, "object"),
    "no prompt": ([{"timestamp": 0, "output_length": 1}], 1, "prompt_token_ids"),
    "empty prompt": ([own(0, [])], 1, "prompt_token_ids"),
    "text as ids": ([{**own(0, [1]), "prompt_token_ids": "12"}], 1, "prompt_token_ids"),
    "a float id": ([own(0, [1, 2.0])], 1, "whole numbers"),
    "a truth value": ([own(0, [1, True])], 1, "whole numbers"),
    "a negative id": ([own(0, [1, -2])], 1, "whole numbers"),
    "a large id": ([own(0, [2**31])], 1, "32-bit"),
    "negative time": ([own(0, [1]), own(-1, [1])], 2, "timestamp"),
    "no time": ([own(None, [1])], 1, "timestamp"),
    "time is NaN": (['{"timestamp": NaN, "prompt_token_ids": [1]}'], 1, "timestamp"),
    "no output": ([own(0, [1], 0)], 1, "output_length"),
    "half an output": ([own(0, [1], 1.5)], 1, "output_length"),
    "too few names": ([blocks(0, 1025, [1, 2])], 1, "3 blocks"),
    "too many names": ([blocks(0, 1024, [1, 2, 3])], 1, "2 blocks"),
    "no length": ([blocks(0, 0, [])], 1, "input_length"),
    "names of text": ([blocks(0, 5, ["x"])], 1, "hash_ids"),
    "both kinds": ([own(0, [1]), blocks(0, 5, [1])], 2, "in one file"),
    "an id twice": ([own(0, [1], id="a"), "", own(0, [1], id="a")], 3, "'a' is taken"),
    "a number's id": ([own(0, [1], id=1), own(0, [1])], 2, "'1' is taken"),
    "unknown after": ([own(0, [1]), own(0, [1], after="z")], 2, "after 'z'"),
    "after itself": ([own(0, [1], id="a", after="a")], 1, "waits for itself"),
    "a circle": (
        [own(0, [1]), own(0, [1], after="2"), own(0, [1], after="1")],
        *(2, "waits for itself"),
    ),
    "a way into a circle": (
        [own(0, [1], after="1"), own(0, [1], after="2"), own(0, [1], after="1")],
        *(2, "waits for itself"),
    ),
    "after a list": ([own(0, [1], after=["a"])], 1, "after"),
    "a key of lists": ([own(0, [1], extra_key=[1])], 1, "extra_key"),
    "priority": ([own(0, [1], priority="high")], 1, "priority"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named(tmp_path, capsys, case) -> None:
    """One line on stderr, with file and line; exit code 2; nothing on stdout."""
    lines, number, words = BAD[case]
    path = write(tmp_path, *lines)
    with pytest.raises(SystemExit) as end:
        main(["simulate", str(path), "--json"])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out and err.count("\n") == 1
    assert f"{path}:{number}: " in err and words in err


def test_files_that_are_none(tmp_path, capsys) -> None:
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n\n", "utf-8")
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (empty, binary, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SystemExit) as end:
            main(["simulate", str(path)])
        err = capsys.readouterr().err
        assert end.value.code == 2 and err.count("\n") == 1 and str(path) in err


def test_a_long_chain_is_no_circle() -> None:
    """Ten thousand turns, the last first: no recursion, and no quadratic walk."""
    number = 10_000
    turns = [
        TraceRequest(str(i), 0.0, array("i", [1]), 1, 1, after=str(i + 1))
        for i in range(number - 1)
    ]
    turns.append(TraceRequest(str(number - 1), 0.0, array("i", [1]), 1, 1))
    served, _ = run(turns)
    assert len(served) == number


keys = st.none() | st.text(max_size=3) | st.integers(-5, 5)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_written_and_read(tmp_path_factory, data) -> None:
    """What `to_line` writes `read_trace` reads: both formats, all that is optional."""
    named_blocks = data.draw(st.booleans())
    requests = []
    for i in range(data.draw(st.integers(1, 5))):
        ids = list(range(1, 1 + data.draw(st.integers(1, 4))))
        size = len(ids)
        if named_blocks:
            size = 512 * len(ids) - data.draw(st.integers(0, 511))
        after = str(data.draw(st.integers(0, i - 1))) if i else None
        requests.append(
            TraceRequest(
                str(i),
                float(data.draw(st.integers(0, 10**6))),
                array("i", ids),
                size,
                data.draw(st.integers(1, 9)),
                512 if named_blocks else 1,
                data.draw(st.sampled_from([None, after])),
                data.draw(keys) or None,
                data.draw(st.integers(-3, 3)),
            )
        )
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    path.write_text("\n".join(map(to_line, requests)), "utf-8")
    assert read_trace(path) == requests


# ---- Generators ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators(kind) -> None:
    """A name is a trace; another seed is another one; a longer one begins alike."""
    one, again, other = (generate(f"{kind}-{seed}", 60) for seed in (1, 1, 2))
    assert one == again != other and len(one) == 60
    assert generate(f"{kind}-1", 20) == one[:20]
    served, replay = run(one, 0)
    assert all(s.finish_reason == "length" and s.ttft_s > 0 for s in served)
    assert [s.output_tokens for s in served] == [r.output_length for r in one]
    assert replay.engine.stats()["cached_tokens"] > 0
    replay.engine.scheduler.cache.check()


@pytest.mark.parametrize("name", ["", "agents", "agents-x", "nothing-1", "agents--1"])
def test_generators_that_do_not_exist(name) -> None:
    with pytest.raises(ValueError, match="no generator"):
        generate(name, 5)


def test_turns_find_prompt_and_answer() -> None:
    """The next turn holds the answer, so the simulated model gave just this answer."""
    requests = generate("agents-3", 8)
    served, _ = run(requests)
    for before, request, one in zip(requests, requests[1:], served[1:], strict=False):
        there = before.num_tokens + before.output_length - 1  # have K/V
        assert request.ids[: before.num_tokens] == before.ids
        assert one.cached_tokens == there // 16 * 16


# ---- Replaying -----------------------------------------------------------------------


def request(name: str, ms: float = 0.0, number: int = 40, **more) -> TraceRequest:
    ids = array("i", range(number))
    return TraceRequest(name, ms, ids, number, more.pop("output", 4), **more)


def test_an_open_loop_comes_at_its_times() -> None:
    """The answer to when: each TTFT begins at the request's own time."""
    one, two = request("a"), request("b", ms=60_000.0)
    (first, second), replay = run([one, two])
    cold = COST.load_s(Load(40, 40 * 41 // 2, 40))
    warm = COST.load_s(Load(8, 8 * 32 + 36, 40))
    assert first.ttft_s == pytest.approx(cold) and first.cached_tokens == 0
    assert second.ttft_s == pytest.approx(warm) and second.cached_tokens == 32
    assert replay.clock.now() == pytest.approx(60 + second.e2e_s)


def test_a_closed_loop_comes_at_the_later_time() -> None:
    """After the end of another request, or at its own time if that is later."""
    early = [request("a"), request("b", after="a"), request("c", after="b")]
    served, replay = run(early)
    assert replay.clock.now() == pytest.approx(sum(s.e2e_s for s in served))
    late, _ = run([request("a"), request("b", ms=90_000.0, after="a")])
    assert late[1].ttft_s == pytest.approx(served[1].ttft_s)


def test_the_order_of_lines_does_not_matter() -> None:
    """What comes when is a matter of times: shuffled lines give the same ends."""
    requests = generate("mixed-5", 80)
    mixed = Random(0).sample(requests, len(requests))
    plain, shuffled = run(requests, 8192)[0], run(mixed, 8192)[0]
    assert sorted(map(repr, plain)) == sorted(map(repr, shuffled))
    assert [s.id for s in shuffled] == [r.name for r in mixed]


def test_a_part_of_a_trace() -> None:
    """Who came after a request that was cut off comes at its own time."""
    served, _ = run([request("a", after="b"), request("c", after="a")])
    assert [s.finish_reason for s in served] == ["length", "length"]


def test_what_never_fits_is_refused() -> None:
    """The others go on, and who came after it comes at its time."""
    requests = [
        request("small"),
        request("large", ms=5.0, number=100),
        request("next", after="large"),
    ]
    served, replay = run(requests, capacity=64)
    large = served[1]
    assert large.finish_reason == "error" and large.ttft_s is None
    assert served[0].finish_reason == served[2].finish_reason == "length"
    assert replay.num_pages == 4
    fits, _ = run([request("f", number=61, output=4)], capacity=64)
    assert fits[0].finish_reason == "length", "the last token needs no K/V"


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_one_at_a_time_the_engine_finds_what_was_there(lines) -> None:
    """Named blocks in pages of 512: whole leading blocks, and no partial one."""
    numbers: dict[tuple[int, ...], int] = {}
    requests, seen, expected = [], set(), []
    for i, (path, partial) in enumerate(lines):
        paths = [tuple(path[: j + 1]) for j in range(len(path))]
        names = [numbers.setdefault(p, len(numbers) + 1) for p in paths]
        if partial:
            names[-1] = 1000 + i
        size = 512 * len(names) - 100 * partial
        requests.append(TraceRequest(str(i), 1e6 * i, array("i", names), size, 2, 512))
        hit = 0
        while hit < len(names) and names[hit] in seen:
            hit += 1
        expected.append(min(512 * hit, size - 1))
        seen.update(names[:-1] if partial else names)
    served, _ = run(requests, page_size=512, cost=COSTS["70b-8xh100"])
    assert [s.cached_tokens for s in served] == expected


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_policies_do_not_change_what_is_answered(index) -> None:
    """Every request gets its tokens under every policy; memory is given back."""
    requests = generate("tree-of-thought-2", 60)
    for publish in ("finish", "prompt", "step", "schedule"):
        for eviction in ("lru", "lfu", "fifo"):
            options = {"publish": publish, "eviction": eviction, "index": index}
            served, replay = run(requests, 4096, **options)
            wanted = [r.output_length for r in requests]
            assert [s.output_tokens for s in served] == wanted
            stats = replay.engine.stats()
            assert stats["pages_private"] == stats["pages_pinned"] == 0
            replay.engine.scheduler.cache.check()


def test_an_engine_that_does_not_stream_tells_the_same_ends() -> None:
    """`streams=False`: each request once, at its end, and as it would be otherwise."""
    ends = []
    for streams in (True, False):
        replay = Replay(generate("bursts-1", 8), read_options({}), 0, COST)
        replay.engine.streams = streams
        told = []
        ids = array("i", range(40))
        replay.engine.runner.told = [array("i")] * 9
        for n in (1, 5, 3):
            replay.engine.submit(ids, SamplingParams(max_tokens=n))
        while replay.engine.has_unfinished():
            told += replay.engine.step()
        assert len(told) == (1 + 5 + 3 if streams else 3)
        ends.append([repr(o) for o in told if o.finished])
    assert ends[0] == ends[1]


def test_percentiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, q) for q in (0.01, 0.5, 0.99, 1)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.5) == 7.0


def calls_of(number: int) -> int:
    """Python calls that a replay of so many short requests takes."""
    requests = generate("system-prompt-1", number)
    requests = [replace(r, output_length=4) for r in requests]
    replay = Replay(requests, read_options({}), 16_384, COSTS["8b-h100"])
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        replay.run()
    finally:
        sys.setprofile(None)
    return calls


def test_cost_grows_with_the_number_of_requests_and_no_faster() -> None:
    """Counted, not timed: twice the requests, twice the calls."""
    one, two = calls_of(1_000), calls_of(2_000)
    assert 1.9 < two / one < 2.1


@pytest.mark.slow
def test_the_public_trace_through_the_commands(conversation) -> None:
    """Some minutes. 2 GB at most, and twice the requests take twice the time.

    The scheduler finds what was there, but for partial blocks.
    """
    halves, seconds, _ = used_by("--requests", "6000", "--json")
    told, all_seconds, peak_bytes = used_by("--json")
    assert len(halves["requests"]) == 6_000 and len(told["requests"]) == 12_031
    assert all_seconds < 3 * seconds and peak_bytes < 2e9, (all_seconds, seconds)
    totals = told["totals"]
    assert totals["queried_tokens"] == 144_793_823
    assert 0.370 < totals["cached_tokens"] / totals["queried_tokens"] < 0.3737
    assert sum(r["output_tokens"] for r in told["requests"]) == 4_122_048
    assert {r["finish_reason"] for r in told["requests"]} == {"length"}
    told, _, peak_bytes = used_by("--cache-only", "--json")
    rates = [100 * each["hit_rate"] for each in told["capacities"]]
    assert rates == pytest.approx(PUBLIC, abs=0.1) and peak_bytes < 2e9


MEASURED = """
import resource, sys
from minivllm.cli import main
try:
    main(["simulate", *sys.argv[1:]])
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime, used.ru_maxrss, file=sys.stderr)
"""


def used_by(*arguments: str) -> tuple[dict, float, float]:
    """What `simulate` says of the public trace; CPU seconds, and bytes at most."""
    pytest.importorskip("resource", reason="Windows does not tell the peak")
    command = [sys.executable, "-c", MEASURED, str(find_trace()), *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    seconds, peak = map(float, done.stderr.split()[-2:])
    unit = 1 if sys.platform == "darwin" else 1024
    return json.loads(done.stdout), seconds, peak * unit


# ---- The cost model ------------------------------------------------------------------


def chunk(n: int, start: int) -> Chunk:
    return Chunk("x", encode_ids([1] * n), start, range(99), 0, True)


def test_what_a_step_carries() -> None:
    """By hand: three tokens after two see 3 + 4 + 5; all five are read."""
    assert load_of([chunk(3, 2)]) == Load(3, 12, 5)
    assert load_of([chunk(1, 9), chunk(3, 2)]) == Load(4, 22, 15)


LOADS = [
    Load(n, n * s + n * (n + 1) // 2, n + s)
    for n in (1, 4, 16, 64, 128, 256, 512, 2048)
    for s in (0, 128, 4096)
]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_fit_finds_the_machine_again(overlaps) -> None:
    """Both forms, from their own times; with 3 % of noise nearly."""
    fixed = 0.002 if overlaps else 0.0
    truth = Roofline(fixed, 0.03, 4e-6, 4e-4, 3e-8, overlaps)
    exact = [(load, truth.load_s(load)) for load in LOADS]
    found = fit_roofline(exact)
    assert max(map(abs, errors(found, exact))) < 1e-6 and found.overlaps == overlaps
    rng = Random(1)
    noisy = [(load, s * rng.uniform(0.97, 1.03)) for load, s in exact]
    assert max(map(abs, errors(fit_roofline(noisy), exact))) < 0.05


def test_a_fit_has_no_negative_part() -> None:
    rng = Random(2)
    for _ in range(20):
        steps = [(load, rng.uniform(0.01, 0.02)) for load in LOADS]
        found = fit_roofline(steps)
        parts = (found.weights_s, found.read_s, found.token_s, found.pair_s)
        assert min(parts) >= 0 and found.fixed_s + found.weights_s > 0


def test_steps_that_say_nothing() -> None:
    with pytest.raises(ValueError, match="measurements"):
        fit_roofline([])
    with pytest.raises(ValueError, match="measurements"):
        fit_roofline([(Load(4, 10, 4), 0.1)] * 5)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        "{}",
        '{"roofline": {"weights_s": 1}}',
        '{"roofline": {"fixed_s": 0, "weights_s": -1, "read_s": 0, "token_s": 0,'
        ' "pair_s": 0}}',
        '{"roofline": {"fixed_s": 0, "weights_s": 0, "read_s": 0, "token_s": 0,'
        ' "pair_s": 0}}',
        '{"roofline": {"fixed_s": 0, "weights_s": "1", "read_s": 0, "token_s": 0,'
        ' "pair_s": 0}}',
    ],
)
def test_cost_files_that_are_none(tmp_path, text) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"cost\.json"):
        read_cost(str(path))


def test_the_recorded_calibration_is_a_cost_model() -> None:
    path = ROOT / "figures" / "measured" / "calibrate.json"
    record = json.loads(path.read_text("utf-8"))
    cost = read_cost(str(path))
    held = [row for row in record["rows"] if not row["fitted"]]
    assert held and all(
        cost.load_s(Load(*row["load"])) == pytest.approx(row["model_s"])
        for row in record["rows"]
    )


# ---- The public benchmark ------------------------------------------------------------


def published() -> dict:
    return json.loads(PUBLISHED.read_text("utf-8"))


def bench(jobs: list[tuple[list[int], int]], index: str = "radix", **options):
    """Engines as theirs was. A job is (prompt, output tokens); at once, or in turn."""
    chosen = published()["config"]
    names = ("page_size", "num_pages", "max_batch_tokens", "max_running", "publish")
    kept = {name: chosen[name] for name in names}
    kept |= {"single_flight": "none", "admission": "reserve", "index": index}
    together = options.pop("together", False)
    requests, before = [], None
    for i, (ids, output) in enumerate(jobs):
        after = before if not (together and i) else requests[0].name
        requests.append(
            TraceRequest(str(i), 0.0, array("i", ids), len(ids), output, after=after)
        )
        before = str(i)
    capacity = chosen["num_pages"] * chosen["page_size"]
    replay = Replay(requests, read_options(kept | options), capacity, COST)
    return replay.run(), replay


def prompt_of(name: str, size: int) -> list[int]:
    rng = Random(name)
    return [rng.randrange(50_000) for _ in range(size)]


def test_published_overlap() -> None:
    """A seed, then five probes in turn: each restores what it shares, exactly."""
    told = published()["overlap"]
    seed = prompt_of("seed", 927)
    jobs = [(seed, told["output_tokens"])]
    for probe in told["probes"]:
        own_ids = prompt_of(f"probe {probe['input']}", probe["input"])
        shared = probe["restored"]
        jobs.append((seed[:shared] + own_ids[shared:], told["output_tokens"]))
    served, _ = bench(jobs)
    restored = [probe["restored"] for probe in told["probes"]]
    assert [s.cached_tokens for s in served[1:]] == restored == [0, 208, 432, 656, 880]


@pytest.mark.parametrize("group", range(4))
def test_published_fanout(group) -> None:
    """Groups at once on a warm prefix; of eight, five are admitted at first."""
    told = published()["warm_fanout"]
    number, seed = told["groups"][group]["n"], prompt_of("seed", told["input"])
    shared = told["restored_each"]
    jobs = [(seed, 16)]
    for i in range(number):
        own_ids = prompt_of(f"fan {i}", told["input"])
        jobs.append((seed[:shared] + own_ids[shared:], told["output_tokens"]))
    served, replay = bench(jobs, together=True)
    assert [s.cached_tokens for s in served[1:]] == [shared] * number
    reserved = replay.engine.scheduler.cache.pages_for(
        told["input"] + told["output_tokens"] - 1
    )
    if number == 8:
        eight = told["groups"][3]
        first = sorted(s.ttft_s for s in served[1:])
        at_once = sum(ttft == first[0] for ttft in first)
        assert reserved == eight["reserved_pages_each"] == 66
        assert at_once == eight["admitted_at_once"] == 341 // 66 == 5


def test_published_burst() -> None:
    """Four identical prompts at once, cold, and then the same four again."""
    told = published()["burst"]
    prompt, number = prompt_of("burst", told["input"]), told["n"]
    cold = [request(str(i)) for i in range(number)]
    cold = [
        replace(r, ids=array("i", prompt), num_tokens=told["input"], output_length=128)
        for r in cold
    ]
    warm = [replace(r, name=f"warm {r.name}", time_ms=1e7) for r in cold]
    options = published()["config"]
    kept = {n: options[n] for n in ("page_size", "max_batch_tokens", "max_running")}
    kept |= {"publish": "finish", "single_flight": "none", "admission": "reserve"}
    newly = []
    for requests in (cold, cold + warm):
        replay = Replay(requests, read_options(kept), 341 * 16, COST)
        served = replay.run()
        newly.append(replay.engine.stats()["published_tokens"])
    restored = [s.cached_tokens for s in served]
    assert sum(restored[:4]) == told["cold"]["restored_total"] == 0
    assert sum(restored[4:]) == told["warm"]["restored_total"] == 3776
    assert newly == [told["cold"]["newly_indexed"]] * 2 == [1072, 1072]


def test_published_churn() -> None:
    """Eight prompts in turn, twice, and room for five of them: nothing is restored."""
    told = published()["churn"]
    prompts = [prompt_of(f"churn {i}", told["input"]) for i in range(told["distinct"])]
    newly = []
    for cycles in (1, 2):
        served, replay = bench(
            [(ids, told["output_tokens"]) for ids in prompts * cycles]
        )
        assert sum(s.cached_tokens for s in served) == 0
        newly.append(replay.engine.stats()["published_tokens"])
    assert [newly[0], newly[1] - newly[0]] == told["newly_indexed_each_cycle"]
    assert newly[0] == 7808 and told["restored_each_cycle"] == [0, 0]


# ---- The command ---------------------------------------------------------------------


def simulate(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *arguments])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_json_of_a_replay(tmp_path, capsys) -> None:
    """The promised shape, in the order of the lines; the same bytes twice."""
    path = write(
        tmp_path,
        own(50, [1] * 40, id="late"),
        own(0, [1] * 40, 6, id=7),
        own(0, [1] * 56, 2, after="late", priority=1, extra_key=None),
    )
    code, out, _ = simulate(capsys, str(path), "--json", "--page-size", "16")
    told = json.loads(out)
    assert code == 0 and told["schema_version"] == 1
    assert [r["id"] for r in told["requests"]] == ["late", "7", "2"]
    keys = ["id", "cached_tokens", "ttft_s", "e2e_s", "output_tokens", "finish_reason"]
    assert all(list(r) == keys for r in told["requests"])
    assert [r["output_tokens"] for r in told["requests"]] == [4, 6, 2]
    assert told["totals"]["lookups"] == 3
    assert told["totals"]["queried_tokens"] == 136
    assert simulate(capsys, str(path), "--json", "--page-size", "16")[1] == out


def test_json_of_a_curve(tmp_path, capsys) -> None:
    path = write(tmp_path, *(blocks(i, 1000, [1, 2]) for i in range(4)))
    arguments = ["--cache-only", "--capacities", "512,1K,0", "--json"]
    code, out, _ = simulate(capsys, str(path), *arguments)
    assert code == 0
    assert json.loads(out) == {
        "schema_version": 1,
        "capacities": [
            {"tokens": 512, "hit_rate": 0.512},
            {"tokens": 1024, "hit_rate": 0.999},
            {"tokens": 0, "hit_rate": 0.999},
        ],
    }


def test_a_sweep(tmp_path, capsys) -> None:
    """All combinations of lists, as a table, as JSON, and as a picture."""
    svg = tmp_path / "sweep.svg"
    arguments = ["gen:agents-1", "--requests", "40", "--capacity", "4K,0"]
    arguments += ["--publish", "finish,step", "--svg", str(svg)]
    code, out, _ = simulate(capsys, *arguments)
    assert code == 0 and len(out.splitlines()) == 5
    assert out.count("finish") == out.count("step") == 2
    picture = svg.read_text("utf-8")
    assert picture.startswith("<svg") and "TTFT" in picture and "finish" in picture
    runs = json.loads(simulate(capsys, *arguments, "--json")[1])["runs"]
    assert [run["capacity"] for run in runs] == [4096, 0] * 2
    assert {run["options"]["publish"] for run in runs} == {"finish", "step"}
    assert all(run["totals"]["lookups"] == 40 for run in runs)


def test_who_never_fits_has_no_times(capsys) -> None:
    """And keeps its columns; a policy that is named twice is played once."""
    arguments = ["gen:cycle-1", "--requests", "4", "--capacity", "1K,0"]
    code, out, err = simulate(capsys, *arguments, "--index", "radix,radix")
    head, refused, served = (line.split() for line in out.splitlines())
    assert code == 0 and "4 of 4 requests never fit" in err
    assert refused == ["1K", "0.0%", "-", "-", "-", "0"]
    assert len(served) == len(refused) + 3, "its times have units"
    assert head[0] == "tokens"


def test_a_mark_of_byte_order_is_no_text(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(own(0, [1, 2])) + "\n", "utf-8-sig")
    assert read_trace(path)[0].ids == array("i", [1, 2])


def test_a_trace_of_a_replay(tmp_path, capsys) -> None:
    """On the virtual clock: what each request waited is what the replay reports."""
    path = tmp_path / "out.json"
    arguments = ["gen:bursts-1", "--requests", "20", "--json"]
    plain = simulate(capsys, *arguments)[1]
    assert simulate(capsys, *arguments, "--trace", str(path))[1] == plain
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == REQUESTS:
            span = (event["ts"], event["ts"] + event["dur"])
            rows.setdefault(event["tid"], []).append(span)
    lasted = [max(e for _, e in row) - min(s for s, _ in row) for row in rows.values()]
    served = json.loads(plain)["requests"]
    waited = sorted(1e6 * each["e2e_s"] for each in served)
    assert sorted(lasted) == pytest.approx(waited, abs=1)


def test_traffic_written_out_is_the_same_traffic(tmp_path, capsys) -> None:
    path = tmp_path / "out.jsonl"
    arguments = ["--requests", "30", "--json"]
    one = simulate(capsys, "gen:mixed-4", *arguments, "--write", str(path))[1]
    assert len(read_trace(path)) == 30
    assert simulate(capsys, str(path), "--json")[1] == one


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["gen:agents"], "no generator"),
        (["gen:agents-1", "--requests", "0"], "at least 1"),
        (["gen:agents-1", "--requests", "9" * 20], "--requests"),
        (["gen:agents-1", "--cache-only", "--capacity", "8K"], "--capacities"),
        (["gen:agents-1", "--capacities", "8K"], "--cache-only"),
        (["gen:agents-1", "--svg", f"{__file__}/x.svg"], "--svg"),
        (["gen:agents-1", "--capacity", "16Q"], "16Q"),
        (["gen:agents-1", "--capacity", ""], "a size"),
        (["gen:agents-1", "--capacity", "-5"], "-5"),
        (["gen:agents-1", "--capacity", "8"], "8 tokens"),
        (["gen:agents-1", "--publish", "step,never"], "never"),
        (["gen:agents-1", "--cost", "warp"], "warp"),
        (["gen:agents-1", "--svg", "/nowhere/x.svg"], "x.svg"),
        (["gen:agents-1", "--write", "/nowhere/x"], "/nowhere/x"),
        (["gen:agents-1", "--trace", "/nowhere/x.json"], "--trace: /nowhere/x.json"),
        (["gen:agents-1", "--trace", "x", "--capacity", "4K,0"], "one replay"),
        (["gen:agents-1", "--trace", "x", "--cache-only"], "one replay"),
        (["gen:agents-1", "--page-size", "0"], "page_size"),
        (["gen:agents-1", "--device", "cpu"], "device"),
    ],
)
def test_bad_arguments(capsys, arguments, named) -> None:
    code, out, err = simulate(capsys, *arguments)
    assert code == 2 and not out and err.count("\n") == 1 and named in err


def test_a_named_trace_has_one_page_size(tmp_path, capsys) -> None:
    path = write(tmp_path, blocks(0, 1000, [1, 2]))
    code, _, err = simulate(capsys, str(path), "--cache-only", "--page-size", "16")
    assert code == 2 and "512" in err
    code, out, _ = simulate(capsys, str(path), "--page-size", "16", "--json")
    assert code == 0 and json.loads(out)["totals"]["pages_total"] == 63


def test_no_torch(tmp_path) -> None:
    """Simulating needs none of the model's packages."""
    code = (
        "import sys; from minivllm.cli import main\n"
        "try: main(['simulate', 'gen:bursts-0', '--requests', '8'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
