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
from pdrt.control.passage import Passage
from pdrt.control.rates import Rates
from pdrt.control.relay import Relay
from pdrt.control.wire.exchange import Exchange
from pdrt.errors import PdrtError

MOST_ERRORS: Final = 50
MOST_WORDS: Final = 500  # of an error's message
LOOK_S: Final = 1.0


class Screen:
    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self.flow = Flow(clock())
        self.started_at = wall()
        self._rates: dict[str, Rates] = {}  # by the instance's name
        self._troubles: deque[Trouble] = deque(maxlen=MOST_ERRORS)
        self._under_way: dict[Exchange, Passage] = {}

    # Fed in passing.

    def came(self, exchange: Exchange) -> None:
        """A request was let in."""
        passage = self._under_way[exchange] = Passage(self.flow, self._clock)
        exchange.on_piece = passage.passed
        self.flow.started(passage.started)

    def passage(self, exchange: Exchange) -> Passage | None:
        """What is counted of it, while it is under way."""
        return self._under_way.get(exchange)

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

    def running(self, relays: Iterable[Relay]) -> list[Running]:
        """Requests under way; those whose body is still being read are nowhere yet."""
        now = self._clock()
        return [_running(each, each.ticket.passage, now) for each in relays if each.ticket.passage]

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


def _running(relay: Relay, passage: Passage, now: float) -> Running:
    first, choice = passage.first_at, relay.choice
    return Running(
        request_id=relay.ticket.request_id,
        path=relay.ticket.path,
        state=relay.route.state,
        prefill=choice.prefill.name if choice.prefill else None,
        decode=choice.decode.name,
        age_s=now - passage.started,
        first_s=None if first is None else first - passage.started,
        is_stream=relay.ticket.job.stream,
        pieces=passage.pieces,
        tries=relay.route.tries,
    )
