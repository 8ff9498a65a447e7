"""A group in this process: tp 0 and its followers, with devices the test holds."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from aiohttp import ClientSession

from pdrt import grid, messages, parts, steps
from pdrt.config import NodeConfig
from pdrt.data.commands import AbortReceiver, TransferCommand
from pdrt.data.events import Quiet, TransferEvent
from pdrt.data.manager import TransferStats
from pdrt.data.memory import PoolMemory
from pdrt.data.relay import pack_command, pack_event
from pdrt.device.backends import Progress
from pdrt.device.batch import ELSEWHERE, Drawn, Runner, SeqStep
from pdrt.device.null import NullRunner
from pdrt.device.places import Rendezvous
from pdrt.errors import ConfigError, PdrtError, PeerLost, first_of
from pdrt.follower import Follower
from pdrt.link import Link
from pdrt.members import Members
from pdrt.messages import (
    FromFollower,
    FromWorker,
    Hello,
    Join,
    Joined,
    KvLayout,
    Loading,
    Order,
    Outputs,
    Ready,
    Stats,
    Stepped,
    Stop,
    ToFollower,
    Told,
    ToWorker,
)
from pdrt.spawn import WorkerSpec
from pdrt.worker import Worker
from tests.fake_time import FakeTime
from tests.test_worker import made_spec, submit


class Device:
    """A null device whose group is the test's business; each step waits for a permit."""

    def __init__(self, block_size: int = 16) -> None:
        self.runner = NullRunner(block_size)
        self.layout: KvLayout = self.runner.layout
        self.eos_token_ids = self.runner.eos_token_ids
        self.vocab, self.prepare = self.runner.vocab, self.runner.prepare
        self.may_load, self.may_join = threading.Event(), threading.Event()
        self.may_load.set()
        self.may_join.set()
        self.permits = threading.Semaphore(1000)
        self.computed: list[list[SeqStep]] = []
        self.met: list[Path] = []

    def hold(self) -> None:
        """No step ends from now on without a permit."""
        while self.permits.acquire(blocking=False):
            pass

    def load(self, _config: NodeConfig, _progress: Progress, _rank: int, _size: int) -> Runner:
        self.may_load.wait()
        return self

    def bind(self, pool: memoryview, blocks: int) -> None:
        self.runner.bind(pool, blocks)

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        assert isinstance(rendezvous, Path)
        rendezvous.touch()
        self.may_join.wait()
        self.met.append(rendezvous)

    def execute(self, batch: Sequence[SeqStep]) -> list[Drawn]:
        self.permits.acquire()
        self.computed.append([_plain(step) for step in batch])
        return self.runner.execute(batch)


def _plain(step: SeqStep) -> SeqStep:
    """As it was: tp 0's own lists grow."""
    draw = step.draw and ELSEWHERE
    return SeqStep(step.key, list(step.tokens), step.start, list(step.blocks), draw)


class Member:
    """One rank as its supervisor has it."""

    def __init__(self, device: Device, link: Link[FromWorker, ToWorker]) -> None:
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
        found: list[messages.Output] = []
        while not (found and (found[-1].finish or found[-1].problem)):
            found += (await self.until(Outputs)).items
        return found

    async def end(self) -> str:
        """What it raised."""
        with pytest.raises(ExceptionGroup) as caught:
            await self.task
        error = first_of(caught.value)
        assert isinstance(error, PdrtError)
        return f"{error.code}: {error}"


def spec(folder: Path, rank: int, size: int = 2, cp: int = 1, **tables: Any) -> WorkerSpec:
    parallel = {"world_size": size, "cp": cp, "tp": size // cp, "devices_per_node": size}
    made = made_spec(f"ipc://{folder}/w{rank}", **{"parallel": parallel, **tables})
    return made.model_copy(update={"rank": grid.rank_at(made.config.parallel, rank)})


async def member(
    stack: AsyncExitStack,
    made: WorkerSpec,
    device: Device,
    transfers: parts.MakeTransfers | None = None,
) -> Member:
    context = zmq.asyncio.Context.instance()
    ours = Link(context, messages.FROM_WORKER, messages.TO_WORKER)
    theirs = Link(context, messages.TO_WORKER, messages.FROM_WORKER)
    ours.bind(made.endpoint)
    theirs.connect(made.endpoint)
    kind = Follower if made.member else Worker
    life = kind(made, theirs, device.load, transfers or fake_transfers)
    one = Member(device, ours)
    one.task = asyncio.create_task(life.run())

    async def wind_up() -> None:
        device.may_load.set()
        device.may_join.set()
        device.permits.release(1000)
        one.task.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await one.task
        theirs.close()
        ours.close()

    stack.push_async_callback(wind_up)
    return one


@asynccontextmanager
async def group(folder: Path, *devices: Device, **tables: Any) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        size = len(devices)
        yield [
            await member(stack, spec(folder, rank, size, **tables), device)
            for rank, device in enumerate(devices)
        ]


async def test_a_group_is_ready_when_its_last_rank_has_loaded_and_joined(tmp_path: Path) -> None:
    late = Device()
    late.may_load.clear()
    late.may_join.clear()
    async with group(tmp_path, Device(), Device(), late) as (head, second, third):
        await head.until(Loading)
        await second.until(Loading)
        assert head.device.met == second.device.met == []
        late.may_load.set()
        early = asyncio.create_task(head.until(Ready))
        waiting = [await second.until(Ready)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert not early.done()
        late.may_join.set()
        for ready in (*waiting, await early, await third.until(Ready)):
            assert ready.blocks == (1 << 18) // ready.layout.block_bytes
        assert head.device.met == second.device.met == late.met != []
        assert not [name for name in os.listdir(tmp_path) if name.startswith("rendezvous")]


async def test_every_rank_computes_every_step_and_tp_0_alone_answers(tmp_path: Path) -> None:
    async with group(tmp_path, Device(), Device()) as (head, follower):
        await head.until(Ready)
        await head.tell(submit(max_tokens=5, prompt=range(1, 40)))
        outputs = await head.outputs()
        assert sum(len(output.tokens) for output in outputs) == 5
        while (await follower.until(Stats)).step_ms == 0 or len(follower.device.computed) < 5:
            pass
        assert follower.device.computed == head.device.computed
        assert [len(batch[0].tokens) for batch in head.device.computed] == [39, 1, 1, 1, 1]


async def test_a_rank_has_at_most_two_steps_before_it(tmp_path: Path) -> None:
    async with group(tmp_path, Device(), Device()) as (head, follower):
        await head.until(Ready)
        follower.device.hold()
        await head.tell(submit(max_tokens=9))
        tokens = 0
        while tokens < 2:
            tokens += sum(len(o.tokens) for o in (await head.until(Outputs)).items)
        await head.until(Stats)  # its loop goes round, and no third step begins
        await head.until(Stats)
        assert (len(head.device.computed), len(follower.device.computed)) == (2, 0)
        follower.device.permits.release(1000)
        assert (await head.outputs())[-1].finish == "length"


async def test_a_rank_that_does_not_come_is_named_and_ends_its_group(tmp_path: Path) -> None:
    """Else a group that is started anew might never be ready, and nobody would say why."""
    stuck = Device()
    stuck.may_load.clear()
    async with AsyncExitStack() as stack:
        second = await member(stack, spec(tmp_path, 1, 3), Device())
        await member(stack, spec(tmp_path, 2, 3), stuck)
        head = await member(stack, spec(tmp_path, 0, 3, timeouts={"startup_s": 0.5}), Device())
        assert await head.end() == (
            "peer_lost: worker 0,0,2 of our group did not come within 0.5 s after we had loaded"
            " ([timeouts] startup_s)"
        )
        assert await second.end() == "peer_lost: tp 0 of our group is gone"


@pytest.mark.parametrize(
    ("device", "tables", "why"),
    [
        (Device(32), {}, "workers 0,0,0 (here) and 0,0,1 (there) differ: block_size: 16"),
        (Device(), {"scheduler": {"kv_memory": 1 << 17}}, "worker 0,0,0 has "),
    ],
)
async def test_ranks_that_do_not_fit_together_are_a_wrong_setting(
    tmp_path: Path, device: Device, tables: dict[str, Any], why: str
) -> None:
    async with AsyncExitStack() as stack:
        head = await member(stack, spec(tmp_path, 0), Device())
        await member(stack, spec(tmp_path, 1, **tables), device)
        told = await head.end()
    assert told.startswith(ConfigError.code)
    assert why in told
    assert "0,0,1" in told


async def test_the_loss_of_a_follower_ends_tp_0_and_names_it(tmp_path: Path) -> None:
    async with group(tmp_path, Device(), Device(), Device()) as (head, second, third):
        for one in (head, second, third):
            await one.until(Ready)
        third.task.cancel()
        assert await head.end() == "peer_lost: worker 0,0,2 of our group is gone"
        assert await second.end() == "peer_lost: tp 0 of our group is gone"


async def test_ranks_of_two_kinds_are_one_group_under_one_scheduler(tmp_path: Path) -> None:
    """cp 2 x tp 2: all compute each step, and who is lost is named by its rank."""
    async with group(tmp_path, *(Device() for _ in range(4)), cp=2) as (head, *followers):
        for one in (head, *followers):
            await one.until(Ready)
        await head.tell(submit(max_tokens=3, prompt=range(1, 40)))
        assert sum(len(output.tokens) for output in await head.outputs()) == 3
        for one in followers:
            while (await one.until(Stats)).step_ms == 0 or len(one.device.computed) < 3:
                pass
            assert one.device.computed == head.device.computed
        followers[2].task.cancel()
        assert await head.end() == "peer_lost: worker 0,1,1 of our group is gone"


async def test_a_follower_that_dies_while_others_load_is_missed_too(tmp_path: Path) -> None:
    slow = Device()
    slow.may_load.clear()
    async with group(tmp_path, slow, Device()) as (head, follower):
        await follower.until(Loading)
        await follower.until(Loading)  # the memory is made: it says hello
        for _ in range(50):
            await asyncio.sleep(0)
        follower.task.cancel()
        assert (await head.end()).startswith(PeerLost.code)


async def test_ranks_that_are_stopped_together_miss_nobody(tmp_path: Path) -> None:
    async with group(tmp_path, Device(), Device()) as (head, follower):
        await head.until(Ready)
        await follower.until(Ready)
        await follower.tell(Stop())
        await follower.task
        await head.tell(Stop())
        await head.task


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_each_rank_that_stops_ends_its_transfers_before_it_is_gone(
    tmp_path: Path, role: str
) -> None:
    """Else its peers keep memory in quarantine until they have proof of its death."""
    opened: list[FakeTransfers] = []

    def open_fake(*args: Any) -> FakeTransfers:
        opened.append(fake_transfers(*args))
        return opened[-1]

    async with AsyncExitStack() as stack:
        ranks = [
            await member(stack, spec(tmp_path, tp, role=role), Device(), open_fake) for tp in (0, 1)
        ]
        for rank in ranks:
            await rank.until(Ready)
        for rank in ranks:
            await rank.tell(Stop())
        for rank in ranks:
            await rank.task
    assert [fake.log for fake in opened] == [["leave", "end"]] * 2
    assert [len(fake.take_events()) for fake in opened] == [1, 1]


class Head:
    """tp 0, played by the test."""

    def __init__(self, made: WorkerSpec) -> None:
        self.link: Link[FromFollower, ToFollower] = Link(
            zmq.asyncio.Context.instance(), messages.FROM_FOLLOWER, messages.TO_FOLLOWER
        )
        self.link.bind(made.group_endpoint(made.rank.tp))
        self.heard = self.link.listen()

    async def say(self, message: ToFollower) -> None:
        await self.link.on(message)


class FakeTransfers:
    """Implements OwnTransfers: what it is told to do comes back as an event."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake, self._events = wake, list[TransferEvent]()
        self.log: list[str] = []

    async def start(self) -> str:
        return "tcp://here:1"

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append("end")

    async def try_transports(self) -> None: ...

    async def leave(self, seconds: float) -> None:
        assert seconds <= 1.0
        self.log.append("leave")
        self.do(AbortReceiver(7, 0, "we stop"))  # and nobody hears what becomes of it
        await asyncio.sleep(0)

    def do(self, command: TransferCommand) -> None:
        self._events.append(Quiet(command.room, command.attempt))
        self._wake()

    def take_events(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def stats(self) -> TransferStats:
        return TransferStats(rooms=3, peers={"p": "alive"}, quarantined=0)


def fake_transfers(
    _spec: WorkerSpec, _memory: PoolMemory, _session: ClientSession, wake: Callable[[], None]
) -> FakeTransfers:
    return FakeTransfers(wake)


async def test_a_command_waits_for_the_steps_it_rests_on_and_for_no_other(tmp_path: Path) -> None:
    """Else blocks leave before they are computed, or are given away while they are still used."""
    made = spec(tmp_path, 1, role="decode")
    async with AsyncExitStack() as stack:
        head, device = Head(made), Device()
        stack.callback(head.link.close)
        device.hold()
        follower = await member(stack, made, device)
        assert isinstance(await anext(head.heard), Hello)
        await head.say(Join(rendezvous=str(tmp_path / "r")))
        assert isinstance(await anext(head.heard), Joined)
        assert (await follower.until(Ready)).endpoint == "tcp://here:1"
        stats = await follower.until(Stats)
        assert (stats.rooms, stats.peers, stats.blocks_total) == (3, {"p": "alive"}, 0)
        await head.say(steps.pack(1, [SeqStep(1, [1, 2], 0, [0], None)]))
        for room, after in ((7, 0), (8, 1), (9, 1)):
            command = pack_command(AbortReceiver(room, 0, "x"))
            await head.say(Order(after=after, command=command))
        assert await anext(head.heard) == Told(event=pack_event(Quiet(7, 0)))
        assert device.computed == []
        device.permits.release(1000)
        assert await anext(head.heard) == Stepped(number=1)
        assert await anext(head.heard) == Told(event=pack_event(Quiet(8, 0)))
        assert await anext(head.heard) == Told(event=pack_event(Quiet(9, 0)))


async def test_a_follower_that_is_told_twice_where_to_join_goes_on(tmp_path: Path) -> None:
    made = spec(tmp_path, 1, role="decode")
    async with AsyncExitStack() as stack:
        head, device = Head(made), Device()
        stack.callback(head.link.close)
        await member(stack, made, device)
        assert isinstance(await anext(head.heard), Hello)
        for name in "rs":
            await head.say(Join(rendezvous=str(tmp_path / name)))
        assert isinstance(await anext(head.heard), Joined)
        await head.say(steps.pack(1, [SeqStep(1, [1, 2], 0, [0], None)]))
        assert await anext(head.heard) == Stepped(number=1)
        assert device.met == [tmp_path / "r"]


async def test_a_rank_that_is_stuck_in_a_step_ends_its_group_and_is_named(tmp_path: Path) -> None:
    """Its loop still answers, so that nobody else would miss it for a minute."""
    made, fake, heard = spec(tmp_path, 0, 3), FakeTime(), asyncio.Semaphore(0)
    members = Members(made, asyncio.Event(), fake.clock, fake.sleep)
    members.told = lambda _tp, _event: heard.release()
    members.bind()
    running = asyncio.create_task(members.run())
    one_step = [SeqStep(1, [1], 0, [0], None)]
    async with AsyncExitStack() as stack:
        stack.callback(members.close)
        followers = [follower_end(stack, made, tp) for tp in (1, 2)]
        for number in (1, 2):
            await members.step(one_step)
            fake.now += 0.01
            members.computed()
            for follower in followers[: 3 - number]:  # tp 2 never ends step 2
                await follower.on(Stepped(number=number))
                await follower.on(Told(event=pack_event(Quiet(7, 0))))
                await heard.acquire()
        await fake.run_for(5.0)
        assert not running.done()
        await fake.run_for(0.6)
        with pytest.raises(ExceptionGroup) as caught:
            await running
    assert str(first_of(caught.value)) == "a step has lasted 5.5 s and has not ended on: 0,0,2"


def follower_end(
    stack: AsyncExitStack, made: WorkerSpec, tp: int
) -> Link[ToFollower, FromFollower]:
    context = zmq.asyncio.Context.instance()
    link: Link[ToFollower, FromFollower] = Link(
        context, messages.TO_FOLLOWER, messages.FROM_FOLLOWER
    )
    link.connect(made.group_endpoint(tp))
    stack.callback(link.close)
    return link
