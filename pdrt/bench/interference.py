"""`pdrt bench interference`: what long prompts do to streams that decode, apart and together.

Prefill and decode with a core each, against one hybrid instance on both cores: without chunks,
where every stream waits while a prompt is computed, and with chunks of several sizes. All get the
same prompts as often. What each layout costs in first tokens stands beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final, TypeAlias

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from pdrt.bench.facts import machine_facts
from pdrt.bench.interference_plot import draw
from pdrt.bench.layouts import Ground, Layout
from pdrt.bench.rounds import rotated
from pdrt.bench.shell import Report, write_points
from pdrt.bench.summary import Spread, ratio
from pdrt.bench.traffic import MOST_AT_ONCE, Met, Pace, Seen, Traffic, meet
from pdrt.errors import ConfigError
from pdrt.sim.arrangement import Arrangement, apart

Stage: TypeAlias = Callable[[str], None]
APART: Final = Layout(apart(1, 1))
WHOLE: Final = "whole"
_COLUMNS: Final = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)
_SEEN_BY_P99: Final = 0.01
_HEADS: Final = (
    "",
    *("ITL\np50", "ITL\np99", "ITL\nmax", "p99 of\n1P1D's"),
    *("stream\nTTFT p50", "prompt\nTTFT p50", "prompt\nTTFT p99", "stream\ntok/s", "missed\n"),
)


def hybrid(name: str, chunk: int) -> Layout:
    """One instance, of one worker."""
    return Layout(Arrangement(name, hybrids=1), chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    traffic: Traffic
    chunks: Sequence[int]
    rounds: int = 1
    pace: Pace = field(default_factory=Pace)
    seed: int = 1

    def layouts(self) -> list[Layout]:
        """The one that sets the interval comes first."""
        short = self.traffic.streams * self.traffic.stream_input
        whole = hybrid(WHOLE, self.traffic.prompt_input + short)
        return [APART, whole, *(hybrid(f"chunk {n}", n) for n in self.chunks)]


@dataclass(frozen=True, slots=True)
class Found:
    """What was seen of each layout, round by round."""

    every_s: float
    seen: Mapping[Layout, Sequence[Seen]]

    def pooled(self, layout: Layout) -> Seen:
        return Seen.pooled(self.seen[layout])

    def times_worse(self, layout: Layout) -> float | None:
        """Its p99 between tokens as a multiple of 1P1D's, round against round."""
        return ratio(*([_p99(seen) for seen in self.seen[each]] for each in (layout, APART)))

    @property
    def whole(self) -> Layout:
        return next(layout for layout in self.seen if layout.name == WHOLE)

    @property
    def best(self) -> Layout | None:
        """The chunk size with the lowest p99 of those that kept up."""
        chunked = [
            layout
            for layout in self.seen
            if not layout.is_apart
            and layout is not self.whole
            and not self.pooled(layout).missed
            and self.pooled(layout).itl
        ]
        return min(chunked, key=lambda one: self.times_worse(one) or float("inf"), default=None)


def _p99(seen: Seen) -> float | None:
    return seen.itl.p99 if seen.itl else None


def chunks_of(text: str) -> list[int]:
    """Raises ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= 65536 for part in parts):
        raise ConfigError(f"--chunks {text!r}: want tokens such as 64,128,256,512")
    return sorted({int(part) for part in parts})


def cores_of(usable: Sequence[int]) -> Sequence[int]:
    """The two that are measured on. Raises ConfigError when there are no two."""
    if len(usable) < 2:
        raise ConfigError("prefill and decode need a core each: this process may use one only")
    return sorted(usable)[:2]


def interference(asked: Asked, ground: Ground, report: Report, console: Console) -> int:
    """Measure and report; the exit status is 1 when a request failed. Raises PdrtError."""
    report.check()
    found = measure(asked, ground, report.is_quiet)
    if not report.is_quiet:
        show(console, asked, found)
    failed = _tell_failures(Console(stderr=True, highlight=False), found)
    if report.json_file:
        write_points(report.json_file, points(asked, found))
    if report.plot:
        draw(report.plot, {layout.name: found.pooled(layout) for layout in found.seen})
    return 1 if failed else 0


def measure(asked: Asked, ground: Ground, is_quiet: bool) -> Found:
    """Each layout has a turn in each round, in an order that rotates. Raises PdrtError."""
    layouts, pace = asked.layouts(), asked.pace
    seen: dict[Layout, list[Seen]] = {layout: [] for layout in layouts}
    err = Console(stderr=True, highlight=False)
    with Progress(*_COLUMNS, console=err, refresh_per_second=1, disable=is_quiet) as bar:
        task = bar.add_task("", total=asked.rounds * len(layouts))
        for number in range(asked.rounds):
            for layout in rotated(layouts, number):
                stage = partial(_say_stage, bar, task, layout)
                met = _turn(asked, ground, layout, pace, number, stage)
                pace = Pace(met.every_s)  # the same for all that follow
                seen[layout].append(met.seen)
                bar.advance(task)
    return Found(pace.every_s, seen)


def _say_stage(bar: Progress, task: TaskID, layout: Layout, stage: str) -> None:
    bar.update(task, description=f"{layout.name}: {stage}")


def _turn(
    asked: Asked, ground: Ground, layout: Layout, pace: Pace, number: int, stage: Stage
) -> Met:
    stage("starting")
    random = Random(f"{asked.seed} {number}")
    return ground.found_by(layout, lambda url: meet(url, asked.traffic, random, pace, stage))


# For a person, and for a program.


def show(console: Console, asked: Asked, found: Found) -> None:
    table = Table(*_HEADS, box=SIMPLE, padding=(0, 1, 0, 0))
    for layout in found.seen:
        seen = found.pooled(layout)
        itl = seen.itl
        short, long = Spread.of(seen.stream_ttft_s), Spread.of(seen.prompt_ttft_s)
        figures = (
            itl and itl.p50,
            itl and itl.p99,
            itl and itl.most,
            found.times_worse(layout),
            short and short.p50,
            long and long.p50,
            long and long.p99,
            seen.stream_tok_per_s,
        )
        told = ["none" if figure is None else f"{figure:.1f}" for figure in figures]
        table.add_row(layout.name, *told, str(seen.missed))
    console.print(table)
    for line in (*_load_lines(asked, found), *verdict(found)):
        console.print(line, soft_wrap=True)


def _load_lines(asked: Asked, found: Found) -> Sequence[str]:
    traffic = asked.traffic
    client = statistics.fmean(
        found.pooled(layout).client_s / found.pooled(layout).seconds for layout in found.seen
    )
    return (
        "ms; 1P1D: a core each; whole: hybrid on both cores without chunks; chunk n: with them",
        f"{traffic.streams} streams of {traffic.stream_output} tokens; a prompt of"
        f" {traffic.prompt_input} tokens every {found.every_s:.2f} s; missed: prompts that found"
        f" {MOST_AT_ONCE} others in flight; the client used {client:.1%} of one core",
    )


def verdict(found: Found) -> list[str]:
    """What the figures say, and what they cannot say."""
    lines = []
    whole, best = found.times_worse(found.whole), found.best
    if whole:
        lines.append(f"ITL p99 with 1P1D: {whole:.1f} times better than hybrid without chunks")
    if best and (worse := found.times_worse(best)):
        lines.append(f"and {worse:.1f} times better than the best chunk, {best.chunk} tokens")
    if first := _first_token_line(found):
        lines.append(first)
    if found.pooled(found.whole).stalled < _SEEN_BY_P99:
        lines.append(
            "without chunks less than 1 % of the gaps met a prompt, so p99 does not see them:"
            " read the maximum, or take more --streams or a higher --share"
        )
    lines += [
        f"{layout.name} did not keep up: its figures are those of fewer prompts"
        for layout in found.seen
        if found.pooled(layout).missed
    ]
    return lines


def _first_token_line(found: Found) -> str:
    """Where being apart loses: one core computes the prompt, not two."""
    spreads = {layout: Spread.of(found.pooled(layout).prompt_ttft_s) for layout in found.seen}
    known = {layout: spread.p50 for layout, spread in spreads.items() if spread}
    if APART not in known or len(known) < 2:
        return ""
    least = min(known, key=known.__getitem__)
    return (
        f"first token of the long prompts, p50: {known[APART]:.0f} ms with 1P1D,"
        f" {known[least]:.0f} ms with {least.name}, the lowest"
    )


def points(asked: Asked, found: Found) -> list[Mapping[str, object]]:
    """For `--json`: one for each layout."""
    traffic, machine = asked.traffic, machine_facts()
    told = list[Mapping[str, object]]()
    for layout, seen in ((layout, found.pooled(layout)) for layout in found.seen):
        spreads = {
            "itl_ms": seen.itl,
            "stream_ttft_ms": Spread.of(seen.stream_ttft_s),
            "prompt_ttft_ms": Spread.of(seen.prompt_ttft_s),
        }
        told.append(
            {
                "layout": layout.name,
                "chunk": layout.chunk,
                **{name: spread.json() if spread else None for name, spread in spreads.items()},
                "itl_p99_of_1p1d": found.times_worse(layout),
                "is_best_chunk": layout == found.best,
                "stalled_share": seen.stalled,
                "stream_tok_per_s": seen.stream_tok_per_s,
                "prompts": len(seen.prompt_ttft_s),
                "missed": seen.missed,
                "errors": seen.failures.total(),
                "failures": dict(seen.failures),
                "streams": traffic.streams,
                "output_len": traffic.stream_output,
                "input_len": traffic.prompt_input,
                "interval_s": found.every_s,
                "seconds": seen.seconds,
                "rounds": asked.rounds,
                "client_share": seen.client_s / seen.seconds,
                "machine": machine,
            }
        )
    return told


def _tell_failures(err: Console, found: Found) -> bool:
    has_failed = False
    for layout in found.seen:
        seen = found.pooled(layout)
        for code, count in seen.failures.most_common():
            has_failed = True
            line = f"{layout.name}: {count} x {code}, the first: {seen.reasons[code]}"
            err.print(line, style="red", soft_wrap=True, markup=False)
    return has_failed
