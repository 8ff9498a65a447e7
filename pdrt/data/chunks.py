"""From computed blocks to one write for one decode rank."""

from __future__ import annotations

from pdrt.data.commands import SendBlocks
from pdrt.data.layout import part_runs
from pdrt.data.metadata import pack_slot
from pdrt.data.transfer import Target
from pdrt.data.transport.promise import SlotWrite, Write


def write_of(chunk: SendBlocks, target: Target, write: int) -> Write:
    """What of the chunk this decode rank does not have yet; after its last, the slot."""
    skip = max(0, target.first_block - chunk.first_block)
    src = chunk.blocks[skip:]
    begin = chunk.first_block + skip - target.first_block
    runs = part_runs(src, target.blocks[begin : begin + len(src)], target.part)
    slot = None if chunk.last is None else SlotWrite(target.slot_at, pack_slot(chunk.last))
    return Write(write, target.session, runs, slot, (chunk.room, chunk.attempt))
