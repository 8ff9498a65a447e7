"""The simulator against what was measured: each point of a sweep is simulated and held beside it.

Two questions: is every figure near the measured one, and is the layout that is best at a load the
one that was measured to be best there, or as good as that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pdrt.sim.arrangement import named
from pdrt.sim.cost import Cost
from pdrt.sim.run import changed, simulate
from pdrt.sim.tally import Good
from pdrt.sim.workload import Arrivals, Workload

Json: TypeAlias = Mapping[str, Any]
Told: TypeAlias = Callable[[str], None]
NEAR: Final = 0.15  # of the measured figure
TIE: Final = 0.05  # of the best measured one: as good
SAME: Final = 0.01  # of the best simulated one: the simulator calls them equal, and names both


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a point; `sign` 1 where more is better."""

    name: str
    sign: int

    def of(self, point: Json) -> float | None:
        """None where the point has none, as of gaps where answers have one token."""
        value: Any = point
        for part in self.name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) else None


METRICS: Final = (
    Metric("output_tok_per_s", 1),
    Metric("ttft_ms.p50", -1),
    Metric("itl_ms.p50", -1),
)


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """What several layouts were asked."""

    workers: int
    input_len: str
    output_len: str

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.input_len} in, {self.output_len} out"


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured point and what the simulator says of it."""

    measured: Json
    predicted: Json

    @property
    def layout(self) -> str:
        return str(self.measured["layout"])

    @property
    def load(self) -> Load:
        told = self.measured
        return Load(int(told["workers"]), str(told["input_len"]), str(told["output_len"]))

    def error(self, metric: Metric) -> float | None:
        """Relative; above 0 where the simulator says more than was measured."""
        was, said = metric.of(self.measured), metric.of(self.predicted)
        return said / was - 1 if was and said is not None else None


@dataclass(frozen=True, slots=True)
class Winner:
    """Who was best at a load by a metric, and whom the simulator names."""

    load: Load
    metric: Metric
    measured: str
    predicted: str
    loss: float  # by how much the named one was measured to be worse than the best

    @property
    def is_same(self) -> bool:
        return self.measured == self.predicted

    @property
    def is_as_good(self) -> bool:
        return self.loss <= TIE


@dataclass(frozen=True, slots=True)
class Comparison:
    pairs: Sequence[Pair]

    def errors(self, metric: Metric) -> list[float]:
        return [e for pair in self.pairs if (e := pair.error(metric)) is not None]

    def near(self, metric: Metric | None = None) -> float:
        """The share of figures within `NEAR`; of all metrics without one."""
        those = METRICS if metric is None else (metric,)
        errors = [abs(e) for one in those for e in self.errors(one)]
        return sum(e <= NEAR for e in errors) / len(errors) if errors else 0.0

    def winners(self) -> Iterator[Winner]:
        """Of every load that at least two layouts were measured at."""
        loads: dict[Load, list[Pair]] = {}
        for pair in self.pairs:
            loads.setdefault(pair.load, []).append(pair)
        for load, pairs in sorted(loads.items()):
            for metric in METRICS if len(pairs) > 1 else ():
                if all(pair.error(metric) is not None for pair in pairs):
                    yield _winner(load, metric, pairs)


def _winner(load: Load, metric: Metric, pairs: Sequence[Pair]) -> Winner:
    def value(point: Json) -> float:
        found = metric.of(point)
        assert found is not None
        return found

    def better(pair: Pair) -> float:
        return metric.sign * value(pair.measured)

    top = max(metric.sign * value(pair.predicted) for pair in pairs)
    equal = [p for p in pairs if metric.sign * value(p.predicted) >= top - SAME * abs(top)]
    best, named_ = max(pairs, key=better), max(equal, key=better)
    ours, its = value(named_.measured), value(best.measured)
    loss = 1 - ours / its if metric.sign > 0 else ours / its - 1
    return Winner(load, metric, best.layout, named_.layout, loss)


def compare(cost: Cost, points: Sequence[Json], told: Told = lambda _what: None) -> Comparison:
    """Simulates every point with what it says of its load. Raises ConfigError."""
    pairs = list[Pair]()
    for point in points:
        told(f"{point['layout']}, {point['input_len']} in, {point['output_len']} out")
        pairs.append(Pair(point, predicted(cost, point)))
    return Comparison(pairs)


def predicted(cost: Cost, point: Json) -> Json:
    """Raises ConfigError."""
    workload = workload_of(point)
    if chunk := int(point.get("chunk") or 0):
        cost = changed(cost, max_prefill_tokens=chunk)
    limits = point.get("limits_ms") or {}
    good = Good(
        float(limits.get("ttft") or math.inf) / 1e3, float(limits.get("itl") or math.inf) / 1e3
    )
    arrangement = named(str(point["layout"]), int(point["workers"]))
    return simulate(cost, arrangement, workload, good=good).point()


def workload_of(point: Json) -> Workload:
    """All at once unless the point says at which rate, or how many at a time."""
    rate = float(point.get("rate") or math.inf)
    concurrency = int(point.get("concurrency") or 0)
    requests = int(point.get("requests") or point["completed"])
    arrivals = Arrivals(rate, concurrency=concurrency)
    return Workload.of(
        requests, point["input_len"], point["output_len"], arrivals, seed=int(point.get("seed", 1))
    )
