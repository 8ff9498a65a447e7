"""Same host: the writer maps the decode rank's memory and copies into it.

A write ends under the lock that also decides whether it may begin, and a copying thread looks
for an abort between two pieces of at most 8 MiB: so it ends once, and early when asked. Each
peer has one queue that one thread at a time serves in order; a slow peer delays nobody else.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from pdrt.data.memory import HostMemory, MemoryHandle, PeerMemory
from pdrt.data.transport.copying import copy, pieces
from pdrt.data.transport.jobs import CLOSED, Job, Jobs, refusal
from pdrt.data.transport.promise import Areas, Ended, Key, Peer, Write, offered
from pdrt.errors import TransferFailed

AT_ONCE: Final = 1 << 20  # bytes: about 0.2 ms, less than a thread may take to wake up


@dataclass(slots=True)
class _Lane:
    """One peer's memory and the writes to it, in order."""

    memory: PeerMemory
    jobs: deque[Job] = field(default_factory=deque)
    is_served: bool = False  # a thread has it, or will

    def next(self) -> Job | None:
        while self.jobs:
            job = self.jobs.popleft()
            if not job.is_over:
                return job
        return None


class ShmTransport:
    """Copies in a few threads; made on the running loop, which its ends are told to."""

    def __init__(self, memory: HostMemory, threads: int, at_once: int = AT_ONCE) -> None:
        """Writes of up to `at_once` bytes to an idle peer are copied by who starts them."""
        self._memory, self._at_once = memory, at_once
        self._jobs = Jobs()
        self._lock = self._jobs.lock  # guards all that follows
        self._lanes: dict[str, _Lane] = {}
        self._ready: SimpleQueue[_Lane | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"pdrt-copy-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def name(self) -> str:
        return "shm"

    @property
    def offers(self) -> dict[str, bytes]:
        return {self.name: self._memory.handle()}

    @property
    def counters(self) -> Mapping[str, float]:
        return {}

    def via(self, _peer: str) -> str:
        return self.name

    async def attach(self, peer: Peer) -> None:
        if peer.name in self._lanes:
            return
        handle = MemoryHandle.unpack(offered(peer, self.name))
        if handle.size != peer.region.size:
            raise TransferFailed(f"{peer.name} describes {peer.region.size} of {handle.size} bytes")
        try:
            memory = await asyncio.to_thread(PeerMemory, handle, peer.process)
        except RuntimeError as error:  # no thread is to be had
            raise TransferFailed(f"shm does not reach {peer.name}: {error}") from error
        with self._lock:
            self._lanes.setdefault(peer.name, _Lane(memory))

    def detach(self, peer: str) -> None:
        with self._lock:
            if self._lanes.pop(peer, None):
                for job in self._jobs.all():
                    if job.write.peer == peer:
                        self._jobs.stop(job, "the peer is gone")

    def start(self, write: Write) -> None:
        jobs = self._jobs
        with self._lock:
            lane = self._lanes.get(write.peer)
            there = lane.memory.size if lane else None
            error = refusal(write, self._memory, there, jobs.is_closed)
            if lane is None or error:
                jobs.tell(Ended(write.id, error))
                return
            job = jobs.begin(write)
            if write.size > self._at_once or lane.is_served:
                lane.jobs.append(job)
                if not lane.is_served:
                    lane.is_served = True
                    self._ready.put(lane)
                return
            # No thread has this lane, and only this loop gives it work: it is ours meanwhile.
            job.is_running = True
        error = self._copy(job, lane.memory)
        with self._lock:
            jobs.end_at_once(job, error)

    def abort(self, write: int) -> None:
        with self._lock:
            if job := self._jobs.get(write):
                self._jobs.stop(job, "aborted")

    def admit(self, key: Key, areas: Areas) -> None:
        pass  # who has mapped our memory can write to all of it

    def revoke(self, _key: Key, _through: frozenset[str]) -> bool:
        return False

    def ends(self) -> AsyncIterator[Ended]:
        return self._jobs.ends()

    async def close(self) -> None:
        with self._lock:
            if self._jobs.is_closed:
                return
            self._jobs.is_closed = True
            for job in self._jobs.all():
                self._jobs.stop(job, CLOSED)
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._lanes.clear()
        self._jobs.finish()

    def _serve(self) -> None:
        """A thread: one write of one lane, then the lane's next turn."""
        while (lane := self._ready.get()) is not None:
            with self._lock:
                job = lane.next()
                if job is None:
                    lane.is_served = False
                    continue
                job.is_running = True
            error = self._copy(job, lane.memory)
            with self._lock:
                self._jobs.end(job, error)
                self._ready.put(lane)

    def _copy(self, job: Job, memory: PeerMemory) -> str | None:
        """Why the write failed, or None."""
        source, target = self._memory.address, memory.address
        try:
            for piece in pieces(job.write.runs):
                if job.stop:
                    return job.stop
                copy(piece, source, target)
        except (OSError, ValueError, ctypes.ArgumentError) as error:
            return f"copying failed: {error}"
        if job.stop:
            return job.stop
        if slot := job.write.slot:
            _fence()
            ctypes.memmove(target + slot.at, slot.data, len(slot.data))
        return None


def _fence() -> None:
    """Nobody sees the slot before the KV: releasing a lock and taking one orders the stores."""
    lock = threading.Lock()
    with lock:
        pass
    with lock:
        pass
