"""Measure what explanations cost: steps of the default model, with and without.

    python figures/record_explain.py       writes figures/measured/explain.json

One thread, and its CPU time. Off and on take turns; each round yields a ratio. The
share is the time inside of the explainer, which is far below the noise of a step. A
second load has no room: each prompt is new, and drives out the pages of others.
"""

import json
import os
import platform
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from minivllm.engine import Engine, Limits
from minivllm.explain import Explainer
from minivllm.loader import load_model, open_checkpoint
from minivllm.model import Decoder
from minivllm.prefix_cache import PrefixCache
from minivllm.request import SamplingParams
from minivllm.runner import ModelRunner
from minivllm.scheduler import Scheduler

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "figures" / "measured" / "explain.json"
ROUNDS, OUTPUT = 7, 16
CHURN_ROUNDS = 3


@dataclass(frozen=True)
class Load:
    """Requests of `shared` tokens, of three kinds, and `own` ones; pages for them."""

    requests: int
    shared: int
    own: int
    pages: int

    def __str__(self) -> str:
        tokens = self.shared + self.own
        return f"{self.requests} requests of {tokens} tokens, {OUTPUT} output tokens"


ROOMY, CHURN = Load(8, 160, 40, 200), Load(60, 16, 112, 40)


class Timed(Explainer):
    """Adds up the CPU time that it takes."""

    seconds = 0.0

    def __call__(self, kind, /, **details):
        start_s = time.process_time_ns()
        super().__call__(kind, **details)
        self.seconds += (time.process_time_ns() - start_s) / 1e9


def serve(
    model: Decoder, explains: bool, seed: int, load: Load = ROOMY
) -> tuple[float, float, int]:
    """CPU seconds of a load, in all and inside of the explainer; pages evicted."""
    cache = PrefixCache(load.pages, 16)
    scheduler = Scheduler(cache, max_running=8, max_batch_tokens=256)
    runner = ModelRunner(model, load.pages, 16)
    engine = Engine(runner, scheduler, Limits(49_152, 2_048))
    explainer = None
    if explains:
        explainer = Timed(engine, "step")
        explainer.attach(engine)
    rng = random.Random(seed)
    heads = [rng.choices(range(49_152), k=load.shared) for _ in range(3)]
    start_s = time.process_time()
    for i in range(load.requests):
        ids = heads[i % 3] + rng.choices(range(49_152), k=load.own)
        engine.submit(ids, SamplingParams(temperature=0, max_tokens=OUTPUT))
    while engine.has_unfinished():
        engine.step()
    taken_s = time.process_time() - start_s
    evicted = len(explainer.pages.fates) if explainer else 0
    return taken_s, explainer.seconds if explainer else 0.0, evicted


def main() -> None:
    torch.set_num_threads(1)
    model = load_model(open_checkpoint("smollm2"), torch.device("cpu"), torch.float32)
    serve(model, True, 0)
    ratios, shares = [], []
    for i in range(ROUNDS):
        order = (False, True) if i % 2 else (True, False)
        taken = {explains: serve(model, explains, i) for explains in order}
        ratios.append(taken[True][0] / taken[False][0])
        shares.append(taken[True][1] / taken[True][0])
    churn = [serve(model, True, i, CHURN) for i in range(CHURN_ROUNDS)]
    record = {
        "schema_version": 1,
        "command": "python figures/record_explain.py",
        "commit": git("rev-parse", "--short", "HEAD"),
        "cpu": cpu_name(),
        "threads": 1,
        "timer": "CPU time of the process",
        "model": "smollm2, float32",
        "load": str(ROOMY),
        "on_over_off": ratios,
        "share_of_cpu_time": shares,
        "churn": {
            "load": f"{CHURN}, {CHURN.pages} pages",
            "share_of_cpu_time": [inside / whole for whole, inside, _ in churn],
            "ghosts": [ghosts for _, _, ghosts in churn],
        },
        "medians": [round(median(ratios), 4), round(median(shares), 5)],
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(record["medians"])


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
