"""`pdrt bench faults`: what a router answers when something goes wrong, and whether in time.

Scripted backends in this process do wrong on command, on both sides of the router; a client that
can misbehave asks. Each row has a verdict against the bounds of faults_verdict.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdrt.bench.facts import machine_facts
from pdrt.bench.faults_client import Caller, Got
from pdrt.bench.faults_ground import Ground, scripted
from pdrt.bench.faults_real import Real, real_rows, real_started
from pdrt.bench.faults_rows import OneRow, Row, rows
from pdrt.bench.faults_verdict import BOUND_S, Limits, Outcome, broken
from pdrt.bench.load import Server
from pdrt.bench.router_process import pdrt_router, running
from pdrt.bench.shell import Report, run, write_points
from pdrt.errors import ConfigError
from pdrt.folder import PrivateFolder

Tell: TypeAlias = Callable[[str], None]
G = TypeVar("G")
_KINDS: Final = ("all", "scripted", "real")
_PREFIX: Final = "pdrt-faults-"
_BEAT: Final = {"heartbeat_s": 0.5, "heartbeat_timeout_s": 0.5}  # so that rows follow soon
_MOST_S: Final = 5.0  # how long legs are watched
PORTS: Final = "31001,31002/31011,31012"  # of prefill and decode: what running routers name
_PORTS: Final = re.compile(r"\d+(,\d+)*/\d+(,\d+)*")
_COLUMNS: Final = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    servers: Sequence[Server] = ()  # routers that run already; none: pdrt's is started
    only: str = ""  # a part of the rows' names
    ports: str = PORTS  # of the scripted backends of routers that run
    instances: str = "all"  # scripted, real or all; routers that run have scripted ones
    is_quick: bool = False
    limits: Limits = field(default_factory=lambda: Limits(deadline_s=2.0, slow_reader_s=3.0))
    api_key: str = ""
    model: str = ""

    def rows(self) -> tuple[list[Row], list[Real]]:
        """Of scripted backends and of real instances. Raises ConfigError when there are none."""
        if self.instances not in _KINDS:
            raise ConfigError(f"--instances {self.instances!r}: want {', '.join(_KINDS)}")
        is_real = self.instances != "scripted" and not self.servers
        scripted_rows = [] if self.instances == "real" else self._named(rows())
        found = scripted_rows, self._named(list(real_rows())) if is_real else []
        if not any(found):
            raise ConfigError(f"--only {self.only!r}: no row has that in its name")
        return found

    def _named(self, among: Sequence[OneRow[G]]) -> list[OneRow[G]]:
        words = [word.strip() for word in self.only.split(",") if word.strip()]
        named = [row for row in among if not words or any(word in row.name for word in words)]
        return [row for row in named if not (self.is_quick and row.is_slow)]


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table, as it went."""

    router: str
    name: str
    outcome: Outcome
    problems: Sequence[str]

    def point(self) -> Mapping[str, object]:
        got = self.outcome.got
        return {
            "router": self.router,
            "row": self.name,
            "status": got.status,
            "code": got.told,
            "path": got.headers.get("x-pd-path", ""),
            "end": got.end,
            "answer_s": round(got.total_s, 3),
            "released_s": _rounded(self.outcome.released_s),
            "broken": list(self.problems),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def faults(asked: Asked, report: Report, console: Console, environ: Mapping[str, str]) -> int:
    """Try all and report; the exit status is 1 when a bound was broken. Raises PdrtError."""
    report.check()
    chosen, real = asked.rows()
    with _progress(report.is_quiet, len(chosen) * max(len(asked.servers), 1) + len(real)) as tell:
        lines = run(measure(asked, chosen, tell, environ)) if chosen else []
        lines += run(_of_real(real, tell, environ)) if real else []
    if not report.is_quiet:
        show(console, lines)
    if report.json_file:
        facts = machine_facts()
        write_points(report.json_file, [{**line.point(), "machine": facts} for line in lines])
    return 1 if any(line.problems for line in lines) else 0


async def measure(
    asked: Asked, chosen: Sequence[Row], tell: Tell, environ: Mapping[str, str]
) -> list[Line]:
    found = list[Line]()
    if not asked.servers:
        async with started(asked.limits, environ) as ground:
            return [await tried("pdrt", row, ground, asked.limits, tell) for row in chosen]
    ports = ports_of(asked.ports)
    try:
        async with scripted(*ports) as (prefill, decode):
            for server in asked.servers:
                ground = Ground(_caller(server, asked), prefill, decode)
                if await ground.well() is None:
                    raise ConfigError(
                        f"{server.name} serves nothing: let it name {asked.ports} of 127.0.0.1 as"
                        " prefill and decode, which are plain backends"
                    )
                limits = replace(asked.limits, is_pdrt=await _is_pdrt(ground))
                found += [await tried(server.name, row, ground, limits, tell) for row in chosen]
    except OSError as error:
        raise ConfigError(f"--ports {asked.ports}: {error}") from error
    return found


def ports_of(text: str) -> tuple[list[int], list[int]]:
    """Of prefill and of decode backends. Raises ConfigError."""
    if not _PORTS.fullmatch(text):
        raise ConfigError(f"--ports {text!r}: want PREFILL,PREFILL/DECODE,DECODE")
    prefill, decode = text.split("/")
    return [int(each) for each in prefill.split(",")], [int(each) for each in decode.split(",")]


async def _of_real(real: Sequence[Real], tell: Tell, environ: Mapping[str, str]) -> list[Line]:
    limits = Limits(deadline_s=1.0)
    async with real_started(environ) as ground:
        return [await tried("pdrt, real instances", row, ground, limits, tell) for row in real]


def _caller(server: Server, asked: Asked) -> Caller:
    url = urlsplit(server.base)
    caller = Caller(url.hostname or "", url.port or 80)
    return replace(caller, api_key=asked.api_key, model=asked.model or caller.model)


async def _is_pdrt(ground: Ground) -> bool:
    return "x-pd-path" in (await ground.caller.ask(stream=False)).headers


@asynccontextmanager
async def started(limits: Limits, environ: Mapping[str, str]) -> AsyncIterator[Ground]:
    """pdrt's router in front of backends in this process. Raises PdrtError."""
    with contextlib.closing(PrivateFolder(_PREFIX)) as private:
        async with scripted() as (prefill, decode):
            ports = [[each.port for each in group.backends] for group in (prefill, decode)]
            timeouts = {
                "request_s": limits.deadline_s,
                "slow_reader_s": limits.slow_reader_s,
                **_BEAT,
            }
            program = pdrt_router(Path(private.path), ports[0], ports[1], timeouts)
            async with running(program, private.path, environ) as child:
                caller = Caller("127.0.0.1", program.port)
                ground = Ground(caller, prefill, decode, (child.pid,))
                await ground.well()
                yield ground


class Place(Protocol):
    """A ground, before and after a row."""

    caller: Caller

    async def released(self, within_s: float) -> float | None: ...

    async def well(self) -> float | None: ...


P = TypeVar("P", bound=Place)


async def tried(router: str, row: OneRow[P], ground: P, limits: Limits, tell: Tell) -> Line:
    """One row, and all well again after it."""
    tell(f"{router}: {row.name}")
    patience_s = limits.answer_s(row.want) + BOUND_S
    ground.caller = replace(ground.caller, patience_s=patience_s)
    await ground.well()  # backends in a process that stood still are taken for dead a while
    got: Got = await row.act(ground)
    released = await ground.released(_MOST_S)
    outcome = Outcome(got, released, await ground.well())
    return Line(router, row.name, outcome, broken(row.want, outcome, limits))


# For a person.


@contextmanager
def _progress(is_quiet: bool, total: int) -> Iterator[Tell]:
    console = Console(stderr=True, highlight=False)
    with Progress(*_COLUMNS, console=console, disable=is_quiet) as bar:
        task = bar.add_task("starting", total=total)
        number = -1

        def tell(text: str) -> None:
            nonlocal number
            number += 1
            bar.update(task, description=text, completed=number)

        yield tell
        bar.update(task, description="tried", completed=total)


def show(console: Console, lines: Sequence[Line]) -> None:
    for router in dict.fromkeys(line.router for line in lines):
        mine = [line for line in lines if line.router == router]
        table = Table(title=router, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("fault", "status", "code", "path"):
            table.add_column(name, no_wrap=name != "fault")
        for name in ("answered s", "let go s"):
            table.add_column(name, justify="right")
        table.add_column("bound")
        for line in mine:
            table.add_row(*_cells(line), style="red" if line.problems else "")
        console.print(table)
        kept = sum(not line.problems for line in mine)
        console.print(f"{router}: {kept} of {len(mine)} rows within their bounds")


def _cells(line: Line) -> list[str]:
    got, released = line.outcome.got, line.outcome.released_s
    is_answered = got.end != "left"
    status = (str(got.status) if got.status else got.end) if is_answered else "client left"
    return [
        line.name,
        status,
        got.told,
        got.headers.get("x-pd-path", ""),
        f"{got.total_s:.2f}" if is_answered else "",
        "never" if released is None else f"{released:.2f}",
        "; ".join(line.problems) or "kept",
    ]
