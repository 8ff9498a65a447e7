"""Chunks that are passed on unread: whatever the pieces they come in, no byte differs."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.control.wire.chunks import end_of_data, is_one_chunk
from pdrt.control.wire.client import Call, Connection, Lost, Pool

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TRICKY = (b"\r\n", b"8\r\n12345678\r\n", b"0\r\n\r\n", b"5", b"c8\r\n", b"\n\n", b"x" * 14)


def chunk(data: bytes, way: int = 0) -> bytes:
    """In one of the ways in which the size may be written."""
    size = (b"%x", b"%X", b"0%x", b"%x;some=thing")[way] % len(data)
    return b"%b\r\n%b\r\n" % (size, data)


@pytest.mark.parametrize("size", [2, 9, 10, 14, 15, 16, 200, 255, 256, 2040])
def test_a_chunk_is_known_by_its_length(size: int) -> None:
    whole = chunk(b"z" * (size - 2) + b"ab")
    assert is_one_chunk(whole)
    assert end_of_data(whole) == b"ab"
    assert not is_one_chunk(whole[:-1])
    assert not is_one_chunk(whole[1:])
    assert not is_one_chunk(whole + whole)
    assert not is_one_chunk(whole.replace(b"ab", b"b"))
    assert not is_one_chunk(whole.replace(b"ab", b"abc"))
    assert not is_one_chunk(whole[:-2] + b"xx")


@pytest.mark.parametrize("begin", [b"\n", b"0", b"\r\n", b"-1", b"zz"])
@pytest.mark.parametrize("length", [*range(30), *range(255, 270)])
def test_no_length_makes_a_chunk_of_what_does_not_begin_as_one(length: int, begin: bytes) -> None:
    assert not is_one_chunk(begin + b"\r\n" + b"x" * length + b"\r\n")
    assert not is_one_chunk(begin + b"x" * length + b"\r\n")


@pytest.mark.parametrize("data", [b"", b"\n", b"0\r\n\r\n", b"1\r\nx\r\n", chunk(b"z" * 5000)])
def test_what_is_none_or_too_short_or_too_long_is_read(data: bytes) -> None:
    assert not is_one_chunk(data)


@dataclass
class Told:
    """What a call's owner hears, as bytes of the answer."""

    body: bytes = b""
    passed: int = 0  # chunks that came unread
    ends: int = 0
    lost: list[Lost] = field(default_factory=list)

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        assert status == 200

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_chunk(self, chunk: bytes) -> None:
        size, _, rest = chunk.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2
        self.body += rest[:-2]
        self.passed += 1

    def on_end(self) -> None:
        self.ends += 1

    def on_lost(self, lost: Lost) -> None:
        self.lost.append(lost)


class Wire:
    """Stands for the transport, the pool and its outbox: nothing that is sent matters here."""

    where = "a backend"
    received = 0

    @property
    def outbox(self) -> Wire:
        return self

    def write(self, *_data: object) -> None:
        pass

    def ignore(self, *_said: object) -> None:
        pass

    came = left = back = close = abort = flush = ignore

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _name: str) -> Wire:
        return self

    setsockopt = ignore


def answered(pieces: list[bytes], *, offered: bool = True) -> Told:
    told, wire = Told(), Wire()
    connection, call = Connection(cast("Pool", wire)), Call(told)
    connection.connection_made(cast("asyncio.BaseTransport", wire))
    connection.send(call, b"", b"")
    if offered:
        call.pass_chunks(told.on_chunk)
    for piece in pieces:
        connection.data_received(piece)
    return told


DATA = st.one_of(st.binary(min_size=1, max_size=40), st.sampled_from(TRICKY))


@given(
    chunks=st.lists(st.tuples(DATA, st.integers(0, 3)), max_size=12),
    trailer=st.sampled_from([b"", b"8: 2\r\n"]),
    draw=st.data(),
)
def test_an_answer_is_the_same_however_it_is_cut(
    chunks: list[tuple[bytes, int]], trailer: bytes, draw: st.DataObject
) -> None:
    parts = [HEAD, *(chunk(*each) for each in chunks), b"0\r\n%b\r\n" % trailer]
    ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts) - 1)]
    wire = b"".join(parts)
    # Most cuts are where chunks end, as they come in life, or close to it.
    near = st.sampled_from(ends).flatmap(lambda end: st.integers(end - 3, end + 5))
    cuts = draw.draw(st.sets(st.one_of(st.sampled_from(ends), near, st.integers(1, len(wire)))))
    at = sorted({0, len(wire), *(cut for cut in cuts if 0 < cut < len(wire))})
    pieces = [wire[start:end] for start, end in pairwise(at)]
    told = answered(pieces)
    assert told.body == b"".join(data for data, _ in chunks)
    assert told.ends == 1
    assert not told.lost


def test_a_size_that_is_cut_in_two_is_no_chunk_of_its_own() -> None:
    """A chunk of 0x18 bytes; what follows its first digit looks like a whole one of 8."""
    data = b"8 bytes.\r\n" + b"and fourteen.."
    wire = chunk(data)
    assert wire.startswith(b"18\r\n")
    told = answered([HEAD + chunk(b"so"), wire[:1], wire[1:14], wire[14:], b"0\r\n\r\n"])
    assert is_one_chunk(wire[1:14])
    assert told.body == b"so" + data
    assert told.ends == 1


def test_data_that_look_like_a_chunk_are_data() -> None:
    inner = chunk(b"12345678")
    begins = chunk(b"so") + b"%x\r\n" % len(inner)
    told = answered([HEAD, begins, inner, b"\r\n", b"0\r\n\r\n"])
    assert told.body == b"so" + inner
    assert told.ends == 1


def test_chunks_that_come_one_by_one_are_passed_on_unread_but_for_the_first() -> None:
    pieces = [HEAD, *(chunk(b"data: %d\n\n" % number) for number in range(5)), b"0\r\n\r\n"]
    told = answered(pieces)
    assert told.passed == 4
    assert told.body == b"".join(b"data: %d\n\n" % number for number in range(5))
    assert not answered(pieces, offered=False).passed


@given(
    chunks=st.lists(DATA, min_size=1, max_size=6),
    wrong=st.sampled_from([b"", b"\n", b"\r\n", b"0", b"x", b"\n\r\n", b"\n0\r\n\r\n"]),
    draw=st.data(),
)
def test_what_went_wrong_on_the_way_is_told_alike_with_and_without_passing_on(
    chunks: list[bytes], wrong: bytes, draw: st.DataObject
) -> None:
    wire = b"".join(map(chunk, chunks)) + b"0\r\n\r\n"
    at = draw.draw(st.integers(0, len(wire)))
    cut = draw.draw(st.integers(0, 4))
    wire = wire[:at] + wrong + wire[at + cut :]
    cuts = draw.draw(st.sets(st.integers(0, len(wire))))
    ends = sorted({0, at, at + len(wrong), *cuts, len(wire)})
    pieces = [HEAD, *(piece for one, other in pairwise(ends) if (piece := wire[one:other]))]
    passed, read = answered(pieces), answered(pieces, offered=False)
    assert (passed.body, passed.ends) == (read.body, read.ends)
    assert [each.what for each in passed.lost] == [each.what for each in read.lost]


def test_the_next_answer_on_a_connection_begins_with_nothing_passed() -> None:
    connection = Connection(cast("Pool", Wire()))
    connection.connection_made(cast("asyncio.BaseTransport", Wire()))
    whole = [HEAD + chunk(b"a"), chunk(b"bc"), b"0\r\n\r\n"]
    for pieces, ends in (whole, 1), (whole, 1), ([chunk(b"no head has come")], 0):
        told = Told()
        call = Call(told)
        connection.send(call, b"", b"")
        call.pass_chunks(told.on_chunk)
        for piece in pieces:
            connection.data_received(piece)
        assert (told.passed, told.ends, bool(told.lost)) == (ends, ends, not ends)


def test_a_call_that_is_over_passes_nothing_on_and_keeps_nobody() -> None:
    told = Told()
    call = Call(told)
    call.cancel()
    call.pass_chunks(told.on_chunk)
    assert call.on_chunk is None


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
@pytest.mark.parametrize("is_lost", [False, True])
def test_chunks_that_are_expected_are_acknowledged_with_others(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[object, ...]] = []

    def note(_wire: Wire, *option: object) -> None:
        said.append(option)
        if is_lost:
            raise OSError("bad file descriptor")

    monkeypatch.setattr(Wire, "setsockopt", note)
    answered([HEAD])
    assert said == [(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)]


def test_a_tls_connection_that_is_lost_has_no_socket_to_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Wire, "get_extra_info", lambda _wire, _name: None)
    assert answered([HEAD, chunk(b"one"), chunk(b"two"), b"0\r\n\r\n"]).body == b"onetwo"


def test_what_is_no_chunk_where_one_must_begin_is_told() -> None:
    told = answered([HEAD, chunk(b"one"), chunk(b"two"), b"three"])
    assert told.body == b"onetwo"
    assert [lost.what for lost in told.lost] == ["broke off its answer"]
    assert not told.ends
