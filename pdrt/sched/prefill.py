"""The prefill scheduler: compute prompts chunk by chunk for those who shook hands.

bootstrap_queue (waiting for handshakes) -> waiting_queue -> running chunks -> inflight_queue
(transfer not finished, blocks pinned) -> done. A full pool delays, it never spins: all blocks of
a prompt are taken before its first chunk, so that none waits half computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from pdrt.data.commands import ExpectHandshakes
from pdrt.data.events import SendEnded, SenderReady, SendFailed, TransferEvent
from pdrt.device.batch import Drawn
from pdrt.errors import TransferFailed
from pdrt.messages import Problem, Submit
from pdrt.sched.admission import Space
from pdrt.sched.book import Book, SchedStats
from pdrt.sched.effects import Effect
from pdrt.sched.events import (
    Cancelled,
    Computed,
    Delivered,
    Order,
    Prefilled,
    SendBroken,
)
from pdrt.sched.limits import Limits
from pdrt.sched.plan import Batch, Plan, sendable
from pdrt.sched.prefill_life import PREFILL
from pdrt.sched.request import Request, State, from_submit, prompt_hash
from pdrt.sched.sequences import drawn_firsts

QUEUES: Final = (
    ("bootstrap_queue", (State.BOOTSTRAPPING,)),
    ("waiting_queue", (State.QUEUED,)),
    ("inflight_queue", (State.INFLIGHT,)),
)


class PrefillDisaggScheduler:
    """Computes prompts for decode workers; the same shape as the others for the worker."""

    def __init__(self, limits: Limits, blocks: int) -> None:
        self.limits = replace(
            limits, reserved_tokens=0, adaptive_reserve=False
        )  # a prompt does not grow
        self.book = Book(PREFILL, self.limits, blocks, 0)

    @property
    def outbox(self) -> deque[Effect]:
        return self.book.outbox

    @property
    def is_idle(self) -> bool:
        """Whether no request is left and no transport reads a block."""
        return not self.book.requests and not self.book.quarantine

    def next_timer(self) -> float | None:
        """When `plan` must be called though nothing happens."""
        return self.book.timers.next()

    def drain(self) -> None:
        self.book.is_draining = True

    def stats(self) -> SchedStats:
        return self.book.stats(QUEUES)

    def submit(self, submit: Submit, now: float) -> None:
        """Raises BadRequest, TooLong, Conflict, Overloaded or Draining; then nothing is kept."""
        book = self.book
        book.now = now
        book.check_admissible(submit, self.limits.max_waiting)
        request = from_submit(submit, book.next_key(), (), now)
        self.limits.check_fits(request, len(request.tokens), book.blocks.total)
        request.state = State.BOOTSTRAPPING
        book.enter(request)
        digest = b"" if self.limits.is_blind else prompt_hash(request.packed())
        self.outbox.append(
            ExpectHandshakes(
                request.room, request.attempt, len(request.tokens), digest, request.deadline
            )
        )

    def feed(self, event: TransferEvent | Order, now: float) -> None:
        """Whatever happens outside comes in here, in any order, any number of times."""
        self.book.now = now
        book = self.book
        if isinstance(event, SendEnded) and book.release((event.room, event.attempt)):
            return  # it was told before; now its blocks are free
        request = book.rooms.get(event.room)
        if request is None:
            book.counters["late"] += 1
            return
        match event:
            case Cancelled():
                book.move(request, event)
            case SenderReady() | SendFailed() | SendEnded() if event.attempt != request.attempt:
                book.counters["stale"] += 1
            case SenderReady() | SendFailed():
                book.move(request, event)
            case SendEnded():
                self._ended(request, event)
            case _:
                book.counters["late"] += 1  # the decode side's

    def _ended(self, request: Request, event: SendEnded) -> None:
        if event.problem is None and request.state is State.INFLIGHT:
            self.book.counters["transfers"] += 1
            self.book.move(request, Delivered())
            return
        early = f"the transfer ended while the prompt was {request.state}"
        problem = event.problem or Problem.of(TransferFailed(early))
        self.book.move(request, SendBroken(problem))

    def plan(self, now: float) -> Plan:
        """Decide and reserve the next step. An empty batch means: wait for an event or timer."""
        self.book.now = now
        expired = self.book.expire(now)
        batch, running = Batch(self.limits), self.book.queues[State.RUNNING]
        batch.fill(running.values())
        granted = self._admit(len(running), batch.room)
        batch.fill(granted)
        return self.book.opened(Plan(batch.steps, len(granted), 0, expired))

    def _admit(self, running: int, prefill_tokens: int) -> list[Request]:
        book = self.book
        space = Space(
            blocks=book.blocks.free,
            slots=0,
            requests=self.limits.max_batch_size - running,
            prefill_tokens=prefill_tokens,
        )
        return book.admit(space)

    def commit(
        self, plan: Plan, drawn: Sequence[Drawn], now: float, _lost: Collection[int] = ()
    ) -> None:
        """Hand over what the device computed for those that are still there."""
        self.book.now = now
        computed = sum(len(step.tokens) for step in plan.batch)
        self.book.counters["prompt_tokens_computed"] += computed
        for request, step, one in self.book.results(plan, drawn):
            end = step.start + len(step.tokens)
            self.book.learn(request, end)
            if one is None:
                self.book.move(request, Computed(end, sendable(end, request.sent, self.limits)))
            else:
                self.book.move(request, Prefilled(drawn_firsts(request, one)))
