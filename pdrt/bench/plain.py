"""The plain socket loop that `tcp` is measured against: one connection, no framing but a header.

Both ends know the pairing, so a header names a stretch; the receiver reads the blocks straight
into their places and answers with one byte. Who has not the token gets no byte in.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal, TypeAlias

from pdrt.bench.pairing import Pairing, Stretch
from pdrt.control.listen import listen

Style: TypeAlias = Literal["sendall", "sendmsg"]
STYLES: Final[tuple[Style, ...]] = ("sendall", "sendmsg")
TOKEN_BYTES: Final = 32
_HEADER: Final = struct.Struct("<QQQQ")  # block bytes, first, count, turn
_GREETING: Final = struct.Struct(f"<{TOKEN_BYTES}s8s")
_MAX_VECTOR: Final = 1024  # IOV_MAX
_PATIENCE_S: Final = 60


def _patient(connection: socket.socket) -> None:
    """Bounded waits by the kernel: Python's own timeouts cost a poll before each call."""
    limit = struct.pack("@ll", _PATIENCE_S, 0)
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class PlainSender:
    """The writer's end of one connection."""

    def __init__(self, address: tuple[str, int], token: bytes, style: Style) -> None:
        """Raises OSError."""
        self._connection = socket.create_connection(address, timeout=_PATIENCE_S)
        _patient(self._connection)
        self._connection.sendall(_GREETING.pack(token, style.encode()))
        self._send = _send_each if style == "sendall" else _send_vector

    def move(self, blocks: Sequence[memoryview], block_bytes: int, stretch: Stretch) -> None:
        """Send the blocks and wait until they are in place. Raises OSError."""
        header = _HEADER.pack(block_bytes, stretch.first, stretch.count, stretch.turn)
        self._send(self._connection, [memoryview(header), *blocks])
        if self._connection.recv(1) != b"\x01":
            raise ConnectionResetError("the plain loop's other end is gone")

    def close(self) -> None:
        self._connection.close()


class PlainReceiver:
    """The target's end: a thread for each connection. Close it before the pool."""

    def __init__(self, host: str, pool: memoryview, pairing: Callable[[int], Pairing]) -> None:
        """Raises ConfigError."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._pool, self._pairing = pool, pairing
        self._listening = listen(host, 0)
        self._listening.setblocking(True)
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, name="plain-accept", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        for each in (self._listening, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:  # closed, or the writer is gone
            _patient(connection)
            greeting = bytearray(_GREETING.size)
            _receive_each(connection, [memoryview(greeting)])
            token, style = _GREETING.unpack(greeting)
            if not hmac.compare_digest(token, self.token):
                return
            is_vector = style.rstrip(b"\0") == b"sendmsg"
            self._receive(connection, _receive_vector if is_vector else _receive_each)

    def _receive(
        self,
        connection: socket.socket,
        receive: Callable[[socket.socket, Sequence[memoryview]], None],
    ) -> None:
        header = bytearray(_HEADER.size)
        while True:
            _receive_each(connection, [memoryview(header)])
            block_bytes, first, count, turn = _HEADER.unpack(header)
            targets = self._pairing(block_bytes).targets(Stretch(first, count, turn)).tolist()
            receive(connection, [self._pool[at : at + block_bytes] for at in targets])
            connection.sendall(b"\x01")


def _send_each(connection: socket.socket, blocks: Sequence[memoryview]) -> None:
    for block in blocks:
        connection.sendall(block)


def _send_vector(connection: socket.socket, blocks: Sequence[memoryview]) -> None:
    rest = list(blocks)
    while rest:
        rest = _after(rest, connection.sendmsg(rest[:_MAX_VECTOR]))


def _receive_each(connection: socket.socket, blocks: Sequence[memoryview]) -> None:
    for block in blocks:
        rest = block
        while rest:
            rest = rest[_some(connection.recv_into(rest)) :]


def _receive_vector(connection: socket.socket, blocks: Sequence[memoryview]) -> None:
    rest = list(blocks)
    while rest:
        rest = _after(rest, _some(connection.recvmsg_into(rest[:_MAX_VECTOR])[0]))


def _some(count: int) -> int:
    if count == 0:
        raise ConnectionResetError("the writer is gone")
    return count


def _after(blocks: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the blocks when so many bytes are through."""
    for number, block in enumerate(blocks):
        if done < len(block):
            return [block[done:], *blocks[number + 1 :]]
        done -= len(block)
    return []
