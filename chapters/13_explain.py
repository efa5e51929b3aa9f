# %% [markdown]
# # 13. Missed, or hit without benefit?
#
# A museum's guide answers visitors. Its prompt is 493 tokens long, and somebody has asked it
# before, so the prefix cache has 480 of them. Four other visitors are being answered. Then the
# question comes again. Does the hit help?
#
# The machine is the simulated GPU of [chapter 8](08_simulation.md), with four seats. A token is a
# byte here, so that we can read what a prompt says. The explainer is borrowed from the package
# until it is built below.

# %% tags=["hide-input"]
import random
from collections import Counter
from collections.abc import Iterator

from minivllm.drawing import draw_rows
from minivllm.engine import Engine, Limits, PublishAtFinish, PublishEachStep
from minivllm.explain import explain as ready_explain
from minivllm.prefix_cache import PrefixCache
from minivllm.request import RequestOutput, SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.simulation import (
    Arrival,
    Arrivals,
    SerialPrefill,
    SimulatedRunner,
    VirtualClock,
    simulate,
)

PAGE, VOCAB = 16, 256
A_GPU = SerialPrefill(chunk_s=0.002, token_s=0.0004, decode_s=0.02, k=0.1)
PUBLISHERS = {"step": PublishEachStep, "finish": PublishAtFinish}


def ids(text: str) -> list[int]:
    return list(text.encode())


def text_of(token_ids) -> str:
    return bytes(token_ids).decode(errors="replace")


def make_engine(
    num_pages=400, publish="step", eviction="lru", runner=SimulatedRunner, **options
):
    clock = VirtualClock()
    cache = PrefixCache(num_pages, PAGE, eviction=eviction)
    scheduler = Scheduler(cache, **options)
    machine = runner(A_GPU, clock, VOCAB, num_pages, PAGE)
    limits, publisher = Limits(VOCAB, 4_096), PUBLISHERS[publish]()
    return Engine(machine, scheduler, limits, publisher=publisher, clock=clock)


def visit(time_s: float, text: str, max_tokens: int = 8, key=None) -> Arrival:
    return Arrival(time_s, ids(text), SamplingParams(max_tokens=max_tokens), key)


def serve(engine: Engine, *visits: Arrival) -> list[RequestOutput]:
    """What came of them, in the order of their numbers."""
    ended = [o for _, o in simulate(engine, engine.clock, Arrivals(visits))]
    return sorted(ended, key=lambda output: int(output.request_id))


# %% name="opening"
GUIDE = ("You are the guide of a small museum. Answer in one sentence. " * 8)[:480]
QUESTION = GUIDE + "When do open?"
chats = [visit(1.0, letter * 200, 200) for letter in "abcd"]

engine = make_engine(max_running=4)
ready_explain(engine, "step", text_of)
answers = serve(engine, visit(0.0, QUESTION), *chats, visit(2.0, QUESTION))
for output in (answers[0], answers[-1]):
    size, cached = len(output.prompt_token_ids), output.num_cached_tokens
    print(f"{cached} of {size} tokens cached, TTFT {output.metrics.ttft_s:.2f} s")

# %% [markdown]
# The first visitor, who found [0](#opening) tokens, had the first word after [0.20](#opening) s.
# The one who found [480](#opening) of [493](#opening) had it after [4.51](#opening) s. The hit
# rate of this service looks excellent. Its visitors complain.
#
# Here is where those seconds went:


# %% tags=["hide-input"]
def life(output: RequestOutput) -> Iterator[tuple[float, float, str, str]]:
    metrics, reuse = output.metrics, output.reuse
    begun, first = metrics.arrival_s + reuse.queued_s, metrics.first_token_s
    if reuse.queued_s > 0.1:
        yield metrics.arrival_s, reuse.queued_s, "free", "waits"
    yield begun, first - begun, "computed", ""
    yield first, metrics.finished_s - first, "decoded", ""


names = ["first, 0 cached", *("a long chat" for _ in chats), "again, 480 cached"]
draw_rows(
    [(name, list(life(output))) for name, output in zip(names, answers, strict=True)],
    caption="Six requests over time. Indigo: the prompt is computed; behind it: the answer. The last "
    "one needs almost no computing, and waits until a chat gives up its seat.",
)

# %% [markdown]
# Nothing is wrong with the cache. When the request was admitted, it found its pages. But it had waited
# for a seat: it *hit without benefit*. In a dashboard, this and a *miss* look alike: equal prompts, slow first
# tokens. They call for opposite repairs. More seats do nothing for a prompt that begins with
# another token, and the best prompt template does nothing for a queue.
#
# ## Look at admission last
#
# Because the symptom is a wait, the first thing that one looks at is whoever makes requests wait:
# the scheduler, its budget, its limits. That is the wrong end. A prefix helps only if four
# things hold, and each is worth asking only when the one before it holds:
#
# 1. Are the token ids equal? Equal *text* is not enough, and a template's date is a new prompt.
# 2. Does the index know the prefix now? It may have been evicted, or not be published yet.
# 3. Are the pages that it named still good, or was the memory reset under them?
# 4. Was the request admitted in time to use them?
#
# The first three decide *how much* is found, the fourth whether it helps. Four services, each with
# one fault planted in it. In which of them does it help to double the seats, or the budget of a step?

# %% name="planted"
OTHERS = [(ch * 40 + GUIDE)[:480] + "?" * 13 for ch in "ABC"]


def moving_timestamp(**options):
    clock = "It is 09:41:{:02} now. " + QUESTION
    visits = [visit(i, clock.format(7 + i)) for i in range(2)]
    return make_engine(**options), visits


def pool_too_small(**options):
    visits = [visit(i, text) for i, text in enumerate([QUESTION, *OTHERS, QUESTION])]
    return make_engine(num_pages=64, **options), visits


def late_publication(**options):
    visits = [visit(0, QUESTION, 300), visit(1, QUESTION)]
    return make_engine(publish="finish", **options), visits


def no_admission(**options):
    visits = [visit(0.0, QUESTION), *chats, visit(2.0, QUESTION)]
    return make_engine(**options), visits


FAULTS = [moving_timestamp, pool_too_small, late_publication, no_admission]
USUAL = {"max_running": 4, "max_batch_tokens": 512}
for fault in FAULTS:
    print(f"{fault.__name__:17}", end="")
    for more in ({}, {"max_running": 8}, {"max_batch_tokens": 1_024}):
        engine, visits = fault(**USUAL | more)
        last = serve(engine, *visits)[-1]
        print(
            f"{last.num_cached_tokens:5} cached {last.metrics.ttft_s:.2f} s", end=" |"
        )
    print()

# %% [markdown]
# Only in the last one, and there only seats help: from [4.53](#planted) s to [0.04](#planted). In
# the other three [0](#planted) tokens are cached whatever one does to admission, and the first
# token comes hardly sooner. Three times out of four the hours would have gone into the wrong part. (And
# chapter 3's advice was the same: when a prefix hits now and then, print the tree.)
#
# An engine knows all four answers at the moment when it admits a request. It only does not tell.
# So let it write them down.
#
# ## The naive twin keeps everything
#
# Question 1 needs the prompts that were there before. Suppose that we keep them all. Then the
# nearest one is a loop away:


# %% name="twin"
def common(one: list[int], other: list[int]) -> int:
    """Tokens that two sequences have in common from the start."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


everything = [ids("It is 09:41:07 now. " + QUESTION), *map(ids, OTHERS)]
asked = ids("It is 09:41:08 now. " + QUESTION)
nearest = max(everything, key=lambda known: common(known, asked))
i = common(nearest, asked)
print(f"they part at token {i}: {text_of(asked[:i])!r} goes on with", end=" ")
print(f"{text_of(asked[i : i + 1])!r} here and {text_of(nearest[i : i + 1])!r} there")

# %% [markdown]
# There is the fault, by name: at token [13](#twin) the clock says 8 and said 7. But this twin
# compares with each prompt that ever was, and forgets none. With 100,000 requests of 500 tokens it
# reads fifty million tokens to explain one. We need a structure that finds the longest common
# prefix in one walk, stores a shared beginning once, and drops what nobody has used for long.
#
# We have built that one already. It is the tree of [chapter 3](03_radix.md), with pages of *one*
# token: then a match ends not at a page's border but at the very token where two prompts part. Its
# eviction is the forgetting. And each token of the tree has a place, an int that there said where
# the K/V lie; here it says which request brought the token.

# %% export="explain.py"
"""Why so many prompt tokens were reused, and no more: an answer for each request."""

from array import array
from typing import NamedTuple

from minivllm.radix import Node, RadixCache, Slots
from minivllm.request import ExtraKey

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

    def note(self, ids: "array[int]", key: ExtraKey, number: int, now_s: float) -> None:
        """Remember a sequence of request `number`: that is the place of its tokens."""
        self.whole = False
        self._clock = max(self._clock, int(now_s * 1e6))
        self.insert(ids, Slots(array("i", [number]) * len(ids), 1), key)
        self.evict_pages(self.total_size - self.num_tokens)
        self.whole = True

    def _trim(self, leaf: Node, num_pages: int) -> None:
        self.forgot = max(self.forgot, leaf.last_access)
        super()._trim(leaf, num_pages)

    def nearest(self, ids: "array[int]", key: ExtraKey, look: int = LOOK) -> Nearest:
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


# %% [markdown]
# `nearest` walks down as far as the prompt agrees. From there it collects how the known prompt
# goes on. Where several do, it takes the latest. With one exception: a branch that begins with our prompt's
# token after the one at which they part. Then our prompt has one token too many, and that branch shows it.
#
# What is forgotten must not be mistaken for what never was. The tree drops the least recently used
# first, and `forgot` keeps the last use of anything dropped. So a claim like "nothing nearer was
# known" carries its date: it holds for all that was used after `forgot`. For that the tree's clock,
# which counts operations in chapter 3, counts microseconds.

# %% name="history"
from array import array

history = History(num_tokens=2_100)
for number, prompt in enumerate([*everything, asked]):
    near = history.nearest(array("i", prompt), None)
    there = text_of(near.there)
    print(
        f"request {number}: {near.length:3} tokens are known; there goes on {there!r}"
    )
    history.note(array("i", prompt), None, number, now_s=float(number))
print(f"{history.total_size} tokens, complete since {history.forgot / 1e6:.2f} s")

# %% tags=["hide-input"]
from minivllm.drawing import Branch, draw_tree


def branch(node: Node) -> Branch:
    tokens, who = memoryview(node.key).cast("i").tolist(), node.places[0]
    words = f"{text_of(tokens[:13])} … ({len(tokens)} tokens, request {who})"
    return Branch(words, "plain", [branch(child) for child in node.children.values()])


tops = [node for node in history.nodes() if node.parent.parent is None]
draw_tree(
    Branch("all that is remembered", "free", [branch(node) for node in tops]),
    caption="The history after five prompts. Where two of them part, the tree forks: there the "
    "clock goes from 7 to 8. Of request 0 only a beginning is left.",
)

# %% [markdown]
# Request 4 parts from request 0 at token [13](#history). There is room for [2100](#history) tokens,
# so a tail had to go, that of request 0, which nobody had used since [0.00](#history) s. Whatever
# was used later is whole.
#
# ## What became of a page
#
# If the ids are equal and yet nothing was found, question 2 begins. The tree above says that a
# prefix *was* there; now we want to know what became of its first missing page. A page has a name
# that stands for everything up to it ([chapter 2](02_hashing.md)), and its life is told to
# observers ([chapter 4](04_pages.md)): published, evicted, and by whom. A page that is published
# needs no fate, for the index would have found it. (Its name is kept, to know which prefix is gone when the page
# goes.) A page that a running request is about to
# fill needs none either, for that request can be asked. So only the *ghosts* need one: names of
# pages that were known and cannot be found any more, with their fate.

# %% export="explain.py"
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.scheduler import RequestState


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


# %% [markdown]
# This is bounded twice. There are never more names than pages, and never more fates than
# `num_fates`. A prefix that is published again loses its fate. One that is evicted again gets a
# new one and goes to the end of the queue.

# %% name="fates"
from minivllm.hashing import page_hashes

guide, other = page_hashes(ids(GUIDE), PAGE), page_hashes(ids(OTHERS[0]), PAGE)
pages = Pages(num_fates=40)
pages.show(range(30), guide)
pages.lose(range(30), Fate("evicted", at_s=3.0, who="7"))
print("the guide's first page:", pages.fates.get(guide[0]))
pages.show(range(30), other)
pages.lose(range(29, -1, -1), Fate("evicted", at_s=9.0, who="8"))  # tails go first
remembered = [sum(name in pages.fates for name in names) for names in (guide, other)]
print("ghosts that are left of each:", remembered)

# %% [markdown]
# Of the older thirty [10](#fates) ghosts are left. Ask for one of the other twenty, and the honest
# answer is *forgotten*.
#
# ## Why it came late
#
# Question 4 is about steps. In each step that leaves somebody waiting there is one reason why
# nobody more was admitted: no seat, no budget, no page, a promise to others, a preemption. To
# write that reason beside each of a thousand waiting requests would cost a thousand writes a step.
# But the reasons are the same for all who wait. So we count them once, for everybody, and let a
# request remember what the counters said when it joined the queue. What it waited for is the
# difference.

# %% export="explain.py"
from collections import Counter


@dataclass
class Queued:
    """A request that may be admitted, and how often nobody was so far, by reason."""

    since_s: float
    leader: str | None
    refusals: Counter[str]
    num_waits: int = 0  # steps in which it waited for another one's pages


# %% [markdown]
# Followers of a flight ([chapter 10](10_single_flight.md)) join the queue when they are released;
# until then they wait for their leader, and that is another wait.
#
# ## What there is to say
#
# Now the report. Where two prompts part, it shows the tokens of both, as text if there is a
# tokenizer.


# %% export="explain.py"
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


# %% [markdown]
# (It shows a token of somebody else's prompt, though only of prompts under the same `extra_key`, which
# keeps tenants apart. And that a prompt is known under *another* key tells one tenant what another has
# sent. The report is for who runs the engine; a server must not hand it to a client as it is.)
#
# Each answer to *why not one page more?* belongs to question 1, 2 or 3, or, with 0, to none: a page that is
# not full, a text that is new, or a prompt that was never looked up is no fault. Question 4 has a verdict of its own.

# %% export="explain.py"
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


# %% [markdown]
# The numbers must add up, so that no token is explained twice or not at all. A prompt is what was
# cached, what was missed, what was known and fills no page, what is new, and one token that is
# always computed. And the verdict: a hit is *without benefit* if its request was refused in some
# step and then waited longer than the hit saved.


# %% export="explain.py"
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


# %% [markdown]
# What a hit saves is an estimate, tokens times the seconds that a token has been taking in steps
# that compute prompts. Time spent behind a leader is not counted against the hit: there, the wait
# *is* how the hit comes about.


# %% export="explain.py"
class Reuse(Reuse):
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


# %% [markdown]
# ## Another text, or a fault?
#
# The two tokens say that the prompts differ. Is that a fault? Two visitors ask two questions, and
# nobody wants them to be equal. And any two prompts agree in *something*: they begin with the same
# BOS and the same opening of a template, and so the nearest one is never quite unlike.
#
# A difference is a fault if it costs a page: if the cache would have found one more without it.
# To know that, look where both prompts go on alike again, for eight tokens at least, since fewer
# agree by chance. Up to the difference they have `reach` tokens in common and behind it `alike`
# more. Without it the common prefix would be as long as both together. What that holds in whole
# pages, less what was found anyway, is what the difference costs. If it costs nothing, the rest is
# another text, and there was nothing to find.

# %% export="explain.py"
from itertools import takewhile

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


# %% name="costs"
for reach, alike in ((13, 480), (1, 300), (13, 8), (1, 0), (20, 9)):
    lost = lost_tokens(reach, alike, reach // PAGE * PAGE, PAGE, size=513)
    print(f"{reach:2} tokens, a difference, {alike:3} tokens: it costs {lost}")

# %% [markdown]
# The clock of our guide is the first line. The second is a BOS too many: one token, and it costs
# [288](#costs). The fourth is what two unrelated prompts have in common.
#
# The likely cause is in what stands in the difference. If what changes are digits, it is a time or
# a counter; if only blanks differ, somebody edited the template; if one has a token more at the
# very start, it was encoded with a BOS and the other without.

# %% export="explain.py"
from collections.abc import Callable

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


def part(ids: "array[int]", near: Nearest, decode: Decode, look: int = LOOK) -> Parting:
    """Describe where a prompt leaves the nearest known one."""
    position, there = near.length, near.there
    here = tuple(ids[position : position + look])
    i, j, alike = resume(here, there) or (1, 1, 0)
    shown = decode(here[: i or 1]), decode(there[: j or 1])
    gap = (i, j) if alike else None
    cause = guess(position, gap, decode(here[:i]), decode(there[:j]))
    sides = here[:LOOK], there[:LOOK]
    return Parting(position, *sides, near.request_id, cause, *shown, alike)


# %% name="guesses"
for one, other in (
    ("<You are a guide.", "You are a guide."),
    ("Visitor 1041 asks: when", "Visitor 38 asks: when"),
    ("You are  a guide.", "You are a guide."),
    ("Dear Ann, welcome to us", "Dear Oskar, welcome to us"),
    ("When do you open?", "Is there a lift?"),
):
    i = common(ids(one), ids(other))
    near = Nearest(i, tuple(ids(other)[i:]))
    print(f"{part(array('i', ids(one)), near, text_of, 64).cause:46} {one!r}")

# %% [markdown]
# Guesses, from the tokens of one difference. The last pair is two different questions, and nothing
# is wrong. A difference of more than 48 tokens is taken for another text as well; who suspects a
# longer one asks [chapter 17](17_log.md), which reads whole prompts.
#
# ## The explainer
#
# It is an observer: the engine tells it what happens, it never asks the engine for anything that
# costs. Who owns what: the history knows tokens, `Pages` knows names, `_queued` has an entry for
# each request in the queue and `_running` one for each that runs. Reports live as long as the
# scheduler's state of their request, and go with it.

# %% export="explain.py"
from typing import Any
from weakref import WeakKeyDictionary

from minivllm.engine import Engine
from minivllm.events import both
from minivllm.hashing import extend_hashes
from minivllm.prefix_cache import NoIndex
from minivllm.single_flight import in_prompt


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


# %% [markdown]
# The queue. A step that ends with somebody waiting counts one reason. A refusal for pages is an
# event of its own; a full step and full seats can be seen; and if there was room for more, it was
# the grouping ([chapter 12](12_grouping.md)) that offered nobody.


# %% export="explain.py"
class Explainer(Explainer):
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


# %% [markdown]
# The pages. What a request had not published when it ended or gave way is a fate too: it was
# *going* to be there. If the engine must start over ([chapter 7](07_engine.md)), every page is
# lost, and a history that was being changed at that moment is not trusted any more either.


# %% export="explain.py"
class Explainer(Explainer):
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


# %% [markdown]
# What is known of a running request? Its prompt, from its admission on; its answer page by page;
# all of it at its end.


# %% export="explain.py"
class Explainer(Explainer):
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


# %% [markdown]
# The admission is the moment of truth, because that is where a prefix is looked up (chapter 7). A
# request that comes back from a preemption gets no second report: it finds its own pages, and
# that is no reuse.


# %% export="explain.py"
class Explainer(Explainer):
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

    def _parting(self, ids: "array[int]", near: Nearest) -> Parting | None:
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


# %% [markdown]
# And the search itself. It asks for the page's fate first, and a reset or a lost memory is one of the fates. If
# the page has none, and no other key has it, the ids differ.


# %% export="explain.py"
class Explainer(Explainer):
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


# %% [markdown]
# At last the wait. If somebody who came later was admitted first in half of the steps, it was the
# grouping that let this one wait, whatever those steps were full of.


# %% export="explain.py"
class Explainer(Explainer):
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


# %% [markdown]
# It hangs on to an engine without the engine knowing. Another observer that was there goes on
# hearing everything.


# %% export="explain.py"
class Explainer(Explainer):
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


# %% [markdown]
# ## Four faults, named
#
# The same four services again, now with the explainer that we have built:


# %% name="named" claims="S14 S16"
def explained(engine: Engine, *visits: Arrival, publish="step") -> list[RequestOutput]:
    explain(engine, publish, text_of)
    return serve(engine, *visits)


last_of = {}
for fault in FAULTS:
    engine, visits = fault(**USUAL)
    publish = "finish" if fault is late_publication else "step"
    last_of[fault] = reuse = explained(engine, *visits, publish=publish)[-1].reuse
    print(f"{fault.__name__}, question {reuse.step}:\n   {reuse}")
assert [reuse.step for reuse in last_of.values()] == [1, 2, 2, 4]

# %% [markdown]
# The clock in the system prompt costs the whole guide behind it: they part at token 13, and
# [0](#named) tokens are reused. The pool had the prefix and gave its pages to request 3. With
# publication at the end, request 0 had computed it all, and nobody could see it. And of the opening
# it says what we saw in the picture: [480](#named) tokens found, worth about [0.20](#named) s, and
# [4.50](#named) s in the queue.
#
# How the 493 or 513 tokens of each divide:

# %% tags=["hide-input"]
SHADES = {
    "cached": ("cached_tokens", "published"),
    "missed": ("missed_tokens", "lost"),
    "no page": ("unaligned_tokens", "private"),
    "new": ("new_tokens", "computed"),
}


def bar(reuse) -> Iterator[tuple[float, float, str, str]]:
    start = 0
    for words, (field, shade) in SHADES.items():
        if size := getattr(reuse, field):
            label = f"{words} {size}" if size > 60 else str(size) if size > 25 else ""
            yield start, size, shade, label
            start += size
    yield start, 1, "decoded", ""


draw_rows(
    [(fault.__name__.replace("_", " "), list(bar(r))) for fault, r in last_of.items()],
    caption="The prompt of the last request of each service. Green was found, red was known and "
    "not to be found, orange fills no page, indigo is new. Red is question 2 or 3, nearly all "
    "indigo is question 1. Nearly all green and still late is question 4: then one looks at admission.",
)

# %% [markdown]
# ## Three symptoms
#
# Reuse that fails shows itself in three ways, and each has more than one cause.
#
# **Equal prefixes, and no speed-up.** Two visitors with one prompt come together. Nobody has
# computed it yet when the second one is looked up:

# %% name="together" claims="S17"
first, second = explained(make_engine(), visit(0, QUESTION), visit(0, QUESTION))
print(second.reuse)

# %% [markdown]
# That is the puzzle of [the prologue](00_puzzle.md), in one sentence, and its cure is in chapters 9
# and 10. The other cause is the opening's: found, and not admitted. Same symptom, questions 2 and
# 4.
#
# **Hits that come and go.** One prompt, sent every two seconds by several programs. The number of
# cached tokens jumps:

# %% name="intermittent" claims="S17"
engine = make_engine(num_pages=60)
explain(engine, "step", text_of)
SENT = [
    ("the same", [visit(0, QUESTION)]),
    ("the same", [visit(2, QUESTION)]),
    ("with a BOS", [visit(4, "<" + QUESTION)]),
    ("the same", [visit(6, QUESTION)]),
    ("a tenant", [visit(8, QUESTION, key="tenant 2")]),
    ("the same", [visit(10, QUESTION)]),
]
for name, visits in SENT:
    output = serve(engine, *visits)[-1]
    print(f"{name:10} {output.reuse}")

# %% [markdown]
# Read the reasons, not the numbers. A program that adds a BOS (here `<`) misses all of it. A
# tenant with its own key misses all of it, as it should. And both bring a prompt of their own,
# which pushes a part of the old one out: twice the next visitor finds [448](#intermittent) instead
# of [480](#intermittent), and learns whose pages took the place. Three reasons, one curve.
#
# **One class washes out another.** Visitors come every second with the guide's prompt. From second
# 10 to second 20 somebody has long reports summarized, three a second, each another one.

# %% name="washed" claims="S17"
from statistics import median

rng = random.Random(13)
guests = [visit(i, GUIDE + f"Question {i:4}") for i in range(30)]
reports = [
    visit(10 + i / 3, "".join(rng.choices("abcdefgh ", k=1_500)), 30) for i in range(30)
]


def two_classes(*engine) -> tuple[list[RequestOutput], Counter[str]]:
    """The visitors' outputs, and who took the pages of those that miss evicted ones."""
    outputs = explained(make_engine(*engine), *guests, *reports)
    own = {o.request_id: o for o in outputs if len(o.prompt_token_ids) < 600}
    lost = [o.reuse.who for o in own.values() if o.reuse.why == "evicted"]
    return [*own.values()], Counter("guest" if w in own else "report" for w in lost)


POOLS = [(150, "step", "lru"), (300, "step", "lru"), (150, "step", "lfu")]
washed = {f"{pool[0]} pages, {pool[2]}": two_classes(*pool) for pool in POOLS}
for name, (own, takers) in washed.items():
    found = sum(min(480, o.num_cached_tokens) for o in own) / (480 * len(own))
    wait_s = median(o.metrics.ttft_s for o in own[10:25])
    late = sum(o.reuse.verdict == "hit without benefit" for o in own)
    print(
        f"{name}: {found:.0%} of the guide found; pages taken by: {dict(takers)};",
        end=" ",
    )
    print(f"{late} hits without benefit, median TTFT {wait_s:.1f} s")


# %% tags=["hide-input"]
def seconds(own: list[RequestOutput]) -> Iterator[tuple[float, float, str, str]]:
    for i, output in enumerate(own):
        share = output.num_cached_tokens / 480
        shade = "published" if share == 1 else "private" if share else "lost"
        yield i, 1, "plain" if output.reuse.why == "new" else shade, ""


draw_rows(
    [
        *((name, list(seconds(own))) for name, (own, _) in washed.items()),
        ("reports", [(10, 10, "computed", "three a second")]),
    ],
    caption="Each cell is a visitor: green found the whole guide, red none of it, orange a part. "
    "While the reports come, the guide is pushed out again and again. The reports themselves "
    "never reuse anything.",
)

# %% [markdown]
# Whoever finds the guide evicted lost it to a *report*. That is the cause: pages that nobody will read
# again push out pages that everybody reads, because they were used more recently. Twice the memory
# raises [60%](#washed) to [69%](#washed). Another rule of eviction, least frequently used first,
# raises it to [84%](#washed) with half as much.
#
# Is that the better engine? Look at the end of the lines. With the other rule more visitors find the guide,
# and the median first token comes after [17.9](#washed) s and not [18.8](#washed). Twice the memory finds less and answers
# sooner, in [11.9](#washed) s. With both, [19](#washed) visitors find the guide in vain. A hit rate says who found something, the verdict
# beside it who had to wait all the same, and only the wait itself how long.
#
# ## What it remembers, and what it costs
#
# The report must be cheap, for it is on by default. Its memory is bounded by an option; twice the
# tokens that the pages hold, unless told otherwise. Here are 2,000 visitors, explained once with a large memory
# and once with a small one:

# %% name="bounded"
rng = random.Random(5)
heads = ["".join(rng.choices("abcdefgh", k=96)) for _ in range(40)]
crowd = [
    visit(i / 8, rng.choice(heads) + "".join(rng.choices("abcdefgh", k=20)))
    for i in range(2_000)
]
told = {}
for num_tokens in (1_000_000, 2_000):
    engine = make_engine(num_pages=100)
    explainer = explain(engine, "step", text_of, num_tokens)
    outputs = serve(engine, *crowd)
    told[num_tokens] = Counter(output.reuse.why for output in outputs)
    print(f"{num_tokens:7} tokens: {dict(told[num_tokens])}")
    size, ghosts = explainer.history.total_size, len(explainer.pages.fates)
    print(f"        keeps {size} tokens and {ghosts} ghosts")
print(next(str(o.reuse) for o in reversed(outputs) if "forgotten" in str(o.reuse)))

# %% [markdown]
# With little memory it keeps [2000](#bounded) tokens, and of many prompts it cannot say any more
# that they were evicted. It then says *new*, and its verdict is that there was nothing to find; only the
# reservation in the last line tells that this may be wrong. It never leaves the reservation out; a property test holds it against a log of
# everything, with memories of all sizes, under every choice of the engine.
#
# And time? On the real model (SmolLM2 on one CPU thread) rounds with and without took turns:

# %% name="cost"
import json
from pathlib import Path

path = Path("figures/measured/explain.json")
record = json.loads((path if path.exists() else Path("..") / path).read_text("utf-8"))
ratios, shares = sorted(record["on_over_off"]), record["share_of_cpu_time"]
print(record["load"])
print("on / off, each round:", *(f"{ratio:.3f}" for ratio in ratios))
print(f"inside of the explainer: {max(shares):.2%} of the CPU time at most")
churn = record["churn"]
print(churn["load"], "and", churn["ghosts"][0], "ghosts, as many as it keeps:")
print(f"inside of the explainer: {max(churn['share_of_cpu_time']):.2%} at most")

# %% [markdown]
# The rounds with explanations took from [0.918](#cost) to [1.004](#cost) of the time of those without. The explainer
# cannot make a step faster, so these ratios do not measure it: what they show is the machine. So the record also adds up
# the time inside of the explainer: at most [0.09%](#cost) of the CPU time. A step computes a model;
# the explainer hashes and walks on admission, and learns what was computed since.
#
# That load had room for all its requests, and nothing was evicted. In the second one each prompt is new and
# drives out the pages of others, so that each page that goes is an entry in the table of ghosts, and
# pushes an older one out of it. The share is [0.09%](#cost) there too. A machine whose steps take a millisecond is
# not on record, and any share is larger on it. `explain=False` leaves an engine as it was.
#
# ## What it cannot say
#
# Three things. *The nearest prompt* is the latest of those that part at the same token; which of a
# thousand was "meant" nobody knows. *Why not one page more* is answered for the first page that was
# missed; behind it others may lie that were missed for another reason. And it speaks of one request
# on one engine as it is. Which field of which message breaks reuse in a day's log, and what that
# costs, is a question to all of them ([chapter 17](17_log.md)); what another policy would have
# done to the same traffic is one for the simulator ([chapter 16](16_traffic.md)).
#
# ### Exercise 1
#
# Somebody reports: "The second call is three times faster, so prefix caching works." You ask for a
# third call, whose prompt is as long and shares nothing. Write `share_of_the_cache`: which part of
# the time that the second call gained on the first is due to the cache? It is 0 if nothing was
# gained. (The hit's own `saved_s` is no help. It goes by the pace of the steps so far, and of
# these there was one, the first.)


# %% tags=["solution"]
def share_of_the_cache(*outputs: RequestOutput) -> float:
    first, second, other = (output.metrics.ttft_s for output in outputs)
    return (other - second) / (first - second) if first > second else 0.0


# %% name="shares"
class WarmsUp(SimulatedRunner):
    """The first step takes half a second more: kernels are chosen, memory is mapped."""

    def run(self, chunks):
        if self.clock.now() == 0.0:
            self.clock.advance(0.5)
        return super().run(chunks)


def judge(runner, second: str) -> float:
    sent = [visit(i, text) for i, text in enumerate((QUESTION, second, OTHERS[0]))]
    return share_of_the_cache(*explained(make_engine(runner=runner), *sent))


HIT, MISS = QUESTION, OTHERS[1]
shares = [judge(*each) for each in ((SimulatedRunner, HIT), (WarmsUp, HIT))]
print("the cache's share, on a calm machine and on one that warms up:", end=" ")
print(*(f"{share:.0%}" for share in shares))
assert [round(share, 2) for share in shares] == [1, 0.28]
assert all(abs(judge(each, MISS)) < 0.01 for each in (SimulatedRunner, WarmsUp))

# %% [markdown]
# Both second calls were a hit of 480 tokens. On the machine that warms up three quarters of the
# gain would have come without one: [28%](#shares) are the cache's.
#
# ### Exercise 2
#
# Four times the same visitor comes back, and finds less than hoped for. At which of the four
# questions does the search end? (a) The program now puts a BOS before the prompt. (b) Another
# prompt needed the pages. (c) The weights were changed, and the cache was reset. (d) All four
# seats are taken for four seconds. Write down four numbers before you run the check.

# %% tags=["solution"]
ends = [1, 2, 3, 4]


# %%
def comes_back(text: str, between=(), reset=False, num_pages=400) -> RequestOutput:
    engine = make_engine(num_pages, max_running=4)
    explain(engine, "step", text_of)
    serve(engine, visit(0, QUESTION))
    if reset:
        engine.reset_prefix_cache()
    return serve(engine, *between, visit(2, text))[-1]


assert ends == [
    comes_back("<" + QUESTION).reuse.step,
    comes_back(QUESTION, [visit(1, OTHERS[0])], num_pages=34).reuse.step,
    comes_back(QUESTION, reset=True).reuse.step,
    comes_back(QUESTION, chats).reuse.step,
]

# %% [markdown]
# ### Exercise 3
#
# A prompt of 100 tokens begins with the 70 tokens of an earlier one and then goes on in its own
# way. How many of its tokens are cached, known without a whole page, and new, with pages of 1,
# 16 and 64 tokens? (The last one is always computed, and none of the three.)

# %% tags=["solution"]
divided = {size: (70 // size * size, 70 % size, 29) for size in (1, 16, 64)}

# %%
PAGE_OF_THE_CHAPTER = PAGE
for PAGE, expected in divided.items():
    pair = [visit(0, "a" * 70 + "b" * 30), visit(1, "a" * 70 + "c" * 30)]
    reuse = explained(make_engine(), *pair)[-1].reuse
    found = (reuse.cached_tokens, reuse.unaligned_tokens, reuse.new_tokens)
    assert found == expected, (PAGE, found)
PAGE = PAGE_OF_THE_CHAPTER
