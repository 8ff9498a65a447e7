"""Logs as structlog events: JSON lines, or colours on a terminal; never inside the token path."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


@dataclass(slots=True)
class LogLevel:
    """A processor of structlog's: what is below `name`, which may change any time, is dropped."""

    name: str = "info"

    def __call__(
        self, _logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if _LEVELS.get(method, 40) < _LEVELS[self.name]:
            raise structlog.DropEvent
        return event


def configure(level: str = "info", form: str = "auto", **always: str | int) -> LogLevel:
    """Set up this process's log on stderr; `always` stands in each line (process, rank)."""
    threshold = LogLevel(level)
    as_console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: Callable[..., str | bytes] = (
        structlog.dev.ConsoleRenderer() if as_console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            threshold,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS["debug"]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**always)
    # Libraries log through the standard module; what is below a warning there is not ours to tell.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    return threshold
