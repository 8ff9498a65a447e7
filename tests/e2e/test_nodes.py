"""Instances that span nodes answer as one rank does; the default run has test_nodes_faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e import multinode
from tests.e2e.cluster import PORTS, Answer, Cluster, Process, Tables, fresh_ip
from tests.e2e.colocated import Colocated
from tests.e2e.multinode import Spread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": 20},
    "scheduler": {"max_prefill_tokens": 32, "kv_memory": 1 << 20},
}
SAMPLING = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
ALONE = Colocated()
CONF = Path(__file__).parents[2] / "conf/multinode"


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
    "hybrid TP4 over two nodes": {"hybrid": Spread("hybrid", nodes=2, tp=4)},
    "D TP2 DP2 over four nodes": {
        "prefill": Spread("prefill"),
        "decode": Spread("decode", nodes=4, tp=2, dp=2),
    },
}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_nodes_answer_together_as_one_rank_does(tmp_path: Path, layout: str) -> None:
    cluster = multinode.make(tmp_path, LAYOUTS[layout], SETTINGS)
    async with cluster.running():
        prompts = [[i, 7, 2 * i, 99] * (5 * i + 1) for i in range(8)]
        got = await asyncio.gather(*(request(cluster, p) for p in prompts))
        assert [answer.ids for answer in got] == [ALONE.answer(p, SAMPLING) for p in prompts]
        await cluster.until_baseline()


@pytest.mark.matrix
async def test_the_configs_for_several_hosts_work_as_they_say_they_do(tmp_path: Path) -> None:
    """With the addresses of this machine in place of the hosts', as operations.md rehearses it."""
    cluster = Cluster(tmp_path, startup_s=90.0)
    ips = [fresh_ip(), fresh_ip()]
    for role in ("prefill", "decode"):
        for index, ip in enumerate(ips):
            conf = CONF / f"{role}.toml"
            cluster.nodes[f"{role}{index}"] = Process(
                f"{role}{index}",
                ["node", "--role", role, "--node-index", str(index), "--conf", str(conf)],
                tmp_path / f"{role}{index}.log",
                f"http://{ip}:{PORTS[role]}",
                environ={
                    "PDRT_PARALLEL_IPS": ",".join(ips),
                    "PDRT_PARALLEL_LOCAL_IP": ip,
                    "PDRT_MODEL_PATH": "null",
                    "PDRT_SCHEDULER_KV_MEMORY": "1e6",
                },
            )
    router = tmp_path / "router.toml"
    router.write_text((CONF / "router.toml").read_text().replace("10.0.0.1", ips[0]))
    cluster.router = Process(
        "router",
        ["router", "--conf", str(router)],
        tmp_path / "router.log",
        f"http://{ips[0]}:8000",
    )
    async with cluster.running():
        answers = await asyncio.gather(*(request(cluster, [1, 2, n]) for n in range(4)))
        assert [a.ids for a in answers] == [ALONE.answer([1, 2, n], SAMPLING) for n in range(4)]
        assert {answer.headers["x-pd-path"] for answer in answers} == {"disagg"}


@pytest.mark.matrix
@pytest.mark.timeout(300)
async def test_a_real_model_over_two_nodes_answers_like_generate(tmp_path: Path) -> None:
    """Its halves add up over gloo on tcp, on the prefill, the decode and the colocated side."""
    from tests.device import tiny
    from tests.e2e.test_models import LENGTHS, TOKENS, settings, write_tokenizer

    oracle = tiny.make("llama", tmp_path / "model")
    write_tokenizer(tmp_path / "model", tiny.VOCAB)
    layout = {
        "prefill": Spread("prefill", nodes=2, tp=2),
        "decode": Spread("decode", nodes=2, tp=2),
        "hybrid": Spread("hybrid", nodes=2, tp=2),
    }
    cluster = multinode.make(tmp_path, layout, settings(tmp_path / "model"))
    cluster.startup_s = 200.0
    prompts = [tiny.prompt(length, 7) for length in LENGTHS]
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    async def check_one(prompt: list[int]) -> None:
        body = {"prompt": prompt, "sampling_params": sampling}
        want = tiny.answer(oracle, prompt, TOKENS)
        for url in (cluster.url, cluster.nodes["hybrid0"].url):
            assert (await cluster.post("/generate", body, url)).ids == want

    async with cluster.running():
        for prompt in prompts:
            await check_one(prompt)
        mixed = [tiny.prompt(1 + 11 * i % 90, 50 + i) for i in range(16)]
        await asyncio.gather(*(check_one(prompt) for prompt in mixed))
        await cluster.until_baseline()
