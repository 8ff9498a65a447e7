"""The writes to one peer, from start to end; plain bookkeeping without sockets or threads.

The promise: each write ends once, and never while some thread still sends bytes of it. It ends
with the peer's answer, or without one when its connections are lost. A write that shall stop
and has begun sends no more frames, then one that says how much there was: the peer answers it
when that much has passed by, so nothing of it is on its way any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdrt.data.layout import NO_RUNS, Runs
from pdrt.data.transport.promise import Ended, SlotWrite, Write
from pdrt.data.transport.tcp_cuts import Cuts
from pdrt.data.transport.tcp_wire import Answer, Head, Kind, Status
from pdrt.errors import BadMessage

WINDOW: Final = 256  # writes that have begun and are not answered


@dataclass(slots=True, eq=False)
class Job:
    write: Write
    cuts: Cuts
    sending: int = 0  # frames of it that threads are sending
    stop: str | None = None  # why it shall end early
    lost: str | None = None  # nobody will answer
    answer: Answer | None = None
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """What a thread sends next. `sent` is to be called afterwards, whatever came of it."""

    job: Job
    head: Head
    runs: Runs
    slot: SlotWrite | None = None


class Outbox:
    """To be called under its owner's lock."""

    def __init__(self, tell: Callable[[Ended], None]) -> None:
        self._tell = tell
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()  # not handed out; the first one perhaps in part
        self._open: dict[int, Job] = {}  # begun, and not over
        self._cancels: deque[Job] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._jobs

    @property
    def is_idle(self) -> bool:
        """Nothing has begun, so nothing is expected of the peer."""
        return not self._open

    @property
    def has_frame(self) -> bool:
        if self._cancels:
            return True
        return bool(self._waiting) and (self._waiting[0].cuts.is_begun or len(self._open) < WINDOW)

    def add(self, write: Write) -> None:
        job = self._jobs[write.id] = Job(write, Cuts(write.runs))
        self._waiting.append(job)

    def next(self) -> Frame:
        """Only when `has_frame`."""
        if self._cancels:
            job = self._cancels.popleft()
            head = Head(Kind.CANCEL, job.write.id, job.write.key, total=job.cuts.done)
            job.sending += 1
            return Frame(job, head, NO_RUNS)
        job = self._waiting[0]
        self._open[job.write.id] = job
        return self._cut(job)

    def sent(self, job: Job) -> None:
        job.sending -= 1
        self._settle(job)

    def stop(self, write: int, reason: str) -> None:
        """End it early. Unknown writes are no error."""
        job = self._jobs.get(write)
        if job is None:
            return
        job.stop = job.stop or reason
        if not job.cuts.is_begun:
            self._waiting.remove(job)
            self._end(job, job.stop)
            return
        self._hold(job)
        self._settle(job)

    def stop_all(self, reason: str) -> None:
        for write in list(self._jobs):
            self.stop(write, reason)

    def answered(self, answer: Answer) -> None:
        """Raises BadMessage for the answer to a question that nobody asked."""
        job = self._open.get(answer.write)
        if job is None:
            return  # a word to stop that crossed our last frame
        if answer.status is Status.STOP:
            self.stop(answer.write, answer.text)
            return
        if not (job.cuts.is_over or job.is_cancelled):
            raise BadMessage("an answer for a write that is not whole")
        job.answer = answer
        self._settle(job)

    def lost(self, reason: str) -> None:
        """The connections are cut: what has begun is not answered any more."""
        self._cancels.clear()
        for job in list(self._open.values()):
            job.lost = reason
            self._hold(job)
            self._settle(job)

    def unreachable(self, reason: str) -> None:
        """Nobody can be connected to: what waits for that ends."""
        for job in list(self._waiting):
            self._waiting.remove(job)
            self._end(job, job.stop or reason)

    def _cut(self, job: Job) -> Frame:
        runs, payload = job.cuts.next()
        is_last = job.cuts.is_over
        if is_last:
            self._waiting.popleft()
        job.sending += 1
        slot = job.write.slot if is_last else None
        head = Head(
            Kind.DATA,
            job.write.id,
            job.write.key,
            is_last,
            job.cuts.done if is_last else 0,
            len(runs),
            payload,
            len(slot.data) if slot else 0,
        )
        return Frame(job, head, runs, slot)

    def _hold(self, job: Job) -> None:
        """No more frames of it."""
        if self._waiting and self._waiting[0] is job:
            self._waiting.popleft()

    def _settle(self, job: Job) -> None:
        """End it if nothing is expected any more, or say that no more will come."""
        if job.sending or job.write.id not in self._open:
            return
        if job.answer:
            failed = job.answer.status is Status.FAILED
            self._end(job, (job.stop or job.answer.text) if failed else None)
        elif job.lost:
            self._end(job, job.stop or job.lost)
        elif job.stop and not job.cuts.is_over and not job.is_cancelled:
            job.is_cancelled = True
            self._cancels.append(job)

    def _end(self, job: Job, error: str | None) -> None:
        self._open.pop(job.write.id, None)
        del self._jobs[job.write.id]
        self._tell(Ended(job.write.id, error))
