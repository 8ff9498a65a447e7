"""Loads put on several servers in turns, so that whatever else a machine does meets all alike.

In each round every server has a turn with each load, in an order that rotates; what is compared
are figures of the same round. A turn begins when the one before it has left the machine quiet, and
with a request that does not count, since the first one after a pause may take longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, TypeAlias, TypeVar

from aiohttp import ClientSession

from pdrt.bench.heard import Record, told_by
from pdrt.bench.load import Ran, Server, arriving, client, sender, steady
from pdrt.bench.prompts import Prompts
from pdrt.bench.quiet import until_quiet
from pdrt.bench.summary import Turn
from pdrt.bench.talk import Talk
from pdrt.errors import Unavailable
from pdrt.sim.workload import Arrivals

T = TypeVar("T")
Step: TypeAlias = Callable[[str], None]  # told of each request that is over, and whose it was
Turns: TypeAlias = Mapping[tuple[str, str], Sequence[Turn]]  # by load and server
Quiet: TypeAlias = Callable[[], Awaitable[bool]]  # waits; whether the machine is quiet now
_WARMING: Final = -1  # the number of the round before the first


@dataclass(frozen=True, slots=True)
class Load:
    """What a server has to do in one turn."""

    title: str
    prompts: Prompts
    requests: int
    concurrency: int  # conversations under way; 0: no limit, where they arrive
    arrivals: Arrivals | None = None  # else another begins when one is over

    async def put_on(self, session: ClientSession, server: Server, number: int, step: Step) -> Ran:
        whose = f"{server.name}, {self.title}"  # else all loads of a round begin alike
        drawn = self.prompts.draw(self.requests, number, whose)
        talks = [Talk(server.body, asks) for asks in drawn]
        send = sender(session, server)

        def done(_record: Record) -> None:
            step(f"{self.title}: {server.name}")

        if self.arrivals is None:
            return await steady(send, talks, self.concurrency, done)
        gaps = map(self.arrivals.gap, itertools.repeat(Random(f"{self.prompts.seed} {number}")))
        return await arriving(send, talks, gaps, self.concurrency or len(talks), done)


@dataclass(frozen=True, slots=True)
class Effort:
    rounds: int
    warm_up: int  # requests to each server that do not count
    timeout_s: float
    api_key: str = ""
    model: str = ""

    def requests(self, servers: int, loads: Sequence[Load]) -> int:
        """All that will be sent, but for the warm-up."""
        return self.rounds * servers * sum(load.requests for load in loads)


async def measure(
    servers: Sequence[Server],
    loads: Sequence[Load],
    effort: Effort,
    step: Step,
    quiet: Quiet = until_quiet,
) -> Turns:
    """Raises PdrtError when a server cannot be asked at all; later failures are counted."""
    found: dict[tuple[str, str], list[Turn]] = {}
    async with client(effort.timeout_s, effort.api_key) as session:
        servers = [await server.named(session, effort.model) for server in servers]
        for server in servers:
            await _warm_up(session, server, loads, effort.warm_up)
        for number in range(effort.rounds):
            for load in loads:
                for server in rotated(servers, number):
                    is_quiet = len(servers) == 1 or await _prepared(
                        session, server, load, number, quiet
                    )
                    ran = await load.put_on(session, server, number, step)
                    turn = Turn.of(ran, is_quiet=is_quiet)
                    found.setdefault((load.title, server.name), []).append(turn)
    return found


async def _warm_up(
    session: ClientSession, server: Server, loads: Sequence[Load], requests: int
) -> None:
    """Of each load that many requests, in its concurrency. Raises Unavailable when one fails."""
    for load in loads:
        ran = await _uncounted(session, server, load, requests, _WARMING)
        for told in map(told_by, ran.records):
            if told.failure:
                raise Unavailable(f"{server.name}, warming up: {told.failure}: {told.reason}")


async def _prepared(
    session: ClientSession, server: Server, load: Load, number: int, quiet: Quiet
) -> bool:
    """For a turn after another server's. Whether the machine is quiet."""
    is_quiet = await quiet()
    await _uncounted(session, server, load, 1, _WARMING - 1 - number)
    return is_quiet


async def _uncounted(
    session: ClientSession, server: Server, load: Load, requests: int, number: int
) -> Ran:
    """So many requests of the load, in its concurrency. `number` is of no round."""
    few = replace(load, requests=requests, concurrency=load.concurrency or requests, arrivals=None)
    return await few.put_on(session, server, number, lambda _whose: None)


def rotated(those: Sequence[T], number: int) -> list[T]:
    at = number % len(those)
    return [*those[at:], *those[:at]]
