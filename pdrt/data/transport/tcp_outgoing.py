"""One connection to a peer: found, greeted, and then used by one thread to send.

The loop reads the answers.
"""

from __future__ import annotations

import socket
import time
from typing import Final

from pdrt.data.layout import NO_RUNS, Runs
from pdrt.data.transport.promise import SlotWrite
from pdrt.data.transport.tcp_socket import Vector, cut, fresh, read_exactly, words
from pdrt.data.transport.tcp_wire import (
    BANNER_BYTES,
    MAX_PAYLOAD,
    MAX_RUNS,
    VERDICT_BYTES,
    VERDICTS,
    Answer,
    Answers,
    FrameBuffer,
    Greeting,
    Head,
    Offer,
    SessionKeys,
    Verdict,
)
from pdrt.errors import BadMessage, PeerLost, TransferFailed
from pdrt.keys import ClusterKey

_READ: Final = 1 << 16


class Outgoing:
    """`send` belongs to one thread, `read` to another."""

    def __init__(self, sock: socket.socket, keys: SessionKeys) -> None:
        self.sock = sock
        self.touched = time.monotonic()  # when it was last known to be alive
        self.pongs = 0
        self._frame = FrameBuffer(keys.frames)
        self._frame_at = int(self._frame.array.ctypes.data) + self._frame.sent_at
        self._answers = Answers(keys.answers)
        self._vector = Vector(1 + MAX_RUNS, MAX_PAYLOAD)

    def send(
        self, head: Head, base: int = 0, runs: Runs = NO_RUNS, slot: SlotWrite | None = None
    ) -> None:
        """One frame, its payload straight from `base` on. Waits for the peer. Raises OSError."""
        length = self._frame.pack(head, runs, slot)
        self._vector.set(base, runs[:, ::2], head.payload, (self._frame_at, length))
        self._vector.send(self.sock.fileno())
        self.touched = time.monotonic()

    def read(self) -> list[Answer]:
        """Answers that have come. Raises OSError, or BadMessage, when it is of no use any more."""
        try:
            data = self.sock.recv(_READ, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the connection was closed")
        answers = self._answers.parse(data)
        self.touched = time.monotonic()
        return answers

    def idle_s(self) -> float:
        """For how long nothing has been sent or heard."""
        return time.monotonic() - self.touched

    def is_cut(self) -> bool:
        """Whether its end has arrived, though nobody may have read of it yet."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Dialer:
    """Connects and greets one peer, as often as wanted, one connection at a time."""

    def __init__(self, offer: Offer, key: ClusterKey, seconds: float) -> None:
        self.offer = offer
        self._key, self._seconds = key, seconds
        self._sock: socket.socket | None = None

    def dial(self, link: bytes) -> Outgoing:
        """In time, or not at all. Raises TransferFailed, which names the address."""
        try:
            sock = self._sock = fresh(self.offer.host)
        except OSError as error:
            raise TransferFailed(f"tcp to {self.offer}: {words(error)}") from error
        try:
            sock.settimeout(self._seconds)
            sock.connect((self.offer.host, self.offer.port))
            keys = _greet(sock, self.offer, self._key, link, time.monotonic() + self._seconds)
            sock.settimeout(None)
        except (OSError, UnicodeError, BadMessage, PeerLost) as error:
            sock.close()
            raise TransferFailed(f"tcp to {self.offer}: {words(error)}") from error
        self._sock = None
        return Outgoing(sock, keys)

    def cut(self) -> None:
        """From another thread: whoever is dialling gives up."""
        if sock := self._sock:
            cut(sock)


def _greet(
    sock: socket.socket, offer: Offer, key: ClusterKey, link: bytes, deadline: float
) -> SessionKeys:
    greeting = Greeting(key)
    banner = read_exactly(sock, BANNER_BYTES, deadline)
    sock.sendall(greeting.hello(banner, offer.memory, link))
    try:
        answer = read_exactly(sock, VERDICT_BYTES, deadline)
    except (PeerLost, ConnectionError) as error:
        raise PeerLost("it refused us: is the cluster key the same on both sides?") from error
    verdict = greeting.judged(answer)
    if verdict is not Verdict.WELCOME:
        raise PeerLost(VERDICTS[verdict])
    return greeting.keys()
