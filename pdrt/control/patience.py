"""A time limit for others' answers that our own standing still does not use up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_TICKS: Final = 5


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but ticks are counted, not seconds. Raises TimeoutError.

    A loop that stood still, for a long body or because its process was stopped, finds the limit
    passed and the answer not read yet; and one that does so again and again reads it late. Each
    time costs one tick, however long it was.
    """
    loop = asyncio.get_running_loop()
    left = _TICKS
    next_tick: asyncio.TimerHandle

    def tick() -> None:
        nonlocal left, next_tick
        left -= 1
        if left:
            next_tick = loop.call_later(seconds / _TICKS, tick)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        next_tick = loop.call_later(seconds / _TICKS, tick)
        try:
            yield
        finally:
            next_tick.cancel()
