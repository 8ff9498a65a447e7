"""What is known of a peer's life: one miss makes it suspect, two make it dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

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


Event: TypeAlias = Beat | Miss | Died
EVENTS: Final = (Beat, Miss, Died)


class HasHealth(Protocol):
    health: Health


def _say_alive(_peer: HasHealth, _event: object) -> Sequence[Health]:
    return (Health.ALIVE,)


def _say_dead(_peer: HasHealth, _event: object) -> Sequence[Health]:
    return (Health.DEAD,)


_H = Health

PEER: Table[Health, HasHealth, Health] = Table(
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


def feed(peer: HasHealth, event: Event) -> Health | None:
    """The only function that moves a peer; ALIVE or DEAD when that is news for its dependants."""
    peer.health, news = PEER.step(peer.health, peer, event)
    return news[0] if news else None
