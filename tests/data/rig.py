"""Two desks joined by wires, a transport and schedulers that the test steers, without a socket.

The rig keeps the books of a decode rank's blocks and slots, and checks at each written byte
that it lands in memory that is still kept for its attempt.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pdrt.data import outward as out
from pdrt.data.commands import AdmitReceiver, SendBlocks
from pdrt.data.events import (
    SLOT_COMPLETE,
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
from pdrt.data.limits import Limits, Patience
from pdrt.data.memory import SLOT_BYTES
from pdrt.data.metadata import MetadataBufferPool
from pdrt.data.receivers import Receivers, Receiving
from pdrt.data.senders import Senders, Sending
from pdrt.data.transfer import Key, Receiver, Sender
from pdrt.data.transport.promise import Ended, Write
from pdrt.keys import ClusterKey
from pdrt.messages import (
    FROM_DECODE,
    FROM_PREFILL,
    Attach,
    KvLayout,
    Problem,
    Process,
    Rank,
    RankAddress,
    Region,
    Route,
    decode,
)

LAYOUT = KvLayout(block_size=4, dtype="uint8", layers=1, kv_heads=1, head_dim=2)
BLOCK = LAYOUT.block_bytes
KEY = ClusterKey(b"k" * 32)
PATIENCE = Patience()
LIMITS = Limits()
SOURCE = ("127.0.0.1", 18800)
PROBLEM = Problem(code="cancelled", message="the client left", stage="test")
WALL = 1e9


def process(pid: int) -> Process:
    return Process(host="here", pid=pid, started=pid * 10)


def attach(layout: KvLayout = LAYOUT, session: str = "d0", blocks: int = 32) -> Attach:
    """A decode worker with 8 slots, whose pool begins after 512 bytes."""
    region = Region(
        offers={"shm": b""},
        size=512 + blocks * layout.block_bytes,
        slots_at=0,
        slots=8,
        pool_at=512,
        blocks=blocks,
    )
    return Attach(
        session=session,
        endpoint=f"tcp://127.0.0.1:{5000 + int(session[1:])}",
        process=process(500 + int(session[1:])),
        layout=layout,
        region=region,
    )


def new_senders(life: int = 0, limits: Limits = LIMITS) -> Senders:
    """The prefill rank's desk in its life number `life`."""
    me = Sending(Rank(), process(100 + life), LAYOUT, 0, "shm", KEY)
    return Senders(me, limits, PATIENCE)


def route(life: int = 0, fingerprint: KvLayout = LAYOUT, tp: int = 1) -> Route:
    address = RankAddress(rank_ip="127.0.0.1", rank_port=6000 + life, process=process(100 + life))
    return Route(
        attn_tp_size=tp,
        attn_cp_size=1,
        dp_size=1,
        block_size=fingerprint.block_size,
        kv_cache_dtype=fingerprint.dtype,
        fingerprint=fingerprint,
        instance_epoch=life,
        ranks={f"0,0,{rank}": address for rank in range(tp)},
    )


@dataclass(slots=True)
class Flight:
    """A write that the transport has."""

    write: Write
    key: Key
    has_landed: bool = False


@dataclass(slots=True)
class Books:
    """What the decode rank's scheduler keeps: free blocks and slots, and whose the others are."""

    free: list[int]
    slots: list[int]
    kept: dict[Key, tuple[list[int], int]] = field(default_factory=dict)

    def take(self, key: Key, blocks: int) -> tuple[list[int], int]:
        taken = [self.free.pop() for _ in range(blocks)], self.slots.pop()
        self.kept[key] = taken
        return taken

    def give(self, key: Key) -> None:
        blocks, slot = self.kept.pop(key)
        self.free.extend(blocks)
        self.slots.append(slot)


class Rig:
    """Prefill rank `p` and decode rank `d`; the test says what arrives, lands and ends."""

    def __init__(self, blocks: int = 32, limits: Limits = LIMITS) -> None:
        self.now = 0.0
        self.life = 0
        self._limits = limits
        self.p = new_senders(limits=limits)
        self.attach = attach(blocks=blocks)
        self.memory = bytearray(8 * SLOT_BYTES)
        self.slots = MetadataBufferPool(memoryview(self.memory), 8)
        self.d = Receivers(Receiving(Rank(), 1, self.attach, KEY), self.slots, limits, PATIENCE)
        self.to_p: list[bytes] = []
        self.to_d: list[bytes] = []
        self.flights: dict[int, Flight] = {}
        self.attaching: list[str] = []
        self.wishes: list[out.FindRoute] = []
        self.books = Books(list(range(blocks)), list(range(8)))
        self.landed: dict[Key, set[int]] = {}  # where bytes of an attempt have arrived
        self.quarantine: set[Key] = set()
        self.sources: set[Key] = set()  # attempts whose source blocks are pinned
        self.heard: list[TransferEvent] = []
        self.told: Counter[tuple[str, Key]] = Counter()
        self.is_p_alive = True

    # What the schedulers do.

    def expect(self, key: Key, tokens: int = 8, deadline: float = 60.0, text: bytes = b"h") -> None:
        self.sources.add(key)
        self.p.expect(Sender(*key, tokens, text, self.now + deadline))
        self.settle()

    def open(self, key: Key, deadline: float = 60.0) -> None:
        self.d.open(Receiver(*key, SOURCE, 0, self.now + deadline))
        self.settle()

    def admit(self, key: Key, tokens: int = 8, first_block: int = 0, deadline: float = 60) -> None:
        blocks, slot = self.books.take(key, blocks_for(tokens, LAYOUT.block_size) - first_block)
        admitted = AdmitReceiver(
            *key, tuple(blocks), first_block, slot, tokens, b"h", self.now + deadline
        )
        self.d.admit(admitted, self.now, WALL + self.now)
        self.settle()

    def send(self, key: Key, src: list[int], first_block: int, last: SlotRecord | None) -> None:
        self.p.send(SendBlocks(*key, tuple(src), first_block, last), self.now)
        self.settle()

    def send_all(self, key: Key, tokens: int = 8) -> None:
        blocks = list(range(blocks_for(tokens, LAYOUT.block_size)))
        self.send(key, blocks, 0, record(key, tokens))

    def abort_receive(self, key: Key) -> None:
        if key in self.books.kept and key not in self.quarantine:
            self.quarantine.add(key)
        self.d.abort(key, "client_gone", self.now)
        self.settle()

    def abort_send(self, key: Key) -> None:
        self.p.abort(key, PROBLEM)
        self.settle()

    def finish(self, key: Key) -> None:
        """The decode side is done with a received request."""
        self.books.give(key)

    # What the world does.

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.is_p_alive:
            self.p.tick(self.now, WALL + self.now)
        self.d.tick(self.now, WALL + self.now)
        self.settle()

    def hear_p(self, at: int = 0) -> None:
        """One message arrives at the prefill rank."""
        frame = self.to_p.pop(at)
        if self.is_p_alive:
            self.p.receive(decode(FROM_DECODE, frame), self.now, WALL + self.now)
            self.settle()

    def hear_d(self, at: int = 0) -> None:
        self.d.receive(decode(FROM_PREFILL, self.to_d.pop(at)), self.now)
        self.settle()

    def answer_attach(self) -> None:
        if self.is_p_alive:
            self.p.sessions.attached(self.attaching.pop(0))
        self.settle()

    def answer_route(self) -> None:
        wish = self.wishes.pop(0)
        self.d.resolved((wish.room, wish.attempt), route(self.life), self.now)
        self.settle()

    def land(self, write: int) -> None:
        """The bytes arrive: every one of them where it still belongs."""
        flight = self.flights[write]
        self.check_flight(flight)
        for _, dst, length in flight.write.runs.tolist():
            self.landed.setdefault(flight.key, set()).update(range(dst, dst + length, BLOCK))
        if slot := flight.write.slot:
            self.memory[slot.at : slot.at + SLOT_BYTES] = slot.data
        flight.has_landed = True

    def check_flight(self, flight: Flight) -> None:
        blocks, slot = self.books.kept.get(flight.key, ([], -1))
        offsets = {512 + block * BLOCK for block in blocks}
        for _, dst, length in flight.write.runs.tolist():
            assert {*range(dst, dst + length, BLOCK)} <= offsets, f"{flight.key} writes elsewhere"
        if flight.write.slot:
            assert flight.write.slot.at == slot * SLOT_BYTES, f"{flight.key} writes another's slot"

    def end(self, write: int, error: str | None = None) -> None:
        """The transport lets go of it."""
        del self.flights[write]
        if self.is_p_alive:
            self.p.write_ended(Ended(write, error), self.now)
        self.settle()

    def scan(self) -> None:
        self.d.scan(self.now)
        self.settle()

    def kill_p(self) -> None:
        """The process is gone, its writes with it; the kernel's word has not arrived yet."""
        self.is_p_alive = False
        self.flights.clear()
        self.sources.clear()
        self.attaching.clear()

    def hear_of_death(self) -> None:
        """And now it has; a new process takes its place at another port."""
        self.d.died(process(100 + self.life), self.now)
        self.life += 1
        self.p = new_senders(self.life, self._limits)
        self.is_p_alive = True
        self.settle()

    def flow(self) -> None:
        """Everything that is said arrives, everything that is asked is answered."""
        while self.to_p or self.to_d or self.attaching or self.wishes:
            while self.to_p:
                self.hear_p()
            while self.to_d:
                self.hear_d()
            while self.attaching:
                self.answer_attach()
            while self.wishes:
                self.answer_route()

    def land_all(self) -> None:
        for write in list(self.flights):
            if not self.flights[write].has_landed:
                self.land(write)
            self.end(write)

    # How effects and events come back.

    def settle(self) -> None:
        for desk in (self.p, self.d):
            while desk.outbox:
                self._do(desk.outbox.popleft())
            while desk.events:
                self._hear(desk.events.popleft())

    def _do(self, effect: out.Outward) -> None:
        match effect:
            case out.Tell(endpoint) if ":5" in endpoint[-6:]:
                self.to_d.append(effect.frame)
            case out.Tell(endpoint):
                if endpoint.endswith(str(6000 + self.life)):
                    self.to_p.append(effect.frame)
            case out.StartWrite(write):
                key = self._key_of(write.id)
                self.flights[write.id] = Flight(write, key)
            case out.AttachPeer(peer):
                self.attaching.append(peer.name)
            case out.FindRoute():
                self.wishes.append(effect)
            case _:
                pass

    def _key_of(self, write: int) -> Key:
        (key,) = self.p.writes.held_by(write)
        return key

    def _hear(self, event: TransferEvent) -> None:
        self.heard.append(event)
        key = event.room, event.attempt
        self.told[type(event).__name__, key] += 1
        match event:
            case Quiet():
                assert self.told["Quiet", key] == 1, "Quiet is told once"
                self.quarantine.discard(key)
                if key in self.books.kept:
                    self.books.give(key)
            case Received():
                kept = {512 + block * BLOCK for block in self.books.kept[key][0]}
                assert kept <= self.landed.get(key, set()), "the slot came before the KV"
                if key in self.quarantine:  # it crossed with the abort: nothing is written later
                    self.quarantine.discard(key)
                    self.books.give(key)
            case ReceiveFailed():
                if key in self.books.kept:
                    self.quarantine.add(key)
            case SendEnded():
                assert self.told["SendEnded", key] == 1, "SendEnded is told once"
                self.sources.discard(key)
            case ReceiverReady() | PromptStarted() | SenderReady() | SendFailed():
                pass

    # What tests ask.

    def has(self, kind: type, key: Key) -> bool:
        return self.told[kind.__name__, key] > 0

    def check_baseline(self) -> None:
        """Nothing is left of anything."""
        assert not self.p.rooms
        assert not self.d.rooms
        assert not self.p.quarantined
        assert not self.d.quarantined
        assert not len(self.p.early)
        assert not self.books.kept
        assert not self.sources
        assert not self.slots.waiting
        assert not self.flights


def record(key: Key, tokens: int = 8) -> SlotRecord:
    return SlotRecord(key[0], key[1], SLOT_COMPLETE, tokens, 0, 42, -0.5)
