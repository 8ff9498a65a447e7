"""What a scheduler wants done: by its own books (`Free`, `Hold`), by the worker, by the transfers.

The worker carries out its outbox in order; what comes of it returns as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdrt.data.commands import TransferCommand
from pdrt.device.moves import Move
from pdrt.messages import AskPrefill, Output

# For the books.


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody else can touch these: they may be used again at once."""

    blocks: tuple[int, ...]
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """The attempt is over, but its writer or reader may still touch these."""

    room: int
    attempt: int
    blocks: tuple[int, ...]
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Before the next step: copy these blocks to host memory."""

    move: Move


@dataclass(frozen=True, slots=True)
class Load:
    """Before the next step, after its saves: copy from host memory to these blocks."""

    move: Move


@dataclass(frozen=True, slots=True)
class FreeHost:
    """These host blocks may be used by later steps."""

    blocks: tuple[int, ...]


# For the worker.


@dataclass(slots=True)  # not frozen: one for each token, as `batch.SeqStep`
class Say:
    """Tell the leader. Exactly one Output of a submitted request has a finish or a problem."""

    output: Output


Effect: TypeAlias = TransferCommand | Say | AskPrefill
Booking: TypeAlias = Free | Hold | Save | Load | FreeHost
