"""Pools with hardly more memory than one request needs, under 32 of them at once.

All finish with the tokens they would have alone, and tokens keep coming.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(200)]
REQUESTS = 32
PROMPT, ANSWER = 80, 80  # 10 blocks of 16
BLOCK_BYTES = 8 * 2 * 2 * 2 * 16  # of the null device at block_size 16
ALL: Tables = {"scheduler": {"max_prefill_tokens": 64}}
TIGHT: Tables = {"scheduler": {"kv_memory": 12 * BLOCK_BYTES}}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(
        tmp_path_factory.mktemp("tight"), 1, 1, 0, ALL, per_role={"decode": TIGHT}
    )
    cluster.add_node("tight", "hybrid", ALL, TIGHT)
    cluster.startup_s = 90.0
    cluster.start()
    yield cluster
    cluster.stop()


def body_of(room: int) -> dict[str, Any]:
    sampling = {"max_tokens": ANSWER, "temperature": 0.7, "seed": room, "ignore_eos": True}
    prompt = [(room * 31 + i) % 256 for i in range(PROMPT)]
    return {"prompt": prompt, "sampling_params": sampling, "timeout_s": 100}


async def streamed(cluster: Cluster, url: str, room: int, heard: list[float]) -> list[int]:
    ids: list[int] = []
    body = {**body_of(room), "stream": True}
    assert cluster.http is not None
    async with cluster.http.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            text = line.decode().removeprefix("data: ").strip()
            if text and text != "[DONE]":
                ids += json.loads(text)["output_ids"]
                heard.append(time.monotonic())
    return ids


@pytest.mark.parametrize("way", ["pair", "hybrid"])
async def test_of_32_requests_in_memory_for_one_all_finish_and_no_second_is_silent(
    cluster: Cluster, way: str
) -> None:
    url = cluster.url if way == "pair" else cluster.nodes["tight"].url
    heard: list[float] = []
    rooms = range(REQUESTS)
    told = await asyncio.gather(*(streamed(cluster, url, room, heard) for room in rooms))
    alone = cluster.nodes["tight"].url
    for room, ids in zip(rooms, told, strict=True):
        assert ids == (await cluster.post("/generate", body_of(room), alone)).ids
    assert max(after - before for before, after in pairwise(heard)) < 1.0
    await cluster.until_baseline()
