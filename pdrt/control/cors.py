"""What browsers may ask of the router: pages of origins that are named, and no others. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from pdrt.control.wire.reply import Fields, Reply
from pdrt.control.wire.request import Request

ANY: Final = "*"
_METHODS: Final = "GET, HEAD, POST, OPTIONS"
_SHOWN: Final = "x-request-id, x-pd-path, retry-after"
_MAX_AGE_S: Final = 600
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9-]{1,64}( *, *[A-Za-z0-9-]{1,64}){0,63}")


class Cors:
    """Nothing at all is said when no origin is allowed.

    Keys travel in a header that a page sets itself, so cookies are never asked for or allowed.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def lines(self, request: Request) -> bytes:
        """For the head of every answer, errors too."""
        if not self._origins:
            return b""
        origin = request.header("origin")
        if ANY in self._origins:
            return _lines(ANY) if origin else b""
        if origin in self._origins:
            return _lines(origin) + b"vary: origin\r\n"
        return b"vary: origin\r\n"

    def preflight(self, request: Request) -> Reply | None:
        """The answer to a browser that asks whether it may; None for anything else."""
        is_asked = request.method == "OPTIONS" and request.header("access-control-request-method")
        if not self._origins or not is_asked:
            return None
        headers: Fields = (("access-control-allow-methods", _METHODS),)
        wanted = request.header("access-control-request-headers")
        if _HEADER_NAMES.fullmatch(wanted):  # `*` would leave out authorization
            headers = (*headers, ("access-control-allow-headers", wanted))
        return Reply(204, headers=(*headers, ("access-control-max-age", str(_MAX_AGE_S))))


def _lines(origin: str) -> bytes:
    allowed = f"access-control-allow-origin: {origin}\r\n"
    return f"{allowed}access-control-expose-headers: {_SHOWN}\r\n".encode("latin-1")
