"""Tensor-parallel groups answer as one rank does; a death ends a group, and it comes back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdrt.device.chance import seed_of
from tests.e2e.cluster import Answer, Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(120)]
TWO: Tables = {"parallel": {"world_size": 2, "tp": 2, "devices_per_node": 2}}
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": 20},
    "scheduler": {"max_prefill_tokens": 32, "kv_memory": 1 << 20, "prefix_cache": False},
}
PROMPT = list(range(256)) * 3  # 24 chunks: half a second of prefill
SAMPLING = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}  # half a second of decode
ALONE = Colocated()
TYPED = {"peer_lost", "no_prefill", "no_decode", "unavailable", "transfer_failed"}
BOUND_S = 2.0


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tp")
    pair = {"prefill": TWO, "decode": TWO}
    cluster = Cluster.make(folder, 1, 1, 0, SETTINGS, per_role=pair)
    cluster.start()
    yield cluster
    cluster.stop()


async def request(cluster: Cluster, prompt: list[int]) -> Answer:
    return await cluster.post("/generate", {"prompt": prompt, "sampling_params": SAMPLING})


async def test_groups_answer_as_one_rank_does(cluster: Cluster) -> None:
    prompts = [[i, 7, 2 * i, 99] * (5 * i + 1) for i in range(8)]
    got = await asyncio.gather(*(request(cluster, p) for p in prompts))
    for prompt, answer in zip(prompts, got, strict=True):
        assert answer.headers["x-pd-path"] == "disagg"
        assert answer.ids == ALONE.answer(prompt, SAMPLING)
    for name in ("prefill0", "decode0"):
        await has_two_ranks(cluster, name)
    await cluster.until_baseline()


async def test_groups_answer_with_several_sequences_as_one_rank_does(cluster: Cluster) -> None:
    """Each rank copies its own part of the prompt's last block."""
    sampling = {**SAMPLING, "n": 3, "temperature": 0.9, "seed": 5}
    for length in (5, 16, 40):
        prompt = [length, 7, 99, 3, 1] * (length // 5) + [2] * (length % 5)
        body = {"prompt": prompt, "sampling_params": sampling}
        whole = (await cluster.post("/generate", body)).body
        said = [one["output_ids"] for one in whole["outputs"]]
        alone = [{**sampling, "n": 1, "seed": seed_of(5, index)} for index in range(3)]
        assert said == [ALONE.answer(prompt, one) for one in alone]
    await cluster.until_baseline()


@pytest.mark.matrix  # test_nodes_faults has one whose ranks are on two nodes
async def test_a_hybrid_group_answers_as_one_rank_does(tmp_path: Path) -> None:
    cluster = Cluster.make(tmp_path, 0, 0, 1, SETTINGS, per_role={"hybrid": TWO})
    async with cluster.running():
        prompts = [[i, 7, 2 * i, 99] * (5 * i + 1) for i in range(8)]
        got = await asyncio.gather(*(request(cluster, p) for p in prompts))
        assert [answer.ids for answer in got] == [ALONE.answer(p, SAMPLING) for p in prompts]
        await has_two_ranks(cluster, "hybrid0")
        await cluster.until_baseline()


async def has_two_ranks(cluster: Cluster, name: str) -> None:
    status = await cluster.status(name)
    assert [w["rank"] for w in status["workers"]] == ["0,0,0", "0,0,1"]
    assert (status["dp_size"], status["ready_ranks"]) == (1, [0])


async def test_clients_that_leave_at_any_moment_leave_nothing_on_any_rank(
    cluster: Cluster,
) -> None:
    prompts = [[i, 3, 5 * i] * (4 * i + 1) for i in range(10)]
    want = [ALONE.answer(prompt, SAMPLING) for prompt in prompts]
    chance = random.Random(7)
    patience = [chance.choice([None, 0.05, 0.2, 0.4, 0.8]) for _ in range(40)]

    async def ask(number: int) -> int:
        """The HTTP status, or 0 for who left."""
        try:
            async with asyncio.timeout(patience[number]):
                answer = await request(cluster, prompts[number % 10])
        except TimeoutError:
            return 0
        assert answer.ids == want[number % 10]
        return answer.status

    statuses = await asyncio.gather(*map(ask, range(40)))
    assert set(statuses) == {0, 200}
    await cluster.until_baseline()


@pytest.mark.parametrize(
    ("name", "tp", "how"),
    [
        ("decode0", 1, signal.SIGKILL),
        ("prefill0", 0, signal.SIGKILL),
        pytest.param("decode0", 0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("prefill0", 1, signal.SIGKILL, marks=pytest.mark.matrix),
        pytest.param("decode0", 1, signal.SIGSTOP, marks=pytest.mark.matrix),
        pytest.param("prefill0", 1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
async def test_a_rank_that_dies_or_stands_still_costs_its_group_once(
    cluster: Cluster, name: str, tp: int, how: signal.Signals
) -> None:
    """CASES 33: typed errors within 2 s, the rank is named, the group comes back by itself."""
    want = ALONE.answer(PROMPT, SAMPLING)
    before = await lives(cluster, name)
    pending = asyncio.create_task(request(cluster, PROMPT))
    await cluster.until(lambda: is_running(cluster, name), f"{name} computes")
    os.kill(await cluster.worker_pid(name, tp), how)
    struck = time.monotonic()
    answer = await pending
    took = time.monotonic() - struck
    if answer.status == 200:
        assert answer.ids == want
    else:
        assert answer.code in TYPED, answer.body
        assert took < BOUND_S + 0.5 * (how is signal.SIGSTOP), answer.body
    await cluster.until(lambda: has_new_lives(cluster, name, before), "all ranks live anew", 30)
    await cluster.until(lambda: serves(cluster), "it serves again", 15)
    await cluster.until_baseline()


async def is_running(cluster: Cluster, name: str) -> bool:
    return (await cluster.figures(name))["running"] > 0


async def lives(cluster: Cluster, name: str) -> list[int]:
    return [worker["lives"] for worker in (await cluster.status(name))["workers"]]


async def has_new_lives(cluster: Cluster, name: str, before: list[int]) -> bool:
    status = await cluster.status(name)
    now = [worker["lives"] for worker in status["workers"]]
    return status["ready_ranks"] == [0] and all(n > b for n, b in zip(now, before, strict=True))


async def serves(cluster: Cluster) -> bool:
    answer = await request(cluster, PROMPT[:100])
    if answer.status != 200:
        assert answer.code in TYPED, answer.body
        await asyncio.sleep(0.1)
        return False
    assert answer.ids == ALONE.answer(PROMPT[:100], SAMPLING)
    return True
