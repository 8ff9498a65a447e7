"""A transport that does what a test says: it attaches or not, and ends are told by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from pdrt.data.transport.promise import Areas, Ended, Key, Peer, Write, offered
from pdrt.errors import TransferFailed


class Scripted:
    """`refuses`: why no peer can be attached. Writes end when the test tells their ends."""

    def __init__(self, name: str, refuses: str = "", proves: bool = False) -> None:
        self.name, self.refuses, self.proves = name, refuses, proves
        self.attached: list[str] = []
        self.started: list[Write] = []
        self.calls: list[tuple[str, object]] = []
        self.told: asyncio.Queue[Ended | BaseException | None] = asyncio.Queue()

    @property
    def offers(self) -> dict[str, bytes]:
        return {self.name: self.name.encode()}

    @property
    def counters(self) -> Mapping[str, float]:
        return {}

    def via(self, _peer: str) -> str:
        return self.name

    async def attach(self, peer: Peer) -> None:
        offered(peer, self.name)
        self.calls.append(("attach", peer.name))
        if self.refuses:
            raise TransferFailed(self.refuses)
        self.attached.append(peer.name)

    def detach(self, peer: str) -> None:
        self.calls.append(("detach", peer))
        if peer in self.attached:
            self.attached.remove(peer)

    def start(self, write: Write) -> None:
        self.started.append(write)
        if write.peer not in self.attached:
            self.told.put_nowait(Ended(write.id, "not attached"))

    def abort(self, write: int) -> None:
        if write in [each.id for each in self.started]:
            self.told.put_nowait(Ended(write, "aborted"))

    def admit(self, key: Key, _areas: Areas) -> None:
        self.calls.append(("admit", key))

    def revoke(self, key: Key, _through: frozenset[str]) -> bool:
        self.calls.append(("revoke", key))
        return self.proves

    async def ends(self) -> AsyncIterator[Ended]:
        while (end := await self.told.get()) is not None:
            if isinstance(end, BaseException):
                raise end
            yield end

    async def close(self) -> None:
        self.calls.append(("close", None))
        self.told.put_nowait(None)
