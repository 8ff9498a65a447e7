"""A cluster of real processes on loopback addresses of its own, for end-to-end tests.

Every process is `python -m pdrt ...` as a user would start it. Waiting is polling with a bound:
these processes are outside, there is no event to wait for here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from pdrt.keys import ClusterKey

KEY_TEXT = "a key for tests only, not a secret"
KEY = ClusterKey.from_text(KEY_TEXT)
PORTS = {"prefill": 8001, "decode": 8100, "hybrid": 8200}
_numbers = itertools.count(2)

Tables = Mapping[str, Mapping[str, Any]]
NULL: Tables = {
    "model": {"path": "null"},
    "device": {"kind": "null"},
    "scheduler": {"kv_memory": 1 << 20},
    "timeouts": {"drain_s": 5.0, "request_s": 30.0},
}


def fresh_ip() -> str:
    """A loopback address that no other test process uses."""
    pid = os.getpid()
    return f"127.{64 + (pid >> 8) % 128}.{pid % 256}.{next(_numbers)}"


def merged(*tables: Tables) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for table in tables:
        for name, section in table.items():
            found[name] = {**found.get(name, {}), **section}
    return found


def toml(tables: Tables) -> str:
    lines = []
    for name, section in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Process:
    """One `pdrt node` or `pdrt router`, started, killed and started again at will."""

    name: str
    arguments: list[str]
    log: Path
    url: str
    popen: subprocess.Popen[bytes] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "pdrt", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PDRT_SECURITY_KEY": KEY_TEXT,
                    "OMP_NUM_THREADS": "1",
                    **self.environ,
                },
            )

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.popen is not None, f"{self.name} was not started"
        return self.popen

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.running.send_signal(how)

    def ended(self, within_s: float = 10.0) -> int:
        """Its exit status, which must come within the bound."""
        return self.running.wait(within_s)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])


@dataclass(slots=True)
class Answer:
    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]
    seconds: float

    @property
    def ids(self) -> list[int]:
        assert self.status == 200, self.body
        ids: list[int] = self.body["output_ids"]
        return ids

    @property
    def code(self) -> str:
        code: str = self.body["error"]["code"]
        return code


@dataclass(slots=True)
class Cluster:
    folder: Path
    nodes: dict[str, Process] = field(default_factory=dict)
    router: Process | None = None
    http: aiohttp.ClientSession | None = None
    startup_s: float = 90.0  # a bound for a busy machine, not an expectation
    answer_s: float = 60.0  # likewise

    @staticmethod
    def make(
        folder: Path,
        prefill: int = 1,
        decode: int = 1,
        hybrid: int = 0,
        *tables: Tables,
        per_role: Mapping[str, Tables] | None = None,
        router: Tables | None = None,
    ) -> Cluster:
        cluster = Cluster(folder)
        counts = {"prefill": prefill, "decode": decode, "hybrid": hybrid}
        targets: list[str] = []
        for role, count in counts.items():
            for index in range(count):
                ip = cluster.add_node(
                    f"{role}{index}", role, *tables, (per_role or {}).get(role, {})
                )
                targets.append(target(role, ip))
        ip = fresh_ip()
        conf = folder / "router.toml"
        head = f'local_ip = "{ip}"\n' + "\n".join(targets) + "\n"
        conf.write_text(head + toml(merged(NULL_ROUTER, router or {})))
        cluster.router = Process(
            "router",
            ["router", "--conf", str(conf)],
            folder / "router.log",
            f"http://{ip}:8000",
        )
        return cluster

    def add_node(self, name: str, role: str, *tables: Tables) -> str:
        """A node, unknown to the router unless `make` names it; returns its address."""
        ip, conf = fresh_ip(), self.folder / f"{name}.toml"
        conf.write_text(toml(merged(NULL, {"parallel": {"local_ip": ip}}, *tables)))
        self.nodes[name] = Process(
            name,
            ["node", "--role", role, "--conf", str(conf)],
            self.folder / f"{name}.log",
            f"http://{ip}:{PORTS[role]}",
        )
        return ip

    def amend(self, name: str, tables: Tables) -> None:
        """More settings for one node, in tables that it does not have yet; before `start`."""
        conf = self.folder / f"{name}.toml"
        conf.write_text(conf.read_text() + toml(tables))

    @property
    def processes(self) -> list[Process]:
        return [*self.nodes.values(), *([self.router] if self.router else [])]

    def start(self) -> None:
        for process in self.processes:
            process.start()

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to who does not end within ten seconds."""
        living = [p for p in self.processes if p.popen is not None and p.popen.poll() is None]
        for process in living:
            process.kill(signal.SIGCONT)
            process.kill(signal.SIGTERM)
        for process in living:
            try:
                process.ended()
            except subprocess.TimeoutExpired:
                process.kill()
                process.ended()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Self]:
        """The running cluster, ready, with a client of this event loop."""
        bound = aiohttp.ClientTimeout(total=self.answer_s)
        async with aiohttp.ClientSession(timeout=bound) as http:
            self.http = http
            await self.until_ready()
            yield self

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Started for one test, stopped after it."""
        self.start()
        try:
            async with self.session() as ready:
                yield ready
        finally:
            await asyncio.to_thread(self.stop)

    # Asking.

    @property
    def url(self) -> str:
        assert self.router is not None
        return self.router.url

    @property
    def admin_url(self) -> str:
        return self.url.rpartition(":")[0] + ":18001"

    async def until_ready(self) -> None:
        await self.until(self._is_ready, "all is ready", self.startup_s)

    async def _is_ready(self) -> bool:
        for process in self.processes:
            code = process.popen.poll() if process.popen else None
            assert code is None, f"{process.name} ended with {code}:\n{process.tail()}"
        states = [(await self.status(name)).get("state") for name in self.nodes]
        status, _ = await self.get(f"{self.url}/ready")
        return status == 200 and set(states) == {"ready"}

    async def until_trusted(self) -> None:
        """Each pair has served since it came, or came back: none of them is left out."""

        async def are_trusted() -> bool:
            _, body = await self.get(f"{self.url}/ready")
            return {pair["trust"] for pair in body["pairs"]} == {"passed"}

        await self.until(are_trusted, "all pairs have passed", self.startup_s)

    async def until(
        self, holds: Callable[[], Awaitable[bool]], what: str, within_s: float = 5.0
    ) -> float:
        """Seconds until it held. Fails, with the logs, when it does not within the bound."""
        begun = time.monotonic()
        while not await holds():
            if time.monotonic() - begun > within_s:
                held = {name: await self.figures(name) for name in self.nodes}
                logs = "\n".join(f"--- {p.name}\n{p.tail()}" for p in self.processes)
                raise AssertionError(f"not within {within_s} s: {what}\n{held}\n{logs}")
            await asyncio.sleep(0.02)
        return time.monotonic() - begun

    async def get(self, url: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON body; status 0 when nobody answers."""
        assert self.http is not None
        headers = {"authorization": f"Bearer {KEY.bearer()}"}
        try:
            async with self.http.get(url, headers=headers) as response:
                return response.status, json.loads(await response.text() or "{}")
        except (aiohttp.ClientError, OSError, ValueError):
            return 0, {}

    async def generate(self, prompt: str | list[int], **more: Any) -> Answer:
        sampling = {"temperature": 0, "ignore_eos": True, **more.pop("sampling", {})}
        return await self.post("/generate", {"prompt": prompt, "sampling_params": sampling, **more})

    async def post(self, path: str, body: Any, url: str | None = None) -> Answer:
        assert self.http is not None
        begun = time.monotonic()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        async with self.http.post((url or self.url) + path, data=data, headers=headers) as response:
            text = await response.text()
            return Answer(
                response.status,
                json.loads(text) if response.content_type == "application/json" else {"text": text},
                dict(response.headers),
                time.monotonic() - begun,
            )

    async def status(self, name: str) -> dict[str, Any]:
        _, body = await self.get(f"{self.nodes[name].url}/internal/status")
        return body

    async def worker_pid(self, name: str, rank: int = 0) -> int:
        status = await self.status(name)
        pid: int = status["workers"][rank]["pid"]
        return pid

    # What must hold.

    async def figures(self, name: str) -> dict[str, int]:
        """What a node's workers hold at the moment, in sum."""
        status = await self.status(name)
        names = ("blocks_used", "blocks_quarantined", "slots_used", "rooms", "running")
        workers = status.get("workers", [{}])
        sums = {n: sum(worker.get(n, -1) for worker in workers) for n in names}
        return sums | {"dispatched": status.get("rooms", -1)}

    async def counted(self, event: str) -> float:
        """How often it happened, over the present lives of all workers."""
        assert self.http is not None
        total, head = 0.0, f'pdrt_events_total{{event="{event}"'
        for node in self.nodes.values():
            async with self.http.get(f"{node.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            total += sum(float(line.split()[-1]) for line in lines if line.startswith(head))
        return total

    async def is_at_baseline(self) -> bool:
        alive = [n for n, p in self.nodes.items() if p.popen and p.popen.poll() is None]
        return all([not any((await self.figures(name)).values()) for name in alive])

    async def until_baseline(self, within_s: float = 2.5) -> None:
        await self.until(self.is_at_baseline, "pools, slots and rooms are at baseline", within_s)


PATIENT: Tables = {  # of tests of what is said, not of when: nobody is dead who is only slow
    "timeouts": {
        "drain_s": 5.0,
        "request_s": 300.0,
        "heartbeat_s": 4.0,
        "heartbeat_timeout_s": 4.0,
        "lease_s": 60.0,
        "attach_s": 60.0,
        "connect_s": 20.0,
    },
}
NULL_ROUTER: Tables = {"timeouts": {"drain_s": 5.0, "request_s": 30.0}}


def target(role: str, ip: str) -> str:
    bootstrap = f'\nbootstrap = "{ip}:18800"' if role == "prefill" else ""
    return f'[[{role}]]\nhttp = "{ip}:{PORTS[role]}"{bootstrap}'
