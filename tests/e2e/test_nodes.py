"""Instances that span nodes answer as one rank does, and lose no more than what died."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e import multinode
from tests.e2e.cluster import Answer, Cluster, Tables
from tests.e2e.colocated import Colocated
from tests.e2e.multinode import Spread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": 20},
    "scheduler": {"max_prefill_tokens": 32, "kv_memory": 1 << 20},
}
SAMPLING = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
ALONE = Colocated()


async def request(cluster: Cluster, prompt: list[int]) -> Answer:
    return await cluster.post("/generate", {"prompt": prompt, "sampling_params": SAMPLING})


LAYOUTS = {
    "hybrid TP2 over two nodes": {"hybrid": Spread("hybrid", nodes=2, tp=2)},
    "P TP2 over two nodes -> D": {
        "prefill": Spread("prefill", nodes=2, tp=2),
        "decode": Spread("decode"),
    },
    "P DP2 -> D DP2, each over two nodes": {
        "prefill": Spread("prefill", nodes=2, dp=2),
        "decode": Spread("decode", nodes=2, dp=2),
    },
    "D TP2 DP2 over four nodes": {
        "prefill": Spread("prefill"),
        "decode": Spread("decode", nodes=4, tp=2, dp=2),
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_nodes_answer_together_as_one_rank_does(tmp_path: Path, layout: str) -> None:
    cluster = multinode.make(tmp_path, LAYOUTS[layout], SETTINGS)
    async with cluster.running():
        prompts = [[i, 7, 2 * i, 99] * (5 * i + 1) for i in range(8)]
        got = await asyncio.gather(*(request(cluster, p) for p in prompts))
        assert [answer.ids for answer in got] == [ALONE.answer(p, SAMPLING) for p in prompts]
        await cluster.until_baseline()
