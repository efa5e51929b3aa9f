"""Count what the prompts of a public trace share: the lengths that chapter 12 draws.

    python figures/record_prefixes.py conversation_trace.jsonl

writes figures/measured/prefixes.json. The trace belongs to Mooncake (FAST '25): a line
a request, with the ids of its 512-token blocks; equal ids are equal prefixes.
"""

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "figures" / "measured" / "prefixes.json"
TRACE_BLOCK, BLOCK = 512, 16  # tokens


def shared_blocks(lines: list[dict[str, list[int]]]) -> list[int]:
    """Blocks of each prompt that an earlier one began with, of `BLOCK` tokens."""
    known: set[int] = set()
    shared = []
    for line in lines:
        ids = line["hash_ids"]
        num_known = next((i for i, x in enumerate(ids) if x not in known), len(ids))
        known.update(ids)
        shared.append(num_known * TRACE_BLOCK // BLOCK)
    return shared


def main() -> None:
    path = Path(sys.argv[1])
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    counts = Counter(shared_blocks(lines))
    record = {
        "command": f"python figures/record_prefixes.py {path.name}",
        "source": "Mooncake's conversation trace, one hour (FAST '25, Apache-2.0)",
        "requests": len(lines),
        "tokens_in_block": BLOCK,
        "requests_by_shared_blocks": sorted(counts.items()),
    }
    RECORD.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
