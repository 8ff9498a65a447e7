"""A picture of `pdrt bench serve`: how latencies are spread, a panel each, a line a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pdrt.bench.summary import Turn

_MOST_POINTS: Final = 2000


def draw(file: str, turns: Mapping[str, Turn]) -> None:
    """Write the picture; its kind is the file's suffix."""
    from matplotlib.figure import Figure  # no window system, no global state

    figure = Figure(figsize=(14.4, 4.8), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for name, turn in turns.items():
        firsts = [told.ttft_s for told in turn.answers if told.ttft_s is not None]
        gaps = [gap for told in turn.answers for gap in told.gaps_s]
        whole = [told.e2e_s for told in turn.answers]
        for axis, seconds in zip(axes, (firsts, gaps, whole), strict=True):
            axis.step(*shares(seconds), where="post", label=name)
    titles = ("first token (TTFT)", "between tokens (ITL)", "whole answer (E2E)")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.set_xlabel("ms")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_xlim(left=0)
    axes[1].set_xscale("log")
    axes[2].set_xlim(left=0)
    axes[0].set_ylabel("share of all that took no longer")
    axes[0].legend()
    figure.savefig(file)


def shares(seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Milliseconds, and the share of all that are no longer: as many points as can be seen."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    every = max(1, len(ordered) // _MOST_POINTS)
    places = [place for place in range(len(ordered)) if place % every == 0 or place == last]
    return [ordered[p] * 1000 for p in places], [(p + 1) / len(ordered) for p in places]
