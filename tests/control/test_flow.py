"""What passed in the last seconds: counts and times in fixed memory, with a clock of the test's."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.control.flow import LATELY, SECONDS, Flow
from pdrt.control.rates import SPAN_S, Rates
from pdrt.control.spread import SLOTS, few_of, none, percentiles, seconds_of, slot_of


@given(st.floats(min_value=2e-5, max_value=1000))
def test_a_time_is_told_back_within_5_percent(seconds: float) -> None:
    assert seconds_of(slot_of(seconds)) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("odd", [0.0, -1.0, 1e-9, 1e9])
def test_odd_times_count_at_the_ends(odd: float) -> None:
    assert slot_of(odd) in (0, SLOTS - 1)


def test_percentiles_are_those_of_the_sorted_times() -> None:
    chance = random.Random(7)
    times = [chance.lognormvariate(-4, 1) for _ in range(2000)]
    counts = none()
    for each in times:
        counts[slot_of(each)] += 1
    p50, p99 = percentiles(few_of(counts), (0.5, 0.99))
    assert p50 == pytest.approx(sorted(times)[1000], rel=0.06)
    assert p99 == pytest.approx(sorted(times)[1980], rel=0.06)
    assert percentiles((), (0.5,)) == [None]


def test_each_event_counts_in_its_own_second() -> None:
    flow = Flow(100.0)
    flow.started(100.1)
    flow.first(100.9, 0.8)
    flow.gap(101.0, 0.1)
    flow.gap(101.1, 0.1)
    flow.ended(101.2, is_failed=False)
    flow.ended(102.9, is_failed=True)
    one, two, three = flow.series(103.0)
    assert (one.started, one.pieces, one.ended) == (1, 1, 0)
    assert (two.started, two.pieces, two.ended, two.failed) == (0, 2, 1, 0)
    assert (three.ended, three.failed) == (1, 1)
    assert one.first[0] == pytest.approx(0.8, rel=0.05)
    assert one.gap == (None, None)
    assert two.gap[0] == pytest.approx(0.1, rel=0.05)


def test_seconds_in_which_nothing_came_are_there_too() -> None:
    flow = Flow(0.0)
    flow.started(0.5)
    flow.level(3.5, 70.0, 2e9)
    told = flow.series(5.0)
    assert [each.started for each in told] == [1, 0, 0, 0, 0]
    assert [each.tokens_per_s for each in told] == [0, 0, 0, 70, 70]
    assert flow.ends == 6.0


def test_five_minutes_are_kept_and_no_more_however_long_nothing_came() -> None:
    flow = Flow(0.0)
    flow.started(0.0)
    assert len(flow.series(10.0)) == 10
    assert len(flow.series(1e7)) == SECONDS
    assert flow.ends == 1e7 + 1
    assert not any(each.started for each in flow.series(1e7))
    assert len(flow.series(1e7, 15)) == 15


def test_the_last_minute_is_one_figure_and_forgets() -> None:
    flow = Flow(0.0)
    for tick in range(200):
        flow.gap(tick / 10, 0.010)
    firsts, gaps = flow.lately(20.0)
    assert firsts == [None, None]
    assert gaps[0] == pytest.approx(0.010, rel=0.05)
    flow.gap(25.0, 5.0)
    assert flow.lately(25.5)[1][1] == pytest.approx(0.010, rel=0.05)  # one of 201 is not a p99
    assert flow.lately(20.0 + LATELY)[1][0] == pytest.approx(5.0, rel=0.05)
    assert flow.lately(27.0 + LATELY)[1] == [None, None]


def test_memory_does_not_grow_with_what_comes() -> None:
    def size(flow: Flow) -> int:
        lately = flow._gap_lately  # noqa: SLF001 - what is kept is the point
        kept = (flow._seconds, lately.each, lately.sums, flow._gaps)  # noqa: SLF001 - the same
        return sum(map(sys.getsizeof, kept)) + sum(map(sys.getsizeof, lately.each))

    chance, flow = random.Random(1), Flow(0.0)
    sizes = []
    for minute in range(8):
        for tick in range(6000):
            flow.gap(minute * 60 + tick / 100, chance.uniform(1e-6, 100))
        sizes.append(size(flow))
    assert sizes[-1] <= sizes[5] * 1.05


def test_a_rate_is_what_a_counter_gained_by_the_tellers_clock() -> None:
    rates = Rates()
    assert rates.per_second("tokens") == 0
    rates.feed(10.0, {"tokens": 100})
    assert rates.per_second("tokens") == 0
    rates.feed(10.0, {"tokens": 100})  # asked twice between two words of its workers
    rates.feed(12.0, {"tokens": 300, "bytes": 8})
    assert rates.per_second("tokens") == 100
    assert rates.per_second("nothing") == 0


def test_a_rate_is_of_the_last_seconds_only() -> None:
    rates = Rates()
    for second in range(20):
        rates.feed(float(second), {"tokens": 50.0 * min(second, 10)})
    assert rates.per_second("tokens") == 0
    assert len(rates.told) <= SPAN_S + 1


def test_counters_that_fell_are_another_life() -> None:
    rates = Rates()
    rates.feed(1.0, {"tokens": 500})
    rates.feed(2.0, {"tokens": 600})
    rates.feed(3.0, {"tokens": 10})
    assert rates.per_second("tokens") == 0
    rates.feed(4.0, {"tokens": 30})
    assert rates.per_second("tokens") == 20
    rates.feed(1.0, {"tokens": 40})  # another machine's clock
    assert rates.per_second("tokens") == 0
    rates.forget()
    assert not rates.told
