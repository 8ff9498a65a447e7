"""Random names, from the system in large pieces: asking it for each costs more than the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

_PIECE: Final = 1 << 12  # bytes


class Chance:
    """Rooms that no client can choose or guess, and request ids."""

    def __init__(self, source: Callable[[int], bytes] = os.urandom) -> None:
        self._source = source
        self._bytes = b""
        self._at = 0

    def room(self) -> int:
        """63 bits."""
        return int.from_bytes(self._take(8), "big") >> 1

    def request_id(self) -> str:
        return self._take(12).hex()

    def _take(self, count: int) -> bytes:
        """Each byte is given once."""
        start, self._at = self._at, self._at + count
        if self._at > len(self._bytes):
            self._bytes = self._source(_PIECE)
            start, self._at = 0, count
        return self._bytes[start : self._at]
