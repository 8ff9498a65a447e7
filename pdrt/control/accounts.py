"""What a request leaves behind at the router: counts, times and one log line.

Both are on the path of every request, so a line that tells of nothing wrong is made by hand and
written with others (telemetry.Lines).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import structlog

from pdrt.control.relay import Relay
from pdrt.control.routermetrics import RouterMetrics
from pdrt.control.wire.exchange import NO_PATH, Exchange
from pdrt.errors import PdrtError

Tell: TypeAlias = Callable[[str, Mapping[str, object]], None]

_OURS: Final = 500  # and above: not the client's doing
_MOST_WORDS: Final = 500

log = structlog.get_logger(__name__)


def tell_plainly(event: str, fields: Mapping[str, object]) -> None:
    log.info(event, **fields)


class Accounts:
    """`tell` writes the line of a request with which nothing was wrong."""

    def __init__(self, metrics: RouterMetrics, tell: Tell = tell_plainly) -> None:
        self._metrics, self._tell = metrics, tell

    def answered(self, exchange: Exchange) -> None:
        """Every request ends here, whatever it asked for."""
        route = exchange.route.path if exchange.route else "other"
        status = 499 if exchange.is_gone else exchange.status
        self._metrics.requests.add(route, status, exchange.path_label)
        if exchange.error is not None:
            self._metrics.errors.labels(exchange.error.code).inc()
            if exchange.path_label == NO_PATH:
                _note_refused(exchange, exchange.error)

    def relayed(self, relay: Relay, started: float, now: float) -> None:
        route, choice, failure = relay.route, relay.choice, relay.failure
        self._metrics.duration.observe(now - started)
        if relay.first_byte_at is not None:
            self._metrics.first_byte.observe(relay.first_byte_at - started)
        if route.tries:
            self._metrics.retries.inc(route.tries)
        if route.moves:
            self._metrics.moved.inc(route.moves)
        fields: dict[str, object] = {
            "request_id": relay.ticket.request_id,
            "room": route.room,
            "attempt": route.attempt,
            "outcome": route.state,
            "prefill": choice.prefill.name if choice.prefill else None,
            "decode": choice.decode.name,
            "ms": round((now - started) * 1e3, 1),
        }
        if relay.ticket.key_name:
            fields["key"] = relay.ticket.key_name
        if failure is None:
            self._tell("request", fields)
        else:
            story = list(route.story)
            log.warning("request", **fields, error=str(failure.error), story=story)


def _note_refused(exchange: Exchange, error: PdrtError) -> None:
    """The line of a request for which no instance was chosen. What a client did wrong is news for
    that client; that nobody can serve is news for the operator."""
    tell = log.warning if exchange.status >= _OURS else log.info
    tell(
        "refused",
        request_id=exchange.request.id,
        path=exchange.route.path if exchange.route else "other",
        status=exchange.status,
        code=error.code,
        error=str(error)[:_MOST_WORDS],
    )
