"""Leaders that fall silent, come back, are replaced, or refuse; in time that the test moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer, unused_port

from pdrt.control import heartbeat
from pdrt.control.bootstrap import BootstrapState, Sizes, bootstrap_app
from pdrt.control.heartbeat import (
    Address,
    Callers,
    Heartbeat,
    News,
    Time,
    Timing,
    Watched,
    bootstrap_probe,
    watch,
)
from pdrt.data.peer import Health
from pdrt.errors import PeerLost, Unavailable
from pdrt.keys import ClusterKey
from tests.fake_time import FakeTime, settle, stand_still

TIMING = Timing()
A, B = ("10.0.0.1", 18800), ("10.0.0.2", 18800)
ALIVE, SUSPECT, DEAD, UNKNOWN = Health.ALIVE, Health.SUSPECT, Health.DEAD, Health.UNKNOWN


class Net:
    """Peers that answer with their epoch, refuse, or (epoch 0) are silent until the time is up."""

    def __init__(self, time: FakeTime) -> None:
        self.time = time
        self.epochs: dict[Address, int] = {A: 1, B: 1}
        self.pings: list[tuple[float, Address]] = []

    async def probe(self, address: Address) -> int:
        self.pings.append((self.time.now, address))
        epoch = self.epochs.get(address)
        if epoch is None:
            raise PeerLost("connection refused")
        if epoch == 0:
            await self.time.sleep(TIMING.timeout_s)
            raise TimeoutError
        return epoch


class Rig:
    def __init__(self, timing: Timing = TIMING) -> None:
        self.time = FakeTime(now=0)
        self.net = Net(self.time)
        self.news: list[tuple[float, News]] = []
        self.heartbeat = Heartbeat(
            self.net.probe,
            lambda news: self.news.append((self.time.now, news)),
            timing,
            Time(self.time.clock, self.time.sleep),
        )
        self.task = asyncio.create_task(self.heartbeat.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def told(self) -> list[tuple[str, Health, int]]:
        return [(news.peer, news.health, news.epoch) for _, news in self.news]


async def test_a_leader_that_answers_is_alive_and_pinged_every_second() -> None:
    rig = Rig()
    rig.heartbeat.watch(*A)
    assert rig.heartbeat.health(*A) is UNKNOWN
    await rig.time.run_until(3.5)
    assert rig.heartbeat.health(*A) is ALIVE
    assert [at for at, _ in rig.net.pings] == [0, 1, 2, 3]
    assert rig.told == [("10.0.0.1:18800", ALIVE, 1)]
    await rig.end()


@pytest.mark.parametrize("dies_at", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("silent", [True, False])
async def test_a_leader_that_dies_is_told_dead_within_two_seconds(
    dies_at: float, silent: bool
) -> None:
    """Whenever it dies, and whether its host is silent or refuses."""
    rig = Rig()
    rig.heartbeat.watch(*A)
    await rig.time.run_until(dies_at)
    rig.net.epochs[A] = 0
    if not silent:
        del rig.net.epochs[A]
    await rig.time.run_until(dies_at + 2)
    at, news = rig.news[-1]
    assert (news.health, news.epoch) == (DEAD, 1)
    assert at - dies_at < 1.95
    assert news.reason == ("no answer within 0.45 s" if silent else "connection refused")
    await rig.end()


async def test_one_miss_makes_it_suspect_and_an_answer_alive_again() -> None:
    rig = Rig()
    rig.heartbeat.watch(*A)
    await rig.time.run_until(0.5)
    del rig.net.epochs[A]
    await rig.time.run_until(1.2)
    assert rig.heartbeat.health(*A) is SUSPECT
    rig.net.epochs[A] = 1
    await rig.time.run_until(1.5)
    assert rig.heartbeat.health(*A) is ALIVE
    assert DEAD not in [health for _, health, _ in rig.told]
    await rig.end()


async def test_a_dead_leader_that_comes_back_is_alive_and_each_change_is_told_once() -> None:
    rig = Rig()
    rig.heartbeat.watch(*A)
    await rig.time.run_until(0.5)
    del rig.net.epochs[A]
    await rig.time.run_until(30)
    rig.net.epochs[A] = 2
    await rig.time.run_until(60)
    assert rig.told == [
        ("10.0.0.1:18800", ALIVE, 1),
        ("10.0.0.1:18800", DEAD, 1),
        ("10.0.0.1:18800", ALIVE, 2),
    ]
    await rig.end()


async def test_a_new_epoch_at_the_same_address_is_a_new_peer() -> None:
    """It was killed and started again between two pings: nobody missed an answer."""
    rig = Rig()
    rig.heartbeat.watch(*A)
    await rig.time.run_until(0.5)
    rig.net.epochs[A] = 2
    await rig.time.run_until(1.5)
    assert rig.told[1:] == [("10.0.0.1:18800", DEAD, 1), ("10.0.0.1:18800", ALIVE, 2)]
    assert rig.news[1][1].reason == "epoch 2 took the place of 1"
    await rig.end()


async def test_a_leader_that_was_never_there_is_dead_after_two_misses() -> None:
    rig = Rig()
    rig.heartbeat.watch("10.0.0.9", 1)
    await rig.time.run_until(1)
    assert rig.told == [("10.0.0.9:1", DEAD, -1)]
    await rig.end()


async def test_a_silent_leader_does_not_delay_the_others() -> None:
    rig = Rig()
    rig.net.epochs[A] = 0
    rig.heartbeat.watch(*A)
    rig.heartbeat.watch(*B)
    await rig.time.run_until(5.5)
    assert [at for at, address in rig.net.pings if address == B] == [0, 1, 2, 3, 4, 5]
    await rig.end()


async def test_watching_twice_is_watching_once() -> None:
    rig = Rig()
    for _ in range(3):
        rig.heartbeat.watch(*A)
    await rig.time.run_until(0.5)
    rig.heartbeat.watch(*A)
    await rig.time.run_until(2.5)
    assert len(rig.net.pings) == 3
    assert [peer.name for peer in rig.heartbeat.peers()] == ["10.0.0.1:18800"]
    await rig.end()


async def test_a_leader_nobody_is_interested_in_is_forgotten_and_can_come_back() -> None:
    rig = Rig(replace(TIMING, forget_s=10))
    rig.heartbeat.watch(*A)
    await rig.time.run_until(8)
    rig.heartbeat.watch(*A)
    await rig.time.run_until(17.5)
    assert rig.heartbeat.health(*A) is ALIVE
    await rig.time.run_until(19)
    assert rig.heartbeat.peers() == []
    pings = len(rig.net.pings)
    await rig.time.run_until(40)
    assert len(rig.net.pings) == pings
    rig.heartbeat.watch(*A)
    await rig.time.run_until(40.5)
    assert rig.heartbeat.health(*A) is ALIVE
    await rig.end()


async def test_the_table_of_peers_is_bounded_and_the_least_wanted_goes() -> None:
    rig = Rig()
    rig.heartbeat.watch(*A)
    await rig.time.run_until(0.1)
    for port in range(1, heartbeat.MAX_PEERS + 1):
        rig.heartbeat.watch("10.0.0.3", port)
    assert len(rig.heartbeat.peers()) == heartbeat.MAX_PEERS
    assert rig.heartbeat.health(*A) is UNKNOWN
    await settle()
    await rig.time.run_until(1.05)
    assert [address for _, address in rig.net.pings].count(A) == 1
    await rig.end()


async def test_ipv6_peers_have_bracketed_names() -> None:
    rig = Rig()
    rig.heartbeat.watch("::1", 80)
    assert [peer.name for peer in rig.heartbeat.peers()] == ["[::1]:80"]
    await rig.end()


class Party:
    """Callers with a clock; `tick` runs as `run` would have it."""

    def __init__(self, timing: Timing = TIMING) -> None:
        self.time = FakeTime(now=0)
        self.news: list[tuple[float, News]] = []
        self.callers = Callers(
            lambda news: self.news.append((self.time.now, news)),
            timing,
            Time(self.time.clock, self.time.sleep),
        )
        self.task = asyncio.create_task(self.callers.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def told(self) -> list[tuple[str, Health, int]]:
        return [(news.peer, news.health, news.epoch) for _, news in self.news]


@pytest.mark.parametrize("phase", [0.0, 0.02, 0.05])
async def test_a_caller_that_falls_silent_is_told_dead_within_two_seconds(phase: float) -> None:
    party = Party()
    for second in range(5):
        await party.time.run_until(second + phase)
        party.callers.heard("d0:8100 7")
    assert party.told == [("d0:8100", ALIVE, 7)]
    await party.time.run_until(4 + phase + 1.4)
    assert party.callers.peers()[0].health is ALIVE
    await party.time.run_until(4 + phase + 1.6)
    assert party.callers.peers()[0].health is SUSPECT
    await party.time.run_until(10)
    at, news = party.news[-1]
    assert (news.health, at - 4 - phase < 2) == (DEAD, True)
    await party.time.run_until(30)
    assert len(party.news) == 2
    await party.end()


async def test_a_caller_with_a_new_epoch_is_a_new_peer() -> None:
    party = Party()
    party.callers.heard("d0:8100 7")
    party.callers.heard("d0:8100 8")
    assert party.told == [("d0:8100", ALIVE, 7), ("d0:8100", DEAD, 7), ("d0:8100", ALIVE, 8)]
    await party.end()


@pytest.mark.parametrize(
    "junk", ["", " ", "x", "x ", " 7", "x y", "x -1", "x ²", "x 1 2", "x" * 999 + " 1"]
)
async def test_a_caller_that_does_not_say_who_it_is_is_dropped(junk: str) -> None:
    party = Party()
    party.callers.heard(junk)
    assert party.callers.peers() == []
    await party.end()


async def test_a_stall_of_ours_is_not_taken_for_two_misses_of_theirs() -> None:
    party = Party()
    party.callers.heard("d0 1")
    party.time.now += 60  # this process was stopped; the callers were not
    party.callers.tick()
    party.callers.tick()
    party.callers.heard("d0 1")
    assert DEAD not in [health for _, health, _ in party.told]
    await party.end()


async def test_callers_are_bounded_and_the_silent_are_forgotten() -> None:
    party = Party(replace(TIMING, forget_s=5))
    for number in range(heartbeat.MAX_PEERS + 5):
        party.callers.heard(f"d{number} 1")
    assert len(party.callers.peers()) == heartbeat.MAX_PEERS
    party.callers.heard("d5 1")  # else the longest silent, now
    party.callers.heard("d9999 1")
    names = {peer.name for peer in party.callers.peers()}
    assert ("d4" in names, "d5" in names, "d6" in names) == (False, True, False)
    await party.time.run_until(6)
    assert party.callers.peers() == []
    await party.end()


async def test_decode_asks_and_prefill_hears_over_real_http() -> None:
    time, key, heard = FakeTime(), ClusterKey.from_text("a key for these tests"), list[str]()
    app = bootstrap_app(BootstrapState(Sizes(), epoch=12), key, time.clock, heard.append)
    async with TestServer(app, host="127.0.0.1") as server, ClientSession() as session:
        probe = bootstrap_probe(session, key, 2, "127.0.0.2:8100 5")
        assert await probe(("127.0.0.1", server.port or 0)) == 12
        assert heard == ["127.0.0.2:8100 5"]
        with pytest.raises(Unavailable):
            await probe(("127.0.0.1", unused_port()))


async def test_a_leader_is_not_missed_for_what_we_had_no_time_to_read() -> None:
    peer, told = Watched("a"), list[News]()

    async def probe(_address: Address) -> int:
        peer.used = -1.0  # nobody is interested any more: this is the last look
        for _ in range(3):
            stand_still(0.03)
            await asyncio.sleep(0)
        return 1

    timing = Timing(every_s=0.0, timeout_s=0.02, forget_s=0.5)
    await watch(A, peer, probe, told.append, timing, Time(lambda: 0.0))
    assert [news.health for news in told] == [ALIVE]
