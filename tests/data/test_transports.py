"""The contract of every transport: each started write ends once, and then touches nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE
from asyncio.subprocess import Process as Child
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import numpy as np
import pytest

from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Write
from pdrt.errors import TransferFailed
from tests.data.target import parsed
from tests.data.transports import BLOCKS, KEY, MAKERS, Bench, names, opened

SLOT = bytes(range(64))
LARGE = [*range(BLOCKS - 1)] * 200  # about 50 MiB


@pytest.fixture(params=names())
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
async def rig(name: str) -> AsyncIterator[Bench]:
    async with opened(name) as rig:
        yield rig


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


async def test_a_write_of_nothing_ends_too(rig: Bench) -> None:
    rig.transport.start(rig.write(1, "a", []))
    assert await rig.ended(1) == [Ended(1)]


async def test_a_probe_lands_in_the_probe_area(rig: Bench) -> None:
    """Without a key a write is a probe: nobody has to admit it."""
    at = rig.peers["a"].probe_at
    rig.transport.start(Write(1, "a", np.array([[0, at, 1 << 20]])))
    assert await rig.ended(1) == [Ended(1)]
    area = rig.peers["a"].array[at : at + (1 << 20)]
    assert np.array_equal(area, rig.source.array[: 1 << 20])


async def test_writes_to_several_peers_all_end(rig: Bench) -> None:
    for number in range(200):
        rig.transport.start(rig.write(number, "ab"[number % 2], [number % BLOCKS]))
    ends = await rig.ended(200)
    assert sorted(end.id for end in ends) == list(range(200))
    assert all(end.error is None for end in ends)
    for block in range(BLOCKS):
        assert rig.block("ab"[block % 2], block) == rig.source_block(block)


async def test_a_large_write_with_many_runs_arrives_whole(rig: Bench) -> None:
    rig.transport.start(rig.write(1, "a", LARGE, SLOT))
    assert await rig.ended(1) == [Ended(1)]
    assert all(rig.block("a", b) == rig.source_block(b) for b in range(BLOCKS - 1))
    assert not any(rig.block("a", BLOCKS - 1))


async def test_the_slot_is_seen_after_all_blocks_and_never_before(rig: Bench) -> None:
    rig.transport.start(rig.write(1, "a", [*([0] * 2000), *range(BLOCKS)], SLOT))
    seen = rig.peers["a"].slots_view
    while seen[63] == 0:
        await asyncio.sleep(0)
    assert all(rig.block("a", b) == rig.source_block(b) for b in range(BLOCKS))
    assert await rig.ended(1) == [Ended(1)]


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
    rig.transport.detach("nobody")
    ends = {end.id: end.error for end in await rig.ended(40)}
    assert len(ends) == 40
    assert all(ends[number] is None for number in range(1, 40, 2))
    rig.transport.start(rig.write(40, "a", [1]))
    assert (await rig.ended(41))[-1] == Ended(40, "a is not attached")


async def test_a_lost_peer_can_be_attached_again(rig: Bench) -> None:
    rig.transport.start(rig.write(1, "a", LARGE))
    rig.transport.detach("a")
    await rig.transport.attach(rig.peer("a"))
    rig.transport.start(rig.write(2, "a", [3], SLOT))
    ends = {end.id: end.error for end in await rig.ended(2)}
    assert ends[2] is None
    assert rig.block("a", 3) == rig.source_block(3)


async def test_closing_ends_every_write_and_nothing_is_touched_afterwards(rig: Bench) -> None:
    for number in range(40):
        rig.transport.start(rig.write(number, "ab"[number % 2], LARGE, SLOT))
    await rig.transport.close()
    before = [rig.peers[name].array.copy() for name in "ab"]
    rig.source.array[:] = 255
    ends = await rig.ended(40)
    assert sorted(end.id for end in ends) == list(range(40))
    rig.transport.start(rig.write(40, "a", [1]))
    await rig.transport.close()
    for target in rig.targets.values():
        await target.close()
    for kept, name in zip(before, "ab", strict=True):
        assert np.array_equal(kept, rig.peers[name].array)


async def test_after_its_end_a_write_does_not_touch_memory(rig: Bench) -> None:
    """CASES 50: the block belongs to somebody else the moment the end is told."""
    target = rig.peers["a"].array
    for number in range(100):
        rig.transport.start(rig.write(number, "a", [7], SLOT))
        if number % 2:
            rig.transport.abort(number)
        await rig.ended(number + 1)
        target[:] = 0
        for _ in range(5):
            await asyncio.sleep(0)
        assert not target.any()
    await rig.settle("a")
    assert not any(rig.block("a", 7))


async def test_after_its_end_a_write_does_not_read_its_source(rig: Bench) -> None:
    """The block behind a write is computed anew: the new content never arrives."""
    for number in range(100):
        rig.source.pool_view[0] = number
        rig.transport.start(rig.write(number, "a", [0]))
        await rig.ended(number + 1)
        rig.source.pool_view[0] = 255
        assert rig.block("a", 0)[0] == number
    await rig.settle("a")
    assert rig.block("a", 0)[0] == 99


async def test_a_write_that_is_aborted_while_it_copies_stops_before_it_ends(rig: Bench) -> None:
    target = rig.peers["a"].array
    rig.transport.start(rig.write(1, "a", LARGE * 20, SLOT))  # 1 GiB
    while not target.any():
        await asyncio.sleep(0)
    rig.transport.abort(1)
    assert await rig.ended(1) == [Ended(1, "aborted")]
    target[:] = 0
    for _ in range(200):
        await asyncio.sleep(0)
    assert not target.any()
    await rig.settle("a")
    assert not target[: rig.peers["a"].sums_at].any()
    assert not any(rig.block("a", 0))


async def test_a_peer_that_was_never_attached_is_an_error_at_the_end(rig: Bench) -> None:
    rig.transport.start(Write(1, "nobody"))
    assert await rig.ended(1) == [Ended(1, "nobody is not attached")]


@pytest.mark.parametrize("at", [(-1, 0), (0, -1), (1 << 40, 0), (0, 1 << 40)])
async def test_a_run_outside_either_memory_is_an_error_at_the_end(
    rig: Bench, at: tuple[int, int]
) -> None:
    rig.transport.start(Write(1, "a", np.array([[*at, 8]]), key=KEY))
    assert await rig.ended(1) == [Ended(1, "a run lies outside the memory")]


async def test_a_slot_outside_the_memory_is_an_error_at_the_end(rig: Bench) -> None:
    at = rig.peers["a"].size - 63
    rig.transport.start(Write(1, "a", slot=SlotWrite(at, SLOT), key=KEY))
    assert await rig.ended(1) == [Ended(1, "a run lies outside the memory")]


async def test_attaching_twice_is_attaching_once(rig: Bench) -> None:
    await rig.transport.attach(rig.peer("a"))
    rig.transport.start(rig.write(1, "a", [1]))
    assert await rig.ended(1) == [Ended(1)]


async def test_what_another_transport_offers_cannot_be_attached(rig: Bench) -> None:
    region = rig.peers["a"].region({"pigeon": b"grey"})
    with pytest.raises(TransferFailed, match=f"offers pigeon, not {rig.transport.name}"):
        await rig.transport.attach(Peer("c", rig.peer("a").process, region))


@pytest.mark.parametrize("handle", [b"", b"junk", b"\x94\x01\x02\x03\x04", b"\xff" * 200])
async def test_a_handle_that_is_none_cannot_be_attached(rig: Bench, handle: bytes) -> None:
    region = rig.peers["a"].region({rig.transport.name: handle})
    with pytest.raises(TransferFailed):
        await rig.transport.attach(Peer("c", rig.peer("a").process, region))


async def test_a_slow_peer_does_not_delay_the_others(rig: Bench) -> None:
    """One queue for each peer: b's small write ends before a's large ones."""
    for number in range(60):
        rig.transport.start(rig.write(number, "a", [*range(BLOCKS)] * 32))  # 8 MiB each
    rig.transport.start(rig.write(1000, "b", [1]))
    ends = await rig.ended(61)
    assert [end.id for end in ends].index(1000) < 60


async def test_a_revoked_attempt_is_silent_at_once_if_the_target_says_so(rig: Bench) -> None:
    """CASES 50: revocation at the receiver does not ask the writer."""
    key = (9, 1)
    rig.admit_all(key)
    memory = rig.peers["a"].array
    rig.transport.start(rig.write(1, "a", LARGE, SLOT, key))
    while not memory.any():
        await asyncio.sleep(0)
    is_proof = rig.targets["a"].revoke(key, _through(rig))
    memory[:] = 0
    await rig.ended(1)
    await rig.settle("a")
    if is_proof:
        assert not memory[: rig.peers["a"].pool_at].any()
        assert not any(rig.block("a", 0))
        assert rig.ends[0].error


async def test_one_attempt_s_revocation_harms_no_other(rig: Bench) -> None:
    rig.admit_all((9, 1))
    rig.transport.start(rig.write(1, "a", LARGE, None, (9, 1)))
    rig.transport.start(rig.write(2, "a", [3], SLOT))
    rig.targets["a"].revoke((9, 1), _through(rig))
    rig.targets["a"].revoke((9, 1), _through(rig))
    rig.targets["a"].revoke((1 << 62, 0), frozenset())
    ends = {end.id: end.error for end in await rig.ended(2)}
    assert ends[2] is None
    assert bytes(rig.peers["a"].slots_view[:64]) == SLOT


async def test_a_target_that_closes_ends_the_writes_to_it(rig: Bench, name: str) -> None:
    for number in range(40):
        rig.transport.start(rig.write(number, "ab"[number % 2], LARGE))
    await rig.targets["a"].close()
    while sum(end.id % 2 for end in rig.ends) < 20:  # b's
        await rig.ended(len(rig.ends) + 1)
    if not MAKERS[name].is_blind:
        await rig.ended(40)
    ends = {end.id: end.error for end in rig.ends}
    assert len(ends) == len(rig.ends)
    assert all(ends[number] is None for number in range(1, 40, 2))


async def test_threads_and_files_are_gone_after_close(name: str) -> None:
    async with opened(name):  # what a library keeps for good is made here
        pass
    threads, files = _threads(), _files()
    async with opened(name) as rig:
        for number in range(20):
            rig.transport.start(rig.write(number, "ab"[number % 2], LARGE))
        await rig.ended(1)
    assert {end.id for end in rig.ends} == set(range(20))
    assert (_threads(), Counter(_files()) - Counter(files)) == (threads, Counter())


@pytest.mark.e2e
@pytest.mark.parametrize("name", names(variants=False))
async def test_a_killed_peer_ends_the_writes_to_it(rig: Bench, name: str) -> None:
    async with _child(rig, name) as child:
        for number in range(40):
            rig.transport.start(rig.write(number, "cb"[number % 2], LARGE))
        child.kill()
        await child.wait()
        rig.transport.detach("c")
        ends = {end.id: end.error for end in await rig.ended(40)}
        assert len(ends) == 40
        assert all(ends[number] is None for number in range(1, 40, 2))


@pytest.mark.e2e
@pytest.mark.parametrize("name", names(variants=False))
async def test_a_stopped_peer_delays_no_other_and_its_writes_end_with_it(
    rig: Bench, name: str
) -> None:
    async with _child(rig, name) as child:
        child.send_signal(signal.SIGSTOP)
        for number in range(40):
            rig.transport.start(rig.write(number, "cb"[number % 2], LARGE))
        while sum(end.id % 2 for end in rig.ends) < 20:  # b's
            await rig.ended(len(rig.ends) + 1)
        rig.transport.abort(0)
        child.kill()
        await child.wait()
        rig.transport.detach("c")
        ends = {end.id: end.error for end in await rig.ended(40)}
        assert len(ends) == len(rig.ends) == 40


def _through(rig: Bench) -> frozenset[str]:
    return frozenset({rig.transport.name})


@asynccontextmanager
async def _child(rig: Bench, name: str) -> AsyncIterator[Child]:
    """A third peer, c, in a process of its own."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.data.target", name, stdin=PIPE, stdout=PIPE
    )
    try:
        assert child.stdout is not None
        line = (await child.stdout.readline()).decode().strip()
        await rig.transport.attach(parsed(line, "c"))
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


_TOLD: Final = ("/sys/", "/proc/")


def _threads() -> list[str]:
    """Those of the loop's own pool come and go with the load, and end with the loop."""
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if not name.startswith("asyncio_"))


def _files() -> list[str]:
    """What is open here, but for memories: one is unmapped with its last view; and for what the
    kernel tells: mooncake's Go runtime looks up its cores whenever it likes."""
    links = [_link(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    ours = (link for link in links if "memfd" not in link and not link.startswith(_TOLD))
    return [link.partition(":")[0] for link in ours]


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the directory that was being listed
        return ""


async def test_a_small_write_to_an_idle_peer_has_landed_when_start_returns() -> None:
    async with opened("at once") as rig:
        rig.transport.start(rig.write(1, "a", [3], SLOT))
        assert rig.block("a", 3) == rig.source_block(3)
        assert bytes(rig.peers["a"].slots_view[:64]) == SLOT
        assert await rig.ended(1) == [Ended(1)]
