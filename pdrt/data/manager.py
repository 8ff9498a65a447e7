"""KVTransferManager: the shell around a rank's transfers.

All decisions are made by `Senders` (prefill) or `Receivers` (decode); here are the socket, the
transport, the timers and the watch over processes. Nothing that a peer sends can raise here:
what is no message is counted and dropped. When one of its tasks fails, `run` fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, assert_never

import structlog

from pdrt.config import TimeoutsSection
from pdrt.data import outward as out
from pdrt.data.checksums import Cells
from pdrt.data.commands import (
    AbortReceiver,
    AbortSend,
    AdmitReceiver,
    ExpectHandshakes,
    OpenReceiver,
    SendBlocks,
    TellFirsts,
    TellStarted,
    TransferCommand,
)
from pdrt.data.events import ReceiveFailed, TransferEvent
from pdrt.data.limits import Limits, Patience
from pdrt.data.meeting import Meetings
from pdrt.data.memory import PoolMemory
from pdrt.data.metadata import MetadataBufferPool
from pdrt.data.probe import Prober
from pdrt.data.process import DeathWatch, this_process
from pdrt.data.receivers import Receivers, Receiving
from pdrt.data.routing import RouteFinder, Routes
from pdrt.data.senders import Senders, Sending
from pdrt.data.transfer import Receiver, Sender
from pdrt.data.transport.checked import CheckedTransport
from pdrt.data.transport.promise import Peer, Transport
from pdrt.data.ways import no_pair
from pdrt.data.wire import Wire
from pdrt.errors import BadMessage, PeerLost
from pdrt.keys import ClusterKey
from pdrt.messages import (
    FROM_DECODE,
    FROM_PREFILL,
    Attach,
    FromPrefill,
    KvLayout,
    Problem,
    Process,
    Rank,
    Route,
    decode,
)

_POLL_S: Final = 0.005  # the doorbell is faster; this is for the one that got lost

_log = structlog.get_logger()

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Figures for the status line and the metrics; counters only rise."""

    rooms: int
    peers: dict[str, str]
    quarantined: int  # attempts that are over, whose memory may still be written
    counters: dict[str, float] = field(default_factory=dict)
    transports: dict[str, str] = field(default_factory=dict)  # peer -> its transport and GB/s


@dataclass(kw_only=True)
class KVTransferManager:
    """One per worker. `start`, then `run` for as long as it lives, then `close`.

    Every other method returns at once. `wake` is called when `take_events` has something.
    """

    role: Literal["prefill", "decode"]
    rank: Rank
    layout: KvLayout
    memory: PoolMemory
    transport: Transport
    key: ClusterKey
    local_ip: str
    timeouts: TimeoutsSection
    limits: Limits
    routes: Routes
    wake: Callable[[], None]
    clock: Clock
    wall: Clock
    tp: int = 1  # of our instance
    checksums: bool = False  # decode: verify what arrives before it is used

    def __post_init__(self) -> None:
        if self.role == "prefill":
            self.transport = CheckedTransport(self.transport, self.memory)
        self._cells = Cells(self.memory)
        self._wire = Wire(self.key, self.local_ip, self.limits.peers)
        self._process = this_process()
        self._patience = Patience.of(self.timeouts)
        self._slots = MetadataBufferPool(
            self.memory.slots_view, self.memory.slots, self.memory.writers
        )
        self._lives = DeathWatch(self._died)
        self._counters: Counter[str] = Counter()
        self._group: asyncio.TaskGroup | None = None
        self._is_expecting = asyncio.Event()  # a slot is waited for
        self._is_idle = asyncio.Event()  # no attempt holds any memory
        self._reported_long = 0
        # `routes` is looked up each time: a bench gives another one once both ends are there.
        self._routing = RouteFinder(
            lambda source: self.routes(source), self.timeouts.connect_s, self._routed
        )
        prober = Prober(self.transport, self.memory, self.clock, self.timeouts.attach_s)
        self._meetings = Meetings(self.transport, self.memory, prober, self.rank, self._process)
        self._session = secrets.token_hex(8)
        self._senders: Senders | None = None
        self._receivers: Receivers | None = None

    async def start(self) -> str:
        """Bind the control socket; its endpoint is what peers are told."""
        endpoint = self._wire.start()
        if self.role == "prefill":
            sending = Sending(
                self.rank,
                self._process,
                self.layout,
                self.memory.pool_at,
                self.transport.name,
                self.key,
                self.tp,
            )
            self._senders = Senders(sending, self.limits, self._patience)
        else:
            receiving = Receiving(self.rank, self.tp, self._attach(endpoint), self.key)
            self._receivers = Receivers(receiving, self._slots, self.limits, self._patience)
        return endpoint

    def _attach(self, endpoint: str) -> Attach:
        return Attach(
            session=self._session,
            endpoint=endpoint,
            process=self._process,
            layout=self.layout,
            region=self.memory.region(self.transport.offers),
            rank=self.rank,
            tp=self.tp,
            checksums=self.checksums,
        )

    async def try_transports(self) -> None:
        """Write to ourselves through each, while `run` runs. Raises ConfigError."""
        for way in await self._meetings.with_ourselves():
            _log.info("transport_ready", transport=way.transport, gb_per_s=way.rounded)

    async def run(self) -> None:
        """Serve until cancelled. Raises when the control socket or a transport thread fails."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._wire.guard(), name="guard")
                group.create_task(self._listen(), name="listen")
                group.create_task(self._follow_writes(), name="writes")
                group.create_task(self._keep_time(), name="time")
                if self._receivers:
                    group.create_task(self._poll(), name="poll")
                self._carry_out()
        finally:
            self._group = None

    async def leave(self, seconds: float) -> None:
        """The orderly end of a worker, while `run` runs: to be awaited before it is cancelled.

        Every transfer is given up. Waits until none is open here or written to us by a peer,
        `seconds` at most, then half a second at most until the peers were told so. After that
        nothing is said to them any more.
        """
        if self._group is None:
            return
        ours = PeerLost(f"the {self.role} worker {self.rank} is stopping")
        self._desk.leave(Problem.of(ours, self.role), self.clock())
        self._carry_out()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_idle.wait()
                if self._senders:
                    self._senders.farewell()
        self._carry_out()
        await self._wire.say_goodbye()

    async def close(self) -> None:
        """End all writes, then let go of sockets, processes and memory."""
        await self.transport.close()
        self._lives.close()
        self._wire.close()

    # For the scheduler.

    def do(self, command: TransferCommand) -> None:
        """What becomes of it is told by events."""
        match command:
            case ExpectHandshakes(room, attempt, tokens, prompt_hash, deadline):
                self._sending.expect(Sender(room, attempt, tokens, prompt_hash, deadline))
            case TellStarted(room, attempt):
                self._sending.started((room, attempt))
            case TellFirsts():
                self._sending.tell_firsts(command)
            case SendBlocks():
                self._sending.send(command, self.clock())
            case AbortSend(room, attempt, problem):
                self._sending.abort((room, attempt), problem)
            case OpenReceiver(room, attempt, source, deadline):
                where = source.host, source.port
                self._receiving.open(Receiver(room, attempt, where, source.dp_rank, deadline))
            case AdmitReceiver():
                if self.checksums:
                    self._cells.wipe(command.blocks)
                self._receiving.admit(command, self.clock(), self.wall())
                self._is_expecting.set()
            case AbortReceiver():
                self._receiving.abort(command, self.clock())
            case _:
                assert_never(command)
        self._carry_out()

    def poll_slots(self) -> None:
        """Look at all slots that are waited for; the manager does so by itself."""
        self._receiving.scan(self.clock())
        self._carry_out()

    def take_events(self) -> list[TransferEvent]:
        """What happened since the last call, in order."""
        events = list(self._desk.events)
        self._desk.events.clear()
        for event in events:
            if isinstance(event, ReceiveFailed):  # the request may go on, and nobody hear of it
                problem = event.problem
                where = {"room": event.room, "attempt": event.attempt}
                _log.warning("receive_failed", **where, code=problem.code, reason=problem.message)
        return events

    def stats(self) -> TransferStats:
        desk = self._desk
        counters = self._counters + desk.counters
        counters["slots_stale"] = self._slots.stale
        counters["slots_corrupt"] = self._slots.corrupt
        peers = desk.health()
        return TransferStats(
            rooms=len(desk.rooms),
            peers=peers,
            quarantined=desk.quarantined,
            counters={**self.transport.counters, **counters},
            transports=self._meetings.ways.told(peers),
        )

    # Inside.

    @property
    def _desk(self) -> Senders | Receivers:
        desk = self._senders or self._receivers
        assert desk is not None, "start() comes first"
        return desk

    @property
    def _sending(self) -> Senders:
        assert self._senders is not None, "only a prefill rank sends"
        return self._senders

    @property
    def _receiving(self) -> Receivers:
        assert self._receivers is not None, "only a decode rank receives"
        return self._receivers

    async def _listen(self) -> None:
        while True:
            self.hear(await self._wire.receive())

    def hear(self, frame: bytes) -> None:
        """Bytes from a member of the cluster, whatever they are."""
        now, wall = self.clock(), self.wall()
        try:
            if self._senders:
                self._senders.receive(decode(FROM_DECODE, frame), now, wall)
            else:
                self._receiving.receive(self._proven(decode(FROM_PREFILL, frame)), now)
        except BadMessage:
            self._counters["dropped_bad_message"] += 1
        self._carry_out()

    async def _follow_writes(self) -> None:
        async for end in self.transport.ends():
            if not self._meetings.ended(end) and self._senders:
                self._senders.write_ended(end, self.clock())
                self._carry_out()
        raise PeerLost(f"the transport {self.transport.name} has ended")

    async def _keep_time(self) -> None:
        """Deadlines, pings and what must be said again: with and without traffic."""
        while True:
            now = self.clock()
            self._desk.tick(now, self.wall())
            self._report_quarantine(now)
            self._carry_out()
            await asyncio.sleep(max(self._desk.next_due(now) - self.clock(), 0.001))

    async def _poll(self) -> None:
        """The backstop of the doorbell; it sleeps while no slot is waited for."""
        while True:
            await self._is_expecting.wait()
            self.poll_slots()
            await asyncio.sleep(_POLL_S)
            if not self._slots.waiting:
                self._is_expecting.clear()

    def _report_quarantine(self, now: float) -> None:
        overdue = self._desk.overdue_quarantine(now)
        if overdue > self._reported_long:
            _log.warning("kv_quarantined_long", attempts=overdue, peers=self._desk.health())
        self._reported_long = overdue

    def _died(self, process: Process) -> None:
        self._desk.died(process, self.clock())
        self._carry_out()

    def _carry_out(self) -> None:
        """Do what the desk decided; what needs `run` waits for it."""
        desk = self._desk
        while desk.outbox and self._group:
            self._do(desk.outbox.popleft(), self._group)
        if desk.events:
            self.wake()
        if desk.rooms:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    def _do(self, effect: out.Outward, group: asyncio.TaskGroup) -> None:
        match effect:
            case out.Tell():
                is_taken = self._wire.send(effect.endpoint, effect.frame)
                self._counters["sends_refused"] += not is_taken
            case out.HangUp(endpoint):
                self._wire.hang_up(endpoint)
            case out.WatchLife(process):
                self._lives.watch(process)
            case out.StartWrite(write):
                self.transport.start(write)
            case out.AbortWrite(write):
                self.transport.abort(write)
            case out.DetachPeer(peer):
                self._meetings.part(peer)
            case out.Admit() | out.Revoke():
                self._gate(effect)
            case out.AttachPeer() | out.VerifyBlocks() | out.FindRoute():
                self._begin(effect, group)
            case out.ForgetRoute() | out.ReportRefusal():
                self._doubt_route(effect)
            case _:
                assert_never(effect)

    def _doubt_route(self, effect: out.ForgetRoute | out.ReportRefusal) -> None:
        if isinstance(effect, out.ReportRefusal):
            no_pair(effect.host, effect.port, effect.reason)
        else:
            self._routing.forget(effect.host, effect.port)

    def _gate(self, effect: out.Admit | out.Revoke) -> None:
        """Who may write to our memory."""
        match effect:
            case out.Admit(key, areas):
                self.transport.admit(key, areas)
            case out.Revoke(key, through):
                if self.transport.revoke(key, through):
                    self._receiving.revoked(key, through)
            case _:
                assert_never(effect)

    def _begin(
        self,
        effect: out.AttachPeer | out.VerifyBlocks | out.FindRoute,
        group: asyncio.TaskGroup,
    ) -> None:
        """What takes a while: its answer comes back to the desk."""
        match effect:
            case out.AttachPeer(peer, number):
                group.create_task(self._attach_peer(peer, number))
            case out.VerifyBlocks():
                group.create_task(self._verify(effect))
            case out.FindRoute():
                self._routing.find(effect, group)
            case _:
                assert_never(effect)

    async def _attach_peer(self, peer: Peer, number: int) -> None:
        await self._meetings.go_to(peer, number, self._sending, self._wire.endpoint)
        self._carry_out()

    def _proven(self, message: FromPrefill) -> FromPrefill:
        endpoint = self._wire.endpoint
        return self._meetings.proven(message, self._receiving, self._session, endpoint)

    def _routed(self, wish: out.FindRoute, answer: Route | Problem) -> None:
        key = wish.room, wish.attempt
        if isinstance(answer, Route):
            self._receiving.resolved(key, answer, self.clock())
        else:
            self._receiving.unresolved(key, answer, self.clock())
        self._carry_out()

    async def _verify(self, wish: out.VerifyBlocks) -> None:
        corrupt = await asyncio.to_thread(self._cells.corrupt, wish.blocks)
        self._receiving.verified(wish.record, corrupt, self.clock())
        self._carry_out()
