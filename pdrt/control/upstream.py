"""Calls to leaders: their answers as they come, their troubles as our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

from pdrt.control.http import error_from_answer, parse_object
from pdrt.control.instances import Instance, Status, read_status
from pdrt.control.legs import Failure
from pdrt.control.wire.client import Call, Client, Lost, Pool, Sink
from pdrt.errors import BadMessage, BadRequest, PdrtError, PeerLost, Unavailable

MAX_ERROR_BYTES: Final = 1 << 16
MAX_STATUS_BYTES: Final = 1 << 18

Headers: TypeAlias = Mapping[bytes, bytes]


class Upstream:
    """All calls from this process to leaders."""

    def __init__(self, client: Client, bearer: str = "") -> None:
        self._client = client
        self._bearer = f"authorization: Bearer {bearer}\r\n".encode() if bearer else b""
        self._heads: dict[tuple[str, str], tuple[Pool, bytes]] = {}  # by instance and path

    def post(self, instance: Instance, path: str, body: bytes, lines: bytes, sink: Sink) -> Call:
        """`lines` are header lines of this request."""
        pool, head = self._heads.get((instance.url, path)) or self._head(instance, path)
        return pool.send(b"%b%bcontent-length: %d\r\n\r\n" % (head, lines, len(body)), body, sink)

    def _head(self, instance: Instance, path: str) -> tuple[Pool, bytes]:
        pool = self._client.pool(instance.url)
        head = f"POST {path} HTTP/1.1\r\nhost: {pool.where}\r\ncontent-type: application/json\r\n"
        found = self._heads[instance.url, path] = pool, head.encode() + self._bearer
        return found

    async def get(self, instance: Instance, path: str) -> tuple[int, bytes]:
        """Raises PeerLost; a refused connection counts as the instance's death."""
        answered: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def done(status: int, _headers: Headers, body: bytes) -> None:
            if not answered.done():
                answered.set_result((status, body))

        def lost(error: PdrtError) -> None:
            if not answered.done():
                answered.set_exception(error)

        pool = self._client.pool(instance.url)
        head = f"GET {path} HTTP/1.1\r\nhost: {pool.where}\r\n".encode()
        whole = Whole(instance, MAX_STATUS_BYTES, done, lost)
        whole.call = pool.send(b"%b%b\r\n" % (head, self._bearer), b"", whole)
        try:
            return await answered
        finally:
            whole.call.cancel()

    async def status(self, instance: Instance) -> Status:
        """What a pdrt leader says of itself. Raises PdrtError."""
        code, body = await self.get(instance, "/internal/status")
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


class Done(Protocol):
    def __call__(self, status: int, headers: Headers, body: bytes, /) -> None: ...


class Whole:
    """Collects an answer; `lost` is told when it breaks off, or is good and over `limit`."""

    __slots__ = (
        "_done",
        "_headers",
        "_instance",
        "_limit",
        "_lost",
        "_parts",
        "_size",
        "_status",
        "call",
    )

    def __init__(
        self, instance: Instance, limit: int, done: Done, lost: Callable[[PdrtError], None]
    ) -> None:
        self._instance, self._limit = instance, limit
        self._done, self._lost = done, lost
        self._parts: list[bytes] = []
        self._size = self._status = 0
        self._headers: Headers = {}
        self.call: Call | None = None

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._instance.signs += 1
        self._size += len(data)
        if self._size <= self._limit:
            self._parts.append(data)
        elif is_good(self._status) and self.call is not None:
            self.call.cancel()
            self._lost(PeerLost(f"{self._instance.name} answered more than {self._limit} bytes"))

    def on_end(self) -> None:
        parts = self._parts
        self._done(self._status, self._headers, parts[0] if len(parts) == 1 else b"".join(parts))

    def on_lost(self, lost: Lost) -> None:
        self._lost(lost_error(self._instance, lost))


def is_good(status: int) -> bool:
    return 200 <= status < 300


def lost_error(instance: Instance, lost: Lost) -> PeerLost:
    """What a call without an answer means; the instance is looked at now, not at the next beat."""
    if lost.is_refused:
        instance.died(f"cannot connect: {lost.cause}")
    instance.nudged.set()
    error = PeerLost(f"{instance.name} {lost.what}: {lost.cause}"[:500])
    error.stage = instance.role
    return error


def failure_of(instance: Instance, status: int, headers: Headers, body: bytes) -> Failure:
    """What an answer other than 2xx means for the client."""
    shown = status if 400 <= status < 600 else 502
    error = error_from_answer(shown, body[:MAX_ERROR_BYTES], instance.name)
    if shown in (401, 403):  # the router's trouble, not the client's
        return Failure.of(Unavailable(f"{instance.name} refuses us: {error}"))
    # A refusal (4xx), a full queue and a passed deadline are the same everywhere. Prefill is
    # tried again after any fault; decode's only when it says that another would do.
    faults = range(500, 600) if instance.role == "prefill" else (502, 503)
    elsewhere = shown in faults and shown != 504
    if shown == 429:
        instance.overflowed()
    if shown in (502, 503):  # perhaps it cannot serve at all
        instance.nudged.set()
    return Failure(error, shown, elsewhere, headers.get(b"retry-after", b"").decode("latin-1"))
