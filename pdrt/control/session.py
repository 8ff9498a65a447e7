"""Which session a request belongs to, for policies that keep a session in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdrt.control.http import Json

HEADER: Final = "x-session-id"
FIELDS: Final = ("prompt_cache_key", "user")  # of OpenAI's bodies, in this order


def session_of(header: Callable[[str], str], body: Json) -> tuple[str, str]:
    """(key, where it was read): the header before the body's fields; empty when there is none."""
    if named := header(HEADER):
        return named, HEADER
    for field in FIELDS:
        value = body.get(field)
        if value and isinstance(value, str):
            return value, field
    return "", ""
