"""`pdrt bench sweep`: its lengths, its folder of points, what fails, and a short real run."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdrt.bench.layouts import Ground, Layout, last_words, placed
from pdrt.bench.shell import Report
from pdrt.bench.summary import Limits, Turn, point
from pdrt.bench.sweep import Asked, Shown, sweep
from pdrt.bench.sweep_command import arrangements_of, grid_of
from pdrt.bench.sweep_plot import PICTURES, Point, panels
from pdrt.bench.sweep_points import PUBLISHED, QUARTER, Amount, Cell, Grid, Store, best, lengths_of
from pdrt.cli import app
from pdrt.config import NodeConfig
from pdrt.errors import ConfigError, Unavailable
from pdrt.sim.arrangement import named
from pdrt.sim.workload import Arrivals
from pdrt.up.layout import Wanted
from tests.bench.scripted import WHOLE, Scripted, documented, serving

GRID = Grid((8, 16), (4, 6), 8, 4)
AMOUNT = Amount(requests=5, concurrency=0, vocab=250, seed=1)
WARM_UP = 2 * 2 + AMOUNT.requests
SETTINGS = {**AMOUNT.told(), "workers": 2, "model": "m"}
LAYOUTS = tuple(Layout(named(name, 2)) for name in ("dp", "route2", "1P1D"))


def asked(**more: object) -> Asked:
    usual = Asked(layouts=LAYOUTS, grid=GRID, amount=AMOUNT, limits=Limits(), timeout_s=5.0)
    return replace(usual, **more)  # type: ignore[arg-type]


@dataclass(slots=True)
class Places:
    """Layouts that are a scripted server each; some do not start, at some one is interrupted."""

    broken: str = ""
    interrupted: str = ""
    servers: dict[str, Scripted] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)

    def found_by(self, layout: Layout, ask: Callable[[str], Awaitable[None]], /) -> None:
        self.started.append(layout.name)
        if layout.name == self.broken:
            raise Unavailable("prefill 0 ended before the cluster was ready")
        if layout.name == self.interrupted:
            raise KeyboardInterrupt
        asyncio.run(self._asked(layout, ask))

    async def _asked(self, layout: Layout, ask: Callable[[str], Awaitable[None]]) -> None:
        scripted = self.servers.setdefault(layout.name, Scripted())
        async with serving(scripted) as url:
            await ask(url)


def run(places: Places, folder: Path, out: io.StringIO | None = None, **more: object) -> int:
    store = Store(folder, SETTINGS)
    console = Console(file=out or io.StringIO(), width=120)
    shown = Shown(Report(is_quiet=out is None), console, lambda *_: ())
    return sweep(asked(**more), places, store, shown)


# Lengths and settings.


def test_the_point_that_both_sweeps_have_is_measured_once() -> None:
    assert GRID.cells == [Cell(8, 4), Cell(16, 4), Cell(8, 6)]
    assert Grid((8,), (4,), 9, 5).cells == [Cell(8, 5), Cell(9, 4)]
    assert GRID.longest == Cell(16, 6)


def test_the_usual_lengths_are_a_quarter_of_the_published_ones() -> None:
    assert (QUARTER.at_input * 4, QUARTER.at_output * 4) == (512, 256)
    assert (PUBLISHED.at_input, PUBLISHED.at_output, max(PUBLISHED.inputs)) == (512, 256, 4096)
    assert max(QUARTER.inputs) * 4 == max(PUBLISHED.inputs)
    assert grid_of("", "", 0, 0, full=False) == QUARTER
    assert grid_of("9,7", "", 0, 5, full=True) == replace(PUBLISHED, inputs=(7, 9), at_output=5)


@pytest.mark.parametrize("text", ["x", "1,,2", "0", "-5", "1..4", "9999999"])
def test_lengths_that_are_none_are_refused_by_name(text: str) -> None:
    assert lengths_of("256, 64,64", "--inputs") == (64, 256)
    with pytest.raises(ConfigError, match="--inputs"):
        lengths_of(text, "--inputs")


def test_layouts_are_all_or_those_named() -> None:
    assert [one.name for one in arrangements_of("all", 4)] == [
        *("dp", "route2", "route4", "1P3D", "2P2D"),
    ]
    assert [one.name for one in arrangements_of("all", 2)] == ["dp", "route2", "1P1D"]
    assert [one.name for one in arrangements_of("3P1D, dp,dp", 4)] == ["3P1D", "dp"]
    for text in (",", "2P2D", "route4"):
        with pytest.raises(ConfigError):
            arrangements_of(text, 6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layouts", "x"], "'x'"),
        (["--outputs", "x"], "--outputs"),
        (["--model", "null", "--json", "nowhere/x.json"], "--json"),
        (["--model", "tiny", "--step-ms", "1"], "--step-ms is of --model null"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "sweep", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


def test_all_at_once_unless_a_concurrency_is_given() -> None:
    load = AMOUNT.load(Cell(8, 4))
    assert (load.arrivals, load.requests) == (Arrivals(float("inf")), 5)
    few = replace(AMOUNT, concurrency=3)
    assert (few.load(Cell(8, 4)).arrivals, few.load(Cell(8, 4)).concurrency) == (None, 3)
    usual = {"requests": 5, "rounds": 1, "rate": "inf", "concurrency": None, "seed": 1}
    assert AMOUNT.told() == usual
    assert (few.told()["rate"], few.told()["concurrency"]) == (None, 3)


# The folder.


def test_each_layout_gets_the_same_prompts_and_a_file_a_point(tmp_path: Path) -> None:
    places, out = Places(), io.StringIO()
    assert run(places, tmp_path / "new", out) == 0
    assert places.started == ["dp", "route2", "1P1D"]
    prompts = [
        [json.dumps(body) for body in places.servers[name].bodies] for name in places.servers
    ]
    assert sorted(prompts[0]) == sorted(prompts[1]) == sorted(prompts[2])
    assert len(prompts[0]) == WARM_UP + 3 * AMOUNT.requests
    files = sorted(file.name for file in (tmp_path / "new").glob("*.json"))
    assert len(files) == 9
    assert files[:3] == ["1P1D-in16-out4.json", "1P1D-in8-out4.json", "1P1D-in8-out6.json"]
    told = json.loads((tmp_path / "new" / files[0]).read_text())
    asked_for = {"layout": "1P1D", "workers": 2, "input_len": 16, "output_len": 4}
    assert told.items() >= {**asked_for, **SETTINGS, "completed": 5, "errors": 0}.items()
    assert "route2" in out.getvalue()
    assert "none without matplotlib" in out.getvalue()


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    run(Places(), tmp_path)
    gone, kept = tmp_path / "route2-in8-out6.json", tmp_path / "route2-in8-out4.json"
    gone.unlink()
    before = kept.read_text()
    places = Places()
    assert run(places, tmp_path) == 0
    assert places.started == ["route2"]
    assert len(places.servers["route2"].bodies) == WARM_UP + AMOUNT.requests
    assert gone.exists()
    assert kept.read_text() == before
    assert Places().started == []


def test_a_point_with_errors_is_an_exit_status_and_measured_again(tmp_path: Path) -> None:
    places = Places(servers={"dp": Scripted(script=[*[WHOLE] * WARM_UP, 429])})
    assert run(places, tmp_path) == 1
    told = json.loads((tmp_path / "dp-in8-out4.json").read_text())
    assert (told["completed"], told["failures"]) == (4, {"overloaded": 1})
    again = Places()
    assert run(again, tmp_path) == 0
    assert again.started == ["dp"]


def test_rounds_of_a_point_are_pooled_and_have_other_prompts(tmp_path: Path) -> None:
    places = Places()
    assert run(places, tmp_path, amount=replace(AMOUNT, rounds=3)) == 0
    told = json.loads((tmp_path / "dp-in8-out4.json").read_text())
    assert told["completed"] == 3 * AMOUNT.requests
    bodies = [tuple(body["prompt"]) for body in places.servers["dp"].bodies[WARM_UP:]]
    assert len(bodies) == len(set(bodies)) == 3 * 3 * AMOUNT.requests


def test_points_of_another_sweep_are_refused_by_name(tmp_path: Path) -> None:
    run(Places(), tmp_path)
    other = replace(AMOUNT, requests=6)
    store = Store(tmp_path, {**SETTINGS, **other.told()})
    with pytest.raises(ConfigError, match="requests 5, and now it is 6: name another --folder"):
        store.kept("dp", Cell(8, 4))
    (tmp_path / "dp-in8-out4.json").write_text("{")
    with pytest.raises(ConfigError, match="no point of a sweep"):
        store.kept("dp", Cell(8, 4))


def test_every_key_of_a_point_is_in_the_docs_and_no_other(tmp_path: Path) -> None:
    run(Places(), tmp_path)
    told = json.loads((tmp_path / "dp-in8-out4.json").read_text())
    of_serve = set(point(Turn(seconds=1.0), Limits()))
    written = {*told, "dtype", "chunk", "step_ms", "token_ms"}  # which the command adds
    assert of_serve <= set(told)
    assert written - of_serve == documented("### JSON of a sweep")


# What goes wrong.


def test_a_layout_that_does_not_start_is_told_and_the_others_are_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = Places(broken="route2")
    assert run(places, tmp_path, io.StringIO()) == 1
    assert places.started == ["dp", "route2", "1P1D"]
    assert "route2: prefill 0 ended before" in capfd.readouterr().err
    assert len(list(tmp_path.glob("1P1D-*.json"))) == 3
    assert not list(tmp_path.glob("route2-*.json"))


def test_a_layout_that_serves_no_more_is_left_and_the_others_are_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = Places(servers={"dp": Scripted(script=[*[WHOLE] * WARM_UP, *[503] * 99])})
    assert run(places, tmp_path, io.StringIO()) == 1
    err = capfd.readouterr().err
    assert "dp, in8-out4: 5 x overloaded" in err
    assert "its other lengths are left out" in err
    assert len(list(tmp_path.glob("dp-*.json"))) == 1
    assert len(list(tmp_path.glob("1P1D-*.json"))) == 3


def test_of_a_part_that_ended_its_last_error_is_told() -> None:
    said = "hybrid 0: starting\n  Traceback\n  error: node_failed reason=no memory\n  draining\n\n"
    assert last_words(said) == "error: node_failed reason=no memory"
    assert last_words("a\n b\n") == "b"
    assert last_words("") == "it said nothing"


def test_one_that_cannot_warm_up_has_no_points(tmp_path: Path) -> None:
    places = Places(servers={"dp": Scripted(script=[429])})
    assert run(places, tmp_path) == 1
    assert not list(tmp_path.glob("dp-*.json"))


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Places(interrupted="route2"), tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 3
    places = Places()
    assert run(places, tmp_path) == 0
    assert places.started == ["route2", "1P1D"]


# Tables, pictures.


def test_the_best_has_the_highest_throughput_or_the_lowest_latency() -> None:
    def told(layout: str, rate: float, ms: float | None) -> Point:
        lengths = {"input_len": 8, "output_len": 4}
        ttft = None if ms is None else {"mean": ms}
        return {"layout": layout, **lengths, "requests_per_s": rate, "ttft_ms": ttft}

    points = [told("dp", 1.0, 5.0), told("1P1D", 2.0, 9.0), told("route2", 1.5, None)]
    panel, _ = panels(points)
    picked = [best(points, panel, 8, picture) for picture in PICTURES]
    assert picked == ["-", "1P1D", "dp", "-"]


# Real processes.


def ground(cores: list[int]) -> Ground:
    return Ground(Wanted(model="null", kv_memory=1 << 22), NodeConfig(), {}, cores)


def test_cores_are_divided_equally_among_workers_of_every_layout(tmp_path: Path) -> None:
    place = ground([4, 5, 6, 7])
    for name in ("dp", "route2", "route4", "1P3D"):
        parts = place.parts(Layout(named(name, 4)), tmp_path)
        nodes = [part for part in parts if part.role != "router"]
        cores = placed(parts, place.cores)
        assert [core for node in nodes for core in cores[node.name]] == [4, 5, 6, 7]
        assert {node.tables["device"]["threads"] for node in nodes} == {1}
        for node in nodes:
            own = node.tables["device"].get("cores", list(cores[node.name]))
            assert own == cores[node.name]
            assert len(cores[node.name]) == node.workers
        assert cores["router"] == [4, 5, 6, 7]


def test_with_more_workers_than_cores_all_share_all(tmp_path: Path) -> None:
    place = ground([4, 5])
    for name in ("dp", "route2", "route4", "1P3D"):
        parts = place.parts(Layout(named(name, 4)), tmp_path)
        assert all(cores == [4, 5] for cores in placed(parts, place.cores).values())
        tables = [part.tables["device"] for part in parts if part.role != "router"]
        assert all((table["threads"], table.get("cores")) == (1, None) for table in tables)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_sweep_with_real_processes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pdrt[plot]'")
    command = [*COMMAND, "--folder", str(tmp_path / "x"), "--json", str(tmp_path / "all.json")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "all.json").read_text())
    names = [(each["layout"], each["input_len"]) for each in told]
    assert names == [(name, of) for name in ("dp", "route2", "1P1D") for of in (16, 64)]
    assert all((each["completed"], each["errors"]) == (6, 0) for each in told)
    assert all(each["output_tokens"] == 6 * 8 for each in told)
    pictures = sorted(file.name for file in (tmp_path / "x").glob("*.png"))
    assert pictures == sorted(picture.file for picture in PICTURES)
    assert "pictures there" in ran.stdout


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    with subprocess.Popen([*COMMAND, "--folder", str(tmp_path)], stderr=subprocess.PIPE) as running:
        me = psutil.Process(running.pid)
        while not (started := me.children(recursive=True)):
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    _, left = psutil.wait_procs(started, timeout=10)
    assert not left


COMMAND = [
    *(sys.executable, "-m", "pdrt", "bench", "sweep", "--model", "null", "--requests", "6"),
    *("--inputs", "16,64", "--outputs", "8", "--at-output", "8", "--at-input", "16"),
]
