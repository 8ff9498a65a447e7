"""Makers of transports for the contract suite, with the memory on both sides in view."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pdrt.config import FaultSection
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.faulty import FaultyTransport
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Transport, Write
from pdrt.data.transport.shm import AT_ONCE, ShmTransport
from pdrt.messages import KvLayout

LAYOUT = KvLayout(block_size=16, dtype="uint8", layers=8, kv_heads=2, head_dim=8)
BLOCKS = 64


@dataclass
class Bench:
    """A writing rank, two decode ranks' memories, and all ends that were told."""

    transport: Transport
    source: PoolMemory
    peers: dict[str, PoolMemory]
    ends: list[Ended] = field(default_factory=list)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    def write(
        self, number: int, peer: str, blocks: Sequence[int], slot: bytes | None = None
    ) -> Write:
        """Copies each block to the one with the same number."""
        size, at = LAYOUT.block_bytes, self.source.pool_at
        runs = [(at + b * size, self.peers[peer].pool_at + b * size, size) for b in blocks]
        array = np.array(runs, dtype=np.int64).reshape(-1, 3)
        return Write(number, peer, array, SlotWrite(0, slot) if slot else None)

    def block(self, peer: str, block: int) -> bytes:
        size = LAYOUT.block_bytes
        return bytes(self.peers[peer].pool_view[block * size : (block + 1) * size])

    def source_block(self, block: int) -> bytes:
        size = LAYOUT.block_bytes
        return bytes(self.source.pool_view[block * size : (block + 1) * size])

    async def attach_all(self) -> None:
        for name in self.peers:
            await self.transport.attach(self.peer(name))

    def peer(self, name: str) -> Peer:
        memory = self.peers[name]
        return Peer(name, this_process(), memory.region({"shm": memory.handle()}))

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

    def forget(self) -> None:
        self.source.close()
        for memory in self.peers.values():
            memory.close()


def bench(make: str) -> Bench:
    source = PoolMemory(LAYOUT, BLOCKS, 1)
    source.array[:] = np.arange(source.size) % 251 + 1
    peers = {name: PoolMemory(LAYOUT, BLOCKS, 4) for name in ("a", "b")}
    at_once = AT_ONCE if make == "at once" else 0  # else all writes go through the threads
    transport: Transport = ShmTransport(source, threads=2, at_once=at_once)
    if make in ("faulty", "delayed"):
        chances = FaultSection(delay=0.5, delay_s=0.002) if make == "delayed" else FaultSection()
        transport = FaultyTransport(transport, chances)
    return Bench(transport, source, peers)
