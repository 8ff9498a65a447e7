"""The figures of a load: throughput, latencies, goodput, and ratios between servers. Plain data.

A ratio is the median of the rounds' own ratios: what shared a round met the same other load.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pdrt.bench.heard import Told, told_by
from pdrt.bench.load import Ran

_LATE: Final = 0.01  # of an answer's gaps may be longer than the limit


@dataclass(frozen=True, slots=True)
class Spread:
    """A latency's distribution, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread | None:
        """None of nothing."""
        if not seconds:
            return None
        ordered = sorted(s * 1000 for s in seconds)
        return Spread(
            statistics.fmean(ordered),
            statistics.median(ordered),
            quantile(ordered, 0.9),
            quantile(ordered, 0.99),
            ordered[-1],
        )

    def json(self) -> dict[str, float]:
        told = {"mean": self.mean, "p50": self.p50, "p90": self.p90, "p99": self.p99}
        return told | {"max": self.most}


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good answer keeps.

    Its first token comes in time, and of its own gaps between tokens at most one in a hundred is
    longer than the limit: of fewer than 100 gaps none.
    """

    ttft_s: float = 2.0
    itl_s: float = 0.1
    tpot_s: float = math.inf  # and the mean time of a token after the first

    def are_kept(self, told: Told) -> bool:
        first, each = told.ttft_s, told.per_token_s
        if first is None or first > self.ttft_s or (each or 0.0) > self.tpot_s:
            return False
        gaps = told.gaps_s
        return sum(gap > self.itl_s for gap in gaps) <= len(gaps) * _LATE

    def json(self) -> dict[str, float | None]:
        tpot = None if math.isinf(self.tpot_s) else self.tpot_s * 1000
        return {"ttft": self.ttft_s * 1000, "itl": self.itl_s * 1000, "tpot": tpot}

    def __str__(self) -> str:
        kept = f"TTFT <= {self.ttft_s * 1000:g} ms, 99 % of its gaps <= {self.itl_s * 1000:g} ms"
        more = "" if math.isinf(self.tpot_s) else f", TPOT <= {self.tpot_s * 1000:g} ms"
        return f"goodput: requests with {kept}{more}"


@dataclass(slots=True)
class Turn:
    """One server's load of one round, or of all."""

    answers: list[Told] = field(default_factory=list)  # those that were completed
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)  # the first one of each code
    seconds: float = 0.0
    client_s: float = 0.0
    busy: int = 0  # of how many turns the machine was busy when they began

    @staticmethod
    def of(ran: Ran, *, is_quiet: bool = True) -> Turn:
        turn = Turn(seconds=ran.seconds, client_s=ran.client_s, busy=int(not is_quiet))
        for told in map(told_by, ran.records):
            turn.add(told)
        return turn

    def add(self, told: Told) -> None:
        if told.failure:
            self.failures[told.failure] += 1
            self.reasons.setdefault(told.failure, told.reason)
        else:
            self.answers.append(told)

    @staticmethod
    def pooled(turns: Sequence[Turn]) -> Turn:
        whole = Turn()
        for turn in turns:
            whole.answers += turn.answers
            whole.failures += turn.failures
            whole.reasons = turn.reasons | whole.reasons
            whole.seconds += turn.seconds
            whole.client_s += turn.client_s
            whole.busy += turn.busy
        return whole

    @property
    def errors(self) -> int:
        return self.failures.total()

    @property
    def output_tok_per_s(self) -> float:
        return sum(told.tokens for told in self.answers) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def client_share(self) -> float:
        return self.client_s / self.seconds

    @property
    def ttft(self) -> Spread | None:
        return Spread.of([told.ttft_s for told in self.answers if told.ttft_s is not None])

    @property
    def itl(self) -> Spread | None:
        return Spread.of([gap for told in self.answers for gap in told.gaps_s])

    @property
    def tpot(self) -> Spread | None:
        """Of requests, each by the mean of its tokens after the first: those that have some."""
        return Spread.of([t for told in self.answers if (t := told.per_token_s) is not None])

    @property
    def e2e(self) -> Spread | None:
        return Spread.of([told.e2e_s for told in self.answers])

    def goodput_per_s(self, limits: Limits) -> float:
        return sum(map(limits.are_kept, self.answers)) / self.seconds

    @property
    def tokens_per_event(self) -> float:
        """More than one: the server says several at once, and gaps are between those."""
        events = sum(len(told.at) for told in self.answers)
        return sum(told.tokens for told in self.answers) / events if events else 0.0

    @property
    def token_s(self) -> float | None:
        """The median time from one token of a stream to its next."""
        itl = self.itl
        return itl.p50 / 1000 / max(1, round(self.tokens_per_event)) if itl else None


Metric: TypeAlias = Callable[[Turn], float | None]


def _p50(spread: Spread | None) -> float | None:
    return spread.p50 if spread else None


def _p99(spread: Spread | None) -> float | None:
    return spread.p99 if spread else None


METRICS: Final[Mapping[str, Metric]] = {
    "output_tok_per_s": lambda turn: turn.output_tok_per_s,
    "requests_per_s": lambda turn: turn.requests_per_s,
    "ttft_p50": lambda turn: _p50(turn.ttft),
    "ttft_p99": lambda turn: _p99(turn.ttft),
    "itl_p50": lambda turn: _p50(turn.itl),
    "itl_p99": lambda turn: _p99(turn.itl),
    "tpot_p50": lambda turn: _p50(turn.tpot),
    "e2e_p50": lambda turn: _p50(turn.e2e),
}


def ratio(mine: Sequence[float | None], first: Sequence[float | None]) -> float | None:
    """The median of same-round ratios; rounds in which either has no figure do not count."""
    pairs = [(own, its) for own, its in zip(mine, first, strict=True) if own and its]
    return statistics.median(own / its for own, its in pairs) if pairs else None


def ratios(mine: Sequence[Turn], first: Sequence[Turn]) -> dict[str, float]:
    """Of every metric that both have."""
    found = {
        name: ratio([*map(metric, mine)], [*map(metric, first)]) for name, metric in METRICS.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def point(turn: Turn, limits: Limits) -> dict[str, object]:
    """What `--json` says of a server, or of a layout."""
    spreads = {
        "ttft_ms": turn.ttft,
        "itl_ms": turn.itl,
        "tpot_ms": turn.tpot,
        "e2e_ms": turn.e2e,
    }
    return {
        "completed": len(turn.answers),
        "errors": turn.errors,
        "failures": dict(turn.failures),
        "requests_per_s": turn.requests_per_s,
        "output_tok_per_s": turn.output_tok_per_s,
        **{name: spread.json() if spread else None for name, spread in spreads.items()},
        "goodput_per_s": turn.goodput_per_s(limits),
        "limits_ms": limits.json(),
        "prompt_tokens": sum(told.prompt_tokens for told in turn.answers),
        "cached_tokens": sum(told.cached_tokens for told in turn.answers),
        "output_tokens": sum(told.tokens for told in turn.answers),
        "tokens_per_event": turn.tokens_per_event,
        "client_share": turn.client_share,
        "seconds": turn.seconds,
    }
