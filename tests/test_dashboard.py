"""The Grafana dashboard asks for what processes really export, and the docs name all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram

from pdrt.config import RouterConfig
from pdrt.control.figures import WorkerFigures
from pdrt.control.meter import Meter
from pdrt.control.router import make_router
from pdrt.control.text import ByteText, TextPool
from pdrt.control.times import PHASES, Times
from pdrt.keys import ClusterKey
from pdrt.messages import Loading, Problem, Rank, Ready, Stats
from pdrt.settings import check

ROOT = Path(__file__).parent.parent
DASHBOARD = json.loads((ROOT / "deploy/grafana/pdrt.json").read_text())
OPERATIONS = (ROOT / "docs/operations.md").read_text()
SCRAPED = {"job", "instance", "le"}  # labels that Prometheus adds
_ENDS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
ROWS = ["Traffic", "Latency", "KV and queues", "Transfers", "Failures"]


@dataclass
class OneWorker:
    rank: Rank = field(default_factory=Rank)
    name: str = "w"
    state: str = "ready"
    ready: Ready | None = None
    stats: Stats = field(default_factory=lambda: Stats(queues={"q": 1}, counters={"c": 1}))
    stats_at: float = 0.0
    loading: Loading | None = None
    lives: int = 1
    pid: int | None = 1
    last_problem: Problem | None = None


@cache
def exported() -> Mapping[str, frozenset[str]]:
    """Samples by name, with their labels, of a router, a leader and its workers."""
    registries = [_of_a_router(), _of_a_leader()]
    found: dict[str, frozenset[str]] = {}
    for family in (family for registry in registries for family in registry.collect()):
        labels = frozenset(label for sample in family.samples for label in sample.labels)
        ends = _ENDS.get(family.type, ("",))
        found |= {family.name + end: labels for end in ends}
    return found


def _of_a_router() -> CollectorRegistry:
    """Each label has a value."""
    tables = {"hybrid": [{"http": "h:1"}], "security": {"api_keys": ["k"]}}
    router = make_router(check(RouterConfig, tables, "-"), ClusterKey(b"k" * 32))
    metrics = router.metrics
    metrics.requests.add("/generate", 200, "disagg")
    metrics.errors.labels("deadline").inc()
    metrics.instance_up.labels("a").set(1)
    metrics.instance_requests.labels("a").set(1)
    with router.keydoor.held("Bearer k", 1):
        return metrics.registry


def _of_a_leader() -> CollectorRegistry:
    registry, text = CollectorRegistry(), TextPool(ByteText())
    meter = Meter(registry, text)
    meter.ended("/generate", "ok")
    meter.spent(Times(0.0, spent_ms=(("queue", 1.0),)))
    registry.register(WorkerFigures([OneWorker()]))
    text.close()
    (delay,) = re.findall(r'"(pdrt_loop_\w+)"', (ROOT / "pdrt/node.py").read_text())
    Histogram(delay, "Of the node", registry=registry)
    return registry


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_a_panel_asks_for_metrics_and_labels_that_there_are(title: str, query: str) -> None:
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")
    names = re.findall(r"pdrt_\w+", query)
    assert names, title
    labels: set[str] = set(SCRAPED)
    for name in names:
        assert name in exported(), f"{title}: {name}"
        labels |= exported()[name]
        if "instance" in exported()[name]:
            labels.add("exported_instance")
    matched = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", query)
    by = ",".join(re.findall(r"by \(([^)]*)\)", query))
    grouped = [one.strip() for one in by.split(",") if one.strip()]
    assert {*matched, *grouped} <= labels, title


def test_a_quantile_is_of_buckets_over_time() -> None:
    for title, query in queries():
        for inner in re.findall(r"histogram_quantile\(([^$]*)", query):
            assert "_bucket{" in inner, title
            assert "le" in re.findall(r"by \((\w+)", inner), title


def test_the_rows_are_those_of_operators_questions_and_panels_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_metric_of_every_process_is_in_the_docs() -> None:
    for name in exported():
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert family in OPERATIONS, family


def test_each_phase_of_a_request_is_in_the_docs() -> None:
    for phase in PHASES:
        assert f"`{phase}`" in OPERATIONS, phase


def test_the_example_scrapes_the_well_known_ports() -> None:
    text = (ROOT / "deploy/prometheus.yml").read_text()
    ports = check(RouterConfig, {"hybrid": [{"http": "h:1"}]}, "-").ports
    for port in (ports.router, ports.prefill, ports.decode):
        assert f":{port}" in text
