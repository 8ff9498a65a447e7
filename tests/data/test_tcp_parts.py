"""The parts of tcp that need no socket: cuts, portions, leave to write, a write's life."""

from __future__ import annotations

import select
import socket
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdrt.data.layout import NO_RUNS
from pdrt.data.transport.promise import Ended, Write
from pdrt.data.transport.tcp_arrivals import Arrivals
from pdrt.data.transport.tcp_cuts import Cuts
from pdrt.data.transport.tcp_grants import Grants
from pdrt.data.transport.tcp_outbox import WINDOW, Frame, Outbox
from pdrt.data.transport.tcp_socket import PIECE, Vector
from pdrt.data.transport.tcp_wire import (
    MAX_RUNS,
    Answer,
    Head,
    Kind,
    Status,
)
from pdrt.errors import BadMessage
from tests.data.tcp_rig import runs_of

LENGTHS = st.lists(st.integers(0, 300), max_size=40)


# Cutting a write into frames, and a frame into portions.


@given(LENGTHS, st.integers(1, 700))
def test_cuts_hand_out_each_byte_once_in_frames_of_bounded_size(
    lengths: list[int], frame: int
) -> None:
    runs = runs_of(lengths)
    cuts, found, frames = Cuts(runs, frame), dict[int, int](), 0
    while not cuts.is_over:
        frames += 1
        part, payload = cuts.next()
        assert int(part[:, 2].sum()) == payload <= frame
        for source, target, length in part.tolist():
            for n in range(length):
                assert source + n not in found
                found[source + n] = target + n
    assert cuts.done == cuts.total == sum(lengths)
    assert frames <= 1 + len(lengths) + cuts.total // frame
    expected = {s + n: d + n for s, d, length in runs.tolist() for n in range(length)}
    assert found == expected


def test_a_frame_has_no_more_runs_than_a_vector_has_room_for() -> None:
    cuts = Cuts(runs_of([1] * (2 * MAX_RUNS + 5)))
    assert [cuts.next()[1] for _ in range(3)] == [MAX_RUNS, MAX_RUNS, 5]
    assert cuts.is_over


@given(
    st.lists(st.integers(0, 3 * PIECE), min_size=1, max_size=8),
    st.integers(1, 40),
    st.integers(1, 1 << 17),
)
@example([0, 3 * PIECE // 2, 0, 0, 7, 0], 1, 1)  # empty runs, alone in their portions
@settings(max_examples=30, deadline=None)
def test_a_vector_sends_and_fills_each_byte_in_its_place(
    lengths: list[int], small: int, buffer: int
) -> None:
    lengths = [*lengths, *[7] * small]  # runs that share a portion
    total = sum(lengths)
    source = np.random.default_rng(total).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros(total, dtype=np.uint8)
    begins = np.cumsum([0, *lengths[:-1]])
    there = np.stack((total - begins - lengths, lengths), axis=1)  # the first one at the end
    out, into = Vector(50, 30 * PIECE), Vector(50, 30 * PIECE)
    out.set(int(source.ctypes.data), np.stack((begins, lengths), axis=1), total)
    into.set(int(target.ctypes.data), there, total)
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        far.setblocking(False)
        thread = threading.Thread(target=out.send, args=(near.fileno(),))
        thread.start()
        while into.left:
            select.select([far], [], [])
            into.fill(far.fileno())
        thread.join()
    assert out.left == 0
    for (here, length), at in zip(zip(begins, lengths, strict=True), there[:, 0], strict=True):
        assert np.array_equal(source[here : here + length], target[at : at + length])


def test_a_closed_socket_ends_sending_and_filling() -> None:
    near, far = socket.socketpair()
    vector, data = Vector(1, PIECE), np.zeros(10, dtype=np.uint8)
    with near:
        far.close()
        for step in (vector.fill, vector.send):
            vector.set(int(data.ctypes.data), np.array([[0, 10]]), 10)
            with pytest.raises(OSError, match=r"closed|Broken pipe"):
                step(near.fileno())


def test_runs_that_are_not_the_payload_are_refused() -> None:
    with pytest.raises(BadMessage, match="runs of 30 bytes for 31"):
        Vector(4, PIECE).set(0, np.array([[0, 10], [50, 20]]), 31)


# Leave to write.


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=6),
    st.lists(st.tuples(st.integers(-5, 90), st.integers(-2, 30)), max_size=4),
)
def test_a_permit_covers_what_lies_in_one_of_its_areas(
    areas: list[tuple[int, int]], runs: list[tuple[int, int]]
) -> None:
    """Neighbours are one area; what is outside of the memory belongs to none."""
    grants = Grants(70, 0, 0)
    grants.admit((1, 1), np.array(areas, dtype=np.int64).reshape(-1, 2))
    permit = grants.find((1, 1))
    assert permit is not None
    allowed = {n for at, length in areas for n in range(at, min(at + length, 70))}
    expected = all(
        length >= 0 and at >= 0 and set(range(at, at + length)) <= allowed for at, length in runs
    )
    covers = permit.covers(np.array(runs, dtype=np.int64).reshape(-1, 2))
    empty = any(length == 0 for _, length in runs)
    assert covers == expected or (empty and expected)  # nothing, nowhere: either is right


@pytest.mark.parametrize(
    "run", [(2**63 - 1, 1), (2**63 - 1, 2**63 - 1), (0, 2**63 - 1), (-(2**63), 1)]
)
def test_no_number_wraps_around_into_a_permit(run: tuple[int, int]) -> None:
    grants = Grants(70, 0, 70)
    permit = grants.find(None)
    assert permit is not None
    assert permit.covers(np.array([[0, 70]]))
    assert not permit.covers(np.array([run], dtype=np.int64))


def test_revoking_waits_for_the_portion_that_is_being_placed() -> None:
    grants = Grants(70, 0, 0)
    grants.admit((1, 1), np.array([[0, 70]]))
    permit = grants.find((1, 1))
    assert permit is not None
    assert grants.begin(permit)
    order: list[str] = []
    is_revoking = threading.Event()

    def revoke() -> None:
        is_revoking.set()
        grants.revoke((1, 1))
        order.append("revoked")

    thread = threading.Thread(target=revoke)
    thread.start()
    is_revoking.wait()
    while not permit.is_revoked:
        pass
    order.append("placed")
    grants.end(permit)
    thread.join()
    assert order == ["placed", "revoked"]
    assert not grants.begin(permit)
    assert grants.find((1, 1)) is None


# One link's writes at the target.


def test_a_write_is_whole_once_whichever_frame_comes_last() -> None:
    arrivals = Arrivals()
    first = Head(Kind.DATA, 1, None, payload=10)
    last = Head(Kind.DATA, 1, None, is_last=True, total=25, payload=15)
    for frames in ((first, last), (last, first)):
        whole = [arrivals.book(head, None, arrivals.open(head)) for head in frames]
        assert whole == [False, True]
        assert len(arrivals) == 0


def test_only_the_first_thing_that_goes_wrong_is_news() -> None:
    arrivals = Arrivals()
    arrival = arrivals.open(Head(Kind.DATA, 1))
    assert arrivals.fail(arrival, "this")
    assert not arrivals.fail(arrival, "that")
    assert arrival.error == "this"


# A write's life on the writing side.


class Sender:
    """An outbox and what it told."""

    def __init__(self) -> None:
        self.ends: list[Ended] = []
        self.outbox = Outbox(self.ends.append)

    def start(self, number: int, size: int = 10) -> None:
        self.outbox.add(Write(number, "a", np.array([[0, 0, size]], dtype=np.int64)))

    def send(self) -> Frame:
        frame = self.outbox.next()
        self.outbox.sent(frame.job)
        return frame


HUGE = 20 << 20  # three frames


def test_a_write_ends_with_its_answer_and_not_while_it_is_sent() -> None:
    sender = Sender()
    sender.start(1)
    frame = sender.outbox.next()
    sender.outbox.answered(Answer(Status.PLACED, 1))  # quicker than our own thread
    assert not sender.ends
    sender.outbox.sent(frame.job)
    assert sender.ends == [Ended(1)]
    assert sender.outbox.is_empty


def test_a_write_that_has_not_begun_is_aborted_at_once() -> None:
    sender = Sender()
    sender.start(1)
    sender.outbox.stop(1, "aborted")
    sender.outbox.stop(1, "aborted")
    assert sender.ends == [Ended(1, "aborted")]
    assert not sender.outbox.has_frame


def test_a_write_that_has_begun_is_cancelled_and_ends_with_the_peer_s_word() -> None:
    sender = Sender()
    sender.start(1, HUGE)
    first = sender.outbox.next()
    sender.outbox.stop(1, "aborted")
    assert not sender.outbox.has_frame  # the frame that is on its way comes first
    sender.outbox.sent(first.job)
    cancel = sender.send()
    assert (cancel.head.kind, cancel.head.total) == (Kind.CANCEL, first.head.payload)
    assert not sender.ends
    sender.outbox.answered(Answer(Status.FAILED, 1, "aborted there"))
    assert sender.ends == [Ended(1, "aborted")]
    assert sender.outbox.is_empty


def test_a_target_that_drops_a_write_is_not_sent_the_rest() -> None:
    sender = Sender()
    sender.start(1, HUGE)
    sender.send()
    sender.outbox.answered(Answer(Status.STOP, 1, "revoked"))
    assert sender.send().head.kind is Kind.CANCEL
    sender.outbox.answered(Answer(Status.FAILED, 1, "revoked"))
    assert sender.ends == [Ended(1, "revoked")]


def test_an_abort_after_the_last_frame_waits_for_what_really_happened() -> None:
    sender = Sender()
    sender.start(1)
    sender.send()
    sender.outbox.stop(1, "aborted")
    assert not sender.outbox.has_frame
    sender.outbox.answered(Answer(Status.PLACED, 1))
    assert sender.ends == [Ended(1)]


def test_lost_connections_end_what_has_begun_and_only_that() -> None:
    sender = Sender()
    for number in (1, 2, 3):
        sender.start(number, HUGE)
    first = sender.outbox.next()
    sender.outbox.lost("cut")
    assert not sender.ends  # a thread still reads its bytes
    sender.outbox.sent(first.job)
    assert sender.ends == [Ended(1, "cut")]
    assert sender.send().job.write.id == 2


def test_writes_that_nobody_can_be_reached_for_all_end() -> None:
    sender = Sender()
    sender.start(1)
    sender.start(2)
    sender.outbox.unreachable("nobody there")
    assert sender.ends == [Ended(1, "nobody there"), Ended(2, "nobody there")]


def test_writes_without_an_answer_are_bounded() -> None:
    sender = Sender()
    for number in range(WINDOW + 5):
        sender.start(number)
    for _ in range(WINDOW):
        sender.send()
    assert not sender.outbox.has_frame
    sender.outbox.answered(Answer(Status.PLACED, 3))
    assert sender.outbox.has_frame


def test_an_answer_before_the_write_is_whole_is_refused() -> None:
    sender = Sender()
    sender.start(1, HUGE)
    sender.send()
    with pytest.raises(BadMessage):
        sender.outbox.answered(Answer(Status.PLACED, 1))
    sender.outbox.answered(Answer(Status.PLACED, 77))  # unknown: an echo


@given(st.lists(st.integers(0, 99), max_size=60))
def test_whatever_happens_each_write_ends_once_and_not_while_it_is_sent(steps: list[int]) -> None:
    """CASES 61: over all orders of frames, answers, aborts and lost connections."""
    sender, started, sending = Sender(), 0, list[Frame]()
    for step in steps:
        match step % 8:
            case 0 | 1:
                sender.start(started, HUGE if step % 3 else 10)
                started += 1
            case 2 | 3 if sender.outbox.has_frame:
                sending.append(sender.outbox.next())
            case 4 if sending:
                sender.outbox.sent(sending.pop(step % len(sending)).job)
            case 5:
                sender.outbox.stop(step % 7, "aborted")
            case 6:
                try:
                    sender.outbox.answered(Answer(Status(step % 3), step % 7, "there"))
                except BadMessage:
                    sender.outbox.lost("cut")
            case 7 if step > 80:
                sender.outbox.lost("cut")
            case _:
                pass
        over = [end.id for end in sender.ends]
        assert len(over) == len(set(over))
        assert not {frame.job.write.id for frame in sending} & set(over)
    sender.outbox.stop_all("closed")
    sender.outbox.lost("closed")
    for frame in sending:
        sender.outbox.sent(frame.job)
    assert sorted(end.id for end in sender.ends) == list(range(started))
    assert sender.outbox.is_empty
    assert not sender.outbox.has_frame


def test_a_write_of_nothing_is_one_frame() -> None:
    cuts = Cuts(NO_RUNS)
    part, payload = cuts.next()
    assert (len(part), payload, cuts.is_over) == (0, 0, True)
