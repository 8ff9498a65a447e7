"""What the person in front of `pdrt up` sees: a bar a worker, the ready line, a live status.

On anything but a terminal the same is told in plain lines, once per stage, without bars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from pdrt.up.layout import Part

_SPEED: Final = re.compile(r"\d{1,9}(\.\d{1,9})?")


@dataclass(frozen=True, slots=True)
class Loaded:
    """How far a worker is with getting ready."""

    worker: str
    stage: str
    done: int
    total: int


def read_loaded(status: Mapping[str, object]) -> list[Loaded]:
    """The workers that still load, from what a leader says of itself; never raises."""
    workers = status.get("workers")
    if not isinstance(workers, list):
        return []
    return [each for worker in workers if (each := _one_loaded(worker)) is not None]


def _one_loaded(worker: object) -> Loaded | None:
    match worker:
        case {"state": "ready"}:
            return None
        case {"rank": str(rank), "loading": [str(stage), int(done), int(total)]}:
            return Loaded(rank, stage, done, total)
        case {"rank": str(rank), "state": str(state)}:
            return Loaded(rank, state, 0, 0)
        case _:
            return None


def read_ways(status: Mapping[str, object]) -> list[str]:
    """What carries KV to a leader's workers, as it says: "tcp, 2.4 GB/s"; never raises."""
    workers = status.get("workers")
    told = [
        ways
        for worker in (workers if isinstance(workers, list) else ())
        if isinstance(worker, Mapping) and isinstance(ways := worker.get("transports"), Mapping)
    ]
    return [way for ways in told for way in ways.values() if isinstance(way, str)]


def ways_in_short(ways: Iterable[str]) -> str:
    """Each transport once, with its slowest and fastest pair: "tcp, 2.1 to 2.4 GB/s"."""
    speeds: dict[str, list[str]] = {}
    for way in ways:
        name, _, speed = way.partition(", ")
        speeds.setdefault(name, []).append(speed.removesuffix(" GB/s"))
    return "; ".join(f"{name}{_range(speeds[name])}" for name in sorted(speeds))


def _range(speeds: Iterable[str]) -> str:
    numbers = sorted({speed for speed in speeds if _SPEED.fullmatch(speed)}, key=float)
    return f", {' to '.join(dict.fromkeys((numbers[0], numbers[-1])))} GB/s" if numbers else ""


def readable(line: str) -> str:
    """A log line as a person reads it: the event, then what belongs to it."""
    try:
        told = json.loads(line)
        event = str(told.pop("event"))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return line
    rest = (f"{k}={v}" for k, v in told.items() if k not in ("timestamp", "level", "process"))
    return " ".join([f"{told.get('level', '')}: {event}".removeprefix(": "), *rest])


def status_line(statuses: Mapping[str, Mapping[str, object] | None]) -> str:
    """One line for all leaders, from what each said of itself (None: it did not answer)."""
    return "   ".join(f"{name}: {_one_status(told)}" for name, told in statuses.items())


def _one_status(told: Mapping[str, object] | None) -> str:
    if told is None:
        return "no answer"
    load = told.get("load")
    if told.get("state") != "ready" or not isinstance(load, Mapping):
        return str(told.get("state", "?"))
    kv = f"kv {load.get('blocks_used', '?')}/{load.get('blocks_total', '?')}"
    return f"{load.get('running', '?')} running, {load.get('waiting', '?')} waiting, {kv}"


class Screen:
    """Used as a context manager: what is drawn live is taken down on the way out."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._bars: dict[tuple[str, str], TaskID] = {}
        self._stages: dict[tuple[str, str], str] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.rest()

    def rest(self) -> None:
        """Draw nothing live from now on; the terminal may be another program's."""
        if self._console.is_terminal:  # else it would print an empty line
            self._progress.stop()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def starting(self, part: Part) -> None:
        self._move(part.name, "", "starting", None)

    def loading(self, part: Part, loaded: Loaded) -> None:
        worker = loaded.worker if part.workers > 1 else ""
        self._move(part.name, worker, loaded.stage, (loaded.done, loaded.total))

    def is_ready(self, part: Part) -> None:
        for name, worker in [bar for bar in self._bars if bar[0] == part.name]:
            self._move(name, worker, "ready", (1, 1))

    def _move(self, name: str, worker: str, stage: str, how_far: tuple[int, int] | None) -> None:
        bar = (name, worker)
        if worker and (whole := self._bars.pop((name, ""), None)) is not None:
            self._progress.remove_task(whole)
        if bar not in self._bars:
            shown = f"{name} ({worker})" if worker else name
            self._bars[bar] = self._progress.add_task(shown, total=None, stage=stage)
        done, total = how_far or (0, 0)
        self._progress.update(self._bars[bar], stage=stage, completed=done, total=total or None)
        if self._stages.get(bar) != stage and not self._console.is_terminal:
            self.say(f"{name} {worker}".strip() + f": {stage}")
        self._stages[bar] = stage

    def say(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)

    def problem(self, line: str, details: Sequence[str] = ()) -> None:
        self.say(line, "bold red")
        for detail in details:
            self.say(f"    {detail}", "dim")

    def status(self, line: str) -> None:
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(Text(line, style="dim"))  # of many nodes it takes several lines
