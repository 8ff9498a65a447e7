"""Ways to move a stretch of blocks, each timed from its start to its end.

All ways move the same blocks out of the same pool, so their figures can be compared: pdrt's own
transports, a single-thread memcpy, and plain socket loops.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

import numpy as np

from pdrt.bench.pairing import Bytes, Pairing, Stretch
from pdrt.bench.plain import PlainSender, Style
from pdrt.config import TransferSection, TransportName
from pdrt.data.installed import NEEDS, devices, package
from pdrt.data.memory import PoolMemory
from pdrt.data.transport.choose import open_transport
from pdrt.data.transport.promise import Ended, Key, Peer, Transport, Write
from pdrt.errors import ConfigError, TransferFailed
from pdrt.keys import ClusterKey
from pdrt.messages import KvLayout, Process, Region

KEY: Final[Key] = (1, 0)  # all writes of a run are one attempt's
_PEER: Final = "target"
_PAGE_LAYOUT: Final = KvLayout(block_size=16, dtype="uint8", layers=1, kv_heads=1, head_dim=128)


class Way(Protocol):
    """Moves blocks to the target, or only through this process's memory."""

    @property
    def name(self) -> str: ...

    @property
    def reaches_target(self) -> bool:
        """Whether the target's pool holds what was moved."""
        ...

    async def move(self, pairing: Pairing, stretch: Stretch) -> float:
        """Seconds from start to end. Raises TransferFailed or OSError."""
        ...


def pool_memory(pool_bytes: int) -> PoolMemory:
    """A rank's memory, as a worker makes it, with a pool of 4 KiB pages as blocks."""
    return PoolMemory(_PAGE_LAYOUT, pool_bytes // _PAGE_LAYOUT.block_bytes, 1)


def open_named(
    name: TransportName, memory: PoolMemory, local_ip: str, key: ClusterKey
) -> Transport:
    """The transport of that name. Raises ConfigError, which says what to install or to do."""
    if lacks := lacking(name):
        raise ConfigError(lacks)
    return open_transport(TransferSection(transport=name), memory, local_ip, key)


def lacking(
    name: TransportName,
    found: Callable[[TransportName], str | None] = package,
    devices_of: Callable[[TransportName], list[str]] = devices,
) -> str:
    """What this host lacks for it, with the command that installs it; empty when nothing."""
    needs = NEEDS[name]
    lacks = [f"it is not installed: {needs.install}"] if found(name) is None else []
    if needs.needs_device and not devices_of(name):
        lacks.append(f"it needs an Ascend NPU and its driver ({needs.devices}/{needs.pattern})")
    if not lacks and name == "memfabric":
        lacks.append("its processes meet at a store that only a cluster has; this bench makes none")
    return "; ".join(lacks)


class Memcpy:
    """numpy's copyto from the pool into plain memory of this process, in one thread."""

    name: Final = "memcpy"
    reaches_target: Final = False

    def __init__(self, pool: Bytes) -> None:
        self._source = pool
        self._target = np.zeros_like(pool)
        self._target[:] = 1  # touched

    async def move(self, pairing: Pairing, stretch: Stretch) -> float:
        size = pairing.block_bytes
        sources, targets = pairing.sources(stretch).tolist(), pairing.targets(stretch).tolist()
        pairs = [
            (self._target[to : to + size], self._source[at : at + size])
            for at, to in zip(sources, targets, strict=True)
        ]
        copy = np.copyto
        began = time.perf_counter()
        for target, source in pairs:
            copy(target, source)
        return time.perf_counter() - began


class PlainLoop:
    """sendall / recv_into or sendmsg / recvmsg_into between the two processes."""

    reaches_target: Final = True

    def __init__(self, sender: PlainSender, style: Style, pool: memoryview) -> None:
        self.name: Final = style
        self._sender, self._pool = sender, pool

    async def move(self, pairing: Pairing, stretch: Stretch) -> float:
        size = pairing.block_bytes
        blocks = [self._pool[at : at + size] for at in pairing.sources(stretch).tolist()]
        began = time.perf_counter()
        self._sender.move(blocks, size, stretch)
        return time.perf_counter() - began


class ViaTransport:
    """One write at a time through a pdrt transport, from `start` to its end."""

    reaches_target: Final = True

    def __init__(self, transport: Transport, memory: PoolMemory, region: Region) -> None:
        self.name: Final = transport.name
        self._transport = transport
        self._source_at, self._target_at = memory.pool_at, region.pool_at
        self._ends: AsyncIterator[Ended] = transport.ends()
        self._numbers = itertools.count(1)

    @staticmethod
    async def attached(
        transport: Transport, memory: PoolMemory, process: Process, region: Region
    ) -> ViaTransport:
        """Raises TransferFailed."""
        await transport.attach(Peer(_PEER, process, region))
        return ViaTransport(transport, memory, region)

    async def move(self, pairing: Pairing, stretch: Stretch) -> float:
        runs = np.empty((stretch.count, 3), dtype=np.int64)
        runs[:, 0] = pairing.sources(stretch) + self._source_at
        runs[:, 1] = pairing.targets(stretch) + self._target_at
        runs[:, 2] = pairing.block_bytes
        write = Write(next(self._numbers), _PEER, runs, key=KEY)
        began = time.perf_counter()
        self._transport.start(write)
        end = await anext(self._ends)
        while end.id != write.id:  # one that an earlier, failed turn left behind
            end = await anext(self._ends)
        took = time.perf_counter() - began
        if end.error is not None:
            raise TransferFailed(end.error)
        return took

    async def close(self) -> None:
        await self._transport.close()
