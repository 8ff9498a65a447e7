"""Processes are killed at each phase of a request: a right answer or a typed error, soon.

After each fault the cluster serves again without a restart of the others, and what the request
held is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import pytest

from tests.e2e.cluster import Answer, Cluster, Tables

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(120)]
STEP_S = 0.03
SETTINGS: Tables = {
    "device": {"kind": "null", "step_ms": STEP_S * 1000},
    "scheduler": {"max_prefill_tokens": 32, "kv_memory": 1 << 20, "prefix_cache": False},
}
PROMPT = list(range(256)) * 2  # 16 chunks: half a second of prefill
TOKENS = 16  # half a second of decode
BOUND_S = 2.0
TYPED = {"peer_lost", "no_prefill", "no_decode", "unavailable", "transfer_failed", "draining"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("faults"), 1, 1, 0, SETTINGS)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
async def cluster(started: Cluster) -> AsyncIterator[Cluster]:
    for process in started.processes:
        if process.running.poll() is not None:  # killed by an earlier test
            process.start()
    async with started.session() as ready:
        yield ready


async def request(cluster: Cluster) -> Answer:
    return await cluster.generate(PROMPT, sampling={"max_tokens": TOKENS})


async def in_phase(cluster: Cluster, phase: str) -> None:
    """Until the request is where the fault shall find it."""

    async def is_there() -> bool:
        if phase == "accepted":
            return any([(await cluster.figures(n))["dispatched"] for n in cluster.nodes])
        node = "prefill0" if phase == "prefilling" else "decode0"
        return (await cluster.figures(node))["running"] > 0

    await cluster.until(is_there, f"a request is {phase}")


async def victim_pid(cluster: Cluster, victim: str, name: str = "") -> int:
    role, _, what = victim.partition(" ")
    name = name or f"{role}0"
    if what == "supervisor":
        return cluster.nodes[name].running.pid
    return await cluster.worker_pid(name)


@pytest.mark.parametrize("phase", ["accepted", "prefilling", "decoding"])
@pytest.mark.parametrize(
    "victim", ["prefill worker", "decode worker", "prefill supervisor", "decode supervisor"]
)
async def test_a_killed_process_ends_the_request_soon_and_the_cluster_goes_on(
    cluster: Cluster, victim: str, phase: str
) -> None:
    """CASES 1, 22, 26, 27, 33: no restart of anything but what was killed."""
    want = (await request(cluster)).ids
    pid = await victim_pid(cluster, victim)
    orphans = [child.pid for child in psutil.Process(pid).children()]
    pending = asyncio.create_task(request(cluster))
    await in_phase(cluster, phase)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    answer = await pending
    took = time.monotonic() - killed
    if answer.status == 200:
        assert answer.ids == want
    else:
        assert answer.code in TYPED, answer.body
        assert answer.body["error"]["request_id"]
        assert took < BOUND_S, answer.body
    if "supervisor" in victim:
        node = cluster.nodes[f"{victim.split()[0]}0"]
        node.ended()
        await gone(orphans)
        node.start()
    await cluster.until(lambda: serves(cluster, want), "it serves again", 10)
    await cluster.until_baseline()


async def serves(cluster: Cluster, want: list[int]) -> bool:
    answer = await request(cluster)
    if answer.status != 200:
        assert answer.code in TYPED, answer.body
        await asyncio.sleep(0.1)
        return False
    assert answer.ids == want
    return True


async def gone(pids: list[int]) -> None:
    """Until these have ended; who inherits them may be slow to bury them."""
    for pid in pids:
        for _ in range(250):
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    break
            except psutil.NoSuchProcess:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError(f"worker {pid} outlived its supervisor")


async def test_a_stopped_prefill_worker_is_found_out(cluster: Cluster) -> None:
    """It does not die, it only says nothing more: the heartbeat must notice within its bound."""
    pid = await cluster.worker_pid("prefill0")
    pending = asyncio.create_task(request(cluster))
    await in_phase(cluster, "prefilling")
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        answer = await pending
        took = time.monotonic() - stopped
        assert answer.status != 200
        assert answer.code in TYPED, answer.body
        assert took < BOUND_S + 1.0, (took, answer.body)  # detection, then the grace for a retry
    finally:
        with contextlib.suppress(ProcessLookupError):  # its supervisor may have ended it
            os.kill(pid, signal.SIGCONT)
    await cluster.until_baseline(5.0)


async def test_a_client_that_leaves_frees_both_legs(cluster: Cluster) -> None:
    """CASES 30, 37, 95: at points all over a request's life."""
    body = {
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 4 * TOKENS, "ignore_eos": True},
        "stream": True,
    }
    for delay_s in (0.0, 0.01, 0.05, 0.2, 0.5, 0.8, 1.0, 1.3):
        with pytest.raises(TimeoutError):
            await leave_after(cluster, body, delay_s + 0.001)
        await cluster.until_baseline(2.0 + 2 * STEP_S)


async def leave_after(cluster: Cluster, body: dict[str, Any], delay_s: float) -> None:
    """Raises TimeoutError, having left."""
    assert cluster.http is not None
    async with asyncio.timeout(delay_s):
        async with cluster.http.post(f"{cluster.url}/generate", json=body) as response:
            await response.read()


async def test_a_deadline_ends_a_request_wherever_it_is(cluster: Cluster) -> None:
    for timeout_s in (0.05, 0.4, 1.2):
        answer = await cluster.generate(
            PROMPT, sampling={"max_tokens": 4 * TOKENS}, timeout_s=timeout_s
        )
        assert (answer.status, answer.code) == (504, "deadline"), answer.body
        assert answer.seconds < timeout_s + 1.0
        await cluster.until_baseline(2.0 + 2 * STEP_S)


async def test_the_same_room_twice_at_once_runs_once(cluster: Cluster) -> None:
    """CASES 106."""

    def one() -> Any:
        return cluster.generate(PROMPT, sampling={"max_tokens": 4}, bootstrap_room=77)

    answers = await asyncio.gather(*(one() for _ in range(5)))
    assert sorted(a.status for a in answers) == [200, 409, 409, 409, 409]
    again = await one()
    assert again.status == 200
    assert again.body["bootstrap_room"] == 77
    await cluster.until_baseline()


async def test_a_dead_prefill_is_replaced_before_the_first_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Promise 4: with another prefill instance there, the client sees nothing of the death."""
    cluster = Cluster.make(tmp_path_factory.mktemp("retry"), 2, 1, 0, SETTINGS)
    async with cluster.running():
        want = (await request(cluster)).ids
        for what in ("worker", "supervisor"):
            pending = asyncio.create_task(request(cluster))
            await cluster.until(lambda: is_any(busy(cluster)), "a prefill computes")
            name = await busy(cluster)
            pid = await victim_pid(cluster, f"{name.rstrip('01')} {what}", name)
            os.kill(pid, signal.SIGKILL)
            assert (await pending).ids == want
            await cluster.until_baseline()
            if what == "worker":
                await cluster.until(partial(lives_again, cluster, name, pid), "it is back", 10)
                # What the router says may be older than the death: it must stay so for two looks.
                await cluster.until(
                    Lasting(partial(knows_both, cluster), 1.2), "both are known", 10
                )


async def busy(cluster: Cluster) -> str:
    for name in ("prefill0", "prefill1"):
        if (await cluster.figures(name))["running"] > 0:
            return name
    return ""


async def is_any(found: Awaitable[str]) -> bool:
    return bool(await found)


async def lives_again(cluster: Cluster, name: str, dead: int) -> bool:
    status = await cluster.status(name)
    return status["ready_ranks"] == [0] and await cluster.worker_pid(name) != dead


@dataclass
class Lasting:
    """Whether it has held for so long."""

    holds: Callable[[], Awaitable[bool]]
    seconds: float
    since: float | None = None

    async def __call__(self) -> bool:
        if not await self.holds():
            self.since = None
            return False
        self.since = self.since or time.monotonic()
        return time.monotonic() - self.since > self.seconds


async def knows_both(cluster: Cluster) -> bool:
    """Whether the router sends requests to all instances again."""
    assert cluster.http is not None
    async with cluster.http.get(f"{cluster.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    up = [line.split()[-1] for line in lines if line.startswith("pdrt_router_instance_up{")]
    return up == ["1.0"] * len(cluster.nodes)
