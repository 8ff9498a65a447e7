"""Host blocks that hold the KV of requests that made way, and what is to be copied next.

The promises: a host block has one owner at most, the request whose KV it holds; what is decided in
one plan is copied before the step of that plan and never after. So a host block may be used again
as soon as it is given back, also while its copy is under way: the next one to write or read it is
a later step's, and the device does one after the other.
"""

from __future__ import annotations

from pdrt.device.moves import NONE, Move, Moves
from pdrt.sched.blocks import BlockPool
from pdrt.sched.effects import FreeHost, Load, Save


class HostCopies:
    """Counts places 0..total-1 of the worker's host memory for copies."""

    def __init__(self, total: int) -> None:
        self._pool = BlockPool(total)
        self._saves: list[Move] = []
        self._loads: list[Move] = []

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def used(self) -> int:
        return self._pool.used

    def take(self, count: int) -> tuple[int, ...] | None:
        """None when there are not so many."""
        return self._pool.take(count)

    def carry_out(self, effect: Save | Load | FreeHost) -> None:
        match effect:
            case Save(move):
                self._saves.append(move)
            case Load(move):
                self._loads.append(move)
            case FreeHost(blocks):
                self._pool.give(blocks)

    def pop_moves(self) -> Moves:
        """What the next step begins with."""
        if not (self._saves or self._loads):
            return NONE
        moves = Moves(tuple(self._saves), tuple(self._loads))
        self._saves, self._loads = [], []
        return moves
