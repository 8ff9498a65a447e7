"""`pdrt bench interference`: its load, its layouts, what it concludes, and a short real run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from pdrt import config
from pdrt.bench.bound import bound
from pdrt.bench.heard import Piece, Record
from pdrt.bench.interference import (
    APART,
    Asked,
    Found,
    chunks_of,
    cores_of,
    interference,
    points,
    show,
    verdict,
)
from pdrt.bench.interference import hybrid as in_chunks
from pdrt.bench.layouts import Ground, placed
from pdrt.bench.load import Server, client
from pdrt.bench.shell import Report
from pdrt.bench.traffic import MOST_AT_ONCE, Clients, Pace, Seen, Traffic, meet
from pdrt.config import NodeConfig
from pdrt.errors import ConfigError, Unavailable
from pdrt.up.layout import Wanted

TRAFFIC = Traffic(
    vocab=250,
    streams=2,
    stream_input=4,
    stream_output=6,
    prompt_input=32,
    prompt_output=2,
    seconds=0.2,
)


def asked(traffic: Traffic = TRAFFIC, **more: Any) -> Asked:
    return Asked(traffic=traffic, **{"chunks": [8, 16], **more})


def ground(environ: dict[str, str] | None = None) -> Ground:
    defaults = config.load(NodeConfig, None, {}, {"model": {"path": "null"}})
    cores = sorted(os.sched_getaffinity(0)) * 2
    return Ground(Wanted(model="null", kv_memory=1 << 22), defaults, environ or {}, cores[:2])


def seen(*gaps_ms: float, ttft: float = 1.0, missed: int = 0) -> Seen:
    gaps = [gap / 1000 for gap in gaps_ms]
    return Seen(gaps, [0.1], [ttft], missed=missed, seconds=1.0, client_s=0.1)


# The load.


@dataclass(slots=True)
class Generating:
    """Speaks pdrt's dialect: as many ids as asked for, or an error."""

    prompts: list[tuple[int, int]] = field(default_factory=list)  # tokens in and out
    status: int = 200
    slow_s: float = 0.0  # long prompts
    at_once: int = 0
    most_at_once: int = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        most = body["sampling_params"]["max_tokens"]
        self.prompts.append((len(body["prompt"]), most))
        if self.status != 200:
            return web.json_response({"error": {"code": "x", "message": "no"}}, status=self.status)
        if len(body["prompt"]) == TRAFFIC.prompt_input:
            await self._compute()
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(1, most + 1):
            finish = "length" if number == most else None
            told = {"output": "", "output_ids": [7], "finish_reason": finish}
            await response.write(b"data: " + json.dumps(told).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _compute(self) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.slow_s)
        self.at_once -= 1


@asynccontextmanager
async def serving(generating: Generating) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/generate", generating.generate)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


async def test_streams_go_on_while_prompts_come_at_even_intervals() -> None:
    generating, stages = Generating(), list[str]()
    async with serving(generating) as url:
        met = await meet(url, TRAFFIC, Random(1), Pace(0.05), stages.append)
    found = met.seen
    prompts = [shape for shape in generating.prompts if shape == (32, 2)]
    assert len(prompts) == 1 + 4  # one warms up, then one every 0.05 s of 0.2 s
    assert (len(found.prompt_ttft_s), found.missed, met.every_s) == (4, 0, 0.05)
    assert found.gaps_s
    assert found.stream_ttft_s
    assert found.seconds >= 0.2
    assert not found.failures
    streams = [answer for tokens, answer in generating.prompts if tokens == 4]
    assert sorted(streams)[:2] == [3, 6]  # the first answers do not end together
    assert set(streams) == {3, 6}
    assert stages == ["warming up", "a prompt every 0.05 s"]


async def test_without_an_interval_it_is_made_from_a_prompt_alone() -> None:
    generating, stages = Generating(), list[str]()
    async with serving(generating) as url:
        met = await meet(url, TRAFFIC, Random(1), Pace(share=0.001), stages.append)
    assert met.every_s > 0.2  # a thousand times what a prompt took
    assert generating.prompts[:4] == [(32, 2)] * 4
    assert stages[1] == "a prompt alone"
    assert len(met.seen.prompt_ttft_s) == 1


async def test_prompts_that_cannot_be_served_as_often_are_missed_and_not_heaped_up() -> None:
    generating = Generating(slow_s=0.3)
    async with serving(generating) as url:
        met = await meet(url, TRAFFIC, Random(1), Pace(0.02), print)
    assert generating.most_at_once == MOST_AT_ONCE
    assert met.seen.missed >= 1
    assert met.seen.missed + len(met.seen.prompt_ttft_s) == 10


async def test_a_cluster_that_does_not_answer_is_an_error_and_no_figure() -> None:
    generating = Generating(status=503)
    async with serving(generating) as url:
        with pytest.raises(Unavailable, match="x: no"):
            await meet(url, TRAFFIC, Random(1), Pace(0.05), print)
        async with client(5.0) as session:
            server = Server("pdrt", url, form="generate")
            clients = Clients(session, server, TRAFFIC, Random(1), time.perf_counter)
            with pytest.raises(ExceptionGroup) as caught:
                await clients.meet(0.05)
    assert "did not begin" in str(caught.value.exceptions[0])


def test_gaps_count_that_end_within_the_time_that_is_measured() -> None:
    def line(finish: str | None) -> bytes:
        told = {"output": "", "output_ids": [7], "finish_reason": finish}
        return b"data: " + json.dumps(told).encode() + b"\n\n"

    times = (1.0, 2.0, 4.0, 7.0, 11.0)
    pieces = [Piece(at, line("length" if at == 11.0 else None)) for at in times]
    found = Seen()
    found.add_stream(Record(0.5, 11.0, pieces), 3.0, 8.0)
    assert (found.gaps_s, found.stream_ttft_s) == ([2.0, 3.0], [])  # it was asked before
    found.add_stream(Record(0.5, 0.0, pieces[:2]), 0.5, 8.0)
    assert (found.gaps_s, found.stream_ttft_s) == ([2.0, 3.0, 1.0], [0.5])
    found.add_stream(Record(0.5, 3.0, pieces[:2]), 0.5, 8.0)
    assert dict(found.failures) == {"cut_off": 1}


def test_rounds_are_pooled() -> None:
    whole = Seen.pooled([seen(1, 2, missed=1), seen(3, ttft=2.0)])
    assert (whole.gaps_s, whole.prompt_ttft_s) == ([0.001, 0.002, 0.003], [1.0, 2.0])
    assert (whole.missed, whole.seconds, whole.stream_tok_per_s) == (1, 2.0, 1.5)


# Layouts.


def test_1p1d_has_a_core_each_and_hybrid_has_both(tmp_path: Path) -> None:
    place = ground()
    *apart, router = place.parts(APART, tmp_path)
    assert [(part.role, part.tables["device"]["threads"]) for part in apart] == [
        ("prefill", 1),
        ("decode", 1),
    ]
    assert [*placed([*apart, router], [4, 5]).values()] == [[4], [5], [4, 5]]
    hybrid, router = place.parts(in_chunks("chunk 64", 64), tmp_path)
    assert (hybrid.role, hybrid.tables["device"]["threads"]) == ("hybrid", 2)
    assert hybrid.tables["scheduler"]["max_prefill_tokens"] == 64
    assert placed([hybrid, router], [4, 5])[hybrid.name] == [4, 5]
    assert all(part.tables["scheduler"]["prefix_cache"] is False for part in (*apart, hybrid))
    assert "max_prefill_tokens" not in apart[0].tables["scheduler"]


def test_whole_prompts_fit_into_one_step() -> None:
    first, whole, *chunked = asked().layouts()
    assert first is APART  # it sets the interval
    assert whole.chunk == 32 + 2 * 4
    assert [layout.chunk for layout in chunked] == [8, 16]


def test_a_program_and_what_it_starts_stay_on_their_cores() -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os; print(*os.sched_getaffinity(0))"
    line = bound([core], [sys.executable, "-c", code])
    ran = subprocess.run(line, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(core)]


def test_two_cores_are_needed_and_no_more_are_used() -> None:
    assert cores_of([7, 3, 5]) == [3, 5]
    with pytest.raises(ConfigError, match="a core each"):
        cores_of([0])


@pytest.mark.parametrize("text", ["", "x", "0", "64,-1", "70000"])
def test_chunks_are_numbers_of_tokens(text: str) -> None:
    assert chunks_of("256, 64,64") == [64, 256]
    with pytest.raises(ConfigError, match="--chunks"):
        chunks_of(text)


# What follows.


def found(**more: list[Seen]) -> Found:
    """Ten times as bad without chunks, and twice as bad with the better chunk size."""
    first, whole, eight, sixteen = asked().layouts()
    return Found(
        2.5,
        {
            first: more.get("apart", [seen(5, 5, 5, 10, ttft=2.0), seen(5, 5, 5, 20, ttft=2.0)]),
            whole: more.get("whole", [seen(5, 5, 5, 100), seen(5, 5, 5, 200)]),
            eight: more.get("eight", [seen(5, 20), seen(5, 40)]),
            sixteen: more.get("sixteen", [seen(5, 30), seen(5, 60)]),
        },
    )


def test_it_says_how_much_better_and_what_it_costs() -> None:
    lines = verdict(found())
    assert lines == [
        "ITL p99 with 1P1D: 10.0 times better than hybrid without chunks",
        "and 2.0 times better than the best chunk, 8 tokens",
        "first token of the long prompts, p50: 2000 ms with 1P1D, 1000 ms with whole, the lowest",
    ]


def test_a_chunk_size_that_did_not_keep_up_is_not_the_best() -> None:
    result = found(eight=[seen(5, 20, missed=1), seen(5, 40)])
    assert result.best == in_chunks("chunk 16", 16)
    assert "chunk 8 did not keep up" in verdict(result)[-1]


def test_it_says_when_p99_cannot_see_the_prompts() -> None:
    rare = [seen(*[5] * 500, 900)] * 2
    assert any("less than 1 %" in line for line in verdict(found(whole=rare)))
    assert not any("less than 1 %" in line for line in verdict(found()))


def test_nothing_seen_is_said_and_not_compared() -> None:
    empty = [Seen(seconds=1.0)]
    result = found(apart=empty, whole=empty, eight=empty, sixteen=empty)
    assert result.best is None
    out = io.StringIO()
    show(Console(file=out, width=100), asked(), result)
    assert "none" in out.getvalue()


def test_points_have_a_layout_each() -> None:
    told = points(asked(rounds=2), found(sixteen=[Seen(failures=Counter(x=2), seconds=1.0)] * 2))
    assert [one["layout"] for one in told] == ["1P1D", "whole", "chunk 8", "chunk 16"]
    assert [one["itl_p99_of_1p1d"] for one in told] == [1.0, 10.0, 2.0, None]
    assert [one["is_best_chunk"] for one in told] == [False, False, True, False]
    assert (told[3]["errors"], told[3]["itl_ms"]) == (4, None)


@pytest.mark.e2e
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_short_run_with_real_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pdrt[plot]'")
    environ = {**os.environ, "PDRT_DEVICE_STEP_MS": "2", "PDRT_DEVICE_TOKEN_MS": "0.5"}
    traffic = Traffic(vocab=250, streams=2, prompt_input=128, seconds=1.0)
    wanted = Asked(traffic=traffic, chunks=(), pace=Pace(0.25))
    file, picture = tmp_path / "x.json", tmp_path / "x.png"
    report, out = Report(str(file), str(picture)), io.StringIO()
    assert interference(wanted, ground(environ), report, Console(file=out, width=120)) == 0
    told = json.loads(file.read_text())
    assert [one["layout"] for one in told] == ["1P1D", "whole"]
    assert all(one["prompts"] + one["missed"] == 4 and not one["errors"] for one in told)
    assert told[1]["itl_ms"]["max"] > 64  # a prompt without chunks takes as long
    assert picture.stat().st_size > 1000
    assert "ITL p99 with 1P1D" in out.getvalue()
    assert "a prompt every 0.25 s" in capfd.readouterr().err
