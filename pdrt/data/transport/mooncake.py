"""Mooncake Transfer Engine: one-sided writes over RDMA or TCP.

Each run is submitted and followed on its own, never as a batch: a batch is told to have failed,
or to have taken too long, while parts of it are still on their way, and waiting for it spins.
Of runs, fewer are under way at once than the engine's queue for one peer holds: beyond that it
refuses some and carries out others.

That a run is done is the target memory's word: over TCP the target acknowledges what it has
placed. That it failed is none there: a connection breaks while the target's kernel holds bytes
that land when its process goes on, so such a write stays unproven. Over RDMA a failed run is
taken for over, since its NIC has then stopped: assumed, not verified on hardware.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from pdrt.config import TransferSection, bracketed
from pdrt.data.installed import NEEDS
from pdrt.data.layout import Runs
from pdrt.data.memory import HostMemory
from pdrt.data.transport.engine import EngineTransport
from pdrt.data.transport.lane import EngineError, Life, Naps, Unproven, set_default, setting
from pdrt.errors import ConfigError

MOST_RUNS: Final = 512  # its queue for one peer holds 1,024
MODULE: Final = f"{NEEDS['mooncake'].modules[0]}.engine"
_DONE: Final = 1
_UNDECIDED: Final = (0, -2)  # under way; late, but still under way
_RDMA: Final = Path("/sys/class/infiniband")


class Library(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. Ints are 0 for success but where said."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, size: int, /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def send_probe(self, session: str, /) -> int: ...
    def transfer_submit_write(self, session: str, here: int, there: int, size: int, /) -> int:
        """What `transfer_check_status` wants, once; 0 when it was refused."""
        ...

    def transfer_check_status(self, submitted: int, /) -> int:
        """1 done, -1 failed: not to be asked again; 0 and -2 undecided."""
        ...


class MooncakeEngine:
    name = "mooncake"
    most_runs = MOST_RUNS

    def __init__(self, library: Library, host: str, failed: type[EngineError] = Unproven) -> None:
        """`failed`: what a run's failure is."""
        self._library: Library | None = library
        self._is_ipv6, self._failed = ":" in host, failed
        self._session = f"{bracketed(host)}:{library.get_rpc_port()}"
        self._registered: list[int] = []

    def register(self, address: int, size: int) -> None:
        assert self._library is not None
        if status := self._library.register_memory(address, size):
            raise ConfigError(f"mooncake cannot register {size} bytes of memory: status {status}")
        self._registered.append(address)

    def contact(self) -> bytes:
        return self._session.encode()

    def connect(self, contact: bytes, _probe: int) -> MooncakeLink:
        assert self._library is not None
        try:
            session = contact.decode()
            self._check_family(session)
            status = self._library.send_probe(session)
        except (UnicodeDecodeError, RuntimeError, TypeError) as error:
            raise EngineError(f"{contact!r}: {error}") from error
        if status:
            raise EngineError(f"{session} does not answer: status {status}")
        link = MooncakeLink(self._library, session, self._failed)
        link.open(self._registered[-1])
        return link

    def _check_family(self, session: str) -> None:
        """The engine of a process speaks either; the other it would only tell by a status."""
        if session.startswith("[") != self._is_ipv6:
            raise EngineError(
                f"{session} and {self._session} are not of one family of addresses: give"
                " [parallel] local_ip an IPv4 or an IPv6 address on both sides"
            )

    def close(self) -> None:
        if self._library is not None:
            for address in self._registered:
                self._library.unregister_memory(address)
            self._library = None  # the last reference: its threads and sockets go, within 1 s


class MooncakeLink:
    def __init__(self, library: Library, session: str, failed: type[EngineError]) -> None:
        self._library, self._session, self._failed = library, session, failed

    def open(self, address: int) -> None:
        """The first write to a peer asks it where its memory is, and meanwhile delays the writes
        to all others: so it is one of no bytes, made while the peer is known to answer.
        """
        waiting = deque[int]()
        if error := self._submit(waiting, address, address, 0):
            raise EngineError(error)
        if (status := self._status(waiting[0])) not in (_DONE, *_UNDECIDED):
            raise EngineError(f"{self._session} cannot be opened: status {status}")

    def put(self, runs: Runs, life: Life) -> None:
        refused, failed, waiting = "", "", deque[int]()
        for here, there, size in runs.tolist():
            refused = self._submit(waiting, here, there, size)
            if refused:
                break
        naps = Naps(life)
        while waiting:
            status = self._status(waiting[0])
            if status in _UNDECIDED:
                naps.nap()
                continue
            waiting.popleft()
            naps = Naps(life)
            if status != _DONE:
                failed = failed or f"status {status}"
        if failed:
            raise self._failed(failed)
        if refused:
            raise EngineError(refused)

    def close(self) -> None:
        pass

    def _submit(self, waiting: deque[int], here: int, there: int, size: int) -> str:
        """Why it was refused, or nothing."""
        try:
            submitted = self._library.transfer_submit_write(self._session, here, there, size)
        except Exception as error:  # noqa: BLE001 - the engine's; those before are waited for
            return repr(error)
        if not submitted:
            return f"{self._session} was refused by the engine"
        waiting.append(submitted)
        return ""

    def _status(self, submitted: int) -> int:
        try:
            return self._library.transfer_check_status(submitted)
        except Exception:  # noqa: BLE001 - it says nothing of the write, so it is asked again
            return _UNDECIDED[0]


def open_mooncake(
    config: TransferSection,
    memory: HostMemory,
    local_ip: str,
    make: Callable[[], Library] | None = None,
) -> EngineTransport:
    """Peers reach us at `local_ip`. Raises ConfigError, naming the setting and the cure."""
    check_device(config, sorted(entry.name for entry in _RDMA.iterdir()) if _RDMA.is_dir() else [])
    set_default("MC_LOG_LEVEL", "ERROR")  # read when it is imported
    force_tcp = "1" if config.mooncake_protocol == "tcp" else ""
    ipv6 = "1" if ":" in local_ip else ""  # read when it is imported, too
    with setting("MC_FORCE_TCP", force_tcp), setting("MC_USE_IPV6", ipv6):
        engine = (make or library())()
        status = engine.initialize(local_ip, "P2PHANDSHAKE", config.mooncake_protocol, config.nic)
    if status:
        raise ConfigError(
            f"[transfer] mooncake_protocol = {config.mooncake_protocol!r} cannot be used at"
            f" {local_ip} (status {status}): see the engine's own lines above"
        )
    failed = EngineError if config.mooncake_protocol == "rdma" else Unproven
    return EngineTransport(memory, MooncakeEngine(engine, local_ip, failed))


def library(module: str = MODULE) -> Callable[[], Library]:
    """Raises ConfigError when it cannot be imported."""
    try:
        engine: Callable[[], Library] = import_module(module).TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"[transfer] transport mooncake is not installed ({error}): {cure(error)}"
        ) from error
    return engine


def cure(error: ImportError) -> str:
    """The command that brings what is missing."""
    if "libibverbs" in str(error) or "libnuma" in str(error):
        return NEEDS["mooncake"].system
    return NEEDS["mooncake"].pip


def check_device(config: TransferSection, known: list[str]) -> None:
    """The engine takes TCP in silence when it finds no RDMA device of that name."""
    if config.mooncake_protocol == "tcp":
        if config.nic:
            raise ConfigError(
                f"[transfer] nic = {config.nic!r} has no effect with mooncake_protocol = 'tcp',"
                " which uses local_ip: leave it empty"
            )
        return
    wanted = [name.strip() for name in config.nic.split(",") if name.strip()]
    if not known:
        raise ConfigError(
            "[transfer] mooncake_protocol = 'rdma' needs an RDMA device and this machine has none:"
            " mooncake_protocol = 'tcp'"
        )
    if missing := [name for name in wanted if name not in known]:
        raise ConfigError(
            f"[transfer] nic = {config.nic!r}: there is no {missing[0]}; this machine has"
            f" {', '.join(known)}; leave it empty for all"
        )
