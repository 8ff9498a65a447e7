"""The cluster's processes: started, heard through their log files, ended.

The promise: a child ends when `pdrt up` does, however that ends; what a child says never blocks
it, because it writes to a file of bounded size and not into a pipe that somebody must read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pdrt.up.layout import Part

_PR_SET_PDEATHSIG: Final = 1
_MAX_LOG_BYTES: Final = 32 << 20
_KEPT_LINES: Final = 12


class Child:
    """One process, its log and whether it has ended."""

    def __init__(
        self, part: Part, process: asyncio.subprocess.Process, log: Path, max_log_bytes: int
    ) -> None:
        self.part, self._process, self._log, self._max = part, process, log, max_log_bytes
        self._reader = log.open("rb")
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""
        self.is_told = False  # its end was reported

    @staticmethod
    async def start(
        part: Part,
        arguments: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        max_log_bytes: int = _MAX_LOG_BYTES,
    ) -> Child:
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C is ours; they get SIGTERM when it is their turn
                preexec_fn=dying_with_parent(),
            )
        return Child(part, process, log, max_log_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def new_lines(self) -> list[str]:
        """Whole lines written since the last call."""
        data = self._rest + self._reader.read()
        *lines, self._rest = data.split(b"\n")
        if self._reader.tell() > self._max:  # it appends, so it goes on at the new end
            os.truncate(self._log, 0)
            self._reader.seek(0)
        said = [line.decode(errors="replace") for line in lines if line.strip()]
        self._tail.extend(said)
        return said

    def last_lines(self) -> list[str]:
        self.new_lines()
        return list(self._tail)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        return await self._process.wait()

    def close(self) -> None:
        self._reader.close()


def command(part: Part, conf: Path) -> list[str]:
    return [sys.executable, "-m", "pdrt", *part.arguments(conf)]


def dying_with_parent() -> Callable[[], None]:
    """Run in the child before its program: SIGTERM for it when its parent dies."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # died in between
            os._exit(1)

    return before_exec


async def end(children: Sequence[Child], grace_s: float, hurry: asyncio.Event) -> list[Child]:
    """SIGTERM to all, SIGKILL after the grace or once `hurry` is set; returns who was killed."""
    living = [child for child in children if child.exit_status is None]
    for child in living:
        child.signal(signal.SIGTERM)
    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(_all_ended(living))
        hurried = tasks.create_task(hurry.wait())
        await asyncio.wait([ended, hurried], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        killed = [child for child in living if child.exit_status is None]
        for child in killed:
            child.signal(signal.SIGKILL)
    return killed


async def _all_ended(children: Sequence[Child]) -> None:
    for child in children:
        await child.wait()
