"""A seed says the same alone, in a batch of 64, on a pair, and after retractions on either side."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.cluster import PATIENT, Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
BLOCK: Final = 8
NULL_BLOCK_BYTES: Final = 8 * 2 * 2 * 2 * BLOCK
TINY_BLOCK_BYTES: Final = 3 * 2 * 2 * 16 * BLOCK * 4  # of tiny's llama in float32
SMALL: Final = 40  # blocks; the longest request needs 21 of them
LONGEST: Final = (60, 100)  # tokens of prompt and answer
REQUESTS: Final = 64
Asked = tuple[list[int], dict[str, Any]]


def cluster_of(folder: Path, block_bytes: int, tables: Tables) -> Cluster:
    """A pair whose decode pool is too small for 64 requests, and so is that of `hybrid1`."""

    def sized(blocks: int) -> Tables:
        pool = {"kv_memory": blocks * block_bytes, "block_size": BLOCK, "max_prefill_tokens": 32}
        return {"scheduler": {**pool, "num_reserved_decode_tokens": 8}}

    large, small = sized(64 * SMALL), sized(SMALL)
    cluster = Cluster.make(
        folder, 1, 1, 0, tables, per_role={"prefill": large, "decode": small}, router=PATIENT
    )
    cluster.add_node("hybrid0", "hybrid", tables, large)
    cluster.add_node("hybrid1", "hybrid", tables, small)
    cluster.startup_s = cluster.answer_s = 240.0
    return cluster


def mixed(seed: int) -> list[Asked]:
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 30},
        {"presence_penalty": 0.5},
        {"logit_bias": {"101": 2.5, "32": -100}},
        {"structured_outputs": {"regex": "[a-zäöü ]{30,60}"}, "ignore_eos": False},
    ]
    return [
        (
            [rng.randrange(256) for _ in range(rng.randrange(1, LONGEST[0]))],
            {
                "max_tokens": rng.randrange(20, LONGEST[1]),
                "temperature": rng.choice([0.7, 1.0]),
                "seed": rng.randrange(1 << 60),
                "ignore_eos": True,
                **kinds[number % len(kinds)],
            },
        )
        for number in range(REQUESTS)
    ]


async def answers(cluster: Cluster, url: str, asked: list[Asked]) -> list[list[int]]:
    """All at once."""
    bodies = [{"prompt": prompt, "sampling_params": params} for prompt, params in asked]
    got = await asyncio.gather(*(cluster.post("/generate", body, url) for body in bodies))
    return [answer.ids for answer in got]


async def equal_on_every_path(
    cluster: Cluster, asked: list[Asked], alone: list[list[int]] | None
) -> None:
    """`alone`: what one device says without a scheduler; None: ask one after the other."""
    first, second = (cluster.nodes[f"hybrid{i}"].url for i in range(2))
    if alone is None:
        alone = [(await answers(cluster, first, [one]))[0] for one in asked[::8]]
        assert (await answers(cluster, first, asked))[::8] == alone
        alone = await answers(cluster, first, asked)
    assert await answers(cluster, first, asked) == alone, "in a batch"
    assert await cluster.counted("retractions") == 0
    assert await answers(cluster, second, asked) == alone, "in a small pool"
    colocated = await retractions(cluster, 1)
    assert await answers(cluster, cluster.url, asked) == alone, "disaggregated"
    await retractions(cluster, colocated + 1)
    await cluster.until_baseline(10.0)


async def retractions(cluster: Cluster, least: float) -> float:
    """Workers tell of them a little later than of answers."""

    async def are_told() -> bool:
        return await cluster.counted("retractions") >= least

    await cluster.until(are_told, "the pool was meant to be too small")
    await cluster.until_baseline(10.0)
    return await cluster.counted("retractions")


async def test_seeds_say_the_same_alone_in_a_batch_apart_and_after_retractions(
    tmp_path: Path,
) -> None:
    """By the null device, whose tokens depend on all the KV that it reads."""
    asked, device = mixed(1), Colocated()
    alone = [device.answer(prompt, params) for prompt, params in asked]
    cluster = cluster_of(tmp_path, NULL_BLOCK_BYTES, PATIENT)
    async with cluster.running():
        await equal_on_every_path(cluster, asked, alone)


@pytest.mark.matrix
async def test_seeds_of_a_real_model_say_the_same_on_every_path(tmp_path: Path) -> None:
    from tests.device import tiny
    from tests.e2e.test_models import settings, write_tokenizer

    tiny.make("llama", model := tmp_path / "model")
    write_tokenizer(model, tiny.VOCAB)
    cluster = cluster_of(tmp_path, TINY_BLOCK_BYTES, {**settings(model), **PATIENT})
    async with cluster.running():
        await equal_on_every_path(cluster, mixed(2), None)
