"""NIXL: one-sided writes over RDMA, EFA, and what UCX finds between two processes of one host.

Descriptor lists are made for each portion: 30 us for 1,024 runs, a tenth of what is saved
against lists prepared once, and any offset can be written. Releasing a handle stops nothing, so
nothing here relies on it.

Success is the target memory's: UCX flushes the connection behind each write, and the target
answers a flush (over RDMA its NIC does: assumed, not verified on hardware). A broken connection
is no proof of anything: over TCP the target's kernel may hold bytes that land when the process
goes on, and which of its ways UCX has taken is not told, so it is none over RDMA either. Such a
write stays unproven, and the peer is loaded anew before the next one. Between two processes of
one host UCX copies at once, and their end is seen by the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Final

import numpy as np

from pdrt.config import TransferSection
from pdrt.data.installed import NEEDS
from pdrt.data.layout import Runs
from pdrt.data.memory import SLOT_BYTES, HostMemory
from pdrt.data.transport.engine import EngineTransport
from pdrt.data.transport.lane import (
    EngineError,
    Hopeless,
    Life,
    Naps,
    Unproven,
    set_default,
    setting,
)
from pdrt.data.transport.nixl_agent import Agent, BoundAgent
from pdrt.errors import ConfigError

MOST_RUNS: Final = 8192
PATIENCE_S: Final = 1.0  # for a failed write to be proven over, and for a new connection
BINDINGS: Final = tuple(f"{module}._bindings" for module in NEEDS["nixl"].modules)
_DEVICES: Final = (Path("/sys/class/net"), Path("/sys/class/infiniband"))


@dataclass(slots=True)
class Pair:
    """A peer's agent, as we know it: its sessions here share one connection."""

    contact: bytes
    name: str
    links: int = 0
    writes: int = 0  # under way
    is_lost: bool = False  # its connection


class NixlEngine:
    """One agent and the peers that it knows."""

    name = "nixl"
    most_runs = MOST_RUNS

    def __init__(self, agent: Agent) -> None:
        self._agent, self._ours = agent, 0
        self._lock = Lock()  # guards what follows
        self._pairs: dict[bytes, Pair] = {}

    def register(self, address: int, size: int) -> None:
        try:
            self._agent.register(address, size)
        except EngineError as error:
            raise ConfigError(f"nixl cannot register {size} bytes of memory: {error}") from error
        self._ours = address

    def contact(self) -> bytes:
        return self._agent.metadata()

    def connect(self, contact: bytes, probe: int) -> NixlLink:
        with self._lock:  # what is loaded again under a write makes it look lost
            pair = self._pairs.get(contact)
            if pair is None:
                pair = self._pairs[contact] = Pair(contact, self._agent.load(contact))
            pair.links += 1
        return NixlLink(self, self._agent, pair, (self._ours, probe))

    def enter(self, pair: Pair) -> bool:
        """A write to it may begin. False: others are still on the connection that was lost.

        Raises EngineError when it cannot be connected again.
        """
        with self._lock:
            if pair.is_lost and pair.writes:
                return False
            if pair.is_lost:
                self._forget(pair)
                pair.name = self._agent.load(pair.contact)
                pair.is_lost = False
            pair.writes += 1
            return True

    def leave(self, pair: Pair, is_lost: bool) -> None:
        """The write has left the connection, or lost it."""
        with self._lock:
            pair.writes -= 1
            pair.is_lost = pair.is_lost or is_lost

    def part(self, pair: Pair) -> None:
        with self._lock:
            pair.links -= 1
            if not pair.links:
                del self._pairs[pair.contact]
                self._forget(pair)

    def close(self) -> None:
        self._agent.close()

    def _forget(self, pair: Pair) -> None:
        with suppress(EngineError):  # lost, and NIXL has forgotten it already
            self._agent.forget(pair.name)


class NixlLink:
    def __init__(
        self, engine: NixlEngine, agent: Agent, pair: Pair, probe: tuple[int, int]
    ) -> None:
        """`probe`: what can be read here and be written there at any time."""
        self._engine, self._agent, self.pair, self._probe = engine, agent, pair, probe

    def put(self, runs: Runs, life: Life) -> None:
        self._enter(life)
        is_lost = False
        try:
            self._carry(runs, life)
        except (_NotBegun, Unproven):
            is_lost = True
            raise
        finally:
            self._engine.leave(self.pair, is_lost)

    def close(self) -> None:
        self._engine.part(self.pair)

    def _enter(self, life: Life) -> None:
        naps = Naps(life)
        while not self._engine.enter(self.pair):
            if naps.waited_s > PATIENCE_S:
                raise EngineError("the connection is lost, and others' writes are still on it")
            naps.nap()

    def _carry(self, runs: Runs, life: Life) -> None:
        handle = self._prepare(runs)
        try:
            self._finish(handle, life)
        except (Unproven, Hopeless):
            raise
        except EngineError as error:
            self._prove_over(error, life)
            raise

    def _prepare(self, runs: Runs) -> int:
        here, there = np.zeros((2, len(runs), 3), dtype=np.uint64)
        here[:, 0], there[:, 0] = runs[:, 0], runs[:, 1]
        here[:, 1] = there[:, 1] = runs[:, 2]
        try:
            return self._agent.prepare(here, there, self.pair.name)
        except EngineError as error:
            raise _NotBegun(str(error)) from error

    def _finish(self, handle: int, life: Life) -> None:
        naps = Naps(life)
        try:
            is_done = self._agent.post(handle)
            while not is_done:
                naps.nap()
                is_done = self._agent.is_done(handle)
        finally:
            with suppress(EngineError):
                self._agent.release(handle)

    def _prove_over(self, failure: EngineError, life: Life) -> None:
        """Runs of a failed write may be on their way: wait until they cannot be any more.

        NIXL flushes the connection behind each write, so one that ends well on the same
        connection proves that those before it are over. Raises Unproven when none does.
        """
        naps = Naps(life)
        while not self._is_flushed(life):
            if naps.waited_s > PATIENCE_S:
                raise Unproven(str(failure)) from failure
            naps.nap()

    def _is_flushed(self, life: Life) -> bool:
        here, there = self._probe
        if not there:
            return False
        try:
            self._finish(self._prepare(np.array([[here, there, SLOT_BYTES]])), life)
        except (Unproven, Hopeless):
            raise
        except EngineError:
            return False
        return True


class _NotBegun(EngineError):
    """It could not even be prepared, which a peer that was loaded anew may cure."""


def open_nixl(
    config: TransferSection,
    memory: HostMemory,
    _local_ip: str,
    bindings: Sequence[str] = BINDINGS,
) -> EngineTransport:
    """NIXL finds its own addresses. Raises ConfigError, naming the setting and the cure."""
    set_default("NIXL_LOG_LEVEL", "FATAL")  # read when it is imported; it raises what goes wrong
    set_default("UCX_LOG_LEVEL", "fatal")
    library = _library(bindings)
    _check_nic(config)
    try:
        with setting("UCX_NET_DEVICES", config.nic):
            agent = BoundAgent(library, config.nixl_backend)
    except EngineError as error:
        raise ConfigError(_cure(config, str(error))) from error
    try:
        return EngineTransport(memory, NixlEngine(agent))
    except BaseException:
        agent.close()
        raise


def _library(bindings: Sequence[str]) -> ModuleType:
    # Loaded before NIXL's own copy, the system's does not mix with it; else both crash at exit.
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
    problems = list[str]()
    for name in bindings:
        try:
            return import_module(name)
        except ImportError as error:
            problems.append(str(error))
    raise ConfigError(
        f"[transfer] transport nixl is not installed ({problems[0]}): {NEEDS['nixl'].install}"
    )


def _check_nic(config: TransferSection) -> None:
    """UCX only warns of a name that it does not know, as long as it knows another."""
    if not config.nic:
        return
    if config.nixl_backend != "UCX":
        raise ConfigError(
            f"[transfer] nic = {config.nic!r} has no effect with nixl_backend ="
            f" {config.nixl_backend!r}, which takes all devices: leave it empty"
        )
    known = devices()
    for name in config.nic.split(","):
        device = name.partition(":")[0].strip()
        if device not in known and not set(device) & set("^*[?"):
            raise ConfigError(_cure(config, f"there is no {device}"))


def devices() -> list[str]:
    """Network and RDMA devices of this machine, as UCX names them but for the port."""
    return sorted({entry.name for place in _DEVICES if place.is_dir() for entry in place.iterdir()})


def _cure(config: TransferSection, reason: str) -> str:
    if config.nic:
        return (
            f"[transfer] nic = {config.nic!r} cannot be used by nixl ({reason}); this machine has"
            f" {', '.join(devices())}; name some of them, or leave it empty for all"
        )
    if config.nixl_backend != "UCX":
        return (
            f"[transfer] nixl_backend = {config.nixl_backend!r} cannot be used here ({reason}): it"
            " needs libfabric, hwloc and CUDA's libraries on the system; UCX needs none of them"
        )
    return f"[transfer] nixl_backend = {config.nixl_backend!r} cannot be used here: {reason}"
