"""The router's admin listener: members, requests, draining and the log's level, on its own port.

Every path needs the cluster's bearer token. It is served apart from clients' requests, so that a
firewall can keep it inside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdrt.config import Role, Target
from pdrt.control.door import Door
from pdrt.control.front import Router
from pdrt.control.http import Json
from pdrt.control.leases import Registration
from pdrt.control.wire.exchange import Exchange
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.control.wire.routes import Routes
from pdrt.errors import BadRequest, NotFound, PdrtError, Unauthorized
from pdrt.keys import ClusterKey
from pdrt.telemetry import LogLevel

STAGE: Final = "admin"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NewMember(_Strict):
    """Who is to join (POST /admin/members)."""

    role: Role
    http: Annotated[str, Field(min_length=3, max_length=300)]
    bootstrap: Annotated[str, Field(max_length=300)] = ""
    model: Annotated[str, Field(max_length=300)] = ""


class NewLevel(_Strict):
    level: Literal["debug", "info", "warning", "error"]


M = TypeVar("M", bound=BaseModel)


class Admin:
    """A site of its own; see wire.connection.Site."""

    def __init__(
        self, router: Router, door: Door, key: ClusterKey, level: LogLevel | None = None
    ) -> None:
        self._router, self._door, self._key = router, door, key
        self._level = level or LogLevel()
        self.routes = Routes()
        for method, path, handler in self._table():
            self.routes.add(method, path, handler)

    def _table(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Reply]]]]:
        return [
            ("GET", "/admin/members", self.members),
            ("POST", "/admin/members", self.join),
            ("DELETE", "/admin/members/{name}", self.leave),
            ("POST", "/admin/members/{name}/drain", self.drain_member),
            ("POST", "/admin/members/{name}/undrain", self.undrain_member),
            ("POST", "/admin/drain", self.drain),
            ("GET", "/admin/requests", self.requests),
            ("GET", "/admin/requests/{id}", self.request),
            ("GET", "/admin/log-level", self.level),
            ("POST", "/admin/log-level", self.set_level),
            ("POST", "/internal/register", self.register),
        ]

    # Around every request.

    def begun(self, exchange: Exchange) -> PdrtError | Reply | None:
        if self._key.is_bearer(exchange.request.header("authorization")):
            return None
        return Unauthorized("the cluster's bearer token is missing or wrong")

    def over(self, exchange: Exchange) -> None: ...

    def head_lines(self, _request: Request) -> bytes:
        return b""

    def stopped_reading(self, exchange: Exchange) -> None: ...

    # Members.

    async def members(self, _request: Request) -> Reply:
        return Reply.json({"members": self._door.members()})

    async def join(self, request: Request) -> Reply:
        """In until it is told to leave, or this router ends."""
        wanted = _read(NewMember, request.json())
        target = Target(http=wanted.http, bootstrap=wanted.bootstrap, model=wanted.model)
        return Reply.json({"member": self._door.join(wanted.role, target)}, 201)

    async def leave(self, request: Request) -> Reply:
        return Reply.json({"left": self._door.leave(request.params["name"])})

    async def drain_member(self, request: Request) -> Reply:
        return self._set_drained(request, True)

    async def undrain_member(self, request: Request) -> Reply:
        return self._set_drained(request, False)

    def _set_drained(self, request: Request, is_drained: bool) -> Reply:
        told = self._door.set_drained(request.params["name"], is_drained)
        return Reply.json({"member": told})

    async def register(self, request: Request) -> Reply:
        said = _read(Registration, request.json())
        return Reply.json({"status": "ok", "lease_s": self._door.register(said)})

    # The router.

    async def drain(self, _request: Request) -> Reply:
        """Like SIGTERM."""
        self._router.ask_to_drain()
        return Reply.json({"status": "draining", "in_flight": self._router.admitted})

    async def requests(self, _request: Request) -> Reply:
        return Reply.json({"requests": self._router.ledger.lines(self._router.clocks.clock())})

    async def request(self, request: Request) -> Reply:
        named = request.params["id"]
        found = self._router.ledger.find(named, self._router.clocks.clock())
        if found is None:
            raise NotFound(f"no request {named[:200]!r} runs or was among the last ones here")
        return Reply.json(found)

    async def level(self, _request: Request) -> Reply:
        return Reply.json({"level": self._level.name})

    async def set_level(self, request: Request) -> Reply:
        self._level.name = _read(NewLevel, request.json()).level
        return Reply.json({"level": self._level.name})


def _read(kind: type[M], body: Json) -> M:
    """Raises BadRequest that names the field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        told = error.errors(include_url=False, include_context=False, include_input=False)
        lines = (f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in told[:5])
        raise BadRequest("; ".join(lines)) from None
