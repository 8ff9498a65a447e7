"""Times that are counted here read like the library's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pdrt.control.routermetrics import SECONDS
from pdrt.control.tally import MOST, Counts, Times


def said(registry: CollectorRegistry) -> list[bytes]:
    return [line for line in generate_latest(registry).splitlines() if b"_created" not in line]


@given(st.lists(st.floats(0, 1000) | st.sampled_from(SECONDS)))
def test_a_scrape_reads_as_the_librarys_histogram(seconds: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = Times("some_seconds", "Of something", SECONDS, ours)
    histogram = Histogram("some_seconds", "Of something", buckets=SECONDS, registry=theirs)
    for each in seconds:
        times.observe(each)
        histogram.observe(each)
    assert said(ours) == said(theirs)


@given(st.lists(st.tuples(st.sampled_from(["/generate", "other"]), st.sampled_from([200, 404]))))
def test_a_scrape_reads_as_the_librarys_counter(events: list[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("some", "Of something", ("route", "status"), ours)
    counter = Counter("some", "Of something", ("route", "status"), registry=theirs)
    for route, status in events:
        counts.add(route, status)
        counter.labels(route, str(status)).inc()
    assert said(ours) == said(theirs)


def test_labels_that_others_choose_do_not_grow_without_end() -> None:
    registry = CollectorRegistry()
    counts = Counts("some", "Of something", ("route", "path"), registry)
    for number in range(2 * MOST):
        counts.add("/generate", f"path {number}")
    counts.add("/generate", "path 0")
    found = said(registry)
    assert sum(line.startswith(b"some_total{") for line in found) == MOST + 1
    assert b'some_total{path="other",route="other"} %d.0' % MOST in found
    assert b'some_total{path="path 0",route="/generate"} 2.0' in found


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    Times("some_seconds", "Of something", SECONDS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("some_seconds", "Of something", registry=registry)
