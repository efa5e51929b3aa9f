"""Replay the public trace and a million requests: what chapter 16 plots.

    python figures/record_traffic.py TRACE    writes figures/measured/traffic.json

TRACE is `mooncake_conversation_trace.jsonl` (https://github.com/kvcache-ai/Mooncake,
FAST25-release/traces, Apache-2.0). Half an hour; everything but `cpu_s` and
`peak_mb` is the same on every machine.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from minivllm.bench import make_record
from minivllm.options import read_options
from minivllm.replay import Replay, reuse_curve, summary
from minivllm.roofline import COSTS
from minivllm.workloads import TraceRequest, generate, read_trace

RECORD = Path(__file__).resolve().parent / "measured" / "traffic.json"
COST = "70b-8xh100"
CAPACITIES = [*(2**i for i in range(14, 26)), 0]
VARIANTS: list[tuple[int, dict[str, Any]]] = [
    *((capacity, {}) for capacity in (2**20, 2**22, 2**24, 0)),
    (2**22, {"index": "none"}),
    (2**22, {"publish": "finish", "single_flight": "none"}),
    (2**22, {"publish": "schedule"}),
    (2**22, {"eviction": "fifo"}),
    (2**22, {"eviction": "lfu"}),
    (2**22, {"grouping": "longest-prefix"}),
    (2**22, {"grouping": "shared-prefix", "publish": "schedule"}),
]


def replay(
    requests: list[TraceRequest], capacity: int, page_size: int, **options: Any
) -> dict[str, Any]:
    """One run, in a few numbers, with the CPU time that it took."""
    start_s = time.process_time()
    chosen = read_options({"page_size": page_size} | options)
    run = Replay(requests, chosen, capacity, COSTS[COST])
    told = summary(run.run(), run.engine.stats()) | {"totals": run.engine.stats()}
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    taken = {"cpu_s": time.process_time() - start_s, "peak_mb": peak_mb}
    print(capacity, options, told["hit_rate"], told["ttft_s"], taken, flush=True)
    return {"capacity": capacity, "options": options} | told | taken


def main(path: Path) -> None:
    """Run everything and write the record."""
    trace = read_trace(path)
    start_s = time.process_time()
    rates = reuse_curve(trace, CAPACITIES, 512)
    facts: dict[str, Any] = {
        "schema_version": 1,
        "trace": path.name,
        "requests": len(trace),
        "prompt_tokens": sum(request.num_tokens for request in trace),
        "blocks": sum(len(request.ids) for request in trace),
        "seconds": trace[-1].time_ms / 1000,
        "cost": COST,
        "curve": list(zip(CAPACITIES, rates, strict=True)),
        "curve_cpu_s": time.process_time() - start_s,
        "million": [],
    }
    print(facts["curve"], facts["curve_cpu_s"], flush=True)
    for number in (125_000, 250_000, 500_000, 1_000_000):
        traffic = generate("short-1", number)
        found = replay(traffic, 128 * 1024, 16)
        facts["million"].append({"requests": number} | found)
        del traffic
    facts["replays"] = [replay(trace, c, 512, **options) for c, options in VARIANTS]
    command = f"python figures/record_traffic.py {path.name}"
    record = make_record(command, [], **facts)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
