"""The transports that a config names, over this rank's memory, as one."""

from __future__ import annotations

from typing import Final

from pdrt.config import TransferSection, TransportName
from pdrt.data.installed import wanted
from pdrt.data.memory import PoolMemory
from pdrt.data.transport.choosing import Choosing
from pdrt.data.transport.faulty import FaultyTransport
from pdrt.data.transport.mooncake import open_mooncake
from pdrt.data.transport.nixl import open_nixl
from pdrt.data.transport.promise import Transport
from pdrt.data.transport.shm import ShmTransport
from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey

_BUILT: Final[tuple[str, ...]] = ("shm", "nixl", "mooncake")


def open_transport(
    config: TransferSection, memory: PoolMemory, local_ip: str, key: ClusterKey
) -> Transport:
    """To be called on the running loop. Raises ConfigError: whatever is named must work."""
    inner = [
        _open(name, config, memory, local_ip, key)
        for name in wanted(config)
        if name in _BUILT or config.transport == name
    ]
    transport = inner[0] if len(inner) == 1 else Choosing(inner)
    return FaultyTransport(transport, config.faults) if config.faults else transport


def _open(
    name: TransportName,
    config: TransferSection,
    memory: PoolMemory,
    local_ip: str,
    key: ClusterKey,
) -> Transport:
    match name:
        case "shm":
            return ShmTransport(memory, config.threads)
        case "nixl":
            return open_nixl(config, memory, local_ip)
        case "mooncake":
            return open_mooncake(config, memory, local_ip)
        case _:
            raise ConfigError(f"[transfer] transport = {name!r} is not part of this version")
