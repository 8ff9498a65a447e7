"""Several transports as one: each peer is written through the first that reaches it.

Nothing is passed over in silence: what could have been used and did not attach is logged with
its reason before the next is tried. A peer that was attached stays with its transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

import structlog

from pdrt.data.process import is_same_host
from pdrt.data.transport.attaching import attach
from pdrt.data.transport.promise import Areas, Ended, Key, Peer, Transport, Write
from pdrt.errors import TransferFailed

ATTACH_S: Final = 10.0

_log = structlog.get_logger()


class Choosing:
    """`inner` in order of preference, each of another name; made on the running loop.

    `attach_s`: how long each of them may take to attach a peer.
    """

    def __init__(self, inner: Sequence[Transport], attach_s: float = ATTACH_S) -> None:
        self._attach_s = attach_s
        self._inner = {transport.name: transport for transport in inner}
        self._ways: dict[str, Transport] = {}
        self._ends: asyncio.Queue[Ended | BaseException | None] = asyncio.Queue()
        self._is_closing = False
        loop = asyncio.get_running_loop()
        self._pumps = [loop.create_task(self._read(each)) for each in inner]

    @property
    def name(self) -> str:
        return "/".join(self._inner)

    @property
    def offers(self) -> dict[str, bytes]:
        return {name: handle for t in self._inner.values() for name, handle in t.offers.items()}

    @property
    def counters(self) -> Mapping[str, float]:
        return {what: n for t in self._inner.values() for what, n in t.counters.items()}

    def via(self, peer: str) -> str:
        return self._way(peer).via(peer)

    async def attach(self, peer: Peer) -> None:
        if peer.name in self._ways:
            return
        offers = ", ".join(peer.region.offers) or "no transport"
        if not self._inner.keys() & peer.region.offers:
            raise TransferFailed(f"{peer.name} offers {offers}, not {self.name}")
        refusals: list[str] = []
        for name, transport in self._inner.items():
            if reason := _why_not(name, peer):
                refusals.append(f"{name}: {reason}")
                continue
            try:
                await attach(transport, peer, self._attach_s)
            except TransferFailed as error:
                _log.warning("transport_refused", transport=name, peer=peer.name, reason=str(error))
                refusals.append(f"{name}: {error}")
            else:
                self._ways[peer.name] = transport
                return
        raise TransferFailed(
            f"no transport reaches {peer.name}, which offers {offers}: {'; '.join(refusals)}"
        )

    def detach(self, peer: str) -> None:
        self._way(peer).detach(peer)
        self._ways.pop(peer, None)

    def start(self, write: Write) -> None:
        self._way(write.peer).start(write)

    def abort(self, write: int) -> None:
        for transport in self._inner.values():  # to all others it is unknown
            transport.abort(write)

    def admit(self, key: Key, areas: Areas) -> None:
        for transport in self._inner.values():
            transport.admit(key, areas)

    def revoke(self, key: Key, through: frozenset[str]) -> bool:
        answers = {name: t.revoke(key, through) for name, t in self._inner.items()}
        return all(answers.get(name, False) for name in through or answers)

    async def ends(self) -> AsyncIterator[Ended]:
        """Over as soon as one of the inner streams is: its writes cannot be followed any more."""
        while (end := await self._ends.get()) is not None:
            if isinstance(end, BaseException):
                raise end
            yield end

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(transport.close() for transport in self._inner.values()))
        await asyncio.gather(*self._pumps)
        self._ends.put_nowait(None)  # after the last end of all

    def _way(self, peer: str) -> Transport:
        """A peer that nobody attached is any transport's to refuse."""
        return self._ways.get(peer) or next(iter(self._inner.values()))

    async def _read(self, transport: Transport) -> None:
        try:
            async for end in transport.ends():
                self._ends.put_nowait(end)
        except Exception as error:  # noqa: BLE001 - the reader of our ends is told, and it fails
            self._ends.put_nowait(error)
        if not self._is_closing:
            self._ends.put_nowait(None)


def _why_not(transport: str, peer: Peer) -> str:
    """Why it need not even be tried; empty when it may work."""
    if transport not in peer.region.offers:
        return "not offered there"
    if transport == "shm" and not is_same_host(peer.process):
        return "another host, or another container of this one"
    return ""
