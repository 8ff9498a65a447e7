"""The supervisor of a node: one event loop that owns the workers, the API and the registrations.

Actors run in one TaskGroup: a handle for each device worker, the HTTP API with its dispatcher,
the bootstrap server (prefill) and the heartbeat. The node's life is a table; everything that
moves it comes through `_step`.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NoReturn

import setproctitle
import structlog
import uvloop
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from pdrt import messages, telemetry
from pdrt.config import DisaggConfig, NodeConfig, Place, Role, bracketed, is_loopback
from pdrt.control.api import make_app
from pdrt.control.bootstrap import BootstrapState, Sizes, bootstrap_app
from pdrt.control.bootstrap import Limits as BootstrapLimits
from pdrt.control.dispatch import DPDispatcher
from pdrt.control.figures import WorkerFigures, load_of, worker_status
from pdrt.control.heartbeat import (
    Callers,
    Heartbeat,
    News,
    Time,
    Timing,
    Watched,
    bootstrap_probe,
)
from pdrt.control.http import Json, listen
from pdrt.control.leader import Leader, Limits
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
from pdrt.control.reprefill import Reprefill
from pdrt.control.selftest import self_test
from pdrt.control.text import TextPool, open_text
from pdrt.control.worker_handle import Lost, WorkerHandle
from pdrt.data.peer import Health
from pdrt.errors import ConfigError, PdrtError
from pdrt.keys import ClusterKey
from pdrt.messages import FromWorker, Rank, Ready, Submit, ToWorker
from pdrt.modelspec import ModelSpec
from pdrt.spawn import WorkerSpec

_TICK_S: Final = 0.05


class Lane:
    """A worker as the dispatcher sees it: what it is told is noted on the way."""

    def __init__(self, handle: WorkerHandle, node: Node) -> None:
        self._handle, self._node = handle, node

    @property
    def rank(self) -> Rank:
        return self._handle.rank

    @property
    def ready(self) -> Ready | None:
        return self._handle.ready

    def tell(self, message: ToWorker) -> None:
        self._handle.tell(message)
        self._node.told(message)


class Node:
    """`run` is its life, from binding to the exit status."""

    def __init__(self, role: Role, config: NodeConfig, place: Place, key: ClusterKey) -> None:
        self.role, self.config, self.key = role, config, key
        self.disagg = DisaggConfig.derive(role, config, place)
        self.spec = ModelSpec.read(config.model.path, config.model.max_model_len)
        self.model = config.model.name or Path(config.model.path).name
        self.epoch = time.time_ns()
        self.state = NodeState.STARTING
        self.reason = ""
        self.fault_at = 0.0  # wall clock
        self.served_since_fault = False
        self.turned_at = time.monotonic()
        self._log = structlog.get_logger()
        self._told_loading: dict[int, tuple[str, int]] = {}  # by dp rank
        self._over = asyncio.Event()
        self._hurry = asyncio.Event()
        self._tasks: asyncio.TaskGroup
        self._url = ""
        self._folder = Path(tempfile.mkdtemp(prefix="pdrt-node-"))  # mode 0700: sockets
        self.handles = [
            WorkerHandle(Rank(dp=dp), self._maker(dp), self._folder, self._heard, time.monotonic)
            for dp in range(config.parallel.dp)
        ]
        self.dispatcher = DPDispatcher([Lane(h, self) for h in self.handles], time.monotonic)
        self._bootstrap: BootstrapState | None = None
        self._heartbeat: Heartbeat | None = None
        self._reprefill: Reprefill | None = None

    async def run(self) -> int:
        """The exit status. Raises ConfigError when it cannot even begin."""
        try:
            async with AsyncExitStack() as stack:
                session = await stack.enter_async_context(ClientSession())
                await self._bind(stack, session)
                self._step(Bound())
                self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
                living = [self._tasks.create_task(c) for c in self._actors(session)]
                self._listen_to_signals()
                await self._over.wait()
                for task in living:
                    task.cancel()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self.state is NodeState.FAILED:
            self._log.error("node_failed", reason=self.reason)
            return 1
        return 0

    # Beginning.

    async def _bind(self, stack: AsyncExitStack, session: ClientSession) -> None:
        """Every address is taken before any worker is started."""
        host, ports = self.disagg.local_ip, self.config.ports
        port = {"prefill": ports.prefill, "decode": ports.decode, "hybrid": ports.hybrid}[self.role]
        grace_s = 1.0  # after the drain nothing should be left
        runner, port = await listen(make_app(self._leader()), host, port, grace_s)
        stack.push_async_callback(runner.cleanup)
        self._url = f"http://{bracketed(host)}:{port}"
        timeouts = self.config.timeouts
        timing = Timing(timeouts.heartbeat_s, timeouts.heartbeat_timeout_s)
        if self.role == "prefill":
            await self._bind_bootstrap(stack, timing)
        elif self.role == "decode":
            caller = f"{self._url} {self.epoch}"
            probe = bootstrap_probe(session, self.key, timing.timeout_s, caller)
            self._heartbeat = Heartbeat(probe, self._news, timing, Time(time.monotonic))
            self._reprefill = Reprefill(
                session, self.key, timeouts.connect_s, time.monotonic, time.time
            )
        self._log.info("listening", url=self._url, role=self.role, model=self.model)

    async def _bind_bootstrap(self, stack: AsyncExitStack, timing: Timing) -> None:
        parallel, host = self.config.parallel, self.disagg.local_ip
        state = BootstrapState(
            Sizes(parallel.tp, parallel.cp, parallel.dp),
            self.epoch,
            host,
            BootstrapLimits(lease_s=self.config.timeouts.lease_s),
            http=self._url,
        )
        self._callers = Callers(self._news, timing, Time(time.monotonic))
        app = bootstrap_app(state, self.key, time.monotonic, self._callers.heard)
        runner, port = await listen(app, host, self.disagg.bootstrap_port, 1.0)
        stack.push_async_callback(runner.cleanup)
        self.disagg = self.disagg.model_copy(update={"bootstrap_port": port})
        self._bootstrap = state

    def _actors(self, session: ClientSession) -> list[Coroutine[None, None, None]]:
        actors = [handle.run() for handle in self.handles]
        actors.append(self._tick())
        actors.append(self._startup_deadline())
        if self._heartbeat is not None:
            actors.append(self._heartbeat.run())
        if self._bootstrap is not None:
            actors.append(self._callers.run())
        return actors

    def _leader(self) -> Leader:
        registry = CollectorRegistry()
        registry.register(WorkerFigures(self.handles))
        security = self.config.security
        return Leader(
            role=self.role,
            model=self.model,
            dispatcher=self.dispatcher,
            text=TextPool(open_text(self.config.model.path)),
            limits=Limits(
                max_model_len=self.spec.max_model_len,
                vocab=self.spec.vocab,
                pool_tokens=self._pool_tokens,
                max_body_bytes=security.max_body_bytes,
                request_s=self.config.timeouts.request_s,
            ),
            key=self.key,
            registry=registry,
            status=self.status,
            why_not_ready=self.why_not_ready,
            health=self.health,
            stalled_s=lambda: time.monotonic() - self.turned_at,
            served=self._served,
            drain=self.drain,
            api_keys=security.api_keys,
        )

    def _maker(self, dp: int) -> Callable[[str], WorkerSpec]:
        def make(endpoint: str) -> WorkerSpec:
            return WorkerSpec(
                role=self.role,
                rank=Rank(dp=dp),
                config=self.config,
                disagg=self.disagg,
                key_hex=self.key.secret.hex(),
                endpoint=endpoint,
                epoch=time.time_ns(),
            )

        return make

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.state is NodeState.DRAINING:
            self._hurry.set()
        self.drain()

    # What is heard.

    def _heard(self, handle: WorkerHandle, message: FromWorker | Lost) -> None:
        match message:
            case messages.Outputs(items=items):
                self.dispatcher.deliver(handle.rank.dp, message)
                self._forget_ended(items)
            case messages.AskPrefill():
                self._tasks.create_task(self._ask_prefill(handle, message))
            case messages.Loading():
                self._tell_loading(handle, message)
            case messages.Ready(blocks=blocks, endpoint=endpoint):
                self._log.info(
                    "worker_ready", worker=str(handle.rank), blocks=blocks, endpoint=endpoint
                )
                self._look()
            case Lost():
                self._lost(handle, message)
            case messages.Stats() | messages.Fatal():
                pass

    def _tell_loading(self, handle: WorkerHandle, loading: messages.Loading) -> None:
        """A line for each new stage and each tenth of it."""
        tenth = loading.stage, 10 * loading.done // max(loading.total, 1)
        if self._told_loading.get(handle.rank.dp) != tenth:
            self._told_loading[handle.rank.dp] = tenth
            self._log.info(
                "loading",
                worker=str(handle.rank),
                stage=loading.stage,
                done=loading.done,
                total=loading.total,
            )

    def _lost(self, handle: WorkerHandle, lost: Lost) -> None:
        self.fault_at, self.served_since_fault = time.time(), False
        self.dispatcher.worker_lost(handle.rank.dp, lost.problem)
        if self._bootstrap is not None:
            self._bootstrap.withdraw(handle.rank)
        self._step(WorkerGone())
        if lost.final:
            self._give_up(f"worker {handle.rank} died too often: {lost.problem.message}")

    def _forget_ended(self, items: tuple[messages.Output, ...]) -> None:
        if self._reprefill is not None:
            for item in items:
                if item.finish or item.problem:
                    self._reprefill.over(item.room)

    def told(self, message: ToWorker) -> None:
        """A worker was told this: remember what a retraction will need, watch whom it names."""
        if self._reprefill is not None:
            self._reprefill.heard(message)
        if self._heartbeat is not None and isinstance(message, Submit | messages.Rebind):
            source = message.source
            if source is not None:
                self._heartbeat.watch(source.host, source.port)

    async def _ask_prefill(self, handle: WorkerHandle, wanted: messages.AskPrefill) -> None:
        assert self._reprefill is not None
        try:
            await self._reprefill.ask(wanted)
        except PdrtError as error:
            self._log.warning("reprefill_failed", room=wanted.room, reason=str(error))
            if handle.ready is not None:
                handle.tell(messages.ResumeLocally(room=wanted.room))

    def _news(self, news: News) -> None:
        level = "warning" if news.health in (Health.SUSPECT, Health.DEAD) else "info"
        getattr(self._log, level)(
            "peer", peer=news.peer, health=str(news.health), reason=news.reason
        )

    # Life.

    def _step(self, event: object) -> None:
        before = self.state
        self.state, _ = NODE.step(before, self, event)
        if self.state is not before:
            self._log.info("node", state=str(self.state), was=str(before))

    def _look(self) -> None:
        """Move on when what the node waits for has come."""
        if self.state is NodeState.LOADING and all(h.ready is not None for h in self.handles):
            self._step(AllLoaded())
        if self.state is NodeState.REGISTERING and self._is_registered():
            self._step(AllRegistered())
            if self.role == "hybrid":
                self._tasks.create_task(self._self_test())
        if self.state is NodeState.DRAINING and not self.dispatcher.load().rooms:
            self._tasks.create_task(self._finish())

    def _is_registered(self) -> bool:
        return self._bootstrap is None or self._bootstrap.is_ready(time.monotonic())

    async def _tick(self) -> NoReturn:
        """The loop turns; and nothing that the node waits for is missed."""
        while True:
            self.turned_at = time.monotonic()
            self.dispatcher.catch_up()
            self._look()
            await asyncio.sleep(_TICK_S)

    async def _startup_deadline(self) -> None:
        await asyncio.sleep(self.config.timeouts.startup_s)
        if self.state in (NodeState.LOADING, NodeState.REGISTERING) and not self.fault_at:
            why = self.why_not_ready()
            self._give_up(f"not ready after {self.config.timeouts.startup_s:g} s: {why}")

    def drain(self) -> None:
        """No new work; end when what is running has finished, or when the grace is over."""
        if self.state in (NodeState.DRAINING, NodeState.STOPPED, NodeState.FAILED):
            return
        self._step(DrainAsked())
        self.dispatcher.drain()
        self._tasks.create_task(self._drain_deadline())
        self._look()

    async def _drain_deadline(self) -> None:
        try:
            async with asyncio.timeout(self.config.timeouts.drain_s):
                await self._hurry.wait()
        except TimeoutError:
            self._log.warning("drain_grace_over", rooms=self.dispatcher.load().rooms)
        await self._finish()

    async def _finish(self) -> None:
        if self.state is not NodeState.DRAINING:
            return
        self._step(Drained())
        await self._end()

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._step(GaveUp(reason))
        self._tasks.create_task(self._end())

    async def _end(self) -> None:
        await asyncio.gather(*(handle.stop() for handle in self.handles))
        self._hurry.set()  # nobody waits out the grace any more
        self._over.set()

    # What is shown.

    def _pool_tokens(self) -> int:
        """Tokens that the smallest ready pool holds; 0 while none is known."""
        return min(
            (r.blocks * r.layout.block_size for h in self.handles if (r := h.ready)), default=0
        )

    def _served(self) -> None:
        self.served_since_fault = True

    async def _self_test(self) -> None:
        if reason := await self_test(self.dispatcher, [h.rank.dp for h in self.handles]):
            self._log.warning("self_test_failed", reason=reason)
        else:
            self._served()

    def why_not_ready(self) -> str:
        """What keeps a request from succeeding, or nothing."""
        if self.state is not NodeState.READY:
            missing = self._bootstrap.missing(time.monotonic()) if self._bootstrap else []
            states = [f"worker {h.rank} is {h.state}" for h in self.handles if h.ready is None]
            return "; ".join([f"the node is {self.state}", *states, *missing])
        if not self.served_since_fault:
            return "no request has succeeded since the start or the last fault"
        return ""

    def health(self) -> Json:
        return {
            "role": self.role,
            "state": str(self.state),
            "workers": [
                {
                    "rank": str(h.rank),
                    "state": str(h.state),
                    "lives": h.lives,
                    "last_problem": h.last_problem.message if h.last_problem else None,
                }
                for h in self.handles
            ],
            "peers": {p.name: f"{p.health}: {p.reason}".rstrip(": ") for p in self._peers()},
        }

    def _peers(self) -> list[Watched]:
        if self._heartbeat is not None:
            return self._heartbeat.peers()
        return self._callers.peers() if self._bootstrap is not None else []

    def status(self) -> Json:
        now = time.monotonic()
        epoch = self._bootstrap.instance_epoch if self._bootstrap else self.epoch
        return {
            "role": self.role,
            "state": str(self.state),
            "model": self.model,
            "instance_epoch": epoch,
            "bootstrap_host": self.disagg.bootstrap_host if self._bootstrap else None,
            "bootstrap_port": self.disagg.bootstrap_port if self._bootstrap else None,
            "dp_size": self.config.parallel.dp,
            "ready_ranks": [h.rank.dp for h in self.handles if h.ready is not None],
            "max_model_len": self.spec.max_model_len,
            "load": load_of(self.handles),
            "rooms": self.dispatcher.load().rooms,
            "last_fault_at": self.fault_at or None,
            "workers": [worker_status(h, now) for h in self.handles],
        }


def check_served(role: Role, config: NodeConfig, place: Place) -> None:
    """Raises ConfigError for a topology that this version does not serve."""
    parallel = config.parallel
    for name, size in (("tp", parallel.tp), ("cp", parallel.cp)):
        if size != 1:
            raise ConfigError(f"[parallel] {name} = {size}: this version serves {name} = 1 only")
    if parallel.nodes_per_instance != 1:
        raise ConfigError(
            f"[parallel] world_size = {parallel.world_size}, devices_per_node ="
            f" {parallel.devices_per_node}: this version serves instances of one node only"
        )
    if not place.is_leader:
        raise ConfigError(f"a {role} node that is no leader has nothing to do in this version")


def main(role: Role, config: NodeConfig, node_index: int = 0) -> int:
    """Run one node in this process; its exit status. Raises ConfigError."""
    telemetry.configure(config.log.level, config.log.format, process=role)
    place = Place.of(config.parallel, node_index)
    check_served(role, config, place)
    key = config.security.cluster_key()
    if key is None:
        if not is_loopback(config.parallel.local_ip):
            raise ConfigError(
                f"[parallel] local_ip = {config.parallel.local_ip!r} is not loopback: a cluster key"
                " is needed; set [security] key_file or PDRT_SECURITY_KEY on all nodes"
            )
        raise ConfigError("no cluster key: set [security] key_file or PDRT_SECURITY_KEY")
    setproctitle.setproctitle(f"pdrt node {role}")

    async def live() -> int:
        return await Node(role, config, place, key).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(live())
