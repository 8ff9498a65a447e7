"""Block numbers to byte runs: neighbours on both sides travel as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Runs: TypeAlias = npt.NDArray[np.int64]  # rows of (source offset, destination offset, length)

NO_RUNS: Runs = np.empty((0, 3), dtype=np.int64)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)


def merged_runs(
    src: Sequence[int], dst: Sequence[int], block_bytes: int, src_at: int, dst_at: int
) -> Runs:
    """Runs that copy block src[i] to block dst[i]; `src_at`, `dst_at` are the pools' offsets."""
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} source blocks for {len(dst)} destination blocks")
    if not len(src):
        return NO_RUNS
    sources = np.asarray(src, dtype=np.int64)
    targets = np.asarray(dst, dtype=np.int64)
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    firsts = np.concatenate((np.zeros(1, dtype=np.int64), breaks))
    lengths = np.diff(np.append(firsts, len(sources)))
    return np.stack(
        (
            src_at + sources[firsts] * block_bytes,
            dst_at + targets[firsts] * block_bytes,
            lengths * block_bytes,
        ),
        axis=1,
    )
