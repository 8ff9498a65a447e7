"""The followers of a group (cp x tp ranks), as its tp 0 of cp 0 has them.

They come and say hello, join tp 0 for the forward pass, and from then on compute each of its
steps and carry out its transfer commands. The promises: a command is carried out by a rank when
it has computed the steps that tp 0 had computed when it gave it; tp 0 begins a step when all have
ended the last but one, so that no rank has more than two before it; when one is gone, does not
come or is stuck, we are gone too (`run` or `meet` raises). Followers of other nodes are awaited
without limit, until they say hello: whether their nodes come is the supervisors' business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

import zmq.asyncio

from pdrt import duties, messages, parts, reach, steps
from pdrt.config import ParallelSection
from pdrt.data.commands import TransferCommand
from pdrt.data.events import TransferEvent
from pdrt.data.group import Group
from pdrt.data.manager import TransferStats
from pdrt.data.relay import pack_command, unpack_event
from pdrt.device.batch import SeqStep
from pdrt.device.moves import NONE, Moves
from pdrt.device.places import Rendezvous, TcpPlace
from pdrt.devicethread import DeviceThread
from pdrt.errors import ConfigError, PeerLost
from pdrt.grid import group_size
from pdrt.link import Link
from pdrt.messages import FromFollower, Hello, Join, Joined, Order, Stepped, ToFollower, Told
from pdrt.spawn import WorkerSpec
from pdrt.stall import LOOK_S, StallWatch

ToldEvent: TypeAlias = Callable[[int, TransferEvent], None]
_MOST: Final = 2  # steps before a rank: the one under way, and the next, which need not be awaited


class Members:
    """`bind` before the shard is loaded, `run` for as long as the group lives, then `close`."""

    def __init__(
        self,
        spec: WorkerSpec,
        stopping: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._spec, self._stopping, self._clock, self._sleep = spec, stopping, clock, sleep
        self._net = reach.net_of(spec) if spec.far_followers else None
        self._links = {member: self._link(member) for member in spec.followers}
        self._far: dict[int, str] = {}  # where followers of other nodes are awaited
        self._hellos: dict[int, Hello] = {}
        self._joined: set[int] = set()
        self._stepped = dict.fromkeys(self._links, 0)
        self._begun = self._computed = 0  # steps, by ourselves
        self._lost = set[int]()
        self._stall = StallWatch()
        self._news = asyncio.Event()
        self.told: ToldEvent | None = None  # hears the followers' transfer events

    def _link(self, member: int) -> Link[FromFollower, ToFollower]:
        is_far = self._net is not None and member in self._spec.far_followers
        context = self._net.context if self._net and is_far else zmq.asyncio.Context.instance()
        return Link(context, messages.FROM_FOLLOWER, messages.TO_FOLLOWER)

    def bind(self) -> None:
        """Raises OSError."""
        for member, link in self._links.items():
            if self._net is not None and member in self._spec.far_followers:
                self._far[member] = link.serve(self._net)
            else:
                link.bind(self._spec.group_endpoint(member))

    async def run(self) -> None:
        """Raises PeerLost when a follower is gone, or when one of us is stuck."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._end_stall())
            if self._net is not None:
                tasks.create_task(self._net.guard())
                tasks.create_task(self._announce())
            for member, link in self._links.items():
                tasks.create_task(link.run())
                tasks.create_task(self._listen(member, link))
                who = f"worker {self._spec.rank_of(member)}"
                tasks.create_task(duties.watch(link, who, self._stopping))

    async def _announce(self) -> None:
        """Until those of other nodes have come."""
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(reach.announce(self._spec, self._far, self._sleep))
            await self._until(lambda: self._far.keys() <= self._hellos.keys())
            telling.cancel()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        if self._net is not None:
            self._net.close()

    async def meet(self, device: DeviceThread) -> None:
        """Until all are there and have joined us.

        Raises ConfigError when they do not fit, PeerLost when one does not come.
        """
        within_s = self._spec.config.timeouts.startup_s
        try:
            async with asyncio.timeout(None if self._far else within_s):
                await self._until(lambda: len(self._hellos) == len(self._links))
            async with asyncio.timeout(within_s):
                await self._meet(device)
        except TimeoutError:
            there = self._joined if len(self._hellos) == len(self._links) else self._hellos.keys()
            absent = ", ".join(self._names(self._links.keys() - there))
            raise PeerLost(
                f"worker {absent} of our group did not come within {within_s:g} s after we had"
                " loaded ([timeouts] startup_s)"
            ) from None

    async def _meet(self, device: DeviceThread) -> None:
        for member, hello in self._hellos.items():
            self._check(member, hello, device)
        rendezvous = self._rendezvous()
        self._tell_all(Join(rendezvous=str(rendezvous)))
        await device.join(rendezvous)
        await self._until(lambda: len(self._joined) == len(self._links))
        if isinstance(rendezvous, Path):
            rendezvous.unlink(missing_ok=True)

    def _rendezvous(self) -> Rendezvous:
        """A place of no earlier group. Raises OSError."""
        spec = self._spec
        if self._far:
            return TcpPlace.open(spec.disagg.local_ip, spec.key.derive("group"))
        return spec.folder / f"rendezvous-{spec.rank.dp}.{spec.epoch}"

    def _check(self, member: int, hello: Hello, device: DeviceThread) -> None:
        ours, theirs = device.memory, self._spec.rank_of(member)
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
        if device.spare.blocks != hello.host_blocks:
            raise ConfigError(
                f"[scheduler] host_kv_memory: worker {self._spec.rank} has room for"
                f" {device.spare.blocks} KV blocks and worker {theirs} for {hello.host_blocks};"
                " give bytes instead of a fraction"
            )

    # Steps and commands.

    async def step(self, batch: Sequence[SeqStep], moves: Moves = NONE) -> None:
        """Have it computed, before we begin it ourselves."""
        await self._until(lambda: self._begun - min(self._stepped.values()) < _MOST)
        self._begun += 1
        self._stall.begun(sum(len(step.tokens) for step in batch), self._clock())
        self._tell_all(steps.pack(self._begun, batch, moves))

    def computed(self) -> None:
        """We have the step that was begun; what is ordered from now on may rest on it."""
        self._computed = self._begun
        self._stall.computed(self._clock())
        self._stall.ended(self._ended)

    async def lost(self) -> set[int]:
        """The keys of moves that failed on a follower, once all have computed what we have."""
        await self._until(lambda: min(self._stepped.values()) >= self._computed)
        lost, self._lost = self._lost, set()
        return lost

    def order(self, member: int, command: TransferCommand) -> None:
        self._links[member].tell(Order(after=self._computed, command=pack_command(command)))

    def _tell_all(self, message: ToFollower) -> None:
        for link in self._links.values():
            link.tell(message)

    # What they say.

    async def _listen(self, member: int, link: Link[FromFollower, ToFollower]) -> None:
        async for message in link.listen():
            match message:
                case Hello():
                    self._hellos[member] = message
                case Joined():
                    self._joined.add(member)
                case Stepped(number=number, lost=lost):
                    self._lost.update(lost)
                    self._stepped[member] = number
                    self._stall.ended(self._ended)
                case Told(event=event):
                    assert self.told is not None, "a hybrid group transfers nothing"
                    self.told(member, unpack_event(event))
            self._news.set()

    @property
    def _ended(self) -> int:
        """The last step that all of us have ended."""
        return min(self._computed, *self._stepped.values())

    async def _end_stall(self) -> NoReturn:
        """One that is stuck does not die by itself, and the others wait for it in their sums."""
        while True:
            await self._sleep(LOOK_S)
            if lasted := self._stall.look():
                number = self._ended + 1
                done = {0: self._computed, **self._stepped}
                behind = {member for member, last in done.items() if last < number}
                late = ", ".join(self._names(behind))
                raise PeerLost(f"a step has lasted {lasted:g} s and has not ended on: {late}")

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._news.clear()
            await self._news.wait()

    def _names(self, members: Collection[int]) -> list[str]:
        return [str(self._spec.rank_of(member)) for member in sorted(members)]


class GroupTransfers:
    """The transfer sides of all ranks, to the worker as its own alone would be."""

    def __init__(
        self,
        own: parts.Transfers,
        members: Members,
        parallel: ParallelSection,
        wake: Callable[[], None],
    ) -> None:
        self._own, self._members, self._wake = own, members, wake
        self._group = Group(group_size(parallel), parallel.cp)
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

    def _told(self, member: int, event: TransferEvent) -> None:
        self._group.heard(member, event)
        self._carry_out()

    def _carry_out(self) -> None:
        orders = self._group.orders
        while orders:
            member, command = orders.popleft()
            if member == 0:
                self._own.do(command)
            else:
                self._members.order(member, command)
        if self._group.events:
            self._wake()
