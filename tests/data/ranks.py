"""The ranks that a rig joins: their desks, what lies in their inboxes, and a scheduler's books."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from pdrt.data import outward as out
from pdrt.data.events import TransferEvent
from pdrt.data.limits import Limits, Patience
from pdrt.data.mapping import heads_of
from pdrt.data.memory import SLOT_BYTES
from pdrt.data.metadata import MetadataBufferPool
from pdrt.data.receivers import Receivers, Receiving
from pdrt.data.senders import Senders, Sending
from pdrt.data.transfer import Key
from pdrt.keys import ClusterKey
from pdrt.messages import Attach, KvLayout, Process, Rank, RankAddress, Region, Route

LAYOUT = KvLayout(block_size=4, dtype="uint8", layers=1, kv_heads=1, head_dim=2)
KEY = ClusterKey(b"k" * 32)
PATIENCE = Patience()
LIMITS = Limits()
ROWS = 8
LIVES = 50  # at most so many lives of a prefill rank in one test


def process(pid: int, host: str = "here") -> Process:
    return Process(host=host, pid=pid, started=pid * 10)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a test's instances are cut. `writers`: slots in a row of decode memory."""

    prefill_tp: int = 1
    decode_tp: int = 1
    heads: int = 1
    writers: int = 1

    def layout(self, tp: int) -> KvLayout:
        if self == Shape():
            return LAYOUT
        kv_heads = len(heads_of(0, tp, self.heads))
        return replace(LAYOUT, kv_heads=kv_heads, total_kv_heads=self.heads)


ONE = Shape()


def attach(
    layout: KvLayout = LAYOUT,
    session: str = "d0",
    blocks: int = 32,
    shape: Shape = ONE,
    tp: int = 0,
) -> Attach:
    """A decode worker with 8 rows of slots, whose pool begins after them."""
    slots = ROWS * shape.writers
    number = int(session[1:])
    region = Region(
        offers={"shm": b""},
        size=slots * SLOT_BYTES + blocks * layout.block_bytes,
        slots_at=0,
        slots=slots,
        pool_at=slots * SLOT_BYTES,
        blocks=blocks,
    )
    return Attach(
        session=session,
        endpoint=f"tcp://127.0.0.1:{5000 + number}",
        process=process(500 + number),
        layout=layout,
        region=region,
        rank=Rank(tp=tp),
        tp=shape.decode_tp,
    )


def address(tp: int, life: int, host: str = "here") -> RankAddress:
    """Of a prefill rank in its life number `life`."""
    number = LIVES * tp + life
    return RankAddress(
        rank_ip="127.0.0.1",
        rank_port=6000 + number,
        process=process(100 + number, host),
        instance_epoch=life,
    )


def route(life: int = 0, fingerprint: KvLayout = LAYOUT) -> Route:
    return route_to({"0,0,0": address(0, life)}, fingerprint)


def route_to(ranks: dict[str, RankAddress], fingerprint: KvLayout, cp: int = 1) -> Route:
    return Route(
        attn_tp_size=len(ranks) // cp,
        attn_cp_size=cp,
        dp_size=1,
        block_size=fingerprint.block_size,
        kv_cache_dtype=fingerprint.dtype,
        fingerprint=fingerprint,
        instance_epoch=max([a.instance_epoch for a in ranks.values()], default=0),
        ranks=ranks,
    )


@dataclass(slots=True)
class Books:
    """What a decode rank's scheduler keeps: free blocks and slots, and whose the others are."""

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


@dataclass
class PrefillRank:
    shape: Shape
    tp: int
    limits: Limits
    way: str = "shm"  # what it writes through
    host: str = "here"
    cp: int = 1  # more: the ranks are context-parallel ones, each of tp = 1
    life: int = 0
    is_alive: bool = True
    inbox: list[bytes] = field(default_factory=list)
    attaching: list[str] = field(default_factory=list)
    sources: set[Key] = field(default_factory=set)  # attempts whose source blocks are pinned
    told: Counter[tuple[str, Key]] = field(default_factory=Counter)
    desk: Senders = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        tp = 1 if self.cp > 1 else self.shape.prefill_tp
        me = Sending(self.rank, self.address.process, self.layout, 0, self.way, KEY, tp=tp)
        self.desk = Senders(me, self.limits, PATIENCE)
        self.is_alive = True

    @property
    def rank(self) -> Rank:
        return Rank(cp=self.tp) if self.cp > 1 else Rank(tp=self.tp)

    @property
    def layout(self) -> KvLayout:
        return self.shape.layout(self.shape.prefill_tp)

    @property
    def address(self) -> RankAddress:
        return address(self.tp, self.life, self.host)

    @property
    def port(self) -> int:
        return self.address.rank_port

    def die(self) -> None:
        self.is_alive = False
        self.sources.clear()
        self.attaching.clear()
        self.told.clear()


@dataclass
class DecodeRank:
    shape: Shape
    tp: int
    limits: Limits
    blocks: int
    checksums: bool = False
    life: int = 0
    inbox: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new life with new memory."""
        layout = self.shape.layout(self.shape.decode_tp)
        session = f"d{self.tp + 10 * self.life}"
        plain = attach(layout, session, self.blocks, self.shape, self.tp)
        self.attach = replace(plain, checksums=self.checksums)
        self.memory = bytearray(ROWS * self.shape.writers * SLOT_BYTES)
        self.slots = MetadataBufferPool(memoryview(self.memory), ROWS, self.shape.writers)
        me = Receiving(Rank(tp=self.tp), self.shape.decode_tp, self.attach, KEY)
        self.desk = Receivers(me, self.slots, self.limits, PATIENCE)
        self.books = Books(list(range(self.blocks)), list(range(ROWS)))
        self.wishes: list[out.FindRoute] = []
        self.verifying: list[out.VerifyBlocks] = []
        self.landed: dict[Key, set[int]] = {}  # where heads of an attempt's blocks have arrived
        self.quarantine: set[Key] = set()
        self.admitted: dict[Key, list[tuple[int, int]]] = {}  # what the transport lets in
        self.slot_writers: dict[tuple[Key, int], int] = {}
        self.heard: list[TransferEvent] = []
        self.told: Counter[tuple[str, Key]] = Counter()

    @property
    def port(self) -> int:
        return int(self.attach.endpoint.rpartition(":")[2])

    def head_offsets(self, blocks: list[int]) -> set[int]:
        """Where each head's part of these blocks lies."""
        layout, pool_at = self.attach.layout, self.attach.region.pool_at
        return {
            pool_at + block * layout.block_bytes + head * layout.head_bytes
            for block in blocks
            for head in range(layout.kv_heads)
        }
