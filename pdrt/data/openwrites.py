"""The writes of a prefill rank that have not ended: whose they are, and which are stalled."""

from __future__ import annotations

from dataclasses import dataclass

from pdrt.data.limits import Patience
from pdrt.data.sessions import Session
from pdrt.data.transfer import Key


@dataclass(frozen=True, slots=True)
class OpenWrite:
    key: Key
    session: Session
    size: int
    started_at: float
    has_slot: bool = False


class OpenWrites:
    """A peer is stalled when none of its writes ends for longer than their bytes may take."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._open: dict[int, OpenWrite] = {}
        self._looked_at = 0.0

    def begin(self, write: int, what: OpenWrite) -> None:
        self._open[write] = what

    def end(self, write: int, now: float) -> OpenWrite | None:
        """What has ended; None when it was told before."""
        ended = self._open.pop(write, None)
        if ended is not None:
            ended.session.moved_at = now
        return ended

    def stalled(self, now: float) -> list[OpenWrite]:
        """To be asked often: that shows whether this process ran at all."""
        self._excuse_own_sleep(now)
        return [write for write in self._open.values() if self._is_stalled(write, now)]

    def _excuse_own_sleep(self, now: float) -> None:
        """When this process did not run, ends wait to be read: nobody is stalled for that."""
        if now - self._looked_at > self._patience.stall / 2:
            for write in self._open.values():
                write.session.moved_at = now
        self._looked_at = now

    def _is_stalled(self, write: OpenWrite, now: float) -> bool:
        allowed = self._patience.stall + write.size / self._patience.stall_rate
        return now - max(write.started_at, write.session.moved_at) > allowed

    def overdue(self, now: float) -> set[Key]:
        """Whose writes are open for longer than the grace time."""
        grace = self._patience.grace
        return {write.key for write in self._open.values() if now - write.started_at > grace}
