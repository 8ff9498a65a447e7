"""What the transfer side spends on a tick and on a description, without sockets: pure Python cost.

512 waiting slots are looked at as the poller does, and a prompt of 8192 tokens of a 61-layer
model is described as one write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdrt.data.chunks import write_of
from pdrt.data.commands import SendBlocks
from pdrt.data.layout import Part
from pdrt.data.memory import PoolMemory
from pdrt.data.metadata import MetadataBufferPool
from pdrt.data.transfer import Target
from pdrt.data.transport.promise import Write
from pdrt.messages import KvLayout

SLOTS: Final = 512
TOKENS: Final = 8192
LAYERS: Final = 61
_TIMES: Final = 300
_TINY: Final = KvLayout(block_size=1, dtype="uint8", layers=1, kv_heads=1, head_dim=1)
_LAYOUT: Final = KvLayout(block_size=16, dtype="bfloat16", layers=LAYERS, kv_heads=8, head_dim=128)


@dataclass(frozen=True, slots=True)
class Point:
    """Microseconds that something took."""

    what: str
    count: int
    p50_us: float
    p99_us: float
    max_us: float

    @staticmethod
    def of(what: str, took_us: Sequence[float]) -> Point:
        ordered, count = sorted(took_us), len(took_us)
        p50, p99 = (ordered[min(int(share * count), count - 1)] for share in (0.5, 0.99))
        return Point(what, count, p50, p99, ordered[-1])


def points(times: int = _TIMES) -> list[Point]:
    """For the table and `--json`."""
    memory = PoolMemory(_TINY, 1, SLOTS)
    try:
        return [
            _timed(f"poll {SLOTS} waiting slots", polling(memory), times),
            _timed(f"describe {TOKENS} tokens, blocks in one run", describing(1), times),
            _timed(f"describe {TOKENS} tokens, blocks scattered", describing(7), times),
            _timed(f"describe {TOKENS} tokens, half of the heads", describing(1, 2), times),
        ]
    finally:
        memory.close()


def polling(memory: PoolMemory) -> Callable[[], object]:
    """One tick of the poller while every slot is waited for and none is valid."""
    slots = MetadataBufferPool(memory.slots_view, memory.slots)
    for slot in range(memory.slots):
        slots.watch(slot, slot, 0, TOKENS)
    return slots.scan


def describing(stride: int, shares: int = 1) -> Callable[[], Write]:
    """One write of a whole prompt. With a stride above 1 no two blocks are neighbours; of `shares`
    prefill ranks (P = shares x D) each writes that part of a block's heads.
    """
    count = TOKENS // _LAYOUT.block_size
    blocks = tuple(number * stride % count for number in range(count))
    part_bytes = _LAYOUT.block_bytes // shares
    target = Target(
        session="decode",
        writes=True,
        first_block=0,
        blocks=np.asarray(blocks, dtype=np.int64),
        part=Part(part_bytes, 0, part_bytes, 0, _LAYOUT.block_bytes),
        slot_at=0,
    )
    chunk = SendBlocks(1, 0, blocks, 0)
    return lambda: write_of(chunk, target, 1)


def _timed(what: str, call: Callable[[], object], times: int) -> Point:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e6)
    return Point.of(what, took)
