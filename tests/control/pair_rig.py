"""The client API as both topologies serve it: a hybrid leader, and a router before a pair.

All leaders are real, on sockets; a scripted worker each says what the test tells it to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import aiohttp

from pdrt.config import Role, RouterConfig
from pdrt.control.listen import listen
from pdrt.control.router import make_router, make_server
from pdrt.control.ticket import Clocks
from pdrt.messages import Output, Submit, unpack_ids
from tests.control.leader_rig import KEY, WALL, Rig, ScriptedWorker, out, rigged, scored

Topology: TypeAlias = Literal["hybrid", "pair"]
TOPOLOGIES: tuple[Topology, ...] = ("hybrid", "pair")


@dataclass
class Served:
    """`rig` is the leader that answers; `url` is where clients ask."""

    url: str
    rig: Rig
    client: aiohttp.ClientSession
    others: Sequence[Rig] = ()

    @property
    def worker(self) -> ScriptedWorker:
        return self.rig.worker

    async def post(self, path: str, body: Any) -> aiohttp.ClientResponse:
        return await self.client.post(self.url + path, json=body)

    def rooms(self) -> int:
        return sum(rig.leader.dispatcher.load().rooms for rig in (self.rig, *self.others))

    async def at_rest(self) -> None:
        async with asyncio.timeout(10):
            while self.rooms():
                await asyncio.sleep(0)


def prompt_text(submit: Submit) -> str:
    return bytes(unpack_ids(submit.tokens)).decode()


def prefilled(submit: Submit) -> Sequence[Output]:
    prompt = bytes(unpack_ids(submit.tokens))
    odds = scored(prompt, submit.scoring) if submit.scoring >= 0 and len(prompt) > 1 else b""
    return [out("", "prefilled", scored=odds)]


@asynccontextmanager
async def serving(topology: Topology, **changes: Any) -> AsyncIterator[Served]:
    """`changes` are fields of the leaders."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        if topology == "hybrid":
            rig = await stack.enter_async_context(rigged("hybrid", **changes))
            yield Served(rig.url, rig, client)
            return
        prefill, decode = [
            await stack.enter_async_context(rigged(role, **_told(role), **changes))
            for role in ("prefill", "decode")
        ]
        prefill.worker.answers = prefilled
        decode.worker.script = [out("ok", "length")]  # for the canary
        url = await stack.enter_async_context(_router(prefill.url, decode.url))
        for rig in (prefill, decode):
            rig.worker.submitted.clear()
        decode.worker.script = None
        yield Served(url, decode, client, (prefill,))


def _told(role: Role) -> dict[str, Any]:
    bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9}
    status = {"role": role, "state": "ready", "model": "null", "instance_epoch": 1}
    return {"status": lambda: status | (bootstrap if role == "prefill" else {})}


@asynccontextmanager
async def _router(prefill: str, decode: str) -> AsyncIterator[str]:
    target = {"http": prefill.removeprefix("http://"), "bootstrap": "127.0.0.1:9"}
    tables = {"prefill": [target], "decode": [{"http": decode.removeprefix("http://")}]}
    router = make_router(RouterConfig.model_validate(tables), KEY, clocks=Clocks(wall=lambda: WALL))
    server = make_server(router)
    async with router.lifetime():
        listening = listen("127.0.0.1", 0)
        await server.start(listening)
        try:
            async with asyncio.timeout(10):
                while not router.fleet.is_ready:
                    await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            await server.close(0.1)
