"""Block numbers to byte runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.data.layout import Part, areas_of, blocks_for, merged_runs, part_runs

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


@given(PAIRS)
def test_a_part_of_each_block_goes_to_its_own_place(pairs: list[tuple[int, int]]) -> None:
    part = Part(bytes=2, src_at=100, src_stride=8, dst_at=1000, dst_stride=4)
    runs = part_runs([s for s, _ in pairs], [d for _, d in pairs], part)
    assert runs.tolist() == [[100 + 8 * s, 1000 + 4 * d, 2] for s, d in pairs]


def test_parts_that_fill_the_blocks_of_one_side_only_are_not_merged() -> None:
    assert len(part_runs([1, 2], [1, 2], Part(4, 0, 4, 0, 8))) == 2
    assert len(part_runs([1, 2], [1, 2], Part(4, 0, 4, 0, 4))) == 1


def test_a_long_prompt_is_one_descriptor_a_run_or_one_a_block_when_heads_are_split() -> None:
    """61 layers x 8192 tokens: layers and tokens never count."""
    blocks = list(range(8192 // 16))
    size = 61 * 2 * 16 * 128 * 2
    assert len(merged_runs(blocks, blocks, 8 * size, 0, 0)) == 1
    assert len(part_runs(blocks, blocks, Part(2 * size, 0, 8 * size, 0, 2 * size))) == len(blocks)


def test_areas_cover_blocks_in_order_and_neighbours_are_one() -> None:
    assert areas_of([5, 2, 3, 9], 100, 10).tolist() == [[120, 20], [150, 10], [190, 10]]
    assert areas_of([], 100, 10).tolist() == []
