"""Block numbers to byte runs: neighbours on both sides travel as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Runs: TypeAlias = npt.NDArray[np.int64]  # rows of (source offset, destination offset, length)
Blocks: TypeAlias = Sequence[int] | npt.NDArray[np.int64]

NO_RUNS: Runs = np.empty((0, 3), dtype=np.int64)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class Part:
    """Which bytes of each block travel, and where block 0's lie on either side."""

    bytes: int
    src_at: int
    src_stride: int  # from block to block
    dst_at: int
    dst_stride: int


def part_runs(src: Blocks, dst: Blocks, part: Part) -> Runs:
    """Runs that copy this part of block src[i] to block dst[i]."""
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} source blocks for {len(dst)} destination blocks")
    if not len(src):
        return NO_RUNS
    sources = part.src_at + np.asarray(src, dtype=np.int64) * part.src_stride
    targets = part.dst_at + np.asarray(dst, dtype=np.int64) * part.dst_stride
    is_apart = (np.diff(sources) != part.bytes) | (np.diff(targets) != part.bytes)
    firsts = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(is_apart) + 1))
    lengths = np.diff(np.append(firsts, len(sources)))
    return np.stack((sources[firsts], targets[firsts], lengths * part.bytes), axis=1)


def merged_runs(src: Blocks, dst: Blocks, block_bytes: int, src_at: int, dst_at: int) -> Runs:
    """Runs that copy whole blocks; `src_at`, `dst_at` are the pools' offsets."""
    return part_runs(src, dst, Part(block_bytes, src_at, block_bytes, dst_at, block_bytes))


def areas_of(blocks: Blocks, at: int, stride: int) -> npt.NDArray[np.int64]:
    """Rows of (offset, length) that cover these blocks, in order of offset, neighbours as one."""
    numbers = np.unique(np.asarray(blocks, dtype=np.int64))
    runs = merged_runs(numbers, numbers, stride, at, at)
    return runs[:, [0, 2]]
