"""A writer that speaks tcp by hand, and a network between two transports that can fail."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from pdrt.data.layout import Runs
from pdrt.data.process import this_process
from pdrt.data.transport.promise import Key, Peer, SlotWrite, Transport
from pdrt.data.transport.tcp import TcpTransport
from pdrt.data.transport.tcp_wire import (
    BANNER_BYTES,
    NAME_BYTES,
    VERDICT_BYTES,
    Answer,
    Answers,
    FrameBuffer,
    Greeting,
    Head,
    Kind,
    Offer,
    Verdict,
)
from pdrt.keys import ClusterKey
from tests.data.transports import CLUSTER, KEY, Bench


def runs_of(lengths: Sequence[int]) -> Runs:
    """Runs one after the other at the source, backwards and with gaps at the target."""
    rows = [(sum(lengths[:n]), 100_000 - 1000 * n, size) for n, size in enumerate(lengths)]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def offer_of(target: Transport) -> Offer:
    return Offer.unpack(target.offers["tcp"])


@dataclass
class RawWriter:
    """One greeted connection; every byte is the test's."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    frames: FrameBuffer
    answers: Answers
    heard: list[Answer] = field(default_factory=list)

    def frame(
        self,
        write: int,
        at: int,
        data: bytes,
        key: Key | None = KEY,
        total: int | None = None,
        slot: SlotWrite | None = None,
    ) -> bytes:
        """A data frame with one run, the last one when `total` is given."""
        runs: Runs = np.array([[0, at, len(data)]], dtype=np.int64)
        sizes = (1, len(data), len(slot.data) if slot else 0)
        head = Head(Kind.DATA, write, key, total is not None, total or 0, *sizes)
        return self.packed(head, runs, slot) + data

    def packed(self, head: Head, runs: Runs | None = None, slot: SlotWrite | None = None) -> bytes:
        length = self.frames.pack(head, runs, slot)
        at = self.frames.sent_at
        return bytes(self.frames.view[at : at + length])

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        while not self.heard:
            data = await self.reader.read(4096)
            assert data, "the target hung up"
            self.heard += self.answers.parse(data)
        return self.heard.pop(0)

    async def close(self) -> None:
        self.writer.transport.abort()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


async def is_hung_up_on(reader: asyncio.StreamReader) -> bool:
    """Waits until the other side has ended the connection."""
    with suppress(ConnectionError):
        while await reader.read(4096):
            pass
    return True


async def raw_writer(
    offer: Offer, link: bytes | None = None, key: ClusterKey = CLUSTER
) -> RawWriter:
    reader, writer = await asyncio.open_connection(offer.host, offer.port)
    greeting = Greeting(key)
    banner = await reader.readexactly(BANNER_BYTES)
    writer.write(greeting.hello(banner, offer.memory, link or os.urandom(NAME_BYTES)))
    assert greeting.judged(await reader.readexactly(VERDICT_BYTES)) is Verdict.WELCOME
    keys = greeting.keys()
    return RawWriter(reader, writer, FrameBuffer(keys.frames), Answers(keys.answers))


class Network:
    """Passes bytes on between writers and one target, as long as it is told to."""

    def __init__(self, target: Offer) -> None:
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.connections = 0
        self.said: list[bytes] = []  # by the writers

    async def start(self) -> Offer:
        """What to offer instead of the target's own address."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.port = port
        return Offer(host, port, self._target.memory)

    @property
    def is_open(self) -> bool:
        return bool(self._tasks)

    def cut(self) -> None:
        """Every connection breaks; new ones can be made."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def cut_now(self) -> None:
        """The same, before anybody can turn to anything else."""
        for writer in self._writers:
            with suppress(OSError):  # one that has ended already, which a slow machine's may
                writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._flows.clear()

    def pass_on(self) -> None:
        """New connections work again; those that were swallowed stay so."""
        for task in self._tasks:
            task.cancel()
        self._flows.set()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far, near = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers |= {writer, near}
        self.said.append(b"")
        number = len(self.said) - 1
        with suppress(ConnectionError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, near, number))
                group.create_task(self._pump(far, writer, None))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int | None
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                if number is not None:
                    self.said[number] = (self.said[number] + data)[:4096]
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


def target(rig: Bench) -> TcpTransport:
    transport = rig.targets["a"]
    assert isinstance(transport, TcpTransport)
    return transport


def peer_at(rig: Bench, offer: Offer) -> Peer:
    return Peer("c", this_process(), rig.peers["a"].region({"tcp": offer.pack()}))


async def counted(rig: Bench, what: str, count: int = 1) -> None:
    while target(rig).counts[what] < count:
        await asyncio.sleep(0)


async def end_of(rig: Bench, number: int) -> str | None:
    while True:
        for end in rig.ends:
            if end.id == number:
                return end.error
        await rig.ended(len(rig.ends) + 1)


async def still_works(rig: Bench) -> None:
    rig.transport.start(rig.write(900, "a", [9], bytes(range(64))))
    assert await end_of(rig, 900) is None
    assert rig.block("a", 9) == rig.source_block(9)
