# Exported from chapters/10_single_flight.py (f3edfba3): edit the chapter.
"""Requests with one input wait for one of them to compute its prefix."""

from __future__ import annotations

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


def in_prompt(state: RequestState) -> bool:
    """Whether a part of the prompt has no K/V yet."""
    return state.num_committed < len(state.request.prompt_token_ids)
