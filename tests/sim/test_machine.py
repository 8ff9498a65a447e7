"""Who computes when: the clock's order, shared cores, the front's queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.sim.clock import Clock, Turn
from pdrt.sim.cost import MachineCost
from pdrt.sim.machine import Front, Machine, OwnDevices, SharedCores, factor


def ends(machine: Machine, clock: Clock, jobs: list[tuple[float, float]]) -> list[float]:
    """When jobs that begin and last so are done."""
    found = [0.0] * len(jobs)

    def begin(number: int, seconds: float) -> None:
        def done() -> None:
            found[number] = clock.now

        machine.run(seconds, done)

    for number, (at, seconds) in enumerate(jobs):
        clock.at(at, lambda number=number, seconds=seconds: begin(number, seconds))  # type: ignore[misc]
    clock.run()
    return found


def test_at_one_moment_devices_end_then_messages_arrive_then_workers_look() -> None:
    clock, told = Clock(), list[str]()
    clock.at(1.0, lambda: told.append("look"), Turn.LOOK)
    clock.at(1.0, lambda: told.append("message"))
    clock.at(1.0, lambda: told.append("device"), Turn.DEVICE)
    clock.at(0.5, lambda: told.append("before"))
    clock.run()
    assert told == ["before", "device", "message", "look"]
    assert clock.now == 1.0


def test_what_is_due_already_comes_next_and_time_never_goes_back() -> None:
    clock, told = Clock(), list[float]()
    clock.at(2.0, lambda: clock.at(1.0, lambda: told.append(clock.now)))
    clock.run()
    assert told == [2.0]


def test_whoever_has_a_device_of_its_own_waits_for_nobody() -> None:
    clock = Clock()
    assert ends(OwnDevices(clock), clock, [(0.0, 2.0), (1.0, 2.0)]) == [2.0, 3.0]


def test_shared_cores_are_given_out_evenly_and_anew_when_one_comes_or_ends() -> None:
    """On one core: alone for 1 s, with another at half speed, then alone again."""
    clock = Clock()
    machine = SharedCores(clock, MachineCost(cores=1))
    assert ends(machine, clock, [(0.0, 2.0), (1.0, 2.0)]) == pytest.approx([3.0, 4.0])


def test_no_more_than_one_core_computes_for_one() -> None:
    clock = Clock()
    machine = SharedCores(clock, MachineCost(cores=2))
    assert ends(machine, clock, [(0.0, 1.0), (0.0, 1.0)]) == pytest.approx([1.0, 1.0])


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.001, 2)), min_size=1, max_size=8))
def test_shared_cores_do_all_the_work_and_no_more_at_once_than_there_are(
    jobs: list[tuple[float, float]],
) -> None:
    clock = Clock()
    done = ends(SharedCores(clock, MachineCost(cores=2)), clock, jobs)
    for (at, seconds), end in zip(jobs, done, strict=True):
        assert end >= at + seconds - 1e-9
    begun = min(at for at, _ in jobs)
    assert max(done) >= begun + sum(seconds for _, seconds in jobs) / 2 - 1e-9
    assert max(done) <= max(at for at, _ in jobs) + sum(seconds for _, seconds in jobs) + 1e-9


def test_a_crowd_slows_steps_down_on_a_line_between_what_is_known() -> None:
    crowd = ((2, 1.2), (4, 2.0))
    assert [factor(crowd, busy) for busy in (0, 1, 2, 3, 4, 9)] == pytest.approx(
        [1.0, 1.0, 1.2, 1.6, 2.0, 2.0]
    )
    clock = Clock()
    machine = SharedCores(clock, MachineCost(cores=2, crowd=((2, 1.5),)))
    assert ends(machine, clock, [(0.0, 1.0), (0.0, 1.0)]) == pytest.approx([1.5, 1.5])


def test_the_front_does_one_thing_after_the_other_and_nothing_at_once() -> None:
    clock, told = Clock(), list[tuple[str, float]]()
    front = Front(OwnDevices(clock))
    front.run(0.0, lambda: told.append(("nothing", clock.now)))
    front.run(2.0, lambda: told.append(("first", clock.now)))
    front.run(0.0, lambda: told.append(("behind it", clock.now)))
    front.run(1.0, lambda: told.append(("last", clock.now)))
    clock.run()
    assert told == [("nothing", 0.0), ("first", 2.0), ("behind it", 2.0), ("last", 3.0)]
