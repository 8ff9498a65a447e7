"""`pdrt up`: what it starts, what it tells and what it leaves behind, which is nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from aiohttp import ClientSession
from rich.console import Console

from pdrt.config import NodeConfig, PortsSection, Role, RouterConfig, check
from pdrt.errors import ConfigError, PeerLost, Unavailable
from pdrt.keys import ClusterKey
from pdrt.up.layout import Machine, Part, Shape, Wanted, child_environment, lay_out
from pdrt.up.place import check_free, free_port, new_key
from pdrt.up.processes import Child
from pdrt.up.screen import (
    Loaded,
    Screen,
    read_loaded,
    read_ways,
    readable,
    status_line,
    ways_in_short,
)
from pdrt.up.shell import Asked, Cluster, Patience

FAKE = Path(__file__).with_name("fake_parts.py")
ROOT = Path(__file__).parent.parent
KEY_FILE = Path("/run/key")
GIB = 1 << 30
FREE = PortsSection(router=0, prefill=0, decode=0, hybrid=0, bootstrap=0, admin=0)


def nine(_host: str) -> int:
    return 9999


def parts_of(wanted: Wanted, ports: PortsSection | None = None, cores: int = 8) -> list[Part]:
    return lay_out(wanted, ports or PortsSection(), KEY_FILE, machine(cores), nine)


def machine(cores: int = 2) -> Machine:
    return Machine(cores=cores, memory=100 * GIB)


# Layout.


def test_every_instance_has_an_address_of_its_own_and_the_well_known_port() -> None:
    """CASES 103: four instances on one host start."""
    places = [(p.name, p.host, p.port) for p in parts_of(Wanted(prefill=2, decode=2))]
    assert places == [
        ("prefill 0", "127.0.0.2", 8001),
        ("prefill 1", "127.0.0.3", 8001),
        ("decode 0", "127.0.0.4", 8100),
        ("decode 1", "127.0.0.5", 8100),
        ("router", "127.0.0.1", 8000),
    ]


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(),
        Wanted(prefill=3, decode=2, decode_dp=2),
        Wanted(prefill_tp=4, decode_tp=2, decode_dp=2),
        Wanted(prefill=2, prefill_tp=2, prefill_cp=3),
        Wanted(prefill=0, decode=0, hybrid=2),
        Wanted(hybrid=1),
        Wanted(model='/a "b" \\c/é', name="m", dtype="float32", transport="shm"),
    ],
)
def test_what_is_written_can_be_read_and_says_what_was_asked(wanted: Wanted) -> None:
    *nodes, router = parts_of(wanted)
    for part in nodes:
        config = check(NodeConfig, tomllib.loads(part.toml()), part.name)
        assert config.model.path == wanted.model
        assert config.parallel.local_ip == part.host
        parallel = config.parallel
        shape = wanted.shape(config_role(part))
        assert (parallel.tp, parallel.cp, parallel.dp) == (shape.tp, shape.cp, shape.dp)
        assert parallel.world_size == parallel.devices_per_node == part.workers
    routes = check(RouterConfig, tomllib.loads(router.toml()), "router")
    assert len(routes.prefill) == wanted.prefill
    assert len(routes.decode) == wanted.decode
    assert len(routes.hybrid) == wanted.hybrid
    named = {each.http for each in (*routes.prefill, *routes.decode, *routes.hybrid)}
    assert named == {node.url for node in nodes}


def config_role(part: Part) -> Role:
    assert part.role != "router"
    return part.role


def test_the_cores_are_shared_evenly_by_the_workers() -> None:
    parts = parts_of(Wanted(prefill_tp=2, decode_tp=2, decode_dp=3), cores=16)
    assert [p.tables["device"]["threads"] for p in parts[:-1]] == [2, 2]
    parts = parts_of(Wanted(prefill=1, decode=1, decode_dp=3), cores=8)
    assert [p.tables["device"]["threads"] for p in parts[:-1]] == [2, 2]
    parts = parts_of(Wanted(prefill=2, decode=2), cores=2)
    assert {p.tables["device"]["threads"] for p in parts[:-1]} == {1}


def test_the_ranks_of_a_group_share_a_pool_and_the_weights() -> None:
    prefill, decode, _ = parts_of(Wanted(prefill_tp=4, decode_tp=2, decode_dp=2, weights=6 * GIB))
    assert prefill.tables["scheduler"]["kv_memory"] == 6 * GIB // 4
    assert decode.tables["scheduler"]["kv_memory"] == 6 * GIB // 2
    parts_of(Wanted(prefill_tp=4, weights=30 * GIB, kv_memory=GIB))  # not four copies of it


def test_each_cp_rank_has_the_weights_and_a_pool_of_its_own() -> None:
    prefill, decode, _ = parts_of(Wanted(prefill_cp=2, weights=15 * GIB))
    pools = [part.tables["scheduler"]["kv_memory"] for part in (prefill, decode)]
    assert pools[0] == pools[1]
    assert float(str(pools[0])) < 15 * GIB
    assert str(prefill.shape) == "cp 2"


@pytest.mark.parametrize(
    ("wanted", "pool"),
    [
        (Wanted(), GIB),
        (Wanted(weights=5 * GIB), 5 * GIB),
        (Wanted(weights=50 * GIB), 20 * GIB),
        (Wanted(prefill=40, decode=40), GIB // 2),
        (Wanted(kv_memory=0.25), 0.25),
    ],
)
def test_pools_are_as_large_as_useful_and_together_no_more_than_there_is(
    wanted: Wanted, pool: float
) -> None:
    for part in parts_of(wanted)[:-1]:
        assert part.tables["scheduler"]["kv_memory"] == pool


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(prefill=0, decode=0),
        Wanted(prefill=1, decode=0),
        Wanted(prefill=0, decode=1),
        Wanted(prefill_tp=3, decode_tp=2),
        Wanted(prefill=0, decode=0, hybrid=1, decode_dp=2),
        Wanted(prefill=0, decode=0, hybrid=1, prefill_cp=2),
        Wanted(prefill=150, decode=150),
        Wanted(kv_memory=60e9),
        Wanted(kv_memory=0.25, weights=30 * GIB),
        Wanted(prefill=2, decode=2, kv_memory=0.3),
    ],
)
def test_what_cannot_serve_is_refused(wanted: Wanted) -> None:
    with pytest.raises(ConfigError):
        parts_of(wanted)


def test_a_child_inherits_settings_but_not_over_what_is_written_for_it() -> None:
    node, router = parts_of(Wanted(prefill=0, decode=0, hybrid=1))
    environ = {
        "HOME": "/h",
        "PDRT_SCHEDULER_BLOCK_SIZE": "32",
        "PDRT_MODEL_PATH": "elsewhere",
        "PDRT_PORTS_ROUTER": "0",
        "PDRT_SECURITY_KEY": "another key of the shell",
    }
    kept = {"HOME": "/h", "PDRT_SCHEDULER_BLOCK_SIZE": "32"}
    assert child_environment(node, environ) == kept
    assert child_environment(router, environ) == kept | {"PDRT_MODEL_PATH": "elsewhere"}


# Place.


def test_a_taken_port_is_an_error_that_names_port_address_and_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        parts = parts_of(Wanted(), PortsSection(router=port))
        with pytest.raises(ConfigError) as error:
            check_free(parts[-1:])
    for word in (str(port), "127.0.0.1", "PDRT_PORTS_ROUTER"):
        assert word in str(error.value)


def test_free_ports_are_no_error() -> None:
    check_free(lay_out(Wanted(), FREE, KEY_FILE, machine(), free_port))


def test_the_key_in_the_file_is_the_key(tmp_path: Path) -> None:
    key = new_key(tmp_path / "key")
    assert ClusterKey.from_text((tmp_path / "key").read_text()) == key


# Screen.


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        ([{"rank": "0,0,0", "loading": ["weights", 1, 4]}], [Loaded("0,0,0", "weights", 1, 4)]),
        (
            [{"rank": "1,0,0", "state": "spawning", "loading": None}, {"rank": 3}],
            [Loaded("1,0,0", "spawning", 0, 0)],
        ),
        ([{"rank": "0,0,0", "loading": ["weights", "x", 4]}, "junk"], []),
        ([{"rank": "0,0,0", "state": "ready", "loading": ["weights", 4, 4]}], []),
        ("junk", []),
        (None, []),
    ],
)
def test_progress_is_read_from_a_status_and_anything_else_is_not(
    workers: object, told: list[Loaded]
) -> None:
    assert read_loaded({"workers": workers}) == told


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            '{"error": "no model", "event": "failed", "level": "error", "timestamp": "T"}',
            "error: failed error=no model",
        ),
        ('{"event": "x"}', "x"),
        ("Traceback:", "Traceback:"),
        ("[1]", "[1]"),
        ('{"no": "event"}', '{"no": "event"}'),
    ],
)
def test_last_words_are_shown_as_a_person_reads_them(line: str, shown: str) -> None:
    assert readable(line) == shown


def test_a_node_with_several_workers_has_a_bar_for_each() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    (part, *_) = parts_of(Wanted(prefill=0, decode=0, hybrid=1))
    part = replace(part, shape=Shape(dp=2))
    with Screen(console) as screen:
        screen.starting(part)
        for rank in ("0,0,0", "1,0,0"):
            screen.loading(part, Loaded(rank, "weights", 1, 4))
        screen.is_ready(part)
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rpartition("hybrid 0 (0,0,0)")[2]
    assert "hybrid 0 (1,0,0)" in last
    assert last.count("ready") == 2


def test_the_status_line_says_how_loaded_who_is() -> None:
    load = {"running": 3, "waiting": 1, "blocks_used": 5, "blocks_total": 9}
    statuses: dict[str, Mapping[str, object] | None] = {
        "prefill 0": {"state": "ready", "load": load},
        "decode 0": {"state": "loading", "load": load},
        "decode 1": None,
    }
    assert status_line(statuses) == (
        "prefill 0: 3 running, 1 waiting, kv 5/9   decode 0: loading   decode 1: no answer"
    )


@pytest.mark.parametrize(
    "workers",
    [None, 7, [None, 7, {}], [{"transports": ["tcp"]}], [{"transports": {"a": None, "b": 3}}]],
)
def test_a_status_that_tells_no_ways_of_kv_is_no_fault(workers: object) -> None:
    assert read_ways({"workers": workers}) == []


@pytest.mark.parametrize(
    ("ways", "told"),
    [
        (["tcp, 2.4 GB/s", "tcp, 10.1 GB/s", "tcp, 3 GB/s"], "tcp, 2.4 to 10.1 GB/s"),
        (["shm, 3.2 GB/s", "nixl", "shm, 3.2 GB/s"], "nixl; shm, 3.2 GB/s"),
        (["tcp, fast", "tcp, nan GB/s"], "tcp"),
        ([], ""),
    ],
)
def test_many_ways_of_kv_are_told_in_short(ways: list[str], told: str) -> None:
    assert ways_in_short(ways) == told


# The whole, with processes that only pretend.


@dataclass
class Rig:
    """A cluster of fakes, and what it said."""

    folder: Path
    behaviours: dict[str, str] = field(default_factory=dict)
    console: Console = field(
        default_factory=lambda: Console(file=io.StringIO(), width=200, highlight=False)
    )
    pids: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    wanted: Wanted = field(default_factory=Wanted)
    tell_s: float = 5.0

    def program(self, part: Part, conf: Path) -> list[str]:
        assert tomllib.loads(conf.read_text())
        usual = "router" if part.role == "router" else "node"
        behaviour = self.behaviours.get(part.name, usual)
        return [sys.executable, str(FAKE), behaviour, part.host, str(part.port)]

    async def serve(
        self,
        meanwhile: Callable[[str, Asked], Awaitable[None]] | None,
        startup_s: float = 10.0,
        drain_s: float = 5.0,
    ) -> int:
        self.parts = lay_out(self.wanted, FREE, self.folder / "key", machine(), free_port)
        key = new_key(self.folder / "key")
        with Screen(self.console) as screen:
            cluster = Cluster(self.parts, self.folder, key, screen, {}, self.program)
            try:
                return await cluster.serve(Patience(startup_s, drain_s, self.tell_s), meanwhile)
            finally:
                self.pids = [child.pid for child in cluster.children]

    @property
    def said(self) -> str:
        file = self.console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()

    def nobody_is_left(self) -> bool:
        return bool(self.pids) and not any(psutil.pid_exists(pid) for pid in self.pids)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield Rig(tmp_path)
    for child in psutil.Process().children():  # of a test that failed
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


async def leave(_url: str, _asked: Asked) -> None:
    return


async def test_it_tells_progress_and_readiness_and_ends_everybody(rig: Rig) -> None:
    assert await rig.serve(leave) == 0
    assert "prefill 0: weights" in rig.said
    assert f"ready: {rig.parts[-1].url}/v1 (KV moves by auto)" in rig.said
    assert rig.nobody_is_left()


async def test_the_ready_lines_say_how_large_an_instance_is_and_how_kv_moves(rig: Rig) -> None:
    rig.wanted = Wanted(decode_tp=2, decode_dp=2, transport="tcp")
    assert await rig.serve(leave) == 0
    assert "/v1 (KV moves by tcp)" in rig.said
    assert f"prefill 0 at {rig.parts[0].url}, decode 0 at" in rig.said
    assert f"{rig.parts[1].url} (tp 2, dp 2); logs in" in rig.said


async def test_the_ready_line_names_what_carries_kv_where_nobody_chose(rig: Rig) -> None:
    rig.behaviours = {"decode 0": "shm"}
    await rig.serve(leave)
    assert "/v1 (KV moves by shm, 3.2 GB/s)" in rig.said


async def test_a_signal_drains_and_exits_zero(rig: Rig) -> None:
    async def interrupt(_url: str, asked: Asked) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asked.stop.wait()

    assert await rig.serve(interrupt) == 0
    assert rig.nobody_is_left()


async def test_who_does_not_end_in_time_is_killed_and_named(rig: Rig) -> None:
    rig.behaviours["decode 0"] = "deaf"
    assert await rig.serve(leave, drain_s=0.2) == 1
    assert "decode 0 did not end in time" in rig.said
    assert rig.nobody_is_left()


async def test_a_second_signal_does_not_wait(rig: Rig) -> None:
    rig.behaviours["decode 0"] = "deaf"

    async def twice(_url: str, asked: Asked) -> None:
        asked.heard(signal.SIGINT)
        asked.heard(signal.SIGINT)

    async with asyncio.timeout(10):
        assert await rig.serve(twice, drain_s=600) == 1
    assert "decode 0 was ended at once, as asked" in rig.said
    assert rig.nobody_is_left()


async def test_a_part_that_cannot_start_ends_all_with_its_last_words(rig: Rig) -> None:
    rig.behaviours["decode 0"] = "broken"
    with pytest.raises(PeerLost, match="decode 0"):
        await rig.serve(leave)
    assert "exit status 3" in rig.said
    assert "no such model" in rig.said
    assert rig.nobody_is_left()


async def test_what_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    rig = Unready(tmp_path)
    with pytest.raises(Unavailable, match=r"not ready after 0\.3 s"):
        await rig.serve(leave, startup_s=0.3)
    assert rig.nobody_is_left()


async def test_why_a_router_with_ready_nodes_is_not_ready_is_said_again_and_again(
    rig: Rig,
) -> None:
    """Its canaries may fail for minutes: who waits sees why, and where to look."""
    rig.behaviours["router"], rig.tell_s = "refusing", 0.05
    with pytest.raises(Unavailable, match="says: no healthy decode instance"):
        await rig.serve(leave, startup_s=3)
    why = "all nodes are ready, the router is not yet: no healthy decode instance"
    assert rig.said.count(why) > 1
    assert f"logs in {rig.folder}" in rig.said


class Unready(Rig):
    """Its router listens on another port than its URL says."""

    def program(self, part: Part, conf: Path) -> list[str]:
        if part.role == "router":
            part = replace(part, port=free_port(part.host))
        return super().program(part, conf)


async def test_a_death_later_is_reported_once_and_the_rest_goes_on(rig: Rig) -> None:
    rig.behaviours["decode 0"] = "mortal"
    serving = asyncio.create_task(rig.serve(None))
    await until(lambda: "ready: " in rig.said)
    await tell(rig.parts[1].url, "die")
    await until(lambda: "decode 0 ended with exit status 9" in rig.said)
    assert f"again, in another terminal: pdrt node --role decode --conf {rig.folder}/" in rig.said
    os.kill(os.getpid(), signal.SIGINT)
    assert await serving == 1
    assert rig.said.count("decode 0 ended") == 1
    assert rig.nobody_is_left()


async def test_a_part_that_was_told_to_drain_is_no_fault(rig: Rig) -> None:
    serving = asyncio.create_task(rig.serve(None))
    await until(lambda: "ready: " in rig.said)
    await tell(rig.parts[1].url, "leave")
    await until(lambda: "decode 0 has drained and ended" in rig.said)
    os.kill(os.getpid(), signal.SIGINT)
    assert await serving == 0
    assert "last words" not in rig.said


async def test_that_nothing_can_be_served_any_more_is_said_and_that_it_can_again(rig: Rig) -> None:
    serving = asyncio.create_task(rig.serve(None))
    await until(lambda: "ready: " in rig.said)
    await tell(rig.parts[-1].url, "turn")
    await until(lambda: "no longer ready: no healthy decode instance" in rig.said)
    await tell(rig.parts[-1].url, "turn")
    await until(lambda: "ready again" in rig.said)
    assert f"or pdrt top --url {rig.parts[-1].url}, shows it" in rig.said  # no usual port
    os.kill(os.getpid(), signal.SIGINT)
    assert await serving == 0


async def until(holds: Callable[[], bool]) -> None:
    """The fakes are real processes; the test's own time limit bounds this."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def tell(url: str, what: str) -> None:
    async with ClientSession() as session:
        with contextlib.suppress(OSError):
            await session.get(f"{url}/{what}")


def test_children_end_when_it_is_killed(tmp_path: Path) -> None:
    """kill -9 of `pdrt up` itself: nobody is left to tell them, and yet they end."""
    script = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from pdrt.up.layout import Machine, Wanted, lay_out
        from pdrt.up.place import free_port
        from pdrt.up.processes import Child
        from pdrt.config import PortsSection

        async def main():
            free = PortsSection(router=0, prefill=0, decode=0, bootstrap=0, admin=0)
            part = lay_out(Wanted(), free, Path("key"), Machine(cores=1, memory=1), free_port)[0]
            program = [sys.executable, {str(FAKE)!r}, "node", part.host, str(part.port)]
            child = await Child.start(part, program, Path({str(tmp_path / "log")!r}), {{}})
            while not child.new_lines():
                await asyncio.sleep(0.01)
            print(child.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    child.wait(timeout=10)


async def test_a_log_stays_small_and_no_whole_line_is_lost(tmp_path: Path) -> None:
    log, part = tmp_path / "log", parts_of(Wanted())[0]
    child = await Child.start(part, ["true"], log, {"PATH": os.environ["PATH"]}, max_log_bytes=20)
    with log.open("a") as out:
        out.write("one\ntwo\nthr")
        out.flush()
        assert child.new_lines() == ["one", "two"]
        out.write("ee is longer than that\n")
        out.flush()
        assert child.new_lines() == ["three is longer than that"]
        assert log.stat().st_size == 0
        out.write("four\n")
        out.flush()
        assert child.new_lines() == ["four"]
    assert child.last_lines() == ["one", "two", "three is longer than that", "four"]
    assert await child.wait() == 0
    child.close()
