"""What the router remembers for those who look at it: the last minutes and the last errors.

Relays feed it in passing; once a second it reads what the instances have told of themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pdrt.control.flow import SECONDS, Flow
from pdrt.control.http import Json
from pdrt.control.instances import Instance
from pdrt.control.overview import Facts, Running, Trouble, overview, series
from pdrt.control.pairs import Pair
from pdrt.control.rates import Rates
from pdrt.errors import PdrtError

MOST_ERRORS: Final = 50
MOST_WORDS: Final = 500  # of an error's message


class Screen:
    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self.flow = Flow(clock())
        self.started_at = wall()
        self._rates: dict[str, Rates] = {}  # by the instance's name
        self._troubles: deque[Trouble] = deque(maxlen=MOST_ERRORS)

    # Fed in passing.

    def came(self) -> None:
        """A request was let in."""
        self.flow.started(self._clock())

    def went(self, error: PdrtError | None, status: int, request_id: str) -> None:
        """It is over; `error` is what its client was told."""
        self.flow.ended(self._clock(), is_failed=error is not None)
        if error is not None:
            self.failed(error, status, request_id)

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

    # Shown.

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
