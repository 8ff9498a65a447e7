"""Processes that are the ranks of a tensor-parallel group; torch is imported once for all.

What they run stands here and not in a test, so that they need not import what tests need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from pdrt import steps
from pdrt.config import NodeConfig
from pdrt.device import torchrunner  # noqa: F401 - so that it is there before the processes fork
from pdrt.device.backends import open_runner
from pdrt.device.batch import Drawn, Runner, SeqStep
from pdrt.device.places import Rendezvous
from pdrt.messages import KvLayout
from pdrt.modelspec import Kernels

P = ParamSpec("P")
T = TypeVar("T")
BLOCK, BLOCKS = 8, 64
MOST = 4
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank needs to find the others."""

    rank: int
    size: int
    rendezvous: Rendezvous


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch.distributed", "tests.device.ranks"])
    return found


def places(folder: Path, size: int) -> list[Place]:
    rendezvous = folder / f"group{next(_numbers)}"
    return [Place(rank, size, rendezvous) for rank in range(size)]


class Ranks:
    """Up to four processes, each of which is one rank of whatever group is asked for."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Path) -> None:
        self._pool, self._folder = pool, folder

    def __call__(
        self, size: int, task: Callable[Concatenate[Place, P], T], *args: P.args, **more: P.kwargs
    ) -> list[T]:
        """What each rank's task returns."""
        group = places(self._folder, size)
        futures = [self._pool.submit(task, place, *args, **more) for place in group]
        return [future.result(timeout=25) for future in futures]


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Ranks]:
    with ProcessPoolExecutor(MOST, context(), torch.set_num_threads, (1,)) as pool:
        yield Ranks(pool, folder)


class Recorder:
    """A runner that writes down its batches, so that a group can be given the same ones."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.layout: KvLayout = runner.layout
        self.eos_token_ids, self.vocab = runner.eos_token_ids, runner.vocab
        self.bind, self.join, self.prepare = runner.bind, runner.join, runner.prepare
        self.batches: list[list[SeqStep]] = []
        self.drawn: list[list[Drawn]] = []

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        self.batches.append([_copied(step) for step in batch])
        self.drawn.append(self._runner.execute(batch))
        return self.drawn[-1]


def _copied(step: SeqStep) -> SeqStep:
    draw = step.draw and dataclasses.replace(step.draw, history=list(step.draw.history))
    return dataclasses.replace(step, tokens=list(step.tokens), blocks=list(step.blocks), draw=draw)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a rank said to the batches, and its pool afterwards."""

    drawn: list[list[Drawn]]
    layout: KvLayout
    pool: bytes


def opened(
    model: str,
    rank: int = 0,
    size: int = 1,
    dtype: str = "float32",
    cp: int = 1,
    kernels: Kernels = "auto",
) -> Runner:
    device = {"threads": 1, "kernels": kernels}
    tables = {"model": {"path": model, "dtype": dtype}, "scheduler": {"block_size": BLOCK}}
    sizes = {"world_size": size, "cp": cp, "tp": size // cp, "devices_per_node": size}
    config = NodeConfig.model_validate(tables | {"device": device, "parallel": sizes})
    return open_runner(config, lambda _stage, _done, _total: None, rank, size)


def as_rank(
    place: Place,
    model: str,
    batches: Sequence[Sequence[SeqStep]],
    dtype: str = "float32",
    cp: int = 1,
) -> Replayed:
    """Execute `batches` as this rank; a follower is not told how tokens are drawn."""
    runner = opened(model, place.rank, place.size, dtype, cp)
    memory = bytearray(b"\xff" * (BLOCKS * runner.layout.block_bytes))
    runner.bind(memoryview(memory), BLOCKS)
    runner.join(place.rendezvous, timeout_s=20)
    told = batches if place.rank == 0 else [[_untold(step) for step in b] for b in batches]
    drawn = [runner.execute(batch) for batch in told]
    return Replayed(drawn, runner.layout, bytes(memory))


def loading(place: Place, model: str) -> int:
    """Bytes that a rank's weights add to this process's own memory, which files mapped are not."""
    before = _own_bytes()
    runner = opened(model, place.rank, place.size, kernels="torch")  # numba has memory of its own
    added = _own_bytes() - before
    del runner
    return added


def _own_bytes() -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
    return int(line.split()[1]) * 1024


def _untold(step: SeqStep) -> SeqStep:
    return steps.unpack(steps.pack(1, [step]))[0]
