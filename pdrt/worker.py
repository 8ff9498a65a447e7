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

from pdrt import messages, telemetry
from pdrt.control.bootstrap_client import BootstrapClient, fetch_route, keep_registered
from pdrt.data.limits import Limits as TransferLimits
from pdrt.data.manager import KVTransferManager
from pdrt.data.memory import PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.choose import open_transport
from pdrt.device.backends import open_runner
from pdrt.device.batch import Runner
from pdrt.device.poolsize import host_bytes, pool_blocks
from pdrt.errors import PdrtError
from pdrt.link import Link
from pdrt.messages import FromWorker, Output, Outputs, Problem, ToWorker
from pdrt.modelspec import ModelSpec
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.effects import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    Say,
    SendBlocks,
    TellStarted,
)
from pdrt.sched.events import Cancelled, Rebound, ResumeLocally
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler
from pdrt.spawn import WorkerSpec, read_spec

_STATS_S: Final = 1.0
_STATS_LEAST_S: Final = 0.05
_ROUTE_S: Final = 5.0  # how long a decode rank asks for a route that is not there yet

P = ParamSpec("P")
T = TypeVar("T")
TransferEffect: TypeAlias = (
    ExpectHandshakes
    | TellStarted
    | SendBlocks
    | AbortSend
    | OpenReceiver
    | AdmitReceiver
    | AbortReceiver
)
AnyScheduler: TypeAlias = Scheduler | PrefillDisaggScheduler | DecodeDisaggScheduler


class Worker:
    """One life of a device worker, from its spec to its end."""

    def __init__(self, spec: WorkerSpec, link: Link[ToWorker, FromWorker]) -> None:
        self._spec, self._link = spec, link
        self._config = spec.config
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._news = asyncio.Event()  # figures differ from those that were told
        self._stop = asyncio.Event()
        self._step_s, self._tokens = 0.0, 0
        self._log = structlog.get_logger()
        self._runner: Runner
        self._sched: AnyScheduler
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
        self._runner = await self._in_device(open_runner, self._config, self._progress)
        spec = ModelSpec.read(self._config.model.path, self._config.model.max_model_len)
        layout, scheduler = self._runner.layout, self._config.scheduler
        blocks = pool_blocks(scheduler, layout, spec.max_model_len, host_bytes())
        self._tell_loading("kv pool", 0, 1)
        memory = await asyncio.to_thread(PoolMemory, layout, blocks, self._config.transfer.slots)
        self._tell_loading("kv pool", 1, 1)
        self._runner.bind(memory.pool_view, blocks)
        self._sched = self._scheduler(blocks)
        async with asyncio.TaskGroup() as tasks:
            endpoint = ""
            if self._spec.role != "hybrid":
                self._manager = self._transfers(memory, session)
                endpoint = await self._manager.start()
                tasks.create_task(self._manager.run())
            self._link.tell(
                messages.Ready(
                    endpoint=endpoint,
                    process=this_process(),
                    layout=layout,
                    blocks=blocks,
                    eos_token_ids=tuple(self._runner.eos_token_ids),
                )
            )
            if self._spec.role == "prefill":
                tasks.create_task(self._stay_registered(session, endpoint, spec, blocks))
            tasks.create_task(self._report())
            tasks.create_task(self._log_steps())
            tasks.create_task(self._steps())

    # Making the parts.

    def _scheduler(self, blocks: int) -> AnyScheduler:
        config = self._config.scheduler
        limits = Limits(
            block_size=config.block_size,
            max_batch_size=config.max_batch_size,
            max_prefill_tokens=config.max_prefill_tokens,
            reserved_tokens=config.num_reserved_decode_tokens,
            max_waiting=config.max_waiting,
            retraction=config.retraction,
            chunked=self._config.transfer.chunked,
            rebind_grace_s=self._config.timeouts.rebind_grace_s,
        )
        match self._spec.role:
            case "prefill":
                return PrefillDisaggScheduler(limits, blocks)
            case "decode":
                slots = self._config.transfer.slots
                return DecodeDisaggScheduler(limits, blocks, slots, self._runner.eos_token_ids)
            case "hybrid":
                return Scheduler(limits, blocks, self._runner.eos_token_ids)

    def _transfers(self, memory: PoolMemory, session: ClientSession) -> KVTransferManager:
        async def route(source: messages.Source) -> messages.Route:
            timeout_s = self._config.timeouts.connect_s
            client = BootstrapClient(session, source.host, source.port, self._spec.key, timeout_s)
            return await fetch_route(client, _ROUTE_S, time.monotonic)

        return KVTransferManager(
            role="prefill" if self._spec.role == "prefill" else "decode",
            rank=self._spec.rank,
            layout=self._runner.layout,
            memory=memory,
            transport=open_transport(self._config.transfer, memory),
            key=self._spec.key,
            local_ip=self._spec.disagg.local_ip,
            timeouts=self._config.timeouts,
            limits=TransferLimits(rooms_per_peer=self._config.security.max_rooms_per_peer),
            routes=route,
            wake=self._transfers_moved,
            clock=time.monotonic,
            wall=time.time,
        )

    async def _stay_registered(
        self, session: ClientSession, endpoint: str, spec: ModelSpec, blocks: int
    ) -> None:
        disagg, parallel = self._spec.disagg, self._config.parallel
        timeouts = self._config.timeouts
        said = messages.RegisterRank(
            attn_tp_size=parallel.tp,
            attn_cp_size=parallel.cp,
            dp_size=parallel.dp,
            rank=self._spec.rank,
            rank_ip=disagg.local_ip,
            rank_port=int(endpoint.rpartition(":")[2]),
            instance_epoch=self._spec.epoch,
            fingerprint=self._runner.layout,
            max_prompt_tokens=min(spec.max_model_len, blocks * self._runner.layout.block_size),
            process=this_process(),
        )
        client = BootstrapClient(
            session,
            disagg.bootstrap_host,
            disagg.bootstrap_port,
            self._spec.key,
            timeouts.connect_s,
        )
        await keep_registered(client, said, timeouts.startup_s, self._lease, time.monotonic)

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

    def _transfers_moved(self) -> None:
        """The manager has events. Not handled here and now: it may be in the middle of a call."""
        self._loop.call_soon(self._take_events)

    def _take_events(self) -> None:
        assert self._manager is not None
        now = time.monotonic()
        for event in self._manager.take_events():
            self._sched.feed(event, now)
        self._moved()

    def _moved(self) -> None:
        """Something changed, perhaps while a batch runs: act on it now, plan when it has ended."""
        if not self._stop.is_set():
            self._carry_out()
            self._wake.set()

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
                    transfer(self._manager, effect)
        if said:
            self._link.tell(Outputs(items=tuple(said)))

    async def _in_device(self, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        return await self._loop.run_in_executor(self._device, partial(call, *args, **more))

    # What is told.

    def _progress(self, stage: str, done: int, total: int) -> None:
        """Called in the device thread while the model loads."""
        self._loop.call_soon_threadsafe(self._tell_loading, stage, done, total)

    def _tell_loading(self, stage: str, done: int, total: int) -> None:
        self._link.tell(messages.Loading(stage=stage, done=done, total=total))

    async def _report(self) -> NoReturn:
        """Figures soon after something moved, and every second anyhow."""
        while True:
            self._link.tell(self._stats())
            await asyncio.sleep(_STATS_LEAST_S)
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STATS_S - _STATS_LEAST_S):
                    await self._news.wait()

    async def _log_steps(self) -> NoReturn:
        """A status line every so often while there is work."""
        before, every_s = 0, self._config.log.step_every_s
        while True:
            await asyncio.sleep(every_s or _STATS_S)
            stats = self._stats()
            if stats.running or self._tokens != before:
                self._log.info(
                    "step",
                    step_ms=round(stats.step_ms, 2),
                    running=stats.running,
                    **stats.queues,
                    tokens_per_s=round((self._tokens - before) / (every_s or _STATS_S), 1),
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


def transfer(manager: KVTransferManager, effect: TransferEffect) -> None:
    """Hand one effect of a scheduler to the transfer side."""
    match effect:
        case ExpectHandshakes(room, attempt, prompt_tokens, prompt_hash, deadline):
            manager.expect(room, attempt, prompt_tokens, prompt_hash, deadline)
        case TellStarted(room, attempt):
            manager.started(room, attempt)
        case SendBlocks(room, attempt, blocks, first_block, last):
            manager.send(room, attempt, blocks, first_block, last)
        case AbortSend(room, attempt, problem):
            manager.abort_send(room, attempt, problem)
        case OpenReceiver(room, attempt, source, deadline):
            manager.open_receiver(room, attempt, source, deadline)
        case AdmitReceiver():
            manager.admit(
                effect.room,
                effect.attempt,
                effect.blocks,
                effect.first_block,
                effect.slot,
                effect.prompt_tokens,
                effect.prompt_hash,
                effect.deadline,
            )
        case AbortReceiver(room, attempt, reason):
            manager.abort_receive(room, attempt, reason)


async def serve(spec: WorkerSpec) -> int:
    """The worker's exit status: 0 when it was told to stop."""
    link: Link[ToWorker, FromWorker] = Link(
        zmq.asyncio.Context.instance(), messages.TO_WORKER, messages.FROM_WORKER
    )
    link.connect(spec.endpoint)
    worker = Worker(spec, link)
    folder = Path(spec.endpoint.removeprefix("ipc://")).parent
    asyncio.get_running_loop().add_reader(0, _orphaned, folder)
    try:
        await worker.run()
    except ExceptionGroup as group:  # the shell: whatever it was, it is told, and we end
        error = _first(group)
        structlog.get_logger().error("worker_failed", exc_info=error)
        code = error.code if isinstance(error, PdrtError) else "worker_failed"
        problem = Problem(code=code, message=str(error)[:8000] or repr(error)[:8000])
        await link.send_last(messages.Fatal(problem=problem))
        return 1
    finally:
        link.close(linger_ms=500)
    return 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The innermost first exception."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


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
    spec = read_spec(0)
    setproctitle.setproctitle(spec.title)
    log = spec.config.log
    telemetry.configure(log.level, log.format, process=spec.role, worker=str(spec.rank))
    sys.setswitchinterval(0.001)  # the loop must not wait 5 ms for the device thread's Python
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve(spec))
    sys.stderr.flush()
    os._exit(code)  # a forward that is still running in the device thread is nobody's business


if __name__ == "__main__":
    main()
