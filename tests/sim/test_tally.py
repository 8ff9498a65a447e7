"""What becomes of what clients saw: quantiles of weighted gaps, goodput, the keys of a point."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.sim.tally import Answer, Good, Tally, weighted


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=30))
def test_a_spread_of_weighted_values_is_that_of_the_values_one_by_one(
    pairs: list[tuple[float, int]],
) -> None:
    every = sorted(value * 1e3 for value, count in pairs for _ in range(count))
    values, counts = (np.array(column) for column in zip(*pairs, strict=True))
    spread = weighted(values, counts)
    assert spread is not None
    assert spread["mean"] == pytest.approx(statistics.fmean(every))
    assert spread["p50"] == pytest.approx(statistics.median(every))
    for name, share in (("p90", 0.9), ("p99", 0.99)):
        assert spread[name] == pytest.approx(every[min(int(share * len(every)), len(every) - 1)])
    assert spread["max"] == pytest.approx(every[-1])


def test_nothing_has_no_spread() -> None:
    assert weighted(np.array([]), np.array([], dtype=np.int64)) is None
    assert Tally().point()["itl_ms"] is None


def answer(**changed: float) -> Answer:
    usual = {"number": 0, "input": 5, "output": 201, "began": 0.0, "ttft_s": 1.0, "e2e_s": 3.0}
    return Answer(**{**usual, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "is_good"),
    [
        ({}, True),
        ({"ttft_s": 2.1}, False),
        ({"slow": 2}, True),  # one in a hundred of its 200 gaps
        ({"slow": 3}, False),
        ({"slow": 1, "output": 100}, False),  # 99 gaps: none may be
        ({"e2e_s": 7.1}, False),
        ({"output": 1, "e2e_s": 1.0}, True),
    ],
)
def test_a_good_answer_keeps_all_limits(changed: dict[str, float], is_good: bool) -> None:
    assert answer(**changed).is_good(Good(2.0, 0.1, 0.03)) is is_good


def test_gaps_of_many_at_once_count_for_each_of_them() -> None:
    tally = Tally(Good(itl_s=0.5))
    for room in (1, 2):
        tally.first(room, 1.0)
    tally.run((1, 2), 1.0, (1.2,))
    tally.run((1, 2), 1.2, (1.3, 2.3))
    tally.next(1, 2.4)
    tally.ended(1, answer())
    tally.failed(2, "overloaded")
    assert tally.tokens == 2 + 6 + 1
    assert list(tally.gaps) == pytest.approx([0.2, 0.1, 1.0, 0.1])
    assert list(tally.counts) == [2, 2, 2, 1]
    assert tally.answers[0].slow == 1
    assert not tally.last
    assert not tally.slow
    assert tally.failures == {"overloaded": 1}


def test_a_point_has_the_keys_that_bench_serve_writes() -> None:
    tally = Tally()
    tally.ended(1, answer(began=4.0))
    point = tally.point()
    wanted = {"completed", "errors", "requests_per_s", "output_tok_per_s", "goodput_per_s"}
    assert wanted | {"ttft_ms", "itl_ms", "e2e_ms"} <= point.keys()
    assert point["output_tok_per_s"] == pytest.approx(201 / 3)
    assert tally.seconds == 3.0
