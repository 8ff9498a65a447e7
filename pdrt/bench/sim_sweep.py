"""`pdrt sim sweep`: the layouts that `pdrt bench sweep` starts, simulated over the same lengths."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from pdrt.bench.bar import Bar
from pdrt.bench.sweep import Shown, show
from pdrt.bench.sweep_plot import Point
from pdrt.bench.sweep_points import Cell, Grid, Store
from pdrt.sim.arrangement import Arrangement
from pdrt.sim.cost import Cost
from pdrt.sim.run import simulate
from pdrt.sim.tally import Good
from pdrt.sim.workload import Arrivals, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    cost: Cost
    layouts: Sequence[Arrangement]
    grid: Grid
    requests: int
    arrivals: Arrivals
    seed: int
    good: Good

    @property
    def names(self) -> list[str]:
        return [layout.name for layout in self.layouts]

    def settings(self, workers: int) -> Mapping[str, object]:
        """What all points of a folder must have been simulated with."""
        text = self.cost.model_dump_json()
        rate, concurrency = self.arrivals.rate, self.arrivals.concurrency
        return {
            "workers": workers,
            "requests": self.requests,
            "rate": None if concurrency else "inf" if math.isinf(rate) else rate,
            "concurrency": concurrency or None,
            "seed": self.seed,
            "limits_ms": {"ttft": self.good.ttft_s * 1e3, "itl": self.good.itl_s * 1e3},
            "cost": self.cost.name,
            "cost_digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    def point(self, layout: Arrangement, cell: Cell) -> dict[str, object]:
        lengths = cell.input_len, cell.output_len
        load = Workload.of(self.requests, *lengths, self.arrivals, seed=self.seed)
        outcome = simulate(self.cost, layout, load, good=self.good)
        return {"input_len": lengths[0], "output_len": lengths[1], **outcome.point()}


def sweep(asked: Asked, store: Store, shown: Shown) -> int:
    """Simulate what is missing and report; the exit status is 1 when requests were refused.

    Raises ConfigError.
    """
    store.prepare()
    cells = asked.grid.cells
    missing = list(_missing(asked, store))
    total = len(cells) * len(asked.layouts)
    with Bar(shown.report.is_quiet, total, "starting") as bar:
        bar.say("kept from earlier", total - len(missing))
        for layout, cell in missing:
            bar.say(f"{layout.name}: {cell}")
            store.write(layout.name, cell, {**asked.point(layout, cell), **store.settings})
            bar.step(f"{layout.name}: {cell}")
    points = store.points(asked.names, cells)
    show(points, asked.grid.fixed, store, shown)
    _tell_refused(points)
    return 1 if any(point["errors"] for point in points) else 0


def _missing(asked: Asked, store: Store) -> Iterator[tuple[Arrangement, Cell]]:
    for cell in asked.grid.cells:
        for layout in asked.layouts:
            if store.kept(layout.name, cell) is None:
                yield layout, cell


def _tell_refused(points: Sequence[Point]) -> None:
    for point in points:
        if point["errors"]:
            where = f"{point['layout']}, in {point['input_len']}, out {point['output_len']}"
            codes = ", ".join(f"{n} x {code}" for code, n in _failures(point).items())
            Console(stderr=True, highlight=False).print(f"{where}: {codes}", style="red")


def _failures(point: Point) -> Mapping[str, object]:
    found = point["failures"]
    return found if isinstance(found, Mapping) else {}
