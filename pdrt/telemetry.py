"""Logs as structlog events: JSON lines, or colours on a terminal; never inside the token path."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, TextIO

import structlog

TOGETHER_S: Final = 0.1
_ENCODE: Final = json.JSONEncoder().encode
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Lines:
    """Log lines of what happens thousands of times a second: as JSON, and written together.

    They look as the others do, and come a moment later. `alarm` rings when they are due.
    """

    def __init__(
        self, stream: TextIO, alarm: Callable[[float, Callable[[], None]], object], **always: str
    ) -> None:
        self._stream, self._alarm = stream, alarm
        self._tail = json.dumps(always)[1:-1]
        self._waiting: list[str] = []

    def info(self, event: str, fields: Mapping[str, object]) -> None:
        if not self._waiting:
            self._alarm(TOGETHER_S, self.flush)
        stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._waiting.append(
            f'{_ENCODE(fields)[:-1]}, "event": "{event}", {self._tail}, '
            f'"level": "info", "timestamp": "{stamp}"}}\n'
        )

    def flush(self) -> None:
        lines, self._waiting = self._waiting, []
        self._stream.write("".join(lines))
        self._stream.flush()


def is_console(form: str) -> bool:
    return form == "console" or (form == "auto" and sys.stderr.isatty())


def configure(level: str = "info", form: str = "auto", **always: str | int) -> None:
    """Set up this process's log on stderr; `always` stands in each line (process, rank)."""
    renderer: Callable[..., str | bytes] = (
        structlog.dev.ConsoleRenderer() if is_console(form) else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**always)
    # Libraries log through the standard module; what is below a warning there is not ours to tell.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
