"""What both sides hold is neither computed nor moved again, and clients are told of prefill's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
BLOCK = 16
STATS_S = 0.7  # workers tell their figures twice a second
SETTINGS: Tables = {"scheduler": {"max_prefill_tokens": 64, "block_size": BLOCK}}
BLOCK_BYTES = 8 * 2 * 2 * 2 * BLOCK  # of the null device


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("prefix"), 1, 1, 0, SETTINGS)
    cold: Tables = {"scheduler": {**SETTINGS["scheduler"], "prefix_cache": False}}
    cluster.add_node("hybrid0", "hybrid", cold)  # the reference, unknown to the router
    cluster.start()
    yield cluster
    cluster.stop()


async def alone(cluster: Cluster, prompt: list[int], count: int) -> list[int]:
    body = {
        "prompt": prompt,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_tokens": count},
    }
    answer = await cluster.post("/generate", body, cluster.nodes["hybrid0"].url)
    assert answer.body["usage"]["cached_tokens"] == 0
    return answer.ids


async def done(cluster: Cluster) -> dict[str, float]:
    """What was computed and moved so far; the workers tell it up to half a second later."""
    await cluster.until_baseline()
    names = ("prompt_tokens_computed", "sent_bytes", "prefix_tokens_asked", "prefix_tokens_hit")
    found: dict[str, float] = {}
    since = time.monotonic()

    async def stand_still() -> bool:
        nonlocal since
        now = {name: await cluster.counted(name) for name in names}
        if now != found:
            found.update(now)
            since = time.monotonic()
        return time.monotonic() - since > STATS_S

    await cluster.until(stand_still, "counters stand still", 10.0)
    return found


async def test_the_next_turn_of_a_chat_computes_and_moves_only_what_is_new(
    cluster: Cluster,
) -> None:
    """Three turns; the answer's own blocks are on the decode side already."""
    history: list[int] = []
    for turn in range(3):
        history += [(turn * 50 + 7 * i) % 256 for i in range(45)]
        wanted = await alone(cluster, history, 20)
        before = await done(cluster)
        answer = await cluster.generate(history, sampling={"max_tokens": 20})
        assert answer.headers["x-pd-path"] == "disagg"
        assert answer.ids == wanted
        after = await done(cluster)
        at_prefill = (len(history) - 65) // BLOCK * BLOCK if turn else 0
        at_decode = (len(history) - 46) // BLOCK if turn else 0
        blocks = -(-len(history) // BLOCK) - at_decode
        computed = after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
        assert computed == len(history) - at_prefill
        sent = after["sent_bytes"] - before["sent_bytes"]
        assert blocks * BLOCK_BYTES <= sent < (blocks + 1) * BLOCK_BYTES  # and the slot
        assert after["prefix_tokens_hit"] - before["prefix_tokens_hit"] == (
            at_prefill + at_decode * BLOCK
        )
        assert answer.body["usage"]["cached_tokens"] == at_prefill
        history += wanted


async def streamed(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    assert cluster.http is not None
    async with cluster.http.post(f"{cluster.url}/generate", json=body | {"stream": True}) as answer:
        events = (await answer.read()).decode().split("\n\n")
    usage: dict[str, Any] = json.loads(events[-3].removeprefix("data: "))["usage"]
    return usage


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 4 * BLOCK, 100])
async def test_cached_tokens_are_told_alike_streamed_and_whole(
    cluster: Cluster, length: int
) -> None:
    """CASES 93: cold 0; warm the true hit, never all of the prompt."""
    body = {
        "prompt": [length, *range(length - 1)],
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_tokens": 3},
    }
    cold = (await cluster.post("/generate", body)).body["usage"]
    await cluster.until_baseline()
    warm = (await cluster.post("/generate", body)).body["usage"]
    assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, (length - 1) // BLOCK * BLOCK)
    assert await streamed(cluster, body) == warm
    assert warm["prompt_tokens"] == length


async def test_tenants_with_different_salts_share_nothing(cluster: Cluster) -> None:
    """On both sides, and in each dialect."""
    prompt = "a prompt of a few blocks that several tenants have in common, word for word"
    wanted = [*prompt.encode()]
    told: list[int] = []
    before = await done(cluster)
    for salt in ("one", "two", "one", None, None):
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
        answer = await cluster.post("/v1/completions", body)
        told.append(answer.body["usage"]["prompt_tokens_details"]["cached_tokens"])
        await cluster.until_baseline()
    hit = (len(wanted) - 1) // BLOCK * BLOCK
    assert told == [0, 0, hit, 0, hit]
    after = await done(cluster)
    assert after["prefix_tokens_hit"] - before["prefix_tokens_hit"] == 4 * hit


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_groups_of_unequal_sizes_share_prefixes_too(tmp_path: Path, role: str) -> None:
    """Each rank has its heads of a hit block, and what arrives is checked."""
    two: Tables = {"parallel": {"world_size": 2, "tp": 2, "devices_per_node": 2}}
    checked: Tables = {"transfer": {"checksums": True}}
    cluster = Cluster.make(tmp_path, 1, 1, 0, SETTINGS, checked, per_role={role: two})
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 20}
    cluster.startup_s = 90.0
    alone, history = Colocated(), list(range(37))
    async with cluster.running():
        for turn in range(4):
            answer = await cluster.generate(history, sampling=sampling)
            assert answer.ids == alone.answer(history, sampling)
            hit = (len(history) - 55) // BLOCK * BLOCK if turn else 0
            assert answer.body["usage"]["cached_tokens"] == hit
            history += [*answer.ids, *range(turn, turn + 35)]
            await cluster.until_baseline()
