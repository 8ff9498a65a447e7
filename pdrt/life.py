"""What the lives of all device workers have in common, from loading the model to the stop.

A worker has one: its device thread, the transfer side of its rank, and what is told to its
supervisor whatever the rank does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from aiohttp import ClientSession

from pdrt import duties, footprint, garbage, messages, parts
from pdrt.data.events import TransferEvent
from pdrt.data.process import this_process
from pdrt.devicethread import DeviceThread, Load
from pdrt.link import Link
from pdrt.messages import FromWorker, ToWorker
from pdrt.spawn import WorkerSpec

_LEAVE_S: Final = 0.5  # for transfers to end when we stop; who hangs must not keep us
Work: TypeAlias = Callable[[asyncio.TaskGroup], Coroutine[Any, Any, None]]


class Life:
    """`run` what the worker does; in there load `device`, `open_transfers`, `be_ready`."""

    def __init__(
        self,
        spec: WorkerSpec,
        link: Link[ToWorker, FromWorker],
        load: Load,
        make_transfers: parts.MakeTransfers,
    ) -> None:
        self.spec, self.link = spec, link
        self.device = DeviceThread(spec, self._tell_loading, load)
        self.transfers: parts.OwnTransfers | None = None
        self.stopping = asyncio.Event()  # set it to end this life
        self.news = asyncio.Event()  # figures differ from those that were told
        self.wake = asyncio.Event()  # the transfers have events
        self._make_transfers = make_transfers
        self._endpoint = ""
        self._session: ClientSession

    async def run(self, work: Work, *beside: Coroutine[Any, Any, None]) -> None:
        """Until it is time to stop. Raises what the worker cannot go on with."""
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(each) for each in (self.link.run(), *beside)]
            async with ClientSession() as self._session, asyncio.TaskGroup() as inner:
                working = inner.create_task(_in_group(work))
                await self.stopping.wait()
                if self.transfers is not None:
                    await self.transfers.leave(_LEAVE_S)
                working.cancel()
            for each in others:
                each.cancel()

    async def open_transfers(self, tasks: asyncio.TaskGroup) -> None:
        """Those of our rank, unless it is hybrid; once the device is loaded."""
        if self.spec.role == "hybrid":
            return
        transfers = self._make_transfers(
            self.spec, self.device.memory, self._session, self.wake.set
        )
        self._endpoint = await transfers.start()
        tasks.create_task(transfers.run())
        await transfers.try_transports()
        self.transfers = transfers

    async def follow(
        self, transfers: parts.Transfers, heard: Callable[[list[TransferEvent]], None]
    ) -> None:
        """A task of its own: the manager tells of events in the middle of its calls.

        What ends because we stop is of no use to a scheduler any more.
        """
        while not self.stopping.is_set():
            self.wake.clear()
            heard(transfers.take_events())
            await self.wake.wait()

    def be_ready(self, tasks: asyncio.TaskGroup, stats: Callable[[], messages.Stats]) -> None:
        """Say so, and do from now on what every worker does."""
        self.link.tell(self._ready())
        if self.spec.role == "prefill":
            tasks.create_task(
                duties.stay_registered(
                    self.spec,
                    self._session,
                    self.device.memory,
                    self._endpoint,
                    self.device.max_len,
                )
            )
        garbage.settle_for_steps()
        footprint.give_back()
        tasks.create_task(garbage.sweep(lambda: stats().rooms))
        tasks.create_task(duties.trim(self.device))
        tasks.create_task(duties.report(self.link.tell, stats, self.news))

    def _ready(self) -> messages.Ready:
        """What the supervisor and the peers need to know."""
        memory = self.device.memory
        return messages.Ready(
            endpoint=self._endpoint,
            process=this_process(),
            layout=memory.layout,
            blocks=memory.blocks,
            eos_token_ids=tuple(self.device.runner.eos_token_ids),
        )

    def _tell_loading(self, loading: messages.Loading) -> None:
        if not self.stopping.is_set():  # the thread goes on to the end of what it does
            self.link.tell(loading)


async def _in_group(work: Work) -> None:
    """So that whoever cancels the work cancels what it has started."""
    async with asyncio.TaskGroup() as tasks:
        await work(tasks)
