"""`pdrt sim sweep`: points in a folder, kept from run to run, as those of `pdrt bench sweep`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdrt.cli import app
from pdrt.errors import ConfigError

SMALL = ("--requests", "20", "--inputs", "64,128", "--outputs", "8,16", "--at-input", "64")


def sweep(folder: Path, *options: str) -> str:
    command = ["sim", "sweep", *SMALL, "--at-output", "8", "--folder", str(folder), *options]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_each_layout_has_a_point_for_each_length(tmp_path: Path) -> None:
    told = sweep(tmp_path / "points", "--json", str(tmp_path / "all.json"))
    points = json.loads((tmp_path / "all.json").read_text())
    assert len(points) == 5 * 3  # the length that both sweeps have is there once
    assert {point["layout"] for point in points} == {"dp", "route2", "route4", "1P3D", "2P2D"}
    for point in points:
        assert point["completed"] == 20
        assert point["workers"] == 4
        assert point["cost"] == "efa-deepseek-v2-lite"
    assert len(list((tmp_path / "points").glob("*.json"))) == 15
    assert "route4" in told
    assert "best" in told


def test_a_point_that_lies_there_is_kept(tmp_path: Path) -> None:
    sweep(tmp_path, "--quiet", "--layouts", "route4")
    file = next(tmp_path.glob("*.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"requests_per_s": 12345.0}))
    kept = sweep(tmp_path, "--layouts", "route4,1P3D")
    assert "12345" in kept
    assert len(list(tmp_path.glob("*.json"))) == 6


def test_points_of_another_machine_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    sweep(tmp_path, "--quiet", "--layouts", "route4")
    with pytest.raises(ConfigError, match="cost_digest"):
        sweep(tmp_path, "--quiet", "--layouts", "route4", "--chunk", "64")


def test_with_quiet_nothing_is_said(tmp_path: Path) -> None:
    assert sweep(tmp_path, "--quiet", "--layouts", "2P2D") == ""


def test_what_is_no_machine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        sweep(tmp_path, "--cost", "nowhere")
