"""One device worker seen from its supervisor: started, heard, and started again when it dies.

The promises: the death of a worker is told once, after all it had said, and at once; what was
told to a worker that is not ready raises PeerLost instead of being lost; a ready worker that says
nothing is made to end; after `stop` no process is left, whatever its life was at.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import structlog
import zmq.asyncio

from pdrt import messages
from pdrt.control.heartbeat import Time
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
from pdrt.errors import ConfigError, Overloaded, PeerLost
from pdrt.link import Link
from pdrt.messages import FromWorker, Problem, Rank, ToWorker
from pdrt.spawn import WorkerSpec

_PROGRAM: Final = (sys.executable, "-m", "pdrt.worker")
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_MAX_DEATHS: Final = 5  # in a row, each before it was ready for _SOUND_S
_SOUND_S: Final = 30.0
_STOP_S: Final = 5.0
_LOOK_S: Final = 0.45
_SILENT_LOOKS: Final = 4  # a worker tells its figures twice a second


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker's process has ended; `final` when it will not be started again.

    Or only the way to it, when it is not dead: it is on another node.
    """

    problem: Problem
    final: bool
    is_dead: bool = True


Heard: TypeAlias = Callable[["WorkerHandle", "FromWorker | Lost"], None]


class WorkerHandle:
    """Run `run()` in a TaskGroup; it ends after `stop()` or when the worker died too often."""

    def __init__(
        self,
        rank: Rank,
        make_spec: Callable[[str], WorkerSpec],
        folder: Path,
        heard: Heard,
        time: Time,
    ) -> None:
        self.rank = rank
        self.program: Sequence[str] = _PROGRAM
        self.state = WorkerState.SPAWNING
        self.ready: messages.Ready | None = None
        self.stats = messages.Stats()
        self.stats_at = time.clock()
        self.loading: messages.Loading | None = None
        self.lives = 0
        self.last_problem: Problem | None = None
        self.pid: int | None = None
        self._make_spec, self._folder, self._heard, self._time = make_spec, folder, heard, time
        self._link: Link[FromWorker, ToWorker] | None = None
        self._stopping = asyncio.Event()
        self._ready_at: float | None = None
        self._last_words: Problem | None = None  # why this life could not go on
        self._silent_looks = 0
        self._log = structlog.get_logger().bind(worker=str(rank))

    @property
    def name(self) -> str:
        return f"worker {self.rank}"

    def tell(self, message: ToWorker) -> None:
        """Raises PeerLost when the worker is not ready, Overloaded when it does not read."""
        if self._link is None or self.ready is None:
            raise PeerLost(f"worker {self.rank} is {self.state}, not ready")
        self._link.tell(message)

    def stop(self) -> None:
        """Ask the worker to end, or make it end; `run` returns when its process is gone.

        The death that follows is nobody's loss and is not told.
        """
        self._stopping.set()

    async def run(self) -> None:
        deaths = 0
        try:
            while not self._stopping.is_set():
                problem = await self._live()
                if self._stopping.is_set():
                    return
                deaths = 1 if self._was_sound() else deaths + 1
                is_hopeless = problem.code == ConfigError.code  # the next life would read it too
                if not await self._start_again(problem, deaths, is_hopeless):
                    return
        finally:
            self._step(StopAsked())

    def _was_sound(self) -> bool:
        """Whether the life that has ended was ready for a good while, however long it loaded."""
        return self._ready_at is not None and self._time.clock() - self._ready_at > _SOUND_S

    async def _start_again(self, problem: Problem, deaths: int, is_hopeless: bool) -> bool:
        """Tell the loss; whether there is another life, and then not before its pause is over."""
        self.last_problem = problem
        final = is_hopeless or deaths >= _MAX_DEATHS
        self._step(Exited())
        if final:
            self._step(TooOften())
        self._heard(self, Lost(problem, final))
        if final:
            return False
        pause = min(_FIRST_PAUSE_S * 2 ** (deaths - 1), _LONGEST_PAUSE_S)
        self._log.warning("worker_ended", reason=problem.message, again_in_s=pause)
        if await _ends_before(self._time.sleep(pause), self._stopping.wait()):
            self._step(PauseOver())
        return True

    # One life.

    async def _live(self) -> Problem:
        """From spawn to exit; says why it ended."""
        self.lives += 1
        self._ready_at = self._last_words = None
        path = self._folder / f"w{self.rank.dp}-{self.rank.cp}-{self.rank.tp}.{self.lives}"
        link = Link(zmq.asyncio.Context.instance(), messages.FROM_WORKER, messages.TO_WORKER)
        try:
            link.bind(f"ipc://{path}")
            process = await self._spawn(f"ipc://{path}")
            await self._accompany(process, link)
        except OSError as error:
            message = f"worker {self.rank} did not start: {error}"
            return Problem(code=PeerLost.code, message=message)
        finally:
            self._link, self.ready, self.loading, self.pid = None, None, None, None
            self.stats = messages.Stats()  # it holds nothing any more
            link.close()
            path.unlink(missing_ok=True)
        return self._why(process.returncode)

    def _why(self, code: int | None) -> Problem:
        if self._last_words is not None:
            return self._last_words
        message = f"worker {self.rank} ended with exit status {code}"
        return Problem(code=PeerLost.code, message=message)

    async def _spawn(self, endpoint: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self.program, stdin=asyncio.subprocess.PIPE, stdout=sys.stderr
        )
        assert process.stdin is not None
        # And it stays open: its end would mean our death.
        process.stdin.write(self._make_spec(endpoint).line())
        return process

    async def _accompany(
        self, process: asyncio.subprocess.Process, link: Link[FromWorker, ToWorker]
    ) -> None:
        """Talk with the process until it has ended and all it said is heard."""
        self._link, self.pid = link, process.pid
        self._step(Spawned())
        try:
            async with asyncio.TaskGroup() as tasks:
                talk = [
                    tasks.create_task(link.run()),
                    tasks.create_task(self._listen(link)),
                    tasks.create_task(self._end_silence(process)),
                ]
                if not await _ends_before(process.wait(), self._stopping.wait()):
                    await self._end(process, link)
                for each in talk:
                    each.cancel()
        finally:  # cancelled, the process may still live; nobody else would end it
            _kill(process)
            await process.wait()
        for message in await link.unread():
            self._hear(message)

    async def _end(
        self, process: asyncio.subprocess.Process, link: Link[FromWorker, ToWorker]
    ) -> None:
        """A worker that still loads has nothing that an orderly end would save."""
        if self.ready is not None:
            with contextlib.suppress(Overloaded):
                link.tell(messages.Stop())
            if await _ends_before(process.wait(), self._time.sleep(_STOP_S)):
                return
            self._log.warning("worker did not stop when asked and is killed")
        _kill(process)
        await process.wait()

    async def _end_silence(self, process: asyncio.subprocess.Process) -> None:
        """A stopped or stuck worker does not die by itself, and its requests wait for it.

        Looks are counted, not seconds: when it is we who were stopped, what it said meanwhile
        is read before the next look.
        """
        self._silent_looks = 0
        while self._silent_looks < _SILENT_LOOKS:
            await self._time.sleep(_LOOK_S)
            may_be_silent = self.ready is None or self._stopping.is_set()
            self._silent_looks = 0 if may_be_silent else self._silent_looks + 1
        message = f"worker {self.rank} lives but says nothing"
        self._last_words = Problem(code=PeerLost.code, message=message)
        _kill(process)

    async def _listen(self, link: Link[FromWorker, ToWorker]) -> None:
        async for message in link.listen():
            self._hear(message)

    def _hear(self, message: FromWorker) -> None:
        self._silent_looks = 0
        match message:
            case messages.Ready():
                self.ready = message
                self._ready_at = self.stats_at = self._time.clock()
                self._step(SaidReady())
            case messages.Loading():
                self.loading = message
            case messages.Stats():
                self.stats, self.stats_at = message, self._time.clock()
            case messages.Fatal():
                self._last_words = message.problem
            case messages.Outputs() | messages.AskPrefill():
                pass
        self._heard(self, message)

    def _step(self, event: object) -> None:
        self.state, _ = WORKER.step(self.state, self, event)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def _ends_before(this: Awaitable[object], other: Awaitable[object]) -> bool:
    """Whether `this` has ended when one of the two has; what has not is cancelled."""
    first, second = asyncio.ensure_future(this), asyncio.ensure_future(other)
    try:
        await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        return first.done()
    finally:
        first.cancel()
        second.cancel()
