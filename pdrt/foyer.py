"""Where requests wait until their grammar is compiled, which takes its time beside the loop.

The promise: what is said of a room comes after its Submit, as it was sent, and so does Drain; the
rooms of other requests wait for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, NoReturn, TypeAlias

from pdrt.errors import Overloaded, PdrtError
from pdrt.messages import AbortRoom, Drain, Grammar, Rebind, ResumeLocally, Stop, Submit, ToWorker

Prepare: TypeAlias = Callable[[Grammar], Awaitable[None]]  # raises PdrtError
_MOST: Final = 256  # requests


class Foyer:
    """`hear` is told what has waited, `refuse` which request has a grammar that cannot be."""

    def __init__(
        self,
        prepare: Prepare,
        hear: Callable[[ToWorker], None],
        refuse: Callable[[Submit, PdrtError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepare, self._hear, self._refuse, self._clock = prepare, hear, refuse, clock
        self._queue: asyncio.Queue[tuple[float, ToWorker]] = asyncio.Queue()  # bounded by _MOST
        self._rooms = Counter[int]()  # how many of its messages wait here

    def takes(self, message: ToWorker) -> bool:
        """Whether it waits here. Raises Overloaded for a Submit too many."""
        match message:
            case Submit(room=room) if message.sampling.grammar is not None or room in self._rooms:
                if len(self._rooms) >= _MOST:
                    raise Overloaded(f"{_MOST} requests wait for their grammars")
                self._rooms[room] += 1
            case AbortRoom(room=room) | Rebind(room=room) | ResumeLocally(room=room) if (
                room in self._rooms
            ):
                self._rooms[room] += 1
            case Drain() if self._rooms:
                pass
            case _:
                return False
        self._queue.put_nowait((self._clock(), message))
        return True

    async def run(self) -> NoReturn:
        """One after the other: there is one thread that compiles."""
        while True:
            since, message = await self._queue.get()
            if isinstance(message, Submit):
                await self._admit(message, since)
            else:
                self._hear(message)
            if not isinstance(message, Drain | Stop):
                self._leave(message.room)

    async def _admit(self, submit: Submit, since: float) -> None:
        try:
            if submit.sampling.grammar is not None:
                await self._prepare(submit.sampling.grammar)
        except PdrtError as error:
            self._refuse(submit, error)
            return
        left = submit.time_left - (self._clock() - since)
        self._hear(replace(submit, time_left=max(left, 0.0)))

    def _leave(self, room: int) -> None:
        self._rooms[room] -= 1
        if not self._rooms[room]:
            del self._rooms[room]
