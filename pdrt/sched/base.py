"""The base scheduler: continuous batching with chunked prefill, all in one place (hybrid).

A step is plan, then execute (the worker's part), then commit. Plan reserves what it decides in
the same breath; commit looks again at who is still there. Pressure on memory makes requests
wait or start over with their tokens, it never ends one. The decode scheduler builds on this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from pdrt.data.events import TransferEvent
from pdrt.device.batch import Drawn
from pdrt.messages import Output, Submit, Top
from pdrt.sched.admission import Space, reserve
from pdrt.sched.answer_life import ANSWER
from pdrt.sched.book import Book, SchedStats
from pdrt.sched.effects import Effect, Say
from pdrt.sched.events import (
    Cancelled,
    Computed,
    Grown,
    LastToken,
    Order,
    Retracted,
    Returned,
    TokenOut,
)
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Plan, fit, prefill_budget, steps
from pdrt.sched.request import Request, State, from_submit

QUEUES: Final = (("waiting_queue", (State.QUEUED,)),)


class Scheduler:
    """Answers requests from their prompts; slots are for the decode scheduler, which adds them."""

    def __init__(
        self,
        limits: Limits,
        blocks: int,
        eos: Collection[int],
        *,
        slots: int = 0,
        max_held: int | None = None,
    ) -> None:
        self.limits = limits
        self.book = Book(ANSWER, limits, blocks, slots)
        self._eos = frozenset(eos)
        self._max_held = max_held or limits.max_batch_size

    @property
    def outbox(self) -> deque[Effect]:
        return self.book.outbox

    @property
    def is_idle(self) -> bool:
        """Whether no request is left; quarantined blocks do not count."""
        return not self.book.requests

    def next_timer(self) -> float | None:
        """When `plan` must be called though nothing happens."""
        return self.book.timers.next()

    def drain(self) -> None:
        self.book.is_draining = True

    def stats(self) -> SchedStats:
        return self.book.stats(QUEUES)

    def submit(self, submit: Submit, now: float) -> None:
        """Raises BadRequest, TooLong, Conflict, Overloaded or Draining; then nothing is kept."""
        self.accept(submit, now, State.QUEUED)

    def accept(self, submit: Submit, now: float, state: State) -> Request | None:
        """The new request in its first state; None when it was over before it began."""
        book = self.book
        book.check_admissible(submit, self.limits.max_waiting)
        request = from_submit(submit, book.next_key(), self._eos, now)
        length = request.prompt_tokens + request.sampling.max_tokens
        self.limits.check_fits(request, length, book.blocks.total)
        if finish := request.finished:
            book.outbox.append(
                Say(Output(room=request.room, attempt=request.attempt, finish=finish))
            )
            return None
        request.state = state
        if state is State.QUEUED:
            request.source = None  # nobody else computes it, now or later
        book.enter(request)
        return request

    def feed(self, event: TransferEvent | Order, _now: float) -> None:
        """A hybrid request hears of nothing but its cancellation."""
        request = self.book.rooms.get(event.room)
        if request is None or not isinstance(event, Cancelled):
            self.book.counters["late"] += 1
            return
        self.book.move(request, event)

    def plan(self, now: float) -> Plan:
        """Decide and reserve the next step. An empty batch means: wait for an event or timer."""
        book = self.book
        expired = book.expire(now)
        runners, free = book.queues[State.RUNNING].values(), book.blocks.free
        fitting = fit(runners, free, book.blocks.owners, self.limits)
        for request in fitting.retract:
            self._retract(request)
        for request in fitting.grow:
            blocks = book.blocks.take(1)
            assert blocks is not None
            book.move(request, Grown(blocks))
        granted = [] if fitting.retract else self._admit(fitting.step)
        steppers = [*fitting.step, *(r for r in granted if r.state is State.RUNNING)]
        batch = steps(steppers[: self.limits.max_batch_size], self.limits)
        return book.opened(Plan(batch, len(granted), len(fitting.retract), expired))

    def commit(self, plan: Plan, drawn: Sequence[Drawn], _now: float) -> None:
        """Apply what the device computed to those that are still there."""
        self.book.counters["prompt_tokens_computed"] += plan.prompt_tokens
        for request, step, one in self.book.results(plan, drawn):
            if one is None:
                end = step.start + len(step.tokens)
                self.book.learn(request, end)
                self.book.move(request, Computed(end))
            else:
                cached = 0 if request.said else request.cached_tokens
                self.say(request, one.token, one.logprob, cached, one.top)

    def say(
        self,
        request: Request,
        token: int,
        logprob: float,
        cached_tokens: int = 0,
        top: Top = (),
    ) -> None:
        """Its next token, which may be its last; the KV of those before is there."""
        self.book.learn(request, len(request.tokens))
        finish = request.finish_with(token)
        if finish is None:
            self.book.move(request, TokenOut(token, logprob, cached_tokens, top))
        else:
            self.book.move(request, LastToken(token, logprob, finish, cached_tokens, top))

    def is_computed_elsewhere(self, request: Request) -> bool:
        """Whether the prefill side is asked when its KV is lost."""
        return request.source is not None and self.limits.retraction == "reprefill"

    def _retract(self, request: Request) -> None:
        self.book.counters["retractions"] += 1
        elsewhere = self.is_computed_elsewhere(request)
        self.book.move(request, Returned() if elsewhere else Retracted())

    def _admit(self, running: Iterable[Request]) -> list[Request]:
        book, limits = self.book, self.limits
        if not book.line or not book.blocks.free:
            return []
        holders = (State.RUNNING, State.TRANSFERRING)
        held = sum(len(book.queues[s]) for s in holders)
        reserved = sum(reserve(r, limits) for s in holders for r in book.queues[s].values())
        space = Space(
            blocks=book.blocks.free - reserved,
            slots=book.slots.free,
            requests=self._max_held - held,
            prefill_tokens=prefill_budget(running, limits),
        )
        return book.admit(space)
