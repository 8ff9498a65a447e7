"""Block numbers to byte runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.data.layout import blocks_for, merged_runs

PAIRS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30)


@given(PAIRS)
def test_runs_copy_exactly_the_named_blocks(pairs: list[tuple[int, int]]) -> None:
    runs = merged_runs([s for s, _ in pairs], [d for _, d in pairs], 8, 64, 128)
    copied = [
        ((src - 64) // 8 + n, (dst - 128) // 8 + n)
        for src, dst, length in runs.tolist()
        for n in range(length // 8)
    ]
    assert copied == pairs


@pytest.mark.parametrize(
    ("src", "dst", "count"),
    [
        ([], [], 0),
        ([3], [5], 1),
        ([3, 4, 5], [7, 8, 9], 1),
        ([3, 4, 5], [7, 9, 10], 2),  # a gap on one side is enough
        ([3, 5, 6], [7, 8, 9], 2),
        ([5, 4, 3], [9, 8, 7], 3),  # backwards is not adjacent
    ],
)
def test_neighbours_on_both_sides_are_one_run(src: list[int], dst: list[int], count: int) -> None:
    assert len(merged_runs(src, dst, 16, 0, 0)) == count


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="1 source blocks for 2"):
        merged_runs([1], [1, 2], 16, 0, 0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_a_started_block_counts(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
