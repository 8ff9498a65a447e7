"""A leader and one of its other nodes, joined by a real link; the workers are no processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pdrt.control.heartbeat import Time
from pdrt.control.nodes import FarNode, FarRank, Nodes
from pdrt.control.parts import Handle
from pdrt.control.uplink import Uplink
from pdrt.control.worker_handle import Lost
from pdrt.curve import CurveContext
from pdrt.errors import Unavailable
from pdrt.keys import ClusterKey
from pdrt.messages import FromWorker, NodeHello, NodeWelcome, Rank
from tests.fake_time import FakeTime
from tests.fake_worker import FakeWorker

KEY = ClusterKey(b"the key of a test cluster")
SETTINGS = {"role": "decode", "[parallel] tp": "2"}
RANKS = [Rank(tp=1), Rank(dp=1)]


class Leader:
    """One life of it: its side of the links, and what it hears."""

    def __init__(self, fake: FakeTime, epoch: int) -> None:
        self.net = CurveContext(KEY, "127.0.0.1")
        self.node = FarNode(1, "10.0.0.2", RANKS, self.net, Time(fake.clock, fake.sleep))
        self.nodes = Nodes({1: self.node}, SETTINGS, epoch)
        self.said: list[tuple[Rank, FromWorker | Lost]] = []
        self.news = asyncio.Event()
        self.nodes.hear(self._heard)
        self.task = asyncio.create_task(self.nodes.run(self.net))

    def _heard(self, rank: FarRank, message: FromWorker | Lost) -> None:
        self.said.append((rank.rank, message))
        self.news.set()

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.said if isinstance(message, kind)]

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.net.close()


class Node:
    """The other node: an uplink, and its workers."""

    def __init__(self, rig: Rig, epoch: int) -> None:
        self.rig, self.epoch = rig, epoch
        self.settings = dict(SETTINGS)
        self.on_join: Callable[[], object] = lambda: None
        self.net = CurveContext(KEY, "127.0.0.2")
        own_time = Time(rig.time.clock, rig.time.sleep)
        self.uplink = Uplink("leader 10.0.0.1:8100", self.join, self.net, own_time)
        self.workers = [FakeWorker(r, _unused, Path(), self._heard, own_time) for r in RANKS]
        self.uplink.serve(self.workers)
        self.task = asyncio.create_task(self.uplink.run())

    async def join(self) -> NodeWelcome:
        if self.rig.leader is None:
            raise Unavailable("the leader cannot be reached")
        self.on_join()
        hello = NodeHello(node=1, epoch=self.epoch, http="http://x", settings=self.settings)
        return self.rig.leader.nodes.join(hello)

    def _heard(self, handle: Handle, message: FromWorker | Lost) -> None:
        self.uplink.heard(handle, message)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.net.close()


def _unused(_endpoint: str) -> Any:
    raise AssertionError


class Rig:
    def __init__(self) -> None:
        self.time = FakeTime()
        self.leader: Leader | None = None
        self.node: Node | None = None

    @property
    def far(self) -> FarNode:
        assert self.leader is not None
        return self.leader.node

    @property
    def workers(self) -> Sequence[FakeWorker]:
        assert self.node is not None
        return self.node.workers

    def start_leader(self, epoch: int = 10) -> Leader:
        self.leader = Leader(self.time, epoch)
        return self.leader

    def start_node(self, epoch: int = 20) -> Node:
        self.node = Node(self, epoch)
        return self.node

    async def until(self, holds: Callable[[], object]) -> None:
        """What goes through sockets takes turns of the loop; time stands still meanwhile."""
        while not holds():
            await asyncio.sleep(0.001)

    async def until_joined(self) -> None:
        await self.until(lambda: self.far.is_here and self.node and not self.node.uplink.absence)

    async def end_leader(self) -> None:
        if self.leader is not None:
            await self.leader.end()
            self.leader = None

    async def end_node(self) -> None:
        if self.node is not None:
            await self.node.end()
            self.node = None


@asynccontextmanager
async def rigged() -> AsyncIterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        await rig.end_node()
        await rig.end_leader()


@asynccontextmanager
async def joined() -> AsyncIterator[Rig]:
    """With workers that are ready, and known to be."""
    async with rigged() as rig:
        leader = rig.start_leader()
        rig.start_node()
        await rig.until_joined()
        for worker in rig.workers:
            worker.become_ready()
        ranks = rig.far.ranks.values()
        await rig.until(lambda: all(rank.ready for rank in ranks))
        leader.said.clear()
        yield rig
