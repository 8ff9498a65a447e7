"""The router's handlers: each client request becomes one relay, under bounds and with a key.

The fleet is watched and tried in the background for as long as the application lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from pdrt.config import RouterConfig, bracketed
from pdrt.control import order
from pdrt.control.accounts import Accounts, Tell, tell_plainly
from pdrt.control.alarms import Alarms
from pdrt.control.askany import ask_any
from pdrt.control.batched import carry_batch
from pdrt.control.canary import try_pairs
from pdrt.control.chance import Chance
from pdrt.control.choice import Choice
from pdrt.control.claims import claim, release
from pdrt.control.cors import Cors
from pdrt.control.fleet import Fleet
from pdrt.control.gate import AUTHORIZATION
from pdrt.control.job import Job, OrderJob, PlainJob, cost_of
from pdrt.control.keydoor import Entry, KeyDoor
from pdrt.control.leases import Leases
from pdrt.control.ledger import Ledger
from pdrt.control.nearby import Nearby
from pdrt.control.order import Order
from pdrt.control.policy import Ask
from pdrt.control.relay import Relay
from pdrt.control.reload import AnyReload, watch
from pdrt.control.roster import Roster
from pdrt.control.routermetrics import RouterMetrics
from pdrt.control.screen import Screen
from pdrt.control.session import session_of
from pdrt.control.ticket import Client, Clocks, Ticket, Tools, ring_later
from pdrt.control.traces import TRACEPARENT, Tracing
from pdrt.control.tracing import open_tracing
from pdrt.control.upstream import Upstream
from pdrt.control.wire.client import Pools
from pdrt.control.wire.exchange import Exchange
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.control.wire.routes import Routes
from pdrt.errors import Draining, Overloaded, PdrtError
from pdrt.keys import ClusterKey

STAGE: Final = "router"
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/admin/drain", "/"})

log = structlog.get_logger(__name__)


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
    batches: set[asyncio.Task[None]] = field(default_factory=set)
    ledger: Ledger = field(init=False)
    roster: Roster = field(init=False)
    rooms: set[int] = field(default_factory=set)  # idempotency keys of requests in flight
    entered: dict[Exchange, Entry] = field(default_factory=dict)  # those with a key
    tracing: Tracing | None = None  # made when it starts, unless it is given
    draining: bool = False
    admitted: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    drain_asked: asyncio.Event = field(default_factory=asyncio.Event)
    said_ready: bool = False
    admin_url: str = ""  # of the admin listener, once there is one
    nearby: Nearby = field(default_factory=Nearby)

    routes: Routes = field(default_factory=Routes)
    keydoor: KeyDoor = field(init=False)
    cors: Cors = field(init=False)
    reloads: list[AnyReload] = field(init=False)  # files that are watched while it runs
    screen: Screen = field(init=False)

    tell: Tell = tell_plainly
    chance: Chance = field(default_factory=Chance)  # for ids and seeds
    accounts: Accounts = field(init=False)

    def __post_init__(self) -> None:
        security, registry = self.config.security, self.metrics.registry
        self.accounts = Accounts(self.metrics, self.tell)
        self.cors = Cors(security.cors_origins)
        self.screen = Screen(self.clocks.clock, self.clocks.wall)
        clock, wall = self.clocks.clock, self.clocks.wall
        self.keydoor = KeyDoor(security, registry, clock, OPEN_PATHS, order.PATHS)
        self.reloads = list(self.keydoor.reloads)
        self.ledger = Ledger(lambda at: wall() - (clock() - at))
        leases, is_open = Leases(self.config.timeouts.lease_s), self.config.policy.registration
        self.roster = Roster(self.fleet, leases, clock, is_open)
        self.fleet.clock = clock
        self.nearby.wanted = self.config.policy.local_prefill_tokens

    @property
    def relays(self) -> Collection[Relay]:
        """Those under way."""
        return self.ledger.running

    # Life.

    @asynccontextmanager
    async def lifetime(self) -> AsyncIterator[None]:
        """Connections to instances and watchers live exactly as long as this."""
        timeouts = self.config.timeouts
        pools = Pools(timeouts.connect_s)
        loop, clocks = asyncio.get_running_loop(), self.clocks
        if clocks.alarm is ring_later:
            clocks = replace(clocks, alarm=Alarms(clocks.clock, loop.call_later).set)
        self.tools = Tools(
            fleet=self.fleet,
            upstream=Upstream(pools, self.key.bearer() if self.key else ""),
            key=self.key,
            mint_room=self.mint_room,
            clocks=clocks,
            rebind_grace_s=timeouts.rebind_grace_s,
            max_moves=self.config.policy.max_moves if self.config.policy.migrate else 0,
            move_s=timeouts.move_s,
            tracing=self._open_tracing(),
        )
        self.fleet.told = self._tell
        self.watching = asyncio.create_task(self._watch(self.tools))
        try:
            yield
        finally:
            self.watching.cancel()
            with suppress(asyncio.CancelledError):
                await self.watching
            await pools.close()
            if self.tracing is not None:
                await asyncio.to_thread(self.tracing.close)

    def _open_tracing(self) -> Tracing | None:
        """Raises ConfigError when it is wanted and the package for it is not there."""
        config = self.config
        if self.tracing is None:
            where = f"{bracketed(config.local_ip)}:{config.ports.router}"
            self.tracing = open_tracing(config.telemetry, "pdrt-router", where)
        return self.tracing

    async def _watch(self, tools: Tools) -> None:
        probe = tools.upstream.plain_status if tools.is_plain else tools.upstream.status
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.fleet.run(probe, tools.upstream.signs))
                tasks.create_task(self.screen.watch(lambda: self.fleet.instances))
                tasks.create_task(self.roster.run())
                tasks.create_task(watch(self.reloads))
                if not self.config.policy.is_plain:
                    tasks.create_task(try_pairs(tools, self.config.timeouts.heartbeat_s))
        except Exception:
            log.exception("watching_failed")
            raise

    def _tell(self) -> None:
        if self.fleet.is_ready and not self.said_ready:
            log.info("ready", pairs=[pair.name for pair in self.fleet.pairs if pair.is_routable])
        elif self.said_ready and not self.fleet.is_ready:
            log.warning("not_ready", reason=self.fleet.why_not_ready())
        self.said_ready = self.fleet.is_ready

    async def watched_over(self) -> None:
        """Returns when the watchers have ended, which is a fault of ours."""
        if self.watching is not None:
            await asyncio.wait([self.watching])

    def ask_to_drain(self) -> None:
        """Like SIGTERM."""
        self.draining = True
        self.drain_asked.set()

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
        request = exchange.request
        if (allowed := self.cors.preflight(request)) is not None:
            return allowed
        refusal = None
        if self.keydoor.is_closed:
            sent = request.header(AUTHORIZATION)
            refusal = self.keydoor.refusal(request.method, request.path, sent)
        if refusal is not None or exchange.route is None or exchange.route.serves is None:
            return refusal
        if self.draining:
            return Draining("this router takes no new requests")
        limit = self.config.policy.max_in_flight
        if self.admitted >= limit:
            return Overloaded(f"{limit} requests are in flight, which is the limit")
        self.admitted += 1
        exchange.is_admitted = True
        self.screen.came(exchange)
        return None

    def over(self, exchange: Exchange) -> None:
        if self.entered and (entry := self.entered.pop(exchange, None)):
            entry.leave()
        if exchange.is_admitted:
            self.admitted -= 1
            self._look_idle()
        self.screen.went(exchange)
        self.accounts.answered(exchange)

    def head_lines(self, request: Request) -> bytes:
        return self.cors.lines(request)

    def stopped_reading(self, exchange: Exchange) -> None:
        self.metrics.slow_readers.inc()
        log.warning("slow_reader_cut", request_id=exchange.request.id)

    # One request.

    def serve(self, exchange: Exchange) -> None:
        """Raises PdrtError when nobody can serve it."""
        started = self.clocks.clock()
        ticket, batch = self._read(exchange.request, started)
        ticket.passage = self.screen.passage(exchange)
        if self.keydoor.is_closed:
            ticket.key_name = self._enter(exchange, ticket.job, batch)
        if ticket.client_room is not None:
            claim(self.rooms, ticket.client_room)
        try:
            if batch is not None:
                self._serve_batch(exchange, batch, ticket, started)
                return
            relay = self._begin(ticket, exchange, started, exchange)
        except PdrtError:
            release(self.rooms, ticket.client_room)
            raise
        exchange.on_gone, exchange.on_flow = relay.client_left, relay.flow
        relay.start()

    def _enter(self, exchange: Exchange, job: Job, batch: Order | None) -> str:
        """Until `over`; the key's name. Raises PdrtError when it may not ask for so much."""
        cost = cost_of(batch) if batch else job.answer_weight
        entry = self.keydoor.enter(exchange.request.header(AUTHORIZATION), cost)
        if entry.name:
            self.entered[exchange] = entry
        return entry.name

    def _begin(
        self, ticket: Ticket, client: Client, started: float, exchange: Exchange | None = None
    ) -> Relay:
        """Raises PdrtError. `exchange` is the client's, if it is all of this request's."""
        assert self.tools is not None, "requests come while the router runs"

        def ended(relay: Relay) -> None:
            if exchange is not None:
                if ticket.client_room is not None:
                    release(self.rooms, ticket.client_room)
                if not exchange.is_over:
                    exchange.fail()
            now = self.clocks.clock()
            self.ledger.end(relay, now)
            self.accounts.relayed(relay, started, now)
            if ticket.job.stream and relay.first_byte_at is not None:
                self._learn(relay, relay.first_byte_at - started)

        relay = Relay(ticket, self._choose(ticket), self.tools, client, ended)
        self.ledger.begin(relay, started)
        return relay

    def _choose(self, ticket: Ticket) -> Choice:
        choice = self.fleet.pick(ticket.ask, ticket.pinned)
        if ticket.pinned is None and self.nearby.wanted:
            choice = self.nearby.considered(choice, ticket.job.prompt_weight)
        if choice.local:
            self.metrics.local.labels(choice.local).inc()
        return choice

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
            if not exchange.is_over:
                exchange.fail()

        def ended(task: asyncio.Task[None]) -> None:
            """Also where its client left before it began."""
            self.batches.discard(task)
            release(self.rooms, ticket.client_room)

        exchange.task = asyncio.get_running_loop().create_task(carry())
        self.batches.add(exchange.task)
        exchange.task.add_done_callback(ended)

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

    def _read(self, request: Request, started: float) -> tuple[Ticket, Order | None]:
        """A client's body, understood; the order when its prompts are served one by one."""
        body = request.json()
        session, session_from = session_of(request.header, body)
        ask = Ask(room=self.mint_room(), session=session, session_from=session_from)
        job: Job
        client_room, within_s, batch = None, None, None
        if self.key is None:
            job = plain = PlainJob(body, request.body)
            named, pin = body.get("model"), plain.pin
            ask.model = named if isinstance(named, str) else ""
        else:
            found = order.parse(order.PATHS[request.path], body)
            if found.request_id:
                request.id = found.request_id
            job, pin = OrderJob(found, seed=self.chance.room()), found.pin
            ask.model, ask.salt = found.model or "", found.salt
            client_room, within_s = found.client_room, found.timeout_s
            batch = found if found.prompts else None
        ask.prompt, ask.weight = job.prompt, job.prompt_weight
        deadline = started + (within_s or self.config.timeouts.request_s)
        ticket = Ticket(request.id, request.path, job, deadline, client_room, ask=ask)
        if pin is not None:
            ticket.pinned = self.fleet.pinned(pin)
        if self.tracing is not None:
            ticket.traceparent = request.header(TRACEPARENT)
        return ticket, batch

    def _look_idle(self) -> None:
        if self.draining and not self.admitted:
            self.idle.set()

    def _learn(self, relay: Relay, seconds: float) -> None:
        """A stream's first byte is its first token (a whole answer's would be all of them)."""
        if not (relay.route.tries or relay.route.moves):
            self.nearby.learn(relay.choice, relay.ticket.job.prompt_weight, seconds)

    async def ask_any(self, request: Request) -> Reply:
        """What needs a tokenizer, which only leaders have."""
        assert self.tools is not None, "requests come while the application runs"
        within_s = self.config.timeouts.request_s
        return await ask_any(self.fleet.instances, self.tools.upstream, request, within_s)
