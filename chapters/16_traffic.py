# %% [markdown]
# # 16. What would each policy do for my traffic?

# %% export="workloads.py"
"""Traffic to replay: requests from trace files, and generated ones."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

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
    ids: array[int]
    num_tokens: int
    output_length: int
    block: int = 1
    after: str | None = None
    extra_key: ExtraKey = None
    priority: int = 0

    def token_ids(self) -> array[int]:
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


# %% export="workloads.py"
def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a JSONL file, ours or Mooncake's, in the order of its lines.

    Raises `ValueError` naming the file, the line and what is wrong with it.
    """
    reader = LineReader()
    requests: list[TraceRequest] = []
    lines: list[int] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    lines.append(number)
                    requests.append(reader.read(line, str(len(requests))))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}:{lines[-1]}: {error}") from None
    if not requests:
        raise ValueError(f"{path}: there is no request in it")
    for index, fault in check_order(requests):
        raise ValueError(f"{path}:{lines[index]}: {fault}")
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


# %% export="workloads.py"
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

    def read(self, text: str, name: str) -> TraceRequest:
        """One line. Raises `ValueError` for whatever is wrong with it."""
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"this is not JSON: {error}") from None
        if not isinstance(line, dict):
            raise ValueError(f"a request is a JSON object, not {text.strip()[:40]}")
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

    def _prompt(self, line: Mapping[str, Any]) -> tuple[array[int], int, int]:
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

    def _named_blocks(self, line: Mapping[str, Any]) -> tuple[array[int], int, int]:
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


# %% export="workloads.py"
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


# %% export="workloads.py"
Stream = Iterator[TraceRequest]
VOCAB = 50_000  # of generated token ids


def tokens(rng: Random, num_tokens: int) -> array[int]:
    """Random token ids."""
    return array("i", (rng.randrange(VOCAB) for _ in range(num_tokens)))


def make(
    name: object, ms: float, ids: array[int], output: int, **more: Any
) -> TraceRequest:
    """A request with token ids."""
    return TraceRequest(str(name), round(ms, 3), ids, len(ids), output, **more)


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


# %% export="replay.py"
"""What a cache of each size would have found, and what an engine would have done."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import ceil, inf
from typing import Any, cast

from minivllm.batch import Chunk
from minivllm.drawing import Picture
from minivllm.engine import Limits
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


# %% export="replay.py"
def answers_in(requests: Sequence[TraceRequest]) -> dict[str, array[int]]:
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


# %% export="replay.py"
LARGE = 2**31 - 1  # a vocabulary and a context without bounds
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

    def __init__(self, runner: TraceRunner, answers: Mapping[str, array[int]]) -> None:
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
    ) -> None:
        self.requests = requests
        self.clock = VirtualClock()
        self.size = size = options.page_size
        self.num_pages = (
            capacity // size if capacity else sum(map(self._pages, requests))
        )
        if not self.num_pages:
            raise ValueError(f"a capacity of {capacity} tokens is less than a page")
        runner, limits = TraceRunner(cost, self.clock), Limits(LARGE, LARGE)
        self.arrivals = TraceArrivals(runner, answers_in(requests))
        self.engine = assemble(
            options, self.num_pages, runner, limits, clock=self.clock, streams=False
        )
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


# %% export="replay.py"
def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


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
        values = sorted(getattr(s, name) for s in ended)
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        told[name] = {p: percentile(values, q) for p, q in shares.items() if values}
    return told


# %% export="replay.py"
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


# %% export="roofline.py"
"""What a step costs, from what it moves and what it multiplies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.batch import Chunk
from minivllm.bench_reuse import decoder_of, spread_of
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


# %% export="roofline.py"
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


# %% export="roofline.py"
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


# %% export="roofline.py"
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
    llm: LLM, shapes: Sequence[Shape], repeats: int, page_size: int = 16
) -> list[tuple[Load, list[float]]]:
    """The seconds of a step of each shape, `repeats` times in turn, after a warm-up."""
    from minivllm.runner import ModelRunner  # torch begins here

    batches = [chunks_of(shape, page_size) for shape in shapes]
    num_pages = max(sum(len(c.pages) for c in batch) for batch in batches)
    runner = ModelRunner(decoder_of(llm), num_pages, page_size)
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


def calibrate_llm(llm: LLM, repeats: int) -> tuple[Roofline, list[StepRow]]:
    """Measure steps, fit the roofline to some of them; rows for all."""
    fit, held = shapes_to_fit(), shapes_held_out()
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


# %% export="command_simulate.py"
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
from minivllm.cli import SCHEMA_VERSION, AsJson, with_options
from minivllm.command_bench import app as bench
from minivllm.command_bench import check_place, check_sizes, keep, quantity, spell
from minivllm.options import SAMPLING, EngineOptions
from minivllm.progress import progress_bar
from minivllm.replay import Replay, Served, draw_curves, reuse_curve, summary
from minivllm.roofline import Roofline, StepRow, calibrate_llm, read_cost
from minivllm.workloads import TraceRequest, generate, read_trace, to_line

POLICIES = ("index", "publish", "single_flight", "grouping", "admission", "eviction")
LEFT_OUT = {"model", *SAMPLING, "num_pages", "device", "dtype", "seed"}


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


def load_traffic(trace: str, num_requests: int | None) -> list[TraceRequest]:
    """The requests of a file, or of a generator named `gen:…`."""
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"--requests must be at least 1, not {num_requests}")
    if trace.startswith("gen:"):
        return generate(trace.removeprefix("gen:"), num_requests or 200)
    return read_trace(Path(trace))[:num_requests]


def combinations(options: dict[str, Any]) -> list[EngineOptions]:
    """The engines that lists of policies ask for. Raises `ValueError`."""
    known = {each.name for each in fields(EngineOptions)} - LEFT_OUT
    chosen = {name: options[name] for name in known}
    lists = [str(chosen[name]).split(",") for name in POLICIES]
    return [
        EngineOptions(**chosen | dict(zip(POLICIES, values, strict=True)))
        for values in product(*lists)
    ]


# %% export="command_simulate.py"
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


# %% export="command_simulate.py"
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
) -> Iterator[tuple[Outcome, list[Served]]]:
    """Replay the traffic through every engine at every capacity."""
    with progress_bar("requests", len(traffic) * len(engines) * len(sizes)) as advance:
        for options, size in product(engines, sizes):
            replay = Replay(traffic, options, size, cost)
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
    ttft = " ".join(f"{quantity(times[p], 's'):>9}" for p in times)
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


# %% export="command_simulate.py"
@with_options(LEFT_OUT, page_size=None)
def simulate(
    trace: Annotated[
        str, typer.Argument(help="A JSONL file, or gen:NAME-SEED; see below.")
    ],
    capacity: Annotated[
        str, typer.Option(help="Tokens of K/V memory, a list; 0: as many as needed.")
    ] = "0",
    cost: Annotated[
        str, typer.Option(help="A file of bench calibrate, or a built-in machine.")
    ] = "70b-8xh100",
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="No clock: the reuse curve of LRU.")
    ] = False,
    capacities: Annotated[
        str, typer.Option(help="Cache sizes of that curve, in tokens; 0: unbounded.")
    ] = "16K,64K,256K,1M,4M,16M,0",
    requests: Annotated[
        int | None, typer.Option(help="Only the first so many; generated ones: 200.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the traffic to a trace file as well.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw hit rates and TTFT against memory.")
    ] = None,
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
    for place in (write, svg):
        check_file(place)
    sizes, model = sizes_of(capacities if cache_only else capacity), read_cost(cost)
    traffic = load_traffic(trace, requests)
    if options["page_size"] is None:
        options["page_size"] = page_of(traffic)
    engines = combinations(options)
    page = engines[0].page_size
    if any(0 < size < page for size in sizes):
        raise ValueError(f"a capacity of {min(filter(None, sizes))} tokens is no page")
    if write:
        write.write_text("".join(f"{to_line(r)}\n" for r in traffic), "utf-8")
    if cache_only:
        shown = tell_curve(traffic, sizes, page, as_json)
    else:
        outcomes = run_all(traffic, engines, sizes, model)
        single = len(engines) * len(sizes) == 1
        shown = panels_of(tell_replays(outcomes, single, as_json))
    if svg:
        svg.write_text(draw_curves(*shown).svg(), "utf-8")


def page_of(traffic: list[TraceRequest]) -> int:
    """A trace of named blocks has pages of their size."""
    return traffic[0].block if traffic[0].block > 1 else EngineOptions.page_size


def check_file(path: Path | None) -> None:
    """Raise `ValueError` if a file cannot be written there."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{path} is a folder, or in none that is there")


# %% export="command_simulate.py"
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
    check_place(record)
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
