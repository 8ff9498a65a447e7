"""Figures are medians over rounds, and a ratio compares turns of one round."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from pdrt.bench import plot
from pdrt.bench.cases import Case
from pdrt.bench.results import Results, Turn, points
from pdrt.bench.shell import write_points
from pdrt.bench.table import show
from pdrt.errors import ConfigError

CASE = Case(1 << 20, 64)


def turn(gb_per_s: float, batches: int = 1) -> Turn:
    return Turn(batches * 10**9, (1 / gb_per_s,) * batches)


def results(**ways: list[float]) -> Results:
    found = Results({"cores": 2, "kernel": "test"}, where="here to there")
    for way, rates in ways.items():
        for rate in rates:
            found.add(way, CASE, turn(rate))
    return found


def test_a_load_that_meets_a_whole_round_does_not_change_the_ratio() -> None:
    found = results(memcpy=[10, 1, 12], shm=[9, 0.9, 10.8])
    shm = found.get(CASE, "shm")
    assert shm is not None
    assert found.of(shm, "memcpy") == pytest.approx(0.9)
    assert shm.gb_per_s == pytest.approx(9)


def test_tcp_is_compared_with_the_better_plain_loop() -> None:
    found = results(memcpy=[10], sendall=[2], sendmsg=[4], tcp=[3])
    (point,) = [p for p in points(found) if p["transport"] == "tcp"]
    assert point["of_memcpy"] == pytest.approx(0.3)
    assert point["of_plain_loop"] == pytest.approx(0.75)
    assert "of_plain_loop" not in points(found)[0]


def test_latencies_are_of_all_writes_of_all_rounds() -> None:
    found = Results({})
    found.add("shm", CASE, Turn(1, tuple(n / 1e6 for n in range(1, 51))))
    found.add("shm", CASE, Turn(1, tuple(n / 1e6 for n in range(51, 101))))
    shm = found.get(CASE, "shm")
    assert shm is not None
    assert shm.avg_us == pytest.approx(50.5)
    assert shm.quantile_us(0.99) == pytest.approx(100)
    assert shm.quantile_us(0.5) == pytest.approx(51)


def test_points_have_the_documented_keys_and_what_each_round_counted(tmp_path: Path) -> None:
    write_points(str(tmp_path / "x.json"), points(results(memcpy=[10, 11], shm=[9, 9])))
    found = json.loads((tmp_path / "x.json").read_text())
    assert [point["transport"] for point in found] == ["memcpy", "shm"]
    for point in found:
        assert {"block_bytes", "batch", "gb_per_s", "avg_us", "p99_us"} <= point.keys()
        assert point["machine"] == {"cores": 2, "kernel": "test"}
        assert [each["bytes"] for each in point["rounds"]] == [10**9, 10**9]
    assert found[1]["of_memcpy"] == pytest.approx((0.9 + 9 / 11) / 2)


def test_the_tables_show_every_way_its_share_and_why_one_is_missing() -> None:
    found = results(memcpy=[10], sendall=[2], sendmsg=[4], tcp=[3], shm=[9])
    found.refused["nixl"] = "pip install pdrt[nixl]"
    out = io.StringIO()
    show(Console(file=out, width=80), found)
    text = out.getvalue()
    rates, shares, latencies = re.findall(r"1 MiB x64 +(.+?) *$", text, re.M)
    assert rates.split() == ["10.00", "4.00", "3.00", "9.00"]
    assert shares.split() == ["0.40", "0.30", "0.90", "0.75"]  # the last one: tcp of plain
    assert latencies.split()[:2] == ["100/100ms", "250/250ms"]
    assert "nixl is not measured: pip install pdrt[nixl]" in text
    assert "tcp of plain: tcp as a share of the plain loop" in text
    assert "here to there; cores 2; kernel test" in text


@pytest.mark.parametrize(
    ("took_us", "cell"),
    [
        ((46,), "46/46us"),
        ((2.345,), "2.3/2.3us"),
        ((999.7,), "1/1ms"),
        ((1100, 1100, 4200), "2.1/4.2ms"),
        ((46, 46, 46, 46, 4200), "0.88/4.2ms"),
    ],
)
def test_latencies_are_in_microseconds_or_milliseconds(
    took_us: tuple[float, ...], cell: str
) -> None:
    found, out = Results({}), io.StringIO()
    found.add("shm", CASE, Turn(10**7, tuple(us / 1e6 for us in took_us)))
    show(Console(file=out, width=80), found)
    assert f" {cell}" in out.getvalue()


@pytest.mark.parametrize("batch", [1, 64])
def test_the_tables_of_all_ways_fit_eighty_columns(batch: int) -> None:
    found = Results({})
    for way in ("memcpy", "sendall", "sendmsg", "shm", "tcp", "nixl", "mooncake"):
        found.add(way, Case(64 << 20, batch), Turn(10**7, (0.3456,)))
        found.add(way, Case(512 << 10, batch), Turn(10**7, (0.0001234,)))
    out = io.StringIO()
    show(Console(file=out, width=80), found)
    assert "…" not in out.getvalue()
    assert "346/346ms" in out.getvalue()
    assert "123/123us" in out.getvalue()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn_where_matplotlib_is(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pdrt[plot]'")
    found = results(memcpy=[10], shm=[9])
    found.add("shm", Case(4096, 1), turn(1))
    file = tmp_path / f"x.{suffix}"
    plot.draw(found, str(file))
    assert file.stat().st_size > 1000


def test_without_matplotlib_a_plot_is_refused_with_the_pip_command() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'pdrt\[plot\]'"):
        plot.check_matplotlib(lambda _name: None)
