"""Who may still touch the memory of an attempt, kept apart from how the attempt ended.

The promise: a sealed key is released exactly once, when its last holder has let go, and no
clock is consulted. The decode side keeps writing ranks as holders (they let go by Quiesced or
by their death), the prefill side its own writes (they let go when they end).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
H = TypeVar("H", bound=Hashable)


class Ledger(Generic[K, H]):
    """Keys, their holders, and which keys nobody may hold anew because they are sealed."""

    def __init__(self) -> None:
        self._holders: dict[K, set[H]] = {}
        self._sealed: set[K] = set()

    def hold(self, key: K, holder: H) -> None:
        """From now on `holder` may touch the key's memory."""
        assert key not in self._sealed, f"{key} is sealed"
        self._holders.setdefault(key, set()).add(holder)

    def let_go(self, key: K, holder: H) -> bool:
        """`holder` is proven finished. True when that releases the key."""
        holders = self._holders.get(key)
        if holders is None or holder not in holders:
            return False
        holders.discard(holder)
        if holders:
            return False
        del self._holders[key]
        return self._release(key)

    def seal(self, key: K) -> bool:
        """The attempt is over, no new holders. True when that releases the key."""
        self._sealed.add(key)
        return key not in self._holders and self._release(key)

    def _release(self, key: K) -> bool:
        if key not in self._sealed:
            return False
        self._sealed.discard(key)
        return True

    def drop(self, key: K) -> None:
        """The key's holders have all finished by themselves: nothing is left to wait for."""
        self._holders.pop(key, None)
        self._sealed.discard(key)

    def holders(self, key: K) -> frozenset[H]:
        return frozenset(self._holders.get(key, ()))

    def is_sealed(self, key: K) -> bool:
        return key in self._sealed

    @property
    def sealed(self) -> int:
        """Keys that are over but not released: memory in quarantine."""
        return len(self._sealed)

    def __len__(self) -> int:
        return len(self._holders.keys() | self._sealed)
