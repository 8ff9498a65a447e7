"""The figures of `pdrt bench router`: turns, ratios of the same round, a table, points."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Final, TypeAlias

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdrt.bench.router_load import Counted, Kind
from pdrt.bench.summary import quantile

Tell: TypeAlias = Callable[[float, str], None]  # how much is done, of 1, and what is next
_MANY: Final = 512  # streams, from which on chunks come slower
_BUSY: Final = 0.8  # of a core


@dataclass(frozen=True, slots=True)
class Cell:
    """A load: so many requests in flight, as JSON or as streams."""

    kind: Kind
    width: int

    def __str__(self) -> str:
        return f"json c={self.width}" if self.kind == "json" else f"{self.width} streams"

    @property
    def every_s(self) -> float:
        """From chunk to chunk: 1,000 streams would be more than one core can send otherwise."""
        return 0.02 if self.width <= _MANY else 0.2

    @property
    def chunks(self) -> int:
        return 200 if self.width <= _MANY else 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One router under one load in one round."""

    requests_per_s: float
    chunks_per_s: float
    errors: int
    cpu: float  # ms a request, or s per 1,000 chunks
    memory_mb: float
    client_share: float  # of a core
    p50_us: float = 0.0  # of a request, or of a chunk's way
    p99_us: float = 0.0

    @classmethod
    def of(cls, counted: Counted, kind: Kind, used_s: float, memory_mb: float) -> Turn:
        """Both are per thousand: ms a request is s per 1,000 requests."""
        number = counted.requests if kind == "json" else counted.chunks
        times = sorted(counted.latencies_us if kind == "json" else counted.delays_us)
        return cls(
            requests_per_s=counted.requests / counted.seconds,
            chunks_per_s=counted.chunks / counted.seconds,
            errors=counted.errors,
            cpu=1000 * used_s / max(number, 1),
            memory_mb=memory_mb,
            client_share=counted.client_s / counted.seconds,
            p50_us=quantile(times, 0.5) if times else 0.0,
            p99_us=quantile(times, 0.99) if times else 0.0,
        )


Figure: TypeAlias = Callable[[Turn], float]


def cpu(turn: Turn) -> float:
    return turn.cpu


def p50(turn: Turn) -> float:
    return turn.p50_us


def p99(turn: Turn) -> float:
    return turn.p99_us


@dataclass(slots=True)
class Found:
    """Turns of all routers under all loads, round by round."""

    of: dict[tuple[Cell, str], list[Turn]] = field(default_factory=dict)

    def add(self, cell: Cell, name: str, turn: Turn) -> None:
        self.of.setdefault((cell, name), []).append(turn)

    def turns(self, name: str) -> list[Turn]:
        return [turn for (_, whose), turns in self.of.items() if whose == name for turn in turns]

    @property
    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(cell for cell, _ in self.of))

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.of))

    def gained(self, cell: Cell, name: str, direct: str, figure: Figure) -> float:
        """Microseconds that the router adds: the median of the rounds' differences."""
        if (cell, direct) not in self.of:
            return 0.0
        mine, floor = self.of[cell, name], self.of.get((cell, direct), [])
        pairs = zip(mine, floor, strict=False)
        return statistics.median(figure(a) - figure(b) for a, b in pairs)

    def of_better(self, cell: Cell, mine: str, others: Sequence[str]) -> float | None:
        """My processor time as a ratio to the better of the others: the median of the rounds' own.

        Who is better is said by all rounds. The best of each would mostly be who had the luck.
        """
        if not others:
            return None
        better = min((self.of[cell, name] for name in others), key=lambda t: median(t, cpu))
        pairs = zip(self.of[cell, mine], better, strict=False)
        ratios = [own.cpu / their.cpu for own, their in pairs if their.cpu]
        return statistics.median(ratios) if ratios else None


def median(turns: Sequence[Turn], figure: Figure) -> float:
    return statistics.median(map(figure, turns))


# For a person.


@contextmanager
def progress(is_quiet: bool) -> Iterator[Tell]:
    """Drawn between turns only: a thread that draws would be measured too."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, auto_refresh=False, disable=is_quiet) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(done: float, text: str) -> None:
            bar.update(task, completed=done, description=text, refresh=True)

        yield tell
        bar.update(task, completed=1.0, description="measured", refresh=True)


def show(console: Console, found: Found, direct: str) -> None:
    """A table a load; figures are medians of the rounds."""
    for cell in found.cells:
        is_json = cell.kind == "json"
        title = f"{cell}; CPU in {'ms a request' if is_json else 's per 1,000 chunks'}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("router", no_wrap=True)
        rate = "requests/s" if is_json else "chunks/s"
        for name in (rate, "CPU", "of better", "p50 us", "p99 us", "MB", "errors"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in found.names:
            table.add_row(name, *_cells(found, cell, name, direct))
        console.print(table)
    console.print(
        "p50, p99: of direct, what a request or a chunk's way takes; of a router, what it adds."
        " of better: the processor time against that of the better one of the others, of the same"
        " round; better is who uses less in the median"
    )
    shares = [turn.client_share for turns in found.of.values() for turn in turns]
    advice = "; that much shows in p50 and p99" if max(shares) > _BUSY else ""
    console.print(f"the client used at most {max(shares):.0%} of its core{advice}")


def _cells(found: Found, cell: Cell, name: str, direct: str) -> Iterator[str]:
    turns, is_direct = found.of[cell, name], name == direct
    yield f"{median(turns, _rate_of(cell)):,.0f}"
    yield "" if is_direct else f"{median(turns, cpu):.4f}"
    ratio = found.of_better(cell, name, _others(found, name, direct))
    yield "" if is_direct or ratio is None else f"{ratio:.2f}"
    for figure in (p50, p99):
        us = median(turns, figure) if is_direct else found.gained(cell, name, direct, figure)
        yield f"{us:,.0f}"
    yield "" if is_direct else f"{median(turns, lambda t: t.memory_mb):.0f}"
    yield str(sum(turn.errors for turn in turns))


def _rate_of(cell: Cell) -> Figure:
    if cell.kind == "json":
        return lambda turn: turn.requests_per_s
    return lambda turn: turn.chunks_per_s


def _others(found: Found, name: str, direct: str) -> list[str]:
    return [each for each in found.names if each not in (name, direct)]


def points(found: Found, direct: str) -> list[Mapping[str, object]]:
    """For `--json`: a point a router and load, with what each round counted."""
    return [
        {
            "router": name,
            "kind": cell.kind,
            "width": cell.width,
            "requests_per_s": median(turns, lambda t: t.requests_per_s),
            "chunks_per_s": median(turns, lambda t: t.chunks_per_s),
            "cpu_s_per_1000": None if name == direct else median(turns, cpu),
            "cpu_of_better": found.of_better(cell, name, _others(found, name, direct)),
            "p50_us": median(turns, lambda t: t.p50_us),
            "p99_us": median(turns, lambda t: t.p99_us),
            "gained_p50_us": found.gained(cell, name, direct, p50),
            "gained_p99_us": found.gained(cell, name, direct, p99),
            "memory_mb": median(turns, lambda t: t.memory_mb),
            "errors": sum(turn.errors for turn in turns),
            "rounds": [asdict(turn) for turn in turns],
        }
        for cell in found.cells
        for name in found.names
        for turns in [found.of[cell, name]]
    ]
