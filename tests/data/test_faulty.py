"""Faults on command over each transport: what each does to a write, and that it ends once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.config import FaultSection
from pdrt.data.layout import Runs
from pdrt.data.transport.faulty import (
    Fault,
    FaultyTransport,
    halves_exchanged,
    truncated,
)
from pdrt.data.transport.promise import Ended, SlotWrite, Write
from tests.data.transports import KEY, MAKERS, bench

SLOT = bytes(range(64))
OVER: Final = [name for name in ("shm", "tcp") if name in MAKERS]
HOLDING: Final = [Fault.DELAY, Fault.STALL, Fault.REORDER]
KEEPING: Final = [*HOLDING, Fault.DROP]


class FaultyBench:
    """A bench whose transport has faults; `kills` counts what would have been our end."""

    def __init__(self, over: str, faults: FaultSection | None = None) -> None:
        self.kills = 0
        self.bench = bench(over)
        self.faulty = FaultyTransport(self.bench.transport, faults, self._kill)
        self.bench.transport = self.faulty
        self._reader = asyncio.create_task(self.bench.read())

    def _kill(self) -> None:
        self.kills += 1

    def start(
        self, number: int, *blocks: int, slot: bytes | None = None, fault: Fault | None = None
    ) -> None:
        self.faulty.next_writes(fault)
        self.faulty.start(self.bench.write(number, "a", blocks, slot))

    async def close(self) -> None:
        await self.faulty.close()
        await self._reader
        for target in self.bench.targets.values():
            await target.close()
        self.bench.forget()

    @property
    def landed(self) -> set[int]:
        """Blocks of `a` that are as they should be."""
        return {b for b in range(16) if self.bench.block("a", b) == self.bench.source_block(b)}

    @property
    def is_untouched(self) -> bool:
        memory = self.bench.peers["a"]
        return not (any(memory.pool_view) or any(memory.slots_view))

    @property
    def slot(self) -> bytes:
        return bytes(self.bench.peers["a"].slots_view[:64])


@pytest.fixture(params=OVER)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[FaultyBench]:
    rig = FaultyBench(request.param)
    await rig.bench.attach_all()
    yield rig
    await rig.close()


@pytest.mark.parametrize("fault", HOLDING)
async def test_a_held_write_touches_nothing_until_it_is_released(
    rig: FaultyBench, fault: Fault
) -> None:
    rig.start(1, 2, slot=SLOT, fault=fault)
    assert rig.faulty.held == (1,)
    assert rig.is_untouched
    rig.faulty.release(1)
    assert await rig.bench.ended(1) == [Ended(1)]
    assert rig.landed == {2}


@pytest.mark.parametrize("fault", HOLDING)
async def test_a_held_write_that_is_aborted_never_touches_memory(
    rig: FaultyBench, fault: Fault
) -> None:
    rig.start(1, 2, slot=SLOT, fault=fault)
    rig.faulty.abort(1)
    assert await rig.bench.ended(1) == [Ended(1, "aborted")]
    rig.faulty.release(1)
    await rig.faulty.close()
    assert rig.is_untouched
    assert rig.bench.ends == [Ended(1, "aborted")]


async def test_a_reordered_write_lets_a_later_one_pass(rig: FaultyBench) -> None:
    rig.start(1, 2, fault=Fault.REORDER)
    rig.start(2, 3)
    assert await rig.bench.ended(2) == [Ended(2), Ended(1)]
    assert rig.landed == {2, 3}


async def test_a_dropped_completion_comes_when_the_write_is_aborted(rig: FaultyBench) -> None:
    """CASES 10: the data has landed; only the news is missing. The next write works."""
    rig.start(1, 2, slot=SLOT, fault=Fault.DROP)
    while rig.faulty.kept != (1,):
        await asyncio.sleep(0)
    assert (rig.landed, rig.slot) == ({2}, SLOT)
    rig.start(2, 3)
    assert await rig.bench.ended(1) == [Ended(2)]
    rig.faulty.abort(1)
    assert await rig.bench.ended(2) == [Ended(2), Ended(1)]
    assert rig.landed == {2, 3}


async def test_a_truncated_write_ends_well_with_half_its_bytes_and_no_slot(
    rig: FaultyBench,
) -> None:
    rig.start(1, 2, 5, 8, 11, slot=SLOT, fault=Fault.TRUNCATE)
    rig.start(2, slot=None, fault=Fault.TRUNCATE)
    assert sorted(end.id for end in await rig.bench.ended(2)) == [1, 2]
    assert all(end.error is None for end in rig.bench.ends)
    assert rig.landed == {2, 5}
    assert not any(rig.slot)


async def test_a_corrupted_write_ends_well_with_wrong_bytes_in_one_run(rig: FaultyBench) -> None:
    rig.start(1, 2, 5, 8, 11, fault=Fault.CORRUPT)
    assert await rig.bench.ended(1) == [Ended(1)]
    (wrong,) = {2, 5, 8, 11} - rig.landed
    found, sent = rig.bench.block("a", wrong), rig.bench.source_block(wrong)
    half = len(sent) // 2
    assert found == sent[half:] + sent[:half]


async def test_a_corrupted_write_of_a_slot_has_one_wrong_byte_in_it(rig: FaultyBench) -> None:
    rig.start(1, slot=SLOT, fault=Fault.CORRUPT)
    assert await rig.bench.ended(1) == [Ended(1)]
    assert sum(a != b for a, b in zip(rig.slot, SLOT, strict=True)) == 1


async def test_what_has_neither_bytes_nor_slot_cannot_be_corrupted(rig: FaultyBench) -> None:
    rig.start(1, fault=Fault.CORRUPT)
    assert await rig.bench.ended(1) == [Ended(1)]
    assert rig.is_untouched


async def test_a_doubled_end_is_told_twice(rig: FaultyBench) -> None:
    rig.start(1, 2, slot=SLOT, fault=Fault.DUPLICATE)
    assert await rig.bench.ended(2) == [Ended(1), Ended(1)]
    assert (rig.landed, rig.slot) == ({2}, SLOT)


async def test_the_process_kills_itself_when_half_the_write_has_begun(rig: FaultyBench) -> None:
    rig.start(1, 2, 5)
    rig.start(2, 8, 11, slot=SLOT, fault=Fault.KILL)
    assert rig.kills == 1
    await rig.bench.ended(2)
    assert rig.landed == {2, 5, 8}
    assert not any(rig.slot)


@pytest.mark.parametrize("fault", list(Fault))
async def test_a_probe_is_left_alone(rig: FaultyBench, fault: Fault) -> None:
    rig.faulty.next_writes(fault)
    source, target = rig.bench.source, rig.bench.peers["a"]
    probe = np.array([[source.probe_at, target.probe_at, 4096]], dtype=np.int64)
    rig.faulty.start(Write(1, "a", probe, SlotWrite(target.probe_at + 4096, SLOT)))
    assert await rig.bench.ended(1) == [Ended(1)]
    at = target.probe_at
    assert bytes(target.view[at : at + 4096]) == bytes(
        source.view[source.probe_at : source.probe_at + 4096]
    )
    assert bytes(target.view[at + 4096 : at + 4160]) == SLOT
    assert rig.kills == 0


@pytest.mark.parametrize("fault", list(Fault))
async def test_whatever_befalls_a_write_it_ends_at_close(rig: FaultyBench, fault: Fault) -> None:
    rig.start(1, 2, 4, slot=SLOT, fault=fault)
    await rig.faulty.close()
    ends = await rig.bench.ended(1)
    assert {end.id for end in ends} == {1}
    assert len(ends) == 1 or fault is Fault.DUPLICATE


@pytest.mark.parametrize("fault", KEEPING)
async def test_whatever_befalls_a_write_it_ends_with_its_peer(
    rig: FaultyBench, fault: Fault
) -> None:
    rig.start(1, 2, slot=SLOT, fault=fault)
    rig.faulty.detach("a")
    assert [end.id for end in await rig.bench.ended(1)] == [1]


async def test_after_close_nothing_is_held_back_any_more(rig: FaultyBench) -> None:
    await rig.faulty.close()
    rig.start(1, 2, fault=Fault.STALL)
    assert rig.faulty.held == ()


# By chance.


async def test_faults_by_chance_follow_their_seed() -> None:
    held = []
    for _ in range(2):
        rig = FaultyBench("shm", FaultSection(truncate=0.3, stall=0.3, seed=7))
        await rig.bench.attach_all()
        for number in range(20):
            rig.faulty.start(rig.bench.write(number, "a", [1]))
        held.append(rig.faulty.held)
        await rig.close()
    assert held[0] == held[1]
    assert 0 < len(held[0]) < 20


@pytest.mark.parametrize("fault", list(Fault))
async def test_each_fault_can_be_configured(fault: Fault) -> None:
    rig = FaultyBench("shm", FaultSection.model_validate({fault.value: 1.0}))
    await rig.bench.attach_all()
    rig.faulty.start(rig.bench.write(1, "a", [2, 5], SLOT))
    if fault is Fault.DELAY:
        await rig.bench.ended(1)  # within delay_s, which is 0
    assert (rig.faulty.held == (1,)) is (fault in (Fault.STALL, Fault.REORDER))
    assert rig.kills == (fault is Fault.KILL)
    await rig.close()
    assert Counter(end.id for end in rig.bench.ends) == {1: 1 + (fault is Fault.DUPLICATE)}


async def test_a_broken_inner_stream_breaks_ours() -> None:
    """Else a manager would wait for ever for ends that nobody will tell."""
    inner = bench("shm")

    class Broken(FaultyTransport):
        async def ends(self) -> AsyncIterator[Ended]:
            yield Ended(7)
            raise OSError("the engine is gone")

    transport = FaultyTransport(Broken(inner.transport))
    with pytest.raises(OSError, match="the engine is gone"):
        assert not [end async for end in transport.ends()]
    await inner.transport.close()
    for target in inner.targets.values():
        await target.close()
    inner.forget()


# The pure part.

RUNS = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 100)), max_size=6
).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 3))


@given(RUNS)
def test_truncating_keeps_the_first_half_of_the_bytes(runs: Runs) -> None:
    write = Write(1, "a", runs, SlotWrite(0, SLOT), KEY)
    cut = truncated(write)
    assert cut.slot is None
    assert int(cut.runs[:, 2].sum()) == int(runs[:, 2].sum()) // 2
    assert bytes_of(cut.runs) == bytes_of(runs)[: int(runs[:, 2].sum()) // 2]


@given(RUNS.filter(lambda runs: len(runs) > 0), st.data())
def test_exchanging_halves_writes_the_same_places_from_the_same_bytes(
    runs: Runs, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(runs) - 1))
    turned = halves_exchanged(runs, place)
    before, after = bytes_of(runs), bytes_of(turned)
    assert sorted(s for s, _ in after) == sorted(s for s, _ in before)
    assert sorted(d for _, d in after) == sorted(d for _, d in before)
    assert runs[place, 2] == 1 or after != before


def bytes_of(runs: Runs) -> list[tuple[int, int]]:
    """(source, destination) of each byte, in order."""
    return [(s + n, d + n) for s, d, length in runs.tolist() for n in range(length)]
