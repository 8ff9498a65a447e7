"""A plan in words: what to run, by how much it is better, why, and what would be enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from rich.box import SIMPLE
from rich.table import Table

from pdrt.sim.plan import ENOUGH, TIE, Misses, Plan, Tried, Wanted, most_workers

Json: TypeAlias = Mapping[str, Any]
_FEW: Final = 0.02  # a share of the requests that is not worth a word
_SHOWN: Final = 8


def verdict(plan: Plan) -> list[str]:
    """One line each, the most important first."""
    return [*_what_to_run(plan), *_why(plan), *_what_is_missing(plan)]


def _what_to_run(plan: Plan) -> Iterator[str]:
    chosen, route, apart = plan.chosen, plan.route, plan.apart
    if plan.is_apart_better:
        yield f"Disaggregate: {chosen.candidate}, {told(chosen)}."
        yield f"Plain {route.candidate}: {told(route)}; {times(plan.margin)} more apart."
    elif chosen.candidate.is_route:
        yield f"Do not disaggregate: {chosen.candidate}, {told(chosen)}."
        yield f"The best apart, {apart.candidate}: {told(apart)}; {_compared(apart, route)}."
    else:
        yield f"Do not disaggregate: {chosen.candidate}, {told(chosen)}."
        yield f"Plain {route.candidate}: {told(route)}; {times(plan.margin)} less."
    told_of = [chosen, route, *([apart] if chosen.candidate.is_route else [])]
    if plan.runner_up not in told_of:
        yield f"Runner-up: {plan.runner_up.candidate}, {told(plan.runner_up)}."


def _compared(apart: Tried, route: Tried) -> str:
    if apart.goodput > route.goodput:
        gain = apart.goodput / route.goodput - 1
        return f"only {gain:.1%} more, and a gain below {TIE:.0%} is not worth a second role"
    if route.goodput and 1 - apart.goodput / route.goodput < _FEW:
        return "no more, for two roles and a transfer of each prompt's KV"
    return f"{times(1 - apart.goodput / route.goodput) if route.goodput else 'no'} less"


def _why(plan: Plan) -> Iterator[str]:
    """What the one that loses loses by."""
    loser = plan.route if plan.is_apart_better else plan.apart
    if loser is plan.chosen:
        return
    if reason := reason_of(loser):
        yield f"Why: with {loser.candidate.name} {reason}."
    elif loser.is_enough and plan.chosen.is_enough:
        yield f"Why: both keep the limits at this load; {plan.chosen.candidate.name} is simpler."
    else:
        yield f"Why: {loser.candidate.name} needs longer for all requests together."


def reason_of(tried: Tried) -> str:
    misses = tried.misses
    parts = [f"{share:.0%} {what}" for what, share in _missed(misses) if share >= _FEW]
    return " and ".join(parts[:2])


def _missed(misses: Misses) -> list[tuple[str, float]]:
    those = [
        ("of the requests wait too long for their first token", misses.ttft),
        ("have gaps between tokens that are too long", misses.itl),
        ("are refused", misses.refused),
    ]
    return sorted(those, key=lambda one: -one[1])


def _what_is_missing(plan: Plan) -> Iterator[str]:
    best = plan.best
    if best.is_enough:
        return
    yield (
        f"Nothing keeps the limits for {ENOUGH:.0%} of the requests with {plan.wanted.workers}"
        f" workers; nearest is {best.candidate}: {best.misses.good:.0%}, TTFT p90"
        f" {_ms(best, 'ttft_ms', 'p90')}, ITL p99 {_ms(best, 'itl_ms', 'p99')}."
    )
    if plan.needed is not None:
        needed = plan.needed.candidate
        yield (
            f"{needed.arrangement.workers} workers would be enough: {needed}, {told(plan.needed)}."
        )
    elif plan.shares_cores:
        yield "More workers would share the same cores: a faster machine or a lower rate helps."
    elif plan.can_be_met:
        most = most_workers(plan.wanted.workers)
        yield f"Not even {most} workers would be enough for this load."
    else:
        yield "More workers do not help: a request that is alone does not keep the limits either."


def told(tried: Tried) -> str:
    good, misses = tried.goodput, tried.misses
    return f"{good:.2f} good requests/s ({misses.good:.0%} of all)"


def times(gain: float) -> str:
    return "infinitely" if math.isinf(gain) else f"{gain:.0%}"


def _ms(tried: Tried, metric: str, part: str) -> str:
    spread = tried.point[metric]
    return f"{spread[part]:.0f} ms" if isinstance(spread, dict) else "none"


def table(plan: Plan) -> Table:
    """The arrangements, each with its best chunk size."""
    heads = ("", "chunk", "goodput/s", "good", "TTFT p50", "p90", "ITL p50", "p99", "tok/s")
    found = Table(*heads, box=SIMPLE, padding=(0, 1, 0, 0))
    for tried in plan.each[:_SHOWN]:
        cells = [
            str(tried.candidate.chunk),
            f"{tried.goodput:.2f}",
            f"{tried.misses.good:.0%}",
            *(_ms(tried, "ttft_ms", part) for part in ("p50", "p90")),
            *(_ms(tried, "itl_ms", part) for part in ("p50", "p99")),
            f"{tried.point['output_tok_per_s']:.0f}",
        ]
        found.add_row(tried.candidate.name, *cells)
    return found


def json_of(plan: Plan) -> Json:
    """For `--json`."""
    return {
        "chosen": plan.chosen.point,
        "best": plan.best.point,
        "runner_up": plan.runner_up.point,
        "route": plan.route.point,
        "best_apart": plan.apart.point,
        "margin": None if math.isinf(plan.margin) else plan.margin,
        "disaggregate": plan.is_apart_better,
        "meets_limits": plan.best.is_enough,
        "enough": plan.needed.point if plan.needed else None,
        "verdict": verdict(plan),
        "wanted": _wanted(plan.wanted),
        "candidates": [one.point for one in plan.tried],
    }


def _wanted(wanted: Wanted) -> Json:
    rate = wanted.arrivals.rate
    return {
        "input_len": wanted.input,
        "output_len": wanted.output,
        "rate": None if math.isinf(rate) else rate,
        "concurrency": wanted.arrivals.concurrency,
        "workers": wanted.workers,
        "requests": wanted.requests,
        "seed": wanted.seed,
    }
