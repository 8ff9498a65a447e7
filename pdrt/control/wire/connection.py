"""One client's connection: bytes become requests, one at a time, each within its bounds.

The promise: whatever arrives is answered in JSON with a truthful status or the connection ends;
what a client has sent ahead of its turn is bounded, and so is every wait for more of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

import structlog
from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
)

from pdrt.control.wire.exchange import Exchange, Handler
from pdrt.control.wire.outbox import Outbox
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Headers, Request, split_target
from pdrt.control.wire.routes import Routes
from pdrt.errors import BadRequest, HeadTooLarge, NotAllowed, PdrtError, Stalled, TooLarge

MAX_HEADERS: Final = 100
MAX_AHEAD: Final = 16  # requests in one piece of input
MAX_AHEAD_BYTES: Final = 1 << 16  # beyond those that wait for the answer before them
HIGH_WATER: Final = 1 << 16  # bytes of answers that a client has not read
READ_S: Final = 30.0  # a head or a body that stalls ends after this
IDLE_S: Final = 75.0  # a connection without requests
LINGER_S: Final = 2.0  # for a client that still sends what was refused
_OF_UPGRADES: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})
_OF_LIVES: Final = frozenset({b"close", b"keep-alive"})

log = structlog.get_logger(__name__)


class Site(Protocol):
    """Whose requests these are. `begun` and `over` are called once for each, in this order."""

    routes: Routes

    def begun(self, exchange: Exchange) -> PdrtError | Reply | None:
        """The head is here, the body is not yet: what is answered instead, or None to go on."""
        ...

    def over(self, exchange: Exchange) -> None:
        """Answered, broken off, or the client has left."""
        ...

    def head_lines(self, request: Request) -> bytes:
        """More header lines for the answer."""
        ...

    def stopped_reading(self, exchange: Exchange) -> None:
        """Its client has read nothing for too long, and is cut off."""
        ...


class Host(Protocol):
    """The server, as its connections see it."""

    site: Site
    stage: str
    mint_id: Callable[[], str]
    max_body_bytes: int
    max_head_bytes: int
    slow_reader_s: float
    date_line: bytes
    now: float  # of the last look
    is_closing: bool
    tasks: set[asyncio.Task[None]]
    outbox: Outbox

    def came(self, connection: Connection) -> None: ...

    def left(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    __slots__ = (
        "_ahead",
        "_body",
        "_body_bytes",
        "_count",
        "_current",
        "_fed",
        "_head_bytes",
        "_headers",
        "_host",
        "_is_in_head",
        "_is_last",
        "_lingers",
        "_moved_at",
        "_open",
        "_parser",
        "_queue",
        "_since",
        "_target",
        "_transport",
        "_unread",
        "address",
        "is_full",
    )

    def __init__(self, host: Host) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._parser = HttpRequestParser(self)
        self._open: Exchange | None = None  # its body is still coming
        self._current: Exchange | None = None  # being answered
        self._queue: deque[Exchange] = deque()  # whole, waiting for their turn
        self._ahead = bytearray()  # not looked at before the current one is answered
        self._is_last = False  # no request is read after those that are here
        self._lingers = False  # refused; what still comes is dropped
        self._is_in_head = False
        self._fed = 0  # bytes since a part of a body came: of a head, of chunks' marks, of trailers
        self._head_bytes = 0
        self._target = b""
        self._headers: Headers = {}
        self._count = 0
        self.address = ""  # of the client
        self._body: list[bytes] = []
        self._body_bytes = 0
        self.is_full = False
        self._since = host.now  # when what it waits for began
        self._unread = 0  # bytes in the write buffer at the last look
        self._moved_at = host.now  # when that was another number

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        told = transport.get_extra_info("peername")
        self.address = str(told[0]) if told else ""
        self._host.came(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        waiting, self._queue = self._queue, deque()
        for exchange in (self._current, *waiting, self._open):
            if exchange is not None:
                exchange.gone()
                self._host.site.over(exchange)
        self._current = self._open = None
        self._host.left(self)

    def pause_writing(self) -> None:
        self.is_full = True
        if self._current is not None:
            self._current.flow(is_full=True)

    def resume_writing(self) -> None:
        self.is_full = False
        if self._current is not None:
            self._current.flow(is_full=False)

    def data_received(self, data: bytes) -> None:
        if self._lingers or self._is_last:
            return
        if self._current is not None:
            self._ahead += data
            if len(self._ahead) > MAX_AHEAD_BYTES:
                self._ahead.clear()
                self._is_last = True
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
            return
        except HttpParserCallbackError:
            log.exception("request_failed")
            self._refuse_rest(PdrtError("an internal error; see the log"))
        except HttpParserError as error:
            self._refuse_rest(BadRequest(f"this is no HTTP request: {error}"[:300]))
        if self._fed > self._host.max_head_bytes and self.is_reading:
            self._refuse_rest(self._head_too_large())
        self._advance()

    def _stay(self, rest: bytes) -> None:
        """No other protocol is spoken here: the same request, as if it had not asked for one."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse_rest(NotAllowed("CONNECT", ("HTTP",)))
            self._advance()
            return
        version = self._parser.get_http_version().encode()
        self._parser, self._fed = HttpRequestParser(self), 0
        first = b"%b %b HTTP/%b" % (method, self._target, version)
        kept = [b"%b: %b" % each for each in self._headers.items() if each[0] not in _OF_UPGRADES]
        asked = self._headers.get(b"connection", b"").lower().split(b",")
        kept += [b"connection: %b" % each for each in _OF_LIVES & {each.strip() for each in asked}]
        self._feed(b"\r\n".join((first, *kept, b"", rest)))

    # The parser calls these.

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._head_bytes = self._count = self._body_bytes = 0
        self._target, self._headers, self._body = b"", {}, []
        self._since = self._host.now

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # a trailer: who was let in by the head says no more of it
            return
        self._head_bytes += len(name) + len(value)
        self._count += 1
        if self._count <= MAX_HEADERS:
            name = name.lower()
            before = self._headers.get(name)
            self._headers[name] = value if before is None else before + b", " + value

    def on_headers_complete(self) -> None:
        self._is_in_head, self._fed = False, 0
        parser = self._parser
        if parser.should_upgrade():
            return
        path, query = split_target(self._target)
        request = Request(
            parser.get_method().decode("latin-1"),
            path,
            query,
            self._headers,
            is_1_1=parser.get_http_version() == "1.1",
            keeps_alive=parser.should_keep_alive(),
            mint=self._host.mint_id,
        )
        exchange = Exchange(self, request, self._host.stage)
        if len(self._queue) >= MAX_AHEAD:
            self._is_last = True
        if self._is_last or self._lingers:
            return
        self._open = exchange
        exchange.refusal = self._unfit(exchange)
        if b"expect" in self._headers and request.is_1_1:  # RFC 9110, 10.1.1
            exchange.wants_more = self._headers[b"expect"].lower() == b"100-continue"

    def on_body(self, piece: bytes) -> None:
        self._fed, exchange = 0, self._open
        if exchange is None or exchange.refusal is not None:
            return
        exchange.wants_more = False
        self._body_bytes += len(piece)
        if self._body_bytes > self._host.max_body_bytes:
            exchange.refusal = self._body_too_large()
            self._body = []
            return
        self._body.append(piece)

    def on_message_complete(self) -> None:
        self._fed = 0
        exchange, self._open = self._open, None
        if exchange is None:
            return
        exchange.wants_more = False
        body = self._body
        exchange.request.body = body[0] if len(body) == 1 else b"".join(body)
        self._body = []
        self._queue.append(exchange)

    # What is unfit.

    def _unfit(self, exchange: Exchange) -> PdrtError | Reply | None:
        request, site = exchange.request, self._host.site
        try:
            exchange.route = site.routes.find(request)
        except PdrtError as error:
            return site.begun(exchange) or error
        if (refusal := site.begun(exchange)) is not None:
            return refusal
        if self._head_bytes > self._host.max_head_bytes or self._count > MAX_HEADERS:
            return self._head_too_large()
        length = request.headers.get(b"content-length", b"0")
        if int(length) > self._host.max_body_bytes:  # the parser has seen that it is a number
            return self._body_too_large()
        coding = request.headers.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            return BadRequest("transfer-encoding: nothing but chunked is read here")
        return None

    def _head_too_large(self) -> PdrtError:
        most = self._host.max_head_bytes
        return HeadTooLarge(f"the head is over the limit of {most} bytes and {MAX_HEADERS} headers")

    def _body_too_large(self) -> PdrtError:
        return TooLarge(f"the body is over the limit of {self._host.max_body_bytes} bytes")

    def _refuse_rest(self, error: PdrtError) -> None:
        """What comes cannot be read as a request: say so in its turn, and read no more."""
        exchange = self._open
        if exchange is None:
            unknown = Request("", "", "", {}, is_1_1=True, keeps_alive=False)
            exchange = Exchange(self, unknown, self._host.stage)
            self._host.site.begun(exchange)
        exchange.refusal, exchange.keeps_alive = error, False
        self._open, self._is_in_head, self._is_last = None, False, True
        self._queue.append(exchange)

    # One at a time.

    def _advance(self) -> None:
        """Serve the next request if none is being served."""
        while self._current is None and self._queue and self._transport is not None:
            exchange = self._current = self._queue.popleft()
            if not self._queue and self._is_last:
                exchange.keeps_alive = False
            self._serve(exchange)
        waiting = self._open
        if self._current is not None or waiting is None:
            return
        if waiting.refusal is not None:  # known before the body is here
            self._open, self._current = None, waiting
            waiting.keeps_alive, self._lingers = False, True
            self._serve(waiting)
        elif waiting.wants_more:
            waiting.wants_more = False
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _serve(self, exchange: Exchange) -> None:
        refusal, route = exchange.refusal, exchange.route
        try:
            if isinstance(refusal, Reply):
                exchange.reply(refusal)
            elif isinstance(refusal, NotAllowed):
                exchange.refuse(refusal, headers=(("allow", ", ".join(refusal.allowed)),))
            elif refusal is not None:
                exchange.refuse(refusal)
            elif route is not None and route.serves is not None:
                route.serves(exchange)
            elif route is not None and route.handler is not None:
                self._start(route.handler, exchange)
        except PdrtError as error:
            exchange.refuse(error)
        except Exception:
            log.exception("handler_failed", request_id=exchange.request.id)
            exchange.fail()

    def _start(self, handler: Handler, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(_handle(handler, exchange))
        exchange.task = task
        self._host.tasks.add(task)
        task.add_done_callback(self._host.tasks.discard)

    # The exchange calls these.

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._host.outbox.write(self._transport, data)

    def send_now(self, data: bytes) -> None:
        """After what waits. A chunk that comes alone gains nothing by waiting for others."""
        if self._transport is not None:
            if (outbox := self._host.outbox).waiting:
                outbox.flush()
            self._transport.write(data)

    def head_lines(self, request: Request) -> bytes:
        host = self._host
        own = b"x-request-id: %b\r\n" % request.id.encode()
        return host.date_line + own + host.site.head_lines(request)

    def ended(self, exchange: Exchange, *, is_whole: bool) -> None:
        host, transport = self._host, self._transport
        host.site.over(exchange)
        self._current = None
        self._since = host.now
        if transport is None:
            return
        is_closing = self._is_last or host.is_closing
        is_last = not exchange.keeps_alive or (is_closing and not self._queue)
        if not is_whole or self._lingers or is_last:
            host.outbox.flush()
        if not is_whole:
            transport.abort()
        elif self._lingers:
            if transport.can_write_eof():
                transport.write_eof()
        elif is_last:
            transport.close()
        elif self._queue or self._ahead:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._current is None and self._transport is not None:
            if not self._queue and self._ahead:
                ahead, self._ahead = bytes(self._ahead), bytearray()
                self._feed(ahead)
            else:
                self._advance()

    # The server calls these.

    @property
    def is_idle(self) -> bool:
        return self._current is None and self._open is None and not self._queue

    @property
    def is_reading(self) -> bool:
        """Whether a request has begun to arrive and is not whole."""
        return self._is_in_head or self._open is not None

    def close(self) -> None:
        """End at once if nothing is under way."""
        if self._transport is not None and self.is_idle:
            self._host.outbox.flush()
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def turn_away(self, error: PdrtError) -> None:
        """Say so before anything is read, and read nothing."""
        self._lingers = True
        self._refuse_rest(error)
        self._advance()

    def look(self, now: float) -> None:
        """Whatever has waited too long ends."""
        if self._transport is None:
            return
        unread = self._transport.get_write_buffer_size()
        if not unread or unread != self._unread:
            self._unread, self._moved_at = unread, now
        elif now - self._moved_at > self._host.slow_reader_s:
            self._cut()
            return
        if self._current is not None or unread:
            return
        waited = now - self._since
        if self._lingers or self._transport.is_closing():
            if waited > LINGER_S:
                self._transport.abort()
        elif self.is_reading:
            if waited > READ_S:
                self._refuse_rest(Stalled(f"the request did not arrive whole within {READ_S:g} s"))
                self._advance()
        elif waited > IDLE_S:
            self._transport.close()

    def _cut(self) -> None:
        exchange = self._current
        if exchange is not None:
            self._host.site.stopped_reading(exchange)
        self.abort()


async def _handle(handler: Handler, exchange: Exchange) -> None:
    try:
        exchange.reply(await handler(exchange.request))
    except PdrtError as error:
        exchange.refuse(error)
    except Exception:
        log.exception("handler_failed", request_id=exchange.request.id)
        exchange.fail()
