"""Which block of the writer's pool goes to which of the target's: scattered, the same on both ends.

The promise: a turn never finds its own content at the target already, for each turn pairs the
blocks anew; so a checksum over what a turn moved proves that this turn moved it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

Offsets = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_ODD: Final = np.uint64(0xBF58476D1CE4E5B9)
_FILL_WORDS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """`count` blocks from place `first` of the shuffled order on, in turn number `turn`."""

    first: int
    count: int
    turn: int


class Pairing:
    """The shuffled order of a pool's blocks, one order for each side."""

    def __init__(self, pool_bytes: int, block_bytes: int, seed: int = 0) -> None:
        self.block_bytes = block_bytes
        self.blocks = pool_bytes // block_bytes
        self._sources = _shuffled(self.blocks, 2 * seed) * block_bytes
        self._targets = _shuffled(self.blocks, 2 * seed + 1) * block_bytes

    def sources(self, stretch: Stretch) -> Offsets:
        """Where the blocks lie in the writer's pool."""
        places = np.arange(stretch.first, stretch.first + stretch.count) % self.blocks
        return self._sources[places]

    def targets(self, stretch: Stretch) -> Offsets:
        """And where in the target's."""
        first = stretch.first + stretch.turn
        places = np.arange(first, first + stretch.count) % self.blocks
        return self._targets[places]


def _shuffled(count: int, seed: int) -> Offsets:
    """A permutation that depends on nothing but its arguments (no library's generator)."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _ODD
    return np.argsort(mixed ^ (mixed >> np.uint64(32)), kind="stable")


def fill(pool: Bytes) -> None:
    """Give each 8 bytes of the pool a value of their own."""
    words = pool[: len(pool) // 8 * 8].view(np.uint64)
    for begin in range(0, len(words), _FILL_WORDS):
        end = min(begin + _FILL_WORDS, len(words))
        words[begin:end] = np.arange(begin + 1, end + 1, dtype=np.uint64) * _GOLDEN


def checksum(pool: memoryview, offsets: Offsets, block_bytes: int) -> int:
    """CRC-32C over the blocks in this order."""
    found = 0
    for offset in offsets.tolist():
        found = crc32c(pool[offset : offset + block_bytes], found)
    return found
