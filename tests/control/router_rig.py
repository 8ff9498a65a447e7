"""A router between scripted leaders, on real sockets, with clocks that the test moves."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy

from pdrt.config import RouterConfig
from pdrt.control.front import Router
from pdrt.control.instances import Instance
from pdrt.control.pairs import Trust
from pdrt.control.router import make_router, make_server, tls_of
from pdrt.control.ticket import Clocks
from pdrt.control.traces import Tracing
from pdrt.data.peer import Health
from pdrt.keys import ClusterKey
from tests.control.fake_leader import FakeLeader, Json

KEY = ClusterKey(b"k" * 32)
NEVER_S = 3600.0


@dataclass
class FakeAlarm:
    delay: float
    ring: Callable[[], None]
    is_off: bool = False

    def cancel(self) -> None:
        self.is_off = True


@dataclass
class FakeTime:
    """Nothing happens by itself: alarms ring and pauses end when the test says so."""

    now: float = 1000.0
    alarms: list[FakeAlarm] = field(default_factory=list)
    pauses: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)

    def alarm(self, delay: float, ring: Callable[[], None]) -> FakeAlarm:
        self.alarms.append(FakeAlarm(delay, ring))
        return self.alarms[-1]

    async def pause(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pauses.append((seconds, woken))
        await woken

    def wake(self) -> None:
        """End every pause."""
        pauses, self.pauses = self.pauses, []
        for _, woken in pauses:
            if not woken.done():
                woken.set_result(None)

    def pass_deadlines(self) -> None:
        for alarm in self.alarms:
            if not alarm.is_off:
                alarm.ring()

    def clocks(self) -> Clocks:
        return Clocks(lambda: self.now, lambda: self.now, self.alarm, self.pause)


@dataclass
class Got:
    status: int
    headers: CIMultiDictProxy[str]
    body: bytes
    json: Any

    @property
    def error(self) -> Json:
        error: Json = self.json["error"]
        return error


async def until(holds: Callable[[], bool]) -> None:
    """Turn the loop until it holds; no timer, so no race with one."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


class Rig:
    """One router, its leaders and a client."""

    def __init__(
        self, config: Json, key: ClusterKey | None, tracing: Tracing | None = None
    ) -> None:
        self._tracing = tracing
        self.time = FakeTime()
        self.prefill: list[FakeLeader] = []
        self.decode: list[FakeLeader] = []
        self.hybrid: list[FakeLeader] = []
        self.url = ""
        self._config, self._key = config, key
        self._stack = AsyncExitStack()
        self.session: aiohttp.ClientSession

    @property
    def leaders(self) -> list[FakeLeader]:
        return [*self.prefill, *self.decode, *self.hybrid]

    async def start(self, prefill: int, decode: int, hybrid: int) -> None:
        self.prefill = [FakeLeader("prefill", self._key) for _ in range(prefill)]
        self.decode = [FakeLeader("decode", self._key) for _ in range(decode)]
        for leader in self.decode:
            leader.partners = self.prefill
        self.hybrid = [FakeLeader("hybrid", self._key) for _ in range(hybrid)]
        for leader in self.leaders:
            await leader.start()
        self.session = aiohttp.ClientSession()

    async def start_router(self) -> None:
        slow = {"connect_s": 25.0}  # where many tests share a core, a connection takes its time
        timeouts = {"heartbeat_s": NEVER_S, "heartbeat_timeout_s": NEVER_S, **slow}
        tables: Json = {
            "prefill": [leader.target for leader in self.prefill],
            "decode": [leader.target for leader in self.decode],
            "hybrid": [leader.target for leader in self.hybrid],
            "timeouts": timeouts,
            **self._config,
        }
        config = RouterConfig.model_validate(tables)
        self.router: Router = make_router(config, self._key, clocks=self.time.clocks())
        self.router.tracing = self._tracing
        await self._stack.enter_async_context(self.router.lifetime())
        self.server = make_server(self.router)
        self._stack.push_async_callback(self.server.close, 0.01)
        listening = socket.create_server(("127.0.0.1", 0))
        tls = tls_of(self.router, self.server)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        await self.server.start(listening, tls)

    async def ready(self) -> None:
        await until(lambda: self.router.fleet.is_ready and not self._is_trying)

    @property
    def _is_trying(self) -> bool:
        trying = (Trust.TRYING, Trust.RETRYING)
        waiting = (pair.is_due or pair.trust in trying for pair in self.router.fleet.pairs)
        return not self.router.config.policy.is_plain and any(waiting)

    async def look(self) -> None:
        """Let every leader be polled once more."""
        for leader in self.leaders:
            await self._look_at(self.instance(leader))

    async def _look_at(self, instance: Instance) -> None:
        said = instance.status
        instance.nudged.set()
        await until(lambda: instance.status is not said)

    def instance(self, leader: FakeLeader) -> Instance:
        """How the router knows it."""
        return self.router.fleet.instances[self.leaders.index(leader)]

    async def lose(self, leader: FakeLeader) -> None:
        """It dies, and the router has looked."""
        await leader.stop()
        self.instance(leader).nudged.set()
        await until(lambda: self.instance(leader).health is Health.DEAD)

    async def find(self, leader: FakeLeader) -> None:
        """It is back, and the router has looked."""
        await leader.start()
        self.instance(leader).nudged.set()
        await until(lambda: self.instance(leader).is_routable)

    async def close(self) -> None:
        await self.session.close()
        await self._stack.aclose()
        for leader in self.leaders:
            await leader.stop()

    async def send(
        self,
        body: Json | None = None,
        path: str = "/generate",
        headers: dict[str, str] | None = None,
        **fields: object,
    ) -> Got:
        json = {"prompt": "hi", **fields} if body is None else body
        async with self.session.post(self.url + path, json=json, headers=headers) as response:
            return await _got(response)

    async def raw(self, data: bytes, path: str = "/generate") -> Got:
        async with self.session.post(self.url + path, data=io.BytesIO(data)) as response:
            return await _got(response)

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Got:
        async with self.session.get(self.url + path, headers=headers) as response:
            return await _got(response)

    def sending(self, **fields: object) -> asyncio.Task[Got]:
        return asyncio.create_task(self.send(**fields))  # type: ignore[arg-type]

    async def at_rest(self) -> None:
        """Every leg, hold and room is back."""
        fleet = self.router.fleet
        await until(
            lambda: (
                self.router.admitted == 0
                and not self.router.relays
                and not self.router.rooms
                and all(i.load.requests == 0 and i.load.tokens == 0 for i in fleet.instances)
            )
        )


async def _got(response: aiohttp.ClientResponse) -> Got:
    body = await response.read()
    json = await response.json() if response.content_type == "application/json" else None
    return Got(response.status, response.headers, body, json)


@asynccontextmanager
async def rig(
    prefill: int = 1,
    decode: int = 1,
    hybrid: int = 0,
    *,
    key: ClusterKey | None = KEY,
    wait: bool = True,
    tracing: Tracing | None = None,
    **config: Any,
) -> AsyncIterator[Rig]:
    found = Rig(config, key, tracing)
    await found.start(prefill, decode, hybrid)
    try:
        await found.start_router()
        if wait:
            await found.ready()
        yield found
    finally:
        await found.close()
