"""A leader and its other nodes: what is said comes over, and who is gone is missed once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdrt.control.heartbeat import Time
from pdrt.control.nodes import Board
from pdrt.control.uplink import Uplink
from pdrt.control.worker_handle import Lost
from pdrt.curve import CurveContext
from pdrt.errors import BadRequest, ConfigError, Conflict, NotFound, PeerLost, Unavailable
from pdrt.link import Link
from pdrt.messages import (
    FROM_NODE,
    PROTOCOL,
    TO_NODE,
    AbortRoom,
    Drain,
    FromNode,
    GroupPlace,
    Loading,
    NodeHello,
    NodeWelcome,
    Output,
    Outputs,
    RankSaid,
    Ready,
    ResumeLocally,
    Said,
    Sampling,
    Submit,
    ToNode,
    pack_ids,
)
from tests.control.node_rig import KEY, RANKS, SETTINGS, joined, rigged
from tests.fake_time import FakeTime, settle
from tests.fake_worker import DIED, READY


def submit(room: int = 7, n: int = 1) -> Submit:
    return Submit(
        room=room,
        attempt=0,
        request_id="r",
        tokens=pack_ids([1]),
        prompt_tokens=1,
        sampling=Sampling(max_tokens=9, n=n),
        time_left=9.0,
    )


async def test_a_node_that_has_not_come_is_named_and_gets_nothing() -> None:
    async with rigged() as rig:
        rig.start_leader()
        far = rig.far.ranks[RANKS[0]]
        assert (far.ready, far.state) == (None, "absent: its node has not come")
        with pytest.raises(PeerLost, match=r"worker 0,0,1 of node 1 \(10.0.0.2\) is absent"):
            far.tell(submit())
        assert rig.far.ranks[RANKS[1]].name == "worker 1,0,0 of node 1 (10.0.0.2)"


async def test_whoever_comes_first_waits_for_the_other() -> None:
    async with rigged() as rig:
        node = rig.start_node()
        await rig.time.run_for(30)
        assert "cannot be reached" in node.uplink.absence
        rig.start_leader()
        await rig.time.run_for(0.6)
        await rig.until_joined()


async def test_what_workers_say_is_heard_at_the_leader_in_order() -> None:
    async with rigged() as rig:
        leader = rig.start_leader()
        rig.start_node()
        await rig.until_joined()
        worker, far = rig.workers[0], rig.far.ranks[RANKS[0]]
        for done in range(3):
            worker.say(Loading(stage="weights", done=done, total=3))
        worker.become_ready()
        worker.say(Outputs(items=(Output(room=7, tokens=(1,)),)))
        await rig.until(lambda: leader.of(Outputs))
        kinds = [type(message) for rank, message in leader.said if rank == RANKS[0]]
        assert kinds == [Loading, Loading, Loading, Ready, Outputs]
        assert (far.ready, far.state, far.lives, far.pid) == (READY, "ready", 1, 42)


async def test_a_worker_is_told_what_the_leader_says_to_its_rank_alone() -> None:
    async with joined() as rig:
        for worker in rig.workers:
            worker.answers = None
        for room in range(50):
            rig.far.ranks[RANKS[1]].tell(submit(room))
        rig.far.ranks[RANKS[1]].tell(ResumeLocally(room=3))
        await rig.until(lambda: len(rig.workers[1].told) == 51)
        assert rig.workers[1].told == [*map(submit, range(50)), ResumeLocally(room=3)]
        assert rig.workers[0].told == []
        assert rig.node is not None
        assert rig.node.uplink.rooms == 50


async def test_the_death_of_a_far_worker_is_told_once_and_its_next_life_is_seen() -> None:
    async with joined() as rig:
        leader, worker, far = rig.leader, rig.workers[0], rig.far.ranks[RANKS[0]]
        assert leader is not None
        worker.die()
        await rig.until(lambda: leader.of(Lost))
        assert leader.of(Lost) == [Lost(DIED, final=False)]
        await rig.until(lambda: far.state == "waiting")
        assert (far.ready, far.last_problem) == (None, DIED)
        with pytest.raises(PeerLost, match="is waiting, not ready"):
            far.tell(submit())
        worker.lives = 2
        worker.become_ready()
        await rig.until(lambda: far.ready and far.lives == 2)  # told in a message each
        assert rig.far.ranks[RANKS[1]].ready, "the other one has not died"


async def test_a_node_that_is_gone_loses_its_ready_ranks_once_though_they_may_live() -> None:
    async with joined() as rig:
        leader = rig.leader
        assert leader is not None
        await rig.end_node()
        await rig.until(lambda: len(leader.of(Lost)) == 2)
        lost = leader.of(Lost)
        assert {each.is_dead for each in lost} == {False}
        assert lost[0].problem.code == "peer_lost"
        assert "node 1 (10.0.0.2) is absent: its node is gone" in lost[0].problem.message
        assert [rank for rank, _ in leader.said] == RANKS
        assert leader.nodes.health()[0]["state"].startswith("absent: its node is gone")
        rig.start_node(epoch=21)
        await rig.until(lambda: rig.far.is_here)
        assert len(leader.of(Lost)) == 2


async def test_ends_that_say_something_now_and_then_stay_together() -> None:
    async with joined() as rig:
        leader, far, worker = rig.leader, rig.far.ranks[RANKS[0]], rig.workers[0]
        assert leader is not None
        exchanged: list[int] = []

        def is_exchanged() -> bool:
            count = len(exchanged)
            return len(leader.of(Outputs)) == count and len(worker.told) == count

        for room in range(6):
            worker.say(Outputs(items=(Output(room=room, tokens=(1,)),)))
            far.tell(ResumeLocally(room=room))
            exchanged.append(room)
            await rig.until(is_exchanged)
            await rig.time.run_for(1.3)
        assert rig.far.is_here
        assert not leader.of(Lost)


async def test_a_node_that_says_nothing_is_gone_within_two_seconds() -> None:
    """Its connection stands, but its loop is stuck."""
    async with rigged() as rig:
        leader = rig.start_leader()
        net = CurveContext(KEY, "127.0.0.2")
        stuck: Link[ToNode, FromNode] = Link(net.context, TO_NODE, FROM_NODE)
        stuck.dial(net, leader.nodes.join(hello()).endpoint)
        await stuck.on(RankSaid(rank=RANKS[0], message=READY))
        await rig.until(lambda: leader.of(Ready))
        await rig.time.run_for(1.7)
        assert not leader.of(Lost)
        await rig.time.run_for(0.3)
        await rig.until(lambda: leader.of(Lost))
        assert "it says nothing" in leader.of(Lost)[0].problem.message
        stuck.close()
        net.close()


async def test_a_leader_that_says_nothing_is_gone_within_two_seconds() -> None:
    async with rigged() as rig:
        net = CurveContext(KEY, "127.0.0.1")
        guard = asyncio.create_task(net.guard())
        stuck: Link[FromNode, ToNode] = Link(net.context, FROM_NODE, TO_NODE)
        endpoint = stuck.serve(net)
        node = rig.start_node()

        asked: list[str] = []

        async def join() -> NodeWelcome:
            asked.append(node.uplink.absence)
            if len(asked) > 1:
                raise Unavailable("it says nothing here either")
            return NodeWelcome(endpoint=endpoint, epoch=1)

        node.uplink = Uplink("leader x", join, node.net, Time(rig.time.clock, rig.time.sleep))
        node.uplink.serve(node.workers)
        node.task.cancel()
        node.task = asyncio.create_task(node.uplink.run())
        await rig.until(lambda: not node.uplink.absence)
        await rig.time.run_for(1.7)
        assert not node.uplink.absence
        await rig.time.run_for(0.3)
        await rig.until(lambda: len(asked) > 1)
        assert asked[1] == "the leader x is gone: it says nothing"
        guard.cancel()
        stuck.close()
        net.close()


async def test_a_leader_that_is_gone_leaves_no_room_on_the_workers_and_the_next_sees_them() -> None:
    async with joined() as rig:
        for worker in rig.workers:
            worker.answers = None
        for room in (7, 8, 9):
            rig.far.ranks[RANKS[1]].tell(submit(room, n=2))
        resumed = replace(submit(10, n=2), said=(Said(index=1),))  # the other one has ended
        rig.far.ranks[RANKS[1]].tell(resumed)
        worker = rig.workers[1]
        await rig.until(lambda: len(worker.told) == 4)
        worker.say(Outputs(items=(Output(room=10, finish="stop", index=1),)))
        worker.say(Outputs(items=(Output(room=8, finish="stop", index=1),)))
        worker.say(Outputs(items=(Output(room=8, finish="stop"), Output(room=9, finish="stop"))))
        rig.far.ranks[RANKS[1]].tell(AbortRoom(room=9, reason="stop", index=0))  # so say both
        await rig.until(lambda: len(worker.told) == 5)
        worker.told.clear()
        await rig.end_leader()
        await rig.until(lambda: worker.told)
        assert worker.told == [AbortRoom(room=room, reason="leader_lost") for room in (7, 9)]
        assert rig.node is not None
        assert rig.node.uplink.absence
        worker.say(Outputs(items=(Output(room=7, tokens=(1,)),)))  # nobody hears it
        leader = rig.start_leader(epoch=11)
        while not rig.far.is_here:
            await rig.time.run_for(0.1)
        await rig.until(lambda: len(leader.of(Ready)) == 2)
        assert not leader.of(Outputs)
        assert rig.node.uplink.rooms == 0


async def test_what_a_full_worker_was_owed_comes_before_the_next_request() -> None:
    async with joined() as rig:
        far, worker = rig.far.ranks[RANKS[1]], rig.workers[1]
        worker.answers = None
        far.tell(submit(7))
        await rig.until(lambda: worker.told)
        worker.is_full = True
        far.tell(AbortRoom(room=7, reason="client_gone"))
        far.tell(submit(8))
        leader = rig.leader
        assert leader is not None
        await rig.until(lambda: leader.of(Outputs))
        (refused,) = leader.of(Outputs)[0].items
        assert (refused.room, refused.problem.code) == (8, "overloaded")
        worker.is_full = False
        far.tell(submit(9))
        await rig.until(lambda: len(worker.told) == 3)
        assert worker.told[1:] == [AbortRoom(room=7, reason="client_gone"), submit(9)]


async def test_a_worker_that_does_not_read_keeps_no_abort_from_the_others() -> None:
    async with joined() as rig:
        stuck, other = rig.workers
        stuck.is_full = True
        rig.far.ranks[RANKS[0]].tell(AbortRoom(room=7, reason="x"))
        rig.far.ranks[RANKS[1]].tell(AbortRoom(room=8, reason="x"))
        await rig.until(lambda: other.told)
        assert (stuck.told, other.told) == ([], [AbortRoom(room=8, reason="x")])


async def test_what_a_full_worker_was_owed_reaches_it_though_no_leader_comes_again() -> None:
    async with joined() as rig:
        worker, node = rig.workers[1], rig.node
        assert node is not None
        worker.answers = None
        rig.far.ranks[RANKS[1]].tell(submit(7))
        await rig.until(lambda: worker.told)
        worker.is_full = True
        await rig.end_leader()
        await rig.until(lambda: node.uplink.absence)
        worker.is_full = False
        worker.say(Outputs(items=(Output(room=7, tokens=(1,)),)))
        assert worker.told[1:] == [AbortRoom(room=7, reason="leader_lost")]


async def test_a_request_that_crosses_its_workers_death_is_refused() -> None:
    async with joined() as rig:
        rig.workers[1].ready = None  # the leader does not know it yet
        rig.far.ranks[RANKS[1]].tell(submit(8))
        leader = rig.leader
        assert leader is not None
        await rig.until(lambda: leader.of(Outputs))
        (refused,) = leader.of(Outputs)[0].items
        assert (refused.room, refused.problem.code) == (8, "peer_lost")


async def test_the_leaders_own_drain_is_not_the_workers_for_they_serve_the_next_one() -> None:
    async with joined() as rig:
        far, worker = rig.far.ranks[RANKS[1]], rig.workers[1]
        far.tell(Drain())
        far.tell(submit())
        await rig.until(lambda: worker.told)
        assert worker.told == [submit()]


async def test_a_node_leaves_when_the_leader_says_that_nothing_is_on_it() -> None:
    async with joined() as rig:
        node, leader = rig.node, rig.leader
        assert node is not None
        assert leader is not None
        busy = {1}
        leader.nodes.is_idle = lambda dps: not busy & set(dps)
        node.uplink.leave()
        await rig.until(lambda: rig.far.is_leaving)
        far = rig.far.ranks[RANKS[1]]
        assert (far.ready, far.state) == (None, "leaving")
        far.tell(AbortRoom(room=7, reason="x"))  # what is there goes on, or is ended
        leader.nodes.look()
        await rig.until(lambda: rig.workers[1].told)
        assert not node.uplink.is_idle
        busy.clear()
        leader.nodes.look()
        leader.nodes.look()  # said once
        await rig.until(lambda: node.uplink.is_idle)
        await rig.end_node()
        await rig.until(lambda: len(leader.of(Lost)) == 2)
        assert "it has left" in leader.of(Lost)[0].problem.message


async def test_a_wish_to_leave_that_comes_during_the_handshake_is_told_after_it() -> None:
    async with rigged() as rig:
        rig.start_leader()
        node = rig.start_node()
        node.on_join = lambda: asyncio.get_running_loop().call_soon(node.uplink.leave)
        await rig.until(lambda: rig.far.is_leaving)


async def test_a_node_without_a_leader_may_leave_when_it_has_nothing() -> None:
    async with rigged() as rig:
        node = rig.start_node()
        await settle()
        assert node.uplink.is_idle
        node.uplink.leave()
        await rig.time.run_for(1)
        rig.start_leader()
        await rig.time.run_for(1)
        await settle()
        assert node.uplink.is_idle


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"[parallel] tp": "4"}, r"\[parallel\] tp = 4 here, 2 at the leader"),
        ({"role": "prefill"}, "role = prefill here, decode at the leader"),
    ],
)
async def test_a_node_that_does_not_fit_its_leader_says_both_values_and_ends(
    settings: dict[str, str], why: str
) -> None:
    async with rigged() as rig:
        rig.start_leader()
        node = rig.start_node()
        node.settings |= settings
        with pytest.raises(ConfigError, match=why):
            await node.task


def hello(node: int = 1, epoch: int = 20, protocol: int = PROTOCOL) -> NodeHello:
    return NodeHello(
        protocol_version=protocol, node=node, epoch=epoch, http="", settings=dict(SETTINGS)
    )


async def test_who_is_no_node_of_this_leader_is_refused() -> None:
    async with rigged() as rig:
        nodes = rig.start_leader().nodes
        with pytest.raises(BadRequest, match="protocol"):
            nodes.join(hello(protocol=PROTOCOL + 1))
        with pytest.raises(BadRequest, match="node 5"):
            nodes.join(hello(node=5))
        nodes.join(hello(epoch=20))
        nodes.join(hello(epoch=20))  # the same life, once more
        with pytest.raises(Conflict, match="a later life"):
            nodes.join(hello(epoch=19))


async def test_a_node_that_comes_anew_before_it_was_missed_is_lost_first() -> None:
    async with joined() as rig:
        leader, before = rig.leader, rig.node
        assert leader is not None
        assert before is not None
        rig.start_node(epoch=21)
        await rig.until(lambda: len(leader.of(Lost)) == 2)
        await rig.until(lambda: rig.far.is_here)
        assert "it came anew" in leader.of(Lost)[0].problem.message
        await before.end()


async def test_who_was_welcomed_and_does_not_come_is_not_awaited_for_ever() -> None:
    async with rigged() as rig:
        leader = rig.start_leader()
        leader.nodes.join(hello())
        await settle()
        await rig.time.run_for(6)
        assert not rig.far.is_here
        assert leader.said == []
        rig.start_node()
        await rig.until(lambda: rig.far.is_here)


# Where the heads of groups are.


def place(epoch: int) -> GroupPlace:
    return GroupPlace(epoch=epoch, endpoints={"1": f"tcp://10.0.0.1:{epoch}"})


def test_a_head_is_found_where_it_said_last_for_as_long_as_it_says_so() -> None:
    time = FakeTime()
    board = Board(time.clock, dp=2)
    with pytest.raises(NotFound):
        board.find(0)
    board.announce(0, place(1))
    board.announce(1, place(5))
    board.announce(0, place(2))
    assert (board.find(0), board.find(1)) == (place(2), place(5))
    time.now += 1.5
    board.announce(1, place(5))
    time.now += 1
    assert board.find(1) == place(5)
    with pytest.raises(NotFound, match="dp rank 0"):
        board.find(0)


def test_an_earlier_life_of_a_head_does_not_take_the_place_of_a_later_one() -> None:
    time = FakeTime()
    board = Board(time.clock, dp=2)
    board.announce(0, place(2))
    time.now += 100
    with pytest.raises(Conflict, match="epoch 1 is over"):
        board.announce(0, place(1))


def test_the_heads_of_no_other_dp_ranks_are_remembered() -> None:
    board = Board(FakeTime().clock, dp=2)
    with pytest.raises(BadRequest, match="dp rank 2: this instance has 2"):
        board.announce(2, place(1))
