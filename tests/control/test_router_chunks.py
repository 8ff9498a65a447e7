"""Streams of plain backends: chunks that come alone pass unread, and are counted like others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdrt.control.wire.exchange import Exchange
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
    told = b""
    for gate in gates:
        told += await reader.readuntil(b"\n\n")
        gate.set()
    told += await reader.read()
    writer.close()
    return told


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
        before = r.instance(r.decode[0]).signs
        async with r.session.post(r.url + "/generate", data=BODY) as answer:
            for event, gate in zip(EVENTS, gates, strict=True):
                assert await answer.content.readexactly(len(event)) == event
                gate.set()
            assert await answer.read() == b""
        assert passed == [b"9\r\n%b\r\n" % event for event in EVENTS[1:]]
        assert r.instance(r.decode[0]).signs == before + len(EVENTS)
        await r.at_rest()
        r.time.now += 1
        assert sum(second.pieces for second in r.router.screen.flow.series(r.time.now)) == 4


async def test_a_stream_that_may_move_is_read_all_along(passed: list[bytes]) -> None:
    async with rig() as r:
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
        told = await read_all(r, minor)
        chunks = [b"9\r\n%b\r\n" % event for event in EVENTS]
        assert told == (b"".join([*chunks, b"0\r\n\r\n"]) if minor else b"".join(EVENTS))
        assert bool(passed) == bool(minor)
        await r.at_rest()
