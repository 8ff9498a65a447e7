"""Stories of a transfer between two desks: what each side is told, and when memory is free."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from pdrt.data import outward as out
from pdrt.data.commands import AbortReceiver
from pdrt.data.events import (
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
)
from pdrt.data.handshake import signed
from pdrt.data.limits import Limits
from pdrt.data.peer import Health
from pdrt.data.transfer import Key, Sender, State
from pdrt.data.transport.promise import Ended
from pdrt.errors import Illegal
from pdrt.keys import ClusterKey
from pdrt.messages import (
    FROM_DECODE,
    FROM_PREFILL,
    AbortTransfer,
    Attached,
    Failed,
    Handshake,
    Problem,
    Progress,
    Quiesced,
    Rank,
    Route,
    decode,
    encode,
    pack_ids,
)
from tests.data.rig import (
    KEY,
    LAYOUT,
    PATIENCE,
    PROBLEM,
    WALL,
    Rig,
    attach,
    process,
    record,
    route,
)

A: Key = (1, 0)
B: Key = (2, 0)
C: Key = (3, 0)


def ready(key: Key = A, rig: Rig | None = None) -> Rig:
    """Both sides know of each other; the prefill side may compute."""
    rig = rig or Rig()
    rig.expect(key)
    rig.open(key)
    rig.flow()
    rig.admit(key)
    rig.flow()
    return rig


def kinds(rig: Rig, key: Key = A) -> list[str]:
    return [type(e).__name__ for e in rig.heard if (e.room, e.attempt) == key]


def problem_of(rig: Rig, kind: type[ReceiveFailed] | type[SendFailed]) -> Problem:
    (found,) = [event for event in rig.heard if isinstance(event, kind)]
    return found.problem


# The way it should go.


def test_a_transfer_is_ready_sent_received_and_ended() -> None:
    rig = ready()
    rig.p.started(A)
    rig.settle()
    rig.send_all(A)
    rig.land_all()
    rig.flow()
    assert kinds(rig) == ["ReceiverReady", "SenderReady", "SendEnded", "PromptStarted", "Received"]
    (received,) = [event for event in rig.heard if isinstance(event, Received)]
    assert received.record == record(A)
    rig.finish(A)
    rig.check_baseline()


def test_the_poller_finds_what_the_doorbell_did_not_announce() -> None:
    rig = ready()
    rig.send_all(A)
    rig.land_all()
    doorbell = rig.to_d.pop()
    rig.scan()
    assert rig.has(Received, A)
    rig.to_d.append(doorbell)
    rig.flow()
    assert rig.d.counters["late_messages"] == 1


def test_chunks_are_written_while_the_next_is_computed_and_the_slot_waits_for_them() -> None:
    rig = Rig()
    rig.expect(A, tokens=12)
    rig.open(A)
    rig.flow()
    rig.admit(A, tokens=12)
    rig.flow()
    rig.send(A, [5], 0, None)
    rig.send(A, [6], 1, None)
    assert len(rig.flights) == 2
    rig.send(A, [7], 2, record(A, 12))
    assert len(rig.flights) == 2  # the last one waits, whatever order the transport keeps
    first, second = rig.flights
    rig.land(second)
    rig.end(second)
    assert not any(flight.write.slot for flight in rig.flights.values())
    rig.land(first)
    rig.end(first)
    (last,) = rig.flights.values()
    assert last.write.slot
    rig.land_all()
    rig.flow()
    assert rig.has(Received, A)


def test_blocks_that_decode_holds_already_are_not_sent() -> None:
    rig = Rig()
    rig.expect(A, tokens=12)
    rig.open(A)
    rig.flow()
    rig.admit(A, tokens=12, first_block=2)
    rig.flow()
    (sender_ready,) = [event for event in rig.heard if isinstance(event, SenderReady)]
    assert sender_ready.first_block == 2
    rig.send(A, [5, 6], 0, None)  # computed all the same, but nobody needs them
    assert not rig.flights
    rig.send(A, [7], 2, record(A, 12))
    (flight,) = rig.flights.values()
    assert flight.write.runs[:, 0].tolist() == [7 * LAYOUT.block_bytes]
    rig.land_all()
    rig.flow()
    assert rig.has(Received, A)


def test_a_prompt_that_decode_holds_whole_needs_a_slot_only() -> None:
    rig = Rig()
    rig.expect(A)
    rig.open(A)
    rig.flow()
    rig.admit(A, first_block=2)
    rig.flow()
    rig.send_all(A)
    (flight,) = rig.flights.values()
    assert len(flight.write.runs) == 0
    rig.land_all()
    rig.flow()
    assert rig.has(Received, A)


def test_a_handshake_may_come_before_its_request() -> None:
    rig = Rig()
    rig.open(A)
    rig.flow()
    rig.admit(A)
    rig.flow()
    assert not rig.has(SenderReady, A)
    rig.expect(A)
    assert rig.has(SenderReady, A)


def test_two_attempts_of_one_room_are_two_transfers() -> None:
    """CASES 14: only what the router minted names a transfer."""
    rig = ready((1, 0))
    ready((1, 65536), rig)
    rig.send_all((1, 65536))
    rig.land_all()
    rig.flow()
    assert rig.has(Received, (1, 65536))
    assert not rig.has(Received, (1, 0))


def test_queueing_on_the_prefill_side_is_not_taken_for_death() -> None:
    """CASES 18: forty seconds in prefill's queue, pings answered, then it goes through."""
    rig = ready()
    for _ in range(80):
        rig.pass_time(0.5)
        rig.flow()
    assert kinds(rig) == ["ReceiverReady", "SenderReady"]
    rig.p.started(A)
    rig.settle()
    rig.send_all(A)
    rig.land_all()
    rig.flow()
    assert rig.has(PromptStarted, A)
    assert rig.has(Received, A)


# Aborts.


def test_an_aborted_transfer_keeps_its_blocks_until_its_writes_have_ended() -> None:
    """CASES 50: write delayed, abort, and another request that wants the same blocks."""
    rig = Rig(blocks=3)
    ready(A, rig)
    rig.send_all(A)
    (write,) = rig.flights  # it is delayed
    rig.abort_receive(A)
    rig.pass_time(1000.0)  # no passed time releases them
    rig.flow()
    assert len(rig.ds[0].books.free) == 1
    assert not rig.has(Quiet, A)
    rig.land(write)  # the write comes late, and lands where it still belongs
    rig.end(write)
    rig.flow()
    assert rig.has(Quiet, A)
    assert len(rig.ds[0].books.free) == 3
    ready(B, rig)
    rig.send_all(B)
    rig.land_all()
    rig.flow()
    assert rig.has(Received, B)


def test_an_abort_stops_the_computation_and_the_writes() -> None:
    rig = ready()
    rig.abort_receive(A)
    rig.flow()
    assert kinds(rig) == ["ReceiverReady", "SenderReady", "SendFailed", "SendEnded", "Quiet"]
    rig.send_all(A)  # the scheduler had not read it yet
    assert not rig.flights
    rig.check_baseline()


def test_an_abort_before_the_request_comes_makes_prefill_never_compute_it() -> None:
    """CASES 37."""
    rig = Rig()
    rig.open(A)
    rig.flow()
    rig.admit(A)
    rig.flow()
    rig.abort_receive(A)
    rig.flow()
    assert rig.has(Quiet, A)
    rig.expect(A)
    assert kinds(rig)[-2:] == ["SendFailed", "SendEnded"]
    rig.check_baseline()


def test_the_prefill_side_hears_why_it_is_not_wanted_any_more() -> None:
    """CASES 19: with damage, a lost peer or a deadline, both legs name the cause."""
    rig = ready()
    rig.abort_receive(A)
    rig.flow()
    assert "the decode side gave it up: client_gone" in problem_of(rig, SendFailed).message


def test_prefill_giving_up_is_told_to_decode_and_its_blocks_become_free() -> None:
    rig = ready()
    rig.send_all(A)
    rig.abort_send(A)
    rig.flow()
    assert rig.has(ReceiveFailed, A)
    assert problem_of(rig, ReceiveFailed).code == "cancelled"
    assert not rig.has(Quiet, A)
    rig.land_all()
    rig.flow()
    assert rig.has(Quiet, A)
    rig.check_baseline()


def test_ten_times_as_many_aborts_as_slots_leave_all_slots_free() -> None:
    """CASES 35, 42: in each state of the decode side."""
    rig = Rig()
    for room in range(80):
        key = (room, 0)
        if room % 4 != 1:
            rig.expect(key)
        rig.open(key)
        if room % 4 != 2:
            rig.flow()
            rig.admit(key)
        if room % 4 == 3:
            rig.flow()
            rig.send_all(key)
        rig.abort_receive(key)
        rig.abort_receive(key)
        rig.flow()
        rig.land_all()
        rig.flow()
        rig.abort_send(key)
    assert sorted(rig.ds[0].books.slots) == list(range(8))
    rig.check_baseline()


def test_an_abort_that_crosses_with_the_slot_is_answered_once() -> None:
    """The scheduler gave it up before it read that it was received."""
    rig = ready()
    rig.send_all(A)
    rig.land_all()
    rig.d.scan(rig.now)  # Received waits to be read
    rig.ds[0].quarantine.add(A)
    rig.d.abort(AbortReceiver(*A, "client_gone"), rig.now)
    rig.settle()
    assert kinds(rig).count("Quiet") == 1
    assert len(rig.ds[0].books.free) == 32


def test_what_is_admitted_after_it_failed_is_quiet_at_once() -> None:
    rig = Rig()
    rig.open(A)
    rig.flow()
    rig.kill_p()
    rig.hear_of_death()
    assert rig.has(ReceiveFailed, A)
    rig.admit(A)  # decided before the failure was read
    assert rig.has(Quiet, A)
    rig.check_baseline()


# Faults.


def test_a_killed_prefill_process_fails_its_transfers_and_frees_their_blocks_at_once() -> None:
    rig = ready()
    rig.send_all(A)
    rig.kill_p()
    rig.hear_of_death()
    assert kinds(rig)[-2:] == ["ReceiveFailed", "Quiet"]
    problem = problem_of(rig, ReceiveFailed)
    assert (problem.code, problem.stage) == ("peer_lost", "prefill")
    (failed,) = [event for event in rig.heard if isinstance(event, ReceiveFailed)]
    assert failed.problem.is_retryable
    rig.check_baseline()


def test_a_stopped_prefill_process_fails_its_transfers_but_keeps_their_blocks() -> None:
    rig = ready()
    rig.send_all(A)
    for _ in range(40):  # it neither reads nor answers
        rig.now += 0.05
        rig.d.tick(rig.now, WALL + rig.now)
        rig.settle()
    assert rig.has(ReceiveFailed, A), "known within two seconds"
    assert not rig.has(Quiet, A)
    rig.pass_time(1000.0)
    assert not rig.has(Quiet, A)
    assert rig.d.overdue_quarantine(rig.now) == 1
    rig.land_all()  # it is continued, and its write goes on as if nothing had been
    rig.flow()
    rig.pass_time(2.0)
    rig.flow()
    assert rig.has(Quiet, A)


def test_a_peer_that_comes_back_serves_again() -> None:
    rig = ready()
    for _ in range(40):
        rig.now += 0.05
        rig.d.tick(rig.now, WALL + rig.now)
        rig.settle()
    assert list(rig.d.health().values()) == ["dead"]
    rig.flow()
    for _ in range(4):
        rig.pass_time(0.5)
        rig.flow()
    assert list(rig.d.health().values()) == ["alive"]
    ready(B, rig)
    rig.send_all(B)
    rig.land_all()
    rig.flow()
    assert rig.has(Received, B)


def test_a_decode_worker_that_falls_silent_fails_its_sends_within_two_seconds() -> None:
    rig = ready()
    for _ in range(39):
        rig.now += 0.05
        rig.p.tick(rig.now, WALL + rig.now)
        rig.settle()
    assert "does not ping any more" in problem_of(rig, SendFailed).message
    assert rig.has(SendEnded, A)


def test_a_dead_decode_process_is_forgotten_and_its_sends_end() -> None:
    rig = ready()
    rig.send_all(A)
    rig.p.died(rig.ds[0].attach.process, rig.now)
    rig.settle()
    problem = problem_of(rig, SendFailed)
    assert (problem.code, problem.stage) == ("peer_lost", "decode")
    assert rig.p.health() == {}
    (write,) = rig.flights
    rig.end(write, "the peer is gone")
    assert rig.has(SendEnded, A)
    assert not rig.p.rooms


def test_a_failed_write_fails_only_its_own_transfer() -> None:
    """CASES 26: and one failing write never frees what a sibling is still writing."""
    rig = ready()
    ready(B, rig)
    rig.send(A, [1], 0, None)
    rig.send(A, [2], 1, None)
    rig.send_all(B)
    first, second, *_ = rig.flights
    rig.end(first, "no such page")
    rig.flow()
    assert rig.has(SendFailed, A)
    assert rig.has(ReceiveFailed, A)
    assert not rig.has(SendEnded, A)
    assert not rig.has(Quiet, A)
    rig.end(second, "aborted")
    rig.flow()
    assert rig.has(SendEnded, A)
    assert rig.has(Quiet, A)
    rig.land_all()
    rig.flow()
    assert rig.has(Received, B)


def test_a_lost_completion_is_given_up_in_bounded_time_and_decode_has_its_answer() -> None:
    """CASES 10: the data has landed, the transport never says so; the next transfer works."""
    rig = ready()
    rig.send_all(A)
    (write,) = rig.flights
    rig.land(write)
    rig.scan()
    assert rig.has(Received, A)
    for _ in range(4):
        rig.pass_time(0.5)
        rig.flow()
    assert problem_of(rig, SendFailed).message.count("the transport is stalled") == 1
    rig.end(write, "aborted")
    rig.flow()
    assert rig.has(SendEnded, A)
    rig.finish(A)
    ready(B, rig)
    rig.send_all(B)
    rig.land_all()
    rig.flow()
    assert rig.has(Received, B)


def test_a_lost_completion_is_given_up_though_the_peers_other_writes_end() -> None:
    """CASES 10: a busy peer must not hide it; found by the soak."""
    rig = ready()
    rig.send(A, [1], 0, None)
    (lost,) = rig.flights
    rig.land(lost)
    for room in range(100, 116):
        rig.pass_time(0.5)
        key = (room, 0)
        if room == 110:
            assert not rig.has(SendFailed, A), "5 s: others may have been ahead of it"
        ready(key, rig)
        rig.send_all(key)
        for write in [w for w in rig.flights if w != lost]:
            rig.land(write)
            rig.end(write)
        rig.flow()
        assert rig.has(Received, key)
        rig.finish(key)
    assert "the transport is stalled" in problem_of(rig, SendFailed).message
    rig.end(lost, "aborted")
    rig.flow()
    assert rig.has(Quiet, A)


def test_our_own_sleep_is_not_taken_for_a_stalled_transport() -> None:
    rig = ready()
    rig.send_all(A)
    (write,) = rig.flights
    rig.pass_time(30.0)  # the process was stopped; the end waits to be read
    rig.land(write)
    rig.end(write)
    assert not rig.has(SendFailed, A)


def test_a_doubled_end_changes_nothing() -> None:
    rig = ready()
    rig.send(A, [1], 0, None)
    (write,) = rig.flights
    rig.land(write)
    rig.end(write)
    rig.p.write_ended(Ended(write[1]), rig.now)
    assert rig.p.counters["duplicate_ends"] == 1
    rig.send(A, [2], 1, record(A))
    rig.land_all()
    rig.flow()
    assert rig.has(Received, A)


def test_a_damaged_slot_is_a_failure_that_may_be_tried_again() -> None:
    rig = ready()
    rig.send_all(A)
    (write,) = rig.flights
    rig.land(write)
    rig.ds[0].memory[rig.ds[0].books.kept[A][1] * 64 + 20] ^= 1
    rig.end(write)
    rig.flow()
    assert "the slot is damaged" in problem_of(rig, ReceiveFailed).message
    assert rig.ds[0].slots.corrupt == 1
    assert not rig.has(Received, A)
    rig.flow()
    assert rig.has(Quiet, A)


def test_a_slot_that_reports_trouble_is_no_success() -> None:
    """CASES 57: a wrong status never becomes tokens."""
    rig = ready()
    rig.send(A, [0, 1], 0, replace(record(A), status=2))
    rig.land_all()
    rig.flow()
    assert "slot status 2" in problem_of(rig, ReceiveFailed).message
    assert not rig.has(Received, A)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_deadline_ends_a_transfer_on_either_side(side: str) -> None:
    rig = Rig()
    rig.expect(A, deadline=3.0 if side == "prefill" else 60.0)
    rig.open(A, deadline=60.0)
    rig.flow()
    rig.admit(A, deadline=3.0 if side == "decode" else 60.0)
    rig.flow()
    for _ in range(8):
        rig.pass_time(0.4)
        rig.flow()
    assert problem_of(rig, ReceiveFailed).code == "deadline"
    assert rig.has(SendEnded, A)
    rig.check_baseline()


def test_an_error_names_all_that_is_needed_to_find_the_fault() -> None:
    """CASES 19, as prefill sees it and as decode sees it."""
    rig = ready()
    rig.send(A, [1], 0, None)
    rig.land_all()
    rig.send(A, [2], 1, record(A))
    (write,) = rig.flights
    rig.end(write, "link down")
    said = problem_of(rig, SendFailed).message
    for part in ("room 1 attempt 0", "link down", "rank 0,0,0", "shm", "d0", "transferring"):
        assert part in said
    assert f"{LAYOUT.block_bytes} of" in said

    other = ready()
    other.send(A, [1], 0, None)
    other.land_all()
    other.flow()
    other.kill_p()
    other.hear_of_death()
    said = problem_of(other, ReceiveFailed).message
    for part in ("room 1 attempt 0", "has died", "0,0,0 at tcp://127.0.0.1:6000", "shm"):
        assert part in said
    assert f"{LAYOUT.block_bytes} of {2 * LAYOUT.block_bytes} bytes" in said
    assert "last transferring" in said


# What gets lost on the way.


def test_a_lost_handshake_is_said_again() -> None:
    rig = Rig()
    rig.expect(A)
    rig.open(A)
    rig.flow()
    rig.admit(A)
    rig.to_p.clear()
    for _ in range(3):
        rig.pass_time(0.5)
        rig.flow()
    assert rig.has(SenderReady, A)


def test_an_accepted_handshake_is_asked_about_rarely() -> None:
    rig = ready()
    for _ in range(20):  # ten seconds
        rig.pass_time(0.5)
        rig.flow()
    assert rig.d._asking.number <= 4  # noqa: SLF001 - one number a message


def test_a_lost_failure_is_told_again_to_who_asks() -> None:
    rig = ready()
    rig.abort_send(A)
    rig.to_d.clear()
    for _ in range(12):
        rig.pass_time(0.5)
        rig.flow()
    assert rig.has(ReceiveFailed, A)
    assert rig.has(Quiet, A)


def test_a_lost_abort_or_answer_is_repeated_until_quiet() -> None:
    rig = ready()
    rig.abort_receive(A)
    rig.to_p.clear()
    rig.pass_time(1.0)
    while rig.to_p:
        rig.hear_p()
    rig.to_d.clear()  # the answer is lost as well
    for _ in range(3):
        rig.pass_time(0.5)
        rig.flow()
    assert rig.has(Quiet, A)


def test_a_handshake_that_an_abort_overtook_is_refused() -> None:
    """After a reconnect messages may come in another order."""
    rig = Rig()
    rig.open(A)
    rig.flow()
    rig.admit(A)
    rig.abort_receive(A)
    rig.hear_p(at=1)
    assert isinstance(decode(FROM_PREFILL, rig.to_d[-1]), Quiesced)
    rig.flow()
    assert rig.has(Quiet, A)
    assert rig.p.counters["dropped_late_handshake"] == 1
    assert len(rig.p.early) == 0


# Forgeries, junk and floods.


def handshake(rig: Rig, key: Key = A, **changes: object) -> Handshake:
    fields: dict[str, object] = {
        "room": key[0],
        "attempt": key[1],
        "session": "d0",
        "blocks": pack_ids([1, 2]),
        "first_block": 0,
        "slot": 1,
        "prompt_tokens": 8,
        "prompt_hash": b"h",
        "decode_ranks": 1,
        "expires": WALL + 60,
        "token": b"",
        "number": 1000,
    }
    plain = Handshake(**{**fields, **changes})  # type: ignore[arg-type]
    return signed(KEY, plain, rig.ds[0].attach.endpoint)


def attached() -> Rig:
    rig = Rig()
    rig.open(B)
    rig.flow()
    rig.to_d.clear()
    return rig


def tell_p(rig: Rig, message: Handshake | AbortTransfer) -> None:
    rig.to_p.append(encode(FROM_DECODE, message))
    rig.hear_p(at=len(rig.to_p) - 1)


def answers(rig: Rig) -> list[object]:
    found = [decode(FROM_PREFILL, frame) for frame in rig.to_d]
    rig.to_d.clear()
    return list(found)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": pack_ids([3, 4])},
        {"slot": 2},
        {"attempt": 1},
        {"room": 9},
        {"number": 2000},
        {"expires": WALL + 999},
        {"first_block": 1},
        {"prompt_hash": b"x"},
        {"token": b"\0" * 16},
    ],
)
def test_a_changed_handshake_is_dropped(change: dict[str, object]) -> None:
    rig = attached()
    rig.expect(A)
    forged = replace(handshake(rig), **change)  # type: ignore[arg-type]
    tell_p(rig, forged)
    assert rig.p.counters["dropped_forged_handshake"] == 1
    assert answers(rig) == []
    assert rig.p.rooms[A].targets == {}


def test_a_handshake_of_another_cluster_or_endpoint_is_dropped() -> None:
    rig = attached()
    plain = handshake(rig)
    tell_p(rig, signed(ClusterKey(b"x" * 32), plain, rig.ds[0].attach.endpoint))
    tell_p(rig, signed(KEY, plain, "tcp://127.0.0.1:1"))
    assert rig.p.counters["dropped_forged_handshake"] == 2


def test_a_handshake_is_good_once() -> None:
    rig = attached()
    tell_p(rig, handshake(rig))
    tell_p(rig, handshake(rig))
    assert rig.p.counters["dropped_late_handshake"] == 1


@pytest.mark.parametrize("expires", [WALL - 1, float("nan"), float("-inf")])
def test_an_expired_handshake_is_declined(expires: float) -> None:
    """CASES 57."""
    rig = attached()
    tell_p(rig, handshake(rig, expires=expires))
    assert [type(answer) for answer in answers(rig)] == [Failed, Quiesced]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt_tokens": 9, "blocks": pack_ids([1, 2, 3])}, "prompt_mismatch"),
        ({"prompt_hash": b"other"}, "prompt_mismatch"),
        ({"blocks": pack_ids([1])}, "bad_message"),
        ({"blocks": pack_ids([1, 1])}, "bad_message"),
        ({"blocks": pack_ids([1, 32])}, "bad_message"),
        ({"blocks": pack_ids([1, -1])}, "bad_message"),
        ({"blocks": b"123456789"}, "bad_message"),
        ({"slot": 8}, "bad_message"),
        ({"first_block": 7}, "bad_message"),
    ],
)
@pytest.mark.parametrize("is_early", [True, False])
def test_a_handshake_that_does_not_fit_fails_its_room_and_nothing_else(
    change: dict[str, object], code: str, is_early: bool
) -> None:
    """CASES 57: out-of-range references write nothing."""
    rig = attached()
    if not is_early:
        rig.expect(A)
    tell_p(rig, handshake(rig, A, **change))
    if is_early:
        rig.expect(A)
    failed, quiesced = answers(rig)[-2:]
    assert isinstance(failed, Failed)
    assert failed.problem.code == code
    assert isinstance(quiesced, Quiesced)
    assert problem_of(rig, SendFailed).code == code
    assert rig.has(SendEnded, A)
    assert rig.p.rooms == {}


def test_one_decode_rank_too_many_is_declined_and_the_transfer_fails() -> None:
    rig = ready()
    other = replace(attach(session="d1"), process=process(900))
    rig.p.receive(other, rig.now, WALL)
    rig.p.sessions.attached("d1")
    shake = replace(handshake(rig), session="d1", number=1)
    rig.p.receive(signed(KEY, shake, other.endpoint), rig.now, WALL)
    rig.settle()
    assert "more than 1 decode ranks" in problem_of(rig, SendFailed).message


def test_an_abort_by_somebody_else_does_not_stop_a_transfer() -> None:
    rig = ready()
    other = replace(attach(session="d1"), process=process(900))
    rig.p.receive(other, rig.now, WALL)
    rig.p.sessions.attached("d1")
    rig.p.receive(AbortTransfer(room=1, attempt=0, session="d1", number=1), rig.now, WALL)
    rig.settle()
    assert not rig.has(SendFailed, A)


def flood(rig: Rig, rooms: int) -> None:
    for room in range(rooms):
        tell_p(rig, handshake(rig, (room + 10, 0), number=room + 1000))
        rig.to_d.clear()


def test_orphan_rooms_of_one_peer_are_bounded_and_counted() -> None:
    """CASES 49, short form."""
    rig = Rig(limits=Limits(rooms_per_peer=64, outcomes=128))
    rig.open(B)
    rig.flow()
    flood(rig, 2000)
    assert len(rig.p.early) == 64
    assert rig.p.counters["early_handshakes_pushed_out"] == 2000 - 64
    assert rig.p.rooms == {}
    rig.pass_time(1.0)
    rig.flow()
    rig.now += 31.0
    rig.p.tick(rig.now, WALL + rig.now)
    assert len(rig.p.early) == 0
    assert rig.p.counters["early_handshakes_expired"] == 64


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_million_orphan_rooms_leave_memory_flat() -> None:
    """CASES 49."""
    rig = Rig(limits=Limits(rooms_per_peer=512, outcomes=512))
    rig.open(B)
    rig.flow()
    flood(rig, 5_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    flood(rig, 1_000_000)
    assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    tracemalloc.stop()


def test_the_oldest_orphan_is_pushed_out_and_told_so() -> None:
    rig = Rig(limits=Limits(rooms_per_peer=1))
    rig.open(B)
    rig.flow()
    rig.to_d.clear()
    tell_p(rig, handshake(rig, (10, 0), number=1000))
    tell_p(rig, handshake(rig, (11, 0), number=1001))
    declined = [answer for answer in answers(rig) if isinstance(answer, Failed)]
    assert [failed.room for failed in declined] == [10]
    assert declined[0].problem.code == "overloaded"
    rig.expect((10, 0))
    assert rig.has(SendEnded, (10, 0))  # nobody will ever shake hands for it


def test_sessions_are_bounded() -> None:
    rig = Rig(limits=Limits(peers=3))
    for number in range(5):
        rig.p.receive(attach(session=f"d{number}"), rig.now, WALL)
    assert len(rig.p.health()) == 3
    assert rig.p.counters["refused_attach"] == 2


def pass_time_alone(rig: Rig, seconds: float) -> None:
    """The prefill rank hears nothing meanwhile."""
    for _ in range(round(seconds / 0.5)):
        rig.now += 0.5
        rig.p.tick(rig.now, WALL + rig.now)
        rig.settle()


def far_rig() -> Rig:
    """The prefill rank is on another host than the decode rank."""
    rig = Rig()
    rig.ps[0].host = "elsewhere"
    rig.ps[0].begin()
    return rig


def test_decode_workers_that_died_elsewhere_give_their_places_back() -> None:
    """Nobody tells of their death; only silence does."""
    rig = Rig(limits=Limits(peers=3))
    for number in range(10):
        far = attach(session=f"d{number}")
        rig.p.receive(replace(far, process=process(7, "elsewhere")), rig.now, WALL)
        rig.p.sessions.attached(far.session)
        assert rig.p.counters["refused_attach"] == 0
        pass_time_alone(rig, PATIENCE.grace / 2)
    pass_time_alone(rig, PATIENCE.grace + 5)
    assert rig.p.health() == {}


def test_who_is_forgotten_is_detached_and_hung_up_on() -> None:
    rig = far_rig()
    rig.p.receive(attach(), rig.now, WALL)
    rig.p.sessions.attached("d0")
    rig.settle()
    for _ in range(4):
        rig.now += PATIENCE.grace
        rig.p.tick(rig.now, WALL + rig.now)
    assert [e for e in rig.p.outbox if not isinstance(e, out.Tell)] == [
        out.DetachPeer("d0"),
        out.HangUp(attach().endpoint),
    ]


def test_a_dead_session_on_our_own_host_is_the_kernels_to_tell() -> None:
    rig = ready()
    pass_time_alone(rig, PATIENCE.grace + 5)
    assert rig.p.health() == {"d0": "dead"}


def test_a_forgotten_session_leaves_its_sources_pinned_and_may_come_back() -> None:
    rig = ready(rig=far_rig())
    rig.send_all(A)
    pass_time_alone(rig, PATIENCE.grace + 5)
    assert rig.p.health() == {}
    assert not rig.has(SendEnded, A)  # forgetting a peer does not end a write
    (write,) = rig.flights
    rig.end(write, "the peer is gone")
    assert rig.has(SendEnded, A)
    for _ in range(8):
        rig.pass_time(0.5)
        rig.flow()
    assert rig.p.health() == {"d0": "alive"}
    ready(B, rig)
    rig.send_all(B)
    rig.land_all()
    rig.flow()
    assert rig.has(Received, B)
    assert rig.has(Quiet, A)


# Meetings, and meetings anew.


def effects(rig: Rig) -> list[out.Outward]:
    """What the prefill rank does that is no word."""
    found: list[out.Outward] = [e for e in rig.p.outbox if not isinstance(e, out.Tell)]
    rig.p.outbox.clear()
    return found


def test_a_decode_worker_that_attaches_with_a_new_number_is_tried_anew() -> None:
    rig = ready()
    attached = rig.ds[0].attach
    rig.p.receive(replace(attached, number=1), rig.now, WALL)
    assert effects(rig) == []  # said again: answered again
    rig.p.receive(replace(attached, number=2), rig.now, WALL)
    detach, again, *_ = effects(rig)
    assert detach == out.DetachPeer("d0")
    assert isinstance(again, out.AttachPeer)
    assert again.number == 2
    assert "begins anew" in problem_of_events(rig)
    rig.p.receive(replace(attached, number=1), rig.now, WALL)  # late
    assert effects(rig) == []
    rig.p.sessions.attached("d0", "shm", 1.0)
    (said,) = [e.message for e in rig.p.outbox if isinstance(e, out.Tell)]
    assert isinstance(said, Attached)
    assert said.number == 2


def problem_of_events(rig: Rig) -> str:
    (failed,) = [event for event in rig.p.events if isinstance(event, SendFailed)]
    return failed.problem.message


@pytest.mark.parametrize("first", ["works", "fails"])
def test_a_new_number_during_a_trial_is_tried_when_that_has_ended(first: str) -> None:
    rig = Rig()
    rig.p.receive(replace(attach(), number=1), rig.now, WALL)
    rig.p.receive(replace(attach(), number=2), rig.now, WALL)
    assert [e.number for e in effects(rig) if isinstance(e, out.AttachPeer)] == [1]
    if first == "works":
        rig.p.sessions.attached("d0", "shm", 1.0)
    else:
        rig.p.sessions.not_attached("d0", PROBLEM)
    assert not any(isinstance(e, out.Tell) for e in rig.p.outbox)
    assert [e.number for e in effects(rig) if isinstance(e, out.AttachPeer)] == [2]


def test_what_is_said_of_an_earlier_meeting_does_not_count() -> None:
    rig = Rig()
    rig.open(A)
    rig.answer_route()
    rig.hear_p()
    rig.p.sessions.not_attached("d0", PROBLEM)
    rig.settle()
    refused = rig.to_d[0]
    rig.hear_d()
    assert rig.has(ReceiveFailed, A)
    rig.open(B)
    rig.answer_route()
    rig.d.receive(decode(FROM_PREFILL, refused), rig.now)  # once more, late
    rig.settle()
    assert not rig.has(ReceiveFailed, B)
    rig.ps[0].attaching.clear()
    rig.flow()
    assert rig.has(ReceiverReady, B)


def test_who_is_refused_is_hung_up_on() -> None:
    """Else each one that can never fit would keep a socket."""
    rig = Rig()
    misfit = attach(replace(LAYOUT, layers=7))
    rig.p.receive(misfit, rig.now, WALL)
    told, hung_up = rig.p.outbox
    assert isinstance(told, out.Tell)
    assert hung_up == out.HangUp(misfit.endpoint)


def test_messages_for_nobody_are_counted_and_dropped() -> None:
    rig = ready()
    rank = Rank()
    for message in (
        Quiesced(session="other", room=1, attempt=0, rank=rank),
        Quiesced(session="d0", room=5, attempt=0, rank=rank),
        Quiesced(session="d0", room=1, attempt=7, rank=rank),
        Quiesced(session="d0", room=1, attempt=0, rank=Rank(tp=3)),
        Progress(session="d0", room=1, attempt=1, rank=rank, complete=True),
    ):
        rig.d.receive(message, rig.now)
    assert rig.d.counters["dropped_other_session"] == 1
    assert rig.d.counters["dropped_unknown_attempt"] == 4
    assert rig.d.rooms[A].state is State.TRANSFERRING


def test_a_session_cannot_be_taken_over() -> None:
    rig = ready()
    thief = replace(attach(), endpoint="tcp://127.0.0.1:7777")
    rig.p.receive(thief, rig.now, WALL)
    assert rig.p.counters["dropped_attach_conflict"] == 1
    assert rig.p.sessions.get("d0") is not None


# Who fits whom.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layout": replace(LAYOUT, block_size=8)}, "block_size: 4 here, 8 there"),
        ({"protocol": 99}, "protocol 99 there, 3 here"),
        ({"region": replace(attach().region, size=100)}, "larger than its memory"),
    ],
)
def test_what_can_never_work_is_refused_at_the_attach(change: dict[str, object], text: str) -> None:
    """CASES 5."""
    rig = Rig()
    rig.p.receive(replace(attach(), **change), rig.now, WALL)  # type: ignore[arg-type]
    (refused,) = [effect.message for effect in rig.p.outbox if isinstance(effect, out.Tell)]
    assert text in str(refused)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (route(fingerprint=replace(LAYOUT, dtype="float32")), "dtype: uint8 here, float32 there"),
        (replace(route(), attn_cp_size=2), "[transfer] writers = 1 on the decode side"),
        (replace(route(), ranks={}), "does not name prefill ranks"),
        (replace(route(), dp_size=2), "dp rank -1 of 2"),
    ],
)
def test_a_route_that_does_not_fit_fails_the_attempt_with_both_values(
    other: Route, text: str
) -> None:
    rig = Rig()
    rig.open(A)
    rig.d.rooms[A].dp_rank = -1
    rig.d.resolved(A, other, rig.now)
    rig.settle()
    assert text in problem_of(rig, ReceiveFailed).message
    assert problem_of(rig, ReceiveFailed).code == "bad_config"
    assert [text in told.reason for told in rig.reported] == [True]  # an operator reads it too


def test_a_route_that_is_not_found_fails_the_attempt_and_may_be_tried_again() -> None:
    rig = Rig()
    rig.open(A)
    rig.d.unresolved(A, Problem(code="unavailable", message="no answer"), rig.now)
    rig.settle()
    (failed,) = [event for event in rig.heard if isinstance(event, ReceiveFailed)]
    assert failed.problem.is_retryable


def test_a_refused_attach_fails_all_that_wait_for_it() -> None:
    rig = Rig()
    rig.open(A)
    rig.open(B)
    rig.answer_route()
    rig.answer_route()
    rig.hear_p()
    rig.p.sessions.not_attached("d0", Problem(code="transfer_failed", message="no such memory"))
    rig.settle()
    rig.ps[0].attaching.clear()
    rig.flow()
    assert [kinds(rig, key) for key in (A, B)] == [["ReceiveFailed"], ["ReceiveFailed"]]


def test_the_scheduler_is_held_to_its_side() -> None:
    rig = Rig()
    rig.expect(A)
    with pytest.raises(Illegal):
        rig.p.expect(Sender(*A, 8, b"h", 60.0))
    rig.open(A)
    with pytest.raises(Illegal):
        rig.admit(A)


def test_a_peer_that_is_dead_and_not_needed_is_forgotten() -> None:
    rig = ready()
    rig.abort_receive(A)
    rig.flow()
    for _ in range(200):
        rig.now += 0.5
        rig.d.tick(rig.now, WALL + rig.now)
    assert rig.d.health() == {}


def test_ready_is_told_to_all_that_waited_for_the_attach() -> None:
    rig = Rig()
    for room in range(5):
        rig.open((room, 0))
    rig.flow()
    assert all(rig.has(ReceiverReady, (room, 0)) for room in range(5))
    assert next(iter(rig.d.health().values())) == Health.ALIVE


# The orderly end.

STOPPING = Problem(code="peer_lost", message="the worker is stopping")


def test_a_prefill_rank_that_leaves_frees_all_memory_it_could_have_written() -> None:
    """Also that of a handshake which it never read: after its farewell it writes nothing."""
    rig = ready()
    rig.send_all(A)
    ready(B, rig)
    rig.open(C)
    rig.flow()
    rig.admit(C)
    rig.expect((4, 0))
    rig.p.leave(STOPPING, rig.now)
    rig.settle()
    assert rig.has(SendEnded, B)
    assert not rig.has(SendEnded, A)
    (write,) = rig.flights
    rig.end(write, "aborted")
    assert all(rig.has(SendEnded, key) for key in (A, B, (4, 0)))
    rig.to_p.clear()
    rig.p.farewell()
    rig.settle()
    rig.flow()
    assert all(rig.has(Quiet, key) for key in (A, B, C))
    assert rig.d.health() == {}
    assert not rig.d.quarantined


def test_nothing_is_begun_by_a_rank_that_leaves() -> None:
    rig = ready()
    tell_p(rig, handshake(rig, (10, 0), number=999))  # nobody expects it yet
    rig.p.leave(STOPPING, rig.now)
    rig.settle()
    answers(rig)
    tell_p(rig, handshake(rig, (11, 0), number=1000))
    assert [type(answer) for answer in answers(rig)] == [Failed, Quiesced]
    rig.expect((12, 0))
    assert rig.has(SendEnded, (12, 0))
    assert not rig.p.rooms
    assert not len(rig.p.early)


def test_a_decode_rank_that_leaves_stops_its_writers_and_waits_for_their_word() -> None:
    rig = ready()
    rig.send_all(A)
    rig.open(B)
    rig.d.leave(STOPPING, rig.now)
    rig.settle()
    assert list(rig.d.rooms) == [A]
    rig.flow()
    (write,) = rig.flights
    rig.end(write, "aborted")
    rig.flow()
    assert rig.has(Quiet, A)
    assert not rig.d.rooms
