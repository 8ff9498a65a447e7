"""The followers of a tensor-parallel group, as its tp 0 has them.

They come and say hello, join tp 0 for the forward pass, and from then on compute each of its
steps and carry out its transfer commands. The promises: a command is carried out by a rank when
it has computed the steps that tp 0 had computed when it gave it; no rank is more than one step
behind; when one is gone, so are we (`run` raises).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import zmq.asyncio

from pdrt import duties, messages, parts, steps
from pdrt.data.commands import TransferCommand
from pdrt.data.events import TransferEvent
from pdrt.data.group import Group
from pdrt.data.manager import TransferStats
from pdrt.data.relay import pack_command, unpack_event
from pdrt.device.batch import SeqStep
from pdrt.devicethread import DeviceThread
from pdrt.errors import ConfigError
from pdrt.link import Link
from pdrt.messages import FromFollower, Hello, Join, Joined, Order, Rank, Stepped, ToFollower, Told
from pdrt.spawn import WorkerSpec

ToldEvent: TypeAlias = Callable[[int, TransferEvent], None]
_AHEAD: Final = 1  # steps that tp 0 has begun and a follower has not ended


class Members:
    """`bind` before the shard is loaded, `run` for as long as the group lives, then `close`."""

    def __init__(self, spec: WorkerSpec, stopping: asyncio.Event) -> None:
        self._spec, self._stopping = spec, stopping
        context = zmq.asyncio.Context.instance()
        self._links: dict[int, Link[FromFollower, ToFollower]] = {
            tp: Link(context, messages.FROM_FOLLOWER, messages.TO_FOLLOWER)
            for tp in range(1, spec.config.parallel.tp)
        }
        self._hellos: dict[int, Hello] = {}
        self._joined: set[int] = set()
        self._stepped = dict.fromkeys(self._links, 0)
        self._begun = self._computed = 0  # steps, by ourselves
        self._news = asyncio.Event()
        self.told: ToldEvent | None = None  # hears the followers' transfer events

    def bind(self) -> None:
        """Raises OSError."""
        for tp, link in self._links.items():
            link.bind(self._spec.group_endpoint(tp))

    async def run(self) -> None:
        """Raises PeerLost when a follower is gone."""
        async with asyncio.TaskGroup() as tasks:
            for tp, link in self._links.items():
                tasks.create_task(link.run())
                tasks.create_task(self._listen(tp, link))
                tasks.create_task(duties.watch(link, f"worker {self._rank(tp)}", self._stopping))

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    async def meet(self, device: DeviceThread) -> None:
        """Until all are there and have joined us. Raises ConfigError when they do not fit."""
        await self._until(lambda: len(self._hellos) == len(self._links))
        for tp, hello in self._hellos.items():
            self._check(tp, hello, device)
        place = f"rendezvous-{self._spec.rank.dp}.{self._spec.epoch}"  # no earlier group's
        rendezvous = self._spec.folder / place
        self._tell_all(Join(rendezvous=str(rendezvous)))
        await device.join(rendezvous)
        await self._until(lambda: len(self._joined) == len(self._links))
        rendezvous.unlink(missing_ok=True)

    def _check(self, tp: int, hello: Hello, device: DeviceThread) -> None:
        ours, theirs = device.memory, self._rank(tp)
        if different := ours.layout.differences(hello.layout):
            raise ConfigError(
                f"the shards of workers {self._spec.rank} (here) and {theirs} (there) differ:"
                f" {'; '.join(different)}"
            )
        if ours.blocks != hello.blocks:
            raise ConfigError(
                f"[scheduler] kv_memory: worker {self._spec.rank} has {ours.blocks} KV blocks and"
                f" worker {theirs} has {hello.blocks}; give bytes instead of a fraction"
            )

    # Steps and commands.

    async def step(self, batch: Sequence[SeqStep]) -> None:
        """Have it computed, before we begin it ourselves."""
        await self._until(lambda: min(self._stepped.values()) >= self._begun - _AHEAD)
        self._begun += 1
        self._tell_all(steps.pack(self._begun, batch))

    def computed(self) -> None:
        """We have the step that was begun; what is ordered from now on may rest on it."""
        self._computed = self._begun

    def order(self, tp: int, command: TransferCommand) -> None:
        self._links[tp].tell(Order(after=self._computed, command=pack_command(command)))

    def _tell_all(self, message: ToFollower) -> None:
        for link in self._links.values():
            link.tell(message)

    # What they say.

    async def _listen(self, tp: int, link: Link[FromFollower, ToFollower]) -> None:
        async for message in link.listen():
            match message:
                case Hello():
                    self._hellos[tp] = message
                case Joined():
                    self._joined.add(tp)
                case Stepped(number=number):
                    self._stepped[tp] = number
                case Told(event=event):
                    assert self.told is not None, "a hybrid group transfers nothing"
                    self.told(tp, unpack_event(event))
            self._news.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._news.clear()
            await self._news.wait()

    def _rank(self, tp: int) -> Rank:
        return Rank(dp=self._spec.rank.dp, tp=tp)


class GroupTransfers:
    """The transfer sides of all ranks, to the worker as its own alone would be."""

    def __init__(
        self, own: parts.Transfers, members: Members, size: int, wake: Callable[[], None]
    ) -> None:
        self._own, self._members, self._wake = own, members, wake
        self._group = Group(size)
        members.told = self._told

    def do(self, command: TransferCommand) -> None:
        self._group.command(command)
        self._carry_out()

    def take_events(self) -> list[TransferEvent]:
        """What happened since the last call, in order."""
        for event in self._own.take_events():
            self._group.heard(0, event)
        self._carry_out()
        events = list(self._group.events)
        self._group.events.clear()
        return events

    def stats(self) -> TransferStats:
        """Of our own rank; each other one tells its own."""
        return self._own.stats()

    def _told(self, tp: int, event: TransferEvent) -> None:
        self._group.heard(tp, event)
        self._carry_out()

    def _carry_out(self) -> None:
        orders = self._group.orders
        while orders:
            rank, command = orders.popleft()
            if rank == 0:
                self._own.do(command)
            else:
                self._members.order(rank, command)
        if self._group.events:
            self._wake()
