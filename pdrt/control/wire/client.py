"""Calls to other processes: kept connections, answers as they come, an end that is always told.

The promise: a call that is not cancelled ends in exactly one `on_end` or `on_lost`; cancelling
it closes its connection, which is how the other side learns that nobody wants its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import structlog
from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserUpgrade,
    HttpResponseParser,
)

from pdrt.control.http import cause_of
from pdrt.control.wire.chunks import CRLF, PassOn, is_one_chunk
from pdrt.control.wire.outbox import Outbox

IDLE_S: Final = 3.0  # below any leader's limit; what a burst needed is soon let go again
LOOK_EVERY_S: Final = 1.0
FORGET_S: Final = 600.0  # an address without connections
_SHORT: Final = 1 << 16  # bytes: to join them costs less than to write twice
MAX_HEAD_BYTES: Final = 1 << 16
ERROR_S: Final = 0.5  # and a look is at most a second later
_ERRORS: Final = 400

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """Why there is no answer, or not all of it."""

    what: str  # it did this ...
    cause: str  # ... because of that
    is_refused: bool = False  # no connection could be made


class Sink(Protocol):
    """Who is told what comes. `headers` have lower-case names."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes], /) -> None: ...

    def on_body(self, data: bytes, /) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, lost: Lost, /) -> None: ...


class Call:
    """One request under way."""

    __slots__ = ("connection", "is_counted", "is_paused", "on_chunk", "sink", "task")

    def __init__(self, sink: Sink) -> None:
        self.sink: Sink | None = sink  # None: over
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None  # while a connection is made
        self.is_paused = False
        self.is_counted = True  # among what was received
        self.on_chunk: PassOn | None = None

    def pass_chunks(self, on_chunk: PassOn) -> None:
        """From now on it is given the answer's chunks as they travel. Those that do not come alone
        or are odd are still read, and the sink is told what is in them."""
        if self.sink is not None:
            self.on_chunk = on_chunk
            if self.connection is not None:
                self.connection.expect_chunks()

    def end(self) -> None:
        """All has come. Tells the sink so, if nothing has ended it before; so does `lose`."""
        if (sink := self._over()) is not None:
            sink.on_end()

    def lose(self, lost: Lost) -> None:
        if (sink := self._over()) is not None:
            sink.on_lost(lost)

    def cancel(self) -> None:
        """Nobody wants it any more: the sink hears nothing from now on."""
        if self._over() is None:
            return
        if self.connection is not None:
            self.connection.abort()
        elif self.task is not None:
            self.task.cancel()

    def _over(self) -> Sink | None:
        """From now on it keeps nobody alive; who has to be told how, if that is not known yet."""
        sink, self.sink, self.on_chunk = self.sink, None, None
        return sink

    def pause(self) -> None:
        """Let no more come for now; what is on its way may."""
        if self.sink is not None and not self.is_paused:
            self.is_paused = True
            if self.connection is not None:
                self.connection.pause()

    def resume(self) -> None:
        if self.sink is not None and self.is_paused:
            self.is_paused = False
            if self.connection is not None:
                self.connection.resume()


class Connection(asyncio.Protocol):
    """One connection; one call at a time."""

    __slots__ = (
        "_call",
        "_fed",
        "_has_head",
        "_headers",
        "_is_between",
        "_is_interim",
        "_is_reusable",
        "_is_whole",
        "_over_at",
        "_parser",
        "_pool",
        "_transport",
        "idle_since",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._call: Call | None = None
        self._headers: dict[bytes, bytes] = {}
        self._fed = 0  # bytes of a head, of chunks' marks, of trailers: since a body's part
        self._has_head = self._is_interim = self._is_whole = self._is_reusable = False
        self._is_between = False  # all that came ended with a chunk's end
        self._over_at = math.inf  # what has come of an error by then is all that is waited for
        self.idle_since = 0.0

    def send(self, call: Call, head: bytes, body: bytes) -> None:
        assert self._transport is not None, "a connection is there before it is used"
        self._call, call.connection = call, self
        self._headers, self._fed, self._over_at = {}, 0, math.inf
        self._has_head = self._is_whole = self._is_between = False
        if call.is_paused:
            self.pause()
        if len(body) < _SHORT:
            self._pool.outbox.write(self._transport, head + body)
        else:
            self._pool.outbox.flush()
            self._transport.writelines((head, body))

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def pause(self) -> None:
        if self.is_open:
            cast("asyncio.Transport", self._transport).pause_reading()

    def resume(self) -> None:
        if self.is_open:
            cast("asyncio.Transport", self._transport).resume_reading()

    def look(self, now: float) -> None:
        """An error's status says enough: its text is not waited for as long as an answer's."""
        if now > self._over_at and (call := self._call) is not None:
            self.abort()
            call.end()

    def expect_chunks(self) -> None:
        """Acknowledge every second one: a packet for each is a twelfth of what passing it on costs.

        A peer without TCP_NODELAY waits 40 ms for one such packet; then the system takes this back
        by itself (tcp(7), TCP_QUICKACK).
        """
        if self._transport is not None and sys.platform == "linux":
            connected = self._transport.get_extra_info("socket")
            if connected is not None:  # with TLS there is none where it is lost already
                with contextlib.suppress(OSError):  # as here: that is told soon
                    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)

    def abort(self) -> None:
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._pool.outbox.flush()
            self._transport.close()

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self._pool.came(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.left(self)
        call = self._call
        if call is None:
            return
        if self._has_head and not self._headers.keys() & _FRAMED and error is None:
            call.end()
        else:
            cause = cause_of(error) if isinstance(error, OSError) else "connection closed"
            self._lose(cause)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nobody asked
            self.abort()
        elif self._is_between and call.on_chunk is not None and is_one_chunk(data):
            self._pool.received += 1
            call.on_chunk(data)
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._lose("it wants to speak another protocol")
        except HttpParserCallbackError:
            log.exception("answer_failed", of=self._pool.where)
            self._lose("an internal error; see the log")
        except HttpParserError as error:
            if self._is_whole:  # what follows an answer is not of it
                self._is_reusable = False
                self._finish()
            else:
                self._lose(f"this is no HTTP: {error}"[:200])
        else:
            if self._is_whole:
                self._finish()
            elif self._fed > MAX_HEAD_BYTES:
                what = "chunks' marks or trailers" if self._has_head else "a head"
                self._lose(f"{what} of more than {MAX_HEAD_BYTES} bytes")
            elif self._is_between:
                self._is_between = data.endswith(CRLF)  # else the next chunk's size has begun

    def _finish(self) -> None:
        """The answer is whole: the connection may be used again, if nothing came with it."""
        call, transport = self._call, self._transport
        if call is None or transport is None:
            return
        self._call = call.connection = None
        if self._is_reusable and not transport.get_write_buffer_size():
            if call.is_paused:
                transport.resume_reading()
            self._pool.back(self)
        else:
            transport.close()
        call.end()

    # The parser calls these.

    def on_message_begin(self) -> None:
        if self._is_whole:  # more than was asked for
            self._is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # what trails an answer says no more of it
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._is_whole:
            return
        status = self._parser.get_status_code()
        self._is_interim = 100 <= status < 200
        if self._is_interim:
            self._headers = {}
            return
        self._has_head, self._fed = True, 0
        if not 200 <= status < _ERRORS:
            self._over_at = self._pool.clock() + ERROR_S
        call = self._call
        if call is not None and call.sink is not None:
            call.sink.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        self._fed = 0
        call = self._call
        if call is not None and call.sink is not None and not self._is_whole:
            self._pool.received += call.is_counted
            call.sink.on_body(data)

    def on_chunk_header(self) -> None:
        self._is_between = False

    def on_chunk_complete(self) -> None:
        self._is_between = True

    def on_message_complete(self) -> None:
        if not self._is_interim and not self._is_whole:
            self._is_whole = True
            self._is_reusable = self._parser.should_keep_alive()

    def _lose(self, cause: str) -> None:
        call, what = self._call, _BROKE_OFF if self._has_head else _NO_ANSWER
        self.abort()
        if call is not None:
            call.lose(Lost(what, cause))


_FRAMED: Final = frozenset({b"content-length", b"transfer-encoding"})
_BROKE_OFF: Final = "broke off its answer"
_NO_ANSWER: Final = "closed the connection without an answer"


class Pool:
    """Connections to one address: the one used last is used next, and the idle ones end."""

    def __init__(
        self, url: str, connect_s: float, clock: Callable[[], float], outbox: Outbox
    ) -> None:
        self.outbox = outbox
        parts = urlsplit(url)
        assert parts.hostname is not None, "an instance's URL has been checked"
        assert parts.port is not None, "the same"
        self.where = parts.netloc
        self._host, self._port = parts.hostname, parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_s, self.clock = connect_s, clock
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet_since = clock()
        self.received = 0  # pieces of answers, behind their heads

    def send(self, head: bytes, body: bytes, sink: Sink) -> Call:
        call = Call(sink)
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                connection.send(call, head, body)
                return call
        call.task = asyncio.get_running_loop().create_task(self._connect(call, head, body))
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)
        return call

    async def _connect(self, call: Call, head: bytes, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._tls
                )
        except OSError as error:  # TimeoutError is one
            call.task = None
            told = error.strerror if isinstance(error, TimeoutError) else cause_of(error)
            cause = told or f"no connection within {self._connect_s:g} s"
            call.lose(Lost("cannot be reached", cause, is_refused=True))
            return
        call.task = None
        if call.sink is None:
            connection.close()
        elif connection.is_open:
            connection.send(call, head, body)
        else:
            call.lose(Lost(_NO_ANSWER, "connection closed"))

    def came(self, connection: Connection) -> None:
        self._all.add(connection)

    def left(self, connection: Connection) -> None:
        self._all.discard(connection)

    def back(self, connection: Connection) -> None:
        connection.idle_since = self.clock()
        self._free.append(connection)

    def look(self, now: float) -> None:
        """End what has been idle for long, and errors that do not end by themselves."""
        for connection in tuple(self._all):
            connection.look(now)
        kept = []
        for each in self._free:
            if each.is_open and now - each.idle_since < IDLE_S:
                kept.append(each)
            else:
                each.close()
        self._free = kept
        if self._all or self._tasks:
            self._quiet_since = now

    def is_forgotten(self, now: float) -> bool:
        """Whether there has been no connection for long: who was called there has gone."""
        return now - self._quiet_since > FORGET_S

    @property
    def open(self) -> int:
        """How many connections there are."""
        return len(self._all)

    async def close(self) -> None:
        for each in tuple(self._all):
            each.abort()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))


class Pools:
    """All pools of a process, by base URL. Open it in a loop, close it there."""

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        self._loop = asyncio.get_running_loop()
        self._pools: dict[str, Pool] = {}
        self._outbox = Outbox()
        self._next_look = self._loop.call_later(LOOK_EVERY_S, self._look)

    def pool(self, url: str) -> Pool:
        found = self._pools.get(url)
        if found is None:
            found = self._pools[url] = Pool(url, self._connect_s, self._loop.time, self._outbox)
        return found

    def _look(self) -> None:
        self._next_look = self._loop.call_later(LOOK_EVERY_S, self._look)
        self.look(self._loop.time())

    def look(self, now: float) -> None:
        for url, pool in tuple(self._pools.items()):
            pool.look(now)
            if pool.is_forgotten(now):
                del self._pools[url]

    async def close(self) -> None:
        self._next_look.cancel()
        for pool in self._pools.values():
            await pool.close()
