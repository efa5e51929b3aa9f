# %% [markdown]
# # 12. Who rides together
#
# A service holds long sessions, short ones, requests that start with a common template, and
# lone questions. Their prompts come mixed. The cache is large enough for all of them, so
# nothing that was computed is ever lost. Five rules decide whom a step admits next. The
# requests, their arrivals and the cache are the same each time. Who should ride together?
#
# The machine is a simulated GPU that prefills 25,000 tokens a second. The rules are borrowed
# from the package and built below. From here on a *block* is a page, as vLLM calls it.

# %% tags=["hide-input"]
import json
import random
from collections import Counter
from dataclasses import dataclass as plain_dataclass
from itertools import chain
from pathlib import Path
from statistics import mean

from minivllm.drawing import draw_rows, rows_of_steps
from minivllm.engine import Engine, Limits, PublishEachStep
from minivllm.events import EventLog
from minivllm.grouping import Ledger as ReadyLedger
from minivllm.grouping import LongestPrefix as ReadyLongestPrefix
from minivllm.grouping import SharedPrefix as ReadySharedPrefix
from minivllm.hashing import page_hashes
from minivllm.prefix_cache import PrefixCache
from minivllm.publication import Announcements
from minivllm.request import RequestOutput, SamplingParams
from minivllm.scheduler import ArrivalOrder, Scheduler
from minivllm.simulation import (
    Arrival,
    Arrivals,
    SerialPrefill,
    SimulatedRunner,
    VirtualClock,
    simulate,
)

PAGE, VOCAB = 16, 50_000
A_GPU = SerialPrefill(chunk_s=0.002, token_s=0.00004, decode_s=0.02, k=0.02)
BIG = {"max_running": 16, "max_batch_tokens": 8_192}
rng = random.Random(16)


def ids(num_blocks: int) -> list[int]:
    """Tokens that nobody else has."""
    return [rng.randrange(VOCAB) for _ in range(num_blocks * PAGE)]


# %% tags=["hide-input"]
class Watched(Engine):
    """An engine with everything that happened, and the ledger of this chapter."""

    log: EventLog
    ledger: ReadyLedger


def make_engine(
    grouping=None,
    publish="schedule",
    num_pages=400,
    page=PAGE,
    kind=PrefixCache,
    **options,
) -> Watched:
    """`grouping` makes one from a cache's `find` and an observer."""
    clock, log = VirtualClock(), EventLog()
    ledger = ReadyLedger(clock, page)

    def observe(what, /, **details):
        log(what, **details)
        ledger(what, **details)

    cache = kind(num_pages, page, observer=observe)
    if grouping:
        options["grouping"] = grouping(cache.find, observe)
    if publish == "schedule":
        options["announcer"] = Announcements(page)
    scheduler = Scheduler(cache, observer=observe, **options)
    runner = SimulatedRunner(A_GPU, clock, VOCAB, num_pages, page)
    limits, publisher = Limits(VOCAB, 1_000_000), PublishEachStep()
    engine = Watched(runner, scheduler, limits, publisher=publisher, clock=clock)
    engine.log, engine.ledger = log, ledger
    return engine


@plain_dataclass
class Run:
    """What came of some arrivals."""

    engine: Watched
    ended: list[tuple[Arrival, RequestOutput]]

    @property
    def stats(self) -> dict[str, int]:
        return self.engine.stats()

    @property
    def reused(self) -> float:
        """Share of the prompt tokens that came from the cache."""
        return self.stats["cached_tokens"] / self.stats["queried_tokens"]

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        num_tokens = sum(len(o.outputs[0].token_ids) for _, o in self.ended)
        return num_tokens / self.engine.clock.now()

    def ttft_s(self, percent: int) -> float:
        """Within so many seconds so many percent had their first token."""
        times = sorted(output.metrics.ttft_s for _, output in self.ended)
        return times[len(times) * percent // 100]

    @property
    def mean_ttft_s(self) -> float:
        return mean(output.metrics.ttft_s for _, output in self.ended)


def serve(arrivals: list[Arrival], grouping=None, **options) -> Run:
    engine = make_engine(grouping, **options)
    return Run(engine, list(simulate(engine, engine.clock, Arrivals(arrivals))))


def at_once(prompts: list[list[int]], max_tokens: int = 8) -> list[Arrival]:
    params = SamplingParams(max_tokens=max_tokens)
    return [Arrival(0.0, prompt, params) for prompt in prompts]


# %% [markdown]
# The traffic has all four kinds. A *tier* is a range of shared lengths: `tiers(1_000, 8_000)`
# makes three of them, and each step admits from one.


# %%
def mixed_traffic(num_requests: int = 120) -> list[Arrival]:
    """Turns of three long and six shorter sessions, a template, lone requests."""
    sessions = [ids(9_000) for _ in range(3)]
    sessions += [ids(rng.randrange(1_500, 4_000)) for _ in range(6)]
    template, arrivals, now_s = ids(60), [], 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(8)
        kind = rng.choices(("long", "short", "template", "lone"), (5, 25, 40, 30))[0]
        if kind in ("long", "short"):
            who = rng.randrange(3) if kind == "long" else rng.randrange(3, 9)
            prompt = sessions[who] = sessions[who] + ids(rng.randrange(5, 20))
        else:
            prompt = (template if kind == "template" else []) + ids(
                rng.randrange(5, 60)
            )
        params = SamplingParams(max_tokens=rng.randrange(20, 80))
        arrivals.append(Arrival(now_s, prompt, params))
    return arrivals


def in_order(find, log):
    return ArrivalOrder()


def longest(find, log):
    return ReadyLongestPrefix(find)


def tiers(*limits: int, **options):
    return lambda find, log: ReadySharedPrefix(
        find, PAGE, limits, observer=log, **options
    )


class AnyHit(ReadyLongestPrefix):
    def num_cached(self, state):
        return super().num_cached(state) > 0


class FewestLeft(ReadyLongestPrefix):
    def num_cached(self, state):
        return super().num_cached(state) - len(state.tokens)


# %% name="opening" claims="V01 V10"
traffic = mixed_traffic()
RULES = {
    "order of arrival": in_order,
    "tiers": tiers(1_000, 8_000),
    "longest prefix": longest,
    "any hit first": lambda find, log: AnyHit(find),
    "fewest tokens left": lambda find, log: FewestLeft(find),
}
roomy = {}
for name, rule in RULES.items():
    run = roomy[name] = serve(traffic, rule, num_pages=60_000, **BIG)
    print(f"{name:18} {run.reused:.0%} reused, {run.throughput:.0f} tokens/s,", end=" ")
    print(f"TTFT: P50 {run.ttft_s(50):4.1f} s, P99 {run.ttft_s(99):.1f} s")

# %% [markdown]
# Each rule reuses [72 %](#opening) of the prompt tokens and makes about [140](#opening) tokens
# a second. Yet half of the callers wait less than [25.3](#opening) s in one order and less than
# [11.4](#opening) s in another. And the slowest gain nowhere: P99, the time within which 99 of
# 100 have their first token, is [27.7](#opening) s in order of arrival and more in all others.
#
# So *a good hit rate shows in the tail* is no rule: nothing about the cache differs here, and
# the tail does. But be careful with the cause. Here the cost of a step does not depend on who
# is in it. What changes is who goes first, and short work first is the largest part of it: the
# last rule knows of no groups, takes whoever has fewest tokens left to compute, and has a median
# of [3.2](#opening) s. What the others can do that it cannot must show where memory is short.
#
# The fourth rule asks only whether anything hits, and does as well as the third, which asks how
# much: [11.4](#opening) s. We come back to that.
#
# ## Two kinds of sharing
#
# A prefix can be shared inside a step or across steps, and the two want opposite things of a
# batch: inside a step the like must meet, across steps they must not. Take the smallest case: prompts ABCD and ABCE, pages of one token, both admitted in one
# step.

# %% name="abcd" claims="V03"
ABCD, ABCE = [1, 2, 3, 4], [1, 2, 3, 5]
for publish in ("step", "schedule"):
    run = serve(at_once([ABCD, ABCE]), publish=publish, page=1)
    print(f"{publish:8}", [output.num_cached_tokens for _, output in run.ended])

# %% [markdown]
# The cache *across* steps serves whoever comes after a forward pass, so in one step it has
# [0](#abcd) for the second prompt. Sharing *inside* a step needs the announcements of
# [chapter 9](09_publication.md), and finds [3](#abcd): the entry in the table is made before
# its keys and values exist. A prefix that stands in the table is not yet a prefix that was
# computed.
#
# Now sixteen requests wait, four for each of four documents of 32 blocks. Four seats are free.
# To see sharing *inside a step* alone, we blind the cache to everything that earlier steps have left:


# %% name="in-step" claims="V02"
class ThisStepOnly(PrefixCache):
    def find(self, token_ids, extra_key=None):
        return super().find(token_ids[:0], extra_key)


documents_of_32 = [ids(32) for _ in range(4)]
queue = [document + ids(2) for _ in range(4) for document in documents_of_32]
num_tokens = sum(map(len, queue))
FOUR_SEATS = {"max_running": 4, "max_batch_tokens": 8_192}
for name, rule in {"in order": in_order, "grouped": tiers(8)}.items():
    for kind, words in ((ThisStepOnly, "in a step"), (PrefixCache, "with the past")):
        run = serve(at_once(queue), rule, kind=kind, **FOUR_SEATS)
        found = run.stats["cached_tokens"]
        print(f"{name:8} {words:13}: {found:4} of {num_tokens} tokens reused")

# %% [markdown]
# In order of arrival each batch has one request of each document, and sharing inside a step
# brings [0](#in-step) tokens; for this traffic one might as well leave it out. Side by side the
# same requests share [6144](#in-step). With a cache across steps both orders reach that number,
# because the next batch finds what the last one left, *if it is still there*.
#
# And if pages become visible only after a step? Then to put the like together is the worst that
# one can do:

# %% name="worse" claims="V02"
plans = {}
for publish in ("step", "schedule"):
    for name, rule in {"in order": in_order, "grouped": tiers(8)}.items():
        run = serve(at_once(queue, 32), rule, publish=publish, **FOUR_SEATS)
        print(f"{publish:8} {name:8}: {run.stats['cached_tokens']:4} reused,", end=" ")
        print(f"mean TTFT {run.mean_ttft_s:.2f} s")
        plans[publish, name] = list(run.engine.log.of("schedule"))


# %% tags=["hide-input"]
def first_batches(publish: str, name: str):
    steps = [event.details["chunks"] for event in plans[publish, name]]
    prefills = [step for step in steps if any(size > 1 for _, _, size in step)]
    for request, row in sorted(
        rows_of_steps(prefills[:2]).items(), key=lambda r: int(r[0])
    ):
        cells = [
            (a, b, "computed" if s == "computed" else "free", w) for a, b, s, w in row
        ]
        yield f"{publish}, {name}: {'ABCD'[int(request) % 4]}", cells


draw_rows(
    [
        row
        for publish, name in (
            ("step", "in order"),
            ("step", "grouped"),
            ("schedule", "grouped"),
        )
        for row in first_batches(publish, name)
    ],
    caption="The first two batches of three of the runs, four requests each; a letter is a "
    "document, a number the tokens computed. In order and published after the step, the second "
    "batch finds everything. Grouped, the four As are computed four times, unless they were announced.",
)

# %% [markdown]
# Under `step` the grouped queue reuses [0](#worse) tokens and the mixed one [6144](#worse), and
# the first tokens come after [1.22](#worse) instead of [1.10](#worse) s. With announcements both
# reuse the same, and the group has a mean of [1.07](#worse) s: 3 % better. That is little. It is
# more where four different documents do not fit side by side, with 140 pages:

# %% name="squeezed" claims="V02"
for name, rule in {
    "in order": in_order,
    "longest": longest,
    "grouped": tiers(8),
}.items():
    run = serve(at_once(queue, 32), rule, num_pages=140, **FOUR_SEATS)
    print(f"{name:8}: {run.stats['cached_tokens']:4} reused,", end=" ")
    print(f"mean TTFT {run.mean_ttft_s:.2f} s")

# %% [markdown]
# All reuse [6144](#squeezed). Only the group has [1.07](#squeezed) s instead of
# [1.28](#squeezed), for four of a kind need less memory than four kinds. The longest prefix
# cannot see that, since at first nothing is cached.
#
# So `grouping="shared-prefix"` belongs to `publish="schedule"`. There are other ways to treat
# cold companions. SGLang, whose pages appear after a step, sorts all but one of them to the end
# of the queue. And who comes later in the step may wait for a prefix that is being computed:
# [Chapter 10](10_single_flight.md) built that, `WaitForPrefix`.
#
# ## The longest prefix first
#
# One rule needs no group at all: admit first who has most tokens in the cache. SGLang calls it
# longest prefix match. It is a sort, with `find` of the cache as its key.

# %% export="grouping.py"
"""Who rides together: whom a step tries to admit, and in which order."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minivllm.radix import Match
from minivllm.request import ExtraKey, TokenIds
from minivllm.scheduler import MAX_PASSES, ArrivalOrder, RequestState

Find = Callable[[TokenIds, ExtraKey], Match]  # `PrefixCache.find`


class LongestPrefix(ArrivalOrder):
    """Most cached tokens first, ties by arrival (after SGLang's longest prefix match).

    Looks at the first `window` requests that wait. Nobody is passed over in more than
    `max_passes` steps: then a request comes first among those of its priority.
    """

    def __init__(
        self, find: Find, max_passes: int = MAX_PASSES, window: int = 128
    ) -> None:
        if max_passes < 0 or window < 1:
            raise ValueError("max_passes must be at least 0, window at least 1")
        self.find = find
        self.max_passes = max_passes
        self.window = window

    def plan(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """Those with the longest cached prefix first, in each priority."""
        seen = waiting[: self.window]
        due = [state for state in seen if self.is_due(state)]
        rest = [state for state in seen if not self.is_due(state)]
        rest.sort(key=lambda state: -self.num_cached(state))
        return sorted(due + rest, key=lambda state: state.priority)

    def num_cached(self, state: RequestState) -> int:
        """Tokens of a request that the index holds now."""
        return self.find(state.tokens, state.request.extra_key).matched_len

    def is_due(self, state: RequestState) -> bool:
        """Whether a request has been passed over often enough."""
        return state.num_passed >= self.max_passes


# %% [markdown]
# `find` changes nothing: no pin, no access time. A request that is sorted to the front is
# matched again when it is admitted.
#
# Exercise 2 of [chapter 7](07_engine.md) asked for a cousin of this rule, the last one of the
# opening, and warned of it: with an
# endless stream of hits a request without any would never begin. `num_passed` is the
# scheduler's count of steps that admitted somebody who came later. At `max_passes` a request is
# *due*, and nothing in its priority goes before it but those who are due and older. The window
# bounds what a step spends on sorting; SGLang returns to order of arrival when more than 128
# requests wait.
#
# ## A yes is not a number
#
# The longest prefix rule sees the cache. It does not see that four requests in the queue have a
# prefix in common that nobody has computed yet. Chapter 2 gives a way to count that: a page's
# name stands for the page and everything before it, so equal names are equal prefixes.


# %% name="naive" claims="V11"
def common_blocks(prompts: list[list[int]], size: int = PAGE) -> list[int]:
    """Leading blocks that each prompt shares with some other one."""
    names = [page_hashes(prompt, size) for prompt in prompts]
    counts = Counter(chain.from_iterable(names))
    return [sum(counts[name] > 1 for name in its) for its in names]


system, history = ids(4), ids(700)
prompts = {
    "a question": system + ids(3),
    "another": system + ids(9),
    "turn 8 of a session": system + history + ids(2),
    "turn 9": system + history + ids(12),
    "a stranger": ids(5),
}
for name, blocks in zip(prompts, common_blocks([*prompts.values()]), strict=True):
    print(f"{name:20} shares: {blocks > 0!s:5}  blocks: {blocks}")

# %% [markdown]
# Four of five share, which is all that a yes or no can say. Two share a system prompt of
# [4](#naive) blocks, and two a history of [704](#naive). With a limit between the two they ride
# apart; by yes or no, the former ride with the latter. In the opening the lone requests hit
# nothing, so a yes was enough. Now everybody begins with that system prompt:

# %% name="yes" claims="V10"
for name in ("order of arrival", "any hit first", "longest prefix"):
    arrivals = [Arrival(a.time_s, system + a.token_ids, a.params) for a in traffic]
    run = serve(arrivals, RULES[name], num_pages=60_000, **BIG)
    print(f"{name:18} TTFT: P50 {run.ttft_s(50):4.1f} s, P99 {run.ttft_s(99):.1f} s")

# %% [markdown]
# Where everybody hits, yes or no is order of arrival, [25.3](#yes) s. The count still tells the
# sessions from the others: [11.4](#yes).
#
# The count has a grain. What two prompts share is cut to whole blocks, and the larger the
# block, the more is cut. Shared tokens, as counted with three sizes of a block:

# %% name="grain" claims="V23"
for shared in (100, 3_000, 40_000):
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    counted = {}
    for size in (16, 128, 512):
        one, other = (page_hashes([*prefix, -i], size) for i in (1, 2))
        counted[size] = size * sum(a == b for a, b in zip(one, other, strict=True))
    print(f"{shared:6} tokens:", counted)

# %% [markdown]
# With blocks of 512, as some remote caches have them, a prefix of 100 tokens does not exist
# ([0](#grain)), and one of 3,000 is [2560](#grain). A tier of "1,000 blocks" means nothing
# without the size of a block.
#
# ## Tiers for a long tail
#
# Into how many kinds should we sort? An hour of a public conversation service (Mooncake's
# trace) says what real lengths look like. A script, `figures/record_prefixes.py`, has counted
# for each of its requests how many blocks of 16 tokens an earlier one began with. The trace
# knows only blocks of 512 tokens, so each count is a multiple of 32 of ours: three requests in
# five share exactly one. The third pair of limits below cuts after those, and before the
# longest tenth.

# %% name="tail" claims="V12 V13"
path = Path("figures/measured/prefixes.json")
record = json.loads((path if path.exists() else Path("..") / path).read_text("utf-8"))
lengths = [n for n, count in record["requests_by_shared_blocks"] for _ in range(count)]


def share_of_each(limits) -> list[float]:
    """The share of the requests that each tier holds."""
    tier = Counter(sum(n >= limit for limit in limits) for n in lengths)
    return [tier[i] / len(lengths) for i in range(len(limits) + 1)]


width = max(lengths) // 3 + 1
CUTS = {
    "equal width": (width, 2 * width),
    "1,000 and 8,000": (1_000, 8_000),
    "by its own counts": (64, 800),
}
one_block = lengths.count(32)
print(f"{one_block} share one block of the trace")
print(f"{len(lengths)} requests, up to {max(lengths)} blocks shared")
for name, limits in CUTS.items():
    in_tokens = [PAGE * limit for limit in limits]
    print(
        f"{name:18}", [f"{x:.1%}" for x in share_of_each(limits)], in_tokens, "tokens"
    )


# %% tags=["hide-input"]
def bar(limits):
    now = 0.0
    for i, share in enumerate(share_of_each(limits)):
        label = f"{share:.0%}" if share > 0.05 else ""
        yield (now, share, ("free", "decoded", "computed")[i], label)
        now += share


draw_rows(
    [(name, list(bar(limits))) for name, limits in CUTS.items()],
    unit=480,
    caption="How an hour of real requests falls into three tiers, the one that shares least on the left. "
    "Buckets of equal width put nearly everybody into the first. The published limits were "
    "made for longer sessions than this hour has.",
)

# %% [markdown]
# In buckets of equal width a few long sessions have two of the three to themselves, and
# [98.5%](#tail) of the requests crowd into the first. The published limits, 1,000 and 8,000
# blocks (at 16 tokens each [16000](#tail) and [128000](#tail)), leave the third tier empty:
# [92.4%](#tail) to [7.6%](#tail). Are even shares better? The opening's traffic, with a third of
# the memory, can tell:

# %% name="cuts" claims="V12"
CUTS = {"equal width": (3_000, 6_000), "published": (1_000, 8_000)}
CUTS |= {"the trace's": (64, 800), "one tier": ()}
for name, limits in CUTS.items():
    run = serve(traffic, tiers(*limits), num_pages=20_000, **BIG)
    print(f"{name:11} {run.throughput:.0f} tokens/s,", end=" ")
    print(f"TTFT: P50 {run.ttft_s(50):.1f} s, P99 {run.ttft_s(99):.1f} s")

# %% [markdown]
# Shares of equal width crowd, and here it costs little: [127](#cuts) tokens a second against
# [133](#cuts), with the better median, [10.3](#cuts) against [14.9](#cuts) s. Limits made for
# another traffic cost much: those of the trace make [114](#cuts), and P99 is [44.1](#cuts) s. No
# limit at all makes most tokens, [140](#cuts). Unequal shares are not yet harm, and even ones no
# gain. Take limits from your own runs; `tiers` is an option for that reason.
#
# Another system's tiers look alike and are not: MiMo sorts by *length*, to 64K, 256K and 1M
# tokens, so that short requests are not held up by long ones. Ours go by what is shared.

# %% name="length" claims="V14"
for name, length, shared in (
    ("a book, pasted once", 200_000, 0),
    ("turn 40 of a session", 200_000, 199_000),
    ("a short turn", 20_000, 19_000),
):
    by_length = sum(length >= 1_000 * n for n in (64, 256))
    by_sharing = sum(shared // PAGE >= n for n in (1_000, 8_000))
    print(f"{name:21} tier {by_length} by length, tier {by_sharing} by shared prefix")

# %% [markdown]
# The two of equal length have tier [1](#length) by length. By shared prefix one of them has
# 1,000 tokens to compute and the other 200,000, and they stand at opposite ends.
#
# ## Compare neighbours
#
# For each waiting request we want three numbers: blocks found in the cache, blocks in common
# with another one that waits, and the tier that follows.

# %% export="grouping.py"
TIERS = (1_000, 8_000)  # blocks: with 16 tokens in each, 16K and 128K tokens


class Estimate(NamedTuple):
    """What a waiting request may share, in blocks, and the tier that it is in."""

    state: RequestState
    cached: int  # found in the index
    common: int  # with the waiting request that is most like it
    tier: int

    @property
    def num_blocks(self) -> int:
        """The longer of the two prefixes."""
        return max(self.cached, self.common)


# %% [markdown]
# Naming every page of every prompt in every step would be expensive. Sorting is cheaper: in
# lexical order the prompt that has most in common with another stands right beside it, so it is
# enough to compare neighbours. The comparison is that of the tree (chapter 3).

# %% export="grouping.py"
from itertools import pairwise

from minivllm.events import Observer, ignore
from minivllm.hashing import token_bytes
from minivllm.radix import shared_pages


class SharedPrefix(LongestPrefix):
    """One tier of shared prefix lengths a step, the one that finds most in the cache.

    `tiers` are limits in blocks of `page_size` tokens, rising. A request's blocks are
    those of its longest prefix that is cached, or common with another one that waits:
    an estimate, for what is cached may go, and the first of a group finds nothing. Made
    anew for every step; nothing is kept, and nobody waits for company.
    """

    def __init__(
        self,
        find: Find,
        page_size: int,
        tiers: Sequence[int] = TIERS,
        max_passes: int = MAX_PASSES,
        window: int = 128,
        observer: Observer = ignore,
    ) -> None:
        super().__init__(find, max_passes, window)
        self.page_size = page_size
        self.tiers = check_tiers(tiers)
        self.observer = observer

    def estimate(self, waiting: Sequence[RequestState]) -> list[Estimate]:
        """What each of these may share, in the order given."""
        common, estimates = self._common(waiting), []
        for state in waiting:
            cached = self.num_cached(state) // self.page_size
            blocks = max(cached, common[state])
            tier = sum(blocks >= limit for limit in self.tiers)
            estimates.append(Estimate(state, cached, common[state], tier))
        return estimates

    def _common(self, waiting: Sequence[RequestState]) -> dict[RequestState, int]:
        """Blocks that each has in common with the one most like it.

        In sorted order that is a neighbour.
        """
        key = {s: (ascii(s.request.extra_key), token_bytes(s.tokens)) for s in waiting}
        common = dict.fromkeys(waiting, 0)
        for one, other in pairwise(sorted(waiting, key=lambda state: key[state])):
            if key[one][0] == key[other][0]:
                n = shared_pages(key[one][1], key[other][1], 4 * self.page_size)
                common[one], common[other] = max(common[one], n), n
        return common


def check_tiers(tiers: Sequence[int]) -> tuple[int, ...]:
    """The limits as a tuple. `ValueError` unless they are ints >= 1 that rise."""
    limits = tuple(tiers) if isinstance(tiers, Sequence) else (0,)
    whole = all(type(n) is int and n > 0 for n in limits)
    if not whole or any(one >= other for one, other in pairwise(limits)):
        raise ValueError(f"tiers must be rising whole numbers >= 1, not {tiers!r}")
    return limits


# %% [markdown]
# Held against the count by names, on random prompts with pages of four tokens:

# %% name="twin"
engine = make_engine(page=4)
for _ in range(300):
    engine.submit([rng.randrange(2) for _ in range(rng.randrange(1, 60))])
waiting = engine.scheduler.waiting
by_sorting = [
    e.common for e in SharedPrefix(engine.scheduler.cache.find, 4).estimate(waiting)
]
by_names = common_blocks([list(state.tokens) for state in waiting], 4)
agree = sum(map(int.__eq__, by_sorting, by_names))
print(
    f"{agree} of {len(waiting)} estimates agree; the longest is {max(by_names)} blocks"
)

# %% [markdown]
# ## A group, then its budgets
#
# Two of the numbers are of different worth. What is cached is there, and may be gone soon. What
# is in common has still to be computed by the first. So the step goes to the tier with the
# largest sum of cached blocks, and in it to those who find most. A request that is due (see
# below) comes before that, and its tier with it. Only the most urgent priority is planned, even
# if seats stay free. Requests with the same prefix stand side
# by side. Seats, tokens and pages are counted off from this list by the scheduler, as always.

# %% export="grouping.py"
from collections import Counter


class SharedPrefix(SharedPrefix):
    def plan(self, waiting: Sequence[RequestState]) -> list[RequestState]:
        """Who is due, then one tier of the most urgent, most cached blocks first."""
        estimates = self.estimate(waiting[: self.window])
        self.observer("plan", estimates=estimates)
        urgent = [e for e in estimates if e.state.priority == waiting[0].priority]
        due = [e for e in urgent if self.is_due(e.state)]
        tier = due[0].tier if due else self._warmest(urgent)
        group = [e for e in urgent if e.tier == tier and e not in due]
        group.sort(key=lambda e: (-e.cached, -e.common))
        return [e.state for e in due] + self._side_by_side(group)

    def _warmest(self, estimates: Sequence[Estimate]) -> int:
        """The tier with most cached blocks; of equals that of the first to come."""
        cached: Counter[int] = Counter()
        for estimate in estimates:
            cached[estimate.tier] += estimate.cached
        return max(cached, key=lambda tier: cached[tier], default=0)

    def _side_by_side(self, group: Sequence[Estimate]) -> list[RequestState]:
        """Those with one and the same prefix together, where the first stands."""
        families: dict[bytes, list[RequestState]] = {}
        for e in group:
            prefix = e.state.tokens[: e.num_blocks * self.page_size]
            families.setdefault(prefix.tobytes(), []).append(e.state)
        return [state for family in families.values() for state in family]


# %% [markdown]
# What a plan leaves out stays in the queue. The next step makes another, from nothing. A queue
# of three kinds, tiers at 8 and 50 blocks, 1,600 tokens a step:

# %% name="assembly" claims="V09 V21"
ReadySharedPrefix, ReadyLongestPrefix = SharedPrefix, LongestPrefix
history, template = ids(100), ids(20)
prompts = [ids(3), history + ids(5), template + ids(4)]
prompts += [history + ids(9), ids(6), template + ids(1)]
engine = make_engine(tiers(8, 50), max_batch_tokens=1_600)
before = dict(vars(engine.scheduler.grouping))
for prompt in prompts:
    engine.submit(prompt, SamplingParams(max_tokens=2))
while engine.has_unfinished():
    engine.step()
moments = list(engine.log.of("plan"))
for plan, step in zip(moments, engine.log.of("schedule"), strict=False):
    tier_of = {e.state.request.request_id: e.tier for e in plan.details["estimates"]}
    computed = {name: size for name, _, size in step.details["chunks"] if size > 1}
    print(f"tiers of those who wait: {tier_of}, computed: {computed}")
print("fields changed:", vars(engine.scheduler.grouping) != before)

# %% tags=["hide-input"]
from minivllm.drawing import Steps


def queue_rows(plan):
    for e in plan.details["estimates"]:
        request, n = e.state.request, e.num_blocks
        size = len(request.prompt_token_ids) // PAGE
        cells = [
            (0, e.cached, "published", ""),
            (e.cached, n - e.cached, "announced", ""),
        ]
        cells.append((n, size - n, "free", ""))
        yield f"request {request.request_id}, tier {e.tier}", [c for c in cells if c[1]]


Steps(
    [
        draw_rows(
            list(queue_rows(plan)),
            unit=4,
            caption=f"Who waits before step {i}, a pixel column for each block. Purple: in common "
            "with another one that waits. Green: in the cache. Grey: its own.",
        )
        for i, plan in enumerate(moments, 1)
    ]
)

# %% [markdown]
# At first nothing is cached, so the step belongs to the tier of whoever came first: two
# strangers, of [48](#assembly) and [96](#assembly) tokens. Seats and tokens are left over, and
# the batch goes as it is. Nothing that waits is cached, so again the first to come decides: the
# session, whose first turn fills the step with
# [1598](#assembly) tokens beside two decodes. In the third plan what was purple is green: the
# plan saw 99 cached blocks, the hundredth is announced in that step, and the second turn has [144](#assembly) tokens left. The template is last.
# Between two steps the object keeps nothing: its fields are the settings it was made with. A
# bucket that lived on would have to hear of every eviction, abort and preemption.
#
# ## Nobody waits for company
#
# A lone long request finds no companion. Should it wait for one? While it does, it must hold no
# memory, and a batch that is not full must go. A request of 150 blocks behind another one, with
# a single seat:

# %% name="alone" claims="V20"
lone = ids(150)
for name, rule in {"in order": in_order, "grouped": tiers(8, 100)}.items():
    engine = make_engine(rule, max_running=1)
    engine.submit(ids(2), SamplingParams(max_tokens=3))
    engine.step()
    engine.submit(lone, SamplingParams(max_tokens=2))
    engine.step()
    stats, outputs = engine.stats(), []
    while engine.has_unfinished():
        outputs += engine.step()
    held = stats["pages_total"] - stats["pages_free"]
    print(f"{name:8} {stats['waiting']} waits, {held} pages in use", end=", ")
    print(f"then it runs alone: TTFT {outputs[-1].metrics.ttft_s:.3f} s")

# %% [markdown]
# The [3 pages](#alone) are those of the request that runs, and it starts after
# [0.140 s](#alone) under both rules: with one seat no rule can differ. With 64 seats one can.
# Two short requests and two long ones come at once:

# %% name="seats" claims="V20"
long = ids(150)
pair = [ids(2), long + ids(1), ids(3), long + ids(2)]
for name, rule in {"in order": in_order, "grouped": tiers(8, 100)}.items():
    run = serve(at_once(pair, 4), rule, max_running=64, max_batch_tokens=8_192)
    first = len(next(run.engine.log.of("schedule")).details["chunks"])
    times = {len(a.token_ids): f"{o.metrics.ttft_s:.3f}" for a, o in run.ended}
    print(f"{name:8} {64 - first} seats free in the first step, TTFT by length {times}")

# %% [markdown]
# Nobody waits for somebody who has not come. But a request may wait a step for another tier's
# turn, with [62](#seats) seats free: the long ones have their first token after
# [0.130](#seats) instead of [0.109](#seats) s, the short ones after [0.007](#seats).
#
# Would waiting pay anywhere? It is said to pay where agents send short prefixes that change all
# the time, in quick succession. We let everybody wait for the next multiple of 0.2 s, which the
# simulator can express as a later arrival. The wait counts:


# %% name="wait" claims="V22"
def agents(gap_s: float, every_s: float) -> list[tuple[float, list[int]]]:
    """Ten new prefixes of 20 blocks; four requests with each, so far apart."""
    prefixes = [ids(20) for _ in range(10)]
    return [
        (i * every_s + j * gap_s, prefix + ids(2))
        for i, prefix in enumerate(prefixes)
        for j in range(4)
    ]


def waiting_for(stream, wait_s: float, kind) -> tuple[int, float]:
    """Prompt tokens computed, and the mean TTFT, if all wait for a common moment."""
    params = SamplingParams(max_tokens=16)
    held = [-(-t // wait_s) * wait_s if wait_s else t for t, _ in stream]
    arrivals = [Arrival(t, p, params) for t, (_, p) in zip(held, stream, strict=True)]
    run = serve(arrivals, tiers(8), kind=kind, num_pages=2_000)
    waited = mean(late - t for late, (t, _) in zip(held, stream, strict=True))
    return run.stats["prefill_tokens"], run.mean_ttft_s + waited


for label, stream in {"quick": agents(0.05, 1), "slow": agents(5, 20)}.items():
    for kind, words in ((ThisStepOnly, "in a step"), (PrefixCache, "with the past")):
        (now, ttft), (later, ttft_later) = (
            waiting_for(stream, w, kind) for w in (0, 0.2)
        )
        print(f"{label:5} {words:13}: {now:5} tokens, {later:5} if they wait", end="; ")
        print(f"TTFT {1_000 * ttft:.0f} and {1_000 * ttft_later:.0f} ms")

# %% [markdown]
# If only one step can share, waiting halves the work of the quick agents, from [14080](#wait)
# tokens to [7680](#wait), and does nothing for slow ones. Even there the first token comes at
# [123 ms](#wait) instead of [41](#wait): the machine is not busy enough for saved work to
# matter. With a cache across steps it saves not a single token: whoever does not wait for a
# companion leaves it a prefix. What remains is the wait, [113 ms](#wait) instead of
# [32](#wait). So `SharedPrefix` never waits.
#
# ## Who is passed over, and how often
#
# A rule that favours groups has victims. A session sends 50 turns a second, more than the
# machine can serve. After a second somebody asks a short question that shares nothing:


# %% name="passed" claims="V17 V18"
def with_a_lone_one(rule, priority: int = 0) -> Run:
    """A session sends 200 turns, 50 a second; after a second a short request comes."""
    params, turn, stream = SamplingParams(max_tokens=32), ids(200), []
    for i in range(200):
        turn = turn + ids(2)
        stream.append(Arrival(i / 50, turn, params))
    lone = Arrival(1.0, ids(4), SamplingParams(max_tokens=8), None, priority)
    sizes = {"num_pages": 4_000, "max_running": 16}
    return serve([lone, *stream], rule, **sizes)


def lone_ttft_s(run: Run) -> float:
    return next(
        o.metrics.ttft_s
        for a, o in run.ended
        if a.time_s == 1.0 and len(a.token_ids) == 4 * PAGE
    )


waits = {}
for name, rule in {
    "order of arrival": in_order,
    "grouped, 4 passes": tiers(8, max_passes=4),
    "grouped, 16 passes": tiers(8, max_passes=16),
    "grouped, 64 passes": tiers(8, max_passes=64),
    "grouped, no bound": tiers(8, max_passes=10**9),
}.items():
    run = with_a_lone_one(rule)
    waits[name] = lone_ttft_s(run)
    print(f"{name:19} the lone one {waits[name]:.1f} s;", end=" ")
    print(f"all: mean {run.mean_ttft_s:.2f}, P50 {run.ttft_s(50):.1f}", end=", ")
    print(f"P99 {run.ttft_s(99):.1f} s")
run = with_a_lone_one(tiers(8, max_passes=10**9), priority=-1)
waits["no bound, priority -1"] = lone_ttft_s(run)
print(f"no bound, but priority -1: the lone one {lone_ttft_s(run):.2f} s")

# %% tags=["hide-input"]
draw_rows(
    [
        (f"{name}: {wait:.1f} s", [(0, wait, "lost", "")])
        for name, wait in waits.items()
    ],
    caption="How long a short request waits that shares nothing, beside a session that sends "
    "a turn every 20 ms. The bound decides; a priority comes before everything.",
)

# %% [markdown]
# In order of arrival it waits [1.8 s](#passed). Grouped without a bound it waits
# [9.5 s](#passed), until the session has said everything. The median falls from [3.4](#passed)
# to [2.2](#passed) s, the mean hardly moves. A bound of 4 gives the question its place back,
# [1.9 s](#passed), and with 4 or 16 the gain is gone, because the turns fall due too. Our
# default of 64 protects nobody in this run: the question has been answered before it is due. (It
# is an argument of the classes, as `window` is; the command line has neither.) The promise is
# about steps, and a test holds it against the worst stream we could think of: nobody is passed
# over in more than `max_passes` steps, over its whole life. How long a step takes is not the
# queue's business.
#
# A due request that does not fit stops the plan, so nobody overtakes it while it waits for
# pages.
#
# The last line is another mechanism. A caller who must not wait has a priority, and the plan
# looks at nothing else before it: [0.09 s](#passed), bound or no bound. Mixing the two, a bonus
# in priority for large groups for instance, would make either unpredictable.
#
# ## A chain goes whole or not at all
#
# When pages run out, somebody who runs must give his back. The last to come, says the order of
# arrival. But a member of a group gives back little: the shared pages stay, since others read
# them. If one member goes after the other, the last one takes the chain along. All of it is
# computed again when the group returns, and what was won is full again. So we ask who has the
# least in common with the rest.

# %% export="grouping.py"
from itertools import chain


class SharedPrefix(SharedPrefix):
    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """Who shares fewest pages with the others, so that no chain goes in pieces.

        Of equals the last to have come, and only among the least important, whose
        oldest stays if anybody else can go.
        """
        least = [s for s in unserved if s.priority == unserved[-1].priority]
        others = least[1:] or least
        pages = {s: s.lease.pages if s.lease else [] for s in unserved}
        users = Counter(chain.from_iterable(pages.values()))
        return min(reversed(others), key=lambda s: sum(users[p] > 1 for p in pages[s]))


# %% name="chain" claims="V19"
class LastToCome(SharedPrefix):
    victim = ArrivalOrder.victim


document = ids(40)
kinds = "MLMLMLM"  # members of a chain, and lone requests
queue = [document + ids(1) if kind == "M" else ids(10) for kind in kinds]
for rule in (LastToCome, SharedPrefix):
    ReadySharedPrefix = rule  # what `tiers` makes
    run = serve(at_once(queue, 160), tiers(8), num_pages=100)
    away = [int(e.details["request_id"]) for e in run.engine.log.of("preempt")]
    print(f"{rule.__name__:12} sends away", [f"{i} ({kinds[i]})" for i in away])
    again, end_s = run.stats["recomputed_tokens"], run.engine.clock.now()
    num_steps = len(list(run.engine.log.of("schedule")))
    print(f"  {again} tokens computed again, {num_steps} steps, end {end_s:.2f} s")

# %% [markdown]
# By age, five preemptions, and [784](#chain) tokens computed twice; by company three, and
# [511](#chain). Yet the chain survives both times, because some member always holds it. This
# victim saves 273 tokens, 11 ms, and costs 16 more steps, [272](#chain) instead of
# [256](#chain), with fewer riders in each: the run ends at [5.84](#chain) s instead of
# [5.54](#chain). By time it loses, and this is no proof of the rule but of its price. It is
# meant for a chain that all its members leave, and no run here shows that case; by this run the
# order of arrival is the better choice. And a very long lone request is an expensive victim, in
# return for many pages.
#
# Whoever stands first in the order of all, once it runs, is never preempted, unless nobody else
# can go. With the due request that nobody overtakes, this leaves no way to wait for ever.
#
# ## A ledger
#
# All of this rests on an estimate. What is cached may be evicted before the request is
# admitted, and the first of a group finds nothing of what it has in common with the others. So
# somebody should write down what was expected and what came. An observer can: the plan is an
# event, and so are admissions, steps and ends.

# %% export="grouping.py"
from dataclasses import dataclass

from minivllm.engine import Clock


@dataclass
class TierLine:
    """Sums over the requests admitted from one tier, and the steps that took them."""

    num_requests: int = 0
    num_hits: int = 0
    estimated_blocks: int = 0
    cached_blocks: int = 0
    queued_s: float = 0.0  # from submission to admission
    num_steps: int = 0
    step_tokens: int = 0  # computed in these steps, for anybody


class Ledger:
    """An observer that holds the estimates against what came of them.

    `lines` by tier. `mixed` counts steps by the number of tiers that ride in them.
    """

    def __init__(self, clock: Clock, page_size: int) -> None:
        self.clock = clock
        self.page_size = page_size
        self.lines: dict[int, TierLine] = {}
        self.mixed: Counter[int] = Counter()
        self._planned: dict[str, Estimate] = {}
        self._running: dict[str, int] = {}  # the tier of each

    def __call__(self, kind: str, /, **details: object) -> None:
        """Take note of an event."""
        if kind in ("plan", "admit", "schedule", "finish"):
            getattr(self, f"_{kind}")(**details)

    def _plan(self, estimates: Sequence[Estimate]) -> None:
        self._planned = {e.state.request.request_id: e for e in estimates}

    def _finish(self, request_id: str, reason: str) -> None:
        self._running.pop(request_id, None)


# %% export="grouping.py"
class Ledger(Ledger):
    def _admit(self, request_id: str, cached: int) -> None:
        estimate = self._planned.get(request_id)
        if estimate is None:
            return  # admitted by a grouping that makes no estimates
        self._running[request_id] = estimate.tier
        line = self.lines.setdefault(estimate.tier, TierLine())
        if estimate.state.num_cached_tokens is not None:
            return  # it comes back from a preemption, and finds itself
        line.num_requests += 1
        line.num_hits += cached > 0
        line.estimated_blocks += estimate.num_blocks
        line.cached_blocks += cached // self.page_size
        line.queued_s += self.clock.now() - estimate.state.request.arrival_s

    def _schedule(self, chunks: Sequence[tuple[str, int, int]]) -> None:
        tiers = {n: self._running[n] for n, _, _ in chunks if n in self._running}
        if tiers:
            self.mixed[len(set(tiers.values()))] += 1
        for tier in {tiers[name] for name in tiers.keys() & self._planned.keys()}:
            self.lines[tier].num_steps += 1
            self.lines[tier].step_tokens += sum(size for _, _, size in chunks)
        self._planned = {}


# %% name="ledger" claims="V24 V25 V26"
ReadyLedger = Ledger


def only_looks(find, log):
    """Order of arrival, with the estimates written down."""

    class OnlyLooks(SharedPrefix):
        def plan(self, waiting):
            super().plan(waiting)
            return waiting

    return OnlyLooks(find, PAGE, observer=log)


tight = {}
for name, rule in {
    "order of arrival": only_looks,
    "tiers": tiers(1_000, 8_000),
    "one tier": tiers(),
    "longest prefix": longest,
    "fewest tokens left": RULES["fewest tokens left"],
}.items():
    run = tight[name] = serve(traffic, rule, num_pages=20_000, **BIG)
    print(f"{name}: {run.reused:.0%} reused, {run.throughput:.0f} tokens/s,", end=" ")
    print(f"TTFT: P50 {run.ttft_s(50):.1f} s, P99 {run.ttft_s(99):.1f} s")
    for tier, line in sorted(run.engine.ledger.lines.items()):
        n = line.num_requests
        print(
            f"  tier {tier}: {n:3} requests, {line.estimated_blocks:5} blocks expected,",
            end=" ",
        )
        print(
            f"{line.cached_blocks:5} found, queued {line.queued_s / max(n, 1):4.1f} s,",
            end=" ",
        )
        print(f"{line.step_tokens / line.num_steps:4.0f} a step")
    if run.engine.ledger.mixed:
        print(
            "  steps by tiers in them:", dict(sorted(run.engine.ledger.mixed.items()))
        )


# %% tags=["hide-input"]
def mixed_row(name: str):
    counts, now = tight[name].engine.ledger.mixed, 0.0
    for num_tiers, state in ((1, "computed"), (2, "decoded"), (3, "free")):
        share = counts[num_tiers] / counts.total()
        yield (now, share, state, f"{num_tiers}: {share:.0%}" if share > 0.1 else "")
        now += share


draw_rows(
    [(name, list(mixed_row(name))) for name in ("order of arrival", "tiers")],
    unit=480,
    caption="The share of the steps in which one, two or three tiers ride together. Grouping "
    "decides who is let in; those who ride already stay.",
)

# %% name="windows" claims="V26"
for name in ("order of arrival", "tiers"):
    ended = sorted(tight[name].ended, key=lambda pair: pair[0].time_s)
    parts = [ended[i : i + 30] for i in range(0, 120, 30)]
    worst = [max(o.metrics.ttft_s for _, o in part) for part in parts]
    print(f"{name:16} longest TTFT of each 30 arrivals:", [f"{x:.0f} s" for x in worst])

# %% [markdown]
# The traffic is that of the opening, the memory a third: 20,000 blocks. Now the order decides
# what survives. In order of arrival [57 %](#ledger) is reused and [101](#ledger) tokens are
# made a second; tiers bring back [72 %](#ledger), the number of the roomy cache, and
# [133](#ledger) a second, because a session's turns ride while its history is there. P99 falls
# from [41.7](#ledger) to [34.2](#ledger) s.
#
# Two entries of the ledger are worth reading, and one beside it. *Estimate against found*: the lowest tier, which holds the
# templates too, is exact. The highest is promised [62774](#ledger) blocks and finds
# [45060](#ledger): a session's first turn is promised what it has in common with the second,
# and finds nothing; the second finds it. That gap needs no eviction. What eviction adds shows
# between two runs: tier 1 expects [83703](#ledger) and finds [53325](#ledger) in order of
# arrival, [83655](#ledger) and [67511](#ledger) with tiers. *Queued*, and tokens *a step*, tell
# how full the batches of a tier are. *Tiers in a step*: grouping has raised the unmixed steps
# from [31](#ledger) to [191](#ledger), out of more than 450. A plan takes in one tier, and the
# others are still there, decoding. Continuous batching mixes whatever it admits.
#
# The third entry is a print of its own: the longest waits, in four parts of the arrivals, against order of
# arrival. In three of four somebody waits longer: [31 s](#windows) instead of [14 s](#windows),
# 34 instead of 28, 33 instead of 31. Only the last gains, [29 s](#windows) instead of
# [42 s](#windows), and it decides the P99. One number for the whole run would have hidden that.
#
# The last lines of the table are a warning. Longest prefix first, a sort without any tier, has
# P50 [11.4](#ledger) s against [14.9](#ledger), P99 [32.0](#ledger) against [34.2](#ledger). On
# this traffic tiers pay through what they look at, the blocks in the cache, and hardly through
# their limits.
#
# ## More hits, no more answers
#
# Two ways to lose are left. The first: too many tiers. 64 requests wait, each has one
# companion, and every pair shares another length.

# %% name="fine" claims="V15"
pairs = [ids(2 * i) for i in range(1, 33)]
queue = [prefix + ids(1) for _ in range(2) for prefix in pairs]
CUTS = {"1 tier": (), "3 tiers": (20, 40), "33 tiers": range(2, 66, 2)}
for name, limits in CUTS.items():
    run = serve(at_once(queue), tiers(*limits), num_pages=20_000, **BIG)
    lines = run.engine.ledger.lines.values()
    steps = sum(line.num_steps for line in lines)
    tokens = sum(line.step_tokens for line in lines) / steps
    queued = sum(line.queued_s for line in lines) / len(queue)
    print(
        f"{name:8} admits {len(queue) / steps:4.1f} a step, {tokens:4.0f} tokens;",
        end=" ",
    )
    print(f"queued {queued:.2f} s, {run.throughput:.0f} tokens/s")

# %% [markdown]
# One tier fills its sixteen seats at once. With 33, [2.0](#fine) are admitted a step where 16
# were possible, the batch carries
# [572](#fine) tokens instead of [4480](#fine), and throughput falls from [326](#fine)
# to [289](#fine). Queueing barely moves, [0.69](#fine) s, [0.56](#fine) with three tiers and
# [0.65](#fine): the fill tells. So start with few tiers. Quotas for each tier, which some advise
# to begin with, we have not built.
#
# The second: tiers full of requests that only look alike. A prompt template of 200 blocks has a
# variable in it, such as a name or a date:

# %% name="template" claims="V16"
template = ids(200)


def filled(start: int) -> list[int]:
    """The template, with a variable of one block in it."""
    return template[: start * PAGE] + ids(1) + template[start * PAGE :]


for words, start in {"the first block": 0, "the second": 1, "the last": 200}.items():
    arrivals = at_once([filled(start) for _ in range(32)], 32)
    run = serve(arrivals, tiers(8, 100), num_pages=20_000, **BIG)
    print(f"variable in {words:15}: {run.stats['hits']:2} of 32 hit,", end=" ")
    print(f"{run.reused:5.1%} reused, {run.throughput:.0f} tokens/s;", end=" ")
    line = run.engine.ledger.lines[max(run.engine.ledger.lines)]
    print(f"ledger: {line.num_hits} hits, {line.cached_blocks} blocks")

# %% [markdown]
# From the first line to the second the hit rate goes from [0](#template) to
# [31 of 32](#template) requests. Throughput stays where it was: each hit is one block, and the
# other 200 lie behind the fork. Moving the variable to the end triples it. No scheduler can do
# that for you. The ledger shows it as many hits with few blocks: 31 and 31, one each.
#
# ## Was it worth it?
#
# What a rule has to show is work that became answers. So we hold the saved prefill beside the
# throughput and the tail, for both sizes of memory, and beside both what the rule costs to own:

# %% name="judge" claims="V27"
import inspect

import minivllm.grouping as module


def in_time(run: Run, limit_s: float = 20) -> int:
    """Requests that had their first token within the budget."""
    return sum(output.metrics.ttft_s < limit_s for _, output in run.ended)


def change(before: Run, after: Run, what) -> str:
    return f"{100 * (what(after) / what(before) - 1):+4.0f} %"


for memory, runs in {"60,000 blocks": roomy, "20,000 blocks": tight}.items():
    print(memory)
    old = runs["order of arrival"]
    for name, new in runs.items():
        computed = change(old, new, lambda run: run.stats["prefill_tokens"] + 0.0)
        print(f"  {name:18} prefill {computed},", end=" ")
        print(f"throughput {change(old, new, lambda run: run.throughput)},", end=" ")
        print(f"P50 {change(old, new, lambda run: run.ttft_s(50))},", end=" ")
        print(f"P99 {change(old, new, lambda run: run.ttft_s(99))},", end=" ")
        print(f"{in_time(new):3} of 120 within 20 s")
parts = (ArrivalOrder, module.LongestPrefix, module)
sizes = [len(inspect.getsource(part).splitlines()) for part in parts]
print(f"lines: order of arrival {sizes[0]}, longest prefix {sizes[1]}, all {sizes[2]}")

# %% [markdown]
# Where memory is short, [34 %](#judge) less prefill became [32 %](#judge) more throughput with
# tiers, and the P99 is [18 %](#judge) shorter. One tier, no limits, makes the most tokens,
# [39 %](#judge) more. But a caller who gives up after 20 s sees it otherwise: [68](#judge) of 120
# are served in time with tiers, [94](#judge) with longest prefix first, [111](#judge) with
# fewest tokens left. So if memory is short, take longest prefix first: nearly the same
# throughput, a better median and tail, in [31](#judge) lines of the [225](#judge). Fewest left
# serves most callers in time and makes fewer tokens. Tiers are for throughput, and for cold
# groups that must share a small memory.
#
# Where there is room nothing is saved; the median falls because short work goes first, and the
# slowest pay for it with [15 %](#judge). An engine that has memory to spare should stay with
# order of arrival, and that is our default.
#
# What the simulator leaves out: it prices a token of prefill alike at position 100 and at
# 100,000, and a decode step without regard to how long its contexts are. On a real machine the
# long sessions cost more than here, and mixing long and short in one decode step costs
# something ([chapter 7](07_engine.md) showed the lengths). Both speak for grouping more than
# these numbers do. The time to make a plan is left out as well.
#
# ## With weights
#
# SmolLM2, six requests, all at once, in order or one tier a step. Printed is the grouped run, tiers at 2 and 16 blocks: twins of 493 tokens, two that
# share a template of 64, and two strangers.

# %% name="weights" claims="V03"
import torch

from minivllm.loader import load_model, open_checkpoint
from minivllm.runner import ModelRunner

model = load_model(open_checkpoint("smollm2"), torch.device("cpu"), torch.float32)
twin, start = list(range(1_000, 1_493)), list(range(3_000, 3_064))
prompts = [start + [7] * 9, twin, [11] * 40, start + [8] * 20, [12] * 30, twin]
greedy, answers = SamplingParams(temperature=0, max_tokens=4), set()
for publish in ("step", "schedule"):
    for rule in (in_order, tiers(2, 16)):
        engine = make_engine(rule, publish, num_pages=120)
        engine.runner, ended = ModelRunner(model, 120, PAGE), {}
        for prompt in prompts:
            engine.submit(prompt, greedy)
        while engine.has_unfinished():
            ended |= {int(o.request_id): o for o in engine.step() if o.finished}
        answers.add(str([ended[i].outputs[0].token_ids for i in range(6)]))
    print(f"{publish:8} the twins find {[ended[i].num_cached_tokens for i in (1, 5)]}")
    for tier, line in sorted(engine.ledger.lines.items()):
        found = f"{line.estimated_blocks} blocks estimated, {line.cached_blocks} found"
        print(f"  tier {tier}: {line.num_requests} requests, {found}")
print(len(answers), "set of answers from four runs")

# %% [markdown]
# Published after the step the twins find [0](#weights) and [0](#weights), announced
# [0](#weights) and [480](#weights), the full hit.
# The tiers and their estimates are the same both times, and the ledger tells which of the two
# happened.
#
# ## What still goes wrong
#
# A caller whose request was slow cannot see any of this. Was its prefix not there, or evicted,
# or there and its turn had not come? Chapter 13 answers that for each request. Before you go
# on, predict what this queue reuses, and then change the order, the seats or the moment of
# publication:

# %% tags=["live"]
from minivllm.engine import Engine, Limits
from minivllm.grouping import SharedPrefix
from minivllm.prefix_cache import PrefixCache
from minivllm.publication import Announcements
from minivllm.request import SamplingParams
from minivllm.scheduler import ArrivalOrder, Scheduler
from minivllm.simulation import SerialPrefill, SimulatedRunner, VirtualClock

order, seats = "ABABAB", 2  # a letter is a document of 10 pages; change me
announce = False  # pages become visible after the step; True: within it

documents = {letter: [ord(letter)] * 160 for letter in order}
for grouped in (False, True):
    clock, cache = VirtualClock(), PrefixCache(200, 16)
    rule = SharedPrefix(cache.find, 16, tiers=(4,)) if grouped else ArrivalOrder()
    table = Announcements(16) if announce else None
    scheduler = Scheduler(cache, seats, grouping=rule, announcer=table)
    runner = SimulatedRunner(SerialPrefill(1, 1, 1, 0), clock, 1_000, 200, 16)
    engine = Engine(runner, scheduler, Limits(1_000, 4_096), clock=clock)
    for i, letter in enumerate(order):
        engine.submit(documents[letter] + [i] * 9, SamplingParams(max_tokens=4))
    while engine.has_unfinished():
        engine.step()
    print("grouped: " if grouped else "in order:", engine.stats()["cached_tokens"])

# %% [markdown]
# ## Exercises
#
# ### Exercise 1
#
# Three requests share 999, 1,000 and 8,001 blocks with somebody. Which tier of the default
# limits is each in? How many tokens are 8,000 blocks of 16, and how many of 512?

# %% tags=["solution"] name="limits"
from minivllm.grouping import TIERS

tier_of = [sum(blocks >= limit for limit in TIERS) for blocks in (999, 1_000, 8_001)]
tokens_of = [size * TIERS[-1] for size in (16, 512)]
print(tier_of, tokens_of)

# %%
assert (tier_of, tokens_of) == ([0, 1, 2], [128_000, 4_096_000])

# %% [markdown]
# A limit belongs to the tier above it.
#
# ### Exercise 2
#
# One seat. A cold request waits, and behind it there is always another one that hits. How many
# of these run before it under `LongestPrefix` with `max_passes=3`? And how many if two seats
# are free in every step and each request runs for one step?


# %% tags=["solution"] name="overtaken"
def num_before(seats: int, max_passes: int = 3) -> int:
    rule = lambda find, log: LongestPrefix(find, max_passes)
    engine = make_engine(rule, max_running=seats)
    one_token, warm = SamplingParams(max_tokens=1), ids(4)
    engine.submit(warm, one_token)
    engine.step()
    cold = engine.submit(ids(4), one_token)
    for _ in range(40):
        engine.submit(warm, one_token)
    admitted = []
    while cold not in admitted:
        engine.step()
        admitted = [e.details["request_id"] for e in engine.log.of("admit")]
    return admitted.index(cold) - 1  # the first one warmed the cache


before_it = [num_before(1), num_before(2)]
print(before_it)

# %%
assert before_it == [3, 6]

# %% [markdown]
# The bound counts steps. In each of them all seats may go to others.
#
# ### Exercise 3
#
# Under `step`, the grouped queue of sixteen reused [0](#worse) tokens, since all four of a kind
# began together. Write a grouping that admits only the first of those who have an uncached
# prefix in common. How many tokens are reused then?


# %% tags=["solution"] name="leaders"
class OneOfEach(SharedPrefix):
    def plan(self, waiting):
        common = {e.state: e for e in self.estimate(waiting)}
        leaders, chosen = set(), []
        for state in super().plan(waiting):
            prefix = state.tokens[: common[state].common * PAGE].tobytes()
            if common[state].cached >= common[state].common or prefix not in leaders:
                chosen.append(state)
            leaders.add(prefix)
        return chosen


queue = [document + ids(2) for _ in range(4) for document in documents_of_32]
rule = lambda find, log: OneOfEach(find, PAGE, (8,))
reused = serve(at_once(queue, 32), rule, publish="step", **FOUR_SEATS).stats
print(reused["cached_tokens"], "tokens reused")

# %%
assert reused["cached_tokens"] == 6_144

# %% [markdown]
# As many as with announcements. The companions come a step later, and find it all.
