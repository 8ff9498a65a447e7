"""What clients saw: first tokens, gaps between tokens, ends; many gaps at once where they agree."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Spread: TypeAlias = dict[str, float]
Doubles: TypeAlias = npt.NDArray[np.float64]
_GOOD_SHARE: Final = 100  # of so many gaps one may be too long


@dataclass(frozen=True, slots=True)
class Good:
    """What makes an answer a good one, in seconds; without `tpot_s` that does not count."""

    ttft_s: float = 2.0
    itl_s: float = 0.1
    tpot_s: float = math.inf


@dataclass(slots=True)
class Answer:
    """Of one request, in seconds after it was sent."""

    number: int
    input: int
    output: int
    began: float
    ttft_s: float = math.nan
    e2e_s: float = math.nan
    slow: int = 0  # gaps that were too long

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / (self.output - 1) if self.output > 1 else 0.0

    def is_good(self, good: Good) -> bool:
        gaps = self.output - 1
        may_be_slow = gaps // _GOOD_SHARE
        return (
            self.ttft_s <= good.ttft_s and self.slow <= may_be_slow and self.tpot_s <= good.tpot_s
        )


@dataclass(slots=True)
class Tally:
    """`later` is what each token needs to reach its client."""

    good: Good = Good()
    later: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    last: dict[int, float] = field(default_factory=dict)  # by room: when its last token came
    slow: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("q"))  # how often each gap was

    def first(self, room: int, now: float) -> None:
        self.last[room] = now
        self.tokens += 1

    def next(self, room: int, now: float) -> None:
        """A token after the first one."""
        self.gap(now - self.last[room], (room,))
        self.last[room] = now

    def gap(self, seconds: float, rooms: Sequence[int]) -> None:
        """All of them have waited so long for a token."""
        self.gaps.append(seconds)
        self.counts.append(len(rooms))
        self.tokens += len(rooms)
        if seconds > self.good.itl_s:
            self.slow.update(rooms)

    def run(self, rooms: Sequence[int], since: float, ends: Iterable[float]) -> None:
        """A token for each at each of `ends`; all of them had the one before at `since`."""
        for end in ends:
            self.gap(end - since, rooms)
            since = end
        self.last.update(dict.fromkeys(rooms, since))

    def ended(self, room: int, answer: Answer) -> None:
        answer.slow = self.slow.pop(room, 0)
        self.last.pop(room, None)
        self.answers.append(answer)

    def failed(self, room: int, code: str) -> None:
        self.slow.pop(room, None)
        self.last.pop(room, None)
        self.failures[code] += 1

    # Figures.

    @property
    def seconds(self) -> float:
        """From the first request to the last answer's end."""
        begun = min((one.began for one in self.answers), default=0.0)
        return max((one.began + one.e2e_s for one in self.answers), default=0.0) - begun

    @property
    def goodput_per_s(self) -> float:
        good = sum(one.is_good(self.good) for one in self.answers)
        return good / self.seconds if self.seconds else 0.0

    def itl(self) -> Spread | None:
        return weighted(np.frombuffer(self.gaps), np.frombuffer(self.counts, dtype=np.int64))

    def point(self) -> dict[str, object]:
        """With the keys of `pdrt bench serve --json`."""
        seconds, done = self.seconds, len(self.answers)
        told = sum(one.output for one in self.answers)
        ttft = np.array([one.ttft_s for one in self.answers])
        e2e = np.array([one.e2e_s for one in self.answers])
        good = sum(one.is_good(self.good) for one in self.answers)
        return {
            "completed": done,
            "errors": self.failures.total(),
            "failures": dict(self.failures),
            "seconds": seconds,
            "requests_per_s": done / seconds if seconds else 0.0,
            "output_tok_per_s": told / seconds if seconds else 0.0,
            "ttft_ms": weighted(ttft, np.ones(done, dtype=np.int64)),
            "itl_ms": self.itl(),
            "e2e_ms": weighted(e2e, np.ones(done, dtype=np.int64)),
            "goodput_per_s": good / seconds if seconds else 0.0,
            "limits_ms": {"ttft": self.good.ttft_s * 1e3, "itl": self.good.itl_s * 1e3},
            "prompt_tokens": sum(one.input for one in self.answers),
            "output_tokens": told,
        }


def weighted(seconds: Doubles, counts: npt.NDArray[np.int64]) -> Spread | None:
    """In milliseconds, of values that came so often each; None of nothing."""
    total = int(counts.sum())
    if not total:
        return None
    order = np.argsort(seconds, kind="stable")
    values, upto = seconds[order] * 1e3, np.cumsum(counts[order])

    def at(index: int) -> float:
        return float(values[np.searchsorted(upto, index, side="right")])

    def share(part: float) -> float:
        return at(min(int(part * total), total - 1))

    middle = (at((total - 1) // 2) + at(total // 2)) / 2
    mean = float((seconds * counts).sum() / total * 1e3)
    spread = {"mean": mean, "p50": middle, "p90": share(0.9), "p99": share(0.99)}
    return spread | {"max": float(values[-1])}
