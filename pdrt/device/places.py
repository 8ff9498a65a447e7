"""Where the ranks of a tensor-parallel group meet: a file of their node, or an address of tp 0's.

A file lies in a private directory, so whoever comes there is one of us. At an address anybody
may come: what uses it has to ask who, if it can.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from pdrt.config import bracketed
from pdrt.errors import BadMessage

_SCHEME = "tcp://"


@dataclass(frozen=True, slots=True)
class TcpPlace:
    """For a group that spans nodes. `secret` is known to its ranks alone."""

    host: str
    port: int
    here: str  # our own address
    secret: bytes = field(repr=False)
    door: socket.socket | None = None  # tp 0's, which listens there already

    def __str__(self) -> str:
        return f"{_SCHEME}{bracketed(self.host)}:{self.port}"

    @staticmethod
    def open(here: str, secret: bytes) -> TcpPlace:
        """Tp 0's, on a free port of its own address. Raises OSError."""
        family = socket.AF_INET6 if ":" in here else socket.AF_INET
        door = socket.create_server((here, 0), family=family)
        return TcpPlace(here, door.getsockname()[1], here, secret, door)


Rendezvous: TypeAlias = Path | TcpPlace


def place_of(text: str, here: str, secret: bytes) -> Rendezvous:
    """A follower's, as tp 0 told it. Raises BadMessage."""
    if not text.startswith(_SCHEME):
        return Path(text)
    host, _, port = text.removeprefix(_SCHEME).rpartition(":")
    if not (host and port.isascii() and port.isdigit()):
        raise BadMessage(f"{text[:100]!r} is no place to meet")
    return TcpPlace(host.strip("[]"), int(port), here, secret)
