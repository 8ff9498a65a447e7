"""One request on its way through the router: when its pieces passed, counted in passing."""

from __future__ import annotations

from collections.abc import Callable

from pdrt.control.flow import Flow


class Passage:
    """`passed` is called with each piece of a stream; the first one is the time to first token."""

    __slots__ = ("_clock", "_flow", "first_at", "last_at", "pieces", "started")

    def __init__(self, flow: Flow, clock: Callable[[], float]) -> None:
        self._flow, self._clock = flow, clock
        self.started = clock()
        self.first_at: float | None = None
        self.last_at = 0.0
        self.pieces = 0

    def passed(self) -> None:
        now = self._clock()
        if self.pieces:
            self._flow.gap(now, now - self.last_at)
        else:
            self.first_at = now
            self._flow.first(now, now - self.started)
        self.last_at = now
        self.pieces += 1
