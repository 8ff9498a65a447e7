"""The sum of a few integers over a tensor-parallel group, without torch: for the null device.

A star of sockets: rank 0 takes what each has, and answers with the sum. The promise is that of
`collective`: the same sum on every rank, or PeerLost on all that are left: at once when one has
died, after the timeout when one is stuck.
"""

from __future__ import annotations

import array
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

from pdrt.errors import PeerLost

Link: TypeAlias = socket.socket
_KIND: Final = socket.AF_UNIX, socket.SOCK_SEQPACKET
_RETRY_S: Final = 0.005  # rank 0 may come later
_MOST_BYTES: Final = 1 << 20
_GO: Final = b"go"


class Sums:
    """One rank's end; made by `meet`. All ranks ask for the same sums in the same order."""

    def __init__(self, rank: int, size: int, links: list[Link]) -> None:
        self._name, self._rank = f"tensor-parallel rank {rank} of {size}", rank
        self._links = links  # rank 0: to each of the others; else to rank 0

    def of(self, values: list[int]) -> list[int]:
        """The sums over all ranks, which are less than 2**63. Raises PeerLost."""
        with self._told():
            own = array.array("q", values)
            if self._rank:
                self._links[0].send(own.tobytes())
                return _received(self._links[0], len(values))
            rows = [values, *(_received(link, len(values)) for link in self._links)]
            total = [sum(column) for column in zip(*rows, strict=True)]
            _tell(self._links, array.array("q", total).tobytes())
            return total

    def close(self) -> None:
        """Leave; the others' next sum raises PeerLost."""
        for link in self._links:
            link.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()  # so that the others hear of it too
            raise PeerLost(f"{self._name}: a rank died or is stuck: {error}") from error


def meet(rank: int, size: int, rendezvous: Path, timeout_s: float) -> Sums:
    """Find the other ranks at a path that no earlier group has used; blocks until all are there.

    `timeout_s` bounds this wait, and each later one for a rank that falls behind. Raises PeerLost.
    """
    until = time.monotonic() + timeout_s
    try:
        links = _called(rendezvous, until) if rank else _gathered(rendezvous, size - 1, until)
    except OSError as error:
        raise PeerLost(
            f"tensor-parallel rank {rank} of {size}: the others did not come to {rendezvous}"
            f" within {timeout_s:g} s: {error}"
        ) from error
    for link in links:
        link.settimeout(timeout_s)
    return Sums(rank, size, links)


def _gathered(rendezvous: Path, count: int, until: float) -> list[Link]:
    with contextlib.ExitStack() as unless_all, socket.socket(*_KIND) as door:
        door.bind(str(rendezvous))
        door.listen(count)
        links: list[Link] = []
        for _ in range(count):
            door.settimeout(_left(until))
            links.append(unless_all.enter_context(door.accept()[0]))
        _tell(links, _GO)
        unless_all.pop_all()
    return links


def _called(rendezvous: Path, until: float) -> list[Link]:
    while True:
        link = socket.socket(*_KIND)
        try:
            link.settimeout(_left(until))
            link.connect(str(rendezvous))
            if link.recv(len(_GO)) == _GO:
                return [link]
            raise ConnectionResetError("rank 0 is gone")
        except (FileNotFoundError, ConnectionRefusedError):
            link.close()
            time.sleep(_RETRY_S)
        except OSError:
            link.close()
            raise


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _tell(links: list[Link], data: bytes) -> None:
    for link in links:
        link.send(data)


def _received(link: Link, count: int) -> list[int]:
    data = link.recv(_MOST_BYTES)
    if len(data) != 8 * count:
        raise ConnectionResetError("it is gone" if not data else f"{len(data)} bytes came")
    return array.array("q", data).tolist()
