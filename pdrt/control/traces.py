"""Traces of requests, as routers and leaders make them; who records them is told at the start.

Off means None: then no request pays for it. A header that a client sent is never trusted to be
more than an identity: what is not a W3C traceparent begins a trace of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias

from pdrt.control.legs import DecodeEnded, DecodeFailed, Event, PrefillDone, PrefillFailed
from pdrt.errors import PdrtError

TRACEPARENT: Final = "traceparent"
Told: TypeAlias = str | int | float
Side: TypeAlias = Literal["prefill", "decode"]


class RequestTrace(Protocol):
    """One request at a router, with a span for each leg of it."""

    def opened(self, side: Side, number: int, instance: str) -> str:
        """A leg begins; the header with which its leader joins the trace."""
        ...

    def leg_ended(self, side: Side, number: int, error: PdrtError | None = None) -> None:
        """Once or again: the first counts."""
        ...

    def event(self, name: str) -> None: ...

    def ended(self, told: Mapping[str, Told], error: PdrtError | None = None) -> None:
        """All of it, its legs too."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """A leader's part of a request, once it has ended; seconds on one clock."""

    role: str
    arrived: float
    ended: float
    events: Sequence[tuple[str, float]] = ()
    told: Mapping[str, Told] = field(default_factory=dict)
    code: str = "ok"


class Tracing(Protocol):
    def request(self, traceparent: str, told: Mapping[str, Told]) -> RequestTrace: ...

    def served(self, traceparent: str, served: Served) -> None: ...

    def close(self) -> None:
        """Send what is still here; it takes a few seconds at most."""
        ...


def note(trace: RequestTrace, event: Event) -> None:
    """What ends a leg ends its span."""
    match event:
        case PrefillDone(leg):
            trace.leg_ended("prefill", leg)
        case PrefillFailed(leg, failure):
            trace.leg_ended("prefill", leg, failure.error)
        case DecodeEnded(leg):
            trace.leg_ended("decode", leg)
        case DecodeFailed(leg, failure):
            trace.leg_ended("decode", leg, failure.error)
        case _:
            pass  # of no leg, or of one that goes on
