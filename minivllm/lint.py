# Exported from chapters/17_log.py (f96776cf): edit the chapter.
"""Which fields of a log's requests keep a prefix cache from finding more."""

import json
import re
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

from minivllm.batch import Chunk
from minivllm.engine import Limits
from minivllm.explain import AT_START, GRAM, OTHER_TEXT, lost_tokens
from minivllm.options import EngineOptions, assemble
from minivllm.radix import shared_pages
from minivllm.request import ExtraKey, SamplingParams, check_extra_key, encode_ids
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
