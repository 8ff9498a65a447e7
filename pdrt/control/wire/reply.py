"""A whole answer as plain data, and how heads are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pdrt.control.http import RETRY_AFTER_S, Json, error_body
from pdrt.errors import PdrtError

Fields: TypeAlias = Sequence[tuple[str, str]]

JSON_TYPE: Final = "application/json"
STATUS_LINES: Final[Mapping[int, bytes]] = {
    each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus
}


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` are those beside content-type, content-length and what every answer has."""

    status: int = 200
    body: bytes = b""
    content_type: str = JSON_TYPE
    headers: Fields = ()

    @staticmethod
    def json(found: object, status: int = 200, headers: Fields = ()) -> Reply:
        return Reply(status, json.dumps(found).encode(), JSON_TYPE, headers)

    @staticmethod
    def text(text: str, content_type: str = "text/plain; charset=utf-8") -> Reply:
        return Reply(200, text.encode(), content_type)

    @staticmethod
    def metrics(registry: CollectorRegistry) -> Reply:
        return Reply(200, generate_latest(registry), CONTENT_TYPE_LATEST)

    @staticmethod
    def error(error: PdrtError, request_id: str, stage: str, status: int = 0) -> Reply:
        """`status` when it is not the error's own."""
        after = error.retry_after or RETRY_AFTER_S
        headers = (("retry-after", str(after)),) if error.status in (429, 503) else ()
        told: Json = error_body(error, request_id, stage)
        return Reply.json(told, status or error.status, headers)


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def lines(fields: Iterable[tuple[str, str]]) -> bytes:
    """Header lines; a value that would begin another line is cut there."""
    return "".join(
        f"{name}: {value.partition(chr(13))[0].partition(chr(10))[0]}\r\n" for name, value in fields
    ).encode("latin-1", "replace")
