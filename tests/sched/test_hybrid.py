"""The base scheduler, colocated: prompts in, tokens out, nothing lost under pressure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdrt.data.events import Quiet
from pdrt.device.batch import Drawn, SeqStep
from pdrt.errors import BadRequest, Conflict, Draining, Overloaded, PdrtError, TooLong
from pdrt.messages import Submit, pack_ids
from pdrt.sched.base import Scheduler
from pdrt.sched.events import Cancelled, Rebound, ResumeLocally
from pdrt.sched.limits import Limits
from tests.sched.fakes import (
    AWAY,
    EOS,
    FakeDevice,
    Rig,
    answer,
    check_books,
    is_baseline,
    next_token,
    submit,
)

B = 4


LIMITS = Limits(block_size=B, max_prefill_tokens=8, reserved_tokens=8)


def make(blocks: int = 64, limits: Limits = LIMITS) -> Rig:
    return Rig(Scheduler(limits, blocks, {EOS}), FakeDevice(blocks, B))


def finish(rig: Rig, steps: int = 500) -> int:
    """Step until nothing is left; every step must do something."""
    for count in range(steps):
        if not rig.book.requests:
            return count
        before = rig.book.counters["tokens_out"] + rig.book.counters["prompt_tokens_computed"]
        plan = rig.step()
        check_books(rig.book)
        after = rig.book.counters["tokens_out"] + rig.book.counters["prompt_tokens_computed"]
        assert after > before or plan.expired, "a step without progress"
    raise AssertionError(f"not finished after {steps} steps: {rig.sched.book.rooms}")


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 8, 9, 21, 22])
def test_an_answer_does_not_depend_on_how_its_prompt_was_cut(length: int) -> None:
    """CASES 59: 2.7 chunks of 8 are 21 and 22 tokens."""
    rig = make()
    prompt = list(range(1, length + 1))
    rig.submit(submit(1, prompt, max_tokens=6))
    finish(rig)
    assert rig.said[1] == answer(prompt, 6)
    assert rig.ends[1] == ["length"]
    assert is_baseline(rig.book)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_exactly_max_tokens_are_said_with_ignore_eos(count: int) -> None:
    """CASES 85."""
    rig = make()
    rig.device.script = {4: EOS, 5: EOS, 6: EOS}
    rig.submit(submit(1, [1, 2, 3, 4], max_tokens=count, ignore_eos=True))
    finish(rig)
    assert len(rig.said[1]) == count
    assert rig.ends[1] == ["length"]


def test_an_eos_ends_the_answer_and_is_said() -> None:
    rig = make()
    rig.device.script = {6: EOS}
    rig.submit(submit(1, [1, 2, 3, 4], ignore_eos=False, max_tokens=9))
    finish(rig)
    assert rig.said[1][-1] == EOS
    assert len(rig.said[1]) == 3
    assert rig.ends[1] == ["stop"]


def test_a_stop_id_ends_the_answer_even_with_ignore_eos() -> None:
    rig = make()
    stop = answer([1, 2], 3)[1]
    rig.submit(submit(1, [1, 2], stop=(stop,), max_tokens=9))
    finish(rig)
    assert rig.said[1] == answer([1, 2], 2)
    assert rig.ends[1] == ["stop"]


def test_a_resumed_answer_counts_what_was_said_before() -> None:
    rig = make()
    whole = answer([1, 2, 3], 6)
    rig.submit(submit(1, [1, 2, 3], said=whole[:4], max_tokens=6))
    finish(rig)
    assert rig.said[1] == whole[4:]


@pytest.mark.parametrize(
    ("said", "end"), [(answer([1], 4), "length"), ([7, EOS], "stop")], ids=["whole", "stopped"]
)
def test_a_resumed_answer_that_was_whole_is_finished_at_once(said: list[int], end: str) -> None:
    rig = make()
    rig.submit(submit(1, [1], said=said, max_tokens=4, ignore_eos=False))
    assert rig.said[1] == []
    assert rig.ends[1] == [end]
    assert is_baseline(rig.book)


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    rig = make()
    rig.submit(submit(1, [1, 2], max_tokens=20))
    rig.step()
    rig.submit(submit(2, list(range(1, 41)), max_tokens=2))
    for _ in range(5):
        plan = rig.step()
        assert {len(s.tokens) for s in plan.batch} == {1, 8}
    finish(rig)
    assert rig.said[1] == answer([1, 2], 20)
    assert rig.said[2] == answer(list(range(1, 41)), 2)


def test_a_batch_is_no_larger_than_it_may_be() -> None:
    rig = make(limits=replace(LIMITS, max_batch_size=3))
    for room in range(1, 9):
        rig.submit(submit(room, [room, room], max_tokens=5))
    while rig.book.requests:
        assert len(rig.step().batch) <= 3
        check_books(rig.book)
    assert all(rig.said[k] == answer([k, k], 5) for k in range(1, 9))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (submit(1, []), BadRequest),
        (submit(1, [1], max_tokens=16), TooLong),
        (submit(1, [1] * 16, max_tokens=1), TooLong),
        (submit(1, [1] * 99), TooLong),
    ],
    ids=["empty", "answer too long", "prompt and one", "prompt"],
)
def test_what_can_never_fit_is_refused_at_once(message: Submit, error: type[PdrtError]) -> None:
    """CASES 2, 55: over the limit is an error in front, and nothing starts."""
    rig = make(4)
    with pytest.raises(error):
        rig.submit(message)
    assert is_baseline(rig.book)
    assert not rig.step().batch


def test_what_just_fits_is_served() -> None:
    rig = make(4)
    rig.submit(submit(1, [1] * 8, max_tokens=8))
    finish(rig)
    assert rig.said[1] == answer([1] * 8, 8)


def test_tokens_that_are_no_list_are_the_clients_error() -> None:
    rig = make()
    good = submit(1, [1, 2])
    with pytest.raises(BadRequest):
        rig.submit(replace(good, tokens=b"123"))
    with pytest.raises(BadRequest):
        rig.submit(replace(good, prompt_tokens=3))


def test_a_room_in_flight_is_not_taken_twice() -> None:
    """CASES 106, this rank's part."""
    rig = make()
    rig.submit(submit(1, [1]))
    with pytest.raises(Conflict):
        rig.submit(submit(1, [2], attempt=1))
    finish(rig)
    rig.submit(submit(1, [2]))
    finish(rig)
    assert rig.said[1] == answer([1], 4) + answer([2], 4)


def test_a_full_queue_refuses() -> None:
    rig = make(limits=replace(LIMITS, max_waiting=2))
    rig.submit(submit(1, [1]))
    rig.submit(submit(2, [1]))
    with pytest.raises(Overloaded):
        rig.submit(submit(3, [1]))
    rig.step()
    rig.submit(submit(3, [1]))
    finish(rig)
    assert all(rig.said[k] == answer([1], 4) for k in (1, 2, 3))


def test_a_draining_scheduler_finishes_and_takes_nothing_new() -> None:
    rig = make()
    rig.submit(submit(1, [1]))
    rig.sched.drain()
    with pytest.raises(Draining):
        rig.submit(submit(2, [1]))
    assert not rig.sched.is_idle
    finish(rig)
    assert rig.said[1] == answer([1], 4)
    assert rig.sched.is_idle


def test_a_cancel_while_waiting_leaves_nothing() -> None:
    rig = make()
    rig.submit(submit(1, [1, 2]))
    rig.feed(Cancelled(1, "client_gone"))
    assert rig.ends[1] == ["cancelled"]
    assert is_baseline(rig.book)
    assert not rig.step().batch


def test_a_cancel_while_its_batch_is_on_the_device_drops_the_late_token() -> None:
    rig = make()
    rig.submit(submit(1, [1, 2]))
    rig.submit(submit(2, [3]))
    plan = rig.plan()
    rig.feed(Cancelled(1, "client_gone"))
    rig.commit(plan)
    assert rig.said[1] == []
    assert rig.ends[1] == ["cancelled"]
    assert rig.book.counters["late"] == 1
    finish(rig)
    assert rig.said[2] == answer([3], 4)
    assert is_baseline(rig.book)


def test_a_room_that_comes_again_does_not_get_the_old_ones_token() -> None:
    rig = make()
    rig.submit(submit(1, [1, 2]))
    plan = rig.plan()
    rig.feed(Cancelled(1, "client_gone"))
    rig.submit(submit(1, [5]))
    rig.commit(plan)
    assert rig.said[1] == []
    finish(rig)
    assert rig.said[1] == answer([5], 4)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_deadline_ends_a_request_wherever_it_is(steps: int) -> None:
    rig = make()
    rig.submit(submit(1, [1] * 20, max_tokens=40, time_left=5.0))
    for _ in range(steps):
        rig.step()
    assert rig.sched.next_timer() == 5.0
    rig.now = 4.9
    assert rig.step().expired == 0
    rig.now = 5.0
    assert rig.step().expired == 1
    assert rig.ends[1] == ["deadline"]
    assert is_baseline(rig.book)
    assert rig.sched.next_timer() is None


def test_what_is_not_for_a_hybrid_is_counted_and_changes_nothing() -> None:
    rig = make()
    rig.submit(submit(1, [1]))
    for event in (Rebound(1, 9, AWAY), ResumeLocally(1), Quiet(1, 0), Cancelled(7, "who")):
        rig.feed(event)
    assert rig.book.counters["late"] == 4
    finish(rig)
    assert rig.said[1] == answer([1], 4)


def test_a_retracted_request_goes_on_with_the_same_tokens() -> None:
    rig = make(8, replace(LIMITS, reserved_tokens=1))
    prompts = {k: [k, k + 1, k + 2] for k in (1, 2, 3)}
    for room, prompt in prompts.items():
        rig.submit(submit(room, prompt, max_tokens=16))
    finish(rig)
    assert rig.book.counters["retractions"] > 0
    assert all(rig.said[k] == answer(p, 16) for k, p in prompts.items())
    assert is_baseline(rig.book)


def storm(blocks: int, requests: int, *, length: int = 5, max_tokens: int = 11) -> Rig:
    rig = make(blocks, replace(LIMITS, reserved_tokens=2))
    for room in range(requests):
        rig.submit(submit(room, [1 + room % 7] * length, max_tokens=max_tokens))
    finish(rig, 5000)
    return rig


def test_a_pool_hardly_larger_than_one_request_finishes_all_with_the_same_tokens() -> None:
    small, large = storm(5, 32), storm(200, 32)  # one request needs 4
    assert small.said == large.said
    assert all(end == ["length"] for end in small.ends.values())
    assert large.book.counters["retractions"] == 0
    assert is_baseline(small.book)


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    rig = make(12, replace(LIMITS, reserved_tokens=4))
    for room in range(2, 5):
        rig.submit(submit(room, [room], max_tokens=8))
    rig.step()
    rig.submit(submit(1, [1] * 36, max_tokens=4))
    for room in range(100, 200):
        if 1 not in rig.book.rooms:
            break
        rig.submit(submit(room, [room], max_tokens=8))
        rig.step()
    assert rig.ends[1] == ["length"]
    assert len([r for r in rig.ends if r >= 100]) < 60
    finish(rig)


def test_retraction_frees_blocks_for_growth_not_for_newcomers() -> None:
    rig = make(4, replace(LIMITS, reserved_tokens=1))
    rig.submit(submit(1, [1] * 4, max_tokens=9))
    rig.submit(submit(2, [2] * 4, max_tokens=9))
    rig.submit(submit(3, [3] * 1, max_tokens=9))
    while not (plan := rig.step()).retracted:
        assert rig.book.requests
    assert plan.granted == 0
    finish(rig)


def test_a_plan_must_be_committed_before_the_next() -> None:
    rig = make()
    rig.submit(submit(1, [1]))
    rig.plan()
    with pytest.raises(AssertionError, match="not committed"):
        rig.plan()


def test_the_figures_say_where_everybody_is() -> None:
    rig = make(limits=replace(LIMITS, max_batch_size=1))
    rig.submit(submit(1, [1] * 5))
    rig.submit(submit(2, [1]))
    rig.step()
    stats = rig.sched.stats()
    assert (stats.running, stats.queues) == (1, {"waiting_queue": 1})
    assert (stats.blocks_used, stats.blocks_total, stats.rooms) == (2, 64, 2)
    assert stats.counters["submitted"] == 2
    assert stats.counters["tokens_out"] == 1


def test_a_draw_sees_prompt_and_output_apart() -> None:
    rig = make()
    prompt: Sequence[int] = [1, 2, 3]
    rig.submit(submit(1, prompt, said=[next_token([1, 2, 3])]))
    rig.step()
    (step,) = rig.device.batches[0]
    assert step.draw is not None
    assert step.draw.prompt_tokens == 3
    assert pack_ids(list(step.draw.history)[:4]) == pack_ids([1, 2, 3, next_token([1, 2, 3])])


class DamagedDevice(FakeDevice):
    """Computes what is no number for sequences of the marked lengths."""

    damaged: frozenset[int] = frozenset()

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        lengths = {step.key: step.start + len(step.tokens) for step in batch}
        return [
            replace(one, logprob=float("nan")) if lengths[one.key] in self.damaged else one
            for one in super().execute(batch)
        ]


@pytest.mark.parametrize(("length", "said"), [(3, 0), (5, 2)])
def test_what_is_no_number_ends_its_request_and_no_other(length: int, said: int) -> None:
    """At the prompt's end or in the middle of an answer: an error, never a wrong token."""
    device = DamagedDevice(64, B)
    device.damaged = frozenset({length})
    rig = Rig(Scheduler(LIMITS, 64, {EOS}), device)
    rig.submit(submit(1, [1, 2, 3], max_tokens=6))
    rig.submit(submit(2, [9] * 6, max_tokens=6))
    finish(rig)
    assert rig.said[1] == answer([1, 2, 3], said)
    assert rig.ends == {1: ["bad_logits"], 2: ["length"]}
    assert rig.said[2] == answer([9] * 6, 6)
    assert is_baseline(rig.book)
