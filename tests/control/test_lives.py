"""Each cell of both tables is decided: an edge, ignored with a reason, or listed as impossible."""

from __future__ import annotations

import pytest

from pdrt.control.lives import (
    NODE,
    NODE_EVENTS,
    WORKER,
    WORKER_EVENTS,
    AllLoaded,
    AllRegistered,
    Bound,
    DrainAsked,
    Drained,
    Exited,
    GaveUp,
    NodeState,
    PauseOver,
    SaidReady,
    Spawned,
    StopAsked,
    TooOften,
    WorkerGone,
    WorkerState,
)

# What the supervisor decides itself, for states that it has looked at.
IMPOSSIBLE_NODE = {
    *((s, Bound) for s in NodeState if s is not NodeState.STARTING),
    (NodeState.STARTING, AllLoaded),
    (NodeState.STARTING, AllRegistered),
    *((s, Drained) for s in NodeState if s is not NodeState.DRAINING),
} - {(s, e) for s in (NodeState.STOPPED, NodeState.FAILED) for e in NODE_EVENTS}
IMPOSSIBLE_WORKER = {
    *((s, Spawned) for s in WorkerState if s is not WorkerState.SPAWNING),
    *((s, PauseOver) for s in WorkerState if s is not WorkerState.WAITING),
    *((s, TooOften) for s in WorkerState if s is not WorkerState.WAITING),
    (WorkerState.WAITING, Exited),
} - {(s, e) for s in (WorkerState.STOPPED, WorkerState.FAILED) for e in WORKER_EVENTS}


def test_every_cell_of_the_node_table_is_decided_once() -> None:
    assert NODE.undecided(NodeState, NODE_EVENTS) == IMPOSSIBLE_NODE
    assert not NODE.edges.keys() & NODE.ignored.keys()


def test_every_cell_of_the_worker_table_is_decided_once() -> None:
    assert WORKER.undecided(WorkerState, WORKER_EVENTS) == IMPOSSIBLE_WORKER
    assert not WORKER.edges.keys() & WORKER.ignored.keys()


@pytest.mark.parametrize("state", NodeState)
@pytest.mark.parametrize("event", [WorkerGone, DrainAsked, GaveUp])
def test_what_others_cause_is_never_illegal_for_a_node(state: NodeState, event: type) -> None:
    assert (state, event) in NODE.edges.keys() | NODE.ignored.keys()


@pytest.mark.parametrize("state", WorkerState)
@pytest.mark.parametrize("event", [SaidReady, StopAsked])
def test_what_others_cause_is_never_illegal_for_a_worker(state: WorkerState, event: type) -> None:
    assert (state, event) in WORKER.edges.keys() | WORKER.ignored.keys()


def test_an_end_is_never_left() -> None:
    over = {NodeState.STOPPED, NodeState.FAILED, WorkerState.STOPPED, WorkerState.FAILED}
    assert not [cell for table in (NODE, WORKER) for cell in table.edges if cell[0] in over]


def test_a_reason_stands_beside_each_ignored_cell() -> None:
    assert all(len(why) > 8 for table in (NODE, WORKER) for why in table.ignored.values())


def test_a_node_that_loses_a_worker_must_load_and_register_again() -> None:
    state = NodeState.STARTING
    events = Bound(), AllLoaded(), AllRegistered(), WorkerGone(), AllLoaded(), AllRegistered()
    seen = [state := NODE.step(state, None, event)[0] for event in events]
    assert seen == ["loading", "registering", "ready", "loading", "registering", "ready"]
