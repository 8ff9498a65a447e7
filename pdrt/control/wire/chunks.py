"""Chunks as they travel in HTTP/1.1 (RFC 9112, section 7.1): size in hex, CRLF, data, CRLF."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

PassOn: TypeAlias = Callable[[bytes], None]  # takes a chunk as it travels

CRLF: Final = b"\r\n"
_MOST: Final = 2048  # bytes: an event of a stream has a few hundred
_SHORTEST: Final = 7  # two bytes of data


def is_one_chunk(data: bytes) -> bool:
    """Whether this, where a chunk may begin, is a whole one of two bytes or more and nothing else.

    Not every chunk is recognized: a parser reads long ones and oddly written ones.
    """
    length = len(data)
    return (
        _SHORTEST <= length < _MOST and data.startswith(_BEGINNINGS[length]) and data.endswith(CRLF)
    )


def end_of_data(chunk: bytes) -> bytes:
    """The last two bytes of what is in a chunk that `is_one_chunk` has recognized."""
    return chunk[-4:-2]


def _beginning(length: int) -> bytes:
    """What a chunk of so many bytes, with all that is around its data, begins with."""
    digits = 1 if length < 21 else 2 if length < 262 else 3  # 21: "0f", CRLF, 15 bytes, CRLF
    return b"%0*x\r\n" % (digits, max(0, length - digits - 2 * len(CRLF)))


_BEGINNINGS: Final = tuple(map(_beginning, range(_MOST)))  # by length: formatting costs four times
