"""A node that only runs workers: what its supervisor, and operators, have in a leader's stead."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry

from pdrt.config import Role
from pdrt.control.api import STALL_S
from pdrt.control.figures import worker_health, worker_status
from pdrt.control.heartbeat import Watched
from pdrt.control.http import (
    Json,
    add_request_id,
    check_bearer,
    error_middleware,
    metrics_response,
)
from pdrt.control.lives import NodeState
from pdrt.control.parts import Parts
from pdrt.control.uplink import Uplink
from pdrt.keys import ClusterKey
from pdrt.messages import AskPrefill, Outputs, Problem, Rank, ToWorker

_OPEN = frozenset({"/health", "/ready", "/metrics"})


class LedSide:
    """Implements Side: the leader has what a role's leader has."""

    bootstrap: tuple[str, int] | None = None

    def __init__(self, uplink: Uplink, epoch: int) -> None:
        self._uplink, self.epoch = uplink, epoch

    async def bind(self, _stack: AsyncExitStack, _url: str) -> None: ...

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        return [self._uplink.run()]

    def told(self, _rank: Rank, _message: ToWorker) -> None: ...

    def ended(self, _room: int, _attempt: int) -> None: ...

    def lost(self, _rank: Rank, is_dead: bool = True) -> None: ...

    async def prefill_again(self, wanted: AskPrefill) -> None:
        """The leader heard it too."""

    def missing(self) -> Sequence[str]:
        return [self._uplink.absence] if self._uplink.absence else []

    def peers(self) -> Sequence[Watched]:
        return ()


class LedWork:
    """Implements Work: requests are the leader's, who hears all that concerns them."""

    def __init__(self, uplink: Uplink) -> None:
        self._uplink = uplink

    @property
    def rooms(self) -> int:
        return self._uplink.rooms

    tokens = 0  # its leader counts them
    is_full = False

    @property
    def is_idle(self) -> bool:
        return self._uplink.is_idle

    def is_in_flight(self, _room: int) -> bool:
        return True  # as far as we know

    def deliver(self, _dp_rank: int, _outputs: Outputs) -> None: ...

    def worker_lost(
        self, _dp_rank: int, _problem: Problem, *, is_head_alive: bool = False
    ) -> None: ...

    def abort(self, _room: int, _reason: str) -> None: ...

    def resume_locally(self, _room: int, _of_room: int = -1) -> None: ...

    def drain(self) -> None:
        self._uplink.leave()

    def catch_up(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """What it shows of itself."""

    role: Role
    name: str
    leader: str
    parts: Parts
    key: ClusterKey
    registry: CollectorRegistry
    clock: Callable[[], float]
    drain: Callable[[], None]

    def why_not_ready(self) -> str:
        condition, missing = self.parts.condition, self.parts.side.missing()
        if condition.state is NodeState.READY:
            return "; ".join(missing)
        absent = [f"{h.name} is {h.state}" for h in self.parts.handles if not h.ready]
        return "; ".join([f"the node is {condition.state}", *absent, *missing])

    def health(self) -> Json:
        return {
            "role": self.role,
            "node": self.name,
            "leader": self.leader,
            "state": str(self.parts.condition.state),
            "workers": [worker_health(handle) for handle in self.parts.handles],
            "missing": list(self.parts.side.missing()),
        }

    def status(self) -> Json:
        now = self.clock()
        workers = [worker_status(handle, now) for handle in self.parts.handles]
        return self.health() | {"rooms": self.parts.work.rooms, "workers": workers}

    def stalled_s(self) -> float:
        return self.clock() - self.parts.condition.turned_at


def make_app(node: WorkerNode) -> web.Application:
    """Health for everybody, the rest for the cluster; requests go to the leader."""
    app = web.Application(middlewares=[error_middleware(node.role), _allow(node.key)])

    async def health(_request: web.Request) -> web.Response:
        stalled = node.stalled_s()
        is_alive = stalled < STALL_S
        body = {"status": "ok" if is_alive else f"stalled for {stalled:.1f} s"}
        return web.json_response(body | node.health(), status=200 if is_alive else 503)

    async def ready(_request: web.Request) -> web.Response:
        if reason := node.why_not_ready():
            return web.json_response({"ready": False, "reason": reason}, status=503)
        return web.json_response({"ready": True})

    async def metrics(_request: web.Request) -> web.Response:
        return metrics_response(node.registry)

    async def status(_request: web.Request) -> web.Response:
        return web.json_response(node.status())

    async def drain(_request: web.Request) -> web.Response:
        node.drain()
        work = node.parts.work
        is_idle, rooms = work.is_idle, work.rooms
        body: Json = {"status": "draining", "drained": is_idle, "rooms": rooms}
        return web.json_response(body, status=200 if is_idle else 202)

    app.on_response_prepare.append(add_request_id)
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/metrics", metrics),
            web.get("/internal/status", status),
            web.post("/admin/drain", drain),
        ]
    )
    return app


def _allow(key: ClusterKey) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in _OPEN:
            check_bearer(request, key)
        return await handler(request)

    return middleware
