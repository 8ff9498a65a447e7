"""The kernel of all state machines: edges, ignored cells, and the rest, which is a bug."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import pytest

from pdrt.errors import Illegal
from pdrt.machine import Edge, Table


class Light(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True)
class Switched:
    by: str


class Failed: ...


class Repaired: ...


@dataclass
class Lamp:
    switched_by: list[str] = field(default_factory=list)


def note(lamp: Lamp, event: Switched) -> Sequence[str]:
    lamp.switched_by.append(event.by)
    return [f"tell {event.by}"]


TABLE: Table[Light, Lamp, str] = Table(
    "lamp",
    edges={
        (Light.RED, Switched): Edge(Light.GREEN, note),
        (Light.GREEN, Switched): Edge(Light.RED),
    },
    ignored={(Light.RED, Failed): "it is the same colour"},
)


def test_an_edge_moves_updates_the_record_and_names_effects() -> None:
    lamp = Lamp()
    assert TABLE.step(Light.RED, lamp, Switched("ann")) == (Light.GREEN, ["tell ann"])
    assert lamp.switched_by == ["ann"]


def test_an_edge_without_an_action_has_no_effects() -> None:
    assert TABLE.step(Light.GREEN, Lamp(), Switched("ann")) == (Light.RED, ())


def test_an_ignored_event_changes_nothing() -> None:
    lamp = Lamp()
    assert TABLE.step(Light.RED, lamp, Failed()) == (Light.RED, ())
    assert lamp == Lamp()


def test_an_undecided_cell_is_illegal_and_tells_machine_state_and_event() -> None:
    with pytest.raises(Illegal, match="lamp: Failed cannot happen in green"):
        TABLE.step(Light.GREEN, Lamp(), Failed())


def test_a_subclass_of_an_event_is_another_event() -> None:
    class Flicked(Switched): ...

    with pytest.raises(Illegal):
        TABLE.step(Light.RED, Lamp(), Flicked("ann"))


def test_undecided_cells_are_listed() -> None:
    assert TABLE.undecided(Light, [Switched, Failed]) == {(Light.GREEN, Failed)}
    assert TABLE.undecided(Light, [Repaired]) == {(Light.RED, Repaired), (Light.GREEN, Repaired)}


def test_a_cell_cannot_be_an_edge_and_ignored() -> None:
    with pytest.raises(ValueError, match="lamp"):
        Table(
            "lamp",
            edges={(Light.RED, Failed): Edge(Light.RED)},
            ignored={(Light.RED, Failed): "why"},
        )


def test_the_picture_is_printed_from_the_table() -> None:
    assert list(TABLE.dot()) == [
        'digraph "lamp" {',
        '  "red" -> "green" [label="Switched"]',
        '  "green" -> "red" [label="Switched"]',
        "}",
    ]
