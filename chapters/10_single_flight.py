# %% [markdown]
# # 10. Single-flight
#
# Two identical requests, a cold cache, one step. Chapter 9 made pages visible as early as they
# can be, and these two still compute everything twice: neither has anything to show when the
# other one looks. So let the second one wait. The first computes the prompt, the second finds
# it in the cache. Half of the prefill is saved. What happens to the mean time to first token?
#
# The machine below is the one of chapter 8 that fits the published measurements: a prefill of
# 493 tokens takes 1, which is our unit of time, a cached one takes s = .035, a decode of 128
# tokens takes D = 2.66, and every further request in a decode step costs k = .91 of the first.
# Pages become visible when their owner ends, as in the engine that was measured. Scheduler,
# cache and engine are the real ones, and the class that makes the second one wait is borrowed
# from the package until we have built it.

# %% tags=["hide-input"]
from dataclasses import dataclass as plain_dataclass
from statistics import mean

from minivllm.engine import Engine, Limits, PublishAtFinish, PublishEachStep
from minivllm.events import EventLog
from minivllm.prefix_cache import PrefixCache
from minivllm.request import RequestOutput, SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.simulation import SerialPrefill, SimulatedRunner, VirtualClock
from minivllm.single_flight import PromptAtLeast as ReadyPromptAtLeast
from minivllm.single_flight import SingleFlight as ReadySingleFlight

PAGE, VOCAB, NUM_PAGES = 16, 50_000, 400
POLICIES = ("none", "completion", "prefill")
prompt = [7 * i % VOCAB for i in range(493)]
s = 0.035


def machine(k: float = 0.91, decode: float = 2.66) -> SerialPrefill:
    token = (1 - s) / 480
    return SerialPrefill(1 - 493 * token, token, decode / 127, k)


# %%
def make_engine(policy: str, cost=None, runner=SimulatedRunner, **options) -> Engine:
    """An engine on a virtual clock; `policy` says how long twins wait."""
    clock, publisher = VirtualClock(), options.pop("publisher", PublishAtFinish())
    log = EventLog()
    scheduler = Scheduler(PrefixCache(NUM_PAGES, PAGE), observer=log, **options)
    engine = Engine(
        runner(cost or machine(), clock, VOCAB, NUM_PAGES, PAGE),
        scheduler,
        Limits(VOCAB, 8_192),
        clock=clock,
        observer=log,
        publisher=publisher,
    )
    if policy == "prefill":
        engine.publisher = ReadyPromptAtLeast(publisher)
    if policy != "none":
        engine.coordinator = ReadySingleFlight(policy)
    return engine


# %% tags=["hide-input"]
@plain_dataclass
class Served:
    """What came of a run: outputs in order of arrival, statistics, and its steps."""

    outputs: list[RequestOutput]
    stats: dict[str, int]
    steps: list[tuple[float, float, list]]  # start, end, chunks

    @property
    def ttft(self) -> float:
        return mean(o.metrics.ttft_s for o in self.outputs)

    @property
    def slowest(self) -> float:
        """The longest time from a submission to its end."""
        return max(o.metrics.e2e_s for o in self.outputs)

    @property
    def last(self) -> float:
        """When the last request ends."""
        return max(o.metrics.finished_s for o in self.outputs)


def run_all(engine: Engine, then=None) -> Served:
    """Step to the end, and call `then(engine, num_steps)` after each step."""
    ended, steps = {}, []
    while engine.has_unfinished():
        start = engine.clock.now()
        ended |= {o.request_id: o for o in engine.step() if o.finished}
        (*_, event) = engine.observer.of("schedule")
        steps.append((start, engine.clock.now(), event.details["chunks"]))
        if then and (output := then(engine, len(steps))):
            ended[output.request_id] = output
        engine.observer.events.clear()
    outputs = [ended[name] for name in sorted(ended, key=int)]
    return Served(outputs, engine.stats(), steps)


# %% name="surprise" claims="R14 R15"
def serve(policy: str, num_requests: int, cost=None, **options) -> Served:
    """So many identical requests at once, of 128 output tokens each."""
    engine = make_engine(policy, cost, **{"max_batch_tokens": 512} | options)
    for _ in range(num_requests):
        engine.submit(prompt, SamplingParams(max_tokens=128))
    return run_all(engine)


for num_requests in (2, 8):
    for policy in ("none", "completion"):
        run = serve(policy, num_requests)
        print(
            f"N = {num_requests}, {policy:10} {run.stats['prefill_tokens']:5} prompt tokens "
            f"computed · mean TTFT {run.ttft:.2f}, slowest {run.slowest:.2f}"
        )

# %% [markdown]
# With eight requests everything is as one would hope: the mean TTFT falls from
# [4.87](#surprise) to [3.54](#surprise). With two, half of the prompt work is gone, and the
# mean TTFT *rises* from [1.54](#surprise) to [2.35](#surprise). The slowest request ends at
# [6.36](#surprise) and not at [7.09](#surprise). So the machine did less, the last answer came
# sooner, and the callers waited longer for their first word.
#
# The belief that breaks here is that *less duplicate work is lower latency*. Work is what the
# machine does. Latency is also what it makes you wait for. Let us build the thing that waits,
# and then look at where the time goes.
#
# ## A flight
#
# The name comes from Go, whose `singleflight` lets many callers of one function share a single
# call. Our function is the prefill. Its argument is the exact input: the token ids, and the
# `extra_key` that keeps tenants apart (chapter 2). The first request with an input *leads*,
# those that come while it computes *follow*. Together they are a flight.

# %% export="single_flight.py"
"""Requests with one input wait for one of them to compute its prefix."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from minivllm.engine import Publisher
from minivllm.hashing import token_bytes
from minivllm.publication import PublishPrompt
from minivllm.request import ExtraKey, TokenIds, check_extra_key
from minivllm.scheduler import MAX_PASSES, RequestState, Scheduler

RELEASES = ("completion", "prefill")
FlightKey = tuple[bytes, ExtraKey]


class UnknownRequest(LookupError):
    """No live request has this id."""


@dataclass(eq=False)
class Flight:
    """One input that is being computed: who computes it, and who waits, in order."""

    key: FlightKey
    leader: str
    followers: dict[str, None] = field(default_factory=dict)  # an ordered set


# %% [markdown]
# The key holds the tokens themselves and no hash of them. A follower bets its waiting time on
# being equal to its leader; there is no page to compare with yet. The followers are a dict
# without values, because a Python set would forget who came first.
#
# The coordinator has two tables, from inputs to flights and from requests to flights, and a set
# whose use will show.


# %% export="single_flight.py"
class SingleFlight:
    """The first request of an input leads; the identical ones wait for its prefill.

    Coordinates the prompt, not the answer: followers run by themselves afterwards, with
    their own sampling parameters. `release` says when: "prefill" when the leader's
    prompt is computed, "completion" when the leader has ended. An id is live from
    `admit` to `finished` or `aborted`. (After mini-vllm-rs; Go calls it singleflight.)
    """

    def __init__(self, release: str = "prefill") -> None:
        if release not in RELEASES:
            raise ValueError(f"release must be one of {RELEASES}, not {release!r}")
        self.release = release
        self.num_flights = 0  # opened so far
        self.num_followers = 0  # requests that waited
        self._flights: dict[FlightKey, Flight] = {}
        self._members: dict[str, Flight] = {}  # leaders and followers
        self._released: set[str] = set()  # free of any flight, and not ended yet


# %% [markdown]
# A request that comes in either opens a flight or stands in line. Note what is not asked:
# whether the cache holds a part of the prompt. What is cached now may be evicted before the
# follower runs, and a leader that is nearly done holds nobody up for long.


# %% export="single_flight.py"
class SingleFlight(SingleFlight):
    def admit(
        self, request_id: str, token_ids: TokenIds, extra_key: ExtraKey = None
    ) -> str:
        """Take a request in: "leader" runs, "follower" waits until it is released.

        Raises `ValueError` if the id is live already.
        """
        if request_id in self._members or request_id in self._released:
            raise ValueError(f"request {request_id!r} was admitted before")
        check_extra_key(extra_key)
        key = (token_bytes(token_ids), extra_key)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = Flight(key, request_id)
            self.num_flights += 1
        else:
            flight.followers[request_id] = None
            self.num_followers += 1
        self._members[request_id] = flight
        return "leader" if flight.leader == request_id else "follower"


# %% [markdown]
# A wait has to end. Two moments offer themselves: when the leader's prompt is computed, and
# when the leader has ended. The engine reports both, and `release` says which one counts.


# %% export="single_flight.py"
class SingleFlight(SingleFlight):
    def prefilled(self, request_id: str) -> list[str]:
        """The prompt of a request is computed and published; who may run now.

        Nobody under "completion", or if the request is in no flight any more. Raises
        `UnknownRequest`, and `ValueError` for a request that still waits.
        """
        if request_id in self._released:
            return []
        flight = self._led_by(request_id)
        return self._close(flight) if self.release == "prefill" else []

    def finished(self, request_id: str) -> list[str]:
        """A request has ended well; who may run now. Raises like `prefilled`."""
        released = []
        if request_id not in self._released:
            released = self._close(self._led_by(request_id))
        self._released.remove(request_id)
        return released


# %% [markdown]
# To release is to close the flight: it leaves both tables, and the next request with that input
# will open another one. Its members still run and will report their ends. We keep their ids,
# and nothing else about them, so that a report can be told from a mistake. Chapter 11 is about
# this set; three designs without it came before.


# %% export="single_flight.py"
class SingleFlight(SingleFlight):
    def _close(self, flight: Flight) -> list[str]:
        """End a flight; of its members only the ids are remembered, while they live."""
        del self._flights[flight.key]
        for request_id in (flight.leader, *flight.followers):
            del self._members[request_id]
            self._released.add(request_id)
        return list(flight.followers)

    def _flight_of(self, request_id: str) -> Flight:
        flight = self._members.get(request_id)
        if flight is None:
            raise UnknownRequest(f"no live request has the id {request_id!r}")
        return flight

    def _led_by(self, request_id: str) -> Flight:
        flight = self._flight_of(request_id)
        if flight.leader != request_id:
            raise ValueError(f"request {request_id!r} waits: it has computed nothing")
        return flight


# %% [markdown]
# And the leader may end before its time: its caller hangs up, or its forward pass raises.
# Whoever waits for it must not wait for ever, and must not be told that all is well. So the
# next in line takes over and computes.


# %% export="single_flight.py"
class SingleFlight(SingleFlight):
    def aborted(self, request_id: str) -> tuple[str | None, list[str]]:
        """A request ended otherwise: who leads its flight now (if that changed), and
        who may run. Raises `UnknownRequest`."""
        if request_id in self._released:
            self._released.remove(request_id)
            return None, []
        flight = self._flight_of(request_id)
        del self._members[request_id]
        if flight.leader != request_id:
            del flight.followers[request_id]
            return None, []
        return self._promote(flight), []

    def _promote(self, flight: Flight) -> str | None:
        """Let the next in line lead; without one the flight ends."""
        heir = next(iter(flight.followers), None)
        if heir is None:
            del self._flights[flight.key]
        else:
            del flight.followers[heir]
            flight.leader = heir
        return heir


# %% [markdown]
# The rest answers questions: whom somebody waits for, who waits, how many did, and whether each
# live id has exactly one place.


# %% tags=["hide-input"] export="single_flight.py"
class SingleFlight(SingleFlight):
    def leader_of(self, request_id: str) -> str | None:
        """Who computes for a waiting request; None if it does not wait."""
        flight = self._members.get(request_id)
        waits = flight is not None and flight.leader != request_id
        return flight.leader if flight and waits else None

    def waiting_for(self, request_id: str) -> Sequence[str]:
        """Who waits for this request, in order."""
        flight = self._members.get(request_id)
        leads = flight is not None and flight.leader == request_id
        return tuple(flight.followers) if flight and leads else ()

    def stats(self) -> dict[str, int]:
        """Flights opened and requests that waited, so far."""
        return {"flights": self.num_flights, "followers": self.num_followers}

    def start_over(self) -> None:
        """Forget all live requests, whatever state they are in."""
        self._flights, self._members, self._released = {}, {}, set()

    def check(self) -> None:
        """Assert that every live id has exactly one place, and no flight is empty."""
        seen: set[str] = set()
        for key, flight in self._flights.items():
            members = {flight.leader, *flight.followers}
            assert key == flight.key and not members & seen
            assert len(members) == 1 + len(flight.followers)
            assert all(self._members[request_id] is flight for request_id in members)
            seen |= members
        assert seen == set(self._members), "a member of a flight that is closed"
        assert not seen & self._released, "released, and still in a flight"


# %% [markdown]
# A conversation with it, without an engine:

# %% name="talk" claims="R11"
ReadySingleFlight = SingleFlight  # the cells above use ours from here on
flights = SingleFlight("prefill")
for name, ids, key in (
    ("a", prompt, None),
    ("b", prompt, None),
    ("c", prompt[:-1], None),
    ("d", prompt, "another tenant"),
    ("e", prompt, None),
):
    print(f"{name} comes: {flights.admit(name, ids, key)}")
print("a is prefilled, may run now:", flights.prefilled("a"))
print("f comes:", flights.admit("f", prompt))
print("a ends:", flights.finished("a"), "· stats:", flights.stats())

# %% [markdown]
# One token less makes `c` a stranger, and so does another `extra_key` for `d`. `f` has the very
# tokens of `a`, whose flight is closed, and leads its own.
#
# ## The promise behind an early release
#
# Followers are matched when they are scheduled, long after they were submitted. They will find
# what is *published* by then. If pages become visible only when their owner ends, a follower
# that is let go after the leader's prefill finds nothing and computes everything, after having
# waited for it. Whoever releases early must publish early. This wrapper around any publication
# policy shows the prompt as soon as it is complete:


# %% export="single_flight.py"
class PromptAtLeast:
    """Shows what a policy shows, and a whole prompt as soon as it is computed.

    Release after prefill needs it: whoever is let go must find what he waited for.
    """

    def __init__(self, policy: Publisher) -> None:
        self.policy = policy

    def num_visible(self, state: RequestState) -> int:
        """What the policy says, or all of a computed prompt."""
        prompt = PublishPrompt().num_visible(state)
        return max(prompt, self.policy.num_visible(state))


# %% name="promise" claims="R16 R20 R21"
ReadyPromptAtLeast = PromptAtLeast
for label, publisher, wrapped in (
    ("at the end", PublishAtFinish(), False),
    ("at the end, prompt at least", PublishAtFinish(), True),
    ("each step, prompt at least", PublishEachStep(), True),
):
    engine = make_engine("prefill", publisher=publisher)
    engine.publisher = PromptAtLeast(publisher) if wrapped else publisher
    for _ in range(3):
        engine.submit(prompt, SamplingParams(max_tokens=128))
    held = [engine.stats()["held"]]
    engine.step()
    held.append(engine.stats()["held"])
    cached = [o.num_cached_tokens for o in run_all(engine).outputs]
    print(f"{label:28} held {held[0]}, after the prefill {held[1]}; cached {cached}")

# %% [markdown]
# In the first line two requests wait for the prefill and then do it all over again. With the
# wrapper they find [480](#promise) tokens each, and publication after each step adds nothing to
# that. It is not useless, though: it serves those who wait for nobody, such as requests that
# share only a part of their prompts.
#
# ## The prompt, not the answer
#
# What a follower gets is a prefix in the cache, and nothing else. It enters the queue at its
# place of arrival, takes its own seat, has its own sampling parameters and ends when it wants
# to. Two lines of a test runner show it: this one draws its tokens with the seed of the
# request.


# %% name="answers" claims="R12"
class Seeded(SimulatedRunner):
    def _compute(self, chunk):
        token = super()._compute(chunk)
        return token if token is None else (token + (chunk.params.seed or 0)) % VOCAB


wishes = [(3, 1), (5, 2), (2, 3)]  # max_tokens, seed
engine = make_engine("completion", runner=Seeded)
for max_tokens, seed in wishes:
    engine.submit(prompt, SamplingParams(max_tokens=max_tokens, seed=seed))
for output in run_all(engine).outputs:
    print(f"cached {output.num_cached_tokens:3}, answer {output.outputs[0].token_ids}")

# %% [markdown]
# Three answers of different length with other tokens, and one prefill. (A test does the same
# with a real model and temperatures above 0, and compares each answer with the one that the
# request gets alone.) To hand out the leader's answer as well would be a cache of answers, and
# wrong for all who sample.
#
# ## Where the time goes
#
# Now the three policies on the two requests of the beginning, drawn from the steps of the run:


# %% tags=["hide-input"]
from minivllm.drawing import draw_rows


def gantt(served: Served, label: str, at: str = ""):
    """A row for each request: it waits, computes its prompt, decodes."""
    for output in served.outputs:
        name, cells = output.request_id, []
        now = output.metrics.arrival_s
        for start, end, chunks in served.steps:
            size = sum(n for who, _, n in chunks if who == name)
            if not size:
                continue
            state = "decoded" if size == 1 else "computed"
            if start > now + 1e-9:
                cells.append((now, start - now, "plain", "waits"))
            if cells and cells[-1][2] == state == "decoded" and start <= now + 1e-9:
                cells[-1] = (cells[-1][0], end - cells[-1][0], state, "decodes")
            else:
                words = str(size) if size > 1 and end - start > 0.3 else ""
                cells.append((start, end - start, state, words))
            now = end
        wide = [(a, n, c, w if n > 0.6 else "") for a, n, c, w in cells]
        yield f"{label}, {name}", wide


draw_rows(
    [row for policy in POLICIES for row in gantt(serve(policy, 2), policy)],
    caption="Two identical requests at once; time runs to the right, numbers are prompt tokens. "
    "Under none, the second prefill ends at 2 and both decode side by side. Under completion the "
    "second request sits through the first one's decode: the mean TTFT is worse, and as each "
    "decodes alone and one prefill is missing, the end is earlier. Under prefill the wait is the "
    "prefill and no more.",
)

# %% [markdown]
# In the middle pair you see both halves of the surprise. Request 1 waits through a decode that
# has nothing to do with it. Its TTFT is 1 + D + s, where its own prefill would have been done
# at 2. And it ends before anybody does in the upper pair: a prefill is missing, and two decodes
# one after the other take 2D, together (1 + k)D, which is nearly as much.
#
# The prompt was ready at 1. So why wait any longer? Release after prefill lets the second one
# go then, and it comes s after the leader. All sizes, with the cached tokens of all requests
# together, and in the last line a run without coordination in which each step publishes:

# %% name="sizes" claims="R13 R17"
table = {(n, policy): serve(policy, n) for n in (2, 4, 8) for policy in POLICIES}
table[8, "none, step"] = serve("none", 8, publisher=PublishEachStep())
for (n, policy), run in table.items():
    longest = max(o.metrics.ttft_s for o in run.outputs)
    print(
        f"N = {n}, {policy:10} cached {run.stats['cached_tokens']:4} · TTFT mean "
        f"{run.ttft:.2f}, longest {longest:.2f} · slowest {run.slowest:.2f}"
    )

# %% tags=["hide-input"]
draw_rows(
    [
        (f"N = {n}, {policy}: {run.ttft:.2f}", [(0, run.ttft, colour, "")])
        for (n, policy), run in table.items()
        for colour in [
            {"prefill": "published", "completion": "private"}.get(policy, "lost")
        ]
    ],
    caption="Mean TTFT, in prefills. Waiting for completion is the worst choice for two "
    "requests; for eight it beats computing alone. Waiting for the prefill is best at each size.",
)

# %% [markdown]
# Both releases restore the same tokens, [3,360](#cached) for eight requests, and release after
# prefill has the lower mean TTFT at each size.
#
# Why does the sign turn between N = 4 and N = 8? Under completion the followers wait for *one*
# prefill and *one* decode, however many they are; the longest wait grows from [3.70](#sizes) to
# [3.91](#sizes). Alone, each waits for the prefills before its own, and the longest wait grows
# from [2.03](#sizes) to [8.61](#sizes). On paper the means are (N + 1) / 2 alone and 1 + (N −
# 1)(D + (N − 1)s) / N under completion. For N = 2 that is 1.5 against 2.35, for N = 8 4.5
# against 3.54.
#
# The last line is a warning about baselines. If pages become visible after each step, as in
# chapter 9, eight requests with a budget of 512 tokens find [2,880](#cached) tokens without any
# coordination: the budget lets them start one after the other, and the later ones meet pages
# that are there. Their mean TTFT is [2.09](#sizes), and release at completion loses to it.
# Release after prefill still wins, with [1.23](#sizes).

# %% tags=["hide-input"] name="cached"
for policy in ("completion", "prefill", "none, step"):
    print(f"N = 8, {policy}: {table[8, policy].stats['cached_tokens']:,} tokens cached")
assert table[8, "completion"].stats["cached_tokens"] == 3_360
assert all(table[n, "prefill"].ttft < table[n, "completion"].ttft for n in (2, 4, 8))

# %% [markdown]
# ## The one who comes as decode begins
#
# So far everybody came at once. Let the second request come when the first has just got its
# first token. The published measurement compares the releases in this case: early release cuts
# the mean TTFT by 72 %, and makes the slowest completion 14 % *longer*. Why would starting
# earlier make anyone end later?


# %% name="late" claims="R18 R19"
def serve_late(policy: str, cost=None) -> Served:
    """The second of two requests comes right after the first one's first token."""
    engine = make_engine(policy, cost, max_batch_tokens=512)
    engine.submit(prompt, SamplingParams(max_tokens=128))

    def second(engine, num_steps):
        if num_steps == 1:
            engine.submit(prompt, SamplingParams(max_tokens=128))

    return run_all(engine, second)


late = {policy: serve_late(policy) for policy in ("completion", "prefill")}
for policy, run in late.items():
    ttfts = [f"{o.metrics.ttft_s:.2f}" for o in run.outputs]
    ends = [f"{o.metrics.e2e_s:.2f}" for o in run.outputs]
    print(
        f"{policy:10} {run.stats['flights']} flights, TTFT {ttfts}, completion {ends}",
        end="",
    )
    print(f", the last at {run.last:.2f}")


def change_percent(name: str, k: float = 0.91) -> float:
    """Early release against release at completion."""
    runs = [serve_late(policy, machine(k)) for policy in ("completion", "prefill")]
    before, after = (getattr(run, name) for run in runs)
    return 100 * (after / before - 1)


for name in ("ttft", "slowest", "last"):
    print(f"{name}: {change_percent(name):+.0f} %")

# %% tags=["hide-input"]
draw_rows(
    [row for policy, run in late.items() for row in gantt(run, policy)],
    caption="The second request comes when the first begins to decode. Above it waits for the end, "
    "and each decodes alone. Below it starts at once, and the two decode side by side: the "
    "longest bar is now that of request 0, which shares every step.",
)

# %% [markdown]
# The run says [-71](#late) and [+14](#late) percent. (On paper, without the step in which one
# decodes while the other computes 13 tokens, the first is 1 − (1 + s) / (1 + D + s), or 72 %.)
# Be careful with these two: s, D and k were chosen to fit this measurement and one of chapter
# 8's. That they come out says that the model can hold them. The signs for N = 2 and 8 above are
# what it *predicts*, and they are the published ones.
#
# Look at the number of flights. Under early release there are [2](#late). The first is closed
# when the second request comes, so it opens its own, finds a warm prefix, and computes 13
# tokens. Then both decode in the same steps, and each step costs 1 + k. Under completion there
# is [1](#late) flight, and no company.
#
# Now look at *whose* completion got longer. The second request improved, from [5.36](#late) to
# [5.12](#late). It is request 0 that went from [3.66](#late) to [6.10](#late): it had the
# machine to itself, and now shares every step. And the last end is *earlier*, at [6.12](#late)
# and not at [6.36](#late). A wait was moved from one request to another, and "slowest
# completion" compares two different requests.
#
# ## Where the sign turns
#
# Under completion the slowest is the follower, with D + s + D. Under early release it is the
# leader, with 1 + s + (1 + k)D. The second is larger if k > 1 − 1 / D. What does that mean for
# a machine on which company is cheap? On the CPU of chapter 8 each companion costs .25 of a
# step. The changes for several k:

# %% name="turn"
for k in (0.0, 0.25, 0.5, 0.6, 0.65, 0.91):
    changes = [f"{change_percent(name, k):+.1f} %" for name in ("ttft", "slowest")]
    print(f"k = {k:<4} mean TTFT {changes[0]}, slowest completion {changes[1]}")
print(f"1 - 1 / D = {1 - 1 / 2.66:.3f}")

# %% [markdown]
# The TTFT does not care about k. The slowest completion does, and its sign turns between
# [0.6](#turn) and [0.65](#turn). With k = .25 early release shortens the slowest completion by
# [18.7](#turn) percent: there is nothing left to weigh. (D differs between machines too; the
# formula has both.) The published +14 % belongs to a laptop's GPU with a small model, on which
# a decode step for two takes nearly twice as long as for one.
#
# Publication decides when work *can* be used again. Coordination decides who waits for it, and
# how long. Neither says whether the waiting pays. That is the machine's k and D.
#
# ## Life's accidents
#
# A request that waits for another one depends on it, and everything that can happen to the
# other one happens. Three identical requests, with a budget of 128 tokens so that the prompt
# takes four steps, and a bad moment each:


# %% name="accidents"
import logging


class FailsOnce(SimulatedRunner):
    num_runs = 0

    def run(self, chunks):
        self.num_runs += 1
        if self.num_runs == 2:
            raise RuntimeError("a kernel failed")
        return super().run(chunks)


def abort(name: str, after: int):
    """Hang up request `name` after so many steps."""
    return lambda engine, n: engine.abort(name) if n == after else None


def three(then=None, runner=SimulatedRunner) -> Served:
    engine = make_engine("prefill", runner=runner, max_batch_tokens=128)
    names = [engine.submit(prompt, SamplingParams(max_tokens=8)) for _ in range(3)]
    if then == "queued":
        engine.abort(names[0])
        then = None
    served = run_all(engine, then)
    engine.coordinator.check()
    assert not engine.coordinator._released and served.stats["pages_pinned"] == 0
    return served


logging.getLogger("minivllm").disabled = True  # it would log a traceback
accidents = {
    "nothing happens": three(),
    "the leader hangs up in the queue": three("queued"),
    "the leader hangs up in mid-prompt": three(abort("0", after=2)),
    "the leader hangs up while decoding": three(abort("0", after=5)),
    "the leader's pass fails": three(runner=FailsOnce),
    "a follower hangs up": three(abort("1", after=2)),
}
for label, run in accidents.items():
    ends = [f"{o.request_id} {o.outputs[0].finish_reason}" for o in run.outputs]
    cached = [o.num_cached_tokens for o in run.outputs]
    print(f"{label:35} cached {cached} · {', '.join(ends)}")

# %% tags=["hide-input"]
draw_rows(
    list(gantt(accidents["the leader hangs up in mid-prompt"], "request")),
    caption="Request 0 hangs up after two steps of 128 tokens. Request 1 inherits, finds these 256 "
    "tokens in the cache and computes the rest; request 2 waits for it now.",
)

# %% [markdown]
# A request that hangs up is told so by `abort` itself and by no step, so it is not among these
# ends unless it ended otherwise first. A leader that hangs up in mid-prompt leaves what it has
# computed: its heir finds [256](#accidents) tokens. After a failed pass the leader ends with `error`, and the next one
# goes on from the last page that was computed before, at [128](#accidents). It may fail too,
# and then for its own reasons; nobody is told success or failure on account of somebody else.
# Once released, followers do not notice that their leader is gone. The engine has to do little
# for all this: when `aborted` names an heir, it puts the heir into the queue at its place of
# arrival.
#
# Other accidents are quieter, and the tests have a case for each. A leader is preempted: it
# goes back to the queue, its followers wait on, and its prefill is reported when it is done. A
# request that can never fit is refused before a flight is opened. A client that is gone is one
# that hangs up: whoever notices calls `abort`. The same input may come again while members of
# its flight that were released still run: it opens a new flight, and as those are remembered by
# their ids alone, nothing that they do can touch it. And a follower may be more
# urgent than its leader. It would then wait behind everything that stands before the leader, so
# a leader carries the highest priority of those who wait for it. The engine computes that anew
# when one joins, leaves or inherits, and the release ends it.
#
# And a request may be its own twin. With `n=4` it asks for four continuations of one prompt, and
# that is four identical requests at one moment (chapter 7), numbered 0 to 3: the first of them
# leads, three follow. Another caller, number 4, sends the same prompt right behind them. Once
# nothing happens, and once the caller of the four hangs up in the middle of the prompt:


# %% name="continuations"
def four_and_a_twin(then=None) -> Served:
    engine = make_engine("prefill", max_batch_tokens=128)
    engine.submit(prompt, SamplingParams(max_tokens=8, n=4))
    engine.submit(prompt, SamplingParams(max_tokens=8))
    return run_all(engine, then)


for label, run in (
    ("nothing happens", four_and_a_twin()),
    ("the four hang up", four_and_a_twin(abort("0", after=2))),
):
    print(f"{label}: {run.stats['prefill_tokens']} tokens computed")
    for output in run.outputs:
        ends = [completion.finish_reason for completion in output.outputs]
        found = output.num_cached_tokens
        print(f"  request {output.request_id}: {found} tokens cached, {ends}")

# %% [markdown]
# Five answers cost [545](#continuations) tokens of prefill, one prompt and four times 13. If the
# four go, they go from the last follower to the leader, so that none of them inherits only to
# leave. Number 4 inherits, finds the [256](#continuations) tokens that the leader had computed,
# and in all [493](#continuations) have been computed, each once.
#
# While they wait followers hold no page and no slot of the batch. This is not a detail. In an
# engine that parks them in slots, seven followers fill a small batch, and no stranger gets in
# until the leader is done. With four slots:

# %% name="slots"
engine = make_engine("completion", max_running=4)
for _ in range(8):
    engine.submit(prompt, SamplingParams(max_tokens=128))
engine.submit([1] * 40, SamplingParams(max_tokens=8))
engine.step()
stats = engine.stats()
print(f"running {stats['running']}, waiting {stats['waiting']}, held {stats['held']}")
run_all(engine)
print({name: engine.stats()[name] for name in ("flights", "followers", "held")})

# %% [markdown]
# ## Those who share a part
#
# Two prompts with 480 tokens in common and 13 of their own are strangers to a coordinator that
# compares whole inputs:


# %% name="strangers"
def pair(second: list[int]) -> tuple[list[int], int]:
    engine = make_engine("prefill")
    for ids in (prompt, second):
        engine.submit(ids, SamplingParams(max_tokens=8))
    run = run_all(engine)
    return [o.num_cached_tokens for o in run.outputs], run.stats["followers"]


print("identical:        cached, followers", pair(prompt))
print("480 of 493 equal: cached, followers", pair(prompt[:480] + [1] * 13))

# %% [markdown]
# The second pair reuses [0](#strangers) tokens, exactly as the twins of the prologue. Most
# requests that share something share a system prompt, so for most traffic single-flight does
# nothing.
#
# Could they wait as well? A flight is a bad model for it. Its members share all of one input;
# of two prompts with a common beginning every pair shares another length, and what is still
# missing of it shrinks with each step of the one who computes. A table of who waits for which
# pages would have to follow all that, and every accident above once more.
#
# So let us keep no table. In each step the scheduler asks a `Grouping` whom to admit (chapter
# 7), and a request can be left out of that answer. Whether it should be is a question about
# this moment: is somebody about to compute at least m pages that I need, and that the cache
# does not have? The wrapper below asks it anew in every step. `cache` finds what is there, and
# the tokens of those who are still in their prompts say what will be. A plan looks at as many
# requests as there are free seats, and at 64 more, so a long queue does not make a long step.


# %% export="single_flight.py"
MAX_HELD = 64  # requests that may wait in one step: bounds the time that a plan takes


class WaitForPrefix:
    """Lets a request wait while another one computes the pages that it needs next.

    It waits for a running request, or one that is planned before it, whose prompt goes
    on like its own for at least `min_pages` pages beyond what is cached. Nothing is
    remembered: each step asks anew. Who was passed over in `max_passes` steps waits no
    more. Wraps the grouping of a scheduler; a prompt must be published, at the latest,
    when it is computed.
    """

    def __init__(
        self, scheduler: Scheduler, min_pages: int, max_passes: int = MAX_PASSES
    ) -> None:
        self.scheduler = scheduler
        self.grouping = scheduler.grouping
        self.min_pages = min_pages
        self.max_passes = max_passes

    def victim(self, unserved: Sequence[RequestState]) -> RequestState:
        """The choice of the grouping."""
        return self.grouping.victim(unserved)

    def _waits(
        self, state: RequestState, num_cached: int, computing: Sequence[RequestState]
    ) -> bool:
        end = num_cached + self.min_pages * self.scheduler.cache.page_size
        if end > len(state.sought) or state.num_passed >= self.max_passes:
            return False
        key, head = state.request.extra_key, state.tokens[:end]
        return any(
            other.request.extra_key == key and other.tokens[:end] == head
            for other in computing
        )

    def _num_cached(self, state: RequestState) -> int:
        key = state.request.extra_key
        return self.scheduler.cache.find(state.sought, key).matched_len


def in_prompt(state: RequestState) -> bool:
    """Whether a part of the prompt has no K/V yet."""
    return state.num_committed < len(state.request.prompt_token_ids)


# %% [markdown]
# Two prompts that agree on the first `end` tokens share the m pages after the cached ones; that
# is all there is to compare. The plan then seems to write itself: leave out those who wait.


# %% name="burst"
class Patient(WaitForPrefix):
    def plan(self, waiting):
        computing = [s for s in self.scheduler.running if in_prompt(s)]
        planned = []
        for state in self.grouping.plan(waiting):
            if not self._waits(state, self._num_cached(state), computing):
                planned.append(state)
                computing.append(state)
        return planned


def serve_mixed(prompts, waits=None, num_decoding=0, min_pages=4, **options) -> Served:
    """Prompts that come at once, beside so many requests that decode already."""
    engine = make_engine("prefill", publisher=PublishEachStep(), **options)
    if waits:
        engine.scheduler.grouping = waits(engine.scheduler, min_pages)
    for i in range(num_decoding):
        engine.submit([9_000 + i], SamplingParams(max_tokens=30))
    if num_decoding:
        engine.step()
    for ids in prompts:
        engine.submit(ids, SamplingParams(max_tokens=128))
    served = run_all(engine)
    served.outputs = served.outputs[num_decoding:]
    return served


def with_tail(num_shared: int, number: int, num_own: int = 13) -> list[int]:
    """A prompt that shares its beginning, with an end of its own."""
    return [7 * i % VOCAB for i in range(num_shared)] + [40_000 + number] * num_own


burst, long_burst = ([with_tail(n, i) for i in range(8)] for n in (480, 2_000))
for prompts, budget in (
    *((burst, budget) for budget in (512, 2_048, 8_192)),
    (long_burst, 512),
):
    for label, waits in (("alone", None), ("patient", Patient)):
        run = serve_mixed(prompts, waits, max_batch_tokens=budget)
        print(
            f"{len(prompts[0]):5,} each, budget {budget:5,}, {label:7} "
            f"{run.stats['prefill_tokens']:5,} computed · mean TTFT {run.ttft:.2f}"
        )

# %% [markdown]
# Eight prompts with 480 tokens in common need [584](#burst) tokens of work. Patient, they cost
# that with any budget. Alone they cost up to [3,944](#burst), and the more room a step has, the
# worse: all who start in one step start cold. The last two lines have prompts of four steps.
# There the second request starts beside the first one's last chunk, finds what three steps have
# shown, and computes that chunk again: [2,568](#burst) tokens and not [2,104](#burst).
#
# How long does a request wait? Those who run are served first, each with all that the budget
# allows. So a step that has room for somebody new has computed the rest of *every* prompt that
# was running, and if the pages are shown, nobody has to wait for these in the next one. By this
# reckoning a wait costs one step, the one in which the request could have started.
#
# It can happen again, if somebody who starts before it shares more of its prompt; but each time
# m of its own pages have appeared. Nobody waits for ever: the first in the plan has nobody before
# it, and whoever runs moves on. And if the one who computes hangs up, fails or is preempted,
# there is nothing to repair: the next plan asks again.
#
# ## The seat that was given up
#
# Behind the two who share stands a stranger with a prompt of 4,000 tokens:

# %% name="stranger"
queue = [with_tail(480, 0), with_tail(480, 1), [2] * 4_000]
given_up = {
    label: serve_mixed(queue, waits, max_batch_tokens=512)
    for label, waits in (("alone", None), ("patient", Patient))
}
for label, run in given_up.items():
    ttfts = ", ".join(f"{o.metrics.ttft_s:.2f}" for o in run.outputs)
    print(f"{label:7} mean TTFT {run.ttft:.2f}, each {ttfts}")

# %% [markdown]
# Request 1 has its first token at [9.32](#stranger), and at [2.11](#stranger) if it does not
# wait. In the step in which it waited there was room for 19 tokens. The stranger took them, and
# from then on it was running, and served first, for eight steps. To wait one step was to give
# up one's place in the queue.
#
# So who comes after one that waits may go first only if this step has room for all of its
# prompt. Then it has nothing left to compute when the wait is over. The first one that is
# longer ends the plan, as in any queue that keeps its order. Whoever waits also keeps its seat:
# a request with a short prompt and a long answer would have it for a long time. Nobody less
# important passes, and under `reserve`, where whoever starts has its pages to the end, nobody
# does. (Those who wait are passed over all
# the same. Chapter 12 promises that this happens in `max_passes` steps at most, so who has
# reached them waits for nobody.)


# %% export="single_flight.py"
class WaitForPrefix(WaitForPrefix):
    def plan(self, waiting: Sequence[RequestState]) -> Sequence[RequestState]:
        """Who need not wait; after one that waits, who is through in this step."""
        scheduler, running = self.scheduler, self.scheduler.running
        planned: list[RequestState] = []
        computing = [state for state in running if in_prompt(state)]
        room = scheduler.max_batch_tokens - sum(s.num_pending for s in running)
        num_seats, held = scheduler.max_running - len(running), list[RequestState]()
        for state in islice(self.grouping.plan(waiting), num_seats + MAX_HELD):
            num_cached = self._num_cached(state)
            num_tokens = max(1, len(state.tokens) - num_cached)
            if self._waits(state, num_cached, computing):
                held.append(state)
                scheduler.observer("wait", request_id=state.request.request_id)
            elif len(planned) + len(held) >= num_seats:
                break  # those who wait keep their seats
            elif held and (num_tokens > room or not self._may_pass(state, held)):
                break
            else:
                planned.append(state)
                computing.append(state)
                room -= num_tokens
        return planned

    def _may_pass(self, state: RequestState, held: Sequence[RequestState]) -> bool:
        """Nobody less important, and nobody whose pages are promised to its end."""
        least = min(other.priority for other in held)
        return state.priority <= least and self.scheduler.admission != "reserve"


# %% name="kept" tags=["hide-input"]
given_up["keeps its place"] = serve_mixed(queue, WaitForPrefix, max_batch_tokens=512)
for label, run in given_up.items():
    ttfts = ", ".join(f"{o.metrics.ttft_s:.2f}" for o in run.outputs)
    print(f"{label:15} mean TTFT {run.ttft:.2f}, each {ttfts}")
for budget in (512, 8_192):
    run = serve_mixed(burst, WaitForPrefix, max_batch_tokens=budget)
    computed = run.stats["prefill_tokens"]
    print(f"eight, budget {budget:5}: {computed} computed, mean TTFT {run.ttft:.2f}")

# %% tags=["hide-input"]
draw_rows(
    [row for label, run in given_up.items() for row in gantt(run, label)],
    caption="Requests 0 and 1 share 480 tokens, 2 is a stranger of 4,000; time runs to the right. "
    "Patient, request 1 waits for one step and then for all of the stranger. With its place kept "
    "it starts after one step, beside the stranger's first chunk.",
)

# %% [markdown]
# Now all three are better off than alone, the stranger too: [9.45](#kept) and not
# [10.47](#kept).
#
# ## Where it hurts
#
# On this machine a prompt token costs the same wherever it is computed, so a duplicate is paid
# in full, and not to compute it pays. But a step has other costs. Twenty requests decode, and
# two come that share a few pages and have 20 tokens of their own:


# %% name="hurts"
def two_that_share(num_pages: int, waits=None, **options) -> list[float]:
    """The TTFT of two requests that share so many pages, beside twenty that decode."""
    two = [with_tail(16 * num_pages, i, num_own=20) for i in range(2)]
    given = {"num_decoding": 20, "min_pages": 1, "max_batch_tokens": 2_048} | options
    return [o.metrics.ttft_s for o in serve_mixed(two, waits, **given).outputs]


for num_pages in (2, 4, 8, 16, 30):
    alone, waiting = (two_that_share(num_pages, w) for w in (None, WaitForPrefix))
    print(
        f"{num_pages:2} shared pages: alone {alone[0]:.2f} and {alone[1]:.2f}, waiting "
        f"{waiting[0]:.2f} and {waiting[1]:.2f}, the mean "
        f"{100 * (sum(waiting) / sum(alone) - 1):+.0f} %"
    )

# %% [markdown]
# With two pages the first gains, the one who waits has its first token at [0.95](#hurts) and
# not at [0.61](#hurts), and the mean is [18](#hurts) percent worse. The wait is one step, and
# that step makes twenty others decode. With eight pages the mean is better and the one who
# waits still is not. This is what m is for: the pages must cost more than a step does. m = 1
# waits for anything; what is right depends on who else is running.
#
# And there is a rival. Announced pages (chapter 9) can be read in the step that computes them,
# so nobody has to wait for the next:

# %% name="announced"
from minivllm.publication import Announcements


def announced() -> dict[str, Announcements]:
    return {"announcer": Announcements(PAGE)}


for budget in (512, 8_192):
    run = serve_mixed(burst, max_batch_tokens=budget, **announced())
    computed = run.stats["prefill_tokens"]
    print(f"eight, budget {budget:5}: {computed} computed, mean TTFT {run.ttft:.2f}")
ttfts = two_that_share(2, **announced())
print(f"two pages, twenty decode: TTFT {ttfts[0]:.2f} and {ttfts[1]:.2f}")

# %% [markdown]
# The same [584](#announced) tokens, nearly the same TTFT where waiting was good, and nothing
# lost where it was bad. Where layers write before they read, announcing is the better answer.
# Waiting is the one that asks nothing of the model, and all it asks of publication is that a
# prompt is shown when it is computed. It is off unless somebody says how many pages are worth a
# step: `wait_for_prefix=8`.
#
# ## What still waits for nothing
#
# Flights have no such m. A prompt shorter than a page has no full page to share, and its
# followers are held all the same: for a step under early release, for a whole answer under
# completion. And when the prompt is cached already, release at completion makes
# followers wait for a decode although their prefix is there, as in the upper half of the
# picture of the late request. That is one more reason why `prefill` is the default.
#
# And there is the set of released ids. It looks like an afterthought. [Chapter
# 11](11_the_state.md) tries to live without it.
#
# The cell below is the late request again. Change k, or let it come later: after how many steps
# does early release stop making the slowest completion longer?

# %% tags=["live"]
from minivllm.engine import Engine, Limits
from minivllm.prefix_cache import PrefixCache
from minivllm.request import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.simulation import SerialPrefill, SimulatedRunner, VirtualClock
from minivllm.single_flight import SingleFlight

k, after_steps = 0.91, 1

for release in ("completion", "prefill"):
    clock = VirtualClock()
    cost = SerialPrefill(chunk_s=0.01, token_s=0.002, decode_s=0.021, k=k)
    runner = SimulatedRunner(cost, clock, 1_000, num_pages=200, page_size=16)
    scheduler = Scheduler(PrefixCache(200, 16))
    engine = Engine(
        runner,
        scheduler,
        Limits(1_000, 4_096),
        clock=clock,
        coordinator=SingleFlight(release),
    )
    ids, params = list(range(493)), SamplingParams(max_tokens=128)
    engine.submit(ids, params)
    done, step = [], 0
    while engine.has_unfinished():
        done += [output.metrics for output in engine.step() if output.finished]
        step += 1
        if step == after_steps:
            engine.submit(ids, params)
    ttft, slowest = sum(m.ttft_s for m in done) / 2, max(m.e2e_s for m in done)
    print(f"{release:10} mean TTFT {ttft:.2f}, slowest completion {slowest:.2f}")

# %% [markdown]
# ## Exercises
#
# ### Exercise 1
#
# Two identical cold requests come at once. A prefill takes P, a cached one sP, a decode D, and
# prefills run one after the other. For which D is the mean TTFT under release at completion
# worse than without coordination? Give the smallest such D as a number, for P = 1 and s = .035,
# on paper; the check asks the simulator.

# %% tags=["solution"]
# alone: (P + 2P) / 2; waiting: (P + P + D + sP) / 2; worse if D + sP > P
smallest_decode = 1 - s

# %%
for decode, worse in ((smallest_decode + 0.1, True), (smallest_decode - 0.1, False)):
    alone, waiting = (serve(p, 2, machine(decode=decode)) for p in POLICIES[:2])
    assert (waiting.ttft > alone.ttft) == worse

# %% [markdown]
# Any decode that takes longer than what the cache saves. On that machine this is a decode of 47
# steps or more.
#
# ### Exercise 2
#
# Twenty requests decode, and two come that share some pages. From how many pages on does the one
# who waits have its first token *sooner* than without waiting? On paper, from the costs of
# `machine`; the check asks the simulator. (A page's 16 tokens cost 16 (1 − s) / 480.)

# %% tags=["solution"]
# Waiting puts a step before its own: the twenty and the first of the two decode in it.
# Not waiting, it computes the shared tokens itself.
extra_step = 2.66 / 127 * (1 + 0.91 * 20)
enough_pages = 1 + int(extra_step / (16 * (1 - s) / 480))

# %%
for num_pages, sooner in ((enough_pages - 1, False), (enough_pages, True)):
    alone, waiting = (two_that_share(num_pages, w) for w in (None, WaitForPrefix))
    assert (waiting[1] < alone[1]) == sooner
print(f"{enough_pages} pages")

# %% [markdown]
# ### Exercise 3
#
# At which k does the +14 % of the slowest completion vanish? Let the simulator look for it, to
# two digits.

# %% tags=["solution"] name="zero"
low, high = 0.0, 1.0
for _ in range(12):
    middle = (low + high) / 2
    longer = change_percent("slowest", middle) > 0
    low, high = (low, middle) if longer else (middle, high)
turning_k = round(middle, 2)
print(f"k = {turning_k}")

# %%
assert turning_k == 0.63

# %% [markdown]
# On paper it is 1 − 1 / D = .62. The run has the one mixed step on top, in which the leader
# decodes while the follower computes 13 tokens.
