"""The control socket of a rank: one PULL that is bound, one PUSH for each peer, all CURVE.

Only holders of the cluster key get through (see `curve`). A send never waits: when a peer does
not read, its messages are refused and counted by the caller.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import zmq
import zmq.asyncio

from pdrt.config import bracketed
from pdrt.curve import ZAP, Curve
from pdrt.errors import ConfigError, PeerLost
from pdrt.keys import ClusterKey
from pdrt.messages import MAX_PEER_BYTES

T = TypeVar("T")
_DEPTH = 8192  # messages waiting, each way
_LINGER_MS = 100
_LAST_WORD_MS = 1000  # of who is hung up on: a connection may have to be made for it
_FAREWELL_MS = 500
_MOST_SOCKETS = 65535  # libzmq's own limit


class Wire:
    """Bind with `start`, then keep `guard` running: it lets peers in.

    What dials has a context of its own, which can be ended while the other still listens.
    """

    def __init__(self, key: ClusterKey, local_ip: str, peers: int = 1024) -> None:
        """`peers`: how many are spoken to at once, at most."""
        self._curve = Curve(key, local_ip)
        self._local_ip = local_ip
        self._context = zmq.asyncio.Context()
        self._dialing: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # As many again may be hung up on, and have their last word on its way.
        self._dialing.max_sockets = min(2 * peers + 16, _MOST_SOCKETS)
        self._zap = self._context.socket(zmq.REP)
        self._pull = self._context.socket(zmq.PULL)
        self._push: dict[str, zmq.Socket[bytes]] = {}
        self._watched: dict[str, str] = {}
        self._is_silent = False
        self.endpoint = ""

    def start(self, port: int = 0) -> str:
        """Listen on this port of the local address, or on a free one. Raises ConfigError."""
        self._zap.linger = 0
        self._zap.bind(ZAP)
        pull = self._pull
        self._curve.serve(pull)
        _be_lively(pull)
        pull.maxmsgsize = MAX_PEER_BYTES
        pull.rcvhwm = _DEPTH
        host = bracketed(self._local_ip)
        try:
            if port:
                pull.bind(f"tcp://{host}:{port}")
            else:
                port = pull.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            raise ConfigError(f"local_ip = {self._local_ip!r}: {error}") from error
        self.endpoint = f"tcp://{host}:{port}"
        return self.endpoint

    def send(self, endpoint: str, frame: bytes) -> bool:
        """False when the peer's queue is full, its address is none, or we said goodbye."""
        if self._is_silent:
            return False
        try:
            self._to(endpoint).send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def hang_up(self, endpoint: str) -> None:
        """Let the connection go when what waits for it is out, or soon."""
        if socket := self._push.pop(endpoint, None):
            socket.close(linger=_LAST_WORD_MS)

    def watched(self, endpoint: str = "") -> zmq.Socket[bytes]:
        """libzmq's events of what listens, or of what will dial this address; to be closed first.

        To be called before anything is sent there.
        """
        address = f"inproc://watched-{endpoint}"
        if endpoint:
            context, self._watched[endpoint] = self._dialing, address
        else:
            context = zmq.Context.shadow(self._context.underlying)
            self._pull.monitor(address, zmq.EVENT_ALL)
        events = context.socket(zmq.PAIR)
        events.connect(address)
        return events

    async def receive(self) -> bytes:
        """The next frame. Raises PeerLost when the socket is gone."""
        frame: bytes = await _or_lost(self._pull.recv())
        return frame

    async def guard(self) -> None:
        """Answer each newcomer's handshake (ZAP, RFC 27): the cluster's key, or no entry."""
        while True:
            request: Sequence[bytes] = await _or_lost(self._zap.recv_multipart())
            await _or_lost(self._zap.send_multipart(self._curve.verdict(request)))

    async def say_goodbye(self) -> None:
        """Nothing is sent any more; waits, not long, until what was is out."""
        self._is_silent = True  # a socket made from now on would keep the context from ending
        self._drop_all(_FAREWELL_MS)
        await asyncio.to_thread(self._dialing.term)

    def close(self) -> None:
        self._drop_all(_LINGER_MS)
        self._pull.close(linger=0)
        self._zap.close(linger=0)
        self._dialing.term()
        self._context.term()

    def _drop_all(self, linger_ms: int) -> None:
        for socket in self._push.values():
            socket.close(linger=linger_ms)
        self._push.clear()

    def _to(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._push.get(endpoint)
        if socket is None:
            socket = self._dialing.socket(zmq.PUSH)
            try:
                self._curve.dial(socket)
                _be_lively(socket)
                socket.sndhwm = _DEPTH
                if endpoint in self._watched:
                    socket.monitor(self._watched[endpoint], zmq.EVENT_ALL)
                socket.connect(_checked(endpoint))
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._push[endpoint] = socket
        return socket


def _be_lively(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    socket.heartbeat_ivl = 1000  # a dead connection is noticed and made anew
    socket.heartbeat_timeout = 3000
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000


async def _or_lost(io: Awaitable[T]) -> T:
    """A closed socket cancels what waits for it, which would end our task without a word."""
    try:
        return await io
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerLost("the control socket was closed") from None
    except zmq.ZMQError as error:
        raise PeerLost(f"the control socket failed: {error}") from error


def _checked(endpoint: str) -> str:
    """Only tcp to a literal address: no name is looked up for a peer. Raises ZMQError."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        is_fine = scheme == "tcp" and 0 < int(port) < 65536
    except ValueError:
        is_fine = False
    if not is_fine:
        raise zmq.ZMQError(zmq.EINVAL)
    return endpoint
