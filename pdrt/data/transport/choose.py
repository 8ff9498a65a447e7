"""The transports that a config names, over this rank's memory, as one."""

from __future__ import annotations

from collections.abc import Iterator

from pdrt.config import TransferSection
from pdrt.data.installed import wanted
from pdrt.data.memory import PoolMemory
from pdrt.data.transport.choosing import ATTACH_S, Choosing
from pdrt.data.transport.faulty import FaultyTransport
from pdrt.data.transport.memfabric import Store, open_memfabric
from pdrt.data.transport.mooncake import open_mooncake
from pdrt.data.transport.nixl import open_nixl
from pdrt.data.transport.promise import Transport
from pdrt.data.transport.shm import ShmTransport
from pdrt.data.transport.tcp import open_tcp
from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey


def open_transport(
    config: TransferSection,
    memory: PoolMemory,
    local_ip: str,
    key: ClusterKey,
    store: Store | None = None,
    attach_s: float = ATTACH_S,
) -> Transport:
    """To be called on the running loop. Raises ConfigError: whatever is named must work.

    `store`: where the processes of a memfabric cluster find each other. `attach_s`: how long
    each of several transports may take to attach a peer.
    """
    inner = list(_open(config, memory, local_ip, key, store))
    transport = inner[0] if len(inner) == 1 else Choosing(inner, attach_s)
    _ = transport.offers  # what cannot listen says so now
    return FaultyTransport(transport, config.faults) if config.faults else transport


def _open(
    config: TransferSection,
    memory: PoolMemory,
    local_ip: str,
    key: ClusterKey,
    store: Store | None,
) -> Iterator[Transport]:
    for name in wanted(config):
        match name:
            case "shm":
                yield ShmTransport(memory, config.threads)
            case "tcp":
                yield open_tcp(config, memory, local_ip, key)
            case "nixl":
                yield open_nixl(config, memory, local_ip)
            case "mooncake":
                yield open_mooncake(config, memory, local_ip)
            case "memfabric":
                if store is None:
                    raise ConfigError("[transfer] transport memfabric: no store is named")
                yield open_memfabric(config, memory, local_ip, store)
