"""The search of chapter 11, on the coordinator that was kept and on planted faults."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import book
import pytest
from test_mutants import mutated
from test_single_flight import Model, outcome

from minivllm.single_flight import SingleFlight

CHAPTER = Path(book.__file__).parent / "11_the_state.py"
CELLS = ("first", "world", "obey", "memory", "judge", "alphabet", "search")
RELEASES = ("completion", "prefill")


@pytest.fixture(scope="module")
def chapter() -> SimpleNamespace:
    """What the chapter's cells of these names define; `CELLS` are in its order."""
    named = {c.meta.get("name"): c for c in book.read_cells(CHAPTER)}
    scope: dict[str, object] = {"__name__": "chapter"}
    for name in CELLS:
        exec(compile(named[name].source, named[name].at(), "exec"), scope)
    return SimpleNamespace(**scope)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("ids", "prompts"), [("abc", "PQ"), ("abcd", "P")])
def test_no_history_breaks_a_sentence(chapter, release, ids, prompts):
    """Protects R25, for histories of every length: the search comes to its end."""
    events = chapter.all_events(ids, prompts)
    tried = list(chapter.explore(SingleFlight, release, events, longest=20))
    assert [t for t in tried if t.broken] == []
    assert max(len(t.history) for t in tried) < 20, "it was cut off"
    assert len(tried) > 2_500


@pytest.mark.parametrize("release", RELEASES)
def test_the_answers_are_those_of_the_naive_model(chapter, release):
    """The sentences leave open who inherits, and the order; the model does not."""
    names = {ValueError: "refused", chapter.UnknownRequest: "unknown"}
    for t in chapter.explore(SingleFlight, release):
        model = Model(release)
        *_, last = [expected(model, event) for event in t.history]
        said = names[t.answer] if isinstance(t.answer, type) else t.answer
        assert said == last, t.history


def expected(model, event):
    verb, i, *prompt = event
    if verb == "admit" and i in model.live:
        return "refused"
    return outcome(getattr(model, verb), i, *prompt)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["First", "SingleFlight"])
def test_merging_situations_loses_no_fault(chapter, name, release):
    """All histories of four events, one by one, against the search that merges them."""
    make, events = getattr(chapter, name), chapter.all_events("ab", "P")
    tried = chapter.explore(make, release, events, longest=4)
    merged = {(t.broken, len(t.history)) for t in tried if t.broken}
    alone = {
        fault
        for history in product(events, repeat=4)
        if (fault := first_fault(chapter, make(release), history))
    }
    assert merged >= alone and shortest(merged) == shortest(alone)


def shortest(faults):
    return {broken: min(n for b, n in faults if b == broken) for broken, _ in faults}


def first_fault(chapter, design, history):
    world = {}
    for at, event in enumerate(history, 1):
        answer = chapter.tell(design, event)
        world, broken = chapter.judge(design, event, answer, world)
        if broken:
            return broken, at
    return None


# what is wrong -> method, what its source says, what it says instead, what must break
FAULTS = {
    "a twin of a released id gets in": (
        *("admit", " or request_id in self._released", "", "refused"),
    ),
    "early release under completion": (
        *("prefilled", ' if self.release == "prefill" else []', "", "led"),
    ),
    "no early release": (
        *("prefilled", 'self._close(flight) if self.release == "prefill" else []'),
        *("[]", "led"),
    ),
    "who waits may report work": (
        *("_led_by", "flight.leader != request_id", "False", "refused"),
    ),
    "release forgets the ids": (
        *("_close", "self._released.add(request_id)", "pass", "heard"),
    ),
    "release leaves members": (
        *("_close", "del self._members[request_id]", "pass", "refused"),
    ),
    "release leaves the index": (
        *("_close", "del self._flights[flight.key]", "pass", "led"),
    ),
    "the leader is not told apart at its release": (
        *("_close", "(flight.leader, *flight.followers)", "flight.followers", "heard"),
    ),
    "an end is not noted": (
        *("finished", "self._released.remove(request_id)", "pass", "forgotten"),
    ),
    "an abort after release is not noted": (
        *("aborted", "self._released.remove(request_id)", "pass", "forgotten"),
    ),
    "an aborted member stays": (
        *("aborted", "del self._members[request_id]", "pass", "forgotten"),
    ),
    "an aborted follower stays in line": (
        *("aborted", "del flight.followers[request_id]", "pass", "led"),
    ),
    "an aborted leader's followers are left": (
        *("aborted", "self._promote(flight)", "None", "led"),
    ),
    "an heir also follows": ("_promote", "del flight.followers[heir]", "pass", "led"),
    "an heir is told and not noted": (
        *("_promote", "flight.leader = heir", "pass", "heard"),
    ),
    "a flight without heir stays": (
        *("_promote", "del self._flights[flight.key]", "pass", "forgotten"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_search_finds_a_planted_fault(chapter, fault, monkeypatch):
    """Protects the search: each fault breaks a sentence, within six events."""
    name, old, new, sentence = FAULTS[fault]
    monkeypatch.setattr(SingleFlight, name, mutated(SingleFlight, name, old, new))
    tried = [t for r in RELEASES for t in chapter.explore(SingleFlight, r, longest=6)]
    found = {t.broken: t.history for t in reversed(tried) if t.broken}
    assert sentence in found, found


class Impatient(SingleFlight):
    """Lets followers run as soon as the prompt is computed, whatever was promised."""

    def prefilled(self, request_id):
        released = super().prefilled(request_id)
        flight = self._members.get(request_id)
        if flight is None:
            return released
        early = list(flight.followers)
        flight.followers.clear()
        for follower in early:
            del self._members[follower]
            self._released.add(follower)
        return early


def test_a_release_that_comes_too_soon_is_found(chapter):
    """Protects "runs when that one is done": nothing else is wrong with this one."""
    tried = list(chapter.explore(Impatient, "completion"))
    assert {t.broken for t in tried} == {None, "led"}
    assert not any(t.broken for t in chapter.explore(Impatient, "prefill"))
