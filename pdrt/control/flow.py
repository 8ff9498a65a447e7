"""What passed through the router in each of the last seconds: counts, and times as percentiles.

Memory is fixed, whatever comes; an event costs a comparison and an addition or two. It has no
clock: who feeds it says what time it is, and a second is closed by the first event after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdrt.control.spread import Counts, Few, few_of, none, percentiles, slot_of

SECONDS: Final = 300  # that are kept
LATELY: Final = 60  # of them, for figures of "now" that do not jump
SHARES: Final = (0.5, 0.99)


@dataclass(frozen=True, slots=True)
class Second:
    """One that is over. Times in seconds; None when there was none to measure."""

    started: int = 0
    ended: int = 0
    failed: int = 0
    pieces: int = 0
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    first: tuple[float | None, ...] = (None, None)
    gap: tuple[float | None, ...] = (None, None)


@dataclass(slots=True)
class _Lately:
    """The counts of the last `LATELY` seconds, kept as a sum."""

    sums: Counts = field(default_factory=none)
    each: deque[Few] = field(default_factory=deque)

    def add(self, few: Few) -> None:
        self.each.append(few)
        for slot, count in few:
            self.sums[slot] += count
        if len(self.each) > LATELY:
            for slot, count in self.each.popleft():
                self.sums[slot] -= count

    def percentiles(self, and_now: Counts) -> list[float | None]:
        both = [one + other for one, other in zip(self.sums, and_now, strict=True)]
        return percentiles(few_of(both), SHARES)


class Flow:
    """Feed it in the order of time; `now` is in seconds of one clock that never goes back."""

    def __init__(self, now: float) -> None:
        self._ends = now + 1.0  # of the second that is counted now
        self._seconds: deque[Second] = deque(maxlen=SECONDS)
        self._first_lately, self._gap_lately = _Lately(), _Lately()
        self._tokens_per_s = self._bytes_per_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._started = self._ended = self._failed = 0
        self._firsts, self._gaps = none(), none()

    # Events.

    def started(self, now: float) -> None:
        """A request has come."""
        if now >= self._ends:
            self.turn(now)
        self._started += 1

    def first(self, now: float, seconds: float) -> None:
        """The first bytes of a streamed answer have gone out, so long after its request came."""
        if now >= self._ends:
            self.turn(now)
        self._firsts[slot_of(seconds)] += 1

    def gap(self, now: float, seconds: float) -> None:
        """A further piece of a stream has gone out, so long after the one before."""
        if now >= self._ends:
            self.turn(now)
        self._gaps[slot_of(seconds)] += 1

    def ended(self, now: float, *, is_failed: bool) -> None:
        """A request is over."""
        if now >= self._ends:
            self.turn(now)
        self._ended += 1
        self._failed += is_failed

    def level(self, now: float, tokens_per_s: float, bytes_per_s: float) -> None:
        """What the instances do all together, from now on."""
        if now >= self._ends:
            self.turn(now)
        self._tokens_per_s, self._bytes_per_s = tokens_per_s, bytes_per_s

    # Questions.

    def series(self, now: float, seconds: int = SECONDS) -> Sequence[Second]:
        """The last so many seconds that are over, oldest first; fewer when it is younger."""
        if now >= self._ends:
            self.turn(now)
        return list(self._seconds)[-seconds:]

    def lately(self, now: float) -> tuple[list[float | None], list[float | None]]:
        """Median and 99th percentile of the last minute's first pieces and gaps."""
        if now >= self._ends:
            self.turn(now)
        return (
            self._first_lately.percentiles(self._firsts),
            self._gap_lately.percentiles(self._gaps),
        )

    @property
    def ends(self) -> float:
        """When the second after the last closed one ends."""
        return self._ends

    def turn(self, now: float) -> None:
        """Close the seconds that are over by now."""
        passed = int(now - self._ends) + 1
        self._close()
        for _ in range(min(passed - 1, SECONDS)):
            self._close()
        self._ends += passed

    def _close(self) -> None:
        firsts, gaps = few_of(self._firsts), few_of(self._gaps)
        self._seconds.append(
            Second(
                started=self._started,
                ended=self._ended,
                failed=self._failed,
                pieces=sum(self._firsts) + sum(self._gaps),
                tokens_per_s=self._tokens_per_s,
                bytes_per_s=self._bytes_per_s,
                first=tuple(percentiles(firsts, SHARES)),
                gap=tuple(percentiles(gaps, SHARES)),
            )
        )
        self._first_lately.add(firsts)
        self._gap_lately.add(gaps)
        self._clear()
