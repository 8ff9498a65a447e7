"""`pdrt bench transfer` for a person: progress meanwhile, tables at the end, files if wanted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pdrt import telemetry
from pdrt.bench.cases import Case, Wanted, check_files
from pdrt.bench.control_line import Told, split_address, to_nobody
from pdrt.bench.plot import check_matplotlib, draw
from pdrt.bench.results import Results, points
from pdrt.bench.table import show
from pdrt.bench.target import serve
from pdrt.bench.transfer import Place, Step, local_target, measure
from pdrt.config import bracketed
from pdrt.errors import PdrtError, first_of
from pdrt.keys import ClusterKey

T = TypeVar("T")
_COLUMNS: Final = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())


@dataclass(frozen=True, slots=True)
class Report:
    """Where the figures go, beside the tables."""

    json_file: str = ""
    plot: str = ""
    is_quiet: bool = False

    def check(self) -> None:
        """Before anything is measured. Raises ConfigError."""
        check_files(self.json_file, self.plot)
        if self.plot:
            check_matplotlib()


def transfer(wanted: Wanted, report: Report, console: Console, remote: Place | None = None) -> int:
    """Measure, here or towards a remote target, and report; the exit status. Raises PdrtError."""
    report.check()
    err = Console(stderr=True, highlight=False)
    told = to_nobody if report.is_quiet else _teller(err)
    if remote is not None:
        told(f"connecting to {bracketed(remote.host)}:{remote.port}")
    with progress(report.is_quiet, wanted, err) as step:
        results = run(_measured(wanted, remote, step, told))
    if not report.is_quiet:
        show(console, results)
    if report.json_file:
        write_points(report.json_file, points(results))
    if report.plot:
        draw(results, report.plot)
    return 0


def _teller(err: Console) -> Told:
    """Lines for a person, above the progress; at once, in a pipe too."""

    def told(line: str) -> None:
        err.print(line, soft_wrap=True, markup=False)
        err.file.flush()

    return told


async def _measured(wanted: Wanted, remote: Place | None, step: Step, told: Told) -> Results:
    if remote is not None:
        return await measure(wanted, remote, step, told)
    async with local_target() as place:
        return await measure(wanted, place, step)


def listen(address: str, key: ClusterKey, wait_s: float, console: Console) -> int:
    """Be the target for one writer elsewhere; the exit status. Raises PdrtError."""
    host, port = split_address(address, "--listen")

    def listening(endpoint: str) -> None:
        where = endpoint.removeprefix("tcp://")
        console.print("waiting for a writer; on the other host, with the same cluster key, run:")
        console.print(f"  pdrt bench transfer --connect {where}", soft_wrap=True)
        console.file.flush()  # in a pipe too

    err = Console(stderr=True, highlight=False)
    run(serve(key, host, port, wait_s, listening, _teller(err)))
    console.print("the writer is done")
    return 0


def place_of(address: str, key: ClusterKey) -> Place:
    """Where `--connect` leads. Raises ConfigError."""
    return Place(key, *split_address(address, "--connect"))


def run(main: Coroutine[Any, Any, T]) -> T:
    """In a loop like a worker's. Raises what went wrong, not the group that it came in."""
    telemetry.configure("warning")
    sys.setswitchinterval(0.001)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main)
        except BaseExceptionGroup as group:
            cause = first_of(group)
            if isinstance(cause, PdrtError):
                raise cause from group
            raise


def leave(status: int) -> NoReturn:
    """End without exit handlers: one of a library that NIXL brings (libnl) crashes in its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def progress(is_quiet: bool, wanted: Wanted, err: Console) -> Iterator[Step]:
    """Drawn between rounds only: a thread that draws would be measured too."""
    cases = list(wanted.cases())
    bar = Progress(*_COLUMNS, console=err, auto_refresh=False, disable=is_quiet)
    with bar:
        task = bar.add_task("opening the transports", total=len(cases) * wanted.rounds)

        def step(case: Case, number: int) -> None:
            done = cases.index(case) * wanted.rounds + number
            bar.update(task, description=f"{case!s:>14}", completed=done, refresh=True)

        yield step
        bar.update(task, description="measured", completed=len(cases) * wanted.rounds)


def write_points(file: str, found: Sequence[Mapping[str, object]]) -> None:
    with open(file, "w", encoding="utf-8") as out:
        json.dump(found, out, indent=1)
