"""How a stream outlives its decode instance: what is kept of it, and who goes on with it.

The promise: the client reads whole events only, so what was kept is what it has; from there on it
reads what it would have read, and none of it twice. What a leader says of its stream's end is an
outcome like any other, also where nobody may go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from pdrt.control.choice import Choice
from pdrt.control.instances import Instance
from pdrt.control.legs import DecodeFailed, Event, Failure, Moved, Route, State, Stranded
from pdrt.control.marks import Heard
from pdrt.control.schema import Resumed, checked
from pdrt.control.sse import DONE
from pdrt.control.ticket import Alarm, Ticket, Tools
from pdrt.control.tried import Tried
from pdrt.errors import BadMessage, PdrtError, PeerLost

LOOK_EVERY_S: Final = 0.05
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Moving:
    """What its client has of a stream; times are on the router's clock."""

    sequences: int
    path: str  # what its client is told of the path, wherever it goes
    room: int  # and as its room
    began: float
    clock: Callable[[], float]
    heard: Heard = field(init=False)
    first_at: float = 0.0
    last_at: float = field(init=False)  # a sign of its life, told to the client or not

    def __post_init__(self) -> None:
        self.heard, self.last_at = Heard(self.sequences), self.began

    @property
    def error(self) -> PdrtError | None:
        """What the leg's stream ended with, after all that it told."""
        return self.heard.error

    def take(self, data: bytes) -> bytes:
        """What the client may read of a leg's bytes; then look at `error`."""
        told, now = self.heard.take(data), self.clock()
        if self.heard.error is None:  # to tell of an end is no sign of its life
            self.last_at = now
        if told and not self.first_at:
            self.first_at = now
        return told

    @property
    def is_whole(self) -> bool:
        """Whether nothing but the stream's own end may be missing."""
        return self.heard.is_whole

    def rest(self) -> bytes:
        """At a leg's end: what a whole answer lacks. Raises PeerLost when it is not whole."""
        if self.heard.is_over:
            return b""
        if not self.heard.is_whole:
            raise PeerLost("decode ended its answer before its end")
        self.heard.is_over = True
        return DONE

    def next_leg(self) -> Resumed:
        """What the next instance has to know. Raises PdrtError where that is not known."""
        if not self.heard.is_marked:
            raise BadMessage("decode did not say which tokens its events tell")
        self.heard.forget_part()
        return checked(
            Resumed,
            {
                "choices": self.heard.choices(),
                "cached_tokens": self.heard.cached_tokens,
                "elapsed_s": max(self.clock() - self.began, 0.0),
                "first_s": max(self.first_at - self.began, 0.0),
            },
        )


class Mover:
    """Finds who goes on with one stream, now or within a bound. `of` says which streams have it."""

    @staticmethod
    def of(ticket: Ticket, tools: Tools) -> Mover | None:
        """Those of our leaders: what other servers' events mean is not known."""
        return Mover(ticket, tools) if ticket.job.stream and not tools.is_plain else None

    def __init__(self, ticket: Ticket, tools: Tools) -> None:
        self._ticket, self._tools = ticket, tools
        self._most = tools.max_moves if ticket.may_retry else 0
        self._began = tools.clocks.clock()
        self._tried = Tried()
        self._lost: DecodeFailed | None = None
        self._until = 0.0
        self._alarm: Alarm | None = None
        self.moving: Moving | None = None
        self.resumed: Resumed | None = None
        self.choice: Choice | None = None  # of the last Moved

    @property
    def may_move(self) -> bool:
        return self._most > 0

    def begin(self, path: str, room: int) -> Moving:
        """For a decode leg of which the client has nothing yet."""
        sequences = self._ticket.job.sequences
        self.moving = Moving(sequences, path, room, self._began, self._tools.clocks.clock)
        return self.moving

    def considered(self, event: DecodeFailed, route: Route, culprit: Instance) -> Event:
        """In mid-stream: the failure itself, or what follows it when another instance may help."""
        is_refusal = route.state is State.MOVING
        if self.moving is None or route.moves >= self._most:
            return event
        if not may_help(event.failure, is_refusal=is_refusal):
            return event
        try:
            self.resumed = self.moving.next_leg()
        except PdrtError:
            return event
        if not is_refusal:
            self._tried.clear()  # whom it was moved away from long ago may be well again
            # A client hears within 2 s of a fault, however many refuse to go on after it; and to
            # notice that somebody only stands still took most of that.
            self._until = self.moving.last_at + self._tools.move_s
        self._tried.add(culprit)
        self._lost = event
        return self._moved() or Stranded()

    def look(self, leg: int, say: Callable[[Event], None]) -> None:
        """Nobody can go on at the moment: look again, and give up in time; `say` is told then."""
        assert self._lost is not None, "a stream is stranded by a loss"
        if (moved := self._moved()) is not None:
            say(moved)
        elif self._tools.clocks.clock() >= self._until:
            say(DecodeFailed(leg, self._lost.failure))
        else:
            self._alarm = self._tools.clocks.alarm(LOOK_EVERY_S, lambda: self.look(leg, say))

    def cancel(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _moved(self) -> Moved | None:
        try:
            room = self._tools.mint_room()
            ask, pinned = replace(self._ticket.ask, room=room), self._ticket.pinned
            fleet = self._tools.fleet
            self.choice = self._tried.another(lambda without: fleet.pick(ask, pinned, without))
        except PdrtError:
            return None
        assert self._lost is not None
        assert self.resumed is not None
        log.warning(
            "moved",
            request_id=self._ticket.request_id,
            on=str(self.choice),
            tokens=[len(told.ids) for told in self.resumed.choices],
            because=str(self._lost.failure.error),
        )
        return Moved(room)


def may_help(failure: Failure, *, is_refusal: bool) -> bool:
    """Whether another instance might go on. A refusal is the answer of one that never began: it
    may be full, or smaller than the one before."""
    error: PdrtError = failure.error
    return error.status != 504 and (is_refusal or error.retryable or error.status >= 500)
