"""Measure what chapter 8 predicts: single steps, and followers of one prompt.

    python figures/record_steps.py        writes figures/measured/steps.json

Needs the default model. One thread, and its CPU time: seconds in which the machine did
something else do not count. Better still, let it do nothing else for some minutes.
"""

import json
import os
import platform
import subprocess
import time
from dataclasses import astuple
from pathlib import Path
from statistics import mean

import torch

from minivllm.batch import Chunk
from minivllm.engine import Engine, Limits, PublishAtFinish, PublishEachStep, Publisher
from minivllm.loader import load_model, open_checkpoint
from minivllm.model import Decoder
from minivllm.prefix_cache import PrefixCache
from minivllm.request import SamplingParams, encode_ids
from minivllm.runner import ModelRunner
from minivllm.scheduler import Scheduler
from minivllm.simulation import TimedRunner, VirtualClock

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "figures" / "measured" / "steps.json"
PAGE, PAGES, REPEATS, BUDGET = 16, 400, 3, 512
PREFILLS = (16, 64, 128, 256, 493)
BATCHES = (1, 2, 4, 8)
CONTEXT = 256  # tokens that a decoding request has already
PUBLISHERS: dict[str, Publisher] = {
    "finish": PublishAtFinish(),
    "step": PublishEachStep(),
}


def timed(model: Decoder, clock: VirtualClock) -> TimedRunner:
    """The model, timed by the CPU time of its one thread."""
    return TimedRunner(ModelRunner(model, PAGES, PAGE), clock, time.process_time)


def decodes(num_requests: int) -> list[Chunk]:
    """Requests of `CONTEXT` tokens that want their next one, in pages of their own."""
    size = CONTEXT // PAGE
    tables = [range(100 + i * size, 100 + (i + 1) * size) for i in range(num_requests)]
    token = encode_ids([7])
    return [
        Chunk(f"d{i}", token, CONTEXT - 1, table, 0, True)
        for i, table in enumerate(tables)
    ]


def prefill(num_tokens: int) -> list[Chunk]:
    """A prompt from its beginning."""
    return [Chunk("p", encode_ids(range(num_tokens)), 0, range(40), 0, True)]


def record_steps(model: Decoder) -> list[list[list[float]]]:
    """Each shape of step once in each round; the first round warms up."""
    shapes = [prefill(n) for n in PREFILLS] + [decodes(b) for b in BATCHES]
    shapes += [prefill(128) + decodes(b) for b in (2, 8)]
    rounds = []
    for _ in range(1 + REPEATS):
        runner = timed(model, VirtualClock())
        for chunks in shapes:
            runner.run(chunks)
        rounds.append([[*astuple(work), seconds] for work, seconds in runner.steps])
    return rounds[1:]


def followers_ttft_s(model: Decoder, num_requests: int, publisher: Publisher) -> float:
    """Mean TTFT of a leader and of those who come right after its first token."""
    clock = VirtualClock()
    runner = timed(model, clock)
    scheduler = Scheduler(PrefixCache(PAGES, PAGE), max_batch_tokens=BUDGET)
    limits = Limits(model.config.vocab_size, 8_192)
    engine = Engine(runner, scheduler, limits, clock=clock, publisher=publisher)
    params = SamplingParams(temperature=0, max_tokens=128)
    names = [engine.submit(range(493), params)]
    ttfts: dict[str, float] = {}
    while len(ttfts) < num_requests:
        for output in engine.step():
            ttfts.setdefault(output.request_id, output.metrics.ttft_s or 0.0)
        while len(names) < num_requests and ttfts:
            names.append(engine.submit(range(493), params))
    return mean(ttfts.values())


def main() -> None:
    """Measure and write the record."""
    torch.set_num_threads(1)
    model = load_model(open_checkpoint("smollm2"), torch.device("cpu"), torch.float32)
    record = {
        "schema_version": 1,
        "command": "python figures/record_steps.py",
        "commit": git("rev-parse", "--short", "HEAD"),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "timer": "CPU time of the process",
        "model": "smollm2, float32",
        "step": "prefill chunks, prefill tokens, decoding requests, seconds",
        "rounds": record_steps(model),
        "followers_mean_ttft_s": {
            name: {
                str(n): [followers_ttft_s(model, n, publisher) for _ in range(REPEATS)]
                for n in (2, 4, 8)
            }
            for name, publisher in PUBLISHERS.items()
        },
    }
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def cpu_name() -> str:
    """The CPU's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model n")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} threads"


if __name__ == "__main__":
    main()
