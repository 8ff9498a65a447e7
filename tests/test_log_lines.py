"""Log lines that are made by hand read as those of the library."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from enum import StrEnum

from pdrt.telemetry import Lines


class Outcome(StrEnum):
    SERVED = "served"


def test_a_line_says_each_field_as_json_whatever_its_text_is() -> None:
    written, due = io.StringIO(), list[Callable[[], None]]()
    lines = Lines(written, lambda _delay, ring: due.append(ring), lambda: 1.25, process="100%")
    told: dict[str, object] = {"id": '5% "of"\n', "room": 1 << 62, "why": None, "ms": 0.1}
    lines.info("request", told | {"outcome": Outcome.SERVED})
    lines.info("request", told | {"outcome": "50%s"})
    assert not written.getvalue()
    assert len(due) == 1
    due[0]()
    first, second = map(json.loads, written.getvalue().splitlines())
    always = {"event": "request", "process": "100%", "level": "info"}
    stamp = {"timestamp": "1970-01-01T00:00:01.250000Z"}
    assert first == told | {"outcome": "served"} | always | stamp
    assert second == told | {"outcome": "50%s"} | always | stamp
