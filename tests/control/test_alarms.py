"""Coarse alarms ring late by a little, never early, once, and not when they are called off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pdrt.control.alarms import LATE_S, Alarms, Coarse


@dataclass
class Later:
    loop: Loop
    what: tuple[float, Callable[[], None]]

    def cancel(self) -> None:
        self.loop.due.remove(self.what)


class Loop:
    """Time passes when the test says so."""

    looks = 0

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.rang: list[tuple[str, float]] = []
        self.alarms = Alarms(lambda: self.now, self.call_later)

    def call_later(self, delay: float, call: Callable[[], None]) -> Later:
        later = Later(self, (self.now + delay, call))
        self.due.append(later.what)
        self.looks += 1
        return later

    def set(self, name: str, delay: float) -> Coarse:
        return self.alarms.set(delay, lambda: self.rang.append((name, self.now)))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.due and min(self.due, key=lambda each: each[0])[0] <= until:
            self.due.sort(key=lambda each: each[0])
            self.now, call = self.due.pop(0)
            call()
        self.now = until


def test_an_alarm_rings_once_and_at_most_a_look_late() -> None:
    loop = Loop()
    delays = [3.0, 0.0, 0.01, 0.05, 0.12, 3.02]
    for delay in delays:
        loop.set(str(delay), delay)
    loop.run(10)
    assert sorted(name for name, _ in loop.rang) == sorted(map(str, delays))
    for name, at in loop.rang:
        assert -1e-6 <= at - 100.0 - float(name) <= LATE_S + 1e-6


def test_what_is_called_off_does_not_ring_not_even_by_another_that_rings() -> None:
    loop = Loop()
    loop.set("other", 0.2)
    first = loop.set("first", 0.1)
    first.cancel()
    first.cancel()
    two: list[Coarse] = []

    def ring() -> None:
        loop.rang.append(("two", loop.now))
        for each in two:
            each.cancel()

    two += [loop.alarms.set(0.1, ring), loop.alarms.set(0.1, ring)]
    loop.run(1)
    assert sorted(name for name, _ in loop.rang) == ["other", "two"]


def test_nobody_looks_while_there_is_nothing_to_wait_for() -> None:
    loop = Loop()
    loop.set("one", 0.01)
    loop.run(1)
    assert not loop.due
    loop.set("two", 0.01)
    loop.run(1)
    assert [name for name, _ in loop.rang] == ["one", "two"]


def test_an_alarm_that_raises_keeps_no_other_from_ringing() -> None:
    loop = Loop()

    def fail() -> None:
        raise RuntimeError

    loop.alarms.set(0.01, fail)
    loop.set("later", 0.07)
    try:
        loop.run(0.06)
    except RuntimeError:
        loop.run(0.06)
    assert [name for name, _ in loop.rang] == ["later"]


def test_nobody_looks_before_one_is_due() -> None:
    loop = Loop()
    for _ in range(1000):
        loop.set("late", 600.0).cancel()
        loop.set("later", 600.0)
        loop.run(0.001)
    assert loop.looks == len(loop.due) == 1


def test_an_earlier_alarm_takes_the_look_of_a_later_one() -> None:
    loop = Loop()
    loop.set("late", 600.0)
    loop.set("soon", 1.0)
    assert len(loop.due) == 1
    loop.run(2)
    assert [name for name, _ in loop.rang] == ["soon"]
    loop.run(600)
    assert [name for name, _ in loop.rang] == ["soon", "late"]


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1), st.booleans()), max_size=30))
def test_however_they_are_set_and_called_off(steps: list[tuple[float, float, bool]]) -> None:
    loop = Loop()
    wanted: dict[str, float] = {}
    for number, (delay, passes, is_called_off) in enumerate(steps):
        alarm = loop.set(str(number), delay)
        wanted[str(number)] = loop.now + delay
        loop.run(passes)
        if is_called_off and str(number) not in dict(loop.rang):
            alarm.cancel()
            del wanted[str(number)]
    loop.run(10)
    assert sorted(name for name, _ in loop.rang) == sorted(wanted)
    for name, at in loop.rang:
        assert -1e-6 <= at - wanted[name] <= LATE_S + 1e-6
    assert not loop.due
