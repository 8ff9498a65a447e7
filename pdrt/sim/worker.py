"""A worker on virtual time: the real scheduler, stepped as in `pdrt.worker`.

What happens meanwhile is told to the scheduler at once and planned with when the step has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from pdrt.data.commands import TransferCommand
from pdrt.data.events import TransferEvent
from pdrt.device.batch import Drawn
from pdrt.errors import PdrtError
from pdrt.messages import AskPrefill, Output, Submit
from pdrt.sched.base import Scheduler
from pdrt.sched.book import Book
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.effects import Say
from pdrt.sched.events import Order
from pdrt.sched.plan import Plan
from pdrt.sched.prefill import PrefillDisaggScheduler
from pdrt.sched.request import State
from pdrt.sim.clock import Clock
from pdrt.sim.steps import StepTimes, work_of

AnyScheduler: TypeAlias = Scheduler | DecodeDisaggScheduler | PrefillDisaggScheduler
_TOKEN: Final = 7  # whatever is drawn; nobody reads it


class Around(Protocol):
    """Everything outside a worker's scheduler and device."""

    def carry(self, worker: Worker, effect: TransferCommand | AskPrefill) -> None: ...

    def said(self, worker: Worker, outputs: Sequence[Output]) -> None: ...

    def went_on(self, worker: Worker, steady: Steady) -> None:
        """Requests that have one token more each, or several."""
        ...


class Paced(Protocol):
    """Who decides when a worker plans: itself, or its group."""

    def wake(self, worker: Worker) -> None:
        """It has been told something."""
        ...

    def settle(self, worker: Worker) -> None:
        """It is about to be told something."""
        ...


@dataclass(slots=True)  # not frozen: one for each step
class Steady:
    """Tokens that came at each of `ends`; `since`: the ones before, of all of them, if that is."""

    rooms: Sequence[int]
    ends: Sequence[float]
    since: float | None


class Worker:
    """One scheduler; `pace` is set once, by whoever paces it."""

    def __init__(
        self, name: str, clock: Clock, sched: AnyScheduler, times: StepTimes, around: Around
    ) -> None:
        self.name, self.clock, self.sched, self.times = name, clock, sched, times
        self._around = around
        self.pace: Paced
        self.steps = 0
        self._ended = 0.0  # the last step
        self._left_out = False  # somebody who decodes was not in it
        self._is_crowded = False  # the same of the step that was planned last

    @property
    def book(self) -> Book:
        return self.sched.book

    # What it is told.

    def submit(self, message: Submit) -> PdrtError | None:
        """Why it is refused, if it is."""
        self.pace.settle(self)
        try:
            self.sched.submit(message, self.clock.now)
        except PdrtError as error:
            return error
        self._moved()
        return None

    def feed(self, event: TransferEvent | Order) -> None:
        self.pace.settle(self)
        self.sched.feed(event, self.clock.now)
        self._moved()

    def _moved(self) -> None:
        self._carry_out()
        self.pace.wake(self)

    # Steps.

    def plan(self, at: float) -> Plan:
        plan = self.sched.plan(at)
        running = len(self.book.queues[State.RUNNING])
        self._is_crowded = running > self.sched.limits.max_batch_size
        if not plan.is_for_device:
            self._left_out = running > 0
        self._carry_out()
        return plan

    def seconds(self, plan: Plan) -> float:
        return self.times.of(work_of(plan))

    def commit(self, plan: Plan) -> None:
        now = self.clock.now
        drawn = [Drawn(step.key, _TOKEN, -0.5) for step in plan.batch if step.draw is not None]
        rooms = self.book.cohort.rooms if plan.steady else ()
        self.sched.commit(plan, drawn, now)
        self.steps += 1
        if rooms:
            since = None if self._left_out else self._ended
            self._around.went_on(self, Steady(rooms, (now,), since))
        self._carry_out()
        self._ended = now
        self._left_out = self._is_crowded

    def steady_steps(self, most: int) -> int:
        if self._left_out or isinstance(self.sched, PrefillDisaggScheduler):
            return 0
        return self.sched.steady_steps(most)

    def skip(self, ends: Sequence[float]) -> None:
        """Steps that have ended at these times."""
        assert not isinstance(self.sched, PrefillDisaggScheduler)
        rooms = self.book.cohort.rooms
        self.sched.skip(len(ends))
        self.steps += len(ends)
        self._around.went_on(self, Steady(rooms, ends, self._ended))
        self._ended = ends[-1]

    def _carry_out(self) -> None:
        outbox = self.sched.outbox
        if not outbox:
            return
        said: list[Output] = []
        while outbox:
            effect = outbox.popleft()
            if isinstance(effect, Say):
                said.append(effect.output)
            else:
                self._around.carry(self, effect)
        if said:
            self._around.said(self, said)
