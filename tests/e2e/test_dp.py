"""Two dp ranks on each side: same answers, all ranks used, one death costs only its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
TWO: Tables = {"parallel": {"world_size": 2, "dp": 2, "devices_per_node": 2}}


async def test_dp_ranks_share_the_work_and_one_death_costs_only_its_own(tmp_path: Path) -> None:
    """CASES 33: and the answers are those of one rank alone."""
    both = {"prefill": TWO, "decode": TWO}
    cluster = Cluster.make(tmp_path, 1, 1, 0, {"device": {"step_ms": 5}}, per_role=both)
    cluster.add_node("hybrid0", "hybrid")
    async with cluster.running():
        prompts = [[i, 7, 2 * i, 99] * (i + 1) for i in range(16)]
        answers = await asyncio.gather(
            *(cluster.generate(p, sampling={"max_tokens": 8}) for p in prompts)
        )
        sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        for prompt, answer in zip(prompts, answers, strict=True):
            body = {"prompt": prompt, "sampling_params": sampling}
            alone = await cluster.post("/generate", body, cluster.nodes["hybrid0"].url)
            assert answer.ids == alone.ids
        for name in ("prefill0", "decode0"):
            lives = [worker["lives"] for worker in (await cluster.status(name))["workers"]]
            assert lives == [1, 1]
            assert all([count > 0 for count in await submitted(cluster, name)]), name
        os.kill(await cluster.worker_pid("decode0", 1), signal.SIGKILL)
        after = await asyncio.gather(
            *(cluster.generate(p, sampling={"max_tokens": 8}) for p in prompts)
        )
        for answer, before in zip(after, answers, strict=True):
            assert answer.status == 503 or answer.ids == before.ids
        assert any(answer.status == 200 for answer in after), "the other rank goes on"
        await cluster.until_baseline()


async def submitted(cluster: Cluster, name: str) -> list[float]:
    """Requests that each rank's scheduler got."""
    assert cluster.http is not None
    async with cluster.http.get(f"{cluster.nodes[name].url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return [
        float(line.split()[-1])
        for line in lines
        if line.startswith('pdrt_events_total{event="submitted"')
    ]
