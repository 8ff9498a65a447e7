"""Random numbers by name: uniform ones for each (seed, position), whatever the batch.

A request that is retracted, moved or batched differently draws the same tokens, because its
random numbers depend on nothing else. The sequences of a sampling group (n > 1) have a seed
each, by the request's seed and their index: the first one's is the request's own, so that it
says what it would say alone.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from typing import Final

from pdrt.messages import Sampling

_UNIT: Final = 2.0**-52


def uniforms(seed: int, position: int) -> tuple[float, float, float]:
    """Independent numbers in [0, 1).

    They have 52 bits, not 53: such a share of a float64 is less than it, however it is rounded.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=24).digest()
    first, second, third = struct.unpack("<3Q", digest)
    return (first >> 12) * _UNIT, (second >> 12) * _UNIT, (third >> 12) * _UNIT


def seed_of(seed: int, index: int) -> int:
    """The seed of one sequence of a group, in 63 bits."""
    if index == 0:
        return seed
    packed = struct.pack("<QQ", seed, index)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"sequence").digest()
    return int.from_bytes(digest, "little") >> 1


def of_sequence(sampling: Sampling, index: int) -> Sampling:
    """How that sequence draws, alone."""
    return replace(sampling, n=1, seed=seed_of(sampling.seed, index))
