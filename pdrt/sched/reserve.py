"""How much is kept free for each answer under way: R, learned from answers that ended.

What a running answer still needs is, on average over its life, half of its length; long ones run
longer, so that more of those that run at any time are long: E[L^2] / (2 E[L]). Recent answers
count most, so that R follows when the load drifts.
"""

from __future__ import annotations

from typing import Final

_MEMORY: Final = 256  # answers, about, that R is learned from


class Reserve:
    """R in tokens: what was configured, until answers say what they use."""

    def __init__(self, start: int, *, is_adaptive: bool) -> None:
        self._is_adaptive = is_adaptive
        self._answers = 4.0  # the start value counts as so many of them
        self._sum = self._answers * 2 * start / 1.0
        self._squares = self._sum * 2 * start
        self.tokens = start

    def learn(self, said: int) -> None:
        """An answer ended with so many tokens."""
        if not self._is_adaptive or said <= 0:
            return
        keep = 1 - 1 / _MEMORY
        self._sum = self._sum * keep + said
        self._squares = self._squares * keep + said * said
        self.tokens = round(self._squares / (2 * self._sum))
