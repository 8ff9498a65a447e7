"""What the router counts, for Prometheus; labels are bound once where they are few."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from pdrt.control.tally import Counts, Times

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class RouterMetrics:
    """A registry of its own, so that two routers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counts(
            "pdrt_router_requests",
            "Requests by route, answered status and the path that served them",
            ("route", "status", "path"),
            self.registry,
        )
        self.errors = Counter(
            "pdrt_router_errors",
            "Errors told to clients by code",
            ("code",),
            registry=self.registry,
        )
        self.retries = Counter(
            "pdrt_router_retries",
            "Legs moved to another instance before the first byte",
            registry=self.registry,
        )
        self.moved = Counter(
            "pdrt_router_moved",
            "Streams that another instance went on with when theirs was lost",
            registry=self.registry,
        )
        self.local = Counter(
            "pdrt_router_local",
            "Prompts that a decode instance computed itself, by why they were short enough",
            ("reason",),
            registry=self.registry,
        )
        self.slow_readers = Counter(
            "pdrt_router_slow_readers",
            "Answers cut because their client had stopped reading",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "pdrt_router_in_flight", "Requests being served", registry=self.registry
        )
        self.ready = Gauge(
            "pdrt_router_ready", "1 when a request would succeed", registry=self.registry
        )
        self.instance_up = Gauge(
            "pdrt_router_instance_up",
            "1 when an instance takes requests",
            ("instance",),
            registry=self.registry,
        )
        self.instance_requests = Gauge(
            "pdrt_router_instance_requests",
            "Legs under way on an instance",
            ("instance",),
            registry=self.registry,
        )
        self.first_byte = Times(
            "pdrt_router_first_byte_seconds",
            "From a request's arrival to the first byte of its answer",
            SECONDS,
            self.registry,
        )
        self.duration = Times(
            "pdrt_router_request_seconds",
            "From a request's arrival to its end",
            SECONDS,
            self.registry,
        )
