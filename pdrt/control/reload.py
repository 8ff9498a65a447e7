"""Files that are read again while a process runs: when they change, and when SIGHUP comes.

The promise: what is in use stays in use until its successor has been read well.
"""

from __future__ import annotations

import asyncio
import signal
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import structlog

from pdrt.errors import ConfigError

EVERY_S: Final = 2.0
T = TypeVar("T")
Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Reload(Generic[T]):
    """`read` raises ConfigError for files that are not right; `use` is given what it returned."""

    what: str
    paths: Sequence[Path]
    read: Callable[[], T]
    use: Callable[[T], None]
    seen: Stamp = field(default=())

    def start(self) -> None:
        """The first time, when it may be a pipe. Raises ConfigError."""
        self.note()
        self.use(self.read())

    def note(self) -> None:
        """What is in use is what the files hold now."""
        self.seen = self._stamp()

    async def look(self, *, always: bool = False) -> None:
        """Read again what has changed; what is wrong is logged, and the old stays in use."""
        stamp = await asyncio.to_thread(self._stamp)
        if stamp == self.seen and not always:
            return
        self.seen = stamp
        try:
            self.use(await asyncio.to_thread(self._read))
        except ConfigError as error:
            log.warning("reload_failed", what=self.what, error=str(error))
        else:
            log.info("reloaded", what=self.what)

    def _read(self) -> T:
        for path in self.paths:
            _check_is_file(path)
        return self.read()

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp_of, self.paths))


AnyReload: TypeAlias = Reload[Any]


async def watch(reloads: Sequence[AnyReload], every_s: float = EVERY_S) -> None:
    """Look at them for ever. SIGHUP is left alone where there is nothing to read again."""
    if not reloads:
        return
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    try:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await asked.wait()
            always = asked.is_set()
            asked.clear()
            for reload in reloads:
                await reload.look(always=always)
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _check_is_file(path: Path) -> None:
    """Whoever reads a pipe waits for as long as nobody writes. Raises ConfigError."""
    with suppress(OSError):  # `read` says what is wrong with what is not there
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is no regular file")


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        told = path.stat()
    except OSError:
        return None
    return told.st_mtime_ns, told.st_size, told.st_ino
