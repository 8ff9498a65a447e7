"""The cluster as one plain document, for the dashboard and `pdrt top`; docs/api.md has its fields.

It is made of what the router knows anyway and asks nobody; its size is bounded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from pdrt.control.breaker import Circuit
from pdrt.control.flow import Flow
from pdrt.control.http import Json
from pdrt.control.instances import Instance
from pdrt.control.legs import State
from pdrt.control.pairs import Pair, Trust
from pdrt.control.rates import Rates
from pdrt.data.peer import Health

VERSION: Final = 1  # rises when a field goes or changes what it means; new ones may come
MOST_REQUESTS: Final = 200
MOST_PAIRS: Final = 200
_MS: Final = 1000.0
_NO_RATES: Final = Rates()

# Where a request is in its life, as people think of it.
STAGES: Final[Mapping[State, str]] = {
    State.OPEN: "prefill",
    State.JOINING: "retry",
    State.AWAITING: "transfer",
    State.HELD: "prefill",
    State.STREAMING: "decode",
    State.MOVING: "move",
    State.STRANDED: "move",
    State.SERVED: "ended",
    State.FAILED: "ended",
    State.LEFT: "ended",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What only the router itself knows. `now` and the times of others are by the wall clock."""

    pdrt: str
    now: float
    started_at: float
    is_ready: bool
    reason: str
    is_draining: bool
    in_flight: int
    max_in_flight: int
    is_plain: bool = False  # its instances are no pdrt: they tell nothing of themselves


@dataclass(frozen=True, slots=True)
class Running:
    """A request that the router serves now; `first_s` is None while nothing was answered."""

    request_id: str
    path: str
    state: State
    prefill: str | None
    decode: str
    age_s: float
    first_s: float | None
    is_stream: bool
    pieces: int  # of a stream that have been passed on
    tries: int  # instances that were lost on the way


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error that a client was told."""

    at: float
    status: int
    code: str
    stage: str
    message: str
    request_id: str


def overview(
    facts: Facts,
    instances: Sequence[Instance],
    pairs: Sequence[Pair],
    rates: Mapping[str, Rates],
    requests: Iterable[Running],
    troubles: Iterable[Trouble],
) -> Json:
    """All but the series."""
    running = list(requests)
    oldest = heapq.nlargest(MOST_REQUESTS, running, key=lambda each: each.age_s)
    unlike = heapq.nsmallest(MOST_PAIRS, pairs, key=lambda each: each.trust is Trust.PASSED)
    return {
        "version": VERSION,
        "router": asdict(facts),
        "models": sorted({i.model for i in instances if i.status and i.model}),
        "instances": [_instance(each, rates.get(each.name, _NO_RATES)) for each in instances],
        "pairs": [_pair(each) for each in unlike],
        "pairs_total": len(pairs),
        "requests": [_request(each) for each in oldest],
        "requests_total": len(running),
        "errors": [asdict(each) for each in troubles],
    }


def condition(instance: Instance) -> str:
    """One word: ready, suspect, failing, starting, draining, down or unknown."""
    status = instance.status
    if instance.health in (Health.DEAD, Health.UNKNOWN):
        return "down" if instance.is_known or instance.health is Health.DEAD else "unknown"
    if status is None:
        return "unknown"
    if not status.is_ready:
        gone = {"draining": "draining", "stopped": "draining", "failed": "down"}
        return gone.get(status.state, "starting")
    if not instance.is_routable:  # it is well, and gets nothing
        return "failing" if instance.breaker.state is Circuit.OPEN else "draining"
    return "ready" if instance.health is Health.ALIVE else "suspect"


def _instance(instance: Instance, rates: Rates) -> Json:
    told = instance.status
    row: Json = {
        "name": instance.name,
        "role": instance.role,
        "model": told.model if told else "",
        "condition": condition(instance),
        "health": instance.health,
        "state": told.state if told else None,
        "reason": instance.why_not,
        "legs": instance.load.requests,
        "queued_tokens": instance.load.tokens,
        "tokens_per_s": round(rates.per_second("tokens_out"), 1),
        "prompt_tokens_per_s": round(rates.per_second("prompt_tokens_computed"), 1),
        "transfers_per_s": round(rates.per_second("transfers"), 2),
        "sent_gb_per_s": round(rates.per_second("sent_bytes") / 1e9, 6),
    }
    if told is None:
        return row
    problems = [worker.last_problem for worker in told.workers if worker.last_problem]
    return row | {
        "running": told.load.running,
        "waiting": told.load.waiting,
        "kv_blocks": {"used": told.load.blocks_used, "total": told.load.blocks_total},
        "transfers": int(told.totals.transfers),
        "retractions": int(told.totals.retractions),
        "workers": {
            "ready": sum(worker.state == "ready" for worker in told.workers),
            "total": len(told.workers),
            "last_problem": problems[-1] if problems else None,
        },
    }


def _pair(pair: Pair) -> Json:
    transport, gb_per_s = way_of(pair)
    return {
        "prefill": pair.prefill.name if pair.prefill else None,
        "decode": pair.decode.name,
        "path": "disagg" if pair.prefill else "local",
        "trust": pair.trust,
        "is_routable": pair.is_routable,
        "reason": pair.reason,
        "canary_ms": None if pair.took_s is None else round(pair.took_s * _MS, 1),
        "transport": transport,
        "gb_per_s": gb_per_s,
    }


def way_of(pair: Pair) -> tuple[str | None, float | None]:
    """What carries KV from one to the other, and how fast it was when it was tried."""
    if pair.prefill is None or pair.prefill.status is None or pair.decode.status is None:
        return None, None
    ends = [f"{worker.endpoint}#" for worker in pair.prefill.status.workers if worker.endpoint]
    for worker in pair.decode.status.workers:
        for peer, way in worker.transports.items():
            if any(peer.startswith(end) for end in ends):
                return _way(way)
    return None, None


def _way(text: str) -> tuple[str, float | None]:
    """'tcp, 2.4 GB/s' as leaders say it."""
    name, _, speed = text.partition(", ")
    try:
        return name, float(speed.removesuffix(" GB/s"))
    except ValueError:
        return name, None


def _request(running: Running) -> Json:
    return {
        "request_id": running.request_id,
        "path": running.path,
        "stage": _stage(running),
        "prefill": running.prefill,
        "decode": running.decode,
        "age_s": round(running.age_s, 2),
        "first_ms": None if running.first_s is None else round(running.first_s * _MS, 1),
        "pieces": running.pieces,
        "tries": running.tries,
    }


def _stage(running: Running) -> str:
    """Of an answer that is not streamed nothing is heard before its end, when KV has long moved."""
    is_awaited = running.state is State.AWAITING
    if is_awaited and running.prefill is None:
        return "prefill"
    return "decode" if is_awaited and not running.is_stream else STAGES[running.state]


def series(flow: Flow, now: float, wall: float, seconds: int) -> Json:
    """The last seconds as columns, oldest first, and the last minute's percentiles."""
    told = flow.series(now, seconds)
    first, gap = flow.lately(now)
    return {
        "ends_at": round(wall - (now - (flow.ends - 1.0)), 3),  # of the last second
        "requests_per_s": [each.started for each in told],
        "ended_per_s": [each.ended for each in told],
        "errors_per_s": [each.failed for each in told],
        "pieces_per_s": [each.pieces for each in told],
        "tokens_per_s": [round(each.tokens_per_s, 1) for each in told],
        "sent_gb_per_s": [round(each.bytes_per_s / 1e9, 6) for each in told],
        "ttft_ms": _columns([each.first for each in told]),
        "itl_ms": _columns([each.gap for each in told]),
        "last_minute": {"ttft_ms": _pair_of(first), "itl_ms": _pair_of(gap)},
    }


def _columns(rows: Sequence[tuple[float | None, ...]]) -> Json:
    return {
        "p50": [_ms(row[0]) for row in rows],
        "p99": [_ms(row[1]) for row in rows],
    }


def _pair_of(values: Sequence[float | None]) -> Json:
    return {"p50": _ms(values[0]), "p99": _ms(values[1])}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * _MS, 2)
