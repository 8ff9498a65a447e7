"""Table-driven state machines: what may happen is data, what follows is a list.

A machine never awaits, logs, sleeps or reads a clock. It takes one event, moves one
record to its next state and returns the effects that somebody else must carry out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pdrt.errors import Illegal

S = TypeVar("S")  # state
R = TypeVar("R")  # the record that has a state
F = TypeVar("F")  # effect


def nothing(_record: object, _event: object) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, slots=True)
class Edge(Generic[S, R, F]):
    """Go `to` a state; `do` updates the record and names the effects."""

    to: S
    do: Callable[[R, Any], Sequence[F]] = nothing


@dataclass(frozen=True, slots=True)
class Table(Generic[S, R, F]):
    """Each (state, event type) is an edge, or ignored for a stated reason, or a bug."""

    name: str
    edges: Mapping[tuple[S, type], Edge[S, R, F]]
    ignored: Mapping[tuple[S, type], str]  # cell -> why

    def __post_init__(self) -> None:
        if both := self.edges.keys() & self.ignored.keys():
            raise ValueError(f"{self.name}: cells that are edges and ignored: {both}")

    def step(self, state: S, record: R, event: object) -> tuple[S, Sequence[F]]:
        """The next state and the effects. Raises Illegal for a cell that is neither."""
        cell = (state, type(event))
        if edge := self.edges.get(cell):
            return edge.to, edge.do(record, event)
        if cell in self.ignored:
            return state, ()
        raise Illegal(self.name, state, event)

    def undecided(self, states: Iterable[S], events: Iterable[type]) -> set[tuple[S, type]]:
        """Cells that are neither an edge nor ignored: a test lists what may be in here."""
        kinds = tuple(events)
        return {(s, e) for s in states for e in kinds} - self.edges.keys() - self.ignored.keys()

    def dot(self) -> Iterable[str]:
        """Graphviz lines: the picture in the docs is printed from the table."""
        yield f'digraph "{self.name}" {{'
        for (state, event), edge in self.edges.items():
            yield f'  "{state}" -> "{edge.to}" [label="{event.__name__}"]'
        yield "}"
