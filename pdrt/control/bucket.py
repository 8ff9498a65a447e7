"""A token bucket: so much a minute, and how long to wait when that is used up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_ROUNDING: Final = 1e-6  # who waited as long as told is let in


@dataclass(slots=True)
class Bucket:
    """Holds one minute's allowance when full; `now` is any clock that only goes forward."""

    per_minute: int  # 0: no limit
    now: float = 0.0
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = float(self.per_minute)

    def wait(self, cost: float, now: float) -> float:
        """Seconds until `cost` may be taken; infinite when it never may."""
        if not self.per_minute:
            return 0.0
        if cost > self.per_minute:
            return float("inf")
        self._fill(now)
        missing = cost - self.level
        return missing * 60.0 / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, cost: float, now: float) -> None:
        """After `wait` said 0."""
        if self.per_minute:
            self._fill(now)
            self.level -= cost

    def resize(self, per_minute: int, now: float) -> None:
        """Another allowance: who had used up the old one does not begin anew."""
        self._fill(now)
        used = self.per_minute - self.level if self.per_minute else 0.0
        self.per_minute = per_minute
        self.level = max(0.0, per_minute - used)

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self.now) * self.per_minute / 60.0
        self.level = min(float(self.per_minute), self.level + gained)
        self.now = max(self.now, now)
