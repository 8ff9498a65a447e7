"""What a worker node has of its leader: the link to it, and what came of that.

The promises: the leader hears all that the node's workers say, in order, and their deaths; what
it had given them is ended when it is gone, so that nothing stays taken; it is looked for until it
is there again, and then learns how each worker is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import structlog

from pdrt import messages
from pdrt.control.bootstrap_client import pauses
from pdrt.control.heartbeat import Time
from pdrt.control.nodelink import accompany, met
from pdrt.control.parts import Handle
from pdrt.control.worker_handle import Lost
from pdrt.curve import CurveContext
from pdrt.errors import BadRequest, ConfigError, Overloaded, PdrtError, PeerLost, Unauthorized
from pdrt.link import Link
from pdrt.messages import (
    AbortRoom,
    Beat,
    Drain,
    FromNode,
    FromWorker,
    Leaving,
    NodeWelcome,
    Output,
    Outputs,
    Problem,
    Rank,
    RankIs,
    RankLost,
    RankSaid,
    Submit,
    ToNode,
    ToWorker,
)

Join: TypeAlias = Callable[[], Awaitable[NodeWelcome]]
LONGEST_PAUSE_S: Final = 0.5  # a leader that comes again is found soon
_LOST: Final = "leader_lost"


class Uplink:
    """Run `run`; `heard` is told what the node's workers say."""

    def __init__(self, leader: str, join: Join, net: CurveContext, time: Time) -> None:
        self._leader, self._join, self._net, self._time = leader, join, net, time
        self._handles: Sequence[Handle] = ()
        self._rooms: dict[Rank, dict[int, set[int]]] = {}  # what the leader gave: sequences to come
        self._owed: list[tuple[Handle, AbortRoom]] = []  # a worker's mailbox was full
        self._told: dict[Rank, RankIs] = {}
        self._link: Link[ToNode, FromNode] | None = None
        self._cut: asyncio.Event = asyncio.Event()
        self._leaving, self._may_leave = asyncio.Event(), False
        self.absence = f"the {leader} has not answered yet"
        self._log = structlog.get_logger()

    def serve(self, handles: Sequence[Handle]) -> None:
        """These are the node's workers; once, before `run`."""
        self._handles = handles
        self._rooms = {handle.rank: {} for handle in handles}

    @property
    def rooms(self) -> int:
        """Requests on our tp 0 ranks."""
        return sum(map(len, self._rooms.values()))

    @property
    def is_idle(self) -> bool:
        """Only the leader knows of requests whose tp 0 is elsewhere."""
        return self._may_leave or (self._link is None and not self.rooms)

    def leave(self) -> None:
        """Tell the leader that we want to go, once nothing is on our workers."""
        self._leaving.set()
        self._say(Leaving())

    # The leader comes and goes.

    async def run(self) -> None:
        """Raises ConfigError when the leader will never have us."""
        while not self._leaving.is_set():
            welcome = await self._welcomed()
            if self._leaving.is_set():
                return
            link: Link[ToNode, FromNode] = Link(
                self._net.context, messages.TO_NODE, messages.FROM_NODE
            )
            try:
                await self._live(link, welcome)
            finally:
                self._drop()
                link.close()

    async def _welcomed(self) -> NodeWelcome:
        for pause in pauses(LONGEST_PAUSE_S):
            try:
                return await self._join()
            except (BadRequest, Unauthorized) as error:
                raise ConfigError(f"the {self._leader} does not take this node: {error}") from error
            except PdrtError as error:
                if str(error) != self.absence:
                    self._log.warning("leader_not_reached", reason=str(error))
                self.absence = str(error)
            await self._time.sleep(pause)
        raise AssertionError("pauses do not end")

    async def _live(self, link: Link[ToNode, FromNode], welcome: NodeWelcome) -> None:
        self._cut = asyncio.Event()
        try:
            link.dial(self._net, welcome.endpoint)
        except OSError as error:
            self.absence = f"the {self._leader} named {error}"
            return
        if not await met(link, self._overfull(), self._time):
            self.absence = f"the {self._leader} did not shake hands at {welcome.endpoint}"
            return
        self._link, self.absence = link, ""
        self._log.info("leader_met", leader=self._leader, epoch=welcome.epoch)
        self._introduce()
        why = await accompany(link, self._hear, self._beat, self._overfull(), self._time)
        self.absence = f"the {self._leader} is gone: {why}"
        self._log.warning("leader_lost", reason=why)

    def _introduce(self) -> None:
        """How each worker is, and that we want to go when that was said to nobody yet."""
        if self._leaving.is_set():
            self._say(Leaving())
        self._told.clear()
        self._see()
        for handle in self._handles:
            if handle.ready is not None:
                self._say(RankSaid(rank=handle.rank, message=handle.ready))
                self._say(RankSaid(rank=handle.rank, message=handle.stats))

    async def _overfull(self) -> str:
        await self._cut.wait()
        return "it does not read"

    def _beat(self) -> None:
        self._see()
        self._pay()
        self._say(Beat())

    def _drop(self) -> None:
        """The leader is gone; nobody wants what it had asked for."""
        self._link = None
        for handle in self._handles:
            for room in self._rooms[handle.rank]:
                self._owed.append((handle, AbortRoom(room=room, reason=_LOST)))
            self._rooms[handle.rank].clear()
        self._pay()

    # From the workers to the leader.

    def heard(self, handle: Handle, message: FromWorker | Lost) -> None:
        match message:
            case Lost(problem):
                self._rooms[handle.rank].clear()
                self._say(RankLost(rank=handle.rank, problem=problem))
            case messages.Outputs(items=items):
                for item in items:
                    self._count(self._rooms[handle.rank], item)
                self._say(RankSaid(rank=handle.rank, message=message))
            case _:
                self._say(RankSaid(rank=handle.rank, message=message))
        self._pay()  # here too, for without a leader nothing beats
        self._see()

    def _count(self, rooms: dict[int, set[int]], item: Output) -> None:
        if item.problem is not None or item.finish == "prefilled":
            self._end(rooms, item.room, -1)
        elif item.finish is not None:
            self._end(rooms, item.room, item.index)

    def _end(self, rooms: dict[int, set[int]], room: int, index: int) -> None:
        """A room is over with the last of its sequences; one may be ended by both sides."""
        left = rooms.get(room, set())
        left.discard(index)
        if index < 0 or not left:
            rooms.pop(room, None)

    def _see(self) -> None:
        """Tell what is new of the workers' states."""
        for handle in self._handles:
            now = RankIs(
                rank=handle.rank,
                state=str(handle.state),
                lives=handle.lives,
                pid=handle.pid,
                last_problem=handle.last_problem,
            )
            if self._told.get(handle.rank) != now:
                self._told[handle.rank] = now
                self._say(now)

    def _say(self, message: FromNode) -> None:
        if self._link is None:
            return  # it hears the state of things when it comes
        try:
            self._link.tell(message)
        except (Overloaded, PeerLost):  # what is left out would never be noticed
            self._cut.set()

    # From the leader to the workers.

    def _hear(self, message: ToNode) -> None:
        match message:
            case messages.TellRank(rank=rank, message=told):
                handle = next((each for each in self._handles if each.rank == rank), None)
                if handle is None:
                    self._log.error("no_such_rank", rank=str(rank))
                else:
                    self._pass_on(handle, told)
            case messages.MayLeave():
                self._may_leave = True
            case messages.Beat():
                pass

    def _pass_on(self, handle: Handle, message: ToWorker) -> None:
        self._pay()  # first what is owed, or it would hit the room's next attempt
        match message:
            case Drain():
                pass  # the leader's own end: our workers serve the next one
            case AbortRoom(room=room, index=index):
                self._end(self._rooms[handle.rank], room, index)
                self._owed.append((handle, message))
                self._pay()
            case _:
                self._try(handle, message)

    def _try(self, handle: Handle, message: ToWorker) -> None:
        try:
            handle.tell(message)
        except (Overloaded, PeerLost) as error:
            if isinstance(message, Submit):
                self._refuse(handle, message, error)
        else:
            if isinstance(message, Submit):
                going = {said.index for said in message.said} or set(range(message.sampling.n))
                self._rooms[handle.rank][message.room] = going

    def _refuse(self, handle: Handle, submit: Submit, error: PdrtError) -> None:
        problem = Problem.of(error, "node")
        output = Output(room=submit.room, problem=problem, attempt=submit.attempt)
        self._say(RankSaid(rank=handle.rank, message=Outputs(items=(output,))))

    def _pay(self) -> None:
        """A worker that does not read keeps nobody else's from them."""
        self._owed = [owed for owed in self._owed if not _is_paid(*owed)]


def _is_paid(handle: Handle, message: AbortRoom) -> bool:
    try:
        handle.tell(message)
    except PeerLost:
        return True  # its rooms died with it
    except Overloaded:
        return False
    return True
