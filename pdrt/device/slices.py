"""Which rows of a batch each context-parallel rank computes; without torch, as the null device.

The promise: all ranks come to the same answer from the batch alone; each row is computed by one
rank, and no rank is without rows; what is too short to be shared is computed by every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdrt.device.batch import Scoring, SeqStep

SHORTEST: Final = 16
"""Rows of a slice. A rank has two of a chunk, and with fewer than some 32 rows a matrix product
takes as long as reading its weights, whatever is left to other ranks."""


@dataclass(frozen=True, slots=True)
class Context:
    """Rank `rank` of `size` ranks that share the rows of each step; all hold all of the KV."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank draws the tokens."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows first..end of a batch's step number `step`."""

    step: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes, as a batch of its own; where its answers stand among all."""

    steps: tuple[SeqStep, ...]
    drawn: tuple[int, ...]  # of its rows that draw, in order, their places among the batch's
    scored: tuple[int, ...]  # and of those that are scored


def slices(batch: Sequence[SeqStep], size: int) -> list[list[Slice]] | None:
    """The rows of each of `size` ranks, in the batch's order; None: each computes them all.

    Of a long chunk each has a slice from the front and the one as far from the back: late rows
    see more tokens than early ones, and so the ranks see as many. Short ones go to who has least.
    """
    if size == 1 or sum(len(step.tokens) for step in batch) < 2 * size * SHORTEST:
        return None
    found: list[list[Slice]] = [[] for _ in range(size)]
    rows = [0] * size
    short = list[int]()
    for number, step in enumerate(batch):
        if len(step.tokens) < 2 * size * SHORTEST:
            short.append(number)
            continue
        for rank, own in enumerate(found):
            own += _zigzag(number, len(step.tokens), rank, size)
            rows[rank] = sum(map(len, own))
    for number in sorted(short, key=lambda number: -len(batch[number].tokens)):
        rank = rows.index(min(rows))
        found[rank].append(Slice(number, 0, len(batch[number].tokens)))
        rows[rank] += len(batch[number].tokens)
    if not all(rows):
        return None
    return [sorted(own, key=lambda each: (each.step, each.first)) for own in found]


def _zigzag(step: int, count: int, rank: int, size: int) -> list[Slice]:
    """The rank's two slices of so many rows; the middle ones are one."""
    bounds = [count * i // (2 * size) for i in range(2 * size + 1)]
    late = 2 * size - 1 - rank
    if late == rank + 1:
        return [Slice(step, bounds[rank], bounds[late + 1])]
    return [Slice(step, bounds[i], bounds[i + 1]) for i in (rank, late)]


def share_of(batch: Sequence[SeqStep], own: Sequence[Slice]) -> Share:
    """A slice is a step that begins later, over the same blocks."""
    drawing = [number for number, step in enumerate(batch) if step.draw is not None]
    places = {number: place for place, number in enumerate(drawing)}
    firsts = list(_first_scored(batch))
    steps, drawn, scored = list[SeqStep](), list[int](), list[int]()
    for part in own:
        step = _cut(batch[part.step], part)
        steps.append(step)
        if step.draw is not None:
            drawn.append(places[part.step])
        if step.scoring is not None:
            first = firsts[part.step] + part.first
            scored += range(first, first + len(step.scoring.targets))
    return Share(tuple(steps), tuple(drawn), tuple(scored))


def _first_scored(batch: Sequence[SeqStep]) -> Iterator[int]:
    """How many rows are scored in the steps before each one."""
    total = 0
    for step in batch:
        yield total
        total += 0 if step.scoring is None else len(step.scoring.targets)


def _cut(step: SeqStep, part: Slice) -> SeqStep:
    has_last = part.end == len(step.tokens)
    scoring = step.scoring
    if scoring is not None:
        targets = scoring.targets[part.first : part.end]
        scoring = Scoring(targets, scoring.top) if targets else None
    return replace(
        step,
        tokens=step.tokens[part.first : part.end],
        start=step.start + part.first,
        draw=step.draw if has_last else None,
        further=step.further if has_last else (),
        copy_from=-1,  # it is copied once for the whole step
        scoring=scoring,
    )
