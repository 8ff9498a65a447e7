"""Leaders that do what a test tells them: scripted answers over real loopback sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web

from pdrt.config import Target
from pdrt.keys import ClusterKey

Json: TypeAlias = dict[str, Any]
CANARY_HEADER = "x-pdrt-canary"


@dataclass(eq=False)
class Seen:
    """One request as the leader saw it."""

    path: str
    body: Json
    headers: dict[str, str]
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the router closed the connection
    sent: int = 0
    transport: asyncio.Transport | None = None

    @property
    def room(self) -> int:
        return int(self.body["bootstrap_room"])

    @property
    def attempt(self) -> int:
        return int(self.body["attempt"])


Play: TypeAlias = Callable[[web.Request, Seen], Awaitable[web.StreamResponse]]


def status(
    code: int,
    message: str = "no",
    error: str = "bad_request",
    stage: str = "leader",
    **headers: str,
) -> Play:
    """A typed error, as leaders answer it."""

    async def play(_request: web.Request, _seen: Seen) -> web.StreamResponse:
        body = {"error": {"type": "t", "code": error, "message": message, "stage": stage}}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(body, status=code, headers=named)

    return play


def text(code: int, body: str) -> Play:
    async def play(_request: web.Request, _seen: Seen) -> web.StreamResponse:
        return web.Response(status=code, text=body)

    return play


def good(body: Json) -> Play:
    async def play(_request: web.Request, _seen: Seen) -> web.StreamResponse:
        return web.json_response(body, headers={"x-pd-path": "disagg"})

    return play


def prefilled() -> Play:
    return good({"status": "prefilled", "request_id": "r", "usage": {"prompt_tokens": 1}})


async def hang(_request: web.Request, _seen: Seen) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def die(request: web.Request, _seen: Seen) -> web.StreamResponse:
    """The process is killed with the request open."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def after(event: asyncio.Event, play: Play) -> Play:
    async def wait(request: web.Request, seen: Seen) -> web.StreamResponse:
        await event.wait()
        return await play(request, seen)

    return wait


def stream(*chunks: bytes | asyncio.Event, ending: str = "done") -> Play:
    """Server-sent chunks; an event among them is waited for. `ending`: done, die or hang."""

    async def play(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", "x-pd-path": "disagg"}
        )
        await response.prepare(request)
        for chunk in chunks:
            if isinstance(chunk, asyncio.Event):
                await chunk.wait()
                continue
            await response.write(chunk)
            seen.sent += len(chunk)
        if ending == "die":
            return await die(request, seen)
        if ending == "hang":
            return await hang(request, seen)
        await response.write_eof()
        return response

    return play


class FakeLeader:
    """A leader of one role. Unscripted requests are answered well."""

    def __init__(self, role: str, key: ClusterKey | None = None) -> None:
        self.role, self.key = role, key
        self.plays: deque[Play] = deque()  # for the next client requests, in order
        self.rebinds: deque[Play] = deque()
        self.canaries: deque[Play] = deque()
        self.seen: list[Seen] = []  # client requests
        self.seen_rebinds: list[Seen] = []
        self.seen_canaries: list[Seen] = []
        self.arrived = asyncio.Event()  # rises with every client request
        self.partners: Sequence[FakeLeader] = ()  # of a decode leader: who prefills for it
        self.polled = 0
        self.status: Json = {
            "role": role,
            "state": "ready",
            "model": "tiny",
            "instance_epoch": 1,
            "bootstrap_host": "127.0.0.1" if role == "prefill" else None,
            "bootstrap_port": None,
            "dp_size": 1,
            "ready_ranks": [0],
            "load": {"running": 0},
            "last_fault_at": None,
        }
        self.status_code = 200
        self.status_play: Play | None = None
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def target(self) -> Target:
        return Target(http=f"127.0.0.1:{self.port}", bootstrap=f"127.0.0.1:{self.port}")

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/internal/status", self._status)
        app.router.add_get("/health", self._health)
        app.router.add_post("/internal/rebind", self._rebind)
        app.router.add_post("/{tail:.*}", self._serve)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01
        )
        await self._runner.setup()
        listening = socket.create_server(("127.0.0.1", self.port))
        self.port = listening.getsockname()[1]
        await web.SockSite(self._runner, listening).start()
        if self.role == "prefill":
            self.status["bootstrap_port"] = self.port

    async def stop(self) -> None:
        """Like a killed process: connections break, and new ones are refused."""
        if self._runner is not None:
            for each in self.seen + self.seen_canaries:
                if each.transport is not None:
                    each.transport.abort()
            runner, self._runner = self._runner, None
            self.arrived.set()
            await runner.cleanup()

    async def nth(self, count: int) -> Seen:
        """The count-th client request (from 1), once it is here."""
        while len(self.seen) < count:
            self.arrived.clear()
            await self.arrived.wait()
        return self.seen[count - 1]

    def _may(self, request: web.Request) -> bool:
        return self.key is None or self.key.is_bearer(request.headers.get("authorization"))

    async def _status(self, request: web.Request) -> web.StreamResponse:
        self.polled += 1
        if self.status_play is not None:
            return await self.status_play(request, Seen("", {}, {}))
        if not self._may(request):
            return web.json_response({}, status=401)
        return web.json_response(self.status, status=self.status_code)

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        self.polled += 1
        return web.Response(status=self.status_code)

    async def _rebind(self, request: web.Request) -> web.StreamResponse:
        play = self.rebinds.popleft() if self.rebinds else good({"status": "ok"})
        return await self._play(request, self.seen_rebinds, play)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        is_canary = CANARY_HEADER in request.headers
        plays, seen = (self.canaries, self.seen_canaries) if is_canary else (self.plays, self.seen)
        return await self._play(request, seen, plays.popleft() if plays else self._well())

    async def _prefill_seen(self, one: Seen) -> None:
        """As in life, nothing is decoded before a prefill instance has its leg."""
        if "resumed" in one.body:
            return  # it asks for what it needs by itself
        at = one.body.get("bootstrap_port")
        for partner in self.partners if self.role == "decode" else ():
            while at == partner.port and partner.is_running and not partner.has_seen(one.body):
                partner.arrived.clear()
                await partner.arrived.wait()

    def has_seen(self, body: Json) -> bool:
        room = body.get("bootstrap_room")
        return any(each.room == room for each in (*self.seen, *self.seen_canaries))

    @property
    def is_running(self) -> bool:
        return self._runner is not None

    def _well(self) -> Play:
        return prefilled() if self.role == "prefill" else good({"output": "hello"})

    async def _play(self, request: web.Request, seen: list[Seen], play: Play) -> web.StreamResponse:
        body = json.loads(await request.read())
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        headers = {name.lower(): value for name, value in request.headers.items()}
        one = Seen(request.path, body, headers, transport=transport)
        seen.append(one)
        self.arrived.set()
        try:
            await self._prefill_seen(one)
            return await play(request, one)
        except (asyncio.CancelledError, ConnectionError):
            one.gone.set()
            raise
