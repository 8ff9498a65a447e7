"""Who may ask, told from a request's head alone, before any of its body is read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from pdrt.control.quota import KeyRing
from pdrt.errors import PdrtError, Unauthorized

AUTHORIZATION: Final = "authorization"


@dataclass(frozen=True, slots=True)
class Gate:
    ring: KeyRing
    clock: Callable[[], float]
    open_paths: Collection[str]  # no key is asked for
    counted_paths: Collection[str]  # a POST there is a request that limits are for

    def refusal(self, method: str, path: str, authorization: str) -> PdrtError | None:
        """Why this request is not let in: no key of ours, or one that has used up its share."""
        if path in self.open_paths:
            return None
        quota = self.ring.find(authorization)
        if quota is None:
            return unknown_key()
        if method == "POST" and path in self.counted_paths:
            return _why_not(quota.check, self.clock())
        return None


def unknown_key() -> Unauthorized:
    return Unauthorized("the API key is missing or wrong")


def _why_not(check: Callable[[float], None], now: float) -> PdrtError | None:
    try:
        check(now)
    except PdrtError as error:
        return error
    return None
