"""Four pictures of a sweep, a line a layout: throughputs, TTFT and ITL over both lengths.

Each has two panels: input lengths at one output length, and output lengths at one input length.
A layout has the same colour and the same marker in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Fixed: TypeAlias = tuple[int, int]  # the input length while outputs are swept, and the reverse
UNKNOWN: Final[Fixed] = (0, 0)
Point: TypeAlias = Mapping[str, object]  # as `pdrt bench sweep` and `pdrt sim sweep` write them


@dataclass(frozen=True, slots=True)
class Picture:
    """One metric; `part` is that of a spread, such as its mean."""

    file: str
    title: str
    label: str
    key: str
    part: str = ""
    is_log: bool = True

    @property
    def is_latency(self) -> bool:
        return bool(self.part)

    def value(self, point: Point) -> float | None:
        """None where it was not measured, or where a log axis has no place for it."""
        told = point.get(self.key)
        if isinstance(told, Mapping):
            told = told.get(self.part)
        return float(told) if isinstance(told, int | float) and told > 0 else None


PICTURES: Final = (
    Picture(
        "output_throughput.png",
        "output throughput",
        "output tokens/s",
        "output_tok_per_s",
        is_log=False,
    ),
    Picture("request_throughput.png", "request throughput", "requests/s", "requests_per_s"),
    Picture("ttft.png", "time to first token (TTFT)", "mean TTFT, ms", "ttft_ms", "mean"),
    Picture("itl.png", "time between tokens (ITL)", "mean ITL, ms", "itl_ms", "mean"),
)
# Colours of Okabe and Ito, which colour-blind people tell apart; yellow is too pale for a line.
_COLOURS: Final = ("#000000", "#56B4E9", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")
_FIRST: Final = (0, 1, 3, 5)  # colour of the first dp, route, apart and other one
_FEW: Final = 8  # a range of less than that has few round numbers
_DENSE: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
_APART: Final = re.compile(r"(\d+)P(\d+)D")


@dataclass(frozen=True, slots=True)
class Panel:
    """One length swept while the other stays as it is."""

    swept: str  # a point's key
    fixed: str
    at: int  # the fixed one's tokens
    lengths: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{_WORD[self.swept]} length swept, {_WORD[self.fixed]} {self.at} tokens"

    @property
    def short(self) -> str:
        return "in" if self.swept == "input_len" else "out"

    def line(
        self, points: Sequence[Point], layout: str, picture: Picture
    ) -> list[tuple[int, float]]:
        """What was measured of a layout here, in order."""
        found = [
            (_length(point, self.swept), value)
            for point in points
            if point["layout"] == layout
            and _length(point, self.fixed) == self.at
            and (value := picture.value(point)) is not None
        ]
        return sorted(found)


_WORD: Final = {"input_len": "input", "output_len": "output"}


def _length(point: Point, key: str) -> int:
    """Some loads name a range instead, which no panel has."""
    told = str(point.get(key, ""))
    return int(told) if told.isdecimal() else -1


def panels(points: Sequence[Point], fixed: Fixed = UNKNOWN) -> list[Panel]:
    """The one over inputs and the one over outputs: where most lengths of it were measured.

    Where as many were measured at several, `fixed` (input, output) says which was meant.
    """
    found = (
        _panel(points, "input_len", "output_len", fixed[1]),
        _panel(points, "output_len", "input_len", fixed[0]),
    )
    return [panel for panel in found if panel is not None]


def _panel(points: Sequence[Point], swept: str, fixed: str, meant: int) -> Panel | None:
    lengths: dict[int, set[int]] = {}
    for point in points:
        if min(_length(point, swept), _length(point, fixed)) > 0:
            lengths.setdefault(_length(point, fixed), set()).add(_length(point, swept))
    if not lengths:
        return None
    at = max(lengths, key=lambda each: (len(lengths[each]), each == meant, each))
    return Panel(swept, fixed, at, tuple(sorted(lengths[at])))


def layouts(points: Sequence[Point]) -> list[str]:
    """All, hybrid ones first."""
    return sorted({str(point["layout"]) for point in points}, key=_place)


def looks(names: Sequence[str]) -> dict[str, int]:
    """Which colour and marker each has: one of its kind, however many workers there are."""
    free, found = set(range(len(_COLOURS))), dict[str, int]()
    for name in names:
        first, *_ = (*sorted(each for each in free if each >= _FIRST[_place(name)[0]]), *free, 0)
        free.discard(first)
        found[name] = first
    return found


def _place(layout: str) -> tuple[int, int, str]:
    if apart := _APART.fullmatch(layout):
        return 2, int(apart[1]), layout
    if layout.startswith("route"):
        number = layout.removeprefix("route")
        return 1, int(number) if number.isdecimal() else 0, layout
    return (0 if layout == "dp" else 3), 0, layout


def draw(points: Sequence[Point], folder: Path, fixed: Fixed = UNKNOWN) -> list[Path]:
    """Write the pictures and say where they are; none of nothing."""
    shown = panels(points, fixed)
    if not shown:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(points, shown, picture, folder / picture.file) for picture in PICTURES]


def _draw(points: Sequence[Point], shown: Sequence[Panel], picture: Picture, file: Path) -> Path:
    from matplotlib.figure import Figure  # no window system, no global state

    figure = Figure(figsize=(6.4 * len(shown), 5.0), layout="constrained", dpi=120)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    numbers = looks(layouts(points))
    for axis, panel in zip(axes, shown, strict=True):
        for layout, number in numbers.items():
            line = panel.line(points, layout, picture)
            axis.plot(
                [length for length, _ in line],
                [value for _, value in line],
                color=_COLOURS[number],
                marker=_MARKERS[number],
                label=layout,
            )
        _dress(axis, panel, picture)
    workers = sorted({int(str(point["workers"])) for point in points if "workers" in point})
    on = f", {' or '.join(map(str, workers))} workers" if workers else ""
    figure.suptitle(f"{picture.title}{on}")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(file)
    return file


def _dress(axis: Axes, panel: Panel, picture: Picture) -> None:
    axis.set_title(panel.title, fontsize="medium")
    axis.set_xscale("log", base=2)
    axis.set_xticks(panel.lengths, [str(length) for length in panel.lengths], minor=False)
    axis.set_xlabel(f"{_WORD[panel.swept]} length, tokens")
    axis.set_ylabel(picture.label)
    if picture.is_log and axis.dataLim.height >= 0:  # else nothing was measured
        _label_logs(axis)
    else:
        axis.set_ylim(bottom=0)
    axis.grid(visible=True, which="both", alpha=0.25)


def _label_logs(axis: Axes) -> None:
    """1, 2, 5, 10: a range of less than a decade would else have one number or none."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    dense = high < _FEW * low
    axis.yaxis.set_major_locator(LogLocator(subs=_DENSE if dense else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())
