"""How far the simulator is from what was measured, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.box import SIMPLE
from rich.table import Table

from pdrt.sim.check import METRICS, NEAR, TIE, Comparison, Metric, Pair

_TITLES: Final[Mapping[str, str]] = {
    "output_tok_per_s": "tok/s",
    "ttft_ms.p50": "TTFT p50",
    "itl_ms.p50": "ITL p50",
}


def table(found: Comparison) -> Table:
    """Every point: measured, simulated, and how far that is off."""
    heads = [part for m in METRICS for part in (_TITLES[m.name], "sim", "off")]
    made = Table("N", "layout", "in", "out", *heads, box=SIMPLE, padding=(0, 1, 0, 0))
    for pair in found.pairs:
        load = pair.load
        cells = [part for metric in METRICS for part in _cells(pair, metric)]
        made.add_row(str(load.workers), pair.layout, load.input_len, load.output_len, *cells)
    return made


def _cells(pair: Pair, metric: Metric) -> Iterator[str]:
    was, said, error = metric.of(pair.measured), metric.of(pair.predicted), pair.error(metric)
    yield "none" if was is None else f"{was:.1f}"
    yield "none" if said is None else f"{said:.1f}"
    style = "red" if error is not None and abs(error) > NEAR else "green"
    yield "" if error is None else f"[{style}]{error:+.0%}[/]"


def lines(found: Comparison) -> Iterator[str]:
    for metric in METRICS:
        errors = found.errors(metric)
        if errors:
            yield (
                f"{_TITLES[metric.name]}: {found.near(metric):.0%} of {len(errors)} points within"
                f" {NEAR:.0%}; off by {statistics.median(map(abs, errors)):.1%} as is usual,"
                f" {max(errors, key=abs):+.0%} at worst"
            )
    winners = list(found.winners())
    if winners:
        same, good = sum(w.is_same for w in winners), sum(w.is_as_good for w in winners)
        yield (
            f"the best layout: the same in {same} of {len(winners)} cases, the same or one within"
            f" {TIE:.0%} of it in {good}"
        )
    for one in winners:
        if not one.is_as_good:
            yield (
                f"  {one.load}, {_TITLES[one.metric.name]}: {one.measured} was best, the simulator"
                f" says {one.predicted}, which was {one.loss:.0%} worse"
            )


def json_of(found: Comparison) -> Mapping[str, Any]:
    return {
        "near": found.near(),
        "metrics": {
            metric.name: {"near": found.near(metric), "errors": found.errors(metric)}
            for metric in METRICS
        },
        "points": [
            {
                "layout": pair.layout,
                "workers": pair.load.workers,
                "input_len": pair.load.input_len,
                "output_len": pair.load.output_len,
                "measured": {metric.name: metric.of(pair.measured) for metric in METRICS},
                "predicted": {metric.name: metric.of(pair.predicted) for metric in METRICS},
            }
            for pair in found.pairs
        ],
        "winners": [
            {
                "load": str(one.load),
                "metric": one.metric.name,
                "measured": one.measured,
                "predicted": one.predicted,
                "loss": one.loss,
            }
            for one in found.winners()
        ],
    }
