"""Circuit breakers: opened by faults and never by saturation, closed by canaries."""

from __future__ import annotations

import asyncio

import pytest

from pdrt.control.breaker import (
    BREAKER,
    EVENTS,
    FAULTS,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Breaker,
    Circuit,
    Faulted,
    FaultedTooOften,
    PauseOver,
    Renewed,
    Served,
    feed,
)
from pdrt.control.fleet import Fleet, is_fault
from pdrt.control.instances import Instance
from pdrt.control.legs import Failure
from pdrt.control.pairs import Trust
from pdrt.errors import (
    BadRequest,
    DeadlinePassed,
    Draining,
    Overloaded,
    PdrtError,
    PeerLost,
    TransferFailed,
)
from tests.control.fake_leader import status
from tests.control.router_rig import rig, until
from tests.control.test_instances import fleet

BROKEN = Failure.of(TransferFailed("it broke"))


@pytest.mark.parametrize("state", Circuit)
@pytest.mark.parametrize("kind", EVENTS)
def test_every_cell_of_the_breakers_table_is_decided_once(state: Circuit, kind: type) -> None:
    cell = (state, kind)
    assert (cell in BREAKER.edges) + (cell in BREAKER.ignored) == 1


def test_pauses_double_up_to_the_longest_and_begin_anew_once_forgiven() -> None:
    breaker, pauses, now = Breaker(), [], 0.0
    feed(breaker, FaultedTooOften(now))
    for _ in range(8):
        pauses.append(breaker.until - now)
        now = breaker.until
        feed(breaker, PauseOver())
        feed(breaker, Faulted(now))
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    feed(breaker, PauseOver())
    feed(breaker, Served())
    assert (breaker.state, breaker.faults, breaker.pause_s) == (Circuit.CLOSED, 0, FIRST_PAUSE_S)


def test_what_was_sent_before_it_opened_neither_closes_nor_prolongs_it() -> None:
    breaker = Breaker()
    feed(breaker, FaultedTooOften(1.0))
    until = breaker.until
    for event in (Served(), Faulted(1.5), FaultedTooOften(1.6)):
        assert not feed(breaker, event)
    assert (breaker.state, breaker.until) == (Circuit.OPEN, until)


def test_a_new_life_is_held_nothing_against() -> None:
    breaker = Breaker()
    feed(breaker, FaultedTooOften(1.0))
    feed(breaker, Renewed())
    assert (breaker.state, breaker.faults) == (Circuit.CLOSED, 0)


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (TransferFailed("x"), True),
        (PeerLost("x"), True),
        (PdrtError("x"), True),
        (Overloaded("x"), False),
        (Draining("x"), False),
        (DeadlinePassed("x"), False),
        (BadRequest("x"), False),
    ],
)
def test_faults_are_what_the_instance_did_wrong(error: PdrtError, counts: bool) -> None:
    """CASES 77: a high rate opened every circuit."""
    assert is_fault(Failure.of(error)) is counts


def _blame(found: Fleet, one: Instance, times: int = FAULTS) -> None:
    for _ in range(times):
        found.blame(one, BROKEN)


async def test_faults_in_a_row_open_a_circuit_and_nothing_goes_there() -> None:
    found = fleet(2, 1)
    bad = found.prefill[0]
    _blame(found, bad, FAULTS - 1)
    assert bad.is_routable
    found.blame(bad, BROKEN)
    assert bad.breaker.state is Circuit.OPEN
    assert {found.pick().prefill for _ in range(4)} == {found.prefill[1]}
    assert "faults in a row" in bad.why_not


async def test_a_request_that_goes_well_in_between_is_enough_to_keep_it_closed() -> None:
    found = fleet(2, 1)
    bad = found.prefill[0]
    for _ in range(10):
        _blame(found, bad, FAULTS - 1)
        choice = found.pick(pinned=bad)
        found.praise(choice)
    assert bad.breaker.state is Circuit.CLOSED


async def test_the_last_one_is_not_left_alone() -> None:
    found = fleet(2, 1)
    _blame(found, found.prefill[0])
    _blame(found, found.prefill[1], 3 * FAULTS)
    _blame(found, found.decode[0], 3 * FAULTS)
    assert found.pick().prefill is found.prefill[1]


async def test_when_the_others_die_the_one_left_alone_is_tried_at_once() -> None:
    found = fleet(2, 1)
    found.clock = lambda: 0.0
    _blame(found, found.prefill[0])
    found.end_pauses()
    states = [found.prefill[0].breaker.state]
    found.prefill[1].died("refused")
    found.end_pauses()
    states.append(found.prefill[0].breaker.state)
    assert states == [Circuit.OPEN, Circuit.HALF_OPEN]


async def test_after_its_pause_only_a_canary_brings_it_back() -> None:
    found, now = fleet(2, 1), 0.0
    found.clock = lambda: now
    bad = found.prefill[0]
    _blame(found, bad)
    now = FIRST_PAUSE_S
    found.end_pauses()
    assert bad.breaker.state is Circuit.HALF_OPEN
    (pair,) = (p for p in found.pairs if p.prefill is bad)
    assert (pair.trust, pair.is_due) == (Trust.UNTRIED, True)
    assert found.pick().prefill is found.prefill[1]


# Over HTTP.


async def test_an_instance_that_only_fails_is_left_alone_and_a_canary_brings_it_back() -> None:
    async with rig(decode=2) as r:
        bad = r.decode[0]
        bad.plays.extend(status(503, "boom", "peer_lost") for _ in range(20))
        bad.canaries.append(status(503, "boom", "peer_lost"))
        for _ in range(2 * FAULTS):
            assert (await r.send()).status == 200  # served by the other one
        one = r.instance(bad)
        assert one.breaker.state is Circuit.OPEN
        seen = len(bad.seen)
        for _ in range(4):
            assert (await r.send()).status == 200
        assert len(bad.seen) == seen == FAULTS
        bad.plays.clear()
        r.time.now += FIRST_PAUSE_S
        r.router.fleet.moved.set()
        await until(lambda: one.breaker.opened == 2)  # its canary has failed
        r.time.wake()
        r.time.now += 2 * FIRST_PAUSE_S
        r.router.fleet.moved.set()
        await until(lambda: one.breaker.state is Circuit.HALF_OPEN)
        r.time.wake()
        await until(lambda: one.breaker.state is Circuit.CLOSED)
        assert one.is_routable


async def test_a_flood_of_429_opens_nothing() -> None:
    """CASES 77."""
    async with rig(prefill=2, decode=2) as r:
        for leader in r.leaders:
            leader.plays.extend(status(429, "full", "overloaded") for _ in range(40))
        answers = await asyncio.gather(*(r.send() for _ in range(30)))
        assert {each.status for each in answers} == {429}
        assert all(each.headers["retry-after"] for each in answers)
        states = {one.breaker.state for one in r.router.fleet.instances}
        assert states == {Circuit.CLOSED}
        for leader in r.leaders:
            leader.plays.clear()
        await r.look()
        assert (await r.send()).status == 200
