"""A node with its real API and signals, and with workers that are no processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from structlog.testing import capture_logs

from pdrt.config import NodeConfig, Place, Role, check
from pdrt.control.heartbeat import Time
from pdrt.control.parts import Heard
from pdrt.errors import ConfigError
from pdrt.keys import ClusterKey
from pdrt.messages import Drain, Rank
from pdrt.node import Node, check_served
from pdrt.spawn import WorkerSpec
from tests.e2e.cluster import fresh_ip
from tests.fake_worker import FakeWorker

KEY = ClusterKey(b"the key of a test cluster")
TWO_BY_TWO = {"world_size": 4, "dp": 2, "tp": 2, "devices_per_node": 4}
BEARER = {"authorization": f"Bearer {KEY.bearer()}"}


def config(**tables: Any) -> NodeConfig:
    ports = {name: 0 for name in ("router", "prefill", "decode", "hybrid", "bootstrap")}
    return check(NodeConfig, {"model": {"path": "null"}, "ports": ports, **tables}, "test")


class Rig:
    """`live()` as a task, what it logs, and its workers."""

    def __init__(
        self, role: Role, settings: NodeConfig, session: ClientSession, index: int = 0
    ) -> None:
        self.session, self.settings = session, settings
        self.workers: list[FakeWorker] = []
        self.logs: Sequence[Mapping[str, Any]] = []
        self.node = Node(role, settings, Place.of(settings.parallel, index), KEY, self.hire)
        self.task = asyncio.create_task(self.node.live())

    def hire(
        self,
        rank: Rank,
        make_spec: Callable[[str], WorkerSpec],
        folder: Path,
        heard: Heard,
        time: Time,
    ) -> FakeWorker:
        self.workers.append(FakeWorker(rank, make_spec, folder, heard, time))
        return self.workers[-1]

    async def event(self, name: str, **fields: Any) -> Mapping[str, Any]:
        """The log line, once it is there."""
        while True:
            for line in self.logs:
                if line["event"] == name and fields.items() <= line.items():
                    return line
            assert not self.task.done(), self.logs
            await asyncio.sleep(0)

    async def get(self, path: str) -> tuple[int, Any]:
        url = (await self.event("listening"))["url"]
        async with self.session.get(url + path, headers=BEARER) as response:
            return response.status, await response.json()

    async def be_ready(self) -> None:
        await self.event("node", state="loading")
        for worker in self.workers:
            worker.become_ready()
        await self.event("node", state="ready")


@asynccontextmanager
async def rigged(role: Role = "hybrid", **tables: Any) -> AsyncIterator[Rig]:
    async with ClientSession() as session:
        with capture_logs() as logs:
            rig = Rig(role, config(**tables), session)
            rig.logs = logs
            folder = rig.workers[0].folder
            assert folder.stat().st_mode & 0o777 == 0o700
            try:
                yield rig
            finally:
                rig.task.cancel()
                await asyncio.wait([rig.task])
    assert not folder.exists(), "the sockets' folder is left"
    assert not any(worker.runs for worker in rig.workers), "a worker is left"


async def test_a_node_answers_from_its_first_moment_and_stops_on_a_signal() -> None:
    """CASES 18: liveness is not readiness."""
    async with rigged() as rig:
        assert (await rig.get("/health"))[0] == 200
        assert (await rig.get("/ready"))[0] == 503
        await rig.be_ready()
        while (await rig.get("/ready"))[0] != 200:  # it tries itself meanwhile
            await asyncio.sleep(0)
        status, body = await rig.get("/internal/status")
        assert (status, body["state"], body["role"], body["model"]) == (
            200,
            "ready",
            "hybrid",
            "null",
        )
        os.kill(os.getpid(), signal.SIGTERM)
        assert await rig.task == 0
        assert Drain() in rig.workers[0].told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_workers_load_ends_the_node_at_once(number: signal.Signals) -> None:
    async with rigged() as rig:
        await rig.event("node", state="loading")
        os.kill(os.getpid(), number)
        assert await rig.task == 0


async def test_a_signal_before_anything_has_begun_leaves_nothing() -> None:
    async with rigged() as rig:
        await asyncio.sleep(0)  # it binds
        os.kill(os.getpid(), signal.SIGTERM)
        assert await rig.task == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_second_signal_does_not_wait_for_requests() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        rig.workers[0].answers = None
        url = (await rig.event("listening"))["url"]
        body = {"prompt": [1, 2], "sampling_params": {"max_tokens": 4}}
        asked = asyncio.create_task(rig.session.post(f"{url}/generate", json=body))
        while not (await rig.get("/internal/status"))[1]["rooms"]:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await rig.event("node", state="draining")
        os.kill(os.getpid(), signal.SIGTERM)
        answer = await asked
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "draining")
        assert await rig.task == 0


async def test_an_operator_drains_by_http() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        url = (await rig.event("listening"))["url"]
        async with rig.session.post(f"{url}/admin/drain", headers=BEARER) as response:
            assert response.status == 200
        assert await rig.task == 0


async def test_a_worker_that_dies_too_often_ends_the_node_with_the_reason() -> None:
    async with rigged() as rig:
        await rig.be_ready()
        rig.workers[0].die(final=True)
        assert await rig.task == 1
        assert "exit status -9" in last(rig, "node_failed")["reason"]


async def test_what_any_actor_raises_ends_the_node_with_the_reason() -> None:
    async with rigged("prefill", parallel={"world_size": 2, "dp": 2, "devices_per_node": 2}) as rig:
        await rig.event("node", state="loading")
        rig.workers[1].break_down(RuntimeError("a bug"))
        assert await rig.task == 1
        assert str(last(rig, "node_failed")["exc_info"]) == "a bug"


def last(rig: Rig, name: str) -> Mapping[str, Any]:
    return next(line for line in reversed(rig.logs) if line["event"] == name)


async def test_workers_are_told_the_real_bootstrap_port_and_a_new_epoch_each_life() -> None:
    async with rigged("prefill", parallel={"world_size": 2, "dp": 2, "devices_per_node": 2}) as rig:
        await rig.event("node", state="loading")
        _, status = await rig.get("/internal/status")
        first, second = (rig.workers[1].make_spec("ipc:///w") for _ in range(2))
        assert first.disagg.bootstrap_port == status["bootstrap_port"] != 0
        assert (first.rank, first.role, first.key) == (Rank(dp=1), "prefill", KEY)
        assert second.epoch > first.epoch


async def test_a_node_has_a_worker_for_each_rank_and_is_ready_with_the_last() -> None:
    async with rigged("decode", parallel=TWO_BY_TWO) as rig:
        await rig.event("node", state="loading")
        ranks = [Rank(dp=dp, tp=tp) for dp in (0, 1) for tp in (0, 1)]
        assert [worker.rank for worker in rig.workers] == ranks
        assert [worker.make_spec("ipc:///w").rank for worker in rig.workers] == ranks
        for worker in rig.workers[:3]:
            worker.become_ready()
        status, body = await rig.get("/ready")
        assert (status, "worker 1,0,1 is loading" in body["reason"]) == (503, True)
        _, told = await rig.get("/internal/status")
        assert (told["dp_size"], told["ready_ranks"]) == (2, [0])
        rig.workers[3].become_ready()
        await rig.event("node", state="ready")
        _, told = await rig.get("/internal/status")
        assert told["ready_ranks"] == [0, 1]
        assert [worker["rank"] for worker in told["workers"]] == [str(rank) for rank in ranks]


async def test_a_taken_port_is_told_before_any_worker_starts() -> None:
    async with rigged() as rig:
        url = (await rig.event("listening"))["url"]
        ports = {"hybrid": int(url.rpartition(":")[2])}
        taken = Rig("hybrid", config(ports=ports), rig.session)
        with pytest.raises(ConfigError, match="is taken"):
            await taken.task
        assert not taken.workers[0].runs
        assert not taken.workers[0].folder.exists()


OVER_TWO = {"world_size": 2, "tp": 2, "devices_per_node": 1, "ips": ["127.0.0.1", "127.0.0.2"]}


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[Rig, Rig]]:
    """A leader and the other node of its instance, on a port that they both know."""
    ips = [fresh_ip(), fresh_ip()]
    parallel = {"world_size": 2, "tp": 2, "devices_per_node": 1, "ips": ips}
    async with ClientSession() as session:
        with capture_logs() as logs:
            rigs = []
            for index, ip in enumerate(ips):
                place = {"parallel": {**parallel, "local_ip": ip}, "ports": {"hybrid": 8200}}
                rigs.append(Rig("hybrid", config(**place), session, index))
                rigs[index].logs = logs
            try:
                yield rigs[0], rigs[1]
            finally:
                for rig in rigs:
                    rig.task.cancel()
                await asyncio.wait([rig.task for rig in rigs])


async def answer(rig: Rig, path: str, method: str = "GET") -> tuple[int, Any]:
    url = f"http://{rig.settings.parallel.local_ip}:8200{path}"
    async with rig.session.request(method, url, headers=BEARER) as response:
        return response.status, await response.json()


async def test_two_nodes_are_one_instance_that_its_leader_answers_for() -> None:
    async with two_nodes() as (leader, other):
        assert [str(w.rank) for w in (*leader.workers, *other.workers)] == ["0,0,0", "0,0,1"]
        await leader.event("node_came")
        await leader.event("leader_met")
        leader.workers[0].become_ready()
        _, body = await answer(leader, "/ready")
        assert "worker 0,0,1 of node 1 (127." in body["reason"]
        _, body = await answer(other, "/ready")
        assert body["reason"] == "the node is loading; worker 0,0,1 is loading"
        other.workers[0].become_ready()
        while (await answer(leader, "/ready"))[0] != 200:
            await asyncio.sleep(0)
        assert (await answer(other, "/ready"))[0] == 200
        _, health = await answer(leader, "/health")
        assert [node["state"] for node in health["nodes"]] == ["here"]
        _, health = await answer(other, "/health")
        assert (health["node"].split()[:2], health["state"]) == (["node", "1"], "ready")
        assert [worker["rank"] for worker in health["workers"]] == ["0,0,1"]
        status, _ = await answer(other, "/generate", "POST")
        assert status == 404, "requests are the leader's"


async def test_a_worker_node_that_is_drained_is_let_go_by_its_leader() -> None:
    async with two_nodes() as (leader, other):
        await leader.event("leader_met")
        for rig in (leader, other):
            rig.workers[0].become_ready()
        while (await answer(leader, "/ready"))[0] != 200:
            await asyncio.sleep(0)
        status, body = await answer(other, "/admin/drain", "POST")
        assert (status, body["drained"]) == (202, False)
        assert await other.task == 0
        await leader.event("node_gone", reason="it has left")
        _, body = await answer(leader, "/ready")
        assert "its node is gone: it has left" in body["reason"]


async def test_a_worker_node_shows_its_health_to_all_and_the_rest_to_the_cluster() -> None:
    async with two_nodes() as (leader, other):
        await leader.event("leader_met")
        url = f"http://{other.settings.parallel.local_ip}:8200"
        for path, status in (("/health", 200), ("/metrics", 200), ("/internal/status", 401)):
            async with other.session.get(url + path) as response:
                assert response.status == status, path
        async with other.session.post(f"{url}/admin/drain") as response:
            assert response.status == 401
        assert (await answer(other, "/internal/status"))[1]["rooms"] == 0


async def test_a_leader_whose_other_node_never_comes_gives_up_and_names_it() -> None:
    parallel = {**OVER_TWO, "ips": [fresh_ip(), "127.0.0.9"]}
    parallel["local_ip"] = parallel["ips"][0]  # type: ignore[index]
    settings = config(parallel=parallel, timeouts={"startup_s": 0.5}, ports={"hybrid": 8200})
    with capture_logs() as logs:
        async with ClientSession() as session:
            rig = Rig("hybrid", settings, session)
            rig.logs = logs
            await rig.event("node", state="loading")
            rig.workers[0].become_ready()
            assert await rig.task == 1
    assert last(rig, "node_failed")["reason"] == (
        "not ready after 0.5 s; worker 0,0,1 of node 1 (127.0.0.9) is absent: its node has not come"
    )


async def test_a_node_whose_leader_never_comes_gives_up_and_names_it() -> None:
    parallel = {**OVER_TWO, "ips": ["127.0.0.1", "127.0.0.9"], "local_ip": "127.0.0.9"}
    settings = config(
        parallel=parallel, timeouts={"startup_s": 0.5}, ports={"hybrid": 9, "bootstrap": 0}
    )
    with capture_logs() as logs:
        async with ClientSession() as session:
            rig = Rig("hybrid", settings, session, 1)
            rig.logs = logs
            assert await rig.task == 1
    reason = last(rig, "node_failed")["reason"]
    assert reason.startswith("not ready after 0.5 s; worker 0,0,1 is loading; ")
    assert "leader 127.0.0.1:9" in reason


@pytest.mark.parametrize(
    ("role", "parallel", "ports", "why"),
    [
        ("hybrid", {}, {"hybrid": 0}, "[ports] hybrid = 0: the nodes of an instance must know"),
        ("prefill", {}, {"bootstrap": 0}, "[ports] bootstrap = 0"),
        (
            "decode",
            {"ips": ["10.9.9.1", "10.9.9.2"], "local_ip": "10.9.8.1"},
            {},
            "look for this leader at 10.9.9.1, as ips says",
        ),
    ],
)
def test_a_leader_whom_its_other_nodes_would_not_find_is_refused(
    role: Role, parallel: Mapping[str, Any], ports: Mapping[str, int], why: str
) -> None:
    tables = {"model": {"path": "null"}, "parallel": {**OVER_TWO, **parallel}, "ports": ports}
    settings = check(NodeConfig, tables, "test")
    with pytest.raises(ConfigError, match=re.escape(why)):
        check_served(role, settings, Place.of(settings.parallel, 0))


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"world_size": 3, "tp": 3, "devices_per_node": 3}, "tp = 3: must divide the model's 8"),
        (
            {"world_size": 6, "cp": 2, "tp": 3, "devices_per_node": 6},
            "tp = 3: must divide the model's 8",
        ),
    ],
)
def test_a_topology_that_the_model_does_not_serve_is_refused(
    parallel: Mapping[str, Any], why: str
) -> None:
    settings = config(parallel=parallel)
    with pytest.raises(ConfigError, match=why):
        check_served("prefill", settings, Place.of(settings.parallel, 0))


@pytest.mark.parametrize("role", ["decode", "hybrid"])
def test_only_prefill_shares_the_rows_of_prompts(role: Role) -> None:
    settings = config(parallel={"world_size": 2, "cp": 2, "devices_per_node": 2})
    check_served("prefill", settings, Place.of(settings.parallel, 0))
    with pytest.raises(ConfigError, match=f"cp = 2: a {role} instance has cp = 1"):
        check_served(role, settings, Place.of(settings.parallel, 0))
