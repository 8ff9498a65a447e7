"""What a request costs beside its steps, measured on real processes whose device only sleeps.

One request at a time tells how long router and server take; many at once tell what processor time
they use for it. A device that sleeps takes none, and a step of a known length is taken off.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from aiohttp import ClientSession

from pdrt.bench.heard import Told, told_by
from pdrt.bench.layouts import Ground, Layout
from pdrt.bench.load import Ran, Server, client
from pdrt.bench.processes import cpu_s, with_children
from pdrt.bench.prompts import Prompts
from pdrt.bench.rounds import Load
from pdrt.bench.summary import quantile
from pdrt.errors import Unavailable
from pdrt.modelspec import NULL_PATH
from pdrt.sim.lengths import exactly

STEP_MS: Final = 20.0  # about what a step lasts where overheads are small beside it
_INPUT: Final = 16  # tokens: nothing is transferred to speak of
_ALONE: Final = 15  # requests, one at a time
_STREAMS: Final = 8
_SHORT, _LONG = 1, 48  # tokens of an answer
_CROWD: Final = 64  # requests, `_STREAMS` at a time
_LONG_CROWD: Final = 16
_TIMEOUT_S: Final = 60.0
_IDLE_S: Final = 2.0
_QUIET_SHARE: Final = 0.25  # of the requests: what else runs only ever adds
_WORKER: Final = "pdrt worker"
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layout's clients saw, in milliseconds, and the processor time that it took them."""

    ttft_ms: float  # one request at a time
    gap_ms: float  # between the tokens of `_STREAMS` streams
    request_cpu_ms: float  # of router, nodes and client together
    token_cpu_ms: float


@dataclass(frozen=True, slots=True)
class Overheads:
    """As in a cost file's [request], and what each step takes longer than its device."""

    front_ms: float
    handshake_ms: float
    token_ms: float
    cpu_ms: float
    token_cpu_ms: float
    step_ms: float


def overheads(together: Seen, apart: Seen) -> Overheads:
    """A request and a token take the same way, there and back: each has half of the time.

    What of it is work is counted as work, and not once more as waiting.
    """
    step_ms = max(0.0, together.gap_ms - STEP_MS)
    work_ms = together.request_cpu_ms + together.token_cpu_ms
    way_ms = max(0.0, together.ttft_ms - STEP_MS - step_ms - work_ms)
    cpu_ms = statistics.fmean((together.request_cpu_ms, apart.request_cpu_ms))
    later_ms = apart.ttft_ms - together.ttft_ms
    return Overheads(
        front_ms=way_ms / 2,
        handshake_ms=max(0.0, later_ms - (apart.request_cpu_ms - together.request_cpu_ms)),
        token_ms=way_ms / 2,
        cpu_ms=cpu_ms,
        token_cpu_ms=statistics.fmean((together.token_cpu_ms, apart.token_cpu_ms)),
        step_ms=step_ms,
    )


def found_by(ground: Ground, layout: Layout) -> Seen:
    """Start it without a model, ask it, end it. Raises PdrtError."""
    model = replace(ground.model, model=NULL_PATH, name="", dtype="", weights=0)
    return replace(ground, model=model, device={"step_ms": STEP_MS}).found_by(layout, _asked)


async def _asked(url: str) -> Seen:
    server = Server("", url, form="generate")
    async with client(_TIMEOUT_S) as session:
        await _load(session, server, _STREAMS, _SHORT, _STREAMS)
        alone = await _load(session, server, _ALONE, _SHORT, 1)
        idle = await _idle_share()
        short = await _measured(session, server, _CROWD, _SHORT, idle)
        long = await _measured(session, server, _LONG_CROWD, _LONG, idle)
    ttft = [told.ttft_s for told in _answers(alone) if told.ttft_s is not None]
    gaps = [gap for told in _answers(long.ran) for gap in told.gaps_s]
    return seen(ttft, gaps, short, long)


@dataclass(frozen=True, slots=True)
class Used:
    """Requests that were answered, and the processor time that all but workers used."""

    ran: Ran
    requests: int
    tokens: int
    cpu_s: float


def seen(ttft_s: Sequence[float], gaps_s: Sequence[float], short: Used, long: Used) -> Seen:
    """Two loads, two unknowns: what a request takes, and what each of its tokens."""
    a, b = (short.requests, short.tokens), (long.requests, long.tokens)
    det = a[0] * b[1] - a[1] * b[0]
    request_s = (short.cpu_s * b[1] - long.cpu_s * a[1]) / det
    token_s = (long.cpu_s * a[0] - short.cpu_s * b[0]) / det
    return Seen(
        ttft_ms=quantile(sorted(ttft_s), _QUIET_SHARE) * 1e3,
        gap_ms=quantile(sorted(gaps_s), _QUIET_SHARE) * 1e3,
        request_cpu_ms=max(0.0, request_s) * 1e3,
        token_cpu_ms=max(0.0, token_s) * 1e3,
    )


async def _idle_share() -> float:
    """Of one core, while nobody asks anything."""
    before = _others_cpu_s()
    await asyncio.sleep(_IDLE_S)
    return (_others_cpu_s() - before) / _IDLE_S


async def _measured(
    session: ClientSession, server: Server, requests: int, tokens: int, idle: float
) -> Used:
    before = _others_cpu_s()
    ran = await _load(session, server, requests, tokens, _STREAMS)
    used = _others_cpu_s() - before + ran.client_s
    return Used(ran, requests, requests * tokens, max(0.0, used - idle * ran.seconds))


async def _load(
    session: ClientSession, server: Server, requests: int, tokens: int, at_once: int
) -> Ran:
    """Raises Unavailable when a request fails."""
    prompts = Prompts(exactly(_INPUT), exactly(tokens), seed=requests + tokens)
    load = Load("overheads", prompts, requests, at_once)
    ran = await load.put_on(session, server, 0, lambda _whose: None)
    for told in map(told_by, ran.records):
        if told.failure:
            raise Unavailable(f"measuring overheads: {told.failure}: {told.reason}")
    return ran


def _answers(ran: Ran) -> list[Told]:
    return [told_by(record) for record in ran.records]


def _others_cpu_s() -> float:
    """Of the processes that we started, but for device workers, whose time is that of steps."""
    mine = with_children([os.getpid()]) - {os.getpid()}
    return cpu_s([pid for pid in mine if not _title(pid).startswith(_WORKER)])


def _title(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "cmdline").read_text()
    except OSError:
        return ""  # it has ended


def told(one: Overheads) -> Mapping[str, float]:
    """For a cost file's [request]."""
    digits = 3
    return {
        "front_ms": round(one.front_ms, digits),
        "handshake_ms": round(one.handshake_ms, digits),
        "token_ms": round(one.token_ms, digits),
        "cpu_ms": round(one.cpu_ms, digits),
        "token_cpu_ms": round(one.token_cpu_ms, digits),
    }
