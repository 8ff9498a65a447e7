"""What processes use, as Linux tells it: processor time, memory, who listens where."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_SCHED: Final = 2  # of a process's clocks, the one that the scheduler keeps
_PROC: Final = Path("/proc")
_LISTENING: Final = "0A"


def listeners(port: int, proc: Path = _PROC) -> set[int]:
    """Processes that listen on this port; of other users only for root."""
    sockets = {f"socket:[{number}]" for number in _listening(port, proc)}
    return {pid for pid in _pids(proc) if sockets and sockets & set(_open(proc / str(pid)))}


def _listening(port: int, proc: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        file = proc / "net" / name
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            fields = line.split()
            if fields[3] == _LISTENING and fields[1].endswith(f":{port:04X}"):
                yield fields[9]


def _open(folder: Path) -> Iterator[str]:
    try:
        for each in (folder / "fd").iterdir():
            yield os.readlink(each)
    except OSError:
        return  # it ended, or is not ours


def with_children(pids: Collection[int], proc: Path = _PROC) -> set[int]:
    """These processes and all that they started."""
    parents = {pid: _fields(pid, proc) for pid in _pids(proc)}
    found = set(pids)
    while more := {p for p, f in parents.items() if f and int(f[1]) in found} - found:
        found |= more
    return found


def cpu_s(pids: Collection[int]) -> float:
    """Processor time of all of them so far, with threads that are over; 0 of a process that is.

    To the microsecond: /proc tells it in ticks of 10 ms, several percent of a turn of two seconds.
    """
    used = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            used += time.clock_gettime(~pid << 3 | _SCHED)  # clock_getcpuclockid(3) in Linux
    return used


def memory_mb(pids: Collection[int], proc: Path = _PROC) -> float:
    """What they hold, shared pages by halves and thirds (Pss); 0 where it is not told."""
    total = 0
    for pid in pids:
        try:
            lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def _pids(proc: Path) -> list[int]:
    return [int(each.name) for each in proc.iterdir() if each.name.isdigit()]


def _fields(pid: int, proc: Path) -> list[str]:
    """Of /proc/PID/stat, behind the name: state, parent and so on; none when it has ended."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
