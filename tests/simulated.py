"""Engines on the simulated runner, without torch; one run that shows all of it."""

import hashlib
import random

from minivllm.engine import Engine, Limits
from minivllm.events import EventLog
from minivllm.prefix_cache import PrefixCache
from minivllm.request import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.simulation import (
    Arrival,
    Arrivals,
    SerialPrefill,
    SimulatedRunner,
    VirtualClock,
    simulate,
)

COST = SerialPrefill(chunk_s=0.01, token_s=0.001, decode_s=0.02, k=0.25)
VOCAB, PAGE = 101, 4


def make_engine(runner, clock, num_pages=64, log=None, publisher=None, **options):
    log = log or EventLog()
    cache = PrefixCache(num_pages, PAGE, observer=log)
    return Engine(
        runner,
        Scheduler(cache, observer=log, **options),
        Limits(VOCAB, 256),
        clock=clock,
        publisher=publisher,
        observer=log,
    )


def make_simulated(num_pages=64, cost_model=COST, **options):
    clock = VirtualClock()
    runner = SimulatedRunner(cost_model, clock, VOCAB, num_pages, PAGE)
    return make_engine(runner, clock, num_pages, **options), clock


def fingerprint():
    """Tokens and times of a busy run, to the last bit."""
    rng = random.Random(3)
    engine, clock = make_simulated(num_pages=24, max_batch_tokens=32)
    arrivals = [
        Arrival(
            rng.random(),
            [rng.randrange(3) for _ in range(rng.randint(1, 40))],
            SamplingParams(max_tokens=rng.randint(1, 30)),
            extra_key=rng.choice(["s", None, ("t", 1)]),
        )
        for _ in range(60)
    ]
    done = [
        (o.request_id, o.outputs[0].token_ids, o.metrics.ttft_s, o.metrics.e2e_s)
        for _, o in simulate(engine, clock, Arrivals(arrivals))
    ]
    assert engine.stats()["preemptions"] > 0 and engine.stats()["hits"] > 0
    return hashlib.sha256(repr(done).encode()).hexdigest()
