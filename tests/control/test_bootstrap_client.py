"""Holding a lease and fetching a route: what is tried again, what is not, and what errors say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer, unused_port

from pdrt.control.bootstrap import BootstrapState, Sizes, bootstrap_app
from pdrt.control.bootstrap_client import (
    BootstrapClient,
    keep_registered,
    keep_trying,
    pauses,
)
from pdrt.errors import (
    BadRequest,
    Conflict,
    NoPrefill,
    NotFound,
    PdrtError,
    Unauthorized,
    Unavailable,
)
from pdrt.keys import ClusterKey
from pdrt.messages import RegisterRank
from tests.control.bootstrap_samples import registration
from tests.fake_time import FakeTime, settle

KEY = ClusterKey.from_text("a key for these tests")


class FakeServer:
    """Grants leases of 9 s, or raises what the test puts into `trouble`."""

    where = "bootstrap server 10.0.0.1:18800"

    def __init__(self, time: FakeTime) -> None:
        self.time = time
        self.trouble: PdrtError | None = None
        self.calls: list[float] = []

    async def register(self, _said: RegisterRank) -> float:
        self.calls.append(self.time.now)
        await asyncio.sleep(0)
        if self.trouble is not None:
            raise self.trouble
        return 9.0


class Rig:
    def __init__(self) -> None:
        self.time = FakeTime(now=0)
        self.server = FakeServer(self.time)
        self.said: list[str | None] = []
        self.task = asyncio.create_task(
            keep_registered(
                self.server, registration(), 60, self.said.append, self.time.clock, self.time.sleep
            )
        )

    async def end(self) -> BaseException | None:
        """What the task ended with, or None when it had to be cancelled."""
        await settle()
        if not self.task.done():
            self.task.cancel()
        (result,) = await asyncio.gather(self.task, return_exceptions=True)
        return None if isinstance(result, asyncio.CancelledError) else result


def test_pauses_double_up_to_a_bound() -> None:
    assert list(islice(pauses(), 7)) == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert list(islice(pauses(0.3), 4)) == [0.1, 0.2, 0.3, 0.3]


async def test_a_lease_is_renewed_at_a_third_of_its_length() -> None:
    rig = Rig()
    await rig.time.run_until(10)
    assert rig.server.calls == [0, 3, 6, 9]
    assert rig.said == [None] * 4
    assert await rig.end() is None


async def test_registering_is_tried_until_the_server_is_there() -> None:
    """Start-up order is free: a rank may come before its leader."""
    rig = Rig()
    rig.server.trouble = Unavailable("connection refused")
    await rig.time.run_until(20)
    assert len(rig.server.calls) > 10
    assert max(b - a for a, b in zip(rig.server.calls, rig.server.calls[1:], strict=False)) < 2.001
    assert rig.said == []
    rig.server.trouble = None
    await rig.time.run_until(23)
    assert rig.said[0] is None
    assert await rig.end() is None


async def test_a_rank_that_cannot_register_in_time_says_where_and_what_to_do() -> None:
    rig = Rig()
    rig.server.trouble = Unavailable("connection refused")
    await rig.time.run_until(61)
    error = await rig.end()
    assert isinstance(error, Unavailable)
    for part in ("rank 0,0,0", "10.0.0.1:18800", "60 s", "connection refused", "check that"):
        assert part in str(error)
    assert rig.server.calls[-1] <= 60


@pytest.mark.parametrize("kind", [BadRequest, Unauthorized, Conflict, NotFound])
@pytest.mark.parametrize("is_first", [True, False])
async def test_what_asking_again_cannot_change_ends_it_at_once(
    kind: type[PdrtError], is_first: bool
) -> None:
    """A wrong key, a wrong configuration, or a newer life that took this rank's place."""
    rig = Rig()
    if not is_first:
        await rig.time.run_until(1)
    rig.server.trouble = kind("no")
    await rig.time.run_until(3)
    assert len(rig.server.calls) == (1 if is_first else 2)
    assert await rig.end() is rig.server.trouble


async def test_a_lost_lease_is_reported_once_it_may_have_lapsed_and_then_taken_anew() -> None:
    """CASES 6: the bootstrap server goes and comes back; nobody has to be restarted."""
    rig = Rig()
    await rig.time.run_until(1)
    rig.server.trouble = Unavailable("connection refused")
    await rig.time.run_until(8.9)
    assert rig.said == [None]
    await rig.time.run_until(100)
    assert rig.said == [None, "the lease has lapsed: connection refused"]
    late = [b - a for a, b in zip(rig.server.calls[5:], rig.server.calls[6:], strict=False)]
    assert max(late) < 2.001
    rig.server.trouble = None
    await rig.time.run_until(102)
    assert rig.said[-1] is None
    assert await rig.end() is None


async def test_trying_ends_at_its_deadline_even_when_the_call_hangs() -> None:
    async def hang() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Unavailable, match=r"gave up after 0\.01 s and 1 tries: no answer"):
        await keep_trying(hang, 0.01, asyncio.get_running_loop().time, asyncio.sleep)


@pytest.fixture
async def session() -> AsyncIterator[ClientSession]:
    async with ClientSession() as session:
        yield session


async def serve(app: web.Application) -> TestServer:
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    return server


async def test_a_client_speaks_the_servers_endpoints(session: ClientSession) -> None:
    time, callers = FakeTime(), list[str]()
    state = BootstrapState(Sizes(dp=2), epoch=3)
    server = await serve(bootstrap_app(state, KEY, time.clock, callers.append))
    client = BootstrapClient(session, "127.0.0.1", server.port or 0, KEY, caller="me 1")
    with pytest.raises(NoPrefill, match="never registered"):
        await client.route()
    for dp in (0, 1):
        assert await client.register(registration(dp=dp, dp_size=2, epoch=4)) == 10
    assert (await client.route()).ranks["1,0,0"].rank_port == 5001
    assert (await client.health()).ready
    assert callers == ["me 1"]
    with pytest.raises(Conflict, match="older"):
        await client.register(registration(dp=0, dp_size=2, epoch=1))
    await server.close()


async def test_a_wrong_key_is_told_as_such(session: ClientSession) -> None:
    server = await serve(bootstrap_app(BootstrapState(Sizes(), epoch=0), KEY, FakeTime().clock))
    for key in (None, ClusterKey.from_text("quite another key")):
        client = BootstrapClient(session, "127.0.0.1", server.port or 0, key)
        with pytest.raises(Unauthorized):
            await client.register(registration())
    await server.close()


async def test_a_server_that_is_not_there_is_unavailable_and_named(session: ClientSession) -> None:
    port = unused_port()
    client = BootstrapClient(session, "127.0.0.1", port, KEY)
    with pytest.raises(
        Unavailable, match=f"127.0.0.1:{port} cannot be reached: Connection refused$"
    ):
        await client.health()


async def test_a_server_that_does_not_answer_is_given_up(session: ClientSession) -> None:
    release = asyncio.Event()

    async def hang(_request: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/bootstrap/health", hang)
    server = await serve(app)
    client = BootstrapClient(session, "127.0.0.1", server.port or 0, KEY, timeout_s=0.02)
    with pytest.raises(Unavailable, match="did not answer in time"):
        await client.health()
    release.set()
    await server.close()


STRANGE = [
    (200, b"hello", Unavailable, "another program"),
    (200, b"[" * 9999, Unavailable, "another program"),
    (200, b'{"ready": true}', Unavailable, "another program"),
    (404, b"not here", NotFound, "answered 404: not here"),
    (500, b"\xff\xfe", PdrtError, "answered 500"),
    (302, b"", PdrtError, "answered 302"),
    (503, b'{"error": {"code": "no_prefill", "message": "wait"}}', NoPrefill, "wait"),
]


@pytest.mark.parametrize(("status", "body", "kind", "says"), STRANGE)
async def test_any_answer_becomes_a_typed_error(
    session: ClientSession, status: int, body: bytes, kind: type[PdrtError], says: str
) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"location": "http://127.0.0.1:1/"})

    app = web.Application()
    app.router.add_get("/bootstrap/health", answer)
    server = await serve(app)
    client = BootstrapClient(session, "127.0.0.1", server.port or 0, KEY)
    with pytest.raises(kind, match=says):
        await client.health()
    await server.close()


async def test_an_endless_answer_is_cut_off(session: ClientSession) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b" " * 100_000)
        return response

    app = web.Application()
    app.router.add_get("/bootstrap/health", answer)
    server = await serve(app)
    client = BootstrapClient(session, "127.0.0.1", server.port or 0, KEY)
    with pytest.raises(Unavailable, match="over 4194304 bytes"):
        await client.health()
    await server.close()


async def test_a_route_is_waited_for(session: ClientSession) -> None:
    """CASES 6: no route yet is tried again; with a time limit the reason is told."""
    time, state = FakeTime(now=0), BootstrapState(Sizes(), epoch=0)
    server = await serve(bootstrap_app(state, KEY, time.clock))
    client = BootstrapClient(session, "127.0.0.1", server.port or 0, KEY)
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        time.now += seconds
        if len(naps) == 3:
            state.register(registration(), time.now)

    assert (await keep_trying(client.route, 30, time.clock, nap)).ranks
    assert naps == [0.1, 0.2, 0.4]
    time.now += 100  # the lease is over
    with pytest.raises(NoPrefill, match=r"gave up after 5 s.*lease lapsed"):
        await keep_trying(client.route, 5, time.clock, nap)
    await server.close()


async def test_ipv6_addresses_are_bracketed(session: ClientSession) -> None:
    client = BootstrapClient(session, "::1", unused_port(), KEY)
    assert client.where.startswith("bootstrap server [::1]:")
    with pytest.raises(Unavailable):
        await client.health()
