"""A write, cut into frames as they are wanted: a write of any size costs little ahead."""

from __future__ import annotations

from typing import Final

import numpy as np

from pdrt.data.layout import Runs
from pdrt.data.transport.tcp_wire import MAX_PAYLOAD, MAX_RUNS

FRAME: Final = 1 << 20  # bytes: what is sent at least after an abort


class Cuts:
    """Takes `runs` apart from the front. `done` counts the bytes that were handed out."""

    def __init__(self, runs: Runs, frame: int = FRAME) -> None:
        assert 0 < frame <= MAX_PAYLOAD
        self._runs, self._frame = runs, frame
        self._sums = np.cumsum(runs[:, 2])
        self._row = 0  # the first that is not handed out in full
        self.total = int(self._sums[-1]) if len(runs) else 0
        self.done = 0
        self.is_begun = self.is_over = False

    def next(self) -> Runs:
        """At most a frame's bytes and runs; a write of nothing is one frame of nothing."""
        row, end = self._row, self._end()
        before = int(self._sums[row - 1]) if row else 0
        skip = self.done - before  # handed out already of the first row
        part = self._runs[row : max(end, row + 1)].copy()
        if len(part):
            part[0] += (skip, skip, -skip)
        if end == row:  # what is left of the row is longer than a frame, or there is none
            part[:, 2] = self._frame
        self._row = end
        self.done += int(part[:, 2].sum())
        self.is_begun, self.is_over = True, self.done == self.total
        return part

    def _end(self) -> int:
        """The row that does not fit in full any more."""
        end = int(np.searchsorted(self._sums, self.done + self._frame, side="right"))
        return min(end, self._row + MAX_RUNS)
