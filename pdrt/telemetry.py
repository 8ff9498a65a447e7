"""Logs as structlog events: JSON lines, or colours on a terminal; never inside the token path."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import structlog

TOGETHER_S: Final = 0.1
_TEXT: Final = json.encoder.encode_basestring_ascii
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Lines:
    """Log lines of what happens thousands of times a second: as JSON, and written together.

    They look as the others do, and come a moment later. `alarm` rings when they are due.
    """

    def __init__(
        self,
        stream: TextIO,
        alarm: Callable[[float, Callable[[], None]], object],
        wall: Callable[[], float] = time.time,
        **always: str,
    ) -> None:
        self._stream, self._alarm = stream, alarm
        self._tail = json.dumps(always)[1:-1].replace("%", "%%")
        self._shapes: dict[tuple[str, ...], str] = {}  # what stands between values, made once
        self._waiting: list[str] = []
        self._wall, self._second, self._date = wall, 0, ""

    def info(self, event: str, fields: Mapping[str, object]) -> None:
        if not self._waiting:
            self._alarm(TOGETHER_S, self.flush)
        shape = self._shapes.get((event, *fields)) or self._shape(event, fields)
        now = self._wall()
        second = int(now)
        if second != self._second:
            self._second = second
            self._date = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        said = [
            _TEXT(each) if isinstance(each, str) else "null" if each is None else each
            for each in fields.values()
        ]
        self._waiting.append(shape % (*said, self._date, (now - second) * 1e6))

    def _shape(self, event: str, names: Iterable[str]) -> str:
        told = "".join(f'"{name}": %s, ' for name in names)
        end = f'"event": "{event}", {self._tail}, "level": "info", "timestamp": "%s.%06dZ"'
        shape = self._shapes[event, *names] = f"{{{told}{end}}}\n"
        return shape

    def flush(self) -> None:
        lines, self._waiting = self._waiting, []
        self._stream.write("".join(lines))
        self._stream.flush()


def is_console(form: str) -> bool:
    return form == "console" or (form == "auto" and sys.stderr.isatty())


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
    renderer: Callable[..., str | bytes] = (
        structlog.dev.ConsoleRenderer() if is_console(form) else structlog.processors.JSONRenderer()
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
