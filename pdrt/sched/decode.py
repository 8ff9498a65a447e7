"""The decode scheduler: requests arrive computed, and their KV is written by a peer.

DecodePreallocQueue (bootstrapping, waiting, unbound) -> DecodeTransferQueue (transferring) ->
running. The promise: blocks of an attempt that failed or was aborted are not used again before
Quiet (or Received: then all of it is written), an event of an old attempt moves nothing, and a
request whose prefill is lost before its first token waits for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from pdrt.data.commands import OpenReceiver
from pdrt.data.events import (
    SLOT_COMPLETE,
    PromptStarted,
    Quiet,
    Received,
    ReceiveFailed,
    ReceiverReady,
    SlotRecord,
    TransferEvent,
)
from pdrt.device.batch import Drawn
from pdrt.errors import BadRequest, TransferFailed
from pdrt.messages import Problem, Submit
from pdrt.sched.base import Scheduler
from pdrt.sched.book import SchedStats
from pdrt.sched.effects import Effect
from pdrt.sched.events import (
    AttemptLost,
    AttemptRefused,
    Cancelled,
    FellBack,
    Order,
    Rebound,
    ResumeLocally,
)
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Plan
from pdrt.sched.request import Request, State

QUEUES: Final = (
    ("prealloc_queue", (State.BOOTSTRAPPING, State.WAITING, State.UNBOUND)),
    ("transfer_queue", (State.TRANSFERRING,)),
    ("waiting_queue", (State.QUEUED,)),
)


class DecodeDisaggScheduler:
    """A base scheduler with an intake: it plans and commits, this feeds it what arrives."""

    def __init__(self, limits: Limits, blocks: int, slots: int, eos: Collection[int]) -> None:
        self._base = Scheduler(limits, blocks, eos, slots=slots, max_held=limits.max_held)
        self.limits = limits
        self.book = self._base.book

    @property
    def outbox(self) -> deque[Effect]:
        return self.book.outbox

    @property
    def is_idle(self) -> bool:
        """Whether no request is left; quarantined blocks do not count."""
        return self._base.is_idle

    def next_timer(self) -> float | None:
        """When `plan` must be called though nothing happens."""
        return self._base.next_timer()

    def drain(self) -> None:
        self._base.drain()

    def stats(self) -> SchedStats:
        return self.book.stats(QUEUES)

    def plan(self, now: float) -> Plan:
        """Decide and reserve the next step. An empty batch means: wait for an event or timer."""
        return self._base.plan(now)

    def commit(self, plan: Plan, drawn: Sequence[Drawn], now: float) -> None:
        self._base.commit(plan, drawn, now)

    def submit(self, submit: Submit, now: float) -> None:
        """Raises BadRequest, TooLong, Conflict, Overloaded or Draining; then nothing is kept."""
        if submit.source is None:
            raise BadRequest("source: a decode worker needs to know who computes the prompt")
        request = self._base.accept(submit, now, State.BOOTSTRAPPING)
        if request is not None:
            self.outbox.append(
                OpenReceiver(request.room, request.attempt, submit.source, request.deadline)
            )

    def feed(self, event: TransferEvent | Order, now: float) -> None:
        """Whatever happens outside comes in here, in any order, any number of times."""
        match event:
            case Cancelled():
                self._base.feed(event, now)
            case Quiet(room, attempt):
                self._quiet(room, attempt)
            case Received(room, attempt, record):
                self._received(room, attempt, record)
            case ReceiverReady(room, attempt) | PromptStarted(room, attempt):
                if (request := self._current(room, attempt)) is not None:
                    self.book.move(request, event)
            case ReceiveFailed(room, attempt):
                if (request := self._current(room, attempt)) is not None:
                    self._failed(request, event, now)
            case Rebound() | ResumeLocally():
                self._redirected(event)
            case _:
                self.book.counters["late"] += 1  # the prefill side's

    def _current(self, room: int, attempt: int) -> Request | None:
        """The request, if this is about its present attempt."""
        request = self.book.rooms.get(room)
        if request is None or request.attempt != attempt:
            self.book.counters["late" if request is None else "stale"] += 1
            return None
        return request

    def _quiet(self, room: int, attempt: int) -> None:
        if self.book.release((room, attempt)):
            return
        request = self._current(room, attempt)
        if request is not None and request.state is State.TRANSFERRING:
            request.is_quiet = True  # its failure is still on the way

    def _received(self, room: int, attempt: int, record: SlotRecord) -> None:
        if self.book.release((room, attempt)):
            return  # given up just before it was complete: no write is left
        request = self._current(room, attempt)
        if request is None:
            return
        if request.state is not State.TRANSFERRING:
            self.book.counters["ignored"] += 1
            return
        self.book.counters["transfers"] += 1
        if record.status != SLOT_COMPLETE or record.kv_len != len(request.tokens):
            self._bad_record(request, record)
            return
        cached = 0 if request.said else record.cached_tokens
        self._base.say(request, record.token, record.logprob, cached)

    def _bad_record(self, request: Request, record: SlotRecord) -> None:
        request.is_quiet = True
        told = f"room {request.room} attempt {request.attempt}: the slot vouches for "
        told += f"{record.kv_len} tokens (status {record.status}), not {len(request.tokens)}"
        self.book.move(request, AttemptRefused(Problem.of(TransferFailed(told))))

    def _failed(self, request: Request, event: ReceiveFailed, now: float) -> None:
        if request.is_resuming:
            self.book.move(request, FellBack())
        elif event.problem.is_retryable and not event.was_written:
            until = now + self.limits.rebind_grace_s
            self.book.move(request, AttemptLost(event.problem, until))
        else:
            self.book.move(request, AttemptRefused(event.problem))

    def _redirected(self, event: Rebound | ResumeLocally) -> None:
        request = self.book.rooms.get(event.room)
        if request is None:
            self.book.counters["late"] += 1
        elif isinstance(event, Rebound) and event.attempt <= request.attempt:
            self.book.counters["stale"] += 1
        elif isinstance(event, ResumeLocally) and not request.is_resuming:
            self.book.counters["ignored"] += 1  # no prompt is computed here unless policy says so
        else:
            self.book.move(request, event)
