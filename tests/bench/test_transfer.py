"""Tiny runs of `pdrt bench transfer` between two real processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import sys
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import zmq
from rich.console import Console

from pdrt import cli
from pdrt.bench.cases import Case, Wanted, wanted
from pdrt.bench.control_line import asking, guarded_wire, own_address, split_address
from pdrt.bench.handshakes import Standing, after
from pdrt.bench.pairing import Pairing, Stretch, checksum, fill
from pdrt.bench.plain import STYLES, PlainReceiver, PlainSender, Style
from pdrt.bench.results import Results
from pdrt.bench.shell import Report, transfer
from pdrt.bench.target import Target, serve
from pdrt.bench.transfer import Place, Run, local_target, measure
from pdrt.bench.ways import Memcpy, lacking, pool_memory
from pdrt.bench.words import Bye, Check, Hello, Sorry, Sum, Welcome
from pdrt.config import TransportName
from pdrt.errors import ConfigError, TransferFailed, Unavailable
from pdrt.keys import ClusterKey

KEY = ClusterKey(b"0123456789abcdef")
POOL = 1 << 20
PATIENCE_S = 20.0


def tiny(transport: str = "shm", sizes: str = "4K,64K") -> Wanted:
    return wanted(sizes, "1,4", transport, 1, 0.01, "1M")


def nothing(_case: Case, _round: int) -> None:
    pass


@pytest.mark.e2e
def test_a_run_reports_each_way_in_each_case_and_every_byte_arrived(tmp_path: Path) -> None:
    """What did not arrive would be among `refused`, and its points missing."""
    out, file = io.StringIO(), tmp_path / "x.json"
    report = Report(json_file=str(file))
    assert transfer(tiny("shm,tcp,memfabric"), report, Console(file=out, width=160)) == 0
    points = json.loads(file.read_text())
    seen = {(p["transport"], p["block_bytes"], p["batch"]) for p in points}
    ways = ("memcpy", *STYLES, "shm", "tcp")
    assert seen == {(w, s, b) for w in ways for s in (4096, 65536) for b in (1, 4)}
    assert all(("of_plain_loop" in p) == (p["transport"] == "tcp") for p in points)
    assert all(p["gb_per_s"] > 0 and p["p99_us"] >= p["p50_us"] > 0 for p in points)
    assert "memfabric is not measured: it " in out.getvalue()


async def run_with(way: object) -> Results:
    """One case with one way that reaches the target, whatever it does there."""
    async with local_target() as place, asking(place.key, place.host, place.port) as line:
        memory = pool_memory(POOL)
        fill(memory.array[memory.pool_at :])
        hello = Hello(
            number=line.next_number(), endpoint=line.endpoint, pool_bytes=POOL, transports=()
        )
        await line.ask(hello, Welcome)
        results = Results({})
        ways = [Memcpy(memory.array[memory.pool_at :]), way]
        await Run(tiny(), line, memory, results, ways).all(nothing)  # type: ignore[arg-type]
        memory.close()
        return results


class Liar:
    """Says that it moved everything at once."""

    name, reaches_target = "liar", True

    async def move(self, _pairing: Pairing, _stretch: Stretch) -> float:
        return 1e-9


class Failing(Liar):
    name = "failing"

    async def move(self, _pairing: Pairing, _stretch: Stretch) -> float:
        raise TransferFailed("no such wire")


@pytest.mark.e2e
async def test_a_way_that_moves_nothing_has_no_figures() -> None:
    results = await run_with(Liar())
    assert "did not bring 1 x 4 KiB over as it was" in results.refused["liar"]
    assert {way for _, way in results.series} == {"memcpy"}


@pytest.mark.e2e
async def test_a_way_that_fails_is_out_with_its_reason_and_the_others_go_on() -> None:
    results = await run_with(Failing())
    assert "no such wire" in results.refused["failing"]
    assert len(results.series) == 4


# Over two hosts, here two loopback addresses.


async def listening(key: ClusterKey, host: str) -> tuple[asyncio.Task[None], int]:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(key, host, 0, PATIENCE_S, told.set_result))
    return task, int((await told).rpartition(":")[2])


async def test_a_listening_target_serves_one_writer_and_is_done() -> None:
    task, port = await listening(KEY, "127.0.0.3")
    results = await measure(tiny(), Place(KEY, "127.0.0.3", port), nothing)
    assert results.refused == {}
    assert results.where == "127.0.0.1 to 127.0.0.3"
    assert {way for _, way in results.series} == {"memcpy", "shm"}
    await task


async def test_a_listener_that_nobody_comes_to_ends_by_itself() -> None:
    with pytest.raises(Unavailable, match="no writer"):
        await serve(KEY, "127.0.0.1", 0, 0.01, lambda _endpoint: None)


async def asked(key: ClusterKey, host: str, port: int) -> tuple[list[str], str]:
    """What a writer is told meanwhile, and in the end, when it gets no answer."""
    told = list[str]()
    async with asking(key, host, port, 1.0, told.append) as line:
        hello = Hello(number=1, endpoint=line.endpoint, pool_bytes=POOL, transports=("shm",))
        with pytest.raises(Unavailable, match="does not answer within 1 s") as caught:
            await line.ask(hello, Welcome)
    return told, str(caught.value)


async def test_a_writer_with_another_key_is_told_so_at_once_and_the_listener_too() -> None:
    at, told = asyncio.get_running_loop().create_future(), list[str]()
    listener = asyncio.create_task(serve(KEY, "127.0.0.3", 0, 2.0, at.set_result, told.append))
    port = int((await at).rpartition(":")[2])
    writer_told, end = await asked(ClusterKey(b"another cluster's key"), "127.0.0.3", port)
    assert "has not the same cluster key" in writer_told[0]
    assert "has not the same cluster key" in end
    with pytest.raises(Unavailable, match=r"no writer .* in 2 s; a stranger was refused \d+ times"):
        await listener
    assert "a stranger was refused" in told[0]
    assert len(told) == 1  # and not again for each knock


async def test_a_writer_that_finds_nobody_is_told_so_at_once() -> None:
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
    told, end = await asked(KEY, "127.0.0.3", port)
    assert "nobody listens there" in told[0]
    assert len(told) == 1
    assert "nobody listens there" in end


async def test_a_writer_whose_listener_comes_later_is_served() -> None:
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
    refused = asyncio.Event()

    def told(line: str) -> None:
        assert "nobody listens there" in line
        refused.set()

    writer = asyncio.create_task(measure(tiny(), Place(KEY, "127.0.0.3", port), nothing, told))
    async with asyncio.timeout(PATIENCE_S):
        await refused.wait()
        await serve(KEY, "127.0.0.3", port, PATIENCE_S, lambda _endpoint: None)
        assert (await writer).refused == {}


async def test_what_takes_a_connection_and_says_nothing_is_not_called_a_stranger() -> None:
    with socket.create_server(("127.0.0.3", 0)) as mute:
        _, end = await asked(KEY, "127.0.0.3", mute.getsockname()[1])
    assert "shakes no hands" in end


async def test_a_member_whose_answer_does_not_come_points_at_the_way_back() -> None:
    async with guarded_wire(KEY, "127.0.0.3") as wire:  # admits, and never answers
        _, end = await asked(KEY, "127.0.0.3", int(wire.endpoint.rpartition(":")[2]))
    assert "has the same cluster key" in end
    assert "firewall" in end


@pytest.mark.parametrize(
    ("events", "standing"),
    [
        ([zmq.EVENT_CONNECT_DELAYED], "silent"),
        ([zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED], "refused"),
        ([zmq.EVENT_CLOSED, zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED], "known"),
        ([zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_DISCONNECTED], "stranger"),
        ([zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_CONNECTED], "stranger"),
        ([zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_CLOSED], "refused"),
        ([zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED], "silent"),
    ],
)
def test_the_last_events_say_how_far_a_connection_has_come(
    events: list[int], standing: Standing
) -> None:
    start: Standing = "silent"
    assert reduce(after, events, start) == standing


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*in use"):
            await serve(KEY, "127.0.0.1", port, 1.0, lambda _endpoint: None)


async def test_a_target_refuses_what_it_cannot_do() -> None:
    async with Target(KEY, "127.0.0.1") as target:
        early = await target.answer(Check(number=1, block_bytes=4096, first=0, count=1, turn=0))
        assert early == Sorry(number=1, reason="there is no pool yet")
        hello = Hello(number=2, endpoint="e", pool_bytes=POOL, transports=("shm", "pigeon"))
        welcome = await target.answer(hello)
        assert isinstance(welcome, Welcome)
        assert welcome.refused == {"pigeon": "pigeon is not known here"}
        assert list(welcome.region.offers) == ["shm"]
        again = await target.answer(hello)
        assert isinstance(again, Sorry)
        assert "another writer" in again.reason
        assert (await target.answer(Bye(number=4))).number == 4
    async with Target(KEY, "127.0.0.1") as target:
        for wrong, says in (({"protocol": 99}, "protocol"), ({"pool_bytes": 1 << 39}, "large")):
            asked = {"number": 1, "endpoint": "e", "pool_bytes": POOL, "transports": (), **wrong}
            answer = await target.answer(Hello(**asked))  # type: ignore[arg-type]
            assert isinstance(answer, Sorry)
            assert says in answer.reason


@pytest.mark.parametrize("text", ["", "10.0.0.1", ":5", "10.0.0.1:x", "10.0.0.1:70000"])
def test_an_address_without_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"want HOST:PORT, such as 10\.0\.0\.2:18900"):
        split_address(text, "--connect")


def test_addresses_of_both_families_are_taken() -> None:
    assert split_address("127.0.0.1:5", "--connect") == ("127.0.0.1", 5)
    assert split_address("[::1]:5", "--connect") == ("::1", 5)
    assert own_address("127.0.0.3") == "127.0.0.1"


@pytest.mark.e2e
async def test_two_commands_at_two_addresses_measure_together(tmp_path: Path) -> None:
    environment = {**os.environ, "PDRT_SECURITY_KEY": "a key for tests only, not a secret"}
    pdrt = (sys.executable, "-m", "pdrt", "bench", "transfer")
    listener = await asyncio.create_subprocess_exec(
        *(*pdrt, "--listen", "127.0.0.3:0"), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert listener.stdout is not None
    while b"--connect " not in (line := await listener.stdout.readline()):
        assert line
    where, file = line.split()[-1].decode(), str(tmp_path / "x.json")
    small = ("--sizes", "4K", "--transport", "shm", "--rounds", "1", "--pool", "1M")
    writer = await asyncio.create_subprocess_exec(
        *(*pdrt, "--connect", where, *small, "--seconds", "0.01", "--quiet", "--json", file),
        env=environment,
    )
    assert await writer.wait() == 0
    assert await listener.wait() == 0
    assert [point["transport"] for point in read(file)] == ["memcpy", "shm"] * 2


def read(file: str) -> list[dict[str, object]]:
    points: list[dict[str, object]] = json.loads(Path(file).read_text())
    return points


# The plain loops.


@pytest.mark.parametrize("style", STYLES)
async def test_a_plain_loop_puts_each_block_in_its_place(style: Style) -> None:
    source, target = bytearray(POOL), bytearray(POOL)
    fill(np.frombuffer(source, np.uint8))
    pairing, stretch = Pairing(POOL, 65536), Stretch(3, 16, 2)
    receiver = PlainReceiver("127.0.0.1", memoryview(target), lambda size: Pairing(POOL, size))
    sender = PlainSender(("127.0.0.1", receiver.port), receiver.token, style)
    offsets = pairing.sources(stretch)
    blocks = [memoryview(source)[at : at + 65536] for at in offsets.tolist()]
    sender.move(blocks, 65536, stretch)
    assert checksum(memoryview(target), pairing.targets(stretch), 65536) == checksum(
        memoryview(source), offsets, 65536
    )
    sender.close()
    receiver.close()


async def test_who_has_not_the_token_writes_nothing() -> None:
    target = bytearray(POOL)
    receiver = PlainReceiver("127.0.0.1", memoryview(target), lambda size: Pairing(POOL, size))
    sender = PlainSender(("127.0.0.1", receiver.port), bytes(32), "sendall")
    with pytest.raises(OSError, match=r"gone|reset|pipe"):
        sender.move([memoryview(b"\xff" * 4096)], 4096, Stretch(0, 1, 0))
    assert not any(target)
    sender.close()
    receiver.close()


# What cannot be measured here.


@pytest.mark.parametrize(
    ("name", "package", "devices", "says"),
    [
        ("shm", "", [], r"^$"),
        ("nixl", None, [], r"not installed: pip install nixl-cu12==[\d.]+$"),
        ("memfabric", None, [], r"not installed: pip install memfabric-hybrid==.*Ascend NPU"),
        ("memfabric", "memfabric-hybrid 1", [], r"^it needs an Ascend NPU and its driver"),
        ("memfabric", "memfabric-hybrid 1", ["davinci0"], r"meet at a store"),
    ],
)
def test_a_transport_that_cannot_be_measured_says_what_to_install(
    name: TransportName, package: str | None, devices: list[str], says: str
) -> None:
    assert re.search(says, lacking(name, lambda _name: package, lambda _name: devices))


# The command.


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "transfer", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sizes", "many"], "64K, 1M or 4K..64M"),
        (["--transport", "pigeon"], "shm, tcp, nixl"),
        (["--json", "/nowhere/x.json"], "/nowhere"),
        (["--plot", "x.txt"], ".png"),
        (["--listen", "127.0.0.1:1", "--connect", "127.0.0.1:1"], "not both"),
        (["--connect", "nowhere"], "HOST:PORT"),
        (["--listen", "192.0.2.1:5"], "a cluster key is needed"),
    ],
)
def test_wrong_options_are_one_line_that_says_what_is_allowed(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = command(capsys, *arguments)
    assert status == 2
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.e2e
async def test_the_child_refuses_to_start_without_orders() -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdrt.bench.target"),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await child.communicate()
    assert child.returncode == 1
    assert b"pdrt bench: " in err


async def test_a_sum_is_over_the_blocks_in_order() -> None:
    async with Target(KEY, "127.0.0.1") as target:
        hello = Hello(number=1, endpoint="e", pool_bytes=POOL, transports=())
        await target.answer(hello)
        answer = await target.answer(Check(number=2, block_bytes=4096, first=0, count=2, turn=1))
        assert isinstance(answer, Sum)
        assert answer.value == checksum(memoryview(bytes(8192)), np.array([0, 4096]), 4096)
