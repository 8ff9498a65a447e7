"""Which arrangement of so many workers serves a load best: all of them tried in the simulator.

The promise: every ratio of prefill to decode instances, and every way to keep both phases together,
is tried with several chunk sizes, each under the same requests at the same times. What is best is
what gives most good answers a second; a plain `routeN` that is as good wins, since it is simpler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, TypeAlias

from pdrt.errors import ConfigError
from pdrt.sim.arrangement import Arrangement, apart
from pdrt.sim.cost import Cost
from pdrt.sim.lengths import Lengths
from pdrt.sim.run import Outcome, changed, simulate
from pdrt.sim.tally import Answer, Good
from pdrt.sim.workload import Arrivals, Workload

Told: TypeAlias = Callable[["Candidate"], None]
ENOUGH: Final = 0.95  # of the requests must be good ones for the limits to count as met
TIE: Final = 0.05  # who is better by less is not worth another arrangement
_CHUNKS: Final = (128, 256, 512, 1024, 2048)
_MOST_WORKERS: Final = 256
_MOST_TIMES: Final = 16  # so many times the workers are tried when none are enough
_ALONE: Final = 20  # requests
_SAME: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arrangement with a chunk size."""

    arrangement: Arrangement
    chunk: int

    def __str__(self) -> str:
        return f"{self.arrangement.name} with chunks of {self.chunk}"

    @property
    def name(self) -> str:
        return self.arrangement.name

    @property
    def is_route(self) -> bool:
        """One instance a worker, both phases in each: as plain as it gets."""
        return self.arrangement.hybrids == self.arrangement.workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A load and what makes an answer to it a good one."""

    input: str  # tokens, as in `lengths`
    output: str
    arrivals: Arrivals
    good: Good
    workers: int
    requests: int = 400
    seed: int = 1
    chunks: Sequence[int] = ()  # to try; none: usual ones

    def __post_init__(self) -> None:
        if not 2 <= self.workers <= _MOST_WORKERS:
            raise ConfigError(f"--workers {self.workers}: want 2 to {_MOST_WORKERS}")

    def workload(self) -> Workload:
        arrivals = self.arrivals
        return Workload.of(self.requests, self.input, self.output, arrivals, seed=self.seed)


@dataclass(frozen=True)
class Tried:
    """What a candidate's clients saw."""

    candidate: Candidate
    outcome: Outcome
    good: Good
    requests: int

    @cached_property
    def point(self) -> dict[str, object]:
        return {**self.outcome.point(), "chunk": self.candidate.chunk, **self.misses.told()}

    @cached_property
    def misses(self) -> Misses:
        return Misses.of(self.outcome.tally.answers, self.good, self.requests)

    @property
    def goodput(self) -> float:
        return self.outcome.tally.goodput_per_s

    @property
    def order(self) -> tuple[float, float, bool]:
        """Of two that are as good the one whose requests end sooner, and then the plain one."""
        tally = self.outcome.tally
        spent = sum(one.e2e_s for one in tally.answers) / max(1, len(tally.answers))
        return (round(self.goodput, 9), -spent, self.candidate.is_route)

    @property
    def is_enough(self) -> bool:
        return self.misses.good >= ENOUGH - _SAME


@dataclass(frozen=True, slots=True)
class Misses:
    """Shares of all requests: good ones, and why the others were not."""

    good: float
    ttft: float
    itl: float
    refused: float

    @staticmethod
    def of(answers: Sequence[Answer], good: Good, requests: int) -> Misses:
        def share(those: Iterable[bool]) -> float:
            return sum(those) / requests

        return Misses(
            good=share(one.is_good(good) for one in answers),
            ttft=share(one.ttft_s > good.ttft_s for one in answers),
            itl=share(not replace(one, ttft_s=0.0).is_good(good) for one in answers),
            refused=1 - len(answers) / requests,
        )

    def told(self) -> dict[str, float]:
        return {
            "good_share": self.good,
            "ttft_missed_share": self.ttft,
            "itl_missed_share": self.itl,
            "refused_share": self.refused,
        }


@dataclass(frozen=True)
class Plan:
    """All that was tried, the best first; `needed` workers meet the limits where these do not."""

    wanted: Wanted
    tried: Sequence[Tried]
    needed: Tried | None = None
    can_be_met: bool = True  # by requests that are alone
    shares_cores: bool = False  # so that more workers are not more machine

    @property
    def best(self) -> Tried:
        return self.tried[0]

    @cached_property
    def each(self) -> Sequence[Tried]:
        """Every arrangement once, with its best chunk size."""
        found: dict[str, Tried] = {}
        for one in self.tried:
            found.setdefault(one.candidate.name, one)
        return tuple(found.values())

    @property
    def runner_up(self) -> Tried:
        return self.each[1]

    @property
    def route(self) -> Tried:
        return next(one for one in self.each if one.candidate.is_route)

    @property
    def apart(self) -> Tried:
        """The best that keeps the phases apart."""
        return next(one for one in self.each if one.candidate.arrangement.is_apart)

    @property
    def margin(self) -> float:
        """How much more the best gives than `routeN`."""
        return _gain(self.best.goodput, self.route.goodput)

    @property
    def is_apart_better(self) -> bool:
        return self.best.candidate.arrangement.is_apart and self.margin > TIE

    @property
    def chosen(self) -> Tried:
        """What to run: the best, or `routeN` where that is nearly as good."""
        return self.route if self.margin <= TIE else self.best


def _gain(mine: float, other: float) -> float:
    if mine <= other:
        return 0.0
    return mine / other - 1 if other > 0 else math.inf


@dataclass(slots=True)
class Search:
    """Candidates of one cost and load; the same one is never tried twice."""

    cost: Cost
    wanted: Wanted
    told: Told = lambda _candidate: None
    _known: dict[Candidate, Tried] = field(default_factory=dict)
    _workload: Workload | None = None

    def plan(self, *, look_further: bool = True) -> Plan:
        """Raises ConfigError for lengths or sizes that cannot be."""
        self._check_fits()
        tried = self._ranked(candidates(self.cost, self.wanted.workers, self.wanted.chunks))
        if not look_further or any(one.is_enough for one in tried):
            return Plan(self.wanted, tried)
        shapes = nearest(tried)
        can_be_met = any(self._is_good_alone(shape.candidate) for shape in shapes)
        shares_cores = can_be_met and self.cost.machine.cores > 0
        needed = self._enough(shapes) if can_be_met and not shares_cores else None
        return Plan(self.wanted, tried, needed, can_be_met, shares_cores)

    def _check_fits(self) -> None:
        """Not even its shortest requests would find room."""
        shortest = Lengths.parse(self.wanted.input, "--input-len").least
        shortest += Lengths.parse(self.wanted.output, "--output-len").least
        most = self.cost.instance.kv_tokens
        if shortest > most:
            raise ConfigError(f"a request needs KV of {shortest} tokens, a worker has {most}")

    def _ranked(self, those: Iterable[Candidate]) -> Sequence[Tried]:
        return sorted((self.tried(one) for one in those), key=lambda t: t.order, reverse=True)

    def tried(self, candidate: Candidate) -> Tried:
        if candidate not in self._known:
            if self._workload is None:
                self._workload = self.wanted.workload()
            self._known[candidate] = self._simulated(candidate, self._workload)
            self.told(candidate)
        return self._known[candidate]

    def _simulated(self, candidate: Candidate, workload: Workload) -> Tried:
        cost = changed(self.cost, max_prefill_tokens=candidate.chunk)
        good = self.wanted.good
        outcome = simulate(cost, candidate.arrangement, workload, good=good)
        outcome = replace(outcome, leaders=())  # hundreds of pools would be kept for nobody
        return Tried(candidate, outcome, good, len(workload.requests))

    def _is_good_alone(self, candidate: Candidate) -> bool:
        """Whether requests that come one after the other are good ones, most of them."""
        one_by_one = replace(self.wanted, arrivals=Arrivals(concurrency=1), requests=_ALONE)
        return self._simulated(candidate, one_by_one.workload()).is_enough

    def _enough(self, shapes: Sequence[Tried]) -> Tried | None:
        """The fewest workers that meet the limits, in the shapes that came nearest."""
        low, high = self.wanted.workers, self.wanted.workers
        found: Tried | None = None
        while found is None and high < most_workers(self.wanted.workers):
            low, high = high, min(2 * high, most_workers(self.wanted.workers))
            found = self._meeting(shapes, high)
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            if better := self._meeting(shapes, middle):
                found, high = better, middle
            else:
                low = middle
        return found

    def _meeting(self, shapes: Sequence[Tried], workers: int) -> Tried | None:
        wider = {w for shape in shapes for w in scaled(shape.candidate, workers)}
        ranked = self._ranked(sorted(wider, key=str))
        return next((one for one in ranked if one.is_enough), None)


def most_workers(workers: int) -> int:
    return min(_MOST_WORKERS, _MOST_TIMES * workers)


def search(cost: Cost, wanted: Wanted, told: Told = lambda _candidate: None) -> Plan:
    """Raises ConfigError."""
    return Search(cost, wanted, told).plan()


def candidates(cost: Cost, workers: int, chunks: Sequence[int] = ()) -> list[Candidate]:
    """Prompts that are computed where nobody decodes gain nothing from small chunks.

    Those are tried there when they are asked for.
    """
    sizes = chunks_of(cost, chunks)
    whole = sizes if chunks else sorted({cost.instance.max_prefill_tokens, sizes[-1]})
    together = [Candidate(one, chunk) for one in hybrids(workers) for chunk in sizes]
    ratios = [apart(prefills, workers - prefills) for prefills in range(1, workers)]
    return [*together, *(Candidate(one, chunk) for one in ratios for chunk in whole)]


def chunks_of(cost: Cost, chunks: Sequence[int]) -> list[int]:
    """Those to try: no smaller than a block."""
    if chunks:
        return sorted(set(chunks))
    own = cost.instance
    usual = {chunk for chunk in _CHUNKS if chunk >= own.block_size}
    return sorted(usual | {own.max_prefill_tokens})


def hybrids(workers: int) -> Iterator[Arrangement]:
    """One instance a worker; two; and one for all, with one dispatcher."""
    for count in sorted({workers, 2, 1}, reverse=True):
        if workers % count == 0:
            name = "dp" if count == 1 else f"route{count}"
            yield Arrangement(name, hybrids=count, dp=workers // count)


def nearest(tried: Sequence[Tried]) -> list[Tried]:
    """The best one together and the best one apart: what is tried with more workers."""
    found = list[Tried]()
    for is_apart in (False, True):
        those = [t for t in tried if t.candidate.arrangement.is_apart == is_apart]
        found.append(max(those, key=lambda t: (t.misses.good, t.order)))
    return found


def scaled(candidate: Candidate, workers: int) -> list[Candidate]:
    """The same shape with another number of workers, and the ratios beside it."""
    shape, chunk = candidate.arrangement, candidate.chunk
    if not shape.is_apart:
        return [Candidate(Arrangement(f"route{workers}", hybrids=workers), chunk)]
    middle = round(workers * shape.prefills / shape.workers)
    ratios = {min(max(middle + step, 1), workers - 1) for step in (-1, 0, 1)}
    return [Candidate(apart(prefills, workers - prefills), chunk) for prefills in sorted(ratios)]
