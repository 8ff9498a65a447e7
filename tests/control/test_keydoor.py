"""The door of routers and hybrid leaders: who is let in, how much, and keys that change."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdrt.config import SecuritySection
from pdrt.control.apikeys import KeyRecord, hash_of
from pdrt.control.keydoor import KeyDoor
from pdrt.control.keyfile import change_keys
from pdrt.control.reload import Reload, watch
from pdrt.errors import ConfigError
from tests.control.fake_leader import after, good
from tests.control.leader_rig import BEARER, out, rigged
from tests.control.router_rig import rig, until


def put(path: Path, **keys: dict[str, int]) -> str:
    """Keys named like themselves, with limits."""
    records = [KeyRecord(name=n, sha256=hash_of(n), **limits) for n, limits in keys.items()]
    change_keys(path, lambda _old: records)
    return str(path)


def by(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_only_named_keys_are_let_in_and_each_is_counted(tmp_path: Path) -> None:
    file = put(tmp_path / "k.toml", alice={}, bob={"rpm": 1})
    async with rig(security={"api_keys_file": file, "api_keys": ["plain"]}) as r:
        refused = await r.send(headers=by("mallory"))
        assert (refused.status, refused.error["code"]) == (401, "unauthorized")
        assert refused.error["type"] == "authentication_error"
        for name in ("alice", "bob", "plain"):
            assert (await r.send(headers=by(name))).status == 200
        limited = await r.send(headers=by("bob"))
        assert (limited.status, limited.headers["retry-after"]) == (429, "60")
        assert limited.error["type"] == "rate_limit_error"
        r.time.now += 60
        assert (await r.send(headers=by("bob"))).status == 200
        told = (await r.get("/metrics")).body.decode()
        assert 'pdrt_key_requests_total{key="bob",outcome="admitted"} 2.0' in told
        assert 'pdrt_key_requests_total{key="bob",outcome="limited"} 1.0' in told
        assert 'key="api_keys-1"' in told
        await r.at_rest()


async def test_a_list_of_models_needs_a_key_and_counts_for_no_limit(tmp_path: Path) -> None:
    file = put(tmp_path / "k.toml", bob={"rpm": 1})
    async with rig(security={"api_keys_file": file}) as r:
        assert (await r.get("/v1/models")).status == 401
        for _ in range(3):
            assert (await r.get("/v1/models", by("bob"))).status == 200
        assert (await r.get("/health")).status == 200


async def test_a_request_is_held_for_its_key_until_it_ends(tmp_path: Path) -> None:
    file, gate = put(tmp_path / "k.toml", bob={"concurrent": 1}, alice={}), asyncio.Event()
    async with rig(security={"api_keys_file": file}) as r:
        r.decode[0].plays.append(after(gate, good({"output": "x"})))
        first = r.sending(headers=by("bob"))
        await r.decode[0].nth(1)
        second = await r.send(headers=by("bob"))
        assert (second.status, second.headers["retry-after"]) == (429, "1")
        assert (await r.send(headers=by("alice"))).status == 200
        gate.set()
        assert (await first).status == 200
        assert (await r.send(headers=by("bob"))).status == 200
        left = r.sending(headers=by("bob"))  # a client that leaves gives its place back
        r.decode[0].plays.append(after(asyncio.Event(), good({})))
        await r.decode[0].nth(4)
        left.cancel()
        await r.at_rest()
        assert (await r.send(headers=by("bob"))).status == 200


async def test_tokens_are_those_of_the_prompt_and_the_most_that_may_follow(tmp_path: Path) -> None:
    file = put(tmp_path / "k.toml", bob={"tokens_per_minute": 100})
    async with rig(security={"api_keys_file": file}) as r:
        ask = {"prompt": "x" * 40, "sampling_params": {"max_tokens": 30, "n": 2}}
        assert (await r.send(ask, headers=by("bob"))).status == 200
        limited = await r.send(ask, headers=by("bob"))
        assert (limited.status, limited.headers["retry-after"]) == (429, "24")
        ask["sampling_params"] = {"max_tokens": 200}
        never = await r.send(ask, headers=by("bob"))
        assert never.status == 400
        assert "max_tokens" in never.error["message"]
        r.time.now += 24
        ask["sampling_params"] = {"max_tokens": 30, "n": 2}
        assert (await r.send(ask, headers=by("bob"))).status == 200


async def test_the_body_of_a_refused_request_is_not_waited_for(tmp_path: Path) -> None:
    file = put(tmp_path / "k.toml", bob={})
    async with rig(security={"api_keys_file": file}) as r:
        host, port = r.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readline()).split()[1] == b"401"
        writer.close()


async def test_a_key_that_is_removed_while_a_body_comes_lets_nobody_in(tmp_path: Path) -> None:
    path, body = tmp_path / "k.toml", b'{"prompt": "hi"}'
    async with rig(security={"api_keys_file": put(path, bob={}, alice={})}) as r:
        host, port = r.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /generate HTTP/1.1\r\nhost: h\r\nauthorization: Bearer bob\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:5])
        await until(lambda: r.router.admitted == 1)
        put(path, alice={})
        await r.router.keydoor.reloads[0].look()
        writer.write(body[5:])
        async with asyncio.timeout(5):
            assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        assert not r.decode[0].seen
        await r.at_rest()


async def test_a_hybrid_leader_holds_clients_to_their_limits_and_members_to_none(
    tmp_path: Path,
) -> None:
    file = put(tmp_path / "k.toml", bob={"rpm": 1})
    async with rigged() as r:
        security, registry = SecuritySection(api_keys_file=file), CollectorRegistry()
        r.leader.keydoor = KeyDoor(security, registry, lambda: 0.0, (), {"/generate"})
        r.worker.script = [out("x", "length")]
        ask = {"prompt": "a"}
        assert (await r.post("/generate", ask)).status == 401
        assert (await r.post("/generate", ask, headers=by("bob"))).status == 200
        assert (await r.post("/generate", ask, headers=by("bob"))).status == 429
        for _ in range(3):
            assert (await r.post("/generate", ask, headers=BEARER)).status == 200


# Changes while it runs.


async def test_a_changed_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    registry = CollectorRegistry()
    door = KeyDoor(
        SecuritySection(api_keys_file=put(path, bob={})), registry, lambda: 0.0, (), {"/generate"}
    )
    with door.held("Bearer bob", 1) as name:
        assert name == "bob"
    (reload,) = door.reloads
    path.write_text("not = [toml")
    await reload.look()
    assert door.refusal("POST", "/generate", "Bearer bob") is None
    path.unlink()
    os.mkfifo(path)
    await reload.look()
    assert door.refusal("POST", "/generate", "Bearer bob") is None
    path.unlink()
    put(path, alice={})
    await reload.look()
    assert door.refusal("POST", "/generate", "Bearer alice") is None
    assert door.refusal("POST", "/generate", "Bearer bob") is not None
    assert b'key="bob"' not in generate_latest(registry)


async def test_files_are_looked_at_on_a_timer_and_at_once_on_sighup(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("0")
    said, news = list[str](), asyncio.Event()

    def use(text: str) -> None:
        said.append(text)
        news.set()

    reload = Reload("a file", [path], path.read_text, use)
    reload.start()
    watching = asyncio.create_task(watch([reload], every_s=0.01))
    news.clear()
    path.write_text("changed")
    async with asyncio.timeout(10):
        await news.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    watching = asyncio.create_task(watch([reload], every_s=3600))
    await asyncio.sleep(0)
    news.clear()
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(10):
        await news.wait()
    watching.cancel()
    assert said == ["0", "changed", "changed"]


def test_a_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    security = SecuritySection(api_keys_file=str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml"):
        KeyDoor(security, CollectorRegistry(), lambda: 0.0, (), ())
