"""CRC-32C of each kv head's part of each block: who writes proves what must arrive.

A memory has one u32 cell for each part, in the order of the parts: part n of the pool lies at
`pool_at + n * head_bytes`, its cell at `sums_at + 4 * n`. So the checksums of a run of whole
parts are a run of cells, and travel like it. The promise: a part whose writer did not write its
cell, or whose bytes are not the writer's, is found before the KV is used (but for one in 2^32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from pdrt.data.layout import NO_RUNS, Runs
from pdrt.data.memory import SUM_BYTES, PoolMemory
from pdrt.messages import Region

Sums: TypeAlias = npt.NDArray[np.uint32]
Offsets: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the parts of a memory's pool lie, and their cells."""

    pool_at: int
    sums_at: int
    count: int

    @staticmethod
    def of(where: PoolMemory | Region, part_bytes: int) -> Parts:
        return Parts(where.pool_at, where.sums_at, (where.size - where.pool_at) // part_bytes)

    def numbers(self, offsets: Offsets, lengths: Offsets, part_bytes: int) -> Offsets:
        """Each run's first part. Raises ValueError for what is not whole parts of the pool."""
        numbers, rest = np.divmod(offsets - self.pool_at, part_bytes)
        if len(numbers) and (
            numbers.min() < 0 or (numbers + lengths // part_bytes).max() > self.count
        ):
            raise ValueError("a run lies outside the memory")
        if rest.any() or (lengths % part_bytes).any():
            raise ValueError(f"a run is not whole parts of {part_bytes} bytes")
        return numbers


def sum_runs(runs: Runs, part_bytes: int, here: Parts, there: Parts) -> Runs:
    """The runs that carry the checksums of what `runs` carry. Raises ValueError as `numbers`."""
    if not len(runs):
        return NO_RUNS
    sources, targets, lengths = runs.T
    return np.stack(
        (
            here.sums_at + SUM_BYTES * here.numbers(sources, lengths, part_bytes),
            there.sums_at + SUM_BYTES * there.numbers(targets, lengths, part_bytes),
            lengths // part_bytes * SUM_BYTES,
        ),
        axis=1,
    )


def checksums(
    view: memoryview, starts: Sequence[int], part_bytes: int, is_stopped: Callable[[], bool]
) -> Sums | None:
    """Of the parts that start there; None when it was stopped between two of them.

    For a thread: from 32 KiB a part on the GIL is released, below that it takes microseconds.
    """
    sums = np.empty(len(starts), dtype="<u4")
    for n, at in enumerate(starts):
        if is_stopped():
            return None
        sums[n] = crc32c(view[at : at + part_bytes])
    return sums


def starts_of(runs: Runs, part_bytes: int) -> list[int]:
    """Where the parts of the runs' sources start, in the order of their cells."""
    counts = runs[:, 2] // part_bytes
    firsts = np.repeat(runs[:, 0], counts)
    inner = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts: list[int] = (firsts + inner * part_bytes).tolist()
    return starts


@dataclass(frozen=True, slots=True)
class Corrupt:
    """What of a transfer is not what was sent: how many blocks, and the first part of them."""

    blocks: int
    index: int  # among the blocks that were looked at
    block: int
    head: int


class Cells:
    """The checksums of a rank's memory, as its peers write them and the rank looks at them."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory, self._layout = memory, memory.layout
        parts = memory.blocks * self._layout.kv_heads
        area = memory.view[memory.sums_at : memory.sums_at + parts * SUM_BYTES]
        self._cells = np.frombuffer(area, dtype="<u4").reshape(memory.blocks, -1)

    def wipe(self, blocks: Sequence[int]) -> None:
        """To be called before anybody is told to write them: what is there is an old owner's."""
        self._cells[list(blocks)] = 0

    def corrupt(self, blocks: Sequence[int]) -> Corrupt | None:
        """Compare each part of these blocks with its cell; takes a while, for a thread."""
        heads, size = self._layout.kv_heads, self._layout.head_bytes
        at = self._memory.pool_at + np.asarray(blocks, dtype=np.int64) * self._layout.block_bytes
        starts = (at[:, None] + np.arange(heads) * size).ravel().tolist()
        sums = checksums(self._memory.view, starts, size, lambda: False)
        assert sums is not None
        bad = sums.reshape(-1, heads) != self._cells[list(blocks)]
        if not bad.any():
            return None
        index, head = (int(n) for n in np.argwhere(bad)[0])
        return Corrupt(int(bad.any(axis=1).sum()), index, blocks[index], head)
