"""The decode side of all transfers of a rank: decisions only, no socket and no clock.

Promises: an attempt's end is told once; after a failure or an abort of an admitted attempt
Quiet is told exactly once, when each rank that may write has proven that it does not any more:
it said Quiesced, it is dead, or the transport keeps it out (`revoked`).
No passed time releases memory. What got lost on the way is said again until it is answered.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import assert_never

from pdrt.data import firsts
from pdrt.data.aftermath import Aftermath, route_wish
from pdrt.data.asking import Asking
from pdrt.data.checksums import Corrupt
from pdrt.data.commands import AbortReceiver, AdmitReceiver
from pdrt.data.events import (
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SlotRecord,
    TransferEvent,
)
from pdrt.data.landing import Landing
from pdrt.data.legs import damage, told, trouble
from pdrt.data.limits import Limits, Patience
from pdrt.data.metadata import MetadataBufferPool
from pdrt.data.outward import Admit, ForgetRoute, Outward, ReportRefusal, VerifyBlocks
from pdrt.data.past import Past
from pdrt.data.prefill_peers import PrefillPeer, PrefillPeers
from pdrt.data.prefill_peers import Receiving as Receiving
from pdrt.data.quarantine import Ledger
from pdrt.data.topology import Topology
from pdrt.data.transfer import (
    TERMINAL,
    Admitted,
    Broke,
    Key,
    Leg,
    PromptBegan,
    ReceiveInput,
    Receiver,
    Resolved,
    SayAbort,
    ShakeHands,
    SlotsValid,
    State,
    Withdrawn,
    feed_receiver,
)
from pdrt.errors import ConfigError, DeadlinePassed, PdrtError, PeerLost, TransferFailed
from pdrt.messages import (
    Accepted,
    Attached,
    Failed,
    Firsts,
    FromPrefill,
    Left,
    Pong,
    Problem,
    Process,
    Progress,
    Quiesced,
    Refused,
    Route,
    Started,
    unpack_ids,
)


class Receivers:
    """Feed it messages, routes and the scheduler's wishes; read `outbox` and `events`."""

    def __init__(
        self, me: Receiving, slots: MetadataBufferPool, limits: Limits, patience: Patience
    ) -> None:
        self._me, self._patience = me, patience
        self.outbox: deque[Outward] = deque()
        self.events: deque[TransferEvent] = deque()
        self.counters: Counter[str] = Counter()
        self.peers = PrefillPeers(me.attach, patience, self.outbox, self.counters)
        self.rooms: dict[Key, Receiver] = {}
        self.writers: Ledger[Key, str] = Ledger()  # attempt -> prefill ranks that may write
        self._asking = Asking(me.attach, me.key, self.peers, patience, self.outbox)
        self._aftermath = Aftermath(self.writers, self.peers, self._asking, patience, self.outbox)
        self._landing = Landing(slots, me.attach)
        self._topology = Topology(me.attach.layout, me.rank, me.decode_tp, slots.writers)
        self._past: Past[State] = Past(limits.outcomes)

    # What the scheduler wants.

    def open(self, receiver: Receiver) -> None:
        """A request will come to us from that source; ReceiverReady when its ranks are known."""
        assert receiver.key not in self.rooms
        self.rooms[receiver.key] = receiver
        self.outbox.append(route_wish(receiver))

    def admit(self, admitted: AdmitReceiver, now: float, wall: float) -> None:
        """Blocks and slot are reserved: tell the writers."""
        key = admitted.room, admitted.attempt
        receiver = self.rooms.get(key)
        if receiver is None:  # it has failed; nobody was told the blocks
            self.events.append(Quiet(*key))
            return
        if receiver.state is State.WAITING_FOR_INPUT:
            self._reserve(receiver, admitted, wall + admitted.deadline - now)
        self._feed(receiver, Admitted(), now)

    def _reserve(self, receiver: Receiver, admitted: AdmitReceiver, expires: float) -> None:
        receiver.deadline = admitted.deadline
        receiver.row = admitted.slot
        firsts.expect(receiver, admitted, self._me.rank)
        receiver.handshake = self._landing.handshake(receiver, admitted, expires)
        for leg in receiver.legs.values():
            if peer := self.peers.get(leg.peer):
                leg.transport = peer.transport
            if leg.writes:
                self.writers.hold(receiver.key, leg.rank)
        self._landing.expect(receiver, admitted.prompt_tokens)
        self.outbox.append(Admit(receiver.key, self._landing.areas(receiver, admitted)))

    def abort(self, unwanted: AbortReceiver, now: float) -> None:
        """The scheduler does not want it any more."""
        key = unwanted.room, unwanted.attempt
        receiver = self.rooms.get(key)
        if receiver is not None:
            self._feed(receiver, Withdrawn(unwanted.reason, unwanted.is_served), now)
        elif self._past.get(key) is State.DONE:  # received while the scheduler gave it up
            del self._past[key]
            self.events.append(Quiet(*key))

    def leave(self, problem: Problem, now: float) -> None:
        """Give up all of them."""
        for receiver in list(self.rooms.values()):
            self._feed(receiver, Withdrawn(problem.message, is_leaving=True), now)

    # What the bootstrap server tells.

    def resolved(self, key: Key, route: Route, now: float) -> None:
        receiver = self.rooms.get(key)
        if receiver is None:
            return
        for peer in self.peers.superseded(route, receiver.source):
            self._bury(peer, "another process has its place", now)
        if receiver.state is not State.BOOTSTRAPPING:
            return
        try:
            places = self._topology.places(route, receiver.room, receiver.dp_rank)
        except ConfigError as error:
            self.outbox.append(ReportRefusal(*receiver.source, str(error)))
            self._break(receiver, ConfigError, str(error), now)
            return
        receiver.decode_ranks = self._topology.handshakes(route)
        for rank, place in places.items():
            peer = self.peers.reach(route, receiver.source, rank, now)
            receiver.legs[rank] = Leg(rank, peer.name, place)
            peer.rooms.add(key)
        self._check_attached(receiver, now)

    def unresolved(self, key: Key, problem: Problem, now: float) -> None:
        if receiver := self.rooms.get(key):
            self._feed(receiver, Broke(problem), now)

    # What prefill ranks say.

    def receive(self, message: FromPrefill, now: float) -> None:
        if message.session != self._me.session:
            self.counters["dropped_other_session"] += 1
            return
        match message:
            case Pong():
                self.peers.answered(message.process, message.number)
            case Attached():
                for peer in self.peers.attached(message):
                    for key in list(peer.rooms):
                        self._check_attached(self.rooms[key], now)
            case Refused():
                self._refused(message, now)
            case Left():
                self.died(message.process, now, "it has stopped, and all its writes have ended")
            case _:
                self._about_attempt(message, now)

    def _about_attempt(
        self, message: Accepted | Started | Firsts | Progress | Failed | Quiesced, now: float
    ) -> None:
        receiver = self.rooms.get((message.room, message.attempt))
        leg = receiver.legs.get(str(message.rank)) if receiver else None
        if receiver is None or leg is None:
            is_late = (message.room, message.attempt) in self._past  # its slot was faster
            self.counters["late_messages" if is_late else "dropped_unknown_attempt"] += 1
            return
        is_accepting = isinstance(message, Accepted | Started | Firsts | Progress)
        if is_accepting and receiver.state is State.TRANSFERRING:
            self._asking.accepted(receiver, leg, now)
        match message:
            case Accepted():
                pass
            case Started():
                self._feed(receiver, PromptBegan(), now)
            case Firsts():
                self._heard_firsts(receiver, leg, message, now)
            case Progress():
                self._progress(receiver, leg, message, now)
            case Failed():
                self._feed(receiver, Broke(message.problem), now)
            case Quiesced():
                self._quiesced(receiver, leg, now)
            case _:
                assert_never(message)

    def _heard_firsts(self, receiver: Receiver, leg: Leg, message: Firsts, now: float) -> None:
        if receiver.has_firsts and firsts.is_head(leg):
            self.counters["repeated_first_tokens"] += 1  # we asked again before they came
            return
        event = firsts.heard(receiver, leg, message)
        if event is None:
            self.counters["dropped_first_tokens"] += 1
            return
        if self._me.rank.tp == 0:
            self.events.append(event)
        if receiver.needs_firsts:
            receiver.needs_firsts = False
            self._settle(receiver, now)

    def _progress(self, receiver: Receiver, leg: Leg, progress: Progress, now: float) -> None:
        leg.done_bytes = max(leg.done_bytes, progress.done_bytes)
        if progress.complete and receiver.needs_firsts and firsts.is_head(leg):
            receiver.is_written = True
            cause = f"prefill rank {leg.rank} is done and did not tell the first tokens"
            self._break(receiver, TransferFailed, cause, now)
            return
        is_waited_for = receiver.state is State.TRANSFERRING and leg.writes and leg.record is None
        if not progress.complete or not is_waited_for:
            return
        if record := self._landing.look(receiver, leg):
            self._landed(receiver, leg, record, now)
        else:
            cause = f"the slot is damaged that prefill rank {leg.rank} wrote"
            self._break(receiver, TransferFailed, cause, now)

    def _quiesced(self, receiver: Receiver, leg: Leg, now: float) -> None:
        """The proof. It may come before the news of the failure that made it necessary."""
        cause = f"the prefill side gave it up: rank {leg.rank} writes no more"
        self._break(receiver, TransferFailed, cause, now)
        self._let_go(receiver, leg)

    def _refused(self, refused: Refused, now: float) -> None:
        for peer in self.peers.meeting(refused):
            for key in list(peer.rooms):
                self._feed(self.rooms[key], Broke(refused.problem), now)
            self.peers.meet_anew(peer.process)
            if not peer.rooms:
                self.peers.forget(peer)

    # What the slots, time and the kernel tell.

    def scan(self, now: float) -> None:
        """Look at all slots that are waited for."""
        for key, rank, record in self._landing.scan():
            receiver = self.rooms[key]
            self._landed(receiver, receiver.legs[rank], record, now)

    def _landed(self, receiver: Receiver, leg: Leg, record: SlotRecord, now: float) -> None:
        """One writer is done, if it kept to the order; when all are, that is believed."""
        leg.record = record
        writing = [other for other in receiver.legs.values() if other.writes]
        if cause := trouble(leg.rank, record, writing):
            self._break(receiver, TransferFailed, cause, now)
        else:
            self._settle(receiver, now)

    def _settle(self, receiver: Receiver, now: float) -> None:
        """Once all that was asked for has come: each writer's slot, and the first tokens."""
        records = [leg.record for leg in receiver.legs.values() if leg.writes]
        landed = [record for record in records if record is not None]
        if landed and len(landed) == len(records) and not receiver.needs_firsts:
            self._arrived(receiver, landed[-1], now)

    def _arrived(self, receiver: Receiver, record: SlotRecord, now: float) -> None:
        """All writers are done."""
        if not self._me.attach.checksums or receiver.handshake is None:
            self._feed(receiver, SlotsValid(record), now)
            return
        receiver.record = record
        blocks = tuple(unpack_ids(receiver.handshake.blocks))
        self.outbox.append(VerifyBlocks(record, blocks))

    def verified(self, record: SlotRecord, corrupt: Corrupt | None, now: float) -> None:
        """What came of VerifyBlocks; the attempt may be over meanwhile."""
        receiver = self.rooms.get((record.room, record.attempt))
        if receiver is None or receiver.record is not record:
            return
        if corrupt is None:
            self._feed(receiver, SlotsValid(record), now)
        elif receiver.state not in TERMINAL:
            self.counters["blocks_corrupt"] += corrupt.blocks
            cause = damage(receiver, corrupt, self._me.attach.layout.kv_heads)
            self._break(receiver, TransferFailed, cause, now)

    def died(self, process: Process, now: float, cause: str = "its process has died") -> None:
        """Proof that a peer writes no more."""
        for peer in self.peers.died(process):
            self._bury(peer, cause, now)

    def _bury(self, peer: PrefillPeer, cause: str, now: float) -> None:
        receivers = [self.rooms[key] for key in peer.rooms if key in self.rooms]
        self._lose(peer, cause, now)
        for receiver in receivers:
            for leg in receiver.legs.values():
                if leg.peer == peer.name:
                    self._let_go(receiver, leg)

    def revoked(self, key: Key, through: frozenset[str]) -> None:
        """The transport keeps out what is left of an attempt; none named: through all."""
        receiver = self.rooms.get(key)
        if receiver is None or receiver.state not in TERMINAL:
            return
        for leg in self._aftermath.kept_out(receiver, through):
            self._let_go(receiver, leg)

    def tick(self, now: float, _wall: float) -> None:
        for peer in self.peers.overdue(now):
            self._lose(peer, "it answers no pings", now)
        for receiver in list(self.rooms.values()):
            if receiver.state in TERMINAL:
                self._aftermath.chase(receiver, now)
            elif receiver.deadline <= now:
                self._break(receiver, DeadlinePassed, "the deadline has passed", now)
            elif receiver.handshake and receiver.again_at <= now:
                self._asking.shake(receiver, now)
        self._fence(now)

    def _fence(self, now: float) -> None:
        stuck = self._aftermath.stuck(self.rooms.values(), now)
        for peer in self.peers.fence(stuck):
            cause = f"fenced: for {self._patience.grace:g} s it did not say that its writes ended"
            self._lose(peer, cause, now)

    def next_due(self, now: float) -> float:
        """When to tick next, at the latest."""
        return min([now + 0.1, *(peer.pulse.due_at for peer in self.peers.all())])

    def health(self) -> dict[str, str]:
        """Peer -> how it is."""
        return {peer.name: peer.condition for peer in self.peers.all()}

    @property
    def quarantined(self) -> int:
        """Attempts that are over, whose memory somebody may still write."""
        return self.writers.sealed

    def overdue_quarantine(self, now: float) -> int:
        """Attempts that have kept their memory longer than the grace time."""
        return len(self._aftermath.overdue(self.rooms.values(), now))

    def _lose(self, peer: PrefillPeer, cause: str, now: float) -> None:
        for receiver in [self.rooms[key] for key in peer.rooms if key in self.rooms]:
            self._break(receiver, PeerLost, f"{peer.name}: {cause}", now)

    # How it is done.

    def _feed(self, receiver: Receiver, event: ReceiveInput, now: float) -> None:
        was_over = receiver.state in TERMINAL
        spoken: list[ShakeHands | SayAbort] = []
        for effect in feed_receiver(receiver, event):
            match effect:
                case ShakeHands() | SayAbort():
                    spoken.append(effect)
                case ReceiverReady() | PromptStarted() | Received() | ReceiveFailed() | Quiet():
                    self.events.append(effect)
                case _:
                    assert_never(effect)
        holders = self.writers.holders(receiver.key)
        if not was_over and receiver.state in TERMINAL:
            self._end(receiver, now)
        for effect in spoken:
            if isinstance(effect, ShakeHands):
                self._asking.shake(receiver, now)
            else:
                self._asking.abort(receiver, holders, now)

    def _end(self, receiver: Receiver, now: float) -> None:
        receiver.over_at = now
        self.counters[f"receives_{receiver.state}"] += 1
        self._past.remember(receiver.key, receiver.state)
        if receiver.handshake is not None:
            self._landing.let_go(receiver)
            self._aftermath.revoke(receiver)
        if receiver.state is State.DONE:
            self.writers.drop(receiver.key)
            self._forget(receiver)
        elif self.writers.seal(receiver.key):
            self._release(receiver)

    def _let_go(self, receiver: Receiver, leg: Leg) -> None:
        if self.writers.let_go(receiver.key, leg.rank):
            self._release(receiver)

    def _release(self, receiver: Receiver) -> None:
        """Nobody can write to its blocks and slots any more, if anybody was ever told them."""
        if receiver.handshake is not None:
            self.events.append(Quiet(*receiver.key))
        self._forget(receiver)

    def _forget(self, receiver: Receiver) -> None:
        del self.rooms[receiver.key]
        for leg in receiver.legs.values():
            if peer := self.peers.get(leg.peer):
                peer.rooms.discard(receiver.key)

    def _check_attached(self, receiver: Receiver, now: float) -> None:
        if receiver.state is not State.BOOTSTRAPPING:
            return
        peers = [self.peers.get(leg.peer) for leg in receiver.legs.values()]
        if any(peer is not None and peer.is_fenced for peer in peers):
            self._fence(now)  # it may have let go since the last tick
        if any(peer is None or peer.is_out for peer in peers):
            self.outbox.append(ForgetRoute(*receiver.source))
            self._break(receiver, PeerLost, "a prefill rank does not answer", now)
        elif all(peer is not None and peer.is_attached for peer in peers):
            self._feed(receiver, Resolved(), now)

    def _break(self, receiver: Receiver, error: type[PdrtError], cause: str, now: float) -> None:
        if receiver.state in TERMINAL:
            return
        text = told(receiver, cause, self.peers, self._me.attach)
        stage = "prefill" if error is PeerLost else "transfer"  # who is lost, for who has to choose
        problem = Problem(code=error.code, message=text, stage=stage)
        self._feed(receiver, Broke(problem), now)
