"""The shell of a device worker that follows: it computes what tp 0 (of cp 0) of its group does.

It has a shard of the model, a KV memory and a transfer side of its own, and no scheduler: steps
and transfer commands come from tp 0, transfer events go there. It ends when tp 0 does; one that is
on another node is looked for until it is found.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import structlog
import zmq.asyncio

from pdrt import duties, messages, parts, reach, steps
from pdrt.data.events import TransferEvent
from pdrt.data.process import this_process
from pdrt.data.relay import pack_event, unpack_command
from pdrt.device.backends import open_runner
from pdrt.device.places import Rendezvous, place_of
from pdrt.devicethread import Load
from pdrt.life import Life
from pdrt.link import Link
from pdrt.messages import FromWorker, ToWorker
from pdrt.spawn import WorkerSpec


class Follower:
    """One life of it, from its spec to its end."""

    def __init__(
        self,
        spec: WorkerSpec,
        link: Link[ToWorker, FromWorker],
        load: Load = open_runner,
        make_transfers: parts.MakeTransfers = parts.transfers,
    ) -> None:
        self._spec, self._link = spec, link
        self._life = Life(spec, link, load, make_transfers)
        self._device, self._stop = self._life.device, self._life.stopping
        self._head: reach.Head
        self._has_loaded, self._has_head = asyncio.Event(), asyncio.Event()
        self._rendezvous: asyncio.Future[Rendezvous] = asyncio.get_running_loop().create_future()
        self._batches: asyncio.Queue[messages.Step] = asyncio.Queue(4)  # tp 0 waits for us
        self._orders: deque[messages.Order] = deque()
        self._computed, self._step_s = 0, 0.0

    async def run(self) -> None:
        """Until the supervisor says stop. Raises what the worker cannot go on with."""
        await self._life.run(self._work, self._listen(), self._with_head())

    async def _with_head(self) -> None:
        """As long as tp 0 lives, from when it is found. Raises PeerLost."""
        if self._spec.is_head_far:
            await self._has_loaded.wait()  # its lives until then do not matter
            net = reach.net_of(self._spec)
            try:
                await self._obey(await reach.reach(self._spec, net))
            finally:
                net.close()
        else:
            context = zmq.asyncio.Context.instance()
            head: reach.Head = Link(context, messages.TO_FOLLOWER, messages.FROM_FOLLOWER)
            head.connect(self._spec.group_endpoint(self._spec.member), watched=True)
            await self._obey(head)

    async def _obey(self, head: reach.Head) -> None:
        self._head = head
        self._has_head.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(head.run())
                tasks.create_task(self._follow())
                tasks.create_task(duties.watch(head, "tp 0", self._stop))
        finally:
            head.close()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        device, life = self._device, self._life
        await device.load()
        self._has_loaded.set()
        await life.open_transfers(tasks)
        if life.transfers is not None:
            tasks.create_task(life.follow(life.transfers, self._tell_events))
        layout, blocks, copies = device.memory.layout, device.memory.blocks, device.spare.blocks
        if not self._has_head.is_set():
            self._link.tell(messages.Loading(stage="waiting for tp 0", done=0, total=1))
            await self._has_head.wait()
        hello = messages.Hello(
            process=this_process(), layout=layout, blocks=blocks, host_blocks=copies
        )
        self._head.tell(hello)
        await device.join(await self._rendezvous)
        self._head.tell(messages.Joined())
        life.be_ready(tasks, self._stats)
        tasks.create_task(self._compute())

    # What is heard.

    async def _listen(self) -> None:
        async for message in self._link.listen():
            if isinstance(message, messages.Stop):
                self._stop.set()
            else:
                structlog.get_logger().error("not_for_a_follower", message=type(message).__name__)

    async def _follow(self) -> None:
        async for message in self._head.listen():
            match message:
                case messages.Join(rendezvous=rendezvous):
                    self._join(rendezvous)
                case messages.Step():
                    self._batches.put_nowait(message)
                case messages.Order():
                    self._orders.append(message)
                    self._carry_out()

    def _join(self, rendezvous: str) -> None:
        if self._rendezvous.done():
            structlog.get_logger().error("joined_already", rendezvous=rendezvous)
            return
        spec = self._spec
        secret = spec.key.derive("group")
        self._rendezvous.set_result(place_of(rendezvous, spec.disagg.local_ip, secret))

    # What is done.

    async def _compute(self) -> NoReturn:
        """The steps in order, and after each what has waited for it."""
        while True:
            step = await self._batches.get()
            batch, moves, began = steps.unpack(step), steps.unpack_moves(step), time.monotonic()
            _, lost = await self._device.step(batch, moves)
            self._computed, self._step_s = step.number, time.monotonic() - began
            self._head.tell(messages.Stepped(number=step.number, lost=lost))
            self._carry_out()
            self._life.news.set()

    def _carry_out(self) -> None:
        """The orders that rest on no step that is still to be computed here."""
        while self._orders and self._orders[0].after <= self._computed:
            assert self._life.transfers is not None, "a hybrid scheduler transfers nothing"
            self._life.transfers.do(unpack_command(self._orders.popleft().command))

    def _tell_events(self, events: Sequence[TransferEvent]) -> None:
        for event in events:
            self._head.tell(messages.Told(event=pack_event(event)))
        self._life.news.set()

    # What is told.

    def _stats(self) -> messages.Stats:
        """Requests and blocks are tp 0's to count; ours are the transfers."""
        transfers = self._life.transfers
        moved = transfers.stats() if transfers else None
        return messages.Stats(
            rooms=moved.rooms if moved else 0,
            peers=moved.peers if moved else {},
            transports=moved.transports if moved else {},
            counters=moved.counters if moved else {},
            step_ms=self._step_s * 1000,
        )
