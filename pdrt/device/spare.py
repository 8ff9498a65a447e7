"""Host memory for the KV of requests that gave their blocks back: whole blocks, copied.

A host block is a place for one KV block; which one holds what is the scheduler's business. The
copies are made from the memory that transports work on, which has all KV on every device (see
`mirror`), in the device thread and between steps, so that each has ended before the next step, or
a peer, writes to what was copied. All of the memory is taken at the start and no more later.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from pdrt.config import SchedulerSection
from pdrt.device.moves import Move, Moves
from pdrt.device.poolsize import most_blocks
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout

Blocks: TypeAlias = npt.NDArray[np.uint8]  # [blocks, bytes]
_PAGE: Final = mmap.PAGESIZE


def _copy(target: Blocks, source: Blocks) -> None:
    np.copyto(target, source)


class Spare:
    """`blocks` places beside a pool. `copy` is what may fail."""

    def __init__(
        self,
        pool: memoryview,
        block_bytes: int,
        blocks: int,
        copy: Callable[[Blocks, Blocks], None] = _copy,
    ) -> None:
        self.blocks, self._copy = blocks, copy
        self._pool: Blocks = np.frombuffer(pool, np.uint8).reshape(-1, block_bytes)
        self._own: Blocks = _memory(blocks * block_bytes).reshape(-1, block_bytes)

    def do(self, moves: Moves) -> tuple[int, ...]:
        """The keys of those that failed; the others are done."""
        saved = self._all(moves.saves, self._pool, self._own)
        loaded = self._all(moves.loads, self._own, self._pool)
        return (*saved, *loaded)

    def _all(self, moves: Iterable[Move], source: Blocks, target: Blocks) -> list[int]:
        failed = []
        for move in moves:
            try:
                for start, end in zip(move.sources, move.targets, strict=True):
                    self._copy(target[end], source[start])
            except (OSError, MemoryError, RuntimeError) as error:  # what a device may raise
                structlog.get_logger().warning("host_copy_failed", error=repr(error))
                failed.append(move.key)
        return failed


def _memory(size: int) -> Blocks:
    """Touched once. Raises ConfigError when there is not so much."""
    if not size:
        return np.empty(0, np.uint8)
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"[scheduler] host_kv_memory: {size} bytes: {error}") from error
    with suppress(OSError):  # not each kernel has huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapped, np.uint8)
    array[::_PAGE] = 0  # now, so that what is missing is missed at the start
    return array


def spare_blocks(config: SchedulerSection, layout: KvLayout, max_len: int, memory: int) -> int:
    """Host blocks for `host_kv_memory`, but no more than KV blocks could ever be used."""
    given = config.host_kv_memory
    wanted = given * memory if given <= 1 else given
    return min(int(wanted) // layout.block_bytes, most_blocks(config, layout, max_len))
