# Exported from chapters/13_explain.py (0b365441): edit the chapter.
"""Why so many prompt tokens were reused, and no more: an answer for each request."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from minivllm.engine import Engine
from minivllm.events import both
from minivllm.hashing import extend_hashes
from minivllm.prefix_cache import NoIndex
from minivllm.radix import Node, RadixCache, Slots
from minivllm.request import ExtraKey
from minivllm.scheduler import RequestState
from minivllm.single_flight import in_prompt

LOOK = 12  # tokens of two prompts to show, where they part


class Nearest(NamedTuple):
    """The known sequence that a prompt follows longest."""

    length: int  # tokens in common
    there: tuple[int, ...] = ()  # how it goes on
    request_id: str = ""  # who brought these tokens


class History(RadixCache):
    """Sequences that began to run, token by token; the least recently used go first.

    Whatever was used after `forgot` (in microseconds, as its clock) is complete.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(page_size=1)
        self.num_tokens = num_tokens
        self.forgot = 0
        self.whole = True  # False after a change that was cut short

    def note(self, ids: array[int], key: ExtraKey, number: int, now_s: float) -> None:
        """Remember a sequence of request `number`: that is the place of its tokens."""
        self.whole = False
        self._clock = max(self._clock, int(now_s * 1e6))
        self.insert(ids, Slots(array("i", [number]) * len(ids), 1), key)
        self.evict_pages(self.total_size - self.num_tokens)
        self.whole = True

    def _trim(self, leaf: Node, num_pages: int) -> None:
        self.forgot = max(self.forgot, leaf.last_access)
        super()._trim(leaf, num_pages)

    def nearest(self, ids: array[int], key: ExtraKey, look: int = LOOK) -> Nearest:
        """Where a prompt leaves all that is remembered, and how that goes on."""
        match, rest, name = self.match_prefix(ids, key), array("i"), ""
        node, at = match.end or (None, 0)
        skipped = ids[match.matched_len + 1 :][:1].tobytes()
        while node and len(rest) < look:
            if len(node.key) > at:
                name = name or str(node.places[at // 4])
                rest.frombytes(node.key[at : at + 4 * look])
            last = next(reversed(node.children.values()), None)
            node, at = last if rest else node.children.get(skipped, last), 0
        return Nearest(match.matched_len, tuple(rest[:look]), name)


@dataclass(eq=False)
class Watch:
    """A running request and the names of its pages, complete or not."""

    state: RequestState
    names: list[bytes]
    num_shown: int  # pages that others can find


class Fate(NamedTuple):
    """Why a page that was known cannot be found."""

    why: str
    at_s: float | None = None
    who: str = ""
    detail: str = ""


class Pages:
    """Names of the published pages, and fates of those that are not there any more."""

    def __init__(self, num_fates: int) -> None:
        self.num_fates = num_fates
        self.fates: OrderedDict[bytes, Fate] = OrderedDict()  # the oldest first
        self._names: dict[int, bytes] = {}  # page -> the prefix in it

    def show(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        """These pages can be found now."""
        for page, name in zip(pages, names, strict=True):
            self._names[page] = name
            self.fates.pop(name, None)

    def lose(self, pages: Sequence[int], fate: Fate) -> None:
        """These cannot be found any more."""
        self.bury([self._names.pop(p) for p in pages if p in self._names], fate)

    def lose_all(self, fate: Fate) -> None:
        """None can."""
        self.lose([*self._names], fate)

    def bury(self, names: Sequence[bytes], fate: Fate) -> None:
        """Remember what became of some pages, and forget the oldest fates."""
        for name in names:
            self.fates[name] = fate
            self.fates.move_to_end(name)
        while len(self.fates) > self.num_fates:
            self.fates.popitem(last=False)


@dataclass
class Queued:
    """A request that may be admitted, and how often nobody was so far, by reason."""

    since_s: float
    leader: str | None
    refusals: Counter[str]
    num_waits: int = 0  # steps in which it waited for another one's pages


@dataclass(frozen=True)
class Parting:
    """Where a prompt leaves the nearest known one, both from there, and a guess why."""

    position: int
    here: tuple[int, ...]
    there: tuple[int, ...]
    request_id: str  # who brought `there`
    cause: str
    here_text: str = ""
    there_text: str = ""
    alike: int = 0  # tokens that agree again behind the difference, as far as we look

    def __str__(self) -> str:
        texts = [self.here_text, self.there_text]
        one, other = (
            f"{ids[0]} ({text!r})" if text else f"{ids[0]}"
            for ids, text in zip((self.here, self.there), texts, strict=True)
        )
        near = f"{other} in the nearest known prompt, of request {self.request_id}"
        return f"token {self.position} is {one} here and {near}: {self.cause}"


STEPS = {  # where the search for a reason ends (S16), and what is said there
    "different": (1, "{parting}"),
    "new": (0, "no known prompt has the next page{where}"),
    "evicted": (2, "the next {missed} were known; request {who} took their pages{ago}"),
    "unpublished": (2, "request {who} has the next {missed}, unpublished ({detail})"),
    "unfinished": (2, "request {who} was to compute the next {missed}: {detail}{ago}"),
    "other key": (2, "the next {missed} are known under another extra_key"),
    "forgotten": (2, "what became of the next ones is not known (forgotten)"),
    "reset": (3, "the next {missed} were known; the cache was reset{ago}"),
    "lost": (3, "the next {missed} were known; the engine had to start over{ago}"),
    "no whole page": (0, "the other {rest} fill no page"),
    "all": (0, "all but the last, which is always computed"),
    "scored": (0, "prompt_logprobs are computed and not looked up"),
    "no index": (0, "there is no index"),
    "not admitted": (0, "it never ran"),
}
UNSURE = ("different", "new", "other key")  # if something was forgotten
LATE = {
    "budget": "the steps were full",
    "seats": "all seats were taken",
    "pages": "pages were short",
    "reserve": "pages were promised to others",
    "preemption": "pages were short, and others preempted",
    "grouping": "others were put before it",
    "wait": "it waited for pages that others compute",
}


@dataclass(frozen=True)
class Reuse:
    """How much of a prompt was reused at its first admission, and why no more.

    prompt = cached + missed + unaligned + new + 1 tokens: `missed` were known in whole
    pages and not to be found, `unaligned` known and no whole page, `new` lie behind all
    that is remembered; the last one is always computed. `why` answers for the first
    page that was not found, in words of `STEPS`; `step` is where the search ended: the
    ids (1), the index (2), the memory (3), and 4 if all was well and it came late.
    """

    prompt_tokens: int
    cached_tokens: int
    why: str
    missed_tokens: int = 0
    unaligned_tokens: int = 0
    new_tokens: int = 0
    parting: Parting | None = None
    who: str = ""  # the request that `why` is about
    detail: str = ""
    ago_s: float | None = None
    remembers_s: float | None = None  # so far back memory is complete; None: all
    leader: str | None = None  # of the flight that it waited for
    held_s: float = 0.0  # for so long
    queued_s: float = 0.0  # from then, or from the beginning, to its admission
    late: str | None = None  # the reason of most steps that did not admit it
    saved_s: float = 0.0  # what its cached tokens would have taken, about

    @property
    def verdict(self) -> str:
        """One of: hit, hit without benefit, missed, nothing to find."""
        if self.cached_tokens:
            gained = self.late is None or self.saved_s > self.queued_s
            return "hit" if gained else "hit without benefit"
        return "missed" if STEPS[self.why][0] else "nothing to find"

    @property
    def step(self) -> int:
        """Where the search for the reason ended: 1 to 4, or 0 if nothing was wrong."""
        return 4 if self.verdict == "hit without benefit" else STEPS[self.why][0]

    def __str__(self) -> str:
        head = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens reused"
        return "; ".join([f"{head} ({self.verdict}): {self._reason()}", *self._waits()])

    def _reason(self) -> str:
        ago = "" if self.ago_s is None else f", {self.ago_s:.2f} s ago"
        rest = self.prompt_tokens - self.cached_tokens
        missed = self.missed_tokens
        where = f": {self.parting}" if self.parting else ""
        words = STEPS[self.why][1].format(**vars(self) | locals())
        if self.why in UNSURE and self.remembers_s is not None:
            back = f"memory reaches back {self.remembers_s:.2f} s"
            words += f" (a nearer one may be forgotten: {back})"
        return words

    def _waits(self) -> list[str]:
        waits = []
        if self.leader is not None:
            waits.append(f"it waited {self.held_s:.2f} s for request {self.leader}")
        if self.late:
            words = f"it was admitted after {self.queued_s:.2f} s: {LATE[self.late]}"
            saved = f", and the hit saved about {self.saved_s:.2f} s"
            waits.append(words + saved * (self.cached_tokens > 0))
        return waits


GRAM = 8  # tokens that must agree before two prompts are said to go on alike
MOST = 48  # tokens of a difference, behind which to look


def resume(here: Sequence[int], there: Sequence[int]) -> tuple[int, int, int] | None:
    """How many tokens of either to skip so that both go on alike, and how long."""
    ends = range(GRAM, len(there) + 1)
    places = {tuple(there[end - GRAM : end]): end - GRAM for end in reversed(ends)}
    grams = ((i, tuple(here[i : i + GRAM])) for i in range(len(here) - GRAM + 1))
    found = ((i + places[gram], i, places[gram]) for i, gram in grams if gram in places)
    if not (nearest := min(found, default=None)):
        return None
    _, i, j = nearest
    pairs = zip(here[i:], there[j:], strict=False)
    return i, j, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def lost_tokens(reach: int, alike: int, cached: int, page: int, size: int) -> int:
    """What one difference keeps from a prompt of `size` tokens, in whole pages.

    Two prompts agree for `reach` tokens; without the difference `alike` more.
    """
    without = min((reach + alike) // page * page, size - 1)
    return max(0, without - max(cached, reach // page * page))


Decode = Callable[[Sequence[int]], str]
AT_START = {
    (1, 0): "a token too many at the start, as a BOS",
    (0, 1): "a token too few at the start, as a BOS",
}
OTHER_TEXT = "other text"


def guess(position: int, gap: tuple[int, int] | None, one: str, other: str) -> str:
    """The likely cause, from what stands in one prompt and not in the other."""
    if gap is None:
        return OTHER_TEXT
    if position < 2 and gap in AT_START:
        return AT_START[gap]
    if one + other and one.split() == other.split():
        return "white space"
    numbers = (not text or any(map(str.isdigit, text)) for text in (one, other))
    if one + other and all(numbers):
        return "a number that changes, as a time or a counter"
    return "text put in or left out" if 0 in gap else "a value that changes"


def part(ids: array[int], near: Nearest, decode: Decode, look: int = LOOK) -> Parting:
    """Describe where a prompt leaves the nearest known one."""
    position, there = near.length, near.there
    here = tuple(ids[position : position + look])
    i, j, alike = resume(here, there) or (1, 1, 0)
    shown = decode(here[: i or 1]), decode(there[: j or 1])
    gap = (i, j) if alike else None
    cause = guess(position, gap, decode(here[:i]), decode(there[:j]))
    sides = here[:LOOK], there[:LOOK]
    return Parting(position, *sides, near.request_id, cause, *shown, alike)


def no_text(token_ids: Sequence[int]) -> str:
    """There is no tokenizer."""
    return ""


MAX_KEYS = 8  # extra keys to look under, the last used


class Explainer:
    """An observer that can say why a request found what it found, and no more.

    Remembers the last `num_tokens` tokens that ran, unless told otherwise twice what
    the pages hold, and as many pages that are gone as these would fill.
    """

    def __init__(
        self,
        engine: Engine,
        publish: str = "",
        decode: Decode = no_text,
        num_tokens: int | None = None,
    ) -> None:
        cache = engine.scheduler.cache
        self.scheduler, self.clock = engine.scheduler, engine.clock
        self.publish = publish and f", publish={publish}"
        self.decode = decode
        self.page_size = cache.page_size
        self.look = MOST + max(GRAM, cache.page_size)
        num_tokens = num_tokens or 2 * cache.pool.num_pages * cache.page_size
        self.history = History(num_tokens)
        self.pages = Pages(num_tokens // cache.page_size)
        self._keys: OrderedDict[ExtraKey, None] = OrderedDict()
        self._queued: dict[str, Queued] = {}
        self._running: dict[str, Watch] = {}
        self._reports: WeakKeyDictionary[RequestState, Reuse] = WeakKeyDictionary()
        self._refusals: Counter[str] = Counter()
        self._refused = ""  # why nobody more was admitted in this step
        self._step: tuple[float, int] | None = None  # begun when, with how many tokens
        self._pace = [0.0, 0.0]  # seconds and tokens of steps that computed prompts

    def __call__(self, kind: str, /, **details: Any) -> None:
        """Take note of an event."""
        if handler := getattr(self, f"_on_{kind.replace(' ', '_')}", None):
            handler(**details)

    def _on_submit(self, request_id: str, held: bool, **_: object) -> None:
        if not held:
            self._queue(request_id, None)

    def _on_release(self, request_ids: Sequence[str], leader: str) -> None:
        for request_id in request_ids:
            self._queue(request_id, leader)

    def _queue(self, request_id: str, leader: str | None) -> None:
        queued = Queued(self.clock.now(), leader, self._refusals.copy())
        self._queued[request_id] = queued

    def _on_wait(self, request_id: str) -> None:
        if request_id in self._queued:
            self._queued[request_id].num_waits += 1

    def _on_refuse(self, why: str) -> None:
        self._refused = why

    def _on_schedule(self, chunks: Sequence[tuple[str, int, int]]) -> None:
        scheduler, sizes = self.scheduler, [size for _, _, size in chunks]
        if scheduler.waiting:
            full = sum(sizes) >= scheduler.max_batch_tokens
            seated = len(scheduler.running) >= scheduler.max_running
            seen = "budget" if full else "seats" if seated else "grouping"
            self._refusals[self._refused or seen] += 1
        self._refused = ""
        if max(sizes, default=0) > 1:
            self._step = (self.clock.now(), sum(sizes))

    def _on_step(self, **_: int) -> None:
        if self._step is None:
            return
        (start_s, num_tokens), self._step = self._step, None
        seconds, tokens = self._pace
        keep = 0.5 if tokens > 1e5 else 1.0  # so that it follows a change
        passed = self.clock.now() - start_s
        self._pace = [keep * seconds + passed, keep * tokens + num_tokens]

    def _on_publish(self, pages: Sequence[int], owner: str) -> None:
        if watch := self._running.get(owner):
            self._learn(watch)
            lease = watch.state.lease
            assert lease is not None
            watch.num_shown = end = lease.num_shared
            self.pages.show(pages, watch.names[end - len(pages) : end])

    def _on_evict(self, pages: Sequence[int], owner: str) -> None:
        fate = Fate("evicted" if owner else "reset", self.clock.now(), owner)
        self.pages.lose(pages, fate)

    def _on_finish(self, request_id: str, reason: str = "it was preempted") -> None:
        self._queued.pop(request_id, None)
        if watch := self._running.pop(request_id, None):
            self._learn(watch, complete=True)
            fate = Fate("unfinished", self.clock.now(), request_id, reason)
            self.pages.bury(watch.names[watch.num_shown :], fate)

    _on_preempt = _on_finish

    def _on_start_over(self) -> None:
        if not self.history.whole:
            self.history = History(self.history.num_tokens)
            self.history.forgot = int(self.clock.now() * 1e6)
        fate = Fate("lost", self.clock.now())
        self.pages.lose_all(fate)
        for watch in self._running.values():
            self._learn(watch, complete=True)
            self.pages.bury(watch.names, fate)
        self._running, self._queued = {}, {}

    def _learn(self, watch: Watch, complete: bool = False) -> None:
        """Remember what a running request has got to, if that fills a page more."""
        state, num_known = watch.state, len(watch.names)
        if complete or len(state.tokens) // self.page_size > num_known:
            request, tokens = state.request, state.tokens
            key, now_s = request.extra_key, self.clock.now()
            watch.names = extend_hashes(watch.names, tokens, self.page_size, key)
            self.history.note(tokens, key, request.arrival, now_s)

    def _on_admit(self, request_id: str, cached: int) -> None:
        states = reversed(self.scheduler.running)
        state = next(s for s in states if s.request.request_id == request_id)
        key, lease = state.request.extra_key, state.lease
        assert lease is not None
        for other in self._running.values():
            self._learn(other)
        names = extend_hashes([], state.tokens, self.page_size, key)
        if state.num_cached_tokens is None:  # else it comes back, and finds itself
            self._reports[state] = self._report(state, cached, names)
        self._running[request_id] = watch = Watch(state, names, lease.num_shared)
        self._learn(watch, complete=True)
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def report(self, state: RequestState) -> Reuse:
        """What there is to say about a request."""
        if report := self._reports.get(state):
            return report
        blind = isinstance(self.scheduler.cache.index, NoIndex)
        size = len(state.request.prompt_token_ids)
        return Reuse(size, 0, "no index" if blind else "not admitted")

    def _report(self, state: RequestState, cached: int, names: list[bytes]) -> Reuse:
        ids, most = state.tokens, len(state.tokens) - 1
        near = self.history.nearest(ids, state.request.extra_key, self.look)
        fate, num_known = self._why(state, cached, names, near)
        parting = self._parting(ids, near) if fate.why == "new" else None
        whole = max(cached, min(num_known // self.page_size * self.page_size, most))
        known = max(whole, min(num_known, most))
        return Reuse(
            prompt_tokens=len(ids),
            cached_tokens=cached,
            why="different" if self._costs(parting, cached, len(ids)) else fate.why,
            missed_tokens=whole - cached,
            unaligned_tokens=known - whole,
            new_tokens=most - known,
            parting=parting,
            who=fate.who,
            detail=fate.detail,
            ago_s=self._ago(fate.at_s),
            remembers_s=self._ago(self.history.forgot / 1e6 or None),
            saved_s=cached * self._pace[0] / max(1.0, self._pace[1]),
            **self._waits(state),
        )

    def _parting(self, ids: array[int], near: Nearest) -> Parting | None:
        """Where it leaves a known prompt, if it has anything in common with one."""
        parting = part(ids, near, self.decode, self.look) if near.there else None
        return parting if parting and (near.length or parting.alike) else None

    def _costs(self, parting: Parting | None, cached: int, size: int) -> bool:
        """Whether a difference keeps a page from a prompt of this size."""
        if parting is None:
            return False
        reach, alike = parting.position, parting.alike
        return lost_tokens(reach, alike, cached, self.page_size, size) > 0

    def _ago(self, at_s: float | None) -> float | None:
        return None if at_s is None else max(0.0, self.clock.now() - at_s)

    def _why(
        self, state: RequestState, cached: int, names: list[bytes], near: Nearest
    ) -> tuple[Fate, int]:
        """What keeps a request from one page more; how many of its tokens are known."""
        size, num_pages = self.page_size, cached // self.page_size
        known = max(cached, near.length)
        if cached == len(state.tokens) - 1:
            return Fate("all"), known
        if not state.sought:
            return Fate("scored"), cached
        if num_pages == len(names):
            return Fate("no whole page"), known
        if found := self._fate(names[num_pages:], num_pages):
            return found[0], max(known, cached + found[1] * size)
        if near.length >= cached + size or near.length < cached:
            return Fate("forgotten"), known
        elsewhere = self._elsewhere(state)
        if elsewhere >= cached + size:
            return Fate("other key"), elsewhere
        return Fate("new"), known

    def _fate(self, names: list[bytes], page: int) -> tuple[Fate, int] | None:
        """What became of the first of these pages, and of how many that is known."""
        for request_id, watch in self._running.items():
            if watch.names[page : page + 1] == names[:1]:
                stage = "prefill" if in_prompt(watch.state) else "decode"
                detail = f"in {stage}" + self.publish
                same = takewhile(set(watch.names).__contains__, names)
                return Fate("unpublished", None, request_id, detail), len([*same])
        if fate := self.pages.fates.get(names[0]):
            same = takewhile(self.pages.fates.__contains__, names)
            return fate, len([*same])
        return None

    def _elsewhere(self, state: RequestState) -> int:
        """Tokens of a prompt that are known under another key."""
        others = self._keys.keys() - {state.request.extra_key}
        find = self.history.match_prefix
        found = (find(state.tokens, key).matched_len for key in others)
        return max(found, default=0)

    def _waits(self, state: RequestState) -> dict[str, Any]:
        """How long a request waited, for whom, and what for."""
        queued = self._queued.pop(state.request.request_id, None)
        if queued is None:
            return {}
        reasons = self._refusals - queued.refusals
        num_steps = reasons.total()
        late = max(LATE, key=lambda why: reasons[why]) if num_steps else None
        if num_steps and 2 * state.num_passed >= num_steps:
            late = "grouping"
        if num_steps and 2 * queued.num_waits >= num_steps:
            late = "wait"
        held_s = queued.since_s - state.request.arrival_s if queued.leader else 0.0
        queued_s = self.clock.now() - queued.since_s
        waits = {"leader": queued.leader, "held_s": held_s}
        return waits | {"queued_s": queued_s, "late": late}

    def attach(self, engine: Engine) -> None:
        """Hear what an engine does, and tell its outputs."""
        engine.explain = self.report
        if not isinstance(self.scheduler.cache.index, NoIndex):
            for owner in (engine, engine.scheduler, engine.scheduler.cache):
                owner.observer = both(owner.observer, self)


def explain(
    engine: Engine,
    publish: str = "",
    decode: Decode = no_text,
    num_tokens: int | None = None,
) -> Explainer:
    """Let an engine's outputs say why so much was reused: in their `reuse`.

    `publish` is the name of its publication policy, `decode` makes text of token ids.
    """
    explainer = Explainer(engine, publish, decode, num_tokens)
    explainer.attach(engine)
    return explainer
