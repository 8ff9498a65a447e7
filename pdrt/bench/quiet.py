"""Waiting until a machine does nothing, so that a load meets nothing that another one left behind.

Some servers keep a core busy for a second after their last answer: whoever is measured then has
a core less, and looks slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

_LOOK_S: Final = 0.3  # thirty ticks of a kernel's clock: less is too coarse
_LOOKS: Final = 10
_BLIND_S: Final = 1.5  # where the kernel does not tell what its cores do
_QUIET_CORES: Final = 0.2  # not a share of all: one core of many is in the way of them all
_IDLE: Final = slice(3, 5)  # idle, and waiting for a disk
_ALL: Final = slice(0, 8)  # what follows, guests' time, is in the first two already


@dataclass(frozen=True, slots=True)
class Spent:
    """What all cores did since the machine started, in ticks."""

    cores: int
    busy: int
    all: int

    @staticmethod
    def read(file: Path = Path("/proc/stat")) -> Spent | None:
        """None where the kernel does not tell."""
        try:
            return Spent.of(file.read_text())
        except OSError:
            return None

    @staticmethod
    def of(stat: str) -> Spent | None:
        """From the text of /proc/stat."""
        lines = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
        ticks = [int(each) for each in lines[0][1:]] if lines else []
        every = sum(ticks[_ALL])  # 0 in some sandboxes
        return Spent(len(lines) - 1, every - sum(ticks[_IDLE]), every) if every else None

    def cores_since(self, before: Spent) -> float:
        """How many were busy meanwhile."""
        return self.cores * (self.busy - before.busy) / max(self.all - before.all, 1)


Read: TypeAlias = Callable[[], Spent | None]
Pause: TypeAlias = Callable[[float], Awaitable[object]]


async def until_quiet(read: Read = Spent.read, pause: Pause = asyncio.sleep) -> bool:
    """Whether the machine is quiet, after three seconds at most; a blind pause counts as quiet."""
    before = read()
    if before is None:
        await pause(_BLIND_S)
        return True
    for _ in range(_LOOKS):
        await pause(_LOOK_S)
        now = read()
        if now is None or now.cores_since(before) < _QUIET_CORES:
            return True
        before = now
    return False
