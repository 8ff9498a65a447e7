"""How ranks talk to a bootstrap server: hold a lease, fetch a route, ask for its health.

The promise: every wait is bounded, what may pass (unreachable, busy, not ready) is tried again
with growing pauses until the caller's deadline, and what cannot pass is raised at once; the
error says which address, what it answered and what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Protocol, TypeVar

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout
from pydantic import TypeAdapter, ValidationError

from pdrt.config import bracketed
from pdrt.control.bootstrap import CALLER_HEADER
from pdrt.control.http import error_from_answer, error_of_client
from pdrt.errors import BadRequest, Conflict, NotFound, PdrtError, Unauthorized, Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import BootstrapHealth, Leased, RegisterRank, Route

T = TypeVar("T")
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
MAX_ANSWER_BYTES: Final = 4 << 20
_FINAL: Final = (BadRequest, Conflict, NotFound, Unauthorized)  # asking again changes nothing
_LEASED: Final = TypeAdapter(Leased)
_ROUTE: Final = TypeAdapter(Route)
_HEALTH: Final = TypeAdapter(BootstrapHealth)
_REGISTER: Final = TypeAdapter(RegisterRank)


class Registrar(Protocol):
    """Where a lease is taken; the client below, or a fake."""

    where: str

    async def register(self, said: RegisterRank) -> float:
        """Take or renew the lease; its length in seconds. Raises PdrtError."""
        ...


class BootstrapClient:
    """One bootstrap server, reached by HTTP. Raises PdrtError only."""

    def __init__(
        self,
        session: ClientSession,
        host: str,
        port: int,
        key: ClusterKey | None,
        timeout_s: float = 2.0,
        caller: str = "",
    ) -> None:
        self.where = f"bootstrap server {bracketed(host)}:{port}"
        base = f"http://{bracketed(host)}:{port}/bootstrap"
        self._server = Server(session, self.where, base, key, timeout_s)
        if caller:
            self._server.headers[CALLER_HEADER] = caller

    async def register(self, said: RegisterRank) -> float:
        body = _REGISTER.dump_json(said)
        return (await self._server.call("PUT", "register_rank", _LEASED, body)).lease_s

    async def route(self) -> Route:
        return await self._server.call("GET", "route", _ROUTE)

    async def health(self) -> BootstrapHealth:
        return await self._server.call("GET", "health", _HEALTH)


class Server:
    """A server of the cluster that answers in JSON; `where` is its name for people."""

    def __init__(
        self,
        session: ClientSession,
        where: str,
        base: str,
        key: ClusterKey | None,
        timeout_s: float = 2.0,
    ) -> None:
        self.where = where
        self._session, self._base = session, base
        self._timeout = ClientTimeout(total=timeout_s)
        self.headers = {"authorization": f"Bearer {key.bearer()}"} if key else {}

    async def call(
        self, method: str, path: str, answer: TypeAdapter[T], body: bytes | None = None
    ) -> T:
        """Raises PdrtError only."""
        try:
            async with self._session.request(
                method,
                f"{self._base}/{path}",
                data=body,
                headers=self.headers,
                timeout=self._timeout,
                allow_redirects=False,  # the token goes to this address and to no other
            ) as response:
                status, text = response.status, await _read(response)
        except (ClientError, TimeoutError, OSError) as error:
            raise error_of_client(error, self.where) from error
        if status != 200:
            raise error_from_answer(status, text, self.where)
        try:
            return answer.validate_json(text)
        except ValidationError as error:
            raise Unavailable(
                f"{self.where} answered {path} with what is no such answer; is another program"
                f" or version listening there? {text[:200].decode(errors='replace')}"
            ) from error


async def _read(response: ClientResponse) -> bytes:
    text = bytearray()
    async for chunk in response.content.iter_any():
        text += chunk
        if len(text) > MAX_ANSWER_BYTES:
            raise OSError(f"the answer is over {MAX_ANSWER_BYTES} bytes")
    return bytes(text)


def pauses(longest_s: float = LONGEST_PAUSE_S) -> Iterator[float]:
    """Doubling pauses up to a bound, without end."""
    pause = FIRST_PAUSE_S
    while True:
        yield min(pause, longest_s)
        pause = min(pause * 2, LONGEST_PAUSE_S)


async def keep_trying(
    call: Callable[[], Awaitable[T]], within_s: float, clock: Clock, sleep: Sleep
) -> T:
    """What `call` returns once it succeeds.

    Raises what asking again cannot change at once, and a kind of Unavailable with the last
    answer when `within_s` seconds are over.
    """
    deadline, tries, last = clock() + within_s, 0, Unavailable("no answer")
    for pause in pauses():
        tries += 1
        try:
            async with asyncio.timeout(max(deadline - clock(), 0.001)):
                return await call()
        except _FINAL:
            raise
        except Unavailable as error:
            last = error
        except PdrtError as error:
            last = Unavailable(str(error))
        except TimeoutError:
            break
        if clock() + pause >= deadline:
            break
        await sleep(pause)
    raise type(last)(f"gave up after {within_s:g} s and {tries} tries: {last}")


async def keep_registered(
    registrar: Registrar,
    said: RegisterRank,
    startup_s: float,
    report: Callable[[str | None], None],
    clock: Clock,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Register, then renew until cancelled.

    `report` hears None when the lease is held and the reason when it may have lapsed. Raises
    PdrtError when the first lease is not had within `startup_s`, or when the server says that
    this rank is wrong or replaced: then the process must end.
    """

    async def once() -> float:
        return await registrar.register(said)

    try:
        lease_s = await keep_trying(once, startup_s, clock, sleep)
    except Unavailable as error:
        raise Unavailable(
            f"rank {said.rank} could not register with the {registrar.where}: {error}; check that"
            " the prefill leader runs, and its address and [ports] bootstrap in this node's file"
        ) from error
    while True:
        report(None)
        held_until = clock() + lease_s
        await sleep(lease_s / 3)
        lease_s = await _renew(once, held_until, lease_s / 3, report, (clock, sleep))


async def _renew(
    once: Callable[[], Awaitable[float]],
    held_until: float,
    longest_s: float,
    report: Callable[[str | None], None],
    time: tuple[Clock, Sleep],
) -> float:
    clock, sleep = time
    pause, is_told = pauses(longest_s), False
    while True:
        try:
            return await once()
        except _FINAL:
            raise
        except PdrtError as error:
            if clock() >= held_until and not is_told:
                is_told = True
                report(f"the lease has lapsed: {error}")
        await sleep(next(pause))
