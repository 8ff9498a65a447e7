"""How fast an instance's counters rise, from what it told of them in the last few seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

SPAN_S: Final = 3.0  # a leader hears its workers twice a second: less would jump


@dataclass(slots=True)
class Rates:
    """Times are the teller's own, so that when its word arrives does not matter."""

    told: deque[tuple[float, Mapping[str, float]]] = field(default_factory=deque)

    def feed(self, at: float, totals: Mapping[str, float]) -> None:
        """Counters as they were at `at`. What has fallen belongs to another life: begin anew."""
        if self.told:
            before, had = self.told[-1]
            if at == before:
                return
            if at < before or any(totals.get(name, 0.0) < had[name] for name in had):
                self.told.clear()
        self.told.append((at, totals))
        while len(self.told) > 2 and self.told[1][0] <= at - SPAN_S:
            self.told.popleft()

    def forget(self) -> None:
        """It is gone."""
        self.told.clear()

    def per_second(self, name: str) -> float:
        """0 until it was heard twice."""
        if len(self.told) < 2:
            return 0.0
        (began, first), (ended, last) = self.told[0], self.told[-1]
        return (last.get(name, 0.0) - first.get(name, 0.0)) / (ended - began)
