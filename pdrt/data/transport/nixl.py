"""NIXL: one-sided writes over RDMA, EFA, and what UCX finds between two processes of one host.

Each agent has a progress thread that sleeps in poll() until something arrives: it places what
peers write over TCP, and costs 0.2 % of a core when idle. NIXL's own Python class cannot ask
for that sleep (its thread spins), so the binding below it is used. Descriptor lists are made
for each portion: 30 us for 1,024 runs, a tenth of what is saved against lists prepared once,
and any offset can be written. Releasing a handle stops nothing, so nothing here relies on it.
"""

from __future__ import annotations

import ctypes
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pdrt.config import TransferSection
from pdrt.data.layout import Runs
from pdrt.data.memory import SLOT_BYTES, HostMemory
from pdrt.data.transport.engine import EngineTransport
from pdrt.data.transport.lane import EngineError, Hopeless, Life, Naps, set_default, setting
from pdrt.errors import ConfigError

MOST_RUNS: Final = 8192
POLL_US: Final = 10_000  # how long the progress thread sleeps if UCX should forget to wake it
BINDINGS: Final = ("nixl_cu12._bindings", "nixl_cu13._bindings", "nixl._bindings")
_DEVICES: Final = (Path("/sys/class/net"), Path("/sys/class/infiniband"))

Descriptors = npt.NDArray[np.uint64]  # rows of (address, length, device)


class Disconnected(EngineError):
    """The connection is gone, and all that was on it with it."""


class Agent(Protocol):
    """What is used of a NIXL agent. Each call raises EngineError; all may be made by any thread."""

    def register(self, address: int, size: int) -> None: ...

    def metadata(self) -> bytes: ...

    def load(self, metadata: bytes) -> str:
        """The name of the agent that it describes."""
        ...

    def forget(self, name: str) -> None: ...

    def prepare(self, here: Descriptors, there: Descriptors, name: str) -> int:
        """A handle of a write that has not begun."""
        ...

    def post(self, handle: int) -> bool:
        """Begin; True when it is done already."""
        ...

    def is_done(self, handle: int) -> bool: ...

    def release(self, handle: int) -> None: ...

    def close(self) -> None: ...


class NixlEngine:
    """One agent and the peers that it knows; two sessions of one peer share its connection."""

    name = "nixl"
    most_runs = MOST_RUNS

    def __init__(self, agent: Agent) -> None:
        self._agent, self._ours = agent, 0
        self._lock = Lock()  # guards what follows
        self._names: dict[bytes, str] = {}
        self._links: Counter[bytes] = Counter()

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
            if contact not in self._names:
                self._names[contact] = self._agent.load(contact)
            self._links[contact] += 1
            name = self._names[contact]
        return NixlLink(self._agent, name, (self._ours, probe), lambda: self._part(contact))

    def close(self) -> None:
        self._agent.close()

    def _part(self, contact: bytes) -> None:
        with self._lock:
            self._links[contact] -= 1
            if not self._links[contact]:
                del self._links[contact]
                with suppress(EngineError):  # lost, and NIXL has forgotten it already
                    self._agent.forget(self._names.pop(contact))


class NixlLink:
    def __init__(
        self, agent: Agent, name: str, probe: tuple[int, int], part: Callable[[], None]
    ) -> None:
        """`probe`: what can be read here and be written there at any time."""
        self._agent, self._name, self._probe, self._part = agent, name, probe, part

    def put(self, runs: Runs, life: Life) -> None:
        handle = self._prepare(runs)
        try:
            self._finish(handle, life)
        except (Disconnected, Hopeless):
            raise
        except EngineError:
            self._settle(life)
            raise

    def close(self) -> None:
        self._part()

    def _prepare(self, runs: Runs) -> int:
        here, there = np.zeros((2, len(runs), 3), dtype=np.uint64)
        here[:, 0], there[:, 0] = runs[:, 0], runs[:, 1]
        here[:, 1] = there[:, 1] = runs[:, 2]
        return self._agent.prepare(here, there, self._name)

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

    def _settle(self, life: Life) -> None:
        """Runs of a failed write may be on their way: wait until they cannot be any more.

        NIXL flushes the connection behind each write, so one that ends well proves that those
        before it are over. Where there is nothing to write to, the peer's end is waited for.
        """
        naps = Naps(life)
        while not self._is_flushed(life):
            naps.nap()

    def _is_flushed(self, life: Life) -> bool:
        here, there = self._probe
        if not there:
            return False
        try:
            self._finish(self._prepare(np.array([[here, there, SLOT_BYTES]])), life)
        except Hopeless:
            raise
        except EngineError as error:
            return isinstance(error, Disconnected)
        return True


class BoundAgent:
    """The agent of NIXL's own binding."""

    def __init__(self, library: ModuleType, backend: str) -> None:
        """Raises EngineError when the back end cannot be had."""
        config = library.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, POLL_US
        config.syncMode = library.NIXL_THREAD_SYNC_RW
        self._nixl, self._name = library, f"pdrt-{secrets.token_hex(8)}"
        with self._mapped():
            self._agent = library.nixlAgent(self._name, config)
            self._backends = [self._agent.createBackend(backend, {})]
        self._registered: list[object] = []

    def register(self, address: int, size: int) -> None:
        with self._mapped():
            area = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size, 0, "")])
            self._agent.registerMem(area, self._backends)
        self._registered.append(area)

    def metadata(self) -> bytes:
        with self._mapped():
            metadata: bytes = self._agent.getLocalMD()
        return metadata

    def load(self, metadata: bytes) -> str:
        if metadata == self.metadata():  # of ourselves NIXL knows already
            return self._name
        with self._mapped():
            name: str | bytes = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def forget(self, name: str) -> None:
        if name == self._name:
            return
        with self._mapped():
            self._agent.invalidateRemoteMD(name)

    def prepare(self, here: Descriptors, there: Descriptors, name: str) -> int:
        nixl = self._nixl
        with self._mapped():
            local, remote = (nixl.nixlXferDList(nixl.DRAM_SEG, each) for each in (here, there))
            handle: int = self._agent.createXferReq(
                nixl.NIXL_WRITE, local, remote, name, b"", self._backends
            )
        return handle

    def post(self, handle: int) -> bool:
        with self._mapped():
            return self._is_success(self._agent.postXferReq(handle, b""))

    def is_done(self, handle: int) -> bool:
        with self._mapped():
            return self._is_success(self._agent.getXferStatus(handle))

    def release(self, handle: int) -> None:
        with self._mapped():
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        for area in self._registered:
            with suppress(EngineError), self._mapped():
                self._agent.deregisterMem(area, self._backends)
        self._registered.clear()
        del self._agent  # the last reference: its thread and its sockets go

    def _is_success(self, status: object) -> bool:
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise EngineError(str(status))
        return bool(status == self._nixl.NIXL_SUCCESS)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """NIXL's errors have no common class."""
        try:
            yield
        except EngineError:
            raise
        except self._nixl.nixlRemoteDisconnectError as error:
            raise Disconnected(str(error)) from error
        except Exception as error:
            raise EngineError(str(error) or repr(error)) from error


def open_nixl(
    config: TransferSection,
    memory: HostMemory,
    _local_ip: str,
    bindings: Sequence[str] = BINDINGS,
) -> EngineTransport:
    """NIXL finds its own addresses. Raises ConfigError, naming the setting and the cure."""
    library = _library(bindings)
    _check_nic(config)
    set_default("NIXL_LOG_LEVEL", "FATAL")  # what goes wrong is raised too
    set_default("UCX_LOG_LEVEL", "fatal")
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
        f"[transfer] transport nixl is not installed ({problems[0]}): pip install 'pdrt[nixl]'"
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
