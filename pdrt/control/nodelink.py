"""A link between two nodes of an instance, from the handshake to its end.

The promise: an end that is gone, frozen, cut off or stuck is noticed within 2 s, by its connection
or by its silence; each end says something often enough.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, TypeVar

from pdrt.control.heartbeat import Time
from pdrt.errors import Overloaded
from pdrt.link import Link

In = TypeVar("In")
Out = TypeVar("Out")
_MET_S: Final = 5.0  # for the handshake of who was welcomed
_BEAT_S: Final = 0.45
_SILENT_LOOKS: Final = 4


class _Silence:
    """Looks are counted, not seconds: when it is we who were stopped, what the other end said
    meanwhile is read before the next look."""

    def __init__(self) -> None:
        self.looks = 0

    async def broken(self, time: Time, each: Callable[[], None]) -> str:
        while self.looks < _SILENT_LOOKS:
            each()
            await time.sleep(_BEAT_S)
            self.looks += 1
        return "it says nothing"


async def met(link: Link[In, Out], cut: Awaitable[str], time: Time) -> bool:
    """Whether the other end comes before `cut` says that it will not, and soon."""

    async def shaken() -> str:
        await link.met()
        return ""

    async def too_late() -> str:
        await time.sleep(_MET_S)
        return "no handshake"

    return not await _first([shaken(), too_late(), cut], [])


async def accompany(
    link: Link[In, Out],
    heard: Callable[[In], None],
    beat: Callable[[], None],
    cut: Awaitable[str],
    time: Time,
) -> str:
    """Talk until one end goes, or `cut` says why; the reason. `beat` is called often."""
    silence = _Silence()

    async def listen() -> NoReturn:
        async for message in link.listen():
            silence.looks = 0
            heard(message)
        raise AssertionError

    async def hung_up() -> str:
        await link.hung_up()
        return "its connection is closed"

    def each() -> None:
        with contextlib.suppress(Overloaded):
            beat()

    ends = [hung_up(), silence.broken(time, each), cut]
    return await _first(ends, [link.run(), listen()])


async def _first(ends: list[Awaitable[str]], others: list[Awaitable[object]]) -> str:
    """What the first of `ends` says; if any of all raises, that."""
    tasks = [asyncio.ensure_future(each) for each in (*ends, *others)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # two may be done at once, and what one raises is not to be lost
        return str(next(iter(done)).result())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
