"""Whole simulations: every request ends once, all memory comes back, and fast equals stepwise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.config import PolicySection
from pdrt.sim.arrangement import named
from pdrt.sim.cluster import How
from pdrt.sim.cost import Cost
from pdrt.sim.run import Outcome, changed, simulate
from pdrt.sim.workload import Arrivals, Workload
from tests.sim.loads import cost, gaps, is_clean, seen

FAST = How()
STEPWISE = How(is_stepwise=True)
LAYOUTS = ("dp", "route2", "route4", "1P3D", "2P2D")


def load(
    count: int = 40,
    input: str = "20..300",
    output: str = "1..60",
    *,
    rate: float = math.inf,
    concurrency: int = 0,
    seed: int = 1,
) -> Workload:
    return Workload.of(count, input, output, Arrivals(rate, 1.0, concurrency), seed=seed)


def run(machine: Cost, layout: str, workload: Workload, how: How = FAST) -> Outcome:
    return simulate(machine, named(layout, 4), workload, how=how)


def counters(outcome: Outcome, name: str) -> int:
    books = (worker.book for leader in outcome.leaders for worker in leader.workers)
    return sum(book.counters[name] for book in books)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 30),
    st.integers(0, 2),
    st.sampled_from((math.inf, 400.0, 60.0, 5.0)),
    st.integers(0, 5),
    st.sampled_from((400, 700, 4096)),
    st.sampled_from(("local", "reprefill")),
    st.booleans(),
    st.sampled_from((1, 4, 64)),
)
def test_many_steps_done_as_one_leave_what_single_steps_leave(
    layout: str,
    count: int,
    seed: int,
    rate: float,
    concurrency: int,
    kv_tokens: int,
    retraction: str,
    adaptive_reserve: bool,
    reserved_tokens: int,
) -> None:
    """Times, gaps, tokens, retractions: the fast way is no other model, only a faster one."""
    workload = load(count, "20..300", "1..90", rate=rate, concurrency=concurrency, seed=seed)
    machine = cost(
        kv_tokens=kv_tokens,
        context_ns=300.0,
        retraction=retraction,
        adaptive_reserve=adaptive_reserve,
        reserved_tokens=reserved_tokens,
    )
    fast, slow = run(machine, layout, workload), run(machine, layout, workload, STEPWISE)
    assert seen(fast) == pytest.approx(seen(slow), abs=1e-9)
    assert gaps(fast) == gaps(slow)
    assert fast.tally.failures == slow.tally.failures
    assert fast.steps == slow.steps
    assert fast.moved_blocks == slow.moved_blocks
    for name in ("retractions", "tokens_out", "prompt_tokens_computed", "transfers", "submitted"):
        assert counters(fast, name) == counters(slow, name), name
    assert is_clean(fast)
    assert is_clean(slow)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 60),
    st.integers(0, 99),
    st.sampled_from((0, 1, 3)),
    st.booleans(),
    st.integers(2, 40),
)
def test_every_request_ends_once_and_all_memory_comes_back(
    layout: str, count: int, seed: int, cores: int, lockstep: bool, max_waiting: int
) -> None:
    machine = cost(kv_tokens=600, cores=cores, lockstep=lockstep, max_waiting=max_waiting)
    workload = load(count, seed=seed)
    outcome = run(machine, layout, workload)
    answers = outcome.tally.answers
    assert len(answers) + outcome.tally.failures.total() == count
    assert len({one.number for one in answers}) == len(answers)
    assert outcome.tally.tokens >= sum(one.output for one in answers)
    assert all(0 < one.ttft_s <= one.e2e_s for one in answers)
    assert min(outcome.tally.gaps, default=0.0) >= 0.0
    assert is_clean(outcome)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_tokens_that_were_asked_for_are_counted_once(layout: str) -> None:
    workload = load(60, rate=200.0)
    outcome = run(cost(), layout, workload)
    assert outcome.tally.tokens == workload.output_tokens
    assert sum(outcome.tally.counts) == workload.output_tokens - len(workload.requests)
    assert counters(outcome, "tokens_out") == workload.output_tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_runs_of_a_load_are_the_same(layout: str) -> None:
    workload = load(60, rate=200.0)
    assert seen(run(cost(), layout, workload)) == seen(run(cost(), layout, workload))


def test_alone_a_request_takes_what_the_file_says() -> None:
    """front, a prompt in two chunks, three decode steps; the token's own way at both ends."""
    outcome = run(cost(), "route4", load(1, "300", "4"))
    (answer,) = outcome.tally.answers
    prompt = 0.001 * 2 + 300 * 20e-6 + 300 * 301 / 2 * 1e-9
    assert answer.ttft_s == pytest.approx(0.0007 + prompt + 0.0003)
    assert answer.e2e_s == pytest.approx(answer.ttft_s + 3 * 0.004)
    assert list(outcome.tally.gaps) == pytest.approx([0.004] * 3)


def test_apart_the_handshake_comes_before_the_prompt_and_the_transfer_before_decoding() -> None:
    outcome = run(cost(), "1P3D", load(1, "300", "4"))
    (answer,) = outcome.tally.answers
    prompt = 0.001 * 2 + 300 * 20e-6 + 300 * 301 / 2 * 1e-9
    assert answer.ttft_s == pytest.approx(0.0007 + 0.0004 + prompt + 0.0003)
    assert outcome.moved_blocks == 19
    assert answer.e2e_s > answer.ttft_s + 3 * 0.004


def test_whoever_cannot_wait_anywhere_is_told_429() -> None:
    outcome = run(cost(max_waiting=2, max_batch_size=2), "route4", load(60, "50", "20"))
    assert outcome.tally.failures == {"overloaded": 60 - len(outcome.tally.answers)}
    assert 8 <= len(outcome.tally.answers) < 30
    assert outcome.point()["errors"] == outcome.tally.failures.total()


def test_the_routers_own_limit_is_kept() -> None:
    policy = PolicySection(max_in_flight=10)
    outcome = simulate(cost(), named("route4", 4), load(30, "50", "20"), policy=policy)
    assert outcome.tally.failures == {"overloaded": 20}


def test_a_fixed_concurrency_is_never_exceeded() -> None:
    outcome = run(cost(), "route4", load(30, concurrency=3))
    spans = [(one.began, one.began + one.e2e_s) for one in outcome.tally.answers]
    for begin, _ in spans:
        assert sum(b <= begin < e for b, e in spans) <= 3
    assert len(spans) == 30


def test_memory_pressure_delays_and_ends_nothing() -> None:
    machine = cost(kv_tokens=512, reserved_tokens=1, adaptive_reserve=False)
    for layout in ("route4", "1P3D"):
        outcome = run(machine, layout, load(40, "100", "60"))
        assert len(outcome.tally.answers) == 40
        assert outcome.retractions > 0


def test_four_workers_on_two_cores_run_at_half_speed() -> None:
    workload = load(4, "200", "20")
    own, shared = (run(cost(cores=cores), "route4", workload) for cores in (0, 2))
    for one, other in zip(own.tally.answers, shared.tally.answers, strict=True):
        delays = 0.0007 + 0.0003
        assert other.e2e_s - delays == pytest.approx(2 * (one.e2e_s - delays))


def test_ranks_in_lockstep_wait_for_the_longest_of_them() -> None:
    free, locked = (run(cost(lockstep=on), "dp", load(8, "200", "20")) for on in (False, True))
    slower = locked.tally.itl(), free.tally.itl()
    assert slower[0] is not None
    assert slower[1] is not None
    assert slower[0]["p50"] == pytest.approx(slower[1]["p50"] + 2.0 * 3 / 4, rel=0.02)


def test_what_the_front_has_to_do_comes_before_a_client_has_its_tokens() -> None:
    busy = cost(request={"token_cpu_ms": 2.0, "cpu_ms": 1.0})
    outcome = run(busy, "route4", load(16, "50", "20"))
    assert outcome.tally.tokens == 16 * 20
    assert outcome.tally.seconds > 16 * 20 * 0.002 + 16 * 0.001


def test_settings_of_the_schedulers_can_be_others_than_the_files() -> None:
    assert changed(cost(), max_prefill_tokens=32).instance.max_prefill_tokens == 32


@pytest.mark.parametrize("layout", ["route10", "5P5D"])
def test_what_is_done_grows_with_the_requests_and_no_faster(layout: str) -> None:
    """Counted, not timed: events of the clock and steps of the workers."""

    def work(count: int) -> int:
        outcome = simulate(cost(), named(layout, 10), load(count, rate=300.0))
        return outcome.events + outcome.steps

    few, many = work(300), work(1200)
    assert many < 4.4 * few
