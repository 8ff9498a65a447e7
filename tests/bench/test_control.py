"""Tiny runs of `pdrt bench control`: real managers in two processes, and what a tick costs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pdrt.bench import ticks
from pdrt.bench.control import both_ends, control
from pdrt.bench.shell import Report
from pdrt.bench.ticks import Point
from pdrt.data.memory import PoolMemory
from pdrt.messages import KvLayout


@pytest.mark.e2e
def test_the_report_has_passages_ticks_and_descriptions(tmp_path: Path) -> None:
    out, file = io.StringIO(), tmp_path / "x.json"
    assert control(70, Report(json_file=str(file)), Console(file=out, width=120)) == 0
    points = json.loads(file.read_text())
    assert [point["what"] for point in points][:3] == [
        "room minted to decode may run, 1 at once",
        "room minted to decode may run, 64 at once",
        "poll 512 waiting slots",
    ]
    assert [point["count"] for point in points[:2]] == [70, 70]
    for point in points:
        assert 0 < point["p50_us"] <= point["p99_us"] <= point["max_us"]
        assert "cores" in point["machine"]
        assert point["what"] in out.getvalue()


@pytest.mark.e2e
async def test_rooms_that_are_open_at_once_have_places_of_their_own() -> None:
    async with both_ends() as decode:
        assert len(await decode.passages(130, 64)) == 130
        assert decode.end.manager.stats().counters["receives_done"] == 130
        assert decode.end.manager.stats().counters["slots_stale"] == 0


def test_every_slot_is_waited_for_while_polling_is_timed() -> None:
    tiny = KvLayout(block_size=1, dtype="uint8", layers=1, kv_heads=1, head_dim=1)
    memory = PoolMemory(tiny, 1, ticks.SLOTS)
    scan = ticks.polling(memory)
    assert scan() == []
    memory.slots_view[:] = b"\x01" * len(memory.slots_view)  # candidates all, and none is valid
    assert scan() == []
    memory.close()


def test_neighbours_are_described_once_and_scattered_blocks_one_by_one() -> None:
    writes = ticks.describing(1)(), ticks.describing(7)(), ticks.describing(1, 2)()
    assert [len(write.runs) for write in writes] == [1, 512, 512]
    together, scattered, half = (write.size for write in writes)
    assert together == scattered == 2 * half


def test_a_point_is_of_all_its_times() -> None:
    point = Point.of("x", [float(n) for n in range(100, 0, -1)])
    assert point == Point("x", 100, 51.0, 100.0, 100.0)
    assert Point.of("x", [3.0]) == Point("x", 1, 3.0, 3.0, 3.0)
