"""Sockets that are read and written in place: scattered bytes in one call, the GIL released."""

from __future__ import annotations

import ctypes
import errno
import socket
import time
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from pdrt.errors import ConfigError, PeerLost

BUFFER: Final = 4 << 20  # each way; what the kernel's limits leave of it
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
    """Places in memory whose bytes go out, or come in, one after the other."""

    def __init__(self, capacity: int) -> None:
        self._rows: npt.NDArray[np.int64] = np.zeros((capacity, 2), dtype=np.int64)
        self._at = int(self._rows.ctypes.data)
        self._begin = self._end = 0
        self.left = 0  # bytes

    def clear(self) -> None:
        self._begin = self._end = self.left = 0

    def add(self, base: int, places: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        """Append places, counted from `base`."""
        rows = self._rows[self._end : self._end + len(places)]
        rows[:, 0] = places
        rows[:, 0] += base
        rows[:, 1] = lengths
        self._end += len(places)
        self.left += int(lengths.sum())

    def add_one(self, address: int, length: int) -> None:
        self._rows[self._end] = address, length
        self._end += 1
        self.left += length

    def send(self, fd: int) -> None:
        """Send all of it; waits as long as the peer lets it. Raises OSError."""
        message = _Message()
        while self.left:
            message.vector = self._at + 16 * self._begin
            message.vector_length = self._end - self._begin
            self._moved(_sendmsg(fd, ctypes.byref(message), socket.MSG_NOSIGNAL))

    def fill(self, fd: int) -> int:
        """Take in what there is, without waiting; 0 when there is none. Raises OSError."""
        count = _readv(fd, self._at + 16 * self._begin, self._end - self._begin)
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        return self._moved(count)

    def _moved(self, count: int) -> int:
        if count < 0:
            if ctypes.get_errno() in _AGAIN:
                return 0
            raise OSError(ctypes.get_errno(), errno.errorcode.get(ctypes.get_errno(), "failed"))
        self.left -= count
        if self.left:
            self._skip(count)
        return count

    def _skip(self, count: int) -> None:
        lengths = self._rows[self._begin : self._end, 1]
        whole = 0
        if count >= lengths[0]:
            sums = np.cumsum(lengths)
            whole = int(np.searchsorted(sums, count, side="right"))
            count -= int(sums[whole - 1])
        self._begin += whole
        self._rows[self._begin] += (count, -count)


def tune(sock: socket.socket) -> None:
    """No delays, and a peer that is gone is found out."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def fresh(ip: str) -> socket.socket:
    """A socket for that kind of address, with room for what is on its way. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # TCP's window depends on it: set first
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)
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
