"""`pdrt bench calibrate`: measures what this machine takes for a model and writes a cost file.

Steps are those of the runner that workers use, in a process for each worker that the cores have
room for, all at once and one alone; overheads are those of real instances without a model, and
transfers those of the transport. What the simulator then says can be held against the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pdrt.bench import cost_file, overheads
from pdrt.bench.cases import Case, wanted
from pdrt.bench.facts import machine_facts
from pdrt.bench.layouts import Ground, Layout
from pdrt.bench.overheads import Overheads
from pdrt.bench.results import Results, Turn
from pdrt.bench.shell import Report, run, write_points
from pdrt.bench.step_fit import Fit, fit
from pdrt.bench.step_grid import Shape, grid
from pdrt.bench.step_process import Loaded, Measurer, measuring
from pdrt.bench.summary import quantile
from pdrt.bench.transfer import local_target, measure
from pdrt.config import NodeConfig
from pdrt.device.backends import device_kind
from pdrt.errors import ConfigError, Unavailable
from pdrt.sim.arrangement import Arrangement, apart
from pdrt.sim.cost import (
    Cost,
    InstanceCost,
    MachineCost,
    ModelCost,
    RequestCost,
    StepCost,
    TransferCost,
)

Stage: TypeAlias = Callable[[str, float], None]  # what is measured now, and how much is done
_TOGETHER, _APART = Arrangement("route1", hybrids=1), apart(1, 1)
_QUIET_SHARE: Final = 0.25  # of the rounds: what else runs on a machine only ever adds
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 40  # beside the first one, which warms up
_ALONE_EVERY: Final = 3  # rounds
_SIZES: Final = "16K..4M"
_POOL: Final = "64M"
_STEPS, _OVERHEADS, _TRANSFERS = 0.7, 0.25, 0.05  # shares of the time
_BAD_FIT: Final = 0.25  # a relative error that is said in red
_UNREST: Final = 1.3  # between slow and quick rounds
_MOST_PROCESSES: Final = 8
_COLUMNS: Final = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One machine, model and dtype; `cores` are those that all workers share."""

    name: str
    config: NodeConfig  # with threads of one worker
    cores: Sequence[int]
    kv_bytes: int  # of one worker's pool
    longest: int = 2048  # tokens of a sequence that is measured
    most: int = 32  # sequences that decode
    seconds: float = 120.0

    @property
    def at_once(self) -> int:
        """Workers that have cores of their own; another device is one worker's."""
        is_shared = device_kind(self.config) == "cpu"
        return max(1, len(self.cores) // self.threads) if is_shared else 1

    @property
    def processes(self) -> int:
        """That measure at once: each holds the model."""
        return min(self.at_once, _MOST_PROCESSES)

    @property
    def threads(self) -> int:
        return self.config.device.threads

    def shapes(self) -> list[Shape]:
        return grid(self.config.scheduler.max_prefill_tokens, self.most, self.longest)

    def share(self, worker: int) -> Sequence[int]:
        return self.cores[worker * self.threads : (worker + 1) * self.threads]


@dataclass(slots=True)
class Rounds:
    """What the rounds found for each shape: with all cores busy, and with one worker alone."""

    shapes: Sequence[Shape]
    together: list[list[float]] = field(default_factory=list)
    alone: list[list[float]] = field(default_factory=list)

    def quiet(self, rounds: Sequence[Sequence[float]]) -> list[float]:
        """Of each shape the time of a round with little else on the machine."""
        return [quantile(sorted(each), _QUIET_SHARE) for each in zip(*rounds, strict=True)]

    @property
    def crowd(self) -> float:
        """How many times as long a step lasts when all cores are busy, as is usual."""
        if not self.alone:
            return 1.0
        pairs = zip(self.quiet(self.together), self.quiet(self.alone), strict=True)
        return max(1.0, statistics.median(both / one for both, one in pairs))

    @property
    def unrest(self) -> float:
        """How many times as long a step lasts in a slow round as in a quick one, as is usual."""
        ordered = [sorted(each) for each in zip(*self.together, strict=True)]
        slow, quick = 1 - _QUIET_SHARE, _QUIET_SHARE
        return statistics.median(quantile(one, slow) / quantile(one, quick) for one in ordered)

    def measured(self) -> Mapping[Shape, float]:
        """Seconds of each shape for a worker that is alone on the machine."""
        crowd = self.crowd
        each = [took / crowd for took in self.quiet(self.together)]
        return dict(zip(self.shapes, each, strict=True))


@dataclass(frozen=True, slots=True)
class Found:
    rounds: Rounds
    loaded: Loaded
    fit: Fit
    beside: Overheads
    transfers: Results


def calibrate(asked: Asked, ground: Ground, out: Path, report: Report, console: Console) -> int:
    """Measure, fit, write, and say how well it fits; the exit status. Raises PdrtError."""
    report.check()
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no directory {out.parent}")
    with _progress(report.is_quiet) as stage:
        found = found_on(asked, ground, stage)
    cost_file.write(cost(asked, found), out)
    if not report.is_quiet:
        show(console, asked, found, out)
    if report.json_file:
        write_points(report.json_file, points(found))
    return 0


def found_on(asked: Asked, ground: Ground, stage: Stage) -> Found:
    """Everything, in turn. Raises PdrtError."""
    rounds, loaded = run(_steps(asked, stage))
    stage("router and server, together", _STEPS)
    together = overheads.found_by(ground, Layout(_TOGETHER))
    stage("router and server, apart", _STEPS + _OVERHEADS / 2)
    split = overheads.found_by(ground, Layout(_APART))
    stage("transfers", _STEPS + _OVERHEADS)
    transfers = run(_transfers(asked.seconds * _TRANSFERS))
    stage("measured", 1.0)
    beside = overheads.overheads(together, split)
    return Found(rounds, loaded, fit(rounds.measured()), beside, transfers)


async def _steps(asked: Asked, stage: Stage) -> tuple[Rounds, Loaded]:
    """Rounds until the time is over: all workers at once, then one alone."""
    shapes = asked.shapes()
    rounds = Rounds(shapes)
    stage(f"loading the model {asked.processes} times", 0.0)
    async with AsyncExitStack() as stack:
        contexts = [measuring(asked.config, asked.share(k), shapes) for k in range(asked.processes)]
        those = [await stack.enter_async_context(one) for one in contexts]
        began = time.monotonic()
        for number in itertools.count():
            done = (time.monotonic() - began) / (asked.seconds * _STEPS)
            if number > _LEAST_ROUNDS and (done >= 1 or number > _MOST_ROUNDS):
                break
            stage(f"{len(shapes)} kinds of steps", min(1.0, done) * _STEPS)
            await _round(rounds, those, number)
    return rounds, those[0].loaded


async def _round(rounds: Rounds, those: Sequence[Measurer], number: int) -> None:
    found = await asyncio.gather(*(one.round(number) for one in those))
    if number:
        rounds.together += found
    if number % _ALONE_EVERY == 1 and len(those) > 1:
        rounds.alone.append(await those[number % len(those)].round(number))


async def _transfers(seconds: float) -> Results:
    """By shared memory, which is how instances of one machine write. Raises Unavailable."""
    asked = wanted(_SIZES, "1", "shm", 5, max(2.0, seconds), _POOL)
    async with local_target() as place:
        results = await measure(asked, place, lambda _case, _number: None)
    if not any(way == "shm" for _, way in results.series):
        raise Unavailable(f"transfers: {results.refused.get('shm', 'nothing was measured')}")
    return results


# The cost file.


def cost(asked: Asked, found: Found) -> Cost:
    scheduler = asked.config.scheduler
    size = scheduler.block_size
    per_token = found.loaded.block_bytes // size
    return Cost(
        name=asked.name,
        about=about(asked),
        model=ModelCost(kv_bytes_per_token=per_token),
        instance=InstanceCost(
            block_size=size,
            kv_tokens=max(size, asked.kv_bytes // per_token),
            max_prefill_tokens=scheduler.max_prefill_tokens,
            max_batch_size=scheduler.max_batch_size,
            reserved_tokens=scheduler.num_reserved_decode_tokens,
            adaptive_reserve=scheduler.adaptive_reserve,
            max_waiting=scheduler.max_waiting,
            chunked=asked.config.transfer.chunked,
        ),
        step=with_overhead(found.fit.step, found.beside.step_ms),
        request=RequestCost(**overheads.told(found.beside)),
        transfer=TransferCost(curve=curve(found.transfers), cpu_share=1.0),
        machine=machine(asked, found.rounds.crowd),
    )


def with_overhead(step: StepCost, overhead_ms: float) -> StepCost:
    """What scheduler and worker add to each step of the device."""
    return step.model_copy(update={"base_ms": round(step.base_ms + overhead_ms, 5)})


def curve(results: Results) -> tuple[tuple[float, float, float, float], ...]:
    """One write of one block, size by size, in the round with least else on the machine."""
    return tuple(
        _row(case, min(series.turns, key=lambda turn: statistics.fmean(turn.latencies)))
        for (case, way), series in sorted(results.series.items(), key=lambda one: _size(one[0][0]))
        if way == "shm"
    )


def _row(case: Case, turn: Turn) -> tuple[float, float, float, float]:
    """Bytes, GB/s, and microseconds on average and at worst."""
    took = [each * 1e6 for each in turn.latencies]
    mean, worst = statistics.fmean(took), quantile(sorted(took), 0.99)
    return float(case.block_bytes), round(turn.gb_per_s, 3), round(mean, 2), round(worst, 2)


def _size(case: Case) -> int:
    return case.block_bytes


def machine(asked: Asked, crowd: float) -> MachineCost:
    """A device that is not the CPU is nobody else's."""
    if device_kind(asked.config) != "cpu":
        return MachineCost()
    many = asked.processes
    crowds = ((1, 1.0), (many, round(crowd, 3))) if many > 1 else ()
    return MachineCost(cores=asked.at_once, crowd=crowds)


def about(asked: Asked) -> str:
    facts = machine_facts()
    model = asked.config.model
    quantized = "" if model.quantize == "none" else f" {model.quantize}"
    return (
        f"{Path(model.path).name}, {model.dtype}{quantized}, {asked.threads} thread(s) a worker,"
        f" {len(asked.cores)} cores of {facts['processor']}; measured by pdrt bench calibrate"
    )


# For a person, and for a program.


def show(console: Console, asked: Asked, found: Found, out: Path) -> None:
    worst, step, beside = found.fit.worst, found.fit.step, found.beside
    for line in (
        f"a step: {step.base_ms:.2f} ms, {step.token_us:.1f} us a prompt token, of one sequence"
        f" {step.decode_ms[0][1]:.2f} ms, of {asked.most} {step.decode_ms[-1][1]:.2f} ms,"
        f" {step.context_ns / 1e3:.3f} us a token of context",
        f"scheduler and worker {beside.step_ms:.2f} ms a step; router and server"
        f" {beside.front_ms + beside.token_ms + beside.cpu_ms + beside.token_cpu_ms:.2f} ms a"
        f" request, apart {beside.handshake_ms:.2f} ms more; processor time"
        f" {beside.cpu_ms:.2f} ms a request, {beside.token_cpu_ms:.3f} ms a token",
        f"with {asked.processes} workers busy a step takes {found.rounds.crowd:.2f} times as"
        " long as alone",
        f"{len(found.fit.residuals)} kinds of steps, {len(found.rounds.together)} turns of each:"
        f" the fit is {found.fit.usual_error:.1%} off as is usual",
    ):
        console.print(line, soft_wrap=True)
    told = f"at worst {worst.error:+.0%}: {worst.shape}, {worst.measured_s * 1e3:.1f} ms measured"
    console.print(told, style="red" if abs(worst.error) > _BAD_FIT else "", soft_wrap=True)
    unrest = found.rounds.unrest
    told = f"the same step lasts {unrest:.2f} times as long in slow rounds as in quick ones"
    if unrest > _UNREST:
        told += ": others use this machine or its host's memory; measure again when they do not"
    console.print(told, style="red" if unrest > _UNREST else "", soft_wrap=True)
    console.print(f"written: {out}; try `pdrt sim sweep --cost {out}`", soft_wrap=True)


def points(found: Found) -> list[Mapping[str, object]]:
    """For `--json`: each kind of step, beside the fit."""
    facts = machine_facts()
    return [
        {
            **one.shape.told(),
            "measured_ms": one.measured_s * 1e3,
            "fitted_ms": one.fitted_s * 1e3,
            "error": one.error,
            "turns": len(found.rounds.together),
            "machine": facts,
        }
        for one in found.fit.residuals
    ]


@contextmanager
def _progress(is_quiet: bool) -> Iterator[Stage]:
    """Drawn between two measurements only."""
    err = Console(stderr=True, highlight=False)
    with Progress(*_COLUMNS, console=err, auto_refresh=False, disable=is_quiet) as bar:
        task = bar.add_task("", total=1.0)

        def stage(what: str, done: float) -> None:
            bar.update(task, description=f"{what:<30}", completed=done, refresh=True)

        yield stage


def cores_of(count: int) -> Sequence[int]:
    """The first so many that this process may use; 0: all. Raises ConfigError."""
    usable = sorted(os.sched_getaffinity(0))
    if count > len(usable):
        raise ConfigError(f"--cores {count}: this process may use {len(usable)}")
    return usable[: count or len(usable)]
