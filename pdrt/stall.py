"""Whether a group's step lasts too long, so that a stuck rank is found before its sums give up.

A step is judged by its tokens and by what tokens took before. Until one step has ended nothing
is known, and none is judged. Looks are counted, not seconds: a node that was stopped as a whole
finds nobody stuck when it goes on. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Final

LOOK_S: Final = 0.5
_LEAST_S: Final = 5.0  # what a step may always take
_TIMES: Final = 20.0  # the usual
_WEIGHT: Final = 0.1  # of the newest step in what is usual


class StallWatch:
    """Tell it of the steps, and `look` at them every LOOK_S."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque()  # of the steps that some rank has not ended
        self._ended = 0  # the last step that all have ended
        self._looks = 0  # since it ended
        self._began = 0.0
        self._pace: float | None = None  # seconds that a token takes

    def begun(self, tokens: int, now: float) -> None:
        if not self._tokens:
            self._looks = 0
        self._tokens.append(tokens)
        self._began = now

    def computed(self, now: float) -> None:
        """We ourselves have ended the step that was begun last."""
        pace = (now - self._began) / max(1, self._tokens[-1])
        known = pace if self._pace is None else self._pace
        self._pace = known + _WEIGHT * (pace - known)

    def ended(self, number: int) -> None:
        """All ranks have ended the steps up to this one, counted from 1."""
        while self._ended < number:
            self._ended += 1
            self._tokens.popleft()
            self._looks = 0

    def look(self) -> float | None:
        """The seconds that the oldest step has lasted when they are too many."""
        if not self._tokens or self._pace is None:
            return None
        self._looks += 1
        lasted = self._looks * LOOK_S
        is_late = lasted > max(_LEAST_S, _TIMES * self._pace * self._tokens[0])
        return lasted if is_late else None
