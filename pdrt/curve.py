"""What makes a ZMQ socket on tcp one for the cluster only: CURVE, and who is let in.

The promise: whoever listens lets in holders of the cluster key alone, for the ZAP handler refuses
every other client key, and CURVE makes a client prove that it has the secret of the key that it
shows; whoever dials reaches such a holder or nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn, TypeAlias

import zmq
import zmq.asyncio
from zmq.utils import z85

from pdrt.config import bracketed
from pdrt.keys import ClusterKey

ZAP: Final = "inproc://zeromq.zap.01"
Socket: TypeAlias = "zmq.Socket[bytes] | zmq.asyncio.Socket"
_DOMAIN: Final = b"pdrt"
_BEAT_MS: Final = 300
_SILENCE_MS: Final = 1200  # after a beat: 1.5 s until who is frozen or cut off counts as gone


class Curve:
    """The cluster's key pair, as every member uses it, and our own address."""

    def __init__(self, key: ClusterKey, local_ip: str) -> None:
        self._public, self._secret = key.curve_pair()
        self.local_ip = local_ip

    def serve(self, socket: Socket) -> None:
        """Before it is bound, in a context that has a guard."""
        self._secure(socket)
        socket.curve_server = True
        socket.zap_domain = _DOMAIN

    def dial(self, socket: Socket) -> None:
        """Before it is connected."""
        self._secure(socket)
        socket.curve_serverkey = self._public

    def verdict(self, request: Sequence[bytes]) -> list[bytes]:
        """The answer to a newcomer's handshake (ZAP, RFC 27)."""
        version, number = (*request, b"", b"")[:2]
        is_member = (
            len(request) == 7
            and request[2] == _DOMAIN
            and request[5] == b"CURVE"
            and z85.encode(request[6]) == self._public
        )
        status = [b"200", b"OK"] if is_member else [b"400", b"not a member of this cluster"]
        return [version or b"1.0", number, *status, b"member" if is_member else b"", b""]

    def _secure(self, socket: Socket) -> None:
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._secret
        socket.ipv6 = ":" in self.local_ip


class CurveContext:
    """A context for links on tcp; keep `guard` running where one of them listens."""

    def __init__(self, key: ClusterKey, local_ip: str) -> None:
        self.curve = Curve(key, local_ip)
        self.context = zmq.asyncio.Context()
        self._zap = self.context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP)

    async def guard(self) -> NoReturn:
        """Let members in. Cancel it to stop."""
        while True:
            request: Sequence[bytes] = await self._zap.recv_multipart()
            await self._zap.send_multipart(self.curve.verdict(request))

    def serve(self, socket: Socket) -> str:
        """Listen on a free port of our address; where that is. Raises OSError."""
        self.curve.serve(socket)
        _be_lively(socket)
        host = f"tcp://{bracketed(self.curve.local_ip)}"
        try:
            return f"{host}:{socket.bind_to_random_port(host)}"
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{host}: {error.strerror}") from error

    def dial(self, socket: Socket, endpoint: str) -> None:
        """Once, for what is lost with a connection is lost. Raises OSError for no address."""
        self.curve.dial(socket)
        _be_lively(socket)
        socket.reconnect_ivl = -1
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{endpoint}: {error.strerror}") from error

    def close(self) -> None:
        """With whatever sockets it still has."""
        self._zap.close(linger=0)
        self.context.destroy(linger=0)


def _be_lively(socket: Socket) -> None:
    """An end that is frozen or cut off is noticed, though nothing is said."""
    socket.heartbeat_ivl = _BEAT_MS
    socket.heartbeat_timeout = _SILENCE_MS
