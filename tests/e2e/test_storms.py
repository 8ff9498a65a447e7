"""After any storm blocks, slots, rooms, descriptors and memory are back, and answers are right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.cluster import Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
SMALL: Tables = {"scheduler": {"max_prefill_tokens": 32, "num_reserved_decode_tokens": 8}}
KEPT_OPEN = 40  # connections that are kept for the next request come and go; a leak is hundreds
BLOCK_BYTES = 8 * 2 * 2 * 2 * 16  # of the null device at block_size 16


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pool = {"scheduler": {"kv_memory": 40 * BLOCK_BYTES}}
    cluster = Cluster.make(
        tmp_path_factory.mktemp("storms"), 1, 1, 0, SMALL, per_role={"decode": pool}
    )
    cluster.add_node("hybrid0", "hybrid", SMALL)  # the reference
    cluster.start()
    yield cluster
    cluster.stop()


async def alone(cluster: Cluster, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    body = {"prompt": prompt, "sampling_params": sampling}
    return (await cluster.post("/generate", body, cluster.nodes["hybrid0"].url)).ids


async def test_a_decode_pool_too_small_for_the_load_only_delays(cluster: Cluster) -> None:
    """CASES 13, 67, 69, 71: 32 requests of up to 20 blocks in 40; all finish, tokens unchanged."""
    rng = random.Random(5)
    asked = []
    for i in range(32):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 160))]
        sampling = {
            "max_tokens": rng.randrange(20, 160),
            "temperature": 0.7,
            "seed": i,
            "ignore_eos": True,
        }
        asked.append((prompt, sampling))
    answers = await asyncio.gather(*(cluster.generate(p, sampling=s) for p, s in asked))
    for (prompt, sampling), answer in zip(asked, answers, strict=True):
        assert answer.ids == await alone(cluster, prompt, sampling)
    assert await counter(cluster, "retractions") > 0, "the pool was meant to be too small"
    assert await counter(cluster, "prompt_tokens_computed") == 0, "decode runs no prompt tokens"
    await cluster.until_baseline()


async def test_groups_in_a_decode_pool_too_small_for_them_only_wait(cluster: Cluster) -> None:
    """CASES 13, 67, 69, 71: 8 times 4 answers of up to 15 blocks each in 40 blocks."""
    rng = random.Random(9)
    bodies = [
        {
            "prompt": [rng.randrange(256) for _ in range(rng.randrange(1, 120))],
            "sampling_params": {
                "n": 4,
                "max_tokens": rng.randrange(20, 120),
                "temperature": 0.7,
                "seed": seed,
                "ignore_eos": True,
            },
        }
        for seed in range(8)
    ]
    before = await counter(cluster, "retractions")
    answers = await asyncio.gather(*(cluster.post("/generate", body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        whole = await cluster.post("/generate", body, cluster.nodes["hybrid0"].url)
        assert answer.status == whole.status == 200, (answer.body, whole.body)
        assert len(answer.body["outputs"]) == 4
        assert answer.body["outputs"] == whole.body["outputs"]
    assert await counter(cluster, "retractions") > before, "the pool was meant to be too small"
    assert await counter(cluster, "prompt_tokens_computed") == 0, "decode runs no prompt tokens"
    await cluster.until_baseline()


async def counter(cluster: Cluster, event: str) -> float:
    """Of the decode worker."""
    assert cluster.http is not None
    async with cluster.http.get(f"{cluster.nodes['decode0'].url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(f'pdrt_events_total{{event="{event}"'):
                return float(line.split()[-1])
    return 0.0


async def test_what_can_never_fit_is_refused_at_once(cluster: Cluster) -> None:
    answer = await cluster.generate([1] * 600, sampling={"max_tokens": 100})
    assert (answer.status, answer.code) == (400, "too_long")
    assert answer.seconds < 2
    await cluster.until_baseline()


async def test_random_requests_with_random_aborts_leave_nothing(cluster: Cluster) -> None:
    """CASES 7, 34, 35, 38, 42, 46, 101: and each answer that came is the right one."""
    rng = random.Random(11)
    await burst(cluster, rng, 60)  # whatever is made once is made now
    await cluster.until_baseline(4.0)
    before = await held(cluster)
    await burst(cluster, rng, 300)
    await cluster.until_baseline(2.5)
    await cluster.until(
        lambda: is_back(cluster, before), f"they hold what they held: {before}", 4.0
    )
    assert (await cluster.generate("still there", sampling={"max_tokens": 3})).status == 200


async def is_back(cluster: Cluster, before: dict[str, tuple[int, int]]) -> bool:
    now = await held(cluster)
    return all(
        now[name][0] <= fds + KEPT_OPEN and now[name][1] <= rss * 1.02 + (8 << 20)
        for name, (fds, rss) in before.items()
    )


async def burst(cluster: Cluster, rng: random.Random, count: int) -> None:
    async def one(number: int) -> None:
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
        sampling = {"max_tokens": rng.randrange(1, 60), "temperature": 0, "ignore_eos": True}
        patience = rng.choice([0.002, 0.02, 0.1, 0.5, 60])
        await asyncio.sleep(rng.random() * count / 100)
        try:
            async with asyncio.timeout(patience):
                answer = await cluster.generate(prompt, sampling=sampling)
        except TimeoutError:
            return
        assert answer.status == 200, answer.body
        if number % 10 == 0:
            assert answer.ids == await alone(cluster, prompt, sampling)

    await asyncio.gather(*(one(number) for number in range(count)))


async def held(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Open descriptors and resident bytes of each process, workers included."""
    found = {}
    for process in cluster.processes:
        for p in (
            psutil.Process(process.running.pid),
            *psutil.Process(process.running.pid).children(),
        ):
            found[f"{process.name} {p.pid}"] = (p.num_fds(), p.memory_info().rss)
    return found
