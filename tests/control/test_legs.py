"""The route's table: every cell decided, every way out lets go of what was open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdrt.control.legs import (
    EVENTS,
    OVER,
    ROUTE,
    Answered,
    AnsweredEarly,
    BreakAnswer,
    CalledOff,
    CancelDecode,
    CancelPrefill,
    ClientLeft,
    DecodeEnded,
    DecodeFailed,
    Effect,
    Event,
    Failure,
    FinishAnswer,
    InstanceReplaced,
    Joined,
    JoinedLate,
    LookForAnother,
    Moved,
    OpenDecode,
    OpenPrefill,
    PairReplaced,
    PrefillDone,
    PrefillFailed,
    PrefillReplaced,
    Rebind,
    Refuse,
    Route,
    StartAnswer,
    State,
    Stranded,
    begin,
    feed,
)
from pdrt.control.relay import Relay
from pdrt.errors import BadRequest, DeadlinePassed, PdrtError, PeerLost

GONE = Failure.of(PeerLost("gone"), elsewhere=True)
BAD = Failure.of(BadRequest("bad"))
LATE = Failure.of(DeadlinePassed("late"))

# What only this process causes, and does not cause there.
IMPOSSIBLE: dict[tuple[State, type], str] = {
    (State.OPEN, Joined): "said once, by the rebind that JOINING waits for",
    (State.OPEN, JoinedLate): "said once, by the rebind that JOINING waits for",
    (State.OPEN, DecodeEnded): "the pump starts with the answer",
    (State.JOINING, DecodeEnded): "the pump starts with the answer",
    (State.AWAITING, DecodeEnded): "the pump starts with the answer",
    (State.HELD, DecodeEnded): "the pump starts with the answer",
    (State.HELD, Answered): "decode answers once",
    (State.HELD, AnsweredEarly): "decode answers once",
    (State.STREAMING, Answered): "decode answers once",
    (State.STREAMING, AnsweredEarly): "decode answers once",
    (State.HELD, PrefillReplaced): "decode has answered: nobody joins it",
    (State.STREAMING, PairReplaced): "the client has part of the answer",
    (State.STREAMING, InstanceReplaced): "the client has part of the answer",
    (State.MOVING, PairReplaced): "the client has part of the answer",
    (State.MOVING, InstanceReplaced): "the client has part of the answer",
    (State.MOVING, DecodeEnded): "the pump starts with the answer",
    **{
        (State.STRANDED, kind): "no leg is open"
        for kind in (Answered, AnsweredEarly, DecodeEnded, PairReplaced, InstanceReplaced, Stranded)
    },
    **{
        (state, kind): "the client has heard nothing: the request starts over"
        for state in (State.OPEN, State.JOINING, State.AWAITING, State.HELD)
        for kind in (Moved, Stranded)
    },
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", EVENTS)
def test_every_cell_is_decided_once(state: State, kind: type) -> None:
    cell = (state, kind)
    assert (cell in ROUTE.edges) + (cell in ROUTE.ignored) + (cell in IMPOSSIBLE) == 1


@pytest.mark.parametrize("kind", [PrefillDone, PrefillFailed, DecodeFailed, ClientLeft, CalledOff])
@pytest.mark.parametrize("state", State)
def test_what_a_peer_a_client_or_a_clock_causes_is_never_impossible(
    state: State, kind: type
) -> None:
    assert (state, kind) not in IMPOSSIBLE


@pytest.mark.parametrize("cell", ROUTE.edges, ids=str)
def test_whatever_is_over_has_let_go_of_both_legs(cell: tuple[State, type]) -> None:
    state, kind = cell
    edge = ROUTE.edges[cell]
    if edge.to not in OVER:
        return
    route = Route(1, state, prefill_leg=1, decode_leg=1)
    effects = feed(route, _event(kind, route))
    assert CancelPrefill() in effects
    assert CancelDecode() in effects or kind is DecodeEnded


def _event(kind: type, route: Route) -> Event:
    if kind is PrefillFailed:
        return PrefillFailed(route.prefill_leg, GONE)
    if kind is DecodeFailed:
        return DecodeFailed(route.decode_leg, GONE)
    if kind is CalledOff:
        return CalledOff(LATE)
    if kind in (ClientLeft, Stranded):
        return ClientLeft() if kind is ClientLeft else Stranded()
    for of_room in (PairReplaced, InstanceReplaced, Moved):
        if kind is of_room:
            return of_room(9)
    is_decode = kind in (Answered, AnsweredEarly, DecodeEnded)
    found: Event = kind(route.decode_leg if is_decode else route.prefill_leg)
    return found


def test_a_pair_begins_with_both_legs_at_once() -> None:
    route, effects = begin(7, alone=False)
    assert list(effects) == [OpenDecode(1), OpenPrefill(1)]
    assert (route.state, route.room, route.attempt) == (State.OPEN, 7, 0)


def test_a_hybrid_begins_with_one_leg() -> None:
    route, effects = begin(7, alone=True)
    assert list(effects) == [OpenDecode(1)]
    assert route.state is State.AWAITING


def test_the_first_failure_is_the_answer_whichever_leg_it_is() -> None:
    """CASES 1."""
    for event in (PrefillFailed(1, BAD), DecodeFailed(1, BAD), CalledOff(BAD)):
        route, _ = begin(7, alone=False)
        assert list(feed(route, event)) == [CancelPrefill(), CancelDecode(), Refuse(BAD)]
        assert list(feed(route, DecodeFailed(1, GONE))) == []
        assert route.state is State.FAILED


def test_a_replaced_prefill_raises_the_attempt_and_keeps_the_room() -> None:
    route, _ = begin(7, alone=False)
    effects = feed(route, PrefillReplaced(1))
    assert list(effects) == [CancelPrefill(), OpenPrefill(2), Rebind(2)]
    assert (route.room, route.attempt, route.decode_leg) == (7, 65536, 1)
    assert not feed(route, PrefillFailed(1, GONE))  # an echo of the first
    assert not feed(route, Joined(1))
    assert route.state == "joining"
    feed(route, Joined(2))
    assert list(route.story)[-1] == "joining--Joined->open"


def test_a_replaced_pair_has_a_fresh_room_and_a_higher_attempt() -> None:
    route, _ = begin(7, alone=False)
    effects = feed(route, PairReplaced(8))
    assert list(effects) == [CancelPrefill(), CancelDecode(), OpenDecode(2), OpenPrefill(2)]
    assert (route.room, route.attempt) == (8, 65536)
    assert not feed(route, Answered(1))
    assert route.state is State.OPEN


def test_a_plain_answer_waits_for_prefills_outcome() -> None:
    route, _ = begin(7, alone=False)
    assert list(feed(route, AnsweredEarly(1))) == []
    assert list(feed(route, PrefillDone(1))) == [StartAnswer()]


@pytest.mark.parametrize("state", State)
def test_only_a_silent_route_may_be_replaced(state: State) -> None:
    route = Route(7, state, prefill_leg=1, decode_leg=1)
    silent = state in (State.OPEN, State.JOINING, State.AWAITING, State.HELD)
    assert route.may_replace(DecodeFailed(1, GONE)) == silent
    prompting = silent and state is not State.AWAITING
    assert route.may_replace(PrefillFailed(1, GONE)) == prompting
    assert not route.may_replace(DecodeFailed(1, BAD))
    assert not route.may_replace(DecodeFailed(2, GONE))
    assert not route.may_replace(ClientLeft())


def test_a_stream_moves_to_another_decode_leg_in_a_fresh_room() -> None:
    """Decode sees to its KV: no prefill leg is opened, and what is left of the old one goes."""
    route, _ = begin(1, alone=False)
    feed(route, Answered(1))
    assert route.may_move(DecodeFailed(1, GONE))
    assert feed(route, Moved(9)) == [CancelPrefill(), CancelDecode(), OpenDecode(2)]
    assert (route.state, route.room, route.moves) == (State.MOVING, 9, 1)
    assert not feed(route, DecodeFailed(1, GONE))  # an echo of the lost one
    assert route.may_move(DecodeFailed(2, GONE))  # the next one may be lost too
    assert feed(route, Moved(10))[-1] == OpenDecode(3)
    assert not feed(route, Answered(3))  # the client's answer has begun already
    assert list(feed(route, DecodeEnded(3))) == [CancelPrefill(), FinishAnswer()]


def test_a_stream_that_nobody_can_go_on_with_waits_for_one() -> None:
    route, _ = begin(1, alone=False)
    feed(route, Answered(1))
    assert feed(route, Stranded()) == [CancelPrefill(), CancelDecode(), LookForAnother(2)]
    assert not feed(route, DecodeFailed(1, GONE))  # of the lost one
    assert not route.may_move(DecodeFailed(2, GONE))  # that one gives up
    assert feed(route, Moved(9))[-1] == OpenDecode(3)
    feed(route, Stranded())
    assert feed(route, DecodeFailed(4, GONE))[-1] == BreakAnswer(GONE)


@pytest.mark.parametrize("event", [DecodeFailed(2, GONE), CalledOff(LATE)])
def test_a_stream_that_cannot_move_on_ends_with_an_error(event: DecodeFailed | CalledOff) -> None:
    route, _ = begin(1, alone=True)
    feed(route, Answered(1))
    feed(route, Moved(9))
    assert feed(route, event)[-1] == BreakAnswer(event.failure)
    assert route.state is State.FAILED


@pytest.mark.parametrize("state", State)
def test_only_what_has_been_heard_moves(state: State) -> None:
    may = state in (State.STREAMING, State.MOVING)
    assert Route(1, state, decode_leg=1).may_move(DecodeFailed(1, GONE)) == may
    assert not Route(1, state, decode_leg=2).may_move(DecodeFailed(1, GONE))


def test_the_story_is_in_the_route() -> None:
    route, _ = begin(7, alone=False)
    feed(route, PrefillDone(1))
    feed(route, Answered(1))
    assert list(route.story) == [
        "open--PrefillDone->awaiting",
        "awaiting--Answered->streaming",
    ]


class Routes(RuleBasedStateMachine):
    """Whatever order things happen in, the client gets one outcome and nothing stays open."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill_open = self.decode_open = False
        self.answer_started = False
        self.outcomes: list[Effect] = []
        self.route, effects = begin(1, alone=False)
        self.carry_out(effects)

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case OpenPrefill():
                    assert not self.prefill_open, "two prefill legs"
                    self.prefill_open = True
                case OpenDecode():
                    assert not self.decode_open, "two decode legs"
                    self.decode_open = True
                case CancelPrefill():
                    self.prefill_open = False
                case CancelDecode():
                    self.decode_open = False
                case StartAnswer():
                    assert not self.answer_started
                    self.answer_started = True
                case Refuse() | BreakAnswer() | FinishAnswer():
                    self.outcomes.append(effect)
                case Rebind():
                    assert self.decode_open
                case LookForAnother():
                    assert not self.decode_open

    def feed(self, event: Event) -> None:
        self.carry_out(feed(self.route, event))

    @property
    def started(self) -> bool:
        return self.answer_started

    @precondition(lambda self: self.prefill_open)
    @rule(done=st.booleans(), replace=st.booleans(), error=st.sampled_from([GONE, BAD]))
    def prefill_ends(self, done: bool, replace: bool, error: Failure) -> None:
        self.prefill_open = False
        event: Event = PrefillFailed(self.route.prefill_leg, error)
        if done:
            event = PrefillDone(self.route.prefill_leg)
        elif replace and self.route.may_replace(event):
            event = PrefillReplaced(self.route.prefill_leg)
        self.feed(event)

    @precondition(lambda self: self.route.state is State.JOINING)
    @rule(late=st.booleans())
    def rebind_ends(self, late: bool) -> None:
        leg = self.route.prefill_leg
        self.feed(JoinedLate(leg) if late else Joined(leg))

    @property
    def is_streaming(self) -> bool:
        return self.route.state is State.STREAMING

    @precondition(lambda self: self.route.state is State.STRANDED)
    @rule(found=st.booleans())
    def looking_ends(self, found: bool) -> None:
        leg = self.route.decode_leg
        self.feed(Moved(self.route.room + 1) if found else DecodeFailed(leg, GONE))

    @precondition(lambda self: self.decode_open and not self.is_streaming)
    @rule()
    def decode_answers(self) -> None:
        self.feed(Answered(self.route.decode_leg))

    @precondition(lambda self: self.decode_open)
    @rule(replace=st.booleans(), strand=st.booleans(), error=st.sampled_from([GONE, BAD]))
    def decode_fails(self, replace: bool, strand: bool, error: Failure) -> None:
        self.decode_open = False
        event: Event = DecodeFailed(self.route.decode_leg, error)
        if replace and self.route.may_replace(event):
            event = PairReplaced(self.route.room + 1)
        elif replace and self.route.may_move(event):
            assert self.started
            event = Stranded() if strand else Moved(self.route.room + 1)
        self.feed(event)

    @precondition(lambda self: self.decode_open and self.is_streaming)
    @rule()
    def decode_ends(self) -> None:
        self.decode_open = False
        self.feed(DecodeEnded(self.route.decode_leg))

    @rule(leg=st.integers(0, 9), kind=st.sampled_from(EVENTS))
    def an_echo_comes(self, leg: int, kind: type) -> None:
        if kind in (PairReplaced, InstanceReplaced, Moved, Stranded, ClientLeft, CalledOff):
            return
        current = {self.route.prefill_leg, self.route.decode_leg}
        if leg not in current:
            failed = kind in (PrefillFailed, DecodeFailed)
            self.feed(kind(leg, GONE) if failed else kind(leg))

    @rule()
    def the_client_leaves(self) -> None:
        self.feed(ClientLeft())

    @rule()
    def the_deadline_passes(self) -> None:
        self.feed(CalledOff(LATE))

    @invariant()
    def nothing_is_open_once_it_is_over(self) -> None:
        if self.route.is_over:
            assert not self.prefill_open
            assert not self.decode_open

    @invariant()
    def a_client_that_stays_gets_exactly_one_outcome(self) -> None:
        expected = self.route.state in (State.SERVED, State.FAILED)
        assert len(self.outcomes) == expected
        for outcome in self.outcomes:
            assert isinstance(outcome, Refuse) != self.answer_started

    @invariant()
    def somebody_works_while_it_is_not_over(self) -> None:
        if not self.route.is_over and self.route.state is not State.STRANDED:
            assert self.decode_open


TestRoutes = Routes.TestCase


def test_a_failure_keeps_the_errors_status() -> None:
    assert Failure.of(PdrtError("x")).status == 500
    assert Failure.of(BadRequest("x")).status == 400


def test_a_relay_can_carry_out_each_effect() -> None:
    assert Relay.CARRIED_OUT.keys() == set(get_args(Effect))
