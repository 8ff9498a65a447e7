"""Counts and times of a leader's requests, for Prometheus."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdrt.control.answer import Answer
from pdrt.control.routermetrics import SECONDS
from pdrt.control.text import TextPool
from pdrt.control.times import Times

_FINE: Final = (0.0005, 0.001, 0.0025, *SECONDS)


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
        self._phases = Histogram(
            "pdrt_phase_seconds",
            "What parts of a request took, by phase",
            ("phase",),
            buckets=_FINE,
            registry=registry,
        )
        self._mean = Histogram(
            "pdrt_token_mean_seconds",
            "From token to token, the mean of an answer",
            buckets=_FINE,
            registry=registry,
        )
        self._longest = Histogram(
            "pdrt_token_longest_seconds",
            "From token to token, the longest of an answer",
            buckets=_FINE,
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
        if times.gaps:
            self._mean.observe(times.mean_s)
            self._longest.observe(times.longest_s)
        self.spent(times)
        self._prompt.inc(answer.prompt_tokens)
        self._output.inc(answer.completion_tokens)

    def spent(self, times: Times) -> None:
        """Also of a prompt that others answer."""
        for phase, ms in times.phases.items():
            self._phases.labels(phase).observe(ms / 1e3)
