"""Calls to leaders: their answers as they come, their troubles as our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, TypeAlias

from pdrt.control.http import at_stage, error_from_answer, parse_object
from pdrt.control.instances import Instance, Status, read_status
from pdrt.control.legs import Failure
from pdrt.control.wire.client import Call, Lost, Pools, Sink
from pdrt.errors import BadMessage, BadRequest, PdrtError, PeerLost, Unavailable

_NOT_US: Final = (401, 403)
MAX_ERROR_BYTES: Final = 1 << 16
MAX_STATUS_BYTES: Final = 1 << 18
_MOST_HEADS: Final = 1 << 14
_LONG_NUMBER: Final = 10  # digits: Python refuses to read those of thousands
_LONGEST_RETRY_S: Final = 3600

Headers: TypeAlias = Mapping[bytes, bytes]


class Upstream:
    """All calls from this process to leaders."""

    def __init__(self, pools: Pools, bearer: str = "") -> None:
        self._pools = pools
        self._bearer = f"authorization: Bearer {bearer}\r\n".encode() if bearer else b""
        self._heads: dict[tuple[str, str], bytes] = {}  # by address and path

    def post(self, instance: Instance, path: str, body: bytes, lines: bytes, sink: Sink) -> Call:
        """`lines` are header lines of this request."""
        head = self._heads.get((instance.where, path)) or self._head(instance.where, path)
        whole = b"%b%bcontent-length: %d\r\n\r\n" % (head, lines, len(body))
        return self._pools.pool(instance.url).send(whole, body, sink)

    def _head(self, where: str, path: str) -> bytes:
        if len(self._heads) >= _MOST_HEADS:  # of members that have long gone, most of them
            self._heads.clear()
        head = f"POST {path} HTTP/1.1\r\nhost: {where}\r\ncontent-type: application/json\r\n"
        found = self._heads[where, path] = head.encode() + self._bearer
        return found

    def signs(self, instance: Instance) -> int:
        """Of its life: rises with every piece of an answer from there."""
        return self._pools.pool(instance.url).received

    async def get(self, instance: Instance, path: str) -> tuple[int, bytes]:
        """Raises PeerLost; a refused connection counts as the instance's death."""
        head = f"GET {path} HTTP/1.1\r\nhost: {instance.where}\r\n".encode()
        whole = Whole(instance, MAX_STATUS_BYTES)
        call = self._pools.pool(instance.url).send(b"%b%b\r\n" % (head, self._bearer), b"", whole)
        call.is_counted = False  # that a look is answered, half of it perhaps, is no work done
        return await whole.answer(call)

    async def ask(
        self, instance: Instance, path: str, body: bytes, lines: bytes, most: int
    ) -> tuple[int, Headers, bytes]:
        """The same for a question with a body."""
        whole = Whole(instance, most)
        status, told = await whole.answer(self.post(instance, path, body, lines, whole))
        return status, whole.headers, told

    async def status(self, instance: Instance) -> Status:
        """What a pdrt leader says of itself. Raises PdrtError."""
        code, body = await self.get(instance, "/internal/status")
        if code in _NOT_US:
            raise Unavailable(
                "it refuses the router's cluster key: [security] key_file must name the same key"
            )
        if code != 200:
            raise error_from_answer(code, body, instance.name)
        try:
            said = read_status(parse_object(body))
        except BadRequest as error:
            raise BadMessage(str(error)) from error
        if said.role != instance.role:
            raise PdrtError(f"it is a {said.role} instance, not {instance.role}")
        return said

    async def plain_status(self, instance: Instance) -> Status:
        """A plain backend is ready when its /health says 2xx. Raises Unavailable."""
        code, _ = await self.get(instance, "/health")
        if not is_good(code):
            raise Unavailable(f"/health answered {code}")
        return Status(role=instance.role, state="ready")


class Whole:
    """Collects an answer, up to `limit` if it is a good one. Make it in a loop."""

    __slots__ = ("_answered", "_body", "_instance", "_status", "headers")

    def __init__(self, instance: Instance, limit: int) -> None:
        self._instance, self._status = instance, 0
        self.headers: Headers = {}
        self._body = Body(limit)
        self._answered: asyncio.Future[tuple[int, bytes]] = (
            asyncio.get_running_loop().create_future()
        )

    async def answer(self, call: Call) -> tuple[int, bytes]:
        """Status and body. Raises PeerLost; the call ends with this."""
        try:
            return await self._answered
        finally:
            call.cancel()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        if not self._body.take(data) and is_good(self._status):
            self._lose(too_long(self._instance, self._body.limit))

    def on_end(self) -> None:
        if not self._answered.done():
            self._answered.set_result((self._status, self._body.whole()))

    def on_lost(self, lost: Lost) -> None:
        self._lose(lost_error(self._instance, lost))

    def _lose(self, error: PdrtError) -> None:
        if not self._answered.done():
            self._answered.set_exception(error)


class Body:
    """The bytes of an answer, up to a limit."""

    __slots__ = ("limit", "parts", "size")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.parts: list[bytes] = []
        self.size = 0

    def take(self, data: bytes) -> bool:
        """Whether it is within the limit still."""
        self.size += len(data)
        if self.size > self.limit:
            return False
        self.parts.append(data)
        return True

    def whole(self) -> bytes:
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


def too_long(instance: Instance, limit: int) -> PeerLost:
    return PeerLost(f"{instance.name} answered more than {limit} bytes")


def is_good(status: int) -> bool:
    return 200 <= status < 300


def lost_error(instance: Instance, lost: Lost) -> PeerLost:
    """What a call without an answer means. A look that finds that is no reason to look again."""
    if lost.is_refused:
        instance.died(f"cannot connect: {lost.cause}")
    error = PeerLost(f"{instance.name} {lost.what}: {lost.cause}"[:500])
    error.stage = instance.role
    return error


def lost_leg(instance: Instance, lost: Lost) -> PeerLost:
    """The same for a request's leg: the instance is looked at now, not at the next beat."""
    instance.nudged.set()
    return lost_error(instance, lost)


def refusal_of(instance: Instance, status: int, body: bytes) -> tuple[PdrtError, int]:
    """What clients are told in place of an answer other than 2xx, and the status of that."""
    where = instance.name
    if not 400 <= status < 600:
        odd = (
            f"{where} answered {status}, neither an answer nor an error; redirects are not followed"
        )
        return at_stage(Unavailable(odd), where), 502
    error = error_from_answer(status, body[:MAX_ERROR_BYTES], where)
    if status in _NOT_US:  # the router's trouble, not the client's
        return at_stage(Unavailable(f"{where} refuses us: {error}"), where), Unavailable.status
    return error, status


def failure_of(instance: Instance, status: int, headers: Headers, body: bytes) -> Failure:
    """What an answer other than 2xx means for the client, and for the instance."""
    error, shown = refusal_of(instance, status, body)
    if status in _NOT_US:
        return Failure.of(error)
    # A refusal (4xx), a full queue and a passed deadline are the same everywhere. Prefill is
    # tried again after any fault; decode's only when it says that another would do.
    faults = range(500, 600) if instance.role == "prefill" else (502, 503)
    elsewhere = shown in faults and shown != 504
    if shown == 429:
        instance.overflowed()
    if shown in (502, 503):  # perhaps it cannot serve at all
        instance.nudged.set()
    return Failure(error, shown, elsewhere, retry_after_of(headers))


def retry_after_of(headers: Headers) -> str:
    """In seconds, as servers of models say it; nothing where it is said otherwise."""
    said = headers.get(b"retry-after", b"")
    is_number = said.isdigit() and len(said) < _LONG_NUMBER
    return str(min(int(said), _LONGEST_RETRY_S)) if is_number else ""
