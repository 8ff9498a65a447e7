"""A turn waits until the machine is quiet, but not for ever; nothing here takes time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdrt.bench.quiet import Spent, until_quiet

STAT = """cpu  5090199 686912 893943 3106019 9017 7 55604 2677 100 20
cpu0 2385412 335291 424599 1744852 2276 3 26602 1340 60 20
cpu1 2704787 351620 469344 1361166 6741 4 29002 1336 40 0
intr 123 0 0
ctxt 456
"""


@dataclass(slots=True)
class Machine:
    """Two cores, of which so many are busy in each interval; the last figure holds on."""

    busy: Sequence[float]
    passed_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    _ticks: float = 1000.0

    def read(self) -> Spent:
        return Spent(2, round(self._ticks), round(200 * self.passed_s))

    async def pause(self, seconds: float) -> None:
        self._ticks += 100 * seconds * self.busy[min(len(self.pauses), len(self.busy) - 1)]
        self.passed_s += seconds
        self.pauses.append(seconds)


@pytest.mark.parametrize(
    ("busy", "is_quiet", "looks"),
    [
        ([0.0], True, 1),
        ([0.1], True, 1),
        ([0.3], False, 10),
        ([1.0, 1.0, 1.0, 0.3, 0.05], True, 5),
        ([1.0], False, 10),
        ([1.0] * 9 + [0.0], True, 10),
        ([1.0] * 10 + [0.0], False, 10),
    ],
)
async def test_a_turn_waits_for_a_quiet_machine_and_for_three_seconds_at_most(
    busy: Sequence[float], is_quiet: bool, looks: int
) -> None:
    machine = Machine(busy)
    assert await until_quiet(machine.read, machine.pause) is is_quiet
    assert len(machine.pauses) == looks
    assert machine.passed_s <= 3.001


async def test_where_the_kernel_tells_nothing_there_is_one_pause() -> None:
    machine = Machine([1.0])
    assert await until_quiet(lambda: None, machine.pause)
    assert machine.pauses == [1.5]


async def test_a_kernel_that_falls_silent_is_not_waited_for() -> None:
    machine, told = Machine([1.0]), iter([Spent(2, 10, 100), None])
    assert await until_quiet(lambda: next(told), machine.pause)
    assert len(machine.pauses) == 1


def test_what_the_cores_did_is_read_without_counting_guests_twice() -> None:
    before = Spent.of(STAT)
    assert before is not None
    busy = 5090199 + 686912 + 893943 + 7 + 55604 + 2677
    assert before == Spent(2, busy, busy + 3106019 + 9017)
    after = Spent(2, before.busy + 100, before.all + 200)
    assert after.cores_since(before) == 1.0
    assert before.cores_since(before) == 0.0


def test_one_core_of_many_is_as_much_in_the_way_as_one_of_two() -> None:
    before, after = Spent(64, 0, 0), Spent(64, 30, 64 * 30)
    assert after.cores_since(before) == 1.0


@pytest.mark.parametrize("text", ["", "intr 1\n", "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0\n"])
def test_a_kernel_that_counts_nothing_tells_nothing(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    assert Spent.read(stat) is None
    stat.write_text(text)
    assert Spent.read(stat) is None


def test_this_machine_is_read_where_it_can_be() -> None:
    if Path("/proc/stat").exists():
        found = Spent.read()
        assert found is None or 0 < found.busy <= found.all
