"""The tables of `pdrt bench transfer`: rates with the share of the limit reached, and latencies."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from pdrt.bench.cases import Case, size_text
from pdrt.bench.results import MEMCPY, PLAIN, Results, Series


def show(console: Console, results: Results) -> None:
    """Everything that was measured, and why something was not."""
    single = [case for case in results.cases if case.batch == 1]
    scattered = [case for case in results.cases if case.batch > 1]
    for cases in filter(None, (single, scattered)):
        title = "GB/s (median), and the share of memcpy"
        console.print(_table(results, cases, title, lambda s: _rate(results, s)))
        title = "milliseconds a write, average / p99"
        console.print(_table(results, cases, title, _latency))
    console.print(", ".join(f"{name} {value}" for name, value in results.machine.items()))
    for name, reason in results.refused.items():
        console.print(f"{name} is not measured: {reason}", soft_wrap=True, markup=False)


def _table(results: Results, cases: list[Case], title: str, cell: Callable[[Series], str]) -> Table:
    table = Table("block", "batch", title=title, title_justify="left")
    for way in results.shown:
        table.add_column(way, justify="right", no_wrap=True)
    for case in cases:
        found = [results.get(case, way) for way in results.shown]
        cells = [cell(series) if series else "-" for series in found]
        table.add_row(size_text(case.block_bytes), str(case.batch), *cells)
    return table


def _rate(results: Results, series: Series) -> str:
    """For tcp the share of the plain loop stands in brackets."""
    text = f"{series.gb_per_s:.2f}"
    if share := results.of(series, MEMCPY):
        text += f" x{share:.2f}"
    if series.way == "tcp" and (share := results.of(series, PLAIN)):
        text += f" (x{share:.2f} of plain)"
    return text


def _latency(series: Series) -> str:
    return f"{_ms(series.avg_us)} / {_ms(series.quantile_us(0.99))}"


def _ms(us: float) -> str:
    """Three digits that count, or all before the point."""
    ms = us / 1000
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"
