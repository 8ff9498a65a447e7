"""A client's request as plain data: its head, and its body once that is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import parse_qs, unquote

from pdrt.control.http import Json, good_request_id, new_request_id, parse_object

Headers: TypeAlias = dict[bytes, bytes]  # lower-case names; repeated ones joined with commas


@dataclass(slots=True)
class Request:
    """What handlers are given; `params` are the `{names}` of the route's path."""

    method: str
    path: str
    query: str
    headers: Headers
    is_1_1: bool
    keeps_alive: bool
    body: bytes = b""
    params: dict[str, str] = field(default_factory=dict)
    mint: Callable[[], str] = new_request_id
    _id: str = ""

    @property
    def id(self) -> str:
        """The client's own x-request-id when it is a fit one, else minted, once."""
        if not self._id:
            said = self.headers.get(b"x-request-id")
            good = good_request_id(said.decode("latin-1")) if said else None
            self._id = good or self.mint()
        return self._id

    @id.setter
    def id(self, known: str) -> None:
        self._id = known

    def header(self, name: str) -> str:
        """The header's value, or nothing."""
        found = self.headers.get(name.encode())
        return found.decode("latin-1") if found else ""

    def json(self) -> Json:
        """The body's JSON object. Raises BadRequest."""
        return parse_object(self.body, is_clients=True)

    def asked(self, name: str) -> str:
        """The first value of a name in the query, or nothing."""
        return next(iter(parse_qs(self.query, keep_blank_values=True).get(name, ())), "")


def split_target(target: bytes) -> tuple[str, str]:
    """(path, query) of a request line's target, also where it is a whole URL."""
    text = target.decode("latin-1")
    if not text.startswith("/") and "://" in text:
        text = "/" + text.partition("://")[2].partition("/")[2]
    path, _, query = text.partition("?")
    return (unquote(path) if "%" in path else path), query
