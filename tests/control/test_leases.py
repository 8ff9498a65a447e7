"""Who has registered, and until when; and how a leader keeps its place in its routers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdrt.control.leases import Joined, Leases, Left, Registration, Restarted
from pdrt.control.membership import (
    EVENTS,
    MEMBERSHIP,
    Membership,
    Place,
    Registrar,
)
from pdrt.errors import Conflict, Overloaded, Unavailable


def said(
    http: str = "http://10.0.0.1:8001",
    epoch: int = 1,
    role: str = "prefill",
    state: str = "here",
    bootstrap: str = "",
) -> Registration:
    return Registration.model_validate(
        {
            "role": role,
            "http": http,
            "instance_epoch": epoch,
            "state": state,
            "bootstrap": bootstrap,
            "a field of a later version": 1,
        }
    )


def kinds(changes: Sequence[object]) -> list[type]:
    return [type(change) for change in changes]


def test_the_first_registration_joins_and_further_ones_renew() -> None:
    leases = Leases(10.0)
    assert kinds(leases.take(said(), 0.0)) == [Joined]
    assert leases.take(said(), 5.0) == []
    assert leases.left_s(said().http, 6.0) == 9.0


def test_a_lapsed_lease_removes_and_a_renewed_one_does_not() -> None:
    leases = Leases(10.0)
    leases.take(said("a:1"), 0.0)
    leases.take(said("b:1"), 0.0)
    leases.take(said("b:1"), 9.0)
    (left,) = leases.lapsed(10.0)
    assert (left.registration.http, len(leases)) == ("a:1", 1)
    assert "10 s" in left.reason
    assert leases.lapsed(18.9) == []
    assert kinds(leases.lapsed(19.0)) == [Left]
    assert not len(leases)


def test_a_new_epoch_is_a_new_life_and_an_older_one_is_refused() -> None:
    leases = Leases(10.0)
    leases.take(said(epoch=5), 0.0)
    assert kinds(leases.take(said(epoch=6), 1.0)) == [Restarted]
    with pytest.raises(Conflict, match="epoch 6, and 5 is older"):
        leases.take(said(epoch=5), 2.0)


def test_who_comes_back_as_another_leaves_first() -> None:
    leases = Leases(10.0)
    leases.take(said(epoch=1, bootstrap="10.0.0.1:18800"), 0.0)
    changes = leases.take(said(epoch=2, bootstrap="10.0.0.1:18900"), 1.0)
    assert kinds(changes) == [Left, Joined]
    assert kinds(leases.take(said(epoch=3, role="decode"), 2.0)) == [Left, Joined]


def test_who_says_so_leaves_unless_its_successor_is_here_already() -> None:
    leases = Leases(10.0)
    assert leases.take(said(state="leaving"), 0.0) == []
    leases.take(said(epoch=2), 1.0)
    assert leases.take(said(epoch=1, state="leaving"), 2.0) == []
    assert kinds(leases.take(said(epoch=2, state="leaving"), 3.0)) == [Left]
    assert kinds(leases.take(said(epoch=3), 4.0)) == [Joined]


def test_registrations_are_bounded() -> None:
    leases = Leases(10.0, most=2)
    for name in ("a:1", "b:1"):
        leases.take(said(name), 0.0)
    with pytest.raises(Overloaded, match="2 instances"):
        leases.take(said("c:1"), 1.0)
    assert leases.take(said("a:1"), 2.0) == []


# The leader's side.


@pytest.mark.parametrize("state", Place)
@pytest.mark.parametrize("kind", EVENTS)
def test_every_cell_of_the_membership_table_is_decided_once(state: Place, kind: type) -> None:
    cell = (state, kind)
    assert (cell in MEMBERSHIP.edges) + (cell in MEMBERSHIP.ignored) == 1


class Routers:
    """What two routers hear, and whether they answer."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.away: set[str] = set()
        self.news = asyncio.Event()
        self.leaving = asyncio.Event()
        self.registrar = Registrar(["a", "b"], self.tell, self.leaving, said)

    async def tell(self, url: str, what: Registration) -> float:
        self.heard.append((url, what.state))
        self.news.set()
        if url in self.away:
            raise Unavailable("no such router")
        return 0.003

    async def until_heard(self, *wanted: tuple[str, str]) -> None:
        async with asyncio.timeout(5):
            while not set(wanted) <= set(self.heard):
                self.news.clear()
                await self.news.wait()

    def states(self) -> list[Place]:
        return [each.state for each in self.registrar.memberships]


async def test_a_leader_is_a_member_of_each_router_and_says_goodbye_to_each() -> None:
    routers = Routers()
    task = asyncio.create_task(routers.registrar.run())
    await routers.until_heard(("a", "here"), ("b", "here"))
    while routers.heard.count(("a", "here")) < 3:  # it is renewed
        routers.news.clear()
        await routers.news.wait()
    routers.leaving.set()
    await task
    assert routers.heard[-2:] in (
        [("a", "leaving"), ("b", "leaving")],
        [("b", "leaving"), ("a", "leaving")],
    )
    assert routers.states() == [Place.GONE, Place.GONE]


async def test_a_router_that_is_away_delays_no_other_and_hears_no_goodbye() -> None:
    routers = Routers()
    routers.away.add("b")
    task = asyncio.create_task(routers.registrar.run())
    await routers.until_heard(("a", "here"), ("b", "here"))
    while routers.states() != [Place.MEMBER, Place.OUTSIDE]:
        await asyncio.sleep(0)
    assert "no such router" in routers.registrar.memberships[1].reason
    routers.leaving.set()
    await task
    assert ("b", "leaving") not in routers.heard


async def test_a_node_that_ends_at_once_still_says_goodbye() -> None:
    """Its tasks are cancelled before they could."""
    routers = Routers()
    task = asyncio.create_task(routers.registrar.run())
    while routers.states() != [Place.MEMBER, Place.MEMBER]:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await routers.registrar.say_goodbye()
    assert {("a", "leaving"), ("b", "leaving")} <= set(routers.heard)
    heard = len(routers.heard)
    await routers.registrar.say_goodbye()
    assert len(routers.heard) == heard


async def test_a_goodbye_that_a_router_does_not_take_is_given_up() -> None:
    routers = Routers()
    task = asyncio.create_task(routers.registrar.run())
    while routers.states() != [Place.MEMBER, Place.MEMBER]:
        await asyncio.sleep(0)
    routers.away.add("a")
    routers.leaving.set()
    await task
    assert routers.heard.count(("a", "leaving")) in (0, 3)  # outside already, or tried thrice
    assert routers.states() == [Place.GONE, Place.GONE]


def test_a_membership_starts_outside() -> None:
    assert Membership("http://h:1").state is Place.OUTSIDE
