"""Desks joined by wires, a transport and schedulers that the test steers, without a socket.

The rig keeps the books of the decode ranks' blocks and slots, and checks at each written byte
that it lands in memory that is still kept for its attempt. `Rig()` is one rank on each side.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdrt.data import outward as out
from pdrt.data.commands import AbortReceiver, AdmitReceiver, SendBlocks, TellFirsts
from pdrt.data.events import (
    SLOT_COMPLETE,
    FirstTokens,
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SendFailed,
    SlotRecord,
    TransferEvent,
)
from pdrt.data.layout import blocks_for
from pdrt.data.limits import Limits
from pdrt.data.memory import SLOT_BYTES
from pdrt.data.receivers import Receivers
from pdrt.data.senders import Senders
from pdrt.data.transfer import Key, Receiver, Sender
from pdrt.data.transport.promise import Ended, Write
from pdrt.messages import FROM_DECODE, FROM_PREFILL, Problem, Route, decode
from tests.data.ranks import (
    KEY,
    LAYOUT,
    LIMITS,
    ONE,
    PATIENCE,
    DecodeRank,
    PrefillRank,
    Shape,
    attach,
    process,
    route,
    route_to,
)

__all__ = ["KEY", "LAYOUT", "PATIENCE", "attach", "process", "route"]  # for the tests

BLOCK = LAYOUT.block_bytes
SOURCE = ("127.0.0.1", 18800)
PROBLEM = Problem(code="cancelled", message="the client left", stage="test")
WALL = 1e9

Flown = tuple[int, int]  # prefill rank, write


@dataclass(slots=True)
class Flight:
    """A write that the transport has."""

    write: Write
    key: Key
    source: PrefillRank
    target: DecodeRank
    has_landed: bool = False


class Rig:
    """Prefill ranks `ps` and decode ranks `ds`; the test says what arrives, lands and ends."""

    def __init__(
        self,
        blocks: int = 32,
        limits: Limits = LIMITS,
        shape: Shape = ONE,
        ways: tuple[str, ...] = ("shm",),  # the prefill ranks' in turn
        checksums: bool = False,
        cp: int = 1,
    ) -> None:
        """With cp > 1 the `prefill_tp` ranks are so many context-parallel ones of tp = 1."""
        self.cp = cp
        self.now = 0.0
        self.shape = shape
        self.ps = [
            PrefillRank(shape, tp, limits, ways[tp % len(ways)], cp=cp)
            for tp in range(shape.prefill_tp)
        ]
        self.ds = [
            DecodeRank(shape, tp, limits, blocks, checksums) for tp in range(shape.decode_tp)
        ]
        self.flights: dict[Flown, Flight] = {}
        self.heard: list[TransferEvent] = []
        self.told: Counter[tuple[str, Key]] = Counter()
        self.reported: list[out.ReportRefusal] = []

    # One rank on each side.

    @property
    def p(self) -> Senders:
        return self.ps[0].desk

    @property
    def d(self) -> Receivers:
        return self.ds[0].desk

    @property
    def to_p(self) -> list[bytes]:
        return self.ps[0].inbox

    @property
    def to_d(self) -> list[bytes]:
        return self.ds[0].inbox

    # What the schedulers do.

    def expect(self, key: Key, tokens: int = 8, deadline: float = 60.0, text: bytes = b"h") -> None:
        for p in self.ps:
            self.expect_at(p, key, tokens, deadline, text)

    def expect_at(
        self, p: PrefillRank, key: Key, tokens: int, deadline: float = 60.0, text: bytes = b"h"
    ) -> None:
        if p.is_alive:
            p.sources.add(key)
            p.desk.expect(Sender(*key, tokens, text, self.now + deadline))
            self.settle()

    def open(self, key: Key, deadline: float = 60.0) -> None:
        for d in self.ds:
            d.desk.open(Receiver(*key, SOURCE, 0, self.now + deadline))
            self.settle()

    def admit(
        self,
        key: Key,
        tokens: int = 8,
        first_block: int = 0,
        deadline: float = 60,
        sequences: int = 1,
        top: int = 0,
    ) -> None:
        for d in self.ds:
            self.admit_at(d, key, tokens, first_block, deadline, sequences, top)

    def admit_at(
        self,
        d: DecodeRank,
        key: Key,
        tokens: int,
        first_block: int = 0,
        deadline: float = 60,
        sequences: int = 1,
        top: int = 0,
    ) -> None:
        blocks, row = d.books.take(key, blocks_for(tokens, LAYOUT.block_size) - first_block)
        due, wanted = self.now + deadline, tuple(blocks)
        admitted = AdmitReceiver(*key, wanted, first_block, row, tokens, b"h", due, sequences, top)
        d.desk.admit(admitted, self.now, WALL + self.now)
        self.settle()

    def send(self, key: Key, src: list[int], first_block: int, last: SlotRecord | None) -> None:
        for p in self.ps:
            self.send_at(p, key, src, first_block, last)

    def send_at(
        self, p: PrefillRank, key: Key, src: list[int], first_block: int, last: SlotRecord | None
    ) -> None:
        p.desk.send(SendBlocks(*key, tuple(src), first_block, last), self.now)
        self.settle()

    def tell_firsts(self, key: Key, tokens: tuple[int, ...] = (42,), tops: bytes = b"") -> None:
        """The group's scheduler says it to its tp 0 alone."""
        logprobs = (-0.5,) * len(tokens)
        self.p.tell_firsts(TellFirsts(*key, tokens, logprobs, tops))
        self.settle()

    def send_all(self, key: Key, tokens: int = 8) -> None:
        blocks = list(range(blocks_for(tokens, LAYOUT.block_size)))
        self.send(key, blocks, 0, record(key, tokens))

    def abort_receive(self, key: Key, is_served: bool = False) -> None:
        for d in self.ds:
            self.abort_receive_at(d, key, is_served)

    def abort_receive_at(self, d: DecodeRank, key: Key, is_served: bool = False) -> None:
        if key in d.books.kept:
            d.quarantine.add(key)
        d.desk.abort(AbortReceiver(*key, "client_gone", is_served), self.now)
        self.settle()

    def abort_send(self, key: Key) -> None:
        for p in self.ps:
            p.desk.abort(key, PROBLEM)
            self.settle()

    def finish(self, key: Key) -> None:
        """The decode side is done with a received request."""
        for d in self.ds:
            d.books.give(key)

    # What the world does.

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for rank in [p for p in self.ps if p.is_alive] + self.ds:
            rank.desk.tick(self.now, WALL + self.now)
        self.settle()

    def hear_p(self, at: int = 0, p: PrefillRank | None = None) -> None:
        """One message arrives at a prefill rank."""
        p = p or self.ps[0]
        frame = p.inbox.pop(at)
        if p.is_alive:
            p.desk.receive(decode(FROM_DECODE, frame), self.now, WALL + self.now)
            self.settle()

    def hear_d(self, at: int = 0, d: DecodeRank | None = None) -> None:
        d = d or self.ds[0]
        d.desk.receive(decode(FROM_PREFILL, d.inbox.pop(at)), self.now)
        self.settle()

    def answer_attach(self, p: PrefillRank | None = None) -> None:
        p = p or self.ps[0]
        p.desk.sessions.attached(p.attaching.pop(0), p.way)
        self.settle()

    def answer_route(self, d: DecodeRank | None = None) -> None:
        d = d or self.ds[0]
        wish = d.wishes.pop(0)
        d.desk.resolved((wish.room, wish.attempt), self.d_route(), self.now)
        self.settle()

    def d_route(self) -> Route:
        """What the bootstrap server says."""
        ranks = {str(p.rank): p.address for p in self.ps}
        return route_to(ranks, self.ps[0].layout, self.cp)

    def land(self, write: Flown) -> None:
        """The bytes arrive: every one of them where it still belongs, or not at all."""
        flight = self.flights[write]
        flight.has_landed = True
        if not self.is_let_in(flight):
            return
        self.check_flight(flight)
        unit, d = LAYOUT.head_bytes, flight.target
        for _, dst, length in flight.write.runs.tolist():
            d.landed.setdefault(flight.key, set()).update(range(dst, dst + length, unit))
        if slot := flight.write.slot:
            d.memory[slot.at : slot.at + SLOT_BYTES] = slot.data

    def is_let_in(self, flight: Flight) -> bool:
        """Whether the receiver's transport takes it: tcp asks what was admitted."""
        if flight.target not in self.ds or flight.write.peer != flight.target.attach.session:
            return False  # the memory is gone
        if flight.source.way != "tcp":
            return True
        areas = flight.target.admitted.get(flight.key)
        if areas is None:
            return False
        runs = [(dst, length) for _, dst, length in flight.write.runs.tolist()]
        if slot := flight.write.slot:
            runs.append((slot.at, SLOT_BYTES))
        for at, length in runs:
            assert any(a <= at and at + length <= a + n for a, n in areas), "not admitted"
        return True

    def check_flight(self, flight: Flight) -> None:
        d = flight.target
        blocks, row = d.books.kept.get(flight.key, ([], -1))
        offsets = d.head_offsets(blocks)
        for _, dst, length in flight.write.runs.tolist():
            parts = {*range(dst, dst + length, LAYOUT.head_bytes)}
            assert parts <= offsets, f"{flight.key} writes elsewhere"
        if slot := flight.write.slot:
            writers = self.shape.writers
            number = slot.at // SLOT_BYTES
            assert number // writers == row, f"{flight.key} writes another's slot"
            owner = d.slot_writers.setdefault((flight.key, number), flight.source.tp)
            assert owner == flight.source.tp, f"slot {number} has two writers"

    def end(self, write: Flown, error: str | None = None) -> None:
        """The transport lets go of it."""
        flight = self.flights.pop(write)
        if flight.source.is_alive:
            flight.source.desk.write_ended(Ended(write[1], error), self.now)
        self.settle()

    def scan(self) -> None:
        for d in self.ds:
            d.desk.scan(self.now)
        self.settle()

    def kill_p(self, p: PrefillRank | None = None) -> None:
        """The process is gone, its writes with it; the kernel's word has not arrived yet."""
        p = p or self.ps[0]
        p.die()
        self.flights = {w: f for w, f in self.flights.items() if f.source is not p}

    def hear_of_death(self, p: PrefillRank | None = None) -> None:
        """And now it has; a new process takes its place at another port."""
        p = p or self.ps[0]
        for d in self.ds:
            d.desk.died(p.address.process, self.now)
        p.life += 1
        p.begin()
        self.settle()

    def kill_d(self, d: DecodeRank) -> None:
        """A decode process is gone, its memory too; everybody knows, and a new one is there."""
        dead = d.attach
        d.life += 1
        d.begin()
        for p in self.ps:
            if p.is_alive:
                p.desk.died(dead.process, self.now)
        self.settle()
        for write in [w for w, f in self.flights.items() if f.write.peer == dead.session]:
            self.end(write, "the peer is gone")

    def flow(self) -> None:
        """Everything that is said arrives, everything that is asked is answered."""
        while any(p.inbox or p.attaching for p in self.ps) or any(
            d.inbox or d.wishes for d in self.ds
        ):
            for p in self.ps:
                while p.inbox:
                    self.hear_p(p=p)
            for d in self.ds:
                while d.inbox:
                    self.hear_d(d=d)
            for p in self.ps:
                while p.attaching:
                    self.answer_attach(p)
            for d in self.ds:
                while d.wishes:
                    self.answer_route(d)

    def land_all(self) -> None:
        for write in list(self.flights):
            if not self.flights[write].has_landed:
                self.land(write)
            self.end(write)

    # How effects and events come back.

    @property
    def ranks(self) -> list[PrefillRank | DecodeRank]:
        return [*self.ps, *self.ds]

    def settle(self) -> None:
        for rank in self.ranks:
            while rank.desk.outbox:
                self._do(rank, rank.desk.outbox.popleft())
            while rank.desk.events:
                self._hear(rank, rank.desk.events.popleft())

    def _do(self, rank: PrefillRank | DecodeRank, effect: out.Outward) -> None:
        if isinstance(effect, out.Tell):
            port = int(effect.endpoint.rpartition(":")[2])
            for other in self.ranks:
                if other.port == port:
                    other.inbox.append(effect.frame)
        elif isinstance(rank, PrefillRank):
            self._do_p(rank, effect)
        else:
            self._do_d(rank, effect)

    def _do_p(self, p: PrefillRank, effect: out.Outward) -> None:
        match effect:
            case out.StartWrite(write):
                (target,) = [d for d in self.ds if d.attach.session == write.peer]
                assert write.key is not None
                self.flights[p.tp, write.id] = Flight(write, write.key, p, target)
            case out.AttachPeer(peer):
                p.attaching.append(peer.name)
            case _:
                pass

    def _do_d(self, d: DecodeRank, effect: out.Outward) -> None:
        match effect:
            case out.FindRoute():
                d.wishes.append(effect)
            case out.VerifyBlocks():
                d.verifying.append(effect)
            case out.ReportRefusal():
                self.reported.append(effect)
            case out.Admit(key, areas):
                d.admitted[key] = [(at, length) for at, length in areas.tolist()]
            case out.Revoke(key, through):
                d.admitted.pop(key, None)
                if {"tcp"} >= (through or {p.way for p in self.ps}):
                    d.desk.revoked(key, through)
            case _:
                pass

    def _hear(self, rank: PrefillRank | DecodeRank, event: TransferEvent) -> None:
        self.heard.append(event)
        key = event.room, event.attempt
        kind = type(event).__name__
        self.told[kind, key] += 1
        rank.told[kind, key] += 1
        if isinstance(rank, DecodeRank):
            self._hear_d(rank, event, key)
        elif isinstance(event, SendEnded):
            assert rank.told["SendEnded", key] == 1, "SendEnded is told once"
            rank.sources.discard(key)

    def _hear_d(self, d: DecodeRank, event: TransferEvent, key: Key) -> None:
        d.heard.append(event)
        match event:
            case Quiet():
                assert d.told["Quiet", key] == 1, "Quiet is told once"
                d.quarantine.discard(key)
                if key in d.books.kept:
                    d.books.give(key)
            case Received():
                kept = d.head_offsets(d.books.kept[key][0])
                assert kept <= d.landed.get(key, set()), "the slot came before the KV"
                if key in d.quarantine:  # it crossed with the abort: nothing is written later
                    d.quarantine.discard(key)
                    d.books.give(key)
            case ReceiveFailed():
                if key in d.books.kept:
                    d.quarantine.add(key)
            case FirstTokens():
                assert d.told["FirstTokens", key] == 1, "first tokens are told once"
                assert d.tp == 0, "a follower has no scheduler"
                assert not d.told["Received", key], "they go ahead of the KV"
            case ReceiverReady() | PromptStarted():
                pass
            case SenderReady() | SendFailed() | SendEnded():
                raise AssertionError(f"a decode rank says {event}")

    # What tests ask.

    def has(self, kind: type, key: Key) -> bool:
        return self.told[kind.__name__, key] > 0

    def check_baseline(self) -> None:
        """Nothing is left of anything."""
        for p in self.ps:
            assert not p.desk.rooms
            assert not len(p.desk.writes)
            assert not p.desk.quarantined
            assert not len(p.desk.early)
            assert not p.sources
        for d in self.ds:
            assert not d.desk.rooms
            assert not len(d.desk.writers)
            assert not d.desk.quarantined
            assert not d.books.kept
            assert not d.slots.waiting
            assert not d.admitted
        assert not self.flights


def record(key: Key, tokens: int = 8) -> SlotRecord:
    return SlotRecord(key[0], key[1], SLOT_COMPLETE, tokens, 0, 42, -0.5)
