"""`pdrt bench router`: figures, ratios, what /proc tells, and a run against real processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdrt.bench import backends, router_peers
from pdrt.bench.backend import Backend, Play
from pdrt.bench.processes import cpu_s, listeners, memory_mb, with_children
from pdrt.bench.router import Asked, Given, Routed, path_of, turns_of, widths_of
from pdrt.bench.router_load import Counted, Load, request
from pdrt.bench.router_table import Cell, Found, Turn, p50, points, show
from pdrt.cli import app
from pdrt.errors import ConfigError

JSON, STREAM = Cell("json", 16), Cell("stream", 64)


def turn(cpu: float, p50_us: float = 100.0, errors: int = 0) -> Turn:
    return Turn(
        requests_per_s=10.0,
        chunks_per_s=0.0,
        errors=errors,
        cpu=cpu,
        memory_mb=20.0,
        client_share=0.1,
        p50_us=p50_us,
        p99_us=9 * p50_us,
    )


def found(**cpus: list[float]) -> Found:
    told = Found()
    for name, rounds in cpus.items():
        for cpu in rounds:
            told.add(JSON, name, turn(cpu, p50_us=100 * cpu))
    return told


# Figures.


def test_a_ratio_is_of_the_better_peer_in_the_same_round() -> None:
    told = found(pdrt=[1.0, 2.0, 3.0], a=[2.0, 8.0, 1.0], b=[4.0, 2.0, 9.0])
    assert told.of_better(JSON, "pdrt", ["a", "b"]) == 0.5  # a's 0.5, 0.25 and 3
    assert told.of_better(JSON, "pdrt", []) is None
    assert found(pdrt=[1.0], a=[0.0]).of_better(JSON, "pdrt", ["a"]) is None


def test_what_is_gained_is_above_direct_in_the_same_round() -> None:
    told = found(pdrt=[2.0, 3.0, 9.0], direct=[1.0, 1.0, 1.0])
    assert told.gained(JSON, "pdrt", "direct", p50) == pytest.approx(200)


def test_processor_time_is_told_a_request_or_a_thousand_chunks() -> None:
    counted = Counted(2.0, 500, 0, 4000, 0.5, [1.0, 2.0, 3.0], [7.0, 8.0])
    whole = Turn.of(counted, "json", 0.1, 30.0)
    assert whole.cpu == pytest.approx(0.2)
    assert (whole.requests_per_s, whole.p50_us) == (250, 2.0)
    stream = Turn.of(counted, "stream", 0.1, 30.0)
    assert stream.cpu == pytest.approx(0.025)
    assert (stream.chunks_per_s, stream.client_share) == (2000, 0.25)
    assert Turn.of(Counted(1.0), "json", 0.1, 0.0).cpu == 100


def test_all_take_their_turn_under_each_load_and_who_is_first_rotates() -> None:
    asked = Asked(conc=[1], streams=[64], rounds=2)
    routers = [Routed(name, "h", 1) for name in "abc"]
    told = [(number, str(cell), each.name) for number, cell, each in turns_of(asked, routers)]
    assert [name for _, _, name in told] == list("abcabcbcabca")
    assert [cell for _, cell, _ in told[:6]] == ["json c=1"] * 3 + ["64 streams"] * 3


def test_a_thousand_streams_are_slower_ones() -> None:
    assert Cell("stream", 1000).every_s == 10 * Cell("stream", 64).every_s


@pytest.mark.parametrize("text", ["a", "0", "-1", "1,2,20000"])
def test_numbers_of_requests_are_checked(text: str) -> None:
    assert widths_of("1, 16", "--conc") == [1, 16]
    with pytest.raises(ConfigError, match="--conc"):
        widths_of(text, "--conc")


def test_backends_that_run_are_named_by_their_ports() -> None:
    told = Given.parse("1/2,3")
    assert (told.prefill, told.decode) == ([1], [2, 3])
    for wrong in ("1", "1/", "a/2"):
        with pytest.raises(ConfigError, match="--backends"):
            Given.parse(wrong)


def test_both_dialects_are_asked() -> None:
    assert b"POST /generate" in request("h", 1, "m", "json", path_of("/generate"))
    assert b'"prompt"' in request("h", 1, "m", "json", path_of("/v1/completions"))
    with pytest.raises(ConfigError, match="--path"):
        path_of("/v1/chat")


def test_tables_and_points_have_all(tmp_path: Path) -> None:
    told = found(direct=[1.0, 1.0], pdrt=[2.0, 2.0], other=[4.0, 4.0])
    with (tmp_path / "out").open("w") as out:
        show(Console(file=out, width=120), told, "direct")
    text = (tmp_path / "out").read_text()
    assert "json c=16" in text
    assert "0.50" in text
    point = next(each for each in points(told, "direct") if each["router"] == "pdrt")
    assert point["cpu_of_better"] == 0.5
    assert point["gained_p50_us"] == 100


# What processes use.


def test_the_process_that_listens_is_found_and_so_are_its_children() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert listeners(listening.getsockname()[1]) == {os.getpid()}
    assert listeners(1) == set()
    assert os.getpid() in with_children([os.getppid()])
    assert with_children([os.getpid()]) >= {os.getpid()}


def test_processor_time_and_memory_are_read() -> None:
    before = cpu_s([os.getpid()])
    while cpu_s([os.getpid()]) < before + 0.02:
        sum(range(10_000))
    assert len({cpu_s([os.getpid()]) for _ in range(100)}) > 50, "ticks are too coarse"
    assert memory_mb([os.getpid()]) > 1
    assert cpu_s([1 << 22]) == memory_mb([1 << 22]) == 0


# Load and backends.


async def test_json_and_streams_are_counted_and_timed() -> None:
    backend = Backend("decode", Play(chunks=3, every_s=0.001), is_recording=False)
    await backend.listen()
    marks = list[str]()
    try:
        for kind, width in (("json", 4), ("stream", 8)):
            told = request("127.0.0.1", backend.port, "m", kind)  # type: ignore[arg-type]
            load = Load("127.0.0.1", backend.port, told, kind, width)  # type: ignore[arg-type]
            counted = await load.run(0.05, 0.3, marks.append)
            assert counted.errors == 0
            assert counted.requests > 10
            assert min(counted.latencies_us) > 0
            assert len(counted.delays_us) == counted.chunks
            assert (counted.chunks > counted.requests) == (kind == "stream")
        while backend.connections:
            await asyncio.sleep(0)
    finally:
        backend.refuse()
    assert marks == ["begin", "end"] * 2


async def test_refusals_and_lost_connections_are_errors() -> None:
    backend = Backend("decode", Play(status=500), is_recording=False)
    await backend.listen()
    told = request("127.0.0.1", backend.port, "m", "json")
    assert (await Load("127.0.0.1", backend.port, told, "json", 2).run(0, 0.1, print)).errors > 1
    backend.usual = Play(begin="reset")
    assert (await Load("127.0.0.1", backend.port, told, "json", 2).run(0, 0.1, print)).errors > 1
    backend.refuse()
    assert (await Load("127.0.0.1", backend.port, told, "json", 2).run(0, 0.1, print)).errors > 1


async def test_the_backends_process_serves_and_changes_and_ends() -> None:
    async with backends.running((0,), (0, 0), {0}) as behind:
        assert len({*behind.prefill, *behind.decode}) == 3
        await behind.stream(2, 0.0)
        told = request("127.0.0.1", behind.decode[0], "m", "stream")
        counted = await Load("127.0.0.1", behind.decode[0], told, "stream", 1).run(0, 0.2, print)
        assert counted.errors == 0
        assert counted.chunks >= counted.requests > 0
    assert behind.process.returncode == 0


# Peers.


async def test_an_interpreter_without_peers_is_refused_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install sglang-router"):
        await router_peers.installed(sys.executable)
    with pytest.raises(ConfigError, match="No such file"):
        await router_peers.installed("/nowhere/python")


def test_a_peer_is_told_all_backends() -> None:
    sglang, vllm = (
        router_peers.program(name, "/v/bin/python", [31001], [31011, 31012])
        for name in ("sglang-router", "vllm-router")
    )
    for port in (31001, 31011, 31012):
        assert f"http://127.0.0.1:{port}" in set(sglang.arguments) & set(vllm.arguments)
    assert vllm.arguments[0] == "/v/bin/vllm-router"


# The command.


@pytest.mark.parametrize("url", ["x", "a=ftp://b:1", "a=http://127.0.0.1:1"])
def test_a_router_that_cannot_be_measured_is_refused(url: str) -> None:
    ran = CliRunner().invoke(app, ["bench", "router", "--quick", "--quiet", "--url", url])
    assert isinstance(ran.exception, ConfigError), ran.output


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_quick_run_measures_the_router(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--conc", "4", "--streams", "8", "--quick", "--json", str(file)]
    ran = CliRunner().invoke(app, ["bench", "router", *options])
    assert ran.exit_code == 0, ran.output
    told = json.loads(file.read_text())
    assert [(each["router"], each["width"]) for each in told] == [
        ("direct", 4),
        ("pdrt", 4),
        ("direct", 8),
        ("pdrt", 8),
    ]
    for each in told:
        if each["router"] == "pdrt":
            assert each["cpu_s_per_1000"] > 0
            assert each["memory_mb"] > 5
            assert each["errors"] == 0
