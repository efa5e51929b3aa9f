"""A trace says what happened: by the format's rules, and by the engine's counters."""

import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine import Limits
from minivllm.events import EventLog, both, ignore
from minivllm.options import CHOICES, assemble, read_options
from minivllm.request import SamplingParams
from minivllm.simulation import (
    Arrival,
    Arrivals,
    SerialPrefill,
    SimulatedRunner,
    VirtualClock,
    simulate,
)
from minivllm.timeline import FLIGHTS, STEPS, Timeline, tracing

COST = SerialPrefill(chunk_s=0.01, token_s=0.001, decode_s=0.02, k=0.25)
PHASES = {"held", "queued", "running"}
WORK = {"prefill", "recompute", "decode"}


class FailingRunner(SimulatedRunner):
    """Fails, or is interrupted, in some of its steps."""

    num_runs = 0

    def run(self, chunks):
        self.num_runs += 1
        if fault := self.faults.get(self.num_runs):
            self.clock.advance(0.005)
            raise fault
        return super().run(chunks)


class Interrupter:
    """An observer that Ctrl-C hits now and then, in the middle of a change."""

    def __init__(self, at: set[int]) -> None:
        self.at, self.num_told = at, 0

    def __call__(self, kind, /, **details):
        self.num_told += 1
        if self.num_told in self.at:
            raise KeyboardInterrupt


def make_engine(num_pages=40, faults=None, capacity=100_000, also=ignore, **options):
    options = {"page_size": 4, "max_running": 4, "max_batch_tokens": 16} | options
    clock = VirtualClock()
    runner = FailingRunner(COST, clock, 101, num_pages, options["page_size"])
    runner.faults = faults or {}
    timeline, log = Timeline(clock, capacity), EventLog()
    chosen, limits = read_options(options), Limits(101, 256)
    observer = both(both(timeline, log), also)
    engine = assemble(chosen, num_pages, runner, limits, observer, clock=clock)
    return engine, clock, timeline, log


def load(rng: random.Random, number: int) -> list[Arrival]:
    shared = [rng.randrange(3) for _ in range(24)]
    return [
        Arrival(
            rng.random() * 0.5,
            shared[: rng.choice((0, 9, 24))] + [rng.randrange(2)] * 9,
            SamplingParams(max_tokens=rng.randint(1, 25), ignore_eos=True),
            priority=rng.choice((0, 0, 1)),
        )
        for _ in range(number)
    ]


def run(engine, clock, arrivals, rng=None):
    """Serve all; sometimes abort one. The final outputs by id."""
    todo, done = Arrivals(arrivals), {}
    while todo.next_s() is not None or engine.has_unfinished():
        if not engine.has_unfinished():
            clock.advance_to(todo.next_s())
        outputs = []
        try:
            for a in todo.take(clock.now()):
                engine.submit(a.token_ids, a.params, a.extra_key, a.priority)
            outputs += engine.step()
            if rng and rng.random() < 0.2 and (names := engine.unfinished()):
                outputs += filter(None, [engine.abort(rng.choice(names))])
        except KeyboardInterrupt:
            clock.advance(0.001)
        done |= {o.request_id: o for o in outputs if o.finished}
    return done


# ---- What every trace must be --------------------------------------------------------


def check_format(events: list[dict]) -> None:
    """The rules of the Trace Event Format, as far as we use it."""
    for e in events:
        assert e["ph"] in "XMCisfbe" and e["name"] and isinstance(e["pid"], int), e
        assert e["ph"] == "M" or isinstance(e["ts"], float | int), e
        assert e["ph"] != "X" or e["dur"] >= 0, e
        assert e["ph"] != "C" or all(n >= 0 for n in e["args"].values()), e
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    timed = [e for e in events if e["ph"] != "M"]
    assert named >= {(e["pid"], e["tid"]) for e in timed}, "a row without a name"
    times = defaultdict(list)
    for e in timed:
        times[e["pid"], e["tid"]].append(e["ts"])
    assert all(t == sorted(t) for t in times.values()), "time runs backwards"
    check_spans(timed)
    check_pairs(timed)


def check_spans(timed: list[dict]) -> None:
    """Spans of a row lie inside each other or apart."""
    open_until = defaultdict(list)
    for e in timed:
        if e["ph"] == "X":
            stack, end = open_until[e["pid"], e["tid"]], round(e["ts"] + e["dur"], 3)
            while stack and stack[-1] <= e["ts"]:
                stack.pop()
            assert not stack or end <= stack[-1], f"spans cross: {e}"
            stack.append(end)


def check_pairs(timed: list[dict]) -> None:
    """Every b has its e, every s its f; each end of an arrow lies in a span."""
    for begin, end in (("b", "e"), ("s", "f")):
        first, second = (
            {(e["cat"], e["id"]): e for e in timed if e["ph"] == ph}
            for ph in (begin, end)
        )
        assert first.keys() == second.keys()
        assert len(first) == sum(e["ph"] == begin for e in timed), "an id used twice"
        assert all(e["ts"] <= second[key]["ts"] for key, e in first.items())
    spans = [e for e in timed if e["ph"] == "X"]
    for e in timed:
        if e["ph"] in "sf":
            assert any(
                (x["pid"], x["tid"]) == (e["pid"], e["tid"])
                and x["ts"] <= e["ts"] <= x["ts"] + x["dur"]
                for x in spans
            ), f"an arrow from or to nowhere: {e}"


def check_rows(timeline: Timeline, done: dict) -> None:
    """Phases cover arrival to finish without gap or overlap; work lies inside."""
    by_row, marks = defaultdict(list), timeline.all_marks()
    steps = [m for m in marks if m.track == STEPS and m.name != "evict"]
    for mark in marks:
        if mark.track not in (STEPS, FLIGHTS) and mark.name in PHASES | WORK:
            by_row[mark.track].append(mark)
    for request_id, output in done.items():
        phases = [m for m in by_row[request_id] if m.name in PHASES]
        came, went = output.metrics.arrival_s, output.metrics.finished_s
        ends = [came, *(m.end_s for m in phases)]
        assert ends[:-1] == [m.start_s for m in phases], "a gap or an overlap"
        assert phases[-1].details["ended"] == output.outputs[0].finish_reason
        assert ends[-1] == went
        work = [m for m in by_row[request_id] if m.name in WORK]
        for a, b in pairwise(work):
            assert a.end_s <= b.start_s, "computes twice at once"
        for m in work:
            assert any(
                p.name == "running" and p.start_s <= m.start_s <= m.end_s <= p.end_s
                for p in phases
            ), "computes while it does not run"
            served = sum(m.start_s <= s.start_s < m.end_s for s in steps)
            assert served == (m.details["tokens"] if m.name == "decode" else 1)
        assert work[-1].end_s == went


def check_phases(timeline: Timeline, ends: dict) -> None:
    """The phases of a request follow each other; its work lies in them."""
    for request_id, end in ends.items():
        marks = [m for m in timeline.all_marks() if m.track == request_id]
        phases = [m for m in marks if m.name in PHASES]
        assert [a.end_s for a in phases[:-1]] == [b.start_s for b in phases[1:]]
        assert phases[-1] is end
        for a, b in pairwise([m for m in marks if m.name in WORK]):
            assert a.end_s <= b.start_s <= b.end_s <= end.end_s


def check_counters(timeline: Timeline, stats: dict[str, int], done: dict) -> None:
    """Tokens of the spans against the engine's counters. Nothing may have failed."""
    marks = timeline.all_marks()
    work = [m for m in marks if m.name in WORK]
    generated = sum(max(0, len(o.outputs[0].token_ids) - 1) for o in done.values())
    total = sum(m.details["tokens"] for m in work)
    again = sum(m.details["again"] for m in work if m.name != "decode")
    assert again == stats["recomputed_tokens"]
    assert total == stats["prefill_tokens"] + again + generated
    steps = [m.details for m in marks if m.track == STEPS and m.name != "evict"]
    assert total == sum(s[name] for s in steps for name in WORK)
    assert sum(m.name == "preempt" for m in marks) == stats["preemptions"]
    if steps:
        last = {name: n for name, n in steps[-1].items() if name.startswith("pages_")}
        assert last == {name: stats[name] for name in last} and len(last) == 5
    evicted = sum(m.details["pages"] for m in marks if m.name == "evict")
    assert evicted * 4 == stats["evicted_tokens"]


AXES = ("index", "publish", "single_flight", "grouping", "admission", "eviction")


@st.composite
def choices(draw):
    chosen = {name: draw(st.sampled_from(CHOICES[name])) for name in AXES}
    return chosen | {"num_pages": draw(st.sampled_from((16, 60)))}


@settings(max_examples=150, deadline=None)
@given(chosen=choices(), seed=st.integers(0, 10_000))
def test_a_trace_agrees_with_the_counters_of_any_run(chosen, seed):
    rng = random.Random(seed)
    engine, clock, timeline, _ = make_engine(chosen.pop("num_pages"), **chosen)
    done = run(engine, clock, load(rng, 8))
    assert len(done) == 8 and not timeline._rows and not timeline._flights
    check_format(list(timeline.events()))
    check_rows(timeline, done)
    check_counters(timeline, engine.stats(), done)


@settings(max_examples=150, deadline=None)
@given(chosen=choices(), seed=st.integers(0, 10_000))
def test_a_trace_survives_aborts_failures_and_interruptions(chosen, seed):
    rng = random.Random(seed)
    faults = {
        rng.randint(1, 25): rng.choice((RuntimeError, KeyboardInterrupt))
        for _ in range(3)
    }
    also = Interrupter({rng.randint(1, 300) for _ in range(3)})
    engine, clock, timeline, log = make_engine(
        chosen.pop("num_pages"), faults=faults, also=also, **chosen
    )
    run(engine, clock, load(rng, 8), rng)
    ends = [m for m in timeline.all_marks() if "ended" in m.details]
    assert len(ends) == len({event.details["request_id"] for event in log.of("submit")})
    assert not timeline._rows and not timeline._flights and not timeline._batch
    steps = [m for m in timeline.marks if m.track == STEPS and m.name != "evict"]
    assert len(steps) == len(list(log.of("schedule")))
    done = {m.track: m for m in ends}
    check_format(list(timeline.events()))
    check_phases(timeline, done)


def test_the_random_runs_see_what_they_should():
    """Preemption, recomputation, held requests, arrows, evictions: all of it occurs."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        engine, clock, timeline, _ = make_engine(16)
        arrivals = load(random.Random(seed), 8)
        run(engine, clock, [*arrivals, *arrivals[:3]])
        seen += Counter(mark.name for mark in timeline.all_marks())
    assert min(seen[n] for n in WORK | PHASES | {"preempt", "evict", "arrow"}) > 3


# ---- Single things -------------------------------------------------------------------


def twins(**options):
    engine, clock, timeline, _ = make_engine(max_batch_tokens=64, **options)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    names = [engine.submit(range(40), params) for _ in range(3)]
    return engine, clock, timeline, names


def test_a_follower_is_held_until_an_arrow_reaches_it():
    engine, clock, timeline, _ = twins(single_flight="prefill")
    run(engine, clock, [])
    marks = timeline.all_marks()
    (flight,) = (m for m in marks if m.track == FLIGHTS)
    assert flight.name == "led by 0" and flight.details["waiting"] == ["1", "2"]
    held = {m.track: m for m in marks if m.name == "held"}
    arrows = [m for m in marks if m.name == "arrow"]
    assert [(a.track, a.details["to"]) for a in arrows] == [("0", "1"), ("0", "2")]
    for arrow in arrows:
        mark = held[arrow.details["to"]]
        assert (mark.start_s, mark.end_s) == (flight.start_s, flight.end_s)
        assert arrow.end_s == mark.end_s and arrow.start_s < arrow.end_s
    shown = {e["ph"]: e["ts"] for e in timeline.events() if e["ph"] in "be"}
    assert shown == {"b": 0, "e": pytest.approx(flight.end_s * 1e6)}


def test_when_a_leader_dies_the_flight_goes_on_with_another():
    engine, clock, timeline, _ = twins(single_flight="completion")
    engine.step()
    engine.abort("0")
    run(engine, clock, [])
    flights = [m for m in timeline.all_marks() if m.track == FLIGHTS]
    assert [f.name for f in flights] == ["led by 0", "led by 1"]
    assert flights[0].end_s == flights[1].start_s < flights[1].end_s
    assert flights[1].details["waiting"] == ["2"]


def test_decodes_of_consecutive_steps_are_one_span():
    engine, clock, timeline, _ = make_engine()
    engine.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    run(engine, clock, [])
    work = [m for m in timeline.all_marks() if m.name in WORK]
    assert [(m.name, m.details["tokens"]) for m in work] == [
        ("prefill", 3),
        ("decode", 19),
    ]


def test_a_ring_forgets_the_oldest_and_the_file_says_so(tmp_path):
    """With 50 marks the memory stays bounded, and the file is still a valid one."""
    engine, clock, timeline, _ = make_engine(capacity=50)
    run(engine, clock, load(random.Random(1), 30))
    assert len(timeline.marks) == 50 and timeline.num_dropped > 50
    timeline.write(tmp_path / "out.json")
    told = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert told["otherData"]["dropped"] == timeline.num_dropped
    spans = [e for e in told["traceEvents"] if e["ph"] not in "sf"]
    check_format(spans)  # the rows that arrows lead to may be forgotten
    first = next(e for e in told["traceEvents"] if e["ph"] != "M")
    assert str(timeline.num_dropped) in first["name"]


def test_no_live_request_is_kept_after_its_end():
    """What is open is bounded by what is live."""
    engine, clock, timeline, _ = make_engine()
    run(engine, clock, load(random.Random(2), 40))
    assert timeline._rows == {} and timeline._flights == {} and not timeline._batch


def test_times_are_microseconds_of_the_engines_clock():
    engine, clock, timeline, _ = make_engine()
    clock.advance(7.5)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=1))
    run(engine, clock, [])
    step = next(e for e in timeline.events() if e["name"] == "step 1")
    assert (step["ts"], step["dur"]) == (7_500_000, 13_000)  # 10 ms + 3 tokens


def test_a_timeline_can_be_written_in_the_middle(tmp_path):
    engine, clock, timeline, _ = twins()
    engine.step()
    timeline.write(tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text("utf-8"))["traceEvents"]
    check_format(events)
    assert {"running", "queued"} & {e["name"] for e in events}
    before = len(timeline.marks)
    list(timeline.events())
    assert len(timeline.marks) == before  # looking changes nothing
    run(engine, clock, [])
    check_format(list(timeline.events()))


def test_rows_are_what_the_pictures_take():
    engine, clock, timeline, _ = twins(single_flight="prefill")
    run(engine, clock, [])
    rows = dict(timeline.rows())
    assert [cell[2] for cell in rows["0"]] == ["computed", "decoded"]
    assert [cell[2] for cell in rows["1"]] == ["plain", "computed", "decoded"]
    assert rows["0"][0][:2] == (0.0, pytest.approx(0.05)) and rows["0"][0][3] == "40"
    assert rows["1"][1][3] == "1" and rows["1"][0][3] == "held"
    assert dict(timeline.rows(length_s=9))["1"][1][3] == ""  # no room for a word


def test_a_timeline_that_comes_late_takes_no_note_of_what_it_missed():
    engine, clock, timeline, _ = make_engine()
    engine.observer = engine.scheduler.observer = ignore
    engine.submit(range(20), SamplingParams(max_tokens=5))
    engine.step()
    engine.observer = engine.scheduler.observer = timeline
    run(engine, clock, [])
    check_format(list(timeline.events()))
    assert not [m for m in timeline.marks if m.name in PHASES]


# ---- Observers and files -------------------------------------------------------------


def test_two_observers_are_told_in_order_and_one_is_itself():
    told = []
    one, other = (
        lambda kind, _n=name, **details: told.append((_n, kind, details))
        for name in "ab"
    )
    both(one, other)("evict", pages=[3])
    assert told == [("a", "evict", {"pages": [3]}), ("b", "evict", {"pages": [3]})]
    assert both(one, ignore) is one and both(ignore, one) is one
    assert both(ignore, ignore) is ignore  # so that the engine still sees it is off


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("before", encoding="utf-8")
    engine, clock, timeline, _ = twins()
    run(engine, clock, [])
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            timeline.write(path)
    assert path.read_text("utf-8") == "before"
    timeline.write(path)
    check_format(json.loads(path.read_text("utf-8"))["traceEvents"])
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_link_or_a_device_is_not_replaced(tmp_path):
    """`--trace /dev/stdout` of a superuser must leave it what it is."""
    real, link, pipe = (tmp_path / name for name in ("real", "link", "pipe"))
    link.symlink_to(real)
    Timeline(VirtualClock()).write(link)
    assert link.is_symlink() and json.loads(real.read_text("utf-8"))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    Timeline(VirtualClock()).write(pipe)
    assert pipe.is_fifo() and json.loads(os.read(reader, 10_000))
    os.close(reader)
    assert not list(tmp_path.glob(".*")), "a part was left"


def test_a_trace_is_written_however_the_block_ends(tmp_path):
    clock = VirtualClock()
    for error in (None, KeyboardInterrupt, RuntimeError):
        path = tmp_path / f"{error}.json"
        try:
            with tracing(path, clock) as observer:
                observer(
                    "submit", request_id="0", held=False, leader=None, num_prompt=3
                )
                clock.advance(1)
                observer("evict", pages=[1])
                if error:
                    raise error
        except BaseException as raised:
            assert type(raised) is error
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
        assert [e["dur"] for e in events if e["name"] == "queued"] == [1e6]


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "out.json"):
        with pytest.raises(ValueError, match="cannot be written"), tracing(path):
            raise AssertionError("it began")
    with tracing(None) as observer:
        assert observer is ignore


# ---- LLM and the command line --------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from tiny_models import write_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama, three heads a group")
    return folder


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text("utf-8"))["traceEvents"]


def test_llm_writes_its_trace_when_it_is_closed_and_tells_others_too(
    checkpoint, tmp_path
):
    from minivllm import LLM

    path, log = tmp_path / "out.json", EventLog()
    with LLM(checkpoint, num_pages=32, observer=log, trace=path) as llm:
        outputs = llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=4))
        assert not path.exists()
    events = read(path)
    check_format(events)
    assert {e["name"] for e in events} >= {"prefill", "decode", "held", "pages"}
    assert len(list(log.of("finish"))) == len(outputs) == 2
    came = outputs[0].metrics.arrival_s * 1e6
    first = min(e["ts"] for e in events if e["ph"] == "X")
    assert 0 <= first - came < 1e5  # one clock


def test_llm_is_not_observed_unless_asked_for(checkpoint):
    from minivllm import LLM

    with LLM(checkpoint, num_pages=8, explain=False) as llm:
        engine = llm.engine
        assert engine.observer is engine.scheduler.observer is ignore
        assert engine.scheduler.cache.observer is ignore


PROGRAM = """
import sys
from minivllm import LLM, SamplingParams
llm = LLM(sys.argv[1], num_pages=8, trace=sys.argv[2])
for output in llm.stream([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True)):
    {end}
"""


@pytest.mark.parametrize(
    "end",
    ["raise KeyboardInterrupt", "raise RuntimeError('no')", "sys.exit(3)", "break"],
)
def test_a_program_that_ends_early_leaves_a_trace(checkpoint, tmp_path, end):
    path = tmp_path / "out.json"
    code = PROGRAM.format(end=end)
    command = [sys.executable, "-c", code, str(checkpoint), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == (end == "break"), done.stderr
    events = read(path)
    check_format(events)
    assert any(e["name"] == "prefill" for e in events)


def test_the_command_line_writes_a_trace(checkpoint, tmp_path, capsys, monkeypatch):
    from minivllm.cli import main
    from minivllm.llm import LLM

    monkeypatch.setattr(LLM, "_encode", lambda self, prompt, special=True: [1, 2, 3])
    path = tmp_path / "out.json"
    common = ["generate", "--prompt", "x", "--model", str(checkpoint)]
    main_code(main, [*common, "--trace", str(path), "--max-tokens", "3"])
    check_format(read(path))
    capsys.readouterr()
    code = main_code(main, [*common, "--trace", str(tmp_path)])
    err = capsys.readouterr()
    assert code == 2 and err.err.startswith("minivllm: trace: ")
    assert err.err.count("\n") == 1


def main_code(main, arguments) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_the_simulation_is_traced_by_its_own_clock(tmp_path):
    """Virtual seconds in the file, however long the run took."""
    engine, clock, timeline, _ = make_engine()
    arrivals = Arrivals([Arrival(100.0, range(9), SamplingParams(max_tokens=2))])
    list(simulate(engine, clock, arrivals))
    first = next(e for e in timeline.events() if e["ph"] == "X")
    assert first["ts"] == 100e6
