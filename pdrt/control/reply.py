"""How an answer goes out over HTTP: one JSON body, or server-sent events as it grows.

The promise: no byte is sent before the first output is here, so an error before it has its own
status; a stream that has begun ends with a finish chunk and `[DONE]`, or with an error event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from aiohttp import web

from pdrt.control.answer import Answer, Delta
from pdrt.control.http import Json, cut_off, request_id_of, say_last
from pdrt.control.marks import Marks
from pdrt.control.sse import DONE, END, TYPE, error_event
from pdrt.errors import Cancelled, PdrtError

T = TypeVar("T")
EVENTS: Final = {"content-type": TYPE, "cache-control": "no-cache"}
_FEW_ODDS: Final = 256
_PIECE: Final = 256
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once


class Voice(Protocol):
    """The words of one dialect."""

    def opening(self, answer: Answer) -> Sequence[Json]: ...

    def chunks(self, delta: Delta, answer: Answer) -> Sequence[Json]: ...

    def whole(self, answer: Answer) -> Json: ...


class Reply(Protocol):
    """Where an answer is said, bit by bit."""

    async def say(self, delta: Delta, answer: Answer) -> None: ...

    async def end(self, answer: Answer) -> web.StreamResponse | None:
        """What was answered; None for a part of an answer."""
        ...

    async def fail(self, error: PdrtError) -> web.StreamResponse | None:
        """Tell an error in the answer's own form; raises it when nothing has been said."""
        ...


class WholeReply:
    def __init__(self, voice: Voice) -> None:
        self._voice = voice

    async def say(self, delta: Delta, answer: Answer) -> None:
        """Nothing is said before the end."""

    async def end(self, answer: Answer) -> web.StreamResponse:
        body = await beside(lambda: long_json_of(self._voice.whole(answer)), answer)
        return web.Response(body=body, content_type="application/json")

    async def fail(self, error: PdrtError) -> web.StreamResponse:
        raise error


class StreamReply:
    """With `marks` each event says which tokens it tells; of a `resumed` answer the client has the
    beginning."""

    def __init__(
        self,
        request: web.Request,
        voice: Voice,
        stage: str,
        marks: Marks | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        self._request, self._voice, self._stage = request, voice, stage
        self._marks, self._resumed = marks, resumed
        self._response: web.StreamResponse | None = None
        self._is_writing = False  # and the client is not taking it

    async def say(self, delta: Delta, answer: Answer) -> None:
        events = list(map(event_of, self._voice.chunks(delta, answer)))
        response = self._response
        if response is None:
            response = await self._begin()
            if not self._resumed:
                opening = partial(opening_of, self._voice, answer)
                events = [*await beside(opening, answer), *events]
        if self._marks is not None:
            mark = self._marks.of(delta, answer.cached_tokens, len(events))
            events = [mark, *events] if mark else events
        if events:
            await self._write(response, b"".join(events))

    async def end(self, answer: Answer) -> web.StreamResponse:
        assert self._response is not None, "an answer has a last delta"
        await self._write(self._response, DONE)
        return self._response

    async def fail(self, error: PdrtError) -> web.StreamResponse:
        if self._response is None:
            raise error
        if self._is_writing:  # half a chunk is out: its reader would not take an event either
            cut_off(self._request)
        else:
            told = error_event(error, request_id_of(self._request), self._stage)
            await say_last(self._request, self._response, told)
        return self._response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        """Raises Cancelled when the client is gone."""
        self._is_writing = True
        try:
            await response.write(data)
        except ConnectionError as error:
            raise Cancelled("the client is gone") from error
        self._is_writing = False

    async def _begin(self) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(self._request)
        self._response = response
        return response


async def beside(make: Callable[[], T], answer: Answer) -> T:
    """Beside the loop, where the answer is so long that this takes more than a thread's start."""
    return await asyncio.to_thread(make) if answer.odds > _FEW_ODDS else make()


def opening_of(voice: Voice, answer: Answer) -> list[bytes]:
    return list(map(long_event_of, voice.opening(answer)))


def event_of(chunk: Json) -> bytes:
    return b"data: " + _encode(chunk).encode() + END


def long_event_of(chunk: Json) -> bytes:
    return b"data: " + long_json_of(chunk) + END


def long_json_of(body: Json) -> bytes:
    """Lists a piece at a time: no other thread runs while the encoder does."""
    return _text_of(body).encode()


class RawList(list[str]):
    """A list whose elements are JSON already."""


def _text_of(value: object) -> str:
    match value:
        case RawList():
            return "[" + ",".join(value) + "]"
        case dict():
            return "{" + ",".join(f"{_encode(k)}:{_text_of(v)}" for k, v in value.items()) + "}"
        case [*_] if len(value) > _PIECE:
            begins = range(0, len(value), _PIECE)
            return "[" + ",".join(_encode(value[b : b + _PIECE])[1:-1] for b in begins) + "]"
        case [dict(), *_]:
            return "[" + ",".join(map(_text_of, value)) + "]"
        case _:
            return _encode(value)
