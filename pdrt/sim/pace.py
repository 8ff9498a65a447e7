"""When workers step: by themselves, or all ranks of an instance together.

Between two messages a worker whose requests only go on does many steps as one (`Stretch`); a
message that comes in the middle settles what was done until then. What comes of it is the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from pdrt.sched.plan import Plan
from pdrt.sim.clock import Turn
from pdrt.sim.machine import Machine
from pdrt.sim.worker import Worker


@dataclass(slots=True)
class Stretch:
    """Steps that are done as one, unless somebody comes."""

    ends: list[float]


class Solo:
    """A worker that steps by itself. `most` steps are done as one; 0: each by itself."""

    def __init__(self, worker: Worker, machine: Machine, most: int) -> None:
        self._worker, self._machine, self._most = worker, machine, most
        self._is_busy = self._is_looking = False
        self._stretch: Stretch | None = None
        self._began = self._timer = 0.0
        self._eager, self._pause = 0, 0  # stretches pay where messages are rare
        worker.pace = self

    def wake(self, worker: Worker) -> None:
        if not (self._is_busy or self._is_looking):
            self._is_looking = True
            worker.clock.at(worker.clock.now, self._look, Turn.LOOK)

    def settle(self, worker: Worker) -> None:
        """What of a stretch is over by now is done; its next step is under way."""
        stretch = self._stretch
        if stretch is None:
            return
        self._stretch = None
        done = bisect_right(stretch.ends, worker.clock.now)
        self._learn(done)
        if done == len(stretch.ends):  # all of it, at this very moment
            worker.skip(stretch.ends)
            self._is_busy = False
            self.wake(worker)
            return
        began = stretch.ends[done - 1] if done else None
        if done:
            worker.skip(stretch.ends[:done])
        self._begin(worker.plan(self._began if began is None else began), stretch.ends[done])

    def _look(self) -> None:
        self._is_looking = False
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        worker = self._worker
        if self._most and self._stretches():
            return
        plan = worker.plan(worker.clock.now)
        if plan.is_for_device:
            self._is_busy = True
            self._machine.run(worker.seconds(plan), lambda: self._over(plan))
        else:
            self._rest()

    def _begin(self, plan: Plan, end: float) -> None:
        self._worker.clock.at(end, lambda: self._over(plan), Turn.DEVICE)

    def _over(self, plan: Plan) -> None:
        self._worker.commit(plan)
        self._is_busy = False
        self._next()

    def _rest(self) -> None:
        """Until something happens or a timer is due."""
        worker = self._worker
        due = worker.sched.next_timer()
        if due is not None and not worker.clock.now < self._timer <= due:
            self._timer = due
            worker.clock.at(due, lambda: self.wake(worker))

    # Stretches.

    def _stretches(self) -> bool:
        """Whether one has begun."""
        if self._pause:
            self._pause -= 1
            return False
        worker = self._worker
        now, count = worker.clock.now, worker.steady_steps(self._most)
        if count < 2:
            return False
        cohort = worker.book.cohort
        ends = worker.times.ends(now, len(cohort.members), cohort.context, count)
        if (due := worker.sched.next_timer()) is not None:
            ends = ends[: bisect_right(ends, due)]
        if len(ends) < 2:
            return False
        self._is_busy, self._began = True, now
        self._stretch = stretch = Stretch(ends)
        worker.clock.at(ends[-1], lambda: self._whole(stretch), Turn.DEVICE)
        return True

    def _whole(self, stretch: Stretch) -> None:
        if stretch is self._stretch:
            self._stretch = None
            self._learn(len(stretch.ends))
            self._worker.skip(stretch.ends)
            self._is_busy = False
            self._next()

    def _learn(self, done: int) -> None:
        """One that was of no use costs more than its steps: then none is tried for a while."""
        if done >= 3:
            self._eager = 0
        else:
            self._eager = min(self._eager + 1, 6)
            self._pause = 1 << self._eager


class Lockstep:
    """Ranks that exchange something in each step: one lasts as long as the longest of theirs.

    Who has nothing to do takes part all the same, so that a step of one is a step of all.
    """

    def __init__(self, workers: Sequence[Worker], machine: Machine, exchange_s: float) -> None:
        self._workers, self._machine = workers, machine
        # Of what each rank sends to all alike, this part goes to other ranks.
        self._exchange_s = exchange_s * (len(workers) - 1) / len(workers)
        self._clock = workers[0].clock
        self._is_busy = self._is_looking = False
        self._timer = 0.0
        self._left = 0
        for worker in workers:
            worker.pace = self

    def wake(self, worker: Worker) -> None:
        if not (self._is_busy or self._is_looking):
            self._is_looking = True
            self._clock.at(self._clock.now, self._look, Turn.LOOK)

    def settle(self, worker: Worker) -> None:
        """Each step is done by itself."""

    def _look(self) -> None:
        self._is_looking = False
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        planned = [(worker, worker.plan(self._clock.now)) for worker in self._workers]
        wanted = [(worker, plan) for worker, plan in planned if plan.is_for_device]
        if not wanted:
            self._rest()
            return
        self._is_busy, self._left = True, len(wanted)
        for worker, plan in wanted:
            self._machine.run(worker.seconds(plan), lambda: self._computed(wanted))

    def _computed(self, wanted: Sequence[tuple[Worker, Plan]]) -> None:
        self._left -= 1
        if not self._left:
            self._clock.after(self._exchange_s, lambda: self._over(wanted), Turn.DEVICE)

    def _over(self, wanted: Sequence[tuple[Worker, Plan]]) -> None:
        for worker, plan in wanted:
            worker.commit(plan)
        self._is_busy = False
        self._next()

    def _rest(self) -> None:
        timers = [worker.sched.next_timer() for worker in self._workers]
        due = min((timer for timer in timers if timer is not None), default=None)
        if due is not None and not self._clock.now < self._timer <= due:
            self._timer = due
            self._clock.at(due, self._look_again)

    def _look_again(self) -> None:
        self.wake(self._workers[0])
