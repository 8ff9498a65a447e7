"""A scripted plain backend: a prefill or decode server over bare sockets that does as it is told.

It speaks HTTP/1.1 with keep-alive and server-sent events, and every chunk has the time at which it
left (`t_ns`, CLOCK_MONOTONIC), so that whoever reads it knows what the way took. For load it runs
as a process of its own (backends.py); for faults the one who asks scripts it (`plays`, `usual`).
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, TypeAlias, cast

Side: TypeAlias = Literal["prefill", "decode"]
MODEL: Final = "scripted"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.I)
_STREAM: Final = re.compile(rb'"stream": ?true')
_MODELS: Final = b'{"object":"list","data":[{"id":"%s","object":"model","max_model_len":32768}]}'
_INFO: Final = b'{"model_path":"%s","served_model_name":"%s","is_generation":true,"dp_size":1}'
_EVENTS: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_MEET: Final = (  # what routers of vLLM's kind look for in a prefill answer
    b',"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,'
    b'"remote_engine_id":"e","remote_block_ids":[1],"remote_host":"127.0.0.1","remote_port":5600}'
)


@dataclass(frozen=True, kw_only=True)
class Play:
    """What becomes of one request."""

    status: int = 200
    begin: Literal["answer", "hang", "reset"] = "answer"
    after_s: float = 0.0  # before it answers
    chunks: int = 5  # of a stream
    every_s: float = 0.005
    pad: int = 64  # bytes of text in a chunk
    upto: int = -1  # events before the ending; -1: all
    ending: Literal["done", "die", "hang", "cut"] = "done"  # cut: closed as if it were whole
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None  # instead of the usual one, of an answer that is no stream

    @cached_property
    def text(self) -> bytes:
        return b"x" * self.pad


OK: Final = Play()


@dataclass(eq=False)
class Seen:
    """One request as the backend saw it."""

    path: str
    body: bytes
    began: float
    ended: float | None = None  # answered, or its connection is gone
    outcome: str = "open"
    sent: int = 0  # bytes of its answer

    def over(self, outcome: str) -> None:
        if self.ended is None:
            self.ended, self.outcome = time.monotonic(), outcome


class Backend:
    """Listens on loopback; `plays` are for the next requests, then `usual` is for all."""

    def __init__(self, side: Side, usual: Play = OK, *, is_recording: bool = True) -> None:
        self.side, self.usual, self.is_recording = side, usual, is_recording
        self.plays: deque[Play] = deque()
        self.seen: list[Seen] = []
        self.connections: set[_Connection] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def listen(self, port: int = 0) -> None:
        """On this port, or the one that it had before. Raises OSError."""
        if self._server is None:
            place = ("127.0.0.1", port or self.port)
            listening = socket.create_server(place, backlog=4096)
            self.port = listening.getsockname()[1]
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: _Connection(self), sock=listening)

    def refuse(self) -> None:
        """As a process that was killed: nobody listens, and what was open is broken off."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for each in tuple(self.connections):
            each.break_off()

    async def recover(self) -> None:
        """Well again, and nothing seen yet."""
        self.plays.clear()
        self.usual = OK
        for each in tuple(self.connections):
            if each.seen is not None and each.seen.ended is None:
                each.break_off()
        self.seen.clear()
        await self.listen()

    @property
    def open(self) -> list[Seen]:
        return [each for each in self.seen if each.ended is None]

    def next_play(self) -> Play:
        return self.plays.popleft() if self.plays else self.usual


class _Connection(asyncio.Protocol):
    """One request after the other; what comes meanwhile waits."""

    __slots__ = (
        "_backend",
        "_data",
        "_flows",
        "_need",
        "_number",
        "_play",
        "_timer",
        "_transport",
        "seen",
    )

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._data: bytes | bytearray = b""
        self._need = 1  # bytes, before it is worth looking
        self._play: Play | None = None
        self._number = 0  # of the next event of a stream
        self._flows = True
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.seen: Seen | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._backend.connections.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._backend.connections.discard(self)
        self._stop()
        self._over("gone")

    def pause_writing(self) -> None:
        self._flows = False

    def resume_writing(self) -> None:
        self._flows = True
        if self._play is not None and self._timer is None and self._number:
            self._event()

    def data_received(self, data: bytes) -> None:
        if self._data:
            self._data = bytearray(self._data) if isinstance(self._data, bytes) else self._data
            self._data += data
        else:
            self._data = data
        while self._play is None and len(self._data) >= self._need and self._take():
            pass

    def break_off(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # A request.

    def _take(self) -> bool:
        """Whether a whole request was there; it is answered or on its way to be."""
        head, gap, rest = self._data.partition(b"\r\n\r\n")
        if not gap:
            return False
        if length := _LENGTH.search(head):
            size = int(length[1])
            if len(rest) < size:
                self._need = len(head) + 4 + size
                return False
            body, self._data = rest[:size], rest[size:]
        elif _CHUNKED.search(head):
            found = _unchunked(rest)
            if found is None:
                return False
            body, self._data = found
        else:
            body, self._data = b"", rest
        self._need = 1
        method, _, target = head.partition(b" ")
        path, gap, _ = target.partition(b" ")
        if not gap or method == b"PRI":  # somebody tries HTTP/2: not here
            self.break_off()
            return False
        if method == b"POST" and not path.startswith((b"/flush", b"/abort", b"/tokenize")):
            self._serve(bytes(path), bytes(body))
        else:
            self._tell(bytes(path))
        return True

    def _serve(self, path: bytes, body: bytes) -> None:
        play = self._play = self._backend.next_play()
        if self._backend.is_recording:
            self.seen = Seen(path.decode("latin1"), body, time.monotonic())
            self._backend.seen.append(self.seen)
        is_stream = self._backend.side == "decode" and _STREAM.search(body) is not None
        if play.begin == "reset":
            self._over("reset")
            self.break_off()
        elif play.begin == "hang":
            return
        elif play.after_s:
            later = asyncio.get_running_loop().call_later
            self._timer = later(play.after_s, self._answer, play, is_stream)
        else:
            self._answer(play, is_stream)

    def _answer(self, play: Play, is_stream: bool) -> None:
        self._timer = None
        if is_stream and play.status == 200:
            self._write(_EVENTS)
            self._number = 0
            self._event()
            return
        body = _whole(play, self._backend.side) if play.body is None else play.body
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n" % play.status
        for name, value in play.headers.items():
            head += f"{name}: {value}\r\n".encode()
        is_dying = play.ending == "die"
        told = body[: len(body) // 2] if is_dying else body
        self._write(head + b"content-length: %d\r\n\r\n" % len(body) + told)
        self._ready("died" if is_dying else "answered")
        if is_dying and self._transport is not None:
            self._transport.close()  # what was said is sent

    def _event(self) -> None:
        """The next one, and the timer of the one after it."""
        self._timer, play = None, self._play
        assert play is not None
        while self._flows:
            if self._number == play.upto and play.ending != "done":
                self._end_early(play)
                return
            self._write(_chunk(self._number, play))
            self._number += 1
            if self._number >= play.chunks:
                self._write(_DONE)
                self._ready("answered")
                return
            if play.every_s:
                later = asyncio.get_running_loop().call_later
                self._timer = later(play.every_s, self._event)
                return

    def _end_early(self, play: Play) -> None:
        self._number = 0  # nothing goes on here
        if play.ending == "die":
            self._over("died")
            self.break_off()
        elif play.ending == "cut":
            self._write(b"0\r\n\r\n")
            self._ready("cut")

    def _ready(self, outcome: str) -> None:
        self._over(outcome)
        self._play, self._number = None, 0
        if self._data and self._transport is not None and not self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self.data_received, b"")

    def _tell(self, path: bytes) -> None:
        """What routers ask of a server before and while they use it."""
        name = MODEL.encode()
        if path.startswith(b"/v1/models"):
            body = _MODELS % name
        elif path.endswith(b"info"):
            body = _INFO % (name, name)
        else:
            body = b"{}"
        status = b"404 X" if path.startswith(b"/tokenize") else b"200 OK"
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._write(head % (status, len(body)) + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
        if self.seen is not None:
            self.seen.sent += len(data)

    def _over(self, outcome: str) -> None:
        if self.seen is not None:
            self.seen.over(outcome)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._play, self._number = None, 0


def _chunk(number: int, play: Play) -> bytes:
    finish = b'"length"' if number + 1 == play.chunks else b"null"
    event = (
        b'data: {"id":"c","object":"text_completion","model":"scripted","t_ns":%d,"choices":'
        b'[{"index":0,"text":"%s","finish_reason":%s}]}\n\n'
    ) % (time.monotonic_ns(), play.text, finish)
    return b"%x\r\n%s\r\n" % (len(event), event)


def _whole(play: Play, side: Side) -> bytes:
    if play.status != 200:
        told = b'{"error":{"message":"scripted %d","type":"scripted","code":"scripted"}}'
        return told % play.status
    meet = _MEET if side == "prefill" else b""
    return (
        b'{"id":"c","object":"text_completion","model":"scripted","t_ns":%d,"choices":[{"index":0,'
        b'"text":"ok","finish_reason":"length"}],"usage":{"prompt_tokens":3,'
        b'"completion_tokens":1,"total_tokens":4}%s}'
    ) % (time.monotonic_ns(), meet)


def _unchunked(data: bytes | bytearray) -> tuple[bytes, bytes] | None:
    """The body and what follows it, once all of it is there."""
    body, at = b"", 0
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(data[at:end].split(b";")[0], 16)
        begin = end + 2
        if len(data) < begin + size + 2:
            return None
        if not size:
            return body, bytes(data[begin + 2 :])
        body += data[begin : begin + size]
        at = begin + size + 2
