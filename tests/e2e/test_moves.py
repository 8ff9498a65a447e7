"""Streams outlive their decode instance: whoever dies under them, the client reads one answer.

All of it is what an undisturbed run says: text, ids, odds, counts and end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import PATIENT, Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(240)]
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": 20},
    "scheduler": {"max_prefill_tokens": 64, "kv_memory": 1 << 20, "prefix_cache": True},
}
ROUTER: Tables = {"timeouts": {**PATIENT["timeouts"], "move_s": 90.0}}  # restarts are slow here
PROMPT = list(range(200))
TOKENS = 24
DRAWN = {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.3, "presence_penalty": 0.5}
BASE = {"stream": True, "ignore_eos": True, "max_tokens": TOKENS, **DRAWN}
USAGE = {"stream_options": {"include_usage": True}}
TALK = {"messages": [{"role": "user", "content": "How are you?"}]}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(
        tmp_path_factory.mktemp("moves"), 1, 2, 0, SETTINGS, PATIENT, router=ROUTER
    )
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
async def cluster(started: Cluster) -> AsyncIterator[Cluster]:
    for process in started.processes:
        if process.running.poll() is not None:  # killed by an earlier test
            process.start()
    async with started.session() as ready:
        await ready.until_trusted()
        yield ready


@dataclass
class Read:
    """What a client made of a stream, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    odds: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    usage: Any = None
    told: set[str] = field(default_factory=set)  # whose answer it is, and how it came
    is_done: bool = False

    def event(self, data: str) -> None:
        assert not self.is_done
        if data == "[DONE]":
            self.is_done = True
            return
        chunk = json.loads(data)
        self.usage = chunk.get("usage") or self.usage
        self.told.add(chunk.get("id") or f"{chunk['request_id']} {chunk['bootstrap_room']}")
        self.told.add(f"created {chunk.get('created')}")
        for choice in chunk.get("choices", [chunk]):
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index", 0)
        text = choice.get("output", choice.get("text", choice.get("delta", {}).get("content")))
        self.texts[index] = self.texts.get(index, "") + (text or "")
        self.ids.setdefault(index, []).extend(choice.get("output_ids", []))
        odds = choice.get("logprobs")
        odds = odds.get("content") or [odds] if isinstance(odds, dict) else odds
        self.odds.setdefault(index, []).extend(odds or [])
        if end := choice["finish_reason"]:
            assert index not in self.ends, "it has ended"
            self.ends[index] = end

    def same(self) -> tuple[Any, ...]:
        return self.texts, self.ids, self.odds, self.ends, self.usage


async def read(
    cluster: Cluster, path: str, body: dict[str, Any], kill_at: int = -1, victim: str = ""
) -> Read:
    """The whole stream; after so many events its decode instance is killed."""
    assert cluster.http is not None
    found, count, event = Read(), 0, "message"
    async with cluster.http.post(f"{cluster.url}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["x-pd-path"] == "disagg"
        async for line in answer.content:
            assert not line.startswith(b":"), "no mark is for the client"
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                event = value
            if name == "data":
                assert event == "message", value
                found.event(value)
                count += 1
                if count == kill_at:
                    await kill(cluster, victim)
    assert found.is_done
    return found


async def kill(cluster: Cluster, victim: str) -> None:
    for name in ("decode0", "decode1"):
        if (await cluster.figures(name))["dispatched"] > 0:  # workers tell theirs a moment later
            node = cluster.nodes[name].running.pid
            os.kill(await cluster.worker_pid(name) if victim == "worker" else node, signal.SIGKILL)
            return
    raise AssertionError("nobody decodes")


def odds_of(read: Read) -> list[float]:
    return [one["logprob"] for one in read.odds[0]]


async def moved(cluster: Cluster) -> float:
    assert cluster.http is not None
    async with cluster.http.get(f"{cluster.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith("pdrt_router_moved_total"))


GENERATE = {"prompt": PROMPT, "stream": True}
PARAMS = {"ignore_eos": True, "max_tokens": TOKENS, **DRAWN}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {**GENERATE, "sampling_params": {**PARAMS, "logprobs": 2}}),
    "generate greedy": ("/generate", {**GENERATE, "sampling_params": {**PARAMS, "temperature": 0}}),
    "generate n=2": ("/generate", {**GENERATE, "sampling_params": {**PARAMS, "n": 2}}),
    "completions": ("/v1/completions", {"prompt": PROMPT, "logprobs": 2, **BASE, **USAGE}),
    "completions echo n=2": (
        "/v1/completions",
        {"prompt": "once more", "echo": True, "logprobs": 1, "n": 2, **BASE, **USAGE},
    ),
    "chat": (
        "/v1/chat/completions",
        {**TALK, "logprobs": True, "top_logprobs": 2, **BASE, **USAGE},
    ),
    "chat n=2": ("/v1/chat/completions", {**TALK, "n": 2, **BASE, **USAGE}),
}


NODES: list[tuple[str, str]] = [("generate", "node"), ("completions echo n=2", "node")]


@pytest.mark.parametrize(("name", "victim"), [*((name, "worker") for name in ASKS), *NODES])
async def test_a_killed_decode_instance_does_not_show_in_its_streams(
    cluster: Cluster, name: str, victim: str
) -> None:
    """CASES 85, 86, 89, 93, 94; SPEC promise 4."""
    path, body = ASKS[name]
    body = {**body, "request_id": f"r-{os.getpid()}", "bootstrap_room": 12345}
    await read(cluster, path, body)  # the prompt is in prefill's cache from now on
    begun = time.monotonic()
    plain = await read(cluster, path, body)
    begun, undisturbed = time.monotonic(), time.monotonic() - begun
    before, at = await moved(cluster), {"worker": 3, "node": 9}[victim]
    survived = await read(cluster, path, body, at, victim)
    assert time.monotonic() - begun < 3 * undisturbed + 2
    assert survived.same() == plain.same()
    assert len(survived.told) == 2  # one id, one time
    assert (await moved(cluster)) - before == 1
    await cluster.until_baseline()


async def test_a_stop_string_that_was_half_said_is_completed_by_another_instance(
    cluster: Cluster,
) -> None:
    """CASES 86: and not a letter of it is told."""
    path, body = ASKS["generate greedy"]
    plain = await read(cluster, path, body)
    text = plain.texts[0]
    params = {**body["sampling_params"], "stop": [text[9:14]]}
    body = {**body, "sampling_params": params}
    whole = await read(cluster, path, body)
    assert whole.ends == {0: "stop"}
    whole = await read(cluster, path, body)
    assert whole.ends == {0: "stop"}
    for at in (10, 12):
        await cluster.until_trusted()
        survived = await read(cluster, path, body, at, "worker")
        assert survived.same() == whole.same()
    await cluster.until_baseline()


HELD = {  # for a second: the stop string is never complete
    "stream": True,
    "temperature": 0,
    "max_tokens": 60,
    "structured_outputs": {"choice": ["abc" * 20]},
    "stop": ["abc" * 15 + "d"],
    **USAGE,
}
SILENT: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, **HELD}),
    "echo": ("/v1/completions", {"prompt": "once more", "echo": True, **HELD}),
    "n=2": ("/v1/completions", {"prompt": PROMPT, "n": 2, **HELD}),
    "batch": ("/v1/completions", {"prompt": ["one", "two"], **HELD}),
    "chat": ("/v1/chat/completions", {**TALK, **HELD}),
}


@pytest.mark.parametrize(
    ("name", "victim"), [*((name, "worker") for name in SILENT), ("completions", "node")]
)
async def test_a_stream_of_which_nothing_is_told_yet_goes_on_too(
    cluster: Cluster, name: str, victim: str
) -> None:
    """Its text is held back when its decode instance dies. CASES 86."""
    path, body = SILENT[name]
    whole = await read(cluster, path, body)
    assert all(text.endswith("abc" * 20) for text in whole.texts.values())
    await cluster.until_trusted()
    await cluster.until_baseline()
    pending = asyncio.ensure_future(read(cluster, path, body))
    count = 2 if name in ("n=2", "batch") else 1
    await cluster.until(lambda: are_running(cluster, count), "it decodes")
    await kill(cluster, victim)
    survived = await pending
    assert (survived.texts, survived.ends) == (whole.texts, whole.ends)
    assert survived.usage["completion_tokens"] == whole.usage["completion_tokens"]
    await cluster.until_baseline()


async def test_an_answer_that_is_not_streamed_starts_over_and_is_the_same(
    cluster: Cluster,
) -> None:
    body = {"prompt": PROMPT, "sampling_params": {**PARAMS, "max_tokens": 8 * TOKENS}}
    whole = await cluster.post("/generate", body)
    pending = asyncio.ensure_future(cluster.post("/generate", body))

    async def decodes() -> bool:
        return any([(await cluster.figures(f"decode{i}"))["running"] for i in (0, 1)])

    await cluster.until(decodes, "it decodes")
    await kill(cluster, "worker")
    again = await pending
    assert (again.ids, again.body["usage"]["completion_tokens"]) == (whole.ids, 8 * TOKENS)
    await cluster.until_baseline()


async def are_running(cluster: Cluster, count: int) -> bool:
    names = ("decode0", "decode1")
    return sum([(await cluster.figures(name))["running"] for name in names]) == count


async def test_many_streams_move_at_once(cluster: Cluster) -> None:
    """Those beside which they go on notice nothing."""
    path, body = ASKS["generate"]
    bodies = [
        {**body, "prompt": PROMPT[: 100 + 10 * i], "sampling_params": {**PARAMS, "max_tokens": 60}}
        for i in range(8)
    ]
    await asyncio.gather(*(read(cluster, path, one) for one in bodies))  # prefill caches them
    plain = await asyncio.gather(*(read(cluster, path, one) for one in bodies))
    pending = [asyncio.ensure_future(read(cluster, path, one)) for one in bodies]
    await cluster.until(lambda: are_running(cluster, 8), "all of them decode")
    before = await moved(cluster)
    os.kill(await cluster.worker_pid("decode0"), signal.SIGKILL)
    for one, other in zip(plain, await asyncio.gather(*pending), strict=True):
        assert one.same() == other.same()
    assert await moved(cluster) > before
    await cluster.until_baseline()


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_streams_of_a_real_model_move(tmp_path: Path, temperature: float) -> None:
    """Greedy and seeded; a prompt's step and a decode step round their sums apart (CASES 89)."""
    from tests.device import tiny
    from tests.e2e.test_models import settings, write_tokenizer

    tiny.make("llama", model := tmp_path / "model")
    write_tokenizer(model, tiny.VOCAB)
    cluster = Cluster.make(tmp_path, 1, 2, 0, {**settings(model), **PATIENT}, router=ROUTER)
    cluster.startup_s = cluster.answer_s = 240.0
    params = {**PARAMS, "temperature": temperature, "max_tokens": 300, "logprobs": 1}
    body = {**GENERATE, "prompt": [7 + i % 90 for i in range(70)], "sampling_params": params}
    async with cluster.running():
        await cluster.until_trusted()
        await read(cluster, "/generate", body)
        plain = await read(cluster, "/generate", body)
        survived = await read(cluster, "/generate", body, 5, "worker")
        assert (survived.ids, survived.texts) == (plain.ids, plain.texts)
        assert (survived.ends, survived.usage) == (plain.ends, plain.usage)
        assert odds_of(survived) == pytest.approx(odds_of(plain), abs=1e-3)
        assert len(odds_of(plain)) == 300
        assert await moved(cluster) == 1
