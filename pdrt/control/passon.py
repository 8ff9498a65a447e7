"""Decode's exchange: its answer is held until the table lets it go, then passed on as it comes.

The promise: not a byte reaches the client before `go`, none is changed or kept back after it, and
decode is read no faster than the client reads.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from pdrt.control.exchange import Owner, Task, cancel_each
from pdrt.control.http import Json
from pdrt.control.instances import Hold, Instance
from pdrt.control.legs import (
    Answered,
    AnsweredEarly,
    DecodeEnded,
    DecodeFailed,
    Event,
    Failure,
)
from pdrt.control.merge import MERGED_ANSWER, Merge
from pdrt.control.moving import Moving
from pdrt.control.sse import is_events
from pdrt.control.ticket import Client
from pdrt.control.upstream import (
    MAX_ERROR_BYTES,
    Headers,
    failure_of,
    is_good,
    lost_leg,
    too_long,
)
from pdrt.control.wire.chunks import PassOn
from pdrt.control.wire.client import Call, Lost
from pdrt.control.wire.reply import JSON_TYPE
from pdrt.errors import PdrtError, PeerLost

SHORT_ANSWER: Final = 1 << 20  # an answer that is not streamed is checked whole up to this size
_NO_LIMIT: Final = 1 << 62  # it is paused once it has begun
_NOTHING: Final[Json] = {}
_JSON: Final = JSON_TYPE.encode()


@dataclass(slots=True)  # not frozen: each request has one
class Way:
    """How an answer is passed on."""

    is_stream: bool
    is_early: bool  # prefill's outcome is needed before the client hears of it
    merge: Merge | None  # puts prefill's part before it
    moving: Moving | None = None  # keeps what a leader's stream has told
    is_resumed: bool = False  # the client has its beginning from another leg


class DecodeLeg:
    __slots__ = (
        "_client",
        "_has_ended",
        "_held",
        "_hold",
        "_instance",
        "_is_early",
        "_is_passing",
        "_is_resumed",
        "_is_stream",
        "_limit",
        "_lost",
        "_merge",
        "_moving",
        "_owner",
        "_pass_on",
        "_said",
        "_size",
        "_task",
        "_waits_for_all",
        "call",
        "headers",
        "number",
        "status",
    )

    def __init__(
        self,
        number: int,
        owner: Owner,
        instance: Instance,
        hold: Hold,
        client: Client,
        way: Way,
    ) -> None:
        self.number, self._owner, self._instance, self._hold = number, owner, instance, hold
        hold.on_lost = self.lose
        self._client, self._merge, self._moving = client, way.merge, way.moving
        self._is_resumed = way.is_resumed
        self._lost: PdrtError | None = None  # what it ended with, to be said after what is held
        self._is_stream, self._is_early = way.is_stream, way.is_early
        self._is_passing = self._has_ended = self._waits_for_all = False
        self._held: list[bytes] = []
        self._size = self._limit = 0  # of what is held
        self._said: Json = _NOTHING  # the whole answer, where prefill's part is put into it
        self._task: Task | None = None
        self._pass_on: PassOn | None = None
        self.status = 0
        self.headers: Headers = {}
        self.call: Call | None = None

    def cancel(self) -> None:
        self._hold.release()
        cancel_each(self.call, self._task)

    def flow(self, *, is_full: bool) -> None:
        """The client has fallen behind, or has caught up."""
        if self.call is None or not self._is_passing:
            return
        if is_full:
            self.call.pause()
        else:
            self.call.resume()

    # What comes.

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        length = int(headers.get(b"content-length", b"0"))
        if not is_good(status):
            self._waits_for_all, self._limit = True, MAX_ERROR_BYTES
        elif self._merge is not None and not self._is_stream:
            self._waits_for_all, self._limit = True, MERGED_ANSWER
        elif not self._is_streamed(headers) and length <= SHORT_ANSWER:
            self._waits_for_all, self._limit = True, SHORT_ANSWER
        else:
            self._limit = _NO_LIMIT

    def _is_streamed(self, headers: Headers) -> bool:
        """By what it says it is: plain servers understand their requests in their own way."""
        kind = headers.get(b"content-type", b"")
        return not kind.lower().startswith(_JSON) if self._is_stream else is_events(kind)

    def on_body(self, data: bytes) -> None:
        if self._moving is not None and is_good(self.status):
            self._hear(self._moving, data)
        else:
            self._take(data)

    def _hear(self, moving: Moving, data: bytes) -> None:
        """Whole events only, and what the stream says of its own end is not for the client."""
        if told := moving.take(data):
            self._take(told)
        if moving.error is not None:
            self.lose(moving.error)

    def _take(self, data: bytes) -> None:
        if self._is_passing:
            self._client.write(data)
            return
        is_first = not self._size
        self._size += len(data)
        if self._size <= self._limit:
            self._held.append(data)
            if is_first and not self._waits_for_all:
                self._answered()
        elif not is_good(self.status):
            pass  # what is here says enough
        elif self._limit == SHORT_ANSWER:  # it did not say how long it would be
            self._held.append(data)
            self._waits_for_all, self._limit = False, _NO_LIMIT
            self._answered()
        else:
            self.lose(too_long(self._instance, self._limit))

    def on_end(self) -> None:
        self._has_ended = True
        self._hold.release()
        if self._is_passing:
            self._finish()
        elif not is_good(self.status):
            body = b"".join(self._held)
            failure = failure_of(self._instance, self.status, self.headers, body)
            self._owner.say(DecodeFailed(self.number, failure))
        elif not self._size:
            self.lose(PeerLost(f"{self._instance.name} ended its answer before it began"))
        elif self._merge is not None and not self._is_stream:
            self._task = self._owner.spawn(self._read(self._merge), self._failed)
        elif self._waits_for_all:
            self._answered()

    def on_lost(self, lost: Lost) -> None:
        self.lose(lost_leg(self._instance, lost))

    def _answered(self) -> None:
        """The answer is good; `go` may come at once, or later."""
        event = AnsweredEarly(self.number) if self._is_early else Answered(self.number)
        self._owner.say(event)
        if self._is_resumed:
            self._release()
        elif not self._is_passing and self.call is not None:
            self.call.pause()

    def lose(self, error: PdrtError) -> None:
        """Nothing more comes. What was told and is held is passed on first."""
        if self._moving is not None and self._size and not self._is_passing:
            self._lost = self._lost or error
            return
        self.cancel()
        if self._is_passing and self._moving is not None and self._moving.is_whole:
            self._finish()
            return
        self._owner.say(self._failed(Failure.of(error, elsewhere=True)))

    def _failed(self, failure: Failure) -> Event:
        return DecodeFailed(self.number, failure)

    # What goes.

    def go(self, path: str, told: Json, room: int) -> None:
        """Pass on what is here and what comes; `told` is what prefill said, for the merge."""
        if self._merge is None:
            pass_on = self._client.start(self.status, self.headers, path)
            self._pass_on = pass_on if self._moving is None else None
            self._release()
        else:
            work = self._open_merged if self._is_stream else self._give_merged
            self._task = self._owner.spawn(work(self._merge, path, told, room), self._failed)

    def _release(self) -> None:
        held, self._held = self._held, []
        self._client.write(held[0] if len(held) == 1 else b"".join(held))
        self._is_passing = True
        if self._lost is not None:
            self.lose(self._lost)
        elif self._has_ended:
            self._finish()
        else:
            if self._pass_on is not None and self.call is not None:
                self.call.pass_chunks(self._pass_on)
            self.flow(is_full=self._client.is_full)

    def _finish(self) -> None:
        """It has ended; if its answer has, too, so does the client's."""
        try:
            rest = self._moving.rest() if self._moving is not None else b""
        except PdrtError as error:
            self.lose(error)
            return
        if rest:
            self._client.write(rest)
        self._owner.say(DecodeEnded(self.number))

    # Where prefill has a part in it.

    async def _read(self, merge: Merge) -> Event:
        try:
            self._said = await merge.read(b"".join(self._held))
        except PdrtError as error:
            return DecodeFailed(self.number, Failure.of(error, elsewhere=True))
        return AnsweredEarly(self.number)

    async def _open_merged(self, merge: Merge, path: str, told: Json, room: int) -> None:
        opening = await asyncio.to_thread(merge.opening, told, room)
        self._client.start(self.status, self.headers, path)
        self._client.write(opening)
        self._release()

    async def _give_merged(self, merge: Merge, path: str, told: Json, _room: int) -> None:
        body = await asyncio.to_thread(merge.whole, told, self._said)
        headers = {**self.headers, b"content-length": b"%d" % len(body)}
        self._client.start(self.status, headers, path)
        self._held = [body]
        self._release()
