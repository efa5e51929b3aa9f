"""The clock, the cost model, the simulated runner, the driver; real = simulated."""

import itertools
import math
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from checking_runner import cold_continuation
from simulated import COST, PAGE, VOCAB, fingerprint, make_engine, make_simulated

from minivllm.batch import Chunk
from minivllm.engine import PublishAtFinish, PublishEachStep
from minivllm.events import EventLog, ignore
from minivllm.request import SamplingParams, encode_ids
from minivllm.runner import ModelRunner
from minivllm.simulation import (
    Arrival,
    Arrivals,
    ReplayedTimes,
    SerialPrefill,
    SimulatedRunner,
    TimedRunner,
    VirtualClock,
    Work,
    fit_serial_prefill,
    least_squares,
    next_state,
    simulate,
    token_after,
    work_of,
)


def chunk(num_tokens, samples=True, start=0, pages=range(64), num_shared=0, name="0"):
    ids = encode_ids(range(num_tokens))
    return Chunk(name, ids, start, pages, num_shared, samples)


# ---- The clock and what a step costs -------------------------------------------------


def test_the_clock_only_moves_forward():
    clock = VirtualClock()
    clock.advance(1.5)
    clock.advance_to(1.0)
    assert clock.now() == 1.5
    clock.advance_to(4.0)
    assert clock.now() == 4.0
    for seconds in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a step takes time"):
            clock.advance(seconds)
    assert clock.now() == 4.0


def test_work_and_its_price():
    """One token that samples is a decode; one that does not is a piece of a prompt."""
    chunks = [chunk(16), chunk(1), chunk(1), chunk(1, samples=False)]
    assert work_of(chunks) == Work(num_prefills=2, prefill_tokens=17, num_decodes=2)
    assert COST.step_s(chunks) == pytest.approx(2 * 0.01 + 17 * 0.001 + 0.02 * 1.25)
    assert COST.step_s([chunk(1)]) == 0.02
    assert COST.step_s([chunk(16)]) == pytest.approx(0.026)


def synthetic_steps():
    shapes = [[chunk(n)] for n in (2, 50, 400)]
    shapes += [[chunk(1)] * b for b in (1, 2, 8)] + [[chunk(30), chunk(1), chunk(1)]]
    return [(work_of(chunks), COST.step_s(chunks)) for chunks in shapes]


def test_a_fit_finds_the_parameters_that_made_the_steps():
    fit = fit_serial_prefill(synthetic_steps())
    for name in ("chunk_s", "token_s", "decode_s", "k"):
        assert getattr(fit, name) == pytest.approx(getattr(COST, name))


@pytest.mark.parametrize("keep", ["num_prefills", "num_decodes"])
def test_steps_that_do_not_tell_are_refused(keep):
    steps = [(work, s) for work, s in synthetic_steps() if not getattr(work, keep)]
    with pytest.raises(ValueError, match="say nothing about"):
        fit_serial_prefill(steps)
    with pytest.raises(ValueError, match="no measurements"):
        fit_serial_prefill([])


def test_least_squares_is_numpys():
    rng = np.random.default_rng(5)
    rows, targets = rng.normal(size=(30, 4)), rng.normal(size=30)
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0]
    assert least_squares(rows.tolist(), targets.tolist()) == pytest.approx(expected)


# ---- The simulated runner ------------------------------------------------------------


def test_tokens_are_those_of_the_naive_twin():
    """Whatever the chunks, the tables and the neighbours."""
    runner = SimulatedRunner(COST, VirtualClock(), VOCAB, 32, PAGE)
    prompt = encode_ids([5 * i % VOCAB for i in range(22)])
    expected = cold_continuation(prompt, 1, VOCAB)
    mine, theirs = [9, 2, 14, 0, 7, 5], [1, 3, 4, 6, 8, 10]
    cuts = [0, 1, 7, 8, 16, 22]
    for start, end in itertools.pairwise(cuts):
        tokens = runner.run(
            [
                Chunk("a", prompt[start:end], start, mine, 0, end == 22),
                Chunk("b", prompt[: 22 - start], 0, theirs, 0, False),
            ]
        )
    assert tokens == [*expected, None]
    last = Chunk("c", prompt[21:], 21, mine, 6, samples=True)  # a full hit, all shared
    states = runner.states[:]
    assert runner.run([last]) == expected and runner.states == states


def test_published_pages_are_never_written():
    """Not even by a chunk that would write something else there."""
    runner = SimulatedRunner(COST, VirtualClock(), VOCAB, 32, PAGE)
    prompt = encode_ids(range(8))
    runner.run([Chunk("a", prompt, 0, [0, 1], 0, True)])
    states = runner.states[:]
    other = encode_ids([99, 98, 97])
    runner.run([Chunk("b", other, 5, [0, 1], 2, True)])
    assert runner.states == states


def test_other_pasts_have_other_states():
    """Order, length and every token count: 1,092 sequences of up to six of 0, 1, 2."""
    states = {}
    for size in range(1, 7):
        for ids in itertools.product(range(3), repeat=size):
            state = 0
            for token in ids:
                state = next_state(state, token)
            states[ids] = state
    assert (
        len(set(states.values())) == len(states) == 1_092 and 0 not in states.values()
    )
    tokens = {token_after(state, VOCAB) for state in states.values()}
    assert tokens == set(range(VOCAB))


def test_a_wrong_page_gives_another_token():
    runner = SimulatedRunner(COST, VirtualClock(), VOCAB, 32, PAGE)
    prompt = encode_ids(range(8))
    right = runner.run([Chunk("a", prompt, 0, [0, 1], 0, True)])
    wrong = runner.run([Chunk("a", prompt[7:], 7, [0, 2], 0, True)])
    assert right == cold_continuation(prompt, 1, VOCAB) != wrong


def test_a_cost_model_that_raises_changes_nothing():
    clock = VirtualClock()
    runner = SimulatedRunner(ReplayedTimes([]), clock, VOCAB, 4, PAGE)
    with pytest.raises(ValueError, match="the recorded step was None"):
        runner.run([chunk(4)])
    assert clock.now() == 0 and not any(runner.states)


# ---- The driver ----------------------------------------------------------------------


def test_one_request_takes_what_its_steps_take():
    engine, clock = make_simulated()
    arrival = Arrival(3.0, range(16), SamplingParams(max_tokens=5))
    ((given, output),) = simulate(engine, clock, Arrivals([arrival]))
    assert given is arrival
    assert output.metrics.arrival_s == 3.0
    assert output.metrics.ttft_s == pytest.approx(0.01 + 16 * 0.001)
    assert output.metrics.e2e_s == pytest.approx(0.026 + 4 * 0.02)
    assert clock.now() == pytest.approx(3.106)


def test_a_request_waits_from_its_arrival():
    """It comes in the middle of a step, is submitted after it, and is dated back."""
    engine, clock = make_simulated()
    first = Arrival(0.0, range(16), SamplingParams(max_tokens=1))  # until 0.026
    second = Arrival(0.01, range(50, 66), SamplingParams(max_tokens=1))
    outputs = [o for _, o in simulate(engine, clock, Arrivals([second, first]))]
    assert [o.prompt_token_ids[0] for o in outputs] == [0, 50]
    assert outputs[1].metrics.ttft_s == pytest.approx(0.026 + 0.026 - 0.01)


def test_the_clock_jumps_and_nobody_sleeps(monkeypatch):
    monkeypatch.setattr(time, "sleep", None)
    engine, clock = make_simulated()
    arrivals = Arrivals(Arrival(86_400.0 * day, [day]) for day in range(30))
    outputs = [o for _, o in simulate(engine, clock, arrivals)]
    assert len(outputs) == 30 and clock.now() > 29 * 86_400
    assert len({round(o.metrics.e2e_s, 6) for o in outputs}) == 1


def test_outputs_may_bring_new_arrivals():
    """Three turns of a chat: all that was said before, and a page more."""
    engine, clock = make_simulated()
    arrivals, cached = Arrivals([Arrival(0.0, range(16))]), []
    for _, output in simulate(engine, clock, arrivals):
        cached.append(output.num_cached_tokens)
        said = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        if len(cached) < 3:
            arrivals.add(Arrival(clock.now() + 1, [*said, 1, 2, 3, 4]))
    assert cached == [0, 28, 48]  # 16 + 15 committed: 7 pages of 4, then 36 + 15: 12


def test_arrivals_of_one_moment_keep_their_order():
    engine, clock = make_simulated(max_running=1)
    arrivals = Arrivals(Arrival(1.0, [i] * 4) for i in range(9))
    done = [arrival.token_ids[0] for arrival, _ in simulate(engine, clock, arrivals)]
    assert done == list(range(9))


def test_priorities_and_keys_are_passed_on():
    engine, clock = make_simulated(max_running=1)
    arrivals = Arrivals(
        [
            Arrival(0.0, range(8), priority=1, extra_key="a"),
            Arrival(0.0, range(8), priority=0, extra_key="b"),
            Arrival(0.0, range(8), priority=2, extra_key="a"),
        ]
    )
    done = [
        (a.priority, o.num_cached_tokens) for a, o in simulate(engine, clock, arrivals)
    ]
    assert done == [(0, 0), (1, 0), (2, 7)]


def test_what_cannot_run_is_said():
    engine, clock = make_simulated(num_pages=2)
    with pytest.raises(ValueError, match="pages and the pool has 2"):
        list(simulate(engine, clock, Arrivals([Arrival(0.0, range(9))])))
    engine, clock = make_simulated()
    engine.scheduler.schedule = list  # never plans anything
    with pytest.raises(RuntimeError, match="none of them can ever run"):
        list(simulate(engine, clock, Arrivals([Arrival(0.0, range(9))])))


def test_a_run_is_the_same_in_every_process():
    """Whatever the seed of Python's own hashes."""
    code = "import simulated; print(simulated.fingerprint())"
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here)])
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == fingerprint()


# ---- Real = simulated ----------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(random_decoder):
    return random_decoder(VOCAB)


def traffic(rng, num_requests):
    """Shared beginnings, twins, and arrivals spread over the time that it takes."""
    heads = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    return [
        Arrival(
            0.002 * i * rng.random(),
            rng.choice(heads)[: rng.randint(5, 24)]
            + [rng.randrange(VOCAB)] * rng.randint(0, 12),
            SamplingParams(temperature=0, max_tokens=rng.randint(1, 24)),
            extra_key=rng.choice([None, None, "s"]),
            priority=rng.choice([0, 0, 1]),
        )
        for i in range(num_requests)
    ]


def run_with_turns(engine, clock, given):
    """Every third request is followed by a turn made of its own output."""
    arrivals, outputs = Arrivals(given), []
    for arrival, output in simulate(engine, clock, arrivals):
        outputs.append(output)
        said = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        if len(outputs) % 3 == 0 and len(said) < 60:
            params = SamplingParams(temperature=0, max_tokens=5)
            arrivals.add(Arrival(clock.now() + 0.01, said, params, arrival.extra_key))
    return outputs


CONFIGURATIONS = {
    "roomy": {"num_pages": 200},
    "few pages": {"num_pages": 40},
    "few pages, small steps": {"num_pages": 30, "max_batch_tokens": 9},
    "reserve": {"num_pages": 40, "admission": "reserve"},
    "finish": {"num_pages": 60, "publisher": PublishAtFinish()},
    "few places": {"num_pages": 60, "max_running": 3, "publisher": PublishEachStep()},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_simulated_run_takes_the_decisions_of_the_real_one(tiny, name):
    """Same events, pages and all, and the same times, when steps take as long."""
    options = dict(CONFIGURATIONS[name])
    num_pages = options.pop("num_pages")
    given = traffic(random.Random(name), 40)

    clock, log = VirtualClock(), EventLog()
    timed = TimedRunner(ModelRunner(tiny, num_pages, PAGE), clock)
    engine = make_engine(timed, clock, num_pages, log, **options)
    real = run_with_turns(engine, clock, given)

    clock, again = VirtualClock(), EventLog()
    cost = ReplayedTimes(timed.steps)
    runner = SimulatedRunner(cost, clock, VOCAB, num_pages, PAGE)
    replica = make_engine(runner, clock, num_pages, again, **options)
    simulated = run_with_turns(replica, clock, given)

    assert list(log.events) == list(again.events)
    assert {e.kind for e in log.events} >= {"schedule", "admit", "publish", "finish"}
    assert [o.metrics for o in real] == [o.metrics for o in simulated]
    assert engine.stats() == replica.stats()
    if "few pages" in name:
        assert (
            engine.stats()["preemptions"] > 0 and engine.stats()["evicted_tokens"] > 0
        )
    ids = [[o.outputs[0].token_ids for o in outputs] for outputs in (real, simulated)]
    assert ids[0] != ids[1], "the tokens themselves are the model's"


def test_a_replay_of_other_decisions_is_noticed(tiny):
    """A mutant scheduler does not pass for the recorded one."""
    clock = VirtualClock()
    timed = TimedRunner(ModelRunner(tiny, 64, PAGE), clock)
    given = traffic(random.Random(1), 10)
    list(simulate(make_engine(timed, clock), clock, Arrivals(given)))
    clock = VirtualClock()
    runner = SimulatedRunner(ReplayedTimes(timed.steps), clock, VOCAB, 64, PAGE)
    engine = make_engine(runner, clock, max_batch_tokens=16)
    outputs = [o for _, o in simulate(engine, clock, Arrivals(given))]
    assert "error" in {o.outputs[0].finish_reason for o in outputs}


def test_the_default_model_and_its_simulation(smollm2):
    """The run without enough pages of chapters 7 and 8, shorter."""
    _, decoder = smollm2

    def run(make_runner):
        log, clock = EventLog(), VirtualClock()
        engine = make_engine(make_runner(clock), clock, 18, log, max_batch_tokens=32)
        params = SamplingParams(temperature=0, max_tokens=12)
        arrivals = Arrivals(Arrival(0.0, [i] * 24, params) for i in range(3))
        list(simulate(engine, clock, arrivals))
        return log, engine

    timed = []

    def real(clock):
        timed.append(TimedRunner(ModelRunner(decoder, 18, PAGE), clock))
        return timed[0]

    log, engine = run(real)
    replay = ReplayedTimes(timed[0].steps)
    again, _ = run(lambda clock: SimulatedRunner(replay, clock, VOCAB, 18, PAGE))
    assert log.events == again.events and engine.stats()["preemptions"] > 0


# ---- By the hundred thousand ---------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_thousand_requests(capsys):
    """About half a minute where nothing else runs. Memory stays where it was."""
    rng = random.Random(0)
    heads = [[rng.randrange(VOCAB) for _ in range(48)] for _ in range(20)]

    def arrivals():
        for i in range(100_000):
            tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 31))]
            params = SamplingParams(max_tokens=rng.randint(1, 16))
            yield Arrival(i / 100, rng.choice(heads) + tail, params)

    cost = SerialPrefill(0.0003, 0.0001, 0.005, 0.05)
    engine, clock = make_simulated(8_000, cost, log=ignore)
    coming = Arrivals(arrivals())
    start_s = time.perf_counter()
    count = sum(1 for _ in simulate(engine, clock, coming))
    with capsys.disabled():
        print(f"\n100,000 requests in {time.perf_counter() - start_s:.0f} s")
    assert count == 100_000 and not engine.has_unfinished()
