"""One device worker seen from its supervisor: started, heard, and started again when it dies.

The promise: the death of a worker is told once, after all it had said, and at once; what was
told to a worker that is not ready raises PeerLost instead of being lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import structlog
import zmq.asyncio

from pdrt import messages
from pdrt.control.lives import (
    WORKER,
    Exited,
    PauseOver,
    SaidReady,
    Spawned,
    StopAsked,
    TooOften,
    WorkerState,
)
from pdrt.errors import PeerLost
from pdrt.link import Link
from pdrt.messages import FromWorker, Problem, Rank, ToWorker
from pdrt.spawn import WorkerSpec

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_MAX_DEATHS: Final = 5  # in a row, each before it served for _SOUND_S
_SOUND_S: Final = 30.0
_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker's process has ended; `final` when it will not be started again."""

    problem: Problem
    final: bool


Heard: TypeAlias = Callable[["WorkerHandle", "FromWorker | Lost"], None]


class WorkerHandle:
    """Run `run()` in a TaskGroup; it ends after `stop()` or when the worker died too often."""

    def __init__(
        self,
        rank: Rank,
        make_spec: Callable[[str], WorkerSpec],
        folder: Path,
        heard: Heard,
        clock: Callable[[], float],
    ) -> None:
        self.rank = rank
        self.state = WorkerState.SPAWNING
        self.ready: messages.Ready | None = None
        self.stats = messages.Stats()
        self.stats_at = clock()
        self.loading: messages.Loading | None = None
        self.lives = 0
        self.last_problem: Problem | None = None
        self.pid: int | None = None
        self._make_spec, self._folder, self._heard, self._clock = make_spec, folder, heard, clock
        self._context = zmq.asyncio.Context.instance()
        self._link: Link[FromWorker, ToWorker] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._last_words: list[Problem] = []  # why this life could not go on
        self._log = structlog.get_logger().bind(worker=str(rank))

    def tell(self, message: ToWorker) -> None:
        """Raises PeerLost when the worker is not ready, Overloaded when it does not read."""
        if self._link is None or self.ready is None:
            raise PeerLost(f"worker {self.rank} is {self.state}, not ready")
        self._link.tell(message)

    async def run(self) -> None:
        deaths, stop = 0, asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                born = self._clock()
                problem = await self._live()
                if self._stopping.is_set():
                    break
                deaths = 1 if self._clock() - born > _SOUND_S else deaths + 1
                self._step(Exited())
                self.last_problem = problem
                final = deaths >= _MAX_DEATHS
                if final:
                    self._step(TooOften())
                self._heard(self, Lost(problem, final))
                if final:
                    return
                pause = min(_FIRST_PAUSE_S * 2 ** (deaths - 1), _LONGEST_PAUSE_S)
                self._log.warning("worker ended", reason=problem.message, again_in_s=pause)
                await asyncio.wait([stop], timeout=pause)
                self._step(PauseOver())
        finally:
            stop.cancel()
            self._step(StopAsked())

    async def stop(self) -> None:
        """Ask the worker to end, then make it end; returns when its process is gone."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self._link is not None:
            self._link.tell(messages.Stop())
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            self._log.warning("worker did not stop when asked and is killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _live(self) -> Problem:
        """One life of the process, from spawn to exit; says why it ended."""
        self.lives += 1
        path = self._folder / f"w{self.rank.dp}-{self.rank.cp}-{self.rank.tp}.{self.lives}"
        link = Link(self._context, messages.FROM_WORKER, messages.TO_WORKER)
        self._last_words.clear()
        try:
            link.bind(f"ipc://{path}")
            spec = self._make_spec(f"ipc://{path}")
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pdrt.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=sys.stderr,
            )
            self._process, self._link, self.pid = process, link, process.pid
            assert process.stdin is not None
            process.stdin.write(spec.line())  # and stays open: its end would mean our death
            self._step(Spawned())
            async with asyncio.TaskGroup() as tasks:
                talking = [tasks.create_task(link.run()), tasks.create_task(self._listen(link))]
                code = await process.wait()
                for task in talking:
                    task.cancel()
            for message in await link.unread():
                self._hear(message)
            if self._last_words:
                return self._last_words[-1]
            return Problem(
                code=PeerLost.code, message=f"worker {self.rank} ended with exit status {code}"
            )
        except OSError as error:
            return Problem(code=PeerLost.code, message=f"worker {self.rank} did not start: {error}")
        finally:
            self._link, self.ready, self.loading, self.pid = None, None, None, None
            link.close()
            path.unlink(missing_ok=True)
            self._kill_leftover()

    async def _listen(self, link: Link[FromWorker, ToWorker]) -> None:
        async for message in link.listen():
            self._hear(message)

    def _hear(self, message: FromWorker) -> None:
        match message:
            case messages.Ready():
                self.ready = message
                self.stats_at = self._clock()
                self._step(SaidReady())
            case messages.Loading():
                self.loading = message
            case messages.Stats():
                self.stats, self.stats_at = message, self._clock()
            case messages.Fatal():
                self._last_words.append(message.problem)
            case messages.Outputs() | messages.AskPrefill():
                pass
        self._heard(self, message)

    def _kill_leftover(self) -> None:
        """When we are cancelled the process may still live; nobody else would end it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _step(self, event: object) -> None:
        self.state, _ = WORKER.step(self.state, self, event)
