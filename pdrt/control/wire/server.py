"""Listens, and looks once a second after connections that wait for too long."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from typing import Final

from pdrt.control.http import new_request_id
from pdrt.control.listen import BACKLOG
from pdrt.control.wire.connection import Connection, Site

LOOK_EVERY_S: Final = 1.0


class Server:
    """Serves a site on a socket from `start` to `close`."""

    def __init__(
        self,
        site: Site,
        stage: str,
        *,
        max_body_bytes: int,
        max_head_bytes: int,
        slow_reader_s: float,
        mint_id: Callable[[], str] = new_request_id,
    ) -> None:
        self.site, self.stage = site, stage
        self.max_body_bytes, self.max_head_bytes = max_body_bytes, max_head_bytes
        self.slow_reader_s, self.mint_id = slow_reader_s, mint_id
        self.tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_closing = False
        self.now = 0.0
        self.date_line = b""
        self._server: asyncio.Server | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._clock: Callable[[], float] = lambda: 0.0

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._look()
        self._server = await loop.create_server(
            lambda: Connection(self), sock=listening, ssl=tls, backlog=BACKLOG
        )

    async def close(self, grace_s: float) -> None:
        """Take nobody new, let running answers end within `grace_s`, cut the rest."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        for each in self.all:
            each.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        for each in self.all:
            each.abort()
        await self._empty.wait()
        if self._next_look is not None:
            self._next_look.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)

    def came(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._empty.clear()
        if self.is_closing:
            connection.abort()

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    @property
    def all(self) -> Sequence[Connection]:
        return tuple(self._connections)

    def look(self, now: float) -> None:
        """End whatever has waited for too long by now."""
        self.now = now
        for each in self.all:
            each.look(now)

    def _look(self) -> None:
        self.date_line = f"date: {formatdate(usegmt=True)}\r\n".encode()
        self.look(self._clock())
        self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
