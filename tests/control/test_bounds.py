"""What a client may send at most: each bound has its own answer, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pdrt.config import PolicySection, TimeoutsSection
from pdrt.control.http import MAX_KEYS
from pdrt.control.schema import MAX_STOP_CHARS, MAX_STOPS
from pdrt.control.wire.connection import HIGH_WATER, MAX_HEADERS, READ_S
from pdrt.security import SecuritySection
from tests.control.router_rig import Rig, rig, until

DOCS = Path(__file__).parents[2] / "docs/operations.md"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"prompt": "x", "sampling_params": {"n": 129}}, 400, "n"),
        ({"prompt": "x", "sampling_params": {"stop": ["s"] * (MAX_STOPS + 1)}}, 400, "stop"),
        ({"prompt": "x", "sampling_params": {"stop": "s" * (MAX_STOP_CHARS + 1)}}, 400, "stop"),
        ({"prompt": "x", **{f"k{i}": 0 for i in range(MAX_KEYS)}}, 400, "keys"),
        ({"prompt": "x" * 5000}, 413, "4096"),
    ],
)
async def test_a_body_beyond_a_bound_is_refused_by_name(
    body: dict[str, object], status: int, named: str
) -> None:
    async with rig(security={"max_body_bytes": 4096 if status == 413 else 1 << 20}) as r:
        got = await r.send(body)
        assert (got.status, named in got.error["message"]) == (status, True)
        assert not r.prefill[0].seen
        assert not r.decode[0].seen
        await r.at_rest()
        assert (await r.send()).status == 200


@pytest.mark.parametrize(
    "headers",
    [{"x-long": "v" * 3000}, {f"x-{i}": "v" for i in range(MAX_HEADERS + 1)}],
)
async def test_a_head_beyond_a_bound_is_431(headers: dict[str, str]) -> None:
    async with rig(security={"max_header_bytes": 2048 if len(headers) == 1 else 1 << 20}) as r:
        got = await r.send(headers=headers)
        assert (got.status, got.error["code"]) == (431, "head_too_large")
        await r.at_rest()


async def test_an_address_has_so_many_connections_and_a_place_again_when_one_ends() -> None:
    async with rig(security={"max_connections": 3}) as r, asyncio.timeout(10):
        open_ = [await _connect(r) for _ in range(3)]
        reader, writer = await _connect(r)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"]["code"] == "overloaded"
        writer.close()
        open_[0][1].close()
        await until(lambda: len(r.server.all) == 2)
        again = await _connect(r)
        again[1].write(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await again[0].readline()).split()[1] == b"200"
        for _, writer in (*open_, again):
            writer.close()
        await until(lambda: not r.server.all)


async def _connect(r: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = r.url.removeprefix("http://").split(":")
    before = len(r.server.all)
    streams = await asyncio.open_connection(host, int(port))
    await until(lambda: len(r.server.all) != before)
    return streams


def test_the_docs_name_each_bound_as_it_is() -> None:
    text = DOCS.read_text().partition("## Limits")[2].partition("## Errors")[0]
    security = SecuritySection()
    assert f"`[security] max_header_bytes`, {security.max_header_bytes >> 10} KiB" in text
    assert f"{MAX_HEADERS} headers" in text
    assert f"`[security] max_body_bytes`, {security.max_body_bytes >> 20} MiB" in text
    assert f"`[security] max_connections`, {security.max_connections}" in text
    assert f"`[policy] max_in_flight`, {PolicySection().max_in_flight}" in text
    assert f"`[timeouts] slow_reader_s`, {TimeoutsSection().slow_reader_s:g} s" in text
    assert f"{HIGH_WATER >> 10} KiB of buffer" in text
    assert f"{MAX_STOPS} of {MAX_STOP_CHARS} characters" in text
    assert f"| {READ_S:g} s |" in text
    assert f"| {MAX_KEYS} |" in text
