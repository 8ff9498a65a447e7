"""The transport that a config names, over this rank's memory."""

from __future__ import annotations

from pdrt.config import TransferSection
from pdrt.data.memory import HostMemory
from pdrt.data.transport.faulty import FaultyTransport
from pdrt.data.transport.promise import Transport
from pdrt.data.transport.shm import ShmTransport


def open_transport(config: TransferSection, memory: HostMemory) -> Transport:
    """`auto` is shm in this version. To be called on the running loop."""
    inner = ShmTransport(memory, config.threads)
    return FaultyTransport(inner, config.faults) if config.faults else inner
