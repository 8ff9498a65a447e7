"""A picture of `pdrt bench interference`: gaps between tokens, beside what first tokens cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdrt.bench.serve_plot import shares
from pdrt.bench.summary import Spread
from pdrt.bench.traffic import Seen

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(file: str, seen: Mapping[str, Seen]) -> None:
    """Write the picture; its kind is the file's suffix."""
    from matplotlib.figure import Figure  # no window system, no global state

    figure = Figure(figsize=(12.8, 4.8), layout="constrained")
    gaps, firsts = figure.subplots(1, 2)
    for name, one in seen.items():
        ms, share = shares(one.gaps_s)
        gaps.step(ms, [max(1 - each, 1e-6) for each in share], where="post", label=name)
    gaps.set_title("between tokens of the streams (ITL)")
    gaps.set_xscale("log")
    gaps.set_yscale("log")
    gaps.set_ylim(1e-4, 1)
    gaps.axhline(0.01, color="grey", linestyle=":", label="p99")
    gaps.set_xlabel("ms")
    gaps.set_ylabel("share of gaps that are longer")
    gaps.legend(fontsize="small")
    gaps.grid(visible=True, which="major", alpha=0.3)
    _bars(firsts, seen)
    figure.savefig(file)


def _bars(axis: Axes, seen: Mapping[str, Seen]) -> None:
    kinds = (
        ("long prompts", [Spread.of(one.prompt_ttft_s) for one in seen.values()]),
        ("decode streams", [Spread.of(one.stream_ttft_s) for one in seen.values()]),
    )
    for place, (title, spreads) in enumerate(kinds):
        at = [number + place * 0.4 for number in range(len(seen))]
        axis.barh(at, [s.p50 if s else 0 for s in spreads], height=0.38, label=f"{title}, p50")
    axis.set_yticks([number + 0.2 for number in range(len(seen))], list(seen))
    axis.invert_yaxis()
    axis.set_title("to the first token (TTFT)")
    axis.set_xlabel("ms")
    axis.legend(fontsize="small")
    axis.grid(visible=True, axis="x", alpha=0.3)
