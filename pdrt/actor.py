"""Actors: a coroutine with a bounded mailbox that it alone reads.

The promise: an `ask` always ends. It is answered, refused, or refused with PeerLost when
the actor ends. Asks go down the layers only, tells go up, so no two can wait for each other.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pdrt.errors import Overloaded, PeerLost

M = TypeVar("M")
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Ask(Generic[T]):
    """A message that wants one answer."""

    reply: asyncio.Future[T] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.reply = asyncio.get_running_loop().create_future()

    def answer(self, value: T) -> None:
        if not self.reply.done():  # the asker may be gone
            self.reply.set_result(value)

    def refuse(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


class Actor(Generic[M]):
    """Subclass, write `on`, and run `run()` in a TaskGroup."""

    def __init__(self, name: str, depth: int = 1024) -> None:
        self.name = name
        self._box: asyncio.Queue[M] = asyncio.Queue(depth)
        self._asked: set[asyncio.Future[Any]] = set()  # replies that are still owed
        self._over = False

    @property
    def depth(self) -> int:
        """Messages waiting."""
        return self._box.qsize()

    def tell(self, message: M) -> None:
        """Never waits. Raises Overloaded when the mailbox is full, PeerLost when it is over."""
        if self._over:
            raise PeerLost(f"{self.name} has ended")
        try:
            self._box.put_nowait(message)
        except asyncio.QueueFull:
            raise Overloaded(f"{self.name}: {self._box.qsize()} messages waiting") from None
        if isinstance(message, Ask):
            self._asked.add(message.reply)
            message.reply.add_done_callback(self._asked.discard)

    def rest(self) -> list[M]:
        """Take what waits, unread: for whoever winds the actor up."""
        return [self._box.get_nowait() for _ in range(self._box.qsize())]

    async def on(self, message: M) -> None:
        """Deal with one message; an Ask may be kept and answered later."""
        raise NotImplementedError

    async def run(self) -> None:
        """Read the mailbox until cancelled or until `on` raises."""
        try:
            while True:
                await self.on(await self._box.get())
        finally:
            self._over = True
            for reply in tuple(self._asked):
                if not reply.done():
                    reply.set_exception(PeerLost(f"{self.name} has ended"))


async def ask(actor: Actor[Any], question: Ask[T]) -> T:
    """Put the question and wait for its answer; the caller sets the time limit."""
    actor.tell(question)
    return await question.reply
