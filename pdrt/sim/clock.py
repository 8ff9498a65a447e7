"""Virtual time: what is to happen, in order, and nothing in between.

At one moment devices end first, then messages arrive, then whoever was told something looks at it:
as in a process, where all that has arrived is read before the next step is planned.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

Call: TypeAlias = Callable[[], None]


class Turn(IntEnum):
    """Who comes first of those whose time is the same."""

    DEVICE = 0
    MESSAGE = 1
    LOOK = 2


class Clock:
    """`now` never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # that have happened
        self._heap: list[tuple[float, int, int, Call]] = []
        self._pushed = 0

    def at(self, when: float, call: Call, turn: Turn = Turn.MESSAGE) -> None:
        """Call it then; what is due already comes next."""
        self._pushed += 1
        when = when if when > self.now else self.now
        heapq.heappush(self._heap, (when, turn, self._pushed, call))

    def after(self, seconds: float, call: Call, turn: Turn = Turn.MESSAGE) -> None:
        self.at(self.now + seconds, call, turn)

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now, _, _, call = heapq.heappop(heap)
            self.events += 1
            call()
