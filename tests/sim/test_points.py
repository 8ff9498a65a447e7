"""The simulator and plans held against a measured sweep: real processes, a device that sleeps.

points-null.json is what `pdrt bench sweep --model null --step-ms 40 --token-ms 1` measured with two
and with four workers, and null-40.toml what `pdrt bench calibrate --model null` wrote on the same
machine: router, schedulers, transfers and sockets are real, and no neighbour slows a step down.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from pdrt.sim.check import METRICS, Comparison, compare
from pdrt.sim.cost import load
from pdrt.sim.measured import read_points
from pdrt.sim.plan import Plan, Search, Wanted
from pdrt.sim.tally import Good
from pdrt.sim.workload import ALL_AT_ONCE

HERE = Path(__file__).parent
COST = load(str(HERE / "null-40.toml"))
POINTS = read_points(HERE / "points-null.json")
PREFILL_HEAVY, DECODE_HEAVY, BALANCED = (1024, 64), (128, 256), (256, 64)
LIMITS = Good(2.0, 0.1)  # those of the sweep
NONE = Good(math.inf, math.inf)


def measured(workers: int, lengths: tuple[int, int], figure: str) -> dict[str, float]:
    """By layout."""
    return {
        str(point["layout"]): float(point[figure])
        for point in POINTS
        if point["workers"] == workers and (point["input_len"], point["output_len"]) == lengths
    }


def planned(workers: int, lengths: tuple[int, int], good: Good) -> Plan:
    wanted = Wanted(
        input=str(lengths[0]),
        output=str(lengths[1]),
        arrivals=ALL_AT_ONCE,
        good=good,
        workers=workers,
        requests=int(POINTS[0]["requests"]),
        chunks=(512,),
    )
    return Search(COST, wanted).plan(look_further=False)


def chosen(found: Plan, seen: dict[str, float]) -> str:
    """Of the layouts that were measured: a sweep has no 3P1D."""
    those = [found.chosen, *found.each]
    return next(one.candidate.name for one in those if one.candidate.name in seen)


@pytest.mark.parametrize(
    ("workers", "lengths", "apart"),
    [
        (2, PREFILL_HEAVY, True),
        (2, BALANCED, True),
        (4, PREFILL_HEAVY, True),
        (4, BALANCED, True),
        (4, DECODE_HEAVY, False),
    ],
)
def test_a_plan_names_the_layout_that_was_measured_best_within_limits(
    workers: int, lengths: tuple[int, int], apart: bool
) -> None:
    """Or one that was measured to be within 5 % of it."""
    seen = measured(workers, lengths, "goodput_per_s")
    found = planned(workers, lengths, LIMITS)
    name = chosen(found, seen)
    assert seen[name] >= 0.95 * max(seen.values()) > 0
    assert ("P" in name) == apart == found.is_apart_better


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("lengths", [PREFILL_HEAVY, DECODE_HEAVY, BALANCED])
def test_without_limits_too(workers: int, lengths: tuple[int, int]) -> None:
    """Then all that counts is throughput, and together is better for all three workloads."""
    seen = measured(workers, lengths, "requests_per_s")
    found = planned(workers, lengths, NONE)
    assert seen[chosen(found, seen)] >= 0.95 * max(seen.values())
    assert not found.is_apart_better


@cache
def compared() -> Comparison:
    return compare(COST, POINTS)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_most_figures_are_within_15_percent_of_the_measured_ones() -> None:
    throughput, ttft, itl = (compared().near(metric) for metric in METRICS)
    assert throughput >= 0.90
    assert ttft >= 0.70  # short prompts on four workers: the order of arrivals decides
    assert itl == 1.0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_simulator_names_the_layout_that_was_measured_best_or_one_as_good() -> None:
    winners = list(compared().winners())
    assert len(winners) == 36
    assert sum(one.is_as_good for one in winners) >= 35
    assert sum(one.is_same for one in winners) >= 34
