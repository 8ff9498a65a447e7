"""One picture of a cluster for a terminal, from an overview: pure, and never taller than asked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdrt.top.view import ErrorView, InstanceView, RequestView, View
from pdrt.top.words import NOTHING, bar, curve, milliseconds, number, span, speed

_CURVE: Final = 30  # seconds
_KV: Final = 10
_FULL: Final = 0.9
_WIDE: Final = 132  # columns
_HEAD: Final = 9  # lines above the tables
_BETWEEN: Final = 3  # an empty line, a title, a heading
_MOST_ERRORS: Final = 5
_PROSE: Final = ("reason", "message")

# By condition: a mark, a style and words, so that colour alone says nothing.
CONDITIONS: Final = {
    "down": ("x", "bold red", "down"),
    "failing": ("=", "yellow", "paused after faults"),
    "suspect": ("!", "yellow", "not answering"),
    "unknown": ("?", "dim", "not reached yet"),
    "starting": ("…", "blue", "starting"),
    "draining": ("v", "dim", "draining"),
    "ready": ("●", "green", "ready"),
}
_ORDER: Final = {name: place for place, name in enumerate(CONDITIONS)}
_STAGES: Final = {
    "prefill": "▰▱▱ prefill",
    "retry": "▰▱▱ prefill again, elsewhere",
    "transfer": "▰▰▱ KV is moving",
    "decode": "▰▰▰ decode",
    "move": "▰▰▰ going on elsewhere",
    "ended": "▰▰▰ ending",
}
NO_INSTANCE: Final = "No instance is known to this router yet: `pdrt up` starts a cluster here."
NO_REQUEST: Final = "Nothing is running just now."
NO_ERROR: Final = "No client has been told of an error."


@dataclass(frozen=True, slots=True)
class Room:
    """How many rows each table may have; `is_narrow`: only the columns that matter most."""

    instances: int
    requests: int
    errors: int
    is_narrow: bool = False


ALL: Final = Room(1000, 1000, 1000)


def room_for(view: View, width: int, height: int) -> Room:
    """Shares the lines of a terminal: instances first, then errors, requests take the rest."""
    lines = max(height - _HEAD - 3 * _BETWEEN - 1, 3)
    errors = min(len(view.errors) or 1, _MOST_ERRORS, max(1, lines // 4))
    wanted = max(1, len(view.instances))
    instances = min(wanted, max(1, (lines - errors) * 2 // 3))
    requests = max(1, lines - errors - instances)
    return Room(instances, requests, errors, width < _WIDE)


def frame(view: View, url: str, room: Room, trouble: str = "") -> RenderableType:
    """`trouble` is why it is old."""
    parts: list[RenderableType] = [_head(view, url)]
    if trouble:
        parts.append(Text(trouble, style="bold red", no_wrap=True, overflow="ellipsis"))
    elif not view.router.is_ready:
        reason = f"not ready: {view.router.reason}"
        parts.append(Text(reason, style="yellow", no_wrap=True, overflow="ellipsis"))
    else:
        parts.append(Text(""))
    parts += [
        _figures(view),
        *_instances(view.instances, room),
        *_requests(view.requests, view.requests_total, room),
        *_errors(view.errors, room),
    ]
    return Group(*parts)


def _head(view: View, url: str) -> Text:
    router = view.router
    words, style = ("ready", "green") if router.is_ready else ("not ready", "bold red")
    if router.is_draining:
        words, style = "draining", "dim"
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append("pdrt ", "bold").append(f"{url}  ").append(words, style)
    models = ", ".join(view.models) or "no model yet"
    up = span(max(0.0, router.now - router.started_at))
    head.append(f"  {models}  {router.in_flight} of {router.max_in_flight} in flight  up {up}")
    return head


def _figures(view: View) -> Table:
    series, minute = view.series, view.series.last_minute
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for style in ("dim", "", "bold", ""):
        table.add_column(style=style, no_wrap=True)
    rows = (
        ("requests / s", series.requests_per_s, _now(series.requests_per_s, 5), _failing(view)),
        ("tokens / s", series.tokens_per_s, _now(series.tokens_per_s, 1), ""),
        ("KV moved", series.sent_gb_per_s, _moved(series.sent_gb_per_s), ""),
        ("TTFT p50", series.ttft_ms.p50, *_shares(minute.ttft_ms.p50, minute.ttft_ms.p99)),
        ("ITL p50", series.itl_ms.p50, *_shares(minute.itl_ms.p50, minute.itl_ms.p99)),
    )
    for title, column, value, more in rows:
        table.add_row(title, curve(column, _CURVE), value, more)
    return table


def _now(column: Sequence[float | None], seconds: int) -> str:
    few = [value or 0.0 for value in column[-seconds:]]
    return number(sum(few) / len(few)) if few else NOTHING


def _moved(column: Sequence[float | None]) -> str:
    return speed(column[-1]) if column else NOTHING


def _shares(p50: float | None, p99: float | None) -> tuple[str, str]:
    return milliseconds(p50), f"p99 {milliseconds(p99)} (last minute)"


def _failing(view: View) -> str:
    return f"errors / s {_now(view.series.errors_per_s, 5)}"


class _Columns:
    """A table's columns; a title that begins with `>` heads numbers."""

    def __init__(self, room: Room, titles: Sequence[str], if_wide: Sequence[str]) -> None:
        self._is_shown = [not (room.is_narrow and title in if_wide) for title in titles]
        self.table = _table(title for title in titles if not (room.is_narrow and title in if_wide))

    def row(self, *cells: RenderableType) -> None:
        shown = zip(cells, self._is_shown, strict=True)
        self.table.add_row(*(cell for cell, is_shown in shown if is_shown))


def _table(titles: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(
            title.removeprefix(">"),
            justify="right" if title.startswith(">") else "left",
            no_wrap=title not in _PROSE,
            overflow="ellipsis",
        )
    return table


def _prose(text: str) -> Text:
    """Cut where there is no room, so that what stands beside it need not be."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _titled(title: str, shown: int, total: int, body: RenderableType) -> list[RenderableType]:
    count = f"{shown} of {total}" if shown < total else str(total)
    return [Text(""), Text.assemble((title, "bold"), (f"  {count}", "dim")), body]


_INSTANCE: Final = (
    "instance",
    "state",
    ">in flight",
    ">running",
    ">waiting",
    "KV blocks",
    ">tok/s",
    ">prompt tok/s",
    ">KV sent",
    ">retractions",
    "reason",
)


def _instances(instances: Sequence[InstanceView], room: Room) -> list[RenderableType]:
    if not instances:
        return _titled("Instances", 0, 0, Text(NO_INSTANCE, style="dim"))
    columns = _Columns(room, _INSTANCE, (">in flight", ">prompt tok/s", ">KV sent", ">retractions"))
    ordered = sorted(instances, key=lambda each: _ORDER.get(each.condition, 0))
    for each in ordered[: room.instances]:
        mark, style, words = CONDITIONS.get(each.condition, CONDITIONS["unknown"])
        columns.row(
            Text(each.name),
            Text(f"{mark} {words}", style=style),
            number(each.legs),
            number(each.running),
            number(each.waiting),
            _kv(each),
            number(each.tokens_per_s),
            number(each.prompt_tokens_per_s),
            speed(each.sent_gb_per_s),
            number(each.retractions),
            _prose(each.reason_alone),
        )
    shown = min(room.instances, len(instances))
    return _titled("Instances", shown, len(instances), columns.table)


def _kv(each: InstanceView) -> Text:
    kv = each.kv_blocks
    if kv is None or not kv.total:
        return Text(NOTHING)
    style = "yellow" if kv.used / kv.total >= _FULL else ""
    return Text(bar(kv.used, kv.total, _KV), style=style)


_REQUEST: Final = ("request", "stage", ">age", ">TTFT", ">pieces", ">retries", "prefill", "decode")


def _requests(requests: Sequence[RequestView], total: int, room: Room) -> list[RenderableType]:
    if not requests:
        return _titled("Running requests", 0, 0, Text(NO_REQUEST, style="dim"))
    columns = _Columns(room, _REQUEST, (">retries", "prefill", "decode"))
    for each in requests[: room.requests]:
        columns.row(
            Text(each.request_id),
            Text(_stage(each)),
            span(each.age_s),
            milliseconds(each.first_ms),
            number(each.pieces),
            number(each.tries),
            Text(_place(each.prefill or NOTHING)),
            Text(_place(each.decode)),
        )
    return _titled("Running requests", min(room.requests, len(requests)), total, columns.table)


def _stage(each: RequestView) -> str:
    return _STAGES.get(each.stage, each.stage)


def _place(name: str) -> str:
    """Without the role."""
    return name.partition(" ")[2] or name


def _errors(errors: Sequence[ErrorView], room: Room) -> list[RenderableType]:
    if not errors:
        return _titled("Last errors", 0, 0, Text(NO_ERROR, style="dim"))
    columns = _Columns(room, ("time", "code", ">status", "found by", "message"), ("found by",))
    for each in errors[: room.errors]:
        columns.row(
            time.strftime("%H:%M:%S", time.localtime(each.at)),
            Text(each.code),
            str(each.status),
            Text(each.stage),
            _prose(each.message),
        )
    return _titled("Last errors", min(room.errors, len(errors)), len(errors), columns.table)
