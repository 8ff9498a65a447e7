"""A transport around another: all that it does not change is passed on, and its ends are told on.

Among the ends of the one inside it may tell ends of its own, and it may keep one back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from pdrt.data.transport.promise import Areas, Ended, Key, Peer, Transport, Write


class Wrapping:
    """To be made on the running loop. What is inside begins to be read at once."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._told: asyncio.Queue[Ended | Exception | None] = asyncio.Queue()
        self._pump = asyncio.get_running_loop().create_task(self._read())

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def offers(self) -> dict[str, bytes]:
        return self._inner.offers

    @property
    def counters(self) -> Mapping[str, float]:
        return self._inner.counters

    def via(self, peer: str) -> str:
        return self._inner.via(peer)

    async def attach(self, peer: Peer) -> None:
        await self._inner.attach(peer)

    def detach(self, peer: str) -> None:
        self._inner.detach(peer)

    def start(self, write: Write) -> None:
        self._inner.start(write)

    def abort(self, write: int) -> None:
        self._inner.abort(write)

    def admit(self, key: Key, areas: Areas) -> None:
        self._inner.admit(key, areas)

    def revoke(self, key: Key, through: frozenset[str]) -> bool:
        return self._inner.revoke(key, through)

    async def ends(self) -> AsyncIterator[Ended]:
        """Raises what the inner stream raised."""
        while (end := await self._told.get()) is not None:
            if isinstance(end, Exception):
                raise end
            yield end

    async def close(self) -> None:
        await self._inner.close()
        await self._pump

    def _heard(self, end: Ended) -> None:
        """An end of the one inside."""
        self._tell(end)

    def _tell(self, end: Ended) -> None:
        self._told.put_nowait(end)

    async def _read(self) -> None:
        try:
            async for end in self._inner.ends():
                self._heard(end)
        except Exception as error:  # noqa: BLE001 - the reader of our ends gets it, and fails
            self._told.put_nowait(error)
        self._told.put_nowait(None)
