"""`pdrt top`: what it draws of a cluster, what it asks, and what it says when nobody answers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from rich.console import Console

from pdrt.errors import BadMessage, NotFound, PdrtError, Unauthorized, Unavailable
from pdrt.top.frame import NO_ERROR, NO_INSTANCE, NO_REQUEST, frame, room_for
from pdrt.top.shell import Asked, ask
from pdrt.top.view import read_view
from pdrt.top.words import bar, curve, milliseconds, number, span, speed
from tests.control.overview_samples import (
    Cluster,
    cluster,
    under_load,
    with_a_dead_one,
    with_errors,
)
from tests.control.router_rig import rig

ROOT = Path(__file__).parent.parent


def drawn(made: Cluster, width: int = 150, height: int = 40, trouble: str = "") -> str:
    view = read_view(made.view())
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    console.print(frame(view, "http://r:8000", room_for(view, width, height), trouble))
    return out.getvalue()


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name))


# Words.


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.125, "0.12"), (12.34, "12.3"), (1234, "1,234"), (12345, "12.3k"), (None, "-")],
)
def test_numbers_have_three_or_four_figures(value: float | None, text: str) -> None:
    assert number(value) == text


def test_numbers_of_any_size_are_short() -> None:
    assert [number(10.0**power) for power in (5, 6, 9)] == ["100k", "1.0M", "1.0G"]
    assert [milliseconds(ms) for ms in (0.5, 12.34, 250, 1500, 60000, None)] == [
        *("0.50 ms", "12.3 ms", "250 ms", "1.50 s", "60.0 s", "-"),
    ]
    assert [span(s) for s in (1.25, 59, 600, 7200, 900000)] == [
        *("1.2 s", "59 s", "10 min", "2.0 h", "10 days"),
    ]

    assert [speed(gb) for gb in (0, 2.5, 0.25, 0.0004, None)] == [
        *("0 GB/s", "2.50 GB/s", "250 MB/s", "400 kB/s", "-"),
    ]


def test_bars_and_curves_have_their_width_whatever_comes() -> None:
    assert bar(1, 4, 8) == "██░░░░░░  25%"
    assert bar(9, 4, 4) == "████ 100%"
    assert bar(1, 0, 4) == "░░░░   0%"
    assert curve([None, 0, 4, 8], 6) == "   ▁▅█"
    assert curve([], 3) == "   "
    assert len(curve([1.0] * 99, 30)) == 30


# Frames.


def test_a_frame_shows_instances_rates_requests_and_errors() -> None:
    text = drawn(with_errors())
    head = text.splitlines()[0]
    assert head.startswith("pdrt http://r:8000  ready  SmolLM2-135M-Instruct  7 of 4096 in flight")
    assert "● ready" in row(text, "decode 127.0.0.4:8003")
    assert "████░░░░░░  39%" in row(text, "decode 127.0.0.4:8003")
    assert "is loading" in row(text, "prefill 127.0.0.3:8002")
    assert "p99" in row(text, "TTFT p50")
    assert "p99" in row(text, "ITL p50")
    assert "1,001" in row(text, "tokens / s")
    assert "▰▰▰ decode" in row(text, "0002d2345c8c2bee72aee1db")
    assert "transfer_failed" in text
    assert "did not come within 10 s" in text


def test_who_is_not_well_comes_first_with_the_reason() -> None:
    text = drawn(with_a_dead_one())
    lines = text.splitlines()
    first = lines[next(n for n, line in enumerate(lines) if line.startswith("Instances")) + 2]
    assert first.startswith("prefill 127.0.0.3:8002  x down")
    assert "is dead" in first


def test_an_empty_cluster_says_what_to_do() -> None:
    text = drawn(Cluster())
    for words in (NO_INSTANCE, NO_REQUEST, NO_ERROR, "not ready: no healthy prefill instance"):
        assert words in text


@pytest.mark.parametrize("height", [15, 24, 50, 120])
@pytest.mark.parametrize("width", [60, 80, 132, 200])
def test_a_frame_fits_into_the_terminal(width: int, height: int) -> None:
    made = under_load(cluster(prefill=40, decode=40, hybrid=20), 30, 80)
    for _ in range(30):
        made.fail(PdrtError("x" * 400), 500, "r")
    lines = drawn(made, width, height).splitlines()
    assert len(lines) <= max(height, 22)
    assert all(len(line) <= width for line in lines)
    assert any("of 100" in line for line in lines)


def test_old_news_is_said_to_be_old() -> None:
    trouble = "this is 5 s old: no router answers"
    assert trouble in drawn(cluster(), trouble=trouble)


def test_nothing_in_the_data_speaks_to_the_terminal() -> None:
    view = with_errors().view()
    evil = "\x1b]0;owned\x07\x1b[2J[red]boo[/red]\r\n"
    view["instances"][0] |= {"name": evil, "reason": evil, "condition": evil}
    view["requests"][0] |= {"request_id": evil, "stage": evil, "decode": evil}
    view["errors"][0] |= {"message": evil, "code": evil, "stage": evil}
    view["models"] = [evil]
    view["router"]["reason"] = evil
    out = io.StringIO()
    told = read_view(view)
    Console(file=out, width=200, force_terminal=False).print(
        frame(told, "u", room_for(told, 200, 60))
    )
    assert not {c for c in out.getvalue() if not c.isprintable()} - {"\n"}
    assert "[red]boo[/red]" in out.getvalue()


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"version": 1}, {"version": 1, "router": {}, "instances": [{"name": 3}]}],
)
def test_what_is_no_overview_is_one_typed_error(body: object) -> None:
    with pytest.raises(BadMessage, match="no overview"):
        read_view(body)


def test_another_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(BadMessage, match=r"version 2.*reads 1"):
        read_view({**cluster().view(), "version": 2})


# Asking.


@asynccontextmanager
async def serving(play: Callable[[web.Request], web.Response]) -> AsyncIterator[str]:
    async def serve(request: web.Request) -> web.Response:
        return play(request)

    app = web.Application()
    app.router.add_get("/{tail:.*}", serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (lambda _: web.Response(status=401), Unauthorized, "--api-key KEY, or PDRT_API_KEY"),
        (lambda _: web.Response(status=404), NotFound, "no pdrt router"),
        (lambda _: web.Response(text="<html>"), BadMessage, "no JSON"),
        (lambda _: web.Response(text="[" * 100000), BadMessage, "no JSON"),
        (lambda _: web.Response(status=500, text="oh"), PdrtError, "answered 500: oh"),
        (lambda _: web.Response(status=302, headers={"location": "/x"}), PdrtError, "302"),
    ],
)
async def test_each_wrong_answer_is_an_error_that_says_what_to_do(
    answer: Callable[[web.Request], web.Response], kind: type[PdrtError], says: str
) -> None:
    async with serving(answer) as url, ClientSession() as session:
        with pytest.raises(kind, match=says):
            await ask(session, url)


async def test_nobody_there_is_said_so() -> None:
    async with ClientSession() as session:
        with pytest.raises(Unavailable, match=r"Connection refused.*is `pdrt up` running"):
            await ask(session, "http://127.0.0.1:1")


async def test_who_ends_the_connection_without_a_word_may_speak_tls() -> None:
    """As a router with TLS does to who speaks plain HTTP."""

    def cut(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(cut) as url, ClientSession() as session:
        with pytest.raises(Unavailable, match="https:// instead of http://"):
            await ask(session, url)


async def test_the_api_key_is_sent() -> None:
    seen = []

    def play(request: web.Request) -> web.Response:
        seen.append(request.headers.get("authorization"))
        return web.json_response({})

    async with serving(play) as url:
        asked = Asked(url=url, api_key="k1")
        async with ClientSession(headers=asked.headers) as session:
            await ask(session, asked.base)
    assert seen == ["Bearer k1"]
    assert "k1" not in repr(asked)


@pytest.mark.parametrize("url", ["r:8000", "http://r:8000/", "http://r:8000/v1"])
def test_the_url_may_be_given_as_other_commands_take_it(url: str) -> None:
    assert Asked(url=url).base == "http://r:8000"


async def test_what_a_real_router_tells_can_be_read() -> None:
    async with rig(prefill=1, decode=1, hybrid=1) as r, ClientSession() as session:
        view = read_view(await ask(session, r.url))
    assert view.router.is_ready
    assert [each.condition for each in view.instances] == ["ready"] * 3


# The command.


def pdrt_top(url: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pdrt", "top", "--url", url, *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


async def said(process: subprocess.Popen[str]) -> tuple[str, str]:

    return await asyncio.to_thread(process.communicate, timeout=25)


async def test_into_a_pipe_it_is_plain_and_once() -> None:
    body = with_errors().view()
    async with serving(lambda _: web.json_response(body)) as url:
        process = pdrt_top(url)
        out, err = await said(process)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert "decode 127.0.0.4:8003" in out
    assert out.count("c0ffee") == 0
    assert out.count("transfer_failed") == 4


async def test_the_json_is_the_routers_own() -> None:
    body = cluster().view()
    async with serving(lambda _: web.json_response(body)) as url:
        process = pdrt_top(url, "--json")
        out, _ = await said(process)
    assert json.loads(out) == body


async def test_no_router_is_one_line_and_status_1() -> None:
    process = pdrt_top("127.0.0.1:1", "--once")
    out, err = await said(process)
    assert (process.returncode, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("pdrt: no router answers at http://127.0.0.1:1")


@pytest.mark.parametrize("how", ["q", "sigint"])
async def test_in_a_terminal_it_goes_on_until_it_is_ended_and_leaves_it_as_it_was(how: str) -> None:

    looks = asyncio.Queue[int]()
    body = with_errors().view()

    def play(_request: web.Request) -> web.Response:
        looks.put_nowait(1)
        return web.json_response(body)

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    async with serving(play) as url:
        command = [sys.executable, "-m", "pdrt", "top", "--url", url]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdin=theirs, stdout=theirs, env={**os.environ, "TERM": "xterm"}
        )
        drained = asyncio.create_task(_drain(ours))
        for _ in range(2):
            await looks.get()
        if how == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    text = await drained
    assert "\x1b[?1049h" in text  # the alternate screen
    assert "\x1b[?1049l" in text
    assert "Running requests" in text


async def _drain(terminal: int) -> str:
    """All that is written to it until its other end is closed."""

    def read() -> str:
        said = b""
        while True:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:
                chunk = b""
            if not chunk:
                os.close(terminal)
                return said.decode(errors="replace")
            said += chunk

    return await asyncio.to_thread(read)
