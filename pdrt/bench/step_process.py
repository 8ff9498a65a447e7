"""A process that measures steps: orders on its standard input, seconds on its standard output.

There is one for each worker that the machine has cores for, and all measure at once: what they
share, such as memory, is shared while instances serve too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from pdrt import telemetry
from pdrt.bench.step_grid import Clock, Shape, Steps
from pdrt.config import NodeConfig
from pdrt.device.backends import device_kind, open_runner
from pdrt.errors import PdrtError, Unavailable
from pdrt.up.processes import dying_with_parent

_LOAD_S: Final = 300.0
_ROUND_S: Final = 300.0
_LIMIT: Final = 1 << 22  # bytes of a line
TIMES: Final = 2  # that each step is done in a round


class Orders(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    config: NodeConfig
    cores: tuple[int, ...]
    shapes: tuple[tuple[int, int, int, int, int], ...]


class Loaded(BaseModel):
    """What the model turned out to be; `problem` says why it could not be loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_bytes: int = 0
    vocab: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Measurer:
    """One such process, seen from its parent."""

    process: asyncio.subprocess.Process
    loaded: Loaded

    async def round(self, number: int) -> list[float]:
        """Seconds of each shape in turn. Raises Unavailable."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % number)
        line = await _line(self.process, _ROUND_S)
        return [float(each) for each in json.loads(line)]


@asynccontextmanager
async def measuring(
    config: NodeConfig, cores: Sequence[int], shapes: Sequence[Shape]
) -> AsyncIterator[Measurer]:
    """Started and loaded; ended after. Raises Unavailable."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdrt.bench.step_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LIMIT,
        preexec_fn=dying_with_parent(),  # in the midst of a round it hears nothing
    )
    assert process.stdin is not None
    try:
        told = tuple((s.decoding, s.context, s.prompts, s.tokens, s.start) for s in shapes)
        orders = Orders(config=config, cores=tuple(cores), shapes=told)
        process.stdin.write(orders.model_dump_json().encode() + b"\n")
        loaded = Loaded.model_validate_json(await _line(process, _LOAD_S))
        if loaded.problem:
            raise Unavailable(f"the model could not be loaded: {loaded.problem}")
        yield Measurer(process, loaded)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process, within_s: float) -> bytes:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(within_s):
            line = await process.stdout.readline()
    except TimeoutError:
        raise Unavailable(f"the measuring process said nothing for {within_s:.0f} s") from None
    if not line:
        raise Unavailable("the measuring process ended; its words are above")
    return line


def main() -> None:
    telemetry.configure("warning")
    try:
        orders = Orders.model_validate_json(sys.stdin.buffer.readline())
    except ValidationError as error:
        sys.exit(f"pdrt bench: {error}")
    if orders.cores:
        os.sched_setaffinity(0, orders.cores)
    shapes = [Shape(*each) for each in orders.shapes]
    try:
        runner = open_runner(orders.config, lambda _stage, _done, _total: None)
    except PdrtError as error:
        _say(Loaded(problem=str(error)).model_dump_json())
        return
    size = runner.layout.block_size
    steps = Steps(runner, max(shape.blocks(size) for shape in shapes), clock_of(orders.config))
    _say(Loaded(block_bytes=runner.layout.block_bytes, vocab=runner.vocab).model_dump_json())
    while sys.stdin.buffer.readline():  # until nobody asks any more
        _say(json.dumps([steps.seconds(shape, TIMES) for shape in shapes]))


def clock_of(config: NodeConfig) -> Clock:
    """One thread's processor time is what it takes on a core of its own, whoever else runs."""
    is_one_thread = device_kind(config) == "cpu" and config.device.threads == 1
    return time.process_time if is_one_thread else time.perf_counter


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
