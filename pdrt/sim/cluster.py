"""The instances of an arrangement: real schedulers, one dispatcher where ranks are several.

What a leader tells its router (its load, whether it is full) is told as in `pdrt.control.figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from pdrt.config import Role
from pdrt.control.dispatch import DPDispatcher
from pdrt.control.told import LoadTold
from pdrt.errors import PdrtError
from pdrt.messages import KvLayout, Output, Outputs, Problem, Process, Rank, Ready, Submit, ToWorker
from pdrt.sched.base import Scheduler
from pdrt.sched.decode import DecodeDisaggScheduler
from pdrt.sched.limits import Limits
from pdrt.sched.prefill import PrefillDisaggScheduler
from pdrt.sim.arrangement import Arrangement
from pdrt.sim.clock import Clock
from pdrt.sim.cost import Cost
from pdrt.sim.machine import Machine
from pdrt.sim.pace import Lockstep, Solo
from pdrt.sim.steps import StepTimes
from pdrt.sim.worker import AnyScheduler, Around, Worker

_SLOTS: Final = 512  # as [transfer] slots
_UNSERVED: Final = ("bootstrap_queue", "prealloc_queue", "waiting_queue")
_MOST_STEPS: Final = 256  # that are done as one
_READY: Final = Ready(
    endpoint="sim",
    process=Process(host="sim", pid=1, started=0),
    layout=KvLayout(block_size=1, dtype="uint8", layers=1, kv_heads=1, head_dim=1),
    blocks=1,
    eos_token_ids=(),
)


@dataclass(frozen=True, slots=True)
class How:
    """`is_stepwise`: every step and token by itself, as the real worker; slow, for tests."""

    is_stepwise: bool = False


def limits_of(cost: Cost, how: How) -> Limits:
    own = cost.instance
    return Limits(
        block_size=own.block_size,
        max_batch_size=own.max_batch_size,
        max_prefill_tokens=own.max_prefill_tokens,
        reserved_tokens=own.reserved_tokens,
        adaptive_reserve=own.adaptive_reserve,
        max_waiting=own.max_waiting,
        retraction=own.retraction,
        chunked=own.chunked,
        early_first_token=own.early_first_token,
        prefix_cache=False,  # no two prompts are alike
        is_blind=not how.is_stepwise,
    )


def scheduler_of(role: Role, cost: Cost, limits: Limits) -> AnyScheduler:
    match role:
        case "prefill":
            return PrefillDisaggScheduler(limits, cost.blocks)
        case "decode":
            return DecodeDisaggScheduler(limits, cost.blocks, _SLOTS, ())
        case "hybrid":
            return Scheduler(limits, cost.blocks, ())


class _Lane:
    """A worker as the dispatcher sees it; what it refuses is told when the dispatcher is done."""

    def __init__(self, dp: int, worker: Worker) -> None:
        self.rank = Rank(dp=dp, cp=0, tp=0)
        self.ready: Ready | None = _READY
        self.worker = worker
        self.refused: PdrtError | None = None

    def tell(self, message: ToWorker) -> None:
        assert isinstance(message, Submit), "nobody leaves a stream early here"
        self.refused = self.worker.submit(message)


class Leader:
    """One instance."""

    def __init__(self, name: str, role: Role, workers: Sequence[Worker], clock: Clock) -> None:
        self.name, self.role, self.workers = name, role, workers
        self._lanes = [_Lane(dp, worker) for dp, worker in enumerate(workers)]
        self._tokens = 0  # of one that needs no dispatcher
        self._weights: dict[int, int] = {}
        self._dispatcher: DPDispatcher | None = None
        if len(workers) > 1:
            self._dispatcher = DPDispatcher(self._lanes, lambda: clock.now)

    def submit(self, message: Submit) -> PdrtError | None:
        """Why it is refused, if it is."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            refused = self.workers[0].submit(message)
            if refused is None:
                self._book(message)
            return refused
        stream = dispatcher.submit(message)
        lane = self._lanes[stream.dp_rank]
        if (refused := lane.refused) is not None:
            lane.refused = None
            problem = Problem.of(refused, "hybrid")
            self._deliver(stream.dp_rank, Output(room=message.room, problem=problem))
        return refused

    def _book(self, message: Submit) -> None:
        answer = 0 if self.role == "prefill" else message.sampling.max_tokens
        weight = len(message.tokens) // 4 + answer
        self._weights[message.room] = weight
        self._tokens += weight

    def ended(self, worker: Worker, output: Output) -> None:
        """A worker has said its last word of a room."""
        if self._dispatcher is None:
            self._tokens -= self._weights.pop(output.room, 0)
        else:
            self._deliver(self.workers.index(worker), output)

    def _deliver(self, dp_rank: int, output: Output) -> None:
        assert self._dispatcher is not None
        self._dispatcher.deliver(dp_rank, Outputs(items=(output,)))

    def load(self) -> LoadTold:
        stats = [worker.sched.stats() for worker in self.workers]
        size = self.workers[0].sched.limits.block_size
        most = self.workers[0].sched.limits.max_waiting
        waiting = [sum(s.queues.get(name, 0) for name in _UNSERVED) for s in stats]
        tokens = self._tokens if self._dispatcher is None else self._dispatcher.tokens
        return LoadTold(
            tokens=tokens,
            kv_tokens=sum(s.blocks_used for s in stats) * size,
            pool_tokens=sum(s.blocks_total for s in stats) * size,
            is_full=min(waiting) >= most,
        )


@dataclass(frozen=True, slots=True)
class Ground:
    """What all workers have in common."""

    clock: Clock
    machine: Machine
    cost: Cost
    around: Around
    how: How = How()

    def leader(self, name: str, role: Role, ranks: int) -> Leader:
        cost, limits = self.cost, limits_of(self.cost, self.how)
        times = StepTimes(cost.step, cost.instance.max_batch_size)
        workers = [
            Worker(
                f"{name} dp{dp}",
                self.clock,
                scheduler_of(role, cost, replace(limits)),
                times,
                self.around,
            )
            for dp in range(ranks)
        ]
        self._pace(workers)
        return Leader(name, role, workers, self.clock)

    def _pace(self, workers: Sequence[Worker]) -> None:
        cost = self.cost
        if len(workers) > 1 and cost.dp.lockstep:
            Lockstep(workers, self.machine, cost.dp.exchange_ms * 1e-3)
            return
        front = cost.request.cpu_ms or cost.request.token_cpu_ms
        by_itself = self.how.is_stepwise or cost.machine.cores or front
        for worker in workers:
            Solo(worker, self.machine, 0 if by_itself else _MOST_STEPS)


def leaders_of(arrangement: Arrangement, ground: Ground) -> list[Leader]:
    """Prefill ones first."""
    kinds: list[tuple[Role, int, int]] = [
        ("prefill", arrangement.prefills, 1),
        ("decode", arrangement.decodes, 1),
        ("hybrid", arrangement.hybrids, arrangement.dp),
    ]
    numbers: Callable[[], int] = count().__next__
    return [
        ground.leader(f"{role}{numbers()}", role, ranks)
        for role, many, ranks in kinds
        for _ in range(many)
    ]
