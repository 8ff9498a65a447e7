"""How many KV blocks a worker's memory holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pdrt.config import SchedulerSection
from pdrt.errors import ConfigError
from pdrt.messages import KvLayout

_CGROUP: Final = Path("/sys/fs/cgroup/memory.max")


def host_bytes(limit: Path = _CGROUP) -> int:
    """Memory of this machine, or of the container that we are in when that is less."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(found, int(limit.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return found


def pool_blocks(config: SchedulerSection, layout: KvLayout, max_len: int, memory: int) -> int:
    """Blocks for `kv_memory`, but no more than full batches of the longest sequences could use.

    Raises ConfigError when not even one block fits.
    """
    wanted = config.kv_memory * memory if config.kv_memory <= 1 else config.kv_memory
    blocks = int(wanted) // layout.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"[scheduler] kv_memory = {config.kv_memory:g}: {int(wanted)} bytes hold no block of"
            f" {layout.block_bytes} bytes; give more memory or a smaller block_size"
        )
    return min(blocks, most_blocks(config, layout, max_len))


def most_blocks(config: SchedulerSection, layout: KvLayout, max_len: int) -> int:
    """Those that full batches of the longest sequences could use."""
    return 2 * config.max_batch_size * -(-max_len // layout.block_size)
