"""Where a request stands in a scheduler."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """A state says who may hold what."""

    QUEUED = "queued"  # holds nothing; will be computed here, from its first token
    BOOTSTRAPPING = "bootstrapping"  # holds nothing; the two sides are finding each other
    WAITING = "waiting"  # holds nothing; the other side is ready, memory is not
    UNBOUND = "unbound"  # holds nothing; its prefill was lost, another may be found
    TRANSFERRING = "transferring"  # holds blocks and a slot; the peer writes them
    RUNNING = "running"  # holds blocks; the device computes it
    SWAPPED = "swapped"  # holds host blocks with its KV; made way, and will be first in line
    INFLIGHT = "inflight"  # holds blocks; computed, the transport still reads them
    DONE = "done"  # told; holds nothing
