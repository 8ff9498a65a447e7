"""Two of a request's exchanges with leaders, each of which ends in one event: prefill, and rebind.

The third, decode's, passes an answer on (passon.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, Protocol, TypeAlias

from pdrt.control.http import Json
from pdrt.control.instances import Hold, Instance
from pdrt.control.legs import (
    DecodeFailed,
    Event,
    Failure,
    Joined,
    JoinedLate,
    PrefillDone,
    PrefillFailed,
)
from pdrt.control.longjson import SHORT, parse_long, read_long
from pdrt.control.merge import Merge
from pdrt.control.upstream import (
    MAX_ERROR_BYTES,
    Body,
    Headers,
    failure_of,
    is_good,
    lost_leg,
    too_long,
)
from pdrt.control.wire.client import Call, Lost
from pdrt.errors import BadRequest, PdrtError, Unavailable

PREFILL_ANSWER: Final = 1 << 20
PREFILL_TELLS: Final = 1 << 25  # the same with what it tells of a long prompt

Work: TypeAlias = Coroutine[object, object, Event | None]


class Owner(Protocol):
    """The relay, as its legs see it."""

    def say(self, event: Event) -> None: ...

    def spawn(self, work: Work, failed: Callable[[Failure], Event]) -> Task:
        """What takes longer than a blink; its event, if any, is said when it is done."""
        ...


class Task(Protocol):
    def cancel(self) -> object: ...


def cancel_each(*parts: Task | None) -> None:
    """A call, a task: those that there are."""
    for part in parts:
        if part is not None:
            part.cancel()


class Leg(Protocol):
    def cancel(self) -> None:
        """Close the connection and give back what was counted."""
        ...


class PrefillLeg:
    """`merge` is what needs to know what it tells of the prompt."""

    __slots__ = (
        "_headers",
        "_hold",
        "_instance",
        "_is_plain",
        "_limit",
        "_merge",
        "_owner",
        "_said",
        "_size",
        "_status",
        "_task",
        "call",
        "number",
    )

    def __init__(
        self,
        number: int,
        owner: Owner,
        instance: Instance,
        hold: Hold,
        merge: Merge | None,
        *,
        is_plain: bool,
    ) -> None:
        self.number, self._owner, self._instance, self._hold = number, owner, instance, hold
        hold.on_lost = self._fail
        self._merge, self._is_plain = merge, is_plain
        self._limit = PREFILL_ANSWER if merge is None else PREFILL_TELLS
        self._size = self._status = 0
        self._said: list[bytes] = []
        self._headers: Headers = {}
        self._task: Task | None = None
        self.call: Call | None = None

    def cancel(self) -> None:
        self._hold.release()
        cancel_each(self.call, self._task)

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._limit:
            self._said.append(data)
        elif is_good(self._status):
            self._fail(too_long(self._instance, self._limit))

    def on_end(self) -> None:
        self._hold.release()
        body = b"".join(self._said)
        if not is_good(self._status):
            failure = failure_of(self._instance, self._status, self._headers, body)
            self._owner.say(PrefillFailed(self.number, failure))
        elif self._is_plain:
            self._owner.say(PrefillDone(self.number))
        elif len(body) <= SHORT:
            self._owner.say(self._outcome(body, _parsed(body)))
        else:
            self._task = self._owner.spawn(self._read(body), self._failed)

    def on_lost(self, lost: Lost) -> None:
        self._fail(lost_leg(self._instance, lost))

    def _fail(self, error: PdrtError) -> None:
        self.cancel()
        self._owner.say(PrefillFailed(self.number, Failure.of(error, elsewhere=True)))

    def _failed(self, failure: Failure) -> Event:
        return PrefillFailed(self.number, failure)

    async def _read(self, body: bytes) -> Event:
        try:
            return self._outcome(body, await read_long(body))
        except BadRequest:
            return self._outcome(body, {})

    def _outcome(self, body: bytes, said: Json) -> Event:
        """Done if the answer says that the prompt is where it belongs."""
        if said.get("status") != "prefilled":
            return self._failed(Failure.of(PdrtError(f"prefill answered {body[:200]!r}")))
        if self._merge is not None:
            try:
                self._merge.check(said)
            except PdrtError as error:
                return self._failed(Failure.of(error))
        return PrefillDone(self.number, said)


def _parsed(body: bytes) -> Json:
    try:
        return parse_long(body)
    except BadRequest:
        return {}


class JoinLeg:
    """Tells decode who prefills now. It may not have heard of the room yet: then it is asked again.

    `post` sends the question; `may_ask_again` waits a little, and says whether there is time.
    """

    def __init__(
        self,
        number: int,
        decode_number: int,
        owner: Owner,
        instance: Instance,
        post: Callable[[JoinLeg], Call],
        may_ask_again: Callable[[], Awaitable[bool]],
    ) -> None:
        self._number, self._decode_number, self._owner = number, decode_number, owner
        self._instance, self._post, self._may_ask_again = instance, post, may_ask_again
        self._body = Body(MAX_ERROR_BYTES)
        self._status = 0
        self._headers: Headers = {}
        self._call: Call | None = None
        self._task: Task | None = None

    def open(self) -> None:
        self._body = Body(MAX_ERROR_BYTES)
        self._call = self._post(self)

    def cancel(self) -> None:
        cancel_each(self._call, self._task)

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._body.take(data)

    def on_end(self) -> None:
        if is_good(self._status):
            self._owner.say(Joined(self._number))
        elif self._status == 409:
            self._owner.say(JoinedLate(self._number))
        elif self._status == 404:
            self._task = self._owner.spawn(self._again(), self._failed)
        else:
            self._owner.say(self._refused())

    def on_lost(self, lost: Lost) -> None:
        error = lost_leg(self._instance, lost)
        self._owner.say(self._failed(Failure.of(error, elsewhere=True)))

    async def _again(self) -> Event | None:
        if not await self._may_ask_again():
            return self._refused()
        self.open()
        return None

    def _refused(self) -> Event:
        body = self._body.whole()
        failure = failure_of(self._instance, self._status, self._headers, body)
        lost = Unavailable(f"decode does not wait for a new prefill: {failure.error}")
        return self._failed(Failure.of(lost, elsewhere=True))

    def _failed(self, failure: Failure) -> Event:
        return DecodeFailed(self._decode_number, failure)
