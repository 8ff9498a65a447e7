"""`pdrt bench control`: what a request costs beside computing and moving its KV.

Rooms go through a real prefill and a real decode manager in two processes, with one small prompt
each: minted -> both sides told -> handshake -> KV and slot written -> decode may run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.table import Table

from pdrt.bench import ticks
from pdrt.bench.facts import machine_facts
from pdrt.bench.rooms import (
    AT_ONCE,
    DEADLINE_S,
    HASH,
    LAYOUT,
    TOKENS,
    End,
    blocks_of,
    made_spec,
    running,
)
from pdrt.bench.shell import Report, run, write_points
from pdrt.bench.ticks import Point
from pdrt.data.commands import AdmitReceiver, OpenReceiver
from pdrt.data.events import Received, ReceiveFailed, ReceiverReady, TransferEvent
from pdrt.data.process import host_identity
from pdrt.errors import TransferFailed, Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import Process, RankAddress, Route, Source

_PREFILL_HOST: Final = "127.0.0.2"
_DECODE_HOST: Final = "127.0.0.1"
_SOURCE: Final = Source(host=_PREFILL_HOST, port=18800, dp_rank=0)
_WARM_UP: Final = 20
_START_S: Final = 60.0


class Decode:
    """The decode end, and the router's part: it mints rooms and tells both ends."""

    def __init__(self, tell_prefill: Callable[[int], None]) -> None:
        self._tell_prefill = tell_prefill
        self._next_room = 0
        self._waiting: dict[int, asyncio.Future[float]] = {}
        self._free = list(range(AT_ONCE))  # places: a slot, and blocks
        self._places: dict[int, int] = {}
        self.end: End

    async def passage(self) -> float:
        """Microseconds of one room. Raises TransferFailed."""
        room, self._next_room = self._next_room, self._next_room + 1
        received = self._waiting[room] = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        self._tell_prefill(room)
        self.end.manager.do(OpenReceiver(room, 0, _SOURCE, began + DEADLINE_S))
        took: float = await received - began
        self._free.append(self._places.pop(room))
        return took * 1e6

    def hear(self, event: TransferEvent) -> None:
        match event:
            case ReceiverReady(room):
                self._admit(room)
            case Received(room):
                self._waiting.pop(room).set_result(time.monotonic())
            case ReceiveFailed(room, _, problem):
                error = TransferFailed(f"room {room}: {problem.message}")
                self._waiting.pop(room).set_exception(error)
            case _:
                pass

    def _admit(self, room: int) -> None:
        place = self._places[room] = self._free.pop()
        deadline = time.monotonic() + DEADLINE_S
        admitted = AdmitReceiver(room, 0, blocks_of(place), 0, place, TOKENS, HASH, deadline)
        self.end.manager.do(admitted)

    async def passages(self, rooms: int, at_once: int) -> list[float]:
        """So many rooms; a lane of rooms one after the other for each that is open at once."""
        found = list[float]()

        async def go(count: int) -> None:
            for _ in range(count):
                found.append(await self.passage())

        async with asyncio.TaskGroup() as tasks:
            for lane in range(at_once):
                tasks.create_task(go(len(range(lane, rooms, at_once))))
        return found


@asynccontextmanager
async def both_ends() -> AsyncIterator[Decode]:
    """A prefill child and our own decode end. Raises Unavailable."""
    key = ClusterKey.fresh()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdrt.bench.rooms"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None
    assert stdout is not None
    try:
        stdin.write(made_spec("prefill", key, _PREFILL_HOST).line())
        async with asyncio.timeout(_START_S):
            words = (await stdout.readline()).decode().split()
        if len(words) != 3:
            raise Unavailable("the prefill process did not start; its words are above")
        route = _route(words[0], int(words[1]), int(words[2]))

        async def routes(_source: Source) -> Route:
            return route

        decode = Decode(lambda room: stdin.write(b"%d\n" % room))
        async with running(made_spec("decode", key, _DECODE_HOST), decode.hear) as end:
            decode.end = end
            end.manager.routes = routes
            yield decode
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def _route(endpoint: str, pid: int, started: int) -> Route:
    process = Process(host=host_identity(), pid=pid, started=started)
    port = int(endpoint.rpartition(":")[2])
    address = RankAddress(rank_ip=_PREFILL_HOST, rank_port=port, process=process)
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


async def measure(rooms: int, at_once: int) -> list[Point]:
    """One at a time, and many at once. Raises PdrtError."""
    async with both_ends() as decode:
        await decode.passages(_WARM_UP, 1)
        return [
            Point.of(
                f"room minted to decode may run, {width} at once",
                await decode.passages(rooms, width),
            )
            for width in (1, at_once)
        ]


def control(rooms: int, report: Report, console: Console) -> int:
    """Measure and report; the exit status. Raises PdrtError."""
    report.check()
    found = [*run(measure(rooms, AT_ONCE)), *ticks.points()]
    if not report.is_quiet:
        show(console, found)
    if report.json_file:
        facts = {"machine": machine_facts()}
        write_points(report.json_file, [asdict(point) | facts for point in found])
    return 0


def show(console: Console, found: Sequence[Point]) -> None:
    table = Table("what", "times", "p50 us", "p99 us")
    for point in found:
        figures = (f"{point.p50_us:,.0f}", f"{point.p99_us:,.0f}")
        table.add_row(point.what, str(point.count), *figures)
    console.print(table)
