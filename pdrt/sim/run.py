"""One simulation: a cost file, an arrangement and a load in, what clients saw out."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pdrt.config import PolicySection
from pdrt.sim.arrangement import Arrangement
from pdrt.sim.clock import Clock
from pdrt.sim.cluster import Ground, How, Leader, leaders_of
from pdrt.sim.cost import Cost
from pdrt.sim.front import Router
from pdrt.sim.machine import Front, machine_of
from pdrt.sim.tally import Good, Tally
from pdrt.sim.wire import Wire
from pdrt.sim.workload import Workload

_POLICY: Final = PolicySection()
_GOOD: Final = Good()
_FAST: Final = How()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What clients saw, and what was left when the last one had left."""

    arrangement: Arrangement
    tally: Tally
    leaders: tuple[Leader, ...]
    events: int  # of the virtual clock
    steps: int  # of all workers
    moved_blocks: int
    retractions: int

    def point(self) -> dict[str, object]:
        """As `pdrt bench serve --json`, with what a sweep adds but for the lengths."""
        return {
            "layout": self.arrangement.name,
            "workers": self.arrangement.workers,
            **self.tally.point(),
            "retractions": self.retractions,
        }


def simulate(
    cost: Cost,
    arrangement: Arrangement,
    workload: Workload,
    *,
    policy: PolicySection = _POLICY,
    good: Good = _GOOD,
    how: How = _FAST,
) -> Outcome:
    """All of the load, to its end. Settings other than the file's are a changed copy of `cost`."""
    clock = Clock()
    machine = machine_of(cost.machine, clock)
    tally = Tally(good, cost.request.token_ms * 1e-3)
    router = Router(clock, cost.request, tally, seed=len(workload.requests))
    wire = Wire(clock, cost, machine)
    leaders = leaders_of(arrangement, Ground(clock, machine, cost, router, how))
    router.connect(leaders, wire, Front(machine), policy)
    router.serve(workload)
    with _no_collections():
        clock.run()
    counters = Counter[str]()
    for worker in (worker for leader in leaders for worker in leader.workers):
        counters.update(worker.book.counters)
        counters["steps"] += worker.steps
    return Outcome(
        arrangement,
        tally,
        tuple(leaders),
        clock.events,
        counters["steps"],
        wire.moved_blocks,
        counters["retractions"],
    )


@contextmanager
def _no_collections() -> Iterator[None]:
    """Reference counts free what is over; walking all that lives would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def changed(cost: Cost, **instance: int | bool | str) -> Cost:
    """The same machine with other settings of its schedulers, such as max_prefill_tokens."""
    tables = cost.model_dump()
    tables["instance"] |= instance
    return Cost.model_validate(tables)
