"""The decode scheduler: what arrives runs, what fails is held until nobody can write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdrt.data.commands import AbortReceiver, AdmitReceiver, OpenReceiver
from pdrt.data.events import (
    SLOT_COMPLETE,
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SlotRecord,
)
from pdrt.errors import BadRequest, Conflict, Overloaded, TooLong
from pdrt.messages import AskPrefill, Problem, pack_ids
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.events import Cancelled, Rebound, ResumeLocally
from pdrt.sched.limits import Limits
from pdrt.sched.request import State, prompt_hash
from tests.sched.fakes import (
    AWAY,
    EOS,
    HOME,
    FakeDevice,
    Rig,
    answer,
    answers,
    check_books,
    is_baseline,
    next_token,
    received,
    submit,
)

B = 4
LIMITS = Limits(block_size=B, max_prefill_tokens=8, reserved_tokens=4)
PROMPT = [1, 2, 3, 4, 5, 6]
LOST = Problem(code="peer_lost", message="prefill is gone")
MISMATCH = Problem(code="prompt_mismatch", message="no")
RETRY = 1 << 16


def make(blocks: int = 64, slots: int = 8, limits: Limits = LIMITS) -> Rig:
    return Rig(DecodeDisaggScheduler(limits, blocks, slots, {EOS}), FakeDevice(blocks, B))


def admit(rig: Rig, room: int) -> AdmitReceiver:
    """From a fresh request to one whose KV is in flight."""
    request = rig.book.rooms[room]
    rig.feed(ReceiverReady(room, request.attempt))
    rig.step()
    found = [e for e in rig.take(AdmitReceiver) if isinstance(e, AdmitReceiver)]
    assert [e.room for e in found] == [room]
    return found[0]


def land(
    rig: Rig, admitted: AdmitReceiver, tokens: Sequence[int], token: int | None = None
) -> None:
    """The peer writes the KV that is not here yet, then the slot."""
    rig.device.write(admitted.blocks, 0, tokens[admitted.first_block * B :])
    rig.feed(received(admitted.room, admitted.attempt, tokens, token))


def finish(rig: Rig, steps: int = 200) -> None:
    for _ in range(steps):
        if not rig.book.requests:
            return
        rig.step()
        check_books(rig.book)
    raise AssertionError(f"not finished: {rig.book.rooms}")


def unbound(rig: Rig) -> None:
    admit(rig, 1)
    rig.feed(ReceiveFailed(1, 0, LOST))


def retracted(rig: Rig, policy_state: State = State.BOOTSTRAPPING) -> list[int]:
    """Room 1 loses its blocks to room 2 right on its first decode step; what it has said."""
    first = admit(rig, 1)
    rig.submit(submit(2, [9] * 8, max_tokens=4))
    second = admit(rig, 2)
    land(rig, second, [9] * 8)
    rig.step()
    land(rig, first, PROMPT[:4])
    taken = rig.book.blocks.take(rig.book.blocks.free)  # pressure: nothing is left to grow
    assert taken is not None
    rig.step()
    rig.book.blocks.give(taken)
    assert rig.state(1) is policy_state, rig.book.rooms
    return rig.said[1]


def at(state: State) -> Rig:
    rig = make()
    if state in (State.QUEUED,):
        rig.sched = DecodeDisaggScheduler(replace(LIMITS, retraction="local"), 64, 8, {EOS})
        rig.book = rig.sched.book
        rig.submit(submit(1, PROMPT[:4], max_tokens=6))
        retracted(rig, State.QUEUED)
        rig.feed(Cancelled(2, "not needed"))
        return rig
    rig.submit(submit(1, PROMPT))
    match state:
        case State.WAITING:
            rig.feed(ReceiverReady(1, 0))
        case State.TRANSFERRING:
            admit(rig, 1)
        case State.UNBOUND:
            unbound(rig)
        case State.RUNNING:
            land(rig, admit(rig, 1), PROMPT)
        case _:
            pass
    assert rig.state(1) is state
    check_books(rig.book)
    return rig


LIVE = [
    State.BOOTSTRAPPING,
    State.WAITING,
    State.UNBOUND,
    State.TRANSFERRING,
    State.QUEUED,
    State.RUNNING,
]


def test_a_request_goes_through_the_queues_and_runs_no_prompt_token() -> None:
    """CASES 69: decode computes output tokens only."""
    rig = make()
    rig.submit(submit(1, PROMPT, max_tokens=4))
    assert rig.take(OpenReceiver) == [OpenReceiver(1, 0, HOME, 100.0)]
    assert rig.sched.stats().queues["prealloc_queue"] == 1
    admitted = admit(rig, 1)
    assert len(admitted.blocks) == 2
    assert (admitted.first_block, admitted.prompt_tokens) == (0, 6)
    assert admitted.prompt_hash == prompt_hash(pack_ids(PROMPT))
    assert rig.sched.stats().queues["transfer_queue"] == 1
    rig.feed(PromptStarted(1, 0))
    land(rig, admitted, PROMPT)
    assert rig.said[1] == answer(PROMPT, 1)
    assert rig.book.slots.used == 0
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 4)
    assert [[(s.start, len(s.tokens)) for s in b] for b in rig.device.batches] == [
        [(6, 1)],
        [(7, 1)],
        [(8, 1)],
    ]
    assert is_baseline(rig.book)


def test_one_token_needs_no_decode_step() -> None:
    """CASES 85, 86: the first token is the last one too."""
    rig = make()
    rig.submit(submit(1, PROMPT, max_tokens=1))
    land(rig, admit(rig, 1), PROMPT)
    assert rig.said[1] == answer(PROMPT, 1)
    assert rig.ends[1] == ["length"]
    assert is_baseline(rig.book)
    assert rig.device.batches == []


@pytest.mark.parametrize(
    ("ignore_eos", "stop", "token", "end"),
    [
        (False, (), EOS, ["stop"]),
        (True, (), EOS, None),
        (True, (55,), 55, ["stop"]),
        (False, (55,), 54, None),
    ],
)
def test_the_first_token_is_checked_like_every_other(
    ignore_eos: bool, stop: tuple[int, ...], token: int, end: list[str] | None
) -> None:
    """CASES 86, 87: it may end the answer; with ignore_eos it does not, and the answer ends."""
    rig = make()
    rig.submit(submit(1, PROMPT, ignore_eos=ignore_eos, stop=stop, max_tokens=3))
    land(rig, admit(rig, 1), PROMPT, token)
    assert rig.said[1] == [token]
    assert rig.ends.get(1) == end
    assert (rig.state(1) is None) == (end is not None)
    finish(rig)
    assert len(rig.ends[1]) == 1
    assert len(rig.said[1]) == (1 if end else 3)
    assert is_baseline(rig.book)


def test_the_hit_on_the_prefill_side_is_told_once() -> None:
    rig = make()
    rig.submit(submit(1, PROMPT))
    admitted = admit(rig, 1)
    rig.device.write(admitted.blocks, 0, PROMPT)
    record = SlotRecord(1, 0, SLOT_COMPLETE, 6, 3, next_token(PROMPT), -0.5)
    rig.feed(Received(1, 0, record))
    finish(rig)
    assert [o.cached_tokens for o in rig.outputs] == [3, 0, 0, 0]


@pytest.mark.parametrize("state", LIVE)
def test_an_abort_in_any_state_returns_to_the_baseline(state: State) -> None:
    """CASES 34: and the client is told once."""
    rig = at(state)
    rig.feed(Cancelled(1, "client_gone"))
    assert rig.ends[1] == ["cancelled"]
    check_books(rig.book)
    if state in (State.TRANSFERRING, State.UNBOUND):
        assert (rig.book.blocks.used, rig.book.slots.used) == (2, 1)
        rig.feed(Quiet(1, 0))
    assert rig.ends[1] == ["cancelled"]
    assert is_baseline(rig.book)
    assert not rig.step().batch
    aborted = state in (State.BOOTSTRAPPING, State.WAITING, State.TRANSFERRING)
    assert bool(rig.take(AbortReceiver)) == aborted


@pytest.mark.parametrize("state", LIVE)
def test_the_deadline_ends_every_state(state: State) -> None:
    rig = at(state)
    rig.now = rig.book.rooms[1].deadline
    assert rig.plan().expired == 1
    assert rig.ends[1] == ["deadline"]
    if state in (State.TRANSFERRING, State.UNBOUND):
        rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)
    assert rig.sched.next_timer() is None


def test_aborts_beyond_the_number_of_slots_leak_none() -> None:
    """CASES 35: ten times as many as there are slots."""
    rig = make(slots=4)
    for room in range(40):
        rig.submit(submit(room, PROMPT))
        if room % 3:
            admit(rig, room)
        rig.feed(Cancelled(room, "client_gone"))
        if room % 3:
            rig.feed(Quiet(room, 0))
    assert rig.book.slots.free == 4
    assert is_baseline(rig.book)


def test_blocks_of_an_aborted_transfer_are_not_given_to_the_next_one() -> None:
    """CASES 50: however long it takes, only the proof frees them."""
    rig = make(blocks=6, limits=replace(LIMITS, reserved_tokens=1))
    rig.submit(submit(1, [1] * 16, max_tokens=4))
    first = admit(rig, 1)
    rig.feed(Cancelled(1, "client_gone"))
    rig.submit(submit(2, [2] * 8, max_tokens=4))
    rig.feed(ReceiverReady(2, 0))
    for rig.now in (1.0, 30.0, 99.0):
        assert not rig.step().granted
    assert rig.sched.stats().blocks_quarantined == 4
    rig.device.write(first.blocks, 0, [9] * 16)  # the late write
    rig.feed(Quiet(1, 0))
    rig.step()
    (second,) = (e for e in rig.take(AdmitReceiver) if isinstance(e, AdmitReceiver))
    land(rig, second, [2] * 8)
    finish(rig)
    assert rig.said[2] == answer([2] * 8, 4)


def test_a_transfer_that_completes_after_its_abort_proves_that_it_is_over() -> None:
    """CASES 42: the late signal frees, is no error, and the later Quiet changes nothing."""
    rig = make()
    rig.submit(submit(1, PROMPT))
    admitted = admit(rig, 1)
    rig.feed(Cancelled(1, "client_gone"))
    land(rig, admitted, PROMPT)
    assert rig.said[1] == []
    assert is_baseline(rig.book)
    rig.feed(Quiet(1, 0))
    rig.feed(received(1, 0, PROMPT))
    assert is_baseline(rig.book)
    assert rig.book.counters["late"] == 2


def test_what_prefill_believes_done_is_told_at_once_for_nobody_will_rebind_it() -> None:
    """CASES 54: damage found in what was written whole."""
    rig = at(State.TRANSFERRING)
    rig.feed(ReceiveFailed(1, 0, LOST, was_written=True))
    assert rig.ends[1] == [LOST.code]
    assert rig.book.blocks.used == 2  # until it is quiet
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


def test_a_lost_prefill_is_waited_for_and_then_told_as_it_was() -> None:
    rig = at(State.UNBOUND)
    assert rig.sched.next_timer() == LIMITS.rebind_grace_s
    assert rig.ends == {}
    assert rig.sched.stats().blocks_quarantined == 2
    rig.now = LIMITS.rebind_grace_s
    rig.plan()
    assert rig.ends[1] == ["peer_lost"]
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


def test_a_prefill_problem_that_nobody_can_mend_is_told_at_once() -> None:
    rig = at(State.TRANSFERRING)
    rig.feed(ReceiveFailed(1, 0, MISMATCH))
    assert rig.ends[1] == ["prompt_mismatch"]
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


@pytest.mark.parametrize(
    "state", [State.BOOTSTRAPPING, State.WAITING, State.UNBOUND, State.TRANSFERRING]
)
def test_a_rebound_request_is_served_by_the_new_attempt(state: State) -> None:
    rig = at(state)
    rig.take(OpenReceiver)
    rig.feed(Rebound(1, RETRY, AWAY))
    assert rig.take(OpenReceiver) == [OpenReceiver(1, RETRY, AWAY, 100.0)]
    assert len(rig.take(AbortReceiver)) == (state is not State.UNBOUND)
    admitted = admit(rig, 1)
    assert admitted.attempt == RETRY
    rig.feed(received(1, 0, PROMPT, 66))  # the old attempt's slot, too late
    land(rig, admitted, PROMPT)
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 4)
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


def test_a_rebound_request_is_first_in_line() -> None:
    rig = make(slots=1)
    rig.submit(submit(1, PROMPT))
    unbound(rig)
    rig.submit(submit(2, PROMPT))
    rig.feed(ReceiverReady(2, 0))
    rig.feed(Rebound(1, RETRY, AWAY))
    rig.feed(ReceiverReady(1, RETRY))
    rig.feed(Quiet(1, 0))
    rig.take(AdmitReceiver)
    rig.step()
    assert [e.room for e in rig.take(AdmitReceiver) if isinstance(e, AdmitReceiver)] == [1]


def test_a_rebind_in_time_stops_the_grace_and_keeps_the_deadline() -> None:
    rig = at(State.UNBOUND)
    rig.feed(Rebound(1, RETRY, AWAY))
    assert rig.sched.next_timer() == 100.0
    rig.now = 50.0
    rig.step()
    assert rig.ends == {}


@pytest.mark.parametrize("attempt", [0, RETRY])
def test_an_old_rebind_is_stale(attempt: int) -> None:
    rig = at(State.WAITING)
    rig.feed(Rebound(1, RETRY, AWAY))
    rig.take(OpenReceiver)
    rig.feed(Rebound(1, attempt, HOME))
    assert rig.take(OpenReceiver) == []
    assert rig.book.counters["stale"] == 1


def test_a_rebind_that_comes_after_the_kv_is_not_needed() -> None:
    rig = at(State.RUNNING)
    rig.feed(Rebound(1, RETRY, AWAY))
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 4)


def test_a_retracted_request_asks_the_prefill_side_for_a_new_attempt() -> None:
    """CASES 13, 71: the consumed attempt is not used again, not even on the first decode step."""
    rig = make()
    rig.submit(submit(1, PROMPT[:4], max_tokens=6))
    said = retracted(rig)
    assert said == answer(PROMPT[:4], 1)
    so_far = [*PROMPT[:4], *said]
    assert rig.take(AskPrefill) == [AskPrefill(room=1, attempt=1, tokens=pack_ids(so_far))]
    assert rig.take(OpenReceiver)[-1] == OpenReceiver(1, 1, HOME, 100.0)
    rig.feed(received(1, 0, PROMPT[:4]))  # the slot that was consumed
    rig.feed(Quiet(1, 0))
    assert rig.state(1) is State.BOOTSTRAPPING
    admitted = admit(rig, 1)
    assert (admitted.attempt, admitted.prompt_tokens) == (1, 5)
    assert admitted.prompt_hash == prompt_hash(pack_ids(so_far))
    assert admitted.first_block == 1  # its own, which nobody took meanwhile
    rig.device.write(admitted.blocks, 0, so_far[B:])
    record = SlotRecord(1, 1, SLOT_COMPLETE, 5, 4, next_token(so_far), -0.5)
    rig.feed(Received(1, 1, record))  # a hit on what was computed before is no saving to tell
    finish(rig)
    assert rig.said[1] == answer(PROMPT[:4], 6)
    assert rig.ends == {1: ["length"], 2: ["length"]}
    assert all(output.cached_tokens == 0 for output in rig.outputs)
    assert is_baseline(rig.book)


def test_a_retracted_request_is_computed_here_if_policy_says_so() -> None:
    """CASES 70: no host copy, no other side: the process lives and the answer is whole."""
    rig = at(State.QUEUED)
    finish(rig)
    assert rig.said[1] == answer(PROMPT[:4], 6)
    assert rig.take(AskPrefill) == []
    assert is_baseline(rig.book)


@pytest.mark.parametrize("how", ["told", "retryable", "hopeless"])
@pytest.mark.parametrize("when", [State.BOOTSTRAPPING, State.WAITING, State.TRANSFERRING])
def test_a_retracted_request_that_nobody_prefills_is_computed_here(how: str, when: State) -> None:
    """CASES 70: never terminated."""
    rig = make()
    rig.submit(submit(1, PROMPT[:4], max_tokens=6))
    retracted(rig)
    if when is State.TRANSFERRING:
        admit(rig, 1)
    elif when is State.WAITING:
        rig.feed(ReceiverReady(1, 1))
    if how == "told":
        rig.feed(ResumeLocally(1))
    else:
        rig.feed(ReceiveFailed(1, 1, LOST if how == "retryable" else MISMATCH))
    assert rig.state(1) is State.QUEUED
    assert len(rig.take(AbortReceiver)) == (how == "told")
    rig.feed(ResumeLocally(1))  # told twice
    finish(rig)
    assert rig.said[1] == answer(PROMPT[:4], 6)
    assert rig.ends[1] == ["length"]
    rig.feed(Quiet(1, 1))
    assert is_baseline(rig.book)


@pytest.mark.parametrize("signal", [Quiet(1, 1), received(1, 1, [1, 2, 3, 4, 5])])
def test_the_end_of_a_late_writer_does_not_touch_what_is_computed_here(
    signal: Quiet | Received,
) -> None:
    """The attempt that fell back has the same number; its blocks are others."""
    rig = make()
    rig.submit(submit(1, PROMPT[:4], max_tokens=6))
    retracted(rig)
    admit(rig, 1)
    rig.feed(ResumeLocally(1))
    rig.step()
    assert rig.state(1) is State.RUNNING
    held = rig.sched.stats().blocks_quarantined
    used = rig.book.blocks.used
    rig.feed(signal)
    assert (held, rig.book.blocks.used) == (1, used - 1)  # the first block it shared
    check_books(rig.book)
    finish(rig)
    assert rig.said[1] == answer(PROMPT[:4], 6)


def test_a_request_that_was_never_retracted_is_not_computed_here() -> None:
    """CASES 69."""
    rig = at(State.BOOTSTRAPPING)
    rig.feed(ResumeLocally(1))
    assert rig.state(1) is State.BOOTSTRAPPING


def test_retract_and_abort_again_and_again_leaves_nothing() -> None:
    """CASES 38, the scheduler's part."""
    rig = make()
    for _ in range(50):
        rig.submit(submit(1, PROMPT[:4], max_tokens=6))
        retracted(rig)
        rig.feed(Cancelled(1, "client_gone"))
        rig.feed(Cancelled(2, "client_gone"))
        assert is_baseline(rig.book)
        rig.effects.clear()


def test_a_slot_that_vouches_for_other_tokens_ends_the_request() -> None:
    """CASES 57: zero tokens from a reference that does not fit."""
    rig = at(State.TRANSFERRING)
    rig.feed(received(1, 0, PROMPT[:-1]))
    assert rig.said[1] == []
    assert rig.ends[1] == ["transfer_failed"]
    assert is_baseline(rig.book)


def test_quiet_before_its_failure_frees_as_soon_as_the_failure_is_told() -> None:
    rig = at(State.TRANSFERRING)
    rig.feed(Quiet(1, 0))
    assert rig.book.blocks.used == 2
    rig.feed(ReceiveFailed(1, 0, LOST))
    assert (rig.book.blocks.used, rig.book.slots.used) == (0, 0)


def test_that_an_old_attempt_was_quiet_says_nothing_of_the_next_one() -> None:
    rig = at(State.TRANSFERRING)
    rig.feed(Quiet(1, 0))
    rig.feed(Rebound(1, RETRY, AWAY))
    admit(rig, 1)
    rig.feed(Cancelled(1, "client_gone"))
    assert rig.sched.stats().blocks_quarantined == 2
    rig.feed(Quiet(1, RETRY))
    assert is_baseline(rig.book)


@pytest.mark.parametrize("state", LIVE)
def test_what_is_late_doubled_or_of_another_attempt_changes_nothing(state: State) -> None:
    """CASES 61."""
    rig = at(state)
    before = rig.sched.stats()
    for event in (
        ReceiverReady(1, 7),
        PromptStarted(1, 7),
        received(1, 7, PROMPT),
        ReceiveFailed(1, 7, LOST),
        Quiet(1, 7),
        received(9, 0, PROMPT),
        Quiet(9, 0),
        Cancelled(9, "who"),
        Rebound(9, 1, AWAY),
        ResumeLocally(9),
        SenderReady(1, 0, 0),
        SendEnded(1, 0, None),
    ):
        rig.feed(event)
    after = rig.sched.stats()
    assert rig.state(1) is state
    assert replace(after, counters={}) == replace(before, counters={})
    gained = {k: after.counters.get(k, 0) - before.counters.get(k, 0) for k in ("late", "stale")}
    assert gained == {"late": 7, "stale": 5}


def test_kv_that_nobody_asked_for_is_ignored() -> None:
    rig = at(State.WAITING)
    rig.feed(received(1, 0, PROMPT))
    assert rig.state(1) is State.WAITING
    assert rig.book.counters["ignored"] == 1


def test_a_large_request_waits_and_small_ones_pass_only_so_often() -> None:
    rig = make(blocks=12, slots=64, limits=replace(LIMITS, patience=2))
    rig.submit(submit(1, [1] * 4, max_tokens=4))
    land(rig, admit(rig, 1), [1] * 4)
    rig.submit(submit(2, [2] * 40, max_tokens=4))
    rig.feed(ReceiverReady(2, 0))
    for room in range(3, 9):
        rig.submit(submit(room, [room], max_tokens=2))
        rig.feed(ReceiverReady(room, 0))
    rig.step()
    small = [e for e in rig.take(AdmitReceiver) if isinstance(e, AdmitReceiver)]
    assert [e.room for e in small] == [3, 4]
    for one in small:
        land(rig, one, [one.room])
    while rig.state(2) is State.WAITING:
        rig.step()
    assert next(e.room for e in rig.take(AdmitReceiver) if isinstance(e, AdmitReceiver)) == 2


def test_the_last_runner_waits_for_those_in_transfer_and_is_not_retracted() -> None:
    rig = make(blocks=4, limits=replace(LIMITS, reserved_tokens=1))
    rig.submit(submit(1, [1] * 4, max_tokens=8))
    rig.submit(submit(2, [2] * 4, max_tokens=8))
    one, two = admit(rig, 1), admit(rig, 2)
    rig.now = 1.0
    land(rig, one, [1] * 4)
    taken = rig.book.blocks.take(2)
    assert taken is not None
    assert not rig.step().batch
    assert rig.state(1) is State.RUNNING
    land(rig, two, [2] * 4)
    plan = rig.step()
    assert (plan.retracted, len(plan.batch)) == (1, 1)
    rig.book.blocks.give(taken)


@pytest.mark.parametrize(("blocks", "admitted"), [(3, False), (4, True)])
def test_the_growth_of_those_in_transfer_is_reserved_too(blocks: int, admitted: bool) -> None:
    """n in the formula is running + in transfer."""
    rig = make(blocks)
    rig.submit(submit(1, [1] * 4, max_tokens=8))
    admit(rig, 1)
    rig.submit(submit(2, [2] * 4, max_tokens=8))
    rig.feed(ReceiverReady(2, 0))
    assert rig.step().granted == admitted


def test_what_a_retraction_frees_is_for_growth_not_for_newcomers() -> None:
    """Else the newcomer takes the blocks that the next step needs, and so on."""
    rig = make(limits=replace(LIMITS, reserved_tokens=1))
    for room in (1, 2):
        rig.submit(submit(room, [room] * 8, max_tokens=9))
        land(rig, admit(rig, room), [room] * 8)
        assert rig.state(room) is State.RUNNING
    taken = rig.book.blocks.take(rig.book.blocks.free)
    assert taken is not None
    rig.submit(submit(3, [3], max_tokens=2))
    rig.feed(ReceiverReady(3, 0))
    while not (plan := rig.step()).retracted:
        assert plan.batch
    assert plan.granted == 0
    assert rig.state(3) is State.WAITING
    rig.step()
    assert rig.state(3) is State.TRANSFERRING
    rig.book.blocks.give(taken)


def test_what_cannot_be_served_is_refused_in_front() -> None:
    rig = make(blocks=4, limits=replace(LIMITS, max_waiting=1))
    with pytest.raises(TooLong):
        rig.submit(submit(1, [1] * 8, max_tokens=9))
    with pytest.raises(BadRequest, match="source"):
        rig.submit(submit(1, [1], source=None))
    rig.submit(submit(1, [1] * 8, max_tokens=8))
    with pytest.raises(Overloaded):
        rig.submit(submit(2, [1]))
    with pytest.raises(Conflict):
        rig.submit(submit(1, [1], attempt=1))
    admit(rig, 1)
    rig.feed(Cancelled(1, "client_gone"))
    with pytest.raises(Conflict):
        rig.submit(submit(1, [1]))
    rig.submit(submit(1, [1], attempt=RETRY))
    check_books(rig.book)


def test_a_moved_stream_that_was_whole_opens_no_receiver() -> None:
    rig = make()
    rig.submit(submit(1, PROMPT, said=answer(PROMPT, 4), max_tokens=4))
    assert rig.ends[1] == ["length"]
    assert rig.effects == []
    assert is_baseline(rig.book)


def test_a_draining_scheduler_lets_rebinds_and_retractions_through() -> None:
    rig = at(State.UNBOUND)
    rig.sched.drain()
    rig.feed(Rebound(1, RETRY, AWAY))
    land(rig, admit(rig, 1), PROMPT)
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 4)
    assert rig.sched.is_idle


# Prompts that are computed here.


ALLOWED = replace(LIMITS, local_prefill=True)


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_without_a_source_is_computed_here_beside_those_that_arrive(n: int) -> None:
    rig = make(limits=ALLOWED)
    rig.submit(submit(1, PROMPT, max_tokens=6))
    rig.submit(submit(2, PROMPT[:5], max_tokens=6, source=None, n=n, seed=3))
    land(rig, admit(rig, 1), PROMPT)
    finish(rig)
    assert rig.said[1] == answer(PROMPT, 6)
    assert [rig.sequences[2, i] for i in range(n)] == answers(PROMPT[:5], 6, n, 3)
    assert rig.book.counters["prefilled_here"] == 1
    assert not rig.take(AskPrefill)
    assert is_baseline(rig.book)


def test_one_that_was_computed_here_is_so_again_after_a_retraction() -> None:
    """There is no prefill side to ask."""
    rig = make(blocks=6, limits=replace(ALLOWED, reserved_tokens=1))
    for room in (1, 2):
        rig.submit(submit(room, PROMPT, max_tokens=14, source=None))
    finish(rig)
    assert rig.book.counters["retractions"] > 0
    assert [rig.said[room] for room in (1, 2)] == [answer(PROMPT, 14)] * 2
    assert not rig.take(AskPrefill)


def test_without_leave_no_prompt_is_computed_here() -> None:
    rig = make()
    with pytest.raises(BadRequest, match="source"):
        rig.submit(submit(2, PROMPT, source=None))
    assert is_baseline(rig.book)
