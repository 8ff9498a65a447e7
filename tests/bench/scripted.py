"""An OpenAI-compatible server that answers as it is told to, for tests of the load client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(text: str = "", finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n"


LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
WHOLE = (event("a"), event("b"), event("c", "length"), LAST)


@dataclass(slots=True)
class Scripted:
    """Each answer is the script's next one; without a script all are whole."""

    script: list[int | tuple[bytes, ...]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    gather: int = 0  # answers begin when so many requests are here
    stall: asyncio.Event | None = None  # answers are not over before it is set
    serves_once: bool = False  # a connection, though nothing says so: used again it is cut
    _served: set[asyncio.Transport | None] = field(default_factory=set)
    _full: asyncio.Event = field(default_factory=asyncio.Event)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if self.serves_once and request.transport in self._served:
            assert request.transport is not None
            request.transport.abort()
        self._served.add(request.transport)
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization", ""))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.in_flight >= self.gather:
                self._full.set()
            await self._full.wait()
            return await self._answer(request)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        now = self.script.pop(0) if self.script else WHOLE
        if isinstance(now, int):
            error = {"code": "overloaded", "message": "too many", "type": "x"}
            return web.json_response({"error": error}, status=now)
        response = web.StreamResponse()
        await response.prepare(request)
        for data in now:
            await response.write(data)
        if self.stall is not None:
            await self.stall.wait()
        return response

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})


@asynccontextmanager
async def serving(scripted: Scripted) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", scripted.complete)
    app.router.add_post("/generate", scripted.complete)
    app.router.add_get("/v1/models", scripted.models)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


def documented(heading: str) -> set[str]:
    """Keys in the first column of the table that follows a heading of docs/benchmarks.md."""
    text = Path(__file__).parents[2].joinpath("docs/benchmarks.md").read_text()
    table = text.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}
