"""Whether a prompt is computed by the decode instance itself, for that brings its answer sooner.

Under `auto` both ways are measured: the time to the first token of streams, for each a straight
line over the tokens to compute. Older requests fade, and now and then a short prompt goes the other
way, to see whether what was true still is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from pdrt.control.choice import Choice
from pdrt.control.prefixes import share_of

Wanted: TypeAlias = int | Literal["auto"]
Reason: TypeAlias = Literal["", "short", "cached", "auto"]

AUTO_MOST: Final = 512  # tokens: a step of decode's others is not held up for longer
TRIED: Final = 64  # tokens: such prompts find out what is not known ...
TRIED_EVERY: Final = 64  # ... one of so many, once both ways are known
ENOUGH: Final = 8.0  # requests of late, before a line is believed
_FADING: Final = 1 - 1 / 64  # "of late" is about so many requests


@dataclass(slots=True)
class Line:
    """Seconds over tokens, by sums that fade: least squares in constant time and space."""

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.count = self.count * _FADING + 1.0
        self.tokens = self.tokens * _FADING + tokens
        self.seconds = self.seconds * _FADING + seconds
        self.squares = self.squares * _FADING + tokens * tokens
        self.products = self.products * _FADING + tokens * seconds

    def at(self, tokens: int) -> float:
        """The seconds to expect; where all prompts were of one length, their mean."""
        mean = self.seconds / self.count
        spread = self.count * self.squares - self.tokens**2
        if spread <= 1e-6 * self.count * self.squares:
            return mean
        slope = (self.count * self.products - self.tokens * self.seconds) / spread
        return mean + max(slope, 0.0) * (tokens - self.tokens / self.count)


@dataclass(slots=True)
class Nearby:
    """The decision, and what it is made of; `wanted` is the setting."""

    wanted: Wanted = 0
    local: Line = field(default_factory=Line)
    disagg: Line = field(default_factory=Line)
    turn: int = 0

    def considered(self, choice: Choice, tokens: int) -> Choice:
        """The same, or its decode instance alone, where that may and should."""
        if not self.wanted or choice.prefill is None:
            return choice
        status = choice.decode.status
        if status is None or not status.local_prefill:
            return choice
        missing = tokens - _held(choice, tokens)
        why = self.why(missing)
        if why == "short" and missing < tokens and not self.why(tokens):
            why = "cached"
        return Choice(None, choice.decode, because=choice.because, local=why) if why else choice

    def why(self, tokens: int) -> Reason:
        """Why so many tokens should be computed by decode itself; empty: they should not."""
        if self.wanted != "auto":
            return "short" if tokens <= self.wanted else ""
        if tokens > AUTO_MOST:
            return ""
        self.turn += tokens <= TRIED
        is_tried = tokens <= TRIED and self.turn % TRIED_EVERY == 0
        return "auto" if self._is_sooner(tokens) is not is_tried else ""

    def _is_sooner(self, tokens: int) -> bool:
        if self.local.count < ENOUGH:
            return tokens <= TRIED
        if self.disagg.count < ENOUGH:
            return False
        return self.local.at(tokens) < self.disagg.at(tokens)

    def learn(self, choice: Choice, tokens: int, seconds: float) -> None:
        """The first token of such a prompt came after so long, from there."""
        if choice.prefill is not None or choice.local:
            missing = tokens - _held(choice, tokens) if self.wanted == "auto" else 0
            self.heard(missing, seconds, is_local=bool(choice.local))

    def heard(self, tokens: int, seconds: float, *, is_local: bool) -> None:
        """A stream's first token came after so long."""
        if self.wanted == "auto":
            (self.local if is_local else self.disagg).add(tokens, seconds)


def _held(choice: Choice, tokens: int) -> int:
    """Of the prompt's tokens, those that its decode instance has already, as far as is known."""
    because = choice.because
    if because is None or because.decode is None or because.decode[1].policy != "prefix_aware":
        return 0
    picked = because.decode[1]
    known = round(-picked.scores[picked.at][1])
    return int(tokens * share_of(because.ask.prompt, known))
