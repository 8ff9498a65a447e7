"""The shell of a device-worker process: it alone joins scheduler, transfers and device.

One event loop answers the supervisor and the peers; the device runs in a thread of its own, so
that a long forward delays nobody's ping. Everything that happens becomes an event for the
scheduler; what the scheduler decides comes back as effects and is carried out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, ParamSpec, TypeAlias, TypeVar

import setproctitle
import structlog
import uvloop
import zmq.asyncio
from aiohttp import ClientSession

from pdrt import messages, parts, telemetry
from pdrt.config import NodeConfig
from pdrt.control.bootstrap_client import BootstrapClient, keep_registered
from pdrt.data.manager import KVTransferManager
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.device.backends import Progress, open_runner
from pdrt.device.batch import Runner
from pdrt.device.poolsize import host_bytes, pool_blocks
from pdrt.errors import BadMessage, PdrtError, first_of
from pdrt.link import Link
from pdrt.messages import FromWorker, Output, Outputs, Problem, RegisterRank, ToWorker
from pdrt.modelspec import ModelSpec
from pdrt.sched.effects import Say
from pdrt.sched.events import Cancelled, Rebound, ResumeLocally
from pdrt.spawn import WorkerSpec, read_spec

_STATS_S: Final = 0.5  # the supervisor takes 1.8 s of silence for the end
_LOG_S: Final = 1.0
_STATS_LEAST_S: Final = 0.05
_CONFESS_S: Final = 1.0
P = ParamSpec("P")
T = TypeVar("T")
Load: TypeAlias = Callable[[NodeConfig, Progress], Runner]


class Worker:
    """One life of a device worker, from its spec to its end."""

    def __init__(
        self, spec: WorkerSpec, link: Link[ToWorker, FromWorker], load: Load = open_runner
    ) -> None:
        self._spec, self._link, self._load = spec, link, load
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._news = asyncio.Event()  # figures differ from those that were told
        self._stop = asyncio.Event()
        self._transfers_news = asyncio.Event()
        self._step_s, self._tokens = 0.0, 0
        self._log = structlog.get_logger()
        self._runner: Runner
        self._sched: parts.AnyScheduler
        self._manager: KVTransferManager | None = None

    async def run(self) -> None:
        """Until the supervisor says stop. Raises what the worker cannot go on with."""
        async with asyncio.TaskGroup() as tasks:
            life = [tasks.create_task(self._link.run()), tasks.create_task(self._listen())]
            async with ClientSession() as session, asyncio.TaskGroup() as inner:
                work = inner.create_task(self._work(session))
                await self._stop.wait()
                work.cancel()
            for task in life:
                task.cancel()

    async def _work(self, session: ClientSession) -> None:
        config = self._spec.config
        model = ModelSpec.read(config.model.path, config.model.max_model_len)
        self._runner = await self._in_device(self._load, config, self._progress)
        memory = await self._in_device(self._make_memory, model.max_model_len)
        self._sched = parts.scheduler(self._spec, self._runner, memory.blocks)
        async with asyncio.TaskGroup() as tasks:
            endpoint = ""
            if self._spec.role != "hybrid":
                endpoint = await self._open_transfers(memory, session, tasks)
            self._link.tell(
                messages.Ready(
                    endpoint=endpoint,
                    process=this_process(),
                    layout=memory.layout,
                    blocks=memory.blocks,
                    eos_token_ids=tuple(self._runner.eos_token_ids),
                )
            )
            if self._spec.role == "prefill":
                disagg = self._spec.disagg
                client = parts.bootstrap(
                    self._spec, session, disagg.bootstrap_host, disagg.bootstrap_port
                )
                said = parts.registration(self._spec, memory, endpoint, model.max_model_len)
                tasks.create_task(self._stay_registered(client, said))
            telemetry.settle()
            tasks.create_task(self._report())
            tasks.create_task(self._log_steps())
            tasks.create_task(self._steps())

    def _make_memory(self, max_len: int) -> PoolMemory:
        """In the device thread, for touching each page takes a while."""
        config, layout = self._spec.config, self._runner.layout
        blocks = pool_blocks(config.scheduler, layout, max_len, host_bytes())
        self._progress("kv pool", 0, 1)
        memory = PoolMemory(layout, blocks, config.transfer.slots)
        self._runner.bind(memory.pool_view, blocks)
        self._progress("kv pool", 1, 1)
        return memory

    async def _open_transfers(
        self, memory: PoolMemory, session: ClientSession, tasks: asyncio.TaskGroup
    ) -> str:
        """The endpoint that peers are told."""
        self._manager = parts.transfers(self._spec, memory, session, self._transfers_news.set)
        endpoint = await self._manager.start()
        tasks.create_task(self._manager.run())
        tasks.create_task(self._follow_transfers(self._manager))
        return endpoint

    async def _stay_registered(self, client: BootstrapClient, said: RegisterRank) -> None:
        startup_s = self._spec.config.timeouts.startup_s
        await keep_registered(client, said, startup_s, self._lease, time.monotonic)

    def _lease(self, reason: str | None) -> None:
        if reason is not None:
            self._log.warning("lease_lost", reason=reason)

    # What is heard.

    async def _listen(self) -> None:
        async for message in self._link.listen():
            self._hear(message)

    def _hear(self, message: ToWorker) -> None:
        now = time.monotonic()
        match message:
            case messages.Submit():
                self._submit(message, now)
            case messages.AbortRoom(room=room, reason=reason):
                self._sched.feed(Cancelled(room, reason), now)
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
            problem = Problem(code=error.code, message=str(error), stage=self._spec.role)
            output = Output(room=message.room, problem=problem, attempt=message.attempt)
            self._link.tell(Outputs(items=(output,)))

    async def _follow_transfers(self, manager: KVTransferManager) -> NoReturn:
        """A task of its own: the manager tells of events in the middle of its calls."""
        while True:
            await self._transfers_news.wait()
            self._transfers_news.clear()
            now = time.monotonic()
            for event in manager.take_events():
                self._sched.feed(event, now)
            self._moved()

    def _moved(self) -> None:
        """Something changed, perhaps while a batch runs: act on it now, plan when it has ended."""
        if not self._stop.is_set():
            self._carry_out()
            self._wake.set()
            self._news.set()

    # Steps.

    async def _steps(self) -> NoReturn:
        while True:
            self._wake.clear()
            self._news.set()
            plan = self._sched.plan(time.monotonic())
            self._carry_out()
            if not plan.batch:
                await self._rest()
                continue
            began = time.monotonic()
            drawn = await self._in_device(self._runner.execute, plan.batch)
            now = time.monotonic()
            self._sched.commit(plan, drawn, now)
            self._carry_out()
            self._step_s = now - began
            self._tokens += len(drawn) + plan.prompt_tokens

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
        """All effects, in order; what is to be said goes in one message."""
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
                    assert self._manager is not None, "a hybrid scheduler transfers nothing"
                    self._manager.do(effect)
        if said:
            self._link.tell(Outputs(items=tuple(said)))

    async def _in_device(self, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        return await self._loop.run_in_executor(self._device, partial(call, *args, **more))

    # What is told.

    def _progress(self, stage: str, done: int, total: int) -> None:
        """Called in the device thread while the model loads."""
        self._loop.call_soon_threadsafe(self._tell_loading, stage, done, total)

    def _tell_loading(self, stage: str, done: int, total: int) -> None:
        if not self._stop.is_set():  # the thread goes on to the end of what it does
            self._link.tell(messages.Loading(stage=stage, done=done, total=total))

    async def _report(self) -> NoReturn:
        """Figures soon after something moved, and twice a second anyhow."""
        while True:
            self._news.clear()
            self._link.tell(self._stats())
            await asyncio.sleep(_STATS_LEAST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STATS_S - _STATS_LEAST_S):
                    await self._news.wait()

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
                    transfers=stats.counters.get("transfers", 0),
                    retractions=stats.counters.get("retractions", 0),
                )
                before = self._tokens

    def _stats(self) -> messages.Stats:
        own = self._sched.stats()
        moved = self._manager.stats() if self._manager else None
        return messages.Stats(
            running=own.running,
            queues=own.queues,
            blocks_used=own.blocks_used,
            blocks_total=own.blocks_total,
            blocks_quarantined=own.blocks_quarantined,
            slots_used=own.slots_used,
            rooms=own.rooms,
            peers=moved.peers if moved else {},
            counters={**own.counters, **(moved.counters if moved else {})},
            step_ms=self._step_s * 1000,
            draining=own.draining,
        )


async def serve(spec: WorkerSpec) -> int:
    """The worker's exit status: 0 when it was told to stop."""
    context = zmq.asyncio.Context()  # the link's own: what waits in it is sent before we end
    link: Link[ToWorker, FromWorker] = Link(context, messages.TO_WORKER, messages.FROM_WORKER)
    link.connect(spec.endpoint)
    folder = Path(spec.endpoint.removeprefix("ipc://")).parent
    asyncio.get_running_loop().add_reader(0, _orphaned, folder)
    try:
        await Worker(spec, link).run()
    except ExceptionGroup as group:  # the shell: whatever it was, it is told, and we end
        await _confess(link, first_of(group))
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
    sys.setswitchinterval(0.001)  # the loop must not wait 5 ms for the device thread's Python
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    code = runner.run(serve(spec))
    sys.stderr.flush()
    # Neither the loop nor Python is wound up: a forward or a load that still runs in the device
    # thread is nobody's business, and nothing of ours outlives the process.
    os._exit(code)


if __name__ == "__main__":
    main()
