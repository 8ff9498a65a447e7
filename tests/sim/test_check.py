"""Comparing the simulator with measured points: what is near, and who is named best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pdrt.bench import cost_file
from pdrt.errors import ConfigError
from pdrt.sim.check import (
    METRICS,
    Comparison,
    Pair,
    compare,
    predicted,
    workload_of,
)
from pdrt.sim.check_command import check
from pdrt.sim.check_words import json_of, lines
from pdrt.sim.measured import read_points
from tests.sim.test_plan import cost

COST = cost(base_ms=10.0, token_us=100.0)


def point(layout: str, **told: Any) -> dict[str, Any]:
    usual = {
        "layout": layout,
        "workers": 2,
        "input_len": 64,
        "output_len": 8,
        "completed": 6,
        "output_tok_per_s": 100.0,
        "ttft_ms": {"p50": 50.0},
        "itl_ms": {"p50": 10.0},
    }
    return usual | told


def test_points_that_the_simulator_made_are_met_exactly() -> None:
    made = [{**point(name), **predicted(COST, point(name))} for name in ("dp", "route2", "1P1D")]
    found = compare(COST, made)
    assert found.near() == 1.0
    assert max(abs(e) for metric in METRICS for e in found.errors(metric)) < 1e-9
    assert all(one.is_same for one in found.winners())


def test_a_slower_machine_shows_as_an_error_of_each_figure() -> None:
    made = [{**point("route2"), **predicted(COST, point("route2"))}]
    found = compare(cost(base_ms=20.0, token_us=200.0), made)
    throughput, ttft, itl = (found.errors(metric)[0] for metric in METRICS)
    assert throughput == pytest.approx(-0.5, abs=0.01)
    assert ttft == itl == pytest.approx(1.0, abs=0.01)
    assert found.near() == 0.0


def test_the_one_that_is_named_is_judged_by_what_was_measured() -> None:
    a, b = point("dp", output_tok_per_s=100.0), point("route2", output_tok_per_s=97.0)
    pairs = [Pair(a, {**a, "output_tok_per_s": 90.0}), Pair(b, {**b, "output_tok_per_s": 95.0})]
    throughput, *_ = Comparison(pairs).winners()
    assert (throughput.measured, throughput.predicted) == ("dp", "route2")
    assert not throughput.is_same
    assert throughput.is_as_good
    assert throughput.loss == pytest.approx(0.03)


def test_answers_of_one_token_have_no_gaps_to_compare() -> None:
    single = point("dp", output_len=1, itl_ms=None)
    found = compare(COST, [single])
    assert found.errors(METRICS[2]) == []
    assert any("tok/s" in line for line in lines(found))


def test_a_point_says_what_was_asked_for() -> None:
    assert workload_of(point("dp")).concurrency == 0
    assert {r.at for r in workload_of(point("dp", rate="inf")).requests} == {0.0}
    assert workload_of(point("dp", rate=5.0, requests=7)).requests[-1].at > 0
    assert workload_of(point("dp", concurrency=3, rate=None)).concurrency == 3
    assert len(workload_of(point("dp", requests=9)).requests) == 9


def test_folders_and_lists_are_read_and_what_is_no_point_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(point("route2")))
    (tmp_path / "b.json").write_text(json.dumps([point("dp")]))
    assert [p["layout"] for p in read_points(tmp_path)] == ["dp", "route2"]
    assert read_points(tmp_path / "a.json")[0]["layout"] == "route2"
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"c\.json"):
        read_points(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no points"):
        read_points(tmp_path / "empty")


def test_layouts_that_the_simulator_calls_equal_are_both_named() -> None:
    a, b = point("dp", output_tok_per_s=80.0), point("route2", output_tok_per_s=100.0)
    pairs = [Pair(a, {**a, "output_tok_per_s": 90.0}), Pair(b, {**b, "output_tok_per_s": 89.5})]
    throughput, *_ = Comparison(pairs).winners()
    assert throughput.is_same


def test_what_was_measured_several_times_is_the_median(tmp_path: Path) -> None:
    several = [point("dp", output_tok_per_s=rate) for rate in (10.0, 90.0, 20.0)]
    (tmp_path / "a.json").write_text(json.dumps([*several, point("route2")]))
    one, other = read_points(tmp_path)
    assert (one["output_tok_per_s"], one["times"]) == (20.0, 3)
    assert one["ttft_ms"]["p50"] == 50.0
    assert other["layout"] == "route2"


def test_the_command_prints_points_and_the_summary(tmp_path: Path) -> None:
    file, told = tmp_path / "mine.toml", tmp_path / "told.json"
    cost_file.write(COST, file)
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / "a.json").write_text(json.dumps(point("1P1D")))
    app = typer.Typer()
    app.command()(check)
    options = [str(tmp_path / "points"), "--cost", str(file), "--json", str(told)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "1P1D" in result.output
    assert "within 15%" in result.output
    assert json.loads(told.read_text())["points"][0]["layout"] == "1P1D"


def test_json_has_points_and_winners() -> None:
    found = json_of(compare(COST, [point("dp"), point("route2")]))
    assert len(found["points"]) == 2
    assert {one["metric"] for one in found["winners"]} == {metric.name for metric in METRICS}


@pytest.mark.parametrize("wrong", [{"workers": "x"}, {"rate": [1]}, {"rate": 2, "concurrency": 2}])
def test_a_point_that_no_sweep_writes_is_refused_with_its_file(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps({**point("dp"), **wrong}))
    with pytest.raises(ConfigError, match=r"odd\.json"):
        read_points(file)
