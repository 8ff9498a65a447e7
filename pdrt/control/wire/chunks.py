"""Chunks as they travel in HTTP/1.1 (RFC 9112, section 7.1): size in hex, CRLF, data, CRLF."""

from __future__ import annotations

from typing import Final

CRLF: Final = b"\r\n"
_MOST: Final = 4096  # bytes: an event of a stream is a few hundred
_NEVER: Final = b"\n"  # no chunk begins so


def _beginnings() -> tuple[bytes, ...]:
    """By its length as it travels, what a chunk of two bytes or more begins with."""
    found = [_NEVER] * _MOST
    for size in range(2, _MOST):
        begins = b"%x\r\n" % size
        length = len(begins) + size + len(CRLF)
        if length < _MOST:
            found[length] = begins
    return tuple(found)


_BEGINNINGS: Final = _beginnings()


def is_one_chunk(data: bytes) -> bool:
    """Whether this, where a chunk may begin, is a whole one and nothing beside it.

    Not every chunk is known by its length: a parser reads long ones and oddly written ones.
    """
    length = len(data)
    return length < _MOST and data.startswith(_BEGINNINGS[length]) and data.endswith(CRLF)


def end_of_data(chunk: bytes) -> bytes:
    """The last two bytes of what is in a chunk that `is_one_chunk` has found."""
    return chunk[-4:-2]
