"""The typed pair of sockets between a supervisor and one life of a device worker.

The promise: `tell` never waits and keeps order; what arrives is a message or is counted and
dropped. The endpoint lies in a private directory, so whoever is there is one of us.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import zmq
import zmq.asyncio
from pydantic import TypeAdapter

from pdrt import messages
from pdrt.errors import BadMessage, Overloaded

In = TypeVar("In")
Out = TypeVar("Out")


class Link(Generic[In, Out]):
    """One end. `run` writes, `listen` reads; each has one user."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        incoming: TypeAdapter[In],
        outgoing: TypeAdapter[Out],
        depth: int = 16384,
    ) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self._incoming, self._outgoing = incoming, outgoing
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(depth)
        self.dropped = 0  # frames that were no message

    def bind(self, endpoint: str) -> None:
        self._socket.bind(endpoint)

    def connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)

    def tell(self, message: Out) -> None:
        """Queue a message. Raises Overloaded when the other end does not read."""
        try:
            self._queue.put_nowait(messages.encode(self._outgoing, message))
        except asyncio.QueueFull:
            raise Overloaded(f"{self._queue.qsize()} messages wait for the other end") from None

    async def run(self) -> None:
        """Write what was told, in order, until cancelled."""
        while True:
            await self._socket.send(await self._queue.get())

    async def send_last(self, message: Out) -> None:
        """Hand over what is queued and then this; for an end at which `run` has stopped."""
        while not self._queue.empty():
            await self._socket.send(self._queue.get_nowait())
        await self._socket.send(messages.encode(self._outgoing, message))

    async def listen(self) -> AsyncIterator[In]:
        """Messages as they come, until cancelled."""
        while True:
            message = self._decode(await self._socket.recv())
            if message is not None:
                yield message

    async def rest(self) -> list[In]:
        """What lies here unread after the other end is gone."""
        found = []
        while await self._socket.poll(0):
            message = self._decode(await self._socket.recv())
            if message is not None:
                found.append(message)
        return found

    def close(self, linger_ms: int = 0) -> None:
        self._socket.close(linger=linger_ms)

    def _decode(self, frame: bytes) -> In | None:
        try:
            return messages.decode(self._incoming, frame)
        except BadMessage:
            self.dropped += 1
            return None
