"""Real writes over a new way before anything depends on it: timed, and signed.

The writer copies a piece of its probe area into the peer's a few times, the last time with a
signature of its own. The peer looks for that signature when it is told that the way works: a
transport that reports success for what never came, or came elsewhere, is found out here.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import numpy as np
import structlog

from pdrt.data.layout import Runs
from pdrt.data.memory import SLOT_BYTES, HostMemory, PoolMemory
from pdrt.data.process import this_process
from pdrt.data.transport.attaching import attach, meeting
from pdrt.data.transport.promise import Ended, Peer, SlotWrite, Transport, Write
from pdrt.errors import ConfigError, PdrtError, TransferFailed
from pdrt.messages import Process

_log = structlog.get_logger()

_FIRST_ID: Final = 1 << 62  # the senders count from 1
_TIMES: Final = 3
_SIGNS: Final = 1024  # places for signatures, at the end of the area

CURES: Final = {
    "shm": "run both on one host as one user, in one pid namespace",
    "tcp": "check local_ip on both sides, the route and the firewall between them",
    "nixl": "check [transfer] nic and nixl_backend, the link of the NIC and the firewall",
    "mooncake": "check [transfer] nic and mooncake_protocol, the link of the NIC and the firewall",
    "memfabric": "check the Ascend driver, store_url and the devices of both nodes",
}


@dataclass(frozen=True, slots=True)
class Way:
    """What a peer is written through, and how fast that was when it was tried."""

    transport: str
    gb_per_s: float

    @property
    def rounded(self) -> float:
        return float(f"{self.gb_per_s:.3g}")

    def __str__(self) -> str:
        return f"{self.transport}, {self.rounded:g} GB/s"


@dataclass(frozen=True, slots=True)
class Signature:
    """What a writer leaves in a session's probe area at their meeting of this number.

    A session numbers its meetings from 1, and the next thousand each have a place of their own.
    """

    session: str
    writer: Process
    number: int

    @property
    def data(self) -> bytes:
        writer = self.writer
        text = f"{self.session} {self.number} {writer.host} {writer.pid} {writer.started}"
        return hashlib.sha512(text.encode()).digest()

    def at(self, probe_at: int, probe_bytes: int) -> int:
        return probe_at + probe_bytes - (1 + self.number % _SIGNS) * SLOT_BYTES

    def is_in(self, memory: HostMemory) -> bool:
        at = self.at(memory.probe_at, memory.probe_bytes)
        return bytes(memory.view[at : at + SLOT_BYTES]) == self.data


class Prober:
    """Tries ways through one transport; who reads the transport's ends gives it its own."""

    def __init__(
        self,
        transport: Transport,
        memory: HostMemory,
        clock: Callable[[], float],
        limit_s: float,
    ) -> None:
        self._transport, self._memory = transport, memory
        self._clock, self._limit_s = clock, limit_s
        self._ids = count(_FIRST_ID)
        self._open: dict[int, asyncio.Future[str | None]] = {}

    def ended(self, end: Ended) -> bool:
        """Whether this was the end of a probe."""
        if (told := self._open.pop(end.id, None)) and not told.done():
            told.set_result(end.error)
        return end.id >= _FIRST_ID

    async def reach(self, peer: Peer, sign: Signature) -> Way:
        """Attach a peer and try the way to it; when that fails, through what else it offers.

        Raises TransferFailed with every reason; then it is not attached.
        """
        refusals: list[str] = []
        while True:
            try:
                await attach(self._transport, peer, self._attach_s)
            except TransferFailed as error:
                raise TransferFailed("; ".join([*refusals, str(error)])) from error
            via = self._transport.via(peer.name)
            try:
                return await self._through(via, peer, sign)
            except TransferFailed as error:
                refusals.append(str(error))
            peer = without(peer, via)
            if not peer.region.offers.keys() & self._transport.offers.keys():
                raise TransferFailed("; ".join(refusals))
            _log.warning("transport_refused", transport=via, peer=peer.name, reason=refusals[-1])

    @property
    def _attach_s(self) -> float:
        """Each of several transports that are tried in turn keeps to the limit by itself."""
        return self._limit_s * max(1, len(self._transport.offers))

    async def _through(self, via: str, peer: Peer, sign: Signature) -> Way:
        doing = f"a probe through {via}"
        async with meeting(self._transport, peer.name, doing, self._limit_s):
            return await self._try_way(peer, sign)

    async def _try_way(self, peer: Peer, sign: Signature) -> Way:
        region = peer.region
        size = min(region.probe_bytes, self._memory.probe_bytes) - _SIGNS * SLOT_BYTES
        if size <= 0 or region.probe_at + region.probe_bytes > region.size:
            raise TransferFailed("no area for probes is described")
        runs = np.array([[self._memory.probe_at, region.probe_at, size]], dtype=np.int64)
        slot = SlotWrite(sign.at(region.probe_at, region.probe_bytes), sign.data)
        times = [await self._write(peer.name, runs, None) for _ in range(_TIMES - 1)]
        times.append(await self._write(peer.name, runs, slot))
        return Way(self._transport.via(peer.name), size / max(min(times), 1e-9) / 1e9)

    async def _write(self, peer: str, runs: Runs, slot: SlotWrite | None) -> float:
        """Seconds that it took."""
        number = next(self._ids)
        told = self._open[number] = asyncio.get_running_loop().create_future()
        began = self._clock()
        self._transport.start(Write(number, peer, runs, slot))
        error = await told
        if error is not None:
            via = self._transport.via(peer)
            raise TransferFailed(f"a probe write through {via} failed: {error}")
        return self._clock() - began


def without(peer: Peer, transport: str) -> Peer:
    """The same peer, as if it did not offer that."""
    offers = {name: handle for name, handle in peer.region.offers.items() if name != transport}
    return replace(peer, region=replace(peer.region, offers=offers))


async def reach_ourselves(prober: Prober, transport: Transport, memory: PoolMemory) -> list[Way]:
    """A write of this process to itself through each transport. Raises ConfigError."""
    me, ways = this_process(), []
    for name, handle in transport.offers.items():
        session = f"self-{name}-{secrets.token_hex(4)}"
        sign = Signature(session, me, 0)
        try:
            way = await prober.reach(Peer(session, me, memory.region({name: handle})), sign)
            transport.detach(session)
            if not sign.is_in(memory):
                raise TransferFailed("what a probe wrote did not arrive")
        except PdrtError as error:
            raise ConfigError(
                f"[transfer] {name}: this worker cannot write to itself: {error}; {CURES[name]}"
            ) from error
        ways.append(way)
    return ways
