"""Real desks and real transports of two instances in one process; only the wires are lists.

Each rank has memory of its own. What the whole model's KV is, stands in one array of heads;
what must lie in a decode rank's pool is computed from it, without asking the mapping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pdrt.config import TransferSection
from pdrt.data import outward as out
from pdrt.data.checksums import Cells
from pdrt.data.commands import AdmitReceiver, SendBlocks
from pdrt.data.events import (
    SLOT_COMPLETE,
    Received,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SlotRecord,
    TransferEvent,
)
from pdrt.data.limits import Limits, Patience
from pdrt.data.memory import PoolMemory
from pdrt.data.metadata import MetadataBufferPool
from pdrt.data.process import this_process
from pdrt.data.receivers import Receivers, Receiving
from pdrt.data.senders import Senders, Sending
from pdrt.data.transfer import Key, Receiver, Sender
from pdrt.data.transport.checked import CheckedTransport
from pdrt.data.transport.choose import open_transport
from pdrt.data.transport.promise import Peer, Transport
from pdrt.keys import ClusterKey
from pdrt.messages import (
    FROM_DECODE,
    FROM_PREFILL,
    Attach,
    KvLayout,
    Rank,
    RankAddress,
    Route,
    decode,
)

KEY = ClusterKey(b"k" * 32)
POOL = 24  # blocks
ROWS = 4
WRITERS = 4
SOURCE = ("127.0.0.1", 18800)

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Model:
    """`heads` kv heads, or one latent part on every rank."""

    heads: int
    dtype: str
    is_latent: bool = False

    def held(self, rank: int, tp: int) -> list[int]:
        """The heads of a rank, written out a second time on purpose."""
        if self.is_latent:
            return [0]
        return sorted(
            {
                (rank * max(self.heads, tp) + n) * self.heads // (tp * max(self.heads, tp))
                for n in range(max(self.heads, tp))
            }
        )

    def layout(self, tp: int) -> KvLayout:
        return KvLayout(
            block_size=4,
            dtype=self.dtype,  # type: ignore[arg-type]
            layers=2,
            kv_heads=len(self.held(0, tp)),
            head_dim=4,
            kind="latent" if self.is_latent else "heads",
            total_kv_heads=1 if self.is_latent else self.heads,
        )


def pool_of(memory: PoolMemory) -> Bytes:
    """[block, head, bytes]."""
    layout = memory.layout
    flat = np.frombuffer(memory.pool_view, dtype=np.uint8)
    return flat.reshape(memory.blocks, layout.kv_heads, layout.head_bytes)


@dataclass
class Side:
    """A rank: its desk, its memory and its transport."""

    tp: int
    held: list[int]
    memory: PoolMemory
    transport: Transport
    desk: Senders | Receivers
    endpoint: str
    events: list[TransferEvent] = field(default_factory=list)

    @property
    def pool(self) -> Bytes:
        return pool_of(self.memory)


class Fabric:
    """P prefill and D decode ranks; made on the running loop."""

    def __init__(
        self,
        model: Model,
        prefill_tp: int,
        decode_tp: int,
        transport: str,
        checksums: bool = False,
    ) -> None:
        self.model, self.prefill_tp, self.decode_tp = model, prefill_tp, decode_tp
        self.checksums = checksums
        self._config = TransferSection(transport=transport, threads=1)  # type: ignore[arg-type]
        self._group: asyncio.TaskGroup | None = None
        self._moved = asyncio.Event()
        self.ps = [self._prefill(tp) for tp in range(prefill_tp)]
        self.ds = [self._decode(tp) for tp in range(decode_tp)]

    def _prefill(self, tp: int) -> Side:
        layout = self.model.layout(self.prefill_tp)
        memory = PoolMemory(layout, POOL, 1)
        transport = CheckedTransport(open_transport(self._config, memory, "127.0.0.1", KEY), memory)
        who = replace(this_process(), pid=1000 + tp)
        me = Sending(Rank(tp=tp), who, layout, memory.pool_at, transport.name, KEY, self.prefill_tp)
        desk = Senders(me, Limits(), Patience())
        held = self.model.held(tp, self.prefill_tp)
        return Side(tp, held, memory, transport, desk, f"tcp://127.0.0.1:{6000 + tp}")

    def _decode(self, tp: int) -> Side:
        layout = self.model.layout(self.decode_tp)
        memory = PoolMemory(layout, POOL, ROWS, WRITERS)
        pool_of(memory)[:] = 0xEE
        transport = open_transport(self._config, memory, "127.0.0.1", KEY)
        endpoint = f"tcp://127.0.0.1:{5000 + tp}"
        attach = Attach(
            session=f"d{tp}",
            endpoint=endpoint,
            process=this_process(),
            layout=layout,
            region=memory.region(transport.offers),
            rank=Rank(tp=tp),
            tp=self.decode_tp,
            checksums=self.checksums,
        )
        slots = MetadataBufferPool(memory.slots_view, ROWS, WRITERS)
        me = Receiving(Rank(tp=tp), self.decode_tp, attach, KEY)
        desk = Receivers(me, slots, Limits(), Patience())
        held = self.model.held(tp, self.decode_tp)
        return Side(tp, held, memory, transport, desk, endpoint)

    # What the schedulers do.

    def meet(self, key: Key, tokens: int) -> None:
        for p in self.ps:
            assert isinstance(p.desk, Senders)
            p.desk.expect(Sender(*key, tokens, b"h", 1e9))
        for d in self.ds:
            assert isinstance(d.desk, Receivers)
            d.desk.open(Receiver(*key, SOURCE, 0, 1e9))
        self.carry()

    def admit(self, d: Side, key: Key, blocks: Sequence[int], first: int, tokens: int) -> None:
        assert isinstance(d.desk, Receivers)
        if self.checksums:
            Cells(d.memory).wipe(blocks)
        row = key[0] % ROWS
        d.desk.admit(AdmitReceiver(*key, tuple(blocks), first, row, tokens, b"h", 1e9), 0.0, 0.0)
        self.carry()

    def send(self, p: Side, chunk: SendBlocks) -> None:
        assert isinstance(p.desk, Senders)
        p.desk.send(chunk, 0.0)
        self.carry()

    async def until(self, side: Side, kind: type, key: Key) -> None:
        def has() -> bool:
            return any(type(e) is kind and (e.room, e.attempt) == key for e in side.events)

        while not has():
            self._moved.clear()
            await self._moved.wait()

    # How it is carried out.

    async def __aenter__(self) -> Fabric:
        self._group = await asyncio.TaskGroup().__aenter__()
        self._readers = [self._group.create_task(self._follow(p)) for p in self.ps]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._group is not None
        for side in [*self.ps, *self.ds]:
            await side.transport.close()
        await self._group.__aexit__(None, None, None)
        for side in [*self.ps, *self.ds]:
            side.memory.close()

    async def _follow(self, p: Side) -> None:
        assert isinstance(p.desk, Senders)
        async for end in p.transport.ends():
            p.desk.write_ended(end, 0.0)
            self.carry()

    def carry(self) -> None:
        sides = [*self.ps, *self.ds]
        while any(side.desk.outbox for side in sides):
            for side in sides:
                while side.desk.outbox:
                    self._do(side, side.desk.outbox.popleft())
        for side in sides:
            side.events.extend(side.desk.events)
            side.desk.events.clear()
        self._moved.set()

    def _do(self, side: Side, effect: out.Outward) -> None:
        assert self._group is not None
        match effect:
            case out.Tell(endpoint):
                self._tell(endpoint, effect.frame)
            case out.StartWrite(write):
                side.transport.start(write)
            case out.AttachPeer(peer):
                self._group.create_task(self._attach(side, peer))
            case out.Admit(key, areas):
                side.transport.admit(key, areas)
            case out.Revoke(key, through):
                side.transport.revoke(key, through)
            case out.VerifyBlocks(record, blocks):
                assert isinstance(side.desk, Receivers)
                side.desk.verified(record, Cells(side.memory).corrupt(blocks), 0.0)
            case out.FindRoute(room, attempt):
                assert isinstance(side.desk, Receivers)
                side.desk.resolved((room, attempt), self._route(), 0.0)
            case _:
                pass

    def _tell(self, endpoint: str, frame: bytes) -> None:
        (to,) = [side for side in [*self.ps, *self.ds] if side.endpoint == endpoint]
        if isinstance(to.desk, Senders):
            to.desk.receive(decode(FROM_DECODE, frame), 0.0, 0.0)
        else:
            to.desk.receive(decode(FROM_PREFILL, frame), 0.0)

    async def _attach(self, side: Side, peer: Peer) -> None:
        assert isinstance(side.desk, Senders)
        await side.transport.attach(peer)
        side.desk.sessions.attached(peer.name, side.transport.via(peer.name))
        self.carry()

    def _route(self) -> Route:
        layout = self.model.layout(self.prefill_tp)
        ranks = {
            f"0,0,{p.tp}": RankAddress(
                rank_ip="127.0.0.1",
                rank_port=6000 + p.tp,
                process=replace(this_process(), pid=1000 + p.tp),
            )
            for p in self.ps
        }
        return Route(
            attn_tp_size=self.prefill_tp,
            attn_cp_size=1,
            dp_size=1,
            block_size=layout.block_size,
            kv_cache_dtype=layout.dtype,
            fingerprint=layout,
            instance_epoch=1,
            ranks=ranks,
        )


async def transfer(fabric: Fabric, room: int, random: Random, free: list[list[int]]) -> None:
    """One request: scattered blocks, chunks of any size, and some of it decode holds already."""
    key, blocks = (room, 0), random.randrange(1, 6)
    tokens = blocks * 4 - random.randrange(4)
    model = fabric.model
    kv = np.random.default_rng(room).integers(
        0, 256, (max(1, model.heads), blocks, model.layout(1).head_bytes), dtype=np.uint8
    )
    src = [random.sample(range(POOL), blocks) for _ in fabric.ps]
    for p, mine in zip(fabric.ps, src, strict=True):
        p.pool[mine] = kv[p.held].swapaxes(0, 1)
    dst = [[own.pop() for _ in range(blocks)] for own in free]
    firsts = [random.randrange(blocks + 1) for _ in fabric.ds]
    fabric.meet(key, tokens)
    for side in fabric.ds:
        await fabric.until(side, ReceiverReady, key)
    for d, mine, first in zip(fabric.ds, dst, firsts, strict=True):
        fabric.admit(d, key, mine[first:], first, tokens)
    for side in fabric.ps:
        await fabric.until(side, SenderReady, key)
    record = SlotRecord(room, 0, SLOT_COMPLETE, tokens, 0, 7, -0.5)
    begin = 0
    while begin < blocks:
        end = random.randrange(begin, blocks) + 1
        for p, mine in zip(fabric.ps, src, strict=True):
            last = record if end == blocks else None
            fabric.send(p, SendBlocks(*key, tuple(mine[begin:end]), begin, last))
        begin = end
    for p in fabric.ps:
        await fabric.until(p, SendEnded, key)
    for d, mine, first in zip(fabric.ds, dst, firsts, strict=True):
        await fabric.until(d, Received, key)
        expected = np.full((blocks, len(d.held), kv.shape[2]), 0xEE, dtype=np.uint8)
        expected[first:] = kv[d.held].swapaxes(0, 1)[first:]
        assert np.array_equal(d.pool[mine], expected), f"room {room}, decode rank {d.tp}"
