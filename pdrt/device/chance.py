"""Random numbers by name: one uniform number for each (seed, position), whatever the batch.

A request that is retracted, moved or batched differently draws the same tokens, because its
random numbers depend on nothing else.
"""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    bits: int = struct.unpack("<Q", digest)[0]
    return (bits >> 11) * 2.0**-53
