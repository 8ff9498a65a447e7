"""Who takes over a request of which its client has nothing yet, when a leg of it has failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import structlog

from pdrt.control.choice import Choice
from pdrt.control.instances import Instance
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
from pdrt.errors import Overloaded, Unavailable

MAX_TRIES: Final = 3

log = structlog.get_logger(__name__)


class Substitutes:
    """For one request: whoever has failed it is not asked again."""

    __slots__ = ("_ticket", "_tools", "_tried")

    def __init__(self, ticket: Ticket, tools: Tools) -> None:
        self._ticket, self._tools = ticket, tools
        self._tried: set[Instance] = set()

    def considered(self, event: Failed, route: Route, choice: Choice) -> tuple[Event, Choice]:
        """The failure itself, or what follows it when others can take over; and who serves now."""
        if not (self._ticket.may_retry and route.may_replace(event)):
            return event, choice
        if route.tries + 1 >= MAX_TRIES:
            return event, choice
        culprit = culprit_of(event, choice)
        self._tried.add(culprit)
        try:
            if culprit is not choice.decode and self._keeps_decode(event, route):
                replaced, chosen = self._prefill(event, choice)
            else:
                replaced, chosen = self._all_anew(choice)
        except (Unavailable, Overloaded):
            return event, choice
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

    def _prefill(self, event: Failed, choice: Choice) -> tuple[Event, Choice]:
        """Raises Unavailable when there is nobody else."""
        if self._ticket.pinned is not None:
            raise Unavailable("the client wants this prefill instance")
        fleet = self._tools.fleet
        chosen = fleet.pick_prefill(choice.decode, self._tried, self._ticket.ask)
        return PrefillReplaced(event.leg), chosen

    def _all_anew(self, choice: Choice) -> tuple[Event, Choice]:
        """Raises Unavailable or Overloaded when there is nobody else."""
        room = self._tools.mint_room()
        ask = replace(self._ticket.ask, room=room)
        chosen = self._tools.fleet.pick(ask, self._ticket.pinned, self._tried)
        if (chosen.prefill is None) != (choice.prefill is None) and not choice.local:
            raise Unavailable("only an instance of another kind is left")
        return (InstanceReplaced(room) if chosen.prefill is None else PairReplaced(room)), chosen
