"""What a scheduler spends on a step, without device and sockets: time of this thread alone.

The load is steady: answers end and others begin in every step, memory is what limits them, and as
many as asked for wait in line.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from pdrt import garbage
from pdrt.bench.facts import machine_facts
from pdrt.bench.shell import Report, write_points
from pdrt.data.commands import AdmitReceiver, ExpectHandshakes, OpenReceiver, SendBlocks
from pdrt.data.events import (
    SLOT_COMPLETE,
    Received,
    ReceiverReady,
    SendEnded,
    SenderReady,
    SlotRecord,
    TransferEvent,
)
from pdrt.device.batch import Drawn, SeqStep
from pdrt.messages import Sampling, Source, Submit, pack_ids
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.effects import Effect
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler

ROLES: Final = ("hybrid", "decode", "prefill")
WAITING: Final = (0, 100, 10_000)
RUNNING: Final = (64, 512)
PROMPT: Final = 64
OUTPUT: Final = 200
_SOURCE: Final = Source(host="127.0.0.1", port=18800, dp_rank=0)
_BLOCK: Final = 16
_NEED: Final = 15  # blocks of one that is half through, and its reserve
AnyScheduler = Scheduler | DecodeDisaggScheduler | PrefillDisaggScheduler


@dataclass(frozen=True, slots=True)
class Point:
    """Microseconds of one step; `running` is what ran on average."""

    scheduler: str
    waiting: int
    running: int
    plan_p50_us: float
    plan_p99_us: float
    commit_p50_us: float
    commit_p99_us: float


class Load:
    """One scheduler under a steady load."""

    def __init__(self, role: str, waiting: int, running: int, output: int = OUTPUT) -> None:
        self._waiting, self._wanted, self._output = waiting, running, output
        self._rooms = count(1)
        self._flying: list[TransferEvent] = []  # prefill: transfers that are still to end
        self.sched = _scheduler(role, waiting, running)
        for number in range(running):
            self._submit(1 + output * number // running)
        self._fill()

    @property
    def running(self) -> int:
        return self.sched.stats().running + len(self._flying)

    def steps(self, number: int) -> Iterator[tuple[float, float, int]]:
        """Seconds to plan and to commit, and how many ran."""
        for _ in range(number):
            began = time.thread_time()
            plan = self.sched.plan(0.0)
            planned = time.thread_time() - began
            self._carry_out()
            drawn = _drawn(plan.batch)
            running = self.running
            began = time.thread_time()
            if plan.batch:
                self.sched.commit(plan, drawn, 0.0)
            committed = time.thread_time() - began
            self._carry_out()
            self._fill()
            yield planned, committed, running

    def _fill(self) -> None:
        """As many in line as are to be, and someone who takes the place of those that ended."""
        book = self.sched.book
        while len(book.line) < self._waiting or len(book.requests) < self._wanted:
            self._submit(self._output)

    def _submit(self, max_tokens: int) -> None:
        room = next(self._rooms)
        tokens = [room % 50_000 + place for place in range(PROMPT)]
        submit = Submit(
            room=room,
            attempt=0,
            request_id="",
            tokens=pack_ids(tokens),
            prompt_tokens=PROMPT,
            sampling=Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            time_left=86_400.0,
            source=_SOURCE,
        )
        self.sched.submit(submit, 0.0)
        self._carry_out()

    def _carry_out(self) -> None:
        """The other side answers at once, but transfers of prompts take a while."""
        outbox = self.sched.outbox
        while outbox:
            for event in self._answers(outbox.popleft()):
                self.sched.feed(event, 0.0)
        while len(self._flying) > self._wanted - 8:
            self.sched.feed(self._flying.pop(0), 0.0)

    def _answers(self, effect: Effect) -> Iterable[TransferEvent]:
        match effect:
            case OpenReceiver(room, attempt):
                return (ReceiverReady(room, attempt),)
            case ExpectHandshakes(room, attempt):
                return (SenderReady(room, attempt, 0),)
            case AdmitReceiver(room, attempt):
                record = SlotRecord(room, attempt, SLOT_COMPLETE, effect.prompt_tokens, 0, 7, -0.5)
                return (Received(room, attempt, record),)
            case SendBlocks(room, attempt) if effect.last is not None:
                self._flying.append(SendEnded(room, attempt, None))
        return ()


def _scheduler(role: str, waiting: int, running: int) -> AnyScheduler:
    limits = Limits(
        block_size=_BLOCK, max_batch_size=running + 16, max_waiting=waiting + 2 * running
    )
    blocks = _NEED * running
    match role:
        case "prefill":
            return PrefillDisaggScheduler(limits, (running + 16) * PROMPT // _BLOCK)
        case "decode":
            return DecodeDisaggScheduler(limits, blocks, 2 * running, ())
        case _:
            return Scheduler(limits, blocks, ())


def _drawn(batch: Sequence[SeqStep]) -> list[Drawn]:
    return [Drawn(step.key, 7, -0.5) for step in batch if step.draw is not None]


def point(role: str, waiting: int, running: int, steps: int) -> Point:
    """One row, after a warm-up that brings the load to what it stays at."""
    load = Load(role, waiting, running)
    for _ in load.steps(OUTPUT + 20):
        pass
    plans, commits, ran = zip(*load.steps(steps), strict=True)
    mean = round(sum(ran) / len(ran))
    return Point(role, waiting, mean, *_quantiles(plans), *_quantiles(commits))


def _quantiles(took: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(took)
    return ordered[len(ordered) // 2] * 1e6, ordered[int(0.99 * len(ordered))] * 1e6


def scheduler(steps: int, report: Report, console: Console) -> int:
    """Measure all and report; the exit status. Raises ConfigError."""
    report.check()
    garbage.settle_for_steps()  # as a worker
    found = [
        point(role, waiting, running, steps)
        for role in ROLES
        for running in RUNNING
        for waiting in WAITING
    ]
    machine = machine_facts()
    if not report.is_quiet:
        console.print(_table(found))
        console.print("; ".join(f"{name} {value}" for name, value in machine.items()), style="dim")
    if report.json_file:
        write_points(report.json_file, [asdict(one) | {"machine": machine} for one in found])
    return 0


def _table(points: Sequence[Point]) -> Table:
    title = "one step of a scheduler, microseconds of CPU time"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("scheduler", "waiting", "running", "plan", "p99", "commit", "p99"):
        table.add_column(name, justify="left" if name == "scheduler" else "right")
    for one in points:
        times = (one.plan_p50_us, one.plan_p99_us, one.commit_p50_us, one.commit_p99_us)
        cells = (f"{value:,.0f}" for value in times)
        table.add_row(one.scheduler, f"{one.waiting:,}", str(one.running), *cells)
    return table
