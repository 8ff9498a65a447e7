"""The process of a node: it takes addresses, makes the parts and joins them.

One event loop: a handle for each device worker, the HTTP API with its dispatcher, what its
role's side brings (bootstrap server, heartbeat), and the supervisor that all of them tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import setproctitle
import structlog
import uvloop
from prometheus_client import CollectorRegistry, Histogram

from pdrt import telemetry
from pdrt.config import DisaggConfig, NodeConfig, Place, Role, bracketed, is_loopback
from pdrt.control.api import make_app
from pdrt.control.dispatch import DPDispatcher
from pdrt.control.figures import WorkerFigures
from pdrt.control.heartbeat import News, Time
from pdrt.control.http import listen
from pdrt.control.leader import Leader, Limits
from pdrt.control.lives import NodeState
from pdrt.control.parts import Condition, Handle, Hire, Parts, lanes
from pdrt.control.shown import Shown
from pdrt.control.sides import make_side
from pdrt.control.supervisor import DrainWanted, Said, Signalled, Supervisor
from pdrt.control.text import TextPool, open_text
from pdrt.control.worker_handle import Lost, WorkerHandle
from pdrt.data.installed import check_installed
from pdrt.data.peer import Health
from pdrt.errors import ConfigError, PeerLost, first_of
from pdrt.folder import PrivateFolder
from pdrt.keys import ClusterKey
from pdrt.messages import FromWorker, Rank
from pdrt.modelspec import ModelSpec
from pdrt.openfiles import allow_all
from pdrt.spawn import WorkerSpec

_DELAYS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 10)
_CLOSE_S: Final = 1.0  # for answers that are still open when the node has drained


class Node:
    """`live` is its life, from binding to the exit status."""

    def __init__(
        self,
        role: Role,
        config: NodeConfig,
        place: Place,
        key: ClusterKey,
        hire: Hire = WorkerHandle,
    ) -> None:
        self._config, self._key = config, key
        self._disagg = DisaggConfig.derive(role, config, place)
        self._spec = ModelSpec.read(config.model.path, config.model.max_model_len)
        self._log = structlog.get_logger()
        self._folder = PrivateFolder("pdrt-node-")  # for sockets
        own_time = Time(time.monotonic)
        side = make_side(role, config, self._disagg, key, self._news, time.time_ns())
        ranks = [
            Rank(dp=dp, tp=tp)
            for dp in range(config.parallel.dp)
            for tp in range(config.parallel.tp)
        ]
        handles = [
            hire(rank, self._maker(role, rank), self._folder.path, self._heard, own_time)
            for rank in ranks
        ]
        dispatcher = DPDispatcher(lanes(handles, side.told), time.monotonic)
        condition = Condition(turned_at=time.monotonic())
        self._parts = Parts(role, side, handles, dispatcher, condition)
        self._registry = CollectorRegistry()
        self._registry.register(WorkerFigures(handles))
        delay = Histogram(
            "pdrt_loop_delay_seconds",
            "How late the event loop came round",
            buckets=_DELAYS,
            registry=self._registry,
        )
        self._supervisor = Supervisor(
            self._parts, config.timeouts, own_time, time.time, delay.observe
        )

    async def live(self) -> int:
        """The exit status. Raises ConfigError when it cannot even begin."""
        try:
            async with AsyncExitStack() as stack:
                self._listen_to_signals(stack)
                await self._bind(stack)
                telemetry.settle()
                async with asyncio.TaskGroup() as tasks:
                    living = [tasks.create_task(each) for each in self._parts.side.actors()]
                    await self._supervisor.run()
                    for task in living:
                        task.cancel()
        except ExceptionGroup as group:  # the shell: whatever it was, it is told, and we end
            self._log.error("node_failed", exc_info=first_of(group))
            return 1
        finally:
            self._folder.close()
        condition = self._parts.condition
        if condition.state is NodeState.FAILED:
            self._log.error("node_failed", reason=condition.reason)
            return 1
        return 0

    async def _bind(self, stack: AsyncExitStack) -> None:
        """Every address is taken before any worker is started."""
        role, side, ports = self._parts.role, self._parts.side, self._config.ports
        host = self._disagg.local_ip
        port = {"prefill": ports.prefill, "decode": ports.decode, "hybrid": ports.hybrid}[role]
        text = TextPool(open_text(self._config.model.path))
        stack.callback(text.close)
        leader = self._leader(text)
        runner, port = await listen(make_app(leader), host, port, _CLOSE_S)
        stack.push_async_callback(runner.cleanup)
        url = f"http://{bracketed(host)}:{port}"
        await side.bind(stack, url)
        if side.bootstrap is not None:
            told = {"bootstrap_port": side.bootstrap[1]}
            self._disagg = self._disagg.model_copy(update=told)
        self._log.info("listening", url=url, role=role, model=leader.model)

    def _leader(self, text: TextPool) -> Leader:
        config, parts = self._config, self._parts
        model = config.model.name or Path(config.model.path).name
        shown = Shown(parts, model, self._spec.max_model_len, time.monotonic)
        return Leader(
            role=parts.role,
            model=model,
            dispatcher=parts.dispatcher,
            text=text,
            limits=Limits(
                max_model_len=self._spec.max_model_len,
                vocab=self._spec.vocab,
                pool_tokens=shown.pool_tokens,
                max_body_bytes=config.security.max_body_bytes,
                request_s=config.timeouts.request_s,
            ),
            key=self._key,
            registry=self._registry,
            status=shown.status,
            why_not_ready=shown.why_not_ready,
            health=shown.health,
            stalled_s=shown.stalled_s,
            served=parts.condition.served,
            drain=lambda: self._supervisor.tell(DrainWanted()),
            api_keys=config.security.api_keys,
        )

    def _maker(self, role: Role, rank: Rank) -> Callable[[str], WorkerSpec]:
        """What makes the spec of each of a worker's lives."""

        def make(endpoint: str) -> WorkerSpec:
            return WorkerSpec(
                role=role,
                rank=rank,
                config=self._config,
                disagg=self._disagg,
                key_hex=self._key.secret.hex(),
                endpoint=endpoint,
                epoch=time.time_ns(),
            )

        return make

    # What the parts hear, the supervisor is told.

    def _listen_to_signals(self, stack: AsyncExitStack) -> None:
        """From the first moment on: one that comes while we bind must not leave files."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
            stack.callback(loop.remove_signal_handler, number)

    def _signalled(self) -> None:
        with contextlib.suppress(PeerLost):  # all is being wound up already
            self._supervisor.tell(Signalled())

    def _heard(self, handle: Handle, message: FromWorker | Lost) -> None:
        self._supervisor.tell(Said(handle, message))

    def _news(self, news: News) -> None:
        is_bad = news.health in (Health.SUSPECT, Health.DEAD)
        log = self._log.warning if is_bad else self._log.info
        log("peer", peer=news.peer, health=str(news.health), reason=news.reason)


def check_served(role: Role, config: NodeConfig, place: Place) -> None:
    """Raises ConfigError for what this version or this host does not serve, or the model cannot."""
    parallel = config.parallel
    if parallel.cp != 1:
        raise ConfigError(f"[parallel] cp = {parallel.cp}: this version serves cp = 1 only")
    if parallel.nodes_per_instance != 1:
        raise ConfigError(
            f"[parallel] world_size = {parallel.world_size}, devices_per_node ="
            f" {parallel.devices_per_node}: this version serves instances of one node only"
        )
    if not place.is_leader:
        raise ConfigError(f"a {role} node that is no leader has nothing to do in this version")
    if role != "hybrid":
        check_installed(config.transfer)
    path = config.model.path
    ModelSpec.read(path, config.model.max_model_len).check_tp(parallel.tp, path)


def main(role: Role, config: NodeConfig, node_index: int = 0) -> int:
    """Run one node in this process; its exit status. Raises ConfigError."""
    telemetry.configure(config.log.level, config.log.format, process=role)
    allow_all()
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
