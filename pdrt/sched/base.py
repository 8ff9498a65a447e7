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
from pdrt.data.layout import blocks_for
from pdrt.device.batch import Drawn
from pdrt.device.moves import Moves
from pdrt.errors import BadRequest
from pdrt.messages import Finish, Output, Submit, Top
from pdrt.sched.admission import Space
from pdrt.sched.answer_life import ANSWER
from pdrt.sched.book import Book, SchedStats
from pdrt.sched.effects import Effect, Say
from pdrt.sched.events import (
    Arrived,
    Cancelled,
    Computed,
    EndedEarly,
    FirstsTold,
    FirstStopped,
    Grown,
    LastToken,
    Order,
    Retracted,
    Returned,
    Stopped,
    Swapped,
    TokenOut,
)
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Batch, Plan, fit
from pdrt.sched.request import First, Request, State, from_submit
from pdrt.sched.sequences import branch, drawn_firsts, living, resumed
from pdrt.sched.spent import Phase
from pdrt.sched.steady import Cohort, advance, begin, grow, prepare, skip, steady_steps

_COPY_GAIN: Final = 4  # so much faster, about, is KV copied to the host and back than computed
QUEUES: Final = (("waiting_queue", (State.QUEUED, State.SWAPPED)),)


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
        assert not (limits.is_blind and limits.prefix_cache), "a cache needs the tokens"
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
        if submit.said:
            self.resume(submit, now)
        else:
            self.accept(submit, now, State.QUEUED)

    def accept(self, submit: Submit, now: float, state: State) -> Request | None:
        """The new request in its first state; None when it was over before it began."""
        request = self._checked(submit, now)
        if finish := request.finished:
            self._over(request, finish)
            return None
        request.state = state
        if state is State.QUEUED:
            request.source = None  # nobody else computes it, now or later
        self.book.enter(request)
        return request

    def resume(self, submit: Submit, now: float) -> None:
        """Go on with what another instance began: each sequence as one that was retracted.

        Raises as `submit` does.
        """
        book, whole = self.book, self._checked(submit, now)
        begun = [resumed(whole, said, book.next_key()) for said in submit.said]
        indices = {one.index for one in begun}
        if len(indices) < len(begun) or max(indices) >= submit.sampling.n:
            raise BadRequest(f"said: of {submit.sampling.n} sequences there are {sorted(indices)}")
        for one in begun:
            self.limits.check_fits(one, len(one.tokens), book.blocks.total)
        for one in begun:
            if finish := one.finished:
                self._over(one, finish)
            else:
                book.enter(one)
                book.move(one, Retracted() if one.source is None else Returned())
        book.counters["taken_over"] += 1

    def _checked(self, submit: Submit, now: float) -> Request:
        book = self.book
        book.now = now
        book.check_admissible(submit, self.limits.max_waiting)
        request = from_submit(submit, book.next_key(), self._eos, now)
        length = request.prompt_tokens + request.sampling.max_tokens
        self.limits.check_fits(request, length, book.blocks.total)
        return request

    def _over(self, request: Request, finish: Finish) -> None:
        said = Output(
            room=request.told_as, index=request.index, attempt=request.attempt, finish=finish
        )
        self.book.outbox.append(Say(said))

    def feed(self, event: TransferEvent | Order, now: float) -> None:
        """A hybrid request hears of nothing but that it is not wanted any more."""
        self.book.now = now
        members = self.book.members(event.room)
        if isinstance(event, Stopped):
            self._stop(members, event)
        elif members and isinstance(event, Cancelled):
            self.book.move(members[0], event)  # a problem of one ends them all
        else:
            self.book.counters["late"] += 1

    def _stop(self, members: Iterable[Request], event: Stopped) -> None:
        for request in members:
            if request.sampling.n > 1 and request.has_told:  # they have not branched off yet
                if event.index in living(request.firsts):
                    self.book.move(request, FirstStopped(event.index))
                    self._end_if_over(request)
                    return
            elif request.sampling.n == 1 and request.index == event.index:
                self.book.move(request, event)
                return
        self.book.counters["late"] += 1

    def plan(self, now: float) -> Plan:
        """Decide and reserve the next step. An empty batch means: wait for an event or timer."""
        book = self.book
        book.now = now
        expired = book.expire(now)
        if self.steady_steps(1):  # nothing is to be decided
            begin(book)
            cohort = book.cohort
            return book.opened(
                Plan(expired=expired, steady=len(cohort.members), context=cohort.context)
            )
        self._own_what_is_left()
        prepare(book)
        runners, free = book.queues[State.RUNNING].values(), book.blocks.free
        fitting = fit(runners, free, book.blocks.owners, self.limits)
        for request in fitting.retract:
            self._retract(request)
        blocks = book.blocks.take(len(fitting.grow))
        assert blocks is not None
        if self.limits.is_blind:
            grow(book, fitting.grow, blocks)
        else:
            for request, block in zip(fitting.grow, blocks, strict=True):
                book.move(request, Grown((block,)))
        batch = Batch(self.limits, self._cohort_of(fitting.step))
        batch.fill(fitting.step)
        granted = [] if fitting.retract else self._admit(batch.room)
        seats = self.limits.max_batch_size - len(fitting.step)
        if granted:
            batch.fill([r for r in granted if r.state is State.RUNNING][:seats])
        retracted, moves = len(fitting.retract), book.host.pop_moves()
        steps, cohort = batch.steps, book.cohort
        return book.opened(
            Plan(
                steps,
                granted=len(granted),
                retracted=retracted,
                expired=expired,
                moves=moves,
                steady=len(cohort.members),
                context=cohort.context,
            )
        )

    def _cohort_of(self, batch: Sequence[Request]) -> Cohort | None:
        """Who counts those that are steady; nobody where some of them are not in the batch."""
        if not self.limits.is_blind:
            return None
        if len(batch) == len(self.book.queues[State.RUNNING]):
            return self.book.cohort
        self.book.cohort.disperse()
        return None

    def commit(
        self, plan: Plan, drawn: Sequence[Drawn], now: float, lost: Collection[int] = ()
    ) -> None:
        """Apply what the device computed to those that are still there.

        `lost` are the keys of those whose KV could not be moved.
        """
        self.book.now = now
        self.book.counters["prompt_tokens_computed"] += plan.prompt_tokens
        self._moved(plan.moves, lost)
        if plan.steady:
            advance(self.book, plan.steady)
        for request, step, one in self.book.results(plan, drawn, lost):
            if one is None:
                end = step.start + len(step.tokens)
                self.book.learn(request, end)
                self.book.move(request, Computed(end))
            elif request.sampling.n > 1:
                self.book.learn(request, len(request.tokens))
                self.tell(request, drawn_firsts(request, one), request.cached_tokens)
                self.go_on(request)
            else:
                cached = request.cached_tokens
                cached = cached if cached and not request.said else 0
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
        if request.spent.phase is not Phase.DECODE:
            request.spent.says(self.book.now)
        finish = request.finish_with(token)
        if finish is None:
            self.book.move(request, TokenOut(token, logprob, cached_tokens, top))
        else:
            self.book.move(request, LastToken(token, logprob, finish, cached_tokens, top))

    def tell(self, request: Request, firsts: tuple[First, ...], cached_tokens: int) -> None:
        """Say the first token of each of its sequences; it may be over then."""
        self.book.move(request, FirstsTold(firsts, cached_tokens))
        self._end_if_over(request)

    def _end_if_over(self, request: Request) -> None:
        if not living(request.firsts):
            self.book.move(request, EndedEarly())

    def go_on(self, request: Request) -> None:
        """Its prompt's KV is here and its first tokens are said: from now on n requests run."""
        if request.state is State.DONE:
            return
        request.spent.enter(Phase.FIRST_DECODE, self.book.now)
        is_partly_filled = len(request.tokens) % self.limits.block_size > 0
        for index in living(request.firsts)[1:]:
            key, blocks = self.book.next_key(), request.blocks
            self.book.join(branch(request, index, key, blocks, borrows=is_partly_filled))
        self.book.move(request, Arrived())

    def steady_steps(self, most: int) -> int:
        """How many of the next steps, up to `most`, are the same as `skip` makes of them."""
        return steady_steps(self.book, self._max_held, most)

    def skip(self, steps: int) -> None:
        """As so many times `plan` and `commit`; no more than `steady_steps` said."""
        skip(self.book, steps)

    def _own_what_is_left(self) -> None:
        """A borrowed block that nobody else has any more needs no copy."""
        pool = self.book.blocks
        if not self.book.groups:
            return
        for request in self.book.queues[State.RUNNING].values():
            if request.borrows and pool.owners(request.blocks[-1]) == 1:
                pool.forget(request.blocks[-1:])
                request.borrows = False
                self.book.weigh(request)

    def is_computed_elsewhere(self, request: Request) -> bool:
        """Whether the prefill side is asked when its KV is lost."""
        return request.source is not None and self.limits.retraction != "local"

    def _retract(self, request: Request) -> None:
        how = "copy" if self._swap(request) else self._give_up(request)
        self.book.counters["retractions"] += 1
        self.book.counters[f"retractions_{how}"] += 1

    def _swap(self, request: Request) -> bool:
        """Keep its KV in host memory, if there is any and if it is wanted."""
        if self.limits.retraction != "copy" or not request.computed or request.copy_from >= 0:
            return False
        places = self.book.host.take(blocks_for(request.computed, self.limits.block_size))
        if places is None:
            self.book.counters["host_blocks_full"] += 1
            return False
        self.book.move(request, Swapped(places))
        self.book.reserve.lost(len(request.tokens) // _COPY_GAIN)
        return True

    def _give_up(self, request: Request) -> str:
        """Its KV is lost and will be computed again; where."""
        self.book.reserve.lost(len(request.tokens))
        elsewhere = self.is_computed_elsewhere(request)
        self.book.move(request, Returned() if elsewhere else Retracted())
        return "reprefill" if elsewhere else "local"

    def _moved(self, moves: Moves, lost: Collection[int]) -> None:
        """What came back from host memory is known again; who lost its KV goes the other way."""
        requests = self.book.requests
        for key in lost:
            self.book.counters["host_copies_failed"] += 1
            if (request := requests.get(key)) is not None:
                self._give_up(request)
        for move in moves.loads:
            request = requests.get(move.key)
            if request is not None and move.key not in lost:
                self.book.learn(request, request.computed, known=0)

    def _admit(self, prefill_tokens: int) -> list[Request]:
        book = self.book
        if not book.line:
            return []
        book.reserve.waited()
        return book.admit(
            Space(
                blocks=book.blocks.free - book.reserved,
                slots=book.slots.free,
                requests=self._max_held - book.seats,
                prefill_tokens=prefill_tokens,
            )
        )
