"""What the transfer side tells a scheduler: one small value for each thing that happened.

Each names its (room, attempt), so that what is late, doubled or of an old attempt can be told
apart by its reader. SlotRecord is the slot's content as a plain value; its bytes are
`metadata`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from pdrt.messages import Problem

SLOT_COMPLETE: Final = 1  # a record's status; a wiped slot has 0


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What a prefill rank vouches for: `kv_len` tokens of KV are in place, `token` follows."""

    room: int
    attempt: int
    status: int
    kv_len: int
    cached_tokens: int
    token: int
    logprob: float
    spec_tokens: tuple[int, ...] = ()


# Decode side.


@dataclass(frozen=True, slots=True)
class ReceiverReady:
    """The route is known and every prefill rank attached: the attempt may be admitted."""

    room: int
    attempt: int


@dataclass(frozen=True, slots=True)
class PromptStarted:
    """The prefill side began to compute: the transfer's clock starts."""

    room: int
    attempt: int


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first token of each sequence, ahead of the KV; told once at most, before Received."""

    room: int
    attempt: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: bytes = b""  # `messages.pack_tops` of `tokens`
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """All required slots are valid: the KV is here. Nothing of this attempt is written later."""

    room: int
    attempt: int
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """This attempt will not deliver; another prefill may, if the problem is retryable.

    `was_written`: the prefill side believes that it did its part, so nobody tries that again.
    """

    room: int
    attempt: int
    problem: Problem
    was_written: bool = False


@dataclass(frozen=True, slots=True)
class Quiet:
    """No write of this failed or aborted attempt can happen any more; told exactly once."""

    room: int
    attempt: int


# Prefill side.


@dataclass(frozen=True, slots=True)
class SenderReady:
    """All decode ranks shook hands; blocks below `first_block` of the prompt are not wanted."""

    room: int
    attempt: int
    first_block: int


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Stop computing: nobody will take this attempt's blocks. SendEnded still follows."""

    room: int
    attempt: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class SendEnded:
    """The transport let go of the source blocks; told exactly once per expected attempt."""

    room: int
    attempt: int
    problem: Problem | None


TransferEvent: TypeAlias = (
    ReceiverReady
    | PromptStarted
    | FirstTokens
    | Received
    | ReceiveFailed
    | Quiet
    | SenderReady
    | SendFailed
    | SendEnded
)
