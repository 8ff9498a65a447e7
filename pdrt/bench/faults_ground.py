"""Where faults are tried: a router in front of scripted backends, and how all is set well again."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdrt.bench.backend import OK, Backend, Play, Seen, Side
from pdrt.bench.faults_client import Caller

_LOOK_S = 0.01
_WELL_S = 12.0  # a breaker may be open


class Group:
    """All backends of a side, scripted alike."""

    def __init__(self, side: Side, count: int) -> None:
        self.backends = [Backend(side) for _ in range(count)]

    async def listen(self, ports: Sequence[int] = ()) -> None:
        """On these ports, or on free ones. Raises OSError."""
        for number, backend in enumerate(self.backends):
            await backend.listen(ports[number] if ports else 0)

    def does(self, play: Play) -> None:
        for backend in self.backends:
            backend.usual = play

    def refuse(self) -> None:
        for backend in self.backends:
            backend.refuse()

    async def recover(self) -> None:
        for backend in self.backends:
            await backend.recover()

    @property
    def seen(self) -> list[Seen]:
        return [each for backend in self.backends for each in backend.seen]

    @property
    def sent(self) -> int:
        """Bytes of all answers."""
        return sum(each.sent for each in self.seen)

    @property
    def open(self) -> list[Seen]:
        return [each for each in self.seen if each.ended is None]


@dataclass(slots=True)
class Ground:
    """A router and what stands behind it."""

    caller: Caller
    prefill: Group
    decode: Group
    pids: Sequence[int] = ()  # the router's processes, where they are known

    async def until(self, holds: Callable[[], bool], within_s: float) -> float | None:
        """Seconds until it held; None when it did not within the bound."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > within_s:
                return None
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - began

    async def reached(self, prefill: int = 1, decode: int = 1) -> None:
        """So many requests are open on each side, or a router works otherwise and a second is gone.

        Some ask prefill first and decode only when it has answered.
        """
        await self.until(
            lambda: len(self.prefill.open) >= prefill and len(self.decode.open) >= decode, 1.0
        )

    async def released(self, within_s: float) -> float | None:
        """Seconds until neither side works for anybody, and the router knows of no request."""
        began = time.monotonic()
        while time.monotonic() - began < within_s:
            if not (self.prefill.open or self.decode.open or await self._in_flight()):
                return time.monotonic() - began
            await asyncio.sleep(_LOOK_S)
        return None

    async def _in_flight(self) -> int:
        """Requests that the router has, where it says so."""
        found = re.search(rb'"in_flight": ?(\d+)', await self._health())
        return int(found[1]) if found else 0

    async def _all_alive(self) -> bool:
        """No instance is out of use, where the router says so."""
        return set(re.findall(rb'"health": ?"(\w+)"', await self._health())) <= {b"alive"}

    async def _health(self) -> bytes:
        got = await self.caller.send(self.caller.request(b"", method="GET", path="/health"))
        return got.body

    async def well(self) -> float | None:
        """Everything is well again, and so long it took until a request was served."""
        await self.prefill.recover()
        await self.decode.recover()
        began = time.monotonic()
        while time.monotonic() - began < _WELL_S:
            got = await self.caller.ask(stream=False)
            if got.status == 200 and await self._all_alive():
                self.prefill.does(OK)
                for group in (self.prefill, self.decode):
                    for backend in group.backends:
                        backend.seen.clear()
                return time.monotonic() - began
            await asyncio.sleep(0.05)
        return None


@asynccontextmanager
async def scripted(
    prefill: Sequence[int] = (0, 0), decode: Sequence[int] = (0, 0)
) -> AsyncIterator[tuple[Group, Group]]:
    """Backends in this process, on these ports; 0 is a free one. Raises OSError."""
    groups = Group("prefill", len(prefill)), Group("decode", len(decode))
    try:
        await groups[0].listen(prefill)
        await groups[1].listen(decode)
        yield groups
    finally:
        for group in groups:
            group.refuse()
