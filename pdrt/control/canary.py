"""Tiny real requests through each pair, at start and after a fault, until each has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog

from pdrt.control import order
from pdrt.control.choice import Choice
from pdrt.control.http import CANARY_HEADER
from pdrt.control.job import OrderJob
from pdrt.control.pairs import (
    CanaryFailed,
    CanaryPassed,
    CanaryShed,
    CanaryStarted,
    Pair,
    PairEvent,
    feed,
)
from pdrt.control.relay import Relay
from pdrt.control.ticket import Ticket, Tools
from pdrt.control.wire.reply import Fields
from pdrt.errors import Overloaded, PdrtError

PATH: Final = "/generate"
CANARY_S: Final = 20.0  # a model's first steps may be slow
_BODY: Final = {
    "prompt": [1],
    "sampling_params": {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "seed": 0},
}

log = structlog.get_logger(__name__)


class NoReader:
    """A client that wants to know nothing but how it ends."""

    is_full = False
    path_label = ""

    def __init__(self) -> None:
        self.error: PdrtError | None = None

    def start(self, status: int, headers: Mapping[bytes, bytes], path: str) -> None:
        pass

    def write(self, chunk: bytes) -> None:
        pass

    def finish(self) -> None:
        pass

    def break_off(self, error: PdrtError) -> None:
        self.error = error

    def refuse(self, error: PdrtError, status: int = 0, headers: Fields = ()) -> None:
        self.error = error


async def try_pairs(tools: Tools, retry_s: float) -> None:
    """Keep every pair tried. Cancel the task to stop."""
    fleet = tools.fleet
    async with asyncio.TaskGroup() as tasks:
        under_way: dict[Pair, asyncio.Task[None]] = {}
        while True:
            fleet.news.clear()
            under_way = {pair: task for pair, task in under_way.items() if not task.done()}
            for pair in fleet.pairs:
                if pair.is_due and pair not in under_way:
                    under_way[pair] = tasks.create_task(_try_until_passed(tools, pair, retry_s))
            await fleet.news.wait()


async def _try_until_passed(tools: Tools, pair: Pair, retry_s: float) -> None:
    while pair.is_due and pair in tools.fleet.pairs:  # its members have not left
        feed(pair, CanaryStarted())
        event = await _try_once(tools, pair)
        feed(pair, event)
        tools.fleet.told()
        if not isinstance(event, CanaryPassed):
            await tools.clocks.pause(retry_s)
    tools.fleet.news.set()  # it may have become due again since the last look


async def _try_once(tools: Tools, pair: Pair) -> PairEvent:
    clock = tools.clocks.clock
    started = clock()
    ticket = Ticket(
        request_id=f"canary-{tools.mint_room():016x}",
        path=PATH,
        job=OrderJob(order.parse("generate", dict(_BODY)), seed=0),
        deadline=started + CANARY_S,
        may_retry=False,
        lines=f"{CANARY_HEADER}: 1\r\n".encode(),
    )
    rank = pair.prefill.choose_rank("round_robin") if pair.prefill else 0
    tools.fleet.turn += 1
    reader = NoReader()
    choice = Choice(pair.prefill, pair.decode, rank)
    ended = asyncio.Event()
    relay = Relay(ticket, choice, tools, reader, lambda _relay: ended.set())
    relay.start()
    try:
        await ended.wait()
    finally:
        relay.client_left()  # it has, if this was cancelled
    return _verdict(pair, reader.error, clock() - started)


def _verdict(pair: Pair, error: PdrtError | None, took_s: float) -> PairEvent:
    if error is None:
        pair.reason, pair.took_s = "", took_s
        log.info("canary_passed", pair=pair.name, ms=round(took_s * 1e3, 1))
        return CanaryPassed()
    pair.reason = f"its canary failed: {error}"
    log.warning("canary_failed", pair=pair.name, code=error.code, reason=str(error))
    return CanaryShed() if isinstance(error, Overloaded) else CanaryFailed()
