"""Blocks that change places before a step: from the KV memory to copies of them, and back.

Plain data, so that schedulers and tests can use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks of one sequence, each from its source to its target."""

    key: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """All of one step's: saves (KV block to host block), then loads (host block to KV block)."""

    saves: tuple[Move, ...] = ()
    loads: tuple[Move, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads)


NONE = Moves()
