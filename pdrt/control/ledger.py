"""The requests of late and those that run: kept as they are, and put into words when asked.

The promise: it costs a request a small object and an append; of prompts and answers nothing stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdrt.control.choice import Choice
from pdrt.control.http import Json
from pdrt.control.legs import Route
from pdrt.control.relay import Relay
from pdrt.control.rooms import router_of
from pdrt.control.setbacks import Setback
from pdrt.errors import PdrtError

KEPT: Final = 1024


@dataclass(slots=True)
class Record:
    """A request that has ended."""

    request_id: str
    path: str
    model: str
    is_stream: bool
    route: Route
    choice: Choice
    setbacks: Sequence[Setback]
    status: int
    error: PdrtError | None
    started: float
    first_byte_at: float | None
    ended: float | None

    @staticmethod
    def of(relay: Relay, started: float, ended: float | None) -> Record:
        ticket, failure = relay.ticket, relay.failure
        return Record(
            ticket.request_id,
            ticket.path,
            ticket.ask.model,
            ticket.job.stream,
            relay.route,
            relay.choice,
            relay.setbacks,
            relay.status or (failure.status if failure else 0),
            failure.error if failure else None,
            started,
            relay.first_byte_at,
            ended,
        )


@dataclass(slots=True)
class Ledger:
    """`wall_at` gives the wall clock's time for one of the router's own clock."""

    wall_at: Callable[[float], float]
    running: dict[Relay, float] = field(default_factory=dict)  # when each began
    ended: deque[Record] = field(default_factory=lambda: deque(maxlen=KEPT))

    def begin(self, relay: Relay, now: float) -> None:
        self.running[relay] = now

    def end(self, relay: Relay, now: float) -> None:
        started = self.running.pop(relay)
        relay.ticket.ask.forget_prompt()
        self.ended.append(Record.of(relay, started, now))

    def lines(self, now: float) -> list[Json]:
        """Each in short, the newest first."""
        return [_short(each, now, self.wall_at) for each in self._all()]

    def find(self, request_id: str, now: float) -> Json | None:
        """The newest one of that id, in full."""
        for each in self._all():
            if each.request_id == request_id:
                return _full(each, now, self.wall_at)
        return None

    def _all(self) -> Iterator[Record]:
        for relay, started in reversed(self.running.items()):
            yield Record.of(relay, started, None)
        yield from reversed(self.ended)


def _short(entry: Record, now: float, wall_at: Callable[[float], float]) -> Json:
    choice = entry.choice
    return {
        "request_id": entry.request_id,
        "path": entry.path,
        "state": str(entry.route.state),
        "status": entry.status or None,
        "prefill": choice.prefill.name if choice.prefill else None,
        "decode": choice.decode.name,
        "tries": entry.route.tries + 1,
        "started_at": round(wall_at(entry.started), 3),
        "ms": _ms(entry.started, now if entry.ended is None else entry.ended),
        "error": entry.error.code if entry.error else None,
    }


def _full(entry: Record, now: float, wall_at: Callable[[float], float]) -> Json:
    choice, route = entry.choice, entry.route
    return _short(entry, now, wall_at) | {
        "model": entry.model or None,
        "stream": entry.is_stream,
        "room": route.room,
        "router": router_of(route.room),
        "attempt": route.attempt,
        "dp_rank": choice.dp_rank,
        "fallback": choice.fallback or None,
        "because": choice.because.told() if choice.because else None,
        "setbacks": [each.told(entry.started) for each in entry.setbacks],
        "first_byte_ms": _ms(entry.started, entry.first_byte_at),
        "story": list(route.story),
        "message": str(entry.error) if entry.error else None,
        "stage": entry.error.stage or None if entry.error else None,
    }


def _ms(since: float, until: float | None) -> float | None:
    return None if until is None else round((until - since) * 1e3, 1)
