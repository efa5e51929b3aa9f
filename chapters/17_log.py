# %% [markdown]
# # 17. What breaks reuse in my log?
#
# A bicycle shop has an assistant. Every request brings the same house rules, the same four tools,
# and a customer's question. The shop has written down two hours of requests, one JSON object on a
# line. Here is what the prefix cache of our engine makes of them. (The log is made by a seed.
# What reads it and plays it is borrowed from the package until it is built below.)

# %% tags=["hide-input"]
import json
import random
from array import array
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

from minivllm.command_explain import load_parts, read_log
from minivllm.lint import Asked, CacheOnly, Encoder

PAGE = 16
TOPICS = ("prices", "returns", "repairs", "delivery", "old parts")
HOUSE_RULES = " ".join(
    f"Rule {number}: be {manner} when a customer asks about {topic}, and cite the page of the handbook."
    for number, (manner, topic) in enumerate(
        [(m, t) for m in ("brief", "polite", "exact", "calm") for t in TOPICS], 1
    )
)
TOOLS = [
    {
        "name": name,
        "description": f"Looks up the {name} of an order in the shop's own list.",
        "parameters": {"order": "integer", "limit": "integer"},
    }
    for name in ("stock", "price", "address", "refund")
]
NAMES = ("Anna", "Boris", "Chen", "Dilara", "Emil")


def shop_request(rng: random.Random, minute: int) -> dict:
    clock = f"{9 + minute // 60:02}:{minute % 60:02}:{rng.randrange(60):02}"
    system = f"You are the assistant of a bicycle shop. It is 2026-11-30 {clock} now. {HOUSE_RULES}"
    user = (
        f"Trace {rng.getrandbits(64):016x} of the shop.\nThe customer is called {rng.choice(NAMES)}. "
        "Answer in two sentences, in the customer's language, and promise no date that is not in the "
        f"list.\nWhere is order {rng.randrange(10**5)}?"
    )
    tools = list(TOOLS)
    if rng.random() < 0.15:
        rng.shuffle(tools)
    said = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": said, "tools": tools}


log = Path(mkdtemp()) / "log.jsonl"
rng = random.Random(17)
log.write_text(
    "".join(json.dumps(shop_request(rng, i)) + "\n" for i in range(120)), "utf-8"
)
encode = Encoder(lambda: load_parts("smollm2"))
prompts = [encode(line.number, line.bodies[0]) for line in read_log(log)]

# %% name="opening"
cache = CacheOnly("radix", PAGE, capacity=2**20)
found = [cache.play(prompt.ids) for prompt in prompts]
total = sum(len(prompt.ids) for prompt in prompts)
print(f"{len(prompts)} requests, {total:,} prompt tokens")
print(f"reused: {cache.reused / total:.1%}")

same = [
    sum((Counter(one.text.split()) & Counter(other.text.split())).values())
    for one, other in pairwise(prompts)
]
words = sum(len(prompt.text.split()) for prompt in prompts[1:])
print(f"words that the request before had too: {sum(same) / words:.1%}")

# %% [markdown]
# Of all words [99.2%](#opening) stood in the request before. Of all tokens [24.5%](#opening) were
# reused. The memory has room for everything, nothing was evicted, nobody waited, and each request
# had ended before the next one came. Three quarters of the work was done before, word for word,
# and was done again. Why?
#
# ## The token tells nothing
#
# [Chapter 13](13_explain.md) taught the first question: are the token ids equal? So look at the
# token at which a request leaves the one before it.

# %% name="tokens"
from minivllm.radix import shared_pages


def parting(one: Asked, other: Asked) -> int:
    """The first token in which two prompts differ."""
    return shared_pages(one.ids.tobytes(), other.ids.tobytes(), 4)


places = Counter()
for one, other in pairwise(prompts):
    at = parting(one, other)
    text = (each.text[each.char(at) : each.char(at + 1)] for each in (one, other))
    places[at, *text] += 1
print(f"{len(places)} different partings of {len(prompts) - 1}; the most frequent:")
for (at, one, other), times in places.most_common(4):
    print(f"  {times} times at token {at}, {one!r} and {other!r}")

# %% [markdown]
# A digit here, a digit there, in [27](#tokens) variants, of which the most frequent explains
# [11](#tokens) requests of 119. A clock moves through its digits, and this tokenizer gives each
# digit a token of its own, so one cause falls apart into many symptoms. A list of tokens has no
# first line that one could act on.
#
# Nor does it show what a digit *costs*. The misconception is that a small difference costs
# little. A prefix cache gives back what stands before the first difference and nothing of what
# stands behind it ([chapter 2](02_hashing.md) showed why: a name stands for a whole past). The
# cost of a difference is not its size. It is the length of whatever follows it, up to the next
# difference, and would have been the same again.
#
# Nobody repairs a token. People repair the line of a program that put the clock there. That line
# has written a *field* of a request: the content of message 0, the third tool. So the question is
# which field changes, in how many requests, and what follows it that does not change.
#
# ## A request is a tree, a prompt is a string
#
# Logs come in the formats that people have. OpenAI's chat bodies, alone or wrapped by a batch
# file or a proxy. ShareGPT's conversations, in which one record is a request for each question.
# Prompts as text, or in JSON, or as token ids. All become bodies of one kind, and a line that
# cannot be read is told with its number and does not end the reading.

# %% export="request_log.py" tags=["hide-input"]
"""Logs of requests, in the formats that people have, as bodies of OpenAI's API."""
import json
from collections.abc import Iterator
from typing import Any

from minivllm.workloads import LineReader

Body = dict[str, Any]  # messages and perhaps tools, or a prompt, as text or token ids
FORMATS = "messages, conversations, prompt, text, prompt_token_ids or hash_ids"
SPEAKERS = {"human": "user", "user": "user", "system": "system", "tool": "tool"}


def bodies_of(value: Any, traces: LineReader) -> list[Body]:
    """The requests in one JSON value. `ValueError` if there is none that we know."""
    if isinstance(value, str):
        return [{"prompt": value}]
    if isinstance(value, list) and value:
        if all(type(each) is int for each in value):
            return [{"prompt_token_ids": value}]
        if all(isinstance(each, dict) and "role" in each for each in value):
            return [{"messages": value}]
        return [body for each in value for body in bodies_of(each, traces)]
    if isinstance(value, dict):
        for wrapper in ("body", "request"):  # batch files, and logs of a proxy
            if isinstance(value.get(wrapper), dict):
                return bodies_of(value[wrapper], traces)
        if found := _requests_in(value, traces):
            return found
    raise ValueError(f"none of {FORMATS}: {json.dumps(value)[:40]}")


def _requests_in(value: Body, traces: LineReader) -> list[Body]:
    if isinstance(turns := value.get("conversations"), list):
        return list(_turns(turns))
    if isinstance(value.get("messages"), list) and value["messages"]:
        return [value]
    if "hash_ids" in value:
        request = traces.read(value, "")
        return [{"prompt_token_ids": request.token_ids().tolist()}]
    prompt = value.get("prompt", value.get("prompt_token_ids", value.get("text")))
    if isinstance(prompt, str):
        value["prompt"] = prompt
        return [value]
    ids = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    if prompt and ids:
        return [value | {"prompt_token_ids": prompt}]
    return []


def _turns(turns: list[Any]) -> Iterator[Body]:
    """ShareGPT keeps a conversation in one record: a request for each question."""
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError("a turn of conversations has from and value")
        role = SPEAKERS.get(str(turn.get("from")), "assistant")
        messages.append({"role": role, "content": turn["value"]})
        if role == "user":
            yield {"messages": [dict(message) for message in messages]}


# %% export="request_log.py" tags=["hide-input"]
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.workloads import LineReader


@dataclass
class Line:
    """A line of a log, the requests in it, or what is wrong with it."""

    number: int
    raw: bytes
    value: Any = None
    bodies: list[Body] = field(default_factory=list)
    fault: str = ""

    def written(self) -> Iterator[str]:
        """The line again, with whatever was changed in its bodies."""
        parts = [self.value]
        if isinstance(self.value, dict):
            parts += [self.value.get("body"), self.value.get("request")]
        if all(any(body is part for part in parts) for body in self.bodies):
            yield json.dumps(self.value, ensure_ascii=False)
        else:  # it had another format, or several requests
            yield from (json.dumps(body, ensure_ascii=False) for body in self.bodies)


def read_log(path: Path) -> Iterator[Line]:
    """The lines of a log, one at a time; a bad one has a `fault` and no bodies.

    A file whose first line is no JSON has a prompt on each line. A file that is one
    JSON value over several lines, a list or a request, is read whole.
    """
    traces, plain = LineReader(), None
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            line = Line(number, raw)
            try:
                text = raw.decode("utf-8-sig").strip()
                if "\0" in text:
                    raise ValueError("this is not text")
                if plain is None and text in ("[", "{"):
                    plain = False
                    yield from _whole(path, traces)
                    return
                line.value = text if plain else _value(text, plain is None)
                plain = line.value is text if plain is None else plain
                line.bodies = bodies_of(line.value, traces)
            except UnicodeDecodeError:
                line.fault = "this is not text in UTF-8"
            except json.JSONDecodeError as error:
                plain, line.fault = False, f"this is not JSON: {error}"
            except (ValueError, TypeError, RecursionError) as error:
                line.fault = str(error)
            yield line


def _value(text: str, may_be_plain: bool) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        if may_be_plain and text[:1] not in ("{", "["):
            return text
        raise
    other = isinstance(value, str | list | dict) or not may_be_plain
    return value if other else text


def _whole(path: Path, traces: LineReader) -> Iterator[Line]:
    whole = json.loads(path.read_text("utf-8-sig"))
    values = whole if isinstance(whole, list) else [whole]
    for number, value in enumerate(values, 1):
        raw = json.dumps(value, ensure_ascii=False).encode()
        try:
            yield Line(number, raw, value, bodies_of(value, traces))
        except (ValueError, TypeError) as error:
            yield Line(number, raw, fault=str(error))


# %% [markdown]
# The body is a tree with named leaves. The prompt is one string, made by a template that may be
# any program ([chapter 14](14_llm.md)). To get from a token back to a name we note, for each text
# that the request brought, where it stands in the prompt.

# %% export="lint.py"
"""Which fields of a log's requests keep a prefix cache from finding more."""
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from minivllm.request_log import Body


class Span(NamedTuple):
    """Where a field of a request stands in its prompt, in characters."""

    start: int
    end: int
    path: str


def fields_of(body: Body) -> Iterator[tuple[str, str]]:
    """Paths and texts of whatever a request brings."""
    for i, tool in enumerate(body.get("tools") or ()):
        yield f"tools[{i}]", json.dumps(tool, ensure_ascii=False)
    for i, message in enumerate(body.get("messages") or ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield f"messages[{i}].content", content
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield f"messages[{i}].content[{j}].text", part["text"]
    if isinstance(body.get("prompt"), str):
        yield "prompt", body["prompt"]


def find_spans(body: Body, text: str) -> list[Span]:
    """Where the fields stand in a prompt. A template may change some: those are not."""
    spans, at = [], 0
    for path, said in fields_of(body):
        said = said if said in text else said.strip()
        start = text.find(said, at if path.startswith("messages") else 0)
        if said and start >= 0:
            spans.append(Span(start, start + len(said), path))
            at = spans[-1].end if path.startswith("messages") else at
    return sorted(spans)


# %% [markdown]
# What a template rewrites is not found, and then the place is called *template*: better no name
# than a wrong one. A tokenizer says at which character each of its tokens begins. With that a
# token has a field.

# %% export="lint.py"
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.request import ExtraKey
from minivllm.request_log import Body


def key_of(body: Body) -> ExtraKey:
    """What keeps a request apart from others, whatever their tokens."""
    return body.get("cache_salt", body.get("extra_key"))


@dataclass(frozen=True, eq=False)
class Asked:
    """A request as the engine gets it, and where each token comes from."""

    number: int  # of its line
    ids: "array[int]"
    body: Body = field(default_factory=dict)
    text: str = ""
    starts: "array[int]" = field(default_factory=lambda: array("i"))  # of each token
    spans: Sequence[Span] = ()

    @property
    def key(self) -> ExtraKey:
        """What keeps requests apart whatever their tokens."""
        return key_of(self.body)

    def place(self, position: int) -> tuple[str, int]:
        """The field of a token, and how far in it that is, in characters."""
        if not self.text:
            return "prompt_token_ids", position
        at = self.char(position)
        for span in self.spans:
            if span.start <= at < span.end:
                return span.path, at - span.start
        return "template", at

    def char(self, position: int) -> int:
        """Where a token begins in the text."""
        return self.starts[position] if position < len(self.ids) else len(self.text)

    def said(self) -> "array[int]":
        """The ids up to the end of the last field: what a template adds is no news."""
        if not self.spans:
            return self.ids
        last = max(span.end for span in self.spans)
        return self.ids[: bisect_left(self.starts, last)]


# %% export="lint.py" tags=["hide-input"]
import json
from array import array
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from minivllm.request import check_extra_key, encode_ids
from minivllm.request_log import Body


class Missing(ValueError):
    """There is no tokenizer, or no template: no line of text can be read."""


class Encoder:
    """Makes prompts of the bodies of requests: with a model's tokenizer and template.

    `load` gives both, and is called when the first text comes.
    """

    def __init__(self, load: Callable[[], tuple[Any, Any]]) -> None:
        self._load = load

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """The tokenizer and the chat template. Raises `Missing`."""
        try:
            tokenizer, template = self._load()
        except ValueError as error:
            raise Missing(str(error)) from None
        if tokenizer is None:
            raise Missing("this model has no tokenizer: it cannot read text")
        return tokenizer, template

    def __call__(self, number: int, body: Body) -> Asked:
        """One prompt. `ValueError` for what the engine would refuse."""
        check_extra_key(key_of(body))
        if "prompt_token_ids" in body:
            ids = encode_ids(body["prompt_token_ids"])
            if not ids or min(ids) < 0:
                raise ValueError("token ids must be whole numbers from 0 on")
            return Asked(number, ids, body)
        text, chat = self._text(body), "messages" in body
        encoded = self.parts[0].encode(text, add_special_tokens=not chat)
        starts = array("i", [start for start, _ in encoded.offsets])
        if not encoded.ids:
            raise ValueError("the prompt is empty")
        ids, spans = array("i", encoded.ids), find_spans(body, text)
        return Asked(number, ids, body, text, starts, spans)

    def _text(self, body: Body) -> str:
        if "messages" not in body:
            return str(body["prompt"])
        _, template = self.parts
        if template is None:
            raise Missing("this model has no chat template: it cannot read messages")
        messages, tools = body["messages"], body.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise ValueError("tools must be a list")
        last = messages[-1]
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            messages = messages[:-1]  # the answer, as logs for fine-tuning have it
        if "tools" in template.source:
            return str(template.render(messages, tools=tools))
        dumped = [json.dumps(tool, ensure_ascii=False) for tool in tools or ()]
        return "\n".join([*dumped, template.render(messages)])


# %% name="fields"
for at in (60, parting(prompts[0], prompts[1]), 700):
    path, offset = prompts[0].place(at)
    before = prompts[0].text[prompts[0].char(at - 8) : prompts[0].char(at)]
    print(f"token {at}: {path}, character {offset}, after {before!r}")

# %% [markdown]
# The prompts of the first two requests part at token [199](#fields), and now that is a place: in
# the system message, behind [62](#fields) characters, in a clock. (The template of this model has
# no variable for tools, and our `LLM` sends none. The `Encoder` puts them in front, as many templates
# do; what this chapter says of tools holds for that order.)
#
# ## Whom to compare with
#
# A request is explained by another one that should have helped it. [Chapter 13](13_explain.md)
# took the one that it follows longest. With a clock near the front this is the wrong one: it is
# whoever was asked in the same minute, by chance, and perhaps by another program. Two products
# use one server here, and each begins with the time:

# %% name="nearest"
from minivllm.lint import Recent


def of_product(number: int, clock: str, rules: str) -> Asked:
    return encode(number, {"prompt": f"It is {clock} now. {rules}"})


recent, past = Recent(num_tokens=10_000), []
for number, (clock, rules) in enumerate(
    [("09:41:07", HOUSE_RULES), ("09:52:30", HOUSE_RULES.upper())], 1
):
    past.append(of_product(number, clock, rules))
    recent.nearest(past[-1])
asked = of_product(3, "09:52:31", HOUSE_RULES)
longest = max(past, key=lambda old: parting(old, asked))
nearest = recent.nearest(asked)
print(f"follows longest: {longest.number}, for {parting(longest, asked)} tokens")
print(f"resembles most:  {nearest.number}, though only for {parting(nearest, asked)}")

# %% [markdown]
# Request [1](#nearest) has the same rules, and request [2](#nearest) the same minute. What we
# want is one that has much in common *wherever it stands*. `Recent` takes runs of eight
# tokens, keeps about a fourth of them, chosen by a checksum, and remembers who had each last. The
# runs of a new request vote, each for its last holder: of requests with the same text the latest
# tends to win. If nobody shares a run, the request before is taken. The search is linear in the length
# of the request, and the memory is bounded: so many tokens of prompts, the oldest go.

# %% export="lint.py" tags=["hide-input"]
from collections import Counter, OrderedDict
from zlib import crc32

from minivllm.explain import GRAM


class Recent:
    """The last requests, found by what they contain, wherever it stands.

    Remembers so many tokens of prompts, and a fourth of their grams.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.size = num_tokens, 0
        self._asked: OrderedDict[int, tuple[Asked, list[bytes]]] = OrderedDict()
        self._holders: dict[bytes, int] = {}  # a gram -> the last that had it
        self._count = 0

    def nearest(self, asked: Asked) -> Asked | None:
        """A request that shares much with this one, or the last; `asked` is kept."""
        data = asked.ids.tobytes()
        every = (data[i : i + 4 * GRAM] for i in range(0, len(data) - 4 * GRAM + 1, 4))
        grams = [gram for gram in every if crc32(gram) % 4 == 0]
        votes = Counter(self._holders[g] for g in grams if g in self._holders)
        last = next(reversed(self._asked), None)
        best = max(votes, key=lambda n: (votes[n], n)) if votes else last
        near = None if best is None else self._asked[best][0]
        self._remember(asked, grams)
        return near

    def _remember(self, asked: Asked, grams: list[bytes]) -> None:
        self._count += 1
        self._asked[self._count] = asked, grams
        self._holders.update(dict.fromkeys(grams, self._count))
        self.size += len(asked.ids)
        while self.size > self.num_tokens and len(self._asked) > 1:
            number, (old, its_grams) = self._asked.popitem(last=False)
            self.size -= len(old.ids)
            for gram in its_grams:
                if self._holders.get(gram) == number:
                    del self._holders[gram]


# %% [markdown]
# ## Where two prompts meet again
#
# Two prompts part; if they go on alike further on, the difference is a hole in something stable,
# and it can be repaired. If they never meet again, it is a new question, and no fault. So after
# each parting we look for the nearest pair of places from which eight tokens agree.

# %% export="lint.py"
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from minivllm.explain import GRAM
from minivllm.radix import shared_pages

MOST_GAPS = 32


class Gap(NamedTuple):
    """A difference of two prompts: both from where they part to where they meet."""

    here: int
    here_end: int
    there: int
    there_end: int
    alike: int  # tokens that agree from there on


def find_gaps(here: "array[int]", there: "array[int]") -> list[Gap]:
    """Differences, the first one first, at most 32; the last may have no end.

    Empty if one prompt begins with the other.
    """
    one, other = here.tobytes(), there.tobytes()
    i = j = shared_pages(one, other, 4)
    gaps: list[Gap] = []
    known = gram_places(other, j) if i < len(here) and j < len(there) else {}
    while i < len(here) and j < len(there) and len(gaps) < MOST_GAPS:
        a, b = _meet(one, i, j, known) or (len(here), len(there))
        alike = shared_pages(one[4 * a :], other[4 * b :], 4)
        gaps.append(Gap(i, a, j, b, alike))
        i, j = a + alike, b + alike
    return gaps


def gram_places(data: bytes, start: int = 0) -> dict[bytes, list[int]]:
    """Where each run of `GRAM` tokens stands."""
    places: dict[bytes, list[int]] = {}
    for i in range(start, len(data) // 4 - GRAM + 1):
        places.setdefault(data[4 * i : 4 * (i + GRAM)], []).append(i)
    return places


def _meet(
    one: bytes, i: int, j: int, known: Mapping[bytes, list[int]]
) -> tuple[int, int] | None:
    """The nearest places, from i here and j there, from which both go on alike."""
    best, found = len(one), None
    for a in range(i, len(one) // 4 - GRAM + 1):
        if a - i >= best:
            break
        places = known.get(one[4 * a : 4 * (a + GRAM)], ())
        at = bisect_left(places, j)
        if at < len(places) and a - i + places[at] - j < best:
            best, found = a - i + places[at] - j, (a, places[at])
    return found


# %% name="gaps"
from minivllm.lint import find_gaps

one, other = prompts[1], prompts[0]
gaps = find_gaps(one.said(), other.said())
for gap in gaps:
    text = one.text[one.char(gap.here) : one.char(gap.here_end)].strip()
    size = gap.here_end - gap.here
    print(f"token {gap.here}: {size:2} differ, {gap.alike:3} alike behind: {text!r}")

# %% tags=["hide-input"]
from minivllm.drawing import draw_rows


def stripes(prompt: Asked, side: str):
    at = 0
    for gap in gaps:
        start, end = getattr(gap, side), getattr(gap, f"{side}_end")
        yield at, start - at, "published", ""
        yield start, max(2, end - start), "lost", ""
        at = end
    yield at, len(prompt.ids) - at, "published", ""


draw_rows(
    [("line 2", list(stripes(one, "here"))), ("line 1", list(stripes(other, "there")))],
    caption="The first two requests of the log, token by token. Red: what differs, at most fifteen "
    "tokens. A prefix cache gives back what is left of the first red stripe.",
)

# %% [markdown]
# `said` leaves out what the template adds at the end, so the last difference, the question, has nothing alike
# behind it. It is listed, and costs nothing.
#
# The naive twin of this is a `diff`, which looks for the best alignment and is quadratic at worst. Ours is
# linear but for the places that a run of tokens has, and takes the nearest, which for holes in a
# stable text is the same. (A test plants pieces in random prompts and wants each of them back.)
#
# ## A name for the cause
#
# The field says where to look. The text in the hole says what for. We widen it to whole words, so
# that a digit becomes a time, and ask of each word what it looks like.

# %% export="lint.py"
import re

from minivllm.explain import OTHER_TEXT

MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
DATE = (
    r"\d{4}[-/.]\d\d?[-/.]\d\d?(?:T[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?)?|"
    r"\d\d?[/.]\d\d?[/.]\d{2,4}|\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?|"
    rf"1\d{{9}}(?:\d{{3}})?(?:\.\d+)?|(?:{MONTHS})[a-z]{{0,6}}|"
    r"(?:mon|tues|wednes|thurs|fri|satur|sun)day|[ap]m"
)
HEX = r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|(?=\w*\d)[0-9a-f]{8,}"
MIXED = r"(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{4,}"
KINDS = {  # what a word is, the first that fits
    "a time or date": re.compile(DATE, re.IGNORECASE),
    "an id": re.compile(rf"{HEX}|{MIXED}", re.IGNORECASE),
    "a number": re.compile(r"[-+#]?\d[\d.,]*%?"),
    "a name": re.compile(
        r"[\w.+-]+@[\w-]+\.\w+|@\w+|[^\W\d_a-z][^\W\d_]*(?:['’-]\w+)*"
    ),
}
EDGES = ".,:;!?\"'()[]{}<>"
BEFORE_ID = re.compile(
    r"(?:\bid|\bno|\bnr|#|request|session|ticket|order|trace|run|user)\W*$",
    re.IGNORECASE,
)


def kind_of(word: str, before: str = "") -> str:
    """What a word is by its looks, and by what stands before it."""
    word = word.strip(EDGES)
    kinds = (kind for kind, looks in KINDS.items() if looks.fullmatch(word))
    kind = next(kinds, "")
    return "an id" if kind == "a number" and BEFORE_ID.search(before) else kind


def cause_of(one: str, other: str, before: str = "") -> str:
    """Why two pieces of text differ, as far as they tell."""
    if one.split() == other.split():
        return "white space"
    words, others = one.split(), other.split()
    while words and others and words[-1] == others[-1]:
        words, others = words[:-1], others[:-1]
    while words and others and words[0] == others[0]:
        words, others = words[1:], others[1:]
    if len(words) == len(others):
        pairs = [(a, b) for a, b in zip(words, others, strict=True) if a != b]
        kinds = [kind_of(a, before) for a, _ in pairs]
        if all(kinds) and kinds == [kind_of(b, before) for _, b in pairs]:
            return " and ".join(dict.fromkeys(kinds))
    if words and others and {kind_of(word) for word in words + others} == {"a name"}:
        return "a name"
    return OTHER_TEXT if words and others else "text put in or left out"


# %% name="causes"
from minivllm.lint import cause_of

for pair in (
    ("09:41:07", "09:52:30"),
    ("2026-11-30", "2026-12-01"),
    ("1764500000", "1764503600"),
    ("3f0b8a5201c3", "9c1da7e4402b"),
    ("17", "18"),
    ("Anna 09:41", "Emil 09:52"),
    ("a  guide", "a guide"),
    ("Please note:", ""),
    ("the wolf", "a sheep"),
):
    print(f"{pair[0]!r:15} {pair[1]!r:15} {cause_of(*pair)}")
print("after 'order':", cause_of("17", "18", before="order "))

# %% [markdown]
# These are guesses from looks, as in chapter 13, and they are said as such. Two of the causes
# need more than the words. JSON that says the same in another order of its keys, and a list of
# tools that says the same in another order of tools, differ in many places, each of which would
# have another name. So we first ask whether both sides *mean* the same.

# %% export="lint.py" tags=["hide-input"]
import json
import re
from collections.abc import Iterator
from dataclasses import field
from typing import Any, NamedTuple

from minivllm.explain import AT_START, OTHER_TEXT
from minivllm.request_log import Body


def same_json(one: str, at: int, other: str, there: int) -> bool:
    """Whether both places are inside of JSON that says the same in another order."""
    values = [list(_json_around(*each)) for each in ((one, at), (other, there))]
    return any(value in values[1] for value in values[0])


def _json_around(text: str, at: int) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    opening = [m.start() for m in re.finditer(r"[{\[]", text[: at + 1])]
    for start in [*opening[:8], *opening[8:][-8:]]:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if end > at and value:
            yield value


OTHER_TOKENS = "other tokens"
ORDER = "keys in another order"
TOOL_ORDER = "tools in another order"


def _tools_cause(one: Body, other: Body) -> str:
    """Whether two lists of tools say the same in another order."""
    lists = [body.get("tools") or [] for body in (one, other)]
    as_sent = [[json.dumps(tool) for tool in each] for each in lists]
    plain = [[json.dumps(tool, sort_keys=True) for tool in each] for each in lists]
    if as_sent[0] == as_sent[1] or sorted(plain[0]) != sorted(plain[1]):
        return ""
    return ORDER if plain[0] == plain[1] else TOOL_ORDER


class Break(NamedTuple):
    """One difference of a request and its nearest one, by field and cause."""

    path: str
    offset: int  # characters into the field
    cause: str
    here: str
    there: str
    gap: Gap
    nearest_line: int
    pattern: str = ""  # finds the line or sentence again, in any such request


PLACE = re.compile(r"messages\[(\d+)\]\.content|prompt")


def describe(here: Asked, there: Asked, gap: Gap) -> Break:
    """Name a difference: its field and its likely cause."""
    path, offset = here.place(gap.here)
    sizes = gap.here_end - gap.here, gap.there_end - gap.there
    one = _piece(here, gap.here, gap.here_end, gap.alike)
    other = _piece(there, gap.there, gap.there_end, gap.alike)
    in_tools = path.startswith(("tools", "template"))
    tools = in_tools and _tools_cause(here.body, there.body)
    shown, pattern = (one.text, other.text), ""
    if gap.here < 2 and sizes in AT_START:
        cause = AT_START[sizes]
    elif not here.text or not there.text:
        cause = OTHER_TOKENS
    elif tools:
        path, offset, cause = "tools", 0, tools
    elif same_json(one.field, one.at, other.field, other.at):
        cause = ORDER
    else:
        cause = _cause(one, other, here.text, there.text)
        if set(cause.split(" and ")) <= KINDS.keys() and PLACE.fullmatch(path):
            pattern = pattern_of(
                unit_at(one.field, one.at), unit_at(other.field, other.at)
            )
    return Break(path, offset, cause, *shown, gap, there.number, pattern)


class Piece(NamedTuple):
    """What stands in one of two prompts, in whole words, and the field around it."""

    text: str
    field: str = ""
    at: int = 0  # characters into the field
    bare: str = ""  # the text without the rest of its words


def _piece(asked: Asked, start: int, end: int, alike: int) -> Piece:
    """The text of some tokens, up to the ends of its words and not of its field."""
    if not asked.text:
        return Piece(" ".join(map(str, asked.ids[start : min(end, start + GRAM)])))
    a, b = asked.char(start), asked.char(end)
    bare = asked.text[a:b]
    a += len(bare) - len(bare.lstrip() or bare)
    spans = (span for span in asked.spans if span.start <= a < span.end)
    first, last, _ = next(spans, Span(0, len(asked.text), ""))
    text, b = asked.text, min(b, last)
    while a > first and not SPACE.match(text[a - 1]):
        a -= 1
    while alike and b < last and not SPACE.match(text[b]):
        b += 1
    return Piece(text[a:b], text[first:last], a - first, bare.strip())


SPACE = re.compile(r"""[\s"'`<>(){}\[\],;|=]""")


def _cause(one: Piece, other: Piece, here: str, there: str) -> str:
    if one.text == other.text:
        return "other tokens for the same text"
    cause = cause_of(one.text, other.text, one.field[max(0, one.at - 24) : one.at])
    pieces = ((one.bare, there), (other.bare, here))
    elsewhere = any(len(text) >= 24 and text in all_ for text, all_ in pieces)
    return "text in another place" if elsewhere and "text" in cause else cause


# %% export="lint.py" tags=["hide-input"]
from collections.abc import Iterator

from minivllm.radix import shared_pages


def differences(here: Asked, there: Asked) -> Iterator[Break]:
    """What keeps a request from following another, in the order of the prompt."""
    if here.key != there.key:
        alike = shared_pages(here.ids.tobytes(), there.ids.tobytes(), 4)
        keys, gap = (str(here.key), str(there.key)), Gap(0, 0, 0, 0, alike)
        yield Break("cache_salt", 0, "another salt", *keys, gap, there.number)
        return
    for gap in find_gaps(here.said(), there.said()):
        found = describe(here, there, gap)
        if gap.alike or found.cause not in (OTHER_TEXT, OTHER_TOKENS):
            yield found


# %% name="breaks"
from minivllm.lint import differences

for each in differences(prompts[1], prompts[0]):
    print(f"{each.path}: {each.cause}; {each.gap.alike} tokens alike behind it")
shuffled = next(p for p in prompts if p.body["tools"] != TOOLS)
each = next(differences(shuffled, prompts[0]))
print(f"line {shuffled.number}: {each.path}: {each.cause}")

# %% [markdown]
# ## What a difference costs
#
# Two prompts agree for `reach` tokens, then comes a difference, then `alike` tokens agree again.
# Without the difference the common prefix would be `reach + alike` tokens long. What it costs is
# the whole pages in that, less those that are reused anyway: the tokens up to the difference, or
# more, if the cache found a nearer prompt than the one that we compare with. What the cache found
# is no estimate. It is the engine's own. (`lost_tokens` of [chapter 13](13_explain.md) counts that,
# and by the same rule a difference that costs nothing is no fault.)
#
# And the cache is not a model of one. It is the engine, assembled as [chapter 14](14_llm.md) does
# it, with a runner that computes nothing. Each prompt is submitted, matched, admitted, published
# and released by the code that serves live requests.

# %% export="lint.py"
from array import array
from collections.abc import Sequence

from minivllm.batch import Chunk
from minivllm.engine import Limits
from minivllm.options import EngineOptions, assemble
from minivllm.request import ExtraKey, SamplingParams

LARGE = 2**31  # a vocabulary and a context without bounds
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


class NoModel:
    """Computes nothing: whoever wants a token gets 0."""

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """One answer for each chunk."""
        return [0 if chunk.samples else None for chunk in chunks]


class CacheOnly:
    """The engine with its scheduler and cache, one request at a time, and no model.

    `capacity` in tokens; 0: without bound. `ValueError` if it is less than a page.
    """

    def __init__(self, index: str, page_size: int, capacity: int) -> None:
        if 0 < capacity < page_size:
            raise ValueError(
                f"a capacity of {capacity} tokens is no page of {page_size}"
            )
        options = EngineOptions(
            index=index,
            page_size=page_size,
            single_flight="none",
            max_running=1,
            max_batch_tokens=LARGE,
            explain=False,
        )
        num_pages, limits = capacity // page_size or LARGE, Limits(LARGE, LARGE)
        self.page_size = page_size
        self.engine = assemble(options, num_pages, NoModel(), limits, streams=False)

    def play(self, ids: "array[int]", key: ExtraKey = None) -> int:
        """Serve one prompt to its end; how many of its tokens were found.

        Raises `ValueError` for a prompt that never fits.
        """
        self.engine.submit(ids, ONE_TOKEN, key)
        return self.engine.step()[0].num_cached_tokens

    @property
    def reused(self) -> int:
        """Tokens found so far."""
        return self.engine.stats()["cached_tokens"]


# %% name="pages"
from minivllm.explain import lost_tokens

SIZES = (1, 16, 32, 64, 128, 256)
gap = gaps[0]
print(f"agree for {gap.here}, then for {gap.alike} more, of {len(one.ids)} tokens")
for size in SIZES:
    cached = gap.here // size * size
    lost = lost_tokens(gap.here, gap.alike, cached, size, len(one.ids))
    print(f"pages of {size:3}: {cached:3} reused, {lost:3} lost to the clock")

# %% [markdown]
# Four tokens of a clock cost [448](#pages) tokens with pages of 16, more than agree again behind them: the
# page in which a difference lies is lost as a whole. With pages of 256 they cost [512](#pages),
# and there is nothing left to reuse.
#
# In a prompt with several holes each is charged with what lies between it and the next. That is
# what repairing it would bring if all before it were repaired. So the costs of one request add up
# to what it would have found without any difference, less what it did find, a sum that a test
# checks.
#
# `Linter` does this for a log, in one pass: it plays each prompt through the caches, compares it
# with its nearest one, and adds the costs up by field and cause. For a cause that can be moved it
# also keeps an expression that finds the line or sentence again: the words around the value, and
# for the value what such values look like.

# %% export="lint.py" tags=["hide-input"]
import re

SENTENCE = re.compile(r"(?<=[.!?]) +|\n")


def unit_at(text: str, at: int) -> str:
    """The line of a text, or the sentence of a line, in which a place is."""
    ends = [match.span() for match in SENTENCE.finditer(text)]
    start = max((end for begin, end in ends if begin <= at), default=0)
    return text[
        start : min((b for b, _ in ends if b >= max(at, start)), default=len(text))
    ]


TYPED = ("a time or date", "an id", "a number")


def pattern_of(one: str, other: str) -> str:
    """An expression that finds a line again, whatever stands where two of them differ.

    Empty if there would be too little in it to tell that line from another.
    """
    words, others = one.split(" "), other.split(" ")
    if len(words) != len(others) or not one.strip():
        return ""
    pairs = list(zip(words, others, strict=True))
    parts = [
        _like(a) if a != b or kind_of(a) in TYPED else re.escape(a) for a, b in pairs
    ]
    sure = [a for a, b in pairs if (a == b and a.isalpha()) or kind_of(a) in TYPED[:2]]
    return " ".join(parts) if sure else ""


def _like(word: str) -> str:
    """An expression for words like this one."""
    core = word.strip(EDGES)
    looks = KINDS[kind].pattern if (kind := kind_of(word)) in TYPED else r"\S+"
    before, _, after = word.partition(core) if core else ("", "", word)
    return f"{re.escape(before)}(?i:{looks}){re.escape(after)}"


# %% export="lint.py" tags=["hide-input"]
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.explain import AT_START, OTHER_TEXT, lost_tokens

CacheName = tuple[str, int]  # an index and a page size


@dataclass
class Finding:
    """What breaks reuse at one place, in how many requests, and what that costs."""

    path: str
    pattern: str = ""
    causes: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    lost: Counter[CacheName] = field(default_factory=Counter)  # tokens
    line: int = 0  # of the first example
    example: Break | None = None
    tried: bool = False  # whether somebody went through the log to move it
    moved: int = 0  # requests in which it was moved

    @property
    def cause(self) -> str:
        """The most frequent one."""
        return self.causes.most_common(1)[0][0]

    @property
    def movable(self) -> bool:
        """Whether `rewrite` can do something about it."""
        return bool(self.pattern) or self.path == "tools"

    @property
    def remedy(self) -> str:
        """What is done about it, or whoever writes the requests may do."""
        if self.movable and (self.moved or not self.tried):
            return "sort them" if self.path == "tools" else "move it behind what stays"
        return f"left: {ADVICE.get(self.cause, ADVICE[''])}"

    def as_json(self) -> dict[str, Any]:
        """All of it, with the first example."""
        assert self.example is not None
        told = self.example._asdict() | {"path": self.path, "cause": self.cause}
        del told["gap"], told["pattern"]
        lost = [
            {"index": i, "page_size": p, "tokens": n} for (i, p), n in self.lost.items()
        ]
        told |= {"requests": self.requests, "lost": lost, "line": self.line}
        return told | {"remedy": self.remedy, "moved": self.moved}


ADVICE = {
    "": "it is no line or sentence of its own",
    "white space": "write it the same way each time",
    ORDER: "sort the keys where the text is made",
    "text in another place": "give it one place",
    "text put in or left out": "put it behind what stays",
    OTHER_TEXT: "put what stays before it",
    OTHER_TOKENS: "token ids have no fields",
    "another salt": "salts keep users apart",
    **dict.fromkeys(AT_START.values(), "let one program add the BOS"),
}
LEAST_SHARE = 0.01  # of the prompt tokens: what costs less is not listed


class Linter:
    """Plays a log through some caches, and compares each request with its nearest."""

    def __init__(
        self, caches: Mapping[CacheName, CacheOnly], num_tokens: int = 2**20
    ) -> None:
        self.caches = caches
        self.recent = Recent(num_tokens)
        self.requests = self.tokens = 0
        self.refused: Counter[CacheName] = Counter()
        self._found: dict[tuple[str, str], Finding] = {}

    def add(self, asked: Asked) -> None:
        """The next request of the log."""
        cached = {name: self._play(name, asked) for name in self.caches}
        self.requests += 1
        self.tokens += len(asked.ids)
        near = self.recent.nearest(asked)
        breaks = list(differences(asked, near)) if near else []
        reach = breaks[0].gap.here if breaks else 0
        met: set[int] = set()
        for each in breaks:
            finding, alike = self._finding(each), each.gap.alike
            for name, tokens in cached.items():
                lost = lost_tokens(reach, alike, tokens, name[1], len(asked.ids))
                finding.lost[name] += lost
            reach += alike
            finding.causes[each.cause] += 1
            if alike:
                finding.requests += id(finding) not in met
                met.add(id(finding))
            if finding.example is None and (alike or self.requests == 2):
                finding.line, finding.example = asked.number, each

    def _play(self, name: CacheName, asked: Asked) -> int:
        try:
            return self.caches[name].play(asked.ids, asked.key)
        except ValueError:
            self.refused[name] += 1
            return 0

    def _finding(self, each: Break) -> Finding:
        key = each.path, each.pattern or each.cause
        if len(self._found) > 1000:  # a log of a thousand forms: by cause only
            key = each.path, each.cause
        return self._found.setdefault(key, Finding(each.path, each.pattern))

    def findings(self, name: CacheName, everything: bool = False) -> list[Finding]:
        """What costs most under one cache first; what is cheap only if asked for."""
        least = 0 if everything else max(1, LEAST_SHARE * self.tokens)
        found = [f for f in self._found.values() if f.example and f.lost[name] >= least]
        return sorted(found, key=lambda f: -f.lost[name])


# %% name="ranking"
from minivllm.lint import Linter


def lint(prompts, sizes=SIZES, capacity=2**20):
    linter = Linter(
        {("radix", size): CacheOnly("radix", size, capacity) for size in sizes}
    )
    for prompt in prompts:
        linter.add(prompt)
    return linter


linter = lint(prompts)
findings = linter.findings(("radix", PAGE))
for finding in findings:
    lost = " ".join(f"{finding.lost['radix', size]:6,}" for size in SIZES)
    print(f"{finding.path}: {finding.cause}, in {finding.requests} requests")
    print(f"    tokens lost {lost}")

# %% tags=["hide-input"]
from minivllm.replay import draw_curves

curves = [
    (f"{f.cause} ({f.path})", [f.lost["radix", size] / 1000 for size in SIZES])
    for f in findings
]
draw_curves(
    [str(size) for size in SIZES],
    [("thousands of tokens lost, against the page size", curves)],
    "What each difference costs in the whole log. The clock costs more than ten times as much as any other, "
    "under every page size. What lies in the part that fills no page costs nothing: with 256 these are the last 200 tokens.",
)

# %% [markdown]
# The ranking has four lines for [119](#ranking) requests, and each is a line of somebody's
# program. The clock comes first, with [52,896](#ranking) tokens at 16 to a page. The trace id
# changes in as many requests and costs [1,312](#ranking). Not that ids matter less: this one
# stands *behind* the house rules, and what counts is what stays between it and the next difference:
# [9](#gaps) tokens, where the name has [28](#gaps). Put it in front
# of the rules, and it would be charged with them. Frequency says how often a field changes, position says what that
# costs, and a dashboard of misses shows neither.
#
# Tools that are sent in another order cost little in [32](#ranking) requests (a shuffled one counts, and so does
# the usual one after it), because the clock
# stands soon after them and is charged with all that follows. They stand before everything else:
# where the clock is moved and they are not, a shuffle is charged with what the clock was.
#
# The page size shifts the ranking. A prompt of 712 tokens has two whole pages of 256. The clock
# is in the first, so both go, [60,928](#ranking) tokens in all; the name and the trace are in the
# part that fills no page, and cost [0](#ranking). Between the two the ids and the names change places: with pages of
# 16 the name costs [2,896](#ranking) and the trace less, with 128 the name [128](#ranking) and the trace
# [3,968](#ranking). Who measures with one page size and serves with
# another may repair the wrong line. The index makes no difference: a hash table and a tree find
# the same prefixes ([chapter 4](04_pages.md)), and the command can play either.
#
# ## Moving the field
#
# The repair is known: put what changes behind what does not. For a clock in a sentence of its own
# a program can do that. `rewrite` takes the sentence out of the system message and puts it at the
# end of the last user message; a line of a user message goes to that message's end, and tools,
# and the keys in them, are sorted. Nothing is dropped.

# %% export="lint.py"
import json
import re
from collections.abc import Iterable

from minivllm.request_log import Body


def rewrite(body: Body, findings: Iterable[Finding]) -> None:
    """Move what breaks reuse behind the rest of the request, where it can be moved.

    A line or sentence of a system message goes to the end of the last user message, one
    of a user message to that one's end, one of a prompt before its last line. Tools,
    and the keys in them, are sorted.
    """
    for finding in findings:
        if finding.path == "tools" and body.get("tools"):
            tools = [json.dumps(tool, sort_keys=True) for tool in body["tools"]]
            body["tools"] = [json.loads(tool) for tool in sorted(tools)]
            finding.moved += 1
        elif finding.pattern and _move(body, finding.path, finding.pattern):
            finding.moved += 1


MOVED_ROLES = ("system", "developer", "user")  # an answer stays as it was


def _move(body: Body, path: str, pattern: str) -> bool:
    if path == "prompt":
        text, _, last = str(body.get("prompt", "")).rpartition("\n")
        rest, unit = _cut(text, pattern)
        body |= {"prompt": f"{rest}\n{unit}\n{last}"} if unit else {}
        return bool(unit)
    messages, place = body.get("messages") or [], PLACE.fullmatch(path)
    texts = [isinstance(m.get("content"), str) and m.get("role") for m in messages]
    number = int(place[1]) if place and place[1] else len(messages)
    movable = number < len(messages) and texts[number] in MOVED_ROLES
    if not movable or "user" not in texts:
        return False
    source, behind = messages[number], texts[::-1].index("user")
    target = source if texts[number] == "user" else messages[-1 - behind]
    rest, unit = _cut(source["content"], pattern)
    if unit:
        source["content"] = rest
        target["content"] += f"\n{unit}"
    return bool(unit)


def _cut(text: str, pattern: str) -> tuple[str, str]:
    """A text without the line or sentence that a pattern finds, and that."""
    found = re.search(
        rf"(?:^|(?<=[.!?] ))(?:{pattern})(?:(?=\n|$)|(?<=[.!?])(?= ))", text, re.M
    )
    if not found:
        return text, ""
    before, after = text[: found.start()], text[found.end() :]
    return before + after[after[:1] in (" ", "\n") :], found[0]


# %% name="moved"
from minivllm.lint import rewrite

bodies = [line.bodies[0] for line in read_log(log)]
for body in bodies:
    rewrite(body, findings)
moved = [encode(number, body) for number, body in enumerate(bodies, 1)]
after = lint(moved)
print(bodies[1]["messages"][0]["content"][:80], "…")
print(bodies[1]["messages"][1]["content"])
print(f"(moved in {findings[0].moved} requests)")
for each in after.findings(("radix", PAGE)):
    print(f"now first: {each.path}, {each.cause}: {each.lost['radix', PAGE]:,} tokens")
for size in SIZES:
    shares = (
        each.caches["radix", size].reused / each.tokens for each in (linter, after)
    )
    print("pages of {:3}: {:.1%} reused before, {:.1%} after".format(size, *shares))

# %% tags=["hide-input"]
reused = [
    (words, [100 * each.caches["radix", size].reused / each.tokens for size in SIZES])
    for words, each in (("as the log is", linter), ("with the fields moved", after))
]
draw_curves(
    [str(size) for size in SIZES],
    [("reused, % of prompt tokens", reused)],
    "The log and the rewritten log, each played through the engine's cache. A page of 256 tokens holds the "
    "clock and everything before it, so before the move it reused nothing.",
)

# %% [markdown]
# From [24.5%](#moved) to [89.0%](#moved), by the same cache, with the same words in each request.
# The ranking was an estimate, pair by pair, and this is its test: most of what it called lost came
# back. With pages of 256 nothing at all was reused before, and [71.2%](#moved) are
# now.
#
# The ranking of the rewritten log is not empty. The number of the order now stands before the
# sentences that were moved, and these begin alike, so [1,888](#moved) tokens are lost to the
# question itself. That is where it should end: what changes stands last, and the first thing that
# changes is what the customer asked.
#
# What is not moved is as important. An assistant's answers stay what they were. A value inside
# JSON, a value that shares its sentence with instructions, a text with too few words around the
# value to find it again: for these the ranking says what to do and leaves it to you. Whether a
# model reads the time as well at the end of a question as in the system message no cache can
# tell. Run your evaluation on the rewritten log.
#
# ## What the log does not say
#
# A log has the words. It lacks the machine.


# %% name="unknown"
def share(prompts, capacity=2**20, routes=1, salts=lambda prompt: None, strangers=0):
    """Reused tokens of a log that is dealt out to caches, with strangers in between."""
    caches, found = [CacheOnly("radix", PAGE, capacity) for _ in range(routes)], 0
    for i, prompt in enumerate(prompts):
        cache = caches[i % routes]
        found += cache.play(prompt.ids, salts(prompt))
        for j in range(strangers):  # 640 tokens that nobody has seen
            cache.play(
                array(
                    "i",
                    range(
                        10**6 * (i * strangers + j), 10**6 * (i * strangers + j) + 640
                    ),
                )
            )
    return found / sum(len(prompt.ids) for prompt in prompts)


def customer(prompt: Asked) -> str:
    return next(name for name in NAMES if f"called {name}." in prompt.text)


print(
    f"one cache                   {share(prompts):.1%} before, {share(moved):.1%} after"
)
print(
    f"ten strangers in between    {share(moved, 4096, strangers=10):.1%} with room for 4,096 tokens"
)
print(f"twenty replicas in turn     {share(moved, routes=20):.1%}")
print(f"a salt for each customer    {share(moved, salts=customer):.1%}")

# %% [markdown]
# *Capacity.* If ten unrelated prompts come between two requests, and there is room for six, the
# house rules are gone each time, and [0.0%](#unknown) of the repaired log are reused. [Chapter
# 16](16_traffic.md) draws the curve that tells how much room is enough. *Routing.* If several copies of the server share
# the load, and requests are dealt out in turn, each copy learns the rules for itself. With twenty of
# them [74.8%](#unknown) remain, and with short logs the loss is larger. *Salts* (the `extra_key` of [chapter 2](02_hashing.md)). What keeps
# customers apart keeps their prefixes apart, on purpose: [86.0%](#unknown) with one for each of
# five customers. (If the log has the salts, the linter uses them, and says what they cost.)
#
# And *time*. Here a request ends before the next one begins. What if all 120 come at once? The
# simulator of [chapter 16](16_traffic.md) knows when a page becomes visible:

# %% name="together"
from minivllm.options import EngineOptions
from minivllm.replay import Replay
from minivllm.roofline import read_cost
from minivllm.workloads import TraceRequest

at_once = [
    TraceRequest(str(prompt.number), 0.0, prompt.ids, len(prompt.ids), 1)
    for prompt in moved
]
LARGE_STEPS = {"max_running": 128, "max_batch_tokens": 2**17}
for words, options in (
    ("steps of 2,048 tokens", {}),
    ("all in one step", LARGE_STEPS),
    ("all in one step, wait_for_prefix=8", LARGE_STEPS | {"wait_for_prefix": 8}),
):
    replay = Replay(at_once, EngineOptions(**options), 2**20, read_cost("8b-h100"))
    cached = sum(one.cached_tokens for one in replay.run())
    print(f"{cached / after.tokens:5.1%} reused: {words}")

# %% [markdown]
# If they fit into one step, [0.0%](#together) of the repaired log are reused. No field breaks
# anything there. It is the puzzle with which this book began, and the linter cannot see it.
# Smaller steps hide it by accident, and waiting for pages that are being computed ([chapter
# 10](10_single_flight.md)) gives the [89.0%](#together) back. So the order of repairs is that of
# chapter 13's questions: first the ids, which a log can tell, then the machine.
#
# What the command says, a live engine does. If the requests of a log are played one after the other
# through an `LLM` with the same options, with answers of one token, each reuses as many tokens as the command says. A
# test does it with real, tiny weights, for requests without tools. Two things the command does not know: what the
# answers were, unless later turns repeat them, and with which tokens they were generated.
#
# ## The command
#
# The rest is for the terminal. `minivllm explain LOG.jsonl` reads the log twice, the second time
# with the fields moved. It keeps no more than the caches and the last million tokens, so a log
# with a request on each line may be longer than memory. `--rewrite OUT.jsonl` writes it; bad lines are copied as they were.

# %% export="command_explain.py" tags=["hide-input"]
"""`minivllm explain`: where two prompts part, and what breaks reuse in a log."""
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from minivllm.cli import SCHEMA_VERSION, AsJson
from minivllm.command_simulate import sizes_of
from minivllm.lint import Encoder
from minivllm.timeline import check_place


def add_to(root: typer.Typer) -> None:
    """Add this module's command to the command line."""
    root.command()(explain)


def explain(
    prompts: Annotated[
        list[str],
        typer.Argument(help="A log; or two prompts or chat requests, files or texts."),
    ],
    model: Annotated[
        str, typer.Option(help="Whose tokenizer: smollm2, a folder, .gguf, hub id.")
    ] = "smollm2",
    page_size: Annotated[
        str, typer.Option(help="Tokens in a page, a list.")
    ] = "1,16,32,64,128,256",
    index: Annotated[
        str, typer.Option(help="How a prefix is found, a list: radix, hash.")
    ] = "radix,hash",
    capacity: Annotated[
        str, typer.Option(help="Tokens that a cache has room for; 0: no bound.")
    ] = "1M",
    to: Annotated[
        Path | None,
        typer.Option("--rewrite", help="Write the log anew, with the breaks moved."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What breaks reuse? Compares two prompts, or the requests of a log.

    A log has a request on each line: OpenAI chat bodies (or batch files), ShareGPT
    conversations, prompts as text or in JSON, or a trace of token ids. It is played
    through the engine's own cache, one request at a time. The ranking is for the first
    index and pages of 16, or else the first size.
    """
    check_place(to, "--rewrite")
    (capacity_, *more), names = sizes_of(capacity), cache_names(index, page_size)
    if len(prompts) > 2 or more or (to and len(prompts) == 2):
        raise ValueError("one log, or two prompts and no --rewrite; and one --capacity")
    report, encoder = Report(names, capacity_), Encoder(lambda: load_parts(model))
    if len(prompts) == 2:
        pair = [read_prompt(each, encoder, i) for i, each in enumerate(prompts, 1)]
        report.add(pair)
        report.common = common_part(*pair)
    else:
        study(Path(prompts[0]), encoder, report, to)
    if as_json:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION} | report.as_json()))
    else:
        show(report, Console(highlight=False, force_jupyter=False))


# %% export="command_explain.py" tags=["hide-input"]
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from minivllm.command_simulate import sizes_of
from minivllm.lint import Asked, CacheName, Encoder
from minivllm.options import CHOICES, check_choice
from minivllm.radix import shared_pages
from minivllm.request_log import bodies_of
from minivllm.workloads import LineReader


def cache_names(index: str, page_size: str) -> list[CacheName]:
    """The caches that two lists ask for. Raises `ValueError`."""
    indexes, sizes = index.split(","), sizes_of(page_size)
    for each in indexes:
        check_choice("index", each, CHOICES["index"])
    if min(sizes) < 1:
        raise ValueError("--page-size must be at least 1")
    return list(dict.fromkeys(product(indexes, sizes)))


def load_parts(model: str) -> tuple[Any, Any]:
    """A model's tokenizer and chat template, without its weights."""
    from minivllm.chat import load_template
    from minivllm.loader import open_checkpoint  # torch begins here
    from minivllm.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(model)
    return load_tokenizer(checkpoint), load_template(checkpoint)


def read_prompt(given: str, encoder: Encoder, number: int) -> Asked:
    """One of two prompts: a file or a text, perhaps a chat request in JSON."""
    text, path, bodies = given, Path(given), []
    with suppress(OSError):  # a text may be too long for a name
        if path.is_file():
            text = read_text(path)
        elif path.is_dir() or (path.suffix in FILES and " " not in given):
            raise ValueError(f"{given} is not a file, and looks like one")
    if text.lstrip()[:1] in ("{", "["):
        with suppress(json.JSONDecodeError, RecursionError):
            bodies = bodies_of(json.loads(text), LineReader())
    if "\0" in text or len(bodies) > 1:
        raise ValueError(f"{given[:80]}: one prompt or request is wanted, as text")
    return encoder(number, bodies[0] if bodies else {"prompt": text})


def read_text(path: Path) -> str:
    """A file's text; what is no UTF-8 reads as a zero byte."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return "\0"


FILES = (".json", ".jsonl", ".txt", ".md")


def common_part(one: Asked, other: Asked) -> dict[str, Any]:
    """How much two prompts have in common, and what stands where they part."""
    common = shared_pages(one.ids.tobytes(), other.ids.tobytes(), 4)
    characters = other.char(common) if other.text else None
    sides = [
        {
            "ids": each.ids[common : common + 1].tolist(),
            "text": list(pieces(each, common)),
        }
        for each in (one, other)
    ]
    return {"tokens": common, "characters": characters, "sides": sides}


def pieces(asked: Asked, at: int) -> Iterator[str]:
    """Some tokens before a place, the one there, and some after, as text."""
    for start, end in ((max(0, at - 6), at), (at, at + 1), (at + 1, at + 7)):
        start, end = (min(each, len(asked.ids)) for each in (start, end))
        ids = " ".join(map(str, asked.ids[start:end]))
        yield asked.text[asked.char(start) : asked.char(end)] if asked.text else ids


# %% export="command_explain.py" tags=["hide-input"]
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from minivllm.lint import (
    Asked,
    CacheName,
    CacheOnly,
    Encoder,
    Finding,
    Linter,
    Missing,
    rewrite,
)
from minivllm.options import EngineOptions
from minivllm.progress import progress_bar
from minivllm.request_log import Body, Line, read_log


@dataclass
class Report:
    """What was found, and in which caches."""

    names: list[CacheName]
    capacity: int
    faults: list[tuple[int, str]] = field(default_factory=list)  # line, what is wrong
    common: dict[str, Any] | None = None  # of two prompts
    tokens_after: int = 0

    def __post_init__(self) -> None:
        self.linter, self.after = Linter(self.caches()), self.caches()
        usual = (each for each in self.names if each[1] == EngineOptions.page_size)
        self.main = next(usual, self.names[0])

    def caches(self) -> dict[CacheName, CacheOnly]:
        """New ones."""
        return {name: CacheOnly(*name, self.capacity) for name in self.names}

    def add(self, prompts: Iterable[Asked]) -> None:
        """Play some prompts."""
        for asked in prompts:
            self.linter.add(asked)

    @property
    def findings(self) -> list[Finding]:
        """What costs most, first; of two prompts all."""
        return self.linter.findings(self.main, everything=self.common is not None)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        linter, found = self.linter, {"reused": self.linter.caches}
        found |= {"reused_after": self.after} if self.tokens_after else {}
        rows = [
            {"index": name[0], "page_size": name[1], "refused": linter.refused[name]}
            | {key: caches[name].reused for key, caches in found.items()}
            for name in self.names
        ]
        return {
            "requests": linter.requests,
            "prompt_tokens": linter.tokens,
            "prompt_tokens_after": self.tokens_after or None,
            "capacity": self.capacity,
            "common": self.common,
            "bad_lines": [{"line": n, "fault": fault} for n, fault in self.faults],
            "findings": [finding.as_json() for finding in self.findings],
            "caches": rows,
        }


def study(path: Path, encoder: Encoder, report: Report, to: Path | None) -> None:
    """Read a log to find what breaks reuse, and once more to try it without."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: a log is read twice")
    if to and to.exists() and to.samefile(path):
        raise ValueError(f"{path} is the file that --rewrite would write")
    with progress_bar("log", 2 * path.stat().st_size) as advance:
        for line, asked in prompts_in(path, encoder, advance):
            report.add(asked)
            report.faults += [(line.number, line.fault)] if line.fault else []
        if not report.linter.requests:
            first = "; line {}: {}".format(*report.faults[0]) if report.faults else ""
            raise ValueError(f"{path}: there is no request in it{first}")
        if to or any(each.movable for each in report.findings):
            change = partial(rewrite, findings=report.findings)
            lines = prompts_in(path, encoder, advance, change)
            with to.open("wb") if to else nullcontext() as file:
                for data in try_again(lines, report):
                    if file:
                        file.write(data + b"\n")
            for finding in report.findings:
                finding.tried = True


def keep(body: Body) -> None:
    """Change nothing."""


def prompts_in(
    path: Path,
    encoder: Encoder,
    advance: Callable[[int], object],
    change: Callable[[Body], object] = keep,
) -> Iterator[tuple[Line, list[Asked]]]:
    """The lines of a log with their prompts; a line that cannot be read has a fault."""
    for line in read_log(path):
        asked: list[Asked] = []
        try:
            for body in line.bodies:
                change(body)
                asked.append(encoder(line.number, body))
        except Missing:
            raise
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            line.fault, asked = str(error), []
        yield line, asked
        advance(len(line.raw))


def try_again(
    lines: Iterable[tuple[Line, list[Asked]]], report: Report
) -> Iterator[bytes]:
    """Play the changed log through new caches; its lines, bad ones as they were."""
    for line, asked in lines:
        report.tokens_after += sum(len(each.ids) for each in asked)
        for each, cache in product(asked, report.after.values()):
            with suppress(ValueError):  # it never fits
                cache.play(each.ids, each.key)
        if line.fault:
            yield line.raw.rstrip(b"\r\n")
        else:  # half a character stays an escape of JSON
            for text in line.written():
                yield text.encode("utf-8", "backslashreplace")


# %% export="command_explain.py" tags=["hide-input"]
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minivllm.command_simulate import size_name
from minivllm.lint import CacheName, Finding

SHOWN = 48  # characters of a value, or bad lines


def counted(number: int, noun: str) -> str:
    """'1 request', '2 requests'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def show(report: Report, out: Console) -> None:
    """A report for people."""
    linter, size = report.linter, size_name(report.capacity)
    counts = counted(linter.requests, "request"), counted(linter.tokens, "prompt token")
    room = f"of {size} tokens" if report.capacity else "without bound"
    out.print(f"{', '.join(counts)}; caches {room}")
    if common := report.common:
        told = f"{counted(common['tokens'], 'token')} in common"
        if common["characters"] is not None:
            told += f", {counted(common['characters'], 'character')}"
        out.print(f"{told}; then")
        for side in common["sides"]:
            before, here, after = (repr(text)[1:-1] for text in side["text"])
            line = (
                Text("  ").append(before, "dim").append(here or "(the end)", "reverse")
            )
            out.print(line.append(after, "dim"))
    for number, finding in enumerate(report.findings, 1):
        out.print(in_words(number, finding))
    if not report.findings:
        out.print("no field breaks reuse", style="green")
    out.print(costs(report))
    for number, fault in report.faults[:SHOWN]:
        out.print(Text(f"line {number}: {fault}", "red"))
    if report.faults:
        out.print(f"lines that could not be read: {len(report.faults)}", style="red")


def in_words(number: int, finding: Finding) -> Text:
    """One row of the ranking."""
    told = finding.as_json()
    half = SHOWN // 2
    one, other = (
        repr(text if len(text) <= SHOWN else f"{text[:half]}…{text[-half:]}")
        for text in (told["here"], told["there"])
    )
    words = (
        Text(f"{number}. ")
        .append(finding.path, "cyan")
        .append(f", character {told['offset']}: ")
    )
    words.append(finding.cause, "bold yellow").append(
        f", in {counted(finding.requests, 'request')}\n   "
    )
    words.append(
        f"line {told['line']} has {one}, line {told['nearest_line']} {other}\n   "
    )
    done = f": done in {counted(finding.moved, 'request')}" if finding.moved else ""
    left = finding.remedy.startswith("left")
    return words.append(finding.remedy + done, "red" if left else "green")


def costs(report: Report) -> Table:
    """What each finding costs, and what was reused: a column for each page size."""
    sizes = list(dict.fromkeys(size for _, size in report.names))
    table = Table("tokens, with pages of", *map(str, sizes))
    rows: dict[tuple[str, ...], str] = {}  # -> the indexes of which it is true
    for index in dict.fromkeys(index for index, _ in report.names):
        for row in cost_rows(report, [(index, size) for size in sizes]):
            rows[row] = f"{rows[row]}, {index}" if row in rows else index
    for (words, *cells), indexes in rows.items():
        table.add_row(f"{words} ({indexes})", *cells)
    return table


def cost_rows(report: Report, names: list[CacheName]) -> Iterator[tuple[str, ...]]:
    """The rows of one index."""
    for number, finding in enumerate(report.findings, 1):
        yield f"lost to {number}", *(f"{finding.lost[name]:,}" for name in names)
    linter, total = report.linter, report.tokens_after
    yield "reused", *(f"{linter.caches[n].reused / linter.tokens:.1%}" for n in names)
    if total and any(finding.moved for finding in report.findings):
        yield "if moved", *(f"{report.after[n].reused / total:.1%}" for n in names)


# %% name="command"
from rich.console import Console

from minivllm.command_explain import Report, show, study

designs = [(index, size) for index in ("radix", "hash") for size in (1, 16, 256)]
report = Report(designs, 2**20)
study(log, encode, report, to=None)
show(report, Console(force_jupyter=False, width=79, color_system=None, highlight=False))

# %% [markdown]
# Two prompts instead of a log, as texts or files, are compared the same way: `minivllm explain A
# B` also shows the two tokens where they part, and lists every difference that has a name, whatever it
# costs.
#
# ## Exercises
#
# ### Exercise 1
#
# The shop insists on the time in the system message, but nobody needs seconds. Write `at(clock)`,
# which rounds `"09:41:07"` down so far that at least half of the prompt tokens are reused and the
# time is still right to within ten minutes. Predict first: what does rounding to the minute
# bring, in a log with one request a minute?


# %% tags=["solution"]
def at(clock: str) -> str:
    return clock[:4] + "0"


# %% name="rounded"
import re

CLOCK = re.compile(r"\d\d:\d\d:\d\d")


def with_clock(change) -> float:
    bodies = [line.bodies[0] for line in read_log(log)]
    for body in bodies:
        system = body["messages"][0]
        system["content"] = CLOCK.sub(lambda found: change(found[0]), system["content"])
    return share([encode(i, body) for i, body in enumerate(bodies)])


assert at("09:41:07")[:4] == "09:4" and len({at(f"09:4{i}:00") for i in range(10)}) == 1
assert with_clock(at) > 0.5
by_the_minute = with_clock(lambda clock: clock[:5])
print(f"to the minute {by_the_minute:.1%}, to ten minutes {with_clock(at):.1%}")

# %% [markdown]
# To the minute brings [24.6%](#rounded): one request a minute, and each minute is new. To ten
# minutes it is [73.6%](#rounded): a value may change, if it changes more slowly than requests come.
#
# ### Exercise 2
#
# Two prompts of 400 tokens agree for 40, differ in 5, and agree for 300 more. How many tokens
# does the difference cost with pages of 1, 16, 64 and 256 tokens? And with pages of 512?

# %% tags=["solution"]
costs_of = {1: 300, 16: 304, 64: 320, 256: 256, 512: 0}

# %%
for size, expected in costs_of.items():
    assert lost_tokens(40, 300, 40 // size * size, size, 400) == expected, size

# %% [markdown]
# More than the 300 tokens may be lost, since the page in which the difference lies is lost as a
# whole.
#
# ### Exercise 3
#
# A program sorts the keys of its JSON, another does not, and both send the same settings to the
# same server. Write `canonical(text)`, which makes their prompts equal and changes no value.


# %% tags=["solution"]
def canonical(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)


# %%
settings = {"shop": "Zürich", "open": [9, 18], "rules": HOUSE_RULES, "tax": 8.1}
orders = [
    dict(sorted(settings.items(), reverse=backward)) for backward in (False, True)
]
raw = [encode(i, {"prompt": json.dumps(each)}) for i, each in enumerate(orders, 1)]
assert next(differences(raw[1], raw[0])).cause == "keys in another order"
fixed = [
    encode(i, {"prompt": canonical(json.dumps(each))})
    for i, each in enumerate(orders, 1)
]
assert fixed[0].ids == fixed[1].ids and json.loads(fixed[0].text) == settings
assert share(raw) < 0.05 and share(fixed) > 0.45
