"""The writes that a transport has begun, and the one telling of each one's end.

The promise: an end is told once, under the lock that also decides whether a write may begin; so
what waits ends at once when it is stopped, and what a thread has ends when that lets go of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from pdrt.data.memory import HostMemory
from pdrt.data.transport.promise import Ended, Write

CLOSED = "the transport is closed"


@dataclass(slots=True, eq=False)
class Job:
    """A write from its start to its end."""

    write: Write
    is_running: bool = False  # somebody has it, and it ends when they let go
    is_over: bool = False
    stop: str | None = None  # why it shall end early


class Jobs:
    """Made on the running loop, which the ends are told to. Who calls holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_closed = False
        self._open: dict[int, Job] = {}
        self._loop = asyncio.get_running_loop()
        self._ends: asyncio.Queue[Ended | None] = asyncio.Queue()

    def begin(self, write: Write) -> Job:
        job = self._open[write.id] = Job(write)
        return job

    def get(self, write: int) -> Job | None:
        return self._open.get(write)

    def all(self) -> list[Job]:
        return list(self._open.values())

    def stop(self, job: Job, reason: str) -> None:
        """One that waits ends here and now, once; one that runs is asked to."""
        job.stop = job.stop or reason
        if not (job.is_running or job.is_over):
            self.end(job, job.stop)

    def end(self, job: Job, error: str | None) -> None:
        job.is_over = True
        del self._open[job.write.id]
        self.tell(Ended(job.write.id, error))

    def tell(self, end: Ended) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._ends.put_nowait, end)

    def end_at_once(self, job: Job, error: str | None) -> None:
        """Called on the loop: nobody has to be woken."""
        del self._open[job.write.id]
        self._ends.put_nowait(Ended(job.write.id, error))

    def finish(self) -> None:
        """No end comes after those that are on their way to the loop, where this is called."""
        self._loop.call_soon(self._ends.put_nowait, None)

    async def ends(self) -> AsyncIterator[Ended]:
        while (end := await self._ends.get()) is not None:
            yield end


def refusal(write: Write, memory: HostMemory, there: int | None, is_closed: bool) -> str | None:
    """Why it cannot begin, or None. `there` is the size of the peer's memory if it is attached."""
    if is_closed:
        return CLOSED
    if there is None:
        return f"{write.peer} is not attached"
    if not fits(write, memory.size, there):
        return "a run lies outside the memory"
    return None


def fits(write: Write, source_size: int, target_size: int) -> bool:
    """Whether all of the write lies inside both memories."""
    runs, slot = write.runs, write.slot
    if slot and not 0 <= slot.at <= target_size - len(slot.data):
        return False
    if len(runs) < 2:  # most writes of a small model, and numpy takes longer
        return all(
            min(here, there, size) >= 0
            and here + size <= source_size
            and there + size <= target_size
            for here, there, size in runs.tolist()
        )
    ends = runs[:, :2] + runs[:, 2:]
    return bool(
        runs.min() >= 0 and ends[:, 0].max() <= source_size and ends[:, 1].max() <= target_size
    )
