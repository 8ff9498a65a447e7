"""What a scheduler wants done: by its own books (`Free`, `Hold`), else by the worker.

The worker carries out its outbox in order; what comes of it returns as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdrt.data.events import SlotRecord
from pdrt.messages import AskPrefill, Output, Problem, Source

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


# For the worker, prefill.


@dataclass(frozen=True, slots=True)
class ExpectHandshakes:
    room: int
    attempt: int
    prompt_tokens: int
    prompt_hash: bytes
    deadline: float


@dataclass(frozen=True, slots=True)
class TellStarted:
    room: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """`blocks` hold the prompt's blocks `first_block`..; `last` goes into the slot after them."""

    room: int
    attempt: int
    blocks: tuple[int, ...]
    first_block: int
    last: SlotRecord | None = None


@dataclass(frozen=True, slots=True)
class AbortSend:
    room: int
    attempt: int
    problem: Problem


# For the worker, decode.


@dataclass(frozen=True, slots=True)
class OpenReceiver:
    room: int
    attempt: int
    source: Source
    deadline: float


@dataclass(frozen=True, slots=True)
class AdmitReceiver:
    room: int
    attempt: int
    blocks: tuple[int, ...]
    first_block: int
    slot: int
    prompt_tokens: int
    prompt_hash: bytes
    deadline: float


@dataclass(frozen=True, slots=True)
class AbortReceiver:
    room: int
    attempt: int
    reason: str


# For the worker, every role.


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the leader. Exactly one Output of a submitted request has a finish or a problem."""

    output: Output


Effect: TypeAlias = (
    ExpectHandshakes
    | TellStarted
    | SendBlocks
    | AbortSend
    | OpenReceiver
    | AdmitReceiver
    | AbortReceiver
    | Say
    | AskPrefill
)
Booking: TypeAlias = Free | Hold
