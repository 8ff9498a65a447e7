"""Faults on command: what each does to a write, and that it ends once all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdrt.config import FaultSection
from pdrt.data.transport.faulty import Fault, FaultyTransport
from pdrt.data.transport.promise import Ended
from tests.data.transports import Bench, bench

SLOT = bytes(range(64))


@pytest.fixture
async def rig() -> AsyncIterator[Bench]:
    rig = bench("faulty")
    reader = asyncio.create_task(rig.read())
    await rig.attach_all()
    yield rig
    await rig.transport.close()
    await reader
    rig.forget()


def faulty(rig: Bench) -> FaultyTransport:
    assert isinstance(rig.transport, FaultyTransport)
    return rig.transport


@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.STALL, Fault.REORDER])
async def test_a_held_write_touches_nothing_until_it_is_released(rig: Bench, fault: Fault) -> None:
    faulty(rig).next_writes(fault)
    rig.transport.start(rig.write(1, "a", [2], SLOT))
    assert faulty(rig).held == (1,)
    assert not rig.peers["a"].array.any()
    faulty(rig).release(1)
    assert await rig.ended(1) == [Ended(1)]
    assert rig.block("a", 2) == rig.source_block(2)


@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.STALL, Fault.REORDER])
async def test_a_held_write_that_is_aborted_never_touches_memory(rig: Bench, fault: Fault) -> None:
    faulty(rig).next_writes(fault)
    rig.transport.start(rig.write(1, "a", [2], SLOT))
    rig.transport.abort(1)
    assert await rig.ended(1) == [Ended(1, "aborted")]
    faulty(rig).release(1)
    assert not rig.peers["a"].array.any()


async def test_a_reordered_write_lets_a_later_one_pass(rig: Bench) -> None:
    faulty(rig).next_writes(Fault.REORDER)
    rig.transport.start(rig.write(1, "a", [2]))
    rig.transport.start(rig.write(2, "a", [3]))
    assert await rig.ended(2) == [Ended(2), Ended(1)]


async def test_a_dropped_completion_comes_when_the_write_is_aborted(rig: Bench) -> None:
    """CASES 10: the data has landed; only the news is missing."""
    faulty(rig).next_writes(Fault.DROP)
    rig.transport.start(rig.write(1, "a", [2], SLOT))
    rig.transport.start(rig.write(2, "a", [3]))
    assert await rig.ended(1) == [Ended(2)]  # in order for one peer: so write 1 is over as well
    assert faulty(rig).kept == (1,)
    assert bytes(rig.peers["a"].slots_view[:64]) == SLOT
    rig.transport.abort(1)
    assert await rig.ended(2) == [Ended(2), Ended(1)]


async def test_a_truncated_write_ends_well_without_its_slot(rig: Bench) -> None:
    faulty(rig).next_writes(Fault.TRUNCATE)
    rig.transport.start(rig.write(1, "a", [2, 5, 8, 11], SLOT))
    assert await rig.ended(1) == [Ended(1)]
    assert any(rig.block("a", 2))
    assert not any(rig.block("a", 11))
    assert not any(rig.peers["a"].slots_view)


async def test_a_corrupted_write_has_one_wrong_byte_in_its_slot(rig: Bench) -> None:
    faulty(rig).next_writes(Fault.CORRUPT)
    rig.transport.start(rig.write(1, "a", [2], SLOT))
    assert await rig.ended(1) == [Ended(1)]
    landed = bytes(rig.peers["a"].slots_view[:64])
    assert sum(a != b for a, b in zip(landed, SLOT, strict=True)) == 1


async def test_a_doubled_end_is_told_twice(rig: Bench) -> None:
    faulty(rig).next_writes(Fault.DUPLICATE)
    rig.transport.start(rig.write(1, "a", [2]))
    assert await rig.ended(2) == [Ended(1), Ended(1)]


@pytest.mark.parametrize("fault", list(Fault))
async def test_whatever_befalls_a_write_it_ends_at_close(rig: Bench, fault: Fault) -> None:
    faulty(rig).next_writes(fault)
    rig.transport.start(rig.write(1, "a", [2, 4], SLOT))
    await rig.transport.close()
    ends = await rig.ended(1)
    assert {end.id for end in ends} == {1}
    assert len(ends) == 1 or fault is Fault.DUPLICATE


@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.STALL, Fault.REORDER, Fault.DROP])
async def test_whatever_befalls_a_write_it_ends_with_its_peer(rig: Bench, fault: Fault) -> None:
    faulty(rig).next_writes(fault)
    rig.transport.start(rig.write(1, "a", [2], SLOT))
    rig.transport.detach("a")
    assert [end.id for end in await rig.ended(1)] == [1]


async def test_faults_by_chance_follow_their_seed() -> None:
    counts = []
    for _ in range(2):
        plain = bench("shm")
        chances = FaultSection(truncate=0.3, stall=0.3, seed=7)
        transport = FaultyTransport(plain.transport, chances)
        rig = Bench(transport, plain.source, plain.peers, plain.targets)
        reader = asyncio.create_task(rig.read())
        await rig.attach_all()
        for number in range(20):
            transport.start(rig.write(number, "a", [1]))
        counts.append(transport.held)
        await transport.close()
        await reader
        rig.forget()
    assert counts[0] == counts[1]
    assert 0 < len(counts[0]) < 20
