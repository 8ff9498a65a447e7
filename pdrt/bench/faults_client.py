"""A client that can misbehave: bytes as they are given, answers as they came, ends as they were."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from pdrt.bench.backend import MODEL

Json: TypeAlias = dict[str, Any]
End: TypeAlias = Literal["whole", "cut", "reset", "silent", "refused", "left"]
PATH: Final = "/v1/completions"
_READ: Final = 1 << 16
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Got:
    """What came back, by when, and how it ended."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    end: End = "silent"
    first_s: float = 0.0  # to the first byte
    total_s: float = 0.0
    problem: str = ""  # what the row itself saw to be wrong

    @property
    def error(self) -> Json | None:
        """The typed error: of the body, or of the event that ended a stream."""
        if self.is_stream:
            events = self.body.split(b"event: error\ndata: ")
            return _error_in(events[-1]) if len(events) > 1 else None
        return _error_in(self.body)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_done(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")

    @property
    def told(self) -> str:
        """The error's code, for a table."""
        error = self.error
        return str(error.get("code", "untyped")) if error else ""


def _error_in(data: bytes) -> Json | None:
    try:
        error = json.loads(data)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return error if isinstance(error, dict) else {"message": error}


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom to ask, and how."""

    host: str
    port: int
    patience_s: float = 10.0
    model: str = MODEL
    api_key: str = ""

    def body(self, *, stream: bool, prompt: str | Sequence[int] = "hi", **more: object) -> bytes:
        told = {"model": self.model, "prompt": prompt, "max_tokens": 5, "stream": stream, **more}
        return json.dumps(told).encode()

    def head(
        self,
        length: int | None,
        *lines: str,
        method: str = "POST",
        path: str = PATH,
        version: str = "1.1",
    ) -> bytes:
        """A request's first part; `length` None leaves the body's out."""
        told = [f"{method} {path} HTTP/{version}", f"host: {self.host}:{self.port}"]
        told += ["content-type: application/json"]
        told += [f"authorization: Bearer {self.api_key}"] if self.api_key else []
        told += [] if length is None else [f"content-length: {length}"]
        return "\r\n".join([*told, *lines, "", ""]).encode()

    def request(self, body: bytes, *lines: str, **kinds: str) -> bytes:
        return self.head(len(body), *lines, **kinds) + body

    async def ask(self, *, stream: bool, **more: object) -> Got:
        return await self.send(self.request(self.body(stream=stream, **more)))  # type: ignore[arg-type]

    async def send(self, *pieces: bytes | float) -> Got:
        """These bytes, with pauses where there is a number; the whole answer."""
        try:
            async with self.line() as line:
                return await line.converse(*pieces)
        except OSError:
            return Got(end="refused")

    @asynccontextmanager
    async def line(self, room: int = 0) -> AsyncIterator[Line]:
        """A connection of its own, broken off at the end. `room`: of the kernel's buffer."""
        sock = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        sock.setblocking(False)
        if room:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.sock_connect(sock, (self.host, self.port)), 2.0)
        except OSError:
            sock.close()
            raise
        reader, writer = await asyncio.open_connection(sock=sock, limit=_READ)
        try:
            yield Line(reader, writer, self.patience_s)
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)


class Line:
    """One connection and what has come over it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience_s: float
    ) -> None:
        self.reader, self.writer, self._patience_s = reader, writer, patience_s
        self._data = b""
        self.got = Got()

    async def converse(self, *pieces: bytes | float) -> Got:
        began = time.monotonic()
        sending = asyncio.create_task(self._send(pieces))
        try:
            async with asyncio.timeout(self._patience_s):
                await self._receive(began)
        except TimeoutError:
            self.got.end = "silent"
        except OSError:
            self.got.end = "reset"
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending
        self.got.total_s = time.monotonic() - began
        return self.got

    async def _send(self, pieces: Sequence[bytes | float]) -> None:
        for piece in pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                self.writer.write(piece)
                await self.writer.drain()

    async def _receive(self, began: float) -> None:
        await self.head(began)
        length = self.got.headers.get("content-length")
        is_chunked = self.got.headers.get("transfer-encoding", "") == "chunked"
        while True:
            is_whole = False
            if is_chunked:
                self.got.body, is_whole = dechunked(self._data)
            else:
                self.got.body = self._data
                is_whole = length is not None and len(self._data) >= int(length)
            if is_whole:
                self.got.end = "whole"
                return
            if not await self._more():
                self.got.end = "cut" if is_chunked or length else "whole"
                return

    async def head(self, began: float) -> None:
        """Up to the end of the answer's headers, which are then in `got`."""
        while True:
            while b"\r\n\r\n" not in self._data:
                if not await self._more():
                    raise ConnectionResetError
                self.got.first_s = self.got.first_s or time.monotonic() - began
            head, _, self._data = self._data.partition(b"\r\n\r\n")
            status, headers = parsed_head(head)
            if status != 100:
                break
        self.got.status, self.got.headers = status, headers

    @property
    def is_over(self) -> bool:
        """Whether a stream has said its last, or its connection has ended."""
        return self._data.endswith(_LAST_CHUNK) or self.reader.at_eof()

    async def silence(self, for_s: float) -> float:
        """Seconds of the longest pause, until a stream ends or for so long."""
        longest, last = 0.0, time.monotonic()
        until = last + for_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                while not self.is_over and await self._more():
                    longest, last = max(longest, time.monotonic() - last), time.monotonic()
                return longest
        return max(longest, until - last)

    async def another(self) -> Got:
        """The answer to what was sent behind the first request."""
        length = int(self.got.headers.get("content-length", len(self._data)))
        self._data = self._data[length:]
        self.got = Got()
        return await self.converse()

    async def events(self, count: int) -> None:
        """Until so many events of a stream are here. Raises TimeoutError."""
        async with asyncio.timeout(self._patience_s):
            while self._data.count(b"\n\n") < count and await self._more():
                pass

    async def _more(self) -> bool:
        data = await self.reader.read(_READ)
        self._data += data
        return bool(data)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


def parsed_head(head: bytes) -> tuple[int, dict[str, str]]:
    """The status, 0 for what is no HTTP, and the headers."""
    first, *lines = head.decode("latin1").split("\r\n")
    words = first.split()
    is_http = len(words) > 1 and words[0].startswith("HTTP/") and words[1].isdigit()
    pairs = (line.partition(":") for line in lines)
    headers: Mapping[str, str] = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return (int(words[1]) if is_http else 0), dict(headers)


def dechunked(data: bytes) -> tuple[bytes, bool]:
    """What there is of the body by now, and whether that is all."""
    parts, at = list[bytes](), 0
    while (end := data.find(b"\r\n", at)) >= 0:
        try:
            size = int(data[at:end].split(b";")[0], 16)
        except ValueError:
            break
        at = end + 2
        parts.append(data[at : at + size])
        if not size:
            return b"".join(parts), data[at : at + 2] == b"\r\n"
        at += size + 2
    return b"".join(parts), False
