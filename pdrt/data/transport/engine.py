"""What the transports over a foreign engine share: a lane and a thread for each peer.

The promise: a write ends once, when the engine has said that it is over, or when the peer's
process is known to be dead; never because we gave it up, since engines go on writing then. A
write that waits in its lane ends at once; one that the engine has, between two portions. A lane
that stands still has only its own thread waiting. `revoke` is never a proof: no engine asks the
target before it writes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from pdrt.data.layout import Runs
from pdrt.data.memory import SLOT_BYTES, HostMemory
from pdrt.data.transport.lane import EngineError, Life, Offer, fits, portions
from pdrt.data.transport.promise import Areas, Ended, Key, Peer, Write, offered
from pdrt.errors import TransferFailed

PORTION: Final = 32 << 20  # bytes: what an abort may have to wait for
MOST_PEERS: Final = 1024
CLOSE_S: Final = 5.0  # for writes that the engine has; a peer that stands still gets no more


class Link(Protocol):
    """The way to one peer's memory, used by its lane's thread alone."""

    def put(self, runs: Runs, life: Life) -> None:
        """Copy runs of (address here, address there, length); return when all has landed.

        Raises EngineError when it has failed and nothing of it will land any more.
        """
        ...

    def close(self) -> None:
        """Nothing is on its way. Raises nothing."""
        ...


class Engine(Protocol):
    """A foreign library that writes into other processes' memory."""

    @property
    def name(self) -> str: ...

    @property
    def most_runs(self) -> int:
        """What `put` takes at once."""
        ...

    def register(self, address: int, size: int) -> None:
        """Memory that it may read and that peers may write. Raises ConfigError."""
        ...

    def contact(self) -> bytes:
        """How peers reach what is registered."""
        ...

    def connect(self, contact: bytes, probe: int) -> Link:
        """Called in a thread. `probe` is an address there that anybody may write, or 0.

        Raises EngineError.
        """
        ...

    def close(self) -> None:
        """Called in a thread, when all links are closed. Raises nothing."""
        ...


@dataclass(slots=True)
class _Job:
    write: Write
    is_running: bool = False  # the engine has it
    is_over: bool = False
    stop: str | None = None  # why it shall end early


@dataclass(slots=True, eq=False)
class _Lane:
    """One peer: how it is reached and the writes to it, in order."""

    link: Link
    life: Life
    base: int  # address of its memory, there
    size: int
    row: int  # of our slots, from where its slots go
    work: threading.Condition  # there is some, or there will be no more
    jobs: deque[_Job] = field(default_factory=deque)
    is_over: bool = False
    thread: threading.Thread | None = None


class EngineTransport:
    """Made on the running loop, which its ends are told to."""

    def __init__(self, memory: HostMemory, engine: Engine, close_s: float = CLOSE_S) -> None:
        self._memory, self._engine, self._close_s = memory, engine, close_s
        self._slots = np.zeros((MOST_PEERS, SLOT_BYTES), dtype=np.uint8)
        engine.register(memory.address, memory.size)
        engine.register(self._slots.ctypes.data, self._slots.nbytes)
        self._offer = Offer(engine.contact(), memory.address, memory.size).pack()
        self._loop = asyncio.get_running_loop()
        self._ends: asyncio.Queue[Ended | None] = asyncio.Queue()
        self._lock = threading.Lock()  # guards all that follows
        self._left = threading.Condition(self._lock)  # a lane's thread has ended
        self._rows = list(range(MOST_PEERS))
        self._lanes: dict[str, _Lane] = {}
        self._served: set[_Lane] = set()  # those of lost peers too, until their thread has ended
        self._jobs: dict[int, _Job] = {}
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def offers(self) -> dict[str, bytes]:
        return {self.name: self._offer}

    def via(self, _peer: str) -> str:
        return self.name

    async def attach(self, peer: Peer) -> None:
        if peer.name in self._lanes:
            return
        offer = Offer.unpack(offered(peer, self.name))
        if offer.size != peer.region.size:
            raise TransferFailed(f"{peer.name} describes {peer.region.size} of {offer.size} bytes")
        life = Life(peer.process)
        try:
            probe = offer.base + peer.region.probe_at if peer.region.probe_bytes else 0
            link = await asyncio.to_thread(self._engine.connect, offer.contact, probe)
        except EngineError as error:
            life.close()
            raise TransferFailed(f"{self.name} does not reach {peer.name}: {error}") from error
        with self._lock:
            is_wanted = peer.name not in self._lanes and not self._is_closed and bool(self._rows)
            if is_wanted:
                self._open(peer.name, link, life, offer)
        if not is_wanted:  # attached meanwhile, closed, or too many
            link.close()
            life.close()
        if peer.name not in self._lanes:
            raise TransferFailed(f"{self.name} takes no more peers")

    def detach(self, peer: str) -> None:
        with self._lock:
            if lane := self._lanes.pop(peer, None):
                self._leave(lane, "the peer is gone")

    def start(self, write: Write) -> None:
        with self._lock:
            lane = self._lanes.get(write.peer)
            error = self._refusal(write, lane)
            if lane is None or error:
                self._tell(Ended(write.id, error))
                return
            job = self._jobs[write.id] = _Job(write)
            lane.jobs.append(job)
            lane.work.notify()

    def abort(self, write: int) -> None:
        with self._lock:
            if job := self._jobs.get(write):
                self._stop(job, "aborted")

    def admit(self, key: Key, areas: Areas) -> None:
        pass  # who knows our memory's address and key can write to all of it

    def revoke(self, _key: Key, _through: frozenset[str]) -> bool:
        return False

    async def ends(self) -> AsyncIterator[Ended]:
        while (end := await self._ends.get()) is not None:
            yield end

    async def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            lanes = list(self._served)
            for lane in lanes:
                self._leave(lane, "the transport is closed")
            self._lanes.clear()
        await asyncio.to_thread(self._finish, lanes)
        with self._lock:  # what stands still is over now: the engine is gone
            for job in list(self._jobs.values()):
                self._end(job, "the transport is closed")
        self._loop.call_soon(self._ends.put_nowait, None)  # after the ends that are on their way

    def _finish(self, lanes: list[_Lane]) -> None:
        """Wait for the engine, but not for ever for a peer that stands still."""
        with self._lock:
            self._left.wait_for(lambda: not self._served, self._close_s)
            for lane in self._served:
                lane.life.give_up("the transport is closed")
            is_quiet = self._left.wait_for(lambda: not self._served, self._close_s)
        if not is_quiet:
            return  # a thread is inside the engine: nobody may take it down
        for lane in lanes:
            if lane.thread is not None:
                lane.thread.join()
        self._engine.close()

    def _refusal(self, write: Write, lane: _Lane | None) -> str | None:
        if self._is_closed:
            return "the transport is closed"
        if lane is None:
            return f"{write.peer} is not attached"
        if not fits(write, self._memory.size, lane.size):
            return "a run lies outside the memory"
        if write.slot and len(write.slot.data) > SLOT_BYTES:
            return f"a slot has at most {SLOT_BYTES} bytes, not {len(write.slot.data)}"
        return None

    def _open(self, peer: str, link: Link, life: Life, offer: Offer) -> None:
        work = threading.Condition(self._lock)
        lane = _Lane(link, life, offer.base, offer.size, self._rows.pop(), work)
        self._lanes[peer] = lane
        self._served.add(lane)
        name = f"pdrt-{self.name}-{lane.row}"
        lane.thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
        lane.thread.start()

    def _leave(self, lane: _Lane, reason: str) -> None:
        lane.is_over = True
        for job in list(lane.jobs):
            self._stop(job, reason)
        lane.work.notify()

    def _stop(self, job: _Job, reason: str) -> None:
        job.stop = job.stop or reason
        if not job.is_running:
            self._end(job, job.stop)

    def _end(self, job: _Job, error: str | None) -> None:
        if not job.is_over:
            job.is_over = True
            del self._jobs[job.write.id]
            self._tell(Ended(job.write.id, error))

    def _tell(self, end: Ended) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._ends.put_nowait, end)

    def _serve(self, lane: _Lane) -> None:
        """A lane's thread: its writes one by one, until the peer is gone."""
        while job := self._next(lane):
            error = self._carry(job, lane)
            with self._lock:
                if not lane.life.is_given_up:  # else `close` ends it, when the engine is gone
                    self._end(job, error)
                lane.jobs.popleft()
        lane.link.close()
        lane.life.close()
        with self._lock:
            self._served.discard(lane)
            self._rows.append(lane.row)
            self._left.notify_all()

    def _next(self, lane: _Lane) -> _Job | None:
        """The lane's next write, which stays first in its queue until it is over."""
        with self._lock:
            while True:
                while lane.jobs and lane.jobs[0].is_over:
                    lane.jobs.popleft()
                if lane.jobs and not lane.life.is_given_up:
                    lane.jobs[0].is_running = True
                    return lane.jobs[0]
                if lane.is_over:
                    return None
                lane.work.wait()

    def _carry(self, job: _Job, lane: _Lane) -> str | None:
        """Why the write failed, or None."""
        done, offset = 0, np.array([self._memory.address, lane.base, 0])
        try:
            for portion in portions(job.write.runs, PORTION, self._engine.most_runs):
                if job.stop:
                    return job.stop
                lane.link.put(portion + offset, lane.life)
                done += int(portion[:, 2].sum())
            if job.stop:
                return job.stop
            if slot := job.write.slot:
                self._slots[lane.row, : len(slot.data)] = np.frombuffer(slot.data, dtype=np.uint8)
                here = self._slots.ctypes.data + lane.row * SLOT_BYTES
                runs = np.array([[here, lane.base + slot.at, len(slot.data)]])
                lane.link.put(runs, lane.life)
        except EngineError as error:
            return f"{self.name}: {error} ({done} of {job.write.size} bytes were written)"
        except Exception as error:  # noqa: BLE001 - a bug of ours in a link must not stop the lane
            return f"{self.name}: {error!r} ({done} of {job.write.size} bytes were written)"
        return None
