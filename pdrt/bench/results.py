"""The figures of a run: what was counted, and what is derived from it. Plain data.

A ratio is the median of the rounds' own ratios: both of a round's turns met the same load.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pdrt.bench.cases import Case
from pdrt.bench.facts import Facts
from pdrt.bench.plain import STYLES

MEMCPY: Final = "memcpy"
PLAIN: Final = "plain"  # the better one of the two plain socket loops


@dataclass(frozen=True, slots=True)
class Turn:
    """One way in one round of one case."""

    moved: int  # bytes
    latencies: tuple[float, ...]  # seconds, one a batch

    @property
    def gb_per_s(self) -> float:
        return self.moved / sum(self.latencies) / 1e9


@dataclass(slots=True)
class Series:
    """One way in one case."""

    way: str
    case: Case
    turns: list[Turn] = field(default_factory=list)

    @property
    def gb_per_s(self) -> float:
        return statistics.median(turn.gb_per_s for turn in self.turns)

    @property
    def avg_us(self) -> float:
        return statistics.fmean(self._latencies()) * 1e6

    def quantile_us(self, share: float) -> float:
        ordered = self._latencies()
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e6

    def _latencies(self) -> list[float]:
        return sorted(took for turn in self.turns for took in turn.latencies)

    def of(self, limit: Series) -> float:
        """The share of a limit that was reached, round against round."""
        pairs = zip(self.turns, limit.turns, strict=False)
        return statistics.median(mine.gb_per_s / its.gb_per_s for mine, its in pairs)


@dataclass(slots=True)
class Results:
    """Of all ways in all cases. `refused` says why a way is missing, or stopped."""

    machine: Facts
    where: str = ""  # between which addresses
    series: dict[tuple[Case, str], Series] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def add(self, way: str, case: Case, turn: Turn) -> None:
        self.series.setdefault((case, way), Series(way, case)).turns.append(turn)

    def forget(self, way: str, case: Case) -> None:
        """Figures of a case that a way did not finish."""
        self.series.pop((case, way), None)

    @property
    def cases(self) -> list[Case]:
        return list(dict.fromkeys(case for case, _ in self.series))

    @property
    def shown(self) -> list[str]:
        """Ways in the order of the tables; of the plain loops the better one."""
        ways = dict.fromkeys(PLAIN if way in STYLES else way for _, way in self.series)
        return [MEMCPY, *(way for way in ways if way != MEMCPY)] if MEMCPY in ways else list(ways)

    def get(self, case: Case, way: str) -> Series | None:
        if way != PLAIN:
            return self.series.get((case, way))
        loops = [found for style in STYLES if (found := self.get(case, style))]
        return max(loops, key=lambda loop: loop.gb_per_s, default=None)

    def of(self, series: Series, limit: str) -> float | None:
        """The share of a limit that a way reached; None where one of the two is missing."""
        found = self.get(series.case, limit)
        return series.of(found) if found and found is not series else None


def points(results: Results) -> list[Mapping[str, object]]:
    """For `--json`: a point for each way and case, with what was counted in each round."""
    return [_point(results, series) for series in results.series.values()]


def _point(results: Results, series: Series) -> Mapping[str, object]:
    point: dict[str, object] = {
        "transport": series.way,
        "block_bytes": series.case.block_bytes,
        "batch": series.case.batch,
        "gb_per_s": series.gb_per_s,
        "avg_us": series.avg_us,
        "p50_us": series.quantile_us(0.5),
        "p99_us": series.quantile_us(0.99),
        "where": results.where,
        "rounds": [_round(turn) for turn in series.turns],
        "machine": results.machine,
    }
    if share := results.of(series, MEMCPY):
        point["of_memcpy"] = share
    if series.way == "tcp" and (share := results.of(series, PLAIN)):
        point["of_plain_loop"] = share
    return point


def _round(turn: Turn) -> Mapping[str, float]:
    return {
        "bytes": turn.moved,
        "seconds": sum(turn.latencies),
        "batches": len(turn.latencies),
        "min_us": min(turn.latencies) * 1e6,
        "max_us": max(turn.latencies) * 1e6,
    }
