"""Plans on machines that are invented so that what is best can be proved."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdrt.bench import cost_file
from pdrt.cli import app
from pdrt.errors import ConfigError
from pdrt.sim.arrangement import Arrangement, apart
from pdrt.sim.cost import Cost
from pdrt.sim.plan import Candidate, Plan, Search, Wanted, candidates, hybrids, scaled, search
from pdrt.sim.plan_words import json_of, verdict
from pdrt.sim.tally import Good
from pdrt.sim.workload import Arrivals

EASY = Good(math.inf, math.inf)
ALL_AT_ONCE = Arrivals()


def cost(**step: Any) -> Cost:
    """A step takes what is said here; memory is never short and moves at once."""
    return Cost.model_validate(
        {
            "name": "invented",
            "about": "for tests",
            "model": {"kv_bytes_per_token": 1},
            "instance": {"kv_tokens": 1_000_000, "max_batch_size": 256},
            "step": step,
        }
    )


def wanted(**told: Any) -> Wanted:
    usual: dict[str, Any] = {
        "input": "64",
        "output": "16",
        "arrivals": ALL_AT_ONCE,
        "good": EASY,
        "workers": 4,
        "requests": 48,
        "chunks": (128,),
    }
    return Wanted(**(usual | told))


def best(found: Plan) -> str:
    return found.best.candidate.name


def test_with_free_prompts_one_worker_computes_them_and_the_others_decode() -> None:
    """Apart, who decodes is the scarce one; together all do, so nothing is gained by a split."""
    found = search(cost(decode_ms=[[1, 1.0]]), wanted())
    goodput = {one.candidate.name: one.goodput for one in found.each}
    assert goodput["1P3D"] > goodput["2P2D"] > goodput["3P1D"]
    assert goodput["route4"] == pytest.approx(goodput["1P3D"] * 4 / 3, rel=0.05)
    assert found.chosen.candidate.name == "route4"
    assert not found.is_apart_better


def test_when_prompts_are_all_there_is_one_worker_decodes() -> None:
    found = search(cost(token_us=100.0), wanted())
    goodput = {one.candidate.name: one.goodput for one in found.each}
    assert goodput["3P1D"] > goodput["2P2D"] > goodput["1P3D"]


def test_a_step_that_prompts_do_not_lengthen_leaves_nothing_to_keep_apart() -> None:
    """All steps last as long: apart only means fewer workers for each phase."""
    found = search(cost(base_ms=10.0), wanted(arrivals=Arrivals(40.0), good=Good(0.5, 0.015)))
    assert found.chosen.candidate.name == "route4"
    assert found.route.misses.itl == 0.0
    assert "Do not disaggregate" in verdict(found)[0]


def test_long_prompts_with_a_tight_limit_between_tokens_are_kept_apart() -> None:
    """A chunk of 128 takes 64 ms, and a token of those who decode may take 20."""
    tight = wanted(
        input="512",
        output="128",
        arrivals=Arrivals(3.0),
        good=Good(5.0, 0.020),
        workers=4,
    )
    found = search(cost(base_ms=5.0, token_us=500.0), tight)
    assert found.best.candidate.arrangement.is_apart
    assert found.is_apart_better
    assert found.best.is_enough
    assert found.route.misses.itl > 0.2
    lines = verdict(found)
    assert lines[0].startswith(f"Disaggregate: {best(found)}")
    assert "gaps between tokens that are too long" in " ".join(lines)


def test_a_small_chunk_is_found_where_it_keeps_the_limit_together() -> None:
    tight = wanted(input="512", output="64", good=Good(5.0, 0.030), chunks=(32, 512))
    found = search(cost(base_ms=5.0, token_us=500.0), tight)
    assert found.route.candidate.chunk == 32
    assert {c.chunk for c in (one.candidate for one in found.tried)} >= {32, 512}


def test_where_nothing_keeps_the_limits_it_says_how_many_workers_would() -> None:
    slow = wanted(input="500", output="2", arrivals=Arrivals(30.0), good=Good(0.2, 1.0), workers=2)
    found = search(cost(token_us=200.0), slow)
    assert not found.best.is_enough
    assert found.needed is not None
    assert found.needed.is_enough
    workers = found.needed.candidate.arrangement.workers
    assert 3 <= workers <= 8
    text = " ".join(verdict(found))
    assert "Nothing keeps the limits" in text
    assert f"{workers} workers would be enough" in text


def test_limits_that_no_request_can_keep_are_told_from_too_few_workers() -> None:
    found = search(cost(token_us=1000.0), wanted(good=Good(0.01, 1.0), workers=2))
    assert found.needed is None
    assert "More workers do not help" in verdict(found)[-1]


def test_workers_that_would_share_the_same_cores_are_not_asked_for() -> None:
    tables = cost(token_us=200.0).model_dump() | {"machine": {"cores": 2}}
    slow = wanted(input="500", output="2", arrivals=Arrivals(30.0), good=Good(0.2, 1.0), workers=2)
    found = search(Cost.model_validate(tables), slow)
    assert found.needed is None
    assert "share the same cores" in verdict(found)[-1]


def test_every_ratio_and_every_way_together_is_tried() -> None:
    names = {c.name for c in candidates(cost(), 5)}
    assert names == {"dp", "route5", "1P4D", "2P3D", "3P2D", "4P1D"}
    assert [(h.name, h.dp) for h in hybrids(8)] == [("route8", 1), ("route2", 4), ("dp", 8)]
    assert [h.name for h in hybrids(2)] == ["route2", "dp"]


def test_a_shape_keeps_its_ratio_with_more_workers() -> None:
    wide = scaled(Candidate(apart(1, 3), 512), 8)
    assert [c.name for c in wide] == ["1P7D", "2P6D", "3P5D"]
    assert [c.name for c in scaled(Candidate(Arrangement("dp", 1, 4), 64), 6)] == ["route6"]


def test_one_worker_is_nothing_to_plan() -> None:
    with pytest.raises(ConfigError, match="--workers 1"):
        wanted(workers=1)


STEPS = st.fixed_dictionaries(
    {
        "base_ms": st.floats(0.5, 20),
        "token_us": st.floats(0, 300),
        "context_ns": st.floats(0, 200),
    }
)
LOADS = st.fixed_dictionaries(
    {
        "input": st.sampled_from(["16", "64..256", "512"]),
        "output": st.sampled_from(["1", "8..24"]),
        "arrivals": st.sampled_from([ALL_AT_ONCE, Arrivals(5.0)]),
        "good": st.sampled_from([EASY, Good(0.5, 0.03)]),
        "requests": st.just(24),
    }
)


@settings(max_examples=8, deadline=None)
@given(STEPS, LOADS, st.integers(2, 4))
def test_nothing_that_was_tried_is_better_than_the_best(
    step: dict[str, float], load: dict[str, Any], workers: int
) -> None:
    found = Search(cost(**step), wanted(**load, workers=workers)).plan(look_further=False)
    assert found.best.goodput >= max(one.goodput for one in found.tried) - 1e-9
    assert {one.candidate for one in found.tried} == set(candidates(cost(**step), workers, (128,)))
    assert found.chosen.goodput >= found.best.goodput / 1.06
    assert json.loads(json.dumps(json_of(found)))["best"]["layout"] == best(found)


@settings(max_examples=5, deadline=None)
@given(STEPS, LOADS)
def test_twice_the_workers_are_never_worse(step: dict[str, float], load: dict[str, Any]) -> None:
    few, many = (
        Search(cost(**step), wanted(**load, workers=n)).plan(look_further=False) for n in (2, 4)
    )
    assert many.best.goodput >= few.best.goodput * 0.98  # one request may meet another's chunk


def test_the_command_says_what_to_run_and_why(tmp_path: Path) -> None:
    file, told = tmp_path / "mine.toml", tmp_path / "plan.json"
    cost_file.write(cost(base_ms=5.0, token_us=500.0), file)
    options = ["--input-len", "512", "--output-len", "128", "--rate", "3", "--workers", "4"]
    limits = ["--ttft", "5000", "--itl", "20", "--requests", "32", "--chunk", "128"]
    run = ["plan", "--cost", str(file), *options, *limits, "--json", str(told)]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    assert "Disaggregate:" in result.output
    assert "route4" in result.output
    found = json.loads(told.read_text())
    assert found["disaggregate"] is True
    assert found["best"]["good_share"] >= 0.95


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "0"], "--rate 0"),
        (["--rate", "1", "--input-len", "many"], "'many'"),
        (["--rate", "1", "--chunk", "big"], "--chunk 'big'"),
        (["--rate", "1", "--plot", "a.txt"], "--plot a.txt"),
        (["--rate", "1", "--cost", "nowhere"], "--cost nowhere"),
        (["--rate", "1", "--json", "/nowhere/a.json"], "no directory"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    options: list[str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    cost_file.write(cost(base_ms=1.0), file)
    usual = {"--input-len": "8", "--output-len": "8", "--workers": "2", "--cost": str(file)}
    given_ = dict(zip(options[::2], options[1::2], strict=True))
    line = [part for pair in (usual | given_).items() for part in pair]
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["plan", *line], catch_exceptions=False, standalone_mode=False)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pdrt.sim.plan_plot import draw

    picture = tmp_path / "plan.svg"
    draw(search(cost(base_ms=1.0), wanted(requests=8)), str(picture))
    assert "<svg" in picture.read_text()


def test_what_no_worker_has_room_for_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="a request needs KV of 1000002 tokens"):
        search(cost(base_ms=1.0), wanted(input="1000000..1000000", output="2"))


def test_chunk_sizes_that_are_asked_for_are_those_of_every_arrangement() -> None:
    found = candidates(cost(base_ms=1.0), 2, [128])
    assert {each.chunk for each in found} == {128}
