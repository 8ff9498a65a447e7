"""The shell of a device worker with tp > 0: it computes what tp 0 of its group computes.

It has a shard of the model, a KV memory and a transfer side of its own, and no scheduler: steps
and transfer commands come from tp 0, transfer events go there. It ends when tp 0 does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

import structlog
import zmq.asyncio
from aiohttp import ClientSession

from pdrt import duties, messages, parts, steps, telemetry
from pdrt.data.process import this_process
from pdrt.data.relay import pack_event, unpack_command
from pdrt.device.backends import open_runner
from pdrt.devicethread import DeviceThread, Load
from pdrt.link import Link
from pdrt.messages import FromFollower, FromWorker, ToFollower, ToWorker
from pdrt.spawn import WorkerSpec


class Follower:
    """One life of it, from its spec to its end."""

    def __init__(
        self,
        spec: WorkerSpec,
        link: Link[ToWorker, FromWorker],
        load: Load = open_runner,
        transfers: parts.MakeTransfers = parts.transfers,
    ) -> None:
        self._spec, self._link, self._open_transfers = spec, link, transfers
        self._device = DeviceThread(spec, self._tell_loading, load)
        self._head: Link[ToFollower, FromFollower] = Link(
            zmq.asyncio.Context.instance(), messages.TO_FOLLOWER, messages.FROM_FOLLOWER
        )
        self._news = asyncio.Event()  # figures differ from those that were told
        self._stop = asyncio.Event()
        self._transfers_news = asyncio.Event()
        self._rendezvous: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._batches: asyncio.Queue[messages.Step] = asyncio.Queue(4)  # tp 0 waits for us
        self._orders: deque[messages.Order] = deque()
        self._computed, self._step_s = 0, 0.0
        self._transfers: parts.OwnTransfers | None = None

    async def run(self) -> None:
        """Until the supervisor says stop. Raises what the worker cannot go on with."""
        self._head.connect(self._spec.group_endpoint(self._spec.rank.tp), watched=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                life = [
                    tasks.create_task(self._link.run()),
                    tasks.create_task(self._head.run()),
                    tasks.create_task(self._listen()),
                    tasks.create_task(self._follow()),
                    tasks.create_task(duties.watch(self._head, "tp 0", self._stop)),
                ]
                async with ClientSession() as session, asyncio.TaskGroup() as inner:
                    work = inner.create_task(self._work(session))
                    await self._stop.wait()
                    work.cancel()
                for task in life:
                    task.cancel()
        finally:
            self._head.close()

    async def _work(self, session: ClientSession) -> None:
        device = self._device
        await device.load()
        memory, endpoint = device.memory, ""
        async with asyncio.TaskGroup() as tasks:
            if self._spec.role != "hybrid":
                wake = self._transfers_news.set
                self._transfers = self._open_transfers(self._spec, memory, session, wake)
                endpoint = await self._transfers.start()
                tasks.create_task(self._transfers.run())
                await self._transfers.try_transports()
                tasks.create_task(self._tell_events(self._transfers))
            process, layout, blocks = this_process(), memory.layout, memory.blocks
            self._head.tell(messages.Hello(process=process, layout=layout, blocks=blocks))
            await device.join(await self._rendezvous)
            self._head.tell(messages.Joined())
            self._link.tell(
                messages.Ready(
                    endpoint=endpoint,
                    process=process,
                    layout=layout,
                    blocks=blocks,
                    eos_token_ids=tuple(device.runner.eos_token_ids),
                )
            )
            if self._spec.role == "prefill":
                lease = duties.stay_registered(
                    self._spec, session, memory, endpoint, device.max_len
                )
                tasks.create_task(lease)
            telemetry.settle()
            tasks.create_task(duties.report(self._link.tell, self._stats, self._news))
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
                    self._rendezvous.set_result(Path(rendezvous))
                case messages.Step():
                    self._batches.put_nowait(message)
                case messages.Order():
                    self._orders.append(message)
                    self._carry_out()

    # What is done.

    async def _compute(self) -> NoReturn:
        """The steps in order, and after each what has waited for it."""
        while True:
            step = await self._batches.get()
            batch, began = steps.unpack(step), time.monotonic()
            await self._device.run(self._device.runner.execute, batch)
            self._computed, self._step_s = step.number, time.monotonic() - began
            self._head.tell(messages.Stepped(number=step.number))
            self._carry_out()
            self._news.set()

    def _carry_out(self) -> None:
        """The orders that rest on no step that is still to be computed here."""
        while self._orders and self._orders[0].after <= self._computed:
            assert self._transfers is not None, "a hybrid scheduler transfers nothing"
            self._transfers.do(unpack_command(self._orders.popleft().command))

    async def _tell_events(self, transfers: parts.OwnTransfers) -> NoReturn:
        """A task of its own: the manager tells of events in the middle of its calls."""
        while True:
            await self._transfers_news.wait()
            self._transfers_news.clear()
            for event in transfers.take_events():
                self._head.tell(messages.Told(event=pack_event(event)))
            self._news.set()

    # What is told.

    def _tell_loading(self, loading: messages.Loading) -> None:
        if not self._stop.is_set():  # the thread goes on to the end of what it does
            self._link.tell(loading)

    def _stats(self) -> messages.Stats:
        """Requests and blocks are tp 0's to count; ours are the transfers."""
        moved = self._transfers.stats() if self._transfers else None
        return messages.Stats(
            rooms=moved.rooms if moved else 0,
            peers=moved.peers if moved else {},
            ways=moved.ways if moved else {},
            counters=moved.counters if moved else {},
            step_ms=self._step_s * 1000,
        )
