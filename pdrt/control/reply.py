"""How an answer goes out: one JSON body, or server-sent events as it grows.

The promise: no byte is sent before the first output is here, so an error before it has its own
status; a stream that has begun ends with a finish chunk and `[DONE]`, or with an error event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol, TypeVar

from pdrt.control.answer import Answer, Delta
from pdrt.control.http import Json
from pdrt.control.marks import Marks
from pdrt.control.reader import ClientGone, Reader
from pdrt.control.sse import DONE, END, TYPE
from pdrt.errors import Cancelled, PdrtError

T = TypeVar("T")
EVENTS: Final = {"content-type": TYPE, "cache-control": "no-cache"}
_FEW_ODDS: Final = 256
_PIECE: Final = 256
WIDE: Final = frozenset({"choices", "outputs"})  # lists of objects, which are long themselves
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once


class Voice(Protocol):
    """The words of one dialect."""

    def opening(self, answer: Answer) -> Sequence[Json]: ...

    def chunks(self, delta: Delta, answer: Answer) -> Sequence[Json]: ...

    def whole(self, answer: Answer) -> Json: ...


class Reply(Protocol):
    """How an answer is said to its reader, bit by bit. Raises Cancelled when the reader is gone."""

    async def say(self, delta: Delta, answer: Answer) -> None: ...

    async def end(self, answer: Answer) -> None: ...

    async def fail(self, error: PdrtError) -> None:
        """Tell an error in the answer's own form; raises it when nothing has been said."""
        ...


class WholeReply:
    def __init__(self, reader: Reader, voice: Voice) -> None:
        self._reader, self._voice = reader, voice
        self._has_begun = False

    async def say(self, delta: Delta, answer: Answer) -> None:
        """Nothing is said before the end."""

    async def end(self, answer: Answer) -> None:
        body = await beside(lambda: long_json_of(self._voice.whole(answer)), answer)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        self._has_begun = True
        with _reader_is_there():
            await self._reader.start(200, headers)
            await self._reader.write(body)
            await self._reader.finish()

    async def fail(self, error: PdrtError) -> None:
        if not self._has_begun:
            raise error
        await self._reader.break_off(error)


class StreamReply:
    """With `marks` each event says which tokens it tells; of a `resumed` answer the client has the
    beginning."""

    def __init__(
        self,
        reader: Reader,
        voice: Voice,
        marks: Marks | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        self._reader, self._voice = reader, voice
        self._marks = marks
        self._is_opened = resumed
        self._has_begun = False

    async def say(self, delta: Delta, answer: Answer) -> None:
        """Nothing goes out while all of it is held back: an error keeps its own status then."""
        opening = [] if self._is_opened else await self._opening(answer)
        events = [*opening, *map(event_of, self._voice.chunks(delta, answer))]
        told = b"".join(events)
        if self._marks is not None:
            told = self._marks.of(delta, answer.cached_tokens, len(events)) + told
        if not told:
            return
        with _reader_is_there():
            if not self._has_begun:
                self._has_begun = True
                await self._reader.start(200, EVENTS)
            await self._reader.write(told)

    async def _opening(self, answer: Answer) -> list[bytes]:
        self._is_opened = True
        return await beside(partial(opening_of, self._voice, answer), answer)

    async def end(self, answer: Answer) -> None:
        with _reader_is_there():
            await self._reader.write(DONE)
            await self._reader.finish()

    async def fail(self, error: PdrtError) -> None:
        if not self._has_begun:
            raise error
        await self._reader.break_off(error)


@contextmanager
def _reader_is_there() -> Iterator[None]:
    """Raises Cancelled when it is not."""
    try:
        yield
    except ClientGone as error:
        raise Cancelled("the client is gone") from error


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


def _text_of(value: object, *, is_wide: bool = False) -> str:
    match value:
        case RawList():
            return "[" + ",".join(value) + "]"
        case dict():
            return "{" + ",".join(_named(name, each) for name, each in value.items()) + "}"
        case [*_] if is_wide:
            return "[" + ",".join(map(_text_of, value)) + "]"
        case [*_] if len(value) > _PIECE:
            begins = range(0, len(value), _PIECE)
            return "[" + ",".join(_encode(value[b : b + _PIECE])[1:-1] for b in begins) + "]"
        case [dict(), *_]:
            return "[" + ",".join(map(_text_of, value)) + "]"
        case _:
            return _encode(value)


def _named(name: str, value: object) -> str:
    return f"{_encode(name)}:{_text_of(value, is_wide=name in WIDE)}"
