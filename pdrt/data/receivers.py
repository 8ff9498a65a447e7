"""The decode side of all transfers of a rank: decisions only, no socket and no clock.

Promises: an attempt's end is told once; after a failure or an abort of an admitted attempt
Quiet is told exactly once, when every rank that knew its blocks has said Quiesced or is dead.
No passed time releases memory. What got lost on the way is said again until it is answered.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace
from typing import assert_never

from pdrt.data.checksums import Corrupt
from pdrt.data.commands import AdmitReceiver
from pdrt.data.events import (
    SLOT_COMPLETE,
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SlotRecord,
    TransferEvent,
)
from pdrt.data.handshake import signed
from pdrt.data.limits import Limits, Patience
from pdrt.data.metadata import MetadataBufferPool
from pdrt.data.outward import FindRoute, ForgetRoute, Outward, Tell, VerifyBlocks
from pdrt.data.peer import Health
from pdrt.data.prefill_peers import PrefillPeer, PrefillPeers
from pdrt.data.quarantine import Ledger
from pdrt.data.topology import Topology
from pdrt.data.transfer import (
    TERMINAL,
    Admitted,
    Broke,
    Key,
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
from pdrt.keys import ClusterKey
from pdrt.messages import (
    AbortTransfer,
    Accepted,
    Attach,
    Attached,
    Failed,
    FromPrefill,
    Handshake,
    Pong,
    Problem,
    Process,
    Progress,
    Quiesced,
    Rank,
    Refused,
    Route,
    Source,
    Started,
    pack_ids,
    unpack_ids,
)

_AGAIN_ACCEPTED = 5.0  # an accepted handshake is asked about so many times more slowly


@dataclass(frozen=True, slots=True)
class Receiving:
    """What a decode rank is."""

    rank: Rank
    decode_tp: int
    attach: Attach
    key: ClusterKey

    @property
    def session(self) -> str:
        return self.attach.session


class Receivers:
    """Feed it messages, routes and the scheduler's wishes; read `outbox` and `events`."""

    def __init__(
        self, me: Receiving, slots: MetadataBufferPool, limits: Limits, patience: Patience
    ) -> None:
        self._me, self._slots, self._patience = me, slots, patience
        self.outbox: deque[Outward] = deque()
        self.events: deque[TransferEvent] = deque()
        self.counters: Counter[str] = Counter()
        self.peers = PrefillPeers(me.attach, patience, self.outbox, self.counters)
        self.rooms: dict[Key, Receiver] = {}
        self.writers: Ledger[Key, str] = Ledger()
        self._topology = Topology(me.attach.layout, me.rank, me.decode_tp)
        self._by_slot: dict[int, Key] = {}
        self._done: OrderedDict[Key, None] = OrderedDict()
        self._max_done = limits.outcomes
        self._number = 0

    # What the scheduler wants.

    def open(self, receiver: Receiver) -> None:
        """A request will come to us from that source; ReceiverReady when its ranks are known."""
        assert receiver.key not in self.rooms
        self.rooms[receiver.key] = receiver
        host, port = receiver.source
        source = Source(host=host, port=port, dp_rank=receiver.dp_rank)
        self.outbox.append(FindRoute(receiver.room, receiver.attempt, source))

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
        room, attempt = receiver.key
        receiver.deadline = admitted.deadline
        receiver.slot = admitted.slot
        receiver.handshake = Handshake(
            room=room,
            attempt=attempt,
            session=self._me.session,
            blocks=pack_ids(admitted.blocks),
            first_block=admitted.first_block,
            slot=admitted.slot,
            prompt_tokens=admitted.prompt_tokens,
            prompt_hash=admitted.prompt_hash,
            decode_ranks=1,
            expires=expires,
            token=b"",
        )
        self._slots.watch(admitted.slot, room, attempt, admitted.prompt_tokens)
        self._by_slot[admitted.slot] = receiver.key
        for name in receiver.writers.values():
            self.writers.hold(receiver.key, name)

    def abort(self, key: Key, reason: str, now: float) -> None:
        """The scheduler does not want it any more."""
        receiver = self.rooms.get(key)
        if receiver is not None:
            self._feed(receiver, Withdrawn(reason), now)
        elif key in self._done:  # it was received while the scheduler gave it up
            del self._done[key]
            self.events.append(Quiet(*key))

    # What the bootstrap server tells.

    def resolved(self, key: Key, route: Route, now: float) -> None:
        receiver = self.rooms.get(key)
        if receiver is None or receiver.state is not State.BOOTSTRAPPING:
            return
        try:
            ranks = self._topology.writers(route, receiver.room, receiver.dp_rank)
        except ConfigError as error:
            self._break(receiver, ConfigError, str(error), now)
            return
        for rank in ranks:
            peer = self.peers.reach(route.ranks[rank], receiver.source, now)
            receiver.writers[rank] = peer.name
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
                for peer in self.peers.by_process(message.process):
                    peer.is_attached = True
                    self._check_rooms(peer, now)
            case Refused():
                self._refused(message, now)
            case _:
                self._about_attempt(message, now)

    def _about_attempt(
        self, message: Accepted | Started | Progress | Failed | Quiesced, now: float
    ) -> None:
        receiver = self.rooms.get((message.room, message.attempt))
        writer = receiver.writers.get(str(message.rank)) if receiver else None
        if receiver is None or writer is None:
            is_late = (message.room, message.attempt) in self._done  # its slot was faster
            self.counters["late_messages" if is_late else "dropped_unknown_attempt"] += 1
            return
        match message:
            case Accepted():
                self._accepted(receiver, now)
            case Started():
                self._accepted(receiver, now)
                self._feed(receiver, PromptBegan(), now)
            case Progress():
                self._accepted(receiver, now)
                self._progress(receiver, message, now)
            case Failed():
                self._feed(receiver, Broke(message.problem), now)
            case Quiesced():
                self._quiesced(receiver, writer, now)
            case _:
                assert_never(message)

    def _accepted(self, receiver: Receiver, now: float) -> None:
        if receiver.state is State.TRANSFERRING:
            receiver.is_accepted = True
            receiver.again_at = now + self._patience.again * _AGAIN_ACCEPTED

    def _progress(self, receiver: Receiver, progress: Progress, now: float) -> None:
        receiver.done_bytes = max(receiver.done_bytes, progress.done_bytes)
        if not progress.complete or receiver.state is not State.TRANSFERRING or receiver.record:
            return
        if record := self._slots.look(receiver.slot):
            self._landed(receiver, record, now)
        else:
            self._break(receiver, TransferFailed, "the slot is damaged", now)

    def _quiesced(self, receiver: Receiver, writer: str, now: float) -> None:
        """The proof. It may come before the news of the failure that made it necessary."""
        self._break(receiver, TransferFailed, "the prefill side gave it up", now)
        if self.writers.let_go(receiver.key, writer):
            self._release(receiver)

    def _refused(self, refused: Refused, now: float) -> None:
        if refused.process is None:
            return
        for peer in self.peers.by_process(refused.process):
            for key in list(peer.rooms):
                self._feed(self.rooms[key], Broke(refused.problem), now)
            if not peer.rooms:
                self.peers.forget(peer)

    # What the slots, time and the kernel tell.

    def scan(self, now: float) -> None:
        """Look at all slots that are waited for."""
        for slot, record in self._slots.scan():
            self._landed(self.rooms[self._by_slot[slot]], record, now)

    def _landed(self, receiver: Receiver, record: SlotRecord, now: float) -> None:
        if record.status != SLOT_COMPLETE:
            self._break(receiver, TransferFailed, f"slot status {record.status}", now)
        elif self._me.attach.checksums and receiver.handshake:
            receiver.record = record
            blocks = tuple(unpack_ids(receiver.handshake.blocks))
            self.outbox.append(VerifyBlocks(record, blocks))
        else:
            self._feed(receiver, SlotsValid(record), now)

    def verified(self, record: SlotRecord, corrupt: Corrupt | None, now: float) -> None:
        """What came of VerifyBlocks; the attempt may be over meanwhile."""
        receiver = self.rooms.get((record.room, record.attempt))
        if receiver is None or receiver.record is not record:
            return
        if corrupt is None:
            self._feed(receiver, SlotsValid(record), now)
        elif receiver.state not in TERMINAL:
            self.counters["blocks_corrupt"] += corrupt.blocks
            self._break(receiver, TransferFailed, self._damage(receiver, corrupt), now)

    def _damage(self, receiver: Receiver, corrupt: Corrupt) -> str:
        """Where it is, and who sent it: each writer wrote an equal share of our heads."""
        assert receiver.handshake is not None
        writers = list(receiver.writers)
        rank = writers[corrupt.head * len(writers) // self._me.attach.layout.kv_heads]
        return (
            f"{corrupt.blocks} blocks are not what was sent: first the prompt's block"
            f" {receiver.handshake.first_block + corrupt.index}, which is our block"
            f" {corrupt.block}, kv head {corrupt.head} from prefill rank {rank}"
        )

    def died(self, process: Process, now: float) -> None:
        """Proof that a peer writes no more."""
        for peer in self.peers.died(process):
            self._lose(peer, "its process has died", now)
            for key in self.writers.held_by(peer.name):
                if self.writers.let_go(key, peer.name):
                    self._release(self.rooms[key])

    def tick(self, now: float, _wall: float) -> None:
        for peer in self.peers.overdue(now):
            self._lose(peer, "it answers no pings", now)
        for receiver in list(self.rooms.values()):
            if receiver.state not in TERMINAL and receiver.deadline <= now:
                self._break(receiver, DeadlinePassed, "the deadline has passed", now)
            elif receiver.handshake and now >= receiver.again_at:
                self._speak(receiver, now, is_again=True)

    def next_due(self, now: float) -> float:
        """When to tick next, at the latest."""
        return min([now + 0.1, *(peer.pulse.due_at for peer in self.peers.all())])

    def health(self) -> dict[str, str]:
        """Peer -> how it is."""
        return {peer.name: peer.health.value for peer in self.peers.all()}

    @property
    def quarantined(self) -> int:
        """Attempts that are over, whose memory somebody may still write."""
        return self.writers.sealed

    def overdue_quarantine(self, now: float) -> int:
        """Attempts that have kept their memory longer than the grace time."""
        over = (r for r in self.rooms.values() if r.state in TERMINAL)
        return sum(now - receiver.over_at > self._patience.grace for receiver in over)

    def _lose(self, peer: PrefillPeer, cause: str, now: float) -> None:
        for key in list(peer.rooms):
            self._break(self.rooms[key], PeerLost, f"{peer.name}: {cause}", now)

    # How it is done.

    def _feed(self, receiver: Receiver, event: ReceiveInput, now: float) -> None:
        was_over = receiver.state in TERMINAL
        has_to_speak = False
        for effect in feed_receiver(receiver, event):
            match effect:
                case ShakeHands() | SayAbort():
                    has_to_speak = True
                case ReceiverReady() | PromptStarted() | Received() | ReceiveFailed() | Quiet():
                    self.events.append(effect)
                case _:
                    assert_never(effect)
        if not was_over and receiver.state in TERMINAL:
            self._end(receiver, now)
        if has_to_speak:
            self._speak(receiver, now)

    def _end(self, receiver: Receiver, now: float) -> None:
        receiver.over_at = now
        self.counters[f"receives_{receiver.state}"] += 1
        if receiver.slot >= 0:
            self._slots.unwatch(receiver.slot)
            del self._by_slot[receiver.slot]
        if receiver.state is State.DONE:
            self.writers.drop(receiver.key)
            self._done[receiver.key] = None
            if len(self._done) > self._max_done:
                self._done.popitem(last=False)
            self._forget(receiver)
        elif self.writers.seal(receiver.key):
            self._forget(receiver)

    def _release(self, receiver: Receiver) -> None:
        """Nobody can write to its blocks and slot any more."""
        self.events.append(Quiet(*receiver.key))
        self._forget(receiver)

    def _forget(self, receiver: Receiver) -> None:
        del self.rooms[receiver.key]
        for name in receiver.writers.values():
            if peer := self.peers.get(name):
                peer.rooms.discard(receiver.key)

    def _check_rooms(self, peer: PrefillPeer, now: float) -> None:
        for key in list(peer.rooms):
            self._check_attached(self.rooms[key], now)

    def _check_attached(self, receiver: Receiver, now: float) -> None:
        if receiver.state is not State.BOOTSTRAPPING:
            return
        peers = [self.peers.get(name) for name in receiver.writers.values()]
        if any(peer is None or peer.health is Health.DEAD for peer in peers):
            self.outbox.append(ForgetRoute(*receiver.source))
            self._break(receiver, PeerLost, "a prefill rank does not answer", now)
        elif all(peer is not None and peer.is_attached for peer in peers):
            self._feed(receiver, Resolved(), now)

    def _speak(self, receiver: Receiver, now: float, is_again: bool = False) -> None:
        """Handshake or abort, for the first time or again because nothing was heard since."""
        receiver.again_at = now + self._patience.again
        is_over = receiver.state in TERMINAL
        waiting = self.writers.holders(receiver.key)
        for name in receiver.writers.values():
            peer = self.peers.get(name)
            is_deaf = peer is None or (is_again and peer.health is Health.DEAD)
            if peer is not None and not is_deaf and name in waiting:
                self._number += 1
                message = self._abort(receiver) if is_over else self._shake(receiver)
                self.outbox.append(Tell(peer.endpoint, message))

    def _shake(self, receiver: Receiver) -> Handshake:
        assert receiver.handshake is not None
        shake = replace(receiver.handshake, number=self._number)
        return signed(self._me.key, shake, self._me.attach.endpoint)

    def _abort(self, receiver: Receiver) -> AbortTransfer:
        room, attempt = receiver.key
        return AbortTransfer(
            room=room, attempt=attempt, session=self._me.session, number=self._number
        )

    def _break(self, receiver: Receiver, error: type[PdrtError], cause: str, now: float) -> None:
        if receiver.state in TERMINAL:
            return
        wanted = len(receiver.handshake.blocks) // 4 if receiver.handshake else 0
        total = wanted * self._me.attach.layout.block_bytes
        writers = ", ".join(f"{rank} at {peer}" for rank, peer in receiver.writers.items())
        health = ", ".join(
            peer.health for name in receiver.writers.values() if (peer := self.peers.get(name))
        )
        text = (
            f"room {receiver.room} attempt {receiver.attempt}: {cause}; from prefill rank"
            f" {writers or 'not known yet'} over {'/'.join(self._me.attach.region.offers)},"
            f" {receiver.done_bytes} of {total} bytes known written, last"
            f" {receiver.state}, peer {health or 'gone'}"
        )
        problem = Problem(code=error.code, message=text, stage="transfer")
        self._feed(receiver, Broke(problem), now)
