"""Clusters whose nodes register themselves with one or two routers, and clients of both."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.cluster import KEY, PATIENT, Cluster, Process, Tables, fresh_ip, merged, toml

BEARER = {"authorization": f"Bearer {KEY.bearer()}"}
STEPS: Tables = {"device": {"kind": "null", "step_ms": 5}, "scheduler": {"kv_memory": 1 << 22}}


def open_router(folder: Path, name: str, *tables: Tables) -> Process:
    """A router that knows nobody yet."""
    ip, conf = fresh_ip(), folder / f"{name}.toml"
    given = merged(PATIENT, {"policy": {"registration": True}}, *tables)
    conf.write_text(f'local_ip = "{ip}"\n' + toml(given))
    arguments = ["router", "--conf", str(conf)]
    return Process(name, arguments, folder / f"{name}.log", f"http://{ip}:8000")


def admin_of(router: Process) -> str:
    return router.url.rpartition(":")[0] + ":18001"


@dataclass
class Members:
    """Nodes that register themselves; `cluster.router` is the first of the routers."""

    cluster: Cluster
    routers: list[Process]

    @staticmethod
    def make(
        folder: Path,
        roles: Mapping[str, int],
        *tables: Tables,
        routers: int = 1,
        router: Tables | None = None,
    ) -> Members:
        cluster = Cluster(folder, startup_s=240.0)
        found = [open_router(folder, f"router{n}", router or {}) for n in range(routers)]
        urls = [admin_of(each) for each in found]
        for role, count in roles.items():
            for index in range(count):
                registers: Tables = {"router": {"urls": urls}}
                cluster.add_node(f"{role}{index}", role, PATIENT, STEPS, registers, *tables)
        cluster.router = found[0]
        return Members(cluster, found)

    @property
    def all(self) -> list[Process]:
        return [*self.cluster.nodes.values(), *self.routers]

    def start(self) -> None:
        for each in self.all:
            each.start()

    def stop(self) -> None:
        for each in self.routers[1:]:
            if each.popen is not None and each.popen.poll() is None:
                each.kill(signal.SIGTERM)
                each.ended(15)
        self.cluster.stop()

    async def until_served(self, pairs: int, within_s: float = 240.0) -> None:
        """Every router has that many pairs that have passed."""
        for router in self.routers:

            async def has_pairs(url: str = router.url) -> bool:
                _, told = await self.cluster.get(f"{url}/ready")
                passed = [p for p in told.get("pairs", []) if p["trust"] == "passed"]
                up = {i["name"] for i in told.get("instances", []) if not i["reason"]}
                return len([p for p in passed if set(p["name"].split(" + ")) <= up]) == pairs

            await self.cluster.until(has_pairs, f"{router.name} has {pairs} pairs", within_s)

    async def admin(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        assert self.cluster.http is not None
        url = admin_of(self.routers[0]) + path
        async with self.cluster.http.request(method, url, json=body, headers=BEARER) as answer:
            told: dict[str, Any] = await answer.json()
            assert answer.status in (200, 201), told
            return told


@dataclass
class Load:
    """Clients behind a balancer of routers, that ask without a pause until `stopping`.

    As balancers do, it asks another router when one refuses the connection or says that it drains,
    and leaves that one alone until its /ready is 200.
    """

    urls: list[str]
    bodies: Callable[[int], dict[str, Any]]
    stopping: bool = False
    served: int = 0
    moved: int = 0
    failed: list[str] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, clients: int) -> None:
        fresh = aiohttp.TCPConnector(force_close=True, limit=0)
        async with (
            aiohttp.ClientSession(
                connector=fresh, timeout=aiohttp.ClientTimeout(total=60)
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            watching = tasks.create_task(self._look(session))
            await asyncio.gather(*(self._client(session) for _ in range(clients)))
            watching.cancel()

    async def _look(self, session: aiohttp.ClientSession) -> None:
        while True:
            for url in tuple(self.away):
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(f"{url}/ready") as answer:
                        if answer.status == 200:
                            self.away.discard(url)
            await asyncio.sleep(0.1)

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self.stopping:
            number = next(self.numbers)
            problem = "nobody was asked"
            for _ in self.urls:
                here = [url for url in self.urls if url not in self.away] or self.urls
                url = here[number % len(here)]
                problem = await self._ask(session, url, number)
                if problem not in ("refused", "draining"):
                    break
                self.away.add(url)
                self.moved += 1
            if problem:
                self.failed.append(problem)
            else:
                self.served += 1

    async def _ask(self, session: aiohttp.ClientSession, url: str, number: int) -> str:
        """What went wrong, or nothing."""
        body = self.bodies(number)
        try:
            async with session.post(f"{url}/generate", json=body) as answer:
                text = await answer.text()
        except aiohttp.ClientConnectorError:
            return "refused"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        if answer.status != 200:
            said = json.loads(text)["error"]
            is_away = said["code"] == "draining" and said["stage"] == "router"
            return "draining" if is_away else f"{answer.status}: {text}"
        wanted = body["sampling_params"]["max_tokens"]
        got = _tokens(text) if body["stream"] else len(json.loads(text)["output_ids"])
        return "" if got == wanted else f"{got} tokens of {wanted}: {text[-300:]}"


def _tokens(stream: str) -> int:
    lines = stream.split("\n")  # texts may have other line breaks in them
    chunks = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return sum(len(json.loads(chunk).get("output_ids", [])) for chunk in chunks)
