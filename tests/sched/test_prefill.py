"""The prefill scheduler: nothing before the handshake, nothing after nobody wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdrt.data.commands import AbortSend, ExpectHandshakes, SendBlocks, TellFirsts, TellStarted
from pdrt.data.events import SLOT_COMPLETE, Quiet, SendEnded, SenderReady, SendFailed, SlotRecord
from pdrt.device.batch import Drawn, SeqStep
from pdrt.errors import BadRequest, Conflict, Draining, Overloaded, TooLong
from pdrt.messages import Problem, pack_ids, pack_tops
from pdrt.sched.events import Cancelled, Rebound, ResumeLocally
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler
from pdrt.sched.request import State, prompt_hash
from tests.sched.fakes import (
    AWAY,
    FakeDevice,
    Rig,
    check_books,
    is_baseline,
    next_token,
    submit,
)

B = 4
LIMITS = Limits(block_size=B, max_prefill_tokens=6)
LOST = Problem(code="peer_lost", message="decode is gone")
PROMPT = list(range(1, 11))  # 3 blocks, 2 chunks


def make(blocks: int = 64, limits: Limits = LIMITS) -> Rig:
    return Rig(PrefillDisaggScheduler(limits, blocks), FakeDevice(blocks, B))


def sends(rig: Rig) -> list[SendBlocks]:
    return [e for e in rig.take(SendBlocks) if isinstance(e, SendBlocks)]


def at(state: State, room: int = 1) -> Rig:
    """A rig whose request has come to `state`."""
    rig = make()
    rig.submit(submit(room, PROMPT))
    if state is not State.BOOTSTRAPPING:
        rig.feed(SenderReady(room, 0, 0))
    if state in (State.RUNNING, State.INFLIGHT):
        rig.step()
    if state is State.INFLIGHT:
        rig.step()
    assert rig.state(room) is state
    check_books(rig.book)
    return rig


LIVE = [State.BOOTSTRAPPING, State.QUEUED, State.RUNNING, State.INFLIGHT]


def test_a_prompt_goes_through_the_queues_and_its_blocks_leave_chunk_by_chunk() -> None:
    rig = make()
    rig.submit(submit(1, PROMPT))
    assert rig.effects == [
        ExpectHandshakes(1, 0, 10, prompt_hash(pack_ids(PROMPT)), 100.0),
    ]
    assert not rig.step().batch
    rig.feed(SenderReady(1, 0, 0))
    assert rig.sched.stats().queues["waiting_queue"] == 1
    rig.step()
    assert rig.take(TellStarted) == [TellStarted(1, 0)]
    (first,) = sends(rig)
    assert (first.first_block, len(first.blocks), first.last) == (0, 1, None)
    rig.step()
    (second,) = sends(rig)
    assert (second.first_block, len(second.blocks)) == (1, 2)
    assert second.last == SlotRecord(1, 0, SLOT_COMPLETE, 10, 0, next_token(PROMPT), -0.5)
    assert rig.device.read(first.blocks + second.blocks, 10) == PROMPT
    assert rig.sched.stats().queues["inflight_queue"] == 1
    rig.feed(SendEnded(1, 0, None))
    assert rig.ends[1] == ["prefilled"]
    assert is_baseline(rig.book)
    assert rig.sched.is_idle


@pytest.mark.parametrize("top", [0, 1])
def test_the_first_token_is_told_once_and_before_the_last_blocks_leave(top: int) -> None:
    """CASES 97."""
    rig = make()
    rig.submit(submit(1, PROMPT, top=top))
    rig.feed(SenderReady(1, 0, 0))
    rig.step()
    assert rig.take(TellFirsts) == []
    rig.step()
    token = next_token(PROMPT)
    tops = pack_tops([((token, -0.5),)]) if top else b""
    told, sent = rig.effects[-2:]
    assert told == TellFirsts(1, 0, (token,), (-0.5,), tops)
    assert isinstance(sent, SendBlocks)
    assert sent.last is not None
    rig.feed(SendEnded(1, 0, None))
    assert len(rig.take(TellFirsts)) == 1


def test_a_prompt_whose_answer_ended_with_its_first_token_is_done() -> None:
    """CASES 86: decode needs no more of it, and the router is told of no failure."""
    rig = at(State.INFLIGHT)
    rig.feed(SendEnded(1, 0, None))
    assert rig.ends[1] == ["prefilled"]
    assert is_baseline(rig.book)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 6, 7, 16, 17])
def test_every_block_leaves_exactly_once_and_in_order(length: int) -> None:
    """CASES 59: the pieces together are the prompt, however it was cut."""
    rig = make()
    prompt = list(range(1, length + 1))
    rig.submit(submit(1, prompt))
    rig.feed(SenderReady(1, 0, 0))
    while rig.state(1) is not State.INFLIGHT:
        rig.step()
    sent: list[int] = []
    for one in sends(rig):
        assert one.first_block == len(sent)
        sent += one.blocks
    assert rig.device.read(sent, length) == prompt
    assert len(sent) == -(-length // B)


def test_blocks_that_decode_holds_already_are_not_sent() -> None:
    rig = make()
    rig.submit(submit(1, PROMPT))
    rig.feed(SenderReady(1, 0, 2))
    rig.step()
    assert sends(rig) == []
    rig.step()
    (only,) = sends(rig)
    assert (only.first_block, len(only.blocks)) == (2, 1)


def test_a_prompt_that_decode_holds_whole_still_gets_its_slot() -> None:
    rig = make()
    rig.submit(submit(1, PROMPT))
    rig.feed(SenderReady(1, 0, 3))
    rig.step()
    rig.step()
    (only,) = sends(rig)
    assert only.blocks == ()
    assert only.last is not None


def test_without_chunking_all_leaves_at_the_end() -> None:
    rig = make(limits=replace(LIMITS, chunked=False))
    rig.submit(submit(1, PROMPT))
    rig.feed(SenderReady(1, 0, 0))
    rig.step()
    assert sends(rig) == []
    rig.step()
    (only,) = sends(rig)
    assert (only.first_block, len(only.blocks)) == (0, 3)


def test_a_full_pool_delays_and_the_step_stays_empty() -> None:
    """CASES 21: no retry loop; the next plan after blocks came back goes on."""
    rig = make(3)
    rig.submit(submit(1, PROMPT))
    rig.submit(submit(2, PROMPT[::-1]))
    rig.feed(SenderReady(1, 0, 0))
    rig.feed(SenderReady(2, 0, 0))
    rig.step()
    rig.step()
    assert rig.state(1) is State.INFLIGHT
    assert not rig.step().batch
    assert rig.state(2) is State.QUEUED
    rig.feed(SendEnded(1, 0, None))
    rig.step()
    assert rig.state(2) is State.RUNNING


def test_two_prompts_share_a_step() -> None:
    rig = make()
    for room in (1, 2):
        rig.submit(submit(room, [room, room, room]))
        rig.feed(SenderReady(room, 0, 0))
    assert [len(s.tokens) for s in rig.step().batch] == [3, 3]
    assert {s.last.token for s in sends(rig) if s.last} == {
        next_token([1, 1, 1]),
        next_token([2, 2, 2]),
    }


@pytest.mark.parametrize("state", LIVE)
def test_a_cancel_is_told_at_once_and_blocks_wait_for_the_transport(state: State) -> None:
    """CASES 95: the next chunk is not computed."""
    rig = at(state)
    rig.feed(Cancelled(1, "client_gone"))
    assert rig.ends[1] == ["cancelled"]
    assert [type(e) for e in rig.take(AbortSend)] == [AbortSend]
    held = state in (State.RUNNING, State.INFLIGHT)
    assert rig.book.blocks.used == (3 if held else 0)
    assert not rig.sched.is_idle
    assert not rig.step().batch
    check_books(rig.book)
    rig.feed(SendEnded(1, 0, LOST))
    assert is_baseline(rig.book)
    assert rig.ends[1] == ["cancelled"]


@pytest.mark.parametrize("state", LIVE)
def test_an_abort_of_the_decode_side_stops_the_computation(state: State) -> None:
    """CASES 37: a prompt that nobody wants is never run; it is told, and nothing stays."""
    rig = at(state)
    before = len(rig.device.batches)
    rig.feed(SendFailed(1, 0, LOST))
    assert rig.ends[1] == ["peer_lost"]
    assert not rig.step().batch
    assert len(rig.device.batches) == before
    rig.feed(SendEnded(1, 0, LOST))
    assert is_baseline(rig.book)


@pytest.mark.parametrize("state", LIVE)
def test_the_deadline_ends_every_state(state: State) -> None:
    rig = at(state)
    assert rig.sched.next_timer() == 100.0
    rig.now = 100.0
    assert rig.step().expired == 1
    assert rig.ends[1] == ["deadline"]
    assert rig.take(AbortSend)
    rig.feed(SendEnded(1, 0, None))
    assert is_baseline(rig.book)


@pytest.mark.parametrize("state", LIVE)
@pytest.mark.parametrize("problem", [LOST, None])
def test_a_transfer_that_ends_by_itself_ends_the_request(
    state: State, problem: Problem | None
) -> None:
    rig = at(state)
    rig.feed(SendEnded(1, 0, problem))
    done = state is State.INFLIGHT and problem is None
    expected = "prefilled" if done else ("transfer_failed" if problem is None else "peer_lost")
    assert rig.ends[1] == [expected]
    assert is_baseline(rig.book)
    assert not rig.step().batch


def test_a_cancel_while_its_chunk_is_on_the_device_sends_nothing() -> None:
    rig = at(State.QUEUED)
    plan = rig.plan()
    rig.feed(Cancelled(1, "client_gone"))
    rig.commit(plan)
    assert sends(rig) == []
    assert rig.book.blocks.used == 3
    rig.feed(SendEnded(1, 0, LOST))
    assert is_baseline(rig.book)


def test_what_is_late_doubled_or_of_another_attempt_changes_nothing() -> None:
    rig = at(State.QUEUED)
    before = rig.sched.stats()
    for event in (
        SenderReady(1, 0, 2),  # again
        SenderReady(1, 7, 0),
        SendFailed(1, 7, LOST),
        SendEnded(1, 7, LOST),
        SendEnded(9, 0, None),
        Quiet(1, 0),
        Rebound(1, 9, AWAY),
        ResumeLocally(1),
        Cancelled(9, "who"),
    ):
        rig.feed(event)
    after = rig.sched.stats()
    assert replace(after, counters={}) == replace(before, counters={})
    counted = {k: after.counters.get(k, 0) for k in ("late", "stale", "ignored")}
    assert counted == {"late": 5, "stale": 3, "ignored": 1}
    rig.step()
    (first,) = sends(rig)
    assert first.first_block == 0


def test_a_room_may_be_tried_again_while_its_old_attempt_still_ends() -> None:
    rig = at(State.RUNNING)
    rig.feed(Cancelled(1, "rebound"))
    rig.submit(submit(1, PROMPT, attempt=65536))
    rig.feed(SendEnded(1, 0, LOST))
    check_books(rig.book)
    assert rig.state(1) is State.BOOTSTRAPPING
    assert rig.book.blocks.used == 0


def test_the_same_attempt_is_never_taken_twice() -> None:
    rig = at(State.RUNNING)
    with pytest.raises(Conflict):
        rig.submit(submit(1, PROMPT, attempt=1))
    rig.feed(Cancelled(1, "client_gone"))
    with pytest.raises(Conflict):
        rig.submit(submit(1, PROMPT))


def test_what_cannot_be_served_is_refused_in_front() -> None:
    """CASES 55: one token over the limit is refused here as on the decode side."""
    rig = make(4, replace(LIMITS, max_waiting=1))
    rig.submit(submit(1, [1] * 16, max_tokens=99))
    with pytest.raises(Overloaded):
        rig.submit(submit(2, [1]))
    rig.feed(Cancelled(1, "gone"))
    with pytest.raises(TooLong):
        rig.submit(submit(2, [1] * 17))
    with pytest.raises(BadRequest):
        rig.submit(submit(2, []))
    rig.sched.drain()
    with pytest.raises(Draining):
        rig.submit(submit(2, [1]))
    rig.feed(SendEnded(1, 0, LOST))
    assert is_baseline(rig.book)


def test_a_resumed_prompt_is_computed_with_its_output() -> None:
    rig = make()
    rig.submit(submit(1, [1, 2, 3], said=[4, 5], attempt=1))
    rig.feed(SenderReady(1, 1, 0))
    rig.step()
    (only,) = sends(rig)
    assert only.last is not None
    assert (only.last.kv_len, only.last.token) == (5, next_token([1, 2, 3, 4, 5]))


class DamagedDevice(FakeDevice):
    """Computes what is no number."""

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        return [replace(one, logprob=float("nan")) for one in super().execute(batch)]


def test_what_is_no_number_is_never_a_first_token() -> None:
    """No slot is written; what left already is called back, and its blocks wait for that."""
    rig = Rig(PrefillDisaggScheduler(LIMITS, 64), DamagedDevice(64, B))
    rig.submit(submit(1, PROMPT))
    rig.feed(SenderReady(1, 0, 0))
    rig.step()
    rig.step()
    assert [send.last for send in sends(rig)] == [None]
    (abort,) = [e for e in rig.take(AbortSend) if isinstance(e, AbortSend)]
    assert (abort.room, abort.attempt, abort.problem.code) == (1, 0, "bad_logits")
    assert rig.ends[1] == ["bad_logits"]
    assert not is_baseline(rig.book)
    rig.feed(SendEnded(1, 0, abort.problem))
    assert is_baseline(rig.book)
