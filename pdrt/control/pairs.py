"""What is known of each (prefill, decode) pair: whether a real request has gone through it.

A hybrid instance is a pair without a prefill side. A pair is used once its canary has
passed; after a fault it is doubtful until the next one has, and used only for want of better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from pdrt.control.instances import Instance
from pdrt.machine import Edge, Table


class Trust(StrEnum):
    UNTRIED = "untried"  # no canary has passed since either side was (re)started
    TRYING = "trying"
    PASSED = "passed"
    DOUBTFUL = "doubtful"  # it passed, and a fault came since
    RETRYING = "retrying"  # doubtful, and its canary is under way


class CanaryStarted:
    pass


class CanaryPassed:
    pass


class CanaryFailed:
    pass


class CanaryShed:
    """The instance was too busy for it: that proves nothing."""


class Faulted:
    """Something failed in one of the two."""


class Renewed:
    """One of the two died or was restarted."""


PairEvent: TypeAlias = CanaryStarted | CanaryPassed | CanaryFailed | CanaryShed | Faulted | Renewed
EVENTS: Final = (CanaryStarted, CanaryPassed, CanaryFailed, CanaryShed, Faulted, Renewed)

_T = Trust
_EARLIER: Final = "the canary of an earlier life"

PAIR: Table[Trust, object, object] = Table(
    "pair",
    edges={
        (_T.UNTRIED, CanaryStarted): Edge(_T.TRYING),
        (_T.TRYING, CanaryPassed): Edge(_T.PASSED),
        (_T.TRYING, CanaryFailed): Edge(_T.UNTRIED),
        (_T.TRYING, CanaryShed): Edge(_T.UNTRIED),
        (_T.TRYING, Renewed): Edge(_T.UNTRIED),
        (_T.PASSED, Faulted): Edge(_T.DOUBTFUL),
        (_T.PASSED, Renewed): Edge(_T.UNTRIED),
        (_T.DOUBTFUL, CanaryStarted): Edge(_T.RETRYING),
        (_T.DOUBTFUL, Renewed): Edge(_T.UNTRIED),
        (_T.RETRYING, CanaryPassed): Edge(_T.PASSED),
        (_T.RETRYING, CanaryFailed): Edge(_T.UNTRIED),
        (_T.RETRYING, CanaryShed): Edge(_T.DOUBTFUL),
        (_T.RETRYING, Renewed): Edge(_T.UNTRIED),
    },
    ignored={
        (_T.UNTRIED, CanaryPassed): _EARLIER,
        (_T.UNTRIED, CanaryFailed): _EARLIER,
        (_T.UNTRIED, CanaryShed): _EARLIER,
        (_T.UNTRIED, Renewed): "nothing was known of it",
        (_T.UNTRIED, Faulted): "nothing was promised of it",
        (_T.TRYING, Faulted): "the canary will tell",
        (_T.RETRYING, Faulted): "the canary will tell",
        (_T.DOUBTFUL, Faulted): "it is doubtful already",
    },
)


@dataclass(slots=True, eq=False)
class Pair:
    prefill: Instance | None  # None: decode is a hybrid instance
    decode: Instance
    changed: Callable[[], None] = lambda: None  # called when its trust differs from before
    trust: Trust = Trust.UNTRIED
    reason: str = "not tried yet"
    took_s: float | None = None  # the last canary that passed

    @property
    def name(self) -> str:
        names = [each.name for each in self.members]
        return " + ".join(names)

    @property
    def members(self) -> Sequence[Instance]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def is_routable(self) -> bool:
        return all(each.is_routable for each in self.members)

    @property
    def is_due(self) -> bool:
        """Whether its canary should run now."""
        return self.trust in (Trust.UNTRIED, Trust.DOUBTFUL) and self.is_routable


def feed(pair: Pair, event: PairEvent) -> None:
    """The only function that moves a pair."""
    before = pair.trust
    pair.trust, _ = PAIR.step(before, pair, event)
    if pair.trust is not before:
        pair.changed()
