"""Carries one request: opens its legs, lets the route's table decide, passes the answer on.

The promises are the table's (legs.py); this shell adds that nothing it opened outlives it. It is
callbacks all the way: what arrives on a leg becomes an event, and the table's effects are carried
out in the same breath, so a request costs no task and no queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from pdrt.config import Role
from pdrt.control.choice import Choice
from pdrt.control.exchange import JoinLeg, Leg, PrefillLeg, Work
from pdrt.control.http import Json
from pdrt.control.instances import Hold, Instance
from pdrt.control.legs import (
    BreakAnswer,
    CalledOff,
    CancelDecode,
    CancelPrefill,
    ClientLeft,
    DecodeFailed,
    Effect,
    Event,
    Failure,
    FinishAnswer,
    JoinedLate,
    LookForAnother,
    OpenDecode,
    OpenPrefill,
    PairReplaced,
    PrefillDone,
    PrefillFailed,
    Rebind,
    Refuse,
    StartAnswer,
    State,
    begin,
    feed,
)
from pdrt.control.merge import Merge
from pdrt.control.moving import Mover
from pdrt.control.passon import DecodeLeg, Way
from pdrt.control.schema import LegFields
from pdrt.control.setbacks import Failed, Setback, culprit_of
from pdrt.control.substitutes import Substitutes
from pdrt.control.ticket import Alarm, Client, Ticket, Tools
from pdrt.control.traces import TRACEPARENT, RequestTrace, Side, Told, note
from pdrt.control.wire.client import Call
from pdrt.errors import DeadlinePassed, PdrtError, TransferFailed

TOKEN_SPARE_S: Final = 5.0
REBIND_EVERY_S: Final = 0.02
_REBIND: Final = "/internal/rebind"
_REBIND_NAMES: Final = {
    "bootstrap_room",
    "attempt",
    "bootstrap_host",
    "bootstrap_port",
    "disagg_prefill_dp_rank",
    "transfer_token",
}

log = structlog.get_logger(__name__)


class Relay:
    """Create it with a choice already made, in the same breath call `start`."""

    __slots__ = (
        "_alarm",
        "_client",
        "_created",
        "_decode",
        "_ended",
        "_first",
        "_inbox",
        "_is_busy",
        "_leg",
        "_lines",
        "_merge",
        "_mover",
        "_prefill",
        "_substitutes",
        "_tasks",
        "_told",
        "_tools",
        "_trace",
        "choice",
        "failure",
        "first_byte_at",
        "route",
        "setbacks",
        "status",
        "ticket",
    )

    def __init__(
        self,
        ticket: Ticket,
        choice: Choice,
        tools: Tools,
        client: Client,
        ended: Callable[[Relay], None],
    ) -> None:
        self.ticket, self.choice = ticket, choice
        room = ticket.ask.room or tools.mint_room()
        self.route, self._first = begin(room, alone=choice.prefill is None)
        self.first_byte_at: float | None = None
        self.status = 0  # what the client was answered; 0 = nothing
        self.failure: Failure | None = None
        self.setbacks: list[Setback] = []  # what failed on the way
        self._tools, self._client, self._ended = tools, client, ended
        self._created = int(tools.clocks.wall())
        self._merge: Merge | None = None
        if choice.prefill:
            self._merge = ticket.job.merge(ticket.request_id, self._created)
        self._told: Json = {}  # what prefill answered
        self._inbox: deque[Event] = deque()
        self._is_busy = False
        self._prefill: list[Leg] = []  # and what joins it to decode
        self._decode: DecodeLeg | None = None
        self._substitutes: Substitutes | None = None  # once a leg has failed
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: Alarm | None = None
        self._leg: LegFields | None = None
        self._mover = Mover(ticket, tools)
        self._lines = b"x-request-id: %b\r\n%b" % (ticket.request_id.encode(), ticket.lines)
        self._trace: RequestTrace | None = None
        if tools.tracing is not None and ticket.traceparent is not None:
            told = {"request_id": ticket.request_id, "path": ticket.path}
            self._trace = tools.tracing.request(ticket.traceparent, told)

    @property
    def path_label(self) -> str:
        if self.choice.prefill is not None:
            return "disagg"
        return f"fallback:{self.choice.fallback}" if self.choice.fallback else "local"

    def start(self) -> None:
        self._alarm = self._tools.clocks.alarm(self._time_left(), self._on_deadline)
        self._is_busy = True
        self._step(None)
        self._turn()

    def call_off(self, error: PdrtError) -> None:
        self.say(CalledOff(Failure.of(error)))

    def client_left(self) -> None:
        self.say(ClientLeft())

    def flow(self, is_full: bool) -> None:
        """The client has fallen behind, or has caught up."""
        if self._decode is not None:
            self._decode.flow(is_full=is_full)

    # Events become effects.

    def say(self, event: Event) -> None:
        """What happened; at once, or after what is being done now."""
        self._inbox.append(event)
        if not self._is_busy:
            self._is_busy = True
            self._turn()

    def _turn(self) -> None:
        while self._inbox and not self.route.is_over:
            self._step(self._inbox.popleft())
        self._is_busy = False
        if self.route.is_over and self._alarm is not None:
            self._end()

    def _step(self, event: Event | None) -> None:
        """A fault of ours ends this request, typed, and no other. None: the beginning."""
        try:
            if self._trace is not None and event is not None:
                note(self._trace, event)
            known = event and self._considered(event)
            for effect in self._first if known is None else feed(self.route, known):
                self._carry_out(effect)
        except Exception:
            log.exception("relay_failed", request_id=self.ticket.request_id)
            self._inbox.clear()
            failure = Failure.of(PdrtError("an internal error; see the log"))
            if self.failure is None:
                self.failure = failure
                self._inbox.append(CalledOff(failure))
            else:  # not even that can be told
                self.route.state = State.FAILED

    def _end(self) -> None:
        """Nothing of it is left but what can be read of it."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if self.route.state is State.SERVED:
            self._tools.fleet.praise(self.choice)
        self._mover.cancel()
        self._cancel_prefill()
        self._cancel_decode()
        if self._trace is not None:
            self._end_trace(self._trace)
        self._ended(self)

    def _end_trace(self, trace: RequestTrace) -> None:
        route, choice = self.route, self.choice
        told: dict[str, Told] = {
            "room": route.room,
            "attempt": route.attempt,
            "outcome": str(route.state),
            "decode": choice.decode.name,
        }
        if choice.prefill is not None:
            told["prefill"] = choice.prefill.name
        trace.ended(told, self.failure.error if self.failure is not None else None)

    def spawn(self, work: Work, failed: Callable[[Failure], Event]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._work(work, failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work(self, work: Work, failed: Callable[[Failure], Event]) -> None:
        try:
            event = await work
        except Exception:
            log.exception("leg_failed", request_id=self.ticket.request_id)
            event = failed(Failure.of(PdrtError("an internal error; see the log")))
        if event is not None:
            self.say(event)

    # Decisions that need to know other instances.

    def _considered(self, event: Event) -> Event:
        """A failure, or its replacement when another instance can take over."""
        if isinstance(event, PrefillDone) and self.route.is_current(event):
            self._told = event.told
        if isinstance(event, JoinedLate) and self._merge and self.route.is_current(event):
            lost = TransferFailed("what prefill tells of the prompt was lost with it")
            event = PrefillFailed(event.leg, Failure.of(lost))
        if not isinstance(event, PrefillFailed | DecodeFailed):
            return event
        culprit = culprit_of(event, self.choice)
        if self.route.is_current(event) and not self.route.is_over:
            self._note_setback(event, culprit)
        if isinstance(event, DecodeFailed) and self.route.may_move(event):
            return self._mover.considered(event, self.route, culprit)
        if self._substitutes is None:
            self._substitutes = Substitutes(self.ticket, self._tools)
        known, self.choice = self._substitutes.considered(event, self.route, self.choice)
        if isinstance(known, PairReplaced) and self._merge is None:  # decode was to tell all of it
            self._merge = self.ticket.job.merge(self.ticket.request_id, self._created)
        return known

    def _note_setback(self, event: Failed, culprit: Instance) -> None:
        now = self._tools.clocks.clock()
        self.setbacks.append(Setback(now, self.choice, culprit, event.failure))
        self._tools.fleet.blame(culprit, event.failure)

    # Effects.

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case OpenDecode(leg):
                self._open_decode(leg)
            case OpenPrefill(leg):
                self._open_prefill(leg)
            case CancelPrefill():
                self._cancel_prefill()
            case CancelDecode():
                self._cancel_decode()
            case Rebind(leg):
                self._rebind(leg)
            case LookForAnother(leg):
                self._mover.look(leg, self.say)
            case StartAnswer() | FinishAnswer() | BreakAnswer() | Refuse():
                self._answer(effect)

    def _answer(self, effect: StartAnswer | FinishAnswer | BreakAnswer | Refuse) -> None:
        match effect:
            case StartAnswer():
                self._start_answer()
            case FinishAnswer():
                self._client.finish()
            case BreakAnswer(failure):
                self.failure = failure
                self._client.break_off(failure.error)
            case Refuse(failure):
                self.failure = failure
                self._refuse(failure)

    def _refuse(self, failure: Failure) -> None:
        """With a leg's own status and message."""
        self._client.path_label = self.path_label
        after = (("retry-after", failure.retry_after),) if failure.retry_after else ()
        self._client.refuse(failure.error, failure.status, after)

    def _open_prefill(self, number: int) -> None:
        prefill, tools = self.choice.prefill, self._tools
        assert prefill is not None, "a prefill leg needs a prefill instance"

        def lost(error: PdrtError) -> None:
            self.say(PrefillFailed(number, Failure.of(error, elsewhere=True)))

        hold = self._hold(prefill, self.ticket.job.prompt_weight, self.choice.dp_rank, lost)
        leg = PrefillLeg(number, self, prefill, hold, self._merge, is_plain=tools.is_plain)
        self._prefill.append(leg)
        leg.call = self._post(prefill, "prefill", leg, self._traced("prefill", number, prefill))

    def _open_decode(self, number: int) -> None:
        self.choice = self._mover.choice or self.choice
        decode, is_alone = self.choice.decode, self.choice.prefill is None

        def lost(error: PdrtError) -> None:
            if self._decode is not None and self._decode.number == number:
                self._decode.lose(error)

        mover, is_resumed = self._mover, self.route.moves > 0
        moving = mover.moving if is_resumed else mover.begin(self.path_label, self._shown_room)
        leg = DecodeLeg(
            number,
            self,
            decode,
            self._hold(decode, self.ticket.job.answer_weight, 0, lost),
            self._client,
            Way(
                self.ticket.job.stream,
                not is_alone and self._needs_prefill,
                None if is_resumed else self._merge,
                moving,
                is_resumed,
            ),
        )
        self._decode = leg
        side: Role = "hybrid" if is_alone else "decode"
        leg.call = self._post(decode, side, leg, self._traced("decode", number, decode))

    @property
    def _needs_prefill(self) -> bool:
        """Whether decode's answer alone is not enough to go on."""
        return self._tools.is_plain or self._merge is not None

    def _post(
        self, instance: Instance, side: Role, leg: PrefillLeg | DecodeLeg, lines: bytes
    ) -> Call:
        body = self.ticket.job.body(side, self)
        return self._tools.upstream.post(instance, self.ticket.path, body, lines, leg)

    def _traced(self, side: Side, number: int, instance: Instance) -> bytes:
        """A leg's header lines, with which its leader joins the trace if there is one."""
        if self._trace is None:
            return self._lines
        header = self._trace.opened(side, number, instance.name)
        return self._lines + f"{TRACEPARENT}: {header}\r\n".encode() if header else self._lines

    def _rebind(self, number: int) -> None:
        decode, tools = self.choice.decode, self._tools
        body = self.leg().model_dump_json(include=_REBIND_NAMES).encode()
        until = tools.clocks.clock() + tools.rebind_grace_s

        def post(leg: JoinLeg) -> Call:
            return tools.upstream.post(decode, _REBIND, body, self._lines, leg)

        async def may_ask_again() -> bool:
            await tools.clocks.pause(REBIND_EVERY_S)
            return tools.clocks.clock() < until

        join = JoinLeg(number, self.route.decode_leg, self, decode, post, may_ask_again)
        self._prefill.append(join)
        join.open()

    def _hold(
        self, instance: Instance, tokens: int, dp_rank: int, lost: Callable[[PdrtError], None]
    ) -> Hold:
        return instance.hold(tokens, dp_rank, self._tools.fleet.turn, lost)

    def _start_answer(self) -> None:
        assert self._decode is not None, "it has answered"
        self.first_byte_at, self.status = self._tools.clocks.clock(), self._decode.status
        if self._trace is not None:
            self._trace.event("first byte")
        self._decode.go(self._shown_path(), self._told, self._shown_room)

    @property
    def _shown_room(self) -> int:
        own = self.ticket.client_room
        return self.route.room if own is None else own

    def _shown_path(self) -> str:
        """What decode was told to say; a plain backend may know better."""
        said = self._decode.headers.get(b"x-pd-path", b"") if self._decode else b""
        if said and self._tools.is_plain and not self.choice.fallback:
            return said.decode("latin-1")
        return self.path_label

    def _cancel_prefill(self) -> None:
        legs, self._prefill = self._prefill, []
        for leg in legs:
            leg.cancel()

    def _cancel_decode(self) -> None:
        leg, self._decode = self._decode, None
        if leg is not None:
            leg.cancel()

    # What is sent.

    @property
    def room(self) -> int:
        return self.route.room

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        return self.choice.prefill.bootstrap if self.choice.prefill else None

    def leg(self) -> LegFields:
        """The same for both legs of an attempt."""
        found, room, attempt = self._leg, self.route.room, self.route.attempt
        if found is None or (found.bootstrap_room, found.attempt) != (room, attempt):
            found = self._leg = self._new_leg(room, attempt)
        return found

    def _new_leg(self, room: int, attempt: int) -> LegFields:
        left, key = self._time_left(), self._tools.key
        host, port = self.bootstrap or (None, None)
        expires = self._tools.clocks.wall() + left + TOKEN_SPARE_S
        moving = self._mover.moving
        return LegFields.model_construct(  # ours: nothing to check
            bootstrap_room=room,
            attempt=attempt,
            time_left_s=left,
            transfer_token=key.room_token(room, attempt, expires) if key else "",
            request_id=self.ticket.request_id,
            client_room=moving.room if moving else self.ticket.client_room,
            bootstrap_host=host,
            bootstrap_port=port,
            disagg_prefill_dp_rank=self.choice.dp_rank if self.choice.prefill else -1,
            created=self._created if moving or self._merge else None,
            path=moving.path if moving else self.path_label,
            marks=moving is not None,
            resumed=self._mover.resumed,
        )

    def _time_left(self) -> float:
        return max(0.001, self.ticket.deadline - self._tools.clocks.clock())

    def _on_deadline(self) -> None:
        self.call_off(DeadlinePassed("the request's time is over"))
