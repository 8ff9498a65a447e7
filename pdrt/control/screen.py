"""What the router remembers for those who look at it: the last minutes and the last errors.

Relays feed it in passing; once a second it reads what the instances have told of themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pdrt.control.flow import SECONDS, Flow
from pdrt.control.http import Json
from pdrt.control.instances import Instance
from pdrt.control.overview import Facts, Running, Trouble, overview, series
from pdrt.control.pairs import Pair
from pdrt.control.rates import Rates
from pdrt.control.relay import Relay
from pdrt.control.wire.exchange import Exchange
from pdrt.errors import PdrtError

MOST_ERRORS: Final = 50
MOST_WORDS: Final = 500  # of an error's message
LOOK_S: Final = 1.0


class Passage:
    """One request on its way through; `passed` is called with each piece of a stream."""

    __slots__ = ("_clock", "_flow", "first_at", "last_at", "pieces", "relay", "started")

    def __init__(self, flow: Flow, clock: Callable[[], float]) -> None:
        self._flow, self._clock = flow, clock
        self.started = clock()
        self.first_at: float | None = None
        self.last_at = 0.0
        self.pieces = 0
        self.relay: Relay | None = None  # None: its body is still being read

    def passed(self) -> None:
        now = self._clock()
        if self.pieces:
            self._flow.gap(now, now - self.last_at)
        else:
            self.first_at = now
            self._flow.first(now, now - self.started)
        self.last_at = now
        self.pieces += 1

    def shown(self, now: float) -> Running | None:
        relay = self.relay
        if relay is None:
            return None
        first, choice = self.first_at, relay.choice
        return Running(
            request_id=relay.ticket.request_id,
            path=relay.ticket.path,
            state=relay.route.state,
            prefill=choice.prefill.name if choice.prefill else None,
            decode=choice.decode.name,
            age_s=now - self.started,
            first_s=None if first is None else first - self.started,
            pieces=self.pieces,
            tries=relay.route.tries,
        )


class Screen:
    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self.flow = Flow(clock())
        self.started_at = wall()
        self._rates: dict[str, Rates] = {}  # by the instance's name
        self._troubles: deque[Trouble] = deque(maxlen=MOST_ERRORS)
        self._under_way: dict[Exchange, Passage] = {}

    # Fed in passing.

    def came(self, exchange: Exchange) -> Callable[[], None]:
        """A request was let in; call what is returned with each piece of its stream."""
        passage = self._under_way[exchange] = Passage(self.flow, self._clock)
        self.flow.started(passage.started)
        return passage.passed

    def carried(self, exchange: Exchange, relay: Relay) -> None:
        """By this one from now on."""
        if exchange in self._under_way:
            self._under_way[exchange].relay = relay

    def went(self, exchange: Exchange) -> None:
        """It is over, or was not let in."""
        error, route = exchange.error, exchange.route
        if self._under_way.pop(exchange, None) is not None:
            self.flow.ended(self._clock(), is_failed=error is not None)
        if error is not None and route is not None and route.serves is not None:
            self.failed(error, exchange.status, exchange.request.id)

    def failed(self, error: PdrtError, status: int, request_id: str) -> None:
        """A client was told this."""
        self._troubles.append(
            Trouble(
                at=round(self._wall(), 3),
                status=status,
                code=error.code,
                stage=error.stage or "router",
                message=(str(error) or error.code)[:MOST_WORDS],
                request_id=request_id,
            )
        )

    def look(self, instances: Iterable[Instance]) -> None:
        """Read what they have told; called once a second."""
        tokens = sent = 0.0
        here: dict[str, Rates] = {}
        for each in instances:
            rates = here[each.name] = self._rates.get(each.name) or Rates()
            if each.status is None:
                rates.forget()
                continue
            totals = each.status.totals
            rates.feed(
                totals.at,
                {
                    "tokens_out": totals.tokens_out,
                    "prompt_tokens_computed": totals.prompt_tokens_computed,
                    "transfers": totals.transfers,
                    "sent_bytes": totals.sent_bytes,
                },
            )
            if each.role != "prefill":  # whose first tokens are decode's to say
                tokens += rates.per_second("tokens_out")
            sent += rates.per_second("sent_bytes")
        self._rates = here
        self.flow.level(self._clock(), tokens, sent)

    async def watch(self, instances: Callable[[], Iterable[Instance]]) -> None:
        """Look once a second. Cancel the task to stop."""
        while True:
            self.look(instances())
            await asyncio.sleep(LOOK_S)

    # Shown.

    def running(self) -> list[Running]:
        now = self._clock()
        shown = (passage.shown(now) for passage in self._under_way.values())
        return [each for each in shown if each is not None]

    def overview(
        self,
        facts: Facts,
        instances: Sequence[Instance],
        pairs: Sequence[Pair],
        requests: Iterable[Running],
        seconds: int = SECONDS,
    ) -> Json:
        newest_first = list(reversed(self._troubles))
        body = overview(facts, instances, pairs, self._rates, requests, newest_first)
        now = self._clock()
        body["series"] = series(self.flow, now, self._wall(), min(max(seconds, 1), SECONDS))
        return body
