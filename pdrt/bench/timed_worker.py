"""A device worker like any other, but that it writes down when each of its steps began and ended.

The times are the system's monotonic clock, so those of two workers of one host compare.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

import uvloop
import zmq.asyncio

from pdrt import messages, telemetry
from pdrt.config import NodeConfig
from pdrt.device.backends import Progress, open_runner
from pdrt.device.batch import Drawn, Runner, SeqStep
from pdrt.device.places import Rendezvous
from pdrt.errors import BadMessage
from pdrt.link import Link
from pdrt.messages import FromWorker, Grammar, KvLayout, ToWorker
from pdrt.spawn import WorkerSpec, read_spec
from pdrt.worker import Worker


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a worker: seconds, and the tokens that were computed in it."""

    began: float
    ended: float
    tokens: int


def steps_file(folder: Path) -> Path:
    """In the folder of the worker's sockets."""
    return folder / "steps"


def read_steps(file: Path) -> Iterator[Step]:
    """All steps so far, in order."""
    for line in file.read_text().splitlines():
        began, ended, tokens = json.loads(line)
        yield Step(began, ended, tokens)


class TimedRunner:
    """Any runner, with a line for each of its steps."""

    def __init__(self, inner: Runner, out: TextIO) -> None:
        self._inner, self._out = inner, out

    @property
    def layout(self) -> KvLayout:
        return self._inner.layout

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._inner.eos_token_ids

    @property
    def vocab(self) -> int:
        return self._inner.vocab

    def bind(self, pool: memoryview, blocks: int) -> None:
        self._inner.bind(pool, blocks)

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._inner.join(rendezvous, timeout_s)

    def prepare(self, grammar: Grammar | None) -> None:
        self._inner.prepare(grammar)

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        began = time.monotonic()
        drawn = self._inner.execute(batch)
        ended = time.monotonic()
        self._out.write(json.dumps([began, ended, sum(len(step.tokens) for step in batch)]) + "\n")
        self._out.flush()
        return drawn


async def _serve(spec: WorkerSpec) -> None:
    link: Link[ToWorker, FromWorker] = Link(
        zmq.asyncio.Context(), messages.TO_WORKER, messages.FROM_WORKER
    )
    link.connect(spec.endpoint)
    asyncio.get_running_loop().add_reader(0, _orphaned)

    def load(config: NodeConfig, progress: Progress, rank: int, size: int) -> Runner:
        runner = open_runner(config, progress, rank, size)
        return TimedRunner(runner, steps_file(spec.folder).open("w"))

    await Worker(spec, link, load).run()
    link.close(linger_ms=500)


def _orphaned() -> None:
    if not os.read(0, 4096):
        os._exit(1)


def main() -> NoReturn:
    try:
        spec = read_spec(0)
    except BadMessage as error:
        sys.exit(f"pdrt bench: {error}")
    telemetry.configure("warning")
    sys.setswitchinterval(0.001)  # as in a worker
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        runner.run(_serve(spec))
    finally:
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
