"""What broke a running cluster once, and what was tried in order to break it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.e2e.cluster import Answer, Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(120)]
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": 10},
    "scheduler": {"max_prefill_tokens": 64, "kv_memory": 1 << 20},
}
PROMPT = [5 * i % 256 for i in range(200)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("broken"), 1, 1, 0, SETTINGS)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
async def cluster(started: Cluster) -> AsyncIterator[Cluster]:
    async with started.session() as ready:
        yield ready


def answer(cluster: Cluster, tokens: int) -> asyncio.Task[Answer]:
    return asyncio.create_task(cluster.generate(PROMPT, sampling={"max_tokens": tokens}))


async def test_a_body_of_a_million_faults_keeps_nobody_waiting(cluster: Cluster) -> None:
    """Each fault was explained, for minutes, while the router did nothing else."""
    for body in (
        {"prompt": [1, *[""] * 1_000_000]},
        {"prompt": [""] * 1_000_000},
        {"prompt": "x", "sampling_params": {str(i): i for i in range(300_000)}},
    ):
        data = io.BytesIO(json.dumps(body).encode())
        begun = time.monotonic()
        assert cluster.http is not None
        async with cluster.http.post(f"{cluster.url}/generate", data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "bad_request"
        assert time.monotonic() - begun < 3


async def test_a_machine_that_slept_goes_on_where_it_was(cluster: Cluster) -> None:
    """All processes stop for longer than a silent peer is given, and nobody is taken for dead."""
    want = (await answer(cluster, 60)).ids
    pids = [process.running.pid for process in cluster.processes]
    pids += [await cluster.worker_pid(name) for name in cluster.nodes]
    pending = [answer(cluster, 60) for _ in range(4)]
    await asyncio.sleep(0.3)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2.5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for answered in await asyncio.gather(*pending):
        assert answered.ids == want
    await cluster.until_baseline()


@pytest.mark.parametrize("name", ["router", "decode0", "prefill0"])
async def test_a_drain_lets_streams_finish_and_ends_well(cluster: Cluster, name: str) -> None:
    want = (await answer(cluster, 60)).ids
    assert cluster.router is not None
    process = cluster.router if name == "router" else cluster.nodes[name]
    pending = [answer(cluster, 60) for _ in range(4)]
    await asyncio.sleep(0.4)
    process.kill(signal.SIGTERM)
    for answered in await asyncio.gather(*pending):
        assert answered.ids == want
    assert await asyncio.to_thread(process.ended) == 0
    process.start()
    await cluster.until_ready()


async def test_a_node_whose_peers_are_all_dead_lives_but_is_not_ready(cluster: Cluster) -> None:
    """CASES 23: liveness must not have it killed, readiness must not promise what cannot be."""
    assert (await answer(cluster, 3)).status == 200
    prefill, decode = cluster.nodes["prefill0"], cluster.nodes["decode0"]
    prefill.kill()
    prefill.ended()

    async def says_why() -> bool:
        status, body = await cluster.get(f"{decode.url}/ready")
        return status == 503 and "is dead" in body["reason"]

    async def is_ready() -> bool:
        return (await cluster.get(f"{decode.url}/ready"))[0] == 200

    await cluster.until(says_why, "decode is not ready", 3)
    assert (await cluster.get(f"{decode.url}/health"))[0] == 200
    prefill.start()
    await cluster.until_ready()
    await cluster.until(is_ready, "decode is ready again")


async def test_a_stopped_decode_worker_is_made_to_end_and_started_again(cluster: Cluster) -> None:
    """It does not die, it only says nothing more: its requests would wait for their deadline."""
    want = (await answer(cluster, 60)).ids
    pending = [answer(cluster, 60) for _ in range(4)]
    await asyncio.sleep(0.4)
    os.kill(await cluster.worker_pid("decode0"), signal.SIGSTOP)
    stopped = time.monotonic()
    for answered in await asyncio.gather(*pending):
        assert answered.status == 503 or answered.ids == want
    assert time.monotonic() - stopped < 2.5

    async def serves() -> bool:
        answered = await answer(cluster, 60)
        return answered.status == 200 and answered.ids == want

    await cluster.until(serves, "it serves again", 10)
    await cluster.until_baseline()
