"""Each transport between real processes: right answers, a death in mid-transfer, damage found.

One decode node offers all transports; each prefill node has one of them, and one (over shm, as
all other modules here) damages half of what it sends. A request that names a prefill's bootstrap
server is computed there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from typing import Final

import pytest

from pdrt.config import TransportName
from tests.e2e.cluster import Answer, Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(90)]
SETTINGS: Final[Tables] = {
    "device": {"kind": "null", "step_ms": 10},
    "scheduler": {"max_prefill_tokens": 32, "kv_memory": 1 << 20, "prefix_cache": False},
}
PACKAGES: Final[dict[TransportName, str]] = {
    "tcp": "pdrt",
    "nixl": "nixl_cu12",
    "mooncake": "mooncake",
}
HERE: Final = [name for name, package in PACKAGES.items() if find_spec(package)]
LIAR: Final = f"prefill{len(HERE)}"
PROMPTS: Final = [[i, 3 * i, 255 - i] * (1 + 9 * i) for i in range(6)]
LONG: Final = [i % 251 for i in range(512)]  # 16 chunks
SAMPLING: Final = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
TYPED: Final = {"peer_lost", "no_prefill", "unavailable", "transfer_failed"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    offers: Tables = {"transfer": {"checksums": True, "network": HERE}}
    cluster = Cluster.make(
        tmp_path_factory.mktemp("transports"),
        len(HERE) + 1,
        1,
        0,
        SETTINGS,
        per_role={"decode": offers},
        router={"timeouts": {"heartbeat_timeout_s": 1.0}},  # five nodes start: some are slow
    )
    for number, name in enumerate(HERE):
        cluster.amend(f"prefill{number}", {"transfer": {"transport": name}})
    cluster.amend(LIAR, {"transfer.faults": {"corrupt": 0.5}})
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
async def cluster(started: Cluster) -> AsyncIterator[Cluster]:
    async with started.session() as ready:

        async def serve() -> bool:
            each = [ask(ready, [1, 2, 3], f"prefill{number}") for number in range(len(HERE))]
            return all(answer.status == 200 for answer in await asyncio.gather(*each))

        await ready.until(serve, "a pair of each transport has passed its canary", 20)
        yield ready


@pytest.fixture(params=PACKAGES)
def prefill(request: pytest.FixtureRequest) -> str:
    """The node that has this transport."""
    if request.param not in HERE:
        pytest.skip(f"needs {PACKAGES[request.param]}")
    return f"prefill{HERE.index(request.param)}"


async def ask(cluster: Cluster, prompt: list[int], prefill: str = "") -> Answer:
    where = {}
    if prefill:
        ip = cluster.nodes[prefill].url.split("/")[2].partition(":")[0]
        where = {"bootstrap_host": ip, "bootstrap_port": 18800}
    return await cluster.generate(prompt, sampling=SAMPLING, **where)


def right(prompt: list[int]) -> list[int]:
    return Colocated().answer(prompt, SAMPLING)


async def test_answers_are_those_of_one_device(cluster: Cluster, prefill: str) -> None:
    name = HERE[int(prefill[-1])]
    for prompt in PROMPTS:
        assert (await ask(cluster, prompt, prefill)).ids == right(prompt)
    log = cluster.nodes[prefill].log.read_text().splitlines()
    assert any("peer_attached" in line and name in line for line in log)
    await cluster.until_baseline()


async def test_a_death_in_mid_transfer_is_told_soon_and_the_pair_serves_again(
    cluster: Cluster, prefill: str
) -> None:
    """CASES 22, 26: no restart of anything but what was killed, and nothing stays held."""

    async def is_transferring() -> bool:
        return (await cluster.figures(prefill))["running"] > 0

    async def serves() -> bool:
        answer = await ask(cluster, LONG, prefill)
        if answer.status == 200:
            assert answer.ids == right(LONG)
            return True
        assert answer.code in TYPED, answer.body
        await asyncio.sleep(0.1)
        return False

    pending = asyncio.create_task(ask(cluster, LONG, prefill))
    await cluster.until(is_transferring, "blocks are on their way")
    os.kill(await cluster.worker_pid(prefill), signal.SIGKILL)
    killed = time.monotonic()
    answer = await pending
    assert time.monotonic() - killed < 2
    assert answer.code in TYPED if answer.status != 200 else answer.ids == right(LONG)
    await cluster.until_baseline()
    await cluster.until(serves, "it serves again", 10)
    await cluster.until_baseline()


async def test_a_prefill_that_damages_what_it_sends_is_found_out(cluster: Cluster) -> None:
    """CASES 54, 57: nobody gets a token of damaged KV, and the log names a bad block.

    Who insists on it is answered all the same: its first token was right, and decode goes on
    from it, by itself when the second try is damaged too.
    """

    async def is_named() -> bool:
        answer = await ask(cluster, LONG, LIAR)
        if answer.status == 200:
            assert answer.ids == right(LONG)
        else:
            assert (answer.status, answer.code) in ((503, "transfer_failed"), (503, "unavailable"))
        return "which is our block" in cluster.nodes["decode0"].log.read_text()

    await cluster.until(is_named, "the damage is named", 20)
    assert await cluster.counted("blocks_corrupt") > 0
    await cluster.until_baseline()


async def test_with_another_prefill_the_client_sees_nothing_of_the_damage(
    cluster: Cluster,
) -> None:
    async def is_damaged() -> bool:
        before = await cluster.counted("blocks_corrupt")
        answers = await asyncio.gather(*(ask(cluster, prompt) for prompt in PROMPTS))
        assert [answer.ids for answer in answers] == [right(prompt) for prompt in PROMPTS]
        return await cluster.counted("blocks_corrupt") > before + 1  # 1: a canary

    await cluster.until(is_damaged, "the one that damages is asked", 20)
    await cluster.until_baseline()
