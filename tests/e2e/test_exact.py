"""Every family on every path, 64 mixed requests in flight: token for token what transformers says.

Greedy and seeded answers, several of one prompt, log-probabilities, prompts of which 0 to 3 blocks
are in the cache, chunks that do and do not divide blocks and prompts. In float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e import multinode
from tests.e2e.cluster import PATIENT, Cluster, Tables
from tests.e2e.multinode import Spread
from tests.e2e.test_models import parallel, write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
CHUNKS: Final = (32, 20)  # prompt tokens a step: whole blocks, and two and a half of them
FAMILIES: Final = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "deepseek_v2_grouped",
    "deepseek_v3",
]


def settings(model: Path, chunk: int, memory: int = 16 << 20) -> Tables:
    scheduler = {"block_size": 8, "max_prefill_tokens": chunk, "kv_memory": memory}
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "device": {"kind": "cpu", "threads": 1},
        "scheduler": scheduler,
        **PATIENT,
    }


def colocated_and_pair(folder: Path, together: Tables, apart: Tables) -> Cluster:
    folder.mkdir()
    cluster = Cluster.make(folder, 1, 1, 0, apart, router=PATIENT)
    cluster.add_node("hybrid0", "hybrid", together)  # asked directly
    return cluster


def unequal_pair(folder: Path, tables: Tables) -> Cluster:
    """P TP2 -> D DP2."""
    folder.mkdir()
    layouts = {"prefill": parallel(2, 1), "decode": parallel(1, 2)}
    return Cluster.make(folder, 1, 1, 0, tables, per_role=layouts, router=PATIENT)


def over_nodes(folder: Path, tables: Tables, count: int = 2) -> Cluster:
    """A colocated instance of several nodes with a device each."""
    folder.mkdir()
    spread = {"hybrid": Spread("hybrid", nodes=count, tp=count)}
    return multinode.make(folder, spread, tables, router=PATIENT)


@asynccontextmanager
async def all_running(*clusters: Cluster) -> AsyncIterator[None]:
    """Started together: they wait for the same two cores."""
    try:
        for cluster in clusters:
            cluster.startup_s = cluster.answer_s = 300.0
            cluster.start()
        async with AsyncExitStack() as stack:
            for cluster in clusters:
                await stack.enter_async_context(cluster.session())
            yield
    finally:
        for cluster in clusters:
            await asyncio.to_thread(cluster.stop)


async def try_each_path(oracle: Any, vocab: int, seed: int, *clusters: Cluster) -> None:
    """The same 64 questions on each path, then all of them again, warm: judged alike."""
    from tests.e2e import exact

    judge = exact.Judge(oracle)
    first, questions = exact.mixed(vocab, seed)
    again = [exact.Question(q.prompt, q.params) for q in questions]
    heard: dict[str, list[exact.Said]] = {}
    for cluster, url, path, name in paths(*clusters):
        await cluster.post("/generate", exact.Question(first, {"temperature": 0}).body, url)
        await cluster.until_baseline(30.0)
        heard[name] = await exact.ask(cluster, url, path, questions)
        heard[f"{name}, warm"] = await exact.ask(cluster, url, path, again)
        await cluster.until_baseline(30.0)
    await asyncio.to_thread(judge.hear, chain(*heard.values()))
    judge.verdict()


def paths(*clusters: Cluster) -> list[tuple[Cluster, str, str, str]]:
    """(cluster, where to ask, the path it says, name)."""
    found = []
    for cluster in clusters:
        has_pair = "prefill0" in cluster.nodes
        found.append((cluster, cluster.url, "disagg" if has_pair else "local", "router"))
        if has_pair and "hybrid0" in cluster.nodes:
            found.append((cluster, cluster.nodes["hybrid0"].url, "local", "hybrid"))
    return [(c, url, path, f"{c.folder.name} {name}") for c, url, path, name in found]


async def test_a_llama_answers_exactly_colocated_and_apart(tmp_path: Path) -> None:
    from tests.device import tiny

    oracle = tiny.make("llama", model := tmp_path / "model")
    write_tokenizer(model, tiny.VOCAB)
    tables = [settings(model, chunk) for chunk in CHUNKS]
    cluster = colocated_and_pair(tmp_path / "pair", *tables)
    async with all_running(cluster):
        await try_each_path(oracle, tiny.VOCAB, 1, cluster)


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_answers_exactly_on_every_path(tmp_path: Path, family: str) -> None:
    """Each path with the one or the other chunk size, turn about from family to family."""
    from tests.device import tiny

    oracle = tiny.make(family, model := tmp_path / "model")
    write_tokenizer(model, tiny.VOCAB)
    number = FAMILIES.index(family)
    one, other = (settings(model, CHUNKS[(number + i) % 2]) for i in range(2))
    clusters = (
        colocated_and_pair(tmp_path / "pair", one, other),
        unequal_pair(tmp_path / "tp2-dp2", one),
        over_nodes(tmp_path / "nodes", other),
    )
    async with all_running(*clusters):
        await try_each_path(oracle, tiny.VOCAB, 2 + number, *clusters)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
async def test_a_foreign_model_answers_exactly_colocated_and_apart(
    tmp_path: Path, name: str
) -> None:
    from tests.device import tiny
    from tests.device.foreign_tiny import CONFIGS

    oracle = tiny.save(CONFIGS[name], 1, model := tmp_path / "model")
    write_tokenizer(model, tiny.VOCAB)
    tables = [settings(model, chunk) for chunk in CHUNKS]
    cluster = colocated_and_pair(tmp_path / "pair", *tables)
    async with all_running(cluster):
        await try_each_path(oracle, tiny.VOCAB, 40, cluster)


@pytest.mark.matrix
async def test_the_demo_model_answers_exactly_on_every_path(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from pdrt import config, demo

    model = demo.prepare(config.cache_dir(), lambda _stage: None)
    oracle: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    memory = 256 << 20
    one, other = (settings(model, chunk, memory) for chunk in CHUNKS)
    clusters = (
        colocated_and_pair(tmp_path / "pair", one, other),
        over_nodes(tmp_path / "nodes", other, 3),  # of its nine heads and three of KV
    )
    async with all_running(*clusters):
        await try_each_path(oracle, 49152, 50, *clusters)
