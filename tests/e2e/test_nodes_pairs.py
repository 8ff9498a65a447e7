"""Faults of nodes where prefill and decode are instances of two nodes each, of every kind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import multinode
from tests.e2e.cluster import Answer, Cluster, Tables
from tests.e2e.colocated import Colocated
from tests.e2e.multinode import Spread

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.matrix, pytest.mark.timeout(300)]
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": 20},
    "scheduler": {"max_prefill_tokens": 32, "kv_memory": 1 << 20},
}
PROMPT = list(range(256)) * 3
SAMPLING = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
ALONE = Colocated()
TYPED = {"peer_lost", "no_prefill", "no_decode", "unavailable", "transfer_failed"}
BOUND_S = 2.0
FROZEN_S = 0.5


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Prefill's nodes share a tensor-parallel group, decode's have a dp rank each."""
    layout = {
        "prefill": Spread("prefill", nodes=2, tp=2),
        "decode": Spread("decode", nodes=2, dp=2),
    }
    cluster = multinode.make(tmp_path_factory.mktemp("pairs"), layout, SETTINGS)
    cluster.start()
    yield cluster
    cluster.stop()


def prompts_of(*salt: int) -> list[list[int]]:
    """Each of its own, and new to the cluster: a known one goes to the dp rank that has it."""
    return [[number, *salt, *PROMPT] for number in range(6)]


async def request(cluster: Cluster, prompt: list[int]) -> Answer:
    return await cluster.post("/generate", {"prompt": prompt, "sampling_params": SAMPLING})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["prefill0", "prefill1", "decode0", "decode1"])
async def test_any_node_may_die_or_freeze_and_come_again(
    cluster: Cluster, name: str, how: signal.Signals
) -> None:
    """CASES 33: typed errors within 2 s; who lives gives back all that it had taken."""
    prompts = prompts_of(*name.encode(), how)
    wanted = [ALONE.answer(prompt, SAMPLING) for prompt in prompts]
    pending = [asyncio.create_task(timed(cluster, prompt)) for prompt in prompts]
    await cluster.until(lambda: is_busy(cluster), "all nodes have something to do", 20)
    pids = [await cluster.worker_pid(name, -1 if name[-1] == "1" else 0)]
    if how is signal.SIGKILL:
        pids = []  # they end with their supervisor
    struck = multinode.strike(cluster, name, how, pids)
    for want, (answer, told_s) in zip(wanted, await asyncio.gather(*pending), strict=True):
        if answer.status == 200:
            assert answer.ids == want
        else:
            assert answer.code in TYPED, answer.body
            late = FROZEN_S if how is signal.SIGSTOP else 0
            assert told_s - struck < BOUND_S + late, answer.body
    if how is signal.SIGSTOP:
        multinode.strike(cluster, name, signal.SIGCONT, pids)
    else:
        cluster.nodes[name].ended()
        await cluster.until(lambda: is_free(cluster, name), "the others are at baseline", 5)
        cluster.nodes[name].start()
    await cluster.until(lambda: serves(cluster), "it serves again", cluster.startup_s)
    await cluster.until_baseline(5)


async def timed(cluster: Cluster, prompt: list[int]) -> tuple[Answer, float]:
    """And when it was told."""
    return await request(cluster, prompt), time.monotonic()


async def is_busy(cluster: Cluster) -> bool:
    held = [(await cluster.figures(name))["rooms"] for name in ("decode0", "decode1")]
    return all(rooms > 0 for rooms in held)


async def is_free(cluster: Cluster, but_for: str) -> bool:
    """Whether nothing is taken on the workers of the other instance's nodes, nor of this one's."""
    left = [await cluster.figures(name) for name in cluster.nodes if name != but_for]
    return not any(figures["blocks_used"] + figures["slots_used"] for figures in left)


async def test_a_dp_rank_survives_the_loss_of_its_leader(cluster: Cluster) -> None:
    """It keeps its model, drops what the dead leader had asked for, and serves the next one."""
    before = await lives(cluster, "decode1")
    pending = [asyncio.create_task(request(cluster, prompt)) for prompt in prompts_of()]
    await cluster.until(lambda: is_busy(cluster), "both ranks have something to do", 20)
    multinode.strike(cluster, "decode0", signal.SIGKILL, [])
    await asyncio.gather(*pending, return_exceptions=True)
    await cluster.until(lambda: is_free(cluster, "decode0"), "its blocks are free")
    cluster.nodes["decode0"].ended()
    cluster.nodes["decode0"].start()
    await cluster.until(lambda: serves(cluster), "it serves again", cluster.startup_s)
    assert await lives(cluster, "decode1") == before
    await cluster.until_baseline(5)


async def lives(cluster: Cluster, name: str) -> list[Any]:
    return [(w["lives"], w["pid"]) for w in (await cluster.status(name))["workers"]]


async def serves(cluster: Cluster) -> bool:
    answers = await asyncio.gather(*(request(cluster, PROMPT[:100]) for _ in range(4)))
    for answer in answers:
        if answer.status != 200:
            assert answer.code in TYPED, answer.body
            await asyncio.sleep(0.1)
            return False
        assert answer.ids == ALONE.answer(PROMPT[:100], SAMPLING)
    return True
