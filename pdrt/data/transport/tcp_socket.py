"""Sockets that are read and written in place: scattered bytes in one call, the GIL released."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import time
from contextlib import suppress
from typing import Final

import numpy as np

from pdrt.data.transport.promise import Areas
from pdrt.errors import BadMessage, ConfigError, PeerLost

# Measured over loopback (GB/s; sendall, recv_into of so many bytes): 16 MiB, 16 MiB 2.6; 1 MiB,
# 1 MiB 4.3; 1 MiB, 256 KiB 5.1; 256 KiB, 256 KiB 3.1. What is on its way should fit a cache.
PIECE: Final = 256 << 10  # bytes: about what one call takes in
_PIECES: Final = 4  # for one call that sends; and between two looks whether it is still wanted
_FEW: Final = 8  # rows that are gone through one by one
_KEEPALIVE: Final = {  # a silent peer is found out after 25 s, a deaf one after 10
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,
}
_BACKLOG: Final = 128
_SILENT: Final = "no answer in time: a firewall, or another network?"
_AGAIN: Final = (errno.EAGAIN, errno.EINTR)

_libc = ctypes.CDLL(None, use_errno=True)


class _Message(ctypes.Structure):
    """`struct msghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vector", ctypes.c_void_p),
        ("vector_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_sendmsg = _libc.sendmsg
_sendmsg.argtypes = [ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int]
_sendmsg.restype = ctypes.c_ssize_t
_readv = _libc.readv
_readv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_readv.restype = ctypes.c_ssize_t


class Vector:
    """Places in memory whose bytes go out, or come in, one after the other, in portions.

    A loop over it costs a few plain operations a call: that it does not slow down what the
    kernel copies meanwhile was worth a tenth of the throughput.
    """

    def __init__(self, runs: int, payload: int) -> None:
        """For so many runs of so many bytes in all."""
        self._rows: Areas = np.zeros((runs + payload // PIECE, 2), dtype=np.int64)
        self._at = int(self._rows.ctypes.data)
        self._numbers = memoryview(self._rows.data).cast("B").cast("q")
        self._portions = [0]  # where each begins, and where the last one ends
        self._next = 0  # the portion that is under way
        self._row = 0  # where it has got to
        self.left = 0  # bytes

    def set(
        self, base: int, runs: Areas, payload: int, head: tuple[int, int] | None = None
    ) -> None:
        """These runs (offset, length) of so many bytes, counted from `base`; first `head`, a row.

        Raises BadMessage when they are more or less.
        """
        size = int(runs[:, 1].sum())
        if size != payload:
            raise BadMessage(f"runs of {size} bytes for {payload}")
        first = 1 if head else 0
        if head:
            self._numbers[0], self._numbers[1] = head
        count = len(runs)
        if payload > count * PIECE:
            end = self._add_cut(base, runs, first)
        else:
            end = first + count
            np.add(runs, (base, 0), out=self._rows[first:end])
        self.left = payload + (head[1] if head else 0)
        step = max(1, end * PIECE // max(1, self.left))  # as if all rows had one length
        self._portions = [*range(0, end, step), end]
        self._next = self._row = 0
        self._moved(0, 0)

    def _add_cut(self, base: int, runs: Areas, row: int) -> int:
        """Large runs, which are few, as rows of at most PIECE bytes; where they end."""
        numbers = self._numbers
        for at, length in runs.tolist():
            for done in range(0, length, PIECE):
                numbers[2 * row] = base + at + done
                numbers[2 * row + 1] = min(PIECE, length - done)
                row += 1
        return row

    def send(self, fd: int) -> None:
        """Send all of it; waits as long as the peer lets it. Raises OSError."""
        message = _Message()
        pointer = ctypes.byref(message)
        while self.left:
            last = min(self._next + _PIECES, len(self._portions) - 1)
            rows = self._portions[last] - self._row
            message.vector, message.vector_length = self._at + 16 * self._row, rows
            count = _sendmsg(fd, pointer, socket.MSG_NOSIGNAL)
            if count < 0:
                _check()
                continue
            self._moved(count, last)

    def fill(self, fd: int) -> bool:
        """Take in what there is, within limits, without waiting. False when there was too little.

        Raises OSError.
        """
        for _ in range(_PIECES):
            if not self.left:
                break
            last = self._next + 1
            rows = self._portions[last] - self._row
            count = _readv(fd, self._at + 16 * self._row, rows)
            if count <= 0:
                _check(count)
                return False
            self._moved(count, last)
        return True

    def _moved(self, count: int, last: int) -> None:
        """So many bytes are through of what reaches to the portion `last`; empty rows are passed.

        A call for empty rows alone would look like the end of the connection.
        """
        self.left -= count
        numbers, row = self._numbers, self._row
        if self._portions[last] - row > _FEW:
            sums = self._rows[row : self._portions[last], 1].cumsum()
            whole = int(sums.searchsorted(count, side="right"))
            count -= int(sums[whole - 1]) if whole else 0
            row += whole
        end = self._portions[-1]
        while row < end and count >= numbers[2 * row + 1]:
            count -= numbers[2 * row + 1]
            row += 1
        if row < end:
            numbers[2 * row] += count
            numbers[2 * row + 1] -= count
        self._row = row
        while self._next < len(self._portions) - 1 and self._portions[self._next + 1] <= row:
            self._next += 1


def _check(count: int = -1) -> None:
    """Nothing has moved: because it would have to wait, or for good. Raises OSError then."""
    if count == 0:
        raise ConnectionResetError("the connection was closed")
    error = ctypes.get_errno()
    if error not in _AGAIN:
        raise OSError(error, os.strerror(error))


def tune(sock: socket.socket) -> None:
    """No delays, and a peer that is gone is found out."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def fresh(ip: str) -> socket.socket:
    """A socket for that kind of address. Raises OSError.

    The system sizes its buffers: it knows the way better, and what is set stays what it is.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    tune(sock)
    return sock


def listen(ip: str) -> socket.socket:
    """A listening socket that does not block. Raises ConfigError."""
    try:
        sock = fresh(ip)
        try:
            sock.setblocking(False)
            sock.bind((ip, 0))
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"the tcp transport cannot listen on {ip}: {words(error)}") from error
    return sock


def read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes by then. Raises OSError, TimeoutError, or PeerLost when they end early."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(count - len(data))
        if not piece:
            raise PeerLost("it closed the connection")
        data += piece
    return data


def cut(sock: socket.socket) -> None:
    """Whoever waits for the socket wakes up; what it has not sent yet is dropped at its close."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def words(error: Exception) -> str:
    """What went wrong, for people."""
    if isinstance(error, TimeoutError) and not error.errno:
        return str(error) if error.args and error.args != ("timed out",) else _SILENT
    return str(getattr(error, "strerror", None) or error)
