"""One transfer's life, as the prefill side (SEND) and the decode side (RECEIVE) see it.

The states say how a transfer stands, not who may still touch its memory: that is the ledger's
business (`quarantine`), and it goes on after Failed and Aborted. Terminal states absorb all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pdrt.data.commands import TellFirsts
from pdrt.data.events import (
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SenderReady,
    SendFailed,
    SlotRecord,
)
from pdrt.data.layout import Part
from pdrt.data.transport.promise import Key as Key
from pdrt.data.transport.promise import Write
from pdrt.machine import Edge, Table
from pdrt.messages import Handshake, Problem


class State(StrEnum):
    BOOTSTRAPPING = "bootstrapping"  # the other side is not known yet
    WAITING_FOR_INPUT = "waiting_for_input"  # it is; no byte may be written yet
    TRANSFERRING = "transferring"  # blocks and slot are promised, writes go on
    DONE = "done"  # all written, slot and all
    FAILED = "failed"
    ABORTED = "aborted"  # somebody did not want it any more


TERMINAL: Final = frozenset({State.DONE, State.FAILED, State.ABORTED})


# The prefill side.


@dataclass(frozen=True, slots=True)
class ShookHands:
    """All required decode ranks have."""

    first_block: int


@dataclass(frozen=True, slots=True)
class ChunkGiven:
    """A computed chunk was handed to the transport."""


@dataclass(frozen=True, slots=True)
class AllWritten:
    """The transport acknowledged the last block and slot."""


@dataclass(frozen=True, slots=True)
class Broke:
    """Peer, transport, deadline or the other side's word: it cannot go on."""

    problem: Problem


@dataclass(frozen=True, slots=True)
class DecodeLeft:
    """The decode side does not want it any more; `session` has said so."""

    problem: Problem
    session: str = ""


@dataclass(frozen=True, slots=True)
class DecodeServed:
    """The decode side needs no more of it: its answer has ended, well."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Our scheduler does not compute it any more."""

    problem: Problem


SendInput: TypeAlias = (
    ShookHands | ChunkGiven | AllWritten | Broke | DecodeLeft | DecodeServed | Stopped
)


@dataclass(frozen=True, slots=True)
class SayFailed:
    """Tell the decode ranks that nothing will come, except who knows it."""

    problem: Problem
    but: str = ""


@dataclass(frozen=True, slots=True)
class StopWrites:
    """Ask the transport for an early end of whatever is on its way."""


SendOutput: TypeAlias = SenderReady | SendFailed | SayFailed | StopWrites


@dataclass(slots=True, kw_only=True)
class Target:
    """What one decode rank promised, and how far we are with it."""

    session: str
    writes: bool  # if not, another prefill rank writes to it
    first_block: int
    blocks: npt.NDArray[np.int64]
    part: Part  # what of each block is ours to write
    slot_at: int
    open: int = 0  # writes that have not ended
    last: Write | None = None  # waits until all earlier ones have
    done_bytes: int = 0


@dataclass(slots=True)
class Sender:
    room: int
    attempt: int
    prompt_tokens: int
    prompt_hash: bytes
    deadline: float
    state: State = State.BOOTSTRAPPING
    targets: dict[str, Target] = field(default_factory=dict)
    is_last_given: bool = False
    firsts: TellFirsts | None = None  # what was told of its first tokens
    given_bytes: int = 0
    done_bytes: int = 0
    problem: Problem | None = None

    @property
    def key(self) -> Key:
        return self.room, self.attempt


def _ready(s: Sender, e: ShookHands) -> Sequence[SendOutput]:
    return [SenderReady(s.room, s.attempt, e.first_block)]


def _broke(s: Sender, e: Broke) -> Sequence[SendOutput]:
    s.problem = e.problem
    return [SendFailed(s.room, s.attempt, e.problem), SayFailed(e.problem), StopWrites()]


def _decode_left(s: Sender, e: DecodeLeft) -> Sequence[SendOutput]:
    s.problem = e.problem
    return [
        SendFailed(s.room, s.attempt, e.problem),
        SayFailed(e.problem, e.session),
        StopWrites(),
    ]


def _decode_served(_s: Sender, _e: DecodeServed) -> Sequence[SendOutput]:
    return [StopWrites()]


def _stopped(s: Sender, e: Stopped) -> Sequence[SendOutput]:
    s.problem = e.problem
    return [SayFailed(e.problem), StopWrites()]


_LIVE: Final = (State.BOOTSTRAPPING, State.WAITING_FOR_INPUT, State.TRANSFERRING)

SEND: Table[State, Sender, SendOutput] = Table(
    "send",
    edges={
        (State.BOOTSTRAPPING, ShookHands): Edge(State.WAITING_FOR_INPUT, _ready),
        (State.WAITING_FOR_INPUT, ChunkGiven): Edge(State.TRANSFERRING),
        (State.TRANSFERRING, ChunkGiven): Edge(State.TRANSFERRING),
        (State.TRANSFERRING, AllWritten): Edge(State.DONE),
        **{(state, Broke): Edge(State.FAILED, _broke) for state in _LIVE},
        **{(state, DecodeLeft): Edge(State.ABORTED, _decode_left) for state in _LIVE},
        **{(state, DecodeServed): Edge(State.ABORTED, _decode_served) for state in _LIVE},
        **{(state, Stopped): Edge(State.ABORTED, _stopped) for state in _LIVE},
    },
    ignored={
        (state, kind): why
        for state in TERMINAL
        for kind, why in {
            ShookHands: "a late handshake is answered with the outcome",
            ChunkGiven: "the scheduler has not read the end yet",
            AllWritten: "the last write ended although it was asked to stop",
            Broke: "it is over already",
            DecodeLeft: "it is over already",
            DecodeServed: "it is over already",
            Stopped: "it is over already",
        }.items()
    },
)


def feed_sender(sender: Sender, event: SendInput) -> Sequence[SendOutput]:
    """The only function that moves a sender."""
    sender.state, effects = SEND.step(sender.state, sender, event)
    return effects


# The decode side.


@dataclass(frozen=True, slots=True)
class Resolved:
    """The topology is known and all ranks that must be told are attached."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Blocks and slots are reserved."""


@dataclass(frozen=True, slots=True)
class PromptBegan:
    """A prefill rank began to compute."""


@dataclass(frozen=True, slots=True)
class SlotsValid:
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Our scheduler does not want it any more; `is_served`: because it has all that it needs.

    `is_leaving`: because the worker stops.
    """

    reason: str
    is_served: bool = False
    is_leaving: bool = False


ReceiveInput: TypeAlias = Resolved | Admitted | PromptBegan | SlotsValid | Broke | Withdrawn


@dataclass(frozen=True, slots=True)
class ShakeHands:
    """Tell the prefill ranks where to write."""


@dataclass(frozen=True, slots=True)
class SayAbort:
    """Tell the prefill ranks to stop, and to say when they have."""


ReceiveOutput: TypeAlias = (
    ReceiverReady | PromptStarted | Received | ReceiveFailed | Quiet | ShakeHands | SayAbort
)


@dataclass(slots=True)
class Leg:
    """What one prefill rank has to do for a receiver, and how far we know it to be."""

    rank: str
    peer: str
    place: int  # of its slot in our row; -1: another rank writes for it
    record: SlotRecord | None = None  # what its slot said
    transport: str = ""  # what it writes through; empty: not known
    done_bytes: int = 0
    again_at: float = 0.0  # when our handshake is said again

    @property
    def writes(self) -> bool:
        return self.place >= 0


@dataclass(slots=True)
class Receiver:
    room: int
    attempt: int
    source: tuple[str, int]  # bootstrap server
    dp_rank: int
    deadline: float
    state: State = State.BOOTSTRAPPING
    legs: dict[str, Leg] = field(default_factory=dict)  # by prefill rank
    handshake: Handshake | None = None  # once admitted
    row: int = -1  # of slots
    decode_ranks: int = 1  # that each of the legs waits for
    record: SlotRecord | None = None  # all agree on it; the KV is being verified
    sequences: int = 1  # so many first tokens are told ...
    top_logprobs: int = 0  # ... each with so many likeliest ones, at most
    needs_firsts: bool = False  # the slot alone is not enough, and they were not told yet
    has_firsts: bool = False
    is_written: bool = False  # the prefill side says that it did its part
    has_started: bool = False
    again_at: float = 0.0  # when something we said is said again
    over_at: float = 0.0
    over: Withdrawn | None = None  # what the prefill side is told of that

    @property
    def key(self) -> Key:
        return self.room, self.attempt


def _is_ready(r: Receiver, _e: Resolved) -> Sequence[ReceiveOutput]:
    return [ReceiverReady(r.room, r.attempt)]


def _shake(_r: Receiver, _e: Admitted) -> Sequence[ReceiveOutput]:
    return [ShakeHands()]


def _began(r: Receiver, _e: PromptBegan) -> Sequence[ReceiveOutput]:
    if r.has_started:
        return []
    r.has_started = True
    return [PromptStarted(r.room, r.attempt)]


def _received(r: Receiver, e: SlotsValid) -> Sequence[ReceiveOutput]:
    return [Received(r.room, r.attempt, e.record)]


def _failed(r: Receiver, e: Broke) -> Sequence[ReceiveOutput]:
    return [
        ReceiveFailed(
            r.room, r.attempt, e.problem, was_written=r.is_written or r.record is not None
        )
    ]


def _failed_admitted(r: Receiver, e: Broke) -> Sequence[ReceiveOutput]:
    r.over = Withdrawn(e.problem.message)
    return [*_failed(r, e), SayAbort()]


def _withdrawn(r: Receiver, e: Withdrawn) -> Sequence[ReceiveOutput]:
    r.over = e
    return [SayAbort()]


def _never_shook(r: Receiver, _e: Admitted) -> Sequence[ReceiveOutput]:
    """The scheduler admitted it before it read that it is over: nobody was told the blocks."""
    return [Quiet(r.room, r.attempt)]


RECEIVE: Table[State, Receiver, ReceiveOutput] = Table(
    "receive",
    edges={
        (State.BOOTSTRAPPING, Resolved): Edge(State.WAITING_FOR_INPUT, _is_ready),
        (State.BOOTSTRAPPING, Broke): Edge(State.FAILED, _failed),
        (State.BOOTSTRAPPING, Withdrawn): Edge(State.ABORTED),
        (State.WAITING_FOR_INPUT, Admitted): Edge(State.TRANSFERRING, _shake),
        (State.WAITING_FOR_INPUT, Broke): Edge(State.FAILED, _failed),
        (State.WAITING_FOR_INPUT, Withdrawn): Edge(State.ABORTED),
        (State.TRANSFERRING, PromptBegan): Edge(State.TRANSFERRING, _began),
        (State.TRANSFERRING, SlotsValid): Edge(State.DONE, _received),
        (State.TRANSFERRING, Broke): Edge(State.FAILED, _failed_admitted),
        (State.TRANSFERRING, Withdrawn): Edge(State.ABORTED, _withdrawn),
        (State.FAILED, Admitted): Edge(State.FAILED, _never_shook),
        (State.ABORTED, Admitted): Edge(State.ABORTED, _never_shook),
    },
    ignored={
        (State.BOOTSTRAPPING, PromptBegan): "a peer speaks of what it was never asked",
        (State.WAITING_FOR_INPUT, PromptBegan): "a peer speaks of what it was never asked",
        **{
            (state, kind): why
            for state in TERMINAL
            for kind, why in {
                Resolved: "the answer came too late",
                PromptBegan: "it is over already",
                SlotsValid: "it is over; nobody waits for the slot",
                Broke: "it is over already",
                Withdrawn: "it is over already",
            }.items()
        },
    },
)


def feed_receiver(receiver: Receiver, event: ReceiveInput) -> Sequence[ReceiveOutput]:
    """The only function that moves a receiver."""
    receiver.state, effects = RECEIVE.step(receiver.state, receiver, event)
    return effects
