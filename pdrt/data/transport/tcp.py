"""Any network: striped connections; the target itself places the bytes, or drops them.

How a write ends. Its frames go out over the peer's connections, the target reads each straight
into its memory, places the slot when all other bytes of the write are in place, and answers;
with that answer the write ends. An abort, or a word of the target that it drops the attempt,
stops between two frames; the write ends when the target has confirmed that nothing of it is on
its way any more. When the connections are lost, or a stuck target is detached from or closed on
and says nothing for a second, the write ends without the target's word: nothing of our memory is
read any more, and what had left before may still be placed there until the target revokes the
attempt. So a target revokes every attempt that ends; `revoke` proves and does not ask a writer.

What is protected, and from whom. Only who knows the cluster key gets in, on either side
(`tcp_wire`): mutual challenge and response before any other byte is believed, little time and
few places for strangers. Each frame's header, table and slot and each answer carry a MAC under
keys of that connection: a man in the middle can break connections, not move bytes to another
place, replay or leave out a frame. The payload itself is neither encrypted nor authenticated: who
can change packets can change KV, and who can read them can read it. Networks that are not
trusted need WireGuard or IPsec underneath. (TLS with a pre-shared key would be the alternative;
Python's ssl has it from 3.13 on, and it would copy every byte once more on each side.)
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Final

from pdrt.config import TransferSection
from pdrt.data.memory import HostMemory
from pdrt.data.transport.jobs import fits
from pdrt.data.transport.promise import Areas, Ended, Key, Peer, Write, offered
from pdrt.data.transport.tcp_lane import Lane, Patience
from pdrt.data.transport.tcp_outgoing import Dialer
from pdrt.data.transport.tcp_receive import Receiver
from pdrt.data.transport.tcp_wire import MAX_SLOT, Offer
from pdrt.errors import TransferFailed
from pdrt.keys import ClusterKey

PATIENCE: Final = Patience()


class TcpTransport:
    """Made on the running loop; listens from the first look at `offers` on."""

    def __init__(
        self,
        memory: HostMemory,
        local_ip: str,
        key: ClusterKey,
        stripes: int = 2,
        patience: Patience = PATIENCE,
    ) -> None:
        self._memory, self._key = memory, key
        self._stripes, self._patience = stripes, patience
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._ends: asyncio.Queue[Ended | None] = asyncio.Queue()
        self._receiver = Receiver(memory, local_ip, key)
        self._lanes: dict[str, Lane] = {}
        self._by_write: dict[int, Lane] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def name(self) -> str:
        return "tcp"

    @property
    def offers(self) -> dict[str, bytes]:
        """Raises ConfigError when the address cannot be listened on."""
        return {self.name: self._receiver.offer().pack()}

    @property
    def counts(self) -> Counter[str]:
        """What the receiving side refused and dropped so far."""
        return self._receiver.counts

    @property
    def counters(self) -> Mapping[str, float]:
        return {f"tcp_{what}": number for what, number in dict(self.counts).items()}

    def via(self, _peer: str) -> str:
        return self.name

    async def attach(self, peer: Peer) -> None:
        if peer.name in self._lanes:
            return
        offer = Offer.unpack(offered(peer, self.name))
        dialer = Dialer(offer, self._key, self._patience.connect_s)
        size = peer.region.size
        lane = Lane(self._memory, size, dialer, self._told, self._stripes, self._patience)
        try:
            await asyncio.to_thread(lane.open)
        except BaseException:
            self._let_go(lane, "not attached")
            raise
        if self._is_closed or peer.name in self._lanes:
            self._let_go(lane, "attached twice")
        else:
            self._lanes[peer.name] = lane
        if self._is_closed:
            raise TransferFailed("the transport is closed")

    def detach(self, peer: str) -> None:
        if lane := self._lanes.pop(peer, None):
            self._let_go(lane, "the peer is gone")

    def start(self, write: Write) -> None:
        lane = self._lanes.get(write.peer)
        error = self._refusal(write, lane)
        if lane is None or error:
            self._ends.put_nowait(Ended(write.id, error))
            return
        self._by_write[write.id] = lane
        lane.start(write)

    def abort(self, write: int) -> None:
        if lane := self._by_write.get(write):
            lane.abort(write)

    def admit(self, key: Key, areas: Areas) -> None:
        self._receiver.grants.admit(key, areas)

    def revoke(self, key: Key, _through: frozenset[str]) -> bool:
        self._receiver.grants.revoke(key)
        return True

    async def ends(self) -> AsyncIterator[Ended]:
        while (end := await self._ends.get()) is not None:
            yield end

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for lane in self._lanes.values():
            self._let_go(lane, "the transport is closed")
        await asyncio.gather(*self._leaving)
        self._lanes.clear()
        await self._receiver.close()
        self._loop.call_soon(self._ends.put_nowait, None)  # after the ends that are on their way

    def _refusal(self, write: Write, lane: Lane | None) -> str | None:
        if self._is_closed:
            return "the transport is closed"
        if lane is None:
            return f"{write.peer} is not attached"
        if not fits(write, self._memory.size, lane.size):
            return "a run lies outside the memory"
        if write.slot and len(write.slot.data) > MAX_SLOT:
            return f"a slot of more than {MAX_SLOT} bytes"
        return None

    def _let_go(self, lane: Lane, reason: str) -> None:
        task = self._loop.create_task(lane.close(reason))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _told(self, end: Ended) -> None:
        """From any thread; mostly from the loop's, which reads the answers."""
        if threading.get_ident() == self._loop_thread:
            self._end(end)
            return
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._end, end)

    def _end(self, end: Ended) -> None:
        self._by_write.pop(end.id, None)
        self._ends.put_nowait(end)


def open_tcp(
    config: TransferSection, memory: HostMemory, local_ip: str, key: ClusterKey
) -> TcpTransport:
    """As the config says. To be called on the running loop.

    Each stripe keeps a core busy on either side: more than half the cores would only take turns
    (measured on 2 cores with 1 MiB blocks: one stripe 1.09 of a plain loop, two 0.88).
    """
    cores = len(os.sched_getaffinity(0))
    return TcpTransport(memory, local_ip, key, min(config.stripes, max(1, cores // 2)))
