"""What tcp says, as bytes: who is believed, and that no bit of it can be changed."""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.data.transport.promise import SlotWrite
from pdrt.data.transport.tcp_wire import (
    BANNER_BYTES,
    HEADER_BYTES,
    NAME_BYTES,
    Answer,
    Answers,
    FrameBuffer,
    Greeting,
    Head,
    Kind,
    Offer,
    Status,
    Verdict,
)
from pdrt.errors import BadMessage, TransferFailed
from pdrt.keys import ClusterKey
from tests.data.tcp_rig import runs_of

KEY = ClusterKey(b"a secret of sixteen bytes")
NAME = bytes(NAME_BYTES)
LENGTHS = st.lists(st.integers(0, 300), max_size=40)


# The greeting.


def greet(writer: ClusterKey, target: ClusterKey) -> bool:
    """Whether both sides let the other in and have the same keys."""
    ours, theirs = Greeting(writer), Greeting(target)
    hello = ours.hello(theirs.banner(), NAME, NAME)
    assert theirs.heard(hello) == (NAME, NAME)
    assert ours.judged(theirs.verdict(Verdict.WELCOME)) is Verdict.WELCOME
    return ours.keys() == theirs.keys()


def test_two_members_greet_and_have_fresh_keys_in_common() -> None:
    assert greet(KEY, KEY)
    first, second = Greeting(KEY), Greeting(KEY)
    first.hello(Greeting(KEY).banner(), NAME, NAME)
    second.hello(Greeting(KEY).banner(), NAME, NAME)
    assert first.keys() != second.keys()
    assert first.keys().frames != first.keys().answers


def test_a_writer_with_another_key_is_not_let_in() -> None:
    with pytest.raises(BadMessage, match="without the cluster key"):
        greet(ClusterKey.fresh(), KEY)


def test_a_target_with_another_key_is_found_out() -> None:
    ours, theirs = Greeting(KEY), Greeting(ClusterKey.fresh())
    ours.hello(theirs.banner(), NAME, NAME)
    with pytest.raises(BadMessage, match="does not have the cluster key"):
        ours.judged(theirs.verdict(Verdict.WELCOME))


def test_a_writer_s_own_words_sent_back_to_it_prove_nothing() -> None:
    ours = Greeting(KEY)
    hello = ours.hello(Greeting(KEY).banner(), NAME, NAME)
    with pytest.raises(BadMessage):
        ours.judged(bytes([Verdict.WELCOME]) + hello[-32:])


@given(at=st.integers(0, BANNER_BYTES + 2 * NAME_BYTES + 31))
def test_no_bit_of_a_hello_can_be_changed(at: int) -> None:
    """The memory and the link that it names among them."""
    theirs = Greeting(KEY)
    hello = bytearray(Greeting(KEY).hello(theirs.banner(), NAME, NAME))
    hello[at] ^= 1
    with pytest.raises(BadMessage):
        theirs.heard(bytes(hello))


def test_a_verdict_cannot_be_changed() -> None:
    ours, theirs = Greeting(KEY), Greeting(KEY)
    theirs.heard(ours.hello(theirs.banner(), NAME, NAME))
    verdict = theirs.verdict(Verdict.OTHER_MEMORY)
    with pytest.raises(BadMessage):
        ours.judged(bytes([Verdict.WELCOME]) + verdict[1:])


def test_an_offer_comes_back_as_it_was() -> None:
    offer = Offer("10.0.0.1", 4711, os.urandom(NAME_BYTES))
    assert Offer.unpack(offer.pack()) == offer
    assert str(offer) == "10.0.0.1:4711"


@given(st.binary(max_size=80))
def test_an_offer_of_any_bytes_is_an_offer_or_refused(data: bytes) -> None:
    with suppress(TransferFailed):
        Offer.unpack(data)


# Frames and answers.


def passed_on(sender: FrameBuffer, receiver: FrameBuffer, length: int) -> Head:
    """What a receiver makes of a frame that was packed."""
    data = sender.view[sender.sent_at : sender.sent_at + length]
    receiver.header[:] = data[:HEADER_BYTES]
    head = receiver.head()
    receiver.rest(head)[:] = data[HEADER_BYTES:]
    return head


@given(LENGTHS, st.one_of(st.none(), st.binary(min_size=1, max_size=200)), st.booleans())
def test_a_frame_arrives_as_it_was_packed(
    lengths: list[int], slot: bytes | None, is_last: bool
) -> None:
    sender, receiver = FrameBuffer(b"k"), FrameBuffer(b"k")
    runs, written = runs_of(lengths), SlotWrite(77, slot) if slot else None
    sizes = (len(lengths), sum(lengths), len(slot or b""))
    for number in range(2):
        head = Head(Kind.DATA, number, (1 << 62, 7), is_last, 5, *sizes)
        assert passed_on(sender, receiver, sender.pack(head, runs, written)) == head
        areas, found = receiver.table(head)
        assert np.array_equal(areas, runs[:, 1:])
        assert found == written


@given(st.integers(0, HEADER_BYTES + 2 * 16 + 8 + 64 + 16 - 1), st.integers(0, 7))
def test_no_bit_of_a_frame_can_be_changed(at: int, bit: int) -> None:
    sender, receiver = FrameBuffer(b"k"), FrameBuffer(b"k")
    head = Head(Kind.DATA, 1, (2, 3), True, 30, 2, 30, 64)
    length = sender.pack(head, runs_of([10, 20]), SlotWrite(5, bytes(64)))
    sender.view[sender.sent_at + at] ^= 1 << bit
    with pytest.raises((BadMessage, ValueError)):  # ValueError: another length, so no such frame
        receiver.table(passed_on(sender, receiver, length))


def test_a_frame_of_another_place_in_the_order_is_forged() -> None:
    sender, receiver = FrameBuffer(b"k"), FrameBuffer(b"k")
    sender.pack(Head(Kind.PING))  # was left out on the way
    head = passed_on(sender, receiver, sender.pack(Head(Kind.PING)))
    with pytest.raises(BadMessage, match="wrong MAC"):
        receiver.table(head)


@given(st.lists(st.tuples(st.sampled_from(Status), st.text(max_size=40)), max_size=6), st.data())
def test_answers_are_parsed_however_they_are_split(
    answers: list[tuple[Status, str]], data: st.DataObject
) -> None:
    sender, receiver = Answers(b"k"), Answers(b"k")
    sent = [Answer(status, n, text) for n, (status, text) in enumerate(answers)]
    words = b"".join(sender.pack(answer) for answer in sent)
    found: list[Answer] = []
    while words:
        cut = data.draw(st.integers(1, len(words)))
        found += receiver.parse(words[:cut])
        words = words[cut:]
    assert found == [
        Answer(a.status, a.write, a.text.encode(errors="replace").decode()) for a in sent
    ]


@given(st.integers(0, 10), st.binary(min_size=40, max_size=60))
def test_an_answer_that_is_none_is_refused(at: int, junk: bytes) -> None:
    words = bytearray(Answers(b"k").pack(Answer(Status.PLACED, 1)))
    words[at] ^= 4
    for data in (bytes(words) + bytes(600), b"\xff" + junk):
        with pytest.raises(BadMessage):
            Answers(b"k").parse(data)
