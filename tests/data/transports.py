"""Makers of transports for the contract suite, with the memory on both sides in view.

A transport joins the suite with one line in MAKERS: how it is made over a memory. The same
maker serves the writing side and each peer's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TypeAlias

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from pdrt.config import FaultSection, TransferSection
from pdrt.data.memory import HostMemory, PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.checked import CheckedTransport
from pdrt.data.transport.choosing import Choosing
from pdrt.data.transport.faulty import FaultyTransport
from pdrt.data.transport.memfabric import Store, open_memfabric
from pdrt.data.transport.mooncake import open_mooncake
from pdrt.data.transport.nixl import open_nixl
from pdrt.data.transport.promise import Ended, Key, Peer, SlotWrite, Transport, Write
from pdrt.data.transport.shm import AT_ONCE, ShmTransport
from pdrt.data.transport.tcp import TcpTransport
from pdrt.keys import ClusterKey
from pdrt.messages import KvLayout
from tests.data.memfabric import StandIn

LAYOUT = KvLayout(block_size=16, dtype="uint8", layers=8, kv_heads=2, head_dim=8)
BLOCKS = 64
SLOTS = 4
LOCAL = "127.0.0.1"
CLUSTER = ClusterKey(b"one secret of the whole suite")
KEY: Key = (7, 1)  # admitted at every target, for all of its memory

Make: TypeAlias = Callable[[HostMemory], Transport]


@dataclass(frozen=True)
class Maker:
    """How a transport is made, on the running loop; `needs` is a package that it cannot do without.

    `target` makes the peers' side where that differs. A slow one is not in the default run. A
    blind one cannot prove that a write is over whose connection broke, while the peer lives.
    """

    make: Make
    target: Make | None = None
    needs: str = ""
    is_slow: bool = False
    is_variant: bool = False
    is_blind: bool = False

    def is_missing(self) -> bool:
        return bool(self.needs) and find_spec(self.needs) is None


def _shm(at_once: int = 0) -> Make:  # 0: all writes go through the threads
    return lambda memory: ShmTransport(memory, threads=2, at_once=at_once)


def _shm_target(memory: HostMemory) -> Transport:
    return ShmTransport(memory, threads=0)  # it is only written to


def _tcp(memory: HostMemory) -> Transport:
    return TcpTransport(memory, LOCAL, CLUSTER)


def _memfabric(memory: HostMemory) -> Transport:
    return open_memfabric(TransferSection(), memory, LOCAL, Store("tcp://", True), StandIn())


def _faulty(make: Make, faults: FaultSection | None = None) -> Make:
    return lambda memory: FaultyTransport(make(memory), faults)


class _Checked(CheckedTransport):
    """All its peers ask for checksums."""

    async def attach(self, peer: Peer) -> None:
        await super().attach(replace(peer, checksums=True))


def _checked(memory: HostMemory) -> Transport:
    assert isinstance(memory, PoolMemory)
    return _Checked(_shm()(memory), memory)


_DELAYS = FaultSection(delay=0.5, delay_s=0.002)
MAKERS: dict[str, Maker] = {
    "shm": Maker(_shm(), _shm_target),
    "at once": Maker(_shm(AT_ONCE), _shm_target, is_variant=True),
    "faulty": Maker(_faulty(_shm()), _shm_target, is_variant=True),
    "delayed": Maker(_faulty(_shm(), _DELAYS), _shm_target, is_variant=True),
    "checked": Maker(_checked, _shm_target),
    "tcp": Maker(_tcp),
    "faulty tcp": Maker(_faulty(_tcp), _tcp, is_variant=True),
    "auto": Maker(lambda memory: Choosing([_shm()(memory), _tcp(memory)]), is_variant=True),
    "nixl": Maker(
        lambda memory: open_nixl(TransferSection(), memory, LOCAL), needs="nixl_cu12", is_blind=True
    ),
    "mooncake": Maker(
        lambda memory: open_mooncake(TransferSection(), memory, LOCAL),
        needs="mooncake",
        is_slow=True,  # it takes a second to go
        is_blind=True,
    ),
    "memfabric": Maker(_memfabric, is_slow=True),  # a stand-in: no hardware here
}


def names(variants: bool = True) -> list[ParameterSet]:
    """MAKERS as a test's parameters; those that cannot run here are skipped, with why."""
    return [
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(maker.is_missing(), reason=f"needs {maker.needs}"),
                *([pytest.mark.slow] if maker.is_slow else []),
            ],
        )
        for name, maker in MAKERS.items()
        if variants or not maker.is_variant
    ]


@dataclass
class Bench:
    """A writing rank, two decode ranks' memories and transports, and all ends that were told."""

    transport: Transport
    source: PoolMemory
    peers: dict[str, PoolMemory]
    targets: dict[str, Transport] = field(default_factory=dict)
    ends: list[Ended] = field(default_factory=list)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    def write(
        self,
        number: int,
        peer: str,
        blocks: Sequence[int],
        slot: bytes | None = None,
        key: Key | None = KEY,
    ) -> Write:
        """Copies each block to the one with the same number."""
        size, at = LAYOUT.block_bytes, self.source.pool_at
        target_at = self.peers["a"].pool_at  # all peers' memories have one shape
        array = np.empty((len(blocks), 3), dtype=np.int64)
        array[:, 0] = array[:, 1] = np.array(blocks, dtype=np.int64) * size
        array += [at, target_at, 0]
        array[:, 2] = size
        return Write(number, peer, array, SlotWrite(0, slot) if slot else None, key)

    def block(self, peer: str, block: int) -> bytes:
        size = LAYOUT.block_bytes
        return bytes(self.peers[peer].pool_view[block * size : (block + 1) * size])

    def source_block(self, block: int) -> bytes:
        size = LAYOUT.block_bytes
        return bytes(self.source.pool_view[block * size : (block + 1) * size])

    def admit_all(self, key: Key = KEY) -> None:
        for name, target in self.targets.items():
            target.admit(key, everywhere(self.peers[name]))

    async def attach_all(self) -> None:
        for name in self.peers:
            await self.transport.attach(self.peer(name))

    def peer(self, name: str) -> Peer:
        memory = self.peers[name]
        return Peer(name, this_process(), memory.region(self.targets[name].offers))

    async def read(self) -> None:
        async for end in self.transport.ends():
            self.ends.append(end)
            self._told.set()

    async def ended(self, count: int) -> list[Ended]:
        """Wait until so many ends were told."""
        while len(self.ends) < count:
            self._told.clear()
            await self._told.wait()
        return self.ends

    async def settle(self, peer: str) -> None:
        """Write to the peer's last block until whatever was on its way must have arrived."""
        for number in range(1 << 40, (1 << 40) + 8):
            self.transport.start(self.write(number, peer, [BLOCKS - 1] * 64))
            while all(end.id != number for end in self.ends):
                self._told.clear()
                await self._told.wait()
        self.ends[:] = [end for end in self.ends if end.id < 1 << 40]

    def forget(self) -> None:
        self.source.close()
        for memory in self.peers.values():
            memory.close()


def everywhere(memory: HostMemory) -> np.typing.NDArray[np.int64]:
    return np.array([[0, memory.size]], dtype=np.int64)


def pool() -> PoolMemory:
    """What every peer of the suite has."""
    return PoolMemory(LAYOUT, BLOCKS, SLOTS)


def target(name: str, memory: HostMemory) -> Transport:
    """A peer's side of the named transport."""
    maker = MAKERS[name]
    return (maker.target or maker.make)(memory)


def bench(name: str) -> Bench:
    """To be closed by its user: the transport, the targets, then `forget`. Or see `opened`."""
    source = PoolMemory(LAYOUT, BLOCKS, 1)
    source.array[:] = np.arange(source.size) % 251 + 1
    peers = {peer: pool() for peer in ("a", "b")}
    targets = {peer: target(name, memory) for peer, memory in peers.items()}
    rig = Bench(MAKERS[name].make(source), source, peers, targets)
    rig.admit_all()
    return rig


@asynccontextmanager
async def opened(name: str) -> AsyncIterator[Bench]:
    """A bench whose peers are attached and whose ends are read; all is closed afterwards."""
    rig = bench(name)
    reader = asyncio.create_task(rig.read())
    try:
        await rig.attach_all()
        yield rig
    finally:
        await rig.transport.close()
        await reader  # the stream of ends ends with the transport
        for one in rig.targets.values():
            await one.close()
        rig.forget()
