"""Checksums of KV parts: where they lie, how they travel, and what they find."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from pdrt.data.checksums import Cells, Corrupt, Parts, checksums, starts_of, sum_runs
from pdrt.data.layout import NO_RUNS, Runs, merged_runs
from pdrt.data.memory import SUM_BYTES, PoolMemory
from pdrt.data.transport.checked import CheckedTransport
from pdrt.data.transport.promise import Ended, Peer, Write
from pdrt.data.transport.shm import ShmTransport
from pdrt.messages import KvLayout
from tests.data.transports import KEY, LAYOUT, Bench, bench

PART = LAYOUT.head_bytes
HERE, THERE = Parts(4096, 512, 128), Parts(8192, 1024, 64)
SLOT = bytes(range(64))
NEVER = bool  # is not stopped


def runs_of(*rows: tuple[int, int, int]) -> Runs:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def test_a_run_of_parts_has_a_run_of_cells() -> None:
    runs = runs_of((4096 + 3 * PART, 8192 + 9 * PART, 2 * PART), (4096, 8192 + PART, PART))
    assert sum_runs(runs, PART, HERE, THERE).tolist() == [
        [512 + 12, 1024 + 36, 8],
        [512, 1024 + 4, 4],
    ]
    assert sum_runs(NO_RUNS, PART, HERE, THERE).tolist() == []


@given(
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), max_size=20),
    st.integers(1, 4),
    st.sampled_from([1, 8, 96]),
)
def test_each_part_and_its_cell_go_to_the_same_number(
    pairs: list[tuple[int, int]], heads: int, part: int
) -> None:
    src, dst = [s for s, _ in pairs], [d for _, d in pairs]
    here, there = Parts(100, 7, 64 * heads), Parts(5000, 3, 64 * heads)
    runs = merged_runs(src, dst, heads * part, here.pool_at, there.pool_at)
    cells = sum_runs(runs, part, here, there)
    parts = [
        ((s - here.pool_at) // part + n, (d - there.pool_at) // part + n)
        for s, d, length in runs.tolist()
        for n in range(length // part)
    ]
    carried = [
        ((s - here.sums_at) // SUM_BYTES + n, (d - there.sums_at) // SUM_BYTES + n)
        for s, d, length in cells.tolist()
        for n in range(length // SUM_BYTES)
    ]
    assert carried == parts
    assert starts_of(runs, part) == [here.pool_at + number * part for number, _ in parts]


@pytest.mark.parametrize(
    ("run", "cause"),
    [
        ((4096 + 1, 8192, PART), "not whole parts"),
        ((4096, 8192 + 1, PART), "not whole parts"),
        ((4096, 8192, PART - 1), "not whole parts"),
        ((0, 8192, PART), "outside the memory"),
        ((4096, 0, PART), "outside the memory"),
        ((4096 + 127 * PART, 8192, 2 * PART), "outside the memory"),
        ((4096, 8192 + 63 * PART, 2 * PART), "outside the memory"),
    ],
)
def test_what_has_no_cells_is_refused(run: tuple[int, int, int], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        sum_runs(runs_of(run), PART, HERE, THERE)


def test_computing_stops_between_two_parts() -> None:
    view = memoryview(bytes(range(256)))
    asked = iter([False, False, True])
    assert checksums(view, range(0, 256, 64), 64, lambda: next(asked)) is None
    sums = checksums(view, range(0, 256, 64), 64, NEVER)
    assert sums is not None
    assert sums.tolist() == [crc32c(view[at : at + 64]) for at in range(0, 256, 64)]


@pytest.fixture
def memory() -> PoolMemory:
    memory = PoolMemory(LAYOUT, 16, 1)
    memory.pool_view[:] = (np.arange(16 * LAYOUT.block_bytes) % 253).astype(np.uint8).tobytes()
    return memory


def cell(memory: PoolMemory, block: int, head: int) -> int:
    at = memory.sums_at + SUM_BYTES * (block * LAYOUT.kv_heads + head)
    return int.from_bytes(memory.view[at : at + SUM_BYTES], "little")


def part(memory: PoolMemory, block: int, head: int) -> memoryview:
    at = block * LAYOUT.block_bytes + head * PART
    return memory.pool_view[at : at + PART]


def sign(memory: PoolMemory, *blocks: int) -> None:
    """As a writer does."""
    for block in blocks:
        for head in range(LAYOUT.kv_heads):
            at = memory.sums_at + SUM_BYTES * (block * LAYOUT.kv_heads + head)
            data = crc32c(part(memory, block, head)).to_bytes(4, "little")
            memory.view[at : at + SUM_BYTES] = data


def test_signed_blocks_are_sound_in_any_order(memory: PoolMemory) -> None:
    sign(memory, 3, 9, 4)
    assert Cells(memory).corrupt([9, 3, 4]) is None
    assert Cells(memory).corrupt([]) is None


@pytest.mark.parametrize(("block", "head"), [(9, 0), (9, 1), (3, 1), (4, 0)])
def test_one_wrong_bit_is_found_where_it_is(memory: PoolMemory, block: int, head: int) -> None:
    order = [9, 3, 4]
    sign(memory, *order)
    part(memory, block, head)[7] ^= 16
    assert Cells(memory).corrupt(order) == Corrupt(1, order.index(block), block, head)


def test_the_first_is_named_and_all_are_counted(memory: PoolMemory) -> None:
    sign(memory, 3, 9, 4)
    for block in (9, 4):
        for head in (0, 1):
            part(memory, block, head)[0] ^= 1
    assert Cells(memory).corrupt([3, 9, 4]) == Corrupt(2, 1, 9, 0)


def test_what_an_earlier_owner_left_counts_for_nothing_once_it_is_wiped(
    memory: PoolMemory,
) -> None:
    """A writer that never came must not pass for one that wrote the same block before."""
    cells = Cells(memory)
    sign(memory, *range(16))
    cells.wipe([3, 9])
    assert cells.corrupt([3, 9]) == Corrupt(2, 0, 3, 0)
    assert cells.corrupt([2, 4, 8, 10]) is None


# On the way.


@pytest.fixture
async def rig() -> AsyncIterator[Bench]:
    """Peer `a` asks for checksums, peer `b` does not."""
    rig = bench("shm")
    rig.transport = CheckedTransport(rig.transport, rig.source)
    reader = asyncio.create_task(rig.read())
    for name in rig.peers:
        peer = rig.peer(name)
        await rig.transport.attach(Peer(peer.name, peer.process, peer.region, name == "a"))
    yield rig
    await rig.transport.close()
    await reader
    for target in rig.targets.values():
        await target.close()
    rig.forget()


async def test_a_peer_that_asks_gets_checksums_and_others_do_not(rig: Bench) -> None:
    for number, name in enumerate("ab"):
        rig.transport.start(rig.write(number, name, [3, 4, 9], SLOT))
    assert {end.error for end in await rig.ended(2)} == {None}
    assert Cells(rig.peers["a"]).corrupt([3, 4, 9]) is None
    assert Cells(rig.peers["a"]).corrupt([5]) == Corrupt(1, 0, 5, 0)
    assert bytes(rig.peers["a"].slots_view[:64]) == SLOT
    assert rig.block("b", 9) == rig.source_block(9)
    assert not rig.peers["b"].array[rig.peers["b"].sums_at : rig.peers["b"].pool_at].any()


async def test_parts_of_other_blocks_and_heads_are_signed_where_they_land(rig: Bench) -> None:
    """Unequal tensor parallelism: one head of a block here is another head of a block there."""
    source, target = rig.source, rig.peers["a"]
    run = (source.pool_at + (5 * 2 + 1) * PART, target.pool_at + (8 * 2 + 0) * PART, PART)
    rig.transport.start(Write(1, "a", runs_of(run), key=KEY))
    assert await rig.ended(1) == [Ended(1)]
    assert cell(target, 8, 0) == crc32c(part(source, 5, 1)) == crc32c(part(target, 8, 0))
    assert cell(target, 8, 1) == 0
    assert Cells(target).corrupt([8]) == Corrupt(1, 0, 8, 1)


async def test_probes_and_slots_alone_are_passed_on(rig: Bench) -> None:
    probe = rig.source.probe_at, rig.peers["a"].probe_at, 100
    rig.transport.start(Write(1, "a", runs_of(probe)))
    rig.transport.start(rig.write(2, "a", [], SLOT))
    assert sorted(end.id for end in await rig.ended(2)) == [1, 2]
    assert all(end.error is None for end in rig.ends)
    assert rig.peers["a"].array[probe[1] : probe[1] + 100].all()


async def test_what_cannot_be_signed_is_an_error_at_its_end(rig: Bench) -> None:
    run = rig.source.pool_at + 1, rig.peers["a"].pool_at, PART
    rig.transport.start(Write(1, "a", runs_of(run), key=KEY))
    assert await rig.ended(1) == [Ended(1, f"a run is not whole parts of {PART} bytes")]


class Gate:
    """A memory whose bytes are only read when the test lets them be."""

    def __init__(self, memory: PoolMemory) -> None:
        self.reached, self.is_open = threading.Event(), threading.Event()
        self._view = memory.view

    def __getitem__(self, places: slice) -> memoryview:
        self.reached.set()
        assert self.is_open.wait(10)
        return self._view[places]


@pytest.mark.parametrize("how", ["abort", "detach", "close"])
async def test_what_is_given_up_while_it_is_computed_never_begins(rig: Bench, how: str) -> None:
    gate = Gate(rig.source)
    rig.source.view = gate  # type: ignore[assignment]
    rig.transport.start(rig.write(1, "a", [3, 4], SLOT))
    await asyncio.to_thread(gate.reached.wait, 10)
    closing = None
    if how == "abort":
        rig.transport.abort(1)
        rig.transport.abort(1)
    elif how == "detach":
        rig.transport.detach("a")
    else:
        closing = asyncio.create_task(rig.transport.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not rig.ends, "the thread still reads its memory"
    gate.is_open.set()
    (end,) = await rig.ended(1)
    if closing:
        await closing
    assert end.id == 1
    assert end.error in {"aborted", "the peer is gone", "the transport is closed"}
    assert not rig.peers["a"].array.any()


async def test_a_write_whose_checksums_fail_ends_with_the_reason(rig: Bench) -> None:
    class Broken:
        def __getitem__(self, _places: slice) -> memoryview:
            raise OSError("the page is bad")

    rig.source.view = Broken()  # type: ignore[assignment]
    rig.transport.start(rig.write(1, "a", [3]))
    assert await rig.ended(1) == [Ended(1, "no checksums: the page is bad")]


async def test_no_thread_is_started_before_somebody_asks() -> None:
    memory = PoolMemory(LAYOUT, 4, 1)
    before = threading.active_count()
    inner = ShmTransport(memory, threads=0)
    transport = CheckedTransport(inner, memory)
    transport.start(Write(1, "nobody", key=KEY))
    async for end in transport.ends():
        assert end == Ended(1, "nobody is not attached")
        break
    assert threading.active_count() == before
    await transport.close()
    memory.close()


def test_a_latent_block_is_one_part() -> None:
    latent = KvLayout(block_size=4, dtype="uint8", layers=2, kv_heads=1, head_dim=8, kind="latent")
    memory = PoolMemory(latent, 4, 1)
    assert Parts.of(memory, latent.head_bytes).count >= 4
    cells = Cells(memory)
    memory.view[memory.sums_at : memory.sums_at + 4] = crc32c(bytes(latent.head_bytes)).to_bytes(
        4, "little"
    )
    assert cells.corrupt([0]) is None
    assert cells.corrupt([0, 1]) == Corrupt(1, 1, 1, 0)
