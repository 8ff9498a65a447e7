"""Requests to come: when, and how many tokens they bring and ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Final

from pdrt.errors import ConfigError
from pdrt.sim.lengths import Lengths


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
        inputs, outputs = Lengths.parse(str(input), "input"), Lengths.parse(str(output), "output")
        requests, now = list[Request](), 0.0
        for _ in range(count):
            now += arrivals.gap(random)
            requests.append(Request(now, inputs.draw(random), outputs.draw(random)))
        return Workload(tuple(requests), arrivals.concurrency)

    @property
    def output_tokens(self) -> int:
        return sum(one.output for one in self.requests)
