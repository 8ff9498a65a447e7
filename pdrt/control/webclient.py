"""A leader's client whose answer is made of parts: chunks at its own pace, and an honest end."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from pdrt.control.http import cut_off, request_id_of, say_last
from pdrt.control.reader import ClientGone
from pdrt.control.sse import END, TYPE, error_event
from pdrt.errors import PdrtError


class WebClient:
    """Carries one answer; `response` is what the handler returns, once it has begun."""

    def __init__(self, request: web.Request, stage: str) -> None:
        self._request, self._stage = request, stage
        self.response: web.StreamResponse | None = None
        self._last = END
        self._is_half = False  # a head or a chunk is out in part: nothing may follow it

    @property
    def begun(self) -> web.StreamResponse:
        """The answer's head and all that has followed."""
        assert self.response is not None, "an answer has begun, or an error was raised"
        return self.response

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.response, self._is_half = web.StreamResponse(status=status, headers=headers), True
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error
        self._is_half = False

    async def write(self, chunk: bytes) -> None:
        assert self.response is not None, "start comes before write"
        self._is_half = True
        try:
            await self.response.write(chunk)
        except ConnectionError as error:
            raise ClientGone from error
        self._last, self._is_half = chunk, False

    async def finish(self) -> None:
        assert self.response is not None, "start comes before finish"
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error

    async def break_off(self, error: PdrtError) -> None:
        """An event stream ends with an error event; anything else by breaking the connection."""
        assert self.response is not None, "start comes before break_off"
        if self._is_half or self.response.content_type != TYPE:
            cut_off(self._request)
        else:
            request_id = request_id_of(self._request)
            told = error_event(error, request_id, self._stage, self._last)
            await say_last(self._request, self.response, told)
