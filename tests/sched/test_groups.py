"""Sampling groups: one prompt, n answers, each what it would be alone, under any pressure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdrt.data.commands import AbortReceiver, AdmitReceiver, OpenReceiver
from pdrt.data.events import FirstTokens, Quiet, Received, ReceiveFailed, ReceiverReady
from pdrt.data.layout import blocks_for
from pdrt.device.batch import Drawn, SeqStep
from pdrt.device.chance import seed_of
from pdrt.errors import BadRequest
from pdrt.messages import AskPrefill, Problem, pack_ids
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.events import Cancelled, ResumeLocally, Stopped
from pdrt.sched.limits import Limits
from pdrt.sched.request import State
from pdrt.sched.sequences import sub_room
from tests.sched.fakes import (
    EOS,
    HOME,
    FakeDevice,
    Rig,
    answers,
    check_books,
    first_tokens,
    is_baseline,
    received,
    submit,
)
from tests.sched.pair import Pair

B = 4
SEED = 7
LIMITS = Limits(block_size=B, max_prefill_tokens=8, reserved_tokens=4)
PROMPT = [1, 2, 3, 4, 5, 6]
LOST = Problem(code="peer_lost", message="prefill is gone")


def hybrid(blocks: int = 64, limits: Limits = LIMITS, device: type[FakeDevice] = FakeDevice) -> Rig:
    return Rig(Scheduler(limits, blocks, {EOS}), device(blocks, B))


def decode(blocks: int = 64, limits: Limits = LIMITS) -> Rig:
    return Rig(DecodeDisaggScheduler(limits, blocks, 8, {EOS}), FakeDevice(blocks, B))


def ask(
    rig: Rig,
    n: int,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 6,
    stop: tuple[int, ...] = (),
) -> None:
    rig.submit(submit(1, prompt, n=n, seed=SEED, max_tokens=max_tokens, stop=stop))


def finish(rig: Rig, steps: int = 500) -> None:
    for _ in range(steps):
        if not rig.book.requests:
            return
        rig.step()
        check_books(rig.book)
    raise AssertionError(f"not finished: {rig.book.rooms}")


def told(rig: Rig, n: int) -> list[list[int]]:
    return [rig.sequences[1, index] for index in range(n)]


def ends(rig: Rig, n: int) -> list[list[str]]:
    return [rig.finished.get((1, index), []) for index in range(n)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_every_sequence_says_what_it_would_say_alone(length: int) -> None:
    """Also across the prompt's last block, which all of them go on from."""
    rig, prompt = hybrid(), list(range(1, length + 1))
    ask(rig, 3, prompt)
    finish(rig)
    assert told(rig, 3) == answers(prompt, 6, 3, SEED)
    assert ends(rig, 3) == [["length"]] * 3
    assert is_baseline(rig.book)


def test_the_first_sequence_is_the_answer_without_n() -> None:
    rig = hybrid()
    rig.submit(submit(2, PROMPT, seed=SEED, max_tokens=6))
    ask(rig, 4)
    finish(rig)
    assert rig.sequences[1, 0] == rig.said[2]
    assert len({tuple(said) for said in told(rig, 4)}) == 4


@pytest.mark.parametrize(("length", "copies"), [(6, 3), (8, 0), (1, 3)])
def test_the_prompt_is_computed_once_and_its_full_blocks_are_held_once(
    length: int, copies: int
) -> None:
    rig = hybrid(limits=replace(LIMITS, prefix_cache=False))
    ask(rig, 4, list(range(1, length + 1)), max_tokens=2)
    rig.step()
    assert sum(len(step.tokens) for step in rig.device.batches[0]) == length
    assert rig.book.blocks.used == blocks_for(length, B)
    rig.step()
    steps = rig.device.batches[-1]
    assert sum(step.copy_from >= 0 for step in steps) == copies
    assert is_baseline(rig.book)


def test_the_blocks_of_n_long_answers_share_the_prompt() -> None:
    rig = hybrid()
    ask(rig, 4, list(range(1, 41)), max_tokens=4)
    most = 0
    while rig.book.requests:
        rig.step()
        most = max(most, rig.book.blocks.used)
    assert most == 10 + 4


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_sequences_end_on_their_own(max_tokens: int) -> None:
    """CASES 85, 86: one by a stop id in its first token, one later, one by its length."""
    whole = answers(PROMPT, 5, 3, SEED)
    rig = hybrid()
    ask(rig, 3, max_tokens=max_tokens, stop=(whole[1][0], whole[2][3]))
    finish(rig)
    want = [whole[0][:max_tokens], whole[1][:1], whole[2][: min(4, max_tokens)]]
    assert told(rig, 3) == want
    later = ["length"] if max_tokens == 1 else ["stop"]
    assert ends(rig, 3) == [["length"], ["stop"], later]
    assert is_baseline(rig.book)


def test_a_client_that_leaves_ends_all_and_is_told_once() -> None:
    rig = hybrid()
    ask(rig, 3)
    for _ in range(3):
        rig.step()
    rig.feed(Cancelled(1, "client_gone"))
    assert rig.ends[1] == ["cancelled"]
    assert sum(o.problem is not None for o in rig.outputs) == 1
    assert is_baseline(rig.book)
    rig.feed(Cancelled(1, "client_gone"))
    assert rig.book.counters["late"] == 1


def test_the_deadline_ends_all_and_is_told_once() -> None:
    rig = hybrid()
    ask(rig, 3)
    rig.step()
    rig.now = 100.0
    rig.plan()
    assert rig.ends[1] == ["deadline"]
    assert is_baseline(rig.book)


def test_an_end_during_a_step_ends_what_is_on_the_device_too() -> None:
    rig = hybrid()
    ask(rig, 3)
    rig.step()
    plan = rig.plan()
    rig.feed(Cancelled(1, "client_gone"))
    rig.commit(plan)
    assert is_baseline(rig.book)
    assert rig.book.counters["late"] == 3


class Damaged(FakeDevice):
    """What it draws further is no number."""

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        return [
            replace(one, further=tuple(replace(o, logprob=math.nan) for o in one.further))
            for one in super().execute(batch)
        ]


def test_damage_in_one_first_token_ends_the_request() -> None:
    rig = hybrid(device=Damaged)
    ask(rig, 2)
    rig.step()
    assert rig.ends[1] == ["bad_logits"]
    assert is_baseline(rig.book)


def test_a_stop_string_ends_one_sequence_and_the_last_one_ends_the_room() -> None:
    rig = hybrid()
    ask(rig, 3, max_tokens=20)
    for _ in range(4):
        rig.step()
    for index in (1, 0, 1, 7):
        rig.feed(Stopped(1, index))
        check_books(rig.book)
    assert ends(rig, 3) == [["stop"], ["stop"], []]
    assert len(rig.book.requests) == 1
    rig.feed(Stopped(1, 2))
    assert ends(rig, 3) == [["stop"]] * 3
    assert is_baseline(rig.book)


def test_a_prompt_that_is_still_computed_has_no_sequence_to_stop() -> None:
    rig = hybrid()
    ask(rig, 3, list(range(1, 30)))
    rig.step()
    rig.feed(Stopped(1, 1))
    finish(rig)
    assert ends(rig, 3) == [["length"]] * 3


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("length", [5, 8])
def test_a_pool_for_one_sequence_computes_them_in_turns(length: int, cached: bool) -> None:
    """SPEC promise 4: 4 blocks are what one of the 5 needs, and not more."""
    prompt = list(range(1, length + 1))
    rig = hybrid(4, replace(LIMITS, prefix_cache=cached))
    ask(rig, 5, prompt, max_tokens=16 - length)
    finish(rig)
    assert told(rig, 5) == answers(prompt, 16 - length, 5, SEED)
    assert ends(rig, 5) == [["length"]] * 5
    assert rig.book.counters["retractions"] >= 4
    assert is_baseline(rig.book)


def test_more_sequences_than_a_batch_holds_are_all_computed() -> None:
    rig = hybrid(200, replace(LIMITS, max_batch_size=3))
    ask(rig, 9)
    finish(rig)
    assert told(rig, 9) == answers(PROMPT, 6, 9, SEED)


def test_a_lent_block_that_was_filled_and_can_be_found_is_forgotten_before_it_is_written() -> None:
    """The first sequence runs to its end before the second one's first step."""
    rig = hybrid(200, replace(LIMITS, max_batch_size=1))
    ask(rig, 2)
    while not rig.finished.get((1, 0)):
        rig.step()
    (second,) = rig.book.requests.values()
    assert second.borrows
    assert rig.book.blocks.cache.knows(second.blocks[-1])
    finish(rig)  # the rig looks at what is written
    assert told(rig, 2) == answers(PROMPT, 6, 2, SEED)


@pytest.mark.parametrize(("blocks", "is_granted"), [(11, False), (12, True)])
def test_a_group_is_let_in_when_all_its_sequences_can_begin(blocks: int, is_granted: bool) -> None:
    """2 blocks for the prompt and for each of 3 a copy of the last one and R, beside 3 and R."""
    rig = hybrid(blocks)
    rig.submit(submit(2, [9] * 8, max_tokens=20))
    rig.step()
    ask(rig, 3)
    rig.step()
    assert (rig.state(1) is State.RUNNING) == is_granted


def test_an_answer_that_is_resumed_is_one_sequence() -> None:
    rig = hybrid()
    with pytest.raises(BadRequest, match="one sequence"):
        rig.submit(submit(1, PROMPT, said=[3], n=2))
    assert is_baseline(rig.book)


# On decode.


def admit(rig: Rig, room: int = 1) -> AdmitReceiver:
    rig.feed(ReceiverReady(room, rig.book.rooms[room].attempt))
    rig.step()
    (found,) = [e for e in rig.take(AdmitReceiver) if isinstance(e, AdmitReceiver)]
    assert found.room == room
    return found


def firsts(attempt: int = 0, n: int = 3) -> FirstTokens:
    return first_tokens(1, attempt, PROMPT, n=n, seed=SEED)


def land(rig: Rig, admitted: AdmitReceiver, tokens: Sequence[int], index: int = 0) -> None:
    held = rig.book.rooms[admitted.room].blocks
    rig.device.write(held, 0, tokens)
    seed = seed_of(SEED, index)
    rig.feed(received(admitted.room, admitted.attempt, tokens, seed=seed))


@pytest.mark.parametrize("is_early", [True, False])
def test_one_transfer_brings_the_prompt_of_all_sequences(is_early: bool) -> None:
    rig = decode(limits=replace(LIMITS, early_first_token=is_early))
    ask(rig, 3)
    admitted = admit(rig)
    assert (admitted.sequences, admitted.needs_firsts) == (3, True)
    rig.feed(firsts())
    assert [o.index for o in rig.outputs] == ([0, 1, 2] if is_early else [])
    land(rig, admitted, PROMPT)
    check_books(rig.book)
    assert [o.index for o in rig.outputs] == [0, 1, 2]
    finish(rig)
    assert told(rig, 3) == answers(PROMPT, 6, 3, SEED)
    assert rig.take(OpenReceiver) == [OpenReceiver(1, 0, HOME, 100.0)]
    assert is_baseline(rig.book)


def test_a_slot_without_first_tokens_is_no_answer_of_n_sequences() -> None:
    rig = decode()
    ask(rig, 3)
    land(rig, admit(rig), PROMPT)
    assert rig.ends[1] == ["transfer_failed"]
    assert is_baseline(rig.book)


def test_first_tokens_that_were_the_last_of_all_stop_the_transfer() -> None:
    rig = decode()
    ask(rig, 3, max_tokens=1)
    admit(rig)
    rig.feed(firsts())
    assert ends(rig, 3) == [["length"]] * 3
    (abort,) = rig.take(AbortReceiver)
    assert isinstance(abort, AbortReceiver)
    assert abort.is_served
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


def test_the_first_of_them_may_end_while_the_others_kv_is_on_its_way() -> None:
    whole = answers(PROMPT, 6, 3, SEED)
    rig = decode()
    ask(rig, 3, stop=(whole[0][0],))
    admitted = admit(rig)
    rig.feed(firsts())
    assert ends(rig, 3) == [["stop"], [], []]
    rig.feed(Stopped(1, 2))
    assert ends(rig, 3) == [["stop"], [], ["stop"]]
    rig.feed(Stopped(1, 0))  # it has ended
    land(rig, admitted, PROMPT)
    finish(rig)
    assert told(rig, 3) == [whole[0][:1], whole[1], whole[2][:1]]
    assert ends(rig, 3) == [["stop"], ["length"], ["stop"]]
    assert is_baseline(rig.book)


def test_stopping_all_of_them_on_the_way_stops_the_transfer() -> None:
    rig = decode()
    ask(rig, 2)
    admit(rig)
    rig.feed(firsts(n=2))
    for index in (1, 0):
        rig.feed(Stopped(1, index))
    assert ends(rig, 2) == [["stop"], ["stop"]]
    assert rig.book.quarantine.blocks == 2
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


def retracted(rig: Rig, n: int) -> list[AskPrefill]:
    """Memory is short on the first decode step (CASES 71): all but one lose what they have."""
    ask(rig, n)
    admitted = admit(rig)
    rig.feed(firsts(n=n))
    land(rig, admitted, PROMPT)
    taken = rig.book.blocks.take(rig.book.blocks.free)
    assert taken is not None
    rig.step()
    rig.book.blocks.give(taken)
    check_books(rig.book)
    return [e for e in rig.take(AskPrefill) if isinstance(e, AskPrefill)]


def test_retracted_sequences_are_asked_for_one_by_one_in_rooms_of_their_own() -> None:
    """CASES 13, 71: no attempt is used twice, and no two share one."""
    rig, whole = decode(), answers(PROMPT, 6, 3, SEED)
    asked = retracted(rig, 3)
    assert {(a.of_room, a.index, a.attempt) for a in asked} == {(1, 1, 1), (1, 2, 1)}
    for wanted in asked:
        assert wanted.room == sub_room(1, wanted.index) != 1
        so_far = [*PROMPT, whole[wanted.index][0]]
        assert wanted.tokens == pack_ids(so_far)
        admitted = admit(rig, wanted.room)
        assert admitted.sequences == 1
        tell = FirstTokens(wanted.room, 1, (whole[wanted.index][1],), (-0.5,))
        rig.feed(tell)
        assert rig.sequences[1, wanted.index] == whole[wanted.index][:2]
        land(rig, admitted, so_far, wanted.index)
    finish(rig)
    assert told(rig, 3) == whole
    assert ends(rig, 3) == [["length"]] * 3
    assert is_baseline(rig.book)


@pytest.mark.parametrize("when", [State.BOOTSTRAPPING, State.WAITING, State.TRANSFERRING])
@pytest.mark.parametrize("how", ["cancelled", "stopped", "local", "dropped"])
def test_a_retracted_sequence_ends_or_goes_on_wherever_it_is(when: State, how: str) -> None:
    rig, whole = decode(), answers(PROMPT, 6, 2, SEED)
    (wanted,) = retracted(rig, 2)
    if when is not State.BOOTSTRAPPING:
        rig.feed(ReceiverReady(wanted.room, 1))
    if when is State.TRANSFERRING:
        rig.step()
    assert rig.state(wanted.room) is when
    match how:
        case "cancelled":
            rig.feed(Cancelled(1, "client_gone"))
        case "stopped":
            rig.feed(Stopped(1, 1))
        case "local":
            rig.feed(ResumeLocally(wanted.room))
        case _:
            rig.now = 100.0
            rig.plan()
    check_books(rig.book)
    finish(rig)
    assert len(rig.take(AbortReceiver)) == 1
    if how in ("cancelled", "dropped"):
        assert len(rig.ends[1]) == 1
    else:
        assert ends(rig, 2) == [["length"], ["stop"] if how == "stopped" else ["length"]]
        assert rig.sequences[1, 0] == whole[0]
    if how == "local":
        assert told(rig, 2) == whole
    rig.feed(Quiet(wanted.room, 1))
    assert is_baseline(rig.book)


@pytest.mark.parametrize("policy", ["reprefill", "local"])
def test_an_attempt_lost_after_the_first_tokens_is_resumed_for_each_that_goes_on(
    policy: str,
) -> None:
    """CASES 13, 97: and none is told twice."""
    limits = replace(LIMITS, retraction="local") if policy == "local" else LIMITS
    rig, whole = decode(limits=limits), answers(PROMPT, 6, 3, SEED)
    ask(rig, 3, stop=(whole[0][0],))
    admit(rig)
    rig.feed(firsts())
    rig.feed(ReceiveFailed(1, 0, LOST))
    check_books(rig.book)
    asked = [e for e in rig.take(AskPrefill) if isinstance(e, AskPrefill)]
    assert [a.index for a in asked] == ([2, 1] if policy == "reprefill" else [])
    assert len({a.room for a in asked}) == len(asked)
    for wanted in asked:
        rig.feed(ResumeLocally(wanted.room))
    finish(rig)
    assert told(rig, 3) == [whole[0][:1], whole[1], whole[2]]
    rig.feed(Quiet(1, 0))
    assert is_baseline(rig.book)


def test_a_slot_of_the_first_room_is_nothing_to_another_sequence() -> None:
    rig = decode()
    (wanted,) = retracted(rig, 2)
    admit(rig, wanted.room)
    stale = received(1, 0, PROMPT)
    rig.feed(Received(wanted.room, 0, stale.record))
    assert rig.state(wanted.room) is State.TRANSFERRING
    assert rig.book.counters["stale"] == 1


# Both together.


@pytest.mark.parametrize("retraction", ["reprefill", "local", "refused"])
@pytest.mark.parametrize("lag", [0, 3])
def test_groups_in_a_pool_hardly_larger_than_one_sequence_lose_nothing(
    retraction: str, lag: int
) -> None:
    """CASES 13, 67, 69, 70, 71: groups of 4 and single ones, each answer as if it were alone."""
    limits = replace(LIMITS, reserved_tokens=1, max_batch_size=8)
    limits = replace(limits, retraction="local") if retraction == "local" else limits
    pair = Pair(
        limits,
        prefill_blocks=12,
        decode_blocks=9,
        refuses=lambda _ask: retraction == "refused",
        lag=lag,
    )
    prompts = {room: [1 + (room * 31 + i) % 90 for i in range(3 + room)] for room in range(8)}
    for room, prompt in prompts.items():
        pair.submit(room, prompt, 11, n=1 + 3 * (room % 2), seed=room)
    pair.finish(6000)
    for room, prompt in prompts.items():
        n = 1 + 3 * (room % 2)
        assert [pair.decode.sequences[room, i] for i in range(n)] == answers(prompt, 11, n, room)
        assert [pair.decode.finished[room, i] for i in range(n)] == [["length"]] * n
    assert pair.decode.book.counters["retractions"] > 5
