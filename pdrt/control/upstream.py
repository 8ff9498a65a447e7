"""Calls to leaders: one answer at a time, its bytes untouched, its troubles as our errors.

The promise: leaving the `post` block closes the connection unless the answer was read to its
end, and a closed connection is how a leader learns that nobody wants its work any more.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from pdrt.control.http import cause_of, error_from_answer, parse_object
from pdrt.control.instances import Instance, Status, read_status
from pdrt.control.legs import Failure
from pdrt.errors import BadMessage, BadRequest, PdrtError, PeerLost, Unavailable

MAX_ERROR_BYTES: Final = 1 << 16
MAX_STATUS_BYTES: Final = 1 << 18
IDLE_S: Final = 15.0  # below any leader's own limit: a connection that it is closing is not reused
_BIG: Final = 1 << 20


class Answer:
    """A leader's answer, while it comes."""

    def __init__(self, instance: Instance, response: aiohttp.ClientResponse) -> None:
        self._instance, self._response = instance, response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.length = response.content_length

    async def chunk(self) -> bytes:
        """What has come by now, empty at the end. Raises PeerLost when it breaks off."""
        try:
            chunk = await self._response.content.readany()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _lost(self._instance, "broke off its answer", error) from error
        self._instance.signs += 1
        return chunk

    async def whole(self, limit: int) -> bytes:
        """All of a short answer. Raises PeerLost when it breaks off or is over `limit`."""
        parts = bytearray()
        while chunk := await self.chunk():
            parts += chunk
            if len(parts) > limit:
                raise PeerLost(f"{self._instance.name} answered more than {limit} bytes")
        return bytes(parts)

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    async def failure(self) -> Failure:
        """What an answer other than 2xx means for the client."""
        body = (await self.whole(MAX_ERROR_BYTES)) if (self.length or 0) <= MAX_ERROR_BYTES else b""
        status = self.status if 400 <= self.status < 600 else 502
        error = error_from_answer(status, body, self._instance.name)
        if status in (401, 403):  # the router's trouble, not the client's
            return Failure.of(Unavailable(f"{self._instance.name} refuses us: {error}"))
        # A refusal (4xx), a full queue and a passed deadline are the same everywhere. Prefill is
        # tried again after any fault; decode's only when it says that another would do.
        faults = range(500, 600) if self._instance.role == "prefill" else (502, 503)
        elsewhere = status in faults and status != 504
        if status == 429:
            self._instance.overflowed()
        if status in (502, 503):  # perhaps it cannot serve at all: look now, not at the next beat
            self._instance.nudged.set()
        return Failure(error, status, elsewhere, self.headers.get("retry-after", ""))


class Upstream:
    """All connections from this process to leaders."""

    def __init__(self, session: aiohttp.ClientSession, bearer: str = "") -> None:
        self._session = session
        self._headers = {"content-type": "application/json"}
        if bearer:
            self._headers["authorization"] = f"Bearer {bearer}"

    @asynccontextmanager
    async def post(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        """Raises PeerLost when no answer comes."""
        data = io.BytesIO(body) if len(body) > _BIG else body
        try:
            response = await self._session.post(
                instance.url + path,
                data=data,
                headers={**self._headers, **headers},
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            instance.died(f"cannot connect: {cause_of(error)}")
            raise _lost(instance, "cannot be reached", error) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise _lost(instance, "closed the connection without an answer", error) from error
        try:
            yield Answer(instance, response)
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def get(self, instance: Instance, path: str) -> tuple[int, bytes]:
        """Raises PeerLost; a refused connection counts as the instance's death."""
        try:
            async with self._session.get(
                instance.url + path, headers=self._headers, allow_redirects=False
            ) as response:
                return response.status, await Answer(instance, response).whole(MAX_STATUS_BYTES)
        except aiohttp.ClientConnectorError as error:
            reason = f"cannot connect: {cause_of(error)}"
            instance.died(reason)
            raise PeerLost(reason) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise PeerLost(f"the connection broke: {cause_of(error)}") from error

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
        if not 200 <= code < 300:
            raise Unavailable(f"/health answered {code}")
        return Status(role=instance.role, state="ready")


def open_session(connect_s: float) -> aiohttp.ClientSession:
    """A session without limits of its own: the router bounds requests, not connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("user-agent", "accept-encoding"),
    )


def _lost(instance: Instance, what: str, error: aiohttp.ClientError | OSError) -> PeerLost:
    instance.nudged.set()  # look at it now rather than at the next beat
    lost = PeerLost(f"{instance.name} {what}: {cause_of(error)}"[:500])
    lost.stage = instance.role
    return lost
