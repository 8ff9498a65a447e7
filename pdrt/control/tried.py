"""Who has failed one request: not asked again while anybody else is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pdrt.control.choice import Choice
from pdrt.control.instances import Instance, Status
from pdrt.control.views import Excluded
from pdrt.errors import PdrtError

Pick: TypeAlias = Callable[[Excluded], Choice]


class Tried:
    """For one request. A `Pick` is given those that it may not choose."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told: dict[Instance, Status | None] = {}  # what was last heard of them by then

    def add(self, instance: Instance) -> None:
        self._told[instance] = instance.status

    def clear(self) -> None:
        self._told.clear()

    def another(self, pick: Pick) -> Choice:
        """Another one; or one that failed and has been heard of since. Raises PdrtError."""
        try:
            return pick(self._told.keys())
        except PdrtError:
            stale = [each for each, status in self._told.items() if each.status is status]
            if len(stale) == len(self._told):
                raise
            return pick(stale)
