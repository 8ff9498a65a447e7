"""The engines between two real processes: what arrives, and what the dead and the stopped do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from asyncio.subprocess import Process as Child
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdrt.data.memory import PoolMemory
from pdrt.data.transport.engine import IDLE_S
from pdrt.data.transport.lane import Offer, setting
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Transport, Write
from tests.data.target import parsed
from tests.data.transports import BLOCKS, LAYOUT, MAKERS

pytestmark = pytest.mark.e2e
SLOT = bytes(range(64))


@dataclass
class Rig:
    """Our side writes into the memory of a child, through the engine and its way there."""

    transport: Transport
    memory: PoolMemory
    child: Child
    peer: Peer
    ends: asyncio.Queue[Ended] = field(default_factory=asyncio.Queue)

    def write(self, number: int, times: int = 1) -> None:
        """All blocks, in reverse, so often, and the slot."""
        size, at, to = LAYOUT.block_bytes, self.memory.pool_at, self.peer.region.pool_at
        blocks = np.tile(np.arange(BLOCKS), times)
        runs = np.stack([at + blocks * size, to + (BLOCKS - 1 - blocks) * size], axis=1)
        runs = np.hstack([runs, np.full((len(runs), 1), size)])
        self.transport.start(Write(number, "c", runs, SlotWrite(64, SLOT)))

    def theirs(self, at: int, size: int) -> bytes:
        """What the child's memory holds."""
        base = Offer.unpack(next(iter(self.peer.region.offers.values()))).base
        with open(f"/proc/{self.child.pid}/mem", "rb") as memory:
            memory.seek(base + at)
            return memory.read(size)

    async def read(self) -> None:
        async for end in self.transport.ends():
            self.ends.put_nowait(end)

    def stop(self) -> None:
        """All its threads have stopped when this returns."""
        self.child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.child.pid, os.WSTOPPED | os.WNOWAIT)

    async def kill(self) -> None:
        if self.child.returncode is None:
            self.child.kill()
        await self.child.communicate()

    def cut(self) -> None:
        """Break all connections of this process, as a network does."""
        for name in os.listdir("/proc/self/fd"):
            try:
                end = socket.socket(fileno=os.dup(int(name)))
            except OSError:  # no socket, or closed meanwhile
                continue
            with end, suppress(OSError):  # what listens
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    end.getpeername()
                    end.shutdown(socket.SHUT_RDWR)

    async def is_told(self) -> bool:
        try:
            async with asyncio.timeout(0.3):
                await self.ends.get()
        except TimeoutError:
            return False
        return True


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(MAKERS[name].is_missing(), reason=f"needs {MAKERS[name].needs}")


NIXL = pytest.param(("nixl", ""), id="nixl", marks=needs("nixl"))
NIXL_TCP = pytest.param(
    ("nixl", "tcp"), id="nixl over tcp", marks=[needs("nixl"), pytest.mark.slow]
)
CUT_NIXL = pytest.param(("nixl", "tcp,self"), id="nixl over tcp", marks=needs("nixl"))
MOONCAKE = pytest.param(("mooncake", ""), id="mooncake", marks=needs("mooncake"))
SLOW_MOONCAKE = pytest.param(
    ("mooncake", ""), id="mooncake", marks=[needs("mooncake"), pytest.mark.slow]
)


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    name, tls = request.param
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.data.target", name, stdin=PIPE, stdout=PIPE
    )
    assert child.stdout is not None
    peer = parsed((await child.stdout.readline()).decode().strip(), "c")
    memory = PoolMemory(LAYOUT, BLOCKS, 4)
    memory.array[:] = np.arange(memory.size) % 251 + 1
    with setting("UCX_TLS", tls):
        transport = MAKERS[name].make(memory)
    rig = Rig(transport, memory, child, peer)
    reader = asyncio.create_task(rig.read())
    await transport.attach(peer)
    yield rig
    await rig.kill()
    await transport.close()
    await reader


@pytest.mark.parametrize("rig", [NIXL, NIXL_TCP, SLOW_MOONCAKE], indirect=True)
async def test_every_byte_arrives_and_the_dead_are_noticed(rig: Rig) -> None:
    """CASES 10: a peer that dies ends its writes, in bounded time, and nobody has to say so."""
    rig.write(1)
    assert await rig.ends.get() == Ended(1)
    size, blocks = LAYOUT.block_bytes, rig.memory.array[rig.memory.pool_at :].reshape(BLOCKS, -1)
    assert rig.theirs(rig.peer.region.pool_at, BLOCKS * size) == blocks[::-1].tobytes()
    assert rig.theirs(0, 192) == bytes(64) + SLOT + bytes(64)
    for number in range(2, 20):
        rig.write(number, 400)
    await rig.ends.get()
    await rig.kill()
    async with asyncio.timeout(5):
        while (end := await rig.ends.get()).id < 19:
            pass
    assert end.error is not None
    assert end.error.startswith(rig.transport.name)  # CASES 19: by which transport, how far, why
    assert "bytes were written" in end.error


@pytest.mark.parametrize("rig", [NIXL_TCP, MOONCAKE], indirect=True)
async def test_an_aborted_write_to_a_stopped_peer_is_not_over_until_the_peer_is(rig: Rig) -> None:
    """What was handed to the engine would land when the peer goes on."""
    rig.write(1)
    assert await rig.ends.get() == Ended(1)
    rig.stop()
    rig.write(2, 2000)
    assert not await rig.is_told()
    rig.transport.abort(2)
    rig.transport.detach("c")
    assert not await rig.is_told()
    rig.child.send_signal(signal.SIGCONT)
    end = await rig.ends.get()
    assert (end.id, end.error) == (2, "aborted")


@pytest.mark.parametrize("rig", [CUT_NIXL, MOONCAKE], indirect=True)
async def test_a_connection_that_breaks_ends_no_write_but_the_peer_s_death_does(rig: Rig) -> None:
    """CASES 50: the peer's kernel holds bytes that land when the peer goes on."""
    rig.write(1)
    assert await rig.ends.get() == Ended(1)
    rig.stop()
    rig.write(2, 3)
    await asyncio.sleep(0.2)  # until the peer's kernel has it
    rig.cut()
    assert not await rig.is_told()
    rig.child.send_signal(signal.SIGCONT)
    assert not await rig.is_told()
    rig.write(3)  # over a new connection
    assert await rig.ends.get() == Ended(3)
    await rig.kill()
    end = await rig.ends.get()
    assert end.id == 2
    assert end.error is not None
    assert end.error.startswith(rig.transport.name)


@pytest.mark.parametrize("rig", [CUT_NIXL], indirect=True)
async def test_a_connection_that_broke_while_idle_costs_no_write(rig: Rig) -> None:
    rig.write(1)
    assert await rig.ends.get() == Ended(1)
    rig.cut()
    await asyncio.sleep(IDLE_S + 0.1)
    rig.write(2)
    assert await rig.ends.get() == Ended(2)


@pytest.mark.slow
@pytest.mark.parametrize("rig", [NIXL], indirect=True)
async def test_a_stopped_peer_is_written_all_the_same_where_the_kernel_copies(rig: Rig) -> None:
    rig.write(1)
    assert await rig.ends.get() == Ended(1)
    rig.stop()
    rig.write(2, 10)
    assert await rig.ends.get() == Ended(2)
