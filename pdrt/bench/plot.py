"""A picture of `pdrt bench transfer`: GB/s over block size, log-log, a panel for each batch.

matplotlib is an extra; without it the command is refused before anything is measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final

from pdrt.bench.cases import Case, size_text
from pdrt.bench.results import Results
from pdrt.errors import ConfigError

INSTALL: Final = "pip install 'pdrt[plot]'"


def check_matplotlib(find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Raises ConfigError with the pip command where it is missing."""
    if find("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib: {INSTALL}")


def draw(results: Results, file: str) -> None:
    """Write the picture; its kind is the file's suffix."""
    from matplotlib.figure import Figure  # no window system, no global state

    panels = [
        (title, cases)
        for title, cases in (
            ("one block a write", [c for c in results.cases if c.batch == 1]),
            ("many scattered blocks a write", [c for c in results.cases if c.batch > 1]),
        )
        if cases
    ]
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, cases) in zip(axes, panels, strict=True):
        for way in results.shown:
            points = _line(results, cases, way)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=way)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("block")
        sizes = sorted({case.block_bytes for case in cases})
        shown = sizes[:: max(1, len(sizes) // 8)]
        axis.set_xticks(shown, [size_text(size) for size in shown], rotation=30)
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("GB/s (median)")
    axes[0].legend()
    figure.savefig(file)


def _line(results: Results, cases: list[Case], way: str) -> list[tuple[int, float]]:
    found = [(case, results.get(case, way)) for case in cases]
    return [(case.block_bytes, series.gb_per_s) for case, series in found if series]
