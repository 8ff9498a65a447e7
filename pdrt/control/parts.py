"""What a node is made of, and how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from pdrt.config import Role
from pdrt.control.figures import Told
from pdrt.control.heartbeat import Time
from pdrt.control.http import Json
from pdrt.control.lives import NodeState
from pdrt.control.sides import Side
from pdrt.control.worker_handle import Lost
from pdrt.errors import PeerLost
from pdrt.messages import (
    AbortRoom,
    Drain,
    FromWorker,
    Outputs,
    Problem,
    Rank,
    Ready,
    ToWorker,
)
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


class Work(Protocol):
    """The requests of a node, as its supervisor needs them; see DPDispatcher."""

    @property
    def rooms(self) -> int:
        """How many are in flight."""
        ...

    @property
    def tokens(self) -> int:
        """How many these are."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether one more would be refused."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether the node may go: no request is on its workers, nor will be when it drains."""
        ...

    def is_in_flight(self, room: int) -> bool: ...

    def deliver(self, dp_rank: int, outputs: Outputs) -> None: ...

    def worker_lost(
        self, dp_rank: int, problem: Problem, *, is_head_alive: bool = False
    ) -> None: ...

    def abort(self, room: int, reason: str) -> None: ...

    def resume_locally(self, room: int, of_room: int = -1) -> None:
        """Raises NotFound, PeerLost or Overloaded."""
        ...

    def drain(self) -> None: ...

    def catch_up(self) -> None: ...


class Others(Protocol):
    """The other nodes of a leader's instance; see Nodes."""

    def look(self) -> None:
        """Called often."""
        ...

    def health(self) -> Sequence[Json]: ...


class NoOthers:
    """Of an instance that is one node."""

    def look(self) -> None: ...

    def health(self) -> Sequence[Json]:
        return ()


class Lane:
    """A dp rank as the dispatcher sees it: tp 0 is told, and its role's side hears it too.

    The rank is there when all workers of its tensor-parallel group are. When one is on a node
    that wants to go, nothing new is taken, and what is there goes on.
    """

    def __init__(self, group: Sequence[Handle], told: Callable[[Rank, ToWorker], None]) -> None:
        self._head, self._group, self._told = group[0], group, told

    @property
    def rank(self) -> Rank:
        return self._head.rank

    @property
    def ready(self) -> Ready | None:
        return self._head.ready if self._absent is None else None

    def tell(self, message: ToWorker) -> None:
        is_new = not isinstance(message, AbortRoom | Drain)
        if is_new and (absent := self._absent) is not None:
            raise PeerLost(f"{absent.name} is {absent.state}, not ready")
        self._head.tell(message)
        self._told(self.rank, message)

    @property
    def _absent(self) -> Handle | None:
        return next((handle for handle in self._group if handle.ready is None), None)


def lanes(handles: Sequence[Handle], told: Callable[[Rank, ToWorker], None]) -> list[Lane]:
    """One for each dp rank, the head of its group first in each."""
    groups: dict[int, list[Handle]] = {}
    for handle in sorted(handles, key=lambda each: (each.rank.cp, each.rank.tp)):
        groups.setdefault(handle.rank.dp, []).append(handle)
    return [Lane(group, told) for group in groups.values()]


@dataclass(slots=True)
class Condition:
    """How the node is: its supervisor writes it, the rest of the process reads it."""

    state: NodeState = NodeState.STARTING
    reason: str = ""  # why it failed
    has_been_ready: bool = False
    fault_at: float = 0.0  # wall clock
    served_since_fault: bool = False
    turned_at: float = 0.0  # when the event loop last did
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # it takes no new work

    def faulted(self, wall: float) -> None:
        self.fault_at, self.served_since_fault = wall, False

    def served(self) -> None:
        """A request has succeeded."""
        self.served_since_fault = True


@dataclass(frozen=True, slots=True)
class Parts:
    """`prove` tries a request where nobody else would, and says why none would succeed."""

    role: Role
    side: Side
    handles: Sequence[Handle]
    work: Work
    condition: Condition
    others: Others = field(default_factory=NoOthers)
    prove: Callable[[], Awaitable[str]] | None = None
