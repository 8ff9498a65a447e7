"""Numbers, times, bars and small curves as text of a fixed width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
NOTHING: Final = "-"


def number(value: float | None) -> str:
    """Three or four figures, however large."""
    if value is None:
        return NOTHING
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 100 else f"{scaled:.1f}{unit}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def milliseconds(ms: float | None) -> str:
    if ms is None:
        return NOTHING
    if ms >= 1000:
        return f"{ms / 1000:.2f} s" if ms < 10000 else f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def speed(gb_per_s: float | None) -> str:
    if gb_per_s is None:
        return NOTHING
    if gb_per_s >= 1 or gb_per_s == 0:
        return f"{number(gb_per_s)} GB/s"
    if gb_per_s >= 1e-3:
        return f"{number(gb_per_s * 1e3)} MB/s"
    return f"{number(gb_per_s * 1e6)} kB/s"


def span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds // 86400:.0f} days"


def bar(used: int, total: int, width: int) -> str:
    """`width` characters and the percentage."""
    share = min(max(used / total, 0.0), 1.0) if total > 0 else 0.0
    full = round(share * width)
    return "█" * full + "░" * (width - full) + f" {share:4.0%}"


def curve(values: Sequence[float | None], width: int) -> str:
    """The last values as a line of blocks, the newest at the right; a gap where there was none."""
    few = list(values)[-width:]
    top = max((value for value in few if value is not None), default=0.0)
    drawn = "".join(" " if value is None else _block(value, top) for value in few)
    return drawn.rjust(width)


def _block(value: float, top: float) -> str:
    if top <= 0 or value <= 0:
        return _BLOCKS[0]
    return _BLOCKS[min(int(value / top * len(_BLOCKS)), len(_BLOCKS) - 1)]
