"""`pdrt bench overlap`: how soon after its prompt is computed the KV is whole on the decode side.

A real prefill and a real decode worker, without the HTTP around them. Both write down their
steps; from the end of the prompt's last chunk to the beginning of decode's first step all is
counted: the last write, its slot, the doorbell, the decode side's plan.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdrt.bench.shell import Report, run, write_points
from pdrt.bench.timed_worker import Step, read_steps, steps_file
from pdrt.config import DisaggConfig, NodeConfig, Place, Role
from pdrt.control.bootstrap import BootstrapState, Sizes, bootstrap_app
from pdrt.control.heartbeat import Time
from pdrt.control.http import listen
from pdrt.control.worker_handle import Lost, WorkerHandle
from pdrt.errors import TransferFailed
from pdrt.folder import PrivateFolder
from pdrt.keys import ClusterKey
from pdrt.messages import FromWorker, Outputs, Rank, Sampling, Source, Submit, pack_ids
from pdrt.modelspec import ModelSpec
from pdrt.spawn import WorkerSpec

_ROLES: Final[tuple[Role, Role]] = ("prefill", "decode")
_HOSTS: Final = {"prefill": "127.0.0.2", "decode": "127.0.0.1"}
_PROGRAM: Final = (sys.executable, "-m", "pdrt.bench.timed_worker")
_REQUEST_S: Final = 300.0
_LEAST_COMPUTE_S: Final = 0.05  # what a share can be told of


@dataclass(frozen=True, slots=True)
class Prompt:
    """Seconds of one prompt: computing, and from its end to decode's first step."""

    tokens: int
    compute_s: float
    after_s: float

    @property
    def share(self) -> float:
        return self.after_s / self.compute_s


def prompt_of(prefill: Sequence[Step], decode: Sequence[Step]) -> Prompt:
    """From the steps that were made for it, and no other request's."""
    began, ended = prefill[0].began, prefill[-1].ended
    return Prompt(sum(step.tokens for step in prefill), ended - began, decode[0].began - ended)


class TimedWorker:
    """A worker process, what it has said and the steps that it has made."""

    def __init__(
        self, role: Role, config: NodeConfig, key: ClusterKey, folder: Path, bootstrap_port: int
    ) -> None:
        parallel = config.parallel.model_copy(update={"local_ip": _HOSTS[role]})
        self._role, self._key = role, key
        self._config = config.model_copy(update={"parallel": parallel})
        self._bootstrap_port = bootstrap_port
        folder = folder / role  # as if it were a node of its own
        folder.mkdir()
        self._file, self._seen = steps_file(folder), 0
        self._news = asyncio.Event()
        self._ended = set[int]()
        self._problem = ""
        self._handle = WorkerHandle(Rank(), self._spec, folder, self._heard, Time(time.monotonic))
        self._handle.program = _PROGRAM

    async def run(self) -> None:
        await self._handle.run()

    def stop(self) -> None:
        self._handle.stop()

    def tell(self, message: Submit) -> None:
        self._handle.tell(message)

    async def until_ready(self) -> None:
        """Raises TransferFailed when it never will be."""
        while self._handle.ready is None:
            await self._wait()

    async def until_ended(self, room: int) -> None:
        """Raises TransferFailed when the room, or the worker, came to nothing."""
        while room not in self._ended:
            await self._wait()

    def new_steps(self) -> list[Step]:
        """Those since the last call."""
        steps = list(read_steps(self._file))[self._seen :]
        self._seen += len(steps)
        return steps

    async def _wait(self) -> None:
        if self._problem:
            raise TransferFailed(f"the {self._role} worker: {self._problem}")
        self._news.clear()
        await self._news.wait()

    def _spec(self, endpoint: str) -> WorkerSpec:
        place = Place.of(self._config.parallel, 0)
        disagg = DisaggConfig.derive(self._role, self._config, place)
        return WorkerSpec(
            role=self._role,
            rank=Rank(),
            config=self._config,
            disagg=disagg.model_copy(update={"bootstrap_port": self._bootstrap_port}),
            key_hex=self._key.secret.hex(),
            endpoint=endpoint,
            epoch=time.time_ns(),
        )

    def _heard(self, _handle: WorkerHandle, message: FromWorker | Lost) -> None:
        if isinstance(message, Lost):
            self._problem = message.problem.message
        elif isinstance(message, Outputs):
            for item in message.items:
                self._problem = item.problem.message if item.problem else self._problem
                if item.finish:
                    self._ended.add(item.room)
        self._news.set()


@dataclass(slots=True)
class Pair:
    """A prefill and a decode worker, and where the prefill one is registered."""

    prefill: TimedWorker
    decode: TimedWorker
    source: Source
    vocab: int
    _rooms: int = 0

    async def prompt(self, tokens: int) -> Prompt:
        """One request alone, of random tokens. Raises TransferFailed."""
        room, self._rooms = self._rooms, self._rooms + 1
        random = Random(room)
        submit = Submit(
            room=room,
            attempt=0,
            request_id=f"bench-{room}",
            tokens=pack_ids([random.randrange(self.vocab) for _ in range(tokens)]),
            prompt_tokens=tokens,
            sampling=Sampling(max_tokens=2, temperature=0, ignore_eos=True),
            time_left=_REQUEST_S,
        )
        self.decode.tell(replace(submit, source=self.source))
        self.prefill.tell(submit)
        async with asyncio.timeout(_REQUEST_S):
            await self.decode.until_ended(room)
            await self.prefill.until_ended(room)
        return prompt_of(self.prefill.new_steps(), self.decode.new_steps())


@asynccontextmanager
async def running(config: NodeConfig) -> AsyncIterator[Pair]:
    """Both workers, ready. Raises TransferFailed."""
    key, host = ClusterKey.fresh(), _HOSTS["prefill"]
    state = BootstrapState(Sizes(), time.time_ns(), host)
    server, port = await listen(bootstrap_app(state, key, time.monotonic), host, 0)
    try:
        with closing(PrivateFolder("pdrt-bench-")) as private:
            prefill, decode = (
                TimedWorker(role, config, key, private.path, port) for role in _ROLES
            )
            async with asyncio.TaskGroup() as tasks:
                for each in (prefill, decode):
                    tasks.create_task(each.run())
                try:
                    async with asyncio.timeout(config.timeouts.startup_s):
                        await prefill.until_ready()
                        await decode.until_ready()
                    model = ModelSpec.of(config.model)
                    source = Source(host=host, port=port, dp_rank=0)
                    yield Pair(prefill, decode, source, model.vocab)
                finally:
                    prefill.stop()
                    decode.stop()
    finally:
        await server.cleanup()


async def measure(
    config: NodeConfig, tokens: int, prompts: int, told: Callable[[int], None]
) -> list[Prompt]:
    """One prompt after the other; the first one warms up and does not count."""
    async with running(config) as pair:
        found = list[Prompt]()
        for number in range(prompts + 1):
            found.append(await pair.prompt(tokens))
            told(number)
        return found[1:]


def overlap(config: NodeConfig, tokens: int, prompts: int, report: Report, console: Console) -> int:
    """Measure and report; the exit status. Raises PdrtError."""
    report.check()
    with Progress(console=Console(stderr=True), disable=report.is_quiet) as bar:
        task = bar.add_task(f"prompts of {tokens} tokens", total=prompts + 1)
        found = run(measure(config, tokens, prompts, lambda _number: bar.advance(task)))
    if not report.is_quiet:
        show(console, found)
    if warning := too_short(found):
        Console(stderr=True, highlight=False).print(f"warning: {warning}", soft_wrap=True)
    if report.json_file:
        write_points(report.json_file, [asdict(p) | {"share": p.share} for p in found])
    return 0


def too_short(found: Sequence[Prompt]) -> str:
    """Why the shares say nothing, and what to do; empty when they do."""
    computed_s = statistics.median(prompt.compute_s for prompt in found)
    if computed_s >= _LEAST_COMPUTE_S:
        return ""
    return (
        f"the prompts were computed in {computed_s * 1000:.0f} ms, and what comes after takes"
        " a few ms however small the model is: a share of it says nothing of a real one. Read the"
        f" ms, or take a larger --model or more --tokens, for {_LEAST_COMPUTE_S * 1000:.0f} ms at"
        " least"
    )


def show(console: Console, found: Sequence[Prompt]) -> None:
    table = Table("prompt tokens", "computed in ms", "then until decode's step, ms", "share")
    for prompt in found:
        figures = f"{prompt.compute_s * 1000:.0f}", f"{prompt.after_s * 1000:.2f}"
        table.add_row(str(prompt.tokens), *figures, f"{prompt.share:.2%}")
    console.print(table)
    if too_short(found):
        after_s = statistics.median(prompt.after_s for prompt in found)
        console.print(f"median: {after_s * 1000:.2f} ms; the share means little here")
        return
    share = statistics.median(prompt.share for prompt in found)
    console.print(f"median: {share:.2%} of the time it took to compute the prompt")
