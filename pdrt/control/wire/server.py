"""Listens, and looks once a second after connections that wait for too long."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from typing import Final

from pdrt.control.http import new_request_id
from pdrt.control.listen import BACKLOG
from pdrt.control.wire.connection import Connection, Site
from pdrt.control.wire.outbox import Outbox
from pdrt.errors import Overloaded

LOOK_EVERY_S: Final = 1.0
HANDSHAKE_S: Final = 10.0  # of TLS


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
        max_connections: int = 0,  # of one address; 0: no limit
    ) -> None:
        self.site, self.stage = site, stage
        self.max_body_bytes, self.max_head_bytes = max_body_bytes, max_head_bytes
        self.slow_reader_s = slow_reader_s
        self.mint_id: Callable[[], str] = new_request_id
        self._max_connections = max_connections
        self._by_address: Counter[str] = Counter()
        self._listening: socket.socket | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.outbox = Outbox()
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
        self._clock = asyncio.get_running_loop().time
        self._look()
        self._listening = listening
        await self._accept(tls)

    def renew(self, tls: ssl.SSLContext | None) -> None:
        """Connections from now on have this certificate; those that are there keep theirs."""
        task = asyncio.get_running_loop().create_task(self._accept(tls))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _accept(self, tls: ssl.SSLContext | None) -> None:
        """The socket stays the same all the time, so that nobody is refused meanwhile."""
        if self._listening is None or self.is_closing:
            return
        before = self._server
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self),
            sock=self._listening.dup(),
            ssl=tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
        )
        if before is not None:
            before.close()

    async def close(self, grace_s: float) -> None:
        """Take nobody new, let running answers end within `grace_s`, cut the rest."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        if self._listening is not None:
            self._listening.close()
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
        self._by_address[connection.address] += 1
        most = self._max_connections
        if most and self._by_address[connection.address] > most:
            what = f"{connection.address} has {most} connections, which is the limit"
            connection.turn_away(Overloaded(what))

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]
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
