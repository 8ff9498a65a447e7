"""Times counted in slots that grow by a ninth, so that percentiles cost a fixed, small memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import exp2, log2
from typing import Final, TypeAlias

PER_OCTAVE: Final = 8  # a slot is 9 % wide: what is read from it is at most 4.5 % off
SLOTS: Final = 27 * PER_OCTAVE  # up to 22 minutes; whatever is longer counts as that
FLOOR_S: Final = 1e-5  # whatever is shorter counts as this
_SHIFT: Final = -log2(FLOOR_S) * PER_OCTAVE

Counts: TypeAlias = list[int]
Few: TypeAlias = tuple[tuple[int, int], ...]  # (slot, count) of those that are not 0

_ENDS: Final = tuple(FLOOR_S * 2 ** (slot / PER_OCTAVE) for slot in range(1, SLOTS))
# Every chunk of every stream asks, and a partial has no frame of its own.
slot_of: Final[Callable[[float], int]] = partial(bisect_right, _ENDS)


def seconds_of(slot: int) -> float:
    """The middle of a slot."""
    return exp2((slot + 0.5 - _SHIFT) / PER_OCTAVE)


def none() -> Counts:
    return [0] * SLOTS


def few_of(counts: Sequence[int]) -> Few:
    return tuple((slot, count) for slot, count in enumerate(counts) if count)


def percentiles(few: Few, wanted: Iterable[float]) -> list[float | None]:
    """For each wanted share (0.5, 0.99) the time that so many do not exceed; None of nothing."""
    total = sum(count for _, count in few)
    return [_percentile(few, share * total) if total else None for share in wanted]


def _percentile(few: Few, rank: float) -> float:
    seen = 0
    for slot, count in few:
        seen += count
        if seen >= rank:
            return seconds_of(slot)
    return seconds_of(SLOTS - 1)
