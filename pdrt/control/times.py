"""The timeline of one request as its leader tells it: when what came, and what took how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdrt.control.http import Json
from pdrt.messages import SpentMs

PHASES: Final = (
    "bootstrap",
    "admission",
    "queue",
    "prefill",
    "transfer",
    "first_decode",
    "decode",
    "rebind",
    "retracted",
)
_REACHED: Final = {
    "bootstrap": "both sides met",
    "admission": "admitted",
    "queue": "started",
    "prefill": "prefilled",
    "transfer": "transferred",
}


@dataclass(slots=True)
class Times:
    """Seconds on the leader's clock, zero until known; phases are its worker's, in ms.

    The promise: `tokenise` and all phases together are no more than `total`.
    """

    arrived: float
    tokenised: float = 0.0
    first: float = 0.0
    last: float = 0.0
    spent_ms: SpentMs = ()
    gaps: int = 0  # tokens after the first of each choice
    gaps_s: float = 0.0  # what they took together
    longest_s: float = 0.0

    def said(self, now: float, before: float, tokens: int) -> None:
        """Tokens of a choice came; its last one did so `before`, or 0."""
        if not self.first:
            self.first = now
        if before:
            self.gaps += tokens
            self.gaps_s += now - before
            self.longest_s = max(self.longest_s, now - before)

    @property
    def mean_s(self) -> float:
        """From token to token."""
        return self.gaps_s / self.gaps if self.gaps else 0.0

    def json(self) -> Json:
        marks = {"tokenise": self.tokenised, "first_token": self.first, "total": self.last}
        told = {name: _ms(at - self.arrived) for name, at in marks.items() if at}
        told |= self.phases
        if self.gaps:
            told |= {"token_mean": _ms(self.mean_s), "token_max": _ms(self.longest_s)}
        return told

    def events(self) -> list[tuple[str, float]]:
        """What was reached when, on the leader's clock."""
        if not self.tokenised:
            return []
        at, found = self.tokenised, [("queued", self.tokenised)]
        for phase, ms in self.spent_ms:
            at += ms / 1e3
            if phase in _REACHED:
                found.append((_REACHED[phase], at))
        return [*found, ("first token", self.first)] if self.first else found

    @property
    def phases(self) -> dict[str, float]:
        """What the worker told, as far as it is known here."""
        return {name: ms for name, ms in self.spent_ms if name in PHASES}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
