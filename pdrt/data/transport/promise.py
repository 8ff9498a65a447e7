"""What every KV transport promises to the side that writes.

The promise that the rest of pdrt is built on: each started write ends exactly once, after
`abort`, after a lost peer and at `close` too, and once it has ended the transport never touches
its memory again, here or there. Blocks are given back on that end and on nothing else. So where
nothing proves that a write is over (a foreign engine's, whose connection broke or whose peer
stands still), its end waits for the peer's death; at `close` it is left out rather than made up.
Within one write the slot is written last; writes of their own promise no order among each other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pdrt.data.layout import NO_RUNS, Runs
from pdrt.errors import TransferFailed
from pdrt.messages import Process, Region

Key: TypeAlias = tuple[int, int]  # (room, attempt) names one transfer
Areas: TypeAlias = npt.NDArray[np.int64]  # rows of (offset, length) in one memory


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode rank's memory, as its worker described it. `name` is that worker's session."""

    name: str
    process: Process
    region: Region
    checksums: bool = False  # it checks what arrives, so the writer sends checksums along


def offered(peer: Peer, transport: str) -> bytes:
    """What this transport needs to reach the peer's memory. Raises TransferFailed."""
    offers = peer.region.offers
    if transport not in offers:
        raise TransferFailed(
            f"{peer.name} offers {', '.join(offers) or 'no transport'}, not {transport}"
        )
    return offers[transport]


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """The 64 bytes that are written after everything else of a write."""

    at: int
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Copy `runs` (source offset, destination offset, length), then the slot."""

    id: int  # never used twice while the process lives
    peer: str
    runs: Runs = field(default_factory=lambda: NO_RUNS)
    slot: SlotWrite | None = None
    key: Key | None = None  # whose it is; None: a probe, into the peer's probe area

    @property
    def size(self) -> int:
        return int(self.runs[:, 2].sum()) + (len(self.slot.data) if self.slot else 0)


@dataclass(frozen=True, slots=True)
class Ended:
    """A write is over; nothing of it touches memory any more."""

    id: int
    error: str | None = None


class Transport(Protocol):
    """Local memory is registered at construction; `offers` is how peers reach it."""

    @property
    def name(self) -> str: ...

    @property
    def offers(self) -> dict[str, bytes]:
        """Transport name -> what a peer's transport of that name needs to reach our memory."""
        ...

    @property
    def counters(self) -> Mapping[str, float]:
        """What it has counted since it was made, by name; they only rise."""
        ...

    def via(self, peer: str) -> str:
        """The name of the transport that an attached peer is written through."""
        ...

    async def attach(self, peer: Peer) -> None:
        """Make the peer's memory reachable, once. Raises TransferFailed."""
        ...

    def detach(self, peer: str) -> None:
        """The peer is gone: end its writes, let its memory go. Unknown ones are no error.

        That proves no death: a write which may still land ends later all the same.
        """
        ...

    def start(self, write: Write) -> None:
        """Begin a write and return at once. Trouble is told by its end, never raised."""
        ...

    def abort(self, write: int) -> None:
        """Ask for an early end. Unknown and ended writes are no error."""
        ...

    def admit(self, key: Key, areas: Areas) -> None:
        """Target side: this attempt's writers may fill these areas of our memory from now on."""
        ...

    def revoke(self, key: Key, through: frozenset[str]) -> bool:
        """Target side: the attempt is over. Asked again, it answers anew.

        `through` names the transports that its writers use (what `via` says on their side, as
        their Attached told); none named means that any may be used. True: nothing of it lands
        here any more, whatever its writers do. False: only their word or their death proves that.
        """
        ...

    def ends(self) -> AsyncIterator[Ended]:
        """Ends as they happen. There is one reader; the stream ends after `close`."""
        ...

    async def close(self) -> None:
        """End every write that can be proven over, then let go of the memory and the peers."""
        ...
