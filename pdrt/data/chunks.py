"""From computed blocks to one write for one decode rank."""

from __future__ import annotations

from pdrt.data.commands import SendBlocks
from pdrt.data.layout import merged_runs
from pdrt.data.memory import SLOT_BYTES
from pdrt.data.metadata import pack_slot
from pdrt.data.transfer import Target
from pdrt.data.transport.promise import SlotWrite, Write


def write_of(
    chunk: SendBlocks, target: Target, write: int, block_bytes: int, pool_at: int
) -> Write:
    """What of the chunk this decode rank does not have yet. `pool_at` is our pool's offset."""
    skip = max(0, target.first_block - chunk.first_block)
    src = chunk.blocks[skip:]
    begin = chunk.first_block + skip - target.first_block
    dst = target.blocks[begin : begin + len(src)]
    region = target.region
    slot = None
    if chunk.last is not None:
        at = region.slots_at + target.slot * SLOT_BYTES
        slot = SlotWrite(at, pack_slot(chunk.last))
    runs = merged_runs(src, dst, block_bytes, pool_at, region.pool_at)
    return Write(write, target.session, runs, slot, (chunk.room, chunk.attempt))
