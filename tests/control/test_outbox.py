"""Writes wait for the end of a turn, in their order, and never for longer than they may."""

from __future__ import annotations

import asyncio
from typing import cast

from pdrt.control.wire.connection import Connection
from pdrt.control.wire.connection import Host as AnyHost
from pdrt.control.wire.outbox import MOST, Outbox


class Wire:
    """A transport that notes what is written."""

    def __init__(self, told: list[tuple[str, bytes]], name: str) -> None:
        self._told, self._name = told, name
        self.has_ended = False

    def write(self, data: bytes) -> None:
        self._told.append((self._name, data))

    def is_closing(self) -> bool:
        return self.has_ended

    def set_write_buffer_limits(self, *, high: int) -> None:
        pass

    def get_extra_info(self, _name: str) -> None:
        pass

    @property
    def transport(self) -> asyncio.Transport:
        return cast("asyncio.Transport", self)


async def test_what_a_turn_writes_is_written_at_its_end_and_in_its_order() -> None:
    told: list[tuple[str, bytes]] = []
    one, other, outbox = Wire(told, "one"), Wire(told, "other"), Outbox()
    outbox.write(one.transport, b"1")
    outbox.write(other.transport, b"2")
    outbox.write(one.transport, b"3")
    assert told == []
    await asyncio.sleep(0)
    assert told == [("one", b"1"), ("other", b"2"), ("one", b"3")]
    outbox.write(one.transport, b"4")
    await asyncio.sleep(0)
    assert told[3:] == [("one", b"4")]


async def test_more_than_a_little_does_not_wait() -> None:
    """Else a reader that has stopped would be found out with megabytes on their way."""
    told: list[tuple[str, bytes]] = []
    wire, outbox = Wire(told, "one"), Outbox()
    for _ in range(MOST // 1024):
        outbox.write(wire.transport, b"x" * 1024)
    assert told == []
    outbox.write(wire.transport, b"x")
    assert sum(len(data) for _, data in told) == MOST + 1


async def test_what_was_flushed_is_not_written_again_and_nothing_goes_to_the_closed() -> None:
    told: list[tuple[str, bytes]] = []
    one, other, outbox = Wire(told, "one"), Wire(told, "other"), Outbox()
    outbox.write(one.transport, b"1")
    outbox.flush()
    outbox.write(other.transport, b"2")
    other.has_ended = True
    await asyncio.sleep(0)
    assert told == [("one", b"1")]


class Host:
    """What a connection asks of its server before anything is read."""

    now = 0.0

    def __init__(self) -> None:
        self.outbox = Outbox()

    def came(self, _connection: Connection) -> None:
        pass


async def test_what_is_sent_now_comes_after_what_waits() -> None:
    told: list[tuple[str, bytes]] = []
    connection = Connection(cast("AnyHost", Host()))
    connection.connection_made(Wire(told, "one").transport)
    connection.send(b"1")
    connection.send_now(b"2")
    assert told == [("one", b"1"), ("one", b"2")]
    await asyncio.sleep(0)
    assert len(told) == 2
