"""Steps that are done as one, and whoever comes in the middle of them or at their very end."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.data.commands import TransferCommand
from pdrt.messages import AskPrefill, Output, Sampling, Submit
from pdrt.sched.events import Cancelled
from pdrt.sim.clock import Clock, Turn
from pdrt.sim.cluster import Ground
from pdrt.sim.machine import OwnDevices
from pdrt.sim.worker import Steady, Worker
from tests.sim.loads import cost

ASKED = 30  # tokens


class Seen:
    """What is outside a worker: it notes the ends of the worker's stretches."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.told = 0

    def carry(self, worker: Worker, effect: TransferCommand | AskPrefill) -> None:
        raise AssertionError("nothing moves here")

    def said(self, worker: Worker, outputs: Sequence[Output]) -> None:
        self.told += sum(len(one.tokens) for one in outputs)

    def went_on(self, worker: Worker, steady: Steady) -> None:
        self.told += len(steady.rooms) * len(steady.ends)
        if len(steady.ends) > 1:
            self.ends.append(steady.ends[-1])


def served(*visits: float) -> tuple[Seen, Clock, Worker]:
    """One request, while somebody is heard of at these times, before anything else of them."""
    clock, seen = Clock(), Seen()
    worker = Ground(clock, OwnDevices(clock), cost(), seen).leader("h0", "hybrid", 1).workers[0]
    for visit in visits:
        clock.at(visit, lambda: worker.feed(Cancelled(99, "of another room")), Turn.DEVICE)
    sampling = Sampling(max_tokens=ASKED, temperature=0.0, ignore_eos=True)
    prompt = bytes(4 * 8)
    request = Submit(
        room=1,
        attempt=0,
        request_id="",
        tokens=prompt,
        prompt_tokens=8,
        sampling=sampling,
        time_left=60.0,
    )
    assert worker.submit(request) is None
    clock.run()
    return seen, clock, worker


def test_who_comes_at_the_very_end_of_a_stretch_changes_nothing() -> None:
    alone, clock, worker = served()
    assert alone.told == ASKED
    assert alone.ends
    for visit in (alone.ends[0], alone.ends[0] * 0.7):
        seen, its_clock, its_worker = served(visit)
        assert seen.told == ASKED
        assert its_clock.now == clock.now
        assert its_worker.steps == worker.steps
        assert not its_worker.book.requests
