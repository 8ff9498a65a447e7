"""A hundred instances and a hundred thousand requests on one core, within a minute."""

from __future__ import annotations

import time

import pytest

from pdrt.config import PolicySection
from pdrt.sim.arrangement import named
from pdrt.sim.cost import load
from pdrt.sim.run import simulate
from pdrt.sim.workload import Arrivals, Workload

REQUESTS = 100_000
MANY = PolicySection(max_in_flight=REQUESTS)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "rate"), [("route100", 3200.0), ("30P70D", 3000.0)])
def test_100_instances_serve_100_000_requests_within_a_minute(layout: str, rate: float) -> None:
    """CPU time of this thread, which is what a core of its own would take."""
    workload = Workload.of(REQUESTS, 512, "128..256", Arrivals(rate))
    began = time.thread_time()
    outcome = simulate(load("efa-deepseek-v2-lite"), named(layout, 100), workload, policy=MANY)
    took = time.thread_time() - began
    assert len(outcome.tally.answers) == REQUESTS
    assert outcome.tally.tokens == workload.output_tokens
    assert took < 60.0
