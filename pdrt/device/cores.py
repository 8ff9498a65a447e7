"""Which cores the device threads of a worker run on."""

from __future__ import annotations

import os

from pdrt.config import NodeConfig
from pdrt.errors import ConfigError


def pin(config: NodeConfig, place: int) -> None:
    """Keep this thread, and those that it will start, on the worker's cores, if any are named.

    `place` is the worker's number on its node. Raises ConfigError when they are not there.
    """
    own = cores_of(config, place)
    if not own:
        return
    try:
        os.sched_setaffinity(0, own)
    except OSError as error:
        raise ConfigError(f"[device] cores: {own} cannot be used here: {error}") from error


def cores_of(config: NodeConfig, place: int) -> tuple[int, ...]:
    """Neighbours in the list; empty: wherever there is time. Raises ConfigError."""
    cores, workers = config.device.cores, config.parallel.devices_per_node
    if cores and len(set(cores)) < len(cores):
        raise ConfigError(f"[device] cores: one stands twice in {list(cores)}")
    if cores and len(cores) % workers:
        raise ConfigError(f"[device] cores: {len(cores)} are no equal shares for {workers} workers")
    each = len(cores) // workers
    return cores[place * each : (place + 1) * each]


def threads_of(config: NodeConfig) -> int:
    """Compute threads of one worker: as configured, else its share of the usable cores."""
    usable = len(config.device.cores or os.sched_getaffinity(0))
    return config.device.threads or max(1, usable // config.parallel.devices_per_node)
