"""R follows what answers use, so that nobody need know it."""

from __future__ import annotations

import pytest

from pdrt.sched.reserve import Reserve
from tests.sched.simulated import simulate, workload

FIXED = (0, 16, 64, 256, 1024)
SLOW = (pytest.mark.matrix, pytest.mark.timeout(300))


def learned(answers: list[int], start: int = 64) -> Reserve:
    reserve = Reserve(start, 512, is_adaptive=True)
    for said in answers:
        reserve.ended(said)
    return reserve


def test_it_begins_with_the_configured_value() -> None:
    assert Reserve(64, 512, is_adaptive=True).tokens == 64
    assert learned([], start=0).tokens == 0


def test_a_fixed_one_stays_as_it_is() -> None:
    reserve = Reserve(64, 512, is_adaptive=False)
    reserve.ended(1000)
    reserve.lost(1000)
    reserve.waited()
    assert reserve.tokens == 64


def test_it_follows_the_length_of_answers_and_forgets_old_ones() -> None:
    assert learned([20] * 200).tokens < 16
    assert learned([20] * 500 + [800] * 500).tokens > 150
    assert learned([800] * 500 + [20] * 2000).tokens < 16


def test_it_falls_while_somebody_waits_and_rises_with_what_is_lost() -> None:
    reserve = learned([400] * 100)
    before = reserve.tokens
    for _ in range(200):
        reserve.waited()
    low = reserve.tokens
    assert low < before / 2
    for _ in range(8):
        reserve.lost(500)
    assert low < reserve.tokens <= before * 4


def test_it_is_never_more_than_an_answer_is_long() -> None:
    reserve = learned([400] * 2000)
    for _ in range(100):
        reserve.lost(10_000)
    assert 390 <= reserve.tokens <= 410


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("short", 400),
        ("bimodal", 40),
        pytest.param("long", 130, marks=SLOW),
        pytest.param("bimodal", 200, marks=SLOW),
        pytest.param("drifting", 200, marks=SLOW),
        pytest.param("in step", 100, marks=SLOW),
        pytest.param("long prompts", 66, marks=SLOW),
    ],
)
def test_it_is_within_a_tenth_of_the_best_fixed_one(name: str, count: int) -> None:
    """In units of time. The figures are in docs/log.md."""
    load = workload(name, count)
    fixed = {r: simulate(load, 320, r, adaptive=False) for r in FIXED}
    adaptive = simulate(load, 320, 64, adaptive=True)
    best = min(one.units for one in fixed.values())
    assert adaptive.units <= 1.1 * best, (adaptive, fixed)
