"""The orders in which a scheduler looks at its requests: who is next, and whose time is up."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final, TypeAlias

from pdrt.sched.request import Request

HEAD_START_S: Final = 60.0  # what the highest priority is worth; a waiting one makes up for it
_LEVELS: Final = 5  # the priority that is worth half of it
_Place: TypeAlias = tuple[bool, float, int]  # the key makes it unique


def head_start(priority: int) -> float:
    """Seconds: with priority p a request stands as if it had come so much earlier.

    Strictly rising and between -60 and 60, so that no request is passed by one that came more
    than two minutes after it; one with priority 0, by none that came a minute after it.
    """
    return HEAD_START_S * priority / (abs(priority) + _LEVELS)


class Line:
    """Requests that wait for memory: those that come back first, then the rest.

    Both by when they came less their head start: the order of two never changes while they wait,
    so that ageing costs nothing. Among equals first come, first served.
    """

    def __init__(self) -> None:
        self._places: list[_Place] = []  # sorted
        self._requests: dict[int, Request] = {}
        self._place_of: dict[int, _Place] = {}

    def add(self, request: Request) -> None:
        came = request.since - head_start(request.priority)
        place = not request.is_returning, came, request.key
        self._requests[request.key], self._place_of[request.key] = request, place
        insort(self._places, place)

    def discard(self, request: Request) -> None:
        if self._requests.pop(request.key, None) is not None:
            place = self._place_of.pop(request.key)
            del self._places[bisect_left(self._places, place)]

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[key] for _, _, key in self._places)

    def __len__(self) -> int:
        return len(self._places)


class Timers:
    """One time for each key; the earliest is cheap to know, a change costs a push."""

    _SLACK = 64

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def set(self, key: int, at: float) -> None:
        self._at[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + self._SLACK:
            self._heap = [(when, owner) for owner, when in self._at.items()]
            heapq.heapify(self._heap)

    def drop(self, key: int) -> None:
        self._at.pop(key, None)

    def at(self, key: int) -> float | None:
        return self._at.get(key)

    def next(self) -> float | None:
        """The earliest time that still counts."""
        heap = self._heap
        while heap and self._at.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> list[int]:
        """Keys whose time has come, in order; each is told once."""
        due: list[int] = []
        heap = self._heap
        while heap and heap[0][0] <= now:  # what counts no more is not looked for: it costs pops
            at, key = heapq.heappop(heap)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due

    def __len__(self) -> int:
        return len(self._at)
