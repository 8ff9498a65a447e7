"""A node of an instance dies, freezes, leaves or comes again: typed errors soon, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import multinode
from tests.e2e.cluster import Answer, Cluster, Tables
from tests.e2e.colocated import Colocated
from tests.e2e.multinode import Spread

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(240)]
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": 20},
    "scheduler": {"max_prefill_tokens": 32, "kv_memory": 1 << 20, "prefix_cache": False},
    "timeouts": {"drain_s": 20.0, "request_s": 30.0},
}
PROMPT = list(range(256)) * 3  # 24 chunks: half a second of prefill
SAMPLING = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
ALONE = Colocated()
TYPED = {"peer_lost", "no_prefill", "no_decode", "unavailable", "transfer_failed", "draining"}
BOUND_S = 2.0
FROZEN_S = 0.5  # more, for who says nothing


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A tensor-parallel group over two nodes."""
    folder = tmp_path_factory.mktemp("nodes")
    cluster = multinode.make(folder, {"node": Spread("hybrid", nodes=2, tp=2)}, SETTINGS)
    cluster.start()
    yield cluster
    cluster.stop()


async def request(cluster: Cluster, prompt: list[int] | None = None) -> Answer:
    body = {"prompt": prompt or PROMPT, "sampling_params": SAMPLING}
    return await cluster.post("/generate", body)


async def in_flight(cluster: Cluster, leader: str = "node0", count: int = 1) -> list[Any]:
    """Requests that are being computed."""
    found = [asyncio.create_task(request(cluster)) for _ in range(count)]
    await cluster.until(lambda: is_running(cluster, leader, count), "it computes", 10)
    return found


async def is_running(cluster: Cluster, leader: str, count: int = 1) -> bool:
    return (await cluster.figures(leader))["running"] >= count


async def check_typed(pending: list[Any], struck: float, most_s: float) -> None:
    for answer in await asyncio.gather(*pending):
        if answer.status == 200:
            assert answer.ids == ALONE.answer(PROMPT, SAMPLING)
        else:
            assert answer.code in TYPED, answer.body
            assert time.monotonic() - struck < most_s, answer.body


async def check_whole(cluster: Cluster) -> None:
    """It serves again by itself, and holds nothing of before."""
    await cluster.until(lambda: serves(cluster), "it serves again", cluster.startup_s)
    await cluster.until_baseline(5)


async def lives(cluster: Cluster) -> list[int]:
    return [worker["lives"] for worker in (await cluster.status("node0"))["workers"]]


async def serves(cluster: Cluster) -> bool:
    answer = await request(cluster, PROMPT[:100])
    if answer.status != 200:
        assert answer.code in TYPED, answer.body
        await asyncio.sleep(0.1)
        return False
    assert answer.ids == ALONE.answer(PROMPT[:100], SAMPLING)
    return True


async def says(cluster: Cluster, name: str, what: str) -> bool:
    """Whether a node's /ready gives this reason, and its /health does not deny it."""
    status, body = await cluster.get(f"{cluster.nodes[name].url}/ready")
    return status == 503 and what in body["reason"]


async def test_two_nodes_answer_together_as_one_rank_does(cluster: Cluster) -> None:
    prompts = [[i, 7, 2 * i, 99] * (5 * i + 1) for i in range(8)]
    got = await asyncio.gather(*(request(cluster, prompt) for prompt in prompts))
    assert [answer.ids for answer in got] == [ALONE.answer(p, SAMPLING) for p in prompts]
    status = await cluster.status("node0")
    assert [worker["rank"] for worker in status["workers"]] == ["0,0,0", "0,0,1"]
    await cluster.until_baseline()


async def test_a_far_worker_that_dies_costs_its_group_once(cluster: Cluster) -> None:
    """CASES 33: on another node too."""
    lived, pending = await lives(cluster), await in_flight(cluster)
    struck = time.monotonic()
    os.kill(await cluster.worker_pid("node1"), signal.SIGKILL)
    await check_typed(pending, struck, BOUND_S)
    await check_whole(cluster)
    assert await lives(cluster) == [before + 1 for before in lived]


async def test_a_far_node_that_dies_is_named_and_comes_back(cluster: Cluster) -> None:
    pending = await in_flight(cluster)
    far = cluster.nodes["node1"]
    struck = multinode.strike(cluster, "node1", signal.SIGKILL, [])
    await check_typed(pending, struck, BOUND_S)
    reason = "worker 0,0,1 of node 1 (127."
    await cluster.until(lambda: says(cluster, "node0", reason), "the leader names it")
    _, health = await cluster.get(f"{cluster.nodes['node0'].url}/health")
    assert health["nodes"][0]["state"].startswith("absent: its node is gone")
    far.ended()
    far.start()
    await check_whole(cluster)


@pytest.mark.slow
async def test_a_far_node_that_freezes_is_found_out_and_thaws(cluster: Cluster) -> None:
    pending = await in_flight(cluster)
    pids = [await cluster.worker_pid("node1")]
    struck = multinode.strike(cluster, "node1", signal.SIGSTOP, pids)
    await check_typed(pending, struck, BOUND_S + FROZEN_S)
    multinode.strike(cluster, "node1", signal.SIGCONT, pids)
    await check_whole(cluster)


@pytest.mark.slow
async def test_a_leader_that_dies_and_comes_again_finds_its_node(cluster: Cluster) -> None:
    pending = await in_flight(cluster)
    multinode.strike(cluster, "node0", signal.SIGKILL, [])
    await asyncio.gather(*pending, return_exceptions=True)
    await cluster.until(lambda: says(cluster, "node1", "leader"), "the node misses it")
    cluster.nodes["node0"].ended()
    cluster.nodes["node0"].start()
    await check_whole(cluster)


@pytest.mark.slow
async def test_a_node_that_is_drained_finishes_what_it_has_and_leaves(cluster: Cluster) -> None:
    pending = await in_flight(cluster)
    cluster.nodes["node1"].kill(signal.SIGTERM)
    await cluster.until(lambda: says(cluster, "node0", "leaving"), "the leader takes nothing new")
    refused = await request(cluster)
    assert (refused.status, refused.code in TYPED) == (503, True), refused.body
    (answer,) = await asyncio.gather(*pending)
    assert answer.ids == ALONE.answer(PROMPT, SAMPLING)
    assert await asyncio.to_thread(cluster.nodes["node1"].ended, 15) == 0
    await cluster.until(lambda: says(cluster, "node0", "it has left"), "the leader knows")
    cluster.nodes["node1"].start()
    await check_whole(cluster)
