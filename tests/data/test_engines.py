"""What the engine transports share, over an engine that the test steers."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.data.layout import NO_RUNS, Runs
from pdrt.data.memory import PoolMemory
from pdrt.data.process import host_identity, started_ticks, this_process
from pdrt.data.transport import lane
from pdrt.data.transport.engine import PORTION, EngineTransport
from pdrt.data.transport.lane import EngineError, Life, Naps, Offer, portions
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Write
from pdrt.errors import TransferFailed
from pdrt.messages import Process
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

    def __post_init__(self) -> None:
        self.gate.set()

    def register(self, address: int, size: int) -> None:
        self.story.append("register")

    def contact(self) -> bytes:
        return b"me"

    def connect(self, contact: bytes, probe: int) -> FakeLink:
        self.story.append("connect")
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
    def __init__(self, close_s: float = 5.0) -> None:
        self.engine, self.memory = FakeEngine(), PoolMemory(LAYOUT, 8, 4)
        self.target = PoolMemory(LAYOUT, 8, 4)
        self.memory.array[:] = np.arange(self.memory.size) % 251 + 1
        self.transport = EngineTransport(self.memory, self.engine, close_s)
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


async def test_closing_gives_up_what_stands_still_and_ends_it_when_the_engine_is_gone() -> None:
    rig = Rig(close_s=0.01)
    await rig.transport.attach(rig.peer())
    rig.engine.gate.clear()
    rig.write(1)
    rig.write(2)
    await rig.inside()
    await rig.transport.close()
    assert [end async for end in rig.ends] == [
        Ended(2, "the transport is closed"),
        Ended(1, "the transport is closed"),
    ]
    assert rig.engine.story[-2:] == ["part", "close"]
    assert rig.slot == bytes(64)


async def test_an_engine_that_does_not_return_is_not_taken_down() -> None:
    rig = Rig(close_s=0.01)
    rig.engine.hears_life = False
    await rig.transport.attach(rig.peer())
    rig.engine.gate.clear()
    rig.write(1)
    await rig.inside()
    await rig.transport.close()
    assert [end async for end in rig.ends] == [Ended(1, "the transport is closed")]
    assert "close" not in rig.engine.story
    rig.engine.gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("pdrt-fake"):
            await asyncio.to_thread(thread.join)


async def test_a_peer_is_connected_once_however_often_it_is_attached(rig: Rig) -> None:
    await asyncio.gather(*(rig.transport.attach(rig.peer("b")) for _ in range(5)))
    assert rig.engine.story.count("connect") - rig.engine.story.count("part") == 2
    rig.write(1, peer="b")
    assert await anext(rig.ends) == Ended(1)


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


@pytest.mark.e2e
async def test_a_dead_process_ends_its_write_though_the_engine_says_nothing(rig: Rig) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=PIPE, stdout=PIPE
    )
    ticks = started_ticks(child.pid)
    assert ticks is not None
    process = Process(host=host_identity(), pid=child.pid, started=ticks)
    await rig.transport.attach(rig.peer("b", process))
    rig.engine.gate.clear()
    rig.write(1, peer="b")
    await rig.inside()
    child.send_signal(signal.SIGSTOP)
    assert not await told(rig)
    rig.ends = rig.transport.ends()
    child.kill()
    await child.communicate()
    end = await anext(rig.ends)
    assert end.error is not None
    assert "its process has died" in end.error
    with pytest.raises(TransferFailed, match="dead, or another process"):
        await rig.transport.attach(rig.peer("c", process))


@pytest.mark.parametrize(
    "junk", [b"", b"\xc0", msgpack.packb([1, 2, 3]), msgpack.packb([b"x", 1]), b"\xdd\xff\xff\xff"]
)
def test_what_is_no_offer_is_refused(junk: bytes) -> None:
    with pytest.raises(TransferFailed):
        Offer.unpack(junk)


def test_an_offer_survives_the_wire() -> None:
    offer = Offer(b"name", 1 << 47, 1 << 40)
    assert Offer.unpack(offer.pack()) == offer


RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 12)), max_size=20)


@given(RUNS, st.integers(1, 15), st.integers(1, 5))
def test_portions_carry_the_same_bytes_in_the_same_order(
    rows: list[tuple[int, int, int]], most_bytes: int, most_runs: int
) -> None:
    runs = np.array(rows, dtype=np.int64).reshape(-1, 3)
    cut = list(portions(runs, most_bytes, most_runs))
    assert _bytes(runs) == _bytes(np.concatenate([NO_RUNS, *cut]))
    for portion in cut:
        assert 0 < len(portion) <= most_runs
        assert 0 < portion[:, 2].sum() <= most_bytes


def _bytes(runs: Runs) -> list[tuple[int, int]]:
    return [(src + i, dst + i) for src, dst, size in runs.tolist() for i in range(size)]


def test_neighbours_travel_as_one_run() -> None:
    blocks = np.array([[0, 100, 10], [10, 110, 10], [20, 120, 10], [40, 130, 10]])
    (portion,) = portions(blocks, PORTION, 512)
    assert portion.tolist() == [[0, 100, 30], [40, 130, 10]]


def test_a_setting_for_a_c_library_leaves_nothing_behind() -> None:
    name = "PDRT_TEST_SETTING"
    with lane.setting(name, "1"), lane.setting(name, "2"), lane.setting(name, ""):
        assert _c_value(name) == b"2"
    assert _c_value(name) is None
    with pytest.raises(ZeroDivisionError), lane.setting(name, "1"):
        raise ZeroDivisionError
    assert _c_value(name) is None


def test_what_the_user_has_set_stays() -> None:
    with lane.setting("PDRT_TEST_SETTING", "theirs"):
        lane.set_default("PDRT_TEST_SETTING", "ours")
        assert _c_value("PDRT_TEST_SETTING") == b"theirs"


def _c_value(name: str) -> bytes | None:
    getenv: Callable[[bytes], bytes | None] = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    return getenv(name.encode())
