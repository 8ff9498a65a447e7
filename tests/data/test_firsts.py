"""First tokens go ahead of their KV: told once, checked, waited for where no slot is enough."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pdrt.data.commands import OpenReceiver, TellFirsts
from pdrt.data.events import FirstTokens, Received, ReceiveFailed, SendEnded
from pdrt.data.group import Group
from pdrt.data.transfer import (
    TERMINAL,
    DecodeServed,
    Key,
    Sender,
    State,
    StopWrites,
    feed_sender,
)
from pdrt.messages import (
    FROM_PREFILL,
    Firsts,
    Rank,
    Source,
    decode,
    encode,
    pack_ids,
    pack_logprobs,
    pack_tops,
)
from tests.data.ranks import ONE, Shape
from tests.data.rig import Rig

A: Key = (1, 0)
TOPS = pack_tops([((42, -0.5), (7, -1.0)), ((43, -0.5), (7, -1.0))])


def ready(sequences: int = 1, top: int = 0, shape: Shape = ONE) -> Rig:
    """Both sides know of each other; the prefill side may compute."""
    rig = Rig(shape=shape)
    rig.expect(A)
    rig.open(A)
    rig.flow()
    rig.admit(A, sequences=sequences, top=top)
    rig.flow()
    return rig


def told(rig: Rig) -> list[str]:
    return [type(e).__name__ for e in rig.heard]


def firsts_of(rig: Rig) -> FirstTokens:
    (found,) = [event for event in rig.heard if isinstance(event, FirstTokens)]
    return found


def write(rig: Rig) -> None:
    rig.send_all(A)
    rig.land_all()


def lose_messages(rig: Rig) -> None:
    rig.to_d.clear()


def test_first_tokens_are_told_before_any_block_has_landed() -> None:
    """CASES 97."""
    rig = ready()
    rig.tell_firsts(A)
    rig.send_all(A)
    rig.flow()
    assert firsts_of(rig) == FirstTokens(*A, (42,), (-0.5,))
    assert not rig.has(Received, A)
    rig.land_all()
    rig.flow()
    assert rig.has(Received, A)


def test_the_slot_may_be_faster_and_then_they_are_late() -> None:
    rig = ready()
    rig.tell_firsts(A)
    write(rig)
    rig.scan()
    rig.flow()
    assert "FirstTokens" not in told(rig)
    assert rig.has(Received, A)
    assert rig.d.counters["late_messages"] >= 1


@pytest.mark.parametrize(("sequences", "top"), [(2, 0), (2, 2), (1, 2)])
def test_what_the_slot_cannot_hold_is_waited_for(sequences: int, top: int) -> None:
    rig = ready(sequences, top)
    rig.tell_firsts(A, (42, 43)[:sequences], TOPS[: 16 * sequences] if top else b"")
    write(rig)
    rig.scan()
    assert not rig.has(Received, A)
    rig.flow()
    assert told(rig)[-2:] == ["FirstTokens", "Received"]


def test_a_prefill_rank_that_is_done_without_telling_them_breaks_the_attempt() -> None:
    rig = ready(sequences=2)
    write(rig)
    rig.flow()
    (failed,) = [event for event in rig.heard if isinstance(event, ReceiveFailed)]
    assert failed.problem.code == "transfer_failed"
    assert "did not tell the first tokens" in failed.problem.message
    assert failed.was_written
    rig.check_baseline()


@pytest.mark.parametrize("are_writes_over", [False, True])
def test_first_tokens_that_got_lost_are_told_again(are_writes_over: bool) -> None:
    """And so is that the prompt is written, when that got lost too."""
    rig = ready(sequences=2)
    rig.tell_firsts(A, (42, 43))
    lose_messages(rig)
    if are_writes_over:
        write(rig)
        lose_messages(rig)
    rig.scan()
    assert not rig.has(Received, A)
    for _ in range(8):
        rig.pass_time(1.0)
        rig.flow()
    assert firsts_of(rig).tokens == (42, 43)
    write(rig) if not are_writes_over else None
    rig.flow()
    assert rig.has(Received, A)


def test_what_nobody_needs_is_not_waited_for() -> None:
    rig = ready()
    write(rig)
    rig.flow()
    assert rig.has(Received, A)


GOOD = Firsts(
    session="d0",
    room=A[0],
    attempt=A[1],
    rank=Rank(),
    tokens=pack_ids([42, 43]),
    logprobs=pack_logprobs([-0.5, -0.5]),
    tops=TOPS,
)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, tokens=pack_ids([42])),
        replace(GOOD, tokens=pack_ids([42, 43, 44]), logprobs=pack_logprobs([-0.5] * 3)),
        replace(GOOD, tokens=b"abc"),
        replace(GOOD, tokens=b"", logprobs=b""),
        replace(GOOD, tokens=pack_ids([42, -1])),
        replace(GOOD, logprobs=pack_logprobs([-0.5])),
        replace(GOOD, logprobs=b"abcde"),
        replace(GOOD, logprobs=pack_logprobs([-0.5, math.nan])),
        replace(GOOD, tops=b""),
        replace(GOOD, tops=TOPS[:-1]),
        replace(GOOD, tops=pack_tops([((1, -0.5),) * 3] * 2)),
        replace(GOOD, tops=pack_tops([((1, -0.5), (-1, -0.5))] * 2)),
        replace(GOOD, tops=pack_tops([((1, -0.5), (2, math.nan))] * 2)),
        replace(GOOD, rank=Rank(tp=1)),
    ],
    ids=lambda bad: f"{len(bad.tokens)}-{len(bad.logprobs)}-{len(bad.tops)}-{bad.rank}",
)
def test_first_tokens_that_do_not_fit_are_counted_and_dropped(bad: Firsts) -> None:
    rig = ready(sequences=2, top=2, shape=Shape(2, 1, heads=2, writers=2))
    for message in (bad, GOOD, GOOD):
        frame = encode(FROM_PREFILL, message)
        rig.d.receive(decode(FROM_PREFILL, frame), rig.now)
        rig.settle()
    assert firsts_of(rig) == FirstTokens(*A, (42, 43), (-0.5, -0.5), TOPS)
    assert rig.d.counters["dropped_first_tokens"] == 1
    assert rig.d.counters["repeated_first_tokens"] == 1


@pytest.mark.parametrize("session", ["d1", ""])
def test_first_tokens_of_another_session_or_attempt_are_dropped(session: str) -> None:
    rig = ready(sequences=2, top=2)
    rig.d.receive(replace(GOOD, session=session), rig.now)
    rig.d.receive(replace(GOOD, attempt=9), rig.now)
    rig.settle()
    assert "FirstTokens" not in told(rig)


def test_likeliest_tokens_that_were_not_asked_for_are_left_out() -> None:
    rig = ready(sequences=2)
    rig.d.receive(GOOD, rig.now)
    rig.settle()
    assert firsts_of(rig).tops == b""


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 1, heads=2, writers=2),
        Shape(1, 2, heads=2),
        Shape(2, 2, heads=2, writers=3),
        Shape(2, 2, heads=1),
    ],
    ids=str,
)
def test_in_a_group_the_first_rank_tells_and_the_first_rank_hears(shape: Shape) -> None:
    rig = ready(sequences=2, shape=shape)
    rig.tell_firsts(A, (42, 43))
    write(rig)
    rig.flow()
    assert [d.told["FirstTokens", A] for d in rig.ds] == [1, *[0] * (len(rig.ds) - 1)]
    assert all(d.told["Received", A] for d in rig.ds)


@pytest.mark.parametrize("shape", [Shape(), Shape(1, 2, heads=2), Shape(2, 2, heads=2, writers=3)])
def test_an_answer_that_ended_with_its_first_token_stops_the_writes_and_is_no_failure(
    shape: Shape,
) -> None:
    """CASES 86: the rest of the prompt's KV is not wanted, and its memory waits for the proof."""
    rig = ready(shape=shape)
    rig.tell_firsts(A)
    rig.send_all(A)
    rig.abort_receive(A, is_served=True)
    rig.flow()
    assert all(A in d.quarantine for d in rig.ds)
    rig.land_all()
    rig.flow()
    assert {e.problem for e in rig.heard if isinstance(e, SendEnded)} == {None}
    assert all(p.told["SendEnded", A] for p in rig.ps)
    assert "SendFailed" not in told(rig)
    rig.check_baseline()


def test_a_group_takes_first_tokens_from_its_first_rank_and_only_while_they_are_wanted() -> None:
    group = Group(2)
    group.command(TellFirsts(*A, (1,), (-0.5,)))
    assert [rank for rank, _ in group.orders] == [0]
    firsts = FirstTokens(*A, (1,), (-0.5,))
    group.heard(0, firsts)
    assert not group.events
    group.command(OpenReceiver(*A, Source(host="127.0.0.1", port=1), 1e9))
    group.heard(1, firsts)
    assert not group.events
    group.heard(0, firsts)
    assert list(group.events) == [firsts]


@pytest.mark.parametrize("state", [s for s in State if s not in TERMINAL])
def test_writes_for_an_answer_that_has_ended_are_asked_to_stop(state: State) -> None:
    sender = Sender(*A, 8, b"h", 60.0, state=state)
    assert feed_sender(sender, DecodeServed()) == [StopWrites()]
    assert (sender.state, sender.problem) == (State.ABORTED, None)
