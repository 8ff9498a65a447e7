"""The typed pair of sockets between two processes of an instance: supervisor, worker, or node.

An actor whose mailbox is what is still to be sent. What arrives is a message, or is logged and
dropped. On one node the endpoint lies in a private directory, so whoever is there is one of us;
between nodes it is CURVE on tcp, and lives as long as its connection. The promise: what a process
sent before it died is read, all of it; between nodes, all that had come through.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final, Generic, TypeVar

import structlog
import zmq
import zmq.asyncio
from pydantic import TypeAdapter
from zmq.utils.monitor import recv_monitor_message

from pdrt import messages
from pdrt.actor import Actor
from pdrt.curve import CurveContext
from pdrt.errors import BadMessage

In = TypeVar("In")
Out = TypeVar("Out")

_HANG_UP_S: Final = 1.0  # for the last bytes of a dead process to come through the kernel


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
        self._hang_ups: zmq.asyncio.Socket | None = None  # tells when the other end comes and goes
        self._is_met = False
        self.dropped = 0  # frames that were no message

    def bind(self, endpoint: str) -> None:
        """Raises OSError."""
        self._get_ready()
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{endpoint}: {error.strerror}") from error

    def connect(self, endpoint: str, watched: bool = False) -> None:
        """The other end may come later. `watched`: so that `hung_up` tells when it goes."""
        if watched:
            self._watch()
        self._socket.connect(endpoint)

    def serve(self, net: CurveContext) -> str:
        """Listen on tcp, in a context of the net; where. Raises OSError."""
        self._get_ready()
        return net.serve(self._socket)

    def dial(self, net: CurveContext, endpoint: str) -> None:
        """The other end is there already, on tcp, and is watched. Raises OSError."""
        self._get_ready()
        net.dial(self._socket, endpoint)

    def _get_ready(self) -> None:
        self._watch()
        # No limit of its own: from a full queue libzmq throws away what a dead process had sent.
        # What requests in flight may say bounds it.
        self._socket.setsockopt(zmq.RCVHWM, 0)

    def _watch(self) -> None:
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._hang_ups = self._socket.get_monitor_socket(events)

    async def on(self, message: Out) -> None:
        await self._socket.send(messages.encode(self._outgoing, message))

    async def send_last(self, message: Out) -> None:
        """Hand over what waits and then this, at an end where `run` has stopped."""
        for waiting in (*self.rest(), message):
            await self.on(waiting)

    async def listen(self) -> AsyncIterator[In]:
        """Messages as they come, until cancelled; none is lost by that, `unread` has the rest."""
        while True:
            await self._socket.poll()
            message = await self._next()
            if message is not None:
                yield message

    async def unread(self) -> list[In]:
        """What the other end, whose process is dead, said and nobody has read; where we bound."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANG_UP_S):
                await self._hung_up()
        found = []
        while await self._socket.poll(0):
            message = await self._next()
            if message is not None:
                found.append(message)
        return found

    async def met(self) -> None:
        """Until the other end is there; where we bound, or watch."""
        assert self._hang_ups is not None
        while not self._is_met:  # a try may not get as far as shaking hands
            event = (await recv_monitor_message(self._hang_ups))["event"]
            self._is_met = event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    async def hung_up(self) -> None:
        """Until the other end has been there and is gone; where we bound, or watch."""
        await self.met()
        await self._gone()

    async def _hung_up(self) -> None:
        """Until nothing more can come. Whoever never shook hands said nothing."""
        assert self._hang_ups is not None
        if await self._hang_ups.poll(0):
            await self._gone()

    async def _gone(self) -> None:
        assert self._hang_ups is not None
        while (await recv_monitor_message(self._hang_ups))["event"] != zmq.EVENT_DISCONNECTED:
            pass

    async def _next(self) -> In | None:
        """The message that is here, if it is one; this never waits."""
        return self._decode(await self._socket.recv(zmq.NOBLOCK))

    def close(self, linger_ms: int = 0) -> None:
        if self._hang_ups is not None:
            self._socket.disable_monitor()
            self._hang_ups.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _decode(self, frame: bytes) -> In | None:
        try:
            return messages.decode(self._incoming, frame)
        except BadMessage as error:  # a bug: both ends are ours
            self.dropped += 1
            structlog.get_logger().error("bad_message", link=self.name, reason=str(error))
            return None
