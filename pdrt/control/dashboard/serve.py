"""Two paths of the router: `/`, the page, and `/overview`, what it draws.

The promise: however many look on, the router makes an overview twice a second at most.
"""

from __future__ import annotations

import re
from typing import Final

from pdrt import __version__
from pdrt.control.dashboard.page import CONTENT_TYPE, load
from pdrt.control.flow import SECONDS
from pdrt.control.front import Router
from pdrt.control.http import Json
from pdrt.control.overview import Facts
from pdrt.control.wire.reply import Reply
from pdrt.control.wire.request import Request
from pdrt.errors import BadRequest

FRESH_S: Final = 0.5  # whoever asks again within it is given the same
_MOST_KEPT: Final = 4  # lengths of the series that are asked for at a time
_DIGITS: Final = re.compile("[0-9]{1,9}")
_HEADERS: Final = (("cache-control", "no-store"),)


class Dashboard:
    def __init__(self, router: Router) -> None:
        self._router = router
        page = load()
        self._page = Reply(200, page.body, CONTENT_TYPE, page.headers)
        self._kept: dict[int, tuple[float, Reply]] = {}  # by seconds: when it was made

    def add_routes(self) -> None:
        self._router.routes.add("GET", "/", self.page)
        self._router.routes.add("GET", "/overview", self.overview)

    async def page(self, _request: Request) -> Reply:
        return self._page

    async def overview(self, request: Request) -> Reply:
        """`?seconds=N`: only the last N of the series."""
        asked, now = request.asked("seconds"), self._router.clocks.clock()
        seconds = int(asked) if _DIGITS.fullmatch(asked) else 0 if asked else SECONDS
        if not 1 <= seconds <= SECONDS:
            raise BadRequest(f"seconds: {asked[:40]!r} is no whole number from 1 to {SECONDS}")
        made_at, reply = self._kept.get(seconds, (now - FRESH_S, None))
        if reply is None or now - made_at >= FRESH_S:
            reply = Reply.json(self._made(seconds), headers=_HEADERS)
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[seconds] = now, reply
        return reply

    def _made(self, seconds: int) -> Json:
        router, screen, fleet = self._router, self._router.screen, self._router.fleet
        running = screen.running(router.relays)
        return screen.overview(self._facts(), fleet.instances, fleet.pairs, running, seconds)

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
