"""Logs as structlog events: JSON lines, or colours on a terminal; never inside the token path."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Final

import structlog

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(level: str = "info", form: str = "auto", **always: str | int) -> None:
    """Set up this process's log on stderr; `always` stands in each line (process, rank)."""
    as_console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: Callable[..., str | bytes] = (
        structlog.dev.ConsoleRenderer() if as_console else structlog.processors.JSONRenderer()
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
