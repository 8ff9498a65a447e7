"""A load client over bare sockets: so many requests in flight for so long, and what they took.

Of streams each chunk's way is timed: from the stamp that the backend gave it to its arrival here.
One process and one loop; what the client itself used of its core is counted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast

Kind: TypeAlias = Literal["json", "stream"]
Path: TypeAlias = Literal["/v1/completions", "/generate"]
_STAMP: Final = b'"t_ns":'
_PROMPT: Final = "lorem ipsum dolor " * 11  # some 200 bytes
_RAMP_S: Final = 1.0  # over which streams begin
_GRACE_S: Final = 5.0


@dataclass(slots=True)
class Counted:
    """What a load met, between its begin and its end."""

    seconds: float = 0.0
    requests: int = 0
    errors: int = 0
    chunks: int = 0
    client_s: float = 0.0  # processor time of this process
    latencies_us: list[float] = field(default_factory=list)
    delays_us: list[float] = field(default_factory=list)  # of chunks


def request(host: str, port: int, model: str, kind: Kind, path: Path = "/v1/completions") -> bytes:
    told: dict[str, object] = {"stream": kind == "stream"}
    if path == "/generate":
        told |= {"text": _PROMPT, "sampling_params": {"max_new_tokens": 200}}
    else:
        told |= {"model": model, "prompt": _PROMPT, "max_tokens": 200}
    body = json.dumps(told, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Load:
    """Connections that each send the next request when the last one is answered."""

    def __init__(self, host: str, port: int, told: bytes, kind: Kind, width: int) -> None:
        self.host, self.port, self.told, self.kind, self.width = host, port, told, kind, width
        self.counted = Counted()
        self.is_counting = self.is_over = False
        self._open = set[_Line]()
        self._connecting = set[asyncio.Task[None]]()

    async def run(self, warm_s: float, seconds: float, at: Callable[[str], None]) -> Counted:
        """`at` is called with "begin" and "end" of what is counted."""
        loop, counted = asyncio.get_running_loop(), self.counted
        ramp_s = _RAMP_S if self.kind == "stream" and self.width > 1 else 0.0
        for number in range(self.width):
            loop.call_later(ramp_s * number / self.width, self.connect)
        await asyncio.sleep(ramp_s + warm_s)
        at("begin")
        began, used, self.is_counting = time.perf_counter(), time.process_time(), True
        await asyncio.sleep(seconds)
        self.is_counting = False
        counted.seconds = time.perf_counter() - began
        counted.client_s = time.process_time() - used
        at("end")
        self.is_over = True
        for task in tuple(self._connecting):
            task.cancel()
        for line in tuple(self._open):
            line.leave()
        await asyncio.sleep(0)
        return counted

    def connect(self) -> None:
        if not self.is_over:
            task = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_GRACE_S):
                await loop.create_connection(lambda: _Line(self), self.host, self.port)
        except OSError:
            self.failed()

    def failed(self) -> None:
        self.counted.errors += 1
        if not self.is_over:
            asyncio.get_running_loop().call_later(0.1, self.connect)

    def opened(self, line: _Line) -> None:
        self._open.add(line)

    def closed(self, line: _Line) -> None:
        self._open.discard(line)


class _Line(asyncio.Protocol):
    __slots__ = ("_began", "_data", "_is_leaving", "_load", "_need", "_transport")

    def __init__(self, load: Load) -> None:
        self._load = load
        self._data = b""
        self._need = 0  # bytes of an answer; 0: its head is not here; -1: until its last chunk
        self._began = 0.0
        self._is_leaving = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._load.opened(self)
        self._next()

    def connection_lost(self, _error: Exception | None) -> None:
        self._load.closed(self)
        if not self._is_leaving:
            self._load.failed()

    def leave(self) -> None:
        self._is_leaving = True
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> None:
        if self._load.is_over or self._transport is None:
            self.leave()
            return
        self._data, self._need = b"", 0
        self._began = time.perf_counter()
        self._transport.write(self._load.told)

    def data_received(self, data: bytes) -> None:
        load = self._load
        if load.is_counting and load.kind == "stream":
            _time_chunks(data, load.counted)
        if self._need == 0:
            self._data += data
            if b"\r\n\r\n" not in self._data:
                return
            self._head()
        elif self._need > 0:
            self._data += data
        else:
            self._data = self._data[-8:] + data
        if self._need < 0:
            if self._data.endswith(b"0\r\n\r\n"):
                self._answered()
        elif len(self._data) >= self._need:
            self._answered()

    def _head(self) -> None:
        head, _, _ = self._data.partition(b"\r\n\r\n")
        lower = head.lower()
        if not head.startswith(b"HTTP/1.1 200"):
            self._load.counted.errors += 1
        at = lower.find(b"content-length:")
        if at < 0:
            self._need = -1
        else:
            line, _, _ = lower[at + 15 :].partition(b"\r\n")
            self._need = len(head) + 4 + int(line)

    def _answered(self) -> None:
        load = self._load
        if load.is_counting:
            load.counted.requests += 1
            load.counted.latencies_us.append((time.perf_counter() - self._began) * 1e6)
        self._next()


def _time_chunks(data: bytes, counted: Counted) -> None:
    now = time.monotonic_ns()
    for part in data.split(_STAMP)[1:]:
        stamp, gap, _ = part.partition(b",")
        if gap:
            counted.chunks += 1
            counted.delays_us.append((now - int(stamp)) / 1e3)
