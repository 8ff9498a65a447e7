"""The life of a node: what follows from what its workers, its operators and the clock say.

One actor: all of that comes into its mailbox, and the node's state is a table that only `_step`
moves. It owns the workers: when `run` returns, however it does, none of them is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import structlog

from pdrt import messages
from pdrt.actor import Actor
from pdrt.config import TimeoutsSection
from pdrt.control.heartbeat import Time
from pdrt.control.lives import (
    NODE,
    AllLoaded,
    AllRegistered,
    Bound,
    DrainAsked,
    Drained,
    GaveUp,
    NodeState,
    WorkerGone,
)
from pdrt.control.parts import Handle, Parts
from pdrt.control.worker_handle import Lost
from pdrt.errors import Draining, NotFound, Overloaded, PdrtError, PeerLost
from pdrt.messages import FromWorker, Problem

_TICK_S: Final = 0.05
_SLICE: Final = 8
_MAILS: Final = 65536
_PROOF_S: Final = 1.0  # between self-tests that fail


@dataclass(frozen=True, slots=True)
class Said:
    """A worker said this, or its process ended."""

    handle: Handle
    message: FromWorker | Lost


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: look whether what the node waits for has come."""


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """Asked for by an operator, as often as he likes."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """SIGTERM or SIGINT came; the second one hurries."""


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The drain has lasted long enough."""


@dataclass(frozen=True, slots=True)
class TooLate:
    """The start-up deadline passed."""


Mail: TypeAlias = Said | Tick | DrainWanted | Signalled | GraceOver | TooLate


class Supervisor(Actor[Mail]):
    """`run` it once all addresses are taken; it returns when the node is over."""

    def __init__(
        self,
        parts: Parts,
        timeouts: TimeoutsSection,
        time: Time,
        wall: Callable[[], float],
        loop_delay: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        super().__init__(f"node {parts.role}", _MAILS)
        self._parts, self._timeouts, self._time, self._wall = parts, timeouts, time, wall
        self._work, self._condition = parts.work, parts.condition
        self._loop_delay = loop_delay
        self._log = structlog.get_logger()
        self._told_loading: dict[str, tuple[str, int]] = {}  # by rank
        self._all_ended = asyncio.Event()
        self._group: asyncio.TaskGroup
        self._living: set[asyncio.Task[None]] = set()
        self._workers: list[asyncio.Task[None]] = []
        self._proof: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._step(Bound())
        async with asyncio.TaskGroup() as self._group:
            self._workers = [self._task(handle.run()) for handle in self._parts.handles]
            self._start(super().run())
            self._start(self._tick())
            self._start(self._after(self._timeouts.startup_s, TooLate()))
            await self._all_ended.wait()
            for task in self._living:
                task.cancel()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        _ = self._task(coroutine)

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """It ends with the node at the latest; what it raises ends the node."""
        task = self._group.create_task(coroutine)
        self._living.add(task)
        task.add_done_callback(self._living.discard)
        return task

    # What comes in.

    async def on(self, message: Mail) -> None:
        is_draining = self._condition.state is NodeState.DRAINING
        match message:
            case Said(handle, messages.Outputs(items=items)):
                await self._deliver(handle, items)
            case Said(handle, said):
                self._said(handle, said)
            case Tick():
                self._look()
            case Signalled() | GraceOver() if is_draining:
                self._cut_short()
            case DrainWanted() | Signalled():
                self._drain()
            case GraceOver():
                pass
            case TooLate():
                if not self._condition.has_been_ready:
                    self._give_up(f"not ready after {self._timeouts.startup_s:g} s")

    async def _deliver(self, handle: Handle, items: Sequence[messages.Output]) -> None:
        """A step's outputs, a few at a time: each wakes a task, and all at once hold the loop."""
        for begin in range(0, len(items), _SLICE):
            part = tuple(items[begin : begin + _SLICE])
            self._work.deliver(handle.rank.dp, messages.Outputs(items=part))
            for item in part:
                is_end = item.finish or item.problem
                if is_end and not self._work.is_in_flight(item.room):
                    self._parts.side.ended(item.room, item.attempt)
            if begin + _SLICE < len(items):
                await asyncio.sleep(0)

    def _said(self, handle: Handle, said: FromWorker | Lost) -> None:
        match said:
            case messages.AskPrefill():
                self._start(self._prefill_again(said))
            case messages.Loading():
                self._tell_loading(handle, said)
            case messages.Ready(blocks=blocks, endpoint=endpoint):
                rank = str(handle.rank)
                self._log.info("worker_ready", worker=rank, blocks=blocks, endpoint=endpoint)
                self._look()
            case Lost():
                self._lost(handle, said)
            case messages.Stats() | messages.Fatal() | messages.Outputs():
                pass

    def _tell_loading(self, handle: Handle, loading: messages.Loading) -> None:
        """A line for each new stage and each tenth of it."""
        tenth = loading.stage, 10 * loading.done // max(loading.total, 1)
        rank = str(handle.rank)
        if self._told_loading.get(rank) != tenth:
            self._told_loading[rank] = tenth
            self._log.info(
                "loading",
                worker=rank,
                stage=loading.stage,
                done=loading.done,
                total=loading.total,
            )

    def _lost(self, handle: Handle, lost: Lost) -> None:
        """Its group is over too: the requests do not wait until the others have ended."""
        self._condition.faulted(self._wall())
        rank = handle.rank  # tp 0 may live on, when only the way to another node's rank is lost
        self._work.worker_lost(rank.dp, lost.problem, is_head_alive=not rank.is_head)
        self._parts.side.lost(rank, lost.is_dead)
        self._step(WorkerGone())
        if lost.final:
            self._give_up(f"worker {handle.rank} cannot be kept alive: {lost.problem.message}")

    async def _prefill_again(self, wanted: messages.AskPrefill) -> None:
        try:
            await self._parts.side.prefill_again(wanted)
        except PdrtError as error:
            self._log.warning("reprefill_failed", room=wanted.room, reason=str(error))
            self._resume_locally(wanted)

    def _resume_locally(self, wanted: messages.AskPrefill) -> None:
        try:
            self._work.resume_locally(wanted.room, wanted.of_room)
        except (NotFound, PeerLost):
            return  # it has ended meanwhile
        except Overloaded as error:  # it must not wait for what will never come
            room = wanted.room if wanted.of_room < 0 else wanted.of_room
            self._work.abort(room, str(error))

    # What follows.

    def _step(self, event: object) -> bool:
        """Whether this changed anything."""
        before = self._condition.state
        after, _ = NODE.step(before, self._condition, event)
        if after is before:
            return False
        self._condition.state = after
        self._log.info("node", state=str(after), was=str(before))
        return True

    def _look(self) -> None:
        """Move on when what the node waits for has come."""
        self._work.catch_up()
        self._parts.others.look()
        condition = self._condition
        if condition.state is NodeState.LOADING and all(h.ready for h in self._parts.handles):
            self._step(AllLoaded())
        if condition.state is NodeState.REGISTERING and not self._parts.side.missing():
            self._step(AllRegistered())
            condition.has_been_ready = True
            prove = self._parts.prove
            if prove is not None and (self._proof is None or self._proof.done()):
                self._proof = self._task(self._prove(prove))
        if condition.state is NodeState.DRAINING and self._work.is_idle:
            self._end(Drained())

    def _drain(self) -> None:
        """No new work; end when what is running has finished, or when the grace is over."""
        if self._step(DrainAsked()):
            self._condition.leaving.set()
            self._work.drain()
            self._start(self._after(self._timeouts.drain_s, GraceOver()))

    def _cut_short(self) -> None:
        self._log.warning("drain_cut_short", rooms=self._work.rooms)
        self._end(Drained())

    def _give_up(self, why: str) -> None:
        absent = [f"{h.name} is {h.state}" for h in self._parts.handles if not h.ready]
        self._condition.reason = "; ".join([why, *absent, *self._parts.side.missing()])
        self._end(GaveUp(self._condition.reason))

    def _end(self, event: Drained | GaveUp) -> None:
        if not self._step(event):
            return
        self._condition.leaving.set()
        self._work.drain()
        why = event.reason if isinstance(event, GaveUp) else "this instance stops"
        problem = Problem(code=Draining.code, message=why[:8000], stage="node")
        for handle in self._parts.handles:
            self._work.worker_lost(handle.rank.dp, problem)  # clients are told, not cut off
            handle.stop()
        self._start(self._until_workers_ended())

    async def _until_workers_ended(self) -> None:
        await asyncio.wait(self._workers)
        self._all_ended.set()

    async def _tick(self) -> NoReturn:
        """The loop turns, and how late it does is how long it keeps everybody waiting."""
        while True:
            now = self._time.clock()
            self._condition.turned_at = now
            self.tell(Tick())
            await self._time.sleep(_TICK_S)
            self._loop_delay(self._time.clock() - now - _TICK_S)

    async def _after(self, seconds: float, mail: Mail) -> None:
        await self._time.sleep(seconds)
        self.tell(mail)

    async def _prove(self, prove: Callable[[], Awaitable[str]]) -> None:
        """Alone, nobody else finds out whether a request would succeed. Until one has."""
        while self._condition.state is NodeState.READY and not self._condition.served_since_fault:
            if not (reason := await prove()):
                self._condition.served()
                return
            self._log.warning("self_test_failed", reason=reason)
            await self._time.sleep(_PROOF_S)
