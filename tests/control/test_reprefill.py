"""A retracted room is computed again where it came from; the asking ends with the room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from pdrt.control.heartbeat import Time
from pdrt.control.http import Json
from pdrt.control.order import parse_prefill_again
from pdrt.control.reprefill import Reprefill
from pdrt.device.chance import seed_of
from pdrt.errors import Conflict, NotFound, Overloaded, PdrtError, Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import (
    AbortRoom,
    AskPrefill,
    Drain,
    Rank,
    Rebind,
    Sampling,
    Source,
    Submit,
    pack_ids,
)
from tests.fake_time import FakeTime

KEY = ClusterKey(b"the key of a test cluster")
WALL = 1_800_000_000.0
RANK = Rank(dp=1)


class Rig:
    """A Reprefill and the prefill leader that it asks, which answers as the test says."""

    def __init__(self, session: ClientSession, port: int) -> None:
        self.time = FakeTime()
        self.source = Source(host="127.0.0.1", port=port, dp_rank=3)
        time = Time(self.time.clock, self.time.sleep)
        self.reprefill = Reprefill(session, KEY, 1.0, time, lambda: WALL)

    def submit(
        self, room: int = 7, attempt: int = 0, source: Source | None = None, n: int = 1
    ) -> None:
        message = Submit(
            room=room,
            attempt=attempt,
            request_id="id-1",
            tokens=pack_ids([1, 2, 3]),
            prompt_tokens=3,
            sampling=Sampling(max_tokens=9, seed=5, n=n),
            time_left=30.0,
            priority=3,
            source=source or self.source,
            salt="tenant",
        )
        self.reprefill.told(RANK, message)

    async def ask(self, room: int = 7, attempt: int = 1, of_room: int = -1, index: int = 0) -> None:
        tokens = pack_ids([1, 2, 3, 4])
        wanted = AskPrefill(room=room, attempt=attempt, tokens=tokens, of_room=of_room, index=index)
        await self.reprefill.ask(wanted)


class Leader:
    """Both faces of a prefill leader; the answers run out to 200."""

    def __init__(self) -> None:
        self.asked: list[Json] = []
        self.headers: list[str] = []
        self.answers: list[tuple[int, str]] = []
        self.url: Callable[[], str] = lambda: ""
        self.gate, self.came, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def health(self, _request: web.Request) -> web.Response:
        body = {"status": "ok", "ready": True, "instance_epoch": 1, "http": self.url()}
        return web.json_response(body)

    async def prefill(self, request: web.Request) -> web.Response:
        self.asked.append(json.loads(await request.text()))
        self.headers.append(request.headers["authorization"])
        self.came.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        status, code = self.answers.pop(0) if self.answers else (200, "")
        error = {"error": {"type": "t", "code": code, "message": f"it is {code}"}}
        return web.json_response(error if code else {"status": "prefilled"}, status=status)


@asynccontextmanager
async def rigged() -> AsyncIterator[tuple[Rig, Leader]]:
    leader, app = Leader(), web.Application()
    app.router.add_get("/bootstrap/health", leader.health)
    app.router.add_post("/internal/prefill", leader.prefill)
    async with TestServer(app, handler_cancellation=True) as server, ClientSession() as session:
        leader.url = lambda: f"http://127.0.0.1:{server.port}"
        assert server.port is not None
        yield Rig(session, server.port), leader


async def test_the_prefill_leader_is_asked_with_all_it_needs() -> None:
    async with rigged() as (rig, leader):
        rig.submit()
        await rig.ask()
        order = parse_prefill_again(leader.asked[0])
        assert (order.bootstrap_room, order.attempt, order.prompt_tokens) == (7, 1, 3)
        assert (list(order.input_ids), order.request_id) == ([1, 2, 3, 4], "id-1")
        assert order.sampling == Sampling(max_tokens=9, seed=5)
        assert order.cache_salt == "tenant"
        assert (order.time_left_s, order.disagg_prefill_dp_rank) == (30.0, 3)
        assert KEY.is_room_token(order.transfer_token, 7, 1, WALL + 29)
        assert KEY.is_bearer(leader.headers[0])


async def test_a_sequence_of_a_group_is_computed_alone_and_where_its_room_was() -> None:
    """CASES 65: with its own seed, in a room of its own, by the rank that had the prompt."""
    async with rigged() as (rig, leader):
        rig.submit(n=3)
        await rig.ask(room=4242, of_room=7, index=2)
        rig.reprefill.told(RANK, AbortRoom(room=7, reason="stop", index=1))  # another goes on
        await rig.ask(room=4243, of_room=7, index=1)
        first, second = (parse_prefill_again(asked) for asked in leader.asked)
        assert (first.bootstrap_room, first.disagg_prefill_dp_rank) == (4242, 3)
        assert first.sampling == Sampling(max_tokens=9, seed=seed_of(5, 2))
        assert second.sampling == Sampling(max_tokens=9, seed=seed_of(5, 1))
        assert first.priority == 3
        assert KEY.is_room_token(first.transfer_token, 4242, 1, WALL + 29)
        with pytest.raises(NotFound):
            await rig.ask(room=4242, of_room=8)


async def test_after_a_rebind_the_new_source_is_asked() -> None:
    async with rigged() as (rig, leader):
        rig.submit(source=Source(host="127.0.0.1", port=1))
        rig.reprefill.told(RANK, Rebind(room=7, attempt=65536, source=rig.source))
        rig.reprefill.told(RANK, Rebind(room=8, attempt=1, source=rig.source))  # of no room here
        rig.reprefill.told(RANK, Drain())
        await rig.ask()
        assert len(leader.asked) == 1


async def test_a_room_whose_older_attempt_is_wound_up_is_asked_for_again() -> None:
    async with rigged() as (rig, leader):
        rig.submit()
        leader.answers = [(409, "conflict")] * 3
        asked = asyncio.create_task(rig.ask())
        while not asked.done():
            await asyncio.sleep(0)  # the answers come through real sockets
            if rig.time.sleeping:
                await rig.time.run_for(0.02)
        await asked
        assert len(leader.asked) == 4


async def test_but_not_for_ever() -> None:
    async with rigged() as (rig, leader):
        rig.submit()
        leader.answers = [(409, "conflict")] * 1000
        began, asked = rig.time.now, asyncio.create_task(rig.ask())
        while not asked.done():
            await asyncio.sleep(0)
            if rig.time.sleeping:
                await rig.time.run_for(0.5)
        with pytest.raises(Conflict):
            await asked
        assert 2.0 < rig.time.now - began <= 2.5


@pytest.mark.parametrize(
    ("answer", "error"), [((429, "overloaded"), Overloaded), ((500, "internal"), PdrtError)]
)
async def test_another_refusal_is_raised_at_once(
    answer: tuple[int, str], error: type[PdrtError]
) -> None:
    async with rigged() as (rig, leader):
        rig.submit()
        leader.answers = [answer]
        with pytest.raises(error):
            await rig.ask()
        assert len(leader.asked) == 1


async def test_a_leader_that_is_not_there_or_nowhere_is_unavailable() -> None:
    async with rigged() as (rig, leader):
        rig.submit(source=Source(host="127.0.0.1", port=1))
        with pytest.raises(Unavailable):
            await rig.ask()
        rig.submit()
        leader.url = lambda: ""
        with pytest.raises(Unavailable, match="does not say where its leader is"):
            await rig.ask()


async def test_a_room_that_is_not_in_flight_cannot_be_asked_for() -> None:
    async with rigged() as (rig, _leader):
        with pytest.raises(NotFound):
            await rig.ask()


ENDS: dict[str, Callable[[Reprefill], None]] = {
    "its last output": lambda r: r.over(7, 0),
    "an output of no attempt": lambda r: r.over(7, -1),
    "an abort": lambda r: r.told(RANK, AbortRoom(room=7, reason="client_gone")),
    "the loss of its worker": lambda r: r.lost(RANK),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_room_is_forgotten_at_its_end_and_its_asking_ends_too(end: str) -> None:
    """The other leader sees the connection close and stops computing for nobody."""
    async with rigged() as (rig, leader):
        leader.gate.clear()
        rig.submit()
        asked = asyncio.create_task(rig.ask())
        await leader.came.wait()
        ENDS[end](rig.reprefill)
        with pytest.raises(NotFound, match="has ended"):
            await asked
        await leader.left.wait()
        assert len(rig.reprefill) == 0


async def test_what_concerns_another_room_attempt_or_worker_changes_nothing() -> None:
    async with rigged() as (rig, _leader):
        rig.submit(attempt=65536)
        rig.reprefill.over(7, 3)  # the end of an older attempt, whose place this one took
        rig.reprefill.over(8, 0)
        rig.reprefill.lost(Rank(dp=0))
        rig.reprefill.told(RANK, AbortRoom(room=8, reason="client_gone"))
        assert len(rig.reprefill) == 1
        await rig.ask(attempt=65537)


async def test_a_request_without_a_prefill_side_is_not_remembered() -> None:
    async with rigged() as (rig, _leader):
        rig.submit(8)
        assert len(rig.reprefill) == 1
        local = Submit(
            room=9,
            attempt=0,
            request_id="r",
            tokens=b"\1\0\0\0",
            prompt_tokens=1,
            sampling=Sampling(),
            time_left=1.0,
        )
        rig.reprefill.told(RANK, local)
        assert len(rig.reprefill) == 1
