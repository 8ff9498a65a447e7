"""What N equal workers can be arranged as."""

from __future__ import annotations

import pytest

from pdrt.errors import ConfigError
from pdrt.sim.arrangement import Arrangement, arrangements, named


def test_four_workers_are_arranged_in_five_ways() -> None:
    assert [one.name for one in arrangements(4)] == ["dp", "route2", "route4", "1P3D", "2P2D"]
    assert {one.workers for one in arrangements(4)} == {4}
    assert arrangements(4)[1] == Arrangement("route2", hybrids=2, dp=2)


def test_of_two_workers_no_arrangement_stands_twice() -> None:
    assert [one.name for one in arrangements(2)] == ["dp", "route2", "1P1D"]


def test_an_odd_number_of_workers_has_no_two_equal_halves() -> None:
    assert [one.name for one in arrangements(3)] == ["dp", "route3", "1P2D"]
    assert [one.name for one in arrangements(5)] == ["dp", "route5", "1P4D", "2P3D"]


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 100])
def test_each_arrangement_is_found_again_by_its_name(workers: int) -> None:
    for one in arrangements(workers):
        assert named(one.name, workers) == one
        assert one.workers == workers


@pytest.mark.parametrize(
    ("name", "workers"), [("route3", 4), ("1P1D", 4), ("0P4D", 4), ("both", 4), ("route0", 4)]
)
def test_what_the_workers_cannot_be_arranged_as_is_refused_by_name(name: str, workers: int) -> None:
    with pytest.raises(ConfigError, match=name):
        named(name, workers)


def test_one_worker_cannot_be_arranged() -> None:
    with pytest.raises(ConfigError, match="workers = 1"):
        arrangements(1)
