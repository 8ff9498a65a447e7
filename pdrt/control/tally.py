"""What is counted where each request passes, and put into Prometheus' form when somebody looks.

The library's own counters take a lock for each sum, and its histograms walk their buckets: for a
request that is more than choosing who serves it. Here one loop counts, and nobody else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

MOST: Final = 1000  # series of one counter


class Counts(Collector):
    """A counter by labels, whose values are few: what comes after so many is counted together."""

    def __init__(
        self, name: str, told: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._told, self._labels = name, told, labels
        self._counts: dict[tuple[str | int, ...], int] = {}
        registry.register(self)

    def add(self, *values: str | int) -> None:
        count = self._counts.get(values, 0)
        if not count and len(self._counts) >= MOST:  # servers that are not ours name some of them
            values = ("other",) * len(values)
            count = self._counts.get(values, 0)
        self._counts[values] = count + 1

    def collect(self) -> Iterable[Metric]:
        found = CounterMetricFamily(self._name, self._told, labels=self._labels)
        for values, count in self._counts.items():
            found.add_metric([str(each) for each in values], count)
        yield found

    def describe(self) -> Iterable[Metric]:
        """For the registry, which takes no name twice."""
        yield CounterMetricFamily(self._name, self._told, labels=self._labels)


class Times(Collector):
    """Seconds, as a histogram; `bounds` ascend."""

    def __init__(
        self, name: str, told: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._told, self._bounds = name, told, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        self._sum += seconds
        self._counts[bisect_left(self._bounds, seconds)] += 1

    def collect(self) -> Iterable[Metric]:
        so_far, buckets = 0, []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == inf else str(float(bound)), so_far))
        yield HistogramMetricFamily(self._name, self._told, buckets, self._sum)

    def describe(self) -> Iterable[Metric]:
        """For the registry, which takes no name twice."""
        yield HistogramMetricFamily(self._name, self._told)
