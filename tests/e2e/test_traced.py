"""One request through real processes: its trace, its timeline and its figures."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.cluster import PATIENT, Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(150)]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = [i % 251 for i in range(600)]
SETTINGS: Tables = {
    "device": {"kind": "null", "token_ms": 0.2, "step_ms": 2.0},
    "scheduler": {"kv_memory": 1 << 20, "max_prefill_tokens": 128},
}
DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/pdrt.json"


@dataclass
class Collector:
    """Takes spans over OTLP, as a collector of OpenTelemetry does."""

    port: int = 0
    spans: list[tuple[str, Span]] = field(default_factory=list)  # and whose they are

    async def take(self, request: web.Request) -> web.Response:
        told = ExportTraceServiceRequest.FromString(await request.read())
        for resource in told.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(named["service.name"], span) for span in scope.spans]
        return web.Response()

    def of(self, trace: str) -> dict[str, Span]:
        found = {}
        for service, span in self.spans:
            if span.trace_id.hex() == trace:
                found[f"{service}: {span.name}"] = span
        return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.port = runner.addresses[0][1]
    try:
        yield collector
    finally:
        await runner.cleanup()


async def asked(cluster: Cluster) -> dict[str, float]:
    assert cluster.http is not None
    body = {"prompt": PROMPT, "sampling_params": {"max_tokens": 8, "ignore_eos": True}}
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    began = time.monotonic()
    async with cluster.http.post(f"{cluster.url}/generate", json=body, headers=headers) as answer:
        assert answer.status == 200
        times: dict[str, float] = (await answer.json())["timings_ms"]
    assert times["total"] <= (time.monotonic() - began) * 1e3
    return times


async def test_a_request_is_one_trace_and_its_phases_add_up(tmp_path: Path) -> None:
    async with collecting() as collector:
        telemetry = {"telemetry": {"otlp_endpoint": f"http://127.0.0.1:{collector.port}"}}
        cluster = Cluster.make(tmp_path, 1, 1, 0, SETTINGS, PATIENT, telemetry, router=telemetry)
        async with cluster.running():
            times = await asked(cluster)
            check_phases(times)
            await cluster.until(lambda: is_logged(cluster, times), "decode logs the same times")
            await check_metrics(cluster)
        # Stopped processes have sent what they had.
        check_trace(collector.of(TRACE))


def check_phases(times: dict[str, float]) -> None:
    marks = {"tokenise", "first_token", "total", "token_mean", "token_max"}
    phases = {name: ms for name, ms in times.items() if name not in marks}
    assert phases.keys() == {
        *("bootstrap", "admission", "queue", "prefill", "transfer", "first_decode", "decode")
    }
    assert all(ms >= 0 for ms in phases.values())
    assert times["tokenise"] + sum(phases.values()) <= times["total"]
    assert phases["prefill"] >= 0.8 * len(PROMPT) * 0.2  # what computing it takes, at the least
    before = sum(phases[name] for name in ("bootstrap", "admission", "queue", "prefill"))
    assert times["tokenise"] + before <= times["first_token"]
    assert 0 < times["token_mean"] <= times["token_max"] <= times["total"]


async def is_logged(cluster: Cluster, times: dict[str, float]) -> bool:
    """The line follows the answer."""
    text = cluster.nodes["decode0"].log.read_text()
    lines = [json.loads(line) for line in text.splitlines() if '"request_ended"' in line]
    return times in [line.get("timings_ms") for line in lines]


async def check_metrics(cluster: Cluster) -> None:
    """The dashboard's names are those of running processes."""
    assert cluster.http is not None
    text = ""
    for process in cluster.processes:
        async with cluster.http.get(f"{process.url}/metrics") as answer:
            text += await answer.text()
    exported = set(re.findall(r"^# TYPE (\w+?)(?:_total)? ", text, re.M))
    for name in set(re.findall(r"pdrt_\w+", DASHBOARD.read_text())):
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in exported, name
    assert re.search(r'pdrt_phase_seconds_count\{phase="transfer"\} [1-9]', text)


def check_trace(spans: dict[str, Span]) -> None:
    whole = spans["pdrt-router: request"]
    assert whole.parent_span_id.hex() == SPAN
    for side in ("prefill", "decode"):
        leg = spans[f"pdrt-router: {side} leg"]
        assert leg.parent_span_id == whole.span_id
        served = spans[f"pdrt-{side}: {side} request"]
        assert served.parent_span_id == leg.span_id
        assert whole.start_time_unix_nano <= leg.start_time_unix_nano
        assert leg.end_time_unix_nano <= whole.end_time_unix_nano
        names = [event.name for event in served.events]
        assert names[0] == "queued"
        assert "transferred" in names
    assert len(spans) == 5
