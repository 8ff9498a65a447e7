"""The bootstrap server's decisions, without a socket and with the time as an argument."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdrt.control.bootstrap import BootstrapState, Limits, Sizes
from pdrt.errors import BadRequest, Conflict, NoPrefill
from pdrt.messages import PROTOCOL, Process, Rank
from tests.control.bootstrap_samples import LAYOUT, OTHER_LAYOUT, registration


def state(dp: int = 1, tp: int = 1, **more: Any) -> BootstrapState:
    return BootstrapState(Sizes(dp=dp, tp=tp), epoch=0, **more)


def test_a_route_is_given_only_when_every_rank_is_registered() -> None:
    two = state(dp=2)
    assert not two.is_ready(0)
    two.register(registration(dp=0, dp_size=2), 0)
    with pytest.raises(NoPrefill, match=r"1,0,0 \(never registered\)"):
        two.route(0)
    two.register(registration(dp=1, dp_size=2), 0)
    route = two.route(0)
    assert two.is_ready(0)
    assert {rank: there.rank_port for rank, there in route.ranks.items()} == {
        "0,0,0": 5000,
        "1,0,0": 5001,
    }
    assert (route.dp_size, route.attn_tp_size, route.attn_cp_size) == (2, 1, 1)
    assert (route.block_size, route.kv_cache_dtype, route.fingerprint) == (16, "float32", LAYOUT)


@pytest.mark.parametrize(("after", "ready"), [(9.99, True), (10.0, False), (11.0, False)])
def test_a_lease_lapses_to_the_instant(after: float, ready: bool) -> None:
    one = state(limits=Limits(lease_s=10))
    assert one.register(registration(), 0) == 10
    assert one.is_ready(after) is ready
    if not ready:
        with pytest.raises(NoPrefill, match="lease lapsed"):
            one.route(after)


def test_a_renewed_lease_holds_on_and_a_lapsed_one_comes_back_with_the_same_epoch() -> None:
    one = state()
    one.register(registration(), 0)
    one.register(registration(), 8)
    assert one.is_ready(17)
    assert not one.is_ready(18)
    one.register(registration(), 30)
    assert one.is_ready(31)
    assert one.counters == {"registered": 1, "renewed": 2}


SAME_EPOCH_CONFLICTS = [
    {"rank_ip": "127.0.0.9"},
    {"rank_port": 9999},
    {"process": Process(host="here", pid=7, started=1)},
    {"fingerprint": OTHER_LAYOUT},
]


@pytest.mark.parametrize("changes", SAME_EPOCH_CONFLICTS)
def test_another_address_or_process_needs_a_newer_epoch(changes: dict[str, Any]) -> None:
    """CASES 107: a rank's place changes hands only for a newer instance epoch."""
    one = state()
    one.register(registration(epoch=5), 0)
    with pytest.raises(Conflict, match="newer epoch"):
        one.register(registration(epoch=5, **changes), 1)
    assert one.route(1).ranks["0,0,0"].rank_port == 5000
    assert one.register(registration(epoch=6, **changes), 1)


def test_an_older_epoch_is_refused_even_when_the_newer_ones_lease_has_lapsed() -> None:
    one = state()
    one.register(registration(epoch=5), 0)
    with pytest.raises(Conflict, match="4 is older than 5"):
        one.register(registration(epoch=4), 1000)


def test_a_worker_that_was_started_again_takes_its_place_in_a_living_instance() -> None:
    two = state(dp=2)
    two.register(registration(dp=0, epoch=1, dp_size=2), 0)
    two.register(registration(dp=1, epoch=2, dp_size=2), 0)
    assert two.route(0).instance_epoch == 2
    two.withdraw(Rank(dp=0))
    with pytest.raises(NoPrefill, match=r"0,0,0 \(its process ended\)"):
        two.route(0)
    two.register(registration(dp=0, epoch=3, dp_size=2), 1)
    route = two.route(1)
    assert route.instance_epoch == 3
    assert [there.instance_epoch for there in route.ranks.values()] == [3, 2]


def test_a_renewal_that_was_under_way_does_not_revive_a_dead_rank() -> None:
    one = state()
    one.register(registration(epoch=1), 0)
    one.withdraw(Rank())
    with pytest.raises(Conflict, match="has ended"):
        one.register(registration(epoch=1), 1)
    assert not one.is_ready(1)


def test_withdrawing_who_never_came_is_no_error() -> None:
    state().withdraw(Rank(dp=7))


WRONG_SIZES = [
    ({"attn_tp_size": 2}, Conflict, r"sizes .*\(1, 1, 1\) here, \(2, 1, 1\) there"),
    ({"attn_cp_size": 2}, Conflict, "sizes"),
    ({"dp_size": 4}, Conflict, "sizes"),
    ({"protocol_version": PROTOCOL + 1}, Conflict, "protocol_version"),
    ({"rank": Rank(dp=1)}, BadRequest, "rank: 1,0,0"),
    ({"rank": Rank(cp=1)}, BadRequest, "rank: 0,1,0"),
    ({"rank": Rank(tp=1)}, BadRequest, "rank: 0,0,1"),
    ({"rank_ip": "example.org"}, BadRequest, "rank_ip: 'example.org' is no IP address"),
    ({"rank_ip": ""}, BadRequest, "rank_ip"),
    ({"rank_ip": "0.0.0.0"}, BadRequest, "rank_ip"),
    ({"rank_ip": "::"}, BadRequest, "rank_ip"),
    ({"rank_ip": "224.0.0.1"}, BadRequest, "rank_ip"),
]


@pytest.mark.parametrize(("changes", "kind", "says"), WRONG_SIZES)
def test_what_does_not_fit_the_configuration_is_refused_and_named(
    changes: dict[str, Any], kind: type[Exception], says: str
) -> None:
    """CASES 5: refused at registration with both values, never at the first request."""
    one = state()
    with pytest.raises(kind, match=says):
        one.register(registration(**changes), 0)
    assert one.rank_table == {}


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1", "127.3.2.1"])
def test_loopback_is_refused_by_a_leader_that_others_reach(ip: str) -> None:
    """CASES 25: a loopback address in a multi-host instance is an error at start-up."""
    with pytest.raises(BadRequest, match=f"rank_ip: {re.escape(ip)}.*local_ip"):
        state(host="10.0.0.1").register(registration(rank_ip=ip), 0)
    assert state(host="::1").register(registration(rank_ip=ip), 0)


@pytest.mark.parametrize("ip", ["10.0.0.7", "2001:db8::7"])
def test_ipv4_and_ipv6_addresses_are_registered_as_they_are(ip: str) -> None:
    one = state(host="10.0.0.1")
    one.register(registration(rank_ip=ip), 0)
    assert one.route(0).ranks["0,0,0"].rank_ip == ip


def test_a_sibling_with_another_fingerprint_is_refused_with_both_values() -> None:
    two = state(dp=2)
    two.register(registration(dp=0, dp_size=2), 0)
    with pytest.raises(Conflict, match="block_size: 16 here, 32 there"):
        two.register(registration(dp=1, dp_size=2, fingerprint=OTHER_LAYOUT), 1)


def test_a_whole_instance_may_come_back_with_another_fingerprint() -> None:
    """Only live siblings bind: after all leases lapsed the nodes may run a new configuration."""
    two = state(dp=2)
    for dp in (0, 1):
        two.register(registration(dp=dp, dp_size=2), 0)
    for dp in (0, 1):
        two.register(registration(dp=dp, dp_size=2, epoch=2, fingerprint=OTHER_LAYOUT), 60)
    assert two.route(60).block_size == 32


def test_the_leaders_own_epoch_counts_before_any_rank_is_there() -> None:
    one = BootstrapState(Sizes(), epoch=77)
    assert one.health(0).instance_epoch == 77
    assert not one.health(0).ready
    one.register(registration(epoch=80), 0)
    assert (one.health(0).instance_epoch, one.health(0).ready) == (80, True)


def test_a_missing_crowd_is_named_in_a_few_words() -> None:
    big = state(dp=4096)
    assert len(big.health(0).missing) == 8
    with pytest.raises(NoPrefill) as refused:
        big.route(0)
    assert len(str(refused.value)) < 500


def test_each_rank_is_expected() -> None:
    assert len(list(Sizes(tp=4, cp=2, dp=3).ranks())) == 24


def test_a_dp_rank_that_is_not_there_cannot_have_rooms() -> None:
    with pytest.raises(BadRequest, match="dp_rank: 1 must be below dp = 1"):
        state().register_room(5, 1, 0)


def test_an_unknown_room_has_dp_rank_minus_one() -> None:
    two = state(dp=2)
    two.register_room(5, 1, 0)
    assert two.dp_ranks([5, 6], 0) == {"5": 1, "6": -1}


class Rooms(RuleBasedStateMachine):
    """`room_to_dp_rank` against a plain model: bounded, expiring, the oldest goes first."""

    def __init__(self) -> None:
        super().__init__()
        self.state = state(dp=4, limits=Limits(room_ttl_s=10, max_rooms=3))
        self.model: list[tuple[int, int, float]] = []  # room, dp rank, expiry; oldest first
        self.now = 0.0

    @rule(room=st.integers(0, 6), dp=st.integers(0, 3))
    def register(self, room: int, dp: int) -> None:
        self.state.register_room(room, dp, self.now)
        kept = [entry for entry in self.model if entry[0] != room and self.now < entry[2]]
        self.model = [*kept, (room, dp, self.now + 10)][-3:]

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.model)
    @rule()
    def register_the_oldest_again(self) -> None:
        room, dp, _ = self.model[0]
        self.register(room, dp)

    @invariant()
    def answers_are_the_models(self) -> None:
        live = {room: dp for room, dp, until in self.model if self.now < until}
        expected = {str(room): live.get(room, -1) for room in range(7)}
        assert self.state.dp_ranks(range(7), self.now) == expected
        assert len(self.state.room_to_dp_rank) <= 3


TestRooms = Rooms.TestCase
TestRooms.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_million_rooms_leave_a_table_of_the_bounded_size() -> None:
    """CASES 49, short form: memory is bounded, the oldest goes, and it is counted."""
    one = state(limits=Limits(max_rooms=100))
    for room in range(10_000):
        one.register_room(room, 0, 0)
    assert len(one.room_to_dp_rank) == 100
    assert one.counters["rooms_evicted"] == 9_900
    assert one.dp_ranks([9_999, 0], 0) == {"9999": 0, "0": -1}
