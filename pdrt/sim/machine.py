"""Who computes: each worker on a device of its own, or all on a few cores that they share.

Shared cores are given out evenly: of four that are busy on two cores each runs at half speed, so
that whoever begins or ends changes when the others end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pdrt.sim.clock import Call, Clock, Turn
from pdrt.sim.cost import MachineCost

_DUST: Final = 1e-12  # seconds of work: less is done


class Machine(Protocol):
    def run(self, seconds: float, done: Call, *, is_step: bool = True) -> None:
        """`done` is called when so much work is done that began now."""
        ...


class OwnDevices:
    """Nobody waits for anybody."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, seconds: float, done: Call, *, is_step: bool = True) -> None:
        self._clock.after(seconds, done, Turn.DEVICE)


@dataclass(slots=True, eq=False)
class _Job:
    left: float
    is_step: bool
    done: Call


class SharedCores:
    """Processor sharing; steps that run at once also slow each other down by `crowd`."""

    def __init__(self, clock: Clock, cost: MachineCost) -> None:
        self._clock, self._cores, self._crowd = clock, cost.cores, cost.crowd
        self._jobs: list[_Job] = []
        self._since = 0.0
        self._version = 0

    def run(self, seconds: float, done: Call, *, is_step: bool = True) -> None:
        self._work()
        self._jobs.append(_Job(seconds, is_step, done))
        self._plan()

    def _rates(self) -> tuple[float, float]:
        """Of steps and of other work."""
        share = min(1.0, self._cores / len(self._jobs))
        steps = sum(job.is_step for job in self._jobs)
        return share / factor(self._crowd, steps), share

    def _work(self) -> None:
        """What was done since somebody last came or left."""
        passed, self._since = self._clock.now - self._since, self._clock.now
        if self._jobs:
            steps, others = self._rates()
            for job in self._jobs:
                job.left -= passed * (steps if job.is_step else others)

    def _plan(self) -> None:
        self._version += 1
        if not self._jobs:
            return
        steps, others = self._rates()
        soonest = min(job.left / (steps if job.is_step else others) for job in self._jobs)
        version = self._version
        self._clock.after(max(soonest, 0.0), lambda: self._ended(version), Turn.DEVICE)

    def _ended(self, version: int) -> None:
        if version != self._version:
            return
        self._work()
        least = min(job.left for job in self._jobs)
        over = [job for job in self._jobs if job.left <= max(_DUST, least)]
        self._jobs = [job for job in self._jobs if job not in over]
        self._plan()
        for job in over:
            job.done()


def factor(crowd: Sequence[tuple[int, float]], busy: int) -> float:
    """How many times as long a step takes with so many at once: a line between what is known."""
    before = (1, 1.0)
    for count, times in crowd:
        if busy <= count:
            share = (busy - before[0]) / (count - before[0]) if count > before[0] else 1.0
            return before[1] + (times - before[1]) * max(0.0, share)
        before = (count, times)
    return before[1]


class Front:
    """One process through which all requests and tokens pass: one piece of work at a time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._waiting: deque[tuple[float, Call]] = deque()
        self._is_busy = False

    def run(self, seconds: float, done: Call) -> None:
        """`done` is called at once when there is nothing to do for it."""
        if not seconds and not self._is_busy:
            done()
            return
        self._waiting.append((seconds, done))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._waiting:
            seconds, done = self._waiting.popleft()
            self._machine.run(seconds, lambda: self._ended(done), is_step=False)

    def _ended(self, done: Call) -> None:
        done()
        self._next()


def machine_of(cost: MachineCost, clock: Clock) -> Machine:
    return SharedCores(clock, cost) if cost.cores else OwnDevices(clock)
