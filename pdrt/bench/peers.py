"""The rows that servers are compared by: decode alone, decode among prefill, first tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from rich.console import Console
from rich.table import Table

from pdrt.bench.load import Server
from pdrt.bench.prompts import Prompts
from pdrt.bench.rounds import Load, Turns
from pdrt.bench.summary import Turn, ratio
from pdrt.sim.lengths import exactly

Figure: TypeAlias = Callable[[Turn], float | None]
STREAMS: Final = 8
_PROMPT, _ANSWER = 128, 64


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    load: str
    unit: str
    figure: Figure


def _decode(streams: int) -> Figure:
    """From the median time of a token, which no prefill of another stream lengthens."""

    def figure(turn: Turn) -> float | None:
        token_s = turn.token_s
        return streams / token_s if token_s else None

    return figure


def _first(turn: Turn) -> float | None:
    ttft = turn.ttft
    return ttft.p50 if ttft else None


ROWS: Final = (
    Row("decode, single stream", "single", "tok/s", _decode(1)),
    Row(f"decode, {STREAMS} streams", "streams", "tok/s", _decode(STREAMS)),
    Row(f"{STREAMS} streams with prefill", "streams", "tok/s", lambda turn: turn.output_tok_per_s),
    Row("first token, prompt of 512", "512", "ms", _first),
    Row("first token, prompt of 2048", "2048", "ms", _first),
)


def loads(prompts: Prompts, *, is_quick: bool) -> list[Load]:
    """What the rows need, with the given kind of prompts."""
    few = 2 if is_quick else 3
    shapes = (
        ("single", _PROMPT, _ANSWER, few, 1),
        ("streams", _PROMPT, _ANSWER, STREAMS * few, STREAMS),
        ("512", 512, 1, few, 1),
        ("2048", 2048, 1, few, 1),
    )
    return [
        Load(title, replace(prompts, input=exactly(of), output=exactly(to)), requests, at_once)
        for title, of, to, requests, at_once in shapes
    ]


def cell(turns: Turns, row: Row, server: str, first: str) -> tuple[float | None, float | None]:
    """The median over rounds, and the ratio to the first server."""
    mine = [row.figure(turn) for turn in turns[row.load, server]]
    its = [row.figure(turn) for turn in turns[row.load, first]]
    return _median(mine), ratio(mine, its)


def _median(figures: Sequence[float | None]) -> float | None:
    return ratio(figures, [1.0] * len(figures))


def show(console: Console, servers: Sequence[Server], turns: Turns) -> None:
    first = servers[0].name
    table = Table("", *(server.name for server in servers))
    for row in ROWS:
        cells = [_shown(*cell(turns, row, server.name, first), row.unit) for server in servers]
        table.add_row(row.title, *cells)
    console.print(table)
    if len(servers) > 1:
        console.print(f"in brackets: of {first}, the median of the rounds' own ratios")


def _shown(value: float | None, of_first: float | None, unit: str) -> str:
    if value is None or of_first is None:
        return "none"
    return f"{value:.0f} {unit} ({of_first:.2f})" if of_first != 1.0 else f"{value:.0f} {unit}"


def points(servers: Sequence[Server], turns: Turns) -> list[Mapping[str, object]]:
    """For `--json`: a point for each server and row."""
    told = list[Mapping[str, object]]()
    for server in servers:
        for row in ROWS:
            value, of_first = cell(turns, row, server.name, servers[0].name)
            whole = Turn.pooled(turns[row.load, server.name])
            told.append(
                {
                    "name": server.name,
                    "row": row.title,
                    "value": value,
                    "unit": row.unit,
                    "of_first": of_first,
                    "errors": whole.errors,
                    "busy_turns": whole.busy,
                }
            )
    return told
