"""Small parts of the engine transports: runs in portions, a peer's life, and how to wait for it."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import msgpack
import numpy as np

from pdrt.data.layout import Runs
from pdrt.data.process import is_same_host, started_ticks
from pdrt.data.transport.copying import cut
from pdrt.errors import TransferFailed
from pdrt.messages import Process

_SPINS: Final = 16  # looks without sleep: a small write takes tens of microseconds
_SHORTEST_S: Final = 20e-6
_LONGEST_S: Final = 10e-3

_libc = ctypes.CDLL(None)
_libc.getenv.restype = ctypes.c_char_p


class EngineError(Exception):
    """The engine refused or failed. Unless `Unproven`, nothing of it touches memory any more."""


class Unproven(EngineError):
    """It has failed here, and what had left may still land in a peer that lives."""


class Hopeless(EngineError):
    """The peer is dead: there is no memory left to write to, and nobody to say how it went."""


@dataclass(frozen=True, slots=True)
class Offer:
    """How an engine's peer reaches our memory: whom to ask, and at which address it lies here."""

    contact: bytes
    base: int
    size: int

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.contact, self.base, self.size])
        return packed

    @staticmethod
    def unpack(data: bytes) -> Offer:
        """Raises TransferFailed for anything that is no offer."""
        try:
            fields = msgpack.unpackb(data, max_array_len=3)
        except (ValueError, msgpack.UnpackException) as error:
            raise TransferFailed(f"no offer of an engine: {error}") from error
        if not (isinstance(fields, list) and [type(f) for f in fields] == [bytes, int, int]):
            raise TransferFailed("no offer of an engine: contact, address and size wanted")
        return Offer(*fields)


class Life:
    """Whether a wait for this peer is without hope: its process is dead, or we gave it up."""

    def __init__(self, process: Process) -> None:
        """Only a process of this host can be seen to die. Raises TransferFailed when it has."""
        self._pidfd, self._given_up = -1, ""
        if not is_same_host(process):
            return
        with suppress(OSError):  # none left, or not allowed: then it cannot be seen to die
            self._pidfd = os.pidfd_open(process.pid)
        if started_ticks(process.pid) != process.started:
            self.close()
            raise TransferFailed(f"pid {process.pid} is dead, or another process now")

    @property
    def has_ended(self) -> bool:
        """Whether the process is seen to be dead."""
        if self._pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def give_up(self, reason: str) -> None:
        self._given_up = reason

    def check(self) -> None:
        """Raises Hopeless, or Unproven when we gave it up: nothing comes of waiting any more."""
        if self.has_ended:
            raise Hopeless("its process has died")
        if self._given_up:
            raise Unproven(self._given_up)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Naps:
    """Waits for an engine without a core of its own: an eighth of what it has waited so far."""

    def __init__(self, life: Life) -> None:
        self._life, self._count, self._since = life, 0, time.monotonic()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._since

    def nap(self) -> None:
        """Raises Hopeless or Unproven."""
        self._count += 1
        if self._count <= _SPINS:
            time.sleep(0)
            return
        self._life.check()
        time.sleep(min(max(self.waited_s / 8, _SHORTEST_S), _LONGEST_S))


def portions(runs: Runs, most_bytes: int, most_runs: int) -> Iterator[Runs]:
    """The same bytes, neighbours joined, in portions of no more bytes and runs than that."""
    runs = cut(_joined(runs[runs[:, 2] > 0]), most_bytes)
    before = np.cumsum(runs[:, 2]) - runs[:, 2]
    begin = 0
    while begin < len(runs):
        full = before[begin] + most_bytes
        end = int(np.searchsorted(before + runs[:, 2], full, side="right"))
        end = min(max(end, begin + 1), begin + most_runs)
        yield runs[begin:end]
        begin = end


def _joined(runs: Runs) -> Runs:
    """Each descriptor costs an engine something; runs that touch on both sides need but one."""
    if len(runs) < 2:
        return runs
    touch = (runs[1:, :2] == runs[:-1, :2] + runs[:-1, 2:]).all(axis=1)
    firsts = np.flatnonzero(np.concatenate(([True], ~touch)))
    joined = runs[firsts]
    joined[:, 2] = np.add.reduceat(runs[:, 2], firsts)
    return joined


def set_default(name: str, value: str) -> None:
    """For C libraries of this process, which read it; what the user has set stays."""
    _libc.setenv(name.encode(), value.encode(), 0)


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    """For a C library that reads it now; nothing is left behind. An empty value changes nothing."""
    before: bytes | None = _libc.getenv(name.encode())
    if value:
        _libc.setenv(name.encode(), value.encode(), 1)
    try:
        yield
    finally:
        if value and before is None:
            _libc.unsetenv(name.encode())
        elif value:
            _libc.setenv(name.encode(), before, 1)
