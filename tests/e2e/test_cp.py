"""Prefill instances whose ranks share prompts answer as one rank does; a death ends the group."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import multinode
from tests.e2e.cluster import Answer, Cluster, Tables
from tests.e2e.colocated import Colocated
from tests.e2e.multinode import Spread
from tests.e2e.test_models import settings, write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": 5},
    "scheduler": {"max_prefill_tokens": 96, "kv_memory": 1 << 20},
    "transfer": {"checksums": True},
}
SAMPLING = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
TYPED = {"peer_lost", "no_prefill", "no_decode", "unavailable", "transfer_failed"}
ALONE = Colocated()


def sizes(tp: int, cp: int = 1) -> Tables:
    return {"parallel": {"world_size": tp * cp, "tp": tp, "cp": cp, "devices_per_node": tp * cp}}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cp")
    cluster = Cluster.make(folder, 1, 1, 0, SETTINGS, per_role={"prefill": sizes(1, 2)})
    cluster.startup_s = 90.0
    cluster.start()
    yield cluster
    cluster.stop()


async def request(cluster: Cluster, prompt: list[int]) -> Answer:
    return await cluster.post("/generate", {"prompt": prompt, "sampling_params": SAMPLING})


async def answers_alike(cluster: Cluster) -> None:
    """Short and long ones, together and warm: each twice, the second time after a prefix hit."""
    prompts = [[i, 7, 2 * i, 99] * (12 * i + 1) for i in range(8)]
    for _ in range(2):
        got = await asyncio.gather(*(request(cluster, p) for p in prompts))
        for prompt, answer in zip(prompts, got, strict=True):
            assert answer.headers["x-pd-path"] == "disagg"
            assert answer.ids == ALONE.answer(prompt, SAMPLING)
    await cluster.until_baseline()


async def test_ranks_that_share_prompts_answer_as_one_does(cluster: Cluster) -> None:
    await answers_alike(cluster)
    status = await cluster.status("prefill0")
    assert [w["rank"] for w in status["workers"]] == ["0,0,0", "0,1,0"]
    await cluster.until(lambda: share_alike(cluster), "each writes its share of the blocks")


async def share_alike(cluster: Cluster) -> bool:
    assert cluster.http is not None
    async with cluster.http.get(f"{cluster.nodes['prefill0'].url}/metrics") as response:
        text = await response.text()
    lines = re.findall(r"^pdrt_events_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    sent = [float(value) for labels, value in lines if "sent_bytes" in labels]
    return len(sent) == 2 and 0.4 * sum(sent) < min(sent)


@pytest.mark.parametrize(
    "cp", [1, pytest.param(0, marks=pytest.mark.matrix)], ids=["follower", "head"]
)
async def test_a_rank_that_dies_costs_its_group_once(cluster: Cluster, cp: int) -> None:
    """CASES 33: typed errors, and the group comes back by itself."""
    prompt = [3, 1, 4, 1, 5] * 300
    workers = (await cluster.status("prefill0"))["workers"]
    before = [worker["lives"] for worker in workers]
    pending = asyncio.create_task(request(cluster, prompt))
    await cluster.until(lambda: is_running(cluster), "it computes")
    os.kill(await cluster.worker_pid("prefill0", cp), signal.SIGKILL)
    answer = await pending
    if answer.status == 200:
        assert answer.ids == ALONE.answer(prompt, SAMPLING)
    else:
        assert answer.code in TYPED, answer.body
    await cluster.until(lambda: has_new_lives(cluster, before), "all ranks live anew", 30)
    await cluster.until(lambda: serves(cluster), "it serves again", 15)
    await cluster.until_baseline()


async def is_running(cluster: Cluster) -> bool:
    return (await cluster.figures("prefill0"))["running"] > 0


async def has_new_lives(cluster: Cluster, before: list[int]) -> bool:
    status = await cluster.status("prefill0")
    now = [worker["lives"] for worker in status["workers"]]
    return status["ready_ranks"] == [0] and all(n > b for n, b in zip(now, before, strict=True))


async def serves(cluster: Cluster) -> bool:
    answer = await request(cluster, list(range(150)))
    if answer.status != 200:
        assert answer.code in TYPED, answer.body
        await asyncio.sleep(0.1)
        return False
    assert answer.ids == ALONE.answer(list(range(150)), SAMPLING)
    return True


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(sizes(2, 2), sizes(2)), (sizes(2, 2), sizes(1)), (sizes(1, 3), sizes(2))],
    ids=["cp2 tp2 to tp2", "cp2 tp2 to tp1", "cp3 to tp2"],
)
async def test_groups_of_both_kinds_answer_as_one_rank_does(
    tmp_path: Path, prefill: Tables, decode: Tables
) -> None:
    pair = {"prefill": prefill, "decode": decode}
    cluster = Cluster.make(tmp_path, 1, 1, 0, SETTINGS, per_role=pair)
    cluster.startup_s = 90.0
    async with cluster.running():
        await answers_alike(cluster)


@pytest.mark.matrix
async def test_ranks_of_two_nodes_share_prompts_too(tmp_path: Path) -> None:
    """Prefill's four ranks are on two nodes, one of each cp rank."""
    layout = {"prefill": Spread("prefill", nodes=2, tp=2, cp=2), "decode": Spread("decode")}
    cluster = multinode.make(tmp_path, layout, SETTINGS)
    async with cluster.running():
        await answers_alike(cluster)


@pytest.mark.matrix
@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2)])
async def test_real_models_say_what_generate_does(
    tmp_path: Path, family: str, tp: int, cp: int
) -> None:
    """Prompts around the sizes of blocks, chunks and what is worth sharing, alone and together."""
    from tests.device import tiny

    oracle = tiny.make(family, tmp_path / "model")
    write_tokenizer(tmp_path / "model", tiny.VOCAB)
    more: Tables = {"scheduler": {"max_prefill_tokens": 96}}
    pair = {"prefill": sizes(tp, cp)}
    cluster = Cluster.make(tmp_path, 1, 1, 0, settings(tmp_path / "model"), more, per_role=pair)
    cluster.startup_s = 120.0
    async with cluster.running():
        prompts = [tiny.prompt(n, n) for n in (1, 8, 63, 64, 65, 96, 131, 192, 200)]
        wanted = [tiny.answer(oracle, prompt, 12) for prompt in prompts]
        for prompt, want in zip(prompts, wanted, strict=True):
            assert (await request(cluster, prompt)).ids == want
        prompts = [tiny.prompt(5 + 19 * n, 50 + n) for n in range(10)]
        wanted = [tiny.answer(oracle, prompt, 12) for prompt in prompts]
        for _ in range(2):  # then after prefix hits
            got = await asyncio.gather(*(request(cluster, prompt) for prompt in prompts))
            assert [answer.ids for answer in got] == wanted
        await cluster.until_baseline()
