"""The answer is the same on every path: hybrid, 1P1D, 2P2D; streamed or whole; alone or in a crowd.

The null device draws each token from all KV bytes that it reads back, so one byte that went
wrong on the way shows as a wrong token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
BLOCK, CHUNK = 16, 64
SETTINGS: Tables = {"scheduler": {"max_prefill_tokens": CHUNK, "block_size": BLOCK}}
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, int(2.7 * CHUNK)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("answers"), 2, 2, 0, SETTINGS)
    cluster.add_node("hybrid0", "hybrid", SETTINGS)  # asked directly, unknown to the router
    cluster.start()
    yield cluster
    cluster.stop()


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * (salt + 1) + 13 * salt + length) % 256 for i in range(length)]


async def colocated(cluster: Cluster, prompt: list[int] | str, **sampling: Any) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling},
    }
    answer = await cluster.post("/generate", body, cluster.nodes["hybrid0"].url)
    assert answer.status == 200, answer.body
    assert answer.headers["x-pd-path"] == "local"
    return answer.body


@pytest.mark.parametrize("length", LENGTHS)
async def test_disaggregated_equals_colocated(cluster: Cluster, length: int) -> None:
    for salt in range(4):  # so that each pair of instances has its turn
        prompt = prompt_of(length, salt)
        answer = await cluster.generate(prompt, sampling={"max_tokens": 20})
        assert answer.headers["x-pd-path"] == "disagg"
        assert answer.ids == (await colocated(cluster, prompt, max_tokens=20))["output_ids"]
        assert answer.body["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": 20,
            "cached_tokens": 0,
        }
    await cluster.until_baseline()


async def test_sixteen_mixed_lengths_in_flight_together_equal_each_alone(cluster: Cluster) -> None:
    prompts = [prompt_of(1 + 37 * i % 170, i) for i in range(16)]
    limits = [1 + i % 5 * 7 for i in range(16)]
    together = await asyncio.gather(
        *(
            cluster.generate(p, sampling={"max_tokens": n, "temperature": 0.8, "seed": i})
            for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
        )
    )
    for i, (answer, prompt, limit) in enumerate(zip(together, prompts, limits, strict=True)):
        alone = await colocated(cluster, prompt, max_tokens=limit, temperature=0.8, seed=i)
        assert answer.ids == alone["output_ids"]
        assert len(answer.ids) == limit
    await cluster.until_baseline()


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_first_tokens_come_alone(cluster: Cluster, max_tokens: int) -> None:
    """CASES 85: never one token less than asked for."""
    answer = await cluster.generate("hello", sampling={"max_tokens": max_tokens})
    assert len(answer.ids) == max_tokens
    assert answer.body["finish_reason"] == "length"


async def test_the_first_token_can_be_the_last(cluster: Cluster) -> None:
    """CASES 86, 87: the first token is a stop id, completes a stop string, or is EOS."""
    first, second = (await cluster.generate("hello", sampling={"max_tokens": 2})).ids
    by_id = await cluster.generate("hello", sampling={"stop_token_ids": [first]})
    assert (by_id.ids, by_id.body["finish_reason"]) == ([first], "stop")
    both = bytes([first, second]).decode(errors="replace")
    by_text = await cluster.generate("hello", sampling={"stop": [both[0]]})
    assert (by_text.body["output"], by_text.body["finish_reason"]) == ("", "stop")
    salt = 0
    while (await colocated(cluster, prompt_of(9, salt), max_tokens=1))["output_ids"] != [256]:
        salt += 1
    prompt = prompt_of(9, salt)
    eos = await cluster.generate(prompt, sampling={"ignore_eos": False})
    assert (eos.ids, eos.body["finish_reason"], eos.body["output"]) == ([256], "stop", "")
    await cluster.until_baseline()


@pytest.mark.parametrize(("max_tokens", "ignore_eos"), [(1, True), (5, True), (5, False)])
async def test_a_stream_that_begins_with_eos_has_an_end(
    cluster: Cluster, max_tokens: int, ignore_eos: bool
) -> None:
    """CASES 85, 86, 87: one chunk with the reason, then [DONE]; as many tokens as asked for."""
    assert cluster.http is not None
    salt = 0
    while (await colocated(cluster, prompt_of(9, salt), max_tokens=1))["output_ids"] != [256]:
        salt += 1
    sampling = {"temperature": 0, "ignore_eos": ignore_eos, "max_tokens": max_tokens}
    body = {"prompt": prompt_of(9, salt), "sampling_params": sampling, "stream": True}
    async with cluster.http.post(f"{cluster.url}/generate", json=body) as response:
        assert response.headers["x-pd-path"] == "disagg"
        lines = (await response.read()).decode().split("\n\n")
    *events, last = [line.removeprefix("data: ") for line in lines if line]
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    ids = [i for chunk in chunks for i in chunk["output_ids"]]
    assert ids[0] == 256
    assert len(ids) == (max_tokens if ignore_eos else 1)
    reasons = [chunk["finish_reason"] for chunk in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), "length" if ignore_eos else "stop"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
    await cluster.until_baseline()


async def test_a_stream_says_what_the_whole_answer_says(cluster: Cluster) -> None:
    """CASES 94: multi-byte characters included; the last event is [DONE]."""
    assert cluster.http is not None
    prompt = "Grüße, 世界 🙂"
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 64}
    whole = (await cluster.generate(prompt, sampling=sampling, cache_salt="whole")).body
    body = {"prompt": prompt, "sampling_params": sampling, "stream": True, "cache_salt": "streamed"}
    async with cluster.http.post(f"{cluster.url}/generate", json=body) as response:
        assert response.headers["x-pd-path"] == "disagg"
        lines = (await response.read()).decode().split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["output"] for chunk in chunks) == whole["output"]
    assert [i for chunk in chunks for i in chunk["output_ids"]] == whole["output_ids"]
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": "x", "sampling_params": {"temprature": 1}}, 400, "temprature"),
        ({"prompt": "x", "max_new_tokens": 5}, 400, "max_new_tokens"),
        ({"prompt": "x", "sampling_params": {"n": 0}}, 400, "n"),
        ({"prompt": [1] * 32768, "sampling_params": {"max_tokens": 1}}, 400, "32768"),
        ({"prompt": [999]}, 400, "999"),
        ({"prompt": [1] * 10000, "sampling_params": {"max_tokens": 9000}}, 400, "9000"),
    ],
)
async def test_a_bad_request_is_refused_at_once_by_name(
    cluster: Cluster, body: Any, status: int, word: str
) -> None:
    """CASES 2, 55: and decode never starts."""
    answer = await cluster.post("/generate", body)
    assert (answer.status, answer.seconds < 2) == (status, True), answer.body
    assert word in answer.body["error"]["message"]
    await cluster.until_baseline()


async def test_one_bad_request_leaves_the_others_alone(cluster: Cluster) -> None:
    """CASES 3."""
    good = [cluster.generate(prompt_of(20, i), sampling={"max_tokens": 5}) for i in range(40)]
    bad = cluster.generate([1] * 40000, sampling={"max_tokens": 5})
    *answers, refused = await asyncio.gather(*good, bad)
    assert refused.status == 400
    assert all(len(answer.ids) == 5 for answer in answers)


async def test_the_official_client_works(cluster: Cluster) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        said = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=8, temperature=0
        )
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=8,
            temperature=0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == said.choices[0].message.content
        text = await client.completions.create(model=model, prompt="hi", max_tokens=4)
        assert text.usage is not None
        assert text.usage.completion_tokens <= 4
