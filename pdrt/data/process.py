"""Which process is meant, and the news of its death.

The promise: `DeathWatch` tells of a process once, when the kernel has torn it down (all its
threads have ended, nothing of it writes any more), and never takes a reused pid for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pdrt.messages import Process


def host_identity() -> str:
    """This boot of this kernel, and the pid namespace in which pids are meant."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def started_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return int(stat.rpartition(")")[2].split()[19])  # the name may hold blanks and brackets


def this_process() -> Process:
    """The name that others know this process by."""
    pid = os.getpid()
    started = started_ticks(pid)
    assert started is not None
    return Process(host=host_identity(), pid=pid, started=started)


def is_same_host(process: Process) -> bool:
    """Whether the process can be watched and reached through /proc from here."""
    return process.host == host_identity()


class DeathWatch:
    """Tells `tell` of each watched process when it is dead. Lives on the running loop."""

    def __init__(self, tell: Callable[[Process], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._watched: dict[Process, int] = {}

    def watch(self, process: Process) -> bool:
        """Watch it, once. False when its death cannot be seen from here."""
        if process in self._watched:
            return True
        if not is_same_host(process):
            return False
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._loop.call_soon(self._tell, process)
            return True
        except OSError:
            return False
        if started_ticks(process.pid) != process.started:  # somebody else has this pid now
            os.close(pidfd)
            self._loop.call_soon(self._tell, process)
            return True
        self._watched[process] = pidfd
        self._loop.add_reader(pidfd, self._died, process)
        return True

    def _died(self, process: Process) -> None:
        self.forget(process)
        self._tell(process)

    def forget(self, process: Process) -> None:
        """Watch it no longer; unknown ones are no error."""
        pidfd = self._watched.pop(process, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            with suppress(OSError):
                os.close(pidfd)

    def close(self) -> None:
        for process in list(self._watched):
            self.forget(process)
