"""The pairing that proves a transfer: scattered, whole, and another one in each turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.bench.pairing import Pairing, Stretch, checksum, fill

POOL, BLOCK = 1 << 16, 1 << 10


@given(first=st.integers(0, 1000), turn=st.integers(0, 1000), count=st.integers(1, 64))
def test_a_stretch_takes_each_block_at_most_once(first: int, turn: int, count: int) -> None:
    pairing, stretch = Pairing(POOL, BLOCK), Stretch(first, count, turn)
    for offsets in (pairing.sources(stretch), pairing.targets(stretch)):
        assert len(set(offsets.tolist())) == count
        assert all(0 <= at <= POOL - BLOCK and at % BLOCK == 0 for at in offsets.tolist())


def test_the_blocks_are_scattered() -> None:
    offsets = Pairing(1 << 22, BLOCK).sources(Stretch(0, 4096, 0))
    neighbours = np.count_nonzero(np.diff(offsets) == BLOCK)
    assert neighbours < 40  # a handful by chance


def test_both_ends_derive_the_same_pairs() -> None:
    stretch = Stretch(5, 20, 3)
    one, other = Pairing(POOL, BLOCK), Pairing(POOL, BLOCK)
    assert one.targets(stretch).tolist() == other.targets(stretch).tolist()
    assert one.sources(stretch).tolist() == other.sources(stretch).tolist()


def moved(pairing: Pairing, stretch: Stretch, source: bytearray, target: bytearray) -> None:
    pairs = zip(pairing.sources(stretch).tolist(), pairing.targets(stretch).tolist(), strict=True)
    for at, to in pairs:
        target[to : to + BLOCK] = source[at : at + BLOCK]


def test_a_turn_that_moves_nothing_is_found_out() -> None:
    """The target still has what the turn before it brought, and that is not enough."""
    pairing = Pairing(POOL, BLOCK)
    source, target = bytearray(POOL), bytearray(POOL)
    fill(np.frombuffer(source, np.uint8))
    for turn in range(1, 20):
        stretch = Stretch(0, 64, turn)
        wanted = checksum(memoryview(source), pairing.sources(stretch), BLOCK)
        assert checksum(memoryview(target), pairing.targets(stretch), BLOCK) != wanted
        moved(pairing, stretch, source, target)
        assert checksum(memoryview(target), pairing.targets(stretch), BLOCK) == wanted


@pytest.mark.parametrize("at", [0, 1, BLOCK - 1, POOL - 1])
def test_one_wrong_byte_anywhere_is_found_out(at: int) -> None:
    pairing, stretch = Pairing(POOL, BLOCK), Stretch(0, 64, 1)
    source, target = bytearray(POOL), bytearray(POOL)
    fill(np.frombuffer(source, np.uint8))
    moved(pairing, stretch, source, target)
    target[at] ^= 1
    assert checksum(memoryview(target), pairing.targets(stretch), BLOCK) != checksum(
        memoryview(source), pairing.sources(stretch), BLOCK
    )
