"""Alarms that are looked at together: most are called off long before they would ring.

The loop's own timers are kept in order and ring to the millisecond, which every request pays for
and none needs: these ring up to `EVERY_S` late, never early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

EVERY_S: Final = 0.05


class Coarse:
    """One alarm; `cancel` may be called at any time, and again."""

    __slots__ = ("_waiting", "at", "ring")

    def __init__(self, at: float, ring: Callable[[], None], waiting: set[Coarse]) -> None:
        self.at, self.ring = at, ring
        self._waiting = waiting

    def cancel(self) -> None:
        self._waiting.discard(self)


class Alarms:
    """`call_later` is the loop's, and called only while an alarm is waited for."""

    def __init__(
        self,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._clock, self._call_later = clock, call_later
        self._waiting: set[Coarse] = set()
        self._is_looking = False

    def set(self, delay: float, ring: Callable[[], None]) -> Coarse:
        alarm = Coarse(self._clock() + delay, ring, self._waiting)
        self._waiting.add(alarm)
        if not self._is_looking:
            self._is_looking = True
            self._call_later(EVERY_S, self._look)
        return alarm

    def _look(self) -> None:
        if not self._waiting:
            self._is_looking = False
            return
        self._call_later(EVERY_S, self._look)  # first: whatever a ring may raise
        now = self._clock()
        for each in [alarm for alarm in self._waiting if alarm.at <= now]:
            if each in self._waiting:  # not called off by what rang before it
                each.cancel()
                each.ring()
