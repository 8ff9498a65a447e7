"""Log-probabilities, echo and the prompt's odds are those of a colocated instance, value by value.

CASES 89 and 90, with real processes. The null device makes odds out of all the KV that it reads,
so that they show damage as tokens do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.e2e.cluster import Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
SETTINGS: Tables = {"scheduler": {"kv_memory": 1 << 20, "max_prefill_tokens": 16}}
PROMPT = "Grüße, 世界 🙂: a prompt of some chunks"
ASK: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("odds"), 1, 1, 0, SETTINGS)
    cluster.add_node("hybrid0", "hybrid", SETTINGS)  # asked directly, unknown to the router
    cluster.start()
    yield cluster
    cluster.stop()


async def both(cluster: Cluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What the pair says and what the hybrid instance says, without what differs by nature."""
    found = []
    for url, way in ((cluster.url, "disagg"), (cluster.nodes["hybrid0"].url, "local")):
        answer = await cluster.post(path, body, url)
        assert (answer.status, answer.headers["x-pd-path"]) == (200, way), answer.body
        for name in ("id", "created", "request_id", "bootstrap_room", "path", "timings_ms"):
            answer.body.pop(name, None)
        found.append(answer.body)
    return found


def streamed(text: str) -> list[dict[str, Any]]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def columns(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, column in (choice["logprobs"] or {}).items():
                found.setdefault(name, []).extend(column)
    return found


@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_generate_tells_odds_of_prompt_and_answer(
    cluster: Cluster, temperature: float
) -> None:
    params = {"temperature": temperature, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    params |= {"logprobs": 3, "prompt_logprobs": 2}
    pair, alone = await both(cluster, "/generate", {"prompt": PROMPT, "sampling_params": params})
    assert pair == alone
    assert len(pair["logprobs"]) == len(pair["output_ids"]) == 9
    assert [one["id"] for one in pair["logprobs"]] == pair["output_ids"]
    assert {len(one["top_logprobs"]) for one in pair["logprobs"]} == {3}
    prompt = list(PROMPT.encode())
    assert [one and one["id"] for one in pair["prompt_logprobs"]] == [None, *prompt[1:]]
    await cluster.until_baseline()


@pytest.mark.parametrize("max_tokens", [6, 1, 0])
async def test_echo_is_served_by_prefill_and_merged(cluster: Cluster, max_tokens: int) -> None:
    """CASES 90, streaming and not."""
    assert cluster.http is not None
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    pair, alone = await both(cluster, "/v1/completions", body)
    assert pair == alone
    (choice,) = pair["choices"]
    assert choice["text"].startswith(PROMPT)
    odds = choice["logprobs"]
    tokens = len(PROMPT.encode()) + max_tokens
    assert {len(column) for column in odds.values()} == {tokens}
    assert pair["usage"]["completion_tokens"] == max_tokens
    for url in (cluster.url, cluster.nodes["hybrid0"].url):
        asked = {**body, "stream": True}
        async with cluster.http.post(f"{url}/v1/completions", json=asked) as response:
            chunks = streamed((await response.read()).decode())
        assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
        assert columns(chunks) == odds
        assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    await cluster.until_baseline()


async def test_prompts_are_scored_whole_after_they_were_cached(cluster: Cluster) -> None:
    prompt = list(range(1, 120))
    await cluster.generate(prompt, sampling={"max_tokens": 2})
    body = {"prompt": prompt, "sampling_params": {"prompt_logprobs": 0, "max_tokens": 2}}
    pair, alone = await both(cluster, "/generate", body)
    assert pair["prompt_logprobs"] == alone["prompt_logprobs"]
    assert len(pair["prompt_logprobs"]) == len(prompt)
    again = await cluster.generate(prompt, sampling={"max_tokens": 2})
    assert again.body["usage"]["cached_tokens"] > 0


async def test_more_odds_than_are_told_are_refused_by_name(cluster: Cluster) -> None:
    params = {"prompt_logprobs": 20, "max_tokens": 2}
    body = {"prompt": [1] * 4000, "sampling_params": params}
    answer = await cluster.post("/generate", body)
    assert (answer.status, answer.seconds < 2) == (400, True)
    assert "65536" in answer.body["error"]["message"]
    await cluster.until_baseline()


async def test_several_answers_have_their_own_odds_after_one_prompt(cluster: Cluster) -> None:
    assert cluster.http is not None
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "n": 3, "max_tokens": 7, "seed": 4}
    body |= {"temperature": 0.9, "ignore_eos": True}
    pair, alone = await both(cluster, "/v1/completions", body)
    assert pair == alone
    assert [choice["index"] for choice in pair["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in pair["choices"]}) == 3
    assert pair["usage"]["completion_tokens"] == 21
    one, _ = await both(cluster, "/v1/completions", {**body, "n": 1})
    assert pair["choices"][0] == one["choices"][0]  # the first is the one that is alone
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with cluster.http.post(f"{cluster.url}/v1/completions", json=asked) as response:
        chunks = streamed((await response.read()).decode())
    for index, choice in enumerate(pair["choices"]):
        own = [
            {"choices": [c]} for chunk in chunks for c in chunk["choices"] if c["index"] == index
        ]
        assert "".join(c["choices"][0]["text"] for c in own) == choice["text"]
        assert columns(own) == choice["logprobs"]
        assert own[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == pair["usage"]
    await cluster.until_baseline()


async def test_a_stop_string_ends_one_answer_and_the_others_go_on(cluster: Cluster) -> None:
    """CASES 86: also when it is complete with the first token, which prefill drew."""
    body: dict[str, Any] = {"prompt": "abc", "n": 4, "max_tokens": 20, "seed": 3}
    body |= {"temperature": 0.9, "ignore_eos": True}
    plain, _ = await both(cluster, "/v1/completions", body)
    texts = [choice["text"] for choice in plain["choices"]]
    for stop in (texts[1][0], texts[2][4:6]):
        pair, alone = await both(cluster, "/v1/completions", {**body, "stop": stop})
        assert pair == alone
        for choice, text in zip(pair["choices"], texts, strict=True):
            at = text.find(stop)
            assert choice["text"] == (text if at < 0 else text[:at])
            assert choice["finish_reason"] == ("length" if at < 0 else "stop")
    await cluster.until_baseline()


async def test_the_official_client_reads_them(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        whole = await client.completions.create(
            model=model, prompt="ab", max_tokens=4, logprobs=2, echo=True, temperature=0
        )
        odds = whole.choices[0].logprobs
        assert odds is not None
        assert odds.tokens is not None
        assert odds.token_logprobs is not None
        assert odds.tokens[:2] == ["a", "b"]
        assert len(odds.tokens) == len(odds.token_logprobs) >= 3
        chat = await client.chat.completions.create(
            model=model, messages=ASK, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
        )
        stream = await client.chat.completions.create(
            model=model,
            messages=ASK,
            max_tokens=4,
            logprobs=True,
            top_logprobs=2,
            temperature=0,
            stream=True,
        )
        entries = [
            entry
            async for chunk in stream
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content or ()
        ]
        told = chat.choices[0].logprobs
        assert told is not None
        assert entries == told.content
        assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
        assert chat.usage is not None
        assert chat.usage.completion_tokens == len(entries)
