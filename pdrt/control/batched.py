"""A batch at the router: a relay for each prompt, and one answer of theirs to one client.

What the relays say is written in callbacks, and joined by tasks that wait for each other and for
a slow reader; in between, each prompt has a bounded buffer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from pdrt.control.batch import Batch
from pdrt.control.http import PATH_HEADER
from pdrt.control.job import OrderJob
from pdrt.control.join import Joiner
from pdrt.control.order import Order
from pdrt.control.reader import ClientGone, Reader
from pdrt.control.relay import Relay
from pdrt.control.ticket import Client, Ticket
from pdrt.control.wire.exchange import NO_PATH, Exchange, frameless
from pdrt.control.wire.reply import Fields
from pdrt.errors import PdrtError

HIGH_WATER: Final = 1 << 16  # bytes of one prompt's answer
_SHOWN: Final = ("content-type", "cache-control")

Begin: TypeAlias = Callable[[Ticket, Client], Relay]
Step: TypeAlias = Callable[[], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the client is answered when nothing else was said."""

    error: PdrtError
    status: int = 0
    headers: Fields = ()
    path: str = NO_PATH


async def carry_batch(order: Order, ticket: Ticket, exchange: Exchange, begin: Begin) -> None:
    """Each prompt is a request of its own: chosen, retried and counted by itself."""
    batch, refusals = Batch(Joiner(order), Paced(exchange)), list[Refusal]()

    async def one(index: int, job: OrderJob) -> bool:
        refusal = await _carry(replace(ticket, job=job), batch.part(index), begin)
        if refusal is not None:
            refusals.append(refusal)
            await batch.part(index).break_off(refusal.error)
        return batch.broken is None and not batch.joiner.has_failed

    jobs = [OrderJob(part, seed=secrets.randbits(63)) for part in order.parts()]
    await batch.run([one(index, job) for index, job in enumerate(jobs)])
    if batch.broken is not None:
        refusals.append(Refusal(batch.broken))
    if batch.has_begun:
        await batch.end()
    elif refusals:
        first = refusals[0]
        exchange.path_label = first.path
        exchange.refuse(first.error, first.status, first.headers)


async def _carry(ticket: Ticket, reader: Reader, begin: Begin) -> Refusal | None:
    part = Part(reader)
    try:
        relay = begin(ticket, part)
    except PdrtError as error:  # nobody is there to serve it
        return Refusal(frameless(error))
    part.on_flow = relay.flow
    try:
        await part.run()
    finally:
        relay.client_left()  # if this was cancelled; else it is over
        part.on_flow = None  # the two hold each other
    return part.refusal


class Part:
    """A relay's client that passes on, from `run`, what it is told in callbacks."""

    def __init__(self, reader: Reader) -> None:
        self.path_label = NO_PATH
        self.refusal: Refusal | None = None
        self.on_flow: Callable[[bool], None] | None = None
        self._reader = reader
        self._steps: deque[Step | None] = deque()
        self._news = asyncio.Event()
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._bytes > HIGH_WATER

    def start(self, status: int, headers: Mapping[bytes, bytes], path: str) -> None:
        said = ((name, headers.get(name.encode(), b"").decode("latin-1")) for name in _SHOWN)
        shown = {name: value for name, value in said if value}
        self._put(partial(self._reader.start, status, {**shown, PATH_HEADER: path}))

    def write(self, chunk: bytes) -> None:
        self._bytes += len(chunk)
        self._put(partial(self._write, chunk))
        if self.is_full and self.on_flow is not None:
            self.on_flow(True)

    def finish(self) -> None:
        self._put(self._reader.finish, None)

    def break_off(self, error: PdrtError) -> None:
        self._put(partial(self._reader.break_off, error), None)

    def refuse(self, error: PdrtError, status: int = 0, headers: Fields = ()) -> None:
        self.refusal = Refusal(error, status, headers, self.path_label)
        self._put(None)

    async def run(self) -> None:
        while True:
            while not self._steps:
                self._news.clear()
                await self._news.wait()
            step = self._steps.popleft()
            if step is None:
                return
            await step()

    def _put(self, *steps: Step | None) -> None:
        self._steps.extend(steps)
        self._news.set()

    async def _write(self, chunk: bytes) -> None:
        await self._reader.write(chunk)
        self._bytes -= len(chunk)
        if not self.is_full and self.on_flow is not None:
            self.on_flow(False)


class Paced:
    """An exchange for tasks: whoever writes waits while the client is slow."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._drained = asyncio.Event()
        exchange.on_flow = self._flow

    def _flow(self, is_full: bool) -> None:
        if not is_full:
            self._drained.set()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self._check()
        named = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        self._exchange.start(status, named, headers.get(PATH_HEADER, NO_PATH))

    async def write(self, chunk: bytes) -> None:
        self._check()
        self._drained.clear()
        self._exchange.write(chunk)
        if self._exchange.is_full:
            await self._drained.wait()
            self._check()

    async def finish(self) -> None:
        self._check()
        self._exchange.finish()

    async def break_off(self, error: PdrtError) -> None:
        self._exchange.break_off(error)

    def _check(self) -> None:
        if self._exchange.is_gone:
            raise ClientGone
