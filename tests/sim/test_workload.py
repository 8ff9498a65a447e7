"""When requests come, and how long they are."""

from __future__ import annotations

import statistics
from itertools import pairwise
from random import Random

import pytest

from pdrt.errors import ConfigError
from pdrt.sim.lengths import Lengths
from pdrt.sim.workload import Arrivals, Workload


def test_a_seed_names_a_load() -> None:
    one, same, other = (Workload.of(50, "1..9", "1..9", Arrivals(5.0), seed=s) for s in (1, 1, 2))
    assert one == same != other


def test_without_a_rate_all_come_at_once() -> None:
    assert {one.at for one in Workload.of(9, 4, 5).requests} == {0.0}


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_gaps_have_the_rates_mean_and_the_burstinesss_spread(
    burstiness: float, spread: float
) -> None:
    found = Workload.of(20_000, 1, 1, Arrivals(10.0, burstiness)).requests
    gaps = [b.at - a.at for a, b in pairwise(found)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1 * spread, rel=0.1)


def test_lengths_are_fixed_or_drawn() -> None:
    random = Random(1)
    assert {Lengths.parse("7", "input").draw(random) for _ in range(9)} == {7}
    assert {Lengths.parse("3..5", "input").draw(random) for _ in range(99)} == {3, 4, 5}
    drawn = [Lengths.parse("lognormal:100:0.5", "input").draw(random) for _ in range(9999)]
    assert statistics.fmean(drawn) == pytest.approx(100, rel=0.05)
    wide = Lengths.parse("lognormal:100:2:150", "input")
    assert max(wide.draw(random) for _ in range(999)) == 150


@pytest.mark.parametrize("text", ["0", "9..3", "x", "", "lognormal:0:1", "1..9999999", "-4"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="want tokens"):
        Lengths.parse(text, "input")


def test_what_is_no_rate_is_refused() -> None:
    for wrong in ({"rate": 0.0}, {"burstiness": -1.0}, {"concurrency": -1}):
        with pytest.raises(ConfigError, match="above 0"):
            Arrivals(**wrong)
