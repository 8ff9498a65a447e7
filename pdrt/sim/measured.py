"""Points that `pdrt bench sweep` has measured, as files hold them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pdrt.errors import ConfigError
from pdrt.sim.check import METRICS, Json

_NEEDED: Final = ("layout", "workers", "input_len", "output_len", "completed")


def read_points(place: Path) -> list[Json]:
    """Of a folder of points, a file of one, or a file with a list. Raises ConfigError."""
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    points = [point for file in files for point in _read(file)]
    if not points:
        raise ConfigError(f"{place}: there are no points of `pdrt bench sweep`")
    return sorted(medians(points), key=_place)


def _place(point: Json) -> tuple[Any, ...]:
    lengths = [str(point[key]).rjust(9) for key in ("input_len", "output_len")]  # 64 before 128
    return (point["workers"], *lengths, point["layout"])


def medians(points: Sequence[Json]) -> list[Json]:
    """Those that were measured several times become one: each figure is the median."""
    same: dict[tuple[Any, ...], list[Json]] = {}
    for point in points:
        same.setdefault(_place(point), []).append(point)
    return [those[0] if len(those) == 1 else _median(those) for those in same.values()]


def _median(those: Sequence[Json]) -> Json:
    told = dict(those[0])
    for metric in METRICS:
        values = [value for one in those if (value := metric.of(one)) is not None]
        table, _, part = metric.name.rpartition(".")
        if values and table:
            told[table] = {**told[table], part: statistics.median(values)}
        elif values:
            told[part] = statistics.median(values)
    return {**told, "times": len(those)}


def _read(file: Path) -> Iterator[Json]:
    try:
        told = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    for point in told if isinstance(told, list) else [told]:
        if not isinstance(point, dict) or any(key not in point for key in _NEEDED):
            raise ConfigError(f"{file}: a point of a sweep has {', '.join(_NEEDED)}")
        try:
            yield _checked(point)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from error


def _checked(point: Json) -> Json:
    """Raises ValueError and TypeError for what a sweep does not write."""
    if point.get("rate") and point.get("concurrency"):
        raise ValueError("a rate and a concurrency at once are not simulated")
    numbers = {key: int(point.get(key) or 0) for key in ("workers", "completed", "chunk")}
    for key, kind in (("rate", float), ("concurrency", int), ("seed", int)):
        kind(point.get(key) or 0)
    return {**point, **numbers}
