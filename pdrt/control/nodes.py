"""The other nodes of a leader's instance: each has a link, and its ranks are handles like our own.

The promises: a rank of a node that is gone is told lost, once, and within 2 s; what is told to a
rank that is not ready raises PeerLost; a node that comes again is met anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeAlias

import structlog

from pdrt import messages
from pdrt.control.heartbeat import Time
from pdrt.control.http import Json
from pdrt.control.nodelink import accompany, met
from pdrt.control.worker_handle import Lost
from pdrt.curve import CurveContext
from pdrt.errors import BadRequest, Conflict, NotFound, Overloaded, PeerLost
from pdrt.link import Link
from pdrt.messages import (
    PROTOCOL,
    Beat,
    FromNode,
    FromWorker,
    GroupPlace,
    Loading,
    MayLeave,
    NodeHello,
    NodeWelcome,
    Problem,
    Rank,
    Ready,
    Stats,
    TellRank,
    ToNode,
    ToWorker,
)

Heard: TypeAlias = Callable[["FarRank", "FromWorker | Lost"], None]
IsIdle: TypeAlias = Callable[[Iterable[int]], bool]
_BELIEVED_S: Final = 2.0  # an announcement that is not said again


class FarRank:
    """A worker of another node; implements Handle."""

    def __init__(self, rank: Rank, node: FarNode, time: Time) -> None:
        self.rank, self.node, self._time = rank, node, time
        self.said_ready: Ready | None = None
        self.stats, self.stats_at = Stats(), time.clock()
        self.loading: Loading | None = None
        self.lives = 0
        self.pid: int | None = None
        self.last_problem: Problem | None = None
        self.told_state = ""
        self._stopping = asyncio.Event()

    @property
    def name(self) -> str:
        return f"worker {self.rank} of {self.node.name}"

    @property
    def state(self) -> str:
        if self.node.is_leaving and not self.node.absence:
            return "leaving"
        return self.node.absence or self.told_state or "starting"

    @property
    def ready(self) -> Ready | None:
        """None as well when its node wants to go: it gets nothing new."""
        return None if self.node.is_leaving else self.said_ready

    def tell(self, message: ToWorker) -> None:
        if self.said_ready is None:
            raise PeerLost(f"{self.name} is {self.state}, not ready")
        self.node.tell(TellRank(rank=self.rank, message=message))

    def stop(self) -> None:
        """Its own node ends it; we only leave."""
        self._stopping.set()

    async def run(self) -> None:
        await self._stopping.wait()

    # For its node.

    def hear(self, message: FromWorker) -> None:
        match message:
            case messages.Ready():
                self.said_ready = message
                self.stats_at = self._time.clock()
            case messages.Loading():
                self.loading = message
            case messages.Stats():
                self.stats, self.stats_at = message, self._time.clock()
            case messages.Fatal() | messages.Outputs() | messages.AskPrefill():
                pass

    def see(self, told: messages.RankIs) -> None:
        self.told_state, self.lives, self.pid = told.state, told.lives, told.pid
        self.last_problem = told.last_problem or self.last_problem

    def lose(self, problem: Problem) -> bool:
        """Whether it was ready."""
        was_ready = self.said_ready is not None
        self.said_ready = self.loading = self.pid = None
        self.stats, self.last_problem = Stats(), problem
        return was_ready


class FarNode:
    """Run `run`; whoever is welcomed by `admit` is talked with there."""

    def __init__(
        self, number: int, address: str, ranks: Iterable[Rank], net: CurveContext, time: Time
    ) -> None:
        self.name = f"node {number} ({address})"
        self.http = ""
        self.ranks = {rank: FarRank(rank, self, time) for rank in ranks}
        self.absence = "absent: its node has not come"
        self.is_leaving = False
        self.heard: Heard
        self._net, self._time = net, time
        self._epoch = -1
        self._link: Link[FromNode, ToNode] | None = None
        self._next: Link[FromNode, ToNode] | None = None
        self._came = asyncio.Event()
        self._may_leave = False
        self._log = structlog.get_logger().bind(node=self.name)

    @property
    def is_here(self) -> bool:
        return self._link is not None

    def admit(self, hello: NodeHello) -> str:
        """Where its next link is. Raises Conflict for a life that is over, OSError for no port."""
        if hello.epoch < self._epoch:
            raise Conflict(f"{self.name} has a later life than the one that asks")
        link: Link[FromNode, ToNode] = Link(self._net.context, messages.FROM_NODE, messages.TO_NODE)
        try:
            endpoint = link.serve(self._net)
        except OSError:
            link.close()
            raise
        if self._next is not None:
            self._next.close()
        self._next, self._epoch, self.http = link, hello.epoch, hello.http
        self._came.set()
        return endpoint

    def tell(self, message: ToNode) -> None:
        """Raises PeerLost or Overloaded."""
        if self._link is None:
            raise PeerLost(f"{self.name} is not here")
        self._link.tell(message)

    def let_go(self) -> None:
        """It may leave; said once."""
        if self._link is not None and not self._may_leave:
            self._link.tell(MayLeave())
            self._may_leave = True

    async def run(self) -> NoReturn:
        """One link after the other. Cancel it to stop."""
        try:
            while True:
                await self._came.wait()
                await self._live(self._taken())
        finally:
            if self._next is not None:
                self._next.close()

    def _taken(self) -> Link[FromNode, ToNode]:
        link, self._next = self._next, None
        self._came.clear()
        assert link is not None, "who has come has a link"
        return link

    async def _live(self, link: Link[FromNode, ToNode]) -> None:
        try:
            if not await met(link, self._replaced(), self._time):
                self._log.warning("node_did_not_come")
                return
            self._link, self.absence = link, ""
            self.is_leaving = self._may_leave = False
            self._log.info("node_came", http=self.http)
            why = await accompany(link, self._hear, self._beat, self._replaced(), self._time)
            self._gone(why)
        finally:
            self._link = None
            link.close()

    async def _replaced(self) -> str:
        await self._came.wait()
        return "it came anew"

    def _beat(self) -> None:
        self.tell(Beat())

    def _hear(self, message: FromNode) -> None:
        match message:
            case messages.RankSaid(rank=rank, message=said):
                if far := self._rank(rank):
                    far.hear(said)
                    self.heard(far, said)
            case messages.RankIs(rank=rank):
                if far := self._rank(rank):
                    far.see(message)
            case messages.RankLost(rank=rank, problem=problem):
                if far := self._rank(rank):
                    far.lose(problem)
                    self.heard(far, Lost(problem, final=False))
            case messages.Leaving():
                self._log.info("node_leaves")
                self.is_leaving = True
            case messages.Beat():
                pass

    def _rank(self, rank: Rank) -> FarRank | None:
        found = self.ranks.get(rank)
        if found is None:
            self._log.error("no_such_rank", rank=str(rank))
        return found

    def _gone(self, why: str) -> None:
        """Its ranks are lost to us, whether they live or not."""
        why = "it has left" if self._may_leave else why
        self.absence = f"absent: its node is gone: {why}"
        self._link = None
        self._log.warning("node_gone", reason=why)
        for far in self.ranks.values():
            problem = Problem(code=PeerLost.code, message=f"{far.name} is {self.absence}")
            if far.lose(problem):
                self.heard(far, Lost(problem, final=False, is_dead=False))


@dataclass(slots=True)
class _Announced:
    place: GroupPlace
    until: float


@dataclass(slots=True)
class Board:
    """Where the heads of groups that span nodes announce themselves, one of each dp rank."""

    clock: Callable[[], float]
    dp: int
    _places: dict[int, _Announced] = field(default_factory=dict)

    def announce(self, dp: int, place: GroupPlace) -> None:
        """Raises BadRequest for no dp rank of ours, Conflict for an earlier life than the last."""
        if dp not in range(self.dp):
            raise BadRequest(f"dp rank {dp}: this instance has {self.dp}")
        known = self._places.get(dp)
        if known is not None and place.epoch < known.place.epoch:
            raise Conflict(f"tp 0 of dp rank {dp}: epoch {place.epoch} is over")
        self._places[dp] = _Announced(place, self.clock() + _BELIEVED_S)

    def find(self, dp: int) -> GroupPlace:
        """Raises NotFound when there is none that was said of late."""
        known = self._places.get(dp)
        if known is None or known.until < self.clock():
            raise NotFound(f"tp 0 of dp rank {dp} has not announced itself")
        return known.place


class Nodes:
    """All other nodes of an instance, as its leader has them."""

    def __init__(
        self, nodes: Mapping[int, FarNode], settings: Mapping[str, str], epoch: int
    ) -> None:
        self._nodes, self._settings, self._epoch = nodes, settings, epoch
        self.is_idle: IsIdle = lambda _dps: True

    def rank(self, rank: Rank) -> FarRank:
        return next(node.ranks[rank] for node in self._nodes.values() if rank in node.ranks)

    def hear(self, heard: Heard) -> None:
        for node in self._nodes.values():
            node.heard = heard

    async def run(self, net: CurveContext) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(net.guard())
            for node in self._nodes.values():
                tasks.create_task(node.run())

    def join(self, hello: NodeHello) -> NodeWelcome:
        """Raises BadRequest for a node that does not fit, Conflict for one that is over."""
        if hello.protocol_version != PROTOCOL:
            raise BadRequest(f"protocol: {PROTOCOL} at the leader, {hello.protocol_version} here")
        if different := _differences(self._settings, hello.settings):
            raise BadRequest(f"node {hello.node} does not fit its leader: {'; '.join(different)}")
        node = self._nodes.get(hello.node)
        if node is None:
            raise BadRequest(f"node {hello.node}: the leader's other nodes are {[*self._nodes]}")
        return NodeWelcome(endpoint=node.admit(hello), epoch=self._epoch)

    def look(self) -> None:
        """Let those go that want to and have nothing more to do. Call it on a timer."""
        for node in self._nodes.values():
            if node.is_leaving and self.is_idle({rank.dp for rank in node.ranks}):
                with contextlib.suppress(Overloaded, PeerLost):  # next time, if it is there then
                    node.let_go()

    def health(self) -> Sequence[Json]:
        return [
            {
                "node": node.name,
                "http": node.http,
                "state": node.absence or ("leaving" if node.is_leaving else "here"),
                "ranks": [str(rank) for rank in node.ranks],
            }
            for node in self._nodes.values()
        ]


def _differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    return [
        f"{name} = {there.get(name)} here, {value} at the leader"
        for name, value in here.items()
        if there.get(name) != value
    ]
