"""Each transport between real processes: right answers, a death in mid-transfer, damage found."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from pdrt.config import TransportName
from tests.e2e.cluster import Answer, Cluster, Tables
from tests.e2e.colocated import Colocated

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]
SETTINGS: Final[Tables] = {
    "device": {"kind": "null", "step_ms": 10},
    "scheduler": {"max_prefill_tokens": 32, "kv_memory": 1 << 20},
}
LONG: Final = [i % 251 for i in range(512)]  # 16 chunks
TYPED: Final = {"peer_lost", "no_prefill", "unavailable", "transfer_failed"}
NEEDS: Final[dict[TransportName, str]] = {"nixl": "nixl", "mooncake": "mooncake"}
GREEDY: Final = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def over(name: TransportName) -> Tables:
    return {"transfer": {"transport": name}}


@pytest.fixture(params=["shm"])
def transport(request: pytest.FixtureRequest) -> TransportName:
    name: TransportName = request.param
    if (needs := NEEDS.get(name)) and find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    return name


async def ask(cluster: Cluster, prompt: list[int]) -> Answer:
    return await cluster.generate(prompt, sampling=GREEDY)


def is_right_or_typed(answer: Answer, prompt: list[int]) -> bool:
    if answer.status == 200:
        return answer.ids == Colocated().answer(prompt, GREEDY)
    return answer.code in TYPED


async def test_answers_are_right_and_a_death_in_mid_transfer_is_told_soon(
    transport: TransportName, tmp_path: Path
) -> None:
    """CASES 22, 26: and afterwards the pair serves again with nothing held."""
    cluster = Cluster.make(tmp_path, 1, 1, 0, SETTINGS, over(transport))
    async with cluster.running():
        prompts = [[i, 3 * i, 255 - i] * (1 + 9 * i) for i in range(6)]
        answers = await asyncio.gather(*(ask(cluster, prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == Colocated().answer(prompt, GREEDY)
        await cluster.until_baseline()
        assert await is_used(cluster, transport)
        pending = asyncio.create_task(ask(cluster, LONG))
        await cluster.until(lambda: is_transferring(cluster), "blocks are on their way")
        os.kill(await cluster.worker_pid("prefill0"), signal.SIGKILL)
        killed = time.monotonic()
        answer = await pending
        assert time.monotonic() - killed < 2
        assert is_right_or_typed(answer, LONG), answer.body
        await cluster.until_baseline()
        await cluster.until(lambda: serves(cluster), "it serves again", 10)
        await cluster.until_baseline()


async def is_used(cluster: Cluster, transport: TransportName) -> bool:
    log = cluster.nodes["decode0"].log.read_text()
    return any("peer_attached" in line and transport in line for line in log.splitlines())


async def is_transferring(cluster: Cluster) -> bool:
    return (await cluster.figures("prefill0"))["running"] > 0


async def serves(cluster: Cluster) -> bool:
    answer = await ask(cluster, LONG)
    assert is_right_or_typed(answer, LONG), answer.body
    if answer.status != 200:
        await asyncio.sleep(0.1)
    return answer.status == 200


async def test_a_prefill_that_damages_all_it_sends_is_found_out_and_replaced(
    tmp_path: Path,
) -> None:
    """CASES 54: the client sees the other one's right answer, and operators see the damage."""
    cluster = Cluster.make(tmp_path, 2, 1, 0, SETTINGS, {"transfer": {"checksums": True}})
    cluster.amend("prefill0", {"transfer.faults": {"corrupt": 1.0}})
    async with cluster.running():
        prompts = [[i, 3 * i, 255 - i] * (1 + 9 * i) for i in range(6)]
        answers = await asyncio.gather(*(ask(cluster, prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == Colocated().answer(prompt, GREEDY)
        assert await cluster.counted("blocks_corrupt") > 0
        await cluster.until_baseline()
