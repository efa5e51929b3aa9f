# Exported from chapters/15_measuring.py (cc4c8a3d): edit the chapter.
"""`minivllm bench serve`: an open-loop load on any server that speaks OpenAI's API."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from minivllm.bench import Measurement, Trial, compare, measure, percentile, read_lines
from minivllm.drawing import Picture, draw_rows
from minivllm.options import check_choice

if TYPE_CHECKING:
    import httpx2


class ServerFault(Exception):
    """The server answered, and not with what was asked."""


@dataclass(frozen=True)
class Call:
    """What is asked, and when it is due, in seconds since the load began."""

    due_s: float
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Reply:
    """What became of a call: times in seconds since the load began, and counts.

    `pieces_s`: when each piece of text came. Counts are the server's; None if it gives
    none. `fault` says what went wrong, or nothing.
    """

    due_s: float
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    streamed: bool = True
    finished: bool = False
    fault: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From the moment when the call was due, whenever it was sent."""
        if self.fault or not self.streamed or not self.pieces_s:
            return None
        return self.pieces_s[0] - self.due_s


Now = Callable[[], float]
Ask = Callable[[Call, Reply, Now], Awaitable[None]]  # fills in the reply


async def send_all(
    calls: Sequence[Call], ask: Ask, timeout_s: float = 600.0
) -> list[Reply]:
    """Send every call when it is due, whatever has become of the others."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    def now() -> float:
        return loop.time() - start_s

    async def send(call: Call) -> Reply:
        await asyncio.sleep(max(0.0, call.due_s - now()))
        reply = Reply(call.due_s, sent_s=now())
        try:
            async with asyncio.timeout(timeout_s):
                await ask(call, reply, now)
        except TimeoutError:
            reply.fault = f"no end after {timeout_s:g} s"
        except Exception as error:
            reply.fault = name_fault(error)
        reply.done_s = reply.done_s or now()
        return reply

    return await asyncio.gather(*map(send, calls))


def name_fault(error: Exception) -> str:
    """What to count a failure as: one line without what differs from call to call."""
    if isinstance(error, ServerFault):
        return str(error)
    if isinstance(error, ValueError | KeyError | TypeError | AttributeError):
        return "malformed answer"
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if "ConnectError" in kinds:
        return "cannot connect"
    if "RemoteProtocolError" in kinds or "ReadError" in kinds:
        return "connection dropped"
    return f"{kinds[0]}: {error}"


ARRIVAL_TIMES = ("poisson", "burst", "trace")


def due_times(kind: str, number: int, rate: float, rng: Random) -> list[float]:
    """When so many calls are due: at random, `rate` a second on average, or at once."""
    gaps = [rng.expovariate(rate) if kind == "poisson" else 0.0 for _ in range(number)]
    return list(accumulate(gaps))


@dataclass(frozen=True)
class Mix:
    """Prompts of random words: the first part is shared, the rest is a call's own."""

    shared_words: int = 200
    own_words: int = 20
    chat: bool = False

    def body(self, seed: int, number: int, index: int) -> dict[str, Any]:
        """The call with this index in the round with this number."""
        words = _words(Random(f"{seed}"), self.shared_words)
        words += _words(Random(f"{seed} {number} {index}"), self.own_words)
        text = " ".join(words)
        if self.chat:
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}


def _words(rng: Random, number: int) -> list[str]:
    syllables = ("ba", "do", "ki", "lu", "me", "no", "ra", "si", "te", "vu")
    return ["".join(rng.choices(syllables, k=2)) for _ in range(number)]


def salted(body: Mapping[str, Any], number: int, seed: int) -> dict[str, Any]:
    """What a call of a file says, beginning in another way in each round.

    A word is put before a text. Of token ids the first goes to the end, one more in
    each round: any other might not be in the vocabulary.
    """
    word, prompt = f"{number}.{seed}:", body.get("prompt")
    if isinstance(prompt, str):
        return {**body, "prompt": f"{word} {prompt}"}
    if prompt:
        turn = number % len(prompt)
        return {**body, "prompt": [*prompt[turn:], *prompt[:turn]]}
    first, *others = body["messages"]
    said = first.get("content") or ""
    parts = isinstance(said, list)
    said = [{"type": "text", "text": word}, *said] if parts else f"{word} {said}"
    return {**body, "messages": [{**first, "content": said}, *others]}


def read_calls(path: Path) -> list[Call]:
    """A call for each line of a JSONL file. `ValueError` names the file and the line.

    A line has `prompt`, `prompt_token_ids` or `messages`, and perhaps `max_tokens` (or
    `output_length`) and `timestamp`, in milliseconds.
    """
    calls = read_lines(path, _read_call).values()
    return sorted(calls, key=lambda call: call.due_s)


def _read_call(line: Mapping[str, Any]) -> Call:
    prompt = line.get("prompt", line.get("prompt_token_ids"))
    given = {"messages": line.get("messages"), "prompt": prompt}
    body = {name: value for name, value in given.items() if value}
    if len(body) != 1:
        raise ValueError("a call has either a prompt or messages")
    ((name, said),) = body.items()
    each = dict if name == "messages" else int
    listed = isinstance(said, list) and all(type(x) is each for x in said)
    if not listed and not (name == "prompt" and isinstance(said, str)):
        raise ValueError(
            "a prompt is text or token ids, messages are a list of objects"
        )
    if (length := line.get("max_tokens", line.get("output_length"))) is not None:
        if type(length) is not int or length < 1:
            raise ValueError(f"max_tokens must be a whole number >= 1, not {length!r}")
        body["max_tokens"] = length
    moment = line.get("timestamp", 0)
    if type(moment) not in (int, float) or not 0 <= moment < 1e15:
        raise ValueError(f"timestamp must be milliseconds >= 0, not {moment!r}")
    return Call(moment / 1000, body)


@dataclass(frozen=True)
class LoadPlan:
    """What each round sends. `ValueError` for what cannot be sent."""

    arrivals: str = "poisson"
    rate: float = 2.0
    num_calls: int = 50
    mix: Mix = Mix()
    fixed: Sequence[Call] = ()  # of a file
    seed: int = 0
    same: bool = False  # send what is fixed as it is, in every round

    def __post_init__(self) -> None:
        check_choice("arrivals", self.arrivals, ARRIVAL_TIMES)
        if self.arrivals == "trace" and not self.fixed:
            raise ValueError("--arrivals trace takes its moments from --prompts FILE")
        if self.num_calls < 1 or not self.rate > 0:
            raise ValueError("--requests and --rate must be above 0")

    def calls(self, number: int) -> list[Call]:
        """The calls of the round with this number, the same for all servers."""
        size = len(self.fixed) or self.num_calls
        bodies = [call.body for call in self.fixed]
        if not self.same:
            bodies = [salted(body, number, self.seed) for body in bodies]
        bodies = bodies or [self.mix.body(self.seed, number, i) for i in range(size)]
        if self.arrivals == "trace":
            moments = [call.due_s for call in self.fixed]
        else:
            rng = Random(f"{self.seed} {number}")
            moments = due_times(self.arrivals, size, self.rate, rng)
        return [Call(*pair) for pair in zip(moments, bodies, strict=True)]


class EventReader:
    """The data of server-sent events, from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, some: bytes) -> Iterator[str]:
        """Take bytes; the data of each event that they complete."""
        *lines, self._rest = LINE_END.split(self._rest + some)
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf-8"))
            elif not line and self._data:  # comments and other fields are nothing
                yield "\n".join(self._data)
                self._data.clear()


LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")  # the last \r may be half of a \r\n


def take_chunk(data: str, reply: Reply, now: Now) -> None:
    """Enter one chunk of a stream. Raises `ServerFault` for an error event."""
    chunk = json.loads(data)
    _raise_error(chunk)
    for choice in chunk.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        if part.get("text") or part.get("content") or part.get("reasoning_content"):
            reply.pieces_s.append(now())
        reply.finished |= bool(choice.get("finish_reason"))
    if usage := chunk.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        reply.prompt_tokens = usage.get("prompt_tokens")
        reply.cached_tokens = details.get("cached_tokens")
        reply.output_tokens = usage.get("completion_tokens")


def _raise_error(answer: Mapping[str, Any], status: str = "error event") -> None:
    if error := answer.get("error"):
        message = error.get("message") if isinstance(error, Mapping) else error
        raise ServerFault(f"{status}: {message}")


@dataclass(frozen=True)
class Server:
    """An address that ends in /v1, a model's name there, and what every call adds."""

    url: str
    model: str = ""
    api_key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> "httpx2.AsyncClient":
        """A client without limits: who is due is sent."""
        http = import_httpx()
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = http.Limits(max_connections=None, max_keepalive_connections=None)
        client: httpx2.AsyncClient = http.AsyncClient(
            headers=headers, limits=limits, timeout=None
        )
        return client

    async def ask(
        self, client: "httpx2.AsyncClient", call: Call, reply: Reply, now: Now
    ) -> None:
        """Send one call and take its answer, as a stream or as a whole."""
        path = "/chat/completions" if "messages" in call.body else "/completions"
        body = {"model": self.model, "stream": True, **self.extra, **call.body}
        body["stream_options"] = {"include_usage": True}
        async with client.stream("POST", self.url + path, json=body) as answer:
            if answer.status_code != 200:
                raise ServerFault(_refusal(answer.status_code, await answer.aread()))
            kind = answer.headers.get("content-type", "")
            reply.streamed = kind.startswith("text/event-stream")
            if not reply.streamed:
                take_chunk((await answer.aread()).decode("utf-8"), reply, now)
                return
            reader = EventReader()
            async for some in answer.aiter_bytes():
                for data in reader.feed(some):
                    if data != "[DONE]":
                        take_chunk(data, reply, now)
                    elif not reply.done_s:  # read on: the connection is used again
                        reply.done_s, reply.finished = now(), True
        if not reply.finished:
            raise ServerFault("the stream ended without its end")


def _refusal(status: int, content: bytes) -> str:
    try:
        _raise_error(json.loads(content), f"HTTP {status}")
    except (ValueError, AttributeError):  # no JSON, or not an object
        pass
    except ServerFault as fault:
        return str(fault)
    return f"HTTP {status}"


def import_httpx() -> Any:
    """The HTTP client, an extra. `ValueError` says how to get it."""
    try:
        import httpx2
    except ImportError:
        raise ValueError(
            "bench serve needs httpx2: pip install 'minivllm[bench]'"
        ) from None
    return httpx2


def read_url(given: str) -> str:
    """An address as a server's API has it. `ValueError` for what is none."""
    url = given.rstrip("/")
    if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", url):
        raise ValueError(f"{given!r} is not an address such as http://localhost:8000")
    return url if url.endswith("/v1") else f"{url}/v1"


def find_server(url: str, model: str = "", api_key: str = "", **extra: Any) -> Server:
    """A server that answers; without a name its first model. Else `ValueError`."""
    server = Server(read_url(url), model, api_key, extra)
    return asyncio.run(_find_server(server))


async def _find_server(server: Server) -> Server:
    async with server.open() as client:
        try:
            async with asyncio.timeout(10):
                answer = await client.get(f"{server.url}/models")
            listed = answer.json()["data"] if answer.status_code == 200 else []
            names = [each["id"] for each in listed]
        except (TimeoutError, import_httpx().TransportError):
            raise ValueError(f"nobody answers at {server.url}") from None
        except (ValueError, LookupError, TypeError):
            names = []
    model = server.model or next(iter(names), "")
    if not model:
        raise ValueError(f"{server.url} does not list its models: give --model")
    return Server(server.url, model, server.api_key, server.extra)


def check_server(server: Server, call: Call) -> None:
    """Send a call of the same kind and wait for it. Raises `ValueError` if it fails.

    It says next to nothing, so that no call of the load finds its prompt known.
    """
    prompt = call.body.get("prompt", "")
    body: dict[str, Any] = {"prompt": prompt[-1:], "max_tokens": 1}
    if "messages" in call.body:
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    (reply,) = load_server(server, [Call(0.0, body)], 60.0)
    if reply.fault:
        raise ValueError(f"{server.url}, model {server.model}: {reply.fault}")


def load_server(server: Server, calls: Sequence[Call], timeout_s: float) -> list[Reply]:
    """Send calls over HTTP, each when it is due."""

    async def run() -> list[Reply]:
        async with server.open() as client:

            async def ask(call: Call, reply: Reply, now: Now) -> None:
                await server.ask(client, call, reply, now)

            return await send_all(calls, ask, timeout_s)

    return asyncio.run(run())


def figures(replies: Sequence[Reply]) -> dict[str, float]:
    """What one round says, by name; what nobody told is left out."""
    good = [reply for reply in replies if not reply.fault]
    told = {"failed": float(len(replies) - len(good))}
    times: dict[str, list[float]] = {
        "ttft_s": [r.ttft_s for r in good if r.ttft_s is not None],
        "itl_s": [b - a for r in good for a, b in pairwise(r.pieces_s)],
        "e2e_s": [r.done_s - r.due_s for r in good],
        "lag_s": [r.sent_s - r.due_s for r in replies],
    }
    told |= {
        f"{name} p{round(100 * share)}": percentile(values, share)
        for name, values in times.items()
        for share in (0.5, 0.9, 0.99)
        if values
    }
    if good:
        makespan_s = max(r.done_s for r in good) - min(r.due_s for r in good)
        told["requests/s"] = len(good) / makespan_s
        told |= _token_figures(good, makespan_s)
    return told


def _token_figures(good: Sequence[Reply], makespan_s: float) -> Iterator[Any]:
    for name, rate in (("prompt", ""), ("cached", ""), ("output", "output tokens/s")):
        counts = [getattr(reply, f"{name}_tokens") for reply in good]
        if None not in counts:
            yield f"{name} tokens", float(sum(counts))
            if rate:
                yield rate, sum(counts) / makespan_s


@dataclass(frozen=True)
class ServeRow:
    """One figure of one server over the rounds; its ratio is to the first server's.

    None if a call of either failed: the figures are of those that did not.
    """

    server: str
    figure: str
    median: float
    low: float
    high: float
    values: Sequence[float]
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


Rounds = dict[str, list[list[Reply]]]  # of each server


def run_rounds(
    loads: Mapping[str, Callable[[int], list[Reply]]], repeats: int, warmups: int
) -> tuple[Rounds, Rounds]:
    """Load all servers in turn, every other round in reverse; warm-ups by themselves.

    A load is called with the number of the round.
    """
    rounds: Rounds = {name: [] for name in loads}

    def work(name: str) -> float:
        rounds[name].append(loads[name](len(rounds[name])))
        return sum(not reply.fault for reply in rounds[name][-1])

    trials = {name: Trial(partial(work, name)) for name in loads}
    measure(trials, repeats, warmups)
    first = {name: each[:warmups] for name, each in rounds.items()}
    return {name: each[warmups:] for name, each in rounds.items()}, first


def count_faults(rounds: Sequence[Sequence[Reply]]) -> dict[str, int]:
    """How many calls failed, by what went wrong."""
    every = [reply.fault for each in rounds for reply in each if reply.fault]
    return dict(Counter(every).most_common())


def make_serve_rows(rounds: Rounds) -> list[ServeRow]:
    """A row for each figure that every round of a server has."""
    told = {name: [figures(each) for each in rounds[name]] for name in rounds}
    first, rows = next(iter(rounds)), []
    whole = {name: not count_faults(each) for name, each in rounds.items()}
    for figure in dict.fromkeys(f for each in told.values() for t in each for f in t):
        for name, each in told.items():
            if all(figure in t for t in each):
                own = Measurement(tuple(t[figure] for t in each))
                fair = whole[name] and whole[first]
                base = [t.get(figure, 0.0) if fair else 0.0 for t in told[first]]
                rows.append(_serve_row(name, figure, own, base))
    return rows


def _serve_row(
    name: str, figure: str, own: Measurement, base: Sequence[float]
) -> ServeRow:
    plain = ServeRow(name, figure, own.median, own.low, own.high, own.values)
    if not all(base):  # 0, not told in every round, or not comparable
        return plain
    pairs = compare(own, Measurement(tuple(base)))
    return ServeRow(
        *(name, figure, own.median, own.low, own.high, own.values),
        *(pairs.median, pairs.low, pairs.high),
    )


def draw_serve_rows(rows: Sequence[ServeRow]) -> Picture:
    """Times until the first token and the end; the coloured part is the spread."""
    colours = dict(zip(dict.fromkeys(r.server for r in rows), STATES, strict=False))
    shown = [r for r in rows if r.figure.startswith(("ttft_s", "e2e_s"))]
    return draw_rows(
        [
            (
                f"{row.figure}, {row.server}: {row.median:.3g} s",
                [
                    (0.0, row.low, "plain", ""),
                    (row.low, row.high - row.low, colours[row.server], ""),
                ],
            )
            for row in shown
        ],
        caption="Seconds since a call was due: up to the best round, and the spread.",
    )


STATES = ("published", "pinned")
