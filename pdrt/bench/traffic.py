"""Decode streams among long prompts: the load that shows what the one does to the other.

A few clients have short prompts and long answers, each asking again when its answer is over;
meanwhile long prompts with short answers come at even intervals.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Final

from aiohttp import ClientSession

from pdrt.bench.heard import Record, Told, told_by
from pdrt.bench.load import Clock, Server, client, send
from pdrt.bench.prompts import LEAST_ID, Ask
from pdrt.bench.summary import Spread
from pdrt.errors import Unavailable

MOST_AT_ONCE: Final = 4  # long prompts in flight: who comes then is missed, and counted
_REQUEST_S: Final = 120.0
_PAUSE_S: Final = 0.25  # before a client whose request failed asks again
_LOOK_S: Final = 0.02
_ALONE: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    vocab: int
    streams: int = 8
    stream_input: int = 16  # tokens
    stream_output: int = 256
    prompt_input: int = 2048
    prompt_output: int = 4
    seconds: float = 60.0

    def ask(self, tokens: int, answer: int, random: Random) -> Ask:
        ids = random.choices(range(LEAST_ID, self.vocab), k=tokens)
        return Ask(tuple(ids), answer)

    def stream_ask(self, random: Random) -> Ask:
        return self.ask(self.stream_input, self.stream_output, random)

    def prompt_ask(self, random: Random) -> Ask:
        return self.ask(self.prompt_input, self.prompt_output, random)


@dataclass(slots=True)
class Seen:
    """What the clients saw while long prompts came. Seconds."""

    gaps_s: list[float] = field(default_factory=list)  # of the decode streams
    stream_ttft_s: list[float] = field(default_factory=list)
    prompt_ttft_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    missed: int = 0  # prompts that did not come, because so many others were in flight
    seconds: float = 0.0
    client_s: float = 0.0

    @property
    def itl(self) -> Spread | None:
        return Spread.of(self.gaps_s)

    @property
    def stream_tok_per_s(self) -> float:
        return len(self.gaps_s) / self.seconds

    @property
    def stalled(self) -> float:
        """The share of gaps that are ten times as long as usual: those that met a prompt."""
        if not self.gaps_s:
            return 0.0
        usual = statistics.median(self.gaps_s)
        return sum(gap > 10 * usual for gap in self.gaps_s) / len(self.gaps_s)

    @staticmethod
    def pooled(those: Sequence[Seen]) -> Seen:
        whole = Seen()
        for seen in those:
            whole.gaps_s += seen.gaps_s
            whole.stream_ttft_s += seen.stream_ttft_s
            whole.prompt_ttft_s += seen.prompt_ttft_s
            whole.failures += seen.failures
            whole.reasons = seen.reasons | whole.reasons
            whole.missed += seen.missed
            whole.seconds += seen.seconds
            whole.client_s += seen.client_s
        return whole

    def add_failure(self, told: Told) -> None:
        self.failures[told.failure] += 1
        self.reasons.setdefault(told.failure, told.reason)

    def add_stream(self, record: Record, began: float, ended: float) -> None:
        """Of a stream's answer what lies within the time that is measured."""
        told = told_by(record)
        if told.failure:
            self.add_failure(told)
            return
        pairs = pairwise(told.at)
        self.gaps_s += [b - a for a, b in pairs if began <= b <= ended]
        if told.began >= began and told.ttft_s is not None:
            self.stream_ttft_s.append(told.ttft_s)

    def add_prompt(self, record: Record) -> None:
        told = told_by(record)
        if told.failure:
            self.add_failure(told)
        elif told.ttft_s is not None:
            self.prompt_ttft_s.append(told.ttft_s)


class Clients:
    """Those of one server. Used once."""

    def __init__(
        self, session: ClientSession, server: Server, traffic: Traffic, random: Random, clock: Clock
    ) -> None:
        self._session, self._server, self._traffic = session, server, traffic
        self._random, self._clock = random, clock
        self._streams: list[Record] = []
        self._prompts: list[Record] = []

    async def alone_s(self) -> float:
        """A long prompt's time to its first token when there is nothing else to do.

        Raises Unavailable when it fails.
        """
        told = told_by(await self._send(self._traffic.prompt_ask(self._random), []))
        if told.failure or told.ttft_s is None:
            raise Unavailable(f"{self._server.base}: {told.failure}: {told.reason}")
        return told.ttft_s

    async def meet(self, every_s: float) -> Seen:
        """Streams that go on, and a prompt every so many seconds. Raises Unavailable."""
        used = time.process_time()
        async with asyncio.TaskGroup() as tasks:
            streams = [
                tasks.create_task(self._stream(place)) for place in range(self._traffic.streams)
            ]
            await self._until_all_stream()
            began = self._clock()
            missed = await self._prompts_come(every_s)
            ended = self._clock()
            for stream in streams:
                stream.cancel()
        seen = Seen(missed=missed, seconds=ended - began, client_s=time.process_time() - used)
        for record in self._streams:
            seen.add_stream(record, began, ended)
        for record in self._prompts:
            seen.add_prompt(record)
        return seen

    async def _stream(self, place: int) -> None:
        """Answers one after another; the first is shorter, so that not all end together."""
        ask = self._traffic.stream_ask(self._random)
        ask = Ask(ask.prompt, max(1, ask.max_tokens * (place + 1) // self._traffic.streams))
        while True:
            record = await self._send(ask, self._streams)
            if record.failure:
                await asyncio.sleep(_PAUSE_S)
            ask = self._traffic.stream_ask(self._random)

    async def _until_all_stream(self) -> None:
        until = self._clock() + _REQUEST_S
        while sum(bool(record.pieces) for record in self._streams) < self._traffic.streams:
            failed = next((record for record in self._streams if record.failure), None)
            if failed or self._clock() > until:
                why = f"{failed.failure}: {failed.reason}" if failed else "no first token in time"
                raise Unavailable(f"{self._server.base}: a decode stream did not begin: {why}")
            await asyncio.sleep(_LOOK_S)

    async def _prompts_come(self, every_s: float) -> int:
        """For the time that is measured, until all are answered; how many did not come."""
        missed, began = 0, self._clock()
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, 1 + max(1, round(self._traffic.seconds / every_s))):
                if sum(not record.ended for record in self._prompts) < MOST_AT_ONCE:
                    ask = self._traffic.prompt_ask(self._random)
                    tasks.create_task(self._send(ask, self._prompts))
                else:
                    missed += 1
                await asyncio.sleep(max(0.0, began + number * every_s - self._clock()))
        return missed

    async def _send(self, ask: Ask, records: list[Record]) -> Record:
        body = self._server.body(ask)
        record = Record(self._clock())
        records.append(record)
        await send(self._session, self._server.url, body, record, self._clock)
        return record


@dataclass(frozen=True, slots=True)
class Pace:
    """How often long prompts come.

    Without an interval it is found: one after the other they would take that share of the time.
    """

    every_s: float = 0.0
    share: float = 0.8


@dataclass(frozen=True, slots=True)
class Met:
    """A layout's turn, and the interval of its prompts."""

    seen: Seen
    every_s: float


async def meet(
    url: str, traffic: Traffic, random: Random, pace: Pace, told: Callable[[str], None]
) -> Met:
    """Put the traffic on pdrt at `url`. Raises Unavailable."""
    server = Server("pdrt", url, form="generate")
    async with client(_REQUEST_S) as session:
        clients = Clients(session, server, traffic, random, time.perf_counter)
        told("warming up")
        await clients.alone_s()
        every_s = pace.every_s
        if not every_s:
            told("a prompt alone")
            every_s = statistics.median([await clients.alone_s() for _ in range(_ALONE)])
            every_s /= pace.share
        told(f"a prompt every {every_s:.2f} s")
        return Met(await clients.meet(every_s), every_s)
