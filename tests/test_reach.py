"""Ranks of a group on several nodes find each other at their leader, and compute together."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from structlog.testing import capture_logs

from pdrt import reach
from pdrt.config import NodeConfig
from pdrt.control.http import error_middleware, listen
from pdrt.control.leader_client import GROUP_PATH
from pdrt.control.nodes import Board, Nodes
from pdrt.control.nodes_http import add_routes
from pdrt.device.backends import Progress, open_runner
from pdrt.device.batch import Runner
from pdrt.device.places import Rendezvous, TcpPlace
from pdrt.errors import NotFound, PeerLost, first_of
from pdrt.members import Members
from pdrt.messages import GroupPlace, Loading, Rank, Ready
from pdrt.spawn import WorkerSpec
from tests.e2e.colocated import Colocated
from tests.fake_time import FakeTime
from tests.test_worker import made_spec, submit
from tests.test_worker_group import Device, member


class Leader:
    """Only what heads of groups and their followers ask of it."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.board = Board(self.time.clock, dp=1)
        self.url = ""

    def spec(self, folder: Path, tp: int, epoch: int = 7, role: str = "hybrid") -> WorkerSpec:
        """Each rank is on a node of its own."""
        ips = ["127.0.0.1", "127.0.0.2"]
        parallel = {"world_size": 2, "tp": 2, "ips": ips}
        made = made_spec(f"ipc://{folder}/w{tp}", role, parallel=parallel)  # type: ignore[arg-type]
        told: dict[str, Any] = {"rank": Rank(tp=tp), "node": tp, "leader": self.url, "epoch": epoch}
        here = made.disagg.model_copy(update={"local_ip": ips[tp]})
        return made.model_copy(update={**told, "disagg": here})


@asynccontextmanager
async def leading() -> AsyncIterator[Leader]:
    leader = Leader()
    app = web.Application(middlewares=[error_middleware("test")])
    add_routes(app, Nodes({}, {}, 1), leader.board)
    runner, port = await listen(app, "127.0.0.1", 0)
    leader.url = f"http://127.0.0.1:{port}"
    yield leader
    await runner.cleanup()


class Real(Device):
    """A null device with its shard, which meets the others for real."""

    def load(self, config: NodeConfig, progress: Progress, rank: int, size: int) -> Runner:
        return open_runner(config, progress, rank, size)


@pytest.fixture(autouse=True, scope="module")
def _sockets_end_here() -> Iterator[None]:
    """Those of a group's sums end with their process, which here goes on to other tests."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.unfreeze()  # a worker that is ready keeps all there is
        gc.collect()


async def test_a_group_of_two_nodes_answers_as_one_rank_does(tmp_path: Path) -> None:
    """The follower comes first, and says what it waits for."""
    async with leading() as leader, AsyncExitStack() as stack:
        far = await member(stack, leader.spec(tmp_path, 1), Real())
        while (await far.until(Loading)).stage != "waiting for tp 0":
            pass
        head = await member(stack, leader.spec(tmp_path, 0), Real())
        await far.until(Ready)
        await head.until(Ready)
        await head.tell(submit(7, max_tokens=5, prompt=[1, 2, 3]))
        tokens = [token for output in await head.outputs() for token in output.tokens]
        sampling = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert tokens == Colocated().answer([1, 2, 3], sampling)[: len(tokens)]
        far.task.cancel()
        await asyncio.gather(far.task, return_exceptions=True)
        assert "0,0,1 of our group is gone" in await head.end()


class Unjoined(Device):
    """Meets nobody, and the others only once it is allowed to."""

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        assert isinstance(rendezvous, TcpPlace)
        if rendezvous.door is not None:
            rendezvous.door.close()
        self.may_join.wait()


async def test_a_far_follower_that_has_come_and_does_not_join_is_not_awaited_for_ever(
    tmp_path: Path,
) -> None:
    async with leading() as leader, AsyncExitStack() as stack:
        stuck, made = Unjoined(), leader.spec(tmp_path, 0)
        stuck.may_join.clear()
        stack.callback(stuck.may_join.set)
        await member(stack, leader.spec(tmp_path, 1), stuck)
        timeouts = made.config.timeouts.model_copy(update={"startup_s": 0.5})
        config = made.config.model_copy(update={"timeouts": timeouts})
        head = await member(stack, made.model_copy(update={"config": config}), Unjoined())
        assert "worker 0,0,1 of our group did not come within 0.5 s" in await head.end()


async def test_a_follower_ends_when_its_far_tp_0_does(tmp_path: Path) -> None:
    async with leading() as leader, AsyncExitStack() as stack:
        head = await member(stack, leader.spec(tmp_path, 0), Real())
        far = await member(stack, leader.spec(tmp_path, 1), Real())
        await far.until(Ready)
        head.task.cancel()
        await asyncio.gather(head.task, return_exceptions=True)
        assert "tp 0 of our group is gone" in await far.end()


async def test_a_follower_is_at_last_at_the_present_life_of_its_tp_0(tmp_path: Path) -> None:
    """What an earlier one had announced leads nowhere any more."""
    async with leading() as leader:
        made = leader.spec(tmp_path, 0, epoch=8)
        closed = "tcp://127.0.0.1:9"
        leader.board.announce(0, GroupPlace(epoch=7, endpoints={"1": closed}))
        net = reach.net_of(leader.spec(tmp_path, 1))
        sleep = _Turns()
        looking = asyncio.create_task(reach.reach(leader.spec(tmp_path, 1), net, sleep))
        members = Members(made, asyncio.Event())
        members.bind()
        running = asyncio.create_task(members.run())
        head = await looking
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        head.close()
        members.close()
        net.close()


class _Turns:
    """Sleeps no longer than it takes others to have their turn."""

    async def __call__(self, _seconds: float) -> None:
        await asyncio.sleep(0.001)


async def test_a_life_of_tp_0_that_is_over_ends_instead_of_being_believed(tmp_path: Path) -> None:
    async with leading() as leader:
        leader.board.announce(0, GroupPlace(epoch=9, endpoints={}))
        with pytest.raises(PeerLost, match="worker 0,0,0 has another life"):
            await reach.announce(leader.spec(tmp_path, 0, epoch=8), {1: "tcp://127.0.0.1:9"})


async def test_tp_0_announces_until_all_of_other_nodes_have_come(tmp_path: Path) -> None:
    async with leading() as leader:
        fake = FakeTime()
        members = Members(leader.spec(tmp_path, 0), asyncio.Event(), fake.clock, fake.sleep)
        members.bind()
        running = asyncio.create_task(members.run())
        net = reach.net_of(leader.spec(tmp_path, 1))
        head = await reach.reach(leader.spec(tmp_path, 1), net, _Turns())
        assert leader.board.find(0).epoch == 7
        head.close()
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.gather(running, fake.run_for(1))
        assert "0,0,1 of our group is gone" in str(first_of(caught.value))
        members.close()
        net.close()


def has_announced(board: Board) -> bool:
    try:
        board.find(0)
    except NotFound:
        return False
    return True


async def test_a_tp_0_that_ends_has_ended_its_announcing(tmp_path: Path) -> None:
    async with leading() as leader:
        members = Members(leader.spec(tmp_path, 0), asyncio.Event())
        members.bind()
        before = asyncio.all_tasks()
        running = asyncio.create_task(members.run())
        while not has_announced(leader.board):
            await asyncio.sleep(0.001)
        ours = {task for task in asyncio.all_tasks() - before if "announce" in repr(task)}
        assert ours
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert all(task.done() for task in ours)
        members.close()


async def test_trouble_with_the_leader_is_told_once_and_passes(tmp_path: Path) -> None:
    async with leading() as leader:
        made = leader.spec(tmp_path, 0)
        nowhere = made.model_copy(update={"leader": "http://127.0.0.1:9"})
        tries = asyncio.Semaphore(0)

        async def sleep(_seconds: float) -> None:
            tries.release()
            await asyncio.sleep(0)

        with capture_logs() as logs:
            telling = asyncio.create_task(reach.announce(nowhere, {1: "tcp://127.0.0.1:9"}, sleep))
            for _ in range(3):
                await tries.acquire()
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        assert [line["event"] for line in logs] == ["leader_not_reached"]
        assert "Connection refused" in logs[0]["reason"]


@pytest.mark.parametrize("dp", ["x", "-1", "123456789"])
async def test_a_dp_rank_that_is_no_number_is_refused(dp: str) -> None:
    async with (
        leading() as leader,
        ClientSession() as session,
        session.get(f"{leader.url}{GROUP_PATH}/{dp}") as answer,
    ):
        assert answer.status == 400
