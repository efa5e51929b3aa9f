"""The coordinator against a model that keeps a plain list of everything."""

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.single_flight import SingleFlight, UnknownRequest

P, Q = [1, 2, 3], [1, 2, 3, 4]


class Model:
    """One line for each live request: its key, its part, and its place in line."""

    def __init__(self, release):
        self.release, self.live = release, {}

    def line(self, key):
        return [i for i, (k, part) in self.live.items() if k == key and part != "free"]

    def admit(self, i, key):
        self.live[i] = (key, "follows" if self.line(key) else "leads")
        return {"leads": "leader", "follows": "follower"}[self.live[i][1]]

    def release_all(self, key):
        line = self.line(key)
        self.live.update(dict.fromkeys(line, (key, "free")))
        return line

    def prefilled(self, i):
        key, part = self.live[i]
        if part == "follows":
            raise ValueError
        if part == "free" or self.release == "completion":
            return []
        return [other for other in self.release_all(key) if other != i]

    def finished(self, i):
        key, part = self.live[i]
        if part == "follows":
            raise ValueError
        released = [] if part == "free" else self.release_all(key)
        del self.live[i]
        return [other for other in released if other != i]

    def aborted(self, i):
        key, part = self.live.pop(i)
        line = self.line(key)
        if part != "leads" or not line:
            return None, []
        self.live[line[0]] = (key, "leads")
        return line[0], []


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except (ValueError, KeyError, UnknownRequest) as error:
        return "unknown" if isinstance(error, LookupError) else "refused"


class Comparison(RuleBasedStateMachine):
    @initialize(release=st.sampled_from(["completion", "prefill"]))
    def start(self, release):
        self.flights, self.model = SingleFlight(release), Model(release)
        self.num_admitted = 0

    @rule(prompt=st.sampled_from([P, Q]), extra=st.sampled_from([None, "salt"]))
    def admit(self, prompt, extra):
        i, self.num_admitted = f"r{self.num_admitted}", self.num_admitted + 1
        expected = self.model.admit(i, (tuple(prompt), extra))
        assert self.flights.admit(i, prompt, extra) == expected
        with pytest.raises(ValueError, match="before"):
            self.flights.admit(i, prompt, extra)

    @rule(
        event=st.sampled_from(["prefilled", "finished", "aborted"]),
        which=st.integers(0, 40),
    )
    def tell(self, event, which):
        i = f"r{which % (self.num_admitted + 1)}"
        expected = outcome(getattr(self.model, event), i)
        assert outcome(getattr(self.flights, event), i) == expected

    @invariant()
    def nothing_else_is_remembered(self):
        if hasattr(self, "model"):
            self.flights.check()
            assert self.flights._released | set(self.flights._members) == set(
                self.model.live
            )


Comparison.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestAgainstTheModel = Comparison.TestCase


@pytest.mark.parametrize("release", ["completion", "prefill"])
def test_every_short_history(release):
    """All histories of six events on three requests of one input."""
    events = [
        (verb, i)
        for verb in ("admit", "prefilled", "finished", "aborted")
        for i in "abc"
    ]
    for history in product(events, repeat=4):
        flights, model = SingleFlight(release), Model(release)
        for verb, i in [("admit", "a"), ("admit", "b"), *history]:
            given = (i, P) if verb == "admit" else (i,)
            if verb == "admit" and i in model.live:
                expected = "refused"
            elif verb == "admit":
                expected = model.admit(i, (tuple(P), None))
            else:
                expected = outcome(getattr(model, verb), i)
            assert outcome(getattr(flights, verb), *given) == expected, history
        flights.check()


def test_followers_are_released_with_the_prefill_or_at_the_end():
    early, late = SingleFlight("prefill"), SingleFlight("completion")
    for flights in (early, late):
        assert [flights.admit(i, P) for i in "abc"] == ["leader"] + ["follower"] * 2
    assert early.prefilled("a") == ["b", "c"] and early.finished("a") == []
    assert late.prefilled("a") == [] and late.finished("a") == ["b", "c"]


def test_an_identical_prompt_after_the_release_opens_a_new_flight():
    """R25, e8."""
    flights = SingleFlight("prefill")
    flights.admit("a", P), flights.admit("b", P)
    flights.prefilled("a")
    assert flights.admit("c", P) == "leader"
    assert flights.admit("d", P) == "follower"
    assert flights.finished("b") == [] and flights.finished("a") == []
    assert flights.prefilled("c") == ["d"]


def test_an_aborted_leader_is_followed_by_the_next_in_line():
    """e5, e7, e10: nobody is left waiting for somebody who is gone."""
    flights = SingleFlight("prefill")
    [flights.admit(i, P) for i in "abc"]
    assert flights.aborted("b") == (None, []), "e6: a follower goes, the others stay"
    assert flights.aborted("a") == ("c", [])
    assert flights.admit("d", P) == "follower" and flights.leader_of("d") == "c"
    assert flights.aborted("c") == ("d", []) and flights.aborted("d") == (None, [])
    assert flights.admit("a", P) == "leader", "e11: an id may come again"


def test_what_is_not_possible_is_refused():
    flights = SingleFlight("completion")
    flights.admit("a", P), flights.admit("b", P)
    for call in (flights.prefilled, flights.finished):
        with pytest.raises(ValueError, match="waits"):
            call("b")
    for call in (flights.prefilled, flights.finished, flights.aborted):
        with pytest.raises(UnknownRequest):
            call("z")
    with pytest.raises(ValueError, match="release"):
        SingleFlight("never")
    with pytest.raises(ValueError, match="extra_key"):
        flights.admit("c", P, extra_key=[])
    assert flights.waiting_for("a") == ("b",), "a refused admit leaves nothing"
    flights.check()


def test_the_key_is_the_exact_input():
    """R11: token ids and extra key, and no prefix of them."""
    flights = SingleFlight()
    assert flights.admit("a", P) == flights.admit("b", Q) == "leader"
    assert flights.admit("c", P, "salt") == "leader"
    assert flights.admit("d", list(P)) == "follower"
