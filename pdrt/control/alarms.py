"""Alarms that are looked at together: most are called off long before they would ring.

The loop's own timers are kept in order and ring to the millisecond, which every request pays for
and none needs: these ring up to `LATE_S` late, never early, and while none is due nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final, Protocol

LATE_S: Final = 0.05


class Coarse:
    """One alarm; `cancel` may be called at any time, and again."""

    __slots__ = ("_waiting", "at", "ring")

    def __init__(self, at: float, ring: Callable[[], None], waiting: set[Coarse]) -> None:
        self.at, self.ring = at, ring
        self._waiting = waiting

    def cancel(self) -> None:
        self._waiting.discard(self)


class Timer(Protocol):
    def cancel(self) -> object: ...


class Alarms:
    """They are looked at when the first one is due, by the loop's `call_later`."""

    def __init__(
        self,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self._clock, self._call_later = clock, call_later
        self._waiting: set[Coarse] = set()
        self._looks_at = inf
        self._next_look: Timer | None = None

    def set(self, delay: float, ring: Callable[[], None]) -> Coarse:
        now = self._clock()
        alarm = Coarse(now + delay, ring, self._waiting)
        self._waiting.add(alarm)
        if alarm.at + LATE_S < self._looks_at:
            self._look_at(alarm.at, now)
        return alarm

    def _look_at(self, at: float, now: float) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        self._looks_at = max(at, now + LATE_S)
        self._next_look = self._call_later(self._looks_at - now, self._look)

    def _look(self) -> None:
        self._next_look, self._looks_at = None, inf
        now = self._clock()
        due = [alarm for alarm in self._waiting if alarm.at <= now]
        if due:
            self._look_at(now, now)  # first: whatever a ring may raise
        elif self._waiting:
            self._look_at(min(alarm.at for alarm in self._waiting), now)
        for each in due:
            if each in self._waiting:  # not called off by what rang before it
                each.cancel()
                each.ring()
