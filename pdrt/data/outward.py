"""What the desks (`senders`, `receivers`) decided and the manager carries out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdrt.data.events import SlotRecord
from pdrt.data.transport.promise import Areas, Key, Peer, Write
from pdrt.messages import (
    FROM_DECODE,
    FROM_PREFILL,
    AbortTransfer,
    Attach,
    FromDecode,
    FromPrefill,
    Handshake,
    Ping,
    Process,
    Source,
    encode,
)


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the control socket at `endpoint`."""

    endpoint: str
    message: FromDecode | FromPrefill

    @property
    def frame(self) -> bytes:
        match self.message:
            case Attach() | Handshake() | AbortTransfer() | Ping():
                return encode(FROM_DECODE, self.message)
            case _:
                return encode(FROM_PREFILL, self.message)


@dataclass(frozen=True, slots=True)
class HangUp:
    """Nothing more is said to this endpoint; what was said just now still goes out."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class WatchLife:
    """Tell the desk when this process has died."""

    process: Process


@dataclass(frozen=True, slots=True)
class StartWrite:
    write: Write


@dataclass(frozen=True, slots=True)
class AbortWrite:
    write: int


@dataclass(frozen=True, slots=True)
class AttachPeer:
    """Make the peer's memory reachable; the answer is `attached` or `not_attached`.

    `number` is that of the meeting, which the peer will look for in the trial's signature.
    """

    peer: Peer
    number: int = 0


@dataclass(frozen=True, slots=True)
class DetachPeer:
    peer: str


@dataclass(frozen=True, slots=True, eq=False)
class Admit:
    """The writers of this attempt may fill these areas of our memory from now on."""

    key: Key
    areas: Areas


@dataclass(frozen=True, slots=True)
class Revoke:
    """They may not any more. Where the transport guarantees it, the answer is `revoked`.

    `through`: the transports in question; none named: all.
    """

    key: Key
    through: frozenset[str]


@dataclass(frozen=True, slots=True)
class VerifyBlocks:
    """Compare what has arrived with its checksums; the answer is `verified`."""

    record: SlotRecord
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FindRoute:
    """Ask the source's bootstrap server; the answer is `resolved` or `unresolved`."""

    room: int
    attempt: int
    source: Source


@dataclass(frozen=True, slots=True)
class ReportRefusal:
    """A prefill instance and we can never work together: an operator has to read that."""

    host: str
    port: int
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetRoute:
    """What this bootstrap server said does not hold any more."""

    host: str
    port: int


Outward: TypeAlias = (
    Tell
    | HangUp
    | WatchLife
    | StartWrite
    | AbortWrite
    | AttachPeer
    | DetachPeer
    | Admit
    | Revoke
    | VerifyBlocks
    | FindRoute
    | ForgetRoute
    | ReportRefusal
)
