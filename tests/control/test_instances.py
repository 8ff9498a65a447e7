"""Instances and pairs: life, loads, trust, and who is chosen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from pdrt.config import Role, RouterConfig, Target
from pdrt.control.fleet import Fleet
from pdrt.control.instances import Instance, Status, base_url, read_status, watch
from pdrt.control.order import Pin
from pdrt.control.pairs import EVENTS, PAIR, CanaryPassed, CanaryStarted, Trust, feed
from pdrt.control.policy import Ask, weight_of
from pdrt.data.peer import Health
from pdrt.errors import (
    BadMessage,
    BadRequest,
    ConfigError,
    NoDecode,
    NoPrefill,
    PdrtError,
    PeerLost,
    Unavailable,
)
from tests.fake_time import stand_still


class Heard:
    """A listener that notes what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def renewed(self, _instance: Instance) -> None:
        self.notes.append("renewed")

    def faulted(self, _instance: Instance) -> None:
        self.notes.append("faulted")

    def changed(self) -> None:
        self.notes.append("changed")

    def serves(self, instance: Instance) -> None:
        self.notes.append(f"serves {instance.model}")

    def rested(self, _instance: Instance) -> None:
        self.notes.append("rested")


def ready(epoch: int = 1, fault: float | None = None, **fields: object) -> Status:
    return read_status(
        {
            "role": "prefill",
            "state": "ready",
            "instance_epoch": epoch,
            "last_fault_at": fault,
            **fields,
        }
    )


def instance(heard: Heard | None = None) -> Instance:
    return Instance("prefill", Target(http="10.0.0.1:8001"), heard or Heard())


PAIR_IMPOSSIBLE = {
    *((state, CanaryStarted) for state in (Trust.TRYING, Trust.PASSED, Trust.RETRYING)),
    *((Trust.PASSED, kind) for kind in EVENTS[1:4]),  # its canary is over
    *((Trust.DOUBTFUL, kind) for kind in EVENTS[1:4]),
}


@pytest.mark.parametrize("state", Trust)
@pytest.mark.parametrize("kind", EVENTS)
def test_every_cell_of_the_pair_table_is_decided_once(state: Trust, kind: type) -> None:
    cell = (state, kind)
    assert (cell in PAIR.edges) + (cell in PAIR.ignored) + (cell in PAIR_IMPOSSIBLE) == 1


def test_one_miss_makes_it_suspect_and_the_second_dead() -> None:
    one = instance()
    seen = [(str(one.health), one.is_routable)]
    one.heard(ready())
    seen.append((str(one.health), one.is_routable))
    for _ in range(2):
        one.missed("slow")
        seen.append((str(one.health), one.is_routable))
    assert seen == [("unknown", False), ("alive", True), ("suspect", True), ("dead", False)]
    assert "slow" in one.why_not
    one.heard(ready())
    assert (one.is_routable, one.why_not) == (True, "")


@pytest.mark.parametrize("role", ["prefill", "decode", "hybrid"])
def test_who_waits_for_it_is_told_which_side_is_lost(role: Role) -> None:
    one, told = Instance(role, Target(http="10.0.0.1:8001"), Heard()), list[PdrtError]()
    one.heard(ready(role=role))
    one.hold(1, 0, 0, told.append)
    one.died("refused")
    assert [(error.code, error.stage) for error in told] == [("peer_lost", role)]


def test_a_beat_forgives_a_miss() -> None:
    one = instance()
    one.heard(ready())
    for _ in range(5):
        one.missed("slow")
        one.heard(ready())
    assert one.health is Health.ALIVE


def test_a_refused_connection_counts_at_once() -> None:
    one = instance()
    one.heard(ready())
    one.died("refused")
    assert one.health is Health.DEAD


def _carry(one: Instance) -> list[PdrtError]:
    lost: list[PdrtError] = []
    one.hold(10, 0, 1, lost.append)
    return lost


def test_what_it_carries_hears_of_its_death_in_the_same_breath() -> None:
    one = instance()
    one.heard(ready())
    lost = _carry(one)
    one.missed("silence")
    assert not lost
    one.missed("silence")
    assert isinstance(lost[0], PeerLost)
    assert "silence" in str(lost[0])


def test_a_new_epoch_loses_what_the_old_one_carried() -> None:
    heard = Heard()
    one = instance(heard)
    one.heard(ready(1))
    lost = _carry(one)
    one.heard(ready(2))
    assert len(lost) == 1
    assert "renewed" in heard.notes


def test_a_fault_is_told_once() -> None:
    heard = Heard()
    one = instance(heard)
    for fault in (None, 3.0, 3.0, 4.5):
        one.heard(ready(fault=fault))
    assert heard.notes.count("faulted") == 2


def test_a_hold_is_given_back_once() -> None:
    one = instance()
    hold = one.hold(10, 3, 1, lambda _error: None)
    assert (one.load.requests, one.load.tokens) == (1, 10)
    hold.release()
    hold.release()
    assert (one.load.requests, one.load.tokens) == (0, 0)


def test_ranks_are_chosen_among_the_ready_ones_by_their_load() -> None:
    one = instance()
    one.heard(ready(ready_ranks=[1, 3]))
    picked = []
    for turn in range(1, 5):
        rank = one.choose_rank("least_loaded")
        one.hold(10, rank, turn, lambda _error: None)
        picked.append(rank)
    assert picked == [1, 3, 1, 3]


def test_no_ready_rank_takes_no_request() -> None:
    one = instance()
    one.heard(ready(ready_ranks=[]))
    assert not one.is_routable


@pytest.mark.parametrize(
    "body", [None, [], {}, {"role": "prefill"}, {"role": "router", "state": "ready"}, {"state": 1}]
)
def test_nonsense_is_no_status(body: object) -> None:
    with pytest.raises(BadMessage):
        read_status(body)


def test_unknown_fields_of_a_status_are_ignored() -> None:
    assert ready(new_field=1).is_ready


def test_where_its_bootstrap_server_is_it_says_itself() -> None:
    target = Target(http="10.0.0.1:8001", bootstrap="10.0.0.1:18800")
    one = Instance("prefill", target, Heard())
    assert one.bootstrap == ("10.0.0.1", 18800)
    one.heard(ready(bootstrap_host="10.0.0.1", bootstrap_port=4711))
    assert one.bootstrap == ("10.0.0.1", 4711)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("http://host:8001/", "http://host:8001"),
        ("[::1]:8001", "http://[::1]:8001"),
        ("HTTPS://Some-host.example.:8001", "https://Some-host.example.:8001"),
        ("[fe80::1%eth0]:1", "http://[fe80::1%eth0]:1"),
    ],
)
def test_targets_are_host_and_port(text: str, url: str) -> None:
    assert base_url(text)[0] == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:x", "ftp://h:1", "http://h:1/path", ":80", "h:99999", "h:0"),
        *("http://[::1", "http://[::1]", "[x]:1", "\0:1", "a\r\nb:1", "a b:1", "u:p@h:1", "h?:1"),
        *("\u00e9.x:1", f"{'a' * 64}:1", f"{'a.' * 127}a:1", "a..b:1", "h:1\n", "<b>:1"),
    ],
)
def test_other_targets_are_refused(text: str) -> None:
    """The resolver is not asked for what it could only raise at."""
    with pytest.raises(ConfigError, match="host:port"):
        base_url(text)
    with pytest.raises(ConfigError, match="host:port"):
        Instance("prefill", Target(http="h:1", bootstrap=text or ":"), Heard())


def test_ipv6_bootstrap_addresses_lose_their_brackets() -> None:
    one = Instance("prefill", Target(http="[::1]:8001", bootstrap="[::1]:18800"), Heard())
    assert one.bootstrap == ("::1", 18800)


# The watch.


async def _turn(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0)


def silent(_instance: Instance) -> int:
    return 0


async def test_a_first_miss_is_looked_at_again_at_once() -> None:
    one = instance()
    answers: list[Status | PdrtError] = [ready(), PeerLost("x"), PeerLost("x")]
    asked = 0

    async def probe(_instance: Instance) -> Status:
        nonlocal asked
        asked += 1
        answer = answers.pop(0)
        if isinstance(answer, PdrtError):
            raise answer
        return answer

    task = asyncio.create_task(watch(one, probe, silent, every=3600, within=3600))
    await _turn(lambda: one.health is Health.ALIVE)
    one.nudged.set()
    await _turn(lambda: one.health is Health.DEAD)
    assert asked == 3
    task.cancel()


async def test_a_probe_that_hangs_is_a_miss() -> None:
    one = instance()
    one.heard(ready())

    async def probe(_instance: Instance) -> Status:
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(watch(one, probe, silent, every=3600, within=0.001))
    await _turn(lambda: one.health is Health.DEAD)
    assert "no answer" in one.reason
    task.cancel()


async def test_an_instance_that_sends_answers_is_not_dead_however_slow_its_status() -> None:
    one = instance()
    one.heard(ready())
    probes = 0

    async def probe(_instance: Instance) -> Status:
        nonlocal probes
        probes += 1
        await asyncio.Event().wait()
        raise AssertionError

    def signs(_instance: Instance) -> int:
        return min(probes, 5)  # pieces of an answer come meanwhile, then no more

    task = asyncio.create_task(watch(one, probe, signs, every=0.0001, within=0.001))
    await _turn(lambda: one.health is Health.DEAD)
    assert probes == 7
    task.cancel()


async def test_an_instance_without_beats_that_sends_answers_is_not_full_for_ever() -> None:
    one = instance()
    one.heard(ready())
    one.overflowed()
    seen = 0

    async def probe(_instance: Instance) -> Status:
        await asyncio.Event().wait()
        raise AssertionError

    def signs(_instance: Instance) -> int:
        nonlocal seen
        seen += 1
        return seen

    task = asyncio.create_task(watch(one, probe, signs, every=3600, within=0.001))
    await _turn(lambda: not one.is_full)
    assert one.health is Health.ALIVE
    task.cancel()


async def test_an_instance_is_not_dead_for_what_we_had_no_time_to_read() -> None:
    """The loop stands still past the limit, again and again; each answer takes three turns."""
    one = instance()
    one.heard(ready())
    answered = 0

    async def probe(_instance: Instance) -> Status:
        nonlocal answered
        for _ in range(3):
            stand_still(0.03)
            await asyncio.sleep(0)
        answered += 1
        return ready()

    task = asyncio.create_task(watch(one, probe, silent, every=0.001, within=0.02))
    await _turn(lambda: answered == 5 or one.health is not Health.ALIVE)
    assert one.health is Health.ALIVE
    task.cancel()


# The choice.


def fleet(prefill: int = 2, decode: int = 2, hybrid: int = 0, **policy: object) -> Fleet:
    """All alive, all passed."""
    tables = {
        "prefill": [
            {"http": f"10.0.0.{i}:1", "bootstrap": f"10.0.0.{i}:2"} for i in range(prefill)
        ],
        "decode": [{"http": f"10.0.1.{i}:1"} for i in range(decode)],
        "hybrid": [{"http": f"10.0.2.{i}:1"} for i in range(hybrid)],
        "policy": policy,
    }
    found = Fleet.of(RouterConfig.model_validate(tables))
    for each in found.instances:
        each.heard(Status(role=each.role, state="ready"))
    for pair in found.pairs:
        feed(pair, CanaryStarted())
        feed(pair, CanaryPassed())
    return found


async def test_a_fleet_has_every_pair() -> None:
    found = fleet(3, 2, 1)
    assert len(found.pairs) == 7
    assert found.is_ready


async def test_pairs_that_never_passed_are_not_used() -> None:
    found = fleet(2, 1)
    found.renewed(found.prefill[0])
    for _ in range(4):
        assert found.pick().prefill is found.prefill[1]
    found.renewed(found.decode[0])
    with pytest.raises(Unavailable, match="canary"):
        found.pick()
    assert not found.is_ready


async def test_an_instance_that_never_answered_is_not_said_to_be_lost() -> None:
    new = Fleet.of(RouterConfig(hybrid=(Target(http="h:1"),)))
    (one,), (pair,) = new.hybrid, new.pairs
    one.died("refused")
    assert pair.reason == "hybrid h:1 had not been reached yet"
    one.heard(ready())
    one.died("refused")
    assert pair.reason == "hybrid h:1 was lost or restarted"


async def test_without_canaries_the_living_are_used() -> None:
    found = fleet(1, 1, backends="plain")
    found.renewed(found.decode[0])
    assert found.pick().decode is found.decode[0]
    assert found.is_ready


async def test_a_suspect_instance_is_used_only_for_want_of_another() -> None:
    found = fleet(2, 1)
    found.prefill[0].missed("slow")
    assert found.pick().prefill is found.prefill[1]
    found.prefill[1].missed("slow")
    assert found.pick().prefill is not None


@pytest.mark.parametrize("state", ["loading", "draining", "registering", "failed"])
async def test_what_is_missing_is_said(state: str) -> None:
    found = fleet(1, 1)
    found.prefill[0].heard(Status(role="prefill", state=state))
    with pytest.raises(NoPrefill, match=state):
        found.pick()
    found.prefill[0].heard(Status(role="prefill", state="ready"))
    found.decode[0].heard(Status(role="decode", state=state))
    with pytest.raises(NoDecode, match=state):
        found.pick()


async def test_loads_spread_over_both_sides() -> None:
    found = fleet(2, 2)
    picked = []
    for _ in range(8):
        choice = found.pick()
        assert choice.prefill is not None
        choice.prefill.hold(10, 0, found.turn, lambda _error: None)
        choice.decode.hold(10, 0, found.turn, lambda _error: None)
        picked.append((choice.prefill, choice.decode))
    for side in (0, 1):
        assert set(Counter(pair[side] for pair in picked).values()) == {4}


async def test_another_prefill_is_found_for_the_same_decode() -> None:
    found = fleet(2, 1)
    first = found.prefill[0]
    choice = found.pick_prefill(found.decode[0], {first})
    assert choice.prefill is found.prefill[1]
    with pytest.raises(NoPrefill):
        found.pick_prefill(found.decode[0], set(found.prefill))


async def test_only_registered_instances_can_be_pinned() -> None:
    found = fleet(2, 1)
    assert found.pinned(Pin("10.0.0.1", 2)) is found.prefill[1]
    with pytest.raises(BadRequest, match="bootstrap_host"):
        found.pinned(Pin("10.0.0.1", 3))
    with pytest.raises(NoPrefill):
        found.pick(pinned=found.prefill[1], without={found.prefill[1]})


async def test_turns_of_a_conversation_come_to_the_instance_and_rank_that_know_it() -> None:
    """CASES 66: rooms modulo ranks scattered them."""
    found = fleet(2, 2)
    policy = found.config.policy.model_copy(
        update={"prefill": "prefix_aware", "decode": "prefix_aware"}
    )
    found.config = found.config.model_copy(update={"policy": policy})
    for each in found.prefill:
        each.heard(Status(role="prefill", state="ready", ready_ranks=(0, 1, 2)))
    talks = {n: f"conversation {n}: " + f"{n} said " * 100 for n in range(30)}
    where: dict[int, tuple[object, ...]] = {}
    moved = 0
    for _turn in range(4):
        for n, said in talks.items():
            choice = found.pick(Ask(prompt=said, weight=weight_of(said)))
            place = (choice.prefill, choice.dp_rank, choice.decode)
            moved += where.setdefault(n, place) != place
            where[n] = place
            talks[n] = said + f"{n} answered " * 30
    assert moved <= 4  # of 90
    assert len({place[:2] for place in where.values()}) == 6  # every rank has its share
    found.renewed(found.prefill[0])
    assert found.prefill[0].load.seats == 0
