"""The supervisor of a node: one event loop that owns the workers, the API and the registrations.

An actor among actors: a handle for each device worker, the HTTP API with its dispatcher, and
what its role's side brings (bootstrap server, heartbeat). All that they say comes into one
mailbox, and the node's life is a table that only `_step` moves.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import setproctitle
import structlog
import uvloop
from prometheus_client import CollectorRegistry

from pdrt import messages, telemetry
from pdrt.actor import Actor
from pdrt.config import DisaggConfig, NodeConfig, Place, Role, bracketed, is_loopback
from pdrt.control.api import make_app
from pdrt.control.dispatch import DPDispatcher
from pdrt.control.figures import WorkerFigures, load_of, worker_health, worker_status
from pdrt.control.heartbeat import News
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
from pdrt.control.selftest import self_test
from pdrt.control.sides import make_side
from pdrt.control.text import TextPool, open_text
from pdrt.control.worker_handle import Lost, WorkerHandle
from pdrt.data.peer import Health
from pdrt.errors import ConfigError, PdrtError
from pdrt.keys import ClusterKey
from pdrt.messages import FromWorker, Rank, Ready, ToWorker
from pdrt.modelspec import ModelSpec
from pdrt.spawn import WorkerSpec

_TICK_S: Final = 0.05
_MAILS: Final = 65536
_CLOSE_S: Final = 1.0  # for answers that are still open when the node has drained
_OVER: Final = (NodeState.DRAINING, NodeState.STOPPED, NodeState.FAILED)


@dataclass(frozen=True, slots=True)
class Said:
    """A worker said this, or its process ended."""

    handle: WorkerHandle
    message: FromWorker | Lost


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: look whether what the node waits for has come."""


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """Asked for by a signal or an operator."""


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The drain has lasted long enough, or somebody is in a hurry."""


@dataclass(frozen=True, slots=True)
class TooLate:
    """The start-up deadline passed."""


Mail: TypeAlias = Said | Tick | DrainWanted | GraceOver | TooLate


class Lane:
    """A worker as the dispatcher sees it: what it is told, its role's side hears too."""

    def __init__(self, handle: WorkerHandle, told: Callable[[ToWorker], None]) -> None:
        self._handle, self._told = handle, told

    @property
    def rank(self) -> Rank:
        return self._handle.rank

    @property
    def ready(self) -> Ready | None:
        return self._handle.ready

    def tell(self, message: ToWorker) -> None:
        self._handle.tell(message)
        self._told(message)


class Node(Actor[Mail]):
    """`live` is its life, from binding to the exit status."""

    def __init__(self, role: Role, config: NodeConfig, place: Place, key: ClusterKey) -> None:
        super().__init__(f"node {role}", _MAILS)
        self.role, self.config, self.key = role, config, key
        self.disagg = DisaggConfig.derive(role, config, place)
        self.spec = ModelSpec.read(config.model.path, config.model.max_model_len)
        self.model = config.model.name or Path(config.model.path).name
        self.state = NodeState.STARTING
        self.reason = ""
        self.fault_at = 0.0  # wall clock
        self.served_since_fault = False
        self.turned_at = time.monotonic()
        self._log = structlog.get_logger()
        self._told_loading: dict[int, tuple[str, int]] = {}  # by dp rank
        self._stopped = asyncio.Event()
        self._tasks: asyncio.TaskGroup
        self._grace: asyncio.Task[None] | None = None  # runs while the node drains
        self._folder = Path(tempfile.mkdtemp(prefix="pdrt-node-"))  # mode 0700: sockets
        self.side = make_side(role, config, self.disagg, key, self._news, time.time_ns())
        self.handles = [
            WorkerHandle(Rank(dp=dp), self._maker(dp), self._folder, self._heard, time.monotonic)
            for dp in range(config.parallel.dp)
        ]
        lanes = [Lane(handle, self.side.told) for handle in self.handles]
        self.dispatcher = DPDispatcher(lanes, time.monotonic)

    async def live(self) -> int:
        """The exit status. Raises ConfigError when it cannot even begin."""
        try:
            async with AsyncExitStack() as stack:
                await self._bind(stack)
                self._step(Bound())
                self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
                living = [self._tasks.create_task(actor) for actor in self._actors()]
                self._listen_to_signals()
                await self._stopped.wait()
                for task in living:
                    task.cancel()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self.state is NodeState.FAILED:
            self._log.error("node_failed", reason=self.reason)
            return 1
        return 0

    # Beginning.

    async def _bind(self, stack: AsyncExitStack) -> None:
        """Every address is taken before any worker is started."""
        host, ports = self.disagg.local_ip, self.config.ports
        port = {"prefill": ports.prefill, "decode": ports.decode, "hybrid": ports.hybrid}[self.role]
        runner, port = await listen(make_app(self._leader()), host, port, _CLOSE_S)
        stack.push_async_callback(runner.cleanup)
        url = f"http://{bracketed(host)}:{port}"
        await self.side.bind(stack, url)
        if self.side.bootstrap is not None:
            self.disagg = self.disagg.model_copy(update={"bootstrap_port": self.side.bootstrap[1]})
        self._log.info("listening", url=url, role=self.role, model=self.model)

    def _actors(self) -> list[Coroutine[Any, Any, None]]:
        own = [self.run(), self._tick(), self._after(self.config.timeouts.startup_s, TooLate())]
        return [*(handle.run() for handle in self.handles), *self.side.actors(), *own]

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
            drain=self._drain,
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
            loop.add_signal_handler(number, self.tell, DrainWanted())

    # What comes in.

    def _heard(self, handle: WorkerHandle, message: FromWorker | Lost) -> None:
        self.tell(Said(handle, message))

    def _news(self, news: News) -> None:
        is_bad = news.health in (Health.SUSPECT, Health.DEAD)
        log = self._log.warning if is_bad else self._log.info
        log("peer", peer=news.peer, health=str(news.health), reason=news.reason)

    async def on(self, message: Mail) -> None:
        match message:
            case Said(handle, said):
                self._said(handle, said)
            case Tick():
                self._look()
            case DrainWanted():
                if self.state is NodeState.DRAINING:
                    self.tell(GraceOver())  # asked twice: somebody is in a hurry
                self._drain()
            case GraceOver():
                if self.state is NodeState.DRAINING:
                    self._log.warning("drain_cut_short", rooms=self.dispatcher.load().rooms)
                    self._end(Drained())
            case TooLate():
                if self.state in (NodeState.LOADING, NodeState.REGISTERING) and not self.fault_at:
                    within = f"{self.config.timeouts.startup_s:g} s"
                    self._give_up(f"not ready after {within}: {self.why_not_ready()}")

    def _said(self, handle: WorkerHandle, said: FromWorker | Lost) -> None:
        match said:
            case messages.Outputs(items=items):
                self.dispatcher.deliver(handle.rank.dp, said)
                for item in items:
                    if item.finish or item.problem:
                        self.side.ended(item.room)
            case messages.AskPrefill():
                self._tasks.create_task(self._prefill_again(handle, said))
            case messages.Loading():
                self._tell_loading(handle, said)
            case messages.Ready(blocks=blocks, endpoint=endpoint):
                rank = str(handle.rank)
                self._log.info("worker_ready", worker=rank, blocks=blocks, endpoint=endpoint)
                self._look()
            case Lost():
                self._lost(handle, said)
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
        self.side.lost(handle.rank)
        self._step(WorkerGone())
        if lost.final:
            self._give_up(f"worker {handle.rank} died too often: {lost.problem.message}")

    async def _prefill_again(self, handle: WorkerHandle, wanted: messages.AskPrefill) -> None:
        try:
            await self.side.prefill_again(wanted)
        except PdrtError as error:
            self._log.warning("reprefill_failed", room=wanted.room, reason=str(error))
            if handle.ready is not None:
                handle.tell(messages.ResumeLocally(room=wanted.room))

    # Life.

    def _step(self, event: object) -> None:
        before = self.state
        self.state, _ = NODE.step(before, self, event)
        if self.state is not before:
            self._log.info("node", state=str(self.state), was=str(before))

    def _look(self) -> None:
        """Move on when what the node waits for has come."""
        self.dispatcher.catch_up()
        if self.state is NodeState.LOADING and all(h.ready is not None for h in self.handles):
            self._step(AllLoaded())
        if self.state is NodeState.REGISTERING and not self.side.missing():
            self._step(AllRegistered())
            if self.role == "hybrid":
                self._tasks.create_task(self._self_test())
        if self.state is NodeState.DRAINING and not self.dispatcher.load().rooms:
            self._end(Drained())

    async def _tick(self) -> NoReturn:
        while True:
            self.turned_at = time.monotonic()
            self.tell(Tick())
            await asyncio.sleep(_TICK_S)

    async def _after(self, seconds: float, mail: Mail) -> None:
        await asyncio.sleep(seconds)
        self.tell(mail)

    def _drain(self) -> None:
        """No new work; end when what is running has finished, or when the grace is over."""
        if self.state in _OVER:
            return
        self._step(DrainAsked())
        self.dispatcher.drain()
        self._grace = self._tasks.create_task(
            self._after(self.config.timeouts.drain_s, GraceOver())
        )

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._end(GaveUp(reason))

    def _end(self, event: Drained | GaveUp) -> None:
        self._step(event)
        if self._grace is not None:
            self._grace.cancel()
        self._tasks.create_task(self._stop_workers())

    async def _stop_workers(self) -> None:
        await asyncio.gather(*(handle.stop() for handle in self.handles))
        self._stopped.set()

    async def _self_test(self) -> None:
        if reason := await self_test(self.dispatcher, [h.rank.dp for h in self.handles]):
            self._log.warning("self_test_failed", reason=reason)
        else:
            self._served()

    # What is shown.

    def _pool_tokens(self) -> int:
        """Tokens that the smallest ready pool holds; 0 while none is known."""
        ready = [handle.ready for handle in self.handles if handle.ready is not None]
        return min((r.blocks * r.layout.block_size for r in ready), default=0)

    def _served(self) -> None:
        self.served_since_fault = True

    def why_not_ready(self) -> str:
        """What keeps a request from succeeding, or nothing."""
        if self.state is not NodeState.READY:
            states = [f"worker {h.rank} is {h.state}" for h in self.handles if h.ready is None]
            return "; ".join([f"the node is {self.state}", *states, *self.side.missing()])
        if not self.served_since_fault:
            return "no request has succeeded since the start or the last fault"
        return ""

    def health(self) -> Json:
        return {
            "role": self.role,
            "state": str(self.state),
            "workers": [worker_health(handle) for handle in self.handles],
            "peers": {p.name: f"{p.health}: {p.reason}".rstrip(": ") for p in self.side.peers()},
        }

    def status(self) -> Json:
        now, bootstrap = time.monotonic(), self.side.bootstrap
        return {
            "role": self.role,
            "state": str(self.state),
            "model": self.model,
            "instance_epoch": self.side.epoch,
            "bootstrap_host": bootstrap[0] if bootstrap else None,
            "bootstrap_port": bootstrap[1] if bootstrap else None,
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
        return await Node(role, config, place, key).live()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(live())
