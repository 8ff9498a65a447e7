"""What a node is made of, and how it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from pdrt.config import Role
from pdrt.control.dispatch import DPDispatcher
from pdrt.control.figures import Told
from pdrt.control.heartbeat import Time
from pdrt.control.lives import NodeState
from pdrt.control.sides import Side
from pdrt.control.worker_handle import Lost
from pdrt.messages import FromWorker, Rank, Ready, ToWorker
from pdrt.spawn import WorkerSpec


class Handle(Told, Protocol):
    """One worker, as its node has it; see WorkerHandle."""

    def tell(self, message: ToWorker) -> None:
        """Raises PeerLost or Overloaded."""
        ...

    def stop(self) -> None: ...

    async def run(self) -> None: ...


Heard: TypeAlias = Callable[[Handle, "FromWorker | Lost"], None]
Hire: TypeAlias = Callable[[Rank, Callable[[str], WorkerSpec], Path, Heard, Time], Handle]


class Lane:
    """A worker as the dispatcher sees it: what it is told, its role's side hears too."""

    def __init__(self, handle: Handle, told: Callable[[Rank, ToWorker], None]) -> None:
        self._handle, self._told = handle, told

    @property
    def rank(self) -> Rank:
        return self._handle.rank

    @property
    def ready(self) -> Ready | None:
        return self._handle.ready

    def tell(self, message: ToWorker) -> None:
        self._handle.tell(message)
        self._told(self.rank, message)


@dataclass(slots=True)
class Condition:
    """How the node is: its supervisor writes it, the rest of the process reads it."""

    state: NodeState = NodeState.STARTING
    reason: str = ""  # why it failed
    has_been_ready: bool = False
    fault_at: float = 0.0  # wall clock
    served_since_fault: bool = False
    turned_at: float = 0.0  # when the event loop last did

    def faulted(self, wall: float) -> None:
        self.fault_at, self.served_since_fault = wall, False

    def served(self) -> None:
        """A request has succeeded."""
        self.served_since_fault = True


@dataclass(frozen=True, slots=True)
class Parts:
    role: Role
    side: Side
    handles: Sequence[Handle]
    dispatcher: DPDispatcher
    condition: Condition
