"""Who is next, and whose time is up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdrt.messages import Sampling
from pdrt.sched.queues import HEAD_START_S, Line, Timers, head_start
from pdrt.sched.request import Request


def request(key: int, *, returning: bool = False) -> Request:
    return Request(key, key, 0, [1], 1, Sampling(), frozenset(), 1.0, is_returning=returning)


def test_those_that_come_back_stand_first_and_oldest_first() -> None:
    line = Line()
    for one in (request(3), request(5, returning=True), request(4), request(2, returning=True)):
        line.add(one)
    assert [r.key for r in line] == [2, 5, 3, 4]
    assert len(line) == 4


def test_who_left_the_line_is_gone_and_may_leave_again() -> None:
    line = Line()
    one = request(1)
    line.add(one)
    line.discard(one)
    line.discard(one)
    assert list(line) == []


def test_the_earliest_time_is_next_and_each_is_told_once() -> None:
    timers = Timers()
    timers.set(1, 5.0)
    timers.set(2, 3.0)
    assert timers.next() == 3.0
    assert timers.pop_due(2.9) == []
    assert timers.pop_due(5.0) == [2, 1]
    assert timers.pop_due(9.0) == []
    assert timers.next() is None


def test_a_changed_time_replaces_the_old_one() -> None:
    timers = Timers()
    timers.set(1, 5.0)
    timers.set(1, 8.0)
    assert timers.pop_due(6.0) == []
    assert timers.next() == 8.0
    timers.set(1, 2.0)
    assert timers.pop_due(2.0) == [1]


def test_what_is_dropped_is_not_told() -> None:
    timers = Timers()
    timers.set(1, 5.0)
    timers.drop(1)
    timers.drop(1)
    assert timers.next() is None


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10)), max_size=400))
def test_any_changes_leave_the_last_time_of_each_key_and_no_heap_of_old_ones(
    changes: list[tuple[int, float]],
) -> None:
    timers = Timers()
    for key, at in changes:
        timers.set(key, at)
    last = dict(changes)
    assert timers.next() == (min(last.values()) if last else None)
    assert len(timers._heap) <= 2 * 6 + 65  # noqa: SLF001 - that it is bounded is the promise
    assert sorted(timers.pop_due(10.0)) == sorted(last)


def came(key: int, priority: int, since: float) -> Request:
    one = request(key)
    one.priority, one.since = priority, since
    return one


def order(*requests: Request) -> list[int]:
    line = Line()
    for one in requests:
        line.add(one)
    return [r.key for r in line]


def test_a_higher_priority_is_first_and_among_equals_who_came_first() -> None:
    assert order(came(1, 0, 0.0), came(2, 5, 1.0), came(3, -5, 1.0), came(4, 5, 1.0)) == [
        2,
        4,
        1,
        3,
    ]


def test_one_that_has_waited_for_long_is_passed_no_more() -> None:
    assert order(came(1, 0, 0.0), came(2, 1, 9.0)) == [2, 1]
    assert order(came(1, 0, 0.0), came(2, 1, 11.0)) == [1, 2]


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.floats(0, 500)), min_size=2, max_size=30))
def test_nobody_is_passed_by_one_that_came_much_later(waiting: list[tuple[int, float]]) -> None:
    """By two minutes at most; one with priority 0 by a minute; by none below it ever."""
    waiting.sort(key=lambda one: one[1])
    requests = [came(key, *one) for key, one in enumerate(waiting)]
    by_key = {r.key: r for r in requests}
    line = [by_key[key] for key in order(*requests)]
    for place, passed in enumerate(line):
        for first in line[:place]:
            if first.key > passed.key:
                assert first.priority > passed.priority
                assert first.since - passed.since < 2 * HEAD_START_S
                assert passed.priority != 0 or first.since - passed.since < HEAD_START_S


@given(st.integers(-1000, 999))
def test_a_higher_priority_is_always_worth_more(priority: int) -> None:
    assert head_start(priority) < head_start(priority + 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(-2, 2))))
def test_the_line_is_as_if_it_were_sorted(changes: list[tuple[int, bool, int]]) -> None:
    line, naive = Line(), dict[int, Request]()
    for key, returning, priority in changes:
        if key in naive:
            line.discard(naive.pop(key))
            continue
        one = naive[key] = request(key, returning=returning)
        one.priority = priority
        line.add(one)
    want = sorted(naive.values(), key=lambda r: (not r.is_returning, -r.priority, r.key))
    assert list(line) == want
    assert len(line) == len(want)
