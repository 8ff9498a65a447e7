"""A NIXL agent: what is used of it, and the one of NIXL's own binding.

It has a progress thread that sleeps in poll() until something arrives: it places what peers
write over TCP, and costs 0.2 % of a core when idle. NIXL's own Python class cannot ask for that
sleep (its thread spins), so the binding below it is used.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pdrt.data.transport.lane import EngineError, Unproven

POLL_US: Final = 10_000  # how long the progress thread sleeps if UCX should forget to wake it

Descriptors = npt.NDArray[np.uint64]  # rows of (address, length, device)


class Disconnected(Unproven):
    """The connection is gone, or NIXL has forgotten the peer since another write lost it."""


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
        except (self._nixl.nixlRemoteDisconnectError, self._nixl.nixlNotFoundError) as error:
            raise Disconnected(str(error)) from error
        except Exception as error:
            raise EngineError(str(error) or repr(error)) from error
