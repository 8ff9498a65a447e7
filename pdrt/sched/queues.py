"""The orders in which a scheduler looks at its requests: who is next, and whose time is up."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pdrt.sched.request import Request


class Line:
    """Requests that wait for memory: those that come back first, oldest first; then the rest."""

    def __init__(self) -> None:
        self._back: dict[int, Request] = {}
        self._fresh: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        if not request.is_returning:
            self._fresh[request.key] = request
            return
        self._back[request.key] = request
        self._back = dict(sorted(self._back.items()))  # keys are minted in order of arrival

    def discard(self, request: Request) -> None:
        self._back.pop(request.key, None)
        self._fresh.pop(request.key, None)

    def __iter__(self) -> Iterator[Request]:
        yield from self._back.values()
        yield from self._fresh.values()

    def __len__(self) -> int:
        return len(self._back) + len(self._fresh)


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
        while (at := self.next()) is not None and at <= now:
            key = heapq.heappop(self._heap)[1]
            del self._at[key]
            due.append(key)
        return due

    def __len__(self) -> int:
        return len(self._at)
