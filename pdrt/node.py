"""The process of a node: it takes addresses, makes the parts and joins them.

One event loop: a handle for each device worker, the HTTP API with its dispatcher, what its
role's side brings (bootstrap server, heartbeat), and the supervisor that all of them tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

import setproctitle
import structlog
import uvloop
from prometheus_client import CollectorRegistry, Histogram

from pdrt import garbage, telemetry
from pdrt.config import DisaggConfig, NodeConfig, Place, Role, bracketed, is_loopback
from pdrt.control.figures import WorkerFigures
from pdrt.control.heartbeat import News, Time
from pdrt.control.http import listen
from pdrt.control.lives import NodeState
from pdrt.control.parts import Handle, Hire
from pdrt.control.supervisor import DrainWanted, Said, Signalled, Supervisor
from pdrt.control.worker_handle import Lost, WorkerHandle
from pdrt.data.installed import check_installed
from pdrt.data.peer import Health
from pdrt.errors import ConfigError, PeerLost, first_of
from pdrt.folder import PrivateFolder
from pdrt.fronts import Front, Lead, Led, Setting
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
        self._config, self._key, self._hire = config, key, hire
        self._disagg = DisaggConfig.derive(role, config, place)
        spec = ModelSpec.of(config.model)
        self._setting = Setting(role, config, place, key, self._disagg, spec, time.time_ns())
        self._log = structlog.get_logger()
        self._folder = PrivateFolder("pdrt-node-")  # for sockets
        self._front = self._make_front(place)
        self._parts = self._front.parts
        self._registry = CollectorRegistry()
        self._registry.register(WorkerFigures(self._parts.handles))
        delay = Histogram(
            "pdrt_loop_delay_seconds",
            "How late the event loop came round",
            buckets=_DELAYS,
            registry=self._registry,
        )
        own_time = Time(time.monotonic)
        self._supervisor = Supervisor(
            self._parts, config.timeouts, own_time, time.time, delay.observe
        )

    def _make_front(self, place: Place) -> Front:
        def hired(rank: Rank) -> Handle:
            own_time = Time(time.monotonic)
            return self._hire(rank, self._maker(rank), self._folder.path, self._heard, own_time)

        if place.is_leader:
            return Lead(self._setting, hired, self._tell, self._news)
        return Led(self._setting, hired)

    async def live(self) -> int:
        """The exit status. Raises ConfigError when it cannot even begin."""
        try:
            async with AsyncExitStack() as stack:
                self._listen_to_signals(stack)
                await self._bind(stack)
                garbage.settle()
                async with asyncio.TaskGroup() as tasks:
                    living = [tasks.create_task(each) for each in self._front.actors()]
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
        setting, side, host = self._setting, self._parts.side, self._disagg.local_ip
        app = self._front.app(stack, self._registry, self._drain)
        runner, port = await listen(app, host, setting.port, _CLOSE_S)
        stack.push_async_callback(runner.cleanup)
        url = f"http://{bracketed(host)}:{port}"
        await side.bind(stack, url)
        if side.bootstrap is not None:
            told = {"bootstrap_port": side.bootstrap[1]}
            self._disagg = self._disagg.model_copy(update=told)
        self._front.bound(url, stack)
        backend = setting.spec.backend
        self._log.info(
            "listening", url=url, role=setting.role, model=setting.model, backend=backend
        )

    def _drain(self) -> None:
        self._supervisor.tell(DrainWanted())

    def _maker(self, rank: Rank) -> Callable[[str], WorkerSpec]:
        """What makes the spec of each of a worker's lives."""
        setting = self._setting

        def make(endpoint: str) -> WorkerSpec:
            return WorkerSpec(
                role=setting.role,
                rank=rank,
                config=self._config,
                disagg=self._disagg,
                key_hex=self._key.secret.hex(),
                endpoint=endpoint,
                epoch=time.time_ns(),
                node=setting.number,
                leader=setting.leader,
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
        self._front.heard(handle, message)
        self._tell(handle, message)

    def _tell(self, handle: Handle, message: FromWorker | Lost) -> None:
        self._supervisor.tell(Said(handle, message))

    def _news(self, news: News) -> None:
        is_bad = news.health in (Health.SUSPECT, Health.DEAD)
        log = self._log.warning if is_bad else self._log.info
        log("peer", peer=news.peer, health=str(news.health), reason=news.reason)


def check_served(role: Role, config: NodeConfig, place: Place) -> None:
    """Raises ConfigError for what this version or this host does not serve, or the model cannot."""
    parallel = config.parallel
    if parallel.cp != 1 and role != "prefill":
        raise ConfigError(
            f"[parallel] cp = {parallel.cp}: a {role} instance has cp = 1; only prefill shares the"
            " rows of prompts"
        )
    if parallel.nodes_per_instance > 1:
        _check_reachable(role, config, place)
    if role != "hybrid":
        check_installed(config.transfer)
    path = config.model.path
    ModelSpec.of(config.model).check_tp(parallel.tp, path)


def _check_reachable(role: Role, config: NodeConfig, place: Place) -> None:
    """Raises ConfigError where an instance's nodes would not find their leader."""
    ports, parallel = config.ports, config.parallel
    needed = {"prefill": ("prefill", "bootstrap")}.get(role, (role,))
    for name in needed:
        if getattr(ports, name) == 0:
            raise ConfigError(
                f"[ports] {name} = 0: the nodes of an instance must know their leader's port"
            )
    if not parallel.ips:
        raise ConfigError(
            f"[parallel] ips is empty: name the {parallel.nodes_per_instance} nodes of an instance"
        )
    own = parallel.ips[place.node_index]
    if place.is_leader and parallel.local_ip != own and _is_address(own):
        raise ConfigError(
            f"[parallel] local_ip = {parallel.local_ip!r}: the other nodes look for this leader at"
            f" {own}, as ips says"
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
