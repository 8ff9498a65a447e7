"""A picture of a plan: goodput over the ratio of prefill to decode, beside what keeps together."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Final

from pdrt.errors import ConfigError
from pdrt.sim.plan import Plan

_SIZE: Final = (7.0, 4.2)  # inches
PICTURES: Final = (".png", ".svg", ".pdf")


def check_plot(file: str) -> None:
    """Before anything is simulated. Raises ConfigError."""
    if Path(file).suffix not in PICTURES:
        raise ConfigError(f"--plot {file}: want a name that ends in {', '.join(PICTURES)}")
    if not Path(file).resolve().parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no directory {Path(file).parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'pdrt[plot]'")


def draw(plan: Plan, file: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    apart = sorted(
        (one for one in plan.each if one.candidate.arrangement.is_apart),
        key=lambda one: one.candidate.arrangement.prefills,
    )
    places = range(len(apart))
    axes.plot(places, [one.goodput for one in apart], "o-", label="apart")
    axes.set_xticks(places, [one.candidate.name for one in apart])
    styles = iter(("-", "--", ":"))
    for one in plan.each:
        if not one.candidate.arrangement.is_apart:
            label = f"{one.candidate.name}, chunk {one.candidate.chunk}"
            axes.axhline(one.goodput, color="gray", linestyle=next(styles), label=label)
    rate = plan.wanted.arrivals.rate
    if not math.isinf(rate):
        axes.axhline(rate, color="tab:green", linewidth=0.8, label="what is asked for")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("good requests/s")
    axes.set_xlabel("prefill and decode instances")
    good = plan.wanted.good
    axes.set_title(
        f"input {plan.wanted.input}, output {plan.wanted.output}; TTFT {good.ttft_s * 1e3:g} ms,"
        f" ITL {good.itl_s * 1e3:g} ms",
        fontsize="medium",
    )
    axes.legend(fontsize="small")
    figure.savefig(file)
