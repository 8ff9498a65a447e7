"""Places are counted; what may still be touched is kept apart."""

from __future__ import annotations

import pytest

from pdrt.sched.blocks import BlockPool, Held, Quarantine


def test_places_are_taken_once_and_given_back() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    second = pool.take(1)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.free, pool.used) == (0, 4)
    pool.give(first)
    assert (pool.free, pool.used) == (3, 1)


def test_nothing_is_taken_when_not_all_of_it_is_there() -> None:
    pool = BlockPool(2)
    assert pool.take(3) is None
    assert pool.free == 2


def test_no_places_are_a_possible_wish() -> None:
    assert BlockPool(0).take(0) == ()


def test_a_place_given_back_twice_is_caught() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    assert taken is not None
    pool.give(taken)
    with pytest.raises(AssertionError, match="twice"):
        pool.give(taken)


def test_a_quarantine_gives_back_each_attempt_once() -> None:
    quarantine = Quarantine()
    quarantine.hold((1, 0), Held((3, 4), 0))
    quarantine.hold((1, 1), Held((5,), None))
    assert quarantine.blocks == 3
    assert quarantine.release((1, 0)) == Held((3, 4), 0)
    assert quarantine.release((1, 0)) is None
    assert quarantine.blocks == 1
    assert (1, 1) in quarantine
    assert len(quarantine) == 1


def test_an_attempt_is_held_once() -> None:
    quarantine = Quarantine()
    quarantine.hold((1, 0), Held((), None))
    with pytest.raises(AssertionError, match="held already"):
        quarantine.hold((1, 0), Held((), None))
