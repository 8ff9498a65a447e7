"""Who reads an answer: whoever writes it waits while the reader is slow, and hears that it left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pdrt.errors import PdrtError


class ClientGone(Exception):
    """The client's connection is closed."""


class Reader(Protocol):
    """Who reads the answer. `write` waits while the reader is slow; all may raise ClientGone."""

    async def start(self, status: int, headers: Mapping[str, str]) -> None: ...

    async def write(self, chunk: bytes) -> None: ...

    async def finish(self) -> None: ...

    async def break_off(self, error: PdrtError) -> None:
        """Part of the answer is out: say that no more will come, and why."""
        ...
