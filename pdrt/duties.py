"""What every worker does until it ends: tell its figures, hold its lease, watch its group, tidy."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

import structlog
from aiohttp import ClientSession

from pdrt import footprint, parts
from pdrt.control.bootstrap_client import keep_registered
from pdrt.data.memory import PoolMemory
from pdrt.devicethread import DeviceThread
from pdrt.errors import PeerLost
from pdrt.link import Link
from pdrt.messages import Stats
from pdrt.spawn import WorkerSpec

_STATS_S: Final = 0.5  # the supervisor takes 1.8 s of silence for the end
_STATS_LEAST_S: Final = 0.05
_TOLD_TOO_S: Final = 0.25
_TRIM_S: Final = 2.0
In = TypeVar("In")
Out = TypeVar("Out")


async def report(
    tell: Callable[[Stats], None], stats: Callable[[], Stats], news: asyncio.Event
) -> NoReturn:
    """Figures soon after something moved (`news`), and twice a second anyhow."""
    while True:
        news.clear()
        tell(stats())
        await asyncio.sleep(_STATS_LEAST_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATS_S - _STATS_LEAST_S):
                await news.wait()


async def trim(device: DeviceThread) -> NoReturn:
    """Between steps, so that none waits for malloc's locks in its middle."""
    while True:
        await asyncio.sleep(_TRIM_S)
        await device.run(footprint.trim)


async def stay_registered(
    spec: WorkerSpec, session: ClientSession, memory: PoolMemory, endpoint: str, max_len: int
) -> None:
    """A prefill rank's lease at its bootstrap server. Raises PdrtError when it cannot be had."""
    disagg = spec.disagg
    client = parts.bootstrap(spec, session, disagg.bootstrap_host, disagg.bootstrap_port)
    said = parts.registration(spec, memory, endpoint, max_len)
    await keep_registered(client, said, spec.config.timeouts.startup_s, _lease, time.monotonic)


def _lease(reason: str | None) -> None:
    if reason is not None:
        structlog.get_logger().warning("lease_lost", reason=reason)


async def watch(link: Link[In, Out], who: str, stopping: asyncio.Event) -> None:
    """Raises PeerLost when the other end is gone, for a group is over without one of its ranks.

    A supervisor that stops a node tells all its ranks at once: then nobody is missed.
    """
    await link.hung_up()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TOLD_TOO_S):
            await stopping.wait()
            return
    raise PeerLost(f"{who} of our group is gone")
