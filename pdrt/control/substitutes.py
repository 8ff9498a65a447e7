"""Who takes over a request of which its client has nothing yet, when a leg of it has failed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from pdrt.control.choice import Choice
from pdrt.control.legs import (
    Event,
    InstanceReplaced,
    PairReplaced,
    PrefillFailed,
    PrefillReplaced,
    Route,
    State,
)
from pdrt.control.setbacks import Failed, culprit_of
from pdrt.control.ticket import Ticket, Tools
from pdrt.control.tried import Tried
from pdrt.errors import Overloaded, Unavailable

MAX_TRIES: Final = 3

log = structlog.get_logger(__name__)


class Substitutes:
    """For one request."""

    __slots__ = ("_ticket", "_tools", "_tried")

    def __init__(self, ticket: Ticket, tools: Tools) -> None:
        self._ticket, self._tools = ticket, tools
        self._tried = Tried()

    def considered(self, event: Failed, route: Route, choice: Choice) -> tuple[Event, Choice]:
        """The failure itself, or what follows it when others can take over; and who serves now."""
        if not (self._ticket.may_retry and route.may_replace(event)):
            return event, choice
        if route.tries + 1 >= MAX_TRIES:
            return event, choice
        culprit = culprit_of(event, choice)
        self._tried.add(culprit)
        keeps = culprit is not choice.decode and self._keeps_decode(event, route)
        found = (keeps and self._prefill(event, choice)) or self._all_anew(event)
        if found is None:
            return event, choice
        replaced, chosen = found
        log.warning(
            "retried",
            request_id=self._ticket.request_id,
            room=route.room,
            on=str(chosen),
            because=str(event.failure.error),
        )
        return replaced, chosen

    def _keeps_decode(self, event: Failed, route: Route) -> bool:
        """Whether decode waits for another prefill: not for one that it needs no more."""
        is_prefills = isinstance(event, PrefillFailed) and route.state is not State.HELD
        return is_prefills and not self._tools.is_plain

    def _prefill(self, event: Failed, choice: Choice) -> tuple[Event, Choice] | None:
        """Another one, if there is one and the client has not named this one."""
        if self._ticket.pinned is not None:
            return None
        with suppress(Unavailable):
            fleet = self._tools.fleet
            chosen = self._tried.another(
                lambda without: fleet.pick_prefill(choice.decode, without, self._ticket.ask)
            )
            return PrefillReplaced(event.leg), chosen
        return None

    def _all_anew(self, event: Failed) -> tuple[Event, Choice] | None:
        """Others of either kind, as for a new request, if there are any."""
        fleet, room = self._tools.fleet, self._tools.mint_room()
        ask, pinned = replace(self._ticket.ask, room=room), self._ticket.pinned
        with suppress(Unavailable, Overloaded):
            chosen = self._tried.another(lambda without: fleet.pick(ask, pinned, without))
            if chosen.fallback:
                chosen.fallback = event.failure.error.code
            alone = chosen.prefill is None
            return (InstanceReplaced(room) if alone else PairReplaced(room)), chosen
        return None
