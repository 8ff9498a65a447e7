"""What the engine transports share, over an engine that the test steers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from structlog.testing import capture_logs

from pdrt.data.layout import NO_RUNS, Runs
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.engine import EngineTransport
from pdrt.data.transport.lane import EngineError, Life, Naps, Offer, Unproven
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Write
from pdrt.errors import TransferFailed
from pdrt.messages import Process
from tests.data.mortal import mortal
from tests.data.transports import LAYOUT

SLOT = bytes(range(64))


@dataclass
class FakeEngine:
    """Copies within this process. `gate` shut: calls for `slow` stay inside until it is opened."""

    name: str = "fake"
    most_runs: int = 4
    errors: dict[int, Exception] = field(default_factory=dict)  # of the n-th call, from 1
    slow: set[bytes] = field(default_factory=lambda: {b"a", b"b"})
    hears_life: bool = True  # or it is a call that cannot be interrupted
    puts: list[int] = field(default_factory=list)  # bytes of each call
    story: list[str] = field(default_factory=list)
    is_inside: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    door: threading.Event = field(default_factory=threading.Event)  # shut: nobody is connected

    def __post_init__(self) -> None:
        self.gate.set()
        self.door.set()

    def register(self, address: int, size: int) -> None:
        self.story.append("register")

    def contact(self) -> bytes:
        return b"me"

    def connect(self, contact: bytes, probe: int) -> FakeLink:
        self.story.append("connect")
        self.door.wait()
        return FakeLink(self, contact)

    def close(self) -> None:
        self.story.append("close")


@dataclass
class FakeLink:
    engine: FakeEngine
    contact: bytes

    def put(self, runs: Runs, life: Life) -> None:
        engine = self.engine
        engine.puts.append(int(runs[:, 2].sum()))
        assert len(runs) <= engine.most_runs
        if self.contact in engine.slow:
            self._wait(life)
        if error := engine.errors.get(len(engine.puts)):
            raise error
        for here, there, size in runs.tolist():
            ctypes.memmove(there, here, size)

    def _wait(self, life: Life) -> None:
        self.engine.is_inside.set()
        naps = Naps(life)
        while self.engine.hears_life and not self.engine.gate.is_set():
            naps.nap()
        self.engine.gate.wait()

    def close(self) -> None:
        self.engine.story.append("part")


class Rig:
    def __init__(self, close_s: float = 5.0, idle_s: float = 60.0) -> None:
        self.engine, self.memory = FakeEngine(), PoolMemory(LAYOUT, 8, 4)
        self.target = PoolMemory(LAYOUT, 8, 4)
        self.memory.array[:] = np.arange(self.memory.size) % 251 + 1
        self.transport = EngineTransport(self.memory, self.engine, close_s, idle_s)
        self.ends = self.transport.ends()

    def peer(self, name: str = "a", process: Process | None = None) -> Peer:
        offer = Offer(name.encode(), self.target.address, self.target.size).pack()
        return Peer(name, process or this_process(), self.target.region({"fake": offer}))

    def write(self, number: int, blocks: int = 6, peer: str = "a") -> None:
        """Every other block, so that none is the next one's neighbour, and the slot."""
        size, at = LAYOUT.block_bytes, self.memory.pool_at
        runs = [
            [at + b % 4 * 2 * size, self.target.pool_at + b % 4 * 2 * size, size]
            for b in range(blocks)
        ]
        array = np.array(runs) if runs else NO_RUNS
        self.transport.start(Write(number, peer, array, SlotWrite(64, SLOT)))

    async def inside(self) -> None:
        await asyncio.to_thread(self.engine.is_inside.wait)

    @property
    def slot(self) -> bytes:
        return bytes(self.target.slots_view[64:128])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.transport.attach(rig.peer())
    yield rig
    rig.engine.gate.set()
    await rig.transport.close()


async def told(rig: Rig) -> bool:
    """Whether an end is told within fifty turns of the loop."""
    reader = asyncio.ensure_future(anext(rig.ends))
    for _ in range(50):
        await asyncio.sleep(0)
    is_told = reader.done()
    reader.cancel()
    return is_told


async def test_a_write_goes_in_portions_and_its_slot_last(rig: Rig) -> None:
    rig.write(1)
    assert await anext(rig.ends) == Ended(1)
    size = LAYOUT.block_bytes
    assert rig.engine.puts == [4 * size, 2 * size, 64]
    assert rig.slot == SLOT
    at = rig.memory.pool_at
    assert np.array_equal(rig.target.array[at : at + size], rig.memory.array[at : at + size])


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("error", [EngineError("status -1"), OSError("gone"), MemoryError()])
async def test_an_error_in_any_call_ends_that_write_without_its_slot_and_no_other(
    rig: Rig, call: int, error: Exception
) -> None:
    """CASES 26: one failed write is one failed request. CASES 10: no slot vouches for it."""
    rig.engine.errors = {call: error}
    rig.write(1)
    end = await anext(rig.ends)
    assert end.error is not None
    done = [0, 4, 6][call - 1] * LAYOUT.block_bytes
    assert f"({done} of {6 * LAYOUT.block_bytes + 64} bytes were written)" in end.error  # CASES 19
    assert end.error.startswith("fake: ")
    assert rig.slot == bytes(64)
    rig.write(2)
    assert await anext(rig.ends) == Ended(2)
    assert rig.slot == SLOT


async def test_an_aborted_write_ends_when_the_engine_lets_go_of_it_and_not_before(rig: Rig) -> None:
    rig.engine.gate.clear()
    rig.write(1)
    rig.write(2)
    await rig.inside()
    rig.transport.abort(1)
    rig.transport.abort(2)
    assert await anext(rig.ends) == Ended(2, "aborted")  # it waited: nothing has it
    assert not await told(rig)
    rig.ends = rig.transport.ends()
    rig.engine.gate.set()
    assert await anext(rig.ends) == Ended(1, "aborted")
    assert rig.engine.puts == [4 * LAYOUT.block_bytes]
    assert rig.slot == bytes(64)


async def test_what_was_stopped_already_is_stopped_once(rig: Rig) -> None:
    rig.engine.gate.clear()
    rig.write(1)
    rig.write(2)
    await rig.inside()
    rig.transport.abort(2)
    rig.transport.abort(2)
    rig.transport.detach("a")
    closing = asyncio.create_task(rig.transport.close())
    assert await anext(rig.ends) == Ended(2, "aborted")
    rig.engine.gate.set()
    assert await anext(rig.ends) == Ended(1, "the peer is gone")
    await closing
    assert [end async for end in rig.transport.ends()] == []


async def test_a_lost_peer_s_write_ends_when_the_engine_lets_go_of_it(rig: Rig) -> None:
    rig.engine.gate.clear()
    rig.write(1)
    rig.write(2)
    await rig.inside()
    rig.transport.detach("a")
    assert await anext(rig.ends) == Ended(2, "the peer is gone")
    assert not await told(rig)
    assert "part" not in rig.engine.story
    rig.ends = rig.transport.ends()
    rig.engine.gate.set()
    assert await anext(rig.ends) == Ended(1, "the peer is gone")
    await rig.transport.close()
    assert rig.engine.story[-2:] == ["part", "close"]


async def test_a_peer_that_stands_still_delays_no_other(rig: Rig) -> None:
    rig.engine.slow = {b"a"}
    await rig.transport.attach(rig.peer("b"))
    rig.engine.gate.clear()
    rig.write(1)
    await rig.inside()
    for number in range(2, 20):
        rig.write(number, peer="b")
        assert await anext(rig.ends) == Ended(number)


async def test_closing_leaves_untold_what_stands_still_and_says_so() -> None:
    """What had left may land when the peer goes on, whatever becomes of our engine."""
    rig = Rig(close_s=0.01)
    await rig.transport.attach(rig.peer())
    rig.engine.gate.clear()
    rig.write(1)
    rig.write(2)
    await rig.inside()
    with capture_logs() as logs:
        await rig.transport.close()
    assert [end async for end in rig.ends] == [Ended(2, "the transport is closed")]
    assert [(log["event"], log["writes"]) for log in logs if "writes" in log] == [
        ("writes_untold", 1)
    ]
    assert rig.engine.story[-2:] == ["part", "close"]
    assert rig.slot == bytes(64)


async def test_an_engine_that_does_not_return_is_not_taken_down_and_its_write_not_told() -> None:
    rig = Rig(close_s=0.01)
    rig.engine.hears_life = False
    await rig.transport.attach(rig.peer())
    rig.engine.gate.clear()
    rig.write(1)
    await rig.inside()
    await rig.transport.close()
    assert [end async for end in rig.ends] == []
    assert "close" not in rig.engine.story
    rig.engine.gate.set()
    await threads_are_gone()


async def test_a_peer_is_connected_once_however_often_it_is_attached(rig: Rig) -> None:
    await asyncio.gather(*(rig.transport.attach(rig.peer("b")) for _ in range(5)))
    rig.write(1, peer="b")
    assert await anext(rig.ends) == Ended(1)
    rig.transport.detach("a")
    rig.transport.detach("b")
    await threads_are_gone()
    assert rig.engine.story.count("connect") == rig.engine.story.count("part")


async def test_a_slot_of_another_size_is_refused(rig: Rig) -> None:
    rig.transport.start(Write(1, "a", NO_RUNS, SlotWrite(0, bytes(65))))
    assert await anext(rig.ends) == Ended(1, "a slot has at most 64 bytes, not 65")


async def test_a_target_that_describes_another_size_is_refused(rig: Rig) -> None:
    offer = Offer(b"it", rig.target.address, rig.target.size + 1).pack()
    peer = Peer("b", this_process(), rig.target.region({"fake": offer}))
    with pytest.raises(TransferFailed, match="describes"):
        await rig.transport.attach(peer)


async def test_a_revocation_proves_nothing(rig: Rig) -> None:
    assert not rig.transport.revoke((1, 0), frozenset({"fake"}))


CUT = Unproven("the connection broke")


@pytest.mark.parametrize("call", [1, 2, 3])
async def test_a_write_that_failed_without_proof_stays_open_and_the_others_go_on(
    rig: Rig, call: int
) -> None:
    """CASES 50: its blocks belong to nobody else while something may still land there."""
    rig.engine.errors = {call: CUT}
    rig.write(1)
    rig.write(2)
    assert await anext(rig.ends) == Ended(2)
    rig.transport.abort(1)
    rig.transport.detach("a")
    await rig.transport.attach(rig.peer("a"))
    rig.write(3)
    assert await anext(rig.ends) == Ended(3)
    assert not await told(rig)
    rig.ends = rig.transport.ends()
    await rig.transport.close()
    assert [end async for end in rig.ends] == []


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.e2e
async def test_the_peer_s_death_ends_what_failed_without_proof(rig: Rig, is_detached: bool) -> None:
    async with mortal() as (child, process):
        await rig.transport.attach(rig.peer("b", process))
        rig.engine.errors = {1: CUT}
        rig.write(1, peer="b")
        rig.write(2, peer="b")
        assert await anext(rig.ends) == Ended(2)
        if is_detached:
            rig.transport.detach("b")
        assert not await told(rig)
        rig.ends = rig.transport.ends()
        child.kill()
        end = await anext(rig.ends)
        assert (end.id, end.error) == (
            1,
            f"fake: the connection broke (0 of {6 * LAYOUT.block_bytes + 64} bytes were written)",
        )


async def test_where_a_death_cannot_be_seen_what_failed_without_proof_stays_open(
    rig: Rig,
) -> None:
    """A peer of another host is detached when it was silent for long, and that proves nothing."""
    await rig.transport.attach(rig.peer("b", Process(host="another", pid=1, started=1)))
    rig.engine.errors = {1: CUT}
    rig.write(1, peer="b")
    rig.write(2, peer="b")
    assert await anext(rig.ends) == Ended(2)
    rig.transport.detach("b")
    assert not await told(rig)


async def test_a_connection_that_was_idle_is_tried_by_a_write_that_harms_nobody() -> None:
    """One that was cut meanwhile costs a probe, not a write whose end nobody knows."""
    rig = Rig(idle_s=0)
    rig.memory.array[rig.memory.pool_at :] = 7
    await rig.transport.attach(rig.peer())
    rig.engine.errors = {1: CUT}
    rig.write(1)
    assert await anext(rig.ends) == Ended(1)
    assert rig.engine.puts[0] == 64
    assert rig.slot == SLOT
    await rig.transport.close()


async def test_who_leaves_while_it_attaches_leaves_nothing_behind(rig: Rig) -> None:
    """The call cannot be stopped; what it brings is let go of when it returns."""
    files, rig.engine.story = _open_files(), []
    rig.engine.door.clear()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await rig.transport.attach(rig.peer("b"))
    assert not any(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    rig.engine.door.set()
    rig.transport.detach("a")
    await threads_are_gone()
    assert rig.engine.story == ["connect"] * 3 + ["part"] * 4
    assert _open_files() <= files - 1  # less a's; what tests before left may go meanwhile
    await rig.transport.attach(rig.peer("b"))
    rig.write(1, peer="b")
    assert await anext(rig.ends) == Ended(1)


async def test_a_connection_that_hangs_does_not_keep_the_transport_from_closing() -> None:
    rig = Rig(close_s=0.01)
    rig.engine.door.clear()
    attaching = asyncio.create_task(rig.transport.attach(rig.peer()))
    await asyncio.sleep(0)
    await rig.transport.close()
    assert "close" not in rig.engine.story  # a thread is inside
    rig.engine.door.set()
    with pytest.raises(TransferFailed):
        await attaching
    await threads_are_gone()
    assert rig.engine.story[-2:] == ["connect", "part"]


async def test_where_no_thread_is_to_be_had_the_peer_is_refused(rig: Rig) -> None:
    files, usual = _open_files(), threading.stack_size()
    threading.stack_size(1 << 46)  # more than there is to map
    try:
        with pytest.raises(TransferFailed, match="can't start new thread"):
            await rig.transport.attach(rig.peer("b"))
    finally:
        threading.stack_size(usual)
    assert _open_files() <= files
    await rig.transport.attach(rig.peer("b"))
    rig.write(1, peer="b")
    assert await anext(rig.ends) == Ended(1)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def threads_are_gone() -> None:
    """Those of lanes that were left."""
    for thread in threading.enumerate():
        if thread.name.startswith("pdrt-fake"):
            while thread.is_alive():
                await asyncio.sleep(0.001)


@pytest.mark.e2e
async def test_a_dead_process_ends_its_write_though_the_engine_says_nothing(rig: Rig) -> None:
    async with mortal() as (child, process):
        await rig.transport.attach(rig.peer("b", process))
        rig.engine.gate.clear()
        rig.write(1, peer="b")
        await rig.inside()
        child.send_signal(signal.SIGSTOP)
        assert not await told(rig)
        rig.ends = rig.transport.ends()
        child.kill()
        end = await anext(rig.ends)
        assert end.error is not None
        assert "its process has died" in end.error
        await child.wait()
        with pytest.raises(TransferFailed, match="dead, or another process"):
            await rig.transport.attach(rig.peer("c", process))
