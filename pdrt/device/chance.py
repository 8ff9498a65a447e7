"""Random numbers by name: one uniform number for each (seed, position), whatever the batch.

A request that is retracted, moved or batched differently draws the same tokens, because its
random numbers depend on nothing else. The sequences of a sampling group (n > 1) have a seed
each, by the request's seed and their index: the first one's is the request's own, so that it
says what it would say alone.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

from pdrt.messages import Sampling


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    bits: int = struct.unpack("<Q", digest)[0]
    return (bits >> 11) * 2.0**-53


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
