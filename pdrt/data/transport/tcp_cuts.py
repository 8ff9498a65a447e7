"""A write, cut into frames as they are wanted: a write of any size costs little ahead."""

from __future__ import annotations

from typing import Final

from pdrt.data.layout import Runs
from pdrt.data.transport.tcp_wire import MAX_PAYLOAD, MAX_RUNS

FRAME: Final = 8 << 20  # bytes; what has begun of one is still sent after an abort


class Cuts:
    """Takes `runs` apart from the front. `done` counts the bytes that were handed out."""

    def __init__(self, runs: Runs, frame: int = FRAME) -> None:
        assert 0 < frame <= MAX_PAYLOAD
        self._runs, self._frame = runs, frame
        self._sums = runs[:, 2].cumsum()
        self._row = 0  # the first that is not handed out in full
        self.total = int(self._sums[-1]) if len(runs) else 0
        self.done = 0
        self.is_begun = self.is_over = False

    def next(self) -> tuple[Runs, int]:
        """At most a frame's bytes and runs, and how many bytes these are.

        A write of nothing is one frame of nothing.
        """
        row, before = self._row, self.done
        end = len(self._runs)
        if self.total - before > self._frame or end - row > MAX_RUNS:
            end = int(self._sums.searchsorted(before + self._frame, side="right"))
            end = min(end, row + MAX_RUNS)
        part = self._runs[row : max(end, row + 1)]
        skip = before - int(self._sums[row - 1]) if row else before
        if skip or end == row:
            part = part.copy()
            part[:1] += (skip, skip, -skip)
        if end == row and len(part):  # what is left of the row is longer than a frame
            part[0, 2] = self._frame
            self.done += self._frame
        else:
            self.done = int(self._sums[end - 1]) if end else 0
        self._row = end
        self.is_begun, self.is_over = True, self.done == self.total
        return part, self.done - before
