"""Carries one request: opens its legs, lets the route's table decide, passes the answer on.

The promises are the table's (legs.py); this shell adds that nothing it opened outlives it:
all legs are tasks of one group, and a leg's end closes its connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeAlias

import structlog

from pdrt.config import Role
from pdrt.control import exchange as exchanges
from pdrt.control.exchange import SHORT_ANSWER, Call, ClientGone
from pdrt.control.fleet import Choice, Fleet
from pdrt.control.http import PATH_HEADER, Json
from pdrt.control.instances import Hold, Instance
from pdrt.control.job import Job
from pdrt.control.legs import (
    Answered,
    AnsweredEarly,
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
    InstanceReplaced,
    JoinedLate,
    OpenDecode,
    OpenPrefill,
    PairReplaced,
    PrefillDone,
    PrefillFailed,
    PrefillReplaced,
    Rebind,
    Refuse,
    StartAnswer,
    State,
    begin,
    feed,
)
from pdrt.control.merge import MERGED_ANSWER, Merge
from pdrt.control.passage import Passage
from pdrt.control.schema import Leg
from pdrt.control.upstream import Answer, Upstream
from pdrt.errors import DeadlinePassed, PdrtError, PeerLost, TransferFailed, Unavailable
from pdrt.keys import ClusterKey

MAX_TRIES: Final = 3
TOKEN_SPARE_S: Final = 5.0
REBIND_EVERY_S: Final = 0.02
PASSED_ON: Final = ("content-type", "content-length", "cache-control")

Exchange: TypeAlias = Callable[[], Awaitable[Event]]
log = structlog.get_logger(__name__)


class Client(Protocol):
    """Who reads the answer. `write` waits while the reader is slow."""

    async def start(self, status: int, headers: Mapping[str, str]) -> None: ...

    async def write(self, chunk: bytes) -> None: ...

    async def finish(self) -> None: ...

    async def break_off(self, error: PdrtError) -> None:
        """Part of the answer is out: say that no more will come, and why."""
        ...


class Alarm(Protocol):
    def cancel(self) -> None: ...


def ring_later(delay: float, ring: Callable[[], None]) -> Alarm:
    return asyncio.get_running_loop().call_later(delay, ring)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks and waits, so that tests can bring their own."""

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    alarm: Callable[[float, Callable[[], None]], Alarm] = ring_later
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True, slots=True)
class Tools:
    """What all relays of a router share. Without a key, instances are plain backends."""

    fleet: Fleet
    upstream: Upstream
    key: ClusterKey | None
    mint_room: Callable[[], int]
    clocks: Clocks
    rebind_grace_s: float

    @property
    def is_plain(self) -> bool:
        return self.key is None


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request on its way: the job, where it goes and how long it may take."""

    request_id: str
    path: str
    job: Job
    deadline: float
    client_room: int | None = None
    pinned: Instance | None = None
    may_retry: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    passage: Passage | None = None  # what is shown of it


class Relay:
    """Create it with a choice already made, in the same breath call `run`."""

    def __init__(self, ticket: Ticket, choice: Choice, tools: Tools, client: Client) -> None:
        self.ticket, self.choice = ticket, choice
        self.route, self._first = begin(tools.mint_room(), alone=choice.prefill is None)
        self.first_byte_at: float | None = None
        self.status = 0  # what the client was answered; 0 = nothing
        self.failure: Failure | None = None
        self._tools, self._client = tools, client
        created = int(tools.clocks.wall())
        self._merge = ticket.job.merge(ticket.request_id, created) if choice.prefill else None
        self._told: Json = {}  # what prefill answered
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()  # a few events a leg
        self._prefill_tasks: list[asyncio.Task[None]] = []
        self._decode_tasks: list[asyncio.Task[None]] = []
        self._tried: set[Instance] = set()
        self._go = asyncio.Event()
        self._tasks = asyncio.TaskGroup()

    @property
    def path_label(self) -> str:
        if self.choice.prefill is not None:
            return "disagg"
        return f"fallback:{self.choice.fallback}" if self.choice.fallback else "local"

    def call_off(self, error: PdrtError) -> None:
        self._inbox.put_nowait(CalledOff(Failure.of(error)))

    async def run(self) -> Failure | None:
        """Serve to the end. The failure returned is one the client has not heard of yet."""
        alarm = self._tools.clocks.alarm(self._time_left(), self._on_deadline)
        refused = False
        try:
            async with self._tasks:
                self._carry_out(self._first)
                while not self.route.is_over:
                    event = self._considered(await self._inbox.get())
                    for effect in self._carry_out(feed(self.route, event)):
                        refused = refused or isinstance(effect, Refuse)
        except asyncio.CancelledError:
            feed(self.route, ClientLeft())
            raise
        finally:
            alarm.cancel()
        if refused:
            return self.failure
        try:
            await self._end_answer()
        except ClientGone:
            log.info("client_left", request_id=self.ticket.request_id, at="the end")
        return None

    async def _end_answer(self) -> None:
        if self.failure is not None:
            await self._client.break_off(self.failure.error)
        elif self.status:
            await self._client.finish()

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
        if not (self.ticket.may_retry and self.route.may_replace(event)):
            return event
        if self.route.tries + 1 >= MAX_TRIES:
            return event
        try:
            replaced = self._replaced(event)
        except Unavailable:
            return event
        log.warning(
            "retried",
            request_id=self.ticket.request_id,
            room=self.route.room,
            on=str(self.choice),
            because=str(event.failure.error),
        )
        return replaced

    def _replaced(self, event: PrefillFailed | DecodeFailed) -> Event:
        """Raises Unavailable when there is nobody else."""
        fleet, pinned = self._tools.fleet, self.ticket.pinned
        self._tried.add(self._culprit(event))
        is_kept = self.route.state is not State.HELD  # then decode needs no prefill any more
        if isinstance(event, PrefillFailed) and not self._tools.is_plain and is_kept:
            if pinned is not None:
                raise Unavailable("the client wants this prefill instance")
            self.choice = fleet.pick_prefill(self.choice.decode, self._tried)
            return PrefillReplaced(event.leg)
        choice = fleet.pick(pinned, self._tried)
        if (choice.prefill is None) != (self.choice.prefill is None):
            raise Unavailable("only an instance of another kind is left")
        self.choice = choice
        room = self._tools.mint_room()
        return InstanceReplaced(room) if choice.prefill is None else PairReplaced(room)

    def _culprit(self, event: PrefillFailed | DecodeFailed) -> Instance:
        """Whom to avoid: decode also reports what its prefill side did."""
        is_transfer = isinstance(event.failure.error, TransferFailed)
        if self.choice.prefill and (isinstance(event, PrefillFailed) or is_transfer):
            return self.choice.prefill
        return self.choice.decode

    # Effects.

    def _carry_out(self, effects: Sequence[Effect]) -> Sequence[Effect]:
        for effect in effects:
            match effect:
                case OpenPrefill(leg):
                    self._open_prefill(leg)
                case OpenDecode(leg):
                    self._open_decode(leg)
                case Rebind(leg):
                    self._rebind(leg)
                case CancelPrefill():
                    _cancel(self._prefill_tasks)
                case CancelDecode():
                    _cancel(self._decode_tasks)
                case StartAnswer():
                    self.first_byte_at = self._tools.clocks.clock()
                    self._go.set()
                case BreakAnswer(failure) | Refuse(failure):
                    self.failure = failure
                case FinishAnswer():
                    pass  # done after the legs have ended
        return effects

    def _open_prefill(self, leg: int) -> None:
        def failed(failure: Failure) -> Event:
            return PrefillFailed(leg, failure)

        prefill = self.choice.prefill
        assert prefill is not None, "a prefill leg needs a prefill instance"
        tools, call = self._tools, self._call(prefill, "prefill")
        hold = self._hold(prefill, self.ticket.job.prompt_weight, self.choice.dp_rank, failed)
        exchange = partial(
            exchanges.prefill, leg, tools.upstream, call, self._merge, is_plain=tools.is_plain
        )
        task = self._tasks.create_task(self._say(exchange, failed))
        task.add_done_callback(lambda _task: hold.release())
        self._prefill_tasks.append(task)

    def _open_decode(self, leg: int) -> None:
        def failed(failure: Failure) -> Event:
            return DecodeFailed(leg, failure)

        decode, self._go = self.choice.decode, asyncio.Event()
        call = self._call(decode, "hybrid" if self.choice.prefill is None else "decode")
        hold = self._hold(decode, self.ticket.job.answer_weight, 0, failed)
        exchange = partial(exchanges.decode, leg, self._tools.upstream, call, self._pass_on)
        task = self._tasks.create_task(self._say(exchange, failed))
        task.add_done_callback(lambda _task: hold.release())
        self._decode_tasks.append(task)

    def _rebind(self, leg: int) -> None:
        def failed(failure: Failure) -> Event:
            return DecodeFailed(decode_leg, failure)

        decode_leg, tools = self.route.decode_leg, self._tools
        body = _rebind_body(self._leg())
        call = Call(self.choice.decode, "/internal/rebind", body, self._request_headers)
        ask_again = self._ask_again_until(tools.clocks.clock() + tools.rebind_grace_s)
        exchange = partial(exchanges.join, leg, decode_leg, tools.upstream, call, ask_again)
        self._prefill_tasks.append(self._tasks.create_task(self._say(exchange, failed)))

    def _hold(
        self, instance: Instance, tokens: int, dp_rank: int, failed: Callable[[Failure], Event]
    ) -> Hold:
        def lost(error: PdrtError) -> None:
            self._inbox.put_nowait(failed(Failure.of(error, elsewhere=True)))

        return instance.hold(tokens, dp_rank, self._tools.fleet.turn, lost)

    # Legs.

    async def _say(self, exchange: Exchange, failed: Callable[[Failure], Event]) -> None:
        try:
            event = await exchange()
        except Exception:  # a fault of ours ends this request, typed, and no other
            log.exception("leg_failed", request_id=self.ticket.request_id)
            event = failed(Failure.of(PdrtError("an internal error; see the log")))
        self._inbox.put_nowait(event)

    async def _pass_on(self, leg: int, answer: Answer) -> None:
        """Byte for byte, from when the table allows it; at the reader's pace."""
        if self._merge is not None and not self.ticket.job.stream:
            await self._pass_on_merged(leg, answer, self._merge)
            return
        go = self._go
        is_short = not self.ticket.job.stream and (answer.length or 0) <= SHORT_ANSWER
        chunk = await (answer.whole(SHORT_ANSWER) if is_short else answer.chunk())
        if not chunk:
            raise PeerLost(f"{self.choice.decode.name} ended its answer before it began")
        needs_prefill = self._tools.is_plain or self._merge is not None
        early = needs_prefill and self.choice.prefill is not None
        self._inbox.put_nowait(AnsweredEarly(leg) if early else Answered(leg))
        await go.wait()
        self.status = answer.status
        await self._client.start(answer.status, self._headers(answer))
        if self._merge is not None:
            opening = partial(self._merge.opening, self._told, self._shown_room)
            await self._client.write(await asyncio.to_thread(opening))
        while chunk:
            await self._client.write(chunk)
            chunk = await answer.chunk()

    async def _pass_on_merged(self, leg: int, answer: Answer, merge: Merge) -> None:
        """A whole answer, with prefill's part in it."""
        go = self._go
        said = await merge.read(await answer.whole(MERGED_ANSWER))
        self._inbox.put_nowait(AnsweredEarly(leg))
        await go.wait()
        body = await asyncio.to_thread(merge.whole, self._told, said)
        self.status = answer.status
        headers = {**self._headers(answer), "content-length": str(len(body))}
        await self._client.start(answer.status, headers)
        await self._client.write(body)

    @property
    def _shown_room(self) -> int:
        """What the client reads: its own key when it gave one."""
        own = self.ticket.client_room
        return self.route.room if own is None else own

    def _ask_again_until(self, until: float) -> Callable[[], Awaitable[bool]]:
        async def ask_again() -> bool:
            await self._tools.clocks.pause(REBIND_EVERY_S)
            return self._tools.clocks.clock() < until

        return ask_again

    # What is sent.

    @property
    def _request_headers(self) -> dict[str, str]:
        return {"x-request-id": self.ticket.request_id, **self.ticket.headers}

    def _call(self, instance: Instance, side: Role) -> Call:
        body = self.ticket.job.body(side, self._leg())
        return Call(instance, self.ticket.path, body, self._request_headers)

    def _leg(self) -> Leg:
        room, attempt, left = self.route.room, self.route.attempt, self._time_left()
        host, port = self.choice.prefill.bootstrap if self.choice.prefill else (None, None)
        token = ""
        if self._tools.key is not None:
            expires = self._tools.clocks.wall() + left + TOKEN_SPARE_S
            token = self._tools.key.room_token(room, attempt, expires)
        return Leg(
            bootstrap_room=room,
            attempt=attempt,
            time_left_s=left,
            transfer_token=token,
            request_id=self.ticket.request_id,
            client_room=self.ticket.client_room,
            bootstrap_host=host,
            bootstrap_port=port,
            disagg_prefill_dp_rank=self.choice.dp_rank if self.choice.prefill else -1,
            created=self._merge.created if self._merge else None,
        )

    def _headers(self, answer: Answer) -> dict[str, str]:
        headers = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
        said = answer.headers.get(PATH_HEADER)
        headers[PATH_HEADER] = said if said and not self.choice.fallback else self.path_label
        headers["x-request-id"] = self.ticket.request_id
        return headers

    def _time_left(self) -> float:
        return max(0.001, self.ticket.deadline - self._tools.clocks.clock())

    def _on_deadline(self) -> None:
        self.call_off(DeadlinePassed("the request's time is over"))


def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    tasks.clear()


def _rebind_body(leg: Leg) -> bytes:
    names = {
        "bootstrap_room",
        "attempt",
        "bootstrap_host",
        "bootstrap_port",
        "disagg_prefill_dp_rank",
        "transfer_token",
    }
    return leg.model_dump_json(include=names).encode()
