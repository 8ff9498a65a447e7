"""How much is kept free for each answer under way: R, a share of how long answers are.

The length is learned from answers that ended; one that runs is more likely a long one, hence
E[L^2] / E[L]. How much of it pays depends on the load: answers that end make room for those that
go on, so that little is enough when they are spread out, and all of it when they begin together.
So the share is controlled: it falls while somebody waits for memory, and rises when a retraction
makes work for nothing, until about one part in fifty is lost to that.
"""

from __future__ import annotations

import math
from typing import Final

_ANSWERS: Final = 256  # that lengths are learned from, about; recent ones count most
_PRIOR: Final = 4  # the start value counts as so many answers
_SHARE: Final = 0.25  # at first
_LOSS: Final = 0.02  # of all steps: what may be lost to computing again
_GAIN: Final = 0.005  # of a step: how fast the share falls
_MOST: Final = 1.0  # what one retraction may change, as a power of e


class Reserve:
    """R in tokens: what was configured, until answers say what they use."""

    def __init__(self, start: int, chunk: int, *, is_adaptive: bool) -> None:
        self._start, self._chunk, self._is_adaptive = start, chunk, is_adaptive
        length = start / _SHARE
        self._sum, self._squares = _PRIOR * length, _PRIOR * length * length
        self._share = _SHARE

    @property
    def tokens(self) -> int:
        if not self._is_adaptive or not self._sum:
            return self._start
        return round(self._share * self._squares / self._sum)

    def ended(self, said: int) -> None:
        """An answer has so many tokens."""
        keep = 1 - 1 / _ANSWERS
        self._sum = self._sum * keep + said
        self._squares = self._squares * keep + said * said

    def waited(self) -> None:
        """In a step somebody waited for memory."""
        self._share *= 1 - _GAIN

    def lost(self, tokens: int) -> None:
        """A request was retracted: so many are to be computed again."""
        steps = tokens / self._chunk
        self._share = min(1.0, self._share * math.exp(min(_MOST, _GAIN * steps / _LOSS)))
