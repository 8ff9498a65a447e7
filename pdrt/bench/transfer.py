"""`pdrt bench transfer`: pdrt's transports beside memcpy and plain loops, turn by turn in one run.

In each round every way has one turn, in an order that rotates, so that whatever else the machine
does meets all alike. The promise: what the last round moved is checked byte for byte.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from pdrt.bench.cases import Case, Wanted
from pdrt.bench.control_line import ControlLine, Told, asking, own_address, to_nobody
from pdrt.bench.facts import machine_facts
from pdrt.bench.pairing import Pairing, Stretch, checksum, fill
from pdrt.bench.plain import STYLES, PlainSender
from pdrt.bench.results import Results, Turn
from pdrt.bench.target import Orders
from pdrt.bench.ways import Memcpy, PlainLoop, ViaTransport, Way, open_named, pool_memory
from pdrt.bench.words import Check, Hello, Sum, Welcome
from pdrt.data.memory import PoolMemory
from pdrt.device.poolsize import host_bytes
from pdrt.errors import ConfigError, PdrtError, TransferFailed, Unavailable
from pdrt.keys import ClusterKey

TARGET_HOST: Final = "127.0.0.2"
_MOST_OF_MEMORY: Final = 0.8
_START_S: Final = 60.0
_LEAST_TURN_S: Final = 30.0  # before a turn that does not end is given up ...
_LEAST_RATE: Final = 10e6  # ... and for each of so many bytes a second one more


@dataclass(frozen=True, slots=True)
class Place:
    """Where a target listens, and with which key it is talked to."""

    key: ClusterKey
    host: str
    port: int


Step = Callable[[Case, int], None]  # a case begins its round number ...


@asynccontextmanager
async def local_target(host: str = TARGET_HOST) -> AsyncIterator[Place]:
    """A child of ours at its own loopback address. Raises Unavailable."""
    key = ClusterKey.fresh()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdrt.bench.target"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        orders = Orders(host=host, key_hex=key.secret.hex())
        process.stdin.write(orders.model_dump_json().encode() + b"\n")
        async with asyncio.timeout(_START_S):
            endpoint = (await process.stdout.readline()).decode().strip()
        if not endpoint:
            raise Unavailable("the target process did not start; its words are above")
        yield Place(key, host, int(endpoint.rpartition(":")[2]))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure(wanted: Wanted, place: Place, step: Step, told: Told = to_nobody) -> Results:
    """All ways in all cases, against the target at this place. Raises PdrtError.

    `told`: what keeps the target from answering.
    """
    if 2 * wanted.pool_bytes > _MOST_OF_MEMORY * host_bytes():
        raise ConfigError(f"--pool: {wanted.pool_bytes} bytes twice do not fit this host")
    results = Results(machine_facts())
    async with AsyncExitStack() as stack:
        memory = pool_memory(wanted.pool_bytes)
        stack.callback(memory.close)
        fill(memory.array[memory.pool_at :])
        line = await stack.enter_async_context(asking(place.key, place.host, place.port, told=told))
        hello = Hello(
            number=line.next_number(),
            endpoint=line.endpoint,
            pool_bytes=wanted.pool_bytes,
            transports=wanted.transports,
        )
        welcome = await line.ask(hello, Welcome)
        results.where = f"{own_address(place.host)} to {place.host}"
        opening = _Opening(place, memory, welcome, stack)
        ways = await opening.ways(wanted, results.refused)
        await Run(wanted, line, memory, results, ways).all(step)
    return results


@dataclass(slots=True)
class _Opening:
    place: Place
    memory: PoolMemory
    welcome: Welcome
    stack: AsyncExitStack

    async def ways(self, wanted: Wanted, refused: dict[str, str]) -> list[Way]:
        """Those that can be had; of the others, why not."""
        refused.update(self.welcome.refused)
        ways: list[Way] = [Memcpy(self.memory.array[self.memory.pool_at :])]
        address = self.place.host, self.welcome.plain_port
        for style in STYLES if "tcp" in wanted.transports else ():
            sender = PlainSender(address, self.welcome.plain_token, style)
            self.stack.callback(sender.close)
            ways.append(PlainLoop(sender, style, self.memory.pool_view))
        for name in wanted.transports:
            if name in refused:
                continue
            try:
                transport = open_named(
                    name, self.memory, own_address(self.place.host), self.place.key
                )
                self.stack.push_async_callback(transport.close)
                region, process = self.welcome.region, self.welcome.process
                ways.append(await ViaTransport.attached(transport, self.memory, process, region))
            except PdrtError as error:
                refused[name] = str(error)
        return ways


@dataclass(slots=True)
class Run:
    """The rounds of all cases. A way that fails is out, with the reason."""

    wanted: Wanted
    line: ControlLine
    memory: PoolMemory
    results: Results
    ways: list[Way]
    _turn: int = 0
    _place: int = 0  # in the shuffled order: nobody finds the last one's blocks in the cache

    async def all(self, step: Step) -> None:
        turn_s = self.wanted.turn_s(len(self.ways))
        for case in self.wanted.cases():
            pairing = Pairing(self.wanted.pool_bytes, case.block_bytes)
            for number in range(-1, self.wanted.rounds):  # the first one warms up
                step(case, max(0, number))
                for way in _rotated(self.ways, number):
                    await self._turn_of(way, case, pairing, number, turn_s)

    async def _turn_of(
        self, way: Way, case: Case, pairing: Pairing, number: int, turn_s: float
    ) -> None:
        try:
            began = self._place
            turn = await self._bounded(way, case, pairing, turn_s if number >= 0 else 0.0)
            if number < 0:
                return
            if number == self.wanted.rounds - 1 and way.reaches_target:
                await self._check(way, case, pairing, Stretch(began, 0, self._turn), turn)
        except (TransferFailed, OSError) as error:
            self.ways.remove(way)
            self.results.forget(way.name, case)
            self.results.refused[way.name] = f"{case}: {error}"
            return
        self.results.add(way.name, case, turn)

    async def _bounded(self, way: Way, case: Case, pairing: Pairing, turn_s: float) -> Turn:
        batch_bytes = case.batch * case.block_bytes
        limit_s = _LEAST_TURN_S + turn_s + batch_bytes / _LEAST_RATE
        try:
            async with asyncio.timeout(limit_s):
                return await self._moved(way, case, pairing, turn_s)
        except TimeoutError:
            raise TransferFailed(f"a write did not end within {limit_s:.0f} s") from None

    async def _moved(self, way: Way, case: Case, pairing: Pairing, turn_s: float) -> Turn:
        """Batch after batch until the time is over or each block was moved once."""
        self._turn += 1
        latencies = list[float]()
        until = time.perf_counter() + turn_s
        most = max(1, pairing.blocks // case.batch)
        while not latencies or (len(latencies) < most and time.perf_counter() < until):
            stretch = Stretch(self._place, case.batch, self._turn)
            latencies.append(await way.move(pairing, stretch))
            self._place += case.batch
        return Turn(len(latencies) * case.batch * case.block_bytes, tuple(latencies))

    async def _check(
        self, way: Way, case: Case, pairing: Pairing, began: Stretch, turn: Turn
    ) -> None:
        """That the target has, in place, what the turn moved. Raises TransferFailed."""
        stretch = Stretch(began.first, len(turn.latencies) * case.batch, began.turn)
        question = Check(
            number=self.line.next_number(),
            block_bytes=case.block_bytes,
            first=stretch.first,
            count=stretch.count,
            turn=stretch.turn,
        )
        found = await self.line.ask(question, Sum)
        sources = pairing.sources(stretch)
        if found.value != checksum(self.memory.pool_view, sources, case.block_bytes):
            raise TransferFailed(f"{way.name} did not bring {case} over as it was")


def _rotated(ways: Sequence[Way], number: int) -> list[Way]:
    first = number % len(ways) if ways else 0
    return [*ways[first:], *ways[:first]]
