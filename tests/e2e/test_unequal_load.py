"""Many clients at once between unequal tensor-parallel sizes: nothing fails, nothing is left."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e]
TWO: Tables = {"parallel": {"world_size": 2, "tp": 2, "devices_per_node": 2}}
SETTINGS: Tables = {"scheduler": {"max_prefill_tokens": 64, "kv_memory": 4 << 20}}
SAMPLING = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
CLIENTS = 128
ALONE = Colocated()


@pytest.mark.parametrize(
    ("transport", "seconds"),
    [
        pytest.param("auto", 5, marks=[pytest.mark.slow, pytest.mark.timeout(120)]),
        pytest.param("tcp", 5, marks=[pytest.mark.soak, pytest.mark.timeout(120)]),
        pytest.param("auto", 600, marks=[pytest.mark.soak, pytest.mark.timeout(800)]),
    ],
)
async def test_128_clients_of_a_tp_2_to_tp_1_pair_are_all_answered_right(
    tmp_path: Path, transport: str, seconds: float
) -> None:
    """CASES 62: this pair used to crash at 128 concurrent requests."""
    carried: Tables = {"transfer": {"transport": transport}}
    cluster = Cluster.make(tmp_path, 1, 1, 0, SETTINGS, carried, per_role={"prefill": TWO})
    async with cluster.running():
        done = await asyncio.gather(*(client(cluster, n, seconds) for n in range(CLIENTS)))
        assert min(done) > 0
        await cluster.until_baseline()


async def client(cluster: Cluster, number: int, seconds: float) -> int:
    """How many requests, one after the other, were answered; each is checked."""
    chance, done, until = random.Random(number), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        prompt = [chance.randrange(256) for _ in range(chance.randrange(1, 200))]
        answer = await cluster.post("/generate", {"prompt": prompt, "sampling_params": SAMPLING})
        assert answer.ids == ALONE.answer(prompt, SAMPLING)
        assert answer.headers["x-pd-path"] == "disagg"
        done += 1
    return done
