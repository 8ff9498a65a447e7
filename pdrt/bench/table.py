"""The tables of `pdrt bench transfer`: rates, shares of the limit, latencies; 80 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from pdrt.bench.cases import Case, size_text
from pdrt.bench.results import MEMCPY, PLAIN, Results, Series


def show(console: Console, results: Results) -> None:
    """Everything that was measured, and why something was not."""
    single = [case for case in results.cases if case.batch == 1]
    scattered = [case for case in results.cases if case.batch > 1]
    for cases in filter(None, (single, scattered)):
        for table in _tables(results, cases):
            console.print(table)
    facts = (f"{name} {value}" for name, value in results.machine.items())
    console.print("; ".join([results.where, *facts]), style="dim")
    for name, reason in results.refused.items():
        console.print(f"{name} is not measured: {reason}", soft_wrap=True, markup=False)


def _tables(results: Results, cases: list[Case]) -> Iterator[Table | str]:
    shown = results.shown
    rates = [_Column(way, way, lambda s: f"{s.gb_per_s:.2f}") for way in shown]
    yield _table(results, cases, "GB/s, median", rates)
    shares = [_Column(way, way, _share(results, MEMCPY)) for way in shown if way != MEMCPY]
    if PLAIN in shown and "tcp" in shown:
        shares.append(_Column("tcp of plain", "tcp", _share(results, PLAIN)))
    yield _table(results, cases, "share of memcpy in the same run", shares)
    if PLAIN in shown and "tcp" in shown:
        yield " tcp of plain: tcp as a share of the plain loop, in the same run\n"
    latencies = [_Column(way, way, _latency) for way in shown]
    yield _table(results, cases, "latency of a write, average/p99", latencies)


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    way: str
    cell: Callable[[Series], str]


def _table(results: Results, cases: list[Case], title: str, columns: list[_Column]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("block", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for case in cases:
        found = [(column, results.get(case, column.way)) for column in columns]
        cells = [column.cell(series) if series else "-" for column, series in found]
        table.add_row(_label(case), *cells)
    return table


def _label(case: Case) -> str:
    size = size_text(case.block_bytes)
    return size if case.batch == 1 else f"{size} x{case.batch}"


def _share(results: Results, limit: str) -> Callable[[Series], str]:
    def cell(series: Series) -> str:
        share = results.of(series, limit)
        return "-" if share is None else f"{share:.2f}"

    return cell


def _latency(series: Series) -> str:
    """46/215us or 1.1/4.2ms: both in the unit that the larger one wants."""
    average, most = series.avg_us, series.quantile_us(0.99)
    scale, unit = (1, "us") if max(average, most) < 999.5 else (1000, "ms")
    return f"{_short(average / scale)}/{_short(most / scale)}{unit}"


def _short(value: float) -> str:
    """Two digits that count, or all before the point."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"
