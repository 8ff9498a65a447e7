"""What a relay is given: one request on its way, its reader, and what all relays share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdrt.control.fleet import Fleet
from pdrt.control.instances import Instance
from pdrt.control.job import Job
from pdrt.control.passage import Passage
from pdrt.control.policy import Ask
from pdrt.control.traces import Tracing
from pdrt.control.upstream import Upstream
from pdrt.control.wire.chunks import PassOn
from pdrt.control.wire.reply import Fields
from pdrt.errors import PdrtError
from pdrt.keys import ClusterKey


class Client(Protocol):
    """Who reads the answer. Whatever is said after the end goes nowhere."""

    path_label: str  # which path serves it

    @property
    def is_full(self) -> bool:
        """Whether it reads slower than it is written to."""
        ...

    def start(self, status: int, headers: Mapping[bytes, bytes], path: str) -> PassOn | None:
        """`headers` are the leader's; `path` is for x-pd-path.

        Returns what takes chunks as they travel, or None where what is in them must be written.
        """
        ...

    def write(self, chunk: bytes) -> None: ...

    def finish(self) -> None: ...

    def break_off(self, error: PdrtError) -> None:
        """Part of the answer is out: say that no more will come, and why."""
        ...

    def refuse(self, error: PdrtError, status: int = 0, headers: Fields = ()) -> None:
        """It has heard nothing yet: the error is its answer."""
        ...


class Alarm(Protocol):
    def cancel(self) -> None: ...


def ring_later(delay: float, ring: Callable[[], None]) -> Alarm:
    return asyncio.get_running_loop().call_later(delay, ring)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks and waits, so that tests can bring their own."""

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    alarm: Callable[[float, Callable[[], None]], Alarm] = ring_later
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True, slots=True)
class Tools:
    """What all relays of a router share. Without a key, instances are plain backends."""

    fleet: Fleet
    upstream: Upstream
    key: ClusterKey | None
    mint_room: Callable[[], int]
    clocks: Clocks
    rebind_grace_s: float
    max_moves: int = 0  # of one stream, each when its decode instance is lost
    move_s: float = 0.0  # how long an instance is looked for that goes on with it
    tracing: Tracing | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", self.key is None)


@dataclass(slots=True)  # not frozen: each field of those costs a call
class Ticket:
    """One request on its way: the job, where it goes and how long it may take."""

    request_id: str
    path: str
    job: Job
    deadline: float
    client_room: int | None = None
    pinned: Instance | None = None
    ask: Ask = field(default_factory=Ask)  # what choices go by; `room` is that of the first try
    key_name: str = ""  # whose API key it came with
    may_retry: bool = True
    lines: bytes = b""  # more header lines for its legs
    traceparent: str | None = None  # the client's, or empty; None: it is not traced
    passage: Passage | None = None  # what is shown of it
