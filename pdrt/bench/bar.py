"""How far a load is: a bar that is drawn at times, between two requests.

A thread that draws would be measured too.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REDRAW_S: Final = 0.5
_COLUMNS: Final = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


class Bar:
    """Of requests. Used once, as a context."""

    def __init__(self, is_quiet: bool, total: int, first: str) -> None:
        err = Console(stderr=True, highlight=False)
        self._bar = Progress(*_COLUMNS, console=err, auto_refresh=False, disable=is_quiet)
        self._task = self._bar.add_task(first, total=total)
        self._drawn_at = 0.0

    def step(self, whose: str) -> None:
        """A request is over."""
        now = time.monotonic()
        self._bar.update(self._task, description=whose, advance=1)
        if now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._bar.refresh()

    def say(self, stage: str, skipped: int = 0) -> None:
        """Something that takes its time; requests that need not be sent any more."""
        self._bar.update(self._task, description=stage, advance=skipped, refresh=True)

    def tell(self, problem: str) -> None:
        """A line above the bar."""
        self._bar.console.print(problem, style="red", soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.say("measured")
        self._bar.stop()
