"""The shell of a device-worker process: it alone joins scheduler, transfers and device.

One event loop answers the supervisor and the peers; the device runs in a thread of its own, so
that a long forward delays nobody's ping. Everything that happens becomes an event for the
scheduler; what the scheduler decides comes back as effects and is carried out here. In a group
this is tp 0 of cp 0, and its steps and transfers are those of its followers too (see `members`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import setproctitle
import structlog
import uvloop
import zmq.asyncio

from pdrt import footprint, messages, parts, telemetry
from pdrt.config import process_environ
from pdrt.data.events import TransferEvent
from pdrt.device.backends import open_runner
from pdrt.device.batch import Drawn
from pdrt.devicethread import Load
from pdrt.errors import BadMessage, Overloaded, PdrtError, first_of
from pdrt.follower import Follower
from pdrt.foyer import Foyer
from pdrt.life import Life
from pdrt.link import Link
from pdrt.members import GroupTransfers, Members
from pdrt.messages import FromWorker, Output, Outputs, Problem, ToWorker
from pdrt.openfiles import allow_all
from pdrt.sched.effects import Say
from pdrt.sched.events import Cancelled, Rebound, ResumeLocally, Stopped
from pdrt.sched.plan import Plan
from pdrt.spawn import WorkerSpec, read_spec

_LOG_S: Final = 1.0
_CONFESS_S: Final = 1.0
_SCORED_BYTES: Final = messages.MAX_MESSAGE_BYTES // 4  # of prompts' odds in one message


class Worker:
    """One life of a device worker with a scheduler, from its spec to its end."""

    def __init__(
        self,
        spec: WorkerSpec,
        link: Link[ToWorker, FromWorker],
        load: Load = open_runner,
        make_transfers: parts.MakeTransfers = parts.transfers,
    ) -> None:
        self._spec, self._link = spec, link
        self._life = Life(spec, link, load, make_transfers)
        self._device, self._stop = self._life.device, self._life.stopping
        self._wake = asyncio.Event()
        self._step_s, self._tokens = 0.0, 0
        self._log = structlog.get_logger()
        self._sched: parts.AnyScheduler
        self._transfers: parts.Transfers | None = None
        self._members = Members(spec, self._stop) if spec.followers else None
        self._foyer = Foyer(self._device.prepare, self._act, self._refuse)

    async def run(self) -> None:
        """Until the supervisor says stop. Raises what the worker cannot go on with."""
        members = self._members
        if members is None:
            await self._life.run(self._work, self._listen())
            return
        try:
            members.bind()
            await self._life.run(self._work, self._listen(), members.run())
        finally:
            members.close()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        device, members, life = self._device, self._members, self._life
        await device.load()
        await device.read_vocabulary()
        blocks, copies = device.memory.blocks, device.spare.blocks
        self._sched = parts.scheduler(self._spec, device.runner, blocks, copies)
        await life.open_transfers(tasks)
        self._transfers = own = life.transfers
        if own is not None and members is not None:
            self._transfers = GroupTransfers(
                own, members, self._spec.config.parallel, life.wake.set
            )
        if self._transfers is not None:
            tasks.create_task(life.follow(self._transfers, self._heard))
        if members is not None:
            await members.meet(device)
        life.be_ready(tasks, self._stats)
        tasks.create_task(self._log_steps())
        tasks.create_task(self._foyer.run())
        tasks.create_task(self._steps())

    # What is heard.

    async def _listen(self) -> None:
        async for message in self._link.listen():
            self._hear(message)

    def _hear(self, message: ToWorker) -> None:
        try:
            if self._foyer.takes(message):
                return
        except Overloaded as error:
            assert isinstance(message, messages.Submit), "nothing else is one too many"
            self._refuse(message, error)
            return
        self._act(message)

    def _act(self, message: ToWorker) -> None:
        now = time.monotonic()
        match message:
            case messages.Submit():
                self._submit(message, now)
            case messages.AbortRoom(room=room, reason=reason, index=index):
                one, whole = Stopped(room, index), Cancelled(room, reason)
                self._sched.feed(whole if index < 0 else one, now)
            case messages.Rebind(room=room, attempt=attempt, source=source):
                self._sched.feed(Rebound(room, attempt, source), now)
            case messages.ResumeLocally(room=room):
                self._sched.feed(ResumeLocally(room), now)
            case messages.Drain():
                self._sched.drain()
            case messages.Stop():
                self._stop.set()
        self._moved()

    def _submit(self, message: messages.Submit, now: float) -> None:
        try:
            self._sched.submit(message, now)
        except PdrtError as error:
            self._refuse(message, error)

    def _refuse(self, message: messages.Submit, error: PdrtError) -> None:
        problem = Problem(code=error.code, message=str(error), stage=self._spec.role)
        output = Output(room=message.room, problem=problem, attempt=message.attempt)
        self._link.tell(Outputs(items=(output,)))

    def _heard(self, events: Sequence[TransferEvent]) -> None:
        now = time.monotonic()
        for event in events:
            self._sched.feed(event, now)
        self._moved()

    def _moved(self) -> None:
        """Something changed, perhaps while a batch runs: act on it now, plan when it has ended."""
        self._carry_out()
        self._wake.set()
        self._life.news.set()

    # Steps.

    async def _steps(self) -> NoReturn:
        while True:
            self._wake.clear()
            self._life.news.set()
            plan = self._sched.plan(time.monotonic())
            self._carry_out()
            if not plan.is_for_device:
                await self._rest()
                continue
            began = time.monotonic()
            drawn, lost = await self._compute(plan)
            now = time.monotonic()
            self._sched.commit(plan, drawn, now, lost)
            self._carry_out()
            self._step_s = now - began
            self._tokens += len(drawn) + plan.prompt_tokens

    async def _compute(self, plan: Plan) -> tuple[list[Drawn], set[int]]:
        """What was drawn, and whose KV could not be moved, on any rank."""
        members = self._members
        if members is not None:
            await members.step(plan.batch, plan.moves)
        drawn, lost = await self._device.step(plan.batch, plan.moves)
        if members is None:
            return drawn, set(lost)
        members.computed()
        theirs = await members.lost() if plan.moves else set()
        return drawn, theirs.union(lost)

    async def _rest(self) -> None:
        """Until something happens or a timer is due."""
        due = self._sched.next_timer()
        timeout = None if due is None else max(0.0, due - time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return

    def _carry_out(self) -> None:
        """All effects, in order; what is to be said goes in one message. None when we stop."""
        if self._stop.is_set():
            return
        said: list[Output] = []
        outbox = self._sched.outbox
        while outbox:
            effect = outbox.popleft()
            match effect:
                case Say(output):
                    said.append(output)
                case messages.AskPrefill():
                    self._link.tell(effect)
                case _:
                    assert self._transfers is not None, "a hybrid scheduler transfers nothing"
                    self._transfers.do(effect)
        for items in in_messages(said):
            self._link.tell(Outputs(items=items))

    # What is told.

    async def _log_steps(self) -> NoReturn:
        """A status line every so often while there is work."""
        before, every_s = 0, self._spec.config.log.step_every_s
        while True:
            await asyncio.sleep(every_s or _LOG_S)
            stats = self._stats()
            if stats.running or self._tokens != before:
                self._log.info(
                    "step",
                    step_ms=round(stats.step_ms, 2),
                    running=stats.running,
                    **stats.queues,
                    tokens_per_s=round((self._tokens - before) / (every_s or _LOG_S), 1),
                    kv=f"{stats.blocks_used}/{stats.blocks_total}",
                    host_kv=f"{stats.host_blocks_used}/{stats.host_blocks_total}",
                    transfers=stats.counters.get("transfers", 0),
                    retractions=stats.counters.get("retractions", 0),
                )
                before = self._tokens

    def _stats(self) -> messages.Stats:
        own = self._sched.stats()
        moved = self._transfers.stats() if self._transfers else None
        return messages.Stats(
            running=own.running,
            queues=own.queues,
            blocks_used=own.blocks_used,
            blocks_total=own.blocks_total,
            blocks_quarantined=own.blocks_quarantined,
            slots_used=own.slots_used,
            host_blocks_used=own.host_blocks_used,
            host_blocks_total=own.host_blocks_total,
            rooms=own.rooms,
            peers=moved.peers if moved else {},
            transports=moved.transports if moved else {},
            counters={**own.counters, **(moved.counters if moved else {})},
            step_ms=self._step_s * 1000,
            draining=own.draining,
        )


def in_messages(said: Sequence[Output]) -> Iterator[tuple[Output, ...]]:
    """All in one, but for prompts' odds, which are large: a message has a limit."""
    first, size = 0, 0
    for end, output in enumerate(said):
        size += len(output.scored)
        if size > _SCORED_BYTES and end > first:
            yield tuple(said[first:end])
            first, size = end, len(output.scored)
    if said:
        yield tuple(said[first:])


async def serve(spec: WorkerSpec) -> int:
    """The worker's exit status: 0 when it was told to stop."""
    context = zmq.asyncio.Context()  # the link's own: what waits in it is sent before we end
    link: Link[ToWorker, FromWorker] = Link(context, messages.TO_WORKER, messages.FROM_WORKER)
    link.connect(spec.endpoint)
    asyncio.get_running_loop().add_reader(0, _orphaned, spec.folder)
    life = Follower(spec, link) if spec.member else Worker(spec, link)
    try:
        await life.run()
    except (ExceptionGroup, OSError) as error:  # the shell: it is told, whatever it was; we end
        await _confess(link, first_of(error))
        return 1
    finally:
        link.close(linger_ms=500)
        context.term()
    return 0


async def _confess(link: Link[ToWorker, FromWorker], error: BaseException) -> None:
    structlog.get_logger().error("worker_failed", exc_info=error)
    code = error.code if isinstance(error, PdrtError) else "worker_failed"
    problem = Problem(code=code, message=str(error)[:8000] or repr(error)[:8000])
    with contextlib.suppress(TimeoutError):  # a supervisor that does not read knows nothing
        async with asyncio.timeout(_CONFESS_S):
            await link.send_last(messages.Fatal(problem=problem))


def _orphaned(folder: Path) -> None:
    """Our supervisor's end of the pipe is closed: it is dead, and nobody wants our answers.

    Its folder of sockets, which it could not remove, goes too.
    """
    if not os.read(0, 4096):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when we end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        spec = read_spec(0)
    except BadMessage as error:
        sys.exit(f"pdrt worker: {error}")
    setproctitle.setproctitle(spec.title)
    log = spec.config.log
    telemetry.configure(log.level, log.format, process=spec.role, worker=str(spec.rank))
    allow_all()
    footprint.limit_caches(process_environ())
    sys.setswitchinterval(0.001)  # the loop must not wait 5 ms for the device thread's Python
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    code = runner.run(serve(spec))
    sys.stderr.flush()
    # Neither the loop nor Python is wound up: a forward or a load that still runs in the device
    # thread is nobody's business, and nothing of ours outlives the process.
    os._exit(code)


if __name__ == "__main__":
    main()
