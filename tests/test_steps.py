"""A batch on its way to the followers: it comes out as it went in, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt import messages, steps
from pdrt.device.batch import ELSEWHERE, Draw, Scoring, SeqStep
from pdrt.device.moves import Move, Moves
from pdrt.errors import BadMessage
from pdrt.messages import Sampling, pack_ids

IDS = st.lists(st.integers(0, (1 << 31) - 1), max_size=6)
DRAW = Draw(Sampling(seed=7), [1, 2, 3], 2)
SEQUENCE = st.builds(
    SeqStep,
    st.integers(1, 1 << 40),
    st.lists(st.integers(0, (1 << 31) - 1), min_size=2, max_size=6),
    st.integers(0, 1 << 20),
    IDS,
    st.sampled_from([None, DRAW]),
    copy_from=st.sampled_from([-1, 0, 7]),
    scoring=st.sampled_from([None, Scoring((), 2), Scoring((5, 6), 2)]),
)


@given(batch=st.lists(SEQUENCE, max_size=5))
def test_a_batch_comes_out_as_it_went_in_but_for_how_tokens_are_drawn(
    batch: list[SeqStep],
) -> None:
    frame = messages.encode(messages.TO_FOLLOWER, steps.pack(3, batch))
    step = messages.decode(messages.TO_FOLLOWER, frame)
    assert isinstance(step, messages.Step)
    assert step.number == 3
    assert steps.unpack(step) == [as_followers_see(s) for s in batch]


def as_followers_see(step: SeqStep) -> SeqStep:
    """Rank 0 alone draws and scores; the others know where, and how many rows."""
    scoring = step.scoring and Scoring((0,) * len(step.scoring.targets))
    return replace(step, draw=step.draw and ELSEWHERE, scoring=scoring)


def test_what_most_batches_do_not_need_costs_no_bytes() -> None:
    assert (GOOD.copies, GOOD.targets) == (b"", b"")
    assert (GOOD.move_keys, GOOD.move_counts) == (b"", b"")


MOVE = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30)), max_size=4).map(
    lambda pairs: Move(7 + len(pairs), tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
)
MOVES = st.builds(
    Moves, st.lists(MOVE, max_size=3).map(tuple), st.lists(MOVE, max_size=3).map(tuple)
)


@given(moves=MOVES)
def test_moves_come_out_as_they_went_in(moves: Moves) -> None:
    frame = messages.encode(messages.TO_FOLLOWER, steps.pack(3, [], moves))
    step = messages.decode(messages.TO_FOLLOWER, frame)
    assert isinstance(step, messages.Step)
    assert steps.unpack_moves(step) == moves


MOVED = steps.pack(1, [], Moves((Move(1, (2, 3), (0, 1)),), (Move(2, (4,), (5,)),)))


@pytest.mark.parametrize(
    "bad",
    [
        replace(MOVED, saves=3),
        replace(MOVED, move_keys=MOVED.move_keys[:9]),
        replace(MOVED, move_counts=pack_ids([2])),
        replace(MOVED, move_sources=MOVED.move_sources[:4]),
        replace(MOVED, move_counts=pack_ids([4, -1])),
    ],
)
def test_moves_that_do_not_fit_together_are_a_bad_message(bad: messages.Step) -> None:
    with pytest.raises(BadMessage):
        steps.unpack_moves(bad)


GOOD = steps.pack(1, [SeqStep(1, [5, 6], 0, [3], None), SeqStep(2, [7], 4, [1, 2], DRAW)])


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, keys=GOOD.keys[:8]),
        replace(GOOD, keys=GOOD.keys[:9]),
        replace(GOOD, starts=GOOD.starts[:4], keys=GOOD.keys[:8]),
        replace(GOOD, tokens=GOOD.tokens[:4]),
        replace(GOOD, blocks=GOOD.blocks + b"x"),
        replace(GOOD, token_counts=pack_ids([4, -1])),
        replace(GOOD, block_counts=pack_ids([3])),
        replace(GOOD, draws=pack_ids([1])),
        replace(GOOD, copies=pack_ids([1])),
        replace(GOOD, targets=pack_ids([1, 2, 3])),
        replace(GOOD, targets=pack_ids([0, 2])),
    ],
)
def test_columns_that_do_not_fit_together_are_a_bad_message(bad: messages.Step) -> None:
    with pytest.raises(BadMessage):
        steps.unpack(bad)
