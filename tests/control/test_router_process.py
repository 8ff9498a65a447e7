"""The router as a process: what it listens on, its ready line, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import aiohttp
import pytest

from pdrt.config import RouterConfig
from pdrt.control.listen import listen
from pdrt.control.router import serve
from pdrt.errors import ConfigError
from tests.control.fake_leader import FakeLeader, after, good
from tests.control.router_rig import KEY, until


def test_a_taken_port_is_a_start_up_error_that_names_it() -> None:
    """CASES 103."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_a_foreign_address_is_a_start_up_error_that_names_it(host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host} is not an address of this host"):
        listen(host, 0)


def test_a_name_that_is_none_is_a_start_up_error() -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


def test_port_0_publishes_the_real_port() -> None:
    with listen("127.0.0.1", 0) as found:
        assert found.getsockname()[1] > 0


def test_ipv6_works_where_an_address_is_taken() -> None:
    if not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    with listen("::1", 0) as found:
        assert found.getsockname()[0] == "::1"


def _config(leader: FakeLeader) -> RouterConfig:
    return RouterConfig.model_validate(
        {
            "hybrid": [leader.target],
            "ports": {"router": 0, "admin": 0},
            "security": {"key": KEY.secret.decode()},
        }
    )


async def test_sigterm_drains_and_ends_with_0() -> None:
    leader, lines, gate = FakeLeader("hybrid", KEY), list[str](), asyncio.Event()
    await leader.start()
    leader.plays.append(after(gate, good({"output": "x"})))
    serving = asyncio.create_task(serve(_config(leader), lines.append))
    await until(lambda: bool(lines))
    url = lines[0].rpartition(" ")[2]
    async with aiohttp.ClientSession() as session:

        async def ask(path: str) -> int:
            async with session.post(url + path, json={"prompt": "hi"}) as answer:
                await answer.read()
                return answer.status

        async def is_ready() -> bool:
            async with session.get(url + "/ready") as answer:
                return answer.status == 200

        while not await is_ready():
            await asyncio.sleep(0)
        running = asyncio.create_task(ask("/generate"))
        await leader.nth(1)
        os.kill(os.getpid(), signal.SIGTERM)
        while await is_ready():
            await asyncio.sleep(0)
        assert await ask("/generate") == 503
        assert not serving.done()
        gate.set()
        assert await running == 200
        assert await serving == 0
    await leader.stop()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


async def test_a_second_signal_cuts_what_runs_with_a_typed_error() -> None:
    leader, lines = FakeLeader("hybrid", KEY), list[str]()
    await leader.start()
    leader.plays.append(after(asyncio.Event(), good({})))
    serving = asyncio.create_task(serve(_config(leader), lines.append))
    await until(lambda: bool(lines))
    url = lines[0].rpartition(" ")[2]
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url + "/ready") as answer:
                if answer.status == 200:
                    break

        async def ask() -> str:
            async with session.post(url + "/generate", json={"prompt": "hi"}) as answer:
                code: str = (await answer.json())["error"]["code"]
                return code

        hanging = asyncio.create_task(ask())
        await leader.nth(1)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)
        assert await hanging == "draining"
        assert await serving == 0
    await leader.stop()
