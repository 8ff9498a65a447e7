"""A device worker: in this process with a device that the test holds, and as a real process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from pdrt import messages
from pdrt.config import DisaggConfig, NodeConfig, Place, Role, check
from pdrt.control.heartbeat import Time
from pdrt.control.worker_handle import Lost, WorkerHandle
from pdrt.device.backends import Progress
from pdrt.device.batch import Drawn, Runner, SeqStep
from pdrt.device.null import NullRunner
from pdrt.device.places import Rendezvous
from pdrt.errors import ConfigError, first_of
from pdrt.link import Link
from pdrt.messages import (
    Drain,
    FromWorker,
    Loading,
    Output,
    Outputs,
    Rank,
    Ready,
    Sampling,
    Stats,
    Stop,
    Submit,
    ToWorker,
    pack_ids,
)
from pdrt.spawn import WorkerSpec
from pdrt.worker import Worker, in_messages
from tests.fake_time import FakeTime


def made_spec(endpoint: str, role: Role = "hybrid", **tables: Any) -> WorkerSpec:
    small = {"model": {"path": "null"}, "scheduler": {"kv_memory": 1 << 18}}
    config = check(NodeConfig, small | tables, "test")
    return WorkerSpec(
        role=role,
        rank=Rank(),
        config=config,
        disagg=DisaggConfig.derive(role, config, Place.of(config.parallel, 0)),
        key_hex="5e" * 16,
        endpoint=endpoint,
        epoch=7,
    )


def submit(room: int = 7, max_tokens: int = 3, prompt: Sequence[int] = (1, 2, 3)) -> Submit:
    return Submit(
        room=room,
        attempt=2,
        request_id="r",
        tokens=pack_ids(list(prompt)),
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        time_left=20.0,
    )


class HeldDevice:
    """A null device whose loading and steps wait for the test."""

    def __init__(self) -> None:
        self.may_load, self.may_step, self.loads = (threading.Event() for _ in range(3))
        self.trouble: Exception | None = None
        self.runner = NullRunner(16)
        self.layout, self.eos_token_ids = self.runner.layout, self.runner.eos_token_ids
        self.vocab, self.prepare = self.runner.vocab, self.runner.prepare

    def load(self, _config: NodeConfig, progress: Progress, _rank: int, _size: int) -> Runner:
        progress("weights", 0, 1)
        self.loads.set()
        self.may_load.wait()
        progress("weights", 1, 1)
        return self

    def bind(self, pool: memoryview, blocks: int) -> None:
        self.runner.bind(pool, blocks)

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        raise AssertionError("it is alone")

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        self.may_step.wait()
        if self.trouble is not None:
            raise self.trouble
        return self.runner.execute(batch)


class Rig:
    def __init__(self, device: HeldDevice, link: Link[FromWorker, ToWorker]) -> None:
        self.device, self.link = device, link
        self.heard = link.listen()
        self.task: asyncio.Task[None]

    async def tell(self, message: ToWorker) -> None:
        await self.link.on(message)

    async def until(self, kind: type) -> Any:
        async for message in self.heard:
            if isinstance(message, kind):
                return message
        raise AssertionError

    async def outputs(self) -> list[messages.Output]:
        """All of one room, to its end."""
        found: list[messages.Output] = []
        while not (found and (found[-1].finish or found[-1].problem)):
            found += (await self.until(Outputs)).items
        return found


@asynccontextmanager
async def rigged(folder: Path, loaded: bool = True, **tables: Any) -> AsyncIterator[Rig]:
    endpoint, device = f"ipc://{folder}/w", HeldDevice()
    device.may_step.set()
    if loaded:
        device.may_load.set()
    with zmq.asyncio.Context() as context:
        ours = Link(context, messages.FROM_WORKER, messages.TO_WORKER)
        theirs = Link(context, messages.TO_WORKER, messages.FROM_WORKER)
        ours.bind(endpoint)
        theirs.connect(endpoint)
        rig = Rig(device, ours)
        worker = Worker(made_spec(endpoint, **tables), theirs, device.load)
        rig.task = asyncio.create_task(worker.run())
        try:
            yield rig
        finally:
            device.may_load.set()
            device.may_step.set()
            if not rig.task.done():
                await rig.tell(Stop())
                await rig.task
            theirs.close()
            ours.close()


async def test_a_worker_loads_is_ready_answers_and_stops(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        stages = [(await rig.until(Loading)).stage for _ in range(4)]
        assert stages == ["weights", "weights", "kv pool", "kv pool"]
        ready = await rig.until(Ready)
        assert (ready.blocks, ready.endpoint) == ((1 << 18) // ready.layout.block_bytes, "")
        assert ready.process.pid == os.getpid()
        await rig.tell(submit())
        outputs = await rig.outputs()
        assert sum(len(output.tokens) for output in outputs) == 3
        assert (outputs[-1].finish, outputs[-1].attempt) == ("length", 2)
        stats = await rig.until(Stats)
        while stats.counters.get("tokens_out") != 3 or stats.rooms:
            stats = await rig.until(Stats)
        assert (stats.running, stats.blocks_used, stats.blocks_total) == (0, 0, ready.blocks)


async def test_a_stop_while_the_model_loads_ends_the_worker_at_once(tmp_path: Path) -> None:
    async with rigged(tmp_path, loaded=False) as rig:
        await rig.until(Loading)
        await rig.tell(Stop())
        await rig.task  # though the thread still loads
        assert not rig.device.may_load.is_set()


async def test_a_worker_that_hangs_while_it_loads_ends_and_says_so(tmp_path: Path) -> None:
    """Started anew it would never be ready, and its supervisor, which is, would wait."""
    async with rigged(tmp_path, loaded=False, timeouts={"startup_s": 0.2}) as rig:
        with pytest.raises(ExceptionGroup) as caught:
            await rig.task
        told = "worker 0,0,0 did not load within 0.2 s ([timeouts] startup_s)"
        assert str(first_of(caught.value)) == told


async def test_a_stop_during_a_long_step_ends_the_worker_at_once(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        rig.device.may_step.clear()
        await rig.until(Ready)
        await rig.tell(submit())
        while (await rig.until(Stats)).running == 0:
            pass
        await rig.tell(Stop())
        await rig.task
        assert not rig.device.may_step.is_set()


async def test_figures_and_refusals_come_during_a_long_step(tmp_path: Path) -> None:
    """CASES 71: a rank in a long forward still answers."""
    async with rigged(tmp_path) as rig:
        rig.device.may_step.clear()
        await rig.until(Ready)
        await rig.tell(submit(7))
        while (await rig.until(Stats)).running == 0:
            pass
        await rig.tell(submit(7))  # the same room again
        (refused,) = await rig.outputs()
        assert refused.problem is not None
        assert (refused.problem.code, refused.problem.stage) == ("conflict", "hybrid")
        await rig.tell(messages.AbortRoom(room=7, reason="client_gone"))
        while (await rig.until(Stats)).rooms:
            pass


async def test_one_of_several_sequences_can_be_stopped(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.until(Ready)
        three = submit(7)
        await rig.tell(replace(three, sampling=replace(three.sampling, n=3, max_tokens=500)))
        said = [one for one in (await rig.until(Outputs)).items if one.index == 1]
        await rig.tell(messages.AbortRoom(room=7, reason="stop", index=1))
        while not any(one.finish for one in said):
            said += [one for one in (await rig.until(Outputs)).items if one.index == 1]
        assert said[-1].finish == "stop"
        await rig.tell(messages.AbortRoom(room=7, reason="client_gone"))
        while (await rig.until(Stats)).rooms:
            pass


async def test_a_draining_worker_finishes_what_it_has(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        rig.device.may_step.clear()
        await rig.until(Ready)
        await rig.tell(submit(7))
        await rig.tell(Drain())
        await rig.tell(submit(8))
        (refused,) = await rig.outputs()
        assert refused.problem is not None
        assert (refused.room, refused.problem.code) == (8, "draining")
        rig.device.may_step.set()
        assert (await rig.outputs())[-1].finish == "length"


def test_what_a_step_says_goes_in_one_message_unless_it_is_too_large_for_it() -> None:
    small = [Output(room=room, tokens=(1,)) for room in range(300)]
    assert list(in_messages(small)) == [tuple(small)]
    assert list(in_messages([])) == []
    large = [Output(room=room, scored=b"12345678" * (1 << 16)) for room in range(64)]
    parts = list(in_messages([*small, *large]))
    assert [one for part in parts for one in part] == [*small, *large]
    frames = [messages.encode(messages.FROM_WORKER, Outputs(items=part)) for part in parts]
    assert max(map(len, frames)) <= messages.MAX_MESSAGE_BYTES
    assert len(frames) == 8


async def test_what_the_device_raises_ends_the_worker(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.until(Ready)
        rig.device.trouble = RuntimeError("out of memory")
        await rig.tell(submit())
        with pytest.raises(ExceptionGroup) as caught:
            await rig.task
        assert str(first_of(caught.value)) == "out of memory"


async def test_a_pool_without_a_block_is_a_wrong_setting(tmp_path: Path) -> None:
    async with rigged(tmp_path, scheduler={"kv_memory": 2}) as rig:
        with pytest.raises(ExceptionGroup) as caught:
            await rig.task
        assert isinstance(first_of(caught.value), ConfigError)


# Real processes.


class Process:
    """A worker process with its handle, which never waits long: it stops or dies."""

    def __init__(self, folder: Path, role: Role, **tables: Any) -> None:
        self.told: list[FromWorker | Lost] = []
        self.news = asyncio.Event()
        fake = FakeTime()
        self.handle = WorkerHandle(
            Rank(),
            lambda endpoint: made_spec(endpoint, role, **tables),
            folder,
            self.heard,
            Time(fake.clock, fake.sleep),
        )

    def heard(self, _handle: WorkerHandle, message: FromWorker | Lost) -> None:
        self.told.append(message)
        self.news.set()

    async def until(self, kind: type) -> Any:
        while True:
            for message in self.told:
                if isinstance(message, kind):
                    return message
            self.news.clear()
            await self.news.wait()


async def test_a_worker_process_ignores_signals_and_stops_when_told(tmp_path: Path) -> None:
    """And what it had to say to its peers' bootstrap server was not needed for being ready."""
    process = Process(tmp_path, "decode")
    running = asyncio.create_task(process.handle.run())
    ready = await process.until(Ready)
    assert ready.endpoint.startswith("tcp://127.0.0.1:")
    assert process.handle.pid is not None
    os.kill(process.handle.pid, 15)
    os.kill(process.handle.pid, 2)
    process.handle.stop()
    await running
    assert not [m for m in process.told if isinstance(m, Lost)]


async def test_a_worker_process_says_why_it_cannot_go_on(tmp_path: Path) -> None:
    process = Process(tmp_path, "hybrid", scheduler={"kv_memory": 2})
    await process.handle.run()
    lost = await process.until(Lost)
    assert (lost.problem.code, lost.final) == ("bad_config", True)
    assert "hold no block" in lost.problem.message


async def test_a_worker_whose_supervisor_is_gone_ends_and_tidies_up(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    command = (sys.executable, "-m", "pdrt.worker")
    worker = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert worker.stdin is not None
    worker.stdin.write(made_spec(f"ipc://{folder}/w").line())
    await worker.stdin.drain()
    worker.stdin.close()
    assert await worker.wait() == 1
    assert os.listdir(tmp_path) == []


def test_a_person_who_starts_a_worker_is_told_who_should() -> None:
    command = [sys.executable, "-m", "pdrt.worker"]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "pdrt worker: no worker spec on standard input: `pdrt node` starts workers"
    ]
