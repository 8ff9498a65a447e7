"""Each cell of both tables is decided: an edge, ignored with a reason, or listed as impossible."""

from __future__ import annotations

import pytest

from pdrt.data import events as transfer
from pdrt.errors import Illegal
from pdrt.messages import Problem, Sampling
from pdrt.sched import events
from pdrt.sched.answer_life import ANSWER
from pdrt.sched.book import Book
from pdrt.sched.limits import Limits
from pdrt.sched.prefill_life import PREFILL
from pdrt.sched.request import Request, State, from_submit
from tests.sched.fakes import submit

PROBLEM = Problem(code="peer_lost", message="gone")

# What a peer, a client or the clock can cause at any moment.
ANSWER_ANY: tuple[type, ...] = (
    transfer.ReceiverReady,
    transfer.PromptStarted,
    events.Cancelled,
    events.Stopped,
    events.Rebound,
    events.ResumeLocally,
    events.Failed,
    events.AttemptLost,
    events.AttemptRefused,
    events.FellBack,
)
# What the scheduler decides itself, for states it has looked at.
ANSWER_OWN: tuple[type, ...] = (
    events.Granted,
    events.Grown,
    events.Computed,
    events.FirstsTold,
    events.FirstsKept,
    events.FirstStopped,
    events.EndedEarly,
    events.Dropped,
    events.Arrived,
    events.TokenOut,
    events.LastToken,
    events.Retracted,
    events.Returned,
    events.Swapped,
)
ANSWER_STATES = (
    State.QUEUED,
    State.BOOTSTRAPPING,
    State.WAITING,
    State.UNBOUND,
    State.TRANSFERRING,
    State.RUNNING,
    State.SWAPPED,
    State.DONE,
)
PREFILL_ANY: tuple[type, ...] = (
    transfer.SenderReady,
    transfer.SendFailed,
    events.SendBroken,
    events.Cancelled,
    events.Failed,
)
PREFILL_OWN: tuple[type, ...] = (
    events.Granted,
    events.Computed,
    events.Prefilled,
    events.Delivered,
)
PREFILL_STATES = (
    State.BOOTSTRAPPING,
    State.QUEUED,
    State.RUNNING,
    State.INFLIGHT,
    State.DONE,
)


def impossible(own: tuple[type, ...], states: tuple[State, ...], decided: str) -> set[object]:
    """All own events in all states but those named as `state:Event` here."""
    names = set(decided.split())
    return {(s, e) for s in states for e in own if f"{s}:{e.__name__}" not in names}


def test_every_cell_of_the_answer_table_is_decided_once() -> None:
    expected = impossible(
        ANSWER_OWN,
        ANSWER_STATES,
        """queued:Granted waiting:Granted transferring:TokenOut transferring:LastToken
        transferring:FirstsTold transferring:FirstsKept transferring:EndedEarly
        transferring:FirstStopped transferring:Arrived transferring:Returned
        running:FirstsTold running:EndedEarly running:Arrived
        queued:Dropped bootstrapping:Dropped waiting:Dropped unbound:Dropped
        transferring:Dropped running:Dropped
        running:Grown running:Computed running:TokenOut running:LastToken running:Retracted
        running:Returned running:Swapped swapped:Granted swapped:Retracted swapped:Returned
        swapped:Dropped done:Computed done:TokenOut done:LastToken""",
    )
    assert ANSWER.undecided(ANSWER_STATES, ANSWER_ANY + ANSWER_OWN) == expected
    assert not ANSWER.edges.keys() & ANSWER.ignored.keys()


def test_every_cell_of_the_prefill_table_is_decided_once() -> None:
    expected = impossible(
        PREFILL_OWN,
        PREFILL_STATES,
        """queued:Granted running:Computed running:Prefilled inflight:Delivered
        done:Computed done:Prefilled done:Delivered""",
    )
    assert PREFILL.undecided(PREFILL_STATES, PREFILL_ANY + PREFILL_OWN) == expected
    assert not PREFILL.edges.keys() & PREFILL.ignored.keys()


@pytest.mark.parametrize("table", [ANSWER, PREFILL], ids=["answer", "prefill"])
def test_a_terminal_state_is_never_left(table: object) -> None:
    """CASES 61: an end is never overwritten by what comes later."""
    assert table in (ANSWER, PREFILL)
    for one in (ANSWER, PREFILL):
        assert not [cell for cell in one.edges if cell[0] is State.DONE]


@pytest.mark.parametrize("state", ANSWER_STATES)
def test_a_cancel_is_never_illegal_where_answers_are_made(state: State) -> None:
    cell = (state, events.Cancelled)
    assert cell in ANSWER.edges.keys() | ANSWER.ignored.keys()


@pytest.mark.parametrize("state", PREFILL_STATES)
def test_a_cancel_is_never_illegal_where_prompts_are_computed(state: State) -> None:
    cell = (state, events.Cancelled)
    assert cell in PREFILL.edges.keys() | PREFILL.ignored.keys()


def test_a_reason_stands_beside_each_ignored_cell() -> None:
    assert all(len(why) > 8 for t in (ANSWER, PREFILL) for why in t.ignored.values())


def test_what_cannot_happen_is_illegal() -> None:
    request = Request(1, 1, 0, [1], 1, Sampling(), frozenset(), 1.0)
    with pytest.raises(Illegal, match="TokenOut cannot happen in queued"):
        ANSWER.step(State.QUEUED, request, events.TokenOut(1, 0.0))


def test_the_pictures_show_every_edge() -> None:
    for table in (ANSWER, PREFILL):
        assert len(list(table.dot())) == len(table.edges) + 2


def test_an_impossible_event_is_told_with_the_story_of_the_request() -> None:
    book = Book(ANSWER, Limits(), blocks=4, slots=0)
    request = from_submit(submit(7, [1, 2]), book.next_key(), (), 0.0)
    book.enter(request)
    book.move(request, events.Granted(blocks=(0,)))
    with pytest.raises(Illegal) as told:
        book.move(request, events.Delivered())
    assert "queued--Granted->running" in "".join(told.value.__notes__)
