"""Instances come and go under load: every request ends, and soon."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.cluster import KEY, Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.alone]
SETTINGS: Tables = {"device": {"kind": "null", "step_ms": 5.0}}
DEADLINE_S = 20.0


async def admin(http: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> int:
    headers = {"authorization": f"Bearer {KEY.bearer()}"}
    async with http.request(method, url, json=body, headers=headers) as answer:
        return answer.status


@asynccontextmanager
async def churning(cluster: Cluster, every_s: float) -> AsyncIterator[Counter[str]]:
    """The second decode instance leaves and joins again and again."""
    assert cluster.http is not None
    http, changes = cluster.http, Counter[str]()
    where = cluster.nodes["decode1"].url.removeprefix("http://")
    stopped = asyncio.Event()

    async def churn() -> None:
        url = f"{cluster.admin_url}/admin/members"
        while not stopped.is_set():
            changes[f"left {await admin(http, 'DELETE', f'{url}/{where}')}"] += 1
            await asyncio.sleep(every_s)
            joining = {"role": "decode", "http": where}
            changes[f"joined {await admin(http, 'POST', url, joining)}"] += 1
            await asyncio.sleep(every_s)

    task = asyncio.create_task(churn())
    try:
        yield changes
    finally:
        stopped.set()
        await task


async def load(cluster: Cluster, seconds: float) -> list[tuple[int, float]]:
    """Status and seconds of each request of eight clients."""
    ended = time.monotonic() + seconds
    found = list[tuple[int, float]]()

    async def client(number: int) -> None:
        while time.monotonic() < ended:
            asked = {"max_tokens": 20 + number}
            answer = await cluster.generate("abc", sampling=asked, timeout_s=DEADLINE_S)
            found.append((answer.status, answer.seconds))

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(client(number))
    return found


async def churn(folder: Path, seconds: float, every_s: float) -> None:
    cluster = Cluster.make(folder, 1, 2, 0, SETTINGS)
    async with cluster.running():
        async with churning(cluster, every_s) as changes:
            answers = await load(cluster, seconds)
        assert set(Counter(status for status, _ in answers)) == {200}
        assert len(answers) > 3 * seconds
        assert max(took for _, took in answers) < DEADLINE_S
        assert all(change.split()[1][0] == "2" for change in changes), changes
        await cluster.until_baseline()


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_coming_and_going_costs_no_request(tmp_path: Path) -> None:
    """CASES 11, short: 1.6 % of requests hung during heavy add and remove churn."""
    await churn(tmp_path, 10.0, 0.3)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_coming_and_going_for_ten_minutes_costs_no_request(tmp_path: Path) -> None:
    """CASES 11."""
    await churn(tmp_path, 600.0, 2.0)
