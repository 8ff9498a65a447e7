"""The router's handlers: each client request becomes one relay, under bounds and with a key.

The fleet is watched and tried in the background for as long as the application lives.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from pdrt.config import RouterConfig
from pdrt.control import order
from pdrt.control.canary import try_pairs
from pdrt.control.claims import claimed
from pdrt.control.client import HttpClient
from pdrt.control.fleet import Fleet
from pdrt.control.http import (
    PATH_HEADER,
    REQUEST_ID,
    Json,
    check_bearer,
    error_response,
    has_api_key,
    metrics_response,
    read_json,
    request_id_of,
)
from pdrt.control.job import Job, OrderJob, PlainJob
from pdrt.control.legs import Failure
from pdrt.control.relay import Clocks, Relay, Ticket, Tools
from pdrt.control.routermetrics import RouterMetrics
from pdrt.control.upstream import Upstream, open_session
from pdrt.errors import Draining, NotFound, Overloaded, PdrtError, Unauthorized
from pdrt.keys import ClusterKey

STAGE: Final = "router"
NO_PATH: Final = "none"  # refused before any instance was chosen
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/admin/drain"})

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """A client's body, understood."""

    job: Job
    client_room: int | None
    pin: order.Pin | None
    timeout_s: float | None


@dataclass(slots=True)
class Router:
    """State of one router process. `tools` is there while the application runs."""

    config: RouterConfig
    key: ClusterKey | None  # None: plain backends
    clocks: Clocks
    mint_room: Callable[[], int]
    fleet: Fleet
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    tools: Tools | None = None
    watching: asyncio.Task[None] | None = None
    relays: set[Relay] = field(default_factory=set)
    rooms: set[int] = field(default_factory=set)  # idempotency keys of requests in flight
    draining: bool = False
    admitted: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    drain_asked: asyncio.Event = field(default_factory=asyncio.Event)
    said_ready: bool = False

    # Life.

    async def lifetime(self, _app: web.Application) -> AsyncIterator[None]:
        """For `app.cleanup_ctx`: connections and watchers live exactly as long as the app."""
        timeouts = self.config.timeouts
        async with open_session(timeouts.connect_s) as session:
            bearer = self.key.bearer() if self.key else ""
            self.tools = Tools(
                fleet=self.fleet,
                upstream=Upstream(session, bearer),
                key=self.key,
                mint_room=self.mint_room,
                clocks=self.clocks,
                rebind_grace_s=timeouts.rebind_grace_s,
            )
            self.fleet.told = self._tell
            self.watching = asyncio.create_task(self._watch(self.tools))
            yield
            self.watching.cancel()
            with suppress(asyncio.CancelledError):
                await self.watching

    async def _watch(self, tools: Tools) -> None:
        probe = tools.upstream.plain_status if tools.is_plain else tools.upstream.status
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.fleet.run(probe))
                if self.config.policy.canary:
                    tasks.create_task(try_pairs(tools, self.config.timeouts.heartbeat_s))
        except Exception:
            log.exception("watching_failed")
            raise

    def _tell(self) -> None:
        if self.fleet.is_ready and not self.said_ready:
            log.info("ready", pairs=[pair.name for pair in self.fleet.pairs if pair.is_routable])
        self.said_ready = self.fleet.is_ready

    async def watched_over(self) -> None:
        """Returns when the watchers have ended, which is a fault of ours."""
        if self.watching is not None:
            await asyncio.wait([self.watching])

    async def drain(self, within_s: float) -> None:
        """Take no new requests, let the running ones finish, cut what is left by then."""
        self.draining = True
        self._look_idle()
        try:
            async with asyncio.timeout(within_s):
                await self.idle.wait()
        except TimeoutError:
            self.cut()

    def cut(self) -> None:
        """End what still runs, each with a typed error."""
        log.warning("drain_cut", requests=self.admitted)
        for relay in tuple(self.relays):
            relay.call_off(Draining("the router has ended"))

    # One request.

    async def serve(self, request: web.Request) -> web.StreamResponse:
        started = self.clocks.clock()
        try:
            with self._admission():
                body = await read_json(request, self.config.security.max_body_bytes)
                read = self._read(request, body)
                with claimed(self.rooms, read.client_room):
                    return await self._relay(request, read, started)
        except PdrtError as error:
            self.metrics.errors.labels(error.code).inc()
            raise

    async def _relay(self, request: web.Request, read: _Read, started: float) -> web.StreamResponse:
        assert self.tools is not None, "requests come while the application runs"
        pinned = self.fleet.pinned(read.pin) if read.pin else None
        ticket = Ticket(
            request_id=request_id_of(request),
            path=request.path,
            job=read.job,
            deadline=started + (read.timeout_s or self.config.timeouts.request_s),
            client_room=read.client_room,
            pinned=pinned,
        )
        client = HttpClient(request)
        relay = Relay(ticket, self.fleet.pick(pinned), self.tools, client)
        self.relays.add(relay)
        try:
            failure = await relay.run()
        finally:
            self.relays.discard(relay)
            self._account(relay, started)
        if client.response is not None:
            return client.response
        if failure is None:  # the client left; nobody reads this
            return web.Response(status=499)
        return _refusal(failure, ticket.request_id, relay.path_label)

    def _read(self, request: web.Request, body: Json) -> _Read:
        if self.key is None:
            plain = PlainJob(body)
            return _Read(plain, None, plain.pin, None)
        found = order.parse(order.PATHS[request.path], body)
        if found.request_id:
            request[REQUEST_ID] = found.request_id
        job = OrderJob(found, seed=secrets.randbits(63))
        return _Read(job, found.client_room, found.pin, found.timeout_s)

    @contextmanager
    def _admission(self) -> Iterator[None]:
        if self.draining:
            raise Draining("this router takes no new requests")
        limit = self.config.policy.max_in_flight
        if self.admitted >= limit:
            raise Overloaded(f"{limit} requests are in flight, which is the limit")
        self.admitted += 1
        try:
            yield
        finally:
            self.admitted -= 1
            self._look_idle()

    def _look_idle(self) -> None:
        if self.draining and not self.admitted:
            self.idle.set()

    def _account(self, relay: Relay, started: float) -> None:
        now = self.clocks.clock()
        self.metrics.duration.observe(now - started)
        if relay.first_byte_at is not None:
            self.metrics.first_byte.observe(relay.first_byte_at - started)
        self.metrics.retries.inc(relay.route.tries)
        failure = relay.failure
        if failure is not None:
            self.metrics.errors.labels(failure.error.code).inc()
        tell = log.warning if failure else log.info
        tell(
            "request",
            request_id=relay.ticket.request_id,
            room=relay.route.room,
            attempt=relay.route.attempt,
            outcome=relay.route.state,
            prefill=relay.choice.prefill.name if relay.choice.prefill else None,
            decode=relay.choice.decode.name,
            ms=round((now - started) * 1e3, 1),
            **({"error": str(failure.error), "story": list(relay.route.story)} if failure else {}),
        )

    # What it says of itself.

    async def health(self, _request: web.Request) -> web.Response:
        """Liveness: the loop turns and the instances are being watched."""
        if self.watching is not None and self.watching.done():
            return web.json_response({"status": "failed", "reason": "see the log"}, status=503)
        return web.json_response({"status": "ok", **self._state()})

    async def ready(self, _request: web.Request) -> web.Response:
        reason = "draining" if self.draining else self.fleet.why_not_ready()
        body = {"ready": not reason, "reason": reason, **self._state()}
        return web.json_response(body, status=503 if reason else 200)

    def _state(self) -> Json:
        return {
            "draining": self.draining,
            "in_flight": self.admitted,
            "instances": [
                {
                    "name": each.name,
                    "health": each.health,
                    "state": each.status.state if each.status else None,
                    "legs": each.load.requests,
                    "reason": each.why_not,
                }
                for each in self.fleet.instances
            ],
            "pairs": [
                {"name": pair.name, "trust": pair.trust, "reason": pair.reason}
                for pair in self.fleet.pairs
            ],
        }

    async def models(self, _request: web.Request) -> web.Response:
        said = [each.status for each in self.fleet.instances if each.status]
        names = sorted({status.model for status in said if status.model})
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "pdrt"} for name in names]
        return web.json_response({"object": "list", "data": data})

    async def metrics_text(self, _request: web.Request) -> web.Response:
        self.metrics.in_flight.set(self.admitted)
        self.metrics.ready.set(self.fleet.is_ready and not self.draining)
        for each in self.fleet.instances:
            self.metrics.instance_up.labels(each.name).set(each.is_routable)
            self.metrics.instance_requests.labels(each.name).set(each.load.requests)
        return metrics_response(self.metrics.registry)

    async def ask_drain(self, request: web.Request) -> web.Response:
        """POST /admin/drain: like SIGTERM, for those who hold the cluster key."""
        if self.key is None:
            raise NotFound("there is no cluster key, so nobody may do this over HTTP")
        check_bearer(request, self.key)
        self.draining = True
        self.drain_asked.set()
        return web.json_response({"status": "draining", "in_flight": self.admitted})

    # Around every request.

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource else "other"
        status, path = 499, NO_PATH
        try:
            response = await handler(request)
            status, path = response.status, response.headers.get(PATH_HEADER, NO_PATH)
            return response
        finally:
            self.metrics.requests.labels(route, str(status), path).inc()

    @web.middleware
    async def check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Clients' API keys, when there are any."""
        keys = self.config.security.api_keys
        if keys and request.path not in OPEN_PATHS and not has_api_key(request, keys):
            raise Unauthorized("the API key is missing or wrong")
        return await handler(request)


def _refusal(failure: Failure, request_id: str, path: str) -> web.Response:
    """A leg's failure with its own status and message."""
    response = error_response(failure.error, request_id, STAGE)
    response.set_status(failure.status)
    response.headers[PATH_HEADER] = path
    if failure.retry_after:
        response.headers["retry-after"] = failure.retry_after
    return response
