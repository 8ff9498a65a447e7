"""What disaggregation adds to the first token of a short prompt, against the same engine colocated.

Requests alternate between the two, so that whatever else the machine does meets both; medians
are compared. One token is asked for: on a machine with few cores the step for the next one would
compete with the first one's way to the client, which is not what is measured here.
`pdrt bench first-token` starts prefill, decode, router and a hybrid instance.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from aiohttp import ClientSession, ClientTimeout
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pdrt.errors import Unavailable
from pdrt.up.layout import Part
from pdrt.up.shell import Asked, MakeMeanwhile, Meanwhile

Path_: TypeAlias = Literal["disagg", "local"]
Sleep: TypeAlias = Callable[[float], Awaitable[None]]
PROMPT: Final = "The quick brown fox jumps over the lazy dog."
_WARM_UP: Final = 5
_TIMEOUT_S: Final = 60.0
_SETTLE_S: Final = 10.0
_SETTLE_STEP_S: Final = 0.2


@dataclass(slots=True)
class Times:
    """Milliseconds from the request to its first token, of one path."""

    path: Path_
    first_token_ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.first_token_ms)

    def quantile(self, share: float) -> float:
        ordered = sorted(self.first_token_ms)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def first_token_ms(
    session: ClientSession, url: str, want: Path_, clock: Callable[[], float]
) -> float:
    """One streamed request. Raises Unavailable when it fails or took another path."""
    sampling = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    body = {"prompt": PROMPT, "sampling_params": sampling, "stream": True}
    began = clock()
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200 or response.headers.get("x-pd-path") != want:
            raise Unavailable(f"{url}: {response.status} {(await response.text())[:300]}")
        await response.content.readline()
        took = clock() - began
        await response.read()
    return took * 1000


async def measure(
    disagg_url: str,
    colocated_url: str,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> tuple[Times, Times]:
    """Alternate `rounds` requests over both paths. Raises Unavailable."""
    apart, together = Times("disagg"), Times("local")
    async with ClientSession(timeout=ClientTimeout(total=_TIMEOUT_S)) as session:
        await _settle(session, disagg_url, clock, sleep)
        for number in track(
            range(-_WARM_UP, rounds),
            "measuring",
            console=Console(stderr=True),
            refresh_per_second=1,
        ):
            for times, url in ((apart, disagg_url), (together, colocated_url)):
                took = await first_token_ms(session, url, times.path, clock)
                if number >= 0:
                    times.first_token_ms.append(took)
    return apart, together


async def _settle(
    session: ClientSession, url: str, clock: Callable[[], float], sleep: Sleep
) -> None:
    """Until the pair of instances has proved itself: before, the hybrid one stands in for it."""
    until = clock() + _SETTLE_S
    while True:
        try:
            await first_token_ms(session, url, "disagg", clock)
        except Unavailable:
            if clock() > until:
                raise
            await sleep(_SETTLE_STEP_S)
        else:
            return


def measuring(rounds: int, console: Console, json_file: str) -> MakeMeanwhile:
    """For `up`: measure on the cluster that was brought up with one hybrid instance."""

    def make(parts: Sequence[Part]) -> Meanwhile:
        colocated_url = next(part.url for part in parts if part.role == "hybrid")

        async def meanwhile(url: str, _asked: Asked) -> None:
            apart, together = await measure(url, colocated_url, rounds)
            show(console, apart, together)
            if json_file:
                write(json_file, (apart, together))

        return meanwhile

    return make


def points(results: Sequence[Times]) -> list[dict[str, object]]:
    """For `--json`."""
    return [
        {
            "path": times.path,
            "requests": len(times.first_token_ms),
            "ttft_ms": {
                "p50": times.median,
                "p90": times.quantile(0.9),
                "p99": times.quantile(0.99),
            },
        }
        for times in results
    ]


def show(console: Console, apart: Times, together: Times) -> None:
    table = Table("path", "requests", "TTFT p50 ms", "p90", "p99")
    for times in (together, apart):
        shown = (times.median, times.quantile(0.9), times.quantile(0.99))
        count = str(len(times.first_token_ms))
        table.add_row(times.path, count, *(f"{figure:.1f}" for figure in shown))
    console.print(table)
    added = apart.median - together.median
    console.print(f"disaggregation adds {added:.1f} ms to the median first token")


def write(file: str, results: Sequence[Times]) -> None:
    with open(file, "w", encoding="utf-8") as out:
        json.dump(points(results), out, indent=1)
