"""Which rows a context-parallel rank computes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.device.batch import ELSEWHERE, Scoring, SeqStep
from pdrt.device.slices import SHORTEST, Slice, share_of, slices


def step(key: int, count: int, *, draws: bool = True, start: int = 0) -> SeqStep:
    tokens = list(range(count))
    scoring = Scoring(tokens[1:], 2) if key % 2 else None
    return SeqStep(key, tokens, start, [key], ELSEWHERE if draws else None, (), -1, scoring)


def batch(counts: Sequence[int]) -> list[SeqStep]:
    return [step(key, count, draws=key % 3 != 1) for key, count in enumerate(counts)]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(2, 5))
def test_each_row_is_computed_by_one_rank_or_all_by_each(counts: list[int], size: int) -> None:
    found = slices(batch(counts), size)
    if found is None:
        assert sum(counts) < 2 * size * SHORTEST or len(counts) < size
        return
    rows = sorted((s.step, row) for own in found for s in own for row in range(s.first, s.end))
    assert rows == [(n, row) for n, count in enumerate(counts) for row in range(count)]
    assert all(own and all(map(len, own)) for own in found)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(2, 5))
def test_what_the_ranks_draw_and_score_is_what_one_would(counts: list[int], size: int) -> None:
    steps = batch(counts)
    found = slices(steps, size)
    if found is None:
        return
    shares = [share_of(steps, own) for own in found]
    drawn, scored = dict[int, int](), dict[int, tuple[int, int, int]]()
    for x in shares:
        drawn |= dict(zip(x.drawn, _drawing(x.steps), strict=True))
        scored |= dict(zip(x.scored, _scored(x.steps), strict=True))
    assert drawn == dict(enumerate(_drawing(steps)))
    assert scored == dict(enumerate(_scored(steps)))


def _drawing(steps: Sequence[SeqStep]) -> list[int]:
    """Their keys."""
    return [s.key for s in steps if s.draw is not None]


def _scored(steps: Sequence[SeqStep]) -> list[tuple[int, int, int]]:
    """Key, position and target."""
    return [
        (s.key, s.start + row, target)
        for s in steps
        if s.scoring is not None
        for row, target in enumerate(s.scoring.targets)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_see_as_many_tokens_as_rows_of_a_chunk(size: int) -> None:
    """Work of attention is rows times the tokens before them; the share of each is alike."""
    found = slices([step(0, 4096)], size)
    assert found is not None
    for own in found:
        assert sum(map(len, own)) == pytest.approx(4096 / size, abs=2)
        seen = sum(sum(range(s.first, s.end)) for s in own)
        assert seen == pytest.approx(4096 * 4095 / 2 / size, rel=0.01)


def test_a_rank_in_the_middle_has_its_two_slices_as_one() -> None:
    assert slices([step(0, 100)], 2) == [
        [Slice(0, 0, 25), Slice(0, 75, 100)],
        [Slice(0, 25, 75)],
    ]


def test_short_prompts_are_dealt_whole() -> None:
    assert slices(batch([30, 20, 40]), 2) == [[Slice(2, 0, 40)], [Slice(0, 0, 30), Slice(1, 0, 20)]]


@pytest.mark.parametrize("counts", [[1, 1, 1], [2 * 2 * SHORTEST - 1]])
def test_what_is_short_in_all_is_computed_by_every_rank(counts: list[int]) -> None:
    assert slices(batch(counts), 2) is None


def test_a_slice_is_a_step_that_begins_later_over_the_same_blocks() -> None:
    whole = step(1, 100, start=7)
    share = share_of([whole], [Slice(0, 25, 75)])
    assert share.steps == (
        SeqStep(1, list(range(25, 75)), 32, [1], None, (), -1, Scoring(list(range(26, 76)), 2)),
    )
    assert (share.drawn, share.scored) == ((), tuple(range(25, 75)))
