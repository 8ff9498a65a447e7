"""What is known of a peer's life: one miss makes it suspect, two make it dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from pdrt.machine import Edge, Table


class Health(StrEnum):
    UNKNOWN = "unknown"  # never heard
    ALIVE = "alive"
    SUSPECT = "suspect"  # one ping went unanswered
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Beat:
    """It answered a ping."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A ping went unanswered."""


@dataclass(frozen=True, slots=True)
class Died:
    """Its death is certain: the connection was refused, or the process is gone."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell whoever depends on the peer."""

    health: Health


Event: TypeAlias = Beat | Miss | Died
EVENTS: Final = (Beat, Miss, Died)


def _say_alive(_record: object, _event: object) -> Sequence[Announce]:
    return (Announce(Health.ALIVE),)


def _say_dead(_record: object, _event: object) -> Sequence[Announce]:
    return (Announce(Health.DEAD),)


_H = Health

PEER: Table[Health, object, Announce] = Table(
    "peer",
    edges={
        (_H.UNKNOWN, Beat): Edge(_H.ALIVE, _say_alive),
        (_H.UNKNOWN, Miss): Edge(_H.SUSPECT),
        (_H.UNKNOWN, Died): Edge(_H.DEAD, _say_dead),
        (_H.ALIVE, Beat): Edge(_H.ALIVE),
        (_H.ALIVE, Miss): Edge(_H.SUSPECT),
        (_H.ALIVE, Died): Edge(_H.DEAD, _say_dead),
        (_H.SUSPECT, Beat): Edge(_H.ALIVE, _say_alive),
        (_H.SUSPECT, Miss): Edge(_H.DEAD, _say_dead),
        (_H.SUSPECT, Died): Edge(_H.DEAD, _say_dead),
        (_H.DEAD, Beat): Edge(_H.ALIVE, _say_alive),
    },
    ignored={
        (_H.DEAD, Miss): "it is known to be dead",
        (_H.DEAD, Died): "it is known to be dead",
    },
)
