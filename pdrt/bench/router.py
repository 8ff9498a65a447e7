"""`pdrt bench router`: what a request costs the router, beside the better one of its peers.

Scripted backends and the load client have a core of their own, the router that is measured the
other. Routers take turns in each round, and a ratio is the median of the rounds' own ratios, so
that what else runs on the machine meets all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, Protocol, cast, get_args
from urllib.parse import urlsplit

from rich.console import Console

from pdrt.bench import backends as scripted
from pdrt.bench import router_peers as peers
from pdrt.bench.backend import MODEL
from pdrt.bench.facts import machine_facts
from pdrt.bench.faults_client import Caller
from pdrt.bench.processes import cpu_s, listeners, memory_mb, with_children
from pdrt.bench.router_load import Load, Path, request
from pdrt.bench.router_process import HOST, Program, pdrt_router, running
from pdrt.bench.router_table import Cell, Found, Tell, Turn, points, progress, show
from pdrt.bench.shell import Report, run, write_points
from pdrt.errors import ConfigError, Unavailable
from pdrt.folder import PrivateFolder

DIRECT: Final = "direct"  # the client and a backend without a router
MINE: Final = "pdrt"
PREFILL_PORTS: Final = (31001,)  # what routers that are running must name
DECODE_PORTS: Final = (31011, 31012)
_MOST: Final = 10_000  # requests in flight
_PREFIX: Final = "pdrt-router-bench-"
_GIVEN: Final = re.compile(
    r"(?P<name>[\w.+-]{1,40})=(?P<url>http://[\w.\[\]:-]+:\d+)(?:@(?P<pid>\d+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    given: Sequence[str] = ()  # NAME=URL or NAME=URL@PID: routers that run already
    peer_python: str = ""
    backends: str = ""  # PREFILL/DECODE,DECODE: ports of those that run already
    path: str = "/v1/completions"
    conc: Sequence[int] = (1, 16, 128)
    streams: Sequence[int] = (64, 256, 1000)
    rounds: int = 5
    json_s: float = 3.0
    stream_s: float = 6.0

    @property
    def cells(self) -> list[Cell]:
        return [Cell("json", c) for c in self.conc] + [Cell("stream", n) for n in self.streams]

    def seconds(self, cell: Cell) -> float:
        return self.json_s if cell.kind == "json" else self.stream_s


def path_of(text: str) -> Path:
    """Raises ConfigError."""
    if text not in get_args(Path):
        raise ConfigError(f"--path {text!r}: want {' or '.join(get_args(Path))}")
    return cast("Path", text)


def widths_of(text: str, option: str) -> list[int]:
    """Raises ConfigError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 1 <= int(word) <= _MOST for word in words):
        raise ConfigError(f"{option} {text!r}: want numbers from 1 to {_MOST}, by commas")
    return [int(word) for word in words]


class Behind(Protocol):
    """The backends, whoever runs them."""

    @property
    def prefill(self) -> Sequence[int]: ...

    @property
    def decode(self) -> Sequence[int]: ...

    async def stream(self, chunks: int, every_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Given:
    """Backends that run already; how they stream is their own business."""

    prefill: Sequence[int]
    decode: Sequence[int]

    @classmethod
    def parse(cls, text: str) -> Given:
        """Raises ConfigError."""
        match = re.fullmatch(r"(\d+)/(\d+(?:,\d+)*)", text)
        if not match:
            raise ConfigError(f"--backends {text!r}: want ports, PREFILL/DECODE,DECODE")
        return cls([int(match[1])], [int(each) for each in match[2].split(",")])

    async def stream(self, chunks: int, every_s: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Routed:
    """A router, or for `direct` a backend, that answers."""

    name: str
    host: str
    port: int
    pids: Sequence[int] = ()


def router(asked: Asked, report: Report, console: Console, environ: Mapping[str, str]) -> int:
    """Measure and report; the exit status is 1 when a request to pdrt failed. Raises PdrtError."""
    report.check()
    path_of(asked.path)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("two cores are needed: one for the router, one for all else")
    with progress(report.is_quiet) as tell:
        os.sched_setaffinity(0, {cores[1]})
        try:
            found = run(_measured(asked, cores, tell, environ))
        finally:
            os.sched_setaffinity(0, cores)
    if not report.is_quiet:
        show(console, found, DIRECT)
    if report.json_file:
        facts = machine_facts()
        write_points(report.json_file, [{**p, "machine": facts} for p in points(found, DIRECT)])
    return 1 if any(turn.errors for turn in found.turns(MINE)) else 0


async def _measured(
    asked: Asked, cores: Sequence[int], tell: Tell, environ: Mapping[str, str]
) -> Found:
    found, given = Found(), [_given(text) for text in asked.given]
    async with AsyncExitStack() as stack:
        behind: Behind
        if asked.backends:
            behind = Given.parse(asked.backends)
        else:
            ports = (PREFILL_PORTS, DECODE_PORTS) if given else ((0,), (0, 0))
            behind = await stack.enter_async_context(scripted.running(*ports, cores[1:2]))
        private = stack.enter_context(contextlib.closing(PrivateFolder(_PREFIX)))
        routers = [Routed(DIRECT, HOST, behind.decode[0])]
        for program in await _programs(asked, private.path, behind):
            started = running(program, private.path, environ, cores[:1])
            child = await stack.enter_async_context(started)
            routers.append(Routed(program.name, HOST, program.port, [child.pid]))
        routers += given
        for routed in routers:
            await _answers(routed)
        turns = list(turns_of(asked, routers))
        for done, (number, cell, routed) in enumerate(turns):
            tell(done / len(turns), f"{routed.name}, {cell}, round {number + 1} of {asked.rounds}")
            await behind.stream(cell.chunks, cell.every_s)
            found.add(cell, routed.name, await _turn(routed, cell, asked))
    return found


async def _programs(asked: Asked, folder: pathlib.Path, behind: Behind) -> list[Program]:
    """pdrt's router, and the peers that are installed."""
    ports = behind.prefill, behind.decode
    found = [pdrt_router(folder, *ports, {})]
    if python := asked.peer_python:
        names = await peers.installed(python)
        found += [peers.program(name, python, *ports) for name in names]
    return found


def turns_of(asked: Asked, routers: Sequence[Routed]) -> Iterator[tuple[int, Cell, Routed]]:
    """Under each load all take their turn, one after the other; who is first rotates."""
    for number in range(asked.rounds):
        for cell in asked.cells:
            at = number % len(routers)
            for routed in (*routers[at:], *routers[:at]):
                yield number, cell, routed


def _given(text: str) -> Routed:
    """Raises ConfigError."""
    match = _GIVEN.fullmatch(text)
    url = urlsplit(match["url"]) if match else None
    if match is None or url is None or url.port is None:
        raise ConfigError(f"--url {text!r}: want NAME=http://HOST:PORT, or with @PID behind it")
    named = [int(match["pid"])] if match["pid"] else sorted(listeners(url.port))
    if not named:
        raise ConfigError(f"--url {text!r}: nobody is seen to listen there; give its process: @PID")
    return Routed(match["name"], url.hostname or HOST, url.port, named)


async def _answers(routed: Routed) -> None:
    caller = Caller(routed.host, routed.port, 5.0)
    got = await caller.ask(stream=False)
    for _ in range(50):
        if got.status == 200:
            return
        await asyncio.sleep(0.1)
        got = await caller.ask(stream=False)
    raise Unavailable(f"{routed.name} answers {got.status}: {got.body[:200]!r}")


@dataclass(slots=True)
class _Meter:
    """What the router used between the begin and the end of what is counted."""

    pids: Sequence[int]
    used_s: float = 0.0
    memory_mb: float = 0.0
    _began_s: float = 0.0
    _all: set[int] = field(default_factory=set)

    def at(self, mark: str) -> None:
        if mark == "begin":
            self._all = with_children(self.pids) if self.pids else set()
            self._began_s = cpu_s(self._all)
        else:
            self.used_s = cpu_s(self._all) - self._began_s
            self.memory_mb = memory_mb(self._all)


async def _turn(routed: Routed, cell: Cell, asked: Asked) -> Turn:
    path, seconds = path_of(asked.path), asked.seconds(cell)
    told = request(routed.host, routed.port, MODEL, cell.kind, path)
    meter = _Meter(routed.pids)
    load = Load(routed.host, routed.port, told, cell.kind, cell.width)
    counted = await load.run(seconds / 4, seconds, meter.at)
    return Turn.of(counted, cell.kind, meter.used_s, meter.memory_mb)
