"""Numbered places (KV blocks, metadata slots) and who may use them again when.

The promise: a place is free, or it has owners and is counted once for each of them: a request
that computes or reads it, or an attempt that is over but whose writer or reader may still touch
it. The last owner's giving back makes it free, never the time that passed. A free place whose
content is known by a key is cached: it can be found and shared until it is taken. Places that
have more than one owner are read only; who wants to write one takes another and copies it on the
device (`SeqStep.copy_from`), the pool only counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdrt.sched.prefix import PrefixCache

Attempt: TypeAlias = tuple[int, int]  # room, attempt


class BlockPool:
    """Counts the owners of places 0..total-1; the last one given is the first one taken."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.cache = PrefixCache()
        self._free = list(range(total - 1, -1, -1))
        self._owners = [0] * total

    @property
    def free(self) -> int:
        """Places without an owner, cached or not."""
        return len(self._free) + self.cache.idle

    @property
    def used(self) -> int:
        return self.total - self.free

    def owners(self, place: int) -> int:
        return self._owners[place]

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` places with one owner each, in order; None when there are not so many.

        What is cached goes last: see `PrefixCache.evict`.
        """
        if count > self.free:
            return None
        while len(self._free) < count:
            self._free.append(self.cache.evict())
        cut = len(self._free) - count
        places = tuple(sorted(self._free[cut:]))  # neighbours are moved as one piece
        del self._free[cut:]
        for place in places:
            self._owners[place] = 1
        return places

    def share(self, places: Iterable[int]) -> None:
        """One more owner each; one that is cached has its first again."""
        for place in places:
            if self.cache.is_idle(place):
                self.cache.wake(place)
            else:
                assert self._owners[place], f"place {place} is free, nobody can share it"
            self._owners[place] += 1

    def forget(self, places: Iterable[int]) -> None:
        """Owned places whose content is in doubt: they are never found again."""
        for place in places:
            self.cache.forget(place)

    def give(self, places: Sequence[int]) -> None:
        """One owner less each. A place that has none is a bug of ours.

        Of a request's blocks the last is let go first, so that prefixes are lost from their end.
        """
        for place in reversed(places):
            assert self._owners[place], f"place {place} was given back twice"
            self._owners[place] -= 1
            if self._owners[place]:
                continue
            if self.cache.knows(place):
                self.cache.rest(place)
            else:
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
