"""Any transport, with checksums sent along to the peers that ask for them.

The promise: a write to such a peer carries the checksum of each part that it carries, computed
from the bytes just before they go and written before its slot. A thread computes; an abort, a
lost peer or `close` meanwhile ends the write once, without its having begun, when the thread
has let go of its memory. Writes to other peers, and probes, are passed on as they are.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pdrt.data.checksums import Parts, Sums, checksums, starts_of, sum_runs
from pdrt.data.layout import Runs
from pdrt.data.memory import SUM_BYTES, PoolMemory
from pdrt.data.transport.promise import Ended, Peer, Transport, Write
from pdrt.data.transport.wrapping import Wrapping

_THREADS: Final = 2  # 10 GB/s each: ahead of what they feed


@dataclass(slots=True)
class _Job:
    """A write whose checksums are being computed; `runs` will carry them."""

    write: Write
    runs: Runs
    stop: str | None = None  # why it shall not begin


class CheckedTransport(Wrapping):
    """Wraps `inner`; made on the running loop. No thread is started before it is needed."""

    def __init__(self, inner: Transport, memory: PoolMemory) -> None:
        super().__init__(inner)
        self._memory = memory
        self._part_bytes = memory.layout.head_bytes
        self._here = Parts.of(memory, self._part_bytes)
        self._there: dict[str, Parts] = {}  # of the peers that ask for checksums
        self._jobs: dict[int, _Job] = {}
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pdrt-sums")
        self._is_closed = False

    async def attach(self, peer: Peer) -> None:
        await super().attach(peer)
        if peer.checksums:
            self._there[peer.name] = Parts.of(peer.region, self._part_bytes)

    def detach(self, peer: str) -> None:
        self._there.pop(peer, None)
        for job in self._jobs.values():
            if job.write.peer == peer:
                job.stop = job.stop or "the peer is gone"
        self._inner.detach(peer)

    def start(self, write: Write) -> None:
        there = self._there.get(write.peer)
        if there is None or write.key is None or not len(write.runs) or self._is_closed:
            self._inner.start(write)
            return
        try:
            runs = sum_runs(write.runs, self._part_bytes, self._here, there)
        except ValueError as error:
            self._tell(Ended(write.id, str(error)))
            return
        job = self._jobs[write.id] = _Job(write, runs)
        self._threads.submit(self._sums, job).add_done_callback(
            lambda sums: self._loop.call_soon_threadsafe(self._computed, job, sums)
        )

    def abort(self, write: int) -> None:
        if job := self._jobs.get(write):
            job.stop = job.stop or "aborted"
        else:
            self._inner.abort(write)

    async def close(self) -> None:
        self._is_closed = True
        for job in self._jobs.values():
            job.stop = job.stop or "the transport is closed"
        await asyncio.to_thread(self._threads.shutdown)
        for job in list(self._jobs.values()):  # whose news is still on its way to the loop
            self._end(job, job.stop)
        await super().close()

    def _sums(self, job: _Job) -> Sums | None:
        """In a thread."""
        starts = starts_of(job.write.runs, self._part_bytes)
        return checksums(self._memory.view, starts, self._part_bytes, lambda: job.stop is not None)

    def _computed(self, job: _Job, sums: Future[Sums | None]) -> None:
        if job.write.id not in self._jobs:  # `close` was first
            return
        if error := sums.exception():
            job.stop = job.stop or f"no checksums: {error}"
        if job.stop is not None:
            self._end(job, job.stop)
            return
        del self._jobs[job.write.id]
        self._store(job.runs, sums.result())
        runs = np.concatenate((job.write.runs, job.runs))
        self._inner.start(replace(job.write, runs=runs))

    def _end(self, job: _Job, error: str | None) -> None:
        del self._jobs[job.write.id]
        self._tell(Ended(job.write.id, error))

    def _store(self, runs: Runs, sums: Sums | None) -> None:
        """Into our own cells, from where they go. Twice at once is the same value twice."""
        assert sums is not None, "only a stopped job has none"
        done = 0
        for at, _, length in runs.tolist():
            count = length // SUM_BYTES
            self._memory.array[at : at + length] = sums[done : done + count].view(np.uint8)
            done += count
