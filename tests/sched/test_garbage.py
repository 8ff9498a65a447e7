"""Requests leave no cycles, so that a worker can do without full collections while it is busy."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pdrt.bench.scheduler import ROLES, Load

REQUESTS = 2000
FEW = 20  # objects: much less than one cycle a request


@pytest.fixture
def others() -> Iterator[int]:
    """What a collection finds without us: some library's objects come to life again each time."""
    gc.collect()
    gc.disable()
    yield gc.collect()
    gc.enable()


@pytest.mark.parametrize("role", ROLES)
def test_two_thousand_requests_leave_nothing_for_a_collection(role: str, others: int) -> None:
    load = Load(role, 50, 256, output=50)
    steps = load.steps(100_000)
    ended = 0
    while ended < REQUESTS:
        next(steps)
        counters = load.sched.stats().counters
        ended = sum(n for name, n in counters.items() if name.startswith("ended_"))
    assert gc.collect() < others + FEW
