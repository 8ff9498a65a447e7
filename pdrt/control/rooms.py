"""The ids of requests: nobody can guess one, and each tells which router minted it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Final

from pdrt.control.chance import Chance

_ROUTER_BITS: Final = 16
_RANDOM_BITS: Final = 63 - _ROUTER_BITS


def _draw_router() -> int:
    return secrets.randbits(_ROUTER_BITS)


@dataclass(frozen=True, slots=True)
class Rooms:
    """Of one router process. Several side by side need not know each other."""

    router: int = field(default_factory=_draw_router)
    chance: Chance = field(default_factory=Chance)

    def mint(self) -> int:
        """63 bits, the router's number first and the rest random."""
        return self.router << _RANDOM_BITS | self.chance.room() >> _ROUTER_BITS


def router_of(room: int) -> str:
    """The number of the router that minted this room, as logs show it."""
    return f"{room >> _RANDOM_BITS:04x}"
