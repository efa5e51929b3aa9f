"""Replay the public trace and a million requests: what chapter 16 plots.

    python figures/record_traffic.py TRACE    writes figures/measured/traffic.json

TRACE is FAST25-release/traces/conversation_trace.jsonl of the Mooncake project
(https://github.com/kvcache-ai/Mooncake, Apache-2.0). A quarter of an hour; everything
but `cpu_s` and `peak_mb` is the same on every machine.
"""

import json
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from minivllm.bench import make_record
from minivllm.options import read_options
from minivllm.replay import Replay, Served, reuse_curve, summary
from minivllm.roofline import COSTS
from minivllm.workloads import TraceRequest, generate, read_trace

RECORD = Path(__file__).resolve().parent / "measured" / "traffic.json"
COST = "70b-8xh100"
CAPACITIES = [*(2**i for i in range(14, 26)), 0]
NUMBERS = (125_000, 250_000, 1_000_000)  # short requests
VARIANTS: list[tuple[int, dict[str, Any]]] = [
    *((capacity, {}) for capacity in (2**20, 2**22, 2**24, 0)),
    (2**22, {"index": "none"}),
]


def replay(
    requests: list[TraceRequest], capacity: int, page_size: int, **options: Any
) -> dict[str, Any]:
    """One run, in a few numbers, with the CPU time that it took."""
    start_s = time.process_time()
    chosen = read_options({"page_size": page_size} | options)
    run = Replay(requests, chosen, capacity, COSTS[COST])
    served, totals = run.run(), run.engine.stats()
    told = summary(served, totals) | {"totals": totals}
    told["slowest"] = slowest(requests, served)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    taken = {"cpu_s": time.process_time() - start_s, "peak_mb": peak_mb}
    return {"capacity": capacity, "options": options} | told | taken


def slowest(requests: list[TraceRequest], served: list[Served]) -> dict[str, float]:
    """The hundredth that waits longest: how long its prompts are, and when it came."""
    pairs = sorted(zip(served, requests, strict=True), key=lambda p: p[0].ttft_s or 0.0)
    slow = [request for _, request in pairs[-(len(pairs) // 100) :]]
    minutes = Counter(request.time_ms // 60_000 for request in slow)
    return {
        "requests": len(slow),
        "median_prompt": median(request.num_tokens for request in slow),
        "in_two_minutes": sum(n for _, n in minutes.most_common(2)),
    }


def run_job(path: Path, job: int) -> dict[str, Any]:
    """The numbers of one job, in this process."""
    if job < len(NUMBERS):
        traffic = generate("short-1", NUMBERS[job])
        return {"requests": NUMBERS[job]} | replay(traffic, 128 * 1024, 16)
    capacity, options = VARIANTS[job - len(NUMBERS)]
    return replay(read_trace(path), capacity, 512, **options)


def start(path: Path, job: int) -> dict[str, Any]:
    """The same in a process of its own, for the sake of its peak memory."""
    command = [sys.executable, __file__, str(path), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(done.stdout, flush=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def most(trace: list[TraceRequest]) -> dict[str, int]:
    """What a cache that never forgets finds of the whole trace."""
    seen: set[int] = set()
    found = {"hit_blocks": 0, "hit_tokens": 0}
    for request in trace:
        ids, size = request.ids, len(request.ids)
        known = next((i for i, name in enumerate(ids) if name not in seen), size)
        found["hit_blocks"] += known
        found["hit_tokens"] += min(512 * known, request.num_tokens - 1)
        seen.update(ids)
    return found


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """The record: facts of the trace, its reuse curve, and all jobs."""
    trace = read_trace(path)
    start_s = time.process_time()
    rates = reuse_curve(trace, CAPACITIES, 512)
    facts = {
        "schema_version": 1,
        "trace": path.name,
        "requests": len(trace),
        "prompt_tokens": sum(request.num_tokens for request in trace),
        "blocks": sum(len(request.ids) for request in trace),
        **most(trace),
        "seconds": trace[-1].time_ms / 1000,
        "cost": COST,
        "curve_cpu_s": time.process_time() - start_s,
        "curve": list(zip(CAPACITIES, rates, strict=True)),
        "million": found[: len(NUMBERS)],
        "replays": found[len(NUMBERS) :],
    }
    record = make_record(f"python figures/record_traffic.py {path.name}", [], **facts)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if len(sys.argv) > 2:
        print(json.dumps(run_job(where, int(sys.argv[2]))))
    else:
        jobs = range(len(NUMBERS) + len(VARIANTS))
        write(where, [start(where, job) for job in jobs])
