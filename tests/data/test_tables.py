"""Every cell of the tables of transfers and peers is decided."""

from __future__ import annotations

from typing import Final, get_args

import pytest

from pdrt.data.peer import EVENTS, PEER, Health
from pdrt.data.transfer import (
    RECEIVE,
    SEND,
    TERMINAL,
    Admitted,
    AllWritten,
    Broke,
    ChunkGiven,
    DecodeLeft,
    DecodeServed,
    PromptBegan,
    ReceiveInput,
    Resolved,
    SendInput,
    ShookHands,
    SlotsValid,
    State,
    Stopped,
    Withdrawn,
)

# What only our own code could cause, and what it must never cause.
SEND_IMPOSSIBLE: Final = {
    (State.BOOTSTRAPPING, ChunkGiven),  # the scheduler computes after SenderReady
    (State.BOOTSTRAPPING, AllWritten),
    (State.WAITING_FOR_INPUT, ShookHands),  # counted once, by the desk
    (State.WAITING_FOR_INPUT, AllWritten),
    (State.TRANSFERRING, ShookHands),
}
RECEIVE_IMPOSSIBLE: Final = {
    (State.BOOTSTRAPPING, Admitted),  # the scheduler admits after ReceiverReady
    (State.BOOTSTRAPPING, SlotsValid),  # no slot is watched yet
    (State.WAITING_FOR_INPUT, Resolved),
    (State.WAITING_FOR_INPUT, SlotsValid),
    (State.TRANSFERRING, Resolved),
    (State.TRANSFERRING, Admitted),
    (State.DONE, Admitted),
}
FROM_OUTSIDE: Final = {Broke, DecodeLeft, DecodeServed, Stopped, Withdrawn, PromptBegan}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", get_args(SendInput))
def test_every_cell_of_send_is_decided_once(state: State, kind: type) -> None:
    cell = (state, kind)
    assert (cell in SEND.edges) + (cell in SEND.ignored) + (cell in SEND_IMPOSSIBLE) == 1


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", get_args(ReceiveInput))
def test_every_cell_of_receive_is_decided_once(state: State, kind: type) -> None:
    cell = (state, kind)
    assert (cell in RECEIVE.edges) + (cell in RECEIVE.ignored) + (cell in RECEIVE_IMPOSSIBLE) == 1


def test_what_peers_clients_and_transports_cause_is_never_impossible() -> None:
    assert not {kind for _, kind in SEND_IMPOSSIBLE | RECEIVE_IMPOSSIBLE} & FROM_OUTSIDE


@pytest.mark.parametrize("table", [SEND, RECEIVE], ids=["send", "receive"])
def test_terminal_states_are_never_left(table: object) -> None:
    """CASES 61."""
    assert table in (SEND, RECEIVE)
    edges = SEND.edges if table is SEND else RECEIVE.edges
    assert all(edge.to is state for (state, _), edge in edges.items() if state in TERMINAL)


@pytest.mark.parametrize("health", Health)
@pytest.mark.parametrize("kind", EVENTS)
def test_every_cell_of_a_peers_health_is_decided(health: Health, kind: type) -> None:
    assert ((health, kind) in PEER.edges) + ((health, kind) in PEER.ignored) == 1
