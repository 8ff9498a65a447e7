"""Any transport with faults, by chance (config) or on command (tests, rehearsals).

What each fault does to a write, and what stays of the promise that it ends exactly once:

* delay: held back, by chance for up to `delay_s`; on command until `release`. Ends once.
* stall: held back until it is aborted, its peer is lost, or the transport closes. Ends once.
* reorder: held back until a later write has ended, or like a stall. Ends once.
* truncate: only the first half of its bytes is copied and its slot is not, yet it ends well.
* corrupt: the halves of one run change places on the way, or one byte of its slot is changed;
  which of them is a matter of chance. Ends once, and well.
* drop: everything is copied; the end is kept back until abort, peer loss or close. Ends once.
* duplicate: the end is told twice. Only this one breaks the promise: managers must bear it.
* kill: the process ends itself (SIGKILL) when the write has begun; half of it may be copied.

All are made of writes that the inner transport carries, so every transport can have them. A
probe (a write without a key) is left alone: a way that was found good is what faults befall.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from random import Random

import numpy as np

from pdrt.config import FaultSection
from pdrt.data.layout import Runs
from pdrt.data.transport.promise import Ended, SlotWrite, Transport, Write
from pdrt.data.transport.wrapping import Wrapping


class Fault(StrEnum):
    DELAY = "delay"
    STALL = "stall"
    REORDER = "reorder"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    DROP = "drop"
    DUPLICATE = "duplicate"
    KILL = "kill"


def kill_ourselves() -> None:
    """No handler, no farewell: what a crash is to everybody else."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyTransport(Wrapping):
    """Wraps `inner`; faults on command (`next_writes`) come before those by chance."""

    def __init__(
        self,
        inner: Transport,
        faults: FaultSection | None = None,
        kill: Callable[[], None] = kill_ourselves,
    ) -> None:
        super().__init__(inner)
        self._kill = kill
        faults = faults or FaultSection()
        self._chances = {fault: float(getattr(faults, fault)) for fault in Fault}
        self._delay_s = faults.delay_s
        self._random = Random(faults.seed)
        self._places = Random(faults.seed)  # what is damaged does not change who is next
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Fault | None] = deque()
        self._held: dict[int, Write] = {}  # not started; in order of arrival
        self._reordered: set[int] = set()
        self._dropping: set[int] = set()
        self._doubling: set[int] = set()
        self._kept: dict[int, Ended] = {}  # ended, but not told
        self._peers: dict[int, str] = {}
        self._is_closed = False

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

    def detach(self, peer: str) -> None:
        for write in [w for w, name in self._peers.items() if name == peer]:
            self._give_up(write, "the peer is gone")
        self._inner.detach(peer)

    def abort(self, write: int) -> None:
        self._give_up(write, "aborted")
        self._inner.abort(write)

    def start(self, write: Write) -> None:
        if write.key is None or self._is_closed:
            self._inner.start(write)
            return
        fault = self._commands.popleft() if self._commands else self._by_chance(write.id)
        self._peers[write.id] = write.peer
        match fault:
            case Fault.DELAY | Fault.STALL | Fault.REORDER:
                self._hold(write, fault)
            case Fault.TRUNCATE:
                self._inner.start(truncated(write))
            case Fault.CORRUPT:
                self._inner.start(self._corrupted(write))
            case Fault.KILL:
                self._inner.start(truncated(write))
                self._kill()
            case Fault.DROP | Fault.DUPLICATE:
                (self._dropping if fault is Fault.DROP else self._doubling).add(write.id)
                self._inner.start(write)
            case None:
                self._inner.start(write)

    def _hold(self, write: Write, fault: Fault) -> None:
        self._held[write.id] = write
        if fault is Fault.REORDER:
            self._reordered.add(write.id)

    async def close(self) -> None:
        self._is_closed = True
        for write in list(self._peers):
            self._give_up(write, "the transport is closed")
        await super().close()

    def _heard(self, end: Ended) -> None:
        if end.id in self._dropping:
            self._dropping.discard(end.id)
            self._kept[end.id] = end
            return
        self._tell(end)
        if end.id in self._doubling:
            self._doubling.discard(end.id)
            self._tell(end)
        for write in [w for w in self._reordered if w != end.id]:
            self.release(write)

    def _tell(self, end: Ended) -> None:
        self._peers.pop(end.id, None)
        super()._tell(end)

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

    def _corrupted(self, write: Write) -> Write:
        """With a run or the slot not as it should be; what has neither cannot be spoilt."""
        runs = [n for n, (_, _, length) in enumerate(write.runs.tolist()) if length > 1]
        places = [*runs, None] if write.slot else runs
        place = self._places.choice(places) if places else None
        if place is not None:
            return replace(write, runs=halves_exchanged(write.runs, place))
        return replace(write, slot=_spoilt(write.slot)) if write.slot else write


def truncated(write: Write) -> Write:
    """The first half of its bytes, and no slot."""
    if not len(write.runs):
        return replace(write, slot=None)
    ends = np.cumsum(write.runs[:, 2])
    left = int(ends[-1]) // 2
    kept = write.runs[: int(np.searchsorted(ends, left)) + 1].copy()
    kept[-1, 2] -= int(ends[len(kept) - 1]) - left
    return replace(write, runs=kept[kept[:, 2] > 0], slot=None)


def halves_exchanged(runs: Runs, place: int) -> Runs:
    """One run's bytes from its middle on, then those before it: no memory needs to be touched."""
    src, dst, length = runs[place].tolist()
    half = length // 2
    turned = [[src + half, dst, length - half], [src, dst + length - half, half]]
    return np.concatenate((runs[:place], np.array(turned, dtype=np.int64), runs[place + 1 :]))


def _spoilt(slot: SlotWrite) -> SlotWrite:
    return SlotWrite(slot.at, bytes([slot.data[0] ^ 1]) + slot.data[1:])
