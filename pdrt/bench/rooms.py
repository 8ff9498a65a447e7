"""One end of many tiny transfers: a real KVTransferManager, made as a worker makes it.

Run as a module it is the prefill end: a child that gets its spec and then room numbers in lines
on its standard input, and has each room's KV "computed" at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

import uvloop
from aiohttp import ClientSession

from pdrt import garbage, parts, telemetry
from pdrt.config import DisaggConfig, NodeConfig, Place, TransferSection
from pdrt.data.commands import ExpectHandshakes, SendBlocks
from pdrt.data.events import SLOT_COMPLETE, SendEnded, SenderReady, SlotRecord, TransferEvent
from pdrt.data.manager import KVTransferManager
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.errors import BadMessage, TransferFailed
from pdrt.keys import ClusterKey
from pdrt.messages import KvLayout, Rank
from pdrt.spawn import WorkerSpec, read_spec

LAYOUT: Final = KvLayout(block_size=16, dtype="uint8", layers=8, kv_heads=2, head_dim=8)
TOKENS: Final = 128
BLOCKS: Final = TOKENS // LAYOUT.block_size  # of a room
AT_ONCE: Final = 64
HASH: Final = b"the same prompt"
DEADLINE_S: Final = 60.0


def made_spec(role: Literal["prefill", "decode"], key: ClusterKey, host: str) -> WorkerSpec:
    """What a node would tell a worker of this role at this address."""
    parallel = NodeConfig().parallel.model_copy(update={"local_ip": host})
    config = NodeConfig(parallel=parallel, transfer=TransferSection(slots=512))
    return WorkerSpec(
        role=role,
        rank=Rank(),
        config=config,
        disagg=DisaggConfig.derive(role, config, Place.of(parallel, 0)),
        key_hex=key.secret.hex(),
        endpoint="",
        epoch=time.time_ns(),
    )


@dataclass(frozen=True, slots=True)
class End:
    manager: KVTransferManager
    endpoint: str


@asynccontextmanager
async def running(spec: WorkerSpec, hear: Callable[[TransferEvent], None]) -> AsyncIterator[End]:
    """A manager that serves; `hear` gets its events in a task of their own, as in a worker."""
    news = asyncio.Event()
    memory = PoolMemory(LAYOUT, AT_ONCE * BLOCKS, spec.config.transfer.slots)
    async with ClientSession() as session:
        manager = parts.transfers(spec, memory, session, news.set)
        try:
            endpoint = await manager.start()
            async with asyncio.TaskGroup() as tasks:
                life = [
                    tasks.create_task(manager.run()),
                    tasks.create_task(_tell(manager, news, hear)),
                ]
                yield End(manager, endpoint)
                for task in life:
                    task.cancel()
        finally:
            await manager.close()
            memory.close()


async def _tell(
    manager: KVTransferManager, news: asyncio.Event, hear: Callable[[TransferEvent], None]
) -> NoReturn:
    while True:
        await news.wait()
        news.clear()
        for event in manager.take_events():
            hear(event)


def blocks_of(place: int) -> tuple[int, ...]:
    """Rooms that are open at once have places of their own, each with its blocks."""
    first = place * BLOCKS
    return tuple(range(first, first + BLOCKS))


class _Prefill:
    """Computes nothing: a room's KV is there when its handshakes are."""

    manager: KVTransferManager

    def expect(self, room: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        self.manager.do(ExpectHandshakes(room, 0, TOKENS, HASH, deadline))

    def hear(self, event: TransferEvent) -> None:
        match event:
            case SenderReady(room, attempt):
                last = SlotRecord(room, attempt, SLOT_COMPLETE, TOKENS, 0, 7, -0.5)
                self.manager.do(SendBlocks(room, attempt, blocks_of(room % AT_ONCE), 0, last))
            case SendEnded(room, _, problem) if problem is not None:
                raise TransferFailed(f"room {room}: {problem.message}")
            case _:
                pass


async def _serve(spec: WorkerSpec) -> None:
    prefill = _Prefill()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with running(spec, prefill.hear) as end:
        prefill.manager = end.manager
        garbage.settle()
        me = this_process()
        sys.stdout.write(f"{end.endpoint} {me.pid} {me.started}\n")
        sys.stdout.flush()
        while line := await reader.readline():
            prefill.expect(int(line))


def main() -> NoReturn:
    try:
        spec = read_spec(0)
    except BadMessage as error:
        sys.exit(f"pdrt bench: {error}")
    telemetry.configure("warning")
    sys.setswitchinterval(0.001)  # as in a worker
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(spec))
    os._exit(0)


if __name__ == "__main__":
    main()
