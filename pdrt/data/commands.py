"""What a scheduler has the transfer side do; what comes of it are `events`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdrt.data.events import SlotRecord
from pdrt.messages import Problem, Source

# Prefill side.


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


# Decode side.


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


TransferCommand: TypeAlias = (
    ExpectHandshakes
    | TellStarted
    | SendBlocks
    | AbortSend
    | OpenReceiver
    | AdmitReceiver
    | AbortReceiver
)
