"""Writes of one turn of the event loop, made together at its end.

A write wakes its reader, and to wake a process on an idle core costs several times what the
write itself does. While a turn is busy the other side has nothing better to do than to sleep, so
that each write would wake it anew; those made together wake it once.
"""

from __future__ import annotations

import asyncio
from typing import Final

MOST: Final = 1 << 16  # bytes: beyond, whoever reads too slowly must become known at once


class Outbox:
    """Between `write` and the end of the turn, what is written waits here, in its order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[asyncio.Transport, bytes]] = []
        self._bytes = 0

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        if not self.waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self.waiting.append((transport, data))
        self._bytes += len(data)
        if self._bytes > MOST:
            self.flush()

    def flush(self) -> None:
        """Now: before what must come after, like the end of a connection."""
        waiting, self.waiting, self._bytes = self.waiting, [], 0
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)
