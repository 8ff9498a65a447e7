"""Stories of transfers between several ranks: who waits for whom, and when memory is free."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pdrt.data.commands import SendBlocks
from pdrt.data.events import (
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
)
from pdrt.data.group import Group
from pdrt.data.handshake import signed
from pdrt.data.transfer import Key, Sender
from pdrt.messages import (
    FROM_DECODE,
    FROM_PREFILL,
    AbortTransfer,
    Attach,
    Handshake,
    KvLayout,
    Problem,
    Progress,
    Rank,
    Refused,
    decode,
    pack_ids,
)
from tests.data.ranks import KEY, LAYOUT, DecodeRank, PrefillRank, Shape, attach, process
from tests.data.rig import WALL, Rig, record

A: Key = (2, 0)  # of two replicas the first one writes it
B: Key = (3, 0)

TWO_TO_ONE = Shape(2, 1, heads=2, writers=4)
ONE_TO_TWO = Shape(1, 2, heads=2, writers=4)
REPLICAS = Shape(2, 1, heads=1, writers=4)


def ready(rig: Rig, key: Key = A, tokens: int = 8) -> Rig:
    """Both sides know of each other; the prefill side may compute."""
    rig.expect(key, tokens)
    rig.open(key)
    rig.flow()
    rig.admit(key, tokens)
    rig.flow()
    return rig


def problem_of(rig: Rig, kind: type[ReceiveFailed] | type[SendFailed]) -> Problem:
    return next(event for event in rig.heard if isinstance(event, kind)).problem


def flights(rig: Rig, p: PrefillRank) -> list[tuple[int, int]]:
    return [write for write, flight in rig.flights.items() if flight.source is p]


def shakes(p: PrefillRank) -> list[Handshake]:
    found = [decode(FROM_DECODE, frame) for frame in p.inbox]
    return [message for message in found if isinstance(message, Handshake)]


# Several ranks write to one.


def test_a_request_is_received_when_every_writer_has_filled_its_own_slot() -> None:
    """CASES 17, 51: two writers never get the same slot, and each one's completion counts."""
    rig = ready(Rig(shape=TWO_TO_ONE))
    rig.send_all(A)
    first, second = (flights(rig, p) for p in rig.ps)
    slots = {f.write.slot.at for f in rig.flights.values() if f.write.slot}
    assert len(slots) == 2
    for write in first:
        rig.land(write)
        rig.end(write)
    rig.flow()
    rig.scan()
    assert not rig.has(Received, A)
    for write in second:
        rig.land(write)
        rig.end(write)
    rig.flow()
    assert rig.told["Received", A] == 1
    rig.finish(A)
    rig.check_baseline()


def test_a_bell_that_one_rank_rings_twice_is_not_taken_for_the_others() -> None:
    """CASES 17."""
    rig = ready(Rig(shape=TWO_TO_ONE))
    rig.send_all(A)
    for write in flights(rig, rig.ps[0]):
        rig.land(write)
        rig.end(write)
    bell = rig.to_d[-1]
    said = decode(FROM_PREFILL, bell)
    assert isinstance(said, Progress)
    assert said.complete
    rig.to_d.extend([bell] * 3)
    rig.flow()
    assert not rig.has(Received, A)
    assert not rig.has(ReceiveFailed, A)


@pytest.mark.parametrize(
    ("change", "text"),
    [({"token": 43}, "token 42 and 43"), ({"spec_tokens": (1,)}, "spec_tokens () and (1,)")],
)
def test_slots_that_vouch_for_different_things_fail_the_transfer(
    change: dict[str, int], text: str
) -> None:
    rig = ready(Rig(shape=TWO_TO_ONE))
    rig.send_at(rig.ps[0], A, [0, 1], 0, record(A))
    rig.send_at(rig.ps[1], A, [0, 1], 0, replace(record(A), **change))  # type: ignore[arg-type]
    rig.land_all()
    rig.flow()
    assert (
        f"prefill ranks 0,0,0 and 0,0,1 disagree: {text}" in problem_of(rig, ReceiveFailed).message
    )
    assert not rig.has(Received, A)
    assert rig.has(Quiet, A)


def test_one_failing_rank_never_frees_what_a_sibling_still_writes() -> None:
    """CASES 50: whichever of the two is late."""
    rig = ready(Rig(shape=TWO_TO_ONE))
    rig.send_all(A)
    ((failing,), (late,)) = (flights(rig, p) for p in rig.ps)
    rig.end(failing, "link down")
    rig.flow()
    rig.pass_time(1000.0)
    rig.flow()
    assert rig.has(ReceiveFailed, A)
    assert not rig.has(Quiet, A)
    rig.land(late)  # it still lands where it belongs: the rig looks
    rig.end(late)
    rig.flow()
    rig.pass_time(2.0)
    rig.flow()
    assert rig.has(Quiet, A)
    rig.check_baseline()


def test_one_rank_that_is_killed_never_frees_what_a_sibling_still_writes() -> None:
    rig = ready(Rig(shape=TWO_TO_ONE))
    rig.send_all(A)
    rig.kill_p(rig.ps[1])
    rig.hear_of_death(rig.ps[1])
    assert rig.has(ReceiveFailed, A)
    assert not rig.has(Quiet, A)
    rig.flow()
    rig.land_all()
    rig.flow()
    assert rig.has(Quiet, A)
    rig.check_baseline()


def test_an_error_names_every_rank_with_its_peer_its_transport_and_its_bytes() -> None:
    """CASES 19."""
    rig = ready(Rig(shape=TWO_TO_ONE, ways=("shm", "tcp")), tokens=12)
    for p in rig.ps:
        rig.send_at(p, A, [0, 1], 0, None)
    for write in flights(rig, rig.ps[1]):
        rig.land(write)
        rig.end(write)
    rig.flow()
    rig.kill_p(rig.ps[0])
    rig.hear_of_death(rig.ps[0])
    said = problem_of(rig, ReceiveFailed).message
    for part in (
        "room 2 attempt 0",
        "has died",
        "32 of 96 bytes known written, last transferring",
        "0,0,0 at tcp://127.0.0.1:6000#100.1000 over shm (0 bytes, peer gone)",
        "0,0,1 at tcp://127.0.0.1:6050#150.1500 over tcp (32 bytes, peer alive)",
    ):
        assert part in said


# One rank writes to several.


def test_a_prefill_rank_waits_for_all_decode_ranks_and_each_gets_what_it_lacks() -> None:
    """CASES 45: the blocks that one of them holds already are sent to the other only."""
    rig = Rig(shape=ONE_TO_TWO)
    rig.expect(A, tokens=12)
    rig.open(A)
    rig.flow()
    rig.admit_at(rig.ds[0], A, 12, first_block=2)
    rig.flow()
    assert not rig.has(SenderReady, A)
    rig.admit_at(rig.ds[1], A, 12, first_block=1)
    rig.flow()
    (sender_ready,) = [event for event in rig.heard if isinstance(event, SenderReady)]
    assert sender_ready.first_block == 1
    rig.send(A, [4, 5], 0, None)
    (flight,) = rig.flights.values()
    assert flight.target is rig.ds[1]
    rig.send(A, [6], 2, record(A, 12))
    rig.land_all()
    rig.land_all()
    rig.flow()
    assert rig.told["Received", A] == 2
    assert rig.told["SendEnded", A] == 1


def test_a_slow_decode_rank_does_not_delay_its_siblings_slot() -> None:
    rig = ready(Rig(shape=ONE_TO_TWO))
    rig.send(A, [0], 0, None)
    slow, fast = rig.flights
    rig.land(fast)
    rig.end(fast)
    rig.send(A, [1], 1, record(A))
    (last,) = [write for write, flight in rig.flights.items() if flight.write.slot]
    rig.land(last)
    rig.end(last)
    rig.flow()
    assert rig.ds[1].told["Received", A] == 1
    assert not rig.has(SendEnded, A)
    rig.land(slow)
    rig.end(slow)
    rig.land_all()
    rig.flow()
    assert rig.ds[0].told["Received", A] == 1
    assert rig.has(SendEnded, A)


def test_each_decode_rank_is_told_of_its_own_bytes() -> None:
    rig = ready(Rig(shape=ONE_TO_TWO))
    rig.send(A, [0], 0, None)
    rig.land_all()
    rig.flow()
    (leg,) = rig.ds[0].desk.rooms[A].legs.values()
    assert leg.done_bytes == rig.ds[0].attach.layout.block_bytes


def test_when_one_decode_rank_leaves_its_sibling_is_told_while_writes_still_go_on() -> None:
    rig = ready(Rig(shape=ONE_TO_TWO))
    rig.send_all(A)
    rig.abort_receive_at(rig.ds[0], A)
    rig.flow()
    assert rig.ds[1].told["ReceiveFailed", A] == 1
    rig.land_all()
    rig.flow()
    assert rig.told["Quiet", A] == 2
    assert rig.told["SendEnded", A] == 1
    rig.check_baseline()


def test_an_abort_before_the_siblings_handshake_ends_the_attempt() -> None:
    """CASES 37."""
    rig = Rig(shape=ONE_TO_TWO)
    rig.expect(A)
    rig.open(A)
    rig.flow()
    rig.admit_at(rig.ds[0], A, 8)
    rig.flow()
    rig.admit_at(rig.ds[1], A, 8)
    rig.abort_receive_at(rig.ds[1], A)
    rig.hear_p(at=1)  # it overtook the handshake
    rig.flow()
    assert rig.has(SendEnded, A)
    assert rig.told["Quiet", A] == 2
    rig.check_baseline()


def shake(d: DecodeRank, **changes: object) -> Handshake:
    fields: dict[str, object] = {
        "room": A[0],
        "attempt": A[1],
        "session": d.attach.session,
        "blocks": pack_ids([1, 2]),
        "first_block": 0,
        "slot": 1,
        "prompt_tokens": 8,
        "prompt_hash": b"h",
        "decode_ranks": 2,
        "expires": WALL + 60,
        "token": b"",
        "number": 1000,
    }
    plain = Handshake(**{**fields, **changes})  # type: ignore[arg-type]
    return signed(KEY, plain, d.attach.endpoint)


def hears(rig: Rig, message: Handshake | Attach | AbortTransfer) -> None:
    rig.ps[0].desk.receive(message, rig.now, WALL + rig.now)
    rig.settle()


def attached(shape: Shape) -> Rig:
    rig = Rig(shape=shape)
    rig.open(B)
    rig.flow()
    rig.expect(A)
    return rig


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_wrong_number_of_decode_ranks_is_refused(ranks: int) -> None:
    rig = attached(ONE_TO_TWO)
    hears(rig, shake(rig.ds[0], decode_ranks=ranks))
    said = problem_of(rig, SendFailed).message
    assert f"{ranks} decode ranks are announced" in said
    assert "tp = 2 there and 1 here 2 shake hands" in said


def test_a_handshake_of_another_instances_rank_is_refused() -> None:
    rig = attached(ONE_TO_TWO)
    hears(rig, shake(rig.ds[0]))
    other = replace(rig.ds[1].attach, session="d7", process=process(900), rank=Rank(dp=1, tp=1))
    hears(rig, other)
    rig.ps[0].desk.sessions.attached("d7")
    hears(rig, signed(KEY, replace(shake(rig.ds[1]), session="d7"), other.endpoint))
    assert "of another instance than its siblings" in problem_of(rig, SendFailed).message


def test_one_decode_rank_cannot_shake_hands_for_two() -> None:
    rig = attached(ONE_TO_TWO)
    hears(rig, shake(rig.ds[0]))
    other = replace(rig.ds[0].attach, session="d7", process=process(900))
    hears(rig, other)
    rig.ps[0].desk.sessions.attached("d7")
    hears(rig, signed(KEY, replace(shake(rig.ds[0]), session="d7"), other.endpoint))
    assert "decode rank 0,0,0 shook hands twice" in problem_of(rig, SendFailed).message


def test_whether_a_rank_writes_is_part_of_the_signature() -> None:
    rig = attached(REPLICAS)
    hears(rig, replace(shake(rig.ds[0], decode_ranks=1), writes=False))
    assert rig.p.counters["dropped_forged_handshake"] == 1


def test_who_need_not_write_is_held_to_the_prompt_all_the_same() -> None:
    rig = attached(REPLICAS)
    hears(rig, shake(rig.ds[0], decode_ranks=1, writes=False, blocks=b"", first_block=3))
    assert problem_of(rig, SendFailed).code == "bad_message"


# Replicas: one writes, the others need not.


def test_a_rank_that_need_not_write_ends_well_without_a_write() -> None:
    rig = ready(Rig(shape=REPLICAS))
    assert rig.told["SenderReady", A] == 2
    rig.send_all(A)
    assert flights(rig, rig.ps[1]) == []
    assert rig.ps[1].told["SendEnded", A] == 1
    rig.land_all()
    rig.flow()
    assert rig.told["Received", A] == 1
    ended = [event for event in rig.heard if isinstance(event, SendEnded)]
    assert [event.problem for event in ended] == [None, None]
    rig.finish(A)
    rig.check_baseline()


def test_the_next_room_is_written_by_the_other_replica() -> None:
    rig = ready(Rig(shape=REPLICAS), B)
    rig.send_all(B)
    assert flights(rig, rig.ps[0]) == []
    rig.land_all()
    rig.flow()
    assert rig.has(Received, B)


def test_memory_is_not_kept_for_a_rank_that_need_not_write() -> None:
    rig = ready(Rig(shape=REPLICAS))
    rig.ps[1].inbox.clear()
    rig.abort_receive(A)
    rig.ps[1].inbox.clear()  # it hears nothing of all this
    while rig.ps[0].inbox:
        rig.hear_p()
    while rig.to_d:
        rig.hear_d()
    assert rig.has(Quiet, A)


def test_a_rank_that_need_not_write_is_told_to_stop_as_well() -> None:
    rig = ready(Rig(shape=REPLICAS))
    rig.abort_receive(A)
    rig.flow()
    assert rig.ps[1].told["SendFailed", A] == 1
    rig.check_baseline()


def test_a_lost_handshake_is_said_again_to_the_rank_that_did_not_hear_it() -> None:
    rig = Rig(shape=REPLICAS)
    rig.expect(A)
    rig.open(A)
    rig.flow()
    rig.admit(A)
    rig.ps[1].inbox.clear()
    rig.flow()
    assert rig.told["SenderReady", A] == 1
    rig.pass_time(1.0)
    assert [len(shakes(p)) for p in rig.ps] == [0, 1]
    rig.flow()
    assert rig.told["SenderReady", A] == 2


def test_the_death_of_a_rank_that_need_not_write_fails_the_attempt_too() -> None:
    """Its heads of the computation are gone: nobody else will finish the prompt."""
    rig = ready(Rig(shape=REPLICAS))
    rig.kill_p(rig.ps[1])
    rig.hear_of_death(rig.ps[1])
    assert rig.has(ReceiveFailed, A)
    rig.flow()
    assert rig.has(Quiet, A)


# Revocation.


def test_a_revoked_attempt_is_quiet_at_once_and_its_late_frames_land_nowhere() -> None:
    """CASES 50: tcp. The writers are told to stop all the same."""
    rig = ready(Rig(blocks=2, shape=TWO_TO_ONE, ways=("tcp",)))
    rig.send_all(A)
    late = list(rig.flights)
    rig.abort_receive(A)
    assert rig.has(Quiet, A)
    assert all(isinstance(decode(FROM_DECODE, p.inbox[-1]), AbortTransfer) for p in rig.ps)
    ready(rig, B)
    rig.send_all(B)
    for write in late:
        if write in rig.flights:
            rig.land(write)
            rig.end(write)
    rig.land_all()
    rig.flow()
    assert rig.told["Received", B] == 1
    assert rig.d.counters["dropped_unknown_attempt"] == 0
    rig.finish(B)
    rig.check_baseline()


def test_only_the_ranks_that_are_cut_off_are_not_waited_for() -> None:
    rig = ready(Rig(shape=TWO_TO_ONE, ways=("shm", "tcp")))
    rig.send_all(A)
    ((open_,), _) = (flights(rig, p) for p in rig.ps)
    rig.abort_receive(A)
    assert rig.d.writers.holders(A) == {"0,0,0"}
    assert not rig.has(Quiet, A)
    rig.land(open_)
    rig.end(open_)
    rig.flow()
    assert rig.has(Quiet, A)


def test_a_transport_that_cannot_yet_promise_it_is_asked_again() -> None:
    rig = ready(Rig())
    rig.abort_receive(A)
    rig.to_p.clear()
    rig.ps[0].way = "tcp"  # from now on it can
    assert not rig.has(Quiet, A)
    rig.d.rooms[A].legs["0,0,0"].transport = "tcp"
    rig.pass_time(0.1)
    assert rig.has(Quiet, A)


def test_what_is_received_is_closed_to_late_frames() -> None:
    rig = ready(Rig(shape=TWO_TO_ONE, ways=("tcp",)))
    rig.send_all(A)
    rig.land_all()
    rig.scan()
    assert rig.has(Received, A)
    assert not rig.ds[0].admitted


def test_the_areas_of_blocks_and_slots_are_admitted_before_anybody_is_told() -> None:
    rig = Rig(shape=TWO_TO_ONE)
    rig.expect(A)
    rig.open(A)
    rig.flow()
    rig.admit(A)
    blocks, row = rig.ds[0].books.kept[A]
    region, size = rig.ds[0].attach.region, rig.ds[0].attach.layout.block_bytes
    assert rig.ds[0].admitted[A] == [
        (row * 4 * 64, 2 * 64),
        (region.pool_at + min(blocks) * size, 2 * size),
    ]


def test_the_checksums_of_the_blocks_are_admitted_where_they_are_wanted() -> None:
    rig = Rig(shape=TWO_TO_ONE, checksums=True)
    rig.expect(A)
    rig.open(A)
    rig.flow()
    rig.admit(A)
    blocks, _ = rig.ds[0].books.kept[A]
    sums_at = rig.ds[0].attach.region.sums_at
    assert (sums_at + min(blocks) * 8, 16) in rig.ds[0].admitted[A]


# Proofs of death from another host.


def stuck_far_away(rig: Rig | None = None) -> Rig:
    """A prefill rank of another host does not answer any more; its memory is in quarantine."""
    rig = rig or Rig()
    rig.ps[0].host = "far"
    rig.ps[0].begin()
    ready(rig)
    rig.send_all(A)
    rig.ps[0].is_alive = False
    rig.abort_receive(A)
    for _ in range(30):
        rig.pass_time(0.1)
    rig.ds[0].wishes.clear()
    assert rig.d.health() == {"tcp://127.0.0.1:6000#100.1000": "dead"}
    assert not rig.has(Quiet, A)
    return rig


def look_for_an_heir(rig: Rig) -> None:
    """Time passes, and the bootstrap server is asked who has the place now."""
    rig.pass_time(1.0)
    assert rig.ds[0].wishes
    while rig.ds[0].wishes:
        rig.answer_route()


def test_another_process_in_a_newer_epoch_at_the_same_place_proves_the_old_one_dead() -> None:
    rig = stuck_far_away()
    look_for_an_heir(rig)
    assert not rig.has(Quiet, A)
    rig.flights.clear()
    rig.ps[0].life = 1
    look_for_an_heir(rig)
    assert rig.has(Quiet, A)
    assert rig.d.health() == {}
    assert not rig.d.rooms


@pytest.mark.parametrize(
    "change",
    [
        {"process": process(100, "far")},  # the same process registers anew: it may still write
        {"instance_epoch": 0},  # an answer of before
        {"rank_ip": "127.0.0.9"},  # another machine: the old one may only be cut off
    ],
)
def test_less_than_that_proves_nothing(change: dict[str, object]) -> None:
    rig = stuck_far_away()
    rig.ps[0].life = 1
    heir = replace(rig.ps[0].address, **change)  # type: ignore[arg-type]
    route = replace(rig.d_route(), ranks={"0,0,0": heir})
    rig.d.resolved(A, route, rig.now)
    rig.settle()
    assert not rig.has(Quiet, A)


def test_on_one_host_only_the_kernel_proves_a_death() -> None:
    rig = ready(Rig())
    rig.send_all(A)
    rig.ps[0].is_alive = False
    rig.abort_receive(A)
    for _ in range(40):
        rig.pass_time(0.1)
    assert list(rig.d.health().values()) == ["dead"]
    assert not rig.ds[0].wishes
    rig.ps[0].life = 1
    rig.d.resolved(A, rig.d_route(), rig.now)
    rig.settle()
    assert not rig.has(Quiet, A)


def test_who_still_answers_is_not_dead_whoever_has_its_place() -> None:
    """It drains while its successor is up already."""
    rig = Rig()
    rig.ps[0].host = "far"
    rig.ps[0].begin()
    ready(rig)
    rig.send_all(A)
    rig.abort_receive(A)
    rig.flow()
    successor = replace(rig.ps[0].address, process=process(101, "far"), instance_epoch=1)
    rig.d.resolved(A, replace(rig.d_route(), ranks={"0,0,0": successor}), rig.now)
    rig.settle()
    assert not rig.has(Quiet, A)
    rig.land_all()
    rig.flow()
    assert rig.has(Quiet, A)


def test_a_new_request_finds_the_heir_too() -> None:
    rig = stuck_far_away()
    rig.flights.clear()
    rig.ps[0].life = 1
    rig.ps[0].begin()
    ready(rig, B)
    assert rig.has(Quiet, A)
    assert rig.has(ReceiverReady, B)


# The fence.


def test_a_stuck_peer_is_fenced_its_blocks_stay_retired_and_that_is_seen() -> None:
    rig = ready(Rig())
    rig.send_all(A)
    rig.abort_receive(A)
    for _ in range(70):  # it lives and answers, but its write does not end
        rig.pass_time(0.5)
        rig.flow()
    assert list(rig.d.health().values()) == ["fenced"]
    assert rig.d.counters["peers_fenced"] == 1
    assert (rig.d.quarantined, rig.d.overdue_quarantine(rig.now)) == (1, 1)
    assert len(rig.ds[0].books.free) == 30
    rig.open(B)
    rig.flow()
    assert problem_of(rig, ReceiveFailed).is_retryable
    assert not rig.has(ReceiverReady, B)


def test_what_a_fenced_peer_was_given_before_fails_and_may_be_tried_elsewhere() -> None:
    rig = ready(Rig())
    rig.send_all(A)
    rig.abort_receive(A)
    ready(rig, B)
    for _ in range(70):
        rig.pass_time(0.5)
        rig.flow()
    failed = problem_of(rig, ReceiveFailed)
    assert "fenced: for 30 s it did not say that its writes ended" in failed.message
    assert failed.is_retryable


def test_a_fenced_peer_that_lets_go_serves_again() -> None:
    rig = ready(Rig())
    rig.send_all(A)
    rig.abort_receive(A)
    for _ in range(70):
        rig.pass_time(0.5)
        rig.flow()
    rig.land_all()
    rig.flow()
    rig.pass_time(1.0)
    rig.flow()
    assert rig.has(Quiet, A)
    assert list(rig.d.health().values()) == ["alive"]
    ready(rig, B)
    rig.send_all(B)
    rig.land_all()
    rig.flow()
    assert rig.has(Received, B)


# Who fits whom.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"layout": replace(LAYOUT, kv_heads=3, total_kv_heads=3), "tp": 3},
            "kv_heads: 2 here, 3 there",
        ),
        ({"tp": 3, "rank": Rank(tp=1)}, "kv heads = 2 and tp = 3"),
        ({"tp": 2, "rank": Rank(tp=1)}, "describes 2 kv heads, but 1 of the model's 2"),
        ({"rank": Rank(cp=1)}, "a decode instance has cp = 1"),
        (
            {
                "tp": 2,
                "rank": Rank(tp=1),
                "layout": KvLayout(
                    block_size=4, dtype="uint8", layers=1, kv_heads=1, head_dim=2, total_kv_heads=2
                ),
            },
            "decode tp rank 1 of 2 is written by prefill tp ranks [1] of 2, not by 0",
        ),
    ],
)
def test_ranks_that_can_never_fit_are_refused_at_the_attach(
    change: dict[str, object], text: str
) -> None:
    """CASES 5, 63: never at the first write, and with both values."""
    rig = Rig(shape=TWO_TO_ONE)
    plain = attach(rig.ds[0].attach.layout, "d5", shape=TWO_TO_ONE)
    rig.p.receive(replace(plain, **change), rig.now, WALL)  # type: ignore[arg-type]
    said = [getattr(effect, "message", None) for effect in rig.p.outbox]
    (refused,) = [message for message in said if isinstance(message, Refused)]
    assert refused.problem.code == "bad_config"
    assert text in refused.problem.message


# What decode holds already.


@pytest.mark.parametrize("shape", [Shape(), TWO_TO_ONE, ONE_TO_TWO])
def test_every_prefix_hit_and_every_chunk_boundary_bring_the_whole_prompt(shape: Shape) -> None:
    """CASES 58, 59: the rig sees that each missing block lands, and nothing else."""
    blocks, tokens = 4, 14
    for hit in range(blocks + 1):
        for cuts in range(1 << (blocks - 1)):
            ends = [n + 1 for n in range(blocks - 1) if cuts >> n & 1]
            rig = Rig(shape=shape)
            rig.expect(A, tokens)
            rig.open(A)
            rig.flow()
            for d in rig.ds:
                rig.admit_at(d, A, tokens, min(hit + d.tp, blocks))
            rig.flow()
            for begin, end in pairwise([0, *ends, blocks]):
                last = record(A, tokens) if end == blocks else None
                rig.send(A, list(range(begin, end)), begin, last)
            rig.land_all()
            rig.land_all()
            rig.flow()
            assert rig.told["Received", A] == len(rig.ds)
            rig.finish(A)
            rig.check_baseline()


def test_many_warm_requests_leave_the_pool_flat() -> None:
    """CASES 45, at this level; short form; see also test_reuse."""
    rig = Rig(blocks=8, shape=TWO_TO_ONE)
    for room in range(200):
        key = (room, 0)
        rig.expect(key, 12)
        rig.open(key)
        rig.flow()
        rig.admit(key, 12, first_block=2)
        rig.flow()
        rig.send(key, [5], 2, record(key, 12))
        rig.land_all()
        rig.flow()
        assert rig.told["Received", key] == 1
        rig.finish(key)
        rig.ds[0].landed.clear()
    assert len(rig.ds[0].books.free) == 8
    rig.check_baseline()


def test_each_context_parallel_rank_writes_the_blocks_that_it_holds() -> None:
    """Two cp ranks, three blocks: one holds the first and the last, the other the second."""
    rig = Rig(shape=Shape(2, 1, heads=1, writers=4), cp=2)
    ready(rig, A, tokens=12)
    first, second = rig.ps
    rig.send_at(first, A, [7], 0, None)
    rig.send_at(second, A, [3], 1, record(A, 12))
    rig.send_at(first, A, [8], 2, record(A, 12))
    rig.land_all()
    rig.land_all()
    rig.flow()
    assert rig.told["Received", A] == 1


@pytest.mark.parametrize("cp", [2, 3])
def test_shares_of_context_parallel_ranks_are_the_whole_prompt_at_every_hit_and_boundary(
    cp: int,
) -> None:
    """CASES 58, 59: as the group of the prefill ranks orders it."""
    blocks, tokens = 5, 18
    for hit in range(blocks + 1):
        for cuts in range(1 << (blocks - 1)):
            ends = [n + 1 for n in range(blocks - 1) if cuts >> n & 1]
            rig, group = Rig(shape=Shape(cp, 1, heads=1, writers=4), cp=cp), Group(cp, cp)
            rig.expect(A, tokens)
            rig.open(A)
            rig.flow()
            rig.admit(A, tokens, hit)
            rig.flow()
            for begin, end in pairwise([0, *ends, blocks]):
                last = record(A, tokens) if end == blocks else None
                group.command(SendBlocks(*A, tuple(range(begin, end)), begin, last))
            for rank, command in group.orders:
                assert isinstance(command, SendBlocks)
                rig.ps[rank].desk.send(command, rig.now)
                rig.settle()
            assert not rig.has(Received, A)
            rig.land_all()
            rig.land_all()
            rig.flow()
            assert rig.told["Received", A] == 1
            rig.finish(A)
            rig.check_baseline()


def test_the_scheduler_may_expect_what_broke_before() -> None:
    """Early handshakes of several ranks, of which the first does not fit."""
    rig = Rig(shape=ONE_TO_TWO)
    rig.open(A)
    rig.flow()
    rig.admit_at(rig.ds[0], A, 9)
    rig.admit_at(rig.ds[1], A, 8)
    rig.flow()
    rig.ps[0].sources.add(A)
    rig.p.expect(Sender(*A, 8, b"h", 60.0))
    rig.settle()
    rig.flow()
    rig.pass_time(2.0)
    rig.flow()
    assert rig.told["ReceiveFailed", A] == 2
    assert rig.told["Quiet", A] == 2
    assert rig.told["SendEnded", A] == 1
    rig.check_baseline()
