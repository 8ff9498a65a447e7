"""Traces: one id over a request's legs, events where they happened, and nothing when off."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

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
from tests.control.fake_leader import prefilled, status
from tests.control.leader_rig import BEARER, out, rigged
from tests.control.router_rig import rig

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
SPENT = (("bootstrap", 1.0), ("queue", 2.0), ("prefill", 3.0), ("transfer", 4.0))


class Recorded:
    def __init__(self, sample: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.otel = Otel(
            self._exporter, sample, "pdrt-test", "here:1", lambda: 10**18, lambda: 50.0
        )

    def all(self) -> Sequence[ReadableSpan]:
        """No more of them afterwards."""
        self.otel.close()
        return self._exporter.get_finished_spans()

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.all()}


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


# At the router.


async def test_both_legs_carry_the_clients_trace_to_their_leaders(recorded: Recorded) -> None:
    async with rig(tracing=recorded.otel) as r:
        assert (await r.send(headers={"traceparent": PARENT})).status == 200
        await r.at_rest()
        sent = [leader.seen[0].headers["traceparent"] for leader in (r.prefill[0], r.decode[0])]
        assert not any("traceparent" in each.headers for each in r.decode[0].seen_canaries)
    spans = recorded.spans()
    assert spans.keys() == {"request", "prefill leg", "decode leg"}
    legs = [f"00-{TRACE}-{id_of(spans[name])}-01" for name in ("prefill leg", "decode leg")]
    assert sent == legs
    whole = spans["request"]
    assert parent_of(whole) == SPAN
    assert whole.attributes is not None
    assert whole.attributes["pdrt.decode"] == spans["decode leg"].attributes["pdrt.instance"]  # type: ignore[index]
    assert [event.name for event in whole.events] == ["first byte"]


async def test_a_leg_that_is_tried_again_is_another_span(recorded: Recorded) -> None:
    async with rig(prefill=2, tracing=recorded.otel) as r:
        for leader in r.prefill:
            leader.plays.append(status(503, "down", "unavailable"))
            leader.plays.append(prefilled())
        r.prefill[1].plays.popleft()
        r.prefill[0].plays.pop()
        for _ in range(2):  # one of them comes to the one that is down
            assert (await r.send(headers={"traceparent": PARENT})).status == 200
        await r.at_rest()
    legs = [span for span in recorded.all() if span.name == "prefill leg"]
    assert len(legs) == 3
    failed = [span for span in legs if span.status.status_code is StatusCode.ERROR]
    assert [span.status.description for span in failed] == ["unavailable: down"]
    assert {trace_of(span) for span in legs} == {TRACE}


async def test_a_request_that_fails_is_a_span_with_its_error(recorded: Recorded) -> None:
    async with rig(tracing=recorded.otel) as r:
        r.decode[0].plays.append(status(400, "no", "bad_request"))
        assert (await r.send()).status == 400
        await r.at_rest()
    spans = recorded.spans()
    assert spans["request"].status.description == "bad_request: no"
    assert spans["decode leg"].status.status_code is StatusCode.ERROR
    assert [event.name for event in spans["prefill leg"].events] in ([], ["cancelled"])


async def test_off_nothing_is_made_and_a_clients_header_goes_no_further() -> None:
    async with rig() as r:
        assert (await r.send(headers={"traceparent": PARENT})).status == 200
        assert "traceparent" not in r.decode[0].seen[0].headers


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
