"""MemFabric Hybrid: one-sided writes between Ascend NPUs' hosts. Not verified on hardware.

All processes find each other through one store, which a rank of prefill's first instance makes.
The engine has calls that return when they are through and no others, so a write that hangs in
one cannot be given up, and its answer, a failure too, is taken for the target memory's: what it
uses are copies by the NPUs' own engines, which are over when they are told to be. That is assumed
and not verified. It knows sessions by IPv4 addresses.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, Literal, Protocol

from pdrt.config import TransferSection
from pdrt.data.installed import NEEDS
from pdrt.data.layout import Runs
from pdrt.data.memory import HostMemory
from pdrt.data.transport.engine import EngineTransport
from pdrt.data.transport.lane import EngineError, Life
from pdrt.errors import ConfigError

MOST_RUNS: Final = 1024
TRIES: Final = 30  # the store may be made after us
TRY_AGAIN_S: Final = 2.0
DRIVER: Final = Path("/dev/davinci_manager")


class Engine(Protocol):
    """What is used of `memfabric_hybrid.TransferEngine`. Ints are 0 for success."""

    def get_rpc_port(self) -> int: ...
    def initialize(self, store_url: str, session_id: str, role: str, device_id: int, /) -> int: ...
    def register_memory(self, buffer_addr: int, capacity: int, /) -> int: ...
    def unregister_memory(self, buffer_addr: int, /) -> int: ...
    def batch_transfer_sync_write(
        self,
        dest_session: str,
        buffers: Sequence[int],
        peer_buffers: Sequence[int],
        lengths: Sequence[int],
        /,
    ) -> int: ...
    def destroy(self) -> None: ...


class Library(Protocol):
    """What is used of the module `memfabric_hybrid`."""

    def TransferEngine(self) -> Engine: ...
    def create_config_store(self, store_url: str, /) -> int: ...
    def set_log_level(self, level: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Store:
    """Where the processes find each other, and what this one is among them."""

    url: str
    is_creator: bool
    role: Literal["prefill", "decode", "hybrid"] = "prefill"
    device: int = 0
    sleep: Callable[[float], None] = time.sleep
    driver: Path = DRIVER


class MemfabricEngine:
    name = "memfabric"
    most_runs = MOST_RUNS

    def __init__(self, engine: Engine, session: str) -> None:
        self._engine, self._session = engine, session
        self._registered: list[int] = []

    def register(self, address: int, size: int) -> None:
        if status := self._engine.register_memory(address, size):
            raise ConfigError(f"memfabric cannot register {size} bytes of memory: {status}")
        self._registered.append(address)

    def contact(self) -> bytes:
        return self._session.encode()

    def connect(self, contact: bytes, _probe: int) -> MemfabricLink:
        """The engine connects with the first write."""
        try:
            session = contact.decode()
            ipaddress.IPv4Address(session.rpartition(":")[0])
        except ValueError as error:
            raise EngineError(f"{contact!r} is no session of memfabric") from error
        return MemfabricLink(self._engine, session)

    def close(self) -> None:
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._registered.clear()
        self._engine.destroy()


class MemfabricLink:
    def __init__(self, engine: Engine, session: str) -> None:
        self._engine, self._session = engine, session

    def put(self, runs: Runs, life: Life) -> None:
        here, there, sizes = runs.T.tolist()
        try:
            status = self._engine.batch_transfer_sync_write(self._session, here, there, sizes)
        except Exception as error:
            raise EngineError(repr(error)) from error
        if status:
            raise EngineError(f"status {status}")

    def close(self) -> None:
        pass


def open_memfabric(
    config: TransferSection,
    memory: HostMemory,
    local_ip: str,
    store: Store,
    library: Library | None = None,
) -> EngineTransport:
    """Peers reach us at `local_ip`. Raises ConfigError, naming the setting and the cure."""
    _check(config, local_ip)
    library = library or _library()
    library.set_log_level(3)  # errors
    if store.is_creator and (status := library.create_config_store(store.url)):
        raise ConfigError(f"memfabric cannot make its store at {store.url}: status {status}")
    engine = library.TransferEngine()
    session = f"{local_ip}:{engine.get_rpc_port()}"
    _initialize(engine, session, store)
    return EngineTransport(memory, MemfabricEngine(engine, session))


def _initialize(engine: Engine, session: str, store: Store) -> None:
    role = "Decode" if store.role == "decode" else "Prefill"
    has_driver = store.driver.exists()
    status = engine.initialize(store.url, session, role, store.device)
    tries = TRIES if has_driver and not store.is_creator else 1
    while status and (tries := tries - 1):
        store.sleep(TRY_AGAIN_S)
        status = engine.initialize(store.url, session, role, store.device)
    if not status:
        return
    if has_driver:
        raise ConfigError(
            f"memfabric does not start (status {status}): its store at {store.url} must be"
            " reachable, and the Ascend driver of a version that it knows"
        )
    raise ConfigError(
        f"[transfer] transport memfabric needs an Ascend NPU and its driver (status {status}; there"
        f" is no {store.driver}): install the driver, or take another transport"
    )


def _check(config: TransferSection, local_ip: str) -> None:
    if config.nic:
        raise ConfigError(
            f"[transfer] nic = {config.nic!r} has no effect with memfabric: leave it empty"
        )
    try:
        ipaddress.IPv4Address(local_ip)
    except ValueError as error:
        raise ConfigError(
            f"[parallel] local_ip = {local_ip!r}: memfabric knows processes by IPv4 addresses"
        ) from error


def _library() -> Library:
    needs = NEEDS["memfabric"]
    try:
        module: Library = import_module(needs.modules[0])
    except (ImportError, OSError) as error:  # it loads its own libraries by hand
        raise ConfigError(
            f"[transfer] transport memfabric is not installed ({error}): {needs.install}"
        ) from error
    return module
