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
class TellFirsts:
    """The first token of each of its sequences is drawn; to be told before the last blocks."""

    room: int
    attempt: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: bytes = b""  # `messages.pack_tops` of `tokens`
    cached_tokens: int = 0


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
    sequences: int = 1  # so many first tokens are told ...
    top_logprobs: int = 0  # ... each with the likeliest ones beside it

    @property
    def needs_firsts(self) -> bool:
        """Whether the slot, which holds one token and no more, is not enough."""
        return self.sequences > 1 or self.top_logprobs > 0


@dataclass(frozen=True, slots=True)
class AbortReceiver:
    """`is_served`: the answer has ended well, so that the prefill side has nothing to mend."""

    room: int
    attempt: int
    reason: str
    is_served: bool = False


TransferCommand: TypeAlias = (
    ExpectHandshakes
    | TellStarted
    | TellFirsts
    | SendBlocks
    | AbortSend
    | OpenReceiver
    | AdmitReceiver
    | AbortReceiver
)
