"""The router's client over HTTP: headers, chunks at its own pace, and an honest end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from pdrt.control.exchange import ClientGone
from pdrt.control.http import error_body, request_id_of
from pdrt.errors import PdrtError

LAST_WORDS_S: Final = 1.0  # a reader that has stopped reading is not waited for any longer


class HttpClient:
    """Carries one answer; `response` is what the handler returns, once it has begun."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None
        self._ends_line = True

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def write(self, chunk: bytes) -> None:
        assert self.response is not None, "start comes before write"
        try:
            await self.response.write(chunk)
        except ConnectionError as error:
            raise ClientGone from error
        self._ends_line = chunk.endswith(b"\n\n")

    async def finish(self) -> None:
        assert self.response is not None, "start comes before finish"
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error

    async def break_off(self, error: PdrtError) -> None:
        """An event stream ends with an error event; anything else by breaking the connection."""
        assert self.response is not None, "start comes before break_off"
        if self.response.content_type != "text/event-stream":
            self._abort()
            return
        told = json.dumps(error_body(error, request_id_of(self._request), "router"))
        event = f"event: error\ndata: {told}\n\n".encode()
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self.response.write(event if self._ends_line else b"\n\n" + event)
                await self.response.write_eof()
        except (TimeoutError, ConnectionError):
            self._abort()

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
