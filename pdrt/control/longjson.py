"""Reads JSON that is long, beside the event loop and with the loop free in between.

The prompt's odds are megabytes, and no other thread runs while the library's parser does, nor
while its garbage collector looks through what that has made. So the parser is given one element of
a list at a time, to see that it is JSON, and what is kept of it is its text.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, Final, TypeAlias

from pdrt.control.http import Json, no_constant
from pdrt.control.reply import WIDE, RawList, long_json_of
from pdrt.errors import BadRequest

SHORT: Final = 1 << 15  # bytes: read in a blink
_PIECE: Final = 256  # elements
_BREATH_S: Final = 1e-5  # anything above 0 lets a waiting thread run
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_read: Final = json.JSONDecoder(parse_constant=no_constant).raw_decode

_Read: TypeAlias = tuple[Any, int]  # a value, and where it ends


async def read_long(body: bytes) -> Json:
    """The JSON object in these bytes, to be said by `long_json_of`. Raises BadRequest."""
    if len(body) <= SHORT:
        return parse_long(body)
    return await asyncio.to_thread(parse_long, body)


def parse_long(body: bytes) -> Json:
    """The same, in this thread."""
    try:
        text = body.decode()
        found = _whole(text)
        if isinstance(found, dict) and _HALF_PAIR.search(body):
            long_json_of(found)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}"[:300]) from error
    if not isinstance(found, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(found).__name__}")
    return found


def _whole(text: str) -> object:
    found, end = _value(text, _next(text, 0), is_wide=False)
    if _next(text, end) < len(text):
        raise ValueError(f"more follows it at {end}")
    return found


def _value(text: str, at: int, *, is_wide: bool) -> _Read:
    match text[at : at + 1]:
        case "{":
            return _object(text, _next(text, at + 1))
        case "[":
            return (_wide_list if is_wide else _list)(text, _next(text, at + 1))
        case _:
            return _read(text, at)


def _object(text: str, at: int) -> _Read:
    found: Json = {}
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise ValueError(f"a name is missing at {at}")
        name, at = _read(text, at)
        at = _after(text, at, ":")
        found[name], at = _value(text, at, is_wide=name in WIDE)
        if text[(at := _next(text, at)) : at + 1] == "}":
            return found, at + 1
        at = _after(text, at, ",")


def _wide_list(text: str, at: int) -> _Read:
    found: list[Json] = []
    if text[at : at + 1] == "]":
        return found, at + 1
    while True:
        one, at = _object(text, _after(text, at, "{"))
        found.append(one)
        if text[(at := _next(text, at)) : at + 1] == "]":
            return found, at + 1
        at = _after(text, at, ",")


def _list(text: str, at: int) -> _Read:
    found = RawList()
    if text[at : at + 1] == "]":
        return found, at + 1
    while True:
        _, end = _read(text, at)
        found.append(text[at:end])
        if len(found) % _PIECE == 0:
            time.sleep(_BREATH_S)
        if text[(at := _next(text, end)) : at + 1] == "]":
            return found, at + 1
        at = _after(text, at, ",")


def _next(text: str, at: int) -> int:
    """Past the white space."""
    space = _SPACE.match(text, at)
    assert space is not None, "none is a match too"
    return space.end()


def _after(text: str, at: int, mark: str) -> int:
    """Where the value begins that follows this mark. Raises ValueError."""
    at = _next(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"{mark} is missing at {at}")
    return _next(text, at + 1)
