"""Decode pools hardly larger than one request, whose KV waits in host memory for its turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
REQUESTS = 32
PROMPT, ANSWER = 80, 80  # 10 blocks of 16
HEAD_BYTES = 8 * 2 * 2 * 16  # of a block of the null device, which has two kv heads
TWO: Tables = {"parallel": {"world_size": 2, "tp": 2, "devices_per_node": 2}}
TIGHT: Tables = {
    "scheduler": {
        "kv_memory": 12 * HEAD_BYTES,  # one on each rank
        "retraction": "copy",
        "host_kv_memory": 1 << 20,
    }
}
ALONE = Colocated()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("copies")
    small: Tables = {"scheduler": {"max_prefill_tokens": 64}}
    cluster = Cluster.make(folder, 1, 1, 0, small, per_role={"decode": {**TWO, **TIGHT}})
    cluster.startup_s = 90.0  # a bound for a busy machine
    cluster.start()
    yield cluster
    cluster.stop()


def sampling_of(room: int) -> dict[str, Any]:
    return {"max_tokens": ANSWER, "temperature": 0.7, "seed": room, "ignore_eos": True}


def prompt_of(room: int) -> list[int]:
    return [(room * 31 + i) % 256 for i in range(PROMPT)]


async def figures(cluster: Cluster) -> dict[str, float]:
    """Counters and host blocks of the decode side's tp 0."""
    assert cluster.http is not None
    found: dict[str, float] = {}
    async with cluster.http.get(f"{cluster.nodes['decode0'].url}/metrics") as response:
        for line in (await response.text()).splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("pdrt_events_total") and 'rank="0,0,0"' in name:
                found[name.split('event="')[1].split('"')[0]] = float(value)
            elif name.startswith("pdrt_host_blocks") and 'rank="0,0,0"' in name:
                found[name.partition("{")[0]] = float(value)
    return found


async def test_32_requests_in_memory_for_one_are_moved_once_and_computed_once(
    cluster: Cluster,
) -> None:
    """CASES 13, 69, 71: from one rank to a group of two; no token differs from one alone."""
    before = await figures(cluster)
    assert before["pdrt_host_blocks_total"] > 100
    status = await cluster.status("decode0")
    assert [worker["blocks_total"] for worker in status["workers"]] == [12, 0]
    asked = [
        {"prompt": prompt_of(room), "sampling_params": sampling_of(room)}
        for room in range(REQUESTS)
    ]
    answers = await asyncio.gather(*(cluster.post("/generate", body) for body in asked))
    for room, answer in enumerate(answers):
        assert answer.status == 200, answer.body
        assert answer.ids == ALONE.answer(prompt_of(room), sampling_of(room)), room
    counted = await figures(cluster)
    assert counted["retractions"] == counted["retractions_copy"] > 0
    assert counted.get("prompt_tokens_computed", 0) == 0
    moved = counted["transfers"] - before.get("transfers", 0)
    assert moved <= REQUESTS + 1  # and the canary's
    await cluster.until_baseline()
    assert (await figures(cluster))["pdrt_host_blocks_used"] == 0


async def test_clients_that_leave_while_their_kv_is_in_host_memory_leave_nothing(
    cluster: Cluster,
) -> None:
    """CASES 38, 41."""
    before = (await figures(cluster)).get("retractions_copy", 0)
    chance = random.Random(3)

    async def one(room: int) -> None:
        body = {"prompt": prompt_of(room), "sampling_params": sampling_of(room)}
        try:
            async with asyncio.timeout(chance.choice([0.05, 0.1, 0.2, 0.4, 60])):
                await cluster.post("/generate", body)
        except TimeoutError:
            return

    await asyncio.gather(*(one(room) for room in range(60)))
    await cluster.until_baseline()
    counted = await figures(cluster)
    assert counted["retractions_copy"] > before
    assert counted["pdrt_host_blocks_used"] == 0
