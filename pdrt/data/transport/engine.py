"""What the transports over a foreign engine share: a lane and a thread for each peer.

The promise: a write ends once, when the engine has said that it is over, or when the peer's
process is known to be dead; never because we gave it up or lost the connection, since engines
and the peer's kernel go on writing then. A write that waits in its lane ends at once; one that
the engine has, between two portions; one that failed without proof (`Unproven`), when the kernel
tells of the peer's death, which it does for a process of this host alone: a peer that is detached
may live, so where its death cannot be seen such a write stays open. What has no proof when the
transport closes is never told: it is logged. A lane that stands still has only its own thread
waiting. `revoke` is never a proof: no engine asks the target before it writes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import structlog

from pdrt.data.layout import Runs
from pdrt.data.memory import SLOT_BYTES, HostMemory
from pdrt.data.transport.jobs import CLOSED, Job, Jobs, refusal
from pdrt.data.transport.lane import EngineError, Life, Offer, Unproven, portions
from pdrt.data.transport.promise import Areas, Ended, Key, Peer, Write, offered
from pdrt.errors import TransferFailed

PORTION: Final = 32 << 20  # bytes: what an abort may have to wait for
MOST_PEERS: Final = 1024
CLOSE_S: Final = 5.0  # for writes that the engine has; a peer that stands still gets no more
IDLE_S: Final = 1.0  # after which a connection is tried before it is used
LOOK_S: Final = 0.05  # how often a peer whose writes are unproven is looked at

_log = structlog.get_logger()


class Link(Protocol):
    """The way to one peer's memory, used by its lane's thread alone."""

    def put(self, runs: Runs, life: Life) -> None:
        """Copy runs of (address here, address there, length); return when all has landed.

        Raises EngineError when it has failed: Unproven, if something of it may land later.
        """
        ...

    def close(self) -> None:
        """No call is inside, but what failed unproven may be on its way. Raises nothing."""
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


@dataclass(slots=True, eq=False)
class _Lane:
    """One peer: how it is reached and the writes to it, in order."""

    peer: Peer
    offer: Offer
    life: Life
    row: int  # of our slots, from where its slots go
    work: threading.Condition  # there is some, or there will be no more
    is_reached: asyncio.Future[None]
    jobs: deque[Job] = field(default_factory=deque)
    unproven: list[tuple[Job, str]] = field(default_factory=list)  # with why they failed
    is_over: bool = False
    used_at: float = 0.0  # when a write of it last ended
    thread: threading.Thread | None = None

    @property
    def probe(self) -> int:
        """An address there that may be written at any time, or 0."""
        region = self.peer.region
        return self.offer.base + region.probe_at if region.probe_bytes else 0


class EngineTransport:
    """Made on the running loop, which its ends are told to."""

    def __init__(
        self,
        memory: HostMemory,
        engine: Engine,
        close_s: float = CLOSE_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._memory, self._engine = memory, engine
        self._close_s, self._idle_s = close_s, idle_s
        self._slots = np.zeros((MOST_PEERS, SLOT_BYTES), dtype=np.uint8)
        engine.register(memory.address, memory.size)
        engine.register(self._slots.ctypes.data, self._slots.nbytes)
        self._offer = Offer(engine.contact(), memory.address, memory.size).pack()
        self._loop = asyncio.get_running_loop()
        self._jobs = Jobs()
        self._lock = self._jobs.lock  # guards all that follows
        self._left = threading.Condition(self._lock)  # a lane's thread has ended
        self._rows = list(range(MOST_PEERS))
        self._lanes: dict[str, _Lane] = {}
        self._served: set[_Lane] = set()  # those of lost peers too, until their thread has ended

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def offers(self) -> dict[str, bytes]:
        return {self.name: self._offer}

    @property
    def counters(self) -> Mapping[str, float]:
        return {}

    def via(self, _peer: str) -> str:
        return self.name

    async def attach(self, peer: Peer) -> None:
        """Its lane's thread connects, so a call that hangs there holds up nothing else. Whoever
        stops waiting for it leaves that thread to let go of all when the call returns.
        """
        if peer.name in self._lanes:
            return
        offer = Offer.unpack(offered(peer, self.name))
        if offer.size != peer.region.size:
            raise TransferFailed(f"{peer.name} describes {peer.region.size} of {offer.size} bytes")
        lane = self._open(peer, offer)
        try:
            await lane.is_reached
            with self._lock:
                if self._jobs.is_closed:
                    raise TransferFailed(f"{self.name} takes no more peers")
                self._lanes.setdefault(peer.name, lane)
        except EngineError as error:
            raise TransferFailed(f"{self.name} does not reach {peer.name}: {error}") from error
        finally:
            with self._lock:
                if self._lanes.get(peer.name) is not lane:
                    self._leave(lane, "nobody waited for it")

    def detach(self, peer: str) -> None:
        with self._lock:
            if lane := self._lanes.pop(peer, None):
                self._leave(lane, "the peer is gone")

    def start(self, write: Write) -> None:
        with self._lock:
            lane = self._lanes.get(write.peer)
            error = self._refusal(write, lane)
            if lane is None or error:
                self._jobs.tell(Ended(write.id, error))
                return
            lane.jobs.append(self._jobs.begin(write))
            lane.work.notify()

    def abort(self, write: int) -> None:
        with self._lock:
            if job := self._jobs.get(write):
                self._jobs.stop(job, "aborted")

    def admit(self, key: Key, areas: Areas) -> None:
        pass  # who knows our memory's address and key can write to all of it

    def revoke(self, _key: Key, _through: frozenset[str]) -> bool:
        return False

    def ends(self) -> AsyncIterator[Ended]:
        return self._jobs.ends()

    async def close(self) -> None:
        """Bounded: what the engine does not let go of, or has lost, is left untold and logged."""
        with self._lock:
            if self._jobs.is_closed:
                return
            self._jobs.is_closed = True
            lanes = list(self._served)
            for lane in lanes:
                self._leave(lane, CLOSED)
            self._lanes.clear()
        await asyncio.to_thread(self._finish, lanes)
        with self._lock:
            untold = self._jobs.all()
        if untold:
            peers = sorted({job.write.peer for job in untold})
            _log.warning("writes_untold", transport=self.name, writes=len(untold), peers=peers)
        self._jobs.finish()

    def _finish(self, lanes: list[_Lane]) -> None:
        """Wait for the engine, but not for ever for a peer that stands still."""
        with self._lock:
            self._left.wait_for(lambda: not self._served, self._close_s)
            for lane in self._served:
                lane.life.give_up(CLOSED)
            is_quiet = self._left.wait_for(lambda: not self._served, self._close_s)
        if not is_quiet:
            return  # a thread is inside the engine: nobody may take it down
        for lane in lanes:
            if lane.thread is not None:
                lane.thread.join()
        self._engine.close()

    def _refusal(self, write: Write, lane: _Lane | None) -> str | None:
        there = lane.offer.size if lane else None
        if write.slot and len(write.slot.data) > SLOT_BYTES:
            return f"a slot has at most {SLOT_BYTES} bytes, not {len(write.slot.data)}"
        return refusal(write, self._memory, there, self._jobs.is_closed)

    def _open(self, peer: Peer, offer: Offer) -> _Lane:
        """A lane whose thread connects. Raises TransferFailed, and then nothing is left of it."""
        life = Life(peer.process)
        work, reached = threading.Condition(self._lock), self._loop.create_future()
        with self._lock:
            if self._jobs.is_closed or not self._rows:
                life.close()
                raise TransferFailed(f"{self.name} takes no more peers")
            lane = _Lane(peer, offer, life, self._rows.pop(), work, reached)
            name = f"pdrt-{self.name}-{lane.row}"
            lane.thread = threading.Thread(target=self._live, args=(lane,), name=name, daemon=True)
            try:
                lane.thread.start()
            except RuntimeError as error:  # no thread is to be had
                self._rows.append(lane.row)
                life.close()
                raise TransferFailed(f"{self.name} cannot serve {peer.name}: {error}") from error
            self._served.add(lane)
        return lane

    def _leave(self, lane: _Lane, reason: str) -> None:
        lane.is_over = True
        for job in list(lane.jobs):
            self._jobs.stop(job, reason)
        lane.work.notify()

    def _live(self, lane: _Lane) -> None:
        """A lane's thread: from the connection to the end of its last write."""
        try:
            link = self._engine.connect(lane.offer.contact, lane.probe)
            lane.used_at = time.monotonic()
        except EngineError as error:
            self._reached(lane, error)
        except Exception as error:  # noqa: BLE001 - an engine's, or a bug in a link: who attaches is told
            self._reached(lane, EngineError(repr(error)))
        else:
            self._reached(lane, None)
            self._serve(lane, link)
            link.close()
        lane.life.close()
        with self._lock:
            self._served.discard(lane)
            self._rows.append(lane.row)
            self._left.notify_all()

    def _reached(self, lane: _Lane, error: EngineError | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(_settle, lane.is_reached, error)

    def _serve(self, lane: _Lane, link: Link) -> None:
        """Its writes one by one, until the peer is gone."""
        while job := self._next(lane):
            try:
                error = self._carry(job, lane, link)
            except Unproven as failure:
                self._keep(job, lane, str(failure))
                continue
            with self._lock:
                lane.jobs.popleft()
                self._jobs.end(job, error)

    def _next(self, lane: _Lane) -> Job | None:
        """The lane's next write, which stays first in its queue until the engine is through."""
        with self._lock:
            while True:
                while lane.jobs and lane.jobs[0].is_over:
                    lane.jobs.popleft()
                if lane.unproven and lane.life.has_ended:
                    self._bury(lane)
                if lane.jobs:
                    lane.jobs[0].is_running = True
                    return lane.jobs[0]
                if lane.is_over and (self._jobs.is_closed or not lane.unproven):
                    return None
                lane.work.wait(LOOK_S if lane.unproven else None)

    def _keep(self, job: Job, lane: _Lane, error: str) -> None:
        """It has failed, and may land all the same: it stays open while its peer lives."""
        with self._lock:
            lane.jobs.popleft()
            lane.unproven.append((job, error))
        _log.warning("write_unproven", peer=lane.peer.name, write=job.write.id, reason=error)

    def _bury(self, lane: _Lane) -> None:
        """The peer is dead, and its memory with it."""
        for job, error in lane.unproven:
            self._jobs.end(job, job.stop or error)
        lane.unproven.clear()

    def _carry(self, job: Job, lane: _Lane, link: Link) -> str | None:
        """Why the write failed, or None. Raises Unproven."""
        base = lane.offer.base
        done, offset = 0, np.array([self._memory.address, base, 0])
        try:
            self._try(lane, link)
            for portion in portions(job.write.runs, PORTION, self._engine.most_runs):
                if job.stop:
                    return job.stop
                link.put(portion + offset, lane.life)
                done += int(portion[:, 2].sum())
            if job.stop:
                return job.stop
            if slot := job.write.slot:
                self._slots[lane.row, : len(slot.data)] = np.frombuffer(slot.data, dtype=np.uint8)
                here = self._slots.ctypes.data + lane.row * SLOT_BYTES
                link.put(np.array([[here, base + slot.at, len(slot.data)]]), lane.life)
            lane.used_at = time.monotonic()
        except EngineError as error:
            said = f"{self.name}: {error} ({done} of {job.write.size} bytes were written)"
            if isinstance(error, Unproven):
                raise Unproven(said) from error
            return said
        except Exception as error:  # noqa: BLE001 - a bug of ours in a link must not stop the lane
            return f"{self.name}: {error!r} ({done} of {job.write.size} bytes were written)"
        return None

    def _try(self, lane: _Lane, link: Link) -> None:
        """A connection that was idle may have been cut, which the first write to it pays for: so
        that is one which does no harm whenever it lands.
        """
        if lane.probe and time.monotonic() - lane.used_at > self._idle_s:
            here = self._slots.ctypes.data + lane.row * SLOT_BYTES
            with suppress(Unproven):
                link.put(np.array([[here, lane.probe, SLOT_BYTES]]), lane.life)


def _settle(reached: asyncio.Future[None], error: EngineError | None) -> None:
    if reached.done():  # who waited has left
        return
    if error:
        reached.set_exception(error)
    else:
        reached.set_result(None)
