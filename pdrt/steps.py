"""A batch as it travels from tp 0 to its followers: columns of integers, however many sequences.

Blocks that move before it (see `device.moves`) travel with it. How tokens are drawn stays with
tp 0, and so does which ones are scored; the followers learn only where a token is drawn and how
many rows are scored, for they have a share in those logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from pdrt.device.batch import ELSEWHERE, Scoring, SeqStep
from pdrt.device.moves import NONE, Move, Moves
from pdrt.errors import BadMessage
from pdrt.messages import Step, pack_ids, unpack_ids


def pack(number: int, batch: Sequence[SeqStep], moves: Moves = NONE) -> Step:
    every = (*moves.saves, *moves.loads)
    return Step(
        number=number,
        keys=np.asarray([step.key for step in batch], "<i8").tobytes(),
        starts=pack_ids([step.start for step in batch]),
        token_counts=pack_ids([len(step.tokens) for step in batch]),
        block_counts=pack_ids([len(step.blocks) for step in batch]),
        draws=pack_ids([step.draw is not None for step in batch]),
        tokens=pack_ids(list(chain.from_iterable(step.tokens for step in batch))),
        blocks=pack_ids(list(chain.from_iterable(step.blocks for step in batch))),
        copies=_rare([step.copy_from for step in batch]),
        targets=_rare([-1 if s.scoring is None else len(s.scoring.targets) for s in batch]),
        saves=len(moves.saves),
        move_keys=np.asarray([move.key for move in every], "<i8").tobytes(),
        move_counts=pack_ids([len(move.sources) for move in every]),
        move_sources=pack_ids(list(chain.from_iterable(move.sources for move in every))),
        move_targets=pack_ids(list(chain.from_iterable(move.targets for move in every))),
    )


def _rare(column: Sequence[int]) -> bytes:
    """A column that most batches do not need."""
    return pack_ids(column) if max(column, default=-1) >= 0 else b""


def unpack(step: Step) -> list[SeqStep]:
    """Raises BadMessage when the columns do not fit together."""
    starts, draws = unpack_ids(step.starts), unpack_ids(step.draws)
    tokens = _split(unpack_ids(step.tokens), unpack_ids(step.token_counts))
    blocks = _split(unpack_ids(step.blocks), unpack_ids(step.block_counts))
    if len(step.keys) != 8 * len(starts):
        raise BadMessage(f"step {step.number}: {len(step.keys)} bytes of keys")
    keys: list[int] = np.frombuffer(step.keys, "<i8").tolist()
    copies = unpack_ids(step.copies) or [-1] * len(keys)
    targets = unpack_ids(step.targets) or [-1] * len(keys)
    columns = zip(keys, tokens, starts, blocks, draws, copies, targets, strict=True)
    try:
        return [_step(*row) for row in columns]
    except ValueError as error:
        raise BadMessage(f"step {step.number}: its columns differ in length") from error


def unpack_moves(step: Step) -> Moves:
    """Raises BadMessage as `unpack` does."""
    counts = unpack_ids(step.move_counts)
    if len(step.move_keys) != 8 * len(counts) or step.saves > len(counts):
        raise BadMessage(f"step {step.number}: {len(step.move_keys)} bytes of keys of moves")
    keys: list[int] = np.frombuffer(step.move_keys, "<i8").tolist()
    sources = _split(unpack_ids(step.move_sources), counts)
    targets = _split(unpack_ids(step.move_targets), counts)
    every = [
        Move(key, tuple(start), tuple(end))
        for key, start, end in zip(keys, sources, targets, strict=True)
    ]
    return Moves(tuple(every[: step.saves]), tuple(every[step.saves :]))


def _step(  # noqa: PLR0913 - a column is an argument
    key: int,
    tokens: list[int],
    start: int,
    blocks: list[int],
    draw: int,
    copy_from: int,
    targets: int,
) -> SeqStep:
    if targets > len(tokens):
        raise ValueError(f"{targets} rows of {len(tokens)} are scored")
    drawn = ELSEWHERE if draw else None
    scoring = Scoring((0,) * targets) if targets >= 0 else None
    return SeqStep(key, tokens, start, blocks, drawn, (), copy_from, scoring)


def _split(values: list[int], counts: list[int]) -> list[list[int]]:
    """The values, so many for each."""
    ends = [0, *np.cumsum(counts).tolist()]
    if ends[-1] != len(values) or min(counts, default=0) < 0:
        raise BadMessage(f"{len(values)} values for {ends[-1]} places")
    return [values[begin:end] for begin, end in pairwise(ends)]
