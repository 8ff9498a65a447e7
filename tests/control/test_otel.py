"""Traces: one id over a request's legs, events where they happened, and nothing when off."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pdrt.config import RouterConfig, TelemetrySection
from pdrt.control.otel import Otel, url_of
from pdrt.control.traces import Served
from pdrt.control.tracing import open_tracing
from pdrt.errors import ConfigError, PeerLost
from pdrt.settings import check
from tests.control.leader_rig import BEARER, out, rigged

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
SPENT = (("bootstrap", 1.0), ("queue", 2.0), ("prefill", 3.0), ("transfer", 4.0))


class Recorded:
    def __init__(self, sample: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.otel = Otel(
            self._exporter, sample, "pdrt-test", "here:1", lambda: 10**18, lambda: 50.0
        )

    def spans(self) -> dict[str, ReadableSpan]:
        """By name; no more of them afterwards."""
        self.otel.close()
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    made = Recorded()
    yield made
    made.otel.close()


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def parent_of(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent else ""


def test_the_legs_of_a_request_are_in_its_clients_trace(recorded: Recorded) -> None:
    request = recorded.otel.request(PARENT, {"path": "/generate"})
    headers = [request.opened("prefill", 1, "p0"), request.opened("decode", 1, "d0")]
    request.leg_ended("prefill", 1)
    request.event("first byte")
    request.leg_ended("decode", 1)
    request.ended({"outcome": "done"})
    spans = recorded.spans()
    whole = spans["request"]
    assert (trace_of(whole), parent_of(whole)) == (TRACE, SPAN)
    for header, name in zip(headers, ("prefill leg", "decode leg"), strict=True):
        leg = spans[name]
        assert header == f"00-{TRACE}-{id_of(leg)}-01"
        assert parent_of(leg) == id_of(whole)
    assert [event.name for event in whole.events] == ["first byte"]
    assert whole.attributes is not None
    assert whole.attributes["pdrt.outcome"] == "done"
    assert spans["prefill leg"].attributes == {"pdrt.instance": "p0", "pdrt.leg": 1}


def test_a_failed_leg_says_why_and_one_that_was_cancelled_ends_too(recorded: Recorded) -> None:
    request = recorded.otel.request("", {})
    request.opened("prefill", 1, "p0")
    request.opened("decode", 1, "d0")
    request.leg_ended("prefill", 1, PeerLost("it died"))
    request.leg_ended("prefill", 1)  # again: the first counted
    request.ended({}, PeerLost("it died"))
    spans = recorded.spans()
    assert spans["prefill leg"].status.description == "peer_lost: it died"
    assert [event.name for event in spans["decode leg"].events] == ["cancelled"]
    assert spans["request"].status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("header", ["", "junk", f"00-{'0' * 32}-{SPAN}-01", "00-\udcff-x-01"])
def test_what_is_no_traceparent_begins_a_trace_of_its_own(header: str, recorded: Recorded) -> None:
    recorded.otel.request(header, {}).ended({})
    span = recorded.spans()["request"]
    assert span.parent is None
    assert int(trace_of(span), 16)


def test_a_client_that_does_not_sample_is_followed_and_legs_hear_of_it() -> None:
    recorded = Recorded()
    request = recorded.otel.request(f"00-{TRACE}-{SPAN}-00", {})
    assert request.opened("decode", 1, "d").startswith(f"00-{TRACE}-")
    assert request.opened("prefill", 1, "p").endswith("-00")
    request.ended({})
    assert recorded.spans() == {}


def test_none_of_the_traces_that_begin_here_are_recorded_with_sample_0() -> None:
    recorded = Recorded(sample=0.0)
    recorded.otel.request("", {}).ended({})
    recorded.otel.request(PARENT, {}).ended({})  # somebody else's decision
    assert [trace_of(span) for span in recorded.spans().values()] == [TRACE]


def test_a_leaders_span_has_its_times_by_the_wall_clock(recorded: Recorded) -> None:
    events = [("queued", 41.0), ("first token", 45.0)]
    served = Served("decode", 40.0, 48.0, events, {"room": 7}, "deadline")
    recorded.otel.served(PARENT, served)
    span = recorded.spans()["decode request"]
    assert (trace_of(span), parent_of(span)) == (TRACE, SPAN)
    assert (span.start_time, span.end_time) == (10**18 - 10 * 10**9, 10**18 - 2 * 10**9)
    assert [(e.name, e.timestamp) for e in span.events] == [
        ("queued", 10**18 - 9 * 10**9),
        ("first token", 10**18 - 5 * 10**9),
    ]
    assert span.status.description == "deadline"


async def test_a_leg_at_a_leader_is_a_span_with_its_phases(recorded: Recorded) -> None:
    async with rigged("prefill", tracing=recorded.otel) as rig:
        rig.worker.script = [out("", "prefilled", spent_ms=SPENT)]
        headers = {**BEARER, "traceparent": PARENT}
        answer = await rig.post("/generate", {"prompt": "abc", **rig.leg()}, headers=headers)
        assert answer.status == 200
    span = recorded.spans()["prefill request"]
    assert trace_of(span) == TRACE
    names = [event.name for event in span.events]
    assert names == ["queued", "both sides met", "started", "prefilled", "transferred"]
    assert span.attributes is not None
    assert span.attributes["pdrt.room"] == 7
    assert span.attributes["pdrt.prefill_ms"] == 3.0
    assert span.attributes["pdrt.request_id"] == "id-1"


async def test_trials_are_not_traced(recorded: Recorded) -> None:
    async with rigged("prefill", tracing=recorded.otel) as rig:
        rig.worker.script = [out("", "prefilled")]
        headers = {**BEARER, "x-pdrt-canary": "1"}
        await rig.post("/generate", {"prompt": "abc", **rig.leg()}, headers=headers)
    assert recorded.spans() == {}


# Whether it is on.


def test_it_is_off_unless_an_endpoint_is_named() -> None:
    assert open_tracing(TelemetrySection(), "pdrt-router", "x") is None


def test_without_the_package_the_start_ends_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'pdrt\[otel\]'"):
        open_tracing(TelemetrySection(otlp_endpoint="http://127.0.0.1:4318"), "s", "i")


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_the_path_of_traces_is_added_where_none_is_named(endpoint: str, url: str) -> None:
    assert url_of(endpoint) == url


def test_what_is_no_url_is_refused() -> None:
    tables = {"hybrid": [{"http": "h:1"}], "telemetry": {"otlp_endpoint": "c:4318"}}
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        check(RouterConfig, tables, "router.toml")
