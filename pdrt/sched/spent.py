"""Where a request's time goes: each moment counts for one phase, and their sum is its life.

Times are differences on this worker's clock; nothing of another host's comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pdrt.messages import SpentMs
from pdrt.sched.states import State


class Phase(StrEnum):
    BOOTSTRAP = "bootstrap"  # the two sides find each other
    ADMISSION = "admission"  # decode: until there is memory
    QUEUE = "queue"  # until its first chunk is computed; of decode: over there
    PREFILL = "prefill"  # until the first token
    TRANSFER = "transfer"  # what of it was not done while the prompt was computed
    FIRST_DECODE = "first_decode"  # from its KV to the next token
    DECODE = "decode"
    REBIND = "rebind"  # its prefill was lost, another is found
    RETRACTED = "retracted"  # it made way, until it goes on


_OF_STATE: Final[Mapping[State, Phase]] = {
    State.BOOTSTRAPPING: Phase.BOOTSTRAP,
    State.WAITING: Phase.ADMISSION,
    State.QUEUED: Phase.QUEUE,
    State.UNBOUND: Phase.REBIND,
    State.TRANSFERRING: Phase.QUEUE,
    State.RUNNING: Phase.PREFILL,
    State.SWAPPED: Phase.RETRACTED,
    State.INFLIGHT: Phase.TRANSFER,
}
_ANSWERING: Final = frozenset({Phase.FIRST_DECODE, Phase.DECODE, Phase.RETRACTED})
_REMOTE: Final = frozenset({Phase.QUEUE, Phase.PREFILL, Phase.TRANSFER})


@dataclass(slots=True)
class Spent:
    """One request's. `has_news`: it entered a phase since that was told."""

    since: float
    phase: Phase = Phase.QUEUE
    seconds: dict[Phase, float] = field(default_factory=dict)
    has_news: bool = True

    def begins(self, state: State) -> None:
        """Its request is in the books from now on."""
        self.phase = _OF_STATE[state]

    def enter(self, phase: Phase, now: float) -> None:
        if phase is self.phase:
            return
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + max(0.0, now - self.since)
        self.phase, self.since, self.has_news = phase, max(now, self.since), True

    def moved(self, before: State, after: State, now: float) -> None:
        """Its request is in another state."""
        if after is State.DONE:
            return
        if after is State.RUNNING and before is State.TRANSFERRING:
            self.enter(Phase.FIRST_DECODE, now)
        elif self.phase in _ANSWERING:
            self.enter(Phase.RETRACTED, now)
        else:
            self.enter(_OF_STATE[after], now)

    def hears(self, phase: Phase, now: float) -> None:
        """Decode: the other side has come so far; what comes late changes nothing."""
        order = (Phase.QUEUE, Phase.PREFILL, Phase.TRANSFER)
        if self.phase in _REMOTE and order.index(phase) > order.index(self.phase):
            self.enter(phase, now)

    def says(self, now: float) -> None:
        """A token was computed here."""
        goes_on = self.phase is Phase.FIRST_DECODE or self.phase is Phase.RETRACTED
        self.enter(Phase.DECODE if goes_on else Phase.FIRST_DECODE, now)

    def told(self, now: float) -> SpentMs:
        """All of it until now, in milliseconds."""
        self.has_news = False
        until = self.seconds | {
            self.phase: self.seconds.get(self.phase, 0.0) + max(0.0, now - self.since)
        }
        return tuple((str(phase), round(s * 1e3, 3)) for phase, s in until.items())

    def fork(self) -> Spent:
        """Of another sequence from the same prompt."""
        return Spent(self.since, self.phase, dict(self.seconds), self.has_news)
