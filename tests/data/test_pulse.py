"""Pings: two missing answers are known in less than two seconds."""

from __future__ import annotations

from pdrt.data.pulse import Pulse, Silence


def test_it_pings_every_second_while_it_is_answered() -> None:
    pulse = Pulse(1.0, 0.45, due_at=0.0)
    for second in range(5):
        assert pulse.tick(float(second)) == (False, True)
        pulse.answered(pulse.number)
        assert pulse.tick(second + 0.9) == (False, False)


def test_after_a_miss_it_asks_again_at_once() -> None:
    pulse = Pulse(1.0, 0.45, due_at=0.0)
    pulse.tick(0.0)
    assert pulse.tick(0.44) == (False, False)
    assert pulse.tick(0.45) == (True, True)
    assert pulse.tick(0.90) == (True, True)


def test_two_misses_come_within_two_seconds_of_the_last_answer() -> None:
    pulse = Pulse(1.0, 0.45, due_at=0.0)
    pulse.tick(0.0)
    pulse.answered(1)
    now, misses = 0.0, 0
    while misses < 2:
        now = pulse.due_at
        misses += pulse.tick(now)[0]
    assert now <= 1.95


def test_an_answer_to_an_earlier_ping_does_not_count_for_this_one() -> None:
    pulse = Pulse(1.0, 0.45, due_at=0.0)
    pulse.tick(0.0)
    pulse.tick(0.45)
    pulse.answered(1)
    assert pulse.is_waiting
    pulse.answered(2)
    assert not pulse.is_waiting


def test_the_other_side_misses_pings_as_soon() -> None:
    silence = Silence(1.0, 0.45, due_at=0.0)
    silence.heard(0.0)
    assert not silence.is_missed(1.44)
    assert silence.is_missed(1.45)
    assert not silence.is_missed(1.8)
    assert silence.is_missed(1.9)
