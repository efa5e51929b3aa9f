# Exported from chapters/16_traffic.py (d4a9f3e3): edit the chapter.
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
