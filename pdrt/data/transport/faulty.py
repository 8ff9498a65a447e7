"""Any transport with faults, by chance (config) or on command (tests, rehearsals).

What each fault does to a write, and what stays of the promise that it ends exactly once:

* delay: held back, by chance for up to `delay_s`; on command until `release`. Ends once.
* stall: held back until it is aborted, its peer is lost, or the transport closes. Ends once.
* reorder: held back until a later write has ended, or like a stall. Ends once.
* truncate: only the first half of its runs is copied and its slot is not, yet it ends well.
* corrupt: one byte of its slot is changed on the way. Without a slot: nothing. Ends once.
* drop: everything is copied; the end is kept back until abort, peer loss or close. Ends once.
* duplicate: the end is told twice. Only this one breaks the promise: managers must bear it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from enum import StrEnum
from random import Random

from pdrt.config import FaultSection
from pdrt.data.transport.promise import (
    Areas,
    Ended,
    Key,
    Peer,
    SlotWrite,
    Transport,
    Write,
)


class Fault(StrEnum):
    DELAY = "delay"
    STALL = "stall"
    REORDER = "reorder"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    DROP = "drop"
    DUPLICATE = "duplicate"


class FaultyTransport:
    """Wraps `inner`; faults on command (`next_writes`) come before those by chance."""

    def __init__(self, inner: Transport, faults: FaultSection | None = None) -> None:
        self._inner = inner
        faults = faults or FaultSection()
        self._chances = _chances(faults)
        self._delay_s = faults.delay_s
        self._random = Random(faults.seed)
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Fault | None] = deque()
        self._held: dict[int, Write] = {}  # not started; in order of arrival
        self._reordered: set[int] = set()
        self._dropping: set[int] = set()
        self._doubling: set[int] = set()
        self._kept: dict[int, Ended] = {}  # ended, but not told
        self._peers: dict[int, str] = {}
        self._own: asyncio.Queue[Ended | None] = asyncio.Queue()
        self._pump = self._loop.create_task(self._read())  # until the inner stream ends

    def next_writes(self, *faults: Fault | None) -> None:
        """What befalls the next writes, one each; None: nothing."""
        self._commands.extend(faults)

    @property
    def held(self) -> tuple[int, ...]:
        """Writes that are held back and have not touched memory."""
        return tuple(self._held)

    @property
    def kept(self) -> tuple[int, ...]:
        """Writes that are over without anybody having been told."""
        return tuple(self._kept)

    def release(self, write: int) -> None:
        """Let a held write go on; tell a kept end."""
        if held := self._held.pop(write, None):
            self._reordered.discard(write)
            self._inner.start(held)
        if end := self._kept.pop(write, None):
            self._tell(end)

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def offers(self) -> dict[str, bytes]:
        return self._inner.offers

    def via(self, peer: str) -> str:
        return self._inner.via(peer)

    def admit(self, key: Key, areas: Areas) -> None:
        self._inner.admit(key, areas)

    def revoke(self, key: Key, through: frozenset[str]) -> bool:
        return self._inner.revoke(key, through)

    async def attach(self, peer: Peer) -> None:
        await self._inner.attach(peer)

    def detach(self, peer: str) -> None:
        for write in [w for w, name in self._peers.items() if name == peer]:
            self._give_up(write, "the peer is gone")
        self._inner.detach(peer)

    def abort(self, write: int) -> None:
        self._give_up(write, "aborted")
        self._inner.abort(write)

    def start(self, write: Write) -> None:
        fault = self._commands.popleft() if self._commands else self._by_chance(write.id)
        self._peers[write.id] = write.peer
        match fault:
            case Fault.DELAY | Fault.STALL | Fault.REORDER:
                self._held[write.id] = write
                if fault is Fault.REORDER:
                    self._reordered.add(write.id)
                return
            case Fault.TRUNCATE:
                write = replace(write, runs=write.runs[: len(write.runs) // 2], slot=None)
            case Fault.CORRUPT if write.slot:
                write = replace(write, slot=_corrupted(write.slot))
            case Fault.DROP:
                self._dropping.add(write.id)
            case Fault.DUPLICATE:
                self._doubling.add(write.id)
            case _:
                pass
        self._inner.start(write)

    async def ends(self) -> AsyncIterator[Ended]:
        while (end := await self._own.get()) is not None:
            yield end

    async def close(self) -> None:
        for write in list(self._peers):
            self._give_up(write, "the transport is closed")
        await self._inner.close()
        await self._pump

    async def _read(self) -> None:
        async for end in self._inner.ends():
            if end.id in self._dropping:
                self._dropping.discard(end.id)
                self._kept[end.id] = end
                continue
            self._tell(end)
            if end.id in self._doubling:
                self._doubling.discard(end.id)
                self._tell(end)
            for write in [w for w in self._reordered if w != end.id]:
                self.release(write)
        self._own.put_nowait(None)

    def _tell(self, end: Ended) -> None:
        self._peers.pop(end.id, None)
        self._own.put_nowait(end)

    def _give_up(self, write: int, reason: str) -> None:
        """What was held back ends without having begun; what was kept back is told."""
        self._dropping.discard(write)
        self._reordered.discard(write)
        if self._held.pop(write, None):
            self._tell(Ended(write, reason))
        if end := self._kept.pop(write, None):
            self._tell(end)

    def _by_chance(self, write: int) -> Fault | None:
        for fault, chance in self._chances.items():
            if self._random.random() < chance:
                if fault is Fault.DELAY:
                    seconds = self._random.uniform(0, self._delay_s)
                    self._loop.call_later(seconds, self.release, write)
                return fault
        return None


def _chances(faults: FaultSection) -> dict[Fault, float]:
    return {
        Fault.DELAY: faults.delay,
        Fault.STALL: faults.stall,
        Fault.REORDER: faults.reorder,
        Fault.TRUNCATE: faults.truncate,
        Fault.CORRUPT: faults.corrupt,
        Fault.DROP: faults.drop,
        Fault.DUPLICATE: faults.duplicate,
    }


def _corrupted(slot: SlotWrite) -> SlotWrite:
    return SlotWrite(slot.at, bytes([slot.data[0] ^ 1]) + slot.data[1:])
