# %% [markdown]
# # 16. What would each policy do for my traffic?
#
# A public service has published an hour of its traffic: 12,031 requests and, for each, which
# blocks of 512 tokens its prompt begins with (the Mooncake trace, FAST 2025). Give a prefix cache
# room for 16K tokens and send the hour past it. Then four times as much room, sixteen times, and
# so on. Which share of the prompt tokens does it find?

# %% name="opening"
import json
from pathlib import Path

record = json.loads(Path("../figures/measured/traffic.json").read_text("utf-8"))
print(record["command"])
print(f"{record['requests']:,} requests, {record['prompt_tokens']:,} prompt tokens")
curve = {tokens // 1024: rate for tokens, rate in record["curve"]}
for thousands in (16, 64, 256, 1024, 4096, 16384, 0):
    size = f"{thousands}K tokens" if thousands else "unbounded"
    print(f"{size:>13}: {curve[thousands]:5.1%}")

# %% [markdown]
# Sixteen times the memory, from 16K to 256K tokens, and the cache finds [4.5%](#opening) before
# and after. Who tries that on a server writes down that memory does not help this traffic. Four
# times 1M tokens, and the share goes from [5.6%](#opening) to [18.8%](#opening). The most that
# there is to find is [39.8%](#opening).
#
# The misconception is that a hit rate belongs to a cache, like its size. It belongs to the
# traffic: to how much else is asked between two uses of the same prefix. The cache's memory only
# says up to which distance it remembers. In this hour there is next to nothing between a distance
# of 16K and of 1M tokens, and most of what there is lies beyond. Eight H100 that hold a model
# with 70 billion parameters have room for some [1.5M](#sheet) tokens of K/V. That is just beyond the flat part.
#
# You have other traffic, and another flat part. This chapter reads a log like that, measures the
# distances in it, and then sends it through the whole engine on chapter 8's clock, to see what a
# hit is worth, and under which policy.
#
# (The trace itself is not in this book. Its record is: `figures/record_traffic.py` makes it again
# from the public file, and all of it but the CPU times is the same on your machine.)
#
# ## A line for each request
#
# A line of that trace says when a request came, how long its prompt and its answer were, and
# names the blocks of its prompt. The names are those of [chapter 2](02_hashing.md): each stands
# for its 512 tokens *and all before them*. So two prompts share exactly their common leading names,
# and nobody learns a word of what was written. The last block is usually a partial one. Our own
# format has the token ids instead. Both become the same thing:

# %% export="workloads.py"
"""Traffic to replay: requests from trace files, and generated ones."""

import json
import sys
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

from minivllm.bench import read_lines
from minivllm.hashing import page_hashes, page_name, root_hash, token_bytes
from minivllm.request import ExtraKey, check_extra_key, encode_ids

MOONCAKE_BLOCK = 512  # tokens that a hash id of a Mooncake trace stands for


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace: when it comes, after whom, and what it asks.

    `ids` are its token ids. With `block` above 1 each names a block of so many tokens
    and all that is before it, the last block perhaps a partial one.
    """

    name: str
    time_ms: float
    ids: "array[int]"
    num_tokens: int
    output_length: int
    block: int = 1
    after: str | None = None
    extra_key: ExtraKey = None
    priority: int = 0

    def token_ids(self) -> "array[int]":
        """The prompt. A block of which only the name is known repeats the name."""
        if self.block == 1:
            return self.ids
        names = (name.to_bytes(4, sys.byteorder) for name in self.ids)
        data = b"".join(name * self.block for name in names)
        return array("i", data[: 4 * self.num_tokens])

    def blocks(self, page_size: int) -> Sequence[Hashable]:
        """The names of its blocks of `page_size` tokens, a partial last one included.

        Raises `ValueError` if the trace has names for blocks of another size.
        """
        if self.block > 1:
            if page_size != self.block:
                raise ValueError(f"the blocks of this trace have {self.block} tokens")
            return self.ids
        names = page_hashes(self.ids, page_size, self.extra_key)
        if rest := self.ids[len(names) * page_size :]:
            past = names[-1] if names else root_hash(self.extra_key)
            names.append(page_name(past, token_bytes(rest)))
        return names


# %% [markdown]
# `after` names a request that must have ended first. With it the trace is a *closed loop*: a
# person, or an agent, who reads an answer before asking on, and so asks later if the machine is
# slower. Without it the loop is open, and requests come at their times whatever becomes of the
# others. A simulation that turns conversations into an open loop overloads a slow machine as no
# user would.
#
# Reading is dull, and most of it is about lines that are wrong. A trace of a million lines with
# one bad one should say which.


# %% export="workloads.py" tags=["hide-input"]
def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a JSONL file, ours or Mooncake's, in the order of its lines.

    Raises `ValueError` naming the file, the line and what is wrong with it.
    """
    reader, numbers = LineReader(), count()
    found = read_lines(path, lambda line: reader.read(line, str(next(numbers))))
    requests = [*found.values()]
    for index, fault in check_order(requests):
        raise ValueError(f"{path}:{[*found][index]}: {fault}")
    return requests


def check_order(requests: Sequence[TraceRequest]) -> Iterator[tuple[int, str]]:
    """What is wrong with ids and with who comes after whom: which request, and how."""
    places: dict[str, int] = {}
    for i, request in enumerate(requests):
        if request.name in places:
            yield i, f"the id {request.name!r} is taken"
        places[request.name] = i
    ends = [False] * len(requests)  # whether a chain of `after` is known to end
    for i in range(len(requests)):
        chain: dict[int, None] = {}
        place = i
        while not ends[place] and (after := requests[place].after) is not None:
            chain[place] = None
            if after not in places:
                yield place, f"after {after!r}: no request has this id"
                return
            if (place := places[after]) in chain:
                yield place, f"{after!r} waits for itself, by way of `after`"
                return
        for seen in (*chain, place):
            ends[seen] = True


# %% export="workloads.py" tags=["hide-input"]
def take_int(line: Mapping[str, Any], key: str, least: int, default: Any = None) -> int:
    """A whole number of a line. Raises `ValueError` unless it is one, and in range."""
    value = line.get(key, default)
    if type(value) is not int or not least <= value < 2**31:
        raise ValueError(f"{key} must be a whole number >= {least}, not {value!r}")
    return value


def take_name(line: Mapping[str, Any], key: str, default: str | None) -> str | None:
    """An id of a line, text or a number, as text."""
    value = line.get(key)
    if value is None:
        return default
    if type(value) not in (str, int):
        raise ValueError(f"{key} must be text or a whole number, not {value!r}")
    return str(value)


class LineReader:
    """Makes requests of lines. Names of blocks are numbered as they come, from 1."""

    def __init__(self) -> None:
        self.names: dict[int, int] = {}
        self.block = 0  # of all lines: they cannot be mixed

    def read(self, line: Mapping[str, Any], name: str) -> TraceRequest:
        """One line. Raises `ValueError` for whatever is wrong with it."""
        ids, num_tokens, block = self._prompt(line)
        if self.block not in (0, block):
            raise ValueError("hash_ids and prompt_token_ids in one file")
        self.block = block
        key = line.get("extra_key")
        check_extra_key(key)
        return TraceRequest(
            take_name(line, "id", name) or name,
            self._time_ms(line),
            ids,
            num_tokens,
            take_int(line, "output_length", 1),
            block,
            take_name(line, "after", None),
            key,
            take_int(line, "priority", -(2**31), 0),
        )

    def _time_ms(self, line: Mapping[str, Any]) -> float:
        value = line.get("timestamp")
        number = type(value) in (int, float)
        if value is None or not number or not 0 <= value < 1e15:
            raise ValueError(f"timestamp must be milliseconds >= 0, not {value!r}")
        return float(value)

    def _prompt(self, line: Mapping[str, Any]) -> "tuple[array[int], int, int]":
        """The ids of a prompt, its length in tokens, and how many an id stands for."""
        if "hash_ids" in line:
            return self._named_blocks(line)
        ids = line.get("prompt_token_ids")
        if not isinstance(ids, list) or not ids:
            raise ValueError("neither prompt_token_ids, a list of ints, nor hash_ids")
        encoded = (
            array("i") if any(type(i) is not int for i in ids) else encode_ids(ids)
        )
        if not encoded or min(encoded) < 0:
            raise ValueError("prompt_token_ids must be whole numbers >= 0")
        return encoded, len(ids), 1

    def _named_blocks(self, line: Mapping[str, Any]) -> "tuple[array[int], int, int]":
        names, size = line["hash_ids"], take_int(line, "input_length", 1)
        if not isinstance(names, list) or any(type(n) is not int for n in names):
            raise ValueError("hash_ids must be a list of whole numbers")
        needed = -(-size // MOONCAKE_BLOCK)
        if len(names) != needed:
            raise ValueError(
                f"{len(names)} hash_ids and an input_length of {size}, "
                f"which is {needed} blocks of {MOONCAKE_BLOCK} tokens"
            )
        numbers = (self.names.setdefault(n, len(self.names) + 1) for n in names)
        return array("i", numbers), size, MOONCAKE_BLOCK


# %% export="workloads.py" tags=["hide-input"]
def to_line(request: TraceRequest) -> str:
    """The line of a trace file that `read_trace` reads as this request."""
    line: dict[str, Any] = {"id": request.name, "timestamp": request.time_ms}
    if request.block == 1:
        line["prompt_token_ids"] = request.ids.tolist()
    else:
        line["input_length"] = request.num_tokens
        line["hash_ids"] = request.ids.tolist()
    line["output_length"] = request.output_length
    for key in ("after", "extra_key", "priority"):
        if getattr(request, key):
            line[key] = getattr(request, key)
    return json.dumps(line)


# %% name="reading"
from tempfile import TemporaryDirectory

GOOD = (
    '{"timestamp": 0, "input_length": 1300, "hash_ids": [7, 8, 9], "output_length": 40}'
)
SECOND = [
    '{"timestamp": 5, "input_length": 1300, "hash_ids": [7, 8], "output_length": 40}',
    '{"timestamp": -5, "input_length": 600, "hash_ids": [7, 8], "output_length": 40}',
    '{"timestamp": 5, "prompt_token_ids": [1, 2], "output_length": 40}',
    GOOD.replace("}", ', "after": "4"}'),
    GOOD.replace("}", ', "id": "0"}'),
]
with TemporaryDirectory() as folder:
    path = Path(folder) / "trace.jsonl"
    for line in SECOND:
        path.write_text(f"{GOOD}\n{line}\n", "utf-8")
        try:
            read_trace(path)
        except ValueError as error:
            print(str(error).replace(folder, "")[1:])

# %% [markdown]
# ## How far back
#
# What does an LRU cache find? The obvious program keeps a list of blocks, the most recent one at
# the end. A request finds its leading blocks that are in the list, at most all of its tokens but
# one. Then its own blocks go to the end, the tail first, so that the head is the most recent: no
# block must outlive the one before it. What is over goes. The first half of the requests warms
# the cache, the second is counted.


# %%
def naive_hit_rate(requests, capacity, page_size):
    """One cache of one size."""
    cache, found, total = [], 0, 0
    for i, request in enumerate(requests):
        names = list(request.blocks(page_size))
        known = next((j for j, n in enumerate(names) if n not in cache), len(names))
        if i >= len(requests) // 2:
            found += min(known * page_size, request.num_tokens - 1)
            total += request.num_tokens
        for name in reversed(names):
            if name in cache:
                cache.remove(name)
            cache.append(name)
        del cache[: -(capacity // page_size)]
    return found / total


# %% [markdown]
# It is right, and slow: it looks through the list for every block, and it must run again for every
# size. The way out has been known since 1970 (Mattson and others). Under LRU a cache of C blocks
# holds, at any moment, the C blocks that were used last. So what a small one holds, a larger one
# holds too, and one list serves for all of them: write down *how far from the end* a block was
# found, its rank, and every cache with room for so many blocks would have had it.


# %% tags=["hide-input"]
from minivllm.drawing import draw_rows

PROMPTS = {"first": "abcd", "second": "aefg", "third": "abhi", "fourth": "abcd"}
rows, recent = [], []
for label, names in PROMPTS.items():
    cells = [(i, 1, "free", name) for i, name in enumerate(recent)]
    if label == "fourth":
        cells = [
            (i, 1, "published" if name in names else "free", name)
            for i, name in enumerate(recent)
        ]
    rows.append((f"before the {label}, {names}", cells))
    recent = list(names) + [name for name in recent if name not in names]
draw_rows(
    rows[1:],
    unit=40,
    caption="Blocks by last use, the most recent on the left, before each of three prompts. The "
    "fourth prompt is abcd again. It finds a and b with ranks 1 and 2, c and d with 8 and 9: a cache of "
    "four blocks gives it half of what it once computed, one of nine blocks all of it.",
)

# %% [markdown]
# To count what lies between two uses without looking through the list, number the uses, keep a 1
# at the number of each block's last use and 0 elsewhere, and ask for a sum. A Fenwick tree
# answers that in a logarithmic number of steps.

# %% export="replay.py"
"""What a cache of each size would have found, and what an engine would have done."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import inf
from typing import Any, cast

from minivllm.batch import Chunk
from minivllm.bench import percentile
from minivllm.drawing import Picture
from minivllm.engine import Limits
from minivllm.events import Observer, ignore
from minivllm.options import EngineOptions, assemble
from minivllm.request import RequestOutput, SamplingParams
from minivllm.simulation import Arrival, Arrivals, CostModel, VirtualClock, simulate
from minivllm.workloads import TraceRequest


class Recency:
    """How recently each name was touched: 1 is the last, 2 the one before it.

    A Fenwick tree over the moments of the last touches: O(log n) for each question.
    """

    def __init__(self, num_touches: int) -> None:
        self._sums = [0] * (num_touches + 1)
        self._last: dict[Hashable, int] = {}
        self._now = 0

    def rank(self, name: Hashable) -> int | None:
        """One more than the names that were touched since; None for a new name."""
        at = self._last.get(name)
        if at is None:
            return None
        older = 0
        while at:
            older += self._sums[at]
            at &= at - 1
        return len(self._last) - older + 1

    def touch(self, name: Hashable) -> None:
        """It is the most recent one now."""
        if (before := self._last.get(name)) is not None:
            self._add(before, -1)
        self._now += 1
        self._last[name] = self._now
        self._add(self._now, 1)

    def _add(self, at: int, amount: int) -> None:
        while at < len(self._sums):
            self._sums[at] += amount
            at += at & -at


def leading_ranks(recency: Recency, blocks: Sequence[Hashable]) -> list[int]:
    """For each leading known block, the largest rank up to it: it never falls."""
    ranks: list[int] = []
    for name in blocks:
        rank = recency.rank(name)
        if rank is None:
            break
        ranks.append(max(rank, ranks[-1] if ranks else 0))
    return ranks


# %% [markdown]
# Of a request only the leading blocks count, so a block is worth its own rank or that of one
# before it, whichever is larger. For each size the number of blocks that are found is then one
# binary search.


# %% export="replay.py"
def reuse_curve(
    requests: Sequence[TraceRequest], capacities: Sequence[int], page_size: int
) -> list[float]:
    """The share of prompt tokens that an LRU cache finds, for each capacity in tokens.

    One pass for all capacities (Mattson et al., 1970: under LRU a larger cache holds
    what a smaller one holds); 0 is unbounded. A request finds its leading blocks that
    are there, at most all tokens but one, before its own are touched, the tail as older
    than the head. Counted over the second half of the requests.
    """
    rooms = [tokens // page_size if tokens else inf for tokens in capacities]
    recency = Recency(sum(-(-r.num_tokens // page_size) for r in requests))
    found, total = [0] * len(rooms), 0
    for i, request in enumerate(requests):
        blocks = request.blocks(page_size)
        if i >= len(requests) // 2:
            ranks, most = leading_ranks(recency, blocks), request.num_tokens - 1
            for j, room in enumerate(rooms):
                found[j] += min(bisect_right(ranks, room) * page_size, most)
            total += request.num_tokens
        for name in reversed(blocks):
            recency.touch(name)
    return [tokens / total for tokens in found]


# %% [markdown]
# ## Traffic on demand
#
# To see whether it agrees with the list we need traffic. Not everybody has a log, and one hour of
# one service is one case. Seven generators make the shapes that engines meet; the seed is in the
# name, so `agents-7` is the same traffic for everybody. One of them, and the rest folded:

# %% export="workloads.py" tags=["hide-input"]
Stream = Iterator[TraceRequest]
VOCAB = 50_000  # of generated token ids


def tokens(rng: Random, num_tokens: int) -> "array[int]":
    """Random token ids."""
    return array("i", (rng.randrange(VOCAB) for _ in range(num_tokens)))


def make(
    name: object, ms: float, ids: "array[int]", output: int, **more: Any
) -> TraceRequest:
    """A request with token ids."""
    return TraceRequest(str(name), round(ms, 3), ids, len(ids), output, **more)


# %% export="workloads.py"
def agents(rng: Random) -> Stream:
    """Agents of eight turns: each repeats all before it and brings a tool's result."""
    tools = tokens(rng, 768)
    for agent in count():
        history, before = tools + tokens(rng, 64), None
        for turn in range(8):
            history = history + tokens(rng, rng.randint(50, 300))
            name, length = f"{agent}.{turn}", rng.randint(20, 80)
            yield make(name, 2000.0 * agent, history, length, after=before)
            history, before = history + tokens(rng, length), name


# %% export="workloads.py" tags=["hide-input"]
def bursts(rng: Random) -> Stream:
    """Eight identical prompts at a time, every four seconds."""
    for i in count():
        prompt = tokens(rng, 493)
        for j in range(8):
            yield make(f"{i}.{j}", 4000.0 * i, prompt, 128)


def system_prompt(rng: Random) -> Stream:
    """One system prompt of 1,024 tokens and many questions, at random times."""
    shared, now = tokens(rng, 1024), 0.0
    for i in count():
        now += rng.expovariate(1 / 500)
        own = tokens(rng, rng.randint(16, 256))
        yield make(i, now, shared + own, rng.randint(16, 128))


def tree_of_thought(rng: Random) -> Stream:
    """Trees three levels deep: every thought is continued in three ways."""
    for tree in count():
        level: list[tuple[str, array[int], str | None]]
        level = [(str(tree), tokens(rng, 600), None)]
        for _ in range(3):
            below = []
            for name, prompt, parent in level:
                length = rng.randint(30, 90)
                yield make(name, 8000.0 * tree, prompt, length, after=parent)
                grown = prompt + tokens(rng, length)
                for i in range(3):
                    below.append((f"{name}.{i}", grown + tokens(rng, 12), name))
            level = list(below)


def mixed(rng: Random) -> Stream:
    """Nine short requests of ten, and a question about one of five long documents."""
    documents, now = [tokens(rng, 4096) for _ in range(5)], 0.0
    for i in count():
        now += rng.expovariate(1 / 250)
        if rng.random() < 0.1:
            prompt = rng.choice(documents) + tokens(rng, rng.randint(16, 64))
        else:
            prompt = tokens(rng, rng.randint(20, 100))
        yield make(i, now, prompt, rng.randint(8, 64))


def cycle(rng: Random) -> Stream:
    """Twelve documents of 1,024 tokens, one after the other, again and again."""
    documents = [tokens(rng, 1024) for _ in range(12)]
    for i in count():
        yield make(i, 1000.0 * i, documents[i % 12] + tokens(rng, 16), 16)


def short(rng: Random) -> Stream:
    """Prompts of 49 to 79 tokens with one of twenty beginnings, a hundred a second."""
    heads = [tokens(rng, 48) for _ in range(20)]
    for i in count():
        prompt = rng.choice(heads) + tokens(rng, rng.randint(1, 31))
        yield make(i, 10.0 * i, prompt, rng.randint(1, 16))


GENERATORS: dict[str, Callable[[Random], Stream]] = {
    "bursts": bursts,
    "system-prompt": system_prompt,
    "agents": agents,
    "tree-of-thought": tree_of_thought,
    "mixed": mixed,
    "cycle": cycle,
    "short": short,
}


def generate(name: str, num_requests: int) -> list[TraceRequest]:
    """The first requests of a generator, `agents-7` for example: with its seed.

    The same name gives the same requests on every machine. `ValueError` for a name
    that does not exist.
    """
    kind, _, seed = name.rpartition("-")
    if kind not in GENERATORS or not seed.isdecimal():
        offered = ", ".join(f"{known}-SEED" for known in GENERATORS)
        raise ValueError(f"no generator {name!r}: one of {offered}")
    return list(islice(GENERATORS[kind](Random(name)), num_requests))


# %% name="twins"
agreed = 0
for kind in GENERATORS:
    requests = generate(f"{kind}-1", 120)
    sizes = [2**i for i in range(9, 17)]
    naive = [naive_hit_rate(requests, size, 16) for size in sizes]
    agreed += reuse_curve(requests, sizes, 16) == naive
print(
    f"{agreed} of {len(GENERATORS)} kinds of traffic: equal at all {len(sizes)} sizes"
)
print(f"the trace, {record['blocks']:,} blocks, {len(record['curve'])} sizes: one pass")

# %% [markdown]
# The real trace now, at all sizes of the record:

# %% export="replay.py" tags=["hide-input"]
STATES = ("pinned", "private", "published", "lost", "announced", "computed", "free")
Curve = tuple[str, Sequence[float]]  # a label, and a value for each place on the axis


def draw_curves(
    axis: Sequence[str],
    panels: Sequence[tuple[str, Sequence[Curve]]],
    caption: str = "",
) -> Picture:
    """Panels side by side over one axis; each is scaled to its largest value."""
    picture, left = Picture(caption), 60.0
    for title, curves in panels:
        width, height = max(220.0, 48.0 * len(axis)), 200.0
        most = max((v for _, values in curves for v in values), default=0.0) or 1.0
        picture.text(left, 14, title, "start")
        _draw_frame(picture, left, width, height, axis, most)
        for i, (label, values) in enumerate(curves):
            state = STATES[i % len(STATES)]
            step = width / max(1, len(axis) - 1)
            points = [
                (left + j * step, 30 + height * (1 - v / most))
                for j, v in enumerate(values)
            ]
            for (x1, y1), (x2, y2) in pairwise(points):
                picture.line(x1, y1, x2, y2)
            for x, y in points:
                picture.box(x - 4, y - 4, 8, 8, state)
            picture.box(left, height + 62 + 20 * i, 10, 10, state)
            picture.text(left + 16, height + 71 + 20 * i, label, "start")
        left += width + 110
    return picture


def _draw_frame(
    picture: Picture,
    left: float,
    width: float,
    height: float,
    axis: Sequence[str],
    most: float,
) -> None:
    picture.line(left, 30 + height, left + width, 30 + height)
    picture.line(left, 30, left, 30 + height)
    for share in (0.0, 0.5, 1.0):
        y = 30 + height * (1 - share)
        picture.text(left - 6, y + 4, f"{share * most:.3g}", "end")
    for j, name in enumerate(axis):
        x = left + j * width / max(1, len(axis) - 1)
        picture.text(x, 48 + height, name)


# %% tags=["hide-input"] figure="reuse_curve.svg"
KNOWN = [(tokens, 100 * rate) for tokens, rate in record["curve"] if tokens]
ALL = 100 * curve[0]
draw_curves(
    [f"{t // 2**20}M" if t >= 2**20 else f"{t // 1024}K" for t, _ in KNOWN],
    [
        (
            "reused, % of the prompt tokens",
            [
                ("LRU", [rate for _, rate in KNOWN]),
                ("all that there is", [ALL] * len(KNOWN)),
            ],
        )
    ],
    "One hour of a public service, the second half counted: memory doubles with each step to the "
    "right. The first five change nothing, the next six bring nearly all that there is to find.",
)

# %% [markdown]
# Where does the flat part come from? Look at both ends of a request:

# %% name="two-rates"
whole = next(r for r in record["replays"] if not r["capacity"])
hits, lookups = whole["totals"]["hits"], whole["totals"]["lookups"]
print(f"requests that hit: {hits:,} of {lookups:,}")
per_request = record["prompt_tokens"] / record["requests"]
print(f"one block of {per_request:,.0f} tokens: {512 / per_request:.1%}")
print(
    f"with everything kept: {record['hit_blocks'] / record['blocks']:.2%} of all blocks, "
    f"{record['hit_tokens'] / record['prompt_tokens']:.1%} of all tokens"
)

# %% [markdown]
# All requests but the very first hit, under every size, for all begin with the same block, a
# system prompt perhaps. It is used all the time, so the smallest cache keeps it. It is also
# [4.3%](#two-rates) of a prompt. A dashboard with a *request* hit rate shows 100 % from the first
# minute on, for a cache that saves a twenty-fifth of the work. Token rates are what this chapter
# prints, and `--json` of the command below gives both.
#
# What an unbounded cache finds in this hour now has three names. [36.64%](#two-rates) is a share of
# *blocks*, in which the partial block at a prompt's end counts as much as a whole one.
# [37.4%](#two-rates) is the share of *tokens*: those partial blocks are small, and hardly ever
# found. Both count the whole hour, from an empty cache on. The curve's [39.8%](#opening) are tokens
# of the *second half* of the requests, which find what the first half has left. None is wrong, and
# without its definition none says anything.
#
# ## The cliff
#
# The curve rises gently because the distances differ. Traffic with one single distance has no
# slope at all. Twelve documents of 1,024 tokens are asked about in turn, again and again:

# %% name="cliff" claims="S13"
cycle = generate("cycle-1", 120)
sizes = [4096, 8192, 11 * 1024, 12 * 1024, 13 * 1024, 2**20]
for size, rate in zip(sizes, reuse_curve(cycle, sizes, 16), strict=True):
    print(f"{size / 1024:6,.0f}K tokens: {rate:5.1%}")

# %% [markdown]
# With room for eleven documents of twelve it finds [0.0%](#cliff). The document that LRU drops is
# the one whose turn is next. It cannot know that, and its rule, what was not used for long will
# not be used, is wrong here every single time. With room for thirteen it finds all that there
# is. A job that walks through a fixed set of documents is such traffic, and a cache that is one
# document too small for it is worth nothing.
#
# ## What is a hit worth?
#
# A share of tokens is not yet a second. For that we need a machine, and [chapter
# 8](08_simulation.md)'s formula left out what matters for prompts of 12,000 tokens: how long the
# context is. A step does two kinds of things. It *moves* bytes: all weights, once for everybody,
# and the keys and values of every token that somebody attends to. It *multiplies*: the weights
# with each new token, and each new token with all before it. So count these:

# %% export="roofline.py"
"""What a step costs, from what it moves and what it multiplies."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.batch import Chunk
from minivllm.bench_reuse import backend_of, decoder_of, spread_of
from minivllm.request import encode_ids
from minivllm.simulation import TimedRunner, VirtualClock, least_squares


class Load(NamedTuple):
    """What a step carries: new tokens, and what their attention meets.

    `num_pairs` counts a token and one that it attends to, `num_read` the tokens whose
    K/V are read, once for each request.
    """

    num_tokens: int
    num_pairs: int
    num_read: int


def load_of(chunks: Sequence[Chunk]) -> Load:
    """Count what a batch carries."""
    num_tokens = num_pairs = num_read = 0
    for chunk in chunks:
        n = len(chunk.token_ids)
        num_tokens += n
        num_pairs += n * chunk.start + n * (n + 1) // 2
        num_read += chunk.start + n
    return Load(num_tokens, num_pairs, num_read)


# %% [markdown]
# If the machine moves and multiplies at the same time, a step takes as long as the longer of the two. That is
# the *roofline* (Williams and others, 2009): a step below the ridge waits for memory, above it for
# arithmetic. If it does one after the other, it takes both.


# %% export="roofline.py"
@dataclass(frozen=True)
class Roofline:
    """A step moves bytes and multiplies numbers; each takes its time, in seconds.

    `weights_s`: reading the weights, once a step. `read_s`: the K/V of one token.
    `token_s`: the products for one new token, `pair_s` the attention of one token to
    another. `fixed_s`: what no load changes. If the two sides overlap, a step takes as
    long as the longer one (the roofline of Williams et al., 2009), else both.
    """

    fixed_s: float
    weights_s: float
    read_s: float
    token_s: float
    pair_s: float
    overlaps: bool = False

    def moving_s(self, load: Load) -> float:
        """Seconds for what has to be read."""
        return self.weights_s + load.num_read * self.read_s

    def computing_s(self, load: Load) -> float:
        """Seconds for what has to be multiplied."""
        return load.num_tokens * self.token_s + load.num_pairs * self.pair_s

    def load_s(self, load: Load) -> float:
        """Seconds for one forward pass."""
        sides = self.moving_s(load), self.computing_s(load)
        return self.fixed_s + (max(sides) if self.overlaps else sum(sides))

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds for one forward pass over these chunks."""
        return self.load_s(load_of(chunks))


# %% [markdown]
# The five numbers may come from a data sheet. The model gives bytes and operations, the chip
# gives bytes and operations a second. Nobody reaches them. They are a roof.


# %% export="roofline.py" tags=["hide-input"]
def data_sheet(
    num_parameters: float,
    num_layers: int,
    hidden_size: int,
    kv_bytes_per_token: int,
    flops_per_s: float,
    bytes_per_s: float,
) -> Roofline:
    """The roof itself: a model in 16 bits at a chip's full speed, and nothing else."""
    return Roofline(
        fixed_s=0.0,
        weights_s=2 * num_parameters / bytes_per_s,
        read_s=kv_bytes_per_token / bytes_per_s,
        token_s=2 * num_parameters / flops_per_s,
        pair_s=4 * num_layers * hidden_size / flops_per_s,
        overlaps=True,
    )


COSTS = {  # Llama 3 on H100 SXM: 989 TFLOP/s in bfloat16, 3.35 TB/s, by their sheets
    "70b-8xh100": data_sheet(70.6e9, 80, 8192, 327_680, 8 * 989e12, 8 * 3.35e12),
    "8b-h100": data_sheet(8.03e9, 32, 4096, 131_072, 989e12, 3.35e12),
}


def read_cost(name: str) -> Roofline:
    """One of `COSTS`, or the cost model in a file that `bench calibrate` wrote.

    Raises `ValueError`, naming the file and what is wrong with it.
    """
    if name in COSTS:
        return COSTS[name]
    try:
        given = json.loads(Path(name).read_text("utf-8"))["roofline"]
        cost = Roofline(**given)
    except OSError:
        known = ", ".join(COSTS)
        raise ValueError(f"no cost model {name}: a file, or {known}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{name} holds no cost model: {error!r}") from None
    numbers = [getattr(cost, each.name) for each in fields(cost)]
    if not all(isinstance(x, int | float) and 0 <= x < 1e9 for x in numbers):
        raise ValueError(f"{name}: a cost is a number of seconds, 0 or more")
    if cost.fixed_s + cost.weights_s <= 0:
        raise ValueError(
            f"{name}: fixed_s + weights_s must be above 0: steps take time"
        )
    return cost


# %% name="sheet"
big = COSTS["70b-8xh100"]
for words, load in {
    "one decodes, at 1,000 tokens": Load(1, 1000, 1000),
    "64 decode, at 1,000 tokens": Load(64, 64_000, 64_000),
    "64 decode, at 12,000 tokens": Load(64, 768_000, 768_000),
    "2,048 tokens of a prompt": Load(2048, 2048 * 1024, 2048),
}.items():
    print(
        f"{words:29} moves {1000 * big.moving_s(load):4.1f} ms, "
        f"multiplies {1000 * big.computing_s(load):4.1f} ms"
    )
room = (8 * 80e9 - 2 * 70.6e9) / 327_680
print(f"beside the weights, in 8 times 80 GB: K/V of {room / 1e6:.1f}M tokens")

# %% [markdown]
# Or they come from the machine at hand. `minivllm bench calibrate` times single steps, prompts and decodes of
# many sizes and mixtures of both, and looks for the five numbers with the smallest relative
# errors. Which form is right, longer or both, the steps must say themselves: it fits both and
# keeps the better one. The longer form is not linear, so it guesses for each step which side was
# the longer, fits, and guesses anew with the result.

# %% export="roofline.py" tags=["hide-input"]
Steps = Sequence[tuple[Load, float]]  # what was carried, and the seconds it took


def fit_roofline(steps: Steps) -> Roofline:
    """The roofline with the smallest relative errors: of its two forms the better one.

    Raises `ValueError` if the steps do not determine either.
    """
    forms = [_fit_sum(steps)]
    try:
        forms.append(_fit_longer(steps))
    except ValueError:
        pass  # a form that these steps cannot tell
    return min(forms, key=lambda cost: sum(e * e for e in errors(cost, steps)))


def errors(cost: Roofline, steps: Steps) -> list[float]:
    """By which share of its time each step is over- or underestimated."""
    return [cost.load_s(load) / seconds - 1 for load, seconds in steps]


def _fit_sum(steps: Steps) -> Roofline:
    """Both sides, one after the other. What is fixed counts as weights."""
    rows = [(1, load.num_read, load.num_tokens, load.num_pairs) for load, _ in steps]
    weights, read, token, pair = _solve(rows, steps)
    return Roofline(0.0, weights, read, token, pair)


def _fit_longer(steps: Steps) -> Roofline:
    """The longer side: guess which it is for each step, fit, and guess again."""
    computes = [load.num_tokens > 64 for load, _ in steps]
    for _ in range(20):
        rows = [
            (1, 0, 0, load.num_tokens, load.num_pairs)
            if busy
            else (1, 1, load.num_read, 0, 0)
            for busy, (load, _) in zip(computes, steps, strict=True)
        ]
        fixed, weights, read, token, pair = _solve(rows, steps)
        cost = Roofline(fixed, weights, read, token, pair, overlaps=True)
        before = computes
        computes = [cost.computing_s(x) > cost.moving_s(x) for x, _ in steps]
        if computes == before:
            break
    return cost


def _solve(rows: Sequence[Sequence[float]], steps: Steps) -> list[float]:
    """Least squares of the relative errors; what would be negative is 0."""
    scaled = [
        [x / seconds for x in row]
        for row, (_, seconds) in zip(rows, steps, strict=True)
    ]
    kept = list(range(len(rows[0]))) if rows else []
    while True:
        known = [[row[i] for i in kept] for row in scaled]
        found = dict(zip(kept, least_squares(known, [1.0] * len(rows)), strict=True))
        least = min(kept, key=lambda i: found[i])
        if found[least] >= 0:
            return [found.get(i, 0.0) for i in range(len(rows[0]))]
        kept.remove(least)


# %% export="roofline.py" tags=["hide-input"]
if TYPE_CHECKING:  # not otherwise: the simulator needs no torch
    from minivllm.llm import LLM

Shape = tuple[tuple[int, int], ...]  # chunks: new tokens, and tokens before them


def shapes_to_fit() -> list[Shape]:
    """Prompts, continued prompts, decodes of several sizes, and mixtures."""
    prompts = [((n, 0),) for n in (8, 16, 32, 64, 128, 256, 512)]
    prompts += [((n, s),) for n, s in ((64, 448), (256, 256), (128, 896), (256, 1024))]
    decodes = [((1, c),) * b for b in (1, 2, 4, 8, 16) for c in (64, 512, 1024)]
    mixed = [((n, 0), *((1, 256),) * b) for n, b in ((128, 4), (256, 8))]
    return [*prompts, *decodes, *mixed, ((13, 480),) * 7, ((64, 0),) * 4]


def shapes_held_out() -> list[Shape]:
    """Other sizes of the same kinds, for the errors."""
    prompts = [((n, 0),) for n in (24, 96, 384)] + [((192, 512),)]
    decodes = [((1, c),) * b for b, c in ((1, 256), (3, 256), (6, 768), (12, 128))]
    mixed = [((64, 0), *((1, 128),) * 6), ((384, 0), *((1, 900),) * 2)]
    return [*prompts, *decodes, *mixed, ((32, 256),) * 4]


def chunks_of(shape: Shape, page_size: int) -> list[Chunk]:
    """A batch of that shape, each chunk in pages of its own."""
    chunks, page = [], 0
    for i, (n, start) in enumerate(shape):
        end = page - (-(start + n) // page_size)
        ids = encode_ids([7]) * n
        chunks.append(Chunk(str(i), ids, start, range(page, end), 0, True))
        page = end
    return chunks


def measure_steps(
    llm: "LLM", shapes: Sequence[Shape], repeats: int, page_size: int = 16
) -> list[tuple[Load, list[float]]]:
    """The seconds of a step of each shape, `repeats` times in turn, after a warm-up."""
    from minivllm.runner import ModelRunner  # torch begins here

    batches = [chunks_of(shape, page_size) for shape in shapes]
    num_pages = max(sum(len(c.pages) for c in batch) for batch in batches)
    decoder, backend = decoder_of(llm), backend_of(llm)
    runner = ModelRunner(decoder, num_pages, page_size, backend=backend)
    for layer in runner.memory:  # time does not depend on the numbers, but on NaNs
        layer.keys.normal_()
        layer.values.normal_()
    seconds: list[list[float]] = [[] for _ in batches]
    for _ in range(1 + repeats):
        timed = TimedRunner(runner, VirtualClock())
        for batch, times in zip(batches, seconds, strict=True):
            timed.run(batch)
            times.append(timed.steps[-1][1])
    return [(load_of(b), t[1:]) for b, t in zip(batches, seconds, strict=True)]


@dataclass(frozen=True)
class StepRow:
    """A measured step: what it carried, its seconds, and what the fit says."""

    shape: Shape
    fitted: bool
    load: Load
    step_s: dict[str, Any]
    model_s: float
    error: float


def calibrate_llm(llm: "LLM", repeats: int) -> tuple[Roofline, list[StepRow]]:
    """Measure steps, fit the roofline to some of them; rows for all."""
    context = llm.engine.limits.max_context
    fit, held = (
        [shape for shape in shapes if all(sum(chunk) < context for chunk in shape)]
        for shapes in (shapes_to_fit(), shapes_held_out())
    )
    measured = measure_steps(llm, [*fit, *held], repeats)
    steps = [(load, median(times)) for load, times in measured]
    cost = fit_roofline(steps[: len(fit)])
    rows = []
    for i, (shape, (load, times)) in enumerate(
        zip([*fit, *held], measured, strict=True)
    ):
        model_s, spread = cost.load_s(load), spread_of(times)
        error = model_s / spread["median"] - 1
        rows.append(StepRow(shape, i < len(fit), load, spread, model_s, error))
    return cost, rows


# %% name="calibrated"
calibration = json.loads(Path("../figures/measured/calibrate.json").read_text("utf-8"))
print(
    calibration["cpu"], f"· {calibration['threads']} threads ·", calibration["command"]
)
here = Roofline(**calibration["roofline"])
print(
    f"a step {1000 * here.weights_s:.0f} ms, a new token {1000 * here.token_s:.2f} ms,",
    end=" ",
)
print(f"reading 1,000 tokens {1e6 * here.read_s:.1f} ms, overlaps: {here.overlaps}")
step_rows = calibration["rows"]
for fitted, words in ((True, "fitted to"), (False, "held out")):
    found = sorted(abs(row["error"]) for row in step_rows if row["fitted"] == fitted)
    middle = found[len(found) // 2]
    print(
        f"{words} {len(found)} kinds of steps: off by {middle:.0%}, at most {found[-1]:.0%}"
    )


# %% tags=["hide-input"]
def words_for(shape):
    (n, start), *others = shape
    what = (
        f"{n} tokens after {start}" if n > 1 else f"{len(shape)} decode after {start}"
    )
    if others and n > 1:
        tail = f"{len(others)} decode" if others[0][0] == 1 else f"{len(others)} alike"
        what += f" and {tail}"
    return what


bars = []
for row in step_rows:
    if not row["fitted"]:
        seen, model = row["step_s"]["median"], row["model_s"]
        bars.append(
            (f"{words_for(row['shape'])}: {seen:.2f} s", [(0, seen, "computed", "")])
        )
        bars.append(("the model", [(0, model, "decoded", "")]))
draw_rows(
    bars,
    unit=800,
    caption="Measured steps that the fit has not seen, with their seconds, and below each what the model says of it.",
)

# %% [markdown]
# On this CPU nothing overlaps: the sum fits better, so here the roofline has no ridge. These
# numbers meet [30](#calibrated) kinds of steps within [13%](#calibrated), and those that they have not seen within
# [8%](#calibrated).
#
# What they cannot know: that a kernel is slow at one odd size; that seven short chunks read the
# same pages seven times; what happens *between* steps; that the machine has a neighbour. All that
# is in the errors, and an error of ten percent in every step is no error of ten percent in a
# waiting time: near saturation a queue turns it into a factor. So we do not ask the simulator
# how long somebody waits. We ask which of two policies makes people wait longer, and by how much.

# %% [markdown]
# ## The whole engine
#
# Scheduler, cache and coordinator are the real ones. What stands in for the model waits as long
# as the cost model says, and answers what the trace says was answered. A trace does not say it
# with so many words, but often we can tell: if the next turn's prompt goes on where this one
# ended, the answer is what it goes on with. So the next turn finds the pages of the answer, as it
# does in a live engine. Where nothing is known the answer is zeros, which nobody asks for again.


# %% export="replay.py"
def answers_in(requests: Sequence[TraceRequest]) -> "dict[str, array[int]]":
    """What a request was answered, where a later prompt goes on with it."""
    by_name = {request.name: request for request in requests}
    answers: dict[str, array[int]] = {}
    for request in requests:
        before = by_name.get(request.after or "")
        if before and before.block == 1 and before.name not in answers:
            start = before.num_tokens
            if request.ids[:start] == before.ids:
                answer = request.ids[start : start + before.output_length]
                answers[before.name] = answer
    return answers


NOTHING = array("i")


class TraceRunner:
    """Takes as long as a cost model says; says what the trace says, or else 0.

    `told` has an answer for each request that came, in the order of coming: the engine
    numbers them so.
    """

    def __init__(self, cost: CostModel, clock: VirtualClock) -> None:
        self.cost = cost
        self.clock = clock
        self.told: list[array[int]] = []

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Let the batch's time pass."""
        self.clock.advance(self.cost.step_s(chunks))
        return [self._token(c) if c.samples else None for c in chunks]

    def _token(self, chunk: Chunk) -> int:
        answer = self.told[int(chunk.request_id)]
        at = len(chunk.known) - chunk.num_prompt
        return answer[at] if at < len(answer) else 0


@dataclass(frozen=True)
class Coming(Arrival):
    """A request of a trace on its way; its tokens are made when it comes."""

    request: TraceRequest | None = None


def request_of(arrival: Arrival) -> TraceRequest:
    """What has come."""
    return cast(TraceRequest, cast(Coming, arrival).request)


# %% export="replay.py" tags=["hide-input"]
LARGE = 2**31  # a vocabulary and a context without bounds
MAKE_PARAMS = lru_cache(maxsize=None)(partial(SamplingParams, temperature=0))


@dataclass(slots=True)
class Served:
    """What became of a request. Refused ones ended in an error, at no time."""

    id: str
    cached_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
    output_tokens: int = 0
    finish_reason: str | None = "error"


def what_became(name: str, output: RequestOutput) -> Served:
    """The end of a request, in the trace's own names."""
    done, times = output.outputs[0], output.metrics
    counts = len(done.token_ids), done.finish_reason
    return Served(name, output.num_cached_tokens, times.ttft_s, times.e2e_s, *counts)


class TraceArrivals(Arrivals):
    """Requests of a trace on their way; tokens are made, and told, when they come."""

    def __init__(
        self, runner: TraceRunner, answers: "Mapping[str, array[int]]"
    ) -> None:
        super().__init__()
        self.runner = runner
        self.answers = answers

    def enter(self, request: TraceRequest, time_s: float) -> None:
        """It will come then."""
        params, key = MAKE_PARAMS(request.output_length), request.extra_key
        self.add(Coming(time_s, request.ids, params, key, request.priority, request))

    def take(self, now_s: float) -> Iterator[Arrival]:
        """Remove those that have come by now."""
        for arrival in super().take(now_s):
            request = request_of(arrival)
            self.runner.told.append(self.answers.get(request.name, NOTHING))
            yield replace(arrival, token_ids=request.token_ids())


# %% export="replay.py"
class Replay:
    """A trace and an engine on a virtual clock.

    `capacity` is the K/V memory in tokens, 0: as much as there is need for. Requests
    that can never fit are refused. Who comes after a request comes when that has ended,
    or at its own time if that is later.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        options: EngineOptions,
        capacity: int,
        cost: CostModel,
        clock: VirtualClock | None = None,
        observer: Observer = ignore,
    ) -> None:
        self.requests = requests
        self.clock = clock or VirtualClock()
        self.size = size = options.page_size
        self.num_pages = (
            capacity // size if capacity else sum(map(self._pages, requests))
        )
        if not self.num_pages:
            raise ValueError(f"a capacity of {capacity} tokens is less than a page")
        runner, limits = TraceRunner(cost, self.clock), Limits(LARGE, LARGE)
        self.arrivals = TraceArrivals(runner, answers_in(requests))
        quiet = replace(options, explain=False)  # nobody reads why
        parts = (quiet, self.num_pages, runner, limits, observer)
        self.engine = assemble(*parts, clock=self.clock, streams=False)
        self._followers: dict[str | None, list[TraceRequest]] = {}
        names = {request.name for request in requests}
        for request in requests:
            after = request.after if request.after in names else None
            self._followers.setdefault(after, []).append(request)
        self._served: dict[str, Served] = {}

    def _pages(self, request: TraceRequest) -> int:
        return -(-(request.num_tokens + request.output_length - 1) // self.size)

    def run(
        self, advance: Callable[[int], object] = lambda number: None
    ) -> list[Served]:
        """Serve all requests; in the order of the trace, what became of them."""
        self._let_come(None, 0.0)
        for arrival, output in simulate(self.engine, self.clock, self.arrivals):
            name = request_of(arrival).name
            self._served[name] = what_became(name, output)
            self._let_come(name, self.clock.now())
            advance(1)
        return [self._served[request.name] for request in self.requests]

    def _let_come(self, name: str | None, now_s: float) -> None:
        """Who waits for `name` may come from now on; a refused one ends at once."""
        ended = [(name, now_s)]
        while ended:
            name, now_s = ended.pop()
            for request in self._followers.pop(name, ()):
                time_s = max(request.time_ms / 1000, now_s)
                if self._pages(request) <= self.num_pages:
                    self.arrivals.enter(request, time_s)
                else:
                    self._served[request.name] = Served(request.name)
                    ended.append((request.name, time_s))


# %% export="replay.py" tags=["hide-input"]
def summary(served: Sequence[Served], stats: Mapping[str, int]) -> dict[str, Any]:
    """A replay in a few numbers; times in seconds, hit rates as shares."""
    ended = [s for s in served if s.ttft_s is not None and s.e2e_s is not None]
    told: dict[str, Any] = {
        "requests": len(served),
        "refused": len(served) - len(ended),
        "hit_rate": stats["cached_tokens"] / max(1, stats["queried_tokens"]),
        "request_hit_rate": stats["hits"] / max(1, stats["lookups"]),
    }
    for name in ("ttft_s", "e2e_s"):
        values = [getattr(s, name) for s in ended]
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        told[name] = {p: percentile(values, q) for p, q in shares.items() if values}
    return told


# %% [markdown]
# The hour again, now with a clock, on eight H100 by their data sheet. *Usual* are the options that
# the engine has if nobody sets any; the last line changes one of them.


# %% name="hour"
def line_of(run):
    """One replay of the record."""
    capacity, ttft = run["capacity"], run["ttft_s"]
    size = f"{capacity // 2**20}M" if capacity else "all"
    policy = ", ".join(run["options"].values()) or "usual"
    return (
        f"{size:>4} {policy:24} reused {run['hit_rate']:5.1%}  "
        f"TTFT P50 {ttft['p50']:5.2f} s, P99 {ttft['p99']:5.2f} s"
    )


USUAL = ("index", "publish", "single_flight", "grouping", "admission", "eviction")
print("usual:", ", ".join(f"{name} {getattr(EngineOptions, name)}" for name in USUAL))
for run in record["replays"]:
    print(line_of(run))
slow = whole["slowest"]
print(
    f"of the slowest {slow['requests']}, {slow['in_two_minutes']} came in two minutes; "
    f"{slow['median_prompt']:,.0f} tokens in the median"
)

# %% [markdown]
# The first lines are the memory. From 1M to 4M tokens the reused share grows from
# [5.4%](#hour) to [18.6%](#hour), and the median wait falls from [6.32](#hour) to [2.33](#hour) s. So that is
# what a hit is worth here: tokens that are not computed free the machine for others, and the
# queue gets shorter for everybody. But look at the last step. From 4M tokens to all that is needed,
# the reused share doubles, the median halves once more, and P99 goes from [11.17](#hour) to
# [8.37](#hour) s. The slowest hundredth are ordinary prompts, [8,366](#hour) tokens in the median. [79](#hour) of
# these [120](#hour) came in two minutes of the hour, in a rush, and what they wait for is not their own
# work.
#
# And without an index the same machine needs [13.88](#hour) s for half of its callers. It is not
# that each of them saves eleven seconds of work: it saves a fraction of one, and does not stand in
# a queue that the others make.
#
# What is rounded? A page is a whole block, so a partial last block is computed again:
# [37.3%](#hour) instead of the [37.4%](#two-rates) that the names allow. No block of an answer is ever found,
# for the trace does not name them. Nothing else: prompts and answers have their lengths, each
# output token is a step, and `cached_tokens` counts tokens.
#
# ## One lever each
#
# The hour is one traffic on one machine. Here are six others, on this book's CPU as calibrated,
# with 16K tokens of memory, under five settings, each one change away from the one before it.
# Guess which kind needs what.

# %% name="levers" claims="V01"
from minivllm.options import read_options

SETTINGS = {
    "no cache": {"index": "none"},
    "seen at the end": {"publish": "finish", "single_flight": "none"},
    "seen at once": {"publish": "step", "single_flight": "none"},
    "twins wait": {"single_flight": "prefill"},
    "longest first": {"grouping": "longest-prefix"},
}


def play(traffic, capacity=16_384, cost=here, **options):
    replay = Replay(traffic, read_options(options), capacity, cost)
    return summary(replay.run(), replay.engine.stats())


found = {}
print("reused, TTFT P50 and P99:", *(f"{name:>17}" for name in SETTINGS))
for kind in list(GENERATORS)[:6]:
    traffic, cells = generate(f"{kind}-1", 120), []
    for name, options in SETTINGS.items():
        told = found[kind, name] = play(traffic, **options)
        times = told["ttft_s"]
        cells.append(f"{told['hit_rate']:4.0%} {times['p50']:5.1f} {times['p99']:5.1f}")
    print(f"{kind:24}", *(f"{cell:>17}" for cell in cells))

# %% [markdown]
# Each kind has a lever of its own.
#
# The *bursts* want somebody to wait. Eight identical prompts come in one moment, and what is
# published after a step is too late for those who were planned into the same step; with the
# coordination of [chapter 10](10_single_flight.md) the reused share goes from
# [42%](#levers) to [85%](#levers). *System prompts* want pages that appear at once. *Trees of thought* are content
# as well: a thought is continued when it is finished, so even pages that appear at the end are in
# time. *Agents* want order: in order of arrival eight-turn histories push each other out of a
# memory that could hold some of them, and whoever lets the longest prefix go first lifts the
# share from [64%](#levers) to [86%](#levers).
#
# And now look at the waiting times of that last column. The agents' median gets a little better, and
# P99 goes from [21.9](#levers) to [30.7](#levers) s. For the *mixed* traffic more is reused,
# [59%](#levers) and not [54%](#levers), and median *and* P99 get worse, from [40.8](#levers) to [52.4](#levers) s
# and from [52.1](#levers) to [61.0](#levers) s. Nothing is wrong with the cache. Whoever has a long cached prefix
# is a long document with a small question; it goes first, and nine short requests of ten, who
# share nothing, stand behind it:


# %% name="classes"
traffic = generate("mixed-1", 120)
documents = {request.name for request in traffic if request.num_tokens > 4096}
for name in ("twins wait", "longest first"):
    served = Replay(traffic, read_options(SETTINGS[name]), 16_384, here).run()
    for words, wanted in (("about a document", True), ("short", False)):
        waits = [one.ttft_s for one in served if (one.id in documents) == wanted]
        middle, longest = percentile(waits, 0.5), max(waits)
        print(f"{name:13}: {len(waits):3} {words:16}", end=" ")
        print(f"P50 {middle:.1f} s, longest {longest:.1f} s")

# %% [markdown]
# Longest prefix first takes the [13](#classes) documents out of the queue: half of them have their
# first word after [14.1](#classes) s and not [49.0](#classes). The [107](#classes) short ones pay
# for it, [52.4](#classes) s and not [40.8](#classes), and since there are eight times as many of
# them, they are what the percentiles of all show.
#
# A better hit rate says that less was computed. It does not say whose turn it was.
#
# The strangest line is *cycle*, with [0%](#levers) and [89%](#levers) in the same memory, which has room for
# all twelve documents. What happens if pages appear at the end only?


# %% name="two-states"
from minivllm.events import EventLog

for name in ("seen at the end", "seen at once"):
    replay = Replay(
        generate("cycle-1", 120), read_options(SETTINGS[name]), 16_384, here
    )
    log = replay.engine.scheduler.observer = EventLog()
    replay.run()
    sizes = [len(event.details["chunks"]) for event in log.of("schedule")]
    running = sum(sizes) / sum(size > 0 for size in sizes)
    evicted = replay.engine.stats()["evicted_tokens"]
    print(f"{name:15}: {running:4.1f} run at a time, {evicted:,} tokens evicted")

# %% [markdown]
# A request that finds nothing runs for seconds, so the next one comes while it runs, then
# another. [13.9](#two-states) run side by side, their private pages fill the memory, and what one of them
# publishes at its end is evicted long before its document is asked for again. So that one finds
# nothing either. If pages appear at once, the second round finds the first one's, requests are
# short, [1.2](#two-states) run at a time, and the memory is free for the cache. Hits make room for
# hits, and misses for misses: the same traffic has two states, and the reuse curve, which knows
# no running requests, sees one of them. This is what a clock is for.

# %% [markdown]
# ## The command
#
# All this is `minivllm simulate`. It takes a trace or a generator, lists of capacities and of
# policies, and prints a line for each combination, JSON for a machine, or a picture. `--cost`
# takes the record of a calibration; `--trace out.json` writes what one replay did, and when on its
# virtual clock, for Perfetto, as in [chapter 14](14_llm.md). The code is mostly about words, so it is folded; the call in
# it that matters is `Replay`.

# %% export="command_simulate.py" tags=["hide-input"]
"""`minivllm simulate`, what each policy would do for a trace; and `bench calibrate`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from minivllm.bench import make_record
from minivllm.cli import SCHEMA_VERSION, AsJson, Trace, with_options
from minivllm.command_bench import app as bench
from minivllm.command_bench import check_sizes, keep, quantity, spell
from minivllm.options import SAMPLING, EngineOptions
from minivllm.progress import progress_bar
from minivllm.replay import Replay, Served, draw_curves, reuse_curve, summary
from minivllm.roofline import Roofline, StepRow, calibrate_llm, read_cost
from minivllm.simulation import VirtualClock
from minivllm.timeline import check_place, tracing
from minivllm.workloads import TraceRequest, generate, read_trace, to_line

POLICIES = ("index", "publish", "single_flight", "grouping", "admission", "eviction")
UNUSED = {"device", "dtype", "kernels", "seed", "explain", "explain_tokens"}
LEFT_OUT = {"model", *SAMPLING, "num_pages", *UNUSED}
NEEDED, CURVE = "0", "16K,64K,256K,1M,4M,16M,0"  # what --capacity, --capacities are


def add_to(root: typer.Typer) -> None:
    """Add this module's commands to the command line."""
    root.command()(simulate)
    bench.command()(calibrate)


def sizes_of(text: str) -> list[int]:
    """Sizes in tokens: 16384,64K,4M; 0 is unbounded. Raises `ValueError`."""
    found = []
    for word in text.split(","):
        factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(word.strip()[-1:].upper(), 1)
        digits = word.strip()[: -1 if factor > 1 else None]
        if not digits.isdecimal():
            raise ValueError(f"a size is a whole number, as in 16K,4M,0, not {word!r}")
        found.append(int(digits) * factor)
    return found


def size_name(tokens: int) -> str:
    """A size in tokens, as short as it was given."""
    for factor, unit in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if tokens and tokens % factor == 0:
            return f"{tokens // factor}{unit}"
    return str(tokens or "unbounded")


def load_traffic(source: str, num_requests: int | None) -> list[TraceRequest]:
    """The requests of a file, or of a generator named `gen:…`."""
    if num_requests is not None and not 1 <= num_requests < 2**31:
        raise ValueError(f"--requests must be at least 1, not {num_requests}")
    if source.startswith("gen:"):
        return generate(source.removeprefix("gen:"), num_requests or 200)
    return read_trace(Path(source))[:num_requests]


def combinations(options: dict[str, Any]) -> list[EngineOptions]:
    """The engines that lists of policies ask for. Raises `ValueError`."""
    known = {each.name for each in fields(EngineOptions)} - LEFT_OUT
    chosen = {name: options[name] for name in known}
    lists = [dict.fromkeys(str(chosen[name]).split(",")) for name in POLICIES]
    return [
        EngineOptions(**chosen | dict(zip(POLICIES, values, strict=True)))
        for values in product(*lists)
    ]


# %% export="command_simulate.py" tags=["hide-input"]
Panels = tuple[list[str], list[tuple[str, list[tuple[str, list[float]]]]]]


def tell_curve(
    traffic: list[TraceRequest], sizes: list[int], page_size: int, as_json: bool
) -> Panels:
    """Print the reuse curve; returns what a picture of it shows."""
    rates = reuse_curve(traffic, sizes, page_size)
    pairs = list(zip(sizes, rates, strict=True))
    if as_json:
        rows = [{"tokens": size, "hit_rate": rate} for size, rate in pairs]
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "capacities": rows}))
    else:
        for size, rate in pairs:
            typer.echo(f"{size_name(size):>10} tokens  {rate:6.1%}")
    curve = ("an LRU cache", [100 * rate for rate in rates])
    names = [size_name(size) for size in sizes]
    return names, [("reused, % of prompt tokens", [curve])]


# %% export="command_simulate.py" tags=["hide-input"]
@dataclass
class Outcome:
    """One engine, one capacity: what became of the traffic."""

    name: str  # the policies in which the runs differ
    capacity: int
    options: EngineOptions
    told: dict[str, Any]
    totals: dict[str, int]


def run_all(
    traffic: list[TraceRequest],
    engines: list[EngineOptions],
    sizes: list[int],
    cost: Roofline,
    trace: Path | None = None,
) -> Iterator[tuple[Outcome, list[Served]]]:
    """Replay the traffic through every engine at every capacity."""
    with progress_bar("requests", len(traffic) * len(engines) * len(sizes)) as advance:
        for options, size in product(engines, sizes):
            clock = VirtualClock()
            with tracing(trace, clock) as observer:
                replay = Replay(traffic, options, size, cost, clock, observer)
                served, totals = replay.run(advance), replay.engine.stats()
            told, name = summary(served, totals), difference(options, engines)
            if told["refused"]:
                note = f"{told['refused']} of {len(traffic)} requests never fit"
                typer.echo(f"{note} in {size_name(size)} tokens: refused", err=True)
            yield Outcome(name, size, options, told, totals), served


def difference(options: EngineOptions, engines: list[EngineOptions]) -> str:
    """The policies of one engine in which the engines differ."""
    return ", ".join(
        getattr(options, name)
        for name in POLICIES
        if len({getattr(each, name) for each in engines}) > 1
    )


HEAD = f"{'tokens':>10} {'reused':>7}  TTFT {'P50':>9} {'P90':>9} {'P99':>9}"


def in_words(outcome: Outcome) -> str:
    """A line of the table."""
    told, times = outcome.told, outcome.told["ttft_s"]
    shown = (quantity(times[p], "s") if times else "-" for p in ("p50", "p90", "p99"))
    ttft = " ".join(f"{each:>9}" for each in shown)
    counts = f"{outcome.totals['preemptions']:>9}"
    return (
        f"{size_name(outcome.capacity):>10} {told['hit_rate']:>7.1%}       {ttft}"
        f" {counts}  {outcome.name}"
    )


def tell_replays(
    outcomes: Iterator[tuple[Outcome, list[Served]]], single: bool, as_json: bool
) -> list[Outcome]:
    """Print each replay when it is done; JSON of a single one has every request."""
    kept, rows = [], []
    if not as_json:
        typer.echo(f"{HEAD} preempted")
    for outcome, served in outcomes:
        kept.append(outcome)
        if not as_json:
            typer.echo(in_words(outcome))
        elif single:
            write_requests(served, outcome)
        policies = {name: getattr(outcome.options, name) for name in POLICIES}
        row = {"options": policies, "capacity": outcome.capacity}
        rows.append(row | outcome.told | {"totals": outcome.totals})
    if as_json and not single:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "runs": rows}))
    return kept


def write_requests(served: list[Served], outcome: Outcome) -> None:
    """One JSON object, written as it is made: there may be a million requests."""
    out = sys.stdout
    out.write(f'{{"schema_version": {SCHEMA_VERSION}, "requests": [')
    for i, one in enumerate(served):
        out.write((",\n " if i else "\n ") + json.dumps(asdict(one)))
    rest = {"summary": outcome.told, "totals": outcome.totals}
    out.write(f"\n], {json.dumps(rest)[1:]}\n")


def panels_of(outcomes: list[Outcome]) -> Panels:
    """Hit rates and waiting times against memory, a curve for each engine."""
    rates: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    for each in outcomes:
        rates.setdefault(each.name or "reused", []).append(100 * each.told["hit_rate"])
        for p in ("p50", "p99"):
            label = f"{p.upper()} {each.name}"
            waits.setdefault(label, []).append(each.told["ttft_s"].get(p, 0.0))
    sizes = list(dict.fromkeys(each.capacity for each in outcomes))
    titles = "reused, % of prompt tokens", "TTFT, s"
    pairs = zip(titles, (rates, waits), strict=True)
    panels = [(title, list(curves.items())) for title, curves in pairs]
    return [size_name(size) for size in sizes], panels


# %% export="command_simulate.py" tags=["hide-input"]
@with_options(LEFT_OUT, page_size=None)
def simulate(
    source: Annotated[
        str,
        typer.Argument(metavar="TRACE", help="A JSONL file, or gen:NAME-SEED, above."),
    ],
    capacity: Annotated[
        str, typer.Option(help="Tokens of K/V memory, a list; 0: as many as needed.")
    ] = NEEDED,
    cost: Annotated[
        str, typer.Option(help="A file of bench calibrate, 70b-8xh100 or 8b-h100.")
    ] = "70b-8xh100",
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="No clock: the reuse curve of LRU.")
    ] = False,
    capacities: Annotated[
        str, typer.Option(help="Cache sizes of that curve, in tokens; 0: unbounded.")
    ] = CURVE,
    requests: Annotated[
        int | None, typer.Option(help="Only the first so many; generated ones: 200.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the traffic to a trace file as well.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw hit rates and TTFT against memory.")
    ] = None,
    trace: Trace = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """What would each policy do for this traffic? Replays it on a virtual clock.

    Capacities and policies may be lists: --capacity 256K,1M --publish finish,step
    --eviction lru,lfu tries all combinations. A trace has lines of ours or of Mooncake
    (pages are then its blocks of 512 tokens). Generated traffic: gen:bursts-0,
    gen:system-prompt-0, gen:agents-0, gen:tree-of-thought-0, gen:mixed-0, gen:cycle-0,
    gen:short-0; the number is the seed.
    """
    check_place(write, "--write")
    check_place(svg, "--svg")
    check_place(trace, "--trace")
    if capacity != NEEDED if cache_only else capacities != CURVE:
        raise ValueError("--cache-only takes --capacities, a replay takes --capacity")
    sizes, model = sizes_of(capacities if cache_only else capacity), read_cost(cost)
    traffic = load_traffic(source, requests)
    if options["page_size"] is None:
        options["page_size"] = page_of(traffic)
    engines = combinations(options)
    single = len(engines) * len(sizes) == 1 and not cache_only
    if trace and not single:
        raise ValueError("--trace is of one replay: one capacity and one engine")
    page = engines[0].page_size
    if any(0 < size < page for size in sizes):
        raise ValueError(f"a capacity of {min(filter(None, sizes))} tokens is no page")
    if write:
        write.write_text("".join(f"{to_line(r)}\n" for r in traffic), "utf-8")
    if cache_only:
        shown = tell_curve(traffic, sizes, page, as_json)
    else:
        outcomes = run_all(traffic, engines, sizes, model, trace)
        shown = panels_of(tell_replays(outcomes, single, as_json))
    if svg:
        svg.write_text(draw_curves(*shown).svg(), "utf-8")


def page_of(traffic: list[TraceRequest]) -> int:
    """A trace of named blocks has pages of their size."""
    return traffic[0].block if traffic[0].block > 1 else EngineOptions.page_size


# %% export="command_simulate.py" tags=["hide-input"]
def calibrate(
    model: Annotated[
        str, typer.Option(help="smollm2, a folder, a .gguf file or a hub id.")
    ] = "smollm2",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Readings of each step.")] = 5,
    record: Annotated[
        Path | None, typer.Option(help="Write the record to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time single steps of the engine, and fit the cost model of simulate to them."""
    check_place(record, "--record")
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    check_sizes(1, repeats, {"max_tokens": 2} | place)
    from minivllm.llm import LLM  # torch begins here

    llm = LLM(model, num_pages=1, progress=not as_json, **place)
    cost, rows = calibrate_llm(llm, repeats)
    for line in calibration_lines(cost, rows):
        typer.echo(line, err=as_json)
    facts = {"model": model, **place, "repeats": repeats}
    command = spell("calibrate", facts)
    facts |= {"roofline": asdict(cost), "threads": num_threads()}
    keep(make_record(command, rows, **facts), record, as_json)


def num_threads() -> int:
    """Threads of the model's products."""
    import torch

    return torch.get_num_threads()


def calibration_lines(cost: Roofline, rows: list[StepRow]) -> Iterator[str]:
    """The fit for people, and how far off it is."""
    for name, value in asdict(cost).items():
        yield f"{name:<10} {value if name == 'overlaps' else quantity(value, 's')}"
    for fitted, words in ((True, "fitted to"), (False, "held out")):
        found = sorted(abs(row.error) for row in rows if row.fitted is fitted)
        yield (
            f"{words} {len(found)} kinds of steps: off by {median(found):.0%} "
            f"(median), {found[-1]:.0%} at most"
        )


# %% [markdown]
# This is what it prints. It runs as it would in a terminal:

# %% name="command"
from contextlib import suppress

from minivllm.cli import main

COST = "../figures/measured/calibrate.json"
LINE = f"minivllm simulate gen:agents-1 --requests 120 --capacity 16K,64K --cost {COST}"
LINE += " --grouping arrival,longest-prefix"
print("$", LINE)
with suppress(SystemExit):
    main(LINE.split()[1:])

# %% [markdown]
# The lines with 16K are the agents of the levers. With 64K nobody pushes anybody out, and both
# orders find [89.2%](#command). Every option of the engine is also one of the command, and stays as
# usual unless it is named. `--svg` makes a picture of such a sweep:

# %% tags=["hide-input"]
engines = [read_options({"grouping": each}) for each in ("arrival", "longest-prefix")]
sizes = [4096, 8192, 16_384, 32_768, 65_536]
outcomes = [o for o, _ in run_all(generate("agents-1", 120), engines, sizes, here)]
draw_curves(
    *panels_of(outcomes),
    "120 requests of gen:agents-1 on this machine, as the command draws them with --svg. "
    "Longest prefix first reuses more as long as memory is short, and has the worse P99 "
    "just there.",
)

# %% [markdown]
# ## A table from another machine
#
# Does the simulator say what others measure? The authors of mini-vllm-rs have published a
# benchmark of their prefix cache on an Apple M2, with four workloads and exact counts of tokens: a
# seed and five probes that share a part of it; groups of 1 to 8 on a warm prefix; a cold and a
# warm burst of four; and eight prompts in turn that do not fit. Their engine publishes at the end, lets
# nobody wait, and reserves the whole footprint of a request before it runs. These are options here.
# (How long the seeds were the table does not say. Ours have 927 tokens.)

# %% name="published"
published = json.loads(
    Path("../figures/published/mini_vllm_rs.json").read_text("utf-8")
)
print(published["source"])
config = published["config"]
THEIRS = {
    n: config[n] for n in ("page_size", "max_batch_tokens", "max_running", "publish")
}
THEIRS |= {"single_flight": "none", "admission": "reserve"}


def words(name, num_tokens):
    return tokens(Random(name), num_tokens)


def serve(jobs, cost=here, **options):
    """Jobs are (name, prompt, output tokens, after whom); what became of each."""
    requests = [make(n, 0.0, ids, output, after=who) for n, ids, output, who in jobs]
    capacity = config["num_pages"] * config["page_size"]
    replay = Replay(requests, read_options(THEIRS | options), capacity, cost)
    return {one.id: one for one in replay.run()}, replay.engine.stats()


# %% tags=["hide-input"]
def overlap():
    """A seed, then probes one after the other; each shares so many tokens with it."""
    seed, before = words("seed", 927), "seed"
    yield "seed", seed, 16, None
    for probe in published["overlap"]["probes"]:
        size, shared = probe["input"], probe["restored"]
        name = f"probe {size}"
        yield name, seed[:shared] + words(name, size)[shared:], 16, before
        before = name


def fan_out():
    """A seed, then groups of 1, 2, 4 and 8 at once."""
    told, before = published["warm_fanout"], "seed"
    seed = words("fan", told["input"])
    yield "seed", seed, 16, None
    for group in told["groups"]:
        names = [f"{group['n']}.{i}" for i in range(group["n"])]
        for name in names:
            own = words(name, told["input"])[told["restored_each"] :]
            yield name, seed[: told["restored_each"]] + own, 128, before
        before = names[-1]


def burst():
    """Four times one prompt, at once; and again when they have ended."""
    prompt = words("burst", published["burst"]["input"])
    for when, after in (("cold", None), ("warm", "cold 3")):
        for i in range(4):
            yield f"{when} {i}", prompt, 128, after


def churn():
    """Eight prompts one after the other, twice."""
    before = None
    for i in range(16):
        yield str(i), words(f"churn {i % 8}", published["churn"]["input"]), 16, before
        before = str(i)


# %% name="counts"
WORKLOADS = {"overlap": overlap, "fan-out": fan_out, "burst": burst, "churn": churn}
runs = {name: serve(list(jobs())) for name, jobs in WORKLOADS.items()}
cached = {
    name: [one.cached_tokens for one in served.values()]
    for name, (served, _) in runs.items()
}
published_tokens = {
    name: stats["published_tokens"] for name, (_, stats) in runs.items()
}
assert cached["overlap"][1:] == [p["restored"] for p in published["overlap"]["probes"]]
assert cached["fan-out"][1:] == [896] * 15
assert sum(cached["burst"][:4]) == 0 and sum(cached["burst"][4:]) == 3776
assert published_tokens["burst"] == 1072 and published_tokens["churn"] == 2 * 7808
assert sum(cached["churn"]) == 0
eight = sorted(runs["fan-out"][0][f"8.{i}"].ttft_s for i in range(8))
admitted_at_once = eight.count(eight[0])
totals = {n: sum(s[n] for _, s in runs.values()) for n in runs["burst"][1]}
print("restored by the probes:", *cached["overlap"][1:])
print(f"of eight at once {admitted_at_once} are admitted: 341 // 66")
print(f"lookups {totals['lookups']}, hits {totals['hits']}", end=": ")
print(f"{totals['hits'] / totals['lookups']:.0%} of the requests,", end=" ")
print(f"{totals['cached_tokens'] / totals['queried_tokens']:.0%} of the tokens")

# %% [markdown]
# Every count of theirs is asserted above: [208, 432, 656](#counts) and 880 tokens for the probes, 896 for
# each of fifteen, 3,776 for the warm burst and nothing for the cold one, 1,072 tokens newly
# indexed by four identical requests, 7,808 for each cycle of the churn, and [5](#counts) of 8 admitted.
# Their report calls the hit rate [50%](#counts), 23 of 46 lookups. Of the tokens it is [47%](#counts).
# That these are close is chance. Above, on the public trace, they were 100 and 4.5.
#
# Counts need no clock. Times do, and ours is fitted to another chip, another model and another
# program. So compare what a cache does to the TTFT on each machine: with it, divided by without.

# %% name="ratios"
from statistics import fmean

cold_runs = {
    name: serve(list(jobs()), index="none")[0] for name, jobs in WORKLOADS.items()
}


def simulated(workload, names):
    """Mean TTFT with the cache over mean TTFT without."""
    warm, cold = runs[workload][0], cold_runs[workload]
    return fmean(warm[n].ttft_s for n in names) / fmean(cold[n].ttft_s for n in names)


lines = []
for probe in published["overlap"]["probes"]:
    name = f"probe {probe['input']}"
    lines.append((name, probe["ttft_ms"], simulated("overlap", [name])))
for group in published["warm_fanout"]["groups"]:
    names = [f"{group['n']}.{i}" for i in range(group["n"])]
    label = f"fan-out of {group['n']}"
    lines.append((label, group["ttft_ms"], simulated("fan-out", names)))
for when in ("cold", "warm"):
    names = [f"{when} {i}" for i in range(4)]
    lines.append(
        (
            f"burst, {when}",
            published["burst"][when]["ttft_ms"],
            simulated("burst", names),
        )
    )
factors = []
for label, theirs, ratio in lines:
    m2 = theirs["cached"] / theirs["baseline"]
    factors.append(ratio / m2)
    print(f"{label:12} Apple M2 {m2:4.2f}, simulated {ratio:4.2f}")
    assert (m2 < 0.5) == (ratio < 0.5)
print(f"simulated / Apple M2: {min(factors):.1f} to {max(factors):.1f}")

# %% tags=["hide-input"]
bars = []
for label, theirs, ratio in lines:
    m2 = theirs["cached"] / theirs["baseline"]
    bars.append(
        (f"{label}, Apple M2", [(0, m2, "private", f"{m2:.2f}" if m2 > 0.1 else "")])
    )
    bars.append(
        ("simulated", [(0, ratio, "published", f"{ratio:.2f}" if ratio > 0.1 else "")])
    )
draw_rows(
    bars,
    unit=420,
    caption="TTFT with the cache, as a share of that without. Apple M2, measured, and this book's CPU, "
    "simulated from five numbers.",
)

# %% [markdown]
# Eleven ratios, all on the same side of one half, and none is off by more than a factor of
# [2.0](#ratios). A cached prompt has its first token after a small share of the time; of eight at once
# three must wait for the five before them, which spoils the mean, [0.33](#ratios) there and
# [0.45](#ratios) here; and a cold burst gains nothing. Ours are larger where nearly all is cached,
# [0.07](#ratios) against [0.04](#ratios). What is left then is a step with hardly a token in it,
# and that costs [51 ms](#calibrated) here, as much as 45 tokens of a prompt.
#
# ## What it costs
#
# Scheduling is real here, so it takes real time, all of it in Python. Is it proportional to the traffic?

# %% name="million"
for run in record["million"]:
    each_us = 1e6 * run["cpu_s"] / run["requests"]
    print(
        f"{run['requests']:>9,} requests: {run['cpu_s']:4.0f} s, {each_us:3.0f} µs each,",
        end=" ",
    )
    print(f"{run['peak_mb']:5,} MB")
print(
    f"the hour of {record['requests']:,}: {whole['cpu_s']:.0f} s, {whole['peak_mb']} MB",
    end="; ",
)
print(f"its reuse curve: {record['curve_cpu_s']:.1f} s")

# %% [markdown]
# Eight times the requests take less than eight times the memory, and somewhat more than eight times
# the CPU: [227](#million) µs for each of them and [268](#million). A test counts instead of
# timing: twice the requests, twice the calls. That is not a matter of course. An engine that *streams* makes an output for each token, with all
# tokens so far, which grows with the square of an answer's length; a simulation needs the last one only, and asks
# for it (`streams=False`, [chapter 7](07_engine.md)). The reuse curve takes [1.0](#million) s, so
# begin with it: if it is flat between the memory that you have and the memory that you can get,
# more memory will not help. If a replay then finds less than the curve, order, waiting or publication is
# what is missing.
#
# ## Whose number is it?
#
# A measured number belongs to a machine and a day. A simulated one belongs to its inputs: a
# trace, five numbers of a cost model, a list of policies. The clock is a float that is added to, in the
# same order on every machine, and nothing in the engine asks what time it really is, so a second
# machine prints the same digits. That makes it a number that one can argue about: whoever
# doubts it can change an input and look. It does not make it true. The inputs are a guess about
# tomorrow's traffic, and a model of a machine that is off by some percent.
#
# And *why* a request found so little, whether its prefix was never there, or went, or came a step too
# late, the engine can say ([chapter 13](13_explain.md)). What to change in the requests themselves is the question
# to their log ([chapter 17](17_log.md)).
#
# ## Exercises
#
# ### Exercise 1
#
# Twelve documents in turn, a cache with room for eleven: LRU finds nothing. Belady (1966): drop
# the document whose next use lies farthest in the future. Which share of the second half of 240
# requests does that find? Think first: what does the cache look like after a round?


# %% tags=["solution"] name="belady"
def next_use(document, rest):
    return rest.index(document) if document in rest else len(rest)


uses, cache, found_at = [i % 12 for i in range(240)], set(), []
for i, document in enumerate(uses):
    if document in cache:
        found_at.append(i)
    elif len(cache) == 11:
        rest = uses[i + 1 :]
        cache.remove(max(sorted(cache), key=lambda one, rest=rest: next_use(one, rest)))
    cache.add(document)
best = sum(i >= 120 for i in found_at) / 120
print(f"{best:.1%}")

# %%
assert 0.90 < best < 0.92

# %% [markdown]
# Ten of eleven: after a round the cache holds eleven documents, and the optimum gives up one hit in
# each round of eleven lookups. So [90.8%](#belady) were possible where LRU has 0. It needs to know the
# future. In this traffic "the most recent one goes" would do nearly as well, and in most other
# traffic it would be a disaster.
#
# ### Exercise 2
#
# On eight H100, from how many decoding requests on does a step multiply longer than it moves, if each
# has 16 tokens of context? And with 4,096 tokens each? (`None`: never.)


# %% tags=["solution"] name="ridge"
def ridge(context):
    for number in range(1, 10_000):
        load = Load(number, number * context, number * context)
        if big.computing_s(load) > big.moving_s(load):
            return number
    return None


print(ridge(16), ridge(4096))

# %%
assert 295 <= ridge(16) <= 320 and ridge(4096) is None

# %% [markdown]
# With short contexts from [299](#ridge) on: that is the chip's ratio of operations to bytes, hardly
# changed by the keys and values. With long ones never. Every further request brings 4,096 tokens to read, which takes
# longer than to multiply its one token. Batching pays for the weights, and nothing pays for the
# context, unless it is shared.
#
# ### Exercise 3
#
# Somebody replays a log of conversations without `after`: all turns come at the times of the log.
# Take `agents-1`, whose turns have the time of the first one, on this CPU with 64K tokens. Are
# more or fewer tokens reused than in the closed loop, and is P50 of the TTFT shorter or longer?

# %% tags=["solution"] name="open-loop"
closed = generate("agents-1", 120)
opened = [replace(request, after=None) for request in closed]
in_loop, at_their_times = (play(traffic, 65_536) for traffic in (closed, opened))
for words_, told in (("closed", in_loop), ("open", at_their_times)):
    print(
        f"{words_:7} reused {told['hit_rate']:.0%}, P50 {told['ttft_s']['p50']:.1f} s"
    )

# %%
assert at_their_times["hit_rate"] < in_loop["hit_rate"]
assert at_their_times["ttft_s"]["p50"] > in_loop["ttft_s"]["p50"]

# %% [markdown]
# Fewer tokens, [74%](#open-loop) and not [89%](#open-loop), and a median of [66.3](#open-loop) s and not
# [0.6](#open-loop). Eight turns of a conversation at once are no conversation. The second does
# not find what the first one has not finished, and nobody ever waits for an answer before asking.
