"""What is said of the prefill ranks that have a part in one attempt."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.data.checksums import Corrupt
from pdrt.data.events import SLOT_COMPLETE, SlotRecord
from pdrt.data.metadata import disagreement
from pdrt.data.prefill_peers import PrefillPeers
from pdrt.data.transfer import Leg, Receiver
from pdrt.messages import Attach


def trouble(rank: str, record: SlotRecord, writing: Sequence[Leg]) -> str:
    """Why what has landed is no success; empty when it may become one."""
    if record.status != SLOT_COMPLETE:
        return f"slot status {record.status} of prefill rank {rank}"
    cause = disagreement({leg.rank: leg.record for leg in writing if leg.record is not None})
    return f"prefill ranks {cause}" if cause else ""


def damage(receiver: Receiver, corrupt: Corrupt, kv_heads: int) -> str:
    """Where it is, and who sent it."""
    assert receiver.handshake is not None
    writers = _writers_of(corrupt.head, kv_heads, list(receiver.legs.values()))
    return (
        f"{corrupt.blocks} blocks are not what was sent: first the prompt's block"
        f" {receiver.handshake.first_block + corrupt.index}, which is our block"
        f" {corrupt.block}, kv head {corrupt.head} from prefill rank {writers}"
    )


def _writers_of(head: int, heads: int, legs: Sequence[Leg]) -> str:
    """The ranks that wrote this one of our heads: each cp rank its blocks of it."""
    writing = sorted((leg for leg in legs if leg.writes), key=lambda leg: leg.place)
    shares = len({leg.rank.rpartition(",")[2] for leg in writing})
    share = head * shares // heads
    return " or ".join(leg.rank for leg in writing if leg.place % shares == share)


def told(receiver: Receiver, cause: str, peers: PrefillPeers, attach: Attach) -> str:
    """All that is needed to find the fault: each rank, its peer, its transport and its bytes."""
    wanted = len(receiver.handshake.blocks) // 4 if receiver.handshake else 0
    total = wanted * attach.layout.block_bytes
    done = min(total, sum(leg.done_bytes for leg in receiver.legs.values()))  # slots count, too
    ways = "/".join(attach.region.offers)
    legs = ", ".join(_told_of(leg, peers, ways) for leg in receiver.legs.values())
    return (
        f"room {receiver.room} attempt {receiver.attempt}: {cause};"
        f" {done} of {total} bytes known written,"
        f" last {receiver.state}; from prefill rank {legs or 'not known yet'}"
    )


def _told_of(leg: Leg, peers: PrefillPeers, ways: str) -> str:
    peer = peers.get(leg.peer)
    share = f"{leg.done_bytes} bytes" if leg.writes else "writes nothing"
    condition = peer.condition if peer else "gone"
    return f"{leg.rank} at {leg.peer} over {leg.transport or ways} ({share}, peer {condition})"
