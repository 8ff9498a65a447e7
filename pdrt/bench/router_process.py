"""Routers as processes in front of scripted backends: how each is started, and how it ends."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout

from pdrt.bench.bound import bound
from pdrt.config import PolicySection, Role, TimeoutsSection
from pdrt.errors import PeerLost, Unavailable
from pdrt.up.layout import Part, Shape, Tables, Value, to_toml
from pdrt.up.place import free_port
from pdrt.up.processes import Child, end

HOST: Final = "127.0.0.1"
_START_S: Final = 60.0
_END_S: Final = 5.0
_LOOK_S: Final = 0.05
_ASK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Program:
    """A router that can be started: its command line, its settings, how it says that it serves."""

    name: str
    port: int
    arguments: Sequence[str]
    environ: Mapping[str, str]
    ready: str = "/health"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def pdrt_router(
    folder: Path, prefill: Sequence[int], decode: Sequence[int], timeouts: Mapping[str, float]
) -> Program:
    """pdrt's own, with policies, health, deadlines, metrics and log as they are by default."""
    port = free_port(HOST)
    known = TimeoutsSection.model_fields
    limits: dict[str, Value] = {name: s for name, s in timeouts.items() if name in known}
    tables: Tables = {
        "policy": _plain(),
        "ports": {"router": port, "admin": 0},
        "timeouts": limits,
        "log": {"format": "json"},
    }
    targets: list[tuple[Role, str, str]] = [
        ("prefill", f"{HOST}:{each}", f"{HOST}:{each}") for each in prefill
    ]
    targets += [("decode", f"{HOST}:{each}", "") for each in decode]
    conf = folder / "router.toml"
    conf.write_text(to_toml(tables, tuple(targets)))
    arguments = [sys.executable, "-m", "pdrt", "router", "--conf", str(conf)]
    return Program("pdrt", port, arguments, {"PDRT_SECURITY_KEY": os.urandom(32).hex()}, "/ready")


def _plain() -> dict[str, Value]:
    """That backends are plain ones."""
    return {"backends": "plain"} if "backends" in PolicySection.model_fields else {"canary": False}


@asynccontextmanager
async def running(
    program: Program, folder: Path, environ: Mapping[str, str], cores: Collection[int] = ()
) -> AsyncIterator[Child]:
    """Started and serving; ended afterwards. Raises PeerLost or Unavailable."""
    part = Part(program.name, "router", HOST, program.port, Shape(), {})
    arguments = bound(cores, program.arguments) if cores else list(program.arguments)
    log = folder / f"{program.name}.log"
    child = await Child.start(part, arguments, log, {**environ, **program.environ})
    try:
        await _serves(program, child)
        yield child
    finally:
        await end([child], _END_S, asyncio.Event())
        await child.wait()
        child.close()


async def _serves(program: Program, child: Child) -> None:
    began = time.monotonic()
    async with ClientSession(timeout=ClientTimeout(total=_ASK_S)) as session:
        while time.monotonic() - began < _START_S:
            if child.exit_status is not None:
                words = "\n".join(child.last_lines())
                raise PeerLost(f"{program.name} ended with {child.exit_status}:\n{words}")
            child.new_lines()
            if await _answers(session, program.url + program.ready):
                return
            await asyncio.sleep(_LOOK_S)
    words = "\n".join(child.last_lines())
    raise Unavailable(f"{program.name} does not serve after {_START_S:g} s:\n{words}")


async def _answers(session: ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (ClientError, TimeoutError, OSError):
        return False
