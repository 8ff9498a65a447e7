"""The sum of a few integers over a tensor-parallel group, without torch: for the null device.

A star of sockets: rank 0 takes what each has, and answers with the sum. The promise: the same sum
on every rank, or PeerLost on all that are left: at once when one has died, after the timeout when
one is stuck. Between nodes both ends of a line prove that they know the group's secret, by an HMAC
over what both said.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final

from pdrt.device.places import Rendezvous, TcpPlace
from pdrt.errors import PeerLost

_RETRY_S: Final = 0.005  # rank 0 may come later
_GREET_S: Final = 2.0  # for one that called to say who it is
_MOST_BYTES: Final = 1 << 25  # the hashes of two million tokens
_GO: Final = b"go"
_SIZE: Final = Struct("<I")
_NONCE: Final = 32
_PROOF: Final = 32


class Line:
    """Whole messages over a connection."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._until: float | None = None
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Raises OSError, as all of these."""
        self._hurry()
        self._link.sendall(_SIZE.pack(len(data)) + data)

    def receive(self, most: int = _MOST_BYTES) -> bytes:
        (size,) = _SIZE.unpack(self._exactly(_SIZE.size))
        if size > most:
            raise ConnectionResetError(f"{size} bytes are announced")
        return self._exactly(size)

    def patience(self, seconds: float) -> None:
        """How long each bit of a message is awaited from now on."""
        self._until = None
        self._link.settimeout(seconds)

    def until(self, moment: float) -> None:
        """When all that is said must have been: who says it bit by bit gets no more time."""
        self._until = moment

    def close(self) -> None:
        self._link.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._hurry()
            piece = self._link.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("it is gone")
            data += piece
        return bytes(data)

    def _hurry(self) -> None:
        if self._until is not None:
            self._link.settimeout(_left(self._until))


class Sums:
    """One rank's end; made by `meet`. All ranks ask for the same sums in the same order."""

    def __init__(self, rank: int, size: int, lines: list[Line]) -> None:
        self._name, self._rank = f"tensor-parallel rank {rank} of {size}", rank
        self._lines = lines  # rank 0: to each of the others; else to rank 0

    def of(self, values: list[int]) -> list[int]:
        """The sums over all ranks, which are less than 2**63. Raises PeerLost."""
        with self._told():
            own = array.array("q", values)
            if self._rank:
                self._lines[0].send(own.tobytes())
                return _received(self._lines[0], len(values))
            rows = [values, *(_received(line, len(values)) for line in self._lines)]
            total = [sum(column) for column in zip(*rows, strict=True)]
            _tell(self._lines, array.array("q", total).tobytes())
            return total

    def close(self) -> None:
        """Leave; the others' next sum raises PeerLost."""
        for line in self._lines:
            line.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()  # so that the others hear of it too
            raise PeerLost(f"{self._name}: a rank died or is stuck: {error}") from error


def meet(rank: int, size: int, rendezvous: Rendezvous, timeout_s: float) -> Sums:
    """Find the other ranks where no earlier group has met; blocks until all are there.

    `timeout_s` bounds this wait, and each later one for a rank that falls behind. Raises PeerLost.
    """
    until = time.monotonic() + timeout_s
    try:
        if rank:
            lines = [_called(rendezvous, rank, until)]
        else:
            lines = _gathered(rendezvous, size - 1, until)
    except OSError as error:
        raise PeerLost(
            f"tensor-parallel rank {rank} of {size}: the others did not come to {rendezvous}"
            f" within {timeout_s:g} s: {error}"
        ) from error
    for line in lines:
        line.patience(timeout_s)
    return Sums(rank, size, lines)


def _gathered(rendezvous: Rendezvous, count: int, until: float) -> list[Line]:
    lines: dict[int, Line] = {}
    with contextlib.ExitStack() as unless_all, _door(rendezvous, count) as door:
        while len(lines) < count:
            door.settimeout(_left(until))
            line = Line(door.accept()[0])
            unless_all.callback(line.close)
            line.until(min(time.monotonic() + _GREET_S, until))
            number = _greeted(line, rendezvous) if isinstance(rendezvous, TcpPlace) else len(lines)
            if number is None or number in lines:
                line.close()  # a stranger
            else:
                line.patience(_left(until))
                lines[number] = line
        _tell(list(lines.values()), _GO)
        unless_all.pop_all()
    return list(lines.values())


def _door(rendezvous: Rendezvous, count: int) -> socket.socket:
    if isinstance(rendezvous, TcpPlace):
        assert rendezvous.door is not None, "rank 0 opens the place"
        return rendezvous.door
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(str(rendezvous))
        door.listen(count)
    except OSError:
        door.close()
        raise
    return door


def _called(rendezvous: Rendezvous, rank: int, until: float) -> Line:
    while True:
        link = _socket(rendezvous)
        try:
            link.settimeout(_left(until))
            if isinstance(rendezvous, TcpPlace):
                link.connect((rendezvous.host, rendezvous.port))
            else:
                link.connect(str(rendezvous))
            line = Line(link)
            line.until(until)
            if isinstance(rendezvous, TcpPlace):
                _introduce(line, rendezvous, rank)
            if line.receive() == _GO:
                return line
            raise ConnectionResetError("rank 0 is gone")
        except (FileNotFoundError, ConnectionRefusedError):
            link.close()
            time.sleep(_RETRY_S)
        except OSError:
            link.close()
            raise


def _socket(rendezvous: Rendezvous) -> socket.socket:
    """To call from our own address."""
    if isinstance(rendezvous, Path):
        return socket.socket(socket.AF_UNIX)
    link = socket.socket(socket.AF_INET6 if ":" in rendezvous.here else socket.AF_INET)
    try:
        link.bind((rendezvous.here, 0))
    except OSError:
        link.close()
        raise
    return link


# Who is there.


def _greeted(line: Line, place: TcpPlace) -> int | None:
    """The rank that called, or None when it does not know the secret."""
    try:
        ours = os.urandom(_NONCE)
        line.send(ours)
        said = line.receive(_NONCE + _SIZE.size + _PROOF)  # who it is we do not know yet
        words, proof = said[:-_PROOF], said[-_PROOF:]
        all_said = ours + words
        is_member = hmac.compare_digest(proof, _proof(place, b"caller", all_said))
        if len(words) != _NONCE + _SIZE.size or not is_member:
            return None
        line.send(_proof(place, b"door", all_said))
    except OSError:
        return None
    (rank,) = _SIZE.unpack(words[_NONCE:])
    return int(rank)


def _introduce(line: Line, place: TcpPlace, rank: int) -> None:
    """Raises ConnectionResetError when who listens there does not know the secret."""
    words = os.urandom(_NONCE) + _SIZE.pack(rank)
    all_said = line.receive(_NONCE) + words
    line.send(words + _proof(place, b"caller", all_said))
    if not hmac.compare_digest(line.receive(_PROOF), _proof(place, b"door", all_said)):
        raise ConnectionResetError("another program listens there")


def _proof(place: TcpPlace, label: bytes, said: bytes) -> bytes:
    return hmac.digest(place.secret, label + b"\0" + said, "sha256")


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _tell(lines: list[Line], data: bytes) -> None:
    for line in lines:
        line.send(data)


def _received(line: Line, count: int) -> list[int]:
    data = line.receive()
    if len(data) != 8 * count:
        raise ConnectionResetError(f"{len(data)} bytes came")
    return array.array("q", data).tolist()
