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


def test_a_place_is_free_when_its_last_owner_gives_it_back() -> None:
    pool = BlockPool(3)
    first = pool.take(2)
    assert first is not None
    pool.share(first)
    pool.share(first[:1])
    assert [pool.owners(place) for place in (0, 1, 2)] == [3, 2, 0]
    pool.give(first)
    assert (pool.free, pool.used) == (1, 2)
    pool.give(first)
    assert (pool.free, pool.used) == (2, 1)
    pool.give(first[:1])
    assert (pool.free, pool.owners(first[0])) == (3, 0)


def test_a_free_place_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="free"):
        BlockPool(1).share([0])


def test_what_is_taken_together_is_in_order_so_that_neighbours_move_as_one_piece() -> None:
    pool = BlockPool(6)
    pool.take(6)
    pool.give((4, 1, 2))
    assert pool.take(3) == (1, 2, 4)


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
