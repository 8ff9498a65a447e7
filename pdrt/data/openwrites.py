"""The writes of a prefill rank that have not ended: whose they are, and which are stalled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from pdrt.data.limits import Patience
from pdrt.data.sessions import Session
from pdrt.data.transfer import Key

_OVERTAKEN: Final = 4  # writes of their own promise no order among each other


@dataclass(frozen=True, slots=True)
class OpenWrite:
    key: Key
    session: Session
    size: int
    started_at: float
    has_slot: bool = False


class OpenWrites:
    """A peer is stalled when none of its writes ends for longer than their bytes may take.

    A write is, though others end, when it takes several times as long as it and all that was
    ahead of it may: its end got lost.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._open: dict[int, OpenWrite] = {}
        self._due: dict[int, float] = {}
        self._ahead: Counter[str] = Counter()  # session -> bytes of its open writes
        self._looked_at = 0.0

    def begin(self, write: int, what: OpenWrite) -> None:
        self._open[write] = what
        self._ahead[what.session.name] += what.size
        allowed = self._allowed(self._ahead[what.session.name])
        self._due[write] = what.started_at + _OVERTAKEN * allowed

    def end(self, write: int, now: float) -> OpenWrite | None:
        """What has ended; None when it was told before."""
        ended = self._open.pop(write, None)
        if ended is not None:
            del self._due[write]
            ended.session.moved_at = now
            self._ahead[ended.session.name] -= ended.size
            if self._ahead[ended.session.name] <= 0:  # none is open, or none with bytes
                del self._ahead[ended.session.name]
        return ended

    def stalled(self, now: float) -> list[OpenWrite]:
        """To be asked often: that shows whether this process ran at all."""
        self._excuse_own_sleep(now)
        return [
            write
            for number, write in self._open.items()
            if self._is_stalled(write, now) or self._due[number] < now
        ]

    def _excuse_own_sleep(self, now: float) -> None:
        """When this process did not run, ends wait to be read: nobody is stalled for that."""
        asleep = now - self._looked_at
        if asleep > self._patience.stall / 2:
            for number, write in self._open.items():
                write.session.moved_at = now
                self._due[number] += asleep
        self._looked_at = now

    def _is_stalled(self, write: OpenWrite, now: float) -> bool:
        return now - max(write.started_at, write.session.moved_at) > self._allowed(write.size)

    def _allowed(self, size: int) -> float:
        return self._patience.stall + size / self._patience.stall_rate

    def overdue(self, now: float) -> set[Key]:
        """Whose writes are open for longer than the grace time."""
        grace = self._patience.grace
        return {write.key for write in self._open.values() if now - write.started_at > grace}
