"""When a worker's full collections happen, and when they do not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator

import pytest

from pdrt import garbage

DEFAULT = (700, 10, 10)  # Python's own thresholds


class Knot:
    """Only a collection can free it."""

    def __init__(self, gone: asyncio.Event) -> None:
        self.me, self._gone = self, gone

    def __del__(self) -> None:
        self._gone.set()


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(*DEFAULT)  # another test of this process may have run a router
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@contextlib.asynccontextmanager
async def sweeping(living: list[int]) -> AsyncIterator[None]:
    task = asyncio.create_task(garbage.sweep(living.pop, 0.0))
    yield
    task.cancel()


async def test_what_only_a_full_collection_can_free_is_freed_once_few_requests_live() -> None:
    gone = asyncio.Event()
    Knot(gone)
    gc.freeze()
    gc.unfreeze()  # it is old now
    living = [0, 10_000, 10_000]
    async with sweeping(living):
        await gone.wait()
    assert not living


@pytest.mark.usefixtures("_as_it_was")
def test_no_full_collection_begins_by_itself_once_a_worker_is_ready() -> None:
    garbage.settle_for_steps()
    assert gc.isenabled()
    began: list[int] = []
    gc.callbacks.append(lambda phase, info: began.append(info["generation"]))
    try:
        kept = [[number] for number in range(100_000)]
    finally:
        gc.callbacks.pop()
    assert set(began) == {0, 1}
    assert len(kept) == 100_000


@pytest.mark.usefixtures("_as_it_was")
async def test_a_router_looks_at_the_young_seldom_and_still_frees_knots() -> None:
    """Requests leave none, but whoever does is found without being asked for."""
    gone = asyncio.Event()
    garbage.settle_for_requests()
    assert gc.get_threshold()[0] > 10 * DEFAULT[0]
    Knot(gone)
    kept: list[list[int]] = [[] for _ in range(2 * gc.get_threshold()[0])]
    assert kept
    assert gone.is_set()
