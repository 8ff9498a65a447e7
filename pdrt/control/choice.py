"""Who serves a request, and why these were chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrt.control.instances import Instance
from pdrt.control.policy import Ask, Picked
from pdrt.control.views import Candidates


@dataclass(slots=True)  # not frozen: that takes thrice as long to make, and requests wait
class Because:
    """Why these were chosen; told when somebody asks."""

    ask: Ask
    prefill: tuple[Candidates, Picked] | None = None
    decode: tuple[Candidates, Picked] | None = None

    def told(self) -> dict[str, object]:
        sides = {"prefill": self.prefill, "decode": self.decode}
        told: dict[str, object] = {"weight": self.ask.weight}
        for name, side in sides.items():
            if side is not None:
                told[name] = side[1].told(side[0].names, self.ask)
        return told


@dataclass(slots=True)
class Choice:
    """Who serves a request; `prefill` is None when a hybrid instance serves it alone."""

    prefill: Instance | None
    decode: Instance
    dp_rank: int = 0
    fallback: str = ""  # why a hybrid serves although there are prefill instances
    because: Because | None = field(default=None, repr=False)
    local: str = ""  # why decode computes the prompt itself

    def __str__(self) -> str:
        return " + ".join(each.name for each in (self.prefill, self.decode) if each)
