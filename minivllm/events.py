# Exported from chapters/04_pages.py (e6c83def): edit the chapter.
"""What happened, in order: the one way to look into a running engine."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Observer(Protocol):
    """Told about every transition: a kind such as "evict", and its details.

    It is called in the middle of a change, so it must not call the engine or the cache.
    """

    def __call__(self, kind: str, /, **details: object) -> None: ...


def ignore(kind: str, /, **details: object) -> None:
    """The observer that does nothing."""


def both(one: Observer, other: Observer) -> Observer:
    """An observer that tells two, and the other one itself where one is `ignore`."""
    if ignore in (one, other):
        return other if one is ignore else one

    def tell(kind: str, /, **details: object) -> None:
        one(kind, **details)
        other(kind, **details)

    return tell


@dataclass(slots=True)
class Event:
    """One transition."""

    kind: str
    details: dict[str, object]


class EventLog:
    """An observer that keeps the last `capacity` events."""

    def __init__(self, capacity: int = 100_000) -> None:
        self.events: deque[Event] = deque(maxlen=capacity)

    def __call__(self, kind: str, /, **details: object) -> None:
        """Write an event down."""
        self.events.append(Event(kind, details))

    def of(self, *kinds: str) -> Iterator[Event]:
        """The events of some kinds, oldest first."""
        return (event for event in self.events if event.kind in kinds)
