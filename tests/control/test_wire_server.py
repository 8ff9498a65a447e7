"""The router's own HTTP server, over raw sockets: what it takes, refuses and bounds."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdrt.control.wire.connection import IDLE_S, LINGER_S, MAX_AHEAD, READ_S
from pdrt.control.wire.exchange import Exchange
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.control.wire.routes import Routes
from pdrt.control.wire.server import Server
from pdrt.errors import Conflict, PdrtError, Unauthorized

SLOW_S = 5.0


async def echo(request: Request) -> Reply:
    said = {"body": request.body.decode(), "params": request.params, "q": request.asked("q")}
    return Reply.json(said)


async def fail(_request: Request) -> Reply:
    raise Conflict("taken")


async def crash(_request: Request) -> Reply:
    raise ZeroDivisionError


def pieces(exchange: Exchange) -> None:
    exchange.start(200, {b"content-type": b"text/event-stream"})
    for part in (b"data: 1\n\n", b"data: 2\n\n"):
        exchange.write(part)
    exchange.finish()


@dataclass
class FakeSite:
    """Counts what begins and ends; refuses who says so."""

    routes: Routes = field(default_factory=Routes)
    began: int = 0
    ended: list[Exchange] = field(default_factory=list)
    stopped: int = 0
    held: list[Exchange] = field(default_factory=list)

    def begun(self, exchange: Exchange) -> PdrtError | Reply | None:
        self.began += 1
        if exchange.request.header("authorization") == "bad":
            return Unauthorized("no")
        if exchange.request.method == "OPTIONS":
            return Reply(204)
        return None

    def over(self, exchange: Exchange) -> None:
        self.ended.append(exchange)

    def head_lines(self, _request: Request) -> bytes:
        return b"x-more: yes\r\n"

    def stopped_reading(self, _exchange: Exchange) -> None:
        self.stopped += 1


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        code, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            return code, headers, await self._chunks()
        body = await self.reader.readexactly(int(headers["content-length"]))
        return code, headers, json.loads(body)

    async def _chunks(self) -> bytes:
        found = b""
        while True:
            size = int((await self.reader.readline()).strip(), 16)
            found += (await self.reader.readexactly(size + 2))[:-2]
            if not size:
                return found

    async def is_closed(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


class Rig:
    def __init__(self) -> None:
        self.site = FakeSite()
        routes = self.site.routes
        routes.add("POST", "/echo", echo)
        routes.add("GET", "/echo", echo)
        routes.add("GET", "/things/{name}/of/{who}", echo)
        routes.add("POST", "/fail", fail)
        routes.add("POST", "/crash", crash)
        routes.add_stream("POST", "/pieces", pieces)
        routes.add_stream("POST", "/held", self.site.held.append)
        self.server = Server(
            self.site, "test", max_body_bytes=4096, max_head_bytes=2048, slow_reader_s=SLOW_S
        )
        self.clients: list[RawClient] = []
        self.port = 0

    async def client(self) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], Any]:
        client = await self.client()
        client.send(data)
        return await client.answer()

    def later(self, seconds: float) -> None:
        self.server.look(self.server.now + seconds)


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    found = Rig()
    listening = socket.create_server(("127.0.0.1", 0))
    found.port = listening.getsockname()[1]
    await found.server.start(listening)
    try:
        yield found
    finally:
        for client in found.clients:
            client.writer.transport.abort()
        await found.server.close(0.01)
        assert found.site.began == len(found.site.ended)  # each exactly once


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


def post(path: str, body: bytes = b"", *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def error_of(answer: tuple[int, dict[str, str], Any]) -> tuple[int, str]:
    code, headers, body = answer
    assert headers["content-type"] == "application/json"
    assert body["error"]["request_id"] == headers["x-request-id"]
    assert headers["x-pd-path"] == "none"
    return code, body["error"]["code"]


async def test_a_connection_serves_one_request_after_another() -> None:
    async with rig() as r:
        client = await r.client()
        for text in (b"one", b"two"):
            client.send(post("/echo", text, "x-request-id: mine"))
            code, headers, body = await client.answer()
            assert (code, body["body"]) == (200, text.decode())
            assert headers["x-request-id"] == "mine"
            assert headers["x-more"] == "yes"
            assert headers["date"].endswith("GMT")


async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/echo", b"a") + post("/pieces") + post("/fail") + post("/echo", b"b"))
        assert (await client.answer())[2]["body"] == "a"
        assert (await client.answer())[2] == b"data: 1\n\ndata: 2\n\n"
        assert error_of(await client.answer()) == (409, "conflict")
        assert (await client.answer())[2]["body"] == "b"


async def test_what_waits_for_its_turn_is_served_when_the_turn_comes() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/held"))
        await until(lambda: len(r.site.held) == 1)
        client.send(post("/echo", b"later")[:40])
        client.send(post("/echo", b"later")[40:])
        await asyncio.sleep(0)
        assert r.site.began == 1
        r.site.held[0].reply(Reply.json("first"))
        assert (await client.answer())[2] == "first"
        assert (await client.answer())[2]["body"] == "later"


async def test_too_many_sent_ahead_are_dropped_and_the_connection_ends() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/echo") * (MAX_AHEAD + 5))
        codes = [(await client.answer())[0] for _ in range(MAX_AHEAD)]
        assert codes == [200] * MAX_AHEAD
        assert await client.is_closed()


async def test_too_many_bytes_sent_ahead_end_the_connection_after_the_answer() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/held"))
        await until(lambda: len(r.site.held) == 1)
        client.send(b"x" * 300_000)
        await client.writer.drain()
        for _ in range(100):
            await asyncio.sleep(0)
        r.site.held[0].reply(Reply.json("first"))
        assert (await client.answer())[2] == "first"
        assert await client.is_closed()


async def test_a_chunked_upload_is_a_body() -> None:
    async with rig() as r:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        answer = await r.ask(head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert answer[2]["body"] == "abcde"


CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"


async def test_a_trailer_changes_nothing_of_what_the_head_said() -> None:
    async with rig() as r:
        trailer = b"0\r\nx-request-id: another\r\nauthorization: bad\r\n\r\n"
        code, headers, body = await r.ask(CHUNKED + trailer)
        assert (code, body["body"]) == (200, "abc")
        assert headers["x-request-id"] != "another"


@pytest.mark.parametrize("endless", [b"0\r\na: ", b"0\r\n" + b"a: b\r\n" * 200, b"1;"])
async def test_what_comes_between_and_after_chunks_is_bounded(endless: bytes) -> None:
    async with rig() as r:
        client = await r.client()
        client.send(CHUNKED)
        await until(lambda: any(each.is_reading for each in r.server.all))
        client.send(endless + b"x" * 5000)
        assert error_of(await client.answer()) == (431, "head_too_large")


async def test_a_body_does_not_count_as_the_head_that_follows_it() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/echo", b"x" * 3000) + post("/echo", b"y")[:20])
        assert len((await client.answer())[2]["body"]) == 3000
        client.send(post("/echo", b"y")[20:])
        assert (await client.answer())[2]["body"] == "y"


async def test_who_waits_for_100_continue_is_told_and_served() -> None:
    async with rig() as r:
        client = await r.client()
        whole = post("/echo", b"body", "expect: 100-continue")
        client.send(whole[:-4])
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(whole[-4:])
        assert (await client.answer())[2]["body"] == "body"


async def test_http_1_0_is_told_of_no_100_continue() -> None:
    """RFC 9110, 10.1.1: it would take that for its answer."""
    async with rig() as r:
        client = await r.client()
        client.send(post("/echo", b"body", "expect: 100-continue", version="1.0")[:-4])
        other = await r.client()
        other.send(post("/echo", b"later"))
        await other.answer()  # by now the head has been read
        client.send(b"body")
        code, _, told = await client.answer()
        assert (code, told["body"]) == (200, "body")


async def test_who_waits_for_100_continue_and_may_not_hears_that_instead() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/echo", b"body", "expect: 100-continue", "authorization: bad")[:-4])
        assert error_of(await client.answer()) == (401, "unauthorized")


async def test_http_1_0_ends_with_its_answer_and_gets_no_chunks() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/pieces", version="1.0"))
        code, headers = await client.head()
        assert (code, headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in headers
        assert await client.reader.read() == b"data: 1\n\ndata: 2\n\n"


async def test_http_1_0_may_keep_its_connection() -> None:
    async with rig() as r:
        client = await r.client()
        for _ in range(2):
            client.send(post("/echo", b"x", "connection: keep-alive", version="1.0"))
            assert (await client.answer())[1]["connection"] == "keep-alive"


async def test_who_asks_for_the_head_alone_gets_it_alone() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(b"HEAD /echo HTTP/1.1\r\nhost: x\r\n\r\nGET /echo HTTP/1.1\r\nhost: x\r\n\r\n")
        code, headers = await client.head()
        again = await client.answer()
        assert (code, headers["content-length"]) == (200, again[1]["content-length"])


async def test_paths_name_things_and_queries_ask() -> None:
    async with rig() as r:
        get = b"GET /things/a%20b/of/c?q=%C3%A9 HTTP/1.1\r\nhost: x\r\n\r\n"
        assert (await r.ask(get))[2] == {
            "body": "",
            "params": {"name": "a b", "who": "c"},
            "q": "\u00e9",
        }
        whole = b"GET http://x/echo?q=1 HTTP/1.1\r\nhost: x\r\n\r\n"
        assert (await r.ask(whole))[2]["q"] == "1"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (post("/nowhere"), (404, "not_found")),
        (post("/fail"), (409, "conflict")),
        (post("/crash"), (500, "internal")),
        (post("/things/a/of/b"), (405, "method_not_allowed")),
        (post("/echo", b"x" * 5000), (413, "too_large")),
        (post("/echo", b"x", "a: " + "b" * 3000), (431, "head_too_large")),
        (post("/echo", b"x", *["a: b"] * 200), (431, "head_too_large")),
        (b"GET /" + b"x" * 5000, (431, "head_too_large")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", (400, "bad_request")),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", (405, "method_not_allowed")),
        (b"hello\r\n\r\n", (400, "bad_request")),
        (b"POST /echo HTTP/1.1\r\ncontent-length: x\r\n\r\n", (400, "bad_request")),
        (b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxx\r\n", (400, "bad_request")),
        (post("/echo", b"", "transfer-encoding: gzip, chunked"), (400, "bad_request")),
    ],
)
async def test_what_cannot_be_served_is_refused_in_json(
    request_: bytes, expected: tuple[int, str]
) -> None:
    async with rig() as r:
        answer = await r.ask(request_)
        assert error_of(answer) == expected
        assert (answer[2]["error"]["type"] == "server_error") == (expected[0] == 500)
        assert (await r.ask(post("/echo", b"fine")))[0] == 200


async def test_a_method_that_is_not_served_says_which_are() -> None:
    async with rig() as r:
        answer = await r.ask(b"DELETE /echo HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer[1]["allow"] == "GET, HEAD, POST"


async def test_a_body_that_is_too_large_is_refused_before_it_has_come() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(
            post("/echo", b"", "a: b").replace(b"content-length: 0", b"content-length: 9999")
        )
        assert error_of(await client.answer()) == (413, "too_large")
        client.send(b"x" * 9999)  # it sends on, and is not cut before it has read why
        assert await client.reader.read() == b""
        r.later(LINGER_S + 1)
        await until(lambda: not r.server.all)


async def test_a_chunked_body_is_bounded_as_it_comes() -> None:
    async with rig() as r:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        assert error_of(await r.ask(head + b"2000\r\n" + b"x" * 8000)) == (413, "too_large")


async def test_a_gate_may_answer_before_the_route_is_asked() -> None:
    async with rig() as r:
        assert (await r.client()) is not None
        client = r.clients[-1]
        client.send(b"OPTIONS /echo HTTP/1.1\r\nhost: x\r\n\r\n")
        code, headers = await client.head()
        assert (code, headers["x-more"]) == (204, "yes")


@pytest.mark.parametrize("part", [b"POST /ec", post("/echo", b"abc")[:-1]])
async def test_a_request_that_stalls_ends(part: bytes) -> None:
    async with rig() as r:
        client = await r.client()
        client.send(part)
        await until(lambda: any(each.is_reading for each in r.server.all))
        r.later(READ_S - 1)
        r.later(2)
        assert error_of(await client.answer()) == (408, "stalled")
        assert await client.is_closed()


async def test_a_connection_without_requests_ends() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/echo"))
        await client.answer()
        r.later(IDLE_S + 1)
        assert await client.is_closed()


async def test_a_reader_that_has_stopped_is_cut_and_counted() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/held"))
        await until(lambda: len(r.site.held) == 1)
        held, left = r.site.held[0], list[bool]()
        held.on_gone = lambda: left.append(True)
        held.start(200, {})
        while not held.is_full:
            held.write(b"x" * 65536)
            await asyncio.sleep(0)
        r.later(1)
        r.later(SLOW_S - 1)
        assert not left
        r.later(2)
        await until(lambda: bool(left))
        assert r.site.stopped == 1


async def test_who_waits_for_an_answer_in_silence_is_not_cut() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/held"))
        await until(lambda: len(r.site.held) == 1)
        for _ in range(20):
            r.later(IDLE_S)
        r.site.held[0].reply(Reply.json("at last"))
        assert (await client.answer())[2] == "at last"


async def test_who_leaves_is_noticed_with_requests_waiting_behind() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/held") + post("/echo"))
        await until(lambda: len(r.site.held) == 1)
        client.writer.transport.abort()
        await until(lambda: len(r.site.ended) == 2)
        assert all(each.is_gone for each in r.site.ended)


async def test_an_upgrade_is_not_spoken_and_the_request_stands() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/echo", b"x", "connection: Upgrade, HTTP2-Settings", "upgrade: h2c"))
        assert (await client.answer())[2]["body"] == "x"
        client.send(post("/echo", b"y"))
        assert (await client.answer())[2]["body"] == "y"


async def test_who_asks_for_an_upgrade_keeps_its_version_and_its_wish_to_close() -> None:
    async with rig() as r:
        wanted = "connection: Upgrade, Close", "upgrade: h2c"
        assert (await r.ask(post("/echo", b"x", *wanted)))[1]["connection"] == "close"
        old = post("/echo", b"x", "connection: upgrade", "upgrade: h2c", version="1.0")
        assert (await r.ask(old))[1]["connection"] == "close"


async def test_an_answer_cannot_be_given_twice() -> None:
    async with rig() as r:
        client = await r.client()
        client.send(post("/held"))
        await until(lambda: len(r.site.held) == 1)
        held = r.site.held[0]
        held.reply(Reply.json(1))
        held.reply(Reply.json(2))
        held.start(200, {})
        held.write(b"more")
        held.finish()
        held.break_off(Conflict("late"))
        client.send(post("/echo", b"x"))
        assert (await client.answer())[2] == 1
        assert (await client.answer())[2]["body"] == "x"
