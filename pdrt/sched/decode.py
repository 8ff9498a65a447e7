"""The decode scheduler: requests arrive computed, and their KV is written by a peer.

DecodePreallocQueue (bootstrapping, waiting, unbound) -> DecodeTransferQueue (transferring) ->
running. The promises: blocks of an attempt that failed or was aborted are not used again before
Quiet (or Received: then all of it is written), and an event of an old attempt moves nothing. First
tokens are said as soon as they are known, once; the KV that comes later must be of the same. A
request whose prefill is lost before that waits for another one; later it is resumed with what it
has said, as one that was retracted. Where it is allowed, one without a source is computed here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from pdrt.data.commands import OpenReceiver
from pdrt.data.events import (
    SLOT_COMPLETE,
    FirstTokens,
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
from pdrt.messages import Problem, Submit, unpack_tops
from pdrt.sched.base import Scheduler
from pdrt.sched.book import SchedStats
from pdrt.sched.effects import Effect
from pdrt.sched.events import (
    AttemptLost,
    AttemptRefused,
    Cancelled,
    FellBack,
    FirstsKept,
    Order,
    Rebound,
    ResumeLocally,
    Retracted,
    Returned,
    Stopped,
)
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Plan
from pdrt.sched.request import First, Request, State
from pdrt.sched.sequences import branch, first, living
from pdrt.sched.spent import Phase

QUEUES: Final = (
    ("prealloc_queue", (State.BOOTSTRAPPING, State.WAITING, State.UNBOUND)),
    ("transfer_queue", (State.TRANSFERRING,)),
    ("waiting_queue", (State.QUEUED, State.SWAPPED)),
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

    def commit(
        self, plan: Plan, drawn: Sequence[Drawn], now: float, lost: Collection[int] = ()
    ) -> None:
        self._base.commit(plan, drawn, now, lost)

    def steady_steps(self, most: int) -> int:
        """As the base scheduler's, for the simulator."""
        return self._base.steady_steps(most)

    def skip(self, steps: int) -> None:
        self._base.skip(steps)

    def submit(self, submit: Submit, now: float) -> None:
        """Raises BadRequest, TooLong, Conflict, Overloaded or Draining; then nothing is kept."""
        if submit.source is None and not self.limits.local_prefill:
            raise BadRequest("source: a decode worker needs to know who computes the prompt")
        if submit.source is None:
            self._base.submit(submit, now)
            self.book.counters["prefilled_here"] += 1
        elif submit.said:
            self._base.resume(submit, now)
        elif (request := self._base.accept(submit, now, State.BOOTSTRAPPING)) is not None:
            self.outbox.append(
                OpenReceiver(request.room, request.attempt, submit.source, request.deadline)
            )

    def feed(self, event: TransferEvent | Order, now: float) -> None:
        """Whatever happens outside comes in here, in any order, any number of times."""
        self.book.now = now
        match event:
            case Cancelled() | Stopped():
                self._base.feed(event, now)
            case Quiet(room, attempt):
                self._quiet(room, attempt)
            case Received(room, attempt, record):
                self._received(room, attempt, record)
            case ReceiverReady() | PromptStarted() | FirstTokens() | ReceiveFailed():
                if (request := self._current(event.room, event.attempt)) is not None:
                    self._goes_on(request, event, now)
            case Rebound() | ResumeLocally():
                self._redirected(event)
            case _:
                self.book.counters["late"] += 1  # the prefill side's

    def _goes_on(
        self,
        request: Request,
        event: ReceiverReady | PromptStarted | FirstTokens | ReceiveFailed,
        now: float,
    ) -> None:
        match event:
            case FirstTokens():
                request.spent.hears(Phase.TRANSFER, now)
                self._first_tokens(request, event)
            case PromptStarted():
                request.spent.hears(Phase.PREFILL, now)
                self.book.move(request, event)
            case ReceiveFailed():
                self._failed(request, event, now)
            case _:
                self.book.move(request, event)

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
        request.is_quiet = True
        if cause := _contradiction(request, record, self.limits):
            self._contradicted(request, cause)
        elif request.firsts:
            self._arrived(request, record)
        else:
            cached = 0 if request.said else record.cached_tokens
            self._base.say(request, record.token, record.logprob, cached)

    def _contradicted(self, request: Request, cause: str) -> None:
        self.book.counters["slots_refused"] += 1
        if request.has_told:
            self._resume(request)
        else:
            told = f"room {request.room} attempt {request.attempt}: {cause}"
            self.book.move(request, AttemptRefused(Problem.of(TransferFailed(told))))

    def _first_tokens(self, request: Request, event: FirstTokens) -> None:
        """They come once, ahead of their KV; when that was faster they are not needed."""
        is_early = self.limits.early_first_token and not request.is_trial
        is_due = request.state is State.TRANSFERRING and not request.firsts
        is_due = is_due and len(event.tokens) == request.sampling.n
        if not is_due or not (is_early or request.needs_firsts):
            self.book.counters["ignored"] += 1
            return
        firsts = _firsts_of(request, event)
        if not all(self._is_known(one) for one in firsts):
            self.book.counters["firsts_refused"] += 1  # what comes of it is the slot's to say
            return
        if is_early:
            self._base.tell(request, firsts, 0 if request.said else event.cached_tokens)
        else:
            self.book.move(request, FirstsKept(firsts))

    def _is_known(self, one: First) -> bool:
        return all(map(self.limits.is_known, (one.token, *(token for token, _ in one.top))))

    def _arrived(self, request: Request, record: SlotRecord) -> None:
        self.book.learn(request, len(request.tokens))
        if not request.has_told:
            cached = 0 if request.said else record.cached_tokens
            self._base.tell(request, request.firsts, cached)
        self._base.go_on(request)

    def _resume(self, request: Request) -> None:
        """Its client has tokens: it is computed again with them, and none is said twice.

        Of several sequences each on its own: their prompt is one no more.
        """
        elsewhere = self._base.is_computed_elsewhere(request) and not request.is_resuming
        for index in living(request.firsts)[1:]:
            other = branch(request, index, self.book.next_key())
            self.book.join(other)
            self.book.move(other, Returned() if elsewhere else Retracted())
        self.book.move(request, Returned() if elsewhere else FellBack())
        self.book.counters["resumed"] += 1

    def _failed(self, request: Request, event: ReceiveFailed, now: float) -> None:
        if request.is_resuming:
            self.book.move(request, FellBack())
        elif request.has_told and event.problem.is_retryable:
            self._resume(request)
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
        elif isinstance(event, Rebound) and (request.has_told or request.is_resuming):
            self.book.counters["ignored"] += 1  # it has tokens: it asks for itself
        elif isinstance(event, ResumeLocally) and not request.is_resuming:
            self.book.counters["ignored"] += 1  # no prompt is computed here unless policy says so
        else:
            self.book.move(request, event)


def _contradiction(request: Request, record: SlotRecord, limits: Limits) -> str:
    """Why this slot is not what was asked for; empty when it is."""
    if record.status != SLOT_COMPLETE or record.kv_len != len(request.tokens):
        return (
            f"the slot vouches for {record.kv_len} tokens (status {record.status}),"
            f" not {len(request.tokens)}"
        )
    if not limits.is_known(record.token):
        return f"the slot names token {record.token}, of a vocabulary of {limits.vocab}"
    if request.firsts and record.token != request.firsts[0].token:
        return f"the slot names token {record.token}, told was {request.firsts[0].token}"
    if request.needs_firsts and not request.firsts:
        return "no first tokens were told"
    return ""


def _firsts_of(request: Request, event: FirstTokens) -> tuple[First, ...]:
    tops = unpack_tops(event.tops, len(event.tokens))
    return tuple(
        first(request, token, logprob, top)
        for token, logprob, top in zip(event.tokens, event.logprobs, tops, strict=True)
    )
