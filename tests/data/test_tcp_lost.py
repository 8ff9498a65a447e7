"""tcp when connections are lost: what that costs, and that the next write goes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdrt.data.transport.promise import Ended
from pdrt.data.transport.tcp import TcpTransport
from pdrt.data.transport.tcp_lane import Patience
from tests.data.target import parsed
from tests.data.tcp_rig import (
    Network,
    end_of,
    offer_of,
    peer_at,
    target,
)
from tests.data.transports import BLOCKS, CLUSTER, LOCAL, Bench, bench, opened

SLOT = bytes(range(64))
LARGE = [*range(BLOCKS - 1)] * 200  # about 50 MiB


@pytest.fixture
async def rig() -> AsyncIterator[Bench]:
    async with opened("tcp") as rig:
        yield rig


@pytest.fixture
async def network(rig: Bench) -> AsyncIterator[Network]:
    """Between the writer and `c`, which is a's memory reached that way."""
    network = Network(offer_of(target(rig)))
    await rig.transport.attach(peer_at(rig, await network.start()))
    yield network
    await network.close()


async def test_a_connection_that_was_cut_while_idle_costs_nothing(
    rig: Bench, network: Network
) -> None:
    """CASES 15: the next write connects again."""
    for number in range(5):
        rig.transport.start(rig.write(number, "c", [number], SLOT))
        assert await end_of(rig, number) is None
        network.cut()
        while network.is_open:
            await asyncio.sleep(0)
    assert all(rig.block("a", n) == rig.source_block(n) for n in range(5))
    assert network.connections == 10  # two stripes each


async def test_a_connection_that_was_cut_a_moment_ago_costs_nothing(
    rig: Bench, network: Network
) -> None:
    """CASES 15: its end has arrived, but our loop has not heard of it yet."""
    rig.transport.start(rig.write(1, "c", [1]))
    assert await end_of(rig, 1) is None
    network.cut_now()
    rig.transport.start(rig.write(2, "c", [2], SLOT))
    assert await end_of(rig, 2) is None
    assert rig.block("a", 2) == rig.source_block(2)


async def test_a_target_that_is_let_go_says_that_it_places_nothing_more(rig: Bench) -> None:
    """CASES 50: its blocks may be given away when the write has ended."""
    memory = rig.peers["b"]
    for number in range(20):
        await rig.transport.attach(rig.peer("b"))
        rig.transport.start(rig.write(number, "b", LARGE))
        while not memory.array.any():
            await asyncio.sleep(0)
        rig.transport.detach("b")
        assert await end_of(rig, number) == "the peer is gone"
        memory.array[:] = 0
        await asyncio.to_thread(os.sched_yield)
        assert not memory.array.any()
    await rig.targets["b"].close()
    assert not memory.array.any()


async def test_a_connection_that_a_network_forgot_is_found_out_before_a_write_is_risked() -> None:
    """CASES 15: a NAT that drops what is idle tells nobody."""
    rig = bench("tcp")
    await rig.transport.close()
    patience = Patience(idle_s=0, pong_s=0.5)
    rig.transport = TcpTransport(rig.source, LOCAL, CLUSTER, 1, patience)
    reader = asyncio.create_task(rig.read())
    network = Network(offer_of(target(rig)))
    await rig.transport.attach(peer_at(rig, await network.start()))
    rig.transport.start(rig.write(1, "c", [1]))
    assert await end_of(rig, 1) is None
    network.swallow()
    network.pass_on()
    rig.transport.start(rig.write(2, "c", [2], SLOT))
    assert await end_of(rig, 2) is None
    assert rig.block("a", 2) == rig.source_block(2)
    assert network.connections == 2
    await rig.transport.close()
    await network.close()
    await reader
    for one in rig.targets.values():
        await one.close()
    rig.forget()


async def test_what_was_on_its_way_ends_with_the_address_and_what_waited_goes(
    rig: Bench, network: Network
) -> None:
    network.swallow()
    for number in range(4):
        rig.transport.start(rig.write(number, "c", LARGE))
    rig.transport.start(rig.write(4, "b", LARGE))
    assert await end_of(rig, 4) is None  # a stuck network delays no other peer
    assert len(rig.ends) == 1
    network.cut()
    network.pass_on()
    assert f"tcp to {LOCAL}:{network.port}: " in str(await end_of(rig, 0))
    assert [await end_of(rig, number) for number in range(1, 4)] == [None] * 3
    assert network.connections == 4  # connected again, once
    assert rig.block("a", 3) == rig.source_block(3)


async def test_a_target_that_is_gone_ends_each_write_with_its_address(rig: Bench) -> None:
    port = offer_of(target(rig)).port
    await target(rig).close()
    for number in range(3):
        rig.transport.start(rig.write(number, "a", [1]))
    for number in range(3):
        assert f"tcp to {LOCAL}:{port}: " in str(await end_of(rig, number))
    rig.transport.start(rig.write(3, "b", [1]))
    assert await end_of(rig, 3) is None


async def test_a_write_that_waits_for_a_dead_network_can_be_aborted(
    rig: Bench, network: Network
) -> None:
    network.swallow()
    for number in range(20):
        rig.transport.start(rig.write(number, "c", LARGE))
    rig.transport.abort(19)
    assert await rig.ended(1) == [Ended(19, "aborted")]


@pytest.mark.e2e
async def test_an_abort_on_a_stopped_target_ends_when_it_goes_on(rig: Bench) -> None:
    async with _child(rig) as child:
        child.send_signal(signal.SIGSTOP)
        rig.transport.start(rig.write(1, "c", LARGE))
        rig.transport.abort(1)
        rig.transport.start(rig.write(2, "b", LARGE))
        assert await end_of(rig, 2) is None
        assert len(rig.ends) <= 2
        child.send_signal(signal.SIGCONT)
        assert await end_of(rig, 1) == "aborted"


@asynccontextmanager
async def _child(rig: Bench) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.data.target", "tcp", stdin=PIPE, stdout=PIPE
    )
    try:
        assert child.stdout is not None
        await rig.transport.attach(parsed((await child.stdout.readline()).decode().strip(), "c"))
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()
