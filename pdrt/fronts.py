"""What a node is to the outside: the leader of an instance, or a node that runs workers for one.

Both have parts for the supervisor, an HTTP API, and actors beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from aiohttp import ClientSession, web
from prometheus_client import CollectorRegistry

from pdrt import grid
from pdrt.config import DisaggConfig, NodeConfig, Place, Role, bracketed
from pdrt.control import api, worker_node
from pdrt.control.dispatch import DPDispatcher
from pdrt.control.grammarcheck import GrammarCheck
from pdrt.control.heartbeat import Tell, Time
from pdrt.control.keydoor import KeyDoor
from pdrt.control.leader import Leader, Limits
from pdrt.control.leader_client import LeaderClient
from pdrt.control.leases import Registration
from pdrt.control.membership import Registrar
from pdrt.control.nodes import Board, FarNode, Nodes
from pdrt.control.nodes_http import add_routes
from pdrt.control.order import PATHS
from pdrt.control.parts import Condition, Handle, Parts, lanes
from pdrt.control.reload import watch
from pdrt.control.router_client import RouterClient
from pdrt.control.selftest import self_test
from pdrt.control.shown import Shown
from pdrt.control.sides import Side, make_side
from pdrt.control.text import TextPool, open_text
from pdrt.control.traces import Tracing
from pdrt.control.tracing import open_tracing
from pdrt.control.uplink import Uplink
from pdrt.control.worker_handle import Lost
from pdrt.control.worker_node import LedSide, LedWork, WorkerNode
from pdrt.curve import CurveContext
from pdrt.keys import ClusterKey
from pdrt.messages import FromWorker, NodeHello, NodeWelcome, Rank
from pdrt.modelspec import ModelSpec

Drain: TypeAlias = Callable[[], None]
Heard: TypeAlias = Callable[[Handle, "FromWorker | Lost"], None]
HireLocal: TypeAlias = Callable[[Rank], Handle]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a node is told to be."""

    role: Role
    config: NodeConfig
    place: Place
    key: ClusterKey
    disagg: DisaggConfig
    spec: ModelSpec
    epoch: int

    @property
    def port(self) -> int:
        ports = self.config.ports
        by_role = {"prefill": ports.prefill, "decode": ports.decode, "hybrid": ports.hybrid}
        return by_role[self.role]

    @property
    def is_alone(self) -> bool:
        return self.config.parallel.nodes_per_instance == 1

    @property
    def number(self) -> int:
        """Of the node in its instance; the leader is 0."""
        return self.place.node_index % self.config.parallel.nodes_per_instance

    @property
    def leader(self) -> str:
        """Where the leader's API is."""
        return f"http://{bracketed(self.place.leader_ip)}:{self.port}"

    @property
    def model(self) -> str:
        """What clients call it."""
        return self.config.model.name or Path(self.config.model.path).name

    def must_agree(self) -> Mapping[str, str]:
        """What a worker node and its leader must have alike; tp groups compare more themselves."""
        config, parallel = self.config, self.config.parallel
        sizes = ("world_size", "tp", "cp", "dp", "devices_per_node")
        return {
            "role": self.role,
            **{f"[parallel] {name}": str(getattr(parallel, name)) for name in sizes},
            "[parallel] ips": ", ".join(parallel.ips)[:400],
            "[model] name": self.model[:400],
            "[model] max_model_len": str(self.spec.max_model_len),
            "[model] dtype": config.model.dtype,
            "[model] backend": self.spec.backend,
            "the model": f"{self.spec.architecture}, vocabulary {self.spec.vocab}"[:400],
            "[scheduler] block_size": str(config.scheduler.block_size),
        }


class Front(Protocol):
    """`made` is set before the supervisor runs; `heard` comes before it is told."""

    parts: Parts

    def heard(self, handle: Handle, message: FromWorker | Lost) -> None: ...

    def app(
        self, stack: AsyncExitStack, registry: CollectorRegistry, drain: Drain
    ) -> web.Application: ...

    def bound(self, url: str, stack: AsyncExitStack) -> None:
        """All addresses are taken; the API's is told."""
        ...

    def actors(self) -> list[Coroutine[Any, Any, None]]: ...


class Lead:
    """The leader's; `heard` of its other nodes' workers is for `told`."""

    def __init__(self, setting: Setting, hire: HireLocal, told: Heard, tell: Tell) -> None:
        self._setting = setting
        role, config, parallel = setting.role, setting.config, setting.config.parallel
        side = make_side(role, config, setting.disagg, setting.key, tell, setting.epoch)
        self._net: CurveContext | None = None
        self._registrar: Registrar | None = None
        self._keydoor: KeyDoor | None = None
        self._tracing: Tracing | None = None
        self._nodes = self._others(Time(time.monotonic))
        self._nodes.hear(told)
        self._board = Board(time.monotonic, parallel.dp)
        handles: list[Handle] = [
            hire(rank) if grid.node_of(parallel, rank) == 0 else self._nodes.rank(rank)
            for rank in grid.all_ranks(parallel)
        ]
        self._dispatcher = dispatcher = DPDispatcher(
            lanes(handles, side.told), time.monotonic, is_prefill=role == "prefill"
        )
        self._nodes.is_idle = dispatcher.is_idle_on
        dp_ranks = sorted({handle.rank.dp for handle in handles})
        self.parts = Parts(
            role,
            side,
            handles,
            dispatcher,
            Condition(turned_at=time.monotonic()),
            self._nodes,
            (lambda: self_test(dispatcher, dp_ranks)) if role == "hybrid" else None,
        )

    def _others(self, own_time: Time) -> Nodes:
        setting, parallel = self._setting, self._setting.config.parallel
        nodes: dict[int, FarNode] = {}
        if not setting.is_alone:
            self._net = net = CurveContext(setting.key, setting.disagg.local_ip)
            for number in range(1, parallel.nodes_per_instance):
                address = grid.address_of(parallel, setting.place.instance, number)
                ranks = grid.ranks_on(parallel, number)
                nodes[number] = FarNode(number, address, ranks, net, own_time)
        return Nodes(nodes, setting.must_agree(), setting.epoch)

    def heard(self, handle: Handle, message: FromWorker | Lost) -> None: ...

    def app(
        self, stack: AsyncExitStack, registry: CollectorRegistry, drain: Drain
    ) -> web.Application:
        if self._net is not None:
            stack.callback(self._net.close)
        self._keydoor = self._keydoor_of(registry)
        self._tracing = self._open_tracing(stack)
        text = TextPool(open_text(self._setting.config.model.path))
        stack.callback(text.close)
        app = api.make_app(self._leader(text, registry, drain))
        add_routes(app, self._nodes, self._board)
        return app

    def _open_tracing(self, stack: AsyncExitStack) -> Tracing | None:
        setting = self._setting
        instance = f"{bracketed(setting.disagg.local_ip)}:{setting.port}"
        service = f"pdrt-{setting.role}"
        tracing = open_tracing(setting.config.telemetry, service, instance)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        return tracing

    def _keydoor_of(self, registry: CollectorRegistry) -> KeyDoor | None:
        """Only a hybrid instance has clients."""
        if self._setting.role != "hybrid":
            return None
        security = self._setting.config.security
        return KeyDoor(security, registry, time.monotonic, (), PATHS)

    def _leader(self, text: TextPool, registry: CollectorRegistry, drain: Drain) -> Leader:
        setting, parts = self._setting, self.parts
        config, spec = setting.config, setting.spec
        takes_prompts = parts.role == "decode" and config.scheduler.local_prefill
        shown = Shown(
            parts,
            setting.model,
            spec.max_model_len,
            time.monotonic,
            takes_prompts,
            config.scheduler.max_waiting,
        )
        return Leader(
            role=parts.role,
            model=setting.model,
            dispatcher=self._dispatcher,
            text=text,
            grammars=GrammarCheck(config.model.path, spec.vocab, spec.eos_token_ids),
            limits=Limits(
                max_model_len=spec.max_model_len,
                vocab=spec.vocab,
                pool_tokens=shown.pool_tokens,
                max_body_bytes=config.security.max_body_bytes,
                request_s=config.timeouts.request_s,
            ),
            key=setting.key,
            registry=registry,
            status=shown.status,
            why_not_ready=shown.why_not_ready,
            health=shown.health,
            stalled_s=shown.stalled_s,
            served=parts.condition.served,
            drain=drain,
            takes_prompts=takes_prompts,
            keydoor=self._keydoor,
            tracing=self._tracing,
        )

    def bound(self, url: str, stack: AsyncExitStack) -> None:
        config, parts = self._setting.config, self.parts
        if not config.router.urls:
            return
        session = ClientSession()
        stack.push_async_callback(session.close)
        client = RouterClient(session, self._setting.key, config.timeouts.connect_s)
        host, port = parts.side.bootstrap or ("", 0)

        def current() -> Registration:
            return Registration(
                role=parts.role,
                http=url,
                bootstrap=f"{bracketed(host)}:{port}" if host else "",
                instance_epoch=parts.side.epoch,
            )

        urls, leaving = config.router.urls, parts.condition.leaving
        self._registrar = Registrar(urls, client.register, leaving, current)
        stack.push_async_callback(self._registrar.say_goodbye)

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        nodes = [self._nodes.run(self._net)] if self._net is not None else []
        registrar = [self._registrar.run()] if self._registrar is not None else []
        reloads = self._keydoor.reloads if self._keydoor is not None else []
        return [*self.parts.side.actors(), *nodes, *registrar, watch(reloads)]


class Led:
    """A worker node's; its leader hears what its workers say."""

    def __init__(self, setting: Setting, hire: HireLocal) -> None:
        self._setting = setting
        self._net = CurveContext(setting.key, setting.disagg.local_ip)
        where = f"leader {setting.leader.removeprefix('http://')}"
        self._uplink = Uplink(where, self._join, self._net, Time(time.monotonic))
        handles = [hire(rank) for rank in grid.ranks_on(setting.config.parallel, setting.number)]
        self._uplink.serve(handles)
        side: Side = LedSide(self._uplink, setting.epoch)
        condition = Condition(turned_at=time.monotonic())
        self.parts = Parts(setting.role, side, handles, LedWork(self._uplink), condition)
        self._session: ClientSession

    def heard(self, handle: Handle, message: FromWorker | Lost) -> None:
        self._uplink.heard(handle, message)

    def app(
        self, stack: AsyncExitStack, registry: CollectorRegistry, drain: Drain
    ) -> web.Application:
        setting = self._setting
        stack.callback(self._net.close)
        self._session = ClientSession()
        stack.push_async_callback(self._session.close)
        name = f"node {setting.number} ({setting.disagg.local_ip})"
        shown = WorkerNode(
            role=setting.role,
            name=name,
            leader=setting.leader,
            parts=self.parts,
            key=setting.key,
            registry=registry,
            clock=time.monotonic,
            drain=drain,
        )
        return worker_node.make_app(shown)

    def bound(self, url: str, stack: AsyncExitStack) -> None: ...

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        return self.parts.side.actors()

    async def _join(self) -> NodeWelcome:
        setting = self._setting
        connect_s = setting.config.timeouts.connect_s
        client = LeaderClient(self._session, setting.leader, setting.key, connect_s)
        return await client.join(
            NodeHello(
                node=setting.number,
                epoch=setting.epoch,
                http=f"http://{bracketed(setting.disagg.local_ip)}:{setting.port}",
                settings=dict(setting.must_agree()),
            )
        )
