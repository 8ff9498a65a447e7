"""Scripted backends as a process of its own, for load: `python -m pdrt.bench.backends`.

Its orders are JSON lines on its standard input: the first names the ports, each other one how
streams go from then on; it ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import uvloop

from pdrt.bench.backend import Backend, Play
from pdrt.bench.bound import bound
from pdrt.errors import PeerLost

_START_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Backends:
    """The process, as the one sees it who started it."""

    prefill: Sequence[int]
    decode: Sequence[int]
    process: asyncio.subprocess.Process

    async def stream(self, chunks: int, every_s: float) -> None:
        """How streams go from now on; returns when that holds."""
        await self._say({"chunks": chunks, "every_s": every_s})

    async def _say(self, order: object) -> bytes:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(_START_S):
            return await stdout.readline()


@asynccontextmanager
async def running(
    prefill: Sequence[int], decode: Sequence[int], cores: Collection[int]
) -> AsyncIterator[Backends]:
    """On these ports (0: a free one) and cores. Raises PeerLost when a port is taken."""
    process = await asyncio.create_subprocess_exec(
        *bound(cores, [sys.executable, "-m", "pdrt.bench.backends"]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    found = Backends(prefill, decode, process)
    try:
        told = await found._say([list(prefill), list(decode)])  # noqa: SLF001 - its own maker
        if not told:
            raise PeerLost("the scripted backends did not start; their words are above")
        ports = json.loads(told)
        yield Backends(ports[0], ports[1], process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5.0)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    groups: list[list[Backend]] = []
    stopped = asyncio.Event()
    lines = _Lines()

    def came() -> None:
        if not lines.feed():
            stopped.set()

    loop.add_reader(0, came)
    while not stopped.is_set():
        while (order := lines.next()) is not None:
            groups = groups or await _listening(order)
            if isinstance(order, dict):
                play = Play(chunks=int(order["chunks"]), every_s=float(order["every_s"]))
                for backend in (each for group in groups for each in group):
                    backend.usual = play
            sys.stdout.write(json.dumps([[b.port for b in group] for group in groups]) + "\n")
            sys.stdout.flush()
        waits = [asyncio.ensure_future(each) for each in (stopped.wait(), lines.more.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()


async def _listening(order: Any) -> list[list[Backend]]:
    groups = [
        [Backend("prefill", is_recording=False) for _ in order[0]],
        [Backend("decode", is_recording=False) for _ in order[1]],
    ]
    for group, ports in zip(groups, order, strict=True):
        for backend, port in zip(group, ports, strict=True):
            await backend.listen(int(port))
    return groups


class _Lines:
    """Whole lines of the standard input."""

    def __init__(self) -> None:
        self.more = asyncio.Event()
        self._data = b""

    def feed(self) -> bool:
        """Whether there will be more."""
        data = os.read(0, 65536)
        self._data += data
        self.more.set()
        return bool(data)

    def next(self) -> Any:
        """The next one, or None."""
        self.more.clear()
        line, gap, rest = self._data.partition(b"\n")
        if not gap:
            return None
        self._data = rest
        return json.loads(line)


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())


if __name__ == "__main__":
    main()
