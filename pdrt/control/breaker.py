"""When an instance that only fails is left alone for a while: a table, told the time.

Faults are what the instance did wrong (broken transfers, 5xx, broken connections), never that it
was full (429) or that the request was bad. Enough of them in a row open the circuit for a pause;
then a canary tries the instance, and each time that fails the pause is twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from pdrt.machine import Edge, Table

FAULTS: Final = 5  # in a row
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class Circuit(StrEnum):
    CLOSED = "closed"  # requests go there
    OPEN = "open"  # nothing goes there
    HALF_OPEN = "half_open"  # canaries go there; the first outcome decides


@dataclass(frozen=True, slots=True)
class Faulted:
    """One more fault, and not enough of them yet."""

    at: float


@dataclass(frozen=True, slots=True)
class FaultedTooOften:
    """The fault that fills the measure, where others can take the work."""

    at: float


@dataclass(frozen=True, slots=True)
class Served:
    """A request or a canary has gone well."""


@dataclass(frozen=True, slots=True)
class PauseOver:
    pass


@dataclass(frozen=True, slots=True)
class Renewed:
    """It was restarted: nothing is held against its new life."""


Event: TypeAlias = Faulted | FaultedTooOften | Served | PauseOver | Renewed
EVENTS: Final = (Faulted, FaultedTooOften, Served, PauseOver, Renewed)


@dataclass(slots=True)
class Breaker:
    state: Circuit = Circuit.CLOSED
    faults: int = 0  # in a row
    pause_s: float = FIRST_PAUSE_S  # the next one
    until: float = 0.0  # of the present pause
    opened: int = 0  # times

    @property
    def fills(self) -> bool:
        """Whether one more fault is too many."""
        return self.faults + 1 >= FAULTS


def _count(breaker: Breaker, _event: Faulted) -> Sequence[None]:
    breaker.faults += 1
    return ()


def _open(breaker: Breaker, event: Faulted | FaultedTooOften) -> Sequence[None]:
    breaker.faults += 1
    breaker.opened += 1
    breaker.until = event.at + breaker.pause_s
    breaker.pause_s = min(2 * breaker.pause_s, LONGEST_PAUSE_S)
    return ()


def _forgive(breaker: Breaker, _event: object) -> Sequence[None]:
    breaker.faults, breaker.pause_s = 0, FIRST_PAUSE_S
    return ()


_C = Circuit
_LATE: Final = "it was sent before the circuit opened"

BREAKER: Table[Circuit, Breaker, None] = Table(
    "breaker",
    edges={
        (_C.CLOSED, Faulted): Edge(_C.CLOSED, _count),
        (_C.CLOSED, FaultedTooOften): Edge(_C.OPEN, _open),
        (_C.CLOSED, Served): Edge(_C.CLOSED, _forgive),
        (_C.OPEN, PauseOver): Edge(_C.HALF_OPEN),
        (_C.HALF_OPEN, Faulted): Edge(_C.OPEN, _open),
        (_C.HALF_OPEN, FaultedTooOften): Edge(_C.OPEN, _open),
        (_C.HALF_OPEN, Served): Edge(_C.CLOSED, _forgive),
        **{(state, Renewed): Edge(_C.CLOSED, _forgive) for state in Circuit},
    },
    ignored={
        (_C.CLOSED, PauseOver): "it was restarted meanwhile",
        (_C.HALF_OPEN, PauseOver): "canaries are under way",
        (_C.OPEN, Faulted): _LATE,
        (_C.OPEN, FaultedTooOften): _LATE,
        (_C.OPEN, Served): _LATE,
    },
)


def feed(breaker: Breaker, event: Event) -> bool:
    """The only function that moves a breaker; whether its state has changed."""
    before = breaker.state
    breaker.state, _ = BREAKER.step(before, breaker, event)
    return breaker.state is not before
