"""What each role's leader has beside its workers, and what it has no use for."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import ClientSession

from pdrt.config import DisaggConfig, NodeConfig, Place, PortsSection, Role
from pdrt.control.bootstrap_client import BootstrapClient
from pdrt.control.heartbeat import News
from pdrt.control.sides import Side, make_side
from pdrt.data.peer import Health
from pdrt.errors import ConfigError, NoPrefill, NotFound
from pdrt.keys import ClusterKey
from pdrt.messages import AskPrefill, Output, Rank, Rebind, Sampling, Source, Submit, pack_ids
from tests.control.bootstrap_samples import registration

KEY = ClusterKey(b"the key of a test cluster")
CONFIG = NodeConfig(ports=PortsSection(bootstrap=0))
WANTED = AskPrefill(room=7, attempt=1, tokens=pack_ids([1, 2]))
URL = "http://127.0.0.1:8001"


def made(role: Role, news: list[News] | None = None, epoch: int = 5) -> Side:
    disagg = DisaggConfig.derive(role, CONFIG, Place.of(CONFIG.parallel, 0))
    heard = [] if news is None else news
    return make_side(role, CONFIG, disagg, KEY, heard.append, epoch)


def submit(source: Source | None) -> Submit:
    return Submit(
        room=7,
        attempt=0,
        request_id="r",
        tokens=pack_ids([1]),
        prompt_tokens=1,
        sampling=Sampling(),
        time_left=9.0,
        source=source,
    )


async def test_a_hybrid_leader_is_alone() -> None:
    async with AsyncExitStack() as stack:
        side = made("hybrid")
        await side.bind(stack, URL)
        side.told(Rank(), submit(None))
        side.ended(7, 0)
        side.lost(Rank())
        assert (side.bootstrap, side.epoch, side.actors()) == (None, 5, [])
        assert (list(side.missing()), list(side.peers())) == ([], [])
        with pytest.raises(NotFound, match="has no prefill side"):
            await side.prefill_again(WANTED)


async def test_a_prefill_leader_has_the_bootstrap_server() -> None:
    async with AsyncExitStack() as stack:
        side = made("prefill")
        await side.bind(stack, URL)
        assert side.bootstrap is not None
        host, port = side.bootstrap
        assert port != 0  # the real one
        session = await stack.enter_async_context(ClientSession())
        client = BootstrapClient(session, host, port, KEY, caller="http://127.0.0.9:8100 3")
        assert (await client.health()).http == URL
        assert "0,0,0" in side.missing()[0]
        assert [(p.name, p.health) for p in side.peers()] == [
            ("http://127.0.0.9:8100", Health.ALIVE)
        ]
        with pytest.raises(NotFound, match="is computed here"):
            await side.prefill_again(WANTED)


async def test_a_lost_ranks_place_is_free_and_its_next_life_is_a_new_epoch() -> None:
    async with AsyncExitStack() as stack:
        side = made("prefill")
        await side.bind(stack, URL)
        assert side.bootstrap is not None
        session = await stack.enter_async_context(ClientSession())
        client = BootstrapClient(session, *side.bootstrap, KEY)
        await client.register(registration(epoch=10))
        assert not side.missing()
        before = side.epoch
        side.lost(Rank())
        assert side.missing()
        with pytest.raises(NoPrefill):
            await client.route()
        await client.register(registration(epoch=11))
        assert not side.missing()
        assert side.epoch > before


async def test_a_taken_bootstrap_port_is_told_before_anything_starts() -> None:
    async with AsyncExitStack() as stack:
        first = made("prefill")
        await first.bind(stack, URL)
        assert first.bootstrap is not None
        taken = NodeConfig(ports=PortsSection(bootstrap=first.bootstrap[1]))
        disagg = DisaggConfig.derive("prefill", taken, Place.of(taken.parallel, 0))
        second = make_side("prefill", taken, disagg, KEY, lambda _news: None, 1)
        with pytest.raises(ConfigError, match="is taken"):
            await second.bind(stack, URL)


async def test_a_decode_leader_watches_the_prefill_leaders_that_requests_name() -> None:
    news: list[News] = []
    async with AsyncExitStack() as stack:
        prefill, decode = made("prefill"), made("decode", news, epoch=8)
        await prefill.bind(stack, URL)
        await decode.bind(stack, "http://127.0.0.1:8100")
        assert prefill.bootstrap is not None
        source = Source(host=prefill.bootstrap[0], port=prefill.bootstrap[1])
        tasks = [asyncio.create_task(actor) for actor in decode.actors()]
        decode.told(Rank(), submit(None))  # names nobody
        assert not decode.peers()
        decode.told(Rank(), Rebind(room=9, attempt=1, source=source))
        decode.told(Rank(), submit(source))
        while not news:
            await asyncio.sleep(0)
        assert [(each.health, each.epoch) for each in news] == [(Health.ALIVE, prefill.epoch)]
        assert [(p.name, p.epoch) for p in prefill.peers()] == [("http://127.0.0.1:8100", 8)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.parametrize("end", ["ended", "lost"])
async def test_a_decode_leader_forgets_a_request_with_its_end(end: str) -> None:
    async with AsyncExitStack() as stack:
        side = made("decode")
        await side.bind(stack, URL)
        nobody = Source(host="127.0.0.1", port=1)
        side.told(Rank(), submit(nobody))
        last = Output(room=7, attempt=0, finish="stop")
        if end == "ended":
            side.ended(last.room, last.attempt)
        else:
            side.lost(Rank())
        with pytest.raises(NotFound, match="is not in flight"):
            await side.prefill_again(WANTED)
