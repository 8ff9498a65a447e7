"""A tiny run of `pdrt bench scheduler`, and what its load is."""

from __future__ import annotations

import pytest

from pdrt.bench.scheduler import OUTPUT, ROLES, Load, point


@pytest.mark.parametrize("role", ROLES)
def test_as_many_run_and_wait_as_were_asked_for(role: str) -> None:
    load = Load(role, 20, 16)
    ran = [running for _, _, running in load.steps(OUTPUT + 50)][OUTPUT:]
    assert 12 <= min(ran) <= max(ran) <= 32
    assert len(load.sched.book.line) >= 20
    assert load.sched.stats().counters["ended_prefilled" if role == "prefill" else "ended_length"]


def test_a_point_has_times_of_both_halves_of_a_step() -> None:
    found = point("decode", 0, 8, 20)
    assert 0 < found.plan_p50_us <= found.plan_p99_us
    assert 0 < found.commit_p50_us <= found.commit_p99_us
