"""What is too long for a step: by its tokens, by what is usual, and by looks."""

from __future__ import annotations

import pytest

from pdrt.stall import LOOK_S, StallWatch


class Rig:
    """A group whose steps take what the test says."""

    def __init__(self) -> None:
        self.watch, self.now, self.number = StallWatch(), 0.0, 0

    def steps(self, count: int, tokens: int, seconds: float) -> None:
        for _ in range(count):
            self.watch.begun(tokens, self.now)
            self.now += seconds
            self.watch.computed(self.now)
            self.number += 1
            self.watch.ended(self.number)

    def lasts(self, tokens: int, most_s: float = 1000.0) -> float | None:
        """Seconds of a step that never ends until it is found."""
        self.watch.begun(tokens, self.now)
        for _ in range(int(most_s / LOOK_S)):
            if lasted := self.watch.look():
                return lasted
        return None


@pytest.mark.parametrize(
    ("tokens", "seconds", "stuck", "found"),
    [
        (8, 0.01, 8, 5.5),  # five seconds are never too long
        (1, 0.4, 1, 8.5),  # else twenty times the usual
        (1, 0.01, 512, 103.0),  # a long prompt after single tokens
        (2048, 2.0, 1, 5.5),  # a single token after long prompts
    ],
)
def test_a_step_may_last_five_seconds_or_twenty_times_what_its_tokens_usually_take(
    tokens: int, seconds: float, stuck: int, found: float
) -> None:
    rig = Rig()
    rig.steps(50, tokens, seconds)
    assert rig.lasts(stuck) == pytest.approx(found, abs=LOOK_S)


def test_one_slow_step_makes_little_difference_and_a_slower_machine_becomes_usual() -> None:
    rig = Rig()
    rig.steps(50, 1, 0.1)
    rig.steps(1, 1, 2.0)
    assert rig.lasts(1) == pytest.approx(20 * 0.29, abs=LOOK_S)
    rig = Rig()
    rig.steps(50, 1, 0.1)
    rig.steps(100, 1, 1.0)
    assert rig.lasts(1) == pytest.approx(20.0, abs=LOOK_S)


def test_nothing_is_judged_before_a_step_has_ended_or_while_none_is_under_way() -> None:
    rig = Rig()
    assert rig.lasts(1) is None
    rig = Rig()
    rig.steps(1, 1, 0.01)
    assert [rig.watch.look() for _ in range(100)] == [None] * 100
    assert rig.lasts(1) == 5.5  # looks before it began do not count


def test_each_end_of_a_step_begins_the_wait_for_the_next_one() -> None:
    """Two are under way at the most: a follower may have the one before last before it."""
    rig = Rig()
    rig.steps(1, 1, 0.01)
    for _ in range(2):
        rig.watch.begun(1, rig.now)
        rig.watch.computed(rig.now)
    for number in (2, 3):
        assert [rig.watch.look() for _ in range(10)] == [None] * 10
        rig.watch.ended(number)
    assert [rig.watch.look() for _ in range(100)] == [None] * 100
