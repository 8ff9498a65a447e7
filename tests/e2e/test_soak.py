"""Thousands of requests, every fault at once: each answer is right, and nothing is left behind.

Writes are delayed, reordered, cut short and damaged; clients leave; a worker is killed. What
completes must equal what one device says alone, whatever fails must say why, and afterwards
blocks, slots, rooms, descriptors and memory are what they were.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests.e2e.cluster import Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.alone]
SETTINGS: Final[Tables] = {
    "scheduler": {"max_prefill_tokens": 64, "kv_memory": 1 << 20},
    "transfer": {"checksums": True},
    "log": {"step_every_s": 30},
}
FAULTS: Final = {
    "delay": 0.2,
    "delay_s": 0.05,
    "reorder": 0.05,
    "truncate": 0.005,
    "corrupt": 0.005,
    "duplicate": 0.05,
    "drop": 0.002,
}
# The chance and the seed by which a life ends in its write number ...
AFTER_205, AFTER_2686 = (0.002, 3), (0.0003, 11)
TYPED: Final = {"peer_lost", "no_prefill", "no_decode", "unavailable", "transfer_failed"}
KEPT_OPEN: Final = 40  # connections that are kept for the next request; a leak is hundreds


@asynccontextmanager
async def cluster_of(folder: Path, kill: float, seed: int) -> AsyncIterator[Cluster]:
    """The second prefill worker crashes again and again, in the middle of a write."""
    cluster = Cluster.make(folder, 2, 2, 0, SETTINGS)
    cluster.amend("prefill0", {"transfer.faults": FAULTS})
    cluster.amend("prefill1", {"transfer.faults": {**FAULTS, "kill": kill, "seed": seed}})
    async with cluster.running() as ready:
        yield ready


@dataclass
class Load:
    """Requests of all kinds, some from clients that leave; what came of them is counted."""

    cluster: Cluster
    rng: random.Random
    right: Colocated = field(default_factory=Colocated)
    outcomes: Counter[str] = field(default_factory=Counter)
    done: int = 0

    async def run(self, count: int, at_once: int = 24) -> None:
        numbers = iter(range(count))

        async def client() -> None:
            for _ in numbers:
                await self._one()
                self.done += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(client())

    async def _one(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
        sampling = {
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0, 0.8]),
            "seed": rng.randrange(1000),
            "ignore_eos": True,
        }
        patience = rng.choice([0.01, 0.1]) if rng.random() < 0.1 else 20.0
        try:
            async with asyncio.timeout(patience):
                answer = await self.cluster.generate(prompt, sampling=sampling)
        except TimeoutError:
            assert patience < 1, "a request that nobody answers"
            self.outcomes["left"] += 1
            return
        if answer.status == 200:
            assert answer.ids == self.right.answer(prompt, sampling)
            self.outcomes["right"] += 1
        else:
            assert answer.code in TYPED, answer.body
            self.outcomes[answer.code] += 1

    async def until(self, done: int) -> None:
        while self.done < done:
            await asyncio.sleep(0.02)

    @property
    def failed(self) -> int:
        return sum(n for what, n in self.outcomes.items() if what not in ("right", "left"))


def held(cluster: Cluster) -> dict[int, tuple[int, int]]:
    """Open descriptors and resident bytes of each process, workers included."""
    found = {}
    for process in cluster.processes:
        parent = psutil.Process(process.running.pid)
        for p in (parent, *parent.children()):
            found[p.pid] = (p.num_fds(), p.memory_info().rss)
    return found


def most_grown(before: dict[int, tuple[int, int]], now: dict[int, tuple[int, int]]) -> float:
    """How many times its former resident size the process has that grew most."""
    return max(now[pid][1] / before[pid][1] for pid in before.keys() & now.keys())


async def until_back(cluster: Cluster, before: dict[int, tuple[int, int]], rss: float) -> None:
    """What lives on holds what it held."""

    async def is_back() -> bool:
        now = held(cluster)
        return all(
            now[pid][0] <= before[pid][0] + KEPT_OPEN and now[pid][1] <= before[pid][1] * rss
            for pid in before.keys() & now.keys()
        )

    await cluster.until(is_back, f"they hold what they held: {before}", 5.0)


async def soak(cluster: Cluster, count: int, rss: float) -> dict[str, Any]:
    load = Load(cluster, random.Random(54))
    await cluster.until_trusted()
    await load.run(60)  # whatever is made once is made now, on each of them
    await cluster.until_baseline(5.0)
    before, began = held(cluster), time.monotonic()
    running = asyncio.create_task(load.run(count))
    await load.until(60 + count // 2)
    os.kill(await cluster.worker_pid("decode1"), signal.SIGKILL)
    await running
    seconds = time.monotonic() - began
    await cluster.until_baseline(5.0)
    await until_back(cluster, before, rss)
    figures = {
        **load.outcomes,
        "seconds": round(seconds, 1),
        "blocks_corrupt": await cluster.counted("blocks_corrupt"),
        "lives": [(await cluster.status(n))["workers"][0]["lives"] for n in cluster.nodes],
        "rss": most_grown(before, held(cluster)),
    }
    (cluster.folder / "figures.json").write_text(json.dumps(figures))
    return figures


@pytest.mark.timeout(120)
async def test_hundreds_of_requests_through_faults_are_right_and_leave_nothing(
    tmp_path: Path,
) -> None:
    """CASES 50, 54, 61 and 34 to 47, short form."""
    async with cluster_of(tmp_path, *AFTER_205) as cluster:
        figures = await soak(cluster, 300, rss=1.1)
    assert figures["right"] > 250
    assert figures["blocks_corrupt"] > 0, "the faults were meant to damage something"


@pytest.mark.soak
@pytest.mark.timeout(620)
async def test_five_thousand_requests_through_faults_are_right_and_leave_nothing(
    tmp_path: Path,
) -> None:
    """CASES 54."""
    async with cluster_of(tmp_path, *AFTER_2686) as cluster:
        figures = await soak(cluster, 5000, rss=1.1)
    assert figures["right"] > 4200
    assert figures["blocks_corrupt"] > 0
