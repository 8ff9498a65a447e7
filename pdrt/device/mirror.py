"""Keeps an accelerator's KV pool and the host memory that transports write in step.

Host memory always has all KV: what a step computed is stored back after it. The device lacks
what a peer wrote; it is loaded when a sequence appears, or continues other than it left off.
Unverified on accelerators; the tests run it between two CPU pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdrt.device.batch import SeqStep


class Copies(Protocol):
    """What this needs of a KvPool: copies of whole blocks between host and device."""

    @property
    def block_size(self) -> int: ...

    def load(self, blocks: Sequence[int]) -> None: ...

    def store(self, blocks: Sequence[int]) -> None: ...


class Mirror:
    """Call `before` and `after` around each step of the pool's model."""

    def __init__(self, pool: Copies) -> None:
        self._pool, self._size = pool, pool.block_size
        self._present = dict[int, tuple[int, ...]]()  # key -> its start and block table, expected

    def before(self, batch: Sequence[SeqStep]) -> None:
        """Load the KV below each step's start, where the device cannot have it."""
        missing = [
            step
            for step in batch
            if step.start and self._present.get(step.key) != self._state(step, step.start)
        ]
        copied = [step.copy_from for step in batch if step.copy_from >= 0]
        below = [b for step in missing for b in self._table(step, step.start)]
        self._pool.load([*below, *copied])

    def after(self, batch: Sequence[SeqStep]) -> None:
        """Store what the steps wrote; sequences that sat out are forgotten and loaded anew."""
        self._present = {s.key: self._state(s, s.start + len(s.tokens)) for s in batch}
        self._pool.store(
            [
                block
                for step in batch
                for block in self._table(step, step.start + len(step.tokens))[
                    step.start // self._size :
                ]
            ]
        )

    def _table(self, step: SeqStep, end: int) -> tuple[int, ...]:
        return tuple(step.blocks[: -(-end // self._size)])

    def _state(self, step: SeqStep, end: int) -> tuple[int, ...]:
        return (end, *self._table(step, end))
