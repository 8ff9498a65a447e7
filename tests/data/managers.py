"""Real managers on loopback, with short patience, for tests and the child process of a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from pdrt.config import TimeoutsSection, TransferSection
from pdrt.data.events import SLOT_COMPLETE, SlotRecord, TransferEvent
from pdrt.data.limits import Limits
from pdrt.data.manager import KVTransferManager
from pdrt.data.memory import PoolMemory
from pdrt.data.transport.choose import open_transport
from pdrt.data.transport.faulty import FaultyTransport
from pdrt.data.transport.promise import Transport
from pdrt.keys import ClusterKey
from pdrt.messages import KvLayout, Process, Rank, RankAddress, Route, Source

LAYOUT = KvLayout(block_size=16, dtype="uint8", layers=8, kv_heads=2, head_dim=8)
KEY = ClusterKey(b"0123456789abcdef")
SOURCE = Source(host="127.0.0.1", port=18800, dp_rank=0)
HASH = b"prompt"
TIMEOUTS = TimeoutsSection()
TRANSFER = TransferSection(threads=2)
E = TypeVar("E")
Make: TypeAlias = Callable[[PoolMemory], Transport]


def route_to(endpoint: str, process: Process) -> Route:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    address = RankAddress(rank_ip=host.strip("[]"), rank_port=int(port), process=process)
    return Route(
        attn_tp_size=1,
        attn_cp_size=1,
        dp_size=1,
        block_size=LAYOUT.block_size,
        kv_cache_dtype=LAYOUT.dtype,
        fingerprint=LAYOUT,
        instance_epoch=1,
        ranks={"0,0,0": address},
    )


@dataclass
class Side:
    """One manager that runs, and the events it told."""

    manager: KVTransferManager
    faulty: FaultyTransport
    endpoint: str = ""
    events: list[TransferEvent] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.endpoint = await self.manager.start()
        self.task = asyncio.create_task(self.manager.run())

    async def until(self, kind: type[E], room: int, attempt: int = 0) -> E:
        """The event of this kind for this attempt, when it comes."""
        while True:
            self.events.extend(self.manager.take_events())
            for event in self.events:
                if isinstance(event, kind) and (event.room, event.attempt) == (room, attempt):
                    return event
            self.told.clear()
            await self.told.wait()

    def has(self, kind: type, room: int) -> bool:
        self.events.extend(self.manager.take_events())
        return any(isinstance(event, kind) and event.room == room for event in self.events)

    async def stop(self) -> None:
        if self.task:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.manager.close()
        self.manager.memory.close()


def side(
    role: Literal["prefill", "decode"],
    routes: Callable[[Source], Route],
    key: ClusterKey = KEY,
    local_ip: str = "127.0.0.1",
    timeouts: TimeoutsSection = TIMEOUTS,
    transfer: TransferSection = TRANSFER,
    make: Make | None = None,
) -> Side:
    """To be called on the running loop. `make`: a transport of the test's own."""
    memory = PoolMemory(LAYOUT, 64, 16)
    transport = make(memory) if make else open_transport(transfer, memory, local_ip, key)
    faulty = FaultyTransport(transport)
    told = asyncio.Event()

    async def ask(source: Source) -> Route:
        return routes(source)

    manager = KVTransferManager(
        role=role,
        rank=Rank(),
        layout=LAYOUT,
        memory=memory,
        transport=faulty,
        key=key,
        local_ip=local_ip,
        timeouts=timeouts,
        limits=Limits(),
        routes=ask,
        wake=told.set,
        clock=time.monotonic,
        wall=time.time,
        checksums=transfer.checksums,
    )
    return Side(manager, faulty, told=told)


def record(room: int, tokens: int, attempt: int = 0) -> SlotRecord:
    return SlotRecord(room, attempt, SLOT_COMPLETE, tokens, 0, 7, -0.25)
