"""Counts and times of a leader's requests, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdrt.control.answer import Answer
from pdrt.control.routermetrics import SECONDS
from pdrt.control.text import TextPool


class Meter:
    """Made once for a registry: a metric has one owner."""

    def __init__(self, registry: CollectorRegistry, text: TextPool) -> None:
        self._requests = Counter(
            "pdrt_requests", "Requests by path and outcome", ("path", "code"), registry=registry
        )
        self._ttft = Histogram(
            "pdrt_first_token_seconds",
            "From the request to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self._total = Histogram(
            "pdrt_request_seconds",
            "From the request to its answer's end",
            buckets=SECONDS,
            registry=registry,
        )
        self._prompt = Counter("pdrt_prompt_tokens", "Prompt tokens served", registry=registry)
        self._output = Counter("pdrt_output_tokens", "Tokens answered", registry=registry)
        depth = Gauge("pdrt_tokenising", "Prompts waiting for their tokens", registry=registry)
        depth.set_function(lambda: text.waiting)
        most = Gauge("pdrt_tokenising_most", "High-water mark of the same", registry=registry)
        most.set_function(lambda: text.most_waiting)

    def ended(self, path: str, code: str) -> None:
        self._requests.labels(path, code).inc()

    def answered(self, answer: Answer) -> None:
        times = answer.times
        if times.first:
            self._ttft.observe(times.first - times.arrived)
            self._total.observe(times.last - times.arrived)
        self._prompt.inc(answer.prompt_tokens)
        self._output.inc(answer.completion_tokens)
