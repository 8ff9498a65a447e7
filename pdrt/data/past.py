"""What became of attempts that are over, for those who ask late: the newest so many."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from pdrt.data.transfer import Key

V = TypeVar("V")


class Past(OrderedDict[Key, V], Generic[V]):
    """Remember by `remember` only; all else is a dict's."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def remember(self, key: Key, outcome: V) -> None:
        self[key] = outcome
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
