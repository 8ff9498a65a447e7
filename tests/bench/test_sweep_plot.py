"""Pictures of a sweep: which panels there are, who has which line, and that they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrt.bench.sweep_plot import PICTURES, Panel, Point, draw, layouts, looks, panels

LAYOUTS = ("route4", "2P2D", "dp", "1P3D", "route2")
SPEED = {"route4": 1.0, "route2": 0.9, "dp": 0.8, "1P3D": 0.7, "2P2D": 0.5}


def point(layout: str, input_len: int, output_len: int) -> Point:
    """Slower with longer prompts and answers."""
    cost = (input_len + 8 * output_len) / SPEED[layout]
    return {
        "layout": layout,
        "workers": 4,
        "input_len": input_len,
        "output_len": output_len,
        "requests_per_s": 4e4 / cost,
        "output_tok_per_s": 4e4 / cost * output_len,
        "ttft_ms": {"mean": cost / 2, "p50": cost / 3, "p90": cost, "p99": 2 * cost},
        "itl_ms": {"mean": 5 + cost / 500, "p50": 4.0, "p90": 9.0, "p99": 20.0},
    }


def sweep() -> list[Point]:
    lengths = [(n, 256) for n in (128, 256, 512, 1024, 2048, 4096)]
    lengths += [(512, n) for n in (32, 64, 128, 512, 1024)]
    return [point(layout, *each) for layout in LAYOUTS for each in lengths]


def test_a_panel_has_the_lengths_at_which_most_was_measured() -> None:
    assert panels(sweep()) == [
        Panel("input_len", "output_len", 256, (128, 256, 512, 1024, 2048, 4096)),
        Panel("output_len", "input_len", 512, (32, 64, 128, 256, 512, 1024)),
    ]
    assert panels([]) == []
    assert panels([{"layout": "dp", "input_len": "1..9", "output_len": "4"}]) == []


def test_the_point_that_both_sweeps_have_is_in_both_panels() -> None:
    inputs, outputs = panels(sweep())
    picture = PICTURES[1]
    assert (512, picture.value(point("dp", 512, 256))) in inputs.line(sweep(), "dp", picture)
    assert (256, picture.value(point("dp", 512, 256))) in outputs.line(sweep(), "dp", picture)


def test_a_line_goes_by_length_and_leaves_out_what_was_not_measured() -> None:
    points = [*reversed(sweep()), {**point("dp", 8192, 256), "ttft_ms": None}]
    panel, _ = panels(points)
    line = panel.line(points, "dp", PICTURES[2])
    assert [length for length, _ in line] == [128, 256, 512, 1024, 2048, 4096]
    assert line[0][1] == pytest.approx((128 + 8 * 256) / 0.8 / 2)


def test_layouts_keep_their_places_whatever_comes_first() -> None:
    expected = ["dp", "route2", "route4", "1P3D", "2P2D"]
    assert layouts(sweep()) == layouts(sweep()[::-1]) == expected


def test_a_kind_of_layout_looks_alike_however_many_workers_there_are() -> None:
    four = {"dp": 0, "route2": 1, "route4": 2, "1P3D": 3, "2P2D": 4}
    assert looks(["dp", "route2", "route4", "1P3D", "2P2D"]) == four
    assert looks(["dp", "route2", "1P1D"]) == {"dp": 0, "route2": 1, "1P1D": 3}
    assert looks(["route8"]) == {"route8": 1}
    many = looks([f"{n}P{9 - n}D" for n in range(1, 9)])
    assert list(many.values()) == [3, 4, 5, 6, 0, 1, 2, 0]


def test_four_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pdrt[plot]'")
    files = draw(sweep(), tmp_path / "new")
    assert [file.name for file in files] == [
        "output_throughput.png",
        "request_throughput.png",
        "ttft.png",
        "itl.png",
    ]
    assert all(file.stat().st_size > 10_000 for file in files)
    assert draw([], tmp_path / "none") == []


def test_what_nobody_measured_is_an_empty_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pdrt[plot]'")
    points = [{**point("dp", 64, 1), "itl_ms": None}, {**point("1P3D", 64, 1), "itl_ms": None}]
    assert len(draw(points, tmp_path)) == 4


def test_of_two_lengths_with_as_many_points_the_one_that_was_meant_is_shown() -> None:
    points = [point("dp", 16, 8), point("dp", 32, 8)]
    _, outputs = panels(points, (16, 8))
    assert (outputs.at, outputs.lengths) == (16, (8,))
