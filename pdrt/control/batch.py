"""A batch's answers on their way to one client: each part writes as if it had a client of its own.

The promise: the first part that fails ends the others. Before anything was said, its error is
the client's answer; in a stream that has begun, its last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Final

from pdrt.control.http import PATH_HEADER
from pdrt.control.join import Joiner
from pdrt.control.reader import ClientGone, Reader
from pdrt.errors import PdrtError

_OWN: Final = frozenset({"content-length"})  # of a part, not of the whole


class Batch:
    """Give `part(i)` to whoever answers prompt i, `run` them all, then `end`."""

    def __init__(self, joiner: Joiner, client: Reader) -> None:
        self.joiner, self._client = joiner, client
        self.has_begun = False  # the client has heard something
        self.broken: PdrtError | None = None  # why a part's answer broke off
        self._headers: list[Mapping[str, str]] = []
        self._bodies = [bytearray() for _ in range(joiner.count)]  # where nothing is streamed
        self._ended = 0
        self._writing = asyncio.Lock()  # one part waits for a slow reader at a time

    def part(self, index: int) -> Reader:
        return _Part(self, index)

    async def run(self, works: Sequence[Coroutine[None, None, bool]]) -> None:
        """Until all are well, or one says that it is not: then the others are cancelled."""
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            for each in asyncio.as_completed(tasks):
                if not await each:
                    return
        except PdrtError as error:  # what it was answered cannot be joined
            self.broken = self.broken or error
        except ClientGone:
            return  # and its end is the others'
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def end(self) -> None:
        """Say the last that is to be said, in an answer that has begun."""
        try:
            if self.broken is None or self.joiner.has_failed:
                await self._client.finish()
            else:
                await self._client.break_off(self.broken)
        except ClientGone:
            return  # nobody reads it

    # What the parts do.

    @property
    def is_streamed(self) -> bool:
        return self.joiner.order.stream

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self._headers.append(headers)
        if self.is_streamed and not self.has_begun:
            self.has_begun = True
            await self._client.start(status, self._shared())

    async def write(self, index: int, chunk: bytes) -> None:
        if not self.is_streamed:
            self._bodies[index] += chunk
        elif said := self.joiner.feed(index, chunk):
            async with self._writing:
                await self._client.write(said)

    async def finish(self) -> None:
        self._ended += 1
        if not self.is_streamed and self._ended == self.joiner.count:
            body = await self.joiner.whole([bytes(body) for body in self._bodies])
            self.has_begun = True
            await self._client.start(200, {**self._shared(), "content-length": str(len(body))})
            await self._client.write(body)

    def _shared(self) -> dict[str, str]:
        """The headers of the first part; the path only where all took the same."""
        found = {n: v for n, v in self._headers[0].items() if n not in _OWN}
        if len({headers.get(PATH_HEADER) for headers in self._headers}) > 1:
            found[PATH_HEADER] = "mixed"
        return found


class _Part:
    """A prompt's client."""

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch, self._index = batch, index

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        await self._batch.start(status, headers)

    async def write(self, chunk: bytes) -> None:
        await self._batch.write(self._index, chunk)

    async def finish(self) -> None:
        await self._batch.finish()

    async def break_off(self, error: PdrtError) -> None:
        self._batch.broken = self._batch.broken or error
