"""The router's client over HTTP: headers, chunks at its own pace, and an honest end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pdrt.control.exchange import ClientGone
from pdrt.control.wire.exchange import Exchange
from pdrt.errors import PdrtError


class HttpClient:
    """Carries one answer."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self._check()
        self._exchange.start(status, tuple(headers.items()))

    async def write(self, chunk: bytes) -> None:
        exchange = self._exchange
        self._check()
        exchange.write(chunk)
        if exchange.is_full:
            exchange.drained = asyncio.get_running_loop().create_future()
            await exchange.drained
            self._check()

    async def finish(self) -> None:
        self._check()
        self._exchange.finish()

    async def break_off(self, error: PdrtError) -> None:
        self._exchange.break_off(error)

    def _check(self) -> None:
        if self._exchange.is_gone:
            raise ClientGone
