"""Traces for OpenTelemetry: spans are sent over OTLP in the background, when an endpoint is named.

The promise: no request waits for a collector; what it does not take in time is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdrt.control.traces import TRACEPARENT, Served, Side, Told
from pdrt.errors import PdrtError

_SEND_S: Final = 5  # to a collector
_FLUSH_MS: Final = 2000
_TRACES: Final = "/v1/traces"
_CARRIER: Final = TraceContextTextMapPropagator()


def url_of(endpoint: str) -> str:
    """A collector's address, with the path of traces unless another one is named."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES


def open_otlp(endpoint: str, sample: float, service: str, instance: str) -> Otel:
    exporter = OTLPSpanExporter(endpoint=url_of(endpoint), timeout=_SEND_S)
    return Otel(exporter, sample, service, instance)


class Otel:
    """One process's traces. `wall` and `clock` are asked together, to tell one from the other."""

    def __init__(
        self,
        exporter: SpanExporter,
        sample: float,
        service: str,
        instance: str,
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        resource = Resource({"service.name": service, "service.instance.id": instance})
        sampler = ParentBased(TraceIdRatioBased(sample))
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdrt")
        self._wall_ns, self._clock = wall_ns, clock

    def request(self, traceparent: str, told: Mapping[str, Told]) -> Request:
        span = self._span("request", SpanKind.SERVER, traceparent, told)
        return Request(self._leg, span)

    def _leg(self, side: Side, parent: Span, told: Mapping[str, Told]) -> Span:
        return self._tracer.start_span(
            f"{side} leg",
            context=set_span_in_context(parent),
            kind=SpanKind.CLIENT,
            attributes=_named(told),
        )

    def _span(
        self, name: str, kind: SpanKind, traceparent: str, told: Mapping[str, Told], at: int = 0
    ) -> Span:
        parent = _CARRIER.extract({TRACEPARENT: traceparent})
        return self._tracer.start_span(
            name, context=parent, kind=kind, attributes=_named(told), start_time=at or None
        )

    def served(self, traceparent: str, served: Served) -> None:
        now, wall = self._clock(), self._wall_ns()

        def at(moment: float) -> int:
            return wall - int((now - moment) * 1e9)

        name, begin = f"{served.role} request", at(served.arrived)
        span = self._span(name, SpanKind.SERVER, traceparent, served.told, begin)
        for event, moment in served.events:
            span.add_event(event, timestamp=at(moment))
        if served.code != "ok":
            span.set_status(Status(StatusCode.ERROR, served.code))
        span.end(at(served.ended))

    def close(self) -> None:
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


class Request:
    """A router's span and those of its legs. A leg that is not ended ends with it."""

    def __init__(self, leg: Callable[[Side, Span, Mapping[str, Told]], Span], span: Span) -> None:
        self._leg, self._span = leg, span
        self._legs: dict[tuple[Side, int], Span] = {}

    def opened(self, side: Side, number: int, instance: str) -> str:
        span = self._leg(side, self._span, {"instance": instance, "leg": number})
        self._legs[side, number] = span
        carrier: dict[str, str] = {}
        _CARRIER.inject(carrier, set_span_in_context(span))
        return carrier.get(TRACEPARENT, "")

    def leg_ended(self, side: Side, number: int, error: PdrtError | None = None) -> None:
        span = self._legs.pop((side, number), None)
        if span is not None:
            _end(span, error)

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def ended(self, told: Mapping[str, Told], error: PdrtError | None = None) -> None:
        for span in self._legs.values():
            span.add_event("cancelled")
            span.end()
        self._legs.clear()
        self._span.set_attributes(_named(told))
        _end(self._span, error)


def _end(span: Span, error: PdrtError | None) -> None:
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, f"{error.code}: {error}"[:500]))
    span.end()


def _named(told: Mapping[str, Told]) -> dict[str, Told]:
    return {f"pdrt.{name}": value for name, value in told.items()}
