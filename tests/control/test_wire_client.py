"""The router's HTTP client: answers in pieces, kept connections, and ends that are always told."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from pdrt.control.wire.client import (
    ERROR_S,
    FORGET_S,
    IDLE_S,
    MAX_HEAD_BYTES,
    Call,
    Lost,
    Pool,
    Pools,
)

Play = Callable[["Peer"], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass
class Peer:
    """The other end of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def is_gone(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True


@dataclass
class FakeSink:
    """Writes down what it is told."""

    status: int = 0
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    ends: int = 0
    lost: list[Lost] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status, self.headers = status, headers
        self.came.set()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.ends += 1
        self.over.set()

    def on_lost(self, lost: Lost) -> None:
        self.lost.append(lost)
        self.over.set()


class Rig:
    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.peers: list[Peer] = []
        self.arrived = asyncio.Event()
        self.url = ""

    @property
    def pool(self) -> Pool:
        return self.pools.pool(self.url)

    def ask(self) -> tuple[Call, FakeSink]:
        sink = FakeSink()
        return self.pool.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"", sink), sink

    async def peer(self, count: int = 1) -> Peer:
        """The count-th connection, once its request is here."""
        while len(self.peers) < count:
            self.arrived.clear()
            await self.arrived.wait()
        await self.peers[count - 1].request()
        return self.peers[count - 1]

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.append(Peer(reader, writer))
        self.arrived.set()


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    found = Rig(Pools(connect_s=5))
    server = await asyncio.start_server(found.accept, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        await found.pools.close()
        server.close()
        for peer in found.peers:
            peer.writer.transport.abort()


async def test_a_connection_is_used_again_and_answers_are_told_once() -> None:
    async with rig() as r:
        for _ in range(3):
            _, sink = r.ask()
            peer = await r.peer()
            peer.say(OK)
            await sink.over.wait()
            assert (sink.status, sink.body, sink.ends, sink.lost) == (200, b"ok", 1, [])
        assert len(r.peers) == 1


async def test_calls_at_a_time_have_connections_of_their_own() -> None:
    async with rig() as r:
        sinks = [r.ask()[1] for _ in range(3)]
        for count in (1, 2, 3):
            (await r.peer(count)).say(OK)
        for sink in sinks:
            await sink.over.wait()
        assert len(r.peers) == 3


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
    ],
)
async def test_other_forms_of_a_whole_answer(answer: bytes) -> None:
    async with rig() as r:
        _, sink = r.ask()
        (await r.peer()).say(answer)
        await sink.over.wait()
        assert (sink.status, sink.body, sink.ends) == (200, b"ok", 1)


@pytest.mark.parametrize("status", [0, 99, 600, 999])
async def test_a_status_that_there_is_not_is_the_answers_all_the_same(status: int) -> None:
    """What it means is not for us to say; that more is to come is what 1xx says."""
    async with rig() as r:
        _, sink = r.ask()
        (await r.peer()).say(b"HTTP/1.1 %03d X\r\ncontent-length: 2\r\n\r\nok" % status)
        async with asyncio.timeout(5):
            await sink.over.wait()
        assert (sink.status, sink.ends) == (status, 1)


async def test_an_answer_without_a_length_that_is_reset_is_not_whole() -> None:
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(b"HTTP/1.1 200 OK\r\n\r\nok")
        await sink.came.wait()
        link = peer.writer.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.writer.transport.abort()
        async with asyncio.timeout(5):
            await sink.over.wait()
        assert (sink.ends, [lost.what for lost in sink.lost]) == (0, ["broke off its answer"])


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(b"HTTP/1.1 200 OK\r\n\r\nok")
        peer.writer.close()
        await sink.over.wait()
        assert (sink.body, sink.ends) == (b"ok", 1)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-len", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "broke off its answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no", "broke off its answer"),
        (b"junk\r\n\r\n", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 2 * MAX_HEAD_BYTES, "closed the connection without"),
    ],
)
async def test_an_answer_that_breaks_off_is_lost(answer: bytes, what: str) -> None:
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(answer)
        await peer.writer.drain()
        peer.writer.close()
        await sink.over.wait()
        assert sink.ends == 0
        assert [lost.what.startswith(what) for lost in sink.lost] == [True]
        assert not sink.lost[0].is_refused


async def test_a_refused_connection_is_told_as_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    client, sink = Pools(connect_s=5), FakeSink()
    client.pool(f"http://127.0.0.1:{port}").send(b"GET / HTTP/1.1\r\n\r\n", b"", sink)
    await sink.over.wait()
    assert sink.lost[0].is_refused
    assert "refused" in sink.lost[0].cause
    await client.close()


async def test_a_cancelled_call_closes_its_connection_and_says_nothing() -> None:
    async with rig() as r:
        call, sink = r.ask()
        peer = await r.peer()
        call.cancel()
        assert await peer.is_gone()
        assert (sink.ends, sink.lost) == (0, [])
        call.cancel()
        call.pause()
        call.resume()


async def test_a_call_cancelled_while_it_connects_says_nothing() -> None:
    async with rig() as r:
        call, sink = r.ask()
        call.cancel()
        _, other = r.ask()
        (await r.peer()).say(OK)
        await other.over.wait()
        assert (sink.ends, sink.lost) == (0, [])


async def test_a_finished_call_cannot_cancel_the_one_after_it() -> None:
    async with rig() as r:
        first, sink = r.ask()
        peer = await r.peer()
        peer.say(OK)
        await sink.over.wait()
        _, second = r.ask()
        first.cancel()
        await peer.request()
        peer.say(OK)
        await second.over.wait()
        assert second.ends == 1


@pytest.mark.parametrize("more", [b"x", OK])
async def test_more_than_was_asked_for_ends_the_connection(more: bytes) -> None:
    """Else it would be read as the answer to the next request."""
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(OK + more)
        await sink.over.wait()
        _, second = r.ask()
        (await r.peer(2)).say(OK)
        await second.over.wait()
        assert second.body == b"ok"


async def test_an_answer_that_says_close_is_not_followed_by_another() -> None:
    async with rig() as r:
        _, sink = r.ask()
        (await r.peer()).say(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        await sink.over.wait()
        _, second = r.ask()
        (await r.peer(2)).say(OK)
        await second.over.wait()


async def test_a_connection_that_was_closed_meanwhile_is_not_used() -> None:
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(OK)
        await sink.over.wait()
        peer.writer.close()
        while r.pool.open:
            await asyncio.sleep(0)
        _, second = r.ask()
        (await r.peer(2)).say(OK)
        await second.over.wait()
        assert second.ends == 1


async def test_idle_connections_end() -> None:
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(OK)
        await sink.over.wait()
        now = asyncio.get_running_loop().time()
        r.pool.look(now + IDLE_S - 1)
        assert r.pool.open == 1
        r.pool.look(now + IDLE_S + 1)
        assert await peer.is_gone()


async def test_an_address_that_nobody_calls_any_more_is_forgotten() -> None:
    """Members come and go for as long as the router lives."""
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(OK)
        await sink.over.wait()
        pool, now = r.pool, asyncio.get_running_loop().time()
        r.pools.look(now + 2 * FORGET_S)  # its connection was idle, and ends
        assert r.pool is pool
        assert await peer.is_gone()
        r.pools.look(now + 3 * FORGET_S - 1)
        assert r.pool is pool
        r.pools.look(now + 3 * FORGET_S + 1)
        assert r.pool is not pool


async def test_a_call_that_is_paused_before_its_connection_is_there_reads_nothing() -> None:
    async with rig() as r:
        call, sink = r.ask()
        call.pause()
        (await r.peer()).say(OK)
        _, other = r.ask()
        (await r.peer(2)).say(OK)  # said later
        await other.over.wait()
        assert (sink.status, sink.ends) == (0, 0)
        call.resume()
        await sink.over.wait()
        assert (sink.body, sink.ends) == (b"ok", 1)


async def test_a_paused_call_reads_no_more_until_it_is_resumed() -> None:
    async with rig() as r:
        call, sink = r.ask()
        peer = await r.peer()
        peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 67108864\r\n\r\n")
        await sink.came.wait()
        call.pause()
        sent = 0
        while not peer.writer.transport.get_write_buffer_size():
            peer.say(b"x" * 65536)
            sent += 65536
            await asyncio.sleep(0)
        before = len(sink.body)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(sink.body) == before < sent < 64 << 20
        call.resume()
        while len(sink.body) < sent:
            await asyncio.sleep(0)


# What is not of an answer.

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n"


async def test_what_trails_an_answer_is_not_of_its_head() -> None:
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(CHUNKED + b"0\r\ncontent-type: c/d\r\nx-more: 1\r\n\r\n")
        await sink.over.wait()
        assert (sink.body, sink.ends) == (b"ok", 1)
        assert sink.headers == {b"content-type": b"a/b", b"transfer-encoding": b"chunked"}


@pytest.mark.parametrize("line", [b"0\r\n" + b"x: y\r\n" * 40_000, b"2;" + b"x" * 200_000])
async def test_what_is_beside_a_body_is_bounded(line: bytes) -> None:
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(CHUNKED + line)
        await sink.over.wait()
        assert f"of more than {MAX_HEAD_BYTES} bytes" in sink.lost[0].cause
        assert await peer.is_gone()


async def test_a_body_may_be_as_long_as_it_likes() -> None:
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        long = 4 * MAX_HEAD_BYTES
        peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % long + b"x" * long)
        await sink.over.wait()
        assert (len(sink.body), sink.lost) == (long, [])


async def test_another_protocol_is_not_spoken() -> None:
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, told: faults.append(told))
    async with rig() as r:
        _, sink = r.ask()
        peer = await r.peer()
        peer.say(b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nPRI")
        await sink.over.wait()
        assert "another protocol" in sink.lost[0].cause
        assert await peer.is_gone()
    assert not faults


async def test_an_errors_text_is_not_waited_for_as_long_as_an_answers() -> None:
    """CASES 1: its status says enough, and the other leg holds memory meanwhile."""
    async with rig() as r:
        _, refused = r.ask()
        one = await r.peer()
        _, good = r.ask()
        other = await r.peer(2)
        one.say(b"HTTP/1.1 400 Bad\r\ncontent-length: 50\r\n\r\nbecause of")
        other.say(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nonce upon")
        await refused.came.wait()
        await good.came.wait()
        now = asyncio.get_running_loop().time()
        r.pools.look(now)
        assert not refused.ends
        r.pools.look(now + ERROR_S + 0.01)
        assert (refused.status, refused.body, refused.ends) == (400, b"because of", 1)
        assert await one.is_gone()
        assert not good.over.is_set()


async def test_a_connection_whose_error_has_ended_is_kept() -> None:
    async with rig() as r:
        _, refused = r.ask()
        peer = await r.peer()
        peer.say(OK.replace(b"200 OK", b"400 Bad"))
        await refused.over.wait()
        _, good = r.ask()
        await peer.request()
        r.pools.look(asyncio.get_running_loop().time() + ERROR_S + 0.01)
        peer.say(OK)
        await good.over.wait()
        assert (good.status, good.body, r.pool.open) == (200, b"ok", 1)
