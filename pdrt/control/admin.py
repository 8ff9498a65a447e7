"""The router's admin listener: members, requests, draining and the log's level, on its own port.

Every path needs the cluster's bearer token. It is served apart from clients' requests, so that a
firewall can keep it inside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Final, Literal

from pydantic import Field

from pdrt.config import Role, Target
from pdrt.control.front import Router
from pdrt.control.leases import Registration
from pdrt.control.roster import Roster
from pdrt.control.schema import checked
from pdrt.control.strict import Strict
from pdrt.control.wire.exchange import Exchange
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.control.wire.routes import Routes
from pdrt.errors import NotFound, PdrtError, Unauthorized
from pdrt.keys import ClusterKey
from pdrt.telemetry import LogLevel

STAGE: Final = "admin"


class NewMember(Strict):
    """Who is to join (POST /admin/members)."""

    role: Role
    http: Annotated[str, Field(min_length=3, max_length=300)]
    bootstrap: Annotated[str, Field(max_length=300)] = ""
    model: Annotated[str, Field(max_length=300)] = ""


class NewLevel(Strict):
    level: Literal["debug", "info", "warning", "error"]


class Admin:
    """A site of its own; see wire.connection.Site."""

    def __init__(
        self, router: Router, roster: Roster, key: ClusterKey, level: LogLevel | None = None
    ) -> None:
        self._router, self._roster, self._key = router, roster, key
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
            ("GET", "/admin/requests/{id*}", self.request),
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
        return Reply.json({"members": self._roster.members()})

    async def join(self, request: Request) -> Reply:
        """In until it is told to leave, or this router ends."""
        wanted = checked(NewMember, request.json())
        target = Target(http=wanted.http, bootstrap=wanted.bootstrap, model=wanted.model)
        return Reply.json({"member": self._roster.join(wanted.role, target)}, 201)

    async def leave(self, request: Request) -> Reply:
        return Reply.json({"left": self._roster.leave(request.params["name"])})

    async def drain_member(self, request: Request) -> Reply:
        return self._set_drained(request, True)

    async def undrain_member(self, request: Request) -> Reply:
        return self._set_drained(request, False)

    def _set_drained(self, request: Request, is_drained: bool) -> Reply:
        told = self._roster.set_drained(request.params["name"], is_drained)
        return Reply.json({"member": told})

    async def register(self, request: Request) -> Reply:
        said = checked(Registration, request.json())
        return Reply.json({"status": "ok", "lease_s": self._roster.register(said)})

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
        self._level.name = checked(NewLevel, request.json()).level
        return Reply.json({"level": self._level.name})
