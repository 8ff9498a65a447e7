"""The typed pair of sockets between a supervisor and one life of a device worker.

An actor whose mailbox is what is still to be sent. What arrives is a message, or is counted and
dropped. The endpoint lies in a private directory, so whoever is there is one of us.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import zmq
import zmq.asyncio
from pydantic import TypeAdapter

from pdrt import messages
from pdrt.actor import Actor
from pdrt.errors import BadMessage

In = TypeVar("In")
Out = TypeVar("Out")


class Link(Actor[Out], Generic[In, Out]):
    """One end: `tell` it what to send, `run` it to have that sent, `listen` to the other end."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        incoming: TypeAdapter[In],
        outgoing: TypeAdapter[Out],
        depth: int = 16384,
    ) -> None:
        super().__init__("link", depth)
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self._incoming, self._outgoing = incoming, outgoing
        self.dropped = 0  # frames that were no message

    def bind(self, endpoint: str) -> None:
        self._socket.bind(endpoint)

    def connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)

    async def on(self, message: Out) -> None:
        await self._socket.send(messages.encode(self._outgoing, message))

    async def send_last(self, message: Out) -> None:
        """Hand over what waits and then this, at an end where `run` has stopped."""
        for waiting in (*self.rest(), message):
            await self.on(waiting)

    async def listen(self) -> AsyncIterator[In]:
        """Messages as they come, until cancelled."""
        while True:
            message = self._decode(await self._socket.recv())
            if message is not None:
                yield message

    async def unread(self) -> list[In]:
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
