"""The life of one client request at the router: two legs, one answer, as a table.

The promises: both legs are watched, and whichever fails first cancels the other at once; the
client hears nothing before decode's answer is known to be good; a lost prefill is replaced
without giving up decode's reservation, a lost decode without the client's noticing where that is
wanted; every way out cancels whatever is still open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias, get_args

from pdrt.control.http import Json
from pdrt.errors import PdrtError
from pdrt.machine import Edge, Table

_MOST_STEPS: Final = 64  # told of one request
ATTEMPT_STEP: Final = 1 << 16  # the low bits count decode's own prefills after a retraction


class State(StrEnum):
    OPEN = "open"  # both legs are open; the client has heard nothing
    JOINING = "joining"  # decode keeps its reservation; a new prefill leg is being joined to it
    AWAITING = "awaiting"  # the prompt is where it belongs; decode's answer is awaited
    HELD = "held"  # decode has answered; prefill's outcome, which is needed too, is still unknown
    STREAMING = "streaming"  # decode's answer is being passed on
    MOVING = "moving"  # who said it is lost; another instance is to go on with it
    STRANDED = "stranded"  # nobody can at the moment; one is looked for
    SERVED = "served"
    FAILED = "failed"
    LEFT = "left"  # the client went away


OVER: Final = frozenset({State.SERVED, State.FAILED, State.LEFT})
_SILENT: Final = (State.OPEN, State.JOINING, State.AWAITING, State.HELD)
_HEARD: Final = (State.STREAMING, State.MOVING, State.STRANDED)  # the client has read something
_PROMPTING: Final = (State.OPEN, State.JOINING, State.HELD)  # prefill's outcome is awaited


@dataclass(frozen=True, slots=True)
class Failure:
    """What the client will read, and whether the same request may do better elsewhere."""

    error: PdrtError
    status: int
    elsewhere: bool = False
    retry_after: str = ""

    @staticmethod
    def of(error: PdrtError, *, elsewhere: bool = False) -> Failure:
        return Failure(error, error.status, elsewhere)


# Events. `leg` numbers one HTTP exchange, so that an echo of a replaced one is known as such.
# Those that every request has are not frozen: each field of those costs a call.


@dataclass(slots=True)
class PrefillDone:
    """`told` is what it answered."""

    leg: int
    told: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    leg: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class PrefillReplaced:
    """It failed, and another prefill instance has been chosen."""

    leg: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Decode has agreed to wait for the new prefill leg."""

    leg: int


@dataclass(frozen=True, slots=True)
class JoinedLate:
    """Decode needs no new prefill leg: the first one had done its work."""

    leg: int


@dataclass(slots=True)
class Answered:
    """Decode's answer is here: the prompt is computed, and decode sees to its KV from now on."""

    leg: int


@dataclass(slots=True)
class AnsweredEarly:
    """Decode's answer is here, and prefill's is needed too: it has a part of what the client asked
    for, or, with plain backends, nothing else proves that the prompt has arrived."""

    leg: int


@dataclass(slots=True)
class DecodeEnded:
    leg: int


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    leg: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class PairReplaced:
    """Nothing can be kept: another pair has been chosen, and a fresh room minted."""

    room: int


@dataclass(frozen=True, slots=True)
class InstanceReplaced:
    """The same, and one hybrid instance is to serve it alone."""

    room: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Decode is lost in mid-stream: another instance has been chosen, and a fresh room minted."""

    room: int


@dataclass(frozen=True, slots=True)
class Stranded:
    """The same, and nobody can go on at the moment."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    pass


@dataclass(frozen=True, slots=True)
class CalledOff:
    """The deadline has passed, or the router ends."""

    failure: Failure


OfPrefill: TypeAlias = PrefillDone | PrefillFailed | PrefillReplaced | Joined | JoinedLate
OfDecode: TypeAlias = Answered | AnsweredEarly | DecodeEnded | DecodeFailed
OfBoth: TypeAlias = PairReplaced | InstanceReplaced | Moved | Stranded | ClientLeft | CalledOff
Event: TypeAlias = OfPrefill | OfDecode | OfBoth
EVENTS: Final = (*get_args(OfPrefill), *get_args(OfDecode), *get_args(OfBoth))


# Effects.


@dataclass(slots=True)
class OpenPrefill:
    leg: int


@dataclass(slots=True)
class OpenDecode:
    leg: int


@dataclass(frozen=True, slots=True)
class Rebind:
    """Tell decode that this prefill leg takes the lost one's place."""

    leg: int


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    pass


@dataclass(frozen=True, slots=True)
class CancelDecode:
    pass


@dataclass(frozen=True, slots=True)
class LookForAnother:
    """Who can go on; in the end say Moved, or the decode leg's failure."""

    leg: int


@dataclass(frozen=True, slots=True)
class StartAnswer:
    pass


@dataclass(frozen=True, slots=True)
class FinishAnswer:
    pass


@dataclass(frozen=True, slots=True)
class BreakAnswer:
    """The client has part of the answer: end it with an error event."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Refuse:
    """The client has heard nothing yet: answer with the error's own status."""

    failure: Failure


Effect: TypeAlias = (
    OpenPrefill
    | OpenDecode
    | Rebind
    | CancelPrefill
    | CancelDecode
    | LookForAnother
    | StartAnswer
    | FinishAnswer
    | BreakAnswer
    | Refuse
)


# Decode first: prefill computes once decode has named its blocks. The first ones, made once:
_FIRST_BOTH: Final = (OpenDecode(1), OpenPrefill(1))
_FIRST_ALONE: Final = (OpenDecode(1),)
_STARTED: Final = (StartAnswer(),)
_FINISHED: Final = (CancelPrefill(), FinishAnswer())


@dataclass(slots=True)
class Route:
    """One client request. `(room, attempt)` is what the legs work on now."""

    room: int
    state: State
    tries: int = 0
    moves: int = 0
    prefill_leg: int = 0
    decode_leg: int = 0
    story: list[str] = field(default_factory=list)  # the last steps

    @property
    def attempt(self) -> int:
        return self.tries * ATTEMPT_STEP

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    def may_replace(self, event: Event) -> bool:
        """Whether another instance may take a failed one's place: the client has heard nothing."""
        if not self.is_current(event):
            return False
        if isinstance(event, PrefillFailed):
            return event.failure.elsewhere and self.state in _PROMPTING
        return isinstance(event, DecodeFailed) and event.failure.elsewhere and self.state in _SILENT

    def may_move(self, event: Event) -> bool:
        """Whether another instance may go on with what its client has begun to read."""
        in_stream = self.state in (State.STREAMING, State.MOVING)
        return in_stream and isinstance(event, DecodeFailed) and self.is_current(event)

    def is_current(self, event: Event) -> bool:
        """Whether the event speaks of a leg that has not been replaced."""
        if isinstance(event, OfPrefill):
            return event.leg == self.prefill_leg
        if isinstance(event, OfDecode):
            return event.leg == self.decode_leg
        return True


def begin(room: int, *, alone: bool) -> tuple[Route, Sequence[Effect]]:
    """A new route with its first legs; `alone` when a hybrid instance serves it."""
    if alone:
        return Route(room, State.AWAITING, decode_leg=1), _FIRST_ALONE
    return Route(room, State.OPEN, prefill_leg=1, decode_leg=1), _FIRST_BOTH


def _open_both(route: Route) -> list[Effect]:
    route.prefill_leg += 1
    route.decode_leg += 1
    return [OpenDecode(route.decode_leg), OpenPrefill(route.prefill_leg)]


def _open_alone(route: Route) -> list[Effect]:
    route.decode_leg += 1
    return [OpenDecode(route.decode_leg)]


def _join(route: Route, _event: PrefillReplaced) -> Sequence[Effect]:
    route.tries += 1
    route.prefill_leg += 1
    return [CancelPrefill(), OpenPrefill(route.prefill_leg), Rebind(route.prefill_leg)]


def _start_over(route: Route, event: PairReplaced) -> Sequence[Effect]:
    route.room, route.tries = event.room, route.tries + 1
    return [CancelPrefill(), CancelDecode(), *_open_both(route)]


def _start_alone(route: Route, event: InstanceReplaced) -> Sequence[Effect]:
    route.room, route.tries = event.room, route.tries + 1
    route.prefill_leg += 1  # nothing that the lost one still says counts
    return [CancelPrefill(), CancelDecode(), *_open_alone(route)]


def _go_on(route: Route, event: Moved) -> Sequence[Effect]:
    """Decode asks for what it needs by itself: it knows what has been said."""
    route.room, route.moves = event.room, route.moves + 1
    return [CancelPrefill(), CancelDecode(), *_open_alone(route)]


def _strand(route: Route, _event: Stranded) -> Sequence[Effect]:
    route.decode_leg += 1  # nothing that the lost one still says counts
    return [CancelPrefill(), CancelDecode(), LookForAnother(route.decode_leg)]


def _start_answer(_route: Route, _event: object) -> Sequence[Effect]:
    return _STARTED


def _cancel_prefill(_route: Route, _event: object) -> Sequence[Effect]:
    return [CancelPrefill()]


def _finish(_route: Route, _event: DecodeEnded) -> Sequence[Effect]:
    return _FINISHED


def _refuse(_route: Route, event: PrefillFailed | DecodeFailed | CalledOff) -> Sequence[Effect]:
    return [CancelPrefill(), CancelDecode(), Refuse(event.failure)]


def _break(_route: Route, event: DecodeFailed | CalledOff) -> Sequence[Effect]:
    return [CancelPrefill(), CancelDecode(), BreakAnswer(event.failure)]


def _let_go(_route: Route, _event: ClientLeft) -> Sequence[Effect]:
    return [CancelPrefill(), CancelDecode()]


_S = State
_PROVEN: Final = "decode has begun its answer, and sees to what it still needs"

ROUTE: Table[State, Route, Effect] = Table(
    "route",
    edges={
        (_S.OPEN, PrefillDone): Edge(_S.AWAITING),
        (_S.OPEN, PrefillFailed): Edge(_S.FAILED, _refuse),
        (_S.OPEN, PrefillReplaced): Edge(_S.JOINING, _join),
        (_S.OPEN, AnsweredEarly): Edge(_S.HELD),
        (_S.JOINING, Joined): Edge(_S.OPEN),
        (_S.JOINING, JoinedLate): Edge(_S.AWAITING, _cancel_prefill),
        (_S.JOINING, PrefillDone): Edge(_S.AWAITING),
        (_S.JOINING, PrefillFailed): Edge(_S.FAILED, _refuse),
        (_S.JOINING, PrefillReplaced): Edge(_S.JOINING, _join),
        (_S.JOINING, AnsweredEarly): Edge(_S.HELD),
        (_S.AWAITING, AnsweredEarly): Edge(_S.STREAMING, _start_answer),
        (_S.HELD, PrefillDone): Edge(_S.STREAMING, _start_answer),
        (_S.HELD, PrefillFailed): Edge(_S.FAILED, _refuse),
        **{(s, Answered): Edge(_S.STREAMING, _start_answer) for s in _SILENT if s is not _S.HELD},
        **{(s, PairReplaced): Edge(_S.OPEN, _start_over) for s in _SILENT},
        **{(s, InstanceReplaced): Edge(_S.AWAITING, _start_alone) for s in _SILENT},
        **{(s, DecodeFailed): Edge(_S.FAILED, _refuse) for s in _SILENT},
        **{(s, CalledOff): Edge(_S.FAILED, _refuse) for s in _SILENT},
        **{(s, ClientLeft): Edge(_S.LEFT, _let_go) for s in (*_SILENT, *_HEARD)},
        (_S.STREAMING, DecodeEnded): Edge(_S.SERVED, _finish),
        **{(_S.MOVING, e): Edge(_S.STREAMING) for e in (Answered, AnsweredEarly)},
        **{(s, Moved): Edge(_S.MOVING, _go_on) for s in _HEARD},
        **{(s, Stranded): Edge(_S.STRANDED, _strand) for s in (_S.STREAMING, _S.MOVING)},
        **{(s, DecodeFailed): Edge(_S.FAILED, _break) for s in _HEARD},
        **{(s, CalledOff): Edge(_S.FAILED, _break) for s in _HEARD},
    },
    ignored={
        **{(_S.AWAITING, e): "the prompt has arrived already" for e in get_args(OfPrefill)},
        **{(s, e): _PROVEN for s in _HEARD for e in get_args(OfPrefill)},
        **{(_S.HELD, e): "decode has answered, whoever prefilled" for e in (Joined, JoinedLate)},
        **{(s, e): "the client has its outcome" for s in OVER for e in EVENTS},
    },
)


_TOLD: Final = {  # of each step, made once
    **{(s, e): f"{s}--{e.__name__}->{edge.to}" for (s, e), edge in ROUTE.edges.items()},
    **{(s, e): f"{s}--{e.__name__}->{s}" for s, e in ROUTE.ignored},
}


def feed(route: Route, event: Event) -> Sequence[Effect]:
    """The only function that moves a route."""
    if not route.is_current(event):
        return ()  # an echo of a leg that was replaced
    before, story = route.state, route.story
    route.state, effects = ROUTE.step(before, route, event)
    story.append(_TOLD[before, type(event)])
    if len(story) > _MOST_STEPS:
        del story[0]
    return effects
