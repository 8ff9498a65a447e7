"""What a sweep measures, and where its points lie: a file each, kept from run to run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE
from rich.table import Table

from pdrt.bench.prompts import Prompts
from pdrt.bench.rounds import Load
from pdrt.bench.sweep_plot import PICTURES, UNKNOWN, Fixed, Panel, Picture, Point, layouts, panels
from pdrt.errors import ConfigError
from pdrt.sim.lengths import exactly
from pdrt.sim.workload import ALL_AT_ONCE

_MOST_TOKENS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Cell:
    """Tokens of each prompt, and of each answer."""

    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"in{self.input_len}-out{self.output_len}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Input lengths at one output length, and output lengths at one input length."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    at_input: int
    at_output: int

    @property
    def fixed(self) -> Fixed:
        return self.at_input, self.at_output

    @property
    def cells(self) -> list[Cell]:
        """The one that both sweeps have is measured once."""
        over_inputs = [Cell(each, self.at_output) for each in self.inputs]
        over_outputs = [Cell(self.at_input, each) for each in self.outputs]
        return list(dict.fromkeys([*over_inputs, *over_outputs]))

    @property
    def longest(self) -> Cell:
        cells = self.cells
        return Cell(max(c.input_len for c in cells), max(c.output_len for c in cells))


QUARTER: Final = Grid((64, 128, 256, 512, 1024), (16, 32, 64, 128, 256), 128, 64)
PUBLISHED: Final = Grid(
    (128, 256, 512, 1024, 2048, 4096), (64, 128, 256, 512, 1024, 2048), 512, 256
)


def lengths_of(text: str, option: str) -> tuple[int, ...]:
    """`128,256,512`. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,7}", part) and 1 <= int(part) <= _MOST_TOKENS for part in parts):
        raise ConfigError(f"{option} {text!r}: want tokens such as 128,256,512")
    return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True, slots=True)
class Amount:
    """How much every layout has to do in a cell: the same prompts for all."""

    requests: int
    concurrency: int  # 0: all at once
    vocab: int
    seed: int
    rounds: int = 1  # of each cell, one after the other, with other prompts

    def load(self, cell: Cell) -> Load:
        lengths = exactly(cell.input_len), exactly(cell.output_len)
        prompts = Prompts(*lengths, vocab=self.vocab, seed=self.seed)
        arrivals = None if self.concurrency else ALL_AT_ONCE
        return Load(str(cell), prompts, self.requests, self.concurrency, arrivals)

    def told(self) -> dict[str, str | int | None]:
        """As in the points of `pdrt bench serve`."""
        return {
            "requests": self.requests,
            "rounds": self.rounds,
            "rate": None if self.concurrency else "inf",
            "concurrency": self.concurrency or None,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of points. `settings` are what all of them must have been measured with."""

    folder: Path
    settings: Mapping[str, object]

    def file(self, layout: str, cell: Cell) -> Path:
        return self.folder / f"{layout}-{cell}.json"

    def kept(self, layout: str, cell: Cell) -> Point | None:
        """What an earlier run measured without errors.

        Raises ConfigError when that was something else.
        """
        file = self.file(layout, cell)
        try:
            told = json.loads(file.read_text("utf-8"))
            wanted = {
                "layout": layout,
                "input_len": cell.input_len,
                "output_len": cell.output_len,
                **self.settings,
            }
            differing = [key for key, its in wanted.items() if told.get(key) != its]
            is_whole = not told["errors"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{file} is no point of a sweep: {error}; move it away") from error
        if differing:
            key = differing[0]
            raise ConfigError(
                f"{file} was measured with {key} {told.get(key)!r}, and now it is"
                f" {wanted[key]!r}: name another --folder"
            )
        return told if is_whole else None

    def prepare(self) -> None:
        """Before anything is measured. Raises ConfigError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--folder {self.folder}: {error.strerror}") from error

    def write(self, layout: str, cell: Cell, found: Mapping[str, object]) -> None:
        """Whole or not at all."""
        file = self.file(layout, cell)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(found, indent=1), "utf-8")
        fresh.rename(file)

    def points(self, names: Iterable[str], cells: Sequence[Cell]) -> list[Point]:
        """All that were asked for and are there, with errors or without."""
        files = (self.file(name, cell) for name in names for cell in cells)
        return [json.loads(file.read_text("utf-8")) for file in files if file.exists()]


def tables(points: Sequence[Point], fixed: Fixed = UNKNOWN) -> Iterator[tuple[str, Table]]:
    """One a picture, and what it is of: a row a layout, a column a length, last the best."""
    shown = panels(points, fixed)
    for picture in PICTURES:
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        columns = [(panel, length) for panel in shown for length in panel.lengths]
        for panel, length in columns:
            table.add_column(f"{panel.short}\n{length}", justify="right")
        for layout in layouts(points):
            cells = [_value(points, layout, *column, picture) for column in columns]
            table.add_row(layout, *("-" if cell is None else _text(cell) for cell in cells))
        table.add_section()
        table.add_row("best", *(best(points, *column, picture) for column in columns))
        yield picture.label, table


def best(points: Sequence[Point], panel: Panel, length: int, picture: Picture) -> str:
    """The layout with the highest throughput, or the lowest latency."""
    sign = -1 if picture.is_latency else 1
    found = {
        layout: sign * value
        for layout in layouts(points)
        if (value := _value(points, layout, panel, length, picture)) is not None
    }
    return max(found, key=found.__getitem__, default="-")


def _value(
    points: Sequence[Point], layout: str, panel: Panel, length: int, picture: Picture
) -> float | None:
    return dict(panel.line(points, layout, picture)).get(length)


def _text(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
