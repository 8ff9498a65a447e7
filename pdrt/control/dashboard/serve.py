"""Two paths of the router: `/`, the page, and `/overview`, what it draws."""

from __future__ import annotations

from typing import Final

from pdrt import __version__
from pdrt.control.dashboard.page import CONTENT_TYPE, load
from pdrt.control.flow import SECONDS
from pdrt.control.front import Router
from pdrt.control.overview import Facts
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.errors import BadRequest

_FRESH: Final = (("cache-control", "no-store"),)


class Dashboard:
    def __init__(self, router: Router) -> None:
        self._router = router
        page = load()
        self._page = Reply(200, page.body, CONTENT_TYPE, page.headers)

    def add_routes(self) -> None:
        self._router.routes.add("GET", "/", self.page)
        self._router.routes.add("GET", "/overview", self.overview)

    async def page(self, _request: Request) -> Reply:
        return self._page

    async def overview(self, request: Request) -> Reply:
        """`?seconds=N`: only the last N of the series."""
        router, asked = self._router, request.asked("seconds")
        if asked and not (asked.isascii() and asked.isdigit() and 1 <= int(asked) <= SECONDS):
            raise BadRequest(f"seconds: {asked[:40]!r} is no whole number from 1 to {SECONDS}")
        screen, fleet = router.screen, router.fleet
        body = screen.overview(
            self._facts(),
            fleet.instances,
            fleet.pairs,
            screen.running(router.relays),
            int(asked) if asked else SECONDS,
        )
        return Reply.json(body, headers=_FRESH)

    def _facts(self) -> Facts:
        router = self._router
        return Facts(
            pdrt=__version__,
            now=round(router.clocks.wall(), 3),
            started_at=round(router.screen.started_at, 3),
            is_ready=router.fleet.is_ready and not router.draining,
            reason="draining" if router.draining else router.fleet.why_not_ready(),
            is_draining=router.draining,
            in_flight=router.admitted,
            max_in_flight=router.config.policy.max_in_flight,
            is_plain=router.key is None,
        )
