"""Which rank served a prompt's beginning last: the turns of one conversation go where its KV is.

A prompt is known by hashes of prefixes of increasing length, 16 tokens apart at first and then by a
32nd. The longest few are remembered when it is served, for the next turn's prompt begins with all
of this one's. What many prompts begin with alike (a system prompt) binds nobody by that: each
rank soon has it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

_UNIT: Final = 16 * 4  # bytes: tokens are int32
_FINE: Final = 32  # prefixes in each doubling of the length
_KEPT: Final = 4  # of one prompt: templates may change its very end in the next turn


class Affinity:
    """A bounded map, the longest unused entries go first."""

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._ranks: OrderedDict[bytes, int] = OrderedDict()

    def find(self, keys: list[bytes]) -> int | None:
        """The rank of the longest prefix that is known."""
        for key in reversed(keys):
            if (rank := self._ranks.get(key)) is not None:
                return rank
        return None

    def note(self, keys: list[bytes], rank: int) -> None:
        for key in keys[-_KEPT:]:
            self._ranks[key] = rank
            self._ranks.move_to_end(key)
        while len(self._ranks) > self._most:
            self._ranks.popitem(last=False)

    def __len__(self) -> int:
        return len(self._ranks)


def prefix_keys(tokens: bytes, salt: str = "") -> list[bytes]:
    """Of the packed tokens, shortest first; none for a prompt below 16 tokens."""
    digest = hashlib.blake2b(tokens[:0], digest_size=16, salt=_salt(salt))
    keys: list[bytes] = []
    before = 0
    for end in ends(len(tokens)):
        digest.update(tokens[before:end])
        keys.append(digest.copy().digest())
        before = end
    return keys


def _salt(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest() if text else b""


def ends(size: int) -> Iterator[int]:
    """Where prefixes of so many bytes end."""
    end, step = _UNIT, _UNIT
    while end <= size:
        yield end
        step = max(_UNIT, _UNIT * (1 << (end // _UNIT).bit_length() - 1) // _FINE)
        end += step
