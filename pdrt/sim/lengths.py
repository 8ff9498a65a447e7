"""How many tokens prompts and answers have: one number, evenly between two, or lognormal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random
from typing import Final

from pdrt.errors import ConfigError

_MOST_TOKENS: Final = 1_000_000
_TAIL: Final = 8  # times the mean: longer ones are cut there, unless another limit is named
_EVEN: Final = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7}))?")
_LOGNORMAL: Final = re.compile(r"lognormal:(\d{1,7}):(\d+(?:\.\d+)?)(?::(\d{1,7}))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn between two bounds: evenly, or with a sigma lognormal with that mean."""

    least: int
    most: int
    mean: int = 0
    sigma: float = 0.0  # of the logarithm

    @staticmethod
    def parse(text: str, option: str) -> Lengths:
        """`128`, `64..256`, `lognormal:MEAN:SIGMA` or `lognormal:MEAN:SIGMA:MOST`.

        Raises ConfigError.
        """
        found = _lognormal(text.strip()) or _even(text.strip())
        if found is None:
            raise ConfigError(
                f"{option} {text!r}: want tokens such as 128, or 64..256, or"
                " lognormal:MEAN:SIGMA[:MOST] such as lognormal:256:0.6"
            )
        return found

    def draw(self, random: Random) -> int:
        if not self.sigma:
            return random.randint(self.least, self.most)
        drawn = random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(drawn), self.least), self.most)

    def __str__(self) -> str:
        if self.sigma:
            return f"lognormal:{self.mean}:{self.sigma:g}:{self.most}"
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


ONE: Final = Lengths(1, 1)


def exactly(tokens: int) -> Lengths:
    return Lengths(tokens, tokens)


def _even(text: str) -> Lengths | None:
    match = _EVEN.fullmatch(text)
    least = int(match[1]) if match else 0
    most = int(match[2] or match[1]) if match else 0
    return Lengths(least, most) if 1 <= least <= most <= _MOST_TOKENS else None


def _lognormal(text: str) -> Lengths | None:
    match = _LOGNORMAL.fullmatch(text)
    if not match:
        return None
    mean, sigma = int(match[1]), float(match[2])
    most = int(match[3]) if match[3] else min(_TAIL * mean, _MOST_TOKENS)
    is_one = 1 <= mean <= most <= _MOST_TOKENS and 0 < sigma <= 3
    return Lengths(1, most, mean, sigma) if is_one else None
