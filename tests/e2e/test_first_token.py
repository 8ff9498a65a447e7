"""The first token over a slow wire: early, right, never twice, and worth its prefill (CASES 97)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(120)]
CHUNK = 32
LAG_S = 1.2  # a write is held back for as long as this at most, by chance; longer is a stall
SETTINGS: Tables = {
    "device": {"kind": "null", "token_ms": 0.5},
    "scheduler": {"max_prefill_tokens": CHUNK, "prefix_cache": False},
}
SLOW_PROMPT = [i % 251 for i in range(3000)]  # a second and a half of prefill


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("first"), 1, 1, 0, SETTINGS)
    cluster.amend("prefill0", {"transfer.faults": {"delay": 1.0, "delay_s": LAG_S}})
    cluster.start()
    yield cluster
    cluster.stop()


def asked(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"prompt": prompt, "sampling_params": sampling, "stream": True}


def right(prompt: list[int], max_tokens: int) -> list[int]:
    return Colocated().answer(prompt, asked(prompt, max_tokens)["sampling_params"])


@dataclass(slots=True)
class Heard:
    """A stream's tokens, each with when it came, and how it ended."""

    ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


async def chunks(cluster: Cluster, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    assert cluster.http is not None
    async with cluster.http.post(f"{cluster.url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def listen(cluster: Cluster, prompt: list[int], max_tokens: int) -> Heard:
    heard, began = Heard(), time.monotonic()
    async for said in chunks(cluster, asked(prompt, max_tokens)):
        take(heard, said, began)
    return heard


def take(heard: Heard, said: dict[str, Any], began: float) -> None:
    assert "error" not in said, said
    heard.ids += said["output_ids"]
    heard.at_s += [time.monotonic() - began] * len(said["output_ids"])
    heard.ends += [said["finish_reason"]] * bool(said["finish_reason"])


async def test_the_first_token_does_not_wait_for_the_transfer(cluster: Cluster) -> None:
    """CASES 97: the second one does."""
    prompts = [[i, i + 1, i + 2] * 9 for i in range(6)]
    heard = await asyncio.gather(*(listen(cluster, prompt, 5) for prompt in prompts))
    assert [one.ids for one in heard] == [right(prompt, 5) for prompt in prompts]
    firsts = sorted(one.at_s[0] for one in heard)
    seconds = sorted(one.at_s[1] for one in heard)
    assert seconds[0] - firsts[0] > 0.05
    assert sum(seconds) - sum(firsts) > len(prompts) * LAG_S / 4, (firsts, seconds)
    await cluster.until_baseline()


async def test_an_answer_of_one_token_does_not_wait_at_all(cluster: Cluster) -> None:
    """CASES 85, 86: what is being written for it is given up, and nobody calls that a failure."""
    failed = await cluster.counted("sends_failed")
    for stream in (True, False):
        prompt = [7, 8, 9] * 11
        body = {**asked(prompt, 1), "stream": stream}
        if stream:
            heard = [said async for said in chunks(cluster, body)]
            ids = [token for said in heard for token in said["output_ids"]]
        else:
            ids = (await cluster.post("/generate", body)).ids
        assert ids == right(prompt, 1)
        await cluster.until_baseline(LAG_S + 2.5)
    assert await cluster.counted("sends_failed") == failed


async def test_a_stream_whose_prefill_dies_after_the_first_token_goes_on(
    cluster: Cluster,
) -> None:
    """Promise 4: decode asks again, or computes it itself; the client sees no seam."""
    prompt = [i % 13 for i in range(200)]
    pid = await cluster.worker_pid("prefill0")
    heard, began = Heard(), time.monotonic()
    async for said in chunks(cluster, asked(prompt, 8)):
        if not heard.ids:
            os.kill(pid, signal.SIGKILL)
        take(heard, said, began)
    assert heard.ids == right(prompt, 8)
    assert heard.ends == ["length"]
    await cluster.until(lambda: is_served(cluster), "it serves again", 15)
    await cluster.until_baseline(LAG_S + 2.5)


async def is_served(cluster: Cluster) -> bool:
    answer = await cluster.generate([1, 2, 3], sampling={"max_tokens": 2})
    return answer.status == 200


async def test_a_client_that_leaves_a_long_prefill_stops_it_at_the_next_chunk(
    cluster: Cluster,
) -> None:
    """CASES 95: and the next short request does not wait for what nobody wants."""
    before = await cluster.counted("prompt_tokens_computed")
    pending = asyncio.create_task(listen(cluster, SLOW_PROMPT, 4))

    async def is_computing() -> bool:
        return await cluster.counted("prompt_tokens_computed") > before

    await cluster.until(is_computing, "the prefill has begun")
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    short = await cluster.generate([5, 6, 7], sampling={"max_tokens": 1})
    assert short.ids == right([5, 6, 7], 1)
    await cluster.until_baseline(LAG_S + 2.5)
    computed = await cluster.counted("prompt_tokens_computed") - before
    assert computed < len(SLOW_PROMPT) * 2 / 3, computed
