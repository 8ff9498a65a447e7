"""What can happen to a request, besides what the transfer side tells (`pdrt.data.events`).

Where a guard needs data there are two events, so that the tables stay drawable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdrt import errors
from pdrt.messages import Finish, Problem, Source, Top
from pdrt.sched.request import First

# Told by the supervisor.


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left or the router withdrew the request."""

    room: int
    reason: str

    @property
    def is_served(self) -> bool:
        """Whether a stop string was complete, so that nothing has failed."""
        return self.reason == "stop"

    @property
    def problem(self) -> Problem:
        return Problem.of(errors.Cancelled(self.reason))


@dataclass(frozen=True, slots=True)
class Stopped:
    """The leader needs no more of one of a room's sequences."""

    room: int
    index: int


@dataclass(frozen=True, slots=True)
class Rebound:
    """Decode: another prefill attempt computes this prompt."""

    room: int
    attempt: int
    source: Source


@dataclass(frozen=True, slots=True)
class ResumeLocally:
    """Decode: nobody will prefill this retracted room again."""

    room: int


Order: TypeAlias = Cancelled | Stopped | Rebound | ResumeLocally


# Decided or found out by the scheduler.


@dataclass(frozen=True, slots=True)
class Granted:
    """Memory for all its tokens; a slot too when they come from elsewhere.

    The first `hit` blocks hold `cached_tokens` tokens' KV already; they are shared, read only.
    """

    blocks: tuple[int, ...]
    slot: int | None = None
    hit: int = 0
    cached_tokens: int = 0
    sendable: int = 0  # prefill: leading blocks that may leave at once


@dataclass(frozen=True, slots=True)
class Swapped:
    """It makes way, and its KV is copied to these host blocks."""

    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grown:
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk's KV is in the pool. `sendable`: leading blocks that may leave."""

    tokens: int
    sendable: int = 0


@dataclass(slots=True)  # not frozen: one for each token, as `batch.SeqStep`
class TokenOut:
    token: int
    logprob: float
    cached_tokens: int = 0
    top: Top = ()


@dataclass(frozen=True, slots=True)
class LastToken:
    token: int
    logprob: float
    finish: Finish
    cached_tokens: int = 0
    top: Top = ()


@dataclass(frozen=True, slots=True)
class FirstsTold:
    """The first tokens are known, on decode ahead of their KV, and are said at once."""

    firsts: tuple[First, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstsKept:
    """Decode: the first tokens are here, and are said when their KV is."""

    firsts: tuple[First, ...]


@dataclass(frozen=True, slots=True)
class FirstStopped:
    """Decode: a sequence whose first token was said needs no more."""

    index: int


@dataclass(frozen=True, slots=True)
class EndedEarly:
    """The first tokens were the last ones too; no KV is needed."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The KV is here, of a prompt whose first tokens were said."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Another sequence of its room ended with a problem, which ends them all."""


@dataclass(frozen=True, slots=True)
class Retracted:
    """Its blocks are needed by others; it is computed again here."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Its blocks are needed by others, or its KV was lost; the prefill side computes it again."""


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """The prefill attempt failed before a token was said; another is awaited `until` then."""

    problem: Problem
    until: float


@dataclass(frozen=True, slots=True)
class AttemptRefused:
    """The prefill attempt failed in a way that no other attempt would mend."""

    problem: Problem


@dataclass(frozen=True, slots=True)
class FellBack:
    """The prefill attempt of a request that was heard of already failed; it is computed here."""


@dataclass(frozen=True, slots=True)
class Failed:
    """It ends with this problem: its deadline passed, or nothing can help it."""

    problem: Problem


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill: the last chunk is computed and the first token of each sequence drawn."""

    firsts: tuple[First, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """Prefill: decode's memory holds the prompt; the transport let go of the source."""


@dataclass(frozen=True, slots=True)
class SendBroken:
    """Prefill: the transfer is over without success; the transport let go of the source."""

    problem: Problem
