"""Carries one request: opens its legs, lets the route's table decide, passes the answer on.

The promises are the table's (legs.py); this shell adds that nothing it opened outlives it. It is
callbacks all the way: what arrives on a leg becomes an event, and the table's effects are carried
out in the same breath, so a request costs no task and no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import structlog

from pdrt.config import Role
from pdrt.control.choice import Choice
from pdrt.control.exchange import JoinLeg, Leg, PrefillLeg, Work
from pdrt.control.http import Json
from pdrt.control.instances import Instance
from pdrt.control.legs import (
    OVER,
    BreakAnswer,
    CalledOff,
    CancelDecode,
    CancelPrefill,
    ClientLeft,
    DecodeFailed,
    Event,
    Failure,
    FinishAnswer,
    InstanceReplaced,
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

_NOTHING: Final[Json] = {}

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
        self.setbacks: Sequence[Setback] = ()  # what failed on the way
        self._tools, self._client, self._ended = tools, client, ended
        self._created = int(tools.clocks.wall())
        self._merge = self._new_merge()
        self._told = _NOTHING  # what prefill answered
        self._inbox: list[Event] = []
        self._is_busy = False
        self._prefill: list[Leg] = []  # and what joins it to decode
        self._decode: DecodeLeg | None = None
        self._substitutes: Substitutes | None = None  # once a leg has failed
        self._tasks: set[asyncio.Task[None]] | None = None  # once there was one
        self._alarm: Alarm | None = None
        self._leg: LegFields | None = None
        self._mover = Mover.of(ticket, tools)
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
        self._rest()

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
        if self._is_busy:
            self._inbox.append(event)
        elif self.route.state not in OVER:
            self._is_busy = True
            self._step(event)
            self._rest()

    def _rest(self) -> None:
        """What has happened meanwhile."""
        route, inbox = self.route, self._inbox
        while inbox and route.state not in OVER:
            self._step(inbox.pop(0))
        self._is_busy = False
        if self._alarm is not None and route.state in OVER:
            self._end()

    def _step(self, event: Event | None) -> None:
        """A fault of ours ends this request, typed, and no other. None: the beginning."""
        try:
            if self._trace is not None and event is not None:
                note(self._trace, event)
            if event is None:
                effects = self._first
            elif type(event) in _CONSIDERED:
                effects = feed(self.route, self._considered(event))
            else:
                effects = feed(self.route, event)
            for effect in effects:
                self.CARRIED_OUT[type(effect)](self, effect)
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
        if self._mover is not None:
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
        if self._tasks is None:
            self._tasks = set()
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
            mover = self._mover
            return event if mover is None else mover.considered(event, self.route, culprit)
        if self._substitutes is None:
            self._substitutes = Substitutes(self.ticket, self._tools)
        known, self.choice = self._substitutes.considered(event, self.route, self.choice)
        if isinstance(known, PairReplaced | InstanceReplaced):
            self._merge = self._new_merge()
        return known

    def _new_merge(self) -> Merge | None:
        """Where prefill has a part in the answer; who serves alone tells all of it."""
        alone = self.choice.prefill is None
        return None if alone else self.ticket.job.merge(self.ticket.request_id, self._created)

    def _note_setback(self, event: Failed, culprit: Instance) -> None:
        now = self._tools.clocks.clock()
        self.setbacks = (*self.setbacks, Setback(now, self.choice, culprit, event.failure))
        self._tools.fleet.blame(culprit, event.failure)

    # Effects.

    def _start_answer(self, _effect: StartAnswer) -> None:
        assert self._decode is not None, "it has answered"
        self.first_byte_at, self.status = self._tools.clocks.clock(), self._decode.status
        if self._trace is not None:
            self._trace.event("first byte")
        self._decode.go(self._shown_path(), self._told, self._shown_room)

    def _finish_answer(self, _effect: FinishAnswer) -> None:
        self._client.finish()

    def _break_answer(self, effect: BreakAnswer) -> None:
        self.failure = effect.failure
        self._client.break_off(effect.failure.error)

    def _refuse(self, effect: Refuse) -> None:
        """With a leg's own status and message."""
        self.failure = failure = effect.failure
        self._client.path_label = self.path_label
        after = (("retry-after", failure.retry_after),) if failure.retry_after else ()
        self._client.refuse(failure.error, failure.status, after)

    def _open_prefill(self, effect: OpenPrefill) -> None:
        prefill, tools, job, number = self.choice.prefill, self._tools, self.ticket.job, effect.leg
        assert prefill is not None, "a prefill leg needs a prefill instance"
        hold = prefill.hold(job.prompt_weight, self.choice.dp_rank, tools.fleet.turn)
        leg = PrefillLeg(number, self, prefill, hold, self._merge, is_plain=tools.is_plain)
        self._prefill.append(leg)
        lines = self._lines if self._trace is None else self._traced("prefill", number, prefill)
        body = job.body("prefill", self)
        leg.call = tools.upstream.post(prefill, self.ticket.path, body, lines, leg)

    def _open_decode(self, effect: OpenDecode) -> None:
        mover, tools, job, number = self._mover, self._tools, self.ticket.job, effect.leg
        is_resumed, moving = self.route.moves > 0, None
        if mover is not None:
            self.choice = mover.choice or self.choice
            moving = mover.moving if is_resumed else mover.begin(self.path_label, self._shown_room)
        decode, is_alone = self.choice.decode, self.choice.prefill is None
        is_early = not is_alone and (tools.is_plain or self._merge is not None)
        way = Way(job.stream, is_early, None if is_resumed else self._merge, moving, is_resumed)
        hold = decode.hold(job.answer_weight, 0, tools.fleet.turn)
        leg = self._decode = DecodeLeg(number, self, decode, hold, self._client, way)
        side: Role = "hybrid" if is_alone else "decode"
        lines = self._lines if self._trace is None else self._traced("decode", number, decode)
        body = job.body(side, self)
        leg.call = tools.upstream.post(decode, self.ticket.path, body, lines, leg)

    def _traced(self, side: Side, number: int, instance: Instance) -> bytes:
        """A leg's header lines, with which its leader joins the trace."""
        assert self._trace is not None, "it was looked at"
        header = self._trace.opened(side, number, instance.name)
        return self._lines + f"{TRACEPARENT}: {header}\r\n".encode() if header else self._lines

    def _look_for_another(self, effect: LookForAnother) -> None:
        assert self._mover is not None, "what is stranded was a stream that may move"
        self._mover.look(effect.leg, self.say)

    def _rebind(self, effect: Rebind) -> None:
        decode, tools = self.choice.decode, self._tools
        body = self.leg().model_dump_json(include=_REBIND_NAMES).encode()
        until = tools.clocks.clock() + tools.rebind_grace_s

        def post(leg: JoinLeg) -> Call:
            return tools.upstream.post(decode, _REBIND, body, self._lines, leg)

        async def may_ask_again() -> bool:
            await tools.clocks.pause(REBIND_EVERY_S)
            return tools.clocks.clock() < until

        join = JoinLeg(effect.leg, self.route.decode_leg, self, decode, post, may_ask_again)
        self._prefill.append(join)
        join.open()

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

    def _cancel_prefill(self, _effect: CancelPrefill | None = None) -> None:
        if self._prefill:
            legs, self._prefill = self._prefill, []
            for leg in legs:
                leg.cancel()

    def _cancel_decode(self, _effect: CancelDecode | None = None) -> None:
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
        mover = self._mover
        moving = mover.moving if mover is not None and mover.may_move else None
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
            resumed=mover.resumed if mover is not None else None,
        )

    def _time_left(self) -> float:
        return max(0.001, self.ticket.deadline - self._tools.clocks.clock())

    def _on_deadline(self) -> None:
        self.call_off(DeadlinePassed("the request's time is over"))

    CARRIED_OUT: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {
        OpenDecode: _open_decode,
        OpenPrefill: _open_prefill,
        CancelPrefill: _cancel_prefill,
        CancelDecode: _cancel_decode,
        Rebind: _rebind,
        LookForAnother: _look_for_another,
        StartAnswer: _start_answer,
        FinishAnswer: _finish_answer,
        BreakAnswer: _break_answer,
        Refuse: _refuse,
    }


# What needs to be considered before the table hears of it.
_CONSIDERED: Final = frozenset({PrefillDone, PrefillFailed, JoinedLate, DecodeFailed})
