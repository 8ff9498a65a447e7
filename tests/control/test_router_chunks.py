"""Streams of plain backends: chunks that come alone pass unread, and are counted like others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdrt.control.wire.exchange import Exchange
from pdrt.control.wire.request import Request
from pdrt.errors import Conflict
from tests.control.fake_leader import stream
from tests.control.router_rig import Rig, rig

EVENTS = [b"data: %d\n\n" % number for number in range(4)]
BODY = b'{"prompt": "hi", "stream": true}'


def one_by_one(r: Rig, events: Sequence[bytes] = EVENTS) -> list[asyncio.Event]:
    """Gates behind the next stream's events: what follows is sent when it is let."""
    gates = [asyncio.Event() for _ in events]
    pairs = zip(events, gates, strict=True)
    r.decode[0].plays.append(stream(*(each for pair in pairs for each in pair)))
    return gates


async def read_all(r: Rig, minor: int) -> bytes:
    """All that an HTTP/1.x client gets behind the head, each event let when the last is here."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]))
    head = b"POST /generate HTTP/1.%d\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    gates = one_by_one(r)
    writer.write(head % (minor, len(BODY)) + BODY)
    await reader.readuntil(b"\r\n\r\n")
    got = b""
    for gate in gates:
        got += await reader.readuntil(b"\n\n")
        gate.set()
    got += await reader.read()
    writer.close()
    return got


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The chunks that pass unread."""
    found: list[bytes] = []
    really = Exchange.pass_on

    def note(exchange: Exchange, chunk: bytes) -> None:
        found.append(chunk)
        really(exchange, chunk)

    monkeypatch.setattr(Exchange, "pass_on", note)
    return found


async def test_all_but_the_first_pass_unread_and_all_are_counted(passed: list[bytes]) -> None:
    async with rig(policy={"backends": "plain"}) as r:
        gates = one_by_one(r)
        assert r.router.tools is not None, "it runs"
        decode, signs = r.instance(r.decode[0]), r.router.tools.upstream.signs
        before = signs(decode)
        async with r.session.post(r.url + "/generate", data=BODY) as answer:
            for event, gate in zip(EVENTS, gates, strict=True):
                assert await answer.content.readexactly(len(event)) == event
                gate.set()
            assert await answer.read() == b""
        assert passed == [b"9\r\n%b\r\n" % event for event in EVENTS[1:]]
        assert signs(decode) == before + len(EVENTS)
        await r.at_rest()
        r.time.now += 1
        assert sum(second.pieces for second in r.router.screen.flow.series(r.time.now)) == 4


@pytest.mark.parametrize("migrate", [True, False])
async def test_a_leaders_stream_is_read_all_along(passed: list[bytes], migrate: bool) -> None:
    async with rig(policy={"migrate": migrate}) as r:
        ends = ["-", "-", "-", "length"]
        marks = [f":t 0 1 0 {end} 7\n".encode() for end in ends]
        gates = one_by_one(r, [b"".join(pair) for pair in zip(marks, EVENTS, strict=True)])
        async with r.session.post(r.url + "/generate", data=BODY) as answer:
            for event, gate in zip(EVENTS, gates, strict=True):
                assert await answer.content.readexactly(len(event)) == event
                gate.set()
            assert await answer.read() == b"data: [DONE]\n\n"
        assert not passed
        await r.at_rest()


@pytest.mark.parametrize("minor", [0, 1])
async def test_a_client_gets_chunks_only_where_it_knows_them(
    minor: int, passed: list[bytes]
) -> None:
    async with rig(policy={"backends": "plain"}) as r:
        got = await read_all(r, minor)
        chunks = [b"9\r\n%b\r\n" % event for event in EVENTS]
        assert got == (b"".join([*chunks, b"0\r\n\r\n"]) if minor else b"".join(EVENTS))
        assert bool(passed) == bool(minor)
        await r.at_rest()


class Kept:
    """A connection that keeps what is sent."""

    is_full = False

    def __init__(self) -> None:
        self.sent = b""

    def send(self, data: bytes) -> None:
        self.sent += data

    send_now = send

    def head_lines(self, request: Request) -> bytes:
        return b""

    def ended(self, exchange: Exchange, *, is_whole: bool) -> None:
        pass


def begun(line: Kept, content_type: bytes = b"text/event-stream") -> Exchange:
    asked = Request("POST", "/generate", "", {}, is_1_1=True, keeps_alive=True)
    exchange = Exchange(line, asked, "router")
    takes = exchange.start(200, {b"content-type": content_type})
    assert (takes is not None) == (content_type == b"text/event-stream")
    return exchange


def test_only_an_event_stream_takes_chunks_as_they_travel() -> None:
    begun(Kept(), b"text/plain")
    begun(Kept(), b"application/json")


def test_a_chunk_comes_after_the_head_and_none_after_the_end() -> None:
    line = Kept()
    exchange = begun(line)
    exchange.pass_on(b"2\r\nab\r\n")
    assert line.sent.startswith(b"HTTP/1.1 200 ")
    assert line.sent.endswith(b"\r\n\r\n2\r\nab\r\n")
    exchange.finish()
    whole = line.sent
    exchange.pass_on(b"2\r\ncd\r\n")
    assert line.sent == whole


@pytest.mark.parametrize(
    "pieces",
    [
        ["passed", "half", "passed", "whole"],
        ["passed", "half"],
        ["passed", "half", "written", "whole"],
        ["passed", "whole", "written", "half"],
        ["written", "half", "passed", "whole"],
        ["written", "whole", "passed", "half"],
    ],
)
def test_an_event_left_half_is_ended_before_the_error_however_it_came(pieces: list[str]) -> None:
    line = Kept()
    exchange = begun(line)
    for way, what in zip(pieces[::2], pieces[1::2], strict=True):
        data = b"data: x\n\n" if what == "whole" else b"data: x"
        if way == "passed":
            exchange.pass_on(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            exchange.write(data)
    exchange.break_off(Conflict("enough"))
    assert (b"\r\n\n\nevent: error\n" in line.sent) == (pieces[-1] == "half")
    assert b"event: error\n" in line.sent


def test_a_streams_type_is_known_in_any_case() -> None:
    asked = Request("POST", "/generate", "", {}, is_1_1=True, keeps_alive=True)
    exchange = Exchange(Kept(), asked, "router")
    assert exchange.start(200, {b"content-type": b"Text/Event-Stream; charset=utf-8"}) is not None
