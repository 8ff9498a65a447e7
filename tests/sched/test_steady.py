"""Steps in bulk leave a scheduler as steps one by one do: requests, blocks, reserve, counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.device.batch import Drawn
from pdrt.messages import Sampling, Submit, pack_ids
from pdrt.sched.base import Scheduler
from pdrt.sched.events import Cancelled
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Plan
from pdrt.sched.request import State

LIMITS = Limits(
    block_size=4, max_batch_size=6, max_prefill_tokens=32, prefix_cache=False, is_blind=True
)
BLOCKS = 48


def submit(room: int, prompt: int, output: int) -> Submit:
    return Submit(
        room=room,
        attempt=0,
        request_id="",
        tokens=pack_ids([5] * prompt),
        prompt_tokens=prompt,
        sampling=Sampling(max_tokens=output, ignore_eos=True),
        time_left=1000.0,
    )


def scheduler(loads: list[tuple[int, int]], **limits: Any) -> Scheduler:
    sched = Scheduler(replace(LIMITS, **limits), BLOCKS, ())
    for room, (prompt, output) in enumerate(loads):
        sched.submit(submit(room, prompt, output), 0.0)
    return sched


def commit(sched: Scheduler, plan: Plan) -> None:
    drawn = [Drawn(step.key, 7, -0.5) for step in plan.batch if step.draw is not None]
    sched.commit(plan, drawn, 0.0)


def step(sched: Scheduler) -> Plan:
    plan = sched.plan(0.0)
    commit(sched, plan)
    return plan


def state(sched: Scheduler) -> object:
    """All that decides what happens next, and what is told of it, but for tokens."""
    book = sched.book
    return (
        [(r.room, r.state, len(r.blocks), r.reserved, r.seats) for r in book.requests.values()],
        (book.blocks.free, book.reserved, book.seats, len(book.line)),
        (book.reserve.tokens, book.limits.reserved_tokens),
        dict(book.counters),
    )  # fmt: skip


def tokens(sched: Scheduler) -> object:
    """How many each has. To ask changes nothing but when books are made up."""
    for request in sched.book.requests.values():
        sched.book.cohort.settle(request)
    return [(r.room, len(r.tokens), r.computed) for r in sched.book.requests.values()]


loads = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(loads, st.integers(1, 40), st.booleans(), st.integers(1, 50), st.integers(1, 20))
def test_skipping_is_the_same_as_stepping(
    loads: list[tuple[int, int]], most: int, adaptive: bool, reserved: int, look_every: int
) -> None:
    limits = {"adaptive_reserve": adaptive, "reserved_tokens": reserved}
    fast, slow = scheduler(loads, **limits), scheduler(loads, **limits)
    for number in range(2000):
        if fast.is_idle:
            break
        if steps := fast.steady_steps(most):
            fast.skip(steps)
        else:
            step(fast)
            steps = 1
        for _ in range(steps):
            step(slow)
        assert state(fast) == state(slow)
        if number % look_every == 0:
            assert tokens(fast) == tokens(slow)
    assert fast.is_idle
    assert slow.is_idle
    assert fast.book.blocks.used == 0


@settings(max_examples=40, deadline=None)
@given(loads, st.integers(1, 50), st.integers(1, 20))
def test_who_is_blind_books_as_who_sees(
    loads: list[tuple[int, int]], reserved: int, look_every: int
) -> None:
    blind = scheduler(loads, reserved_tokens=reserved)
    seeing = scheduler(loads, reserved_tokens=reserved, is_blind=False)
    for number in range(2000):
        if blind.is_idle:
            break
        step(blind)
        step(seeing)
        assert state(blind) == state(seeing)
        if number % look_every == 0:
            assert tokens(blind) == tokens(seeing)
    assert seeing.is_idle


def test_who_is_not_blind_skips_nothing() -> None:
    sched = scheduler([(4, 20)], is_blind=False)
    for _ in range(4):
        assert not step(sched).steady
        assert sched.steady_steps(9) == 0


def test_steps_are_steady_until_the_first_last_token() -> None:
    sched = scheduler([(4, 20), (4, 9)])
    for _ in range(3):
        step(sched)
    assert tokens(sched) == [(0, 7, 6), (1, 7, 6)]
    assert sched.steady_steps(99) == 5  # the sixth is the second one's last token
    assert sched.steady_steps(2) == 2


def test_while_somebody_may_come_in_no_step_is_steady() -> None:
    sched = scheduler([(4, 20)])
    for _ in range(3):
        step(sched)
    assert sched.steady_steps(9) == 9
    sched.submit(submit(7, 4, 4), 0.0)
    assert sched.steady_steps(9) == 0


def test_where_all_seats_are_taken_those_in_line_wait_in_steady_steps_too() -> None:
    sched = scheduler([(2, 20)] * 8)
    for _ in range(4):
        step(sched)
    assert len(sched.book.queues[State.RUNNING]) == 6
    assert len(sched.book.line) == 2
    assert sched.steady_steps(9) == 9


def test_no_more_steps_are_steady_than_there_are_blocks_for() -> None:
    sched = scheduler([(80, 90), (72, 90)], max_prefill_tokens=200, reserved_tokens=4)
    for _ in range(3):
        step(sched)
    assert len(sched.book.queues[State.RUNNING]) == 2
    steps = sched.steady_steps(99)
    assert 0 < steps < 20  # 48 blocks hold 192 tokens
    sched.skip(steps)
    assert sched.book.counters["retractions"] == 0


def test_who_left_in_the_middle_of_a_step_says_nothing() -> None:
    sched = scheduler([(4, 20), (4, 20)])
    for _ in range(3):
        step(sched)
    plan = sched.plan(0.0)
    assert plan.steady == 2
    sched.feed(Cancelled(0, "client_gone"), 0.0)
    before = sched.book.counters["tokens_out"]
    commit(sched, plan)
    assert sched.book.counters["tokens_out"] == before + 1
    assert sched.book.counters["late"] == 1


def test_a_cache_needs_to_see() -> None:
    with pytest.raises(AssertionError, match="cache"):
        Scheduler(replace(LIMITS, prefix_cache=True), BLOCKS, ())
