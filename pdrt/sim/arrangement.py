"""How N equal workers are arranged: one instance, several behind a router, or P and D apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdrt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Hybrid instances of `dp` workers each, or prefill and decode instances of one worker each."""

    name: str
    hybrids: int = 0
    dp: int = 1
    prefills: int = 0
    decodes: int = 0

    @property
    def workers(self) -> int:
        return self.hybrids * self.dp + self.prefills + self.decodes

    @property
    def is_apart(self) -> bool:
        """Whether prompts are computed elsewhere than answers."""
        return self.prefills > 0


def arrangements(workers: int) -> list[Arrangement]:
    """All that `pdrt bench sweep` compares. Raises ConfigError for fewer than 2 workers."""
    if workers < 2:
        raise ConfigError(f"workers = {workers}: there is nothing to arrange; want 2 or more")
    every = [Arrangement("dp", hybrids=1, dp=workers)]
    if workers % 2 == 0:
        every.append(Arrangement("route2", hybrids=2, dp=workers // 2))
    if workers != 2:
        every.append(Arrangement(f"route{workers}", hybrids=workers))
    every.append(apart(1, workers - 1))
    if workers // 2 > 1:
        every.append(apart(workers // 2, workers - workers // 2))
    return every


def apart(prefills: int, decodes: int) -> Arrangement:
    return Arrangement(f"{prefills}P{decodes}D", prefills=prefills, decodes=decodes)


def named(name: str, workers: int) -> Arrangement:
    """`dp`, `routeN` or `xPyD` on so many workers. Raises ConfigError when that cannot be."""
    if name == "dp":
        return Arrangement(name, hybrids=1, dp=workers)
    if found := re.fullmatch(r"route([1-9]\d*)", name):
        count = int(found[1])
        if workers % count:
            raise ConfigError(f"{name}: {workers} workers do not make {count} equal instances")
        return Arrangement(name, hybrids=count, dp=workers // count)
    if found := re.fullmatch(r"([1-9]\d*)P([1-9]\d*)D", name):
        one = apart(int(found[1]), int(found[2]))
        if one.workers != workers:
            raise ConfigError(f"{name}: that is {one.workers} workers, not {workers}")
        return one
    raise ConfigError(f"{name!r} is no arrangement: want dp, routeN or xPyD, such as route4, 1P3D")
