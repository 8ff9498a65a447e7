"""The contract of every transport: each started write ends once, and then touches nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from pdrt.config import FaultSection, TransferSection
from pdrt.data.memory import PoolMemory
from pdrt.data.transport.choose import open_transport
from pdrt.data.transport.faulty import FaultyTransport
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Write
from pdrt.errors import TransferFailed
from tests.data.transports import BLOCKS, LAYOUT, Bench, bench

SLOT = bytes(range(64))


@pytest.fixture(params=["shm", "at once", "faulty", "delayed"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    rig = bench(request.param)
    reader = asyncio.create_task(rig.read())
    await rig.attach_all()
    yield rig
    await rig.transport.close()
    await reader  # the stream of ends ends with the transport
    rig.forget()


async def test_a_write_copies_its_blocks_and_its_slot_and_ends_once(rig: Bench) -> None:
    rig.transport.start(rig.write(1, "a", [3, 4, 9], SLOT))
    assert await rig.ended(1) == [Ended(1)]
    for block in (3, 4, 9):
        assert rig.block("a", block) == rig.source_block(block)
    assert bytes(rig.peers["a"].slots_view[:64]) == SLOT
    assert not any(rig.block("a", 5))
    assert not any(rig.block("b", 3))


async def test_a_write_of_a_slot_alone_is_a_write(rig: Bench) -> None:
    rig.transport.start(rig.write(1, "a", [], SLOT))
    assert await rig.ended(1) == [Ended(1)]
    assert bytes(rig.peers["a"].slots_view[:64]) == SLOT


async def test_writes_to_several_peers_all_end(rig: Bench) -> None:
    for number in range(200):
        rig.transport.start(rig.write(number, "ab"[number % 2], [number % BLOCKS]))
    ends = await rig.ended(200)
    assert sorted(end.id for end in ends) == list(range(200))
    assert all(end.error is None for end in ends)


async def test_an_aborted_write_ends_once_too(rig: Bench) -> None:
    for number in range(50):
        rig.transport.start(rig.write(number, "a", range(BLOCKS)))
        rig.transport.abort(number)
        rig.transport.abort(number)
    ends = await rig.ended(50)
    rig.transport.abort(3)  # over
    rig.transport.abort(777)  # unknown
    await rig.transport.close()
    assert sorted(end.id for end in ends) == list(range(50))


async def test_the_writes_of_a_lost_peer_end_and_the_others_go_on(rig: Bench) -> None:
    for number in range(40):
        rig.transport.start(rig.write(number, "ab"[number % 2], range(BLOCKS)))
    rig.transport.detach("a")
    rig.transport.detach("a")
    ends = {end.id: end.error for end in await rig.ended(40)}
    assert len(ends) == 40
    assert all(ends[number] is None for number in range(1, 40, 2))
    rig.transport.start(rig.write(40, "a", [1]))
    assert (await rig.ended(41))[-1] == Ended(40, "a is not attached")


async def test_closing_ends_every_write_and_nothing_is_touched_afterwards(rig: Bench) -> None:
    for number in range(40):
        rig.transport.start(rig.write(number, "ab"[number % 2], range(BLOCKS), SLOT))
    await rig.transport.close()
    ends = await rig.ended(40)
    assert sorted(end.id for end in ends) == list(range(40))
    before = [rig.peers[name].array.copy() for name in "ab"]
    rig.source.array[:] = 255
    rig.transport.start(rig.write(40, "a", [1]))
    await rig.transport.close()
    assert [
        np.array_equal(kept, rig.peers[name].array) for kept, name in zip(before, "ab", strict=True)
    ] == [True, True]


async def test_after_its_end_a_write_does_not_touch_memory(rig: Bench) -> None:
    """CASES 50: the block belongs to somebody else the moment the end is told."""
    for number in range(100):
        rig.transport.start(rig.write(number, "a", [7], SLOT))
        if number % 2:
            rig.transport.abort(number)
        await rig.ended(number + 1)
        rig.peers["a"].array[:] = 0
        for _ in range(5):
            await asyncio.sleep(0)
        assert not rig.peers["a"].array.any()


async def test_a_write_that_is_aborted_while_it_copies_stops_before_it_ends() -> None:
    rig = bench("shm")
    reader = asyncio.create_task(rig.read())
    await rig.attach_all()
    target = rig.peers["a"].array
    rig.transport.start(rig.write(1, "a", [*range(BLOCKS)] * 20_000))  # 2.5 GiB
    while not target.any():
        await asyncio.sleep(0)
    rig.transport.abort(1)
    assert await rig.ended(1) == [Ended(1, "aborted")]
    target[:] = 0
    for _ in range(200):
        await asyncio.sleep(0)
    assert not target.any()
    await rig.transport.close()
    await reader
    assert rig.ends == [Ended(1, "aborted")]
    rig.forget()


async def test_a_peer_that_was_never_attached_is_an_error_at_the_end(rig: Bench) -> None:
    rig.transport.start(Write(1, "nobody"))
    assert await rig.ended(1) == [Ended(1, "nobody is not attached")]


@pytest.mark.parametrize("at", [(-1, 0), (0, -1), (1 << 40, 0), (0, 1 << 40)])
async def test_a_run_outside_either_memory_is_an_error_at_the_end(
    rig: Bench, at: tuple[int, int]
) -> None:
    rig.transport.start(Write(1, "a", np.array([[*at, 8]])))
    assert await rig.ended(1) == [Ended(1, "a run lies outside the memory")]


async def test_a_slot_outside_the_memory_is_an_error_at_the_end(rig: Bench) -> None:
    at = rig.peers["a"].size - 63
    rig.transport.start(Write(1, "a", slot=SlotWrite(at, SLOT)))
    assert await rig.ended(1) == [Ended(1, "a run lies outside the memory")]


async def test_attaching_twice_is_attaching_once(rig: Bench) -> None:
    await rig.transport.attach(rig.peer("a"))
    rig.transport.start(rig.write(1, "a", [1]))
    assert await rig.ended(1) == [Ended(1)]


async def test_what_another_transport_offers_cannot_be_attached(rig: Bench) -> None:
    memory = rig.peers["a"]
    region = memory.region({"rdma": memory.handle()})
    with pytest.raises(TransferFailed, match="offers rdma, not shm"):
        await rig.transport.attach(Peer("c", rig.peer("a").process, region))


async def test_a_slow_peer_does_not_delay_the_others() -> None:
    """One queue for each peer: b's small write ends before a's large ones."""
    rig = bench("shm")
    reader = asyncio.create_task(rig.read())
    await rig.attach_all()
    for number in range(60):
        rig.transport.start(rig.write(number, "a", [*range(BLOCKS)] * 32))  # 4 MiB each
    rig.transport.start(rig.write(1000, "b", [1]))
    ends = await rig.ended(61)
    assert [end.id for end in ends].index(1000) < 60
    await rig.transport.close()
    await reader
    rig.forget()


async def test_auto_is_shm_and_faults_are_wrapped_around_it() -> None:
    memory = PoolMemory(LAYOUT, 2, 1)
    plain = open_transport(TransferSection(threads=1), memory)
    faulty = open_transport(TransferSection(threads=1, faults=FaultSection(drop=1.0)), memory)
    assert (plain.name, faulty.name) == ("shm", "shm")
    assert isinstance(faulty, FaultyTransport)
    await plain.close()
    await faulty.close()
    memory.close()


async def test_a_small_write_to_an_idle_peer_has_landed_when_start_returns() -> None:
    rig = bench("at once")
    reader = asyncio.create_task(rig.read())
    await rig.attach_all()
    rig.transport.start(rig.write(1, "a", [3], SLOT))
    assert rig.block("a", 3) == rig.source_block(3)
    assert bytes(rig.peers["a"].slots_view[:64]) == SLOT
    assert await rig.ended(1) == [Ended(1)]
    await rig.transport.close()
    await reader
    rig.forget()
