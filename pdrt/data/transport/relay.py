"""The ends that a wrapping transport tells: those of the one it wraps, and its own among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pdrt.data.transport.promise import Ended, Transport


class Relay:
    """Each end of `inner` is told on, or handed to `heard` when the wrapper has a say in it."""

    def __init__(self, inner: Transport, heard: Callable[[Ended], None] | None = None) -> None:
        self._inner, self._heard = inner, heard or self.tell
        self._told: asyncio.Queue[Ended | Exception | None] = asyncio.Queue()
        self._pump = asyncio.get_running_loop().create_task(self._read())

    def tell(self, end: Ended) -> None:
        self._told.put_nowait(end)

    async def ends(self) -> AsyncIterator[Ended]:
        """Raises what the inner stream raised."""
        while (end := await self._told.get()) is not None:
            if isinstance(end, Exception):
                raise end
            yield end

    async def finished(self) -> None:
        """Until the inner stream has ended, as it does after `close`."""
        await self._pump

    async def _read(self) -> None:
        try:
            async for end in self._inner.ends():
                self._heard(end)
        except Exception as error:  # noqa: BLE001 - the reader of our ends gets it, and fails
            self._told.put_nowait(error)
        self._told.put_nowait(None)
