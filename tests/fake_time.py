"""Time that the test moves: sleepers wake in order, and nothing waits for real."""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count


class FakeTime:
    """`clock` and `sleep` for the code under test, `run_until` for the test."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now

    @property
    def sleeping(self) -> int:
        """How many sleep; of those that gave up, until their time comes."""
        return len(self._sleepers)

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._order), woken))
        await woken

    async def run_until(self, then: float) -> None:
        """Wake whoever sleeps until `then`, each at its time."""
        await settle()
        while self._sleepers and self._sleepers[0][0] <= then:
            at, _, woken = heapq.heappop(self._sleepers)
            self.now = max(self.now, at)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self.now = then

    async def run_for(self, seconds: float) -> None:
        await self.run_until(self.now + seconds)


async def settle(turns: int = 20) -> None:
    """Let every task run until it waits for something that only the test can bring."""
    for _ in range(turns):
        await asyncio.sleep(0)


def stand_still(seconds: float) -> None:
    """What a loop does that is kept busy."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
