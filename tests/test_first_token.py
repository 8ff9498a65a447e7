"""What `pdrt bench first-token` measures: both paths in turn, and nothing but their own answers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from rich.console import Console

from pdrt.bench.first_token import Times, first_token_ms, measure, points, show, write
from pdrt.errors import Unavailable


class Endpoint:
    """Streams two chunks by the path it says; the first answers may be otherwise."""

    def __init__(self, path: str, log: list[str]) -> None:
        self.path, self.log = path, log
        self.first: list[tuple[int, str]] = []
        self.bodies: list[dict[str, object]] = []

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.log.append(self.path)
        self.bodies.append(json.loads(await request.text()))
        status, path = self.first.pop(0) if self.first else (200, self.path)
        response = web.StreamResponse(status=status, headers={"x-pd-path": path})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/generate", endpoint.generate)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


async def test_the_paths_take_turns_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    apart, together = Endpoint("disagg", log), Endpoint("local", log)
    ticks = count()
    async with serving(apart) as disagg, serving(together) as local:
        times = await measure(disagg, local, 4, lambda: next(ticks) / 10)
    assert log == ["disagg", *["disagg", "local"] * 9]  # one to settle, then 5 + 4 rounds
    assert [t.path for t in times] == ["disagg", "local"]
    for each in times:
        assert each.first_token_ms == pytest.approx([100] * 4)
    assert apart.bodies == [apart.bodies[0]] * 10
    assert together.bodies[0] == apart.bodies[0]


async def test_it_waits_until_the_pair_has_proved_itself() -> None:
    apart, together = Endpoint("disagg", []), Endpoint("local", [])
    apart.first = [(200, "fallback:no_pair"), (503, "disagg")]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    async with serving(apart) as disagg, serving(together) as local:
        await measure(disagg, local, 1, lambda: 0.0, sleep)
        assert len(slept) == 2
        apart.first = [(503, "disagg")] * 99
        seconds = count()
        with pytest.raises(Unavailable, match="503"):
            await measure(disagg, local, 1, lambda: float(next(seconds)), sleep)


@pytest.mark.parametrize("answer", [(200, "local"), (500, "disagg")])
async def test_an_answer_by_another_path_or_none_is_no_measurement(
    answer: tuple[int, str],
) -> None:
    endpoint = Endpoint("disagg", [])
    endpoint.first = [answer]
    async with serving(endpoint) as url, ClientSession() as session:
        with pytest.raises(Unavailable):
            await first_token_ms(session, url, "disagg", lambda: 0.0)


def test_results_are_medians_and_quantiles(tmp_path: Path) -> None:
    apart = Times("disagg", [float(n) for n in range(1, 101)])
    together = Times("local", [7.0])
    write(str(tmp_path / "out.json"), (apart, together))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == points((apart, together))
    assert found[0] == {
        "path": "disagg",
        "requests": 100,
        "ttft_ms": {"p50": 50.5, "p90": 91.0, "p99": 100.0},
    }
    assert found[1]["ttft_ms"] == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
    out = io.StringIO()
    show(Console(file=out, width=80), apart, together)
    assert "disaggregation adds 43.5 ms to the median first token" in out.getvalue()
