"""Cost files from measurements: what the fit finds again, and a small run of everything."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from pdrt.bench import cost_file, overheads
from pdrt.bench.calibrate import Asked, Rounds, calibrate, machine
from pdrt.bench.layouts import Ground
from pdrt.bench.load import Ran
from pdrt.bench.overheads import Overheads, Seen, Used
from pdrt.bench.shell import Report
from pdrt.bench.step_fit import cost_s, fit, nnls
from pdrt.bench.step_grid import Shape, Steps, doubled, grid
from pdrt.cli import app
from pdrt.config import NodeConfig, check, process_environ
from pdrt.device.null import NullRunner
from pdrt.errors import ConfigError
from pdrt.sim.cost import Cost, StepCost, load
from pdrt.up.layout import Wanted

GRID = grid(512, 32, 2048)
TRUE = StepCost(
    base_ms=20.0,
    token_us=250.0,
    pair_ns=150.0,
    context_ns=4000.0,
    decode_ms=((1.0, 1.0), (2.0, 1.5), (4.0, 2.0), (8.0, 4.0), (16.0, 6.0), (32.0, 12.0)),
)


def test_a_cost_is_found_again_from_the_steps_that_it_makes() -> None:
    found = fit({shape: cost_s(TRUE, shape) for shape in GRID})
    assert abs(found.worst.error) < 1e-3
    assert found.step.token_us == pytest.approx(TRUE.token_us, rel=1e-3)
    assert found.step.pair_ns == pytest.approx(TRUE.pair_ns, rel=1e-2)
    assert found.step.context_ns == pytest.approx(TRUE.context_ns, rel=1e-3)
    whole = [(n, found.step.base_ms + ms) for n, ms in found.step.decode_ms]
    assert [n for n, _ in whole] == [n for n, _ in TRUE.decode_ms]
    assert [ms for _, ms in whole] == pytest.approx([20 + ms for _, ms in TRUE.decode_ms], rel=1e-3)


def test_noise_of_a_tenth_leaves_the_fit_within_a_tenth_of_the_truth() -> None:
    random = np.random.default_rng(5)
    noisy = {s: cost_s(TRUE, s) * random.uniform(0.9, 1.1) for s in GRID}
    found = fit(noisy)
    for shape in GRID:
        assert cost_s(found.step, shape) == pytest.approx(cost_s(TRUE, shape), rel=0.1)
    assert 0 < found.usual_error < 0.1


def test_the_shape_that_fits_worst_is_named() -> None:
    odd = Shape(prompts=1, tokens=64)
    measured = {s: cost_s(TRUE, s) * (3.0 if s == odd else 1.0) for s in GRID}
    assert fit(measured).worst.shape == odd


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit({Shape(prompts=1, tokens=16): 0.1})


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=4, max_size=8),
    st.lists(st.floats(-5, 5), min_size=3, max_size=3),
)
def test_no_number_is_negative_and_none_nearby_is_better(
    rows: list[list[float]], truth: list[float]
) -> None:
    matrix = np.array(rows)
    target = matrix @ np.array(truth)
    found = nnls(matrix, target)
    assert (found >= 0).all()
    off = float(np.linalg.norm(matrix @ found - target))
    for place in range(3):
        for step in (-0.01, 0.01):
            other = found.copy()
            other[place] = max(0.0, other[place] + step)
            assert off <= float(np.linalg.norm(matrix @ other - target)) + 1e-6


def test_the_grid_has_each_kind_of_step_and_none_beyond_the_longest() -> None:
    assert {bool(s.decoding) + 2 * bool(s.prompts) for s in GRID} == {1, 2, 3}
    assert all(s.start + s.tokens <= 2048 and s.context <= 2048 for s in GRID)
    assert all(s.prompt_tokens <= 512 and s.decoding <= 32 for s in GRID)
    assert len(set(GRID)) == len(GRID)
    assert doubled(16, 100) == [16, 32, 64, 100]
    small = grid(64, 1, 100)
    assert all(s.start + s.tokens <= 100 and s.start >= 0 for s in small)


def test_a_step_is_what_its_shape_says() -> None:
    runner = NullRunner(16)
    ticks = iter(range(100))
    steps = Steps(runner, 64, lambda: float(next(ticks)))
    assert steps.seconds(Shape(3, 40, 2, 16, 32), 3) == 1.0
    batch = list(steps.batch(Shape(3, 40, 2, 16, 32)))
    seen = [(one.start, len(one.tokens)) for one in batch]
    assert seen == [(39, 1)] * 3 + [(32, 16)] * 2
    blocks = [block for one in batch for block in one.blocks]
    assert len(blocks) == len(set(blocks)) == Shape(3, 40, 2, 16, 32).blocks(16)


def test_what_else_runs_in_some_rounds_does_not_count() -> None:
    shapes = GRID[:2]
    quiet, disturbed = [1.0, 2.0], [9.0, 9.0]
    rounds = Rounds(shapes, [quiet, quiet, disturbed, quiet], [[0.8, 1.6]] * 2)
    assert rounds.crowd == pytest.approx(1.25)
    assert rounds.measured() == {shapes[0]: pytest.approx(0.8), shapes[1]: pytest.approx(1.6)}


def test_workers_have_cores_of_their_own_but_not_every_one_is_measured() -> None:
    config = check(NodeConfig, {"model": {"path": "/m"}, "device": {"threads": 2}}, "here")
    asked = Asked(name="m", config=config, cores=range(64), kv_bytes=1 << 20)
    assert (asked.at_once, asked.processes) == (32, 8)
    assert list(asked.share(3)) == [6, 7]
    assert machine(asked, 1.25).crowd == ((1, 1.0), (8, 1.25))
    sleeping = check(NodeConfig, {"model": {"path": "null"}, "device": {"threads": 1}}, "here")
    other = Asked(name="null", config=sleeping, cores=range(4), kv_bytes=1 << 20)
    assert other.at_once == 1
    assert machine(other, 1.0).cores == 0


def test_rounds_that_differ_are_told() -> None:
    steady, slowed = [[1.0, 2.0]] * 4, [[1.0, 2.0]] * 2 + [[3.0, 6.0]] * 2
    assert Rounds(GRID[:2], steady).unrest == 1.0
    assert Rounds(GRID[:2], slowed).unrest == 3.0


def test_one_worker_has_no_crowd() -> None:
    assert Rounds(GRID[:1], [[1.0]]).crowd == 1.0


def test_requests_and_tokens_are_told_apart_by_two_loads() -> None:
    ran = Ran((), 1.0, 0.0)
    short, long = Used(ran, 64, 64, 64 * 2e-3 + 64 * 1e-4), Used(ran, 16, 768, 0.032 + 0.0768)
    seen = overheads.seen([0.03], [0.021], short, long)
    assert seen.request_cpu_ms == pytest.approx(2.0)
    assert seen.token_cpu_ms == pytest.approx(0.1)


def test_half_of_the_way_is_a_requests_and_work_is_not_counted_twice() -> None:
    together, apart = Seen(30.0, 21.0, 2.0, 0.5), Seen(37.0, 21.0, 4.0, 0.5)
    found = overheads.overheads(together, apart)
    assert found.step_ms == pytest.approx(1.0)
    assert found.handshake_ms == pytest.approx(5.0)  # one of the 7 ms is work
    assert found.cpu_ms == pytest.approx(3.0)
    whole = found.front_ms + found.cpu_ms + found.token_ms + found.token_cpu_ms
    assert whole == pytest.approx(9.0 + 1.0)


def test_a_written_cost_is_read_as_it_was(tmp_path: Path) -> None:
    cost = Cost.model_validate(
        {
            "name": 'a "quoted" one',
            "about": "for tests",
            "model": {"kv_bytes_per_token": 7},
            "instance": {"kv_tokens": 4096, "chunked": False},
            "step": TRUE.model_dump(),
            "transfer": {"curve": [(16384.0, 1.5, 20.0, 90.0)], "cpu_share": 1.0},
            "machine": {"cores": 2, "crowd": [(1, 1.0), (2, 1.07)]},
        }
    )
    file = tmp_path / "mine.toml"
    cost_file.write(cost, file)
    assert load(str(file)) == cost
    assert "request" in tomllib.loads(file.read_text())


def test_a_place_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        CliRunner().invoke(
            app,
            ["bench", "calibrate", "--model", "null", "--out", "/nowhere/a.toml"],
            catch_exceptions=False,
            standalone_mode=False,
        )
    with pytest.raises(ConfigError, match="--longest"):
        CliRunner().invoke(
            app,
            ["bench", "calibrate", "--longest", "64", "--out", str(tmp_path / "a.toml")],
            catch_exceptions=False,
            standalone_mode=False,
        )


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_machine_is_measured_from_steps_to_the_file(tmp_path: Path) -> None:
    """Real processes on the null device: steps cost little, but all that is written is there."""
    config = check(
        NodeConfig,
        {"model": {"path": "null"}, "device": {"threads": 1, "step_ms": 1.0}},
        "here",
    )
    asked = Asked(
        name="null",
        config=config,
        cores=(0, 1),
        kv_bytes=1 << 20,
        longest=1024,
        most=4,
        seconds=2.0,
    )
    file, points = tmp_path / "null.toml", tmp_path / "steps.json"
    ground = Ground(Wanted(), config, process_environ(), (0, 1))
    told = io.StringIO()
    status = calibrate(asked, ground, file, Report(str(points)), Console(file=told))
    assert status == 0
    cost = load(str(file))
    assert cost.machine.cores == 0  # the device is not the CPU
    assert cost.step.base_ms >= 1.0
    assert cost.request.token_cpu_ms > 0
    assert cost.transfer.curve[0][0] == 16384
    assert "at worst" in told.getvalue()
    found = json.loads(points.read_text())
    assert {"decoding", "measured_ms", "fitted_ms", "error"} <= set(found[0])


def test_overheads_are_told_in_the_files_words() -> None:
    told = overheads.told(Overheads(1.0, 2.0, 3.0, 4.0, 0.5, 6.0))
    assert set(told) == {"front_ms", "handshake_ms", "token_ms", "cpu_ms", "token_cpu_ms"}
