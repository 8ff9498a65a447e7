"""Batches, the best of several answers and tokens: real processes, a pair and a hybrid alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
SETTINGS: Tables = {"scheduler": {"kv_memory": 1 << 20, "max_prefill_tokens": 16}}
PROMPTS = ["Grüße, 世界", "a second prompt of some chunks, longer than the first", "c"]
DRAWN: dict[str, Any] = {"max_tokens": 9, "seed": 3, "temperature": 0.9, "ignore_eos": True}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("batches"), 1, 1, 0, SETTINGS)
    cluster.add_node("hybrid0", "hybrid", SETTINGS)  # asked directly, unknown to the router
    cluster.start()
    yield cluster
    cluster.stop()


async def both(cluster: Cluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What the pair says and what the hybrid instance says."""
    found = []
    for url in (cluster.url, cluster.nodes["hybrid0"].url):
        answer = await cluster.post(path, body, url)
        assert answer.status == 200, answer.body
        found.append(answer.body)
    return found


def check_alike(these: list[dict[str, Any]], those: list[dict[str, Any]]) -> None:
    """Odds travel in 32 bits between instances (CASES 89)."""

    def without(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in choice.items() if k != "logprobs"} for choice in choices]

    assert without(these) == without(those)
    for one, other in zip(these, those, strict=True):
        odds, others = one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"]
        assert odds == pytest.approx(others, abs=1e-3)
        assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]


def _counts(answer: dict[str, Any]) -> dict[str, int]:
    """But for what was cached, which is the tests' order."""
    return {n: v for n, v in answer["usage"].items() if n != "prompt_tokens_details"}


async def test_a_batch_says_what_its_prompts_say_alone(cluster: Cluster) -> None:
    assert cluster.http is not None
    body = {"prompt": PROMPTS, "n": 2, "logprobs": 1, **DRAWN}
    pair, alone = await both(cluster, "/v1/completions", body)
    check_alike(pair["choices"], alone["choices"])
    assert _counts(pair) == _counts(alone)
    assert pair["usage"]["completion_tokens"] == len(PROMPTS) * 2 * 9
    for index, prompt in enumerate(PROMPTS):
        single = await cluster.post("/v1/completions", {**body, "prompt": prompt})
        own = pair["choices"][index * 2 : index * 2 + 2]
        check_alike([{**c, "index": c["index"] - index * 2} for c in own], single.body["choices"])
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with cluster.http.post(f"{cluster.url}/v1/completions", json=asked) as response:
        *events, last = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for choice in pair["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
    assert _counts(pair) == _counts(chunks[-1])
    await cluster.until_baseline()


async def test_the_best_of_several_are_the_likeliest_of_all_that_were_drawn(
    cluster: Cluster,
) -> None:
    body = {"prompt": PROMPTS[1], "logprobs": 0, **DRAWN}
    everything, _ = await both(cluster, "/v1/completions", {**body, "n": 5})
    pair, alone = await both(cluster, "/v1/completions", {**body, "n": 2, "best_of": 5})
    check_alike(pair["choices"], alone["choices"])
    assert _counts(pair) == _counts(alone)
    assert pair["usage"]["completion_tokens"] == 5 * 9

    def mean(choice: dict[str, Any]) -> float:
        odds: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(odds) / len(odds)

    ranked = sorted(everything["choices"], key=mean, reverse=True)
    assert [c["text"] for c in pair["choices"]] == [c["text"] for c in ranked[:2]]
    await cluster.until_baseline()


async def test_tokens_are_told_by_the_router_too(cluster: Cluster) -> None:
    pair, alone = await both(cluster, "/tokenize", {"prompt": PROMPTS[0]})
    assert pair == alone
    assert pair["tokens"] == list(PROMPTS[0].encode())
    told, _ = await both(cluster, "/detokenize", {"tokens": pair["tokens"]})
    assert told == {"prompt": PROMPTS[0]}


async def test_a_batch_that_its_client_leaves_is_over_everywhere(cluster: Cluster) -> None:
    assert cluster.http is not None
    sampling = {"max_tokens": 4000, "ignore_eos": True}
    body = {"prompt": PROMPTS * 2, "sampling_params": sampling, "stream": True}
    async with cluster.http.post(f"{cluster.url}/generate", json=body) as response:
        assert await response.content.readany()
    await asyncio.sleep(0)
    await cluster.until_baseline()
