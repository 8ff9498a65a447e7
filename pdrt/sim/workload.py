"""Requests to come: when, and how many tokens they bring and ask for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

from pdrt.errors import ConfigError

Draw: TypeAlias = Callable[[Random], int]
_MOST: Final = 1_000_000
_NUMBER: Final = r"\d+(?:\.\d+)?"


@dataclass(frozen=True, slots=True)
class Request:
    at: float  # seconds; of a closed loop the first ones' alone counts
    input: int
    output: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """All at once, or `rate` a second: Poisson, or gamma with another burstiness.

    With `concurrency` so many are under way, and the next one begins when one has ended.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int = 0

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.burstiness > 0 and self.concurrency >= 0):
            raise ConfigError(f"{self}: rate and burstiness are above 0, concurrency not below")

    def gap(self, random: Random) -> float:
        """Seconds from one request to the next."""
        if math.isinf(self.rate) or self.concurrency:
            return 0.0
        return random.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))


ALL_AT_ONCE: Final = Arrivals()


@dataclass(frozen=True, slots=True)
class Workload:
    """With `concurrency` requests come in their order when there is room, else at their times."""

    requests: tuple[Request, ...]
    concurrency: int = 0

    @staticmethod
    def of(
        count: int,
        input: str | int,
        output: str | int,
        arrivals: Arrivals = ALL_AT_ONCE,
        *,
        seed: int = 1,
    ) -> Workload:
        """Lengths are 512, 256..1024 or lognormal:MEAN:SIGMA[:MOST]. Raises ConfigError."""
        random = Random(seed)
        inputs, outputs = lengths(str(input)), lengths(str(output))
        requests, now = list[Request](), 0.0
        for _ in range(count):
            now += arrivals.gap(random)
            requests.append(Request(now, inputs(random), outputs(random)))
        return Workload(tuple(requests), arrivals.concurrency)

    @property
    def output_tokens(self) -> int:
        return sum(one.output for one in self.requests)


def lengths(text: str) -> Draw:
    """`512`, `256..1024`, or `lognormal:MEAN:SIGMA[:MOST]`. Raises ConfigError."""
    if found := re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text):
        least, most = int(found[1]), int(found[2] or found[1])
        if 1 <= least <= most <= _MOST:
            return lambda random: random.randint(least, most)
    if found := re.fullmatch(rf"lognormal:({_NUMBER}):({_NUMBER})(?::(\d+))?", text):
        mean, sigma = float(found[1]), float(found[2])
        most = int(found[3] or min(_MOST, math.ceil(8 * mean)))
        if mean >= 1 and most >= 1:
            middle = math.log(mean) - sigma * sigma / 2
            return lambda random: min(max(round(random.lognormvariate(middle, sigma)), 1), most)
    raise ConfigError(f"length {text!r}: want 512, 256..1024 or lognormal:MEAN:SIGMA[:MOST]")
