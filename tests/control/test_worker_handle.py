"""A worker's handle against processes that die, hang and talk as the test's script says."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdrt import messages
from pdrt.config import DisaggConfig, NodeConfig, Place
from pdrt.control.heartbeat import Time
from pdrt.control.lives import WorkerState
from pdrt.control.worker_handle import Lost, WorkerHandle
from pdrt.errors import PeerLost
from pdrt.messages import FromWorker, Rank
from pdrt.spawn import WorkerSpec
from tests.fake_time import FakeTime

SCRIPT = str(Path(__file__).parent.parent / "scripted_worker.py")
CONFIG = NodeConfig()
PLACE = Place.of(CONFIG.parallel, 0)


class Rig:
    """A handle, what it told, and the time it reads; each life gets the next script."""

    def __init__(self, folder: Path, *scripts: str) -> None:
        self.folder, self.scripts = folder, list(scripts)
        self.time = FakeTime()
        self.told: list[FromWorker | Lost] = []
        self.news = asyncio.Event()
        self.pids: list[int] = []
        time = Time(self.time.clock, self.time.sleep)
        self.handle = WorkerHandle(Rank(dp=1), self.spec, folder, self.heard, time)
        self.task: asyncio.Task[None]
        self.next_script()

    def next_script(self) -> None:
        script = self.scripts.pop(0) if self.scripts else "exit 1"
        self.handle.program = (sys.executable, SCRIPT, *script.split())

    def spec(self, endpoint: str) -> WorkerSpec:
        return WorkerSpec(
            role="hybrid",
            rank=Rank(dp=1),
            config=CONFIG,
            disagg=DisaggConfig.derive("hybrid", CONFIG, PLACE),
            key_hex="00" * 16,
            endpoint=endpoint,
            epoch=1,
        )

    def heard(self, handle: WorkerHandle, message: FromWorker | Lost) -> None:
        assert handle is self.handle
        self.told.append(message)
        if handle.pid is not None and handle.pid not in self.pids:
            self.pids.append(handle.pid)
        if isinstance(message, Lost):
            self.next_script()
        self.news.set()

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self.news.clear()
            await self.news.wait()

    async def until_told(self, kind: type, count: int = 1) -> None:
        await self.until(lambda: len(self.of(kind)) >= count)

    def of(self, kind: type) -> list[FromWorker | Lost]:
        return [each for each in self.told if isinstance(each, kind)]

    @property
    def lost(self) -> list[tuple[str, str, bool]]:
        found = [each for each in self.told if isinstance(each, Lost)]
        return [(each.problem.code, each.problem.message, each.final) for each in found]


@asynccontextmanager
async def running(folder: Path, *scripts: str) -> AsyncIterator[Rig]:
    rig = Rig(folder, *scripts)
    rig.task = asyncio.create_task(rig.handle.run())
    try:
        yield rig
    finally:
        rig.handle.stop()
        await rig.time.run_for(6)  # for scripts that do not listen
        await rig.task
    assert os.listdir(folder) == [], "a socket's file is left"
    for pid in rig.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_worker_is_ready_is_told_and_stops_when_asked(tmp_path: Path) -> None:
    async with running(tmp_path, "ready hear stop exit 0") as rig:
        await rig.until_told(messages.Ready)
        assert rig.handle.state is WorkerState.READY
        assert rig.handle.ready is not None
        rig.handle.tell(messages.Drain())
        await rig.until_told(messages.Fatal)
        rig.handle.stop()
        await rig.task
        assert [str(rig.handle.state), rig.handle.ready, rig.handle.pid] == ["stopped", None, None]
        assert rig.lost == []  # it was wanted: nobody's loss
        assert [f.problem.code for f in rig.told if isinstance(f, messages.Fatal)] == ["drain"]


async def test_what_a_worker_said_before_it_died_is_heard_first_and_whole(tmp_path: Path) -> None:
    async with running(tmp_path, "ready many 5000 fatal oom kill") as rig:
        await rig.until_told(Lost)
        assert len(rig.of(messages.Loading)) == 5000
        assert isinstance(rig.told[-1], Lost)
        assert rig.lost == [("oom", "no use", False)]
        assert rig.handle.last_problem == messages.Problem(code="oom", message="no use")


async def test_a_death_without_a_word_says_how_it_ended(tmp_path: Path) -> None:
    async with running(tmp_path, "ready kill") as rig:
        await rig.until_told(Lost)
        assert rig.lost == [("peer_lost", "worker 1,0,0 ended with exit status -9", False)]


async def test_a_message_to_a_dead_or_loading_worker_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, "many 1 wait") as rig:
        with pytest.raises(PeerLost, match="is spawning, not ready"):
            rig.handle.tell(messages.Drain())
        await rig.until_told(messages.Loading)
        with pytest.raises(PeerLost, match="is loading, not ready"):
            rig.handle.tell(messages.Drain())
        assert rig.handle.pid is not None
        os.kill(rig.handle.pid, 9)
        await rig.until_told(Lost)
        with pytest.raises(PeerLost, match="is waiting, not ready"):
            rig.handle.tell(messages.Drain())


async def test_a_worker_that_dies_starts_again_after_growing_pauses(tmp_path: Path) -> None:
    async with running(tmp_path, "exit 3", "ready exit 4", "ready stop exit 0") as rig:
        await rig.until_told(Lost)
        assert rig.handle.state is WorkerState.WAITING
        await rig.time.run_for(0.19)
        assert rig.handle.lives == 1
        await rig.time.run_for(0.02)
        await rig.until_told(Lost, 2)
        await rig.time.run_for(0.39)
        assert rig.handle.lives == 2
        await rig.time.run_for(0.02)
        await rig.until_told(messages.Ready, 2)
        assert rig.handle.lives == 3
        assert [final for _, _, final in rig.lost] == [False, False]


async def test_a_worker_that_dies_too_often_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, *["ready exit 1"] * 5) as rig:
        for count in range(1, 5):
            await rig.until_told(Lost, count)
            await rig.time.run_for(10)
        await rig.task
        assert [final for _, _, final in rig.lost] == [False] * 4 + [True]
        assert (rig.handle.state, rig.handle.lives) == (WorkerState.FAILED, 5)
        with pytest.raises(PeerLost, match="is failed"):
            rig.handle.tell(messages.Drain())


async def test_a_life_that_served_long_makes_up_for_deaths_before_it(tmp_path: Path) -> None:
    """But not one that only loaded for long: that would go on for ever."""
    async with running(tmp_path, "exit 1", "exit 1", "ready wait", "many 1 wait") as rig:
        for count in (1, 2):
            await rig.until_told(Lost, count)
            await rig.time.run_for(10)
        await rig.until_told(messages.Ready)
        rig.time.now += 31
        assert rig.handle.pid is not None
        os.kill(rig.handle.pid, 9)
        await rig.until_told(Lost, 3)
        await rig.time.run_for(0.21)  # the first pause again
        await rig.until_told(messages.Loading)
        rig.time.now += 31
        os.kill(rig.handle.pid, 9)
        await rig.until_told(Lost, 4)
        await rig.time.run_for(0.21)
        assert rig.handle.lives == 4  # the second pause is longer


async def test_deaths_of_a_sound_worker_never_add_up(tmp_path: Path) -> None:
    """A rank's death ends its whole group: one death for each, and none is given up for it."""
    async with running(tmp_path, *["ready wait"] * 8) as rig:
        for count in range(1, 8):
            await rig.until_told(messages.Ready, count)
            rig.time.now += 31
            assert rig.handle.pid is not None
            os.kill(rig.handle.pid, 9)
            await rig.until_told(Lost, count)
            await rig.time.run_for(0.21)  # the first pause each time
        assert not any(final for _, _, final in rig.lost)
        await rig.until_told(messages.Ready, 8)


async def test_a_wrong_setting_is_not_tried_again(tmp_path: Path) -> None:
    async with running(tmp_path, "fatal bad_config exit 1") as rig:
        await rig.task
        assert rig.lost == [("bad_config", "no use", True)]
        assert rig.handle.state is WorkerState.FAILED


async def test_a_program_that_is_not_there_is_a_death_with_a_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        rig.handle.program = (str(tmp_path / "nothing"),)
        await rig.until_told(Lost)
        assert "did not start" in rig.lost[0][1]


async def test_a_worker_that_still_loads_is_ended_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "many 1 wait") as rig:
        await rig.until_told(messages.Loading)
        rig.handle.stop()
        await rig.task  # no time passes on the clock of the handle
        assert rig.handle.state is WorkerState.STOPPED
        assert rig.lost == []


async def test_a_worker_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path, "ready wait") as rig:
        await rig.until_told(messages.Ready)
        rig.handle.stop()
        await rig.time.run_for(4.9)
        assert not rig.task.done()
        await rig.time.run_for(0.2)
        await rig.task


async def test_a_worker_that_dies_while_it_is_stopped_is_no_loss(tmp_path: Path) -> None:
    async with running(tmp_path, "ready stop kill") as rig:
        await rig.until_told(messages.Ready)
        rig.handle.stop()
        await rig.task
        assert rig.lost == []


async def test_stop_at_any_other_moment_ends_it_too(tmp_path: Path) -> None:
    async with running(tmp_path, "wait") as rig:  # before run has begun
        rig.handle.stop()
        await rig.task
        assert rig.handle.lives == 0
    async with running(tmp_path, "wait") as rig:  # while the process is being made
        while rig.handle.lives == 0:
            await asyncio.sleep(0)
        rig.handle.stop()
        await rig.task
        assert (str(rig.handle.state), rig.handle.lives) == ("stopped", 1)
    async with running(tmp_path, "exit 1") as rig:  # during the pause
        await rig.until_told(Lost)
        rig.handle.stop()
        await rig.task
        assert (str(rig.handle.state), rig.handle.lives) == ("stopped", 1)


async def test_a_cancelled_handle_leaves_no_process(tmp_path: Path) -> None:
    async with running(tmp_path, "ready wait") as rig:
        await rig.until_told(messages.Ready)
        rig.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rig.task
        rig.task = asyncio.create_task(asyncio.sleep(0))


async def test_what_is_no_message_is_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, "noise ready wait") as rig:
        await rig.until_told(messages.Ready)
        assert [type(each) for each in rig.told] == [messages.Ready]


async def test_a_ready_worker_that_says_nothing_is_made_to_end_and_started_again(
    tmp_path: Path,
) -> None:
    """Stopped or stuck, it would keep its requests waiting for ever."""
    async with running(tmp_path, "ready wait", "ready wait") as rig:
        await rig.until_told(messages.Ready)
        await rig.time.run_for(1.7)
        assert rig.lost == []
        await rig.time.run_for(0.3)
        await rig.until_told(Lost)
        assert rig.lost == [("peer_lost", "worker 1,0,0 lives but says nothing", False)]
        await rig.time.run_for(0.3)
        await rig.until_told(messages.Ready, 2)


async def test_a_worker_that_loads_may_be_silent(tmp_path: Path) -> None:
    async with running(tmp_path, "wait") as rig:
        while rig.handle.pid is None:
            await asyncio.sleep(0.01)
        await rig.time.run_for(60)
        assert rig.lost == []
