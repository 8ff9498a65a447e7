"""`pdrt bench sweep`: every layout of N equal workers, over input and over output lengths.

Each layout is started once and asked all that it was not asked in an earlier run; every layout
gets the same prompts. One that does not start, or stops serving, is told and left out, and the
others are measured all the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from aiohttp import ClientSession
from rich.console import Console

from pdrt.bench.bar import Bar
from pdrt.bench.facts import machine_facts
from pdrt.bench.heard import told_by
from pdrt.bench.layouts import Layout
from pdrt.bench.load import Server, client
from pdrt.bench.plot import INSTALL
from pdrt.bench.rounds import Step
from pdrt.bench.shell import Report, write_points
from pdrt.bench.summary import Limits, Turn, point
from pdrt.bench.sweep_plot import Fixed, Point, draw
from pdrt.bench.sweep_points import Amount, Cell, Grid, Store, tables
from pdrt.errors import PdrtError, Unavailable


class Place(Protocol):
    """Where layouts run."""

    def found_by(self, layout: Layout, ask: Callable[[str], Awaitable[None]], /) -> None:
        """Start it, `ask` at its URL, and end it. Raises PdrtError, and KeyboardInterrupt."""
        ...


Draw: TypeAlias = Callable[[Sequence[Point], Path, Fixed], Sequence[Path]]
Keep: TypeAlias = Callable[[Cell, Turn], None]
_WARMING: Final = -1  # the number of a round that does not count
_WARM_TOKENS: Final = 8


def drawn_if_possible(points: Sequence[Point], folder: Path, fixed: Fixed) -> Sequence[Path]:
    """None without matplotlib, which is an extra."""
    return draw(points, folder, fixed) if importlib.util.find_spec("matplotlib") else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    layouts: Sequence[Layout]
    grid: Grid
    amount: Amount
    limits: Limits
    timeout_s: float

    @property
    def names(self) -> list[str]:
        return [layout.name for layout in self.layouts]


@dataclass(frozen=True, slots=True)
class Shown:
    """Where a person and a program find the points, beside their folder."""

    report: Report
    console: Console
    draw: Draw = drawn_if_possible


def sweep(asked: Asked, place: Place, store: Store, shown: Shown) -> int:
    """Measure what is missing and report; the exit status is 1 when anything failed.

    Raises PdrtError.
    """
    store.prepare()
    missing = {layout: _missing(asked, store, layout) for layout in asked.layouts}
    each = asked.amount.requests * asked.amount.rounds
    total = each * len(asked.grid.cells) * len(asked.layouts)
    left = each * sum(map(len, missing.values()))
    has_failed = False
    with Bar(shown.report.is_quiet, total, "starting") as bar:
        bar.say("kept from earlier", total - left)
        for layout, cells in missing.items():
            if cells:
                has_failed |= not _measured(asked, place, store, (layout, cells), bar)
    points = store.points(asked.names, asked.grid.cells)
    has_failed |= any(told["errors"] for told in points)
    show(points, asked.grid.fixed, store, shown)
    return 1 if has_failed else 0


def _missing(asked: Asked, store: Store, layout: Layout) -> list[Cell]:
    return [cell for cell in asked.grid.cells if store.kept(layout.name, cell) is None]


def _measured(
    asked: Asked, place: Place, store: Store, turn: tuple[Layout, Sequence[Cell]], bar: Bar
) -> bool:
    """Whether the layout was measured in all these cells; what was is kept in any case."""
    layout, cells = turn
    bar.say(f"{layout.name}: starting")
    machine = machine_facts()

    def keep(cell: Cell, found: Turn) -> None:
        told = told_point(asked, store.settings, layout, cell, found)
        store.write(layout.name, cell, {**told, "machine": machine})
        for code, count in found.failures.most_common():
            bar.tell(f"{layout.name}, {cell}: {count} x {code}, the first: {found.reasons[code]}")

    def step(whose: str) -> None:
        bar.step(f"{layout.name}: {whose.partition(':')[0]}")

    try:
        place.found_by(layout, partial(_ask, asked, layout, cells, keep, step))
    except PdrtError as error:
        bar.tell(f"{layout.name}: {str(error) or error.code}")
        return False
    return True


async def _ask(
    asked: Asked, layout: Layout, cells: Sequence[Cell], keep: Keep, step: Step, url: str
) -> None:
    """Raises Unavailable when it cannot warm up, or fails at all requests of a cell."""
    server = Server("pdrt", url, form="generate")
    async with client(asked.timeout_s) as session:
        await _warm_up(session, server, asked, layout)
        for cell in cells:
            load = asked.amount.load(cell)
            rounds = range(asked.amount.rounds)
            turn = Turn.pooled(
                [Turn.of(await load.put_on(session, server, n, step)) for n in rounds]
            )
            keep(cell, turn)
            if not turn.answers:
                raise Unavailable("it does not serve any more: its other lengths are left out")


async def _warm_up(session: ClientSession, server: Server, asked: Asked, layout: Layout) -> None:
    """Long prompts for every worker, then the first cell once. Raises Unavailable."""
    first, *_ = asked.grid.cells
    long = asked.amount.load(Cell(asked.grid.longest.input_len, _WARM_TOKENS))
    many = 2 * layout.arrangement.workers
    for load in (replace(long, requests=many), asked.amount.load(first)):
        ran = await load.put_on(session, server, _WARMING, lambda _whose: None)
        for told in map(told_by, ran.records):
            if told.failure:
                raise Unavailable(f"warming up: {told.failure}: {told.reason}")


def told_point(
    asked: Asked, settings: Mapping[str, object], layout: Layout, cell: Cell, turn: Turn
) -> dict[str, object]:
    return {
        "layout": layout.name,
        "workers": layout.arrangement.workers,
        "input_len": cell.input_len,
        "output_len": cell.output_len,
        **point(turn, asked.limits),
        **settings,
    }


def show(points: Sequence[Point], fixed: Fixed, store: Store, shown: Shown) -> None:
    report, console = shown.report, shown.console
    if report.json_file:
        write_points(report.json_file, points)
    if not report.is_quiet:
        for title, table in tables(points, fixed) if points else ():
            console.print(title)
            console.print(table)
    files = shown.draw(points, store.folder, fixed)
    if not report.is_quiet and points:
        told = ", ".join(file.name for file in files) or f"none without matplotlib: {INSTALL}"
        console.print(
            f"points in {store.folder}; pictures there: {told}", soft_wrap=True, markup=False
        )
