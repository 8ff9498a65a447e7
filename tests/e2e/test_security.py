"""Strangers at every socket change nothing; members that send junk are counted and dropped."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
import zmq.asyncio

from pdrt.keys import ClusterKey
from tests.e2e.cluster import KEY, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


CRATER = Path(tempfile.gettempdir()) / "pdrt-test-bomb-went-off"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(CRATER),)


def is_whole() -> bool:
    return not CRATER.exists()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("security"))
    cluster.start()
    yield cluster
    cluster.stop()


def junk() -> list[bytes]:
    rng = random.Random(3)
    return [
        pickle.dumps(Bomb()),
        b"\x80\x04\x95",
        b"",
        b"\xc1" * 100,
        b"\xdd\xff\xff\xff\xff" * 50,  # msgpack: arrays of four billion
        b"\x91" * 5000,  # msgpack: five thousand arrays deep
        b"GET / HTTP/1.1\r\n\r\n",
        *(rng.randbytes(rng.randrange(1, 2000)) for _ in range(50)),
    ]


async def rank_endpoint(cluster: Cluster) -> str:
    host = urlsplit(cluster.nodes["prefill0"].url).hostname
    status, route = await cluster.get(f"http://{host}:18800/bootstrap/route")
    assert status == 200
    rank = route["ranks"]["0,0,0"]
    return f"{rank['rank_ip']}:{rank['rank_port']}"


async def serves(cluster: Cluster) -> None:
    answer = await cluster.generate("all is well", sampling={"max_tokens": 4})
    assert len(answer.ids) == 4
    await cluster.until_baseline()
    assert is_whole()


async def test_raw_bytes_at_every_tcp_socket_change_nothing(cluster: Cluster) -> None:
    prefill = urlsplit(cluster.nodes["prefill0"].url).hostname
    addresses = [urlsplit(p.url).netloc for p in cluster.processes]
    addresses += [f"{prefill}:18800", await rank_endpoint(cluster)]
    for address in addresses:
        host, _, port = address.partition(":")
        for frame in junk():
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(frame)
            try:
                await writer.drain()
                writer.close()
                await writer.wait_closed()
            except OSError:
                continue  # it hung up on us, as it may
    await serves(cluster)


@pytest.mark.parametrize("key", [None, ClusterKey.fresh(), KEY], ids=["plain", "foreign", "ours"])
async def test_junk_in_zmq_frames_is_dropped(cluster: Cluster, key: ClusterKey | None) -> None:
    """Without our CURVE key nothing is even read; with it, what is no message is counted."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    if key is not None:
        public, secret = key.curve_pair()
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
            public,
            secret,
            public,
        )
    before = await dropped(cluster)
    socket.connect(f"tcp://{await rank_endpoint(cluster)}")
    for frame in junk():
        try:
            async with asyncio.timeout(0.2):
                await socket.send(frame)
        except TimeoutError:
            assert key is not KEY, "our own key must get through"
            break
    if key is KEY:
        await cluster.until(lambda: has_dropped(cluster, before + len(junk())), "it is counted")
    await serves(cluster)
    socket.close()
    context.term()
    if key is not KEY:
        assert await dropped(cluster) == before


async def dropped(cluster: Cluster) -> float:
    assert cluster.http is not None
    async with cluster.http.get(f"{cluster.nodes['prefill0'].url}/metrics") as response:
        lines = (await response.text()).splitlines()
    wanted = 'pdrt_events_total{event="dropped_bad_message"'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))


async def has_dropped(cluster: Cluster, count: float) -> bool:
    return await dropped(cluster) >= count


async def test_nobody_without_the_token_reaches_a_leader_or_the_bootstrap_server(
    cluster: Cluster,
) -> None:
    """CASES 107."""
    assert cluster.http is not None
    prefill, decode = cluster.nodes["prefill0"].url, cluster.nodes["decode0"].url
    bootstrap = f"http://{urlsplit(prefill).hostname}:18800/bootstrap"
    calls = [
        ("PUT", f"{bootstrap}/register_rank"),
        ("GET", f"{bootstrap}/route"),
        ("POST", f"{bootstrap}/register_dp_rank"),
        ("POST", f"{bootstrap}/query_dp_ranks"),
        ("GET", f"{bootstrap}/health"),
        ("POST", f"{decode}/generate"),
        ("POST", f"{prefill}/generate"),
        ("POST", f"{decode}/internal/rebind"),
        ("POST", f"{prefill}/internal/prefill"),
        ("GET", f"{decode}/internal/status"),
        ("POST", f"{decode}/admin/drain"),
        ("POST", f"{cluster.admin_url}/admin/drain"),
        ("GET", f"{cluster.admin_url}/admin/members"),
        ("POST", f"{cluster.admin_url}/internal/register"),
    ]
    tokens = ["", "Bearer ", f"Bearer {'0' * 64}", "Basic eDp5", "Bearer \xff\xfe"]
    for method, url in calls:
        for token in tokens:
            headers = {"authorization": token} if token else {}
            async with cluster.http.request(method, url, json={}, headers=headers) as response:
                assert response.status == 401, (method, url, token, await response.text())
                assert (await response.json())["error"]["code"] == "unauthorized"
    await serves(cluster)


async def test_a_client_cannot_name_an_address_to_connect_to(cluster: Cluster) -> None:
    answer = await cluster.post(
        "/generate", {"prompt": "x", "bootstrap_host": "127.0.0.1", "bootstrap_port": 9}
    )
    assert answer.status == 400
    assert "bootstrap_host" in answer.body["error"]["message"]
    await serves(cluster)
