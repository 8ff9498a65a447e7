"""The router's handlers: each client request becomes one relay, under bounds and with a key.

The fleet is watched and tried in the background for as long as the application lives.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import structlog

from pdrt.config import RouterConfig
from pdrt.control import order
from pdrt.control.askany import ask_any
from pdrt.control.batched import carry_batch
from pdrt.control.canary import try_pairs
from pdrt.control.claims import claim, release
from pdrt.control.door import Door
from pdrt.control.fleet import Fleet, listed
from pdrt.control.http import Json, is_api_key
from pdrt.control.job import Job, OrderJob, PlainJob
from pdrt.control.leases import Leases
from pdrt.control.ledger import Ledger
from pdrt.control.order import Order
from pdrt.control.policy import Ask
from pdrt.control.relay import Relay
from pdrt.control.routermetrics import RouterMetrics
from pdrt.control.session import session_of
from pdrt.control.ticket import Client, Clocks, Ticket, Tools
from pdrt.control.upstream import Upstream
from pdrt.control.wire.client import Client as HttpClient
from pdrt.control.wire.exchange import Exchange
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.control.wire.routes import Routes
from pdrt.errors import Draining, NotFound, Overloaded, PdrtError, Unauthorized
from pdrt.keys import ClusterKey

STAGE: Final = "router"
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/admin/drain"})

Gate: TypeAlias = Callable[[Request], PdrtError | Reply | None]

log = structlog.get_logger(__name__)


def api_keys_gate(keys: Collection[str]) -> Gate:
    """Clients' API keys, when there are any: known before a body is read."""

    def gate(request: Request) -> PdrtError | None:
        if not keys or request.path in OPEN_PATHS:
            return None
        if is_api_key(request.header("authorization"), keys):
            return None
        return Unauthorized("the API key is missing or wrong")

    return gate


def no_more_lines(_request: Request) -> bytes:
    return b""


@dataclass(frozen=True, slots=True)
class _Read:
    """A client's body, understood."""

    job: Job
    ask: Ask
    client_room: int | None
    pin: order.Pin | None
    timeout_s: float | None
    batch: Order | None = None  # its prompts are served one by one


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
    batches: set[asyncio.Task[None]] = field(default_factory=set)
    ledger: Ledger = field(init=False)
    door: Door = field(init=False)
    rooms: set[int] = field(default_factory=set)  # idempotency keys of requests in flight
    draining: bool = False
    admitted: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    drain_asked: asyncio.Event = field(default_factory=asyncio.Event)
    said_ready: bool = False
    admin_url: str = ""  # of the admin listener, once there is one
    routes: Routes = field(default_factory=Routes)
    gate: Gate = lambda _request: None
    more_lines: Callable[[Request], bytes] = no_more_lines  # of the head of every answer

    def __post_init__(self) -> None:
        self.gate = api_keys_gate(self.config.security.api_keys)
        clock, wall = self.clocks.clock, self.clocks.wall
        self.ledger = Ledger(lambda at: wall() - (clock() - at))
        leases, is_open = Leases(self.config.timeouts.lease_s), self.config.policy.registration
        self.door = Door(self.fleet, leases, clock, is_open)
        self.fleet.clock = clock

    # Life.

    @asynccontextmanager
    async def lifetime(self) -> AsyncIterator[None]:
        """Connections to instances and watchers live exactly as long as this."""
        timeouts = self.config.timeouts
        client = HttpClient(timeouts.connect_s)
        self.tools = Tools(
            fleet=self.fleet,
            upstream=Upstream(client, self.key.bearer() if self.key else ""),
            key=self.key,
            mint_room=self.mint_room,
            clocks=self.clocks,
            rebind_grace_s=timeouts.rebind_grace_s,
            max_moves=self.config.policy.max_moves if self.config.policy.migrate else 0,
            move_s=timeouts.move_s,
        )
        self.fleet.told = self._tell
        self.watching = asyncio.create_task(self._watch(self.tools))
        try:
            yield
        finally:
            self.watching.cancel()
            with suppress(asyncio.CancelledError):
                await self.watching
            await client.close()

    async def _watch(self, tools: Tools) -> None:
        probe = tools.upstream.plain_status if tools.is_plain else tools.upstream.status
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.fleet.run(probe))
                tasks.create_task(self.door.run())
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

    # Around every request (wire.Site).

    def begun(self, exchange: Exchange) -> PdrtError | Reply | None:
        refusal = self.gate(exchange.request)
        if refusal is not None or exchange.route is None or exchange.route.serves is None:
            return refusal
        if self.draining:
            return Draining("this router takes no new requests")
        limit = self.config.policy.max_in_flight
        if self.admitted >= limit:
            return Overloaded(f"{limit} requests are in flight, which is the limit")
        self.admitted += 1
        exchange.is_admitted = True
        return None

    def over(self, exchange: Exchange) -> None:
        if exchange.is_admitted:
            self.admitted -= 1
            self._look_idle()
        route = exchange.route.path if exchange.route else "other"
        status = 499 if exchange.is_gone else exchange.status
        self.metrics.requests.labels(route, str(status), exchange.path_label).inc()
        if exchange.error is not None:
            self.metrics.errors.labels(exchange.error.code).inc()

    def head_lines(self, request: Request) -> bytes:
        return self.more_lines(request)

    def stopped_reading(self, exchange: Exchange) -> None:
        self.metrics.slow_readers.inc()
        log.warning("slow_reader_cut", request_id=exchange.request.id)

    # One request.

    def serve(self, exchange: Exchange) -> None:
        """Raises PdrtError when nobody can serve it."""
        started, request = self.clocks.clock(), exchange.request
        read = self._read(request)
        ticket = Ticket(
            request_id=request.id,
            path=request.path,
            job=read.job,
            deadline=started + (read.timeout_s or self.config.timeouts.request_s),
            client_room=read.client_room,
            pinned=self.fleet.pinned(read.pin) if read.pin else None,
            ask=read.ask,
        )
        claim(self.rooms, read.client_room)
        try:
            if read.batch is not None:
                self._serve_batch(exchange, read.batch, ticket, started)
                return
            relay = self._begin(ticket, exchange, started, exchange)
        except PdrtError:
            release(self.rooms, read.client_room)
            raise
        exchange.on_gone, exchange.on_flow = relay.client_left, relay.flow
        relay.start()

    def _begin(
        self, ticket: Ticket, client: Client, started: float, exchange: Exchange | None = None
    ) -> Relay:
        """Raises PdrtError. `exchange` is the client's, if it is all of this request's."""
        assert self.tools is not None, "requests come while the router runs"

        def ended(relay: Relay) -> None:
            self.relays.discard(relay)
            if exchange is not None:
                release(self.rooms, ticket.client_room)
                if not exchange.is_over:
                    exchange.fail()
            self._account(relay, started)

        choice = self.fleet.pick(ticket.ask, ticket.pinned)
        relay = Relay(ticket, choice, self.tools, client, ended)
        self.relays.add(relay)
        self.ledger.begin(relay, started)
        return relay

    def _serve_batch(
        self, exchange: Exchange, batch: Order, ticket: Ticket, started: float
    ) -> None:
        def begin(each: Ticket, client: Client) -> Relay:
            own = replace(each, ask=self._ask_of_part(each.ask, each.job))
            relay = self._begin(own, client, started)
            relay.start()
            return relay

        async def carry() -> None:
            try:
                await carry_batch(batch, ticket, exchange, begin)
            except Exception:
                log.exception("batch_failed", request_id=ticket.request_id)
            finally:
                release(self.rooms, ticket.client_room)
            if not exchange.is_over:
                exchange.fail()

        exchange.task = asyncio.get_running_loop().create_task(carry())
        self.batches.add(exchange.task)
        exchange.task.add_done_callback(self.batches.discard)

    def _ask_of_part(self, whole: Ask, job: Job) -> Ask:
        """Each prompt of a batch is chosen for by itself, in a room of its own."""
        return Ask(
            whole.model,
            self.mint_room(),
            job.prompt,
            job.prompt_weight,
            whole.session,
            whole.session_from,
            whole.salt,
        )

    def _read(self, request: Request) -> _Read:
        body = request.json()
        session, session_from = session_of(request.header, body)
        ask = Ask(room=self.mint_room(), session=session, session_from=session_from)
        if self.key is None:
            plain = PlainJob(body)
            named = body.get("model")
            ask.model = named if isinstance(named, str) else ""
            ask.prompt, ask.weight = plain.prompt, plain.prompt_weight
            return _Read(plain, ask, None, plain.pin, None)
        found = order.parse(order.PATHS[request.path], body)
        if found.request_id:
            request.id = found.request_id
        job = OrderJob(found, seed=secrets.randbits(63))
        ask.model, ask.salt = found.model or "", found.salt
        ask.prompt, ask.weight = job.prompt, job.prompt_weight
        batch = found if found.prompts else None
        return _Read(job, ask, found.client_room, found.pin, found.timeout_s, batch)

    def _look_idle(self) -> None:
        if self.draining and not self.admitted:
            self.idle.set()

    def _account(self, relay: Relay, started: float) -> None:
        now = self.clocks.clock()
        self.ledger.end(relay, now)
        self.metrics.duration.observe(now - started)
        if relay.first_byte_at is not None:
            self.metrics.first_byte.observe(relay.first_byte_at - started)
        self.metrics.retries.inc(relay.route.tries)
        if relay.route.moves:
            self.metrics.moved.inc(relay.route.moves)
        failure = relay.failure
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

    async def health(self, _request: Request) -> Reply:
        """Liveness: the loop turns and the instances are being watched."""
        if self.watching is not None and self.watching.done():
            return Reply.json({"status": "failed", "reason": "see the log"}, 503)
        return Reply.json({"status": "ok", **self._state()})

    async def ready(self, _request: Request) -> Reply:
        reason = "draining" if self.draining else self.fleet.why_not_ready()
        body = {"ready": not reason, "reason": reason, **self._state()}
        return Reply.json(body, 503 if reason else 200)

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

    async def models(self, _request: Request) -> Reply:
        return Reply.json({"object": "list", "data": self.fleet.told_models()})

    async def model(self, request: Request) -> Reply:
        named = "/".join(request.params.values())  # a model's name may have an owner's before it
        for told in self.fleet.told_models():
            if told["id"] == named:
                return Reply.json(told)
        raise NotFound(f"model {named!r} is not served here; {listed(self.fleet.models)}")

    async def ask_any(self, request: Request) -> Reply:
        """What needs a tokenizer, which only leaders have."""
        assert self.tools is not None, "requests come while the application runs"
        within_s = self.config.timeouts.request_s
        return await ask_any(self.fleet.instances, self.tools.upstream, request, within_s)

    async def metrics_text(self, _request: Request) -> Reply:
        self.metrics.in_flight.set(self.admitted)
        self.metrics.ready.set(self.fleet.is_ready and not self.draining)
        self.metrics.instance_up.clear()  # who has left must not be told of any more
        self.metrics.instance_requests.clear()
        for each in self.fleet.instances:
            self.metrics.instance_up.labels(each.name).set(each.is_routable)
            self.metrics.instance_requests.labels(each.name).set(each.load.requests)
        return Reply.metrics(self.metrics.registry)

    def ask_to_drain(self) -> None:
        """Like SIGTERM."""
        self.draining = True
        self.drain_asked.set()

    async def drain_moved(self, _request: Request) -> Reply:
        raise NotFound(
            f"POST /admin/drain is on the admin listener: {self.admin_url or 'none here'}"
        )
