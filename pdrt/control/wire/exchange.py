"""One request and its answer, as it is written: each exchange is answered once, or broken off.

The promise: whatever is written after the client has left, or after the end, goes nowhere and
harms nothing; so its callers need not look first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from pdrt.control.http import PATH_HEADER
from pdrt.control.sse import END, error_event, is_events
from pdrt.control.wire.chunks import PassOn, end_of_data
from pdrt.control.wire.reply import Fields, Reply, lines, status_line
from pdrt.control.wire.request import Request
from pdrt.errors import PdrtError

NO_PATH: Final = "none"  # refused before any instance was chosen
_LAST_CHUNK: Final = b"0\r\n\r\n"
_PATH: Final = PATH_HEADER.encode()


Handler: TypeAlias = Callable[[Request], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Route:
    """Either a handler, whose reply is sent whole, or what writes its answer itself."""

    path: str
    handler: Handler | None = None
    serves: Callable[[Exchange], None] | None = None


class Line(Protocol):
    """What an exchange needs of its connection."""

    def send(self, data: bytes) -> None:
        """At the end of this turn of the loop."""
        ...

    def send_now(self, data: bytes) -> None: ...

    def head_lines(self, request: Request) -> bytes:
        """Header lines that every answer has."""
        ...

    def ended(self, exchange: Exchange, *, is_whole: bool) -> None: ...

    @property
    def is_full(self) -> bool:
        """Whether the client reads slower than it is written to."""
        ...


class Exchange:
    """`on_gone` is called if the client leaves first, `on_flow` when it falls behind or is back,
    `on_piece` with each piece of an event stream."""

    __slots__ = (
        "_head",
        "_is_chunked",
        "_last",
        "_line",
        "_passed",
        "error",
        "is_admitted",
        "is_events",
        "is_gone",
        "is_over",
        "keeps_alive",
        "on_flow",
        "on_gone",
        "on_piece",
        "path_label",
        "refusal",
        "request",
        "route",
        "stage",
        "status",
        "task",
        "wants_more",
    )

    def __init__(self, line: Line, request: Request, stage: str) -> None:
        self.request, self.stage = request, stage
        self._line = line
        self.status = 0  # of the answer; 0: not begun
        self.is_over = False
        self.is_gone = False  # the client left before it had its answer
        self.is_admitted = False  # for its site: it counts as one under way
        self.route: Route | None = None
        self.keeps_alive = request.keeps_alive
        self.path_label = NO_PATH
        self.is_events = False
        self.refusal: PdrtError | Reply | None = None  # decided before the body was read
        self.wants_more = False  # it waits for "100 Continue" before it sends its body
        self.error: PdrtError | None = None  # what a refusal told
        self.on_gone: Callable[[], None] | None = None
        self.on_flow: Callable[[bool], None] | None = None
        self.on_piece: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self._is_chunked = False
        self._last = END  # how what was written ends
        self._passed = b""  # the chunk that has passed since, if one has
        self._head = b""  # not sent yet

    @property
    def is_full(self) -> bool:
        return self._line.is_full

    def reply(self, reply: Reply) -> None:
        """Answer whole."""
        if self.is_over or self.status:
            return
        self.status = reply.status
        body = b"" if self.request.method == "HEAD" else reply.body
        own = (
            ("content-type", reply.content_type),
            ("content-length", str(len(reply.body))),
            *reply.headers,
        )
        self._line.send(self._head_of(lines(own)) + body)
        self._end(is_whole=True)

    def refuse(self, error: PdrtError, status: int = 0, headers: Fields = ()) -> None:
        """Answer with an error; `status` when it is not the error's own."""
        self.error = frameless(error)
        reply = Reply.error(error, self.request.id, self.stage, status)
        named = {name for name, _ in headers}
        kept = tuple(each for each in reply.headers if each[0] not in named)
        self.reply(Reply(reply.status, reply.body, reply.content_type, (*kept, *headers)))

    def start(
        self, status: int, headers: Mapping[bytes, bytes], path: str = NO_PATH
    ) -> PassOn | None:
        """Begin an answer that comes in pieces; of `headers` what clients may see is passed on.

        Returns what takes an event stream's chunks as they travel, or None where the client does
        not get them so.
        """
        if self.is_over or self.status:
            return None
        self.status, self.path_label = status, path
        kind = headers.get(b"content-type", b"")
        self.is_events = is_events(kind)
        own = b"content-type: %b\r\n" % kind if kind else b""
        length = headers.get(b"content-length")
        if length and not self.is_events:  # an error event may come in place of a stream's rest
            own += b"content-length: %b\r\n" % length
        elif self.request.is_1_1:
            self._is_chunked = True
            own += b"transfer-encoding: chunked\r\n"
        else:
            self.keeps_alive = False  # its end is the connection's
        if caching := headers.get(b"cache-control"):
            own += b"cache-control: %b\r\n" % caching
        self._head = self._head_of(own)
        return self.pass_on if self.is_events and self._is_chunked else None

    def write(self, chunk: bytes) -> None:
        if self.is_over or not chunk:
            return
        head, self._head = self._head, b""  # with the first chunk, in one write
        send = self._line.send_now if self.is_events else self._line.send
        if self._is_chunked:
            send(b"%b%x\r\n%b\r\n" % (head, len(chunk), chunk))
        else:
            send(head + chunk if head else chunk)
        self._last, self._passed = chunk[-len(END) :], b""
        if self.on_piece is not None and self.is_events:
            self.on_piece()

    def pass_on(self, chunk: bytes) -> None:
        """Of a stream in chunks, one that `is_one_chunk` has recognized."""
        if self.is_over:
            return
        if self._head:
            chunk, self._head = self._head + chunk, b""
        self._line.send_now(chunk)
        self._passed = chunk
        if self.on_piece is not None:
            self.on_piece()

    def finish(self) -> None:
        if self.is_over:
            return
        end = self._head + _LAST_CHUNK if self._is_chunked else self._head
        if end:
            self._line.send(end)
        self._end(is_whole=True)

    def break_off(self, error: PdrtError) -> None:
        """An event stream ends with an error event; anything else by breaking the connection."""
        if self.is_over:
            return
        self.error = frameless(error)
        if not self.is_events:
            self._end(is_whole=False)
            return
        last = end_of_data(self._passed) if self._passed else self._last
        self.write(error_event(error, self.request.id, self.stage, last))
        self.finish()

    def fail(self) -> None:
        """A fault of ours ends this request, typed, and no other."""
        error = PdrtError("an internal error; see the log")
        if self.status:
            self.break_off(error)
        else:
            self.refuse(error)

    def gone(self) -> None:
        """The connection has closed."""
        if self.is_over:
            return
        self.is_over = self.is_gone = True
        if self.task is not None:
            self.task.cancel()
        if self.on_gone is not None:
            self.on_gone()

    def flow(self, *, is_full: bool) -> None:
        if self.on_flow is not None:
            self.on_flow(is_full)

    def _head_of(self, own: bytes) -> bytes:
        if not self.keeps_alive:
            own += b"connection: close\r\n"
        elif not self.request.is_1_1:
            own += b"connection: keep-alive\r\n"
        path = self.path_label.encode("latin-1", "replace")
        every = self._line.head_lines(self.request)
        return b"%b%b%b%b: %b\r\n\r\n" % (status_line(self.status), every, own, _PATH, path)

    def _end(self, *, is_whole: bool) -> None:
        self.is_over = True
        self.on_gone = self.on_flow = None
        self._line.ended(self, is_whole=is_whole)


def frameless(error: PdrtError) -> PdrtError:
    """The same, whose way is over: frames that it went through would hold all of its request."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error
