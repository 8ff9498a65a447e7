"""`pdrt bench faults`: every row against pdrt's router, and the verdicts themselves."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from pdrt.bench.backend import Backend, Play
from pdrt.bench.faults import ports_of, started, tried
from pdrt.bench.faults_client import Caller, Got, Line, dechunked, parsed_head
from pdrt.bench.faults_ground import Ground, scripted
from pdrt.bench.faults_real import Real, RealGround, real_rows, real_started
from pdrt.bench.faults_rows import Row, rows
from pdrt.bench.faults_verdict import Limits, Outcome, Want, broken
from pdrt.cli import app
from pdrt.errors import ConfigError

LIMITS = Limits(deadline_s=0.6, slow_reader_s=1.5)
HEADERS = {"content-type": "application/json", "x-request-id": "r", "x-pd-path": "disagg"}
ERROR = b'{"error": {"code": "internal", "message": "boom", "type": "server_error"}}'


def marked(row: Row) -> object:
    # These wait for half a minute each.
    marks = [pytest.mark.soak, pytest.mark.timeout(120)] if row.is_slow else []
    return pytest.param(row, id=row.name.replace(" ", "-"), marks=marks)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground() -> AsyncIterator[Ground]:
    async with started(LIMITS, os.environ) as found:
        assert await found.well() is not None  # whichever row is the first one
        yield found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("row", [marked(row) for row in rows()])
async def test_the_router_keeps_the_bounds_of_a_fault(row: Row, ground: Ground) -> None:
    """CASES 1, 2, 27, 30, 79, 95: whatever goes wrong ends soon, typed, and frees both legs."""
    line = await tried("pdrt", row, ground, LIMITS, lambda _text: None)
    got = line.outcome.got
    assert line.problems == [], (got.body[:400], got)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real_ground() -> AsyncIterator[RealGround]:
    async with real_started(os.environ) as found:
        yield found


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(120)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name.replace(" ", "-")) for row in real_rows()]
)
async def test_real_instances_keep_the_bounds_of_a_fault(
    row: Real, real_ground: RealGround
) -> None:
    """CASES 1, 2, 22, 27, 30, 33, 95: as a client of real processes sees it."""
    line = await tried("pdrt", row, real_ground, Limits(deadline_s=1.0), lambda _text: None)
    assert line.problems == [], line.outcome.got


# Verdicts. Each of them can fail.


def outcome(got: Got, released_s: float | None = 0.0, well_s: float | None = 0.0) -> Outcome:
    got.end = "whole" if got.end == "silent" and got.status else got.end
    return Outcome(got, released_s, well_s)


def problems(got: Got, want: Want | None = None, limits: Limits = LIMITS) -> list[str]:
    return broken(want or Want(statuses=(500,)), outcome(got), limits)


def refused(body: bytes = ERROR, status: int = 500, retry_after: str = "") -> Got:
    headers = HEADERS | ({"retry-after": retry_after} if retry_after else {})
    return Got(status, headers, body, "whole")


def test_a_typed_refusal_in_time_keeps_all_bounds() -> None:
    assert problems(refused()) == []


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (refused(b"boom"), "no typed error"),
        (refused(b'{"error": "boom"}'), "no typed error"),
        (refused(b'{"error": {"message": "boom"}}'), "no typed error"),
        (Got(500, HEADERS | {"content-type": "text/plain"}, ERROR, "whole"), "no JSON"),
        (refused(status=502), "status 502, wanted 500"),
        (Got(500, {"content-type": "application/json"}, ERROR, "whole"), "no x-pd-path"),
        (Got(500, HEADERS, ERROR, "cut"), "the answer is cut"),
        (Got(end="reset"), "the answer is reset"),
        (Got(end="silent", total_s=9.0), "no answer within 2.0 s"),
        (Got(500, HEADERS, ERROR, "whole", total_s=2.1), "answered after 2.1 s"),
        (Got(0, {}, b"hello", "whole"), "no HTTP answer"),
    ],
)
def test_a_refusal_that_is_late_untyped_or_broken_is_told(got: Got, says: str) -> None:
    assert any(says in each for each in problems(got)), problems(got)


@pytest.mark.parametrize(
    ("body", "says"),
    [(ERROR, "error inside"), (b"no json", "no JSON"), (b"[]", "error inside")],
)
def test_a_good_status_with_an_error_inside_is_told(body: bytes, says: str) -> None:
    got = Got(200, HEADERS, body, "whole")
    assert any(says in each for each in problems(got, Want()))
    assert problems(Got(200, HEADERS, b"{}", "whole"), Want()) == []


def test_a_stream_ends_with_done_or_with_a_typed_error() -> None:
    headers = HEADERS | {"content-type": "text/event-stream"}

    def stream(*events: bytes) -> Got:
        return Got(200, headers, b"".join(events), "whole")

    done, error = b"data: [DONE]\n\n", b"event: error\ndata: " + ERROR + b"\n\n"
    told = Want(ends="error event")
    assert problems(stream(b"data: 1\n\n", done), Want()) == []
    assert problems(stream(b"data: 1\n\n", error), told) == []
    assert "just ends" in problems(stream(b"data: 1\n\n"), Want())[0]
    assert "just ends" in problems(stream(b"data: 1\n\n"), told)[0]
    assert "says nothing" in problems(stream(done), told)[0]
    assert "ends with internal" in problems(stream(error), Want())[0]
    assert "no stream" in problems(Got(200, HEADERS, b"{}", "whole"), told)[0]


def test_429_says_when_to_come_again() -> None:
    want = Want(statuses=(429,), retry_after="7")
    assert problems(refused(status=429, retry_after="7"), want) == []
    assert "missing" in problems(refused(status=429), want)[0]
    assert "Retry-After 1" in problems(refused(status=429, retry_after="1"), want)[0]


def test_legs_that_are_kept_and_a_router_that_does_not_recover_are_told() -> None:
    left = Want(ends="left")
    assert broken(left, outcome(Got(end="left")), LIMITS) == []
    assert "never" in broken(left, outcome(Got(end="left"), None), LIMITS)[0]
    assert "after 2.5 s" in broken(left, outcome(Got(end="left"), 2.5), LIMITS)[0]
    assert "no good request" in broken(left, outcome(Got(end="left"), 0, None), LIMITS)[0]
    assert broken(left, outcome(Got(end="left", problem="why")), LIMITS) == ["why"]


def test_only_a_fault_that_nothing_else_tells_may_wait_for_its_limit() -> None:
    late = Got(504, HEADERS, ERROR, "whole", total_s=2.5)
    waits = Want(statuses=(504,), waits="deadline")
    assert problems(late, waits) == []
    assert problems(late, Want(statuses=(504,)))


def test_each_row_has_a_name_of_its_own() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) > 60


# The client and the backends.


def test_an_answers_head_is_read() -> None:
    assert parsed_head(b"HTTP/1.1 429 Too Many\r\nRetry-After: 7") == (429, {"retry-after": "7"})
    assert parsed_head(b"220 smtp")[0] == 0


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_a_chunked_body_is_known_to_be_whole_or_not(cut: int) -> None:
    whole = b"4\r\nabcd\r\n6;x=y\r\nefghij\r\n0\r\n\r\n"
    body, is_whole = dechunked(whole[:cut])
    assert is_whole == (cut >= len(whole))
    assert b"abcdefghij".startswith(body)


async def test_a_backend_plays_what_it_is_told_and_knows_who_left() -> None:
    backend = Backend("decode")
    await backend.listen()
    caller = Caller("127.0.0.1", backend.port, 2.0)
    try:
        assert (await caller.ask(stream=False)).status == 200
        whole = await caller.ask(stream=True)
        assert whole.is_done
        assert whole.body.count(b"t_ns") == 5
        backend.plays.append(Play(status=429, headers={"retry-after": "3"}))
        got = await caller.ask(stream=True)
        assert (got.status, got.headers["retry-after"]) == (429, "3")
        backend.plays.append(Play(upto=2, ending="die"))
        assert (await caller.ask(stream=True)).end in ("cut", "reset")
        async with caller.line() as line:
            backend.plays.append(Play(begin="hang"))
            await line.say(caller.request(caller.body(stream=True)))
            while not backend.open:
                await asyncio.sleep(0)
        while backend.open:
            await asyncio.sleep(0)
        assert [seen.outcome for seen in backend.seen][-2:] == ["died", "gone"]
        backend.refuse()
        assert (await caller.ask(stream=True)).end == "refused"
        await backend.recover()
        assert (await caller.ask(stream=False)).status == 200
    finally:
        backend.refuse()


# The command.


def test_the_command_writes_rows_and_ends_well(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    ran = CliRunner().invoke(app, ["bench", "faults", "--only", "sound", "--json", str(file)])
    assert ran.exit_code == 0, ran.output
    assert "2 of 2 rows within their bounds" in ran.output
    found = json.loads(file.read_text())
    assert [each["status"] for each in found] == [200, 200]
    assert [each["broken"] for each in found] == [[], []]


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--only", "nonsense"], "no row has that"), (["--instances", "x"], "--instances 'x'")],
)
def test_rows_that_are_none_are_refused(options: list[str], says: str) -> None:
    ran = CliRunner().invoke(app, ["bench", "faults", *options])
    assert isinstance(ran.exception, ConfigError)
    assert says in str(ran.exception)


def test_ports_are_named_by_side() -> None:
    assert ports_of("1,2/3") == ([1, 2], [3])
    for wrong in ("1", "1/", "/2", "a/b"):
        with pytest.raises(ConfigError, match="--ports"):
            ports_of(wrong)


async def test_a_row_that_breaks_a_bound_is_told(ground_of_nobody: Ground) -> None:
    """What stands there is no router: it passes nothing on."""
    row = next(row for row in rows() if row.name == "decode 429, json")
    line = await tried("none", row, ground_of_nobody, LIMITS, lambda _text: None)
    assert any("status 200, wanted 429" in problem for problem in line.problems)
    assert line.point()["broken"] == line.problems


@pytest.fixture
async def ground_of_nobody() -> AsyncIterator[Ground]:
    backend = Backend("prefill")
    await backend.listen()
    async with scripted() as (prefill, decode):
        yield Ground(Caller("127.0.0.1", backend.port, 2.0), prefill, decode)
    backend.refuse()


@pytest.mark.parametrize(
    ("pauses", "ends", "paused"), [((0.0, 0.3, 0.0), True, 0.3), ((0.0,), False, 0.5)]
)
async def test_the_longest_silence_of_a_stream_is_told(
    pauses: tuple[float, ...], ends: bool, paused: float
) -> None:
    """Within so long, whether it ends then or not."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for pause in pauses:
            await asyncio.sleep(pause)
            writer.write(b"1\r\nx\r\n")
        if ends:
            writer.write(b"0\r\n\r\n")
        await reader.read()  # until the client has left
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1")
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        found = await Line(reader, writer, 5.0).silence(0.5)
        writer.close()
        await writer.wait_closed()
    assert paused - 0.05 <= found < paused + 0.2
