"""Numbered places (KV blocks, metadata slots) and who may use them again when.

The promise: a place has one owner. It is free, or taken by one request, or held for an attempt
that is over but whose writer or reader may still touch it; only the proof that this has ended
makes it free, never the time that passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

Attempt: TypeAlias = tuple[int, int]  # room, attempt


class BlockPool:
    """Counts places 0..total-1 out and in; the last one given is the first one taken."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._taken = bytearray(total)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` places, or None when there are not so many."""
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        places = tuple(reversed(self._free[cut:]))
        del self._free[cut:]
        for place in places:
            self._taken[place] = 1
        return places

    def give(self, places: Iterable[int]) -> None:
        """Back to the pool. A place that is free already is a bug of ours."""
        for place in places:
            assert self._taken[place], f"place {place} was given back twice"
            self._taken[place] = 0
            self._free.append(place)


@dataclass(frozen=True, slots=True)
class Held:
    """What an attempt that is over leaves behind."""

    blocks: tuple[int, ...]
    slot: int | None


class Quarantine:
    """Blocks and slots of attempts that are over, kept until nobody can touch them any more."""

    def __init__(self) -> None:
        self._held: dict[Attempt, Held] = {}
        self.blocks = 0

    def hold(self, attempt: Attempt, held: Held) -> None:
        assert attempt not in self._held, f"attempt {attempt} is held already"
        self._held[attempt] = held
        self.blocks += len(held.blocks)

    def release(self, attempt: Attempt) -> Held | None:
        """What was held for it, now free; None when nothing was."""
        held = self._held.pop(attempt, None)
        if held is not None:
            self.blocks -= len(held.blocks)
        return held

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._held

    def __iter__(self) -> Iterator[tuple[Attempt, Held]]:
        return iter(self._held.items())

    def __len__(self) -> int:
        return len(self._held)
